"""The options of a pipeline on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardformer.errors import ConfigError, nearest
from shardformer.pipeline.balance import CUTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardformer.verify import Pipelined


def pipelined(
    pipe: int | None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    cut: str | None = None,
    loss_weight: Callable[[Mapping[str, Any]], float] | None = None,
) -> Pipelined | None:
    """What the options say, None where they ask for no pipeline.

    Raises ConfigError for what no schedule can do, before anything is loaded.
    """
    others = {"micro-batches": micro_batches, "schedule": schedule, "chunks": chunks, "cut": cut}
    if pipe is None:
        given = [f"--{name} {value}" for name, value in others.items() if value is not None]
        if given:
            raise ConfigError(
                f"{' '.join(given)} without --pipe",
                rule="These options say how a pipeline runs, and --pipe over how many stages",
                remedy="Add --pipe 2, or leave them out",
            )
        return None
    from shardformer.verify import Pipelined
    from shardformer.verify.ahead import AskedStages

    asked = {"schedule": schedule, "num_model_chunks": chunks, "cut": None if cut is None else cut_of(cut)}
    found = Pipelined(pipe, micro_batches, {n: v for n, v in asked.items() if v is not None}, loss_weight)
    AskedStages(pipe, micro_batches, **found.stages)
    return found


def cut_of(given: str) -> str | Sequence[int]:
    """``cost``, ``even``, or ``3,5``: how many layers each virtual stage has."""
    if given in CUTS:
        return given
    counts = [part.strip() for part in given.split(",")]
    if all(count.isdecimal() and len(count) < 5 for count in counts):
        return [int(count) for count in counts]
    hint = nearest(given, CUTS) if given.isalpha() else ""
    raise ConfigError(
        f"--cut {given}",
        rule="Layers are cut into stages by cost, evenly, or by a list of how many each virtual stage has",
        remedy=f"{hint} Write --cut cost, --cut even, or as --cut 3,5".strip(),
    )
