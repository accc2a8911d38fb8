"""Paths in a table of roles: joined, followed, and what is said where they lead nowhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from shardformer.errors import PolicyError, nearest
from shardformer.layers.tensor.linear import is_linear, is_transposed


def join(*parts: str) -> str:
    return ".".join(p for p in parts if p)


def relative(at: str, name: str) -> str:
    return name[1:] if name.startswith(".") else join(at, name)


def find(module: nn.Module, path: str) -> nn.Module | None:
    for part in path.split(".") if path else []:
        child = module._modules.get(part)
        if child is None:
            return None
        module = child
    return module


def value_at(owner: object, path: str) -> Any:
    """What stands at ``path``, a module or any other attribute; None where nothing does."""
    try:
        return attrgetter(path)(owner) if path else owner
    except AttributeError:
        return None


def matching(path: str, names: Iterable[str]) -> list[str]:
    """Which of ``names`` a path stands for, in which ``*`` is an index.

    >>> matching("layers.*.blocks", ["layers.0", "layers.0.blocks", "layers.1.blocks", "layers.0.down.blocks"])
    ['layers.0.blocks', 'layers.1.blocks']
    """
    parts = path.split(".")
    return [
        name
        for name in names
        if len(split := name.split(".")) == len(parts)
        and all(b.isdigit() if a == "*" else a == b for a, b in zip(parts, split, strict=True))
    ]


def module_at(module: nn.Module, path: str) -> nn.Module:
    found = find(module, path)
    if found is None:
        raise no_match("", path, module)
    return found


def existing(names: Sequence[str], at: str, layer: nn.Module, path: str) -> list[str]:
    out = []
    for name in names:
        full = relative(at, name.rstrip("?"))
        if find(layer, full) is not None:
            out.append(full)
        elif not name.endswith("?"):
            raise no_match(path, full, layer)
    if not out:
        raise no_match(path, relative(at, names[0].rstrip("?")), layer)
    return out


def linear_at(layer: nn.Module, name: str, path: str) -> nn.Module:
    found = find(layer, name)
    if found is None:
        raise no_match(path, name, layer)
    if not is_linear(found):
        raise PolicyError(
            f"{path}.{name} is a {type(found).__name__}",
            rule="Columns and rows are nn.Linear or transformers' Conv1D",
            remedy="Name the linear itself",
        )
    return found


def features_of(module: nn.Module, *, out: bool) -> int:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return int(weight.shape[int(out == is_transposed(module))])


def no_match(where: str, name: str, inside: nn.Module) -> PolicyError:
    return PolicyError(
        f"There is no module {join(where, name)!r}",
        rule="Every rule of a policy matches a module",
        remedy=nearest(name, [n for n, _ in inside.named_modules() if n])
        + " Where some models lack it, end the path with a ?, or give the block or stack optional=True",
    )
