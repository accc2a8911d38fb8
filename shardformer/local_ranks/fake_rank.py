"""Trace one rank's training step with fake tensors, without starting the other ranks.

Fake tensors have shapes but no values. One process can trace the step of one rank of thousands, and report which
collectives the rank starts and waits for, and how much memory it needs.

>>> with enable_fake_tensors() as copied:                                             # doctest: +SKIP
...     context = make_fake_context({"pipe": 2}, tensor=8, pipe=4, data=32)
...     model = shard_model(LlamaForCausalLM(config), context=context)
...     batch = copied(batch)
...     with CollectiveRecorder(context) as recorder, MemoryTracker([*model.parameters(), *batch.values()]) as memory:
...         Pipeline(model, micro_batches=8).step(batch)
>>> recorder.summarize_calls(), memory.peak                                          # doctest: +SKIP
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from shardformer.local_ranks.threads import DeferredWork
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.mesh.rank_grid import RankGrid
from shardformer.mesh.transport import CollectiveAnnouncement, PeerCollectiveStatus, RankGroups, Transport, Work
from shardformer.torch_compat import (
    FakeCopyMode,
    FakeTensorMode,
    TorchDispatchMode,
    has_real_data,
    storage_id,
    tree_leaves,
)
from shardformer.torch_patches import LibraryPatch, Undo, temporary_patch


def make_fake_context(
    coords: Mapping[str, int] | None = None,
    *,
    tensor: int = 1,
    data: int = 1,
    pipe: int = 1,
    sequence: int = 1,
    backend: str = "gloo",
    device: torch.device | None = None,
) -> ParallelContext:
    """Build the ``ParallelContext`` of one rank without other processes. Its collectives do not communicate.

    Args:
        coords: rank on each mesh axis, 0 by default.
        backend: "nccl" selects the collectives that are used with NCCL, on any device.
        device: device of the rank; default: the CPU.
    """
    sizes = {"data": data, "pipe": pipe, "sequence": sequence, "tensor": tensor}
    world = FakeDistributedWorld(RankGrid.from_sizes(sizes).get_rank_at(coords or {}), backend)
    return ParallelContext.from_sizes(sizes, coords, world=world, device=device)


class FakeDistributedWorld:
    """Simulated world in which only one rank exists. Collectives return its own values."""

    store = thread = None

    def __init__(self, rank: int, backend: str) -> None:
        self.rank, self.backend = rank, backend

    def create_transport(self, rank_groups: RankGroups) -> Transport:
        line = next((line for line in rank_groups if self.rank in line), (self.rank,))
        return FakeTransport(self, len(line))


class FakeTransport:
    """Transport without communication, which returns this rank's own tensors and objects."""

    group = None

    def __init__(self, world: FakeDistributedWorld, group_size: int) -> None:
        self.world, self._size = world, group_size

    def is_direct_exchange_faster(self, tensor: Tensor) -> bool:
        return self.world.backend == "gloo"

    def has_serialized_sends(self, device: torch.device) -> bool:
        return self.world.backend == "nccl"

    def _return_completed_work(self, *args: Any, **kwargs: Any) -> Work:
        return DeferredWork(None)

    all_reduce = all_gather = reduce_scatter = send = receive = _return_completed_work

    def exchange(self, send_tensors: Mapping[int, Tensor], recv_buffers: Mapping[int, Tensor]) -> Sequence[Work]:
        return ()

    def broadcast(self, tensor: Tensor, src: int) -> None:
        pass

    def broadcast_object(self, local_object: Any, src: int) -> Any:
        return local_object

    def all_gather_objects(self, local_object: Any) -> list[Any]:
        return [local_object] * self._size

    def all_gather_ints(self, local_ints: Sequence[int]) -> list[list[int]]:
        return [[1] * len(local_ints)] * self._size  # constant, so that the traces of all ranks are equal

    def announce_collective(self, call_name: str, *, wait: bool) -> PeerCollectiveStatus:
        return PeerCollectiveStatus([CollectiveAnnouncement(call_name, not wait)] * self._size)


class MemoryTracker(TorchDispatchMode):
    """Context manager that measures the memory of all tensors created by this thread, real or fake.

    ``live`` is the number of bytes of all live storages, and ``peak`` is the maximum of ``live``.

    Args:
        existing_tensors: existing tensors that are counted as well, such as parameters and the batch.
    """

    def __init__(self, existing_tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives its base no types
        self.live = self.peak = 0
        self._known: set[int] = set()
        self._track_storages(existing_tensors)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._track_storages(tree_leaves(out))
        return out

    def _track_storages(self, leaves: Iterable[Any]) -> None:
        for storage in (x.untyped_storage() for x in leaves if isinstance(x, Tensor)):
            if (key := storage_id(storage)) not in self._known:
                self._known.add(key)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._record_freed_storage, key, storage.nbytes())

    def _record_freed_storage(self, storage_key: int, num_bytes: int) -> None:
        self._known.discard(storage_key)
        self.live -= num_bytes


@contextmanager
def enable_fake_tensors(*, padded: bool = False) -> Iterator[Callable[[Any], Any]]:
    """Enable fake tensor mode. Yields a function that copies a model or a batch to fake tensors.

    Build models that read values in ``__init__`` (vit and swinv2) before, and copy them.

    Args:
        padded: whether attention receives a 4D mask, as transformers creates for a batch with padding. Otherwise, each
            row counts as one full sequence without a mask.
    """
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        nullcontext() if padded else _disable_attention_mask_creation(),
    ):

        def to_fake(model_or_batch: Any) -> Any:
            with FakeCopyMode(mode):
                return copy.deepcopy(model_or_batch)

        yield to_fake


class _ActiveTraceCount(threading.local):
    traces = 0


_THREAD = _ActiveTraceCount()
"""``traces`` is the number of active ``_disable_attention_mask_creation`` blocks of this thread."""
MASK_PATCH = LibraryPatch(
    "transformers.masking_utils: sdpa_mask, find_packed_sequence_indices",
    "shardformer.local_ranks.fake_rank",
    "skips masks while you trace a rank with fake tensors, which have no values",
)


@contextmanager
def _disable_attention_mask_creation() -> Iterator[None]:
    if find_spec("transformers") is None:
        yield
        return
    with temporary_patch(MASK_PATCH, _patch_attention_mask_creation):
        _THREAD.traces += 1
        try:
            yield
        finally:
            _THREAD.traces -= 1


def _patch_attention_mask_creation() -> Undo:
    """Patch transformers to create no attention masks while a thread traces a model with fake tensors."""
    from transformers import masking_utils

    make, find = masking_utils.sdpa_mask, masking_utils.find_packed_sequence_indices

    def make_attention_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        has_values = attention_mask is None or has_real_data(attention_mask)
        if _THREAD.traces and not has_values and make(*args, attention_mask=None, **kwargs) is None:
            return None  # no mask is needed except for padding
        return make(*args, attention_mask=attention_mask, **kwargs)

    names = [name for name, function in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.items() if function is make]

    def install_mask_functions(find_packed_fn: Callable[..., Any], make_mask_fn: Callable[..., Any]) -> None:
        masking_utils.find_packed_sequence_indices, masking_utils.sdpa_mask = find_packed_fn, make_mask_fn
        for name in names:
            masking_utils.AttentionMaskInterface.register(name, make_mask_fn)

    install_mask_functions(lambda position_ids: None if _THREAD.traces else find(position_ids), make_attention_mask)
    return lambda: install_mask_functions(find, make)
