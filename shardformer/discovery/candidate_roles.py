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

from shardformer.discovery.forward_trace import ConnectedLinearLayers, ForwardTrace, find_layer_paths
from shardformer.discovery.reduced_model import count_parameters
from shardformer.module_paths import get_num_linear_features, join_path, match_paths, resolve_relative_path
from shardformer.policies.experts import list_expert_shard_dim_choices
from shardformer.policies.roles import MLP, Attention, AttentionInputs, AttentionProjections, Experts, LocalAttr, Role
from shardformer.transformers_compat import get_uniform_config_field

HEAD_COUNT_FIELDS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class AttentionHeadCounts:
    """Query and key-value head counts of an attention module."""

    num_heads: int
    num_kv_heads: int
    attention_kwargs: Mapping[str, Any] = field(
        default_factory=dict
    )  # arguments of ``Attention`` that specify unusual numbers


def guess_qkv_projections(linear_name_by_path: Mapping[str, str]) -> list[dict[str, Any]]:
    """Guess from layer names or call order which linear layers compute q, k and v."""
    called = list(linear_name_by_path.values())
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


def iter_possible_head_counts(
    model: nn.Module,
    module_path: str,
    projection_names: Mapping[str, Any],
    out_features_by_name: Mapping[str, int],
    attention_width: int,
    has_inner_projection_inputs: bool,
    head_dim: int = 0,
) -> Iterator[AttentionHeadCounts]:
    """Yield possible head counts of an attention module, most likely first.

    Args:
        head_dim: the traced number of features per head, or 0. Head counts that match it come first.
    """
    config: Any = getattr(model, "config", None)
    usual = [get_uniform_config_field(config, name) for name in HEAD_COUNT_FIELDS]
    heads_of = {n: v for n, v in zip(HEAD_COUNT_FIELDS, usual, strict=True) if type(v) is int}
    heads_of |= _find_head_count_candidates(config, model.get_submodule(module_path))
    usual_kv = usual[1] if isinstance(usual[1], int) and usual[1] else usual[0]
    if head_dim and attention_width % head_dim == 0:
        seen = attention_width // head_dim
        heads_of |= {str(seen): seen} if config is None else {}
        heads_of = dict(sorted(heads_of.items(), key=lambda item: item[1] != seen))
    found = set()
    for (name, heads), (kv_name, kv_heads) in product(heads_of.items(), [("", 0), *heads_of.items(), ("1", 1)]):
        kv = kv_heads or heads
        if heads < 1 or attention_width % heads or heads % kv or (heads, kv) in found:
            continue
        if not _are_valid_head_counts(
            projection_names, out_features_by_name, heads, kv, attention_width // heads, has_inner_projection_inputs
        ):
            continue
        found.add((heads, kv))
        is_usual = (heads, kv) == (usual[0], usual_kv)
        names = (
            {}
            if is_usual
            else {"num_heads": _parse_int_or_str(name), "num_kv_heads": _parse_int_or_str(kv_name or name)}
        )
        yield AttentionHeadCounts(heads, kv, names)


