"""Sharding: carries out a policy on a model. The one place that changes a model, and it records each change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardformer.comm.collective_call import collective_call
from shardformer.config import ShardConfig
from shardformer.consistency.initial_weights import check_same_files, model_fingerprint, sync_initial_weights
from shardformer.consistency.rank_divergence import ConsistencyMonitor
from shardformer.errors import PolicyError, first_line
from shardformer.gradients.clipping import patch_clip_grad_norm
from shardformer.layout.activation_layout import ActivationLayout
from shardformer.layout.sharding_metadata import ShardingMetadata, ShardingRequest, sharded_parameters
from shardformer.mesh.init_distributed import launch_from_torch
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.tensor_grid import TensorGrid, grid_summary
from shardformer.meta_init.materialization import is_lazy, lazy_notes, materialize_parameters, record_changes
from shardformer.module_paths import get_at, parent_of
from shardformer.pipeline.layer_sequence import owner_layers
from shardformer.pipeline.stage_manager import PipelineStageManager, build_stages
from shardformer.policies import legacy
from shardformer.policies.module_descriptions import SubModuleReplacementDescription
from shardformer.policies.policy import Policy, WithoutRules
from shardformer.random_state import broadcast_random_state, random_kept_on_error, uses_dropout
from shardformer.sharding.apply_context_parallel import (
    ContextFindings,
    find_context_layout,
    install_context_attention,
    install_context_hooks,
    plan_for_context,
    warn_unsharded_attention,
)
from shardformer.sharding.apply_kernels import apply_optimizations
from shardformer.sharding.apply_tensor_grid import (
    ArgumentSamples,
    find_sample_dims,
    install_argument_hooks,
    plan_for_grid,
    with_grid_context,
)
from shardformer.sharding.apply_tensor_parallel import InstalledBlock, install_gradient_reduction, install_regions
from shardformer.sharding.checks import (
    check_layouts,
    check_no_hooks,
    check_no_optimizer,
    check_process_group,
    check_stages,
    check_unsharded,
    check_views,
    find_ties,
    held_outside,
    make_checked_plan,
    restore_on_error,
    restore_ties,
)
from shardformer.sharding.forward_checks import (
    CacheHeads,
    ForwardChecks,
    ModuleFingerprint,
    local_input_modules,
    show_whole_behind,
)
from shardformer.sharding.module_aliases import put_everywhere, unwrapped
from shardformer.sharding.plan import ShardingPlan, qualified_name
from shardformer.tensor_parallel.parallel_module import ParallelModule, keep_hooks, shard_parameter
from shardformer.zero.torch_optimizers import patch_optimizers_and_scaler


class Sharder:
    """Shards one model in place.

    Args:
        model: the plain model, the same on every rank (where weights differ, rank 0's are taken).
        config: what is asked for.
        find: (model, number of tensor ranks) -> its policy, and where that comes from.
        prove: (model, find, sizes of the sequence axis) -> whether a model's sequence can be cut over ranks, and what
            was learnt of it (``shardformer.discovery.validation``); None: it is what is being found out.
        prove_policy: (plan, policy, number of tensor ranks) -> why a user's policy was not tried, None where it was;
            raises PolicyError where it is wrong (``shardformer.discovery.user_policy_validation``).
        prove_grid: (model, find, grid) -> the same of a tensor grid (``shardformer.discovery.validation``).
        fresh: whether the model was made for this, so that no optimizer can hold its parameters: looking for one goes
            through everything that the process holds.
        optional: whether the model may go without a policy where nothing of it is sharded. The user passed none.

    Raises ShardFormerError, on every rank and with the model as it was, when something cannot be.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ShardConfig,
        find: Callable[[nn.Module, int], tuple[Policy, str]],
        *,
        prove: Callable[..., Any] | None = None,
        prove_policy: Callable[[ShardingPlan, Policy, int], str | None] | None = None,
        prove_grid: Callable[..., Any] | None = None,
        fresh: bool = False,
        optional: bool = False,
    ) -> None:
        self._optional = optional
        self.model, self._prove, self._prove_grid, self._prove_policy = model, prove, prove_grid, prove_policy
        self._learned = ContextFindings()
        self._grid: TensorGrid | None = None
        self._samples: ArgumentSamples = {}
        self._wrappers: Mapping[int, nn.Module] = {}
        self._fresh, self._outside = fresh, set[int]()
        self.shard_config = config
        self._find = find

    def shard(self, then: Callable[[nn.Module], object] = lambda _: None) -> list[dict[int, Tensor]]:
        """Shards the model. Returns the parameters that several pipeline stages hold: none without a pipeline.

        Each as a dict: the ranks of the pipe axis that hold it -> this rank's own.

        Args:
            then: called with the sharded model. Where it raises the model is put back as it was, too.
        """
        config = self.shard_config
        if config.context is None and config.tensor_parallel_process_group is None and not dist.is_initialized():
            launch_from_torch()
        self._context = context = check_process_group(config)
        if config.is_grid and context.tensor.size > 1:
            config, self._grid = with_grid_context(config, context)
            self.shard_config, self._context = config, config.resolve_context()
            context = self._context
        self._outside = set() if self._fresh else held_outside(self.model)
        with random_kept_on_error(context.device), restore_on_error(self.model):
            with ExitStack() as around:
                take_out = partial(unwrapped, self.model, stages=context.pipe.size)
                self._wrappers = collective_call(context, lambda: around.enter_context(take_out()))
                self._shard_together()
            then(self.model)
        stages = self._state.stages
        return [] if stages is None else list(stages.shared_params)

    def _shard_together(self) -> None:
        """Changes the model, once all ranks know that they do the same. Communicates."""
        context = self._context
        plan = collective_call(context, self._plan, self._lines, explain=lambda: check_same_files(self.model, context))
        state, axes = self._state, context.own_axes[::-1]
        state.notes += sync_initial_weights(self.model, axes)
        stages = state.stages
        if stages is not None:
            stages.take_out(self.model)
            plan = plan.restricted(stages.placeholders)
        blocks = collective_call(context, lambda: self._carry_out(plan))
        for axis in (state.alike, context.pipe):
            broadcast_random_state(axis, context.device)
        install_gradient_reduction(self.model, plan if self._is_cut else ShardingPlan(self.model, []), blocks, state)
        state.attach(self.model)
        patch_clip_grad_norm()
        patch_optimizers_and_scaler()
        if self._learned.is_whole and not self._fresh:
            warn_unsharded_attention(self.model, context)
        if stages is not None:
            stages.note_shared(self.model)

    @property
    def _is_cut(self) -> bool:
        return self.shard_config.enable_tensor_parallelism and self._context.tensor.size > 1

    @property
    def needs_policy(self) -> bool:
        """Whether any axis but data shards the model. Data parallelism alone needs to know nothing of its structure."""
        manager = self.shard_config.pipeline_stage_manager
        stages = self._context.pipe.size if manager is None else manager.num_virtual_stages
        return not self._optional or self._is_cut or self.shard_config.cuts_context or stages > 1

    def _found_plan(self) -> tuple[ShardingPlan, str]:
        """(the plan of the policy that was found, where that policy comes from)."""
        model, config = self.model, self.shard_config
        try:
            self._policy, source = self._find(model, self._context.tensor.size)
            plan = make_checked_plan(model, self._policy, config, cuts=self._is_cut or not self._optional)
            if (chain := self._policy.chain()).stacks:
                owner_layers(plan.model, chain)
        except Exception as error:  # the policy of a family, and a model that its user changed: anything can fail
            if self.needs_policy:
                raise
            self._policy = WithoutRules()
            self._policy.notes = [f"The model has no policy, and needs none over data ranks: {first_line(error)}"]
            plan, source = make_checked_plan(model, self._policy, config), "no policy"
        # over data ranks alone the rules change nothing, so they must not be a reason to refuse anything either
        return plan if self._is_cut else ShardingPlan(plan.model, plan.stacks), source

    def _plan(self) -> ShardingPlan:
        """What is to be done, checked; the model is as it was, but for what the policy's ``preprocess`` does."""
        config, model = self.shard_config, self.model
        check_unsharded(model)
        plan, source = self._found_plan()
        layout = config.stream_layout()
        if not self._is_cut:
            layout = ActivationLayout(tuple(cut for cut in layout.cuts if cut.axis not in layout.block))
        request = ShardingRequest(source, config.options(), config.extra_kwargs, self._policy)
        self._state = ShardingMetadata(self._context, request, layout)
        self._state.watch = ConsistencyMonitor(self._state) if config.check_consistency else None
        if self._is_cut and self._grid is None and self._prove_policy is not None:
            why_not = self._prove_policy(plan, self._policy, self._context.tensor.size)
            self._state.notes += [why_not] if why_not else []
        if self._grid is not None:
            plan = plan_for_grid(plan, self._grid)
            if self._prove_grid is not None:
                learned = find_sample_dims(model, self._prove_grid, self._find, self._grid)
                self._samples, self._state.unproven = learned
        if config.cuts_context and self._prove is not None:
            self._learned = find_context_layout(model, self._prove, self._find, self._context, config.context_parallel)
            has_stream = config.enable_sequence_parallelism and self._is_cut
            plan = plan_for_context(plan, self._learned, has_stream=has_stream)
        self.model = plan.model
        self._ties = find_ties(self.model)
        self._state.notes += self._policy.notes
        if config.pipeline_stage_manager is not None or self._context.pipe.size > 1:
            manager = config.pipeline_stage_manager or PipelineStageManager(self._context)
            self._state.stages = build_stages(self.model, self._policy, manager)
            self._state.stages.draws = uses_dropout(self.model)
            check_stages(self._ties, self._state.stages.stages_of)
        self._state.unproven = self._unproven()
        check_no_hooks(self.model, plan)
        check_views(self.model, plan, self._state.stages)
        if not self._fresh:
            check_no_optimizer(self.model, plan, self._state.stages, self._outside)
        return plan

    def _unproven(self) -> dict[str, str]:
        """The inputs that the model must not be given as it is sharded, and why."""
        policy, asked = (
            self._policy,
            {
                "tensor": self._is_cut,
                "pipe": self._context.pipe.size > 1,
                "enable_sequence_parallelism": self._is_cut and self.shard_config.enable_sequence_parallelism,
            },
        )
        of_policy = [why for what, why in policy.unproven.items() if asked.get(what)]
        return {
            name: why
            for each in (*of_policy, self._learned.unproven, self._state.unproven)
            for name, why in each.items()
        }

    def _lines(self, plan: ShardingPlan) -> list[str]:
        config = self.shard_config
        asked = [self._state.request.source, str(config.options()), str(sorted(config.extra_kwargs.items()))]
        asked += [str(self._state.stream), f"check_consistency={config.check_consistency}"]
        stages = self._state.stages.lines() if self._state.stages is not None else []
        return [*asked, *model_fingerprint(self.model), *plan.lines(), *stages]

    def _carry_out(self, plan: ShardingPlan) -> list[InstalledBlock]:
        """Changes the model, and makes this rank's part of the values that it waits for. Returns its blocks.

        Communicates nothing, so a rank on which it fails keeps no other waiting.
        """
        waits = is_lazy(self.model)
        self._state.notes += lazy_notes(self.model)
        with record_changes(self.model):
            blocks = self._apply(plan)
        if waits:
            materialize_parameters(self.model, self._context.device)
        structure = ModuleFingerprint(self.model, list(local_input_modules(plan, self._state, is_cut=self._is_cut)))
        caches = CacheHeads.of(self.model, plan.blocks if self._is_cut else (), self._context.tensor, self._grid)
        ForwardChecks(self.model, self._state, structure, caches, is_cut=self._is_cut or self.shard_config.cuts_context)
        return blocks

    def _apply(self, plan: ShardingPlan) -> list[InstalledBlock]:
        config, policy, state = self.shard_config, self._policy, self._state
        injected = legacy.inject_class(policy, self.model)
        if injected:
            state.note("", injected[0], injected[1], kind="class")
        if self._is_cut:
            self.replace_module(plan)
        for target, source in legacy.bind_parameters(policy, self.model):
            state.note(target, "own parameter", f"tied to {source}", kind="tie")
        apply_optimizations(self.model, config, plan, state)
        if self._grid is not None:
            state.notes.append(grid_summary(self._grid))
        draws = uses_dropout(self.model)
        if config.cuts_context:
            install_context_attention(self.model, state, config.context_parallel, self._learned, draws=draws)
        blocks = install_regions(self.model, plan, state, config, self._grid) if self._is_cut else []
        if self._grid is not None:
            install_argument_hooks(self.model, plan, state, self._samples)
        if config.cuts_context:
            install_context_hooks(self.model, plan.stacks, state, self._learned, draws=draws)
        show_whole_behind(self.model, plan)
        self.model = policy.postprocess() or self.model
        if state.stages is not None:
            state.stages.open(self.model, state.stream, state.context, self._wrappers)
        return blocks

    def replace_module(self, plan: ShardingPlan) -> None:
        """Carries out the descriptions: submodules, attributes, parameters and methods."""
        shared: dict[int, nn.Parameter] = {}
        done: set[tuple[int, str]] = set()  # a module that several share is named for each of them
        native = {path: self.model.get_submodule(path) for path in plan.replacements}
        kept_alive: list[Tensor] = []  # as the native modules are: no identity in `shared` is used twice
        made: dict[int, nn.Module] = {}
        for path, module in native.items():
            if id(module) not in made:
                sub = plan.replacements[path]
                made[id(module)] = self._replacement(path, module, sub, shared, self._axis_at(path, plan))
                if isinstance(made[id(module)], ParallelModule):
                    keep_hooks(made[id(module)], module)
            self._state.note(path, module, made[id(module)])
        put_everywhere(self.model, made)
        for path, splits in plan.parameters.items():
            module, name = parent_of(self.model, path)
            if splits and (id(module), name) not in done:
                done.add((id(module), name))
                named = {split.axes[0] for split in splits.values()} & {"row", "column", "depth"}
                axis = self._context.axis(named.pop()) if named else self._axis_at(path, plan)
                kept_alive.append(shard_parameter(module, name, splits, axis, shared))
                self._state.note(path, "buffer" if name in module._buffers else "parameter", "a part")
        self._rebind(shared)
        restore_ties(self.model, self._ties, {id(part): spec for _, part, spec in sharded_parameters(self.model)})
        check_layouts(self.model, self._context.coords)
        self._change(plan)

    def _replacement(
        self,
        path: str,
        module: nn.Module,
        sub: SubModuleReplacementDescription,
        shared: dict[int, nn.Parameter],
        axis: Axis,
    ) -> nn.Module:
        kwargs, make = dict(sub.kwargs or {}), sub.target_module.from_native_module
        if getattr(make, "__module__", "").startswith("shardformer."):
            group: Any = axis
            if isinstance(sub.target_module, type) and issubclass(sub.target_module, ParallelModule):
                kwargs["shared"] = shared
                group = self._grid if sub.target_module.takes_grid else axis
        else:
            group = axis.group  # a class of the user's own knows torch's groups
        try:
            new: nn.Module = make(module, group, **kwargs)
        except TypeError as error:
            if "argument" not in str(error):
                raise
            raise PolicyError(
                f"{qualified_name(sub.target_module)} for {path!r} with kwargs={sub.kwargs or {}}: {error}",
                rule="The kwargs of a replacement are arguments that its from_native_module takes",
                remedy="Correct the name in the policy",
            ) from error
        if not isinstance(new, nn.Module):
            raise PolicyError(
                f"{qualified_name(sub.target_module)}.from_native_module gave {new!r:.80} for {path!r}",
                rule="It returns the module that takes the native one's place",
                remedy="Return it",
            )
        return new

    def _axis_at(self, path: str, plan: ShardingPlan) -> Axis:
        """The axis over which what stands there is cut: on a grid heads and features in a stack lie over columns."""
        inside = self._grid is not None and path.startswith(tuple(f"{stack.layers}." for stack in plan.stacks))
        return self._grid.column if inside and self._grid is not None else self._context.tensor

    def _rebind(self, shared: dict[int, nn.Parameter]) -> None:
        """Other owners of a parameter that was cut (BERT's head keeps the decoder's bias) own the part too."""
        for module in self.model.modules():
            for name, param in list(module._parameters.items()):
                if param is not None and id(param) in shared:
                    module._parameters[name] = shared[id(param)]

    def _change(self, plan: ShardingPlan) -> None:
        for path, value in plan.attributes.items():
            owner_path, _, name = path.rpartition(".")
            owner = _own(self.model, owner_path)
            before = getattr(owner, name)
            setattr(owner, name, value)
            if before != value:
                self._state.note(path, str(before), str(value), kind="attribute")
        for path, function in plan.functions:
            function(self.model.get_submodule(path))
            self._state.note(path, "parameters", function, kind="parameters")
        for path, method in plan.methods.items():
            owner, name = parent_of(self.model, path)
            before = getattr(owner, name)
            setattr(owner, name, method.__get__(owner))
            self._state.note(path, before, method, kind="method")


def _own(model: nn.Module, path: str) -> Any:
    """What stands at ``path``. A module's config, which others read too, becomes a copy of its own first."""
    owner = get_at(model, path)
    if not isinstance(owner, nn.Module):
        owner = copy.copy(owner)
        setattr(*parent_of(model, path), owner)
    return owner
