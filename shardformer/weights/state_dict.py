"""Load and gather state dicts of a sharded model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.checkpoint.plain_state import load_full_state_dict_into_shards
from shardformer.comm.collective_call import run_and_compare_across_ranks, wait_for_all_ranks
from shardformer.comm.collectives import all_gather_objects, broadcast, gather_full_tensor
from shardformer.errors import ConfigError, suggest_similar_names
from shardformer.layout.shard_spec import ShardSpec
from shardformer.layout.sharding_metadata import ShardingMetadata, get_sharded_module_and_prefix, get_sharding_metadata
from shardformer.pipeline.stage_manager import PipelineStages
from shardformer.torch_compat import IncompatibleKeys


def load_state_dict(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
    """Load a state dict that contains either full tensors or the local shards of this rank.

    Communicates nothing, except under ZeRO stage 3, where all ranks must call it with full tensors. Raises ConfigError
    for the state dict of another model. The model is then unchanged.
    """
    state = get_sharding_metadata(model)
    _check_assign_is_false(assign)
    if state.parameter_owner is not None:
        return _load_stage3_state_dict(model, state, state_dict, strict=strict)
    here = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    firsts = _map_names_to_first_tied_name(model, state)
    elsewhere = set(firsts) - set(here)
    state_dict = _add_tied_weights_under_local_names(state_dict, here, firsts)
    _check_values_are_dense_tensors(
        {name: value for name, value in state_dict.items() if name in here or name in elsewhere}
    )
    own = {name: value for name, value in state_dict.items() if name not in elsewhere}
    entries = state.get_entries_by_param_id()
    specs = {n: entries[id(t)].spec if id(t) in entries else ShardSpec(t.shape) for n, t in here.items()}
    is_full = {n: _is_full_tensor(n, own[n], t, specs[n]) for n, t in here.items() if isinstance(own.get(n), Tensor)}
    sharded = {name: full for name, full in is_full.items() if full is not None}
    if len(set(sharded.values())) > 1:
        full_name, shard_name = (next(name for name, full in sharded.items() if full is kind) for kind in (True, False))
        raise ConfigError(
            f"The state dict contains the full tensor {full_name}, but only a shard of {shard_name}.",
            remedy="Pass the result of full_state_dict(model), or the state dict of the unsharded model.",
        )
    _check_state_dict_keys(type(model).__name__, own, here, state_dict, strict=strict)
    local = {n: specs[n].slice_full_tensor(v, state.coords) if sharded.get(n) else v for n, v in own.items()}
    return type(model).load_state_dict(model, local, strict=strict)


def _map_names_to_first_tied_name(model: nn.Module, metadata: ShardingMetadata) -> dict[str, str]:
    return (
        {} if metadata.stages is None else metadata.stages.get_canonical_names(get_sharded_module_and_prefix(model)[1])
    )


def _add_tied_weights_under_local_names(
    state_dict: Mapping[str, Any], local_state: Mapping[str, Tensor], first_names: Mapping[str, str]
) -> Mapping[str, Any]:
    """Add tied weights to a state dict under the names that this pipeline stage uses for them."""
    values = {first_names[name]: value for name, value in state_dict.items() if name in first_names}
    tied = {
        name: first for name in local_state if name not in state_dict and (first := first_names.get(name)) in values
    }
    return {**state_dict, **{name: values[first] for name, first in tied.items()}}


def _load_stage3_state_dict(
    model: nn.Module, metadata: ShardingMetadata, state_dict: Mapping[str, Any], *, strict: bool
) -> IncompatibleKeys:
    """Load full tensors into parameters that ZeRO stage 3 has sharded."""
    shapes = {entry.name: entry.spec.shape for entry in metadata.entries}
    here = {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
    firsts = _map_names_to_first_tied_name(model, metadata)
    state_dict = _add_tied_weights_under_local_names(state_dict, here, firsts)

    def check_arguments() -> None:
        elsewhere = set(firsts) - set(here)
        own = {name: value for name, value in state_dict.items() if name not in elsewhere}
        _check_values_are_dense_tensors({name: value for name, value in own.items() if name in here})
        _check_state_dict_keys(type(model).__name__, own, here, state_dict, strict=strict)
        for name, value in own.items():
            if name in shapes and tuple(value.shape) != shapes[name]:
                raise ConfigError(
                    f"ZeRO stage 3 requires full tensors in the state dict, but {name} has shape {tuple(value.shape)} "
                    f"instead of {shapes[name]}.",
                    remedy="Pass the result of full_state_dict(model), or the state dict of the unsharded model.",
                )

    run_and_compare_across_ranks(metadata.context, check_arguments, action_description="load a state dict")
    return IncompatibleKeys(*load_full_state_dict_into_shards(model, state_dict))


def _check_assign_is_false(assign: bool) -> None:
    if assign:
        raise ConfigError(
            "load_state_dict(assign=True) is not supported on a sharded model.",
            remedy="Remove assign=True, so that the values are copied into the parameters.",
        )


def _check_values_are_dense_tensors(state_dict: Mapping[str, Any]) -> None:
    for name, value in state_dict.items():
        if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided:
            is_tensor = isinstance(value, Tensor)
            kind = ("meta tensor" if value.is_meta else "sparse tensor") if is_tensor else type(value).__name__
            raise ConfigError(
                f"{name} in the state dict must be a dense tensor, but got a {kind}.",
                remedy="Convert the value, for example with tensor.to_dense() or torch.from_numpy().",
            )


def _is_full_tensor(tensor_name: str, tensor: Tensor, local_tensor: Tensor, spec: ShardSpec) -> bool | None:
    """Return whether a tensor in a state dict is full (True) or a shard (False), or None if it may be either."""
    if tensor.shape == local_tensor.shape:
        return None if spec.shape == tuple(local_tensor.shape) else False
    if tuple(tensor.shape) == spec.shape:
        return True
    raise ConfigError(
        f"The state dict has {tensor_name} with shape {tuple(tensor.shape)}, but the model expects {spec.shape}.",
        remedy="Create the model with the config that the state dict was saved with.",
    )


def _check_state_dict_keys(
    model_name: str,
    passed_state: Mapping[str, Any],
    local_state: Mapping[str, Tensor],
    full_state: Mapping[str, Any],
    *,
    strict: bool,
) -> None:
    missing = [name for name in local_state if name not in passed_state]
    more = [name for name in passed_state if name not in local_state]
    if not strict or not (missing or more):
        return
    name, problem = (missing or more)[0], "missing" if missing else "unexpected"
    suggestion = suggest_similar_names(name, full_state if missing else local_state)
    raise ConfigError(
        f"The state dict does not match {model_name}: the key {name} is {problem}.",
        remedy=f"{suggestion} Use strict=False to ignore missing and unexpected keys.",
    )


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Gather the full state dict of a sharded model on the CPU of every rank.

    The state dict has the parameters and buffers of the unsharded model.

    ``model`` is the sharded model, or a PEFT wrapper around it, whose adapters are included.

    All ranks of the tensor and pipe axes call it; under ZeRO stage 3 all ranks. At most one full tensor, or one layer,
    is on the device at a time. Communicates one all-gather per sharded parameter and axis that shards it, and with a
    pipeline one broadcast per tensor.
    """
    return gather_state_dict(model, lambda name: True)


