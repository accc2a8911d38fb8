"""A chain: element-wise operations that are noted as the model's own forward calls them, and run as one kernel.

    y = dense(x)            a linear that hands its bias on: Chain of y, [bias]
    h = act(y)              [bias, gelu_tanh]
    z = proj(h)             anything that is not element-wise needs the values: both operations run, as one kernel

A Chain is a tensor whose values are computed when something needs them, while shape, dtype and place in the graph of
autograd are there from the start: each operation that is noted makes one node, from the tensors the chain began with.
So nothing that is done with a chain can lose a gradient; what is not noted here just gets the values.

Forward and backward are compiled by torch.compile, once for each list of operations and dtype, for any batch. Dropout
draws its mask when it is called, as the plain model would; sums with a residual end a chain.
"""

# N tokens (all dims but the last, as one), H hidden

from __future__ import annotations

import functools
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.fx.experimental import _config as symbolic_shapes_config
from torch.utils._pytree import tree_map_only

from shardformer.errors import ConfigError, ShardFormerError


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
    "gelu": lambda x, _, __: F.gelu(x),
    "gelu_tanh": lambda x, _, __: F.gelu(x, approximate="tanh"),
    "gelu_new": lambda x, _, __: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x))),
    "gelu_fast": lambda x, _, c: 0.5 * x * (1.0 + torch.tanh(x * c * (1.0 + 0.044715 * x * x))),
    "gelu_quick": lambda x, _, c: x * torch.sigmoid(c * x),
}
WITH_OPERAND = ("bias", "add", "mul", "dropout")
LINEAR = ("bias", "add", "dropout")  # their backward does not need what they were applied to
ONE_KERNEL = ("bias", "add", "mul", "relu", "silu", "gelu", "gelu_tanh")  # of torch itself, so alone they stay


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


# -- compiled kernels -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signature:
    """What a kernel is made for: the operations, the dtypes of the inputs, and which of these get a gradient."""

    program: Program
    dtypes: tuple[torch.dtype, ...]
    wanted: tuple[int, ...] = ()

    def is_worth_compiling(self) -> bool:
        return len(self.program) > 1 or any(op.kind not in ONE_KERNEL for op in self.program)

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

    def backward(self) -> Callable[..., tuple[Tensor, ...]]:
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

            pull = torch.func.vjp(of_wanted, *[inputs[index] for index in wanted])[1]
            grads: tuple[Tensor, ...] = pull(grad_NH)
            return grads

        return backward


@functools.cache
def _kernel(signature: Signature, backward: bool, compiles: bool) -> Callable[..., Any]:
    plain = signature.backward() if backward else signature.forward()
    if not compiles:
        return plain
    # torch counts and limits recompilations by code object, so each kernel gets its own
    assert isinstance(plain, types.FunctionType)
    name = re.sub(r"\W+", "_", f"{plain.__name__}_{signature!r}")
    own = types.FunctionType(plain.__code__.replace(co_name=name), globals(), name, None, plain.__closure__)
    compiled: Callable[..., Any] = torch.compile(own, dynamic=True, fullgraph=True)
    return compiled


def _execute(signature: Signature, backward: bool, inputs: Iterable[Tensor]) -> Any:
    """Runs a kernel on inputs of any leading dims; gradients and autocast play no part in it."""
    tensors = list(inputs)
    shape, device = tensors[0].shape, tensors[0].device.type
    # .data: a view would bring its base along, of any number of dims, and with it a recompilation
    tensors = [(t.reshape(-1, shape[-1]) if t.dim() > 1 else t).data for t in tensors]
    # torch specialises on sizes of 0 and 1: not worth a kernel of their own
    compiles = tensors[0].dim() == 2 and min(tensors[0].shape) > 1 and signature.is_worth_compiling()
    kernel = _kernel(signature, backward, compiles)
    # without duck shapes: N may be equal to H in the first batch and not in the second
    with torch.no_grad(), torch.autocast(device, enabled=False), symbolic_shapes_config.patch(use_duck_shape=False):
        try:
            outputs: Any = kernel(*tensors)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise _cannot_compile(signature, error) from error
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


