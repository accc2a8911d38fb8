"""Schedules as data: their pictures, what must hold of every one, and what each promises."""

from __future__ import annotations

import re
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardformer.errors import ConfigError
from shardformer.pipeline import schedules
from shardformer.pipeline.schedule_chart import grid
from shardformer.pipeline.schedules import (
    SCHEDULES,
    Action,
    ActionKind,
    bubble_formula,
    check_schedule,
    check_schedule_name,
    default_chunks,
    fitting_micro_batches,
    forward_only,
    make_schedule,
    messages,
    placement_of,
    problems,
    simulate,
)

WITH_CHUNKS = [
    *(("gpipe", 1), ("1f1b", 1), ("zbv", 2)),
    *((name, chunks) for name in ("interleaved", "interleaved_zb") for chunks in (2, 3, 4)),
]


def sizes(name: str, chunks: int, largest: int = 32) -> list[tuple[int, int]]:
    """Every p up to 8 with the m up to ``largest`` that the schedule takes: all small ones, some of the large."""
    fit = [(p, m) for p in range(1, 9) for m in (*range(1, 10), 12, 15, 16, 21, 24, 31, 32, 64) if m <= largest]
    return [(p, m) for p, m in fit if fitting_micro_batches(name, p, chunks, at_least=m) == m]


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
def test_a_schedule_is_its_picture(name: str, stages: int, micro_batches: int) -> None:
    schedule = make_schedule(name, stages, micro_batches)
    assert grid(schedule, simulate(schedule)).splitlines() == lines(PICTURES[name, stages, micro_batches])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpipe", schedules._gpipe.__doc__),
        ("1f1b", schedules._one_f_one_b.__doc__),
        ("interleaved", schedules._interleaved.__doc__),
        ("interleaved_zb", schedules.place_weight_gradients.__doc__),
        ("zbv", schedules.zbv.__doc__),
    ],
)
def test_the_picture_in_the_docstring_is_the_schedule(name: str, said: str | None) -> None:
    assert said is not None
    sizes = re.search(r"p=(\d), m=(\d)", said)
    assert sizes is not None
    schedule = make_schedule(name, int(sizes[1]), int(sizes[2]))
    drawn = [line.removeprefix("rank ") for line in grid(schedule, simulate(schedule)).splitlines()]
    assert [line.strip() for line in said.splitlines() if " | " in line] == drawn


# ----------------------------------------------------------------------------------------------------- all of all sizes


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunks"), WITH_CHUNKS)
def test_every_schedule_of_every_size_can_be_run(name: str, chunks: int) -> None:
    for stages, micro_batches in sizes(name, chunks):
        schedule = make_schedule(name, stages, micro_batches, chunks)
        assert problems(schedule) == [], (stages, micro_batches)
        assert problems(forward_only(schedule)) == [], (stages, micro_batches)
    check_schedule(make_schedule(name, 8, 64, chunks))


