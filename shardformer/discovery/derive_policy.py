"""Derives a policy for a model without one: candidates from one forward, validated before use.

Also writes a policy as Python, and suggests what to write where none was found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import partial
from textwrap import indent
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.discovery.candidate_roles import BlockCandidates, candidate_blocks, role_in_plan, transformers_plan_of
from shardformer.discovery.example_inputs import Forward, UnknownInputsError, required_arguments
from shardformer.discovery.forward_trace import outputs_per_layer, trace_forward
from shardformer.discovery.layer_stacks import find_layer_stacks, find_pipeline_hints, find_sequence_hints
from shardformer.discovery.reduced_model import (
    ONE_AT_A_TIME,
    ReducedModel,
    ReferenceGradients,
    reduce_model,
    twin_or_copy_of,
)
from shardformer.discovery.shrink_config import BuildModel, build_meta_model, layer_kind
from shardformer.discovery.validation import validate_policy
from shardformer.errors import PolicyError, did_you_mean
from shardformer.module_paths import is_linear, match_paths
from shardformer.policies.registry import FAMILIES, family_of
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import Attention, LayerStack, Role
from shardformer.sharding.checks import check_not_sharded
from shardformer.sharding.plan import make_plan


def policy_as_python(policy: RolePolicy, name: str = "MyPolicy") -> str:
    """The same, below what is noted of the policy."""
    return "".join(f"# {note}\n" for note in policy.notes) + "\n" + policy_module_source(policy, name)


def policy_module_source(policy: RolePolicy, name: str = "MyPolicy") -> str:
    """A module that defines ``policy`` as the class ``name``."""
    stacks = [policy.stack] if isinstance(policy.stack, LayerStack) else list(policy.stack)
    used: set[str] = {"RolePolicy"}
    lines = [f"class {name}(RolePolicy):"]
    if "base" in vars(type(policy)):
        lines.append('    base = ""  # paths are those of the whole model')
    if len(stacks) == 1:
        lines += [f"    stack = {_stack(stacks[0], '    ', used)}"]
    else:
        lines += ["    stack = (", *(f"        {_stack(stack, '        ', used)}," for stack in stacks), "    )"]
    lines += [
        f"    {n} = {getattr(policy, n)!r}" for n in ("embeddings", "head", "keep_replicated") if getattr(policy, n)
    ]
    lines = [line.replace("'", '"') for line in lines]
    for reason in ("no_sequence_parallel", "no_pipeline"):
        if getattr(policy, reason):
            lines.append(f"    {reason} = {json.dumps(getattr(policy, reason))}")
    return "\n".join([f"from shardformer.policies import {', '.join(sorted(used))}", "", "", *lines]) + "\n"


def role_source(role: Role) -> str:
    """A role as Python, in one line."""
    return _as_source(role, set()).replace("'", '"')


def _stack(stack: LayerStack, indent: str, used: set[str]) -> str:
    """The stack with a line for each of its blocks; the names of the classes that are written are ``used``."""
    used.add("LayerStack")
    inner = f"{indent}    "
    lines = ["LayerStack(", f"{inner}{stack.layers!r},", f"{inner}["]
    lines += [f"{inner}    {_as_source(block, used)}," for block in stack.blocks]
    lines.append(f"{inner}],")
    lines += [f"{inner}{n}={text}," for n, text in _non_default_fields(stack, used) if n not in ("layers", "blocks")]
    return "\n".join([*lines, f"{indent})"])


def _as_source(value: Any, used: set[str]) -> str:
    if not is_dataclass(value):
        return repr(value)
    used.add(type(value).__name__)
    said = [text if n in ("at", "projections") else f"{n}={text}" for n, text in _non_default_fields(value, used)]
    return f"{type(value).__name__}({', '.join(said)})"


def _non_default_fields(value: Any, used: set[str]) -> list[tuple[str, str]]:
    """The fields that are not as they would be anyway, and their text."""
    out = []
    for f in fields(value):
        usual = f.default if f.default_factory is MISSING else f.default_factory()
        if getattr(value, f.name) not in (usual, (), [], {}):
            out.append((f.name, _as_source(getattr(value, f.name), used)))
    return out


VALIDATION_RANKS = (2, 4)
"""Tensor sizes that a policy is proven over: on the twin, with six heads, an even cut and an uneven one."""
UNEVEN = 3
"""A tensor size over which no number of heads that is a power of two is cut evenly."""
MAX_TRIES = 40
"""Ways to describe one block that are tried."""
OUTSIDE_LAYERS_REASON = "it stands outside of the layers"


class NothingShardedError(PolicyError):
    """No block of a model could be described. ``nearest`` is a table that says what was tried first of an attention."""

    nearest: str = ""


class DerivedPolicy(RolePolicy):
    """A table that was inferred and proven. Printed, it is Python that can be saved and edited.

    Class attributes:
        layers: path of each stack -> what the layers of the twin are made of. Others were not proven.
    """

    layers: Mapping[str, frozenset[BuildModel]] = MappingProxyType({})

    def __str__(self) -> str:
        return policy_as_python(self)

    def replicated(self) -> None:
        """What no rule names stays whole: it could not be described."""

    def config_sanity_check(self) -> None:
        super().config_sanity_check()
        names = [name for name, _ in self.model.named_modules()]
        for layers, made in self.layers.items():
            for path in match_paths(f"{layers}.*", names):
                if layer_kind(self.model.get_submodule(path)) not in made:
                    raise PolicyError(
                        f"{path} is made of other modules than any layer of the small twin",
                        rule="An inferred policy cuts what it was proven on",
                        remedy="Write the roles down (docs/policies.md)",
                    )


def derive_policy(model: nn.Module | Any, batch: Mapping[str, Tensor] | None = None) -> RolePolicy:
    """The policy of a model, from the flow of its data, proven on a small twin in a few seconds.

    Args:
        model: a model, or a transformers config (its first architecture is taken).
        batch: keyword arguments of one forward, where they are not tokens or images alone. They must fit the twin: the
            model itself where it has up to 20 million parameters and its config cannot be shrunk.

    Raises PolicyError when no twin can be built or run, and when no block of the model could be described; ConfigError
    for a model that is sharded already.
    """
    if isinstance(model, nn.Module):
        check_not_sharded(model)
    with ONE_AT_A_TIME, torch.enable_grad(), torch.random.fork_rng(devices=[]):
        full = model if isinstance(model, nn.Module) else build_meta_model(model)
        twin = reduce_model(full, batch)
        return derive_policy_on(twin.model, twin.run, twin, transformers_plan_of(full))()


def derive_layer_stacks(model: nn.Module, *, copies: bool = False) -> RolePolicy:
    """The policy of a model of which nothing is to be cut by tensor: its stacks, proven to be cut into stages.

    It names no stack where no twin can be built or run.

    Args:
        copies: whether a copy of the model may take the place of a twin that cannot be built.
    """
    note = "Each rank has its layers whole, since no role was found that describes them."
    with ONE_AT_A_TIME, torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            twin = twin_or_copy_of(model) if copies else reduce_model(model)
        except PolicyError as error:
            return _stacks_only_policy(
                [], None, f"No stack of layers was looked for: {error if copies else f'{error.what}.'}"
            )()
        reference = twin.reference()
        found = find_layer_stacks(reference)
        largest = sorted(found, key=lambda stack: -_numel(twin.model, stack.layers))
        first = _stacks_only_policy(found, reference, note, twin)
        alone = largest if len(found) > 1 and first.no_pipeline else []
        others = (_stacks_only_policy([stack], reference, note, twin) for stack in alone)
        return next((policy for policy in others if policy.no_pipeline is None), first)()


def _stacks_only_policy(
    stacks: Sequence[LayerStack], reference: ReferenceGradients | None, note: str, twin: ReducedModel | None = None
) -> type[DerivedPolicy]:
    """The policy that cuts nothing of these stacks, with what a pipeline must know of them."""
    kinds = {stack.layers: _kinds_of_layers(reference.model, stack.layers) for stack in stacks if reference is not None}
    fields = {"base": "", "stack": stacks, "layers": kinds, "notes": [note]}
    policy: type[DerivedPolicy] = type("InferredPolicy", (DerivedPolicy,), fields)
    if stacks and reference is not None and twin is not None:
        policy.stack, policy.no_pipeline = _along("pipe", twin, reference, policy, find_pipeline_hints)
    return policy


def _numel(model: nn.Module, path: str) -> int:
    return sum(p.numel() for p in model.get_submodule(path).parameters())


def derive_policy_on(
    model: nn.Module, run: Forward, twin: ReducedModel | None = None, plan: Mapping[str, str] = MappingProxyType({})
) -> type[DerivedPolicy]:
    """The proven policy of a small model that ``run`` calls with a batch. Raises PolicyError when there is none.

    Args:
        twin: the model with further calls, for which the policy is proven as well; where it does not hold for them, it
            says so, and batches with these inputs are refused.
        plan: the tensor-parallel plan of transformers. If the roles that agree with it do not hold, all are searched.
    """
    twin = twin or ReducedModel(model, run, {})
    proof = _ValidationCache(ReferenceGradients.of(model, run))
    # each block over two ranks and all of them over more; only where that fails, each block over more
    tries: list[tuple[Sequence[int], Mapping[str, str]]] = [(VALIDATION_RANKS[:1], {}), (VALIDATION_RANKS, {})]
    for ranks, draft in [(VALIDATION_RANKS[:1], plan), *tries] if plan else tries:
        blocks, whole = _blocks(proof, ranks, draft)
        outside = _vocabulary(model)
        if blocks and proof.of(_policy(model, blocks, outside), VALIDATION_RANKS) is not None:
            if (against := proof.of(_policy(model, [], outside), VALIDATION_RANKS)) is not None:
                whole |= {path: against for paths in outside.values() for path in paths}
                outside = {}
        policy = _policy(model, blocks, outside)
        nothing = "; ".join(sorted(set(whole.values()))) or "no linear gives to another"
        problem = proof.of(policy, VALIDATION_RANKS) if blocks else nothing
        if problem is None or not (blocks or draft):
            break
    if problem is not None:
        refusal = (PolicyError if blocks else NothingShardedError)(
            f"No policy for {type(model).__name__} could be inferred: {problem}",
            rule="An inferred policy cuts the blocks of a stack of layers, proven on a small twin",
            remedy="Write the roles down (docs/policies.md)",
        )
        if isinstance(refusal, NothingShardedError) and proof.nearest:
            near = _policy(model, proof.nearest, _vocabulary(model))
            near.keep_replicated = _unsharded_matrices(model, near())
            refusal.nearest = str(near()).lstrip()
        raise refusal
    policy.stack = _with_returns(policy, outputs_per_layer(model, run, policy.layers))
    proven = policy.stack
    truth = replace(proof.reference, also=twin.also())
    against = validate_policy(truth, policy, VALIDATION_RANKS[0]) if truth.also else None
    policy.unproven = {"tensor": twin.unproven(against)} if against is not None else {}
    stacks, policy.no_pipeline = _along("pipe", twin, truth, policy, find_pipeline_hints)
    policy.stack = stacks[0] if isinstance(proven, LayerStack) else stacks
    if (problem := proof.of(policy, VALIDATION_RANKS)) is not None:  # what is given back is what was proven
        policy.stack, policy.no_pipeline = proven, problem
    of_sequence = partial(find_sequence_hints, layers=tuple(policy.layers), ranks=VALIDATION_RANKS[0])
    stacks, policy.no_sequence_parallel = _along("enable_sequence_parallelism", twin, truth, policy, of_sequence)
    policy.stack = stacks[0] if isinstance(policy.stack, LayerStack) else stacks
    policy.notes = [*_notes(whole, policy.no_pipeline), *_refused(policy), *map(_note_of, proof.nearest)]
    policy.keep_replicated = _unsharded_matrices(model, policy())
    return policy


def _along(
    what: str,
    twin: ReducedModel,
    truth: ReferenceGradients,
    policy: type[RolePolicy],
    find: Callable[[ReferenceGradients, type[RolePolicy]], tuple[Sequence[LayerStack], str | None]],
) -> tuple[Sequence[LayerStack], str | None]:
    """What ``find`` finds for all batches; or for the first alone, where that is all, which the policy then says."""
    stacks, against = find(truth, policy)
    only_first = None
    if against is not None and truth.also:
        of_first, why = find(replace(truth, also=()), policy)
        if why is None:
            stacks, against, only_first = of_first, None, against
    unproven = twin.unproven(only_first)
    if what == "pipe":  # what a stage lacks is NaN there, which its first step notices
        unproven = {name: why for name, why in unproven.items() if name not in twin.untried}
    policy.unproven = {**policy.unproven, what: unproven}
    return stacks, against


def _blocks(
    proof: _ValidationCache, ranks: Sequence[int], plan: Mapping[str, str]
) -> tuple[list[BlockCandidates], dict[str, str]]:
    """The blocks that hold, each by itself, or that ``plan`` describes, and what stays whole and why."""
    model, run = proof.reference.model, proof.reference.run
    whole = {
        path: OUTSIDE_LAYERS_REASON for path, m in model.named_modules() if is_linear(m) and not _in_layers(model, path)
    }
    while True:
        blocks, again = _validated_role(
            proof, candidate_blocks(model, trace_forward(model, run, whole)), whole, ranks, plan
        )
        if not again:
            return blocks, whole
        whole |= again


def _with_returns(policy: type[DerivedPolicy], given: Mapping[str, int]) -> LayerStack | Sequence[LayerStack]:
    """The stacks of a policy, with how many things their layers return: a pipeline has to return as many."""
    stacks = [policy.stack] if isinstance(policy.stack, LayerStack) else policy.stack
    found = tuple(
        replace(s, stages=replace(s.stages, num_outputs=given[layers]))
        for s, layers in zip(stacks, policy.layers, strict=True)
    )
    return found[0] if isinstance(policy.stack, LayerStack) else found


class _ValidationCache:
    """What was wrong with the policies that were tried: another look brings up most of them again."""

    def __init__(self, reference: ReferenceGradients) -> None:
        self.reference = reference
        self.nearest: list[BlockCandidates] = []
        """What was tried first of attentions that no way of cutting described."""
        self._tried: dict[tuple[str, int], str | None] = {}

    def of(self, policy: type[RolePolicy], ranks: Sequence[int]) -> str | None:
        """What is wrong with it over the first of ``ranks`` over which something is."""
        said = str([getattr(policy, name) for name in ("stack", "embeddings", "head")])
        for size in ranks:
            if (said, size) not in self._tried:
                self._tried[said, size] = validate_policy(self.reference, policy, size)
            if (problem := self._tried[said, size]) is not None:
                return problem
        return None


def _unsharded_matrices(model: nn.Module, policy: DerivedPolicy) -> tuple[str, ...]:
    """The matrices that no role cuts, as a table says so: ``*`` for an index, a dot before what is outside the base."""
    policy.set_model(model)
    cut, base = make_plan(model, policy).sharded_parameter_ids(), f"{policy.base}." if policy.base else ""
    names = [name.removesuffix(".weight") for name, p in model.named_parameters() if p.dim() > 1 and id(p) not in cut]
    said = [name.removeprefix(base) if name.startswith(base) else f".{name}" for name in names]
    return tuple(dict.fromkeys(map(_starred, said)))


def _starred(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _kinds_of_layers(model: nn.Module, layers: str) -> frozenset[BuildModel]:
    paths = match_paths(f"{layers}.*", [name for name, _ in model.named_modules()])
    return frozenset(layer_kind(model.get_submodule(path)) for path in paths)


def _notes(whole: Mapping[str, str], no_pipeline: str | None) -> list[str]:
    over = f"over {' and '.join(map(str, VALIDATION_RANKS))} tensor ranks"
    stages = " and over two pipeline stages" if no_pipeline is None else ""
    proven = f"The policy was inferred, and proven on a small twin {over}{stages}."
    reasons: dict[str, list[str]] = {}
    for path, why in whole.items():
        if why != OUTSIDE_LAYERS_REASON:
            reasons.setdefault(why, []).append(_starred(path))
    return [proven, *(f"Whole, since {why}: {', '.join(dict.fromkeys(paths))}." for why, paths in reasons.items())]


def _refused(policy: type[DerivedPolicy]) -> Iterator[str]:
    """What is noted of inputs with which a layout is not proven."""
    for what, inputs in policy.unproven.items():
        for name, why in inputs.items():
            yield f"With {what}, batches that have {name} are refused: {why}."


def _in_layers(model: nn.Module, path: str) -> bool:
    parts = path.split(".")
    around = [".".join(parts[:i]) for i in range(len(parts)) if parts[i].isdigit()]
    return any(isinstance(model.get_submodule(p), nn.ModuleList) for p in around)


def _ranks_for(role: Role, ranks: Sequence[int]) -> Sequence[int]:
    """Where 2 and 4 ranks hold whole partitions of a fused linear (CodeGen), these look like interleaved heads."""
    return [*ranks, UNEVEN] if isinstance(role, Attention) and role.projections.interleaved else ranks


def _validated_role(
    proof: _ValidationCache,
    blocks: Sequence[BlockCandidates],
    whole: Mapping[str, str],
    ranks: Sequence[int],
    plan: Mapping[str, str],
) -> tuple[list[BlockCandidates], dict[str, str]]:
    """The blocks with the role that holds; or the columns of the first one that no role describes, and why.

    It ends there, since linears that stay whole pass marks on: what comes behind them looks otherwise then.
    """
    proven: list[BlockCandidates] = []
    for block in blocks:
        why = block.why
        if (planned := role_in_plan(plan, block.layers, block.roles)) is not None:  # validated with all others
            proven.append(replace(block, roles=[planned]))
            continue
        for role in block.roles[:MAX_TRIES]:
            alone = replace(block, roles=[role])
            if (problem := proof.of(_policy(proof.reference.model, [alone], {}), _ranks_for(role, ranks))) is None:
                proven.append(alone)
                break
            why = why or f"no way of cutting it that was tried is right: {problem}"
        else:
            again = {column: why for column in block.columns if column not in whole}
            if again:
                _keep_nearest(proof, block)
                return [], again
    return proven, {}


def _keep_nearest(proof: _ValidationCache, block: BlockCandidates) -> None:
    """For who can change the forward: of a library's model nobody can."""
    roles = [] if hasattr(proof.reference.model, "config") else block.roles
    first = next(iter(roles), None)
    if isinstance(first, Attention) and not first.at:  # a layer adds its residual itself
        first = next((role for role in roles if isinstance(role, Attention) and role.inputs.entry), first)
    if isinstance(first, Attention) and all(first.at != near.roles[0].at for near in proof.nearest):
        proof.nearest.append(replace(block, roles=[first]))


