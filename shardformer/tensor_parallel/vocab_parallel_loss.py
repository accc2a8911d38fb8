"""Cross entropy and token statistics of logits that are sharded over the vocabulary, without gathering the logits.

For a token with logits x and label y:

    M = max_r m_r                   m_r = max of x on rank r
    S = sum_r s_r exp(m_r - M)      s_r = sum of exp(x - m_r) on rank r
    loss = log S - (x_y - M)        x_y is local to one rank, the other ranks send 0

One collective sends three numbers per token and rank. (The loss of Megatron-LM, Shoeybi et al. 2019, section 3, sends
the same numbers in three collectives.) M and S stay separate, because log S + M in fp32 is less precise than torch's
log-softmax for large logits.

Token statistics (log-probability of the label, entropy, mean logit, and whether the label is the most likely token) are
computed in the same way: each rank computes sums and maxima over its columns, relative to its own maximum, and one
collective sends a few numbers per token and rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardformer.comm.collectives import all_gather
from shardformer.errors import ConfigError, InputError, check_choice
from shardformer.layout.shard_spec import get_even_split_bounds
from shardformer.mesh.parallel_context import Axis
from shardformer.torch_compat import assert_async

# T tokens, V vocabulary, R ranks, K numbers per token; lower case: local shard (v columns of V)


class TokenStatistics(NamedTuple):
    """Log-probability of each token's label, and optional statistics such as the entropy, each of shape (T,)."""

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


class _TokenStatisticsOptions(NamedTuple):
    axis: Axis
    bounds: tuple[int, ...]
    requested: frozenset[str]

    @property
    def local_statistic_names(self) -> list[str]:
        return ["max", "sum", "label", *(number for name, number in NUMBERS.items() if name in self.requested)]


def vocab_parallel_token_statistics(
    logits_Tv: Tensor,
    labels_T: Tensor,
    axis: Axis,
    vocab_bounds: Sequence[int],
    requested_statistics: Sequence[str] = (),
) -> TokenStatistics:
    """Compute label log-probabilities, and statistics such as entropy, from logits sharded over the vocabulary.

    The results are identical on all ranks. Computes 16-bit logits in fp32. Communicates: forward one all-gather of
    K*R*T numbers, where K is 3, and one more for each requested statistic; backward nothing.

    Args:
        logits_Tv: (T, v), the columns of this rank.
        labels_T: (T,) class indices in [0, V), identical on all ranks.
        axis: the axis over which the vocabulary is sharded.
        vocab_bounds: R + 1 numbers; rank r has columns ``vocab_bounds[r]`` to ``vocab_bounds[r + 1]``, and
            ``vocab_bounds[R]`` is V.
        requested_statistics: names of the optional fields of ``TokenStatistics`` to compute.
    """
    options = _TokenStatisticsOptions(axis, tuple(vocab_bounds), frozenset(requested_statistics))
    return TokenStatistics(*_ComputeTokenStatistics.apply(logits_Tv, labels_T.long(), options))


