"""Kernels for attention to a subset of the keys, which also return the log-sum-exp for merging the results.

For scores s over a subset of the keys, out = softmax(s) v and lse = log sum exp(s). Two subsets are merged by

    lse = log(exp(lse_1) + exp(lse_2))        out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

The gradients of a subset need only the merged lse and out (Dao et al. 2022, "FlashAttention", appendix B).

CPU       torch's flash kernel for the CPU
CUDA      torch's flash kernel, or its memory-efficient kernel with a mask or fp32
others    a few queries at a time in Python: capped scores, dropout, biased scores, fp64 on CUDA
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# B batch, N query heads, K key heads, Q and S lengths of queries and keys, D head dim

ATEN = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
SCORES_AT_ONCE = 2**22
"""Number of scores that the Python kernel computes at a time."""
HASH_FACTORS = (0x45D9F3B, 0x119DE1F3)


@dataclass(frozen=True)
class AttentionDropout:
    """Attention dropout whose mask is the same for every parallel layout: a hash of a seed and the positions."""

    rate: float
    seed: int  # identical on all ranks
    heads: Tensor  # indices of the local query heads

    def compute_dropout_factors(self, batch_size: int, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Compute the factor of each attention weight, 0 or 1 / (1 - rate), with shape (B, N, Q, S)."""
        device = query_positions.device
        x = _hash_integers(torch.arange(batch_size, device=device)[:, None] + self.seed % 2**31)
        x = _hash_integers(x * 31 + self.heads.to(device)[None, :])[:, :, None, None]
        x = _hash_integers(_hash_integers(x ^ query_positions[:, None]) ^ key_positions[None, :])
        return (x >= int(self.rate * 2**32)) / (1 - self.rate)


def _hash_integers(integers: Tensor) -> Tensor:
    integers = integers & 0xFFFFFFFF
    for factor in HASH_FACTORS:
        integers = ((integers ^ (integers >> 16)) * factor) & 0xFFFFFFFF
    return integers ^ (integers >> 16)


@dataclass(frozen=True)
class RelativePositionBias:
    """Bias of the attention scores that depends only on the distance between query and key."""

    distance_bias: Tensor  # (N, 2L - 1) for L positions: the bias of keys from L - 1 before the query to L - 1 after it

    def compute_position_bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Compute the bias for all pairs of query and key positions, with shape (N, Q, S)."""
        return self.distance_bias[:, self.compute_distance_indices(query_positions, key_positions)]

    def compute_distance_indices(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Compute the index into ``distance_bias`` for each pair of query and key, with shape (Q, S)."""
        return key_positions[None, :] - query_positions[:, None] + self.distance_bias.shape[1] // 2


@dataclass(frozen=True)
class AttentionScoreOptions:
    """Scale, soft cap, position bias and dropout of an attention kernel."""

    scale: float
    softcap: float | None = None  # c in c tanh(score / c)
    dropout: AttentionDropout | None = None
    bias: RelativePositionBias | None = None

    @property
    def can_use_fused_kernels(self) -> bool:
        """Whether fused attention kernels support these options, in forward and backward."""
        return self.softcap is None and self.dropout is None and self.bias is None


@dataclass(frozen=True)
class BlockAttentionMask:
    """Attention mask between a block of queries and a block of keys."""

    is_causal: bool  # query i attends to keys 0 to i; there are as many queries as keys
    mask: Tensor | None  # (B or 1, 1, Q, S) bool, or None for no mask in addition to ``is_causal``
    query_positions: Tensor  # positions of the queries
    key_positions: Tensor  # positions of the keys


def partial_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, block_mask: BlockAttentionMask, score_options: AttentionScoreOptions
) -> tuple[Tensor, Tensor]:
    """Compute attention to a subset of the keys. Returns the output and the log-sum-exp of the scores.

    q is (B, N, Q, D), k and v are (B, K, S, D). Returns out (B, N, Q, D) and lse (B, N, Q). The lse is in fp32, or fp64
    for fp64 inputs. A query that attends to none of these keys has a very low lse and an undefined out.
    """
    if q.device.type == "cpu" and score_options.softcap is None and score_options.dropout is None:
        added = (
            _make_additive_mask(block_mask, q.dtype)
            if score_options.bias is None
            else _make_masked_bias(block_mask, score_options.bias, q.dtype)
        )
        causal = block_mask.is_causal and score_options.bias is None
        found = ATEN._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=added, scale=score_options.scale
        )
        return found[0], found[1]
    if score_options.can_use_fused_kernels and q.is_cuda and q.dtype != torch.float64:
        return _cuda_attention_forward(q, k, v, block_mask, score_options.scale)
    return _eager_attention_forward(q, k, v, block_mask, score_options)


