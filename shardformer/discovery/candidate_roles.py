"""Candidate roles for groups of linears, from one traced forward: heads, projections, and attributes to divide.

The tensor-parallel plan of a transformers config, ``config.base_model_tp_plan``, names linears that are sharded by
columns or by rows ("layers.*.mlp.up_proj": "colwise"). It leaves out heads, the numbers that a forward reads, and many
modules, so it only selects among the candidates, and is validated with the whole policy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from operator import attrgetter
from typing import Any

from torch import nn

from shardformer.discovery.forward_trace import ForwardTrace, LinearGroup
from shardformer.module_paths import join_path, match_paths, num_features, resolve_path
from shardformer.policies.lowering import find_expert_dims
from shardformer.policies.roles import MLP, Attention, AttentionInputs, AttentionProjections, Experts, LocalAttr, Role

HEAD_COUNT_FIELDS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class HeadCount:
    """Query and KV heads, and the fields of an Attention that say so where the config's usual ones do not."""

    heads: int
    kv_heads: int
    said: Mapping[str, Any] = field(default_factory=dict)

    def of_config(self, config: Any) -> Iterator[tuple[str, str]]:
        for name, kind, count in (
            (HEAD_COUNT_FIELDS[0], "heads", self.heads),
            (HEAD_COUNT_FIELDS[1], "kv_heads", self.kv_heads),
        ):
            if _field(config, name) == count:
                yield name, kind


