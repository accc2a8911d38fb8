"""The state of a training run under the names and full shapes of the plain model.

Parameters, optimizer states and random states of this rank: what a checkpoint contains, and what resharding moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardformer.checkpoint.chunks import FlatRegion, LocalChunks, TensorItem, list_local_chunks, without_tensors
from shardformer.checkpoint.file_format import CheckpointIndex, check_dtype, from_json, to_json, weighted_sum
from shardformer.comm.collective_call import gather_from_all_ranks
from shardformer.errors import ConfigError, did_you_mean
from shardformer.layout.sharding_metadata import find_metadata
from shardformer.layout.slice_tensor import without_mark
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.rank_grid import AXES
from shardformer.random_state import random_states, set_random_states
from shardformer.zero.flat_shards import FlatShard, ParamSlice
from shardformer.zero.optimizer_state_view import load_in_place
from shardformer.zero.zero_optimizer import ZeroOptimizer

EXTRA_STATE = "_extra_state"
"""The last word of what ``get_extra_state`` gives, in a state dict of torch."""
WEIGHTS, MASTER_WEIGHTS, KAHAN_RESIDUALS = "weights", "master", "rest"
"""In front of a parameter's name: its value, that in fp32, and what rounding took from it."""


class ModelTensors:
    """What a checkpoint holds of a model.

    Attributes:
        model: without what wraps it.
        zero: the optimizer that keeps its values; None without ZeRO.
        world: all ranks that train it together.
        tensors: parameters and persistent buffers by their names in the plain model, each once.
        extra_states: what modules give in ``get_extra_state``, by their names in a state dict.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrap_model(model)
        self._state = state = find_metadata(self.model)
        self.zero = state.gradient_owner if isinstance(state.gradient_owner, ZeroOptimizer) else None
        self.world = self._find_world()
        self._entries = state.by_param()
        self._names: dict[int, str] = {}
        self.tensors: dict[str, Tensor] = {}
        self.extra_states: dict[str, Any] = {}
        plain = state.stages.state if state.stages is not None else {}
        there = {id(x) for x in (*self.model.parameters(), *self.model.buffers())}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if name.rpartition(".")[2] == EXTRA_STATE:
                self.extra_states[name] = value
            elif id(value) not in self._names:
                first = plain[name][0] if name in plain else name
                _check(name, value, is_there=id(value) in there)
                self._names[id(value)] = first
                self.tensors[first] = value

    def _find_world(self) -> Axis:
        context = self._state.context
        if context.world is not None:
            return context.flatten(*AXES)
        return Axis.of(None, "world") if dist.is_available() and dist.is_initialized() else Axis("world")

    @property
    def sizes(self) -> dict[str, int]:
        """Of the axes of the grid."""
        return self._state.context.sizes if self._state.context.world is not None else {"data": self.world.size}

    @property
    def coords(self) -> dict[str, int]:
        return self._state.context.coords if self._state.context.world is not None else {"data": self.world.rank}

    @property
    def device(self) -> torch.device:
        on_gpu = (x.device for x in self.tensors.values() if x.is_cuda)
        return next(on_gpu, self._state.context.device)

    def name_of(self, tensor: Tensor) -> str | None:
        """In the plain model; None for one that is not of the model."""
        return self._names.get(id(tensor))

    def region_of(self, tensor: Tensor) -> FlatRegion:
        """What this rank has of a parameter or buffer."""
        entry = self._entries.get(id(tensor))
        if entry is None or not entry.spec.is_sharded:
            return FlatRegion(tuple(tensor.shape), None, {})
        return FlatRegion(entry.spec.shape, entry.spec, self._state.coords)

    def region_of_slice(self, piece: ParamSlice) -> FlatRegion:
        """What this rank's optimizer has of a parameter."""
        spec = piece.entry.spec
        cut = spec if spec.is_sharded and not piece.gradient.is_shared else None
        return FlatRegion(spec.shape, cut, self._state.coords, piece.param_range)

    def name_of_piece(self, piece: ParamSlice) -> str:
        return self._names[id(piece.gradient.param)]

    def shards(self) -> Iterator[FlatShard]:
        """All shards of ZeRO on this rank, those of gathered parameters that do not train too."""
        if self.zero is not None:
            seen = {id(shard) for shard in self.zero.shards}
            yield from self.zero.shards
            yield from (s for unit in self.zero.param_groups_stage3 for s in unit.shards if id(s) not in seen)

    @property
    def gathered(self) -> set[int]:
        """The parameters, by identity, whose values stage 3 keeps in shards."""
        return {id(p) for unit in (self.zero.param_groups_stage3 if self.zero is not None else ()) for p in unit.params}

    def buffer_sums(self) -> dict[str, int]:
        """The checksum of each buffer of this rank."""
        buffers = {n: x.detach() for n, x in self.tensors.items() if not isinstance(x, nn.Parameter)}
        return {name: weighted_sum(x, (0,) * x.dim()) for name, x in buffers.items()}

    def items(self) -> Iterator[TensorItem]:
        """What is saved of the values: inside of ``reading()`` of the optimizer.

        Of buffers that ranks hold alike only ranks at the front hold something; each data rank has its own, of which
        ``identical_buffers`` are left out.
        """
        gathered, data = self.gathered, self.coords.get("data", 0)
        is_front = all(self.coords.get(name, 0) == 0 for name in ("sequence", "tensor"))
        for name, tensor in self.tensors.items():
            if id(tensor) in gathered:
                continue
            if isinstance(tensor, nn.Parameter) or (is_front and data == 0):
                yield self.region_of(tensor).item(f"{WEIGHTS}/{name}", tensor.detach())
            elif is_front:
                yield self.region_of(tensor).item(buffer_name(data, name), tensor.detach())
        for shard in self.shards():
            for piece in shard.slices:
                name, region = self.name_of_piece(piece), self.region_of_slice(piece)
                if shard.keeps:
                    yield region.item(f"{WEIGHTS}/{name}", shard.local[piece.shard_range])
                if shard.rounded is not None and shard.rounded.rest is not None:
                    yield region.item(f"{KAHAN_RESIDUALS}/{name}", shard.rounded.rest[piece.shard_range])
                elif shard.rounded is None and shard.wide != shard.dtype and piece.value.requires_grad:
                    yield region.item(f"{MASTER_WEIGHTS}/{name}", piece.value.detach().reshape(-1))


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model in torch's DistributedDataParallel, or in what ``torch.compile`` gave."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def buffer_name(data: int, name: str) -> str:
    """In a checkpoint, of a buffer that a data rank has for itself."""
    return f"buffers.{data}/{name}"


