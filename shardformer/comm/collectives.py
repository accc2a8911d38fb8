"""Collectives over one mesh axis. Nothing is communicated if the axis has size 1.

This module selects the algorithm. If the transport has point-to-point exchanges (gloo), the ranks send each other
chunks and add them in rank order, so the results are bitwise identical on all ranks. Large all-reduces use gloo's own.

These pairs support autograd. The backward pass of each function is the forward pass of the other:

    copy_to_tp_region            forward identity         backward all-reduce
    reduce_from_tp_region        forward all-reduce       backward identity
    gather_from_sp_region        forward all-gather       backward reduce-scatter
    reduce_scatter_to_sp_region  forward reduce-scatter   backward all-gather
    scatter_to_parallel_region            forward local slices     backward all-gather
    gather_from_parallel_region           forward all-gather       backward local slices

The first pair is Megatron's f and g (Shoeybi et al. 2019, section 3), the second is its counterpart under sequence
parallelism (Korthikanti et al. 2022, section 4.2.2). The third pair is for computation that all ranks repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardformer.comm.recorder import get_num_bytes, record_collective_start, skip_wait_recording
from shardformer.errors import ConfigError
from shardformer.layout.shard_spec import ShardSpec, Split, get_even_split_bounds
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.transport import Work
from shardformer.torch_compat import has_real_data, view_as_bytes, without_fake_tensors

EXCHANGE_BELOW_BYTES = 512 * 1024
"""Below this size, two processes all-reduce in one exchange, which is faster than gloo's two rounds (measured)."""
CHECKSUM_BYTES = 4096
"""Size in bytes of the blocks that a checksum sums separately."""


class PendingCollective:
    """Asynchronous collective. Call ``wait()`` to get its result."""

    def __init__(
        self,
        works: Sequence[Work],
        finish_fn: Callable[[], Tensor],
        record_wait: Callable[[], None] = skip_wait_recording,
    ) -> None:
        self._works, self._finish, self._record_wait = works, finish_fn, record_wait

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        self._record_wait()
        return self._finish()

    def then(self, callback: Callable[[Tensor], Tensor]) -> PendingCollective:
        """Return a pending collective that applies ``callback`` to the result."""
        return PendingCollective(self._works, lambda: callback(self._finish()), self._record_wait)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def start_all_reduce(tensor: Tensor, axis: Axis, *, op: str = "sum", purpose: str = "block") -> PendingCollective:
    """Start an asynchronous all-reduce with the operation "sum" or "max". ``tensor`` may be overwritten.

    Communicates one all-reduce of ``tensor``.
    """
    if axis.size == 1:
        return PendingCollective((), lambda: tensor)
    record_wait = record_collective_start("all_reduce", axis, get_num_bytes(tensor), purpose)
    tensor = tensor.contiguous()
    is_small = axis.size == 2 and op == "sum" and get_num_bytes(tensor) < EXCHANGE_BELOW_BYTES
    if is_small and axis.transport.is_direct_exchange_faster(tensor):
        other = torch.empty_like(tensor)
        works = axis.transport.exchange({1 - axis.rank: tensor}, {1 - axis.rank: other})
        return PendingCollective(works, lambda: other.add_(tensor), record_wait)
    return PendingCollective([axis.transport.all_reduce(tensor, op)], lambda: tensor, record_wait)


def start_inplace_all_reduce(tensor: Tensor, axis: Axis, purpose: str) -> PendingCollective:
    """Start an asynchronous in-place all-reduce (sum). ``tensor`` must be contiguous."""
    record_wait = record_collective_start("all_reduce", axis, get_num_bytes(tensor), purpose)
    return PendingCollective([axis.transport.all_reduce(tensor, "sum")], lambda: tensor, record_wait)


def all_reduce(tensor: Tensor, axis: Axis, *, op: str = "sum", purpose: str = "block") -> Tensor:
    """All-reduce ``tensor`` over the axis with the operation "sum" or "max". ``tensor`` may be overwritten."""
    if torch.compiler.is_compiling() and axis.size > 1:
        reduced: Tensor = torch.ops.shardformer.all_reduce(tensor, axis.key, op, purpose)
        return reduced
    return start_all_reduce(tensor, axis, op=op, purpose=purpose).wait()


