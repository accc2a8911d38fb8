"""Inputs in fp32 for layers with 16-bit weights.

When parameters are converted to 16 bits, buffers stay in fp32 and can reach a layer (the relative coordinates of Swin
V2, sinusoidal positions), as can a batch in fp32. torch raises an error for operands of different dtypes. Instead, the
input is cast to the dtype of the weight, as autocast does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

RUNNING = "running_mean"
"""The buffer of a norm that keeps statistics. torch takes the weight of such a norm only in their dtype."""
_NARROW = "_shardformer_narrow"
"""The attribute of such a norm with its 16-bit parameters while a forward runs."""


def product_dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype to which the factors of a matrix product are cast; None: they stay as they are."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return weight.dtype if is_wider(x, weight) else None


def is_wider(x: Any, weight: Tensor) -> bool:
    """Whether ``weight`` has 16 bits and ``x`` is a tensor of floats that have more, where autocast casts neither."""
    if not isinstance(x, Tensor) or x.dtype == weight.dtype:
        return False
    floats = x.is_floating_point() and weight.is_floating_point()
    return floats and weight.itemsize == 2 < x.itemsize and not torch.is_autocast_enabled(weight.device.type)


def accept_wide_inputs(model: nn.Module) -> None:
    """Lets the layers of torch.nn with parameters in 16 bits take inputs, and keep statistics, in fp32.

    Layers that run with such inputs as they are, such as ``nn.RMSNorm``, stay as they are; so do modules with a forward
    of their own.
    """
    for module in model.modules():
        if not _is_of_torch(module) or _weight_of(module) is None:
            continue
        if isinstance(module._buffers.get(RUNNING), Tensor):
            if _widen_parameters not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_widen_parameters)
                module.register_forward_hook(_put_back, always_call=True)
        elif _narrow_inputs not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_narrow_inputs, with_kwargs=True)


def _is_of_torch(module: nn.Module) -> bool:
    if isinstance(module, nn.RMSNorm) or "forward" in vars(module):
        return False
    return type(module).forward.__module__.startswith("torch.nn.modules.")


def _weight_of(module: nn.Module) -> Tensor | None:
    """A parameter of the module, or what stands in a stage for one that another stage holds."""
    held = (x for table in (module._parameters, vars(module)) for x in table.values() if isinstance(x, Tensor))
    return next((x for x in held if x.is_floating_point()), None)


def _narrow_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight = _weight_of(module)
    given = [*args, *kwargs.values()]
    if weight is None or not any(is_wider(x, weight) for x in given):
        return None
    narrow = weight.dtype

    def cast(x: Any) -> Any:
        return x.to(narrow) if is_wider(x, weight) else x

    return tuple(map(cast, args)), {name: cast(x) for name, x in kwargs.items()}


def _widen_parameters(module: nn.Module, args: tuple[Any, ...]) -> None:
    """For this forward the weight and the bias have the dtype of the statistics."""
    statistics: Any = module._buffers[RUNNING]
    narrow = {n: p for n, p in module._parameters.items() if p is not None and is_wider(statistics, p)}
    module.__dict__[_NARROW] = narrow
    module._parameters.update(_cast(narrow, statistics.dtype))


def _put_back(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    module._parameters.update(module.__dict__.pop(_NARROW, {}))


def _cast(params: Mapping[str, nn.Parameter], dtype: torch.dtype) -> dict[str, Any]:
    return {name: param.to(dtype) for name, param in params.items()}
