"""LazyInit: builds a model without values, and records how each value is made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import getattr_static
from types import FunctionType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from shardformer.errors import ConfigError
from shardformer.meta_init.init_recipe import (
    DeferredStorage,
    InitStep,
    TensorView,
    defer_storage,
    deferred_storage_of,
    drop_recipe,
    run_recipe,
    run_step,
    values_of,
    view_of,
)
from shardformer.torch_patches import Patch, install

aten = torch.ops.aten

EMPTY = (aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default)
FILLED = (aten.zeros.default, aten.ones.default, aten.full.default)
DRAWN = {
    aten.rand.default: (aten.uniform_.default, 0),
    aten.rand.generator: (aten.uniform_.default, 0),
    aten.randn.default: (aten.normal_.default, 0),
    aten.randn.generator: (aten.normal_.default, 0),
    aten.normal.float_float: (aten.normal_.default, 2),
}
"""Functions that make a tensor of random numbers -> what torch itself calls on an empty one, and how many of the first
arguments go to that."""

MAKING = {*EMPTY, *FILLED, *DRAWN}

TAKING = {aten.clone.default, aten.cat.default}
"""What a rank's part is taken with."""

OVERWRITING = {"normal_", "uniform_", "random_", "zero_", "fill_", "copy_", "exponential_", "log_normal_", "cauchy_"}
"""Leave nothing of what stood there before, and draw as many numbers whatever that was."""

VERSION = "_shardformer_version"
IS_META: Any = getattr_static(Tensor, "is_meta").__get__
DEVICE: Any = getattr_static(Tensor, "device").__get__


