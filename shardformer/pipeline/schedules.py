"""Builds and simulates pipeline schedules, the order of forward and backward passes on each rank.

Each rank of the pipe axis runs one or more *virtual stages*. Virtual stage 0 takes the model's inputs, and the last one
computes the loss.

The zero-bubble schedules are from Qi et al., "Zero Bubble Pipeline Parallelism", 2023, and "Pipeline Parallelism with
Controllable Memory", 2024. The interleaved one, and zbv with few micro-batches, are built by simulation in steps of one
forward pass. In each step, every rank runs the highest-priority action whose inputs are available. The result is
deterministic, so all ranks build the same schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate, chain
from math import inf
from typing import Any, NamedTuple

from shardformer.errors import ConfigError, check_choice, check_int


class ActionKind(StrEnum):
    """Kind of pass in a pipeline schedule: forward, full backward, or backward for only the inputs or weights."""

    FORWARD = "F"
    BACKWARD = "B"  # the full backward pass
    INPUT = "I"  # the gradients of the stage's inputs, which the previous stage needs
    WEIGHT = "W"  # the gradients of the stage's weights, which no other stage needs


@dataclass(frozen=True, order=True)
class PipelineAction:
    """A forward or backward pass of one micro-batch through one virtual stage.

    >>> print(PipelineAction(ActionKind.FORWARD, stage=2, micro_batch=3))
    F3@2
    """

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}@{self.stage}"

    @property
    def receiver_stage(self) -> int:
        """The index of the virtual stage that receives the result of this forward or backward pass."""
        return self.stage + (1 if self.kind is ActionKind.FORWARD else -1)

    def get_dependencies(self, last_stage: int) -> tuple[PipelineAction, ...]:
        """Return the forward and backward passes that must complete before this one can start."""
        forward = PipelineAction(ActionKind.FORWARD, self.stage, self.micro_batch)
        if self.kind is ActionKind.FORWARD:
            return (PipelineAction(self.kind, self.stage - 1, self.micro_batch),) if self.stage > 0 else ()
        if self.kind is ActionKind.WEIGHT:
            return (PipelineAction(ActionKind.INPUT, self.stage, self.micro_batch),)
        return (
            (forward, PipelineAction(self.kind, self.stage + 1, self.micro_batch))
            if self.stage < last_stage
            else (forward,)
        )


RankActions = tuple[PipelineAction, ...]
"""The actions of one rank, in order."""


_IN_FLIGHT_CHANGE = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.WEIGHT: -1}


class _PipelineSimulator:
    """Simulates a pipeline step by step, and records the order in which each rank runs its actions."""

    def __init__(self, num_ranks: int, last_stage: int) -> None:
        self.last = last_stage
        self.done: set[PipelineAction] = set()  # in earlier steps
        self.orders: list[list[PipelineAction]] = [[] for _ in range(num_ranks)]
        self.in_flight = [0] * num_ranks  # (virtual stage, micro-batch) pairs from their F to their W

    def can_run(self, action: PipelineAction) -> bool:
        return self.done.issuperset(action.get_dependencies(self.last))

    def run_until_done(
        self, num_actions: int, choose_action_fn: Callable[[int], PipelineAction | None]
    ) -> tuple[RankActions, ...]:
        """Simulate the pipeline, and return the order in which each rank runs its actions.

        Args:
            choose_action_fn: returns the next action of a rank, or None if the rank stays idle.
        """
        while len(self.done) < num_actions:
            chosen = [choose_action_fn(rank) for rank in range(len(self.orders))]
            assert any(chosen), "no rank can run an action"
            for rank, action in enumerate(chosen):
                if action is not None:
                    self.done.add(action)
                    self.orders[rank].append(action)
                    self.in_flight[rank] += _IN_FLIGHT_CHANGE.get(action.kind, 0)
        return tuple(map(tuple, self.orders))


def split_backwards_into_input_and_weight(
    rank_actions: Sequence[RankActions], last_stage: int
) -> tuple[RankActions, ...]:
    """Split each backward pass (B) into one for inputs (I) and a later one for weights (W), to reduce idle time.

    I replaces B. W runs where the rank would otherwise be idle.
    No rank keeps more activations than the largest number on any rank in ``rank_actions``. At that limit, a W precedes
    the next F. For p stages of v chunks and m micro-batches in the interleaved order, the bubble shrinks to a third, (p
    - 1) / (3 v m + p - 1)::

        p=2, m=4, v=2

        0 | F0a F1a F0b F1b F2a I0b W0b F3a I1b W1b F2b I0a W0a F3b I1a I2b W1a W2b I3b I2a I3a W3b W2a W3a .
        1 | .   F0a F1a F0b I0b F1b I1b F2a I0a W0b F3a I1a W1b F2b I2b W0a F3b I3b I2a I3a W1a W2b W3b W2a W3a
    """
    as_input = {ActionKind.BACKWARD: ActionKind.INPUT}
    wanted = [deque(replace(a, kind=as_input.get(a.kind, a.kind)) for a in order) for order in rank_actions]
    weights: list[deque[PipelineAction]] = [deque() for _ in rank_actions]
    limit = max(get_peak_in_flight_micro_batches(order) for order in rank_actions)
    state = _PipelineSimulator(len(rank_actions), last_stage)

    def choose_next_action(rank: int) -> PipelineAction | None:
        first = wanted[rank][0] if wanted[rank] else None
        is_full = state.in_flight[rank] >= limit
        if first and state.can_run(first) and not (is_full and first.kind is ActionKind.FORWARD):
            wanted[rank].popleft()
            if first.kind is ActionKind.INPUT:
                weights[rank].append(replace(first, kind=ActionKind.WEIGHT))
            return first
        return weights[rank].popleft() if weights[rank] else None

    num_backwards = sum(a.kind is ActionKind.BACKWARD for order in rank_actions for a in order)
    return state.run_until_done(3 * num_backwards, choose_next_action)


def get_peak_in_flight_micro_batches(rank_actions: Sequence[PipelineAction]) -> int:
    """Compute the peak number of micro-batches whose activations a rank stores, counted per virtual stage."""
    return max(accumulate((_IN_FLIGHT_CHANGE.get(action.kind, 0) for action in rank_actions), initial=0))


def _build_zero_bubble_v_schedule(num_stages: int, num_micro_batches: int) -> tuple[RankActions, ...]:
    """Build the zero-bubble V schedule (ZB-V), in which each rank runs two model chunks.

    A micro-batch passes the first chunks (a) from the first rank to the last, and the second chunks (b) back.
    Once the pipeline is full, a rank runs F, I and W of one chunk, then of the other. A message therefore has the time
    of one or two actions to arrive. A rank keeps at most 2p chunk activations, like the first rank of 1F1B::

        p=2, m=4, v=2

        0 | F0a F1a F2a F0b I0b W0b F1b I1b W1b F3a I0a W0a F2b I2b W2b I1a W1a F3b I3b W3b I2a W2a I3a W3a .
        1 | .   F0a F0b F1a F1b I0b W0b F2a I0a W0a F2b I1b W1b F3a I1a W1a F3b I2b W2b I2a I3b I3a W2a W3b W3a
    """
    if num_micro_batches < 2 * num_stages - 1:
        return _build_zero_bubble_v_few_micro_batches(num_stages, num_micro_batches)
    return tuple(_build_zero_bubble_v_rank_actions(num_stages, num_micro_batches, rank) for rank in range(num_stages))


def _build_zero_bubble_v_rank_actions(num_stages: int, num_micro_batches: int, rank: int) -> RankActions:
    """Return the forward and backward passes of one rank in the ZB-V schedule (Qi et al., 2024)."""
    down, up, ranks_left = rank, 2 * num_stages - 1 - rank, num_stages - rank
    counts = {(kind, stage): 0 for kind in ActionKind for stage in (down, up)}
    order: list[PipelineAction] = []

    def append_actions(num_repeats: int, *kinds_and_stages: tuple[ActionKind, int]) -> None:
        for step in kinds_and_stages * num_repeats:
            if counts[step] < num_micro_batches:
                order.append(PipelineAction(*step, counts[step]))
                counts[step] += 1

    kinds = (ActionKind.FORWARD, ActionKind.INPUT, ActionKind.WEIGHT)
    down_steps, up_steps = ([(kind, stage) for kind in kinds] for stage in (down, up))
    append_actions(2 * ranks_left - 1, down_steps[0])
    append_actions(rank, up_steps[0], down_steps[0])
    append_actions(ranks_left, *up_steps)
    append_actions(num_micro_batches - num_stages, *down_steps, *up_steps)
    append_actions(rank, down_steps[1], up_steps[1])
    append_actions(ranks_left, *down_steps[1:])
    append_actions(num_micro_batches, up_steps[2])
    append_actions(num_micro_batches, down_steps[2])
    return tuple(order)


def _build_zero_bubble_v_few_micro_batches(num_stages: int, num_micro_batches: int) -> tuple[RankActions, ...]:
    """Build the ZB-V schedule for fewer than 2p - 1 micro-batches on p stages.

    The second chunk has priority over the first, and F over I. W runs if no other action can. One of the 2p activation
    slots is reserved for the second chunk, because a rank filled with activations of the first chunk would deadlock.
    """
    last, limit = 2 * num_stages - 1, 2 * num_stages
    state = _PipelineSimulator(num_stages, last)
    next_micro_batch = {(kind, stage): 0 for kind in ActionKind for stage in range(last + 1)}

    def choose_next_action(rank: int) -> PipelineAction | None:
        down, up = rank, last - rank
        priorities = [(kind, stage) for stage in (up, down) for kind in (ActionKind.FORWARD, ActionKind.INPUT)]
        for kind, stage in (*priorities, (ActionKind.WEIGHT, up), (ActionKind.WEIGHT, down)):
            action = PipelineAction(kind, stage, next_micro_batch[kind, stage])
            room = limit - state.in_flight[rank] - (stage == down)
            if (
                action.micro_batch < num_micro_batches
                and state.can_run(action)
                and (kind is not ActionKind.FORWARD or room > 0)
            ):
                next_micro_batch[kind, stage] += 1
                return action
        return None

    return state.run_until_done(6 * num_stages * num_micro_batches, choose_next_action)


SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv")
LOSS_AVERAGES = ("tokens", "ranks")
"""The values of the option ``average_loss_over``."""
_CHUNKS = {"gpipe": 1, "1f1b": 1, "zbv": 2}
"""The number of chunks per rank, for schedules that fix it."""


@dataclass(frozen=True)
class PipelineSchedule:
    """A pipeline schedule, which lists the forward and backward passes of each rank in order.

    Args:
        placement: rank on the pipe axis of each virtual stage.
        actions: one tuple of actions per rank on the pipe axis.
    """

    name: str
    stages: int
    micro_batches: int
    num_model_chunks: int
    placement: tuple[int, ...]
    actions: tuple[RankActions, ...]

    @property
    def last_stage(self) -> int:
        """The index of the last virtual stage, which computes the loss."""
        return self.stages * self.num_model_chunks - 1

    def get_chunk_index(self, virtual_stage: int) -> int:
        """Return the index of a virtual stage among the virtual stages of its rank."""
        return virtual_stage // self.stages


MAX_ACTIONS = 2**20
"""Upper limit of micro-batches times virtual stages."""


@lru_cache(maxsize=256)
def make_schedule(
    schedule_name: str, num_stages: int, num_micro_batches: int, num_chunks: int | None = None
) -> PipelineSchedule:
    """Build a pipeline schedule by name for the specified numbers of stages and micro-batches.

    Args:
        num_chunks: virtual stages per rank, or None for the schedule's default.

    Raises ConfigError if the schedule does not exist or does not support these numbers.
    """
    num_chunks = get_default_num_chunks(schedule_name) if num_chunks is None else num_chunks
    check_schedule(schedule_name, num_stages, num_chunks)
    _check_num_micro_batches(schedule_name, num_stages, num_micro_batches, num_chunks)
    if num_stages * num_chunks * num_micro_batches > MAX_ACTIONS:
        raise ConfigError(
            f"The pipeline schedule is too long: the product of {num_micro_batches} micro-batches, {num_stages} stages "
            f"and {num_chunks} chunks per stage exceeds the maximum of {MAX_ACTIONS:,}.",
            remedy="Use fewer micro-batches, stages or chunks.",
        )
    placement = assign_virtual_stages(schedule_name, num_stages, num_chunks)
    if schedule_name == "gpipe":
        orders = _build_gpipe_schedule(num_stages, num_micro_batches)
    elif schedule_name == "1f1b":
        orders = _build_1f1b_schedule(num_stages, num_micro_batches)
    elif schedule_name == "interleaved":
        orders = _build_interleaved_schedule(num_stages, num_micro_batches, num_chunks)
    elif schedule_name == "interleaved_zb":
        orders = split_backwards_into_input_and_weight(
            _build_interleaved_schedule(num_stages, num_micro_batches, num_chunks),
            last_stage=num_stages * num_chunks - 1,
        )
    else:
        orders = _build_zero_bubble_v_schedule(num_stages, num_micro_batches)
    return PipelineSchedule(schedule_name, num_stages, num_micro_batches, num_chunks, placement, orders)


def make_forward_only_schedule(schedule: PipelineSchedule) -> PipelineSchedule:
    """Return a copy of a pipeline schedule without backward passes, for evaluation."""
    forwards = (tuple(a for a in order if a.kind is ActionKind.FORWARD) for order in schedule.actions)
    return replace(schedule, actions=tuple(forwards))


def get_sent_actions(schedule: PipelineSchedule, sender_rank: int, receiver_rank: int) -> RankActions:
    """List the forward and backward passes of one rank whose results are sent to another rank, in order.

    The output of F goes to the rank of the next virtual stage, the gradient from B or I to the rank of the previous
    one. Results that stay on a rank are not sent, and W has no result.
    """
    return tuple(
        a
        for a in schedule.actions[sender_rank]
        if receiver_rank != sender_rank and receiver_rank == find_receiver_rank(schedule, a)
    )


def find_receiver_rank(schedule: PipelineSchedule, action: PipelineAction) -> int | None:
    """Find the rank that receives the result of a forward or backward pass, or return None if no rank needs it."""
    is_sent = action.kind is not ActionKind.WEIGHT and 0 <= action.receiver_stage <= schedule.last_stage
    return schedule.placement[action.receiver_stage] if is_sent else None


def assign_virtual_stages(name: str, stages: int, chunks: int) -> tuple[int, ...]:
    """Assign virtual pipeline stages to ranks round-robin, or for zbv in a V: to the last rank and back.

    >>> assign_virtual_stages("interleaved", stages=4, chunks=2)
    (0, 1, 2, 3, 0, 1, 2, 3)
    >>> assign_virtual_stages("zbv", stages=4, chunks=2)
    (0, 1, 2, 3, 3, 2, 1, 0)
    """
    check_schedule(name, stages, chunks)
    if name == "zbv":
        return (*range(stages), *reversed(range(stages)))
    return tuple(range(stages)) * chunks


def get_default_num_chunks(schedule_name: str) -> int:
    """Return the default number of model chunks (virtual stages) per rank for a schedule."""
    check_choice("schedule", schedule_name, SCHEDULES)
    return _CHUNKS.get(schedule_name, 2)


def check_schedule(schedule_name: str, num_stages: int, num_chunks: int) -> None:
    """Raise ConfigError if the schedule does not exist or does not support this number of stages or chunks."""
    check_choice("schedule", schedule_name, SCHEDULES)
    check_int("stages", num_stages)
    required = _CHUNKS.get(schedule_name, num_chunks)
    if num_chunks != required:
        raise ConfigError(
            f"schedule={schedule_name!r} requires num_model_chunks={required}, but got {num_chunks}.",
            remedy=f"Use num_model_chunks={required}, or schedule='interleaved' for more chunks per rank.",
        )
    if num_chunks < get_default_num_chunks(schedule_name):
        raise ConfigError(
            f"schedule={schedule_name!r} requires num_model_chunks to be at least 2, but got {num_chunks}.",
            remedy="Use num_model_chunks=2 or more, or schedule='1f1b' with num_model_chunks=1.",
        )


def round_up_num_micro_batches(schedule_name: str, num_stages: int, num_chunks: int, min_micro_batches: int) -> int:
    """Round ``min_micro_batches`` up to the next number of micro-batches that a schedule accepts."""
    check_schedule(schedule_name, num_stages, num_chunks)
    step = num_stages if schedule_name.startswith("interleaved") else 1
    return max(1, -(-min_micro_batches // step)) * step


def _check_num_micro_batches(schedule_name: str, num_stages: int, num_micro_batches: int, num_chunks: int) -> None:
    above = round_up_num_micro_batches(schedule_name, num_stages, num_chunks, min_micro_batches=num_micro_batches)
    if num_micro_batches < 1:
        raise ConfigError(
            f"micro_batches={num_micro_batches} is not a positive number.", remedy=f"Use {above} or more micro-batches."
        )
    if above != num_micro_batches:
        valid = f"{above - num_stages} or {above}" if above > num_stages else above
        raise ConfigError(
            f"schedule={schedule_name!r} with {num_stages} pipeline stages requires a multiple of {num_stages} "
            f"micro-batches, but got micro_batches={num_micro_batches}.",
            remedy=f"Use {valid} micro-batches, or schedule='1f1b', which accepts any number.",
        )


def _build_gpipe_schedule(num_stages: int, num_micro_batches: int) -> tuple[RankActions, ...]:
    """Build the GPipe schedule (Huang et al., 2019): all forward passes, then all backward passes.

    Each rank keeps the activations of all m micro-batches.
    Backward passes run in the order of the forward passes, as in every schedule here. A stage therefore accumulates its
    gradients in the same order under every schedule::

        p=3, m=3

        0 | F0 F1 F2 .  .  .  .  .  .  B0 -- B1 -- B2 --
        1 | .  F0 F1 F2 .  .  .  B0 -- B1 -- B2 -- .  .
        2 | .  .  F0 F1 F2 B0 -- B1 -- B2 -- .  .  .  .
    """
    return _build_rank_actions(num_stages, num_micro_batches, 1, lambda rank: num_micro_batches)


def _build_1f1b_schedule(num_stages: int, num_micro_batches: int) -> tuple[RankActions, ...]:
    """Build the 1F1B schedule (Narayanan et al., 2021), which alternates forward and backward passes.

    Rank r first runs p - 1 - r extra forward passes, so it keeps the activations of p - r micro-batches instead of m::

        p=4, m=6

        0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 -- F4 B1 -- F5 B2 -- .  B3 -- .  B4 -- .  B5 --
        1 | .  F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- F4 B2 -- F5 B3 -- .  B4 -- .  B5 -- .  .
        2 | .  .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- F4 B3 -- F5 B4 -- .  B5 -- .  .  .  .
        3 | .  .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 -- F5 B5 -- .  .  .  .  .  .
    """
    return _build_rank_actions(num_stages, num_micro_batches, 1, lambda rank: num_stages - 1 - rank)


def _build_interleaved_schedule(num_stages: int, num_micro_batches: int, num_chunks: int) -> tuple[RankActions, ...]:
    """Build the interleaved 1F1B schedule, in which each rank runs v model chunks (Narayanan et al., 2021).

    Micro-batches run in groups of p. A group passes the first chunk of a rank, then the second, and so on; its
    backward passes pass the chunks in reverse. The bubble shrinks from the time of a stage to the time of a chunk::

        p=2, m=4, v=2

        0 | F0a F1a F0b F1b F2a .   B0b --  F3a B1b --  F2b B0a --  F3b B1a --  .   B2b --  .   B3b --  B2a --  B3a --
        1 | .   F0a F1a F0b B0b --  F1b B1b --  F2a B0a --  F3a B1a --  F2b B2b --  F3b B3b --  B2a --  B3a --  .   .
    """
    return _build_rank_actions(
        num_stages,
        num_micro_batches,
        num_chunks,
        lambda rank: 2 * (num_stages - 1 - rank) + (num_chunks - 1) * num_stages,
    )


def _build_rank_actions(
    num_stages: int, num_micro_batches: int, num_chunks: int, get_num_warmup_forwards: Callable[[int], int]
) -> tuple[RankActions, ...]:
    """Return the order of forward and backward passes on each rank: warm-up, alternation, cool-down."""

    def get_actions(kind: ActionKind, rank: int, chunk_order: range) -> list[PipelineAction]:
        return [
            PipelineAction(kind, chunk * num_stages + rank, i)
            for group in range(0, num_micro_batches, num_stages)
            for chunk in chunk_order
            for i in range(group, min(group + num_stages, num_micro_batches))
        ]

    orders = []
    for rank in range(num_stages):
        forwards = get_actions(ActionKind.FORWARD, rank, range(num_chunks))
        backwards = get_actions(ActionKind.BACKWARD, rank, range(num_chunks)[::-1])
        first = min(get_num_warmup_forwards(rank), len(forwards))
        in_turn = chain.from_iterable(zip(forwards[first:], backwards))
        orders.append((*forwards[:first], *in_turn, *backwards[len(forwards) - first :]))
    return tuple(orders)


DURATIONS: Mapping[ActionKind, float] = {
    ActionKind.FORWARD: 1.0,
    ActionKind.BACKWARD: 2.0,
    ActionKind.INPUT: 1.0,
    ActionKind.WEIGHT: 1.0,
}
"""Default durations, in units of one chunk's forward pass. A backward pass computes twice as many matrix products."""
Durations = Mapping[ActionKind, float] | Mapping[ActionKind | tuple[ActionKind, int], float]


