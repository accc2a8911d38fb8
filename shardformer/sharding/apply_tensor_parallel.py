"""Install the forward hooks and the gradient reduction that tensor parallelism needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

from torch import Tensor, nn

from shardformer.config import ShardConfig
from shardformer.context_parallel.sequence_sharded_tensor import map_local_shard
from shardformer.errors import ConfigError, PolicyError
from shardformer.forward_hooks import HookOrder, register_forward_hooks
from shardformer.gradients.buckets import GradientSlot
from shardformer.gradients.reducer import BUCKET_BYTES, GradientReducer
from shardformer.layout.activation_layout import ActivationLayout, ModelRegion
from shardformer.layout.shard_spec import ShardSpec
from shardformer.layout.sharding_metadata import (
    GradientReduction,
    ParamEntry,
    ShardingMetadata,
    get_gradient_reduction,
    named_sharded_parameters,
)
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.tensor_grid import TensorGrid
from shardformer.pipeline.layer_sequence import LayerStackDescription
from shardformer.policies.module_descriptions import BlockArguments, BlockDescription
from shardformer.random_state import may_use_dropout
from shardformer.sharding.plan import ShardingPlan
from shardformer.tensor_parallel.block import (
    TensorParallelBlock,
    register_argument_pre_hook,
    register_block_hooks,
    select_local_heads,
)
from shardformer.tensor_parallel.grid_activations import GridActivationSharding
from shardformer.tensor_parallel.grid_layers import (
    LAYERS_BY_MODE,
    GridParallelModule,
    GridTensorParallelBlock,
    ParallelLayerClasses,
)
from shardformer.tensor_parallel.layers import Linear1D_Col, Linear1D_Row
from shardformer.tensor_parallel.linear_communication import prepare_extra_block_input, register_random_state_sync_hooks
from shardformer.tensor_parallel.parallel_module import ParallelModule
from shardformer.tensor_parallel.quantized_linear import QuantizedParallelLinear
from shardformer.tensor_parallel.sequence_parallel import ActivationSharding

InstalledBlock = tuple[nn.Module, TensorParallelBlock]
"""(module at the entry of a block, block)."""


def install_tensor_parallel_hooks(
    model: nn.Module,
    plan: ShardingPlan,
    metadata: ShardingMetadata,
    config: ShardConfig,
    grid: TensorGrid | None = None,
) -> list[InstalledBlock]:
    """Register the forward hooks of layers, attention modules and MLPs for tensor parallelism."""
    axis, uses_random = metadata.context.tensor, may_use_dropout(model)
    classes = LAYERS_BY_MODE[config.tensor_parallel_mode]
    _check_no_layer_is_attention_or_mlp(plan, metadata.activations)
    if grid is None and metadata.activations.is_stack_sharded:
        _check_linear_layers_are_in_blocks(plan, metadata.activations)
    streams = _shard_layer_stack_activations(model, plan, metadata, config, grid)
    if any(stream.layout.get_stack_shard(axis.name) for stream in streams.values()):
        for module in model.modules():
            if isinstance(module, classes.embedding):
                module.__dict__["sums_later"] = True
    alone = ActivationSharding(ActivationLayout(), axis)

    def get_activation_sharding(module_path: str) -> ActivationSharding:
        return next((stream for prefix, stream in streams.items() if module_path.startswith(prefix)), alone)

    outer: list[Any] = []
    unsharded = (*plan.full_sequence_modules, *plan.token_free_modules)
    for path in unsharded:
        of = get_activation_sharding(path)
        register = (
            of.register_full_sequence_hooks if path in plan.full_sequence_modules else of.register_token_free_hooks
        )
        outer.append(register(model.get_submodule(path), uses_random))
    stack_paths = {stack.layers for stack in plan.stacks}
    for path, name in plan.per_token_args:
        of, module = get_activation_sharding(f"{path}."), model.get_submodule(path)
        register_forward_hooks(module, HookOrder.STACK_LENGTH, of.restore_input_size_pre_hook, with_kwargs=True)
        change = of.shard_token_argument if path.rpartition(".")[0] in stack_paths else of.gather_token_argument
        register_argument_pre_hook(module, name, change, HookOrder.TOKEN_ARGUMENTS)
    blocks: list[InstalledBlock] = []
    for path, description in plan.blocks:
        stream = get_activation_sharding(f"{path}.")
        block_classes = LAYERS_BY_MODE["1d"] if stream is alone else classes
        if stream is not alone and description.gather_module is not None:
            outer.append(
                stream.register_full_sequence_hooks(model.get_submodule(description.gather_module), uses_random)
            )
            stream = ActivationSharding(ActivationLayout(), stream.axis)
        elif stream is not alone and f"{description.entry}.".startswith(tuple(f"{path}." for path in unsharded)):
            stream = ActivationSharding(ActivationLayout(), stream.axis)
        if (
            installed := _install_tensor_parallel_block(model, description, block_classes, stream, uses_random, axis)
        ) is not None:
            blocks.append(installed)
    # regions are left in the reverse order of entry
    outer = [*(hook for hook in outer if hook is not None), *streams.values()]
    metadata.region_hooks[:] = [*(block for _, block in blocks), *metadata.region_hooks, *outer]
    return blocks


def _shard_layer_stack_activations(
    model: nn.Module, plan: ShardingPlan, metadata: ShardingMetadata, config: ShardConfig, grid: TensorGrid | None
) -> dict[str, ActivationSharding]:
    """Register hooks that shard the activations between layers. Returns an ``ActivationSharding`` per path prefix."""
    axis, uses_random = metadata.context.tensor, may_use_dropout(model)
    streams: dict[str, ActivationSharding] = {}
    for stack in plan.stacks:
        layout = stack.get_activation_layout(metadata.activations)
        if stack.whole_sequence and layout != metadata.activations:
            metadata.notes.append(f"The sequence is not sharded in {stack.layers}: {stack.whole_sequence}.")
        stream = (
            ActivationSharding(layout, axis, overlap=config.enable_sequence_overlap, has_random_ops=uses_random)
            if grid is None
            else GridActivationSharding(layout, grid, has_random_ops=uses_random)
        )
        streams[f"{stack.layers}."] = stream
        if grid is not None and stack.final_norm and metadata.stages is not None:
            norm: Any = model.get_submodule(stack.final_norm)
            if metadata.stages.placeholders.has_placeholders(norm):  # the norm is on another stage and has all features
                norm.forward = _identity_forward
        _install_layer_stack_hooks(model, stack, stream, axis, uses_random)
    return streams


def _identity_forward(hidden_states: Tensor) -> Tensor:
    return hidden_states


def _check_no_layer_is_attention_or_mlp(plan: ShardingPlan, activation_layout: ActivationLayout) -> None:
    """Raise ConfigError if sequence parallelism is used and a layer is itself an attention module or MLP."""
    layouts = {stack.layers: stack.get_activation_layout(activation_layout) for stack in plan.stacks}
    sharded = {path for path, layout in layouts.items() if layout.is_stack_sharded}
    for _, block in plan.blocks:
        if block.entry.rpartition(".")[0] in sharded and block.gather_module is None:
            raise ConfigError(
                "enable_sequence_parallelism=True requires layers with a residual connection, but the layer "
                f"{block.entry} is itself an attention module or MLP.",
                remedy="Set enable_sequence_parallelism=False, or pass the path of layers with a residual "
                "connection to LayerStack(layers=...).",
            )


def _check_linear_layers_are_in_blocks(plan: ShardingPlan, activation_layout: ActivationLayout) -> None:
    """Raise ConfigError if a parallel linear layer would receive only its rank's tokens under sequence parallelism."""
    described = [*plan.full_sequence_modules, *plan.token_free_modules]
    for _, block in plan.blocks:
        described += [block.entry, *block.columns, *block.cross_columns, block.row]
    inside_blocks = tuple(f"{path}." for path in described if path)
    for stack in plan.stacks:
        if not stack.get_activation_layout(activation_layout).is_stack_sharded:
            continue
        for path, replacement in plan.replacements.items():
            target = replacement.target_module
            is_linear = isinstance(target, type) and issubclass(target, Linear1D_Col | Linear1D_Row)
            if is_linear and path.startswith(f"{stack.layers}.") and not f"{path}.".startswith(inside_blocks):
                raise ConfigError(
                    f"Sequence parallelism cannot shard the linear layer {path}, because the policy does not "
                    "assign it to an attention module or MLP.",
                    remedy="Add the layer to a BlockDescription, in `blocks` of the ModulePolicyDescription "
                    "(docs/policies.md), or set enable_sequence_parallelism=False.",
                )


