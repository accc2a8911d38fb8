"""Remove the adapters from a model, shard the plain model, and add the adapters to the sharded model.

The plain model is sharded as if it had no adapters: its policy, its plan and all checks stay the same. Each adapter is
then sharded like the layer that it belongs to (``sharded_adapters.py``). Its parameters get a layout and a gradient
reduction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collective_call import run_and_compare_across_ranks
from shardformer.consistency.initial_weights import compute_model_fingerprint, sync_initial_weights
from shardformer.errors import ConfigError, check_minimum_library_version
from shardformer.gradients.buckets import GradientSlot
from shardformer.gradients.reducer import BUCKET_BYTES, GradientReducer
from shardformer.integrations.peft_adapters import (
    EMBEDDINGS,
    AdapterDropout,
    has_full_gradients_on_every_rank,
    restore_parallel_base_layer,
    shard_adapter,
    shard_trainable_copy,
)
from shardformer.layout.activation_layout import ActivationLayout, ModelRegion, ShardedFrom
from shardformer.layout.shard_spec import ShardSpec
from shardformer.layout.sharding_metadata import (
    METADATA_ATTRIBUTE,
    PARENT_METADATA_ATTRIBUTE,
    ParamEntry,
    ShardingMetadata,
    get_gradient_reduction,
    get_sharding_metadata,
    group_overlapping_tensors,
    named_sharded_parameters,
)
from shardformer.mesh.parallel_context import Axis
from shardformer.meta_init.lazy_init import has_deferred_weights, materialize_parameters, record_changes_if_lazy
from shardformer.module_paths import get_parent_and_attribute_name
from shardformer.sharding import checks
from shardformer.tensor_parallel.layers import Linear1D_Row
from shardformer.tensor_parallel.parallel_module import ParallelModule
from shardformer.torch_compat import DropoutBase

INNER = {"original_module", "base_layer"}
"""Attributes in which PEFT keeps the module that it wraps."""
HOOK_TABLES = tuple(name for name in vars(nn.Module()) if name.startswith(("_forward_", "_backward_")))


def has_adapters(model: nn.Module) -> bool:
    """Return whether the model or any of its modules is wrapped by PEFT."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    if not any(kind.__module__.startswith("peft.") for kind in kinds):
        return False
    check_peft_version()
    return _is_peft_model(model) or any(map(is_peft_wrapper, model.modules()))


def check_peft_version() -> None:
    """Raise ConfigError if the installed PEFT release is too old."""
    import peft

    check_minimum_library_version("peft", peft.__version__)


def _is_peft_model(model: nn.Module) -> bool:
    from peft import PeftMixedModel, PeftModel

    return isinstance(model, PeftModel | PeftMixedModel)


def is_peft_wrapper(module: nn.Module) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def is_tuner_layer(module: nn.Module) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def is_peft_tuner_model(module: nn.Module) -> bool:
    from peft.tuners.tuners_utils import BaseTuner

    return isinstance(module, BaseTuner)


def has_default_forward(tuner_model: nn.Module) -> bool:
    """Return whether the ``forward`` method of a PEFT tuner only calls the wrapped model."""
    from peft.tuners.tuners_utils import BaseTuner

    return is_peft_tuner_model(tuner_model) and type(tuner_model).forward is BaseTuner.forward


def unwrap_peft_model(model: nn.Module) -> nn.Module:
    """Return the model inside a ``PeftModel``, or the model itself if PEFT does not wrap it."""
    return model.get_base_model() if "peft" in sys.modules and _is_peft_model(model) else model  # type: ignore[operator]


def find_peft_wrappers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost PEFT wrapper of each wrapped module, as a dict from paths to wrappers."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if is_peft_wrapper(module) and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    return found


def _find_wrapped_attribute(wrapper: nn.Module) -> list[str]:
    """Return the path of the wrapped module inside a PEFT wrapper, as a list of attribute names."""
    for name in INNER:
        if wrapper._modules.get(name) is not None:
            return [name]
    return next([name, *_find_wrapped_attribute(m)] for name, m in wrapper.named_children() if is_peft_wrapper(m))


