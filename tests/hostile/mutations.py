"""Models that users change before or after sharding. They train like the plain model, or raise."""

from __future__ import annotations

import copy
import functools
import random
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import shardformer
from shardformer.mesh.parallel_context import ParallelContext
from tests.hostile.divergence import loop
from tests.hostile.net import FAMILIES, Case, Trace, fresh, trained

LAYOUTS = ({"tensor": 2}, {"data": 2}, {"tensor": 3}, {"pipe": 2})


class Draw(random.Random):
    """Draws modules and parameters by their names in the plain model."""

    def __init__(self, plain: Any, seed: int) -> None:
        super().__init__(seed)
        self.modules = [(name, module) for name, module in plain.named_modules() if name]
        self.parameters = list(plain.named_parameters())

    def module(self, model: Any, *kinds: type) -> Any:
        return model.get_submodule(self.name(*kinds))

    def name(self, *kinds: type) -> str:
        return self.choice([name for name, module in self.modules if isinstance(module, kinds or nn.Module)])

    def parameter(self, model: Any) -> Any:
        return model.get_parameter(self.choice(self.parameters)[0])


Change = Callable[[Any, Draw, list[Any]], None]
"""(model, drawn objects, notes of hooks) -> None."""


def owner(model: Any, name: str) -> tuple[Any, str]:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def _noted(value: Any) -> Any:
    """Return what a hook received: shapes, and values if they are the same on all ranks."""
    first = value[0] if isinstance(value, tuple) and value else value
    return (tuple(first.shape), round(float(first.float().norm()), 3)) if isinstance(first, Tensor) else None


def forward_hook(model: Any, draw: Draw, seen: list[Any]) -> None:
    draw.module(model).register_forward_hook(lambda module, args, out: seen.append(_noted(out)))


def forward_pre_hook(model: Any, draw: Draw, seen: list[Any]) -> None:
    draw.module(model).register_forward_pre_hook(lambda module, args: seen.append(_noted(args)))


def changing_hook(model: Any, draw: Draw, seen: list[Any]) -> None:
    def halve(module: Any, args: Any, out: Any) -> Any:
        return out * 0.5 if isinstance(out, Tensor) and out.is_floating_point() else None

    draw.module(model).register_forward_hook(halve)


def softmax_hook(model: Any, draw: Draw, seen: list[Any]) -> None:
    def mix(module: Any, args: Any, out: Any) -> Any:
        return out.softmax(-1) + out if isinstance(out, Tensor) and out.is_floating_point() else None

    draw.module(model, nn.Linear).register_forward_hook(mix)


def backward_hook(model: Any, draw: Draw, seen: list[Any]) -> None:
    draw.module(model, nn.Linear, nn.LayerNorm).register_full_backward_hook(
        lambda module, given, out: seen.append(_noted(out))
    )


def parameter_hook(model: Any, draw: Draw, seen: list[Any]) -> None:
    draw.parameter(model).register_hook(lambda grad: grad * 0.5)


def patched(model: Any, draw: Draw, seen: list[Any]) -> None:
    module = draw.module(model, nn.Linear)
    forward = module.forward
    module.forward = types.MethodType(lambda self, x: forward(x) + forward(x).mean(-1, keepdim=True), module)


