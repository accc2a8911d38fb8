"""Run the optimizer step under ZeRO: compute the gradient norm, update the shards, and all-gather the parameters.

Shards on the device are updated first, in one call, which runs in parallel to the host on a GPU. Shards on the host
follow one by one: while one is updated, the previous one is copied to the device and gathered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import isinf, prod

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardformer.comm.collectives import PendingCollective, all_gather_objects, all_reduce
from shardformer.errors import ConfigError, InputError
from shardformer.gradients.buckets import GradientSlot
from shardformer.layout.sharding_metadata import ShardingMetadata
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.offload.disk import FileOffloadManager
from shardformer.offload.host import HostOffloadManager
from shardformer.torch_compat import has_real_data
from shardformer.zero.elementwise_trial import can_step_params_separately
from shardformer.zero.flat_shards import EDITS, FlatParamShard

MAX_UPDATES_IN_FLIGHT = 8
"""Maximum number of all-gathers in progress, which limits the memory of their buffers."""


class ShardedParamUpdater:
    """Updates this rank's shards of the parameters with one or more optimizers.

    Args:
        host_manager: Host memory of offloaded shards, or None if all shards are on the device.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        shards: Sequence[FlatParamShard],
        host_manager: HostOffloadManager | None,
        context: ParallelContext,
    ) -> None:
        self._optimizers, self._shards, self._host, self._context = optimizers, shards, host_manager, context
        comes = host_manager is not None or any(shard.rounded is not None for shard in shards)
        self._steps_separately = comes and all(can_step_params_separately(optimizer) for optimizer in optimizers)

    def update_and_all_gather_params(self) -> None:
        """Update all shards of this rank that have received gradients, and all-gather the updated parameters.

        All ranks gather the shards in the same order. Shards on the device come first. With offload to files, they come
        last, after all ranks have confirmed that their files are written, which communicates one object over each axis.

        Raises:
            InputError: A file could not be read or written. All ranks restore the previous weights and raise.
        """
        for shard in self._shards:
            shard.set_optimizer_grads()
        changed = [shard for shard in self._shards if shard.has_received_grad]
        lasting = [shard for shard in changed if shard.host is None and shard.rounded is None]
        rounded = [[shard] for shard in changed if shard.rounded is not None]
        there = [[shard] for shard in changed if shard.host is not None]
        if isinstance(self._host, FileOffloadManager):
            self._update_shard_groups(there)
            self._commit_or_roll_back_file_shards(self._host, [shard for turn in there for shard in turn])
            self._update_shard_groups([lasting])
        else:
            self._update_shard_groups([lasting, *rounded, *there] if self._steps_separately else [changed])

    def _update_shard_groups(self, shard_groups: Sequence[Sequence[FlatParamShard]]) -> None:
        all_gather = OverlappedParamAllGather()
        with self._host.use_optimizer_threads() if self._host is not None else nullcontext():
            for number, group in enumerate(shard_groups):
                for shard in (shard for coming in shard_groups[number : number + 2] for shard in coming):
                    shard.master_weight_store.start_loading()
                if all([shard.master_weight_store.load() for shard in group]):
                    self._step_optimizers(group if self._steps_separately else None)
                    for shard in group:
                        shard.copy_master_weights_to_params()
                all_gather.add_shards(group)
                for shard in group:
                    shard.master_weight_store.evict()
        all_gather.finish()

    def _commit_or_roll_back_file_shards(
        self, file_manager: FileOffloadManager, shards: Sequence[FlatParamShard]
    ) -> None:
        failure = file_manager.commit_or_roll_back(
            [shard.host for shard in shards if shard.host is not None], self._context
        )
        if failure is None:
            return
        all_gather = OverlappedParamAllGather()
        for shard in shards:
            if shard.master_weight_store.load():
                shard.copy_master_weights_to_params()
            all_gather.add_shards([shard])
            shard.master_weight_store.release()
        all_gather.finish()
        folder = file_manager.disk.folder
        if file_manager.commit_or_roll_back([], self._context) is not None:
            raise InputError(
                f"Optimizer states in {folder} could not be read or written, and some weights are lost: {failure}.",
                remedy="Resume from a checkpoint, and offload to another disk.",
            )
        raise InputError(
            f"Optimizer states in {folder} could not be read or written, so the step was undone: {failure}.",
            remedy="Free disk space, and then continue with the next batch.",
        )

    def _step_optimizers(self, shards: Sequence[FlatParamShard] | None) -> None:
        """Step the optimizers for the parameters in ``shards``, or for all parameters if ``shards`` is None."""
        if shards is None:
            for optimizer in self._optimizers:
                optimizer.step()
            return
        slices = {id(p.value) for shard in shards for p in shard.slices if p.value.grad is not None}
        for optimizer in self._optimizers:
            with restrict_optimizer_to_params(optimizer, slices):
                if optimizer.param_groups:
                    optimizer.step()


