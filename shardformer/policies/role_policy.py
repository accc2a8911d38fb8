"""The base class of policies that list a model's attention modules, MLPs, embeddings and heads.

Paths in a table are relative: those of stacks to the base model (so that one table serves every head class), those of
attention modules and MLPs to one layer, and those of their projections to that module. A leading dot makes the path of
a projection relative to the layer (BERT's output projection is outside the module). ``?`` marks optional paths.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from torch import nn

from shardformer import module_paths as paths
from shardformer.errors import ConfigError, PolicyError
from shardformer.kernels.fused_ops import get_norm_kind, is_elementwise
from shardformer.pipeline.layer_sequence import LayerSequence, LayerStackDescription
from shardformer.policies.convert_roles import (
    AttentionRoleConverter,
    LayerReplacement,
    LayerRoleConverter,
    check_output_layers_exist,
)
from shardformer.policies.experts import describe_expert_sharding
from shardformer.policies.module_descriptions import (
    ModuleKey,
    ModulePolicyDescription,
    check_dataclass_field_types,
    check_value_type,
    get_cached_type_hints,
    merge_descriptions,
)
from shardformer.policies.policy import Policy, get_registered_policy_and_origin
from shardformer.policies.roles import MLP, Attention, Experts, LayerStack, Role
from shardformer.tensor_parallel.grid_layers import LAYERS_BY_MODE, ParallelLayerClasses

BETWEEN_LAYERS = "the model reads the hidden states between its layers, where each rank has only a shard"
BETWEEN_STAGES = "the model reads the hidden states between its layers, but a stage has only those of its own layers"
LARGE_SHARE = 0.1
"""A matrix outside the layer stacks that has more than this share of all parameters needs a rule."""


class RolePolicy(Policy):
    """A policy that lists the paths of a model's attention modules, MLPs, embeddings and heads.

    See ``shardformer/policies/families.py`` for examples.

    Class attributes:
        stack: the model's stack or stacks of layers.
        embeddings: vocabulary embeddings, relative to the base model.
        head: the language model head, relative to the full model. Ignored for classes without one.
        unstacked_blocks: attention modules and MLPs outside the stacks, relative to the full model.
        submodels: submodules that are models themselves (a text model), relative to the full model, ``?`` if optional.
            Each is described by the policy of its own model type.
        keep_replicated: paths that stay replicated although they are large or inside a layer, relative to the base
            model, with ``*`` for an index. A leading dot makes a path relative to the full model; it may be missing.
        no_sequence_parallel, no_pipeline: why the model does not support sequence parallelism, or a pipeline.
        num_heads, num_kv_heads: the counts, or names of config fields. With a leading dot, names of attributes of the
            attention module.
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
    _replicated_paths: Sequence[str] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = dir(RolePolicy)
        for name in vars(cls):
            similar = next(iter(get_close_matches(name, [n for n in known if n[:1] != "_"], cutoff=0.8)), None)
            if name not in known and similar:
                raise PolicyError(
                    f"{cls.__name__} sets {name!r}, which is not a field of a policy.",
                    remedy=f"Rename {name!r} to {similar!r}. If it is your own attribute, choose a less similar name.",
                )

    def set_model(self, model: nn.Module) -> None:
        super().set_model(model)
        written = vars(self) if is_builtin_policy(self) else RolePolicy.__annotations__
        for name in (name for name in RolePolicy.__annotations__ if name in written):
            check_value_type(type(self).__name__, name, getattr(self, name), get_cached_type_hints(RolePolicy)[name])

    def config_sanity_check(self) -> None:
        reason = self.no_sequence_parallel_reason()
        if self.shard_config.enable_sequence_parallelism and reason:
            raise ConfigError(
                f"{type(self.model).__name__} does not support enable_sequence_parallelism=True: {reason}.",
                remedy="Set enable_sequence_parallelism=False.",
            )
        for _, policy in self._find_submodel_policies():
            policy.config_sanity_check()

    def sums_block_outputs(self) -> bool:
        """Return whether layers add attention and MLP outputs directly, so that one all-reduce suffices."""
        return True

    def reads_intermediate_layer_outputs(self) -> bool:
        """Return whether the model reads the outputs of intermediate layers."""
        return False

    def no_sequence_parallel_reason(self) -> str | None:
        """Return the reason why this model does not support sequence parallelism, or None if it does."""
        if _is_transformers_backbone(self.model) or self.reads_intermediate_layer_outputs():
            return BETWEEN_LAYERS
        reasons = [stack.whole_sequence for stack in self.stacks()]
        return self.no_sequence_parallel or (reasons[0] if reasons and all(reasons) else None)

    def no_pipeline_reason(self) -> str | None:
        """Return the reason why this model does not support pipeline parallelism, or None if it does."""
        if self.no_pipeline or self.reads_intermediate_layer_outputs():
            return self.no_pipeline or BETWEEN_STAGES
        layers = [stack.layers for stack in self.layer_sequence().stacks]
        for path, module in self.model.named_modules():
            if _is_transformers_backbone(module) and any(
                f"{inner}.".startswith(f"{path}.") or not path for inner in layers
            ):
                return BETWEEN_STAGES
        return next((why for _, policy in self._find_submodel_policies() if (why := policy.no_pipeline_reason())), None)

    @property
    def _parallel_layer_classes(self) -> ParallelLayerClasses:
        return LAYERS_BY_MODE[self.shard_config.tensor_parallel_mode]

    @property
    def base(self) -> str:
        """Path of the base model inside a model with a head, or an empty string for a base model."""
        prefix = getattr(self.model, "base_model_prefix", "")
        return prefix if prefix and isinstance(getattr(self.model, prefix, None), nn.Module) else ""

    def module_policy(self) -> Mapping[ModuleKey, ModulePolicyDescription]:
        self.notes = list(type(self).notes)
        self._replicated_paths = []
        # outside the stacks all tensor ranks have the same activations, on a grid too
        tensor = self.shard_config.resolve_context().tensor if self.axis.name == "column" else self.axis
        model = LayerRoleConverter(self.model, "", tensor)
        out: dict[ModuleKey, ModulePolicyDescription] = {
            "": merge_descriptions(
                [self._describe_embeddings_and_lm_heads(), self._describe_roles(self.unstacked_blocks, model)]
            )
        }
        for stack, is_stage in self._find_existing_stacks():
            out |= self._describe_layers(paths.join_path(self.base, stack.layers), stack.blocks, is_stage)
        for path, policy in self._find_submodel_policies():
            out |= {paths.join_path(path, str(key)): d for key, d in get_checked_module_descriptions(policy).items()}
            self.notes += policy.notes
        return out

    def _find_submodel_policies(self) -> list[tuple[str, Policy]]:
        out = []
        for path in [part.rstrip("?") for part in self.submodels if paths.has_submodule(self.model, part)]:
            policy = self._get_submodel_policy(model := paths.get_submodule_or_raise(self.model, path), path)
            policy.model, policy.shard_config, policy.axis = model, self.shard_config, self.axis
            out.append((path, policy))
        return out

    def _get_submodel_policy(self, model: nn.Module, submodel_path: str) -> Policy:
        if self.find_submodel_policy is not None:
            return self.find_submodel_policy(model)
        if (known := get_registered_policy_and_origin(model)) is not None:
            return known[0]
        raise PolicyError(
            f"No policy is registered for the submodel {submodel_path!r} of class {type(model).__name__}.",
            remedy="Register a policy with shardformer.register_policy(model_type, policy).",
        )

    def _describe_layers(
        self, layer_list_path: str, roles: Sequence[Role], is_stage: bool
    ) -> dict[ModuleKey, ModulePolicyDescription]:
        layers = dict((module := paths.get_submodule_or_raise(self.model, layer_list_path)).named_children())
        if not layers:
            raise paths.make_module_not_found_error(layer_list_path, "0", module)
        return {
            f"{layer_list_path}.{name}": self._describe_roles(
                roles,
                LayerRoleConverter(layer, f"{layer_list_path}.*", self.axis, is_stage, self._parallel_layer_classes),
            )
            for name, layer in layers.items()
        }

    def _describe_roles(self, roles: Sequence[Role], converter: LayerRoleConverter) -> ModulePolicyDescription:
        return merge_descriptions([d for role in roles if (d := self._describe_role(role, converter)) is not None])

    def stacks(self) -> list[LayerStackDescription]:
        submodels = self._find_submodel_policies()
        return [
            *self._describe_own_layer_stacks(),
            *(s.with_path_prefix(path) for path, policy in submodels for s in policy.stacks()),
        ]

    def _describe_own_layer_stacks(self, *, accept_any_final_norm: bool = False) -> list[LayerStackDescription]:
        """Describe the model's own layers, without the layers of submodels.

        Args:
            accept_any_final_norm: whether any module is accepted as the final norm. Otherwise a module that reads
                several tokens at a time is not part of the stack, and receives all tokens.
        """
        base, out = paths.get_submodule_or_raise(self.model, self.base), []
        for s, _ in self._find_existing_stacks():
            layers = paths.get_submodule_or_raise(base, s.layers)
            norm = s.final_norm if s.final_norm and paths.has_submodule(base, s.final_norm, self.base) else None
            if norm is not None and not accept_any_final_norm:
                norm = (
                    norm if _is_token_wise_norm(paths.get_submodule_or_raise(base, norm.rstrip("?")), layers) else None
                )
            stages = s.stages.resolve_num_outputs(layers)
            own = LayerStackDescription(
                s.layers, norm, s.cross_states, s.no_sequence_parallel, s.reads_context, stages=stages
            )
            out.append(replace(own, sequence=s.sequence).with_path_prefix(self.base))
        return out

    def layer_sequence(self) -> LayerSequence:
        every = list(
            LayerSequence.from_stacks(self.model, self._describe_own_layer_stacks(accept_any_final_norm=True)).stacks
        )
        for path, policy in self._find_submodel_policies():
            every += [stack.with_path_prefix(path) for stack in policy.layer_sequence().stacks]
        if every:  # some models register their head before the layers
            heads = [head for head in paths.as_path_list(self.head) if paths.has_submodule(self.model, f"{head}?")]
            tops = sorted({head.partition(".")[0] for head in heads})
            tops = [top for top in tops if not any(f"{s.layers}.".startswith(f"{top}.") for s in every)]
            stages = every[-1].stages
            every[-1] = replace(every[-1], stages=replace(stages, with_last_layer=(*stages.with_last_layer, *tops)))
        return LayerSequence(tuple(every))

    def replicated_paths(self) -> list[str] | None:
        base = paths.get_submodule_or_raise(self.model, self.base)
        known = [name for name, _ in [*base.named_modules(), *base.named_parameters()]]
        out = []
        for path in self.keep_replicated:
            if path.startswith("."):
                out.append(path[1:])
                continue
            found = paths.match_paths(path.rstrip("?"), known)
            if not path.endswith("?") and not found:
                raise paths.make_module_not_found_error(self.base, path, base)
            out += [paths.join_path(self.base, name) for name in found]
        names = [name for name, _ in self.model.named_modules()]
        out += [name for path in self._replicated_paths for name in paths.match_paths(path, names)]
        for path, policy in self._find_submodel_policies():
            inner = policy.replicated_paths()
            out += [path] if inner is None else [paths.join_path(path, name) for name in inner]
        return out

    def _find_existing_stacks(self) -> list[tuple[LayerStack, bool]]:
        """Find the ModuleLists that match the policy's layer paths, and whether a path matches several."""
        base = paths.get_submodule_or_raise(self.model, self.base)
        names = [name for name, _ in base.named_modules()]
        out = []
        for stack in [self.stack] if isinstance(self.stack, LayerStack) else self.stack:
            found = paths.match_paths(stack.layers, names)
            if not found and not stack.optional:
                raise paths.make_module_not_found_error(self.base, stack.layers, base)
            layers = [layer for path in found for layer in paths.get_submodule_or_raise(base, path).children()]
            check_output_layers_exist(stack, paths.join_path(self.base, stack.layers), layers)
            out += [(stack if path == stack.layers else replace(stack, layers=path), len(found) > 1) for path in found]
        return out

    def _describe_embeddings_and_lm_heads(self) -> ModulePolicyDescription:
        base, embedding = paths.get_submodule_or_raise(self.model, self.base), self._parallel_layer_classes.embedding
        found = [path for path in paths.as_path_list(self.embeddings) if paths.has_submodule(base, path, self.base)]
        subs = [LayerReplacement(paths.join_path(self.base, path.rstrip("?")), embedding) for path in found]
        heads = [path.rstrip("?") for path in paths.as_path_list(self.head)]
        present = {
            path: module for path in heads if (module := paths.get_submodule_or_none(self.model, path)) is not None
        }
        # if the user replaced a head that a policy of this package describes, the user's module stays replicated
        own = [
            path
            for path, module in present.items()
            if is_builtin_policy(self) and not paths.is_linear_or_conv1d(module)
        ]
        self._replicated_paths = [*self._replicated_paths, *own]
        self.notes = [*self.notes, *(f"{path} is replicated, because it is not a linear layer." for path in own)]
        subs += [
            LayerReplacement(p, self._parallel_layer_classes.head, ignore_if_not_exist=True)
            for p in heads
            if p not in own
        ]
        return ModulePolicyDescription(sub_module_replacement=subs)

    def _describe_role(self, role: Role, converter: LayerRoleConverter) -> ModulePolicyDescription | None:
        if not converter.has_role(role):
            return None
        if isinstance(role, MLP):
            return converter.describe_mlp_sharding(
                role if self.sums_block_outputs() else replace(role, shared_exit=None)
            )
        if isinstance(role, Experts):
            return describe_expert_sharding(role, converter.layer, converter.layer_path, converter.axis)
        attention = self._create_attention_converter(role, converter)
        if (heads := attention.num_unshardable_heads) is None:
            return attention.describe_attention_sharding()
        at = paths.join_path(converter.layer_path, role.at)
        out = paths.join_path(converter.layer_path, paths.resolve_relative_path(role.at, role.projections.out))
        self._replicated_paths = [*self._replicated_paths, at, out]
        note = f"{at} is replicated, because it has {heads} heads for {self.axis.size} tensor ranks."
        self.notes = [*self.notes, *([note] if note not in self.notes else [])]
        return None

    def _create_attention_converter(self, role: Attention, converter: LayerRoleConverter) -> AttentionRoleConverter:
        """Create an ``AttentionRoleConverter`` with the policy's head counts as defaults."""
        heads, kv_heads = role.num_heads or self.num_heads, role.num_kv_heads or self.num_kv_heads
        return AttentionRoleConverter(role, converter, getattr(self.model, "config", None), heads, kv_heads)


