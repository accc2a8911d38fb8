"""Traces a forward pass to find out which linear layers feed each other and how modules process tokens.

The output of each linear layer is marked with the path of this layer, and every tensor computed from a marked tensor
inherits the marks. A linear layer with an unmarked input is a column-parallel candidate. A linear layer with a marked
input is the row-parallel candidate that follows. Its output is full again and therefore unmarked.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.discovery.reduced_model import ReferenceGradients
from shardformer.kernels.fused_ops import get_norm_kind, is_elementwise
from shardformer.layout.sharding_metadata import max_abs_difference
from shardformer.module_paths import is_linear_or_conv1d, match_paths
from shardformer.tensor_parallel.sequence_parallel import get_first_tensor_arg
from shardformer.torch_compat import TorchDispatchMode, schema_of, tree_leaves

MERGING_OPS = ("bmm", "baddbmm", "scaled_dot_product")
"""Operations that combine queries with keys, or scores with values."""


@dataclass
class ConnectedLinearLayers:
    """A candidate row-parallel linear layer, and the candidate column-parallel layers that feed it."""

    row: str  # path of the linear layer that is fed
    columns: list[str]  # paths of the linear layers that feed it, in call order
    entry: str = ""  # path of the module around the first columns, or of a single column
    reads_entry_input: bool = True  # whether the columns read the first tensor argument of that module
    other_columns: list[str] = field(default_factory=list)  # columns with a different input, as in cross-attention
    is_attention: bool = False  # whether the outputs are combined as queries and keys
    head_dim: int = 0  # features of a head, from the last dim of the first operand, or 0 without attention


@dataclass
class ForwardTrace:
    """Module inputs and outputs and connected linear layers of one forward pass. All keys are module paths."""

    groups: list[ConnectedLinearLayers] = field(
        default_factory=list
    )  # groups of linear layers, in call order of their rows
    inputs: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # tensor arguments of a module's first call
    linear_inputs: dict[str, list[Tensor]] = field(default_factory=dict)  # inputs of a linear layer, one for each call
    outputs: dict[str, Tensor] = field(default_factory=dict)  # first tensor of a module's output
    accessed_int_attributes: dict[str, dict[str, int]] = field(
        default_factory=dict
    )  # integer attributes of a module that were read
    columns_by_norm: dict[str, frozenset[str]] = field(default_factory=dict)  # columns whose output a norm normalized
    projections: list[frozenset[str]] = field(default_factory=list)  # linear layers combined as queries and keys


TRACE_LOCK = threading.Lock()  # dispatch modes share state between threads, and ranks may be threads


def trace_forward(
    model: nn.Module, forward_fn: Callable[[nn.Module], Any], replicated_linear_paths: Iterable[str] = ()
) -> ForwardTrace:
    """Run one forward pass without gradients, and record how the model's linear layers are connected.

    Args:
        replicated_linear_paths: paths of linear layers that are not sharded. Their outputs inherit the marks of their
            inputs.
    """
    observer = _ForwardTracer(model, frozenset(replicated_linear_paths))
    with ExitStack() as stack:
        for path, module in model.named_modules():
            for hook in (
                module.register_forward_pre_hook(observer.make_input_recording_hook(path, module), with_kwargs=True),
                module.register_forward_hook(observer.make_output_recording_hook(path)),
            ):
                stack.callback(hook.remove)
            stack.callback(
                _record_int_attribute_reads(module, observer.trace.accessed_int_attributes.setdefault(path, {}))
            )
        with TRACE_LOCK, torch.no_grad(), observer.marks, observer.last:
            forward_fn(model)
    return observer.build_trace()


def find_layer_paths(model: nn.Module, layer_list_path: str) -> list[str]:
    """Return the paths of all layers in a ModuleList, whose path may contain the wildcard ``*``."""
    return match_paths(f"{layer_list_path}.*", [path for path, _ in model.named_modules()])


def count_layer_outputs(
    model: nn.Module, forward_fn: Callable[[nn.Module], Any], layer_list_paths: Iterable[str]
) -> dict[str, int]:
    """Return the length of the tuple that the layers of each list return, or 0 if they return a tensor."""
    counts: dict[str, int] = {}
    with ExitStack() as stack, torch.no_grad():
        for layers in layer_list_paths:
            counts[layers] = 0

            def record_num_outputs(_: nn.Module, __: Any, output: Any, layer_list_path: str = layers) -> None:
                counts[layer_list_path] = len(output) if isinstance(output, tuple | list) else 0

            for path in find_layer_paths(model, layers):
                stack.callback(model.get_submodule(path).register_forward_hook(record_num_outputs).remove)
        forward_fn(model)
    return counts


class _TensorOriginTracker(TorchDispatchMode):
    """Dispatch mode that tracks which linear layers contributed to each tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no types
        self._marks: dict[int, frozenset[str]] = {}
        self._tensors: list[Tensor] = []  # prevents reuse of ids
        self.merged: dict[frozenset[str], int] = {}

    def get_origin_paths(self, tensor: Tensor) -> frozenset[str]:
        return self._marks.get(id(tensor), frozenset())

    def set_origins(self, tensor: Tensor, origins: frozenset[str]) -> None:
        self._marks[id(tensor)] = origins
        self._tensors.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = [(x, self.get_origin_paths(x)) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        marked = [marks for _, marks in inputs if marks]
        if not marked:
            return out
        marks = frozenset().union(*marked)
        if len(marked) > 1 and any(name in str(func) for name in MERGING_OPS):
            self.merged.setdefault(marks, next(x.shape[-1] for x, of_x in inputs if of_x))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.set_origins(x, marks)
        if schema_of(func).is_mutable and isinstance(args[0], Tensor):
            self.set_origins(args[0], self.get_origin_paths(args[0]) | marks)
        return out


class _ForwardTracer:
    """Records which linear layers feed each other, with forward hooks on all modules."""

    def __init__(self, model: nn.Module, replicated_paths: frozenset[str]) -> None:
        self.trace, self.marks, self.last = ForwardTrace(), _TensorOriginTracker(), _TensorOriginTracker()
        self._replicated = replicated_paths
        self._linears = {path for path, module in model.named_modules() if is_linear_or_conv1d(module)}
        self._feeding: dict[str, frozenset[str]] = {}
        self._groups: dict[str, ConnectedLinearLayers] = {}
        self._order: list[str] = []
        self._parents = {path: path.rpartition(".")[0] for path, _ in model.named_modules()}

    def make_input_recording_hook(self, module_path: str, original_module: nn.Module) -> Callable[..., None]:
        names = list(inspect.signature(original_module.forward).parameters)

        def forward_pre_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            every = {**dict(zip(names, args, strict=False)), **kwargs}
            tensors = {name: x for name, x in every.items() if isinstance(x, Tensor)}
            self.trace.inputs.setdefault(module_path, tensors)
            if tensors and "norm" in type(module).__name__.lower() and not module._modules:
                self.trace.columns_by_norm.setdefault(
                    module_path, self.marks.get_origin_paths(next(iter(tensors.values())))
                )
            if module_path in self._linears and tensors:
                x = next(iter(tensors.values()))
                self.trace.linear_inputs.setdefault(module_path, []).append(x)
                self._feeding[module_path] = self.marks.get_origin_paths(x)

        return forward_pre_hook

    def make_output_recording_hook(self, module_path: str) -> Callable[..., None]:
        def forward_hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            first = next((x for x in tree_leaves(output) if isinstance(x, Tensor)), None)
            if first is None:
                return
            self.trace.outputs[module_path] = first
            if module_path in self._linears:
                self.last.set_origins(first, frozenset({module_path}))
            if module_path in self._linears and module_path in self._feeding:
                self._record_linear_connection(module_path, first)

        return forward_hook

    def _record_linear_connection(self, linear_path: str, linear_output: Tensor) -> None:
        feeding = self._feeding.pop(linear_path)
        if linear_path in self._replicated:
            self.marks.set_origins(linear_output, feeding)
        elif feeding:
            self.marks.set_origins(linear_output, frozenset())
            group = self._groups.setdefault(linear_path, ConnectedLinearLayers(linear_path, []))
            group.columns += [c for c in self._order if c in feeding and c not in group.columns]
            size = next((size for merged, size in self.marks.merged.items() if merged <= feeding), None)
            group.is_attention |= size is not None
            group.head_dim = group.head_dim or size or 0
        else:
            self.marks.set_origins(linear_output, frozenset({linear_path}))
            if linear_path not in self._order:
                self._order.append(linear_path)

    def build_trace(self) -> ForwardTrace:
        for group in self._groups.values():
            self._set_entry_module(group)
        self.trace.groups = list(self._groups.values())
        self.trace.projections = list(self.last.merged)
        return self.trace

    def _set_entry_module(self, group: ConnectedLinearLayers) -> None:
        """Find the module whose input is passed to the candidate column-parallel layers."""
        first = {c: self.trace.linear_inputs[c][0] for c in group.columns}
        source = first[group.columns[0]]
        same_input = [c for c, x in first.items() if x is source]
        group.other_columns = [c for c, x in first.items() if x is not source]
        path = find_common_parent_path(same_input) if len(same_input) > 1 else self._parents[same_input[0]]
        module_input = self._get_first_input(path)
        group.reads_entry_input = source is module_input or (
            group.is_attention and _is_full_view_of_input(source, module_input)
        )
        group.entry = path if group.reads_entry_input or len(same_input) > 1 else same_input[0]
        group.reads_entry_input = group.reads_entry_input or len(same_input) == 1
        if (
            group.is_attention
            and (group.entry in group.columns or not group.reads_entry_input)
            and len(group.columns) > 1
        ):
            inner, outer = find_common_parent_path(group.columns), find_common_parent_path([*group.columns, group.row])
            module_input = self._get_first_input(outer)
            other_columns = [c for c, x in first.items() if not _is_full_view_of_input(x, module_input)]
            if group.entry in group.columns or len(other_columns) < len(group.columns):
                group.entry = inner if self._get_first_input(inner) is module_input else outer
                group.other_columns, group.reads_entry_input = other_columns, True

    def _get_first_input(self, module_path: str) -> Tensor | None:
        """Return the first tensor argument of a module's first call, or None if it received no tensor."""
        return next(iter(self.trace.inputs.get(module_path, {}).values()), None)


def _is_full_view_of_input(tensor: Tensor, module_input: Tensor | None) -> bool:
    """Return whether ``tensor`` is ``module_input``, or a view of all its elements."""
    return (
        module_input is not None
        and tensor.data_ptr() == module_input.data_ptr()
        and tensor.numel() == module_input.numel()
    )


def find_common_parent_path(module_paths: Sequence[str]) -> str:
    """Return the path of the innermost module that contains all modules in ``module_paths``."""
    split = [path.split(".")[:-1] for path in module_paths]
    shared = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _record_int_attribute_reads(module: nn.Module, accessed_values: dict[str, int]) -> Callable[[], None]:
    """Record which integer attributes of a module are read, until the returned function is called."""
    native: Any = type(module)
    numbers: Mapping[str, int] = {
        name: value for name, value in vars(module).items() if type(value) is int and not name.startswith("_")
    }

    def read_attribute(self: nn.Module, attr_name: str) -> Any:
        if attr_name in numbers:
            accessed_values[attr_name] = numbers[attr_name]
        return native.__getattribute__(self, attr_name)

    module.__class__ = type(
        native.__name__, (native,), {"__getattribute__": read_attribute, "__module__": native.__module__}
    )

    def restore_class() -> None:
        module.__class__ = native

    return restore_class


TOKEN_ROUNDING = 1e-5
"""Tolerance relative to the largest output. Rounding due to a different order of tokens in experts is smaller."""


@dataclass(frozen=True)
class ModuleCall:
    """The arguments and the output of a module's first call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any

    @property
    def hidden_states(self) -> Tensor | None:
        """The hidden states that were passed to the module, or None if no argument is a tensor."""
        tensors = [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor)]
        return get_first_tensor_arg(self.args, self.kwargs) if tensors else None

    @property
    def first_output(self) -> Tensor | None:
        """The first value that the module returned, or None if it is not a tensor."""
        first = self.output[0] if isinstance(self.output, tuple | list) else self.output
        return first if isinstance(first, Tensor) else None


class LayerListTrace:
    """Records the first call of each module inside a list of layers, in one forward pass.

    Attributes:
        shape: the batch size and sequence length of the hidden states.
    """

    def __init__(self, reference: ReferenceGradients, layer_list_path: str) -> None:
        self.layers, self._model = layer_list_path, reference.model
        self.paths = find_layer_paths(self._model, layer_list_path)
        self._calls: dict[str, ModuleCall] = {}
        with ExitStack() as stack, torch.no_grad():
            for outer in self.paths:
                for path, module in self._model.get_submodule(outer).named_modules(prefix=outer):

                    def record_call(_: nn.Module, args: Any, kwargs: Any, output: Any, module_path: str = path) -> None:
                        self._calls.setdefault(module_path, ModuleCall(args, kwargs, output))

                    stack.callback(module.register_forward_hook(record_call, with_kwargs=True).remove)
            reference.forward_fn(self._model)
        first = next((self._calls[path].hidden_states for path in self.paths if path in self._calls), None)
        self.shape: tuple[int, ...] = (0, 0) if first is None or first.dim() < 3 else tuple(first.shape[:2])

    def has_token_dim(self, tensor: Tensor | None) -> bool:
        """Return whether a tensor has one vector per token, with or without separate batch and sequence dimensions."""
        samples, length = self.shape
        return tensor is not None and (
            (tensor.dim() > 2 and tuple(tensor.shape[:2]) == self.shape)
            or (tensor.dim() == 2 and tensor.shape[0] == samples * length)
        )

    def receives_all_tokens(self, module_path: str) -> bool:
        """Return whether a module's hidden states contain all tokens. True if the module was not called."""
        return module_path not in self._calls or self.has_token_dim(self._calls[module_path].hidden_states)

    def has_per_token_scalar_input(self, module_path: str) -> bool:
        """Return whether a module receives a tensor with one number per token in addition to its hidden states."""
        return any(
            isinstance(x, Tensor) and tuple(x.shape) == self.shape
            for x in self._get_non_hidden_state_arguments(module_path).values()
        )

    def get_enclosing_module_paths(self, module_path: str) -> dict[str, str]:
        """Return the full paths of a module and of its parents inside the layer, with layer-relative paths as keys."""
        outer = next((outer for outer in self.paths if module_path.startswith(f"{outer}.")), None)
        parts = module_path.removeprefix(f"{outer}.").split(".") if outer is not None else []
        names = [".".join(parts[: i + 1]) for i in range(len(parts))]
        return {name: f"{outer}.{name}" for name in names}

    def is_token_dim_preserved(self, module_path: str) -> bool:
        """Return whether a module's input and output both contain one vector per token."""
        if (call := self._calls.get(module_path)) is None or (x := call.hidden_states) is None:
            return False
        return x.dim() > 2 and tuple(x.shape[:2]) == self.shape and self.has_token_dim(call.first_output)

    def iter_layer_and_child_paths(self) -> Iterator[tuple[str, str]]:
        """Yield the child modules that a layer may call, each as (layer path, path within the layer)."""
        for outer in self.paths:
            for name, _ in _iter_children_and_list_members(self._model.get_submodule(outer)):
                yield outer, name

    def find_token_mixing_modules(self) -> Iterator[tuple[str, str]]:
        """Yield the modules that may mix information between tokens, each as (layer path, path within the layer)."""
        for outer in self.paths:
            for name, child in _iter_children_and_list_members(self._model.get_submodule(outer)):
                is_token_wise = is_linear_or_conv1d(child) or get_norm_kind(child) is not None or is_elementwise(child)
                if (
                    not is_token_wise
                    and next(child.parameters(), None) is not None
                    and self._may_mix_tokens(f"{outer}.{name}", child)
                ):
                    yield outer, name

    def _may_mix_tokens(self, module_path: str, module: nn.Module) -> bool:
        """Return whether changing the first or last token of a module's input changes its output for other tokens."""
        call = self._calls.get(module_path)
        if call is None:
            return True
        x, y = call.hidden_states, call.first_output
        if x is None or y is None or tuple(x.shape[:2]) != self.shape or tuple(y.shape[:2]) != self.shape:
            return self.receives_all_tokens(module_path)
        for token, others in ((0, slice(1, None)), (-1, slice(None, -1))):
            changed = x.detach().clone()
            changed[:, token] += torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype, device=x.device).square()
            own = [changed if a is x else a for a in call.args]
            named = {name: changed if a is x else a for name, a in call.kwargs.items()}
            try:
                with torch.no_grad():
                    again = ModuleCall((), {}, module(*own, **named)).first_output
            except Exception:  # a module may raise anything if it is called outside its forward pass
                return True
            if again is None or again.shape != y.shape or y.shape[1] < 2 or torch.equal(again[:, token], y[:, token]):
                return True  # unknown, for example if its last weight is initialized to 0
            if max_abs_difference(again[:, others], y[:, others]) > TOKEN_ROUNDING * y.abs().max():
                return True
        return False

    def iter_per_token_arg_paths(self) -> Iterator[str]:
        """Yield the paths of module arguments with one vector per token, except the hidden states."""
        for outer in self.paths:
            for path, _ in self._model.get_submodule(outer).named_modules(prefix=outer):
                for name, x in self._get_non_hidden_state_arguments(path).items():
                    if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 2 and self.has_token_dim(x):
                        yield f"{path}.{name}".removeprefix(f"{outer}.")

    def _get_non_hidden_state_arguments(self, module_path: str) -> dict[str, Any]:
        """Return the arguments of a module's first call by name, except the hidden states."""
        if (call := self._calls.get(module_path)) is None:
            return {}
        names = inspect.signature(self._model.get_submodule(module_path).forward).parameters
        named = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        return {name: x for name, x in named.items() if x is not call.hidden_states}


def _iter_children_and_list_members(module: nn.Module, path_prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module's children, with module lists and dicts replaced by their members."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _iter_children_and_list_members(child, f"{path_prefix}{name}.")
        else:
            yield f"{path_prefix}{name}", child
