"""Attention of some queries to some keys that can be joined with attention to others: it gives its log-sum-exp too.

With scores s over the keys of one part, out = softmax(s) v and lse = log sum exp(s). Of two parts of the keys

    lse = log(exp(lse_1) + exp(lse_2))        out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

and the gradients of a part follow from the whole lse and out alone (Dao et al. 2022, "FlashAttention", appendix B).

on CPU    torch's flash kernel for the CPU
on CUDA   torch's flash kernel, or its memory-efficient one where there is a mask or fp32
else      a few queries at a time, written out: capped scores, dropout, a bias of the scores, fp64 on CUDA
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# B batch, N query heads, K key heads, Q and S lengths of queries and keys, D head dim

ATEN = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
SCORES_AT_ONCE = 2**22
"""How many scores the written-out kernel holds."""
MIX = (0x45D9F3B, 0x119DE1F3)


@dataclass(frozen=True)
class Dropout:
    """Dropout of attention weights: which are dropped depends on the seed and on where they are, on no layout.

    Args:
        rate: the share that is dropped.
        seed: the same on all ranks.
        heads: numbers of this rank's query heads among all.
    """

    rate: float
    seed: int
    heads: Tensor

    def kept(self, batch: int, rows: Tensor, cols: Tensor) -> Tensor:
        """(B, N, Q, S): 0 where a weight is dropped, else what it is multiplied by."""
        device = rows.device
        x = _mixed(torch.arange(batch, device=device)[:, None] + self.seed % 2**31)
        x = _mixed(x * 31 + self.heads.to(device)[None, :])[:, :, None, None]
        x = _mixed(_mixed(x ^ rows[:, None]) ^ cols[None, :])
        return (x >= int(self.rate * 2**32)) / (1 - self.rate)


def _mixed(x: Tensor) -> Tensor:
    """A hash of 32 bits of whole numbers."""
    x = x & 0xFFFFFFFF
    for factor in MIX:
        x = ((x ^ (x >> 16)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


@dataclass(frozen=True)
class RelativePositionBias:
    """A term of the scores that depends on how far a key is from a query.

    Args:
        line: (N, 2L - 1) of a sequence of L positions: of keys from L - 1 before the query to L - 1 behind it.
    """

    line: Tensor

    def between(self, rows: Tensor, cols: Tensor) -> Tensor:
        """(N, Q, S)."""
        return self.line[:, self.places(rows, cols)]

    def places(self, rows: Tensor, cols: Tensor) -> Tensor:
        """(Q, S): where on the line."""
        return cols[None, :] - rows[:, None] + self.line.shape[1] // 2


@dataclass(frozen=True)
class ScoreOptions:
    """How scores become weights.

    Args:
        scale: what the products of queries and keys are multiplied by.
        cap: c in c tanh(score / c); None where they are not capped.
        dropout: of the weights.
        bias: what is added to the scores.
    """

    scale: float
    cap: float | None = None
    dropout: Dropout | None = None
    bias: RelativePositionBias | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a fused kernel computes them, forward and backward."""
        return self.cap is None and self.dropout is None and self.bias is None


@dataclass(frozen=True)
class VisibleBlock:
    """Which keys which queries see.

    Args:
        causal: whether the queries, as many as keys, see those up to their own.
        sees: (B or 1, 1, Q, S) bool; None: all, or what ``causal`` says.
        rows, cols: the positions of queries and keys.
    """

    causal: bool
    sees: Tensor | None
    rows: Tensor
    cols: Tensor


def partial_attention(q: Tensor, k: Tensor, v: Tensor, part: VisibleBlock, how: ScoreOptions) -> tuple[Tensor, Tensor]:
    """q (B, N, Q, D), k and v (B, K, S, D) -> out (B, N, Q, D), lse (B, N, Q) in fp32, of fp64 in fp64.

    A query that sees no key has a very low lse and an output without a meaning.
    """
    if q.device.type == "cpu" and how.cap is None and how.dropout is None:
        added = _additive_mask(part, q.dtype) if how.bias is None else _biased(part, how.bias, q.dtype)
        causal = part.causal and how.bias is None
        found = ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=added, scale=how.scale)
        return found[0], found[1]
    if how.is_plain and q.is_cuda and q.dtype != torch.float64:
        return _attend_cuda(q, k, v, part, how.scale)
    return _attend_plain(q, k, v, part, how)


