"""Moves a training run to another layout in memory: each rank receives its pieces from the ranks that have them.

Four ranks have a quarter of the rows of x each, and are to have halves of its columns, on two of them:

    has     rank 0: rows 0, 1   rank 1: rows 2, 3   rank 2: rows 4, 5   rank 3: rows 6, 7
    wants   rank 0: columns 0 to 3, of all rows     rank 1: columns 4 to 7, of all rows

Rank 0 copies its two rows of its columns, and gets two from each of the others: 6 * 4 numbers are sent to it, and as
many to rank 1. Numbers that a rank has itself are never sent, all others that it wants once.
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
TAG = 3  # of these messages; exchanges and pipeline stages have others
WIDTH = attrgetter("itemsize")

Ranks = dict[int, torch.dtype]
"""Ranks in rising order, and the dtype in which each has, or wants, some numbers."""


@dataclass(frozen=True)
class ReshardStats:
    """Bytes that this rank sent to others, received from others, and copied from what it had."""

    sent: int
    received: int
    copied: int


class ChunkTransfer(NamedTuple):
    """A piece of a tensor that one rank gives to another, or to itself, and the dtype in which it does."""

    name: str
    start: Offsets
    size: Offsets
    dtype: torch.dtype
    source: int
    target: int

    @property
    def num_bytes(self) -> int:
        return prod(self.size) * self.dtype.itemsize


TransferBatch = list[ChunkTransfer]  # of one message


class ItemListing(NamedTuple):
    """An item without its values: what other ranks know of it."""

    name: str
    shape: Offsets
    dtype: torch.dtype
    pieces: list[ChunkBounds]

    @classmethod
    def of(cls, item: TensorItem) -> ItemListing:
        pieces = [(held.start, tuple(held.values.shape)) for held in item.held if held.values.numel()]
        return cls(item.name, item.shape, item.dtype, pieces)


class RankListing(NamedTuple):
    """What a rank says of itself to all."""

    have: list[ItemListing]
    want: list[ItemListing]
    uses_gpu: bool = False
    chunk_bytes: int = TRANSFER_BYTES


def exchange_items(
    have: Sequence[TensorItem], want: Sequence[TensorItem], world: Axis, *, chunk_bytes: int = TRANSFER_BYTES
) -> ReshardStats:
    """Fills ``want`` from what the ranks ``have``. All ranks of ``world`` call it.

    A number that this rank has itself is copied. Any other is sent to it once, by the rank that has sent the least of
    those that have it, in the dtype in which it is held or the one in which it is wanted, whichever is narrower. Of
    numbers that a rank has or wants several times the widest dtype counts.

    Communicates the names, shapes and places of all pieces, and then messages between two ranks, at most
    ``chunk_bytes`` at a time each way. This takes 2 * chunk_bytes for each other rank, on the GPU where NCCL is used.

    Args:
        have: what this rank has. The pieces of ranks overlap in any way; any that has a number may give it.
        want: what this rank is to have: the memory that is written. It shares nothing with that of ``have``.
        chunk_bytes: the same on all ranks. A message has one number at the least.

    Raises ConfigError, on all ranks and before anything is written, for a tensor or a part of one that a rank wants
    and none has, and for a tensor of which ranks name different shapes.
    """
    gpu = next((held.values.device for item in (*have, *want) for held in item.held if held.values.is_cuda), None)
    mine = RankListing(
        [ItemListing.of(item) for item in have], [ItemListing.of(item) for item in want], gpu is not None, chunk_bytes
    )
    said: list[RankListing] = all_gather_objects(mine, world)
    _check_chunk_bytes(said)
    leaving: list[TransferBatch] = [[] for _ in said]
    coming: list[TransferBatch] = [[] for _ in said]
    for send in plan_transfers(said):  # all of it is read before anything is written, as it may raise
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
            # both ends of a message have it on one kind of device: the GPU where a rank uses one and NCCL carries it
            on_gpu = any(one.uses_gpu for one in said) and world.transport.sends_in_turn(torch.device("cuda"))
            device = gpu or local_device() if on_gpu else torch.device("cpu")
            out, into = ([batch_transfers(sends, chunk_bytes) for sends in each] for each in (leaving, coming))
            _exchange(memory, out, into, world, device)
    return ReshardStats(sum(map(_bytes_in, leaving)), sum(map(_bytes_in, coming)), _bytes_in(copies))


def _bytes_in(sends: Iterable[ChunkTransfer]) -> int:
    return sum(send.num_bytes for send in sends)


def plan_transfers(said: Sequence[RankListing]) -> Iterator[ChunkTransfer]:
    """All that is sent or copied, on any rank: the same, in the same order, on all ranks.

    First comes what one rank alone has. Of the rest, what fewest ranks have and large pieces go first, and always
    from the rank that has least to send so far.
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
    """What each taker gets, from itself where it is an owner. ``load``: the bytes that each rank sends so far."""
    for target, dtype in takers.items():
        source = target if target in owners else min(owners, key=load.__getitem__)
        send = ChunkTransfer(name, *piece, min(owners[source], dtype, key=WIDTH), source, target)
        if source != target:
            load[source] += send.num_bytes
        yield send


