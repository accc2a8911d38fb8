"""Schedules as data: for each rank of the pipe axis the list of what it does, one action after another.

Notation: p stages (ranks of the pipe axis), m micro-batches, v chunks (virtual stages that a rank holds). In the
pictures a row is a rank, a column the time of one F; a B takes two. ``F3`` is the forward of micro-batch 3, and the
letter behind it the chunk, where a rank has several. A test draws the same pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from shardformer.errors import ConfigError, nearest
from shardformer.pipeline.actions import Action, Kind, Order
from shardformer.pipeline.zero_bubble import fill_with_weights, zbv

__all__ = [
    "Action", "Kind", "Order", "Schedule", "SCHEDULES", "check_names", "default_chunks", "fitting_micro_batches",
    "forward_only", "make_schedule", "messages", "placement_of",
]  # fmt: skip

SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv")
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
    chunks: int
    placement: tuple[int, ...]
    actions: tuple[Order, ...]

    @property
    def last(self) -> int:
        """The virtual stage that gives the loss."""
        return self.stages * self.chunks - 1

    def chunk_of(self, stage: int) -> int:
        """Which of its rank's virtual stages one is, counted in the order in which a micro-batch passes them."""
        return stage // self.stages


MOST_ACTIONS = 2**20
"""Forwards of a schedule, on all stages."""


