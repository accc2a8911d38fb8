"""Parameter groups of ZeRO-3, whose full parameters are gathered only while they are used.

A parameter group contains the parameters of a layer, or of modules between layers. Each rank stores its shard of a
group. The full parameters are gathered when one of them is read, and freed when the next group is used. The
``nn.Parameter`` objects and their hooks remain. Between uses, their values are NaN and their class is
``UngatheredParameter``.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 5.3.

Buffers of one size are reused for parameters and gradients, as in Fang et al., "PatrickStar: Parallel Training of
Pre-trained Models via Chunk-based Dynamic Memory Management" (2022).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collectives import PendingCollective
from shardformer.errors import ConfigError
from shardformer.gradients.buckets import GradientBucket, GradientSlot, ReduceScatterToShards
from shardformer.gradients.reducer import PausableGradientReducer
from shardformer.layout.sharding_metadata import ParamEntry
from shardformer.torch_compat import (
    DisableTorchFunctionSubclass,
    get_storage_id,
    get_storage_use_count,
    has_real_data,
    tree_leaves,
)
from shardformer.zero.flat_shards import FlatParamShard

GROUP_ATTRIBUTE = "_shardformer_unit"
"""Name of the parameter attribute that contains its Stage3ParamGroup."""


class UngatheredParameter(nn.Parameter):
    """Sharded parameter whose full values are on this rank only after its parameter group is gathered.

    An operation that reads the values gathers the group. Outside a forward or backward pass, it raises an error. Shape,
    dtype, device, hooks and ``.grad`` are available without a gather.
    """

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func in _get_tensor_conversion_methods()
            and isinstance(args[0], UngatheredParameter)
            and _preserves_device_and_dtype(func, *args, **kwargs)
        ):
            return args[0]
        if func == torch.Tensor.data.__set__ and args[0] is args[1]:  # type: ignore[attr-defined]
            return None
        if func not in _get_functions_that_need_no_gather():
            params = [x for x in tree_leaves((args, kwargs)) if isinstance(x, nn.Parameter)]
            units = {unit.index: unit for x in params if (unit := x.__dict__.get(GROUP_ATTRIBUTE)) is not None}
            absent = next(x.__dict__[GROUP_ATTRIBUTE] for x in params if isinstance(x, UngatheredParameter))
            absent.on_read(list(units.values()))
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        return f"Parameter of shape {tuple(self.shape)}, not gathered"


def _preserves_device_and_dtype(conversion_fn: Callable[..., Tensor], param: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return whether a conversion, such as ``param.to(device)``, keeps the parameter's device and dtype."""
    args = tuple(torch.device("cpu") if isinstance(x, torch.device) and x.type == "cpu" else x for x in args)
    with DisableTorchFunctionSubclass():
        probe = torch.empty(0, dtype=param.dtype, device=param.device)
        return conversion_fn(probe, *args, **kwargs) is probe


def gather_groups_of_params(params: Iterable[nn.Parameter]) -> None:
    """Gather all parameters that an operation, such as a compiled layer, is about to read."""
    absent = [param.__dict__[GROUP_ATTRIBUTE] for param in params if isinstance(param, UngatheredParameter)]
    if absent:
        absent[0].on_read(list({unit.index: unit for unit in absent}.values()))


@cache
def _get_functions_that_need_no_gather() -> frozenset[Any]:
    """Return the torch functions that can be called on a parameter without gathering its values."""
    getters = (
        "shape dtype device requires_grad grad is_leaf layout ndim grad_fn is_cuda is_cpu is_meta is_sparse "
        "is_quantized is_nested itemsize nbytes _version names output_nr retains_grad _backward_hooks "
        "_post_accumulate_grad_hooks"
    )
    methods = (
        "size dim ndimension numel nelement is_floating_point is_complex element_size get_device register_hook "
        "register_post_accumulate_grad_hook requires_grad_ __len__ __hash__ is_inference is_shared"
    )
    functions = "numel is_floating_point is_complex is_inference result_type _has_compatible_shallow_copy_type"
    found = [getattr(torch.Tensor, name).__get__ for name in getters.split() if hasattr(torch.Tensor, name)]
    found += [getattr(torch.Tensor, name).__set__ for name in ("requires_grad", "grad", "_backward_hooks")]
    found += [getattr(torch.Tensor, name) for name in methods.split()]
    return frozenset([*found, *(getattr(torch, name) for name in functions.split())])


