"""Cases in which one rank differs in its arguments, model, batch or step: an error, or no difference in the result."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

import shardformer
from shardformer.mesh.parallel_context import ParallelContext
from tests.hostile.arguments import LAYOUTS
from tests.hostile.net import FAMILIES, STEPS, Case, Trace, Unnoticed, batch, fresh, original, sgd, trained

LATE = 2
"""The step in which a running rank is changed."""

OTHER: dict[type, Callable[[Any], Any]] = {
    bool: lambda value: not value,
    int: lambda value: value * 2 or 1,
    float: lambda value: value * 0.5 if value else 0.5,
    str: lambda value: {"silu": "gelu", "gelu": "relu", "gelu_new": "relu", "relu": "gelu_new"}.get(value),
}
"""Type of a setting -> another value of it, or None if there is none to try."""


@cache
def plain(family: str, seeded: bool = False) -> Trace:
    model = fresh(family)
    if seeded:
        _reseed(model)
    return trained(model, family)


def cases() -> Iterator[Case]:
    for number, (name, family, run) in enumerate(_changes()):
        for odd in (0, 1):
            sizes = LAYOUTS[(number + odd) % len(LAYOUTS)]
            if family != "llama" and "sequence" in sizes:
                sizes = {"tensor": 2}
            say = f"{family}: {name} on rank {odd}"
            seeded = odd == 0 and name == "another seed before sharding"  # all ranks take the weights of rank 0
            yield Case("divergence", say, sizes, partial(run, family, odd), partial(plain, family, seeded))


def _changes() -> Iterator[tuple[str, str, Callable[[str, int, ParallelContext], Trace | None]]]:
    for family in FAMILIES:
        settings = vars(fresh(family).config)
        for name, value in settings.items():
            if type(value) in OTHER and OTHER[type(value)](value) is not None and not name.startswith("_"):
                other = OTHER[type(value)](value)
                yield f"config.{name}={other!r}", family, partial(_other_config, name, other)
    options = {name: value for name, value in vars(shardformer.compat.ShardConfig()).items() if type(value) is bool}
    for name, value in options.items():
        yield f"{name}={not value}", "llama", partial(_other_option, name, not value)
    for family in FAMILIES:
        for name, change in BUILT.items():
            yield f"{name} before sharding", family, partial(_other_model, change)
        for name, writes in FOLDERS.items():
            yield name, family, partial(_other_folder, writes)
        for at in (0, LATE):
            for name, late in RUNNING.items():
                yield f"{name} at step {at}", family, partial(_other_step, late, at)


def _rebuilt(family: str, name: str, other: Any) -> Any:
    """Build a model with a changed config, with the weights that fit."""
    model = fresh(family)
    config = copy.deepcopy(model.config)
    try:
        setattr(config, name, other)
        made = type(model)(config).train()
    except Exception:
        return None  # transformers rejects the config
    found = made.state_dict()
    made.load_state_dict(
        {n: x for n, x in model.state_dict().items() if n in found and found[n].shape == x.shape}, False
    )
    return made


def _other_config(name: str, other: Any, family: str, odd: int, context: ParallelContext) -> Trace | None:
    made = _rebuilt(family, name, other)
    if made is None:
        return None
    model = made if context.rank == odd else fresh(family)
    return loop(shardformer.shard_model(model, context=context), family, context)


def _other_option(name: str, other: Any, family: str, odd: int, context: ParallelContext) -> Trace:
    options = {name: other} if context.rank == odd else {}
    return loop(shardformer.shard_model(fresh(family), context=context, **options), family, context)


def _other_model(change: Callable[[Any], None], family: str, odd: int, context: ParallelContext) -> Trace:
    model = fresh(family)
    if context.rank == odd:
        change(model)
    return loop(shardformer.shard_model(model, context=context), family, context)


def _reseed(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1)


def _other_rates(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5


def _other_epsilons(model: Any) -> None:
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.1)


def _freeze(model: Any) -> None:
    next(iter(model.parameters())).requires_grad_(False)


BUILT: dict[str, Callable[[Any], None]] = {
    "another seed": _reseed,
    "eval mode": lambda model: model.eval(),
    "a frozen parameter": _freeze,
    "rates of dropout": _other_rates,
    "epsilons": _other_epsilons,
    "another dtype": lambda model: model.double(),
    "one layer in eval mode": lambda model: list(model.modules())[-2].eval(),
}


@torch.no_grad()
def _save(model: Any, where: str, change: Callable[[Any], None] = lambda model: None) -> None:
    change(model)
    model.save_pretrained(where)


def _nudge(model: Any) -> None:
    next(iter(model.parameters())).view(-1)[-1] += 1e-3


FOLDERS: dict[str, tuple[Callable[[Any, str], None], Callable[[Any, str], None] | None]] = {
    "another folder with the same weights": (_save, None),
    "a folder with one other number": (partial(_save, change=_nudge), None),
    "a folder in another dtype": (partial(_save, change=lambda model: model.double()), None),
    "a folder that is written to between loading and sharding": (_save, partial(_save, change=_nudge)),
}
"""The files of one rank's folder when it is loaded, and how they are changed."""


