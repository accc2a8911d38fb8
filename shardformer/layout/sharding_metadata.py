"""Metadata of a sharded model: the layout of each parameter and the reduction of its gradient.

A reduction has three independent parts: the axes over which gradients are summed, the divisor of the sum, and the axes
over which squared norms are summed. Token weights must be applied to the loss before backward, because a reduced
gradient mixes the tokens of several ranks.

Tied tensors and views are found by their overlapping memory.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NoReturn, Protocol, SupportsIndex
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError, check_argument
from shardformer.layout.activation_layout import ActivationLayout, ModelRegion
from shardformer.layout.shard_export_guard import disable_pickling, guard_state_dict_shards
from shardformer.layout.shard_spec import ShardSpec
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.torch_compat import get_storage_id, has_real_data, is_torch_compile_wrapper, is_wrapper_tensor


@dataclass(frozen=True)
class MemoryRange:
    """Range of bytes that a tensor occupies in its storage, with its dtype, shape and strides."""

    storage: int
    begin: int
    end: int
    view: tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> MemoryRange:
        span = tensor.numel()
        if span and not tensor.is_contiguous():
            span = 1 + sum([(n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)])
        begin = int(tensor.storage_offset()) * tensor.element_size()
        view = (tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
        address = tensor.untyped_storage().data_ptr() if has_real_data(tensor) and not is_wrapper_tensor(tensor) else 0
        return cls(address or get_storage_id(tensor), begin, begin + span * tensor.element_size(), view)


OverlapGroup = dict[str, MemoryRange]


def group_overlapping_tensors(named_tensors: Iterable[tuple[str, Tensor]]) -> list[OverlapGroup]:
    """Find the groups of tensors that share memory. Each group is a dict from names to memory ranges."""
    ranges = []
    for at, (name, x) in enumerate(named_tensors):
        memory = MemoryRange.from_tensor(x)
        if memory.begin < memory.end:
            ranges.append((memory.storage, memory.begin, at, name, memory))
    groups: list[OverlapGroup] = []
    storage, end = -1, 0
    for _, _, _, name, memory in sorted(ranges):
        if memory.storage != storage or memory.begin >= end:
            groups.append({})
            storage, end = memory.storage, memory.end
        groups[-1][name] = memory
        end = max(end, memory.end)
    return [group for group in groups if len(group) > 1]


def find_view_and_parameter_names(
    model: nn.Module, named_params: Collection[tuple[str, Tensor]]
) -> tuple[str, str] | None:
    """Find a buffer or attribute that shares memory with a parameter. Return both names, or None."""
    known = {id(x) for _, x in named_params}
    views = [(name, x) for name, x in _iter_buffers_and_attributes(model) if id(x) not in known]
    names = {name for name, _ in views}
    for group in group_overlapping_tensors([*named_params, *views]):
        view = next((name for name in group if name in names), None)
        param = next((name for name in group if name not in names), None)
        if view is not None and param is not None:
            return view, param
    return None


def _iter_buffers_and_attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        tensors = [*module._buffers.items(), *vars(module).items()]
        yield from (
            (f"{path}.{name}".lstrip("."), x)
            for name, x in tensors
            if type(x) is Tensor and x.layout == torch.strided and not x.is_meta
        )


def max_abs_difference(a: Tensor, b: Tensor) -> float:
    """Compute the largest absolute difference between two tensors. Returns inf for NaN or different shapes."""
    if a.shape != b.shape:
        return inf
    largest = float((a - b).detach().abs().max()) if a.numel() else 0.0
    return largest if largest == largest else inf


@dataclass(frozen=True)
class GradientReduction:
    """Describes how a parameter's gradient is summed over ranks and divided."""

    sum_over: tuple[str, ...] = ()  # axes over which the gradient is all-reduced
    divisor: float = 1.0  # divisor of the sum. It may differ from the group size, even for a group of one rank
    norm_over: tuple[str, ...] = ()  # axes whose ranks have different shards of the gradient, or no gradient
    stages: tuple[int, ...] = ()  # ranks of ``pipe`` that share the parameter, if there are several


