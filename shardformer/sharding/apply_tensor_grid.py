"""Apply 2D, 2.5D or 3D tensor parallelism to modules between attention and MLPs, such as norms."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardformer.config import ShardConfig
from shardformer.errors import ConfigError, PolicyError
from shardformer.forward_hooks import HookOrder, register_forward_hooks
from shardformer.kernels.fused_ops import get_norm_kind, is_elementwise
from shardformer.layout.shard_spec import Split
from shardformer.layout.sharding_metadata import ShardingMetadata
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.mesh.tensor_grid import TensorGrid, reshape_tensor_axis_by_mode
from shardformer.module_paths import get_submodule_or_none, has_transposed_weight, join_path
from shardformer.policies.module_descriptions import BlockArguments, BlockDescription, SubModuleReplacementDescription
from shardformer.policies.policy import Policy
from shardformer.sharding.plan import ShardingPlan
from shardformer.tensor_parallel.block import register_argument_pre_hook
from shardformer.tensor_parallel.grid_activations import GridActivationSharding
from shardformer.tensor_parallel.grid_layers import GridNorm, GridParallelModule
from shardformer.tensor_parallel.layers import Linear1D_Col, Linear1D_Row
from shardformer.tensor_parallel.sequence_parallel import get_first_tensor_arg
from shardformer.torch_compat import keystr, tree_flatten_with_path, tree_map_with_path
from shardformer.transformers_compat import get_forward_arg_names, remove_kv_caches

HIDDEN_STATES = "hidden states"
ArgumentSamples = dict[tuple[str, str], int | None]
"""(path of an attention module with * for indices, argument name) -> its dim for samples, or a multiple of them."""


def arrange_tensor_ranks_as_grid(config: ShardConfig, context: ParallelContext) -> tuple[ShardConfig, TensorGrid]:
    """Arrange the tensor parallel ranks as a 2D, 2.5D or 3D grid, and return the new config and the grid.

    All processes must call this function. Raises ConfigError if the sizes do not fit the tensor parallel mode.
    """
    view = reshape_tensor_axis_by_mode(context, config.tensor_parallel_mode)
    if view is not config.context:
        manager = copy.copy(config.pipeline_stage_manager)
        if manager is not None:
            manager.context = view
        config = replace(config, context=view, pipeline_stage_manager=manager, tensor_parallel_process_group=None)
    return config, TensorGrid.from_context(view, config.tensor_parallel_mode)


def adapt_plan_to_grid(plan: ShardingPlan, grid: TensorGrid) -> ShardingPlan:
    """Add sharding rules for modules between attention and MLPs, such as norms, which a grid of ranks also shards.

    Shards norms and per-feature parameters. Other modules with parameters receive all features, which are gathered
    before the submodule of the layer that contains them. Raises PolicyError if a rule supports only one tensor axis.
    """
    if not plan.stacks:
        raise PolicyError(
            f"tensor_parallel_mode={grid.mode!r} requires a LayerStack, but the policy of {type(plan.model).__name__} "
            "has none.",
            remedy="Write a RolePolicy with a LayerStack, or set tensor_parallel_mode='1d'.",
        )
    plan = replace(
        plan, replacements=dict(plan.replacements), parameters=dict(plan.parameters), full_sequence_modules=[]
    )
    for stack in plan.stacks:
        prefix = f"{stack.layers}."
        blocks = [block for _, block in plan.blocks if block.entry.startswith(prefix)]
        _check_replacements_support_grid(plan, prefix)
        if (width := _get_hidden_size(plan, blocks)) is None:
            continue
        entries = tuple(f"{block.entry}." for block in blocks)  # inside, a rank has all features of its samples
        for path, module in plan.model.get_submodule(stack.layers).named_modules(prefix=stack.layers):
            own = [join_path(path, name) for name, _ in module.named_parameters(recurse=False)]
            is_known = path in plan.replacements or (own and all(name in plan.parameters for name in own))
            if _is_sharding_rule_needed(module, width) and not is_known and not f"{path}.".startswith(entries):
                _add_rule_for_module_outside_blocks(plan, grid, prefix, path, module, width)
        if stack.final_norm and _is_sharding_rule_needed(norm := plan.model.get_submodule(stack.final_norm), width):
            _add_rule_for_module_outside_blocks(plan, grid, prefix, stack.final_norm, norm, width)
    around = [block.gather_module for _, block in plan.blocks if block.gather_module is not None]
    gathered = [path for path in dict.fromkeys(plan.full_sequence_modules) if path not in around]
    if (gathered or around) and grid.mode == "3d":
        path = [*gathered, *around][0]
        raise ConfigError(
            f"{type(plan.model).__name__} does not support tensor_parallel_mode='3d', because {path!r} needs all "
            "hidden features of a token.",
            remedy="Use tensor_parallel_mode='2d', '2.5d' or '1d'.",
        )
    inside = tuple(f"{path}." for path in (*gathered, *around))
    kept = {n: s for n, s in plan.replacements.items() if s.target_module is not GridNorm or not n.startswith(inside)}
    return replace(plan, replacements=kept, full_sequence_modules=gathered)


def _is_sharding_rule_needed(module: nn.Module, hidden_size: int) -> bool:
    """Return whether a module needs a sharding rule, because it has parameters or is a norm."""
    own = next(module.parameters(recurse=False), None)
    return own is not None or (not module._modules and getattr(module, "normalized_shape", None) == (hidden_size,))


def _check_replacements_support_grid(plan: ShardingPlan, layer_stack_prefix: str) -> None:
    for path, sub in plan.replacements.items():
        target = sub.target_module
        if (
            not path.startswith(layer_stack_prefix)
            or not isinstance(target, type)
            or issubclass(target, GridParallelModule)
        ):
            continue
        if issubclass(target, Linear1D_Col | Linear1D_Row) or not target.__module__.startswith("shardformer."):
            raise PolicyError(
                f"The policy replaces {path!r} with {target.__name__}, which supports only tensor_parallel_mode='1d'.",
                remedy="Use tensor_parallel_mode='1d', or write a RolePolicy, which supports every mode.",
            )


def _get_hidden_size(plan: ShardingPlan, blocks: list[BlockDescription]) -> int | None:
    rows: list[Any] = [
        get_submodule_or_none(plan.model, block.row) for block in blocks if block.replicated_terms is None
    ]
    return next((row.nf if has_transposed_weight(row) else row.out_features for row in rows if row is not None), None)


def _add_rule_for_module_outside_blocks(
    plan: ShardingPlan, grid: TensorGrid, layer_stack_prefix: str, module_path: str, module: nn.Module, hidden_size: int
) -> None:
    """Add a rule to the plan that shards a module outside attention and MLPs."""
    own = dict(module.named_parameters(recurse=False))
    shapes = {tuple(p.shape) for p in own.values()}
    if shapes <= {(hidden_size,)} and not module._modules and get_norm_kind(module) is not None:
        kwargs = {"split": Split.even(hidden_size, grid.hidden.size)}
        plan.replacements[module_path] = SubModuleReplacementDescription(module_path, GridNorm, kwargs)
    elif shapes == {(hidden_size,)} and (module._modules or is_elementwise(module)):
        for name in own:
            plan.parameters[join_path(module_path, name)] = {
                0: Split.even(hidden_size, grid.hidden.size, axes=(grid.hidden.name,))
            }
    elif module_path.startswith(layer_stack_prefix) and module_path.count(".") > layer_stack_prefix.count("."):
        layer, child = module_path.removeprefix(layer_stack_prefix).split(".")[:2]
        holder = f"{layer_stack_prefix}{layer}.{child}."
        holds_one_end = any(
            f"{block.entry}.".startswith(holder) != f"{block.row}.".startswith(holder) for _, block in plan.blocks
        )
        plan.full_sequence_modules.append(module_path if holds_one_end else holder[:-1])
    else:
        raise ConfigError(
            f"tensor_parallel_mode={grid.mode!r} shards the hidden features of each token, but {module_path!r} in "
            f"{type(plan.model).__name__} needs all features of a token.",
            remedy="Use tensor_parallel_mode='1d' for this model.",
        )


# --- batch dimensions of the arguments of attention modules


def find_modules_with_extra_inputs(policy: Policy) -> list[str]:
    """List the paths of modules inside layers that may receive inputs other than hidden states."""
    model, out = policy.model, []
    for stack in policy.stacks():
        paths = [path for path, _ in model.get_submodule(stack.layers).named_modules(prefix=stack.layers)]
        out += [path for path in paths if path.count(".") > stack.layers.count(".") + 1]
    for key, description in policy.module_policy().items():
        for block in description.blocks or []:
            if block.arguments is not None and isinstance(key, str):
                out.append(join_path(key, block.arguments.at))
    return [path for path in dict.fromkeys(out) if get_submodule_or_none(model, path) is not None]


def make_argument_key(module_path: str, argument_name: str) -> tuple[str, str]:
    """Create a dict key for a module argument that is the same for all layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module_path), argument_name


