"""Shrinks a config: few layers, each kind once, and sizes that differ from each other."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import torch
from torch import nn

from shardformer.discovery.config_fields import (
    ConfigField,
    FieldMeaning,
    Path,
    SizeRole,
    build_on_meta,
    field_meanings,
    integer_fields,
    is_config,
    list_entries,
    list_fields,
    measure_fields,
    nested_configs,
    rotary_features,
    sub_config,
    with_fields,
)
from shardformer.errors import PolicyError
from shardformer.transformers_compat import load_transformers

LAYERS, MOST_LAYERS = 2, 8
PATCHES = 4
"""On a side of an image that a part of a model sees."""
STAGE_FIELDS = {"image_size": 64, "window_size": 2}
"""Fields of the image, whose size no measurement tells apart from others; stages halve it."""
KV_SHARED = "num_kv_shared_layers"
"""Field of how many of the last layers have no keys and values of their own; it goes with the number of layers."""

BuildModel = frozenset[tuple[str, str]]
"""What a layer is made of: paths, with ``*`` for each number, and classes of its modules."""


def layer_kind(layer: nn.Module) -> BuildModel:
    return frozenset((re.sub(r"\d+", "*", path), type(module).__name__) for path, module in layer.named_modules())


def layer_kinds(model: nn.Module) -> frozenset[BuildModel]:
    """The kinds of layers in all lists of layers."""
    return frozenset(layer_kind(layer) for layers in _module_lists(model).values() for layer in layers.children())


def min_layers(model: nn.Module) -> int:
    """How many layers a small model needs for one of each kind; 0 where a few will do, or it would be too many."""
    return needed if LAYERS < (needed := layers_per_kind(model)) <= MOST_LAYERS else 0


def layers_per_kind(model: nn.Module) -> int:
    """With how many layers each list of a model has one of each of its kinds."""
    needed = 0
    for layers in _module_lists(model).values():
        kinds = [layer_kind(layer) for layer in layers.children()]
        needed = max([needed, *(i + 1 for i, kind in enumerate(kinds) if kind not in kinds[:i])])
    return needed


def _module_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    return {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}


def fewer_layers(config: Any, model: nn.Module, make: Callable[[Any], nn.Module], first: int, each: int) -> Any:
    """The config with few layers in each list of the model: the ``first`` ones, and ``each`` so many of each kind.

    Which of its fields count layers is tried: with fewer, a list of the model is shorter. Where a model with ``each``
    so many cannot be built, since layers share weights, there is one more of each kind.
    """
    lengths = _lengths(model)

    def built(candidate: Any) -> dict[str, int] | None:
        """The lengths of the lists with this config; None where it is none."""
        try:
            return _lengths(make(copy.deepcopy(candidate)))
        except Exception:  # it is something else
            return None

    def is_shorter(now: dict[str, int] | None) -> bool:
        return now is not None and any(now.get(name, length) < length for name, length in lengths.items())

    def is_of_stages(path: Path, count: int) -> bool:
        """Whether lists beside it alone may make the model shorter: then it counts something else."""
        beside = (values for at, values in list_fields(config) if at[:-1] == path[:-1])
        return path in dict(integer_fields(config)) and any(len(values) == count for values in beside)

    for path, count in [*integer_fields(config), *((path, len(kinds)) for path, kinds in list_fields(config, of=str))]:
        if count not in lengths.values():
            continue
        few = _with_few_layers(config, path, count, first, each)
        if (now := built(few)) is None:
            now = built(few := _with_few_layers(config, path, count, first, each + 1))
        if is_shorter(now) and not (is_of_stages(path, count) and is_shorter(built(with_fields(few, {path: count})))):
            config, lengths = few, now or lengths
    for path, values in list_fields(config):
        for most in range(LAYERS, min(max(values), LAYERS + 2)):  # one class asks for as many as it has stages
            few = with_fields(config, {path: [min(n, most) for n in values]})
            if is_shorter(now := built(few)):
                config, lengths = few, now or lengths
                break
    return config


def small_images(config: Any) -> None:
    """Cuts the image that a part of a model sees, and the one with which a model of stages begins.

    The config of such a model has lists, with a number for each stage.
    """
    for path, size in [*integer_fields(config)]:
        place = sub_config(config, path[:-1])
        patch = vars(place).get("patch_size")
        if path[-1] == "image_size" and len(path) > 1 and type(patch) is int:  # of a part, beside a text
            place.image_size = min(size, PATCHES * patch)
            if points := getattr(config, "image_grid_pinpoints", None):  # sizes that images are cut into tiles of
                config.image_grid_pinpoints = [[n * place.image_size // size for n in point] for point in points]
    for path in {path[:-1] for path, values in list_fields(config) if len(values) > 1}:
        place = sub_config(config, path)
        if "image_size" in vars(place):
            for name, size in STAGE_FIELDS.items():
                if (old := vars(place).get(name)) is not None:
                    setattr(place, name, type(old)([size] * len(old)) if isinstance(old, list | tuple) else size)


def small_rotations(config: Any, model: nn.Module) -> None:
    """Cuts the lists of how many features of a head are turned by each of several positions: time, height, width.

    ``model`` is the large one: modules of it have them, where no config does.
    """
    for module in model.modules():
        sections: Any = getattr(module, "mrope_section", None)
        large: Any = getattr(module, "config", None)
        if isinstance(sections, list | tuple) and len(sections) and is_config(large):
            for small in (place for place in nested_configs(config) if place.model_type == large.model_type):
                if isinstance(rope := getattr(small, "rope_parameters", None), dict):
                    share = rope.get("partial_rotary_factor", getattr(small, "partial_rotary_factor", None)) or 1
                    total, rest = int(_head_dim(small) * share) // 2, len(sections) - 1
                    rope["mrope_section"] = [total - rest * (total // (rest + 1)), *[total // (rest + 1)] * rest]


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _lengths(model: nn.Module) -> dict[str, int]:
    """How many layers each list or chain of modules has; one of embeddings or heads has none."""
    found = (
        (path, [*m.children()]) for path, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)
    )
    return {path: len(layers) for path, layers in found if any(any(layer.children()) for layer in layers)}


def _with_few_layers(config: Any, path: Path, count: int, first: int, each: int) -> Any:
    """A copy with fewer layers in one of its configs, whose lists that have an entry for each layer are cut."""
    few = copy.deepcopy(config)
    place, field = sub_config(few, path[:-1]), path[-1]
    fields = {name: value for name, value in vars(place).items() if not name.startswith("_")}
    shared = fields.get(KV_SHARED) or 0
    of_each = {n: v for n, v in fields.items() if isinstance(v, list | tuple) and len(v) == count}
    kinds = list(zip(*[v for v in of_each.values() if not _numbered(v)], [i < count - shared for i in range(count)]))
    chosen = {i for i, kind in enumerate(kinds) if i < first or kinds[:i].count(kind) < each}
    rest = [i for i in range(count) if i not in chosen]
    kept = sorted({*chosen, *rest[: max(0, LAYERS - len(chosen))]})
    if field not in of_each:
        setattr(place, field, len(kept))
    for name, values in of_each.items():
        setattr(place, name, type(values)(values[i] for i in (range(len(kept)) if _numbered(values) else kept)))
    if shared:
        setattr(place, KV_SHARED, sum(i >= count - shared for i in kept))
    return few


def _numbered(values: Sequence[Any]) -> bool:
    """Whether a list counts the layers, and so tells no kinds apart."""
    return all(type(v) is int for v in values) and list(values) == list(range(values[0], values[0] + len(values)))


@dataclass(frozen=True)
class SmallSizes:
    """Of a small model. No two are equal, and most do not divide by four.

    Args:
        heads: the largest number of heads in a config; ``fewer`` and ``more`` are for others that divide it or that it
            divides (KV heads, heads of state spaces).
        widths: of what is inside the layers alone, from the largest: MLPs, experts, low ranks.
    """

    heads: int = 6
    fewer: int = 2
    more: int = 12
    head_dim: int = 8
    widths: Sequence[int] = (70, 20, 16, 14, 10)
    words: int = 127
    positions: int = 64
    fewer_channels: int = 1  # by how many they are divided
    experts: int = 16

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim


ODD = SmallSizes()
EVEN = SmallSizes(heads=16, more=32, head_dim=32, widths=(128, 64, 48, 40, 24))
"""For configs that ask for powers of two, or turn only a quarter of a head: so many heads that four ranks have some of
each of four partitions."""
MANY_WORDS = 2**14
"""For classes that name a token by a number of their own, once nothing else has helped."""
NAMED: Mapping[str, Mapping[str, int]] = {
    "mm_tokens_per_image": {"mm_tokens_per_image": 4},  # a square, and no more than a small image has patches
    "attention_window": {"attention_window": 8},  # a batch is padded to a multiple of it
    "num_random_blocks": {"num_random_blocks": 1, "block_size": 1},  # a short batch is attended to without blocks
}
"""Field -> numbers that a config with it gets: they show in no size of a model, and a short batch needs them small."""
RESERVED = 8
"""Of the last words of a small vocabulary: tokens that stand for images and the like, and nothing else in a batch."""
SMALL_NUMEL = 20_000_000
"""Of parameters; a model up to this size is its own twin where its config cannot be shrunk."""
FEWER_CHANNELS = 4
"""By how many those of the first convolution are divided, where a model is large with as many as it has."""


class ConfigShrinker:
    """Small configs for models of the class of ``model``: what its numbers count is measured once for all of them."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.make = model, build_on_meta(type(model))
        self._few: dict[tuple[int, int], Any] = {}
        every = self._with_layers(0, 1)
        if layer_kinds(model) - layer_kinds(self.make(copy.deepcopy(every))):
            every = self._with_layers(layers_per_kind(model), 1)
        self.found = [number for number in measure_fields(self.make, every) if number.path[-1] not in STAGE_FIELDS]
        self.kinds = field_meanings(self.found)

    def _with_layers(self, first: int, each: int) -> Any:
        if (first, each) not in self._few:
            self._few[first, each] = fewer_layers(copy.deepcopy(self.model.config), self.model, self.make, first, each)
        return self._few[first, each]

    def numel(self, config: Any) -> int:
        try:
            return sum(p.numel() for p in self.make(copy.deepcopy(config)).parameters())
        except Exception:  # whoever builds it says why
            return 0

    def config(self, *, even: bool = False, layers: int = 0, anew: bool = False) -> Any:
        """A config with few layers and small numbers, which keeps the relations of the head counts.

        ``even`` asks for sizes that are powers of two, ``layers`` for the first so many layers, in place of one of each
        kind that the config's lists tell apart. ``anew`` has the config's class derive again from the small fields what
        it derived from the large ones.
        """
        sizes = replace(EVEN if even else ODD, words=MANY_WORDS if anew else ODD.words)
        every = {path for path, _ in list_entries(self.model.config)}
        named = {(*p[:-1], name): n for p in every if p[-1] in NAMED for name, n in NAMED[p[-1]].items()}
        named = {path: n for path, n in named.items() if path in every}
        few = self._with_layers(layers, 0 if layers else 1)
        small = with_fields(few, small_numbers(self.found, self.kinds, sizes) | named)
        if self.numel(small) > SMALL_NUMEL:
            small = with_fields(
                few, small_numbers(self.found, self.kinds, replace(sizes, fewer_channels=FEWER_CHANNELS)) | named
            )
        given: dict[str, int] = {}
        for path, value in [*integer_fields(small), *((path, sizes.words) for path in _unnamed_tokens(small))]:
            if path[-1].endswith(("token_id", "token_index")) and value >= sizes.words:
                last = sizes.words - 1 - len(given) % RESERVED  # another one for images than for sounds
                new = 3 if path[-1].startswith(("bos", "eos", "pad", "decoder")) else given.setdefault(path[-1], last)
                setattr(sub_config(small, path[:-1]), path[-1], new)
        small_images(small)
        small_rotations(small, self.model)
        if anew:
            heads = {path for path, kind in self.kinds.items() if kind is FieldMeaning.HEADS}
            small = rebuild_config(small, {path[-1] for path in heads})
        if hasattr(small, "_experts_implementation"):
            small._experts_implementation = "eager"  # the other implementations do not compute in fp64
        return small


