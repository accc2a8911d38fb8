"""``shardformer train``: the command starts the processes that the layout is for, and can tell what they will hold."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from shardformer.cli import main
from shardformer.cli.train import _count
from shardformer.engine.parallel import Parallel
from shardformer.errors import ConfigError
from shardformer.trainer.records import read_records
from tests.runs.files import write_text
from tests.scripts import SHARDFORMER

RUN = """
[model]
name = "gpt2"
random = true
config = { n_embd = 16, n_layer = 2, n_head = 2 }
[data]
train = "text.txt"
sequence = 16
batch_size = 4
[training]
steps = 4
export = true
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_text(tmp_path)
    (tmp_path / "run.toml").write_text(RUN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def started(*options: str) -> subprocess.CompletedProcess[str]:
    command = [*SHARDFORMER, "train", "--config", "run.toml", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_two_processes_train_and_one_goes_on(folder: Path) -> None:
    first = started("--set", "parallel.tensor=2")
    assert first.returncode == 0, first.stderr
    assert re.search(r"^step 4/4  loss \d", first.stdout, re.M)
    assert (folder / "run/model/model.safetensors").is_file()
    again = started("--set", "training.steps=6")
    assert again.returncode == 0, again.stderr
    assert "goes on from step 4" in again.stdout
    assert [record.step for record in read_records(folder / "run")] == [1, 2, 3, 4, 5, 6]


def test_a_dry_run_trains_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["--set", "parallel.tensor=2", "--set", "parallel.pipe=2", "--set", "parallel.zero=1"]
    with pytest.raises(SystemExit) as ended:
        main(["train", "-c", "run.toml", "--dry-run", *changes])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "4 steps, over pipe 2, tensor 2" in said
    assert "Linear1D_Col" in said
    rows = re.findall(r"^ +([01]) +([01]) .* KB", said, re.M)
    assert rows == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert "?" not in said
    assert not (folder / "run").exists()


def test_the_number_of_processes_is_the_layout_s() -> None:
    assert _count(Parallel(tensor=2, pipe=2), None) == 4
    assert _count(Parallel(tensor=2), 4) == 4
    for layout, processes in ((Parallel(tensor=2), 3), (Parallel(tensor=2, data=1), 4)):
        with pytest.raises(ConfigError, match=r"--processes"):
            _count(layout, processes)
