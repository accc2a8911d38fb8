"""Schedule the parameter all-gathers of ZeRO-3 in the same order on all ranks.

In the first forward and backward pass, the ranks agree on the order of the parameter groups: before each all-gather,
they exchange which group they need next. Later passes follow the recorded order without this communication.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardformer import torch_compat
from shardformer.comm.collective_call import wait_for_all_ranks
from shardformer.comm.collectives import all_gather_ints, all_gather_objects
from shardformer.errors import ConfigError, InputError
from shardformer.forward_hooks import HookOrder, register_forward_hooks
from shardformer.gradients.buckets import GradientBucket, GradientSlot, ReduceScatterToShards
from shardformer.gradients.reducer import GradientReducer
from shardformer.layout.sharding_metadata import ShardingMetadata
from shardformer.mesh.parallel_context import Axis
from shardformer.offload.host import HostOffloadManager
from shardformer.offload.saved_tensor_hooks import SavedTensorHooks, check_not_modified_in_place
from shardformer.transformers_compat import synchronize_generation
from shardformer.zero.config import ZeroOptions
from shardformer.zero.flat_shards import FlatParamShard, UnshardOptions
from shardformer.zero.stage3_parameters import (
    GROUP_ATTRIBUTE,
    GatherBufferPool,
    ParamGroupGradReducer,
    SavedParamView,
    Stage3ParamGroup,
    UnshardedGroupCache,
    group_params_by_layer,
)

END = -1
"""Index that marks the end of a forward or backward pass."""


@dataclass
class ParamGatherOrder:
    """Order in which all ranks gather the parameter groups during a forward or backward pass.

    Args:
        group_order: Indices of the groups, in this order.
        completed_groups_by_position: Maps a position to the groups whose gradients are complete after this position.
        unread_groups: Groups that no rank has read. They are inserted in the order of module registration.
        is_open: Whether the order differed between ranks, or all ranks skipped layers. Later passes may then differ,
            so the ranks compare their order at the end of each pass.
    """

    group_order: list[int] = field(default_factory=list)
    completed_groups_by_position: dict[int, list[int]] = field(default_factory=dict)
    unread_groups: list[int] = field(default_factory=list)
    is_open: bool = False

    def insert_group(self, group_index: int, position: int) -> None:
        self.group_order.insert(position, group_index)
        self.completed_groups_by_position = {
            n + (n >= position): found for n, found in self.completed_groups_by_position.items()
        }

    def find_group_position(self, group_index: int, start_position: int) -> int:
        """Find the next position, from ``start_position`` on, at which a group is gathered, or return END."""
        return next(
            (n for n in range(max(start_position, 0), len(self.group_order)) if self.group_order[n] == group_index), END
        )

    def get_read_positions(self, read_group_indices: Sequence[int]) -> list[int]:
        """Find the position at which each of a rank's parameter groups is gathered."""
        positions, at = [], 0
        for index in read_group_indices:
            at = max(self.find_group_position(index, at), at)
            positions.append(at)
        return positions

    def insert_unread_forward_groups(self, group_indices: Sequence[int], layer_group_indices: Collection[int]) -> None:
        """Schedule groups that no rank used in the first forward pass, in case a later forward pass uses them."""
        self.unread_groups = [index for index in group_indices if index not in self.group_order]
        self.is_open |= any(index in layer_group_indices for index in self.unread_groups)
        for index in self.unread_groups:
            lower = [n for n in self.group_order if n < index]
            self.insert_group(index, self.group_order.index(max(lower)) + 1 if lower else 0)

    def insert_unread_backward_groups(self, forward_order: ParamGatherOrder) -> None:
        """Schedule groups that no rank used in the first backward pass, in case a later backward pass uses them."""
        self.unread_groups, self.is_open = forward_order.unread_groups, self.is_open or forward_order.is_open
        for index in (index for index in self.unread_groups if index not in self.group_order):
            higher = [n for n in self.group_order if n > index]
            self.insert_group(index, len(self.group_order) - self.group_order[::-1].index(min(higher)) if higher else 0)


