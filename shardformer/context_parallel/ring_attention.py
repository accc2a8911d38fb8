"""Ring attention: each rank keeps its queries, and receives the keys and values of the other ranks.

In step t, rank r computes with the keys of rank r - t while it receives those of rank r - t - 1. A chunk of keys is
sent directly to each rank whose queries attend to it. With zig-zag chunks and a causal mask, this is 3/4 of the traffic
of a ring that forwards all chunks. The backward pass sends keys and values again, and their gradients back to their
owner, which sums them in fp32.

Numbers sent per rank, forward and backward, with N = B S positions on all ranks and K key heads:

    causal 4.5 N K D (P-1)/P, not causal 6 N K D (P-1)/P

Algorithm: Liu et al. 2023, "Ring Attention", and Dao et al. 2022, "FlashAttention".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardformer.comm.collectives import all_gather, once_differentiable
from shardformer.comm.recorder import get_num_bytes, record_collective_start
from shardformer.context_parallel import attention_kernels as kernels
from shardformer.context_parallel.attention_kernels import AttentionScoreOptions, RelativePositionBias
from shardformer.context_parallel.masks import ChunkedAttentionMask, ChunkVisibility
from shardformer.context_parallel.sequence_layout import SequenceLayout
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.transport import Work

# B batch, N query heads, K key heads, S positions, s local positions, D head dim

PURPOSE = "context"


@dataclass(frozen=True)
class RingKVExchange:
    """Settings for the exchange of keys and values in a ring of ranks."""

    axis: Axis
    mask: ChunkedAttentionMask
    score_options: AttentionScoreOptions
    all_gather_kv: bool = False  # all-gather all keys first, instead of sending them during the computation

    def get_needed_kv_chunks(self, requesting_rank: int, owner_rank: int) -> tuple[int, ...]:
        """Return the chunks of keys and values that one rank needs from another."""
        chunks = self.mask.keys.get_chunk_indices_of_rank(owner_rank)
        return chunks if self.all_gather_kv else self.mask.get_needed_key_chunks(requesting_rank, chunks)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    exchange: RingKVExchange,
    sinks: Tensor | None = None,
    distance_bias: Tensor | None = None,
) -> Tensor:
    """Compute attention of this rank's queries to the keys and values of all ranks.

    q is (B, N, s, D), k and v are (B, K, s, D). Returns (B, N, s, D).

    Communicates over the ring: forward the chunks of keys and values that other ranks attend to; backward these again,
    and their gradients. With ``gathers``: forward one all-gather of keys and values; backward the same, and each rank
    sends its gradients of the keys and values to their owners.

    Args:
        sinks: (N,), for each head the score of an additional key without a value (attention sinks).
        distance_bias: (N, 2L - 1) for a sequence of L positions: the bias of keys from L - 1 positions before the query
            to L - 1 positions after it.
    """
    out: Tensor = _RingAttention.apply(q, k, v, sinks, distance_bias, exchange)
    return out


class _RingAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        distance_bias: Tensor | None,
        exchange: RingKVExchange,
    ) -> Tensor:
        out, lse, ctx.sees_nothing = ring_attention_forward(q, k, v, sinks, distance_bias, exchange)
        ctx.exchange = exchange
        ctx.save_for_backward(q, k, v, sinks, distance_bias, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return *ring_attention_backward(grad_output, ctx.saved_tensors, ctx.sees_nothing, ctx.exchange), None


def ring_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, distance_bias: Tensor | None, exchange: RingKVExchange
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the forward pass of ring attention without autograd.

    Returns the output, its log-sum-exp (B, N, s), and a mask of the queries that attend to no key. The mask is None if
    the attention mask cannot hide all keys.
    """
    options = _add_distance_bias(exchange.score_options, distance_bias)
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    out: Tensor | None = None
    lse = q.new_full(q.shape[:3], kernels.get_masked_score(acc_dtype), dtype=acc_dtype)
    kv = torch.stack((k, v))
    for _, chunks, arrived in _iter_kv_by_owner_rank(kv, exchange):
        for at, keys, block in _iter_query_key_slices_and_masks(exchange, chunks, q.device):
            key, value = arrived[:, :, :, keys]
            block_out, block_lse = kernels.partial_attention_with_lse(q[:, :, at], key, value, block, options)
            if out is None and block_out.shape[2] == q.shape[2]:
                out, lse = block_out.to(acc_dtype) if exchange.axis.size > 1 else block_out, block_lse.contiguous()
                continue
            out = torch.zeros_like(q, dtype=acc_dtype) if out is None else out.to(acc_dtype)
            kernels.merge_partial_attention(out[:, :, at], lse[:, :, at], block_out, block_lse)
    out = torch.zeros_like(q) if out is None else out
    if sinks is not None:
        lse, before = torch.logaddexp(lse, sinks.to(acc_dtype)[None, :, None]), lse
        out = out * (before - lse).exp_()[..., None]
    sees_nothing = lse < kernels.get_masked_score(acc_dtype) / 2 if exchange.mask.may_mask_all_keys_of_query else None
    if sees_nothing is not None:  # torch returns zero for such queries
        out = out.masked_fill(sees_nothing[..., None], 0.0)
    return out.to(q.dtype), lse, sees_nothing