# -- autograd ---------------------------------------------------------------------------------------------------------


class _Record(Function):
    """The node of a chain. Forward computes nothing, unless ``now``; backward computes all gradients in one kernel."""

    @staticmethod
    def forward(ctx: Any, program: Program, now: bool, *inputs: Tensor) -> Tensor:
        kept = [t for t, keep in zip(inputs, saved_inputs(program), strict=True) if keep]
        ctx.save_for_backward(*kept)
        ctx.program, ctx.dtypes = program, tuple(t.dtype for t in inputs)
        return _execute(Signature(program, ctx.dtypes), False, inputs) if now else Chain(program, inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = tuple(i for i, needs in enumerate(ctx.needs_input_grad[2:]) if needs)
        found = _execute(Signature(ctx.program, ctx.dtypes, wanted), True, (grad, *ctx.saved_tensors))
        by_index = dict(zip(wanted, found, strict=True))
        return (None, None, *(by_index.get(i) for i in range(len(ctx.dtypes))))


class _Values(Function):
    """A chain's values as a plain tensor."""

    @staticmethod
    def forward(ctx: Any, chain: Chain) -> Tensor:
        return chain.evaluate().detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Chain(Tensor):
    """A tensor with operations still to be done. Made by ``extend``; ends by itself when its values are needed."""

    program: Program
    inputs: tuple[Tensor, ...]
    _versions: list[int]
    _known: Tensor | None
    _changed: Tensor | None

    @staticmethod
    def __new__(cls, program: Program, inputs: tuple[Tensor, ...]) -> Chain:
        x = inputs[0]
        others = [t.dtype for op, t in zip(_operand_ops(program), inputs[1:], strict=True) if op.kind in ("add", "mul")]
        dtype = functools.reduce(torch.promote_types, others, x.dtype)
        chain: Chain = Tensor._make_wrapper_subclass(cls, x.shape, dtype=dtype, device=x.device)
        chain.program, chain.inputs = program, inputs
        chain._versions = _versions(inputs)
        chain._known = chain._changed = None
        return chain

    def evaluate(self) -> Tensor:
        """The values, computed once; outside of autograd."""
        if self._known is None:
            if _versions(self.inputs) != self._versions:
                raise ShardFormerError(
                    f"A tensor was changed in place while it waited in a chain ({', '.join(map(str, self.program))})",
                    rule="Chains compute when their values are needed, from the tensors they were given",
                    remedy="Leave enable_jit_fused off for this model, or change the tensor out of place",
                )
            signature = Signature(self.program, tuple(t.dtype for t in self.inputs))
            self._known = _execute(signature, False, self.inputs)
        return self._known

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in METADATA:
            return super().__torch_function__(func, tuple(types), args, kwargs)  # type: ignore[no-untyped-call]
        noted = _note(func, args, kwargs or {})
        if noted is not None:
            return noted
        plain_args, plain_kwargs = tree_map_only(Chain, finish, (args, dict(kwargs or {})))
        out = func(*plain_args, **plain_kwargs)
        if args and isinstance(args[0], Chain) and _is_in_place(func):
            args[0]._changed = plain_args[0] if out is None else out
        return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # below autograd, which has the chain's node; here come operations that no Python function announced
        args, kwargs = tree_map_only(Chain, Chain.evaluate, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def _operand_ops(program: Program) -> list[Op]:
    return [op for op in program if op.kind in WITH_OPERAND]


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    return [0 if t.is_inference() else t._version for t in tensors]


def _is_in_place(func: Any) -> bool:
    name: str = getattr(func, "__name__", "")
    return name == "__setitem__" or name in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))


IN_PLACE_OPERATORS = {
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}


