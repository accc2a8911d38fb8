"""Log-probabilities, entropies and other statistics of tokens, computed from vocabulary-parallel logits.

The log-probability of a label, the entropy, the mean logit and whether the label is the most likely token are sums and
maxima over the vocabulary. Each rank computes them for its columns, relative to its own maximum. One collective then
sends a few numbers per token and rank. ``vocab_parallel_loss`` computes only the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardformer.comm.collectives import all_gather
from shardformer.mesh.parallel_context import Axis
from shardformer.tensor_parallel.vocab_parallel_loss import clamp_negative_infinity, iter_row_chunks

# T tokens, V vocabulary, R ranks, K numbers per token; lower case: local shard (v columns of V)


class TokenStatistics(NamedTuple):
    """Log-probabilities and other statistics of T tokens, each of shape (T,), or None if not requested."""

    log_probs: Tensor  # the log-probabilities and the entropy have gradients
    entropy: Tensor | None
    log_sum_sq_probs: Tensor | None
    mean_logits: Tensor | None
    is_top1: Tensor | None


NUMBERS = {
    "entropy": "weighted",
    "log_sum_sq_probs": "squared",
    "mean_logits": "logit_sum",
    "is_top1": "max_before_label",
}
"""Statistic -> the number per token that it needs, besides the maximum, the sum of exponentials and the label logit."""


class _StatisticsOptions(NamedTuple):
    axis: Axis
    bounds: tuple[int, ...]
    requested: frozenset[str]

    @property
    def local_statistic_names(self) -> list[str]:
        return ["max", "sum", "label", *(number for name, number in NUMBERS.items() if name in self.requested)]


def vocab_parallel_token_statistics(
    logits_Tv: Tensor, labels_T: Tensor, axis: Axis, bounds: Sequence[int], requested: Sequence[str] = ()
) -> TokenStatistics:
    """Compute the log-probability of each label and other statistics of sharded logits. Identical on all ranks.

    Computes 16-bit logits in fp32. Communicates: forward one all-gather of K*R*T numbers, where K is 3, and one more
    for each requested statistic; backward nothing.

    Args:
        logits_Tv: (T, v), the columns of this rank.
        labels_T: (T,) class indices in [0, V), identical on all ranks.
        axis: the axis over which the vocabulary is sharded.
        bounds: R + 1 numbers; rank r has columns ``bounds[r]`` to ``bounds[r + 1]``, and ``bounds[R]`` is V.
        requested: names of the optional fields of ``TokenStatistics`` to compute.
    """
    options = _StatisticsOptions(axis, tuple(bounds), frozenset(requested))
    return TokenStatistics(*_ComputeTokenStatistics.apply(logits_Tv, labels_T.long(), options))


class _ComputeTokenStatistics(Function):
    @staticmethod
    def forward(
        ctx: Any, logits_Tv: Tensor, labels_T: Tensor, options: _StatisticsOptions
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        numbers, size = options.local_statistic_names, options.axis.size
        label_T = labels_T - options.bounds[options.axis.rank]
        local_KT = _compute_local_statistics(logits_Tv, label_T, numbers)
        gathered = all_gather(local_KT, options.axis, 0, purpose="loss").view(size, *local_KT.shape)
        ranks = dict(zip(numbers, gathered.unbind(1), strict=True))  # each (R, T)
        max_T = ranks["max"].amax(0)
        shift_RT = clamp_negative_infinity(ranks["max"]) - max_T
        scale_RT = shift_RT.exp()
        sum_T = (ranks["sum"] * scale_RT).sum(0)
        log_sum_T, label_logit_T = sum_T.log(), ranks["label"].amax(0)
        entropy_T = squares_T = mean_T = is_top1_T = None
        if "entropy" in options.requested:
            entropy_T = log_sum_T - (scale_RT * (ranks["weighted"] + shift_RT * ranks["sum"])).sum(0) / sum_T
        if "log_sum_sq_probs" in options.requested:
            squares_T = (ranks["squared"] * scale_RT.square()).sum(0).log() - 2 * log_sum_T
        if "mean_logits" in options.requested:
            mean_T = ranks["logit_sum"].sum(0) / options.bounds[-1]
        if "is_top1" in options.requested:  # an equal logit of an earlier token is the most likely one, as in argmax
            is_top1_T = (label_logit_T >= max_T) & (label_logit_T > ranks["max_before_label"].amax(0))
        ctx.save_for_backward(logits_Tv, label_T, max_T, sum_T, log_sum_T if entropy_T is None else entropy_T)
        ctx.mark_non_differentiable(*(x for x in (squares_T, mean_T, is_top1_T) if x is not None))
        return label_logit_T - max_T - log_sum_T, entropy_T, squares_T, mean_T, is_top1_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, *_: Any) -> tuple[Any, ...]:
        logits_Tv, label_T, max_T, sum_T, entropy_T = ctx.saved_tensors
        grad_Tv = torch.empty_like(logits_Tv, memory_format=torch.contiguous_format)
        if grad_Tv.numel() == 0:
            return grad_Tv, None, None
        for rows in iter_row_chunks(logits_Tv, max_T.dtype):
            log_p_tv = (logits_Tv[rows] - max_T[rows, None]).sub_(sum_T[rows, None].log())
            p_tv = log_p_tv.exp()
            out_tv = torch.zeros_like(p_tv)
            if grad_log_probs is not None:
                weight_t1 = grad_log_probs[rows, None]
                out_tv -= weight_t1 * p_tv
                column_t1 = label_T[rows, None].clamp(0, logits_Tv.shape[1] - 1)
                is_local_t1 = column_t1 == label_T[rows, None]
                out_tv.scatter_add_(1, column_t1, torch.where(is_local_t1, weight_t1, 0.0).to(out_tv.dtype))
            if grad_entropy is not None:
                log_p_tv.clamp_(min=torch.finfo(max_T.dtype).min)  # a probability of 0 adds 0, not NaN
                out_tv -= grad_entropy[rows, None] * p_tv * (log_p_tv + entropy_T[rows, None])
            grad_Tv[rows] = out_tv.to(grad_Tv.dtype)
        return grad_Tv, None, None


def _compute_local_statistics(logits_Tv: Tensor, label_T: Tensor, statistic_names: Sequence[str]) -> Tensor:
    """Return the statistics ``statistic_names`` of each token's local logits, such as the maximum, as (K, T)."""
    num_tokens, width = logits_Tv.shape
    dtype = torch.promote_types(logits_Tv.dtype, torch.float32)
    rows_of = {name: logits_Tv.new_zeros(num_tokens, dtype=dtype) for name in statistic_names}
    for name in ("max", "label", "max_before_label"):
        if name in rows_of:
            rows_of[name].fill_(-torch.inf)
    for rows in iter_row_chunks(logits_Tv, dtype) if width else ():
        x_tv, label_t1 = logits_Tv[rows].to(dtype), label_T[rows, None]
        max_t = x_tv.amax(1)
        shifted_tv = x_tv - clamp_negative_infinity(max_t)[:, None]
        exp_tv = shifted_tv.exp()
        column_t1 = label_t1.clamp(0, width - 1)
        label_logit_t1 = torch.where(column_t1 == label_t1, x_tv.gather(1, column_t1), -torch.inf)
        rows_of["max"][rows], rows_of["sum"][rows] = max_t, exp_tv.sum(1)
        rows_of["label"][rows] = label_logit_t1[:, 0]
        if "weighted" in rows_of:
            rows_of["weighted"][rows] = (exp_tv * shifted_tv.clamp(min=torch.finfo(dtype).min)).sum(1)
        if "squared" in rows_of:
            rows_of["squared"][rows] = exp_tv.square().sum(1)
        if "logit_sum" in rows_of:
            rows_of["logit_sum"][rows] = x_tv.sum(1)
        if "max_before_label" in rows_of:
            is_before_tv = torch.arange(width, device=x_tv.device) < label_t1
            rows_of["max_before_label"][rows] = x_tv.masked_fill(~is_before_tv, -torch.inf).amax(1)
    return torch.stack([rows_of[name] for name in statistic_names])
