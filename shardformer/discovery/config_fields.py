"""Finds out what each integer in a config means by changing it and rebuilding the model on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from fractions import Fraction
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Path = tuple[str, ...]  # names of nested config fields, from the outermost config inward


class SizeLocation(Enum):
    """Kind of model property that has a size, such as a matrix dimension or the length of a ModuleList."""

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
class ModelSizeLocation:
    """A model property that has a size, such as one dimension of a parameter."""

    name: str  # path of the parameter, buffer, list or attribute
    dim: int  # dim of the tensor
    location: SizeLocation
    depth: int  # number of module lists that contain it


@dataclass(frozen=True)
class IntConfigField:
    """An integer config field and the model sizes that change with it."""

    path: Path
    value: int
    changed_value: int
    changed_sizes: Mapping[ModelSizeLocation, tuple[float, float]]  # sizes with ``value`` and with ``changed_value``
    has_changed_structure: bool  # whether the model with ``changed_value`` has different parameters or modules

    @cached_property
    def size_ratios(self) -> dict[ModelSizeLocation, Fraction]:
        """Ratios of model sizes to this config field, for sizes that are proportional to it."""
        return {
            place: Fraction(old) / self.value
            for place, (old, new) in self.changed_sizes.items()
            if isinstance(old, int) and new * self.value == old * self.changed_value
        }

    def compute_matrix_dim_growth_per_unit(self) -> list[Fraction]:
        """Compute how much each matrix dimension in a layer grows if this config field increases by one."""
        inside = (
            pair for place, pair in self.changed_sizes.items() if place.depth and place.location is SizeLocation.MATRIX
        )
        return [Fraction(int(new - old), self.changed_value - self.value) for old, new in inside]

    def get_dependent_matrix_names(self) -> set[str]:
        """Return the names of the layers' weight matrices whose shapes depend on this config field."""
        return {place.name for place in self.changed_sizes if place.location is SizeLocation.MATRIX and place.depth}

    def shrinks_a_tensor_dim_when_increased(self) -> bool:
        """Return whether a larger field value makes a tensor smaller, as more heads reduce the head dim."""
        tensors = [sizes for place, sizes in self.changed_sizes.items() if place.location is not SizeLocation.ATTRIBUTE]
        return any((new - old) * (self.changed_value - self.value) < 0 for old, new in tensors)

    def get_sizes_equal_to_value(self) -> list[ModelSizeLocation]:
        """Return the tensor dimensions and ModuleList lengths that always equal this config field."""
        return [
            place
            for place, times in self.size_ratios.items()
            if times == 1 and place.location is not SizeLocation.ATTRIBUTE
        ]

    def affects_only_derived_attributes(self) -> bool:
        """Return whether this config field changes only module attributes that are computed from it."""
        computed = (
            s.location is SizeLocation.ATTRIBUTE and old != self.value for s, (old, _) in self.changed_sizes.items()
        )
        return bool(self.changed_sizes) and not self.has_changed_structure and all(computed)

    def is_divisor_of_size(self) -> bool:
        """Return whether a layer size is inversely proportional to this field, as the head dim is to the head count."""
        ratio = Fraction(self.value, self.changed_value)
        if any(new == old * ratio**2 != old for old, new in self.changed_sizes.values() if isinstance(old, int)):
            return False  # image patches
        inside = (pair for place, pair in self.changed_sizes.items() if place.depth)
        return any(isinstance(old, int) and old > 1 and new == old * ratio for old, new in inside)

    @cached_property
    def attention_scale_factor_locations(self) -> set[ModelSizeLocation]:
        """Scale factors of attention scores that depend on this config field."""
        factors = ((s, old, new) for s, (old, new) in self.changed_sizes.items() if s.depth and isinstance(old, float))
        return {s for s, old, new in factors if (new - old) * (old - 1) * (self.changed_value - self.value) > 0}


HALF = Fraction(1, 2)  # ratio for a width that is the sum of the gate and up features
SIZES = (SizeLocation.MATRIX, SizeLocation.VECTOR, SizeLocation.CHANNEL, SizeLocation.EMBEDDED)
MIN_WIDTH = 8  # smaller numbers count image channels, audio codebooks or speakers
MAX_FUSED = 4  # largest number of widths that are concatenated in one matrix


