"""Ranks as threads of one process: a sharded step on any mesh, without starting a process.

Each rank has its own random numbers.

``shardformer.local_ranks.threads.run_as_threads`` starts the threads.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from shardformer.errors import WorkerError
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.mesh.rank_grid import RankGrid
from shardformer.mesh.transport import Meeting, RankGroups, Transport, Word, Work
from shardformer.random_state import RandomStates, random_states, set_random_states

EXCHANGE = 0
"""The tag of what an exchange sends; point-to-point messages have others."""


class PeerFailed(Exception):
    """Raised on a rank that waits for one which has raised."""


class MessageKey(NamedTuple):
    """A place on the table: what for, the how many-th time, and who lays something down there."""

    what: str
    place: Hashable
    author: int


class Lock(Protocol):
    """What ``threading.Lock`` makes, or a class with these methods."""

    def acquire(self) -> Any: ...
    def release(self) -> Any: ...


class Mailbox:
    """Where ``size`` threads lay down what others take.

    A wait ends with an error for all when a rank has raised, when nobody is left who could come, or after the time.

    Args:
        turn: held by the one rank that computes, where all but one wait at any time.
    """

    def __init__(self, size: int, timeout_s: float, turn: Lock | None = None) -> None:
        self.timeout_s, self.turn = timeout_s, turn
        self._size = size
        self._changed = threading.Condition()
        self._laid: dict[MessageKey, tuple[Any, int]] = {}  # the value, and how many have still to take it
        self._waiting: dict[int, Sequence[MessageKey]] = {}
        self._ended: set[int] = set()
        self._failed_at: float | None = None

    def put(self, key: MessageKey, value: Any, readers: int) -> None:
        """Lays a value down for so many ranks."""
        with self._changed:
            self._laid[key] = value, readers
            self._changed.notify_all()

    def withdraw(self, key: MessageKey) -> None:
        """Takes back what was laid down, if it is still there."""
        with self._changed:
            self._laid.pop(key, None)

    def seen(self, key: MessageKey) -> Any:
        """What was laid down there, which stays; None where nothing was."""
        with self._changed:
            return self._laid.get(key, (None, 0))[0]

    def end(self, rank: int, *, failed: bool) -> None:
        """The rank has returned, or raised."""
        with self._changed:
            self._ended.add(rank)
            if failed and self._failed_at is None:
                self._failed_at = time.monotonic()
            self._changed.notify_all()

    def is_given_up(self) -> bool:
        """Whether a rank has raised so long ago that those which still run are in no collective."""
        return self._failed_at is not None and time.monotonic() > self._failed_at + self.timeout_s

    def missing(self, rank: int, keys: Sequence[MessageKey], timeout_s: float) -> list[MessageKey]:
        """Waits for what ``keys`` name. Returns the keys of what has not come, and will not within the time."""
        with self._giving_up_turn(), self._changed:
            self._waiting[rank] = keys
            if len(self._waiting) + len(self._ended) == self._size:
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._failed_at or self._are_laid(keys) or self._is_stuck(), timeout_s)
            if self._failed_at is not None:
                raise PeerFailed("another rank has raised")
            del self._waiting[rank]
            return [key for key in keys if key not in self._laid]

    @contextmanager
    def _giving_up_turn(self) -> Iterator[None]:
        if self.turn is not None:
            self.turn.release()
        try:
            yield
        finally:
            if self.turn is not None:
                self.turn.acquire()

    def get(self, rank: int, keys: Sequence[MessageKey]) -> list[Any]:
        """The values that ``keys`` name, when all of them have been laid down."""
        if absent := self.missing(rank, keys, self.timeout_s):
            raise self._error(rank, absent)
        with self._changed:
            values = []
            for key in keys:
                value, readers = self._laid.pop(key)
                if readers > 1:
                    self._laid[key] = value, readers - 1
                values.append(value)
            return values

    def _are_laid(self, keys: Sequence[MessageKey]) -> bool:
        return all(key in self._laid for key in keys)

    def _is_stuck(self) -> bool:
        """Whether each rank has ended, or waits for what has not been laid down."""
        waits = [not self._are_laid(keys) for keys in self._waiting.values()]
        return len(waits) + len(self._ended) == self._size and all(waits)

    def _error(self, rank: int, absent: Sequence[MessageKey]) -> WorkerError:
        with self._changed:
            found = [_waits(rank, absent)]
            for other in range(self._size):
                if other in self._ended:
                    found.append(f"rank {other} has ended")
                elif other in self._waiting:
                    found.append(_waits(other, [key for key in self._waiting[other] if key not in self._laid]))
                elif other != rank:
                    found.append(f"rank {other} still computes after {self.timeout_s:g} s")
        return WorkerError(
            "; ".join(found),
            rule="All ranks of an axis make the same calls in the same order, and what one sends another receives",
            remedy="See what each of the ranks does there",
        )


def _waits(rank: int, absent: Sequence[MessageKey]) -> str:
    who = " and ".join(str(key.author) for key in absent)
    return f"rank {rank} waits for rank {who} in {absent[0].what}" if absent else f"rank {rank} goes on"


class ThreadWorld:
    """The world as one thread sees it, the one that makes it."""

    store = None

    def __init__(self, table: Mailbox, rank: int) -> None:
        self.table, self.rank = table, rank
        self.thread = threading.current_thread()
        self._connected: Counter[tuple[int, ...]] = Counter()

    def connect(self, lines: RankGroups) -> Transport:
        """A transport along this rank's line; of none, for a rank that stands on none, along itself."""
        line = next((line for line in lines if self.rank in line), (self.rank,))
        self._connected[line] += 1
        return ThreadTransport(self, line, self._connected[line])


