"""Check the structure, KV caches and inputs of a sharded model before each forward pass.

A KV cache that the sharded model filled contains this rank's heads. A cache that was filled elsewhere contains all
heads. Each rank then selects its own heads, and the gradient of the full cache is summed over the ranks.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardformer.comm.collectives import all_gather_objects, copy_to_tp_region, once_differentiable
from shardformer.comm.deferred_tensor import resolve_deferred_tensors
from shardformer.consistency.ddp_and_fsdp_guards import check_not_in_ddp, forbid_data_parallel_wrappers
from shardformer.consistency.rank_divergence import (
    check_ranks_received_same_batch,
    sync_random_state_and_check_ranks_agree,
)
from shardformer.context_parallel.sequence_sharded_tensor import SequenceShardedTensor
from shardformer.errors import ConfigError, InputError
from shardformer.forward_hooks import HookOrder, register_forward_hooks
from shardformer.layout.sharding_metadata import ShardingMetadata, get_sharding_metadata, named_sharded_parameters
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.tensor_grid import TensorGrid
from shardformer.module_paths import get_attribute_by_path_or_none
from shardformer.pipeline.stage_manager import ALL_LAYER_OUTPUTS, ALL_LAYER_OUTPUTS_REASON
from shardformer.policies.module_descriptions import BlockDescription
from shardformer.sharding.plan import ShardingPlan
from shardformer.tensor_parallel.parallel_module import MODULE_HOOK_TABLES, ParallelModule
from shardformer.torch_compat import current_graph_task_id, keystr, tolist_or_ones, tree_leaves, tree_map_with_path
from shardformer.transformers_compat import find_kv_caches, has_cached_tokens, is_kv_cache

LOCAL_HEADS = "_shardformer_heads"
"""Attribute that marks a KV cache that contains only this rank's heads."""


class KVCacheHeadSelector:
    """Selects this rank's attention heads in KV caches that are passed to a sharded model.

    Args:
        model: a model whose attention modules have a ``layer_idx``, as in transformers.
        axis: the mesh axis that shards the heads.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[tuple[str, BlockDescription]], axis: Axis, grid: TensorGrid | None
    ) -> None:
        self._axis = axis
        self._layers: dict[int, tuple[int, tuple[int, ...]]] = {}  # layer_idx -> (number of heads, this rank's heads)
        for _, block in blocks:
            arguments = block.arguments
            number = None if arguments is None else getattr(model.get_submodule(arguments.at), "layer_idx", None)
            if arguments is not None and type(number) is int and arguments.kv_heads[0]:
                # unknown: two attention modules with one index, or shards of a grid
                is_unknown = number in self._layers or grid is not None
                self._layers[number] = (0, ()) if is_unknown else arguments.kv_heads

    def select_local_heads(self, model: nn.Module, inputs: Sequence[Any]) -> None:
        """Select the heads of this rank in KV caches that contain all heads, before a forward pass.

        Raises ConfigError for a cache with an unexpected number of heads or an unknown structure.
        """
        for cache in self._iter_kv_caches(inputs):
            if has_cached_tokens(cache) and LOCAL_HEADS not in vars(cache):
                self._select_local_heads_in_cache(cache)
            vars(cache)[LOCAL_HEADS] = True

    def mark_filled_caches(self, outputs: Sequence[Any]) -> None:
        """Mark KV caches that contain only this rank's heads after a forward pass."""
        for cache in self._iter_kv_caches(outputs):
            vars(cache)[LOCAL_HEADS] = True

    def _iter_kv_caches(self, inputs_or_outputs: Sequence[Any]) -> Iterator[Any]:
        if self._layers:
            yield from (cache for cache in find_kv_caches(inputs_or_outputs) if hasattr(cache, "__dict__"))

    def _select_local_heads_in_cache(self, kv_cache: Any) -> None:
        found = getattr(kv_cache, "layers", None)
        if found is None or hasattr(kv_cache, "self_attention_cache"):
            raise self._make_unsupported_cache_error(
                f"Tensor parallelism does not support a {type(kv_cache).__name__} as a KV cache."
            )
        new: list[tuple[Any, str, Tensor]] = []
        for number, layer in enumerate(found):
            for name in ("keys", "values") if number in self._layers else ():
                total, own = self._layers[number]
                x = getattr(layer, name, None)
                if not isinstance(x, Tensor) or not x.numel():
                    continue
                if x.dim() == 4 and x.shape[1] == total:
                    full = copy_to_tp_region(x, self._axis) if x.requires_grad and torch.is_grad_enabled() else x
                    new.append((layer, name, full.index_select(1, torch.tensor(own, device=x.device))))
                elif x.dim() != 4 or x.shape[1] != len(own):
                    raise self._make_unsupported_cache_error(
                        f"The KV cache of layer {number} has {name} of shape {tuple(x.shape)}, which tensor "
                        "parallelism does not support."
                    )
        for layer, name, x in new:
            setattr(layer, name, x)

    def _make_unsupported_cache_error(self, message: str) -> ConfigError:
        counts = sorted({total for total, _ in self._layers.values()} - {0})
        shape = f"(batch, {' or '.join(map(str, counts))}, length, head dim)" if counts else ""
        values = f" with keys and values of shape {shape}" if shape else ""
        remedy = f"Use a DynamicCache{values}, or pass all tokens to the model without a cache."
        return ConfigError(message, remedy=remedy)


