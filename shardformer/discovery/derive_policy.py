"""Derives a sharding policy for a model that has none, from a traced forward pass of a small version of the model.

The policy is validated by training this reduced model. This module also formats policies as Python source, and builds
the error for a model without a policy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import partial
from textwrap import fill, indent
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.discovery import reduced_model
from shardformer.discovery.candidate_roles import (
    BlockShardingCandidates,
    find_block_candidates,
    find_role_matching_plan,
    merge_transformers_tp_plans,
)
from shardformer.discovery.example_inputs import (
    Forward,
    UnknownInputsError,
    convert_batch_to_forward_kwargs,
    get_required_forward_args,
)
from shardformer.discovery.forward_trace import count_layer_outputs, find_layer_paths, trace_forward
from shardformer.discovery.layer_stacks import find_layer_stacks, find_pipeline_hints, find_sequence_parallel_hints
from shardformer.discovery.reduced_model import ReducedModel, ReferenceGradients, reduce_model
from shardformer.discovery.shrink_config import LayerKind, build_meta_model, get_layer_kind
from shardformer.discovery.validation import get_layer_stacks, validate_policy
from shardformer.errors import PolicyError, suggest_similar_names
from shardformer.module_paths import is_linear_or_conv1d
from shardformer.policies.policy import FAMILIES, get_model_family_name
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import Attention, LayerStack, Role
from shardformer.sharding.checks import check_not_sharded
from shardformer.sharding.plan import make_sharding_plan
from shardformer.transformers_compat import find_embeddings

WIDTH = 100
"""Width of printed policies, in characters."""


def format_policy_source_with_notes(policy: RolePolicy, class_name: str = "MyPolicy") -> str:
    """Format a policy as the Python source of a class called ``class_name``, with notes as comments."""
    notes = [
        fill(note, WIDTH, initial_indent="# ", subsequent_indent="#   ", break_long_words=False)
        for note in policy.notes
    ]
    return "\n".join(notes) + "\n\n" + format_policy_class_source(policy, class_name)


def format_policy_class_source(policy: RolePolicy, class_name: str = "MyPolicy") -> str:
    """Format a policy as the Python source of a class, including the import statement."""
    stacks = get_layer_stacks(policy)
    used_classes: set[str] = {"RolePolicy"}
    lines = [f"class {class_name}(RolePolicy):"]
    if "base" in vars(type(policy)):
        lines.append('    base = ""  # paths are relative to the full model')
    if len(stacks) == 1:
        lines += [f"    stack = {_format_layer_stack_source(stacks[0], '    ', used_classes)}"]
    else:
        lines += [
            "    stack = (",
            *(f"        {_format_layer_stack_source(stack, '        ', used_classes)}," for stack in stacks),
            "    )",
        ]
    lines += [
        f"    {n} = {_split_call_into_lines(repr(getattr(policy, n)), '    ')}"
        for n in ("embeddings", "head", "keep_replicated")
        if getattr(policy, n)
    ]
    lines = [line.replace("'", '"') for line in lines]
    for reason in ("no_sequence_parallel", "no_pipeline"):
        if getattr(policy, reason):
            lines.append(f"    {reason} = {json.dumps(getattr(policy, reason))}")
    return "\n".join([f"from shardformer.policies import {', '.join(sorted(used_classes))}", "", "", *lines]) + "\n"


def _split_call_into_lines(call_source: str, indentation: str) -> str:
    """Split a long function call into one line per argument."""
    if len(indentation) + len(call_source) < WIDTH or not call_source.endswith(")"):
        return call_source
    start, depth, parts = call_source.index("(") + 1, 0, [""]
    for letter in call_source[start:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    inner = f"{indentation}    "
    lines = [f"{inner}{_split_call_into_lines(part.strip(), inner)}," for part in parts if part.strip()]
    return "\n".join([call_source[:start], *lines, f"{indentation})"])


def format_role_source(role: Role) -> str:
    """Format a policy entry such as ``Attention("attn", ...)`` as a one-line Python expression."""
    return _format_as_python_source(role, set()).replace("'", '"')


def _format_layer_stack_source(layer_stack: LayerStack, indentation: str, used_class_names: set[str]) -> str:
    """Format a ``LayerStack`` as Python source, and add the class names it uses to ``used_class_names``."""
    used_class_names.add("LayerStack")
    inner = f"{indentation}    "
    lines = ["LayerStack(", f"{inner}{layer_stack.layers!r},", f"{inner}["]
    lines += [
        f"{inner}    {_split_call_into_lines(_format_as_python_source(block, used_class_names), f'{inner}    ')},"
        for block in layer_stack.blocks
    ]
    lines.append(f"{inner}],")
    lines += [
        f"{inner}{n}={text},"
        for n, text in _format_non_default_fields(layer_stack, used_class_names)
        if n not in ("layers", "blocks")
    ]
    return "\n".join([*lines, f"{indentation})"])


def _format_as_python_source(field_value: Any, used_class_names: set[str]) -> str:
    if not is_dataclass(field_value):
        return repr(field_value)
    used_class_names.add(type(field_value).__name__)
    arguments = [
        text if n in ("at", "projections") else f"{n}={text}"
        for n, text in _format_non_default_fields(field_value, used_class_names)
    ]
    return f"{type(field_value).__name__}({', '.join(arguments)})"


def _format_non_default_fields(dataclass_instance: Any, used_class_names: set[str]) -> list[tuple[str, str]]:
    out = []
    for f in (f for f in fields(dataclass_instance) if f.init):
        usual = f.default if f.default_factory is MISSING else f.default_factory()
        if getattr(dataclass_instance, f.name) not in (usual, (), [], {}):
            out.append((f.name, _format_as_python_source(getattr(dataclass_instance, f.name), used_class_names)))
    return out


VALIDATION_RANKS = (2, 4)
"""Tensor parallel sizes for validation. 2 divides the six heads of a reduced model, but 4 does not."""
UNEVEN = 3  # a tensor parallel size that divides no power of two
MAX_CANDIDATES = 40  # largest number of candidate roles that are validated for one block
EVAL_MODE_NOTE = "The policy was validated in eval mode only: training the reduced model fails or is not deterministic."
OUTSIDE_LAYERS_REASON = "it is outside the layers"


class PolicyDerivationError(PolicyError):
    """Raised if no policy can be derived for a model.

    Attributes:
        reason: why no policy can be derived.
        nearest_policy_source: source code of the policy that comes closest to passing validation, or an empty string.
    """

    reason: str = ""
    nearest_policy_source: str = ""


class NoShardableLayerError(PolicyDerivationError):
    """Raised if no layer of a model can be sharded by tensor parallelism."""


class DerivedPolicy(RolePolicy):
    """A sharding policy that ShardFormer derived automatically. ``str(policy)`` returns its Python source.

    Attributes:
        layers: the kinds of layers that were validated, by the path of their stack.
    """

    layers: Mapping[str, frozenset[LayerKind]] = MappingProxyType({})

    def __str__(self) -> str:
        return format_policy_source_with_notes(self)

    def replicated_paths(self) -> None:
        """Return None, which allows parameters to stay replicated if they could not be sharded."""

    def config_sanity_check(self) -> None:
        super().config_sanity_check()
        for layers, made in self.layers.items():
            for path in find_layer_paths(self.model, layers):
                if get_layer_kind(self.model.get_submodule(path)) not in made:
                    raise PolicyError(
                        f"The derived policy does not cover the layer {path}, because its modules differ from those of "
                        "the layers on which the policy was validated.",
                        remedy="Write a policy for this model (docs/policies.md).",
                    )


def derive_policy(
    model: nn.Module | Any, batch: Mapping[str, Tensor] | Sequence[Tensor] | Tensor | None = None
) -> RolePolicy:
    """Derive a sharding policy for a model, and validate it in a few seconds on a small version of the model.

    Args:
        model: a model, or a transformers config, whose first architecture is used.
        batch: an example batch of `forward` arguments, by name or in order. It is required if the model takes inputs
            other than tokens, images or audio, and must fit the reduced model. If the model has up to 20 million
            parameters and its config cannot be reduced, a copy of the model is used instead.

    Returns:
        A policy that can be passed to ``shard_model``. Print it to get its Python source code.

    Raises:
        PolicyError: if no reduced model can be built and run, or no block of the model can be sharded.
        ConfigError: if the model is already sharded.
    """
    if isinstance(model, nn.Module):
        check_not_sharded(model)
    with reduced_model.ONE_AT_A_TIME, torch.enable_grad(), torch.random.fork_rng(devices=[]):
        full = model if isinstance(model, nn.Module) else build_meta_model(model)
        reduced = reduce_model(full, None if batch is None else convert_batch_to_forward_kwargs(batch, full))
        return derive_policy_from_forward(
            reduced.model, reduced.forward_fn, reduced, merge_transformers_tp_plans(full)
        )()


def derive_pipeline_only_policy(model: nn.Module, *, allow_model_copy: bool = False) -> RolePolicy:
    """Derive a policy that splits a model's layers into pipeline stages and shards no weights.

    The policy has no stack if no reduced model can be built and run.

    Args:
        allow_model_copy: whether a copy of the model may be used if no reduced model can be built.
    """
    with reduced_model.ONE_AT_A_TIME, torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            reduced = reduced_model.reduce_or_copy_model(model) if allow_model_copy else reduce_model(model)
        except PolicyError as error:
            note = f"The model was not searched for stacks of layers: {error if allow_model_copy else f'{error.what}.'}"
            empty: type[DerivedPolicy] = type(
                "GeneratedPolicy", (DerivedPolicy,), {"base": "", "stack": (), "notes": [note]}
            )
            return empty()
        reference = reduced.compute_reference_gradients()
        found = find_layer_stacks(reference)
        first = _make_pipeline_only_policy_class(found, reference, reduced)
        sizes = {s.layers: reduced_model.count_parameters(reduced.model.get_submodule(s.layers)) for s in found}
        alone = found if len(found) > 1 and first.no_pipeline else []
        largest_first = sorted(alone, key=lambda stack: -sizes[stack.layers])
        others = (_make_pipeline_only_policy_class([stack], reference, reduced) for stack in largest_first)
        return next((policy for policy in others if policy.no_pipeline is None), first)()


def _make_pipeline_only_policy_class(
    layer_stacks: Sequence[LayerStack], reference: ReferenceGradients, reduced: ReducedModel
) -> type[DerivedPolicy]:
    kinds = {stack.layers: _get_layer_kinds(reference.model, stack.layers) for stack in layer_stacks}
    note = "The layers are replicated over tensor ranks, because no role that fits them was found."
    fields = {"base": "", "stack": layer_stacks, "layers": kinds, "notes": [note]}
    policy: type[DerivedPolicy] = type("GeneratedPolicy", (DerivedPolicy,), fields)
    if layer_stacks:
        policy.stack, policy.no_pipeline = _find_validated_hints(
            "pipe", reduced, reference, policy, find_pipeline_hints
        )
    return policy


def derive_policy_from_forward(
    model: nn.Module,
    forward_fn: Forward,
    reduced: ReducedModel | None = None,
    tp_plan: Mapping[str, str] = MappingProxyType({}),
) -> type[DerivedPolicy]:
    """Derive a policy from a small model's forward pass, and validate it by training the model.

    Args:
        reduced: the model and calls with further inputs. If validation fails for these inputs, the policy records them
            in ``unproven``, and a forward pass with these inputs raises an error.
        tp_plan: the tensor parallel plan of transformers. If roles that match the plan fail, all candidates are tried.

    Raises:
        PolicyError: if no policy passes validation.
    """
    reduced = reduced or ReducedModel(model, forward_fn, {})
    cache = _PolicyValidationCache(ReferenceGradients.from_model(model, forward_fn))
    # validate each block over 2 ranks and all blocks together over 2 and 4; if that fails, each block over 2 and 4
    tries: list[tuple[Sequence[int], Mapping[str, str]]] = [(VALIDATION_RANKS[:1], {}), (VALIDATION_RANKS, {})]
    for ranks, draft in [(VALIDATION_RANKS[:1], tp_plan), *tries] if tp_plan else tries:
        blocks, replicated = _find_shardable_blocks(cache, ranks, draft)
        vocabulary = _find_embedding_and_lm_head_paths(model)
        policy = _build_derived_policy_class(model, blocks, vocabulary)
        if blocks and cache.find_failure(policy, VALIDATION_RANKS) is not None:
            failure = cache.find_failure(_build_derived_policy_class(model, [], vocabulary), VALIDATION_RANKS)
            if failure is not None:
                replicated |= {path: failure for paths in vocabulary.values() for path in paths}
                vocabulary = {}
        policy = _build_derived_policy_class(model, blocks, vocabulary)
        problem = cache.find_failure(policy, VALIDATION_RANKS) if blocks else _format_no_blocks_reason(replicated)
        if problem is None:
            break
        if not (blocks or draft):
            raise _make_derivation_error(model, cache, problem, NoShardableLayerError)
    if problem is not None:
        raise _make_derivation_error(model, cache, problem, PolicyDerivationError)
    outputs = count_layer_outputs(model, forward_fn, policy.layers)
    policy.stack = validated = [
        replace(stack, stages=replace(stack.stages, num_outputs=outputs[layers]))
        for stack, layers in zip(get_layer_stacks(policy), policy.layers, strict=True)
    ]
    references = replace(cache.reference, further_batches=reduced.compute_media_gradients())
    failure = validate_policy(references, policy, VALIDATION_RANKS[0]) if references.further_batches else None
    policy.unproven = {"tensor": reduced.get_unvalidated_input_reasons(failure)} if failure is not None else {}
    policy.stack, policy.no_pipeline = _find_validated_hints("pipe", reduced, references, policy, find_pipeline_hints)
    if (problem := cache.find_failure(policy, VALIDATION_RANKS)) is not None:  # return only a validated policy
        policy.stack, policy.no_pipeline = validated, problem
    find = partial(find_sequence_parallel_hints, stack_paths=tuple(policy.layers), num_ranks=VALIDATION_RANKS[0])
    references = reduced.add_long_batch(references)
    stacks, reason = _find_validated_hints("enable_sequence_parallelism", reduced, references, policy, find)
    policy.stack, policy.no_sequence_parallel = stacks[0] if len(stacks) == 1 else tuple(stacks), reason
    reasons = [(option, *item) for option, inputs in policy.unproven.items() for item in inputs.items()]
    unvalidated = [f"With {option}, a batch with {name} raises an error: {why}." for option, name, why in reasons]
    closest = [f"The closest role for {b.layer_list_path}: {format_role_source(b.roles[0])}." for b in cache.nearest]
    mode = [] if reduced.model.training else [EVAL_MODE_NOTE]
    policy.notes = [*_format_derivation_notes(replicated, policy.no_pipeline), *mode, *unvalidated, *closest]
    policy.keep_replicated = _find_unsharded_weight_paths(model, policy())
    return policy


def _format_no_blocks_reason(reason_by_path: dict[str, str]) -> str:
    path_by_reason = {reason: path for path, reason in reversed(reason_by_path.items()) if reason}
    found = "; ".join(f"{path}: {reason}" for reason, path in sorted(path_by_reason.items()))
    return found or "no linear layer feeds another"


def _make_derivation_error(
    model: nn.Module, validation_cache: _PolicyValidationCache, reason: str, error_cls: type[PolicyDerivationError]
) -> PolicyDerivationError:
    error = error_cls(
        f"No policy for {type(model).__name__} could be derived: {reason}",
        rule="ShardFormer derives a policy for the attention modules and MLPs in a list of layers, and validates the "
        "policy on a small version of the model",
        remedy="Use data parallelism and ZeRO (data=, zero_stage=), which need no policy, or write a policy for this "
        "model (docs/policies.md)"
        if error_cls is NoShardableLayerError
        else "Write a policy for this model (docs/policies.md)",
    )
    error.reason = reason
    if isinstance(error, NoShardableLayerError) and validation_cache.nearest:
        closest = _build_derived_policy_class(model, validation_cache.nearest, _find_embedding_and_lm_head_paths(model))
        closest.keep_replicated = _find_unsharded_weight_paths(model, closest())
        error.nearest_policy_source = str(closest()).lstrip()
    return error


def _find_validated_hints(
    feature: str,
    reduced: ReducedModel,
    reference: ReferenceGradients,
    policy_cls: type[RolePolicy],
    find_hints_fn: Callable[[ReferenceGradients, type[RolePolicy]], tuple[Sequence[LayerStack], str | None]],
) -> tuple[Sequence[LayerStack], str | None]:
    """Find policy settings for pipeline or sequence parallelism that pass validation.

    If they only pass for the first example batch, the inputs of the other batches are recorded as unvalidated.
    """
    stacks, failure = find_hints_fn(reference, policy_cls)
    first_only = None
    if failure is not None and reference.further_batches:
        stacks_of_first, reason = find_hints_fn(replace(reference, further_batches=()), policy_cls)
        if reason is None:
            stacks, failure, first_only = stacks_of_first, None, failure
    unproven = reduced.get_unvalidated_input_reasons(first_only)
    if feature == "pipe":  # a stage stores NaN for missing parameters, so the first step detects an error
        unproven = {name: reason for name, reason in unproven.items() if name not in reduced.untried_inputs}
    policy_cls.unproven = {**policy_cls.unproven, feature: unproven}
    return stacks, failure


def _find_shardable_blocks(
    validation_cache: _PolicyValidationCache, tp_sizes: Sequence[int], tp_plan: Mapping[str, str]
) -> tuple[list[BlockShardingCandidates], dict[str, str]]:
    """Find the blocks that can be sharded, and explain why each other linear layer is replicated."""
    model, run = validation_cache.reference.model, validation_cache.reference.forward_fn
    replicated = {
        path: OUTSIDE_LAYERS_REASON
        for path, m in model.named_modules()
        if is_linear_or_conv1d(m) and not _is_inside_module_list(model, path)
    }
    while True:
        blocks, again = _find_valid_blocks(
            validation_cache,
            find_block_candidates(model, trace_forward(model, run, replicated)),
            replicated,
            tp_sizes,
            tp_plan,
        )
        if not again:
            return blocks, replicated
        replicated |= again


class _PolicyValidationCache:
    """Cache of validation results, so that no candidate policy is validated twice."""

    def __init__(self, reference: ReferenceGradients) -> None:
        self.reference = reference
        self.nearest: list[BlockShardingCandidates] = []
        """The first candidate of each attention module for which no candidate passed."""
        self._tried: dict[tuple[str, int], str | None] = {}

    def find_failure(self, policy_cls: type[RolePolicy], tp_sizes: Sequence[int]) -> str | None:
        """Validate a policy for each tensor parallel size, and return the first failure or None."""
        key = str([get_layer_stacks(policy_cls), policy_cls.embeddings, policy_cls.head])
        for size in tp_sizes:
            if (key, size) not in self._tried:
                self._tried[key, size] = validate_policy(self.reference, policy_cls, size)
            if (problem := self._tried[key, size]) is not None:
                return problem
        return None


def _find_unsharded_weight_paths(model: nn.Module, policy: DerivedPolicy) -> tuple[str, ...]:
    """Return the paths of weight matrices that the policy does not shard, in the format of ``keep_replicated``."""
    policy.set_model(model)
    cut, base = (
        make_sharding_plan(model, policy).get_sharded_param_names_by_id(),
        f"{policy.base}." if policy.base else "",
    )
    names = [name.removesuffix(".weight") for name, p in model.named_parameters() if p.dim() > 1 and id(p) not in cut]
    paths = [name.removeprefix(base) if name.startswith(base) else f".{name}" for name in names]
    return tuple(dict.fromkeys(map(_replace_indices_with_wildcards, paths)))


def _replace_indices_with_wildcards(module_path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in module_path.split("."))


def _get_layer_kinds(model: nn.Module, layer_list_path: str) -> frozenset[LayerKind]:
    return frozenset(get_layer_kind(model.get_submodule(path)) for path in find_layer_paths(model, layer_list_path))


def _format_derivation_notes(replication_reason_by_path: Mapping[str, str], pipeline_failure: str | None) -> list[str]:
    over = f"over {' and '.join(map(str, VALIDATION_RANKS))} tensor ranks"
    stages = " and over two pipeline stages" if pipeline_failure is None else ""
    validated = f"The policy was derived, and validated on a reduced model {over}{stages}."
    reasons: dict[str, list[str]] = {}
    for path, reason in replication_reason_by_path.items():
        if reason != OUTSIDE_LAYERS_REASON:
            reasons.setdefault(reason, []).append(_replace_indices_with_wildcards(path))
    return [
        validated,
        *(f"Replicated, because {reason}: {', '.join(dict.fromkeys(paths))}." for reason, paths in reasons.items()),
    ]


def _is_inside_module_list(model: nn.Module, module_path: str) -> bool:
    parts = module_path.split(".")
    around = [".".join(parts[:i]) for i in range(len(parts)) if parts[i].isdigit()]
    return any(isinstance(model.get_submodule(p), nn.ModuleList) for p in around)


def _get_tp_sizes_for_role(role: Role, tp_sizes: Sequence[int]) -> Sequence[int]:
    """Select the tensor parallel sizes at which an attention module or MLP must be validated.

    Interleaved heads need an uneven size, because 2 and 4 ranks cannot distinguish them from partitions (CodeGen).
    """
    return [*tp_sizes, UNEVEN] if isinstance(role, Attention) and role.projections.interleaved else tp_sizes


def _find_valid_blocks(
    validation_cache: _PolicyValidationCache,
    block_candidates: Sequence[BlockShardingCandidates],
    replication_reason_by_path: Mapping[str, str],
    tp_sizes: Sequence[int],
    tp_plan: Mapping[str, str],
) -> tuple[list[BlockShardingCandidates], dict[str, str]]:
    """Find a valid way to shard each block, and stop at the first block that must be replicated.

    The search stops at that block, because its replicated linear layers change the marks that later blocks depend on.
    """
    validated: list[BlockShardingCandidates] = []
    for block in block_candidates:
        reason = block.replication_reason
        if (
            planned := find_role_matching_plan(tp_plan, block.layer_list_path, block.roles)
        ) is not None:  # validated with all others
            validated.append(replace(block, roles=[planned]))
            continue
        for role in block.roles[:MAX_CANDIDATES]:
            alone = replace(block, roles=[role])
            if (
                problem := validation_cache.find_failure(
                    _build_derived_policy_class(validation_cache.reference.model, [alone], {}),
                    _get_tp_sizes_for_role(role, tp_sizes),
                )
            ) is None:
                validated.append(alone)
                break
            reason = reason or f"no candidate for sharding it passed validation: {problem}"
        else:
            again = {column: reason for column in block.column_paths if column not in replication_reason_by_path}
            if again:
                _cache_rejected_attention(validation_cache, block)
                return [], again
    return validated, {}


def _cache_rejected_attention(validation_cache: _PolicyValidationCache, block: BlockShardingCandidates) -> None:
    """Save the best guess for an attention module that failed validation, so that the error can suggest it."""
    roles = [] if hasattr(validation_cache.reference.model, "config") else block.roles
    first = next(iter(roles), None)
    if isinstance(first, Attention) and not first.at:  # the layer itself adds the residual
        first = next((role for role in roles if isinstance(role, Attention) and role.inputs.entry), first)
    if isinstance(first, Attention) and all(first.at != closest.roles[0].at for closest in validation_cache.nearest):
        validation_cache.nearest.append(replace(block, roles=[first]))


def _build_derived_policy_class(
    model: nn.Module, blocks: Sequence[BlockShardingCandidates], embedding_and_head_paths: Mapping[str, tuple[str, ...]]
) -> type[DerivedPolicy]:
    """Build a policy class that shards the blocks, the token embeddings and the LM head."""
    prefix = getattr(model, "base_model_prefix", "")
    stacks = {
        block.layer_list_path: [b for b in blocks if b.layer_list_path == block.layer_list_path] for block in blocks
    }
    paths = [*stacks, *embedding_and_head_paths.get("embeddings", ())]
    inside = bool(prefix) and hasattr(model, prefix) and all(p.startswith(f"{prefix}.") for p in paths)

    def to_relative_path(module_path: str) -> str:
        return module_path.removeprefix(prefix).removeprefix(".") if inside else module_path

    table = []
    for layers, of_stack in stacks.items():
        norm = next((to_relative_path(b.final_norm) for b in of_stack if b.final_norm), None)
        context = next(
            (
                (to_relative_path(b.cross_states_source[0]), b.cross_states_source[1])
                for b in of_stack
                if b.cross_states_source
            ),
            None,
        )
        table.append(
            LayerStack(to_relative_path(layers), [b.roles[0] for b in of_stack], final_norm=norm, cross_states=context)
        )
    fields: dict[str, Any] = {
        "stack": tuple(table),
        "embeddings": tuple(to_relative_path(path) for path in embedding_and_head_paths.get("embeddings", ())),
        "head": embedding_and_head_paths.get("head", ()),
        "layers": {layers: _get_layer_kinds(model, layers) for layers in stacks},
    }
    if not inside:
        fields["base"] = ""
    return type("GeneratedPolicy", (DerivedPolicy,), fields)


def _find_embedding_and_lm_head_paths(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Find a model's token embeddings and LM heads."""
    tokens = find_embeddings(model, "input")
    if not isinstance(tokens, nn.Embedding):
        return {}
    modules = dict(model.named_modules(remove_duplicate=False))
    output: Any = find_embeddings(model, "output")
    return {
        "embeddings": tuple(n for n, m in modules.items() if isinstance(m, nn.Embedding) and m.weight is tokens.weight),
        "head": tuple(
            n for n, m in modules.items() if is_linear_or_conv1d(m) and (m is output or m.weight is tokens.weight)
        ),
    }