def _install_layer_stack_hooks(
    model: nn.Module,
    layer_stack: LayerStackDescription,
    activation_sharding: ActivationSharding,
    axis: Axis,
    has_dropout: bool,
) -> None:
    """Install hooks that keep the hidden states sharded from the first to the last layer.

    The states of another stack enter the tensor-parallel region once for all layers. If the model reads the hidden
    states between two layers, each layer gathers and shards them.
    """
    if layer_stack.context is not None and layer_stack.reads_context:
        path, name = layer_stack.context
        enter = partial(map_local_shard, partial(prepare_extra_block_input, axis=axis))
        register_argument_pre_hook(model.get_submodule(path), name, enter, HookOrder.REGION_ARGUMENTS)
    layers = model.get_submodule(layer_stack.layers)
    children = [layer for layer in layers._modules.values() if layer is not None]  # one layer may occur several times
    ends = [*children, *([model.get_submodule(layer_stack.final_norm)] if layer_stack.final_norm else [])]
    is_repeated = len(set(ends)) < len(ends)  # the first layer may also run later, the last also earlier
    if activation_sharding.layout.is_stack_sharded and (is_repeated or layer_stack.sequence.between):
        for module in dict.fromkeys(ends):
            activation_sharding.register_layer_stack_hooks(module, module)
    else:
        activation_sharding.register_layer_stack_hooks(ends[0], ends[-1])
    sample_axis = activation_sharding.sequence_shard_axis
    if has_dropout and sample_axis is not None:
        for module in layers.modules():  # each rank has a shard of every sample: all must drop the same samples
            if type(module).__name__.endswith("DropPath"):  # the class name in timm and transformers
                register_random_state_sync_hooks(sample_axis, module)


