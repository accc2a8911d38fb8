"""A config with few layers in place of many, of each kind one, and its lists with an entry for each layer cut along."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from shardformer.testing.zoo.kinds import Path
from shardformer.testing.zoo.measure import changed, configs, inner, is_config, lists, numbers

LAYERS, MOST_LAYERS = 2, 8
PATCHES = 4
"""On a side of an image that a part of a model sees."""
STAGES = {"image_size": 64, "window_size": 2}
"""Fields of the image, whose size no measurement tells apart from others; stages halve it."""
KV_SHARED = "num_kv_shared_layers"
"""Field of how many of the last layers have no keys and values of their own; it goes with the number of layers."""

Made = frozenset[tuple[str, str]]
"""What a layer is made of: paths, with ``*`` for each number, and classes of its modules."""


def kind_of(layer: nn.Module) -> Made:
    return frozenset((re.sub(r"\d+", "*", path), type(module).__name__) for path, module in layer.named_modules())


def kinds_of_layers(model: nn.Module) -> frozenset[Made]:
    """The kinds of layers in all lists of layers."""
    return frozenset(kind_of(layer) for layers in _module_lists(model).values() for layer in layers.children())


def more_layers(model: nn.Module) -> int:
    """How many layers a small model needs for one of each kind; 0 where a few will do, or it would be too many."""
    return needed if LAYERS < (needed := kinds_needed(model)) <= MOST_LAYERS else 0


def kinds_needed(model: nn.Module) -> int:
    """With how many layers each list of a model has one of each of its kinds."""
    needed = 0
    for layers in _module_lists(model).values():
        kinds = [kind_of(layer) for layer in layers.children()]
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
        beside = (values for at, values in lists(config) if at[:-1] == path[:-1])
        return path in dict(numbers(config)) and any(len(values) == count for values in beside)

    for path, count in [*numbers(config), *((path, len(kinds)) for path, kinds in lists(config, of=str))]:
        if count not in lengths.values():
            continue
        few = _with_few_layers(config, path, count, first, each)
        if (now := built(few)) is None:
            now = built(few := _with_few_layers(config, path, count, first, each + 1))
        if is_shorter(now) and not (is_of_stages(path, count) and is_shorter(built(changed(few, {path: count})))):
            config, lengths = few, now or lengths
    for path, values in lists(config):
        for most in range(LAYERS, min(max(values), LAYERS + 2)):  # one class asks for as many as it has stages
            few = changed(config, {path: [min(n, most) for n in values]})
            if is_shorter(now := built(few)):
                config, lengths = few, now or lengths
                break
    return config


def small_images(config: Any) -> None:
    """Cuts the image that a part of a model sees, and the one with which a model of stages begins.

    The config of such a model has lists, with a number for each stage.
    """
    for path, size in [*numbers(config)]:
        place = inner(config, path[:-1])
        patch = vars(place).get("patch_size")
        if path[-1] == "image_size" and len(path) > 1 and type(patch) is int:  # of a part, beside a text
            place.image_size = min(size, PATCHES * patch)
            if points := getattr(config, "image_grid_pinpoints", None):  # sizes that images are cut into tiles of
                config.image_grid_pinpoints = [[n * place.image_size // size for n in point] for point in points]
    for path in {path[:-1] for path, values in lists(config) if len(values) > 1}:
        place = inner(config, path)
        if "image_size" in vars(place):
            for name, size in STAGES.items():
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
            for small in (place for place in configs(config) if place.model_type == large.model_type):
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
    place, field = inner(few, path[:-1]), path[-1]
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
