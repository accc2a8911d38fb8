"""Ring attention: keys and values travel between ranks that each have a part of the queries.

In step t rank r computes with the keys of rank r - t, while those of rank r - t - 1 are on their way. A chunk of keys
goes straight to each rank whose queries see something of it, and to no other: with chunks in zig-zag order and a causal
mask that is 3/4 of what a ring sends that passes everything on. In the backward keys and values travel again, and their
gradients go straight home: each is rounded once, and the owner adds them up in fp32.

    causal    4.5 N K D (P-1)/P numbers a rank sends, forward and backward    6 N K D (P-1)/P without causality

The sums over keys are those of Liu et al. 2023, "Ring Attention", and of Dao et al. 2022, "FlashAttention".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardformer.comm.autograd_collectives import once_differentiable
from shardformer.comm.collectives import all_gather
from shardformer.comm.recorder import bytes_of, record
from shardformer.context_parallel.attention_kernels import (
    RelativePositionBias,
    ScoreOptions,
    mask_value,
    merge_partial_attention,
    partial_attention,
    partial_attention_backward,
)
from shardformer.context_parallel.masks import ChunkedMask
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.transport import Work

# B batch, N query heads, K key heads, s this rank's positions, D head dim; N = B s in the formula

PURPOSE = "context"


@dataclass(frozen=True)
class RingExchange:
    """How keys get to the ranks of a ring.

    Args:
        axis: the ring.
        mask: which positions see which.
        how: how scores become weights.
        gathers: whether all keys are gathered first, instead of sent under the computation.
    """

    axis: Axis
    mask: ChunkedMask
    how: ScoreOptions
    gathers: bool = False

    def needed_by(self, rank: int, owner: int) -> tuple[int, ...]:
        """The chunks of an owner's keys that a rank needs."""
        chunks = self.mask.keys.chunks_of(owner)
        return chunks if self.gathers else self.mask.needed(rank, chunks)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, travel: RingExchange, sinks: Tensor | None = None, line: Tensor | None = None
) -> Tensor:
    """q (B, N, s, D), k and v (B, K, s, D) of this rank's positions -> (B, N, s, D): attention to those of all ranks.

    Args:
        sinks: (N,): a score that each head adds to its sum of exponentials, of a key without a value.
        line: (N, 2L - 1) of a sequence of L positions: what is added to the scores of keys from L - 1 before the query
            to L - 1 behind it.

    Communicates, over the ring: forward the chunks of keys and values that other ranks see, once to each; backward the
    same again, and their gradients back. With ``gathers`` one all-gather of keys and values, in the backward again,
    and one reduce-scatter of their gradients.
    """
    out: Tensor = _Ring.apply(q, k, v, sinks, line, travel)
    return out


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, line: Tensor | None, travel: RingExchange
    ) -> Tensor:
        how = travel.how if line is None else replace(travel.how, bias=RelativePositionBias(line))
        wide = torch.promote_types(q.dtype, torch.float32)
        out: Tensor | None = None
        lse = q.new_full(q.shape[:3], mask_value(wide), dtype=wide)
        kv = torch.stack((k, v))
        for _, chunks, arrived in _arriving(kv, travel):
            for rows, cols in _calls(travel.mask, travel.axis.rank, chunks):
                at, of_q = _places(travel.mask.queries, travel.mask.queries.chunks_of(travel.axis.rank), rows)
                keys, _ = _places(travel.mask.keys, chunks, cols)
                part = travel.mask.part(rows, cols, q.device)
                seen = arrived[:, :, :, keys]
                one, one_lse = partial_attention(q[:, :, at], seen[0], seen[1], part, how)
                if out is None and of_q == q.shape[2]:
                    out, lse = one.to(wide) if travel.axis.size > 1 else one, one_lse.contiguous()
                    continue
                out = torch.zeros_like(q, dtype=wide) if out is None else out.to(wide)
                merge_partial_attention(out[:, :, at], lse[:, :, at], one, one_lse)
        out = torch.zeros_like(q) if out is None else out
        if sinks is not None:
            lse, before = torch.logaddexp(lse, sinks.to(wide)[None, :, None]), lse
            out = out * (before - lse).exp_()[..., None]
        unseeing = lse < mask_value(wide) / 2 if travel.mask.may_hide_all else None
        if unseeing is not None:  # as torch has it
            out = out.masked_fill(unseeing[..., None], 0.0)
        out = out.to(q.dtype)
        ctx.travel, ctx.unseeing = travel, unseeing
        ctx.save_for_backward(q, k, v, sinks, line, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, line, out, lse = ctx.saved_tensors
        travel: RingExchange = ctx.travel
        how = travel.how if line is None else replace(travel.how, bias=RelativePositionBias(line))
        of_line = None if line is None else torch.zeros_like(line, dtype=torch.promote_types(line.dtype, torch.float32))
        wide = torch.promote_types(q.dtype, torch.float32)
        if ctx.unseeing is not None:
            grad = grad.masked_fill(ctx.unseeing[..., None], 0.0)
        dq = torch.zeros_like(q, dtype=wide)
        dkv = torch.zeros(2, *k.shape, dtype=wide, device=k.device)
        home = _KeyValueGradients(dkv, travel)
        kv = torch.stack((k, v))
        for owner, chunks, arrived in _arriving(kv, travel):
            total = torch.zeros_like(arrived)
            for rows, cols in _calls(travel.mask, travel.axis.rank, chunks):
                at, _ = _places(travel.mask.queries, travel.mask.queries.chunks_of(travel.axis.rank), rows)
                keys, _ = _places(travel.mask.keys, chunks, cols)
                mine = [x[:, :, at].contiguous() for x in (grad, q, out, lse)]
                seen = arrived[:, :, :, keys]
                part = travel.mask.part(rows, cols, q.device)
                of_q, of_k, of_v, found = partial_attention_backward(
                    mine[0], mine[1], seen[0], seen[1], mine[2], mine[3], part, how
                )
                if of_line is not None and found is not None:
                    of_line += found
                dq[:, :, at] += of_q
                total[:, :, :, keys] += torch.stack((of_k, of_v))
            home.take(owner, total)
        home.finish()
        of_sinks = None
        if sinks is not None:
            weight = (sinks.to(wide)[None, :, None] - lse).exp()
            of_sinks = -(weight * (grad.to(wide) * out.to(wide)).sum(-1)).sum((0, 2)).to(sinks.dtype)
        of_line = None if of_line is None else of_line.to(line.dtype)
        return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype), of_sinks, of_line, None


