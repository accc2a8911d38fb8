"""Check that a model can be sharded, and restore the model if sharding fails."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardformer.config import ShardConfig
from shardformer.errors import ConfigError, LaunchError, PolicyError, ShardFormerError
from shardformer.kernels.attention_registration import check_flash_attention_is_supported
from shardformer.kernels.fused_ops import is_elementwise, make_fused_norm
from shardformer.layout.packed_weights import find_quantized_weights, has_quantization_config, is_4bit_linear
from shardformer.layout.shard_spec import Coords, ShardSpec
from shardformer.layout.sharding_metadata import (
    METADATA_ATTRIBUTE,
    PARENT_METADATA_ATTRIBUTE,
    OverlapGroup,
    find_view_and_parameter_names,
    named_sharded_parameters,
)
from shardformer.mesh.init_distributed import ENDED
from shardformer.mesh.parallel_context import ParallelContext, get_launcher_store
from shardformer.mesh.rank_failures import LostPeerError
from shardformer.meta_init.lazy_init import check_meta_tensors_can_be_computed, record_changes_if_lazy
from shardformer.module_paths import LIBRARIES, find_model_configs, get_parent_and_attribute_name
from shardformer.pipeline.stage_manager import PipelineStages
from shardformer.policies import legacy
from shardformer.policies.policy import Policy
from shardformer.sharding.apply_context_parallel import check_context_parallel_support
from shardformer.sharding.plan import ShardingPlan, make_sharding_plan
from shardformer.tensor_parallel.layers import Linear1D_Col, Linear1D_Row
from shardformer.tensor_parallel.parallel_module import ParallelModule
from shardformer.torch_compat import Store, get_tensor_hooks, has_meta_tensors, is_dtensor

ANNOUNCEMENTS = "shardformer/announcement"
FIRST_PAUSE_S, LAST_PAUSE_S = 0.002, 0.25
OTHER_PROCESSES_TIMEOUT_S = 10.0
"""How long to wait for processes outside the passed group, which may not shard any model."""


def create_checked_context(config: ShardConfig) -> ParallelContext:
    """Resolve the parallel context, and check that all processes passed the same process groups.

    No collective is possible before this check. Each process announces its group in the launcher's store and reads the
    announcements of all other processes.

    Raises:
        LaunchError: on every process that calls this function. Either a process is not in the group that it passed, or
            a member of the group does not arrive, or a member ended with an error.
        ConfigError: if two members passed different groups.
    """
    context, problem = None, None
    try:
        context = config.resolve_context()
    except ShardFormerError as error:
        problem = error
    store = get_launcher_store() if context is None or context.world is None else context.world.store
    if store is not None:
        ranks = list(context.tensor.ranks) if context is not None else []
        kind = "the grid of launch_from_torch" if config.context is not None else "the process group"
        announcement = _ProcessGroupReport(ranks, f"{kind} {ranks}", str(problem or ""))
        rank, key = dist.get_rank(), f"{ANNOUNCEMENTS}/{dist.get_rank()}"
        store.set(f"{key}/{store.add(key, 1)}", json.dumps(astuple(announcement)))
        deadline = time.monotonic() + OTHER_PROCESSES_TIMEOUT_S
        # read all announcements before raising, so that a later call does not read those of this call
        others = [other for other in range(dist.get_world_size()) if other != rank]
        problems = [_find_peer_process_group_error(store, other, announcement, deadline) for other in others]
        problem = problem or next((problem for problem in problems if problem is not None), None)
    if problem is not None:
        raise problem
    assert context is not None
    return context


@dataclass(frozen=True)
class _ProcessGroupReport:
    """A message in which a process announces its process group, or why it cannot shard the model."""

    ranks: list[int]
    group_description: str
    problem: str


def _find_peer_process_group_error(
    store: Store, peer_rank: int, local_announcement: _ProcessGroupReport, deadline: float
) -> ShardFormerError | None:
    """Return an error if another process passed a different process group or cannot shard the model.

    Waits for members of this process's group until the timeout of the store, for other processes until ``deadline``.
    Skips announcements of groups without this process. Keeps an announcement that belongs to a later call.
    """
    me, is_member = dist.get_rank(), peer_rank in local_announcement.ranks
    place = f"{ANNOUNCEMENTS}/{me}/of/{peer_rank}"
    while True:
        key = f"{ANNOUNCEMENTS}/{peer_rank}/{store.add(place, 0) + 1}"
        has_arrived, why = _wait_for_key_or_peer_exit(store, key, None if is_member else deadline, peer_rank)
        if not has_arrived:
            if is_member and why:
                return LaunchError(
                    f"Process {peer_rank} ended before it reached shard_model: {why}.",
                    remedy=f"Fix the error of process {peer_rank}.",
                )
            problem = (
                f"Process {peer_rank} did not reach shard_model for {local_announcement.group_description}, but "
                f"process {me} did"
            )
            return LostPeerError(problem, remedy=SAME_GROUP) if is_member else None
        announced = _ProcessGroupReport(*json.loads(store.get(key)))
        is_about_us = me in announced.ranks
        if is_about_us and not is_member and not local_announcement.problem:
            return None
        store.add(place, 1)
        if local_announcement.problem:
            return None  # one announcement answers another, and this process already has a problem
        if announced.problem:
            return LaunchError(
                f"Process {peer_rank} cannot shard the model: {announced.problem}.",
                remedy=f"Fix the error of process {peer_rank}.",
            )
        if is_about_us and announced != local_announcement:
            problem = (
                f"Process {me} shards the model over {local_announcement.group_description}, but process {peer_rank} "
                f"of this group shards it over {announced.group_description}"
            )
            return ConfigError(problem, remedy=SAME_GROUP)
        if is_about_us or not is_member:
            return None


SAME_GROUP = "Pass the same process group, with the ranks in the same order, on all ranks of the group"


def _wait_for_key_or_peer_exit(store: Any, store_key: str, deadline: float | None, peer_rank: int) -> tuple[bool, str]:
    """Wait until another process sets a key of the store, and return whether it did.

    Also returns why that process ended, or "". Waits until the deadline, or for the store's timeout. Polls, because
    ``store.wait`` does not notice a process that ended, and logs a warning for each interrupted wait.
    """
    end = time.monotonic() + store.timeout.total_seconds() if deadline is None else deadline
    pause_s = FIRST_PAUSE_S
    with suppress(RuntimeError):  # raised if the process that hosts the store has ended
        while not store.check([store_key]):
            why = store.get(f"{ENDED}/{peer_rank}").decode() if store.check([f"{ENDED}/{peer_rank}"]) else ""
            if why or time.monotonic() >= end:
                return bool(store.check([store_key])), why
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        return True, ""
    return False, ""


def check_not_sharded(model: nn.Module) -> None:
    """Raise ConfigError if the model or any of its modules is already sharded."""
    named = () if METADATA_ATTRIBUTE in vars(model) else model.named_modules()
    if path := next((path for path, module in named if METADATA_ATTRIBUTE in vars(module)), None):
        raise ConfigError(
            f"The submodule {path} of {type(model).__name__} is already sharded.",
            remedy="Shard only the whole model: build the model again, and do not shard its submodules.",
        )
    marks = {METADATA_ATTRIBUTE, PARENT_METADATA_ATTRIBUTE}
    if any([isinstance(m, ParallelModule) or not marks.isdisjoint(vars(m)) for m in model.modules()]):
        raise ConfigError(
            f"The {type(model).__name__} is already sharded.",
            remedy="Use the sharded model that the first call returned, or build the model again.",
        )


def check_no_dtensors(model: nn.Module) -> None:
    """Raise ConfigError if torch or transformers has already sharded the model."""
    if found := next((name for name, p in model.named_parameters() if is_dtensor(p)), None):
        raise ConfigError(
            f"The parameter {found} of {type(model).__name__} is a DTensor, so the model is already sharded.",
            remedy="Load the model without distributed_config, fully_shard and parallelize_module, and set the layout "
            "in ParallelConfig.",
        )


def check_can_be_sharded(model: nn.Module) -> None:
    """Raise ConfigError if the model is already sharded or was created under ``torch.inference_mode``."""
    check_not_sharded(model)
    check_no_dtensors(model)
    if made := next(iter([name for name, p in model.named_parameters() if p.is_inference()]), None):
        raise ConfigError(
            f"The parameter {made} of {type(model).__name__} was created under torch.inference_mode() and cannot be "
            "trained.",
            remedy="Build or load the model outside torch.inference_mode().",
        )
    if has_meta_tensors(model):
        check_meta_tensors_can_be_computed(model)


def make_checked_sharding_plan(
    model: nn.Module, policy: Policy, config: ShardConfig, *, apply_sharding_rules: bool = True
) -> ShardingPlan:
    """Check that a model supports the config, and return the policy's sharding plan for the model.

    The model is unchanged, except by the policy's ``preprocess``.

    Args:
        apply_sharding_rules: whether weights are sharded (see ``make_sharding_plan``).

    Raises:
        PolicyError: see ``make_sharding_plan``.
        ConfigError: if the model does not support an option.
    """
    policy.set_model(model)
    policy.set_shard_config(config)
    if config.enable_sequence_parallelism and not policy.stacks():
        raise ConfigError(
            f"enable_sequence_parallelism=True requires a LayerStack, but {type(policy).__name__} has none.",
            remedy="Write a RolePolicy with a LayerStack, or set enable_sequence_parallelism=False.",
        )
    if config.has_context_parallel:
        check_context_parallel_support(
            model, policy.stacks(), config.resolve_context(), config.context_parallel, policy.notes
        )
    if config.enable_flash_attention:
        check_flash_attention_is_supported(model, config.resolve_context().device)
    if config.enable_fused_normalization:
        check_can_fuse_norms(model)
    if config.enable_jit_fused:
        check_can_fuse_activations(model, config.resolve_context().device)
    with record_changes_if_lazy(model) if has_meta_tensors(model) else nullcontext():
        model = policy.preprocess() or model
    policy.set_model(model)
    if policy.replaces_class_or_ties_params:
        legacy.check_legacy_policy(policy, model)
    return make_sharding_plan(model, policy, apply_sharding_rules=apply_sharding_rules)


def check_layout_supports_quantized_weights(model: nn.Module, plan: ShardingPlan, context: ParallelContext) -> None:
    """Raise ConfigError if the parallel layout does not support the model's quantized weights."""
    packed = find_quantized_weights(model)
    owners = {name.rpartition(".")[0]: param for name, param in packed.items()}
    for path, param in owners.items():
        if getattr(getattr(param, "quant_state", None), "packing_format_for_cpu", False):
            raise ConfigError(
                f"bitsandbytes converted the 4-bit weight of {path} for inference on the CPU, so it cannot be sharded.",
                remedy="Load the model again, and shard it before you evaluate it.",
            )
        if context.sequence.size > 1 and getattr(param, "quant_state", None) is None:
            raise _make_quantized_layer_error(model, path, f"sequence={context.sequence.size}")
    for path, replacement in plan.replacements.items():
        module, target = model.get_submodule(path), replacement.target_module
        is_parallel = isinstance(target, type) and issubclass(target, (Linear1D_Col, Linear1D_Row))
        if path in owners and not (is_parallel and is_4bit_linear(module)):
            raise _make_quantized_layer_error(model, path, f"tensor={context.tensor.size}")
    if found := next((path for path in plan.parameters if path in packed), None):
        raise _make_quantized_layer_error(model, found.rpartition(".")[0], f"tensor={context.tensor.size}")


