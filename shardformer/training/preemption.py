"""Synchronizes signals, hook failures and hook requests across all ranks before each training step."""

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

from shardformer.comm.collective_call import all_gather_ints_and_check_same_call
from shardformer.comm.collectives import all_gather_objects
from shardformer.errors import InputError, ShardFormerError
from shardformer.launcher.shutdown import is_launched_by_shardformer, register_graceful_shutdown
from shardformer.training.engine import Engine
from shardformer.training.hook import Hook

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEATED_SIGNAL_S = 5.0
"""A repeated signal within this time is ignored: a scheduler signals the launcher and this process."""
_REPLACED: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}
"""Previous handlers that ``HookSynchronizer.capture_signals`` has replaced, by signal."""


@dataclass(frozen=True)
class RequestedActions:
    """Actions, such as saving a checkpoint, that a hook or signal requested before the next step."""

    stop: bool = False
    validate: bool = False
    save: bool = False
    signal: bool = False

    def __or__(self, other: RequestedActions) -> RequestedActions:
        return RequestedActions(*(a or b for a, b in zip(astuple(self), astuple(other))))


@dataclass(frozen=True)
class HookFailure:
    """An exception that a hook raised on this rank. If ``hook`` is None, ``operation`` raised it."""

    hook: Hook | None
    operation: str
    error: Exception

    def to_exception(self, failed_rank: int) -> ShardFormerError:
        error, hook = self.error, self.hook
        if isinstance(error, ShardFormerError):
            text = error.what if hook is None else f"{error.what} (reported by the hook {type(hook).__name__})"
            return type(error)(text, rule=error.rule, remedy=error.remedy)
        source = self.operation if hook is None else f"The hook {type(hook).__name__} ({self.operation})"
        return InputError(
            f"{source[:1].upper()}{source[1:]} failed on rank {failed_rank}: {type(error).__name__}: {error}.",
            remedy="Fix the cause of this error, and resume from the last checkpoint.",
        )


class HookSynchronizer:
    """Collects the requests and errors of hooks on this rank, and exchanges them with all ranks before each step.

    After a failure, a rank calls no more hooks and continues to the next synchronization. Hooks on other ranks
    synchronize before they communicate, so all ranks reach the same collective.

    Attributes:
        failure: First failure since the last synchronization.
        is_broken: Whether a synchronization found a failure, which ends the run.
        signal: Signal that this rank received, or None.
    """

    def __init__(self) -> None:
        self.failure: HookFailure | None = None
        self.is_broken = False
        self.signal: signal.Signals | None = None
        self._local = self._received = RequestedActions()

    def request_actions_on_all_ranks(self, **actions: bool) -> None:
        """Request that all ranks validate, save or stop before the next step, as with ``save=True``."""
        self._local = replace(self._local, **actions)

    def record_hook_failure(self, hook: Hook | None, operation_name: str, error: Exception) -> None:
        self.failure = self.failure or HookFailure(hook, operation_name, error)

    def exchange_requested_actions(self, engine: Engine) -> None:
        """Exchange hook requests and errors between all ranks, and raise if a hook failed. Communicates 5 integers.

        Raises:
            ShardFormerError: The failure of one rank; raised on all ranks.
        """
        world, local = engine.world, [int(self.failure is not None), *map(int, astuple(self._local))]
        failed, *requests = (
            any(column)
            for column in zip(
                *all_gather_ints_and_check_same_call("Trainer.synchronize_ranks", world, local), strict=True
            )
        )
        self._local, self._received = RequestedActions(), self._received | RequestedActions(*requests)
        if failed:
            self.is_broken = True
            exception = None if self.failure is None else self.failure.to_exception(world.rank)
            first = next(exception for exception in all_gather_objects(exception, world) if exception is not None)
            raise first from (self.failure.error if self.failure is not None else None)

    def pop_requested_actions(self) -> RequestedActions:
        """Return the actions that any rank requested in ``exchange_requested_actions``, and clear them."""
        received, self._received = self._received, RequestedActions()
        return received

    @contextmanager
    def capture_signals(self, on_signal: Callable[[signal.Signals], None]) -> Iterator[None]:
        """Record SIGTERM and SIGINT in a ``with`` block instead of exiting. A second signal calls the previous handler.

        Forked child processes get the previous handlers, because worker pools stop their processes with SIGTERM. If the
        signal also ends data loading processes, the current step is still finished.

        Args:
            on_signal: Function that is called with the first signal.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        outer_handlers = dict(_REPLACED)  # of an outer ``fit``
        received_at, on_child = 0.0, signal.getsignal(signal.SIGCHLD)

        def handle_signal(signum: int, frame: FrameType | None) -> None:
            nonlocal received_at, on_child
            if self.signal is None:
                self.signal, received_at = signal.Signals(signum), time.monotonic()
                self.request_actions_on_all_ranks(signal=True)
                # the handler of torch's DataLoader raises an error in the main thread if a data loading process ends
                on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                if not is_launched_by_shardformer():
                    _restore_signal_handlers()
                on_signal(self.signal)
            elif time.monotonic() - received_at > REPEATED_SIGNAL_S:
                _restore_signal_handlers()
                signal.raise_signal(signum)

        with register_graceful_shutdown():
            for number in SIGNALS:
                _REPLACED[number] = signal.getsignal(number)
            for number in SIGNALS:
                signal.signal(number, handle_signal)
            try:
                yield
            finally:
                _restore_signal_handlers()
                _REPLACED.update(outer_handlers)
                if self.signal is not None:
                    signal.signal(signal.SIGCHLD, on_child)


def _restore_signal_handlers() -> None:
    for number, handler in _REPLACED.items():
        if handler is not None:  # None: the handler was not installed by Python
            signal.signal(number, handler)
    _REPLACED.clear()


_SIGNAL_MASK = threading.local()


def _block_sigterm_and_sigint() -> None:
    _SIGNAL_MASK.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _SIGNAL_MASK.before)


# worker pools stop their processes with SIGTERM, which must not arrive before a child has restored its handlers
os.register_at_fork(after_in_child=_restore_signal_handlers)
os.register_at_fork(before=_block_sigterm_and_sigint, after_in_parent=_unblock_signals, after_in_child=_unblock_signals)
