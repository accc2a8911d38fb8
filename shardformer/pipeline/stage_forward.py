"""Runs only the layers of one pipeline stage when the model's own `forward` is called.

Parameters of other stages are removed from their modules and replaced with placeholder attributes: one NaN, expanded to
the parameter's shape. A placeholder needs no memory, but has a shape, dtype and device for code that reads them. If a
result depends on a placeholder by mistake, it is NaN, which the checks of arguments and losses detect.
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

from shardformer.context_parallel.sequence_sharded_tensor import to_local, wrap_shard_like
from shardformer.errors import ConfigError, PolicyError
from shardformer.forward_hooks import HookOrder, register_forward_hooks
from shardformer.pipeline.layer_sequence import LayerRange, LayerSequence, LayerStackDescription
from shardformer.random_state import SPLITMIX64, RNGUseDetector, seed_all_generators
from shardformer.tensor_parallel.sequence_parallel import get_first_tensor_arg
from shardformer.torch_compat import has_real_data, tree_leaves


class ParameterPlaceholders:
    """Replaces parameters of other pipeline stages with placeholders that use no memory."""

    def __init__(self) -> None:
        self.is_visible = False
        """Whether ``parameters()`` includes placeholders, for code that reads a module's dtype or device from them."""
        self._names: dict[int, tuple[str, ...]] = {}  # by id of the module, in registration order
        self._placeholders: list[tuple[nn.Module, str, tuple[str, ...]]] = []  # module, attribute, full names
        self._device: torch.device | None = None
        self._local_param: tuple[nn.Module, str] | None = None
        self._local_dtypes: dict[str, torch.dtype] = {}

    def __len__(self) -> int:
        return len(self._placeholders)

    def replace_nonlocal_params(self, model: nn.Module, is_local_by_name: Mapping[str, bool]) -> None:
        """Replace each parameter that this rank does not store with a placeholder.

        Args:
            is_local_by_name: whether this rank stores a parameter, by its name. A tied parameter stays if any name is
                local.
        """
        names: dict[tuple[int, str], tuple[str, ...]] = {}
        modules = list(model.named_modules(remove_duplicate=False))
        for path, module in modules:
            for name in module._parameters:
                full = f"{path}.{name}" if path else name
                names[id(module), name] = (*names.get((id(module), name), ()), full)
        self._names = {id(module): tuple(module._parameters) for _, module in modules}
        for _, module in modules:
            for name, param in list(module._parameters.items()):
                if param is not None and not any(is_local_by_name.get(full, True) for full in names[id(module), name]):
                    del module._parameters[name]
                    module.__dict__[name] = _make_placeholder(param)
                    self._placeholders.append((module, name, names[id(module), name]))
        self._local_dtypes = get_param_dtypes(model)
        incomplete = {id(module) for module, _, _ in self._placeholders}
        for _, module in modules:
            if any(id(inner) in incomplete for inner in module.modules()):
                module.__dict__["named_parameters"] = _NamedParametersOverride(module, self)

    def rename_parameters(self, rename_fn: Callable[[str], str]) -> None:
        """Update the stored names of parameters after modules were moved inside the model."""
        self._placeholders = [
            (module, name, tuple(map(rename_fn, names))) for module, name, names in self._placeholders
        ]
        self._local_dtypes = {rename_fn(name): dtype for name, dtype in self._local_dtypes.items()}

    @contextmanager
    def include_placeholders(self) -> Iterator[None]:
        """Make ``module.parameters()`` include the placeholders in the ``with`` block."""
        before, self.is_visible = self.is_visible, True
        try:
            yield
        finally:
            self.is_visible = before

    def get_param_names(self, module: nn.Module) -> tuple[str, ...]:
        """Return the names of a module's own parameters and placeholders, in registration order."""
        return self._names.get(id(module), tuple(module._parameters))

    def find_modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the modules with parameters of their own that are placeholders, by path."""
        incomplete = {id(module) for module, _, _ in self._placeholders}
        return {path: module for path, module in model.named_modules() if id(module) in incomplete}

    def has_placeholders(self, module: nn.Module) -> bool:
        inside = {id(m) for m in module.modules()}
        return any(id(m) in inside for m, _, _ in self._placeholders)

    def move_to_device_of(self, model: nn.Module) -> None:
        """Move the parameter placeholders to the device of the model's parameters."""
        param = self._find_local_param(model)
        if param is not None and param.device != self._device:
            self._device = param.device
            for module, name, _ in self._placeholders:
                _convert_placeholder(module, name, param.device)

    def convert_dtypes(self, model: nn.Module, dtype_by_name: Mapping[str, torch.dtype]) -> None:
        """Cast each placeholder to the dtype that the real parameter has on its own pipeline stage.

        Args:
            dtype_by_name: dtypes of the parameters of all stages, by name. A missing parameter (in a trace of a single
                rank) is converted like this rank's parameters of the same dtype.
        """
        before, self._local_dtypes = self._local_dtypes, get_param_dtypes(model)
        converted = {before[name]: dtype for name, dtype in self._local_dtypes.items() if name in before}
        for module, name, names in self._placeholders:
            known = next((dtype_by_name[n] for n in names if n in dtype_by_name), None)
            now = module.__dict__[name].dtype
            _convert_placeholder(module, name, known or converted.get(now, now))

    def _find_local_param(self, model: nn.Module) -> Tensor | None:
        if self._local_param is not None:
            found = self._local_param[0]._parameters.get(self._local_param[1])
            if found is not None:
                return found
        for module in model.modules():
            for name, param in module._parameters.items():
                if param is not None and param.is_floating_point():
                    self._local_param = module, name
                    return param
        return None


