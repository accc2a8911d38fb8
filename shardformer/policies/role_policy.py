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
from shardformer.kernels.fused_ops import is_elementwise, norm_kind
from shardformer.module_paths import (
    as_path_list,
    find_module,
    get_module,
    is_linear,
    join_path,
    match_paths,
    module_exists,
    no_match_error,
    resolve_path,
)
from shardformer.pipeline.layer_sequence import LayerSequence, StackDescription
from shardformer.policies.lowering import AttentionLowering, LayerLowering, LayerReplacement, check_exits
from shardformer.policies.module_descriptions import (
    ModuleKey,
    ModulePolicyDescription,
    check_field_types,
    check_type,
    merge_descriptions,
    type_hints_of,
)
from shardformer.policies.policy import Policy
from shardformer.policies.registry import registered_policy
from shardformer.policies.roles import MLP, Attention, Experts, LayerStack, Role
from shardformer.tensor_parallel.grid.layers import LAYERS_BY_MODE, ModeLayers

BETWEEN_LAYERS = "it reads the states between its layers, of which a rank has a part"
BETWEEN_STAGES = "it reads the states between its layers, of which a stage has those between its own"


class RolePolicy(Policy):
    """A policy that is a table of roles. See ``shardformer/policies/models`` for tables.

    Class attributes:
        stack: the model's stack or stacks.
        embeddings: embeddings over the vocabulary, relative to the base model.
        head: the language model's head, relative to the whole model; head classes without one need no word.
        unstacked_blocks: attentions and MLPs that stand in no stack, relative to the whole model.
        submodels: submodules that are models themselves (a text model), relative to the whole model; ``?`` as always.
        Each
            is described by the policy of its own model type.
        keep_replicated: what stays whole on purpose although it is large or inside a layer, relative to the base
        model, ``*``
            standing for an index; behind a dot, relative to the whole model, where only some heads have it.
        no_sequence_parallel, no_pipeline: why the model cannot run sequence parallelism, or a pipeline, if so.
        num_heads, num_kv_heads: these numbers, or the names of the config's fields that hold them; or, behind a dot,
            the name of an attribute of the attention module.
    """

    stack: LayerStack | Sequence[LayerStack] = ()
    embeddings: str | Sequence[str] = ()
    head: str | Sequence[str] = ()
    unstacked_blocks: Sequence[Role] = ()
    submodels: Sequence[str] = ()
    keep_replicated: Sequence[str] = ()
    num_heads: int | str = "num_attention_heads"
    num_kv_heads: int | str | None = "num_key_value_heads"
    no_sequence_parallel: str | None = None
    no_pipeline: str | None = None
    _uneven_heads: Sequence[str] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = dir(RolePolicy)
        for name in vars(cls):
            close = get_close_matches(name, [n for n in known if n[:1] != "_"], cutoff=0.8)
            if name not in known and close:
                raise PolicyError(
                    f"{cls.__name__} says {name!r}",
                    rule="A table has stack, embeddings, head, keep_replicated, num_heads and num_kv_heads",
                    remedy=f"Did you mean {close[0]!r}? A name that is less like it is left alone",
                )

    def set_model(self, model: nn.Module) -> None:
        super().set_model(model)
        written = vars(self) if is_shipped(self) else RolePolicy.__annotations__
        for name in (name for name in RolePolicy.__annotations__ if name in written):
            check_type(type(self).__name__, name, getattr(self, name), type_hints_of(RolePolicy)[name])

    def config_sanity_check(self) -> None:
        against = self.no_sequence_parallel_reason()
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

    def no_sequence_parallel_reason(self) -> str | None:
        """Why this model cannot run sequence parallelism; None where it can."""
        if _is_backbone(self.model):
            return BETWEEN_LAYERS
        whole = [stack.whole_sequence for stack in self.stacks()]
        return self.no_sequence_parallel or (whole[0] if whole and all(whole) else None)

    def no_pipeline_reason(self) -> str | None:
        """Why the layers of this model cannot be on several stages; None where they can."""
        if self.no_pipeline:
            return self.no_pipeline
        layers = [stack.layers for stack in self.layer_sequence().stacks]
        for path, module in self.model.named_modules():
            if _is_backbone(module) and any(f"{inner}.".startswith(f"{path}.") or not path for inner in layers):
                return BETWEEN_STAGES
        return next((why for _, policy in self._parts() if (why := policy.no_pipeline_reason())), None)

    @property
    def _classes(self) -> ModeLayers:
        return LAYERS_BY_MODE[self.shard_config.tensor_parallel_mode]

    @property
    def base(self) -> str:
        """Path of the base model inside the model that was given; empty when it is the base model itself."""
        prefix = getattr(self.model, "base_model_prefix", "")
        return prefix if prefix and isinstance(getattr(self.model, prefix, None), nn.Module) else ""

    def module_policy(self) -> Mapping[ModuleKey, ModulePolicyDescription]:
        self.notes = list(type(self).notes)
        self._uneven_heads = []
        # outside of the stacks all tensor ranks have the same, on a grid too
        tensor = self.shard_config.resolve_context().tensor if self.axis.name == "column" else self.axis
        model = LayerLowering(self.model, "", tensor)
        out: dict[ModuleKey, ModulePolicyDescription] = {
            "": merge_descriptions([self._outside(), self._merged(self.unstacked_blocks, model)])
        }
        for stack, is_stage in self._present_stacks():
            out |= self._layers(join_path(self.base, stack.layers), stack.blocks, is_stage)
        for path, policy in self._parts():
            out |= {join_path(path, str(key)): d for key, d in checked_descriptions(policy).items()}
            self.notes += policy.notes
        return out

    def _parts(self) -> list[tuple[str, Policy]]:
        """The policies of the submodules that are models themselves, by their paths."""
        out = []
        for path in [part.rstrip("?") for part in self.submodels if module_exists(self.model, part)]:
            policy = self._policy_of(model := get_module(self.model, path), path)
            policy.model, policy.shard_config, policy.axis = model, self.shard_config, self.axis
            out.append((path, policy))
        return out

    def _policy_of(self, model: nn.Module, part: str) -> Policy:
        if self.find_submodel_policy is not None:
            return self.find_submodel_policy(model)
        if (known := registered_policy(model)) is not None:
            return known[0]
        raise PolicyError(
            f"{part!r} is a {type(model).__name__}, of no registered family",
            rule="A part of a model is described by the policy of its own model type",
            remedy="Register one for it: shardformer.register_policy(model_type, policy)",
        )

    def _layers(self, path: str, blocks: Sequence[Role], is_stage: bool) -> dict[ModuleKey, ModulePolicyDescription]:
        """What becomes of each layer."""
        layers = dict(get_module(self.model, path).named_children())
        if not layers:
            raise no_match_error(path, "0", get_module(self.model, path))

        def lowered(layer: nn.Module) -> ModulePolicyDescription:
            return self._merged(blocks, LayerLowering(layer, f"{path}.*", self.axis, is_stage, self._classes))

        return {f"{path}.{name}": lowered(layer) for name, layer in layers.items()}

    def _merged(self, roles: Sequence[Role], where: LayerLowering) -> ModulePolicyDescription:
        return merge_descriptions([d for role in roles if (d := self._block(role, where)) is not None])

    def stacks(self) -> list[StackDescription]:
        return [*self._own_stacks(), *(s.within(path) for path, policy in self._parts() for s in policy.stacks())]

    def _own_stacks(self, *, any_norm: bool = False) -> list[StackDescription]:
        """The stacks of this table.

        Args:
            any_norm: whether whatever takes the place of a final norm counts as one. A module that reads more than one
                token at a time is given them all, behind the stack.
        """
        base, out = get_module(self.model, self.base), []
        for s, _ in self._present_stacks():
            norm = s.final_norm if s.final_norm and module_exists(base, s.final_norm, self.base) else None
            behind, layers = find_module(base, (norm or "").rstrip("?")), find_module(base, s.layers)
            if norm is not None and not any_norm and not _reads_each_token(behind, layers):
                norm = None
            stages = s.stages.for_layers(get_module(base, s.layers))
            own = StackDescription(
                s.layers, norm, s.cross_states, s.no_sequence_parallel, s.reads_context, stages=stages
            )
            out.append(replace(own, sequence=s.sequence).within(self.base))
        return out

    def layer_sequence(self) -> LayerSequence:
        own = LayerSequence.of(self.model, self._own_stacks(any_norm=True)).stacks
        every = [*own, *(s.within(path) for path, policy in self._parts() for s in policy.layer_sequence().stacks)]
        if every:  # some models register their head before the layers
            tops = {head.partition(".")[0] for head in as_path_list(self.head) if module_exists(self.model, f"{head}?")}
            beside = sorted(top for top in tops if not any(f"{s.layers}.".startswith(f"{top}.") for s in every))
            stages = every[-1].stages
            every[-1] = replace(every[-1], stages=replace(stages, with_last_layer=(*stages.with_last_layer, *beside)))
        return LayerSequence(tuple(every))

    def replicated(self) -> list[str] | None:
        base = get_module(self.model, self.base)
        known = [name for name, _ in [*base.named_modules(), *base.named_parameters()]]
        out = []
        for path in self.keep_replicated:
            if path.startswith("."):
                out.append(path[1:])
                continue
            found = match_paths(path.rstrip("?"), known)
            if not path.endswith("?") and not found:
                raise no_match_error(self.base, path, base)
            out += [join_path(self.base, name) for name in found]
        out += [
            name
            for path in self._uneven_heads
            for name in match_paths(path, [n for n, _ in self.model.named_modules()])
        ]
        for path, policy in self._parts():
            inner = policy.replicated()
            out += [path] if inner is None else [join_path(path, name) for name in inner]
        return out

    def _present_stacks(self) -> list[tuple[LayerStack, bool]]:
        """The stacks that the model has, one for each stage, and whether it is one of several."""
        base = get_module(self.model, self.base)
        names = [name for name, _ in base.named_modules()]
        out = []
        for stack in [self.stack] if isinstance(self.stack, LayerStack) else self.stack:
            found = match_paths(stack.layers, names)
            if not found and not stack.optional:
                raise no_match_error(self.base, stack.layers, base)
            layers = [layer for path in found for layer in get_module(base, path).children()]
            check_exits(stack, join_path(self.base, stack.layers), layers)
            out += [(stack if path == stack.layers else replace(stack, layers=path), len(found) > 1) for path in found]
        return out

    def _outside(self) -> ModulePolicyDescription:
        base = get_module(self.model, self.base)
        embeddings = [
            path.rstrip("?") for path in as_path_list(self.embeddings) if module_exists(base, path, self.base)
        ]
        subs = [LayerReplacement(join_path(self.base, path), self._classes.embedding) for path in embeddings]
        heads = [path.rstrip("?") for path in as_path_list(self.head)]
        own = [path for path in heads if self._is_head_of_user(path)]
        self._uneven_heads = [*self._uneven_heads, *own]
        self.notes = [*self.notes, *(f"Whole, since it is no linear: {path}." for path in own)]
        subs += [LayerReplacement(p, self._classes.head, ignore_if_not_exist=True) for p in heads if p not in own]
        return ModulePolicyDescription(sub_module_replacement=subs)

    def _is_head_of_user(self, path: str) -> bool:
        """Whether a table of ours names a head in whose place there is another module: it stays whole."""
        head = find_module(self.model, path)
        return is_shipped(self) and head is not None and not is_linear(head)

    def _block(self, block: Role, lowering: LayerLowering) -> ModulePolicyDescription | None:
        if not lowering.exists(block):
            return None
        if isinstance(block, MLP):
            return lowering.mlps(block if self.sums_exits() else replace(block, shared_exit=None))
        if isinstance(block, Experts):
            return lowering.experts(block)
        attention = self._attention(block, lowering)
        if (heads := attention.uneven_heads) is None:
            return attention.description()
        at, out = (
            join_path(lowering.path, block.at),
            join_path(lowering.path, resolve_path(block.at, block.projections.out)),
        )
        self._uneven_heads = [*self._uneven_heads, at, out]
        note = f"Whole, since {heads} heads are fewer than {self.axis.size} ranks: {at}."
        self.notes = [*self.notes, *([note] if note not in self.notes else [])]
        return None

    def _attention(self, role: Attention, where: LayerLowering) -> AttentionLowering:
        """The attention with the policy's numbers of heads where it has none of its own."""
        heads, kv_heads = role.num_heads or self.num_heads, role.num_kv_heads or self.num_kv_heads
        return AttentionLowering(role, where, getattr(self.model, "config", None), heads, kv_heads)


