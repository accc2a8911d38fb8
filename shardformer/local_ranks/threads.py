"""Run the ranks of a mesh as threads in one process.

``run_as_threads`` starts the threads.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from shardformer.errors import WorkerError
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.mesh.rank_grid import RankGrid
from shardformer.mesh.transport import CollectiveAnnouncement, PeerCollectiveStatus, RankGroups, Transport, Work
from shardformer.random_state import RandomStates, get_rng_states, set_rng_states

EXCHANGE = 0
"""Tag of the messages of an exchange. Point-to-point messages have different tags."""


class PeerFailedError(Exception):
    """Raised in a waiting rank when another rank has failed."""


class MessageKey(NamedTuple):
    """Key of a message between ranks: the operation, the number of the message, and the sender."""

    operation: str
    channel: Hashable
    sender: int


class LockProtocol(Protocol):
    """Interface of ``threading.Lock``."""

    def acquire(self) -> Any: ...
    def release(self) -> Any: ...


class Mailbox:
    """Shared storage for messages between ranks that run as threads.

    A wait ends with an error on all ranks if a rank has raised, if no rank can make progress, or after the timeout.

    Args:
        turn_lock: lock that only one running rank holds at a time. A rank releases it while it waits.
    """

    def __init__(self, num_ranks: int, timeout_s: float, turn_lock: LockProtocol | None = None) -> None:
        self.timeout_s, self.turn = timeout_s, turn_lock
        self._size = num_ranks
        self._changed = threading.Condition()
        self._values: dict[MessageKey, tuple[Any, int]] = {}  # the value, and the number of ranks that have not read it
        self._waiting: dict[int, Sequence[MessageKey]] = {}
        self._ended: set[int] = set()
        self._failed_at: float | None = None

    def put(self, key: MessageKey, message: Any, num_readers: int) -> None:
        """Store a message until ``num_readers`` ranks have read it."""
        with self._changed:
            self._values[key] = message, num_readers
            self._changed.notify_all()

    def remove(self, key: MessageKey) -> None:
        with self._changed:
            self._values.pop(key, None)

    def peek(self, key: MessageKey) -> Any:
        """Return the message with this key without removing it, or None if there is none."""
        with self._changed:
            return self._values.get(key, (None, 0))[0]

    def mark_ended(self, rank: int, *, has_failed: bool) -> None:
        """Record that the function of a rank has ended, and wake up the waiting ranks."""
        with self._changed:
            self._ended.add(rank)
            if has_failed and self._failed_at is None:
                self._failed_at = time.monotonic()
            self._changed.notify_all()

    def has_failure_timed_out(self) -> bool:
        """Return whether a rank failed more than ``timeout_s`` seconds ago."""
        return self._failed_at is not None and time.monotonic() > self._failed_at + self.timeout_s

    def wait_for_messages(self, rank: int, keys: Sequence[MessageKey], timeout_s: float) -> list[MessageKey]:
        """Wait for messages, and return the keys of those that did not arrive in time."""
        with self._release_turn_lock_while_waiting(), self._changed:
            self._waiting[rank] = keys
            if len(self._waiting) + len(self._ended) == self._size:
                self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._failed_at or not self._find_missing_keys(keys) or self._is_deadlocked(), timeout_s
            )
            if self._failed_at is not None:
                raise PeerFailedError("Another rank raised an error, so this rank stops waiting for messages.")
            del self._waiting[rank]
            return self._find_missing_keys(keys)

    @contextmanager
    def _release_turn_lock_while_waiting(self) -> Iterator[None]:
        if self.turn is not None:
            self.turn.release()
        try:
            yield
        finally:
            if self.turn is not None:
                self.turn.acquire()

    def wait_for_and_get_messages(self, waiting_rank: int, keys: Sequence[MessageKey]) -> list[Any]:
        """Wait for messages and return them. Raises WorkerError if some do not arrive."""
        if absent := self.wait_for_messages(waiting_rank, keys, self.timeout_s):
            raise self._make_missing_message_error(waiting_rank, absent)
        with self._changed:
            values = []
            for key in keys:
                value, readers = self._values.pop(key)
                if readers > 1:
                    self._values[key] = value, readers - 1
                values.append(value)
            return values

    def _find_missing_keys(self, keys: Sequence[MessageKey]) -> list[MessageKey]:
        return [key for key in keys if key not in self._values]

    def _is_deadlocked(self) -> bool:
        """Return whether every rank has ended or waits for a message that no rank has sent."""
        has_all_ranks = len(self._waiting) + len(self._ended) == self._size
        return has_all_ranks and all(map(self._find_missing_keys, self._waiting.values()))

    def _make_missing_message_error(self, waiting_rank: int, missing_keys: Sequence[MessageKey]) -> WorkerError:
        with self._changed:
            states = [_describe_wait(waiting_rank, missing_keys)]
            for other in range(self._size):
                if other in self._ended:
                    states.append(f"rank {other} has ended")
                elif other in self._waiting:
                    states.append(_describe_wait(other, self._find_missing_keys(self._waiting[other])))
                elif other != waiting_rank:
                    states.append(f"rank {other} still computes after {self.timeout_s:g} s")
        return WorkerError(
            f"The ranks cannot complete a collective: {'; '.join(states)}.",
            remedy="Make the same collective calls in the same order on all ranks, and receive every message sent.",
        )


def _describe_wait(rank: int, missing_keys: Sequence[MessageKey]) -> str:
    authors = " and ".join(str(key.sender) for key in missing_keys)
    return (
        f"rank {rank} waits for rank {authors} in {missing_keys[0].operation}"
        if missing_keys
        else f"rank {rank} continues"
    )


class ThreadWorld:
    """World of ranks that are threads of one process. Each thread creates its own instance."""

    store = None

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self.mailbox, self.rank = mailbox, rank
        self.thread = threading.current_thread()
        self._connected: Counter[tuple[int, ...]] = Counter()

    def create_transport(self, rank_groups: RankGroups) -> Transport:
        """Create the ``Transport`` between the ranks of this rank's group."""
        line = next((line for line in rank_groups if self.rank in line), (self.rank,))
        self._connected[line] += 1
        return ThreadTransport(self, line, self._connected[line])


