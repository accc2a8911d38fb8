"""Build models on the meta device, and record the operations that initialize their tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import getattr_static
from types import FunctionType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from shardformer.errors import ConfigError
from shardformer.meta_init import init_recipe
from shardformer.meta_init.init_recipe import (
    DeferredStorage,
    DeferredTensorView,
    RecordedInitStep,
    get_deferred_storage,
    get_deferred_view,
)
from shardformer.torch_compat import TorchDispatchMode, schema_of, tree_flatten, tree_map
from shardformer.torch_patches import Patch, install_patch

aten = torch.ops.aten

EMPTY_FACTORIES = (aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default)
FILLED_FACTORIES = (aten.zeros.default, aten.ones.default, aten.full.default)
RANDOM_FACTORIES = {
    aten.rand.default: (aten.uniform_.default, 0),
    aten.rand.generator: (aten.uniform_.default, 0),
    aten.randn.default: (aten.normal_.default, 0),
    aten.randn.generator: (aten.normal_.default, 0),
    aten.normal.float_float: (aten.normal_.default, 2),
}
"""Random factory function -> (in-place function that fills an empty tensor, number of leading arguments for it)."""

FACTORIES = {*EMPTY_FACTORIES, *FILLED_FACTORIES, *RANDOM_FACTORIES}

SLICING_OPS = {aten.clone.default, aten.cat.default}  # Functions that copy a shard out of a full tensor

OVERWRITING_OPS = {
    "normal_",
    "uniform_",
    "random_",
    "zero_",
    "fill_",
    "copy_",
    "exponential_",
    "log_normal_",
    "cauchy_",
}
"""Functions that overwrite a tensor without reading it. They draw the same amount of random numbers for any values."""

VERSION = "_shardformer_version"
IS_META: Any = getattr_static(Tensor, "is_meta").__get__
DEVICE: Any = getattr_static(Tensor, "device").__get__


class ReportCpuDeviceMode(TorchFunctionMode):
    """A function mode in which lazily built tensors report the CPU as their device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == IS_META and get_deferred_storage(args[0]) is not None:
            return False
        if func == DEVICE and get_deferred_storage(args[0]) is not None:
            return torch.device("cpu")
        return func(*args, **(kwargs or {}))