def named_tensor_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of each input tensor of a module. The first one is named ``HIDDEN_STATES``."""
    if not any(isinstance(x, Tensor) for x in (*args[:1], *kwargs.values())):
        return
    hidden, names = get_first_tensor_arg(args, kwargs), _get_forward_arg_names(module)
    for path, leaf in tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(leaf, Tensor):
            yield HIDDEN_STATES if leaf is hidden else _format_argument_path(path, names), leaf


def _get_forward_arg_names(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def _format_argument_path(key_path: tuple[Any, ...], argument_names: list[str]) -> str:
    """Format the argument name of a tensor, with its path inside a nested argument."""
    kind, key, *inner = key_path
    if kind.idx == 1:
        return f"{key.key}{keystr(tuple(inner))}"
    return f"{argument_names[key.idx] if key.idx < len(argument_names) else key.idx}{keystr(tuple(inner))}"


def install_sample_selection_hooks(
    model: nn.Module, plan: ShardingPlan, metadata: ShardingMetadata, sample_dims: ArgumentSamples
) -> None:
    """Install hooks that select this rank's samples in the masks and other arguments of attention modules."""
    streams = [edge for edge in metadata.region_hooks if isinstance(edge, GridActivationSharding)]
    stacks = [(f"{stack.layers}.", stream) for stack, stream in zip(plan.stacks, streams, strict=True)]
    arguments_at = [(path, BlockArguments(path)) for path in plan.full_sequence_modules]
    arguments_at += [(block.entry, block.arguments) for _, block in plan.blocks if block.arguments is not None]
    entering: dict[nn.Module, tuple[BlockArguments, GridActivationSharding]] = {}
    for path, arguments in arguments_at:
        stream = next((stream for prefix, stream in stacks if path.startswith(prefix)), None)
        if stream is not None:
            entering[model.get_submodule(arguments.at)] = arguments, stream
    remove_caches = partial(_remove_kv_caches_from_output, streams, get_forward_arg_names(model))
    register_forward_hooks(model, HookOrder.MODEL_SEQUENCE, forward_hook=remove_caches)
    for module, (arguments, stream) in entering.items():
        _LocalSampleSelectionHook(module, arguments, stream, sample_dims)
    for stack, (_, stream) in zip(plan.stacks, stacks, strict=True):
        stream.batch_dim = sample_dims.get(make_argument_key(stack.layers, HIDDEN_STATES)) or 0


