"""The metadata of a sharded model: the layout of each parameter and how its gradient is reduced.

Three things that do not depend on each other: over which axes ranks hold summands of the gradient, what the sum is
divided by, and over which axes the squares of what ranks hold add up to the squared norm. Weights by tokens belong on
the loss, before backward: a gradient that mixes several ranks' tokens can no longer be weighted.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol
from weakref import WeakSet, ref

from torch import Tensor, nn

from shardformer.errors import ConfigError, check_argument
from shardformer.layout.activation_layout import ActivationLayout, ModelRegion
from shardformer.layout.shard_spec import ShardSpec
from shardformer.layout.slice_tensor import mark_slices, refuse_pickling
from shardformer.mesh.parallel_context import Axis, ParallelContext


@dataclass(frozen=True)
class Reduction:
    """How the gradient of a parameter is agreed on.

    Args:
        sum_over: axes over whose ranks the gradients are summed.
        divisor: what the sum is divided by. A number, not the size of a group: one of size 1 may scale.
        norm_over: axes whose ranks hold different parts of the gradient, or of which one alone holds it.
        stages: the ranks of ``pipe`` that hold the parameter together, where there are several.
    """

    sum_over: tuple[str, ...] = ()
    divisor: float = 1.0
    norm_over: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()


def reduction_of(
    spec: ShardSpec,
    stream: ActivationLayout,
    place: ModelRegion,
    sizes: Mapping[str, int],
    stages: tuple[int, ...] = (),
) -> Reduction:
    """The reduction of a parameter with this layout at this place of a model on a grid of these sizes.

    Over ``data``, and over what the model's inputs are cut over, each rank has the mean of its own samples: the sum is
    divided by their number. A parameter that sees a part of the heads, of the samples or of the sequence has a summand
    on each rank of an axis over which it is not cut itself, and so have the slices of a cut parameter that several
    ranks hold, and what several stages hold.
    """
    partial = set(stream.partial_axes(place)) - spec.axes.keys()
    summed = {"data", *partial, *stream.input_axes, *spec.shared_axes}
    over = [axis for axis, size in sizes.items() if size > 1 and axis in summed]
    divisor = float(sizes.get("data", 1) * stream.num_parts(sizes))
    pipe = ("pipe",) if sizes.get("pipe", 1) > 1 else ()
    # on a grid the tensor axis is counted along its rows and columns, so that no rank is counted twice
    norm_over = [a for axis in spec.axes for a in (stream.block if axis == "tensor" else (axis,))]
    return Reduction(tuple(over), divisor, tuple(norm_over) + pipe, stages)


METADATA_ATTRIBUTE, PARENT_METADATA_ATTRIBUTE = "_shardformer", "_shardformer_part"
"""Attributes that hold the state: of the model that was sharded, and of the modules in it that hold parameters."""


@dataclass(eq=False)
class ParamEntry:
    """One parameter: its first name when it was sharded, its layout, and how its gradient is agreed on."""

    name: str
    param: Tensor
    spec: ShardSpec
    reduction: Reduction = field(default_factory=Reduction)


@dataclass(frozen=True)
class ReplacementRecord:
    """One thing that was replaced: where, what stood there, what stands there now."""

    path: str
    before: str
    after: str
    kind: str = "module"


@dataclass(frozen=True)
class ShardingRequest:
    """What was asked for.

    Args:
        source: which link of the chain gave the policy.
        options: the options of the config.
        extra: its extra_kwargs.
        policy: by which the model was sharded.
    """

    source: str = ""
    options: Mapping[str, bool | str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    policy: Any = None


class Reducer(Protocol):
    """What agrees on the gradients of some parameters during each backward."""

    was_paused: bool

    @property
    def is_paused(self) -> bool: ...
    def refresh(self) -> None: ...
    def paused(self) -> Any: ...
    def start(self) -> None: ...
    def finish(self) -> None: ...


class GradientOwner(Protocol):
    """What an optimizer has that keeps the gradients itself."""

    param_groups: list[dict[str, Any]]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor: ...

    def agree(self) -> None:
        """Sums what backwards left that were in ``no_sync``. All ranks call it."""

    def norm_of(self, params: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of some parameters, on all ranks. All ranks call it."""

    def scaled(self) -> AbstractContextManager[float]:
        """What the loss is multiplied by, for the backwards in here."""

    def describe(self) -> str:
        """What it keeps on this rank, in lines."""