class InitRecorderMode(TorchDispatchMode):
    """A dispatch mode that records operations on lazily built tensors, and runs all other operations normally.

    Operations that need a value (``item()``, a comparison) compute it immediately. An operation that draws random
    numbers draws and discards them, so that later random numbers are unchanged.
    """

    creates_lazily = allows_meta = False
    """Whether new floating-point tensors are created without values; whether other code may create meta tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives its bases no types
        self._cpu_device_mode = ReportCpuDeviceMode()

    def __enter__(self) -> Self:
        self._cpu_device_mode.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch gives its bases no types
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch gives its bases no types
        self._cpu_device_mode.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.scalar_tensor.default:  # the 2.0 of `weight[0] = 2.0`, on the device of the weight
            return func(*args, **{**kwargs, "device": torch.device("cpu")})
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if not any(get_deferred_storage(x) for x in tensors):
            if self.creates_lazily and func in FACTORIES and _creates_float_tensor(func, args, kwargs):
                return self._create_deferred_tensors(func, args, dict(kwargs))
            if (
                self.creates_lazily
                and func is aten.empty_like.default
                and args[0].is_meta
                and not _targets_meta_device(kwargs)
            ):
                like = {"dtype": kwargs.get("dtype") or args[0].dtype, "device": kwargs.get("device")}
                return self.__torch_dispatch__(aten.empty.memory_format, types, (list(args[0].shape),), like)
            return func(*args, **kwargs)
        if _targets_meta_device(kwargs):
            return func(*args, **kwargs)
        written = _find_written_tensors(func, args, kwargs)
        if any(x.is_meta and get_deferred_storage(x) is None for x in tensors):
            for x in written:  # an input has unknown values, so the output has too
                init_recipe.drop_init_recipe(x)
            return func(*_move_to_meta(args), **_move_to_meta(kwargs))
        if any(get_deferred_storage(x) is None for x in written):  # writes to a tensor with values
            return func(*_materialize_arguments(args), **_materialize_arguments(kwargs))
        try:
            result = func(*_move_to_meta(args), **_replace_device_kwarg("meta", _move_to_meta(kwargs)))
        except RuntimeError:  # the result depends on values, or the call is invalid and raises below
            result_with_values = func(*_materialize_arguments(args), **_materialize_arguments(kwargs))
            if not written:
                return result_with_values
            result = written[0]
        self._record_operation(func, args, kwargs, written, result)
        return result

    def _create_deferred_tensors(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device = torch.device(kwargs.get("device") or "cpu")
        if device.type != "cpu":
            if device.type == "meta" and not self.allows_meta:
                raise ConfigError(
                    "A tensor was created on the meta device inside LazyInit, so its values are unknown.",
                    remedy="Remove torch.device('meta'), or load saved weights with "
                    "shardformer.from_pretrained(ModelClass, folder).",
                )
            return func(*args, **kwargs)
        if func in RANDOM_FACTORIES:
            fill, num_args = RANDOM_FACTORIES[func]
            generator = kwargs.pop("generator", None)
            empty = self._create_deferred_tensors(aten.empty.memory_format, args[num_args:], kwargs)
            return self.__torch_dispatch__(fill, (), (empty, *args[:num_args]), {"generator": generator})
        result = func(*args, **{**kwargs, "device": torch.device("meta")})
        deferred = init_recipe.defer_storage(result)
        if func in FILLED_FACTORIES:
            options = {**kwargs, "device": device, "dtype": result.dtype}
            deferred.writer = RecordedInitStep(func, args, options, (get_deferred_view(result),))
        return result

    def _record_operation(self, func: Any, args: Any, kwargs: Any, written: list[Tensor], result: Any) -> None:
        results = list(result) if isinstance(result, tuple | list) else [result]
        new = [x for x in results if isinstance(x, Tensor) and x.is_meta and get_deferred_storage(x) is None]
        for x in new:
            init_recipe.defer_storage(x)
        if not new and not written:
            return  # a view, or a query that needs no values
        if func in SLICING_OPS and (steps := _slice_before_cast(func, args, kwargs, result)):
            get_deferred_view(result).deferred.writer = steps
            return
        step = RecordedInitStep(
            func, tree_map(_snapshot_argument, args), _replace_device_kwarg("cpu", tree_map(_snapshot_argument, kwargs))
        )
        step.out = tuple(get_deferred_view(x) if any(x is n for n in new) else None for x in results)
        draws, generator = torch.Tag.nondeterministic_seeded in func.tags, kwargs.get("generator")
        if draws:
            step.state = torch.get_rng_state() if generator is None else generator.get_state()
            step.kwargs.pop("generator", None)
        overwritten = _find_overwritten_storage(func, written)
        step.before = _list_writer_steps(p for p in step.list_deferred_storages() if p is not overwritten)
        if draws:
            _advance_generator(func, step, generator, overwritten is not None)
        for x in (*written, *new):
            get_deferred_view(x).deferred.writer = step


class LazyInit(InitRecorderMode):
    """A context that builds models without allocating weights: ``with LazyInit(): model = BertModel(config)``.

    Parameters and floating-point buffers are created on the meta device, each with a recipe. ``shard_model`` or
    ``materialize`` computes the values later. They are bitwise identical to the values of a model that is built on the
    CPU at the same point of the program, and torch's random state advances identically.

    Code that changes weights (``model.half()``, custom init functions) must also run inside the ``with`` block.

    >>> with LazyInit():
    ...     layer = nn.Linear(4, 2)
    >>> layer.weight.device
    device(type='meta')
    """

    creates_lazily = True

    def __init__(self) -> None:
        super().__init__()
        self._params: list[nn.Parameter] = []

    def __enter__(self) -> Self:
        install_patch(REGISTRATION_PATCH, lambda: register_module_parameter_registration_hook(_record_parameter).remove)
        super().__enter__()
        _ACTIVE.params.append(self._params)
        return self

    def __exit__(self, *error: Any) -> None:
        _ACTIVE.params.pop()
        super().__exit__(*error)
        for param in self._params:
            param.__dict__[VERSION] = param._version
        self._params.clear()


def was_modified_outside_lazy_init(param: nn.Parameter) -> bool:
    """Return whether a meta parameter was modified outside ``LazyInit``, where changes are not recorded."""
    return bool(param._version != vars(param).get(VERSION, param._version))


class _ActiveLazyInits(threading.local):
    """The parameters registered in each ``LazyInit`` context that is active in this thread."""

    def __init__(self) -> None:
        self.params: list[list[nn.Parameter]] = []


_ACTIVE = _ActiveLazyInits()
# The hook stays installed after the block: torch keeps these hooks in one dict, which all threads iterate while they
# build models. Adding or removing a hook in one thread raises "mutated during iteration" in another.
REGISTRATION_PATCH = Patch(
    "torch.nn.Module: global hook of register_parameter()",
    "shardformer.meta_init.lazy_init",
    "LazyInit records the parameters of modules",
)


def _record_parameter(module: nn.Module, name: str, param: Any) -> None:
    if isinstance(param, nn.Parameter):
        for params in _ACTIVE.params:
            params.append(param)


class LazyLoading(LazyInit):
    """A variant of LazyInit for transformers' ``from_pretrained``, which itself creates tensors on the meta device."""

    allows_meta = True


