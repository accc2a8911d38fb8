"""Describes a sharded model: what was replaced, how parameters are sharded, and what each stage holds."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from math import prod
from typing import Any

from torch import nn

from shardformer.layout.sharding_metadata import ShardingMetadata, metadata_of, shard_specs, sharded_parameters
from shardformer.pipeline.schedules import fitting_micro_batches, make_schedule, simulate
from shardformer.pipeline.stage_manager import Stages

NAME_WIDTH = 52
"""Of the first column; longer lists of names go on in the next line."""

TableRow = tuple[str, tuple[str, ...], int]
"""Path with ``*`` for the index of a layer, the cells behind it, and how many there are of it."""


def table(head: tuple[str, ...], rows: Sequence[TableRow], layers: Mapping[str, int]) -> list[str]:
    """The rows as aligned lines, under one line for each stack of layers.

    Args:
        head: the titles of the columns.
        layers: ``transformer.h.*`` -> how many layers that stack has.

    >>> print("\\n".join(table(("", "was", "is"), [("head", ("6", "3"), 1), ("h.*.q", ("6", "3"), 2),
    ...                                           ("h.*.k", ("6", "3"), 2), ("h.*.t", ("9", "5"), 1)], {"h.*": 2})))
            was  is
    head    6    3
    h.*: 2 layers
      q, k  6    3
      t     9    5   1 of 2
    """
    lines: list[tuple[str, ...]] = [head]
    for section, members in _sections(rows):
        if section:
            count = layers.get(section, 0)
            lines.append((f"{section}: {count} layer{'' if count == 1 else 's'}",))
        for names, cells in _merged(members, layers.get(section, 1)):
            first, *more = wrapped(names, NAME_WIDTH)
            indent = "  " if section else ""
            lines += [(indent + first, *cells), *[(f"{indent}  {rest}",) for rest in more]]
    return align_columns(lines)


def align_columns(lines: Sequence[Sequence[str]], numbers: int | None = None) -> list[str]:
    """The lines with their cells in columns, from ``numbers`` on at the right; a line of one cell stands alone."""
    columns = range(max(map(len, lines)))
    widths = [max((len(line[i]) for line in lines if i < len(line) > 1), default=0) for i in columns]

    def padded(at: int, cell: str) -> str:
        return cell.ljust(widths[at]) if numbers is None or at < numbers else cell.rjust(widths[at])

    return ["  ".join(padded(at, cell) for at, cell in enumerate(line)).rstrip() for line in lines]


def wrapped(names: str, width: int, together: str = "(?<=:) ") -> list[str]:
    """The names in lines of that width; a space that matches ``together`` stays, and a long path breaks at a dot."""
    words = [_in_two(word, width) for word in re.sub(together, "\xa0", names).split(" ")]
    lines = textwrap.wrap(" ".join(words), width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def _in_two(path: str, width: int) -> str:
    at = path.rfind(".", 0, width) + 1 if len(path) > width else 0
    return f"{path[:at]} {path[at:]}" if at else path


def replicated_rows(parameters: Iterable[tuple[str, str, int, float]]) -> list[TableRow]:
    """Rows of whole parameters (path, shape, how many, share): those of a module, and modules alike, on one line."""
    leaves: dict[tuple[str, str, int], tuple[list[str], float]] = {}
    for path, shape, count, share in parameters:
        owner, _, leaf = path.rpartition(".")
        names, total = leaves.get((owner, shape, count), ([], 0.0))
        leaves[owner, shape, count] = ([*names, leaf], total + share)
    alike: dict[tuple[str, str, str, int], tuple[list[str], float]] = {}
    for (owner, shape, count), (names, share) in leaves.items():
        section = _section(owner)
        key = (section, ", ".join(names), shape, count)
        owners, total = alike.get(key, ([], 0.0))
        alike[key] = ([*owners, _inside(section, owner)], total + share)
    out: list[TableRow] = []
    for (section, names_, shape, count), (owners, share) in alike.items():
        text = f"{', '.join(owners)}: {names_}" if any(owners) else names_
        out.append((f"{section}.{text}" if section else text, (shape, percent(share)), count))
    return out


def percent(share: float) -> str:
    """``0.3%``, and ``<0.1%`` for what would look like nothing."""
    return f"{share:.1%}" if share >= 0.0005 or share == 0 else "<0.1%"


def _section(path: str) -> str:
    """The path up to the first index: ``transformer.h.*`` of ``transformer.h.*.attn``."""
    before, star, _ = f"{path}.".partition(".*.")
    return f"{before}.*" if star else ""


def _inside(section: str, path: str) -> str:
    return path[len(section) :].lstrip(".") or "the layer itself" if section else path


def _sections(rows: Sequence[TableRow]) -> list[tuple[str, list[TableRow]]]:
    found: dict[str, list[TableRow]] = {"": []}
    for path, cells, count in rows:
        section = _section(path)
        found.setdefault(section, []).append((_inside(section, path), cells, count))
    return [(section, members) for section, members in found.items() if members]


def _merged(rows: Sequence[TableRow], num_layers: int) -> list[tuple[str, tuple[str, ...]]]:
    """Names and cells; neighbours of one module that have the same cells share a line: ``attn.q, k, v``."""

    def alike(row: TableRow) -> tuple[str, tuple[str, ...], int, str]:
        path, cells, count = row
        return path.rpartition(".")[0], cells, count, path if ": " in path else ""

    out = []
    for _, neighbours in groupby(rows, alike):
        (first, cells, count), *others = neighbours
        names = [first, *(path.rpartition(".")[2] for path, *_ in others)]
        out.append((", ".join(names), (*cells, _how_many(count, num_layers))))
    return out


def _how_many(count: int, num_layers: int) -> str:
    if count == num_layers:
        return ""
    return f"{count} of {num_layers}" if count < num_layers else f"{count} times"


WIDTH, BESIDE_WIDTH = 46, 38
"""Of the two columns of names; more of them go on in the next line."""
TEXT_WIDTH = 116
MOST_NAMED = 3
"""More shared parameters than these are named by the modules that hold them."""


@dataclass(frozen=True)
class StageRow:
    """One stage.

    Args:
        stage: its rank on the pipe axis.
        virtual_stages: which it holds.
        layers: paths of its layers, ``model.layers.0-3``.
        beside: paths of what stands before and behind layers, and is its.
        parameters: how many numbers it holds, over all of its tensor ranks.
        share: of all parameters of the model.
        cost: what it computes, as a share of the whole model; as it was estimated, or given, for the cut.
        checkpointed: how many of its layers compute their activations again in the backward.
    """

    stage: int
    virtual_stages: tuple[int, ...]
    layers: str
    beside: str
    parameters: int
    share: float
    cost: float
    checkpointed: int


def stage_rows(stages: Stages) -> list[StageRow]:
    """A row for each rank of the pipe axis; the same on all of them."""
    names = stages.parameters
    in_layers = {n for n in names if any(n.startswith(f"{path}.") for path in stages.chain.layer_calls)}
    total = stages.num_parameters
    cost = max(sum(stages.costs), 1e-30)
    counts = stages.manager.recomputed([len(span) for span in stages.spans])
    rows = []
    for stage in range(stages.manager.num_stages):
        held = stages.manager.virtual_stages_of(stage)
        units = [unit for v in held for unit in stages.spans[v]]
        here = {name for name in names if stage in stages.stages_of(name)}
        size = sum(dict(names[name] for name in here).values())
        rows.append(
            StageRow(
                stage,
                held,
                ", ".join(abbreviate_paths([stages.chain.layer_calls[unit] for unit in units])),
                ", ".join(modules_of(here - in_layers, names)),
                size,
                size / max(total, 1),
                sum(stages.costs[unit] for unit in units) / cost,
                sum(counts[v] for v in held),
            )
        )
    return rows


def stage_lines(rows: list[StageRow], stages: Stages) -> list[str]:
    """The rows as an aligned table, then the schedule and what several stages hold."""
    head = ("stage", "virtual", "layers", "beside them", "parameters", "of all", "cost", "recomputed")
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        numbers = [f"{row.parameters:,}", percent(row.share), percent(row.cost), str(row.checkpointed)]
        layers = wrapped(row.layers, WIDTH, together=r" (?=\(|times)")
        virtual = ", ".join(map(str, row.virtual_stages))
        cells = [[str(row.stage)], [virtual], layers, wrapped(row.beside, BESIDE_WIDTH), *([n] for n in numbers)]
        lines += zip_longest(*cells, fillvalue="")
    says = {
        "virtual": any(len(row.virtual_stages) > 1 for row in rows),
        "recomputed": any(row.checkpointed for row in rows),
    }
    shown = [[cell for title, cell in zip(head, line, strict=True) if says.get(title, True)] for line in lines]
    return [*align_columns(shown, shown[0].index("parameters")), "", *_schedule_lines(stages), *shared_lines(stages)]


def _schedule_lines(stages: Stages) -> list[str]:
    name, num_stages, chunks = stages.manager.schedule, stages.manager.num_stages, stages.manager.num_model_chunks
    few, many = (fitting_micro_batches(name, num_stages, chunks, factor * num_stages) for factor in (2, 8))
    with_few, with_many = (simulate(make_schedule(name, num_stages, count, chunks)) for count in (few, many))
    of = ", each in one virtual stage" if chunks > 1 else ""
    text = (
        f"schedule {name}: if stages take equally long, they are idle {with_few.bubble:.0%} of the time with {few} "
        f"micro-batches, {with_many.bubble:.0%} with {many}. In order they hold the activations of "
        f"{', '.join(map(str, with_many.in_flight))} micro-batches{of}."
    )
    return textwrap.wrap(text, TEXT_WIDTH, break_on_hyphens=False)


def shared_lines(stages: Stages) -> list[str]:
    """A sentence for each set of stages that hold the same parameters."""
    groups: dict[tuple[int, ...], dict[str, list[str]]] = {}
    for name, held in stages.shared.items():
        first = stages.parameters[name][0]
        groups.setdefault(held, {}).setdefault(first, []).append(name)
    lines = []
    for held, tensors in groups.items():
        names = [_with_aliases(first, aliases) for first, aliases in tensors.items()]
        if len(names) > MOST_NAMED:
            everything = [name for aliases in tensors.values() for name in aliases]
            names = [f"all of {', '.join(modules_of(everything, stages.parameters))}"]
        verb, its = ("is", "its") if len(tensors) == 1 else ("are", "their")
        text = f"{', '.join(names)} {verb} held by stages {_listed(held)}; {its} gradients are summed."
        lines += textwrap.wrap(text, TEXT_WIDTH, break_on_hyphens=False)
    return lines


def _with_aliases(first: str, aliases: Iterable[str]) -> str:
    others = [name for name in aliases if name != first]
    return f"{first}, which is {' and '.join(others)}," if others else first


def _listed(numbers: Iterable[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}"


def abbreviate_paths(paths: Sequence[str]) -> list[str]:
    """Paths that end in indices, those of one stack in ranges; those that come several times with their number.

    >>> abbreviate_paths(["h.0", "h.1", "h.2", "h.6", "encoder.0"])
    ['h.0-2, 6', 'encoder.0']
    >>> abbreviate_paths(["h.0", "h.0", "h.1"])
    ['h.0 (2 times)', 'h.1']
    """
    times = Counter(paths)
    if max(times.values(), default=0) > 1:
        return [f"{path} ({n} times)" if n > 1 else path for path, n in times.items()]
    stacks: dict[str, list[int]] = {}
    for path in paths:
        stack, _, last = path.rpartition(".")
        stacks.setdefault(stack if last.isdigit() else path, []).extend([int(last)] if last.isdigit() else [])
    out = []
    for stack, indices in stacks.items():
        # in a run of indices their distance from their places is one
        runs = [[i for _, i in run] for _, run in groupby(enumerate(indices), lambda at: at[1] - at[0])]
        shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
        out.append(f"{stack}.{shown}" if shown else stack)
    return out


def modules_of(names: Collection[str], every: Mapping[str, object]) -> list[str]:
    """The shortest paths that stand for these parameters and for no others of ``every``.

    >>> modules_of(["e.word.weight", "e.place.weight", "h.weight"], dict.fromkeys(["e.word.weight", "e.place.weight",
    ...     "h.weight", "h.bias"]))
    ['e', 'h.weight']
    """
    wanted = set(names)
    counts = Counter(path for name in every for path in _ancestors(name))
    inside = Counter(path for name in wanted for path in _ancestors(name))
    found = {next(path for path in _ancestors(name) if counts[path] == inside[path]) for name in wanted}
    return [path for path in counts if path in found]


def _ancestors(name: str) -> list[str]:
    """``a``, ``a.b``, ``a.b.c`` of ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


