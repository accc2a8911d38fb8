"""Pipeline schedules as data: for each rank, the list of its actions. Costs, idle time and checks of a schedule.

A rank of the pipe axis holds one stage or several; each is a *virtual stage*, counted from 0, which takes the model's
input, to the last, which gives its loss.

Both are found by playing the pipeline through in steps of one unit, the time of an F, an I or a W: in each step each
rank takes the most wanted of the actions that can be done by then. No choice is left to chance, so every rank that asks
gets the same schedule. (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, and "Pipeline Parallelism with
Controllable Memory", 2024.)
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

from shardformer.errors import ConfigError, check_choice, check_int


class ActionKind(StrEnum):
    """What is done. A backward is either one ``B``, or an ``I`` and, at some later time, its ``W``."""

    FORWARD = "F"
    BACKWARD = "B"  # the whole backward
    INPUT = "I"  # backward towards the stage's input only, which the stage before waits for
    WEIGHT = "W"  # the gradients of the stage's weights, which nobody waits for


@dataclass(frozen=True, order=True)
class Action:
    """One micro-batch through one virtual stage, forwards or backwards.

    >>> print(Action(ActionKind.FORWARD, stage=2, micro_batch=3))
    F3@2
    """

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}@{self.stage}"

    @property
    def taker(self) -> int:
        """The virtual stage that its result is for: behind a forward the next one, behind a backward the one before."""
        return self.stage + (1 if self.kind is ActionKind.FORWARD else -1)

    def needs(self, last: int) -> tuple[Action, ...]:
        """What must have been done before this, where ``last`` is the last virtual stage."""
        forward = Action(ActionKind.FORWARD, self.stage, self.micro_batch)
        if self.kind is ActionKind.FORWARD:
            return (Action(self.kind, self.stage - 1, self.micro_batch),) if self.stage > 0 else ()
        if self.kind is ActionKind.WEIGHT:
            return (Action(ActionKind.INPUT, self.stage, self.micro_batch),)
        return (forward, Action(self.kind, self.stage + 1, self.micro_batch)) if self.stage < last else (forward,)


RankActions = tuple[Action, ...]
"""What one rank does, one after another."""


class _PipelineState:
    """The pipeline as it is after some steps: what each rank did, and when it was done."""

    def __init__(self, ranks: int, last: int) -> None:
        self.last = last
        self.now = 0
        self.done_at: dict[Action, int] = {}
        self.orders: list[list[Action]] = [[] for _ in range(ranks)]
        self.held = [0] * ranks  # activations of a (virtual stage, micro-batch), from its F to its W

    def can(self, action: Action) -> bool:
        """Whether all that ``action`` needs was done in an earlier step."""
        return all(self.done_at.get(need, self.now + 1) <= self.now for need in action.needs(self.last))

    def run(self, total: int, choose: Callable[[int], Action | None]) -> tuple[RankActions, ...]:
        """Steps until ``total`` actions are done. ``choose`` names what a rank does in this step, or None."""
        while len(self.done_at) < total:
            chosen = [choose(rank) for rank in range(len(self.orders))]
            # what waits only for the step that has just ended can be done now, so somebody always moves
            assert any(chosen), f"the pipeline stands still at {self.now}"
            for rank, action in enumerate(chosen):
                if action is not None:
                    self.done_at[action] = self.now + 1
                    self.orders[rank].append(action)
                    self.held[rank] += {ActionKind.FORWARD: 1, ActionKind.WEIGHT: -1}.get(action.kind, 0)
            self.now += 1
        return tuple(tuple(order) for order in self.orders)


def place_weight_gradients(orders: Sequence[RankActions], last: int) -> tuple[RankActions, ...]:
    """Splits every B of ``orders`` into an I in its place and a W where the rank would else be idle.

    A rank holds no more activations than the fullest rank of ``orders`` does; at that number a W comes before an F. For
    p stages of v chunks and m micro-batches in the interleaved order the bubble is a third, (p - 1) / (3 v m + p - 1)::

        p=2, m=4, v=2

        0 | F0a F1a F0b F1b F2a I0b W0b F3a I1b W1b F2b I0a W0a F3b I1a I2b W1a W2b I3b I2a I3a W3b W2a W3a .
        1 | .   F0a F1a F0b I0b F1b I1b F2a I0a W0b F3a I1a W1b F2b I2b W0a F3b I3b I2a I3a W1a W2b W3b W2a W3a
    """
    wanted = [
        deque(replace(a, kind=ActionKind.INPUT) if a.kind is ActionKind.BACKWARD else a for a in order)
        for order in orders
    ]
    weights: list[deque[Action]] = [deque() for _ in orders]
    limit = max(peak_in_flight(order) for order in orders)
    play = _PipelineState(len(orders), last)

    def choose(rank: int) -> Action | None:
        full = play.held[rank] >= limit
        if wanted[rank]:
            first = wanted[rank][0]
            if play.can(first) and not (full and first.kind is ActionKind.FORWARD):
                wanted[rank].popleft()
                if first.kind is ActionKind.INPUT:
                    weights[rank].append(replace(first, kind=ActionKind.WEIGHT))
                return first
        return weights[rank].popleft() if weights[rank] else None

    num_backwards = sum(a.kind is ActionKind.BACKWARD for order in orders for a in order)
    return play.run(3 * num_backwards, choose)


def peak_in_flight(order: Sequence[Action]) -> int:
    """The most (virtual stage, micro-batch) whose activations are held at a time: from F to B, or from F to W."""
    held = most = 0
    for action in order:
        held += {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.WEIGHT: -1}.get(action.kind, 0)
        most = max(most, held)
    return most


def zbv(stages: int, micro_batches: int) -> tuple[RankActions, ...]:
    """Two chunks a rank on a way of the shape of a V: down to the last rank (a), and up to the first again (b).

    Once the pipeline is full a rank does F, I and W of one chunk, then of the other, so that a message has the time of
    an action or two to arrive, and actions need not take equally long. A rank holds no more than 2p chunks'
    activations, as many as 1F1B's first rank has::

        p=2, m=4, v=2

        0 | F0a F1a F2a F0b I0b W0b F1b I1b W1b F3a I0a W0a F2b I2b W2b I1a W1a F3b I3b W3b I2a W2a I3a W3a .
        1 | .   F0a F0b F1a F1b I0b W0b F2a I0a W0a F2b I1b W1b F3a I1a W1a F3b I2b W2b I2a I3b I3a W2a W3b W3a
    """
    if micro_batches < 2 * stages - 1:
        return _zbv_of_few(stages, micro_batches)
    return tuple(_zbv_of_rank(stages, micro_batches, rank) for rank in range(stages))


def _zbv_of_rank(stages: int, micro_batches: int, rank: int) -> RankActions:
    """The order of the ZB-V schedule of Qi et al., 2024, for as many micro-batches as fill the V, or more."""
    down, up, behind = rank, 2 * stages - 1 - rank, stages - rank
    counts = {(kind, stage): 0 for kind in ActionKind for stage in (down, up)}
    order: list[Action] = []

    def add(times: int, *steps: tuple[ActionKind, int]) -> None:
        for step in steps * times:
            if counts[step] < micro_batches:
                order.append(Action(*step, counts[step]))
                counts[step] += 1

    of_down, of_up = (
        [(kind, stage) for kind in (ActionKind.FORWARD, ActionKind.INPUT, ActionKind.WEIGHT)] for stage in (down, up)
    )
    add(2 * behind - 1, of_down[0])
    add(rank, of_up[0], of_down[0])
    add(behind, *of_up)
    add(micro_batches - stages, *of_down, *of_up)
    add(rank, of_down[1], of_up[1])
    add(behind, *of_down[1:])
    add(micro_batches, of_up[2])
    add(micro_batches, of_down[2])
    return tuple(order)


def _zbv_of_few(stages: int, micro_batches: int) -> tuple[RankActions, ...]:
    """For too few micro-batches to fill the V.

    The second chunk goes before the first and F before I, so that what was begun is ended; W comes when nothing else
    can be done. Of the 2p activations one is kept free for the second chunk, without which the first could fill the
    rank for good.
    """
    last, limit = 2 * stages - 1, 2 * stages
    play = _PipelineState(stages, last)
    following = {(kind, stage): 0 for kind in ActionKind for stage in range(last + 1)}  # the next micro-batch of each

    def choose(rank: int) -> Action | None:
        down, up = rank, last - rank
        wishes = [
            (ActionKind.FORWARD, up),
            (ActionKind.INPUT, up),
            (ActionKind.FORWARD, down),
            (ActionKind.INPUT, down),
        ]
        for kind, stage in (*wishes, (ActionKind.WEIGHT, up), (ActionKind.WEIGHT, down)):
            action = Action(kind, stage, following[kind, stage])
            room = limit - play.held[rank] - (stage == down)
            if action.micro_batch < micro_batches and play.can(action) and (kind is not ActionKind.FORWARD or room > 0):
                following[kind, stage] += 1
                return action
        return None

    return play.run(6 * stages * micro_batches, choose)


SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv")
LOSS_AVERAGES = ("tokens", "ranks")
"""What the loss of a batch of several data ranks is averaged over."""
_CHUNKS = {"gpipe": 1, "1f1b": 1, "zbv": 2}
"""How many chunks a schedule has that leaves no choice."""


@dataclass(frozen=True)
class Schedule:
    """What each rank of the pipe axis does, in order.

    Args:
        placement: the rank on the pipe axis that holds each virtual stage.
        actions: a list for each rank on the pipe axis.
    """

    name: str
    stages: int
    micro_batches: int
    num_model_chunks: int
    placement: tuple[int, ...]
    actions: tuple[RankActions, ...]

    @property
    def last(self) -> int:
        """The virtual stage that gives the loss."""
        return self.stages * self.num_model_chunks - 1

    def chunk_of(self, stage: int) -> int:
        """Which of its rank's virtual stages one is, counted in the order in which a micro-batch passes them."""
        return stage // self.stages