def identical_buffers(sums: Sequence[tuple[int, Mapping[str, int]]]) -> list[set[str]]:
    """Of each rank, the buffers in which its data rank does not differ from the first: it has seen no other batches.

    Args:
        sums: of each rank its data rank, and its ``buffer_sums``.

    >>> identical_buffers([(0, {"mean": 3, "mask": 7}), (1, {"mean": 4, "mask": 7})])
    [set(), {'buffers.1/mask'}]
    """
    first: dict[str, int] = {}
    for data, theirs in sums:
        if data == 0:
            first = {**theirs, **first}  # of ranks that each hold a part, those at the front are saved
    return [
        {buffer_name(data, name) for name, total in theirs.items() if data > 0 and first.get(name) == total}
        for data, theirs in sums
    ]


def _check(name: str, value: Any, *, is_there: bool) -> None:
    if not isinstance(value, Tensor) or not is_there:
        raise ConfigError(
            f"{name} in the model's state dict is a {type(value).__name__} that a module makes when it is asked",
            rule="Saved are parameters and buffers, into which a load writes, and what get_extra_state gives",
            remedy="Register it as a buffer, or let the module give it in get_extra_state and take it in "
            "set_extra_state",
        )
    if any(kind.__name__ == "DTensor" for kind in type(value).__mro__):  # whose module takes long to import
        raise ConfigError(
            f"{name} is a DTensor, as fully_shard makes them",
            rule="A checkpoint is of a plain model, or of one that shard_model or zero has laid out",
            remedy="Save it with torch.distributed.checkpoint, or train it with shard_optimizer(..., stage=3)",
        )
    if value.is_meta:
        raise ConfigError(
            f"{name} has no values", remedy="Shard the model first, or call shardformer.meta_init.materialize on it"
        )


@dataclass(frozen=True, eq=False)
class OptimizerTensor:
    """One tensor that an optimizer changes: of which parameter, and which numbers of it."""

    name: str
    param: Tensor
    region: FlatRegion


