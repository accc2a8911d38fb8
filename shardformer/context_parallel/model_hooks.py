"""Hooks that shard the sequence before the layers of a model, and gather it for modules that need all positions.

inputs, embeddings, masks    replicated
layers                       local positions of the hidden states and of all other arguments
after the layers             a ``SequenceShardedTensor``, on which a head and its loss work position by position
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collectives import all_gather_ints, broadcast
from shardformer.comm.deferred_tensor import resolve_deferred_tensors
from shardformer.context_parallel.masks import ChunkedAttentionMask
from shardformer.context_parallel.sequence_layout import (
    ContextParallelState,
    SequenceLayout,
    draw_shared_seed,
    set_context_parallel_state,
)
from shardformer.context_parallel.sequence_sharded_tensor import (
    SequenceShardedTensor,
    all_gather_rows,
    average_grad_in_backward,
    set_in_model_forward,
    slice_local_rows,
)
from shardformer.errors import InputError
from shardformer.forward_hooks import HookOrder, register_forward_hooks
from shardformer.random_state import LocalRNGState
from shardformer.tensor_parallel.sequence_parallel import get_first_tensor_arg, map_first_output
from shardformer.torch_compat import (
    current_graph_task_id,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_with_path,
)
from shardformer.transformers_compat import find_kv_caches, get_forward_arg_names, remove_kv_caches

# B batch, S sequence, H hidden; s: local positions


class ContextParallelModelHook:
    """Hooks that turn on context parallelism during each forward pass of a model.

    Args:
        has_random_ops: whether the model draws random numbers in training.
    """

    def __init__(self, state: ContextParallelState, model: nn.Module, *, has_random_ops: bool) -> None:
        self._state, self._draws, self._arguments = state, has_random_ops, get_forward_arg_names(model)
        order = HookOrder.MODEL_SEQUENCE
        register_forward_hooks(
            model, order, self._forward_pre_hook, self._forward_hook, with_kwargs=True, always_call=True
        )

    def _forward_pre_hook(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self._state
        state.is_open = not find_kv_caches((*args, *kwargs.values())) and not kwargs.get("use_cache", False)
        state.current, state.seen_in_forward = None, {}
        set_context_parallel_state(state)
        set_in_model_forward(True)
        if not state.is_open:
            return None
        if self._draws and model.training:  # before the random states of the ranks are aligned
            state.seed = all_gather_ints([draw_shared_seed()], state.axis)[0][0]
        return self._average_input_grads_in_backward(args, kwargs)

    def _average_input_grads_in_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """All-reduce the gradients of the model inputs, because each rank computes them for its own positions only."""

        def requires_grad_sync(leaf: Any) -> bool:
            return isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, SequenceShardedTensor)

        if not torch.is_grad_enabled() or not any(map(requires_grad_sync, tree_leaves((args, kwargs)))):
            return None
        return tree_map(
            lambda x: average_grad_in_backward(x, self._state.axis) if requires_grad_sync(x) else x, (args, kwargs)
        )

    def _forward_hook(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Remove key-value caches from the model's output, because they contain only the positions of this rank."""
        state = self._state
        state.current = None
        set_context_parallel_state(None)
        set_in_model_forward(False)
        return remove_kv_caches(output, self._arguments) if state.is_open else None


