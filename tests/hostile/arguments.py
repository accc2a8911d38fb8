"""Cases of entry point x argument x value x ranks: all ranks raise, or training equals the plain model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from typing import Any

import shardformer
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.initialize import initialize
from tests.hostile.net import Case, Trace, fresh, sgd, trained

VALUES = {
    "None": None,
    "True": True,
    "0": 0,
    "-1": -1,
    "1.5": 1.5,
    "'x'": "x",
    "NaN": math.nan,
    "a list": [1, "x"],
    "huge": 10**9,
    "an object": object(),
}
RANKS = ("all ranks", "the first rank", "the last rank")
LAYOUTS = ({"tensor": 2}, {"data": 2}, {"pipe": 2}, {"sequence": 2})

Use = Callable[[ParallelContext, dict[str, Any]], Trace | None]


@dataclass(frozen=True)
class Entry:
    """A public function or class.

    Args:
        use: calls it with the passed arguments, and trains with the result.
        takes: the callable whose arguments are tried.
        left_out: arguments that are not settings, such as the model, or whose values change the expected result.
    """

    name: str
    takes: Any
    use: Use
    left_out: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        if is_dataclass(self.takes):
            names = [f.name for f in fields(self.takes) if f.init]
        else:
            names = [
                name for name, p in inspect.signature(self.takes).parameters.items() if p.kind not in (p.VAR_KEYWORD,)
            ]
        return [name for name in names if name not in (*self.left_out, "self")]


def loop_of(model: Any, context: ParallelContext, **how: Any) -> Trace:
    """Train the result of ``shard_model``, as a pipeline if it has stages."""
    optimizer = sgd(model)
    if context.pipe.size == 1:
        return trained(model, optimizer=optimizer, **how)
    pipeline = shardformer.Pipeline(model, micro_batches=1)

    def step(number: int, given: dict[str, Any]) -> Any:
        loss = pipeline.step(given)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trained(model, optimizer=optimizer, step=step, **how)


def _shard(context: ParallelContext, given: dict[str, Any]) -> Trace:
    return loop_of(shardformer.shard_model(**{"model": fresh(), "context": context, **given}), context)


def _of_dataclass(make: Any, name: str, context: ParallelContext, given: dict[str, Any]) -> Trace:
    return _zero(context, {name: make(**given)})


def _zero(context: ParallelContext, given: dict[str, Any]) -> Trace:
    model = shardformer.shard_model(fresh(), context=context)
    optimizer: Any = shardformer.shard_optimizer(**{"optimizer": sgd(model), "model": model, **given})
    pipeline = shardformer.Pipeline(model, micro_batches=1) if context.pipe.size > 1 else None

    def step(number: int, batch: dict[str, Any]) -> Any:
        if pipeline is not None:
            loss = pipeline.step(batch)
        else:
            loss = model(**batch).loss
            optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trained(model, optimizer=optimizer, step=step)


def _engine(context: ParallelContext, given: dict[str, Any]) -> Trace:
    sizes = {name: axis.size for name, axis in context.axes.items() if axis.size > 1}
    return _initialize(context, {"parallel": {**sizes, **given}})


def _initialize(context: ParallelContext, given: dict[str, Any]) -> Trace:
    sizes = {name: axis.size for name, axis in context.axes.items() if axis.size > 1}
    model = fresh()
    usual = {"model": model, "optimizer": sgd(model), "parallel": sizes, "context": context}
    engine = initialize(**{**usual, **given})
    return trained(engine.model, step=lambda number, batch: engine.train_step(batch), optimizer=object())


def _pipeline(context: ParallelContext, given: dict[str, Any]) -> Trace:
    model = shardformer.shard_model(fresh(), context=context)
    pipeline, optimizer = shardformer.Pipeline(**{"model": model, **given}), sgd(model)

    def step(number: int, batch: dict[str, Any]) -> Any:
        loss = pipeline.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trained(model, optimizer=optimizer, step=step)


def _stages(context: ParallelContext, given: dict[str, Any]) -> Trace:
    manager = shardformer.compat.PipelineStageManager(**{"context": context, **given})
    return loop_of(shardformer.shard_model(fresh(), context=context, pipeline_stage_manager=manager), context)


def _clip(context: ParallelContext, given: dict[str, Any]) -> Trace:
    model = shardformer.shard_model(fresh(), context=context)
    usual = {"model": model, "parameters": list(model.parameters()), "max_norm": 1e9}
    takes = inspect.signature(shardformer.clip_grad_norm_).parameters
    usual = {name: value for name, value in usual.items() if name in takes}
    return loop_of(model, context, between=lambda: shardformer.clip_grad_norm_(**{**usual, **given}))


def _with_model(function: Any, context: ParallelContext, given: dict[str, Any]) -> None:
    """Build the use of a function that takes a model and returns information about it."""
    model = fresh() if function is shardformer.derive_policy else shardformer.shard_model(fresh(), context=context)
    names = list(inspect.signature(function).parameters)
    usual = {names[0]: model, **({"optimizer": sgd(model)} if "optimizer" in names else {})}
    function(**{**usual, **given})


ABOUT_MODELS = (
    shardformer.describe_sharding,
    shardformer.full_state_dict,
    shardformer.gradients.grad_norm,
    shardformer.derive_policy,
    shardformer.estimate_memory,
    shardformer.meta_init.materialize,
    shardformer.no_sync,
)

ENTRIES = (
    Entry("shard_model", shardformer.compat.ShardConfig, _shard),
    Entry("shard_model", shardformer.shard_model, _shard, left_out=("kwargs", "options")),
    Entry("zero", shardformer.shard_optimizer, _zero, left_out=("max_grad_norm",)),
    Entry("Precision", shardformer.MixedPrecision, partial(_of_dataclass, shardformer.MixedPrecision, "precision")),
    Entry("Offload", shardformer.OffloadConfig, partial(_of_dataclass, shardformer.OffloadConfig, "offload")),
    Entry("Parallel", shardformer.ParallelConfig, _engine, left_out=("max_grad_norm",)),
    Entry("initialize", initialize, _initialize),
    Entry("Pipeline", shardformer.Pipeline, _pipeline),
    Entry("PipelineStageManager", shardformer.compat.PipelineStageManager, _stages),
    Entry("clip_grad_norm_", shardformer.clip_grad_norm_, _clip, left_out=("max_norm",)),
    *(Entry(function.__name__, function, partial(_with_model, function)) for function in ABOUT_MODELS),
)


@cache
def plain() -> Trace:
    return trained(fresh())


def cases() -> Iterator[Case]:
    number = 0
    for entry in ENTRIES:
        for argument in entry.arguments:
            for said, value in VALUES.items():
                for ranks in RANKS:
                    number += 1
                    sizes = LAYOUTS[number % len(LAYOUTS)]
                    if entry.name in ("Pipeline", "PipelineStageManager"):
                        sizes = {"pipe": 2}
                    run = partial(_given, entry, argument, value, ranks)
                    yield Case("argument", f"{entry.name}({argument}={said}) on {ranks}", sizes, run, plain)


def _given(entry: Entry, argument: str, value: Any, ranks: str, context: ParallelContext) -> Trace | None:
    last = max(axis.size for axis in context.axes.values()) - 1
    is_meant = {"the first rank": context.rank == 0, "the last rank": context.rank == last}.get(ranks, True)
    return entry.use(context, {argument: value} if is_meant else {})
