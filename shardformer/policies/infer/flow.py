"""What one forward of a model shows: which linears give to which, where that starts, and what is read on the way.

Every linear's output is marked with the linear's name, and every tensor computed of a marked one carries its marks. A
linear that reads an unmarked input could be cut by columns; the first linear that reads marked ones would be the row
behind them, and with its output, which is whole again, the marks end.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardformer.layers.tensor.linear import is_linear
from shardformer.policies.paths import matching

MEETINGS = ("bmm", "baddbmm", "scaled_dot_product")
"""Operations in which queries meet keys, or scores meet values."""


@dataclass
class Group:
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
class Flow:
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

    groups: list[Group] = field(default_factory=list)
    called: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    read: dict[str, list[Tensor]] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, dict[str, int]] = field(default_factory=dict)
    normed: dict[str, frozenset[str]] = field(default_factory=dict)
    projections: list[frozenset[str]] = field(default_factory=list)


WATCHING = threading.Lock()
"""Whether a mode watches each operation is kept for all threads at once, and ranks may be threads."""


def observe(model: nn.Module, run: Callable[[nn.Module], Any], whole: Iterable[str] = ()) -> Flow:
    """Runs the model once, without gradients, and returns what flowed. Linears in ``whole`` only pass marks on."""
    observer = _Observer(model, frozenset(whole))
    with ExitStack() as stack:
        for path, module in model.named_modules():
            for hook in (
                module.register_forward_pre_hook(observer.before(path, module), with_kwargs=True),
                module.register_forward_hook(observer.after(path)),
            ):
                stack.callback(hook.remove)
            stack.callback(_watch_numbers(module, observer.flow.numbers.setdefault(path, {})))
        with WATCHING, torch.no_grad(), observer.marks, observer.last:
            run(model)
    return observer.finish()


def given_by_layers(model: nn.Module, run: Callable[[nn.Module], Any], stacks: Iterable[str]) -> dict[str, int]:
    """How many things the layers at each path return in one forward; 0 where it is their states alone."""
    given: dict[str, int] = {}
    with ExitStack() as stack, torch.no_grad():
        for layers in stacks:
            given[layers] = 0

            def note(_: nn.Module, __: Any, out: Any, layers: str = layers) -> None:
                given[layers] = len(out) if isinstance(out, tuple | list) else 0

            for path in matching(f"{layers}.*", [name for name, _ in model.named_modules()]):
                stack.callback(model.get_submodule(path).register_forward_hook(note).remove)
        run(model)
    return given


class _Marks(TorchDispatchMode):
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
        if len(marked) > 1 and any(name in str(func) for name in MEETINGS):
            self.met.setdefault(marks, next(x.shape[-1] for x, of_x in given if of_x))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.put(x, marks)
        if func._schema.is_mutable and isinstance(args[0], Tensor):
            self.put(args[0], self.of(args[0]) | marks)
        return out


class _Observer:
    def __init__(self, model: nn.Module, whole: frozenset[str]) -> None:
        self.flow, self.marks, self.last = Flow(), _Marks(), _Marks()
        self._whole = whole
        self._linears = {path for path, module in model.named_modules() if is_linear(module)}
        self._giving: dict[str, frozenset[str]] = {}
        self._groups: dict[str, Group] = {}
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
            group = self._groups.setdefault(path, Group(path, []))
            group.columns += [c for c in self._order if c in giving and c not in group.columns]
            size = next((size for met, size in self.marks.met.items() if met <= giving), None)
            group.attends |= size is not None
            group.head_dim = group.head_dim or size or 0
        else:
            self.marks.put(out, frozenset({path}))
            if path not in self._order:
                self._order.append(path)

    def finish(self) -> Flow:
        for group in self._groups.values():
            self._place(group)
        self.flow.groups = list(self._groups.values())
        self.flow.projections = list(self.last.met)
        return self.flow

    def _place(self, group: Group) -> None:
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
