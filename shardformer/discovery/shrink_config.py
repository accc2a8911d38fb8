"""Shrinks a model config to one layer of each kind and to small, mostly different sizes."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardformer.discovery import config_fields, example_inputs
from shardformer.discovery.config_fields import (
    ConfigFieldMeaning,
    IntConfigField,
    Path,
    get_sub_config,
    iter_int_fields,
    iter_list_fields,
)
from shardformer.errors import PolicyError
from shardformer.transformers_compat import import_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LAYERS, MAX_LAYERS = 2, 8
PATCHES = 4  # patches per side of the image of a vision submodel
STAGE_FIELDS = {"image_size": 64, "window_size": 2}
"""Small values of image fields, for models whose stages halve the image. Measurement cannot identify these fields."""
KV_SHARED = "num_kv_shared_layers"
"""The field with the number of last layers that reuse keys and values. It depends on the number of layers."""

LayerKind = frozenset[tuple[str, str]]
"""The kind of a layer: the path (with ``*`` for each number) and the class name of each of its modules."""


def replace_numbers(module_path: str) -> str:
    """Replace each number in a path by ``*``, so that the paths of corresponding modules in all layers are equal."""
    return re.sub(r"\d+", "*", module_path)


def get_layer_kind(layer: nn.Module) -> LayerKind:
    """Return the paths and classes of a layer's modules, which are equal for layers of the same kind."""
    return frozenset((replace_numbers(path), type(module).__name__) for path, module in layer.named_modules())


def find_layer_kinds(model: nn.Module) -> frozenset[LayerKind]:
    """Return the kinds of layers in the module lists of a model."""
    return frozenset(
        get_layer_kind(layer) for layers in _find_module_lists(model).values() for layer in layers.children()
    )


def find_missing_module_paths(reduced_model: nn.Module, model: nn.Module) -> list[str]:
    """Find modules with parameters, outside lists of layers, that a small version of the model lacks."""
    paths = {replace_numbers(path) for path, _ in reduced_model.named_modules()}
    lists = tuple(f"{path}." for path, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential))
    outside = [path for path, m in model.named_modules() if m._parameters and not path.startswith(lists)]
    return [path for path in outside if replace_numbers(path) not in paths]


def get_num_layers_to_keep(model: nn.Module) -> int:
    """Return how many layers a small version of a model must keep to include each kind of layer.

    Returns 0 if the default number suffices, or if more than ``MAX_LAYERS`` are needed.
    """
    return needed if LAYERS < (needed := count_first_layers_covering_all_kinds(model)) <= MAX_LAYERS else 0


def count_first_layers_covering_all_kinds(model: nn.Module) -> int:
    """Return how many of the first layers are needed to include every kind of layer."""
    needed = 0
    for layers in _find_module_lists(model).values():
        kinds = [get_layer_kind(layer) for layer in layers.children()]
        needed = max([needed, *(i + 1 for i, kind in enumerate(kinds) if kind not in kinds[:i])])
    return needed


def _find_module_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    return {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}


def reduce_num_layers(
    config: PreTrainedConfig,
    model: nn.Module,
    build_model: Callable[[Any], nn.Module],
    num_first_layers: int,
    num_layers_per_kind: int,
) -> PreTrainedConfig:
    """Reduce a config to its first ``num_first_layers`` layers and the first layers of each kind.

    A field counts layers if a smaller value shortens a module list of the model. If the model cannot be built because
    layers share weights, one more layer of each kind is kept.
    """
    lengths = _get_module_list_lengths(model)

    def try_get_list_lengths(candidate_config: PreTrainedConfig) -> dict[str, int] | None:
        try:
            return _get_module_list_lengths(build_model(copy.deepcopy(candidate_config)))
        except Exception:  # the field does not count layers
            return None

    def has_shorter_list(list_lengths: dict[str, int] | None) -> bool:
        return list_lengths is not None and any(
            list_lengths.get(name, length) < length for name, length in lengths.items()
        )

    def is_num_stages_field(field_path: Path, field_value: int, reduced_config: PreTrainedConfig) -> bool:
        """Return whether a config field is the number of stages, and not the number of layers."""
        neighbors = (values for at, values in iter_list_fields(config) if at[:-1] == field_path[:-1])
        is_candidate = field_path in dict(iter_int_fields(config)) and any(
            len(values) == field_value for values in neighbors
        )
        return is_candidate and has_shorter_list(
            try_get_list_lengths(config_fields.replace_config_fields(reduced_config, {field_path: field_value}))
        )

    kinds = [(path, len(names)) for path, names in iter_list_fields(config, item_type=str)]
    for path, count in [*iter_int_fields(config), *kinds]:
        if count not in lengths.values():
            continue
        few = _remove_layers_from_config(config, path, count, num_first_layers, num_layers_per_kind)
        if (now := try_get_list_lengths(few)) is None:
            now = try_get_list_lengths(
                few := _remove_layers_from_config(config, path, count, num_first_layers, num_layers_per_kind + 1)
            )
        if has_shorter_list(now) and not is_num_stages_field(path, count, few):
            config, lengths = few, now or lengths
    for path, values in iter_list_fields(config):
        for most in range(LAYERS, min(max(values), LAYERS + 2)):  # one class requires as many layers as stages
            few = config_fields.replace_config_fields(config, {path: [min(n, most) for n in values]})
            if has_shorter_list(now := try_get_list_lengths(few)):
                config, lengths = few, now or lengths
                break
    return config