class ShardLayerStackSequenceHook:
    """Hooks that shard the sequence before the first layer of a model and wrap the output in a sharded tensor.

    Args:
        stack_path: the path of the module list that contains the layers.
        layers: the layers in order, without repetitions.
        output_modules: the modules whose output is wrapped: the last layer or a norm after it, or every layer if the
            model reads or writes single positions between the layers.
        has_random_ops: whether the model draws random numbers in training. Each rank then draws different ones in the
            layers.
    """

    def __init__(
        self,
        state: ContextParallelState,
        stack_path: str,
        layers: Sequence[nn.Module],
        output_modules: Sequence[nn.Module],
        *,
        has_random_ops: bool,
    ) -> None:
        self._state, self._path, self._first = state, stack_path, layers[0]
        self._random = LocalRNGState(state.axis.rank, enabled=has_random_ops)
        self._untraced: Any = torch.compiler.disable(
            ShardLayerStackSequenceHook._shard_layer_inputs
        )  # unbound, for copies
        self._full: int | None = None  # the sequence length of a forward pass between the first layer and the last
        for layer in dict.fromkeys(layers):
            register_forward_hooks(layer, HookOrder.STACK_SEQUENCE, self._forward_pre_hook, with_kwargs=True)
        for end in dict.fromkeys(output_modules):
            register_forward_hooks(end, HookOrder.STACK_SEQUENCE, forward_hook=self._forward_hook)

    def _forward_pre_hook(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self._state
        is_recomputing = current_graph_task_id() >= 0
        if not is_recomputing and not state.is_open:
            state.current = None
            return None
        hidden = get_first_tensor_arg(args, kwargs)
        masks = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ChunkedAttentionMask)]
        if is_recomputing:
            full = self._find_sequence_length_in_recomputation(layer, hidden, masks)
            if full is None:
                state.current = None
                return None
        elif self._full is None:
            full = self._full = hidden.shape[1]
            self._random.enter_local_rng_state(hidden, layer.training)
        else:
            full = self._full
        state.current = state.record_sequence_length(full)
        lengths = {full, *(mask.keys.length for mask in masks)}
        return self._untraced(self, (args, kwargs), hidden, lengths)

    def _shard_layer_inputs(self, args_and_kwargs: Any, hidden_states: Tensor, sequence_lengths: set[int]) -> Any:
        return tree_map_with_path(
            lambda path, leaf: self._shard_layer_argument(
                (self._path, *path[1:]), leaf, leaf is hidden_states, sequence_lengths
            ),
            args_and_kwargs,
        )

    def _find_sequence_length_in_recomputation(
        self, layer: nn.Module, hidden_states: Tensor, masks: Sequence[ChunkedAttentionMask]
    ) -> int | None:
        lengths = [mask.queries.length for mask in masks]
        matching = [
            length for length in lengths if hidden_states.shape[1] in (length, self._state.get_local_length(length))
        ]
        if matching:
            return matching[0]
        state, length = self._state, hidden_states.shape[1]
        if layer is self._first and length in state.seen:
            return length
        found = state.find_layout_by_local_length(length)
        return None if found is None else found.length

    def _shard_layer_argument(
        self, argument_path: Hashable, layer_argument: Any, is_hidden_states: bool, sequence_lengths: set[int]
    ) -> Any:
        state = self._state
        if isinstance(layer_argument, SequenceShardedTensor):
            state.record_sequence_length(layer_argument.rows.full)
            rows = state.get_index_shards(layer_argument.rows.full)
            return (
                layer_argument.local
                if layer_argument.rows is rows
                else slice_local_rows(layer_argument.full_tensor(), rows, layer_argument.shard_dim)
            )
        if not isinstance(layer_argument, Tensor):
            # a cache of the local positions cannot be used, and a recomputation would append to it again
            return None if hasattr(type(layer_argument), "get_seq_length") else layer_argument
        layer_argument = resolve_deferred_tensors(layer_argument)
        if is_hidden_states:
            return (
                slice_local_rows(layer_argument, state.get_index_shards(layer_argument.shape[1]), 1)
                if layer_argument.shape[1] in sequence_lengths
                else layer_argument
            )
        dim = state.find_sequence_dim(argument_path, layer_argument, sequence_lengths)
        return (
            layer_argument
            if dim is None
            else slice_local_rows(layer_argument, state.get_index_shards(layer_argument.shape[dim]), dim)
        )

    def _forward_hook(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        state = self._state
        if current_graph_task_id() >= 0 or self._full is None:
            return output
        rows, self._full = state.get_index_shards(self._full), None
        state.current = None
        self._random.exit_local_rng_state()
        return map_first_output(output, lambda x: SequenceShardedTensor(resolve_deferred_tensors(x), rows, 1))

    def reset_after_error(self) -> None:
        self._full = None
        self._random.exit_local_rng_state()


def register_local_positions_hooks(module: nn.Module) -> None:
    """Make a module outside the layers, such as the LM head, process only this rank's positions."""
    sharded: list[SequenceShardedTensor] = []

    def unwrap_inputs_pre_hook(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, SequenceShardedTensor)]
        sharded[:] = inputs[:1]
        return tree_map(
            lambda leaf: leaf.local if isinstance(leaf, SequenceShardedTensor) else leaf, (args, dict(kwargs))
        )

    def wrap_output_hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not sharded:
            return output
        x = sharded.pop()
        return map_first_output(
            output, lambda y: SequenceShardedTensor(resolve_deferred_tensors(y), x.rows, x.shard_dim)
        )

    register_forward_hooks(
        module, HookOrder.LOCAL_POSITIONS, unwrap_inputs_pre_hook, wrap_output_hook, with_kwargs=True
    )


