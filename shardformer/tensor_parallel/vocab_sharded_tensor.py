"""A tensor of which each rank holds some columns: how it is placed, gathered and seen by autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch.autograd import Function

from shardformer.comm.autograd_collectives import gather_from_region
from shardformer.errors import InputError
from shardformer.layout.shard_spec import Split
from shardformer.mesh.parallel_context import Axis

# B batch, S sequence, V vocabulary; lower case: this rank's part (v columns of V)

ViewReplay = Callable[[Tensor], Tensor]
"""Takes from a full tensor the view that was taken of a sharded one."""


def metadata_of_wrapper(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Shape, dtype, device and the like, which a wrapper that torch made knows."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


class VocabShardedTensor(Tensor):
    """Base of ``VocabParallelLogits``, which says what functions of torch do with it.

    A wrapper with the full shape around the local part. Autograd's history is the local part's; the wrapper stands
    behind it as the output of ``_Shard``, so that code which autograd calls with the whole gets gradients right too.

    A view remembers what it was taken of (``_origin``), and all views of one tensor count together how often one of
    them was written into (``_writes``): a write goes through to the origin, and who has not seen it looks there again.
    """

    _local: Tensor
    _full: Tensor | None
    _origin: tuple[VocabShardedTensor, ViewReplay] | None
    _writes: list[int]
    _writes_seen: int
    axis: Axis
    bounds: tuple[int, ...]
    vocab_dim: int
    full_shape: torch.Size
    full_dtype: torch.dtype

    @staticmethod
    def __new__(
        cls: type[Self], local: Tensor, axis: Axis, bounds: tuple[int, ...], vocab_dim: int, dtype: torch.dtype
    ) -> Self:
        shape = [bounds[-1] if dim == vocab_dim else size for dim, size in enumerate(local.shape)]
        make: Callable[..., Self] = torch.Tensor._make_wrapper_subclass
        self = make(cls, shape, dtype=dtype, device=local.device)
        self._local, self._full, self._origin = local, None, None
        self._writes, self._writes_seen = [0], 0
        self.axis, self.bounds, self.vocab_dim = axis, bounds, vocab_dim
        self.full_shape, self.full_dtype = torch.Size(shape), dtype
        return self

    def __init__(self, *args: Any) -> None:
        """Everything is done by ``__new__``."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub takes func for self
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What gets here was not called by name: autograd itself, or code written in C++."""
        if func in _ALIASES and (len(args) == 1 or tuple(args[1]) == args[0].full_shape):
            return wrap_like(args[0], args[0]._local.detach())
        if func is torch.ops.aten.add.Tensor and len(args) == 2:  # autograd sums two gradients
            x = next(a for a in args if isinstance(a, VocabShardedTensor))
            return wrap_like(x, local_slice_like(args[0], x) + local_slice_like(args[1], x))
        unsupported_vocab_op(f"{func} was called on vocabulary-parallel logits")

    def to_local(self) -> Tensor:
        """This rank's part, (..., v) in the dtype of the logits, with its gradient. Communicates nothing."""
        return local_shard(self).to(self.full_dtype)

    def full_tensor(self) -> Tensor:
        """The full logits as a plain tensor, the same on all ranks, with their gradient.

        Communicates one all-gather of the full logits the first time, in the dtype that they are held in; backward
        nothing.
        """
        local, full = local_shard(self), self._full
        needs_grad = torch.is_grad_enabled() and local.requires_grad
        if full is not None and needs_grad <= full.requires_grad:
            if torch.is_inference_mode_enabled() or not full.is_inference():
                return full
        split = Split(tuple(((a, b),) for a, b in pairwise(self.bounds)), (self.axis.name,))
        self._full = gather_from_region(local, self.axis, self.vocab_dim, split, "gather").to(self.full_dtype)
        return self._full

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # mypy drops the keyword's name in a dunder
        first, last = self.bounds[self.axis.rank], self.bounds[self.axis.rank + 1]
        return (
            f"{type(self).__name__}(shape={tuple(self.full_shape)}, dtype={self.full_dtype}, "
            f"vocabulary {first}:{last} held by {self.axis}, values by .full_tensor() on all ranks)"
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        unsupported_vocab_op("Vocabulary-parallel logits were to be copied with copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        unsupported_vocab_op("Vocabulary-parallel logits were to be copied or pickled")


def unsupported_vocab_op(what: str) -> NoReturn:
    raise InputError(
        what,
        rule="Each rank holds a slice of their vocabulary, and only functions of torch that are called by name know it",
        remedy="Call logits.full_tensor() on all ranks for a plain tensor, or logits.to_local() for this rank's slice",
    )


def wrap_local(
    kind: type[VocabShardedTensor], local: Tensor, axis: Axis, bounds: tuple[int, ...], dim: int, dtype: torch.dtype
) -> VocabShardedTensor:
    """``local`` as the full tensor of which it is this rank's slice of ``dim``, with gradient history if it has one."""
    if local.requires_grad:
        if torch.is_grad_enabled():
            out: VocabShardedTensor = _Shard.apply(kind, local, axis, bounds, dim, dtype)
            return out
        local = local.detach()
    return kind(local, axis, bounds, dim, dtype)


def wrap_like(
    x: VocabShardedTensor, local: Tensor, dim: int | None = None, dtype: torch.dtype | None = None
) -> VocabShardedTensor:
    """``local`` placed as ``x`` is, where not said otherwise. A cast that waits goes on waiting."""
    return wrap_local(type(x), local, x.axis, x.bounds, x.vocab_dim if dim is None else dim, dtype or x.full_dtype)


def local_shard(x: VocabShardedTensor) -> Tensor:
    """The local part, in the dtype that it is held in, with its gradient history.

    Autograd may hand the whole on without calling any function by name (a full backward hook, reentrant checkpointing,
    DistributedDataParallel's sink): then the history is the whole's, and the part is taken from it.
    """
    if x._writes_seen != x._writes[0] and x._origin is not None:
        base, replay = x._origin
        _rewrite(x, replay(base.full_tensor()))
    if not x._local.requires_grad and torch.is_grad_enabled():
        with torch._C.DisableTorchFunctionSubclass():
            has_history = x.requires_grad
        if has_history:
            x._local = _Unshard.apply(x)
    return x._local


def make_view(x: VocabShardedTensor, local: Tensor, dim: int, replay: ViewReplay) -> VocabShardedTensor:
    """A view of ``x`` with the given part; ``replay`` takes the same view of the full tensor."""
    out = wrap_like(x, local, dim)
    out._origin, out._writes, out._writes_seen = (x, replay), x._writes, x._writes_seen
    return out


def write_full(x: VocabShardedTensor, how: Callable[[Tensor], Any]) -> tuple[Tensor, Any]:
    """Writes into the full tensor, and into what ``x`` is a view of. The full tensor, and what ``how`` gave.

    Communicates one all-gather of what ``x`` is a view of, unless it was gathered before.
    """
    chain = [x]
    while chain[-1]._origin is not None:
        chain.append(chain[-1]._origin[0])
    fulls = [chain[-1].full_tensor()]
    for view in reversed(chain[:-1]):
        assert view._origin is not None
        fulls.append(view._origin[1](fulls[-1]))
    full = fulls[-1]
    result = how(full)
    if (full.shape, full.dtype) != (x.full_shape, x.full_dtype):
        unsupported_vocab_op("The shape of vocabulary-parallel logits was to be changed in place")
    x._writes[0] += 1
    for view, written in zip(reversed(chain), fulls, strict=True):
        _rewrite(view, written)
    return full, result


def _rewrite(x: VocabShardedTensor, full: Tensor) -> None:
    """Makes ``full`` the values and the history of ``x``."""
    local = local_slice_like(full, x)
    with torch._C.DisableTorchFunctionSubclass():
        _Rewrite.apply(x, local)
    x._local, x._full, x._writes_seen = local, full, x._writes[0]


def local_slice_like(full: Tensor, x: VocabShardedTensor) -> Tensor:
    """This rank's slice of a tensor that is shaped as ``x``."""
    return local_slice(full, x.axis, x.bounds, x.vocab_dim)


def local_slice(full: Tensor, axis: Axis, bounds: tuple[int, ...], dim: int) -> Tensor:
    """This rank's slice of a full tensor, along ``dim``."""
    if isinstance(full, VocabShardedTensor):
        if full.vocab_dim == dim:
            return full.to_local()
        full = full.full_tensor()
    return full.narrow(dim, bounds[axis.rank], bounds[axis.rank + 1] - bounds[axis.rank])


class _Shard(Function):
    """The part as the whole. Backward: the own slice of the whole's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: type[VocabShardedTensor],
        local: Tensor,
        axis: Axis,
        bounds: tuple[int, ...],
        dim: int,
        dtype: torch.dtype,
    ) -> VocabShardedTensor:
        ctx.place, ctx.dtype = (axis, bounds, dim), local.dtype
        return kind(local, axis, bounds, dim, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None, None, None]:
        return None, local_slice(grad, *ctx.place).to(ctx.dtype), None, None, None, None


class _Unshard(Function):
    """The part of a whole that has a history of its own. Backward: the part's gradient as the whole's."""

    @staticmethod
    def forward(ctx: Any, x: VocabShardedTensor) -> Tensor:
        ctx.place = (type(x), x.axis, x.bounds, x.vocab_dim, x.full_dtype)
        return x._local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> VocabShardedTensor:
        kind, *where = ctx.place
        out: VocabShardedTensor = kind(grad, *where)
        return out


class _Rewrite(Function):
    """A whole whose values are from now on those of another part."""

    @staticmethod
    def forward(ctx: Any, x: VocabShardedTensor, local: Tensor) -> VocabShardedTensor:
        ctx.place, ctx.dtype = (x.axis, x.bounds, x.vocab_dim), local.dtype
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, local_slice(grad, *ctx.place).to(ctx.dtype)


_ALIASES = {torch.ops.aten.view.default, torch.ops.aten.alias.default, torch.ops.aten.detach.default}
