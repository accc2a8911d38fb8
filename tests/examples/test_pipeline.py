"""examples/pipeline.py trains over two stages as over one, dropout included, and saves the whole model."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import shardformer
from shardformer.context import ParallelContext

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pipeline.py"
NUM_STEPS = 10


def _losses(output: str) -> list[float]:
    lines = re.findall(r"^step +(\d+)  loss (\S+)$", output, re.MULTILINE)
    assert [int(step) for step, _ in lines] == list(range(1, NUM_STEPS + 1)), output  # each once: on rank 0 alone
    return [float(loss) for _, loss in lines]


def _run_in_two(folder: Path) -> list[float]:
    command = ["run", "--nproc_per_node", "2", str(SCRIPT)]
    main = [sys.executable, "-c", "from shardformer.cli import main; main()", *command]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PET_")}
    done = subprocess.run(main, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return _losses(done.stdout)


def _run_in_one(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[float]:
    """The script on a single stage, in this process."""

    def launch(seed: int, **_: Any) -> ParallelContext:
        torch.manual_seed(seed)
        return ParallelContext.from_group(None)

    monkeypatch.setattr(shardformer, "launch_from_torch", launch)
    monkeypatch.chdir(folder)
    runpy.run_path(str(SCRIPT))
    return _losses(capsys.readouterr().out)


def test_two_stages_train_and_save_what_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    losses = _run_in_two(cut)
    assert losses == pytest.approx(_run_in_one(whole, monkeypatch, capsys), rel=1e-3)
    assert losses[-1] < 0.75 * losses[0]
    expected, saved = (
        dict(AutoModelForCausalLM.from_pretrained(folder / "runs" / "pipeline").named_parameters())
        for folder in (whole, cut)
    )
    assert saved.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(saved[name], weight, rtol=0, atol=1e-3, msg=name)
