"""How long the launcher waits for processes to end. Processes that save on a signal get more time."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException

from shardformer.launcher.shutdown import (
    AT_ONCE_S,
    FINISHES_S,
    FOLDER,
    SHUTDOWN_TIMEOUT_S,
    SHUTDOWN_TIMEOUT_VARIABLE,
    STUCK_PROCESSES,
    _record_stuck_processes,
    is_aborted_by_launcher,
    register_graceful_shutdown,
    set_shutdown_timeout,
)
from shardformer.launcher.worker import record_failure

PROCESS: Any = SimpleNamespace(pids=lambda: {0: os.getpid()}, error_files={})


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Return for each close: the timeout of torch's launcher, and whether processes see that one of them failed."""
    found: list[tuple[int, bool]] = []
    monkeypatch.delenv(SHUTDOWN_TIMEOUT_VARIABLE, raising=False)
    monkeypatch.setattr(
        PContext, "close", lambda self, death_sig, timeout: found.append((timeout, is_aborted_by_launcher()))
    )
    return found


def close(by_signal: bool) -> None:
    if not by_signal:
        PContext.close(PROCESS)
        return
    try:
        raise SignalException("", 2)  # type: ignore[arg-type]
    except SignalException:
        PContext.close(PROCESS)


@pytest.mark.parametrize("saves", [True, False])
def test_a_saving_process_gets_time_after_a_signal_but_not_after_a_failure(saves: bool, waits: list[Any]) -> None:
    with set_shutdown_timeout(Namespace(shutdown_timeout=None)):
        if saves:
            with register_graceful_shutdown():
                close(by_signal=False)
                close(by_signal=True)
                close(by_signal=True)
        else:
            close(by_signal=False)
            close(by_signal=True)
    expected = [(SHUTDOWN_TIMEOUT_S, True), (FINISHES_S, False), (AT_ONCE_S, False)]
    assert waits == (expected if saves else [(SHUTDOWN_TIMEOUT_S, True), (SHUTDOWN_TIMEOUT_S, False)])
    assert FOLDER not in os.environ


def test_ctrl_c_prints_no_traceback_per_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "3")
    for traceback, printed in (("0", False), ("1", True)):
        monkeypatch.setenv("SHARDFORMER_TRACEBACK", traceback)
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            record_failure(KeyboardInterrupt, error, error.__traceback__)
        assert ("KeyboardInterrupt" in capsys.readouterr().err) == printed
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert (message["message"], message["extraInfo"]["rank"]) == ("KeyboardInterrupt", 3)
    assert "test_ending.py" in message["extraInfo"]["at"]


def test_shutdown_timeout_overrides_the_default(waits: list[Any]) -> None:
    with set_shutdown_timeout(Namespace(shutdown_timeout=77)), register_graceful_shutdown():
        close(by_signal=True)
    assert waits == [(77, False)]


def test_a_process_killed_while_saving_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    monkeypatch.setenv(FOLDER, str(tmp_path))
    with register_graceful_shutdown():
        _record_stuck_processes([os.getpid()], signal.SIGINT, 77)
    assert "did not finish its step and save within 77 s after SIGINT" in STUCK_PROCESSES.pop(os.getpid())
