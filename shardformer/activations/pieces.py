"""What is stored: stretches of memory that tensors saved for the backward lie in, each once, and how much it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import ReferenceType

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardformer.comm.link import Copy

KEPT, LEAVING, PARTS, BROUGHT = "kept", "leaving", "parts", "brought"
"""Kinds of bytes on the device: that stay there; whose copy to the host is under way; this rank's parts of what all
tensor ranks hold; brought back for the backward, until the memory is given back."""


def _rate(value: float | None) -> str:
    return "not measured" if value is None else f"{value / 1e9:.2f} GB/s"


@dataclass(frozen=True)
class Figures:
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


class Account:
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
class Graph:
    """What one forward saved, in order.

    Args:
        fetched: from which place on all has been brought, or begun to be.
    """

    order: list[ReferenceType[Piece]] = field(default_factory=list)
    fetched: int = 0


class Piece:
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

    def __init__(self, account: Account, data: Tensor, source: StorageWeakRef, witness: Tensor, start: int) -> None:
        self.account, self.source, self.witness, self.version = account, source, witness, witness._version
        self.size, self.start, self.base, self.name = len(data), start, 0, ""
        self.data: Tensor | None = data
        self.number: Tensor | None = None
        self.host: Tensor | None = None
        self.copy: Copy | None = None
        self.joined: Tensor | None = None
        self.waits: set[int] = set()
        self.is_wanted = self.is_leaving = False
        self._counted = {KEPT: 0, LEAVING: 0, PARTS: 0, BROUGHT: 0}
        self.count(KEPT, self.size)

    def count(self, kind: str, size: int) -> None:
        """So many bytes more of a kind, or less, are held for it on the device."""
        self._counted[kind] += size
        self.account.add(kind, size)

    def count_data(self, kind: str) -> None:
        """What is stored is of another kind from now on."""
        size = 0 if self.data is None else len(self.data)
        for was in (KEPT, LEAVING, PARTS):
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


class Handle:
    """What autograd keeps in the place of a tensor: where in a piece it lies.

    Args:
        place: in the graph's order.
    """

    __slots__ = ("dtype", "graph", "offset", "piece", "place", "shape", "stride")

    def __init__(self, piece: Piece, graph: Graph, x: Tensor) -> None:
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


def extent(x: Tensor) -> tuple[int, int]:
    """The bytes of its storage that x lies in: from the first to behind the last."""
    start = int(x.storage_offset())
    last = start + sum((int(n) - 1) * int(step) for n, step in zip(x.shape, x.stride(), strict=True))
    return start * x.element_size(), (last + 1) * x.element_size()


def is_dense(x: Tensor) -> bool:
    """Whether x has all numbers of its extent, each once."""
    start, end = extent(x)
    return end - start == x.nbytes and 0 not in x.stride()