def partial_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: VisibleBlock, how: ScoreOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k and v, from the output and log-sum-exp over all keys; and that of a bias's line."""
    if how.is_plain and q.device.type == "cpu":
        found = ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, part.causal, attn_mask=_additive_mask(part, q.dtype), scale=how.scale
        )
        return found[0], found[1], found[2], None
    if how.is_plain and q.is_cuda and q.dtype != torch.float64:
        return *_attend_cuda_backward(grad, q, k, v, out, lse, part, how.scale), None
    return _attend_plain_backward(grad, q, k, v, out, lse, part, how)


def mask_value(dtype: torch.dtype) -> float:
    """What is added to the score of a key that is not seen: the log-sum-exp of a row of -inf would be taken for 0."""
    return torch.finfo(dtype).min / 4


def _additive_mask(part: VisibleBlock, dtype: torch.dtype) -> Tensor | None:
    if part.sees is None:
        return None
    return torch.zeros(part.sees.shape, dtype=dtype, device=part.sees.device).masked_fill(~part.sees, mask_value(dtype))


def _biased(part: VisibleBlock, bias: RelativePositionBias, dtype: torch.dtype) -> Tensor:
    """(B or 1, N, Q, S): the bias, and what is not seen."""
    added = bias.between(part.rows, part.cols)[None].to(dtype)
    if part.sees is not None:
        return added.masked_fill(~part.sees, mask_value(dtype))
    if part.causal:
        return added.masked_fill(part.cols[None, :] > part.rows[:, None], mask_value(dtype))
    return added


# ------------------------------------------------------------------------------------------------------------ on a GPU


def _attend_cuda(q: Tensor, k: Tensor, v: Tensor, part: VisibleBlock, scale: float) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
    if part.sees is None and q.dtype in HALF:
        found = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, part.causal, False, scale=scale)
        return found[0], found[1][..., : q.shape[2]]
    bias = _bias_cuda(part, q)
    found = ATEN._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, part.causal, scale=scale)
    return found[0], found[1][..., : q.shape[2]]  # the kernel pads the queries to 32


def _attend_cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: VisibleBlock, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    groups, heads = q.shape[1] // k.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
    none = torch.zeros((), dtype=torch.int64, device=q.device)  # the random numbers of dropout, of which there is none
    if part.sees is None and q.dtype in HALF:
        dq, dk, dv = ATEN._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, part.causal, none, none,
            scale=scale,
        )  # fmt: skip
    else:
        padded = F.pad(lse, (0, -lse.shape[2] % 32)).contiguous()
        wanted = [True, True, True, False]
        dq, dk, dv, _ = ATEN._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, _bias_cuda(part, q), out, padded, none, none, 0.0, wanted, part.causal, scale=scale
        )
    dk, dv = (x.unflatten(1, (heads, groups)).sum(2) if groups > 1 else x for x in (dk, dv))
    return dq, dk, dv


def _bias_cuda(part: VisibleBlock, q: Tensor) -> Tensor | None:
    """For all heads, in memory whose rows begin at multiples of 8 numbers, as the kernel wants it."""
    added = _additive_mask(part, q.dtype)
    if added is None:
        return None
    width = added.shape[-1]
    return F.pad(added, (0, -width % 8))[..., :width].expand(q.shape[0], q.shape[1], -1, -1)


# --------------------------------------------------------------------------------------------------------- written out