class _ComputeTokenStatistics(Function):
    @staticmethod
    def forward(
        ctx: Any, logits_Tv: Tensor, labels_T: Tensor, options: _TokenStatisticsOptions
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        numbers, size = options.local_statistic_names, options.axis.size
        label_T = labels_T - options.bounds[options.axis.rank]
        local_KT = _compute_local_statistics(logits_Tv, label_T, numbers)
        gathered = all_gather(local_KT, options.axis, 0, purpose="loss").view(size, *local_KT.shape)
        ranks = dict(zip(numbers, gathered.unbind(1), strict=True))  # each (R, T)
        max_T = ranks["max"].amax(0)
        shift_RT = clamp_neg_inf(ranks["max"]) - max_T
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
        for rows in iter_token_chunks(logits_Tv, max_T.dtype):
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


def _compute_local_statistics(logits_Tv: Tensor, local_labels_T: Tensor, statistic_names: Sequence[str]) -> Tensor:
    """Compute per-token statistics from the logits of the vocabulary entries on this rank, as a (K, T) tensor."""
    num_tokens, width = logits_Tv.shape
    dtype = torch.promote_types(logits_Tv.dtype, torch.float32)
    rows_of = {name: logits_Tv.new_zeros(num_tokens, dtype=dtype) for name in statistic_names}
    for name in ("max", "label", "max_before_label"):
        if name in rows_of:
            rows_of[name].fill_(-torch.inf)
    for rows in iter_token_chunks(logits_Tv, dtype) if width else ():
        x_tv, label_t1 = logits_Tv[rows].to(dtype), local_labels_T[rows, None]
        max_t = x_tv.amax(1)
        shifted_tv = x_tv - clamp_neg_inf(max_t)[:, None]
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


# T tokens, V vocabulary, R ranks, K numbers per token; lower case: local shard (v columns of V)

CHUNK_BYTES = {"cpu": 1024 * 1024, "cuda": 64 * 1024 * 1024}
"""Maximum size of the temporary tensor by device type. It fits the cache of a CPU, and is large enough for a GPU."""

REDUCTIONS = ("mean", "sum", "none")


class _CrossEntropyOptions(NamedTuple):
    axis: Axis
    bounds: tuple[int, ...]
    ignore_index: int
    reduction: str
    label_smoothing: float
    out_dtype: torch.dtype


def vocab_parallel_cross_entropy(
    logits_Tv: Tensor,
    targets_T: Tensor,
    axis: Axis,
    vocab_bounds: Sequence[int],
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    upcast: bool = False,
) -> Tensor:
    """Compute ``F.cross_entropy`` of logits that are sharded over the vocabulary. The loss is identical on all ranks.

    16-bit logits are processed in fp32, one chunk of rows at a time, without a copy of all logits. The logits are kept
    for the backward pass, which allocates their gradient in the same dtype.

    Communicates: forward one all-gather of 3*R*T numbers (4*R*T with label smoothing) in fp32, or fp64 for fp64 logits;
    backward nothing. For T=4,096 on four ranks these are 196,608 bytes; logits with V=128,000 take 2 GB.

    Args:
        logits_Tv: (T, v), the columns of this rank.
        targets_T: (T,) class indices in [0, V) or ``ignore_index``, identical on all ranks.
        axis: the axis over which the vocabulary is sharded.
        vocab_bounds: R + 1 numbers; rank r has columns ``vocab_bounds[r]`` to ``vocab_bounds[r + 1]``, and
            ``vocab_bounds[R]`` is V.
        reduction: "mean" or "sum" over the labels that are not ignored, or "none".
        label_smoothing: the weight of the uniform distribution in the target.
        upcast: return an fp32 loss for 16-bit logits, as ``F.cross_entropy(logits.float(), ...)`` does.

    Returns:
        The loss, () or (T,) with "none".

    Raises:
        InputError: for a label outside the vocabulary, on the CPU. On a GPU, where a check would synchronize with the
            host, a device-side assertion fails.
        ConfigError: for an unknown reduction, or a label smoothing outside [0, 1].
    """
    check_choice("reduction", reduction, REDUCTIONS)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ConfigError(
            f"label_smoothing must be between 0.0 and 1.0, but got {label_smoothing}.",
            remedy="Use 0.0 for no smoothing, or a value such as 0.1.",
        )
    _check_target_ids(logits_Tv, targets_T, vocab_bounds[-1], ignore_index)
    dtype = torch.float32 if upcast and logits_Tv.element_size() < 4 else logits_Tv.dtype
    options = _CrossEntropyOptions(axis, tuple(vocab_bounds), ignore_index, reduction, label_smoothing, dtype)
    assert logits_Tv.shape[-1] == vocab_bounds[axis.rank + 1] - vocab_bounds[axis.rank], (logits_Tv.shape, vocab_bounds)
    loss: Tensor = _VocabParallelCrossEntropy.apply(logits_Tv, targets_T.long(), options)
    return loss


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits_Tv: Tensor, targets_T: Tensor, options: _CrossEntropyOptions) -> Tensor:
        valid_T = targets_T != options.ignore_index
        label_T1 = (targets_T - options.bounds[options.axis.rank])[:, None]
        column_T1 = label_T1.clamp(0, max(logits_Tv.shape[1] - 1, 0))
        is_local_T1 = column_T1 == label_T1
        local_KT = _compute_local_softmax_stats(logits_Tv, column_T1, is_local_T1, options)
        gathered = all_gather(local_KT, options.axis, 0, purpose="loss")
        max_T, sum_T, loss_T = _combine_softmax_stats(gathered.view(options.axis.size, *local_KT.shape), options)
        loss_T = torch.where(valid_T, loss_T, 0.0)
        num_valid = valid_T.sum()
        ctx.options = options
        ctx.save_for_backward(logits_Tv, valid_T, column_T1, is_local_T1, max_T, sum_T, num_valid)
        if options.reduction != "none":
            loss_T = loss_T.sum()
        if options.reduction == "mean":
            loss_T = loss_T / num_valid
        return loss_T.to(options.out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None, None]:
        logits_Tv, valid_T, column_T1, is_local_T1, max_T, sum_T, num_valid = ctx.saved_tensors
        options: _CrossEntropyOptions = ctx.options
        grad_output = grad_output.to(max_T.dtype)
        if options.reduction == "mean":
            grad_output = grad_output / num_valid
        weight_T1 = torch.where(valid_T, grad_output, 0.0)[:, None]
        at_label_T1 = torch.where(is_local_T1, weight_T1, 0.0) * (options.label_smoothing - 1)
        uniform_T1 = weight_T1 * (options.label_smoothing / options.bounds[-1]) if options.label_smoothing else None
        statistics = (max_T[:, None], weight_T1 / sum_T[:, None])
        return _compute_logits_grad(logits_Tv, *statistics, column_T1, at_label_T1, uniform_T1), None, None


