"""Attention masks for context parallelism, evaluated for one pair of sequence chunks at a time.

transformers describes a mask as a function of four indices (sample, head, query, key): causal, sliding window, packed
documents, prefix. ``ChunkedAttentionMask`` evaluates the function at the positions of the full sequence, and classifies
each pair of chunks:

    nothing     neither sent nor computed
    all         computed without a mask
    causal      the diagonal of a causal mask: computed with the causal mode of the kernel
    some        computed with a mask

The mask of the full sequence is never created.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from enum import Enum
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from shardformer.context_parallel.attention_kernels import BlockAttentionMask
from shardformer.context_parallel.sequence_layout import SequenceLayout, get_chunk_positions
from shardformer.errors import ConfigError
from shardformer.torch_compat import has_real_data, is_true_or_unknown, without_fake_tensors

# B batch, Q and S numbers of queries and keys

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of the indices (samples, heads, queries, keys), which broadcast -> whether a query attends to a key."""

POSITIONS_PER_CALL = 2**24
"""Number of (query, key) pairs for which a mask is evaluated at a time."""
MAX_CACHED_MASKS = 64


class ChunkVisibility(Enum):
    """Visibility of a key chunk to a query chunk: nothing, all, some, or only earlier positions (causal)."""

    NOTHING = "nothing"
    ALL = "all"
    CAUSAL = "causal"
    SOME = "some"


