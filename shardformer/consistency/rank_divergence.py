"""Detects during training that ranks have diverged, from numbers that are added to messages sent anyway.

What is compared at every step of training, and along which ranks:

              those with one batch   data ranks   stages
    mode               x                 x           x        whether the model is in train or in eval mode
    batch              x                             x        what a forward is given
    steps              x                 x           x        how many steps optimizers made
    options            x                 x           x        learning rates and other numbers of their groups
    weights            x                 x                    those that ranks hold alike: a part in each step

Stages train different parameters, and on some of them nothing may train. They compare after how many batches optimizers
stepped, and only where any did; and options only where each stage has one optimizer of the same class with one group,
and the script has no others: several optimizers may have different options on purpose.

The ranks that are given one batch compare whole numbers, beside those of their random states. Of weights they compare
a sum under signs drawn at random, which differs by about as much as the weights do (Achlioptas, "Database-friendly
random projections", 2003): each of these ranks computes the gradients of what it holds alike itself, and kernels of a
GPU that add in another order each time round otherwise. Data ranks add their gradients, and have the same bits. They
compare bits of a hash, each as 1 or -1 behind the last bucket of gradients: where all ranks say the same, the sum of n
of them is n or -n, in any precision, and every rank sees the same sum. Only where ranks differ do they say more.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import isnan
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardformer.comm.collectives import all_gather_objects, checksum, digest
from shardformer.consistency.initial_weights import broadcast_random_state, differs_across_ranks
from shardformer.errors import InputError
from shardformer.layout.sharding_metadata import METADATA_ATTRIBUTE, ParamEntry, ShardingMetadata, tables_of
from shardformer.mesh.parallel_context import Axis
from shardformer.torch_compat import disable_current_modes, has_data
from shardformer.torch_patches import Patch, install

BITS = 32
"""Of the hash that data ranks compare: they miss a difference once in 4e9 times."""
PARTS = 100
"""Within so many messages all weights are looked at."""
PART_BYTES = 2**18
"""Of weights, at the least, that one message is about."""
ROUNDINGS, MOST = 100, 0.01
"""How far weights may differ that ranks with one batch hold alike: so many roundings of a number, at most this part."""
SIGNS = 2**14
"""Random signs that are drawn: of more numbers each stretch has the same, under a sign of its own."""


@dataclass(frozen=True)
class ComparedValue:
    """What ranks have alike: in words, why, and what to look for where they do not."""

    what: str
    rule: str
    remedy: str


COMPARED_VALUES = {
    "mode": ComparedValue(
        "modes",
        "All ranks of a model train, or evaluate, at the same time",
        "Call model.train() and model.eval() on all ranks alike, not under `if rank == 0:`",
    ),
    "batch": ComparedValue(
        "batches",
        "Tensor and sequence ranks compute one batch together; only data ranks have batches of their own",
        "Draw the batch by the data rank: context.data.rank of context.data.size, not the global rank; seed a sampler "
        "alike on the ranks of one data rank",
    ),
    "steps": ComparedValue(
        "numbers of steps of the optimizer",
        "All ranks make the same steps: one that leaves a step out has other weights from then on",
        "Call optimizer.step() on all ranks alike. Where a GradScaler left a step out on one rank alone, use "
        "shardformer.shard_optimizer(..., precision='fp16'), whose ranks agree on it",
    ),
    "options": ComparedValue(
        "learning rates, or other options of the optimizer",
        "All ranks step with the same options",
        "Step the scheduler on all ranks alike; a rate that follows a metric follows one that all ranks know. Give a "
        "part of the model a rate of its own by groups of parameters, not by rank",
    ),
    "weights": ComparedValue(
        "weights that ranks hold alike",
        "What several ranks hold is changed alike on all of them",
        "Look for what one rank does alone: a norm of gradients or a clipping of its own (write "
        "shardformer.clip_grad_norm_), weights that are changed under `if rank == 0:`, other versions of a library",
    ),
}
ORDER = tuple(COMPARED_VALUES)
KIND_SHIFT = 40
"""The number of an optimizer's options has its class above this bit, and the values of its options below."""


