"""What all ranks of a run have to hear of before the next step: what hooks ask for, failures, signals."""

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
from shardformer.launcher.shutdown import finishes_on_signals, has_launcher
from shardformer.training.engine import Engine
from shardformer.training.hook import Hook

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEATS_S = 5.0
"""A signal that comes again so soon is the same one, under a launcher: to it and to this process, by a scheduler."""
_REPLACED: dict[int, Any] = {}
"""Signal -> the handler that ``StepSynchronizer.signals`` replaced in this process, while it is replaced."""


@dataclass(frozen=True)
class StepRequests:
    """What any rank asks for."""

    stop: bool = False
    validate: bool = False
    save: bool = False
    signal: bool = False

    def __or__(self, other: StepRequests) -> StepRequests:
        return StepRequests(*(a or b for a, b in zip(astuple(self), astuple(other))))


@dataclass(frozen=True)
class HookFailure:
    """What failed on this rank, in a hook, or where there is none in what ``where`` says."""

    hook: Hook | None
    where: str
    error: Exception

    def in_words(self, rank: int) -> ShardFormerError:
        error, hook = self.error, self.hook
        if isinstance(error, ShardFormerError):
            what = error.what if hook is None else f"{error.what} (reported by the hook {type(hook).__name__})"
            return type(error)(what, rule=error.rule, remedy=error.remedy)
        where = self.where if hook is None else f"The hook {type(hook).__name__} ({self.where})"
        return InputError(
            f"{where[:1].upper()}{where[1:]} failed on rank {rank}: {type(error).__name__}: {error}",
            remedy="Mend it, and go on from the last checkpoint",
        )


class StepSynchronizer:
    """Notes what this rank asks for, until all ranks hear of it.

    A rank on which something failed calls no more hooks, and comes to the next agreement; a hook of another rank that
    is about to communicate agrees first, so that the two meet.

    Attributes:
        failure: the first one since the last agreement.
        is_broken: whether an agreement found a failure: the run is ending.
        signal: the one that came to this rank; None without.
    """

    def __init__(self) -> None:
        self.failure: HookFailure | None = None
        self.is_broken = False
        self.signal: signal.Signals | None = None
        self._mine = self._heard = StepRequests()

    def ask(self, **what: bool) -> None:
        """``ask(save=True)``: a field of ``StepRequests``."""
        self._mine = replace(self._mine, **what)

    def fail(self, hook: Hook | None, where: str, error: Exception) -> None:
        self.failure = self.failure or HookFailure(hook, where, error)

    def check(self, engine: Engine) -> None:
        """All ranks hear of what any asks for. Raises, on all, what failed on one. Communicates five numbers."""
        world, mine = engine.world, [int(self.failure is not None), *map(int, astuple(self._mine))]
        failed, *asked = (any(column) for column in zip(*tell_at_step("Trainer.agree", world, mine), strict=True))
        self._mine, self._heard = StepRequests(), self._heard | StepRequests(*asked)
        if failed:
            self.is_broken = True
            said = None if self.failure is None else self.failure.in_words(world.rank)
            first = next(said for said in all_gather_objects(said, world) if said is not None)
            raise first from (self.failure.error if self.failure is not None else None)

    def synchronize(self) -> StepRequests:
        """What was asked for since the last time, as far as all ranks have heard of it."""
        heard, self._heard = self._heard, StepRequests()
        return heard

    @contextmanager
    def signals(self, tell: Callable[[signal.Signals], None]) -> Iterator[None]:
        """SIGTERM and SIGINT are noted while it lasts; the second one does what it did before.

        Processes that are forked meanwhile keep the handlers from before: a pool of a hook ends its workers by SIGTERM.

        Args:
            tell: is called when the first one comes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = dict(_REPLACED)  # of a ``fit`` around this one
        came_at = 0.0

        def note(number: int, frame: FrameType | None) -> None:
            nonlocal came_at
            if self.signal is None:
                self.signal, came_at = signal.Signals(number), time.monotonic()
                self.ask(signal=True)
                if not has_launcher():
                    _put_back()
                tell(self.signal)
            elif time.monotonic() - came_at > REPEATS_S:
                _put_back()
                signal.raise_signal(number)

        with finishes_on_signals():
            for number in SIGNALS:
                _REPLACED[number] = signal.getsignal(number)
            for number in SIGNALS:
                signal.signal(number, note)
            try:
                yield
            finally:
                _put_back()
                _REPLACED.update(before)


def _put_back() -> None:
    """Signals do what they did before ``StepSynchronizer.signals``."""
    for number, handler in _REPLACED.items():
        if handler is not None:  # None: not one of Python's
            signal.signal(number, handler)
    _REPLACED.clear()


_MASK = threading.local()


def _hold_signals() -> None:
    _MASK.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _MASK.before)


def _put_back_in_child() -> None:
    _put_back()
    _release_signals()


# a pool of a hook ends its processes by SIGTERM; what comes before they have put their handlers back would be lost
os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_put_back_in_child)