class OverlappedParamAllGather:
    """All-gathers updated parameters while the next shards are still being copied to the device."""

    def __init__(self) -> None:
        self._stored: list[FlatParamShard] = []
        self._under_way: deque[tuple[FlatParamShard, PendingCollective]] = deque()

    def add_shards(self, shards: Sequence[FlatParamShard]) -> None:
        """Queue shards for an all-gather, and start the all-gathers of the shards that were already queued."""
        for shard in self._stored:
            if not shard.keeps:  # the next forward pass gathers shards of stage 3
                self._under_way.append((shard, shard.start_param_all_gather()))
                self._wait_for_oldest_all_gathers(MAX_UPDATES_IN_FLIGHT)
        self._stored = list(shards)

    def _wait_for_oldest_all_gathers(self, max_in_flight: int) -> None:
        while len(self._under_way) > max_in_flight:
            shard, values = self._under_way.popleft()
            shard.copy_gathered_values_to_params(values.wait())

    def finish(self) -> None:
        """All-gather the remaining shards, and wait until all parameters of the model are up to date."""
        self.add_shards(())
        self._wait_for_oldest_all_gathers(0)


@contextmanager
def restrict_optimizer_to_params(optimizer: Optimizer, param_ids: Collection[int]) -> Iterator[None]:
    """Make an optimizer update only the parameters in ``param_ids`` inside a ``with`` block."""
    groups = optimizer.param_groups
    params_of_groups: list[list[Tensor]] = [group["params"] for group in groups]
    try:
        for group, all_params in zip(groups, params_of_groups, strict=True):
            group["params"] = [p for p in all_params if id(p) in param_ids]
        optimizer.param_groups = [group for group in groups if group["params"]]
        yield
    finally:
        for group, all_params in zip(groups, params_of_groups, strict=True):
            group["params"] = all_params
        optimizer.param_groups = groups


SHARED_GRADIENT_AXES = ("data", "sequence")
"""Names of the axes along which ranks have shards of the same gradients."""
EDITS_DIFFER = 2.0**32
"""Number that is added to the count of ranks with an error if ranks edited gradients differently."""


def compute_sharded_grad_norm(
    shards: Sequence[FlatParamShard],
    metadata: ShardingMetadata,
    zero_stage: int,
    local_error: Exception | None = None,
    param_ids: Collection[int] | None = None,
    norm_type: float = 2.0,
    within_pipeline_stage: bool = False,
) -> Tensor:
    """Compute the p-norm of a model's sharded gradients over all ranks.

    Communicates one all-reduce over each axis, of four numbers and two for each group of stages that share weights, and
    another one of the maximum for ``norm_type=inf``.

    Args:
        local_error: An error on this rank, which makes every rank raise.
        param_ids: The ids of the parameters to include, or None to include all.
        within_pipeline_stage: Whether only the ranks of one pipeline stage call this function.

    Raises:
        ConfigError: Scripts on different ranks edited gradients differently. Raised on all ranks.
    """
    groups = [] if metadata.stages is None else sorted({*metadata.stages.shared.values()})
    edits = [float(sum(shard.edits for shard in shards) % EDITS), *(_sum_shared_edits(shards, g) for g in groups)]
    numbers = [float(local_error is not None), *(power for x in edits for power in (x, x**2))]
    local = _compute_local_norm_term(
        shards if local_error is None else (), metadata, zero_stage, param_ids, norm_type=norm_type
    )
    total, count = torch.cat([local, torch.tensor(numbers, dtype=torch.float64).to(local.device)]), 1
    axes = sorted(metadata.context.base_axes, key=lambda axis: axis.name not in SHARED_GRADIENT_AXES)
    axes = [axis for axis in axes if not (within_pipeline_stage and axis.name == "pipe")]
    for axis in axes:
        if axis.name in SHARED_GRADIENT_AXES:
            count *= axis.size
        else:
            total, count = _flag_mismatched_grad_edits(total, count), 0
        total = all_reduce(total, axis, purpose="norm")
    total = _flag_mismatched_grad_edits(total, count)
    ranks_per_stage = prod(axis.size for axis in axes if axis.name != "pipe")
    for at, group in enumerate(groups if not within_pipeline_stage else ()):
        total = _flag_mismatched_grad_edits(total, ranks_per_stage * len(group), 4 + 2 * at)
    if local_error is not None:
        raise local_error
    _raise_on_gradient_problems(total[1])
    norm = total[0] ** (1 / norm_type)
    if isinf(norm_type):
        norm = local[0]
        for axis in axes:
            norm = all_reduce(norm, axis, op="max", purpose="norm")
        norm = torch.where(total[0].isnan(), total[0], norm)  # a maximum over ranks may ignore NaN
    is_wide = any(entry.param.dtype in (torch.float64, torch.complex128) for entry in metadata.entries)
    return norm if is_wide else norm.float()