class ThreadTransport:
    """Carries between threads. Objects are handed on as they are, not copied as between processes."""

    group = None

    def __init__(self, world: ThreadWorld, line: tuple[int, ...], number: int) -> None:
        self.world = world
        self._line, self._me = line, world.rank
        self._channel = (line, number)
        self._counts: Counter[Hashable] = Counter()

    def exchanges_directly(self, x: Tensor) -> bool:
        return True

    def sends_in_turn(self, device: torch.device) -> bool:
        return False

    def all_reduce(self, x: Tensor, op: str) -> Work:
        parts = self._meet("all_reduce", _copy(x))
        return _DeferredWork(lambda: x.copy_(_sum(parts()) if op == "sum" else torch.stack(parts()).amax(0)))

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        parts = self._meet("all_gather", _copy(x))
        return _DeferredWork(lambda: out.copy_(torch.cat(parts())))

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Work:
        parts = self._meet("reduce_scatter", _copy(x))
        rank, size = self._line.index(self._me), len(self._line)
        return _DeferredWork(lambda: out.copy_(_sum(parts()).chunk(size)[rank]))

    def exchange(self, outgoing: Mapping[int, Tensor], arriving: Mapping[int, Tensor]) -> Sequence[Work]:
        for to, x in outgoing.items():
            if x.numel():
                self.send(x, to, EXCHANGE)
        return [self.receive(x, source, EXCHANGE) for source, x in arriving.items() if x.numel()]

    def send(self, x: Tensor, to: int, tag: int) -> Work:
        self.world.table.put(self._message(self._me, self._line[to], tag), _copy(x), 1)
        return _DeferredWork(None)

    def receive(self, x: Tensor, source: int, tag: int) -> Work:
        key = self._message(self._line[source], self._me, tag)

        def finish() -> None:
            (value,) = self.world.table.get(self._me, [key])
            assert value.dtype == x.dtype, f"{value.dtype} arrives where {x.dtype} is expected"
            x.copy_(value.view(x.shape))

        return _DeferredWork(finish)

    def broadcast(self, x: Tensor, source: int) -> None:
        is_source = self._line[source] == self._me
        values = self._meet("broadcast", _copy(x) if is_source else None)()
        with torch.no_grad():
            x.copy_(values[source])

    def broadcast_object(self, value: Any, source: int) -> Any:
        return self._meet("broadcast_object", value)()[source]

    def gather_objects(self, value: Any) -> list[Any]:
        return self._meet("gather_objects", value)()

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        return self._meet("gather_numbers", list(numbers))()

    def meet(self, call: str, *, waits: bool) -> Meeting:
        self._counts["calls"] += 1
        keys = self._keys("calls", ("calls", self._counts["calls"]))
        before = self._keys("calls", ("calls", self._counts["calls"] - 2))  # all have read it
        mine = self._line.index(self._me)
        table = self.world.table
        table.withdraw(before[mine])
        table.put(keys[mine], Word(call, not waits), len(keys))
        if not waits:
            return Meeting()
        table.missing(self._me, keys, table.timeout_s)
        words = [table.seen(key) for key in keys]
        return Meeting(words, {rank: "does not come" for rank, word in zip(self._line, words) if word is None})

    def _meet(self, what: str, value: Any) -> Callable[[], list[Any]]:
        """Lays ``value`` down; what is returned waits for every rank's value."""
        self._counts["meeting"] += 1
        keys = self._keys(what, self._counts["meeting"])
        self.world.table.put(keys[self._line.index(self._me)], value, len(keys))
        return lambda: self.world.table.get(self._me, keys)

    def _keys(self, what: str, place: Hashable) -> list[MessageKey]:
        return [MessageKey(what, (self._channel, place), rank) for rank in self._line]

    def _message(self, author: int, reader: int, tag: int) -> MessageKey:
        way = (author, reader, tag)
        self._counts[way] += 1
        what = "an exchange" if tag == EXCHANGE else "a message"
        return MessageKey(what, (self._channel, reader, tag, self._counts[way]), author)


