"""Compile the layers of a sharded model with torch.compile.

Each layer of a stack is one compiled region: a single graph without breaks, which contains the collectives of its
blocks as operators (``shardformer.comm.collectives``). Layers with the same structure share their graphs. What happens
between the layers stays eager: the entry and the exit of the stack, activation checkpointing, the gathers of ZeRO
stage 3, and pipeline communication.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from shardformer import torch_compat
from shardformer.comm.deferred_tensor import resolve_deferred_tensors
from shardformer.context_parallel.attention import (
    add_tensor_wrappers_to_attention,
    has_patched_position_bias,
    wrap_mask_in_tensor,
)
from shardformer.context_parallel.model_hooks import GatherFullSequenceHook
from shardformer.context_parallel.sequence_layout import ContextParallelState
from shardformer.errors import ConfigError, check_choice, check_names_are_known
from shardformer.layout.sharding_metadata import ShardingMetadata, get_sharding_metadata
from shardformer.random_state import may_use_dropout
from shardformer.sharding.graph_random_state import compile_with_rng_state
from shardformer.tensor_parallel.sequence_parallel import ActivationSharding, get_first_tensor_arg
from shardformer.torch_compat import current_graph_task_id, tree_map
from shardformer.transformers_compat import (
    find_kv_caches,
    get_gradient_checkpointing_fn,
    has_cached_tokens,
    unwrap_checkpointed_forward,
)
from shardformer.zero.stage3_parameters import gather_groups_of_params

Backend = str | Callable[..., Any]
DEFAULT_BACKEND = "inductor"
OPTIONS = ("mode", "options", "dynamic", "fullgraph")
"""Arguments of ``torch.compile`` besides the backend. A layer is always a full graph."""


@dataclass(eq=False)
class LayerStackCompiler:
    """Compiles a list of layers, such as a decoder, with torch.compile, and counts the compiled graphs.

    Args:
        path: path of the stack's layers.
        options: ``mode``, ``options`` and ``dynamic`` of torch.compile.
        layers: paths of the layers on this rank.
        random_device: device of the random state that the graphs contain, or None if they use torch's generators.

    Attributes:
        graphs: for each compiled graph, the path of the first layer that uses it.
        eager_calls: number of layer calls that ran without compilation, because the recompile limit was reached.
    """

    path: str
    backend: Backend
    options: Mapping[str, Any]
    layers: Sequence[str]
    random_device: torch.device | None = None
    graphs: list[str] = field(default_factory=list)
    eager_calls: int = 0

    def __post_init__(self) -> None:
        mode, options, dynamic = (self.options.get(name) for name in ("mode", "options", "dynamic"))
        self.running = ""  # path of the layer whose forward pass runs
        self._compile = torch_compat.resolve_compile_backend(self.backend, mode, options, dynamic)
        # torch stores graphs with the code of a function and limits their number. With a code of its own, this stack
        # does not share the limit with other models.
        function = FunctionType(
            _call_layer_with_input_lengths.__code__.replace(), globals(), _call_layer_with_input_lengths.__name__
        )
        self.call: Callable[..., Any] = torch.compile(
            function, backend=self._compile_graph, fullgraph=True, dynamic=dynamic
        )

    def _compile_graph(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        self.graphs.append(self.running)
        if self.random_device is None:
            return self._compile(graph, example_inputs)
        return compile_with_rng_state(graph, example_inputs, self._compile, self.random_device)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerStackCompiler:
        """Copy the settings without the compiled graphs, so that a copied model compiles its layers again."""
        memo[id(self)] = copy = LayerStackCompiler(
            self.path, self.backend, self.options, self.layers, self.random_device
        )
        return copy

    def __str__(self) -> str:
        backend = torch_compat.get_compile_backend_name(self.backend)
        text = f"Compiled with {backend}: {len(self.layers)} layer{'' if len(self.layers) == 1 else 's'} of {self.path}"
        count = len(self.graphs)
        graphs = f"{count} graph{'' if count == 1 else 's'}, no graph break"
        text += f", {graphs}" if count else ", at their first forward pass"
        return text + (f", {self.eager_calls} calls without compilation." if self.eager_calls else ".")


def _call_layer_with_input_lengths(
    forward_fn: Callable[..., Any],
    layer: nn.Module | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    input_length_per_sharding: Sequence[tuple[ActivationSharding, int]],
) -> Any:
    """Call a layer with its input lengths as arguments. As attributes, lengths would need one graph per value."""
    for stream, length in input_length_per_sharding:
        setattr(stream, stream.length_name, length)
    return forward_fn(*args, **kwargs) if layer is None else forward_fn(layer, *args, **kwargs)


class CompiledForward:
    """A compiled replacement for the ``forward`` method of a layer. The hooks of the layer itself stay eager.

    In training, the layer does not fill the KV cache that transformers passes by default. With a KV cache in
    evaluation, or one that holds tokens (prefix tuning), the layer runs without compilation.

    Raises ConfigError in the first forward pass if the layer cannot be compiled as one graph.
    """

    def __init__(
        self,
        layer: nn.Module,
        layer_path: str,
        stack_compiler: LayerStackCompiler,
        context_parallel_state: ContextParallelState | None,
    ) -> None:
        original: Any = layer.forward
        self._layer, self._path, self._stack, self._context = layer, layer_path, stack_compiler, context_parallel_state
        self._outside_of_graph: Callable[..., Any] = torch.compiler.disable(
            type(self)._run_compiled_or_eager
        )  # unbound, for copies
        self._before, forward = vars(layer).get("forward"), getattr(original, "__func__", original)
        self._is_method = forward is not original
        self._forward = unwrap_checkpointed_forward(forward)
        self._checkpoints_in_forward = self._forward is not forward
        functools.update_wrapper(self, original, updated=())
        blocks = [block for module in layer.modules() if (block := getattr(module, "block", None)) is not None]
        self._streams = list(dict.fromkeys(block.stream for block in blocks))
        for block in blocks:
            block.include_rng_switch_in_graph()
        add_tensor_wrappers_to_attention(layer)

    def restore_original_forward(self) -> None:
        del self._layer.__dict__["forward"]
        if self._before is not None:
            self._layer.forward = self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a larger graph ends here, and begins again after the layer
            return self._outside_of_graph(self, *args, **kwargs)
        return self._run_compiled_or_eager(*args, **kwargs)

    def _run_compiled_or_eager(self, *args: Any, **kwargs: Any) -> Any:
        if self._context is not None and current_graph_task_id() < 0 and not self._context.is_open:
            return self._run_eager(args, kwargs)  # the sequence of this forward pass is not sharded
        if caches := find_kv_caches((*args, *kwargs.values())):
            if not torch.is_grad_enabled() or any(map(has_cached_tokens, caches)):
                return self._run_eager(args, kwargs)
            args = tuple(None if any(x is cache for cache in caches) else x for x in args)
            kwargs = {name: None if any(x is cache for cache in caches) else x for name, x in kwargs.items()}
        if self._checkpoints_in_forward and (checkpoint := get_gradient_checkpointing_fn(self._layer)) is not None:
            return checkpoint(functools.partial(self._run_compiled_with_eager_fallback, **kwargs), *args)
        return self._run_compiled_with_eager_fallback(*args, **kwargs)

    def _run_compiled_with_eager_fallback(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = resolve_deferred_tensors((args, kwargs))
        for stream in self._streams:
            stream.restore_input_size_in_recompute(get_first_tensor_arg(args, kwargs))
            stream.is_restored = True
        gather_groups_of_params(self._layer.parameters())
        self._stack.running = self._path
        try:
            return self._call_compiled_graph(args, kwargs)
        except torch_compat.get_recompile_limit_error_class():
            self._warn_once_about_recompile_limit(args, kwargs)
        except torch_compat.get_compile_error_class() as error:
            raise self._make_graph_break_error(error) from error
        finally:
            for stream in self._streams:
                stream.is_restored = False
        return self._run_eager(args, kwargs)

    def _call_compiled_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = self._layer if self._is_method else None
        args, kwargs = tree_map(wrap_mask_in_tensor, (args, kwargs))
        lengths = [(stream, getattr(stream, stream.length_name)) for stream in self._streams if stream.is_sharded]
        return self._stack.call(self._forward, layer, args, kwargs, lengths)

    def _run_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._forward(self._layer, *args, **kwargs) if self._is_method else self._forward(*args, **kwargs)

    def _warn_once_about_recompile_limit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stack = self._stack
        stack.eager_calls += 1
        if stack.eager_calls > 1:
            return
        reason = torch_compat.get_recompile_reason(lambda: self._call_compiled_graph(args, kwargs))
        warnings.warn(
            f"The layer {self._path} runs some calls without compilation, because {stack.path} has reached the limit "
            f"of {len(stack.graphs)} compiled graphs ({reason}). Pad the batches to a few lengths, or raise "
            "torch._dynamo.config.recompile_limit.",
            stacklevel=2,
        )

    def _make_graph_break_error(self, compile_error: Exception) -> ConfigError:
        reason = " ".join(str(compile_error).strip().split("\n\n")[0].split())
        return ConfigError(
            f"The layer {self._path} ({type(self._layer).__name__}) cannot be compiled as one graph: {reason}.",
            rule="A compiled layer must not contain a graph break.",
            remedy="Set compile=False, or change the code that causes the graph break.",
        )


def compile_layer_stacks(
    model: nn.Module, metadata: ShardingMetadata, backend: Backend, options: Mapping[str, Any]
) -> None:
    """Replace the ``forward`` method of each layer so that the layer is compiled at its first call.

    Raises ConfigError if the model, its layout or this computer does not support compilation.
    """
    _check_can_be_compiled(model, metadata, backend)
    found = {path: _get_local_layers_by_path(model, path) for path in metadata.layer_stacks}
    if not found:
        name = torch_compat.get_compile_backend_name(backend)
        raise ConfigError(
            f"compile={name!r} has no effect, because the policy of {type(model).__name__} has no LayerStack.",
            remedy="Set compile=False and call torch.compile(model), or pass a policy with a LayerStack.",
        )
    differs = (
        metadata.context.sizes["tensor"] > 1 or metadata.context.sizes["sequence"] > 1
    )  # the random state of the ranks
    draws = differs and may_use_dropout(model)
    device = metadata.context.device if draws else None
    metadata.compilers[:] = [
        LayerStackCompiler(path, backend, options, list(layers), device) for path, layers in found.items()
    ]
    for stack in metadata.compilers:
        for path, layer in found[stack.path].items():
            if isinstance(before := vars(layer).get("forward"), CompiledForward):
                before.restore_original_forward()
            layer.forward = CompiledForward(layer, path, stack, metadata.context_run)


def compile_model_if_configured(
    model: nn.Module, metadata: ShardingMetadata, compile: bool | str, torch_compile_options: Mapping[str, Any]
) -> None:
    """Compile a sharded model if the config requests it, or if the model was wrapped by torch.compile.

    Args:
        torch_compile_options: arguments of the wrapper (``torch_compat.unwrap_compiled_module``), which ``compile``
            overrides.
    """
    if compile:
        compile_layer_stacks(model, metadata, DEFAULT_BACKEND if compile is True else compile, {})
    elif torch_compile_options and metadata.layer_stacks:
        compile_layer_stacks(
            model, metadata, torch_compile_options["backend"], {"dynamic": torch_compile_options["dynamic"]}
        )
    elif torch_compile_options:
        nn.Module.compile(model, **torch_compile_options)


def _get_local_layers_by_path(model: nn.Module, layer_list_path: str) -> dict[str, nn.Module]:
    layers = {
        f"{layer_list_path}.{name}": layer for name, layer in model.get_submodule(layer_list_path).named_children()
    }
    return {path: layer for path, layer in layers.items() if next(layer.parameters(), None) is not None}


def _check_can_be_compiled(model: nn.Module, metadata: ShardingMetadata, backend: Backend) -> None:
    if isinstance(backend, str):
        check_choice("compile", backend, torch.compiler.list_backends(exclude_tags=()))
    name, device = torch_compat.get_compile_backend_name(backend), metadata.context.device.type
    if metadata.context_run is not None and (reason := _get_context_parallel_compile_conflict(model, metadata)):
        raise ConfigError(
            f"compile={name!r} does not support this model with context parallelism, which {reason}.",
            remedy="Set compile=False.",
        )
    if name == "inductor" and device == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "compile='inductor' requires triton on a GPU, but triton is not installed.", remedy="Install triton."
        )
    if name == "inductor" and device == "cpu" and not _has_cpp_compiler():
        raise ConfigError("compile='inductor' requires a C++ compiler, but none is installed.", remedy="Install g++.")


def _get_context_parallel_compile_conflict(model: nn.Module, metadata: ShardingMetadata) -> str:
    """Explain why context parallelism prevents compilation of the layers, or return an empty string."""
    if metadata.context_run.is_whole:
        return "computes the attention of this model in full on every rank"
    if any(isinstance(hook, GatherFullSequenceHook) for hook in metadata.region_hooks):
        return "gathers the full sequence for modules inside the layers"
    if any(has_patched_position_bias(module) for module in model.modules()):
        return "computes the relative position bias of this model in Python"
    return ""


def _has_cpp_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name)


def compile_model(
    self: nn.Module, *, backend: Backend = DEFAULT_BACKEND, disable: bool = False, **options: Any
) -> None:
    """Compile each layer of a sharded model with torch.compile, as ``compile=True`` of ``ParallelConfig`` does.

    Takes the arguments of ``torch.compile``. A model without a known stack of layers is compiled as a whole.
    """
    state = get_sharding_metadata(self)
    if disable:
        return
    if not state.layer_stacks:
        nn.Module.compile(self, backend=backend, **options)
        return
    check_names_are_known(
        options, OPTIONS, "model.compile has no argument", f"Its arguments are backend, {', '.join(OPTIONS)}"
    )
    if options.get("mode") and options.get("options"):
        raise ConfigError("model.compile received both mode and options.", remedy="Pass only one of mode and options.")
    if state.stages is not None and state.context.pipe.size > 1:
        raise ConfigError(
            f"model.compile does not support pipeline parallelism, but the model has pipe={state.context.pipe.size}.",
            remedy="Set compile=True in ParallelConfig instead.",
        )
    compile_layer_stacks(self, state, backend, options)


def get_layer_stack_compilers(model: nn.Module) -> list[LayerStackCompiler]:
    """Return the compilers of a sharded model, one per stack of layers. Empty if the model is not compiled."""
    compilers: list[LayerStackCompiler] = get_sharding_metadata(model).compilers
    return compilers