class ThreadTransport:
    """Collectives and messages between ranks that are threads. Objects are passed by reference."""

    group = None

    def __init__(self, world: ThreadWorld, group_ranks: tuple[int, ...], channel_number: int) -> None:
        self.world = world
        self._line, self._me = group_ranks, world.rank
        self._channel = (group_ranks, channel_number)
        self._counts: Counter[Hashable] = Counter()

    def is_direct_exchange_faster(self, tensor: Tensor) -> bool:
        return True

    def has_serialized_sends(self, device: torch.device) -> bool:
        return False

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        parts = self._all_gather_values_async("all_reduce", _clone_tensor(tensor))
        return DeferredWork(
            lambda: tensor.copy_(_sum_tensors(parts()) if op == "sum" else torch.stack(parts()).amax(0))
        )

    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor) -> Work:
        parts = self._all_gather_values_async("all_gather", _clone_tensor(input_tensor))
        return DeferredWork(lambda: output_tensor.copy_(torch.cat(parts())))

    def reduce_scatter(self, output_tensor: Tensor, input_tensor: Tensor) -> Work:
        parts = self._all_gather_values_async("reduce_scatter", _clone_tensor(input_tensor))
        rank, size = self._line.index(self._me), len(self._line)
        return DeferredWork(lambda: output_tensor.copy_(_sum_tensors(parts()).chunk(size)[rank]))

    def exchange(self, send_tensors: Mapping[int, Tensor], recv_buffers: Mapping[int, Tensor]) -> Sequence[Work]:
        for to, x in send_tensors.items():
            if x.numel():
                self.send(x, to, EXCHANGE)
        return [self.receive(x, source, EXCHANGE) for source, x in recv_buffers.items() if x.numel()]

    def send(self, tensor: Tensor, dst: int, tag: int) -> Work:
        self.world.mailbox.put(self._make_next_message_key(self._me, self._line[dst], tag), _clone_tensor(tensor), 1)
        return DeferredWork(None)

    def receive(self, recv_buffer: Tensor, src: int, tag: int) -> Work:
        key = self._make_next_message_key(self._line[src], self._me, tag)

        def copy_received_tensor() -> None:
            (value,) = self.world.mailbox.wait_for_and_get_messages(self._me, [key])
            assert value.dtype == recv_buffer.dtype, f"received {value.dtype}, expected {recv_buffer.dtype}"
            recv_buffer.copy_(value.view(recv_buffer.shape))

        return DeferredWork(copy_received_tensor)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        is_source = self._line[src] == self._me
        values = self._all_gather_values_async("broadcast", _clone_tensor(tensor) if is_source else None)()
        with torch.no_grad():
            tensor.copy_(values[src])

    def broadcast_object(self, local_object: Any, src: int) -> Any:
        return self._all_gather_values_async("broadcast_object", local_object)()[src]

    def all_gather_objects(self, local_object: Any) -> list[Any]:
        return self._all_gather_values_async("all_gather_objects", local_object)()

    def all_gather_ints(self, local_ints: Sequence[int]) -> list[list[int]]:
        return self._all_gather_values_async("all_gather_ints", list(local_ints))()

    def announce_collective(self, call_name: str, *, wait: bool) -> PeerCollectiveStatus:
        self._counts["calls"] += 1
        keys = self._make_message_keys("calls", ("calls", self._counts["calls"]))
        before = self._make_message_keys("calls", ("calls", self._counts["calls"] - 2))  # read by all ranks
        index = self._line.index(self._me)
        mailbox = self.world.mailbox
        mailbox.remove(before[index])
        mailbox.put(keys[index], CollectiveAnnouncement(call_name, not wait), len(keys))
        if not wait:
            return PeerCollectiveStatus()
        mailbox.wait_for_messages(self._me, keys, mailbox.timeout_s)
        announced = [mailbox.peek(key) for key in keys]
        return PeerCollectiveStatus(
            announced, {rank: "does not arrive" for rank, entry in zip(self._line, announced) if entry is None}
        )

    def _all_gather_values_async(self, operation_name: str, local_value: Any) -> Callable[[], list[Any]]:
        """Start an all-gather of Python values. Returns a function that waits for the values of all ranks."""
        self._counts["meeting"] += 1
        keys = self._make_message_keys(operation_name, self._counts["meeting"])
        self.world.mailbox.put(keys[self._line.index(self._me)], local_value, len(keys))
        return lambda: self.world.mailbox.wait_for_and_get_messages(self._me, keys)

    def _make_message_keys(self, operation: str, call_id: Hashable) -> list[MessageKey]:
        return [MessageKey(operation, (self._channel, call_id), rank) for rank in self._line]

    def _make_next_message_key(self, src: int, dst: int, tag: int) -> MessageKey:
        way = (src, dst, tag)
        self._counts[way] += 1
        what = "an exchange" if tag == EXCHANGE else "a message"
        return MessageKey(what, (self._channel, dst, tag, self._counts[way]), src)