def _install_tensor_parallel_block(
    model: nn.Module,
    block_description: BlockDescription,
    parallel_layer_classes: ParallelLayerClasses,
    activation_sharding: ActivationSharding,
    has_dropout: bool,
    axis: Axis,
) -> InstalledBlock | None:
    """Combine the parallel linear layers of an attention module or MLP into a tensor-parallel block.

    Returns None if the block needs no hooks, or if two layers share the block and it is already installed.

    Args:
        axis: axis of the ranks that have the same input.
    """
    row = model.get_submodule(block_description.row)
    if isinstance(row, parallel_layer_classes.row) and getattr(row, "block", None) is not None:
        return None
    if block_description.replicated_terms is not None:
        register_block_hooks(row, activation_sharding, block_description.replicated_terms)
        return None
    arguments = block_description.arguments or BlockArguments("")
    brings = model.get_submodule(arguments.at)
    for name in arguments.region_inputs:
        register_argument_pre_hook(
            brings, name, partial(prepare_extra_block_input, axis=axis), HookOrder.REGION_ARGUMENTS
        )
    for name, dim in arguments.head_dims.items():
        select = partial(select_local_heads, dim=dim, bounds=arguments.bounds, axis=axis)
        register_argument_pre_hook(brings, name, select, HookOrder.HEAD_ARGUMENTS)
    block = (
        GridTensorParallelBlock if issubclass(parallel_layer_classes.row, GridParallelModule) else TensorParallelBlock
    )(activation_sharding, has_dropout, arguments.width)
    for name in [*block_description.columns, *block_description.cross_columns]:
        column = _get_submodule_of_class(model, name, parallel_layer_classes.column, "column")
        column.block = block
        block.has_adapters |= isinstance(column, QuantizedParallelLinear)  # whose product is its own
        if name in block_description.columns:
            block.columns.append(column)
    _get_submodule_of_class(model, block_description.row, parallel_layer_classes.row, "row").block = block
    if block_description.shared_exit is not None:
        other = _get_submodule_of_class(model, block_description.shared_exit, parallel_layer_classes.row, "row")
        other.shared_exit = (row,)
    entry = model.get_submodule(block_description.entry)
    block.register_entry_hooks(entry, contains_row_linear=block_description.contains_exit_layer)
    return entry, block


