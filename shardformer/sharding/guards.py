"""What a sharded model checks and refuses before each forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collectives import checksum
from shardformer.errors import ConfigError, InputError
from shardformer.layers.random_stream import align_random
from shardformer.layers.tensor.pending import resolved
from shardformer.layout.state import ShardedState
from shardformer.mesh.axis import Axis
from shardformer.reduce.wrappers import check_ddp, check_parameters, refuse_wrappers
from shardformer.sharding.agree import differs
from shardformer.sharding.stages import OF_EVERY_LAYER, WHY_NOT


class Guard:
    """Before a forward: what an error broke off is forgotten, gradients are hooked; once, inputs are compared.

    In training the ranks that are given the same batch draw the same random numbers outside of blocks, whatever a
    script seeded them with. What the model gives are plain tensors.
    """

    def __init__(self, model: nn.Module, state: ShardedState, *, is_cut: bool) -> None:
        self._state, self._is_cut = state, is_cut
        self._compared = not state.request.extra.get("check_inputs", True) or state.alike.size == 1
        self._known = False
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._behind)
        if any(axis.size > 1 for axis in state.context.axes.values()):
            refuse_wrappers(model, state.context)
        state.check_call = self._refuse_outputs

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() < 0:  # not a recomputation in a backward
            for edge in self._state.edges:
                edge.abandon()
        for reducer in self._state.reducers:
            reducer.refresh()
        self._refuse_alone(model)
        check_ddp(model, self._state.context)
        self._refuse_outputs(model, kwargs)
        if not self._known:
            self._known = True
            check_parameters(model, self._state)
        if not self._compared:
            self._compared = True
            compare_inputs([*args, *kwargs.values()], self._state.alike)
        if self._aligns(model):
            align_random(self._state.alike, self._state.context.device)

    def _behind(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return resolved(output)

    def _aligns(self, model: nn.Module) -> bool:
        """In a pipeline each micro-batch has its seed, and a recomputation has the random state of its forward."""
        in_pipeline = self._state.stages is not None and self._state.stages.is_running
        return model.training and self._is_cut and not in_pipeline and torch._C._current_graph_task_id() < 0

    def _refuse_alone(self, model: nn.Module) -> None:
        """A stage is no model by itself: only a pipeline hands it what the stage before made."""
        stages = self._state.stages
        if stages is None or stages.manager.num_stages == 1:
            return
        if stages.stage_forward is None or stages.is_running:
            return
        raise ConfigError(
            f"This {type(model).__name__} was called on stage {stages.manager.stage} of {stages.manager.num_stages}",
            rule="A stage has a part of the layers: all stages run a batch together, and generate() they cannot",
            remedy="Write pipeline = shardformer.Pipeline(model, micro_batches=...), then pipeline.step(batch), "
            "pipeline.evaluate(batch) or pipeline.forward(batch)",
        )

    def _refuse_outputs(self, model: nn.Module, kwargs: Mapping[str, Any]) -> None:
        cuts = [cut.dim for cut in self._state.stream.cuts]
        settings, in_stages = getattr(model, "config", None), self._state.context.pipe.size > 1
        for name, when, why in (
            ("output_attentions", self._is_cut, "Between the blocks each tensor rank holds its own heads only"),
            (
                "output_hidden_states",
                bool(cuts),
                f"Between the blocks each rank holds a part of the {' and '.join(cuts)}",
            ),
            (
                "output_router_logits",
                bool(cuts),
                "The loss of routers is one of all tokens, which no rank has",
            ),
            *((name, in_stages, WHY_NOT) for name in OF_EVERY_LAYER),
            ("use_cache", in_stages, "Keys and values would be kept by the stage that has the layer"),
        ):
            asked = kwargs.get(name, False if name == "use_cache" else None)
            if when and (getattr(settings, name, False) if asked is None else asked):
                raise ConfigError(
                    f"{name}=True on a model that is sharded over {self._state.context}",
                    rule=why,
                    remedy=f"Leave {name} off, or run the plain model for it",
                )


def compare_inputs(values: list[Any], axis: Axis) -> None:
    """Raises InputError on every rank when ranks were not fed the same that should be. A few numbers are gathered."""
    if differs([checksum(v) for v in values if isinstance(v, Tensor)], axis):
        raise InputError(
            f"The {axis.size} {axis.name.replace('_', ' and ')} ranks were fed different batches",
            rule="Tensor and sequence ranks compute one batch together; only data ranks have batches of their own",
            remedy="Draw the batch by the data rank: context.data.rank of context.data.size, not the global rank",
        )
