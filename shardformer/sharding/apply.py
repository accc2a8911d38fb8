"""Apply a sharding plan to a model, and record each of the changes."""

from __future__ import annotations

import copy
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardformer.comm.collective_call import run_and_compare_across_ranks
from shardformer.config import ShardConfig
from shardformer.consistency.initial_weights import (
    broadcast_random_state,
    compute_model_fingerprint,
    sync_initial_weights,
)
from shardformer.consistency.rank_divergence import RankConsistencyMonitor
from shardformer.errors import ConfigError, PolicyError
from shardformer.kernels.attention_registration import use_flash_attention
from shardformer.kernels.fused_ops import defer_bias_add, make_fused_norm
from shardformer.layout.activation_layout import ActivationLayout
from shardformer.layout.packed_weights import unregister_quantized_parameters
from shardformer.layout.sharding_metadata import (
    ShardingMetadata,
    ShardingRequest,
    group_overlapping_tensors,
    named_sharded_parameters,
)
from shardformer.mesh.init_distributed import launch_from_torch
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.tensor_grid import TensorGrid, summarize_grid
from shardformer.meta_init.lazy_init import (
    get_lazy_init_notes,
    has_deferred_weights,
    materialize_parameters,
    record_changes_if_lazy,
)
from shardformer.module_paths import get_attribute_by_path_or_none, get_parent_and_attribute_name, join_path
from shardformer.pipeline.layer_sequence import map_tensors_to_layers
from shardformer.pipeline.stage_manager import PipelineStageManager, build_pipeline_stages
from shardformer.policies import legacy
from shardformer.policies.module_descriptions import SubModuleReplacementDescription
from shardformer.policies.policy import Policy
from shardformer.random_state import may_use_dropout, restore_rng_states_on_error
from shardformer.sharding import apply_context_parallel, apply_tensor_grid, checks, forward_checks
from shardformer.sharding.apply_tensor_parallel import (
    InstalledBlock,
    install_gradient_reduction,
    install_tensor_parallel_hooks,
)
from shardformer.sharding.checks import ACTIVATIONS, WRITTEN_OUT, named_norm_modules
from shardformer.sharding.compiled_layers import compile_model_if_configured
from shardformer.sharding.plan import ShardingPlan, get_display_name
from shardformer.tensor_parallel.layers import Linear1D_Col
from shardformer.tensor_parallel.parallel_module import ParallelModule, move_hooks, shard_parameter
from shardformer.tensor_parallel.quantized_linear import UnalignedQuantizedSliceError
from shardformer.torch_compat import get_wrapped_module_attr_name, has_meta_tensors, is_torch_compile_wrapper
from shardformer.torch_patches import install_patches
from shardformer.zero.shard_optimizer import TRAINING_PATCHES


@dataclass
class ResolvedPolicy:
    """A policy that is bound to a model, with its sharding plan and validation results.

    Args:
        policy: the policy, bound to the model and to the configuration.
        source: where the policy comes from, as text.
        plan: the policy's changes to the model, checked by ``make_checked_sharding_plan`` and adapted to a tensor grid.
        context: results of validating context parallelism.
        samples: batch dimensions of the attention arguments on a tensor grid.
        unvalidated: name of an input that was not validated on the tensor grid -> reason.
        notes: what ``describe_sharding`` reports about the validation.
    """

    policy: Policy
    source: str
    plan: ShardingPlan
    context: apply_context_parallel.ContextParallelTrialResult = field(
        default_factory=apply_context_parallel.ContextParallelTrialResult
    )
    samples: apply_tensor_grid.ArgumentSamples = field(default_factory=dict)
    unvalidated: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


