"""Simulation and validation of schedules."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardformer.errors import ConfigError
from shardformer.pipeline.schedules import (
    SCHEDULES,
    ActionKind,
    PipelineAction,
    PipelineSchedule,
    make_forward_only_schedule,
    make_schedule,
    simulate_schedule,
)
from tests.pipeline.schedule_checks import find_problems

F, B, INPUT, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT


def changed(schedule: PipelineSchedule, rank: int, order: tuple[PipelineAction, ...]) -> PipelineSchedule:
    return replace(schedule, actions=(*schedule.actions[:rank], order, *schedule.actions[rank + 1 :]))


def test_missing_action_is_reported() -> None:
    schedule = make_schedule("1f1b", 2, 3)
    broken = changed(schedule, 0, tuple(a for a in schedule.actions[0] if a != PipelineAction(B, 0, 2)))
    assert find_problems(broken) == ["B2@0 is missing"]


def test_duplicate_action_is_reported() -> None:
    schedule = make_schedule("gpipe", 2, 2)
    broken = changed(schedule, 1, (*schedule.actions[1], PipelineAction(B, 1, 1)))
    assert find_problems(broken) == ["B1@1 occurs 2 times"]


def test_action_of_unknown_stage_is_reported() -> None:
    schedule = make_schedule("gpipe", 2, 2)
    assert "F2@0 names an unknown stage or micro-batch" in find_problems(
        changed(schedule, 0, (*schedule.actions[0], PipelineAction(F, 0, 2)))
    )


def test_action_on_wrong_rank_is_reported() -> None:
    schedule = make_schedule("interleaved", 2, 2)
    assert (
        find_problems(replace(schedule, placement=(0, 1, 1, 0)))[0] == "F0@2 is on rank 0, but its stage is on rank 1"
    )
    assert "on rank" in find_problems(replace(schedule, actions=schedule.actions[::-1]))[0]


@pytest.mark.parametrize(
    ("name", "rank", "one", "other"),
    [
        ("1f1b", 0, PipelineAction(F, 0, 0), PipelineAction(B, 0, 0)),  # a backward pass before its forward pass
        ("interleaved", 0, PipelineAction(F, 0, 0), PipelineAction(F, 2, 0)),  # a chunk before the one before
        ("zbv", 1, PipelineAction(F, 1, 0), PipelineAction(F, 2, 0)),  # the bottom of the V, on one rank
        ("zbv", 1, PipelineAction(INPUT, 2, 0), PipelineAction(INPUT, 1, 0)),
        ("zbv", 0, PipelineAction(INPUT, 3, 0), PipelineAction(W, 3, 0)),
    ],
)
def test_impossible_order_is_reported(name: str, rank: int, one: PipelineAction, other: PipelineAction) -> None:
    schedule = make_schedule(name, 2, 2)
    swapped = {one: other, other: one}
    broken = changed(schedule, rank, tuple(swapped.get(a, a) for a in schedule.actions[rank]))
    (said,) = find_problems(broken)
    assert "deadlocks: " in said and f"rank {rank} cannot run {other}" in said
    with pytest.raises(ConfigError, match="deadlocks"):
        simulate_schedule(broken)


def test_deadlock_between_ranks_is_reported() -> None:
    """Each list is valid alone: rank 0 runs a backward pass before the forward pass that rank 1 needs."""
    orders = (
        (PipelineAction(F, 0, 0), PipelineAction(B, 0, 0), PipelineAction(F, 0, 1), PipelineAction(B, 0, 1)),
        (PipelineAction(F, 1, 0), PipelineAction(F, 1, 1), PipelineAction(B, 1, 0), PipelineAction(B, 1, 1)),
    )
    broken = replace(make_schedule("1f1b", 2, 2), actions=orders)
    assert find_problems(broken) == [
        "The schedule '1f1b' deadlocks: rank 0 cannot run B0@0 before B0@1, rank 1 cannot run F1@1 before F1@0"
    ]


def test_inconsistent_kinds_are_reported() -> None:
    schedule = make_schedule("1f1b", 1, 1)
    broken = changed(schedule, 0, (*schedule.actions[0], PipelineAction(INPUT, 0, 0), PipelineAction(W, 0, 0)))
    assert find_problems(broken) == ["its actions are B, F, I, W instead of F; F and B; or F, I and W"]


@given(st.sampled_from(SCHEDULES), st.integers(1, 5), st.data())
def test_removing_any_action_is_reported(name: str, stages: int, data: st.DataObject) -> None:
    schedule = make_schedule(name, stages, 2 * stages)
    rank = data.draw(st.integers(0, stages - 1))
    order = schedule.actions[rank]
    gone = data.draw(st.integers(0, len(order) - 1))
    assert f"{order[gone]} is missing" in find_problems(changed(schedule, rank, order[:gone] + order[gone + 1 :]))


# ---------------------------------------------------------------------------------------------------------------- times


def test_actions_start_when_dependencies_end() -> None:
    timeline = simulate_schedule(make_schedule("1f1b", 2, 1), {F: 1, B: 3}, send_duration=0.5)
    assert [[(str(a), start, end) for a, start, end in row] for row in timeline.spans] == [
        [("F0@0", 0, 1), ("B0@0", 6, 9)],
        [("F0@1", 1.5, 2.5), ("B0@1", 2.5, 5.5)],
    ]
    assert timeline.makespan == 9 and timeline.idle == (5, 5)
    assert timeline.bubble == pytest.approx(10 / 18)


def test_slow_stage_limits_throughput() -> None:
    """The last stage includes the head."""
    slow = simulate_schedule(make_schedule("1f1b", 2, 4), {F: 1, B: 2, (F, 1): 2, (B, 1): 4})
    assert [span.end - span.start for span in slow.spans[0][:2]] == [1, 1]
    assert slow.makespan == 1 + 4 * (2 + 4) + 2
    with pytest.raises(ConfigError, match="stage 2"):
        simulate_schedule(make_schedule("1f1b", 2, 4), {(F, 2): 2})


def test_local_results_have_no_send_time() -> None:
    """Covers the bottom of the V, and a pipeline of one rank."""
    assert simulate_schedule(make_schedule("zbv", 1, 4), send_duration=5).bubble == 0
    of_v = {
        span.action: span
        for row in simulate_schedule(make_schedule("zbv", 2, 1), send_duration=5).spans
        for span in row
    }
    assert of_v[PipelineAction(F, 2, 0)].start == of_v[PipelineAction(F, 1, 0)].end
    assert of_v[PipelineAction(F, 3, 0)].start == of_v[PipelineAction(F, 2, 0)].end + 5


@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.lists(st.floats(0.1, 9), min_size=4, max_size=4))
def test_actions_do_not_overlap_and_idle_time_adds_up(name: str, stages: int, times: list[float]) -> None:
    timeline = simulate_schedule(
        make_schedule(name, stages, 2 * stages), dict(zip((F, B, INPUT, W), times)), send_duration=0.3
    )
    for row, idle in zip(timeline.spans, timeline.idle):
        assert all(before.end <= after.start for before, after in pairwise(row))
        gaps = [after.start - before.end for before, after in pairwise(row)]
        assert idle == pytest.approx(row[0].start + sum(gaps) + timeline.makespan - row[-1].end, abs=1e-6)
    assert timeline.bubble == pytest.approx(sum(timeline.idle) / (stages * timeline.makespan))


def test_forwards_fill_and_drain_pipeline_once() -> None:
    timeline = simulate_schedule(make_forward_only_schedule(make_schedule("1f1b", 4, 8)))
    assert timeline.makespan == 8 + 3
    assert timeline.in_flight == (8, 8, 8, 8)


@pytest.mark.parametrize("time", [0.0, -1.0, float("inf"), float("nan")])
def test_invalid_duration_raises(time: float) -> None:
    with pytest.raises(ConfigError, match="duration B="):
        simulate_schedule(make_schedule("1f1b", 2, 2), {B: time})
    with pytest.raises(ConfigError, match="duration B@1="):
        simulate_schedule(make_schedule("1f1b", 2, 2), {(B, 1): time})
    if time:
        with pytest.raises(ConfigError, match="send="):
            simulate_schedule(make_schedule("1f1b", 2, 2), send_duration=time)
