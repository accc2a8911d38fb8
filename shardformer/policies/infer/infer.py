"""A policy for a model that nobody has described: drafted from what one forward shows, proven before it is used.

Every way to describe a block is tried by cutting a small twin of the model over ranks that are threads, and kept when
no output and no gradient differs. What no way describes stays whole; so the policy cuts less, never wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError, PolicyError
from shardformer.layers.linear import is_linear
from shardformer.policies.infer.drafts import Draft, DraftedStack, draft
from shardformer.policies.infer.flow import observe
from shardformer.policies.infer.prove import Run, Truth, fault
from shardformer.policies.infer.twin import batch_for, model_of, runner, twin_of
from shardformer.policies.roles import MLP, Attention, RolePolicy, Stack

RANKS = (2, 4)
"""Tensor sizes that a policy is proven over: on the twin, with six heads, an even cut and an uneven one."""
OUTSIDE, UNKNOWN = "it stands outside of the layers", "no role describes it"

Role = Attention | MLP
Made = frozenset[tuple[str, str]]
"""The paths and classes of the modules in a layer."""


class InferredPolicy(RolePolicy):
    """A table that was inferred and proven.

    Class attributes:
        against_sequence: why it cannot run sequence parallelism, if so.
        layers: path of each stack -> what the layers of the twin are made of. Others were not proven.
    """

    against_sequence: str | None = None
    layers: Mapping[str, frozenset[Made]] = MappingProxyType({})

    def replicated(self) -> None:
        """What no rule names stays whole: it could not be described."""

    def config_sanity_check(self) -> None:
        for stack in self.stacks():
            for i, layer in enumerate(self.model.get_submodule(stack.layers).children()):
                if _made_of(layer) not in self.layers[stack.layers]:
                    raise PolicyError(
                        f"{stack.layers}.{i} is made of other modules than any layer of the small twin",
                        rule="An inferred policy cuts what it was proven on",
                        remedy="Write the roles down (docs/policies.md)",
                    )
        if self.shard_config.enable_sequence_parallelism and self.against_sequence:
            raise ConfigError(
                f"enable_sequence_parallelism, and on a small twin of this model {self.against_sequence}",
                rule="An inferred policy does what it was proven to do",
                remedy="Leave sequence parallelism off, or write the roles down (docs/policies.md)",
            )


def infer(model: nn.Module | Any, batch: Mapping[str, Tensor] | None = None) -> RolePolicy:
    """The policy of a model, from the flow of its data, proven on a small twin in a few seconds.

    Args:
        model: a model, or a transformers config (its first architecture is taken).
        batch: keyword arguments of one forward, where they are not tokens or images alone. They must fit the twin: the
            model itself where it has up to 20 million parameters and its config cannot be shrunk.

    Raises PolicyError when no twin can be built or run, and when no block of the model could be described.
    """
    twin = twin_of(model if isinstance(model, nn.Module) else model_of(model))
    name = type(twin).__name__
    try:
        run = runner(twin, batch or batch_for(twin))
        with torch.random.fork_rng(devices=[]):
            policy = infer_on(twin, run)
    except PolicyError:
        raise
    except Exception as error:  # the twin's own forward
        raise PolicyError(
            f"A small twin of {name} does not run: {type(error).__name__}: {str(error).strip()[:200]}",
            rule="A policy is found in one forward of a small model of the same classes",
            remedy="Give an example of a batch, infer(model, batch={...}), or write the roles down (docs/policies.md)",
        ) from error
    return policy()


def infer_on(model: nn.Module, run: Run) -> type[InferredPolicy]:
    """The proven policy of a small model that ``run`` calls with a batch. Raises PolicyError when there is none."""
    truth = Truth.of(model, run)
    whole = {path: OUTSIDE for path, m in model.named_modules() if is_linear(m) and not _in_layers(model, path)}
    while True:
        found = draft(model, observe(model, run, whole))
        stacks, unproven = _proven(truth, found)
        unproven |= {c: UNKNOWN for group in found.left for c in group.columns}
        again = {c: why for c, why in unproven.items() if c not in whole}
        if not again:
            break
        whole |= again
    outside = _vocabulary(model)
    if _fault(truth, _policy(model, [], outside)) is not None:
        outside = {}
    policy = _policy(model, stacks, outside)
    nothing = "; ".join(sorted(set(whole.values()))) or "no linear gives to another"
    problem = _fault(truth, policy) if stacks else nothing
    if problem is not None:
        raise PolicyError(
            f"No policy for {type(model).__name__} could be inferred: {problem}",
            rule="An inferred policy cuts the blocks of a stack of layers, proven on a small twin",
            remedy="Write the roles down (docs/policies.md)",
        )
    policy.against_sequence = fault(truth, policy, RANKS[0], enable_sequence_parallelism=True)
    policy.notes = _notes(whole)
    return policy


def _made_of(layer: nn.Module) -> Made:
    return frozenset((path, type(module).__name__) for path, module in layer.named_modules())


def _notes(whole: Mapping[str, str]) -> list[str]:
    proven = f"The policy was inferred, and proven on a small twin over {' and '.join(map(str, RANKS))} tensor ranks."
    reasons: dict[str, list[str]] = {}
    for path, why in whole.items():
        if why != OUTSIDE:
            reasons.setdefault(why, []).append(path)
    return [proven, *(f"Whole, since {why}: {', '.join(paths)}." for why, paths in reasons.items())]


def _in_layers(model: nn.Module, path: str) -> bool:
    parts = path.split(".")
    around = [".".join(parts[:i]) for i in range(len(parts)) if parts[i].isdigit()]
    return any(isinstance(model.get_submodule(p), nn.ModuleList) for p in around)


def _proven(truth: Truth, found: Draft) -> tuple[list[DraftedStack], dict[str, str]]:
    """The stacks with one proven role for each block, and the columns of the others with what was wrong."""
    stacks: list[DraftedStack] = []
    unproven: dict[str, str] = {}
    for stack in found.stacks:
        proven: list[list[Role]] = []
        for candidates in stack.blocks:
            why = ""
            for role in candidates:
                problem = _fault(truth, _policy(truth.model, [replace(stack, blocks=[[role]])], {}))
                if problem is None:
                    proven.append([role])
                    break
                why = why or problem
            else:
                unproven |= {c: why for c in _columns(truth.model, stack, candidates[0])}
        if proven:
            stacks.append(replace(stack, blocks=proven))
    return stacks, unproven


def _columns(model: nn.Module, stack: DraftedStack, role: Role) -> list[str]:
    if isinstance(role, MLP):
        names = [role.up] if isinstance(role.up, str) else list(role.up)
    else:
        names = [name for name in (role.q, role.k, role.v, role.qkv, role.kv) if name is not None]
    inside = [name[1:] if name.startswith(".") else ".".join(p for p in (role.at, name) if p) for name in names]
    layers = range(len(list(model.get_submodule(stack.layers).children())))
    return [f"{stack.layers}.{i}.{name}" for i in layers for name in inside]


def _fault(truth: Truth, policy: type[RolePolicy]) -> str | None:
    return next((said for ranks in RANKS if (said := fault(truth, policy, ranks)) is not None), None)


def _policy(
    model: nn.Module, stacks: Sequence[DraftedStack], outside: Mapping[str, tuple[str, ...]]
) -> type[InferredPolicy]:
    """The table as a class. Paths are relative to the base model where all of them stand in it."""
    prefix = getattr(model, "base_model_prefix", "")
    paths = [*(s.layers for s in stacks), *outside.get("embeddings", ())]
    inside = bool(prefix) and hasattr(model, prefix) and all(p.startswith(f"{prefix}.") for p in paths)

    def own(path: str) -> str:
        return path.removeprefix(prefix).removeprefix(".") if inside else path

    table = tuple(
        Stack(
            own(s.layers),
            [candidates[0] for candidates in s.blocks],
            final_norm=own(s.final_norm) if s.final_norm else None,
            context=(own(s.context[0]), s.context[1]) if s.context and _reads_context(s) else None,
        )
        for s in stacks
    )
    fields: dict[str, Any] = {
        "stack": table[0] if len(table) == 1 else table,
        "embeddings": tuple(own(path) for path in outside.get("embeddings", ())),
        "head": outside.get("head", ()),
        "layers": {s.layers: frozenset(map(_made_of, model.get_submodule(s.layers).children())) for s in stacks},
    }
    if not inside:
        fields["base"] = ""
    return type("InferredPolicy", (InferredPolicy,), fields)


def _reads_context(stack: DraftedStack) -> bool:
    return any(isinstance(c[0], Attention) and c[0].reads_context for c in stack.blocks)


def _vocabulary(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Paths of the embeddings and of the heads over the vocabulary."""
    tokens = getattr(model, "get_input_embeddings", lambda: None)()
    if not isinstance(tokens, nn.Embedding):
        return {}
    modules = dict(model.named_modules(remove_duplicate=False))
    output: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        "embeddings": tuple(n for n, m in modules.items() if isinstance(m, nn.Embedding) and m.weight is tokens.weight),
        "head": tuple(n for n, m in modules.items() if m is output and is_linear(output)),
    }
