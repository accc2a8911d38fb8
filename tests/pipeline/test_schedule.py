"""Schedules: their pictures, their common properties, and the properties of each."""

from __future__ import annotations

import re
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardformer.errors import ConfigError
from shardformer.pipeline import schedules
from shardformer.pipeline.schedules import (
    SCHEDULES,
    ActionKind,
    PipelineAction,
    assign_virtual_stages,
    check_schedule,
    compute_bubble_fraction,
    get_default_num_chunks,
    get_sent_actions,
    make_forward_only_schedule,
    make_schedule,
    round_up_num_micro_batches,
    simulate_schedule,
)
from tests.pipeline.schedule_checks import find_problems, grid_rows

WITH_CHUNKS = [
    *(("gpipe", 1), ("1f1b", 1), ("zbv", 2)),
    *((name, chunks) for name in ("interleaved", "interleaved_zb") for chunks in (2, 3, 4)),
]


def sizes(name: str, chunks: int, largest: int = 32) -> list[tuple[int, int]]:
    """Every p up to 8 with accepted m up to ``largest``: all small ones, some large ones."""
    fit = [(p, m) for p in range(1, 9) for m in (*range(1, 10), 12, 15, 16, 21, 24, 31, 32, 64) if m <= largest]
    return [(p, m) for p, m in fit if round_up_num_micro_batches(name, p, chunks, min_micro_batches=m) == m]


# ------------------------------------------------------------------------------------------------------------- pictures

PICTURES = {
    ("gpipe", 3, 3): """
        rank 0 | F0 F1 F2 .  .  .  .  .  .  B0 -- B1 -- B2 --
        rank 1 | .  F0 F1 F2 .  .  .  B0 -- B1 -- B2 -- .  .
        rank 2 | .  .  F0 F1 F2 B0 -- B1 -- B2 -- .  .  .  .
    """,
    ("1f1b", 3, 4): """
        rank 0 | F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --
        rank 1 | .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 -- .  .
        rank 2 | .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .  .
    """,
    ("1f1b", 3, 1): """
        rank 0 | F0 .  .  .  .  .  .  B0 --
        rank 1 | .  F0 .  .  .  B0 -- .  .
        rank 2 | .  .  F0 B0 -- .  .  .  .
    """,
    ("interleaved", 2, 2): """
        rank 0 | F0a F1a F0b F1b .   .   B0b --  .   B1b --  B0a --  B1a --
        rank 1 | .   F0a F1a F0b B0b --  F1b B1b --  B0a --  B1a --  .   .
    """,
    ("interleaved_zb", 2, 2): """
        rank 0 | F0a F1a F0b F1b .   I0b W0b I1b I0a I1a W1b W0a W1a
        rank 1 | .   F0a F1a F0b I0b F1b I1b I0a I1a W0b W1b W0a W1a
    """,
    ("zbv", 2, 2): """
        rank 0 | F0a F1a .   F0b I0b F1b I1b I0a W0b I1a W1b W0a W1a
        rank 1 | .   F0a F0b F1a F1b I0b I0a I1b I1a W0b W1b W0a W1a
    """,
    ("interleaved", 1, 2): """
        rank 0 | F0a F0b B0b --  F1a B0a --  F1b B1b --  B1a --
    """,
}


def lines(picture: str) -> list[str]:
    return [line.strip() for line in picture.strip().splitlines()]