def start_all_gather(
    tensor: Tensor,
    axis: Axis,
    dim: int,
    full_length: int | None = None,
    *,
    purpose: str = "block",
    lengths_by_rank: Sequence[int] | None = None,
) -> PendingCollective:
    """Start an asynchronous all-gather that concatenates the tensors of all ranks along ``dim``.

    Communicates one all-gather of the concatenated tensor.

    Args:
        full_length: length of the result along ``dim``, split over the ranks as evenly as possible. By default, the
            shards of all ranks have the length of ``tensor``.
        lengths_by_rank: length of each rank's shard, if the split is not as even as possible.
    """
    if axis.size == 1:
        return PendingCollective((), lambda: tensor)
    tensor = tensor.contiguous()
    dim = dim % tensor.dim()
    if lengths_by_rank is None:
        bounds = get_even_split_bounds(tensor.shape[dim] * axis.size if full_length is None else full_length, axis.size)
        lengths_by_rank = [b - a for a, b in pairwise(bounds)]
    full_bytes = get_num_bytes(tensor) // max(tensor.shape[dim], 1) * sum(lengths_by_rank)
    record_wait = record_collective_start("all_gather", axis, full_bytes, purpose)
    if axis.transport.is_direct_exchange_faster(tensor):
        parts = [
            tensor if r == axis.rank else tensor.new_empty(_get_shape_with_dim_size(tensor, dim, n))
            for r, n in enumerate(lengths_by_rank)
        ]
        return PendingCollective(
            _start_exchange_with_peers([tensor] * axis.size, parts, axis), lambda: torch.cat(parts, dim), record_wait
        )
    widest = max(lengths_by_rank)
    padded = _zero_pad_dim(tensor, dim, widest)
    gathered = tensor.new_empty((axis.size * padded.shape[0], *padded.shape[1:]))
    work = axis.transport.all_gather(gathered, padded)

    def trim_and_concat() -> Tensor:
        return torch.cat(
            [p.narrow(dim, 0, n) for p, n in zip(gathered.chunk(axis.size), lengths_by_rank, strict=True)], dim
        )

    return PendingCollective([work], trim_and_concat, record_wait)


def start_all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, axis: Axis, purpose: str
) -> PendingCollective:
    """Start an asynchronous all-gather of one-dimensional tensors into ``output_tensor``.

    ``input_tensor`` may be this rank's view of ``output_tensor``, which avoids a copy. Communicates one all-gather of
    ``output_tensor``.
    """
    own = output_tensor.view(axis.size, -1)[axis.rank]
    if own.data_ptr() != input_tensor.data_ptr() or not has_real_data(input_tensor):
        own.copy_(input_tensor)
    if axis.size == 1:
        return PendingCollective((), lambda: output_tensor)
    record_wait = record_collective_start("all_gather", axis, get_num_bytes(output_tensor), purpose)
    if not axis.transport.is_direct_exchange_faster(input_tensor):
        return PendingCollective([axis.transport.all_gather(output_tensor, own)], lambda: output_tensor, record_wait)
    works = _start_exchange_with_peers([input_tensor] * axis.size, output_tensor.view(axis.size, -1), axis)
    return PendingCollective(works, lambda: output_tensor, record_wait)


def _start_exchange_with_peers(
    send_tensors: Sequence[Tensor], recv_buffers: Sequence[Tensor] | Tensor, axis: Axis
) -> Sequence[Work]:
    peers = [r for r in range(axis.size) if r != axis.rank]
    return axis.transport.exchange({r: send_tensors[r] for r in peers}, {r: recv_buffers[r] for r in peers})


def all_gather(
    tensor: Tensor,
    axis: Axis,
    dim: int,
    full_length: int | None = None,
    *,
    purpose: str = "block",
    lengths_by_rank: Sequence[int] | None = None,
) -> Tensor:
    """All-gather ``tensor`` over the axis, concatenated along ``dim``. See ``start_all_gather``."""
    if torch.compiler.is_compiling() and axis.size > 1:
        gathered: Tensor = torch.ops.shardformer.all_gather(
            tensor, axis.key, dim, full_length, lengths_by_rank, purpose
        )
        return gathered
    return start_all_gather(tensor, axis, dim, full_length, purpose=purpose, lengths_by_rank=lengths_by_rank).wait()


