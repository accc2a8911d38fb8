"""In which order the units of stage 3 are gathered."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

END = -1
"""In the place of a unit: there is none any more."""


@dataclass
class Plan:
    """The units in the order in which they are gathered, by index.

    Args:
        complete: position -> the units whose gradients are all there when the walk leaves it.
        unseen: units that no rank read, which stand where the model registers them.
        is_open: whether ranks differed, or layers were left out by all: then a later walk may show more, and the ranks
            ask each other for that at the end of each.
    """

    units: list[int] = field(default_factory=list)
    complete: dict[int, list[int]] = field(default_factory=dict)
    unseen: list[int] = field(default_factory=list)
    is_open: bool = False

    def insert(self, index: int, at: int) -> None:
        """Puts a unit before the one at a position."""
        self.units.insert(at, index)
        self.complete = {n + (n >= at): found for n, found in self.complete.items()}

    def place(self, index: int, at: int) -> int:
        """The first position from ``at`` on at which a unit stands; END where there is none."""
        return next((n for n in range(max(at, 0), len(self.units)) if self.units[n] == index), END)

    def comes_again(self, index: int, at: int) -> bool:
        """Whether a unit stands at ``at`` or behind it."""
        return self.place(index, at) != END

    def places(self, own: Sequence[int]) -> list[int]:
        """The positions at which a rank that follows the plan finds what it reads."""
        places, at = [], 0
        for index in own:
            at = max(self.place(index, at), at)
            places.append(at)
        return places

    def take_up_unseen(self, units: Sequence[int], layers: Collection[int]) -> None:
        """Of a forward: units that no rank ran stand behind the one before them."""
        self.unseen = [index for index in units if index not in self.units]
        self.is_open |= any(index in layers for index in self.unseen)
        for index in self.unseen:
            lower = [n for n in self.units if n < index]
            self.insert(index, self.units.index(max(lower)) + 1 if lower else 0)

    def take_up(self, forward: Plan) -> None:
        """Of a backward: what no rank ran in the forward stands behind the one that comes after it there."""
        self.unseen, self.is_open = forward.unseen, self.is_open or forward.is_open
        for index in (index for index in self.unseen if index not in self.units):
            higher = [n for n in self.units if n > index]
            self.insert(index, len(self.units) - self.units[::-1].index(min(higher)) if higher else 0)


def found_plan(record: Sequence[int], before: Plan | None, said: Sequence[tuple[list[int], Mapping[int, int]]]) -> Plan:
    """The plan of a walk that was found out on the way.

    Args:
        record: the units as they were gathered.
        before: the plan that a rank has left; None in the first walk of a kind.
        said: for each rank the units that it read, and for each unit the place in these where its last gradient came.
    """
    plan = Plan(list(record))
    if before is not None:
        plan.units, plan.unseen = before.units, before.unseen
        for own, _ in said:
            plan.units = _merged(plan.units, own)
    plan.is_open = before is not None or any(own != plan.units for own, _ in said)
    last: dict[int, int] = {}
    for own, arrivals in said:
        places = plan.places(own)
        for index, at in arrivals.items():
            last[index] = max(places[at] if at >= 0 else 0, last.get(index, 0))
    for index, at in sorted(last.items(), reverse=True):
        if at < len(plan.units) - 1:
            plan.complete.setdefault(at, []).append(index)
    return plan


def _merged(first: list[int], second: list[int]) -> list[int]:
    """A row in which both rows are found, in their order."""
    out: list[int] = []
    for _, a, b, c, d in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        out += first[a:b] if first[a:b] == second[c:d] else first[a:b] + second[c:d]
    return out
