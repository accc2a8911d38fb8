"""Which positions see which, asked of transformers' own index predicate, for one pair of chunks after the other.

transformers describes a mask as a function of four indices (sample, head, query, key), which it hands to whoever is
registered for an attention: causal, a sliding window, documents in one row, a prefix. It is asked here at the positions
of the whole sequence, whatever part of it a rank has. Of each pair of chunks there are four answers:

    nothing     neither sent nor computed
    all         computed without a mask
    causal      a chunk and itself: the kernel's own way
    some        computed with a mask

No mask of the whole sequence is ever made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from enum import Enum
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from shardformer.context_parallel.attention_kernels import VisibleBlock
from shardformer.context_parallel.sequence_layout import SequencePositions, chunk_indices
from shardformer.errors import ConfigError
from shardformer.torch_compat import has_data, is_true, without_fake_tensors

# B batch, Q and S numbers of queries and keys

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(samples, heads, queries, keys), which broadcast -> whether a query sees a key."""

POSITIONS_PER_CALL = 2**24
"""Pairs of positions that are asked about in one call."""
REMEMBERED = 64


class Visibility(Enum):
    """What the queries of a chunk see of the keys of another."""

    NOTHING = "nothing"
    ALL = "all"
    CAUSAL = "causal"
    SOME = "some"


def unknown_attribute(name: str, read_of: str, there_is: str) -> Exception:
    """The error for an attribute of what is handed to an attention in the place of a tensor."""
    if name.startswith("_"):
        return AttributeError(name)
    return ConfigError(
        f"A model reads .{name} of {read_of}",
        rule=f"With a sequence that is cut over ranks there is {there_is} is handed to the attention function as it is",
        remedy="Leave the sequence axis out for this model",
    )