class ParameterOwner(Protocol):
    """What an optimizer has that keeps the values of parameters itself."""

    def gather(self, param: Tensor) -> None:
        """Lets a parameter have its values until another one is brought. All ranks call it alike."""

    def release(self) -> None:
        """No values are asked for any more."""


class ConsistencyMonitorProtocol(Protocol):
    """What notices that ranks have come apart: see ``shardformer.consistency.rank_divergence``."""

    steps: int
    training: bool
    """Whether the forward that begins trains."""
    has_several_optimizers: bool
    """Whether the script trains the model with more than one, some of which may have no parameters on a stage."""

    def rounds_of_stage(self) -> int: ...
    def options_of_stage(self) -> int: ...
    def batch(self, inputs: Collection[Any]) -> int: ...
    def values_to_gather(self, axis: Axis, inputs: Collection[Any] = ()) -> list[int]: ...
    def compare(self, every: Sequence[Sequence[int]], axis: Axis, inputs: Collection[Any] = ()) -> None: ...
    def values_to_reduce(self, axis: Axis) -> list[float]: ...
    def check_reduced(self, sums: Tensor, axis: Axis) -> None: ...


class RegionHook(Protocol):
    """Where a region of the model begins or ends, which a forward that an error broke off may have left open."""

    def reset_after_error(self) -> None: ...