def _list_wrapped_path_parts(wrapper: nn.Module) -> list[str]:
    parts = _find_wrapped_attribute(wrapper)
    inner = wrapper.get_submodule(".".join(parts))
    return [*parts, *_list_wrapped_path_parts(inner)] if is_peft_wrapper(inner) else parts


def find_innermost_wrapper_and_attribute(wrapper: nn.Module) -> tuple[nn.Module, str]:
    """Return the innermost PEFT wrapper around a module, and the name of its attribute that holds the module."""
    *parts, name = _list_wrapped_path_parts(wrapper)
    return wrapper.get_submodule(".".join(parts)), name


def get_wrapped_module(wrapper: nn.Module) -> nn.Module:
    holder, name = find_innermost_wrapper_and_attribute(wrapper)
    return holder.get_submodule(name)


def get_wrapped_module_path(wrapper_path: str, wrapper: nn.Module) -> str:
    """Return the path of the module inside nested PEFT wrappers. The outermost wrapper is at ``wrapper_path``."""
    return ".".join([wrapper_path, *_list_wrapped_path_parts(wrapper)])


def set_submodule(model: nn.Module, module_path: str, module: nn.Module) -> None:
    owner, name = get_parent_and_attribute_name(model, module_path)
    owner._modules[name] = module


def remove_peft_wrappers(model: nn.Module) -> dict[str, nn.Module]:
    """Replace each PEFT wrapper with the module inside it, and return a dict from paths to wrappers."""
    wrappers = find_peft_wrappers(model)
    for path, wrapper in wrappers.items():
        set_submodule(model, path, get_wrapped_module(wrapper))
    return wrappers


@dataclass(eq=False)
class AdapterTensorNameMap:
    """Maps the original names of parameters and buffers to their names after adapters were added.

    Args:
        paths: path of a wrapped module before -> after.
        own: names of the adapters' parameters and buffers, which do not change.
        elsewhere: path of a wrapped module on another pipeline stage -> its wrapper, without values.
    """

    paths: dict[str, str] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    elsewhere: dict[str, nn.Module] = field(default_factory=dict)

    def get_name_with_adapters(self, original_name: str) -> str:
        owner, _, _ = original_name.rpartition(".")
        if original_name in self.own or any(original_name.startswith(f"{inner}.") for inner in self.paths.values()):
            return original_name
        while owner:
            if owner in self.paths:
                return self.paths[owner] + original_name[len(owner) :]
            owner, _, _ = owner.rpartition(".")
        return original_name

    def get_name_without_adapters(self, current_name: str) -> str:
        """Return the name that a parameter or buffer had before adapters were added."""
        inside = ((path, inner) for path, inner in self.paths.items() if current_name.startswith(f"{inner}."))
        path, inner = next(inside, ("", ""))
        return path + current_name[len(inner) :]

    def find_peft_wrapper_path(self, param_name: str) -> str | None:
        """Return the path of the PEFT wrapper that contains a parameter, or None."""
        owner = param_name.rpartition(".")[0]
        while owner and owner not in self.paths:
            owner = owner.rpartition(".")[0]
        return owner or None

    def get_adapter_name(self, param_name: str) -> str:
        """Return the name of the adapter to which a parameter belongs, such as "default"."""
        parts = param_name.removeprefix(f"{self.find_peft_wrapper_path(param_name)}.").split(".")
        return parts[1] if len(parts) > 1 else ""


def shard_model_with_adapters(
    model: nn.Module,
    shard_fn: Callable[..., Any],
    finish_fn: Callable[[nn.Module], object],
    patch_peft_methods_fn: Callable[[nn.Module], object],
) -> tuple[nn.Module, Any]:
    """Shard a model and its PEFT adapters in place.

    Args:
        model: a ``PeftModel``, or a model into which PEFT injected adapters.
        shard_fn: shards the model without adapters, as ``shard_model_in_place(model, finish=...)``.
        finish_fn: called with ``model`` after its adapters were added to the sharded model.
        patch_peft_methods_fn: replaces the methods of PEFT's wrapper.

    Raises ShardFormerError on every rank if an adapter does not support the layout. The model is then unchanged.
    """
    inner = unwrap_peft_model(model)
    referenced = checks.find_externally_referenced_param_ids(model)
    with checks.restore_model_on_error(model):
        aliases = _find_module_aliases(model, inner)
        wrappers = remove_peft_wrappers(inner)

        def attach_adapters(sharded_model: nn.Module) -> None:
            for name, path in aliases.items():
                model._modules[name] = sharded_model.get_submodule(path)
            add_peft_adapters(model, sharded_model, wrappers, referenced)
            if model is not sharded_model:
                patch_peft_methods_fn(model)
            finish_fn(model)

        return model, shard_fn(inner, finish=attach_adapters)[1]