class Sharder:
    """Shards a model in place with a policy that is already chosen and validated.

    ``shard_model_api.shard_model_in_place`` shows the order of the calls.

    Args:
        model: the plain model, identical on every rank. If weights differ, rank 0's are used.
        config: the configuration.
        is_new_model: whether the model was built only for this call. No optimizer can then refer to its parameters, so
            the search for one, which visits every object of the process, is skipped.
        wrapper_options: arguments of the wrapper that ``torch.compile(model)`` returned, from
            ``unwrap_compiled_module``.

    Raises:
        ShardFormerError: on every rank, if the ranks do not form one grid.
        LaunchError: if no launcher started this process.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ShardConfig,
        *,
        is_new_model: bool = False,
        wrapper_options: Mapping[str, Any] = {},
    ) -> None:
        if config.context is None and config.tensor_parallel_process_group is None and not dist.is_initialized():
            launch_from_torch()
        self.context = checks.create_checked_context(config)
        self.grid: TensorGrid | None = None
        if config.has_tensor_parallel_grid and self.context.tensor.size > 1:
            config, self.grid = apply_tensor_grid.arrange_tensor_ranks_as_grid(config, self.context)
            self.context = config.resolve_context()
        self.model, self.config, self._compiler = model, config, wrapper_options
        self.is_tensor_parallel = config.enable_tensor_parallelism and self.context.tensor.size > 1
        manager = config.pipeline_stage_manager
        stages = self.context.pipe.size if manager is None else manager.num_virtual_stages
        self.has_stages = manager is not None or stages > 1
        self.needs_policy = self.is_tensor_parallel or config.has_context_parallel or stages > 1 or bool(config.compile)
        """Whether the layout depends on the structure of the model. That of data parallelism does not."""
        self._fresh = is_new_model
        self._referenced = set() if is_new_model else checks.find_externally_referenced_param_ids(model)
        self._wrappers: Mapping[int, nn.Module] = {}

    @contextmanager
    def restore_model_on_error(self) -> Iterator[None]:
        """Temporarily remove wrappers such as ``torch.compile``, and restore the model if an error is raised."""
        with (
            restore_rng_states_on_error(self.context.device),
            checks.restore_model_on_error(self.model),
            ExitStack() as around,
        ):
            take_out = partial(_temporarily_unwrap_modules, self.model, num_stages=self.context.pipe.size)
            self._wrappers = run_and_compare_across_ranks(self.context, lambda: around.enter_context(take_out()))
            yield

    def finalize_sharding_plan(self, resolved_policy: ResolvedPolicy) -> ShardingPlan:
        """Complete the sharding plan and check that it can be applied to the model.

        The model is unchanged, except by the policy's ``preprocess``.

        Raises ShardFormerError if the model cannot be sharded. Communicates nothing.
        """
        config, policy, plan = self.config, resolved_policy.policy, resolved_policy.plan
        self._resolved = resolved_policy
        layout = config.resolve_activation_layout()
        if not self.is_tensor_parallel:
            layout = ActivationLayout(tuple(shard for shard in layout.shards if shard.axis not in layout.block))
        request = ShardingRequest(resolved_policy.source, config.get_sharding_options(), config.extra_kwargs, policy)
        self.state = state = ShardingMetadata(self.context, request, layout)
        state.layer_stacks = tuple(stack.layers for stack in plan.stacks)
        state.monitor = RankConsistencyMonitor(state) if config.check_consistency else None
        state.notes += resolved_policy.notes
        if config.has_context_parallel:
            has_sequence_parallelism = config.enable_sequence_parallelism and self.is_tensor_parallel
            plan = apply_context_parallel.adapt_plan_to_context_parallel(
                plan, resolved_policy.context, has_sequence_parallelism=has_sequence_parallelism
            )
        self.model = plan.model
        self._ties = group_overlapping_tensors(self.model.named_parameters())
        state.notes += policy.notes
        if self.has_stages:
            manager = config.pipeline_stage_manager or PipelineStageManager(self.context)
            state.stages = build_pipeline_stages(self.model, policy, manager)
            state.stages.uses_random = may_use_dropout(self.model)
            checks.check_tied_weights_on_same_stage(self._ties, state.stages.find_owner_ranks)
        state.unproven = self._find_unsupported_inputs()
        checks.check_layout_supports_quantized_weights(self.model, plan, self.context)
        checks.check_no_hooks_on_sharded_params(self.model, plan)
        checks.check_no_views_of_replaced_params(self.model, plan, state.stages)
        if not self._fresh:
            checks.check_no_existing_optimizer(self.model, plan, state.stages, self._referenced)
        return plan

    def get_lines_to_compare_across_ranks(self, plan: ShardingPlan) -> list[str]:
        """Describe the config, model and plan as text, so that ranks can check that they agree."""
        config, state = self.config, self.state
        settings = [state.request.source, str(config.get_sharding_options()), str(sorted(config.extra_kwargs.items()))]
        settings += [str(state.activations), f"check_consistency={config.check_consistency}"]
        stages = state.stages.get_partition_summary_lines() if state.stages is not None else []
        return [*settings, *compute_model_fingerprint(self.model), *plan.get_lines_to_compare_across_ranks(), *stages]

    def shard_in_place(self, plan: ShardingPlan) -> list[dict[int, Tensor]]:
        """Apply the sharding plan to the model in place. The plan must be identical on every rank.

        Returns the parameters that several pipeline stages share, each as a dict: rank on the pipe axis -> the
        parameter on this rank. Empty without a pipeline. Communicates initial weights and random states.
        """
        context, state = self.context, self.state
        state.notes += sync_initial_weights(self.model, context.base_axes[::-1])
        stages = state.stages
        if stages is not None:
            stages.remove_nonlocal_params(self.model)
            plan = plan.restrict_to_local_stage(stages.placeholders)
        blocks = run_and_compare_across_ranks(context, lambda: self._apply_plan_and_materialize(plan))
        for axis in (state.same_batch_axis, context.pipe):
            broadcast_random_state(axis, context.device)
        install_gradient_reduction(
            self.model, plan if self.is_tensor_parallel else ShardingPlan(self.model, []), blocks, state
        )
        state.attach_to_model(self.model)
        install_patches(TRAINING_PATCHES)
        if self._resolved.context.is_whole and not self._fresh:
            apply_context_parallel.warn_about_unsharded_attention(self.model, context)
        if stages is None:
            return []
        stages.record_shared_params(self.model)
        return list(stages.shared_params)

    def _find_unsupported_inputs(self) -> dict[str, str]:
        """Map each ``forward`` argument that this parallel layout does not support to the reason."""
        resolved = self._resolved
        active = {
            "tensor": self.is_tensor_parallel,
            "pipe": self.context.pipe.size > 1,
            "enable_sequence_parallelism": self.is_tensor_parallel and self.config.enable_sequence_parallelism,
        }
        of_policy = [inputs for what, inputs in resolved.policy.unproven.items() if active.get(what)]
        return {
            n: why for each in (*of_policy, resolved.context.unproven, resolved.unvalidated) for n, why in each.items()
        }

    def _apply_plan_and_materialize(self, plan: ShardingPlan) -> list[InstalledBlock]:
        """Apply the plan to the model, and load or initialize the shards of a lazily built model.

        Returns the tensor-parallel blocks. Communicates only to create the process groups of context parallelism.
        """
        if has_meta_tensors(self.model) and has_deferred_weights(self.model):
            self.state.notes += get_lazy_init_notes(self.model)
            with record_changes_if_lazy(self.model):
                blocks = self._apply_plan(plan)
            materialize_parameters(self.model, self.context.device)
        else:
            blocks = self._apply_plan(plan)
        uses_context_parallel, is_tensor_parallel = self.config.has_context_parallel, self.is_tensor_parallel
        forward_checks.ForwardCheckHooks(
            self.model,
            plan,
            self.state,
            self.grid,
            is_tensor_parallel=is_tensor_parallel,
            is_context_parallel=uses_context_parallel,
        )
        return blocks

    def _apply_plan(self, plan: ShardingPlan) -> list[InstalledBlock]:
        config, policy, state = self.config, self._resolved.policy, self.state
        is_legacy = policy.replaces_class_or_ties_params
        if is_legacy and (injected := legacy.replace_model_class(policy, self.model)):
            state.record_replacement("", injected[0], injected[1], kind="class")
        if self.is_tensor_parallel:
            self._replace_modules(plan)
        if unregister_quantized_parameters(self.model):
            state.notes.append(
                "Frozen quantized weights are not in state dicts and checkpoints, and ZeRO keeps them whole."
            )
        for target, source in legacy.tie_parameters(policy, self.model) if is_legacy else ():
            state.record_replacement(target, "own parameter", f"tied to {source}", kind="tie")
        if config.enable_flash_attention and not config.has_context_parallel:  # which has its own fused kernels
            note = partial(state.record_replacement, kind="method")
            state.notes.append(f"Attention: {use_flash_attention(self.model, state.context.device, note)}.")
        if config.enable_fused_normalization:
            replace_norms_with_fused_norms(self.model, state)
        if config.enable_jit_fused:
            fuse_activations_with_biases(self.model, plan, state)
        if self.grid is not None:
            state.notes.append(summarize_grid(self.grid))
        uses_random = may_use_dropout(self.model)
        if config.has_context_parallel:
            apply_context_parallel.install_context_parallel_attention(
                self.model, state, config.context_parallel, self._resolved.context, has_dropout=uses_random
            )
        blocks = (
            install_tensor_parallel_hooks(self.model, plan, state, config, self.grid) if self.is_tensor_parallel else []
        )
        if self.grid is not None:
            apply_tensor_grid.install_sample_selection_hooks(self.model, plan, state, self._resolved.samples)
        if config.has_context_parallel:
            apply_context_parallel.install_context_parallel_hooks(
                self.model, plan.stacks, state, self._resolved.context, has_dropout=uses_random
            )
        forward_checks.move_user_hooks_after_gather(self.model, plan)
        self.model = policy.postprocess() or self.model
        if config.compile or self._compiler:
            compile_model_if_configured(self.model, state, config.compile, self._compiler)
        if state.stages is not None:
            state.stages.install_forward_overrides(self.model, state.activations, state.context, self._wrappers)
        return blocks

    def _replace_modules(self, plan: ShardingPlan) -> None:
        """Replace submodules, shard parameters, and change attributes and methods as the plan specifies."""
        shared: dict[int, nn.Parameter] = {}
        done: set[tuple[int, str]] = set()  # a shared module is listed once per owner
        native = {path: self.model.get_submodule(path) for path in plan.replacements}
        kept_alive: list[Tensor] = []  # like the native modules, so that no id in `shared` is reused
        made: dict[int, nn.Module] = {}
        for path, module in native.items():
            if id(module) not in made:
                sub = plan.replacements[path]
                made[id(module)] = self._create_replacement(
                    path, module, sub, shared, self._get_sharding_axis(path, plan)
                )
                if isinstance(made[id(module)], ParallelModule):
                    move_hooks(made[id(module)], module)
            self.state.record_replacement(path, module, made[id(module)])
        _replace_module_references(self.model, made)
        for path, splits in plan.parameters.items():
            module, name = get_parent_and_attribute_name(self.model, path)
            if splits and (id(module), name) not in done:
                done.add((id(module), name))
                named = {split.axes[0] for split in splits.values()} & {"row", "column", "depth"}
                axis = self.context.axis(named.pop()) if named else self._get_sharding_axis(path, plan)
                kept_alive.append(shard_parameter(module, name, splits, axis, shared))
                self.state.record_replacement(path, "buffer" if name in module._buffers else "parameter", "a part")
        for module in self.model.modules():  # other owners of a parameter: BERT's head also owns the decoder's bias
            for name, param in module._parameters.items():
                if id(param) in shared:
                    module._parameters[name] = shared[id(param)]
        checks.restore_tied_weights(
            self.model, self._ties, {id(part): spec for _, part, spec in named_sharded_parameters(self.model)}
        )
        checks.check_shard_layouts(self.model, self.context.coords)
        self._replace_attributes_and_methods(plan)

    def _create_replacement(
        self,
        module_path: str,
        module: nn.Module,
        replacement: SubModuleReplacementDescription,
        shard_by_param_id: dict[int, nn.Parameter],
        axis: Axis,
    ) -> nn.Module:
        target, kwargs = replacement.target_module, dict(replacement.kwargs or {})
        make = target.from_native_module
        group: Any = axis
        if not getattr(make, "__module__", "").startswith("shardformer."):
            group = axis.group or axis  # user-defined classes take a torch process group; threads have none
        elif isinstance(target, type) and issubclass(target, ParallelModule):
            kwargs["shared"] = shard_by_param_id
            group = self.grid if target.takes_grid else axis
        try:
            new: nn.Module = make(module, group, **kwargs)
        except UnalignedQuantizedSliceError as error:
            raise ConfigError(
                f"Cannot shard {module_path}. {error.what}.", rule=error.rule, remedy=error.remedy
            ) from None
        except TypeError as error:
            is_built_in = make.__module__.startswith("shardformer.")
            if is_built_in and "argument" not in str(error):
                raise
            raise _make_replacement_error(module_path, replacement, error, is_built_in) from error
        if not isinstance(new, nn.Module):
            raise PolicyError(
                f"{get_display_name(target)}.from_native_module must return an nn.Module, but returned {new!r:.80} for "
                f"{module_path!r}.",
                remedy="Return the module that replaces the original module.",
            )
        if not type(new).__module__.startswith("shardformer."):
            checks.check_saved_buffers_keep_full_shape(module_path, module, new)
        return new

    def _get_sharding_axis(self, module_path: str, plan: ShardingPlan) -> Axis:
        inside = self.grid is not None and module_path.startswith(tuple(f"{stack.layers}." for stack in plan.stacks))
        return self.grid.column if inside and self.grid is not None else self.context.tensor

    def _replace_attributes_and_methods(self, plan: ShardingPlan) -> None:
        for path, value in plan.attributes.items():
            owner_path, _, name = path.rpartition(".")
            owner = _get_module_or_config_copy(self.model, owner_path)
            before = getattr(owner, name)
            setattr(owner, name, value)
            if before != value:
                self.state.record_replacement(path, str(before), str(value), kind="attribute")
        for path, function in plan.functions:
            function(self.model.get_submodule(path))
            self.state.record_replacement(path, "parameters", function, kind="parameters")
        for path, method in plan.methods.items():
            owner, name = get_parent_and_attribute_name(self.model, path)
            before = getattr(owner, name)
            setattr(owner, name, method.__get__(owner))
            self.state.record_replacement(path, before, method, kind="method")


def _make_replacement_error(
    module_path: str, replacement: SubModuleReplacementDescription, error: TypeError, is_built_in: bool
) -> PolicyError:
    """Convert a TypeError in ``from_native_module``, or in the call to it, to a PolicyError."""
    target = get_display_name(replacement.target_module)
    _, *frames = traceback.extract_tb(error.__traceback__)
    if frames and not is_built_in:
        place = [f"{each.filename}:{each.lineno}" for each in frames if each.filename == frames[0].filename][-1]
        return PolicyError(
            f"{target}.from_native_module cannot replace {module_path!r}: TypeError at {place}: {error}.",
            remedy=f"Fix the code at {place}.",
        )
    if replacement.kwargs:
        return PolicyError(
            f"{target}.from_native_module cannot replace {module_path!r} with kwargs={replacement.kwargs}: {error}.",
            remedy="Fix the kwargs in the policy.",
        )
    return PolicyError(
        f"{target}.from_native_module cannot replace {module_path!r}: {error}.",
        remedy="Define from_native_module(module, process_group, **kwargs).",
    )


def _get_module_or_config_copy(model: nn.Module, attr_path: str) -> Any:
    """Return the module at ``attr_path``, or a private copy of the config at ``attr_path``, to be modified."""
    owner = get_attribute_by_path_or_none(model, attr_path)
    if not isinstance(owner, nn.Module):
        owner = copy.copy(owner)
        setattr(*get_parent_and_attribute_name(model, attr_path), owner)
    return owner


def create_resolved_policy(
    sharder: Sharder,
    policy: Policy,
    policy_source: str,
    *,
    apply_sharding_rules: bool = True,
    **validation_results: Any,
) -> ResolvedPolicy:
    """Bind a policy to the sharder's model, and create the sharding plan.

    ``validation_results`` are further fields of the returned ``ResolvedPolicy``.
    """
    plan = checks.make_checked_sharding_plan(
        sharder.model, policy, sharder.config, apply_sharding_rules=apply_sharding_rules
    )
    if sharder.has_stages and (chain := policy.layer_sequence()).stacks:
        map_tensors_to_layers(plan.model, chain)
    # with data parallelism only, the rules change nothing and must not raise an error
    plan = plan if sharder.is_tensor_parallel else ShardingPlan(plan.model, plan.stacks)
    if sharder.grid is not None:
        plan = apply_tensor_grid.adapt_plan_to_grid(plan, sharder.grid)
    return ResolvedPolicy(policy, policy_source, plan, **validation_results)


def shard_for_validation(
    model: nn.Module, config: ShardConfig, policy: Policy, *, apply_rules: bool = True, **validation_results: Any
) -> Sharder:
    """Shard a temporary model that is used only to validate a policy or layout.

    Args:
        apply_rules: whether the policy's rules are checked even if no tensor axis shards the model.
        validation_results: results of validation so far, as fields of ``ResolvedPolicy``.
    """
    sharder = Sharder(model, config, is_new_model=True)

    def make_plan() -> ShardingPlan:
        return sharder.finalize_sharding_plan(
            create_resolved_policy(
                sharder, policy, "to be validated", apply_sharding_rules=apply_rules, **validation_results
            )
        )

    with sharder.restore_model_on_error():
        sharder.shard_in_place(
            run_and_compare_across_ranks(sharder.context, make_plan, sharder.get_lines_to_compare_across_ranks)
        )
    return sharder


def _replace_module_references(model: nn.Module, replacement_by_module_id: Mapping[int, nn.Module]) -> None:
    """Replace modules wherever a model stores them: as submodules, and in attributes, lists, tuples and dicts."""
    for module in model.modules():
        for name, child in module._modules.items():
            if id(child) in replacement_by_module_id:
                module._modules[name] = replacement_by_module_id[id(child)]
        for name, value in vars(module).items():
            if not isinstance(value, _CONTAINER_TYPES) or not value or name in _MODULE_ATTRIBUTES:
                continue
            if (new := _replace_modules_in_attribute(value, replacement_by_module_id, set())) is not value:
                vars(module)[name] = new


_CONTAINER_TYPES = (nn.Module, list, dict, tuple)
"""Types of attributes that are modules or may contain modules."""
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every ``nn.Module`` has."""