def _creates_float_tensor(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if func is aten.full.default and kwargs.get("dtype") is None:
        return isinstance(args[1], float)
    dtype: torch.dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return dtype.is_floating_point


def _slice_before_cast(func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> RecordedInitStep | None:
    """Cast a slice of a tensor instead of slicing the cast tensor, so that no full-size copy is allocated."""
    sources: list[DeferredTensorView] = []

    def to_source(x: Any) -> Any:
        view = get_deferred_view(x) if isinstance(x, Tensor) and get_deferred_storage(x) is not None else None
        source = _find_cast_source(view) if view is not None else None
        if view is None or source is None:
            return x
        sources.append(DeferredTensorView(source.deferred, source.dtype, view.size, view.stride, view.offset))
        return sources[-1]

    new_args = tree_map(to_source, args)
    count = sum(isinstance(x, Tensor) for x in tree_flatten(args)[0])
    if len(sources) < count or len({view.dtype for view in sources}) > 1:
        return None
    out, dtype = get_deferred_view(result), sources[0].dtype
    storage = DeferredStorage(out.deferred.num_bytes // out.dtype.itemsize * dtype.itemsize)
    part = DeferredTensorView(storage, dtype, out.size, out.stride, 0)
    slice_step = RecordedInitStep(
        func, new_args, kwargs, (part,), _list_writer_steps(view.deferred for view in sources)
    )
    return RecordedInitStep(aten._to_copy.default, (part,), {"dtype": out.dtype}, (out,), (slice_step,))


def _find_cast_source(view: DeferredTensorView) -> DeferredTensorView | None:
    """Return the tensor that was cast to create ``view``, or None if either tensor was modified after the cast."""
    cast = view.deferred.writer
    if cast is None or cast.func is not aten._to_copy.default:
        return None
    source, out = cast.args[0], cast.out[0]
    if not isinstance(source, DeferredTensorView) or out is None or out.deferred is not view.deferred:
        return None
    has_same_layout = (source.size, source.stride, source.offset) == (out.size, out.stride, out.offset)
    return source if has_same_layout and cast.before == _list_writer_steps([source.deferred]) else None


def _targets_meta_device(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"


def _find_written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    found = []
    for i, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_flatten(value)[0] if isinstance(x, Tensor)]
    return found


def _find_overwritten_storage(func: Any, written: list[Tensor]) -> DeferredStorage | None:
    if len(written) == 1 and schema_of(func).name.partition("::")[2] in OVERWRITING_OPS:
        deferred, target = get_deferred_storage(written[0]), written[0]
        if deferred is not None and target.is_contiguous() and target.nbytes == deferred.num_bytes:
            return deferred
    return None


def _list_writer_steps(deferred_storages: Any) -> tuple[RecordedInitStep, ...]:
    return tuple({id(p.writer): p.writer for p in deferred_storages if p.writer is not None}.values())


def _advance_generator(func: Any, step: RecordedInitStep, generator: Any, overwrites: bool) -> None:
    """Advance a random generator as a recorded operation does, by running it and discarding the result."""
    given = {"generator": generator} if generator is not None else {}
    inputs = [] if overwrites else step.list_deferred_storages()
    probe = RecordedInitStep(func, step.args, {**step.kwargs, **given})
    init_recipe.run_init_step(probe, {id(deferred): init_recipe.run_init_recipe(deferred) for deferred in inputs})


def _snapshot_argument(argument: Any) -> Any:
    """Copy a tensor argument of a recorded operation, or return a placeholder if it has no values."""
    if not isinstance(argument, Tensor):
        return argument
    return get_deferred_view(argument) if get_deferred_storage(argument) is not None else argument.detach().clone()


def _materialize_arguments(arguments: Any) -> Any:
    return tree_map(
        lambda x: x if get_deferred_storage(x) is None else init_recipe.compute_deferred_values(x), arguments
    )


def _move_to_meta(arguments: Any) -> Any:
    return tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, arguments)


def _replace_device_kwarg(device: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device(device)} if kwargs.get("device") is not None else kwargs


class RecordingMethodWrapper:
    """A wrapper around a model's method that records how the method changes lazily built weights."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model, self._name = model, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method: Callable[..., Any] = getattr(type(self._model), self._name)
        with record_weight_changes(self._model):
            return method(self._model, *args, **kwargs)


@contextmanager
def record_weight_changes(model: nn.Module) -> Iterator[None]:
    """Record all changes to the weights of a lazily built model that happen inside the context.

    Weights that were modified outside such a context remain invalid.
    """
    modified = {id(p) for p in model.parameters() if was_modified_outside_lazy_init(p)}
    with LazyInit():
        yield
    for p in model.parameters():
        if get_deferred_storage(p) is not None and id(p) not in modified:
            p.__dict__[VERSION] = p._version


def wrap_methods_for_recording(model: nn.Module) -> None:
    """Wrap the methods of a lazily built model so that they record how they change its weights.

    This wraps the public methods of the model's own classes except ``forward``, and torch's ``_apply`` and ``apply``.
    """
    names = {"_apply", "apply"}
    for kind in type(model).__mro__:
        if kind is nn.Module:
            break
        own = vars(kind).items()
        names |= {name for name, value in own if isinstance(value, FunctionType) and not name.startswith("_")}
    vars(model).update(
        {name: RecordingMethodWrapper(model, name) for name in names - {"forward"} if name not in vars(model)}
    )


def restore_wrapped_methods(model: nn.Module) -> None:
    """Restore the original methods of a model that ``wrap_methods_for_recording`` has wrapped."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, RecordingMethodWrapper):
                del vars(module)[name]
