"""The stages of a pipeline: which rank holds which layers, and the model without the layers of other stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.layout.activation_layout import ActivationLayout, ModelRegion
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.module_paths import find_configs, parent_of
from shardformer.pipeline.layer_sequence import (
    LayerRange,
    LayerSequence,
    StackDescription,
    estimate_layer_costs,
    no_layers_error,
    owner_layers,
    owner_stages,
)
from shardformer.pipeline.p2p_communication import PointToPoint
from shardformer.pipeline.partition import (
    RENAMED_METHODS,
    check_partition,
    partition_balanced,
    partition_explicit,
    partition_uniform,
)
from shardformer.pipeline.schedules import check_schedule_name, default_chunks, placement_of
from shardformer.pipeline.stage_forward import MissingParams, StageForward
from shardformer.public_names import renamed_arguments
from shardformer.tensor_parallel.grid.layers import LAYERS_BY_MODE

RENAMED_ARGUMENTS = {"cut": "partition", "costs": "layer_costs", "checkpoint_layers": "recompute_layers"}


@renamed_arguments(RENAMED_ARGUMENTS, {"partition": RENAMED_METHODS}, RENAMED_ARGUMENTS)
class PipelineStageManager:
    """How a model is cut into stages, and this process's place among them.

    A rank of the pipe axis holds one *virtual stage*, or several (``num_model_chunks``) with a schedule that visits
    each rank more than once; a micro-batch passes the virtual stages in order.

    Args:
        context: the grid, from ``launch_from_torch(pipe=...)``.
        schedule, num_model_chunks, partition, layer_costs, recompute_layers: as in ``ParallelConfig``.
    """

    def __init__(
        self,
        context: ParallelContext,
        schedule: str = "1f1b",
        num_model_chunks: int | None = None,
        *,
        partition: str | Sequence[int] = "balanced",
        layer_costs: Sequence[float] | None = None,
        recompute_layers: int | Sequence[int] | None = None,
    ) -> None:
        if not isinstance(context, ParallelContext):
            raise ConfigError(
                f"PipelineStageManager was given {context!r:.60}",
                remedy="Give it what launch_from_torch(pipe=...) returned",
            )
        self.context, self.schedule = context, schedule
        self.num_model_chunks = default_chunks(schedule) if num_model_chunks is None else num_model_chunks
        check_schedule_name(schedule, self.axis.size, self.num_model_chunks)
        self.placement = placement_of(schedule, self.axis.size, self.num_model_chunks)
        self.partition, self.layer_costs, self.recompute_layers = partition, layer_costs, recompute_layers
        check_partition(partition, layer_costs, recompute_layers)
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
            "schedule": self.schedule, "num_model_chunks": self.num_model_chunks, "partition": self.partition,
            "layer_costs": self.layer_costs, "recompute_layers": self.recompute_layers,
        }  # fmt: skip

    def recomputed(self, lengths: Sequence[int]) -> list[int]:
        """How many layers of each virtual stage are checkpointed, of those that it has."""
        asked = self.recompute_layers
        if asked is None:
            return [0] * len(lengths)
        counts = [asked] * len(lengths) if isinstance(asked, int) else list(asked)
        if len(counts) != len(lengths) or any(type(n) is not int or n < 0 for n in counts):
            raise ConfigError(
                f"recompute_layers={asked!r}",
                rule=f"It is a number of layers, or one for each of the {len(lengths)} virtual stages",
                remedy=f"Write recompute_layers={list(lengths)} to checkpoint all",
            )
        return [min(n, length) for n, length in zip(counts, lengths, strict=True)]

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineStageManager:
        return self  # its groups cannot be copied


ALL_LAYER_OUTPUTS = ("output_router_logits", "output_hidden_states", "output_attentions")
ALL_LAYER_OUTPUTS_REASON = "It collects something of every layer, and a stage has its own layers only"


class Chained(Protocol):
    """What a policy says of the row of layers of its model."""

    notes: Sequence[str]

    def layer_sequence(self) -> LayerSequence: ...
    def no_pipeline_reason(self) -> str | None: ...


@dataclass
class Stages:
    """How a model was cut into stages, and what runs its spans on this rank.

    Args:
        owner_layers: the units that each parameter and buffer goes with, by name.
        owner_stages: the virtual stages that hold each parameter and buffer, by name.
        state: name -> (first name of that tensor, full shape) of all that the whole model saves.
        parameters: name -> (first name of that parameter, how many numbers it holds) of the whole model's.
        shared: the stages that hold each parameter of which there are several, by name: of a layer that several call,
            or by several names (tied).
        uses_random: whether the model draws random numbers when it trains.
        stream: how the activations between the layers lie.
    """

    manager: PipelineStageManager
    chain: LayerSequence
    spans: list[LayerRange]
    costs: list[float]
    owner_layers: dict[str, frozenset[int]]
    owner_stages: dict[str, frozenset[int]]
    state: dict[str, tuple[str, tuple[int, ...]]]
    parameters: dict[str, tuple[str, int]]
    shared: dict[str, tuple[int, ...]] = field(default_factory=dict)
    placeholders: MissingParams = field(default_factory=MissingParams)
    stage_forward: StageForward | None = None
    uses_random: bool = False
    stream: ActivationLayout = field(default_factory=ActivationLayout)
    shared_params: list[dict[int, Tensor]] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        """Whether a pipeline calls the model just now."""
        return self.stage_forward is not None and self.stage_forward.now is not None

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The ranks of the pipe axis that hold a parameter or buffer."""
        return tuple(sorted({self.manager.placement[v] for v in self.owner_stages[name]}))

    def is_here(self, name: str) -> bool:
        return self.manager.stage in self.stages_of(name)

    @property
    def num_parameters(self) -> int:
        """Numbers in the whole model's parameters, those that are tied once."""
        return sum(dict(self.parameters.values()).values())

    def is_elsewhere(self, path: str) -> bool:
        """Whether a module or what is inside of it belongs to a layer that no stage of this rank runs."""
        units = self.chain.layer_calls
        around = [at for at, unit in enumerate(units) if path == unit or path.startswith(f"{unit}.")]
        return bool(around) and not any(at in span for at in around for span in self._own_spans())

    def lines(self) -> list[str]:
        """What all ranks must have alike."""
        return [str(self.manager.options()), str(self.spans), *(f"{n}: {v}" for n, v in self.shared.items())]

    def remove_other_stages(self, model: nn.Module) -> None:
        """Takes the other stages' parameters out of the model."""
        self.placeholders.remove(model, {name: self.is_here(name) for name in self.owner_stages})

    def _own_spans(self) -> list[LayerRange]:
        return [self.spans[v] for v in self.manager.virtual_stages]

    def install(
        self,
        model: nn.Module,
        stream: ActivationLayout,
        context: ParallelContext,
        wrappers: Mapping[int, nn.Module] = MappingProxyType({}),
    ) -> None:
        """Makes what runs a part of the model, and puts it into the layers, after all else that changes them.

        Where there is one stage it goes there for each step, and leaves the model as it was.

        Args:
            wrappers: identity of a module -> the outermost of the wrappers that are around it when it runs.
        """
        self.stream = stream
        copy_shared_attributes(model, self.chain, self._own_spans())
        self.stage_forward = StageForward(
            model,
            self.chain,
            self.placeholders,
            self.owner_layers,
            (nn.Embedding, *(layers.embedding for layers in LAYERS_BY_MODE.values())),
            self._checkpointed(),
            partial(_random_stream, stream=stream, context=context),
            context.device,
            wrappers,
            lasting=self.manager.num_stages > 1,
        )

    def installed(self, model: nn.Module) -> AbstractContextManager[None]:
        """While this lasts the layers know of the pipeline; those of several stages always do."""
        assert self.stage_forward is not None
        return nullcontext() if self.manager.num_stages > 1 else self.stage_forward.installed(model)

    def _checkpointed(self) -> frozenset[int]:
        counts = self.manager.recomputed([len(span) for span in self.spans])
        return frozenset(u for span, n in zip(self.spans, counts, strict=True) for u in span[:n])

    def note_shared(self, model: nn.Module) -> None:
        """Writes down the parameters that other stages hold too: stage -> this rank's own, for each that holds it."""
        for name, param in model.named_parameters():
            if name in self.shared:
                self.shared_params.append(dict.fromkeys(self.shared[name], param))


