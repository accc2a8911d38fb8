"""A chain: element-wise operations that are noted as the model's own forward calls them, and run as one kernel.

    y = dense(x)            a linear that hands its bias on: Chain of y, [bias]
    h = act(y)              [bias, gelu_new]
    z = proj(h)             anything that is not element-wise needs the values: both operations run, as one kernel

A Chain is a tensor whose values are computed when something needs them, while shape, dtype and place in the graph of
autograd are there from the start: each operation that is noted makes one node, from the tensors the chain began with.
So nothing that is done with a chain can lose a gradient; what is not noted here just gets the values.

Dropout draws its mask when it is called, as the plain model would; sums with a residual end a chain. Where one kernel
is no faster than torch's own (``chain_kernels.fuses``), nothing is noted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from shardformer.errors import ShardFormerError
from shardformer.layers import fused_kernels as chain_kernels
from shardformer.layers.fused_kernels import WITH_OPERAND, Op, Program, Signature, execute, fuses, saved_inputs

# -- autograd ---------------------------------------------------------------------------------------------------------


class _Record(Function):
    """The node of a chain. Forward computes nothing, unless ``now``; backward computes all gradients in one kernel."""

    @staticmethod
    def forward(ctx: Any, program: Program, now: bool, *inputs: Tensor) -> Tensor:
        kept = [t for t, keep in zip(inputs, saved_inputs(program), strict=True) if keep]
        ctx.save_for_backward(*kept)
        ctx.program, ctx.dtypes = program, tuple(t.dtype for t in inputs)
        return execute(Signature(program, ctx.dtypes), False, inputs) if now else Chain(program, inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = tuple(i for i, needs in enumerate(ctx.needs_input_grad[2:]) if needs)
        found = execute(Signature(ctx.program, ctx.dtypes, wanted), True, (grad, *ctx.saved_tensors))
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
            self.check_unchanged()
            signature = Signature(self.program, tuple(t.dtype for t in self.inputs))
            self._known = execute(signature, False, self.inputs)
        return self._known

    def check_unchanged(self) -> None:
        """Raises ShardFormerError when an input is no longer what it was when the operations were noted."""
        if _versions(self.inputs) != self._versions:
            raise ShardFormerError(
                f"A tensor was changed in place while it waited in a chain ({', '.join(map(str, self.program))})",
                rule="Chains compute when their values are needed, from the tensors they were given",
                remedy="Leave enable_jit_fused off for this model, or change the tensor out of place",
            )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in METADATA:
            return super().__torch_function__(func, tuple(types), args, kwargs)  # type: ignore[no-untyped-call]  # torch gives its bases no types
        noted = _note(func, args, kwargs or {})
        if noted is not None:
            return noted
        plain_args, plain_kwargs = tree_map_only(Chain, finish, (args, dict(kwargs or {})))
        out = func(*plain_args, **plain_kwargs)
        if args and isinstance(args[0], Chain) and _is_in_place(func):
            args[0]._changed = plain_args[0] if out is None else out
        return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub takes func for self
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
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x.evaluate().detach()
    if not fuses(x.program, x.inputs[0].device):
        x.check_unchanged()
        return _one_by_one(x.program, x.inputs)
    plain: Tensor = _Values.apply(x)
    return plain


def _one_by_one(program: Program, inputs: tuple[Tensor, ...]) -> Tensor:
    """The operations by torch's own kernels and autograd."""
    with torch.autocast(inputs[0].device.type, enabled=False):
        return Signature(program, ()).forward()(*inputs)


def is_chainable(x: Tensor) -> bool:
    """Whether a chain can begin with or go on from ``x``; inside torch.compile, which fuses by itself, none does."""
    if torch.compiler.is_compiling():
        return False
    if type(x) is Chain:
        return True
    return type(x) in (Tensor, nn.Parameter) and x.is_floating_point() and x.dim() > 0 and not x.is_meta


def extend(x: Tensor, op: Op | None, operand: Tensor | None = None, now: bool = False) -> Tensor:
    """``x`` with one more operation to do, or with ``now`` the values after it. Only for what ``is_chainable``."""
    program, inputs = _parts(x)
    program = program if op is None else (*program, op)
    inputs = inputs if operand is None else (*inputs, operand)
    if now and not fuses(program, inputs[0].device):
        return _one_by_one(program, inputs)
    out: Tensor = _Record.apply(program, now, *inputs)
    return out


def _parts(x: Tensor) -> tuple[Program, tuple[Tensor, ...]]:
    """What is still to be done, and from which tensors."""
    if isinstance(x, Chain) and x._changed is None:
        return x.program, x.inputs
    return (), (finish(x),)


def notes(x: Tensor, op: Op) -> bool:
    """Whether a chain goes on with ``op``: if not, it ends before it, and torch's own kernel runs."""
    program, inputs = _parts(x)
    device = inputs[0].device
    return device.type in chain_kernels.FUSES_ALL or fuses((*program, op), device)


def _note(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The chain after ``func``, when that is an element-wise operation that chains know; else None."""
    if torch.compiler.is_compiling():
        return None
    if func is F.dropout:
        return _note_dropout(*args, **kwargs)
    if func in BINARY and len(args) == 2 and not kwargs:
        # of two chains the longer one goes on, and the other's values go into it
        chain, other = sorted(args, key=lambda x: -len(_parts(x)[0]) if isinstance(x, Chain) else 1)
        return _note_binary(chain, other, Op(BINARY[func]))
    op = Op(ACTIVATIONS.get(func, ""))
    if func is F.gelu:
        op = Op("gelu_tanh" if kwargs.get("approximate") == "tanh" else "gelu")
    known = bool(op.kind) and len(args) == 1 and not kwargs.get("inplace") and set(kwargs) <= {"approximate", "inplace"}
    return extend(args[0], op) if known and notes(args[0], op) else None


def _note_binary(chain: Chain, other: Any, op: Op) -> Tensor | None:
    other = finish(other) if isinstance(other, Chain) else other
    if type(other) not in (Tensor, nn.Parameter) or not other.is_floating_point() or not notes(chain, op):
        return None
    if other.shape != chain.shape or other.device != chain.device:
        return None
    return extend(chain, op, other, now=op.kind == "add")


def _note_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor | None:
    if not training or p == 0:
        return x
    if inplace or not 0 < p < 1 or not isinstance(x, Chain) or not notes(x, Op("dropout", p)):
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
# what is known before the values are
PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_meta")
METHODS = (
    "size",
    "dim",
    "numel",
    "is_floating_point",
    "is_complex",
    "is_inference",
    "register_hook",
    "__hash__",
    "__len__",
)
METADATA = {*(getattr(Tensor, p).__get__ for p in PROPERTIES), *(getattr(Tensor, m) for m in METHODS)}