MAX_ACTIONS = 2**20
"""Forwards of a schedule, on all stages."""


@lru_cache(maxsize=256)
def make_schedule(name: str, stages: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """The schedule ``name`` for p stages and m micro-batches.

    Args:
        chunks: virtual stages that a rank holds; None for the schedule's own number.

    Raises ConfigError when there is no such schedule, or not for these numbers.
    """
    chunks = default_chunks(name) if chunks is None else chunks
    check_schedule_name(name, stages, chunks)
    _check_micro_batches(name, stages, micro_batches, chunks)
    if stages * chunks * micro_batches > MAX_ACTIONS:
        raise ConfigError(
            f"{micro_batches} micro-batches over {stages} stages of {chunks} chunks",
            rule=f"A schedule names each of them on each virtual stage: {MAX_ACTIONS:,} at the most",
            remedy="Use fewer micro-batches, stages or chunks",
        )
    placement = placement_of(name, stages, chunks)
    if name == "gpipe":
        orders = _gpipe(stages, micro_batches)
    elif name == "1f1b":
        orders = _one_f_one_b(stages, micro_batches)
    elif name == "interleaved":
        orders = _interleaved(stages, micro_batches, chunks)
    elif name == "interleaved_zb":
        orders = place_weight_gradients(_interleaved(stages, micro_batches, chunks), last=stages * chunks - 1)
    else:
        orders = zbv(stages, micro_batches)
    return Schedule(name, stages, micro_batches, chunks, placement, orders)


def forward_only(schedule: Schedule) -> Schedule:
    """The same without the backwards, for evaluation."""
    return replace(
        schedule, actions=tuple(tuple(a for a in order if a.kind is ActionKind.FORWARD) for order in schedule.actions)
    )


def messages(schedule: Schedule, sender: int, receiver: int) -> RankActions:
    """The actions of rank ``sender`` whose result goes to rank ``receiver``, in the order in which they are done.

    After F of a virtual stage its output goes to the rank of the next one; after B or I the gradient of its input to
    the rank of the one before. What stays on a rank, and what W gives, is not sent.
    """
    return tuple(a for a in schedule.actions[sender] if receiver != sender and receiver == receiver_of(schedule, a))


def receiver_of(schedule: Schedule, action: Action) -> int | None:
    """The rank that takes the result of ``action``, its own one among them; None if there is none."""
    is_sent = action.kind is not ActionKind.WEIGHT and 0 <= action.taker <= schedule.last
    return schedule.placement[action.taker] if is_sent else None


# ------------------------------------------------------------------------------------------------- what goes with what


def placement_of(name: str, stages: int, chunks: int) -> tuple[int, ...]:
    """The rank of each virtual stage: round and round, or for zbv down to the last rank and up again.

    >>> placement_of("interleaved", stages=4, chunks=2)
    (0, 1, 2, 3, 0, 1, 2, 3)
    >>> placement_of("zbv", stages=4, chunks=2)
    (0, 1, 2, 3, 3, 2, 1, 0)
    """
    check_schedule_name(name, stages, chunks)
    if name == "zbv":
        return (*range(stages), *reversed(range(stages)))
    return tuple(range(stages)) * chunks


def default_chunks(name: str) -> int:
    """How many chunks a rank holds when nobody says."""
    check_choice("schedule", name, SCHEDULES)
    return _CHUNKS.get(name, 2)


def check_schedule_name(name: str, stages: int, chunks: int) -> None:
    """Raises ConfigError when there is no schedule of this name, or not for these numbers."""
    check_choice("schedule", name, SCHEDULES)
    check_int("stages", stages)
    if name in _CHUNKS and chunks != _CHUNKS[name]:
        raise ConfigError(
            f"num_model_chunks={chunks} for the schedule {name!r}",
            rule="A rank holds both arms of the V" if name == "zbv" else f"In {name} a rank holds one stage",
            remedy=f"Use {_CHUNKS[name]}, or the schedule 'interleaved'",
        )
    if chunks < default_chunks(name):
        raise ConfigError(
            f"num_model_chunks={chunks} for the schedule {name!r}",
            rule="An interleaved schedule has two chunks on each rank, or more",
            remedy="Use 2 or more" + (", or the schedule '1f1b'" if chunks == 1 else ""),
        )


def fitting_micro_batches(name: str, stages: int, chunks: int, at_least: int) -> int:
    """The smallest number of micro-batches from ``at_least`` on that the schedule takes."""
    check_schedule_name(name, stages, chunks)
    step = stages if name.startswith("interleaved") else 1
    return max(1, -(-at_least // step)) * step


def _check_micro_batches(name: str, stages: int, micro_batches: int, chunks: int) -> None:
    above = fitting_micro_batches(name, stages, chunks, at_least=micro_batches)
    if micro_batches < 1:
        raise ConfigError(f"micro_batches={micro_batches}", remedy=f"Use {above} or more")
    if above != micro_batches:
        below = above - stages
        raise ConfigError(
            f"micro_batches={micro_batches} for the schedule {name!r} with {stages} stages",
            rule="An interleaved schedule takes micro-batches in groups of as many as there are stages",
            remedy=f"Use {f'{below} or {above}' if below else above}, or the schedule '1f1b', which takes any number",
        )


# ---------------------------------------------------------------------------------------------------------- the orders


def _gpipe(stages: int, micro_batches: int) -> tuple[RankActions, ...]:
    """All forwards, then all backwards (Huang et al., 2019). Every rank holds the activations of all m micro-batches.

    The backwards come in the order of the forwards, as in every schedule here, so that a stage sums its gradients in
    one order whichever is used::

        p=3, m=3

        0 | F0 F1 F2 .  .  .  .  .  .  B0 -- B1 -- B2 --
        1 | .  F0 F1 F2 .  .  .  B0 -- B1 -- B2 -- .  .
        2 | .  .  F0 F1 F2 B0 -- B1 -- B2 -- .  .  .  .
    """
    return _orders(stages, micro_batches, 1, lambda rank: micro_batches)


def _one_f_one_b(stages: int, micro_batches: int) -> tuple[RankActions, ...]:
    """One forward, one backward in turn, once the pipeline is full (PipeDream-flush, Narayanan et al., 2021).

    Rank r first does p - 1 - r forwards more, and so holds the activations of p - r micro-batches, not m::

        p=4, m=6

        0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 -- F4 B1 -- F5 B2 -- .  B3 -- .  B4 -- .  B5 --
        1 | .  F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- F4 B2 -- F5 B3 -- .  B4 -- .  B5 -- .  .
        2 | .  .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- F4 B3 -- F5 B4 -- .  B5 -- .  .  .  .
        3 | .  .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 -- F5 B5 -- .  .  .  .  .  .
    """
    return _orders(stages, micro_batches, 1, lambda rank: stages - 1 - rank)


def _interleaved(stages: int, micro_batches: int, chunks: int) -> tuple[RankActions, ...]:
    """1F1B where a rank has v chunks, p virtual stages apart (Narayanan et al., 2021, section 2.2).

    Micro-batches come in groups of p. A group passes the first chunk of a rank, then its second, and so on; its
    backwards come in the other order of chunks. The bubble has the time of a chunk, not of a whole stage::

        p=2, m=4, v=2

        0 | F0a F1a F0b F1b F2a .   B0b --  F3a B1b --  F2b B0a --  F3b B1a --  .   B2b --  .   B3b --  B2a --  B3a --
        1 | .   F0a F1a F0b B0b --  F1b B1b --  F2a B0a --  F3a B1a --  F2b B2b --  F3b B3b --  B2a --  B3a --  .   .
    """
    return _orders(stages, micro_batches, chunks, lambda rank: 2 * (stages - 1 - rank) + (chunks - 1) * stages)


def _orders(stages: int, micro_batches: int, chunks: int, ahead: Callable[[int], int]) -> tuple[RankActions, ...]:
    """For each rank some forwards ahead, then a forward and a backward in turn, then the backwards that are left."""
    orders = []
    for rank in range(stages):
        forwards, backwards = (
            [
                Action(kind, chunk * stages + rank, i)
                for group in range(0, micro_batches, stages)
                for chunk in passed
                for i in range(group, min(group + stages, micro_batches))
            ]
            for kind, passed in ((ActionKind.FORWARD, range(chunks)), (ActionKind.BACKWARD, range(chunks)[::-1]))
        )
        first = min(ahead(rank), len(forwards))
        pairs = zip(forwards[first:], backwards)
        in_turn = (action for pair in pairs for action in pair)
        orders.append((*forwards[:first], *in_turn, *backwards[len(forwards) - first :]))
    return tuple(orders)


DURATIONS: Mapping[ActionKind, float] = {
    ActionKind.FORWARD: 1.0,
    ActionKind.BACKWARD: 2.0,
    ActionKind.INPUT: 1.0,
    ActionKind.WEIGHT: 1.0,
}
"""In the time of the forward of one chunk. A backward is two matrix products for a forward's one."""
Durations = Mapping[ActionKind, float] | Mapping[ActionKind | tuple[ActionKind, int], float]
_SHOWN_PROBLEMS = 5


class ActionSpan(NamedTuple):
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

    spans: tuple[tuple[ActionSpan, ...], ...]
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
    spans, stuck = _simulate_ranks(schedule, of, send)
    if stuck:
        raise _broken(schedule, [stuck])
    makespan = max((row[-1].end for row in spans if row), default=0.0)
    idle = tuple(max(0.0, makespan - sum(span.end - span.start for span in row)) for row in spans)
    return Timeline(
        spans=tuple(tuple(row) for row in spans),
        makespan=makespan,
        idle=idle,
        bubble=sum(idle) / (len(idle) * makespan) if makespan else 0.0,
        in_flight=tuple(peak_in_flight(order) for order in schedule.actions),
    )


def bubble_formula(name: str, stages: int, micro_batches: int, chunks: int) -> float | None:
    """The bubble in closed form, if sending takes no time, and F, I and W the same; None where there is no such form.

    With p stages, m micro-batches and v chunks a rank works for v m pairs of F and B, and waits for p - 1::

        gpipe, 1f1b     (p - 1) / (m + p - 1)          p=4, m=8: 3 / 11 = 27 %
        interleaved     (p - 1) / (v m + p - 1)        p=4, m=8, v=2: 3 / 19 = 16 %
        interleaved_zb  (p - 1) / (3 v m + p - 1)      p=4, m=8, v=2: 3 / 51 = 6 %
    """
    check_schedule_name(name, stages, chunks)
    if name == "zbv":
        return None
    pairs = chunks * micro_batches * (3 if name == "interleaved_zb" else 1)
    return (stages - 1) / (pairs + stages - 1)


def check_schedule(schedule: Schedule) -> None:
    """Raises ConfigError when a schedule cannot be run: see ``problems``."""
    found = problems(schedule)
    if found:
        raise _broken(schedule, found)


def problems(schedule: Schedule) -> list[str]:
    """What is wrong with a schedule, in words: actions that are missing, twice, elsewhere, or in no possible order.

    One without any backward is whole, too: it evaluates.
    """
    done = Counter(action for order in schedule.actions for action in order)
    kinds = {action.kind for action in done} | {ActionKind.FORWARD}
    found = []
    if kinds not in (
        {ActionKind.FORWARD},
        {ActionKind.FORWARD, ActionKind.BACKWARD},
        {ActionKind.FORWARD, ActionKind.INPUT, ActionKind.WEIGHT},
    ):
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
    stuck = _simulate_ranks(schedule, DURATIONS, 0.0)[1]
    return found + [stuck] if stuck else found


def _simulate_ranks(
    schedule: Schedule, durations: Mapping[Any, float], send: float
) -> tuple[list[list[ActionSpan]], str]:
    """The spans of each rank, and how it stands when no rank can go on ("" when all is done)."""
    spans: list[list[ActionSpan]] = [[] for _ in schedule.actions]
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
                spans[rank].append(ActionSpan(action, start, ended[action][0]))
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
        remedy="Build it with make_schedule, or mend the named actions",
    )
