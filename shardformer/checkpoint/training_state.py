"""Collect the training state of this rank under the names and full shapes of the unsharded model.

The state contains parameters, buffers, optimizer states and random states. It is saved or resharded in memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardformer.checkpoint.chunks import (
    CheckpointTensor,
    LocalChunks,
    LocalTensorRegion,
    exclude_tensors,
    get_local_chunk_bounds,
)
from shardformer.checkpoint.file_format import (
    CheckpointIndex,
    check_dtype_can_be_saved,
    compute_chunk_checksum,
    decode_json_value,
    encode_json_value,
    find_json_differences,
)
from shardformer.comm.collective_call import run_and_all_gather
from shardformer.errors import ConfigError, suggest_similar_names
from shardformer.layout.shard_export_guard import to_plain_tensor
from shardformer.layout.sharding_metadata import get_or_build_metadata, get_sharded_module_and_prefix
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.rank_grid import AXES
from shardformer.random_state import get_rng_states, set_rng_states
from shardformer.torch_compat import is_dtensor
from shardformer.zero.flat_shards import FlatParamShard, ParamSlice
from shardformer.zero.optimizer_state_view import COORDINATES_KEY, load_state_dict_in_place
from shardformer.zero.zero_optimizer import ZeroOptimizer, unwrap_zero_optimizers

Optimizers = Optimizer | Sequence[Optimizer] | None
Schedulers = LRScheduler | Sequence[LRScheduler] | None
EXTRA_STATE = "_extra_state"
"""Suffix of the results of ``get_extra_state`` in a state dict."""
WEIGHTS, MASTER_WEIGHTS, KAHAN_RESIDUALS = "weights", "master", "rest"
"""Prefixes of parameter names in a checkpoint for weights, fp32 master weights and Kahan residuals."""


class ModelCheckpointTensors:
    """The parameters and buffers of a model, under their names in a checkpoint.

    Attributes:
        model: the model without wrappers.
        zero: the ZeRO optimizer of the model, or None.
        world: axis that contains all ranks that train the model.
        tensors: parameters and persistent buffers, by name in the unsharded model (the first name of a shared tensor).
        plain_names: names of all parameters and buffers of a model with pipeline stages, in their original order.
        extra_states: results of the modules' ``get_extra_state``, by name in the state dict.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrap_model(model)
        self._state = state = get_or_build_metadata(self.model)
        self.zero = state.gradient_owner if isinstance(state.gradient_owner, ZeroOptimizer) else None
        context = state.context
        has_grid = context.world is not None
        self.world = context.flatten(*AXES) if has_grid else replace(Axis.of(None, "world"), traffic=context.traffic)
        self._entries = state.get_entries_by_param_id()
        self._names: dict[int, str] = {}
        self.tensors: dict[str, Tensor] = {}
        self.extra_states: dict[str, Any] = {}
        plain = (
            {}
            if state.stages is None
            else state.stages.get_canonical_names(get_sharded_module_and_prefix(self.model, state)[1])
        )
        self.plain_names = list(plain)
        registered = {id(x) for x in (*self.model.parameters(), *self.model.buffers())}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if name.rpartition(".")[2] == EXTRA_STATE:
                self.extra_states[name] = value
            elif id(value) not in self._names:
                first = plain.get(name, name)
                _check_state_dict_entry_can_be_saved(name, value, is_registered=id(value) in registered)
                self._names[id(value)] = first
                self.tensors[first] = value

    @property
    def mesh_axis_sizes(self) -> dict[str, int]:
        return self._state.context.sizes if self._state.context.world is not None else {"data": self.world.size}

    @property
    def mesh_coords(self) -> dict[str, int]:
        return self._state.context.coords if self._state.context.world is not None else {"data": self.world.rank}

    @property
    def device(self) -> torch.device:
        return next((x.device for x in self.tensors.values() if x.is_cuda), self._state.context.device)

    @property
    def has_pipeline_stages(self) -> bool:
        """Whether the model is split into pipeline stages on several ranks."""
        return self._state.stages is not None and self._state.context.pipe.size > 1

    def readable_zero_shards(self) -> AbstractContextManager[object]:
        """Return a context manager inside which the values of all ZeRO shards can be read."""
        return nullcontext() if self.zero is None else self.zero.readable_state()

    def get_tensor_name(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor in the unsharded model, or None if the model does not contain it."""
        return self._names.get(id(tensor))

    def get_local_region(self, tensor: Tensor) -> LocalTensorRegion:
        """Return the region of a full parameter or buffer that this rank stores."""
        entry = self._entries.get(id(tensor))
        if entry is None or not entry.spec.is_sharded:
            return LocalTensorRegion(tuple(tensor.shape), None, {})
        return LocalTensorRegion(entry.spec.shape, entry.spec, self._state.coords)

    def get_param_slice_region(self, param_slice: ParamSlice) -> LocalTensorRegion:
        """Return the region of the full parameter that a slice of a ZeRO shard covers."""
        spec = param_slice.entry.spec
        sharded = spec if spec.is_sharded and not param_slice.grad_slot.is_shared else None
        return LocalTensorRegion(spec.shape, sharded, self._state.coords, param_slice.param_range)

    def get_param_name(self, param_slice: ParamSlice) -> str:
        return self._names[id(param_slice.grad_slot.param)]

    def iter_zero_shards(self) -> Iterator[FlatParamShard]:
        """Yield all ZeRO shards on this rank, including those of frozen parameters under stage 3."""
        if self.zero is not None:
            seen = {id(shard) for shard in self.zero.shards}
            yield from self.zero.shards
            yield from (s for unit in self.zero.stage3_param_groups for s in unit.shards if id(s) not in seen)

    @property
    def zero_stage3_param_ids(self) -> set[int]:
        """The ``id()`` of each parameter that ZeRO stage 3 shards and gathers on demand."""
        return {id(p) for unit in (self.zero.stage3_param_groups if self.zero is not None else ()) for p in unit.params}

    def compute_buffer_checksums(self) -> dict[str, int]:
        buffers = {n: x.detach() for n, x in self.tensors.items() if not isinstance(x, nn.Parameter)}
        return {name: compute_chunk_checksum(x, (0,) * x.dim()) for name, x in buffers.items()}

    def iter_checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        """Yield the parameters, master weights and buffers that this rank saves.

        Call it inside ``readable_zero_shards()``.

        Buffers are yielded only by ranks with sequence rank 0 and tensor rank 0. Each data rank yields its own buffers,
        and the caller drops those that ``find_identical_buffers`` returns.
        """
        gathered, data = self.zero_stage3_param_ids, self.mesh_coords.get("data", 0)
        is_front = all(self.mesh_coords.get(name, 0) == 0 for name in ("sequence", "tensor"))
        for name, tensor in self.tensors.items():
            if id(tensor) in gathered:
                continue
            if isinstance(tensor, nn.Parameter) or (is_front and data == 0):
                yield self.get_local_region(tensor).make_tensor_item(f"{WEIGHTS}/{name}", tensor.detach())
            elif is_front:
                yield self.get_local_region(tensor).make_tensor_item(get_buffer_key(data, name), tensor.detach())
        for shard in self.iter_zero_shards():
            for piece in shard.slices:
                name, region = self.get_param_name(piece), self.get_param_slice_region(piece)
                if shard.keeps:
                    yield region.make_tensor_item(f"{WEIGHTS}/{name}", shard.local[piece.shard_range])
                if shard.rounded is not None and shard.rounded.rest is not None:
                    yield region.make_tensor_item(f"{KAHAN_RESIDUALS}/{name}", shard.rounded.rest[piece.shard_range])
                elif shard.rounded is None and shard.wide_dtype != shard.dtype and piece.value.requires_grad:
                    yield region.make_tensor_item(f"{MASTER_WEIGHTS}/{name}", piece.value.detach().reshape(-1))


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the original model inside its DistributedDataParallel and ``torch.compile`` wrappers."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def get_buffer_key(data_rank: int, buffer_name: str) -> str:
    """Return the name under which a checkpoint stores a buffer of the data-parallel rank ``data_rank``."""
    return f"buffers.{data_rank}/{buffer_name}"


def find_identical_buffers(buffer_checksums: Sequence[tuple[int, Mapping[str, int]]]) -> list[set[str]]:
    """Find the buffers of each rank that need not be saved because data rank 0 has the same values.

    Args:
        buffer_checksums: (data rank, ``compute_buffer_checksums``) of each rank.

    >>> find_identical_buffers([(0, {"mean": 3, "mask": 7}), (1, {"mean": 4, "mask": 7})])
    [set(), {'buffers.1/mask'}]
    """
    first: dict[str, int] = {}
    for data, buffers in buffer_checksums:
        if data == 0:
            first = {**buffers, **first}  # the first rank's entry counts, as that rank saves the buffer
    return [
        {get_buffer_key(data, name) for name, total in buffers.items() if data > 0 and first.get(name) == total}
        for data, buffers in buffer_checksums
    ]


def _check_state_dict_entry_can_be_saved(entry_name: str, value: Any, *, is_registered: bool) -> None:
    if not isinstance(value, Tensor) or not is_registered:
        raise ConfigError(
            f"{entry_name} in the model's state dict is a {type(value).__name__} that is neither a parameter nor a "
            "buffer.",
            remedy="Register this value as a buffer, or implement get_extra_state and set_extra_state in its module.",
        )
    if is_dtensor(value):
        raise ConfigError(
            f"save_checkpoint cannot save {entry_name}, because it is a DTensor.",
            remedy="Use torch.distributed.checkpoint, or replace fully_shard with shard_optimizer(..., stage=3).",
        )
    if value.is_meta:
        raise ConfigError(
            f"{entry_name} is on the meta device and has no values.",
            remedy="Call shard_model or shardformer.meta_init.materialize(model) before you save.",
        )


@dataclass(frozen=True, eq=False)
class OptimizerTensor:
    """Parameter or parameter slice that an optimizer updates, with its position in the full parameter."""

    name: str
    param: Tensor
    region: LocalTensorRegion


class OptimizerStates:
    """The state of an optimizer, converted to the format of a checkpoint.

    Args:
        optimizer_index: index of the optimizer among those that are saved together.

    Raises:
        ConfigError: the optimizer has a parameter that is not in the model.
    """

    def __init__(self, optimizer: Optimizer, optimizer_index: int, model_tensors: ModelCheckpointTensors) -> None:
        self.optimizer, self._number = optimizer, optimizer_index
        self.kind = type(optimizer).__name__
        pieces = {id(piece.value): piece for shard in model_tensors.iter_zero_shards() for piece in shard.slices}
        self.groups: list[list[OptimizerTensor]] = []
        for group in optimizer.param_groups:
            slots = []
            for param in group["params"]:
                if (piece := pieces.get(id(param))) is not None:
                    slots.append(
                        OptimizerTensor(
                            model_tensors.get_param_name(piece),
                            param,
                            model_tensors.get_param_slice_region(piece),
                        )
                    )
                elif (name := model_tensors.get_tensor_name(param)) is not None:
                    slots.append(OptimizerTensor(name, param, model_tensors.get_local_region(param)))
                else:
                    raise ConfigError(
                        f"{self.kind} has a parameter of shape {tuple(param.shape)} that is not in the model.",
                        remedy="After you call shard_model, create the optimizer from the parameters of this model.",
                    )
            self.groups.append(slots)

    def iter_optimizer_tensors(self) -> Iterator[OptimizerTensor]:
        """Yield the parameters that the optimizer updates on this rank."""
        yield from (slot for group in self.groups for slot in group)

    def _iter_state_values(self) -> Iterator[tuple[OptimizerTensor, str, Any, bool]]:
        """Yield each value in the optimizer state, with its parameter and its key.

        ``is_item`` is False for a scalar, which belongs to the full parameter, unless the parameter is a scalar, too.
        """
        for slot in self.iter_optimizer_tensors():
            for key, value in self.optimizer.state.get(slot.param, {}).items():
                is_item = isinstance(value, Tensor) and (value.dim() > 0 or (key != "step" and slot.param.dim() == 0))
                yield slot, key, value, is_item

    # --- saving

    def iter_checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        """Yield the optimizer state tensors that this rank stores."""
        for slot, key, value, is_item in self._iter_state_values():
            if is_item:
                has_param_shape = value.shape == slot.param.shape
                region = slot.region if has_param_shape else self._get_full_state_region(key, tuple(value.shape), slot)
                x = to_plain_tensor(value.detach())  # a script may insert a tensor of model.state_dict()
                x = x.to_dense() if x.is_sparse else x  # such as the momentum of sparse gradients
                x = x.reshape(-1) if region.flat_range is not None else x
                yield region.make_tensor_item(f"optimizer.{self._number}/{quote(str(key), safe='')}/{slot.name}", x)

    def _get_full_state_region(
        self, state_key: str, state_shape: tuple[int, ...], optimizer_tensor: OptimizerTensor
    ) -> LocalTensorRegion:
        """Return the region of an unsharded state tensor, whose shape differs from that of its parameter.

        Raises ConfigError if the parameter is sharded.
        """
        if optimizer_tensor.region.covers_full_tensor:
            return LocalTensorRegion(state_shape, None, {})
        param_shape = tuple(optimizer_tensor.param.shape)
        raise ConfigError(
            f"{self.kind} stores {state_key!r} of shape {state_shape} for the parameter {optimizer_tensor.name}, which "
            f"does not match this rank's parameter shard of shape {param_shape}.",
            remedy="Call shard_optimizer(model, optimizer) before training, for example with stage=0.",
        )

    def collect_non_tensor_values(self) -> dict[str, Any]:
        """Return this rank's optimizer options, parameter names and scalar states for the checkpoint index."""
        where = f"optimizer {self.kind}"
        groups = []
        for group, slots in zip(self.optimizer.param_groups, self.groups, strict=True):
            options = {k: encode_json_value(v, f"{where}: {k!r}") for k, v in group.items() if k != "params"}
            groups.append({"options": options, "names": list(dict.fromkeys(slot.name for slot in slots))})
        scalars: dict[str, Any] = {}
        for slot, key, value, is_item in self._iter_state_values():
            if not is_item:
                scalars.setdefault(slot.name, {})[key] = encode_json_value(value, f"{where}: {key!r} of {slot.name}")
        return {"kind": self.kind, "groups": groups, "scalars": scalars}

    # --- loading

    def check_saved_state_is_compatible(self, saved_state: Mapping[str, Any]) -> None:
        """Raise ConfigError if the saved state has a different optimizer class or different parameter groups."""
        if saved_state["kind"] != self.kind:
            saved_kind = saved_state["kind"]
            raise ConfigError(
                f"The saved state of the optimizer {saved_kind} cannot be loaded into {self.kind}.",
                remedy=f"Use {saved_kind}, or omit optimizer= to load only the weights.",
            )
        if (num_saved := len(saved_state["groups"])) != len(self.groups):
            raise ConfigError(
                f"The saved optimizer has {num_saved} parameter groups, but {self.kind} has {len(self.groups)}.",
                remedy="Create the optimizer with the same parameter groups as in the saved run.",
            )
        group_of = {name: i for i, group in enumerate(saved_state["groups"]) for name in group["names"]}
        for i, slots in enumerate(self.groups):
            for slot in slots:
                if (before := group_of.get(slot.name)) != i:
                    saved_group, hint = f"group {before}", ""
                    if before is None:
                        saved_group = "no group"
                        hint = f" {suggest_similar_names(slot.name, saved_state['groups'][i]['names'])}"
                    raise ConfigError(
                        f"{slot.name} is in parameter group {i} of {self.kind}, but was in {saved_group} when saved.",
                        remedy=f"Create the optimizer with the parameter groups of the saved run.{hint}",
                    )

    def iter_saved_state_tensors(
        self, index: CheckpointIndex
    ) -> Iterator[tuple[OptimizerTensor, str, str, LocalTensorRegion]]:
        """Find the saved optimizer states of this rank's parameters.

        Yields (optimizer tensor, key, saved name, region that this rank reads) for each state tensor.
        """
        keys: dict[str, list[tuple[str, str]]] = {}
        for full_name in index.tensors:
            if full_name.startswith(f"optimizer.{self._number}/"):
                _, key, name = full_name.split("/", 2)
                keys.setdefault(name, []).append((unquote(key), full_name))
        for slot in self.iter_optimizer_tensors():
            for key, full_name in keys.get(slot.name, ()):
                shape = index.tensors[full_name].shape
                yield slot, key, full_name, self.get_local_state_region(key, shape, slot)

    def get_local_state_region(
        self, state_key: str, state_shape: tuple[int, ...], optimizer_tensor: OptimizerTensor
    ) -> LocalTensorRegion:
        """Return the region of a full optimizer state tensor that this rank stores."""
        return (
            optimizer_tensor.region
            if state_shape == optimizer_tensor.region.shape
            else self._get_full_state_region(state_key, state_shape, optimizer_tensor)
        )

    def load_saved_state(
        self,
        saved_state: Mapping[str, Any],
        state_tensors: Sequence[tuple[OptimizerTensor, str, Tensor]],
        *,
        keep_saved_dtype: bool,
    ) -> None:
        """Load the saved state and parameter group options into the optimizer.

        Args:
            state_tensors: (optimizer tensor, key, value) of the state tensors.
            keep_saved_dtype: whether the state tensors keep the dtype in which they were saved.
        """
        states: dict[int, dict[str, Any]] = {}
        for slot in self.iter_optimizer_tensors():
            if (scalars := saved_state["scalars"].get(slot.name)) is not None:
                states[id(slot.param)] = {key: decode_json_value(value) for key, value in scalars.items()}
        for slot, key, value in state_tensors:
            shaped = value.view(slot.param.shape) if value.numel() == slot.param.numel() else value
            states.setdefault(id(slot.param), {})[key] = shaped
        groups: list[dict[str, Any]] = []
        numbers = count()
        for group, slots in zip(saved_state["groups"], self.groups, strict=True):
            options = {k: decode_json_value(v) for k, v in group["options"].items()}
            groups.append(options | {"params": list(islice(numbers, len(slots)))})
        numbered = {
            n: states[id(slot.param)]
            for n, slot in enumerate(self.iter_optimizer_tensors())
            if id(slot.param) in states
        }
        load_state_dict_in_place(self.optimizer, {"state": numbered, "param_groups": groups})
        for slot in self.iter_optimizer_tensors() if keep_saved_dtype else ():
            state = self.optimizer.state.get(slot.param, {})
            for key, value in states.get(id(slot.param), {}).items():
                loaded = state.get(key)
                if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                    state[key] = value.view(loaded.shape).to(loaded.device)


def collect_optimizer_states(optimizer: Optimizers, model_tensors: ModelCheckpointTensors) -> list[OptimizerStates]:
    """Collect the state of an optimizer, a list of optimizers or a ZeRO optimizer for a checkpoint."""
    for each in as_list(optimizer):
        if not isinstance(each, Optimizer):
            raise ConfigError(
                f"optimizer must be a torch.optim.Optimizer, but got {type(each).__name__}.",
                remedy="Pass the optimizer as optimizer= and the scheduler as scheduler=.",
            )
        if isinstance(each, ZeroOptimizer) and each is not model_tensors.zero:
            raise ConfigError(
                "The optimizer was created by shard_optimizer for another model.",
                remedy="Pass the model that you passed to shard_optimizer.",
            )
    optimizers = with_nested_optimizers(unwrap_zero_optimizers(as_list(optimizer)))
    for each in optimizers:
        _check_saves_only_torch_state(each)
    return [OptimizerStates(each, number, model_tensors) for number, each in enumerate(optimizers)]


def with_nested_optimizers(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """List each optimizer, followed by the optimizers that it wraps."""
    return [each for optimizer in optimizers for each in (optimizer, *_find_nested_optimizers(optimizer))]


def _check_saves_only_torch_state(optimizer: Optimizer) -> None:
    """Raise ConfigError if the optimizer adds entries to torch's state dict, which a checkpoint would not contain."""
    if type(optimizer).state_dict is Optimizer.state_dict:
        return
    if added := sorted(optimizer.state_dict().keys() - {"state", "param_groups", COORDINATES_KEY}):
        kind = type(optimizer).__name__
        raise ConfigError(
            f"{kind}.state_dict() has the entries {', '.join(map(repr, added))}, which a checkpoint cannot save.",
            remedy=f"Store the tensors of each parameter in {kind}.state[parameter], and options in its param_groups.",
        )


def _find_nested_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Find the optimizers inside a wrapper such as Lookahead that have a separate state."""
    found, seen, pending = [], {id(optimizer), id(optimizer.state)}, list(vars(optimizer).values())
    while pending:
        value = pending.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Optimizer):
            if id(value.state) not in seen:
                found.append(value)
            pending += vars(value).values()
        elif type(value) in (list, tuple, dict):
            pending += value.values() if isinstance(value, dict) else value
    return found


def merge_non_tensor_optimizer_values(values_by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the options, parameter names and scalar states of one optimizer from all ranks."""
    groups = [
        {"options": same[0]["options"], "names": list(dict.fromkeys(name for each in same for name in each["names"]))}
        for same in zip(*(each["groups"] for each in values_by_rank), strict=True)
    ]
    scalars: dict[str, Any] = {}
    for each in values_by_rank:
        scalars |= each["scalars"]
    return {"kind": values_by_rank[0]["kind"], "groups": groups, "scalars": scalars}


def get_rng_state_key(rank: int, generator_name: str) -> str:
    """Return the name under which a checkpoint stores one random number generator state of ``rank``."""
    return f"random.{rank}/{generator_name}"


def get_rng_state_tensors(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the states of this rank's random number generators, as named tensors and other values."""
    of_torch, of_numpy, of_python = get_rng_states(device)
    name, keys, *rest = of_numpy
    version, words, gauss = of_python
    tensors = {f"torch.{i}": state for i, state in enumerate(of_torch)}
    tensors["numpy"] = torch.from_numpy(numpy.asarray(keys, numpy.int64))
    tensors["python"] = torch.tensor(words, dtype=torch.int64)
    return tensors, {"numpy": [name, *rest], "python": [version, gauss]}


def set_rng_state_tensors(state_tensors: dict[str, Tensor], other_values: dict[str, Any], device: torch.device) -> None:
    """Restore the random number generator states that ``get_rng_state_tensors`` returned."""
    current, _ = get_rng_state_tensors(device)
    of_torch = [state_tensors.get(name, current[name]) for name in current if name.startswith("torch.")]
    name, *rest = other_values["numpy"]
    of_numpy = (name, state_tensors["numpy"].numpy().astype(numpy.uint32), *rest)
    version, gauss = other_values["python"]
    set_rng_states((of_torch, of_numpy, (version, tuple(state_tensors["python"].tolist()), gauss)), device)


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class RankTrainingState:
    """The training state of one rank between two steps, ready to be saved or resharded.

    Args:
        items: tensors that this rank stores, in full or as shards.
        values: all other state, merged over all ranks.
        chunks_by_rank: lists of the chunks that each rank stores.
    """

    items: list[CheckpointTensor]
    values: dict[str, Any]
    chunks_by_rank: tuple[LocalChunks, ...]


def collect_training_state(
    model_tensors: ModelCheckpointTensors,
    check_fn: Callable[[], T],
    optimizer: Optimizers,
    scheduler: Schedulers,
    extra: Any,
) -> tuple[list[T], RankTrainingState]:
    """Collect the training state of this rank without copying its tensors.

    Also returns the result of ``check_fn`` on each rank. Communicates one gather with the names and sizes of all
    tensors, a checksum of each buffer, and plain values.
    """
    world, items = model_tensors.world, list[CheckpointTensor]()

    def collect_local_state() -> tuple[T, dict[str, Any], LocalChunks, dict[str, int]]:
        checked, optimizers = check_fn(), collect_optimizer_states(optimizer, model_tensors)
        random, numbers = get_rng_state_tensors(model_tensors.device)
        items.extend(model_tensors.iter_checkpoint_tensors())
        items.extend(item for each in optimizers for item in each.iter_checkpoint_tensors())
        items.extend(
            LocalTensorRegion(tuple(x.shape), None, {}).make_tensor_item(get_rng_state_key(world.rank, n), x)
            for n, x in random.items()
        )
        for item in items:
            check_dtype_can_be_saved(item.name, item.dtype)
        values = _collect_non_tensor_values(model_tensors, optimizers, scheduler, extra) | {"random": numbers}
        return checked, values, get_local_chunk_bounds(items), model_tensors.compute_buffer_checksums()

    checked, ranks, chunks, sums = zip(
        *run_and_all_gather(collect_local_state, world, "Saving a checkpoint"), strict=True
    )
    identical = find_identical_buffers(
        [(rank["coords"].get("data", 0), x) for rank, x in zip(ranks, sums, strict=True)]
    )
    if world.rank == 0:
        _warn_about_differing_values(ranks)
    optimizers = zip(*(rank["optimizers"] for rank in ranks), strict=True)
    values = ranks[0] | {
        "optimizers": list(map(merge_non_tensor_optimizer_values, optimizers)),
        "random": [rank["random"] for rank in ranks],
        "coords": [rank["coords"] for rank in ranks],
        "extra_states": {name: value for rank in ranks for name, value in rank["extra_states"].items()},
    }
    kept = [item for item in items if item.name not in identical[world.rank]]
    return list(checked), RankTrainingState(kept, values, tuple(map(exclude_tensors, chunks, identical)))


def _warn_about_differing_values(values_by_rank: Sequence[Mapping[str, Any]]) -> None:
    """Warn about values that differ between ranks, although the checkpoint stores them only once."""
    extras = [
        {"extra": rank["extra"], "scheduler": rank["scheduler"], **rank["extra_states"]} for rank in values_by_rank
    ]
    stored = {name: value for extra in extras for name, value in extra.items()} | extras[0]
    for path in dict.fromkeys(
        path for extra in extras for name in extra for path in find_json_differences(stored[name], extra[name], name)
    ):
        warnings.warn(
            f"{path} differs between ranks, but a checkpoint stores only one value for all ranks. Reduce the value "
            "over the ranks before you save, or remove it.",
            stacklevel=2,
        )


def _collect_non_tensor_values(
    model_tensors: ModelCheckpointTensors, optimizers: Iterable[OptimizerStates], scheduler: Schedulers, extra: Any
) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model": type(model_tensors.model).__name__,
        "optimizers": [each.collect_non_tensor_values() for each in optimizers],
        "scheduler": [
            {"kind": type(s).__name__, "state": encode_json_value(s.state_dict(), f"the state of {type(s).__name__}")}
            for s in as_list(scheduler)
        ],
        "extra": encode_json_value(extra, "extra"),
        "coords": model_tensors.mesh_coords,
        "extra_states": {
            name: encode_json_value(x, f"the state {name}") for name, x in model_tensors.extra_states.items()
        },
    }
    if model_tensors.zero is not None:
        values["loss_scale"] = asdict(model_tensors.zero.loss_scale)
        values["rounds"] = max(model_tensors.zero.rounding_counts, default=0)
    return values


def as_list(value: Any) -> list[Any]:
    """Convert ``value`` to a list: None becomes an empty list, and a single object a list with one element."""
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