@dataclass
class _Tensor:
    """What all ranks have and want of one tensor. ``rank`` is the first that named it."""

    shape: Offsets
    rank: int
    held: dict[ChunkBounds, Ranks] = field(default_factory=dict)
    wanted: dict[ChunkBounds, Ranks] = field(default_factory=dict)

    def demands(self, name: str) -> Iterator[tuple[ChunkBounds, Ranks, Ranks]]:
        """(piece, who has it, who wants it) of what is wanted, cut where those who have it change."""
        over: dict[ChunkBounds, list[tuple[ChunkBounds, Ranks]]] = {piece: [] for piece in self.wanted}
        for piece, other, common in _overlaps(self.wanted, self.held):
            over[piece].append((common, self.held[other]))
        are_apart = _are_apart(list(self.held))
        for piece, takers in self.wanted.items():
            for cell, owners in _cells(piece, over[piece], are_apart):
                if not owners:
                    raise _no_source_error(f"{name} from {list(cell[0])} on, {list(cell[1])} numbers", min(takers))
                yield cell, owners, takers


def _overlaps(
    some: Iterable[ChunkBounds], others: Iterable[ChunkBounds]
) -> Iterator[tuple[ChunkBounds, ChunkBounds, ChunkBounds]]:
    """(one of some, one of others, what they have in common), of all that have something in common.

    As arrays, since of a tensor each of R ranks may have a piece and want one: R * R are compared.
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
    """The tensors that are had or wanted, by their names."""
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
            f"{name} has the shape {tensor.shape} on rank {tensor.rank}, and {shape} on rank {rank}",
            remedy="Build the model from the same config on all ranks, before and after",
        )
    return tensor


def _cells(
    piece: ChunkBounds, over: Sequence[tuple[ChunkBounds, Ranks]], are_apart: bool = False, owners: Sequence[Ranks] = ()
) -> Iterator[tuple[ChunkBounds, Ranks]]:
    """The parts of ``piece`` in each of which all numbers have the same owners, and those.

    ``over`` lies in ``piece``. Where some of it overlaps, the one in its middle divides what is left.
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
    if len(pieces) < 8:  # where arrays take longer
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
    """What this rank has and wants, by name, the widest dtype first."""

    def __init__(self, have: Sequence[TensorItem], want: Sequence[TensorItem]) -> None:
        self._have, self._want = _by_name(have), _by_name(want)

    def read(self, send: ChunkTransfer) -> Tensor:
        piece = send.start, send.size
        have = self._have[send.name]
        return next(h for h in have if overlap((h.start, tuple(h.values.shape)), piece) == piece).part(*piece)

    def write(self, send: ChunkTransfer, values: Tensor) -> None:
        """Puts a piece wherever it is wanted."""
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
    """Sends and receives in rounds, in each of which at most one message goes from one rank to another."""
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
    """(peer, whether to send or to receive) of the messages of a round, in the order in which a rank starts them.

    NCCL runs a rank's messages one after the other, where both ends must have come to a message before it starts. So
    all ranks start theirs in one order: pairs by the sum of their ranks, modulo the size, which puts each rank into
    one pair at a time; in a pair the lower rank sends first.

    >>> [(peer, "sends" if sends else "receives") for peer, sends in message_order(1, 3)]
    [(2, 'sends'), (2, 'receives'), (0, 'receives'), (0, 'sends')]
    """
    for total in range(size):
        peer = (total - rank) % size
        if peer != rank:
            yield peer, rank < peer
            yield peer, rank > peer


def batch_transfers(sends: Iterable[ChunkTransfer], chunk_bytes: int) -> Iterator[TransferBatch]:
    """What goes from one rank to another, in messages of at most so many bytes, or of one number.

    Wide dtypes go first, so that all numbers are aligned without gaps between them.
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
    """The place of each piece in a message."""
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
            f"chunk_bytes is {', '.join(map(repr, dict.fromkeys(given)))}",
            rule="It says how many bytes a message between two ranks has at the most, and is the same on all ranks",
            remedy="Give one int from 1 on, or leave it out",
        )


def _no_source_error(what: str, rank: int, hint: str = "") -> ConfigError:
    return ConfigError(
        f"Rank {rank} wants {what}, which no rank has", remedy=f"{hint}Give it in have, on a rank that has it"
    )


class ReshardSource:
    """What the ranks have of a training run, kept while the model and its optimizers are built anew.

    Communicates names and sizes of what all have, and plain values.
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
        """Of each optimizer, and each of its groups, the names of the parameters in the plain model, in their order."""
        return [[group["names"] for group in each["groups"]] for each in self._index.values["optimizers"]]

    def close(self) -> None:
        """What the ranks had is not read any more."""
        self._reading.close()

    def load_into(self, model: nn.Module, optimizer: Any = None, *, chunk_bytes: int = TRANSFER_BYTES) -> ReshardStats:
        """Fills a model of the same kind under another layout, and what trains it, over the same processes.

        All ranks call it. What a rank holds under both layouts it copies; of what else it will hold each number is sent
        to it once, by a rank that has it. ``chunk_bytes``: see ``exchange_items``.

        Raises ConfigError, on all ranks and with the new model as it was, for another model or optimizer.
        """
        tensors = ModelTensors(model)
        wanted = LoadPlan(self._index, "the run before", tensors, optimizer_states(optimizer, tensors))
        moved = exchange_items(self._holding.items, wanted.items, self._world, chunk_bytes=chunk_bytes)
        self.close()
        wanted.commit()
        goes_on_from(tensors.model, self._folders)
        return moved


def _entries(holding: StateContents, tensors: ModelTensors) -> dict[str, IndexEntry]:
    """All tensors, on any rank, without where they are."""
    mine = {item.name: (dtype_name(item.dtype), item.shape) for item in holding.items}
    found: dict[str, IndexEntry] = {}
    for theirs in all_gather_objects(mine, tensors.world):
        for name, (dtype, shape) in theirs.items():
            found.setdefault(name, IndexEntry(dtype, shape))
    return found