@pytest.mark.parametrize(("name", "stages", "micro_batches"), PICTURES)
def test_schedule_matches_picture(name: str, stages: int, micro_batches: int) -> None:
    schedule = make_schedule(name, stages, micro_batches)
    assert grid_rows(schedule, simulate_schedule(schedule)) == lines(PICTURES[name, stages, micro_batches])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpipe", schedules._build_gpipe_schedule.__doc__),
        ("1f1b", schedules._build_1f1b_schedule.__doc__),
        ("interleaved", schedules._build_interleaved_schedule.__doc__),
        ("interleaved_zb", schedules.split_backwards_into_input_and_weight.__doc__),
        ("zbv", schedules._build_zero_bubble_v_schedule.__doc__),
    ],
)
def test_docstring_picture_matches_schedule(name: str, said: str | None) -> None:
    assert said is not None
    sizes = re.search(r"p=(\d), m=(\d)", said)
    assert sizes is not None
    schedule = make_schedule(name, int(sizes[1]), int(sizes[2]))
    drawn = [line.removeprefix("rank ") for line in grid_rows(schedule, simulate_schedule(schedule))]
    assert [line.strip() for line in said.splitlines() if " | " in line] == drawn


# ----------------------------------------------------------------------------------------------------- all of all sizes


@pytest.mark.reduced(at_most=5)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunks"), WITH_CHUNKS)
def test_every_schedule_of_every_size_is_valid(name: str, chunks: int) -> None:
    for stages, micro_batches in sizes(name, chunks):
        schedule = make_schedule(name, stages, micro_batches, chunks)
        assert find_problems(schedule) == [], (stages, micro_batches)
        assert find_problems(make_forward_only_schedule(schedule)) == [], (stages, micro_batches)
    assert find_problems(make_schedule(name, 8, 64, chunks)) == []


@pytest.mark.parametrize(("name", "chunks"), WITH_CHUNKS)
def test_stages_process_micro_batches_in_order(name: str, chunks: int) -> None:
    """Gradients are then summed in the same order under every schedule."""
    for stages, micro_batches in sizes(name, chunks, largest=16):
        for order in make_schedule(name, stages, micro_batches, chunks).actions:
            for kind, stage in {(action.kind, action.stage) for action in order}:
                assert [a.micro_batch for a in order if (a.kind, a.stage) == (kind, stage)] == [*range(micro_batches)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_only_zero_bubble_schedules_split_backwards(name: str) -> None:
    schedule = make_schedule(name, 4, 8)
    counts = Counter(action.kind for order in schedule.actions for action in order)
    of_each = schedule.stages * schedule.num_model_chunks * schedule.micro_batches
    kinds = (
        (ActionKind.FORWARD, ActionKind.INPUT, ActionKind.WEIGHT)
        if name in ("interleaved_zb", "zbv")
        else (ActionKind.FORWARD, "B")
    )
    assert counts == dict.fromkeys(kinds, of_each)


def test_drop_backward_keeps_order() -> None:
    for name in SCHEDULES:
        schedule = make_schedule(name, 4, 8)
        for alone, order in zip(make_forward_only_schedule(schedule).actions, schedule.actions):
            assert alone == tuple(action for action in order if action.kind is ActionKind.FORWARD)


def test_schedules_are_cached() -> None:
    assert make_schedule("zbv", 4, 8) is make_schedule("zbv", 4, 8)


def test_action_has_short_text() -> None:
    assert str(PipelineAction(ActionKind.INPUT, stage=2, micro_batch=13)) == "I13@2"


# ----------------------------------------------------------------------------------------------- what each one promises


@pytest.mark.reduced(at_most=4)
@pytest.mark.parametrize(("name", "chunks"), [pair for pair in WITH_CHUNKS if pair[0] != "zbv"])
def test_simulated_bubble_matches_formula(name: str, chunks: int) -> None:
    for stages, micro_batches in sizes(name, chunks):
        bubble = simulate_schedule(make_schedule(name, stages, micro_batches, chunks)).bubble
        assert bubble == pytest.approx(compute_bubble_fraction(name, stages, micro_batches, chunks)), (
            stages,
            micro_batches,
        )


def test_formulas_match_papers() -> None:
    assert compute_bubble_fraction("gpipe", 4, 8, 1) == compute_bubble_fraction("1f1b", 4, 8, 1) == 3 / 11
    assert compute_bubble_fraction("interleaved", 4, 8, 2) == 3 / 19
    assert compute_bubble_fraction("interleaved_zb", 4, 8, 2) == 3 / 51
    assert compute_bubble_fraction("zbv", 4, 8, 2) is None


def test_gpipe_keeps_all_micro_batches_and_1f1b_one_per_later_stage() -> None:
    for stages, micro_batches in sizes("1f1b", 1):
        of_gpipe, of_1f1b = (
            simulate_schedule(make_schedule(name, stages, micro_batches)).in_flight for name in ("gpipe", "1f1b")
        )
        assert of_gpipe == (micro_batches,) * stages
        assert of_1f1b == tuple(min(stages - rank, micro_batches) for rank in range(stages))


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_split_backward_does_not_raise_peak_memory(chunks: int) -> None:
    for stages, micro_batches in sizes("interleaved", chunks):
        whole, split = (
            max(simulate_schedule(make_schedule(name, stages, micro_batches, chunks)).in_flight)
            for name in ("interleaved", "interleaved_zb")
        )
        assert whole == min((chunks + 1) * stages - 1, chunks * micro_batches)
        assert split <= whole


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (2, 16), (4, 8), (8, 16)])
def test_zbv_hides_communication_and_unequal_durations(stages: int, micro_batches: int) -> None:
    schedule = make_schedule("zbv", stages, micro_batches)
    ideal = simulate_schedule(schedule).bubble
    assert simulate_schedule(schedule, send_duration=0.1).bubble < 1.5 * ideal
    assert simulate_schedule(schedule, {ActionKind.INPUT: 1.2, ActionKind.WEIGHT: 0.9}).bubble < 1.25 * ideal