@pytest.mark.parametrize(("name", "chunks"), WITH_CHUNKS)
def test_a_stage_takes_the_micro_batches_in_their_order(name: str, chunks: int) -> None:
    """So that its gradients are summed in one order, whichever the schedule."""
    for stages, micro_batches in sizes(name, chunks, largest=16):
        for order in make_schedule(name, stages, micro_batches, chunks).actions:
            for kind, stage in {(action.kind, action.stage) for action in order}:
                assert [a.micro_batch for a in order if (a.kind, a.stage) == (kind, stage)] == [*range(micro_batches)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_zero_bubble_schedule_splits_every_backward_and_the_others_none(name: str) -> None:
    schedule = make_schedule(name, 4, 8)
    counts = Counter(action.kind for order in schedule.actions for action in order)
    of_each = schedule.stages * schedule.num_model_chunks * schedule.micro_batches
    kinds = (
        (ActionKind.FORWARD, ActionKind.INPUT, ActionKind.WEIGHT)
        if name in ("interleaved_zb", "zbv")
        else (ActionKind.FORWARD, "B")
    )
    assert counts == dict.fromkeys(kinds, of_each)


def test_the_forwards_alone_keep_their_order() -> None:
    for name in SCHEDULES:
        schedule = make_schedule(name, 4, 8)
        for alone, order in zip(forward_only(schedule).actions, schedule.actions):
            assert alone == tuple(action for action in order if action.kind is ActionKind.FORWARD)


def test_a_schedule_is_made_once() -> None:
    assert make_schedule("zbv", 4, 8) is make_schedule("zbv", 4, 8)


def test_an_action_in_a_message_is_short() -> None:
    assert str(Action(ActionKind.INPUT, stage=2, micro_batch=13)) == "I13@2"


# ----------------------------------------------------------------------------------------------- what each one promises


@pytest.mark.parametrize(("name", "chunks"), [pair for pair in WITH_CHUNKS if pair[0] != "zbv"])
def test_the_bubble_is_that_of_the_formula(name: str, chunks: int) -> None:
    for stages, micro_batches in sizes(name, chunks):
        bubble = simulate(make_schedule(name, stages, micro_batches, chunks)).bubble
        assert bubble == pytest.approx(bubble_formula(name, stages, micro_batches, chunks)), (stages, micro_batches)


def test_the_formulas_are_those_of_the_papers() -> None:
    assert bubble_formula("gpipe", 4, 8, 1) == bubble_formula("1f1b", 4, 8, 1) == 3 / 11
    assert bubble_formula("interleaved", 4, 8, 2) == 3 / 19
    assert bubble_formula("interleaved_zb", 4, 8, 2) == 3 / 51
    assert bubble_formula("zbv", 4, 8, 2) is None


def test_gpipe_holds_all_micro_batches_and_1f1b_as_many_as_stages_follow() -> None:
    for stages, micro_batches in sizes("1f1b", 1):
        of_gpipe, of_1f1b = (
            simulate(make_schedule(name, stages, micro_batches)).in_flight for name in ("gpipe", "1f1b")
        )
        assert of_gpipe == (micro_batches,) * stages
        assert of_1f1b == tuple(min(stages - rank, micro_batches) for rank in range(stages))


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_splitting_the_backward_of_interleaved_costs_no_memory_on_the_fullest_rank(chunks: int) -> None:
    for stages, micro_batches in sizes("interleaved", chunks):
        whole, split = (
            max(simulate(make_schedule(name, stages, micro_batches, chunks)).in_flight)
            for name in ("interleaved", "interleaved_zb")
        )
        assert whole == min((chunks + 1) * stages - 1, chunks * micro_batches)
        assert split <= whole


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (2, 16), (4, 8), (8, 16)])
def test_zbv_hides_messages_and_actions_of_other_lengths(stages: int, micro_batches: int) -> None:
    schedule = make_schedule("zbv", stages, micro_batches)
    ideal = simulate(schedule).bubble
    assert simulate(schedule, send=0.1).bubble < 1.5 * ideal
    assert simulate(schedule, {ActionKind.INPUT: 1.2, ActionKind.WEIGHT: 0.9}).bubble < 1.25 * ideal


def test_zbv_holds_no_more_than_1f1b_and_is_idle_only_at_the_ends() -> None:
    for stages, micro_batches in sizes("zbv", 2, largest=64):
        timeline = simulate(make_schedule("zbv", stages, micro_batches))
        assert max(timeline.in_flight) <= 2 * stages
        # The last rank cannot begin before p - 1; all else is no more than 2 where there is enough to do.
        assert timeline.makespan >= 6 * micro_batches + stages - 1
        if micro_batches >= 2 * stages:
            assert timeline.makespan <= 6 * micro_batches + stages + 1, (stages, micro_batches)
        if stages > 1:
            one_f_one_b = bubble_formula("1f1b", stages, micro_batches, 1)
            assert one_f_one_b is not None and timeline.bubble < one_f_one_b, (stages, micro_batches)