def reduce_image_sizes(config: PreTrainedConfig) -> None:
    """Reduce the image sizes in a config in place, for models with a vision submodel or with stages."""
    for path, size in [*iter_int_fields(config)]:
        place = get_sub_config(config, path[:-1])
        patch = vars(place).get("patch_size")
        if path[-1] == "image_size" and len(path) > 1 and type(patch) is int:  # a vision submodel
            place.image_size = min(size, PATCHES * patch)
            if points := getattr(config, "image_grid_pinpoints", None):  # image sizes for tiling
                config.image_grid_pinpoints = [[n * place.image_size // size for n in point] for point in points]
    for path in {path[:-1] for path, values in iter_list_fields(config) if len(values) > 1}:
        place = get_sub_config(config, path)
        if "image_size" in vars(place):
            for name, size in STAGE_FIELDS.items():
                if (old := vars(place).get(name)) is not None:
                    setattr(place, name, type(old)([size] * len(old)) if isinstance(old, list | tuple) else size)


def reduce_mrope_sections(config: PreTrainedConfig, original_model: nn.Module) -> None:
    """Adapt the multimodal rotary sections (``mrope_section``) of a config to its small head dim, in place.

    The sections are the numbers of features of a head that are rotated by time, height and width. They are read from
    the modules of ``original_model``, the original model, because some configs lack them.
    """
    for module in original_model.modules():
        sections: Any = getattr(module, "mrope_section", None)
        large: Any = getattr(module, "config", None)
        if isinstance(sections, list | tuple) and len(sections) and config_fields.is_model_config(large):
            for small in config_fields.iter_config_and_sub_configs(config):
                rope = getattr(small, "rope_parameters", None)
                if small.model_type == large.model_type and isinstance(rope, dict):
                    share = rope.get("partial_rotary_factor", getattr(small, "partial_rotary_factor", None)) or 1
                    head_dim = getattr(small, "head_dim", None) or small.hidden_size // small.num_attention_heads
                    total, count = int(int(head_dim) * share) // 2, len(sections)
                    size = total // count
                    rope["mrope_section"] = [total - (count - 1) * size, *[size] * (count - 1)]


def _get_module_list_lengths(model: nn.Module) -> dict[str, int]:
    """Return the number of layers in each list of layers, without lists of embeddings or heads."""
    lists = {p: [*m.children()] for p, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)}
    return {path: len(layers) for path, layers in lists.items() if any(any(layer.children()) for layer in layers)}


def _remove_layers_from_config(
    config: PreTrainedConfig, field_path: Path, num_layers: int, num_first_layers: int, num_layers_per_kind: int
) -> PreTrainedConfig:
    """Copy a config with fewer layers, and shorten each list that has one entry per layer."""
    few = copy.deepcopy(config)
    place, field = get_sub_config(few, field_path[:-1]), field_path[-1]
    fields = {name: value for name, value in vars(place).items() if not name.startswith("_")}
    shared = fields.get(KV_SHARED) or 0
    of_each = {n: v for n, v in fields.items() if isinstance(v, list | tuple) and len(v) == num_layers}
    kinds = list(
        zip(
            *[v for v in of_each.values() if not _are_consecutive_integers(v)],
            [i < num_layers - shared for i in range(num_layers)],
        )
    )
    chosen = {i for i, kind in enumerate(kinds) if i < num_first_layers or kinds[:i].count(kind) < num_layers_per_kind}
    remaining = [i for i in range(num_layers) if i not in chosen]
    kept = sorted({*chosen, *remaining[: max(0, LAYERS - len(chosen))]})
    if field not in of_each:
        setattr(place, field, len(kept))
    for name, values in of_each.items():
        setattr(
            place,
            name,
            type(values)(values[i] for i in (range(len(kept)) if _are_consecutive_integers(values) else kept)),
        )
    if shared:
        setattr(place, KV_SHARED, sum(i >= num_layers - shared for i in kept))
    return few


def _are_consecutive_integers(values: Sequence[Any]) -> bool:
    return all(type(v) is int for v in values) and list(values) == list(range(values[0], values[0] + len(values)))


@dataclass(frozen=True)
class ReducedModelSizes:
    """Sizes for a small model. Most of them are not divisible by four, to test uneven sharding."""

    num_heads: int = 6  # head count of a config that has only one
    fewer_heads: int = 2  # another head count that divides ``heads``
    more_heads: int = 12  # another head count, a multiple of ``heads``
    head_dim: int = 8
    widths: Sequence[int] = (70, 20, 16, 14, 10)  # widths inside the layers, such as those of MLPs and experts
    words: int = 127
    num_positions: int = 64
    fewer_channels: int = 1  # divisor of the channels
    num_experts: int = 16
    separate_hidden_sizes: bool = False  # whether nested configs with different hidden sizes keep different sizes

    @property
    def hidden_size(self) -> int:
        return self.num_heads * self.head_dim


ODD = ReducedModelSizes()
EVEN = ReducedModelSizes(num_heads=16, more_heads=32, head_dim=32, widths=(128, 64, 48, 40, 24))
"""Sizes for configs that require powers of two or rotate a quarter of a head. With 16 heads, each of four ranks has
heads of each of four partitions."""
MANY_WORDS = 2**14  # vocabulary size for classes with hard-coded token ids, used as a last attempt
NAMED: Mapping[str, Mapping[str, int]] = {
    "mm_tokens_per_image": {"mm_tokens_per_image": 4},  # a square number, at most the patches of a small image
    "attention_window": {"attention_window": 8},  # batches are padded to a multiple of it
    "num_random_blocks": {"num_random_blocks": 1, "block_size": 1},  # short batches use full attention
}
"""By config field, the values to set if a config has it. They affect no model size, but short batches need them."""
RESERVED = 8  # number of last token ids of a small vocabulary that are reserved for images and other media
SMALL_NUMEL = 20_000_000  # largest number of parameters of a reduced model, and of a model that may be copied
FEWER_CHANNELS = 4
"""Divisor of the channels of the first convolution, for models that would otherwise be too large."""


class ConfigShrinker:
    """Creates small configs for a model, after measuring which sizes each config field controls."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.make = model, config_fields.make_meta_model_builder(type(model))
        self._few: dict[tuple[int, int], PreTrainedConfig] = {}
        every = self._get_config_with_fewer_layers(0, 1)
        if find_layer_kinds(model) - find_layer_kinds(self.make(copy.deepcopy(every))):
            every = self._get_config_with_fewer_layers(count_first_layers_covering_all_kinds(model), 1)
        self.full_width_model = self.make(copy.deepcopy(every))
        measurements = config_fields.measure_config_field_effects(self.make, every)
        self.fields = [field for field in measurements if field.path[-1] not in STAGE_FIELDS]
        self.kinds = config_fields.infer_field_meanings(self.fields)

    def _get_config_with_fewer_layers(self, num_first_layers: int, num_layers_per_kind: int) -> PreTrainedConfig:
        if (num_first_layers, num_layers_per_kind) not in self._few:
            self._few[num_first_layers, num_layers_per_kind] = reduce_num_layers(
                copy.deepcopy(self.model.config), self.model, self.make, num_first_layers, num_layers_per_kind
            )
        return self._few[num_first_layers, num_layers_per_kind]

    @property
    def has_different_hidden_sizes(self) -> bool:
        """Whether nested configs have different hidden sizes, as for a small encoder and a large decoder."""
        hidden = [field for field in self.fields if self.kinds.get(field.path) is ConfigFieldMeaning.HIDDEN]
        return len({_find_main_hidden_size(field, hidden) for field in hidden}) > 1

    def count_model_parameters(self, config: PreTrainedConfig) -> int:
        try:
            return sum(p.numel() for p in self.make(copy.deepcopy(config)).parameters())
        except Exception:  # building the model reports the error
            return 0

    def make_small_config(
        self,
        *,
        even: bool = False,
        layers: int = 0,
        recompute_derived: bool = False,
        separate_hidden_sizes: bool = False,
    ) -> Any:
        """Create a config with few layers and small sizes, in which head counts still divide each other.

        Args:
            even: whether to use the sizes ``EVEN`` instead of ``ODD``.
            layers: the number of first layers to keep. 0 keeps one of each kind that the config's lists distinguish.
            recompute_derived: whether to recompute derived fields of the config from the reduced fields.
            separate_hidden_sizes: whether nested configs with different hidden sizes keep different sizes.
        """
        words = MANY_WORDS if recompute_derived else ODD.words
        sizes = replace(EVEN if even else ODD, words=words, separate_hidden_sizes=separate_hidden_sizes)
        every = {path for path, _ in config_fields.iter_int_and_uniform_list_fields(self.model.config)}
        named = {(*p[:-1], name): n for p in every if p[-1] in NAMED for name, n in NAMED[p[-1]].items()}
        named = {path: n for path, n in named.items() if path in every}
        few = self._get_config_with_fewer_layers(layers, 0 if layers else 1)
        small = config_fields.replace_config_fields(
            few, choose_reduced_field_values(self.fields, self.kinds, sizes) | named
        )
        if self.count_model_parameters(small) > SMALL_NUMEL:
            fewer = replace(sizes, fewer_channels=FEWER_CHANNELS)
            small = config_fields.replace_config_fields(
                few, choose_reduced_field_values(self.fields, self.kinds, fewer) | named
            )
        assigned: dict[str, int] = {}
        for path, value in [
            *iter_int_fields(small),
            *((path, sizes.words) for path in _find_unset_media_token_fields(small)),
        ]:
            if path[-1].endswith(("token_id", "token_index")) and value >= sizes.words:
                last = sizes.words - 1 - len(assigned) % RESERVED  # different ids for images and audio
                new = (
                    3 if path[-1].startswith(("bos", "eos", "pad", "decoder")) else assigned.setdefault(path[-1], last)
                )
                setattr(get_sub_config(small, path[:-1]), path[-1], new)
        reduce_image_sizes(small)
        reduce_mrope_sections(small, self.model)
        if recompute_derived:
            heads = {path[-1] for path, kind in self.kinds.items() if kind is ConfigFieldMeaning.HEADS}
            small = recompute_derived_config_fields(small, heads)
        if hasattr(small, "_experts_implementation"):
            small._experts_implementation = "eager"  # the other implementations do not compute in fp64
        return small


def _find_unset_media_token_fields(config: PreTrainedConfig) -> list[Path]:
    """Return the config fields for image and audio token ids that are still None."""
    fields = ((name, value) for name, value in vars(config).items() if name.startswith(("image_token", "audio_token")))
    return [(name,) for name, value in fields if value is None]


def shrink_config(config: PreTrainedConfig, **shrink_options: Any) -> PreTrainedConfig:
    """Create a small version of a transformers config that keeps one layer of each kind.

    Args:
        shrink_options: options of ``ConfigShrinker.make_small_config``.
    """
    model = build_meta_model(config)
    return ConfigShrinker(model).make_small_config(**{"layers": get_num_layers_to_keep(model), **shrink_options})


def build_meta_model(config: PreTrainedConfig) -> nn.Module:
    """Build a config's first architecture, or else its base model, on the meta device.

    Raises:
        PolicyError: if ``config`` is not a config or its model cannot be built.
    """
    transformers = import_transformers()
    if not hasattr(config, "model_type"):
        raise PolicyError(
            f"derive_policy expects a model or a transformers config, but got {config!r:.80}.",
            remedy="Pass the model that you want to shard.",
        )
    name = get_first_architecture(config)
    make: Any = find_transformers_model_class(name) or transformers.AutoModel.from_config
    try:
        with torch.device("meta"):
            model: nn.Module = make(copy.deepcopy(config))
    except Exception as error:
        architecture = name or config.model_type
        raise PolicyError(
            f"{architecture} cannot be built from its config: {type(error).__name__}: {error!s:.200}.",
            remedy="Fix the config, or pass a model instead of the config.",
        ) from error
    return model


def get_first_architecture(config: PreTrainedConfig) -> str:
    """Return the class name of a config's first architecture, or an empty string if it lists none."""
    named = getattr(config, "architectures", None) or []
    first = named if isinstance(named, str) else next(iter(named), "") if isinstance(named, list | tuple) else ""
    return first if isinstance(first, str) else ""


def find_transformers_model_class(class_name: str) -> type[nn.Module] | None:
    """Return the transformers model class called ``class_name``, or None if there is no such class."""
    transformers = import_transformers()
    found = getattr(transformers, class_name, None) if class_name.isidentifier() else None
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model and found.config_class is not None else None  # type: ignore[union-attr]


def recompute_derived_config_fields(
    small_config: PreTrainedConfig, kept_field_names: Collection[str]
) -> PreTrainedConfig:
    """Recreate a config so that its class recomputes derived fields, except those in ``kept_field_names``."""
    default, now, assigned = vars(type(small_config)()), vars(small_config), {}
    for field in (field for field in dataclasses.fields(small_config) if field.init):
        name = small_config.attribute_map.get(field.name, field.name)
        derived = field.default is None and default.get(name) is not None and type(now[name]) is int
        if name in now and not (derived and name not in kept_field_names):
            assigned[field.name] = now[name]
    return type(small_config)(**assigned)


HEAD = (
    config_fields.SizeLocation.MATRIX,
    config_fields.SizeLocation.VECTOR,
)  # where the vocabulary size occurs in an LM head
MIN_HEAD_DIM = 4
"""Smallest number of features of a head. Smaller numbers are the side of a square of merged patches."""
MAX_HEAD_DIM = 256
"""Largest number of features of a head, for fields that are identified only by the width of all heads."""
MIN_UNAMBIGUOUS = 32  # smaller numbers may be equal by chance


def filter_fields_of_same_config(
    field: IntConfigField, candidate_fields: Sequence[IntConfigField]
) -> list[IntConfigField]:
    """Return the candidate fields that belong to the same config or nested config as ``field``."""
    return [other for other in candidate_fields if other.path[:-1] == field.path[:-1]]


def choose_reduced_field_values(
    all_fields: Sequence[IntConfigField],
    field_meanings: Mapping[Path, ConfigFieldMeaning],
    target_sizes: ReducedModelSizes,
) -> dict[Path, int]:
    """Choose a small value for each config field that can be reduced, by the path of the field."""
    small: dict[Path, int] = {}
    of = {
        kind: [field for field in all_fields if field_meanings.get(field.path) is kind] for kind in ConfigFieldMeaning
    }
    hidden = {
        n.value: _choose_small_hidden_size(n, of[ConfigFieldMeaning.HIDDEN], target_sizes)
        for n in of[ConfigFieldMeaning.HIDDEN]
    }
    words = {
        n.value
        for n in of[ConfigFieldMeaning.ROWS]
        if any(s.location in HEAD and not s.depth for s in n.get_sizes_equal_to_value())
    }
    for field in of[ConfigFieldMeaning.HEADS]:
        counts = {n.value for n in filter_fields_of_same_config(field, of[ConfigFieldMeaning.HEADS])}
        small[field.path] = _choose_small_head_counts(counts, target_sizes)[field.value]
    for field in of[ConfigFieldMeaning.HEAD_DIM]:
        dim = target_sizes.head_dim * _count_parts_per_head(
            field, filter_fields_of_same_config(field, of[ConfigFieldMeaning.HEAD_DIM])
        )
        small[field.path] = dim if field.value >= MIN_HEAD_DIM else field.value
    small |= {
        n.path: _choose_small_hidden_size(n, of[ConfigFieldMeaning.HIDDEN], target_sizes)
        for n in of[ConfigFieldMeaning.HIDDEN]
    }
    for field in of[ConfigFieldMeaning.ROWS]:
        small[field.path] = min(field.value, target_sizes.words if field.value in words else target_sizes.num_positions)
    small |= {n.path: min(n.value, target_sizes.num_positions) for n in of[ConfigFieldMeaning.POSITIONS]}
    small |= {n.path: max(1, n.value // target_sizes.fewer_channels) for n in of[ConfigFieldMeaning.CHANNELS]}
    small |= {n.path: min(n.value, target_sizes.num_experts) for n in of[ConfigFieldMeaning.EXPERTS]}
    small |= {n.path: min(n.value, LAYERS) for n in of[ConfigFieldMeaning.LAYERS]}
    widths = []
    for field in of[ConfigFieldMeaning.WIDTH]:
        product = _choose_small_attention_width(
            field, filter_fields_of_same_config(field, all_fields), field_meanings, small
        )
        if field.value in hidden or product:
            small[field.path] = product or hidden[field.value]
        else:
            widths.append(field)
    ordered = sorted({n.value for n in widths}, reverse=True)
    small |= {n.path: target_sizes.widths[min(ordered.index(n.value), len(target_sizes.widths) - 1)] for n in widths}
    small |= dict(_iter_head_dims_from_hidden_sizes(all_fields, of, small))
    return small | _infer_values_of_equal_fields(all_fields, field_meanings, small)


def _choose_small_hidden_size(
    field: IntConfigField, all_fields: Sequence[IntConfigField], target_sizes: ReducedModelSizes
) -> int:
    """Choose a small hidden size, and preserve whether it is larger or smaller than the main hidden size."""
    most = _find_main_hidden_size(field, all_fields)
    every = sorted({_find_main_hidden_size(other, all_fields) for other in all_fields})
    factor = 1 + every.index(most) if target_sizes.separate_hidden_sizes else 1
    return factor * target_sizes.hidden_size * (1 + (field.value > most)) // (1 + (field.value < most))


def _find_main_hidden_size(field: IntConfigField, all_fields: Sequence[IntConfigField]) -> int:
    """Return the hidden size on which most matrices of the field's config or nested config depend."""
    matrices: dict[int, set[str]] = {}
    for other in filter_fields_of_same_config(field, all_fields):
        matrices.setdefault(other.value, set()).update(other.get_dependent_matrix_names())
    return max(matrices, key=lambda value: len(matrices[value]))


def _count_parts_per_head(field: IntConfigField, sibling_fields: Sequence[IntConfigField]) -> int:
    """Count the parts into which a head dim is divided, such as rotary and non-rotary features."""
    if any(a.value + b.value == field.value and a.value != b.value for a, b in combinations(sibling_fields, 2)):
        return 2
    part = next(
        (n.value for n in sibling_fields if n.value in config_fields.get_rotary_dim_candidates(field)), field.value
    )
    return max(1, field.value // part)


def _choose_small_attention_width(
    field: IntConfigField,
    sibling_fields: Sequence[IntConfigField],
    field_meanings: Mapping[Path, ConfigFieldMeaning],
    reduced_values: Mapping[Path, int],
) -> int | None:
    """Choose a small value for a field that equals head count times head dim, or return None for other fields."""
    for heads, dim in product(sibling_fields, sibling_fields):
        if (
            field_meanings.get(heads.path) is ConfigFieldMeaning.HEADS
            and heads.value * dim.value == field.value
            and heads is not dim
        ):
            if field_meanings.get(dim.path) is ConfigFieldMeaning.HEAD_DIM or (
                dim.path not in field_meanings and dim.value <= MAX_HEAD_DIM
            ):
                return reduced_values[heads.path] * reduced_values.get(dim.path, dim.value)
    return None


def _iter_head_dims_from_hidden_sizes(
    all_fields: Sequence[IntConfigField],
    fields_by_meaning: Mapping[ConfigFieldMeaning, Sequence[IntConfigField]],
    reduced_values: Mapping[Path, int],
) -> Iterator[tuple[Path, int]]:
    """Yield small values for fields that equal a hidden size divided by a head count."""
    widths = {
        (field.path[:-1], int(times * field.value)): int(times * reduced_values[field.path])
        for field in fields_by_meaning[ConfigFieldMeaning.HIDDEN]
        for spot, times in field.size_ratios.items() if spot.depth and times.denominator == 1
    }  # fmt: skip
    for field in all_fields:
        for heads in filter_fields_of_same_config(field, fields_by_meaning[ConfigFieldMeaning.HEADS]):
            width = widths.get((field.path[:-1], field.value * heads.value), 0)
            if field.path not in reduced_values and width and width % reduced_values[heads.path] == 0:
                yield field.path, width // reduced_values[heads.path]


def _infer_values_of_equal_fields(
    all_fields: Sequence[IntConfigField],
    field_meanings: Mapping[Path, ConfigFieldMeaning],
    reduced_values: Mapping[Path, int],
) -> dict[Path, int]:
    """Choose small values for fields of unknown meaning that equal a field of known meaning.

    The known field must belong to the same config, or its value must be too large to be equal by chance.
    """
    # later meanings take precedence
    meanings = (
        ConfigFieldMeaning.ROWS,
        ConfigFieldMeaning.WIDTH,
        ConfigFieldMeaning.HIDDEN,
        ConfigFieldMeaning.HEAD_DIM,
        ConfigFieldMeaning.HEADS,
    )
    ordered = [n for meaning in meanings for n in all_fields if field_meanings.get(n.path) is meaning]
    anywhere = {n.value: reduced_values[n.path] for n in ordered if n.value >= MIN_UNAMBIGUOUS}
    known = {(n.path[:-1], n.value): reduced_values[n.path] for n in ordered}
    unknown = [
        n
        for n in all_fields
        if n.path not in reduced_values and (n.value >= MIN_UNAMBIGUOUS or n.affects_only_derived_attributes())
    ]
    new = {n.path: known.get((n.path[:-1], n.value), anywhere.get(n.value)) for n in unknown}
    return {path: size for path, size in new.items() if size is not None}


def _choose_small_head_counts(head_counts: set[int], target_sizes: ReducedModelSizes) -> dict[int, int]:
    """Choose small head counts that differ, and divide each other as the original head counts do."""
    ordered = sorted(head_counts)
    small = dict.fromkeys(ordered, target_sizes.num_heads)
    if len(ordered) > 1 and any(value % ordered[0] == 0 for value in ordered[1:]):
        small[ordered[0]] = target_sizes.fewer_heads
    if len(ordered) > 2 and any(ordered[-1] % value == 0 for value in ordered[1:-1]):
        small[ordered[-1]] = target_sizes.more_heads
    for at, value in enumerate(ordered):
        if small[value] in [small[other] for other in ordered[at + 1 :]]:
            small[value] = _choose_unused_head_count(value, small, target_sizes)
    return small


def _choose_unused_head_count(head_count: int, small_counts: Mapping[int, int], target_sizes: ReducedModelSizes) -> int:
    """Choose an unused divisor of the hidden size, or return the current choice if none divides as ``head_count`` does.

    If two config fields had equal values in the small model, a policy could name the wrong one of them.
    """
    others = {value: small for value, small in small_counts.items() if value != head_count}

    def divides_as_original(candidate: int) -> bool:
        return all(
            (value % head_count or small % candidate == 0) and (head_count % value or candidate % small == 0)
            for value, small in others.items()
        )

    def rank(candidate: int) -> tuple[int, int]:
        divisible = sum(small % candidate == 0 or candidate % small == 0 for small in others.values())
        return divisible, abs(candidate - target_sizes.num_heads)

    divisors = [n for n in range(2, target_sizes.hidden_size) if target_sizes.hidden_size % n == 0]
    unused = [n for n in divisors if n not in others.values() and divides_as_original(n)]
    return min(unused, key=rank, default=small_counts[head_count])


def match_image_and_text_widths(model: nn.Module, small_config: PreTrainedConfig) -> nn.Module:
    """Rebuild a multimodal model so that its image features match the size of its text embeddings, if possible."""
    made = dict(example_inputs.iter_inputs_for_known_arguments(model))
    if width := example_inputs.get_image_feature_dim(model, made):
        for path, value in config_fields.iter_int_fields(small_config):
            if value == width and len(path) > 1:
                try:
                    other: nn.Module = type(model)(
                        config_fields.replace_config_fields(
                            small_config, {path: example_inputs.get_text_embedding_dim(model)}
                        )
                    )
                    if not example_inputs.get_image_feature_dim(other, made):
                        return other
                except Exception:  # an unrelated field of the same value
                    continue
    return model
