"""Record the operations that initialize meta tensors, and run them later to compute the values.

    DeferredStorage    a storage on the meta device, shared by all views of a tensor
    RecordedInitStep           a recorded operation, with references to the steps that wrote its inputs
    recipe             the steps that compute the current values of a storage

A step that draws random numbers stores the state of the generator before the step. Each storage can therefore be
computed independently, in any order and repeatedly.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from shardformer.torch_compat import (
    DisableTorchFunction,
    disable_current_modes,
    schema_of,
    tree_flatten,
    tree_map,
    view_as_bytes,
)

ATTRIBUTE = "_shardformer_place"
MAPPED_BYTES = 1 << 17
_STEP_NUMBERS = count()  # call order of steps
_GENERATOR_LOCK = threading.Lock()  # All threads share torch's default generator, and ranks may be threads


@dataclass(eq=False)
class DeferredStorage:
    """A storage on the meta device, with the recorded operations that compute its values."""

    num_bytes: int
    writer_step: RecordedInitStep | None = None


@dataclass(frozen=True)
class DeferredInitTensorView:
    """A placeholder for a meta tensor in the arguments of recorded operations."""

    deferred: DeferredStorage
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def to_tensor(self, storage: UntypedStorage) -> Tensor:
        """Return the real tensor for this placeholder, as a view of ``storage``."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(eq=False)
class RecordedInitStep:
    """A recorded tensor operation, with links to the operations that computed its inputs."""

    func: Callable[..., Any]  # a torch operator or a ``SafetensorsTensorReader``
    args: tuple[Any, ...]  # each tensor without values is a ``DeferredInitTensorView``
    kwargs: dict[str, Any]
    output_views: tuple[
        DeferredInitTensorView | None, ...
    ] = ()  # output views, or None for an output that is not a new tensor
    input_steps: tuple[RecordedInitStep, ...] = ()  # the steps that wrote the inputs
    rng_state: Tensor | None = None  # generator state before the operation, if it draws random numbers
    number: int = field(default_factory=lambda: next(_STEP_NUMBERS))

    def get_deferred_storages(self) -> list[DeferredStorage]:
        """Return all lazily built storages that this operation reads or writes."""
        views = [
            x
            for x in tree_flatten((self.args, self.kwargs, self.output_views))[0]
            if isinstance(x, DeferredInitTensorView)
        ]
        return list({id(v.deferred): v.deferred for v in views}.values())


def get_deferred_storage(tensor: Any) -> DeferredStorage | None:
    """Return the ``DeferredStorage`` of a lazily built tensor, or None for any other tensor."""
    if not isinstance(tensor, Tensor):
        return None
    with DisableTorchFunction():  # inside LazyInit, is_meta reports False
        return tensor.untyped_storage().__dict__.get(ATTRIBUTE) if tensor.is_meta else None


def attach_deferred_storage(meta_tensor: Tensor) -> DeferredStorage:
    """Attach a new ``DeferredStorage`` to the storage of a meta tensor. Both have the same lifetime."""
    storage = meta_tensor.untyped_storage()
    deferred = DeferredStorage(storage.nbytes())
    storage.__dict__[ATTRIBUTE] = deferred
    return deferred


def drop_init_recipe(tensor: Tensor) -> None:
    """Delete the recorded operations of a meta tensor, so that its values can no longer be computed."""
    tensor.untyped_storage().__dict__.pop(ATTRIBUTE, None)


def get_deferred_view(tensor: Tensor) -> DeferredInitTensorView:
    """Return the placeholder for a lazily built tensor in recorded operations."""
    deferred = get_deferred_storage(tensor)
    assert deferred is not None
    return DeferredInitTensorView(
        deferred, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    )


def get_recorded_init_steps(deferred_storage: DeferredStorage) -> list[RecordedInitStep]:
    """Return the recorded operations that compute the values of a storage, in order."""
    found: dict[int, RecordedInitStep] = {}
    waiting = [deferred_storage.writer_step] if deferred_storage.writer_step is not None else []
    while waiting:
        step = waiting.pop()
        if step.number not in found:
            found[step.number] = step
            waiting += step.input_steps
    return [found[number] for number in sorted(found)]


def materialize_deferred_storage(
    deferred_storage: DeferredStorage, test_values: torch.Generator | None = None
) -> UntypedStorage:
    """Compute the values of a storage on the CPU by running its recorded operations.

    Args:
        test_values: draws the values that no operation writes, with ``fill_with_test_values``. None: uninitialized.
    """
    steps = get_recorded_init_steps(deferred_storage)
    uses = Counter(id(p) for step in steps for p in step.get_deferred_storages())
    storages: dict[int, UntypedStorage] = {}
    with disable_current_modes(), torch.no_grad(), torch.device("cpu"):
        if not steps:
            return _allocate_storage(deferred_storage)
        for step in steps:
            run_init_step(step, storages, test_values)
            for p in step.get_deferred_storages():
                uses[id(p)] -= 1
                if not uses[id(p)] and p is not deferred_storage:
                    del storages[id(p)]
    storage = storages[id(deferred_storage)]
    return storage.clone() if getattr(steps[-1].func, "is_borrowed", False) else storage


