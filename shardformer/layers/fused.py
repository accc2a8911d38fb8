"""Bias, activation and gate of an MLP in one kernel, under forwards that stay as they are. Communicates nothing.

y = dense(x)        Fused: y without its bias
h = act(y)          Fused: act(y + bias)
h * gate            one kernel, as for act(y + bias) alone where anything else needs its values
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from shardformer.layers.tensor.pending import PendingTensor, resolved

TANH = functools.partial(F.gelu, approximate="tanh")


def compute(act: Callable[[Tensor], Tensor] | None, x: Tensor, bias: Tensor | None, gate: Tensor | None) -> Tensor:
    """act(x + bias) * gate, of x and gate (..., H) and bias (H,)."""
    x = x if bias is None else x + bias
    x = x if act is None else act(x)
    return x if gate is None else x * gate


@functools.cache
def kernel(device: str) -> Callable[..., Tensor]:
    """``compute`` as one kernel; on a CPU torch's own, one after the other, are as fast."""
    return compute if device == "cpu" else torch.compile(compute, dynamic=True)


class _LaterBias(Function):
    """x as it is, with the gradients of x + bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.reshape(-1, grad.shape[-1]).sum(0)


class Fused(PendingTensor):
    """act(x + bias), computed when something needs the values, unless an activation or a gate follows at once."""

    terms: tuple[Any, Tensor, Tensor | None]
    out: Tensor | None

    @classmethod
    def of(cls, act: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        formula = functools.partial(compute, act, bias=bias, gate=None)
        # the gradient, where a function of autograd was given this tensor itself
        pull = lambda grad: torch.func.vjp(formula, x.detach())[1](grad)[0]  # noqa: E731
        made = cls.make(x, tuple(x.shape), None, None, formula, pull)
        made.terms, made.out = (act, x, bias), None
        return made

    def value(self) -> Tensor:
        if self._is_watched:
            return super().value()
        if self.out is None:
            function = compute if self.terms[0] is None else kernel(self.device.type)
            with torch.enable_grad():
                self.out = function(*self.terms, None)
        return self.out if torch.is_grad_enabled() else self.out.detach()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        mine, options = [a for a in args if isinstance(a, Fused)], kwargs or {}
        x = max(mine, key=lambda x: x.terms[0] is not None, default=None)
        if x is not None and x.out is None and not x._is_watched:
            act, y, bias = x.terms
            if act is None and func in (F.gelu, F.silu, F.relu, torch.tanh) and not options.get("inplace"):
                return cls.of(TANH if options.get("approximate") == "tanh" else func, y, bias)
            if act is not None and func is Tensor.mul:
                gate = resolved(args[1] if args[0] is x else args[0])
                if isinstance(gate, Tensor) and gate.shape == y.shape:
                    return kernel(y.device.type)(act, y, bias, gate)
        return super().__torch_function__(func, types, args, kwargs)


def start(x: Tensor, bias: Tensor | None) -> Tensor:
    """The output x of a linear and the bias that is still to be added, for the kernel of what follows."""
    bias = None if bias is None else bias.to(x.dtype)
    return Fused.of(None, x if bias is None else _LaterBias.apply(x, bias), None if bias is None else bias.detach())
