"""examples/demo.py compares gradients, weights and losses of one process with those of several."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import run_line

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "demo.py"


def test_the_demo_passes_on_two_data_ranks(tmp_path: Path) -> None:
    out = run_line(f"python {SCRIPT} --data 2 --zero 1 --steps 3 --layers 1 --hidden 64", tmp_path)
    assert "over data=2" in out
    assert re.search(r"loss, step 3 +│ \d\.\d{6} +│ \d\.\d{6} ", out), out
    assert re.search(r"tokens per second +│ [\d,]+ +│ [\d,]+ +│ x ", out)
    assert out.rstrip().splitlines()[-1].startswith("PASS: the largest relative difference of a loss is "), out


def test_different_losses_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(SCRIPT))["main"].__globals__

    def wrong_run(command: list[str], check: bool) -> None:
        assert check
        Path(command[-1]).write_text('{"losses": [5.0], "tokens_per_second": 1.0}', encoding="utf-8")

    monkeypatch.setattr(subprocess, "run", wrong_run)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--steps", "1", "--layers", "1", "--hidden", "64"])
    monkeypatch.setitem(script, "verify", lambda *_, **__: type("Passed", (), {"passed": True}))
    assert script["main"]() == 1
    assert "FAIL: " in capsys.readouterr().out