def _replace_modules_in_attribute(
    attr_value: Any, replacement_by_module_id: Mapping[int, nn.Module], visited_ids: set[int]
) -> Any:
    """Replace the modules in an attribute's value. Lists and dicts are changed in place, because they may be shared."""
    if isinstance(attr_value, nn.Module):
        return replacement_by_module_id.get(id(attr_value), attr_value)
    if type(attr_value) not in (list, dict, tuple) or id(attr_value) in visited_ids:
        return attr_value
    visited_ids.add(id(attr_value))
    items = list(attr_value.items()) if isinstance(attr_value, dict) else list(enumerate(attr_value))
    inner = [(key, each) for key, each in items if isinstance(each, _CONTAINER_TYPES)]
    changed = {
        key: new
        for key, each in inner
        if (new := _replace_modules_in_attribute(each, replacement_by_module_id, visited_ids)) is not each
    }
    if changed and isinstance(attr_value, tuple):
        return tuple(changed.get(at, each) for at, each in items)
    for key, new in changed.items():
        attr_value[key] = new
    return attr_value


@contextmanager
def _temporarily_unwrap_modules(model: nn.Module, *, num_stages: int = 1) -> Iterator[Mapping[int, nn.Module]]:
    """Temporarily remove wrappers such as ``torch.compile`` from the submodules of a model.

    Args:
        num_stages: number of pipeline stages that the model will run on.

    Yields id(wrapped module) -> its outermost wrapper. Raises ConfigError for a compiled module that is in a pipeline
    or is replaced by sharding.
    """
    found: list[tuple[nn.Module, str, str, nn.Module, str, nn.Module]] = []
    outermost: dict[int, nn.Module] = {}
    replaced: list[str] = []
    has_wrappers = any(map(get_wrapped_module_attr_name, {type(module): module for module in model.modules()}.values()))
    try:
        for parent, owner in model.named_modules() if has_wrappers else ():  # continues in the modules without wrappers
            for name, child in list(owner._modules.items()):
                outer, path = child, join_path(parent, name)
                while child is not None and (key := get_wrapped_module_attr_name(child)) is not None:
                    if num_stages > 1 and is_torch_compile_wrapper(child):
                        raise _make_compiled_module_error(path)
                    inner = child._modules[key]
                    assert inner is not None
                    found.append((owner, name, path, child, key, inner))
                    owner._modules[name] = child = inner
                if child is not None and child is not outer and outer is not None:
                    outermost[id(child)] = outer
        yield outermost
    finally:
        for owner, name, path, wrapper, key, inner in reversed(found):
            now = owner._modules[name]
            wrapper._modules[key], owner._modules[name] = now, wrapper
            is_replaced = now is not None and now is not inner and get_wrapped_module_attr_name(now) is None
            replaced += [path] if is_replaced and is_torch_compile_wrapper(wrapper) else []
    if replaced:
        raise _make_compiled_module_error(replaced[0])


