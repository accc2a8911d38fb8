"""Layout of a sequence that context parallelism shards: which positions each rank stores.

The sequence axis consists of a ring of P groups with U ranks each. The sequence is split evenly into 2P chunks. Ring
rank i has chunks i and 2P-1-i (zig-zag), which balances the work of causal attention. The U ranks of its group split
the concatenation of these two chunks evenly. For P=2, U=2 and 16 positions:

    chunk            0            1            2            3
    position     0  1  2  3   4  5  6  7   8  9 10 11  12 13 14 15
    rank        (0,0) (0,0)  (1,0) (1,0)  (1,1) (1,1)   (0,1) (0,1)      (ring rank, group rank)

Sequences are not padded. Every length of at least ``SequenceLayout.get_min_length`` can be split.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collectives import all_gather_ints
from shardformer.errors import InputError
from shardformer.layout.shard_spec import Slice, Split, get_even_split_bounds
from shardformer.mesh.parallel_context import Axis
from shardformer.torch_compat import tolist_or_ones


@dataclass(frozen=True)
class SequenceLayout:
    """Sequence positions that each rank stores under context parallelism.

    >>> SequenceLayout(16, ring=2, group=2).split.parts
    (((0, 4),), ((12, 16),), ((4, 8),), ((8, 12),))
    >>> SequenceLayout(10, ring=2).chunks
    ((0, 3), (3, 6), (6, 8), (8, 10))
    >>> SequenceLayout(10, ring=2).get_ring_rank_of_chunk(2)
    1

    Raises InputError if a rank would have no position.
    """

    length: int
    ring: int = 1  # the number of ranks that exchange keys and values
    group: int = 1  # the number of ranks that share the chunks of a ring rank, and exchange heads for positions

    def __post_init__(self) -> None:
        if self.length < (minimum := self.get_min_length(self.ring, self.group)):
            raise InputError(
                f"A sequence of {self.length} positions is too short for context parallelism over "
                f"{self.ring * self.group} ranks.",
                remedy=f"Pass sequences of at least {minimum} positions, or use fewer ranks on the sequence axis.",
            )

    @staticmethod
    def get_min_length(ring_size: int, ulysses_group_size: int) -> int:
        """Return the minimum length of a sequence that can be sharded over these ranks."""
        return ring_size * max(2, ulysses_group_size) if ring_size > 1 else ulysses_group_size

    @cached_property
    def chunks(self) -> tuple[Slice, ...]:
        """Start and end positions of the two chunks of each ring rank, in sequence order."""
        bounds = get_even_split_bounds(self.length, 2 * self.ring)
        return tuple(pairwise(bounds))

    def get_chunk_indices_of_rank(self, ring_rank: int) -> tuple[int, int]:
        """Return the indices of the two chunks that a ring rank stores."""
        return ring_rank, 2 * self.ring - 1 - ring_rank

    def get_ring_rank_of_chunk(self, chunk_index: int) -> int:
        return min(chunk_index, 2 * self.ring - 1 - chunk_index)

    def get_lengths_in_ulysses_group(self, ring_rank: int) -> list[int]:
        """Return the number of positions on each rank of a Ulysses group."""
        return [b - a for a, b in pairwise(self._get_ulysses_group_bounds(ring_rank))]

    @cached_property
    def split(self) -> Split:
        """Positions of each rank on the sequence axis, as a ``Split``."""
        parts = tuple(self._get_local_slices(*ranks) for ranks in product(range(self.ring), range(self.group)))
        return Split(parts, ("sequence",))

    def get_positions_of_rank(self, rank: int) -> Tensor:
        """Return the sequence positions that a rank stores, in ascending order."""
        return self.split.indices(rank)

    def _get_chunk_slices(self, ring_rank: int) -> list[Slice]:
        return [self.chunks[chunk] for chunk in self.get_chunk_indices_of_rank(ring_rank)]

    def _get_ulysses_group_bounds(self, ring_rank: int) -> list[int]:
        return get_even_split_bounds(sum(b - a for a, b in self._get_chunk_slices(ring_rank)), self.group)

    def _get_local_slices(self, ring_rank: int, ulysses_rank: int) -> tuple[Slice, ...]:
        start, end = self._get_ulysses_group_bounds(ring_rank)[ulysses_rank : ulysses_rank + 2]
        found: list[Slice] = []
        passed = 0
        for a, b in self._get_chunk_slices(ring_rank):
            first, last = max(start - passed, 0), min(end - passed, b - a)
            if last > first:
                found.append((a + first, a + last))
            passed += b - a
        return tuple(found)


def get_chunk_positions(sequence_layout: SequenceLayout, chunk_indices: tuple[int, ...]) -> Tensor:
    """Return the sequence positions of several chunks as one tensor."""
    return torch.cat([torch.arange(*sequence_layout.chunks[chunk]) for chunk in chunk_indices])


@dataclass(frozen=True, eq=False)
class IndexShards:
    """Indices of a tensor dimension that each rank of a mesh axis stores."""

    axis: Axis
    parts: tuple[Tensor, ...]  # the indices of each rank, in the order of its local tensor
    full: int  # the length of the full dim

    @classmethod
    def from_sequence_layout(cls, sequence_layout: SequenceLayout, axis: Axis) -> IndexShards:
        return cls(
            axis,
            tuple(sequence_layout.get_positions_of_rank(rank) for rank in range(axis.size)),
            sequence_layout.length,
        )

    @property
    def local_indices(self) -> Tensor:
        return self.parts[self.axis.rank]

    def slice_local(self, full_tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's slice of the full tensor ``full_tensor`` along ``dim``."""
        return full_tensor.index_select(dim, self.local_indices.to(full_tensor.device))

    def repeat_for_samples(self, num_samples: int) -> IndexShards:
        """Return the index shards of several sequences that are concatenated along the sharded dimension."""
        if num_samples == 1:
            return self
        offsets = torch.arange(num_samples)[:, None] * self.full
        return IndexShards(
            self.axis, tuple((offsets + indices).flatten() for indices in self.parts), num_samples * self.full
        )

    def slice_rows(self, row_range: slice) -> tuple[IndexShards, Tensor]:
        """Slice the sharded dimension. Returns the new index shards and the rows that this rank keeps."""
        start, stop, step = row_range.indices(self.full)
        full = len(range(start, stop, step))
        kept = [(part >= start) & (part < stop) & ((part - start) % step == 0) for part in self.parts]
        parts = tuple((part[keep] - start) // step for part, keep in zip(self.parts, kept, strict=True))
        return IndexShards(self.axis, parts, full), kept[self.axis.rank].nonzero()[:, 0]

    def has_same_sharding_as(self, other: IndexShards) -> bool:
        if self is other:
            return True
        pairs = zip(self.parts, other.parts, strict=True)
        return self.axis is other.axis and self.full == other.full and all(torch.equal(a, b) for a, b in pairs)


Dims = dict[Hashable, int | None]
"""Path of an argument of a layer -> its sequence dim, or None if it has none."""

_THREAD = threading.local()


@dataclass(eq=False)
class ContextParallelState:
    """Context parallel settings of a model, and the state of its current forward pass."""

    axis: Axis
    ring: Axis  # the ranks that exchange keys and values
    group: Axis  # the ranks that exchange heads for positions
    all_gather_kv: bool = False  # all-gather the keys before attention, instead of sending them during attention
    is_whole: bool = False  # run attention on the full sequence, with masks of all pairs of positions
    is_open: bool = False  # whether the current or last forward pass shards its sequence
    current: SequenceLayout | None = None  # of the running layer, or None if its sequence is not sharded
    seed: int = 0  # of the attention dropout in this forward pass
    seen: dict[int, SequenceLayout] = field(default_factory=dict)  # length -> positions, of all forward passes
    seen_in_forward: dict[int, SequenceLayout] = field(default_factory=dict)  # of the current or last forward pass
    dims: Dims = field(default_factory=dict)  # the known sequence dims of the arguments of layers
    _rows: dict[int, IndexShards] = field(default_factory=dict)
    _module_indices: dict[int, int] = field(default_factory=dict)

    def get_sequence_layout(self, sequence_length: int) -> SequenceLayout:
        """Return the layout of a sequence of this length. Raises InputError if it is too short."""
        if sequence_length not in self.seen:
            self.seen[sequence_length] = SequenceLayout(sequence_length, self.ring.size, self.group.size)
        return self.seen[sequence_length]

    def get_index_shards(self, sequence_length: int) -> IndexShards:
        if sequence_length not in self._rows:
            self._rows[sequence_length] = IndexShards.from_sequence_layout(
                self.get_sequence_layout(sequence_length), self.axis
            )
        return self._rows[sequence_length]

    def get_local_length(self, sequence_length: int) -> int:
        """Return the number of positions that this rank stores of a sequence of this length."""
        return self.get_sequence_layout(sequence_length).split.get_local_length(self.axis.rank)

    def record_sequence_length(self, sequence_length: int) -> SequenceLayout:
        """Record a sequence length that occurs in this forward pass, and return its layout."""
        self.seen_in_forward[sequence_length] = positions = self.get_sequence_layout(sequence_length)
        return positions

    def find_layout_by_local_length(
        self, local_length: int, layout_by_length: Mapping[int, SequenceLayout] | None = None
    ) -> SequenceLayout | None:
        """Find the layout of the sequence that has ``local_length`` positions on this rank.

        The default ``layout_by_length`` are all sequences so far. All-gathers one integer per rank if two of them have
        the same local length on some rank.
        """
        seen = list((self.seen if layout_by_length is None else layout_by_length).values())
        parts = [p.split.get_local_lengths() for p in seen]
        if all(len(set(of_rank)) == len(of_rank) for of_rank in zip(*parts, strict=True)):
            return next((p for p in seen if p.split.get_local_length(self.axis.rank) == local_length), None)
        full = sum(numbers[0] for numbers in all_gather_ints([local_length], self.axis))
        return self.seen.get(full)

    def find_sequence_dim(
        self, argument_path: Hashable, tensor: Tensor, sequence_lengths: Collection[int]
    ) -> int | None:
        """Find the sequence dimension of a layer argument, or None if it has none.

        If the dim is not recorded yet, it is the only dim whose size is in ``sequence_lengths``.
        """
        dims = [d for d, size in enumerate(tensor.shape) if size in sequence_lengths]
        if argument_path in self.dims:
            dim = self.dims[argument_path]
            return dim if dim is None or dim in dims else None
        return self._record_sequence_dim(argument_path, tensor, dims)

    def infer_sequence_dims(
        self, tensors_by_path: Mapping[Any, Tensor], sequence_lengths: Collection[int], num_samples: int
    ) -> None:
        """Infer the sequence dimension of each layer argument from the shapes on all ranks.

        Its size is the local length of a sequence on every rank. All-gathers one integer for each new argument.
        """
        new = {path: x for path, x in tensors_by_path.items() if path not in self.dims}
        if not new:
            return
        parts = {self.get_local_length(length) for length in sequence_lengths}
        dims = [[d for d, n in enumerate(x.shape) if n in parts and (d > 0 or n != num_samples)] for x in new.values()]
        masks = all_gather_ints([sum(1 << d for d in found) for found in dims], self.axis)
        for (path, x), found, bits in zip(new.items(), dims, zip(*masks, strict=True), strict=True):
            self._record_sequence_dim(path, x, [d for d in found if all(of_rank >> d & 1 for of_rank in bits)])

    def _record_sequence_dim(
        self, argument_path: Hashable, tensor: Tensor, candidate_dims: Sequence[int]
    ) -> int | None:
        if len(candidate_dims) > 1 and not self.is_whole:
            argument = "".join(map(str, argument_path[1:])) if isinstance(argument_path, tuple) else argument_path
            raise InputError(
                f"Context parallelism cannot shard the layer argument {argument} of shape {tuple(tensor.shape)}, "
                "because more than one of its dimensions is as long as the sequence.",
                remedy="Pass a padding mask of shape (batch, sequence) instead of a full attention mask, or use "
                "another sequence length.",
            )
        self.dims[argument_path] = candidate_dims[0] if len(candidate_dims) == 1 else None
        return self.dims[argument_path]

    def get_attention_module_index(self, attention_module: nn.Module) -> int:
        """Number the attention modules in call order, so that all ranks use the same number for a module."""
        return self._module_indices.setdefault(id(attention_module), len(self._module_indices))


def get_context_parallel_state() -> ContextParallelState | None:
    """Return the state of the model whose forward pass runs on this thread, or None."""
    state: ContextParallelState | None = getattr(_THREAD, "state", None)
    return state


def set_context_parallel_state(state: ContextParallelState | None) -> None:
    _THREAD.state = state


def draw_shared_seed() -> int:
    """Draw a random seed from the CPU random state, which all ranks share."""
    return int(tolist_or_ones(torch.randint(2**31, (), device="cpu")))