def partial_attention_backward(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block_mask: BlockAttentionMask,
    score_options: AttentionScoreOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the gradients of q, k, v and the bias of ``partial_attention_with_lse``.

    ``out`` and ``lse`` are the output and the log-sum-exp of the attention to all keys.
    """
    if score_options.can_use_fused_kernels and q.device.type == "cpu":
        found = ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_output,
            q,
            k,
            v,
            out,
            lse,
            0.0,
            block_mask.is_causal,
            attn_mask=_make_additive_mask(block_mask, q.dtype),
            scale=score_options.scale,
        )
        return found[0], found[1], found[2], None
    if score_options.can_use_fused_kernels and q.is_cuda and q.dtype != torch.float64:
        return *_cuda_attention_backward(grad_output, q, k, v, out, lse, block_mask, score_options.scale), None
    return _eager_attention_backward(grad_output, q, k, v, out, lse, block_mask, score_options)


def get_masked_score(dtype: torch.dtype) -> float:
    """Return the large negative attention score of masked keys.

    It is not -inf, because the kernels return 0 as the log-sum-exp of a row of -inf.
    """
    return torch.finfo(dtype).min / 4


def _make_additive_mask(block_mask: BlockAttentionMask, dtype: torch.dtype) -> Tensor | None:
    if block_mask.mask is None:
        return None
    return torch.zeros(block_mask.mask.shape, dtype=dtype, device=block_mask.mask.device).masked_fill(
        ~block_mask.mask, get_masked_score(dtype)
    )


def _make_masked_bias(
    block_mask: BlockAttentionMask, position_bias: RelativePositionBias, dtype: torch.dtype
) -> Tensor:
    """Combine the position bias and the mask into one additive tensor of shape (B or 1, N, Q, S)."""
    added = position_bias.compute_position_bias(block_mask.query_positions, block_mask.key_positions)[None].to(dtype)
    if block_mask.mask is not None:
        return added.masked_fill(~block_mask.mask, get_masked_score(dtype))
    if block_mask.is_causal:
        return added.masked_fill(
            block_mask.key_positions[None, :] > block_mask.query_positions[:, None], get_masked_score(dtype)
        )
    return added


# ------------------------------------------------------------------------------------------------------------ on a GPU


def _cuda_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, block_mask: BlockAttentionMask, scale: float
) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
    if block_mask.mask is None and q.dtype in HALF:
        found = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, block_mask.is_causal, False, scale=scale)
        return found[0], found[1][..., : q.shape[2]]
    bias = _make_aligned_additive_mask(block_mask, q)
    found = ATEN._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, block_mask.is_causal, scale=scale)
    return found[0], found[1][..., : q.shape[2]]  # the kernel pads the queries to 32


def _cuda_attention_backward(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block_mask: BlockAttentionMask,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    groups, heads = q.shape[1] // k.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
    none = torch.zeros((), dtype=torch.int64, device=q.device)  # the random state of the dropout, which is unused
    if block_mask.mask is None and q.dtype in HALF:
        dq, dk, dv = ATEN._scaled_dot_product_flash_attention_backward(
            grad_output, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, block_mask.is_causal,
            none, none, scale=scale,
        )  # fmt: skip
    else:
        padded = F.pad(lse, (0, -lse.shape[2] % 32)).contiguous()
        output_mask = [True, True, True, False]
        dq, dk, dv, _ = ATEN._scaled_dot_product_efficient_attention_backward(
            grad_output,
            q,
            k,
            v,
            _make_aligned_additive_mask(block_mask, q),
            out,
            padded,
            none,
            none,
            0.0,
            output_mask,
            block_mask.is_causal,
            scale=scale,
        )
    dk, dv = (x.unflatten(1, (heads, groups)).sum(2) if groups > 1 else x for x in (dk, dv))
    return dq, dk, dv


def _make_aligned_additive_mask(block_mask: BlockAttentionMask, q: Tensor) -> Tensor | None:
    """Create an additive mask with rows aligned to 8 elements, as the CUDA kernel requires."""
    added = _make_additive_mask(block_mask, q.dtype)
    if added is None:
        return None
    width = added.shape[-1]
    return F.pad(added, (0, -width % 8))[..., :width].expand(q.shape[0], q.shape[1], -1, -1)


# --- in Python


def _eager_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, block_mask: BlockAttentionMask, score_options: AttentionScoreOptions
) -> tuple[Tensor, Tensor]:
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = _repeat_kv_heads(k, q), _repeat_kv_heads(v, q)
    outs, sums = [], []
    for rows in _iter_query_slices(q, k):
        scores, _ = _compute_scores_and_softcap_grad(
            q[:, :, rows], k, block_mask.query_positions[rows], block_mask.key_positions, score_options
        )
        if (hidden := _make_inverted_mask(block_mask, rows)) is not None:
            scores = scores.masked_fill(hidden, get_masked_score(acc_dtype))
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
        if score_options.dropout is not None:
            weights = weights * score_options.dropout.compute_dropout_factors(
                q.shape[0], block_mask.query_positions[rows], block_mask.key_positions
            )
        outs.append((weights.to(v.dtype) @ v).to(q.dtype))
        sums.append(lse)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def _eager_attention_backward(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block_mask: BlockAttentionMask,
    score_options: AttentionScoreOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    distance_bias = (
        None if score_options.bias is None else torch.zeros_like(score_options.bias.distance_bias, dtype=acc_dtype)
    )
    heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    k, v = _repeat_kv_heads(k, q), _repeat_kv_heads(v, q)
    dqs, dk, dv = [], torch.zeros_like(k, dtype=acc_dtype), torch.zeros_like(v, dtype=acc_dtype)
    for rows in _iter_query_slices(q, k):
        scores, slope = _compute_scores_and_softcap_grad(
            q[:, :, rows], k, block_mask.query_positions[rows], block_mask.key_positions, score_options
        )
        weights = (scores - lse[:, :, rows, None]).exp()
        if (hidden := _make_inverted_mask(block_mask, rows)) is not None:
            weights = weights.masked_fill(hidden, 0.0)
        kept = (
            score_options.dropout.compute_dropout_factors(
                q.shape[0], block_mask.query_positions[rows], block_mask.key_positions
            )
            if score_options.dropout is not None
            else None
        )
        dv += ((weights if kept is None else weights * kept).to(q.dtype).transpose(2, 3) @ grad_output[:, :, rows]).to(
            acc_dtype
        )
        weights_grad = (grad_output[:, :, rows] @ v.transpose(2, 3)).to(acc_dtype)
        if kept is not None:
            weights_grad = weights_grad * kept
        dot = (grad_output[:, :, rows].to(acc_dtype) * out[:, :, rows].to(acc_dtype)).sum(-1, keepdim=True)
        scores_grad = weights * (weights_grad - dot)
        if distance_bias is not None and score_options.bias is not None:
            at = score_options.bias.compute_distance_indices(
                block_mask.query_positions[rows], block_mask.key_positions
            ).flatten()
            distance_bias.index_add_(1, at, scores_grad.sum(0).flatten(1))
        scores_grad = scores_grad * score_options.scale
        if slope is not None:
            scores_grad = scores_grad * slope
        scores_grad = scores_grad.to(q.dtype)
        dqs.append(scores_grad @ k)
        dk += (scores_grad.transpose(2, 3) @ q[:, :, rows]).to(acc_dtype)
    dk, dv = (x.unflatten(1, (heads, groups)).sum(2).to(q.dtype) for x in (dk, dv))
    return torch.cat(dqs, 2), dk, dv, distance_bias


def _compute_scores_and_softcap_grad(
    q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor, score_options: AttentionScoreOptions
) -> tuple[Tensor, Tensor | None]:
    scores, slope = q @ k.transpose(2, 3) * score_options.scale, None
    if score_options.softcap is not None:
        tanh = (scores / score_options.softcap).tanh()
        scores, slope = score_options.softcap * tanh, 1 - tanh.square()
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    return scores if score_options.bias is None else scores + score_options.bias.compute_position_bias(
        query_positions, key_positions
    ).to(scores.dtype), slope


def _make_inverted_mask(block_mask: BlockAttentionMask, query_slice: slice) -> Tensor | None:
    if block_mask.mask is not None:
        return ~block_mask.mask[:, :, query_slice]
    if block_mask.is_causal:
        return block_mask.key_positions[None, :] > block_mask.query_positions[query_slice, None]
    return None


def _repeat_kv_heads(kv: Tensor, q: Tensor) -> Tensor:
    groups = q.shape[1] // kv.shape[1]
    return kv.repeat_interleave(groups, 1) if groups > 1 else kv


def _iter_query_slices(q: Tensor, k: Tensor) -> Iterator[slice]:
    size = max(1, SCORES_AT_ONCE // max(q.shape[0] * q.shape[1] * k.shape[2], 1))
    for start in range(0, q.shape[2], size):
        yield slice(start, start + size)


def merge_partial_attention(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge the result for another subset of the keys into ``out`` and ``lse`` in place."""
    total = torch.logaddexp(lse, block_lse)
    out.mul_((lse - total).exp_()[..., None]).addcmul_(block_out.to(out.dtype), (block_lse - total).exp_()[..., None])
    lse.copy_(total)