def _random_stream(stack: StackDescription, stream: ActivationLayout, context: ParallelContext) -> int:
    layout = stack.layout_in(stream)
    is_whole = stack.whole_sequence is not None and not layout.shards_stacks
    return 0 if is_whole else layout.random_stream_index(ModelRegion.STACK, context.coords, context.sizes)


def build_stages(model: nn.Module, policy: Chained, manager: PipelineStageManager) -> Stages:
    """Cuts a model, which is as it was, into the virtual stages of ``manager``.

    Raises ConfigError when the model has no stack that can be cut, fewer layers than stages, layers that are left out
    at random, or is asked for what no stage has.
    """
    chain, home, costs, spans = partition_model(model, policy, manager)
    state = {n: (first, tuple(t.shape)) for n, (first, t) in _by_first_name(model.state_dict(keep_vars=True)).items()}
    named = _by_first_name(dict(model.named_parameters(remove_duplicate=False)))
    parameters = {name: (first, p.numel()) for name, (first, p) in named.items()}
    stages = Stages(manager, chain, spans, costs, home, owner_stages(home, spans), state, parameters)
    names: dict[str, list[str]] = {}
    for name, (first, _) in parameters.items() if manager.num_stages > 1 else ():
        names.setdefault(first, []).append(name)
    for same in names.values():  # beside each other: stages know one by different names, and fill buckets in this order
        ranks = sorted({rank for name in same for rank in stages.stages_of(name)})
        if len(ranks) > 1:
            stages.shared |= dict.fromkeys(same, tuple(ranks))
    return stages


