"""What a sharded model is made of, looked at before each forward: modules, parameters and hooks that came since.

A module that takes another's place, a parameter that is tied anew or given the whole weight, a hook that sees a part of
what the plain model would show it: each would be silently wrong, since what was cut, and whose gradients are agreed on,
is what stood there.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardformer.errors import ConfigError
from shardformer.layers.tensor.parallel_module import HOOKS, ParallelModule
from shardformer.layout.state import ShardedState, cut_in, state_of
from shardformer.policies.describe import BlockDescription
from shardformer.sharding.plan import Plan

OF_LIBRARIES = ("shardformer", "torch", "transformers", "timm", "accelerate")
"""Whose hooks do not look at the values, or are refused by themselves where they do."""
INTO = ("_forward_pre_hooks", "_backward_hooks")
"""The tables of hooks that are shown what goes into a module, and its gradient."""
OUTSIDE = "hook the model, or a module after the final norm"
Marks = tuple[tuple[Any, ...], ...]


class Structure:
    """What a model was made of when it was sharded.

    Args:
        parts: of the modules that see a part of what they see in the plain model.
    """

    def __init__(self, model: nn.Module, parts: Sequence[SeesPart]) -> None:
        self._parts = {part.path: part for part in parts}
        self._modules = list(model.modules())
        self._params = _params_of(model)
        self._marks = self._seen()
        self._check_hooks(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Structure:
        return _Anew(self._parts)  # what it is made of is seen when it is called

    def check(self, model: nn.Module) -> None:
        """Raises ConfigError where something came that the sharded model would do wrong."""
        if self._seen() == self._marks:
            return
        self._check_params(model)
        _check_shapes(model)
        self._check_hooks(model)
        self._check_forwards(model)
        self._modules = list(model.modules())
        self._marks = self._seen()

    def _seen(self) -> Marks:
        return tuple(
            (
                *map(id, module._modules.values()),
                *map(id, module._parameters.values()),
                *(p.shape for p in module._parameters.values() if p is not None),
                *(len(getattr(module, table)) for table in HOOKS),
                id(type(module)),
                _own_forward(module),
            )
            for module in self._modules
        )

    def _check_params(self, model: nn.Module) -> None:
        now = _params_of(model)
        if _in_modules(now) == _in_modules(self._params):
            self._params = now  # under other paths, as in a wrapper
            return
        new = [name for name, p in now.items() if p not in self._params.values()]
        moved = [name for name, p in now.items() if name not in new and self._params.get(name) != p]
        gone = [name for name in self._params if name not in now]
        what = f"{(new or moved or gone)[0]} of this {type(model).__name__} "
        what += "came after it was sharded" if new else "is another parameter since" if moved else "is gone since"
        raise ConfigError(
            what,
            rule="Weights are compared, cut and their gradients agreed on between ranks when a model is sharded",
            remedy="Build the whole model first, with its new head, its adapters and what is tied, and shard it then",
        )

    def _check_hooks(self, model: nn.Module) -> None:
        for path, part in self._parts.items():
            module = _at(model, path)
            if module is None:
                continue
            for hook in _hooks_of(module, part.hooks):
                if not is_of_library(hook) and not getattr(hook, "sees_parts", False):
                    raise ConfigError(
                        f"A hook on {path} ({type(module).__name__}): {_name_of(hook)}",
                        rule=f"It would see a part: {part.why}",
                        remedy=f"Remove it before the model is called; {part.instead}, or run the plain model for it. "
                        "Where a part is what it may see, write hook.sees_parts = True",
                    )

    def _check_forwards(self, model: nn.Module) -> None:
        before = {id(m): marks[-2:] for m, marks in zip(self._modules, self._marks, strict=False)}
        for path, module in model.named_modules():
            if path not in self._parts and not isinstance(module, ParallelModule):
                continue
            now = (id(type(module)), _own_forward(module))
            if before.get(id(module), now) != now:
                raise ConfigError(
                    f"{path} ({type(module).__name__}) has another forward since it was sharded",
                    rule="A block's code is known, or proven on a small twin, when the model is sharded",
                    remedy="Give the plain model its code, and shard it then",
                )


@dataclass(frozen=True)
class SeesPart:
    """A module that sees a part of what it sees in the plain model.

    Args:
        hooks: the tables of those hooks that would be shown it.
        instead: what to do in place of hooking it.
    """

    path: str
    why: str
    hooks: tuple[str, ...] = HOOKS
    instead: str = "hook the whole attention or MLP"


class _Anew(Structure):
    """Of a copied model."""

    def __init__(self, parts: dict[str, SeesPart]) -> None:
        self._parts, self._params, self._modules = parts, {}, []
        self._marks = ((),)

    def _check_params(self, model: nn.Module) -> None:
        if self._params:
            super()._check_params(model)
        self._params = _params_of(model)


def _params_of(model: nn.Module) -> dict[str, int]:
    """The identity of each parameter by its names, without what stands for the parameters of other stages."""
    return {name: id(p) for name, p in nn.Module.named_parameters(model, remove_duplicate=False)}


def parts_of(plan: Plan, state: ShardedState, *, is_cut: bool) -> Iterator[SeesPart]:
    """The modules that see a part of what they see in the plain model."""
    cuts = [cut for cut in state.stream.cuts if state.context.sizes.get(cut.axis, 1) > 1]
    if cuts:
        why = f"between the blocks each rank holds a part of the {' and '.join(cut.dim for cut in cuts)}"
        for stack in plan.stacks:
            for path, _ in plan.model.get_submodule(stack.layers).named_modules(prefix=stack.layers):
                if path != stack.layers:
                    yield SeesPart(path, why, instead=OUTSIDE)
            if stack.final_norm is not None:
                yield SeesPart(stack.final_norm, why, INTO, OUTSIDE)
    if is_cut:
        for _, block in plan.blocks:
            yield from _in_block(plan.model, block)


def show_whole_behind(model: nn.Module, plan: Plan) -> None:
    """Hooks that were on a final norm see what it gives when the stack has ended, which is whole."""
    for path in (stack.final_norm for stack in plan.stacks if stack.final_norm is not None):
        hooks = model.get_submodule(path)._forward_hooks
        for key in [key for key, hook in hooks.items() if not is_of_library(hook)]:
            hooks[key] = hooks.pop(key)


def _in_block(model: nn.Module, block: BlockDescription) -> Iterator[SeesPart]:
    why = "inside of a block each tensor rank has its own heads or features"
    if not block.holds_exit:  # the entry gives a part, and what holds the exit beside it is given one
        yield SeesPart(block.entry, why, tuple(table for table in HOOKS if table not in INTO))
        ends = block.row.split(".")
        for path in (".".join(ends[:n]) for n in range(1, len(ends) + 1)):
            if not f"{block.entry}.".startswith(f"{path}."):
                yield SeesPart(path, why, INTO)
    for path, _ in model.get_submodule(block.entry).named_modules(prefix=block.entry):
        if path != block.entry:
            yield SeesPart(path, why)


def _check_shapes(model: nn.Module) -> None:
    """``param.data = whole`` is what no optimizer and no ``copy_`` would do: torch takes any shape there."""
    coords = state_of(model).coords
    for name, param, spec in cut_in(model):
        part = spec.local_shape(coords)
        if tuple(param.shape) != part:
            raise ConfigError(
                f"{name} of this {type(model).__name__} is {list(param.shape)} since it was sharded",
                rule=f"This rank holds the part {list(part)} of {list(spec.shape)}",
                remedy="Give weights to the plain model before it is sharded, or all of them by load_state_dict, which "
                "takes the plain model's",
            )


def _in_modules(params: dict[str, int]) -> Counter[tuple[str, int]]:
    """By their names in their modules."""
    return Counter((name.rpartition(".")[2], p) for name, p in params.items())


def _at(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _own_forward(module: nn.Module) -> int:
    """A number of the forward that somebody put in the module's place; 0 for that of its class, and for a stage's."""
    forward = vars(module).get("forward")
    is_ours = type(forward).__module__.partition(".")[0] == "shardformer"
    is_of_class = getattr(forward, "__func__", None) is type(module).forward
    return 0 if forward is None or is_ours or is_of_class else id(forward)


def _hooks_of(module: nn.Module, tables: Sequence[str]) -> Iterator[Callable[..., Any]]:
    for table in tables:
        yield from getattr(module, table).values()


def is_of_library(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    named = hook if hasattr(hook, "__module__") and owner is None else type(owner if owner is not None else hook)
    return str(getattr(named, "__module__", "")).partition(".")[0] in OF_LIBRARIES


def _name_of(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)
