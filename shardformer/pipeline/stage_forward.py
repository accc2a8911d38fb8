"""Runs one micro-batch through the layers of one stage, in the model's own forward.

Parameters of other stages are placeholders.

A parameter that another stage holds is taken out of its module, and a tensor of one NaN, stretched to the parameter's
shape, is left as an attribute in its place: code that looks at its shape, dtype or device goes on, it needs no memory,
and whatever is computed of it by mistake is NaN, which shows, and not a number that passes for one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from shardformer.context_parallel.sequence_sharded_tensor import shard_like, to_local
from shardformer.errors import ConfigError
from shardformer.pipeline.layer_sequence import LayerRange, LayerSequence, StackDescription
from shardformer.random_state import SPLITMIX64, RandomUseDetector, seed_random
from shardformer.tensor_parallel.sequence_parallel import first_tensor
from shardformer.torch_compat import has_data, tree_leaves


class MissingParams:
    """The stand-ins in a model, by module and name. They have the device of this rank, and the dtype of the parameter
    wherever it is."""

    def __init__(self) -> None:
        self.are_shown = False
        """Whether a stage runs: code that reads the dtype or device of a module then sees its stand-ins too."""
        self._names: dict[int, tuple[str, ...]] = {}  # of each module's parameters, as the plain model registers them
        self._places: list[tuple[nn.Module, str, tuple[str, ...]]] = []  # with all names in the model
        self._device: torch.device | None = None
        self._held: tuple[nn.Module, str] | None = None
        self._own: dict[str, torch.dtype] = {}

    def __len__(self) -> int:
        return len(self._places)

    def remove(self, model: nn.Module, held: Mapping[str, bool]) -> None:
        """Takes the parameters out that are not held here, by name. A module with several names is held by any."""
        wanted: dict[tuple[int, str], bool] = {}
        names: dict[tuple[int, str], tuple[str, ...]] = {}
        modules = list(model.named_modules(remove_duplicate=False))
        for path, module in modules:
            for name in module._parameters:
                key, full = (id(module), name), f"{path}.{name}" if path else name
                wanted[key] = wanted.get(key, False) or held.get(full, True)
                names[key] = (*names.get(key, ()), full)
        self._names = {id(module): tuple(module._parameters) for _, module in modules}
        for _, module in modules:
            for name, param in list(module._parameters.items()):
                if param is not None and not wanted[id(module), name]:
                    del module._parameters[name]
                    module.__dict__[name] = _stand_in(param)
                    self._places.append((module, name, names[id(module), name]))
        self._own = dtypes_of(model)
        without = {id(module) for module, _, _ in self._places}
        for _, module in modules:
            if any(id(inner) in without for inner in module.modules()):
                module.__dict__["named_parameters"] = _NamedParameters(module, self)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While this lasts ``module.parameters()`` gives stand-ins in the place of the parameters of other stages."""
        before, self.are_shown = self.are_shown, True
        try:
            yield
        finally:
            self.are_shown = before

    def names_of(self, module: nn.Module) -> tuple[str, ...]:
        """The names of a module's own parameters, in the order of the plain model."""
        return self._names.get(id(module), tuple(module._parameters))

    def has_any(self, module: nn.Module) -> bool:
        """Whether a parameter of the module's own, or of one inside of it, is elsewhere."""
        inside = {id(m) for m in module.modules()}
        return any(id(m) in inside for m, _, _ in self._places)

    def follow(self, model: nn.Module) -> None:
        """After the model was moved to another device, which stand-ins are not: they are no parameters."""
        like = self._parameter_of(model)
        if like is not None and like.device != self._device:
            self._device = like.device
            for module, name, _ in self._places:
                _move(module, name, like.device)

    def take_dtypes(self, model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
        """After a conversion of the model: the stand-ins get the dtypes that the parameters have on their own stages.

        Args:
            dtypes: of the parameters of all stages, by name. One that is not there (a rank is traced alone) is taken to
                be converted as this rank's parameters of its dtype were.
        """
        before, self._own = self._own, dtypes_of(model)
        converted = {before[name]: dtype for name, dtype in self._own.items() if name in before}
        for module, name, names in self._places:
            known = next((dtypes[n] for n in names if n in dtypes), None)
            now = module.__dict__[name].dtype
            _move(module, name, known or converted.get(now, now))

    def _parameter_of(self, model: nn.Module) -> Tensor | None:
        """A parameter that is here. Where it stands is remembered: a stage may have many modules before its first."""
        if self._held is not None:
            found = self._held[0]._parameters.get(self._held[1])
            if found is not None:
                return found
        for module in model.modules():
            for name, param in module._parameters.items():
                if param is not None and param.is_floating_point():
                    self._held = module, name
                    return param
        return None


class _NamedParameters:
    """``named_parameters`` of a module of which another stage holds parameters, in the order of the plain model."""

    def __init__(self, module: nn.Module, placeholders: MissingParams) -> None:
        self._module, self._placeholders = module, placeholders

    def __call__(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        module = self._module
        if not self._placeholders.are_shown:
            return type(module).named_parameters(module, prefix, recurse, remove_duplicate)
        return self._with_stand_ins(prefix, recurse, remove_duplicate)

    def _with_stand_ins(self, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, nn.Parameter]]:
        module, seen = self._module, set[int]()
        modules = module.named_modules(prefix=prefix, remove_duplicate=remove_duplicate)
        for path, inner in modules if recurse else [(prefix, module)]:
            for name in self._placeholders.names_of(inner):
                value = inner._parameters.get(name)
                value = inner.__dict__.get(name) if value is None else value
                if value is not None and not (remove_duplicate and id(value) in seen):
                    seen.add(id(value))
                    yield f"{path}.{name}" if path else name, value


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    """Of the parameters that are here, by all of their names."""
    return {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}


def _move(module: nn.Module, name: str, to: torch.device | torch.dtype) -> None:
    value: Tensor = module.__dict__[name]
    module.__dict__[name] = value.as_strided((), ()).to(to).expand(value.shape)


def placeholder(*shape: int, like: Tensor) -> Tensor:
    """A tensor of one NaN that looks like ``shape``."""
    return torch.full((), float("nan"), dtype=like.dtype, device=like.device).expand(shape)


def _stand_in(param: Tensor) -> Tensor:
    """What is left of a parameter. Of one that waits for its value, which is nowhere yet, it is on the CPU."""
    device = torch.device("cpu") if param.is_meta else param.device
    number = float("nan") if param.is_floating_point() else 0
    return torch.full((), number, dtype=param.dtype, device=device).expand(tuple(param.shape))


def placeholder_output(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """What a table or a linear would give, without computing it: NaNs, to which a model may add in place."""
    x = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
    weight: Any = module.weight
    if not isinstance(module, nn.Linear):
        width: Any = module.embedding_dim
        return placeholder(*x.shape, width, like=weight).contiguous()
    out = placeholder(*x.shape[:-1], module.out_features, like=weight).contiguous()
    kind = x.device.type  # autocast converts what linears give, and not what tables give
    return out.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else out


def has_nan(x: Any) -> bool:
    """Whether a NaN is in it: it may be computed, as a whole or in parts, of what another stage holds."""
    looks = isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 0 and has_data(x)
    return looks and bool(x.isnan().any())


def is_placeholder(x: Any) -> bool:
    """Whether nothing but NaN is in it, as in what is computed of what another stage holds."""
    looks = isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 0 and has_data(x)
    return looks and bool(x.isnan().all())


StageActivations = dict[str, Tensor]
"""What one stage hands to the next: the hidden states, and states of an earlier stack that this one reads."""


@dataclass
class StagePass:
    """A pass that is under way, or whose backward is.

    Args:
        span: the units that are run for real.
        received: what the stage before handed over.
        seed: of this micro-batch's random numbers; None where the model draws none.
        at_end: called when the last unit of the chain has run, before what stands behind it.
    """

    span: LayerRange
    received: StageActivations
    seed: int | None = None
    at_end: Callable[[], None] | None = None
    context: Tensor | None = None
    calls: list[int] = field(default_factory=list)
    is_computed: bool = True  # the unit before, or the stage before


class StageBoundaryReached(BaseException):  # nothing that looks for a failure of the model takes it for one
    """Ends a forward behind the last unit that is run."""

    def __init__(self, payload: StageActivations) -> None:
        self.payload = payload


class StageForward:
    """Runs spans of a model's chain, standing in the forwards of its layers.

    Args:
        model: the model, sharded.
        chain: its layers in order.
        placeholders: what stands for the parameters of other stages.
        home: the units that each parameter goes with, by name.
        tables: classes of embeddings whose output can be told without computing it.
        checkpointed: the units whose activations are computed again in the backward instead of kept.
        random_stream: which stream of random numbers is drawn from between the layers of a stack; 0 where all ranks
            hold the same.
        device: on which it runs.
        wrappers: identity of a layer -> the wrapper (activation checkpointing) that is around it when it runs: what a
            stage does comes before that.
        lasting: whether it stands in the layers from now on, or while it is ``installed``.
    """

    def __init__(
        self,
        model: nn.Module,
        chain: LayerSequence,
        placeholders: MissingParams,
        home: Mapping[str, frozenset[int]],
        tables: Sequence[type[nn.Module]] = (nn.Embedding,),
        checkpointed: Iterable[int] = (),
        random_stream: Callable[[StackDescription], int] = lambda _: 0,
        device: torch.device | None = None,
        wrappers: Mapping[int, nn.Module] = MappingProxyType({}),
        *,
        lasting: bool = True,
    ) -> None:
        self._chain, self._placeholders, self._tables = chain, placeholders, tuple(tables)
        self._checkpointed, self._random_stream = set(checkpointed), random_stream
        self._num_units = len(chain.layer_calls)
        self._wrappers = dict(wrappers)
        self._units: dict[str, tuple[nn.Module, int, int]] = {}  # path -> where it stands, the stack and the first unit
        self._checked: set[int] = set()
        self.ended_well: bool | None = None  # whether the last layer gave numbers when it first ran, once it has
        self.now: StagePass | None = None
        self.when_left: list[Callable[[StageActivations], None]] = []  # called where a forward ends before its end
        self.draws = RandomUseDetector(device or torch.device("cpu"))
        """Whether what runs on this stage draws random numbers."""
        self._replaced: list[tuple[nn.Module, Any]] = []
        self._hooks: list[RemovableHandle] = []
        self._home = home
        if lasting:
            self._install(model)

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """Stands in the forwards of the layers while this lasts."""
        self._install(model)
        try:
            yield
        finally:
            for module, before in self._replaced:
                _put_back(module, before)
            for hook in self._hooks:
                hook.remove()
            self._replaced, self._hooks = [], []

    def _install(self, model: nn.Module) -> None:
        """Stands in the forwards of the layers, behind all else that changes them."""
        chain, home = self._chain, self._home
        for index, (stack, start) in enumerate(zip(chain.stacks, chain.starts, strict=True)):
            for path in dict.fromkeys(stack.layer_calls):
                layer = model.get_submodule(path)
                layer = self._wrappers.get(id(layer), layer)
                self._units[path] = layer, index, start + stack.layer_calls.index(path)
                self._override_layer(*self._units[path])
            if index > 0 and stack.context is not None:
                self._override_entry(model.get_submodule(stack.context[0]), stack, start)
        if not chain.layer_calls:  # one stage has all of it
            return
        inside = {id(m) for path in chain.layer_calls for m in model.get_submodule(path).modules()}
        outside: dict[nn.Module, frozenset[int]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            if id(module) not in inside and type(module) in (*self._tables, nn.Linear):
                outside[module] = outside.get(module, frozenset()) | home.get(f"{path}.weight", frozenset())
        for module, units in outside.items():
            self._override_outside(module, units)

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._replaced.append((module, module.__dict__.get("forward")))
        module.forward = _ForwardOverride(forward, module.forward)

    def checkpoint_layer(self, path: str) -> None:
        """From now on the layer at ``path`` computes its activations again in the backward."""
        self._checkpointed |= {at for at, unit in enumerate(self._chain.layer_calls) if unit == path}

    def follow_wrappers(self, model: nn.Module) -> None:
        """Stands around wrappers that a script put around layers since, or in the layers whose wrappers are gone.

        What checkpoints a layer computes it again with what it was given: inside, that would be a stand-in's NaN.
        """
        for path, (module, index, unit) in list(self._units.items()):
            now = model.get_submodule(path)
            if now is module or not {*module.modules()} & {*now.modules()}:
                continue
            for at, (replaced, before) in enumerate(self._replaced):
                if replaced is module:
                    _put_back(module, before)
                    del self._replaced[at]
                    break
            self._units[path] = now, index, unit
            self._override_layer(now, index, unit)

    def run(self, model: nn.Module, run: StagePass, forward: Callable[[], Any]) -> tuple[Any, StageActivations | None]:
        """Lets ``forward`` call the model, as far as the stage goes.

        Returns (the output, None) from the last stage, (None, what is handed on) from any other.
        """
        self._placeholders.follow(model)
        self.now = run
        self._seed(run, 0)
        if not self._num_units and run.at_end is not None:
            run.at_end()
        try:
            with self._placeholders.shown():
                return forward(), None
        except StageBoundaryReached as left:  # which passes by the hooks behind a forward
            for end in self.when_left:
                end(left.payload)
            return None, left.payload
        finally:
            self.now = None
            self.draws.end()

    def _seed(self, run: StagePass, part: int) -> None:
        """A part of the pass draws from its own seed, which no number of stages changes."""
        self.draws.end()
        if run.seed is not None:
            seed_random((run.seed + SPLITMIX64[0] * part) % 2**63)
        self.draws.begin()

    def _override_layer(self, module: nn.Module, index: int, unit: int) -> None:
        stack, original = self._chain.stacks[index], module.forward
        first = self._chain.starts[index]

        def forward(*args: Any, **kwargs: Any) -> Any:
            run = self.now
            if run is None:
                return original(*args, **kwargs)
            at = unit
            if stack.repeats_layers:
                at = first + sum(first <= u < first + len(stack.layer_calls) for u in run.calls)
            if at in run.calls:
                raise ConfigError(
                    f"The layers at {stack.layers} were run a second time in one forward",
                    remedy="Run this head without a pipeline, or compute its loss in two steps",
                )
            run.calls.append(at)
            if at < run.span.start:
                hidden, returns = first_tensor(args, kwargs), stack.stages.num_outputs
                return (hidden, *[None] * (returns - 1)) if returns else hidden
            if at >= run.span.stop:
                raise StageBoundaryReached(self._payload(run, at, args, kwargs))
            if at == run.span.start and "hidden" in run.received:
                before, hidden = first_tensor(args, kwargs), run.received["hidden"]
                args = tuple(hidden if value is before else value for value in args)
                kwargs = {name: hidden if value is before else value for name, value in kwargs.items()}
            return self._run_unit(run, at, stack, original, args, kwargs)

        self._replace(module, forward)

    def _run_unit(
        self, run: StagePass, at: int, stack: StackDescription, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        self._seed(run, at + 1 + (self._num_units + 2) * self._random_stream(stack))
        is_first = at not in self._checked
        if is_first:
            self._checked.add(at)
            self._check_arguments(run, at, original, args, kwargs)
        if at in self._checkpointed and torch.is_grad_enabled():
            output = checkpoint(original, *args, use_reentrant=False, **kwargs)
        else:
            output = original(*args, **kwargs)
        if is_first:
            run.is_computed = not any(map(has_nan, tree_leaves(output)))
        if at == self._num_units - 1:
            if is_first:
                self.ended_well = run.is_computed
            self._seed(run, self._num_units + 1)
            if run.at_end is not None:
                run.at_end()
        return output

    def _check_arguments(
        self, run: StagePass, at: int, original: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """The first time that a layer runs here: what it reads was made on this stage, or handed to it."""
        path = self._chain.layer_calls[at]
        names = list(inspect.signature(original).parameters)
        given = [*zip([*names, *(f"argument {i}" for i in range(len(names), len(args)))], args), *kwargs.items()]
        hidden = first_tensor(args, kwargs)
        for name, value in given:
            is_own = value is hidden and (not run.is_computed or at == run.span.start > 0 or not self._placeholders)
            if not is_own and any(map(has_nan, tree_leaves(value))):
                raise _other_stage_error(path, name)

    def _payload(self, run: StagePass, at: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StageActivations:
        payload = {}
        carried = self._chain.received_states(at)
        if "hidden" in carried:
            payload["hidden"] = first_tensor(args, kwargs)
        if "context" in carried:
            assert run.context is not None
            payload["context"] = to_local(run.context)
        return payload

    def _override_entry(self, module: nn.Module, stack: StackDescription, start: int) -> None:
        assert stack.context is not None
        name = stack.context[1]
        parameters = list(inspect.signature(module.forward).parameters)
        position = parameters.index(name) if name in parameters else len(parameters)

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            run = self.now
            if run is None:
                return None
            value = kwargs.get(name) if name in kwargs else (args[position] if position < len(args) else None)
            if run.span.start >= start and "context" in run.received:
                if run.span.start in range(start, start + len(stack.layer_calls)):
                    run.context = shard_like(run.received["context"], value)
                    if name in kwargs:
                        return args, {**kwargs, name: run.context}
                    return (*args[:position], run.context, *args[position + 1 :]), kwargs
                return None
            if not isinstance(value, Tensor):
                raise ConfigError(
                    f"{type(module).__name__} was given {name}={value!r:.60} by its model",
                    rule="A pipeline hands the states of the stack before to the stage that begins with this module",
                    remedy="Call the model with what both of its stacks read, as in training it on one device",
                )
            if run.span.stop <= start:
                raise StageBoundaryReached({"context": to_local(value)})
            run.context = value
            return None

        self._hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))

    def _override_outside(self, module: nn.Module, home: frozenset[int]) -> None:
        """A table or linear outside of the layers that is of another stage, on this rank or not, costs nothing."""
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            run = self.now
            if run is not None and not any(unit in run.span for unit in home):
                return placeholder_output(module, args, kwargs)
            return original(*args, **kwargs)

        self._replace(module, forward)


def _put_back(module: nn.Module, forward: Any) -> None:
    """Gives a module the forward that it had; None: that of its class."""
    if forward is None:
        del module.__dict__["forward"]
    else:
        module.forward = forward


class _ForwardOverride:
    """A forward in the place of a module's own. It knows that module, so a copied model would run the first one's."""

    def __init__(self, forward: Callable[..., Any], original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ConfigError(
            "A model that runs in a pipeline was copied",
            rule="Its layers know their stage, and those of a copy would run the first model's weights",
            remedy="Copy the plain model before it is sharded, or keep averages of model.parameters()",
        )


def _other_stage_error(path: str, name: str) -> ConfigError:
    return ConfigError(
        f"{path} is given {name}, which is computed of parameters that another stage holds, or of NaN in the batch",
        rule="A stage hands on the states between the layers; what a layer reads beside them is made on its own stage",
        remedy="Name the module that makes it in a policy: LayerStack(..., stages=PipelineHints(on_every_stage=[..])); "
        "shared_from_first=[...] where it stands in the first layer, with_first_layer=[...] or with_last_layer=[...] "
        "where one stage needs it",
    )
