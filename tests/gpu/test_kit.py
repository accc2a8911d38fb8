"""The kit for one GPU ends within its time limit, and its exit status reports failed checks."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from shardformer.local_ranks.worker_pool import WorkerPool
from tests.gpu import __main__ as command
from tests.gpu.kit import Check, Result, checks_of, run_checks, table, write


def passes(pool: WorkerPool) -> tuple[str, dict[str, float]]:
    return "as expected", {"figure": 1.5}


def fails(pool: WorkerPool) -> tuple[str, dict[str, float]]:
    raise AssertionError("off by 1e-2")


def hangs(pool: WorkerPool) -> tuple[str, dict[str, float]]:
    time.sleep(60)
    return "", {}


def test_a_check_that_fails_or_hangs_does_not_stop_the_others() -> None:
    checks = [Check("hangs", 1, 5.0, hangs), Check("fails", 1, 5.0, fails), Check("passes", 1, 5.0, passes)]
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.gpu.kit.LEAST_S", 0.0)
        patch.setattr("tests.gpu.kit.GRACE_S", -4.5)
        results = run_checks(checks, say=lambda _: None)
    assert time.monotonic() - start < 10
    assert [result.outcome for result in results] == ["failed", "failed", "passed"]
    assert results[1].said == "off by 1e-2" and results[2].figures == {"figure": 1.5}


def test_checks_that_no_time_is_left_for_are_not_run_and_count_as_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results = run_checks([Check("late", 1, 60.0, hangs)], limit_s=1.0, say=lambda _: None)
    assert [result.outcome for result in results] == ["not run"]
    monkeypatch.setattr(command, "run_checks", lambda *_, **__: results)
    monkeypatch.setattr("sys.argv", ["tests.gpu", "--device", "cpu", "--json", str(tmp_path / "gpu.json")])
    assert command.main() == 1


def test_the_results_are_a_table_and_a_file_with_the_name_of_the_gpu(tmp_path: Path) -> None:
    results = [Result("tensor 2", "passed", "off by 1e-14", 1.25, {"difference": 1e-14})]
    shown = table(results, "NVIDIA H100")
    assert "NVIDIA H100" in shown and "tensor 2" in shown and "off by 1e-14" in shown
    write(tmp_path / "gpu.json", results, "NVIDIA H100")
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["gpu"] == "NVIDIA H100" and found["torch"] == torch.__version__
    assert found["checks"][0]["figures"] == {"difference": 1e-14}


def test_without_a_gpu_the_skipped_checks_are_named_and_the_fake_device_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(pytest, "main", lambda args: run.append(args) or 0)
    monkeypatch.setattr("sys.argv", ["tests.gpu"])
    assert command.main() == 0
    said = capsys.readouterr().out
    assert "No GPU" in said and all(f"  {check.name}\n" in said for check in checks_of("cuda:0"))
    assert run[0][-1].endswith("test_fake_device.py")