def gather_state_dict(model: nn.Module, name_filter: Callable[[str], bool]) -> dict[str, Tensor]:
    """Gather the full values of selected tensors of a sharded model. All ranks must select the same names."""
    state = get_sharding_metadata(model)
    axes = [state.context.tensor, state.context.pipe, *([state.context.data] if state.parameter_owner else [])]
    wait_for_all_ranks("full_state_dict", *axes)
    entries = state.get_entries_by_param_id()
    gathered: dict[int, Tensor] = {}
    out = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or not name_filter(name):
            continue
        if id(value) not in gathered:
            entry = entries.get(id(value))
            if state.parameter_owner is not None and entry is not None:
                state.parameter_owner.gather_group_of_param(value)
            full = value.detach().clone() if entry is None else gather_full_tensor(value, entry.spec, state.get_axis)
            gathered[id(value)] = full.cpu()
        out[name] = gathered[id(value)]
    if state.parameter_owner is not None:
        state.parameter_owner.free_gathered_params()
    if state.stages is None or state.context.pipe.size == 1:
        return out
    _, prefix = get_sharded_module_and_prefix(model)
    inside = {name.removeprefix(prefix): x for name, x in out.items() if name.startswith(prefix)}
    joined = _broadcast_state_dicts_from_stages(inside, state.stages, state, lambda name: name_filter(prefix + name))
    outside = {name: x for name, x in out.items() if not name.startswith(prefix)}
    return {prefix + name: x for name, x in joined.items()} | outside


def _broadcast_state_dicts_from_stages(
    local_state: dict[str, Tensor],
    pipeline_stages: PipelineStages,
    metadata: ShardingMetadata,
    is_selected: Callable[[str], bool],
) -> dict[str, Tensor]:
    """Broadcast the state dicts of all pipeline stages, and return the state dict of the full model.

    The names are in the order of the unsharded model. Tied names share one tensor.
    """
    pipe, device = metadata.context.pipe, metadata.context.device
    full: dict[str, Tensor] = {}
    dtypes = all_gather_objects({name: t.dtype for name, t in local_state.items()}, pipe)
    selected = {name: found for name, found in pipeline_stages.state.items() if is_selected(name)}
    for name, (first, shape) in selected.items():
        if first not in full:
            source = pipeline_stages.find_owner_ranks(name)[0]
            here = local_state[name] if source == pipe.rank else torch.empty(shape, dtype=dtypes[source][name])
            full[first] = broadcast(here.to(device).contiguous(), pipe, source).cpu()
    return {name: full[first] for name, (first, _) in selected.items()}