@cache
def _get_tensor_conversion_methods() -> frozenset[Any]:
    """Return the tensor methods, such as ``to``, that return the same tensor if device and dtype match."""
    names = "to cpu cuda float double half bfloat16"
    return frozenset(getattr(torch.Tensor, name) for name in names.split())


@cache
def get_ungathered_param_class(param_class: Any) -> Any:
    """Return the subclass of ``param_class`` for parameters that are not gathered."""
    if issubclass(param_class, UngatheredParameter):
        return param_class
    if param_class is nn.Parameter:
        return UngatheredParameter
    return type(f"Ungathered{param_class.__name__}", (UngatheredParameter, param_class), {})


def get_gathered_param_class(param_class: Any) -> Any:
    if not issubclass(param_class, UngatheredParameter):
        return param_class
    return nn.Parameter if param_class is UngatheredParameter else param_class.__bases__[1]


SMALL_GROUP_NUMEL = 2**15
"""Modules outside layers that have fewer elements share a group."""
LARGE = 0.25
"""A layer with more than this fraction of the model's parameters is split if it contains layers."""

_without_inference_mode = torch.inference_mode(False)
"""Disables inference mode, because tensors created in it could not be used in later training steps."""


class Stage3ParamGroup:
    """A group of parameters that ZeRO stage 3 gathers and frees together, such as one layer.

    Args:
        group_index: Index among the groups of the model, in the order of module registration.
        module_name: Name of the group's first module.

    Attributes:
        on_read: Called before an ungathered parameter is read, with the groups of all arguments of the operation.
        size: Size of the gathered parameters in bytes.
        where: Maps the address of gathered memory to the group and the index of the base tensor.
        return_buffer: Called with the address of memory that is no longer used.
    """

    on_read: Callable[[Sequence[Stage3ParamGroup]], None]

    def __init__(self, group_index: int, module_name: str, params: Sequence[nn.Parameter]) -> None:
        self.index, self.name, self.params = group_index, module_name, list(params)
        self.is_layer = module_name.rpartition(".")[2].isdecimal()
        self.shards: list[FlatParamShard] = []
        self.bases: list[Tensor] = []  # gathered tensors. The parameters are views of them
        self.where: dict[int, tuple[Stage3ParamGroup, int]] = {}
        self.is_gathered = False
        self.size = 0  # in bytes, identical on all ranks
        self.return_buffer: Callable[[int], None] = lambda address: None
        self._pending: list[PendingCollective] = []
        self._versions: list[int] = []

    @_without_inference_mode
    def prefetch_shards_to_device(self) -> None:
        """Start copying offloaded shards of the parameters to the device, so that ``start_unshard`` can gather them."""
        if not self.is_gathered and not self._pending:
            for shard in self.shards:
                shard.prefetch_params_to_device()

    @_without_inference_mode
    def start_unshard(self) -> None:
        """Start an all-gather of the full parameters. Communicates one all-gather for each shard."""
        if not self.is_gathered and not self._pending:
            self._pending = [shard.start_param_all_gather() for shard in self.shards]

    @_without_inference_mode
    def wait_for_unshard(self) -> None:
        if self.is_gathered:
            return
        self.start_unshard()
        for shard, pending in zip(self.shards, self._pending, strict=True):
            full = pending.wait()
            self._register_base_tensor(full)
            for gradient, place in zip(shard.gradient_slots, shard.places, strict=True):
                param: Any = gradient.param
                param.__class__ = get_gathered_param_class(type(param))
                param.data = gradient.view_in_bucket(full[place])
                if gradient.is_shared:
                    self._register_base_tensor(param.data)
        self._pending, self.is_gathered = [], True
        self._versions = [param._version for param in self.params]

    def _register_base_tensor(self, base_tensor: Tensor) -> None:
        self.where[get_storage_id(base_tensor)] = self, len(self.bases)
        self.bases.append(base_tensor)

    def reshard(self) -> None:
        """Free the full parameters, so that this rank stores only its shards of them."""
        for pending in self._pending:
            pending.wait()  # the all-gather was started on all ranks but not used
        self._pending = []
        for shard in self.shards:
            shard.release_prefetched_params()
        if not self.is_gathered:
            return
        self.is_gathered = False
        before, self._versions = self._versions, [param._version for param in self.params]
        if before != self._versions:
            raise ConfigError(
                f"A parameter of {self.name} was modified in place, which ZeRO stage 3 does not support.",
                remedy="Modify parameters only in the optimizer step, or use stage=2.",
            )
        memories = [get_storage_id(values) for values in self.bases]
        for memory in memories:
            del self.where[memory]
        self.bases = []
        self.replace_params_with_placeholders()
        for memory in memories:
            self.return_buffer(memory)

    @_without_inference_mode
    def replace_params_with_placeholders(self) -> None:
        """Replace the values of each parameter by a NaN placeholder of the same shape."""
        for shard in self.shards:
            for gradient in shard.gradient_slots:
                param: Any = gradient.param
                param.data = torch.full((), torch.nan, dtype=shard.dtype, device=param.device).expand(param.shape)
                param.__dict__[GROUP_ATTRIBUTE] = self
                kind: Any = type(param)
                param.__class__ = get_ungathered_param_class(kind)