def _make_compiled_module_error(module_path: str) -> ConfigError:
    return ConfigError(
        f"The module {module_path} was compiled with torch.compile before sharding, so the compiled code would run "
        "the unsharded module.",
        remedy="Compile the model after shard_model, or compile the module in place with module.compile().",
    )


def fuse_activations_with_biases(model: nn.Module, plan: ShardingPlan, metadata: ShardingMetadata) -> None:
    """Replace activations with fused kernels that also add the bias of the preceding linear layer."""
    for path, native in list(model.named_modules(remove_duplicate=False)):
        if type(native).__name__ in WRITTEN_OUT:
            _replace_and_record_module(
                model, path, native, nn.GELU("tanh").train(native.training), "activation", metadata
            )
    found: Counter[str] = Counter()
    for path, block in plan.blocks:
        acts = sorted({type(m).__name__ for m in model.get_submodule(path).modules()} & {*ACTIVATIONS})
        modules = [model.get_submodule(name) for name in block.columns if block.fuse_activation and acts]
        columns = [m for m in modules if isinstance(m, Linear1D_Col) and not m.skip_bias_add]
        for column in columns:
            column.finish = defer_bias_add
        if columns:
            terms = ("bias", " or ".join(acts), "gate")
            found[" and ".join(terms[columns[0].bias is None : 1 + len(columns)])] += 1
    fused = ", ".join(f"{count} {what}" for what, count in found.items())
    metadata.notes.append(f"Fused into one kernel: {fused or 'activations only'}.")


def replace_norms_with_fused_norms(model: nn.Module, metadata: ShardingMetadata) -> None:
    """Replace every supported norm in the model with a fused kernel, and record which norms were replaced."""
    left: Counter[str] = Counter()
    for path, norm in list(named_norm_modules(model)):
        kind = type(norm).__name__
        if isinstance(norm, ParallelModule):
            left[f"{kind} (its statistics are summed over ranks)"] += 1
            continue
        try:
            _replace_and_record_module(model, path, norm, make_fused_norm(norm), "norm", metadata)
        except ConfigError:
            left[f"{kind} (not a layer norm or RMS norm over the last dim)"] += 1
    if left:
        metadata.notes.append(f"Norms that are not fused: {', '.join(f'{n} {kind}' for kind, n in left.items())}.")


def _replace_and_record_module(
    model: nn.Module,
    module_path: str,
    original_module: nn.Module,
    new_module: nn.Module,
    replaced_kind: str,
    metadata: ShardingMetadata,
) -> None:
    move_hooks(new_module, original_module)
    setattr(*get_parent_and_attribute_name(model, module_path), new_module)
    metadata.record_replacement(module_path, original_module, new_module, kind=replaced_kind)