def start_reduce_scatter(tensor: Tensor, axis: Axis, dim: int, *, purpose: str = "block") -> PendingCollective:
    """Start an asynchronous reduce-scatter (sum), which splits the sum nearly evenly along ``dim``.

    Communicates one reduce-scatter of ``tensor``.
    """
    if axis.size == 1:
        return PendingCollective((), lambda: tensor)
    record_wait = record_collective_start("reduce_scatter", axis, get_num_bytes(tensor), purpose)
    dim = dim % tensor.dim()
    bounds = get_even_split_bounds(tensor.shape[dim], axis.size)
    parts = [tensor.narrow(dim, bounds[r], bounds[r + 1] - bounds[r]) for r in range(axis.size)]
    parts[axis.rank] = own = parts[axis.rank].contiguous()
    if axis.transport.is_direct_exchange_faster(tensor):
        summands = [own if r == axis.rank else torch.empty_like(own) for r in range(axis.size)]
        works = _start_exchange_with_peers([part.contiguous() for part in parts], summands, axis)
        return PendingCollective(works, lambda: _sum_in_rank_order(summands), record_wait)
    widest = max(p.shape[dim] for p in parts)
    stacked = torch.cat([_zero_pad_dim(p, dim, widest) for p in parts])
    out = tensor.new_empty((stacked.shape[0] // axis.size, *stacked.shape[1:]))
    work = axis.transport.reduce_scatter(out, stacked)
    return PendingCollective([work], lambda: out.narrow(dim, 0, own.shape[dim]).contiguous(), record_wait)


def start_all_to_all(
    input_tensors: Sequence[Tensor], recv_sizes: Sequence[int], axis: Axis, purpose: str
) -> PendingCollective:
    """Start an asynchronous all-to-all: rank r receives ``input_tensors[r]`` and concatenates what it receives.

    All tensors have one dimension. Communicates one all-to-all, which is recorded as if all ranks sent as many bytes.

    Args:
        recv_sizes: number of elements that this rank receives from each rank.
    """
    own = input_tensors[axis.rank]
    if axis.size == 1:
        return PendingCollective((), lambda: own)
    sent = sum(get_num_bytes(part) for r, part in enumerate(input_tensors) if r != axis.rank)
    record_wait = record_collective_start("all_to_all", axis, sent * axis.size // (axis.size - 1), purpose)
    received = [own if r == axis.rank else own.new_empty(recv_sizes[r]) for r in range(axis.size)]
    works = _start_exchange_with_peers([part.contiguous() for part in input_tensors], received, axis)
    return PendingCollective(works, lambda: torch.cat(received), record_wait)


def reduce_scatter(tensor: Tensor, axis: Axis, dim: int, *, purpose: str = "block") -> Tensor:
    """Reduce-scatter (sum) ``tensor`` over the axis. Returns this rank's shard of the sum along ``dim``."""
    if torch.compiler.is_compiling() and axis.size > 1:
        scattered: Tensor = torch.ops.shardformer.reduce_scatter(tensor, axis.key, dim, purpose)
        return scattered
    return start_reduce_scatter(tensor, axis, dim, purpose=purpose).wait()


_LIBRARY = torch.library.Library("shardformer", "DEF")
"""Collectives as torch operators, which torch.compile can trace. A graph refers to an axis by ``Axis.key``."""
for _schema in (
    "all_reduce(Tensor x, str axis, str op, str purpose) -> Tensor",
    "all_gather(Tensor x, str axis, int dim, SymInt? full, SymInt[]? lengths, str purpose) -> Tensor",
    "reduce_scatter(Tensor x, str axis, int dim, str purpose) -> Tensor",
):  # they call Python, which a CUDA graph (mode="reduce-overhead") would not repeat
    _LIBRARY.define(_schema, tags=torch.Tag.cudagraph_unsafe)


def _all_reduce_impl(x: Tensor, axis: str, op: str, purpose: str) -> Tensor:
    copied = x.clone(memory_format=torch.contiguous_format)  # an operator must not write to its input
    return start_all_reduce(copied, Axis.get_by_key(axis), op=op, purpose=purpose).wait()


def _all_reduce_fake(x: Tensor, axis: str, op: str, purpose: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _all_gather_impl(
    x: Tensor, axis: str, dim: int, full: int | None, lengths: Sequence[int] | None, purpose: str
) -> Tensor:
    return start_all_gather(x, Axis.get_by_key(axis), dim, full, purpose=purpose, lengths_by_rank=lengths).wait()


def _all_gather_fake(
    x: Tensor, axis: str, dim: int, full: int | None, lengths: Sequence[int] | None, purpose: str
) -> Tensor:
    if lengths is not None:
        full = sum(lengths)
    elif full is None:
        full = x.shape[dim] * Axis.get_by_key(axis).size
    return x.new_empty(_get_shape_with_dim_size(x, dim % x.dim(), full))


def _reduce_scatter_impl(x: Tensor, axis: str, dim: int, purpose: str) -> Tensor:
    return start_reduce_scatter(x, Axis.get_by_key(axis), dim, purpose=purpose).wait()


def _reduce_scatter_fake(x: Tensor, axis: str, dim: int, purpose: str) -> Tensor:
    of = Axis.get_by_key(axis)
    length = (
        x.shape[dim] + of.size - 1 - of.rank
    ) // of.size  # that of ``get_even_split_bounds``, for symbolic lengths
    return x.new_empty(_get_shape_with_dim_size(x, dim % x.dim(), length))


for _name, _run, _shape in (
    ("all_reduce", _all_reduce_impl, _all_reduce_fake),
    ("all_gather", _all_gather_impl, _all_gather_fake),
    ("reduce_scatter", _reduce_scatter_impl, _reduce_scatter_fake),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardformer::{_name}", _shape, lib=_LIBRARY)


def get_local_chunk(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's chunk of a replicated tensor that is split evenly along ``dim``. No communication."""
    if axis.size == 1:
        return tensor
    bounds = get_even_split_bounds(tensor.shape[dim], axis.size)
    return tensor.narrow(dim, bounds[axis.rank], bounds[axis.rank + 1] - bounds[axis.rank]).contiguous()


def broadcast_object(local_object: Any, axis: Axis, src: int = 0) -> Any:
    """Broadcast a picklable object from rank ``src`` to all ranks of the axis."""
    return local_object if axis.size == 1 else axis.transport.broadcast_object(local_object, src)


def all_gather_objects(local_object: Any, axis: Axis) -> list[Any]:
    """All-gather one picklable object per rank, in rank order."""
    return [local_object] if axis.size == 1 else axis.transport.all_gather_objects(local_object)


@without_fake_tensors()
def all_gather_ints(local_ints: Sequence[int], axis: Axis) -> list[list[int]]:
    """All-gather 64-bit integers. All ranks must pass the same number of integers."""
    return [list(local_ints)] if axis.size == 1 else axis.transport.all_gather_ints(local_ints)


def broadcast(tensor: Tensor, axis: Axis, src: int = 0) -> Tensor:
    """Broadcast ``tensor`` from rank ``src`` to all ranks of the axis, in place."""
    if axis.size > 1:
        axis.transport.broadcast(tensor, src)
    return tensor


def compute_numel_and_hash(tensor: Tensor) -> tuple[int, int]:
    """Compute the number of elements and a hash of the bits, which is 0 for a meta or fake tensor."""
    return tensor.numel(), int(compute_tensor_hash(tensor)) if has_real_data(tensor) else 0


def compute_tensor_hash(tensor: Tensor) -> Tensor:
    """Compute a hash of a tensor's bits on its device, without a GPU synchronization."""
    flat = view_as_bytes(tensor)
    if flat.storage_offset() % 4:  # unaligned for the int32 view
        flat = flat.clone()
    full_blocks = flat.numel() // CHECKSUM_BYTES * CHECKSUM_BYTES
    blocks, tail = flat[:full_blocks].view(torch.int32).view(-1, CHECKSUM_BYTES // 4), flat[full_blocks:]
    tail_sum = (tail * torch.arange(1, tail.numel() + 1, device=tensor.device)).sum()
    sums = torch.cat([blocks.sum(1), tail_sum[None]])
    return (sums * torch.arange(1, len(sums) + 1, device=tensor.device)).sum()


def _sum_in_rank_order(tensors_by_rank: Sequence[Tensor]) -> Tensor:
    """Sum the tensors of all ranks in rank order. Three or more 16-bit tensors are summed in fp32."""
    if tensors_by_rank[0].element_size() >= 4 or len(tensors_by_rank) == 2:
        total = tensors_by_rank[0] + tensors_by_rank[1]
        for part in tensors_by_rank[2:]:
            total += part
        return total
    return torch.stack(list(tensors_by_rank)).sum(0, dtype=torch.float32).to(tensors_by_rank[0].dtype)


def _get_shape_with_dim_size(tensor: Tensor, dim: int, new_size: int) -> list[int]:
    return [new_size if d == dim else n for d, n in enumerate(tensor.shape)]


def _zero_pad_dim(tensor: Tensor, dim: int, padded_size: int) -> Tensor:
    if tensor.shape[dim] == padded_size:
        return tensor.contiguous()
    return torch.cat(
        [tensor, tensor.new_zeros(_get_shape_with_dim_size(tensor, dim, padded_size - tensor.shape[dim]))], dim
    )


def gather_full_tensor(local_shard: Tensor, shard_spec: ShardSpec, get_axis_by_name: Callable[[str], Axis]) -> Tensor:
    """All-gather the shards of a tensor into the full tensor. Unsharded tensors are copied.

    Communicates one all-gather per sharded axis, innermost first.

    Args:
        get_axis_by_name: function that returns the axis with a given name.
    """
    return gather_full_tensors([local_shard], [shard_spec], get_axis_by_name)[0]


def gather_full_tensors(
    local_shards: Sequence[Tensor], shard_specs: Sequence[ShardSpec], get_axis: Callable[[str], Axis]
) -> list[Tensor]:
    """All-gather the shards of several tensors into full tensors on every rank.

    Communicates one all-gather per sharded axis for all tensors with the same axes and dtype.
    """
    full, by_layout = dict[int, Tensor](), dict[object, list[int]]()
    for i, (local, spec) in enumerate(zip(local_shards, shard_specs, strict=True)):
        if spec.is_sharded:
            by_layout.setdefault((tuple(spec.axes.items()), local.dtype), []).append(i)
        else:
            full[i] = local.detach().clone()
    for group in by_layout.values():
        joined = _gather_same_layout_shards([local_shards[i] for i in group], [shard_specs[i] for i in group], get_axis)
        full.update(zip(group, joined, strict=True))
    return [full[i] for i in range(len(local_shards))]


def _gather_same_layout_shards(
    local_shards: Sequence[Tensor], shard_specs: Sequence[ShardSpec], get_axis: Callable[[str], Axis]
) -> list[Tensor]:
    places, axes = shard_specs[0].get_all_rank_coords(), shard_specs[0].axes
    flat = torch.cat([local.detach().reshape(-1) for local in local_shards])
    numels = [[prod(spec.get_local_shape(c)) for spec in shard_specs] for c in places]
    sizes = {tuple(c.items()): sum(of_place) for c, of_place in zip(places, numels, strict=True)}
    names = list(axes)
    for at in range(len(names) - 1, -1, -1):
        own = {name: get_axis(name).rank for name in names[:at]}
        line = [tuple({**own, names[at]: rank}.items()) for rank in range(axes[names[at]])]
        flat = all_gather(
            flat, get_axis(names[at]), 0, lengths_by_rank=[sizes[place] for place in line], purpose="gather"
        )
        merged: dict[tuple[tuple[str, int], ...], int] = {}
        for place, size in sizes.items():  # sizes after this gather
            merged[place[:at]] = merged.get(place[:at], 0) + size
        sizes = merged
    flat_shards = iter(flat.split([size for of_place in numels for size in of_place]))
    shards = [[next(flat_shards).view(spec.get_local_shape(c)) for spec in shard_specs] for c in places]
    return [
        spec.assemble_full_tensor(of_tensor)
        for spec, of_tensor in zip(shard_specs, zip(*shards, strict=True), strict=True)
    ]


SHARD_OF = "_shardformer_shard_of"
"""Name of the parameter attribute that contains a shard's name and the axes over which the parameter is sharded."""


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a ``backward`` method raise an error for ``create_graph=True``."""

    @wraps(backward)
    def backward_once(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise ConfigError(
                "Tensor parallelism does not support backward(create_graph=True).",
                remedy="Remove create_graph=True, or compute second derivatives on the unsharded model.",
            )
        return backward(ctx, *grads)

    return backward_once


class CopyToTpRegion(Function):
    """Autograd function: identity in the forward pass, all-reduce of the gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(), ctx.axis), None


class _ReduceFromTpRegion(Function):
    leaves_block = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x.clone(), axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFromSpRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, full_length: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(x, axis, dim, full_length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return reduce_scatter(grad, ctx.axis, ctx.dim), None, None, None


class _ReduceScatterToSpRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.full = axis, dim, x.shape[dim]
        return reduce_scatter(x, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.axis, ctx.dim, ctx.full), None, None


class _ScatterToParallelRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, split: Split) -> Tensor:
        ctx.axis, ctx.dim, ctx.split = axis, dim, split
        return get_local_slices(x, axis, dim, split)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_gather_slices(grad, ctx.axis, ctx.dim, ctx.split, "block"), None, None, None


class _GatherFromParallelRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, split: Split, purpose: str) -> Tensor:
        ctx.axis, ctx.dim, ctx.split = axis, dim, split
        return _all_gather_slices(x, axis, dim, split, purpose)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return get_local_slices(grad, ctx.axis, ctx.dim, ctx.split), None, None, None, None


def get_local_slices(tensor: Tensor, axis: Axis, dim: int, split: Split) -> Tensor:
    """Copy this rank's slices of a replicated tensor. No communication."""
    slices = [tensor.narrow(dim, a, b - a) for a, b in split.parts[axis.rank] or [(0, 0)]]
    return torch.cat(slices, dim) if len(slices) > 1 else slices[0].clone(memory_format=torch.contiguous_format)


def _all_gather_slices(tensor: Tensor, axis: Axis, dim: int, split: Split, purpose: str) -> Tensor:
    gathered = all_gather(tensor, axis, dim, lengths_by_rank=split.get_local_lengths(), purpose=purpose)
    bounds = [slice_ for part in split.parts for slice_ in part]
    if all(a[1] <= b[0] for a, b in pairwise(bounds)):  # rank order equals the order along the dimension
        return gathered
    order = torch.cat([split.indices(rank) for rank in range(axis.size)])
    return gathered.index_select(dim, order.argsort().to(tensor.device))


def copy_to_tp_region(tensor: Tensor, axis: Axis) -> Tensor:
    """Enter a tensor parallel block: identity in the forward pass, all-reduce in the backward pass.

    Raises:
        ConfigError: ``tensor`` is a parameter that is sharded over ``axis``. The sum of the gradients of different
            shards would be wrong, and gloo aborts if their sizes differ.
    """
    if axis.size == 1:
        return tensor
    name, axes = getattr(tensor, SHARD_OF, ("", ())) if isinstance(tensor, nn.Parameter) else ("", ())
    if axis.name in axes:
        raise ConfigError(
            f"copy_to_tp_region requires a replicated parameter, but {name!r} is sharded over the {axis.name} axis.",
            remedy="Use the sharded parameter directly, without copy_to_tp_region.",
        )
    copied: Tensor = CopyToTpRegion.apply(tensor, axis)
    return copied


def reduce_from_tp_region(tensor: Tensor, axis: Axis) -> Tensor:
    """Leave a tensor parallel block: all-reduce the ranks' partial results."""
    return tensor if axis.size == 1 else _ReduceFromTpRegion.apply(tensor, axis)


def gather_from_sp_region(tensor: Tensor, axis: Axis, dim: int, full_length: int) -> Tensor:
    """Enter a tensor parallel block: all-gather the sequence shards of all ranks along ``dim``.

    Dimension ``dim`` of the result has the length ``full_length``. Forward: one all-gather. Backward: one
    reduce-scatter.
    """
    return tensor if axis.size == 1 else _GatherFromSpRegion.apply(tensor, axis, dim, full_length)


def reduce_scatter_to_sp_region(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Leave a tensor parallel block: reduce-scatter the ranks' partial results along ``dim``.

    Forward: one reduce-scatter. Backward: one all-gather.
    """
    return tensor if axis.size == 1 else _ReduceScatterToSpRegion.apply(tensor, axis, dim)


def scatter_to_parallel_region(tensor: Tensor, axis: Axis, dim: int, split: Split) -> Tensor:
    """Return this rank's slices of a replicated tensor. The backward pass all-gathers the gradient."""
    return tensor if axis.size == 1 else _ScatterToParallelRegion.apply(tensor, axis, dim % tensor.dim(), split)


def gather_from_parallel_region(tensor: Tensor, axis: Axis, dim: int, split: Split, purpose: str = "block") -> Tensor:
    """All-gather a tensor that is sharded along ``dim``. The backward pass slices the gradient.

    For computations that every rank does in full. Forward: one all-gather. Backward: no communication.
    """
    return (
        tensor if axis.size == 1 else _GatherFromParallelRegion.apply(tensor, axis, dim % tensor.dim(), split, purpose)
    )