def _parse_int_or_str(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _find_head_count_candidates(config: Any, module: nn.Module) -> dict[str, int]:
    """Collect integer attributes that may be head counts, from an attention module and its configs.

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


def _get_public_attributes(config_or_module: Any) -> dict[str, Any]:
    return (
        {n: v for n, v in vars(config_or_module).items() if not n.startswith("_")}
        if config_or_module is not None
        else {}
    )


def _are_valid_head_counts(
    projection_names: Mapping[str, Any],
    out_features_by_name: Mapping[str, int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_inner_projection_inputs: bool,
) -> bool:
    def has_out_features(projection: str, *expected_sizes: int) -> bool:
        return (
            projection not in projection_names or out_features_by_name[projection_names[projection]] in expected_sizes
        )

    q = projection_names.get("q")
    if q is not None and out_features_by_name[q] % num_heads:
        return False
    unit = out_features_by_name[q] // num_heads if q is not None else head_dim
    return (
        (q is None or has_inner_projection_inputs or unit == head_dim)
        and has_out_features("k", num_kv_heads * unit)
        and has_out_features("v", num_kv_heads * head_dim)
        and has_out_features("qkv", (num_heads + 2 * num_kv_heads) * head_dim)
        and (
            has_out_features("kv", 2 * num_kv_heads * head_dim)
            or (has_inner_projection_inputs and out_features_by_name[projection_names["kv"]] % num_kv_heads == 0)
        )
        and all(out_features_by_name[gate] % num_heads == 0 for gate in projection_names.get("gates", ()))
    )


def classify_size_attributes(
    int_attributes: Mapping[str, int], head_counts: AttentionHeadCounts, attention_width: int
) -> dict[str, str]:
    """Classify an attention module's integer attributes, for example as head counts or widths."""
    heads, kv_heads = head_counts.num_heads, head_counts.num_kv_heads
    kinds: dict[str, str] = {}
    for name, value in int_attributes.items():
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
        elif value == attention_width:
            kinds[name] = "width"
    return kinds


UNKNOWN = "no role fits it"
LOW_RANK = "its output is only read by a projection of an attention module"
LEAVES_LAYER = "its output leaves the layer"
PARTITIONS = 4
"""Number of partitions in a fused projection of CodeGen, whose heads are ordered for its original training run."""


@dataclass(frozen=True)
class BlockShardingCandidates:
    """Possible ways to shard a block of linear layers such as an MLP, most likely first."""

    layer_list_path: str  # path of the ModuleList, with ``*`` for the index of a stage that contains one
    roles: Sequence[Role]
    column_paths: Sequence[
        str
    ]  # paths of the linear layers to replicate, in all layers, if no candidate passes validation
    replication_reason: str = ""  # why the group is replicated, if known without validation
    final_norm: str | None = None  # path of the norm after the last layer
    cross_states_source: tuple[str, str] | None = (
        None  # (module path, argument) that receives hidden states of another stack
    )


def find_block_candidates(model: nn.Module, trace: ForwardTrace) -> list[BlockShardingCandidates]:
    """Find a model's attention modules, MLPs and experts, and possible ways to shard each of them.

    They are in the order of the forward pass. One layer represents all layers of its stack.
    """
    blocks, seen = [], set()
    for group in trace.groups:
        place, at = (
            _find_layer_list_and_layer_path(model, group.row, [group.entry, *group.columns]),
            _find_layer_list_and_layer_path(model, group.row, []),
        )
        key = at and (
            at[0],
            _replace_expert_index_with_wildcard(model, group.row[len(at[1]) + 1 :], at[1], group.is_attention),
        )
        if place is not None and key not in seen:
            seen.add(key)
            blocks.append(_make_block_candidates(model, trace, group, *place))
        elif place is None and not (group.is_attention and key in seen):  # a known attention role shards both groups
            columns = [path for c in group.columns for path in _find_same_module_in_all_layers(model, c)]
            blocks.append(BlockShardingCandidates("", [], columns, LEAVES_LAYER))
    return blocks + _find_expert_block_candidates(model, trace)


def _make_block_candidates(
    model: nn.Module, trace: ForwardTrace, group: ConnectedLinearLayers, layer_list_path: str, layer_path: str
) -> BlockShardingCandidates:
    row = _replace_expert_index_with_wildcard(model, group.row[len(layer_path) + 1 :], layer_path, group.is_attention)
    optional = _is_missing_from_some_layers(model, layer_list_path, row)
    inside = [merged for merged in trace.projections if all(f"{path}.".startswith(f"{layer_path}.") for path in merged)]
    low_rank = any(group.row in merged for merged in inside)  # across layers, the residual stream connects them
    find = _iter_attention_candidates if group.is_attention else _iter_mlp_candidates
    roles = [] if low_rank else [replace(role, optional=optional) for role in find(model, trace, group, layer_path)]
    misfits = [] if low_rank or group.is_attention else _find_column_linears_of_wrong_width(model, group)
    attention = next((role for role in roles[:1] if isinstance(role, Attention)), None)
    gates = (
        [join_path(layer_path, resolve_relative_path(attention.at, g)) for g in attention.projections.gates]
        if attention
        else []
    )
    columns = [path for c in misfits or gates or group.columns for path in _find_same_module_in_all_layers(model, c)]
    context = None
    if any(isinstance(role, Attention) and role.inputs.cross_attention for role in roles):
        context = _find_cross_attention_source(trace, group, layer_list_path)
    reason = LOW_RANK if low_rank else UNKNOWN if not roles else ""
    return BlockShardingCandidates(
        layer_list_path, roles, columns, reason, _find_final_norm_path(model, trace, layer_list_path), context
    )


def _find_column_linears_of_wrong_width(model: nn.Module, group: ConnectedLinearLayers) -> list[str]:
    """Return the column-parallel layers whose output size does not fit the input of the row-parallel layer."""
    width = _get_linear_num_features(model, group.row, of_output=False)
    out = [c for c in group.columns if _get_linear_num_features(model, c, of_output=True) % width]
    return out if len(out) < len(group.columns) else []


def _find_same_module_in_all_layers(model: nn.Module, module_path: str) -> list[str]:
    """Return the paths of a module and its counterparts in all other layers."""
    place = _find_layer_list_and_layer_path(model, module_path, [module_path])
    if place is None:
        return [module_path]
    layers, layer = place
    inside = _replace_expert_index_with_wildcard(model, module_path[len(layer) + 1 :], layer, is_attention=False)
    return match_paths(join_path(f"{layers}.*", inside), [name for name, _ in model.named_modules()])


def _find_layer_list_and_layer_path(
    model: nn.Module, module_path: str, required_member_paths: list[str]
) -> tuple[str, str] | None:
    """Return the paths of the layer that contains all required modules and of its layer list, or None."""
    parts = module_path.split(".")
    indices = [i for i, part in enumerate(parts) if part.isdigit()]
    lists = [i for i in indices if _is_layer_list(model, ".".join(parts[:i]))]
    if not lists:
        return None
    at = lists[0]
    if len(lists) > 1 and _is_stage_with_layers(model, ".".join(parts[: at + 1]), ".".join(parts[: lists[1]])):
        at = lists[1]
    layer = ".".join(parts[: at + 1])
    if not all(f"{member}.".startswith(f"{layer}.") for member in required_member_paths):
        return None
    return ".".join("*" if i in lists else part for i, part in enumerate(parts[:at])), layer


def _is_stage_with_layers(model: nn.Module, stage_path: str, layer_list_path: str) -> bool:
    """Return whether a module is one of several stages that each have their own layers, as in Swin."""
    stages = list(model.get_submodule(stage_path.rpartition(".")[0]).children())
    blocks, stage = model.get_submodule(layer_list_path), model.get_submodule(stage_path)
    if (
        len(stages) == 1
        or len({type(m) for m in stages}) > 1
        or not _all_children_have_same_class(blocks)
        or "expert" in layer_list_path
    ):
        return False
    return 2 * count_parameters(blocks) > count_parameters(stage)


def _is_layer_list(model: nn.Module, module_path: str) -> bool:
    """Return whether a module is a ModuleList, or an ``nn.Sequential`` of modules of the same class."""
    module = model.get_submodule(module_path)
    return isinstance(module, nn.ModuleList) or (
        isinstance(module, nn.Sequential) and _all_children_have_same_class(module)
    )


def _all_children_have_same_class(container: nn.Module) -> bool:
    return len({type(module) for module in container.children()}) == 1


def _replace_expert_index_with_wildcard(
    model: nn.Module, path_in_layer: str, layer_path: str, is_attention: bool
) -> str:
    """Replace the index of an expert in a module path with ``*``, so that the path matches all experts."""
    parts = path_in_layer.split(".")
    if is_attention:
        return path_in_layer
    return ".".join(
        "*"
        if part.isdigit()
        and "expert" in parts[i - 1]
        and _all_children_have_same_class(model.get_submodule(join_path(layer_path, *parts[:i])))
        else part
        for i, part in enumerate(parts)
    )


def _is_missing_from_some_layers(model: nn.Module, layer_list_path: str, path_in_layer: str) -> bool:
    names = [name for name, _ in model.named_modules()]
    return any(not match_paths(f"{layer}.{path_in_layer}", names) for layer in find_layer_paths(model, layer_list_path))


def _iter_mlp_candidates(
    model: nn.Module, trace: ForwardTrace, group: ConnectedLinearLayers, layer_path: str
) -> Iterator[MLP]:
    """Yield possible ways to shard a group of linear layers as an MLP."""
    width = _get_linear_num_features(model, group.row, of_output=False)
    features = {_get_linear_num_features(model, c, of_output=True) for c in group.columns}
    if group.other_columns or len(features) != 1 or (out := features.pop()) % width:
        return
    late = group.columns if len(group.columns) == 1 else []  # the entry may follow the start of a residual
    for entry in dict.fromkeys([group.entry, *late]):
        group = replace(group, entry=entry)
        at = _replace_expert_index_with_wildcard(model, entry[len(layer_path) + 1 :], layer_path, is_attention=False)
        ups = [_get_path_relative_to_block(group, c, layer_path) for c in group.columns]
        norm = next(
            (
                _get_path_relative_to_block(group, n, layer_path)
                for n in _find_norm_paths_after_column_linears(model, trace, group, layer_path, {width})
            ),
            None,
        )
        yield MLP(
            at,
            ups if len(ups) > 1 else ups[0],
            _get_path_relative_to_block(group, group.row, layer_path),
            out // width,
            norm,
        )
        if "*" in at:
            return


def _iter_attention_candidates(
    model: nn.Module, trace: ForwardTrace, group: ConnectedLinearLayers, layer_path: str
) -> Iterator[Attention]:
    """Yield possible ways to shard a group of linear layers as attention, most likely first."""
    at, width = group.entry[len(layer_path) + 1 :], _get_linear_num_features(model, group.row, of_output=False)
    names = {c: _get_path_relative_to_block(group, c, layer_path) for c in group.columns}
    features = {names[c]: _get_linear_num_features(model, c, of_output=True) for c in group.columns}
    module = model.get_submodule(group.entry)
    tables = [f"{path}?" for path, m in module.named_modules() if isinstance(m, nn.Embedding)]
    other_columns = [names[c] for c in group.other_columns]
    reads_context = bool(other_columns) and _find_cross_attention_source(trace, group, layer_path) is not None
    arguments = [] if reads_context else _find_extra_projection_inputs(model, trace, group)
    inside = [] if reads_context or arguments else other_columns
    layers = len(_find_same_module_in_all_layers(model, group.row))
    lacking = {name for c, name in names.items() if len(_find_same_module_in_all_layers(model, c)) < layers}
    for projections in guess_qkv_projections(names):
        fields: dict[str, Any] = {
            part: f"{name}?" if part in "kv" and name in lacking else name for part, name in projections.items()
        }
        for count in iter_possible_head_counts(
            model, group.entry, projections, features, width, bool(inside), group.head_dim
        ):
            accessed = _get_accessed_int_attributes(model, trace, group.entry, count)
            numbers = classify_size_attributes(accessed, count, width)
            ways = [numbers, {n: kind for n, kind in numbers.items() if kind != "width"}, {}]
            if hasattr(module, "config"):
                counts = zip(
                    HEAD_COUNT_FIELDS, ("heads", "kv_heads"), (count.num_heads, count.num_kv_heads), strict=True
                )
                matching = [(n, kind) for n, kind, x in counts if get_uniform_config_field(module.config, n) == x]
                ways.append(numbers | {f"config.{n}": kind for n, kind in matching})
            fused = any(part in projections for part in ("qkv", "kv"))
            has_parameters = any(
                model.get_submodule(like)._parameters for like in _find_same_module_in_all_layers(model, group.entry)
            )
            late = has_parameters or len(group.columns) > len(group.other_columns) + 1
            first = [name for name in names.values() if name not in other_columns][:1]
            entries = [None] * (group.reads_entry_input or bool(inside)) + first * late
            norms = _classify_qk_norms(model, trace, group, layer_path, count, width)
            in_partitions = fused and count.num_kv_heads % PARTITIONS == 0
            orders = [(False, 1), *[(True, 1)] * fused, *[(False, PARTITIONS)] * in_partitions]
            others = {**norms, **dict.fromkeys(tables, "heads"), **_find_per_head_arguments(trace, group, count)}
            for give_width, entry, (interleaved, partitions), attributes, parameters in product(
                (False, True),
                entries,
                orders,
                _deduplicate_dicts(ways),
                _guess_param_shard_dims(module, count, width),
            ):
                out = _get_path_relative_to_block(group, group.row, layer_path)
                linears = AttentionProjections(out=out, **fields, interleaved=interleaved, partitions=partitions)
                inputs = AttentionInputs(
                    entry=entry,
                    arguments=tuple(arguments),
                    cross_attention=reads_context,
                    inner_inputs=tuple(inside),
                    reads_width=give_width,
                )
                yield Attention(at, linears, {**attributes, **parameters, **others}, inputs, **count.attention_kwargs)


def _get_accessed_int_attributes(
    model: nn.Module, trace: ForwardTrace, module_path: str, head_counts: AttentionHeadCounts
) -> dict[str, int]:
    """Return the integer attributes that an attention module's forward pass reads, such as its head count."""
    module, head_field = model.get_submodule(module_path), str(head_counts.attention_kwargs.get("num_heads", ""))
    places = {
        like: m
        for like in _find_same_module_in_all_layers(model, module_path)
        if type(m := model.get_submodule(like)) is type(module)
    }
    numbers = {name: getattr(module, name) for like in places for name in trace.accessed_int_attributes.get(like, {})}

    def get_values_in_all_layers(attr_name: str) -> list[int]:
        return [attrgetter(attr_name)(m) for m in places.values()]

    return {
        name: value
        for name, value in numbers.items()
        if value != head_counts.num_heads
        or not head_field.startswith(".")
        or get_values_in_all_layers(name) == get_values_in_all_layers(head_field[1:])
    }


def _get_path_relative_to_block(group: ConnectedLinearLayers, module_path: str, layer_path: str) -> str:
    """Make a module path relative to its block, or relative to the layer if it is outside the block."""
    if f"{module_path}.".startswith(f"{group.entry}."):
        return module_path[len(group.entry) :].lstrip(".")
    return module_path[len(layer_path) :]


def _find_norm_paths_after_column_linears(
    model: nn.Module, trace: ForwardTrace, group: ConnectedLinearLayers, layer_path: str, allowed_norm_sizes: set[int]
) -> list[str]:
    norms = [
        n for n, marks in trace.columns_by_norm.items() if marks & set(group.columns) and n.startswith(f"{layer_path}.")
    ]
    return [norm for norm in norms if _get_norm_num_features(model.get_submodule(norm)) in allowed_norm_sizes]


def _get_norm_num_features(norm: nn.Module) -> int:
    weight = getattr(norm, "weight", None)
    shape = weight.shape if isinstance(weight, nn.Parameter) else getattr(norm, "normalized_shape", (0,))
    return int(shape[-1]) if len(shape) == 1 else 0


def _classify_qk_norms(
    model: nn.Module,
    trace: ForwardTrace,
    group: ConnectedLinearLayers,
    layer_path: str,
    head_counts: AttentionHeadCounts,
    attention_width: int,
) -> dict[str, str]:
    norms = _find_norm_paths_after_column_linears(
        model,
        trace,
        group,
        layer_path,
        {attention_width, attention_width // head_counts.num_heads * head_counts.num_kv_heads}
        - {attention_width // head_counts.num_heads},
    )
    kinds = {}
    for path in norms:
        is_key = "k" in path.rpartition(".")[2].partition("_")[0]
        kind = (
            "heads"
            if _get_norm_num_features(model.get_submodule(path)) == attention_width and not is_key
            else "kv_heads"
        )
        kinds[_get_path_relative_to_block(group, path, layer_path)] = kind
    return kinds


def _guess_param_shard_dims(
    module: nn.Module, head_counts: AttentionHeadCounts, attention_width: int
) -> list[dict[str, Any]]:
    own = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
    if not own:
        return [{}]
    guess = {
        name: "heads"
        if shape.count(head_counts.num_heads) == 1
        else "width"
        if shape.count(attention_width) == 1
        else "inside"
        for name, shape in own.items()
    }
    return _deduplicate_dicts([guess, dict.fromkeys(own, "inside")])


def _find_per_head_arguments(
    trace: ForwardTrace, group: ConnectedLinearLayers, head_counts: AttentionHeadCounts
) -> dict[str, LocalAttr]:
    """Find arguments of an attention module that have a head dimension, such as position biases."""
    arguments = list(trace.inputs.get(group.entry, {}).items())
    samples = arguments[0][1].shape[0] if arguments else 0
    counts = (head_counts.num_heads, samples * head_counts.num_heads)
    dims = {name: [d for d, n in enumerate(x.shape) if n in counts] for name, x in arguments[1:]}
    return {name: ("heads", of[0]) for name, of in dims.items() if of}


def _find_extra_projection_inputs(model: nn.Module, trace: ForwardTrace, group: ConnectedLinearLayers) -> list[str]:
    """Find additional inputs of attention projections, such as the encoder's hidden states."""
    names: dict[str, bool] = {}
    for like in _find_same_module_in_all_layers(model, group.entry):
        arguments = list(trace.inputs.get(like, {}).items())
        read = [x for c in group.columns for x in trace.linear_inputs.get(like + c.removeprefix(group.entry), [])]
        for name, x in arguments[1:]:
            if any(x is r for r in read):
                names[name] = names.get(name, False) or x is not arguments[0][1]
    return list(names) if any(names.values()) else []


def _deduplicate_dicts(dicts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for i, one in enumerate(dicts) if one not in dicts[:i]]


def _find_expert_block_candidates(model: nn.Module, trace: ForwardTrace) -> list[BlockShardingCandidates]:
    found: dict[tuple[str, str], BlockShardingCandidates] = {}
    for path, module in model.named_modules():
        stacked = [name for name, p in module.named_parameters(recurse=False) if p.dim() == 3 and p.shape[0] > 1]
        place = (
            _find_layer_list_and_layer_path(model, path, [path]) if len(stacked) > 1 and path in trace.inputs else None
        )
        if place is None:
            continue
        layers, layer = place
        at = path[len(layer) + 1 :]
        optional = _is_missing_from_some_layers(model, layers, at)
        roles = [replace(role, optional=optional) for role in _iter_expert_candidates(module, at, stacked)]
        found.setdefault(
            (layers, at), BlockShardingCandidates(layers, roles, _find_same_module_in_all_layers(model, path))
        )
    return list(found.values())


def _iter_expert_candidates(
    module: nn.Module, path_in_layer: str, stacked_weight_names: Sequence[str]
) -> Iterator[Experts]:
    """Yield possible ways to shard expert weights that are stacked in 3D tensors."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False) if p.dim() in (2, 3)}
    identities = [name for name, m in module.named_children() if isinstance(m, nn.Identity)]
    for down, (fused, interleaved) in product(reversed(stacked_weight_names), ((2, False), (1, False), (2, True))):
        for dims in list_expert_shard_dim_choices(shapes, down, fused):
            ups = [name for name in dims if name != down]
            summands = [*(name for name in shapes if name not in dims), *identities]
            yield Experts(path_in_layer, ups if len(ups) > 1 else ups[0], down, summands, fused, interleaved, dims)


def _find_cross_attention_source(
    trace: ForwardTrace, group: ConnectedLinearLayers, layer_list_path: str
) -> tuple[str, str] | None:
    """Find the argument that passes the encoder's hidden states to the decoder, or return None."""
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


def _find_final_norm_path(model: nn.Module, trace: ForwardTrace, layer_list_path: str) -> str | None:
    """Return the path of the final norm after the last layer, or None if there is none."""
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


def _get_linear_num_features(model: nn.Module, linear_path: str, *, of_output: bool) -> int:
    return get_num_linear_features(model.get_submodule(linear_path), return_out_features=of_output)


EXPERT_STYLES = {"rowwise": ("colwise", "packed_colwise"), "colwise": ("packed_rowwise",)}
"""By the style of the down projection of stacked experts, the styles of their other weights, maybe transposed."""


def merge_transformers_tp_plans(model: nn.Module) -> dict[str, str]:
    """Merge the tensor parallel plans of all transformers configs in a model into one plan."""
    plan: dict[str, str] = {}
    for path, module in model.named_modules():
        own: Any = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        if isinstance(own, Mapping) and getattr(module, "base_model", None if path else module) is module:
            plan |= {join_path(path, str(name)): str(style) for name, style in own.items()}
    return plan


def find_role_matching_plan(
    tp_plan: Mapping[str, str], layer_list_path: str, candidate_roles: Iterable[Role]
) -> Role | None:
    """Return the first candidate role that agrees with a transformers tensor parallel plan, or None."""
    return next(
        (role for role in candidate_roles if _is_role_consistent_with_tp_plan(tp_plan, f"{layer_list_path}.*", role)),
        None,
    )


def _is_role_consistent_with_tp_plan(tp_plan: Mapping[str, str], layer_path: str, role: Role) -> bool:
    if isinstance(role, Attention):
        linears = role.projections
        if linears.interleaved or linears.qkv is not None:  # the plan omits the order of heads in a fused matrix
            return False
        columns = [name for name in (linears.q, linears.k, linears.v, linears.kv) if name] + [*linears.gates]
        down = linears.out
    else:
        columns, down = [role.up] if isinstance(role.up, str) else [*role.up], role.down

    def get_tp_style(linear_name: str) -> str:
        return tp_plan.get(join_path(layer_path, resolve_relative_path(role.at, linear_name.rstrip("?"))), "")

    if isinstance(role, Experts):
        ups = [get_tp_style(name) for name in columns if not name.endswith("bias")]
        fused = {"packed": 2}.get(ups[0].partition("_")[0], 1) if ups else 0
        return fused == role.fused and all(up in EXPERT_STYLES.get(get_tp_style(down), ()) for up in ups)
    return get_tp_style(down).startswith("rowwise") and all(
        get_tp_style(name).startswith("colwise") for name in columns
    )