# ------------------------------------------------------------------------------------------------- what is not possible


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1f2b", 4, 8), "schedule='1f2b' is not one of 'gpipe', .*Did you mean '1f1b'"),
        (("1f1b", 0, 8), "stages=0"),
        (("1f1b", 4, 0), "micro_batches=0.*Use 1 or more"),
        (("interleaved", 4, 0), "micro_batches=0.*Use 4 or more"),
        (("interleaved", 4, 10), "micro_batches=10.*with 4 stages.*Use 8 or 12"),
        (("interleaved_zb", 4, 3), "micro_batches=3 .*Use 4,"),
        (("1f1b", 4, 8, 2), "chunks=2.*Use 1, or the schedule 'interleaved'"),
        (("gpipe", 4, 8, 2), "chunks=2.*one stage"),
        (("interleaved", 4, 8, 1), "chunks=1.*Use 2 or more, or the schedule '1f1b'"),
        (("interleaved", 4, 8, 0), r"chunks=0.*Use 2 or more\."),
        (("zbv", 4, 8, 3), "chunks=3.*both arms.*Use 2"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_do(arguments: tuple[str, int, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_schedule(*arguments)


@given(st.sampled_from(WITH_CHUNKS), st.integers(1, 8), st.integers(-3, 70))
def test_the_fitting_number_is_the_smallest_that_is_taken(pair: tuple[str, int], stages: int, at_least: int) -> None:
    name, chunks = pair
    fitting = fitting_micro_batches(name, stages, chunks, at_least)
    assert fitting >= at_least and make_schedule(name, stages, fitting, chunks).micro_batches == fitting
    for smaller in range(max(1, at_least), fitting):
        with pytest.raises(ConfigError, match=f"or {fitting}|Use {fitting}"):
            make_schedule(name, stages, smaller, chunks)


def test_the_default_number_of_chunks_is_taken() -> None:
    for name in SCHEDULES:
        check_schedule_name(name, 4, default_chunks(name))
        assert make_schedule(name, 4, 8) == make_schedule(name, 4, 8, default_chunks(name))


def test_every_schedule_places_as_its_placement_says() -> None:
    assert placement_of("1f1b", 3, 1) == (0, 1, 2)
    assert placement_of("interleaved", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert placement_of("zbv", 3, 2) == (0, 1, 2, 2, 1, 0)


# ------------------------------------------------------------------------------------------------------------- messages


def test_messages_name_what_is_sent_in_the_order_in_which_it_is_made() -> None:
    schedule = make_schedule("1f1b", 3, 2)
    assert [str(action) for action in messages(schedule, 0, 1)] == ["F0@0", "F1@0"]
    assert [str(action) for action in messages(schedule, 1, 0)] == ["B0@1", "B1@1"]
    assert messages(schedule, 0, 2) == messages(schedule, 2, 0) == messages(schedule, 1, 1) == ()


def test_an_interleaved_pipeline_is_a_ring_and_a_v_is_not() -> None:
    ring, v = make_schedule("interleaved", 3, 3), make_schedule("zbv", 3, 3)
    assert {action.stage for action in messages(ring, 2, 0)} == {2}  # stage 2 of rank 2, then 3 of rank 0
    assert {action.stage for action in messages(ring, 0, 2)} == {3}
    assert messages(v, 2, 0) == messages(v, 0, 2) == messages(v, 2, 2) == ()
    # rank 2 has stages 2 and 3: its F of 3 goes up, its I of 2 comes back; F of 2 and I of 3 stay
    assert {(action.kind, action.stage) for action in messages(v, 2, 1)} == {
        (ActionKind.FORWARD, 3),
        (ActionKind.INPUT, 2),
    }


@pytest.mark.parametrize(("name", "chunks"), WITH_CHUNKS)
def test_ranks_that_wait_for_their_messages_in_order_of_sending_come_to_the_end(name: str, chunks: int) -> None:
    """Each rank knows only its own list and reads what a peer sends in the peer's order, keeping what comes early."""
    schedule = make_schedule(name, 4, 8, chunks)
    ranks = range(4)
    point_to_point = {(a, b): deque[Action]() for a in ranks for b in ranks}
    sent: dict[tuple[int, int], list[Action]] = {pair: [] for pair in point_to_point}
    done: list[set[Action]] = [set() for _ in ranks]
    at, moved = [0] * 4, True
    while moved:
        moved = False
        for rank in ranks:
            while at[rank] < len(schedule.actions[rank]):
                for peer in ranks:
                    while point_to_point[peer, rank]:
                        done[rank].add(point_to_point[peer, rank].popleft())
                action = schedule.actions[rank][at[rank]]
                if not done[rank].issuperset(action.needs(schedule.last)):
                    break
                done[rank].add(action)
                for peer in ranks:
                    if action in messages(schedule, rank, peer):
                        point_to_point[rank, peer].append(action)
                        sent[rank, peer].append(action)
                at[rank] += 1
                moved = True
    assert at == [len(order) for order in schedule.actions]
    assert all(tuple(sent[a, b]) == messages(schedule, a, b) for a, b in sent)
