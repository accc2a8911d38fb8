"""Hooks for saved tensors that compose, and the memory that saved tensors take, each region once.

torch asks the innermost pair of ``saved_tensors_hooks`` alone. Of the pairs here each is asked, and takes what it
knows; what none of them takes is saved as autograd does by itself, with its version.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import unwrap
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardformer.offload.host import AsyncCopy

HookPair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class SavedTensorHooks:
    """One pair, from ``enter`` to ``leave``.

    Args:
        pack: tensor -> what is saved in its place; None where it is left to others.
        unpack: what was saved -> the tensor.
        goes_first: whether it is asked before the others, because it takes a few tensors that it knows for certain.
            Of the rest the innermost pair is asked first.
    """

    def __init__(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], *, goes_first: bool = False
    ) -> None:
        self._pack, self._unpack, self._goes_first = pack, unpack, goes_first
        self._asked: list[SavedTensorHooks] = []
        self._untraced: HookPair | None = None
        self.is_entered = False

    def enter(self) -> None:
        around = _as_own_hooks(_top())
        self._asked = sorted([self, *(around._asked if around else [])], key=lambda hooks: not hooks._goes_first)
        self.is_entered = True
        torch._C._autograd._push_saved_tensors_default_hooks(*self._pair())

    def leave(self) -> None:
        """Takes this pair away, wherever it stands: what was to leave before it may have been broken off."""
        self.is_entered = False
        above: list[HookPair] = []
        while (top := _top()) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            if _as_own_hooks(top) is self:
                break
            above.append(top)
        for pair in reversed(above):
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)

    def _pair(self) -> HookPair:
        """What torch calls: in a part of a model that is compiled, without being compiled too."""
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None and self._untraced is None:
            self._untraced = dynamo.disable(self.pack), dynamo.disable(self.unpack)
        return self._untraced or (self.pack, self.unpack)

    def pack(self, x: Tensor) -> tuple[Callable[[Any], Tensor], Any]:
        for hooks in self._asked:
            if hooks.is_entered and (packed := hooks._pack(x)) is not None:
                return hooks._unpack, packed
        # what a node saves of its own output must not hold the node
        return _as_it_was, (x if x.grad_fn is None else x.detach(), x._version)

    def unpack(self, saved: tuple[Callable[[Any], Tensor], Any]) -> Tensor:
        unpack, packed = saved
        return unpack(packed)


def has_foreign_hooks() -> bool:
    """Whether hooks that are none of these stand around: a checkpoint of the caller's, ``save_on_cpu``."""
    top = _top()
    return top is not None and _as_own_hooks(top) is None


def check_version(x: Tensor, version: int, shape: torch.Size | None = None) -> None:
    """As autograd does of what it saves by itself. Raises RuntimeError."""
    if x._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(x.shape if shape is None else shape)} is at version {x._version}; "
            f"expected version {version} instead"
        )


def _as_it_was(packed: tuple[Tensor, int]) -> Tensor:
    x, version = packed
    check_version(x, version)
    return x


def _top() -> HookPair | None:
    top: HookPair | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top


def _as_own_hooks(pair: HookPair | None) -> SavedTensorHooks | None:
    hooks = None if pair is None else getattr(unwrap(pair[0]), "__self__", None)
    return hooks if isinstance(hooks, SavedTensorHooks) else None


ON_DEVICE, COPYING_TO_HOST, PARTITIONED, FETCHED = "kept", "leaving", "parts", "brought"
"""Kinds of bytes on the device: that stay there; whose copy to the host is under way; this rank's parts of what all
tensor ranks hold; brought back for the backward, until the memory is given back."""


def _rate(value: float | None) -> str:
    return "not measured" if value is None else f"{value / 1e9:.2f} GB/s"


@dataclass(frozen=True)
class ActivationStats:
    """How many bytes of activations are where.

    Args:
        device: kind -> bytes on the device now.
        host: bytes on the host now.
        most: bytes on the device at most since the last ``reset``, together and on the host.
        bandwidth: bytes a second that copies were measured with, by their way; None before the first one.
    """

    device: Mapping[str, int]
    host: int
    most: int
    most_host: int
    bandwidth: Mapping[str, float | None]

    def __str__(self) -> str:
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in self.device.items() if n) or "none"
        rates = "; ".join(f"{way} {_rate(value)}" for way, value in self.bandwidth.items())
        return (
            f"Activations on the device: {sum(self.device.values()):,} bytes ({kinds}), at most {self.most:,}. "
            f"On the host: {self.host:,}, at most {self.most_host:,}. Copies {rates}."
        )


