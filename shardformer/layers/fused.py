"""Element-wise chains as one kernel, under forwards that stay as they are: bias, activation, gate, dropout, residual.

    MLP      dense (hands its bias on) -> JitActivation -> [* up]         one kernel before the next matmul
    output   dense (hands its bias on) -> dropout -> + residual           one kernel before the next norm

The linear calls ``start_chain(y, bias)``; what the forward does next with the result is noted and compiled
(``shardformer.layers.fused_chain``). Communicates nothing.
"""

from __future__ import annotations

import importlib.util
import threading
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.layers.fused_chain import extend, finish, is_chainable, notes
from shardformer.layers.fused_kernels import FORMULAS, Op

__all__ = ["JitActivation", "JitDropout", "finish", "jit_problem", "start_chain"]

# by class name: transformers' activations are classes of its own, and some families have their own in turn
OPERATIONS = {
    "NewGELUActivation": Op("gelu_new"),
    "AccurateGELUActivation": Op("gelu_new"),
    "GELUActivation": Op("gelu"),
    "GELUTanh": Op("gelu_tanh"),
    "PytorchGELUTanh": Op("gelu_tanh"),
    "FastGELUActivation": Op("gelu_fast", 0.7978845608),
    "BloomGelu": Op("gelu_fast", 0.79788456),
    "QuickGELUActivation": Op("gelu_quick", 1.702),
    "SiLUActivation": Op("silu"),
    "SiLU": Op("silu"),
    "ReLU": Op("relu"),
    "Tanh": Op("tanh"),
    "Sigmoid": Op("sigmoid"),
    "ReLUSquaredActivation": Op("relu_squared"),
}


def start_chain(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The output of a linear, (..., H), with its bias (H,) still to be added, in the kernel of what comes next.

    Without a bias there is nothing to note yet, but a dropout and a residual may follow.
    """
    if bias is None:
        return extend(x, None) if is_chainable(x) else x
    if not is_chainable(x) or bias.dim() != 1 or bias.shape[0] != x.shape[-1]:
        return x + bias
    return extend(x, Op("bias"), bias)


class JitActivation(nn.Module):
    """An activation whose kernel takes in what stands around it: the bias before, the product with a gate after."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.op = op

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> JitActivation:
        """The activation that computes what ``module`` does: one of torch's or transformers' GELUs, SiLU, ReLU, tanh.

        Raises ConfigError for any other.
        """
        _refuse_options(cls, kwargs)
        op = _operation(module)
        if op is None:
            raise ConfigError(
                f"enable_jit_fused for an activation {type(module).__name__}",
                rule=f"Chains know the activations {', '.join(sorted({*OPERATIONS, 'GELU'}))}",
                remedy="Leave enable_jit_fused off for this model, or this module out of the policy's activations",
            )
        return cls(op).train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        if is_chainable(x) and notes(x, self.op):
            return extend(x, self.op)
        return FORMULAS[self.op.kind](finish(x), None, self.op.value)

    def extra_repr(self) -> str:
        return str(self.op)


class JitDropout(nn.Dropout):
    """Dropout that goes on with a chain; on any other tensor it is nn.Dropout. The random numbers are the same."""

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> JitDropout:
        """Raises ConfigError when ``module`` is not a plain nn.Dropout, or works in place."""
        _refuse_options(cls, kwargs)
        if type(module) not in (nn.Dropout, cls) or getattr(module, "inplace", False):
            raise ConfigError(
                f"enable_jit_fused for a dropout {module}",
                rule="A chain takes in nn.Dropout, not in place",
                remedy="Leave enable_jit_fused off for this model, or this module out of the policy's dropouts",
            )
        assert isinstance(module, nn.Dropout)
        return cls(module.p).train(module.training)


_IMPORTING = threading.Lock()
"""Of torch's inductor: two ranks that are threads would load its settings half."""


def jit_problem(device: torch.device | None = None) -> str | None:
    """Why torch.compile cannot make kernels for ``device`` (by default CUDA where there is one); None when it can.

    Says what is missing and how to get it, as the end of a ConfigError.
    """
    from torch._dynamo.eval_frame import is_dynamo_supported

    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not is_dynamo_supported():
        return "torch.compile does not support this Python or platform"
    if device.type == "cuda":
        return (
            None
            if importlib.util.find_spec("triton")
            else "triton is missing; it comes with torch's CUDA builds for Linux"
        )
    with _IMPORTING:
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "no C++ compiler was found; on Debian: apt install g++, or set the environment variable CXX"
    return None


def _operation(module: nn.Module) -> Op | None:
    if type(module) is nn.GELU:
        return Op("gelu_tanh" if module.approximate == "tanh" else "gelu")
    if getattr(module, "inplace", False):
        return None
    return OPERATIONS.get(type(module).__name__)


def _refuse_options(cls: type[nn.Module], options: dict[str, Any]) -> None:
    if options:
        raise ConfigError(
            f"{cls.__name__} was given {', '.join(f'{k}={v!r}' for k, v in options.items())}",
            rule="It takes everything from the module it stands for",
            remedy="Leave the options out",
        )
