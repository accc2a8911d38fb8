"""Nestable hooks for the tensors that autograd saves, and counters of their memory.

torch calls only the innermost pair of ``saved_tensors_hooks``. Here, all pairs are called in turn until one accepts the
tensor. If no pair accepts a tensor, it is saved with its version, as autograd does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import unwrap
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardformer import torch_compat
from shardformer.offload.host import AsyncHostDeviceCopy

HookPair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class SavedTensorHooks:
    """Pack and unpack hooks for the tensors that autograd saves, which can be nested.

    The pair is active from ``activate`` to ``deactivate``.

    Args:
        pack_hook: Returns a replacement for a tensor, or None to leave the tensor to other hooks.
        unpack_hook: Returns the original tensor for a replacement.
        run_first: Whether to call this pair before all others. By default the innermost pair is called first.
    """

    def __init__(
        self, pack_hook: Callable[[Tensor], Any], unpack_hook: Callable[[Any], Tensor], *, run_first: bool = False
    ) -> None:
        self._pack, self._unpack, self._goes_first = pack_hook, unpack_hook, run_first
        self._asked: list[SavedTensorHooks] = []
        self._untraced: HookPair | None = None
        self.is_entered = False

    def activate(self) -> None:
        around = _get_hook_pair_owner(torch_compat.get_innermost_saved_tensors_hooks())
        self._asked = sorted([self, *(around._asked if around else [])], key=lambda hooks: not hooks._goes_first)
        self.is_entered = True
        torch_compat.push_saved_tensors_hooks(*self._get_torch_hooks())

    def deactivate(self) -> None:
        """Remove this pair of hooks from the stack of active hooks.

        The pair may not be on top, because an exception may have prevented the removal of an inner pair.
        """
        self.is_entered = False
        above: list[HookPair] = []
        while (top := torch_compat.get_innermost_saved_tensors_hooks()) is not None:
            torch_compat.pop_saved_tensors_hooks()
            if _get_hook_pair_owner(top) is self:
                break
            above.append(top)
        for pair in reversed(above):
            torch_compat.push_saved_tensors_hooks(*pair)

    def _get_torch_hooks(self) -> HookPair:
        """Return the hooks to register in torch, wrapped so that ``torch.compile`` does not trace them."""
        if self._untraced is None and torch_compat.is_dynamo_imported():
            self._untraced = torch.compiler.disable(self.pack), torch.compiler.disable(self.unpack)
        return self._untraced or (self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> tuple[Callable[[Any], Tensor], Any]:
        for hooks in self._asked:
            if hooks.is_entered and (packed := hooks._pack(tensor)) is not None:
                return hooks._unpack, packed
        # a node that saves its own output must not keep a reference to itself
        return _unpack_and_check_version, (tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)

    def unpack(self, packed_tensor: tuple[Callable[[Any], Tensor], Any]) -> Tensor:
        unpack, packed = packed_tensor
        return unpack(packed)


def has_external_saved_tensor_hooks() -> bool:
    """Return whether saved-tensor hooks of other code, such as activation checkpointing, are active."""
    top = torch_compat.get_innermost_saved_tensors_hooks()
    return top is not None and _get_hook_pair_owner(top) is None


def check_not_modified_in_place(tensor: Tensor, saved_version: int, saved_shape: torch.Size | None = None) -> None:
    """Raise the same RuntimeError as autograd if a saved tensor was modified in place."""
    if tensor._version != saved_version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(tensor.shape if saved_shape is None else saved_shape)} is at version "
            f"{tensor._version}; "
            f"expected version {saved_version} instead"
        )


def _unpack_and_check_version(packed: tuple[Tensor, int]) -> Tensor:
    x, version = packed
    check_not_modified_in_place(x, version)
    return x


def _get_hook_pair_owner(hook_pair: HookPair | None) -> SavedTensorHooks | None:
    hooks = None if hook_pair is None else getattr(unwrap(hook_pair[0]), "__self__", None)
    return hooks if isinstance(hooks, SavedTensorHooks) else None


ON_DEVICE, COPYING_TO_HOST, PARTITIONED, FETCHED = "kept", "leaving", "parts", "brought"
"""Kinds of bytes on the device: not moved, being copied to the host, sharded, or fetched for the backward pass."""


def _format_bandwidth(bytes_per_second: float | None) -> str:
    return "not measured" if bytes_per_second is None else f"{bytes_per_second / 1e9:.2f} GB/s"


@dataclass(frozen=True)
class ActivationStats:
    """The memory, in bytes, that saved activations use on the device and on the host.

    Args:
        device: Bytes on the device by kind.
        host: Bytes on the host.
        most: Maximum bytes on the device since the last ``reset_peaks``.
        most_host: Maximum bytes on the host since the last ``reset_peaks``.
        bandwidth: Measured bytes per second of copies in each direction, or None before the first copy.
    """

    device: Mapping[str, int]
    host: int
    most: int
    most_host: int
    bandwidth: Mapping[str, float | None]

    def __str__(self) -> str:
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in self.device.items() if n) or "none"
        rates = "; ".join(f"{way} {_format_bandwidth(value)}" for way, value in self.bandwidth.items())
        return (
            f"Activations on the device: {sum(self.device.values()):,} bytes ({kinds}), at most {self.most:,}. "
            f"On the host: {self.host:,} bytes, at most {self.most_host:,}. Bandwidth {rates}."
        )


class ActivationByteCounter:
    """Counts the bytes that saved activations use on the device and on the host."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.host = 0
        self.most = self.most_host = 0

    @property
    def device_bytes(self) -> int:
        return self.now.total()

    def add_device_bytes(self, memory_kind: str, num_bytes: int) -> None:
        self.now[memory_kind] += num_bytes
        self.most = max(self.most, self.device_bytes)

    def add_host_bytes(self, num_bytes: int) -> None:
        self.host += num_bytes
        self.most_host = max(self.most_host, self.host)

    def reset_peaks(self) -> None:
        self.most, self.most_host = self.device_bytes, self.host


