"""This rank's shard of a gradient bucket under ZeRO: its parameters, reduced gradients and master weights.

The parameters of a bucket are concatenated and split into equal shards, one for each rank of the reduction. A shard
boundary can divide a parameter, so the optimizer of a rank receives slices of parameters, as 1-D tensors.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), sections 5.1 and 5.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from shardformer import torch_compat
from shardformer.comm.collectives import PendingCollective, all_reduce, start_all_gather, start_all_gather_into_tensor
from shardformer.errors import ConfigError
from shardformer.gradients.buckets import GradientBucket, GradientSlot
from shardformer.layout.sharding_metadata import ParamEntry
from shardformer.mesh.parallel_context import Axis
from shardformer.offload.host import AsyncHostDeviceCopy, HostDeviceCopier, HostOffloadManager, MasterWeightStore
from shardformer.torch_compat import has_real_data, tolist_or_ones
from shardformer.zero.gradient_view import ShardedGradient
from shardformer.zero.mixed_precision import KAHAN, BF16RoundedParamSlice, BF16WeightStore

EDITS = 2**12
"""Modulus of the edit counter. Sums of squares of smaller numbers over all ranks are exact in fp64."""


@dataclass(eq=False)
class ParamSlice:
    """Slice of a parameter that this rank's optimizer updates, or the full parameter.

    Args:
        param_index: Index of the parameter in its bucket.
        param_range: Range of the slice in the flattened parameter (the full parameter if ranks store slices of it).
        shard_range: Range of the slice in this rank's shard of the bucket.
        value: The parameter that the optimizer updates. It is a view of the shard, or a master weight if the shard has
            a 16-bit dtype or the optimizer runs on the host.
    """

    grad_slot: GradientSlot
    param_index: int
    param_range: slice
    shard_range: slice
    value: nn.Parameter

    @property
    def entry(self) -> ParamEntry:
        return self.grad_slot.entry


@dataclass(frozen=True)
class UnshardOptions:
    """Options for parameters that ZeRO stage 3 gathers only while they are used.

    Args:
        allocate_buffer: Allocates a buffer of (number of elements, dtype, device).
        copier: Copies the shard between host and device, or None if the shard stays on the device.
    """

    allocate_buffer: Callable[[int, torch.dtype, torch.device], Tensor]
    copier: HostDeviceCopier | None = None


class FlatParamShard:
    """This rank's shard of the parameters and gradients in a gradient bucket.

    Each ``start_param_all_gather`` communicates one all-gather of the parameters.

    The model's parameters become views of ``full``, a buffer with the shards of all ranks, into which the all-gather
    writes. If parameters are gathered on demand (stage 3), or if the model stores only slices of the full parameters in
    the bucket, only the local shard is kept.

    Args:
        dtype: New dtype of the parameters. None keeps their dtype.
        unshard_options: Options for parameters that are gathered on demand (stage 3).
        axis: Axis over which the bucket is sharded. By default, the axis of the gradient reduction.
        host_manager: Host memory for the optimizer's parameters and gradients, or None to keep them on the device.
        rounding_mode: "kahan" or "stochastic", for bf16 parameters without fp32 master weights.
    """

    def __init__(
        self,
        bucket: GradientBucket,
        dtype: torch.dtype | None = None,
        *,
        unshard_options: UnshardOptions | None = None,
        axis: Axis | None = None,
        host_manager: HostOffloadManager | None = None,
        rounding_mode: str | None = None,
    ) -> None:
        self.gradient_slots, self.axis = bucket.gradients, axis or bucket.axis
        self._slices = bucket.param_owner_communicator if axis is None else None
        first = self.gradient_slots[0].param
        self.dtype = dtype if dtype is not None and first.is_floating_point() else first.dtype
        self.device = first.device
        self.wide_dtype = torch.promote_types(self.dtype, torch.float32)
        self.length, self.places = bucket.get_shard_numel_and_ranges(self.axis.size)
        self.gathered, self.keeps = unshard_options, unshard_options is not None
        self._link = unshard_options.copier if unshard_options is not None else None
        lasts = not self.keeps and not any(gradient.is_shared for gradient in self.gradient_slots)
        self.full: Tensor | None = self._allocate_zeros(self.length * self.axis.size) if lasts else None
        if self._link is not None:
            self.local = self._link.allocate_on_host(self.length, self.dtype).zero_()
        else:
            self.local = self._allocate_zeros(self.length) if self.full is None else self._get_local_shard(self.full)
        self.host = host_manager.create_shard(self.length, self.wide_dtype) if host_manager is not None else None
        rounds = rounding_mode is not None and self.wide_dtype != self.dtype and host_manager is None
        self.rounded = BF16WeightStore(self.local, keep_residual=rounding_mode == KAHAN) if rounds else None
        self._always_loaded = MasterWeightStore()
        self.has_masters = self.host is not None or self.wide_dtype != self.dtype
        found = ((n, self._add_param(n, g)) for n, g in enumerate(self.gradient_slots))
        self._slice_of = {n: param_slice for n, param_slice in found if param_slice is not None}
        self.slices = list(self._slice_of.values())
        self._sum: Tensor | None = None
        self._counts: Tensor | None = None
        self._had = [False] * len(self.gradient_slots)
        self.edits = 0  # fingerprint of the user's edits of gradients, compared across ranks
        self.shared_edits = 0  # and of the edits of gradients that pipeline stages share, compared across stages
        self._is_discarded = False  # whether the user discarded the gradient of a parameter
        self._shown: dict[int, tuple[ShardedGradient, Tensor | None]] = {}
        self._going_up: AsyncHostDeviceCopy | None = None
        self._fetched: tuple[Tensor, AsyncHostDeviceCopy] | None = None
        self.record_param_versions()

    def enable_stochastic_rounding(self, seeds_by_entry_id: Mapping[int, int]) -> None:
        """Enable Kahan or stochastic rounding of bf16 parameters, unless the shard has fp32 master weights.

        Args:
            seeds_by_entry_id: Seed for the random rounding of each ParamEntry, by the id of the entry.
        """
        if self.rounded is not None:
            self.rounded.set_param_slices(
                [
                    BF16RoundedParamSlice(p.value, p.shard_range, p.param_range.start, seeds_by_entry_id[id(p.entry)])
                    for p in self.slices
                ]
            )

    @property
    def master_weight_store(self) -> MasterWeightStore:
        """Store that loads this shard's master weights for an optimizer step, and frees them afterward."""
        return self.host or self.rounded or self._always_loaded

    @property
    def is_offloaded(self) -> bool:
        """Whether this rank's shard of the parameters is stored in host memory."""
        return self._link is not None

    @property
    def reduced_grads(self) -> Tensor | None:
        """The reduced gradients of this shard, or None if no parameter has received a gradient."""
        return self._sum if self.host is None else self.host.reduced_grads

    @property
    def has_grad_per_param(self) -> list[bool]:
        """Whether any rank computed a gradient, for each parameter. The first access synchronizes with the GPU."""
        if self._counts is not None:
            counts: list[float] = tolist_or_ones(self._counts)
            self._had, self._counts = [a or b > 0 for a, b in zip(self._had, counts, strict=True)], None
        return self._had

    @property
    def has_received_grad(self) -> bool:
        """Whether any rank computed a gradient for this shard, including gradients that the user discarded."""
        return any(self.has_grad_per_param) or self._is_discarded

    def find_reallocated_param(self) -> str | None:
        """Find a parameter that no longer uses this shard's memory, and return its name or None."""
        if self.full is None or not has_real_data(self.full):
            return None
        base, size = self.full.data_ptr(), self.full.element_size()
        for gradient, place in zip(self.gradient_slots, self.places, strict=True):
            if gradient.numel and gradient.param.data_ptr() != base + place.start * size:
                return gradient.entry.name
        return None

    def copy_modified_params_to_shard(self) -> None:
        """Copy parameters that ``load_state_dict`` or user code has modified into the shard.

        All ranks must write the same values. Parameters that are views of the shard are already up to date.
        """
        written = [n for n, g in enumerate(self.gradient_slots) if g.param._version != self._versions[n]]
        if self.keeps or not written:
            return
        with self.allow_master_weight_edits():
            for number in written:
                self._copy_param_to_shard(number)
        self.record_param_versions()

    def _copy_param_to_shard(self, param_index: int) -> None:
        gradient = self.gradient_slots[param_index]
        flat = _flatten_to_bucket_order(gradient, gradient.param.detach()) if self.full is None else None
        if (param_slice := self._slice_of.get(param_index)) is None:
            return
        if flat is not None:
            self.local[param_slice.shard_range] = flat[param_slice.param_range]
        if self.has_masters:  # an unchanged weight keeps its more precise master weight
            value = param_slice.value.detach()
            written = self.local[param_slice.shard_range].view_as(value).to(value.device)
            value.copy_(torch.where(value.to(self.dtype) == written, value, written.to(self.wide_dtype)))

    def record_param_versions(self) -> None:
        """Record the version counters of the parameters, to detect later changes outside the optimizer."""
        self._versions = [gradient.param._version for gradient in self.gradient_slots]

    def _allocate_zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=self.dtype, device=self.device)

    def _get_local_param_range(self, param_index: int) -> slice:
        place, begin = self.places[param_index], self.axis.rank * self.length
        low, high = max(place.start, begin), min(place.stop, begin + self.length)
        return slice(low - place.start, high - place.start) if low < high else slice(0, 0)

    def _add_param(self, param_index: int, grad_slot: GradientSlot) -> ParamSlice | None:
        """Copy a parameter into the shard, and return the slice that this rank updates, or None.

        A parameter without elements gets a slice on every rank, as in a single process. Communicates one all-reduce if
        several ranks store slices of the parameter.
        """
        flat = _flatten_to_bucket_order(grad_slot, grad_slot.param.detach())
        place, here = self.places[param_index], self._get_local_param_range(param_index)
        if self.full is not None:
            self.full[place] = flat
            grad_slot.param.data = grad_slot.view_in_bucket(self.full[place])
        if here.start == here.stop and grad_slot.numel:
            return None
        begin = place.start - self.axis.rank * self.length
        at = slice(begin + here.start, begin + here.stop) if grad_slot.numel else slice(0, 0)
        if self.full is None:
            self.local[at] = flat[here]
        if self.host is not None:
            value = self.host.values[at].copy_(flat[here])
        else:
            value = flat[here].to(self.wide_dtype, copy=True) if self.has_masters else self.local[at]
        value = value.view(grad_slot.shape) if grad_slot.is_full else value
        return ParamSlice(grad_slot, param_index, here, at, nn.Parameter(value, grad_slot.param.requires_grad))

    def shard_param_optimizer_state(self, param_index: int, param_state: dict[str, Any]) -> dict[str, Any]:
        """Slice the optimizer state of an unsharded parameter for this rank."""
        gradient, here = self.gradient_slots[param_index], self._get_local_param_range(param_index)

        def shard_tensor(name: str, x: Tensor) -> Tensor:
            if x.shape == gradient.param.shape and (x.dim() or name != "step"):
                x = _flatten_to_bucket_order(gradient, x.to_dense() if x.is_sparse else x)
                x = x.view(gradient.shape).clone() if gradient.is_full else x[here].clone()
            # a fused optimizer keeps its step count on the device of the parameter
            return x.to("cpu") if self.host is not None else x

        return {
            name: torch_compat.tree_map_only(Tensor, partial(shard_tensor, name), x) for name, x in param_state.items()
        }

    def accumulate_reduced_grads(self, reduced_grads: Tensor, grad_counts: Tensor, loss_scale: float = 1.0) -> None:
        """Add reduced gradients, divided by the loss scale, to the gradients of this shard.

        Args:
            grad_counts: Number of ranks that had a gradient, for each parameter.
        """
        self._counts = (
            grad_counts.clone() if self._counts is None else self._counts + grad_counts
        )  # a view would keep the bucket alive
        if self.host is not None:
            self.host.accumulate_reduced_grads(reduced_grads, loss_scale)
            return
        reduced_grads = (
            reduced_grads.to(self.wide_dtype) if loss_scale == 1 else reduced_grads.to(self.wide_dtype) / loss_scale
        )
        self._sum = reduced_grads if self._sum is None else self._sum.add_(reduced_grads)

    def set_optimizer_grads(self) -> None:
        """Set ``.grad`` of the optimizer's parameters to the reduced gradients, or to None if there is no gradient."""
        total = self.reduced_grads
        for param_slice in self.slices:
            has_one = total is not None and self.has_grad_per_param[param_slice.param_index]
            param_slice.value.grad = (
                total[param_slice.shard_range].view_as(param_slice.value) if has_one and total is not None else None
            )

    # --- gradients as the user sees them between backward and zero_grad

    def set_param_grads(self) -> None:
        """Set ``.grad`` of the model's and the optimizer's parameters to views of the reduced gradients.

        On a GPU, missing gradients become zeros.
        """
        if not has_real_data(self.local) or (total := self.reduced_grads) is None:
            return
        known = (
            self.has_grad_per_param
            if self._counts is None or not self._counts.is_cuda
            else [True] * len(self.gradient_slots)
        )
        for number, gradient in enumerate(self.gradient_slots):
            if not known[number]:
                continue
            view = None
            if (param_slice := self._slice_of.get(number)) is not None:
                view = param_slice.value.grad = total[param_slice.shard_range].view_as(param_slice.value)
            if not gradient.has_changed:
                seen = gradient.param.grad = ShardedGradient(self, number)
                self._shown[number] = seen, view

    def apply_user_grad_edit(self, param_index: int) -> None:
        """Copy the user's changes to ``p.grad`` into the shard, and clear ``.grad`` for the next backward pass.

        Raises:
            ConfigError: ``.grad`` was replaced by a tensor that was not computed from the original ``.grad``.
        """
        gradient, grad = self.gradient_slots[param_index], self.gradient_slots[param_index].param.grad
        is_own = isinstance(grad, ShardedGradient) and grad.is_grad_of(self, param_index)
        result = grad.result if isinstance(grad, ShardedGradient) and is_own else None
        if (shown := self._shown.get(param_index)) is None:
            if gradient.has_changed and grad is None:
                self.discard_grad(param_index)  # including gradients that were accumulated in no_sync
            elif result is not None:
                self._store_user_assigned_grad(param_index, result)
            return
        param_slice = self._slice_of.get(param_index)
        local = param_slice.value.grad if param_slice is not None else None
        if grad is None:
            self.record_grad_edit(param_index, "discarded")
        if grad is None or (param_slice is not None and local is None):
            self.discard_grad(param_index)
            return
        if not is_own:
            raise make_unsupported_assigned_grad_error(gradient.entry.name)
        del self._shown[param_index]
        gradient.param.grad = None
        if result is not None:
            self.record_grad_edit(param_index, "replaced")
            self.get_local_grad(param_index).copy_(result)
        elif local is not None and local is not shown[1]:
            self.get_local_grad(param_index).copy_(local.reshape(-1))

    def _store_user_assigned_grad(self, param_index: int, grad_values: Tensor) -> None:
        """Store a gradient that the user computed and assigned to ``p.grad`` after ``zero_grad``."""
        self.gradient_slots[param_index].param.grad = None
        self.record_grad_edit(param_index, "put back")
        if self.reduced_grads is None:
            self.accumulate_reduced_grads(self._allocate_zeros(self.length), torch.zeros(len(self.gradient_slots)))
        self.has_grad_per_param[param_index] = True
        self.get_local_grad(param_index).copy_(grad_values)

    def discard_grad(self, param_index: int) -> None:
        self._shown.pop(param_index, None)
        if self.has_grad_per_param[param_index]:
            self._had[param_index], self._is_discarded = False, True
            self.get_local_grad(param_index).zero_()
        self.gradient_slots[param_index].param.grad = None
        if (param_slice := self._slice_of.get(param_index)) is not None:
            param_slice.value.grad = None

    def record_grad_edit(self, param_index: int, edit_description: str) -> None:
        """Record that the user changed ``p.grad``, to check later that all ranks made the same change."""
        entry = self.gradient_slots[param_index].entry
        self.edits = (self.edits + crc32(f"{edit_description} {entry.name}".encode())) % EDITS
        if entry.reduction.stages:  # each stage has another name for the parameter
            self.shared_edits = (self.shared_edits + crc32(f"{edit_description} {param_index}".encode())) % EDITS

    def get_local_grad(self, param_index: int) -> Tensor:
        """Return this rank's slice of the gradient of a parameter, as a flat tensor."""
        if (total := self.reduced_grads) is None:
            name = self.gradient_slots[param_index].entry.name
            raise ConfigError(
                f"The gradient of {name} was accessed after zero_grad had cleared it.",
                remedy="Clone the gradient before you call zero_grad, or read p.grad after the next backward pass.",
            )
        param_slice = self._slice_of.get(param_index)
        return total[param_slice.shard_range] if param_slice is not None else total[:0]

    def has_full_grad(self, param_index: int) -> bool:
        return self.axis.size == 1 and not self.gradient_slots[param_index].is_shared

    def slice_like_local_grad(self, param_index: int, tensor: Tensor) -> Tensor:
        """Slice ``tensor`` to the elements whose gradients this rank stores."""
        gradient = self.gradient_slots[param_index]
        if gradient.is_shared:
            raise ConfigError(
                f"An operation with another tensor cannot be applied to the gradient of {gradient.entry.name}, because "
                "ZeRO shards this gradient.",
                remedy="Use a scalar instead of the tensor, or modify the gradient in a hook (p.register_hook).",
            )
        return tensor.reshape(-1)[self._get_local_param_range(param_index)]

    def zero_grads(self) -> None:
        """Set the gradients of this shard to zero. The optimizer then still updates their parameters."""
        if (total := self.reduced_grads) is not None:
            total.zero_()

    def clear_grads(self) -> None:
        """Discard the gradients of this shard, and set ``.grad`` of its parameters to None."""
        self._sum, self._counts, self._had = None, None, [False] * len(self.gradient_slots)
        self._is_discarded, self.edits, self.shared_edits = False, 0, 0
        if self.host is not None:
            self.host.clear_grads()
        for param_slice in self.slices:
            param_slice.value.grad = None
        for gradient in self.gradient_slots:
            gradient.param.grad = None
        self._shown = {}

    # --- values

    def copy_master_weights_to_params(self) -> None:
        """Start copying the updated master weights into this rank's shard of the parameters."""
        if self.host is not None and self._link is not None:
            self.local.copy_(self.host.values)
        elif self.host is not None:
            self._going_up = self.host.start_copy_to_device(self.local)
        elif self.rounded is not None:
            self.rounded.round_to_bf16()
        elif self.has_masters:
            for param_slice in self.slices:
                self.local[param_slice.shard_range] = param_slice.value.detach().reshape(-1)

    def move_master_weights_to_device(self) -> None:
        """Move offloaded master weights to the device permanently. Must be called between two optimizer steps."""
        assert self.host is not None
        self.host.load()
        self.host.wait_for_copies()
        self.host, self.has_masters = None, self.wide_dtype != self.dtype or self.is_offloaded
        for param_slice in self.slices:
            if self.has_masters:
                param_slice.value.data = param_slice.value.detach().to(self.device)
            else:
                param_slice.value.data = self.local[param_slice.shard_range].view_as(param_slice.value)

    @contextmanager
    def allow_master_weight_edits(self) -> Iterator[None]:
        """Allow changes to the master weights inside this context, and save them on exit. Use it between two steps."""
        self.master_weight_store.load()
        self.master_weight_store.wait_for_copies()
        try:
            yield
        finally:
            self.master_weight_store.write_back()

    def start_param_all_gather(self) -> PendingCollective:
        """Start an all-gather of the full parameters in the bucket, in the dtype of the model."""
        if self._going_up is not None:
            self._going_up.wait()
            self._going_up = None
        self.prefetch_params_to_device()
        if self._fetched is not None:
            (full_buffer, copy), self._fetched = self._fetched, None
            copy.wait()
            local = self._get_local_shard(full_buffer)
        else:
            full_buffer, local = self._allocate_full_param_buffer() if self.full is None else self.full, self.local
        if self._slices is not None:
            return self._slices.start_param_broadcast(local, full_buffer, self.places)
        return start_all_gather_into_tensor(full_buffer, local, self.axis, "parameters")

    def prefetch_params_to_device(self) -> None:
        """Start copying this rank's shard of the parameters to the device if it is offloaded to the host."""
        if self._link is not None and self._fetched is None:
            full_buffer = self._allocate_full_param_buffer()
            self._fetched = full_buffer, self._link.start_copy_to_device(self._get_local_shard(full_buffer), self.local)

    def release_prefetched_params(self) -> None:
        """Free the copy of the parameters on the device that ``prefetch_params_to_device`` created."""
        if self._fetched is not None:
            self._fetched[1].synchronize()
            self._fetched = None

    def _allocate_full_param_buffer(self) -> Tensor:
        numel = self.length * self.axis.size
        if self.gathered is not None:
            return self.gathered.allocate_buffer(numel, self.dtype, self.device)
        return self.local.new_empty(numel)

    def _get_local_shard(self, full_buffer: Tensor) -> Tensor:
        return full_buffer[self.axis.rank * self.length : (self.axis.rank + 1) * self.length]

    def all_gather_grad(self, param_index: int) -> Tensor | None:
        """All-gather the full gradient of a parameter. Communicates one all-gather of the whole bucket."""
        local = (
            self.reduced_grads if self.reduced_grads is not None else torch.zeros(self.length, dtype=self.wide_dtype)
        )
        full = start_all_gather(local.to(self.device), self.axis, 0, purpose="gradients").wait()
        return (
            self.gradient_slots[param_index].view_in_bucket(full[self.places[param_index]])
            if self.has_grad_per_param[param_index]
            else None
        )

    def copy_gathered_values_to_params(self, gathered_values: Tensor) -> None:
        """Copy this rank's slices of the all-gathered parameters into the model's sharded parameters."""
        for gradient, place in zip(self.gradient_slots, self.places, strict=True):
            if gradient.is_shared:
                gradient.param.detach().copy_(gradient.view_in_bucket(gathered_values[place]))
        self.record_param_versions()


def make_unsupported_assigned_grad_error(param_name: str) -> ConfigError:
    return ConfigError(
        f"A new tensor was assigned to the .grad of {param_name}, which ZeRO does not support.",
        remedy="Modify p.grad in place, as in p.grad.mul_(0.5), or in a hook (p.register_hook).",
    )


def _flatten_to_bucket_order(grad_slot: GradientSlot, tensor: Tensor) -> Tensor:
    """Flatten a parameter or its optimizer state into the element order of the gradient bucket.

    Communicates one all-reduce if several ranks store slices of the parameter.
    """
    if not grad_slot.is_shared:
        return tensor.reshape(-1)
    spec = grad_slot.entry.spec
    full = torch.zeros(spec.shape, dtype=torch.promote_types(tensor.dtype, torch.float32), device=tensor.device)
    spec.copy_shard_into_full(tensor.to(full.dtype), full, grad_slot.coords)
    copies = grad_slot.copies
    full = full / (copies.to(full) if isinstance(copies, Tensor) else copies)
    return all_reduce(full, grad_slot.axis, purpose="setup").reshape(-1)