def create_common_gather_order(
    gathered_group_indices: Sequence[int],
    previous_order: ParamGatherOrder | None,
    reads_and_last_grads_by_rank: Sequence[tuple[list[int], Mapping[int, int]]],
) -> ParamGatherOrder:
    """Merge the parameter groups that each rank used in a pass into one all-gather order for all ranks.

    Args:
        gathered_group_indices: The groups in the order in which they were gathered.
        previous_order: The previous order, from which a rank deviated, or None in the first pass of a kind.
        reads_and_last_grads_by_rank: For each rank, the groups that it read, and for each group the index of its last
            gradient among these.
    """
    plan = ParamGatherOrder(list(gathered_group_indices))
    if previous_order is not None:
        plan.group_order, plan.unread_groups = previous_order.group_order, previous_order.unread_groups
        for read, _ in reads_and_last_grads_by_rank:
            plan.group_order = _merge_gather_orders(plan.group_order, read)
    plan.is_open = previous_order is not None or any(
        read != plan.group_order for read, _ in reads_and_last_grads_by_rank
    )
    last: dict[int, int] = {}
    for read, arrivals in reads_and_last_grads_by_rank:
        positions = plan.get_read_positions(read)
        for index, at in arrivals.items():
            last[index] = max(positions[at] if at >= 0 else 0, last.get(index, 0))
    for index, at in sorted(last.items(), reverse=True):
        if at < len(plan.group_order) - 1:
            plan.completed_groups_by_position.setdefault(at, []).append(index)
    return plan


def _merge_gather_orders(first_order: list[int], second_order: list[int]) -> list[int]:
    """Merge two lists so that the elements of each list keep their order."""
    out: list[int] = []
    for _, a, b, c, d in SequenceMatcher(None, first_order, second_order, autojunk=False).get_opcodes():
        out += first_order[a:b] if first_order[a:b] == second_order[c:d] else first_order[a:b] + second_order[c:d]
    return out


PassKind = tuple[Any, ...]
"""Kind of a pass: (called module, pipeline position, training mode, grad mode), plus "backward" if it is one."""