def _get_submodule_of_class(model: nn.Module, module_path: str, layer_cls: type[nn.Module], role: str) -> Any:
    module = model.get_submodule(module_path)
    if not isinstance(module, layer_cls):
        raise PolicyError(
            f"The policy uses {module_path} as a {role}-parallel layer, so it must be a {layer_cls.__name__}, but it "
            f"is a {type(module).__name__}.",
            remedy=f"Replace {module_path} with a {layer_cls.__name__} in sub_module_replacement.",
        )
    return module


def install_gradient_reduction(
    model: nn.Module, plan: ShardingPlan, blocks: Sequence[InstalledBlock], metadata: ShardingMetadata
) -> None:
    """Install the gradient reducers that make every gradient equal to that of the unsharded model.

    Stores how each parameter is reduced in ``metadata.entries``.

    One reducer handles the parameters of this stage. Further reducers handle the parameters that it shares with other
    stages, which fill their buckets in the same order. Communicates to create groups, on all processes.
    """
    shared: dict[str, tuple[int, ...]] = {} if metadata.stages is None else metadata.stages.shared
    metadata.regions = places = ParameterRegionFinder(plan, metadata.activations)
    specs = {id(param): spec for _, param, spec in named_sharded_parameters(model)}
    for name, param in model.named_parameters():
        spec = specs.get(id(param), ShardSpec(param.shape))
        layout, place = places.find_region(name)
        reduction = get_gradient_reduction(spec, layout, place, metadata.context.sizes, shared.get(name, ()))
        metadata.entries.append(ParamEntry(name, param, spec, reduction))
    get_reduction_axis = _create_gradient_reduction_groups(metadata, list(dict.fromkeys(shared.values())))
    order = {name: at for at, name in enumerate(shared)}
    gradients: dict[tuple[int, ...], list[GradientSlot]] = {}
    for entry in sorted(metadata.entries, key=lambda entry: order.get(entry.name, 0)):
        axis = get_reduction_axis(entry.reduction)
        if axis.size > 1 or entry.reduction.divisor != 1:
            gradients.setdefault(entry.reduction.stages, []).append(GradientSlot(entry, axis, metadata.coords))
    by_param = {id(g.param): g for found in gradients.values() for g in found if not g.entry.spec.is_sharded}
    for module, block in blocks:
        if block.stream.layout.get_stack_shard(block.axis.name) is None:
            _install_gradient_divisor_hooks(module, block, by_param)
    size = metadata.request.extra.get("bucket_bytes", BUCKET_BYTES)
    metadata.reducers = [
        GradientReducer(
            gradients[stages], size, consistency_monitor=None if stages else metadata.monitor
        )  # stages differ in weights
        for stages in sorted(gradients)
    ]