class DeferredWork:
    """Work handle whose ``wait`` completes the transfer by calling ``finish_fn``, if there is one."""

    def __init__(self, finish_fn: Callable[[], object] | None) -> None:
        self._finish = finish_fn

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            with torch.no_grad():
                finish()

    def is_completed(self) -> bool:
        return self._finish is None


def _clone_tensor(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _sum_tensors(tensors: Sequence[Tensor]) -> Tensor:
    return sum(tensors[1:], tensors[0])


class TurnLock:
    """Lock that runs one thread at a time, each with its own random states.

    All threads start from the random states at the creation of the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first = get_rng_states()
        self._own: dict[int, RandomStates] = {}

    def acquire(self) -> None:
        self._lock.acquire()
        set_rng_states(self._own.get(threading.get_ident(), self._first))

    def release(self) -> None:
        self._own[threading.get_ident()] = get_rng_states()
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
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
    one_at_a_time: bool = False,
) -> list[ThreadResult]:
    """Run ``fn`` once per rank of a mesh, with ranks as threads, and return the results in rank order.

    The ranks compute the same results as processes would, on the CPU. They share torch's default generator, so the
    random numbers of a rank depend on the scheduling of threads.

    Args:
        timeout_s: maximum time that a rank waits for another rank.
        one_at_a_time: run one rank at a time until it waits for another, each with its own random states of torch,
            NumPy and Python. All ranks start from the same states.

    Raises:
        WorkerError: a rank waits for one that has ended, waits for something else, or does not arrive within
            ``timeout_s`` seconds.
        Exception: the first error that a rank raised. The collectives of the other ranks end, too.
    """
    sizes = {"data": data, "pipe": pipe, "sequence": sequence, "tensor": tensor}
    grid = RankGrid.from_sizes(sizes)
    turn = TurnLock() if one_at_a_time else None
    mailbox = Mailbox(len(grid.ranks), timeout_s, turn)
    results: dict[int, ThreadResult] = {}
    errors: dict[int, BaseException] = {}

    def run_rank(rank: int) -> None:
        try:
            with turn or nullcontext():
                results[rank] = fn(
                    ParallelContext.from_sizes(sizes, grid.get_coords(rank), world=ThreadWorld(mailbox, rank))
                )
        except BaseException as error:
            errors[rank] = error
        mailbox.mark_ended(rank, has_failed=rank in errors)

    threads = [threading.Thread(target=run_rank, args=(r,), name=f"rank-{r}", daemon=True) for r in grid.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not mailbox.has_failure_timed_out():
            thread.join(1.0)
    if errors:  # the original error takes precedence over its consequences on other ranks
        raise min(sorted(errors.items()), key=lambda numbered: _is_caused_by_failed_peer(numbered[1]))[1]
    return [results[rank] for rank in grid.ranks]


def _is_caused_by_failed_peer(exception: BaseException | None) -> bool:
    if exception is None:
        return False
    return isinstance(exception, PeerFailedError) or _is_caused_by_failed_peer(
        exception.__cause__ or exception.__context__
    )
