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
from shardformer.comm.collectives import all_gather_numbers, all_gather_objects
from shardformer.errors import ConfigError, InputError
from shardformer.forward_hooks import HookOrder, register_forward_hooks
from shardformer.gradients.buckets import GradientBucket, GradientSlot, ReduceScatterToShards
from shardformer.gradients.reducer import GradientReducer
from shardformer.layout.sharding_metadata import ShardingMetadata
from shardformer.mesh.parallel_context import Axis
from shardformer.offload.host import HostOffloadManager
from shardformer.offload.saved_tensor_hooks import SavedTensorHooks, check_tensor_version
from shardformer.transformers_compat import synchronize_generation
from shardformer.zero.config import ZeroOptions
from shardformer.zero.flat_shards import FlatShard, UnshardOptions
from shardformer.zero.stage3_parameters import (
    GROUP_ATTRIBUTE,
    GatherBufferPool,
    ParamGroupReducer,
    SavedParamView,
    Stage3ParamGroup,
    UnshardedGroupCache,
    group_params_by_layer,
)

END = -1
"""Index that marks the end of a forward or backward pass."""


@dataclass
class GatherOrder:
    """The common order in which all ranks gather the parameter groups during a forward or backward pass.

    Args:
        units: Indices of the groups, in this order.
        complete: Maps a position to the groups whose gradients are complete after this position.
        unread: Groups that no rank has read. They are inserted in the order of module registration.
        is_open: Whether the order differed between ranks, or all ranks skipped layers. Later passes may then differ,
            so the ranks compare their order at the end of each pass.
    """

    units: list[int] = field(default_factory=list)
    complete: dict[int, list[int]] = field(default_factory=dict)
    unread: list[int] = field(default_factory=list)
    is_open: bool = False

    def insert_group(self, group_index: int, position: int) -> None:
        """Insert a parameter group into the order, before the group at ``position``."""
        self.units.insert(position, group_index)
        self.complete = {n + (n >= position): found for n, found in self.complete.items()}

    def find_position(self, group_index: int, start: int) -> int:
        """Return the first position from ``start`` at which a parameter group is gathered, or END if there is none."""
        return next((n for n in range(max(start, 0), len(self.units)) if self.units[n] == group_index), END)

    def find_read_positions(self, read_indices: Sequence[int]) -> list[int]:
        """Return the position in this order of each parameter group that a rank reads."""
        positions, at = [], 0
        for index in read_indices:
            at = max(self.find_position(index, at), at)
            positions.append(at)
        return positions

    def insert_unread_forward_groups(self, group_indices: Sequence[int], layer_indices: Collection[int]) -> None:
        """Insert the parameter groups that no rank used into the forward order, in the order of the model."""
        self.unread = [index for index in group_indices if index not in self.units]
        self.is_open |= any(index in layer_indices for index in self.unread)
        for index in self.unread:
            lower = [n for n in self.units if n < index]
            self.insert_group(index, self.units.index(max(lower)) + 1 if lower else 0)

    def insert_unread_backward_groups(self, forward: GatherOrder) -> None:
        """Insert the parameter groups that no rank used into the backward order, in reverse order of the model."""
        self.unread, self.is_open = forward.unread, self.is_open or forward.is_open
        for index in (index for index in self.unread if index not in self.units):
            higher = [n for n in self.units if n > index]
            self.insert_group(index, len(self.units) - self.units[::-1].index(min(higher)) if higher else 0)


def create_gather_order(
    gathered: Sequence[int], previous: GatherOrder | None, reports: Sequence[tuple[list[int], Mapping[int, int]]]
) -> GatherOrder:
    """Create a common order of all-gathers from the parameter groups that each rank used in a pass.

    Args:
        gathered: The groups in the order in which they were gathered.
        previous: The previous order, from which a rank deviated, or None in the first pass of a kind.
        reports: For each rank, the groups that it read, and for each group the index of its last gradient among these.
    """
    plan = GatherOrder(list(gathered))
    if previous is not None:
        plan.units, plan.unread = previous.units, previous.unread
        for read, _ in reports:
            plan.units = _merge_orders(plan.units, read)
    plan.is_open = previous is not None or any(read != plan.units for read, _ in reports)
    last: dict[int, int] = {}
    for read, arrivals in reports:
        positions = plan.find_read_positions(read)
        for index, at in arrivals.items():
            last[index] = max(positions[at] if at >= 0 else 0, last.get(index, 0))
    for index, at in sorted(last.items(), reverse=True):
        if at < len(plan.units) - 1:
            plan.complete.setdefault(at, []).append(index)
    return plan