def group_params_by_layer(model: nn.Module) -> list[tuple[str, list[nn.Parameter]]]:
    """Divide the parameters of a model into named groups that ZeRO stage 3 gathers together.

    Each layer is a group. Outside layers, each large module is a group, and consecutive small modules share one.
    Layers are the elements of ModuleList and Sequential. The order is that of module registration, which is identical
    on all ranks. A shared parameter is in the first group that contains it.
    """
    total = sum(p.numel() for p in model.parameters())
    layers = dict(_iter_named_layers(model, "", total))
    seen: set[int] = set()
    units: list[tuple[str, list[nn.Parameter]]] = []
    is_open = False  # whether the last group can take more small modules
    inside: str | None = None
    for path, module in model.named_modules():
        if inside is not None and f"{path}.".startswith(inside):
            continue
        inside = f"{path}." if path in layers else None
        recurse = inside is not None
        params = [p for p in module.parameters(recurse) if id(p) not in seen]
        seen |= {id(p) for p in params}
        if not params and not recurse:
            continue
        numel = sum(p.numel() for p in params)
        if is_open and not recurse and numel + sum(p.numel() for p in units[-1][1]) < SMALL_GROUP_NUMEL:
            units[-1][1].extend(params)
        elif params:
            units.append((path or type(module).__name__, params))
            is_open = not recurse and numel < SMALL_GROUP_NUMEL
        else:
            is_open = False
    return units


def _iter_named_layers(module: nn.Module, module_path: str, model_numel: int) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        at = f"{module_path}.{name}".lstrip(".")
        if not isinstance(child, (nn.ModuleList, nn.Sequential)) or len(child) < 2:
            yield from _iter_named_layers(child, at, model_numel)
            continue
        for number, element in child.named_children():
            size = sum(p.numel() for p in element.parameters())
            inner = (
                list(_iter_named_layers(element, f"{at}.{number}", model_numel)) if size > LARGE * model_numel else []
            )
            if inner:
                yield from inner
            elif size:
                yield f"{at}.{number}", element


MAX_FREE_BUFFERS = 3
MIN_FILL = 0.5
"""Minimum fraction of a buffer that a request must use to get it."""
UNSHARED_USE_COUNT = 2
"""Reference count of a storage that is used nowhere else: one from the buffer, one from the query."""