def check_no_integer_weights_to_shard(model: nn.Module, axis_sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if GPTQ, AWQ or other layers with integer weights would be sharded."""
    axis = next((name for name in ("tensor", "sequence") if axis_sizes.get(name, 1) > 1), None)
    if axis is None or not has_quantization_config(model):
        return
    for path, module in model.named_modules():
        is_own = not has_library_forward(module) or type(module).__module__.startswith("transformers.integrations.")
        if is_own and any(
            not (x.is_floating_point() or x.dtype == torch.bool) for x in module._buffers.values() if x is not None
        ):
            raise _make_quantized_layer_error(model, path, f"{axis}={axis_sizes[axis]}")


def _make_quantized_layer_error(model: nn.Module, module_path: str, unsupported_layout: str) -> ConfigError:
    kind = type(model.get_submodule(module_path)).__name__
    return ConfigError(
        f"The layer {module_path} is a quantized {kind}, which does not support {unsupported_layout}.",
        remedy="Load the model with BitsAndBytesConfig(load_in_4bit=True), whose layers support all layouts, or use "
        "only data and pipeline parallelism.",
    )


def check_no_hooks_on_sharded_params(model: nn.Module, plan: ShardingPlan) -> None:
    """Raise ConfigError if a parameter that will be sharded has hooks, because sharding would remove them."""
    sharded = plan.get_sharded_param_names_by_id()
    for p in model.parameters():
        if id(p) in sharded and get_tensor_hooks(p):
            name = sharded[id(p)]
            raise ConfigError(
                f"The parameter {name!r} of {type(model).__name__} has a hook, which would receive only the gradient "
                "of a shard.",
                remedy="Remove the hook, or register it after sharding if it can process the gradient of a shard.",
            )


def check_no_views_of_replaced_params(model: nn.Module, plan: ShardingPlan, stages: PipelineStages | None) -> None:
    """Raise ConfigError if a buffer or attribute is a view of a parameter that will be sharded or moved."""
    sharded = plan.get_sharded_param_names_by_id()
    is_here = stages.is_stored_locally if stages is not None else lambda _: True
    moved = [(name, p) for name, p in model.named_parameters() if id(p) in sharded or not is_here(name)]
    if found := find_view_and_parameter_names(model, moved):
        view, name = found
        raise ConfigError(
            f"{view} of {type(model).__name__} is a view of the parameter {name}, but sharding replaces or moves "
            "this parameter.",
            remedy=f"Use {name} directly, or give {view} its own memory with .clone().",
        )


def find_externally_referenced_param_ids(model: nn.Module) -> set[int]:
    """Find the ids of parameters that are referenced outside the model, for example by an optimizer.

    Compares their reference counts with the count of a parameter to which only its module refers.
    """
    alone = nn.Module()
    alone.only = nn.Parameter(torch.empty(0))
    ((_, by_counting),) = _get_param_ids_and_refcounts(alone)
    times = Counter([id(p) for m in model.modules() for p in m._parameters.values() if p is not None])
    return {key for key, count in _get_param_ids_and_refcounts(model) if count - (by_counting - 1) > times[key]}


def _get_param_ids_and_refcounts(model: nn.Module) -> list[tuple[int, int]]:
    counts: list[tuple[int, int]] = []
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None:
                counts.append((id(p), sys.getrefcount(p)))
    return counts


def check_no_existing_optimizer(
    model: nn.Module, plan: ShardingPlan, stages: PipelineStages | None, referenced_param_ids: Collection[int]
) -> None:
    """Raise ConfigError if an optimizer already contains a parameter that sharding will replace.

    Args:
        referenced_param_ids: result of ``find_externally_referenced_param_ids`` before planning. The slow search
            through all objects of the process runs only if it contains a parameter to shard.
    """
    sharded = plan.get_sharded_param_names_by_id()
    if stages is not None:
        sharded |= {id(p): name for name, p in model.named_parameters() if not stages.is_stored_locally(name)}
    if not sharded.keys() & referenced_param_ids:
        return
    check_params_not_in_optimizer([p for p in model.parameters() if id(p) in sharded], sharded, type(model).__name__)


def check_params_not_in_optimizer(
    params: list[nn.Parameter], name_by_param_id: Mapping[int, str], model_name: str
) -> None:
    """Raise ConfigError if any optimizer of the process contains one of these parameters."""
    # gc.get_objects() would expose tuples that other threads are still building, which makes those threads fail
    lists = [x for x in gc.get_referrers(*params) if type(x) is list and x is not params]
    for group in gc.get_referrers(*lists):
        if type(group) is dict and "lr" in group and isinstance(group.get("params"), list):
            name = next((name_by_param_id[id(p)] for p in group["params"] if id(p) in name_by_param_id), None)
            if name is not None:
                raise ConfigError(
                    f"An optimizer already contains the parameter {name!r} of {model_name}, but sharding replaces "
                    "this parameter.",
                    remedy="Shard the model first, then create the optimizer from model.parameters().",
                )


def check_saved_buffers_keep_full_shape(module_path: str, original_module: nn.Module, new_module: nn.Module) -> None:
    """Raise PolicyError if the replacement of a module shards a buffer that is saved in the state dict."""
    local = dict(new_module.named_buffers())
    for name, full in original_module.named_buffers():
        if name not in local or local[name].shape == full.shape:
            continue
        owner, attribute = get_parent_and_attribute_name(new_module, name)
        if attribute not in owner._non_persistent_buffers_set:
            shapes = f"{tuple(local[name].shape)} instead of {tuple(full.shape)}"
            raise PolicyError(
                f"{type(new_module).__name__}, which replaces {module_path}, registers the buffer {name!r} with shape "
                f"{shapes}, so state dicts would contain only a part of it.",
                remedy="Register the full buffer and select the local values in `forward`, or pass persistent=False "
                "to register_buffer.",
            )


def check_shard_layouts(model: nn.Module, coords: Coords) -> None:
    """Raise PolicyError if a local shard has the wrong shape, or if tied weights are sharded differently."""
    seen: dict[int, tuple[str, ShardSpec]] = {}
    for name, param, spec in named_sharded_parameters(model):
        other, first = seen.setdefault(id(param), (name, spec))
        shape, expected = tuple(param.shape), spec.get_local_shape(coords)
        if first != spec or shape != expected:
            tied = f", and it is tied to {other}" if other != name else ""
            raise PolicyError(
                f"The parameter {name} has shape {shape} on this rank, but its layout requires {expected}{tied}.",
                remedy="If the weight is tied, replace both of its modules with vocabulary-parallel layers, or "
                "replicate both.",
            )


@contextmanager
def restore_model_on_error(model: nn.Module) -> Iterator[None]:
    """Restore the model's modules, parameters, hooks, attributes and configs if the ``with`` block raises.

    Parameter values that functions of a policy overwrite in place are not restored.
    """
    params = [(p, p.requires_grad, dict(vars(p)), list(map(set, _get_grad_hook_dicts(p)))) for p in model.parameters()]
    modules = list(model.modules())
    before = [(m, type(m), dict(vars(m)), _copy_private_dicts(vars(m))) for m in modules]
    settings = [(c, dict(vars(c))) for c in find_model_configs(model)]
    try:
        yield
    except BaseException:
        for m, kind, attributes, tables in before:
            m.__class__ = kind
            _replace_all_dict_entries(vars(m), attributes)
            for name, entries in tables.items():
                _replace_all_dict_entries(vars(m)[name], entries)
        for c, attributes in settings:
            _replace_all_dict_entries(vars(c), attributes)
        for p, trains, attributes, hooks in params:
            if p.requires_grad != trains:
                p.requires_grad_(trains)
            _replace_all_dict_entries(vars(p), attributes)
            for table, own in zip(_get_grad_hook_dicts(p), hooks, strict=True):
                for key in table.keys() - own:
                    del table[key]
        raise


def _get_grad_hook_dicts(param: nn.Parameter) -> list[dict[int, Any]]:
    return [param._backward_hooks or {}, getattr(param, "_post_accumulate_grad_hooks", None) or {}]


def _copy_private_dicts(instance_dict: dict[str, Any]) -> dict[str, Any]:
    return {n: v.copy() for n, v in instance_dict.items() if n.startswith("_") and isinstance(v, dict | set)}


def _replace_all_dict_entries(target_dict: dict[Any, Any], new_entries: Mapping[Any, Any]) -> None:
    target_dict.clear()
    target_dict.update(new_entries)


TIE_REMEDY = "Tie the weights with module.weight = other.weight instead of .data, or clone one of the two."


def check_tied_weights_on_same_stage(
    tied_param_groups: Sequence[OverlapGroup], get_owner_ranks_fn: Callable[[str], Sequence[int]]
) -> None:
    """Raise ConfigError if parameters that share memory are on different pipeline stages."""
    for group in tied_param_groups:
        if len({tuple(get_owner_ranks_fn(name)) for name in group}) > 1:
            first, second, *_ = group
            raise ConfigError(
                f"The parameters {first} and {second} share memory, but are on different pipeline stages.",
                remedy=TIE_REMEDY,
            )


def restore_tied_weights(
    model: nn.Module, tied_groups: Sequence[OverlapGroup], spec_by_shard_id: Mapping[int, ShardSpec]
) -> None:
    """Make the shards of tied weights share memory again after sharding.

    Args:
        model: the sharded model.
        tied_groups: groups of names of parameters that shared memory before sharding.
        spec_by_shard_id: id(shard) -> its layout.

    Raises ConfigError if the parameters of a group are sharded in different ways.
    """
    present = dict(model.named_parameters(remove_duplicate=False))
    for group in tied_groups:
        parts = {name: present[name] for name in group if name in present}
        if not any(id(part) in spec_by_shard_id for part in parts.values()):
            continue  # replicated, or on another stage
        if len({(str(spec_by_shard_id.get(id(part))), group[name]) for name, part in parts.items()}) > 1:
            name, tied, *_ = group
            raise ConfigError(
                f"The parameters {name} and {tied} share memory, but are sharded in different ways.", remedy=TIE_REMEDY
            )
        first, *others = parts.values()
        for other in others:
            other.data = first.data


# class names: WRITTEN_OUT use several operations where torch has one kernel; the other activations use one kernel
WRITTEN_OUT = ("NewGELUActivation", "AccurateGELUActivation", "FastGELUActivation", "BloomGelu")
ACTIVATIONS = (*WRITTEN_OUT, "GELU", "GELUActivation", "GELUTanh", "PytorchGELUTanh", "SiLU", "SiLUActivation", "ReLU")


def check_can_fuse_activations(model: nn.Module, device: torch.device) -> None:
    """Raise ConfigError if ``enable_jit_fused`` cannot be used for the model or on this device."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "enable_jit_fused=True requires triton on a GPU, but triton is not installed.",
            remedy="Install triton, or set enable_jit_fused=False.",
        )
    if not any(type(module).__name__ in ACTIVATIONS for module in model.modules()):
        raise ConfigError(
            f"enable_jit_fused=True has no effect, because {type(model).__name__} has no GELU, SiLU or ReLU module.",
            remedy="Set enable_jit_fused=False.",
        )


