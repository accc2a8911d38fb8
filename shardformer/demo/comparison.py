"""The two runs after each other, and whether anybody could tell them apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory

from shardformer.demo.journal import Note, follow
from shardformer.demo.models import TASK, Chosen
from shardformer.demo.settings import Settings
from shardformer.demo.text import Windows
from shardformer.demo.training import DemoRun, train
from shardformer.testing.pool import WorkerPool

BOUND = 1e-4
"""Relative, for every loss; in the middle between what rounding does and what mistakes do.

Measured with the default sizes: up to 2e-6 over 120 steps when all is right. Within 25 steps 4e-3 when the gradients of
norms are not summed, 9e-3 when gradients are clipped by a rank's own norm, 7e-2 when one block lacks an all-reduce.
"""
DRIFT_FACTOR = 10.0
TIMEOUT_S = 24 * 3600.0

Tell = Callable[[Note], None]


@dataclass(frozen=True)
class Outcome:
    """Both runs: the plain one, and each rank of the split one.

    ``drift`` is how far the plain run differs from itself when the samples of each batch change places. That is the
    same training but for the rounding, and is only measured where the bound was not kept.
    """

    plain: DemoRun
    split: list[DemoRun]
    drift: float | None = None

    @property
    def differences(self) -> list[float]:
        """Of the losses of each step, relative."""
        return relative_differences(self.plain.losses, self.split[0].losses)

    @property
    def allowed(self) -> float:
        """The bound, or what rounding does to the plain run itself where that is more."""
        if self.drift is None or not isfinite(self.drift):
            return BOUND
        return max(BOUND, DRIFT_FACTOR * self.drift)

    @property
    def passed(self) -> bool:
        return all(difference <= self.allowed for difference in self.differences)


def relative_differences(losses: list[float], others: list[float]) -> list[float]:
    """One for each step; infinite where a loss is not a number."""
    pairs = zip(losses, others, strict=True)
    return [abs(a - b) / max(abs(a), 1e-30) if a == a and b == b else float("inf") for a, b in pairs]


def compare(settings: Settings, chosen: Chosen, start: Callable[[str], Tell]) -> Outcome:
    """Trains in one process, then in ``settings.num_processes``, with the same first weights and the same batches.

    ``start`` is called with the name of each run that begins, and what it gives with each of its steps.

    Raises WorkerError when a process dies, ShardFormerError when the model cannot be split as asked.
    """
    batch_fn = Windows(chosen.text.tokens, TASK[chosen.family], settings.batch, settings.sequence, chosen.mask)
    with TemporaryDirectory(prefix="shardformer-") as folder:

        def run(name: str, num_processes: int, batch_fn: Windows) -> list[DemoRun]:
            journal = str(Path(folder, name.replace(" ", "-")))
            pipe = settings.pipe if settings.pipe is not None and num_processes > 1 else 1
            with (
                follow(journal, start(name)),
                WorkerPool(num_processes, timeout_s=TIMEOUT_S, imports=("torch", "transformers")) as pool,
            ):
                return pool.run(train, settings, chosen.model_fn, batch_fn, chosen.learning_rate, journal, pipe)

        plain = run("one process", 1, batch_fn)[0]
        outcome = Outcome(plain, run(f"split over {settings.num_processes}", settings.num_processes, batch_fn))
        if outcome.passed:
            return outcome
        again = run("one, reordered", 1, replace(batch_fn, flipped=True))[0]
        return replace(outcome, drift=max(relative_differences(plain.losses, again.losses)))
