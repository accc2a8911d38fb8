"""What was done to a model: kept beside it, and printed by ``describe``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import nn

from shardformer.comm.params import param_specs
from shardformer.errors import ConfigError
from shardformer.layers.tensor.block import Block
from shardformer.layers.tensor.sequence import SequenceRegion, WholeSequence
from shardformer.mesh.context import ParallelContext
from shardformer.policies.policy import Policy
from shardformer.reduce.buckets import GradientAverager
from shardformer.sharding.describe_stages import StageRow, stage_lines, stage_rows
from shardformer.sharding.stages import Stages
from shardformer.sharding.text_table import percent, table, whole_rows

ATTRIBUTE = "_shardformer_record"


@dataclass(frozen=True)
class Replacement:
    """One thing that was replaced: where, what stood there, what stands there now."""

    path: str
    before: str
    after: str
    kind: str = "module"


@dataclass
class ShardRecord:
    """Everything about how a model was sharded.

    Args:
        context: the grid it lives on.
        source: which link of the chain gave the policy.
        options: the options of the config.
        policy: by which it was sharded.
        extra_kwargs: those of the config.
        check_call: raises ConfigError for arguments of a forward that the sharded model cannot do.
        replacements: in the order in which they were made.
        notes: things worth knowing, such as which attention kernel was chosen.
        averagers: what agrees on gradients with other ranks.
        stages: how a pipeline cut the model.
        edges: where the tensor-parallel regions begin and end.
        num_parameters: how many tensors the model trained when it was sharded.
        gathers: how often its full weights were asked for.
    """

    context: ParallelContext
    source: str
    options: dict[str, bool | str]
    replacements: list[Replacement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    averagers: list[GradientAverager] = field(default_factory=list)
    stages: Stages | None = None
    edges: list[Block | SequenceRegion | WholeSequence] = field(default_factory=list)
    num_parameters: int = 0
    gathers: int = 0
    policy: Policy | None = None
    extra_kwargs: dict[str, Any] = field(default_factory=dict)
    check_call: Callable[[nn.Module, Mapping[str, Any]], None] | None = None

    def add(self, path: str, before: Any, after: Any, kind: str = "module") -> None:
        self.replacements.append(Replacement(path, _name(before), _name(after), kind))


def record_of(model: nn.Module) -> ShardRecord:
    """The record of a sharded model. Raises ConfigError for one that is not."""
    record = model.__dict__.get(ATTRIBUTE)
    if not isinstance(record, ShardRecord):
        raise ConfigError(
            f"This {type(model).__name__} is not sharded",
            rule="What was done to a model is kept by the model that shard_model returned",
            remedy="Call shardformer.shard_model(model) first, and give the model itself, not a wrapper of it",
        )
    return record


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward in here accumulates gradients without agreeing on them with other ranks; the first one after it does.

    For all but the last of the backwards of one optimizer step. Leaving it out is right too, and only costs traffic.

    >>> with no_sync(model):                    # doctest: +SKIP
    ...     model(**first_half).loss.backward()
    >>> model(**second_half).loss.backward()    # doctest: +SKIP
    """
    with ExitStack() as pauses:
        for averager in record_of(model).averagers:
            pauses.enter_context(averager.paused())
        yield


@dataclass(frozen=True)
class Description:
    """What ``describe`` gives: print it, or read its rows. In a path ``*`` stands for the index of a layer.

    Args:
        title: the model, the grid, the policy's source, the options that are on, how many parameters.
        rows: (path, class before, class now, full shape, shape on this rank, how many) of what was cut.
        changes: (path, before, now, how many) of all else that was replaced.
        whole: (path, shape, how many, share of all parameters) of what every rank holds in full.
        notes: sentences.
        layers: path of a stack's layers -> how many there are.
        stages: a row for each stage of a pipeline, and none without one.
        stage_text: their table, the schedule and what stages share, as lines.
    """

    title: str
    rows: list[tuple[str, str, str, str, str, int]]
    changes: list[tuple[str, str, str, int]]
    whole: list[tuple[str, str, int, float]]
    notes: list[str]
    layers: dict[str, int]
    stages: list[StageRow] = field(default_factory=list)
    stage_text: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [self.title]
        if self.stages:
            lines += ["", *self.stage_text]
        if self.rows:
            rows = [(path, tuple(cells), n) for path, *cells, n in self.rows]
            lines += ["", *table(("cut", "was", "is", "full", "on this rank"), rows, self.layers)]
        if self.changes:
            changed = [(path, (before, after), n) for path, before, after, n in self.changes]
            lines += ["", *table(("changed", "was", "is"), changed, self.layers)]
        if self.whole:
            share = f"{percent(sum(share for *_, share in self.whole))} of all"
            held = "whole on every rank of this stage" if self.stages else "whole on every rank"
            lines += ["", *table((held, "shape", share), whole_rows(self.whole), self.layers)]
        return "\n".join([*lines, *[f"\n{note}" for note in self.notes]])