def partition_model(
    model: nn.Module, policy: Chained, asked: PipelineStageManager
) -> tuple[LayerSequence, dict[str, frozenset[int]], list[float], list[LayerRange]]:
    """The layers of a model in a row, what goes with each, what each costs, and those of each virtual stage.

    Raises as ``build_stages``.
    """
    count = asked.num_virtual_stages
    chain = policy.layer_sequence()
    if count > 1 and not chain.stacks:
        raise no_layers_error(model, str(asked.num_stages), policy.notes)
    if asked.num_stages > 1:
        _check_settings(model)
        if against := policy.no_pipeline_reason():
            raise ConfigError(
                f"pipe={asked.num_stages}, and of this {type(model).__name__} it is known that {against}",
                rule="A stage has its own layers, and hands on only what its last one gives",
                remedy="Leave pipe out: cut this model by tensor parallelism, or give each process its own part of the "
                "batch",
            )
    home = owner_layers(model, chain) if chain.stacks else {}
    costs = list(asked.layer_costs) if asked.layer_costs is not None else estimate_layer_costs(model, chain, home)
    if len(costs) != len(chain.layer_calls):
        raise ConfigError(
            f"layer_costs has {len(costs)} numbers",
            rule=f"It has one for each layer, and this {type(model).__name__} runs {len(chain.layer_calls)}",
            remedy="Leave layer_costs out to have them estimated",
        )
    if count > max(len(costs), asked.num_stages):
        raise ConfigError(
            f"{asked.num_stages} stages of {count // asked.num_stages} chunks each, so {count} virtual stages, for the "
            f"{len(costs)} layers of {type(model).__name__}",
            remedy="Use the schedule '1f1b', which has one a stage, fewer stages, or a model of "
            f"{count} layers or more",
        )
    if count == 1:
        bounds = [0, len(costs)]
    elif isinstance(asked.partition, str):
        bounds = (
            partition_uniform(len(costs), count) if asked.partition == "uniform" else partition_balanced(costs, count)
        )
    else:
        bounds = partition_explicit(asked.partition, len(costs), count)
    return chain, home, costs, chain.stage_ranges(bounds)


def _by_first_name(tensors: Mapping[str, Any]) -> dict[str, tuple[str, Tensor]]:
    """Each name of a tensor -> the first of its names, and the tensor."""
    first: dict[int, str] = {}
    return {name: (first.setdefault(id(x), name), x) for name, x in tensors.items() if isinstance(x, Tensor)}


def copy_shared_attributes(model: nn.Module, chain: LayerSequence, spans: Sequence[LayerRange]) -> None:
    """The first layer of each stack in each of the spans gets what it needs of the first of all."""
    for stack, start in zip(chain.stacks, chain.starts, strict=True):
        for span in spans:
            at = max(span.start, start)
            for path in (
                stack.stages.shared_from_first if start < at < min(span.stop, start + len(stack.layer_calls)) else ()
            ):
                first, name = parent_of(model.get_submodule(stack.layer_calls[0]), path)
                owner, _ = parent_of(model.get_submodule(stack.layer_calls[at - start]), path)
                owner.__dict__[name] = getattr(first, name)  # not as a module of its own, which would have two names


def _check_settings(model: nn.Module) -> None:
    """Refuses what stages cannot do: layers dropped at random, and outputs that are gathered from all layers."""
    for config in find_configs(model):
        for name, value in vars(config).items():
            if name.endswith("layerdrop") and isinstance(value, float) and value > 0:
                raise ConfigError(
                    f"{name}={value} with a pipeline",
                    rule="Which layers a batch skips would have to be drawn alike by all stages",
                    remedy=f"Build the model with {name}=0",
                )
            name = name.lstrip("_")  # transformers keeps some of them behind a property
            if name in ALL_LAYER_OUTPUTS and value is True:
                raise ConfigError(
                    f"{name}=True with a pipeline",
                    rule=ALL_LAYER_OUTPUTS_REASON,
                    remedy=f"Set config.{name} = False",
                )
