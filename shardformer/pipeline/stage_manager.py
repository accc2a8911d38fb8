"""Partitions a model into pipeline stages, and removes the parameters of other stages from the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.layout.activation_layout import ActivationLayout, ModelRegion
from shardformer.layout.packed_weights import find_quantized_weights, get_unpacked_numel
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.module_paths import find_model_configs, get_parent_and_attribute_name
from shardformer.pipeline.layer_sequence import (
    LayerRange,
    LayerSequence,
    LayerStackDescription,
    estimate_layer_costs,
    make_no_pipeline_layers_error,
    map_tensor_names_to_stages,
    map_tensors_to_layers,
)
from shardformer.pipeline.p2p_communication import PointToPointCommunicator
from shardformer.pipeline.partition import (
    RENAMED_METHODS,
    check_partition,
    partition_balanced,
    partition_explicit,
    partition_uniform,
)
from shardformer.pipeline.schedules import assign_virtual_stages, check_schedule, get_default_num_chunks
from shardformer.pipeline.stage_forward import ParameterPlaceholders, StageForward
from shardformer.public_names import deprecate_renamed_arguments
from shardformer.tensor_parallel.grid_layers import LAYERS_BY_MODE

RENAMED_ARGUMENTS = {"cut": "partition", "costs": "layer_costs", "checkpoint_layers": "recompute_layers"}


@deprecate_renamed_arguments(RENAMED_ARGUMENTS, {"partition": RENAMED_METHODS}, RENAMED_ARGUMENTS)
class PipelineStageManager:
    """Assigns the virtual stages of a pipeline to ranks, according to the schedule and options.

    Each rank of the pipe axis runs one *virtual stage*, or several (``num_model_chunks``) with a schedule that visits a
    rank more than once. A micro-batch passes the virtual stages in order.

    Args:
        context: the parallel context that ``launch_from_torch(pipe=...)`` returned.
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
                f"PipelineStageManager requires a ParallelContext, but got context={context!r:.60}.",
                remedy="Pass the context that launch_from_torch(pipe=...) returned.",
            )
        self.context, self.schedule = context, schedule
        self.num_model_chunks = get_default_num_chunks(schedule) if num_model_chunks is None else num_model_chunks
        check_schedule(schedule, self.axis.size, self.num_model_chunks)
        self.placement = assign_virtual_stages(schedule, self.axis.size, self.num_model_chunks)
        self.partition, self.layer_costs, self.recompute_layers = partition, layer_costs, recompute_layers
        check_partition(partition, layer_costs, recompute_layers)
        self.point_to_point = PointToPointCommunicator(context)

    @property
    def axis(self) -> Axis:
        """The device mesh axis of pipeline parallelism."""
        return self.context.pipe

    @property
    def num_stages(self) -> int:
        return self.axis.size

    @property
    def stage(self) -> int:
        """This process's pipeline-parallel rank."""
        return self.axis.rank

    @property
    def num_virtual_stages(self) -> int:
        return len(self.placement)

    @property
    def virtual_stages(self) -> tuple[int, ...]:
        """The indices of this process's virtual stages, in the order in which a micro-batch passes them."""
        return self.get_virtual_stages_of_rank(self.stage)

    def get_virtual_stages_of_rank(self, pipe_rank: int) -> tuple[int, ...]:
        return tuple(v for v, rank in enumerate(self.placement) if rank == pipe_rank)

    @property
    def last_stage(self) -> int:
        """The pipeline rank that runs the last layers of the model and computes the loss."""
        return self.placement[-1]

    def get_user_options(self) -> dict[str, Any]:
        """Return the pipeline options that the user set, which must be the same on all ranks."""
        return {
            "schedule": self.schedule, "num_model_chunks": self.num_model_chunks, "partition": self.partition,
            "layer_costs": self.layer_costs, "recompute_layers": self.recompute_layers,
        }  # fmt: skip

    def count_recomputed_layers(self, layers_per_stage: Sequence[int]) -> list[int]:
        """Compute how many layers of each virtual stage use activation checkpointing."""
        requested = self.recompute_layers
        if requested is None:
            return [0] * len(layers_per_stage)
        counts = [requested] * len(layers_per_stage) if isinstance(requested, int) else list(requested)
        if len(counts) != (num_stages := len(layers_per_stage)) or any(type(n) is not int or n < 0 for n in counts):
            raise ConfigError(
                f"recompute_layers must be an int or a list of {num_stages} ints, one per virtual stage, but got "
                f"{requested!r}.",
                remedy=f"To recompute all layers, use recompute_layers={list(layers_per_stage)}.",
            )
        return [min(n, length) for n, length in zip(counts, layers_per_stage, strict=True)]

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineStageManager:
        return self  # process groups cannot be copied