# -- noting -----------------------------------------------------------------------------------------------------------


def finish(x: Tensor) -> Tensor:
    """The plain tensor: of a chain its values, with the same gradients; any other tensor as it is."""
    if not isinstance(x, Chain):
        return x
    if x._changed is not None:
        return x._changed
    if not x.program:
        return x.inputs[0]
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x.evaluate().detach()
    plain: Tensor = _Values.apply(x)  # type: ignore[no-untyped-call]
    return plain


def is_chainable(x: Tensor) -> bool:
    """Whether a chain can begin with or go on from ``x``; inside torch.compile, which fuses by itself, none does."""
    plain = type(x) in (Tensor, nn.Parameter, Chain)
    return plain and x.is_floating_point() and x.dim() > 0 and not x.is_meta and not torch.compiler.is_compiling()


def extend(x: Tensor, op: Op | None, operand: Tensor | None = None, now: bool = False) -> Tensor:
    """``x`` with one more operation to do, or with ``now`` the values after it. Only for what ``is_chainable``."""
    if isinstance(x, Chain) and x._changed is not None:
        x = x._changed
    program, inputs = (x.program, x.inputs) if isinstance(x, Chain) else ((), (x,))
    if op is not None:
        program = (*program, op)
    if operand is not None:
        inputs = (*inputs, operand)
    out: Tensor = _Record.apply(program, now, *inputs)  # type: ignore[no-untyped-call]
    return out


def _note(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The chain after ``func``, when that is an element-wise operation that chains know; else None."""
    if torch.compiler.is_compiling():
        return None
    if func is F.dropout:
        return _note_dropout(*args, **kwargs)
    if func is F.gelu and len(args) == 1 and set(kwargs) <= {"approximate"}:
        return extend(args[0], Op("gelu_tanh" if kwargs.get("approximate") == "tanh" else "gelu"))
    if func in ACTIVATIONS and len(args) == 1 and not kwargs.get("inplace"):
        return extend(args[0], Op(ACTIVATIONS[func]))
    if func not in BINARY or len(args) != 2 or kwargs:
        return None
    chain, other = args if isinstance(args[0], Chain) else args[::-1]
    other = finish(other) if isinstance(other, Chain) else other
    if type(other) not in (Tensor, nn.Parameter) or not other.is_floating_point():
        return None
    if chain._changed is not None or other.shape != chain.shape or other.device != chain.device:
        return None
    kind = BINARY[func]
    if not chain.program:
        return torch.add(finish(chain), other) if kind == "add" else torch.mul(finish(chain), other)
    return extend(chain, Op(kind), other, now=kind == "add")


def _note_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor | None:
    if not training or p == 0:
        return x
    if inplace or not 0 < p < 1 or not isinstance(x, Chain):
        return None
    return extend(x, Op("dropout", p), _dropout_mask(x, p))


def _dropout_mask(chain: Chain, p: float) -> Tensor:
    """Which elements are kept, from the same random numbers that torch's dropout would draw for this tensor."""
    if chain.device.type == "cuda":
        return torch.native_dropout(torch.ones(chain.shape, dtype=chain.dtype, device=chain.device), p, True)[1]
    return torch.empty(chain.shape, dtype=torch.bool, device=chain.device).bernoulli_(1.0 - p)


BINARY: dict[Any, str] = {
    **{f: "add" for f in (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)},
    **{f: "mul" for f in (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)},
}
ACTIVATIONS: dict[Any, str] = {F.silu: "silu", F.relu: "relu", torch.relu: "relu", Tensor.relu: "relu"}
METADATA = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "grad_fn")
    ),
    *(
        getattr(Tensor, name).__get__
        for name in ("is_cuda", "is_cpu", "is_meta", "layout", "is_sparse", "is_quantized")
    ),
    *(
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.__hash__,
        Tensor.__len__,
    ),
    *(Tensor.register_hook, Tensor.is_inference),
}