def _note_of(block: BlockCandidates) -> str:
    return f"The nearest way to cut {block.layers}: {role_source(block.roles[0])}."


def _policy(
    model: nn.Module, blocks: Sequence[BlockCandidates], outside: Mapping[str, tuple[str, ...]]
) -> type[DerivedPolicy]:
    """The table as a class. Paths are relative to the base model where all of them stand in it."""
    prefix = getattr(model, "base_model_prefix", "")
    stacks = {block.layers: [b for b in blocks if b.layers == block.layers] for block in blocks}
    paths = [*stacks, *outside.get("embeddings", ())]
    inside = bool(prefix) and hasattr(model, prefix) and all(p.startswith(f"{prefix}.") for p in paths)

    def own(path: str) -> str:
        return path.removeprefix(prefix).removeprefix(".") if inside else path

    table = []
    for layers, of_stack in stacks.items():
        norm = next((own(b.final_norm) for b in of_stack if b.final_norm), None)
        context = next(((own(b.context[0]), b.context[1]) for b in of_stack if b.context), None)
        table.append(LayerStack(own(layers), [b.roles[0] for b in of_stack], final_norm=norm, cross_states=context))
    fields: dict[str, Any] = {
        "stack": table[0] if len(table) == 1 else tuple(table),
        "embeddings": tuple(own(path) for path in outside.get("embeddings", ())),
        "head": outside.get("head", ()),
        "layers": {layers: _kinds_of_layers(model, layers) for layers in stacks},
    }
    if not inside:
        fields["base"] = ""
    return type("InferredPolicy", (DerivedPolicy,), fields)