# B batch, S sequence, H hidden; s: local positions


class GatherFullSequenceHook:
    """Hooks that all-gather the sequence for a module that needs all positions, and shard its output again.

    Examples are state spaces and convolutions. Every rank computes the module for all positions. Communicates: forward
    one all-gather of B*S*H, backward one all-to-all of it.

    Args:
        module_path: the path of the stack, and of the module in a layer.
        has_random_ops: whether the model draws random numbers in training.
    """

    def __init__(
        self, state: ContextParallelState, module_path: tuple[str, str], module: nn.Module, *, has_random_ops: bool
    ) -> None:
        self._state, self._path = state, module_path
        self._random = LocalRNGState(state.axis.rank, partial(broadcast, axis=state.axis), enabled=has_random_ops)
        self._positions: SequenceLayout | None = None
        self._outer_positions: SequenceLayout | None = None
        register_forward_hooks(
            module, HookOrder.FULL_SEQUENCE, self._forward_pre_hook, self._forward_hook, with_kwargs=True
        )

    def _forward_pre_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state, hidden = self._state, get_first_tensor_arg(args, kwargs)
        self._positions = positions = self._outer_positions = state.current
        is_recomputing = current_graph_task_id() >= 0
        if positions is None and is_recomputing:
            self._positions = positions = state.find_layout_by_local_length(hidden.shape[1])
        if positions is None:
            return None
        local = state.get_local_length(positions.length)
        if hidden.shape[1] != local:
            raise InputError(
                f"With context parallelism, the input of {type(module).__name__} must have the shape "
                f"(batch, {local}, hidden) on this rank, but got {tuple(hidden.shape)}.",
                remedy="Set sequence=1 to disable context parallelism for this model.",
            )
        self._random.enter_local_rng_state(hidden, module.training)
        lengths_seen = state.seen if is_recomputing else state.seen_in_forward  # of an encoder and of a decoder
        parts = {state.get_local_length(length) for length in lengths_seen}
        leaves, spec = tree_flatten_with_path((args, kwargs))
        tensors = {(*self._path, *path): x for path, x in leaves if isinstance(x, Tensor) and x is not hidden}
        state.infer_sequence_dims(tensors, lengths_seen, hidden.shape[0])
        state.current = None

        def gather_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
            if leaf is hidden:
                return all_gather_rows(leaf, state.get_index_shards(positions.length), 1)
            dim = state.find_sequence_dim((*self._path, *path), leaf, parts) if isinstance(leaf, Tensor) else None
            found = None if dim is None else state.find_layout_by_local_length(leaf.shape[dim], lengths_seen)
            return (
                leaf
                if found is None or dim is None
                else all_gather_rows(leaf, state.get_index_shards(found.length), dim)
            )

        return spec.unflatten(gather_leaf(path, leaf) for path, leaf in leaves)

    def _forward_hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        state, positions, self._positions = self._state, self._positions, None
        if positions is None:
            return output
        state.current = self._outer_positions
        self._random.exit_local_rng_state()
        return map_first_output(output, lambda x: slice_local_rows(x, state.get_index_shards(positions.length), 1))

    def reset_after_error(self) -> None:
        self._positions = None
        self._random.exit_local_rng_state()