def projections_of(names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Which projection could be which: by the letters of their names, or else in the order of their calls."""
    called = list(names.values())
    letters = {re.sub(r"(^|.*\.)", "", name)[:2].lower(): name for name in called}
    by_letter = {letter: name for key, name in letters.items() if (letter := key[:1]) in "qkv" and key != "kv"}
    gates = [name for name in called if name not in by_letter.values()]
    if len(called) == 1:
        return [{"qkv": called[0]}]
    if len(called) == 2:
        return [
            {"q": called[0], "kv": called[1]},
            {"qkv": called[0], "gates": called[1:]},
            {"qkv": called[1], "gates": called[:1]},
        ]
    if set(by_letter) == set("qkv"):
        return [{**by_letter, **({"gates": gates} if gates else {})}]
    if len(called) == 3:
        kv = [{"q": called[0], "kv": called[1], "gates": called[2:]}] if letters.get("kv") else []
        return [dict(zip("qkv", called, strict=True)), *kv]
    return []


def head_counts(
    model: nn.Module,
    at: str,
    projections: Mapping[str, Any],
    features: Mapping[str, int],
    width: int,
    reads_inner: bool,
    head_dim: int = 0,
) -> Iterator[HeadCount]:
    """The counts that fit the shapes, those that every config has first.

    Args:
        head_dim: the features of a head, as they were seen. Of a model without a config the counts of these come first,
            and at last the number itself.
    """
    config: Any = getattr(model, "config", None)
    usual = {name: _field(config, name) for name in HEAD_COUNT_FIELDS}
    heads_of = {
        **{n: v for n, v in usual.items() if type(v) is int},
        **_possible_head_counts(config, model.get_submodule(at)),
    }
    if config is None and head_dim and width % head_dim == 0:
        seen = width // head_dim
        heads_of = dict(sorted({**heads_of, str(seen): seen}.items(), key=lambda item: item[1] != seen))
    found = set()
    for (name, heads), (kv_name, kv_heads) in product(heads_of.items(), [("", 0), *heads_of.items(), ("1", 1)]):
        kv = kv_heads or heads
        if heads < 1 or width % heads or heads % kv or (heads, kv) in found:
            continue
        if not _fits(projections, features, heads, kv, width // heads, reads_inner):
            continue
        found.add((heads, kv))
        usual_kv = (
            usual[HEAD_COUNT_FIELDS[1]]
            if isinstance(usual[HEAD_COUNT_FIELDS[1]], int) and usual[HEAD_COUNT_FIELDS[1]]
            else usual[HEAD_COUNT_FIELDS[0]]
        )
        said: dict[str, Any] = {}
        if heads != usual[HEAD_COUNT_FIELDS[0]] or kv != usual_kv:
            said = {"num_heads": _number_or(name), "num_kv_heads": _number_or(kv_name or name)}
        yield HeadCount(heads, kv, said)


def _number_or(name: str) -> int | str:
    """The number that a name says itself, as no config and no attribute does."""
    return int(name) if name.isdigit() else name


def _possible_head_counts(config: Any, module: nn.Module) -> dict[str, int]:
    """Numbers that could count heads: in the config, in the configs inside it, and of the module's own.

    Those are tried that are called heads; of a config that calls nothing so, all.
    """
    places = {"": config, ".config.": getattr(module, "config", None), ".": module}
    inner = {f"{n}.": c for n, c in _fields(config).items() if hasattr(c, "model_type")}
    every = {
        f"{prefix}{name}": value
        for prefix, place in {**places, **inner}.items()
        for name, value in _fields(place).items()
        if type(value) is int
    }
    called = {n: v for n, v in every.items() if "head" in n.split(".")[-1] and not n.endswith(("dim", "size"))}
    return called or every


def _field(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # a config may refuse to name one number for layers that differ
        return None


def _fields(thing: Any) -> dict[str, Any]:
    return {n: v for n, v in vars(thing).items() if not n.startswith("_")} if thing is not None else {}


def _fits(
    projections: Mapping[str, Any], features: Mapping[str, int], heads: int, kv: int, head_dim: int, reads_inner: bool
) -> bool:
    def has(part: str, *sizes: int) -> bool:
        return part not in projections or features[projections[part]] in sizes

    q = projections.get("q")
    if q is not None and features[q] % heads:
        return False
    unit = features[q] // heads if q is not None else head_dim
    return (
        (q is None or reads_inner or unit == head_dim)
        and has("k", kv * unit)
        and has("v", kv * head_dim)
        and has("qkv", (heads + 2 * kv) * head_dim)
        and (has("kv", 2 * kv * head_dim) or (reads_inner and features[projections["kv"]] % kv == 0))
        and all(features[gate] % heads == 0 for gate in projections.get("gates", ()))
    )


def counted_numbers(numbers: Mapping[str, int], count: HeadCount, width: int) -> dict[str, str]:
    """What the numbers count that an attention's module reads, where it is heads or their features."""
    heads, kv_heads = count.heads, count.kv_heads
    kinds: dict[str, str] = {}
    for name, value in numbers.items():
        about_kv = "kv" in name or "key_value" in name
        if re.search(r"(?<!all_)head_(size|dim)$", name):
            continue  # of one head: where there is only one, in a first stage, it looks like the width of all
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


UNKNOWN = "no role describes it"
LOW_RANK = "it only gives to a projection of an attention"
LEAF_MODULES = "what it gives leaves its layer"
PARTITIONS = 4
"""The cores that a model was first trained on, in whose order its heads still lie (CodeGen)."""


@dataclass(frozen=True)
class BlockCandidates:
    """Linears in a stack of layers that belong together, and the roles that could describe them, likely ones first.

    Args:
        layers: path of the ModuleList, with ``*`` for an index where each stage has one.
        roles: the candidates.
        columns: the paths, in every layer, of what stays whole where none of them holds.
        why: why that is, as far as it is known without trying.
        final_norm: path of the norm behind the last layer.
        context: path of a module and its argument that bring another stack's states.
    """

    layers: str
    roles: Sequence[Role]
    columns: Sequence[str]
    why: str = ""
    final_norm: str | None = None
    context: tuple[str, str] | None = None


def candidate_blocks(model: nn.Module, flow: ForwardTrace) -> list[BlockCandidates]:
    """All blocks, in the order in which the forward comes to them; the first layer with a block speaks for all."""
    blocks, seen = [], set()
    for group in flow.groups:
        place, at = _layer_of(model, group.row, [group.entry, *group.columns]), _layer_of(model, group.row, [])
        key = at and (at[0], _block_path(model, group.row[len(at[1]) + 1 :], at[1], group.attends))
        if place is not None and key not in seen:
            seen.add(key)
            blocks.append(_block(model, flow, group, *place))
        elif place is None and not (group.attends and key in seen):  # where it does, the role of the first cuts both
            blocks.append(
                BlockCandidates("", [], [path for c in group.columns for path in _everywhere(model, c)], LEAF_MODULES)
            )
    return blocks + _experts(model, flow)


def _block(model: nn.Module, flow: ForwardTrace, group: LinearGroup, layers: str, layer: str) -> BlockCandidates:
    row = _block_path(model, group.row[len(layer) + 1 :], layer, group.attends)
    optional = len(_having(model, layers, row)) < len(_all_layers(model, layers))
    inside = [met for met in flow.projections if all(f"{path}.".startswith(f"{layer}.") for path in met)]
    low_rank = any(group.row in met for met in inside)  # linears of several layers meet as the residual stream
    roles = [] if low_rank else [replace(role, optional=optional) for role in _roles(model, flow, group, layer)]
    misfits = [] if low_rank or group.attends else _misfits(model, group)
    gates = [
        join_path(layer, resolve_path(role.at, gate))
        for role in roles[:1]
        if isinstance(role, Attention)
        for gate in role.projections.gates
    ]
    columns = [path for c in misfits or gates or group.columns for path in _everywhere(model, c)]
    context = None
    if any(isinstance(role, Attention) and role.inputs.cross_attention for role in roles):
        context = _context(model, flow, group, layers)
    why = LOW_RANK if low_rank else UNKNOWN if not roles else ""
    return BlockCandidates(layers, roles, columns, why, _final_norm(model, flow, layers), context)


def _misfits(model: nn.Module, group: LinearGroup) -> list[str]:
    """Those columns that give another number of features than the row takes, if others do fit."""
    width = _features(model, group.row, out=False)
    out = [c for c in group.columns if _features(model, c, out=True) % width]
    return out if len(out) < len(group.columns) else []


def _everywhere(model: nn.Module, path: str) -> list[str]:
    """The path in every layer."""
    place = _layer_of(model, path, [path])
    if place is None:
        return [path]
    layers, layer = place
    inside = _block_path(model, path[len(layer) + 1 :], layer, attends=False)
    return match_paths(join_path(f"{layers}.*", inside), [name for name, _ in model.named_modules()])


def _layer_of(model: nn.Module, path: str, members: list[str]) -> tuple[str, str] | None:
    """(path of the list of layers, path of the layer) that all members stand in; of lists inside stages the inner."""
    parts = path.split(".")
    indices = [i for i, part in enumerate(parts) if part.isdigit()]
    lists = [i for i in indices if _is_list(model, ".".join(parts[:i]))]
    if not lists:
        return None
    at = lists[0]
    if len(lists) > 1 and _is_stage(model, ".".join(parts[: at + 1]), ".".join(parts[: lists[1]])):
        at = lists[1]
    layer = ".".join(parts[: at + 1])
    if not all(f"{member}.".startswith(f"{layer}.") for member in members):
        return None
    return ".".join("*" if i in lists else part for i, part in enumerate(parts[:at])), layer


def _is_stage(model: nn.Module, outer: str, inner: str) -> bool:
    """Whether a module of a list is a stage: of several alike, and most of it the list at ``inner``."""
    stages = list(model.get_submodule(outer.rpartition(".")[0]).children())
    blocks, stage = model.get_submodule(inner), model.get_submodule(outer)
    if len(stages) == 1 or len({type(m) for m in stages}) > 1 or not _alike(blocks) or "expert" in inner:
        return False
    return 2 * sum(p.numel() for p in blocks.parameters()) > sum(p.numel() for p in stage.parameters())


def _is_list(model: nn.Module, path: str) -> bool:
    """Whether it is a list of layers: a ModuleList, or what runs several layers alike one after another."""
    module = model.get_submodule(path)
    return isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and _alike(module))