class ParameterRegionFinder:
    """Determines whether a parameter is inside attention or an MLP, elsewhere in a layer, or outside the layers."""

    def __init__(self, plan: ShardingPlan, activation_layout: ActivationLayout) -> None:
        self._stream, blocks = activation_layout, [block for _, block in plan.blocks]
        self._inside = tuple(_with_trailing_dot(block.entry) for block in blocks)
        # each rank adds a fraction of the bias, unless the module is a block by itself
        self._biases = {f"{_with_trailing_dot(block.row)}bias" for block in blocks if block.replicated_terms is None}
        gathered = [block.gather_module for block in blocks if block.gather_module is not None]
        self._gathered = tuple(
            map(_with_trailing_dot, (*plan.full_sequence_modules, *plan.token_free_modules, *gathered))
        )
        self._stacks = [
            (prefix, stack.get_activation_layout(activation_layout))
            for stack in plan.stacks
            for prefix in map(_with_trailing_dot, (stack.layers, stack.final_norm or ""))
            if prefix
        ]

    def find_region(self, param_name: str) -> tuple[ActivationLayout, ModelRegion]:
        """Find the part of the model that contains a parameter, and the layout of the activations there."""
        layout = next((layout for prefix, layout in self._stacks if param_name.startswith(prefix)), None)
        if param_name not in self._biases and param_name.startswith(self._inside):
            return layout or self._stream, ModelRegion.BLOCK
        if layout is None:
            return self._stream, ModelRegion.OUTSIDE
        return layout, ModelRegion.GATHERED if param_name.startswith(self._gathered) else ModelRegion.STACK


def _with_trailing_dot(path: str) -> str:
    return f"{path}." if path else ""


def _create_gradient_reduction_groups(
    metadata: ShardingMetadata, stages_sharing_params: Sequence[tuple[int, ...]]
) -> Callable[[GradientReduction], Axis]:
    """Create the process groups for gradient reduction, in the same order on all processes.

    Returns a function that maps a reduction to the axis of its group.
    """
    context = metadata.context
    names = ("data", *metadata.activations.get_gradient_sum_axes(ModelRegion.OUTSIDE))
    outside = tuple(name for name in names if context.axis(name).size > 1)
    block = [name for name in metadata.activations.block if context.sizes.get(name, 1) > 1]
    choices = [(*outside, *chosen) for count in range(len(block) + 1) for chosen in combinations(block, count)]
    of_stages = {
        (tuple(sorted(names)), stages): context.flatten(*names, "pipe", only_coords={"pipe": stages})
        for stages in stages_sharing_params
        for names in choices
    }
    for names in choices:
        context.flatten(*names or ("data",))

    def get_reduction_axis(reduction: GradientReduction) -> Axis:
        if reduction.stages:
            return of_stages[tuple(sorted(reduction.sum_over)), reduction.stages]
        return context.flatten(*reduction.sum_over) if reduction.sum_over else Axis("none")

    return get_reduction_axis


@dataclass(eq=False)
class _GradientDivisorHook:
    """A forward pre-hook that sets the divisor of a module's gradients before their reduction."""

    block: TensorParallelBlock
    gradient_slots: list[GradientSlot]

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for gradient in self.gradient_slots:
            multiplicity = 1 if self.block.is_open else self.block.axis.size
            gradient.divisor = gradient.entry.reduction.divisor * multiplicity


def _install_gradient_divisor_hooks(
    entry_module: nn.Module, block: TensorParallelBlock, gradient_slot_by_param_id: dict[int, GradientSlot]
) -> None:
    """Install hooks that choose gradient divisors for modules before and after an all-reduce.

    ALBERT's norm runs after the reduction. The hooks are not needed if the stack shards the hidden states, because each
    rank then has only its shard after the reduction.
    """
    for module in entry_module.modules():
        params: list[Tensor] = list(module.parameters(recurse=False))
        gradients = [gradient_slot_by_param_id[id(p)] for p in params if id(p) in gradient_slot_by_param_id]
        if gradients and not isinstance(module, ParallelModule):
            register_forward_hooks(module, HookOrder.GRADIENT_DIVISOR, _GradientDivisorHook(block, gradients))
