"""Store saved activations on the host, or sharded over tensor ranks, until the backward pass needs them.

A saved tensor of ``size`` bytes is sharded over T = 4 ranks in shards of m = ceil(size / T) bytes:

    bytes       0 ........ m ........ 2m ....... 3m ... size
    rank        |    0     |    1     |    2     |  3 + padding

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 6.1:
partitioned activation checkpointing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardformer import torch_compat
from shardformer.comm.collectives import compute_tensor_hash, start_all_gather_into_tensor
from shardformer.errors import ConfigError, InputError, check_choice
from shardformer.forward_hooks import HookOrder, register_forward_hooks
from shardformer.layout.sharding_metadata import METADATA_ATTRIBUTE, ShardingMetadata, get_or_build_metadata
from shardformer.mesh.parallel_context import Axis
from shardformer.offload.host import DEVICE_TO_HOST, HOST_TO_DEVICE, HostDeviceCopier
from shardformer.offload.saved_tensor_hooks import (
    COPYING_TO_HOST,
    FETCHED,
    PARTITIONED,
    ActivationByteCounter,
    ActivationStats,
    ForwardRecord,
    SavedTensorHandle,
    SavedTensorHooks,
    SavedTensorStorage,
    check_not_modified_in_place,
    get_byte_range_in_storage,
    has_external_saved_tensor_hooks,
    is_non_overlapping_and_dense,
)
from shardformer.public_names import deprecate_renamed_function_arguments
from shardformer.tensor_parallel.sequence_parallel import get_first_tensor_arg

PURPOSE = "activations"


def get_partition_num_bytes(full_num_bytes: int, axis: Axis) -> int:
    """Compute the bytes of each rank's shard of a saved tensor, including padding."""
    return -(-full_num_bytes // axis.size)


def get_local_partition_and_checksum(full_tensor: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return a copy of this rank's shard of a saved tensor, and a checksum of the full tensor. Communicates nothing."""
    each = get_partition_num_bytes(len(full_tensor), axis)
    stored = full_tensor[axis.rank * each : (axis.rank + 1) * each]
    shard = stored.clone() if len(stored) == each else torch.cat([stored, full_tensor.new_zeros(each - len(stored))])
    return shard, compute_tensor_hash(full_tensor)


def all_gather_and_verify_partitions(local_partition: Tensor, checksum: Tensor, axis: Axis, tensor_name: str) -> Tensor:
    """All-gather the shards of a saved tensor, and check that all ranks saved the same tensor.

    The result includes the padding of the last shard. Communicates one all-gather of T * ceil(size / T) bytes and, at
    the same time, one of 8 T bytes: the checksum that each rank computed when it stored its shard.

    Raises:
        InputError: The checksums differ. Raised on every rank.
    """
    full, checksums = local_partition.new_empty(axis.size * len(local_partition)), checksum.new_empty(axis.size)
    pending = start_all_gather_into_tensor(checksums, checksum.view(1), axis, PURPOSE)
    start_all_gather_into_tensor(full, local_partition, axis, PURPOSE).wait()
    check_checksums_match_across_ranks(torch_compat.tolist_or_ones(pending.wait()), axis, tensor_name)
    return full


def check_checksums_match_across_ranks(checksums: Sequence[int], axis: Axis, tensor_name: str) -> None:
    if len(set(checksums)) > 1:
        usual = max(set(checksums), key=lambda checksum: (list(checksums).count(checksum), checksum == checksums[0]))
        others = ", ".join(str(rank) for rank, checksum in enumerate(checksums) if checksum != usual)
        raise InputError(
            f"{tensor_name} must be identical on all {axis.size} {axis.name} ranks, but these ranks differ: {others}.",
            remedy='Use the same batch and random seed on all tensor ranks, or offload activations with to="host".',
        )


PREFETCH_COUNT = 2
"""Copies to the host and prefetches for the backward pass are each limited to this many times the size of the largest
storage."""
MAX_POSSIBLE_INPUTS = 8
"""Number of tensors that may be saved before one of them is known to be a layer input: the arguments of a checkpoint.
Tensors of all sizes count, because sizes may differ between ranks."""
PARAMETER_VIEW_NODES = {
    f"{name}Backward0" for name in ("ToCopy", "T", "Transpose", "Permute", "View", "Unsqueeze", "Expand")
}

StorageKey = tuple[int, int]
"""(address of a storage, version of its values)."""


class ActivationStore:
    """Keeps a model's saved activations on the host or sharded over ranks until the backward pass.

    Created by ``offload_activations``.

    Args:
        offload_to_host: Whether to move large tensors to the host.
        axis: Axis over which the inputs of layers are sharded, or None.
        min_bytes: Smaller tensors stay on the device.
        copier: Copier between host and device. By default, one is created for the device of the model.
    """

    def __init__(
        self, offload_to_host: bool, axis: Axis | None, min_bytes: int, copier: HostDeviceCopier | None = None
    ) -> None:
        self._to_host, self._min_bytes, self._link = offload_to_host, min_bytes, copier
        self._axis = axis if axis is not None and axis.size > 1 else None
        self.counter = ActivationByteCounter()
        self._hooks = SavedTensorHooks(self._pack_saved_tensor, self._unpack_saved_tensor)
        self.undo: list[Callable[[], Any]] = []
        self._graph, self._forward = ForwardRecord(), 0
        self._fixed: Collection[int] = ()  # storage addresses of parameters and buffers
        self._stored: WeakValueDictionary[tuple[int, int, int, int, int, bool], SavedTensorStorage] = (
            WeakValueDictionary()
        )
        self._inputs: dict[StorageKey, tuple[StorageWeakRef, tuple[int, int], str]] = {}  # layer inputs
        self._possible_inputs: deque[tuple[int, SavedTensorStorage]] = deque()  # (index in the forward record, storage)
        self._copying_to_host: deque[SavedTensorStorage] = deque()
        self._prefetched: WeakKeyDictionary[SavedTensorStorage, int] = WeakKeyDictionary()  # prefetched storages
        self._graphs: WeakSet[ForwardRecord] = WeakSet()  # graphs of the current backward pass
        self._fetched: WeakSet[SavedTensorStorage] = WeakSet()
        self._read: list[tuple[StorageWeakRef, int]] = []  # fetched memory that the backward pass now owns
        self._largest = 0
        self._task = -1

    def __reduce__(self) -> tuple[Any, ...]:  # a copied model gets an empty store
        return type(self), (self._to_host, self._axis, self._min_bytes)

    def stats(self) -> ActivationStats:
        """Return the current and peak memory of the stored activations, on the device and on the host."""
        self._update_byte_counts()
        rates = {
            way: self._link.get_measured_bandwidth(way) if self._link is not None else None
            for way in (DEVICE_TO_HOST, HOST_TO_DEVICE)
        }
        counter = self.counter
        return ActivationStats(dict(counter.now), counter.host, counter.most, counter.most_host, rates)

    def reset(self) -> None:
        """Reset the peak memory statistics to the current values."""
        self._update_byte_counts()
        self.counter.reset_peaks()

    def remove(self) -> None:
        """Stop storing activations in later forward passes. Stored ones remain available to their backward pass."""
        while self.undo:
            self.undo.pop()()
        if self._hooks.is_entered:
            self._hooks.deactivate()

    def __str__(self) -> str:
        return str(self.stats())

    # --- the forward pass

    def forward_pre_hook(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        """Activate the hooks for saved tensors at the start of a forward pass."""
        if self._hooks.is_entered:  # an exception such as KeyboardInterrupt ended the previous forward pass
            self.forward_hook()
        if torch.compiler.is_compiling() or torch_compat.current_graph_task_id() >= 0:  # compiled, or a recomputation
            return
        if has_external_saved_tensor_hooks() or not torch.is_grad_enabled():
            return
        self._graph, self._forward = ForwardRecord(), self._forward + 1
        device = next((x.device for x in model.parameters()), None)
        if self._link is None or device not in (None, self._link.device):
            self._link = HostDeviceCopier(device or torch.device("cpu"))
        with torch_compat.DisableTorchFunctionSubclass():  # do not gather parameters
            tensors = [x for x in (*model.parameters(), *model.buffers()) if _is_plain_tensor(x)]
            self._fixed = {torch_compat.get_storage_id(x) for x in tensors}
        self._hooks.activate()

    def forward_hook(self, *_: Any) -> None:
        """Remove the hooks for saved tensors at the end of a forward pass."""
        if not self._hooks.is_entered:
            return
        self._hooks.deactivate()
        self._offload_non_layer_inputs(0)
        self._inputs.clear()
        self._graph.num_fetched = len(self._graph.saved_storages)
        self._update_byte_counts()

    def register_layer_input(self, layer_name: str, layer_input: Any) -> None:
        """Register the input of a layer, so that it is sharded over the tensor ranks instead of replicated."""
        if (
            not self._hooks.is_entered
            or not _is_plain_tensor(layer_input)
            or not is_non_overlapping_and_dense(layer_input)
        ):
            return
        key, (start, end) = (
            (torch_compat.get_storage_id(layer_input), layer_input._version),
            get_byte_range_in_storage(layer_input),
        )
        if key in self._inputs:
            return
        self._inputs[key] = StorageWeakRef(layer_input.untyped_storage()), (start, end), layer_name
        for item in list(self._possible_inputs):
            stored = item[1]
            is_of_x = (stored.source.cdata, stored.version) == key
            if is_of_x and start <= stored.start and stored.start + stored.size <= end:
                self._possible_inputs.remove(item)
                self._shard_layer_input(stored, layer_name)

    def _offload_non_layer_inputs(self, num_to_keep: int) -> None:
        """Offload all but the ``num_to_keep`` most recent saved tensors that are not layer inputs."""
        while self._possible_inputs and self._possible_inputs[0][0] + num_to_keep <= len(self._graph.saved_storages):
            self._start_offload(self._possible_inputs.popleft()[1])

    def _pack_saved_tensor(self, tensor: Tensor) -> SavedTensorHandle | None:
        """Store a saved tensor and return a handle to it, or None for parameters and unsupported tensors."""
        if not _is_plain_tensor(tensor) or self._link is None or tensor.device != self._link.device:
            return None
        storage = tensor.untyped_storage()
        memory = torch_compat.storage_id(storage)
        if memory in self._fixed or _is_view_or_cast_of_param(tensor):
            return None
        self._update_byte_counts()
        _, input_range, name = self._inputs.get((memory, tensor._version), (None, (0, 0), ""))
        start, end = get_byte_range_in_storage(tensor)
        is_input = input_range[0] <= start and end <= input_range[1]
        if not is_input and 2 * (end - start) >= storage.nbytes():  # store views of the same memory once
            start, end = 0, storage.nbytes()
        self._offload_non_layer_inputs(MAX_POSSIBLE_INPUTS)
        # Ranks of an axis must shard the same storages, but some also have storages of earlier forward passes.
        forward = 0 if self._axis is None else self._forward
        key = (memory, tensor._version, start, end, forward, is_input)
        stored = self._stored.get(key)
        if stored is None:
            stored = self._stored[key] = SavedTensorStorage(self.counter, tensor, start, end)
            if stored.size >= self._min_bytes:
                if self._axis is None:
                    self._start_offload(stored)
                elif is_input:
                    self._shard_layer_input(stored, name)
                else:
                    self._possible_inputs.append((len(self._graph.saved_storages), stored))
        return SavedTensorHandle(stored, self._graph, tensor)

    def _shard_layer_input(self, saved_storage: SavedTensorStorage, layer_name: str) -> None:
        """Replace a saved layer input with this rank's shard."""
        assert self._axis is not None and saved_storage.data is not None
        with torch.no_grad():
            saved_storage.data, saved_storage.number = get_local_partition_and_checksum(saved_storage.data, self._axis)
        saved_storage.name, saved_storage.base = layer_name, saved_storage.start
        saved_storage.set_memory_kind(PARTITIONED)
        self._start_offload(saved_storage)

    def _start_offload(self, saved_storage: SavedTensorStorage) -> None:
        """Start copying saved data to the host. If too many copies are in progress, wait for an earlier one."""
        if not self._to_host:
            return
        assert saved_storage.data is not None and self._link is not None
        size = len(saved_storage.data)
        self._largest = max(self._largest, size)
        limit = PREFETCH_COUNT * self._largest
        while (
            self._copying_to_host
            and sum(len(p.host) for p in self._copying_to_host if p.host is not None) + size > limit
        ):
            self._finish_offload(self._copying_to_host.popleft())
        saved_storage.host = self._link.allocate_on_host(size, torch.uint8)
        self.counter.add_host_bytes(size)
        saved_storage.copy, saved_storage.is_leaving = (
            self._link.start_copy_to_host(saved_storage.host, saved_storage.data),
            True,
        )
        saved_storage.set_memory_kind(COPYING_TO_HOST)
        self._copying_to_host.append(saved_storage)

    def _finish_offload(self, saved_storage: SavedTensorStorage) -> None:
        """Wait for a copy to the host, and then free the device memory unless the backward pass already needs it."""
        assert saved_storage.copy is not None and saved_storage.data is not None
        saved_storage.copy.synchronize()
        saved_storage.copy, saved_storage.is_leaving = None, False
        if saved_storage.is_wanted:
            saved_storage.add_device_bytes(COPYING_TO_HOST, -len(saved_storage.data))
            self._record_fetched_bytes(saved_storage, len(saved_storage.data))
        else:
            saved_storage.data = None
            saved_storage.set_memory_kind(COPYING_TO_HOST)

    def _update_byte_counts(self) -> None:
        """Update the byte counters after copies to the host have completed or device memory has been freed."""
        while (
            self._copying_to_host
            and self._copying_to_host[0].copy is not None
            and self._copying_to_host[0].copy.is_done()
        ):
            self._finish_offload(self._copying_to_host.popleft())
        if any(source.expired() for source, _ in self._read):
            left = [(source, size) for source, size in self._read if not source.expired()]
            self.counter.add_device_bytes(FETCHED, sum(size for _, size in left) - sum(size for _, size in self._read))
            self._read = left

    # --- the backward pass

    def _unpack_saved_tensor(self, handle: SavedTensorHandle) -> Tensor:
        stored = handle.stored
        check_not_modified_in_place(stored.version_tensor, stored.version, handle.shape)
        self._update_byte_counts()
        self._register_backward_end_callback(handle.graph)
        self._prefetched.pop(stored, None)
        stored.unread_handles.discard(id(handle))
        self._start_fetch_to_device(stored)
        if stored.copy is not None and not stored.is_leaving:
            stored.copy.wait()
            stored.copy = None
        full = self._gather_full_input(stored) if stored.is_sharded else stored.data
        assert full is not None
        out = handle.restore_tensor(full, stored.base)
        if not stored.unread_handles:
            self._release_fetched_memory(stored)
        self._prefetch_to_device(handle.graph, handle.place)
        return out

    def _start_fetch_to_device(self, saved_storage: SavedTensorStorage) -> None:
        if saved_storage.is_leaving:
            saved_storage.is_wanted = True
        if not saved_storage.is_on_host or saved_storage.gathered is not None:
            return
        assert saved_storage.host is not None and self._link is not None
        saved_storage.data = torch.empty(len(saved_storage.host), dtype=torch.uint8, device=self._link.device)
        saved_storage.base, saved_storage.copy = (
            saved_storage.start,
            self._link.start_copy_to_device(saved_storage.data, saved_storage.host),
        )
        self._record_fetched_bytes(saved_storage, len(saved_storage.data))

    def _record_fetched_bytes(self, saved_storage: SavedTensorStorage, num_bytes: int) -> None:
        saved_storage.add_device_bytes(FETCHED, num_bytes)
        self._fetched.add(saved_storage)

    def _gather_full_input(self, saved_storage: SavedTensorStorage) -> Tensor:
        """All-gather a sharded layer input on the first call, and return the full tensor."""
        if saved_storage.gathered is None:
            assert self._axis is not None and saved_storage.data is not None and saved_storage.number is not None
            with torch.no_grad():
                saved_storage.gathered = all_gather_and_verify_partitions(
                    saved_storage.data, saved_storage.number, self._axis, f"The input of layer {saved_storage.name}"
                )
            self._record_fetched_bytes(saved_storage, len(saved_storage.gathered))
        return saved_storage.gathered

    def _release_fetched_memory(self, saved_storage: SavedTensorStorage) -> None:
        """Drop this store's references to fetched memory, so that autograd frees the memory after use."""
        fetched_memory = [saved_storage.gathered]
        saved_storage.gathered, saved_storage.is_wanted = None, False
        if saved_storage.host is not None and saved_storage.data is not None and not saved_storage.is_leaving:
            fetched_memory.append(saved_storage.data)
            saved_storage.data = None
        for x in fetched_memory:
            if x is not None:
                saved_storage.keep_bytes_counted_after_deletion(FETCHED, len(x))
                self._read.append((StorageWeakRef(x.untyped_storage()), len(x)))
        del fetched_memory
        self._fetched.discard(saved_storage)

    def _prefetch_to_device(self, forward_record: ForwardRecord, end_index: int) -> None:
        at = min(forward_record.num_fetched, end_index)
        while at > 0:
            stored = forward_record.saved_storages[at - 1]()
            if (
                stored is not None
                and stored.host is not None
                and stored.unread_handles
                and stored not in self._prefetched
            ):
                if sum(self._prefetched.values()) + len(stored.host) > PREFETCH_COUNT * self._largest:
                    break
                if stored.is_on_host or stored.is_leaving:
                    self._prefetched[stored] = len(stored.host)
                    self._start_fetch_to_device(stored)
            at -= 1
        forward_record.num_fetched = at

    def _register_backward_end_callback(self, forward_record: ForwardRecord) -> None:
        task = torch_compat.current_graph_task_id()
        if task < 0:
            return
        self._graphs.add(forward_record)
        if task != self._task:
            self._task = task
            torch_compat.at_end_of_backward(self._release_memory_after_backward)

    def _release_memory_after_backward(self) -> None:
        """Release fetched memory at the end of a backward pass. A later backward pass can fetch the data again."""
        self._task = -1
        self._prefetched.clear()
        for stored in list(self._fetched):
            self._release_fetched_memory(stored)
        for graph in self._graphs:
            graph.num_fetched = len(graph.saved_storages)
        self._graphs.clear()
        self._update_byte_counts()


def _is_plain_tensor(maybe_tensor: Any) -> bool:
    """Return whether an object is an ordinary strided tensor, not a subclass or a quantized tensor."""
    return (
        type(maybe_tensor) in (Tensor, nn.Parameter)
        and maybe_tensor.layout is torch.strided
        and maybe_tensor.numel() > 0
        and not (
            maybe_tensor.is_meta
            or maybe_tensor.is_quantized
            or maybe_tensor.is_inference()
            or maybe_tensor.is_conj()
            or maybe_tensor.is_neg()
        )
        and not torch_compat.is_functorch_wrapped(maybe_tensor)
    )


def _is_view_or_cast_of_param(tensor: Tensor) -> bool:
    """Return whether a tensor is a view or a cast of a parameter, such as a weight converted by autocast."""
    node: Any = tensor.grad_fn
    while type(node).__name__ in PARAMETER_VIEW_NODES:
        node = node.next_functions[0][0]
    return type(node).__name__ == "AccumulateGrad" and isinstance(node.variable, nn.Parameter)


OFFLOAD_TARGETS = ("device", "host", "tensor", "tensor+host")
STORE = "_shardformer_activations"
"""Name of the model attribute that contains its ActivationStore."""


@deprecate_renamed_function_arguments({"on": "to"})
def offload_activations(model: nn.Module, to: str = "host", *, min_bytes: int = 2**16) -> ActivationStore:
    """Save device memory by moving saved activations to host memory or sharding them over tensor ranks.

    Call this function once before training. Losses and gradients are bitwise unchanged.

    Parameters, views and casts of them, buffers and tensors that are not plain strided tensors are not moved. Inside
    an activation checkpoint, only its inputs are saved. If the model runs inside other hooks for saved tensors
    (``save_on_cpu``, or a checkpoint around the model), those hooks store its activations.

    For ``"tensor"`` the backward pass communicates, for each layer input of S bytes, one all-gather of
    T * ceil(S / T) bytes and one of 8 T bytes with checksums.

    Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020),
    section 6.1: partitioned activation checkpointing, Pa and Pa+cpu.

    Args:
        model: Any module. ``"tensor"`` requires a model that ``shard_model`` returned.
        to: Where saved tensors are stored until the backward pass needs them.
            ``"host"``: In host memory. Copies overlap with computation.
            ``"tensor"``: Each of T tensor ranks keeps 1/T of the input of each layer, and the backward pass gathers
            the shards. With activation checkpointing, nearly all saved tensors are such inputs.
            ``"tensor+host"``: Like ``"tensor"``, but the shards are in host memory.
            ``"device"``: On the device. The store only counts bytes.
        min_bytes: Smaller tensors are not moved.

    Raises:
        ConfigError: The model already has a store. Or ``to`` is ``"tensor"``, but no layer has an input that is
            identical on all tensor ranks: the model is not sharded, or the sequence is sharded between its layers.
    """
    check_choice("to", to, OFFLOAD_TARGETS)
    if STORE in model.__dict__:
        raise ConfigError(
            f"offload_activations was already called for this {type(model).__name__}.",
            remedy="Call remove() on the result of the first call before you call offload_activations again.",
        )
    axis = get_or_build_metadata(model).axes["tensor"] if "tensor" in to else None
    layers = _find_layers_with_replicated_inputs(model, to) if axis is not None else {}
    store = ActivationStore("host" in to, axis, min_bytes)
    _register_activation_store_hooks(model, store, layers)
    for _, state in _find_sharded_models(model):
        stage_forward = getattr(state.stages, "stage_forward", None)
        if stage_forward is not None:
            stage_forward.boundary_callbacks.append(store.forward_hook)
            store.undo.append(partial(stage_forward.boundary_callbacks.remove, store.forward_hook))
    return store


def _find_sharded_models(model: nn.Module) -> list[tuple[nn.Module, ShardingMetadata]]:
    found = [(module, module.__dict__.get(METADATA_ATTRIBUTE)) for module in model.modules()]
    return [(module, state) for module, state in found if isinstance(state, ShardingMetadata)]


def _register_activation_store_hooks(
    model: nn.Module, activation_store: ActivationStore, layers_by_path: dict[str, nn.Module]
) -> None:
    model.__dict__[STORE] = activation_store
    activation_store.undo.append(partial(model.__dict__.pop, STORE, None))
    order = HookOrder.SAVED_TENSORS
    activation_store.undo.append(
        register_forward_hooks(
            model, order, activation_store.forward_pre_hook, activation_store.forward_hook, always_call=True
        )
    )
    for path, layer in layers_by_path.items():
        register = partial(_register_layer_input, activation_store, path)
        activation_store.undo.append(register_forward_hooks(layer, HookOrder.LAYER_INPUT, register, with_kwargs=True))


def _register_layer_input(store: ActivationStore, module_path: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
    store.register_layer_input(module_path, get_first_tensor_arg(args, kwargs))


def _find_layers_with_replicated_inputs(model: nn.Module, offload_target: str) -> dict[str, nn.Module]:
    """Find the layers whose hidden states are replicated over tensor ranks, by module path."""
    layers, sharded_layout = dict[str, nn.Module](), ""
    for module, state in _find_sharded_models(model):
        policy: Any = state.request.policy
        for stack in policy.layer_sequence().stacks:
            layout = stack.get_activation_layout(state.activations)
            if layout.is_stack_sharded:
                sharded_layout = str(layout)
            else:
                layers |= {path: module.get_submodule(path) for path in stack.layer_calls}
    if not layers:
        reason = f"its hidden states are sharded ({sharded_layout})" if sharded_layout else "its layers are unknown"
        raise ConfigError(
            f"Cannot offload activations of this {type(model).__name__} with to={offload_target!r}, because {reason}.",
            remedy='Use to="host", or shard the model with tensor parallelism without sequence parallelism.',
        )
    return layers