class ChunkedAttentionMask:
    """Attention mask of the full sequence that is evaluated chunk by chunk to save memory.

    Args:
        predicate: the mask function, identical on all ranks and without communication, or None for no mask.
        padding: (B, S) bool, False for padding, or None for no padding.
        query_layout, key_layout: the positions of queries and keys on each rank.
        batch_size: the batch size.
        use_vmap: whether the predicate takes scalar indices, so that it must be called through torch.vmap.
        dropout_seed: the seed of the attention dropout, which all layers share in a forward pass.
    """

    def __init__(
        self,
        predicate: Predicate | None,
        padding: Tensor | None,
        query_layout: SequenceLayout,
        key_layout: SequenceLayout,
        batch_size: int,
        *,
        use_vmap: bool = False,
        dropout_seed: int = 0,
    ) -> None:
        self.predicate, self.queries, self.keys, self.batch = predicate, query_layout, key_layout, batch_size
        self.by_vmap, self.seed = use_vmap, dropout_seed
        self.padding = None if padding is None or is_true_or_unknown(padding.all()) else padding
        key = None if self.padding is not None else compute_mask_fingerprint(predicate)
        self._visibility = _get_cached_visibility((key, query_layout, key_layout, use_vmap)) if key is not None else {}

    @property
    def may_mask_all_keys_of_query(self) -> bool:
        return self.padding is not None or self.predicate not in (None, causal_mask_predicate)

    def compute_mask(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Evaluate the mask at these positions, as (B or 1, 1, Q, S). True means that a query attends to a key."""
        device = query_positions.device
        if self.predicate is None:
            visible = torch.ones(1, 1, len(query_positions), len(key_positions), dtype=torch.bool, device=device)
        elif self.by_vmap:
            visible = _vmap_mask_predicate(self.predicate)(
                torch.arange(self.batch, device=device),
                query_positions[:0].new_zeros(1),
                query_positions,
                key_positions,
            )
        else:
            samples = torch.arange(self.batch, device=device)[:, None, None, None]
            heads = torch.arange(2, device=device)[None, :, None, None]
            visible = self.predicate(
                samples, heads, query_positions[None, None, :, None], key_positions[None, None, None, :]
            )
            visible = torch.as_tensor(visible, device=device)
            if visible.dim() == 4 and visible.shape[1] > 1:
                raise ConfigError(
                    "Context parallelism does not support attention masks that differ between heads, as in this model.",
                    remedy="Set sequence=1 to disable context parallelism for this model.",
                )
            visible = visible.expand(
                visible.shape[0] if visible.dim() == 4 else 1, 1, len(query_positions), len(key_positions)
            )
        if self.padding is not None:
            visible = visible & self.padding.to(device)[:, None, None, key_positions]
        return visible

    def make_full_mask(self, device: torch.device) -> Tensor | None:
        """Create the mask of the full sequence, with shape (B or 1, 1, Q, S). None means that nothing is masked."""
        if self.predicate is None and self.padding is None:
            return None
        rows, cols = torch.arange(self.queries.length, device=device), torch.arange(self.keys.length, device=device)
        return self.compute_mask(rows, cols)

    def get_chunk_visibility(self, query_chunk_index: int, key_chunk_index: int) -> ChunkVisibility:
        """Return which part of a key chunk the queries of a chunk attend to. Identical on all ranks."""
        key = query_chunk_index, key_chunk_index
        if key not in self._visibility:
            self._visibility[key] = self._compute_chunk_visibility(*key)
        return self._visibility[key]

    @without_fake_tensors()
    def _compute_chunk_visibility(self, query_chunk_index: int, key_chunk_index: int) -> ChunkVisibility:
        device = torch.device("cpu") if self.padding is None else self.padding.device
        rows = get_chunk_positions(self.queries, (query_chunk_index,)).to(device)
        cols = get_chunk_positions(self.keys, (key_chunk_index,)).to(device)
        is_square = len(rows) == len(cols) and bool((rows == cols).all())
        any_, all_, causal = False, True, is_square
        step = max(1, POSITIONS_PER_CALL // max(len(cols) * self.batch, 1))
        for start in range(0, len(rows), step):
            queries = rows[start : start + step]
            visible = self.compute_mask(queries, cols)
            if not has_real_data(visible):
                return ChunkVisibility.SOME  # a mask that depends on tensors without values, in a trace
            any_, all_ = any_ or bool(visible.any()), all_ and bool(visible.all())
            causal = causal and bool((visible == (queries[:, None] >= cols[None, :])).all())
            if any_ and not all_ and not causal:
                return ChunkVisibility.SOME
        if len(rows) == 0 or len(cols) == 0 or not any_:
            return ChunkVisibility.NOTHING
        if all_:
            return ChunkVisibility.ALL
        return ChunkVisibility.CAUSAL if causal else ChunkVisibility.SOME

    def make_block_mask(
        self, query_chunk_indices: tuple[int, ...], key_chunk_indices: tuple[int, ...], device: torch.device
    ) -> BlockAttentionMask:
        """Create the mask between several query chunks and several key chunks for an attention kernel."""
        rows, cols = (
            get_chunk_positions(self.queries, query_chunk_indices),
            get_chunk_positions(self.keys, key_chunk_indices),
        )
        positions = rows.to(device), cols.to(device)
        is_causal = query_chunk_indices == key_chunk_indices and self.is_causal(query_chunk_indices)
        if is_causal or all(
            self.get_chunk_visibility(q, k) is ChunkVisibility.ALL
            for q in query_chunk_indices
            for k in key_chunk_indices
        ):
            return BlockAttentionMask(is_causal, None, *positions)
        return BlockAttentionMask(False, self.compute_mask(*positions), *positions)

    def is_causal(self, chunk_indices: tuple[int, ...]) -> bool:
        """Return whether the mask between the queries and keys of these chunks is causal."""
        expected = {
            (r, c): ChunkVisibility.CAUSAL if r == c else ChunkVisibility.ALL if c < r else ChunkVisibility.NOTHING
            for r in chunk_indices
            for c in chunk_indices
        }
        return self.queries == self.keys and all(
            self.get_chunk_visibility(*pair) is seen for pair, seen in expected.items()
        )

    def get_needed_key_chunks(self, ring_rank: int, key_chunk_indices: tuple[int, ...]) -> tuple[int, ...]:
        """Return the key chunks to which at least one query of ring rank ``ring_rank`` attends."""
        queries = self.queries.get_chunk_indices_of_rank(ring_rank)
        return tuple(
            c
            for c in key_chunk_indices
            if any(self.get_chunk_visibility(q, c) is not ChunkVisibility.NOTHING for q in queries)
        )

    def get_attending_query_chunks(self, ring_rank: int, key_chunk_indices: tuple[int, ...]) -> tuple[int, ...]:
        """Return the query chunks of ring rank ``ring_rank`` that attend to at least one of these key chunks."""
        queries = self.queries.get_chunk_indices_of_rank(ring_rank)
        return tuple(
            q
            for q in queries
            if any(self.get_chunk_visibility(q, c) is not ChunkVisibility.NOTHING for c in key_chunk_indices)
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise ConfigError(
            f"The model accesses .{name} of its attention mask, but context parallelism never creates the full mask "
            "tensor.",
            remedy="Set sequence=1 to disable context parallelism for this model.",
        )


def causal_mask_predicate(batch_idx: Tensor, head_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Mask function for causal attention: a query attends to its own and to earlier positions."""
    return kv_idx <= q_idx


def _vmap_mask_predicate(predicate: Predicate) -> Callable[..., Tensor]:
    mapped: Any = predicate
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        mapped = torch.vmap(mapped, in_dims=dims, out_dims=0)
    predicate_of_vectors: Callable[..., Tensor] = mapped
    return predicate_of_vectors


# --- masks that repeat in every forward pass


class _ChunkVisibilityCache(threading.local):
    """Per-thread cache of ``ChunkVisibility`` by mask. Ranks may be threads."""

    def __init__(self) -> None:
        self.masks: dict[Hashable, dict[tuple[int, int], ChunkVisibility]] = {}


_VISIBILITY_CACHE = _ChunkVisibilityCache()


def _get_cached_visibility(mask_fingerprint: Hashable) -> dict[tuple[int, int], ChunkVisibility]:
    masks = _VISIBILITY_CACHE.masks
    if mask_fingerprint not in masks and len(masks) >= MAX_CACHED_MASKS:
        del masks[next(iter(masks))]
    return masks.setdefault(mask_fingerprint, {})


def compute_mask_fingerprint(mask_component: Any) -> Hashable | None:
    """Compute a hashable cache key for a mask function, or None if it depends on tensors or other objects."""
    if mask_component is None or isinstance(mask_component, int | float | str | CodeType):
        return (type(mask_component).__name__, mask_component)
    if isinstance(mask_component, tuple | list):
        parts = tuple(map(compute_mask_fingerprint, mask_component))
        return None if None in parts else parts
    if not isinstance(mask_component, FunctionType):
        return None
    try:
        cells = [cell.cell_contents for cell in mask_component.__closure__ or ()]
    except ValueError:
        return None
    parts = tuple(
        map(
            compute_mask_fingerprint,
            [mask_component.__code__, *cells, *(mask_component.__defaults__ or ()), mask_component.__kwdefaults__],
        )
    )
    return None if None in parts else parts
