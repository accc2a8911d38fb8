"""Detect ranks whose weights, batches or optimizers have diverged, without additional collectives.

The compared numbers are appended to messages that training sends anyway.

Compared in every training step, and between which ranks:

                 same batch       data ranks   stages
    mode               x                x          x       whether the model is in training or eval mode
    batch              x                           x       inputs of the forward pass
    steps              x                x          x       number of optimizer steps
    options            x                x          x       learning rates and other numbers in parameter groups
    weights            x                x          x       replicated weights, one slice per step

Pipeline stages train different parameters, and some stages may train none. They compare the weights that they share,
such as tied embeddings. Stages whose optimizer has stepped compare
the number of batches after which it did so. Stages compare options only if each has a single optimizer of the same
class with a single parameter group, because several optimizers may have different options on purpose.

Ranks that process the same batch compare exact integers, together with their random states. For weights, they compare
a sum with random signs, which differs about as much as the weights do (Achlioptas, "Database-friendly random
projections", 2003). Each of these ranks computes the gradients of replicated parameters itself, and GPU kernels that
add numbers in a different order round differently. Data ranks all-reduce their gradients, so their weights are bitwise
identical. They compare the bits of a hash, each encoded as 1 or -1 and appended to the last gradient bucket: if n ranks
agree, each sum is n or -n in any precision, and every rank sees the same sum. Ranks exchange details only if they
differ.
"""

from __future__ import annotations

import gc
import hashlib
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import isnan
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardformer.comm.collective_call import wait_for_all_ranks
from shardformer.comm.collectives import all_gather_objects, compute_numel_and_hash, compute_tensor_hash
from shardformer.consistency.initial_weights import broadcast_random_state, is_different_across_ranks
from shardformer.errors import ConfigError, InputError
from shardformer.gradients.buckets import GradientSlot
from shardformer.gradients.reducer import GradientReducer
from shardformer.layout.sharding_metadata import (
    METADATA_ATTRIBUTE,
    ParamEntry,
    ShardingMetadata,
    get_local_metadata,
    group_params_by_metadata,
)
from shardformer.mesh.parallel_context import Axis
from shardformer.torch_compat import (
    current_graph_task_id,
    disable_current_modes,
    has_real_data,
    is_sharded_by_fsdp,
)
from shardformer.torch_patches import Apply, LibraryPatch

BITS = 32  # number of bits of the hash that data ranks compare. One difference in 4e9 is missed
PARTS = 100  # maximum number of steps in which all weights are compared once
PART_BYTES = 2**18  # minimum number of bytes of weights that one step compares
ROUNDINGS, MOST = 100, 0.01
"""Tolerance for replicated weights, relative to their norm: a number of machine epsilons, and an upper limit."""
SIGNS = 2**14  # number of random signs. Longer tensors are split into rows of this length, each with a further sign
WeightSlices = list[tuple[ParamEntry, slice]]


@dataclass(frozen=True)
class RankDivergenceErrorText:
    """Error text for a value that should be identical on several ranks but is not."""

    value_name: str
    rule: str
    remedy: str


COMPARED_VALUES = {
    "mode": RankDivergenceErrorText(
        "modes (train or eval)",
        "All ranks must be in training mode, or all in eval mode, at the same time",
        "Call model.train() and model.eval() on all ranks, not under `if rank == 0:`",
    ),
    "batch": RankDivergenceErrorText(
        "batches",
        "Tensor and sequence parallel ranks must process the same batch. Only data ranks process different batches",
        "Select the batch by context.data.rank and context.data.size, not by the world rank, and seed samplers with "
        "the data rank",
    ),
    "steps": RankDivergenceErrorText(
        "numbers of optimizer steps",
        "If a rank skips a step, its weights differ from then on",
        "Call optimizer.step() on all ranks. If a GradScaler skipped a step on one rank, use "
        "shardformer.shard_optimizer(..., precision='fp16'), which skips steps on all ranks",
    ),
    "options": RankDivergenceErrorText(
        "learning rates or other optimizer options",
        "All ranks must use the same optimizer options in every step",
        "Call scheduler.step() on all ranks, with the same metric. To use different learning rates, define parameter "
        "groups that are the same on all ranks",
    ),
    "weights": RankDivergenceErrorText(
        "replicated weights",
        "Ranks must update replicated weights identically",
        "Look for code that runs differently on one rank: gradient clipping other than shardformer.clip_grad_norm_, "
        "weights changed under `if rank == 0:`, or different versions of a library",
    ),
}
ORDER = tuple(COMPARED_VALUES)
KIND_SHIFT = 40  # the bits above encode the class of the optimizer, and the bits below the values of its options