def get_gradient_reduction(
    spec: ShardSpec,
    activation_layout: ActivationLayout,
    region: ModelRegion,
    axis_sizes: Mapping[str, int],
    shared_stages: tuple[int, ...] = (),
) -> GradientReduction:
    """Determine over which axes to sum a parameter's gradient, and by which number to divide the sum.

    Over ``data`` and the axes that shard the model inputs, each rank has the gradient of the mean loss of its samples.
    The sum is divided by the number of these ranks. Gradients are partial over three kinds of ranks: axes that shard
    the activations but not the parameter, ranks that store the same slices of it, and stages that share it.
    """
    partial = set(activation_layout.get_gradient_sum_axes(region)) - spec.axes.keys()
    summed = {"data", *partial, *activation_layout.input_axes, *spec.shared_axes}
    over = [axis for axis, size in axis_sizes.items() if size > 1 and axis in summed]
    divisor = float(axis_sizes.get("data", 1) * activation_layout.get_num_input_shards(axis_sizes))
    pipe = ("pipe",) if axis_sizes.get("pipe", 1) > 1 else ()
    # the axes of a tensor grid replace the tensor axis, so that no rank is counted twice
    norm_over = [a for axis in spec.axes for a in (activation_layout.block if axis == "tensor" else (axis,))]
    return GradientReduction(tuple(over), divisor, tuple(norm_over) + pipe, shared_stages)


METADATA_ATTRIBUTE, PARENT_METADATA_ATTRIBUTE = "_shardformer", "_shardformer_part"
"""Attributes that store the metadata: on the sharded model, and on each of its modules with parameters."""


@dataclass(eq=False)
class ParamEntry:
    """A parameter of a sharded model, with its name, its layout and the reduction of its gradient."""

    name: str  # first name when the model was sharded
    param: Tensor
    spec: ShardSpec
    reduction: GradientReduction = field(default_factory=GradientReduction)


@dataclass(frozen=True)
class ReplacementRecord:
    """Record of a module, attribute or method that was replaced: its path, and its old and new name."""

    path: str
    before: str
    after: str
    kind: str = "module"


@dataclass(frozen=True)
class ShardingRequest:
    """Options and policy that were passed to ``shard_model``."""

    source: str = ""  # where the policy was found
    options: Mapping[str, bool | str] = field(default_factory=dict)  # options of the config
    extra: Mapping[str, Any] = field(default_factory=dict)  # ``extra_kwargs`` of the config
    policy: Any = None


class GradientReducerProtocol(Protocol):
    """Protocol for an object that reduces gradients over ranks during the backward pass."""

    was_paused: bool

    @property
    def is_paused(self) -> bool: ...
    def prepare_for_backward(self) -> None: ...
    def no_sync(self) -> AbstractContextManager[None]: ...
    def start_reduction(self) -> None: ...
    def finish_reduction(self) -> None: ...


class GradientOwner(Protocol):
    """Protocol for an optimizer that stores the gradients itself instead of in ``param.grad``.

    All ranks must call ``reduce_pending_grads`` and ``compute_grad_norm``.

    ``reduce_pending_grads`` reduces the gradients accumulated under ``no_sync``. ``compute_grad_norm`` returns a
    global gradient norm, and ``scale_loss`` a context that yields the loss scale of the backward passes inside it.
    """

    param_groups: list[dict[str, Any]]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor: ...
    def reduce_pending_grads(self) -> None: ...
    def compute_grad_norm(self, params: Iterable[Tensor], norm_type: float = 2.0) -> Tensor: ...
    def scale_loss(self) -> AbstractContextManager[float]: ...
    def describe(self) -> str: ...


class ParameterShardingOptimizer(Protocol):
    """Protocol for an optimizer that shards parameters (ZeRO stage 3). All ranks must make the same calls.

    ``gather_group_of_param`` makes a full parameter available until the next call, and ``free_gathered_params`` frees
    it.
    """

    def gather_group_of_param(self, param: Tensor) -> None: ...
    def free_gathered_params(self) -> None: ...