class ConfigFieldMeaning(Enum):
    """Possible meanings of an integer config field, such as hidden size or head count."""

    HIDDEN = auto()  # features of the hidden states
    HEADS = auto()
    HEAD_DIM = auto()  # features of a head, or some of them
    WIDTH = auto()  # features inside a layer only, such as those of an MLP, an expert or a low-rank projection
    ROWS = auto()  # rows of an embedding
    POSITIONS = auto()  # rows of a buffer
    CHANNELS = auto()  # channels of the first of several convolutions that each multiply the number of channels
    EXPERTS = auto()
    LAYERS = auto()  # length of a list inside a layer


def infer_field_meanings(all_fields: Sequence[IntConfigField]) -> dict[Path, ConfigFieldMeaning]:
    """Infer the meaning of config fields, such as the hidden size, from the model sizes that depend on them."""
    meanings = {field.path: meaning for field in all_fields if (meaning := _infer_field_meaning(field)) is not None}
    by_heads = {
        place
        for field in all_fields
        if meanings.get(field.path) is ConfigFieldMeaning.HEADS
        for place in field.changed_sizes
    }
    for field in all_fields:
        if meanings.get(field.path) is ConfigFieldMeaning.HEAD_DIM and (
            field.attention_scale_factor_locations & by_heads or _affects_all_matrices(field, all_fields)
        ):
            meanings[field.path] = ConfigFieldMeaning.HIDDEN  # a width that is divided into heads
    hidden = [n.value for n in all_fields if meanings.get(n.path) is ConfigFieldMeaning.HIDDEN]
    for field, other in combinations(all_fields, 2):
        known = {meanings.get(field.path), meanings.get(other.path)}
        shared_tensors = {place.name for place in field.get_sizes_equal_to_value()} & {
            place.name for place in other.get_sizes_equal_to_value()
        }
        pair = (field.value * other.value in hidden and shared_tensors) or _is_size_proportional_to_product(
            field, other
        )
        if pair and not known & {
            ConfigFieldMeaning.HIDDEN,
            ConfigFieldMeaning.EXPERTS,
            ConfigFieldMeaning.ROWS,
            ConfigFieldMeaning.CHANNELS,
        }:
            heads, dim = sorted((field, other), key=lambda n: n.value)
            if (
                meanings.get(heads.path) is ConfigFieldMeaning.HEAD_DIM
                or meanings.get(dim.path) is ConfigFieldMeaning.HEADS
            ):
                heads, dim = dim, heads
            for one, meaning in ((heads, ConfigFieldMeaning.HEADS), (dim, ConfigFieldMeaning.HEAD_DIM)):
                if meanings.get(one.path) not in (ConfigFieldMeaning.HEADS, ConfigFieldMeaning.HEAD_DIM):
                    meanings[one.path] = meaning
    for field in (
        field for field in all_fields if field.path not in meanings and not field.shrinks_a_tensor_dim_when_increased()
    ):
        if (meaning := _guess_head_count_or_head_dim_meaning(field, all_fields, meanings)) is not None:
            meanings[field.path] = meaning
    parts = [n.value for n in all_fields if meanings.get(n.path) is ConfigFieldMeaning.HEAD_DIM]
    least = min(
        (n.value for n in all_fields if meanings.get(n.path) is ConfigFieldMeaning.HEADS),
        default=max(hidden, default=1),
    )
    largest = max([*parts, *(width // least for width in hidden)], default=0)
    for field in all_fields:
        if field.path not in meanings and {o.location for o in field.changed_sizes} - {SizeLocation.ATTRIBUTE} == {
            SizeLocation.BUFFER
        }:
            is_part = field.value <= largest or get_rotary_dim_candidates(field) & {*parts}
            meanings[field.path] = ConfigFieldMeaning.HEAD_DIM if is_part else ConfigFieldMeaning.POSITIONS
    return meanings


def _guess_head_count_or_head_dim_meaning(
    field: IntConfigField, all_fields: Sequence[IntConfigField], known_meanings: Mapping[Path, ConfigFieldMeaning]
) -> ConfigFieldMeaning | None:
    """Guess whether a config field is a head count or a head dim, or return None if it is neither."""
    if any(place.location is SizeLocation.CHANNEL for place in field.changed_sizes):
        return None
    inside = {
        s: k
        for s, k in field.size_ratios.items()
        if s.depth and s.location in (SizeLocation.VECTOR, SizeLocation.MATRIX)
    }
    hidden = {n.value for n in all_fields if known_meanings.get(n.path) is ConfigFieldMeaning.HIDDEN}
    heads = {
        n.value
        for n in all_fields
        if known_meanings.get(n.path) is ConfigFieldMeaning.HEADS and n.path[:-1] == field.path[:-1]
    }
    alone = any(times == 1 and place.dim == 0 for place, times in inside.items())
    shared = any(
        times > MAX_FUSED and times not in hidden and not any(h % times == 0 for h in heads)
        for times in inside.values()
    )
    if len({*inside.values()}) <= 2 and (alone or shared):
        return ConfigFieldMeaning.HEADS
    if (
        not inside
        and field.compute_matrix_dim_growth_per_unit()
        and (field.value not in heads or 1 in field.compute_matrix_dim_growth_per_unit())
    ):
        return ConfigFieldMeaning.HEAD_DIM
    return None


def get_rotary_dim_candidates(field: IntConfigField) -> set[int]:
    """Return possible rotary dimensions for a config field, computed from the buffers that depend on it."""
    return {2 * int(old) for place, (old, _) in field.changed_sizes.items() if place.location is SizeLocation.BUFFER}


def _affects_all_matrices(field: IntConfigField, all_fields: Sequence[IntConfigField]) -> bool:
    """Return whether a config field affects every matrix that another field of the same config affects."""
    neighbors = [n for n in all_fields if n.path[:-1] == field.path[:-1]]
    return len(neighbors) > 1 and field.get_dependent_matrix_names() >= {
        name for other in neighbors for name in other.get_dependent_matrix_names()
    }


def _is_size_proportional_to_product(field: IntConfigField, other_field: IntConfigField) -> bool:
    """Return whether a layer size is proportional to the product of two config fields."""
    times, other_times = field.size_ratios, other_field.size_ratios
    shared = (place for place in times.keys() & other_times.keys() if place.depth)
    return any(times[s] % other_field.value == 0 and other_times[s] % field.value == 0 for s in shared)


def _infer_field_meaning(field: IntConfigField) -> ConfigFieldMeaning | None:
    units = field.get_sizes_equal_to_value()
    inside = any(place.location is SizeLocation.MATRIX and place.depth for place in units)
    outside = any(place.location in SIZES and not place.depth for place in units)
    if any(place.location is SizeLocation.LAYERS and place.depth for place in units):
        return ConfigFieldMeaning.EXPERTS if inside else ConfigFieldMeaning.LAYERS
    if any(place.location is SizeLocation.ROWS for place in field.changed_sizes):
        return ConfigFieldMeaning.ROWS
    if {2, 4, 8} <= {*field.size_ratios.values()}:
        return ConfigFieldMeaning.CHANNELS
    if inside and outside:
        return ConfigFieldMeaning.HIDDEN
    if field.is_divisor_of_size():
        return ConfigFieldMeaning.HEADS
    if any(place.location is SizeLocation.EMBEDDED and not place.depth for place in units):
        return ConfigFieldMeaning.HIDDEN
    if any(place.location is SizeLocation.STACK and place.depth for place in units):
        return ConfigFieldMeaning.EXPERTS
    if field.attention_scale_factor_locations:
        return ConfigFieldMeaning.HEAD_DIM
    matrices = (
        times for place, times in field.size_ratios.items() if place.location is SizeLocation.MATRIX and place.depth
    )
    most = max(matrices, default=Fraction(0))
    is_width = (inside or most == HALF) and most <= MAX_FUSED and field.value >= MIN_WIDTH
    return ConfigFieldMeaning.WIDTH if is_width else None


def measure_config_field_effects(
    build_model: Callable[[Any], nn.Module], config: PreTrainedConfig
) -> list[IntConfigField]:
    """Measure which model sizes depend on each integer config field, by changing one field at a time."""
    before = collect_model_sizes(build_model(config))
    found = []
    for path, value in iter_int_and_uniform_list_fields(config):
        for other in (2 * value, value + 1, value // 2):
            try:
                after = collect_model_sizes(build_model(replace_config_fields(config, {path: other})))
            except Exception:  # the model cannot be built with this number
                continue
            moved = {s: (n, after[s]) for s, n in before.items() if s in after and after[s] != n}
            found.append(IntConfigField(path, value, other, moved, before.keys() != after.keys()))
            break
    return found


def iter_int_fields(config: PreTrainedConfig, path_prefix: Path = ()) -> Iterator[tuple[Path, int]]:
    """Yield the path and value of each integer greater than 1 in a config and its nested configs."""
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if is_model_config(value):
            yield from iter_int_fields(value, (*path_prefix, name))
        elif type(value) is int and value > 1:
            yield (*path_prefix, name), value


def iter_int_and_uniform_list_fields(config: PreTrainedConfig) -> Iterator[tuple[Path, int]]:
    """Yield integer config fields greater than 1, including lists in which all entries are equal."""
    yield from iter_int_fields(config)
    for path, values in iter_list_fields(config):
        if values[0] > 1 and len(set(values)) == 1:
            yield path, values[0]


def iter_list_fields(
    config: PreTrainedConfig, path_prefix: Path = (), item_type: type = int
) -> Iterator[tuple[Path, Sequence[Any]]]:
    """Yield the paths and values of all lists in a config whose items have the type ``item_type``."""
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if is_model_config(value):
            yield from iter_list_fields(value, (*path_prefix, name), item_type)
        elif isinstance(value, list | tuple) and value and all(type(n) is item_type for n in value):
            yield (*path_prefix, name), value


def replace_config_fields(config: PreTrainedConfig, value_by_path: Mapping[Path, Any]) -> PreTrainedConfig:
    """Copy a config, and replace the values of some of its fields.

    If the field is a list and the new value is a number, the number replaces each entry of the list.
    """
    config = copy.deepcopy(config)
    for path, number in value_by_path.items():
        owner = get_sub_config(config, path[:-1])
        old = vars(owner)[path[-1]]  # some configs raise on getattr if layers have different values
        is_list = isinstance(old, list | tuple) and not isinstance(number, list | tuple)
        setattr(owner, path[-1], type(old)([number] * len(old)) if is_list else number)
    return config


def get_sub_config(config: PreTrainedConfig, sub_config_path: Path) -> PreTrainedConfig:
    for name in sub_config_path:
        config = vars(config)[name]
    return config


def iter_config_and_sub_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield a config and, recursively, its nested configs."""
    yield config
    for value in vars(config).values():
        if is_model_config(value):
            yield from iter_config_and_sub_configs(value)


def is_model_config(candidate: Any) -> bool:
    return hasattr(candidate, "to_dict") and hasattr(candidate, "model_type")


def collect_model_sizes(model: nn.Module) -> dict[ModelSizeLocation, float]:
    """Collect the tensor dimensions, ModuleList lengths and numeric module attributes of a model."""
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    found: dict[ModelSizeLocation, float] = {}
    for path, module in model.named_modules():
        depth = sum(path.startswith(f"{above}.") for above in lists)
        if isinstance(module, nn.ModuleList):
            found[ModelSizeLocation(path, 0, SizeLocation.LAYERS, depth)] = len(module)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            for dim, size in enumerate(tensor.shape if tensor is not None else ()):
                if (role := _get_size_location(module, name, tensor, dim)) is not None:
                    found[ModelSizeLocation(f"{path}.{name}", dim, role, depth)] = size
        for name, value in vars(module).items():
            if type(value) in (int, float):
                found[ModelSizeLocation(f"{path}.{name}", 0, SizeLocation.ATTRIBUTE, depth)] = value
    return found


def _get_size_location(module: nn.Module, tensor_name: str, tensor: Tensor, dim: int) -> SizeLocation | None:
    """Classify a parameter or buffer dimension, or return None for spatial dimensions of a convolution kernel."""
    if tensor_name in module._buffers:
        return SizeLocation.BUFFER
    if tensor.dim() == 1:
        return SizeLocation.VECTOR
    if isinstance(module, nn.Embedding):
        return (SizeLocation.ROWS, SizeLocation.EMBEDDED)[dim]
    if tensor.dim() == 2:
        return SizeLocation.MATRIX
    if hasattr(module, "kernel_size"):
        return SizeLocation.CHANNEL if dim < 2 else None
    return SizeLocation.STACK if dim == 0 else SizeLocation.MATRIX


def make_meta_model_builder(model_cls: Callable[[Any], nn.Module]) -> Callable[[Any], nn.Module]:
    """Return a function that builds ``model_cls`` on the meta device from a config."""

    def build_on_meta(config: PreTrainedConfig) -> nn.Module:
        with torch.device("meta"):
            return model_cls(config)

    return build_on_meta
