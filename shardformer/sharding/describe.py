"""What was done to a model, in words and rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import nn

from shardformer.layout.state import ShardedState, cut_in, specs_of, state_of
from shardformer.sharding.describe_stages import StageRow, stage_lines, stage_rows
from shardformer.sharding.stages import Stages
from shardformer.sharding.text_table import percent, table, whole_rows


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
    state = state_of(model)
    specs = specs_of(model)
    stages = state.stages if state.stages is not None and state.stages.manager.num_stages > 1 else None
    layers: dict[str, int] = {}

    def pattern(path: str) -> str:
        return _pattern(model, path, layers, stages)

    cut: dict[str, tuple[str, str]] = {}  # of a parameter, or of the first of a module that is cut: full shape, part's
    for name, param, spec in cut_in(model):
        for path in (name, name.rpartition(".")[0]) if spec.is_sharded else ():
            cut.setdefault(path, (_shape(spec.shape), _shape(param.shape)))
    rows: Counter[tuple[str, str, str, str, str]] = Counter()
    changes: Counter[tuple[str, str, str]] = Counter()
    for r in state.replacements:
        if stages is not None and stages.is_elsewhere(r.path):
            continue
        shapes = cut.get(r.path) if r.kind == "module" else None
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
        _title(model, state, total),
        [(*row, n) for row, n in rows.items()],
        [(*change, n) for change, n in changes.items()],
        [(*of, n, size / total) for of, (n, size) in whole.items()],
        [*state.notes, *([state.gradients.describe()] if state.gradients is not None else [])],
        layers,
        rows_of_stages,
        [] if stages is None else stage_lines(rows_of_stages, stages),
    )


def _title(model: nn.Module, state: ShardedState, total: int) -> str:
    local = sum(p.numel() for p in model.parameters())
    given = [name for name, value in state.request.options.items() if value is True]
    effect = [n for n in given if n != "enable_tensor_parallelism" or state.context.tensor.size > 1]
    on = ", ".join(name.removeprefix("enable_").replace("_", " ") for name in effect)
    return (
        f"{type(model).__name__} over {state.context}, by {state.request.source}\n"
        + (f"on: {on}\n" if on else "")
        + f"{total:,} parameters, {local:,} of them on this rank ({local / total:.1%})"
    )


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