class ConsistencyMonitorProtocol(Protocol):
    """Protocol for a monitor that detects when the ranks of a model diverge."""

    steps: int
    training: bool
    """Whether the current forward pass is part of training."""
    has_several_optimizers: bool
    """Whether several optimizers train the model. Some of them may have no parameters on a stage."""

    rounds_of_stages: int
    """Number of batches that the pipeline stages have stepped, as of the latest batch."""

    def count_batches_with_optimizer_step(self, is_stage_frozen: bool) -> int: ...
    def hash_optimizer_options(self) -> int: ...
    def hash_forward_inputs(self, forward_inputs: Collection[Any]) -> int: ...
    def hash_shared_weights(self, stages: tuple[int, ...], shared_entries: Sequence[ParamEntry]) -> int: ...
    def encode_training_state_as_ints(self, axis: Axis, inputs: Collection[Any] = ()) -> list[int]: ...
    def check_gathered_states_match(
        self, states_by_rank: Sequence[Sequence[int]], axis: Axis, forward_inputs: Collection[Any] = ()
    ) -> None: ...
    def compute_state_hash_bits(self, axis: Axis) -> list[float]: ...
    def check_all_reduced_hash_signs(self, sums: Tensor, axis: Axis) -> None: ...


class ActivationRegionHook(Protocol):
    """Protocol for a hook that shards or gathers activations between two parts of a model."""

    def reset_after_error(self) -> None: ...