def _merge_orders(first: list[int], second: list[int]) -> list[int]:
    """Merge two lists so that the elements of each list keep their order."""
    out: list[int] = []
    for _, a, b, c, d in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        out += first[a:b] if first[a:b] == second[c:d] else first[a:b] + second[c:d]
    return out


PassKind = tuple[Any, ...]
"""Kind of a pass: (called module, pipeline position, training mode, grad mode), plus "backward" if it is one."""


class GatherScheduler:
    """Gathers and frees the ZeRO-3 parameter groups of a model, and starts the reduction of their gradients.

    Args:
        axis: Axis that contains all ranks of the model.
        frees: Whether to free a group after use. Otherwise, it stays gathered until the end of the step.
        gathers_ahead: Whether to gather the next group while the current one is used.
        part: Returns which part of the model a forward pass runs, for a model with pipeline stages.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Stage3ParamGroup],
        axis: Axis,
        *,
        frees: bool,
        gathers_ahead: bool = True,
        part: Callable[[], Any] = lambda: None,
    ) -> None:
        self.units, self.axis, self._frees, self._stage_part = units, axis, frees, part
        self._gathers_ahead, self.unsharded_cache = gathers_ahead, UnshardedGroupCache()
        self.reducer: ParamGroupReducer
        self._plans: dict[PassKind, GatherOrder] = {}
        self._kind: PassKind | None = None  # of the current pass
        self._is_backward = False
        self._is_ending = False  # whether a callback at the end of the backward pass is registered
        self._plan: GatherOrder | None = None  # None while the order is negotiated
        self._record = GatherOrder()
        self._last_arrivals: dict[int, int] = {}
        self._read_indices: list[int] = []  # groups that this rank read
        self._position = -1
        self._groups_by_address: dict[int, tuple[Stage3ParamGroup, int]] = {}  # gathered memory -> its group
        for unit in units:
            unit.where, unit.on_read = self._groups_by_address, self.gather_before_read
        self._keep: Collection[int] = ()  # groups that one operation reads together
        self._backward_of = 0
        self._run = 0  # index of the forward pass, which identifies the graph of a backward pass
        self._kinds: dict[int, PassKind] = {}
        self._caller: nn.Module | None = None
        self._saving: Any = None
        self._register_hooks(model)

    # --- start and end of a forward pass

    def _register_hooks(self, model: nn.Module) -> None:
        """Register forward hooks on the model and on every module that contains a complete parameter group.

        The outermost call of such a module counts as a forward pass.
        """
        params_of_groups = [{id(p) for p in unit.params} for unit in self.units]
        for path, module in model.named_modules():
            params = {id(p) for p in module.parameters()}
            if module is model or any(unit <= params for unit in params_of_groups):
                begin = partial(self._begin_forward, path)
                register_forward_hooks(module, HookOrder.PARAMETERS, begin, self._end_forward)
                register_forward_hooks(
                    module, HookOrder.PARAMETERS, after=self._exit_saved_tensor_hooks, always_call=True
                )

    def _begin_forward(self, path: str, module: nn.Module, args: Any) -> None:
        if self._saving is not None and module is not self._caller:
            return  # called inside a forward pass
        if self._saving is not None:  # an exception such as KeyboardInterrupt ended the previous forward pass
            self._exit_saved_tensor_hooks(module, (), None)
        if torch_compat.current_graph_task_id() >= 0:
            # Recomputation in a backward pass. Only re-entrant checkpoints leave saved tensors to these hooks.
            if torch.is_grad_enabled() and torch_compat.get_innermost_saved_tensors_hooks() is None:
                self._enter_saved_tensor_hooks(module)
            return
        if self._kind is not None or self._is_ending:  # an exception interrupted the previous pass
            self._kind, self._is_ending = None, False
            self.free_gathered_parameters()
        self._run += 1
        kind = (path, self._stage_part(), module.training, torch.is_grad_enabled())
        self._kinds = {run: kind for run, kind in self._kinds.items() if run > self._run - 64} | {self._run: kind}
        self.unsharded_cache.clear()
        self._free_groups(*self.units)
        self._begin_pass(kind)
        self._enter_saved_tensor_hooks(module)

    def _enter_saved_tensor_hooks(self, module: nn.Module) -> None:
        self._caller, self._saving = (
            module,
            SavedTensorHooks(self._pack_saved_tensor, self._unpack_saved_tensor, goes_first=True),
        )
        self._saving.activate()

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is not self._caller or torch_compat.current_graph_task_id() >= 0:
            return
        self._end_pass()
        last = [*dict.fromkeys(reversed(self._record.units))][:2] if torch.is_grad_enabled() else []
        # the head may be two groups: tied weight, bias
        self._free_groups(*(unit for unit in self.units if unit.index not in last and unit not in self.unsharded_cache))
        if torch.is_grad_enabled():
            for x in torch_compat.tree_leaves(output):
                if isinstance(x, Tensor) and x.requires_grad:
                    x.register_hook(self._register_backward_end_callback)

    def end_forward_early(self, output: Any) -> None:
        """End the forward pass of a pipeline stage before the called module returns."""
        assert self._caller is not None
        module = self._caller
        self._end_forward(module, (), output)
        self._exit_saved_tensor_hooks(module, (), output)

    def _exit_saved_tensor_hooks(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self._caller:
            self._saving.deactivate()
            self._saving = self._caller = None

    def gather_parameter(self, param: Tensor) -> None:
        """Gather the parameter group that contains ``param``, and free the others. Must be called on all ranks."""
        wanted = param.__dict__.get(GROUP_ATTRIBUTE)
        for unit in self.units:
            if unit is not wanted:
                unit.reshard()
        if wanted is not None:
            wanted.wait_for_unshard()

    def free_gathered_parameters(self) -> None:
        """Free the gathered parameters of all parameter groups."""
        for unit in self.units:
            unit.reshard()

    # --- one pass

    def _begin_pass(self, kind: PassKind, *, is_backward: bool = False) -> None:
        self._kind, self._is_backward, self._position = kind, is_backward, -1
        self._plan, self._record, self._last_arrivals, self._read_indices = self._plans.get(kind), GatherOrder(), {}, []
        self.reducer.is_sealed = self._plan is not None and not self._plan.is_open

    def gather_before_read(self, units: Sequence[Stage3ParamGroup]) -> None:
        """Gather the parameter groups whose parameters an operation is about to read."""
        if torch_compat.current_graph_task_id() >= 0:
            self._begin_backward(None)
        elif self._kind is None or self._is_backward:
            raise ConfigError(
                f"A parameter of {units[0].name} was read outside a forward or backward pass, where ZeRO stage 3 does "
                "not gather parameters.",
                remedy="Call model(...) instead of model.forward(...), or read shardformer.full_state_dict(model).",
            )
        self._keep = {unit.index for unit in units}
        for unit in units:
            self._gather_up_to(unit.index)

    def _gather_up_to(self, index: int) -> None:
        """Gather parameter groups until this rank has group ``index``, including groups that only other ranks need.

        If ``index`` is END, gather the remaining groups of the pass.
        """
        if index == self._current_index and index != END:
            return
        if index != END:
            self._read_indices.append(index)
        if self._plan is not None:
            self._gather_in_recorded_order(self._plan, index)
        if self._plan is None:
            self._negotiate_and_gather(index)

    def _gather_in_recorded_order(self, plan: GatherOrder, index: int) -> None:
        """Gather parameter groups in the order of an earlier pass, and discard the order if a rank deviates from it."""
        end = len(plan.units) - 1 if index == END else plan.find_position(index, self._position)
        leaves = index != END and end == END
        if leaves and self.units[index].is_gathered:
            return
        if leaves and not plan.is_open:
            raise InputError(
                f"{self.units[index].name} ran in a different order than in the first step, which ZeRO stage 3 does "
                "not support.",
                remedy="Run the layers in the same order in every step, or use stage=2.",
            )
        while self._position < (len(plan.units) - 1 if leaves else end):
            self._gather_next(plan.units[self._position + 1], plan.units[self._position + 2 : self._position + 4])
        if plan.is_open and (leaves or index == END) and any(all_gather_objects(leaves, self.axis)):
            self._plan = None

    def _gather_next(self, index: int, next_indices: Sequence[int]) -> None:
        """Gather a parameter group, free the previous one, reduce complete gradients, and prefetch later groups."""
        before, self._position = self._current_index, self._position + 1
        self.units[index].wait_for_unshard()
        self._record.units.append(index)
        comes_again = self._plan is not None and self._plan.find_position(before, self._position) != END
        if before not in (index, END) and not comes_again:
            reads_again = torch.is_grad_enabled() and not self._is_backward
            for unit in self.unsharded_cache.add_and_evict(self.units[before]) if reads_again else [self.units[before]]:
                if unit.index not in self._keep:
                    self._free_groups(unit)
        if self._plan is not None and self._is_backward and not self.reducer.is_paused:
            for n in self._plan.complete.get(self._position - 1, ()):
                self.reducer.start_group_reduction(self.units[n])
        if self._gathers_ahead:
            for n in next_indices[:1]:
                self.units[n].unshard()
            for n in next_indices[1:]:
                self.units[n].prefetch()

    def _free_groups(self, *units: Stage3ParamGroup) -> None:
        for unit in units if self._frees else ():
            unit.reshard()

    @property
    def _current_index(self) -> int:
        return self._record.units[-1] if self._record.units else END

    def _end_pass(self) -> None:
        """Take part in the remaining all-gathers of other ranks, and end this rank's forward or backward pass."""
        assert self._kind is not None
        self._keep = ()
        self._gather_up_to(END)
        if self._is_backward and not self.reducer.is_paused:
            self._reduce_remaining_groups()
        if self._plan is None:
            self._plans[self._kind] = self._merge_recorded_orders(self._plans.get(self._kind))
        self._kind = None

    # --- the first pass of a kind

    def _negotiate_and_gather(self, requested_index: int) -> None:
        """Agree with the other ranks on the next parameter group to gather, until the requested group is gathered.

        For END, continue until no rank requests any. Before each all-gather, one gather communicates the requested
        groups and the groups with complete gradients.
        """
        while True:
            done = [unit.index for unit in self.units if self._is_backward and self.reducer.is_complete(unit)]
            reports = all_gather_objects((requested_index, [] if self.reducer.is_paused else done), self.axis)
            wanted = [index for index, _ in reports if index != END]
            for index in sorted(set.intersection(*(set(done) for _, done in reports)), reverse=True):
                self.reducer.start_group_reduction(self.units[index])
            if not wanted:
                return
            chosen = max(wanted) if self._is_backward else min(wanted)
            self._gather_next(chosen, ())
            if chosen == requested_index:
                return

    def record_gradient_arrival(self, group: Stage3ParamGroup) -> None:
        """Record when in the backward pass a parameter group received its last gradient."""
        if self._kind is None or not self._is_backward:
            self._begin_backward(None)
        if self._plan is None:
            self._last_arrivals[group.index] = len(self._read_indices) - 1

    def _reduce_remaining_groups(self) -> None:
        """Reduce all gradients that have not been reduced yet, in the same order on all ranks."""
        rest = {unit.index for unit in self.units if unit.index not in self.reducer.sent}
        if not self.reducer.is_sealed:
            again = [unit.index for unit in self.units if self.reducer.has_unreduced_gradients(unit)]
            rest |= {index for indices in all_gather_objects(again, self.axis) for index in indices}
        for index in sorted(rest, reverse=True):
            self.reducer.start_group_reduction(self.units[index])
        self.reducer.on_backward_end()

    def _merge_recorded_orders(self, previous: GatherOrder | None) -> GatherOrder:
        """Combine the orders in which ranks gathered parameter groups in this pass, for use in later passes."""
        assert self._kind is not None
        reports = all_gather_objects((self._read_indices, self._last_arrivals), self.axis)
        plan = create_gather_order(self._record.units, previous, reports)
        if previous is None and self._is_backward:
            plan.insert_unread_backward_groups(self._plans[self._kind[:-1]])
        elif previous is None:
            plan.insert_unread_forward_groups(
                [unit.index for unit in self.units], {u.index for u in self.units if u.is_layer}
            )
        return plan

    # --- tensors that autograd saves

    def _pack_saved_tensor(self, x: Tensor) -> SavedParamView | None:
        """Replace a gathered tensor that autograd saves by its position in its group. Return None for other tensors."""
        place = None if x.layout is not torch.strided else self._groups_by_address.get(torch_compat.get_storage_id(x))
        if place is None:
            return None
        unit, base = place
        param = x if isinstance(x, nn.Parameter) else None
        run = self._backward_of if self._is_backward else self._run
        return SavedParamView(run, unit, param, base, (x.shape, x.stride(), x.storage_offset()), x._version)

    def _unpack_saved_tensor(self, packed: SavedParamView) -> Tensor:
        self._begin_backward(packed.run)
        self._keep = ()
        self._gather_up_to(packed.unit.index)
        if torch.is_grad_enabled():
            raise InputError(
                f"ZeRO stage 3 does not support create_graph=True in a backward pass through {packed.unit.name}.",
                remedy="Use stage=2, or remove create_graph=True.",
            )
        if packed.param is not None:
            check_tensor_version(packed.param, packed.version)
            return packed.param
        return packed.unit.bases[packed.base].as_strided(*packed.layout)

    # --- start and end of a backward pass

    def _begin_backward(self, forward_index: int | None) -> None:
        """Begin the backward pass of forward pass number ``forward_index``, by default the most recent one."""
        if torch_compat.current_graph_task_id() < 0:
            return  # a saved tensor was read outside a backward pass
        if self._caller is not None and not self._is_backward:
            raise InputError(
                f"A backward pass was started inside the forward pass of {type(self._caller).__name__}, which ZeRO "
                "stage 3 does not support.",
                remedy="Use stage=2, or start the backward pass after the forward pass.",
            )
        is_under_way = self._kind is not None and self._is_backward
        if is_under_way and forward_index in (None, self._backward_of):
            return
        if is_under_way:
            self._end_pass()  # the backward pass continues in the graph of another forward pass
        self._register_backward_end_callback()
        self._backward_of = self._run if forward_index is None else forward_index
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
            self._end_pass()
        self._is_backward = self._is_ending = False
        self._free_groups(*self.units)