def _attend_plain(q: Tensor, k: Tensor, v: Tensor, part: VisibleBlock, how: ScoreOptions) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = _for_heads(k, q), _for_heads(v, q)
    outs, sums = [], []
    for rows in _stretches(q, k):
        scores = _capped(q[:, :, rows] @ k.transpose(2, 3), how)[0].to(wide)
        if how.bias is not None:
            scores = scores + how.bias.between(part.rows[rows], part.cols).to(wide)
        if (hidden := _hidden(part, rows)) is not None:
            scores = scores.masked_fill(hidden, mask_value(wide))
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
        if how.dropout is not None:
            weights = weights * how.dropout.kept(q.shape[0], part.rows[rows], part.cols)
        outs.append((weights.to(v.dtype) @ v).to(q.dtype))
        sums.append(lse)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def _attend_plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: VisibleBlock, how: ScoreOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    wide = torch.promote_types(q.dtype, torch.float32)
    line = None if how.bias is None else torch.zeros_like(how.bias.line, dtype=wide)
    heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    k, v = _for_heads(k, q), _for_heads(v, q)
    dqs, dk, dv = [], torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for rows in _stretches(q, k):
        scores, slope = _capped(q[:, :, rows] @ k.transpose(2, 3), how)
        scores = scores.to(wide)
        if how.bias is not None:
            scores = scores + how.bias.between(part.rows[rows], part.cols).to(wide)
        weights = (scores - lse[:, :, rows, None]).exp()
        if (hidden := _hidden(part, rows)) is not None:
            weights = weights.masked_fill(hidden, 0.0)
        kept = how.dropout.kept(q.shape[0], part.rows[rows], part.cols) if how.dropout is not None else None
        dv += ((weights if kept is None else weights * kept).to(q.dtype).transpose(2, 3) @ grad[:, :, rows]).to(wide)
        of_weights = (grad[:, :, rows] @ v.transpose(2, 3)).to(wide)
        if kept is not None:
            of_weights = of_weights * kept
        whole = (grad[:, :, rows].to(wide) * out[:, :, rows].to(wide)).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - whole)
        if line is not None and how.bias is not None:
            at = how.bias.places(part.rows[rows], part.cols).flatten()
            line.index_add_(1, at, of_scores.sum(0).flatten(1))
        of_scores = of_scores * how.scale
        if slope is not None:
            of_scores = of_scores * slope
        of_scores = of_scores.to(q.dtype)
        dqs.append(of_scores @ k)
        dk += (of_scores.transpose(2, 3) @ q[:, :, rows]).to(wide)
    dk, dv = (x.unflatten(1, (heads, groups)).sum(2).to(q.dtype) for x in (dk, dv))
    return torch.cat(dqs, 2), dk, dv, line


def _capped(products: Tensor, how: ScoreOptions) -> tuple[Tensor, Tensor | None]:
    """The scores, and where they are capped their derivative by the scaled products."""
    scores = products * how.scale
    if how.cap is None:
        return scores, None
    tanh = (scores / how.cap).tanh()
    return how.cap * tanh, 1 - tanh.square()


def _hidden(part: VisibleBlock, rows: slice) -> Tensor | None:
    if part.sees is not None:
        return ~part.sees[:, :, rows]
    if part.causal:
        return part.cols[None, :] > part.rows[rows, None]
    return None


def _for_heads(x: Tensor, q: Tensor) -> Tensor:
    """(B, K, S, D) as (B, N, S, D)."""
    groups = q.shape[1] // x.shape[1]
    return x.repeat_interleave(groups, 1) if groups > 1 else x


def _stretches(q: Tensor, k: Tensor) -> Iterator[slice]:
    size = max(1, SCORES_AT_ONCE // max(q.shape[0] * q.shape[1] * k.shape[2], 1))
    for start in range(0, q.shape[2], size):
        yield slice(start, start + size)


def merge_partial_attention(out: Any, lse: Any, other: Tensor, other_lse: Tensor) -> None:
    """Adds to what is known of some queries, in place, the attention to other keys."""
    total = torch.logaddexp(lse, other_lse)
    out.mul_((lse - total).exp_()[..., None]).addcmul_(other.to(out.dtype), (other_lse - total).exp_()[..., None])
    lse.copy_(total)