class GatherBufferPool:
    """A pool of reusable buffers for gathered parameter groups and their gradients.

    Requests that nearly fill a buffer reuse one. Other requests allocate new memory. A buffer that is still
    referenced elsewhere is not reused.
    """

    def __init__(self) -> None:
        self._size = 0
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}

    def choose_buffer_size(self, needed_buffer_bytes: Sequence[int]) -> None:
        """Set the buffer size to the group size that accounts for the most memory over all groups."""
        counts = Counter(needed_buffer_bytes)
        self._size = max(counts, key=lambda size: (counts[size] * size, size), default=0)

    def acquire_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        size = numel * dtype.itemsize
        if not 0 < MIN_FILL * self._size <= size <= self._size or not has_real_data(torch.empty(0)):
            return torch.empty(numel, dtype=dtype, device=device)
        found = next((chunk for chunk in self._free if chunk.device == device), None)
        if found is None:
            found = torch.empty(self._size, dtype=torch.uint8, device=device)
        else:
            self._free = [chunk for chunk in self._free if chunk is not found]
        self._lent[get_storage_id(found)] = found
        return found[:size].view(dtype)

    def return_buffer(self, storage_address: int) -> None:
        """Return the buffer at a memory address (see ``get_storage_id``) to the pool."""
        chunk = self._lent.pop(storage_address, None)
        if (
            chunk is not None
            and len(self._free) < MAX_FREE_BUFFERS
            and get_storage_use_count(chunk) <= UNSHARED_USE_COUNT
        ):
            self._free.append(chunk)


class UnshardedGroupCache(list[Stage3ParamGroup]):
    """A cache of parameter groups that stay gathered between the forward pass and the backward pass.

    The backward pass starts with the last layer, so the least recently used group is evicted first.

    Attributes:
        max_bytes: Memory limit in bytes.
    """

    max_bytes: float = 0.0

    def add_and_evict(self, param_group: Stage3ParamGroup) -> list[Stage3ParamGroup]:
        """Add a group to the cache, and return the groups that no longer fit, in the same order on all ranks."""
        if param_group in self:
            self.remove(param_group)
        self.append(param_group)
        evicted = []
        while sum(each.size for each in self) > self.max_bytes:
            evicted.append(self.pop(0))
        return evicted