class PipelineActionSpan(NamedTuple):
    """Simulated start and end time of a forward or backward pass."""

    action: PipelineAction
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Result of a schedule simulation: when each pass runs, and the idle time and peak activations of each rank.

    Args:
        spans: one row of action spans per rank of the pipe axis.
        makespan: time from the start of the first action to the end of the last.
        idle: idle time of each rank.
        bubble: idle time of all ranks as a share of their total time, from 0 to 1.
        in_flight: peak number of activations that each rank keeps, counted per micro-batch and chunk. An activation is
            kept from its F to the end of its B or W.
    """

    spans: tuple[tuple[PipelineActionSpan, ...], ...]
    makespan: float
    idle: tuple[float, ...]
    bubble: float
    in_flight: tuple[int, ...]


def simulate_schedule(
    schedule: PipelineSchedule, durations: Durations = DURATIONS, send_duration: float = 0.0
) -> Timeline:
    """Simulate a pipeline schedule in which each rank runs its actions as early as possible.

    Args:
        durations: time of each kind of action, or of (kind, virtual stage), in any unit. The default of a missing kind
            is in ``DURATIONS``.
        send_duration: transfer time of a result to another rank. The sender does not wait.

    Raises ConfigError if a duration is invalid, a virtual stage does not exist, or the schedule deadlocks.
    """
    of: dict[Any, float] = {**DURATIONS, **durations}
    named = {f"duration {f'{k[0]}@{k[1]}' if isinstance(k, tuple) else k}": number for k, number in of.items()}
    for name, number in [*named.items(), ("send", send_duration)]:
        if not (0 <= number < inf) or (number == 0 and name != "send"):
            raise ConfigError(
                f"Durations must be finite and positive, or at least 0 for a send, but got {name}={number:g}.",
                remedy="Pass durations in any time unit, for example 1.0 for a forward pass.",
            )
    if beyond := [key[1] for key in durations if isinstance(key, tuple) and not 0 <= key[1] <= schedule.last_stage]:
        raise ConfigError(
            f"durations has an entry for virtual stage {beyond[0]}, but the schedule has only the virtual stages "
            f"0 to {schedule.last_stage}.",
            remedy="Use an existing virtual stage, or pass one duration for each kind of action.",
        )
    spans, stuck = _simulate_ranks_and_find_deadlock(schedule, of, send_duration)
    if stuck:
        raise ConfigError(
            f"The schedule {schedule.name!r} deadlocks: {stuck}.",
            remedy="Build the schedule with make_schedule, or correct the order of its actions.",
        )
    makespan = max((row[-1].end for row in spans if row), default=0.0)
    idle = tuple(max(0.0, makespan - sum(span.end - span.start for span in row)) for row in spans)
    return Timeline(
        spans=tuple(tuple(row) for row in spans),
        makespan=makespan,
        idle=idle,
        bubble=sum(idle) / (len(idle) * makespan) if makespan else 0.0,
        in_flight=tuple(get_peak_in_flight_micro_batches(order) for order in schedule.actions),
    )


def compute_bubble_fraction(
    schedule_name: str, num_stages: int, num_micro_batches: int, num_chunks: int
) -> float | None:
    """Compute the bubble (idle fraction) of a pipeline schedule by formula. Returns None for zbv.

    Assumes free communication and equal durations of F, I and W.
    With p stages, m micro-batches and v chunks a rank works for v m pairs of F and B, and waits for p - 1::

        gpipe, 1f1b     (p - 1) / (m + p - 1)          p=4, m=8: 3 / 11 = 27 %
        interleaved     (p - 1) / (v m + p - 1)        p=4, m=8, v=2: 3 / 19 = 16 %
        interleaved_zb  (p - 1) / (3 v m + p - 1)      p=4, m=8, v=2: 3 / 51 = 6 %
    """
    check_schedule(schedule_name, num_stages, num_chunks)
    if schedule_name == "zbv":
        return None
    pairs = num_chunks * num_micro_batches * (3 if schedule_name == "interleaved_zb" else 1)
    return (num_stages - 1) / (pairs + num_stages - 1)


def _simulate_ranks_and_find_deadlock(
    schedule: PipelineSchedule, durations: Mapping[ActionKind | tuple[ActionKind, int], float], send_duration: float
) -> tuple[list[list[PipelineActionSpan]], str]:
    """Simulate all ranks. Returns the start and end of each action, and a description of any deadlock."""
    spans: list[list[PipelineActionSpan]] = [[] for _ in schedule.actions]
    ended: dict[PipelineAction, tuple[float, int]] = {}
    has_progress = True
    while has_progress:
        has_progress = False
        for rank, order in enumerate(schedule.actions):
            while len(spans[rank]) < len(order):
                action = order[len(spans[rank])]
                needs = action.get_dependencies(schedule.last_stage)
                if any(need not in ended for need in needs):
                    break
                arrivals = [
                    end + (send_duration if other != rank else 0.0) for end, other in map(ended.__getitem__, needs)
                ]
                start = max([spans[rank][-1].end if spans[rank] else 0.0, *arrivals])
                at_stage = (action.kind, action.stage)
                ended[action] = start + durations.get(at_stage, durations[action.kind]), rank
                spans[rank].append(PipelineActionSpan(action, start, ended[action][0]))
                has_progress = True
    waiting = []
    for rank, order in enumerate(schedule.actions):
        if len(spans[rank]) < len(order):
            action = order[len(spans[rank])]
            missing = [str(need) for need in action.get_dependencies(schedule.last_stage) if need not in ended]
            waiting.append(f"rank {rank} cannot run {action} before {' and '.join(missing)}")
    return spans, ", ".join(waiting)
