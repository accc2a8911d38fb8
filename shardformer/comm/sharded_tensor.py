"""Base class of tensors that store one shard per rank but behave like the full tensor.

A rule defines what a torch function returns for such a tensor. A view rule receives the arguments of a view function
of the full tensor, and returns

    the sharded dimension of the result, and the arguments that compute the same view of the shard

or None if the result needs the full tensor. Rules do not read values.

>>> convert_reshape_args_to_local((2, 5, 127), 2, (-1, 127), {}, local=64)
(1, ((-1, 64),))
>>> convert_transpose_args_to_local((2, 5, 127), 2, (1, 2), {}, local=64)
(1, (1, 2))
>>> select((2, 5, 127), 2, (2, 0), {}, local=64) is None     # one column
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from numbers import Number
from types import EllipsisType
from typing import Any, ClassVar, NoReturn, Self, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor

from shardformer.errors import InputError
from shardformer.torch_compat import DisableTorchFunctionSubclass, make_wrapper_subclass, tree_map_only

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
TorchFunction = Callable[..., Any]
Rule = Callable[[TorchFunction, Args, Kwargs], Any]
Placed = tuple[int, Args] | None


class ShardedTensor(Tensor):
    """Tensor that has the full tensor's shape but stores only this rank's shard of one dimension.

    Attributes:
        local: the shard.
        shard_dim: the sharded dimension.
        RULES: torch function -> rule. A function without a rule gathers the full tensor and returns a plain tensor.
        TEXT: texts of error messages: the name of the class, the rule, and the remedy.
    """

    RULES: ClassVar[Mapping[Any, Rule]]
    TEXT: ClassVar[tuple[str, str, str]]
    local: Tensor
    shard_dim: int
    full_shape: torch.Size
    full_dtype: torch.dtype
    _full: Tensor | None

    @classmethod
    def _wrap_local_shard(
        cls, local_shard: Tensor, shard_dim: int, full_dim_size: int, dtype: torch.dtype, **kwargs: Any
    ) -> Self:
        shape = torch.Size(full_dim_size if d == shard_dim else n for d, n in enumerate(local_shard.shape))
        self: Self = make_wrapper_subclass(cls, shape, dtype=dtype, device=local_shard.device, **kwargs)
        self.local, self.shard_dim, self._full = local_shard, shard_dim, None
        self.full_shape, self.full_dtype = shape, dtype
        return self

    def __init__(self, *args: Any) -> None:
        """Do nothing, because ``__new__`` has already set all attributes."""

    def to_local(self) -> Tensor:
        """Return this rank's shard with its autograd history. Communicates nothing."""
        return self.local

    def full_tensor(self) -> Tensor:
        """All-gather the shards into the full tensor, with autograd history. Only the first call communicates.

        The subclass's ``_gather_full_tensor`` defines what the backward pass communicates.
        """
        local, full = self.get_stored_shard(), self._full
        needs_grad = torch.is_grad_enabled() and local.requires_grad
        if full is not None and needs_grad <= full.requires_grad:
            if torch.is_inference_mode_enabled() or not full.is_inference():
                return full
        self._full = self._gather_full_tensor(local)
        return self._full

    def _gather_full_tensor(self, local: Tensor) -> Tensor:
        raise AssertionError

    def with_local_shard(self, local: Tensor, dim: int | None = None, dtype: torch.dtype | None = None) -> Self:
        """Wrap another local shard in a tensor with the same sharded dimension and dtype by default."""
        raise AssertionError

    def make_view(self, local: Tensor, dim: int, replay: Callable[[Tensor], Tensor]) -> Self:
        """Wrap the local shard of a view of this tensor."""
        return self.with_local_shard(local, dim)

    def slice_to_local(self, full: Tensor, dim: int) -> Tensor:
        """Return this rank's slice of an unsharded tensor."""
        raise AssertionError

    def has_same_sharding(self, other: Self) -> bool:
        """Return whether ``other`` has the same sharding, so that operations can use local shards."""
        raise AssertionError

    def get_stored_shard(self) -> Tensor:
        """Return the local shard in its stored dtype, without a cast."""
        return self.local

    def are_operand_grads_summed_over_ranks(self) -> bool:
        """Return whether the gradients of replicated operands are summed over the ranks after backward."""
        return False

    def call_inplace_function(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
        """Handle a torch function that modifies this tensor in place."""
        self.raise_unsupported(f"{getattr(func, '__name__', func)} cannot write into {self.TEXT[0]}")

    @classmethod
    def raise_unsupported(cls, message: str) -> NoReturn:
        raise InputError(message, rule=cls.TEXT[1], remedy=cls.TEXT[2])

    @classmethod
    def __torch_function__(cls, func: TorchFunction, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        rule = cls.RULES.get(func, call_on_full_tensors) if args else call_on_full_tensors
        return rule(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub takes func for self
        cls, func: TorchFunction, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Raise an error for calls from autograd and C++ code, which bypass ``__torch_function__``."""
        cls.raise_unsupported(f"{func} does not support {cls.TEXT[0]}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # mypy drops the keyword's name
        return (
            f"{type(self).__name__}(shape={tuple(self.full_shape)}, dtype={self.full_dtype}, {self._describe_shard()}, "
            "values by .full_tensor() on all ranks)"
        )

    def _describe_shard(self) -> str:
        raise AssertionError

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.raise_unsupported(f"copy.deepcopy does not support {self.TEXT[0]}")

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        self.raise_unsupported(f"copy and pickle do not support {self.TEXT[0]}")


def to_full_tensors(tree: Any) -> Any:
    """Replace every ``ShardedTensor`` in a nested value by its full tensor."""
    return tree_map_only(ShardedTensor, lambda x: x.full_tensor(), tree)


def call_on_full_tensors(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """All-gather the full tensors, and call a torch function with them."""
    first, name = args[0] if args else None, getattr(func, "__name__", "")
    if isinstance(first, ShardedTensor) and (name in _RECEIVES or is_inplace_call(func, kwargs)):
        return first.call_inplace_function(func, args, kwargs)
    target = first if name in ("__set__", "__delete__") else kwargs.get("out")
    if isinstance(target, ShardedTensor):
        target.raise_unsupported(f"Attributes and out= cannot be set on {target.TEXT[0]}")
    args, kwargs = to_full_tensors((args, dict(kwargs)))
    return func(*args, **kwargs)


_RECEIVES = {"all_reduce", "broadcast", "reduce", "recv", "irecv"}
"""Functions of torch.distributed that write into their first argument."""


def is_inplace_call(func: TorchFunction, kwargs: Kwargs) -> bool:
    """Return whether a torch call modifies its first argument, such as ``x.add_(1)`` or ``x[i] = y``."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and hasattr(Tensor, name.replace("__i", "__", 1)))
    return kwargs.get("inplace") is True or (name.endswith("_") and name != "requires_grad_")


def call_on_wrapper_without_gathering(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Read tensor metadata, such as the shape or the dtype, without an all-gather."""
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def make_full_shape_placeholder(sharded_tensor: ShardedTensor) -> Tensor:
    """Create an expanded scalar with the shape, dtype and device of the full tensor, to save memory."""
    return sharded_tensor.local.new_empty((), dtype=sharded_tensor.full_dtype).expand(sharded_tensor.full_shape)


def _call_factory_on_placeholder(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    return func(
        make_full_shape_placeholder(x) if isinstance(x, ShardedTensor) else x,
        *to_full_tensors(args[1:]),
        **to_full_tensors(kwargs),
    )


def apply_elementwise(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Apply an element-wise torch function to the local shards if possible, otherwise to the full tensors."""
    sharded = [a for a in (*args, *kwargs.values()) if isinstance(a, ShardedTensor)]
    if not sharded or is_inplace_call(func, kwargs) or "out" in kwargs:
        return call_on_full_tensors(func, args, kwargs)
    x = max(sharded, key=lambda a: len(a.full_shape))
    operands = [_get_local_operand(a, x) for a in (*args, *kwargs.values())]
    if any(a is NotImplemented for a in operands):
        return call_on_full_tensors(func, args, kwargs)
    local = func(*operands[: len(args)], **dict(zip(kwargs, operands[len(args) :], strict=True)))
    if not isinstance(local, Tensor):
        return local
    return x.with_local_shard(local, x.shard_dim - len(x.full_shape) + local.dim(), local.dtype)


def _get_local_operand(operand: Any, sharded_tensor: ShardedTensor) -> Any:
    """Return this rank's slice of an operand, or NotImplemented if the call needs the full tensors."""
    if not isinstance(operand, Tensor):
        known = operand is None or isinstance(operand, Number | str | torch.dtype | torch.device | torch.memory_format)
        return operand if known else NotImplemented
    if isinstance(operand, ShardedTensor):
        return (
            operand.to_local()
            if type(operand) is type(sharded_tensor) and sharded_tensor.has_same_sharding(operand)
            else NotImplemented
        )
    if operand.requires_grad and torch.is_grad_enabled() and not sharded_tensor.are_operand_grads_summed_over_ranks():
        return NotImplemented  # each rank would only add its own share of the gradient
    back = sharded_tensor.shard_dim - len(sharded_tensor.full_shape)
    if operand.dim() < -back or operand.shape[back] == 1:
        return operand
    return (
        sharded_tensor.slice_to_local(operand, back)
        if operand.shape[back] == sharded_tensor.full_shape[back]
        else NotImplemented
    )


def apply_view_function(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Apply a view function such as ``transpose`` to the local shard if possible, otherwise to the full tensor."""
    x, *rest = args
    if not isinstance(x, ShardedTensor):
        return call_on_full_tensors(func, args, kwargs)
    if func.__name__ in _DIMS_ONLY:
        rest, kwargs = [*rest, *kwargs.values()], {}
    local = x.get_stored_shard()
    place = VIEW_RULES[func.__name__](x.full_shape, x.shard_dim, tuple(rest), kwargs, local=local.shape[x.shard_dim])
    if place is None:
        return call_on_full_tensors(func, args, kwargs)
    dim, local_args = place
    try:
        result = func(local, *local_args, **kwargs)
    except (RuntimeError, IndexError):
        return call_on_full_tensors(func, args, kwargs)  # raises the same error with the full sizes
    if isinstance(result, Tensor):
        return x.make_view(result, dim % result.dim(), lambda full: func(full, *rest, **kwargs))

    def replay_view(full_tensor: Tensor, number: int) -> Tensor:
        part: Tensor = func(full_tensor, *rest, **kwargs)[number]
        return part

    return type(result)(x.make_view(part, dim, partial(replay_view, number=i)) for i, part in enumerate(result))


def apply_to_local_shard_and_rewrap(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Apply ``clone`` or a similar function to the local shard, and wrap the result like the input."""
    before = args[0].get_stored_shard()
    local = func(before, *args[1:], **kwargs)
    return args[0] if local is before else args[0].with_local_shard(local)


def call_on_local_shard(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Call ``requires_grad_``, ``is_contiguous`` or a similar method on the local shard."""
    result = func(args[0].get_stored_shard(), *args[1:], **kwargs)
    return args[0] if isinstance(result, Tensor) else result


def convert_reshape_args_to_local(
    full_shape: Sequence[int], sharded_dim: int, args: Args, kwargs: Kwargs, *, local: int
) -> Placed:
    """Convert the arguments of ``view`` or ``reshape`` for the local shard, or return None if impossible."""
    sizes = _unpack_sizes(args)
    if kwargs or not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    if sharded_dim != len(full_shape) - 1:
        return (sharded_dim, (_replace_size(full_shape, sharded_dim, local),)) if sizes == tuple(full_shape) else None
    is_last = sizes[-1] == full_shape[sharded_dim] or (sizes[-1] == -1 and prod(sizes[:-1]) == prod(full_shape[:-1]))
    return (len(sizes) - 1, ((*sizes[:-1], local),)) if is_last else None


def convert_expand_args_to_local(
    full_shape: Sequence[int], sharded_dim: int, args: Args, kwargs: Kwargs, *, local: int
) -> Placed:
    sizes = _unpack_sizes(args)
    after = sharded_dim + len(sizes) - len(full_shape)
    if kwargs or after < 0 or sizes[after] not in (-1, full_shape[sharded_dim]):
        return None
    return after, (_replace_size(sizes, after, -1),)


def convert_flatten_args_to_local(
    full_shape: Sequence[int], sharded_dim: int, args: Args, kwargs: Kwargs, *, local: int
) -> Placed:
    start = _get_positional_or_keyword_arg(args, kwargs, 0, "start_dim", 0) % len(full_shape)
    end = _get_positional_or_keyword_arg(args, kwargs, 1, "end_dim", -1) % len(full_shape)
    if start <= sharded_dim <= end and start != end:
        return None
    return sharded_dim - (end - start if sharded_dim > end else 0), args


def convert_unflatten_args_to_local(
    full_shape: Sequence[int], sharded_dim: int, args: Args, kwargs: Kwargs, *, local: int
) -> Placed:
    dim = _get_positional_or_keyword_arg(args, kwargs, 0, "dim", 0) % len(full_shape)
    sizes = args[1] if len(args) > 1 else kwargs["sizes"]
    return None if dim == sharded_dim else (sharded_dim + (len(sizes) - 1 if dim < sharded_dim else 0), args)


def convert_squeeze_args_to_local(
    full_shape: Sequence[int], sharded_dim: int, args: Args, kwargs: Kwargs, *, local: int
) -> Placed:
    """Convert the arguments of ``squeeze`` so that it keeps a sharded dimension of local length 1."""
    named = args[0] if args else kwargs.get("dim", range(len(full_shape)))
    dims = {dim % len(full_shape) for dim in ([named] if isinstance(named, int) else named)}
    gone = tuple(sorted(dim for dim in dims if full_shape[dim] == 1))
    if sharded_dim in gone:
        return None
    return sharded_dim - sum(dim < sharded_dim for dim in gone), (gone,)


def convert_unsqueeze_args_to_local(
    full_shape: Sequence[int], sharded_dim: int, args: Args, kwargs: Kwargs, *, local: int
) -> Placed:
    return sharded_dim + (
        _get_positional_or_keyword_arg(args, kwargs, 0, "dim", 0) % (len(full_shape) + 1) <= sharded_dim
    ), args


def convert_transpose_args_to_local(
    full_shape: Sequence[int], sharded_dim: int, args: Args, kwargs: Kwargs, *, local: int
) -> Placed:
    a, b = (dim % len(full_shape) for dim in args)
    return {a: b, b: a}.get(sharded_dim, sharded_dim), args


def convert_permute_args_to_local(
    full_shape: Sequence[int], sharded_dim: int, args: Args, kwargs: Kwargs, *, local: int
) -> Placed:
    return ([dim % len(full_shape) for dim in _unpack_sizes(args)].index(sharded_dim), args)


def _make_dim_args_converter(arg_position: int, default_dim: int, drop_dim: bool = False) -> Callable[..., Placed]:
    """Create a function that converts the arguments of ``select``, ``narrow`` or ``split`` for the local shard."""

    def convert_dim_args(shape: Sequence[int], sharded_dim: int, args: Args, kwargs: Kwargs, *, local: int) -> Placed:
        dim = _get_positional_or_keyword_arg(args, kwargs, arg_position, "dim", default_dim)
        if not isinstance(dim, int) or dim % len(shape) == sharded_dim:
            return None
        return sharded_dim - (drop_dim and dim % len(shape) < sharded_dim), args

    return convert_dim_args


select = _make_dim_args_converter(0, 0, drop_dim=True)
unbind = _make_dim_args_converter(0, 0, drop_dim=True)
narrow = _make_dim_args_converter(0, 0)
split = _make_dim_args_converter(1, 0)


def convert_index_args_to_local(
    full_shape: Sequence[int], sharded_dim: int, args: Args, kwargs: Kwargs, *, local: int
) -> Placed:
    """Convert an index for the local shard, or return None if it selects part of the sharded dimension."""
    keys: Args = args[0] if isinstance(args[0], tuple) else args
    used = [_count_indexed_dims(key) for key in keys]
    if any(count is None for count in used):
        return None
    rest = len(full_shape) - sum(count or 0 for count in used)
    before = after = 0  # dims of the full tensor passed so far, and dims that they became
    where = -1
    for key in keys if any(key is Ellipsis for key in keys) else (*keys, Ellipsis):
        taken = rest if key is Ellipsis else _count_indexed_dims(key) or 0
        if before <= sharded_dim < before + taken:
            if key is not Ellipsis and not (
                isinstance(key, slice) and key.indices(full_shape[sharded_dim]) == (0, full_shape[sharded_dim], 1)
            ):
                return None
            where = after + sharded_dim - before
        before += taken
        after += taken if key is Ellipsis else isinstance(key, slice) or key is None
    if any(isinstance(key, Tensor) for key in keys):
        # Dimensions of index tensors go to their position or to the front, never after a last sharded dimension.
        return (-1, args) if sharded_dim == len(full_shape) - 1 else None
    return where, args


def _count_indexed_dims(index_item: Any) -> int | None:
    if index_item is None or isinstance(index_item, EllipsisType):
        return 0
    if isinstance(index_item, slice) or (isinstance(index_item, int) and not isinstance(index_item, bool)):
        return 1
    if isinstance(index_item, Tensor):
        return index_item.dim() if index_item.dtype in (torch.bool, torch.uint8) else 1
    return None


def _unpack_sizes(args: Args) -> tuple[Any, ...]:
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], tuple | list) else args


def _get_positional_or_keyword_arg(args: Args, kwargs: Kwargs, arg_position: int, arg_name: str, default: int) -> Any:
    return args[arg_position] if len(args) > arg_position else kwargs.get(arg_name, default)


def _replace_size(sizes: Sequence[int], dim: int, new_size: int) -> tuple[int, ...]:
    return tuple(new_size if d == dim else n for d, n in enumerate(sizes))


VIEW_RULES: Mapping[str, Callable[..., Placed]] = {
    "view": convert_reshape_args_to_local,
    "reshape": convert_reshape_args_to_local,
    "expand": convert_expand_args_to_local,
    "flatten": convert_flatten_args_to_local,
    "unflatten": convert_unflatten_args_to_local,
    "squeeze": convert_squeeze_args_to_local,
    "unsqueeze": convert_unsqueeze_args_to_local,
    "transpose": convert_transpose_args_to_local,
    "swapaxes": convert_transpose_args_to_local,
    "swapdims": convert_transpose_args_to_local,
    "permute": convert_permute_args_to_local,
    "select": select,
    "unbind": unbind,
    "narrow": narrow,
    "index_select": narrow,
    "split": split,
    "chunk": split,
    "__getitem__": convert_index_args_to_local,
}
"""Rules of the view functions that can keep a dimension sharded."""
_DIMS_ONLY = ("squeeze", "transpose", "swapaxes", "swapdims", "permute")
"""Functions with only dimensions as arguments, in any order."""
_METADATA = """
    shape size dim ndim ndimension numel nelement __len__ dtype element_size itemsize nbytes is_floating_point
    is_complex is_signed device get_device is_cuda is_cpu is_meta layout is_sparse is_leaf grad_fn __hash__
    """
ELEMENTWISE = """
    add sub subtract rsub mul multiply div divide true_divide pow neg negative abs clamp clamp_min clamp_max exp tanh
    sigmoid relu softplus masked_fill where __pow__ __rpow__ __rsub__ __rdiv__
    """
_SHARED: Mapping[Rule, str] = {
    call_on_wrapper_without_gathering: _METADATA,
    _call_factory_on_placeholder: """
        new_empty new_zeros new_ones new_full new_tensor empty_like zeros_like ones_like full_like rand_like randn_like
        """,
}


def iter_torch_functions(space_separated_names: str) -> Iterator[Any]:
    """Yield the functions with these names in torch.Tensor, torch and torch.nn.functional."""
    for name in space_separated_names.split():
        for home in (Tensor, torch, F):
            function: Any = getattr(home, name, None)
            if hasattr(function, "__set__"):  # an attribute of a tensor, which torch names by its getter
                yield function.__get__
            elif callable(function) and not isinstance(function, type):
                yield function


def map_torch_functions_to_rules(function_names_by_rule: Mapping[Rule, str]) -> dict[Any, Rule]:
    """Map each torch function to the rule for applying it to shards."""
    return {
        function: rule
        for rule, text in {**_SHARED, **function_names_by_rule}.items()
        for function in iter_torch_functions(text)
    }


METADATA = frozenset(iter_torch_functions(_METADATA))
"""Attributes of a wrapper that can be read without its values."""