def _other_folder(
    writes: tuple[Callable[[Any, str], None], Callable[[Any, str], None] | None],
    family: str,
    odd: int,
    context: ParallelContext,
) -> Trace | None:
    first, later = writes
    with tempfile.TemporaryDirectory() as folder:
        (first if context.rank == odd else _save)(fresh(family), folder)
        model = shardformer.from_pretrained(type(original(family)), folder).train()
        if context.rank == odd and later is not None:
            later(fresh(family), folder)
        trace = loop(shardformer.shard_model(model, context=context), family, context)
    if writes is not FOLDERS["another folder with the same weights"]:
        raise Unnoticed
    return trace


class Running:
    """A rank in training, and the changes applied to it."""

    def __init__(self, model: Any, family: str) -> None:
        self.model, self.family = model, family
        self.optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        self.skips = False
        self.fed = 0


def _set(name: str, value: Any) -> Callable[[Running], None]:
    def change(run: Running) -> None:
        for group in run.optimizer.param_groups:
            group[name] = value

    return change


def _scale_gradients(run: Running) -> None:
    """Scale the gradients, like a local clipping."""

    def scale(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)

    run.optimizer.register_step_pre_hook(scale)


@torch.no_grad()
def _add(run: Running) -> None:
    for p in run.model.parameters():
        p.add_(0.05)


RUNNING: dict[str, Callable[[Running], None]] = {
    "another batch": lambda run: setattr(run, "fed", 7),
    "eval mode": lambda run: run.model.eval(),
    "a learning rate": _set("lr", 0.01),
    "a weight decay": _set("weight_decay", 0.1),
    "a momentum": _set("momentum", 0.9),
    "a step left out": lambda run: setattr(run, "skips", True),
    "other weights": _add,
    "gradients scaled": _scale_gradients,
    "a seed": lambda run: torch.manual_seed(1234),
}


_ALLOWED = {
    "data": (RUNNING["a seed"], RUNNING["another batch"]),
    "pipe": (RUNNING["a seed"], RUNNING["other weights"], RUNNING["gradients scaled"]),
}
"""Valid differences between ranks: data ranks have different batches, stages different weights, and without dropout the
seed does not matter.
"""


def _wide_axis(context: ParallelContext) -> str:
    return next((name for name in ("data", "pipe") if context.sizes[name] > 1), "")


def _other_step(
    change: Callable[[Running], None], at: int, family: str, odd: int, context: ParallelContext
) -> Trace | None:
    model: Any = shardformer.shard_model(fresh(family), context=context)
    run = Running(model, family)
    pipeline = shardformer.Pipeline(model, micro_batches=1) if context.pipe.size > 1 else None
    for number in range(STEPS + 2):
        run.skips, run.fed = False, 0
        if number == at and context.rank == odd:
            change(run)
        given = batch(family, number + run.fed)
        if pipeline is not None:
            pipeline.step(given)
        else:
            model(**given).loss.backward()
        if not run.skips:
            run.optimizer.step()
        run.optimizer.zero_grad()
    if change not in _ALLOWED.get(_wide_axis(context), (RUNNING["a seed"],)):
        raise Unnoticed
    return None


def loop(model: Any, family: str, context: ParallelContext) -> Trace:
    if context.pipe.size == 1:
        return trained(model, family)
    pipeline, optimizer = shardformer.Pipeline(model, micro_batches=1), sgd(model)

    def step(number: int, given: dict[str, Any]) -> Any:
        loss = pipeline.step(given)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trained(model, family, optimizer=optimizer, step=step)