@lru_cache(maxsize=256)
def make_schedule(name: str, stages: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """The schedule ``name`` for p stages and m micro-batches.

    Args:
        chunks: virtual stages that a rank holds; None for the schedule's own number.

    Raises ConfigError when there is no such schedule, or not for these numbers.
    """
    chunks = default_chunks(name) if chunks is None else chunks
    check_names(name, stages, chunks)
    _check_micro_batches(name, stages, micro_batches, chunks)
    if stages * chunks * micro_batches > MOST_ACTIONS:
        raise ConfigError(
            f"{micro_batches} micro-batches over {stages} stages of {chunks} chunks",
            rule=f"A schedule names each of them on each virtual stage: {MOST_ACTIONS:,} at the most",
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
        orders = fill_with_weights(_interleaved(stages, micro_batches, chunks), last=stages * chunks - 1)
    else:
        orders = zbv(stages, micro_batches)
    return Schedule(name, stages, micro_batches, chunks, placement, orders)


def forward_only(schedule: Schedule) -> Schedule:
    """The same without the backwards, for evaluation."""
    return replace(
        schedule, actions=tuple(tuple(a for a in order if a.kind is Kind.FORWARD) for order in schedule.actions)
    )


def messages(schedule: Schedule, sender: int, receiver: int) -> Order:
    """The actions of rank ``sender`` whose result goes to rank ``receiver``, in the order in which they are done.

    After F of a virtual stage its output goes to the rank of the next one; after B or I the gradient of its input to
    the rank of the one before. What stays on a rank, and what W gives, is not sent.
    """
    return tuple(a for a in schedule.actions[sender] if receiver != sender and receiver == goes_to(schedule, a))


def goes_to(schedule: Schedule, action: Action) -> int | None:
    """The rank that takes the result of ``action``, its own one among them; None if there is none."""
    is_sent = action.kind is not Kind.WEIGHT and 0 <= action.taker <= schedule.last
    return schedule.placement[action.taker] if is_sent else None


# ------------------------------------------------------------------------------------------------- what goes with what


def placement_of(name: str, stages: int, chunks: int) -> tuple[int, ...]:
    """The rank of each virtual stage: round and round, or for zbv down to the last rank and up again.

    >>> placement_of("interleaved", stages=4, chunks=2)
    (0, 1, 2, 3, 0, 1, 2, 3)
    >>> placement_of("zbv", stages=4, chunks=2)
    (0, 1, 2, 3, 3, 2, 1, 0)
    """
    check_names(name, stages, chunks)
    if name == "zbv":
        return (*range(stages), *reversed(range(stages)))
    return tuple(range(stages)) * chunks


def default_chunks(name: str) -> int:
    """How many chunks a rank holds when nobody says."""
    _check_name(name)
    return _CHUNKS.get(name, 2)


def check_names(name: str, stages: int, chunks: int) -> None:
    """Raises ConfigError when there is no schedule of this name, or not for these numbers."""
    _check_name(name)
    if stages < 1:
        raise ConfigError(f"stages={stages}", rule="A pipeline has one stage or more", remedy="Use 1 or more")
    if name in _CHUNKS and chunks != _CHUNKS[name]:
        raise ConfigError(
            f"chunks={chunks} for the schedule {name!r}",
            rule="A rank holds both arms of the V" if name == "zbv" else f"In {name} a rank holds one stage",
            remedy=f"Use {_CHUNKS[name]}, or the schedule 'interleaved'",
        )
    if chunks < default_chunks(name):
        raise ConfigError(
            f"chunks={chunks} for the schedule {name!r}",
            rule="An interleaved schedule has two chunks on each rank, or more",
            remedy="Use 2 or more" + (", or the schedule '1f1b'" if chunks == 1 else ""),
        )


def _check_name(name: str) -> None:
    if name not in SCHEDULES:
        raise ConfigError(
            f"schedule={name!r}", rule=f"The schedules are {', '.join(SCHEDULES)}", remedy=nearest(name, SCHEDULES)
        )


def fitting_micro_batches(name: str, stages: int, chunks: int, at_least: int) -> int:
    """The smallest number of micro-batches from ``at_least`` on that the schedule takes."""
    check_names(name, stages, chunks)
    step = stages if name.startswith("interleaved") else 1
    return max(1, -(-at_least // step)) * step


def _check_micro_batches(name: str, stages: int, micro_batches: int, chunks: int) -> None:
    above = fitting_micro_batches(name, stages, chunks, at_least=micro_batches)
    if micro_batches < 1:
        raise ConfigError(
            f"micro_batches={micro_batches}", rule="A batch is cut into one part or more", remedy=f"Use {above} or more"
        )
    if above != micro_batches:
        below = above - stages
        raise ConfigError(
            f"micro_batches={micro_batches} for the schedule {name!r} with {stages} stages",
            rule="An interleaved schedule takes micro-batches in groups of as many as there are stages",
            remedy=f"Use {f'{below} or {above}' if below else above}, or the schedule '1f1b', which takes any number",
        )


# ---------------------------------------------------------------------------------------------------------- the orders


def _gpipe(stages: int, micro_batches: int) -> tuple[Order, ...]:
    """All forwards, then all backwards (Huang et al., 2019). Every rank holds the activations of all m micro-batches.

    The backwards come in the order of the forwards, as in every schedule here, so that a stage sums its gradients in
    one order whichever is used::

        p=3, m=3

        0 | F0 F1 F2 .  .  .  .  .  .  B0 -- B1 -- B2 --
        1 | .  F0 F1 F2 .  .  .  B0 -- B1 -- B2 -- .  .
        2 | .  .  F0 F1 F2 B0 -- B1 -- B2 -- .  .  .  .
    """
    return _orders(stages, micro_batches, 1, lambda rank: micro_batches)


def _one_f_one_b(stages: int, micro_batches: int) -> tuple[Order, ...]:
    """One forward, one backward in turn, once the pipeline is full (PipeDream-flush, Narayanan et al., 2021).

    Rank r first does p - 1 - r forwards more, and so holds the activations of p - r micro-batches, not m::

        p=4, m=6

        0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 -- F4 B1 -- F5 B2 -- .  B3 -- .  B4 -- .  B5 --
        1 | .  F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- F4 B2 -- F5 B3 -- .  B4 -- .  B5 -- .  .
        2 | .  .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- F4 B3 -- F5 B4 -- .  B5 -- .  .  .  .
        3 | .  .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 -- F5 B5 -- .  .  .  .  .  .
    """
    return _orders(stages, micro_batches, 1, lambda rank: stages - 1 - rank)


def _interleaved(stages: int, micro_batches: int, chunks: int) -> tuple[Order, ...]:
    """1F1B where a rank has v chunks, p virtual stages apart (Narayanan et al., 2021, section 2.2).

    Micro-batches come in groups of p. A group passes the first chunk of a rank, then its second, and so on; its
    backwards come in the other order of chunks. The bubble has the time of a chunk, not of a whole stage::

        p=2, m=4, v=2

        0 | F0a F1a F0b F1b F2a .   B0b --  F3a B1b --  F2b B0a --  F3b B1a --  .   B2b --  .   B3b --  B2a --  B3a --
        1 | .   F0a F1a F0b B0b --  F1b B1b --  F2a B0a --  F3a B1a --  F2b B2b --  F3b B3b --  B2a --  B3a --  .   .
    """
    return _orders(stages, micro_batches, chunks, lambda rank: 2 * (stages - 1 - rank) + (chunks - 1) * stages)


def _orders(stages: int, micro_batches: int, chunks: int, ahead: Callable[[int], int]) -> tuple[Order, ...]:
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
            for kind, passed in ((Kind.FORWARD, range(chunks)), (Kind.BACKWARD, range(chunks)[::-1]))
        )
        first = min(ahead(rank), len(forwards))
        pairs = zip(forwards[first:], backwards)
        in_turn = (action for pair in pairs for action in pair)
        orders.append((*forwards[:first], *in_turn, *backwards[len(forwards) - first :]))
    return tuple(orders)