class _DeferredWork:
    """A work that is done when it is waited for, or at once where nothing is left to do."""

    def __init__(self, finish: Callable[[], object] | None) -> None:
        self._finish = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            with torch.no_grad():
                finish()

    def is_completed(self) -> bool:
        return self._finish is None


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone()


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return sum(parts[1:], parts[0])


class Turn:
    """A lock for threads of which one runs at a time, each with random states of its own.

    All threads begin with the states at the time when the lock is made.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first = random_states()
        self._own: dict[int, RandomStates] = {}

    def acquire(self) -> None:
        self._lock.acquire()
        set_random_states(self._own.get(threading.get_ident(), self._first))

    def release(self) -> None:
        self._own[threading.get_ident()] = random_states()
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


ThreadResult = TypeVar("ThreadResult")

TIMEOUT_S = 60.0


def run_as_threads(
    fn: Callable[[ParallelContext], ThreadResult],
    *,
    tensor: int = 1,
    data: int = 1,
    pipe: int = 1,
    sequence: int = 1,
    timeout_s: float = TIMEOUT_S,
    in_turn: bool = False,
) -> list[ThreadResult]:
    """Calls ``fn`` with the context of each rank of the grid, in a thread each; the results in the order of the ranks.

    The ranks compute what processes would, on the CPU. They have torch's default generator in common: where ``fn``
    draws random numbers, which of them a rank gets is a matter of chance. ``in_turn`` lets one compute until it waits
    for another, and gives each its own random numbers, of torch, numpy and Python: all begin with the same ones.

    Raises what the first rank raised that did. When one raises, the others' collectives end too; so do those that wait
    for a rank that has ended, waits for something else, or does not come within ``timeout_s`` seconds, with a
    WorkerError that says where each rank is.
    """
    sizes = {"data": data, "pipe": pipe, "sequence": sequence, "tensor": tensor}
    grid = RankGrid.of(sizes)
    turn = Turn() if in_turn else None
    table = Mailbox(len(grid.ranks), timeout_s, turn)
    results: dict[int, ThreadResult] = {}
    errors: dict[int, BaseException] = {}

    def play(rank: int) -> None:
        try:
            with turn or nullcontext():
                results[rank] = fn(ParallelContext.of(sizes, grid.coords(rank), world=ThreadWorld(table, rank)))
        except BaseException as error:
            errors[rank] = error
        table.end(rank, failed=rank in errors)

    threads = [threading.Thread(target=play, args=(r,), name=f"rank-{r}", daemon=True) for r in grid.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not table.is_given_up():
            thread.join(1.0)
    if errors:  # what a rank raised, before what the others say of that
        ordered = [errors[rank] for rank in sorted(errors)]
        raise next((error for error in ordered if not _follows(error)), ordered[0])
    return [results[rank] for rank in grid.ranks]


def _follows(error: BaseException | None) -> bool:
    """Whether a rank raised because another had."""
    return error is not None and (isinstance(error, PeerFailed) or _follows(error.__cause__ or error.__context__))