ALL_LAYER_OUTPUTS = ("output_router_logits", "output_hidden_states", "output_attentions")
ALL_LAYER_OUTPUTS_REASON = "The option returns outputs of all layers, but a pipeline stage runs only its own layers"


class LayerSequencePolicy(Protocol):
    """Protocol for policies that describe how to split a model into pipeline stages."""

    notes: Sequence[str]

    def layer_sequence(self) -> LayerSequence: ...
    def no_pipeline_reason(self) -> str | None: ...


@dataclass
class PipelineStages:
    """The layers and parameters of each pipeline stage, and the state of the stages on this rank.

    Args:
        owner_layers: layer calls that each parameter and buffer belongs to, by name.
        owner_stages: virtual stages that store each parameter and buffer, by name.
        state: (first name of the same tensor, full shape) of each entry of the full model's state dict.
        parameters: (first name of the same parameter, number of elements) of each parameter name of the full model.
        shared: ranks of the pipe axis that share a parameter, by name, for tied weights and repeated layers.
        shared_requires_grad: ``requires_grad`` of each shared parameter, by its first name, as the stages last agreed.
        uses_random: whether the model draws random numbers in training.
        stream: layout of the activations between layers.
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
    shared_requires_grad: dict[str, bool] = field(default_factory=dict)
    placeholders: ParameterPlaceholders = field(default_factory=ParameterPlaceholders)
    stage_forward: StageForward | None = None
    uses_random: bool = False
    stream: ActivationLayout = field(default_factory=ActivationLayout)
    shared_params: list[dict[int, Tensor]] = field(default_factory=list)

    @property
    def is_running_forward(self) -> bool:
        return self.stage_forward is not None and self.stage_forward.now is not None

    def get_first_name(self, param_name: str) -> str:
        """Return the name that is the same on all stages for a parameter with several names, such as a tied weight."""
        return self.parameters[param_name][0] if param_name in self.parameters else param_name

    def find_owner_ranks(self, tensor_name: str) -> tuple[int, ...]:
        """Return the pipeline ranks that store the parameter or buffer ``tensor_name``."""
        return tuple(sorted({self.manager.placement[v] for v in self.owner_stages[tensor_name]}))

    def is_stored_locally(self, tensor_name: str) -> bool:
        """Return whether this rank stores the parameter or buffer ``tensor_name``."""
        return self.manager.stage in self.find_owner_ranks(tensor_name)

    @property
    def num_parameters(self) -> int:
        """The number of elements in the parameters of the full model, with tied weights counted once."""
        return sum(dict(self.parameters.values()).values())

    def is_only_on_other_ranks(self, module_path: str) -> bool:
        """Return whether the module at ``module_path`` belongs to a layer that only other pipeline ranks run."""
        units = self.chain.called_layer_paths
        positions = [at for at, unit in enumerate(units) if module_path == unit or module_path.startswith(f"{unit}.")]
        return bool(positions) and not any(at in span for at in positions for span in self._get_local_layer_ranges())

    def get_canonical_names(self, prefix: str = "") -> dict[str, str]:
        """Map each name in the full model's state dict to a canonical name, which is the same for tied weights.

        The canonical name of a tensor is its first name.

        Args:
            prefix: prefix of the names in a wrapper around the model.
        """
        return {prefix + name: prefix + first for name, (first, _) in self.state.items()}

    def rename_tensors(self, rename_fn: Callable[[str], str]) -> None:
        """Update the recorded names of parameters and buffers after modules were moved inside the model."""
        self.owner_layers = {rename_fn(name): layers for name, layers in self.owner_layers.items()}
        self.owner_stages = {rename_fn(name): stages for name, stages in self.owner_stages.items()}
        self.state = {rename_fn(name): (rename_fn(first), shape) for name, (first, shape) in self.state.items()}
        self.parameters = {
            rename_fn(name): (rename_fn(first), count) for name, (first, count) in self.parameters.items()
        }
        self.shared = {rename_fn(name): ranks for name, ranks in self.shared.items()}
        self.shared_requires_grad = {rename_fn(name): flag for name, flag in self.shared_requires_grad.items()}
        self.placeholders.rename_parameters(rename_fn)

    def record_tensor_on_same_stages(self, tensor_name: str, reference_name: str, shape: tuple[int, ...]) -> None:
        """Record that a new tensor is stored on the same pipeline stages as the tensor ``reference_name``."""
        self.owner_layers[tensor_name], self.owner_stages[tensor_name] = (
            self.owner_layers[reference_name],
            self.owner_stages[reference_name],
        )
        self.state[tensor_name], self.parameters[tensor_name] = (tensor_name, shape), (tensor_name, prod(shape))

    def drop_tensors(self, should_drop: Callable[[str], bool]) -> None:
        """Remove the records of parameters and buffers that the model no longer has."""
        tables: list[dict[str, Any]] = [self.owner_layers, self.owner_stages, self.state, self.parameters, self.shared]
        for table in tables:
            for name in [name for name in table if should_drop(name)]:
                del table[name]

    def get_partition_summary_lines(self) -> list[str]:
        """Describe the assignment of layers to pipeline stages as text, so that ranks can compare it."""
        return [str(self.manager.get_user_options()), str(self.spans), *(f"{n}: {v}" for n, v in self.shared.items())]

    def remove_nonlocal_params(self, model: nn.Module) -> None:
        self.placeholders.replace_nonlocal_params(
            model, {name: self.is_stored_locally(name) for name in self.owner_stages}
        )

    def _get_local_layer_ranges(self) -> list[LayerRange]:
        return [self.spans[v] for v in self.manager.virtual_stages]

    def install_forward_overrides(
        self,
        model: nn.Module,
        activation_layout: ActivationLayout,
        context: ParallelContext,
        wrapper_by_module_id: Mapping[int, nn.Module] = MappingProxyType({}),
    ) -> None:
        """Override the ``forward`` methods of layers, so that this rank runs only its own pipeline stages.

        Call this after all other changes to the layers. With one stage, the overrides are active only during each step,
        and the model stays unchanged between steps.

        Args:
            wrapper_by_module_id: the outermost wrapper around the forward pass of a module, by the id of the module.
        """
        self.stream = activation_layout
        copy_first_layer_attributes(model, self.chain, self._get_local_layer_ranges())
        self.stage_forward = StageForward(
            model,
            self.chain,
            self.placeholders,
            self.owner_layers,
            (nn.Embedding, *(layers.embedding for layers in LAYERS_BY_MODE.values())),
            self._find_recomputed_layer_indices(),
            partial(_get_random_stream_index, stream=activation_layout, context=context),
            context.device,
            wrapper_by_module_id,
            override_permanently=self.manager.num_stages > 1,
        )

    def temporarily_override_forward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Override the layers' ``forward`` in the ``with`` block, unless it is already overridden."""
        assert self.stage_forward is not None
        return nullcontext() if self.manager.num_stages > 1 else self.stage_forward.override_forward_methods(model)

    def _find_recomputed_layer_indices(self) -> frozenset[int]:
        counts = self.manager.count_recomputed_layers([len(span) for span in self.spans])
        return frozenset(u for span, n in zip(self.spans, counts, strict=True) for u in span[:n])

    def record_shared_params(self, model: nn.Module) -> None:
        """Record which parameters this rank shares with other pipeline stages, such as tied weights."""
        for name, param in model.named_parameters():
            if name in self.shared:
                self.shared_params.append(dict.fromkeys(self.shared[name], param))


