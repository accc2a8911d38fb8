"""Move a training run to another parallel layout in memory, without writing a checkpoint.

Each rank receives its new chunks of every tensor from the ranks that store them.

Example: four ranks store two rows each of an 8 x 8 tensor, and two of them need four columns each.

    source    rank 0: rows 0, 1   rank 1: rows 2, 3   rank 2: rows 4, 5   rank 3: rows 6, 7
    target    rank 0: columns 0 to 3, all rows        rank 1: columns 4 to 7, all rows

Rank 0 copies its own two rows of columns 0 to 3 and receives two rows from each of the other ranks: 6 * 4 elements.
Rank 1 receives the same number. Elements that a rank already stores are copied. All others are sent to it once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, combinations
from math import prod
from operator import attrgetter
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardformer.checkpoint.chunks import (
    CheckpointTensor,
    ChunkBounds,
    LocalTensorChunk,
    intersect_chunks,
    split_flat_range_into_chunks,
    subtract_chunks,
)
from shardformer.checkpoint.directory import get_checkpoint_directories, record_resumed_checkpoint_dirs
from shardformer.checkpoint.file_format import CheckpointIndex, TensorIndexEntry, get_dtype_name
from shardformer.checkpoint.load import LoadPlan
from shardformer.checkpoint.training_state import (
    ModelCheckpointTensors,
    collect_optimizer_states,
    collect_training_state,
)
from shardformer.comm.collectives import PendingCollective, all_gather_objects
from shardformer.comm.recorder import get_num_bytes, record_collective_start
from shardformer.errors import ConfigError, suggest_similar_names
from shardformer.layout.shard_spec import Offsets
from shardformer.mesh.parallel_context import Axis, get_local_device

TRANSFER_BYTES = 64 * 2**20
TAG = 3  # differs from the tags of exchanges and pipeline stages
WIDTH = attrgetter("itemsize")

Ranks = dict[int, torch.dtype]
"""Rank -> the dtype in which it stores or needs a chunk, in increasing order of ranks."""


@dataclass(frozen=True)
class ReshardStats:
    """Bytes that this rank sent, received, and copied from its own memory while resharding."""

    sent: int
    received: int
    copied: int


class ChunkTransfer(NamedTuple):
    """A chunk of a tensor that ``source_rank`` sends to ``target_rank``, or copies locally if both are equal."""

    name: str
    start: Offsets
    size: Offsets
    dtype: torch.dtype
    source_rank: int
    target_rank: int

    @property
    def num_bytes(self) -> int:
        return prod(self.size) * self.dtype.itemsize


TransferBatch = list[ChunkTransfer]  # the chunks in one message


class CheckpointTensorMetadata(NamedTuple):
    """Metadata of a ``CheckpointTensor``, which is sent to other ranks without its values."""

    name: str
    shape: Offsets
    dtype: torch.dtype
    chunks: list[ChunkBounds]

    @classmethod
    def from_item(cls, item: CheckpointTensor) -> CheckpointTensorMetadata:
        chunks = [chunk.bounds for chunk in item.chunks if chunk.values.numel()]
        return cls(item.name, item.shape, item.dtype, chunks)


class StoredAndRequestedTensors(NamedTuple):
    """The tensors that one rank stores, and those that it needs to receive."""

    stored: list[CheckpointTensorMetadata]
    requested: list[CheckpointTensorMetadata]
    is_on_gpu: bool = False


def redistribute_tensors_across_ranks(
    stored_tensors: Sequence[CheckpointTensor],
    requested_tensors: Sequence[CheckpointTensor],
    world: Axis,
    *,
    max_message_bytes: int = TRANSFER_BYTES,
) -> ReshardStats:
    """Move tensor data between ranks until every rank has all chunks that it requests.

    All ranks of ``world`` must call this function. A rank copies the elements that it already stores. Every other
    element is sent to it once by the owner with the least to send, in the narrower of the source and target dtypes. If
    a rank lists an element several times in ``stored_tensors`` or ``requested_tensors``, the copy in the widest dtype
    is used.

    Communicates the names, shapes and bounds of all chunks, then point-to-point messages of at most
    ``max_message_bytes``. Needs up to 2 * chunk_bytes of memory for each peer. With NCCL, this memory is on the GPU.

    Args:
        stored_tensors: this rank's source chunks. Chunks of different ranks may overlap; any owner may send an element.
        requested_tensors: this rank's target chunks, which are overwritten and must not share memory with
            ``stored_tensors``.
        max_message_bytes: maximum size of a message, identical on all ranks. A message has at least one element.

    Raises:
        ConfigError: a rank requests a tensor or a chunk that no rank has, or ranks report different shapes of a tensor.
            All ranks raise before anything is written.
    """
    chunks = (chunk for item in (*stored_tensors, *requested_tensors) for chunk in item.chunks)
    gpu = next((chunk.values.device for chunk in chunks if chunk.values.is_cuda), None)
    listing = StoredAndRequestedTensors(
        [*map(CheckpointTensorMetadata.from_item, stored_tensors)],
        [*map(CheckpointTensorMetadata.from_item, requested_tensors)],
        gpu is not None,
    )
    listings: list[StoredAndRequestedTensors] = all_gather_objects(listing, world)
    outgoing: list[TransferBatch] = [[] for _ in listings]
    incoming: list[TransferBatch] = [[] for _ in listings]
    for send in plan_chunk_transfers(listings):  # may raise, so it is consumed before anything is written
        if send.source_rank == world.rank:
            outgoing[send.target_rank].append(send)
        elif send.target_rank == world.rank:
            incoming[send.source_rank].append(send)
    copies, outgoing[world.rank] = outgoing[world.rank], []
    memory = _LocalChunks(stored_tensors, requested_tensors)
    with torch.no_grad():
        for send in copies:
            memory.write_chunk(send, memory.read_chunk(send))
        if any(outgoing) or any(incoming):
            # both ends of a message use the same device type: the GPU if a rank uses one and the transport is NCCL
            uses_nccl = world.transport.has_serialized_sends(torch.device("cuda"))
            on_gpu = uses_nccl and any(each.is_on_gpu for each in listings)
            device = gpu or get_local_device() if on_gpu else torch.device("cpu")
            out, into = ([batch_transfers(sends, max_message_bytes) for sends in each] for each in (outgoing, incoming))
            _exchange_chunks(memory, out, into, world, device)
    return ReshardStats(
        sum(map(_count_transfer_bytes, outgoing)),
        sum(map(_count_transfer_bytes, incoming)),
        _count_transfer_bytes(copies),
    )


def _count_transfer_bytes(transfers: Iterable[ChunkTransfer]) -> int:
    return sum(send.num_bytes for send in transfers)


def plan_chunk_transfers(tensors_by_rank: Sequence[StoredAndRequestedTensors]) -> Iterator[ChunkTransfer]:
    """Decide which rank sends each requested chunk, and yield the transfers in the same order on all ranks.

    Chunks with a single owner come first. The others follow by increasing number of owners and decreasing size. Each
    is sent by the owner with the least to send so far.
    """
    load = [0] * len(tensors_by_rank)
    shared: list[tuple[int, int, str, ChunkBounds, Ranks, Ranks]] = []
    for name, tensor in _collect_chunks_by_tensor(tensors_by_rank).items():
        for chunk, owners, targets in tensor.split_by_owners(name):
            if len(owners) == 1:
                yield from _plan_chunk_sends(name, chunk, owners, targets, load)
            else:
                shared.append((len(owners), -prod(chunk[1]), name, chunk, owners, targets))
    for _, _, name, chunk, owners, targets in sorted(shared, key=lambda demand: demand[:4]):
        yield from _plan_chunk_sends(name, chunk, owners, targets, load)


def _plan_chunk_sends(
    tensor_name: str, chunk: ChunkBounds, owner_ranks: Ranks, target_ranks: Ranks, bytes_to_send_by_rank: list[int]
) -> Iterator[ChunkTransfer]:
    """Choose which rank sends ``chunk`` to each target rank, balancing the bytes that each rank sends."""
    for target, dtype in target_ranks.items():
        source = target if target in owner_ranks else min(owner_ranks, key=bytes_to_send_by_rank.__getitem__)
        send = ChunkTransfer(tensor_name, *chunk, min(owner_ranks[source], dtype, key=WIDTH), source, target)
        if source != target:
            bytes_to_send_by_rank[source] += send.num_bytes
        yield send


@dataclass
class _StoredAndRequestedChunks:
    """All chunks of a tensor that any rank stores or requests. ``rank`` is the first rank that lists the tensor."""

    shape: Offsets
    rank: int
    sources: dict[ChunkBounds, Ranks] = field(default_factory=dict)
    targets: dict[ChunkBounds, Ranks] = field(default_factory=dict)

    def split_by_owners(self, tensor_name: str) -> Iterator[tuple[ChunkBounds, Ranks, Ranks]]:
        """Split the requested chunks so that the same ranks store all elements of a smaller chunk.

        Yields (chunk, owners, targets).
        """
        over: dict[ChunkBounds, list[tuple[ChunkBounds, Ranks]]] = {chunk: [] for chunk in self.targets}
        for chunk, source, common in _find_overlapping_chunk_pairs(self.targets, self.sources):
            over[chunk].append((common, self.sources[source]))
        are_disjoint = _are_chunks_disjoint(list(self.sources))
        for chunk, ranks in self.targets.items():
            for cell, owners in _split_chunk_by_owners(chunk, over[chunk], are_disjoint):
                if not owners:
                    what = f"the chunk of shape {list(cell[1])} at {list(cell[0])} of {tensor_name}"
                    raise _make_missing_tensor_error(what, min(ranks))
                yield cell, owners, ranks


def _find_overlapping_chunk_pairs(
    chunks: Iterable[ChunkBounds], other_chunks: Iterable[ChunkBounds]
) -> Iterator[tuple[ChunkBounds, ChunkBounds, ChunkBounds]]:
    """Find all overlapping pairs of chunks from two lists, and yield each pair with its overlap.

    The code is vectorized, because R ranks with one chunk each require R * R comparisons per tensor.
    """
    chunks, other_chunks = list(chunks), list(other_chunks)
    if not (chunks and other_chunks):
        return
    (low, size), (other_low, other_size) = (
        torch.tensor(each, device="cpu").unbind(1) for each in (chunks, other_chunks)
    )
    start = torch.maximum(low[:, None], other_low)
    extent = torch.minimum((low + size)[:, None], other_low + other_size) - start
    at, other_at = (extent > 0).all(-1).nonzero(as_tuple=True)
    rows = (x.tolist() for x in (at, other_at, start[at, other_at], extent[at, other_at]))
    for i, j, common, length in zip(*rows, strict=True):
        yield chunks[i], other_chunks[j], (tuple(common), tuple(length))


def _collect_chunks_by_tensor(
    tensors_by_rank: Sequence[StoredAndRequestedTensors],
) -> dict[str, _StoredAndRequestedChunks]:
    tensors: dict[str, _StoredAndRequestedChunks] = {}
    for rank, listing in enumerate(tensors_by_rank):
        for name, shape, dtype, chunks in listing.stored:
            sources = _get_or_add_tensor_chunks(tensors, name, shape, rank).sources
            for chunk in chunks:
                ranks = sources.setdefault(chunk, {})
                ranks[rank] = max(ranks.get(rank, dtype), dtype, key=WIDTH)
    names = set(tensors)
    for rank, listing in enumerate(tensors_by_rank):
        listed: dict[str, list[ChunkBounds]] = {}
        for name, shape, dtype, chunks in sorted(listing.requested, key=lambda item: -item.dtype.itemsize):
            if name not in names:
                hint = suggest_similar_names(name, names)
                raise _make_missing_tensor_error(name, rank, f"{hint} ")
            targets, before = _get_or_add_tensor_chunks(tensors, name, shape, rank).targets, listed.setdefault(name, [])
            for chunk in chunks:
                for box in subtract_chunks(chunk, before):
                    targets.setdefault(box, {})[rank] = dtype
                before.append(chunk)
    return tensors


def _get_or_add_tensor_chunks(
    chunks_by_name: dict[str, _StoredAndRequestedChunks], tensor_name: str, shape: Offsets, rank: int
) -> _StoredAndRequestedChunks:
    tensor = chunks_by_name.setdefault(tensor_name, _StoredAndRequestedChunks(shape, rank))
    if tensor.shape != shape:
        raise ConfigError(
            f"{tensor_name} has the shape {tensor.shape} on rank {tensor.rank}, but the shape {shape} on rank {rank}.",
            remedy="Use the same model config on all ranks, before and after you reshard.",
        )
    return tensor


def _split_chunk_by_owners(
    chunk: ChunkBounds,
    owned_chunks: Sequence[tuple[ChunkBounds, Ranks]],
    are_owned_chunks_disjoint: bool = False,
    owner_ranks: Sequence[Ranks] = (),
) -> Iterator[tuple[ChunkBounds, Ranks]]:
    """Split ``chunk`` so that the same ranks store all elements of a smaller chunk.

    Yields (smaller chunk, owners). The chunks in ``owned_chunks`` are inside ``chunk``. If they overlap each other, the
    middle one divides the others recursively.
    """
    owner_ranks = [*owner_ranks, *(ranks for part, ranks in owned_chunks if part == chunk)]
    owned_chunks = [(part, ranks) for part, ranks in owned_chunks if part != chunk]
    parts = [part for part, _ in owned_chunks]
    if are_owned_chunks_disjoint or _are_chunks_disjoint(parts):
        yield from ((part, _merge_owner_ranks(ranks, *owner_ranks)) for part, ranks in owned_chunks)
        if sum(prod(size) for _, size in parts) < prod(chunk[1]):
            yield from ((cell, _merge_owner_ranks(*owner_ranks)) for cell in subtract_chunks(chunk, parts))
        return
    middle = parts[len(parts) // 2]
    for cell in (middle, *subtract_chunks(chunk, [middle])):
        yield from _split_chunk_by_owners(
            cell,
            [(c, ranks) for part, ranks in owned_chunks if (c := intersect_chunks(cell, part))],
            False,
            owner_ranks,
        )


def _are_chunks_disjoint(chunks: Sequence[ChunkBounds]) -> bool:
    if len(chunks) < 8:  # faster than arrays
        return not any(intersect_chunks(a, b) for a, b in combinations(chunks, 2))
    return sum(1 for _ in _find_overlapping_chunk_pairs(chunks, chunks)) == len(chunks)


def _merge_owner_ranks(*owner_ranks: Ranks) -> Ranks:
    if len(owner_ranks) == 1:
        return owner_ranks[0]
    found: Ranks = {}
    for rank, dtype in (each for ranks in owner_ranks for each in ranks.items()):
        found[rank] = max(found.get(rank, dtype), dtype, key=WIDTH)
    return dict(sorted(found.items()))


class _LocalChunks:
    """The tensor chunks that this rank stores and those that it requests, grouped by tensor name."""

    def __init__(self, stored_items: Sequence[CheckpointTensor], requested_items: Sequence[CheckpointTensor]) -> None:
        self._have, self._want = _group_chunks_by_name(stored_items), _group_chunks_by_name(requested_items)

    def read_chunk(self, transfer: ChunkTransfer) -> Tensor:
        bounds = transfer.start, transfer.size
        return next(c for c in self._have[transfer.name] if intersect_chunks(c.bounds, bounds) == bounds).get_subview(
            *bounds
        )

    def write_chunk(self, transfer: ChunkTransfer, values: Tensor) -> None:
        received = LocalTensorChunk(transfer.start, values)
        for chunk in self._want[transfer.name]:
            if (common := intersect_chunks(chunk.bounds, (transfer.start, transfer.size))) is not None:
                chunk.get_subview(*common).copy_(received.get_subview(*common))


def _group_chunks_by_name(tensor_items: Sequence[CheckpointTensor]) -> dict[str, list[LocalTensorChunk]]:
    found: dict[str, list[LocalTensorChunk]] = {}
    for item in sorted(tensor_items, key=lambda item: -item.dtype.itemsize):
        found.setdefault(item.name, []).extend(chunk for chunk in item.chunks if chunk.values.numel())
    return found


def _exchange_chunks(
    local_chunks: _LocalChunks,
    send_batches: Sequence[Iterator[TransferBatch]],
    receive_batches: Sequence[Iterator[TransferBatch]],
    world: Axis,
    device: torch.device,
) -> None:
    """Exchange chunks between ranks in rounds, with at most one message from each rank to each other rank."""
    while True:
        outgoing, incoming = ([next(batches, []) for batches in each] for each in (send_batches, receive_batches))
        if not any(outgoing) and not any(incoming):
            return
        sent: list[PendingCollective] = []
        received: list[tuple[TransferBatch, PendingCollective]] = []
        for peer, sends in order_sends_and_receives(world.rank, world.size):
            batch = outgoing[peer] if sends else incoming[peer]
            if batch:
                buffer = torch.empty(_count_transfer_bytes(batch), dtype=torch.uint8, device=device)
                if sends:
                    for send, values in _iter_message_chunks(batch, buffer):
                        values.copy_(local_chunks.read_chunk(send))
                    sent.append(_start_send_or_recv("send", buffer, peer, world))
                else:
                    received.append((batch, _start_send_or_recv("receive", buffer, peer, world)))
        for batch, pending in received:
            for send, values in _iter_message_chunks(batch, pending.wait()):
                local_chunks.write_chunk(send, values)
        for pending in sent:
            pending.wait()


def order_sends_and_receives(rank: int, world_size: int) -> Iterator[tuple[int, bool]]:
    """Yield the sends and receives of one round in an order that cannot cause a deadlock with NCCL.

    Yields (peer, is_send). NCCL runs the messages of a rank one after the other, and a message starts only when both
    ranks have reached it. All ranks therefore use one global order: pairs of ranks by the sum of their ranks modulo the
    size, so that each rank is in one pair at a time. In a pair, the lower rank sends first.

    >>> [(peer, "sends" if sends else "receives") for peer, sends in order_sends_and_receives(1, 3)]
    [(2, 'sends'), (2, 'receives'), (0, 'receives'), (0, 'sends')]
    """
    for total in range(world_size):
        peer = (total - rank) % world_size
        if peer != rank:
            yield peer, rank < peer
            yield peer, rank > peer


def batch_transfers(transfers: Iterable[ChunkTransfer], max_message_bytes: int) -> Iterator[TransferBatch]:
    """Combine the transfers between two ranks into messages of at most ``max_message_bytes``.

    A message has at least one element. Wide dtypes come first, which aligns all elements without padding.
    """
    batch: TransferBatch = []
    free = max_message_bytes
    for send in sorted(transfers, key=lambda send: -send.dtype.itemsize):
        done, numel = 0, prod(send.size)
        while done < numel:
            count = min(free // send.dtype.itemsize, numel - done)
            if count < 1 and batch:
                yield batch
                batch, free = [], max_message_bytes
                continue
            count = max(count, 1)
            for start, size in split_flat_range_into_chunks(send.size, done, done + count):
                start = tuple(a + b for a, b in zip(send.start, start, strict=True))
                batch.append(send._replace(start=start, size=size))
            done, free = done + count, free - count * send.dtype.itemsize
    if batch:
        yield batch


def _iter_message_chunks(transfer_batch: TransferBatch, buffer: Tensor) -> Iterator[tuple[ChunkTransfer, Tensor]]:
    offset = 0
    for send in transfer_batch:
        yield send, buffer[offset : offset + send.num_bytes].view(send.dtype).view(send.size)
        offset += send.num_bytes


def _start_send_or_recv(
    op: Literal["send", "receive"], buffer: Tensor, peer_rank: int, world: Axis
) -> PendingCollective:
    record_wait = record_collective_start(op, world, get_num_bytes(buffer), "move", num_ranks=2)
    return PendingCollective([getattr(world.transport, op)(buffer, peer_rank, TAG)], lambda: buffer, record_wait)


def _make_missing_tensor_error(missing_tensor: str, rank: int, hint: str = "") -> ConfigError:
    return ConfigError(
        f"Rank {rank} requests {missing_tensor}, but no rank stores it.",
        remedy=f"{hint}Pass this tensor in stored_tensors on at least one rank.",
    )


class ReshardSource:
    """Training state that is kept in memory while you rebuild the model under another parallel layout.

    Creating it communicates the names and sizes of the tensors, and all values that are not tensors.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        tensors = ModelCheckpointTensors(model)
        self._world = tensors.world
        self._folders = get_checkpoint_directories(tensors.model)
        self._reading = ExitStack()
        self._reading.enter_context(tensors.readable_zero_shards())
        _, self._state = collect_training_state(tensors, lambda: None, optimizer, None, None)
        entries: dict[str, TensorIndexEntry] = {}
        local = [(item.name, get_dtype_name(item.dtype), item.shape) for item in self._state.items]
        for name, dtype, shape in chain.from_iterable(all_gather_objects(local, tensors.world)):
            entries.setdefault(name, TensorIndexEntry(dtype, shape))
        self._index = CheckpointIndex(0, time.time(), tensors.mesh_axis_sizes, entries, self._state.values)

    @property
    def param_names_by_group(self) -> list[list[list[str]]]:
        """Parameter names of the unsharded model, grouped by optimizer and parameter group."""
        return [[group["names"] for group in each["groups"]] for each in self._index.values["optimizers"]]

    def close(self) -> None:
        """Release the references to the tensors of the previous layout."""
        self._reading.close()

    def load_into(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> ReshardStats:
        """Load this state into a model and its optimizer, which can have a different parallel layout.

        The model must have the same class. All ranks must call this method. A rank copies the elements that it stores
        under both layouts. Every other element is sent to it once by a rank that stores it.

        Raises:
            ConfigError: the model or optimizer differs from the source. All ranks raise before the model is modified.
        """
        tensors = ModelCheckpointTensors(model)
        plan = LoadPlan(self._index, "the previous run", tensors, collect_optimizer_states(optimizer, tensors))
        stats = redistribute_tensors_across_ranks(self._state.items, plan.items, self._world)
        self.close()
        plan.apply_loaded_state()
        record_resumed_checkpoint_dirs(tensors.model, self._folders)
        return stats