def is_builtin_policy(policy: Policy) -> bool:
    """Return whether a policy is built into ShardFormer, instead of written by the user."""
    return type(policy).__module__.startswith("shardformer.")


def get_checked_module_descriptions(policy: Policy) -> Mapping[ModuleKey, ModulePolicyDescription]:
    """Return the module descriptions of a policy, after type checks if the user wrote it.

    Raises PolicyError for a value of the wrong type. Roles are checked when they are created.
    """
    found: Any = policy.module_policy()
    if is_builtin_policy(policy) or type(policy).module_policy is RolePolicy.module_policy:
        return found  # type: ignore[no-any-return]
    values = list(found.values()) if isinstance(found, Mapping) else [found]
    wrong = [value for value in values if not isinstance(value, ModulePolicyDescription)]
    if wrong or not isinstance(found, Mapping):
        wrong_value = wrong[0] if wrong else found
        raise PolicyError(
            f"{type(policy).__name__}.module_policy() must return a dict of ModulePolicyDescription objects, but got "
            f"{wrong_value!r:.80}.",
            remedy="Use classes, class names or paths of modules as keys. See docs/policies.md for an example.",
        )
    for key, description in found.items():
        check_value_type(f"{type(policy).__name__}.module_policy()", "key", key, ModuleKey)
        check_dataclass_field_types(description)
    return found


