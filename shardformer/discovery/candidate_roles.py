"""Proposes how to shard groups of linear layers, such as attention modules and MLPs, from a traced forward pass.

A candidate is a role (``Attention``, ``MLP`` or ``Experts``) with its projections, head counts and local attributes.
The tensor parallel plan of a transformers config, ``config.base_model_tp_plan``, names linear layers that are sharded
by columns or by rows ("layers.*.mlp.up_proj": "colwise"). The plan omits head counts, the attributes that a forward
pass reads, and many modules. It therefore only selects among the candidates, and is validated with the full policy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from operator import attrgetter
from typing import Any

from torch import nn

from shardformer.discovery.forward_trace import ForwardTrace, LinearGroup, find_layer_paths
from shardformer.discovery.reduced_model import count_parameters
from shardformer.module_paths import get_num_features, join_path, match_paths, resolve_path
from shardformer.policies.convert_roles import list_expert_dim_choices
from shardformer.policies.roles import MLP, Attention, AttentionInputs, AttentionProjections, Experts, LocalAttr, Role
from shardformer.transformers_compat import get_uniform_config_field

HEAD_COUNT_FIELDS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class HeadCounts:
    """The numbers of query heads and key-value heads of an attention module."""

    heads: int
    kv_heads: int
    fields: Mapping[str, Any] = field(default_factory=dict)  # arguments of ``Attention`` that specify unusual numbers


def guess_qkv_projections(linear_names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Guess which linear layers compute q, k and v, from the first letters of their names or their call order."""
    called = list(linear_names.values())
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