def _unnamed_tokens(config: Any) -> list[Path]:
    """Tokens that stand for images or sounds and that a config leaves to who has a tokenizer (InstructBLIP's)."""
    fields = ((name, value) for name, value in vars(config).items() if name.startswith(("image_token", "audio_token")))
    return [(name,) for name, value in fields if value is None]


def shrink_config(config: Any, **how: Any) -> Any:
    """A small config for the class that ``config`` names, with layers of each kind: see ``ConfigShrinker.config``."""
    model = build_meta_model(config)
    return ConfigShrinker(model).config(**{"layers": min_layers(model), **how})


def build_meta_model(config: Any) -> nn.Module:
    """A model of a transformers config, without memory: of its first architecture, or the base model.

    Raises PolicyError for what is no config, or one whose model cannot be built.
    """
    transformers = load_transformers()

    if not hasattr(config, "model_type"):
        raise PolicyError(
            f"infer was given {config!r:.80}",
            rule="It takes a model, or a config of transformers",
            remedy="Build the model first",
        )
    name = first_architecture(config)
    make: Any = model_class(name) or transformers.AutoModel.from_config
    try:
        with torch.device("meta"):
            model: nn.Module = make(copy.deepcopy(config))
    except Exception as error:
        raise PolicyError(
            f"No {name or config.model_type} can be built: {type(error).__name__}: {error!s:.200}",
            rule="A policy is found on a model of these classes",
            remedy="Give the model itself",
        ) from error
    return model


