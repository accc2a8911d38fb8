"""Schedules whose backward is split in two, so that the gradients of the weights fill what would be idle time.

Both are found by playing the pipeline through in steps of one unit, the time of an F, an I or a W: in each step each
rank takes the most wanted of the actions that can be done by then. No choice is left to chance, so every rank that asks
gets the same schedule. (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, and "Pipeline Parallelism with
Controllable Memory", 2024.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from shardformer.pipeline.actions import Action, Kind, Order


class _Play:
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

    def run(self, total: int, choose: Callable[[int], Action | None]) -> tuple[Order, ...]:
        """Steps until ``total`` actions are done. ``choose`` names what a rank does in this step, or None."""
        while len(self.done_at) < total:
            chosen = [choose(rank) for rank in range(len(self.orders))]
            # what waits only for the step that has just ended can be done now, so somebody always moves
            assert any(chosen), f"the pipeline stands still at {self.now}"
            for rank, action in enumerate(chosen):
                if action is not None:
                    self.done_at[action] = self.now + 1
                    self.orders[rank].append(action)
                    self.held[rank] += {Kind.FORWARD: 1, Kind.WEIGHT: -1}.get(action.kind, 0)
            self.now += 1
        return tuple(tuple(order) for order in self.orders)


def fill_with_weights(orders: Sequence[Order], last: int) -> tuple[Order, ...]:
    """Splits every B of ``orders`` into an I in its place and a W where the rank would else be idle.

    A rank holds no more activations than the fullest rank of ``orders`` does; at that number a W comes before an F. For
    p stages of v chunks and m micro-batches in the interleaved order the bubble is a third, (p - 1) / (3 v m + p - 1)::

        p=2, m=4, v=2

        0 | F0a F1a F0b F1b F2a I0b W0b F3a I1b W1b F2b I0a W0a F3b I1a I2b W1a W2b I3b I2a I3a W3b W2a W3a .
        1 | .   F0a F1a F0b I0b F1b I1b F2a I0a W0b F3a I1a W1b F2b I2b W0a F3b I3b I2a I3a W1a W2b W3b W2a W3a
    """
    wanted = [deque(replace(a, kind=Kind.INPUT) if a.kind is Kind.BACKWARD else a for a in order) for order in orders]
    weights: list[deque[Action]] = [deque() for _ in orders]
    limit = max(most_held(order) for order in orders)
    play = _Play(len(orders), last)

    def choose(rank: int) -> Action | None:
        full = play.held[rank] >= limit
        if wanted[rank]:
            first = wanted[rank][0]
            if play.can(first) and not (full and first.kind is Kind.FORWARD):
                wanted[rank].popleft()
                if first.kind is Kind.INPUT:
                    weights[rank].append(replace(first, kind=Kind.WEIGHT))
                return first
        return weights[rank].popleft() if weights[rank] else None

    num_backwards = sum(a.kind is Kind.BACKWARD for order in orders for a in order)
    return play.run(3 * num_backwards, choose)


def most_held(order: Sequence[Action]) -> int:
    """The most (virtual stage, micro-batch) whose activations are held at a time: from F to B, or from F to W."""
    held = most = 0
    for action in order:
        held += {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT: -1}.get(action.kind, 0)
        most = max(most, held)
    return most


def zbv(stages: int, micro_batches: int) -> tuple[Order, ...]:
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


def _zbv_of_rank(stages: int, micro_batches: int, rank: int) -> Order:
    """The order of the ZB-V schedule of Qi et al., 2024, for as many micro-batches as fill the V, or more."""
    down, up, behind = rank, 2 * stages - 1 - rank, stages - rank
    counts = {(kind, stage): 0 for kind in Kind for stage in (down, up)}
    order: list[Action] = []

    def add(times: int, *steps: tuple[Kind, int]) -> None:
        for step in steps * times:
            if counts[step] < micro_batches:
                order.append(Action(*step, counts[step]))
                counts[step] += 1

    of_down, of_up = ([(kind, stage) for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)] for stage in (down, up))
    add(2 * behind - 1, of_down[0])
    add(rank, of_up[0], of_down[0])
    add(behind, *of_up)
    add(micro_batches - stages, *of_down, *of_up)
    add(rank, of_down[1], of_up[1])
    add(behind, *of_down[1:])
    add(micro_batches, of_up[2])
    add(micro_batches, of_down[2])
    return tuple(order)


def _zbv_of_few(stages: int, micro_batches: int) -> tuple[Order, ...]:
    """For too few micro-batches to fill the V.

    The second chunk goes before the first and F before I, so that what was begun is ended; W comes when nothing else
    can be done. Of the 2p activations one is kept free for the second chunk, without which the first could fill the
    rank for good.
    """
    last, limit = 2 * stages - 1, 2 * stages
    play = _Play(stages, last)
    following = {(kind, stage): 0 for kind in Kind for stage in range(last + 1)}  # the next micro-batch of each

    def choose(rank: int) -> Action | None:
        down, up = rank, last - rank
        wishes = [(Kind.FORWARD, up), (Kind.INPUT, up), (Kind.FORWARD, down), (Kind.INPUT, down)]
        for kind, stage in (*wishes, (Kind.WEIGHT, up), (Kind.WEIGHT, down)):
            action = Action(kind, stage, following[kind, stage])
            room = limit - play.held[rank] - (stage == down)
            if action.micro_batch < micro_batches and play.can(action) and (kind is not Kind.FORWARD or room > 0):
                following[kind, stage] += 1
                return action
        return None

    return play.run(6 * stages * micro_batches, choose)