def test_zbv_keeps_no_more_than_1f1b_and_idles_only_at_the_ends() -> None:
    for stages, micro_batches in sizes("zbv", 2, largest=64):
        timeline = simulate_schedule(make_schedule("zbv", stages, micro_batches))
        assert max(timeline.in_flight) <= 2 * stages
        # The last rank cannot begin before p - 1; all else is no more than 2 where there is enough to do.
        assert timeline.makespan >= 6 * micro_batches + stages - 1
        if micro_batches >= 2 * stages:
            assert timeline.makespan <= 6 * micro_batches + stages + 1, (stages, micro_batches)
        if stages > 1:
            one_f_one_b = compute_bubble_fraction("1f1b", stages, micro_batches, 1)
            assert one_f_one_b is not None and timeline.bubble < one_f_one_b, (stages, micro_batches)


# ------------------------------------------------------------------------------------------------- what is not possible


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1f2b", 4, 8), "schedule='1f2b' is not one of 'gpipe', .*Did you mean '1f1b'"),
        (("1f1b", 0, 8), "stages=0"),
        (("1f1b", 4, 0), "micro_batches=0.*Use 1 or more"),
        (("interleaved", 4, 0), "micro_batches=0.*Use 4 or more"),
        (("interleaved", 4, 10), "with 4 pipeline stages .*micro_batches=10.*Use 8 or 12"),
        (("interleaved_zb", 4, 3), "micro_batches=3.*Use 4 micro-batches,"),
        (("1f1b", 4, 8, 2), "chunks=1, but got 2.*Use num_model_chunks=1, or schedule='interleaved'"),
        (("gpipe", 4, 8, 2), "requires num_model_chunks=1, but got 2"),
        (("interleaved", 4, 8, 1), "at least 2, but got 1.*Use num_model_chunks=2 or more, or schedule='1f1b'"),
        (("interleaved", 4, 8, 0), r"at least 2, but got 0.*Use num_model_chunks=2 or more,"),
        (("zbv", 4, 8, 3), "chunks=2, but got 3.*Use num_model_chunks=2"),
    ],
)
def test_invalid_arguments_raise_with_alternative(arguments: tuple[str, int, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_schedule(*arguments)


@given(st.sampled_from(WITH_CHUNKS), st.integers(1, 8), st.integers(-3, 70))
def test_fitting_number_is_smallest_accepted(pair: tuple[str, int], stages: int, at_least: int) -> None:
    name, chunks = pair
    fitting = round_up_num_micro_batches(name, stages, chunks, at_least)
    assert fitting >= at_least and make_schedule(name, stages, fitting, chunks).micro_batches == fitting
    for smaller in range(max(1, at_least), fitting):
        with pytest.raises(ConfigError, match=f"or {fitting}|Use {fitting}"):
            make_schedule(name, stages, smaller, chunks)


def test_default_chunks_are_used() -> None:
    for name in SCHEDULES:
        check_schedule(name, 4, get_default_num_chunks(name))
        assert make_schedule(name, 4, 8) == make_schedule(name, 4, 8, get_default_num_chunks(name))


def test_actions_match_placement() -> None:
    assert assign_virtual_stages("1f1b", 3, 1) == (0, 1, 2)
    assert assign_virtual_stages("interleaved", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert assign_virtual_stages("zbv", 3, 2) == (0, 1, 2, 2, 1, 0)


# ------------------------------------------------------------------------------------------------------------- messages


def test_messages_are_in_order_of_execution() -> None:
    schedule = make_schedule("1f1b", 3, 2)
    assert [str(action) for action in get_sent_actions(schedule, 0, 1)] == ["F0@0", "F1@0"]
    assert [str(action) for action in get_sent_actions(schedule, 1, 0)] == ["B0@1", "B1@1"]
    assert (
        get_sent_actions(schedule, 0, 2) == get_sent_actions(schedule, 2, 0) == get_sent_actions(schedule, 1, 1) == ()
    )


def test_interleaved_is_a_ring_and_zbv_is_not() -> None:
    ring, v = make_schedule("interleaved", 3, 3), make_schedule("zbv", 3, 3)
    assert {action.stage for action in get_sent_actions(ring, 2, 0)} == {2}  # stage 2 of rank 2, then 3 of rank 0
    assert {action.stage for action in get_sent_actions(ring, 0, 2)} == {3}
    assert get_sent_actions(v, 2, 0) == get_sent_actions(v, 0, 2) == get_sent_actions(v, 2, 2) == ()
    # rank 2 has stages 2 and 3: its F of 3 goes up, its I of 2 comes back; F of 2 and I of 3 stay
    assert {(action.kind, action.stage) for action in get_sent_actions(v, 2, 1)} == {
        (ActionKind.FORWARD, 3),
        (ActionKind.INPUT, 2),
    }


@pytest.mark.parametrize(("name", "chunks"), WITH_CHUNKS)
def test_in_order_messages_do_not_deadlock(name: str, chunks: int) -> None:
    """Each rank knows its own list, and reads a peer's messages in the peer's order."""
    schedule = make_schedule(name, 4, 8, chunks)
    ranks = range(4)
    point_to_point = {(a, b): deque[PipelineAction]() for a in ranks for b in ranks}
    sent: dict[tuple[int, int], list[PipelineAction]] = {pair: [] for pair in point_to_point}
    done: list[set[PipelineAction]] = [set() for _ in ranks]
    at, moved = [0] * 4, True
    while moved:
        moved = False
        for rank in ranks:
            while at[rank] < len(schedule.actions[rank]):
                for peer in ranks:
                    while point_to_point[peer, rank]:
                        done[rank].add(point_to_point[peer, rank].popleft())
                action = schedule.actions[rank][at[rank]]
                if not done[rank].issuperset(action.get_dependencies(schedule.last_stage)):
                    break
                done[rank].add(action)
                for peer in ranks:
                    if action in get_sent_actions(schedule, rank, peer):
                        point_to_point[rank, peer].append(action)
                        sent[rank, peer].append(action)
                at[rank] += 1
                moved = True
    assert at == [len(order) for order in schedule.actions]
    assert all(tuple(sent[a, b]) == get_sent_actions(schedule, a, b) for a, b in sent)