def _alike(modules: nn.Module) -> bool:
    return len({type(module) for module in modules.children()}) == 1


def _block_path(model: nn.Module, inside: str, layer: str, attends: bool) -> str:
    """The path of a block's row in its layer, with ``*`` for the index of one expert among its like."""
    parts = inside.split(".")
    if attends:
        return inside
    return ".".join(
        "*"
        if part.isdigit() and "expert" in parts[i - 1] and _alike(model.get_submodule(join_path(layer, *parts[:i])))
        else part
        for i, part in enumerate(parts)
    )


def _all_layers(model: nn.Module, layers: str) -> list[str]:
    return match_paths(f"{layers}.*", [name for name, _ in model.named_modules()])


def _having(model: nn.Module, layers: str, row: str) -> set[str]:
    """The layers that have a module at ``row``."""
    names = match_paths(f"{layers}.*.{row}", [name for name, _ in model.named_modules()])
    count = layers.count(".") + 2
    return {".".join(name.split(".")[:count]) for name in names}


def _roles(model: nn.Module, flow: ForwardTrace, group: LinearGroup, layer: str) -> Iterator[Role]:
    if group.attends:
        yield from _attentions(model, flow, group, layer)
    elif not group.apart:
        yield from _mlps(model, flow, group, layer)


def _mlps(model: nn.Module, flow: ForwardTrace, group: LinearGroup, layer: str) -> Iterator[MLP]:
    width = _features(model, group.row, out=False)
    features = {_features(model, c, out=True) for c in group.columns}
    if len(features) != 1 or (out := features.pop()) % width:
        return
    late = group.columns if len(group.columns) == 1 else []  # a module may add its residual itself
    for entry in dict.fromkeys([group.entry, *late]):
        group = replace(group, entry=entry)
        at = _block_path(model, entry[len(layer) + 1 :], layer, attends=False)
        ups = [_inside(group, c, layer) for c in group.columns]
        norm = next((_inside(group, n, layer) for n in _norms(model, flow, group, layer, {width})), None)
        yield MLP(at, ups if len(ups) > 1 else ups[0], _inside(group, group.row, layer), out // width, norm)
        if "*" in at:
            return


def _attentions(model: nn.Module, flow: ForwardTrace, group: LinearGroup, layer: str) -> Iterator[Attention]:
    at, width = group.entry[len(layer) + 1 :], _features(model, group.row, out=False)
    names = {c: _inside(group, c, layer) for c in group.columns}
    features = {names[c]: _features(model, c, out=True) for c in group.columns}
    module = model.get_submodule(group.entry)
    tables = [f"{path}?" for path, m in module.named_modules() if isinstance(m, nn.Embedding)]
    apart = [names[c] for c in group.apart]
    reads_context = bool(apart) and _context(model, flow, group, layer) is not None
    arguments = [] if reads_context else _inputs(model, flow, group)
    inside = [] if reads_context or arguments else apart
    layers = len(_everywhere(model, group.row))
    lacking = {name for c, name in names.items() if len(_everywhere(model, c)) < layers}
    for projections in projections_of(names):
        said: dict[str, Any] = {
            part: f"{name}?" if part in "kv" and name in lacking else name for part, name in projections.items()
        }
        for count in head_counts(model, group.entry, projections, features, width, bool(inside), group.head_dim):
            numbers = counted_numbers(_numbers(model, flow, group.entry, count), count, width)
            ways = [numbers, {n: kind for n, kind in numbers.items() if kind != "width"}, {}]
            if hasattr(module, "config"):
                ways.append(numbers | {f"config.{n}": kind for n, kind in count.of_config(module.config)})
            fused = any(part in projections for part in ("qkv", "kv"))
            own = any(model.get_submodule(like)._parameters for like in _everywhere(model, group.entry))
            late = own or len(group.columns) > len(group.apart) + 1
            first = [name for name in names.values() if name not in apart][:1]
            entries = [None] * (group.enters or bool(inside)) + first * late
            norms = _attention_norms(model, flow, group, layer, count, width)
            orders = [
                (False, 1),
                *[(True, 1)] * fused,
                *[(False, PARTITIONS)] * (fused and count.kv_heads % PARTITIONS == 0),
            ]
            others = {**norms, **dict.fromkeys(tables, "heads"), **_arguments(flow, group, count)}
            for give_width, entry, (interleaved, partitions), attributes, parameters in product(
                (False, True), entries, orders, _distinct(ways), _parameters(module, count, width)
            ):
                out = _inside(group, group.row, layer)
                linears = AttentionProjections(out=out, **said, interleaved=interleaved, partitions=partitions)
                inputs = AttentionInputs(
                    entry=entry,
                    arguments=tuple(arguments),
                    cross_attention=reads_context,
                    inner_inputs=tuple(inside),
                    reads_width=give_width,
                )
                yield Attention(at, linears, {**attributes, **parameters, **others}, inputs, **count.said)


def _numbers(model: nn.Module, flow: ForwardTrace, path: str, count: HeadCount) -> dict[str, int]:
    """The module's numbers that it reads, or that its like in another layer does (a window that is shifted).

    Where heads differ by layer, without a number that is that of the heads here and not everywhere (a stride).
    """
    module, said = model.get_submodule(path), str(count.said.get("num_heads", ""))
    places = {like: m for like in _everywhere(model, path) if type(m := model.get_submodule(like)) is type(module)}
    numbers = {name: getattr(module, name) for like in places for name in flow.numbers.get(like, {})}

    def by_layer(name: str) -> list[int]:
        return [attrgetter(name)(m) for m in places.values()]

    return {
        name: value
        for name, value in numbers.items()
        if value != count.heads or not said.startswith(".") or by_layer(name) == by_layer(said[1:])
    }


def _inside(group: LinearGroup, path: str, layer: str) -> str:
    """A path relative to the block's module, or to the layer with a leading dot."""
    if f"{path}.".startswith(f"{group.entry}."):
        return path[len(group.entry) :].lstrip(".")
    return path[len(layer) :]


def _norms(model: nn.Module, flow: ForwardTrace, group: LinearGroup, layer: str, sizes: set[int]) -> list[str]:
    """Norms between the group's entry and its row over as many features as one of ``sizes``."""
    return [
        path
        for path, marks in flow.normed.items()
        if marks & set(group.columns)
        and path.startswith(f"{layer}.")
        and _norm_size(model.get_submodule(path)) in sizes
    ]


def _norm_size(norm: nn.Module) -> int:
    weight = getattr(norm, "weight", None)
    shape = weight.shape if isinstance(weight, nn.Parameter) else getattr(norm, "normalized_shape", (0,))
    return int(shape[-1]) if len(shape) == 1 else 0


def _attention_norms(
    model: nn.Module, flow: ForwardTrace, group: LinearGroup, layer: str, count: HeadCount, width: int
) -> dict[str, str]:
    kv_width = width // count.heads * count.kv_heads
    return {
        _inside(group, path, layer): "heads" if _norm_size(model.get_submodule(path)) == width and "k" not in
        path.rpartition(".")[2].partition("_")[0] else "kv_heads"
        for path in _norms(model, flow, group, layer, {width, kv_width} - {width // count.heads})
    }  # fmt: skip


def _parameters(module: nn.Module, count: HeadCount, width: int) -> list[dict[str, Any]]:
    """What the parameters that the module holds itself could count."""
    own = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
    if not own:
        return [{}]
    guess = {
        name: "heads" if shape.count(count.heads) == 1 else "width" if shape.count(width) == 1 else "inside"
        for name, shape in own.items()
    }
    return _distinct([guess, dict.fromkeys(own, "inside")])


def _arguments(flow: ForwardTrace, group: LinearGroup, count: HeadCount) -> dict[str, LocalAttr]:
    """The arguments of the attention beside the first in which a dim counts heads, or samples times heads."""
    given = list(flow.inputs.get(group.entry, {}).items())
    samples = given[0][1].shape[0] if given else 0
    counts = (count.heads, samples * count.heads)
    dims = {name: [d for d, n in enumerate(x.shape) if n in counts] for name, x in given[1:]}
    return {name: ("heads", of[0]) for name, of in dims.items() if of}


def _inputs(model: nn.Module, flow: ForwardTrace, group: LinearGroup) -> list[str]:
    """The arguments beside the first that the columns of the attention read, if one is ever another tensor than it."""
    names: dict[str, bool] = {}
    for like in _everywhere(model, group.entry):
        given = list(flow.inputs.get(like, {}).items())
        read = [x for c in group.columns for x in flow.read.get(like + c.removeprefix(group.entry), [])]
        for name, x in given[1:]:
            if any(x is r for r in read):
                names[name] = names.get(name, False) or x is not given[0][1]
    return list(names) if any(names.values()) else []


def _distinct(ways: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [way for i, way in enumerate(ways) if way not in ways[:i]]


def _experts(model: nn.Module, flow: ForwardTrace) -> list[BlockCandidates]:
    """Modules that hold weights with three dims, one for each expert."""
    found: dict[tuple[str, str], BlockCandidates] = {}
    for path, module in model.named_modules():
        stacked = [name for name, p in module.named_parameters(recurse=False) if p.dim() == 3 and p.shape[0] > 1]
        place = _layer_of(model, path, [path]) if len(stacked) > 1 and path in flow.inputs else None
        if place is None:
            continue
        layers, layer = place
        at = path[len(layer) + 1 :]
        optional = len(_having(model, layers, at)) < len(_all_layers(model, layers))
        roles = [replace(role, optional=optional) for role in _expert_candidates(module, at, stacked)]
        found.setdefault((layers, at), BlockCandidates(layers, roles, _everywhere(model, path)))
    return list(found.values())


def _expert_candidates(module: nn.Module, at: str, stacked: Sequence[str]) -> Iterator[Experts]:
    """In every order of the weights and with every dim that could hold an expert's features: the last is the exit."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False) if p.dim() in (2, 3)}
    identities = [name for name, m in module.named_children() if isinstance(m, nn.Identity)]
    for down, (fused, interleaved) in product(reversed(stacked), ((2, False), (1, False), (2, True))):
        for dims in find_expert_dims(shapes, down, fused):
            ups = [name for name in dims if name != down]
            summands = [*(name for name in shapes if name not in dims), *identities]
            yield Experts(at, ups if len(ups) > 1 else ups[0], down, summands, fused, interleaved, dims)


def _context(model: nn.Module, flow: ForwardTrace, group: LinearGroup, layers: str) -> tuple[str, str] | None:
    """The module around the layers, and its argument, that brings what the columns apart read."""
    source = next(iter(flow.inputs[group.apart[0]].values())) if group.apart else None
    for path in sorted(flow.inputs, key=len):
        for name, x in list(flow.inputs[path].items())[1:]:  # the first is what the layers themselves work on
            if x is source and f"{group.entry}.".startswith(f"{path}." if path else "") and len(path) < len(layers):
                return path, name
    return None


def _final_norm(model: nn.Module, flow: ForwardTrace, layers: str) -> str | None:
    if "*" in layers:
        return None
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
    return num_features(model.get_submodule(path), out=out)


EXPERT_STYLES = {"rowwise": ("colwise", "packed_colwise"), "colwise": ("packed_rowwise",)}
"""The style of the exit of stacked experts -> those of their other weights, which may lie the other way round."""


def transformers_plan_of(model: nn.Module) -> dict[str, str]:
    """Path in ``model``, with ``*`` for an index -> style, of all configs inside that have a plan."""
    plan: dict[str, str] = {}
    for path, module in model.named_modules():
        own: Any = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        if isinstance(own, Mapping) and getattr(module, "base_model", None if path else module) is module:
            plan |= {join_path(path, str(name)): str(style) for name, style in own.items()}
    return plan


def role_in_plan(plan: Mapping[str, str], layers: str, roles: Iterable[Role]) -> Role | None:
    """The first of ``roles`` whose weights the plan shards in the same way; None if there is none.

    Args:
        layers: path of the stack.
    """
    return next((role for role in roles if _agrees(plan, f"{layers}.*", role)), None)


def _agrees(plan: Mapping[str, str], layer: str, role: Role) -> bool:
    if isinstance(role, Attention):
        linears = role.projections
        if linears.interleaved or linears.qkv is not None:  # the plan does not tell how heads lie in one matrix
            return False
        columns = [name for name in (linears.q, linears.k, linears.v, linears.kv) if name] + [*linears.gates]
        down = linears.out
    else:
        columns, down = [role.up] if isinstance(role.up, str) else [*role.up], role.down

    def style(name: str) -> str:
        return plan.get(join_path(layer, resolve_path(role.at, name.rstrip("?"))), "")

    if isinstance(role, Experts):
        ups = [style(name) for name in columns if not name.endswith("bias")]
        fused = {"packed": 2}.get(ups[0].partition("_")[0], 1) if ups else 0
        return fused == role.fused and all(up in EXPERT_STYLES.get(style(down), ()) for up in ups)
    return style(down).startswith("rowwise") and all(style(name).startswith("colwise") for name in columns)