@dataclass(frozen=True)
class ShardingDescription:
    """What ``describe_sharding`` gives: print it, or read its rows. In a path ``*`` stands for the index of a layer.

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
            lines += ["", *table((held, "shape", share), replicated_rows(self.whole), self.layers)]
        return "\n".join([*lines, *[f"\n{note}" for note in self.notes]])


def describe_sharding(model: nn.Module) -> ShardingDescription:
    """What was replaced by what, with full and local shapes, what stayed whole, and who said so.

    Raises ConfigError for a model that is not sharded.
    """
    state = metadata_of(model)
    specs = shard_specs(model)
    stages = state.stages if state.stages is not None and state.stages.manager.num_stages > 1 else None
    layers: dict[str, int] = {}

    def pattern(path: str) -> str:
        return _pattern(model, path, layers, stages)

    cut: dict[str, tuple[str, str]] = {}  # of a parameter, or of the first of a module that is cut: full shape, part's
    for name, param, spec in sharded_parameters(model):
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
    return ShardingDescription(
        _title(model, state, total),
        [(*row, n) for row, n in rows.items()],
        [(*change, n) for change, n in changes.items()],
        [(*of, n, size / total) for of, (n, size) in whole.items()],
        [*state.notes, *([state.gradient_owner.describe()] if state.gradient_owner is not None else [])],
        layers,
        rows_of_stages,
        [] if stages is None else stage_lines(rows_of_stages, stages),
    )


def _title(model: nn.Module, state: ShardingMetadata, total: int) -> str:
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