class _NamedParametersOverride:
    """Replacement for ``module.named_parameters`` that can include placeholders for other stages' parameters."""

    def __init__(self, module: nn.Module, placeholders: ParameterPlaceholders) -> None:
        self._module, self._placeholders = module, placeholders

    def __call__(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        module = self._module
        if not self._placeholders.is_visible:
            return type(module).named_parameters(module, prefix, recurse, remove_duplicate)
        return self._iter_params_and_placeholders(prefix, recurse, remove_duplicate)

    def _iter_params_and_placeholders(
        self, prefix: str, recurse: bool, remove_duplicate: bool
    ) -> Iterator[tuple[str, nn.Parameter]]:
        module, seen = self._module, set[int]()
        modules = module.named_modules(prefix=prefix, remove_duplicate=remove_duplicate)
        for path, inner in modules if recurse else [(prefix, module)]:
            for name in self._placeholders.get_param_names(inner):
                value = inner._parameters.get(name)
                value = inner.__dict__.get(name) if value is None else value
                if value is not None and not (remove_duplicate and id(value) in seen):
                    seen.add(id(value))
                    yield f"{path}.{name}" if path else name, value


def get_param_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtype of each parameter that this rank stores. A tied parameter has an entry for each of its names."""
    return {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}


def _convert_placeholder(module: nn.Module, param_name: str, device_or_dtype: torch.device | torch.dtype) -> None:
    value: Tensor = module.__dict__[param_name]
    module.__dict__[param_name] = value.as_strided((), ()).to(device_or_dtype).expand(value.shape)


def make_nan_tensor(*shape: int, like: Tensor) -> Tensor:
    """Create a NaN-filled tensor of any shape that uses the memory of a single element."""
    return torch.full((), float("nan"), dtype=like.dtype, device=like.device).expand(shape)


def _make_placeholder(param: Tensor) -> Tensor:
    device = torch.device("cpu") if param.is_meta else param.device
    number = float("nan") if param.is_floating_point() else 0
    return torch.full((), number, dtype=param.dtype, device=device).expand(tuple(param.shape))


def make_placeholder_output(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Create a NaN tensor with the shape and dtype of the output of a skipped embedding or linear layer."""
    x = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
    weight: Any = module.weight
    if not isinstance(module, nn.Linear):
        width: Any = module.embedding_dim
        return make_nan_tensor(*x.shape, width, like=weight).contiguous()
    out = make_nan_tensor(*x.shape[:-1], module.out_features, like=weight).contiguous()
    kind = x.device.type  # autocast applies to linear layers, not to embeddings
    return out.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else out


def has_nan(tensor: Any) -> bool:
    """Return whether an object is a tensor that contains NaN."""
    return _has_readable_float_values(tensor) and bool(tensor.isnan().any())


def is_all_nan(tensor: Any) -> bool:
    """Return whether an object is a tensor that contains only NaN, like the output of a skipped module."""
    return _has_readable_float_values(tensor) and bool(tensor.isnan().all())


def _has_readable_float_values(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel() > 0 and has_real_data(tensor)


StageActivations = dict[str, Tensor]
"""Activations that a stage sends to the next: "hidden", and "context" from an earlier stack (encoder states)."""


@dataclass
class StageForwardState:
    """State of one micro-batch's forward pass through a pipeline stage.

    Args:
        span: the layers of the stage.
        received_activations: activations from the previous stage.
        seed: random seed of the micro-batch, or None if the model draws no random numbers.
        on_last_layer_end: called after the last layer of the model, before the head.
    """

    span: LayerRange
    received_activations: StageActivations
    seed: int | None = None
    on_last_layer_end: Callable[[], None] | None = None
    context: Tensor | None = None
    called_layers: list[int] = field(default_factory=list)
    is_computed: bool = True  # whether the previous layer's output has no NaN


class StageBoundaryReached(BaseException):  # not an Exception: models may catch those
    """Raised after the last layer of a pipeline stage to end the forward pass. Contains the activations to send."""

    def __init__(self, activations: StageActivations) -> None:
        self.payload = activations


class StageForward:
    """Overrides the `forward` methods of a model's layers to run only the layers of one pipeline stage.

    Args:
        model: the sharded model.
        layer_sequence: the layers of the model in execution order.
        placeholders: placeholders for the parameters of other stages.
        owner_layers_by_name: layer calls that each parameter belongs to, by name.
        embedding_types: embedding classes, whose output shape is known without computing them.
        checkpointed_layers: layer calls with activation checkpointing.
        random_stream_index_fn: returns the index of the random stream of a stack, or 0 if all ranks draw the same
            numbers.
        device: device of the stage.
        wrapper_by_layer_id: by the id of a layer, its outermost wrapper (activation checkpointing), which is overridden
            instead.
        override_permanently: whether to override the `forward` methods permanently, or only while
            ``override_forward_methods`` is active.
    """

    def __init__(
        self,
        model: nn.Module,
        layer_sequence: LayerSequence,
        placeholders: ParameterPlaceholders,
        owner_layers_by_name: Mapping[str, frozenset[int]],
        embedding_types: Sequence[type[nn.Module]] = (nn.Embedding,),
        checkpointed_layers: Iterable[int] = (),
        random_stream_index_fn: Callable[[LayerStackDescription], int] = lambda _: 0,
        device: torch.device | None = None,
        wrapper_by_layer_id: Mapping[int, nn.Module] = MappingProxyType({}),
        *,
        override_permanently: bool = True,
    ) -> None:
        self._chain, self._placeholders, self._embedding_types = layer_sequence, placeholders, tuple(embedding_types)
        self._checkpointed, self._random_stream = set(checkpointed_layers), random_stream_index_fn
        self._num_layers, self._wrappers, self._owners = (
            len(layer_sequence.called_layer_paths),
            dict(wrapper_by_layer_id),
            owner_layers_by_name,
        )
        # path -> layer or its wrapper, index of the stack, first layer call
        self._patched_layers: dict[str, tuple[nn.Module, int, int]] = {}
        self._checked_layers: set[int] = set()
        self.is_last_layer_valid: bool | None = None  # whether its first output was free of NaN
        self.misplaced_module_path: str | None = None  # runs after the last layer, but an earlier stage has its weights
        self.now: StageForwardState | None = None
        self.boundary_callbacks: list[Callable[[StageActivations], None]] = []  # called at the stage boundary
        self.draws = RNGUseDetector(device or torch.device("cpu"))
        self._overridden: dict[nn.Module, Callable[..., Any] | None] = {}  # instance attribute ``forward`` before
        self._remove_hooks: list[Callable[[], None]] = []
        if override_permanently:
            self._override_layer_forwards(model)

    @contextmanager
    def override_forward_methods(self, model: nn.Module) -> Iterator[None]:
        self._override_layer_forwards(model)
        try:
            yield
        finally:
            for module in list(self._overridden):
                self._restore_forward(module)
            for remove in self._remove_hooks:
                remove()
            self._remove_hooks = []

    def _override_layer_forwards(self, model: nn.Module) -> None:
        """Override the `forward` methods of the model's layers. Call this after all other changes to the layers."""
        chain = self._chain
        for index, (stack, start) in enumerate(zip(chain.stacks, chain.stack_start_indices, strict=True)):
            for path in dict.fromkeys(stack.layer_calls):
                layer = model.get_submodule(path)
                layer = self._wrappers.get(id(layer), layer)
                self._patched_layers[path] = layer, index, start + stack.layer_calls.index(path)
                self._override_layer_forward(*self._patched_layers[path])
            if index > 0 and stack.context is not None:
                self._override_encoder_states_argument(model.get_submodule(stack.context[0]), stack, start)
        if not chain.called_layer_paths:  # a single stage runs everything
            return
        in_layers = {id(m) for path in chain.called_layer_paths for m in model.get_submodule(path).modules()}
        outside: dict[nn.Module, frozenset[int]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            if id(module) not in in_layers and type(module) in (*self._embedding_types, nn.Linear):
                outside[module] = outside.get(module, frozenset()) | self._owners.get(f"{path}.weight", frozenset())
        for module, layer_indices in outside.items():
            self._skip_module_on_other_stages(module, layer_indices)
        for path, module in self._placeholders.find_modules(model).items():
            if id(module) not in in_layers:
                self._record_call_after_last_layer(module, path)

    def _override_forward(self, module: nn.Module, forward_fn: Callable[..., Any]) -> None:
        self._overridden.setdefault(module, module.__dict__.get("forward"))
        module.forward = _ForwardOverride(forward_fn, module.forward)

    def _restore_forward(self, module: nn.Module) -> None:
        forward = self._overridden.pop(module)
        if forward is None:
            del module.__dict__["forward"]
        else:
            module.forward = forward

    def enable_layer_checkpointing(self, layer_path: str) -> None:
        self._checkpointed |= {at for at, layer in enumerate(self._chain.called_layer_paths) if layer == layer_path}

    def move_overrides_to_wrappers(self, model: nn.Module) -> None:
        """Move the `forward` overrides of layers to the wrappers that the user added around these layers.

        A checkpointing wrapper recomputes its layer with the arguments that the wrapper received. An override inside it
        would recompute from the placeholder input, which is NaN.
        """
        for path, (module, index, layer_index) in list(self._patched_layers.items()):
            current = model.get_submodule(path)
            if current is module or not {*module.modules()} & {*current.modules()}:
                continue
            if module in self._overridden:
                self._restore_forward(module)
            self._patched_layers[path] = current, index, layer_index
            self._override_layer_forward(current, index, layer_index)

    def run_stage_forward(
        self, model: nn.Module, forward_state: StageForwardState, forward_fn: Callable[[], Any]
    ) -> tuple[Any, StageActivations | None]:
        """Run the model's forward pass up to the last layer of the pipeline stage.

        Returns:
            (output, None) on the last stage, (None, activations for the next stage) on the others.
        """
        self._placeholders.move_to_device_of(model)
        self.now = forward_state
        self._seed_rng(forward_state, 0)
        if not self._num_layers and forward_state.on_last_layer_end is not None:
            forward_state.on_last_layer_end()
        try:
            with self._placeholders.include_placeholders():
                return forward_fn(), None
        except StageBoundaryReached as reached:  # forward hooks do not run in this case
            for end in self.boundary_callbacks:
                end(reached.payload)
            return None, reached.payload
        finally:
            self.now = None
            self.draws.stop()

    def _seed_rng(self, forward_state: StageForwardState, segment_index: int) -> None:
        """Seed the random generators for a layer, so that dropout does not depend on the number of pipeline stages."""
        self.draws.stop()
        if forward_state.seed is not None:
            seed_all_generators((forward_state.seed + SPLITMIX64[0] * segment_index) % 2**63)
        self.draws.start()

    def _override_layer_forward(self, module: nn.Module, stack_index: int, layer_index: int) -> None:
        stack, original = self._chain.stacks[stack_index], module.forward
        first = self._chain.stack_start_indices[stack_index]

        def forward(*args: Any, **kwargs: Any) -> Any:
            stage_pass = self.now
            if stage_pass is None:
                return original(*args, **kwargs)
            at = layer_index
            if stack.has_repeated_layers:
                at = first + sum(first <= u < first + len(stack.layer_calls) for u in stage_pass.called_layers)
            if at in stage_pass.called_layers:
                raise ConfigError(
                    f"The model ran the layers of {stack.layers} twice in one forward pass, so it cannot be split "
                    "into pipeline stages.",
                    remedy="Omit pipe, or change the model so that it runs each layer once per forward pass.",
                )
            stage_pass.called_layers.append(at)
            if at < stage_pass.span.start:
                hidden, returns = get_first_tensor_arg(args, kwargs), stack.stages.num_outputs
                return (hidden, *[None] * (returns - 1)) if returns else hidden
            if at >= stage_pass.span.stop:
                raise StageBoundaryReached(self._collect_activations(stage_pass, at, args, kwargs))
            if at == stage_pass.span.start and "hidden" in stage_pass.received_activations:
                before, hidden = get_first_tensor_arg(args, kwargs), stage_pass.received_activations["hidden"]
                args = tuple(hidden if value is before else value for value in args)
                kwargs = {name: hidden if value is before else value for name, value in kwargs.items()}
            return self._run_layer(stage_pass, at, stack, original, args, kwargs)

        self._override_forward(module, forward)

    def _run_layer(
        self,
        forward_state: StageForwardState,
        layer_index: int,
        layer_stack: LayerStackDescription,
        original_forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        self._seed_rng(forward_state, layer_index + 1 + (self._num_layers + 2) * self._random_stream(layer_stack))
        is_first = layer_index not in self._checked_layers
        if is_first:
            self._checked_layers.add(layer_index)
            self._check_no_nan_in_layer_arguments(forward_state, layer_index, original_forward, args, kwargs)
        if layer_index in self._checkpointed and torch.is_grad_enabled():
            output = checkpoint(original_forward, *args, use_reentrant=False, **kwargs)
        else:
            output = original_forward(*args, **kwargs)
        if is_first:
            forward_state.is_computed = not any(map(has_nan, tree_leaves(output)))
            _check_num_layer_outputs(layer_stack, self._chain.called_layer_paths[layer_index], output)
        if layer_index == self._num_layers - 1:
            if is_first:
                self.is_last_layer_valid = forward_state.is_computed
            self._seed_rng(forward_state, self._num_layers + 1)
            if forward_state.on_last_layer_end is not None:
                forward_state.on_last_layer_end()
        return output

    def _check_no_nan_in_layer_arguments(
        self,
        forward_state: StageForwardState,
        layer_index: int,
        original_forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Raise ConfigError if a layer argument is NaN because only another pipeline stage can compute it."""
        if not self._placeholders:
            return
        path = self._chain.called_layer_paths[layer_index]
        names = list(inspect.signature(original_forward).parameters)
        arguments = [*zip([*names, *(f"argument {i}" for i in range(len(names), len(args)))], args), *kwargs.items()]
        hidden = get_first_tensor_arg(args, kwargs)
        for name, value in arguments:
            may_be_nan = value is hidden and (
                not forward_state.is_computed or layer_index == forward_state.span.start > 0
            )
            if not may_be_nan and any(map(has_nan, tree_leaves(value))):
                raise _make_missing_argument_error(path, name)

    def _collect_activations(
        self, forward_state: StageForwardState, layer_index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> StageActivations:
        def get_activation(activation_name: str) -> Tensor:
            if activation_name == "hidden":
                return get_first_tensor_arg(args, kwargs)
            assert forward_state.context is not None
            return to_local(forward_state.context)

        return {name: get_activation(name) for name in self._chain.get_received_activation_names(layer_index)}

    def _override_encoder_states_argument(
        self, module: nn.Module, layer_stack: LayerStackDescription, first_layer_index: int
    ) -> None:
        assert layer_stack.context is not None
        name = layer_stack.context[1]
        parameters = list(inspect.signature(module.forward).parameters)
        position = parameters.index(name) if name in parameters else len(parameters)

        def replace_context_pre_hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            stage_pass = self.now
            if stage_pass is None:
                return None
            value = kwargs[name] if name in kwargs else next(iter(args[position:]), None)
            if stage_pass.span.start >= first_layer_index and "context" in stage_pass.received_activations:
                if stage_pass.span.start >= first_layer_index + len(layer_stack.layer_calls):
                    return None
                stage_pass.context = wrap_shard_like(stage_pass.received_activations["context"], value)
                if name in kwargs:
                    return args, {**kwargs, name: stage_pass.context}
                return (*args[:position], stage_pass.context, *args[position + 1 :]), kwargs
            if not isinstance(value, Tensor):
                raise ConfigError(
                    f"The argument {name} of {type(module).__name__} must be a tensor of hidden states from the "
                    f"encoder or other earlier layers, but got {value!r:.60}.",
                    remedy="Pass the inputs of both the encoder and the decoder to the model.",
                )
            if stage_pass.span.stop <= first_layer_index:
                raise StageBoundaryReached({"context": to_local(value)})
            stage_pass.context = value
            return None

        remove = register_forward_hooks(module, HookOrder.STAGE_INPUT, replace_context_pre_hook, with_kwargs=True)
        self._remove_hooks.append(remove)

    def _skip_module_on_other_stages(self, module: nn.Module, owner_layer_indices: frozenset[int]) -> None:
        """Skip an embedding or linear layer on pipeline stages that do not need its output."""
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            stage_pass = self.now
            if stage_pass is not None and owner_layer_indices.isdisjoint(stage_pass.span):
                return make_placeholder_output(module, args, kwargs)
            return original(*args, **kwargs)

        self._override_forward(module, forward)

    def _record_call_after_last_layer(self, module: nn.Module, path: str) -> None:
        def record_call_pre_hook(*_: Any) -> None:
            if self.now is not None and self._num_layers - 1 in self.now.called_layers:
                self.misplaced_module_path = self.misplaced_module_path or path

        self._remove_hooks.append(register_forward_hooks(module, HookOrder.STAGE_INPUT, record_call_pre_hook))


class _ForwardOverride:
    """Replacement for a module's `forward` method that raises ConfigError if the module is copied."""

    def __init__(self, forward_fn: Callable[..., Any], original_forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original_forward)
        self._forward = forward_fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ConfigError(
            "A model that is split into pipeline stages cannot be copied.",
            remedy="Copy the model before you shard it. To average weights, copy only model.parameters().",
        )


def _check_num_layer_outputs(layer_stack: LayerStackDescription, layer_path: str, output: Any) -> None:
    """Raise PolicyError if ``num_outputs`` in the policy does not match what a layer returned."""
    is_tuple, number = isinstance(output, tuple), layer_stack.stages.num_outputs
    if is_tuple != bool(number):
        returned = len(output) if is_tuple else 0
        raise PolicyError(
            f"The layer {layer_path} returned a {type(output).__name__}, which does not match num_outputs={number} "
            "in the policy.",
            remedy=f"Set stages=PipelineHints(num_outputs={returned}) in the LayerStack of {layer_stack.layers}.",
        )


def _make_missing_argument_error(layer_path: str, argument_name: str) -> ConfigError:
    return ConfigError(
        f"The argument {argument_name} of the layer {layer_path} contains NaN. Either the batch contains NaN, or the "
        "argument is computed by a module that runs only on another pipeline stage.",
        remedy="If the batch has no NaN, list that module in LayerStack(..., "
        "stages=PipelineHints(on_every_stage=[...])), or in another field that docs/policies.md describes.",
    )
