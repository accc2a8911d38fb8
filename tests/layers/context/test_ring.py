"""Ring attention compared with attention on one rank: outputs, gradients and communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from shardformer.comm.collectives import all_gather_objects
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.context_parallel import masks
from shardformer.context_parallel import masks as mask
from shardformer.context_parallel.attention_kernels import AttentionDropout, AttentionScoreOptions, RelativePositionBias
from shardformer.context_parallel.masks import ChunkedAttentionMask, Predicate, causal_mask_predicate
from shardformer.context_parallel.ring_attention import RingKVExchange, ring_attention
from shardformer.context_parallel.sequence_layout import SequenceLayout
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from tests.pairwise import all_pairs

BATCH, HEADS, KEYS, WIDTH, SCALE = 2, 4, 2, 8, 0.3


@dataclass(frozen=True)
class Kind:
    """One kind of attention mask."""

    predicate: Predicate | None
    padding: Tensor | None = None
    by_vmap: bool = False


def window(samples: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    return (keys <= queries) & (queries - keys < 4)


def kind_of(name: str, length: int) -> Kind:
    documents = torch.tensor([[0] * 5 + [1] * (length - 5), [0] * 9 + [1] * (length - 9)])
    padding = torch.ones(BATCH, length, dtype=torch.bool)
    padding[0, :3] = padding[1, -4:] = False
    return {
        "causal": Kind(causal_mask_predicate),
        "all": Kind(None),
        "window": Kind(window),
        "padded": Kind(causal_mask_predicate, padding),
        "all padded": Kind(None, padding & torch.tensor([[False], [True]])),
        "documents": Kind(lambda b, h, q, k: (k <= q) & (documents[b, q] == documents[b, k])),
        "by one": Kind(lambda b, h, q, k: (k <= q) & (documents[b, q] == documents[b, k]), by_vmap=True),
    }[name]


def in_one_place(
    q: Tensor, k: Tensor, v: Tensor, sees: Tensor, how: AttentionScoreOptions, sinks: Tensor | None, line: Tensor | None
) -> Tensor:
    """Reference attention; a query without a visible key returns zeros, as torch's attention does."""
    k, v = (x.repeat_interleave(HEADS // KEYS, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * how.scale
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    if line is not None:
        scores = scores + RelativePositionBias(line).compute_position_bias(
            torch.arange(q.shape[2]), torch.arange(k.shape[2])
        )
    scores = scores.masked_fill(~sees, torch.finfo(q.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]] * sees
    if how.dropout is not None:
        indices = torch.arange(q.shape[2])
        weights = weights * how.dropout.compute_dropout_factors(q.shape[0], indices, torch.arange(k.shape[2]))
    return weights @ v


CASES = all_pairs(
    {
        "ring": [1, 2, 3, 4],
        "length": [13, 16, 17],
        "mask": ["causal", "all", "window", "padded", "all padded", "documents", "by one"],
        "gathers": [False, True],
        "scores": ["plain", "capped", "dropped", "biased"],
        "sinks": [False, True],
    }
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_ring_attention_equals_attention_on_one_rank(case: dict[str, Any]) -> None:
    torch.manual_seed(0)
    length, ring = case["length"], case["ring"]
    positions, kind = SequenceLayout(length, ring), kind_of(case["mask"], length)
    tensors = [
        torch.randn(BATCH, heads, length, WIDTH, dtype=torch.float64, requires_grad=True)
        for heads in (HEADS, KEYS, KEYS)
    ]
    sinks = torch.randn(HEADS, dtype=torch.float64, requires_grad=True) if case["sinks"] else None
    dropout = AttentionDropout(0.3, 5, torch.arange(HEADS)) if case["scores"] == "dropped" else None
    how = AttentionScoreOptions(SCALE, 2.0 if case["scores"] == "capped" else None, dropout)

    def mask() -> ChunkedAttentionMask:
        return ChunkedAttentionMask(kind.predicate, kind.padding, positions, positions, BATCH, use_vmap=kind.by_vmap)

    indices = torch.arange(length)
    line = torch.randn(HEADS, 2 * length - 1, dtype=torch.float64, requires_grad=True)
    line = line if case["scores"] == "biased" else None
    whole = in_one_place(*tensors, mask().compute_mask(indices, indices), how, sinks, line)
    grad = torch.randn_like(whole)
    common = [x for x in (sinks, line) if x is not None]
    wanted = [*tensors, *common]
    expected = torch.autograd.grad(whole, wanted, grad)

    def compute(context: ParallelContext) -> tuple[Tensor, list[Tensor]]:
        at = positions.get_positions_of_rank(context.sequence.rank)
        mine = [t.detach()[:, :, at].requires_grad_() for t in tensors]
        own = [None if x is None else x.detach().requires_grad_() for x in (sinks, line)]
        out = ring_attention(*mine, RingKVExchange(context.sequence, mask(), how, case["gathers"]), *own)
        inputs = [*mine, *(x for x in own if x is not None)]
        return out.detach(), list(torch.autograd.grad(out, inputs, grad[:, :, at]))

    found = run_as_threads(compute, sequence=ring)
    for rank, (out, grads) in enumerate(found):
        at = positions.get_positions_of_rank(rank)
        torch.testing.assert_close(out, whole[:, :, at], rtol=0, atol=1e-12)
        for mine, full in zip(grads[:3], expected[:3], strict=True):
            torch.testing.assert_close(mine, full[:, :, at], rtol=0, atol=1e-12)
    for at, full in enumerate(expected[3:], start=3):
        torch.testing.assert_close(sum(grads[at] for _, grads in found), full, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("predicate", "share"), [(causal_mask_predicate, 4.5), (None, 6.0)])
@pytest.mark.parametrize("ring", [2, 4])
def test_communication_matches_the_formula(predicate: Predicate | None, share: float, ring: int) -> None:
    """Numbers per rank, forward and backward: 4.5 N K D (P-1)/P if causal, 6 N K D (P-1)/P otherwise."""
    length = 16 * ring
    positions = SequenceLayout(length, ring)

    def compute(context: ParallelContext) -> int:
        q, k, v = (
            torch.randn(BATCH, heads, length // ring, WIDTH, requires_grad=True) for heads in (HEADS, KEYS, KEYS)
        )
        travel = RingKVExchange(
            context.sequence,
            ChunkedAttentionMask(predicate, None, positions, positions, BATCH),
            AttentionScoreOptions(SCALE),
        )
        with CollectiveRecorder(context) as recorder:
            ring_attention(q, k, v, travel).sum().backward()
        assert recorder.wire_bytes() == recorder.wire_bytes("send", purpose="context")
        return recorder.wire_bytes()

    sent = sum(run_as_threads(compute, sequence=ring)) / ring
    assert sent == 4 * share * BATCH * length * KEYS * WIDTH * (ring - 1) / ring


def test_keys_are_sent_only_to_ranks_within_the_window() -> None:
    length, ring = 64, 4
    positions = SequenceLayout(length, ring)

    def compute(context: ParallelContext) -> int:
        q, k, v = (torch.randn(1, 2, length // ring, 4) for _ in range(3))
        with CollectiveRecorder(context) as recorder:
            ring_attention(
                q,
                k,
                v,
                RingKVExchange(
                    context.sequence,
                    ChunkedAttentionMask(window, None, positions, positions, 1),
                    AttentionScoreOptions(1.0),
                ),
            )
        return recorder.count("send")

    # chunk c is needed by the owner of chunk c + 1; the two in the middle have one owner
    assert sum(run_as_threads(compute, sequence=ring)) == 2 * ring - 2


@pytest.mark.slow
def test_16_bit_error_of_a_long_ring_is_close_to_one_kernel() -> None:
    """The errors of outputs and gradients are at most 1.3 times those of one kernel."""
    torch.manual_seed(0)
    length, ring = 512, 32
    positions = SequenceLayout(length, ring)
    exact = [torch.randn(1, 2, length, 16, dtype=torch.float64) for _ in range(4)]

    def attend(dtype: torch.dtype, ranks: int) -> list[Tensor]:
        q, k, v, grad = (x.bfloat16().to(dtype) for x in exact)
        at = SequenceLayout(length, ranks)

        def compute(context: ParallelContext) -> list[Tensor]:
            own = at.get_positions_of_rank(context.sequence.rank)
            mine = [x[:, :, own].requires_grad_() for x in (q, k, v)]
            out = ring_attention(
                *mine,
                RingKVExchange(
                    context.sequence,
                    ChunkedAttentionMask(causal_mask_predicate, None, at, at, 1),
                    AttentionScoreOptions(0.25),
                ),
            )
            return [out.detach(), *torch.autograd.grad(out, mine, grad[:, :, own])]

        order = torch.cat([at.get_positions_of_rank(rank) for rank in range(ranks)]).argsort()
        found = run_as_threads(compute, sequence=ranks)
        return [torch.cat(parts, 2)[:, :, order].double() for parts in zip(*found, strict=True)]

    assert positions.ring == ring
    right, alone, over = attend(torch.float64, 1), attend(torch.bfloat16, 1), attend(torch.bfloat16, ring)
    for truth, one, many in zip(right, alone, over, strict=True):
        assert (many - truth).norm() <= 1.3 * (one - truth).norm()


def late(samples: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    return (queries % 4 > 1) & (keys >= 0)


@pytest.mark.parametrize("predicate", [causal_mask_predicate, late, window, None])
def test_mask_evaluated_in_chunks_is_the_same(predicate: Predicate, monkeypatch: pytest.MonkeyPatch) -> None:
    positions, chunks = SequenceLayout(16, 2), range(4)

    def found() -> dict[tuple[int, int], masks.ChunkVisibility]:
        monkeypatch.setattr(mask, "_VISIBILITY_CACHE", masks._ChunkVisibilityCache())
        sees = ChunkedAttentionMask(predicate, None, positions, positions, 1)
        return {(row, col): sees.get_chunk_visibility(row, col) for row in chunks for col in chunks}

    at_once = found()
    monkeypatch.setattr(mask, "POSITIONS_PER_CALL", 1)
    assert found() == at_once


def test_windows_of_different_sizes_are_cached_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask, "_VISIBILITY_CACHE", masks._ChunkVisibilityCache())
    positions = SequenceLayout(16, 2)

    def looking_back(size: int) -> Predicate:
        return lambda samples, heads, queries, keys: (keys <= queries) & (queries - keys < size)

    wide, narrow = (ChunkedAttentionMask(looking_back(size), None, positions, positions, 1) for size in (16, 5))
    assert wide.get_chunk_visibility(3, 0) is masks.ChunkVisibility.ALL
    assert narrow.get_chunk_visibility(3, 0) is masks.ChunkVisibility.NOTHING


def test_mask_cache_is_per_thread_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread keeps only the last few masks, because ranks may be threads."""
    monkeypatch.setattr(mask, "MAX_CACHED_MASKS", 2)

    def ask(context: ParallelContext) -> list[int]:
        for length in (8, 12, 16):
            ChunkedAttentionMask(
                causal_mask_predicate, None, SequenceLayout(length, 2), SequenceLayout(length, 2), 1
            ).get_chunk_visibility(0, 0)
        all_gather_objects(None, context.tensor)
        return [id(known) for known in masks._VISIBILITY_CACHE.masks.values()]

    one, other = run_as_threads(ask, tensor=2)
    assert len(one) == len(other) == 2
    assert not set(one) & set(other)