def find_head_counts(
    model: nn.Module,
    module_path: str,
    projections: Mapping[str, Any],
    out_features: Mapping[str, int],
    width: int,
    reads_inner_inputs: bool,
    head_dim: int = 0,
) -> Iterator[HeadCounts]:
    """Yield the possible numbers of heads of an attention module, the most likely first.

    Args:
        head_dim: the traced number of features per head. For a model without a config, the head count that matches it
            comes first.
    """
    config: Any = getattr(model, "config", None)
    usual = [get_uniform_config_field(config, name) for name in HEAD_COUNT_FIELDS]
    heads_of = {n: v for n, v in zip(HEAD_COUNT_FIELDS, usual, strict=True) if type(v) is int}
    heads_of |= _collect_possible_head_counts(config, model.get_submodule(module_path))
    usual_kv = usual[1] if isinstance(usual[1], int) and usual[1] else usual[0]
    if config is None and head_dim and width % head_dim == 0:
        seen = width // head_dim
        heads_of = dict(sorted({**heads_of, str(seen): seen}.items(), key=lambda item: item[1] != seen))
    found = set()
    for (name, heads), (kv_name, kv_heads) in product(heads_of.items(), [("", 0), *heads_of.items(), ("1", 1)]):
        kv = kv_heads or heads
        if heads < 1 or width % heads or heads % kv or (heads, kv) in found:
            continue
        if not _head_counts_fit_projections(projections, out_features, heads, kv, width // heads, reads_inner_inputs):
            continue
        found.add((heads, kv))
        is_usual = (heads, kv) == (usual[0], usual_kv)
        names = (
            {}
            if is_usual
            else {"num_heads": _parse_int_or_str(name), "num_kv_heads": _parse_int_or_str(kv_name or name)}
        )
        yield HeadCounts(heads, kv, names)


def _parse_int_or_str(name: str) -> int | str:
    return int(name) if name.isdigit() else name


def _collect_possible_head_counts(config: Any, module: nn.Module) -> dict[str, int]:
    """Collect the integer attributes of a module and its configs that may be head counts.

    These are the attributes with "head" in their names, or all of them if there are none.
    """
    places = {"": config, ".config.": getattr(module, "config", None), ".": module}
    inner = {f"{n}.": c for n, c in _get_public_attributes(config).items() if hasattr(c, "model_type")}
    every = {
        f"{prefix}{name}": value
        for prefix, place in {**places, **inner}.items()
        for name, value in _get_public_attributes(place).items()
        if type(value) is int
    }
    called = {n: v for n, v in every.items() if "head" in n.split(".")[-1] and not n.endswith(("dim", "size"))}
    return called or every


def _get_public_attributes(owner: Any) -> dict[str, Any]:
    return {n: v for n, v in vars(owner).items() if not n.startswith("_")} if owner is not None else {}


def _head_counts_fit_projections(
    projections: Mapping[str, Any],
    out_features: Mapping[str, int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    reads_inner_inputs: bool,
) -> bool:
    def has_size(part: str, *sizes: int) -> bool:
        return part not in projections or out_features[projections[part]] in sizes

    q = projections.get("q")
    if q is not None and out_features[q] % num_heads:
        return False
    unit = out_features[q] // num_heads if q is not None else head_dim
    return (
        (q is None or reads_inner_inputs or unit == head_dim)
        and has_size("k", num_kv_heads * unit)
        and has_size("v", num_kv_heads * head_dim)
        and has_size("qkv", (num_heads + 2 * num_kv_heads) * head_dim)
        and (
            has_size("kv", 2 * num_kv_heads * head_dim)
            or (reads_inner_inputs and out_features[projections["kv"]] % num_kv_heads == 0)
        )
        and all(out_features[gate] % num_heads == 0 for gate in projections.get("gates", ()))
    )


def classify_size_attributes(attributes: Mapping[str, int], head_counts: HeadCounts, width: int) -> dict[str, str]:
    """Classify integer attributes of an attention module as numbers of heads, KV heads, groups or features."""
    heads, kv_heads = head_counts.heads, head_counts.kv_heads
    kinds: dict[str, str] = {}
    for name, value in attributes.items():
        is_about_kv = "kv" in name or "key_value" in name
        if re.search(r"(?<!all_)head_(size|dim)$", name):
            continue  # the features of one head, which equal ``width`` if there is only one head
        if "group" in name and value == heads // kv_heads:
            kinds[name] = "groups"
        elif value == kv_heads and (is_about_kv or kv_heads not in (heads, 1)):
            kinds[name] = "kv_heads"
        elif value == heads:
            kinds[name] = "heads"
        elif value == heads // kv_heads > 1:
            kinds[name] = "groups"
        elif value == width:
            kinds[name] = "width"
    return kinds


UNKNOWN = "no role fits it"
LOW_RANK = "its output is only read by a projection of an attention module"
LEAVES_LAYER = "its output leaves the layer"
PARTITIONS = 4
"""Number of partitions in a fused projection of CodeGen, whose heads are ordered for its original training run."""


@dataclass(frozen=True)
class BlockCandidates:
    """A group of linear layers, such as an MLP, and the ways in which it may be sharded, the most likely first."""

    layers: str  # path of the ModuleList, with ``*`` for the index of a stage that contains one
    roles: Sequence[Role]
    columns: Sequence[str]  # paths of the linear layers to replicate, in all layers, if no candidate passes validation
    reason: str = ""  # why the group is replicated, if known without validation
    final_norm: str | None = None  # path of the norm after the last layer
    context: tuple[str, str] | None = None  # (module path, argument) that receives hidden states of another stack


def find_block_candidates(model: nn.Module, trace: ForwardTrace) -> list[BlockCandidates]:
    """Find the attention modules, MLPs and experts of a model, with possible ways to shard each of them.

    They are in the order of the forward pass. One layer represents all layers of its stack.
    """
    blocks, seen = [], set()
    for group in trace.groups:
        place, at = (
            _find_enclosing_layer(model, group.row, [group.entry, *group.columns]),
            _find_enclosing_layer(model, group.row, []),
        )
        key = at and (at[0], _replace_expert_index(model, group.row[len(at[1]) + 1 :], at[1], group.attends))
        if place is not None and key not in seen:
            seen.add(key)
            blocks.append(_make_block_candidates(model, trace, group, *place))
        elif place is None and not (group.attends and key in seen):  # a known attention role shards both groups
            columns = [path for c in group.columns for path in _find_counterparts_in_all_layers(model, c)]
            blocks.append(BlockCandidates("", [], columns, LEAVES_LAYER))
    return blocks + _find_expert_blocks(model, trace)


def _make_block_candidates(
    model: nn.Module, trace: ForwardTrace, group: LinearGroup, layer_list_path: str, layer_path: str
) -> BlockCandidates:
    row = _replace_expert_index(model, group.row[len(layer_path) + 1 :], layer_path, group.attends)
    optional = _is_missing_in_some_layers(model, layer_list_path, row)
    inside = [merged for merged in trace.projections if all(f"{path}.".startswith(f"{layer_path}.") for path in merged)]
    low_rank = any(group.row in merged for merged in inside)  # across layers, the residual stream connects them
    find = _iter_attention_candidates if group.attends else _iter_mlp_candidates
    roles = [] if low_rank else [replace(role, optional=optional) for role in find(model, trace, group, layer_path)]
    misfits = [] if low_rank or group.attends else _find_mismatched_column_layers(model, group)
    attention = next((role for role in roles[:1] if isinstance(role, Attention)), None)
    gates = (
        [join_path(layer_path, resolve_path(attention.at, g)) for g in attention.projections.gates] if attention else []
    )
    columns = [path for c in misfits or gates or group.columns for path in _find_counterparts_in_all_layers(model, c)]
    context = None
    if any(isinstance(role, Attention) and role.inputs.cross_attention for role in roles):
        context = _find_cross_attention_source(trace, group, layer_list_path)
    reason = LOW_RANK if low_rank else UNKNOWN if not roles else ""
    return BlockCandidates(
        layer_list_path, roles, columns, reason, _find_final_norm(model, trace, layer_list_path), context
    )


def _find_mismatched_column_layers(model: nn.Module, group: LinearGroup) -> list[str]:
    """Return the column-parallel layers whose output does not fit the input of the row-parallel layer."""
    width = _get_num_linear_features(model, group.row, out=False)
    out = [c for c in group.columns if _get_num_linear_features(model, c, out=True) % width]
    return out if len(out) < len(group.columns) else []


def _find_counterparts_in_all_layers(model: nn.Module, path: str) -> list[str]:
    """Return the paths of a module and of the corresponding modules in all other layers."""
    place = _find_enclosing_layer(model, path, [path])
    if place is None:
        return [path]
    layers, layer = place
    inside = _replace_expert_index(model, path[len(layer) + 1 :], layer, is_attention=False)
    return match_paths(join_path(f"{layers}.*", inside), [name for name, _ in model.named_modules()])


def _find_enclosing_layer(model: nn.Module, path: str, members: list[str]) -> tuple[str, str] | None:
    """Return the paths of the module list and of the layer that contain all ``members``, or None."""
    parts = path.split(".")
    indices = [i for i, part in enumerate(parts) if part.isdigit()]
    lists = [i for i in indices if _is_layer_list(model, ".".join(parts[:i]))]
    if not lists:
        return None
    at = lists[0]
    if len(lists) > 1 and _is_stage_with_layers(model, ".".join(parts[: at + 1]), ".".join(parts[: lists[1]])):
        at = lists[1]
    layer = ".".join(parts[: at + 1])
    if not all(f"{member}.".startswith(f"{layer}.") for member in members):
        return None
    return ".".join("*" if i in lists else part for i, part in enumerate(parts[:at])), layer


def _is_stage_with_layers(model: nn.Module, stage_path: str, layer_list_path: str) -> bool:
    """Return whether the module at ``stage_path`` is one of several stages with a list of layers each."""
    stages = list(model.get_submodule(stage_path.rpartition(".")[0]).children())
    blocks, stage = model.get_submodule(layer_list_path), model.get_submodule(stage_path)
    if (
        len(stages) == 1
        or len({type(m) for m in stages}) > 1
        or not _have_same_class(blocks)
        or "expert" in layer_list_path
    ):
        return False
    return 2 * count_parameters(blocks) > count_parameters(stage)


def _is_layer_list(model: nn.Module, path: str) -> bool:
    """Return whether the module at ``path`` is a ModuleList, or an ``nn.Sequential`` of modules of the same class."""
    module = model.get_submodule(path)
    return isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and _have_same_class(module))


def _have_same_class(modules: nn.Module) -> bool:
    return len({type(module) for module in modules.children()}) == 1


def _replace_expert_index(model: nn.Module, row_path: str, layer_path: str, is_attention: bool) -> str:
    """Replace the index of an expert in a module path with ``*``, so that the path matches all experts."""
    parts = row_path.split(".")
    if is_attention:
        return row_path
    return ".".join(
        "*"
        if part.isdigit()
        and "expert" in parts[i - 1]
        and _have_same_class(model.get_submodule(join_path(layer_path, *parts[:i])))
        else part
        for i, part in enumerate(parts)
    )


def _is_missing_in_some_layers(model: nn.Module, layer_list_path: str, relative_path: str) -> bool:
    names = [name for name, _ in model.named_modules()]
    return any(not match_paths(f"{layer}.{relative_path}", names) for layer in find_layer_paths(model, layer_list_path))


def _iter_mlp_candidates(model: nn.Module, trace: ForwardTrace, group: LinearGroup, layer_path: str) -> Iterator[MLP]:
    """Yield each way to describe a group of linear layers as a tensor-parallel MLP."""
    width = _get_num_linear_features(model, group.row, out=False)
    features = {_get_num_linear_features(model, c, out=True) for c in group.columns}
    if group.other_columns or len(features) != 1 or (out := features.pop()) % width:
        return
    late = group.columns if len(group.columns) == 1 else []  # the entry may follow the start of a residual
    for entry in dict.fromkeys([group.entry, *late]):
        group = replace(group, entry=entry)
        at = _replace_expert_index(model, entry[len(layer_path) + 1 :], layer_path, is_attention=False)
        ups = [_get_relative_path(group, c, layer_path) for c in group.columns]
        norm = next(
            (
                _get_relative_path(group, n, layer_path)
                for n in _find_norms_after_columns(model, trace, group, layer_path, {width})
            ),
            None,
        )
        yield MLP(
            at, ups if len(ups) > 1 else ups[0], _get_relative_path(group, group.row, layer_path), out // width, norm
        )
        if "*" in at:
            return


def _iter_attention_candidates(
    model: nn.Module, trace: ForwardTrace, group: LinearGroup, layer_path: str
) -> Iterator[Attention]:
    """Yield each way to describe a group of linear layers as tensor-parallel attention, the most likely first."""
    at, width = group.entry[len(layer_path) + 1 :], _get_num_linear_features(model, group.row, out=False)
    names = {c: _get_relative_path(group, c, layer_path) for c in group.columns}
    features = {names[c]: _get_num_linear_features(model, c, out=True) for c in group.columns}
    module = model.get_submodule(group.entry)
    tables = [f"{path}?" for path, m in module.named_modules() if isinstance(m, nn.Embedding)]
    other_columns = [names[c] for c in group.other_columns]
    reads_context = bool(other_columns) and _find_cross_attention_source(trace, group, layer_path) is not None
    arguments = [] if reads_context else _find_other_projection_inputs(model, trace, group)
    inside = [] if reads_context or arguments else other_columns
    layers = len(_find_counterparts_in_all_layers(model, group.row))
    lacking = {name for c, name in names.items() if len(_find_counterparts_in_all_layers(model, c)) < layers}
    for projections in guess_qkv_projections(names):
        fields: dict[str, Any] = {
            part: f"{name}?" if part in "kv" and name in lacking else name for part, name in projections.items()
        }
        for count in find_head_counts(model, group.entry, projections, features, width, bool(inside), group.head_dim):
            accessed = _find_accessed_int_attributes(model, trace, group.entry, count)
            numbers = classify_size_attributes(accessed, count, width)
            ways = [numbers, {n: kind for n, kind in numbers.items() if kind != "width"}, {}]
            if hasattr(module, "config"):
                counts = zip(HEAD_COUNT_FIELDS, ("heads", "kv_heads"), (count.heads, count.kv_heads), strict=True)
                matching = [(n, kind) for n, kind, x in counts if get_uniform_config_field(module.config, n) == x]
                ways.append(numbers | {f"config.{n}": kind for n, kind in matching})
            fused = any(part in projections for part in ("qkv", "kv"))
            has_parameters = any(
                model.get_submodule(like)._parameters for like in _find_counterparts_in_all_layers(model, group.entry)
            )
            late = has_parameters or len(group.columns) > len(group.other_columns) + 1
            first = [name for name in names.values() if name not in other_columns][:1]
            entries = [None] * (group.enters or bool(inside)) + first * late
            norms = _classify_attention_norms(model, trace, group, layer_path, count, width)
            in_partitions = fused and count.kv_heads % PARTITIONS == 0
            orders = [(False, 1), *[(True, 1)] * fused, *[(False, PARTITIONS)] * in_partitions]
            others = {**norms, **dict.fromkeys(tables, "heads"), **_find_per_head_arguments(trace, group, count)}
            for give_width, entry, (interleaved, partitions), attributes, parameters in product(
                (False, True),
                entries,
                orders,
                _remove_duplicates(ways),
                _guess_sharded_dims_of_parameters(module, count, width),
            ):
                out = _get_relative_path(group, group.row, layer_path)
                linears = AttentionProjections(out=out, **fields, interleaved=interleaved, partitions=partitions)
                inputs = AttentionInputs(
                    entry=entry,
                    arguments=tuple(arguments),
                    cross_attention=reads_context,
                    inner_inputs=tuple(inside),
                    reads_width=give_width,
                )
                yield Attention(at, linears, {**attributes, **parameters, **others}, inputs, **count.fields)


def _find_accessed_int_attributes(
    model: nn.Module, trace: ForwardTrace, path: str, head_counts: HeadCounts
) -> dict[str, int]:
    """Return the integer attributes that an attention module reads. Omits chance matches of the head count."""
    module, head_field = model.get_submodule(path), str(head_counts.fields.get("num_heads", ""))
    places = {
        like: m
        for like in _find_counterparts_in_all_layers(model, path)
        if type(m := model.get_submodule(like)) is type(module)
    }
    numbers = {name: getattr(module, name) for like in places for name in trace.numbers.get(like, {})}

    def values_in_layers(name: str) -> list[int]:
        return [attrgetter(name)(m) for m in places.values()]

    return {
        name: value
        for name, value in numbers.items()
        if value != head_counts.heads
        or not head_field.startswith(".")
        or values_in_layers(name) == values_in_layers(head_field[1:])
    }


def _get_relative_path(group: LinearGroup, path: str, layer_path: str) -> str:
    """Make a module path relative to its block. Outside the block, it is relative to the layer, as ``.path``."""
    if f"{path}.".startswith(f"{group.entry}."):
        return path[len(group.entry) :].lstrip(".")
    return path[len(layer_path) :]


def _find_norms_after_columns(
    model: nn.Module, trace: ForwardTrace, group: LinearGroup, layer_path: str, norm_sizes: set[int]
) -> list[str]:
    norms = [n for n, marks in trace.normed.items() if marks & set(group.columns) and n.startswith(f"{layer_path}.")]
    return [norm for norm in norms if _get_norm_size(model.get_submodule(norm)) in norm_sizes]


def _get_norm_size(norm: nn.Module) -> int:
    weight = getattr(norm, "weight", None)
    shape = weight.shape if isinstance(weight, nn.Parameter) else getattr(norm, "normalized_shape", (0,))
    return int(shape[-1]) if len(shape) == 1 else 0


def _classify_attention_norms(
    model: nn.Module, trace: ForwardTrace, group: LinearGroup, layer_path: str, head_counts: HeadCounts, width: int
) -> dict[str, str]:
    norms = _find_norms_after_columns(
        model,
        trace,
        group,
        layer_path,
        {width, width // head_counts.heads * head_counts.kv_heads} - {width // head_counts.heads},
    )
    kinds = {}
    for path in norms:
        is_key = "k" in path.rpartition(".")[2].partition("_")[0]
        kind = "heads" if _get_norm_size(model.get_submodule(path)) == width and not is_key else "kv_heads"
        kinds[_get_relative_path(group, path, layer_path)] = kind
    return kinds


def _guess_sharded_dims_of_parameters(module: nn.Module, head_counts: HeadCounts, width: int) -> list[dict[str, Any]]:
    own = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
    if not own:
        return [{}]
    guess = {
        name: "heads" if shape.count(head_counts.heads) == 1 else "width" if shape.count(width) == 1 else "inside"
        for name, shape in own.items()
    }
    return _remove_duplicates([guess, dict.fromkeys(own, "inside")])


def _find_per_head_arguments(trace: ForwardTrace, group: LinearGroup, head_counts: HeadCounts) -> dict[str, LocalAttr]:
    """Find the arguments of an attention module that have a dimension for the heads."""
    arguments = list(trace.inputs.get(group.entry, {}).items())
    samples = arguments[0][1].shape[0] if arguments else 0
    counts = (head_counts.heads, samples * head_counts.heads)
    dims = {name: [d for d, n in enumerate(x.shape) if n in counts] for name, x in arguments[1:]}
    return {name: ("heads", of[0]) for name, of in dims.items() if of}


def _find_other_projection_inputs(model: nn.Module, trace: ForwardTrace, group: LinearGroup) -> list[str]:
    """Return the other inputs of an attention module's projections, such as the encoder's hidden states."""
    names: dict[str, bool] = {}
    for like in _find_counterparts_in_all_layers(model, group.entry):
        arguments = list(trace.inputs.get(like, {}).items())
        read = [x for c in group.columns for x in trace.read.get(like + c.removeprefix(group.entry), [])]
        for name, x in arguments[1:]:
            if any(x is r for r in read):
                names[name] = names.get(name, False) or x is not arguments[0][1]
    return list(names) if any(names.values()) else []


def _remove_duplicates(dicts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for i, one in enumerate(dicts) if one not in dicts[:i]]


def _find_expert_blocks(model: nn.Module, trace: ForwardTrace) -> list[BlockCandidates]:
    found: dict[tuple[str, str], BlockCandidates] = {}
    for path, module in model.named_modules():
        stacked = [name for name, p in module.named_parameters(recurse=False) if p.dim() == 3 and p.shape[0] > 1]
        place = _find_enclosing_layer(model, path, [path]) if len(stacked) > 1 and path in trace.inputs else None
        if place is None:
            continue
        layers, layer = place
        at = path[len(layer) + 1 :]
        optional = _is_missing_in_some_layers(model, layers, at)
        roles = [replace(role, optional=optional) for role in _iter_expert_candidates(module, at, stacked)]
        found.setdefault((layers, at), BlockCandidates(layers, roles, _find_counterparts_in_all_layers(model, path)))
    return list(found.values())


def _iter_expert_candidates(module: nn.Module, path: str, stacked_weights: Sequence[str]) -> Iterator[Experts]:
    """Yield each way to shard a module that stacks the weights of its experts in 3D tensors."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False) if p.dim() in (2, 3)}
    identities = [name for name, m in module.named_children() if isinstance(m, nn.Identity)]
    for down, (fused, interleaved) in product(reversed(stacked_weights), ((2, False), (1, False), (2, True))):
        for dims in list_expert_dim_choices(shapes, down, fused):
            ups = [name for name in dims if name != down]
            summands = [*(name for name in shapes if name not in dims), *identities]
            yield Experts(path, ups if len(ups) > 1 else ups[0], down, summands, fused, interleaved, dims)


def _find_cross_attention_source(
    trace: ForwardTrace, group: LinearGroup, layer_list_path: str
) -> tuple[str, str] | None:
    """Find the module argument through which a decoder receives the encoder's hidden states, or return None."""
    source = next(iter(trace.inputs[group.other_columns[0]].values())) if group.other_columns else None
    for path in sorted(trace.inputs, key=len):
        for name, x in list(trace.inputs[path].items())[1:]:  # the first argument is the hidden states
            if (
                x is source
                and f"{group.entry}.".startswith(f"{path}." if path else "")
                and len(path) < len(layer_list_path)
            ):
                return path, name
    return None


def _find_final_norm(model: nn.Module, trace: ForwardTrace, layer_list_path: str) -> str | None:
    """Return the path of the norm that is applied to the output of the last layer, or None if there is none."""
    if "*" in layer_list_path:
        return None
    last = f"{layer_list_path}.{len(list(model.get_submodule(layer_list_path).children())) - 1}"
    out = trace.outputs.get(last)
    for path, arguments in trace.inputs.items():
        first = next(iter(arguments.values()), None)
        if first is out and out is not None and not path.startswith(f"{layer_list_path}."):
            module = model.get_submodule(path)
            if "norm" in type(module).__name__.lower() and not list(module.children()):
                return path
    return None


def _get_num_linear_features(model: nn.Module, path: str, *, out: bool) -> int:
    return get_num_features(model.get_submodule(path), of_output=out)


EXPERT_STYLES = {"rowwise": ("colwise", "packed_colwise"), "colwise": ("packed_rowwise",)}
"""By the style of the down projection of stacked experts, the styles of their other weights, maybe transposed."""


def collect_transformers_tp_plan(model: nn.Module) -> dict[str, str]:
    """Merge the tensor parallel plans of all transformers configs in a model into one plan."""
    plan: dict[str, str] = {}
    for path, module in model.named_modules():
        own: Any = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        if isinstance(own, Mapping) and getattr(module, "base_model", None if path else module) is module:
            plan |= {join_path(path, str(name)): str(style) for name, style in own.items()}
    return plan


def find_role_matching_plan(tp_plan: Mapping[str, str], layer_list_path: str, roles: Iterable[Role]) -> Role | None:
    """Return the first of ``roles`` that agrees with a transformers tensor parallel plan, or None.

    Args:
        layer_list_path: the path of the list of layers.
    """
    return next((role for role in roles if _role_matches_plan(tp_plan, f"{layer_list_path}.*", role)), None)


def _role_matches_plan(tp_plan: Mapping[str, str], layer_path: str, role: Role) -> bool:
    if isinstance(role, Attention):
        linears = role.projections
        if linears.interleaved or linears.qkv is not None:  # the plan omits the order of heads in a fused matrix
            return False
        columns = [name for name in (linears.q, linears.k, linears.v, linears.kv) if name] + [*linears.gates]
        down = linears.out
    else:
        columns, down = [role.up] if isinstance(role.up, str) else [*role.up], role.down

    def find_style(name: str) -> str:
        return tp_plan.get(join_path(layer_path, resolve_path(role.at, name.rstrip("?"))), "")

    if isinstance(role, Experts):
        ups = [find_style(name) for name in columns if not name.endswith("bias")]
        fused = {"packed": 2}.get(ups[0].partition("_")[0], 1) if ups else 0
        return fused == role.fused and all(up in EXPERT_STYLES.get(find_style(down), ()) for up in ups)
    return find_style(down).startswith("rowwise") and all(find_style(name).startswith("colwise") for name in columns)