class ParamGatherScheduler:
    """Gathers and frees the ZeRO-3 parameter groups of a model, and starts the reduction of their gradients.

    Args:
        axis: Axis that contains all ranks of the model.
        free_after_use: Whether to free a group after use. Otherwise, it stays gathered until the end of the step.
        prefetch: Whether to gather the next group while the current one is used.
        get_stage_part: Returns which part of the model a forward pass runs, for a model with pipeline stages.
    """

    def __init__(
        self,
        model: nn.Module,
        param_groups: Sequence[Stage3ParamGroup],
        axis: Axis,
        *,
        free_after_use: bool,
        prefetch: bool = True,
        get_stage_part: Callable[[], Any] = lambda: None,
    ) -> None:
        self.units, self.axis, self._frees, self._stage_part = param_groups, axis, free_after_use, get_stage_part
        self._gathers_ahead, self.unsharded_cache = prefetch, UnshardedGroupCache()
        self.reducer: ParamGroupGradReducer
        self._plans: dict[PassKind, ParamGatherOrder] = {}
        self._kind: PassKind | None = None  # of the current pass
        self._is_backward = False
        self._is_ending = False  # whether a callback at the end of the backward pass is registered
        self._plan: ParamGatherOrder | None = None  # None while the order is negotiated
        self._record = ParamGatherOrder()
        self._last_arrivals: dict[int, int] = {}
        self._read_indices: list[int] = []  # groups that this rank read
        self._position = -1
        self._groups_by_address: dict[int, tuple[Stage3ParamGroup, int]] = {}  # gathered memory -> its group
        for unit in param_groups:
            unit.where, unit.on_read = self._groups_by_address, self.gather_before_read
        self._keep: Collection[int] = ()  # groups that one operation reads together
        self._backward_of = 0
        self._run = 0  # index of the forward pass, which identifies the graph of a backward pass
        self._kinds: dict[int, PassKind] = {}
        self._caller: nn.Module | None = None
        self._saving: Any = None
        self._register_forward_hooks(model)

    # --- start and end of a forward pass

    def _register_forward_hooks(self, model: nn.Module) -> None:
        """Register forward hooks on the model and on every module that contains a complete parameter group.

        The outermost call of such a module counts as a forward pass.
        """
        params_of_groups = [{id(p) for p in unit.params} for unit in self.units]
        for path, module in model.named_modules():
            params = {id(p) for p in module.parameters()}
            if module is model or any(unit <= params for unit in params_of_groups):
                begin = partial(self._forward_pre_hook, path)
                register_forward_hooks(module, HookOrder.PARAMETERS, begin, self._forward_hook)
                register_forward_hooks(
                    module, HookOrder.PARAMETERS, forward_hook=self._deactivate_saved_tensor_hooks, always_call=True
                )

    def _forward_pre_hook(self, module_path: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._saving is not None and module is not self._caller:
            return  # called inside a forward pass
        if self._saving is not None:  # an exception such as KeyboardInterrupt ended the previous forward pass
            self._deactivate_saved_tensor_hooks(module, (), None)
        if torch_compat.current_graph_task_id() >= 0:
            # Recomputation in a backward pass. Only re-entrant checkpoints leave saved tensors to these hooks.
            if torch.is_grad_enabled() and torch_compat.get_innermost_saved_tensors_hooks() is None:
                self._activate_saved_tensor_hooks(module)
            return
        if self._kind is not None or self._is_ending:  # an exception interrupted the previous pass
            self._kind, self._is_ending = None, False
            self.free_gathered_params()
        self._run += 1
        kind = (module_path, self._stage_part(), module.training, torch.is_grad_enabled())
        self._kinds = {run: kind for run, kind in self._kinds.items() if run > self._run - 64} | {self._run: kind}
        self.unsharded_cache.clear()
        self._reshard_groups(*self.units)
        self._begin_pass(kind)
        self._activate_saved_tensor_hooks(module)

    def _activate_saved_tensor_hooks(self, module: nn.Module) -> None:
        self._caller, self._saving = (
            module,
            SavedTensorHooks(self._pack_saved_tensor, self._unpack_saved_tensor, run_first=True),
        )
        self._saving.activate()

    def _forward_hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module is not self._caller or torch_compat.current_graph_task_id() >= 0:
            return
        self._end_forward_or_backward_pass()
        last = [*dict.fromkeys(reversed(self._record.group_order))][:2] if torch.is_grad_enabled() else []
        # the head may be two groups: tied weight, bias
        self._reshard_groups(
            *(unit for unit in self.units if unit.index not in last and unit not in self.unsharded_cache)
        )
        if torch.is_grad_enabled():
            for x in torch_compat.tree_leaves(output):
                if isinstance(x, Tensor) and x.requires_grad:
                    x.register_hook(self._register_backward_end_callback)

    def end_stage_forward(self, stage_output: Any) -> None:
        """End the forward pass of a pipeline stage before the called module returns."""
        assert self._caller is not None
        module = self._caller
        self._forward_hook(module, (), stage_output)
        self._deactivate_saved_tensor_hooks(module, (), stage_output)

    def _deactivate_saved_tensor_hooks(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module is self._caller:
            self._saving.deactivate()
            self._saving = self._caller = None

    def gather_group_of_param(self, param: Tensor) -> None:
        """Gather the parameter group that contains ``param``, and free the others. Must be called on all ranks."""
        wanted = param.__dict__.get(GROUP_ATTRIBUTE)
        for unit in self.units:
            if unit is not wanted:
                unit.reshard()
        if wanted is not None:
            wanted.wait_for_unshard()

    def free_gathered_params(self) -> None:
        for unit in self.units:
            unit.reshard()

    # --- one pass

    def _begin_pass(self, pass_kind: PassKind, *, is_backward: bool = False) -> None:
        self._kind, self._is_backward, self._position = pass_kind, is_backward, -1
        self._plan, self._record, self._last_arrivals, self._read_indices = (
            self._plans.get(pass_kind),
            ParamGatherOrder(),
            {},
            [],
        )
        self.reducer.is_sealed = self._plan is not None and not self._plan.is_open

    def gather_before_read(self, param_groups: Sequence[Stage3ParamGroup]) -> None:
        """Gather the parameter groups whose parameters an operation is about to read."""
        if torch_compat.current_graph_task_id() >= 0:
            self._begin_backward(None)
        elif self._kind is None or self._is_backward:
            raise ConfigError(
                f"A parameter of {param_groups[0].name} was read outside a forward or backward pass, where ZeRO "
                "stage 3 does "
                "not gather parameters.",
                remedy="Call model(...) instead of model.forward(...), or read shardformer.full_state_dict(model).",
            )
        self._keep = {unit.index for unit in param_groups}
        for unit in param_groups:
            self._gather_through_group(unit.index)

    def _gather_through_group(self, group_index: int) -> None:
        """Gather groups in the common order until group ``group_index`` is gathered.

        This includes groups that only other ranks need. If ``group_index`` is END, gather the remaining groups of the
        pass.
        """
        if group_index == self._current_group_index and group_index != END:
            return
        if group_index != END:
            self._read_indices.append(group_index)
        if self._plan is not None:
            self._gather_in_recorded_order(self._plan, group_index)
        if self._plan is None:
            self._negotiate_and_gather(group_index)

    def _gather_in_recorded_order(self, gather_order: ParamGatherOrder, group_index: int) -> None:
        """Gather parameter groups in the order of an earlier pass, and discard the order if a rank deviates from it."""
        end = (
            len(gather_order.group_order) - 1
            if group_index == END
            else gather_order.find_group_position(group_index, self._position)
        )
        leaves = group_index != END and end == END
        if leaves and self.units[group_index].is_gathered:
            return
        if leaves and not gather_order.is_open:
            raise InputError(
                "ZeRO stage 3 requires layers to run in the same order in every step, but in this step, "
                f"{self.units[group_index].name} ran in a different order than in the first.",
                remedy="Run the layers in the same order in every step, or use stage=2.",
            )
        while self._position < (len(gather_order.group_order) - 1 if leaves else end):
            self._gather_next_group(
                gather_order.group_order[self._position + 1],
                gather_order.group_order[self._position + 2 : self._position + 4],
            )
        if gather_order.is_open and (leaves or group_index == END) and any(all_gather_objects(leaves, self.axis)):
            self._plan = None

    def _gather_next_group(self, group_index: int, prefetch_indices: Sequence[int]) -> None:
        """Gather a parameter group, free the previous one, reduce complete gradients, and prefetch later groups."""
        before, self._position = self._current_group_index, self._position + 1
        self.units[group_index].wait_for_unshard()
        self._record.group_order.append(group_index)
        comes_again = self._plan is not None and self._plan.find_group_position(before, self._position) != END
        if before not in (group_index, END) and not comes_again:
            reads_again = torch.is_grad_enabled() and not self._is_backward
            for unit in self.unsharded_cache.add_and_evict(self.units[before]) if reads_again else [self.units[before]]:
                if unit.index not in self._keep:
                    self._reshard_groups(unit)
        if self._plan is not None and self._is_backward and not self.reducer.is_paused:
            for n in self._plan.completed_groups_by_position.get(self._position - 1, ()):
                self.reducer.start_grad_reduction(self.units[n])
        if self._gathers_ahead:
            for n in prefetch_indices[:1]:
                self.units[n].start_unshard()
            for n in prefetch_indices[1:]:
                self.units[n].prefetch_shards_to_device()

    def _reshard_groups(self, *param_groups: Stage3ParamGroup) -> None:
        for unit in param_groups if self._frees else ():
            unit.reshard()

    @property
    def _current_group_index(self) -> int:
        return self._record.group_order[-1] if self._record.group_order else END

    def _end_forward_or_backward_pass(self) -> None:
        """Join the remaining all-gathers of other ranks, and end this rank's forward or backward pass."""
        assert self._kind is not None
        self._keep = ()
        self._gather_through_group(END)
        if self._is_backward and not self.reducer.is_paused:
            self._reduce_remaining_grads()
        if self._plan is None:
            self._plans[self._kind] = self._merge_gather_orders_across_ranks(self._plans.get(self._kind))
        self._kind = None

    # --- the first pass of a kind

    def _negotiate_and_gather(self, requested_group_index: int) -> None:
        """Agree with the other ranks on which group to gather next, until the requested group is gathered.

        For END, continue until no rank requests any. Before each all-gather, one gather communicates the requested
        groups and the groups with complete gradients.
        """
        while True:
            done = [
                unit.index
                for unit in self.units
                if self._is_backward and self.reducer.has_received_all_unreduced_grads(unit)
            ]
            reports = all_gather_objects((requested_group_index, [] if self.reducer.is_paused else done), self.axis)
            wanted = [index for index, _ in reports if index != END]
            for index in sorted(set.intersection(*(set(done) for _, done in reports)), reverse=True):
                self.reducer.start_grad_reduction(self.units[index])
            if not wanted:
                return
            chosen = max(wanted) if self._is_backward else min(wanted)
            self._gather_next_group(chosen, ())
            if chosen == requested_group_index:
                return

    def record_grad_arrival(self, param_group: Stage3ParamGroup) -> None:
        """Record when a parameter group received its last gradient, to schedule its reduction in later passes."""
        if self._kind is None or not self._is_backward:
            self._begin_backward(None)
        if self._plan is None:
            self._last_arrivals[param_group.index] = len(self._read_indices) - 1

    def _reduce_remaining_grads(self) -> None:
        """Reduce all gradients that have not been reduced yet, in the same order on all ranks."""
        rest = {unit.index for unit in self.units if unit.index not in self.reducer.sent}
        if not self.reducer.is_sealed:
            again = [unit.index for unit in self.units if self.reducer.has_unreduced_grads(unit)]
            rest |= {index for indices in all_gather_objects(again, self.axis) for index in indices}
        for index in sorted(rest, reverse=True):
            self.reducer.start_grad_reduction(self.units[index])
        self.reducer.on_backward_end()

    def _merge_gather_orders_across_ranks(self, previous_order: ParamGatherOrder | None) -> ParamGatherOrder:
        """Merge the gather orders of all ranks into one order for later passes of the same kind."""
        assert self._kind is not None
        reports = all_gather_objects((self._read_indices, self._last_arrivals), self.axis)
        plan = create_common_gather_order(self._record.group_order, previous_order, reports)
        if previous_order is None and self._is_backward:
            plan.insert_unread_backward_groups(self._plans[self._kind[:-1]])
        elif previous_order is None:
            plan.insert_unread_forward_groups(
                [unit.index for unit in self.units], {u.index for u in self.units if u.is_layer}
            )
        return plan

    # --- tensors that autograd saves

    def _pack_saved_tensor(self, tensor: Tensor) -> SavedParamView | None:
        """Replace a saved parameter by a reference to its parameter group. Return None for other tensors."""
        place = (
            None
            if tensor.layout is not torch.strided
            else self._groups_by_address.get(torch_compat.get_storage_id(tensor))
        )
        if place is None:
            return None
        unit, base = place
        param = tensor if isinstance(tensor, nn.Parameter) else None
        run = self._backward_of if self._is_backward else self._run
        return SavedParamView(
            run, unit, param, base, (tensor.shape, tensor.stride(), tensor.storage_offset()), tensor._version
        )

    def _unpack_saved_tensor(self, saved_view: SavedParamView) -> Tensor:
        self._begin_backward(saved_view.forward_pass_index)
        self._keep = ()
        self._gather_through_group(saved_view.param_group.index)
        if torch.is_grad_enabled():
            raise InputError(
                "ZeRO stage 3 does not support create_graph=True in a backward pass through "
                f"{saved_view.param_group.name}.",
                remedy="Use stage=2, or remove create_graph=True.",
            )
        if saved_view.param is not None:
            check_not_modified_in_place(saved_view.param, saved_view.version)
            return saved_view.param
        return saved_view.param_group.bases[saved_view.base_index].as_strided(*saved_view.view_layout)

    # --- start and end of a backward pass

    def _begin_backward(self, forward_pass_index: int | None) -> None:
        """Begin the backward pass of a forward pass, by default the most recent one."""
        if torch_compat.current_graph_task_id() < 0:
            return  # a saved tensor was read outside a backward pass
        if self._caller is not None and not self._is_backward:
            raise InputError(
                "ZeRO stage 3 does not support a backward pass inside the forward pass of "
                f"{type(self._caller).__name__}.",
                remedy="Use stage=2, or start the backward pass after the forward pass.",
            )
        is_under_way = self._kind is not None and self._is_backward
        if is_under_way and forward_pass_index in (None, self._backward_of):
            return
        if is_under_way:
            self._end_forward_or_backward_pass()  # the backward pass continues in the graph of another forward pass
        self._register_backward_end_callback()
        self._backward_of = self._run if forward_pass_index is None else forward_pass_index
        forward = self._kinds.get(self._backward_of, self._kinds[self._run])
        self._begin_pass((*forward, "backward"), is_backward=True)

    def _register_backward_end_callback(self, grad: Tensor | None = None) -> None:
        """Register a callback that ends the backward pass after autograd has finished.

        A hook of the model's output calls this method first, so that the callback is not registered in the nested
        backward pass of a re-entrant checkpoint.
        """
        if not self._is_ending:
            self._is_ending = True
            torch_compat.at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        if self._kind is not None and self._is_backward:
            self._end_forward_or_backward_pass()
        self._is_backward = self._is_ending = False
        self._reshard_groups(*self.units)


def shard_for_zero_stage3(
    model: nn.Module,
    metadata: ShardingMetadata,
    zero_options: ZeroOptions,
    reduce_scatter: ReduceScatterToShards,
    host_manager: HostOffloadManager | None,
) -> tuple[ParamGatherScheduler, list[FlatParamShard]]:
    """Shard the parameters of a model for ZeRO stage 3, and return the gather scheduler and the trainable shards.

    Parameters that several pipeline stages share keep their own reducer.

    Args:
        reduce_scatter: Reduction of the gradients.
        host_manager: Host memory for the master weights, or None to keep them on the device.
    """
    own = [r for r in metadata.reducers if isinstance(r, GradientReducer) and not _has_params_shared_across_stages(r)]
    rest = [r for r in metadata.reducers if r not in own]
    gradients = {id(g.param): g for reducer in own for g in reducer.gradients}
    for reducer in own:
        reducer.remove_grad_hooks()
    members = [
        (name, [gradients[id(p)] for p in params if _should_shard(p, zero_options.keep_frozen) and id(p) in gradients])
        for name, params in group_params_by_layer(model)
    ]
    pool = GatherBufferPool()
    units, buckets = _make_param_groups_and_buckets(
        [each for each in members if each[1]], zero_options, host_manager, pool
    )
    scheduler = _make_gather_scheduler(model, metadata, units, zero_options)
    overlaps = zero_options.overlap
    trained = [index for index, made in buckets.items() if made]
    if trained:
        buckets[min(trained)][-1].watch = metadata.monitor
    scheduler.reducer = ParamGroupGradReducer(
        units,
        buckets,
        reduce_scatter,
        scheduler.record_grad_arrival,
        metadata.entries,
        overlap=overlaps,
        buffer_pool=pool,
    )
    metadata.reducers = [scheduler.reducer, *rest]
    metadata.parameter_owner = scheduler
    axis = scheduler.axis
    synchronize_generation(
        model,
        lambda: wait_for_all_ranks("generate", axis),
        lambda is_active: any(row[0] for row in all_gather_ints([int(is_active)], axis)),
    )
    return scheduler, [shard for unit in units for shard in unit.shards if shard.gradient_slots[0].param.requires_grad]


def _make_param_groups_and_buckets(
    named_gradient_slots: Sequence[tuple[str, list[GradientSlot]]],
    zero_options: ZeroOptions,
    host_manager: HostOffloadManager | None,
    buffer_pool: GatherBufferPool,
) -> tuple[list[Stage3ParamGroup], dict[int, list[GradientBucket]]]:
    """Divide parameters into sharded groups with gradient buckets, and replace the parameters by placeholders."""
    precision = zero_options.precision
    gathered = UnshardOptions(
        buffer_pool.acquire_buffer,
        host_manager.link if host_manager is not None and zero_options.offload.parameters else None,
    )
    units: list[Stage3ParamGroup] = []
    buckets: dict[int, list[GradientBucket]] = {}
    sizes: list[int] = []
    for name, found in named_gradient_slots:
        params: list[Any] = [g.param for g in found]
        unit = Stage3ParamGroup(len(units), name, params)
        unit.return_buffer = buffer_pool.return_buffer
        made = _make_grad_buckets(found, precision.reduce_dtype)
        for bucket in made:
            trains = bucket.gradients[0].param.requires_grad
            bucket.allocate_fn = buffer_pool.acquire_buffer
            there, rounding = (host_manager, precision.weight_rounding_mode) if trains else (None, None)
            unit.shards.append(
                FlatParamShard(
                    bucket, precision.param_dtype, unshard_options=gathered, host_manager=there, rounding_mode=rounding
                )
            )
        buckets[unit.index] = [bucket for bucket in made if bucket.gradients[0].param.requires_grad]
        parts = [_compute_gather_buffer_bytes(shard) for shard in unit.shards]
        unit.size = sum(parts)
        sizes += parts
        unit.replace_params_with_placeholders()
        units.append(unit)
    buffer_pool.choose_buffer_size(sizes)
    return units, buckets


def _compute_gather_buffer_bytes(shard: FlatParamShard) -> int:
    """Compute the size in bytes of a shard's largest buffer, for gathered parameters or gradients."""
    return (shard.length + len(shard.gradient_slots)) * shard.axis.size * shard.dtype.itemsize


def _make_gather_scheduler(
    model: nn.Module, metadata: ShardingMetadata, param_groups: Sequence[Stage3ParamGroup], zero_options: ZeroOptions
) -> ParamGatherScheduler:
    wide = [name for name, size in metadata.context.grid.sizes.items() if size > 1 and name != "pipe"]
    axis = metadata.context.flatten(*(wide or ["data"]))
    for unit, sizes in zip(
        param_groups, zip(*all_gather_objects([unit.size for unit in param_groups], axis), strict=True), strict=True
    ):
        unit.size = max(sizes)
    reshard = zero_options.reshard_after_forward
    frees = metadata.context.pipe.size == 1 if reshard is None else reshard is not False
    stage_forward = None if metadata.stages is None else metadata.stages.stage_forward

    def get_stage_part() -> int | None:
        run = stage_forward.now if stage_forward is not None else None
        return None if run is None else run.span.start

    scheduler = ParamGatherScheduler(
        model, param_groups, axis, free_after_use=frees, prefetch=zero_options.overlap, get_stage_part=get_stage_part
    )
    scheduler.unsharded_cache.max_bytes = reshard if isinstance(reshard, int) and not isinstance(reshard, bool) else 0
    if stage_forward is not None:
        stage_forward.boundary_callbacks.append(scheduler.end_stage_forward)
    return scheduler


def _has_params_shared_across_stages(reducer: GradientReducer) -> bool:
    return any(gradient.entry.reduction.stages for gradient in reducer.gradients)


def _should_shard(param: nn.Parameter, keep_frozen: bool) -> bool:
    return param.requires_grad or (not keep_frozen and (param.is_floating_point() or param.is_complex()))


def _make_grad_buckets(grad_slots: Sequence[GradientSlot], reduce_dtype: torch.dtype | None) -> list[GradientBucket]:
    """Divide gradients into buckets by mesh axis, dtype and device, with separate buckets for frozen parameters."""
    found: dict[tuple[Any, ...], GradientBucket] = {}
    for gradient in grad_slots:
        param = gradient.param
        kind = (gradient.axis.ranks, param.dtype, param.device, param.requires_grad)
        bucket = found.setdefault(
            (*kind, gradient.is_full, gradient.is_shared), GradientBucket(gradient.axis, reduce_dtype)
        )
        bucket.gradients.append(gradient)
        gradient.bucket, gradient.has_arrived = bucket, False
    return list(found.values())
