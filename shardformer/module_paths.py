"""Functions for dotted paths of submodules, such as ``model.layers.0``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from shardformer.errors import PolicyError, suggest_similar_names

LIBRARIES = ("torch", "transformers", "timm", "shardformer")
"""Libraries whose modules are known: their dropout is a module, ``drop_prob`` or a config field."""


def has_transposed_weight(module: nn.Module) -> bool:
    """Return whether a linear layer stores its weight as (in_features, out_features), like transformers' Conv1D."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or has_transposed_weight(module)


OPTIONAL_HINT = " If some models lack this module, end the path with a ?, or set optional=True on the block or stack"


def join_path(*parts: str) -> str:
    return ".".join(filter(None, parts))


def resolve_path(prefix: str, relative_path: str) -> str:
    return relative_path[1:] if relative_path.startswith(".") else join_path(prefix, relative_path)


def list_named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all parameters and buffers of a model as (name, tensor) pairs, without duplicates."""
    return [*model.named_parameters(), *model.named_buffers()]


def find_model_configs(model: nn.Module) -> list[Any]:
    """Return the ``config`` objects of all modules in a model, without duplicates."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in configs if hasattr(config, "__dict__")}.values())


def as_path_list(paths: str | Sequence[str]) -> Sequence[str]:
    """Return a list of paths. A single string is converted to a list with one path."""
    return [paths] if isinstance(paths, str) else paths


def find_submodule(module: nn.Module, path: str) -> nn.Module | None:
    for part in path.split(".") if path else []:
        child = module._modules.get(part)
        if child is None:
            return None
        module = child
    return module


def get_attribute_by_path(owner: object, path: str) -> Any:
    """Return the submodule or attribute at a dotted path, or None if it does not exist."""
    try:
        return attrgetter(path)(owner) if path else owner
    except AttributeError:
        return None


def get_parent_and_attribute_name(model: object, path: str) -> tuple[Any, str]:
    """Return the parent object (or None) and the name of the last attribute in a dotted path."""
    at, _, name = path.rpartition(".")
    return get_attribute_by_path(model, at), name


def match_paths(path: str, names: Iterable[str]) -> list[str]:
    """Return all module names that match a path pattern. A ``*`` in the pattern matches the index of a layer.

    >>> match_paths("layers.*.blocks", ["layers.0", "layers.0.blocks", "layers.1.blocks", "layers.0.down.blocks"])
    ['layers.0.blocks', 'layers.1.blocks']
    """
    if "*" not in path:
        return [name for name in names if name == path]
    parts = path.split(".")
    return [
        name
        for name in names
        if len(split := name.split(".")) == len(parts)
        and all(b.isdigit() if a == "*" else a == b for a, b in zip(parts, split, strict=True))
    ]


def get_submodule_or_raise(module: nn.Module, path: str, where: str = "", hint: str = OPTIONAL_HINT) -> nn.Module:
    found = find_submodule(module, path)
    if found is None:
        raise make_module_not_found_error(where, path, module, hint)
    return found


def submodule_exists(module: nn.Module, path: str, where: str = "") -> bool:
    """Return whether a submodule exists at ``path``. Raises PolicyError if it is missing and has no final ``?``."""
    there = find_submodule(module, path.rstrip("?")) is not None
    if not there and not path.endswith("?"):
        raise make_module_not_found_error(where, path, module)
    return there


def list_existing_submodule_paths(names: Sequence[str], prefix: str, layer: nn.Module, path: str) -> list[str]:
    """Return the paths in ``names`` at which a layer has a submodule. Raises PolicyError if the layer has none."""
    paths = [resolve_path(prefix, name) for name in names]
    out = [name.rstrip("?") for name in paths if submodule_exists(layer, name, path)]
    if not out:
        raise make_module_not_found_error(path, paths[0].rstrip("?"), layer)
    return out


def get_linear_submodule(layer: nn.Module, name: str, path: str) -> nn.Module:
    found = get_submodule_or_raise(layer, name, path)
    if not is_linear(found):
        raise PolicyError(
            f"{path}.{name} must be an nn.Linear or transformers' Conv1D, but is a {type(found).__name__}.",
            remedy="Pass the path of the linear layer itself.",
        )
    return found


def get_num_features(module: nn.Module, *, of_output: bool) -> int:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return int(weight.shape[int(of_output == has_transposed_weight(module))])


def make_module_not_found_error(where: str, name: str, module: nn.Module, hint: str = OPTIONAL_HINT) -> PolicyError:
    return PolicyError(
        f"The model has no module {join_path(where, name)!r}.",
        remedy=suggest_similar_names(name, [n for n, _ in module.named_modules() if n]) + hint,
    )
