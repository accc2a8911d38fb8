"""Convert the state of a sharded model and its optimizer to and from state dicts of the unsharded model.

Other libraries save an optimizer with ``torch.save(optimizer.state_dict())``. This module writes and reads
such files under any layout.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardformer.checkpoint.chunks import LocalTensorRegion
from shardformer.checkpoint.file_format import CheckpointIndex, decode_json_value, encode_json_value
from shardformer.checkpoint.load import CheckpointChunkReader
from shardformer.checkpoint.save import prepare_save
from shardformer.checkpoint.training_state import (
    ModelCheckpointTensors,
    OptimizerStates,
    OptimizerTensor,
    collect_optimizer_states,
)
from shardformer.comm.collective_call import run_on_all_ranks
from shardformer.comm.collectives import all_gather_objects
from shardformer.errors import ConfigError
from shardformer.filesystem import release_folder_lock, remove_file_or_folder
from shardformer.zero.zero_optimizer import ZeroOptimizer

Groups = list[list[str]]
FOLDER, PREFIX, WHAT = ".shardformer-optimizer", "optimizer.", "Converting the optimizer state"


def gather_full_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, shared_directory: str | os.PathLike[str]
) -> Any:
    """Gather the state of a sharded optimizer into one state dict on rank 0.

    Returns None on other ranks. The state dict fits the optimizer of the unsharded model. All ranks must call this
    function. The ranks write their shards to a temporary folder, from which rank 0 reads full tensors, so that no other
    rank needs memory for them. Communicates names and sizes.

    Args:
        optimizer: the optimizer of ``model``, or the result of ``shard_optimizer``.
        shared_directory: an existing directory that all ranks can write to.
    """
    tensors, place = ModelCheckpointTensors(model), Path(shared_directory) / FOLDER
    _, groups = _collect_states_and_param_groups(optimizer, tensors)
    with prepare_save(place, model, optimizer) as job:
        snapshot = job.rank_data
        snapshot.entries = {name: entry for name, entry in snapshot.entries.items() if name.startswith(PREFIX)}
        snapshot.chunks = [chunk for chunk in snapshot.chunks if chunk[0].startswith(PREFIX)]
        path = job.write_or_clean_up(partial(job.write_checkpoint, sync_to_disk=False))

    def read_state_dict() -> dict[str, Any] | None:
        if tensors.world.rank > 0:
            return None
        try:
            return _read_optimizer_state_dict(path, groups)
        finally:
            release_folder_lock(place, tensors.model)
            remove_file_or_folder(place)

    return run_on_all_ranks(read_state_dict, tensors.world, f"Saving the optimizer into {shared_directory}")


def _read_optimizer_state_dict(checkpoint_path: Path, param_names_by_group: Groups) -> dict[str, Any]:
    index = CheckpointIndex.read(checkpoint_path)
    values = index.values["optimizers"][0]
    numbers = {name: number for number, name in enumerate(name for names in param_names_by_group for name in names)}
    state: dict[int, dict[str, Any]] = {}
    for name, scalars in values["scalars"].items():
        state[numbers[name]] = {key: decode_json_value(value) for key, value in scalars.items()}
    with closing(CheckpointChunkReader(checkpoint_path)) as reader:
        for full_name, entry in index.tensors.items():
            _, key, name = full_name.split("/", 2)
            full = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            for box in entry.chunks:
                reader.read_chunk_part(full_name, box, (box.start, box.size), full[_make_slices(box.start, box.size)])
            state.setdefault(numbers[name], {})[unquote(key)] = full
    options = [{key: decode_json_value(value) for key, value in each["options"].items()} for each in values["groups"]]
    param_groups = [
        {**each, "params": [numbers[name] for name in names]}
        for each, names in zip(options, param_names_by_group, strict=True)
    ]
    return {"state": dict(sorted(state.items())), "param_groups": param_groups}


def load_full_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load the optimizer state dict of an unsharded model into the optimizer of a sharded model.

    All ranks must call this function with the same state dict. Each rank keeps its shard. Communicates the names of the
    parameters, and under ZeRO one all-gather of the parameters.

    Raises:
        ConfigError: the state dict has different parameter groups. Raised on all ranks.
    """
    tensors = ModelCheckpointTensors(model)
    states, groups = _collect_states_and_param_groups(optimizer, tensors)

    def load_on_all_ranks() -> None:
        saved, tensors_of = _split_optimizer_state(state_dict, groups, states.kind)
        states.load_saved_state(saved, list(_iter_local_state_tensors(states, tensors_of)), keep_saved_dtype=True)

    with tensors.zero.writable_state() if tensors.zero is not None else nullcontext():
        run_on_all_ranks(load_on_all_ranks, tensors.world, WHAT)