EXAMPLE = """
    import shardformer
    from shardformer.policies import MLP, Attention, AttentionProjections, LayerStack, RolePolicy

    class MyPolicy(RolePolicy):
        stack = LayerStack("layers", [           # the ModuleList of layers; paths below are relative to a layer
            Attention("attn", AttentionProjections(q="q", k="k", v="v", out="o"), local_attrs={"num_heads": "heads"}),
            MLP("mlp", up="fc1", down="fc2"),
        ])
        embeddings = "embed"                     # over the vocabulary
        num_heads = 4                            # or the name of a config field

    model = shardformer.shard_model(model, policy=MyPolicy)
"""

IN_ITS_FORWARD = (
    "In `forward` of the attention module, reshape with -1 or with an attribute that is listed in local_attrs, because "
    "a rank has only some of the heads. Then use this policy"
)


def make_no_policy_error(
    model: nn.Module, derivation_error: PolicyError, tensor_parallel_size: int | None
) -> PolicyDerivationError:
    """Build the error for a model that has no policy and for which none can be derived.

    Args:
        derivation_error: the error of ``derive_policy``.
        tensor_parallel_size: the requested tensor parallel size, if known.
    """
    reason = derivation_error.reason if isinstance(derivation_error, PolicyDerivationError) else derivation_error.what
    if isinstance(derivation_error, UnknownInputsError) and get_model_family_name(model) is None:
        found = _make_unknown_inputs_error(model, reason)
    elif isinstance(derivation_error, NoShardableLayerError):
        found = _make_no_shardable_layer_error(
            model, reason, tensor_parallel_size, derivation_error.nearest_policy_source
        )
    else:
        found = _make_missing_policy_error(model, reason)
    found.reason = reason
    return found