def _get_random_stream_index(
    layer_stack: LayerStackDescription, stream: ActivationLayout, context: ParallelContext
) -> int:
    layout = layer_stack.get_activation_layout(stream)
    is_replicated = layer_stack.whole_sequence is not None and not layout.is_stack_sharded
    return 0 if is_replicated else layout.get_random_stream_index(ModelRegion.STACK, context.coords, context.sizes)


def build_pipeline_stages(
    model: nn.Module, policy: LayerSequencePolicy, stage_manager: PipelineStageManager
) -> PipelineStages:
    """Assign the layers and parameters of an unsharded model to virtual pipeline stages.

    Raises:
        ConfigError: if the model has no stack of layers, fewer layers than stages, LayerDrop, or an option that needs
            the outputs of all layers.
    """
    chain, owners, costs, spans = partition_layers_into_stages(model, policy, stage_manager)
    tensors = _map_to_canonical_name(model.state_dict(keep_vars=True))
    packed = find_quantized_weights(model)
    quantized = tuple(f"{name.rpartition('.')[0]}." for name in packed)
    state = {
        name: (first, tuple(t.shape))
        for name, (first, t) in tensors.items()
        if name not in packed and (name in owners or not name.startswith(quantized))
    }
    tensors = _map_to_canonical_name(dict(model.named_parameters(remove_duplicate=False)))
    parameters = {name: (first, get_unpacked_numel(p)) for name, (first, p) in tensors.items()}
    stages = PipelineStages(
        stage_manager, chain, spans, costs, owners, map_tensor_names_to_stages(owners, spans), state, parameters
    )
    names: dict[str, list[str]] = {}
    for name, (first, _) in parameters.items() if stage_manager.num_stages > 1 else ():
        names.setdefault(first, []).append(name)
    # keep the names of a parameter adjacent: stages use different ones, and fill buckets in this order
    for first, tied_names in names.items():
        ranks = sorted({rank for name in tied_names for rank in stages.find_owner_ranks(name)})
        if len(ranks) > 1:
            stages.shared |= dict.fromkeys(tied_names, tuple(ranks))
            stages.shared_requires_grad[first] = tensors[first][1].requires_grad
    return stages