def _collect_states_and_param_groups(
    optimizer: Optimizer, model_tensors: ModelCheckpointTensors
) -> tuple[OptimizerStates, Groups]:
    """Return an optimizer's state and the parameter names of each parameter group."""

    def collect_local_states() -> tuple[OptimizerStates, Groups]:
        found = collect_optimizer_states(optimizer, model_tensors)
        if len(found) != 1:
            raise ConfigError(
                f"A state dict stores one optimizer, but got {len(found)}: {', '.join(each.kind for each in found)}.",
                remedy="Use shardformer.save_checkpoint and load_checkpoint, which accept a list of optimizers.",
            )
        if isinstance(optimizer, ZeroOptimizer):
            groups = [[model_tensors.get_tensor_name(p) or "" for p in params] for params in optimizer.model_params]
        else:
            groups = [[slot.name for slot in slots] for slots in found[0].groups]
        names = list(model_tensors.tensors)
        if model_tensors.has_pipeline_stages and any(group != sorted(group, key=names.index) for group in groups):
            kind = found[0].kind
            raise ConfigError(
                f"Pipeline parallelism requires the parameters of {kind} to be in the order of model.parameters().",
                remedy="Create the optimizer from model.parameters(), or keep this order in each parameter group.",
            )
        return found[0], groups

    states, own = run_on_all_ranks(collect_local_states, model_tensors.world, WHAT)
    ranks = all_gather_objects(own, model_tensors.world)
    merged = [
        list(dict.fromkeys(name for group in of_ranks for name in group)) for of_ranks in zip(*ranks, strict=True)
    ]
    if model_tensors.has_pipeline_stages:
        order = {name: number for number, name in enumerate(model_tensors.plain_names)}
        merged = [sorted(group, key=order.__getitem__) for group in merged]
    return states, merged


def _split_optimizer_state(
    state_dict: Mapping[str, Any], param_names_by_group: Groups, optimizer_name: str
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Split an optimizer's state dict into plain values and the state tensors of each parameter."""
    passed = [len(group["params"]) for group in state_dict["param_groups"]]
    if passed != (expected := [len(names) for names in param_names_by_group]):
        raise ConfigError(
            f"The parameter groups of the state dict have {passed} parameters, but those of {optimizer_name} have "
            f"{expected}.",
            remedy="Create the optimizer with the same parameter groups as in the saved run.",
        )
    scalars: dict[str, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    saved = []
    for group, names in zip(state_dict["param_groups"], param_names_by_group, strict=True):
        options = {
            key: encode_json_value(value, f"{optimizer_name}: {key!r}")
            for key, value in group.items()
            if key != "params"
        }
        saved.append({"options": options, "names": list(names)})
        for number, name in zip(group["params"], names, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    tensors.setdefault(name, {})[key] = value
                else:
                    scalars.setdefault(name, {})[key] = encode_json_value(value, f"{optimizer_name}: {key!r} of {name}")
    return {"groups": saved, "scalars": scalars}, tensors


def _iter_local_state_tensors(
    optimizer_states: OptimizerStates, tensors_by_param: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[tuple[OptimizerTensor, str, Tensor]]:
    for slot in optimizer_states.iter_optimizer_tensors():
        for key, full in tensors_by_param.get(slot.name, {}).items():
            yield (
                slot,
                key,
                _copy_local_region(full, optimizer_states.get_local_state_region(key, tuple(full.shape), slot)),
            )


def _copy_local_region(full_tensor: Tensor, region: LocalTensorRegion) -> Tensor:
    memory = region.allocate_buffer(full_tensor.dtype)
    for chunk in region.split_into_chunks(memory):
        chunk.values.copy_(full_tensor[_make_slices(*chunk.bounds)])
    return memory


@torch.no_grad()
def load_full_state_dict_into_shards(model: nn.Module, state_dict: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Load the state dict of the unsharded model into a model that is sharded with ZeRO stage 3.

    All ranks must call this function with the same state dict. Each rank keeps its shard. Communicates the same as
    ``writable_state``.

    Returns:
        The names that are missing in the state dict, and those that the model does not have.
    """
    tensors = ModelCheckpointTensors(model)
    assert tensors.zero is not None
    named = [(name, x) for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)]
    full = {id(x): state_dict[name] for name, x in named if name in state_dict}
    trained = {id(shard) for shard in tensors.zero.shards}

    with tensors.zero.writable_state():
        for x in tensors.tensors.values():
            if id(x) in full and id(x) not in tensors.zero_stage3_param_ids:
                x.detach().copy_(_copy_local_region(full[id(x)], tensors.get_local_region(x)))
        for shard in tensors.iter_zero_shards():
            for piece in shard.slices:
                if (value := full.get(id(piece.grad_slot.param))) is None:
                    continue
                local = _copy_local_region(value, tensors.get_param_slice_region(piece))
                if id(shard) in trained:
                    piece.value.copy_(local.view(piece.value.shape))
                if id(shard) not in trained or not shard.has_masters or shard.rounded is not None:
                    shard.local[piece.shard_range] = local.reshape(-1).to(shard.local)
    names = [name for name, _ in named]
    return [name for name in names if name not in state_dict], [name for name in state_dict if name not in names]


def _make_slices(start: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