def _find_module_aliases(model: nn.Module, base_model: nn.Module) -> dict[str, str]:
    """Return the paths of modules that a PEFT model shares with its base model, such as ``word_embeddings``."""
    paths = {id(module): path for path, module in base_model.named_modules() if path}
    return {name: paths[id(child)] for name, child in model._modules.items() if id(child) in paths}


def add_peft_adapters(
    model: nn.Module,
    sharded_model: nn.Module,
    peft_wrappers_by_path: Mapping[str, nn.Module],
    referenced_param_ids: set[int] | None = None,
) -> None:
    """Add adapters to a sharded model, shard them, and record how their gradients are reduced.

    Args:
        model: the model that the user has: ``sharded_model``, or PEFT's wrapper around it.
        referenced_param_ids: ids of the parameters to which an object outside the model refers, such as an optimizer.

    Communicates a hash of the adapters' settings, checksums of the adapters, and their values if ranks differ.
    """
    state = get_sharding_metadata(sharded_model)
    _check_adapter_supports_pipeline(model, state)
    inner_paths = {path: get_wrapped_module_path(path, wrapper) for path, wrapper in peft_wrappers_by_path.items()}
    _replace_wrapped_modules_by_placeholders(peft_wrappers_by_path, state)
    own = nn.ModuleList([*peft_wrappers_by_path.values(), *_iter_modules_outside(model, sharded_model)])
    known = state.get_entries_by_param_id()
    new = nn.ParameterList([p for p in own.parameters() if id(p) not in known])
    adapters = {"prompts": nn.ModuleList(_iter_modules_outside(model, sharded_model)), **peft_wrappers_by_path}
    _check_adapters_share_no_memory(adapters, state)
    run_and_compare_across_ranks(
        state.context,
        lambda: _get_adapter_fingerprint(adapters),
        lambda lines: lines,
        action_description="add these adapters",
    )
    state.notes += sync_initial_weights(new, state.context.base_axes[::-1])
    tensors = {
        path: wrapper.state_dict(prefix=f"{path}.", keep_vars=True) for path, wrapper in peft_wrappers_by_path.items()
    }
    shapes = {
        name: tuple(x.shape)
        for found in tensors.values()
        for name, x in found.items()
        if isinstance(x, Tensor) and not name.endswith(f".{_WrappedModulePlaceholder.MARK}")
    }
    names = state.adapters = state.adapters or AdapterTensorNameMap()
    waits = has_deferred_weights(own)

    def attach_wrappers() -> None:
        with record_changes_if_lazy(own):
            _attach_peft_wrappers(sharded_model, state, peft_wrappers_by_path, referenced_param_ids or set())
        if waits:
            for module in (sharded_model, *own):
                materialize_parameters(module, state.context.device)

    run_and_compare_across_ranks(state.context, attach_wrappers)
    names.paths |= inner_paths
    names.own |= shapes.keys()
    _update_parameter_names(state, names, shapes, tensors)
    if state.stages is not None and any(map(_has_active_dropout, own.modules())):
        state.stages.uses_random = True
    update_sharding_metadata(model, sharded_model, names)


