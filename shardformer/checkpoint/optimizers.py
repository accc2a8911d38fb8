"""The states of optimizers by the names and in the full shapes of the plain model's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from torch import Tensor
from torch.optim import Optimizer

from shardformer.checkpoint.files import Index
from shardformer.checkpoint.held import Item, Region
from shardformer.checkpoint.model import ModelTensors
from shardformer.checkpoint.plain import from_json, to_json
from shardformer.errors import ConfigError, nearest
from shardformer.layout.slice_tensor import without_mark
from shardformer.optim.live_state import load_in_place
from shardformer.optim.optimizer import ZeroOptimizer


@dataclass(frozen=True, eq=False)
class Slot:
    """One tensor that an optimizer changes: of which parameter, and which numbers of it."""

    name: str
    param: Tensor
    region: Region


class OptimizerStates:
    """What a checkpoint holds of one optimizer.

    Args:
        number: of the optimizer, among those that are saved together.

    Raises ConfigError for one that holds parameters of another model.
    """

    def __init__(self, optimizer: Optimizer, number: int, tensors: ModelTensors) -> None:
        self.optimizer, self._number = optimizer, number
        self.kind = type(optimizer).__name__
        pieces = {id(piece.value): piece for shard in tensors.shards() for piece in shard.pieces}
        self.groups: list[list[Slot]] = []
        for group in optimizer.param_groups:
            slots = []
            for param in group["params"]:
                if (piece := pieces.get(id(param))) is not None:
                    slots.append(Slot(tensors.name_of_piece(piece), param, tensors.region_of_piece(piece)))
                elif (name := tensors.name_of(param)) is not None:
                    slots.append(Slot(name, param, tensors.region_of(param)))
                else:
                    raise _stranger(self.kind, param)
            self.groups.append(slots)

    def _slots(self) -> Iterator[Slot]:
        yield from (slot for group in self.groups for slot in group)

    # --- saving

    def items(self) -> Iterator[Item]:
        """The tensors that this rank has of the states."""
        for slot in self._slots():
            for key, value in self.optimizer.state.get(slot.param, {}).items():
                if isinstance(value, Tensor) and not _is_scalar(key, value, slot):
                    region = self._region_of(value, slot, key)
                    x = without_mark(value.detach())  # a script may put in a tensor of model.state_dict()
                    x = x.to_dense() if x.is_sparse else x  # momentum of sparse gradients has some rows alone
                    x = x.reshape(-1) if region.stretch is not None else x
                    yield region.item(_name(self._number, key, slot.name), x)

    def _region_of(self, value: Tensor, slot: Slot, key: str) -> Region:
        if value.shape == slot.param.shape:
            return slot.region
        if slot.region.is_whole:
            return Region(tuple(value.shape), None, {})
        raise self._not_placed(key, tuple(value.shape), slot)

    def _not_placed(self, key: str, shape: tuple[int, ...], slot: Slot) -> ConfigError:
        return ConfigError(
            f"{self.kind} keeps {key!r} of the shape {shape} for {slot.name}, of which this rank has a part alone: "
            f"{tuple(slot.param.shape)} of {slot.region.shape}",
            rule="What stands for each number of a parameter is cut as that is; other states belong to a whole one",
            remedy="Write shardformer.zero(optimizer, model), which gives such an optimizer whole parameters, before "
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
                rule="An optimizer takes up the state that one of its class has saved",
                remedy=f"Train on with {saved['kind']}, or load the weights alone: leave the optimizer out",
            )
        if len(saved["groups"]) != len(self.groups):
            raise ConfigError(
                f"The state of {len(saved['groups'])} groups of parameters was to be loaded into a {self.kind} of "
                f"{len(self.groups)}",
                rule="An optimizer takes up the state of one with the same groups",
                remedy="Build its groups as they were when it was saved",
            )
        home = {name: i for i, group in enumerate(saved["groups"]) for name in group["names"]}
        for i, slots in enumerate(self.groups):
            for slot in slots:
                if home.get(slot.name) != i:
                    raise ConfigError(
                        f"{slot.name} is in group {i} of this {self.kind}, and was in "
                        f"{'none' if slot.name not in home else f'group {home[slot.name]}'} when it was saved",
                        rule="An optimizer takes up the state of one with the same groups",
                        remedy=nearest(slot.name, saved["groups"][i]["names"])
                        if slot.name not in home
                        else "Build its groups as they were when it was saved",
                    )

    def wanted(self, index: Index) -> Iterator[tuple[Slot, str, str, Region]]:
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
                    yield slot, key, full_name, Region(shape, None, {})
                else:
                    raise self._not_placed(key, shape, slot)

    def take_up(self, saved: Mapping[str, Any], read: Sequence[tuple[Slot, str, Tensor]], *, exact: bool) -> None:
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


def optimizers_of(optimizer: Any, tensors: ModelTensors) -> list[OptimizerStates]:
    """What is saved of an optimizer, of several, or of those that ``zero`` was given."""
    found = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer] if optimizer is not None else []
    plain: list[Optimizer] = []
    for each in found:
        if not isinstance(each, Optimizer):
            raise ConfigError(
                f"The optimizer is a {type(each).__name__}",
                rule="What is saved of it is the state of a torch.optim.Optimizer, or of a list of them",
                remedy="Give the optimizer that steps; a scheduler goes into scheduler=",
            )
        if isinstance(each, ZeroOptimizer) and each is not tensors.zero:
            raise ConfigError(
                "The optimizer that zero returned is of another model",
                rule="A checkpoint is of a model and of what trains it",
                remedy="Give the model that zero was given",
            )
        plain += each.inner if isinstance(each, ZeroOptimizer) else [each]
    return [OptimizerStates(each, number, tensors) for number, each in enumerate(plain)]


def merged(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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


def _is_scalar(key: Any, value: Tensor, slot: Slot) -> bool:
    """Whether it is one number that stands for the whole parameter: as torch has it, not what goes with a scalar."""
    return value.dim() == 0 and (key == "step" or slot.param.dim() > 0)


def _name(number: int, key: Any, name: str) -> str:
    return f"optimizer.{number}/{quote(str(key), safe='')}/{name}"


def _stranger(kind: str, param: Tensor) -> ConfigError:
    return ConfigError(
        f"{kind} holds a parameter of the shape {tuple(param.shape)} that is not one of the model",
        rule="The states of an optimizer are saved under the names of the model's parameters",
        remedy="Give the model that it trains; build the optimizer after shard_model, of model.parameters()",
    )
