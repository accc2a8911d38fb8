"""Helpers for dotted module paths such as ``model.layers.0``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from shardformer.errors import PolicyError, suggest_similar_names

LIBRARIES = ("torch", "transformers", "timm", "shardformer")
"""Libraries whose modules are known: their dropout is a module, ``drop_prob`` or a config field."""


def has_transposed_weight(module: nn.Module) -> bool:
    """Return whether a linear layer has a weight of shape (in_features, out_features), like Conv1D."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear_or_conv1d(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or has_transposed_weight(module)


OPTIONAL_HINT = " If some models lack this module, end the path with a ?, or set optional=True on the block or stack"


def join_path(*parts: str) -> str:
    return ".".join(filter(None, parts))


def resolve_relative_path(parent_path: str, relative_path: str) -> str:
    return relative_path[1:] if relative_path.startswith(".") else join_path(parent_path, relative_path)


def named_params_and_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all parameters and buffers as (name, tensor) pairs, without duplicates."""
    return [*model.named_parameters(), *model.named_buffers()]


def find_model_configs(model: nn.Module) -> list[Any]:
    """Find the ``config`` objects of all modules in a model, without duplicates."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in configs if hasattr(config, "__dict__")}.values())


def as_path_list(paths: str | Sequence[str]) -> Sequence[str]:
    """Convert a single path to a list, and return a list unchanged."""
    return [paths] if isinstance(paths, str) else paths


def get_submodule_or_none(module: nn.Module, path: str) -> nn.Module | None:
    for part in path.split(".") if path else []:
        child = module._modules.get(part)
        if child is None:
            return None
        module = child
    return module


def get_attribute_by_path_or_none(owner: object, attr_path: str) -> Any:
    """Return the submodule or attribute at a dotted path, or None if there is none."""
    try:
        return attrgetter(attr_path)(owner) if attr_path else owner
    except AttributeError:
        return None


def get_parent_and_attribute_name(model: object, attr_path: str) -> tuple[Any, str]:
    """Split a dotted path into the parent object, or None, and the name of its last attribute."""
    at, _, name = attr_path.rpartition(".")
    return get_attribute_by_path_or_none(model, at), name


def match_paths(path_pattern: str, module_names: Iterable[str]) -> list[str]:
    """Find the module names that match a path pattern. ``*`` in the pattern matches a layer index.

    >>> match_paths("layers.*.blocks", ["layers.0", "layers.0.blocks", "layers.1.blocks", "layers.0.down.blocks"])
    ['layers.0.blocks', 'layers.1.blocks']
    """
    if "*" not in path_pattern:
        return [name for name in module_names if name == path_pattern]
    parts = path_pattern.split(".")
    return [
        name
        for name in module_names
        if len(split := name.split(".")) == len(parts)
        and all(b.isdigit() if a == "*" else a == b for a, b in zip(parts, split, strict=True))
    ]


def get_submodule_or_raise(
    module: nn.Module, path: str, parent_path: str = "", error_hint: str = OPTIONAL_HINT
) -> nn.Module:
    found = get_submodule_or_none(module, path)
    if found is None:
        raise make_module_not_found_error(parent_path, path, module, error_hint)
    return found


def has_submodule(module: nn.Module, path: str, parent_path: str = "") -> bool:
    """Return whether a submodule exists. Raises PolicyError if it is missing and the path does not end with ``?``."""
    there = get_submodule_or_none(module, path.rstrip("?")) is not None
    if not there and not path.endswith("?"):
        raise make_module_not_found_error(parent_path, path, module)
    return there


def get_existing_submodule_paths(
    relative_paths: Sequence[str], parent_path: str, layer: nn.Module, layer_path: str
) -> list[str]:
    """Return the paths at which a layer has a submodule. Raises PolicyError if there are none."""
    paths = [resolve_relative_path(parent_path, name) for name in relative_paths]
    out = [name.rstrip("?") for name in paths if has_submodule(layer, name, layer_path)]
    if not out:
        raise make_module_not_found_error(layer_path, paths[0].rstrip("?"), layer)
    return out


def get_linear_submodule(layer: nn.Module, linear_path: str, layer_path: str) -> nn.Module:
    found = get_submodule_or_raise(layer, linear_path, layer_path)
    if not is_linear_or_conv1d(found):
        raise PolicyError(
            f"{layer_path}.{linear_path} must be an nn.Linear or transformers' Conv1D, but is a "
            f"{type(found).__name__}.",
            remedy="Pass the path of the linear layer itself.",
        )
    return found


def get_num_linear_features(linear: nn.Module, *, return_out_features: bool) -> int:
    weight = linear.weight
    assert isinstance(weight, Tensor)
    return int(weight.shape[int(return_out_features == has_transposed_weight(linear))])


def make_module_not_found_error(
    parent_path: str, missing_path: str, module: nn.Module, hint: str = OPTIONAL_HINT
) -> PolicyError:
    return PolicyError(
        f"The model has no module {join_path(parent_path, missing_path)!r}.",
        remedy=suggest_similar_names(missing_path, [n for n, _ in module.named_modules() if n]) + hint,
    )
