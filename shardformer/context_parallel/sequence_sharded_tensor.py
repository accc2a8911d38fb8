"""Tensor class for context parallelism: each rank stores a shard of the sequence.

Gradients are averaged over the P ranks of the axis, as in data parallelism. The backward pass of local positions
therefore scales gradients by P. Gradients are then correct for computations on gathered tensors, which are identical on
all ranks, and for computations on local positions.

The output of a stack of layers under context parallelism is such a tensor, and so are logits computed from it:

    hidden = model.model(input_ids).last_hidden_state     # (B, S, H); each rank stores (B, s, H)
    logits = model.lm_head(hidden)                        # still sharded: works on each position separately
    F.cross_entropy(logits.view(-1, V), labels.view(-1))  # of the local positions, and one number is summed
    hidden[:, 0]                                          # a plain tensor: one all-gather of (B, S, H)

``SEQUENCE_RULES`` at the end of this file maps functions of torch to their implementations on sharded tensors. All
other functions gather the full tensor and return plain tensors, identical on all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from itertools import accumulate
from math import prod
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from shardformer.comm import sharded_tensor as rules
from shardformer.comm.collectives import all_gather, all_reduce, start_all_to_all
from shardformer.comm.sharded_tensor import Args, Kwargs, Rule, ShardedTensor, TorchFunction
from shardformer.context_parallel.sequence_layout import IndexShards
from shardformer.mesh.parallel_context import Axis
from shardformer.random_state import LocalRNGState
from shardformer.tensor_parallel.linear_communication import apply_with_custom_backward
from shardformer.torch_compat import current_graph_task_id, tree_any, tree_map_only

# B batch, S sequence, H hidden, V vocabulary, P ranks; s: local positions

_INSIDE = threading.local()
"""Whether a model runs its forward pass. Operands that need a gradient then belong to the model, on all ranks."""


def set_in_model_forward(is_in_forward: bool) -> None:
    _INSIDE.now = is_in_forward


def is_in_model_forward() -> bool:
    """Return whether the forward pass of a context parallel model runs, or is recomputed, on this thread."""
    return getattr(_INSIDE, "now", False) or current_graph_task_id() >= 0


class SequenceShardedTensor(ShardedTensor):
    """Tensor that stores one shard of the sequence but behaves like the full tensor.

    - Without communication: views and slices, casts, arithmetic, linear layers and norms, sums over features, printing.
    - One number: ``F.cross_entropy`` with class indices, sums of all elements.
    - One all-gather of the full tensor, which is then cached: all other functions. They return plain tensors.
    """

    TEXT = (
        "a tensor that is sharded over the sequence",
        "Each rank stores some positions, and only functions that are called from Python support this",
        "Call .full_tensor() on all ranks for a plain tensor, or .to_local() for the positions of this rank",
    )
    rows: IndexShards

    @staticmethod
    def __new__(
        cls: type[SequenceShardedTensor], local_shard: Tensor, index_shards: IndexShards, shard_dim: int
    ) -> SequenceShardedTensor:
        self = cls._wrap_local_shard(
            local_shard, shard_dim, index_shards.full, local_shard.dtype, requires_grad=local_shard.requires_grad
        )
        self.rows = index_shards
        return self

    def _gather_full_tensor(self, local: Tensor) -> Tensor:
        """All-gather the sequence. If the local shard is vocabulary-parallel, all-gather the vocabulary first."""
        return all_gather_rows(rules.to_full_tensors(local), self.rows, self.shard_dim)

    def with_local_shard(
        self, local: Tensor, dim: int | None = None, dtype: torch.dtype | None = None
    ) -> SequenceShardedTensor:
        return SequenceShardedTensor(local, self.rows, self.shard_dim if dim is None else dim)

    def slice_to_local(self, full: Tensor, dim: int) -> Tensor:
        return slice_local_rows(full, self.rows, dim)

    def has_same_sharding(self, other: Self) -> bool:
        dims = [x.shard_dim - len(x.full_shape) for x in (self, other)]
        return dims[0] == dims[1] and self.rows.has_same_sharding_as(other.rows)

    def are_operand_grads_summed_over_ranks(self) -> bool:
        return is_in_model_forward()

    def _describe_shard(self) -> str:
        return f"{len(self.rows.local_indices)} of {self.rows.full} rows on {self.rows.axis}"


def average_grad_in_backward(input_tensor: Tensor, axis: Axis) -> Tensor:
    """Average the gradient of a model input over all ranks in the backward pass.

    Operations before this input then have the full gradient on each rank, so the average over the ranks does not change
    the gradients of their parameters. The gradient is the mean over the ranks, whose gradients are scaled by P.
    Communicates one all-reduce of ``input_tensor`` in the backward pass.
    """
    mean = lambda grad: all_reduce(grad.clone(), axis, purpose="input") / axis.size  # noqa: E731
    return apply_with_custom_backward(input_tensor, lambda x: x.view_as(x), mean)


def all_reduce_sum(local_tensor: Tensor, axis: Axis) -> Tensor:
    """Sum a tensor over the ranks of an axis. Communicates one all-reduce, and another in the backward pass.

    The gradients are summed, because they are averaged over the ranks later.
    """
    total = lambda x: all_reduce(x.clone(), axis, purpose="loss")  # noqa: E731
    return apply_with_custom_backward(local_tensor, total, total)


def all_gather_rows(local_rows: Tensor, index_shards: IndexShards, dim: int) -> Tensor:
    """All-gather the rows along ``dim``, and sort them into their original order.

    The gradients of the local rows are summed over the ranks, because they are averaged over the ranks later.
    Communicates one all-gather, and one all-to-all in the backward pass.
    """
    dim %= local_rows.dim()

    def all_gather_and_sort(local_tensor: Tensor) -> Tensor:
        lengths = [len(part) for part in index_shards.parts]
        joined = all_gather(local_tensor, index_shards.axis, dim, lengths_by_rank=lengths, purpose="gather")
        return joined.index_select(dim, torch.cat(index_shards.parts).argsort().to(local_tensor.device))

    def reduce_scatter_grad(grad: Tensor) -> Tensor:
        parts = [grad.index_select(dim, part.to(grad.device)) for part in index_shards.parts]
        local = parts[index_shards.axis.rank]
        sizes = [local.numel()] * index_shards.axis.size
        summands = start_all_to_all([part.reshape(-1) for part in parts], sizes, index_shards.axis, "gather").wait()
        return summands.view(index_shards.axis.size, *local.shape).sum(0)

    return apply_with_custom_backward(local_rows, all_gather_and_sort, reduce_scatter_grad)


def slice_local_rows(full_tensor: Tensor, index_shards: IndexShards, dim: int) -> Tensor:
    """Return this rank's rows of a replicated tensor. Communicates nothing, even in the backward pass."""
    dim, shape = dim % full_tensor.dim(), full_tensor.shape

    def pad_grad(grad: Tensor) -> Tensor:
        return grad.new_zeros(shape).index_copy_(dim, index_shards.local_indices.to(grad.device), grad)

    return apply_with_custom_backward(full_tensor, lambda x: index_shards.slice_local(x, dim), pad_grad)


