"""What each number of a config sets in its model, found by doubling one after the other on the meta device."""

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

Path = tuple[str, ...]
"""The fields that lead to a number, from the outermost config inward."""


class SizeRole(Enum):
    """Where a number shows in a model."""

    LAYERS = auto()  # the length of a list of modules
    ROWS = auto()  # of an embedding
    EMBEDDED = auto()  # features of an embedding
    STACK = auto()  # the first dim of weights that are stacked
    MATRIX = auto()  # a dim of a matrix, or another of stacked weights
    CHANNEL = auto()  # of a convolution
    VECTOR = auto()
    BUFFER = auto()
    ATTRIBUTE = auto()


@dataclass(frozen=True)
class SizeOccurrence:
    """One number of a built model.

    Args:
        name: of the parameter, buffer, list or attribute, with the path of its module.
        dim: of a tensor.
        depth: how many lists of modules it is in.
    """

    name: str
    dim: int
    place: SizeRole
    depth: int


@dataclass(frozen=True)
class ConfigField:
    """One integer of a config, or a list with the same one for each layer, and what moves with it.

    Args:
        moved: spot -> its number, and that with ``value`` changed to ``other``.
        builds: whether the model has other spots with ``other``.
    """

    path: Path
    value: int
    other: int
    moved: Mapping[SizeOccurrence, tuple[float, float]]
    builds: bool

    @cached_property
    def times(self) -> dict[SizeOccurrence, Fraction]:
        """Spot -> how many times the number it is, where it grows in proportion to it."""
        return {
            spot: Fraction(old) / self.value
            for spot, (old, new) in self.moved.items()
            if isinstance(old, int) and new * self.value == old * self.other
        }

    def adds(self) -> list[Fraction]:
        """What one more adds to the dims of matrices inside of layers."""
        inside = (pair for spot, pair in self.moved.items() if spot.depth and spot.place is SizeRole.MATRIX)
        return [Fraction(int(new - old), self.other - self.value) for old, new in inside]

    def matrices(self) -> set[str]:
        """The names of the matrices in layers that it sets the size of."""
        return {spot.name for spot in self.moved if spot.place is SizeRole.MATRIX and spot.depth}

    def shrinks(self) -> bool:
        """Whether a tensor gets smaller as it grows: it divides something else."""
        return any((new - old) * (self.other - self.value) < 0 for _, (old, new) in self._tensors())

    def _tensors(self) -> Iterator[tuple[SizeOccurrence, tuple[float, float]]]:
        return ((spot, pair) for spot, pair in self.moved.items() if spot.place is not SizeRole.ATTRIBUTE)

    def sizes(self) -> list[SizeOccurrence]:
        """The dims of tensors, and lengths of lists, that are this number."""
        return [spot for spot, times in self.times.items() if times == 1 and spot.place is not SizeRole.ATTRIBUTE]

    def shows_indirectly(self) -> bool:
        """Whether all that moves with it are attributes that are computed of it."""
        computed = (s.place is SizeRole.ATTRIBUTE and old != self.value for s, (old, _) in self.moved.items())
        return bool(self.moved) and not self.builds and all(computed)

    def divides(self) -> bool:
        """Whether there is a number, inside of a layer, that falls as it rises: heads that share a width."""
        ratio = Fraction(self.value, self.other)
        if any(new == old * ratio**2 != old for old, new in self.moved.values() if isinstance(old, int)):
            return False  # patches of an image
        inside = (pair for spot, pair in self.moved.items() if spot.depth)
        return any(isinstance(old, int) and old > 1 and new == old * ratio for old, new in inside)

    @cached_property
    def scaled(self) -> set[SizeOccurrence]:
        """The factors or divisors of the attention's scores in which the features of a head show."""
        factors = ((s, old, new) for s, (old, new) in self.moved.items() if s.depth and isinstance(old, float))
        return {s for s, old, new in factors if (new - old) * (old - 1) * (self.other - self.value) > 0}


HALF = Fraction(1, 2)  # of a width that counts gate and up together
SIZES = (SizeRole.MATRIX, SizeRole.VECTOR, SizeRole.CHANNEL, SizeRole.EMBEDDED)
LEAST_WIDTH = 8
"""Below it are channels of an image, codes of a sound, speakers."""
MOST_FUSED = 4
"""Widths of an MLP that lie behind each other in one matrix."""


class FieldMeaning(Enum):
    """What a number counts."""

    HIDDEN = auto()  # features of the hidden states
    HEADS = auto()
    HEAD_DIM = auto()  # features of a head, or a part of them
    WIDTH = auto()  # features of something inside of a layer alone: an MLP, an expert, a low rank
    ROWS = auto()  # of an embedding
    POSITIONS = auto()  # of a table that is no parameter
    CHANNELS = auto()  # of a convolution, the first of several that multiply them
    EXPERTS = auto()
    LAYERS = auto()  # of a list inside of a layer