@dataclass(eq=False)
class RankConsistencyMonitor:
    """Monitor that compares the training mode, batch, optimizer options and replicated weights of ranks."""

    state: ShardingMetadata
    training: bool = True
    steps: int = 0
    options: tuple[Any, ...] = ()
    rounds: int = 0
    rounds_of_stages: int = 0
    has_several_optimizers: bool = False
    _has_stepped: bool = False
    _optimizers: WeakSet[Optimizer] = field(default_factory=WeakSet)
    _turns: dict[str, int] = field(default_factory=dict)
    _parts: dict[str, list[WeightSlices]] = field(default_factory=dict)
    _late: dict[str, tuple[Tensor, torch.cuda.Event]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _get_random_signs(self.state.context.device)  # allocated before the memory of a step is measured

    def __deepcopy__(self, memo: dict[int, Any]) -> RankConsistencyMonitor:
        return RankConsistencyMonitor(deepcopy(self.state, memo), self.training)  # a copied model has no optimizer

    def record_optimizer_step(self, optimizer: Optimizer) -> None:
        """Count an optimizer step, and record numeric options such as the learning rate."""
        self.steps += 1
        self._has_stepped = True
        self._optimizers.add(optimizer)
        self.state.context.traffic.steps = self.steps
        self.options = type(optimizer).__name__, tuple(map(get_numeric_options, optimizer.param_groups))

    # --- ranks that process the same batch

    def encode_training_state_as_ints(self, axis: Axis, forward_inputs: Collection[Any] = ()) -> list[int]:
        """Encode the training mode, batch, optimizer and weights as integers that ranks can compare."""
        options = _hash_to_62_bits(hash(self.options[1:]))
        projection = (
            self._compute_weight_projection_and_norm(axis) if self.training else (0.0, 0.0)
        )  # evaluation changes no weights
        return [
            int(self.training),
            self.hash_forward_inputs(forward_inputs),
            self.steps,
            options,
            *struct.unpack("<2q", struct.pack("<2d", *projection)),
        ]

    def count_batches_with_optimizer_step(self, is_stage_frozen: bool) -> int:
        """Return the number of batches after which this pipeline stage made an optimizer step.

        Call this once before each batch. Returns 0 for a stage without trainable parameters. When such a stage trains
        again, its count continues from ``rounds_of_stages``, the count of the other stages.
        """
        if is_stage_frozen:
            self.rounds = 0
        elif self._has_stepped:
            self.rounds = (self.rounds or self.rounds_of_stages) + 1
        self._has_stepped = False
        return self.rounds

    def hash_optimizer_options(self) -> int:
        """Hash the class and options of the optimizer.

        Returns 0 if there are several optimizers or parameter groups. Stages have different parameters, so their
        optimizers and groups may differ.
        """
        has_one_group = len(self.options) == 2 and len(self.options[1]) == 1
        if not has_one_group or len(self._optimizers) > 1 or self.has_several_optimizers:
            return 0
        kind, numbers = (
            _hash_to_62_bits(self.options[0]) % 2**15 + 1,
            _hash_to_62_bits(hash(self.options[1])) % 2**KIND_SHIFT,
        )
        return int(kind << KIND_SHIFT | numbers)

    def hash_forward_inputs(self, inputs: Collection[Any]) -> int:
        """Hash the input tensors. On a GPU, hash shapes and the previous batch's values, to avoid a synchronization."""
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        on_gpu = [compute_tensor_hash(x) * n for n, x in enumerate(tensors, 1) if x.is_cuda]
        previous = self._to_list_without_sync("batch", torch.stack(on_gpu).sum()) if on_gpu else None
        return _hash_to_62_bits(
            [previous, *(tuple(x.shape) if x.is_cuda else compute_numel_and_hash(x) for x in tensors)]
        )

    def check_gathered_states_match(
        self, states_by_rank: Sequence[Sequence[int]], axis: Axis, forward_inputs: Collection[Any] = ()
    ) -> None:
        """Raise InputError on every rank if the gathered training states differ."""
        weights = len(ORDER) - 1
        projections = [struct.unpack("<2d", struct.pack("<2q", *values[weights:])) for values in states_by_rank]
        if any(
            values[:weights] != states_by_rank[0][:weights] for values in states_by_rank
        ) or not self._are_projections_close(projections):
            self._raise_divergence_error(axis, forward_inputs)
        self._turns[axis.name] = self._turns.get(axis.name, 0) + 1

    # --- data ranks

    def compute_state_hash_bits(self, axis: Axis) -> list[float]:
        """Hash the training state to a list of 1.0 and -1.0, so that an all-reduce can compare ranks."""
        known = [self.training, self.steps, hash(self.options[1:]), self._hash_replicated_weights(axis)]
        number = int.from_bytes(hashlib.sha256(repr(known).encode()).digest()[: BITS // 8], "big")
        return [1.0 if number >> i & 1 else -1.0 for i in range(BITS)]

    def check_all_reduced_hash_signs(self, reduced_signs: Tensor, axis: Axis) -> None:
        """Raise InputError on every rank if the training states of data parallel ranks differ.

        On a GPU, this checks the sums of the previous step to avoid a synchronization.
        """
        self._turns[axis.name] = self._turns.get(axis.name, 0) + 1
        found = self._to_list_without_sync(f"bits {axis.name}", reduced_signs.float().abs().min())
        # a rank that differs reduces a sum by 2. With more than 256 ranks, 16-bit sums are not exact enough
        if found is not None and found <= axis.size - 2:
            self._raise_divergence_error(axis)

    # --- weights

    def _hash_replicated_weights(self, axis: Axis) -> int:
        return self._hash_weights(f"weights {axis.name}", self._get_weights_to_compare(axis))

    def hash_shared_weights(self, stages: tuple[int, ...], shared_entries: Sequence[ParamEntry]) -> int:
        """Hash a slice of the weights that pipeline stages share. All of these stages must call this method."""
        values_are_known = all(has_real_data(entry.param) for entry in shared_entries)
        if not shared_entries or self.state.parameter_owner is not None or not values_are_known:
            return 0
        key = f"stages {stages}"
        if key not in self._parts:
            self._parts[key] = list(_split_weights_into_per_step_slices(shared_entries))
        self._turns[key] = turn = self._turns.get(key, -1) + 1
        part = self._parts[key][turn % len(self._parts[key])]
        return self._hash_weights(key, [entry.param.detach().reshape(-1)[at] for entry, at in part])

    def _hash_weights(self, cache_key: str, weights: Sequence[Tensor]) -> int:
        numbered = enumerate(weights, 1)
        found = self._sum_tensors_without_gpu_sync(cache_key, [compute_tensor_hash(x) * n for n, x in numbered])
        return 0 if found is None else _hash_to_62_bits(int(found))

    def _compute_weight_projection_and_norm(self, axis: Axis) -> tuple[float, float]:
        slices = self._get_weights_to_compare(axis)
        with disable_current_modes():  # not part of the step that a recorder or a memory trace measures
            sums = [_compute_projection_and_squared_norm(x, number) for number, x in enumerate(slices)]
        found = self._sum_tensors_without_gpu_sync(f"projection {axis.name}", sums) or (0.0, 0.0)
        return found[0], found[1] ** 0.5

    def _are_projections_close(self, projections: Sequence[Sequence[float]]) -> bool:
        """Return whether the weight projections of all ranks agree up to rounding errors."""
        (first, norm), *others = projections
        widths = [torch.finfo(e.param.dtype).eps for e in self.state.entries if e.param.is_floating_point()]
        room = min(ROUNDINGS * max(widths, default=0.0), MOST) * norm
        return all(x == first or abs(x - first) <= room or (isnan(x) and isnan(first)) for x, _ in others)

    def _get_weights_to_compare(self, axis: Axis) -> list[Tensor]:
        """Return flat slices of the replicated weights that this step compares over an axis."""
        part = self._get_current_weight_slices(axis)
        if part is None or not all(has_real_data(entry.param) for entry, _ in part):
            return []
        return [entry.param.detach().reshape(-1)[part_slice] for entry, part_slice in part]

    def _sum_tensors_without_gpu_sync(self, cache_key: str, tensors: Sequence[Tensor]) -> Any:
        total: Tensor | None = None
        for tensor in tensors:
            total = tensor if total is None else total.to(tensor.device) + tensor
        return None if total is None else self._to_list_without_sync(cache_key, total)

    def _get_current_weight_slices(self, axis: Axis) -> WeightSlices | None:
        if self.state.parameter_owner is not None:
            return None  # each parameter is gathered from its owner when it is read
        if axis.name not in self._parts:
            over = set(self._iter_overlapping_axis_names(axis))
            replicated = [e for e in self.state.entries if not over & set(e.spec.axes) and e.param.is_floating_point()]
            self._parts[axis.name] = list(_split_weights_into_per_step_slices(replicated))
        parts = self._parts[axis.name]
        return parts[self._turns.get(axis.name, 0) % len(parts)] if parts else None

    def _iter_overlapping_axis_names(self, axis: Axis) -> Iterator[str]:
        """Yield the names of mesh axes that contain this rank and another rank of ``axis``."""
        me = axis.ranks[axis.rank]
        for name, each in self.state.axes.items():
            if each.size > 1 and set(each.ranks) & set(axis.ranks) > {me}:
                yield name

    def _to_list_without_sync(self, cache_key: str, tensor: Tensor) -> Any:
        """Return a tensor's values. On a GPU, return those of the previous call, to avoid a synchronization."""
        if not has_real_data(tensor):
            return None
        if not tensor.is_cuda:
            return tensor.tolist()
        before = self._late.get(cache_key)
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        self._late[cache_key] = there, torch.cuda.current_stream(tensor.device).record_event()
        if before is None:
            return None
        before[1].synchronize()
        return before[0].tolist()

    # --- where ranks differ

    def _raise_divergence_error(self, axis: Axis, forward_inputs: Collection[Any] = ()) -> None:
        every = all_gather_objects(self._get_local_values_for_error_message(axis, forward_inputs), axis)
        name = next((name for name in ORDER if any(theirs[name] != every[0][name] for theirs in every)), ORDER[-1])
        values = [theirs[name] for theirs in every]
        odd = next(rank for rank, value in enumerate(values) if values.count(value) == min(map(values.count, values)))
        other = next((rank for rank, value in enumerate(values) if value != values[odd]), odd)
        fact = COMPARED_VALUES[name]
        compared = (odd,) if name == "weights" else (other, odd)
        details = ", ".join(f"rank {axis.ranks[rank]}: {_format_diverging_value(values[rank])}" for rank in compared)
        first, second, group = axis.ranks[other], axis.ranks[odd], axis.name.replace("_", " and ")
        raise InputError(
            f"Ranks {first} and {second} of the {axis.size} {group} ranks have different {fact.value_name} "
            f"({details}).",
            rule=fact.rule,
            remedy=fact.remedy,
        )

    def _get_local_values_for_error_message(self, axis: Axis, forward_inputs: Collection[Any]) -> dict[str, Any]:
        tensors = [x for x in forward_inputs if isinstance(x, Tensor)]
        part = self._get_current_weight_slices(axis)
        sums = (
            {e.name: compute_numel_and_hash(e.param) for e, _ in part if has_real_data(e.param)}
            if part is not None
            else {}
        )
        return {
            "mode": "train" if self.training else "eval",
            "batch": [(tuple(x.shape), compute_numel_and_hash(x)[1]) for x in tensors],
            "steps": self.steps,
            "options": ": ".join(map(str, self.options)),
            "weights": sums,
        }


def _format_diverging_value(value: Any) -> str:
    if isinstance(value, dict):
        names = ", ".join(list(value)[:3])
        return f"{names}{' and others' if len(value) > 3 else ''}"
    if isinstance(value, list):
        return f"a batch of shapes {', '.join(str(shape) for shape, _ in value) or 'nothing'}"
    return str(value)[:200]


def _hash_to_62_bits(value: Any) -> int:
    """Hash a value to a non-negative integer below 2**62 that is the same in every process."""
    if isinstance(value, int):
        return value & (2**62 - 1)
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def _compute_projection_and_squared_norm(vector: Tensor, sign_shift: int) -> Tensor:
    """Compute the sum of a vector with random signs (a random projection), and its squared norm."""
    wide, signs = vector.double(), _get_random_signs(vector.device)
    rows = [wide[at : at + len(signs)] for at in range(0, len(wide), len(signs))]
    sums = torch.stack([row @ signs[: len(row)] for row in rows])
    return torch.stack([sums @ _get_random_signs(vector.device).roll(sign_shift)[: len(sums)], wide @ wide])


_SIGNS: dict[torch.device, Tensor] = {}


def _get_random_signs(device: torch.device) -> Tensor:
    """Return a vector of random signs (1 or -1) that is the same in every process."""
    known = _SIGNS.get(device)
    if known is None:
        drawn = torch.randint(0, 2, (SIGNS,), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
        known = (drawn.double() * 2 - 1).to(device)
        if has_real_data(known):  # not the fake tensor of a trace
            _SIGNS[device] = known
    return known


def get_numeric_options(param_group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the numbers in a parameter group of an optimizer, such as its learning rate."""
    found = []
    for name, value in param_group.items():
        values = value if isinstance(value, tuple | list) and name != "params" else (value,)
        found += [v for v in values if isinstance(v, int | float)]
        found += [v.item() for v in values if isinstance(v, Tensor) and v.numel() == 1 and not v.is_cuda]
    return tuple(found)


def _split_weights_into_per_step_slices(param_entries: Sequence[ParamEntry]) -> Iterator[WeightSlices]:
    """Split the replicated weights into up to 100 groups. Each training step compares one group."""
    total = sum(e.param.numel() * e.param.element_size() for e in param_entries)
    room = budget = max(total / PARTS, PART_BYTES)
    slices: WeightSlices = []
    for entry in param_entries:
        at, numel, width = 0, entry.param.numel(), entry.param.element_size()
        while at < numel:
            count = min(max(int(room // width), 1), numel - at)
            slices.append((entry, slice(at, at + count)))
            at, room = at + count, room - count * width
            if room < width:
                yield slices
                slices, room = [], budget
    if slices:
        yield slices


MODELS = "_shardformer_models"
"""Attribute of an optimizer that caches its number of parameters and the metadata of the models it trains."""


def _optimizer_step_post_hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for state in get_metadata_of_trained_models(optimizer):
        if isinstance(state.monitor, RankConsistencyMonitor):
            state.monitor.record_optimizer_step(optimizer)


MONITOR_PATCHES: Mapping[LibraryPatch, Apply] = {
    LibraryPatch(
        "torch.optim.Optimizer: global hook after step()",
        "shardformer.consistency.rank_divergence",
        "counts steps and reads learning rates, to detect diverging ranks",
    ): lambda: register_optimizer_step_post_hook(_optimizer_step_post_hook).remove,
}


def get_metadata_of_trained_models(optimizer: Optimizer) -> Collection[ShardingMetadata]:
    """Return the sharding metadata of an optimizer's models, in the same order on all ranks."""
    if isinstance(own := optimizer.__dict__.get(METADATA_ATTRIBUTE), ShardingMetadata):
        return [own]  # a ZeRO optimizer, which has slices instead of parameters
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    known = optimizer.__dict__.get(MODELS)
    if known is None or known[0] != count or any(table() is None for table in known[1]):
        tables = group_params_by_metadata(p for group in optimizer.param_groups for p in group["params"])
        known = optimizer.__dict__[MODELS] = count, tuple(map(ref, tables))
    return [table for each in known[1] if (table := each()) is not None]


def sync_random_state_and_check_ranks_agree(
    metadata: ShardingMetadata, forward_inputs: Collection[Any], has_drawn_random_numbers: bool = False
) -> bool:
    """Synchronize the random states of the ranks with the same batch, and check that these ranks agree.

    Raises InputError if they have diverged. See ``broadcast_random_state``.
    """
    axis, device, monitor = metadata.same_batch_axis, metadata.context.device, metadata.monitor
    if monitor is None or axis.size == 1:
        return broadcast_random_state(axis, device, has_drawn_random_numbers)
    forward_inputs = forward_inputs if metadata.request.extra.get("check_inputs", True) else ()
    return broadcast_random_state(
        axis,
        device,
        has_drawn_random_numbers,
        monitor.encode_training_state_as_ints(axis, forward_inputs),
        lambda gathered: monitor.check_gathered_states_match(gathered, axis, forward_inputs),
    )


def check_ranks_received_same_batch(forward_inputs: list[Any], axis: Axis) -> None:
    """Raise InputError on every rank if the ranks of an axis received different batches."""
    if is_different_across_ranks([compute_numel_and_hash(v) for v in forward_inputs if isinstance(v, Tensor)], axis):
        group = axis.name.replace("_", " and ")
        raise InputError(
            f"The {axis.size} {group} ranks received different batches, but must process the same batch.",
            remedy="Select the batch by context.data.rank and context.data.size instead of the world rank. For random "
            "batches, set the same seed with launch_from_torch(seed=0).",
        )


PASSES = "_shardformer_passes"  # attribute of an optimizer with the number of gradient reductions at its last step


def check_gradients_before_step(optimizer: Optimizer) -> None:
    """Reduce gradients that ``no_sync`` has accumulated, and check that all ranks agree, before an optimizer step.

    Raises ConfigError on all ranks if they do not agree. Communicates the gradients of backward passes in ``no_sync``,
    or a checksum of each gradient if no gradients were reduced since the last step.
    """
    found = [(state, _get_gradient_reducers(state)) for state in get_metadata_of_trained_models(optimizer)]
    found = [(state, reducers) for state, reducers in found if reducers]
    if not found:
        return
    if current_graph_task_id() >= 0:
        raise ConfigError(
            f"{type(optimizer).__name__}.step was called during a backward pass, for example by a parameter hook.",
            remedy="Call optimizer.step() after loss.backward(). To save memory for gradients, use "
            "shard_optimizer(..., stage=2).",
        )
    for reducer in (each for _, reducers in found for each in reducers if each.was_paused and not each.is_paused):
        reducer.start_reduction()
        reducer.finish_reduction()
    passes = [sum(each.passes for each in reducers) for _, reducers in found]
    if passes == optimizer.__dict__.get(PASSES, [0] * len(passes)):
        for _, reducers in found:
            _check_ranks_have_same_gradients(optimizer, reducers)
    optimizer.__dict__[PASSES] = passes


def _get_gradient_reducers(metadata: ShardingMetadata) -> list[GradientReducer]:
    return [each for each in metadata.reducers if isinstance(each, GradientReducer) and each.sums]


def _check_ranks_have_same_gradients(optimizer: Optimizer, reducers: Sequence[GradientReducer]) -> None:
    """Raise ConfigError if the gradients of a replicated parameter differ between ranks. All ranks must call this."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    over: dict[tuple[int, ...], list[GradientSlot]] = {}
    for reducer in (each for each in reducers if not each.is_paused):
        for gradient in reducer.gradients:
            if id(gradient.param) in own and gradient.axis.size > 1 and not gradient.is_shared:
                over.setdefault(gradient.axis.ranks, []).append(gradient)
    name = type(optimizer).__name__
    for gradients in over.values():
        call = f"{name}.step, without a backward pass since its last step"
        if found := _find_different_gradient(call, [each.param for each in gradients], [gradients[0].axis]):
            raise ConfigError(
                f"{name}.step cannot update {gradients[found[0]].entry.name}, because {found[1]}.",
                remedy="Call loss.backward() instead of torch.autograd.grad, or assign the same gradient to p.grad "
                "on all ranks.",
            )


def _find_different_gradient(call_name: str, params: Sequence[Tensor], axes: Sequence[Axis]) -> tuple[int, str] | None:
    """Return the index of the first parameter whose gradient differs between ranks, with a description, or None."""
    rows = [[_compute_gradient_checksum(p.grad) for p in params]]
    for axis in axes:
        wait_for_all_ranks(call_name, axis)
        rows = [row for gathered in all_gather_objects(rows, axis) for row in gathered]
    for index, values in enumerate(zip(*rows, strict=True)):
        if len(set(values)) > 1:
            return index, "only some ranks have a gradient" if None in values else "ranks have different gradients"
    return None


NUM_STEPS, CONTAINED_MODELS = "_shardformer_num_steps", "_shardformer_contained_models"
"""Attributes of an optimizer: its number of steps, and the sharded models in a module that contains its parameter."""


def check_gradients_outside_sharded_models(optimizer: Optimizer) -> None:
    """Raise ConfigError on all ranks if gradients of parameters outside a sharded submodule differ between data ranks.

    Such gradients are not reduced, unless your script or another library reduces them. Before steps 1, 2, 4, 8 and so
    on, this communicates a checksum of each gradient over data. Other ranks have the same outputs of the submodule.
    """
    steps = optimizer.__dict__[NUM_STEPS] = optimizer.__dict__.get(NUM_STEPS, 0) + 1
    if steps & (steps - 1):
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    tables = group_params_by_metadata(params)
    known = {id(entry.param) for entries in tables.values() for entry in entries}
    known.update(id(p) for table in get_local_metadata() for p in _get_zero_shards(table))
    outside = [p for p in params if id(p) not in known and not is_sharded_by_fsdp(p)]
    models = list(tables) or (_find_contained_models(optimizer, outside[0]) if outside else [])
    axes = {table.context.data.ranks: table.context.data for table in models if _can_compare_data_ranks(table)}
    if not outside or not axes:
        return
    name = type(optimizer).__name__
    call = f"{name}.step, with parameters outside the sharded model"
    if found := _find_different_gradient(call, outside, list(axes.values())):
        raise ConfigError(
            f"{name}.step cannot update a parameter of shape {tuple(outside[found[0]].shape)}, because {found[1]}.",
            rule="shard_model reduces only the gradients of the module that it receives, and this parameter is outside "
            "that module.",
            remedy="Call shard_model(whole_model, context=context) with the model that contains all trained modules. "
            "Or average the other gradients over the ranks before step(), for example with DistributedDataParallel.",
        )


def _can_compare_data_ranks(metadata: ShardingMetadata) -> bool:
    return metadata.monitor is not None and metadata.context.data.size > 1


def _get_zero_shards(metadata: ShardingMetadata) -> list[Tensor]:
    owner = metadata.gradient_owner
    return [p for group in owner.param_groups for p in group["params"]] if owner is not None else []


def _find_contained_models(optimizer: Optimizer, param: Tensor) -> list[ShardingMetadata]:
    """Find the sharded models in the innermost module that contains one and the parameter of the optimizer.

    At the first step, this searches the objects that refer to the parameter, to its module, and so on.
    """
    known = optimizer.__dict__.get(CONTAINED_MODELS)
    if known is None and (local := list(filter(_can_compare_data_ranks, get_local_metadata()))):
        level: list[Any] = [param]
        seen = {id(level)}
        found: set[Any] = set()
        while level and found.isdisjoint(local):
            referrers = gc.get_referrers(*level)
            level = [x for x in referrers if id(x) not in seen and (type(x) is dict or issubclass(type(x), nn.Module))]
            seen.update(map(id, level))
            modules = [module for x in level if type(x) is not dict for module in x.modules()]
            found.update(vars(module).get(METADATA_ATTRIBUTE) for module in modules)
        known = optimizer.__dict__[CONTAINED_MODELS] = [ref(table) for table in local if table in found]
    return [table for each in known or () if (table := each()) is not None]


def _compute_gradient_checksum(grad: Tensor | None) -> tuple[int, int] | None:
    if grad is None or not has_real_data(grad):
        return None
    return compute_numel_and_hash(grad.detach().to_dense() if grad.is_sparse else grad.detach())
