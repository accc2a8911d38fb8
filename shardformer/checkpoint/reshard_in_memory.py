"""Move a training run to another layout in memory: each rank receives its chunks from the ranks that store them.

Example: four ranks store two rows each of an 8 x 8 tensor, and two of them need four columns each.

    source    rank 0: rows 0, 1   rank 1: rows 2, 3   rank 2: rows 4, 5   rank 3: rows 6, 7
    target    rank 0: columns 0 to 3, all rows        rank 1: columns 4 to 7, all rows

Rank 0 copies its own two rows of columns 0 to 3 and receives two rows from each of the other ranks: 6 * 4 elements.
Rank 1 receives the same number. Elements that a rank already stores are copied, all others are sent to it once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from shardformer.checkpoint.chunks import (
    ChunkBounds,
    LocalChunk,
    TensorItem,
    flat_range_to_chunks,
    overlap,
    subtract_chunks,
)
from shardformer.checkpoint.directory import goes_on_from, saved_into
from shardformer.checkpoint.file_format import CheckpointIndex, IndexEntry, dtype_name
from shardformer.checkpoint.load import LoadPlan
from shardformer.checkpoint.training_state import ModelTensors, StateContents, collect_state, optimizer_states
from shardformer.comm.collectives import PendingCollective, all_gather_objects
from shardformer.comm.recorder import bytes_of, record
from shardformer.errors import ConfigError, did_you_mean
from shardformer.layout.shard_spec import Offsets
from shardformer.mesh.parallel_context import Axis, local_device

TRANSFER_BYTES = 64 * 2**20
TAG = 3  # differs from the tags of exchanges and pipeline stages
WIDTH = attrgetter("itemsize")

Ranks = dict[int, torch.dtype]
"""Rank -> the dtype in which it stores or needs a chunk, in increasing order of ranks."""


@dataclass(frozen=True)
class ReshardStats:
    """Bytes that this rank sent, received, and copied from its own memory."""

    sent: int
    received: int
    copied: int


class ChunkTransfer(NamedTuple):
    """A chunk of a tensor that ``source`` sends to ``target`` in ``dtype``; a copy if both are the same rank."""

    name: str
    start: Offsets
    size: Offsets
    dtype: torch.dtype
    source: int
    target: int

    @property
    def num_bytes(self) -> int:
        return prod(self.size) * self.dtype.itemsize


TransferBatch = list[ChunkTransfer]  # the chunks in one message


class ItemListing(NamedTuple):
    """Description of a ``TensorItem`` without its values."""

    name: str
    shape: Offsets
    dtype: torch.dtype
    pieces: list[ChunkBounds]

    @classmethod
    def of(cls, item: TensorItem) -> ItemListing:
        pieces = [(held.start, tuple(held.values.shape)) for held in item.held if held.values.numel()]
        return cls(item.name, item.shape, item.dtype, pieces)


class RankListing(NamedTuple):
    """The tensors that a rank has and wants, and its settings."""

    have: list[ItemListing]
    want: list[ItemListing]
    uses_gpu: bool = False
    chunk_bytes: int = TRANSFER_BYTES


def exchange_items(
    have: Sequence[TensorItem], want: Sequence[TensorItem], world: Axis, *, chunk_bytes: int = TRANSFER_BYTES
) -> ReshardStats:
    """Fill ``want`` from the chunks that the ranks ``have``. All ranks of ``world`` must call it.

    A rank copies the elements it already stores. Every other element is sent to it once: by the owner with the least to
    send, in the narrower of the source and target dtypes. If a rank has or wants an element several times, the widest
    dtype counts.

    Communicates the names, shapes and bounds of all chunks, then point-to-point messages of at most ``chunk_bytes``.
    Needs up to 2 * chunk_bytes of memory for each peer, on the GPU with NCCL.

    Args:
        have: this rank's source chunks. Chunks of different ranks may overlap; any owner may send an element.
        want: this rank's target chunks, which are overwritten and must not share memory with ``have``.
        chunk_bytes: maximum size of a message, identical on all ranks. A message has at least one element.

    Raises:
        ConfigError: a tensor or a chunk is wanted but no rank has it, or ranks report different shapes of a tensor. All
            ranks raise before anything is written.
    """
    gpu = next((held.values.device for item in (*have, *want) for held in item.held if held.values.is_cuda), None)
    mine = RankListing(
        [ItemListing.of(item) for item in have], [ItemListing.of(item) for item in want], gpu is not None, chunk_bytes
    )
    said: list[RankListing] = all_gather_objects(mine, world)
    _check_chunk_bytes(said)
    leaving: list[TransferBatch] = [[] for _ in said]
    coming: list[TransferBatch] = [[] for _ in said]
    for send in plan_transfers(said):  # may raise, so it is consumed before anything is written
        if send.source == world.rank:
            leaving[send.target].append(send)
        elif send.target == world.rank:
            coming[send.source].append(send)
    copies, leaving[world.rank] = leaving[world.rank], []
    memory = _LocalItems(have, want)
    with torch.no_grad():
        for send in copies:
            memory.write(send, memory.read(send))
        if any(leaving) or any(coming):
            # both ends of a message use the same device type: the GPU if a rank uses one and the transport is NCCL
            on_gpu = any(one.uses_gpu for one in said) and world.transport.sends_in_turn(torch.device("cuda"))
            device = gpu or local_device() if on_gpu else torch.device("cpu")
            out, into = ([batch_transfers(sends, chunk_bytes) for sends in each] for each in (leaving, coming))
            _exchange(memory, out, into, world, device)
    return ReshardStats(sum(map(_bytes_in, leaving)), sum(map(_bytes_in, coming)), _bytes_in(copies))


def _bytes_in(sends: Iterable[ChunkTransfer]) -> int:
    return sum(send.num_bytes for send in sends)


def plan_transfers(said: Sequence[RankListing]) -> Iterator[ChunkTransfer]:
    """Yield the transfers and copies of all ranks, in the same order on all ranks.

    Chunks with a single owner come first. The others follow by increasing number of owners and decreasing size, each
    sent by the owner with the least to send so far.
    """
    load = [0] * len(said)
    shared: list[tuple[int, int, str, ChunkBounds, Ranks, Ranks]] = []
    for name, tensor in _tensors(said).items():
        for piece, owners, takers in tensor.demands(name):
            if len(owners) == 1:
                yield from _sends(name, piece, owners, takers, load)
            else:
                shared.append((len(owners), -prod(piece[1]), name, piece, owners, takers))
    for _, _, name, piece, owners, takers in sorted(shared, key=lambda demand: demand[:4]):
        yield from _sends(name, piece, owners, takers, load)


def _sends(name: str, piece: ChunkBounds, owners: Ranks, takers: Ranks, load: list[int]) -> Iterator[ChunkTransfer]:
    """Yield the transfer of ``piece`` to each target; ``load`` counts the bytes that each rank sends."""
    for target, dtype in takers.items():
        source = target if target in owners else min(owners, key=load.__getitem__)
        send = ChunkTransfer(name, *piece, min(owners[source], dtype, key=WIDTH), source, target)
        if source != target:
            load[source] += send.num_bytes
        yield send


@dataclass
class _Tensor:
    """Chunks of one tensor that all ranks have and want. ``rank`` is the first rank that listed the tensor."""

    shape: Offsets
    rank: int
    held: dict[ChunkBounds, Ranks] = field(default_factory=dict)
    wanted: dict[ChunkBounds, Ranks] = field(default_factory=dict)

    def demands(self, name: str) -> Iterator[tuple[ChunkBounds, Ranks, Ranks]]:
        """Yield (chunk, owners, targets) of the wanted chunks, split where the set of owners changes."""
        over: dict[ChunkBounds, list[tuple[ChunkBounds, Ranks]]] = {piece: [] for piece in self.wanted}
        for piece, other, common in _overlaps(self.wanted, self.held):
            over[piece].append((common, self.held[other]))
        are_apart = _are_apart(list(self.held))
        for piece, takers in self.wanted.items():
            for cell, owners in _cells(piece, over[piece], are_apart):
                if not owners:
                    raise _no_source_error(
                        f"the box of shape {list(cell[1])} at {list(cell[0])} of {name}", min(takers)
                    )
                yield cell, owners, takers


def _overlaps(
    some: Iterable[ChunkBounds], others: Iterable[ChunkBounds]
) -> Iterator[tuple[ChunkBounds, ChunkBounds, ChunkBounds]]:
    """Yield (chunk of ``some``, chunk of ``others``, intersection) of all overlapping pairs.

    Vectorized, because R ranks with a chunk each lead to R * R comparisons per tensor.
    """
    some, others = list(some), list(others)
    if not (some and others):
        return
    (low, size), (other_low, other_size) = (torch.tensor(each, device="cpu").unbind(1) for each in (some, others))
    start = torch.maximum(low[:, None], other_low)
    extent = torch.minimum((low + size)[:, None], other_low + other_size) - start
    at, other_at = (extent > 0).all(-1).nonzero(as_tuple=True)
    rows = (x.tolist() for x in (at, other_at, start[at, other_at], extent[at, other_at]))
    for i, j, common, length in zip(*rows, strict=True):
        yield some[i], others[j], (tuple(common), tuple(length))


def _tensors(said: Sequence[RankListing]) -> dict[str, _Tensor]:
    """Collect the tensors that any rank has or wants, by name."""
    tensors: dict[str, _Tensor] = {}
    for rank, one in enumerate(said):
        for name, shape, dtype, pieces in one.have:
            held = _known(tensors, name, shape, rank).held
            for piece in pieces:
                ranks = held.setdefault(piece, {})
                ranks[rank] = max(ranks.get(rank, dtype), dtype, key=WIDTH)
    names = set(tensors)
    for rank, one in enumerate(said):
        asked: dict[str, list[ChunkBounds]] = {}
        for name, shape, dtype, pieces in sorted(one.want, key=lambda listed: -listed.dtype.itemsize):
            if name not in names:
                raise _no_source_error(name, rank, f"{did_you_mean(name, names)} ")
            wanted, before = _known(tensors, name, shape, rank).wanted, asked.setdefault(name, [])
            for piece in pieces:
                for rest in subtract_chunks(piece, before):
                    wanted.setdefault(rest, {})[rank] = dtype
                before.append(piece)
    return tensors


def _known(tensors: dict[str, _Tensor], name: str, shape: Offsets, rank: int) -> _Tensor:
    tensor = tensors.setdefault(name, _Tensor(shape, rank))
    if tensor.shape != shape:
        raise ConfigError(
            f"{name} has the shape {tensor.shape} on rank {tensor.rank} and {shape} on rank {rank}",
            remedy="Build both models from the same config on all ranks",
        )
    return tensor


def _cells(
    piece: ChunkBounds, over: Sequence[tuple[ChunkBounds, Ranks]], are_apart: bool = False, owners: Sequence[Ranks] = ()
) -> Iterator[tuple[ChunkBounds, Ranks]]:
    """Split ``piece`` into chunks whose elements all have the same owners, and yield (chunk, owners).

    The chunks in ``over`` lie in ``piece``. If they overlap each other, the middle one divides the others recursively.
    """
    owners = [*owners, *(ranks for part, ranks in over if part == piece)]
    over = [(part, ranks) for part, ranks in over if part != piece]
    parts = [part for part, _ in over]
    if are_apart or _are_apart(parts):
        yield from ((part, _merged(ranks, *owners)) for part, ranks in over)
        if sum(prod(size) for _, size in parts) < prod(piece[1]):
            yield from ((rest, _merged(*owners)) for rest in subtract_chunks(piece, parts))
        return
    middle = parts[len(parts) // 2]
    for cell in (middle, *subtract_chunks(piece, [middle])):
        yield from _cells(cell, [(c, ranks) for part, ranks in over if (c := overlap(cell, part))], False, owners)


def _are_apart(pieces: Sequence[ChunkBounds]) -> bool:
    if len(pieces) < 8:  # faster than arrays
        return not any(overlap(a, b) for a, b in combinations(pieces, 2))
    return sum(1 for _ in _overlaps(pieces, pieces)) == len(pieces)


def _merged(*owners: Ranks) -> Ranks:
    if len(owners) == 1:
        return owners[0]
    found: Ranks = {}
    for rank, dtype in (each for ranks in owners for each in ranks.items()):
        found[rank] = max(found.get(rank, dtype), dtype, key=WIDTH)
    return dict(sorted(found.items()))


class _LocalItems:
    """Chunks that this rank has and wants, by tensor name, the widest dtype first."""

    def __init__(self, have: Sequence[TensorItem], want: Sequence[TensorItem]) -> None:
        self._have, self._want = _by_name(have), _by_name(want)

    def read(self, send: ChunkTransfer) -> Tensor:
        piece = send.start, send.size
        have = self._have[send.name]
        return next(h for h in have if overlap((h.start, tuple(h.values.shape)), piece) == piece).part(*piece)

    def write(self, send: ChunkTransfer, values: Tensor) -> None:
        """Copy a chunk into all target chunks that overlap it."""
        arrived = LocalChunk(send.start, values)
        for held in self._want[send.name]:
            if (common := overlap((held.start, tuple(held.values.shape)), (send.start, send.size))) is not None:
                held.part(*common).copy_(arrived.part(*common))


def _by_name(items: Sequence[TensorItem]) -> dict[str, list[LocalChunk]]:
    found: dict[str, list[LocalChunk]] = {}
    for item in sorted(items, key=lambda item: -item.dtype.itemsize):
        found.setdefault(item.name, []).extend(held for held in item.held if held.values.numel())
    return found


def _exchange(
    memory: _LocalItems,
    out: Sequence[Iterator[TransferBatch]],
    into: Sequence[Iterator[TransferBatch]],
    world: Axis,
    device: torch.device,
) -> None:
    """Send and receive in rounds, with at most one message per round between each ordered pair of ranks."""
    while True:
        leaving, coming = ([next(chunks, []) for chunks in each] for each in (out, into))
        if not any(leaving) and not any(coming):
            return
        pending: list[PendingCollective] = []
        received: list[tuple[TransferBatch, PendingCollective]] = []
        for peer, sends in message_order(world.rank, world.size):
            if sends and leaving[peer]:
                pending.append(_start("send", _packed(leaving[peer], memory, device), peer, world))
            elif not sends and coming[peer]:
                buffer = torch.empty(_bytes_in(coming[peer]), dtype=torch.uint8, device=device)
                received.append((coming[peer], _start("receive", buffer, peer, world)))
        for chunk, arrival in received:
            for send, place in _places(chunk, arrival.wait()):
                memory.write(send, place)
        for each in pending:
            each.wait()


def message_order(rank: int, size: int) -> Iterator[tuple[int, bool]]:
    """Yield (peer, whether to send) for the messages of one round, in the order in which this rank starts them.

    NCCL runs the messages of a rank one after the other, and a message starts only when both ends have reached it. All
    ranks therefore use one global order: pairs of ranks by the sum of their ranks modulo the size, so that each rank is
    in one pair at a time. In a pair, the lower rank sends first.

    >>> [(peer, "sends" if sends else "receives") for peer, sends in message_order(1, 3)]
    [(2, 'sends'), (2, 'receives'), (0, 'receives'), (0, 'sends')]
    """
    for total in range(size):
        peer = (total - rank) % size
        if peer != rank:
            yield peer, rank < peer
            yield peer, rank > peer


def batch_transfers(sends: Iterable[ChunkTransfer], chunk_bytes: int) -> Iterator[TransferBatch]:
    """Split the transfers between two ranks into messages of at most ``chunk_bytes``, or of one element.

    Wide dtypes come first, which aligns all elements without padding.
    """
    chunk: TransferBatch = []
    room = chunk_bytes
    for send in sorted(sends, key=lambda send: -send.dtype.itemsize):
        done, numel = 0, prod(send.size)
        while done < numel:
            count = min(room // send.dtype.itemsize, numel - done)
            if count < 1 and chunk:
                yield chunk
                chunk, room = [], chunk_bytes
                continue
            count = max(count, 1)
            for start, size in flat_range_to_chunks(send.size, done, done + count):
                at = tuple(a + b for a, b in zip(send.start, start, strict=True))
                chunk.append(send._replace(start=at, size=size))
            done, room = done + count, room - count * send.dtype.itemsize
    if chunk:
        yield chunk


def _packed(chunk: TransferBatch, memory: _LocalItems, device: torch.device) -> Tensor:
    buffer = torch.empty(_bytes_in(chunk), dtype=torch.uint8, device=device)
    for send, place in _places(chunk, buffer):
        place.copy_(memory.read(send))
    return buffer


def _places(chunk: TransferBatch, buffer: Tensor) -> Iterator[tuple[ChunkTransfer, Tensor]]:
    """Yield each transfer of a message with its view of the message buffer."""
    at = 0
    for send in chunk:
        yield send, buffer[at : at + send.num_bytes].view(send.dtype).view(send.size)
        at += send.num_bytes


def _start(op: Literal["send", "receive"], x: Tensor, peer: int, world: Axis) -> PendingCollective:
    noted = record(op, world, bytes_of(x), "move", ranks=2)
    return PendingCollective([getattr(world.transport, op)(x, peer, TAG)], lambda: x, noted)


def _check_chunk_bytes(said: Sequence[RankListing]) -> None:
    given: list[Any] = [one.chunk_bytes for one in said]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 or n != given[0] for n in given):
        raise ConfigError(
            f"chunk_bytes is {', '.join(map(repr, dict.fromkeys(given)))}, not one positive integer on all ranks",
            remedy="Pass the same positive number of bytes on all ranks, or omit chunk_bytes",
        )


def _no_source_error(what: str, rank: int, hint: str = "") -> ConfigError:
    return ConfigError(
        f"Rank {rank} wants {what}, which no rank has", remedy=f"{hint}Pass it in have on a rank that stores it"
    )


class ReshardSource:
    """The state of a training run, kept while the model and its optimizers are built under another layout.

    Communicates names and sizes of the tensors, and plain values.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        tensors = ModelTensors(model)
        self._world = tensors.world
        self._folders = saved_into(tensors.model)
        self._reading = ExitStack()
        if tensors.zero is not None:
            self._reading.enter_context(tensors.zero.readable_state())
        _, self._holding = collect_state(tensors, lambda: None, optimizer, None, None)
        self._index = CheckpointIndex(
            0, time.time(), tensors.sizes, _entries(self._holding, tensors), self._holding.values
        )

    @property
    def groups(self) -> list[list[list[str]]]:
        """Names of the parameters in the unsharded model, per optimizer and parameter group."""
        return [[group["names"] for group in each["groups"]] for each in self._index.values["optimizers"]]

    def close(self) -> None:
        """Release the previous state."""
        self._reading.close()

    def load_into(self, model: nn.Module, optimizer: Any = None, *, chunk_bytes: int = TRANSFER_BYTES) -> ReshardStats:
        """Fill a model of the same class under another layout, and its optimizer, over the same processes.

        All ranks must call it. A rank copies the elements that it stores under both layouts. Every other element is
        sent to it once by a rank that stores it. See ``exchange_items`` for ``chunk_bytes``.

        Raises:
            ConfigError: the model or optimizer differs from the source. All ranks raise before the model is modified.
        """
        tensors = ModelTensors(model)
        wanted = LoadPlan(self._index, "the run before", tensors, optimizer_states(optimizer, tensors))
        moved = exchange_items(self._holding.items, wanted.items, self._world, chunk_bytes=chunk_bytes)
        self.close()
        wanted.commit()
        goes_on_from(tensors.model, self._folders)
        return moved


def _entries(holding: StateContents, tensors: ModelTensors) -> dict[str, IndexEntry]:
    """Gather the dtype and shape of the tensors of all ranks."""
    mine = {item.name: (dtype_name(item.dtype), item.shape) for item in holding.items}
    found: dict[str, IndexEntry] = {}
    for theirs in all_gather_objects(mine, tensors.world):
        for name, (dtype, shape) in theirs.items():
            found.setdefault(name, IndexEntry(dtype, shape))
    return found