def ring_attention_backward(
    grad_output: Tensor, saved_tensors: Sequence[Any], is_fully_masked: Tensor | None, exchange: RingKVExchange
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute the gradients of q, k, v, the sinks and the distance bias.

    Args:
        saved_tensors: q, k, v, sinks, distance_bias, and the output and log-sum-exp of ``ring_attention_forward``.
    """
    q, k, v, sinks, distance_bias, out, lse = saved_tensors
    options = _add_distance_bias(exchange.score_options, distance_bias)
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    bias_dtype = None if distance_bias is None else torch.promote_types(distance_bias.dtype, torch.float32)
    bias_grad = None if distance_bias is None else torch.zeros_like(distance_bias, dtype=bias_dtype)
    if is_fully_masked is not None:
        grad_output = grad_output.masked_fill(is_fully_masked[..., None], 0.0)
    dq = torch.zeros_like(q, dtype=acc_dtype)
    dkv = torch.zeros(2, *k.shape, dtype=acc_dtype, device=k.device)
    key_value_grads = _KVGradExchange(dkv, exchange)
    kv = torch.stack((k, v))
    for owner, chunks, arrived in _iter_kv_by_owner_rank(kv, exchange):
        total = torch.zeros_like(arrived)
        for at, keys, block in _iter_query_key_slices_and_masks(exchange, chunks, q.device):
            d_out, query, block_out, block_lse = (x[:, :, at].contiguous() for x in (grad_output, q, out, lse))
            key, value = arrived[:, :, :, keys]
            q_grad, k_grad, v_grad, block_bias_grad = kernels.partial_attention_backward(
                d_out, query, key, value, block_out, block_lse, block, options
            )
            if bias_grad is not None and block_bias_grad is not None:
                bias_grad += block_bias_grad
            dq[:, :, at] += q_grad
            total[:, :, :, keys] += torch.stack((k_grad, v_grad))
        key_value_grads.send_to_owner(owner, total)
    key_value_grads.receive_and_accumulate()
    sinks_grad = None
    if sinks is not None:
        weight = (sinks.to(acc_dtype)[None, :, None] - lse).exp()
        sinks_grad = -(weight * (grad_output.to(acc_dtype) * out.to(acc_dtype)).sum(-1)).sum((0, 2)).to(sinks.dtype)
    bias_grad = None if bias_grad is None else bias_grad.to(distance_bias.dtype)
    return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype), sinks_grad, bias_grad


def _add_distance_bias(score_options: AttentionScoreOptions, distance_bias: Tensor | None) -> AttentionScoreOptions:
    return score_options if distance_bias is None else replace(score_options, bias=RelativePositionBias(distance_bias))


def _iter_kv_by_owner_rank(kv: Tensor, exchange: RingKVExchange) -> Iterator[tuple[int, tuple[int, ...], Tensor]]:
    """Yield the keys and values of this rank, and then those of every other rank of the ring.

    Each item is (owner rank, chunk indices, keys and values (2, B, K, n, D)).
    """
    axis = exchange.axis
    me, ranks = axis.rank, axis.size
    local_chunks = exchange.mask.keys.get_chunk_indices_of_rank(me)
    if exchange.all_gather_kv and ranks > 1:
        lengths = [
            _count_key_positions(exchange, exchange.mask.keys.get_chunk_indices_of_rank(r)) for r in range(ranks)
        ]
        joined = all_gather(kv, axis, 3, lengths_by_rank=lengths, purpose=PURPOSE).split(lengths, 3)
        for step in range(ranks):
            owner = (me - step) % ranks
            yield owner, exchange.mask.keys.get_chunk_indices_of_rank(owner), joined[owner]
        return
    incoming = _start_ring_step(kv, exchange, 1)
    yield me, local_chunks, kv
    for step in range(1, ranks):
        owner, (chunks, into, works, _) = (me - step) % ranks, incoming
        for work in works:
            work.wait()
        following = _start_ring_step(kv, exchange, step + 1)
        if chunks:
            yield owner, chunks, into
        elif exchange.get_needed_kv_chunks(me, owner):
            raise AssertionError(
                f"Ring attention on rank {me} received no keys from rank {owner}. Report this bug in ShardFormer."
            )
        else:
            yield owner, (), into
        incoming = following


def _start_ring_step(
    kv: Tensor, exchange: RingKVExchange, step: int
) -> tuple[tuple[int, ...], Tensor, Sequence[Work], Tensor | None]:
    """Start sending keys and values to a later rank of the ring, and receiving those of an earlier rank."""
    axis, ranks = exchange.axis, exchange.axis.size
    if step >= ranks:
        return (), kv[:, :, :, :0], (), None
    to, source = (axis.rank + step) % ranks, (axis.rank - step) % ranks
    leaving, chunks = exchange.get_needed_kv_chunks(to, axis.rank), exchange.get_needed_kv_chunks(axis.rank, source)
    at = _get_slice_of_chunks(exchange.mask.keys, exchange.mask.keys.get_chunk_indices_of_rank(axis.rank), leaving)
    out = kv[:, :, :, at].contiguous()
    into = kv.new_empty((*kv.shape[:3], _count_key_positions(exchange, chunks), kv.shape[4]))
    return chunks, into, _start_send_recv(axis, to, out, source, into), out


def _start_send_recv(axis: Axis, dst: int, send_buffer: Tensor, src: int, recv_buffer: Tensor) -> Sequence[Work]:
    if send_buffer.numel():
        record_collective_start("send", axis, get_num_bytes(send_buffer), PURPOSE, num_ranks=2)
    return axis.transport.exchange({dst: send_buffer}, {src: recv_buffer})


class _KVGradExchange:
    """Exchange that sends the gradients of keys and values back to their ranks and sums them there."""

    def __init__(self, kv_grad: Tensor, exchange: RingKVExchange) -> None:
        self._dkv, self._exchange, self._step = kv_grad, exchange, 0
        self._incoming: list[tuple[tuple[int, ...], Tensor, Sequence[Work], Tensor]] = []
        self._gathered: dict[int, Tensor] = {}

    def send_to_owner(self, owner_rank: int, kv_grads: Tensor) -> None:
        """Send the gradients of keys and values to their rank. Call this in the order of the ring steps."""
        exchange, axis = self._exchange, self._exchange.axis
        step, self._step = self._step, self._step + 1
        if exchange.all_gather_kv and axis.size > 1:
            self._gathered[owner_rank] = kv_grads
            return
        if step == 0:
            self._dkv += kv_grads
            return
        reader = (axis.rank + step) % axis.size
        chunks = exchange.get_needed_kv_chunks(reader, axis.rank)
        into = kv_grads.new_empty((*kv_grads.shape[:3], _count_key_positions(exchange, chunks), kv_grads.shape[4]))
        out = kv_grads.contiguous()
        self._incoming.append((chunks, into, _start_send_recv(axis, owner_rank, out, reader, into), out))

    def receive_and_accumulate(self) -> None:
        exchange, axis = self._exchange, self._exchange.axis
        if self._gathered:
            self._exchange_all_grads()
        for chunks, into, works, _ in self._incoming:
            for work in works:
                work.wait()
            if chunks:
                at = _get_slice_of_chunks(
                    exchange.mask.keys, exchange.mask.keys.get_chunk_indices_of_rank(axis.rank), chunks
                )
                self._dkv[:, :, :, at] += into

    def _exchange_all_grads(self) -> None:
        axis = self._exchange.axis
        peers = [r for r in range(axis.size) if r != axis.rank]
        local = self._gathered[axis.rank]
        arriving = {r: torch.empty_like(local) for r in peers}
        outgoing = {r: self._gathered[r].contiguous() for r in peers}
        record_collective_start("send", axis, sum(map(get_num_bytes, outgoing.values())), PURPOSE, num_ranks=2)
        works = axis.transport.exchange(outgoing, arriving)
        self._dkv += local
        for work in works:
            work.wait()
        for rank in peers:
            self._dkv += arriving[rank]


def _iter_query_key_slices_and_masks(
    exchange: RingKVExchange, key_chunk_indices: tuple[int, ...], device: torch.device
) -> Iterator[tuple[slice, slice, kernels.BlockAttentionMask]]:
    """Yield the arguments of each attention kernel call: a query slice, a key slice and a mask.

    One call suffices if all queries attend to the same keys.
    """
    mask, rank = exchange.mask, exchange.axis.rank
    rows = mask.get_attending_query_chunks(rank, key_chunk_indices)
    seen = {
        row: tuple(c for c in key_chunk_indices if mask.get_chunk_visibility(row, c) is not ChunkVisibility.NOTHING)
        for row in rows
    }
    calls: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((row,), seen[row]) for row in rows]
    if len(rows) == 2 and (seen[rows[0]] == seen[rows[1]] or (rows == key_chunk_indices and mask.is_causal(rows))):
        calls = [(rows, seen[rows[1]])]
    for queries, keys in calls:
        at = _get_slice_of_chunks(mask.queries, mask.queries.get_chunk_indices_of_rank(rank), queries)
        yield at, _get_slice_of_chunks(mask.keys, key_chunk_indices, keys), mask.make_block_mask(queries, keys, device)


def _get_slice_of_chunks(
    sequence_layout: SequenceLayout, stored_chunk_indices: tuple[int, ...], selected_chunk_indices: tuple[int, ...]
) -> slice:
    start = 0
    bounds = []
    for chunk in stored_chunk_indices:
        a, b = sequence_layout.chunks[chunk]
        if chunk in selected_chunk_indices:
            bounds += [start, start + b - a]
        start += b - a
    return slice(min(bounds, default=0), max(bounds, default=0))


def _count_key_positions(exchange: RingKVExchange, key_chunk_indices: tuple[int, ...]) -> int:
    positions = exchange.mask.keys
    return sum(end - start for start, end in (positions.chunks[chunk] for chunk in key_chunk_indices))
