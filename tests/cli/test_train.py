"""``shardformer train``: starting the processes of a layout, and dry runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from shardformer.cli import main
from shardformer.cli.train import _get_num_processes_for_layout
from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError, LaunchError
from shardformer.mesh.init_distributed import get_launcher_env_variable_name, get_num_slurm_tasks, launch_from_torch
from shardformer.training.metrics_log import read_metrics_records
from tests.runs.files import write_text
from tests.runs.small_run import MODEL_AND_DATA
from tests.scripts import SHARDFORMER

RUN = f"""{MODEL_AND_DATA}[training]
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
    assert "Resuming from step 4." in again.stdout
    assert again.stdout.index("Files       run (checkpoints, records.jsonl, model)") < again.stdout.index("step 5/6")
    assert again.stdout.endswith(
        "Checkpoint  run/checkpoints/step-00000006\nModel       run/model\n"
        "Records     run/records.jsonl\nNext        shardformer plot run\n"
    )
    assert [record.step for record in read_metrics_records(folder / "run")] == [1, 2, 3, 4, 5, 6]


def test_a_dry_run_does_not_train(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["--set", "parallel.tensor=2", "--set", "parallel.pipe=2", "--set", "parallel.zero_stage=1"]
    with pytest.raises(SystemExit) as ended:
        main(["train", "-c", "run.toml", "--dry-run", *changes])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert re.search(r"^Layout +pipe 2, tensor 2, ZeRO stage 1, 4 processes$", said, re.M)
    assert re.search(r"^Steps +4 \(.* epochs\), each with 4 samples \(64 tokens\)$", said, re.M)
    assert re.search(r"^One process without parallelism: .* in all\.$", said, re.M)
    assert "Linear1D_Col" in said
    rows = re.findall(r"^ +([01]) +([01]) .* KB", said, re.M)
    assert rows == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert "?" not in said
    assert not (folder / "run").exists()


def test_a_dry_run_prints_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "-c", "run.toml", "--dry-run", "--json", "--set", "schedule.warmup=0.5"])
    assert ended.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["num_steps"], report["warmup_steps"]) == ("GPT2LMHeadModel", 4, 2)
    assert (report["tokens_per_step"], report["weights"]) == (64, "random, with seed 0")
    assert report["bytes_per_rank"][0]["peak"] > report["bytes_per_rank"][0]["parameters"] > 0
    assert report["bytes_in_one_process"] is None, "the run has one process"
    assert report["free_bytes"] > 0
    with pytest.raises(SystemExit):
        main(["train", "-c", "run.toml", "--json"])
    assert "--json has no effect without --dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "launched"),
    [
        ({}, None),
        ({"RANK": "0"}, "RANK"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # the script of sbatch
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}, "SLURM_STEP_ID"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "9", "SLURM_STEP_NUM_TASKS": "1"}, None),
    ],
    ids=str,
)
def test_only_tasks_of_srun_are_launched(
    variables: dict[str, str], launched: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert get_launcher_env_variable_name() == launched
    assert get_num_slurm_tasks() == (0 if "SLURM_STEP_ID" not in variables else 4 if launched else 1)
    with pytest.raises(LaunchError, match=r"are not set, because no launcher has started.*with `srun python train.py`"):
        for name in variables:
            monkeypatch.delenv(name)
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        launch_from_torch()


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
    assert _get_num_processes_for_layout(ParallelConfig(tensor=2, pipe=2), None) == 4
    assert _get_num_processes_for_layout(ParallelConfig(tensor=2), 4) == 4
    for layout, processes in ((ParallelConfig(tensor=2), 3), (ParallelConfig(tensor=2, data=1), 4)):
        with pytest.raises(ConfigError, match=r"--processes"):
            _get_num_processes_for_layout(layout, processes)
