"""The stages of a pipeline as one process sees them: which it is, who stands beside it, what each of them holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shardformer.comm.point_to_point import PointToPoint
from shardformer.errors import ConfigError, expect, nearest
from shardformer.mesh.axis import Axis
from shardformer.mesh.context import ParallelContext
from shardformer.pipeline.balance import CUTS
from shardformer.pipeline.schedule import check_names, default_chunks, placement_of


class PipelineStageManager:
    """How a model is cut into stages, and this process's place among them.

    A rank of the pipe axis holds one *virtual stage*, or several (``num_model_chunks``) with a schedule that visits
    each rank more than once; a micro-batch passes the virtual stages in order.

    Args:
        context: the grid, from ``launch_from_torch(pipe=...)``.
        schedule: "gpipe", "1f1b", "interleaved", "interleaved_zb" or "zbv".
        num_model_chunks: virtual stages on each rank; None for the schedule's own number (2 for the last three).
        cut: "cost" makes the largest stage as cheap as can be, by the weights that a token meets; "even" gives each
            stage as many layers, or nearly; a list says how many layers each virtual stage has.
        costs: what each layer costs, in any unit, in place of what is estimated; for ``cut="cost"``.
        checkpoint_layers: how many layers of each virtual stage compute their activations again in the backward
            instead of keeping them: a number for all, or a list of one for each; None keeps all.
    """

    def __init__(
        self,
        context: ParallelContext,
        schedule: str = "1f1b",
        num_model_chunks: int | None = None,
        *,
        cut: str | Sequence[int] = "cost",
        costs: Sequence[float] | None = None,
        checkpoint_layers: int | Sequence[int] | None = None,
    ) -> None:
        if not isinstance(context, ParallelContext):
            raise ConfigError(
                f"PipelineStageManager was given {context!r:.60}",
                rule="The stages stand along the pipe axis of the grid",
                remedy="Give it what launch_from_torch(pipe=...) returned",
            )
        self.context, self.schedule = context, schedule
        self.num_model_chunks = default_chunks(schedule) if num_model_chunks is None else num_model_chunks
        check_names(schedule, self.axis.size, self.num_model_chunks)
        self.placement = placement_of(schedule, self.axis.size, self.num_model_chunks)
        self.cut, self.costs, self.checkpoint_layers = cut, costs, checkpoint_layers
        self._check_cut()
        self.point_to_point = PointToPoint(context)

    @property
    def axis(self) -> Axis:
        """The pipe axis."""
        return self.context.pipe

    @property
    def num_stages(self) -> int:
        """Ranks of the pipe axis."""
        return self.axis.size

    @property
    def stage(self) -> int:
        """This process's rank on the pipe axis."""
        return self.axis.rank

    @property
    def num_virtual_stages(self) -> int:
        return len(self.placement)

    @property
    def virtual_stages(self) -> tuple[int, ...]:
        """The virtual stages that this process holds, in the order in which a micro-batch passes them."""
        return self.virtual_stages_of(self.stage)

    def virtual_stages_of(self, stage: int) -> tuple[int, ...]:
        return tuple(v for v, rank in enumerate(self.placement) if rank == stage)

    @property
    def last_stage(self) -> int:
        """The rank on the pipe axis that gives the loss."""
        return self.placement[-1]

    def options(self) -> dict[str, Any]:
        """What was asked for, which is the same on all ranks."""
        return {
            "schedule": self.schedule, "num_model_chunks": self.num_model_chunks, "cut": self.cut, "costs": self.costs,
            "checkpoint_layers": self.checkpoint_layers,
        }  # fmt: skip

    def checkpointed(self, lengths: Sequence[int]) -> list[int]:
        """How many layers of each virtual stage are checkpointed, of those that it has."""
        asked = self.checkpoint_layers
        if asked is None:
            return [0] * len(lengths)
        counts = [asked] * len(lengths) if isinstance(asked, int) else list(asked)
        if len(counts) != len(lengths) or any(type(n) is not int or n < 0 for n in counts):
            raise ConfigError(
                f"checkpoint_layers={asked!r}",
                rule=f"It is a number of layers, or one for each of the {len(lengths)} virtual stages",
                remedy=f"Write checkpoint_layers={list(lengths)} to checkpoint all",
            )
        return [min(n, length) for n, length in zip(counts, lengths, strict=True)]

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineStageManager:
        return self  # its groups cannot be copied

    def _check_cut(self) -> None:
        is_row = isinstance(self.cut, Sequence) and not isinstance(self.cut, str)
        rule = "Stages are cut by 'cost', 'even', or by a list of how many layers each has"
        expect("cut", self.cut, is_row or isinstance(self.cut, str), rule, "Write cut='even'")
        costs: Any = self.costs
        is_row = isinstance(costs, Sequence) and all(isinstance(c, int | float) and 0 <= c < math.inf for c in costs)
        rule, remedy = "They are numbers, one for each layer", "Leave costs out to have them estimated"
        expect("costs", costs, costs is None or is_row, rule, remedy)
        asked: Any = self.checkpoint_layers
        is_row = isinstance(asked, Sequence) and not isinstance(asked, str)
        rule, remedy = "It is a number of layers, or one for each virtual stage", "Write checkpoint_layers=4"
        expect("checkpoint_layers", asked, asked is None or is_row or type(asked) is int, rule, remedy)
        if isinstance(self.cut, str) and self.cut not in CUTS:
            raise ConfigError(
                f"cut={self.cut!r}",
                rule="Stages are cut by 'cost', 'even', or by a list of how many layers each has",
                remedy=nearest(self.cut, CUTS),
            )
        if self.costs is not None and self.cut != "cost":
            raise ConfigError(
                f"costs are given with cut={self.cut!r}",
                rule="Costs decide where to cut, and here something else does",
                remedy="Leave one of the two out",
            )