class ReportCpuDevice(TorchFunctionMode):
    """Tensors without values say that they are on the CPU, as torch's and transformers' init functions want to know."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == IS_META and deferred_storage_of(args[0]) is not None:
            return False
        if func == DEVICE and deferred_storage_of(args[0]) is not None:
            return torch.device("cpu")
        return func(*args, **(kwargs or {}))


class InitRecorder(TorchDispatchMode):
    """Writes down what is done to tensors without values, in the recipe of each; all else is carried out as always.

    What asks for a value (``item()``, a comparison) gets the true one: it is computed then and there. A step that draws
    random numbers draws them at once, for the sake of the numbers that follow, and throws them away.
    """

    makes = allows_meta = False
    """Whether new tensors of floating-point numbers are without values too; whether some may be made so by others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives its bases no types
        self._disguise = ReportCpuDevice()

    def __enter__(self) -> Self:
        self._disguise.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch gives its bases no types
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # torch gives its bases no types
        self._disguise.__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.scalar_tensor.default:  # the 2.0 of `weight[0] = 2.0`, on the device of the weight
            return func(*args, **{**kwargs, "device": torch.device("cpu")})
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if not any(deferred_storage_of(x) for x in tensors):
            if self.makes and func in MAKING and _is_float(func, args, kwargs):
                return self._make(func, args, dict(kwargs))
            if self.makes and func is aten.empty_like.default and args[0].is_meta and not _is_to_meta(kwargs):
                like = {"dtype": kwargs.get("dtype") or args[0].dtype, "device": kwargs.get("device")}
                return self.__torch_dispatch__(aten.empty.memory_format, types, (list(args[0].shape),), like)
            return func(*args, **kwargs)
        if _is_to_meta(kwargs):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if any(x.is_meta and deferred_storage_of(x) is None for x in tensors):
            for x in written:  # with what nobody knows: then nobody knows this either
                drop_recipe(x)
            return func(*_without_values(args), **_without_values(kwargs))
        if any(deferred_storage_of(x) is None for x in written):  # into a tensor that has values
            return func(*_with_values(args), **_with_values(kwargs))
        try:
            result = func(*_without_values(args), **_on("meta", _without_values(kwargs)))
        except RuntimeError:  # what it does depends on values, or it is wrong, and then says so here
            tried = func(*_with_values(args), **_with_values(kwargs))
            if not written:
                return tried
            result = written[0]
        self._record(func, args, kwargs, written, result)
        return result

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A new tensor of floating-point numbers, without values."""
        device = torch.device(kwargs.get("device") or "cpu")
        if device.type != "cpu":
            if device.type == "meta" and not self.allows_meta:
                raise ConfigError(
                    "A tensor was made on the meta device inside of LazyInit",
                    rule="LazyInit builds a model from its config; from_pretrained of transformers has a way of its "
                    "own, which keeps no word of where the values are",
                    remedy="Use shardformer.from_pretrained(ModelClass, folder) for saved weights, and leave "
                    "torch.device('meta') out",
                )
            return func(*args, **kwargs)
        if func in DRAWN:
            fill, taken = DRAWN[func]
            generator = kwargs.pop("generator", None)
            empty = self._make(aten.empty.memory_format, args[taken:], kwargs)
            return self.__torch_dispatch__(fill, (), (empty, *args[:taken]), {"generator": generator})
        result = func(*args, **{**kwargs, "device": torch.device("meta")})
        place = defer_storage(result)
        if func in FILLED:
            place.writer = InitStep(func, args, {**kwargs, "device": device, "dtype": result.dtype}, (view_of(result),))
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, written: list[Tensor], result: Any) -> None:
        results = list(result) if isinstance(result, tuple | list) else [result]
        new = [x for x in results if isinstance(x, Tensor) and x.is_meta and deferred_storage_of(x) is None]
        for x in new:
            defer_storage(x)
        if not new and not written:
            return  # a view, or a question that needs no values
        if func in TAKING and (steps := _cast_last(func, args, kwargs, result)):
            new_place = deferred_storage_of(result)
            assert new_place is not None
            new_place.writer = steps
            return
        step = InitStep(func, tree_map(_argument, args), _on("cpu", tree_map(_argument, kwargs)))
        step.out = tuple(view_of(x) if any(x is n for n in new) else None for x in results)
        draws, generator = torch.Tag.nondeterministic_seeded in func.tags, kwargs.get("generator")
        if draws:
            step.state = torch.get_rng_state() if generator is None else generator.get_state()
            step.kwargs.pop("generator", None)
        overwritten = _overwritten(func, written)
        step.before = _writers(p for p in step.places() if p is not overwritten)
        if draws:
            _advance(func, step, generator, overwritten is not None)
        for x in (*written, *new):
            place = deferred_storage_of(x)
            assert place is not None
            place.writer = step


class LazyInit(InitRecorder):
    """Builds models without values: ``with LazyInit(): model = BertModel(config)``.

    Parameters and floating-point buffers stand on the meta device, each with a recipe. ``shard_model``, or
    ``materialize``, makes the values: those that building the model in the same place of the program, on the CPU,
    would have given, to the bit. Random numbers are drawn while the model is built, one tensor at a time, and drawn
    again where they are kept: torch's random state is afterwards what it would have been.

    Whatever changes weights (``model.half()``, an init function of one's own) belongs inside of the ``with`` too.

    >>> with LazyInit():
    ...     layer = nn.Linear(4, 2)
    >>> layer.weight.device
    device(type='meta')
    """

    makes = True

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[nn.Parameter] = []

    def __enter__(self) -> Self:
        install(REGISTRATION_PATCH, lambda: register_module_parameter_registration_hook(_registered).remove)
        super().__enter__()
        _BUILDING.seen.append(self._seen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _BUILDING.seen.pop()
        super().__exit__(kind, error, trace)
        for param in self._seen:
            param.__dict__[VERSION] = param._version
        self._seen.clear()


def was_written(param: nn.Parameter) -> bool:
    """Whether a parameter without values was written to where nothing recorded it."""
    return bool(param._version != vars(param).get(VERSION, param._version))


class _Building(threading.local):
    """What this thread builds without values: of each ``LazyInit`` that it is in, the parameters so far."""

    def __init__(self) -> None:
        self.seen: list[list[nn.Parameter]] = []


_BUILDING = _Building()
# It stays after the block: torch keeps these hooks in a dict that all threads read while they build models. A thread
# that adds or removes one ends another's building with "mutated during iteration".
REGISTRATION_PATCH = Patch(
    "torch.nn.Module: global hook of register_parameter()",
    "shardformer.meta_init.lazy_init",
    "LazyInit notes the parameters that modules get",
)


def _registered(module: nn.Module, name: str, param: Any) -> None:
    if isinstance(param, nn.Parameter):
        for seen in _BUILDING.seen:
            seen.append(param)


class LazyLoading(LazyInit):
    """LazyInit around transformers' ``from_pretrained``, which builds on the meta device and puts weights in later."""

    allows_meta = True


def _is_float(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if func is aten.full.default and kwargs.get("dtype") is None:
        return isinstance(args[1], float)
    dtype: torch.dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return dtype.is_floating_point


def _cast_last(func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> InitStep | None:
    """Taking a part of what was cast to another dtype, as a cast of the part: the whole is never held twice."""
    sources: list[TensorView] = []

    def before_cast(x: Any) -> Any:
        view = view_of(x) if isinstance(x, Tensor) and deferred_storage_of(x) is not None else None
        source = _cast_from(view) if view is not None else None
        if view is None or source is None:
            return x
        sources.append(TensorView(source.place, source.dtype, view.size, view.stride, view.offset))
        return sources[-1]

    new_args = tree_map(before_cast, args)
    count = sum(isinstance(x, Tensor) for x in tree_flatten(args)[0])
    if len(sources) < count or len({view.dtype for view in sources}) > 1:
        return None
    out, dtype = view_of(result), sources[0].dtype
    part = TensorView(
        DeferredStorage(out.place.num_bytes // out.dtype.itemsize * dtype.itemsize), dtype, out.size, out.stride, 0
    )
    taken = InitStep(func, new_args, kwargs, (part,), _writers(view.place for view in sources))
    return InitStep(aten._to_copy.default, (part,), {"dtype": out.dtype}, (out,), (taken,))


def _cast_from(view: TensorView) -> TensorView | None:
    """What was cast, of the same layout, to what this is a view of, if nothing was written to either since."""
    cast = view.place.writer
    if cast is None or cast.func is not aten._to_copy.default:
        return None
    source, out = cast.args[0], cast.out[0]
    if not isinstance(source, TensorView) or out is None or out.place is not view.place:
        return None
    alike = (source.size, source.stride, source.offset) == (out.size, out.stride, out.offset)
    return source if alike and cast.before == _writers([source.place]) else None


def _is_to_meta(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that a function writes into."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_flatten(value)[0] if isinstance(x, Tensor)]
    return found


def _overwritten(func: Any, written: list[Tensor]) -> DeferredStorage | None:
    """The place of which a function leaves no value."""
    if len(written) == 1 and func._schema.name.partition("::")[2] in OVERWRITING:
        place, target = deferred_storage_of(written[0]), written[0]
        if place is not None and target.is_contiguous() and target.nbytes == place.num_bytes:
            return place
    return None


def _writers(places: Any) -> tuple[InitStep, ...]:
    return tuple({id(p.writer): p.writer for p in places if p.writer is not None}.values())


def _advance(func: Any, step: InitStep, generator: Any, overwrites: bool) -> None:
    """Draws what a step draws, and throws it away, so that the generator stands where it would."""
    probe = InitStep(func, step.args, {**step.kwargs, "generator": generator} if generator is not None else step.kwargs)
    run_step(probe, {} if overwrites else {id(p): run_recipe(p) for p in step.places()})


def _argument(x: Any) -> Any:
    """An argument as it is kept: a view, or a copy of what has values."""
    if not isinstance(x, Tensor):
        return x
    return view_of(x) if deferred_storage_of(x) is not None else x.detach().clone()


def _with_values(tree: Any) -> Any:
    return tree_map(lambda x: x if deferred_storage_of(x) is None else values_of(x), tree)


def _without_values(tree: Any) -> Any:
    return tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, tree)


def _on(device: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device(device)} if kwargs.get("device") is not None else kwargs


class RecordedCall:
    """A method of a model that waits for its values, in the place of the class's own."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model, self._name = model, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method: Callable[..., Any] = getattr(type(self._model), self._name)
        with recorded(self._model):
            return method(self._model, *args, **kwargs)


@contextmanager
def recorded(model: nn.Module) -> Iterator[None]:
    """What is done in here to weights that wait for their values goes into their recipes.

    Weights that were written to before, where nothing recorded it, are still known to be.
    """
    lost = {id(p) for p in model.parameters() if was_written(p)}
    with LazyInit():
        yield
    for p in model.parameters():
        if deferred_storage_of(p) is not None and id(p) not in lost:
            p.__dict__[VERSION] = p._version


def record_calls(model: nn.Module) -> None:
    """From now on the model's methods record what they do, until it has its values.

    These are the public ones that its own classes define, and those by which torch casts and initializes a module. The
    forward is none of them: it needs the values.
    """
    names = {"_apply", "apply"}
    for kind in type(model).__mro__:
        if kind is nn.Module:
            break
        own = vars(kind).items()
        names |= {name for name, value in own if isinstance(value, FunctionType) and not name.startswith("_")}
    vars(model).update({name: RecordedCall(model, name) for name in names - {"forward"} if name not in vars(model)})


def end_recorded_calls(model: nn.Module) -> None:
    """Gives the model its own methods back."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, RecordedCall):
                del vars(module)[name]
