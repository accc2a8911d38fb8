"""Traces one forward of a reduced model: which linears feed which, and how modules treat tokens.

Every linear's output is marked with the linear's name, and every tensor computed of a marked one carries its marks. A
linear that reads an unmarked input could be cut by columns; the first linear that reads marked ones would be the row
behind them, and with its output, which is whole again, the marks end.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardformer.discovery.reduced_model import ReferenceGradients
from shardformer.kernels.fused_ops import is_elementwise, norm_kind
from shardformer.module_paths import is_linear, match_paths
from shardformer.tensor_parallel.sequence_parallel import first_tensor

MERGING_OPS = ("bmm", "baddbmm", "scaled_dot_product")
"""Operations in which queries meet keys, or scores meet values."""


@dataclass
class LinearGroup:
    """Linears that give to one linear.

    Args:
        row: path of the linear that reads.
        columns: paths of those that give, in the order of their calls.
        entry: path of the module around the first columns, or of a column that stands alone.
        enters: whether the first tensor argument of that module is what they read.
        apart: those columns that read something else (cross-attention's states).
        attends: whether they meet as queries and keys do.
        head_dim: where they do, the last dim of the first of them there: the features of a head.
    """

    row: str
    columns: list[str]
    entry: str = ""
    enters: bool = True
    apart: list[str] = field(default_factory=list)
    attends: bool = False
    head_dim: int = 0


@dataclass
class ForwardTrace:
    """What was seen in one forward.

    Args:
        groups: in the order in which their rows were reached.
        called: path of each linear that was called -> how often.
        inputs: path of each module that was called -> the tensors it was given first, by argument.
        read: path of each linear -> what it read, call by call.
        outputs: path of each module that was called -> the first tensor of what it gave.
        numbers: path of a module -> its whole-numbered attributes that were read meanwhile.
        normed: path of each norm that was called -> the columns whose output it normalised.
        projections: linears whose outputs, with no other linear between, met as queries and keys do.
    """

    groups: list[LinearGroup] = field(default_factory=list)
    called: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    read: dict[str, list[Tensor]] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, dict[str, int]] = field(default_factory=dict)
    normed: dict[str, frozenset[str]] = field(default_factory=dict)
    projections: list[frozenset[str]] = field(default_factory=list)


TRACE_LOCK = threading.Lock()
"""Whether a mode watches each operation is kept for all threads at once, and ranks may be threads."""


def trace_forward(model: nn.Module, run: Callable[[nn.Module], Any], whole: Iterable[str] = ()) -> ForwardTrace:
    """Runs the model once, without gradients, and returns what flowed. Linears in ``whole`` only pass marks on."""
    observer = _ForwardTracer(model, frozenset(whole))
    with ExitStack() as stack:
        for path, module in model.named_modules():
            for hook in (
                module.register_forward_pre_hook(observer.before(path, module), with_kwargs=True),
                module.register_forward_hook(observer.after(path)),
            ):
                stack.callback(hook.remove)
            stack.callback(_watch_numbers(module, observer.flow.numbers.setdefault(path, {})))
        with TRACE_LOCK, torch.no_grad(), observer.marks, observer.last:
            run(model)
    return observer.finish()


def outputs_per_layer(model: nn.Module, run: Callable[[nn.Module], Any], stacks: Iterable[str]) -> dict[str, int]:
    """How many things the layers at each path return in one forward; 0 where it is their states alone."""
    given: dict[str, int] = {}
    with ExitStack() as stack, torch.no_grad():
        for layers in stacks:
            given[layers] = 0

            def note(_: nn.Module, __: Any, out: Any, layers: str = layers) -> None:
                given[layers] = len(out) if isinstance(out, tuple | list) else 0

            for path in match_paths(f"{layers}.*", [name for name, _ in model.named_modules()]):
                stack.callback(model.get_submodule(path).register_forward_hook(note).remove)
        run(model)
    return given


class _TensorOrigins(TorchDispatchMode):
    """Tensor -> the names of the linears that it was computed of."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no types
        self._marks: dict[int, frozenset[str]] = {}
        self._kept: list[Tensor] = []  # so that no identity is used twice
        self.met: dict[frozenset[str], int] = {}

    def of(self, x: Any) -> frozenset[str]:
        return self._marks.get(id(x), frozenset())

    def put(self, x: Tensor, marks: frozenset[str]) -> None:
        self._marks[id(x)] = marks
        self._kept.append(x)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [(x, self.of(x)) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        marked = [marks for _, marks in given if marks]
        if not marked:
            return out
        marks = frozenset().union(*marked)
        if len(marked) > 1 and any(name in str(func) for name in MERGING_OPS):
            self.met.setdefault(marks, next(x.shape[-1] for x, of_x in given if of_x))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.put(x, marks)
        if func._schema.is_mutable and isinstance(args[0], Tensor):
            self.put(args[0], self.of(args[0]) | marks)
        return out


class _ForwardTracer:
    def __init__(self, model: nn.Module, whole: frozenset[str]) -> None:
        self.flow, self.marks, self.last = ForwardTrace(), _TensorOrigins(), _TensorOrigins()
        self._whole = whole
        self._linears = {path for path, module in model.named_modules() if is_linear(module)}
        self._giving: dict[str, frozenset[str]] = {}
        self._groups: dict[str, LinearGroup] = {}
        self._order: list[str] = []
        self._parents = {path: path.rpartition(".")[0] for path, _ in model.named_modules()}

    def before(self, path: str, native: nn.Module) -> Callable[..., None]:
        names = list(inspect.signature(native.forward).parameters)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            every = {**dict(zip(names, args, strict=False)), **kwargs}
            given = {name: x for name, x in every.items() if isinstance(x, Tensor)}
            self.flow.inputs.setdefault(path, given)
            if given and "norm" in type(module).__name__.lower() and not module._modules:
                self.flow.normed.setdefault(path, self.marks.of(next(iter(given.values()))))
            if path in self._linears and given:
                x = next(iter(given.values()))
                self.flow.read.setdefault(path, []).append(x)
                self._giving[path] = self.marks.of(x)

        return hook

    def after(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            first = next((x for x in tree_leaves(out) if isinstance(x, Tensor)), None)
            if first is None:
                return
            self.flow.outputs[path] = first
            if path in self._linears:
                self.last.put(first, frozenset({path}))
            if path in self._linears and path in self._giving:
                self._pass(path, first)

        return hook

    def _pass(self, path: str, out: Tensor) -> None:
        giving = self._giving.pop(path)
        self.flow.called[path] = self.flow.called.get(path, 0) + 1
        if path in self._whole:
            self.marks.put(out, giving)
        elif giving:
            self.marks.put(out, frozenset())
            group = self._groups.setdefault(path, LinearGroup(path, []))
            group.columns += [c for c in self._order if c in giving and c not in group.columns]
            size = next((size for met, size in self.marks.met.items() if met <= giving), None)
            group.attends |= size is not None
            group.head_dim = group.head_dim or size or 0
        else:
            self.marks.put(out, frozenset({path}))
            if path not in self._order:
                self._order.append(path)

    def finish(self) -> ForwardTrace:
        for group in self._groups.values():
            self._place(group)
        self.flow.groups = list(self._groups.values())
        self.flow.projections = list(self.last.met)
        return self.flow

    def _place(self, group: LinearGroup) -> None:
        """Finds out where what the first columns read comes in."""
        first = {c: self.flow.read[c][0] for c in group.columns}
        source = first[group.columns[0]]
        beside = [c for c, x in first.items() if x is source]
        group.apart = [c for c, x in first.items() if x is not source]
        path = common_parent(beside) if len(beside) > 1 else self._parents[beside[0]]
        given = self._given(path)
        group.enters = source is given or (group.attends and _is_of(source, given))
        group.entry = path if group.enters or len(beside) > 1 else beside[0]
        group.enters = group.enters or len(beside) == 1
        if group.attends and (group.entry in group.columns or not group.enters) and len(group.columns) > 1:
            inner, outer = common_parent(group.columns), common_parent([*group.columns, group.row])
            given = self._given(outer)
            apart = [c for c, x in first.items() if not _is_of(x, given)]
            if group.entry in group.columns or len(apart) < len(group.columns):
                group.entry = inner if self._given(inner) is given else outer
                group.apart, group.enters = apart, True

    def _given(self, path: str) -> Tensor | None:
        """What enters the module: its first tensor argument."""
        return next(iter(self.flow.inputs.get(path, {}).values()), None)


def _is_of(read: Tensor, given: Tensor | None) -> bool:
    """Whether it is what was given, or the same numbers in another shape."""
    return given is not None and read.data_ptr() == given.data_ptr() and read.numel() == given.numel()


def common_parent(paths: Sequence[str]) -> str:
    """The longest path that leads to a module around all of them."""
    split = [path.split(".")[:-1] for path in paths]
    shared = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _watch_numbers(module: nn.Module, seen: dict[str, int]) -> Callable[[], None]:
    """Notes in ``seen`` which of the module's own whole numbers are read. Returns what ends it."""
    native: Any = type(module)
    numbers: Mapping[str, int] = {
        name: value for name, value in vars(module).items() if type(value) is int and not name.startswith("_")
    }

    def read(self: nn.Module, name: str) -> Any:
        if name in numbers:
            seen[name] = numbers[name]
        return native.__getattribute__(self, name)

    module.__class__ = type(native.__name__, (native,), {"__getattribute__": read, "__module__": native.__module__})

    def end() -> None:
        module.__class__ = native

    return end


TOKEN_ROUNDING = 1e-5
"""Of the largest number of an output: tokens that experts are given in another order differ by less."""


@dataclass(frozen=True)
class ModuleCall:
    """The first call of a module: what it was given, and what it gave."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any

    @property
    def given(self) -> Tensor | None:
        """Its hidden states."""
        tensors = [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor)]
        return first_tensor(self.args, self.kwargs) if tensors else None

    @property
    def gave(self) -> Tensor | None:
        first = self.output[0] if isinstance(self.output, tuple | list) else self.output
        return first if isinstance(first, Tensor) else None


class TokenUse:
    """The layers at one path, of a model that ran once.

    Args:
        layers: the path of their list.

    Attributes:
        shape: samples and tokens of what they are given.
    """

    def __init__(self, reference: ReferenceGradients, layers: str) -> None:
        self.layers, self._model = layers, reference.model
        self.paths = match_paths(f"{layers}.*", [path for path, _ in self._model.named_modules()])
        self._calls: dict[str, ModuleCall] = {}
        with ExitStack() as stack, torch.no_grad():
            for outer in self.paths:
                for path, module in self._model.get_submodule(outer).named_modules(prefix=outer):
                    note = partial(self._note, path)
                    stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
            reference.run(self._model)
        first = next((self._calls[path].given for path in self.paths if path in self._calls), None)
        self.shape: tuple[int, ...] = (0, 0) if first is None or first.dim() < 3 else tuple(first.shape[:2])

    def _note(self, path: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._calls.setdefault(path, ModuleCall(args, kwargs, output))

    def by_token(self, x: Tensor | None) -> bool:
        """Whether this is something for each token of the stack: (B, S, ...), or (B*S, ...)."""
        samples, length = self.shape
        return x is not None and (
            (x.dim() > 2 and tuple(x.shape[:2]) == self.shape) or (x.dim() == 2 and x.shape[0] == samples * length)
        )

    def is_given_tokens(self, path: str) -> bool:
        """Also True of a module that was not called: it may be, of another batch."""
        return path not in self._calls or self.by_token(self._calls[path].given)

    def is_given_numbers(self, path: str) -> bool:
        """Whether a module is given one number for each token, (B, S), beside its states."""
        return any(isinstance(x, Tensor) and tuple(x.shape) == self.shape for x in self._named(path).values())

    def above(self, path: str) -> dict[str, str]:
        """The modules of a layer that hold the one at ``path``, and itself, from the outermost: name -> path."""
        outer = next((outer for outer in self.paths if path.startswith(f"{outer}.")), None)
        parts = path.removeprefix(f"{outer}.").split(".") if outer is not None else []
        names = [".".join(parts[: i + 1]) for i in range(len(parts))]
        return {name: f"{outer}.{name}" for name in names}

    def is_fed(self, path: str) -> bool:
        """Whether a module is given the stack's tokens, in their order (B, S, ...), and gives as many."""
        if (call := self._calls.get(path)) is None or (x := call.given) is None:
            return False
        return x.dim() > 2 and tuple(x.shape[:2]) == self.shape and self.by_token(call.gave)

    def children(self) -> Iterator[tuple[str, str]]:
        """What a layer may call: (path of a layer, name in it)."""
        for outer in self.paths:
            for name, _ in _called(self._model.get_submodule(outer)):
                yield outer, name

    def mixing(self) -> Iterator[tuple[str, str]]:
        """The children of layers that may carry something from token to token: (path of a layer, name in it)."""
        for outer in self.paths:
            for name, child in _called(self._model.get_submodule(outer)):
                apart = is_linear(child) or norm_kind(child) is not None or is_elementwise(child)
                if not apart and next(child.parameters(), None) is not None and self._mixes(f"{outer}.{name}", child):
                    yield outer, name

    def _mixes(self, path: str, module: nn.Module) -> bool:
        """Whether what it gives for one token changes with another: its first token, then its last, is changed."""
        call = self._calls.get(path)
        if call is None:
            return True
        x, y = call.given, call.gave
        if x is None or y is None or tuple(x.shape[:2]) != self.shape or tuple(y.shape[:2]) != self.shape:
            return self.is_given_tokens(path)
        for token, others in ((0, slice(1, None)), (-1, slice(None, -1))):
            changed = x.detach().clone()
            changed[:, token] += torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype, device=x.device).square()
            own = [changed if a is x else a for a in call.args]
            named = {name: changed if a is x else a for name, a in call.kwargs.items()}
            try:
                with torch.no_grad():
                    again = ModuleCall((), {}, module(*own, **named)).gave
            except Exception:  # called out of its turn a module may raise anything
                return True
            if again is None or again.shape != y.shape or y.shape[1] < 2 or torch.equal(again[:, token], y[:, token]):
                return True  # nothing can be told, as where its last weight begins at 0
            if (again - y)[:, others].abs().max() > TOKEN_ROUNDING * y.abs().max():
                return True
        return False

    def beside(self) -> Iterator[str]:
        """The arguments of layers, and of modules in them, that are given for each token beside their states."""
        for outer in self.paths:
            for path, _ in self._model.get_submodule(outer).named_modules(prefix=outer):
                for name, x in self._named(path).items():
                    if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 2 and self.by_token(x):
                        yield f"{path}.{name}".removeprefix(f"{outer}.")

    def _named(self, path: str) -> dict[str, Any]:
        """What a module was given beside its states, by the names of its arguments."""
        if (call := self._calls.get(path)) is None:
            return {}
        names = inspect.signature(self._model.get_submodule(path).forward).parameters
        named = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        return {name: x for name, x in named.items() if x is not call.given}


def _called(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children of a module, and in the place of lists, which nobody calls, what stands in them."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