def first_architecture(config: Any) -> str:
    """The name of the class that a config was saved from; empty where it does not say one."""
    named = getattr(config, "architectures", None) or []
    first = named if isinstance(named, str) else next(iter(named), "") if isinstance(named, list | tuple) else ""
    return first if isinstance(first, str) else ""


def model_class(name: str) -> type[nn.Module] | None:
    """The model of transformers that has this name; None for what is no model, as files may name anything."""
    transformers = load_transformers()

    found = getattr(transformers, name, None) if name.isidentifier() else None
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model and found.config_class is not None else None  # type: ignore[union-attr]


def rebuild_config(small: Any, kept: Collection[str]) -> Any:
    """The config as its class makes it of the fields of ``small``, without the sizes that the class itself can tell."""
    default, now, given = vars(type(small)()), vars(small), {}
    for field in (field for field in dataclasses.fields(small) if field.init):
        name = small.attribute_map.get(field.name, field.name)
        derived = field.default is None and default.get(name) is not None and type(now[name]) is int
        if name in now and not (derived and name not in kept):
            given[field.name] = now[name]
    return type(small)(**given)


HEAD = (SizeRole.MATRIX, SizeRole.VECTOR)
"""Where words show, beside the embedding: in a head and its bias."""
LEAST_HEAD = 4
"""Features of a head: fewer are the side of a square of patches that are merged to one."""
MOST_FEATURES = 256
"""Of a head, where nothing tells that a number counts them but the width of all heads."""
BY_CHANCE = 32
"""Numbers below it are equal by chance."""


