"""``p.grad`` under ZeRO: a tensor with the shape of the parameter that stores only this rank's slice.

Training scripts scale, clamp, perturb and discard gradients between ``backward`` and ``step``. An element-wise function
is applied to this rank's slice, which the step uses. Other functions, such as a norm or an index, need the full
gradient: they work if this rank has it, and raise an error otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from shardformer.errors import ConfigError
from shardformer.gradients.buckets import GradientSlot
from shardformer.torch_compat import (
    disabled_torch_function,
    make_wrapper_subclass,
    schema_of,
    tree_leaves,
    tree_map_only,
)

FOREACH = "_foreach_"
ALSO_EACH = frozenset({"zero_", "fill_", "copy_", "clone", "detach", "alias", "_to_copy", "zero", "copy"})
"""Element-wise functions that torch does not tag as pointwise."""


class Home(Protocol):
    """Storage of the gradients: a ``FlatShard``."""

    @property
    def gradients(self) -> Sequence[GradientSlot]: ...
    @property
    def wide(self) -> torch.dtype: ...
    def numbers_of(self, number: int) -> Tensor: ...
    def is_here(self, number: int) -> bool: ...
    def pick(self, number: int, x: Tensor) -> Tensor: ...
    def edited(self, number: int, what: str) -> None: ...


class ShardedGradient(Tensor):
    """A gradient, or the result of an element-wise function of it.

    Attributes:
        shard: Weak reference to the storage of the gradient. A strong one would be a cycle through the parameter.
        number: Index of the gradient in the shard.
        made: This rank's slice of a computed result. None for the gradient itself.
    """

    shard: ref[Home]
    number: int
    made: Tensor | None

    @staticmethod
    def __new__(cls, shard: Home, number: int, made: Tensor | None = None) -> ShardedGradient:
        param, dtype = shard.gradients[number].param, made.dtype if made is not None else None
        if dtype is None or dtype == shard.wide:
            dtype = param.dtype  # torch requires .grad to have the dtype of the parameter; the sum may be wider
        self: ShardedGradient = make_wrapper_subclass(cls, param.shape, dtype=dtype, device=param.device)
        self.shard, self.number, self.made = ref(shard), number, made
        return self

    def __init__(self, *args: Any) -> None:
        pass

    __torch_function__ = disabled_torch_function  # results keep their class

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        return f"ShardedGradient of shape {tuple(self.shape)}, {self.local.numel()} elements on this rank"

    @property
    def home(self) -> Home:
        if (shard := self.shard()) is None:
            raise ConfigError(
                "The model of this gradient no longer exists",
                remedy="Keep a reference to the optimizer, or clone optimizer.full_gradient(name)",
            )
        return shard

    @property
    def local(self) -> Tensor:
        """This rank's slice, flat."""
        return self.made if self.made is not None else self.home.numbers_of(self.number)

    def is_of(self, shard: Home, number: int) -> bool:
        return self.shard() is shard and self.number == number

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares what it has where there is none
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = schema_of(func).name.partition("::")[2]
        if name.startswith(FOREACH) and _is_each(getattr(torch.ops.aten, name.removeprefix(FOREACH), None)):
            return _of_lists(func, args, kwargs)
        first = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, ShardedGradient))
        if name.endswith("_like"):
            return func(*_replaced(args, _shape_of), **_replaced(kwargs, _shape_of))
        writes = schema_of(func).is_mutable
        if (torch.Tag.pointwise in func.tags or name in ALSO_EACH) and (
            not writes or isinstance(kwargs.get("out", args[0]), ShardedGradient)
        ):
            return _of_each(func, first, args, kwargs, writes=writes)
        if first.home.is_here(first.number) and first.local.device == first.device:
            return func(*_replaced(args, _full), **_replaced(kwargs, _full))
        raise _refused(first, name)


def _is_each(packet: Any) -> bool:
    """Whether a function of torch is element-wise."""
    if packet is None:
        return False
    return packet.__name__ in ALSO_EACH or any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )


def _of_each(func: Any, first: ShardedGradient, args: Any, kwargs: Any, *, writes: bool) -> Any:
    pick = _picking(first, func)
    if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": first.local.device if kwargs["device"] == first.device else kwargs["device"]}
    if func is torch.ops.aten.detach.default and first.made is None:
        return ShardedGradient(first.home, first.number)  # still the gradient itself, not a computed result
    result = func(*_replaced(args, pick), **_replaced(kwargs, pick))
    if writes:
        _note(first, func)
        return kwargs.get("out", args[0])
    return tree_map_only(Tensor, lambda x: ShardedGradient(first.home, first.number, x), result)


def _note(gradient: ShardedGradient, func: Any) -> None:
    if gradient.made is None:
        gradient.home.edited(gradient.number, str(func))


def _picking(first: ShardedGradient, func: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that takes from each operand the slice that this rank has of ``first``."""
    local, home = first.local, first.home

    def pick(x: Tensor) -> Tensor:
        if isinstance(x, ShardedGradient):
            if not x.is_of(home, first.number):
                raise _refused(first, f"{func}, with the gradient of another parameter")
            return x.local
        if x.dim() == 0:
            return x.to(local.device) if x.device != local.device else x
        if torch.broadcast_shapes(x.shape, first.shape) != first.shape:
            raise _refused(first, f"{func}, with a tensor of {tuple(x.shape)}")
        return home.pick(first.number, x.expand(first.shape)).to(local.device)

    return pick


def _of_lists(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a ``_foreach_`` function, which combines the n-th tensors of its lists."""
    lists = [x for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple))]
    firsts = [next((x for x in row if isinstance(x, ShardedGradient)), None) for row in zip(*lists, strict=False)]

    def unwrapped(given: Any) -> Any:
        if not isinstance(given, (list, tuple)):
            return given
        pairs = zip(given, firsts, strict=False)
        return [_picking(f, func)(x) if f is not None and isinstance(x, Tensor) else x for x, f in pairs]

    results = func(*map(unwrapped, args), **{name: unwrapped(x) for name, x in kwargs.items()})
    if schema_of(func).is_mutable or results is None:
        for first in firsts:
            if first is not None:
                _note(first, func)
        return None
    wrap: Callable[[Any, Any], Any] = lambda f, x: x if f is None else ShardedGradient(f.home, f.number, x)  # noqa: E731
    return [wrap(f, x) for f, x in zip(firsts, results, strict=True)]


def _replaced(given: Any, use: Callable[[Any], Any]) -> Any:
    return tree_map_only(Tensor, use, given)


def _full(x: Tensor) -> Tensor:
    return x.local.view(x.shape) if isinstance(x, ShardedGradient) else x


def _shape_of(x: Tensor) -> Tensor:
    """Return a tensor of the same shape, dtype and device without values."""
    return torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape) if isinstance(x, ShardedGradient) else x


def _refused(gradient: ShardedGradient, what: str) -> ConfigError:
    name = gradient.home.gradients[gradient.number].entry.name
    return ConfigError(
        f"{what} cannot be applied to the gradient of {name}, because this rank has only a shard of it",
        rule="Under ZeRO, p.grad supports element-wise functions such as mul_, clamp_ and add_",
        remedy=f"Call optimizer.full_gradient({name!r}) on all ranks, or grad_norm(model) for the norm",
    )