def _compute_local_softmax_stats(
    logits_Tv: Tensor, label_columns_T1: Tensor, is_local_label_T1: Tensor, options: _CrossEntropyOptions
) -> Tensor:
    """Compute per-token softmax statistics from the logits of the vocabulary entries on this rank.

    Returns the maximum, the sum of exponentials and the label logit as a (K, T) tensor. The label logit is 0 if another
    rank has it. With label smoothing, the tensor also contains the sum of the logits. Both sums are relative to the
    maximum.
    """
    num_tokens, width = logits_Tv.shape
    dtype = torch.promote_types(logits_Tv.dtype, torch.float32)
    out_KT = logits_Tv.new_zeros((4 if options.label_smoothing else 3, num_tokens), dtype=dtype)
    if width == 0:
        out_KT[0] = -torch.inf
        return out_KT
    for rows in iter_token_chunks(logits_Tv, dtype):
        x_tv = logits_Tv[rows]
        max_t = x_tv.amax(1).to(dtype)
        shifted_tv = torch.sub(x_tv, clamp_neg_inf(max_t)[:, None])
        if options.label_smoothing:
            out_KT[3, rows] = shifted_tv.sum(1)
        out_KT[0, rows] = max_t
        out_KT[1, rows] = shifted_tv.exp_().sum(1)
    out_KT[2] = torch.where(is_local_label_T1, logits_Tv.gather(1, label_columns_T1), 0.0)[:, 0]
    return out_KT


