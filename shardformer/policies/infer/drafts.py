"""From what flowed to roles: for each group of linears the ways in which a role table could describe it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from torch import nn

from shardformer.policies.infer.flow import Flow, Group
from shardformer.policies.paths import features_of
from shardformer.policies.roles import MLP, Attention

HEADS = ("num_attention_heads", "num_key_value_heads")


@dataclass
class DraftedStack:
    """A stack of layers, and for each block of a layer its candidates.

    Args:
        layers: path of the ModuleList.
        blocks: for each block, the roles that could describe it.
        final_norm: path of the norm behind the last layer.
        context: path of a module and its argument that bring another stack's states.
    """

    layers: str
    blocks: list[list[Attention | MLP]] = field(default_factory=list)
    final_norm: str | None = None
    context: tuple[str, str] | None = None


@dataclass
class Draft:
    """All stacks of a model, and the groups that stand in none or fit no role."""

    stacks: list[DraftedStack]
    left: list[Group]


def draft(model: nn.Module, flow: Flow) -> Draft:
    """The candidates for every group that stands in a stack of layers; the first layer with a block speaks for all."""
    stacks: dict[str, DraftedStack] = {}
    seen: set[tuple[str, str]] = set()
    left = []
    for group in flow.groups:
        layers, index = _stack_of(model, group)
        if layers is None:
            left.append(group)
            continue
        stack = stacks.setdefault(layers, DraftedStack(layers))
        inside = group.row[len(f"{layers}.{index}.") :]
        if (layers, inside) in seen:
            continue
        seen.add((layers, inside))
        roles = list(_roles(model, flow, group, f"{layers}.{index}"))
        if not roles:
            left.append(group)
            continue
        stack.blocks.append(roles)
        if group.apart and stack.context is None:
            stack.context = _context(model, flow, group, layers)
    for stack in stacks.values():
        stack.final_norm = _final_norm(model, flow, stack.layers)
    return Draft([stack for stack in stacks.values() if stack.blocks], left)


def _stack_of(model: nn.Module, group: Group) -> tuple[str | None, int]:
    """The outermost list of modules that all of the group stands in, in one layer of it."""
    parts = group.row.split(".")
    for i, part in enumerate(parts):
        path, prefix = ".".join(parts[:i]), ".".join(parts[: i + 1])
        if part.isdigit() and isinstance(model.get_submodule(path), nn.ModuleList):
            members = [group.entry, *group.columns]
            return (path, int(part)) if all(f"{m}.".startswith(f"{prefix}.") for m in members) else (None, 0)
    return None, 0


def _roles(model: nn.Module, flow: Flow, group: Group, layer: str) -> Iterator[Attention | MLP]:
    at = group.entry[len(layer) + 1 :]
    width = _features(model, group.row, out=False)

    def inside(path: str) -> str:
        return (
            path[len(group.entry) :].lstrip(".") if f"{path}.".startswith(f"{group.entry}.") else (path[len(layer) :])
        )

    down = inside(group.row)
    if group.attends:
        yield from _attentions(model, flow, group, at, {c: inside(c) for c in group.columns}, down, width)
        return
    if group.apart:
        return
    features = {_features(model, c, out=True) for c in group.columns}
    if len(features) == 1 and (out := features.pop()) % width == 0:
        ups = [inside(c) for c in group.columns]
        yield MLP(at, up=ups if len(ups) > 1 else ups[0], down=down, fused=out // width)


def _attentions(
    model: nn.Module, flow: Flow, group: Group, at: str, names: dict[str, str], out: str, width: int
) -> Iterator[Attention]:
    features = [_features(model, c, out=True) for c in group.columns]
    tables = [
        f"{path[len(group.entry) + 1 :]}?"
        for path, module in model.named_modules()
        if path.startswith(f"{group.entry}.") and isinstance(module, nn.Embedding)
    ]
    projections = _projections(group, names)
    for heads, kv_heads, said in _head_counts(model, group, features, width):
        numbers = _counted(flow, group, heads, kv_heads, width)
        ways = [numbers, {n: kind for n, kind in numbers.items() if kind != "width"}, {}]
        if hasattr(model.get_submodule(group.entry), "config"):
            ways.append(numbers | {f"config.{n}": kind for n, kind in _config_counts(model, group, heads, kv_heads)})
        fused = len(features) == 1 or (len(features) == 2 and "kv" in projections)
        entries = [None] * group.enters + [names[group.columns[0]]] * (len(group.columns) > len(group.apart) + 1)
        for entry, interleaved, attributes in product(entries, (False, True)[: 1 + fused], _distinct(ways)):
            yield Attention(
                at, out, **projections, interleaved=interleaved, attributes=attributes, tables=tables, entry=entry,
                reads_context=bool(group.apart), **said,
            )  # fmt: skip


def _projections(group: Group, names: dict[str, str]) -> dict[str, Any]:
    """Which projection is which: by the letters of their names, and otherwise in the order of their calls."""
    if len(names) == 1:
        return {"qkv": next(iter(names.values()))}
    if len(names) == 2:
        return dict(zip(("q", "kv"), names.values(), strict=True))
    if len(names) != 3:
        return {}
    letters = {re.sub(r"(^|.*\.)", "", name)[:1].lower(): name for name in names.values()}
    if set(letters) == {"q", "k", "v"}:
        return {letter: letters[letter] for letter in "qkv"}
    return dict(zip("qkv", names.values(), strict=True))


def _head_counts(
    model: nn.Module, group: Group, features: list[int], width: int
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(query heads, KV heads, how an Attention says so) that fit the shapes, those that every config has first."""
    config: Any = getattr(model, "config", None)
    fields = {n: v for n, v in _fields(config).items() if "head" in n and not n.endswith(("dim", "size"))}
    usual = {name: getattr(config, name, None) for name in HEADS}
    heads_of = {**{n: v for n, v in usual.items() if isinstance(v, int)}, **fields}
    found = set()
    for (name, heads), (kv_name, kv_heads) in product(heads_of.items(), [("", 0), *heads_of.items(), ("1", 1)]):
        kv = kv_heads or heads
        if heads < 1 or width % heads or heads % kv or (heads, kv) in found:
            continue
        dim = width // heads
        if sorted(features) not in (
            sorted([heads * dim, kv * dim, kv * dim]),
            sorted([heads * dim, 2 * kv * dim]),
            [(heads + 2 * kv) * dim],
        ):
            continue
        found.add((heads, kv))
        usual_kv = usual[HEADS[1]] if isinstance(usual[HEADS[1]], int) and usual[HEADS[1]] else usual[HEADS[0]]
        said: dict[str, Any] = {}
        if heads != usual[HEADS[0]] or kv != usual_kv:
            said = {"num_heads": name, "num_kv_heads": int(kv_name) if kv_name.isdigit() else (kv_name or name)}
        yield heads, kv, said