def _make_missing_policy_error(model: nn.Module, reason: str) -> PolicyDerivationError:
    family, name = get_model_family_name(model), type(model).__name__
    tried = f"model type {family!r}" if family else "it has no config with a model type"
    return PolicyDerivationError(
        f"No policy for {name} was passed or is registered ({tried}), and none could be derived: {reason}.",
        rule=f"The registered families are {', '.join(FAMILIES)}.",
        remedy=(f"{suggest_similar_names(family, FAMILIES)} " if family else "")
        + f"Pass a policy that describes the modules of the model (docs/policies.md):\n{EXAMPLE}",
    )


def _make_unknown_inputs_error(model: nn.Module, reason: str) -> PolicyDerivationError:
    batch = ", ".join(f'"{name}": ...' for name in get_required_forward_args(model))
    return PolicyDerivationError(
        f"No policy for {type(model).__name__} could be derived from a forward pass: {reason}.",
        remedy="Pass a small example batch that is identical on all ranks:\n\n"
        f"    policy = shardformer.derive_policy(model, batch={{{batch}}})\n"
        "    model = shardformer.shard_model(model, policy=policy)\n\n"
        "On the command line, pass FILE.py:function, where the function returns (model_fn, batch_fn). You can also "
        "write a policy (docs/policies.md).",
    )


def _make_no_shardable_layer_error(
    model: nn.Module, reason: str, tensor_parallel_size: int | None, nearest_policy_source: str
) -> PolicyDerivationError:
    name = type(model).__name__
    requested = f" over tensor={tensor_parallel_size}" if tensor_parallel_size else ""
    stacks = derive_pipeline_only_policy(model)
    if not stacks.stack:
        pipe = f"Pipeline parallelism finds no stack of layers in {name}"
    elif stacks.no_pipeline:
        pipe = f"Pipeline parallelism does not support {name} ({stacks.no_pipeline})"
    else:
        pipe = "Or use pipeline stages: launch_from_torch(pipe=2)"
    closest = f"{IN_ITS_FORWARD}:\n{indent(nearest_policy_source, '    ')}\n" if nearest_policy_source else ""
    return PolicyDerivationError(
        f"No layer of {name} can be sharded{requested} by tensor parallelism: {reason}.",
        remedy=f"{closest}To save memory without the tensor axis, use launch_from_torch(data=2) and "
        f"shardformer.shard_optimizer(model, optimizer, stage=3). {pipe}. If you know how to shard some of the "
        "modules, write a policy (docs/policies.md).",
    )