def shard_for_stage3(
    model: nn.Module,
    metadata: ShardingMetadata,
    settings: ZeroOptions,
    reduce_scatter: ReduceScatterToShards,
    host: HostOffloadManager | None,
) -> tuple[GatherScheduler, list[FlatShard]]:
    """Shard the parameters of a model for ZeRO stage 3, and return the gather scheduler and the trainable shards.

    Parameters that several pipeline stages share keep their own reducer.

    Args:
        reduce_scatter: Reduction of the gradients.
        host: Host memory for the master weights, or None to keep them on the device.
    """
    own = [r for r in metadata.reducers if isinstance(r, GradientReducer) and not _has_params_shared_by_stages(r)]
    rest = [r for r in metadata.reducers if r not in own]
    gradients = {id(g.param): g for reducer in own for g in reducer.gradients}
    for reducer in own:
        reducer.remove_gradient_hooks()
    members = [
        (name, [gradients[id(p)] for p in params if _should_shard(p, settings.keep_frozen) and id(p) in gradients])
        for name, params in group_params_by_layer(model)
    ]
    pool = GatherBufferPool()
    units, buckets = _make_param_groups([each for each in members if each[1]], settings, host, pool)
    scheduler = _make_gather_scheduler(model, metadata, units, settings)
    overlaps = settings.overlap
    trained = [index for index, made in buckets.items() if made]
    if trained:
        buckets[min(trained)][-1].watch = metadata.monitor
    scheduler.reducer = ParamGroupReducer(
        units,
        buckets,
        reduce_scatter,
        scheduler.record_gradient_arrival,
        metadata.entries,
        overlaps=overlaps,
        memory=pool,
    )
    metadata.reducers = [scheduler.reducer, *rest]
    metadata.parameter_owner = scheduler
    axis = scheduler.axis
    synchronize_generation(
        model,
        lambda: wait_for_all_ranks("generate", axis),
        lambda is_active: any(row[0] for row in all_gather_numbers([int(is_active)], axis)),
    )
    return scheduler, [shard for unit in units for shard in unit.shards if shard.gradient_slots[0].param.requires_grad]


