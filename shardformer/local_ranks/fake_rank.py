"""One rank of any layout, traced in one process on fake tensors; and a fake accelerator that checks device placement.

Under torch's fake tensors, which have shapes and no values, one process traces the step of one rank of thousands: which
collectives it starts and waits for, and how much memory it holds.

>>> with fake_tensors() as copied:                                             # doctest: +SKIP
...     context = fake_context({"pipe": 2}, tensor=8, pipe=4, data=32)
...     model = shard_model(LlamaForCausalLM(config), context=context)
...     batch = copied(batch)
...     with CollectiveRecorder(context) as recorder, MemoryTracker([*model.parameters(), *batch.values()]) as memory:
...         Pipeline(model, micro_batches=8).step(batch)
>>> recorder.table(), memory.peak                                              # doctest: +SKIP
"""

from __future__ import annotations

import copy
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardformer.mesh.parallel_context import ParallelContext
from shardformer.mesh.rank_grid import RankGrid
from shardformer.mesh.transport import Meeting, RankGroups, Transport, Word, Work
from shardformer.torch_compat import has_data
from shardformer.torch_patches import Patch, Undo, temporarily


def fake_context(
    coords: Mapping[str, int] | None = None,
    *,
    tensor: int = 1,
    data: int = 1,
    pipe: int = 1,
    sequence: int = 1,
    backend: str = "gloo",
    device: torch.device | None = None,
) -> ParallelContext:
    """The context of the rank at ``coords`` (0 where none is given), whose collectives carry nothing.

    Args:
        backend: with "nccl" parts are gathered and scattered as NCCL does, whatever the device.
        device: of the rank; the CPU by default. See ``shardformer.local_ranks.fake_rank``.
    """
    sizes = {"data": data, "pipe": pipe, "sequence": sequence, "tensor": tensor}
    world = FakeWorld(RankGrid.of(sizes).rank_at(coords or {}), backend)
    return ParallelContext.of(sizes, coords, world=world, device=device)


class FakeWorld:
    """The world of one rank that is alone with what it says."""

    store = thread = None

    def __init__(self, rank: int, backend: str) -> None:
        self.rank, self.backend = rank, backend

    def connect(self, lines: RankGroups) -> Transport:
        line = next((line for line in lines if self.rank in line), (self.rank,))
        return FakeTransport(self, len(line))


class FakeTransport:
    """Carries nothing: tensors stay as they are, objects are answered with this rank's own."""

    group = None

    def __init__(self, world: FakeWorld, size: int) -> None:
        self.world, self._size = world, size

    def exchanges_directly(self, x: Tensor) -> bool:
        return self.world.backend == "gloo"

    def sends_in_turn(self, device: torch.device) -> bool:
        return self.world.backend == "nccl"

    def all_reduce(self, x: Tensor, op: str) -> Work:
        return _DONE

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        return _DONE

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Work:
        return _DONE

    def exchange(self, outgoing: Mapping[int, Tensor], arriving: Mapping[int, Tensor]) -> Sequence[Work]:
        return ()

    def send(self, x: Tensor, to: int, tag: int) -> Work:
        return _DONE

    def receive(self, x: Tensor, source: int, tag: int) -> Work:
        return _DONE

    def broadcast(self, x: Tensor, source: int) -> None:
        pass

    def broadcast_object(self, value: Any, source: int) -> Any:
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self._size

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        return [[1] * len(numbers)] * self._size  # as of tensors without values: every rank's trace has the same

    def meet(self, call: str, *, waits: bool) -> Meeting:
        return Meeting([Word(call, not waits)] * self._size)


class _Done:
    """A work that is done."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


_DONE = _Done()


class MemoryTracker(TorchDispatchMode):
    """Follows the memory of what is computed in here, on this thread: real tensors and fake ones alike.

    ``live`` is the bytes of all storages that are held just now, ``peak`` their highest number.

    Args:
        held: tensors that are there before: a model's parameters, the batch.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives its base no types
        self.live = self.peak = 0
        self._known: set[int] = set()
        self._see(held)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._see(tree_leaves(out))
        return out

    def _see(self, values: Iterable[Any]) -> None:
        for storage in (x.untyped_storage() for x in values if isinstance(x, Tensor)):
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live -= num_bytes


