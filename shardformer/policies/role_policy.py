"""Roles: what a model is made of, as a table. ``RolePolicy`` turns it into descriptions of modules.

Paths in a table are relative: a stack's to the base model (so one table serves every head class), an attention's or an
MLP's to one layer, and what it holds to that module; a leading dot makes such a path relative to the layer again
(BERT keeps the output projection beside the attention). A trailing ``?`` marks what some of the models lack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from torch import nn

from shardformer.errors import ConfigError, PolicyError
from shardformer.layers.tensor.modes import MODES, ParallelLayers
from shardformer.pipeline.chain import Chain, StackDescription, StageNeeds
from shardformer.policies.attention import AttentionLowering
from shardformer.policies.describe import ModuleKey, ModulePolicyDescription, SubModuleReplacementDescription
from shardformer.policies.heads import HeadLayout, no_count, unit_of
from shardformer.policies.lowering import LayerLowering, check_exits
from shardformer.policies.parts import merged
from shardformer.policies.paths import features_of, find, join, linear_at, matching, module_at, no_match, relative
from shardformer.policies.policy import Policy
from shardformer.policies.registry import registered_policy
from shardformer.policies.roles import MLP, Attention, Experts, Inputs, Projections, Role, Stack

__all__ = [
    "MLP",
    "Attention",
    "Experts",
    "Inputs",
    "Projections",
    "Role",
    "RolePolicy",
    "Stack",
    "StageNeeds",
]


BETWEEN_LAYERS = "it reads the states between its layers, of which a rank has a part"
BETWEEN_STAGES = "it reads the states between its layers, of which a stage has those between its own"


class RolePolicy(Policy):
    """A policy that is a table of roles. See ``shardformer/policies/models`` for tables.

    Class attributes:
        stack: the model's stack or stacks.
        embeddings: embeddings over the vocabulary, relative to the base model.
        head: the language model's head, relative to the whole model; head classes without one need no word.
        single: attentions and MLPs that stand in no stack, relative to the whole model.
        parts: submodules that are models themselves (a text model), relative to the whole model; ``?`` as always. Each
            is described by the policy of its own model type.
        whole: what stays whole on purpose although it is large or inside a layer, relative to the base model, ``*``
            standing for an index; behind a dot, relative to the whole model, where only some heads have it.
        against_sequence, against_pipeline: why the model cannot run sequence parallelism, or a pipeline, if so.
        num_heads, num_kv_heads: these numbers, or the names of the config's fields that hold them; or, behind a dot,
            the name of an attribute of the attention module.
    """

    stack: Stack | Sequence[Stack] = ()
    embeddings: str | Sequence[str] = ()
    head: str | Sequence[str] = ()
    single: Sequence[Role] = ()
    parts: Sequence[str] = ()
    whole: Sequence[str] = ()
    num_heads: int | str = "num_attention_heads"
    num_kv_heads: int | str = "num_key_value_heads"
    against_sequence: str | None = None
    against_pipeline: str | None = None
    _few: Sequence[str] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = dir(RolePolicy)
        for name in vars(cls):
            close = get_close_matches(name, [n for n in known if n[:1] != "_"], cutoff=0.8)
            if name not in known and close:
                raise PolicyError(
                    f"{cls.__name__} says {name!r}",
                    rule="A table has stack, embeddings, head, whole, num_heads and num_kv_heads",
                    remedy=f"Did you mean {close[0]!r}? A name that is less like it is left alone",
                )

    def config_sanity_check(self) -> None:
        against = self.refuses_sequence()
        if self.shard_config.enable_sequence_parallelism and against:
            raise ConfigError(
                f"enable_sequence_parallelism=True, and of this {type(self.model).__name__} it is known that {against}",
                rule="The sequence stays cut from the first layer of a stack to its last, and each block gathers it",
                remedy="Leave it off: tensor parallelism cuts every attention and MLP of such a model",
            )
        for _, policy in self._parts():
            policy.config_sanity_check()

    def sums_exits(self) -> bool:
        """Whether the layer adds what leaves the exits that the table names together, with nothing between."""
        return True

    def refuses_sequence(self) -> str | None:
        """Why this model cannot run sequence parallelism; None where it can."""
        if hasattr(self.model, "out_features") and hasattr(self.model, "out_indices"):  # a backbone
            return BETWEEN_LAYERS
        whole = [stack.whole_sequence for stack in self.stacks()]
        return self.against_sequence or (whole[0] if whole and all(whole) else None)

    def refuses_pipeline(self) -> str | None:
        """Why the layers of this model cannot be on several stages; None where they can."""
        if self.against_pipeline:
            return self.against_pipeline
        layers = [stack.layers for stack in self.chain().stacks]
        for path, module in self.model.named_modules():
            is_backbone = hasattr(module, "out_features") and hasattr(module, "out_indices")
            if is_backbone and any(f"{inner}.".startswith(f"{path}.") or not path for inner in layers):
                return BETWEEN_STAGES
        return next((why for _, policy in self._parts() if (why := policy.refuses_pipeline())), None)

    @property
    def _classes(self) -> ParallelLayers:
        return MODES[self.shard_config.tensor_parallel_mode]

    @property
    def base(self) -> str:
        """Path of the base model inside the model that was given; empty when it is the base model itself."""
        prefix = getattr(self.model, "base_model_prefix", "")
        return prefix if prefix and isinstance(getattr(self.model, prefix, None), nn.Module) else ""

    def module_policy(self) -> Mapping[ModuleKey, ModulePolicyDescription]:
        self.notes = list(type(self).notes)
        self._few = []
        model = LayerLowering(self.model, "", self.axis, classes=self._classes)
        single = [d for role in self.single if (d := self._block(role, model)) is not None]
        out: dict[ModuleKey, ModulePolicyDescription] = {"": merged([self._outside(), *single])}
        for stack, is_stage in self._present_stacks():
            out |= self._layers(join(self.base, stack.layers), stack.blocks, is_stage)
        for path, policy in self._parts():
            out |= {join(path, str(key)): d for key, d in policy.module_policy().items()}
            self.notes += policy.notes
        return out

    def _parts(self) -> list[tuple[str, Policy]]:
        """The policies of the submodules that are models themselves, by their paths."""
        out = []
        for part in self.parts:
            model = find(self.model, part.rstrip("?"))
            if model is None and not part.endswith("?"):
                raise no_match("", part, self.model)
            if model is not None:
                policy = self._policy_of(model, part)
                policy.model, policy.shard_config, policy.axis = model, self.shard_config, self.axis
                out.append((part.rstrip("?"), policy))
        return out

    def _policy_of(self, model: nn.Module, part: str) -> Policy:
        if self.find_part is not None:
            return self.find_part(model)
        if (known := registered_policy(model)) is not None:
            return known[0]
        raise PolicyError(
            f"{part!r} is a {type(model).__name__}, of no registered family",
            rule="A part of a model is described by the policy of its own model type",
            remedy="Register one for it: shardformer.register(model_type, policy)",
        )

    def _layers(self, path: str, blocks: Sequence[Role], is_stage: bool) -> dict[ModuleKey, ModulePolicyDescription]:
        """What becomes of each layer; one description where all layers are made of the same."""
        layers = list(module_at(self.model, path).children())
        if not layers:
            raise no_match(path, "0", module_at(self.model, path))
        lowerings = [LayerLowering(layer, f"{path}.*", self.axis, is_stage, self._classes) for layer in layers]
        found = [[self._block(block, lowering) for block in blocks] for lowering in lowerings]
        descriptions = [merged([d for d in each if d is not None]) for each in found]
        if all(d == descriptions[0] for d in descriptions):
            return {f"{path}.*": descriptions[0]}
        return {f"{path}.{i}": d for i, d in enumerate(descriptions)}

    def stacks(self) -> list[StackDescription]:
        return [*self._own_stacks(), *(s.within(path) for path, policy in self._parts() for s in policy.stacks())]

    def _own_stacks(self) -> list[StackDescription]:
        return [
            StackDescription(
                s.layers, self._final_norm(s), s.context, s.whole_sequence, s.reads_context, stages=s.stages
            ).within(self.base)
            for s, _ in self._present_stacks()
        ]

    def chain(self) -> Chain:
        own = Chain.of(self.model, self._own_stacks()).stacks
        every = [*own, *(s.within(path) for path, policy in self._parts() for s in policy.chain().stacks)]
        if every:  # some models register their head before the layers
            heads = [self.head] if isinstance(self.head, str) else self.head
            tops = {head.partition(".")[0] for head in heads if find(self.model, head.rstrip("?")) is not None}
            beside = sorted(top for top in tops if not any(f"{s.layers}.".startswith(f"{top}.") for s in every))
            stages = every[-1].stages
            every[-1] = replace(every[-1], stages=replace(stages, after=(*stages.after, *beside)))
        return Chain(tuple(every))

    def _final_norm(self, stack: Stack) -> str | None:
        path = (stack.final_norm or "").rstrip("?")
        lacks = (stack.final_norm or "?").endswith("?") and find(self.model, join(self.base, path)) is None
        return None if lacks or not path else path

    def replicated(self) -> list[str] | None:
        base = module_at(self.model, self.base)
        known = [name for name, _ in [*base.named_modules(), *base.named_parameters()]]
        out = []
        for path in self.whole:
            if path.startswith("."):
                out.append(path[1:])
                continue
            found = matching(path.rstrip("?"), known)
            if not path.endswith("?") and not found:
                raise no_match(self.base, path, base)
            out += [join(self.base, name) for name in found]
        out += [name for path in self._few for name in matching(path, [n for n, _ in self.model.named_modules()])]
        for path, policy in self._parts():
            inner = policy.replicated()
            out += [path] if inner is None else [join(path, name) for name in inner]
        return out

    def _present_stacks(self) -> list[tuple[Stack, bool]]:
        """The stacks that the model has, one for each stage, and whether it is one of several."""
        base = module_at(self.model, self.base)
        names = [name for name, _ in base.named_modules()]
        out = []
        for stack in [self.stack] if isinstance(self.stack, Stack) else self.stack:
            found = matching(stack.layers, names)
            if not found and not stack.optional:
                raise no_match(self.base, stack.layers, base)
            layers = [layer for path in found for layer in module_at(base, path).children()]
            check_exits(stack, join(self.base, stack.layers), layers)
            out += [(replace(stack, layers=path), len(found) > 1) for path in found]
        return out

    def _outside(self) -> ModulePolicyDescription:
        embeddings = [self.embeddings] if isinstance(self.embeddings, str) else self.embeddings
        heads = [self.head] if isinstance(self.head, str) else self.head
        for path in embeddings:
            if not path.endswith("?") and find(self.model, join(self.base, path)) is None:
                raise no_match(self.base, path, module_at(self.model, self.base))
        subs = [
            SubModuleReplacementDescription(
                join(self.base, path.rstrip("?")), self._classes.embedding, ignore_if_not_exist=path.endswith("?")
            )
            for path in embeddings
        ]
        subs += [SubModuleReplacementDescription(p, self._classes.head, ignore_if_not_exist=True) for p in heads]
        return ModulePolicyDescription(sub_module_replacement=subs)

    def _block(self, block: Role, lowering: LayerLowering) -> ModulePolicyDescription | None:
        if not lowering.has(block):
            return None
        if isinstance(block, Attention) and self._has_few_heads(block, lowering):
            return None
        if isinstance(block, MLP):
            return lowering.mlps(block if self.sums_exits() else replace(block, exits_with=None))
        if isinstance(block, Experts):
            return lowering.experts(block)
        return AttentionLowering(block, lowering, self._head_layout(block, lowering.layer, lowering.path)).description()

    def _has_few_heads(self, attention: Attention, lowering: LayerLowering) -> bool:
        """Whether the first of several stages has fewer heads than there are ranks: its attention stays whole."""
        said = attention.num_heads or self.num_heads
        heads = self._count(said, module_at(lowering.layer, attention.at))
        if heads is None or heads >= self.axis.size or not lowering.is_stage:
            return False
        at, out = (
            join(lowering.path, attention.at),
            join(lowering.path, relative(attention.at, attention.projections.out)),
        )
        self._few = [*self._few, at, out]
        note = f"Whole, since {heads} heads are fewer than {self.axis.size} ranks: {at}."
        if note not in self.notes:
            self.notes = [*self.notes, note]
        return True

    def _head_layout(self, attention: Attention, layer: nn.Module, path: str) -> HeadLayout:
        module = module_at(layer, attention.at)
        num_heads = self._count(said := attention.num_heads or self.num_heads, module)
        if num_heads is None:
            raise no_count(type(self).__name__, said, module, getattr(self.model, "config", None))
        num_kv_heads = self._count(attention.num_kv_heads or self.num_kv_heads, module) or num_heads
        out = relative(attention.at, attention.projections.out)
        width = features_of(linear_at(layer, out, path), out=False)
        unit = unit_of(path, out, width, num_heads)
        return HeadLayout(num_heads, num_kv_heads, unit, self.axis.size, attention.projections.partitions)

    def _count(self, said: int | str, attention: nn.Module) -> int | None:
        count: Any = said
        if isinstance(said, str):
            count = attention if said.startswith(".") else getattr(self.model, "config", None)
            for name in said.removeprefix(".").split("."):
                count = getattr(count, name, None)
        return count if isinstance(count, int) and count > 0 else None
