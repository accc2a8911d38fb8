"""Signals, failures and hook requests, synchronized across ranks before each step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from types import FrameType
from typing import Any

from shardformer.comm.collective_call import tell_at_step
from shardformer.comm.collectives import all_gather_objects
from shardformer.errors import InputError, ShardFormerError
from shardformer.launcher.shutdown import has_launcher, register_graceful_shutdown
from shardformer.training.engine import Engine
from shardformer.training.hook import Hook

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEATS_S = 5.0
"""A repeated signal within this time is ignored: a scheduler signals the launcher and this process."""
_REPLACED: dict[int, Any] = {}
"""Handlers that ``StepSynchronizer.signals`` has replaced, by signal."""


@dataclass(frozen=True)
class StepRequests:
    """Requests of hooks on any rank."""

    stop: bool = False
    validate: bool = False
    save: bool = False
    signal: bool = False

    def __or__(self, other: StepRequests) -> StepRequests:
        return StepRequests(*(a or b for a, b in zip(astuple(self), astuple(other))))


@dataclass(frozen=True)
class HookFailure:
    """Error of a hook on this rank, or of the operation ``where`` if ``hook`` is None."""

    hook: Hook | None
    where: str
    error: Exception

    def as_exception(self, rank: int) -> ShardFormerError:
        error, hook = self.error, self.hook
        if isinstance(error, ShardFormerError):
            what = error.what if hook is None else f"{error.what} (reported by the hook {type(hook).__name__})"
            return type(error)(what, rule=error.rule, remedy=error.remedy)
        where = self.where if hook is None else f"The hook {type(hook).__name__} ({self.where})"
        return InputError(
            f"{where[:1].upper()}{where[1:]} failed on rank {rank}: {type(error).__name__}: {error}",
            remedy="Fix the cause and resume from the last checkpoint",
        )


class StepSynchronizer:
    """Collects requests and failures of this rank until all ranks synchronize.

    After a failure, a rank calls no more hooks and continues to the next synchronization. A hook of another rank
    synchronizes before it communicates, so both ranks reach the same collective.

    Attributes:
        failure: First failure since the last synchronization.
        is_broken: Whether a synchronization found a failure, which ends the run.
        signal: Signal that this rank received, or None.
    """

    def __init__(self) -> None:
        self.failure: HookFailure | None = None
        self.is_broken = False
        self.signal: signal.Signals | None = None
        self._local = self._received = StepRequests()

    def ask(self, **what: bool) -> None:
        """Add a request for the next synchronization, as in ``ask(save=True)``."""
        self._local = replace(self._local, **what)

    def fail(self, hook: Hook | None, where: str, error: Exception) -> None:
        self.failure = self.failure or HookFailure(hook, where, error)

    def check(self, engine: Engine) -> None:
        """Exchange requests and failures between all ranks. Communicates five integers.

        Raises:
            ShardFormerError: The failure of one rank; raised on all ranks.
        """
        world, local = engine.world, [int(self.failure is not None), *map(int, astuple(self._local))]
        failed, *requests = (any(column) for column in zip(*tell_at_step("Trainer.agree", world, local), strict=True))
        self._local, self._received = StepRequests(), self._received | StepRequests(*requests)
        if failed:
            self.is_broken = True
            exception = None if self.failure is None else self.failure.as_exception(world.rank)
            first = next(exception for exception in all_gather_objects(exception, world) if exception is not None)
            raise first from (self.failure.error if self.failure is not None else None)

    def synchronize(self) -> StepRequests:
        """Return and reset the requests that ``check`` has received from all ranks."""
        received, self._received = self._received, StepRequests()
        return received

    @contextmanager
    def signals(self, on_signal: Callable[[signal.Signals], None]) -> Iterator[None]:
        """Record SIGTERM and SIGINT within the context; a second signal calls the previous handler.

        Forked child processes get the previous handlers, because worker pools stop their processes with SIGTERM.

        Args:
            on_signal: Function that is called with the first signal.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = dict(_REPLACED)  # of an outer ``fit``
        came_at = 0.0

        def handle(number: int, frame: FrameType | None) -> None:
            nonlocal came_at
            if self.signal is None:
                self.signal, came_at = signal.Signals(number), time.monotonic()
                self.ask(signal=True)
                if not has_launcher():
                    _restore_handlers()
                on_signal(self.signal)
            elif time.monotonic() - came_at > REPEATS_S:
                _restore_handlers()
                signal.raise_signal(number)

        with register_graceful_shutdown():
            for number in SIGNALS:
                _REPLACED[number] = signal.getsignal(number)
            for number in SIGNALS:
                signal.signal(number, handle)
            try:
                yield
            finally:
                _restore_handlers()
                _REPLACED.update(before)


def _restore_handlers() -> None:
    """Restore the signal handlers that ``StepSynchronizer.signals`` replaced."""
    for number, handler in _REPLACED.items():
        if handler is not None:  # None: the handler was not installed by Python
            signal.signal(number, handler)
    _REPLACED.clear()


_MASK = threading.local()


def _block_signals() -> None:
    _MASK.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _MASK.before)


# worker pools stop their processes with SIGTERM, which must not arrive before a child has restored its handlers
os.register_at_fork(after_in_child=_restore_handlers)
os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_unblock_signals)
