"""Text rows of a schedule, and the oracle that finds what is wrong with one."""

from __future__ import annotations

from collections import Counter

from shardformer.errors import ConfigError
from shardformer.pipeline.schedule_chart import format_schedule_as_text
from shardformer.pipeline.schedules import ActionKind, PipelineAction, PipelineSchedule, Timeline, simulate_schedule


def grid_rows(schedule: PipelineSchedule, timeline: Timeline) -> list[str]:
    lines = (line.strip() for line in format_schedule_as_text(schedule, timeline).splitlines())
    return [line for line in lines if line.startswith("rank ")]


def find_problems(schedule: PipelineSchedule) -> list[str]:
    """Missing, duplicate, misplaced and deadlocking actions. A schedule without backward passes is valid."""
    done = Counter(action for order in schedule.actions for action in order)
    kinds = {action.kind for action in done} | {ActionKind.FORWARD}
    found = []
    if kinds not in ({*"F"}, {*"FB"}, {*"FIW"}):
        found.append(f"its actions are {', '.join(sorted(kinds))} instead of F; F and B; or F, I and W")
    stages, micro_batches = range(schedule.last_stage + 1), range(schedule.micro_batches)
    wanted = {PipelineAction(kind, stage, i) for kind in kinds for stage in stages for i in micro_batches}
    found += [f"{action} is missing" for action in sorted(wanted - done.keys())]
    found += [f"{action} occurs {count} times" for action, count in sorted(done.items()) if count > 1]
    found += [f"{action} names an unknown stage or micro-batch" for action in sorted(done.keys() - wanted)]
    for rank, order in enumerate(schedule.actions):
        for action in order:
            if action in wanted and schedule.placement[action.stage] != rank:
                found.append(f"{action} is on rank {rank}, but its stage is on rank {schedule.placement[action.stage]}")
    try:
        simulate_schedule(schedule)
    except ConfigError as error:
        found.append(error.what)
    return found