OF_LIBRARIES = ("shardformer", "torch", "transformers", "timm", "accelerate", "peft")
"""Libraries whose hooks do not read the values, or have their own checks."""
INPUT_HOOK_TABLES = ("_forward_pre_hooks", "_backward_hooks")
"""Tables of hooks that receive the input of a module, or its gradient."""
OUTPUT_HOOK_TABLES = tuple(table for table in MODULE_HOOK_TABLES if table not in INPUT_HOOK_TABLES)
HOOK_OUTSIDE = "hook the model or a module after the final norm instead"
_get_hook_tables = attrgetter(*MODULE_HOOK_TABLES)


class ModelStructureSnapshot:
    """Records the modules, parameters, hooks and `forward` methods of a sharded model, to detect later changes.

    Args:
        local_modules: modules whose input or output is local to this rank.
    """

    def __init__(self, model: nn.Module, local_modules: Iterable[ModuleWithLocalActivations]) -> None:
        self._local_modules = {part.module_path: part for part in local_modules}
        self._modules = list(model.modules())
        self._params: dict[str, int] | None = _get_parameter_ids(model)
        self._marks = self._get_module_fingerprints()
        self._check_no_user_hooks(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelStructureSnapshot:
        new = object.__new__(ModelStructureSnapshot)  # takes the fingerprint of the copied model at its first call
        new._local_modules, new._params, new._modules, new._marks = self._local_modules, None, [], [()]
        return new

    def update_snapshot(self, model: nn.Module) -> None:
        """Update the snapshot after ShardFormer itself has changed the model."""
        self._modules, self._params = list(model.modules()), _get_parameter_ids(model)
        self._marks = self._get_module_fingerprints()

    def check_unchanged(self, model: nn.Module) -> None:
        """Raise ConfigError if the model was changed after sharding in a way that would make its results wrong."""
        if self._get_module_fingerprints() == self._marks:
            return
        self._check_parameters_unchanged(model)
        _check_shard_shapes_unchanged(model)
        self._check_no_user_hooks(model)
        self._check_forward_methods_unchanged(model)
        self._modules = list(model.modules())
        self._marks = self._get_module_fingerprints()

    def _get_module_fingerprints(self) -> list[tuple[Any, ...]]:
        return [
            (
                *map(id, module._modules.values()),
                *map(id, module._parameters.values()),
                *[p.shape for p in module._parameters.values() if p is not None],
                *map(len, _get_hook_tables(module)),
                id(type(module)),
                _get_user_assigned_forward_id(module) if "forward" in vars(module) else 0,
            )
            for module in self._modules
        ]

    def _check_parameters_unchanged(self, model: nn.Module) -> None:
        now = _get_parameter_ids(model)
        if self._params is None or _count_leaf_names_and_ids(now) == _count_leaf_names_and_ids(self._params):
            self._params = now  # same parameters under new names, as in a wrapper
            return
        new = [name for name, p in now.items() if p not in self._params.values()]
        moved = [name for name, p in now.items() if name not in new and self._params.get(name) != p]
        gone = [name for name in self._params if name not in now]
        name = (new or moved or gone)[0]
        change = "added" if new else "replaced by another parameter" if moved else "removed"
        raise ConfigError(
            f"The parameter {name} of {type(model).__name__} was {change} after the model was sharded.",
            remedy="Change the model before you shard it, or, to add PEFT adapters, call "
            "shardformer.integrations.peft.get_peft_model.",
        )

    def _check_no_user_hooks(self, model: nn.Module) -> None:
        for path, part in self._local_modules.items():
            module = get_attribute_by_path_or_none(model, path)
            tables = [getattr(module, table) for table in part.hook_tables] if isinstance(module, nn.Module) else []
            for hook in chain.from_iterable(table.values() for table in tables):
                if not is_library_hook(hook) and not getattr(hook, "sees_parts", False):
                    name = getattr(hook, "__qualname__", type(hook).__name__)
                    raise ConfigError(
                        f"The hook {name} on {path} would receive only a shard of the values, because {part.reason}.",
                        remedy=f"Remove the hook, or {part.alternative}. If the hook can process a shard, set "
                        "hook.sees_parts = True.",
                    )

    def _check_forward_methods_unchanged(self, model: nn.Module) -> None:
        before = {id(m): marks[-2:] for m, marks in zip(self._modules, self._marks, strict=False)}
        for path, module in model.named_modules():
            if path not in self._local_modules and not isinstance(module, ParallelModule):
                continue
            now = (id(type(module)), _get_user_assigned_forward_id(module))
            if before.get(id(module), now) != now:
                raise ConfigError(
                    f"The forward method of {path} ({type(module).__name__}) was replaced after the model was sharded.",
                    remedy="Replace the `forward` method before you shard the model.",
                )


@dataclass(frozen=True)
class ModuleWithLocalActivations:
    """A module on which user hooks would be wrong, because they would receive only this rank's shard.

    Args:
        reason: what is local, as a clause for errors.
        hook_tables: the tables of hooks that would receive local values.
        alternative: what to do instead of hooking the module.
    """

    module_path: str
    reason: str
    hook_tables: tuple[str, ...] = MODULE_HOOK_TABLES
    alternative: str = "hook the full attention or MLP instead"


def iter_local_activation_modules(
    plan: ShardingPlan, metadata: ShardingMetadata, *, is_tensor_parallel: bool
) -> Iterator[ModuleWithLocalActivations]:
    """Yield the modules of a sharded model that receive or return only this rank's shard of the activations."""
    shards = [shard for shard in metadata.activations.shards if metadata.context.sizes.get(shard.axis, 1) > 1]
    if shards:
        why = f"between the blocks each rank has a shard of the {' and '.join(shard.dim for shard in shards)}"
        for stack in plan.stacks:
            for path, _ in plan.model.get_submodule(stack.layers).named_modules(prefix=stack.layers):
                if path != stack.layers:
                    yield ModuleWithLocalActivations(path, why, alternative=HOOK_OUTSIDE)
            if stack.final_norm is not None:
                yield ModuleWithLocalActivations(stack.final_norm, why, INPUT_HOOK_TABLES, HOOK_OUTSIDE)
    if is_tensor_parallel:
        for _, block in plan.blocks:
            yield from _iter_local_modules_in_block(plan.model, block)


def move_user_hooks_after_gather(model: nn.Module, plan: ShardingPlan) -> None:
    """Make user hooks on final norms run after the all-gather, so that they receive the full hidden states."""
    for path in (stack.final_norm for stack in plan.stacks if stack.final_norm is not None):
        hooks = model.get_submodule(path)._forward_hooks
        for key in [key for key, hook in hooks.items() if not is_library_hook(hook)]:
            hooks[key] = hooks.pop(key)


def _iter_local_modules_in_block(model: nn.Module, block: BlockDescription) -> Iterator[ModuleWithLocalActivations]:
    why = "inside a block each tensor rank has only its own heads or features"
    if not block.contains_exit_layer:  # the output of the entry and the input of modules around the exit are local
        yield ModuleWithLocalActivations(block.entry, why, OUTPUT_HOOK_TABLES)
        ends = block.row.split(".")
        for path in (".".join(ends[:n]) for n in range(1, len(ends) + 1)):
            if not f"{block.entry}.".startswith(f"{path}."):
                yield ModuleWithLocalActivations(path, why, INPUT_HOOK_TABLES)
    for path, _ in model.get_submodule(block.entry).named_modules(prefix=block.entry):
        if path != block.entry:
            yield ModuleWithLocalActivations(path, why)


def _check_shard_shapes_unchanged(model: nn.Module) -> None:
    """Raise ConfigError if an assignment to ``param.data`` has changed the shape of a shard."""
    coords = get_sharding_metadata(model).coords
    for name, param, spec in named_sharded_parameters(model):
        part = spec.get_local_shape(coords)
        if tuple(param.shape) != part:
            raise ConfigError(
                f"The parameter {name} of {type(model).__name__} must have the shape {list(part)} of this rank's "
                f"shard, but got {list(param.shape)}.",
                remedy="Set weights before sharding, or load the plain model's state dict with load_state_dict.",
            )


def _get_parameter_ids(model: nn.Module) -> dict[str, int]:
    return {name: id(p) for name, p in nn.Module.named_parameters(model, remove_duplicate=False)}


def _count_leaf_names_and_ids(param_id_by_name: dict[str, int]) -> Counter[tuple[str, int]]:
    return Counter((name.rpartition(".")[2], p) for name, p in param_id_by_name.items())


def _get_user_assigned_forward_id(module: nn.Module) -> int:
    """Return the id of a ``forward`` method that the user assigned to a module instance, or 0."""
    forward = vars(module).get("forward")
    is_ours = type(forward).__module__.partition(".")[0] == "shardformer"
    is_of_class = getattr(forward, "__func__", None) is type(module).forward
    return 0 if forward is None or is_ours or is_of_class else id(forward)


def is_library_hook(hook: Callable[..., Any]) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    named = hook if hasattr(hook, "__module__") and owner is None else type(owner if owner is not None else hook)
    return str(getattr(named, "__module__", "")).partition(".")[0] in OF_LIBRARIES


TOLERANCE = 1e-3
"""Allowed difference between the ranks' sums of a gradient, relative to the sum of its absolute values."""


class _CompareInputGradientsAcrossRanks(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, input_name: str, axis: Axis) -> Tensor:
        ctx.name, ctx.axis = input_name, axis
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sums = torch.stack([grad.double().sum(), grad.double().abs().sum()])
        every = all_gather_objects(tolist_or_ones(sums), ctx.axis)
        if any(abs(a - b) > TOLERANCE * every[0][1] for sums in every for a, b in zip(sums, every[0], strict=True)):
            raise InputError(
                f"The {ctx.axis.size} tensor ranks computed different gradients for the input {ctx.name}.",
                remedy=f"If you do not need the gradient, detach {ctx.name}. Otherwise, use a layout without the "
                "tensor axis.",
            )
        return grad, None, None


def wrap_inputs_to_compare_grads(args: tuple[Any, ...], kwargs: dict[str, Any], axis: Axis) -> Any:
    """Wrap the inputs so that the backward pass checks whether their gradients are the same on all ranks.

    Returns the wrapped inputs, or None if no input requires a gradient.

    Communicates two numbers in the backward pass for each input that requires a gradient. The backward pass raises
    InputError on all ranks if the gradients differ.
    """

    def requires_gradient(tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.requires_grad and not isinstance(tensor, SequenceShardedTensor)

    if axis.size == 1 or not torch.is_grad_enabled() or not any(map(requires_gradient, tree_leaves((args, kwargs)))):
        return None

    def attach_comparison(key_path: tuple[Any, ...], tensor: Any) -> Any:
        return (
            _CompareInputGradientsAcrossRanks.apply(tensor, keystr(key_path[1:]).strip("[]'"), axis)
            if requires_gradient(tensor)
            else tensor
        )

    return tree_map_with_path(attach_comparison, (args, kwargs))


class ForwardCheckHooks:
    """Forward hooks that check the structure of a sharded model and the inputs of each forward pass.

    Before a forward pass they reset regions after an error, attach gradient reducers and check the structure, caches
    and arguments. Before the first forward pass they also compare the inputs between ranks. In training, ranks with the
    same batch get the same random state. After a forward pass the hooks convert the outputs to plain tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardingPlan,
        metadata: ShardingMetadata,
        grid: TensorGrid | None,
        *,
        is_tensor_parallel: bool,
        is_context_parallel: bool,
    ) -> None:
        self._state = metadata  # first, so that pickle raises its error
        self._has_local_inputs = is_tensor_parallel or is_context_parallel
        self._structure = ModelStructureSnapshot(
            model, iter_local_activation_modules(plan, metadata, is_tensor_parallel=is_tensor_parallel)
        )
        self._caches = KVCacheHeadSelector(
            model, plan.blocks if is_tensor_parallel else (), metadata.context.tensor, grid
        )
        # Not compiled: it runs once or communicates. Disabled for this model only, because sharding another model
        # must not change what this one was compiled with.
        self._eager: Callable[..., None] = torch.compiler.disable(ForwardCheckHooks._run_checks)
        self._compared = not metadata.request.extra.get("check_inputs", True) or metadata.same_batch_axis.size == 1
        register_forward_hooks(model, HookOrder.CHECKS, self._forward_pre_hook, with_kwargs=True)
        register_forward_hooks(model, HookOrder.PLAIN_OUTPUT, forward_hook=self._forward_hook)
        if any(axis.size > 1 for axis in metadata.context.axes.values()):
            forbid_data_parallel_wrappers(model, metadata.context)
        metadata.check_call, metadata.on_adapted = self._check_arguments, self._structure.update_snapshot

    def _forward_pre_hook(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._eager(self, model, args, kwargs)
        if not self._has_local_inputs or torch.compiler.is_compiling():
            return None
        return wrap_inputs_to_compare_grads(args, kwargs, self._state.context.tensor)

    def _run_checks(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if current_graph_task_id() < 0:  # not recomputation in a backward pass
            for edge in self._state.region_hooks:
                edge.reset_after_error()
        for reducer in self._state.reducers:
            reducer.prepare_for_backward()
        self._check_called_by_pipeline(model)
        check_not_in_ddp(model, self._state.context)
        self._check_arguments(model, kwargs)
        if current_graph_task_id() < 0:
            self._caches.select_local_heads(model, [*args, *kwargs.values()])
        self._structure.check_unchanged(model)
        if not self._compared:
            self._compared = True
            check_ranks_received_same_batch([*args, *kwargs.values()], self._state.same_batch_axis)
        if self._state.monitor is not None:
            self._state.monitor.training = model.training
        if self._should_sync_random_state(model, kwargs):
            sync_random_state_and_check_ranks_agree(self._state, [*args, *kwargs.values()])

    def _forward_hook(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Mapping) and not torch.compiler.is_compiling():
            self._caches.mark_filled_caches(list(output.values()))
        return resolve_deferred_tensors(output)

    def _should_sync_random_state(self, model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
        """Return whether this forward pass must start by synchronizing random states between ranks.

        Not in a pipeline, where each micro-batch has a seed, nor in recomputation, which restores the random state of
        the forward pass. In generation, later tokens skip the check because the first tokens were compared.
        """
        in_pipeline = self._state.stages is not None and self._state.stages.is_running_forward
        continues = not model.training and any(map(has_cached_tokens, find_kv_caches(kwargs.values())))
        if in_pipeline or continues or current_graph_task_id() >= 0:
            return False
        return self._has_local_inputs and (model.training or self._state.monitor is not None)

    def _check_called_by_pipeline(self, model: nn.Module) -> None:
        """Raise ConfigError if a pipeline stage is called directly instead of by ``shardformer.Pipeline``."""
        stages = self._state.stages
        if (
            stages is None
            or stages.manager.num_stages == 1
            or stages.stage_forward is None
            or stages.is_running_forward
        ):
            return
        raise ConfigError(
            f"{type(model).__name__} is split into {stages.manager.num_stages} pipeline stages, so you cannot call "
            "it directly or use generate().",
            remedy="Create pipeline = shardformer.Pipeline(model, micro_batches=...), and call pipeline.step(batch), "
            "pipeline.evaluate(batch) or pipeline.forward(batch).",
        )

    def _check_arguments(self, model: nn.Module, kwargs: Mapping[str, Any]) -> None:
        for name, why in self._state.unproven.items():
            if kwargs.get(name) is not None:
                raise ConfigError(
                    f"{type(model).__name__} with the layout {self._state.context} does not support the input {name}: "
                    f"{why}.",
                    remedy=f"Remove {name} from the batches, or use another layout, such as data parallelism or ZeRO.",
                )
        if self._state.context.pipe.size > 1:
            self._check_pipeline_inputs(kwargs)
        self._check_requested_outputs(model, kwargs)

    def _check_pipeline_inputs(self, kwargs: Mapping[str, Any]) -> None:
        for name, value in kwargs.items():
            if is_kv_cache(value) and has_cached_tokens(value):
                raise ConfigError(
                    f"Pipeline parallelism requires an empty cache as the input {name}, but got a "
                    f"{type(value).__name__} that already contains tokens.",
                    remedy=f"Remove {name}, or use a layout without the pipe axis.",
                )
            if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(value)):
                raise ConfigError(
                    f"Pipeline parallelism cannot compute the gradient of the input {name}.",
                    remedy=f"Detach {name}, make it a parameter of the model, or use a layout without the pipe axis.",
                )

    def _check_requested_outputs(self, model: nn.Module, kwargs: Mapping[str, Any]) -> None:
        dims = " and ".join(shard.dim for shard in self._state.activations.shards)
        settings, in_stages = getattr(model, "config", None), self._state.context.pipe.size > 1
        local_states = f"Between the blocks each rank has a shard of the {dims}"
        for name, is_refused, why in (
            ("output_attentions", self._has_local_inputs, "Each tensor rank has only its own attention heads"),
            ("output_hidden_states", dims, local_states),
            ("output_router_logits", dims, "The router loss needs all tokens, but each rank has only some"),
            *((name, in_stages, ALL_LAYER_OUTPUTS_REASON) for name in ALL_LAYER_OUTPUTS),
            ("use_cache", in_stages, "Each stage keeps only the keys and values of its own layers"),
        ):
            value = kwargs.get(name, False if name == "use_cache" else None)
            if is_refused and (getattr(settings, name, False) if value is None else value):
                raise ConfigError(
                    f"{type(model).__name__} with the layout {self._state.context} does not support {name}=True.",
                    rule=why,
                    remedy=f"Set {name}=False, or use the plain model.",
                )
