"""Logits that are sharded over the vocabulary and behave like the full logits.

A model whose head returns ``wrap_local_logits_as_full_logits(local, axis, bounds)`` keeps its forward pass and its
loss:

    logits = model.lm_head(hidden)                      # VocabParallelLogits (B, S, V); each rank stores (B, S, v)
    logits.float().view(-1, V)                          # still sharded: views and casts use only the local shard
    F.cross_entropy(logits.view(-1, V), labels)         # vocabulary-parallel loss: three numbers per token
    logits[:, -1].argmax(-1)                            # a plain tensor, after one all-gather of (B, V)

``LOGITS_RULES`` at the end of this file maps functions of torch to their implementations on sharded logits. All other
functions gather the full logits and return plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardformer.comm import sharded_tensor as rules
from shardformer.comm.collectives import gather_from_parallel_region
from shardformer.comm.sharded_tensor import Args, Kwargs, Rule, ShardedTensor, TorchFunction
from shardformer.layout.shard_spec import Split
from shardformer.mesh.parallel_context import Axis
from shardformer.tensor_parallel.vocab_parallel_loss import vocab_parallel_cross_entropy
from shardformer.torch_compat import DisableTorchFunctionSubclass

# B batch, S sequence, V vocabulary; lower case: local shard (v columns of V)

ViewReplay = Callable[[Tensor], Tensor]
"""Function that repeats a view of a sharded tensor on the full tensor."""


def wrap_local_logits_as_full_logits(local_logits: Tensor, axis: Axis, vocab_bounds: Sequence[int]) -> Tensor:
    """Wrap the logits of this rank's vocabulary slice in a tensor that behaves like the full logits.

    (..., v) -> (..., V). Returns ``local_logits`` on an axis of size 1. Communicates nothing.

    Args:
        vocab_bounds: R + 1 numbers; rank r has columns ``vocab_bounds[r]`` to ``vocab_bounds[r + 1]``, and
            ``vocab_bounds[R]`` is V.
    """
    if axis.size == 1:
        return local_logits
    assert local_logits.shape[-1] == vocab_bounds[axis.rank + 1] - vocab_bounds[axis.rank], (
        tuple(local_logits.shape),
        vocab_bounds,
        axis.rank,
    )
    return wrap_local_logits_shard(local_logits, axis, tuple(vocab_bounds), local_logits.dim() - 1, local_logits.dtype)


class VocabParallelLogits(ShardedTensor):
    """Logits that are sharded over the vocabulary and behave like the full logits.

    ``wrap_local_logits_as_full_logits`` creates them.

    Shape, dtype, device and ``requires_grad`` are those of the full logits. All ranks of the axis must call the same
    functions on them, so that every rank reaches each all-gather.

    - Without communication: views, slices and transposes that keep the vocabulary dim; casts; arithmetic with numbers
      and with tensors that need no gradient; elementwise functions such as tanh; printing. A cast from 16 bits to fp32
      is deferred, so that the loss computes in fp32 without an fp32 copy of the logits.
    - Three numbers per token: ``F.cross_entropy`` with class indices.
    - One all-gather of the full logits, which are then cached: all other functions. They return plain tensors; their
      backward pass takes the local slice. In-place writes to the logits or a view gather too, and keep the local slice.

    Gradients are those of the local shard: ``retain_grad()`` keeps it, and ``grad`` and hooks see it as
    VocabParallelLogits. Call ``full_tensor()`` to copy or pickle the logits, or to pass them to code outside torch.

    Implementation: a wrapper of the full shape around the local shard, which has the autograd history. The wrapper is
    the output of ``_WrapLocalLogits``, so that code that autograd calls with the full logits also has correct
    gradients. A view records the tensor that it was taken from (``_origin``). A write goes to the origin. All views of
    a tensor share the count of writes (``_writes``); a view that has not seen the last write is replayed from its
    origin.
    """

    TEXT = (
        "vocabulary-parallel logits",
        "Each rank stores a slice of the vocabulary, and only functions that are called from Python support this",
        "Call logits.full_tensor() on all ranks for a plain tensor, or logits.to_local() for the slice of this rank",
    )
    _origin: tuple[VocabParallelLogits, ViewReplay] | None
    _writes: list[int]
    _writes_seen: int
    axis: Axis
    bounds: tuple[int, ...]

    @staticmethod
    def __new__(
        cls: type[VocabParallelLogits],
        local_logits: Tensor,
        axis: Axis,
        vocab_bounds: tuple[int, ...],
        vocab_dim: int,
        dtype: torch.dtype,
    ) -> VocabParallelLogits:
        self = cls._wrap_local_shard(local_logits, vocab_dim, vocab_bounds[-1], dtype)
        self._origin, self._writes, self._writes_seen = None, [0], 0
        self.axis, self.bounds = axis, vocab_bounds
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub takes func for self
        cls, func: TorchFunction, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Handle calls that bypass ``__torch_function__``: those from autograd and from C++ code."""
        if func in _ALIASES and (len(args) == 1 or tuple(args[1]) == args[0].full_shape):
            return args[0].with_local_shard(args[0].local.detach())
        if func is torch.ops.aten.add.Tensor and len(args) == 2:  # autograd sums two gradients
            x = next(a for a in args if isinstance(a, VocabParallelLogits))
            return x.with_local_shard(get_local_vocab_slice_like(args[0], x) + get_local_vocab_slice_like(args[1], x))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def to_local(self) -> Tensor:
        """Return this rank's logits (..., v), with their autograd history. Communicates nothing."""
        return get_local_shard(self).to(self.full_dtype)

    def _gather_full_tensor(self, local: Tensor) -> Tensor:
        """All-gather the full logits in the dtype of the local shard. Communicates nothing in the backward pass."""
        split = Split(tuple(((a, b),) for a, b in pairwise(self.bounds)), (self.axis.name,))
        return gather_from_parallel_region(local, self.axis, self.shard_dim, split, "gather").to(self.full_dtype)

    def with_local_shard(
        self, local: Tensor, dim: int | None = None, dtype: torch.dtype | None = None
    ) -> VocabParallelLogits:
        """Create logits with the same sharding as these, but with another local shard.

        A deferred cast stays deferred, unless ``dtype`` is passed.
        """
        dim = self.shard_dim if dim is None else dim
        return wrap_local_logits_shard(local, self.axis, self.bounds, dim, dtype or self.full_dtype)

    def make_view(self, local: Tensor, dim: int, replay: ViewReplay) -> VocabParallelLogits:
        out = self.with_local_shard(local, dim)
        out._origin, out._writes, out._writes_seen = (self, replay), self._writes, self._writes_seen
        return out

    def get_stored_shard(self) -> Tensor:
        return get_local_shard(self)

    def slice_to_local(self, full: Tensor, dim: int) -> Tensor:
        return get_local_vocab_slice(full, self.axis, self.bounds, dim)

    def has_same_sharding(self, other: Any) -> bool:
        layout = (self.axis, self.bounds, self.shard_dim, self.full_shape)
        return layout == (other.axis, other.bounds, other.shard_dim, other.full_shape)

    def call_inplace_function(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
        """Apply an in-place function to the logits, and update the tensors that they are views of.

        Only the local slices of the results are kept. Communicates one all-gather, unless the full logits are cached.
        """
        chain = [self]
        while chain[-1]._origin is not None:
            chain.append(chain[-1]._origin[0])
        fulls = [chain[-1].full_tensor()]
        for each in reversed(chain[:-1]):
            assert each._origin is not None
            fulls.append(each._origin[1](fulls[-1]))
        full = fulls[-1]
        result = func(full, *rules.to_full_tensors(args[1:]), **kwargs)
        if (full.shape, full.dtype) != (self.full_shape, self.full_dtype):
            self.raise_unsupported("An in-place function changes the shape or dtype of vocabulary-parallel logits")
        self._writes[0] += 1
        for each, written in zip(reversed(chain), fulls, strict=True):
            _replace_logits_in_place(each, written)
        return self if result is full else result

    def _describe_shard(self) -> str:
        return f"vocabulary {self.bounds[self.axis.rank]}:{self.bounds[self.axis.rank + 1]} on {self.axis}"


def wrap_local_logits_shard(
    local_logits: Tensor, axis: Axis, vocab_bounds: tuple[int, ...], vocab_dim: int, dtype: torch.dtype
) -> VocabParallelLogits:
    """Create sharded logits from this rank's slice along ``vocab_dim``, and keep its autograd history."""
    if local_logits.requires_grad:
        if torch.is_grad_enabled():
            out: VocabParallelLogits = _WrapLocalLogits.apply(local_logits, axis, vocab_bounds, vocab_dim, dtype)
            return out
        local_logits = local_logits.detach()
    return VocabParallelLogits(local_logits, axis, vocab_bounds, vocab_dim, dtype)


def get_local_shard(logits: VocabParallelLogits) -> Tensor:
    """Return this rank's shard of the logits in its stored dtype, with its autograd history.

    Autograd may copy the wrapper without calling a function of torch (full backward hooks, reentrant checkpointing,
    the sink of DistributedDataParallel). The wrapper then has the history, and the local shard is derived from it.
    """
    if logits._writes_seen != logits._writes[0] and logits._origin is not None:
        base, replay = logits._origin
        _replace_logits_in_place(logits, replay(base.full_tensor()))
    if not logits.local.requires_grad and torch.is_grad_enabled():
        with DisableTorchFunctionSubclass():
            has_history = logits.requires_grad
        if has_history:
            logits.local = _UnwrapLocalLogits.apply(logits)
    return logits.local


def _replace_logits_in_place(logits: VocabParallelLogits, full_logits: Tensor) -> None:
    """Replace the values and the autograd history of ``logits`` with those of ``full_logits``."""
    local = get_local_vocab_slice_like(full_logits, logits)
    with DisableTorchFunctionSubclass():
        _ReplaceLocalLogits.apply(logits, local)
    logits.local, logits._full, logits._writes_seen = local, full_logits, logits._writes[0]


def get_local_vocab_slice_like(full_tensor: Tensor, logits: VocabParallelLogits) -> Tensor:
    """Slice a full tensor to this rank's part of the vocabulary, with the same sharding as ``logits``."""
    return get_local_vocab_slice(full_tensor, logits.axis, logits.bounds, logits.shard_dim)


def get_local_vocab_slice(full_tensor: Tensor, axis: Axis, vocab_bounds: tuple[int, ...], vocab_dim: int) -> Tensor:
    """Slice a full tensor along ``vocab_dim`` to this rank's part of the vocabulary."""
    if isinstance(full_tensor, VocabParallelLogits):
        if full_tensor.shard_dim == vocab_dim:
            return full_tensor.to_local()
        full_tensor = full_tensor.full_tensor()
    return full_tensor.narrow(vocab_dim, vocab_bounds[axis.rank], vocab_bounds[axis.rank + 1] - vocab_bounds[axis.rank])


class _WrapLocalLogits(Function):
    """Autograd function that wraps a local shard as full logits. Its backward pass slices the gradient."""

    @staticmethod
    def forward(
        ctx: Any, local_logits: Tensor, axis: Axis, vocab_bounds: tuple[int, ...], vocab_dim: int, dtype: torch.dtype
    ) -> VocabParallelLogits:
        ctx.place, ctx.dtype = (axis, vocab_bounds, vocab_dim), local_logits.dtype
        return VocabParallelLogits(local_logits, axis, vocab_bounds, vocab_dim, dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None, None]:
        return get_local_vocab_slice(grad_output, *ctx.place).to(ctx.dtype), None, None, None, None


class _UnwrapLocalLogits(Function):
    """Autograd function that returns the local shard of full logits. Its backward pass wraps the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: VocabParallelLogits) -> Tensor:
        ctx.place = (logits.axis, logits.bounds, logits.shard_dim, logits.full_dtype)
        return logits.local.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> VocabParallelLogits:
        return VocabParallelLogits(grad_output, *ctx.place)


class _ReplaceLocalLogits(Function):
    """Autograd function that replaces the values of sharded logits with another local shard."""

    @staticmethod
    def forward(ctx: Any, logits: VocabParallelLogits, local_logits: Tensor) -> VocabParallelLogits:
        ctx.place, ctx.dtype = (logits.axis, logits.bounds, logits.shard_dim), local_logits.dtype
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, Tensor]:
        return None, get_local_vocab_slice(grad_output, *ctx.place).to(ctx.dtype)


def _detach_logits(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    return x.make_view(get_local_shard(x).detach(), x.shard_dim, func)


def _cast_logits(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Cast sharded logits or move them to another device. A cast from 16 bits to fp32 is deferred.

    Returns the same logits if nothing changes.
    """
    x = args[0]
    others = [rules.make_full_shape_placeholder(a) if isinstance(a, VocabParallelLogits) else a for a in args[1:]]
    if not isinstance(x, VocabParallelLogits):  # casts another tensor to the dtype of the logits
        return func(x, *others, **kwargs)
    local = get_local_shard(x)
    target = func(local.new_empty(0, dtype=x.full_dtype), *others, **kwargs)  # lets torch parse the arguments
    if not isinstance(target, Tensor):
        return target  # type() without arguments returns a name
    flags = [a for a in others if isinstance(a, bool)]
    if target.device == local.device and not kwargs.get("copy", len(flags) > 1 and flags[1]):
        if target.dtype == x.full_dtype:
            return x
        was_written = x._writes[0] > 0  # a view of logits that may be written to again
        if target.dtype in (local.dtype, torch.float32) and local.element_size() == 2 and not was_written:
            return x.with_local_shard(local, dtype=target.dtype)
    return x.with_local_shard(func(local, *others, **kwargs), dtype=target.dtype)


def _compute_cross_entropy(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Compute F.cross_entropy of sharded logits and class indices without gathering the logits.

    The classes are in dim 1 as in torch, or in dim 0 for the logits of one token.
    """
    x, target = args[0], args[1] if len(args) == 2 else None
    if (
        not isinstance(x, VocabParallelLogits)
        or not isinstance(target, Tensor)
        or isinstance(target, VocabParallelLogits)
        or x.shard_dim != min(x.local.dim() - 1, 1)
        or target.is_floating_point()
        or target.shape != (*x.full_shape[: x.shard_dim], *x.full_shape[x.shard_dim + 1 :])
        or any(kwargs.get(name) is not None for name in ("weight", "size_average", "reduce"))
    ):
        return rules.call_on_full_tensors(func, args, kwargs)
    local = get_local_shard(x)
    if local.dim() != 2:
        local = local.movedim(x.shard_dim, -1)
        local = local.reshape(-1, local.shape[-1])
    options = {name: kwargs[name] for name in ("ignore_index", "reduction", "label_smoothing") if name in kwargs}
    upcast = x.full_dtype == torch.float32 or torch.is_autocast_enabled(local.device.type)
    loss = vocab_parallel_cross_entropy(local, target.reshape(-1), x.axis, x.bounds, upcast=upcast, **options)
    return loss.view(target.shape) if loss.dim() else loss


def _register_grad_hook(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Register a gradient hook on sharded logits. The hook receives the gradient as sharded logits."""
    x, hook = (*args, *kwargs.values())
    local = get_local_shard(x)
    # the hook must not refer to the logits: they own the graph, which would then never be freed
    layout = x.with_local_shard(local.new_empty([0] * local.dim()))

    def call_hook_on_local_grad(local_grad: Tensor) -> Tensor | None:
        replaced = hook(layout.with_local_shard(local_grad, dtype=local_grad.dtype))
        return None if replaced is None else get_local_vocab_slice_like(replaced, layout)

    return local.register_hook(call_hook_on_local_grad)


def _get_logits_grad(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    grad = get_local_shard(args[0]).grad
    return None if grad is None else args[0].with_local_shard(grad, dtype=grad.dtype)


def _set_logits_grad(func: TorchFunction, args: Args, kwargs: Kwargs) -> None:
    x, grad = args
    get_local_shard(x).grad = None if grad is None else get_local_vocab_slice_like(grad, x)


def _handle_tensor_backward(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Run ``Tensor.backward`` on this rank's shard of the logits and of their gradient."""
    x, gradient = args[0], args[1] if len(args) > 1 else kwargs.get("gradient")
    if gradient is None or not isinstance(x, VocabParallelLogits):
        return rules.call_on_full_tensors(func, args, kwargs)
    return func(
        *_get_local_root_and_grad(x, gradient), *args[2:], **{k: v for k, v in kwargs.items() if k != "gradient"}
    )


def _run_backward_on_local_shards(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Run ``torch.autograd.backward`` on the local shards of any logits that are sharded."""
    tensors, passed, inputs = args[0], kwargs.get("grad_tensors"), kwargs.get("inputs")
    gradients = [passed] if isinstance(passed, Tensor) else passed or [None] * len(tensors)
    roots, gradients = zip(*map(_get_local_root_and_grad, tensors, gradients), strict=True)
    leaves = inputs and [get_local_shard(x) if isinstance(x, VocabParallelLogits) else x for x in inputs]
    return func(roots, **{**kwargs, "grad_tensors": gradients, "inputs": leaves})


def _get_local_root_and_grad(root: Tensor, root_grad: Tensor | None) -> tuple[Tensor, Any]:
    """Return this rank's shards of ``root`` and of its gradient, from which the backward pass starts."""
    if not isinstance(root, VocabParallelLogits) or root_grad is None:
        return rules.to_full_tensors(root), rules.to_full_tensors(root_grad)
    with torch.enable_grad():  # a backward pass may call torch.autograd.backward
        local = get_local_shard(root)
    return local, get_local_vocab_slice_like(root_grad, root).to(local.dtype)


def _handle_autograd_grad(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    outputs, inputs = args[:2]
    locals_ = [get_local_shard(x) if isinstance(x, VocabParallelLogits) else x for x in inputs]
    grads = func(
        rules.to_full_tensors(outputs),
        locals_,
        *rules.to_full_tensors(args[2:]),
        **{key: rules.to_full_tensors(value) for key, value in kwargs.items()},
    )
    return tuple(
        x.with_local_shard(grad, dtype=grad.dtype) if isinstance(x, VocabParallelLogits) and grad is not None else grad
        for x, grad in zip(inputs, grads, strict=True)
    )


_ALIASES = {torch.ops.aten.view.default, torch.ops.aten.alias.default, torch.ops.aten.detach.default}
# methods and attributes of a tensor, and functions of torch and torch.nn.functional
_NAMES: Mapping[Rule, str] = {
    rules.apply_view_function: " ".join(rules.VIEW_RULES),
    rules.apply_to_local_shard_and_rewrap: "clone contiguous",
    _detach_logits: "detach data",
    _cast_logits: "to type type_as cpu cuda float double half bfloat16",
    rules.apply_elementwise: rules.ELEMENTWISE,
    _compute_cross_entropy: "cross_entropy",
    rules.call_on_local_shard: "requires_grad requires_grad_ retain_grad retains_grad is_contiguous is_inference",
    _register_grad_hook: "register_hook",
    _handle_tensor_backward: "backward",
}
_TENSOR: Any = Tensor
LOGITS_RULES: Mapping[Any, Rule] = rules.map_torch_functions_to_rules(_NAMES) | {
    _TENSOR.requires_grad.__set__: rules.call_on_local_shard,
    _TENSOR.grad.__get__: _get_logits_grad,
    _TENSOR.grad.__set__: _set_logits_grad,
    torch.autograd.grad: _handle_autograd_grad,
    torch.autograd.backward: _run_backward_on_local_shards,
}
"""Function of torch -> its implementation on sharded logits. All other functions gather the full logits."""
VocabParallelLogits.RULES = LOGITS_RULES