def _fields(config: Any) -> dict[str, int]:
    return {n: v for n, v in vars(config).items() if type(v) is int} if config is not None else {}


def _counted(flow: Flow, group: Group, heads: int, kv_heads: int, width: int) -> dict[str, str]:
    """What the numbers count that the attention's module read, where it is heads or their features."""
    kinds: dict[str, str] = {}
    for name, value in flow.numbers.get(group.entry, {}).items():
        about_kv = "kv" in name or "key_value" in name
        if "group" in name and value == heads // kv_heads:
            kinds[name] = "groups"
        elif value == kv_heads and (about_kv or kv_heads not in (heads, 1)):
            kinds[name] = "kv_heads"
        elif value == heads:
            kinds[name] = "heads"
        elif value == heads // kv_heads > 1:
            kinds[name] = "groups"
        elif value == width:
            kinds[name] = "width"
    return kinds


def _config_counts(model: nn.Module, group: Group, heads: int, kv_heads: int) -> Iterator[tuple[str, str]]:
    config: Any = model.get_submodule(group.entry).config
    for name, kind, count in ((HEADS[0], "heads", heads), (HEADS[1], "kv_heads", kv_heads)):
        if getattr(config, name, None) == count:
            yield name, kind


def _distinct(ways: list[dict[str, str]]) -> list[dict[str, str]]:
    return [way for i, way in enumerate(ways) if way not in ways[:i]]


def _context(model: nn.Module, flow: Flow, group: Group, layers: str) -> tuple[str, str] | None:
    source = next(iter(flow.inputs[group.apart[0]].values()))
    for path in sorted(flow.inputs, key=len):
        for name, x in flow.inputs[path].items():
            if x is source and f"{layers}.".startswith(f"{path}." if path else ""):
                if name.isdigit():
                    name = list(inspect.signature(model.get_submodule(path).forward).parameters)[int(name)]
                return path, name
    return None


def _final_norm(model: nn.Module, flow: Flow, layers: str) -> str | None:
    last = f"{layers}.{len(list(model.get_submodule(layers).children())) - 1}"
    out = flow.outputs.get(last)
    for path, given in flow.inputs.items():
        first = next(iter(given.values()), None)
        if first is out and out is not None and not path.startswith(f"{layers}."):
            module = model.get_submodule(path)
            if "norm" in type(module).__name__.lower() and not list(module.children()):
                return path
    return None


def _features(model: nn.Module, path: str, *, out: bool) -> int:
    return features_of(model.get_submodule(path), out=out)