class ActivationCounter:
    """Counts the bytes by kind."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.host = 0
        self.most = self.most_host = 0

    @property
    def device(self) -> int:
        return self.now.total()

    def add(self, kind: str, size: int) -> None:
        self.now[kind] += size
        self.most = max(self.most, self.device)

    def add_host(self, size: int) -> None:
        self.host += size
        self.most_host = max(self.most_host, self.host)

    def reset(self) -> None:
        self.most, self.most_host = self.device, self.host


@dataclass(eq=False)
class ForwardRecord:
    """What one forward saved, in order.

    Args:
        fetched: from which place on all has been brought, or begun to be.
    """

    order: list[ReferenceType[StoredStorage]] = field(default_factory=list)
    fetched: int = 0


class StoredStorage:
    """Bytes from ``start`` on of one storage, as they were when they were saved.

    Args:
        data: these bytes on the device.
        source: the storage, which may go: as long as this is held, no other has its address.
        witness: has the version counter of the saved tensor, and no memory.

    Attributes:
        data: what is stored, while it is on the device: the bytes, or where it is cut this rank's part of them.
        base: which byte of the saved tensor's storage is the first in the memory that the backward is given.
        number: where it is cut, that of all bytes.
        name: of the layer that it enters.
        host: what is stored, on the host.
        copy: of ``data``, under way.
        joined: where it is cut, all bytes, while the backward needs them.
        waits: the handles that the backward has not asked for.
        is_wanted: whether the backward is about to ask for it, though it is just on its way to the host.
    """

    def __init__(
        self, account: ActivationCounter, data: Tensor, source: StorageWeakRef, witness: Tensor, start: int
    ) -> None:
        self.account, self.source, self.witness, self.version = account, source, witness, witness._version
        self.size, self.start, self.base, self.name = len(data), start, 0, ""
        self.data: Tensor | None = data
        self.number: Tensor | None = None
        self.host: Tensor | None = None
        self.copy: AsyncCopy | None = None
        self.joined: Tensor | None = None
        self.waits: set[int] = set()
        self.is_wanted = self.is_leaving = False
        self._counted = {ON_DEVICE: 0, COPYING_TO_HOST: 0, PARTITIONED: 0, FETCHED: 0}
        self.count(ON_DEVICE, self.size)

    def count(self, kind: str, size: int) -> None:
        """So many bytes more of a kind, or less, are held for it on the device."""
        self._counted[kind] += size
        self.account.add(kind, size)

    def count_data(self, kind: str) -> None:
        """What is stored is of another kind from now on."""
        size = 0 if self.data is None else len(self.data)
        for was in (ON_DEVICE, COPYING_TO_HOST, PARTITIONED):
            self.count(was, -self._counted[was])
        self.count(kind, size)

    def forget_count(self, kind: str, size: int) -> None:
        """Somebody else counts these bytes from now on."""
        self._counted[kind] -= size

    @property
    def is_cut(self) -> bool:
        return self.number is not None

    @property
    def is_away(self) -> bool:
        """Whether a copy has to bring it."""
        return self.data is None

    def __del__(self) -> None:
        for kind, size in self._counted.items():
            self.account.now[kind] -= size
        if self.host is not None:
            self.account.host -= len(self.host)


class SavedTensorHandle:
    """What autograd keeps in the place of a tensor: where in a piece it lies.

    Args:
        place: in the graph's order.
    """

    __slots__ = ("dtype", "graph", "offset", "piece", "place", "shape", "stride")

    def __init__(self, piece: StoredStorage, graph: ForwardRecord, x: Tensor) -> None:
        self.piece, self.graph, self.place = piece, graph, len(graph.order)
        self.shape, self.stride, self.dtype = x.shape, x.stride(), x.dtype
        self.offset = x.storage_offset() * x.element_size()
        graph.order.append(ReferenceType(piece))
        piece.waits.add(id(self))

    def tensor(self, whole: Tensor, base: int) -> Tensor:
        """The tensor, of bytes that lie in a storage from which on they were saved from ``base`` on."""
        out = torch.empty(0, dtype=self.dtype, device=whole.device)
        offset = (self.offset - base) // out.element_size()
        return out.set_(whole.untyped_storage(), offset, self.shape, self.stride)

    def __del__(self) -> None:
        self.piece.waits.discard(id(self))


def storage_range(x: Tensor) -> tuple[int, int]:
    """The bytes of its storage that x lies in: from the first to behind the last."""
    start = int(x.storage_offset())
    last = start + sum((int(n) - 1) * int(step) for n, step in zip(x.shape, x.stride(), strict=True))
    return start * x.element_size(), (last + 1) * x.element_size()


def is_dense(x: Tensor) -> bool:
    """Whether x has all numbers of its extent, each once."""
    start, end = storage_range(x)
    return end - start == x.nbytes and 0 not in x.stride()
