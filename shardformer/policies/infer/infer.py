"""A policy for a model that nobody has described: drafted from what one forward shows, proven before it is used.

Every way to describe a block is tried by cutting a small twin of the model over ranks that are threads, and kept when
no output and no gradient differs. What no way describes stays whole; so the policy cuts less, never wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import PolicyError
from shardformer.layers.tensor.linear import is_linear
from shardformer.policies.infer.depth import along_depth, found_stacks
from shardformer.policies.infer.drafts import BlockDraft, draft
from shardformer.policies.infer.flow import given_by_layers, observe
from shardformer.policies.infer.prove import Reference, mismatch
from shardformer.policies.infer.sequence import along_sequence
from shardformer.policies.infer.twin import ONE_AT_A_TIME, Twin, twin_of, twin_or_copy_of
from shardformer.policies.infer.write import python_of, role_source
from shardformer.policies.paths import matching
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import Attention, Role, Stack
from shardformer.sharding.checks import check_not_sharded
from shardformer.sharding.plan import make_plan
from shardformer.testing.zoo.inputs import Forward
from shardformer.testing.zoo.layers import Made, kind_of
from shardformer.testing.zoo.shrink import model_of

RANKS = (2, 4)
"""Tensor sizes that a policy is proven over: on the twin, with six heads, an even cut and an uneven one."""
UNEVEN = 3
"""A tensor size over which no number of heads that is a power of two is cut evenly."""
MOST = 40
"""Ways to describe one block that are tried."""
OUTSIDE = "it stands outside of the layers"


class NothingCutError(PolicyError):
    """No block of a model could be described. ``nearest`` is a table that says what was tried first of an attention."""

    nearest: str = ""


class InferredPolicy(RolePolicy):
    """A table that was inferred and proven. Printed, it is Python that can be saved and edited.

    Class attributes:
        layers: path of each stack -> what the layers of the twin are made of. Others were not proven.
    """

    layers: Mapping[str, frozenset[Made]] = MappingProxyType({})

    def __str__(self) -> str:
        return python_of(self)

    def replicated(self) -> None:
        """What no rule names stays whole: it could not be described."""

    def config_sanity_check(self) -> None:
        super().config_sanity_check()
        names = [name for name, _ in self.model.named_modules()]
        for layers, made in self.layers.items():
            for path in matching(f"{layers}.*", names):
                if kind_of(self.model.get_submodule(path)) not in made:
                    raise PolicyError(
                        f"{path} is made of other modules than any layer of the small twin",
                        rule="An inferred policy cuts what it was proven on",
                        remedy="Write the roles down (docs/policies.md)",
                    )


def infer(model: nn.Module | Any, batch: Mapping[str, Tensor] | None = None) -> RolePolicy:
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
        twin = twin_of(model if isinstance(model, nn.Module) else model_of(model), batch)
        return infer_on(twin.model, twin.run, twin)()


def infer_stacks(model: nn.Module, *, copies: bool = False) -> RolePolicy:
    """The policy of a model of which nothing is to be cut by tensor: its stacks, proven to be cut into stages.

    It names no stack where no twin can be built or run.

    Args:
        copies: whether a copy of the model may take the place of a twin that cannot be built.
    """
    note = "Each rank has its layers whole, since no role was found that describes them."
    with ONE_AT_A_TIME, torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            twin = twin_or_copy_of(model) if copies else twin_of(model)
        except PolicyError as error:
            return _uncut([], None, f"No stack of layers was looked for: {error if copies else f'{error.what}.'}")()
        reference = twin.reference()
        found = found_stacks(reference)
        largest = sorted(found, key=lambda stack: -_numel(twin.model, stack.layers))
        first = _uncut(found, reference, note, twin)
        alone = largest if len(found) > 1 and first.against_pipeline else []
        others = (_uncut([stack], reference, note, twin) for stack in alone)
        return next((policy for policy in others if policy.against_pipeline is None), first)()


def _uncut(
    stacks: Sequence[Stack], reference: Reference | None, note: str, twin: Twin | None = None
) -> type[InferredPolicy]:
    """The policy that cuts nothing of these stacks, with what a pipeline must know of them."""
    kinds = {stack.layers: _kinds_of_layers(reference.model, stack.layers) for stack in stacks if reference is not None}
    fields = {"base": "", "stack": stacks, "layers": kinds, "notes": [note]}
    policy: type[InferredPolicy] = type("InferredPolicy", (InferredPolicy,), fields)
    if stacks and reference is not None and twin is not None:
        policy.stack, policy.against_pipeline = _along("pipe", twin, reference, policy, along_depth)
    return policy


def _numel(model: nn.Module, path: str) -> int:
    return sum(p.numel() for p in model.get_submodule(path).parameters())


def infer_on(model: nn.Module, run: Forward, twin: Twin | None = None) -> type[InferredPolicy]:
    """The proven policy of a small model that ``run`` calls with a batch. Raises PolicyError when there is none.

    Args:
        twin: the model with further calls, for which the policy is proven as well; where it does not hold for them, it
            says so, and batches with these inputs are refused.
    """
    twin = twin or Twin(model, run, {})
    proof = _Proof(Reference.of(model, run))
    # each block over two ranks and all of them over more; only where that fails, each block over more
    for ranks in (RANKS[:1], RANKS):
        blocks, whole = _blocks(proof, ranks)
        outside = _vocabulary(model)
        if blocks and proof.of(_policy(model, blocks, outside), RANKS) is not None:
            if (against := proof.of(_policy(model, [], outside), RANKS)) is not None:
                whole |= {path: against for paths in outside.values() for path in paths}
                outside = {}
        policy = _policy(model, blocks, outside)
        nothing = "; ".join(sorted(set(whole.values()))) or "no linear gives to another"
        problem = proof.of(policy, RANKS) if blocks else nothing
        if problem is None or not blocks:
            break
    if problem is not None:
        refusal = (PolicyError if blocks else NothingCutError)(
            f"No policy for {type(model).__name__} could be inferred: {problem}",
            rule="An inferred policy cuts the blocks of a stack of layers, proven on a small twin",
            remedy="Write the roles down (docs/policies.md)",
        )
        if isinstance(refusal, NothingCutError) and proof.nearest:
            near = _policy(model, proof.nearest, _vocabulary(model))
            near.whole = _left(model, near())
            refusal.nearest = str(near()).lstrip()
        raise refusal
    policy.stack = _with_returns(policy, given_by_layers(model, run, policy.layers))
    proven = policy.stack
    truth = replace(proof.reference, also=twin.also())
    against = mismatch(truth, policy, RANKS[0]) if truth.also else None
    policy.unproven = {"tensor": twin.unproven(against)} if against is not None else {}
    stacks, policy.against_pipeline = _along("pipe", twin, truth, policy, along_depth)
    policy.stack = stacks[0] if isinstance(proven, Stack) else stacks
    if (problem := proof.of(policy, RANKS)) is not None:  # what is given back is what was proven
        policy.stack, policy.against_pipeline = proven, problem
    of_sequence = partial(along_sequence, layers=tuple(policy.layers), ranks=RANKS[0])
    stacks, policy.against_sequence = _along("enable_sequence_parallelism", twin, truth, policy, of_sequence)
    policy.stack = stacks[0] if isinstance(policy.stack, Stack) else stacks
    policy.notes = [*_notes(whole, policy.against_pipeline), *_refused(policy), *map(_note_of, proof.nearest)]
    policy.whole = _left(model, policy())
    return policy


def _along(
    what: str,
    twin: Twin,
    truth: Reference,
    policy: type[RolePolicy],
    find: Callable[[Reference, type[RolePolicy]], tuple[Sequence[Stack], str | None]],
) -> tuple[Sequence[Stack], str | None]:
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


def _blocks(proof: _Proof, ranks: Sequence[int]) -> tuple[list[BlockDraft], dict[str, str]]:
    """The blocks that hold, each by itself, and what stays whole and why."""
    model, run = proof.reference.model, proof.reference.run
    whole = {path: OUTSIDE for path, m in model.named_modules() if is_linear(m) and not _in_layers(model, path)}
    while True:
        blocks, again = _proven(proof, draft(model, observe(model, run, whole)), whole, ranks)
        if not again:
            return blocks, whole
        whole |= again


def _with_returns(policy: type[InferredPolicy], given: Mapping[str, int]) -> Stack | Sequence[Stack]:
    """The stacks of a policy, with how many things their layers return: a pipeline has to return as many."""
    stacks = [policy.stack] if isinstance(policy.stack, Stack) else policy.stack
    found = tuple(
        replace(s, stages=replace(s.stages, returns=given[layers]))
        for s, layers in zip(stacks, policy.layers, strict=True)
    )
    return found[0] if isinstance(policy.stack, Stack) else found


class _Proof:
    """What was wrong with the policies that were tried: another look brings up most of them again."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.nearest: list[BlockDraft] = []
        """What was tried first of attentions that no way of cutting described."""
        self._tried: dict[tuple[str, int], str | None] = {}

    def of(self, policy: type[RolePolicy], ranks: Sequence[int]) -> str | None:
        """What is wrong with it over the first of ``ranks`` over which something is."""
        said = str([getattr(policy, name) for name in ("stack", "embeddings", "head")])
        for size in ranks:
            if (said, size) not in self._tried:
                self._tried[said, size] = mismatch(self.reference, policy, size)
            if (problem := self._tried[said, size]) is not None:
                return problem
        return None


