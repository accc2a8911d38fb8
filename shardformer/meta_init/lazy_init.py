"""Build models on the meta device, record how their tensors are initialized, and compute the weights later."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import getattr_static
from types import FunctionType
from typing import Any, Self

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from shardformer.errors import ConfigError, check_argument
from shardformer.layout.sharding_metadata import check_is_module
from shardformer.meta_init import init_recipe
from shardformer.meta_init.init_recipe import (
    DeferredInitTensorView,
    DeferredStorage,
    RecordedInitStep,
    attach_deferred_storage,
    get_deferred_storage,
    get_deferred_view,
    materialize_deferred_storage,
)
from shardformer.meta_init.safetensors_source import find_weight_files
from shardformer.module_paths import named_params_and_buffers
from shardformer.torch_compat import (
    TorchDispatchMode,
    has_meta_tensors,
    schema_of,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
)
from shardformer.torch_patches import LibraryPatch, install_patch

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
IS_META: Callable[[Tensor], bool] = getattr_static(Tensor, "is_meta").__get__
DEVICE: Callable[[Tensor], torch.device] = getattr_static(Tensor, "device").__get__


class ReportCpuDeviceMode(TorchFunctionMode):
    """Torch function mode in which lazily built tensors report the CPU as their device."""

    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if func == IS_META and get_deferred_storage(args[0]) is not None:
            return False
        if func == DEVICE and get_deferred_storage(args[0]) is not None:
            return torch.device("cpu")
        return func(*args, **(kwargs or {}))


class InitRecorderMode(TorchDispatchMode):
    """Torch dispatch mode that records operations on lazily built tensors and runs all others normally.

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

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
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
                and not _requests_meta_device(kwargs)
            ):
                like = {"dtype": kwargs.get("dtype") or args[0].dtype, "device": kwargs.get("device")}
                return self.__torch_dispatch__(aten.empty.memory_format, types, (list(args[0].shape),), like)
            return func(*args, **kwargs)
        if _requests_meta_device(kwargs):
            return func(*args, **kwargs)
        written = _get_mutated_tensors(func, args, kwargs)
        if any(x.is_meta and get_deferred_storage(x) is None for x in tensors):
            for x in written:  # an input has unknown values, so the output has too
                init_recipe.drop_init_recipe(x)
            return func(*_move_tensors_to_meta(args), **_move_tensors_to_meta(kwargs))
        if any(get_deferred_storage(x) is None for x in written):  # writes to a tensor with values
            return func(*_materialize_arguments(args), **_materialize_arguments(kwargs))
        try:
            result = func(*_move_tensors_to_meta(args), **_replace_device_kwarg("meta", _move_tensors_to_meta(kwargs)))
        except RuntimeError:  # the result depends on values, or the call is invalid and raises below
            result_with_values = func(*_materialize_arguments(args), **_materialize_arguments(kwargs))
            if not written:
                return result_with_values
            result = written[0]
        self._record_operation(func, args, kwargs, written, result)
        return result

    def _create_deferred_tensors(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        deferred = init_recipe.attach_deferred_storage(result)
        if func in FILLED_FACTORIES:
            options = {**kwargs, "device": device, "dtype": result.dtype}
            deferred.writer_step = RecordedInitStep(func, args, options, (get_deferred_view(result),))
        return result

    def _record_operation(self, func: Any, args: Any, kwargs: Any, mutated_tensors: list[Tensor], result: Any) -> None:
        results = list(result) if isinstance(result, tuple | list) else [result]
        new = [x for x in results if isinstance(x, Tensor) and x.is_meta and get_deferred_storage(x) is None]
        for x in new:
            init_recipe.attach_deferred_storage(x)
        if not new and not mutated_tensors:
            return  # a view, or a query that needs no values
        if func in SLICING_OPS and (steps := _make_slice_then_cast_step(func, args, kwargs, result)):
            get_deferred_view(result).deferred.writer_step = steps
            return
        step = RecordedInitStep(
            func, tree_map(_snapshot_argument, args), _replace_device_kwarg("cpu", tree_map(_snapshot_argument, kwargs))
        )
        step.output_views = tuple(get_deferred_view(x) if any(x is n for n in new) else None for x in results)
        draws, generator = torch.Tag.nondeterministic_seeded in func.tags, kwargs.get("generator")
        if draws:
            step.rng_state = torch.get_rng_state() if generator is None else generator.get_state()
            step.kwargs.pop("generator", None)
        overwritten = _find_overwritten_storage(func, mutated_tensors)
        step.input_steps = _get_last_writer_steps(p for p in step.get_deferred_storages() if p is not overwritten)
        if draws:
            _advance_generator(func, step, generator, overwritten is not None)
        for x in (*mutated_tensors, *new):
            get_deferred_view(x).deferred.writer_step = step


class LazyInit(InitRecorderMode):
    """Context manager that builds a model without allocating its weights.

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
        install_patch(
            REGISTRATION_PATCH, lambda: register_module_parameter_registration_hook(_parameter_registration_hook).remove
        )
        super().__enter__()
        _ACTIVE.params.append(self._params)
        return self

    def __exit__(self, *error: Any) -> None:
        _ACTIVE.params.pop()
        super().__exit__(*error)
        for param in self._params:
            param.__dict__[VERSION] = param._version
        self._params.clear()


def is_modified_outside_lazy_init(param: nn.Parameter) -> bool:
    """Return whether a meta parameter was modified outside ``LazyInit``, where changes are not recorded."""
    return bool(param._version != vars(param).get(VERSION, param._version))


class _ActiveLazyInitParams(threading.local):
    """Parameters that were registered in each active ``LazyInit`` context of this thread."""

    def __init__(self) -> None:
        self.params: list[list[nn.Parameter]] = []


_ACTIVE = _ActiveLazyInitParams()
# The hook stays installed after the block: torch keeps these hooks in one dict, which all threads iterate while they
# build models. Adding or removing a hook in one thread raises "mutated during iteration" in another.
REGISTRATION_PATCH = LibraryPatch(
    "torch.nn.Module: global hook of register_parameter()",
    "shardformer.meta_init.lazy_init",
    "lets `LazyInit` record each module's parameters",
)


def _parameter_registration_hook(module: nn.Module, param_name: str, param: nn.Parameter | None) -> None:
    if isinstance(param, nn.Parameter):
        for params in _ACTIVE.params:
            params.append(param)


class LazyInitFromPretrained(LazyInit):
    """A variant of LazyInit for transformers' ``from_pretrained``, which itself creates tensors on the meta device."""

    allows_meta = True


def _creates_float_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is aten.full.default and kwargs.get("dtype") is None:
        return isinstance(args[1], float)
    dtype: torch.dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return dtype.is_floating_point


def _make_slice_then_cast_step(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> RecordedInitStep | None:
    """Cast a slice of a tensor instead of slicing the cast tensor, so that no full-size copy is allocated."""
    sources: list[DeferredInitTensorView] = []

    def to_cast_source(argument: Any) -> Any:
        view = (
            get_deferred_view(argument)
            if isinstance(argument, Tensor) and get_deferred_storage(argument) is not None
            else None
        )
        source = _get_view_before_cast(view) if view is not None else None
        if view is None or source is None:
            return argument
        sources.append(DeferredInitTensorView(source.deferred, source.dtype, view.size, view.stride, view.offset))
        return sources[-1]

    new_args = tree_map(to_cast_source, args)
    count = sum(isinstance(x, Tensor) for x in tree_flatten(args)[0])
    if len(sources) < count or len({view.dtype for view in sources}) > 1:
        return None
    out, dtype = get_deferred_view(result), sources[0].dtype
    storage = DeferredStorage(out.deferred.num_bytes // out.dtype.itemsize * dtype.itemsize)
    part = DeferredInitTensorView(storage, dtype, out.size, out.stride, 0)
    slice_step = RecordedInitStep(
        func, new_args, kwargs, (part,), _get_last_writer_steps(view.deferred for view in sources)
    )
    return RecordedInitStep(aten._to_copy.default, (part,), {"dtype": out.dtype}, (out,), (slice_step,))


def _get_view_before_cast(cast_view: DeferredInitTensorView) -> DeferredInitTensorView | None:
    """Return the tensor that was cast to create ``cast_view``, or None if either tensor was modified after the cast."""
    cast = cast_view.deferred.writer_step
    if cast is None or cast.func is not aten._to_copy.default:
        return None
    source, out = cast.args[0], cast.output_views[0]
    if not isinstance(source, DeferredInitTensorView) or out is None or out.deferred is not cast_view.deferred:
        return None
    has_same_layout = (source.size, source.stride, source.offset) == (out.size, out.stride, out.offset)
    return source if has_same_layout and cast.input_steps == _get_last_writer_steps([source.deferred]) else None


def _requests_meta_device(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"


def _get_mutated_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found = []
    for i, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_flatten(value)[0] if isinstance(x, Tensor)]
    return found


def _find_overwritten_storage(func: Any, mutated_tensors: list[Tensor]) -> DeferredStorage | None:
    if len(mutated_tensors) == 1 and schema_of(func).name.partition("::")[2] in OVERWRITING_OPS:
        deferred, target = get_deferred_storage(mutated_tensors[0]), mutated_tensors[0]
        if deferred is not None and target.is_contiguous() and target.nbytes == deferred.num_bytes:
            return deferred
    return None


def _get_last_writer_steps(deferred_storages: Iterable[DeferredStorage]) -> tuple[RecordedInitStep, ...]:
    return tuple({id(p.writer_step): p.writer_step for p in deferred_storages if p.writer_step is not None}.values())


def _advance_generator(func: Any, step: RecordedInitStep, generator: Any, is_overwriting: bool) -> None:
    """Advance a random generator by running a recorded operation and discarding the result."""
    given = {"generator": generator} if generator is not None else {}
    inputs = [] if is_overwriting else step.get_deferred_storages()
    probe = RecordedInitStep(func, step.args, {**step.kwargs, **given})
    init_recipe.run_init_step(
        probe, {id(deferred): init_recipe.materialize_deferred_storage(deferred) for deferred in inputs}
    )


def _snapshot_argument(argument: Any) -> Any:
    """Copy a tensor argument of a recorded operation, or return a placeholder if it has no values."""
    if not isinstance(argument, Tensor):
        return argument
    return get_deferred_view(argument) if get_deferred_storage(argument) is not None else argument.detach().clone()


def _materialize_arguments(arguments: Any) -> Any:
    return tree_map(
        lambda x: x if get_deferred_storage(x) is None else init_recipe.compute_deferred_values(x), arguments
    )


def _move_tensors_to_meta(arguments: Any) -> Any:
    return tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, arguments)


def _replace_device_kwarg(device: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device(device)} if kwargs.get("device") is not None else kwargs


class RecordingMethodWrapper:
    """A wrapper around a model's method that records how the method changes lazily built weights."""

    def __init__(self, model: nn.Module, method_name: str) -> None:
        self._model, self._name = model, method_name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method: Callable[..., Any] = getattr(type(self._model), self._name)
        with record_weight_changes(self._model):
            return method(self._model, *args, **kwargs)


@contextmanager
def record_weight_changes(model: nn.Module) -> Iterator[None]:
    """Record all changes to the weights of a lazily built model that happen inside the context.

    Weights that were modified outside such a context remain invalid.
    """
    modified = {id(p) for p in model.parameters() if is_modified_outside_lazy_init(p)}
    with LazyInit():
        yield
    for p in model.parameters():
        if get_deferred_storage(p) is not None and id(p) not in modified:
            p.__dict__[VERSION] = p._version


def wrap_methods_to_record_weight_changes(model: nn.Module) -> None:
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
    """Restore the original methods of a model that ``wrap_methods_to_record_weight_changes`` has wrapped."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, RecordingMethodWrapper):
                del vars(module)[name]


NOTES = "_shardformer_loading"


def has_deferred_weights(model: nn.Module) -> bool:
    """Return whether a lazily built parameter or buffer of the model has no values yet."""
    return has_meta_tensors(model) and any(
        get_deferred_storage(t) is not None for _, t in named_params_and_buffers(model)
    )


def record_changes_if_lazy(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context manager that records changes to a model if it was built lazily."""
    return InitRecorderMode() if has_deferred_weights(model) else nullcontext()


def copy_and_materialize(model: nn.Module) -> nn.Module:
    """Copy a lazily built model, and compute the weights of the copy but not of the original.

    Values that no recorded operation writes, such as those of ``copy_to_meta``, are drawn with a fixed seed.
    """
    with record_changes_if_lazy(model):
        copied = copy.deepcopy(model)
    restore_wrapped_methods(copied)  # they are bound to the original model
    return materialize_parameters(copied, test_values=torch.Generator().manual_seed(0))


def copy_to_meta(model: nn.Module) -> nn.Module:
    """Copy a model, with all parameters of the copy on the meta device. Its buffers keep their values.

    ``shard_model`` allocates uninitialized shards for the copy, which the caller must fill.
    """
    memo: dict[int, Any] = {}
    for param in model.parameters():
        empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        empty.__dict__.update({name: value for name, value in vars(param).items() if name != VERSION})
        attach_deferred_storage(empty)
        memo[id(param)] = empty
    for value in (value for module in model.modules() for value in tree_leaves(vars(module))):
        if isinstance(value, Tensor) and value.grad_fn is not None:  # set by weight_norm, prune and PEFT
            memo[id(value)] = value.detach().clone()
    with record_changes_if_lazy(model):
        return copy.deepcopy(model, memo)


def get_lazy_init_notes(model: nn.Module) -> list[str]:
    """Describe how the weights of a lazily built model were computed, as lines of text."""
    return ["Built with LazyInit: each rank computed only its own shards.", *vars(model).get(NOTES, ())]


def materialize(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Compute the weights and buffers of a model that was built with ``LazyInit``, in place.

    The tensors are on ``device``, or on the CPU without it. This needs no process group. To compute only the shards of
    this rank, call ``shard_model`` instead.

    Returns:
        The same model.

    Raises:
        ConfigError: if some values cannot be computed.
    """
    check_is_module(model)
    if has_meta_tensors(model):
        check_meta_tensors_can_be_computed(model)
    return materialize_parameters(model, _parse_target_device(device))


def _parse_target_device(device: torch.device | str | None) -> torch.device | None:
    if device is None:
        return None
    rule, remedy = "device must be a torch device other than meta", "Pass a device such as 'cuda:0', or omit device"
    check_argument("device", device, isinstance(device, torch.device | str), rule, remedy)
    try:
        torch_device = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(
            f"device={device!r} is not a torch device.", remedy="Pass a device such as 'cuda:0', or omit device."
        ) from error
    check_argument("device", device, torch_device.type != "meta", rule, remedy)
    return torch_device


def materialize_parameters(
    model: nn.Module, device: torch.device | str | None = None, test_values: torch.Generator | None = None
) -> nn.Module:
    """Compute the values of all meta tensors in a model, one tensor at a time to limit peak memory.

    Args:
        test_values: draws the values that no recorded operation writes. None: uninitialized.

    Raises:
        ConfigError: if a weight file changed while it was read.
    """
    files = find_weight_files(model)
    storages: dict[DeferredStorage, UntypedStorage] = {}
    materialized: dict[int, Tensor] = {}
    cpu = torch.device("cpu")

    def materialize_tensor(tensor: Tensor, target_device: torch.device) -> Tensor:
        deferred = get_deferred_storage(tensor)
        if deferred is None and target_device in (tensor.device, cpu):
            return tensor
        if id(tensor) not in materialized:
            with torch.no_grad():
                if deferred is not None and deferred not in storages:
                    storage = materialize_deferred_storage(deferred, test_values)
                    if test_values is not None and deferred.writer_step is None:
                        init_recipe.fill_with_test_values(storage, get_deferred_view(tensor), test_values)
                    values = torch.empty(0, dtype=torch.uint8).set_(storage)
                    storages[deferred] = values.to(target_device).untyped_storage()
                new = (
                    tensor.to(target_device)
                    if deferred is None
                    else get_deferred_view(tensor).to_tensor(storages[deferred])
                )
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            new.__dict__.update({name: value for name, value in vars(tensor).items() if name != VERSION})
            materialized[id(tensor)] = new
        return materialized[id(tensor)]

    for module in model.modules():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers]
        for table in tables:
            table.update(
                {n: materialize_tensor(t, torch.device(device or cpu)) for n, t in table.items() if t is not None}
            )
        for name, value in list(vars(module).items()):  # tensors in plain attributes do not move with the model
            if type(value) not in (Tensor, nn.Parameter, list, tuple, dict) or any(value is table for table in tables):
                continue
            if any(get_deferred_storage(x) is not None for x in tree_leaves(value)):
                vars(module)[name] = tree_map_only(Tensor, lambda x: materialize_tensor(x, cpu), value)
    for file in files:
        file.check_unchanged()
    restore_wrapped_methods(model)
    return model


def check_meta_tensors_can_be_computed(model: nn.Module) -> None:
    """Check that the values of all meta tensors in a model can be computed.

    Raises:
        ConfigError: if a meta tensor has no recipe, a parameter was modified outside ``LazyInit``, or a weight file
            changed since it was loaded.
    """
    empty = [name for name, t in named_params_and_buffers(model) if t.is_meta and get_deferred_storage(t) is None]
    if empty:
        raise ConfigError(
            f"This {type(model).__name__} has tensors without values on the meta device, such as {empty[0]!r}.",
            remedy="Build the model inside `with LazyInit():`, where you must also call .to() and .half(), or load it "
            "with shardformer.from_pretrained.",
        )
    changed = [name for name, p in model.named_parameters() if is_modified_outside_lazy_init(p)]
    if changed:
        raise ConfigError(
            f"The parameter {changed[0]!r} of this {type(model).__name__} was modified after the LazyInit block ended, "
            "so the change was not recorded.",
            remedy="Modify weights inside the `with LazyInit():` block, or after calling shard_model or materialize.",
        )
    for file in find_weight_files(model):
        file.check_unchanged(compare_contents=True)
