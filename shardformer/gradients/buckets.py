"""Buckets of gradients. A single collective reduces all gradients of a bucket over ranks.

AllReduceToGrad        writes the sum into ``.grad`` on every rank     one all-reduce per bucket
ReduceScatterToShards  gives each rank's optimizer a shard of the sum  one reduce-scatter per bucket

If an optimizer needs full matrices, one rank owns each matrix and receives slices from the other ranks
(``ParamOwnerCommunicator``).
Example: tensor=2, data=2, and a matrix of N elements on rank 3. Each of the other three ranks sends N/2 elements and
receives N/2. A reduce-scatter followed by an all-gather of the full matrix would send N in each direction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardformer.comm import collectives
from shardformer.comm.collectives import PendingCollective, all_gather_objects
from shardformer.errors import ConfigError
from shardformer.layout.shard_spec import Coords
from shardformer.layout.sharding_metadata import ConsistencyMonitorProtocol, ParamEntry
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.torch_compat import tolist_or_ones


class ParamOwnerCommunicator:
    """Sends gradients to the ranks that own the parameters, and sends the updated parameters back.

    Args:
        coords_by_rank: Mesh coordinates of each rank of the axis.
    """

    def __init__(self, grad_slots: Sequence[GradientSlot], coords_by_rank: Sequence[Coords]) -> None:
        self._gradients, self._coords_by_rank = grad_slots, coords_by_rank
        self._axis = grad_slots[0].axis
        self._ranks = range(self._axis.size)

    def start_grad_reduce_to_owners(
        self, shard_numel: int, bucket_ranges: Sequence[slice], grad_flags: Tensor
    ) -> PendingCollective:
        """Start summing the gradients of each parameter on the rank that owns the parameter.

        Communicates each slice of a gradient once, and ``grad_flags`` to all ranks.

        Args:
            shard_numel: Number of elements that each rank owns.
            bucket_ranges: Range of each gradient among the elements of all ranks.
            grad_flags: One number for each gradient. Their sums follow the shard of every owner.
        """
        packed = [self._pack_local_grad_slice(gradient, grad_flags) for gradient in self._gradients]
        outgoing = [
            torch.cat([*(packed[n] for n in self._get_owned_param_indices(r, shard_numel, bucket_ranges)), grad_flags])
            for r in self._ranks
        ]
        owned = self._get_owned_param_indices(self._axis.rank, shard_numel, bucket_ranges)
        arriving = [sum(self._get_slice_numels(r, owned)) + len(grad_flags) for r in self._ranks]

        def add_received_slices(received_buffer: Tensor) -> Tensor:
            shard = grad_flags.new_zeros(shard_numel + len(grad_flags))
            for rank, part in enumerate(received_buffer.split(arriving)):
                for n, local in zip(
                    owned, part[: -len(grad_flags)].split(self._get_slice_numels(rank, owned)), strict=True
                ):
                    begin = bucket_ranges[n].start - self._axis.rank * shard_numel
                    spec = self._gradients[n].entry.spec
                    full = shard[begin : begin + self._gradients[n].numel].view(spec.shape)
                    local = local.view(spec.get_local_shape(self._coords_by_rank[rank]))
                    for box in spec.boxes(self._coords_by_rank[rank]):
                        box.view_in_full(full).add_(box.view_in_local(local))
                shard[shard_numel:] += part[-len(grad_flags) :]
            return shard

        return collectives.start_all_to_all(outgoing, arriving, self._axis, "gradients").then(add_received_slices)

    def start_param_broadcast(
        self, param_shard: Tensor, full_params: Tensor, bucket_ranges: Sequence[slice]
    ) -> PendingCollective:
        """Start sending the other ranks their slices of the parameters that this rank owns.

        Communicates each slice of a parameter once.
        Writes only the elements that this rank stores into ``full_params``.
        """
        shard_numel, here = len(param_shard), self._axis.rank
        owned = self._get_owned_param_indices(here, shard_numel, bucket_ranges)
        outgoing = [
            torch.cat(
                [
                    param_shard[:0],
                    *(self._get_param_slice(param_shard, n, r, shard_numel, bucket_ranges) for n in owned),
                ]
            )
            for r in self._ranks
        ]
        owned_by_rank = [self._get_owned_param_indices(r, shard_numel, bucket_ranges) for r in self._ranks]
        arriving = [sum(self._get_slice_numels(here, numbers)) for numbers in owned_by_rank]

        def copy_received_slices(received_buffer: Tensor) -> Tensor:
            coords = self._coords_by_rank[here]
            for numbers, part in zip(owned_by_rank, received_buffer.split(arriving), strict=True):
                for n, local in zip(numbers, part.split(self._get_slice_numels(here, numbers)), strict=True):
                    spec = self._gradients[n].entry.spec
                    spec.copy_shard_into_full(
                        local.view(spec.get_local_shape(coords)), full_params[bucket_ranges[n]].view(spec.shape), coords
                    )
            return full_params

        return collectives.start_all_to_all(outgoing, arriving, self._axis, "parameters").then(copy_received_slices)

    def _get_owned_param_indices(self, rank: int, shard_numel: int, bucket_ranges: Sequence[slice]) -> list[int]:
        return [n for n, place in enumerate(bucket_ranges) if shard_numel and place.start // shard_numel == rank]

    def _get_slice_numels(self, rank: int, param_indices: Sequence[int]) -> list[int]:
        return [prod(self._gradients[n].entry.spec.get_local_shape(self._coords_by_rank[rank])) for n in param_indices]

    def _pack_local_grad_slice(self, grad_slot: GradientSlot, like: Tensor) -> Tensor:
        grad = grad_slot.param.grad
        if grad is None:
            return like.new_zeros(grad_slot.param.numel())
        return torch.div(grad.reshape(-1), grad_slot.divisor).to(like.dtype)

    def _get_param_slice(
        self, param_shard: Tensor, param_index: int, rank: int, shard_numel: int, bucket_ranges: Sequence[slice]
    ) -> Tensor:
        begin, gradient = bucket_ranges[param_index].start - self._axis.rank * shard_numel, self._gradients[param_index]
        full = param_shard[begin : begin + gradient.numel].view(gradient.entry.spec.shape)
        return gradient.entry.spec.slice_full_tensor(full, self._coords_by_rank[rank]).reshape(-1)


ALIGNMENT_ELEMENTS = 32
"""Alignment of parameters in a bucket: 64 bytes for 16-bit dtypes, the largest alignment that kernels rely on."""


@dataclass(eq=False)
class GradientSlot:
    """The gradient of one parameter on this rank, and its position in a gradient bucket.

    If ranks store overlapping slices of a sharded parameter, such as a shared KV head, the bucket contains the
    gradient in its full shape. The elements of other ranks are zero.

    Args:
        axis: Axis of the ranks whose gradients are summed.
        coords: Mesh coordinates of this rank.
    """

    entry: ParamEntry
    axis: Axis
    coords: Coords
    bucket: GradientBucket | None = None
    shard_coords: Sequence[Coords] = ()  # of each rank of the axis, if one rank gathers the slices of all
    is_full: bool = False  # whether one rank gets the full gradient, for an optimizer that needs full matrices
    has_changed: bool = False  # since the last reduction
    has_arrived: bool = False  # in this backward pass

    def __post_init__(self) -> None:
        self.divisor = self.entry.reduction.divisor
        self._set_num_copies(not self.entry.spec.stores_each_element_once)

    def _set_num_copies(self, is_shared: bool) -> None:
        spec = self.entry.spec
        self.is_shared = is_shared
        summed = [size for name, size in spec.axes.items() if self.is_full or name in self.entry.reduction.sum_over]
        self.copies = spec.count_copies_per_element() * (self.axis.size // (prod(summed) if is_shared else 1))
        """Number of ranks that store each element: a scalar, or a tensor of the full shape."""

    def assign_to_owner_rank(self, axis: Axis | None, coords_by_rank: Sequence[Coords] = ()) -> None:
        """Make one rank receive the full gradient of this parameter, for an optimizer that needs full matrices.

        Args:
            axis: For a sharded parameter, the axis over which the slices of the gradient are gathered.
            coords_by_rank: Mesh coordinates of each rank of the axis.
        """
        self.is_full = True
        if axis is not None:
            self.axis, self.shard_coords = axis, coords_by_rank
            self._set_num_copies(True)

    @property
    def shape(self) -> torch.Size:
        """Shape of the gradient in the bucket."""
        return torch.Size(self.entry.spec.shape) if self.is_shared else self.param.shape

    @property
    def param(self) -> Tensor:
        return self.entry.param

    @property
    def has_unreduced_grad(self) -> bool:
        """Whether this rank has a gradient of the parameter that has not been reduced over ranks yet."""
        return self.has_changed and self.param.grad is not None

    @property
    def is_sparse(self) -> bool:
        """Whether the gradient is a sparse tensor, as for ``nn.Embedding(sparse=True)``."""
        return self.param.grad is not None and self.param.grad.is_sparse

    @property
    def numel(self) -> int:
        """Number of elements of the gradient in the bucket."""
        return self.shape.numel()

    def write_to_bucket(self, bucket_view: Tensor, divisor: Tensor | float) -> None:
        """Divide the gradient by ``divisor`` and write it to ``bucket_view``, or write zeros if it is missing."""
        grad = self.param.grad
        if grad is None:
            bucket_view.zero_()
            return
        grad = grad.to_dense() if grad.is_sparse else grad
        if not self.is_shared:
            torch.div(grad.reshape(-1), divisor, out=bucket_view)
        else:
            full = bucket_view.zero_().view(self.entry.spec.shape)
            self.entry.spec.copy_shard_into_full(grad, full, self.coords)
            full.div_(divisor.to(full) if isinstance(divisor, Tensor) else divisor)

    def view_in_bucket(self, bucket_view: Tensor) -> Tensor:
        """Return this rank's reduced gradient as a view of the bucket."""
        if not self.is_shared:
            return bucket_view.view(self.param.shape)
        return self.entry.spec.slice_full_tensor(bucket_view.view(self.entry.spec.shape), self.coords)

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientSlot:
        memo[id(self)] = copied = GradientSlot(deepcopy(self.entry, memo), self.axis, self.coords)
        copied.divisor = self.divisor
        return copied