def _replace_wrapped_modules_by_placeholders(
    peft_wrappers_by_path: Mapping[str, nn.Module], metadata: ShardingMetadata
) -> None:
    for path, wrapper in peft_wrappers_by_path.items():
        holder, name = find_innermost_wrapper_and_attribute(wrapper)
        holder._modules[name] = _WrappedModulePlaceholder()
        is_copy = is_tuner_layer(wrapper) or "modules_to_save" in wrapper._modules
        if metadata.context.pipe.size > 1 and not is_copy:  # it also refers to the wrapped module by another name
            raise ConfigError(
                f"A PEFT {type(wrapper).__name__} on {path} is not supported with pipe={metadata.context.pipe.size}.",
                remedy="Set pipe=1, or use an adapter on linear layers.",
            )


class _WrappedModulePlaceholder(nn.Module):
    """Placeholder that keeps the position of the wrapped module in the order of a wrapper's tensors."""

    MARK = "wrapped_module"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(self.MARK, torch.empty(0))


def _get_adapter_fingerprint(adapters: Mapping[str, nn.Module]) -> list[str]:
    """Describe the settings and shapes of adapters as lines of text, to compare them between ranks."""
    return [
        f"{path} {line}"
        for path, adapter in adapters.items()
        for line in (*compute_model_fingerprint(adapter), f"scaling={getattr(adapter, 'scaling', None)}")
    ]


def _has_active_dropout(module: nn.Module) -> bool:
    rates = [rate for name in ("rank_dropout", "module_dropout") for rate in getattr(module, name, {}).values()]
    return any(rates) or (isinstance(module, (DropoutBase, AdapterDropout)) and module.p > 0)


def _check_adapter_supports_pipeline(model: Any, metadata: ShardingMetadata) -> None:
    """Raise ConfigError if an adapter, such as prompt tuning, does not work with pipeline parallelism."""
    if metadata.context.pipe.size == 1 or not _is_peft_model(model):
        return
    is_prompt = getattr(model, "_is_prompt_learning", False)
    if is_prompt or not has_default_forward(model.base_model):
        kind = "prompt learning" if is_prompt else type(model.base_model).__name__
        raise ConfigError(
            f"PEFT's {kind} does not work with pipe={metadata.context.pipe.size}.",
            remedy="Set pipe=1, or use LoRA, DoRA, IA3, LoHa, LoKr or VeRA.",
        )


def _check_adapters_share_no_memory(adapters: Mapping[str, nn.Module], metadata: ShardingMetadata) -> None:
    """Raise ConfigError if sharding would separate adapters that share memory, such as tied ones."""
    context = metadata.context
    params = [(f"{path}.{name}", p) for path, adapter in adapters.items() for name, p in adapter.named_parameters()]
    tied = next(iter(group_overlapping_tensors(params)), None)
    if tied is not None and context.tensor.size * context.pipe.size > 1:
        first, second, *_ = tied
        raise ConfigError(
            f"Tensor and pipeline parallelism do not support adapters that share memory, such as {first} and {second}.",
            remedy="Set ensure_weight_tying=False in the PEFT config, or use data parallelism.",
        )


