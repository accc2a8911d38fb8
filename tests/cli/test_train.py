"""``shardformer train``: starting the processes of a layout, and dry runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from shardformer.cli import main
from shardformer.cli.train import _num_processes
from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError
from shardformer.training.metrics_log import read_records
from tests.runs.files import write_text
from tests.scripts import SHARDFORMER

RUN = """
[model]
name = "gpt2"
random = true
config = { n_embd = 16, n_layer = 2, n_head = 2 }
[data]
train = "text.txt"
sequence_length = 16
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
def test_a_run_of_two_processes_resumes_with_one(folder: Path) -> None:
    first = started("--set", "parallel.tensor=2")
    assert first.returncode == 0, first.stderr
    assert re.search(r"^step 4/4  loss \d", first.stdout, re.M)
    assert (folder / "run/model/model.safetensors").is_file()
    again = started("--set", "training.steps=6")
    assert again.returncode == 0, again.stderr
    assert "resuming from step 4" in again.stdout
    assert [record.step for record in read_records(folder / "run")] == [1, 2, 3, 4, 5, 6]


def test_a_dry_run_does_not_train(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["--set", "parallel.tensor=2", "--set", "parallel.pipe=2", "--set", "parallel.zero_stage=1"]
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


@pytest.mark.parametrize("option", [("--processes", "1"), ("--max-restarts", "1"), ("--shutdown-timeout", "9")])
@pytest.mark.parametrize("how", ["dry", "launched", "alone"])
def test_process_options_raise_if_no_processes_are_started(
    option: tuple[str, str], how: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if how == "launched":
        monkeypatch.setenv("RANK", "0")
    if how == "alone" and option[0] == "--processes":
        return  # --processes 1 starts one process
    with pytest.raises(SystemExit) as ended:
        main(["train", "-c", "run.toml", *option, *(["--dry-run"] if how == "dry" else [])])
    assert ended.value.code == 2
    assert option[0] in capsys.readouterr().err
    assert not (folder / "run").exists()


def test_the_number_of_processes_must_match_the_layout() -> None:
    assert _num_processes(ParallelConfig(tensor=2, pipe=2), None) == 4
    assert _num_processes(ParallelConfig(tensor=2), 4) == 4
    for layout, processes in ((ParallelConfig(tensor=2), 3), (ParallelConfig(tensor=2, data=1), 4)):
        with pytest.raises(ConfigError, match=r"--processes"):
            _num_processes(layout, processes)


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_saves_and_prints_how_to_resume(folder: Path) -> None:
    (folder / "asks.py").write_text(
        "import pathlib, time, shardformer\n"
        "class Asks(shardformer.hooks.Hook):\n"
        "    def before_forward(self, trainer):\n"
        "        if trainer.step == 1:\n"
        "            pathlib.Path('begun').touch()\n"
        "            time.sleep(2)\n",
        encoding="utf-8",
    )
    (folder / "run.toml").write_text(f'{RUN}[hooks]\n"asks.py:Asks" = true\n', encoding="utf-8")
    command = [*SHARDFORMER, "train", "--config", "run.toml", "--set", "parallel.tensor=2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (folder / "begun").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT, err
    assert "Ctrl-C: finishing step 2 and saving (press again to stop at once)" in err
    assert "stopped after step 2; saved in run/checkpoints: run the same command to resume" in out
    assert err.strip().endswith("shardformer train: ended by SIGINT")
    assert [path.name for path in (folder / "run/checkpoints").glob("step-*")] == ["step-00000002"]
