"""The layers of a model in execution order, their costs, and the parameters that belong to each layer.

The sequence contains *layer calls*. Most layers are called once, but ALBERT calls one layer repeatedly. The sequence
joins all stacks in execution order, so an encoder's layers precede the decoder's. Modules before a stack (embeddings)
belong to its first layer call, and modules after it (final norm, pooler, head) to its last.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise, takewhile
from typing import Any, TypeVar

import torch
from torch import nn

from shardformer.errors import ConfigError
from shardformer.forward_hooks import HookOrder, register_forward_hooks
from shardformer.layout.activation_layout import ActivationLayout, Dim, ShardedFrom
from shardformer.public_names import deprecate_renamed_arguments

Record = TypeVar("Record", bound=Any)


def prepend_path_to_fields(dataclass_instance: Record, path_prefix: str, *field_names: str) -> Record:
    """Copy a dataclass, with ``path_prefix`` prepended to the module paths in the fields ``field_names``.

    Removes a trailing ``?`` from these paths.
    """
    return replace(
        dataclass_instance,
        **{field: _prepend_path(path_prefix, getattr(dataclass_instance, field)) for field in field_names},
    )


def _prepend_path(path_prefix: str, paths: Any) -> Any:
    if isinstance(paths, str):
        return ".".join(part for part in (path_prefix, paths.rstrip("?")) if part)
    return paths and tuple(_prepend_path(path_prefix, each) for each in paths)


@deprecate_renamed_arguments(
    {
        "before": "with_first_layer",
        "after": "with_last_layer",
        "from_first": "shared_from_first",
        "everywhere": "on_every_stage",
        "returns": "num_outputs",
    }
)
@dataclass(frozen=True, kw_only=True)
class PipelineHints:
    """Assignment of embeddings, heads and other modules outside the layers to pipeline stages.

    Args:
        with_first_layer, with_last_layer: paths of modules that belong to the first or the last layer of the stack.
            Only needed if the registration order does not imply it.
        shared_from_first: attributes of the first layer, including modules, that the first layer of every stage needs.
        on_every_stage: paths of modules that every stage of this stack needs.
        num_outputs: number of values that a layer returns, or 0 if it returns only the hidden states. None means 0 if
            the return annotation of `forward` is a tensor, and 1 otherwise.
    """

    with_first_layer: Sequence[str] = ()
    with_last_layer: Sequence[str] = ()
    shared_from_first: Sequence[str] = ()
    on_every_stage: Sequence[str] = ()
    num_outputs: int | None = 0

    def resolve_num_outputs(self, layers: nn.Module) -> PipelineHints:
        """Return a copy in which ``num_outputs=None`` is replaced with the number of values that a layer returns."""
        if self.num_outputs is not None:
            return self
        forward = type(next(layers.children())).forward
        is_tensor = inspect.signature(forward).return_annotation in (torch.Tensor, "Tensor", "torch.Tensor")
        return replace(self, num_outputs=int(not is_tensor))


@deprecate_renamed_arguments(
    {
        "gathers": "gather_modules",
        "around": "gather_with_blocks",
        "beside": "per_token_args",
        "apart": "token_free_modules",
    }
)
@dataclass(frozen=True)
class SequenceParallelHints:
    """Modules and arguments of a layer that need special treatment under sequence parallelism.

    Module paths are relative to a layer.

    Args:
        gather_modules: modules without blocks that need the full sequence, such as convolutions and replicated
            attention modules. The sequence is all-gathered around them.
        gather_with_blocks: modules that receive the full sequence together with the blocks inside them, such as an MLP
            whose experts receive tokens in another order.
        per_token_args: arguments of shape (B, S, ...) that have one entry per token, besides the hidden states. Write
            the name of a layer's argument ("gate"), or the path and the argument of a module in
            ``gather_with_blocks`` ("mixer.gate").
        token_free_modules: modules without a sequence dimension, such as a time-step embedding that scales all tokens.
            The gradients of their outputs are summed over the ranks.
        between: whether the model's code between two layers reads all positions, for example to add image features to
            some of them. The output of a layer is then all-gathered when it is read, instead of in the next layer.
    """

    gather_modules: Sequence[str] = ()
    gather_with_blocks: Sequence[str] = ()
    per_token_args: Sequence[str] = ()
    token_free_modules: Sequence[str] = ()
    between: bool = False


@dataclass(frozen=True)
class LayerStackDescription:
    """Describes a list of consecutive layers, such as a decoder, for pipeline and sequence parallelism.

    Args:
        layers: path of the ModuleList.
        final_norm: path of the norm after the stack, which still runs on a sequence shard.
        context: (path of a module, name of its argument) through which all layers receive the output of the previous
            stack. If None, this output becomes the hidden states of the first layer.
        whole_sequence: reason why sequence parallelism does not shard this stack, whose blocks keep the full sequence.
        reads_context: whether the context is an input of tensor-parallel blocks.
        layer_calls: path of the layer that each call runs, in order. By default, each layer runs once.
        stages: hints for pipeline stages.
        sequence: hints for sequence parallelism.
    """

    layers: str
    final_norm: str | None = None
    context: tuple[str, str] | None = None
    whole_sequence: str | None = None
    reads_context: bool = True
    layer_calls: tuple[str, ...] = ()
    stages: PipelineHints = PipelineHints()
    sequence: SequenceParallelHints = SequenceParallelHints()

    def with_path_prefix(self, path_prefix: str) -> LayerStackDescription:
        """Return a copy with ``path_prefix`` prepended to all module paths, for a model inside a larger model."""
        own = prepend_path_to_fields(self, path_prefix, "layers", "final_norm", "layer_calls")
        stages = prepend_path_to_fields(
            self.stages, path_prefix, "with_first_layer", "with_last_layer", "on_every_stage"
        )
        context = self.context and (_prepend_path(path_prefix, self.context[0]), self.context[1])
        return replace(own, context=context, stages=stages)

    def get_activation_layout(self, model_layout: ActivationLayout) -> ActivationLayout:
        """Derive the activation layout of these layers from the layout of the whole model.

        If these layers need full sequences, this omits sequence sharding that starts at a stack of layers.
        """
        unsharded = Dim.SEQUENCE if self.whole_sequence else None
        shards = [x for x in model_layout.shards if x.begin is ShardedFrom.INPUTS or x.dim is not unsharded]
        return replace(model_layout, shards=tuple(shards))

    @property
    def has_repeated_layers(self) -> bool:
        """Whether any layer is called more than once."""
        return len(set(self.layer_calls)) < len(self.layer_calls)


def _get_layer_paths(layers: nn.Module, module_list_path: str) -> tuple[str, ...]:
    """List the module paths of the layers in a ModuleList. A layer that occurs twice has its first path twice."""
    first: dict[int, str] = {}
    return tuple(
        first.setdefault(id(m), f"{module_list_path}.{name}") for name, m in layers._modules.items() if m is not None
    )


LayerRange = range
"""Indices of the layer calls that one virtual stage runs."""


@dataclass(frozen=True)
class LayerSequence:
    """All layers of a model in execution order, for example the encoder layers followed by the decoder layers."""

    stacks: tuple[LayerStackDescription, ...]

    @classmethod
    def from_stacks(cls, model: nn.Module, stacks: Sequence[LayerStackDescription]) -> LayerSequence:
        """Concatenate the layers of the encoder, decoder and other stacks in execution order. Ignores empty stacks."""
        found = []
        for at, stack in enumerate(stacks):
            layers = _get_layer_paths(model.get_submodule(stack.layers), stack.layers)
            if calls := stack.layer_calls or layers:
                found.append(replace(stack, layer_calls=calls, context=stack.context if at else None))
        return cls(tuple(found))

    @property
    def called_layer_paths(self) -> tuple[str, ...]:
        return tuple(chain.from_iterable(s.layer_calls for s in self.stacks))

    @property
    def stack_start_indices(self) -> tuple[int, ...]:
        """Index of the first layer of each stack, such as encoder or decoder, in the full sequence of layers."""
        return tuple(accumulate((len(s.layer_calls) for s in self.stacks[:-1]), initial=0))[: len(self.stacks)]

    def get_stack_layer_ranges(self) -> list[LayerRange]:
        """Return the range of layer indices of each stack."""
        starts = self.stack_start_indices
        return [LayerRange(a, a + len(s.layer_calls)) for a, s in zip(starts, self.stacks, strict=True)]

    def find_stack_index(self, layer_index: int) -> int:
        """Find the stack, such as encoder or decoder, that contains the layer at ``layer_index`` in the sequence."""
        return max(i for i, start in enumerate(self.stack_start_indices) if start <= layer_index)

    def get_received_activation_names(self, layer_index: int) -> tuple[str, ...]:
        """Return the names of the activations to send to the pipeline stage that starts at layer ``layer_index``."""
        if layer_index == 0:
            return ()
        index = self.find_stack_index(layer_index)
        has_context = index > 0 and self.stacks[index].context is not None
        begins = layer_index == self.stack_start_indices[index]
        return (() if begins and has_context else ("hidden",)) + (("context",) if has_context else ())

    def get_stage_layer_ranges(self, stage_bounds: Sequence[int]) -> list[LayerRange]:
        """Convert stage boundaries to one range of layer indices per pipeline stage."""
        return [LayerRange(a, b) for a, b in pairwise(stage_bounds)]


def map_tensors_to_layers(model: nn.Module, layer_sequence: LayerSequence) -> dict[str, frozenset[int]]:
    """Map each parameter and buffer name to the indices of the layers that the tensor belongs to.

    Tensors inside a layer belong to every call of the layer. All other tensors belong to the first or last layer of a
    stack. Modules registered before a stack's first layer belong to that layer. Modules registered after it, or inside
    the module that contains the previous stack, belong to the previous stack's last layer. ``PipelineHints`` override
    this.
    """
    order = {name: at for at, name in enumerate(_iter_param_and_buffer_names(model))}
    return {name: frozenset(_find_layer_indices_of_tensor(name, layer_sequence, order)) for name in order}


def map_tensor_names_to_stages(
    layer_indices_by_tensor_name: Mapping[str, frozenset[int]], stage_layer_ranges: Sequence[LayerRange]
) -> dict[str, frozenset[int]]:
    """Map each parameter and buffer name to the virtual pipeline stages that store the tensor."""
    return {
        name: frozenset(v for v, span in enumerate(stage_layer_ranges) if any(layer in span for layer in indices))
        for name, indices in layer_indices_by_tensor_name.items()
    }


def _iter_param_and_buffer_names(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in chain(module._parameters.items(), module._buffers.items()):
            if value is not None:
                yield f"{path}.{name}" if path else name


def _find_layer_indices_of_tensor(
    tensor_name: str, layer_sequence: LayerSequence, registration_index_by_name: Mapping[str, int]
) -> Iterable[int]:
    for stack, start in zip(layer_sequence.stacks, layer_sequence.stack_start_indices, strict=True):
        calls = range(start, start + len(stack.layer_calls))
        from_first = [f"{stack.layer_calls[0]}.{path}" for path in stack.stages.shared_from_first]
        if any(_is_inside_module(tensor_name, path) for path in (*stack.stages.on_every_stage, *from_first)):
            return calls
        inside = [u for u in calls if _is_inside_module(tensor_name, stack.layer_calls[u - start])]
        if inside:
            return inside
    for stack, start in zip(layer_sequence.stacks, layer_sequence.stack_start_indices, strict=True):
        if any(_is_inside_module(tensor_name, path) for path in stack.stages.with_first_layer):
            return [start]
        if any(
            _is_inside_module(tensor_name, path) for path in (*stack.stages.with_last_layer, stack.final_norm) if path
        ):
            return [start + len(stack.layer_calls) - 1]
    return [_find_layer_for_tensor_outside_layers(tensor_name, layer_sequence, registration_index_by_name)]


def _find_layer_for_tensor_outside_layers(
    tensor_name: str, layer_sequence: LayerSequence, registration_index_by_name: Mapping[str, int]
) -> int:
    """Assign a parameter outside the layers, such as a head weight, to a layer by registration order."""
    starts = layer_sequence.stack_start_indices
    firsts = [
        min(at for n, at in registration_index_by_name.items() if _is_inside_module(n, s.layer_calls[0]))
        for s in layer_sequence.stacks
    ]
    later = [i for i, first in enumerate(firsts) if registration_index_by_name[tensor_name] < first]
    follows = later[0] if later else len(firsts)  # the next stack
    shared = [_count_common_path_components(tensor_name, s.layers) for s in layer_sequence.stacks]
    nearest = max(shared[:follows], default=-1)
    if follows < len(firsts) and shared[follows] >= nearest:
        # a tensor that is passed directly between two stacks is computed on the stage that sends it
        return starts[follows] - (follows > 0 and layer_sequence.stacks[follows].context is None)
    earlier = follows - 1 if not nearest else max(i for i in range(follows) if shared[i] == nearest)
    return starts[earlier] + len(layer_sequence.stacks[earlier].layer_calls) - 1


def _count_common_path_components(tensor_name: str, module_path: str) -> int:
    pairs = zip(tensor_name.split("."), module_path.split("."), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _is_inside_module(tensor_name: str, module_path: str) -> bool:
    return tensor_name == module_path or tensor_name.startswith(f"{module_path}.")


def make_no_pipeline_layers_error(model: nn.Module, pipe_size: str, policy_notes: Sequence[str] = ()) -> ConfigError:
    """Create the ConfigError for pipeline parallelism with a policy that does not describe any layers."""
    why = f". {' '.join(policy_notes).removesuffix('.')}" if policy_notes else ""
    return ConfigError(
        f"Pipeline parallelism (pipe={pipe_size}) requires a description of the model's layers, but the policy of "
        f"{type(model).__name__} has none{why}.",
        remedy="Omit pipe, or write a policy that describes the layers in Policy.stacks() or RolePolicy.stack.",
    )


MIN_COST = 1e-9
"""Cost of a layer without weights."""


def estimate_layer_costs(
    model: nn.Module, layer_sequence: LayerSequence, layer_indices_by_tensor_name: Mapping[str, frozenset[int]]
) -> list[float]:
    """Estimate each layer's compute cost per token as the number of weights in its matrix products.

    Embedding lookups count as free. Modules before and after a stack count for its first and last layer.
    """
    layer_calls = layer_sequence.called_layer_paths
    costs = [MIN_COST + _count_matmul_weights(model, model.get_submodule(path)) for path in layer_calls]
    tables = {id(m) for m in model.modules() if isinstance(m, nn.Embedding)}
    for path, module in model.named_modules() if layer_calls else ():
        for name, p in module.named_parameters(recurse=False):
            at, *others = layer_indices_by_tensor_name[f"{path}.{name}" if path else name]
            is_counted = others or _is_inside_module(path, layer_calls[at])
            if p.dim() >= 2 and id(module) not in tables and not is_counted:
                costs[at] += p.numel()
    return costs


def _count_matmul_weights(model: nn.Module, module: nn.Module) -> float:
    config: Any = getattr(model, "config", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    total = 0.0
    for p in module.parameters():
        if p.dim() == 2 or p.dim() > 3:
            total += p.numel()
        elif p.dim() == 3:
            total += p.numel() * min(1.0, chosen / p.shape[0]) if isinstance(chosen, int) else p.numel()
    return total


def measure_layer_costs(
    model: nn.Module,
    layer_sequence: LayerSequence,
    forward_fn: Callable[[], Any],
    num_timed_runs: int,
    device: torch.device,
) -> list[float]:
    """Measure each layer's forward time in seconds, as the minimum over ``num_timed_runs`` runs.

    The time between two layers counts for the second layer, and the time after the last layer for the last layer.
    """
    marks: list[float] = []

    def record_time_hook(*_: Any) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        marks.append(time.perf_counter())

    layers = [model.get_submodule(path) for path in dict.fromkeys(layer_sequence.called_layer_paths)]
    remove_hooks = [
        register_forward_hooks(layer, HookOrder.RECORDER, forward_hook=record_time_hook) for layer in layers
    ]
    found: list[list[float]] = []
    try:
        for _ in range(num_timed_runs + 1):  # the first round is a warm-up
            marks.clear()
            record_time_hook()
            forward_fn()
            record_time_hook()
            marks[-2:] = marks[-1:]  # the last layer ends with the model
            found.append([b - a for a, b in pairwise(marks)])
    finally:
        for remove in remove_hooks:
            remove()
    return [min(each) for each in zip(*found[1:], strict=True)]