@contextmanager
def fake_tensors(*, padded: bool = False) -> Iterator[Callable[[Any], Any]]:
    """In here tensors have shapes and no values. Gives a function that copies a batch, or a model, without its values.

    A model whose building reads values (vit and swinv2 do) is built before, and copied.

    Args:
        padded: whether attention is given a mask of 4 dims, as transformers makes one of a batch with padding; without,
            each row is taken for one whole text, of which attention needs no mask.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, nullcontext() if padded else _unpadded():

        def copied(value: Any) -> Any:
            with FakeCopyMode(mode):
                return copy.deepcopy(value)

        yield copied


class _Here(threading.local):
    """How many blocks of ``_unpadded`` this thread is in."""

    traces = 0


_HERE = _Here()
MASK_PATCH = Patch(
    "transformers.masking_utils: sdpa_mask, find_packed_sequence_indices",
    "shardformer.local_ranks.fake_rank",
    "while one rank is traced under fake tensors: a batch without values needs no mask",
)


@contextmanager
def _unpadded() -> Iterator[None]:
    if find_spec("transformers") is None:
        yield
        return
    with temporarily(MASK_PATCH, _leave_masks_out):
        _HERE.traces += 1
        try:
            yield
        finally:
            _HERE.traces -= 1


def _leave_masks_out() -> Undo:
    """transformers makes no mask of a batch without values. In other threads it makes those that it always makes."""
    from transformers import masking_utils

    make, find = masking_utils.sdpa_mask, masking_utils.find_packed_sequence_indices

    def mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """None where it is made of what is padded alone."""
        padded = attention_mask is None or has_data(attention_mask)
        if _HERE.traces and not padded and make(*args, attention_mask=None, **kwargs) is None:
            return None
        return make(*args, attention_mask=attention_mask, **kwargs)

    names = [name for name, made in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.items() if made is make]

    def put(packed: Any, made: Any) -> None:
        masking_utils.find_packed_sequence_indices, masking_utils.sdpa_mask = packed, made
        for name in names:
            masking_utils.AttentionMaskInterface.register(name, made)

    put(lambda position_ids: None if _HERE.traces else find(position_ids), mask)
    return lambda: put(find, make)


NAME = "fakegpu"


@functools.cache
def fake_device() -> torch.device:
    """Registers the fake accelerator in this process, once, and returns its first device."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the interface experimental
        _setup_privateuseone_for_python_backend(NAME, _Accelerator(NAME))
    return torch.device(NAME, 0)


class _Accelerator(ModuleType):
    """What ``torch.fakegpu`` is: what torch calls of the module of an accelerator."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 8

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _lazy_init(self) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False


class _WithoutNumbers(TorchDispatchMode):
    """Forgets the numbers of what goes to the fake device.

    A fake tensor that is made of a few numbers keeps them, and torch computes with them as long as it can: it would
    copy them into memory of the device.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = (kwargs or {}).get("device")
        if device is not None and device.type == NAME:
            args = tuple(_without_numbers(x) for x in args)
        return func(*args, **(kwargs or {}))


def _without_numbers(x: Any) -> Any:
    if isinstance(x, FakeTensor):
        x.constant = None
    return torch.empty_like(x) if type(x) is Tensor else x


@contextmanager
def on_fake_device(device: torch.device) -> Iterator[Callable[[Any], Any]]:
    """Fake tensors, of which some may be on ``device``. Yields a function that moves a model, or a batch, there.

    A model is changed and returned; its parameters become new ones, tied parameters stay tied.
    """
    # In one thread: an error in a device's own backward thread would abort the process.
    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor makes its numbers fake before they go to the device
    try:
        with torch.autograd.set_multithreading_enabled(False), fake_tensors() as copied, _WithoutNumbers():
            yield partial(_to, device, copied)
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)


def _to(device: torch.device, copied: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, nn.Module):
        return _moved(value, device)
    return tree_map_only(Tensor, lambda x: x.to(device), copied(value))


def _moved(model: nn.Module, device: torch.device) -> nn.Module:
    """``model.to(device)``, which torch refuses for fake tensors: it would change the device under a parameter."""
    new: dict[int, nn.Parameter] = {}
    old = [p for p in model.parameters()]  # keeps their identities from being used again
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                if id(param) not in new:
                    new[id(param)] = nn.Parameter(param.detach().to(device), param.requires_grad)
                module._parameters[name] = new[id(param)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    del old
    return model


def misplaced(
    model: nn.Module,
    device: torch.device,
    optimizers: Mapping[str, Optimizer] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> list[str]:
    """The names of tensors that are not on ``device``: of a model, of optimizers, and others.

    Args:
        optimizers: their parameters, gradients and states; a number of steps may be on the host, where torch keeps it.
        extra: other tensors by name, in containers of any kind.
    """
    found: dict[str, Tensor] = {f"parameter {name}": p for name, p in model.named_parameters()}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": b for name, b in model.named_buffers()}
    for name, optimizer in (optimizers or {}).items():
        for number, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            found[f"{name}: parameter {number}"] = param
            states = optimizer.state.get(param, {}).items()
            found |= {f"{name}: {key} of {number}": x for key, x in states if isinstance(x, Tensor) and x.dim()}
    for name, value in (extra or {}).items():
        leaves = torch.utils._pytree.tree_leaves(value)
        found |= {f"{name} ({number})": x for number, x in enumerate(leaves) if isinstance(x, Tensor)}
    return [f"{name} on {x.device}" for name, x in found.items() if x.device != device]