def field_meanings(found: Sequence[ConfigField]) -> dict[Path, FieldMeaning]:
    """What each number counts, of those that could be told."""
    kinds = {number.path: kind for number in found if (kind := _own_meaning(number)) is not None}
    by_heads = {spot for number in found if kinds.get(number.path) is FieldMeaning.HEADS for spot in number.moved}
    for number in found:
        if kinds.get(number.path) is FieldMeaning.HEAD_DIM and (
            number.scaled & by_heads or _is_everywhere(number, found)
        ):
            kinds[number.path] = FieldMeaning.HIDDEN  # heads share it
    hidden = [n.value for n in found if kinds.get(n.path) is FieldMeaning.HIDDEN]
    for number, other in combinations(found, 2):
        known = {kinds.get(number.path), kinds.get(other.path)}
        pair = _multiply(number, other) or (number.value * other.value in hidden and _side_by_side(number, other))
        if pair and not known & {FieldMeaning.HIDDEN, FieldMeaning.EXPERTS, FieldMeaning.ROWS, FieldMeaning.CHANNELS}:
            heads, dim = sorted((number, other), key=lambda n: n.value)
            if kinds.get(heads.path) is FieldMeaning.HEAD_DIM or kinds.get(dim.path) is FieldMeaning.HEADS:
                heads, dim = dim, heads
            for one, kind in ((heads, FieldMeaning.HEADS), (dim, FieldMeaning.HEAD_DIM)):
                if kinds.get(one.path) not in (FieldMeaning.HEADS, FieldMeaning.HEAD_DIM):
                    kinds[one.path] = kind
    for number in (number for number in found if number.path not in kinds and not number.shrinks()):
        if (kind := _part_of_heads(number, found, kinds)) is not None:
            kinds[number.path] = kind
    parts = [n.value for n in found if kinds.get(n.path) is FieldMeaning.HEAD_DIM]
    least = min((n.value for n in found if kinds.get(n.path) is FieldMeaning.HEADS), default=max(hidden, default=1))
    largest = max([*parts, *(width // least for width in hidden)], default=0)
    for number in found:
        if number.path not in kinds and _places(number) == {SizeRole.BUFFER}:
            is_part = number.value <= largest or rotary_features(number) & {*parts}
            kinds[number.path] = FieldMeaning.HEAD_DIM if is_part else FieldMeaning.POSITIONS
    return kinds


def _part_of_heads(
    number: ConfigField, found: Sequence[ConfigField], kinds: Mapping[Path, FieldMeaning]
) -> FieldMeaning | None:
    """Of one that no other measurement tells: whether it counts heads of a width that they divide, or a part of one."""
    if any(spot.place is SizeRole.CHANNEL for spot in number.moved):
        return None
    inside = {s: k for s, k in number.times.items() if s.depth and s.place in (SizeRole.VECTOR, SizeRole.MATRIX)}
    hidden = {n.value for n in found if kinds.get(n.path) is FieldMeaning.HIDDEN}
    heads = {n.value for n in found if kinds.get(n.path) is FieldMeaning.HEADS and n.path[:-1] == number.path[:-1]}
    alone = any(times == 1 and spot.dim == 0 for spot, times in inside.items())
    shared = any(
        times > MOST_FUSED and times not in hidden and not any(h % times == 0 for h in heads)
        for times in inside.values()
    )
    if len({*inside.values()}) <= 2 and (alone or shared):
        return FieldMeaning.HEADS
    if not inside and number.adds() and (number.value not in heads or 1 in number.adds()):
        return FieldMeaning.HEAD_DIM
    return None


def _side_by_side(number: ConfigField, other: ConfigField) -> bool:
    """Whether they are two dims of one tensor."""
    return bool({spot.name for spot in number.sizes()} & {spot.name for spot in other.sizes()})


def rotary_features(number: ConfigField) -> set[int]:
    """How many features of a head a table of rotations that it sets the size of turns: two by each entry."""
    return {2 * int(old) for spot, (old, _) in number.moved.items() if spot.place is SizeRole.BUFFER}


def _is_everywhere(number: ConfigField, found: Sequence[ConfigField]) -> bool:
    """Whether every matrix in the layers of its config has as many features on one of its sides."""
    beside = [n for n in found if n.path[:-1] == number.path[:-1]]
    return len(beside) > 1 and number.matrices() >= {name for other in beside for name in other.matrices()}


def _multiply(number: ConfigField, other: ConfigField) -> bool:
    """Whether something has as many of the one as the product of both."""
    ours, theirs = number.times, other.times
    shared = (spot for spot in ours.keys() & theirs.keys() if spot.depth)
    return any(ours[s] % other.value == 0 and theirs[s] % number.value == 0 for s in shared)


def _places(number: ConfigField) -> set[SizeRole]:
    return {spot.place for spot in number.moved} - {SizeRole.ATTRIBUTE}


def _own_meaning(number: ConfigField) -> FieldMeaning | None:
    """What it counts, as far as it tells by itself."""
    units = number.sizes()
    inside = any(spot.place is SizeRole.MATRIX and spot.depth for spot in units)
    outside = any(spot.place in SIZES and not spot.depth for spot in units)
    if any(spot.place is SizeRole.LAYERS and spot.depth for spot in units):
        return FieldMeaning.EXPERTS if inside else FieldMeaning.LAYERS
    if any(spot.place is SizeRole.ROWS for spot in number.moved):
        return FieldMeaning.ROWS
    if {2, 4, 8} <= {*number.times.values()}:
        return FieldMeaning.CHANNELS
    if inside and outside:
        return FieldMeaning.HIDDEN
    if number.divides():
        return FieldMeaning.HEADS
    if any(spot.place is SizeRole.EMBEDDED and not spot.depth for spot in units):
        return FieldMeaning.HIDDEN
    if any(spot.place is SizeRole.STACK and spot.depth for spot in units):
        return FieldMeaning.EXPERTS
    if number.scaled:
        return FieldMeaning.HEAD_DIM
    matrices = (times for spot, times in number.times.items() if spot.place is SizeRole.MATRIX and spot.depth)
    most = max(matrices, default=Fraction(0))
    is_width = (inside or most == HALF) and most <= MOST_FUSED and number.value >= LEAST_WIDTH
    return FieldMeaning.WIDTH if is_width else None


def measure_fields(make: Callable[[Any], nn.Module], config: Any) -> list[ConfigField]:
    """All numbers of a config above one, with what they set in the model that ``make`` builds of it."""
    before = size_occurrences(make(config))
    found = []
    for path, value in list_entries(config):
        for other in (2 * value, value + 1, value // 2):
            try:
                after = size_occurrences(make(with_fields(config, {path: other})))
            except Exception:  # not every number can be doubled
                continue
            moved = {s: (n, after[s]) for s, n in before.items() if s in after and after[s] != n}
            found.append(ConfigField(path, value, other, moved, before.keys() != after.keys()))
            break
    return found


def integer_fields(config: Any, at: Path = ()) -> Iterator[tuple[Path, int]]:
    """The integers above one in a config and in the configs inside of it."""
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if is_config(value):
            yield from integer_fields(value, (*at, name))
        elif type(value) is int and value > 1:
            yield (*at, name), value


def list_entries(config: Any) -> Iterator[tuple[Path, int]]:
    """The integers above one, and those that a list has in each place."""
    yield from integer_fields(config)
    yield from ((path, values[0]) for path, values in list_fields(config) if values[0] > 1 and len(set(values)) == 1)


def list_fields(config: Any, at: Path = (), of: type = int) -> Iterator[tuple[Path, Sequence[Any]]]:
    """The lists of integers, or of something else, in a config and in the configs inside of it."""
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if is_config(value):
            yield from list_fields(value, (*at, name), of)
        elif isinstance(value, list | tuple) and value and all(type(n) is of for n in value):
            yield (*at, name), value


def with_fields(config: Any, numbers: Mapping[Path, Any]) -> Any:
    """A copy of a config with other numbers; a list is filled with them."""
    config = copy.deepcopy(config)
    for path, number in numbers.items():
        place = sub_config(config, path[:-1])
        old = vars(place)[path[-1]]  # a config may refuse to name one number for layers that differ
        is_list = isinstance(old, list | tuple) and not isinstance(number, list | tuple)
        setattr(place, path[-1], type(old)([number] * len(old)) if is_list else number)
    return config


def sub_config(config: Any, path: Path) -> Any:
    for name in path:
        config = vars(config)[name]
    return config


def nested_configs(config: Any) -> Iterator[Any]:
    """A config and those inside of it."""
    yield config
    for value in vars(config).values():
        if is_config(value):
            yield from nested_configs(value)


def is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


def size_occurrences(model: nn.Module) -> dict[SizeOccurrence, float]:
    """Every number that a model is built of: sizes of its tensors, lengths of its lists, its modules' attributes."""
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    found: dict[SizeOccurrence, float] = {}
    for path, module in model.named_modules():
        depth = sum(path.startswith(f"{above}.") for above in lists)
        if isinstance(module, nn.ModuleList):
            found[SizeOccurrence(path, 0, SizeRole.LAYERS, depth)] = len(module)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            for dim, size in enumerate(tensor.shape if tensor is not None else ()):
                if (place := _place(module, name, tensor, dim)) is not None:
                    found[SizeOccurrence(f"{path}.{name}", dim, place, depth)] = size
        for name, value in vars(module).items():
            if type(value) in (int, float):
                found[SizeOccurrence(f"{path}.{name}", 0, SizeRole.ATTRIBUTE, depth)] = value
    return found


def _place(module: nn.Module, name: str, tensor: Any, dim: int) -> SizeRole | None:
    """None for the size of a convolution's kernel."""
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


def build_on_meta(kind: Callable[[Any], nn.Module]) -> Callable[[Any], nn.Module]:
    """What builds a model of a class on the meta device."""

    def make(config: Any) -> nn.Module:
        with torch.device("meta"):
            return kind(config)

    return make