@dataclass(eq=False)
class ShardingMetadata:
    """Everything about how a model was sharded.

    Args:
        context: the grid it lives on.
        request: what was asked for.
        activations: how the activations between its blocks lie.
        entries: its parameters, each once.
        stages: how a pipeline cut it (``shardformer.pipeline.stage_manager.Stages``); None without one.
        replacements: in the order in which they were made.
        notes: things worth knowing, such as which attention kernel was chosen.
        reducers: what agrees on gradients with other ranks.
        region_hooks: of the regions in which ranks hold different activations.
        unproven: inputs of a forward that the model, as it is sharded, is not proven to take, and what was wrong.
        check_call: raises ConfigError for arguments of a forward that the sharded model cannot do.
        layer_axes: axes of parallel layers in a model that was not sharded but written with them.
        number: in which order models were sharded, or copied, in this process.
        gradient_owner: what keeps the gradients in the place of the parameters' ``.grad``; None where nothing does.
        parameter_owner: what keeps the values of parameters; None where they keep them themselves.
        context_run: how its sequence is cut over ranks, see ``shardformer.context_parallel``; None where it is not.
        monitor: what notices that ranks have come apart; None where nothing does.
    """

    context: ParallelContext
    request: ShardingRequest = field(default_factory=ShardingRequest)
    activations: ActivationLayout = field(default_factory=ActivationLayout)
    entries: list[ParamEntry] = field(default_factory=list)
    stages: Any = None
    replacements: list[ReplacementRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reducers: list[Reducer] = field(default_factory=list)
    region_hooks: list[RegionHook] = field(default_factory=list)
    unproven: Mapping[str, str] = field(default_factory=dict)
    check_call: Callable[[nn.Module, Mapping[str, Any]], None] | None = None
    layer_axes: Mapping[str, Axis] = field(default_factory=dict)
    number: int = 0
    gradient_owner: GradientOwner | None = None
    parameter_owner: ParameterOwner | None = None
    context_run: Any = None
    monitor: ConsistencyMonitorProtocol | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardingMetadata:
        """For a copied model, which has no optimizer."""
        memo[id(self)] = twin = type(self).__new__(type(self))
        known = {**self.__dict__, "gradient_owner": None, "parameter_owner": None}
        twin.__dict__.update((name, deepcopy(value, memo)) for name, value in known.items())
        _register_metadata(twin)
        twin._refuse_pickling()
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused: a process group cannot be pickled, and the model has this rank's parts alone."""
        raise ConfigError(
            "A sharded model was to be pickled, as by torch.save(model)",
            rule="It holds this rank's parts, and groups of processes that are there while they run",
            remedy="Write model.save_pretrained(folder) or shardformer.export_pretrained on all ranks for the full "
            "weights, or shardformer.save_checkpoint to train on; torch.save(shardformer.full_state_dict(model)) "
            "keeps the weights of any model",
        )

    @property
    def same_batch_axis(self) -> Axis:
        """The ranks that are given the same batch."""
        return self.context.tensor if self.context_run is None else self.context.same_batch_axis

    def note(self, path: str, before: Any, after: Any, kind: str = "module") -> None:
        """Writes down a replacement."""
        self.replacements.append(ReplacementRecord(path, _name(before), _name(after), kind))

    def by_param(self) -> dict[int, ParamEntry]:
        """The entries by the identity of their parameters, which are others in a copied model."""
        return {id(entry.param): entry for entry in self.entries}

    @property
    def axes(self) -> Mapping[str, Axis]:
        return {**self.context.axes, **self.layer_axes}

    @property
    def coords(self) -> dict[str, int]:
        """Name of an axis -> this process's rank on it."""
        return {name: axis.rank for name, axis in self.axes.items()}

    def axis(self, name: str) -> Axis:
        return self.axes[name]

    def attach(self, model: nn.Module) -> None:
        """Lets the model, and each part of it that trains, which may be kept alone, know this table.

        From now on their state dicts mark what is this rank's part.
        """
        _register_metadata(self)
        model.__dict__[METADATA_ATTRIBUTE] = self
        in_stages, cut = self._is_stage, self._refuse_pickling()
        for module in model.modules():
            if module._parameters:
                module.__dict__[PARENT_METADATA_ATTRIBUTE] = self
            if in_stages:
                mark_slices(module, None)
            elif names := [name for name, param in module._parameters.items() if id(param) in cut]:
                mark_slices(module, names)

    @property
    def _is_stage(self) -> bool:
        return self.stages is not None and self.context.pipe.size > 1

    def _refuse_pickling(self) -> set[int]:
        """Refuses to pickle parameters that are this rank's part of the model. Returns their identities."""
        in_stages = self._is_stage
        parts = [e for e in self.entries if in_stages or tuple(e.param.shape) != e.spec.shape]
        for entry in parts:
            refuse_pickling(entry.name, entry.param)
        return {id(entry.param) for entry in parts}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward in here accumulates each rank's own gradients."""
        with ExitStack() as pauses:
            for reducer in self.reducers:
                pauses.enter_context(reducer.paused())
            yield


_TABLES: WeakSet[ShardingMetadata] = WeakSet()
_OWNERS: dict[int, tuple[ref[ShardingMetadata], ...]] = {}
"""Identity of a parameter -> the tables that have an entry for it. Values are replaced, never changed: readers take no
lock. Not a WeakKeyDictionary: ``torch.utils.swap_tensors`` refuses a tensor that has a weak reference."""
_REMEMBERING = threading.Lock()
_NUMBERS = itertools.count()


def tables_of(params: Iterable[Tensor]) -> dict[ShardingMetadata, list[ParamEntry]]:
    """The tables that have entries for some of these parameters, each with these entries.

    The tables are in the order in which they were made, which all ranks have in common. No other model is read: ranks
    may be threads of one process, and each changes its gradients at any time.
    """
    found: dict[ShardingMetadata, set[int]] = {}
    for param in params:
        for owner in _OWNERS.get(id(param), ()):
            if (table := owner()) is not None:
                found.setdefault(table, set()).add(id(param))
    tables = sorted(found, key=lambda table: table.number)
    entries = {table: [e for e in table.entries if id(e.param) in found[table]] for table in tables}
    return {table: some for table, some in entries.items() if some}


def tables_here() -> list[ShardingMetadata]:
    """The tables of all sharded models of this rank that are alive, in an order that all ranks have in common."""
    with _REMEMBERING:
        alive = list(_TABLES)
    return sorted((table for table in alive if table.context.is_here), key=lambda table: table.number)


def _register_metadata(table: ShardingMetadata) -> None:
    table.number = next(_NUMBERS)
    with _REMEMBERING:
        _TABLES.add(table)
        for key, owners in list(_OWNERS.items()):
            if not any([owner() for owner in owners]):
                del _OWNERS[key]
        mine = ref(table)
        for entry in table.entries:
            others = _OWNERS.get(id(entry.param))
            _OWNERS[id(entry.param)] = (
                (*[each for each in others if each() not in (None, table)], mine) if others else (mine,)
            )


def _name(thing: Any) -> str:
    if isinstance(thing, str):
        return thing
    if isinstance(thing, nn.Module):
        return type(thing).__name__
    return getattr(thing, "__name__", repr(thing))


def check_module(model: object) -> None:
    """Raises ConfigError for what is no model."""
    rule = "A model is a torch.nn.Module, of transformers, timm or your own"
    check_argument(
        "model", model, isinstance(model, nn.Module), rule, "Give the model itself, as shard_model returned it"
    )


def metadata_of(model: nn.Module) -> ShardingMetadata:
    """The state of a sharded model. Raises ConfigError for one that is not."""
    check_module(model)
    state = model.__dict__.get(METADATA_ATTRIBUTE)
    if isinstance(state, ShardingMetadata):
        return state
    raise ConfigError(
        f"This {type(model).__name__} is not sharded",
        remedy="Call shardformer.shard_model(model) first, and give the model itself, not a wrapper of it",
    )


def find_metadata(model: nn.Module) -> ShardingMetadata:
    """The state of a sharded model or of a part of one; of any other model what its parallel layers say."""
    check_module(model)
    for name in (METADATA_ATTRIBUTE, PARENT_METADATA_ATTRIBUTE):
        if isinstance(state := model.__dict__.get(name), ShardingMetadata):
            return state
    # a wrapper around a sharded model, or around several
    inner = {id(s): s for m in model.modules() if isinstance(s := m.__dict__.get(METADATA_ATTRIBUTE), ShardingMetadata)}
    if not inner:
        return _metadata_from_layers(model)
    first, *others = inner.values()
    if any(other.context is not first.context for other in others):
        raise ConfigError(
            f"This {type(model).__name__} holds {len(inner)} models that were sharded over grids of their own",
            remedy="Shard them with one context, or ask each of them alone",
        )
    entries = [entry for state in inner.values() for entry in state.entries]
    return replace(first, entries=entries) if others else first


def sharded_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ShardSpec]]:
    """(name, this rank's part, layout) of each parameter that a layer noted when it cut it; tied ones by each name."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, spec in module.__dict__.get("shard_specs", {}).items():
            if (param := module._parameters.get(name)) is not None:
                yield f"{path}.{name}".lstrip("."), param, spec


def _metadata_from_layers(model: nn.Module) -> ShardingMetadata:
    """What the layers of a model say that was not sharded, but written with parallel layers."""
    specs = {id(param): spec for _, param, spec in sharded_parameters(model)}
    own = [axis for module in model.modules() if isinstance(axis := module.__dict__.get("axis"), Axis)]
    axes = {axis.name: axis for axis in own}
    entries = []
    for name, param in model.named_parameters():
        spec = specs.get(id(param), ShardSpec(param.shape))
        entries.append(ParamEntry(name, param, spec, Reduction(norm_over=tuple(spec.axes))))
    return ShardingMetadata(ParallelContext.of({}), entries=entries, layer_axes=axes)


def shard_specs(model: nn.Module) -> dict[str, ShardSpec]:
    """The layout of every parameter by its name, tied names too; a replicated one has no splits."""
    known = find_metadata(model).by_param()
    return {
        name: known[id(p)].spec if id(p) in known else ShardSpec(p.shape)
        for name, p in model.named_parameters(remove_duplicate=False)
    }