def wrapped(model: Any, draw: Draw, seen: list[Any]) -> None:
    """Wrap a `forward` to move its inputs, as accelerate does."""
    module = draw.module(model)
    if "forward" not in dir(module) or isinstance(module, nn.ModuleList):
        return
    forward = module.forward

    @functools.wraps(forward)
    def moved(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    module.forward = moved


def subclassed(model: Any, draw: Draw, seen: list[Any]) -> None:
    module = draw.module(model, nn.Linear)
    kind = type(module)
    module.__class__ = type("Mine", (kind,), {"forward": lambda self, x: torch.tanh(kind.forward(self, x))})


def subclassed_block(model: Any, draw: Draw, seen: list[Any]) -> None:
    """Replace a module by a subclass that normalizes its output."""
    names = [n for n, m in draw.modules if list(m.children()) and not isinstance(m, nn.ModuleList)]
    module = model.get_submodule(draw.choice(names))
    kind = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = kind.forward(self, *args, **kwargs)
        return out * 1.5 if isinstance(out, Tensor) else out

    module.__class__ = type("Mine", (kind,), {"forward": forward})


def shared(model: Any, draw: Draw, seen: list[Any]) -> None:
    """Replace one of two modules of the same shapes by the other."""
    shapes: dict[Any, list[str]] = {}
    for name, module in draw.modules:
        if list(module.parameters()):
            key = type(module), tuple((n, tuple(p.shape)) for n, p in module.named_parameters())
            shapes.setdefault(key, []).append(name)
    first, second = draw.sample(draw.choice([names for names in shapes.values() if len(names) > 1]), 2)
    where, last = owner(model, second)
    setattr(where, last, model.get_submodule(first))


def tied(model: Any, draw: Draw, seen: list[Any]) -> None:
    """Tie two parameters of the same shape."""
    shapes: dict[Any, list[str]] = {}
    for name, p in draw.parameters:
        shapes.setdefault(tuple(p.shape), []).append(name)
    first, second = draw.sample(draw.choice([names for names in shapes.values() if len(names) > 1]), 2)
    where, last = owner(model, second)
    setattr(where, last, model.get_parameter(first))


def replaced(model: Any, draw: Draw, seen: list[Any]) -> None:
    name = draw.name(nn.Linear)
    module = model.get_submodule(name)
    where, last = owner(model, name)
    setattr(where, last, copy.deepcopy(module))


def new_parameter(model: Any, draw: Draw, seen: list[Any]) -> None:
    name = draw.choice(draw.parameters)[0]
    p = model.get_parameter(name)
    where, last = owner(model, name)
    setattr(where, last, nn.Parameter(p.detach().clone() * 1.1))


def new_data(model: Any, draw: Draw, seen: list[Any]) -> None:
    p = draw.parameter(model)
    p.data = p.data.clone() * 1.1


def scaled(model: Any, draw: Draw, seen: list[Any]) -> None:
    with torch.no_grad():
        draw.parameter(model).mul_(1.1)


def frozen(model: Any, draw: Draw, seen: list[Any]) -> None:
    for name, _ in draw.sample(draw.parameters, 3):
        model.get_parameter(name).requires_grad_(False)


def with_norm(model: Any, draw: Draw, seen: list[Any]) -> None:
    parametrizations.weight_norm(draw.module(model, nn.Linear))


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def parametrized(model: Any, draw: Draw, seen: list[Any]) -> None:
    parametrize.register_parametrization(draw.module(model, nn.Linear), "weight", Doubled())


def pruned(model: Any, draw: Draw, seen: list[Any]) -> None:
    prune.l1_unstructured(draw.module(model, nn.Linear), "weight", amount=0.3)


class Adapted(nn.Module):
    """A linear layer with two small ones added to it, as in adapters."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.base = base
        self.down = nn.Parameter(0.1 * torch.randn(2, base.in_features, generator=generator))
        self.up = nn.Parameter(0.1 * torch.randn(base.out_features, 2, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


def adapted(model: Any, draw: Draw, seen: list[Any]) -> None:
    name = draw.name(nn.Linear)
    module = model.get_submodule(name)
    where, last = owner(model, name)
    setattr(where, last, Adapted(module))


def in_sequence(model: Any, draw: Draw, seen: list[Any]) -> None:
    name = draw.name(nn.Linear, nn.LayerNorm)
    module = model.get_submodule(name)
    where, last = owner(model, name)
    setattr(where, last, nn.Sequential(module, nn.Tanh()))


def a_buffer(model: Any, draw: Draw, seen: list[Any]) -> None:
    found = [b for b in model.buffers() if b.is_floating_point()]
    if found:
        draw.choice(found).mul_(1.1)


def another_dtype(model: Any, draw: Draw, seen: list[Any]) -> None:
    draw.module(model, nn.LayerNorm, nn.Linear).double()


def an_attribute(model: Any, draw: Draw, seen: list[Any]) -> None:
    """Change a numeric attribute of a layer."""
    found = [(path, n) for path, m in draw.modules for n, v in vars(m).items() if type(v) is float and v]
    path, name = draw.choice(found)
    module = model.get_submodule(path)
    if name in vars(module):  # a sharded layer may not use it
        setattr(module, name, getattr(module, name) * 1.5)


def one_layer_less(model: Any, draw: Draw, seen: list[Any]) -> None:
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    if stacks:
        del draw.choice(stacks)[-1]


def checkpointed(model: Any, draw: Draw, seen: list[Any]) -> None:
    model.gradient_checkpointing_enable()


def compiled(model: Any, draw: Draw, seen: list[Any]) -> None:
    torch.compiler.reset()  # code compiled for other models counts towards torch's recompile limit
    model.compile(backend="eager")


CHANGES: dict[str, Change] = {
    "a forward hook": forward_hook,
    "a forward pre-hook": forward_pre_hook,
    "a hook that changes what comes out": changing_hook,
    "a hook that mixes features": softmax_hook,
    "a backward hook": backward_hook,
    "a hook on a parameter": parameter_hook,
    "a patched forward": patched,
    "a wrapped forward": wrapped,
    "a subclass of a linear layer": subclassed,
    "a subclass of a block": subclassed_block,
    "a shared module": shared,
    "a tied parameter": tied,
    "a replaced module": replaced,
    "a new parameter": new_parameter,
    "new data of a parameter": new_data,
    "scaled weights": scaled,
    "frozen parameters": frozen,
    "weight norm": with_norm,
    "a parametrization": parametrized,
    "pruning": pruned,
    "an adapter": adapted,
    "a module in a row with another": in_sequence,
    "a changed buffer": a_buffer,
    "another dtype": another_dtype,
    "a changed attribute": an_attribute,
    "one layer less": one_layer_less,
    "gradient checkpointing": checkpointed,
    "compile": compiled,
}


def cases(rounds: int = 2) -> Iterator[Case]:
    number = 0
    for round_ in range(rounds):
        for family in FAMILIES:
            for name, change in CHANGES.items():
                for when in ("before", "behind"):
                    number += 1
                    sizes = LAYOUTS[(number // 2 + round_) % len(LAYOUTS)]
                    if when == "behind" and "pipe" in sizes:
                        sizes = {"tensor": 2}  # a stage has only some of the modules
                    seed = number * 31 + round_
                    say = f"{family}: {name} {when} sharding (drawn {seed})"
                    run = partial(_mutated, family, change, when, seed)
                    yield Case("mutation", say, sizes, run, partial(_plain, family, change, seed))


def _plain(family: str, change: Change, seed: int) -> Trace | None:
    model, seen = fresh(family), []
    try:
        change(model, Draw(fresh(family), seed), seen)
        trace = trained(model, family)
    except Exception:
        return None  # the plain model cannot be trained either
    trace.seen = seen
    return trace


def _mutated(family: str, change: Change, when: str, seed: int, context: ParallelContext) -> Trace | None:
    if _plain(family, change, seed) is None:
        return None
    model: Any = fresh(family)
    seen: list[Any] = []
    if when == "before":
        change(model, Draw(fresh(family), seed), seen)
    model = shardformer.shard_model(model, context=context)
    if when == "behind":
        change(model, Draw(fresh(family), seed), seen)
    trace = loop(model, family, context)
    plain = _plain(family, change, seed)
    trace.seen = seen if context.pipe.size == 1 or plain is None else plain.seen  # a stage runs only its own layers
    return trace