@dataclass(eq=False)
class ForwardRecord:
    """The tensor storages that autograd saved during one forward pass, in the order of saving.

    Args:
        num_fetched: All storages from this index on were fetched or are being fetched.
    """

    saved_storages: list[ReferenceType[SavedTensorStorage]] = field(default_factory=list)
    num_fetched: int = 0


class SavedTensorStorage:
    """The stored bytes of a saved tensor, which can be moved to the host or sharded over ranks.

    Attributes:
        source: The storage. This reference prevents another storage from getting the same address.
        version_tensor: Tensor without memory that shares the version counter of the saved tensor.
        data: The stored bytes on the device, or this rank's shard of them. None while they are on the host.
        base: Offset in the original storage of the first byte that the backward pass receives.
        number: Checksum of the full data if the data are sharded.
        name: Name of the layer whose input is stored.
        host: The stored bytes on the host.
        copy: Copy of ``data`` that is in progress.
        gathered: Full data of a sharded storage, while the backward pass needs them.
        unread_handles: Handles that the backward pass has not read yet.
        is_wanted: Whether the backward pass needs the data although they are being copied to the host.
    """

    def __init__(self, counter: ActivationByteCounter, tensor: Tensor, start_byte: int, end_byte: int) -> None:
        storage = tensor.untyped_storage()
        with torch.no_grad():
            data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
                storage, start_byte, (end_byte - start_byte,), (1,)
            )
            self.version_tensor = tensor.detach()
            self.version_tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.counter, self.source, self.version = counter, StorageWeakRef(storage), tensor._version
        self.size, self.start, self.base, self.name = len(data), start_byte, 0, ""
        self.data: Tensor | None = data
        self.number: Tensor | None = None
        self.host: Tensor | None = None
        self.copy: AsyncHostDeviceCopy | None = None
        self.gathered: Tensor | None = None
        self.unread_handles: set[int] = set()
        self.is_wanted = self.is_leaving = False
        self._counted = {ON_DEVICE: 0, COPYING_TO_HOST: 0, PARTITIONED: 0, FETCHED: 0}
        self.add_device_bytes(ON_DEVICE, self.size)

    def add_device_bytes(self, memory_kind: str, num_bytes: int) -> None:
        """Add ``num_bytes`` to the device memory that is counted as ``memory_kind``."""
        self._counted[memory_kind] += num_bytes
        self.counter.add_device_bytes(memory_kind, num_bytes)

    def set_memory_kind(self, memory_kind: str) -> None:
        """Count this storage's device bytes as another kind, for example as being copied to the host."""
        size = 0 if self.data is None else len(self.data)
        for was in (ON_DEVICE, COPYING_TO_HOST, PARTITIONED):
            self.add_device_bytes(was, -self._counted[was])
        self.add_device_bytes(memory_kind, size)

    def keep_bytes_counted_after_deletion(self, memory_kind: str, num_bytes: int) -> None:
        """Keep ``num_bytes`` bytes in the memory count of the model even after this storage is deleted."""
        self._counted[memory_kind] -= num_bytes

    @property
    def is_sharded(self) -> bool:
        return self.number is not None

    @property
    def is_on_host(self) -> bool:
        """Whether the stored bytes are only on the host."""
        return self.data is None

    def __del__(self) -> None:
        for kind, size in self._counted.items():
            self.counter.now[kind] -= size
        if self.host is not None:
            self.counter.host -= len(self.host)


class SavedTensorHandle:
    """A handle that autograd saves in place of a tensor, to restore the tensor later.

    Attributes:
        place: index in the forward record.
    """

    __slots__ = ("dtype", "graph", "offset", "place", "shape", "stored", "stride")

    def __init__(self, saved_storage: SavedTensorStorage, forward_record: ForwardRecord, tensor: Tensor) -> None:
        self.stored, self.graph, self.place = saved_storage, forward_record, len(forward_record.saved_storages)
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.offset = tensor.storage_offset() * tensor.element_size()
        forward_record.saved_storages.append(ReferenceType(saved_storage))
        saved_storage.unread_handles.add(id(self))

    def restore_tensor(self, storage: Tensor, base_offset: int) -> Tensor:
        """Restore the saved tensor as a view of a copy of its storage from byte ``base_offset`` on."""
        out = torch.empty(0, dtype=self.dtype, device=storage.device)
        offset = (self.offset - base_offset) // out.element_size()
        return out.set_(storage.untyped_storage(), offset, self.shape, self.stride)

    def __del__(self) -> None:
        self.stored.unread_handles.discard(id(self))


def get_byte_range_in_storage(tensor: Tensor) -> tuple[int, int]:
    """Compute the range of bytes (start, end) that a tensor uses in its storage."""
    start = int(tensor.storage_offset())
    last = start + sum((int(n) - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.element_size(), (last + 1) * tensor.element_size()


def is_non_overlapping_and_dense(tensor: Tensor) -> bool:
    """Return whether a tensor uses a contiguous range of its storage without gaps or repeated elements."""
    start, end = get_byte_range_in_storage(tensor)
    return end - start == tensor.nbytes and 0 not in tensor.stride()
