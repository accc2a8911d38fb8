"""What ``describe`` says of a pipeline: which stage holds what, what it costs, and how long stages wait."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardformer.pipeline.schedule import fitting_micro_batches, make_schedule
from shardformer.pipeline.timing import simulate
from shardformer.sharding.stages import Stages
from shardformer.sharding.text_table import percent

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
    several = any(len(row.virtual_stages) > 1 for row in rows)
    recomputed = any(row.checkpointed for row in rows)
    head = ["stage", *(["virtual"] if several else []), "layers", "beside them", "parameters", "of all", "cost"]
    lines = [[*head, *(["recomputed"] if recomputed else [])]]
    for row in rows:
        layers, beside = _wrapped(row.layers, WIDTH), _wrapped(row.beside, BESIDE_WIDTH)
        for at in range(max(len(layers), len(beside), 1)):
            names = [cell[at] if at < len(cell) else "" for cell in (layers, beside)]
            first = [str(row.stage), *([", ".join(map(str, row.virtual_stages))] if several else [])]
            last = [f"{row.parameters:,}", percent(row.share), percent(row.cost)]
            last += [str(row.checkpointed)] if recomputed else []
            lines.append([*first, *names, *last] if not at else [*[""] * len(first), *names, *[""] * len(last)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    numbers = lines[0].index("parameters")
    table = [
        "  ".join(c.rjust(w) if i >= numbers else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
    return [*(line.rstrip() for line in table), "", *_schedule_lines(stages), *shared_lines(stages)]


def _schedule_lines(stages: Stages) -> list[str]:
    manager = stages.manager
    said: list[str] = []
    held = ""
    for factor in (2, 8):
        least = factor * manager.num_stages
        count = fitting_micro_batches(manager.schedule, manager.num_stages, manager.num_model_chunks, least)
        schedule = make_schedule(manager.schedule, manager.num_stages, count, manager.num_model_chunks)
        timeline = simulate(schedule)
        said.append(
            f"{timeline.bubble:.0%}{'' if said else ' of the time'} with {count}{'' if said else ' micro-batches'}"
        )
        held = ", ".join(map(str, timeline.in_flight))
    of = ", each in one virtual stage" if manager.num_model_chunks > 1 else ""
    text = (
        f"schedule {manager.schedule}: if stages take equally long, they are idle {', '.join(said)}. In order they "
        f"hold the activations of {held} micro-batches{of}."
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
    stacks: dict[str, list[int]] = {}
    for path in times:
        stack, _, last = path.rpartition(".")
        if last.isdigit():
            stacks.setdefault(stack, []).append(int(last))
        else:
            stacks.setdefault(path, []).append(-1)
    out = []
    for stack, indices in stacks.items():
        if max(times.values()) > 1:
            out += [
                f"{path} ({n} times)" if n > 1 else path for path, n in times.items() if path.startswith(f"{stack}.")
            ]
            continue
        runs: list[tuple[int, int]] = []
        for index in indices:
            if runs and index == runs[-1][1] + 1:
                runs[-1] = (runs[-1][0], index)
            else:
                runs.append((index, index))
        shown = ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)
        out.append(f"{stack}.{shown}" if indices[0] >= 0 else stack)
    return out


def modules_of(names: Collection[str], every: Mapping[str, object]) -> list[str]:
    """The shortest paths that stand for these parameters and for no others of ``every``.

    >>> modules_of(["e.word.weight", "e.place.weight", "h.weight"], dict.fromkeys(["e.word.weight", "e.place.weight",
    ...     "h.weight", "h.bias"]))
    ['e', 'h.weight']
    """
    inside: dict[str, int] = {}
    wanted = set(names)
    counts: dict[str, int] = {}
    for name in every:
        for path in _ancestors(name):
            counts[path] = counts.get(path, 0) + 1
            inside[path] = inside.get(path, 0) + (name in wanted)
    found = {next(path for path in _ancestors(name) if counts[path] == inside[path]) for name in wanted}
    return [path for path in dict.fromkeys(p for name in every for p in _ancestors(name)) if path in found]


def _ancestors(name: str) -> list[str]:
    """``a``, ``a.b``, ``a.b.c`` of ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _wrapped(names: str, width: int) -> list[str]:
    kept = re.sub(r" (?=\(|times)", "\xa0", names)  # how often belongs to the name before it
    words = [w if len(w) <= width else _in_two(w, width) for w in kept.split(" ")]
    lines = textwrap.wrap(" ".join(words), width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def _in_two(path: str, width: int) -> str:
    at = path.rfind(".", 0, width) + 1
    return f"{path[:at]} {path[at:]}" if at else path
