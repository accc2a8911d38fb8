"""A fake accelerator, on which fake tensors check device placement."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardformer.local_ranks.fake_rank import enable_fake_tensors

NAME = "fakegpu"


@functools.cache
def fake_device() -> torch.device:
    """Registers the fake accelerator in this process, once, and returns its first device."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the interface experimental
        _setup_privateuseone_for_python_backend(NAME, _Accelerator(NAME))
    return torch.device(NAME, 0)


class _Accelerator(ModuleType):
    """The module ``torch.fakegpu``: the functions that torch calls for an accelerator."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 8

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _lazy_init(self) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False


class _WithoutNumbers(TorchDispatchMode):
    """Discard the values of tensors that move to the fake device.

    A fake tensor that is made of a few numbers keeps them, and torch computes with them as long as it can: it would
    copy them into memory of the device.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = (kwargs or {}).get("device")
        if device is not None and device.type == NAME:
            args = tuple(_without_numbers(x) for x in args)
        return func(*args, **(kwargs or {}))


def _without_numbers(x: Any) -> Any:
    if isinstance(x, FakeTensor):
        x.constant = None
    return torch.empty_like(x) if type(x) is Tensor else x


@contextmanager
def on_fake_device(device: torch.device) -> Iterator[Callable[[Any], Any]]:
    """Enable fake tensors on ``device``. Yield a function that moves a model or a batch there.

    A model is changed and returned; its parameters become new ones, tied parameters stay tied.
    """
    # One thread: an error in the backward thread of a device would abort the process.
    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # makes the values of torch.tensor fake before they move to the device
    try:
        with torch.autograd.set_multithreading_enabled(False), enable_fake_tensors() as copied, _WithoutNumbers():
            yield partial(_to, device, copied)
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)


def _to(device: torch.device, copied: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, nn.Module):
        return _moved(value, device)
    return tree_map_only(Tensor, lambda x: x.to(device), copied(value))


def _moved(model: nn.Module, device: torch.device) -> nn.Module:
    """Replace ``model.to(device)``, which torch does not support for fake tensors."""
    new: dict[int, nn.Parameter] = {}
    old = [p for p in model.parameters()]  # keeps their ids from being reused
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                if id(param) not in new:
                    new[id(param)] = nn.Parameter(param.detach().to(device), param.requires_grad)
                module._parameters[name] = new[id(param)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    del old
    return model


def misplaced(
    model: nn.Module,
    device: torch.device,
    optimizers: Mapping[str, Optimizer] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the names of tensors of a model, its optimizers and ``others`` that are not on ``device``.

    Args:
        optimizers: their parameters, gradients and states; a number of steps may be on the host, where torch keeps it.
        extra: other tensors by name, in containers of any kind.
    """
    found: dict[str, Tensor] = {f"parameter {name}": p for name, p in model.named_parameters()}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": b for name, b in model.named_buffers()}
    for name, optimizer in (optimizers or {}).items():
        for number, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            found[f"{name}: parameter {number}"] = param
            states = optimizer.state.get(param, {}).items()
            found |= {f"{name}: {key} of {number}": x for key, x in states if isinstance(x, Tensor) and x.dim()}
    for name, value in (extra or {}).items():
        leaves = torch.utils._pytree.tree_leaves(value)
        found |= {f"{name} ({number})": x for number, x in enumerate(leaves) if isinstance(x, Tensor)}
    return [f"{name} on {x.device}" for name, x in found.items() if x.device != device]
