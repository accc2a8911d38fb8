"""The words of a schedule: what a rank does with one micro-batch in one stage, and what must have been done before.

A rank of the pipe axis holds one stage or several; each is a *virtual stage*, counted from 0, which takes the model's
input, to the last, which gives its loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is done. A backward is either one ``B``, or an ``I`` and, at some later time, its ``W``."""

    FORWARD = "F"
    BACKWARD = "B"  # the whole backward
    INPUT = "I"  # backward towards the stage's input only, which the stage before waits for
    WEIGHT = "W"  # the gradients of the stage's weights, which nobody waits for


@dataclass(frozen=True, order=True)
class Action:
    """One micro-batch through one virtual stage, forwards or backwards.

    >>> print(Action(Kind.FORWARD, stage=2, micro_batch=3))
    F3@2
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}@{self.stage}"

    @property
    def taker(self) -> int:
        """The virtual stage that its result is for: behind a forward the next one, behind a backward the one before."""
        return self.stage + (1 if self.kind is Kind.FORWARD else -1)

    def needs(self, last: int) -> tuple[Action, ...]:
        """What must have been done before this, where ``last`` is the last virtual stage."""
        forward = Action(Kind.FORWARD, self.stage, self.micro_batch)
        if self.kind is Kind.FORWARD:
            return (Action(self.kind, self.stage - 1, self.micro_batch),) if self.stage > 0 else ()
        if self.kind is Kind.WEIGHT:
            return (Action(Kind.INPUT, self.stage, self.micro_batch),)
        return (forward, Action(self.kind, self.stage + 1, self.micro_batch)) if self.stage < last else (forward,)


Order = tuple[Action, ...]
"""What one rank does, one after another."""