def partition_layers_into_stages(
    model: nn.Module, policy: LayerSequencePolicy, stage_manager: PipelineStageManager
) -> tuple[LayerSequence, dict[str, frozenset[int]], list[float], list[LayerRange]]:
    """Split the layers of a model into virtual pipeline stages.

    Returns the layer sequence, the owner layers of each parameter, the layer costs and the layers of each stage.

    Raises the same errors as ``build_pipeline_stages``.
    """
    count = stage_manager.num_virtual_stages
    chain = policy.layer_sequence()
    if count > 1 and not chain.stacks:
        raise make_no_pipeline_layers_error(model, str(stage_manager.num_stages), policy.notes)
    if stage_manager.num_stages > 1:
        _check_config_supports_pipeline(model)
        if reason := policy.no_pipeline_reason():
            raise ConfigError(
                f"{type(model).__name__} does not support pipeline parallelism (pipe={stage_manager.num_stages}): "
                f"{reason}.",
                remedy="Omit pipe, and use tensor or data parallelism instead.",
            )
    owners = map_tensors_to_layers(model, chain) if chain.stacks else {}
    costs = (
        list(stage_manager.layer_costs)
        if stage_manager.layer_costs is not None
        else estimate_layer_costs(model, chain, owners)
    )
    if len(costs) != len(chain.called_layer_paths):
        raise ConfigError(
            f"layer_costs has {len(costs)} entries, but {type(model).__name__} has {len(chain.called_layer_paths)} "
            "layers.",
            remedy="Pass one number per layer, or omit layer_costs to estimate the costs.",
        )
    if count > max(len(costs), stage_manager.num_stages):
        chunks = count // stage_manager.num_stages
        raise ConfigError(
            f"{type(model).__name__} has {len(costs)} layers, but {stage_manager.num_stages} pipeline stages of "
            f"{chunks} chunks each need at least {count} layers.",
            remedy="Use fewer stages, or schedule='1f1b', which has one chunk per stage.",
        )
    if count == 1:
        bounds = [0, len(costs)]
    elif isinstance(stage_manager.partition, str):
        is_uniform = stage_manager.partition == "uniform"
        bounds = partition_uniform(len(costs), count) if is_uniform else partition_balanced(costs, count)
    else:
        bounds = partition_explicit(stage_manager.partition, len(costs), count)
    return chain, owners, costs, chain.get_stage_layer_ranges(bounds)


def _map_to_canonical_name(tensors_by_name: Mapping[str, Any]) -> dict[str, tuple[str, Tensor]]:
    """Map each name to its tensor and its canonical name. The canonical name of tied weights is their first name."""
    first: dict[int, str] = {}
    return {name: (first.setdefault(id(x), name), x) for name, x in tensors_by_name.items() if isinstance(x, Tensor)}


def copy_first_layer_attributes(
    model: nn.Module, layer_sequence: LayerSequence, layer_ranges: Sequence[LayerRange]
) -> None:
    """Copy ``shared_from_first`` attributes from the first layer to the first layer of each pipeline stage."""
    for stack, start in zip(layer_sequence.stacks, layer_sequence.stack_start_indices, strict=True):
        for span in layer_ranges:
            at = max(span.start, start)
            is_copied = start < at < min(span.stop, start + len(stack.layer_calls))
            for path in stack.stages.shared_from_first if is_copied else ():
                first, name = get_parent_and_attribute_name(model.get_submodule(stack.layer_calls[0]), path)
                owner, _ = get_parent_and_attribute_name(model.get_submodule(stack.layer_calls[at - start]), path)
                owner.__dict__[name] = getattr(first, name)  # not registered: the module would have two names


def _check_config_supports_pipeline(model: nn.Module) -> None:
    for config in find_model_configs(model):
        for name, value in vars(config).items():
            if name.endswith("layerdrop") and isinstance(value, float) and value > 0:
                raise ConfigError(
                    f"{name}={value} does not work with pipeline parallelism, because each stage would drop layers "
                    "independently.",
                    remedy=f"Build the model with {name}=0.",
                )
            name = name.lstrip("_")  # transformers stores some options under a private name
            if name in ALL_LAYER_OUTPUTS and value is True:
                raise ConfigError(
                    f"{name}=True does not work with pipeline parallelism.",
                    rule=ALL_LAYER_OUTPUTS_REASON,
                    remedy=f"Set config.{name} = False.",
                )