class ChunkedMask:
    """A mask of a whole sequence, which stands where a model hands a tensor of scores to its layers.

    Args:
        predicate: which keys a query sees; None: all. Communicates nothing, and is the same on all ranks.
        padding: (B, S) bool: the keys that there are; None: all.
        queries, keys: how their positions lie over the ranks.
        batch: how many samples there are.
        by_vmap: whether the predicate is asked for one number of each index at a time, which torch maps over them.
        seed: of the dropout of weights; all layers of a forward have it in common.
    """

    def __init__(
        self,
        predicate: Predicate | None,
        padding: Tensor | None,
        queries: SequencePositions,
        keys: SequencePositions,
        batch: int,
        *,
        by_vmap: bool = False,
        seed: int = 0,
    ) -> None:
        self.predicate, self.queries, self.keys, self.batch = predicate, queries, keys, batch
        self.by_vmap, self.seed = by_vmap, seed
        self.padding = None if padding is None or is_true(padding.all()) else padding
        key = None if self.padding is not None else mask_fingerprint(predicate)
        self._known = _remembered((key, queries, keys, by_vmap)) if key is not None else {}

    @property
    def may_hide_all(self) -> bool:
        """Whether some query may see no key at all."""
        return self.padding is not None or self.predicate not in (None, causal)

    def sees(self, rows: Tensor, cols: Tensor) -> Tensor:
        """(B or 1, 1, Q, S) bool, for positions of queries and of keys."""
        device = rows.device
        if self.predicate is None:
            found = torch.ones(1, 1, len(rows), len(cols), dtype=torch.bool, device=device)
        elif self.by_vmap:
            found = _by_vmap(self.predicate)(torch.arange(self.batch, device=device), rows[:0].new_zeros(1), rows, cols)
        else:
            samples = torch.arange(self.batch, device=device)[:, None, None, None]
            heads = torch.arange(2, device=device)[None, :, None, None]
            found = self.predicate(samples, heads, rows[None, None, :, None], cols[None, None, None, :])
            found = torch.as_tensor(found, device=device)
            if found.dim() == 4 and found.shape[1] > 1:
                raise ConfigError(
                    "A mask that is another one for each head",
                    rule="With a sequence that is cut over ranks all heads see the same positions",
                    remedy="Leave the sequence axis out for this model",
                )
            found = found.expand(found.shape[0] if found.dim() == 4 else 1, 1, len(rows), len(cols))
        if self.padding is not None:
            found = found & self.padding.to(device)[:, None, None, cols]
        return found

    def whole(self, device: torch.device) -> Tensor | None:
        """(B or 1, 1, Q, S), for attention of all queries to all keys; None: each sees all."""
        if self.predicate is None and self.padding is None:
            return None
        rows, cols = torch.arange(self.queries.length, device=device), torch.arange(self.keys.length, device=device)
        return self.sees(rows, cols)

    def between(self, query_chunk: int, key_chunk: int) -> Visibility:
        """What the queries of one chunk see of the keys of another. The same on every rank."""
        if (query_chunk, key_chunk) not in self._known:
            self._known[query_chunk, key_chunk] = self._asked(query_chunk, key_chunk)
        return self._known[query_chunk, key_chunk]

    @without_fake_tensors()
    def _asked(self, query_chunk: int, key_chunk: int) -> Visibility:
        device = self._device
        rows, cols = chunk_indices(self.queries, (query_chunk,)), chunk_indices(self.keys, (key_chunk,))
        rows, cols = rows.to(device), cols.to(device)
        is_square = len(rows) == len(cols) and bool((rows == cols).all())
        any_, all_, causal = False, True, is_square
        step = max(1, POSITIONS_PER_CALL // max(len(cols) * self.batch, 1))
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            found = self.sees(some, cols)
            if not has_data(found):
                return Visibility.SOME  # in a trace, of a mask that is made of tensors
            any_, all_ = any_ or bool(found.any()), all_ and bool(found.all())
            causal = causal and bool((found == (some[:, None] >= cols[None, :])).all())
            if any_ and not all_ and not causal:
                return Visibility.SOME
        if len(rows) == 0 or len(cols) == 0 or not any_:
            return Visibility.NOTHING
        if all_:
            return Visibility.ALL
        return Visibility.CAUSAL if causal else Visibility.SOME

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self.padding is None else self.padding.device

    def part(self, rows: tuple[int, ...], cols: tuple[int, ...], device: torch.device) -> VisibleBlock:
        """For the kernel: what these chunks of queries see of these of keys."""
        at = {(r, c): self.between(r, c) for r in rows for c in cols}
        positions = chunk_indices(self.queries, rows).to(device), chunk_indices(self.keys, cols).to(device)
        if all(found is Visibility.ALL for found in at.values()):
            return VisibleBlock(False, None, *positions)
        if rows == cols and self.queries == self.keys and _is_causal(rows, at):
            return VisibleBlock(True, None, *positions)
        return VisibleBlock(False, self.sees(*positions), *positions)

    def needed(self, ring_rank: int, chunks: tuple[int, ...]) -> tuple[int, ...]:
        """Which of these chunks of keys some query of a ring rank sees."""
        queries = self.queries.chunks_of(ring_rank)
        return tuple(c for c in chunks if any(self.between(q, c) is not Visibility.NOTHING for q in queries))

    def seeing(self, ring_rank: int, chunks: tuple[int, ...]) -> tuple[int, ...]:
        """Which of a ring rank's chunks of queries see something of these chunks of keys."""
        queries = self.queries.chunks_of(ring_rank)
        return tuple(q for q in queries if any(self.between(q, c) is not Visibility.NOTHING for c in chunks))

    def __getattr__(self, name: str) -> Any:
        raise unknown_attribute(name, "its attention mask", "no tensor of all scores: a mask")


def causal(samples: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """The mask of a decoder."""
    return keys <= queries


def _is_causal(chunks: tuple[int, ...], at: dict[tuple[int, int], Visibility]) -> bool:
    """Whether chunks in the order of their positions see themselves up to each query, and all of those before."""
    wanted = {
        (r, c): Visibility.CAUSAL if r == c else Visibility.ALL if c < r else Visibility.NOTHING
        for r in chunks
        for c in chunks
    }
    return at == wanted


def _by_vmap(predicate: Predicate) -> Callable[..., Tensor]:
    mapped: Any = predicate
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        mapped = torch.vmap(mapped, in_dims=dims, out_dims=0)
    found: Callable[..., Tensor] = mapped
    return found


# ------------------------------------------------------------------------------------ masks that are the same each time


class _Remembered(threading.local):
    """What chunks see of each other, by masks: those of this thread, since ranks may be threads."""

    def __init__(self) -> None:
        self.masks: dict[Hashable, dict[tuple[int, int], Visibility]] = {}


_REMEMBERED = _Remembered()


def _remembered(key: Hashable) -> dict[tuple[int, int], Visibility]:
    masks = _REMEMBERED.masks
    if key not in masks and len(masks) >= REMEMBERED:
        del masks[next(iter(masks))]
    return masks.setdefault(key, {})


def mask_fingerprint(thing: Any) -> Hashable | None:
    """What a function computes, where no tensor and no object decides it: its code, and the numbers it closes over."""
    if thing is None or isinstance(thing, int | float | str | CodeType):
        return (type(thing).__name__, thing)
    if isinstance(thing, tuple | list):
        parts = tuple(map(mask_fingerprint, thing))
        return None if None in parts else parts
    if not isinstance(thing, FunctionType):
        return None
    try:
        cells = [cell.cell_contents for cell in thing.__closure__ or ()]
    except ValueError:
        return None
    parts = tuple(map(mask_fingerprint, [thing.__code__, *cells, *(thing.__defaults__ or ()), thing.__kwdefaults__]))
    return None if None in parts else parts
