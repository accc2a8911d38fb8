"""Parameters whose values are elsewhere: whoever reads one gathers it, or is told."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

UNIT = "_shardformer_unit"
"""The attribute of a parameter that holds its unit."""


class Absent(nn.Parameter):
    """The class of a parameter while its values are elsewhere: whoever reads it gathers its unit, or is told.

    Shape, dtype, device, hooks and ``.grad`` are answered.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _known_of_absent():
            params = [x for x in tree_leaves((args, kwargs)) if isinstance(x, nn.Parameter)]
            units = {unit.index: unit for x in params if (unit := x.__dict__.get(UNIT)) is not None}
            absent = next(x.__dict__[UNIT] for x in params if isinstance(x, Absent))
            absent.on_read(list(units.values()))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        return f"Parameter of {tuple(self.shape)}, whose values are on other ranks until it is used"


@cache
def _known_of_absent() -> frozenset[Any]:
    """The functions of tensors that do not look at their numbers."""
    getters = (
        "shape dtype device requires_grad grad is_leaf layout ndim grad_fn is_cuda is_cpu is_meta is_sparse "
        "is_quantized is_nested itemsize nbytes _version names output_nr retains_grad _backward_hooks "
        "_post_accumulate_grad_hooks"
    )
    methods = (
        "size dim ndimension numel nelement is_floating_point is_complex element_size get_device register_hook "
        "register_post_accumulate_grad_hook requires_grad_ __len__ __hash__ is_inference is_shared"
    )
    functions = "numel is_floating_point is_complex is_inference result_type"
    found = [getattr(torch.Tensor, name).__get__ for name in getters.split() if hasattr(torch.Tensor, name)]
    found += [getattr(torch.Tensor, name).__set__ for name in ("requires_grad", "grad", "_backward_hooks")]
    found += [getattr(torch.Tensor, name) for name in methods.split()]
    return frozenset([*found, *(getattr(torch, name) for name in functions.split())])


@cache
def absent(kind: Any) -> Any:
    """The class of an absent parameter of this class."""
    if issubclass(kind, Absent):
        return kind
    return Absent if kind is nn.Parameter else type(f"Absent{kind.__name__}", (Absent, kind), {})


def present(kind: Any) -> Any:
    """The class of a parameter that is here."""
    if not issubclass(kind, Absent):
        return kind
    return nn.Parameter if kind is Absent else kind.__bases__[1]