def _vocabulary(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Paths of the embeddings and of the heads over the vocabulary."""
    try:
        tokens = getattr(model, "get_input_embeddings", lambda: None)()
    except RuntimeError:  # "not implemented" is transformers' way to say that there are none
        tokens = None
    if not isinstance(tokens, nn.Embedding):
        return {}
    modules = dict(model.named_modules(remove_duplicate=False))
    output: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        "embeddings": tuple(n for n, m in modules.items() if isinstance(m, nn.Embedding) and m.weight is tokens.weight),
        "head": tuple(n for n, m in modules.items() if is_linear(m) and (m is output or m.weight is tokens.weight)),
    }


EXAMPLE = """
    import shardformer
    from shardformer.policies import MLP, Attention, AttentionProjections, LayerStack, RolePolicy

    class MyPolicy(RolePolicy):
        stack = LayerStack("layers", [                # the ModuleList of layers; what follows stands in each of them
            Attention("attn", AttentionProjections(q="q", k="k", v="v", out="o"), local_attrs={"num_heads": "heads"}),
            MLP("mlp", up="fc1", down="fc2"),
        ])
        embeddings = "embed"                     # over the vocabulary
        num_heads = 4                            # or the name of the config's field that says it

    model = shardformer.shard_model(model, policy=MyPolicy)
"""

IN_ITS_FORWARD = (
    "Where its attention takes heads apart, let the number of heads, and the width of all, be -1 or an attribute that "
    "local_attrs= names: a rank has a part of them. Then the nearest policy does"
)


def no_policy_error(model: nn.Module, error: PolicyError, tensor: int | None) -> PolicyError:
    """The error for a model that no policy was given for, none is registered for, and none could be inferred for.

    Args:
        error: that of the inference.
        tensor: over how many ranks matrices were to be cut, where that is known.
    """
    family, name = family_of(model), type(model).__name__
    not_inferred = error.what.partition(" could be inferred: ")[2] or error.what
    if isinstance(error, UnknownInputsError) and family is None:
        return _fed(model, not_inferred)
    if isinstance(error, NothingShardedError):
        return _nothing_sharded_error(model, not_inferred, tensor, error.nearest)
    tried = f"it is of the model type {family!r}" if family else "it has no config with a model type"
    return PolicyError(
        f"No policy for {name}: {tried}, no policy was given, and none was found by inference: {not_inferred}",
        rule=f"The registered families are {', '.join(FAMILIES)}",
        remedy=(f"{did_you_mean(family, FAMILIES)} " if family else "")
        + f"Say what the model is made of (docs/policies.md):\n{EXAMPLE}",
    )


def _fed(model: nn.Module, problem: str) -> PolicyError:
    batch = ", ".join(f'"{name}": ...' for name in required_arguments(model))
    why = problem[:1].lower() + problem[1:]
    return PolicyError(
        f"No policy for {type(model).__name__}: it is found in one forward, and {why}",
        rule="Tokens, images and sound are made up by the names of the forward's arguments; what others take, nobody "
        "can know",
        remedy="Give one small batch, on all ranks alike:\n\n"
        f"    policy = shardformer.derive_policy(model, batch={{{batch}}})\n"
        "    model = shardformer.shard_model(model, policy=policy)\n\n"
        "or say what the model is made of (docs/policies.md)",
    )


def _nothing_sharded_error(model: nn.Module, reasons: str, tensor: int | None, nearest_table: str) -> PolicyError:
    name = type(model).__name__
    asked = f"tensor={tensor} for {name}" if tensor else name
    stacks = derive_layer_stacks(model)
    if not stacks.stack:
        pipe = f"A pipeline has no stack of layers to cut in {name}"
    elif stacks.no_pipeline:
        pipe = f"A pipeline does not serve {name} ({stacks.no_pipeline})"
    else:
        pipe = "Or stages: launch_from_torch(pipe=2)"
    table = f"{IN_ITS_FORWARD}:\n{indent(nearest_table, '    ')}\nOr leave" if nearest_table else "Leave"
    return PolicyError(
        f"{asked}: nothing of its layers can be cut by tensor parallelism ({reasons})",
        rule="Cut is a block of linears of which one gives what the other takes: an attention by its heads, an MLP by "
        "its features. What mixes features in between, as a scan or a convolution does, needs all of them",
        remedy=f"{table} the tensor axis out. Share the batch out with launch_from_torch(data=2), and the memory with "
        f"shardformer.shard_optimizer(model, optimizer, stage=3). {pipe}. Where a part of it can be cut after all, "
        "write that down (docs/policies.md)",
    )
