"""What ``describe`` says of a pipeline: which stage holds what, what it costs, and how long stages wait."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

from shardformer.pipeline.schedule import fitting_micro_batches, make_schedule
from shardformer.pipeline.timing import simulate
from shardformer.sharding.stages import Stages
from shardformer.sharding.text_table import aligned, percent, wrapped

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
    in_layers = {n for n in names if any(n.startswith(f"{path}.") for path in stages.chain.units)}
    total = stages.num_parameters
    cost = max(sum(stages.costs), 1e-30)
    counts = stages.manager.checkpointed([len(span) for span in stages.spans])
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
                ", ".join(in_short([stages.chain.units[unit] for unit in units])),
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
    return [*aligned(shown, shown[0].index("parameters")), "", *_schedule_lines(stages), *shared_lines(stages)]


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


def in_short(paths: Sequence[str]) -> list[str]:
    """Paths that end in indices, those of one stack in ranges; those that come several times with their number.

    >>> in_short(["h.0", "h.1", "h.2", "h.6", "encoder.0"])
    ['h.0-2, 6', 'encoder.0']
    >>> in_short(["h.0", "h.0", "h.1"])
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
