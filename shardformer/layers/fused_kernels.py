"""The kernels of chains: element-wise operations as data, run one by one or compiled into one, forward and backward.

Compiled by torch.compile, once for each list of operations, dtypes and inputs that get a gradient, for any N and H.
Only where that pays: on the CPU, torch's own kernels are as fast as compiled ones (measured, forward and backward),
and there is no launch to save, but for activations that a model writes as several operations.
"""

# N tokens (all dims but the last, as one), H hidden

from __future__ import annotations

import functools
import math
import re
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental import _config as symbolic_shapes_config
from torch.utils._python_dispatch import _get_current_dispatch_mode

from shardformer.errors import ConfigError


@dataclass(frozen=True)
class Op:
    """One operation: its kind, a key of ``FORMULAS``, and its constant (the rate of a dropout)."""

    kind: str
    value: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}({self.value})" if self.value else self.kind


Program = tuple[Op, ...]
Formula = Callable[..., Tensor]

# x, the other operand, the constant. Activations have no other operand.
FORMULAS: dict[str, Formula] = {
    "bias": lambda x, bias, _: x + bias.to(x.dtype),
    "add": lambda x, other, _: x + other,
    "mul": lambda x, other, _: x * other,
    "dropout": lambda x, kept, p: x * (kept.to(x.dtype) / (1.0 - p)),
    "relu": lambda x, _, __: F.relu(x),
    "relu_squared": lambda x, _, __: F.relu(x).square(),
    "silu": lambda x, _, __: F.silu(x),
    "tanh": lambda x, _, __: torch.tanh(x),
    "sigmoid": lambda x, _, __: torch.sigmoid(x),
    "gelu": lambda x, _, __: F.gelu(x),
    "gelu_tanh": lambda x, _, __: F.gelu(x, approximate="tanh"),
    "gelu_new": lambda x, _, __: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x))),
    "gelu_fast": lambda x, _, c: 0.5 * x * (1.0 + torch.tanh(x * c * (1.0 + 0.044715 * x * x))),
    "gelu_quick": lambda x, _, c: x * torch.sigmoid(c * x),
}
WITH_OPERAND = ("bias", "add", "mul", "dropout")
LINEAR = ("bias", "add", "dropout")  # their backward does not need what they were applied to
COMPOSITE = ("gelu_new", "gelu_fast", "gelu_quick", "relu_squared")  # several kernels of torch each
FUSES_ALL = ("cuda",)  # devices on which any two operations are faster as one


def saved_inputs(program: Program) -> tuple[bool, ...]:
    """Which inputs backward needs: masks, and all that goes into an operation that is not linear.

    >>> saved_inputs((Op("bias"), Op("dropout", 0.1), Op("add")))    # x, bias, mask, residual
    (False, False, True, False)
    >>> saved_inputs((Op("bias"), Op("gelu")))
    (True, True)
    """
    last = max((i for i, op in enumerate(program) if op.kind not in LINEAR), default=-1)
    operands = [(i, op) for i, op in enumerate(program) if op.kind in WITH_OPERAND]
    return (last >= 0, *(i <= last or op.kind == "dropout" for i, op in operands))