def fill_with_test_values(storage: UntypedStorage, view: DeferredInitTensorView, generator: torch.Generator) -> None:
    """Fill a floating-point storage with random values on which a model can be validated.

    Matrices and kernels get normal values that keep the scale of activations. Vectors, such as scales, biases and
    variances, get values between 0.5 and 1.5, because some of them must be positive.
    """
    values = torch.empty(0, dtype=view.dtype).set_(storage)
    drawn = torch.rand(values.shape, generator=generator) + 0.5
    row = view.size if prod(view.size) < len(values) else view.size[1:]  # a view may be one row of a matrix
    if row:
        drawn.normal_(std=max(prod(row), 1) ** -0.5, generator=generator)
    values.copy_(drawn)


def compute_deferred_values(tensor: Tensor) -> Tensor:
    """Compute the values of a lazily built tensor, and return them as a CPU tensor."""
    view = get_deferred_view(tensor)
    return view.to_tensor(materialize_deferred_storage(view.deferred))


def run_init_step(
    step: RecordedInitStep,
    storage_by_deferred_id: dict[int, UntypedStorage],
    test_values: torch.Generator | None = None,
) -> None:
    """Run one recorded operation, and store its results in ``storage_by_deferred_id``.

    Args:
        storage_by_deferred_id: id of each deferred storage -> storage with values.
        test_values: draws the values of inputs that no operation has written.
    """

    def materialize_if_deferred(argument: Any) -> Any:
        if isinstance(argument, DeferredInitTensorView):
            if id(argument.deferred) not in storage_by_deferred_id:  # will be overwritten, or was never written
                storage_by_deferred_id[id(argument.deferred)] = storage = _allocate_storage(argument.deferred)
                if test_values is not None:
                    fill_with_test_values(storage, argument, test_values)
            return argument.to_tensor(storage_by_deferred_id[id(argument.deferred)])
        return argument

    args, kwargs = tree_map(materialize_if_deferred, step.args), tree_map(materialize_if_deferred, step.kwargs)
    if step.rng_state is None:
        result = step.func(*args, **kwargs)
    else:
        result = _rerun_random_op(step.func, step.rng_state, args, kwargs)
    for view, value in zip(step.output_views, result if isinstance(result, tuple | list) else (result,), strict=False):
        if view is not None:
            storage_by_deferred_id[id(view.deferred)] = _convert_to_recorded_layout(value, view)


def _rerun_random_op(func: Callable[..., Any], rng_state: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a random operation from a recorded generator state, without changing torch's default generator."""
    if any(argument.name == "generator" for argument in schema_of(func).arguments):
        generator = torch.Generator()
        generator.set_state(rng_state)
        return func(*args, **{**kwargs, "generator": generator})
    with _GENERATOR_LOCK, torch.random.fork_rng(devices=[]):
        torch.set_rng_state(rng_state)
        return func(*args, **kwargs)


def _allocate_storage(deferred_storage: DeferredStorage) -> UntypedStorage:
    # large storages are mapped: on the heap, small shards would fill the gaps of freed full tensors, and the heap would
    # grow to the size of the full model
    if deferred_storage.num_bytes < MAPPED_BYTES:
        return torch.empty(deferred_storage.num_bytes, dtype=torch.uint8).untyped_storage()
    mapped = mmap(-1, deferred_storage.num_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()


def _convert_to_recorded_layout(result: Tensor, recorded_view: DeferredInitTensorView) -> UntypedStorage:
    """Convert a result to the recorded strides and dtype, and return its storage."""
    if (result.stride(), result.storage_offset(), result.dtype) == (
        recorded_view.stride,
        recorded_view.offset,
        recorded_view.dtype,
    ):
        return result.untyped_storage()
    storage = _allocate_storage(recorded_view.deferred)
    recorded_view.to_tensor(storage).copy_(result)
    return storage


def iter_random_init_steps(deferred_storage: DeferredStorage) -> Iterator[RecordedInitStep]:
    """Iterate over the recorded operations of a storage that draw random numbers."""
    return (step for step in get_recorded_init_steps(deferred_storage) if step.rng_state is not None)


def fingerprint_init_recipe(deferred_storage: DeferredStorage) -> str:
    """Compute a fingerprint of the operations that initialize a storage, ignoring random seeds."""
    digest, names = hashlib.sha256(), []
    numbers: dict[int, int] = {}

    def format_leaf(leaf: Any) -> str:
        if isinstance(leaf, DeferredInitTensorView):
            number = numbers.setdefault(id(leaf.deferred), len(numbers))
            return f"{number} {leaf.dtype} {leaf.size} {leaf.stride} {leaf.offset}"
        if isinstance(leaf, Tensor):
            return (
                f"{leaf.dtype} {tuple(leaf.shape)} "
                f"{hashlib.sha256(view_as_bytes(leaf.cpu()).numpy().tobytes()).hexdigest()}"
            )
        return str(leaf)

    for step in get_recorded_init_steps(deferred_storage):
        leaves, shape = tree_flatten((step.args, step.kwargs, step.output_views))
        digest.update(f"{step.func} {[format_leaf(x) for x in leaves]} {shape}".encode())
        names.append(getattr(step.func, "__name__", str(step.func)).partition(".")[0])
    return f"{' '.join(names) or 'empty'} {digest.hexdigest()[:16]}"
