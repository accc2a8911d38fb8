"""``load_state_dict`` of a sharded model: full tensors are cut, a rank's own parts go in as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collective_call import come
from shardformer.comm.collectives import all_gather_objects, broadcast, gather_full
from shardformer.errors import ConfigError, did_you_mean
from shardformer.layout.shard_spec import ShardSpec
from shardformer.layout.sharding_metadata import ShardingMetadata, metadata_of
from shardformer.pipeline.stage_manager import Stages


def install_loading(model: nn.Module) -> None:
    """Lets the model load the plain model's state dict, too."""
    model.__dict__["load_state_dict"] = _load_state_dict.__get__(model)


def _load_state_dict(self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
    """As of the plain model: of its state dict each rank takes its parts. What this rank saved goes in as it is.

    Communicates nothing. Raises ConfigError, with the model as it was, for what is of another model.
    """
    state = metadata_of(self)
    _check_load_arguments(state, assign)
    here = {name: t for name, t in self.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    elsewhere = set() if state.stages is None else set(state.stages.state) - set(here)
    _check_values({name: value for name, value in state_dict.items() if name in here or name in elsewhere})
    given = {name: value for name, value in state_dict.items() if name not in elsewhere}
    entries = state.by_param()
    specs = {n: entries[id(t)].spec if id(t) in entries else ShardSpec(t.shape) for n, t in here.items()}
    is_full = {n: _is_full(n, given[n], t, specs[n]) for n, t in here.items() if isinstance(given.get(n), Tensor)}
    cut = {name: full for name, full in is_full.items() if full is not None}
    if len(set(cut.values())) > 1:
        a, b = (next(name for name, full in cut.items() if full is kind) for kind in (True, False))
        raise ConfigError(
            f"The state dict has all of {a}, and a part of {b}",
            remedy="Give shardformer.full_state_dict(model), or a checkpoint of the plain model",
        )
    _check_names(type(self).__name__, given, here, state_dict, strict=strict)
    local = {n: specs[n].slice(v, state.coords) if cut.get(n) else v for n, v in given.items()}
    return type(self).load_state_dict(self, local, strict=strict)


def _check_load_arguments(state: ShardingMetadata, assign: bool) -> None:
    if assign:
        raise ConfigError(
            "load_state_dict(assign=True) of a sharded model",
            rule="It puts other tensors in the place of the parameters, whose gradients are agreed on between ranks",
            remedy="Leave assign out: the values are copied",
        )
    if state.parameter_owner is not None:
        raise ConfigError(
            "load_state_dict of a model whose parameters stage 3 of ZeRO keeps",
            remedy="Load before shard_optimizer(...) is called, or use load_checkpoint(model, folder, optimizer)",
        )


def _check_values(state_dict: Mapping[str, Any]) -> None:
    """Before anything is copied: torch would load all that it can, and raise then."""
    for name, value in state_dict.items():
        if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided:
            is_tensor = isinstance(value, Tensor)
            what = ("meta tensor" if value.is_meta else "sparse tensor") if is_tensor else type(value).__name__
            raise ConfigError(
                f"{name} is a {what} in the state dict",
                remedy="Load what state_dict() of a model gave (torch.from_numpy, tensor.to_dense() make such tensors)",
            )


def _is_full(name: str, value: Tensor, own: Tensor, spec: ShardSpec) -> bool | None:
    """Whether it is the plain model's tensor; None where that is the same as this rank's."""
    if value.shape == own.shape:
        return None if spec.shape == tuple(own.shape) else False
    if tuple(value.shape) == spec.shape:
        return True
    raise ConfigError(
        f"{name} has the shape {tuple(value.shape)} in the state dict, and {spec.shape} in this model",
        remedy="Build the model from the config of the one that was saved",
    )


def _check_names(
    kind: str, given: Mapping[str, Any], here: Mapping[str, Tensor], whole: Mapping[str, Any], *, strict: bool
) -> None:
    missing = [name for name in here if name not in given]
    more = [name for name in given if name not in here]
    if not strict or not (missing or more):
        return
    name = (missing or more)[0]
    raise ConfigError(
        f"The state dict has no {name}, which this {kind} has" if missing else f"This {kind} has no {name}",
        remedy=f"{did_you_mean(name, whole if missing else here)} With strict=False, what is not in both is left alone",
    )


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The plain model's state dict: every parameter and buffer whole, on the CPU, on every rank.

    All ranks of the tensor and pipe axes call it, and under stage 3 of ZeRO all ranks. One full tensor at a time is on
    the device, or one layer. Communicates one all-gather a sharded parameter over each axis that it is cut over, and
    over pipe one broadcast of each tensor.
    """
    state = metadata_of(model)
    axes = [state.context.tensor, state.context.pipe, *([state.context.data] if state.parameter_owner else [])]
    come("full_state_dict", *axes)
    entries = state.by_param()
    known: dict[int, Tensor] = {}
    out = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue
        if id(value) not in known:
            entry = entries.get(id(value))
            if state.parameter_owner is not None and entry is not None:
                state.parameter_owner.gather(value)
            whole = value.detach() if entry is None else gather_full(value, entry.spec, state.axis)
            known[id(value)] = whole.cpu()
        out[name] = known[id(value)]
    if state.parameter_owner is not None:
        state.parameter_owner.release()
    if state.stages is None or state.context.pipe.size == 1:
        return out
    return _broadcast_from_stages(out, state.stages, state)


def _broadcast_from_stages(own: dict[str, Tensor], stages: Stages, state: ShardingMetadata) -> dict[str, Tensor]:
    """What the stages have together, in the order of the plain model's; tied names give one tensor."""
    pipe, device = state.context.pipe, state.context.device
    whole: dict[str, Tensor] = {}
    dtypes = all_gather_objects({name: t.dtype for name, t in own.items()}, pipe)
    for name, (first, shape) in stages.state.items():
        if first not in whole:
            source = stages.stages_of(name)[0]
            here = own[name] if source == pipe.rank else torch.empty(shape, dtype=dtypes[source][name])
            whole[first] = broadcast(here.to(device).contiguous(), pipe, source).cpu()
    return {name: whole[first] for name, (first, _) in stages.state.items()}