def is_shipped(policy: Policy) -> bool:
    """Whether the class of a policy is part of this package, whose tests check it, or derived."""
    return type(policy).__module__.startswith("shardformer.")


def checked_descriptions(policy: Policy) -> Mapping[ModuleKey, ModulePolicyDescription]:
    """What ``module_policy`` of a policy returns.

    Raises PolicyError for values of other types than the fields have. Roles are checked when they are written, so only
    a user's own descriptions are checked here.
    """
    found: Any = policy.module_policy()
    if is_shipped(policy) or type(policy).module_policy is RolePolicy.module_policy:
        return found  # type: ignore[no-any-return]
    values = list(found.values()) if isinstance(found, Mapping) else [found]
    wrong = next((v for v in values if not isinstance(v, ModulePolicyDescription)), None)
    if wrong is not None or not isinstance(found, Mapping):
        raise PolicyError(
            f"{type(policy).__name__}.module_policy() gave {wrong!r:.80}",
            rule="It returns a dict: class, class name or path of modules -> ModulePolicyDescription",
            remedy="Return that dict; docs/policies.md has an example",
        )
    for key, description in found.items():
        check_type(f"{type(policy).__name__}.module_policy()", "key", key, ModuleKey)
        check_field_types(description)
    return found


def _reads_each_token(norm: nn.Module | None, layers: nn.Module | None) -> bool:
    """Whether a module behind some layers is a norm, of the class that they have themselves, or as it computes."""
    assert norm is not None and layers is not None
    is_theirs = "forward" not in vars(norm) and type(norm) in {type(module) for module in layers.modules()}
    return is_theirs or norm_kind(norm) is not None or is_elementwise(norm)


def _is_backbone(module: nn.Module) -> bool:
    return hasattr(module, "out_features") and hasattr(module, "out_indices")
