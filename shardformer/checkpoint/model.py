"""The tensors of a model by the names that the plain model has for them, and what this rank holds of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardformer.checkpoint.checksum import weighted_sum
from shardformer.checkpoint.held import Item, Region
from shardformer.errors import ConfigError
from shardformer.layout.state import known_state
from shardformer.mesh.axis import Axis
from shardformer.mesh.grid import AXES
from shardformer.optim.optimizer import ZeroOptimizer
from shardformer.optim.shards import Piece, Shard

EXTRA_STATE = "_extra_state"
"""The last word of what ``get_extra_state`` gives, in a state dict of torch."""
WEIGHTS, MASTERS, RESTS = "weights", "master", "rest"
"""In front of a parameter's name: its value, that in fp32, and what rounding took from it."""


class ModelTensors:
    """What a checkpoint holds of a model.

    Attributes:
        model: without what wraps it.
        zero: the optimizer that keeps its values; None where no ``zero`` does.
        world: all ranks that train it together.
        tensors: parameters and persistent buffers by their names in the plain model, each once.
        extra_states: what modules give in ``get_extra_state``, by their names in a state dict.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrapped(model)
        self._state = state = known_state(self.model)
        self.zero = state.gradients if isinstance(state.gradients, ZeroOptimizer) else None
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
            return context.merged(*AXES)
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

    def region_of(self, tensor: Tensor) -> Region:
        """What this rank has of a parameter or buffer."""
        entry = self._entries.get(id(tensor))
        if entry is None or not entry.spec.is_sharded:
            return Region(tuple(tensor.shape), None, {})
        return Region(entry.spec.shape, entry.spec, self._state.coords)

    def region_of_piece(self, piece: Piece) -> Region:
        """What this rank's optimizer has of a parameter."""
        spec = piece.entry.spec
        cut = spec if spec.is_sharded and not piece.gradient.is_shared else None
        return Region(spec.shape, cut, self._state.coords, piece.stretch)

    def name_of_piece(self, piece: Piece) -> str:
        return self._names[id(piece.gradient.param)]

    def shards(self) -> Iterator[Shard]:
        """All shards of ZeRO on this rank, those of gathered parameters that do not train too."""
        if self.zero is not None:
            seen = {id(shard) for shard in self.zero.shards}
            yield from self.zero.shards
            yield from (s for unit in self.zero.units for s in unit.shards if id(s) not in seen)

    @property
    def gathered(self) -> set[int]:
        """The parameters, by identity, whose values stage 3 keeps in shards."""
        return {id(p) for unit in (self.zero.units if self.zero is not None else ()) for p in unit.params}

    def buffer_sums(self) -> dict[str, int]:
        """The checksum of each buffer of this rank."""
        buffers = {n: x.detach() for n, x in self.tensors.items() if not isinstance(x, nn.Parameter)}
        return {name: weighted_sum(x, (0,) * x.dim()) for name, x in buffers.items()}

    def items(self) -> Iterator[Item]:
        """What is saved of the values: inside of ``reading()`` of the optimizer.

        Of buffers that ranks hold alike only ranks at the front hold something; each data rank has its own, of which
        ``not_its_own`` are left out.
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
            for piece in shard.pieces:
                name, region = self.name_of_piece(piece), self.region_of_piece(piece)
                if shard.keeps:
                    yield region.item(f"{WEIGHTS}/{name}", shard.own[piece.at])
                if shard.rounded is not None and shard.rounded.rest is not None:
                    yield region.item(f"{RESTS}/{name}", shard.rounded.rest[piece.at])
                elif shard.rounded is None and shard.wide != shard.dtype and piece.value.requires_grad:
                    yield region.item(f"{MASTERS}/{name}", piece.value.detach().reshape(-1))


def unwrapped(model: nn.Module) -> nn.Module:
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


def not_its_own(sums: Sequence[tuple[int, Mapping[str, int]]]) -> list[set[str]]:
    """Of each rank, the buffers in which its data rank does not differ from the first: it has seen no other batches.

    Args:
        sums: of each rank its data rank, and its ``buffer_sums``.

    >>> not_its_own([(0, {"mean": 3, "mask": 7}), (1, {"mean": 4, "mask": 7})])
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
            remedy="Save it with torch.distributed.checkpoint, or train it with shardformer.zero(..., stage=3)",
        )
    if value.is_meta:
        raise ConfigError(
            f"{name} has no values",
            rule="What is saved or loaded is in memory",
            remedy="Shard the model first, or call shardformer.materialize on it",
        )