def _arriving(kv: Tensor, travel: RingExchange) -> Iterator[tuple[int, tuple[int, ...], Tensor]]:
    """(owner, chunks, keys and values (2, B, K, n, D)) of this rank first, then of those that it sees something of."""
    axis = travel.axis
    me, ranks = axis.rank, axis.size
    own = travel.mask.keys.chunks_of(me)
    if travel.gathers and ranks > 1:
        lengths = [_length(travel, r, travel.mask.keys.chunks_of(r)) for r in range(ranks)]
        joined = all_gather(kv, axis, 3, lengths=lengths, purpose=PURPOSE).split(lengths, 3)
        for step in range(ranks):
            owner = (me - step) % ranks
            yield owner, travel.mask.keys.chunks_of(owner), joined[owner]
        return
    coming = _start(kv, travel, 1)
    yield me, own, kv
    for step in range(1, ranks):
        owner, (chunks, into, works, _) = (me - step) % ranks, coming
        for work in works:
            work.wait()
        following = _start(kv, travel, step + 1)
        if chunks:
            yield owner, chunks, into
        elif travel.needed_by(me, owner):
            raise AssertionError("what is needed arrives")
        else:
            yield owner, (), into
        coming = following


def _start(
    kv: Tensor, travel: RingExchange, step: int
) -> tuple[tuple[int, ...], Tensor, Sequence[Work], Tensor | None]:
    """Starts sending this rank's keys to the rank ``step`` behind it, and receiving those of the rank before."""
    axis, ranks = travel.axis, travel.axis.size
    if step >= ranks:
        return (), kv[:, :, :, :0], (), None
    to, source = (axis.rank + step) % ranks, (axis.rank - step) % ranks
    leaving, chunks = travel.needed_by(to, axis.rank), travel.needed_by(axis.rank, source)
    out = kv[:, :, :, _places(travel.mask.keys, travel.mask.keys.chunks_of(axis.rank), leaving)[0]].contiguous()
    into = kv.new_empty((*kv.shape[:3], _length(travel, source, chunks), kv.shape[4]))
    return chunks, into, _exchange(axis, to, out, source, into), out