class ParamGroupGradReducer(PausableGradientReducer):
    """Reduces the gradients of ZeRO-3 parameter groups, one group at a time.

    Args:
        buckets_by_group: The buckets of each group, by the index of the group.
        on_grad_arrival: Called when a parameter of a group has received a gradient.
        param_entries: All parameters of the model. Parameters that are frozen now must stay frozen.
        overlap: Whether the reduction overlaps with computation.
        buffer_pool: Pool for the buffers of the buckets.
    """

    def __init__(
        self,
        param_groups: Sequence[Stage3ParamGroup],
        buckets_by_group: Mapping[int, Sequence[GradientBucket]],
        reduce_scatter: ReduceScatterToShards,
        on_grad_arrival: Callable[[Stage3ParamGroup], None],
        param_entries: Sequence[ParamEntry],
        *,
        overlap: bool = True,
        buffer_pool: GatherBufferPool | None = None,
    ) -> None:
        self._units, self._buckets, self._end, self._arrived = (
            param_groups,
            buckets_by_group,
            reduce_scatter,
            on_grad_arrival,
        )
        self._overlaps, self._memory = overlap, buffer_pool
        self._frozen = [entry for entry in param_entries if not entry.param.requires_grad]
        self._under_way: list[GradientBucket] = []
        self.sent: set[int] = set()
        self.is_sealed = False  # whether a group that was sent may receive no further gradients
        for gradient in self._iterate_gradient_slots():
            self._register_grad_hooks(gradient)

    def _iterate_gradient_slots(self) -> Iterator[GradientSlot]:
        return (gradient for found in self._buckets.values() for bucket in found for gradient in bucket.gradients)

    def _grad_hook(self, grad_slot: GradientSlot, grad: Tensor) -> None:
        self._end.get_grad_scale(grad_slot)

    def _post_accumulate_grad_hook(self, grad_slot: GradientSlot) -> None:
        unit: Stage3ParamGroup = grad_slot.param.__dict__[GROUP_ATTRIBUTE]
        grad_slot.has_changed = grad_slot.has_arrived = True
        if grad_slot.is_sparse:
            grad_slot.param.grad = grad_slot.param.grad.to_dense()  # type: ignore[union-attr]  # it is sparse
        if self.is_sealed and unit.index in self.sent:
            raise ConfigError(
                "ZeRO stage 3 requires gradients in the same order in every step, but the gradient of "
                f"{grad_slot.entry.name} was computed later than in the first step.",
                remedy="Use stage=2, or use the layers in the same order in every step.",
            )
        self._arrived(unit)

    def has_received_all_unreduced_grads(self, param_group: Stage3ParamGroup) -> bool:
        """Return whether this rank has computed all gradients of a group and has not reduced them yet."""
        found = self._buckets.get(param_group.index, ())
        return (
            bool(found)
            and param_group.index not in self.sent
            and all(g.has_arrived for b in found for g in b.gradients)
        )

    def has_unreduced_grads(self, param_group: Stage3ParamGroup) -> bool:
        return any(
            gradient.has_unreduced_grad
            for bucket in self._buckets.get(param_group.index, ())
            for gradient in bucket.gradients
        )

    def start_grad_reduction(self, param_group: Stage3ParamGroup) -> None:
        """Start reducing the gradients of a parameter group over ranks.

        All ranks must call this method for the same groups in the same order. Communicates one reduce-scatter for each
        bucket.
        """
        self.wait_for_reduction()
        self.sent.add(param_group.index)
        self._under_way = list(self._buckets.get(param_group.index, ()))
        for bucket in self._under_way:
            self._end.start_reduction(bucket)
            for gradient in bucket.gradients:
                gradient.has_changed = False
        if not self._overlaps:
            self.wait_for_reduction()

    def wait_for_reduction(self) -> None:
        """Wait for the reduction in progress, and add the reduced gradients to this rank's shards."""
        for bucket in self._under_way:
            self._end.finish_reduction(bucket)
            flat, bucket.flat, bucket.work = bucket.flat, None, None
            if self._memory is not None and flat is not None:
                memory = get_storage_id(flat)
                del flat
                self._memory.return_buffer(memory)
        self._under_way = []

    def on_backward_end(self) -> None:
        """Wait for the last reduction of a backward pass, and reset the state of all gradients."""
        self.wait_for_reduction()
        self.sent = set()
        for gradient in self._iterate_gradient_slots():
            gradient.has_arrived = False
        self._end.on_backward_end()

    def start_reduction(self) -> None:
        """Start reducing the gradients that all groups accumulated inside ``no_sync``."""
        for unit in reversed(self._units):
            self.start_grad_reduction(unit)

    def finish_reduction(self) -> None:
        self.on_backward_end()
        self.was_paused = False

    def prepare_for_backward(self) -> None:
        """Reset the reducer after an interrupted backward pass. Raise ConfigError if a parameter was unfrozen."""
        for found in self._buckets.values():
            for bucket in found:
                bucket.reset_after_backward()
        self.sent, self._under_way = set(), []
        if name := next((entry.name for entry in self._frozen if entry.param.requires_grad), None):
            raise ConfigError(
                f"The parameter {name} was unfrozen after shard_optimizer was called.",
                remedy="Set requires_grad=True before you create the optimizer and call shard_optimizer.",
            )


@dataclass
class SavedParamView:
    """Reference that autograd saves for the backward pass instead of a gathered parameter."""

    forward_pass_index: int
    param_group: Stage3ParamGroup
    param: nn.Parameter | None
    base_index: int
    view_layout: tuple[Any, ...]
    version: int