class OptimizerStates:
    """What a checkpoint holds of one optimizer.

    Args:
        number: of the optimizer, among those that are saved together.

    Raises ConfigError for one that holds parameters of another model.
    """

    def __init__(self, optimizer: Optimizer, number: int, tensors: ModelTensors) -> None:
        self.optimizer, self._number = optimizer, number
        self.kind = type(optimizer).__name__
        pieces = {id(piece.value): piece for shard in tensors.shards() for piece in shard.slices}
        self.groups: list[list[OptimizerTensor]] = []
        for group in optimizer.param_groups:
            slots = []
            for param in group["params"]:
                if (piece := pieces.get(id(param))) is not None:
                    slots.append(OptimizerTensor(tensors.name_of_piece(piece), param, tensors.region_of_slice(piece)))
                elif (name := tensors.name_of(param)) is not None:
                    slots.append(OptimizerTensor(name, param, tensors.region_of(param)))
                else:
                    raise _unknown_parameter_error(self.kind, param)
            self.groups.append(slots)

    def _slots(self) -> Iterator[OptimizerTensor]:
        yield from (slot for group in self.groups for slot in group)

    # --- saving

    def items(self) -> Iterator[TensorItem]:
        """The tensors that this rank has of the states."""
        for slot in self._slots():
            for key, value in self.optimizer.state.get(slot.param, {}).items():
                if isinstance(value, Tensor) and not _is_scalar(key, value, slot):
                    region = self._region_of(value, slot, key)
                    x = without_mark(value.detach())  # a script may put in a tensor of model.state_dict()
                    x = x.to_dense() if x.is_sparse else x  # momentum of sparse gradients has some rows alone
                    x = x.reshape(-1) if region.stretch is not None else x
                    yield region.item(_name(self._number, key, slot.name), x)

    def _region_of(self, value: Tensor, slot: OptimizerTensor, key: str) -> FlatRegion:
        if value.shape == slot.param.shape:
            return slot.region
        if slot.region.is_whole:
            return FlatRegion(tuple(value.shape), None, {})
        raise self._not_placed(key, tuple(value.shape), slot)

    def _not_placed(self, key: str, shape: tuple[int, ...], slot: OptimizerTensor) -> ConfigError:
        return ConfigError(
            f"{self.kind} keeps {key!r} of the shape {shape} for {slot.name}, of which this rank has a part alone: "
            f"{tuple(slot.param.shape)} of {slot.region.shape}",
            rule="What stands for each number of a parameter is cut as that is; other states belong to a whole one",
            remedy="Write shard_optimizer(model, optimizer), which gives such an optimizer whole parameters, before "
            "training; it does so with stage=0 too",
        )

    def values(self) -> dict[str, Any]:
        """What this rank says of it in the index."""
        where = f"optimizer {self.kind}"
        groups = []
        for group, slots in zip(self.optimizer.param_groups, self.groups, strict=True):
            options = {k: to_json(v, f"{where}: {k!r}") for k, v in group.items() if k != "params"}
            groups.append({"options": options, "names": list(dict.fromkeys(slot.name for slot in slots))})
        scalars: dict[str, Any] = {}
        for slot in self._slots():
            for key, value in self.optimizer.state.get(slot.param, {}).items():
                if not isinstance(value, Tensor) or _is_scalar(key, value, slot):
                    scalars.setdefault(slot.name, {})[key] = to_json(value, f"{where}: {key!r} of {slot.name}")
        return {"kind": self.kind, "groups": groups, "scalars": scalars}

    # --- loading

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raises ConfigError where what was saved is of another optimizer, or has other groups."""
        if saved["kind"] != self.kind:
            raise ConfigError(
                f"The state of a {saved['kind']} was to be loaded into a {self.kind}",
                remedy=f"Train on with {saved['kind']}, or load the weights alone: leave the optimizer out",
            )
        if len(saved["groups"]) != len(self.groups):
            raise ConfigError(
                f"The state of {len(saved['groups'])} groups of parameters was to be loaded into a {self.kind} of "
                f"{len(self.groups)}",
                remedy="Build its groups as they were when it was saved",
            )
        home = {name: i for i, group in enumerate(saved["groups"]) for name in group["names"]}
        for i, slots in enumerate(self.groups):
            for slot in slots:
                if home.get(slot.name) != i:
                    raise ConfigError(
                        f"{slot.name} is in group {i} of this {self.kind}, and was in "
                        f"{'none' if slot.name not in home else f'group {home[slot.name]}'} when it was saved",
                        remedy=did_you_mean(slot.name, saved["groups"][i]["names"])
                        if slot.name not in home
                        else "Build its groups as they were when it was saved",
                    )

    def wanted(self, index: CheckpointIndex) -> Iterator[tuple[OptimizerTensor, str, str, FlatRegion]]:
        """(slot, key, name of the tensor, what this rank reads of it) of each state that was saved."""
        keys: dict[str, list[tuple[str, str]]] = {}
        for full_name in index.tensors:
            kind, _, rest = full_name.partition("/")
            if kind == f"optimizer.{self._number}":
                key, _, name = rest.partition("/")
                keys.setdefault(name, []).append((unquote(key), full_name))
        for slot in self._slots():
            for key, full_name in keys.get(slot.name, ()):
                shape = index.tensors[full_name].shape
                if shape == slot.region.shape:
                    yield slot, key, full_name, slot.region
                elif slot.region.is_whole:
                    yield slot, key, full_name, FlatRegion(shape, None, {})
                else:
                    raise self._not_placed(key, shape, slot)

    def load_values(
        self, saved: Mapping[str, Any], read: Sequence[tuple[OptimizerTensor, str, Tensor]], *, exact: bool
    ) -> None:
        """Gives the optimizer its states and options.

        Args:
            read: (slot, key, value) of the tensors.
            exact: whether states keep the precision in which they were saved, though the parameters have another one.
        """
        states: dict[int, dict[str, Any]] = {}
        for slot in self._slots():
            if (scalars := saved["scalars"].get(slot.name)) is not None:
                states[id(slot.param)] = {key: from_json(value) for key, value in scalars.items()}
        for slot, key, value in read:
            shaped = value.view(slot.param.shape) if value.numel() == slot.param.numel() else value
            states.setdefault(id(slot.param), {})[key] = shaped
        groups: list[dict[str, Any]] = []
        packed: dict[int, dict[str, Any]] = {}
        number = 0
        for group, slots in zip(saved["groups"], self.groups, strict=True):
            numbers = list(range(number, number + len(slots)))
            number += len(slots)
            groups.append({**{k: from_json(v) for k, v in group["options"].items()}, "params": numbers})
            pairs = [(n, states.get(id(slot.param))) for n, slot in zip(numbers, slots, strict=True)]
            packed |= {n: state for n, state in pairs if state is not None}
        load_in_place(self.optimizer, {"state": packed, "param_groups": groups})
        for slot in self._slots() if exact else ():
            state = self.optimizer.state.get(slot.param, {})
            for key, value in states.get(id(slot.param), {}).items():
                now = state.get(key)
                if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                    state[key] = value.view(now.shape).to(now.device)


def optimizer_states(optimizer: Any, tensors: ModelTensors) -> list[OptimizerStates]:
    """What is saved of an optimizer, of several, or of those that ``shard_optimizer`` was given."""
    found = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer] if optimizer is not None else []
    plain: list[Optimizer] = []
    for each in found:
        if not isinstance(each, Optimizer):
            raise ConfigError(
                f"The optimizer is a {type(each).__name__}",
                remedy="Give the optimizer that steps; a scheduler goes into scheduler=",
            )
        if isinstance(each, ZeroOptimizer) and each is not tensors.zero:
            raise ConfigError(
                "The optimizer that zero returned is of another model", remedy="Give the model that zero was given"
            )
        plain += each.inner if isinstance(each, ZeroOptimizer) else [each]
    return [OptimizerStates(each, number, tensors) for number, each in enumerate(plain)]


def merge_optimizer_values(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all ranks said of one optimizer, of whose parameters each has some."""
    first = values[0]
    groups = [
        {"options": own[0]["options"], "names": list(dict.fromkeys(name for each in own for name in each["names"]))}
        for own in zip(*(each["groups"] for each in values), strict=True)
    ]
    scalars: dict[str, Any] = {}
    for each in values:
        scalars |= each["scalars"]
    return {"kind": first["kind"], "groups": groups, "scalars": scalars}