def _remove_kv_caches_from_output(
    activation_shardings: Sequence[GridActivationSharding],
    argument_names: frozenset[str],
    model: nn.Module,
    args: tuple[Any, ...],
    output: Any,
) -> Any:
    """Remove KV caches from the model's output, because they contain only this rank's samples."""
    return (
        remove_kv_caches(output, argument_names)
        if any(stream.is_sharded for stream in activation_shardings[-1:])
        else None
    )


class _LocalSampleSelectionHook:
    """A forward pre-hook that selects this rank's samples from the arguments of an attention module.

    Arguments in ``region_inputs`` are selected after they enter the tensor-parallel region, all others before.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: BlockArguments,
        activation_sharding: GridActivationSharding,
        sample_dims: ArgumentSamples,
    ) -> None:
        self._arguments, self._stream, self._samples = arguments, activation_sharding, sample_dims
        self._rows, self._names = 0, _get_forward_arg_names(module)
        self._key, _ = make_argument_key(arguments.at, "")  # the path without indices, so that layers share their graph
        register_forward_hooks(module, HookOrder.LOCAL_SAMPLES, self._forward_pre_hook, with_kwargs=True)
        for name in arguments.region_inputs:
            register_argument_pre_hook(
                module, name, partial(self._select_local_samples, name), HookOrder.SAMPLE_ARGUMENTS
            )

    def _forward_pre_hook(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._stream.is_sharded:
            return None
        hidden = get_first_tensor_arg(args, kwargs)
        self._rows = hidden.shape[self._stream.batch_dim]

        def select_samples(key_path: tuple[Any, ...], leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf is hidden or not leaf.dim():
                return leaf
            name = _format_argument_path(key_path, self._names)
            return leaf if name in self._arguments.region_inputs else self._select_local_samples(name, leaf)

        return tree_map_with_path(select_samples, (args, kwargs))

    def _select_local_samples(self, argument_name: str, tensor: Tensor) -> Tensor:
        default = 0 if tensor.dim() > 1 and tensor.shape[0] == self._stream.samples else None
        dim = self._samples.get((self._key, argument_name), default)
        return (
            tensor
            if dim is None or not self._stream.is_sharded
            else self._stream.select_local_samples(tensor, dim, self._rows)
        )
