"""ZeRO stage 3: the parameters of a model in units, whose values are on a rank only while they are used.

A unit is a layer, or what stands between layers. Each rank keeps its shard of a unit; the whole is gathered into new
memory when one of the parameters is read, and dropped when another unit's turn comes. The ``nn.Parameter`` objects stay
the same ones, with their hooks; between uses their values are NaN, and their class is ``Absent``.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 5.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collectives import Pending
from shardformer.comm.values import memory_of
from shardformer.errors import ConfigError
from shardformer.optim.shards import Shard
from shardformer.optim.stage3.absent import UNIT, absent, present

SMALL = 2**15
"""Numbers: modules outside of layers that have fewer are put together in one unit."""
LARGE = 0.25
"""The part of a model from which on a layer that holds layers is not one unit."""

Read = Callable[[Sequence["Unit"]], None]


_lasting = torch.inference_mode(False)
"""What is made in inference mode could not be used in a training step after it."""


class Unit:
    """Parameters that are gathered together.

    Args:
        index: its place among the model's units, in the order in which the model registers its modules.
        name: of the module that holds them, or the first of several.

    Attributes:
        on_read: called before a parameter is read that is not here, with the units of all parameters of that call.
        size: of what is gathered, in bytes.
        where: address of gathered memory -> the unit, and the number of the base.
        give_back: called with the address of memory that nobody wants any more.
    """

    on_read: Read

    def __init__(self, index: int, name: str, params: Sequence[nn.Parameter]) -> None:
        self.index, self.name, self.params = index, name, list(params)
        self.is_layer = name.rpartition(".")[2].isdecimal()
        self.shards: list[Shard] = []
        self.bases: list[Tensor] = []  # what the parameters are views of, while they are here
        self.where: dict[int, tuple[Unit, int]] = {}
        self.is_here = False
        self.size = 0  # in bytes, alike on all ranks
        self.give_back: Callable[[int], None] = lambda address: None
        self._pending: list[Pending] = []
        self._versions: list[int] = []

    @_lasting
    def fetch(self) -> None:
        """Starts to bring what of it rests on the host to the device, for ``start``."""
        if not self.is_here and not self._pending:
            for shard in self.shards:
                shard.fetch_parameters()

    @_lasting
    def start(self) -> None:
        """Starts to gather the values. Communicates one all-gather for each shard."""
        if not self.is_here and not self._pending:
            self._pending = [shard.start_gather() for shard in self.shards]

    @_lasting
    def wait(self) -> None:
        """The parameters have their values when this returns."""
        if self.is_here:
            return
        self.start()
        for shard, pending in zip(self.shards, self._pending, strict=True):
            whole = pending.wait()
            self._add_base(whole)
            for gradient, place in zip(shard.gradients, shard.places, strict=True):
                param: Any = gradient.param
                param.__class__ = present(type(param))
                param.data = gradient.unpack(whole[place])
                if gradient.is_shared:
                    self._add_base(param.data)
        self._pending, self.is_here = [], True
        self._versions = [param._version for param in self.params]

    def _add_base(self, values: Tensor) -> None:
        self.where[memory_of(values)] = self, len(self.bases)
        self.bases.append(values)

    def _check_unwritten(self) -> None:
        before, self._versions = self._versions, [param._version for param in self.params]
        if before != self._versions:
            self.is_here = False
            raise ConfigError(
                f"A parameter of {self.name} was written to while its values were on this rank",
                rule="Under stage 3 the values are dropped behind their use, and what was written would be lost",
                remedy="Train with stage=2 where parameters are changed by others than the optimizer",
            )

    def free(self) -> None:
        """Drops the values."""
        for pending in self._pending:
            pending.wait()  # it was begun on all ranks, and nobody came to read it
        self._pending = []
        for shard in self.shards:
            shard.forget_fetched()
        if self.is_here:
            self._check_unwritten()
            memories = [memory_of(values) for values in self.bases]
            for memory in memories:
                del self.where[memory]
            self.bases, self.is_here = [], False
            self.hide()
            for memory in memories:
                self.give_back(memory)

    @_lasting
    def hide(self) -> None:
        """Lets each parameter keep its shape alone."""
        for shard in self.shards:
            for gradient in shard.gradients:
                param: Any = gradient.param
                param.data = torch.full((), torch.nan, dtype=shard.dtype, device=param.device).expand(param.shape)
                param.__dict__[UNIT] = self
                kind: Any = type(param)
                param.__class__ = absent(kind)


def group_params(model: nn.Module) -> list[tuple[str, list[nn.Parameter]]]:
    """(name, parameters) of each unit: one for a layer; between layers one for a module, small ones together.

    Layers are what stands in lists. The order is that in which the model registers its modules, which all ranks have
    alike; each parameter is in one unit, the first that holds it.
    """
    total = sum(p.numel() for p in model.parameters())
    layers = dict(_layers(model, "", total))
    seen: set[int] = set()
    units: list[tuple[str, list[nn.Parameter]]] = []
    is_open = False  # whether the last unit takes more small modules
    inside: str | None = None
    for path, module in model.named_modules():
        if inside is not None and f"{path}.".startswith(inside):
            continue
        inside = f"{path}." if path in layers else None
        recurse = inside is not None
        params = [p for p in module.parameters(recurse) if id(p) not in seen]
        seen |= {id(p) for p in params}
        if not params and not recurse:
            continue
        numel = sum(p.numel() for p in params)
        if is_open and not recurse and numel + sum(p.numel() for p in units[-1][1]) < SMALL:
            units[-1][1].extend(params)
        elif params:
            units.append((path or type(module).__name__, params))
            is_open = not recurse and numel < SMALL
        else:
            is_open = False
    return units


def _layers(module: nn.Module, path: str, total: int) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        at = f"{path}.{name}".lstrip(".")
        if not isinstance(child, (nn.ModuleList, nn.Sequential)) or len(child) < 2:
            yield from _layers(child, at, total)
            continue
        for number, element in child.named_children():
            size = sum(p.numel() for p in element.parameters())
            inner = list(_layers(element, f"{at}.{number}", total)) if size > LARGE * total else []
            if inner:
                yield from inner
            elif size:
                yield f"{at}.{number}", element