def same_config_fields(number: ConfigField, others: Sequence[ConfigField]) -> list[ConfigField]:
    """Those of the same config, and not of one inside or around it."""
    return [other for other in others if other.path[:-1] == number.path[:-1]]


def small_numbers(
    found: Sequence[ConfigField], kinds: Mapping[Path, FieldMeaning], sizes: SmallSizes
) -> dict[Path, int]:
    """Number -> the small one that takes its place; those that are not in it stay as they are."""
    small: dict[Path, int] = {}
    of = {kind: [number for number in found if kinds.get(number.path) is kind] for kind in FieldMeaning}
    hidden = {n.value: _hidden(n, of[FieldMeaning.HIDDEN], sizes) for n in of[FieldMeaning.HIDDEN]}
    words = {n.value for n in of[FieldMeaning.ROWS] if any(s.place in HEAD and not s.depth for s in n.sizes())}
    for number in of[FieldMeaning.HEADS]:
        small[number.path] = _chain({n.value for n in same_config_fields(number, of[FieldMeaning.HEADS])}, sizes)[
            number.value
        ]
    for number in of[FieldMeaning.HEAD_DIM]:
        dim = sizes.head_dim * _parts(number, same_config_fields(number, of[FieldMeaning.HEAD_DIM]))
        small[number.path] = dim if number.value >= LEAST_HEAD else number.value
    small |= {n.path: _hidden(n, of[FieldMeaning.HIDDEN], sizes) for n in of[FieldMeaning.HIDDEN]}
    for number in of[FieldMeaning.ROWS]:
        small[number.path] = min(number.value, sizes.words if number.value in words else sizes.positions)
    small |= {n.path: min(n.value, sizes.positions) for n in of[FieldMeaning.POSITIONS]}
    small |= {n.path: max(1, n.value // sizes.fewer_channels) for n in of[FieldMeaning.CHANNELS]}
    small |= {n.path: min(n.value, sizes.experts) for n in of[FieldMeaning.EXPERTS]}
    small |= {n.path: min(n.value, LAYERS) for n in of[FieldMeaning.LAYERS]}
    widths = []
    for number in of[FieldMeaning.WIDTH]:
        product = _product(number, same_config_fields(number, found), kinds, small)
        if number.value in hidden or product:
            small[number.path] = product or hidden[number.value]
        else:
            widths.append(number)
    ordered = sorted({n.value for n in widths}, reverse=True)
    small |= {n.path: sizes.widths[min(ordered.index(n.value), len(sizes.widths) - 1)] for n in widths}
    small |= dict(_shares(found, of, small))
    return small | _equal_fields(found, kinds, small)


def _hidden(number: ConfigField, every: Sequence[ConfigField], sizes: SmallSizes) -> int:
    """The small width of hidden states; others than the one that most matrices have stay larger, or smaller."""
    matrices: dict[int, set[str]] = {}
    for other in same_config_fields(number, every):
        matrices.setdefault(other.value, set()).update(other.matrices())
    most = max(matrices, key=lambda value: len(matrices[value]))
    return sizes.hidden * (1 + (number.value > most)) // (1 + (number.value < most))


def _parts(number: ConfigField, beside: Sequence[ConfigField]) -> int:
    """Of how many parts the features of a head consist that others beside it count."""
    if any(a.value + b.value == number.value and a.value != b.value for a, b in combinations(beside, 2)):
        return 2
    part = next((n.value for n in beside if n.value in rotary_features(number)), number.value)
    return max(1, number.value // part)


def _product(
    number: ConfigField, beside: Sequence[ConfigField], kinds: Mapping[Path, FieldMeaning], small: Mapping[Path, int]
) -> int | None:
    """The small width of one that has as many features as all heads of a kind together."""
    for heads, dim in product(beside, beside):
        if kinds.get(heads.path) is FieldMeaning.HEADS and heads.value * dim.value == number.value and heads is not dim:
            if kinds.get(dim.path) is FieldMeaning.HEAD_DIM or (dim.path not in kinds and dim.value <= MOST_FEATURES):
                return small[heads.path] * small.get(dim.path, dim.value)
    return None


def _shares(
    found: Sequence[ConfigField], of: Mapping[FieldMeaning, Sequence[ConfigField]], small: Mapping[Path, int]
) -> Iterator[tuple[Path, int]]:
    """Numbers that are a head's share of a width: with the heads beside them they make up what the hidden size sets."""
    widths = {
        (number.path[:-1], int(times * number.value)): int(times * small[number.path])
        for number in of[FieldMeaning.HIDDEN]
        for spot, times in number.times.items() if spot.depth and times.denominator == 1
    }  # fmt: skip
    for number in found:
        for heads in same_config_fields(number, of[FieldMeaning.HEADS]):
            width = widths.get((number.path[:-1], number.value * heads.value), 0)
            if number.path not in small and width and width % small[heads.path] == 0:
                yield number.path, width // small[heads.path]


def _equal_fields(
    found: Sequence[ConfigField], kinds: Mapping[Path, FieldMeaning], small: Mapping[Path, int]
) -> dict[Path, int]:
    """Numbers that do not tell what they count, but are equal to one that does: beside it, or large."""
    told = (
        FieldMeaning.ROWS,
        FieldMeaning.WIDTH,
        FieldMeaning.HIDDEN,
        FieldMeaning.HEAD_DIM,
        FieldMeaning.HEADS,
    )  # the last one counts
    ordered = [n for kind in told for n in found if kinds.get(n.path) is kind]
    anywhere = {n.value: small[n.path] for n in ordered if n.value >= BY_CHANCE}
    known = {(n.path[:-1], n.value): small[n.path] for n in ordered}
    unknown = [n for n in found if n.path not in small and (n.value >= BY_CHANCE or n.shows_indirectly())]
    new = {n.path: known.get((n.path[:-1], n.value), anywhere.get(n.value)) for n in unknown}
    return {path: size for path, size in new.items() if size is not None}


def _chain(values: set[int], sizes: SmallSizes) -> dict[int, int]:
    """Heads of several kinds in one config -> small numbers, of which one divides another where they do."""
    ordered = sorted(values)
    small = dict.fromkeys(ordered, sizes.heads)
    if len(ordered) > 1 and any(value % ordered[0] == 0 for value in ordered[1:]):
        small[ordered[0]] = sizes.fewer
    if len(ordered) > 2 and any(ordered[-1] % value == 0 for value in ordered[1:-1]):
        small[ordered[-1]] = sizes.more
    return small
