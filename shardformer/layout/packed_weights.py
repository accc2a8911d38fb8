"""Frozen weights in the packed format of a quantizer, such as the 4-bit weights that QLoRA trains with.

A packed weight stores bytes instead of values, and needs other tensors, such as a scale per block. It cannot be cast,
flattened, averaged or sliced like other parameters, and it never changes. A sharded model therefore stores packed
weights as attributes of their modules. They are no longer parameters, so optimizers, ZeRO, checkpoints and state dicts
ignore them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.torch_compat import (
    DisableTorchFunctionSubclass,
    apply_to_tensors,
    is_dtensor,
    is_wrapper_tensor,
    load_own_tensors,
    save_own_tensors,
)

PLAIN_DTYPES = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
)
BITSANDBYTES = "bitsandbytes"
FAST_CPU_KERNEL = "support_avx512bf16_for_cpu"
"""Attribute that makes bitsandbytes repack a weight in evaluation, round its scales, and stop its gradients."""


def find_quantized_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Find the quantized parameters of an unsharded model, by name. Tied parameters have several names."""
    frozen = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad]
    is_quantized = bool(frozen) and has_quantization_config(model)
    return {name: param for name, param in frozen if _is_quantized_param(param, is_quantized)}


def has_quantization_config(model: nn.Module) -> bool:
    """Return whether a transformers model was loaded with a quantization config."""
    quantizers = [getattr(module, "hf_quantizer", None) for module in model.modules()]
    return quantizers.count(None) < len(quantizers)


def _is_quantized_param(param: nn.Parameter, is_quantized_model: bool) -> bool:
    if is_bitsandbytes_object(param):
        return not param.dtype.is_floating_point or bool(getattr(param, "bnb_quantized", False))
    return (is_wrapper_tensor(param) and not is_dtensor(param)) or (
        is_quantized_model and param.dtype not in PLAIN_DTYPES
    )


def is_bitsandbytes_object(instance: object) -> bool:
    """Return whether an object's class is defined in bitsandbytes, without importing bitsandbytes."""
    return type(instance).__module__.partition(".")[0] == BITSANDBYTES


def is_4bit_linear(module: nn.Module) -> bool:
    """Return whether a module is a bitsandbytes linear layer with a packed 4-bit weight."""
    state = getattr(getattr(module, "weight", None), "quant_state", None)
    return isinstance(module, nn.Linear) and is_bitsandbytes_object(module) and len(getattr(state, "shape", ())) == 2


def get_packed_tensors(weight: nn.Parameter) -> list[Tensor]:
    """List the tensors in which a quantized weight stores its bytes and scales."""
    if is_wrapper_tensor(weight):
        wrapper: Any = weight
        names, _ = wrapper.__tensor_flatten__()
        return [getattr(weight, name) for name in names]
    state = getattr(weight, "quant_state", None)
    owners = [weight, *(owner for owner in (state, getattr(state, "state2", None)) if owner is not None)]
    with DisableTorchFunctionSubclass():
        plain = weight.data.as_subclass(Tensor)
    return [plain, *(x for owner in owners for x in vars(owner).values() if type(x) is Tensor and x is not plain)]


def get_unpacked_numel(param: Tensor) -> int:
    """Return the number of elements that a parameter had before quantization. 4-bit weights store two per byte."""
    shape = getattr(getattr(param, "quant_state", None), "shape", None)
    return prod(param.shape if shape is None else shape)


def get_quantized_weights_numel(model: nn.Module) -> int:
    """Count the quantized weight values of the full, unsharded model."""
    return sum(module.num_packed_values for module in iter_quantized_modules(model))


class QuantizedWeightsMixin:
    """Mixin for modules that store quantized weights as plain attributes instead of parameters."""

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name in self.__dict__["packed_names"]:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def _save_to_state_dict(self: Any, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        save_own_tensors(self, destination, prefix, keep_vars)

    def _load_from_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
        load_own_tensors(self, *args, **kwargs)

    def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        apply_to_tensors(self, fn, recurse)
        for name in self.packed_names:
            weight = self.__dict__[name]
            device = fn(torch.empty(0, dtype=torch.uint8, device=weight.device)).device
            if device != weight.device:
                self.__dict__[name] = weight.to(device)
        return self


def unregister_quantized_parameters(model: nn.Module) -> int:
    """Turn quantized parameters into plain module attributes, and return their number."""
    packed = set(map(id, find_quantized_weights(model).values()))
    count = 0
    for module in model.modules():
        if names := [name for name, param in module._parameters.items() if id(param) in packed]:
            store_weights_as_attributes(module, {name: module._parameters[name] for name in names})
            count += len(names)
    return count


def store_weights_as_attributes(module: nn.Module, weights: dict[str, Any], unsharded_numel: int | None = None) -> None:
    """Store packed weights as attributes of a module instead of parameters. Changes the class of the module.

    Args:
        unsharded_numel: number of values of the full weights, if ``weights`` are shards.
    """
    for name in weights:
        module._parameters.pop(name, None)
    count = sum(map(get_unpacked_numel, weights.values())) if unsharded_numel is None else unsharded_numel
    vars(module).update(weights, packed_names=tuple(weights), num_packed_values=count)
    if FAST_CPU_KERNEL in vars(module):
        vars(module)[FAST_CPU_KERNEL] = False
    add_mixin_classes(module, QuantizedWeightsMixin)


def add_mixin_classes(module: nn.Module, *mixin_classes: type) -> None:
    """Add mixins to the class of a module, unless the class has them already."""
    if new := tuple(mixin for mixin in mixin_classes if not isinstance(module, mixin)):
        kind: Any = type(module)
        module.__class__ = _make_mixin_class(new, kind)


@cache
def _make_mixin_class(mixin_classes: tuple[type, ...], base_class: type) -> Any:
    return type(
        base_class.__name__,
        (*mixin_classes, base_class),
        {"__module__": base_class.__module__, "__qualname__": base_class.__qualname__},
    )


def iter_quantized_modules(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, QuantizedWeightsMixin))


def check_quantized_model_has_adapters(model: nn.Module, adapters: object) -> None:
    """Raise ConfigError if a quantized model has no adapters to train."""
    if adapters is None and any(getattr(module, "is_quantized", False) for module in model.modules()):
        check_no_quantized_weights(model, "Training")


def check_no_quantized_weights(model: nn.Module, action_name: str) -> None:
    """Raise ConfigError if a sharded model has quantized weights, because ``action_name`` does not support them."""
    if (module := next(iter_quantized_modules(model), None)) is not None:
        raise ConfigError(
            f"{action_name} does not support the quantized {type(module).__name__} layers of this "
            f"{type(model).__name__}.",
            remedy="Call peft.get_peft_model before shard_model, train only the adapters, and save them with the "
            "save_pretrained method of the PEFT model.",
        )
