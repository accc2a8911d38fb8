"""What a role says of a module beside its projections: what some models lack, parameters of its own, norms inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeVar

from torch import nn

from shardformer.errors import PolicyError
from shardformer.layout.split import Split
from shardformer.policies.describe import ModulePolicyDescription
from shardformer.policies.heads import HeadLayout
from shardformer.policies.paths import find, relative
from shardformer.policies.roles import Attention

T = TypeVar("T")


def without_lacking(attention: Attention, layer: nn.Module) -> Attention:
    """The attention as this layer has it: what ends in ``?`` and is not there is left out."""

    def projection(name: str | None) -> str | None:
        if name is None or not name.endswith("?"):
            return name
        return name[:-1] if find(layer, relative(attention.at, name[:-1])) is not None else None

    def held(said: Mapping[str, T]) -> dict[str, T]:
        there = {name: _at(layer, relative(attention.at, name.rstrip("?"))) is not None for name in said}
        return {name.rstrip("?"): kind for name, kind in said.items() if there[name] or not name.endswith("?")}

    a = attention
    return replace(
        attention,
        q=projection(a.q),
        k=projection(a.k),
        v=projection(a.v),
        qkv=projection(a.qkv),
        kv=projection(a.kv),
        attributes=held(attention.attributes),
        parameters=held(attention.parameters),
    )


def _at(module: nn.Module | None, path: str) -> object:
    owner_path, _, name = path.rpartition(".")
    owner = None if module is None else find(module, owner_path)
    return getattr(owner, name, None)


def parameter_splits(attention: Attention, layer: nn.Module, layout: HeadLayout) -> dict[str, dict[int, Split]]:
    """Each parameter that the attention names, by its path in the layer, and how its dims are cut."""
    splits = {"heads": layout.query_split(1), "width": layout.query_split()}
    out: dict[str, dict[int, Split]] = {}
    for name, said in attention.parameters.items():
        kind, dim = (said, None) if isinstance(said, str) else said
        path = relative(attention.at, name)
        full = _at(layer, path)
        shape: Sequence[int] = getattr(full, "shape", ())
        if full is None or kind == "inside":
            out[path] = {}  # one that is not there is told by the plan
            continue
        size = splits[kind].full
        dims = [d for d, n in enumerate(shape) if n == size] if dim is None else [dim % max(len(shape), 1)]
        if len(dims) != 1 or shape[dims[0]] != size:
            raise PolicyError(
                f"{path} has the shape {tuple(shape)}, and parameters={{{name!r}: {said!r}}}",
                rule=f"One of its dims has the size of what it counts, here {size}",
                remedy=f"Name the dim too, ({kind!r}, dim), where several have that size, or correct what it counts",
            )
        out[path] = {dims[0]: splits[kind]}
    return out


def merged(descriptions: Sequence[ModulePolicyDescription]) -> ModulePolicyDescription:
    """What several descriptions of one kind of module say together."""
    out = ModulePolicyDescription({}, [], [], {}, [], {})
    for d in descriptions:
        assert out.attribute_replacement is not None and out.sub_module_replacement is not None
        assert out.blocks is not None and out.parameters is not None
        out.attribute_replacement.update(d.attribute_replacement or {})
        out.sub_module_replacement += d.sub_module_replacement or []
        out.blocks += d.blocks or []
        out.parameters.update(d.parameters or {})
    return out


def expert_dims(shapes: Mapping[str, Sequence[int]], down: str, fused: int) -> list[dict[str, int]]:
    """Each way in which the parameters of stacked experts fit together: which dim holds an expert's features.

    Of these ``down`` has one set, and the others ``fused`` times as many; biases without them are left out. Where they
    are as many as the hidden features, several ways fit.
    """
    ways = []
    for at in (2, 1):
        width, hidden = shapes[down][at], shapes[down][3 - at]
        of = {
            name: [d for d in range(1, len(s)) if s[d] == fused * width and (len(s) == 2 or s[3 - d] == hidden)]
            for name, s in shapes.items()
        } | {down: [at]}
        of = {name: dims for name, dims in of.items() if dims or len(shapes[name]) == 3}
        ways += [dict(zip(of, dims, strict=True)) for dims in product(*of.values())]
    return ways
