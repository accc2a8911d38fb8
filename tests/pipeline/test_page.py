"""docs/pipeline.md and docs/schedules.md: the examples run, and the pictures and tables match the schedules."""

from __future__ import annotations

import os
import re
import subprocess
from itertools import takewhile
from pathlib import Path

import pytest

from shardformer.pipeline.schedule_chart import get_schedule_summary_lines
from shardformer.pipeline.schedules import SCHEDULES, make_schedule, simulate_schedule
from tests.pipeline.schedule_checks import grid_rows
from tests.scripts import SHARDFORMER

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "\n".join((DOCS / name).read_text(encoding="utf-8") for name in ("pipeline.md", "schedules.md"))
FILES = {
    text.split("\n", 1)[0].removeprefix("# "): text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
}
TEXTS = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
PICTURES = [text for text in TEXTS if text.startswith("# ")]


def _run(folder: Path, name: str) -> str:
    (folder / name).write_text(FILES[name], encoding="utf-8")
    command = [*SHARDFORMER, "run", "--nproc_per_node", "2", name]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PET_")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_page_has_all_examples() -> None:
    assert list(FILES) == ["train.py", "stages.py", "own_loss.py"]


@pytest.mark.slow
def test_example_trains_saves_and_prints_stages(tmp_path: Path) -> None:
    out = _run(tmp_path, "train.py")
    assert re.findall(r"^step (\d)  loss \d\.\d{3}$", out, re.MULTILINE) == ["0", "1", "2"]
    (shown,) = [text for text in TEXTS if text.startswith("LlamaForCausalLM over pipe=2")]
    assert shown in out
    assert (tmp_path / "runs" / "pipeline" / "model.safetensors").is_file()


@pytest.mark.slow
def test_stages_match_the_page(tmp_path: Path) -> None:
    _run(tmp_path, "stages.py")


@pytest.mark.slow
def test_custom_loss_is_equal_on_both_stages(tmp_path: Path) -> None:
    # two processes write to one pipe, so their outputs may share a line
    first, second = re.findall(r"\d\.\d\d?", _run(tmp_path, "own_loss.py"))
    assert first == second and float(first) > 0


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.split()[2])
def test_picture_matches_schedule(picture: str) -> None:
    head, *lines = picture.splitlines()
    _, _, name, _, stages, _, micro_batches = head.split()
    schedule = make_schedule(name, int(stages), int(micro_batches))
    timeline = simulate_schedule(schedule)
    assert lines == [*grid_rows(schedule, timeline), *get_schedule_summary_lines(schedule, timeline)]


def test_all_schedules_are_on_the_page() -> None:
    assert [picture.split()[2] for picture in PICTURES] == list(SCHEDULES)
    rows = takewhile(lambda line: line.startswith("|"), PAGE.split("| schedule | bubble")[1].splitlines()[2:])
    found = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in found] == list(SCHEDULES)
    for name, with_8, with_16, held, chunks, takes in found:
        few, many = make_schedule(name, 4, 8), make_schedule(name, 4, 16)
        assert (with_8, with_16) == tuple(f"{simulate_schedule(schedule).bubble:.1%}" for schedule in (few, many))
        assert float(held) == max(simulate_schedule(many).in_flight) / many.num_model_chunks
        assert chunks.startswith(str(many.num_model_chunks)) and (takes == "any number") == (
            not name.startswith("interleaved")
        )