def _iter_modules_outside(model: nn.Module, sharded_model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a PEFT model that are outside the sharded model, such as a prompt encoder."""
    inside = {id(module) for module in sharded_model.modules()}
    for module in model.modules():
        if id(module) not in inside and not any(m is sharded_model for m in module.modules()):
            yield module


def _attach_peft_wrappers(
    sharded_model: nn.Module,
    metadata: ShardingMetadata,
    peft_wrappers_by_path: Mapping[str, nn.Module],
    referenced_param_ids: set[int],
) -> None:
    for path, wrapper in peft_wrappers_by_path.items():
        base = sharded_model.get_submodule(path)
        holder, name = find_innermost_wrapper_and_attribute(wrapper)
        if metadata.stages is not None and metadata.stages.placeholders.has_placeholders(base):
            metadata.adapters.elsewhere[path] = _move_parameters_to_meta(wrapper)
            continue
        holder._modules[name] = base
        before = dict(wrapper.named_parameters())
        if is_tuner_layer(wrapper):
            _check_base_layer_supports_adapter(metadata, path, base)
            shard_adapter(wrapper, path, metadata.context_run)
            _check_adapter_dropout_supported(metadata, path, wrapper)
        else:
            copies: Any = wrapper._modules.get("modules_to_save")
            if copies is None:
                _check_base_layer_is_replicated(base, path, type(wrapper).__name__)
            for adapter, plain in () if copies is None else copies.items():
                _remove_copied_hooks(plain, base)
                copies[adapter] = shard_trainable_copy(plain, base, path)
        after = set(map(id, wrapper.parameters()))
        replaced = {
            id(p): f"{path}.{n}" for n, p in before.items() if id(p) not in after and id(p) in referenced_param_ids
        }
        if replaced:
            own = [p for p in before.values() if id(p) in replaced]
            checks.check_params_not_in_optimizer(own, replaced, type(sharded_model).__name__)
        move_hooks(base, wrapper)
        set_submodule(sharded_model, path, wrapper)


def _move_parameters_to_meta(wrapper: nn.Module) -> nn.Module:
    """Move the parameters of a PEFT wrapper to the meta device. Buffers stay, because layers may share them (VeRA)."""
    for module in wrapper.modules():
        for name, param in module._parameters.items():
            if param is not None:
                empty = torch.empty_like(param, device="meta")
                module._parameters[name] = nn.Parameter(empty, requires_grad=param.requires_grad)
    return wrapper


def _check_base_layer_supports_adapter(metadata: ShardingMetadata, module_path: str, base_layer: nn.Module) -> None:
    if metadata.stages is not None:
        stages = {
            s for n, _ in base_layer.named_parameters() for s in metadata.stages.find_owner_ranks(f"{module_path}.{n}")
        }
        if len(stages) > 1:
            raise ConfigError(
                f"The layer {module_path} cannot have an adapter, because {len(stages)} pipeline stages share the "
                "layer.",
                remedy="Remove the layer from target_modules, or set pipe=1.",
            )
    specs = vars(base_layer).get("shard_specs", {})
    if not isinstance(base_layer, ParallelModule) and specs:
        _check_base_layer_is_replicated(base_layer, module_path, "PEFT adapter")


def _check_adapter_dropout_supported(metadata: ShardingMetadata, module_path: str, wrapper: nn.Module) -> None:
    """Raise ConfigError if an adapter's dropout would draw the same mask for different sequence positions."""
    if isinstance(get_wrapped_module(wrapper), ParallelModule) or not any(map(_has_active_dropout, wrapper.modules())):
        return
    layout, region = metadata.regions.find_region(f"{module_path}.weight")
    if region is ModelRegion.STACK and any(s.begin is ShardedFrom.STACK for s in layout.get_region_shards(region)):
        raise ConfigError(
            f"The adapter on {module_path} cannot have dropout, because the tensor ranks process different positions "
            "of the sequence but would use the same dropout mask.",
            remedy="Set the dropout of the adapter to 0, or set enable_sequence_parallelism=False.",
        )


def _check_base_layer_is_replicated(base_layer: nn.Module, module_path: str, adapter_kind: str) -> None:
    if isinstance(base_layer, ParallelModule) or vars(base_layer).get("shard_specs"):
        raise ConfigError(
            f"A {adapter_kind} on {module_path} is not supported, because tensor parallelism shards this "
            f"{type(base_layer).__name__}.",
            remedy="Target only linear layers, or use data parallelism or ZeRO instead of the tensor axis.",
        )


def move_hooks(source: nn.Module, target: nn.Module) -> None:
    """Move all forward and backward hooks from one module to another."""
    for table in HOOK_TABLES:
        hooks = getattr(source, table)
        if hooks:
            getattr(target, table).update(hooks)
            setattr(source, table, type(hooks)())


@contextmanager
def temporarily_remove_hooks(model: nn.Module) -> Iterator[None]:
    """Temporarily remove the hooks from all modules of a model."""
    tables = [getattr(module, name) for module in model.modules() for name in HOOK_TABLES]
    kept = [(table, dict(table)) for table in tables if table]
    for table, _ in kept:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in kept:
            added = dict(table)
            table.clear()
            table.update({**hooks, **added})


@contextmanager
def without_sharding_metadata(model: nn.Module) -> Iterator[None]:
    """Temporarily remove the sharding metadata from the modules of a sharded model."""
    parts = [vars(module) for module in model.modules() if PARENT_METADATA_ATTRIBUTE in vars(module)]
    state = get_sharding_metadata(model)
    for attributes in parts:
        del attributes[PARENT_METADATA_ATTRIBUTE]
    try:
        yield
    finally:
        for attributes in parts:
            attributes[PARENT_METADATA_ATTRIBUTE] = state


def _remove_copied_hooks(module_copy: nn.Module, original_module: nn.Module) -> None:
    """Remove the hooks that PEFT copied when it copied a module. The hooks of the original also run for the copy."""
    for table in HOOK_TABLES:
        for key in getattr(original_module, table):
            getattr(module_copy, table).pop(key, None)


def _update_parameter_names(
    metadata: ShardingMetadata,
    name_map: AdapterTensorNameMap,
    adapter_shapes: Mapping[str, tuple[int, ...]],
    wrapper_tensors_by_path: Mapping[str, Mapping[str, Any]],
) -> None:
    """Record the new names of all parameters after adapters were added to the model.

    Args:
        wrapper_tensors_by_path: path of a wrapper -> names of its tensors, with a mark in the place of the wrapped
            module.
    """
    for entry in metadata.entries:
        entry.name = name_map.get_name_with_adapters(entry.name)
    stages = metadata.stages
    if stages is None:
        return
    owners = {path: next((n for n in stages.owner_stages if n.startswith(f"{path}.")), None) for path in name_map.paths}
    stages.rename_tensors(name_map.get_name_with_adapters)
    for name, shape in adapter_shapes.items():
        path = name_map.find_peft_wrapper_path(name)
        owner = owners.get(path or "")
        if owner is not None:
            stages.record_tensor_on_same_stages(name, name_map.get_name_with_adapters(owner), shape)
    stages.state = {
        name: stages.state[name]
        for name in _sort_param_names_with_adapters(
            list(stages.state), name_map, adapter_shapes, wrapper_tensors_by_path
        )
    }


def _sort_param_names_with_adapters(
    param_names: list[str],
    name_map: AdapterTensorNameMap,
    adapter_param_names: Collection[str],
    wrapper_tensors_by_path: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Sort parameter names as in the plain model, with each adapter next to its base layer."""
    of_base: dict[str, list[str]] = {path: [] for path in wrapper_tensors_by_path}
    for name in param_names:
        if name not in adapter_param_names and (path := name_map.find_peft_wrapper_path(name)) in of_base:
            of_base[path].append(name)
    order: dict[str, None] = {}
    for name in param_names:
        path = name_map.find_peft_wrapper_path(name)
        if path is None or path not in wrapper_tensors_by_path:
            order[name] = None
            continue
        for each in wrapper_tensors_by_path[path]:
            order |= dict.fromkeys(of_base[path] if each.endswith(f".{_WrappedModulePlaceholder.MARK}") else [each])
    present = set(param_names)
    return [name for name in order if name in present]


def update_sharding_metadata(model: nn.Module, sharded_model: nn.Module, name_map: AdapterTensorNameMap) -> None:
    """Update the sharding metadata and gradient reduction for added and deleted parameters.

    Rebuilds the gradient reducer of the parameters that only one pipeline stage has.
    """
    state = get_sharding_metadata(sharded_model)
    specs = {id(param): spec for _, param, spec in named_sharded_parameters(sharded_model)}
    params = dict(model.named_parameters()) if model is not sharded_model else {}
    prefix = next((f"{path}." for path, module in model.named_modules() if module is sharded_model and path), "")
    named = {n.removeprefix(prefix): p for n, p in params.items()} | dict(sharded_model.named_parameters())
    present, known = {id(p) for p in named.values()}, state.get_entries_by_param_id()
    state.entries[:] = [entry for entry in state.entries if id(entry.param) in present]
    slots = []
    for name, param in named.items():
        if id(param) in known:
            continue
        spec = specs.get(id(param), ShardSpec(param.shape))
        layout, region = _find_adapter_layout_and_region(sharded_model, state, name_map, name)
        entry = ParamEntry(name, param, spec, get_gradient_reduction(spec, layout, region, state.context.sizes))
        state.entries.append(entry)
        over = entry.reduction.sum_over
        axis = state.context.flatten(*over) if over else Axis("none")
        if axis.size > 1 or entry.reduction.divisor != 1:
            slots.append(GradientSlot(entry, axis, state.coords))
    _rebuild_gradient_reducer(state, slots, present)
    state.attach_to_model(sharded_model)
    if model is not sharded_model:
        model.__dict__[METADATA_ATTRIBUTE] = state
    state.on_adapted(sharded_model)


def _rebuild_gradient_reducer(
    metadata: ShardingMetadata, new_grad_slots: list[GradientSlot], kept_param_ids: set[int]
) -> None:
    reducers: list[Any] = list(metadata.reducers)
    shared = [r for r in reducers if r.gradients and r.gradients[0].entry.reduction.stages]
    own = [r for r in reducers if all(r is not other for other in shared)]
    for reducer in own:
        reducer.remove_grad_hooks()
    gradients = [g for reducer in own for g in reducer.gradients if id(g.param) in kept_param_ids] + new_grad_slots
    size = metadata.request.extra.get("bucket_bytes", BUCKET_BYTES)
    metadata.reducers[:] = (
        [GradientReducer(gradients, size, consistency_monitor=metadata.monitor), *shared] if gradients else shared
    )


def _find_adapter_layout_and_region(
    sharded_model: nn.Module, metadata: ShardingMetadata, name_map: AdapterTensorNameMap, param_name: str
) -> tuple[ActivationLayout, ModelRegion]:
    """Find the activation layout at an adapter's parameter, and the model region that contains it."""
    path = name_map.find_peft_wrapper_path(param_name)
    if path is None:
        return metadata.activations, ModelRegion.OUTSIDE  # a prompt, before the model
    wrapper = sharded_model.get_submodule(path)
    base = get_wrapped_module(wrapper)
    if is_tuner_layer(wrapper) and isinstance(base, ParallelModule) and not isinstance(base, EMBEDDINGS):
        if isinstance(base, Linear1D_Row) and not base.is_inside_adapter:
            # (IA)^3 multiplies the input of the row, inside the block, or its output, like a bias
            if ".ia3_l." in param_name and not wrapper.is_feedforward:
                found: tuple[ActivationLayout, ModelRegion] = metadata.regions.find_region(f"{path}.bias")
                return found
        layout, _ = metadata.regions.find_region(f"{path}.weight")
        return layout, ModelRegion.OUTSIDE if has_full_gradients_on_every_rank(wrapper) else ModelRegion.BLOCK
    region: tuple[ActivationLayout, ModelRegion] = metadata.regions.find_region(f"{path}.weight")
    return region


def remove_adapter_metadata(model: nn.Module, sharded_model: nn.Module, adapter_name: str) -> None:
    """Remove an adapter from the sharding metadata after PEFT has deleted it."""
    state = get_sharding_metadata(sharded_model)
    names: AdapterTensorNameMap = state.adapters
    gone = {name for name in names.own if names.get_adapter_name(name) == adapter_name}
    state.adapters.own -= gone
    if state.stages is not None:
        state.stages.drop_tensors(gone.__contains__)
    update_sharding_metadata(model, sharded_model, state.adapters)


@contextmanager
def update_metadata_after_adapter_removal(sharded_model: nn.Module) -> Iterator[None]:
    """Update the sharding metadata at the end of this context, after PEFT has removed the adapters."""
    wrappers = find_peft_wrappers(sharded_model)
    yield
    state = get_sharding_metadata(sharded_model)
    for path, wrapper in wrappers.items():
        if sharded_model.get_submodule(path) is not wrapper:
            if is_tuner_layer(wrapper):
                restore_parallel_base_layer(wrapper)
            move_hooks(wrapper, sharded_model.get_submodule(path))
    names: AdapterTensorNameMap = state.adapters
    for entry in state.entries:
        entry.name = names.get_name_without_adapters(entry.name)
    if state.stages is not None:
        state.stages.drop_tensors(names.own.__contains__)
        state.stages.rename_tensors(names.get_name_without_adapters)
    state.adapters = None
    update_sharding_metadata(sharded_model, sharded_model, AdapterTensorNameMap())
