"""What a schedule costs: when each action runs if it takes so long, what is idle, what is held, and what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from shardformer.errors import ConfigError
from shardformer.pipeline.actions import Action, Kind
from shardformer.pipeline.schedule import Schedule, check_names
from shardformer.pipeline.zero_bubble import most_held

DURATIONS: Mapping[Kind, float] = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}
"""In the time of the forward of one chunk. A backward is two matrix products for a forward's one."""
Durations = Mapping[Kind, float] | Mapping[Kind | tuple[Kind, int], float]
_SHOWN_PROBLEMS = 5


class Span(NamedTuple):
    """When an action begins and ends."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule played through, with a row for each rank of the pipe axis.

    Args:
        makespan: from the first action's begin to the last one's end.
        idle: for each rank the time in which it does nothing.
        bubble: the idle time of all ranks as a share of all their time, from 0 to 1.
        in_flight: for each rank the most activations that it holds at a time, each of one micro-batch in one chunk,
            from its F to the end of its backward: its B, or its W.
    """

    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    idle: tuple[float, ...]
    bubble: float
    in_flight: tuple[int, ...]


def simulate(schedule: Schedule, durations: Durations = DURATIONS, send: float = 0.0) -> Timeline:
    """Plays a schedule through: each rank begins its next action as soon as what the action needs is there.

    Args:
        durations: of each kind of action, in any unit, or by (kind, virtual stage) where the stages differ. Those that
            are left out are ``DURATIONS``.
        send: how long a result is on its way to another rank; the sender goes on meanwhile.

    Raises ConfigError for a duration that cannot be or is of no stage, and for a schedule that stands still.
    """
    of: dict[Any, float] = {**DURATIONS, **durations}
    named = {f"duration {f'{k[0]}@{k[1]}' if isinstance(k, tuple) else k}": number for k, number in of.items()}
    for name, number in [*named.items(), ("send", send)]:
        least = "0 or more" if name == "send" else "a positive number"
        if not (0 <= number < inf) or (number == 0 and name != "send"):
            raise ConfigError(f"{name}={number:g}", rule=f"A time is finite, this one {least}", remedy=f"Use {least}")
    if beyond := [key for key in durations if isinstance(key, tuple) and not 0 <= key[1] <= schedule.last]:
        raise ConfigError(
            f"A duration is given for stage {beyond[0][1]}",
            rule=f"The virtual stages are 0 to {schedule.last}",
            remedy="Name one of them, or the kind of action alone",
        )
    spans, stuck = _play(schedule, of, send)
    if stuck:
        raise _broken(schedule, [stuck])
    makespan = max((row[-1].end for row in spans if row), default=0.0)
    idle = tuple(max(0.0, makespan - sum(span.end - span.start for span in row)) for row in spans)
    return Timeline(
        spans=tuple(tuple(row) for row in spans),
        makespan=makespan,
        idle=idle,
        bubble=sum(idle) / (len(idle) * makespan) if makespan else 0.0,
        in_flight=tuple(most_held(order) for order in schedule.actions),
    )


def formula(name: str, stages: int, micro_batches: int, chunks: int) -> float | None:
    """The bubble in closed form, if sending takes no time, and F, I and W the same; None where there is no such form.

    With p stages, m micro-batches and v chunks a rank works for v m pairs of F and B, and waits for p - 1::

        gpipe, 1f1b     (p - 1) / (m + p - 1)          p=4, m=8: 3 / 11 = 27 %
        interleaved     (p - 1) / (v m + p - 1)        p=4, m=8, v=2: 3 / 19 = 16 %
        interleaved_zb  (p - 1) / (3 v m + p - 1)      p=4, m=8, v=2: 3 / 51 = 6 %
    """
    check_names(name, stages, chunks)
    if name == "zbv":
        return None
    pairs = chunks * micro_batches * (3 if name == "interleaved_zb" else 1)
    return (stages - 1) / (pairs + stages - 1)


def check(schedule: Schedule) -> None:
    """Raises ConfigError when a schedule cannot be run: see ``problems``."""
    found = problems(schedule)
    if found:
        raise _broken(schedule, found)


def problems(schedule: Schedule) -> list[str]:
    """What is wrong with a schedule, in words: actions that are missing, twice, elsewhere, or in no possible order.

    One without any backward is whole, too: it evaluates.
    """
    done = Counter(action for order in schedule.actions for action in order)
    kinds = {action.kind for action in done} | {Kind.FORWARD}
    found = []
    if kinds not in ({Kind.FORWARD}, {Kind.FORWARD, Kind.BACKWARD}, {Kind.FORWARD, Kind.INPUT, Kind.WEIGHT}):
        found.append(f"its kinds are {', '.join(sorted(kinds))}, not F; F and B; or F, I and W")
    stages, micro_batches = range(schedule.last + 1), range(schedule.micro_batches)
    wanted = {Action(kind, stage, i) for kind in kinds for stage in stages for i in micro_batches}
    found += [f"{action} is missing" for action in sorted(wanted - done.keys())]
    found += [f"{action} is there {count} times" for action, count in sorted(done.items()) if count > 1]
    found += [f"{action} is of no stage and micro-batch of this schedule" for action in sorted(done.keys() - wanted)]
    for rank, order in enumerate(schedule.actions):
        for action in order:
            if action in wanted and schedule.placement[action.stage] != rank:
                found.append(f"{action} is on rank {rank}, its stage on rank {schedule.placement[action.stage]}")
    stuck = _play(schedule, DURATIONS, 0.0)[1]
    return found + [stuck] if stuck else found


def _play(schedule: Schedule, durations: Mapping[Any, float], send: float) -> tuple[list[list[Span]], str]:
    """The spans of each rank, and how it stands when no rank can go on ("" when all is done)."""
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    ended: dict[Action, tuple[float, int]] = {}
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.actions):
            while len(spans[rank]) < len(order):
                action = order[len(spans[rank])]
                needs = action.needs(schedule.last)
                if any(need not in ended for need in needs):
                    break
                there = [end + (send if other != rank else 0.0) for end, other in map(ended.__getitem__, needs)]
                start = max([spans[rank][-1].end if spans[rank] else 0.0, *there])
                at_stage = (action.kind, action.stage)
                ended[action] = start + durations.get(at_stage, durations[action.kind]), rank
                spans[rank].append(Span(action, start, ended[action][0]))
                moved = True
    waiting = []
    for rank, order in enumerate(schedule.actions):
        if len(spans[rank]) < len(order):
            action = order[len(spans[rank])]
            missing = [str(need) for need in action.needs(schedule.last) if need not in ended]
            waiting.append(f"rank {rank} waits with {action} for {' and '.join(missing)}")
    return spans, "it stands still: " + ", ".join(waiting) if waiting else ""


def _broken(schedule: Schedule, found: list[str]) -> ConfigError:
    more = f"; and {len(found) - _SHOWN_PROBLEMS} more" if len(found) > _SHOWN_PROBLEMS else ""
    return ConfigError(
        f"The schedule {schedule.name!r} cannot be run: {'; '.join(found[:_SHOWN_PROBLEMS])}{more}",
        rule="Every action is done once, by the rank of its stage, after what it needs",
        remedy="Build it with make_schedule, or mend the named actions",
    )