def _left(model: nn.Module, policy: InferredPolicy) -> tuple[str, ...]:
    """The matrices that no role cuts, as a table says so: ``*`` for an index, a dot before what is outside the base."""
    policy.set_model(model)
    cut, base = make_plan(model, policy).cut(), f"{policy.base}." if policy.base else ""
    names = [name.removesuffix(".weight") for name, p in model.named_parameters() if p.dim() > 1 and id(p) not in cut]
    said = [name.removeprefix(base) if name.startswith(base) else f".{name}" for name in names]
    return tuple(dict.fromkeys(map(_starred, said)))


def _starred(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _kinds_of_layers(model: nn.Module, layers: str) -> frozenset[Made]:
    paths = matching(f"{layers}.*", [name for name, _ in model.named_modules()])
    return frozenset(kind_of(model.get_submodule(path)) for path in paths)


def _notes(whole: Mapping[str, str], against_pipeline: str | None) -> list[str]:
    over = f"over {' and '.join(map(str, RANKS))} tensor ranks"
    stages = " and over two pipeline stages" if against_pipeline is None else ""
    proven = f"The policy was inferred, and proven on a small twin {over}{stages}."
    reasons: dict[str, list[str]] = {}
    for path, why in whole.items():
        if why != OUTSIDE:
            reasons.setdefault(why, []).append(_starred(path))
    return [proven, *(f"Whole, since {why}: {', '.join(dict.fromkeys(paths))}." for why, paths in reasons.items())]


def _refused(policy: type[InferredPolicy]) -> Iterator[str]:
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


def _proven(
    proof: _Proof, blocks: Sequence[BlockDraft], whole: Mapping[str, str], ranks: Sequence[int]
) -> tuple[list[BlockDraft], dict[str, str]]:
    """The blocks with the role that holds; or the columns of the first one that no role describes, and why.

    It ends there, since linears that stay whole pass marks on: what comes behind them looks otherwise then.
    """
    proven: list[BlockDraft] = []
    for block in blocks:
        why = block.why
        for role in block.roles[:MOST]:
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


def _keep_nearest(proof: _Proof, block: BlockDraft) -> None:
    """For who can change the forward: of a library's model nobody can."""
    roles = [] if hasattr(proof.reference.model, "config") else block.roles
    first = next(iter(roles), None)
    if isinstance(first, Attention) and not first.at:  # a layer adds its residual itself
        first = next((role for role in roles if isinstance(role, Attention) and role.inputs.entry), first)
    if isinstance(first, Attention) and all(first.at != near.roles[0].at for near in proof.nearest):
        proof.nearest.append(replace(block, roles=[first]))


def _note_of(block: BlockDraft) -> str:
    return f"The nearest way to cut {block.layers}: {role_source(block.roles[0])}."


def _policy(
    model: nn.Module, blocks: Sequence[BlockDraft], outside: Mapping[str, tuple[str, ...]]
) -> type[InferredPolicy]:
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
        table.append(Stack(own(layers), [b.roles[0] for b in of_stack], final_norm=norm, context=context))
    fields: dict[str, Any] = {
        "stack": table[0] if len(table) == 1 else tuple(table),
        "embeddings": tuple(own(path) for path in outside.get("embeddings", ())),
        "head": outside.get("head", ()),
        "layers": {layers: _kinds_of_layers(model, layers) for layers in stacks},
    }
    if not inside:
        fields["base"] = ""
    return type("InferredPolicy", (InferredPolicy,), fields)


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