def _is_scalar(key: Any, value: Tensor, slot: OptimizerTensor) -> bool:
    """Whether it is one number that stands for the whole parameter: as torch has it, not what goes with a scalar."""
    return value.dim() == 0 and (key == "step" or slot.param.dim() > 0)


def _name(number: int, key: Any, name: str) -> str:
    return f"optimizer.{number}/{quote(str(key), safe='')}/{name}"


def _unknown_parameter_error(kind: str, param: Tensor) -> ConfigError:
    return ConfigError(
        f"{kind} holds a parameter of the shape {tuple(param.shape)} that is not one of the model",
        remedy="Give the model that it trains; build the optimizer after shard_model, of model.parameters()",
    )


def random_state_key(rank: int, name: str) -> str:
    """In a checkpoint, of one of the tensors of a rank."""
    return f"random.{rank}/{name}"


def random_state_tensors(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This rank's: (tensors by name, numbers)."""
    of_torch, of_numpy, of_python = random_states(device)
    name, keys, *rest = of_numpy
    version, words, gauss = of_python
    tensors = {f"torch.{i}": state for i, state in enumerate(of_torch)}
    tensors["numpy"] = torch.from_numpy(numpy.asarray(keys, numpy.int64))
    tensors["python"] = torch.tensor(words, dtype=torch.int64)
    return tensors, {"numpy": [name, *rest], "python": [version, gauss]}


def set_random_state_tensors(tensors: dict[str, Tensor], numbers: dict[str, Any], device: torch.device) -> None:
    """What ``random_state_tensors`` gave, of generators that this device has."""
    own, _ = random_state_tensors(device)
    of_torch = [tensors.get(name, own[name]) for name in own if name.startswith("torch.")]
    name, *rest = numbers["numpy"]
    of_numpy = (name, tensors["numpy"].numpy().astype(numpy.uint32), *rest)
    version, gauss = numbers["python"]
    set_random_states((of_torch, of_numpy, (version, tuple(tensors["python"].tolist()), gauss)), device)


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class StateContents:
    """A training run between two steps.

    Args:
        items: the tensors that this rank has, or has a part of.
        values: what else is to be known, of all ranks.
        cells: which pieces all ranks have.
    """

    items: list[TensorItem]
    values: dict[str, Any]
    cells: tuple[LocalChunks, ...]


def collect_state(
    tensors: ModelTensors, check: Callable[[], T], optimizer: Any, scheduler: Any, extra: Any
) -> tuple[list[T], StateContents]:
    """(what ``check`` gives on each rank, what this rank holds). The values of items are where training has them.

    Communicates, at once, names and sizes of what all have, a checksum of each buffer, and plain values.
    """
    world, items = tensors.world, list[TensorItem]()

    def collect() -> tuple[T, dict[str, Any], LocalChunks, dict[str, int]]:
        checked, optimizers = check(), optimizer_states(optimizer, tensors)
        own, numbers = random_state_tensors(tensors.device)
        items.extend(tensors.items())
        items.extend(item for each in optimizers for item in each.items())
        items.extend(
            FlatRegion(tuple(x.shape), None, {}).item(random_state_key(world.rank, n), x) for n, x in own.items()
        )
        for item in items:
            check_dtype(item.name, item.dtype)
        values = _values(tensors, optimizers, scheduler, extra) | {"random": numbers}
        return checked, values, list_local_chunks(items), tensors.buffer_sums()

    checked, said, cells, sums = zip(*gather_from_all_ranks(collect, world, "Saving a checkpoint"), strict=True)
    alike = identical_buffers([(one["coords"].get("data", 0), theirs) for one, theirs in zip(said, sums, strict=True)])
    values = said[0] | {
        "optimizers": [merge_optimizer_values(each) for each in zip(*(one["optimizers"] for one in said), strict=True)],
        "random": [one["random"] for one in said],
        "coords": [one["coords"] for one in said],
        "extra_states": {name: value for one in said for name, value in one["extra_states"].items()},
    }
    kept = [item for item in items if item.name not in alike[world.rank]]
    return list(checked), StateContents(kept, values, tuple(map(without_tensors, cells, alike)))


def _values(tensors: ModelTensors, optimizers: Iterable[OptimizerStates], scheduler: Any, extra: Any) -> dict[str, Any]:
    """What this rank has to say beside tensors."""
    values: dict[str, Any] = {
        "model": type(tensors.model).__name__,
        "optimizers": [each.values() for each in optimizers],
        "scheduler": [
            {"kind": type(s).__name__, "state": to_json(s.state_dict(), f"the state of {type(s).__name__}")}
            for s in as_object_list(scheduler)
        ],
        "extra": to_json(extra, "extra"),
        "coords": tensors.coords,
        "extra_states": {name: to_json(x, f"the state {name}") for name, x in tensors.extra_states.items()},
    }
    if tensors.zero is not None:
        values["loss_scale"] = asdict(tensors.zero.loss_scale)
        values["rounds"] = max(tensors.zero.rounding_counts, default=0)
    return values


def as_object_list(given: Any) -> list[Any]:
    """None, one or several."""
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