@dataclass(eq=False)
class GradientBucket:
    """A bucket of gradients that are reduced together with one collective.

    ``dtype`` is the dtype of the reduction, by default that of the parameters.
    """

    axis: Axis
    dtype: torch.dtype | None = None
    gradients: list[GradientSlot] = field(default_factory=list)
    num_pending: int = 0
    work: Any = None
    flat: Tensor | None = None
    is_sent: bool = False  # in this backward pass
    allocate_fn: Callable[[int, torch.dtype, torch.device], Tensor] | None = None  # allocates the buffer
    watch: ConsistencyMonitorProtocol | None = None  # its numbers are appended to the gradients

    @property
    def is_reduced(self) -> bool:
        return self.work is None or self.work.is_completed()

    @property
    def param_owner_communicator(self) -> ParamOwnerCommunicator | None:
        """Communicator that sends gradients to owner ranks, or None if the bucket uses a reduce-scatter."""
        first = self.gradients[0]
        is_direct = self.axis.size > 1 and self.axis.transport.is_direct_exchange_faster(first.param)
        if not is_direct or not all(gradient.shard_coords for gradient in self.gradients):
            return None
        return ParamOwnerCommunicator(self.gradients, first.shard_coords)

    @property
    def grad_presence_flags(self) -> list[float]:
        """Flag of each parameter: 1 for a new dense gradient on this rank, ``sparse_flag`` if sparse, 0 for none."""
        return [(self.sparse_flag if g.is_sparse else 1.0) if g.has_unreduced_grad else 0.0 for g in self.gradients]

    @property
    def sparse_flag(self) -> float:
        """A negative power of two, whose multiples stay negative if the flags of all dense gradients are added."""
        return -float(2 ** self.axis.size.bit_length())

    def get_extra_values(self) -> list[float]:
        """Return extra numbers that are summed over ranks in the same collective as the gradients.

        These are ``grad_presence_flags``, and the numbers by which the consistency monitor compares ranks.
        """
        if self.watch is None or self.axis.size == 1:
            return self.grad_presence_flags
        return self.grad_presence_flags + self.watch.compute_state_hash_bits(self.axis)

    def check_extra_values(self, summed_values: Tensor) -> Tensor:
        """Check the extra values summed with the gradients, and return how many ranks have each gradient.

        Raises:
            InputError: The consistency monitor detected that the ranks diverged. Raised on every rank.
        """
        count, summed_values = len(self.gradients), summed_values.real if summed_values.is_complex() else summed_values
        if self.watch is not None and len(summed_values) > count:
            self.watch.check_all_reduced_hash_signs(summed_values[count:], self.axis)
        return summed_values[:count]

    def get_numel_and_packed_ranges(self) -> tuple[int, list[slice]]:
        """Compute the size of the bucket and the range of each gradient, without padding between gradients."""
        *begins, end = accumulate((gradient.numel for gradient in self.gradients), initial=0)
        return end, [slice(at, at + gradient.numel) for at, gradient in zip(begins, self.gradients, strict=True)]

    def get_shard_numel_and_ranges(self, num_ranks: int = 1) -> tuple[int, list[slice]]:
        """Compute the number of elements in each rank's shard of the bucket, and the range of each gradient.

        The ranges are relative to the concatenated shards of all ranks.
        Gradients are consecutive. A full gradient is in the shard of one rank. The largest are assigned first, each
        to the rank with the fewest elements. Ranges start at multiples of ``ALIGNMENT_ELEMENTS``. Parameters use the
        same ranges, and kernels that depend on alignment would otherwise round differently on each rank.
        """
        sizes = [gradient.numel for gradient in self.gradients]
        if num_ranks == 1 or not any(gradient.is_full for gradient in self.gradients):
            *begins, end = accumulate(map(_round_up_to_alignment, sizes), initial=0)
            end -= _round_up_to_alignment(sizes[-1]) - sizes[-1]
            each = max(1, -(-end // num_ranks))  # at least one element, because collectives cannot be empty
            return each, [slice(at, at + size) for at, size in zip(begins, sizes, strict=True)]
        used, starts = [0] * num_ranks, [(0, 0)] * len(sizes)
        for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
            rank = min(range(num_ranks), key=lambda rank: used[rank])
            starts[n] = rank, used[rank]
            used[rank] += _round_up_to_alignment(sizes[n])
        each = max(1, *used)
        return each, [slice(r * each + at, r * each + at + n) for (r, at), n in zip(starts, sizes, strict=True)]

    def allocate_buffer(self, numel: int) -> Tensor:
        first = self.gradients[0].param
        dtype = first.dtype if self.dtype is None else torch.promote_types(first.dtype, self.dtype)
        if self.allocate_fn is not None:
            return self.allocate_fn(numel, dtype, first.device)
        return torch.empty(numel, dtype=dtype, device=first.device)

    def start_all_reduce(
        self,
        bucket_numel: int,
        bucket_ranges: Sequence[slice],
        divisors: Sequence[Tensor | float],
        *,
        clear_grads: bool = False,
    ) -> None:
        """Divide the gradients by ``divisors``, and start an all-reduce of the bucket and its extra values."""
        tail = self.get_extra_values()
        self.flat = flat = self.allocate_buffer(bucket_numel + len(tail))
        for gap in _iter_padding_ranges(bucket_ranges, bucket_numel):
            flat[gap] = 0
        flat[bucket_numel:] = torch.tensor(tail, dtype=flat.dtype, device=flat.device)
        for gradient, place, divisor in zip(self.gradients, bucket_ranges, divisors, strict=True):
            gradient.write_to_bucket(flat[place], divisor)
            if clear_grads:
                gradient.param.grad = None
        if self.axis.size > 1:
            self.work = collectives.start_inplace_all_reduce(flat, self.axis, "gradients")

    def reset_after_backward(self) -> None:
        self.flat = self.work = None
        self.is_sent = False
        self.num_pending = len(self.gradients)
        for gradient in self.gradients:
            gradient.has_arrived = False


class AllReduceToGrad:
    """Reduces a bucket with an all-reduce, and writes the summed gradients to ``.grad`` on every rank.

    Communicates one all-reduce of the gradients, with one number for each gradient.

    ``.grad`` may contain an earlier sum s, which is identical on all ranks, plus a new local gradient. Therefore a new
    gradient g is scaled by copies / divisor, and the all-reduce averages over all copies: the result is
    s + sum(g) / divisor. Accumulation is correct whether or not the earlier backward passes were paused.

    A sparse gradient is reduced as a dense one, and then gets the rows that it has on any rank. At the end of the
    backward pass this communicates their indices. If it is dense on another rank, it becomes dense, as in autograd.
    """

    supports_sparse = True  # otherwise a sparse gradient is converted to a dense one

    def __init__(self) -> None:
        self._sparse: list[tuple[GradientSlot, Tensor]] = []  # sparse gradients and their dense sums

    def get_grad_scale(self, grad_slot: GradientSlot) -> Tensor | float:
        """Return the factor by which to multiply a new gradient before autograd accumulates it."""
        copies = grad_slot.copies
        if isinstance(copies, Tensor):
            copies = grad_slot.entry.spec.slice_full_tensor(copies.expand(grad_slot.entry.spec.shape), grad_slot.coords)
        return copies / grad_slot.divisor

    def start_reduction(self, bucket: GradientBucket) -> None:
        bucket.start_all_reduce(
            *bucket.get_numel_and_packed_ranges(), [gradient.copies for gradient in bucket.gradients]
        )

    def finish_reduction(self, bucket: GradientBucket) -> None:
        """Wait for the all-reduce, and write the summed gradients into ``.grad``."""
        flat = bucket.flat
        assert flat is not None
        if bucket.work is not None:
            bucket.work.wait()
        total, places = bucket.get_numel_and_packed_ranges()
        counts = bucket.check_extra_values(flat[total:])
        # counts are not needed if this rank has all gradients, and reading them would synchronize with the GPU
        had = None if all(n > 0 for n in bucket.grad_presence_flags) else tolist_or_ones(counts)
        for i, (gradient, place) in enumerate(zip(bucket.gradients, places, strict=True)):
            if had is None or had[i]:
                value = gradient.view_in_bucket(flat[place])
                if had is not None and had[i] < 0 and not had[i] % -bucket.sparse_flag > 0:  # all sparse; -inf in fp16
                    self._sparse.append((gradient, value))
                elif gradient.param.grad is None or gradient.param.grad.is_sparse:
                    gradient.param.grad = value.clone()
                else:
                    gradient.param.grad.copy_(value)

    def on_backward_end(self) -> None:
        """Convert the summed gradients back to sparse tensors, which contain the rows of all ranks.

        This method runs at the end of the backward pass, where all ranks can communicate.
        """
        sparse, self._sparse = self._sparse, []
        for gradient, value in sparse:
            grad = gradient.param.grad
            local = grad.coalesce().indices() if grad is not None and grad.is_sparse else None
            found = collectives.all_gather_objects(local, gradient.axis)
            indices = torch.cat([rows.to(value.device) for rows in found if rows is not None], 1).unique(dim=1)
            checks = torch.sparse.check_sparse_tensor_invariants
            with checks(checks.is_enabled()):  # type: ignore[no-untyped-call]  # torch 2.11 warns if this is not set
                gradient.param.grad = torch.sparse_coo_tensor(
                    indices, value[tuple(indices)], value.shape, is_coalesced=True
                )


class ReduceScatterToShards:
    """Reduces a bucket with a reduce-scatter, after which each rank has one shard of the summed gradients.

    ``.grad`` is set to None. All shards have the same size, and the last shard is padded with zeros.
    Communicates one reduce-scatter of the gradients, with one number for each gradient appended to every shard. See
    ``ParamOwnerCommunicator`` for slices of owner ranks.

    Args:
        receive_fn: Called with (bucket, this rank's shard, number of ranks that have each gradient).
        on_grad_arrived: Called with each new gradient before accumulation.
        on_grad_taken: Called before ``.grad`` is read for a reduction, to remove a view of an earlier result.
        on_backward_end: Called at the end of a backward pass.
    """

    supports_sparse = False

    def __init__(
        self,
        receive_fn: Callable[[GradientBucket, Tensor, Tensor], None],
        on_grad_arrived: Callable[[GradientSlot], None] = lambda _: None,
        on_grad_taken: Callable[[GradientSlot], None] = lambda _: None,
        on_backward_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._receive, self._arrives, self._takes, self.on_backward_end = (
            receive_fn,
            on_grad_arrived,
            on_grad_taken,
            on_backward_end,
        )

    def get_grad_scale(self, grad_slot: GradientSlot) -> Tensor | float:
        self._arrives(grad_slot)
        self._takes(grad_slot)
        return 1.0

    def start_reduction(self, bucket: GradientBucket) -> None:
        for gradient in bucket.gradients:
            self._takes(gradient)
        self._start_collective(bucket)

    def _start_collective(self, bucket: GradientBucket) -> None:
        ranks, tail = bucket.axis.size, bucket.get_extra_values()
        each, places = bucket.get_shard_numel_and_ranges(ranks)
        if (slices := bucket.param_owner_communicator) is not None:
            bucket.work = slices.start_grad_reduce_to_owners(
                each, places, bucket.allocate_buffer(len(tail)).copy_(torch.tensor(tail))
            )
            for gradient in bucket.gradients:
                gradient.param.grad = None
            return
        bucket.flat = bucket.allocate_buffer(ranks * (each + len(tail)))
        rows = bucket.flat.view(ranks, each + len(tail))
        rows[:, each:] = torch.tensor(tail, dtype=rows.dtype, device=rows.device)
        for gap in _iter_padding_ranges(places, ranks * each):
            for rank, at, _ in _split_flat_range_by_row(gap, each):
                rows[rank, at] = 0
        for gradient, place in zip(bucket.gradients, places, strict=True):
            _write_grad_to_bucket_rows(gradient, place, rows[:, :each])
            gradient.param.grad = None
        bucket.work = collectives.start_reduce_scatter(bucket.flat, bucket.axis, 0, purpose="gradients")

    def finish_reduction(self, bucket: GradientBucket) -> None:
        shard, each = bucket.work.wait(), bucket.get_shard_numel_and_ranges(bucket.axis.size)[0]
        self._receive(bucket, shard[:each], bucket.check_extra_values(shard[each:]))


class AllReduceToShards(ReduceScatterToShards):
    """Reduces a bucket with an all-reduce, after which each rank has the summed gradients in one buffer.

    ``.grad`` is set to None. Communicates one all-reduce of the gradients, with one number for each gradient.
    """

    def _start_collective(self, bucket: GradientBucket) -> None:
        divisors = [gradient.divisor for gradient in bucket.gradients]
        bucket.start_all_reduce(*bucket.get_shard_numel_and_ranges(), divisors, clear_grads=True)

    def finish_reduction(self, bucket: GradientBucket) -> None:
        assert bucket.flat is not None
        flat = bucket.flat if bucket.work is None else bucket.work.wait()
        total = bucket.get_shard_numel_and_ranges()[0]
        self._receive(bucket, flat[:total], bucket.check_extra_values(flat[total:]))


BucketReduction = AllReduceToGrad | ReduceScatterToShards


def _round_up_to_alignment(numel: int) -> int:
    return -(-numel // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS


def _iter_padding_ranges(bucket_ranges: Sequence[slice], bucket_numel: int) -> Iterator[slice]:
    """Yield the padding ranges of a bucket, which belong to no gradient."""
    end = 0
    for place in [*sorted(bucket_ranges, key=lambda place: place.start), slice(bucket_numel, bucket_numel)]:
        if place.start > end:
            yield slice(end, place.start)
        end = max(end, place.stop)


def _split_flat_range_by_row(flat_range: slice, row_numel: int) -> Iterator[tuple[int, slice, slice]]:
    """Split a range of a flat tensor at row boundaries, for rows of ``row_numel`` elements.

    Yields (row, range in the row, range in ``flat_range``) for each row that the range overlaps.
    """
    for row in range(flat_range.start // row_numel, -(-flat_range.stop // row_numel)):
        low, high = max(flat_range.start, row * row_numel), min(flat_range.stop, (row + 1) * row_numel)
        in_row = slice(low - row * row_numel, high - row * row_numel)
        yield row, in_row, slice(low - flat_range.start, high - flat_range.start)


def _write_grad_to_bucket_rows(grad_slot: GradientSlot, flat_range: slice, bucket_rows: Tensor) -> None:
    """Divide a gradient by its divisor, and write it into a bucket whose rows are not contiguous in memory."""
    grad, parts = grad_slot.param.grad, list(_split_flat_range_by_row(flat_range, bucket_rows.shape[1]))
    if len(parts) == 1:
        grad_slot.write_to_bucket(bucket_rows[parts[0][:2]], grad_slot.divisor)
        return
    if grad is None or grad_slot.is_shared:
        values = bucket_rows.new_empty(grad_slot.numel)
        grad_slot.write_to_bucket(values, grad_slot.divisor)
    else:
        values = grad.reshape(-1)
    divisor = 1.0 if grad is None or grad_slot.is_shared else grad_slot.divisor
    for row, at, source in parts:
        torch.div(values[source], divisor, out=bucket_rows[row, at])


def assign_gradient_owners(
    grad_slots: Sequence[GradientSlot], full_matrix_param_ids: Collection[int], context: ParallelContext
) -> None:
    """Assign an owner rank to the full gradient of each parameter that an optimizer updates as a matrix.

    All ranks must call this function in the same order. Communicates the names of the required axes and the ranks'
    coordinates, and creates process groups.

    Raises:
        ConfigError: A parameter is sharded over tensor ranks and also shared by several pipeline stages.
    """
    chosen = [gradient for gradient in grad_slots if id(gradient.param) in full_matrix_param_ids]
    axes_of_sharded = {id(g): _get_grad_axis_names(g, context) for g in chosen if g.entry.spec.is_sharded}
    wanted = set(axes_of_sharded.values())
    for axis in context.base_axes:
        wanted = {names for names_of_rank in all_gather_objects(wanted, axis) for names in names_of_rank}
    axes = {names: context.flatten(*names) for names in sorted(wanted)}
    coords_by_rank = {names: all_gather_objects(dict(context.coords), axis) for names, axis in axes.items()}
    for gradient in chosen:
        if gradient.entry.reduction.stages and id(gradient) in axes_of_sharded:
            raise ConfigError(
                f"The optimizer needs the full matrix of {gradient.entry.name}, but tensor parallelism shards this "
                "weight and several pipeline stages share it.",
                remedy="Use an element-wise optimizer such as AdamW for this parameter.",
            )
        names = axes_of_sharded.get(id(gradient))
        if names is None:
            gradient.assign_to_owner_rank(None)
        else:
            gradient.assign_to_owner_rank(axes[names], coords_by_rank[names])


def _get_grad_axis_names(grad_slot: GradientSlot, context: ParallelContext) -> tuple[str, ...]:
    names = {*grad_slot.entry.reduction.sum_over, *grad_slot.entry.spec.axes}
    return tuple(n for n, size in context.grid.sizes.items() if size > 1 and ({n} | context.expand_views([n])) & names)