def _make_param_groups(
    named_gradient_slots: Sequence[tuple[str, list[GradientSlot]]],
    settings: ZeroOptions,
    host: HostOffloadManager | None,
    pool: GatherBufferPool,
) -> tuple[list[Stage3ParamGroup], dict[int, list[GradientBucket]]]:
    """Divide parameters into sharded groups with gradient buckets, and replace the parameters by placeholders."""
    precision = settings.precision
    gathered = UnshardOptions(pool.take, host.link if host is not None and settings.offload.parameters else None)
    units: list[Stage3ParamGroup] = []
    buckets: dict[int, list[GradientBucket]] = {}
    sizes: list[int] = []
    for name, found in named_gradient_slots:
        params: list[Any] = [g.param for g in found]
        unit = Stage3ParamGroup(len(units), name, params)
        unit.return_buffer = pool.return_buffer
        made = _make_gradient_buckets(found, precision.reduce_dtype)
        for bucket in made:
            trains = bucket.gradients[0].param.requires_grad
            bucket.memory = pool.take
            there, rounding = (host, precision.rounding) if trains else (None, None)
            unit.shards.append(FlatShard(bucket, precision.dtype, gathered=gathered, host=there, rounding=rounding))
        buckets[unit.index] = [bucket for bucket in made if bucket.gradients[0].param.requires_grad]
        parts = [_compute_gathered_bytes(shard) for shard in unit.shards]
        unit.size = sum(parts)
        sizes += parts
        unit.replace_params_with_placeholders()
        units.append(unit)
    pool.set_buffer_size(sizes)
    return units, buckets