@dataclass(frozen=True)
class Signature:
    """What a kernel is made for: the operations, the dtypes of the inputs, and which of these get a gradient."""

    program: Program
    dtypes: tuple[torch.dtype, ...]
    wanted: tuple[int, ...] = ()

    def __str__(self) -> str:
        return ", ".join(str(op) for op in self.program)

    def forward(self) -> Callable[..., Tensor]:
        """The function of x (N, H), biases (H,) and other operands (N, H) that gives the values (N, H)."""
        steps = [(FORMULAS[op.kind], op.kind in WITH_OPERAND, op.value) for op in self.program]

        def forward(x: Tensor, *operands: Tensor) -> Tensor:
            i = 0
            for formula, with_operand, value in steps:
                x = formula(x, operands[i] if with_operand else None, value)
                i += with_operand
            return x

        return forward

    def backward(self, vjp: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
        """The function of the gradient (N, H) and the saved inputs that gives the gradients of the wanted inputs."""
        forward, wanted = self.forward(), self.wanted
        kinds = ["x", *(op.kind for op in self.program if op.kind in WITH_OPERAND)]
        plan = list(zip(saved_inputs(self.program), (kind == "bias" for kind in kinds), self.dtypes, strict=True))

        def backward(grad_NH: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
            inputs, i = [], 0
            for is_saved, is_bias, dtype in plan:
                if is_saved:
                    inputs.append(saved[i])
                    i += 1
                else:  # the values do not matter, and the compiler leaves them out
                    like = grad_NH[0] if is_bias else grad_NH
                    inputs.append(torch.zeros_like(like, dtype=dtype))

            def of_wanted(*some: Tensor) -> Tensor:
                every = list(inputs)
                for index, t in zip(wanted, some):
                    every[index] = t
                return forward(*every)

            pull = vjp(of_wanted, *[inputs[index] for index in wanted])[1]
            grads: tuple[Tensor, ...] = pull(grad_NH)
            return grads

        return backward


class _Kernel:
    """A function compiled at its first call."""

    def __init__(self, function: Callable[..., Any], signature: Signature) -> None:
        # torch counts and limits recompilations by code object, so each kernel gets its own
        assert isinstance(function, types.FunctionType)
        name = re.sub(r"\W+", "_", f"{function.__name__}_{signature!r}")
        own = types.FunctionType(function.__code__.replace(co_name=name), globals(), name, None, function.__closure__)
        self._compiled: Callable[..., Any] = torch.compile(own, dynamic=True, fullgraph=True)
        self._is_new, self._signature = True, signature

    def __call__(self, *inputs: Tensor) -> Any:
        if not self._is_new:
            return self._compiled(*inputs)
        try:
            # without duck shapes: N may be equal to H in the first batch and not in the second
            with symbolic_shapes_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]  # put there when imported
                outputs = self._compiled(*inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise _cannot_compile(self._signature, error) from error
        self._is_new = False
        return outputs


@functools.cache
def _kernel(signature: Signature, backward: bool, compiles: bool) -> Callable[..., Any]:
    if not compiles:
        return signature.backward(_vjp) if backward else signature.forward()
    return _Kernel(signature.backward(torch.func.vjp) if backward else signature.forward(), signature)


def _vjp(function: Callable[..., Tensor], *primals: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """torch.func.vjp for a single call, without its cost."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in primals]
        out = function(*leaves)
    return out, lambda grad: torch.autograd.grad(out, leaves, grad)


def fuses(program: Program, device: torch.device) -> bool:
    """Whether one kernel of our own is faster than torch's, one for each operation."""
    return any(op.kind in COMPOSITE for op in program) or (device.type in FUSES_ALL and len(program) > 1)


def execute(signature: Signature, backward: bool, inputs: Iterable[Tensor]) -> Any:
    """Runs a kernel on inputs of any leading dims; gradients and autocast play no part in it."""
    tensors = list(inputs)
    shape, device = tensors[0].shape, tensors[0].device
    # detached last: a view would bring its base along, of any number of dims, and with it a recompilation
    tensors = [(t.reshape(-1, shape[-1]) if t.dim() > 1 else t).detach() for t in tensors]
    # torch specialises on sizes of 0 and 1: not worth a kernel of their own
    compiles = tensors[0].dim() == 2 and min(tensors[0].shape) > 1 and fuses(signature.program, device)
    # torch.compile refuses to run under a mode that watches each operation: a FLOP counter, selective checkpointing
    compiles = compiles and _get_current_dispatch_mode() is None  # of this thread
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        outputs: Any = _kernel(signature, backward, compiles)(*tensors)
    if not backward:
        return outputs.reshape(shape)
    return tuple(g if g.dim() < 2 else g.reshape(shape) for g in outputs)


def _cannot_compile(signature: Signature, error: Exception) -> ConfigError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return ConfigError(
        f"enable_jit_fused, and torch.compile failed on the chain {signature}: {lines[0]}",
        rule="A chain is compiled by torch.compile, for the CPU with a C++ compiler, for CUDA with triton",
        remedy="Install what the message names (on Debian: apt install g++), or leave enable_jit_fused off",
    )
