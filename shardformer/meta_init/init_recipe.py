"""Recipes: how the values of a tensor on the meta device are made. Data first, ``run_recipe`` reads it.

    place     a storage on the meta device; the views of a tensor, a parameter of it and its ``.data`` share one
    step      one operation that was called and not carried out; it knows which steps made what it reads
    recipe    the steps that lead to a place's values now

A step that draws random numbers keeps the state that the generator had before it, so every place is computed by
itself, in any order, and as often as is liked.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from shardformer.torch_compat import DisableTorchFunction, disable_current_modes, schema_of, tree_flatten, tree_map

ATTRIBUTE = "_shardformer_place"
MAPPED_BYTES = 1 << 17
_ORDER = count()  # of steps: the order in which they were called
_GENERATOR = threading.Lock()
"""torch's own generator is one for all threads, and ranks may be threads."""


@dataclass(eq=False)
class DeferredStorage:
    """A storage that holds no values: its size, and the step that wrote to it last."""

    num_bytes: int
    writer: InitStep | None = None


@dataclass(frozen=True)
class TensorView:
    """A tensor in a place, as an argument of a step."""

    place: DeferredStorage
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: UntypedStorage) -> Tensor:
        """The same view of real values."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(eq=False)
class InitStep:
    """One operation that was called and not carried out.

    Args:
        func: what is called: a function of torch, or a ``SafetensorsSource`` of values.
        args, kwargs: its arguments, tensors without values as views.
        out: what it gives, by its position; None where that is no new tensor.
        before: the steps that wrote what it reads.
        state: of the random generator before it, for one that draws.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: tuple[TensorView | None, ...] = ()
    before: tuple[InitStep, ...] = ()
    state: Tensor | None = None
    number: int = field(default_factory=lambda: next(_ORDER))

    def places(self) -> list[DeferredStorage]:
        """All places that it reads or writes, each once."""
        views = [x for x in tree_flatten((self.args, self.kwargs, self.out))[0] if isinstance(x, TensorView)]
        return list({id(v.place): v.place for v in views}.values())


def deferred_storage_of(tensor: Any) -> DeferredStorage | None:
    """The place of a tensor without values that has a recipe; None for every other."""
    if not isinstance(tensor, Tensor):
        return None
    with DisableTorchFunction():  # what it says inside of LazyInit is not so
        return tensor.untyped_storage().__dict__.get(ATTRIBUTE) if tensor.is_meta else None


def defer_storage(tensor: Tensor) -> DeferredStorage:
    """Gives a tensor on the meta device a place of its own; torch keeps it as long as the storage lives."""
    storage = tensor.untyped_storage()
    place = DeferredStorage(storage.nbytes())
    storage.__dict__[ATTRIBUTE] = place
    return place


def drop_recipe(tensor: Tensor) -> None:
    """Takes the recipe of a tensor from it: its values cannot be made."""
    tensor.untyped_storage().__dict__.pop(ATTRIBUTE, None)


def view_of(tensor: Tensor) -> TensorView:
    place = deferred_storage_of(tensor)
    assert place is not None
    return TensorView(place, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def recipe_of(place: DeferredStorage) -> list[InitStep]:
    """The steps that make the values of a place, in the order in which they were called."""
    found: dict[int, InitStep] = {}
    waiting = [place.writer] if place.writer is not None else []
    while waiting:
        step = waiting.pop()
        if step.number not in found:
            found[step.number] = step
            waiting += step.before
    return [found[number] for number in sorted(found)]


def run_recipe(place: DeferredStorage) -> UntypedStorage:
    """The values of a place, on the CPU. What was made on the way is freed as soon as no later step reads it."""
    steps = recipe_of(place)
    uses = Counter(id(p) for step in steps for p in step.places())
    storages: dict[int, UntypedStorage] = {}
    with disable_current_modes(), torch.no_grad(), torch.device("cpu"):
        if not steps:
            return _allocate(place)
        for step in steps:
            run_step(step, storages)
            for p in step.places():
                uses[id(p)] -= 1
                if not uses[id(p)] and p is not place:
                    del storages[id(p)]
    storage = storages[id(place)]
    return storage.clone() if getattr(steps[-1].func, "is_borrowed", False) else storage


def values_of(tensor: Tensor) -> Tensor:
    """What a tensor with a recipe holds, on the CPU."""
    view = view_of(tensor)
    return view.of(run_recipe(view.place))


def run_step(step: InitStep, storages: dict[int, UntypedStorage]) -> None:
    """Carries out one step on real values, which ``storages`` holds by the identity of their place."""

    def real(x: Any) -> Any:
        if isinstance(x, TensorView):
            if id(x.place) not in storages:  # what is wholly written over, or never was written
                storages[id(x.place)] = _allocate(x.place)
            return x.of(storages[id(x.place)])
        return x

    args, kwargs = tree_map(real, step.args), tree_map(real, step.kwargs)
    if step.state is None:
        result = step.func(*args, **kwargs)
    else:
        result = _redraw(step.func, step.state, args, kwargs)
    for view, value in zip(step.out, result if isinstance(result, tuple | list) else (result,), strict=False):
        if view is not None:
            storages[id(view.place)] = _laid_out(value, view)


def _redraw(func: Any, state: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function that draws random numbers, from the given state on. Leaves torch's own generator as it is."""
    if any(argument.name == "generator" for argument in schema_of(func).arguments):
        generator = torch.Generator()
        generator.set_state(state)
        return func(*args, **{**kwargs, "generator": generator})
    with _GENERATOR, torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        return func(*args, **kwargs)


def _allocate(place: DeferredStorage) -> UntypedStorage:
    """Memory for a place. What is large is mapped by itself: on the heap the small parts would fill the holes that full
    tensors leave, and the heap would grow to the size of the full model."""
    if place.num_bytes < MAPPED_BYTES:
        return torch.empty(place.num_bytes, dtype=torch.uint8).untyped_storage()
    mapped = mmap(-1, place.num_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()


def _laid_out(value: Tensor, view: TensorView) -> UntypedStorage:
    """The storage of a result, as it was said to be laid out when it had no values."""
    if (value.stride(), value.storage_offset(), value.dtype) == (view.stride, view.offset, view.dtype):
        return value.untyped_storage()
    storage = _allocate(view.place)
    view.of(storage).copy_(value)
    return storage


# ------------------------------------------------------------------------------------------------ to compare over ranks


def random_steps(place: DeferredStorage) -> Iterator[InitStep]:
    """The steps of a place's recipe that draw."""
    return (step for step in recipe_of(place) if step.state is not None)


def recipe_as_text(place: DeferredStorage) -> str:
    """A recipe in words, with a hash of its arguments: equal on ranks that build the same, whatever their seed."""
    digest, names = hashlib.sha256(), []
    numbers: dict[int, int] = {}

    def told(x: Any) -> str:
        if isinstance(x, TensorView):
            number = numbers.setdefault(id(x.place), len(numbers))
            return f"{number} {x.dtype} {x.size} {x.stride} {x.offset}"
        if isinstance(x, Tensor):
            raw = x.detach().cpu().contiguous().flatten().view(torch.uint8)
            return f"{x.dtype} {tuple(x.shape)} {hashlib.sha256(raw.numpy().tobytes()).hexdigest()}"
        return str(x)

    for step in recipe_of(place):
        leaves, shape = tree_flatten((step.args, step.kwargs, step.out))
        digest.update(f"{step.func} {[told(x) for x in leaves]} {shape}".encode())
        names.append(getattr(step.func, "__name__", str(step.func)).partition(".")[0])
    return f"{' '.join(names) or 'empty'} {digest.hexdigest()[:16]}"
