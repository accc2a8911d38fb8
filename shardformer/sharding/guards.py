"""What a sharded model checks and refuses before each forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardformer.comm.collectives import checksum
from shardformer.errors import ConfigError, InputError
from shardformer.layers.random_stream import align_random
from shardformer.layers.tensor.pending import resolved
from shardformer.layout.state import ShardedState
from shardformer.mesh.axis import Axis
from shardformer.reduce.wrappers import check_ddp, refuse_wrappers
from shardformer.sharding.agree import differs
from shardformer.sharding.prefix import CacheHeads
from shardformer.sharding.stages import OF_EVERY_LAYER, WHY_NOT
from shardformer.sharding.structure import Structure
from shardformer.sharding.trained_inputs import compared
from shardformer.transformers_compat import caches_in, holds_tokens, is_cache


class Guard:
    """Before a forward: what an error broke off is forgotten, gradients are hooked; once, inputs are compared.
    What the model is made of is looked at.

    In training the ranks that are given the same batch draw the same random numbers outside of blocks, whatever a
    script seeded them with. What the model gives are plain tensors.
    """

    def __init__(
        self, model: nn.Module, state: ShardedState, structure: Structure, caches: CacheHeads, *, is_cut: bool
    ) -> None:
        import torch._dynamo

        self._state, self._structure, self._is_cut = state, structure, is_cut  # first: pickle meets the state's refusal
        # torch.compile leaves it alone: what is done there is once, or with other processes. Of this model alone:
        # a model that is sharded later must not change what this one was compiled with
        self._eager: Callable[..., None] = torch._dynamo.disable(Guard._look)
        self._caches = caches
        self._compared = not state.request.extra.get("check_inputs", True) or state.alike.size == 1
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._behind, with_kwargs=True)
        if any(axis.size > 1 for axis in state.context.axes.values()):
            refuse_wrappers(model, state.context)
        state.check_call = self._check_call

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._eager(self, model, args, kwargs)
        if not self._is_cut or torch.compiler.is_compiling():
            return None
        return compared(args, kwargs, self._state.context.tensor)

    def _look(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() < 0:  # not a recomputation in a backward
            for edge in self._state.edges:
                edge.abandon()
        for reducer in self._state.reducers:
            reducer.refresh()
        self._refuse_alone(model)
        check_ddp(model, self._state.context)
        self._check_call(model, kwargs)
        if torch._C._current_graph_task_id() < 0:
            self._caches.enter(model, [*args, *kwargs.values()])
        self._structure.check(model)
        if not self._compared:
            self._compared = True
            compare_inputs([*args, *kwargs.values()], self._state.alike)
        if self._state.watch is not None:
            self._state.watch.training = model.training
        if self._aligns(model, kwargs):
            agree_on_step(self._state, [*args, *kwargs.values()])

    def _behind(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if isinstance(output, Mapping) and not torch.compiler.is_compiling():
            self._caches.leave(list(output.values()))
        return resolved(output)

    def _aligns(self, model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
        """In a pipeline each micro-batch has its seed, and a recomputation has the random state of its forward.

        A token that follows others in generation is not worth a message: what came first was compared.
        """
        in_pipeline = self._state.stages is not None and self._state.stages.is_running
        if in_pipeline or torch._C._current_graph_task_id() >= 0:
            return False
        if not model.training and any(map(holds_tokens, caches_in(kwargs.values()))):
            return False
        return self._is_cut and (model.training or self._state.watch is not None)

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

    def _check_call(self, model: nn.Module, kwargs: Mapping[str, Any]) -> None:
        for name, why in self._state.unproven.items():
            if kwargs.get(name) is not None:
                raise ConfigError(
                    f"{name} for a {type(model).__name__} that is sharded over {self._state.context}: with it, {why}",
                    rule="A layout is used for inputs with which a small model of the same classes trains right in it",
                    remedy=f"Leave {name} out of the batches, or use another layout, such as data or ZeRO ranks",
                )
        if self._state.context.pipe.size > 1:
            self._refuse_for_stages(model, kwargs)
        self._refuse_outputs(model, kwargs)

    def _refuse_for_stages(self, model: nn.Module, kwargs: Mapping[str, Any]) -> None:
        for name, value in kwargs.items():
            if is_cache(value) and holds_tokens(value):
                raise ConfigError(
                    f"{name} for a {type(model).__name__} in a pipeline: a {type(value).__name__} that holds tokens",
                    rule="Each stage has the keys and values of its own layers, and a batch is cut into micro-batches",
                    remedy="Leave pipe out for a model that is called with keys and values",
                )
            trains = any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(value))
            if trains and torch.is_grad_enabled():
                raise ConfigError(
                    f"{name} for a {type(model).__name__} in a pipeline: a tensor that needs a gradient",
                    rule="A stage finds the gradients of its own parameters, and only the first reads most inputs",
                    remedy=f"Detach {name}, or leave pipe out; a prompt that trains can be a parameter of the model",
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


def agree_on_step(state: ShardedState, inputs: Collection[Any], drew: bool = False) -> bool:
    """The ranks that are given one batch draw alike, and notice where they have come apart: see ``align_random``."""
    axis, device, watch = state.alike, state.context.device, state.watch
    if watch is None or axis.size == 1:
        return align_random(axis, device, drew)
    given = inputs if state.request.extra.get("check_inputs", True) else ()
    return align_random(axis, device, drew, watch.numbers(axis, given), lambda every: watch.compare(every, axis, given))


def compare_inputs(values: list[Any], axis: Axis) -> None:
    """Raises InputError on every rank when ranks were not fed the same that should be. A few numbers are gathered."""
    if differs([checksum(v) for v in values if isinstance(v, Tensor)], axis):
        raise InputError(
            f"The {axis.size} {axis.name.replace('_', ' and ')} ranks were fed different batches",
            rule="Tensor and sequence ranks compute one batch together; only data ranks have batches of their own",
            remedy="Draw the batch by the data rank: context.data.rank of context.data.size, not the global rank",
        )