@dataclass(eq=False)
class ShardingMetadata:
    """Process grid, parameter layouts and gradient reductions of a sharded model."""

    context: ParallelContext  # process grid of the model
    request: ShardingRequest = field(default_factory=ShardingRequest)  # options and policy of ``shard_model``
    activations: ActivationLayout = field(default_factory=ActivationLayout)  # layout of the activations between blocks
    entries: list[ParamEntry] = field(default_factory=list)  # parameters, each once
    stages: Any = (
        None  # pipeline stages (``shardformer.pipeline.stage_manager.PipelineStages``), or None without a pipeline
    )
    replacements: list[ReplacementRecord] = field(default_factory=list)  # replaced modules, attributes and methods
    notes: list[str] = field(default_factory=list)  # remarks for the user, such as the chosen attention kernel
    reducers: list[GradientReducerProtocol] = field(default_factory=list)  # gradient reducers
    region_hooks: list[ActivationRegionHook] = field(
        default_factory=list
    )  # regions in which ranks have different activations
    unproven: Mapping[str, str] = field(default_factory=dict)  # forward argument -> why it was not validated
    check_call: Callable[[nn.Module, Mapping[str, Any]], None] | None = None  # checks forward arguments
    layer_axes: Mapping[str, Axis] = field(default_factory=dict)  # axes of a model written with parallel layers
    number: int = 0  # index of the model in the order in which this process sharded or copied models
    gradient_owner: GradientOwner | None = None  # optimizer that stores the gradients, or None if ``param.grad`` does
    parameter_owner: ParameterShardingOptimizer | None = (
        None  # optimizer that stores the parameters, or None if the model does
    )
    context_run: Any = None  # context parallel state, see ``shardformer.context_parallel``
    layer_stacks: tuple[str, ...] = ()  # paths of the stacks of layers
    compilers: list[Any] = field(default_factory=list)  # ``shardformer.sharding.compiled_layers.LayerStackCompiler``
    monitor: ConsistencyMonitorProtocol | None = None  # detector of diverging ranks, or None without one
    adapters: Any = None  # names of PEFT's adapters on all stages (``AdapterTensorNameMap``), or None without adapters
    regions: Any = None  # finds the region of a parameter by its name (``ParameterRegionFinder``)
    on_adapted: Callable[[nn.Module], None] = lambda _: None  # called when adapters were added or removed

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardingMetadata:
        """Copy the metadata for a copied model, without the optimizer of the original."""
        memo[id(self)] = copied = type(self).__new__(type(self))
        fields = {**self.__dict__, "gradient_owner": None, "parameter_owner": None}
        copied.__dict__.update((name, deepcopy(value, memo)) for name, value in fields.items())
        _register_metadata(copied)
        copied._disable_shard_pickling()
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ConfigError(
            "A sharded model cannot be pickled, for example by torch.save(model).",
            remedy="Call model.save_pretrained(folder), shardformer.full_state_dict(model) or "
            "shardformer.save_checkpoint on all ranks instead.",
        )

    @property
    def same_batch_axis(self) -> Axis:
        """Mesh axis whose ranks receive the same batch."""
        return self.context.tensor if self.context_run is None else self.context.same_batch_axis

    def record_replacement(self, replaced_path: str, replaced: Any, replacement: Any, kind: str = "module") -> None:
        self.replacements.append(
            ReplacementRecord(replaced_path, _get_display_name(replaced), _get_display_name(replacement), kind)
        )

    def get_entries_by_param_id(self) -> dict[int, ParamEntry]:
        return {id(entry.param): entry for entry in self.entries}

    @property
    def axes(self) -> Mapping[str, Axis]:
        return {**self.context.axes, **self.layer_axes}

    @property
    def coords(self) -> dict[str, int]:
        """Coordinates of this process: its rank on each axis of the process grid."""
        return {name: axis.rank for name, axis in self.axes.items()}

    def get_axis(self, axis_name: str) -> Axis:
        return self.axes[axis_name]

    def attach_to_model(self, model: nn.Module) -> None:
        """Attach this metadata to a model and its submodules, and mark the shards in their state dicts."""
        _register_metadata(self)
        model.__dict__[METADATA_ATTRIBUTE] = self
        is_stage, sharded_ids = self._is_pipeline_stage, self._disable_shard_pickling()
        for module in model.modules():
            if module._parameters:
                module.__dict__[PARENT_METADATA_ATTRIBUTE] = self
            if is_stage:
                guard_state_dict_shards(module, None)
            elif names := [name for name, param in module._parameters.items() if id(param) in sharded_ids]:
                guard_state_dict_shards(module, names)

    @property
    def _is_pipeline_stage(self) -> bool:
        return self.stages is not None and self.context.pipe.size > 1

    def _disable_shard_pickling(self) -> set[int]:
        sharded = [e for e in self.entries if self._is_pipeline_stage or tuple(e.param.shape) != e.spec.shape]
        for entry in sharded:
            disable_pickling(entry.name, entry.param)
        return {id(entry.param) for entry in sharded}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally inside this context, without reducing them over the ranks."""
        with ExitStack() as pauses:
            for reducer in self.reducers:
                pauses.enter_context(reducer.no_sync())
            yield


_TABLES: WeakSet[ShardingMetadata] = WeakSet()
_OWNERS: dict[int, tuple[ref[ShardingMetadata], ...]] = {}
"""id of a parameter -> metadata with an entry for it. Values are replaced and never mutated, so readers need no lock.
Not a WeakKeyDictionary: ``torch.utils.swap_tensors`` fails for a tensor with a weak reference."""
_REGISTRY_LOCK = threading.Lock()
_NUMBERS = itertools.count()


def group_params_by_metadata(params: Iterable[Tensor]) -> dict[ShardingMetadata, list[ParamEntry]]:
    """Group parameters by the sharded model to which they belong.

    Returns a dict from the metadata of each model to the entries of its parameters. Models are in the order in which
    they were created, which is the same on all ranks. Other models are not read, because ranks may be threads that
    change their gradients concurrently.
    """
    metadata_params: dict[ShardingMetadata, set[int]] = {}
    for param in params:
        for owner in _OWNERS.get(id(param), ()):
            if (table := owner()) is not None:
                metadata_params.setdefault(table, set()).add(id(param))
    tables = sorted(metadata_params, key=lambda table: table.number)
    entries = {table: [e for e in table.entries if id(e.param) in metadata_params[table]] for table in tables}
    return {table: some for table, some in entries.items() if some}


def get_local_metadata() -> list[ShardingMetadata]:
    """Return the metadata of all sharded models to which this rank belongs, in the same order on all ranks."""
    with _REGISTRY_LOCK:
        alive = list(_TABLES)
    return sorted((table for table in alive if table.context.runs_in_current_thread), key=lambda table: table.number)


def _register_metadata(metadata: ShardingMetadata) -> None:
    metadata.number = next(_NUMBERS)
    with _REGISTRY_LOCK:
        _TABLES.add(metadata)
        for key, owners in list(_OWNERS.items()):
            if not any([owner() for owner in owners]):
                del _OWNERS[key]
        this = ref(metadata)
        for entry in metadata.entries:
            others = _OWNERS.get(id(entry.param), ())
            _OWNERS[id(entry.param)] = (*[other for other in others if other() not in (None, metadata)], this)


def _get_display_name(replaced: Any) -> str:
    if isinstance(replaced, nn.Module):
        return type(replaced).__name__
    return replaced if isinstance(replaced, str) else getattr(replaced, "__name__", repr(replaced))


def check_is_module(model: object) -> None:
    """Raise ConfigError if ``model`` is not a ``torch.nn.Module``."""
    rule = "A model is a torch.nn.Module"
    check_argument("model", model, isinstance(model, nn.Module), rule, "Pass the model that shard_model returned")


def get_sharding_metadata(model: nn.Module) -> ShardingMetadata:
    """Return the metadata of a sharded model, or raise ConfigError if the model is not sharded."""
    check_is_module(model)
    state = model.__dict__.get(METADATA_ATTRIBUTE)
    if isinstance(state, ShardingMetadata):
        return state
    if is_torch_compile_wrapper(model):
        raise ConfigError(
            f"This {type(model).__name__} is the result of torch.compile, not a sharded model.",
            remedy="Pass the model itself, or compile it with model.compile().",
        )
    raise ConfigError(
        f"This {type(model).__name__} is not sharded.",
        remedy="Call shardformer.shard_model(model) first, and pass the model itself, not a wrapper around it.",
    )


def get_sharded_module_and_prefix(model: nn.Module, metadata: ShardingMetadata | None = None) -> tuple[nn.Module, str]:
    """Return the sharded module inside ``model``, and the prefix of its parameter names in ``model``.

    The module is ``model`` itself, or the model inside a wrapper that shares its metadata (a ``PeftModel``).

    Args:
        metadata: metadata of the sharded module. By default, the metadata of ``model``.
    """
    metadata = metadata or get_sharding_metadata(model)
    inside = (
        (module, f"{path}.")
        for path, module in model.named_modules()
        if path and module.__dict__.get(METADATA_ATTRIBUTE) is metadata
    )
    return next(inside, (model, ""))


def get_or_build_metadata(model: nn.Module) -> ShardingMetadata:
    """Return the metadata of a sharded model or submodule, or create it for a model with parallel layers."""
    check_is_module(model)
    for name in (METADATA_ATTRIBUTE, PARENT_METADATA_ATTRIBUTE):
        if isinstance(state := model.__dict__.get(name), ShardingMetadata):
            return state
    # a wrapper around a sharded model, or around several
    sharded_models = {
        id(s): s for m in model.modules() if isinstance(s := m.__dict__.get(METADATA_ATTRIBUTE), ShardingMetadata)
    }
    if not sharded_models:
        return _build_metadata_from_parallel_layers(model)
    first, *others = sharded_models.values()
    if any(other.context is not first.context for other in others):
        raise ConfigError(
            f"This {type(model).__name__} contains models that are sharded with different ParallelContext objects.",
            remedy="Shard all models with the same ParallelContext, or pass each model separately.",
        )
    entries = [entry for state in sharded_models.values() for entry in state.entries]
    return replace(first, entries=entries) if others else first


def named_sharded_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ShardSpec]]:
    """Yield the name, shard and layout of each parameter in a parallel layer. Tied parameters have several names."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, spec in module.__dict__.get("shard_specs", {}).items():
            if (param := module._parameters.get(name)) is not None:
                yield f"{path}.{name}".lstrip("."), param, spec


def _build_metadata_from_parallel_layers(model: nn.Module) -> ShardingMetadata:
    specs = {id(param): spec for _, param, spec in named_sharded_parameters(model)}
    axes = {axis.name: axis for m in model.modules() if isinstance(axis := m.__dict__.get("axis"), Axis)}
    entries = []
    for name, param in model.named_parameters():
        spec = specs.get(id(param), ShardSpec(param.shape))
        entries.append(ParamEntry(name, param, spec, GradientReduction(norm_over=tuple(spec.axes))))
    return ShardingMetadata(ParallelContext.from_sizes({}), entries=entries, layer_axes=axes)


def get_shard_specs(model: nn.Module) -> dict[str, ShardSpec]:
    """Return the ``ShardSpec`` of each parameter by name. Replicated parameters have no splits."""
    entries_by_id = get_or_build_metadata(model).get_entries_by_param_id()
    return {
        name: entries_by_id[id(p)].spec if id(p) in entries_by_id else ShardSpec(p.shape)
        for name, p in model.named_parameters(remove_duplicate=False)
    }