def check_can_fuse_norms(model: nn.Module) -> None:
    """Raise ConfigError if ``enable_fused_normalization`` supports none of the norms in the model."""
    problem: ConfigError | None = None
    for _, norm in named_norm_modules(model):
        try:
            make_fused_norm(norm)
            return
        except ConfigError as error:
            problem = problem or error
    raise problem or ConfigError(
        f"enable_fused_normalization=True has no effect, because {type(model).__name__} has no norm.",
        remedy="Set enable_fused_normalization=False.",
    )


def named_norm_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if "norm" in type(module).__name__.lower() and not module._modules:
            yield path, module


def has_library_forward(module: nn.Module) -> bool:
    """Return whether the ``forward`` method of a module comes from a library and was not replaced."""
    of_class: Any = inspect.unwrap(type(module).forward)
    return "forward" not in vars(module) and _get_top_level_package(of_class) in LIBRARIES


def _get_top_level_package(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__module__", "")).partition(".")[0]


def iter_user_code_modules(model: nn.Module, layer_list_paths: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in these layers that run user-written code, other than element-wise functions."""
    for stack in layer_list_paths:
        for path, module in model.get_submodule(stack).named_modules(prefix=stack):
            if not has_library_forward(module) and (module._modules or not is_elementwise(module)):
                yield path, module


def has_user_code_layers(model: nn.Module, policy: Policy) -> bool:
    """Return whether any layer runs user-written code, other than element-wise functions."""
    own = copy.copy(policy)
    own.set_model(model)
    return any(True for _ in iter_user_code_modules(model, [stack.layers for stack in own.stacks()]))