def describe(model: nn.Module) -> Description:
    """What was replaced by what, with full and local shapes, what stayed whole, and who said so.

    Raises ConfigError for a model that is not sharded.
    """
    record, specs = record_of(model), param_specs(model)
    stages = record.stages if record.stages is not None and record.stages.manager.num_stages > 1 else None
    layers: dict[str, int] = {}

    def pattern(path: str) -> str:
        return _pattern(model, path, layers, stages)

    rows: Counter[tuple[str, str, str, str, str]] = Counter()
    changes: Counter[tuple[str, str, str]] = Counter()
    for r in record.replacements:
        if stages is not None and stages.is_elsewhere(r.path):
            continue
        shapes = _cut_shapes(model, r.path) if r.kind == "module" else None
        change = (pattern(r.path) or type(model).__name__, r.before, r.after)
        if shapes is None:
            changes[change] += 1
        else:
            rows[*change, *shapes] += 1
    whole: dict[tuple[str, str], tuple[int, int]] = {}
    for name, p in model.named_parameters():
        if not specs[name].is_sharded:
            of = (pattern(name), _shape(p.shape))
            count, size = whole.get(of, (0, 0))
            whole[of] = (count + 1, size + p.numel())
    here = sum(prod(specs[n].shape) for n, _ in model.named_parameters())
    total = max(here if stages is None else stages.num_parameters, 1)
    rows_of_stages = [] if stages is None else stage_rows(stages)
    return Description(
        _title(model, record, total),
        [(*row, n) for row, n in rows.items()],
        [(*change, n) for change, n in changes.items()],
        [(*of, n, size / total) for of, (n, size) in whole.items()],
        list(record.notes),
        layers,
        rows_of_stages,
        [] if stages is None else stage_lines(rows_of_stages, stages),
    )


def _title(model: nn.Module, record: ShardRecord, total: int) -> str:
    local = sum(p.numel() for p in model.parameters())
    given = [name for name, value in record.options.items() if value is True]
    effect = [n for n in given if n != "enable_tensor_parallelism" or record.context.tensor.size > 1]
    on = ", ".join(name.removeprefix("enable_").replace("_", " ") for name in effect)
    return (
        f"{type(model).__name__} over {record.context}, by {record.source}\n"
        + (f"on: {on}\n" if on else "")
        + f"{total:,} parameters, {local:,} of them on this rank ({local / total:.1%})"
    )


def _cut_shapes(model: nn.Module, path: str) -> tuple[str, str] | None:
    """Full and local shape of the parameter at ``path``, or of the first of the module there that is cut."""
    owner, _, own = path.rpartition(".")
    parent = model.get_submodule(owner)
    module = parent if own in parent._parameters or own in parent._buffers else model.get_submodule(path)
    for name, spec in module.__dict__.get("shard_specs", {}).items():
        if module is parent and name != own:
            continue
        param = module._parameters.get(name)
        if param is not None and spec.is_sharded:
            return _shape(spec.shape), _shape(param.shape)
    return None


def _name(thing: Any) -> str:
    if isinstance(thing, str):
        return thing
    if isinstance(thing, nn.Module):
        return type(thing).__name__
    return getattr(thing, "__name__", repr(thing))


def _pattern(model: nn.Module, path: str, layers: dict[str, int], stages: Stages | None = None) -> str:
    """``path`` with ``*`` for the index of a stack of equal modules, whose number here is noted in ``layers``."""
    out: list[str] = []
    module: Any = model
    for at, part in enumerate(path.split(".")):
        before = path.split(".")[:at]
        siblings = list(module.children()) if part.isdigit() and isinstance(module, nn.Module) else []
        if siblings and len({type(m) for m in siblings}) == 1:
            out.append("*")
            if ".".join(out) not in layers:
                names = [".".join([*before, name]) for name, _ in module.named_children()]
                layers[".".join(out)] = sum(stages is None or not stages.is_elsewhere(name) for name in names)
        else:
            out.append(part)
        module = getattr(module, part, None)
    return ".".join(out)


def _shape(shape: Any) -> str:
    return " x ".join(str(n) for n in shape) or "scalar"
