"""Determines the meaning of each integer of a config by changing it and building the model on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from fractions import Fraction
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
from torch import nn

Path = tuple[str, ...]  # Names of nested config fields, from the outermost config inward


class SizeRole(Enum):
    """Kind of place in a model where a number occurs."""

    LAYERS = auto()  # length of a list of modules
    ROWS = auto()  # rows of an embedding
    EMBEDDED = auto()  # features of an embedding
    STACK = auto()  # first dim of stacked weights
    MATRIX = auto()  # a dim of a matrix, or a later dim of stacked weights
    CHANNEL = auto()  # channels of a convolution
    VECTOR = auto()
    BUFFER = auto()
    ATTRIBUTE = auto()


@dataclass(frozen=True)
class SizeOccurrence:
    """A place in a model where a number occurs."""

    name: str  # path of the parameter, buffer, list or attribute
    dim: int  # dim of the tensor
    role: SizeRole
    depth: int  # number of module lists that contain it


@dataclass(frozen=True)
class ConfigField:
    """An integer of a config, or a list with the same integer for each layer, and the sizes that change with it."""

    path: Path
    value: int
    other: int
    moved: Mapping[SizeOccurrence, tuple[float, float]]  # place -> its size with ``value``, and with ``other``
    builds: bool  # whether the model with ``other`` has different occurrences

    @cached_property
    def times(self) -> dict[SizeOccurrence, Fraction]:
        """Occurrence -> ratio of its size to ``value``, for sizes that are proportional to it."""
        return {
            place: Fraction(old) / self.value
            for place, (old, new) in self.moved.items()
            if isinstance(old, int) and new * self.value == old * self.other
        }

    def adds(self) -> list[Fraction]:
        """Return the growth of matrix dims inside layers per unit of the value."""
        inside = (pair for place, pair in self.moved.items() if place.depth and place.role is SizeRole.MATRIX)
        return [Fraction(int(new - old), self.other - self.value) for old, new in inside]

    def matrices(self) -> set[str]:
        """Return the matrices inside layers whose size depends on the value."""
        return {place.name for place in self.moved if place.role is SizeRole.MATRIX and place.depth}

    def shrinks(self) -> bool:
        """Return whether a tensor shrinks as the value grows, because the value divides another number."""
        tensors = [sizes for place, sizes in self.moved.items() if place.role is not SizeRole.ATTRIBUTE]
        return any((new - old) * (self.other - self.value) < 0 for old, new in tensors)

    def sizes(self) -> list[SizeOccurrence]:
        """Return the tensor dims and list lengths that equal the value."""
        return [place for place, times in self.times.items() if times == 1 and place.role is not SizeRole.ATTRIBUTE]

    def shows_indirectly(self) -> bool:
        """Return whether only attributes that are computed from the value depend on it."""
        computed = (s.role is SizeRole.ATTRIBUTE and old != self.value for s, (old, _) in self.moved.items())
        return bool(self.moved) and not self.builds and all(computed)

    def divides(self) -> bool:
        """Return whether a size in a layer is inversely proportional to the value, like the features of a head."""
        ratio = Fraction(self.value, self.other)
        if any(new == old * ratio**2 != old for old, new in self.moved.values() if isinstance(old, int)):
            return False  # image patches
        inside = (pair for place, pair in self.moved.items() if place.depth)
        return any(isinstance(old, int) and old > 1 and new == old * ratio for old, new in inside)

    @cached_property
    def scaled(self) -> set[SizeOccurrence]:
        """Scale factors of attention scores that depend on the value."""
        factors = ((s, old, new) for s, (old, new) in self.moved.items() if s.depth and isinstance(old, float))
        return {s for s, old, new in factors if (new - old) * (old - 1) * (self.other - self.value) > 0}


HALF = Fraction(1, 2)  # ratio for a width that counts gate and up together
SIZES = (SizeRole.MATRIX, SizeRole.VECTOR, SizeRole.CHANNEL, SizeRole.EMBEDDED)
MIN_WIDTH = 8  # Smaller numbers count image channels, audio codebooks or speakers
MAX_FUSED = 4  # Largest number of widths that are concatenated in one matrix


class FieldMeaning(Enum):
    """Meaning of a config field."""

    HIDDEN = auto()  # features of the hidden states
    HEADS = auto()
    HEAD_DIM = auto()  # features of a head, or some of them
    WIDTH = auto()  # features inside a layer only: an MLP, an expert, a low rank
    ROWS = auto()  # rows of an embedding
    POSITIONS = auto()  # rows of a buffer
    CHANNELS = auto()  # channels of the first of several convolutions that multiply them
    EXPERTS = auto()
    LAYERS = auto()  # length of a list inside a layer


def field_meanings(found: Sequence[ConfigField]) -> dict[Path, FieldMeaning]:
    """Return the meanings of config fields, where they could be determined."""
    meanings = {number.path: meaning for number in found if (meaning := _measured_meaning(number)) is not None}
    by_heads = {place for number in found if meanings.get(number.path) is FieldMeaning.HEADS for place in number.moved}
    for number in found:
        if meanings.get(number.path) is FieldMeaning.HEAD_DIM and (
            number.scaled & by_heads or _sizes_every_matrix(number, found)
        ):
            meanings[number.path] = FieldMeaning.HIDDEN  # a width that is divided into heads
    hidden = [n.value for n in found if meanings.get(n.path) is FieldMeaning.HIDDEN]
    for number, other in combinations(found, 2):
        known = {meanings.get(number.path), meanings.get(other.path)}
        shared_tensors = {place.name for place in number.sizes()} & {place.name for place in other.sizes()}
        pair = (number.value * other.value in hidden and shared_tensors) or _form_a_product(number, other)
        if pair and not known & {FieldMeaning.HIDDEN, FieldMeaning.EXPERTS, FieldMeaning.ROWS, FieldMeaning.CHANNELS}:
            heads, dim = sorted((number, other), key=lambda n: n.value)
            if meanings.get(heads.path) is FieldMeaning.HEAD_DIM or meanings.get(dim.path) is FieldMeaning.HEADS:
                heads, dim = dim, heads
            for one, meaning in ((heads, FieldMeaning.HEADS), (dim, FieldMeaning.HEAD_DIM)):
                if meanings.get(one.path) not in (FieldMeaning.HEADS, FieldMeaning.HEAD_DIM):
                    meanings[one.path] = meaning
    for number in (number for number in found if number.path not in meanings and not number.shrinks()):
        if (meaning := _head_meaning(number, found, meanings)) is not None:
            meanings[number.path] = meaning
    parts = [n.value for n in found if meanings.get(n.path) is FieldMeaning.HEAD_DIM]
    least = min((n.value for n in found if meanings.get(n.path) is FieldMeaning.HEADS), default=max(hidden, default=1))
    largest = max([*parts, *(width // least for width in hidden)], default=0)
    for number in found:
        if number.path not in meanings and {o.role for o in number.moved} - {SizeRole.ATTRIBUTE} == {SizeRole.BUFFER}:
            is_part = number.value <= largest or get_rotary_features(number) & {*parts}
            meanings[number.path] = FieldMeaning.HEAD_DIM if is_part else FieldMeaning.POSITIONS
    return meanings


def _head_meaning(
    number: ConfigField, found: Sequence[ConfigField], meanings: Mapping[Path, FieldMeaning]
) -> FieldMeaning | None:
    """Decide whether a field of unknown meaning counts heads or features of a head."""
    if any(place.role is SizeRole.CHANNEL for place in number.moved):
        return None
    inside = {s: k for s, k in number.times.items() if s.depth and s.role in (SizeRole.VECTOR, SizeRole.MATRIX)}
    hidden = {n.value for n in found if meanings.get(n.path) is FieldMeaning.HIDDEN}
    heads = {n.value for n in found if meanings.get(n.path) is FieldMeaning.HEADS and n.path[:-1] == number.path[:-1]}
    alone = any(times == 1 and place.dim == 0 for place, times in inside.items())
    shared = any(
        times > MAX_FUSED and times not in hidden and not any(h % times == 0 for h in heads)
        for times in inside.values()
    )
    if len({*inside.values()}) <= 2 and (alone or shared):
        return FieldMeaning.HEADS
    if not inside and number.adds() and (number.value not in heads or 1 in number.adds()):
        return FieldMeaning.HEAD_DIM
    return None


def get_rotary_features(number: ConfigField) -> set[int]:
    """Return the numbers of rotary features of a head, which are twice the sizes of the buffers."""
    return {2 * int(old) for place, (old, _) in number.moved.items() if place.role is SizeRole.BUFFER}


def _sizes_every_matrix(number: ConfigField, found: Sequence[ConfigField]) -> bool:
    neighbors = [n for n in found if n.path[:-1] == number.path[:-1]]
    return len(neighbors) > 1 and number.matrices() >= {name for other in neighbors for name in other.matrices()}


def _form_a_product(number: ConfigField, other: ConfigField) -> bool:
    """Return whether a size is a multiple of the product of both fields."""
    times, other_times = number.times, other.times
    shared = (place for place in times.keys() & other_times.keys() if place.depth)
    return any(times[s] % other.value == 0 and other_times[s] % number.value == 0 for s in shared)


def _measured_meaning(number: ConfigField) -> FieldMeaning | None:
    units = number.sizes()
    inside = any(place.role is SizeRole.MATRIX and place.depth for place in units)
    outside = any(place.role in SIZES and not place.depth for place in units)
    if any(place.role is SizeRole.LAYERS and place.depth for place in units):
        return FieldMeaning.EXPERTS if inside else FieldMeaning.LAYERS
    if any(place.role is SizeRole.ROWS for place in number.moved):
        return FieldMeaning.ROWS
    if {2, 4, 8} <= {*number.times.values()}:
        return FieldMeaning.CHANNELS
    if inside and outside:
        return FieldMeaning.HIDDEN
    if number.divides():
        return FieldMeaning.HEADS
    if any(place.role is SizeRole.EMBEDDED and not place.depth for place in units):
        return FieldMeaning.HIDDEN
    if any(place.role is SizeRole.STACK and place.depth for place in units):
        return FieldMeaning.EXPERTS
    if number.scaled:
        return FieldMeaning.HEAD_DIM
    matrices = (times for place, times in number.times.items() if place.role is SizeRole.MATRIX and place.depth)
    most = max(matrices, default=Fraction(0))
    is_width = (inside or most == HALF) and most <= MAX_FUSED and number.value >= MIN_WIDTH
    return FieldMeaning.WIDTH if is_width else None


def measure_fields(make: Callable[[Any], nn.Module], config: Any) -> list[ConfigField]:
    """Measure how each integer above 1 of a config affects the model that ``make`` builds."""
    before = find_size_occurrences(make(config))
    found = []
    for path, value in iter_integers(config):
        for other in (2 * value, value + 1, value // 2):
            try:
                after = find_size_occurrences(make(replace_fields(config, {path: other})))
            except Exception:  # the model cannot be built with this number
                continue
            moved = {s: (n, after[s]) for s, n in before.items() if s in after and after[s] != n}
            found.append(ConfigField(path, value, other, moved, before.keys() != after.keys()))
            break
    return found


def iter_integer_fields(config: Any, at: Path = ()) -> Iterator[tuple[Path, int]]:
    """Yield the integers above 1 of a config and its nested configs."""
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if is_config(value):
            yield from iter_integer_fields(value, (*at, name))
        elif type(value) is int and value > 1:
            yield (*at, name), value


def iter_integers(config: Any) -> Iterator[tuple[Path, int]]:
    """Yield the integers above 1, including lists that repeat one integer."""
    yield from iter_integer_fields(config)
    for path, values in iter_list_fields(config):
        if values[0] > 1 and len(set(values)) == 1:
            yield path, values[0]


def iter_list_fields(config: Any, at: Path = (), of: type = int) -> Iterator[tuple[Path, Sequence[Any]]]:
    """Yield the lists of integers, or of another type, of a config and its nested configs."""
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if is_config(value):
            yield from iter_list_fields(value, (*at, name), of)
        elif isinstance(value, list | tuple) and value and all(type(n) is of for n in value):
            yield (*at, name), value


def replace_fields(config: Any, numbers: Mapping[Path, Any]) -> Any:
    """Return a copy of a config with other numbers; a number fills a list."""
    config = copy.deepcopy(config)
    for path, number in numbers.items():
        owner = get_sub_config(config, path[:-1])
        old = vars(owner)[path[-1]]  # some configs raise on getattr if layers have different values
        is_list = isinstance(old, list | tuple) and not isinstance(number, list | tuple)
        setattr(owner, path[-1], type(old)([number] * len(old)) if is_list else number)
    return config


def get_sub_config(config: Any, path: Path) -> Any:
    for name in path:
        config = vars(config)[name]
    return config


def iter_configs(config: Any) -> Iterator[Any]:
    """Yield a config and its nested configs."""
    yield config
    for value in vars(config).values():
        if is_config(value):
            yield from iter_configs(value)


def is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


def find_size_occurrences(model: nn.Module) -> dict[SizeOccurrence, float]:
    """Return all numbers in a model: tensor sizes, list lengths and attributes of modules."""
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    found: dict[SizeOccurrence, float] = {}
    for path, module in model.named_modules():
        depth = sum(path.startswith(f"{above}.") for above in lists)
        if isinstance(module, nn.ModuleList):
            found[SizeOccurrence(path, 0, SizeRole.LAYERS, depth)] = len(module)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            for dim, size in enumerate(tensor.shape if tensor is not None else ()):
                if (role := _size_role(module, name, tensor, dim)) is not None:
                    found[SizeOccurrence(f"{path}.{name}", dim, role, depth)] = size
        for name, value in vars(module).items():
            if type(value) in (int, float):
                found[SizeOccurrence(f"{path}.{name}", 0, SizeRole.ATTRIBUTE, depth)] = value
    return found


def _size_role(module: nn.Module, name: str, tensor: Any, dim: int) -> SizeRole | None:
    """Return the role of a tensor dim; None for the size of a convolution kernel."""
    if name in module._buffers:
        return SizeRole.BUFFER
    if tensor.dim() == 1:
        return SizeRole.VECTOR
    if isinstance(module, nn.Embedding):
        return (SizeRole.ROWS, SizeRole.EMBEDDED)[dim]
    if tensor.dim() == 2:
        return SizeRole.MATRIX
    if hasattr(module, "kernel_size"):
        return SizeRole.CHANNEL if dim < 2 else None
    return SizeRole.STACK if dim == 0 else SizeRole.MATRIX


def build_on_meta(meaning: Callable[[Any], nn.Module]) -> Callable[[Any], nn.Module]:
    """Return a function that builds a model of class ``kind`` on the meta device."""

    def make(config: Any) -> nn.Module:
        with torch.device("meta"):
            return meaning(config)

    return make