def _compute_gathered_bytes(shard: FlatShard) -> int:
    """Return the size in bytes of the largest buffer that a shard needs, for gathered parameters or gradients."""
    return (shard.length + len(shard.gradient_slots)) * shard.axis.size * shard.dtype.itemsize


def _make_gather_scheduler(
    model: nn.Module, metadata: ShardingMetadata, param_groups: Sequence[Stage3ParamGroup], settings: ZeroOptions
) -> GatherScheduler:
    wide = [name for name, size in metadata.context.grid.sizes.items() if size > 1 and name != "pipe"]
    axis = metadata.context.flatten(*(wide or ["data"]))
    for unit, sizes in zip(
        param_groups, zip(*all_gather_objects([unit.size for unit in param_groups], axis), strict=True), strict=True
    ):
        unit.size = max(sizes)
    reshard = settings.reshard_after_forward
    frees = metadata.context.pipe.size == 1 if reshard is None else reshard is not False
    stage_forward = None if metadata.stages is None else metadata.stages.stage_forward

    def part() -> Any:
        run = stage_forward.now if stage_forward is not None else None
        return None if run is None else run.span.start

    scheduler = GatherScheduler(model, param_groups, axis, frees=frees, gathers_ahead=settings.overlap, part=part)
    scheduler.unsharded_cache.max_bytes = reshard if isinstance(reshard, int) and not isinstance(reshard, bool) else 0
    if stage_forward is not None:
        stage_forward.boundary_callbacks.append(scheduler.end_forward_early)
    return scheduler


def _has_params_shared_by_stages(reducer: GradientReducer) -> bool:
    return any(gradient.entry.reduction.stages for gradient in reducer.gradients)


def _should_shard(param: nn.Parameter, keep_frozen: bool) -> bool:
    return param.requires_grad or (not keep_frozen and (param.is_floating_point() or param.is_complex()))


def _make_gradient_buckets(gradients: Sequence[GradientSlot], dtype: torch.dtype | None) -> list[GradientBucket]:
    """Divide gradients into buckets by mesh axis, dtype and device, with separate buckets for frozen parameters."""
    found: dict[tuple[Any, ...], GradientBucket] = {}
    for gradient in gradients:
        param = gradient.param
        kind = (gradient.axis.ranks, param.dtype, param.device, param.requires_grad)
        bucket = found.setdefault((*kind, gradient.is_full, gradient.is_shared), GradientBucket(gradient.axis, dtype))
        bucket.gradients.append(gradient)
        gradient.bucket, gradient.arrived = bucket, False
    return list(found.values())
