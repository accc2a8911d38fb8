"""How long the launcher waits for processes to end. It waits for processes that save on a signal."""

from __future__ import annotations

import json
import os
import time
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException

from shardformer.launcher import shutdown
from shardformer.launcher.shutdown import (
    AT_ONCE_S,
    FOLDER,
    SHUTDOWN_TIMEOUT_S,
    SHUTDOWN_TIMEOUT_VARIABLE,
    STUCK_PROCESSES,
    _signal_processes_and_wait,
    is_aborted_by_launcher,
    register_graceful_shutdown,
    set_torchrun_shutdown_timeout,
)
from shardformer.launcher.worker import record_uncaught_exception


class Rank:
    """Process of the launcher, with the PID of this process, that ends some time after it received a signal."""

    pid = os.getpid()

    def __init__(self) -> None:
        self.received: list[int] = []
        self.ends_at: float | None = None

    def poll(self) -> int | None:
        return None if self.ends_at is None or time.monotonic() < self.ends_at else 0

    def send_signal(self, number: int) -> None:
        self.received.append(number)
        self.ends_at = time.monotonic() + 0.2


def launched(rank: Any) -> Any:
    handlers = {0: SimpleNamespace(proc=rank)}
    return SimpleNamespace(subprocess_handlers=handlers, error_files={})


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """Return for each close of torch: the signal, the timeout, and whether processes see that one of them failed."""
    found: list[tuple[int, int, bool]] = []
    monkeypatch.delenv(SHUTDOWN_TIMEOUT_VARIABLE, raising=False)
    monkeypatch.setattr(
        PContext, "close", lambda self, number, timeout: found.append((number, timeout, is_aborted_by_launcher()))
    )
    return found


def close(by_signal: bool, rank: Any = None) -> None:
    context = launched(rank or Rank())
    if not by_signal:
        PContext.close(context)
        return
    try:
        raise SignalException("", SIGINT)
    except SignalException:
        PContext.close(context, SIGINT)


def test_after_a_failure_a_saving_process_gets_no_more_time(waits: list[Any]) -> None:
    with set_torchrun_shutdown_timeout(Namespace(shutdown_timeout=None)), register_graceful_shutdown():
        close(by_signal=False)
    assert waits == [(SIGTERM, SHUTDOWN_TIMEOUT_S, True)]
    assert FOLDER not in os.environ


def test_a_process_that_does_not_save_gets_a_limited_time(waits: list[Any]) -> None:
    with set_torchrun_shutdown_timeout(Namespace(shutdown_timeout=None)):
        close(by_signal=True)
    assert waits == [(SIGINT, SHUTDOWN_TIMEOUT_S, False)]


def test_a_saving_process_is_waited_for_without_a_limit(waits: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "SHUTDOWN_TIMEOUT_S", 0.0)
    rank = Rank()
    with set_torchrun_shutdown_timeout(Namespace(shutdown_timeout=None)), register_graceful_shutdown():
        close(by_signal=True, rank=rank)
        assert rank.poll() == 0, "the launcher waited until the process had ended"
        close(by_signal=True)
    assert rank.received == [SIGINT]
    assert waits == [(SIGKILL, AT_ONCE_S, False), (SIGKILL, AT_ONCE_S, False)], "a second signal kills at once"


def test_a_process_that_saved_but_does_not_end_is_killed(waits: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "SHUTDOWN_TIMEOUT_S", 0.1)
    rank = Rank()

    def save(number: int) -> None:
        rank.received.append(number)
        saves.__exit__(None, None, None)

    monkeypatch.setattr(rank, "send_signal", save)
    with set_torchrun_shutdown_timeout(Namespace(shutdown_timeout=None)):
        saves = register_graceful_shutdown()
        saves.__enter__()
        close(by_signal=True, rank=rank)
    assert waits == [(SIGKILL, AT_ONCE_S, False)]
    assert "did not end on SIGINT" in STUCK_PROCESSES.pop(os.getpid())


@pytest.mark.parametrize("after_s", [0.0, 2.0])
def test_a_second_signal_interrupts_the_wait_unless_it_is_the_same(
    after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, *[after_s] * 3, *[after_s] * 10])
    sleeps = iter([SignalException("", SIGINT)])

    def sleep(seconds: float) -> None:
        for error in sleeps:
            raise error
        rank.ends_at = 0.0

    rank = Rank()
    monkeypatch.setattr(shutdown, "time", SimpleNamespace(monotonic=lambda: next(times), sleep=sleep))
    monkeypatch.setattr(shutdown, "is_graceful_shutdown_registered", lambda pid: True)
    monkeypatch.setattr(rank, "send_signal", rank.received.append)
    with pytest.raises(SignalException) if after_s else nullcontext():
        _signal_processes_and_wait([rank], SIGINT, None)
    assert rank.received == [SIGINT]


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
            record_uncaught_exception(KeyboardInterrupt, error, error.__traceback__)
        assert ("KeyboardInterrupt" in capsys.readouterr().err) == printed
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert (message["message"], message["extraInfo"]["rank"]) == ("KeyboardInterrupt", 3)
    assert "test_ending.py" in message["extraInfo"]["at"]


def test_shutdown_timeout_limits_the_time_to_save(waits: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    monkeypatch.setattr(rank, "send_signal", rank.received.append)
    with set_torchrun_shutdown_timeout(Namespace(shutdown_timeout=1)), register_graceful_shutdown():
        close(by_signal=True, rank=rank)
    assert waits == [(SIGKILL, AT_ONCE_S, False)]
    assert "did not finish its step and save within 1 s after SIGINT" in STUCK_PROCESSES.pop(os.getpid())