def _apply_to_local_positions(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Apply a linear layer or a norm to this rank's positions, without communication."""
    x = args[0]
    tensors = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, Tensor)]
    trains = any(t.requires_grad for t in tensors) and torch.is_grad_enabled()
    if (
        not isinstance(x, SequenceShardedTensor)
        or any(isinstance(t, SequenceShardedTensor) for t in tensors)
        or (trains and not is_in_model_forward())
        or x.shard_dim >= x.dim() - len(args[1] if func in _NORMS and len(args) > 1 else (1,))
    ):
        return rules.call_on_full_tensors(func, args, kwargs)
    return SequenceShardedTensor(func(x.local, *args[1:], **kwargs), x.rows, x.shard_dim)


def _reduce_unsharded_dims(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Apply softmax or a reduction over unsharded dimensions, or reduce over all elements."""
    x = args[0]
    if not isinstance(x, SequenceShardedTensor) or tree_any(
        lambda a: isinstance(a, SequenceShardedTensor), (args[1:], dict(kwargs))
    ):
        return rules.call_on_full_tensors(func, args, kwargs)
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    name = getattr(func, "__name__", "")
    if dims is None:
        if name not in ("sum", "mean") or set(kwargs) - {"dtype"} or len(args) > 1:
            return rules.call_on_full_tensors(func, args, kwargs)
        total: Tensor = all_reduce_sum(x.local.sum(**kwargs), x.rows.axis)
        return total / x.numel() if name == "mean" else total
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, tuple | list) or not all(isinstance(dim, int) for dim in dims):
        return rules.call_on_full_tensors(func, args, kwargs)
    reduced = {dim % x.dim() for dim in dims}
    if x.shard_dim in reduced:
        return rules.call_on_full_tensors(func, args, kwargs)
    out = func(x.local, *args[1:], **kwargs)
    first = out if isinstance(out, Tensor) else out[0]
    shard_dim = x.shard_dim if first.dim() == x.dim() else x.shard_dim - sum(dim < x.shard_dim for dim in reduced)
    return tree_map_only(Tensor, lambda t: SequenceShardedTensor(t, x.rows, shard_dim), out)


def _handle_dropout(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Apply dropout with different random numbers on each rank, and restore the shared random state."""
    x = args[0]
    if not isinstance(x, SequenceShardedTensor) or rules.is_inplace_call(func, kwargs):
        return rules.call_on_full_tensors(func, args, kwargs)
    random = LocalRNGState(x.rows.axis.rank)
    random.enter_local_rng_state(x.local)
    try:
        return SequenceShardedTensor(func(x.local, *args[1:], **kwargs), x.rows, x.shard_dim)
    finally:
        random.exit_local_rng_state()


def _handle_reshape(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Apply ``view``, ``reshape`` or ``flatten`` to the local shard if possible, otherwise to the full tensor."""
    x = args[0]
    if not isinstance(x, SequenceShardedTensor):
        return rules.call_on_full_tensors(func, args, kwargs)
    try:
        shape = func(torch.empty(x.shape, device="meta"), *rules.to_full_tensors(args[1:]), **kwargs).shape
    except RuntimeError:
        return rules.call_on_full_tensors(func, args, kwargs)  # raises torch's error with the full sizes
    old = [1, *accumulate(x.shape, lambda a, b: a * b)]
    new = [1, *accumulate(shape, lambda a, b: a * b)]
    end = x.shard_dim + 1
    for at in range(len(shape)):
        if new[at + 1] == old[end] and new[at] in old[:end] and prod(shape[at + 1 :]) == prod(x.shape[end:]):
            first = max(d for d in range(end) if old[d] == new[at])
            rows = x.rows.repeat_for_samples(prod(x.shape[first : x.shard_dim]))
            sizes = [len(rows.local_indices) if d == at else size for d, size in enumerate(shape)]
            return SequenceShardedTensor(x.local.reshape(sizes), rows, at)
    return rules.call_on_full_tensors(func, args, kwargs)


def _handle_getitem(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Apply basic indexing to a sharded tensor. Only slices can index the sharded dimension locally."""
    x, key = args
    keys = key if isinstance(key, tuple) else (key,)
    if not isinstance(x, SequenceShardedTensor) or any(not _is_basic_index(k) for k in keys):
        return rules.call_on_full_tensors(func, args, kwargs)
    used = sum(isinstance(k, slice | int) for k in keys)
    if not any(k is Ellipsis for k in keys):
        keys = (*keys, Ellipsis)
    at = after = 0
    rows, where, kept, local_keys = x.rows, -1, None, list[Any]()
    for k in keys:
        count = x.dim() - used if k is Ellipsis else int(k is not None)
        if at <= x.shard_dim < at + count:
            if isinstance(k, int):
                return rules.call_on_full_tensors(func, args, kwargs)
            where = after + x.shard_dim - at
            if isinstance(k, slice) and k.indices(x.rows.full) != (0, x.rows.full, 1):
                rows, kept = x.rows.slice_rows(k)
            k = slice(None) if isinstance(k, slice) else k
        at += count
        after += count if k is Ellipsis else int(not isinstance(k, int))
        local_keys.append(k)
    local = func(x.local, tuple(local_keys))
    if kept is not None:
        local = local.index_select(where, kept.to(local.device))
    return SequenceShardedTensor(local, rows, where)


def _handle_setitem(func: TorchFunction, args: Args, kwargs: Kwargs) -> None:
    """Assign rows at the positions selected by a boolean mask, as in ``x[mask] = rows``."""
    x, key, value = args
    mask, *rest = key if isinstance(key, tuple) else (key,)
    is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool and not isinstance(mask, SequenceShardedTensor)
    if (
        not isinstance(x, SequenceShardedTensor)
        or not is_mask
        or any(k is not Ellipsis and not (isinstance(k, slice) and k == slice(None)) for k in rest)
        or not x.shard_dim < mask.dim() <= x.dim()
        or mask.shape != x.shape[: mask.dim()]
    ):
        SequenceShardedTensor.raise_unsupported(
            f"__setitem__ with this index cannot write to {SequenceShardedTensor.TEXT[0]}"
        )
    value, local_mask = rules.to_full_tensors(value), x.rows.slice_local(mask, x.shard_dim)
    if isinstance(value, Tensor) and value.dim() > x.dim() - mask.dim() and value.shape[0] != 1:
        numbers = (mask.flatten().cumsum(0) - 1).view(mask.shape)  # the row of each selected position
        value = value.index_select(0, x.rows.slice_local(numbers, x.shard_dim)[local_mask])
    x.local[local_mask] = value
    x._full = None


def _is_basic_index(index: Any) -> bool:
    is_number = isinstance(index, int) and not isinstance(index, bool)
    return index is None or index is Ellipsis or is_number or (isinstance(index, slice) and (index.step or 1) > 0)


def _handle_cross_entropy(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Compute the loss of this rank's positions, and all-reduce it over the sequence axis."""
    x, target = args[0], args[1] if len(args) == 2 else None
    if (
        not isinstance(x, SequenceShardedTensor)
        or not isinstance(target, Tensor)
        or x.dim() < 2
        or x.shard_dim == 1
        or target.is_floating_point()
        or target.shape != (x.shape[0], *x.shape[2:])
        or any(kwargs.get(name) is not None for name in ("size_average", "reduce"))
    ):
        return rules.call_on_full_tensors(func, args, kwargs)
    dim = x.shard_dim - (x.shard_dim > 1)
    target = rules.to_full_tensors(target)
    reduction = kwargs.get("reduction", "mean")
    options = {**kwargs, "reduction": "none" if reduction == "none" else "sum"}
    loss = func(x.local, x.rows.slice_local(target, dim), **options)
    if reduction == "none":
        return SequenceShardedTensor(loss, x.rows, dim)
    total: Tensor = all_reduce_sum(loss, x.rows.axis)
    if reduction == "sum":
        return total
    counted = target != kwargs.get("ignore_index", -100)
    weight = kwargs.get("weight")
    return total / (counted.sum() if weight is None else weight[target[counted]].sum())


_NORMS = (F.layer_norm, F.rms_norm)

# methods and attributes of a tensor, and functions of torch and torch.nn.functional
_NAMES: Mapping[Rule, str] = {
    rules.apply_elementwise: f"""
        {rules.ELEMENTWISE} to type type_as cpu cuda float double half bfloat16 square sqrt rsqrt log gelu silu erf
        __eq__ __ne__ __lt__ __le__ __gt__ __ge__ eq ne lt le gt ge logical_not logical_and
        """,
    _apply_to_local_positions: "linear layer_norm rms_norm",
    _reduce_unsharded_dims: "softmax log_softmax sum mean amax amin max min argmax argmin var logsumexp",
    _handle_dropout: "dropout",
    rules.apply_to_local_shard_and_rewrap: "clone contiguous detach",
    rules.call_on_local_shard: "requires_grad is_contiguous is_inference",
    rules.apply_view_function: """
        transpose swapaxes swapdims permute unsqueeze squeeze select unbind narrow index_select expand split chunk
        """,
    _handle_reshape: "view reshape flatten unflatten",
    _handle_getitem: "__getitem__",
    _handle_setitem: "__setitem__",
    _handle_cross_entropy: "cross_entropy nll_loss",
}
SEQUENCE_RULES: Mapping[Any, Rule] = rules.map_torch_functions_to_rules(_NAMES)
"""Function of torch -> its implementation on sharded tensors. All other functions gather the full tensor."""
SequenceShardedTensor.RULES = SEQUENCE_RULES


def map_local_shard(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Apply a position-wise function to this rank's positions."""
    return (
        SequenceShardedTensor(fn(tensor.local), tensor.rows, tensor.shard_dim)
        if isinstance(tensor, SequenceShardedTensor)
        else fn(tensor)
    )


def to_local(tensor: Tensor) -> Tensor:
    """Return the local shard of a sequence-sharded tensor, and return any other tensor unchanged."""
    return tensor.local if isinstance(tensor, SequenceShardedTensor) else tensor


def wrap_shard_like(local_shard: Tensor, reference_tensor: Tensor | None) -> Tensor:
    """Wrap a local shard with the same sharding as ``reference_tensor``, if that is sharded."""
    return (
        SequenceShardedTensor(local_shard, reference_tensor.rows, reference_tensor.shard_dim)
        if isinstance(reference_tensor, SequenceShardedTensor)
        else local_shard
    )