def _exchange(axis: Axis, to: int, out: Tensor, source: int, into: Tensor) -> Sequence[Work]:
    if out.numel():
        record("send", axis, bytes_of(out), PURPOSE, ranks=2)
    return axis.transport.exchange({to: out}, {source: into})


class _KeyValueGradients:
    """The gradients of keys and values go back to who has them, and are added up there."""

    def __init__(self, dkv: Tensor, travel: RingExchange) -> None:
        self._dkv, self._travel, self._step = dkv, travel, 0
        self._coming: list[tuple[tuple[int, ...], Tensor, Sequence[Work], Tensor]] = []
        self._gathered: dict[int, Tensor] = {}

    def take(self, owner: int, total: Tensor) -> None:
        """What this rank found for the keys of ``owner``: its own first, then those of the rank before, and so on."""
        travel, axis = self._travel, self._travel.axis
        step, self._step = self._step, self._step + 1
        if travel.gathers and axis.size > 1:
            self._gathered[owner] = total
            return
        if step == 0:
            self._dkv += total
            return
        asker = (axis.rank + step) % axis.size
        chunks = travel.needed_by(asker, axis.rank)
        into = total.new_empty((*total.shape[:3], _length(travel, axis.rank, chunks), total.shape[4]))
        out = total.contiguous()
        self._coming.append((chunks, into, _exchange(axis, owner, out, asker, into), out))

    def finish(self) -> None:
        travel, axis = self._travel, self._travel.axis
        if self._gathered:
            self._scatter()
        for chunks, into, works, _ in self._coming:
            for work in works:
                work.wait()
            if chunks:
                at, _ = _places(travel.mask.keys, travel.mask.keys.chunks_of(axis.rank), chunks)
                self._dkv[:, :, :, at] += into

    def _scatter(self) -> None:
        axis = self._travel.axis
        peers = [r for r in range(axis.size) if r != axis.rank]
        mine = self._gathered[axis.rank]
        arriving = {r: torch.empty_like(mine) for r in peers}
        outgoing = {r: self._gathered[r].contiguous() for r in peers}
        record("send", axis, sum(map(bytes_of, outgoing.values())), PURPOSE, ranks=2)
        works = axis.transport.exchange(outgoing, arriving)
        self._dkv += mine
        for work in works:
            work.wait()
        for rank in peers:
            self._dkv += arriving[rank]


def _calls(mask: ChunkedMask, rank: int, chunks: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(chunks of queries, chunks of keys) for each call of the kernel: one, where all of these queries see the same."""
    rows = mask.seeing(rank, chunks)
    seen = {row: tuple(c for c in chunks if mask.between(row, c).value != "nothing") for row in rows}
    if len(rows) == 2 and (seen[rows[0]] == seen[rows[1]] or (rows == chunks and _own_causal(mask, rows))):
        yield rows, seen[rows[1]]
        return
    for row in rows:
        yield (row,), seen[row]


def _own_causal(mask: ChunkedMask, rows: tuple[int, ...]) -> bool:
    return mask.queries == mask.keys and [mask.between(r, c).value for r in rows for c in rows] == [
        "causal", "nothing", "all", "causal",
    ]  # fmt: skip


def _places(positions: Any, held: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[slice, int]:
    """Where chunks lie among those that are held, which are consecutive there, and how many positions they have."""
    start = 0
    bounds = []
    for chunk in held:
        a, b = positions.chunks[chunk]
        if chunk in wanted:
            bounds += [start, start + b - a]
        start += b - a
    at = slice(min(bounds, default=0), max(bounds, default=0))
    return at, at.stop - at.start


def _length(travel: RingExchange, owner: int, chunks: tuple[int, ...]) -> int:
    return _places(travel.mask.keys, travel.mask.keys.chunks_of(owner), chunks)[1]