def _combine_softmax_stats(stats_RKT: Tensor, options: _CrossEntropyOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the softmax statistics of all ranks into the maximum, the sum and the loss of each token.

    The results are bitwise identical on all ranks.
    """
    max_RT, sum_RT, target_RT = stats_RKT[:, 0], stats_RKT[:, 1], stats_RKT[:, 2]
    max_T = max_RT.amax(0)
    sum_T = (sum_RT * (max_RT - max_T).exp()).sum(0)
    loss_T = sum_T.log() - (target_RT.sum(0) - max_T)
    if options.label_smoothing:
        # -log p summed over the vocabulary is V log S - sum (x - M)
        spread_T = stats_RKT[:, 3].sum(0)
        for rank, offset_T in enumerate(clamp_neg_inf(max_RT) - max_T):
            spread_T = spread_T + (options.bounds[rank + 1] - options.bounds[rank]) * offset_T
        uniform_T = sum_T.log() - spread_T / options.bounds[-1]
        loss_T = (1 - options.label_smoothing) * loss_T + options.label_smoothing * uniform_T
    return max_T, sum_T, loss_T


def _compute_logits_grad(
    logits_Tv: Tensor,
    max_T1: Tensor,
    scale_T1: Tensor,
    label_column_T1: Tensor,
    label_grad_T1: Tensor,
    uniform_grad_T1: Tensor | None,
) -> Tensor:
    """Compute the gradient (T, v) of the logits of the vocabulary entries on this rank, in the logits' dtype.

    It is scale * exp(x - M) - ``uniform``, plus ``at_label`` at the column of the label.
    """
    grad_Tv = torch.empty_like(logits_Tv, memory_format=torch.contiguous_format)
    if grad_Tv.numel() == 0:
        return grad_Tv
    for rows in iter_token_chunks(logits_Tv, max_T1.dtype):
        out_tv = grad_Tv[rows]
        in_place = out_tv if out_tv.dtype == max_T1.dtype else None
        x_tv = torch.sub(logits_Tv[rows], max_T1[rows], out=in_place)
        x_tv.exp_().mul_(scale_T1[rows])
        if uniform_grad_T1 is not None:
            x_tv.sub_(uniform_grad_T1[rows])
        x_tv.scatter_add_(1, label_column_T1[rows], label_grad_T1[rows])
        if in_place is None:
            out_tv.copy_(x_tv)
    return grad_Tv


def clamp_neg_inf(max_logits_T: Tensor) -> Tensor:
    """Replace -inf with the lowest finite number, so that fully masked logits do not produce NaN."""
    return max_logits_T.clamp(min=torch.finfo(max_logits_T.dtype).min)


def iter_token_chunks(logits_Tv: Tensor, dtype: torch.dtype) -> Iterator[slice]:
    """Yield slices of consecutive tokens, whose logits occupy at most ``CHUNK_BYTES`` or belong to one token."""
    num_tokens, width = logits_Tv.shape
    size = max(CHUNK_BYTES.get(logits_Tv.device.type, CHUNK_BYTES["cuda"]) // (width * dtype.itemsize), 1)
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))


def _check_target_ids(logits_Tv: Tensor, targets_T: Tensor, vocab_size: int, ignore_index: int) -> None:
    if logits_Tv.dim() != 2 or targets_T.shape != logits_Tv.shape[:1]:
        raise InputError(
            f"logits and labels must have shapes (tokens, vocabulary) and (tokens,), but got "
            f"{tuple(logits_Tv.shape)} and {tuple(targets_T.shape)}.",
            remedy="Flatten both with logits.view(-1, vocab_size) and labels.view(-1).",
        )
    if targets_T.numel() == 0:
        return
    # an ignored label is replaced by 0, which is in every vocabulary
    checked_T = torch.where(targets_T == ignore_index, 0, targets_T)
    if targets_T.device.type != "cpu" or type(targets_T) is not Tensor:
        is_known = ((checked_T >= 0) & (checked_T < vocab_size)).all()
        assert_async(is_known, f"a label is neither in [0, {vocab_size}) nor ignore_index={ignore_index}")
        return
    lowest, highest = (int(x) for x in torch.aminmax(checked_T))
    if lowest < 0 or highest >= vocab_size:
        label = highest if highest >= vocab_size else lowest
        raise InputError(
            f"The label {label} is outside the vocabulary (0 to {vocab_size - 1}) and is not "
            f"ignore_index={ignore_index}.",
            remedy=f"Set the labels of padding tokens to {ignore_index}. If the tokenizer has new tokens, call "
            "resize_token_embeddings before shard_model.",
        )


def cross_entropy_1d(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    process_group: Axis | dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """Compute the mean cross entropy of logits whose vocabulary is sharded over a process group.

    logits (..., v), labels (...) -> (). Communicates as ``vocab_parallel_cross_entropy``.

    Args:
        process_group: a process group or an Axis. None means all processes.
        vocab_size: V, which is v * R by default. If R does not divide V, the first ranks have one column more.

    Raises:
        InputError: if the number of columns is not this rank's share of ``vocab_size``.
    """
    axis = Axis.of(process_group)
    width = logits.shape[-1]
    bounds = get_even_split_bounds(width * axis.size if vocab_size is None else vocab_size, axis.size)
    expected = bounds[axis.rank + 1] - bounds[axis.rank]
    if width != expected:
        raise InputError(
            f"The logits on rank {axis.rank} of {axis.size} must have {expected} columns for vocab_size={vocab_size}, "
            f"but got {width}.",
            remedy="Shard the vocabulary evenly. If its size is not divisible, the first ranks have one more column.",
        )
    return vocab_parallel_cross_entropy(
        logits.reshape(-1, width), labels.reshape(-1), axis, bounds, ignore_index=ignore_index
    )


class DistCrossEntropyLoss(nn.Module):
    """Cross-entropy loss for logits that are sharded over the vocabulary. See ``cross_entropy_1d``."""

    def __init__(
        self,
        ignore_index: int = -100,
        process_group: Axis | dist.ProcessGroup | None = None,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        self.ignore_index, self.axis, self.vocab_size = ignore_index, Axis.of(process_group), vocab_size

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean loss for logits (..., v) and labels (...). The loss is identical on all ranks."""
        return cross_entropy_1d(logits, labels, self.ignore_index, self.axis, self.vocab_size)
