"""What each number of a config sets in its model: found by doubling one after the other, on the meta device.

No name of a field is read. A model with a few layers is built without memory in milliseconds, so what a number means is
seen in what moves with it: dims of parameters, lengths of lists, attributes of modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardformer.testing.zoo.kinds import Number, Path, Place, Spot


def measured(make: Callable[[Any], nn.Module], config: Any) -> list[Number]:
    """All numbers of a config above one, with what they set in the model that ``make`` builds of it."""
    before = spots(make(config))
    found = []
    for path, value in entries(config):
        for other in (2 * value, value + 1, value // 2):
            try:
                after = spots(make(changed(config, {path: other})))
            except Exception:  # not every number can be doubled
                continue
            moved = {s: (n, after[s]) for s, n in before.items() if s in after and after[s] != n}
            found.append(Number(path, value, other, moved, before.keys() != after.keys()))
            break
    return found


def numbers(config: Any, at: Path = ()) -> Iterator[tuple[Path, int]]:
    """The integers above one in a config and in the configs inside of it."""
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if is_config(value):
            yield from numbers(value, (*at, name))
        elif type(value) is int and value > 1:
            yield (*at, name), value


def entries(config: Any) -> Iterator[tuple[Path, int]]:
    """The integers above one, and those that a list has in each place."""
    yield from numbers(config)
    yield from ((path, values[0]) for path, values in lists(config) if values[0] > 1 and len(set(values)) == 1)


def lists(config: Any, at: Path = (), of: type = int) -> Iterator[tuple[Path, Sequence[Any]]]:
    """The lists of integers, or of something else, in a config and in the configs inside of it."""
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if is_config(value):
            yield from lists(value, (*at, name), of)
        elif isinstance(value, list | tuple) and value and all(type(n) is of for n in value):
            yield (*at, name), value


def changed(config: Any, numbers: Mapping[Path, Any]) -> Any:
    """A copy of a config with other numbers; a list is filled with them."""
    config = copy.deepcopy(config)
    for path, number in numbers.items():
        place = inner(config, path[:-1])
        old = vars(place)[path[-1]]  # a config may refuse to name one number for layers that differ
        is_list = isinstance(old, list | tuple) and not isinstance(number, list | tuple)
        setattr(place, path[-1], type(old)([number] * len(old)) if is_list else number)
    return config


def inner(config: Any, path: Path) -> Any:
    for name in path:
        config = vars(config)[name]
    return config


def configs(config: Any) -> Iterator[Any]:
    """A config and those inside of it."""
    yield config
    for value in vars(config).values():
        if is_config(value):
            yield from configs(value)


def is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


def spots(model: nn.Module) -> dict[Spot, float]:
    """Every number that a model is built of: sizes of its tensors, lengths of its lists, its modules' attributes."""
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    found: dict[Spot, float] = {}
    for path, module in model.named_modules():
        depth = sum(path.startswith(f"{above}.") for above in lists)
        if isinstance(module, nn.ModuleList):
            found[Spot(path, 0, Place.LAYERS, depth)] = len(module)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            for dim, size in enumerate(tensor.shape if tensor is not None else ()):
                if (place := _place(module, name, tensor, dim)) is not None:
                    found[Spot(f"{path}.{name}", dim, place, depth)] = size
        for name, value in vars(module).items():
            if type(value) in (int, float):
                found[Spot(f"{path}.{name}", 0, Place.ATTRIBUTE, depth)] = value
    return found


def _place(module: nn.Module, name: str, tensor: Any, dim: int) -> Place | None:
    """None for the size of a convolution's kernel."""
    if name in module._buffers:
        return Place.BUFFER
    if tensor.dim() == 1:
        return Place.VECTOR
    if isinstance(module, nn.Embedding):
        return (Place.ROWS, Place.EMBEDDED)[dim]
    if tensor.dim() == 2:
        return Place.MATRIX
    if hasattr(module, "kernel_size"):
        return Place.CHANNEL if dim < 2 else None
    return Place.STACK if dim == 0 else Place.MATRIX


def without_memory(kind: Callable[[Any], nn.Module]) -> Callable[[Any], nn.Module]:
    """What builds a model of a class on the meta device."""

    def make(config: Any) -> nn.Module:
        with torch.device("meta"):
            return kind(config)

    return make