def _raise_on_gradient_problems(problems: Tensor) -> None:
    if has_real_data(problems) and bool(problems >= EDITS_DIFFER):
        raise ConfigError(
            "p.grad was modified differently on different ranks since the last zero_grad.",
            remedy="Apply the same changes to p.grad on all ranks, regardless of each rank's batch and loss. In a "
            "pipeline, tied parameters have different names on each stage.",
        )
    if has_real_data(problems) and bool(problems):
        raise ConfigError(
            "The optimizer step was stopped, because another rank raised an error about its gradients or parameters.",
            remedy="See the error in the log of that rank.",
        )


def _compute_local_norm_term(
    shards: Sequence[FlatParamShard],
    metadata: ShardingMetadata,
    zero_stage: int,
    param_ids: Collection[int] | None,
    *,
    norm_type: float,
) -> Tensor:
    """Compute this rank's contribution to the norm: the sum of p-th powers, or the maximum for ``norm_type=inf``."""
    device = metadata.context.device
    here, there = (torch.zeros(1, dtype=torch.float64, device=place) for place in (device, "cpu"))
    for shard in shards:
        total, found = here if shard.host is None else there, shard.reduced_grads
        for p in shard.slices:
            is_asked = shard.has_grad_per_param[p.param_index] and (
                param_ids is None or id(p.grad_slot.param) in param_ids
            )
            if found is not None and is_asked and _is_included_in_grad_norm(p.grad_slot, metadata, zero_stage):
                norm = _vector_norm(found[p.shard_range], norm_type).to(total)
                total.copy_(torch.maximum(total, norm) if isinf(norm_type) else total + norm**norm_type)
    return torch.maximum(here, there.to(device)) if isinf(norm_type) else here + there.to(device)


def _vector_norm(values: Tensor, norm_type: float) -> Tensor:
    return torch.linalg.vector_norm(values, norm_type) if values.numel() else values.new_zeros(())


def _sum_shared_edits(shards: Sequence[FlatParamShard], stages: tuple[int, ...]) -> float:
    shared = (shard for shard in shards if shard.gradient_slots[0].entry.reduction.stages == stages)
    return float(sum(shard.shared_edits for shard in shared) % EDITS)


def _flag_mismatched_grad_edits(norm_and_edit_sums: Tensor, num_ranks: int, first_index: int = 2) -> Tensor:
    """Add an error flag to ``norm_and_edit_sums`` if the ranks modified ``p.grad`` differently.

    The fingerprints x of the edits differ if count * sum(x^2) > sum(x)^2. The two sums start at ``first_index``.
    """
    edits, squares = norm_and_edit_sums[first_index : first_index + 2]
    differs = (num_ranks * squares - edits**2).clamp(min=0.0, max=1.0) * float(num_ranks > 0)
    flags = torch.zeros_like(norm_and_edit_sums)
    flags[1] = EDITS_DIFFER * differs
    return norm_and_edit_sums + flags


def _is_included_in_grad_norm(grad_slot: GradientSlot, metadata: ShardingMetadata, zero_stage: int) -> bool:
    """Return whether this rank adds a gradient to the norm, so that replicated gradients count once."""
    reduction, context = grad_slot.entry.reduction, metadata.context
    coords = context.coords
    if zero_stage > 0:
        own = {*reduction.sum_over, *reduction.norm_over, *(["pipe"] if reduction.stages else [])}
    elif reduction.stages and coords["pipe"] != reduction.stages[0]:
        return False
    else:
        cut = grad_slot.entry.spec.axes if grad_slot.is_shared else ()
        own = {*reduction.norm_over} - {*reduction.sum_over, *cut}
    others = context.expand_views(context.grid.sizes) - context.expand_views(own)
    return all(coords[name] == 0 for name in others)


def make_nonfinite_grad_error(
    shards: Sequence[FlatParamShard], metadata: ShardingMetadata, grad_norm: Tensor
) -> InputError:
    """Create an error that names the first parameter with a NaN or infinite gradient. Must be called on all ranks."""
    order = {id(entry): number for number, entry in enumerate(metadata.entries)}
    found = [
        (order[id(p.entry)], metadata.context.rank, p.entry.name)
        for shard in shards
        for p in shard.slices
        if shard.reduced_grads is not None and not bool(torch.isfinite(shard.reduced_grads[p.shard_range]).all())
    ]
    for axis in metadata.context.base_axes:
        found = [item for found_by_rank in all_gather_objects(found, axis) for item in found_by_rank]
    _, rank, name = min(found, default=(0, 0, "some parameter"))
    return InputError(
        f"The gradient of {name} on rank {rank} is not finite (gradient norm {grad_norm}), so the weights were not "
        "updated.",
        remedy="Check the loss and the batch, and call optimizer.zero_grad(), or set on_nonfinite='skip'.",
    )