def check_no_missing_roles(
    policy: Policy, model: nn.Module, matched_param_ids: Collection[int], layer_list_paths: Sequence[str]
) -> None:
    """Raise PolicyError if the policy neither shards a weight matrix nor lists it in ``keep_replicated``.

    Args:
        matched_param_ids: ids of the parameters with a rule.
        layer_list_paths: paths of the stacks of layers.
    """
    replicated = policy.replicated_paths()
    if replicated is None:
        return
    total = sum(p.numel() for p in model.parameters())
    inside = tuple(f"{path}." for path in layer_list_paths)
    left: dict[str, nn.Parameter] = {}
    for name, p in model.named_parameters():
        is_replicated = any(f"{name}.".startswith(f"{path}.") for path in replicated)
        is_relevant = p.dim() > 1 and (name.startswith(inside) or p.numel() > LARGE_SHARE * total)
        if is_relevant and id(p) not in matched_param_ids and not is_replicated:
            left[name] = p
    if left:
        name, p = next(iter(left.items()))
        _, *others = dict.fromkeys(_replace_layer_index_with_star(n, inside) for n in left)
        known = ", ".join(dict.fromkeys(_replace_layer_index_with_star(n, inside) for n in replicated))
        more = f", nor for {', '.join(map(repr, others))}" if others else ""
        share = f"{p.numel() / total:.1%}"
        raise PolicyError(
            f"The policy has no rule for {name!r} of shape {tuple(p.shape)}, which contains {share} of all "
            f"parameters{more}.",
            remedy="Add the module of this parameter to the policy, or add its path to `keep_replicated` (now "
            f"{known or 'empty'}).",
        )


def _replace_layer_index_with_star(param_path: str, layer_stack_prefixes: Sequence[str]) -> str:
    """Replace the layer index in a path with ``*``. For example, ``layers.0.mlp.2`` becomes ``layers.*.mlp.2``."""
    stack = next((s for s in layer_stack_prefixes if param_path.startswith(s)), param_path)
    layer, dot, rest = param_path.removeprefix(stack).partition(".")
    return f"{stack}*{dot}{rest}" if layer.isdigit() else param_path


def _is_token_wise_norm(norm: nn.Module, layer_list: nn.Module) -> bool:
    """Return whether a module after the layers, such as a final norm, processes each token separately."""
    is_norm_of_layers = "forward" not in vars(norm) and type(norm) in {type(module) for module in layer_list.modules()}
    return is_norm_of_layers or get_norm_kind(norm) is not None or is_elementwise(norm)


def _is_transformers_backbone(module: nn.Module) -> bool:
    return hasattr(module, "out_features") and hasattr(module, "out_indices")