@dataclass(eq=False)
class ConsistencyMonitor:
    """What one rank knows of itself that others have alike."""

    state: ShardingMetadata
    training: bool = True
    steps: int = 0
    options: tuple[Any, ...] = ()
    rounds: int = 0
    has_several_optimizers: bool = False
    _has_stepped: bool = False
    _optimizers: WeakSet[Optimizer] = field(default_factory=WeakSet)
    _turns: dict[str, int] = field(default_factory=dict)
    _parts: dict[str, list[WeightSlices]] = field(default_factory=dict)
    _late: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        install(STEP_PATCH, lambda: register_optimizer_step_post_hook(_after_optimizer_step).remove)
        _signs(self.state.context.device)  # before anybody measures the memory of a step

    def __deepcopy__(self, memo: dict[int, Any]) -> ConsistencyMonitor:
        return ConsistencyMonitor(deepcopy(self.state, memo), self.training)  # a copied model has no optimizer

    def record_step(self, optimizer: Optimizer) -> None:
        """An optimizer has changed the model's parameters."""
        self.steps += 1
        self._has_stepped = True
        self._optimizers.add(optimizer)
        self.state.context.traffic.steps = self.steps
        self.options = type(optimizer).__name__, tuple(map(_numbers_of, optimizer.param_groups))

    # --- ranks that are given one batch

    def values_to_gather(self, axis: Axis, inputs: Collection[Any] = ()) -> list[int]:
        """Of each fact a number, in ``ORDER``, for ranks of an axis that are given one batch; of weights two."""
        options = _hash_63_bits(hash(self.options[1:]))
        sketch = self._sketch(axis) if self.training else (0.0, 0.0)  # what is evaluated changes no weights
        return [int(self.training), self.batch(inputs), self.steps, options, *map(_bits_of, sketch)]

    def rounds_of_stage(self) -> int:
        """After how many batches optimizers stepped: asked once before each batch. 0 where nothing trains."""
        self.rounds += self._has_stepped
        self._has_stepped = False
        return self.rounds

    def options_of_stage(self) -> int:
        """A number of the optimizer's options, where one group has all parameters; 0 for any other optimizer.

        Stages have other parameters, and where these are in groups each stage may have other groups.
        """
        has_one_group = len(self.options) == 2 and len(self.options[1]) == 1
        if not has_one_group or len(self._optimizers) > 1 or self.has_several_optimizers:
            return 0
        kind, numbers = _hash_63_bits(self.options[0]) % 2**15 + 1, _hash_63_bits(hash(self.options[1])) % 2**KIND_SHIFT
        return int(kind << KIND_SHIFT | numbers)

    def batch(self, inputs: Collection[Any]) -> int:
        """A number of what a forward is given; on a GPU of its shapes, and of what the forward before was given."""
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        far = [digest(x) * n for n, x in enumerate(tensors, 1) if x.is_cuda]
        late = self._when_there("batch", torch.stack(far).sum()) if far else None
        return _hash_63_bits([late, *(tuple(x.shape) if x.is_cuda else checksum(x) for x in tensors)])

    def compare(self, every: Sequence[Sequence[int]], axis: Axis, inputs: Collection[Any] = ()) -> None:
        """Raises InputError, on every rank of the axis, where what ``numbers`` gave on one differs from the others'."""
        weights = len(ORDER) - 1
        sketches = [[_number_of(bits) for bits in theirs[weights:]] for theirs in every]
        if any(theirs[:weights] != every[0][:weights] for theirs in every) or not self._are_near(sketches):
            self._raise(axis, inputs)
        self._turns[axis.name] = self._turns.get(axis.name, 0) + 1

    # --- data ranks

    def values_to_reduce(self, axis: Axis) -> list[float]:
        """Of a hash of what the ranks of an axis have alike, each bit as 1 or -1."""
        known = [self.training, self.steps, hash(self.options[1:]), self._weights(axis)]
        number = int.from_bytes(hashlib.sha256(repr(known).encode()).digest()[: BITS // 8], "big")
        return [1.0 if number >> i & 1 else -1.0 for i in range(BITS)]

    def check_reduced(self, sums: Tensor, axis: Axis) -> None:
        """At the sums of the bits of all ranks. Raises InputError, on every rank of the axis, where any differs.

        On a GPU those of the step before are looked at, so that nothing waits for it.
        """
        self._turns[axis.name] = self._turns.get(axis.name, 0) + 1
        found = self._when_there(f"bits {axis.name}", sums.float().abs().min())
        # where one rank says otherwise it is smaller by 2; sums in 16 bits of more than 256 ranks are not so exact
        if found is not None and found <= axis.size - 2:
            self._raise(axis)

    # --- weights

    def _weights(self, axis: Axis) -> int:
        """A number of all bits of a part of the weights that the ranks of an axis hold alike."""
        numbered = enumerate(self._stretches(axis), 1)
        found = self._summed(f"weights {axis.name}", [digest(x) * number for number, x in numbered])
        return 0 if found is None else _hash_63_bits(int(found))

    def _sketch(self, axis: Axis) -> tuple[float, float]:
        """Of such a part the sum under random signs, and the norm."""
        stretches = self._stretches(axis)
        with disable_current_modes():  # what is measured or recorded of a step is that of the model
            sums = [_projected(x, number) for number, x in enumerate(stretches)]
        found = self._summed(f"sketch {axis.name}", sums) or (0.0, 0.0)
        return found[0], found[1] ** 0.5

    def _are_near(self, sketches: Sequence[Sequence[float]]) -> bool:
        """Whether what ranks have differs by no more than rounding makes of it."""
        (first, norm), *others = sketches
        widths = [torch.finfo(e.param.dtype).eps for e in self.state.entries if e.param.is_floating_point()]
        room = min(ROUNDINGS * max(widths, default=0.0), MOST) * norm
        return all(x == first or abs(x - first) <= room or (isnan(x) and isnan(first)) for x, _ in others)

    def _stretches(self, axis: Axis) -> list[Tensor]:
        """A part of the weights that the ranks of an axis hold alike; another part in each turn."""
        part = self._part(axis)
        if part is None or not all(has_data(entry.param) for entry, _ in part.stretches):
            return []
        return [entry.param.detach().reshape(-1)[stretch] for entry, stretch in part.stretches]

    def _summed(self, key: str, parts: Sequence[Tensor]) -> Any:
        total: Tensor | None = None
        for part in parts:
            total = part if total is None else total.to(part.device) + part
        return None if total is None else self._when_there(key, total)

    def _part(self, axis: Axis) -> WeightSlices | None:
        if self.state.parameter_owner is not None:
            return None  # gathered from one owner each, when they are read
        if axis.name not in self._parts:
            over = set(self._axes_of(axis))
            alike = [e for e in self.state.entries if not over & set(e.spec.axes) and e.param.is_floating_point()]
            self._parts[axis.name] = list(_weight_slices(alike))
        parts = self._parts[axis.name]
        return parts[self._turns.get(axis.name, 0) % len(parts)] if parts else None

    def _axes_of(self, axis: Axis) -> Iterator[str]:
        """The axes of the grid, and views of them, along which ranks of an axis differ."""
        me = axis.ranks[axis.rank]
        for name, each in self.state.axes.items():
            if each.size > 1 and set(each.ranks) & set(axis.ranks) > {me}:
                yield name

    def _when_there(self, key: str, x: Tensor) -> Any:
        """The numbers in ``x``; on a GPU those of the call before, None at first."""
        if not has_data(x):
            return None
        if not x.is_cuda:
            return x.tolist()
        before = self._late.get(key)
        there = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
        self._late[key] = there, torch.cuda.current_stream(x.device).record_event()
        if before is None:
            return None
        before[1].synchronize()
        return before[0].tolist()

    # --- where ranks differ

    def _raise(self, axis: Axis, inputs: Collection[Any] = ()) -> None:
        details = self._details(axis, inputs)
        every = all_gather_objects(details, axis)
        name = next((name for name in ORDER if any(theirs[name] != every[0][name] for theirs in every)), ORDER[-1])
        values = [theirs[name] for theirs in every]
        odd = next(rank for rank, value in enumerate(values) if values.count(value) == min(map(values.count, values)))
        other = next((rank for rank, value in enumerate(values) if value != values[odd]), odd)
        fact = COMPARED_VALUES[name]
        raise InputError(
            f"Ranks {axis.ranks[other]} and {axis.ranks[odd]} of {len(every)} {axis.name.replace('_', ' and ')} ranks "
            f"have come apart: they have different {fact.what} "
            f"({_format_value(values[other])}, and rank {axis.ranks[odd]} {_format_value(values[odd])})",
            rule=fact.rule,
            remedy=fact.remedy,
        )

    def _details(self, axis: Axis, inputs: Collection[Any]) -> dict[str, Any]:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        part = self._part(axis)
        held = {e.name: checksum(e.param) for e, _ in part.stretches if has_data(e.param)} if part is not None else {}
        return {
            "mode": "train" if self.training else "eval",
            "batch": [(tuple(x.shape), checksum(x)[1]) for x in tensors],
            "steps": self.steps,
            "options": ": ".join(map(str, self.options)),
            "weights": held,
        }


def _format_value(value: Any) -> str:
    """What a rank has, in a message."""
    if isinstance(value, dict):
        names = ", ".join(list(value)[:3])
        return f"values of its own in {names}{' and others' if len(value) > 3 else ''}"
    if isinstance(value, list):
        return f"a batch of {', '.join(str(shape) for shape, _ in value) or 'nothing'}"
    return str(value)[:200]


def _hash_63_bits(value: Any) -> int:
    """A whole number of less than 63 bits, the same in every process."""
    if isinstance(value, int):
        return value & (2**62 - 1)
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def _bits_of(number: float) -> int:
    """A number as a whole one of 64 bits."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _number_of(bits: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number


def _projected(x: Tensor, number: int) -> Tensor:
    """Of a row of numbers the sum under random signs, others for each ``number``, and the sum of squares."""
    wide, signs = x.double(), _signs(x.device)
    rows = [wide[at : at + len(signs)] for at in range(0, len(wide), len(signs))]
    sums = torch.stack([row @ signs[: len(row)] for row in rows])
    return torch.stack([sums @ _signs(x.device).roll(number)[: len(sums)], wide @ wide])


_SIGNS: dict[torch.device, Tensor] = {}


def _signs(device: torch.device) -> Tensor:
    """Signs that are alike in every process."""
    known = _SIGNS.get(device)
    if known is None:
        drawn = torch.randint(0, 2, (SIGNS,), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
        known = (drawn.double() * 2 - 1).to(device)
        if has_data(known):  # not those of a trace
            _SIGNS[device] = known
    return known


def _numbers_of(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """The options of a group that are numbers."""
    found = []
    for name, value in group.items():
        values = value if isinstance(value, tuple | list) and name != "params" else (value,)
        found += [v for v in values if isinstance(v, int | float)]
        found += [v.item() for v in values if isinstance(v, Tensor) and v.numel() == 1 and not v.is_cuda]
    return tuple(found)


# ----------------------------------------------------------------------------------------------------- parts of weights


@dataclass(frozen=True)
class WeightSlices:
    """Stretches of flat parameters, which one message is about."""

    stretches: tuple[tuple[ParamEntry, slice], ...]


def _weight_slices(entries: Sequence[ParamEntry]) -> Iterator[WeightSlices]:
    """All numbers of some parameters, in parts of about as many bytes: ``PARTS`` at the most."""
    total = sum(e.param.numel() * e.param.element_size() for e in entries)
    room = budget = max(total / PARTS, PART_BYTES)
    stretches: list[tuple[ParamEntry, slice]] = []
    for entry in entries:
        at, numel, width = 0, entry.param.numel(), entry.param.element_size()
        while at < numel:
            count = min(max(int(room // width), 1), numel - at)
            stretches.append((entry, slice(at, at + count)))
            at, room = at + count, room - count * width
            if room < width:
                yield WeightSlices(tuple(stretches))
                stretches, room = [], budget
    if stretches:
        yield WeightSlices(tuple(stretches))


# ------------------------------------------------------------------------------------------------ steps of optimizers

MODELS = "_shardformer_models"
"""The attribute of an optimizer that holds how many parameters it has, and the tables of their models."""
STEP_PATCH = Patch(
    "torch.optim.Optimizer: global hook after step()",
    "shardformer.consistency.rank_divergence",
    "counts steps and reads learning rates, to notice ranks that diverge",
)


def _after_optimizer_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for state in models_trained_by(optimizer):
        if isinstance(state.monitor, ConsistencyMonitor):
            state.monitor.record_step(optimizer)


def models_trained_by(optimizer: Optimizer) -> Collection[ShardingMetadata]:
    """The tables of the models whose parameters an optimizer has, in an order that all ranks have in common."""
    if isinstance(own := optimizer.__dict__.get(METADATA_ATTRIBUTE), ShardingMetadata):
        return [own]  # zero's, which has pieces in the place of parameters
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    known = optimizer.__dict__.get(MODELS)
    if known is None or known[0] != count or any(table() is None for table in known[1]):
        tables = tables_of(p for group in optimizer.param_groups for p in group["params"])
        known = optimizer.__dict__[MODELS] = count, tuple(map(ref, tables))
    return [table for each in known[1] if (table := each()) is not None]


def check_step(state: ShardingMetadata, inputs: Collection[Any], drew: bool = False) -> bool:
    """The ranks that are given one batch draw alike, and notice where they have come apart: see
    ``broadcast_random_state``."""
    axis, device, watch = state.same_batch_axis, state.context.device, state.monitor
    if watch is None or axis.size == 1:
        return broadcast_random_state(axis, device, drew)
    given = inputs if state.request.extra.get("check_inputs", True) else ()
    return broadcast_random_state(
        axis, device, drew, watch.values_to_gather(axis, given), lambda every: watch.compare(every, axis, given)
    )


def check_same_batch(values: list[Any], axis: Axis) -> None:
    """Raises InputError on every rank when ranks were not fed the same that should be. A few numbers are gathered."""
    if differs_across_ranks([checksum(v) for v in values if isinstance(v, Tensor)], axis):
        raise InputError(
            f"The {axis.size} {axis.name.replace('_', ' and ')} ranks were fed different batches",
            rule="Tensor and sequence ranks compute one batch together; only data ranks have batches of their own",
            remedy="Draw the batch by the data rank: context.data.rank of context.data.size, not the global rank",
        )
