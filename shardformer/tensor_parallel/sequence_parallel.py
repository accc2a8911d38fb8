"""Sequence parallelism: the activations between tensor-parallel blocks are sharded over the sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collectives import (
    all_gather,
    broadcast,
    gather_from_parallel_region,
    gather_from_sp_region,
    get_local_slices,
    reduce_scatter_to_sp_region,
    scatter_to_parallel_region,
    start_all_reduce,
)
from shardformer.comm.deferred_tensor import DeferredTensor
from shardformer.errors import ConfigError, InputError
from shardformer.forward_hooks import ForwardArgs, HookOrder, register_forward_hooks
from shardformer.layout.activation_layout import ActivationLayout, ActivationShard, Dim, IndexOrder
from shardformer.layout.shard_spec import Split
from shardformer.mesh.parallel_context import Axis
from shardformer.random_state import LocalRNGState
from shardformer.tensor_parallel.linear_communication import (
    REGIONS_BY_DIM,
    SEQUENCE,
    ReplicatedInputRegion,
    SequenceShardedRegion,
    TpRegion,
    get_even_shard_length,
    prepare_extra_block_input,
)
from shardformer.torch_compat import current_graph_task_id, tree_map

# B batch, S sequence, H hidden; s: local slice of the sequence (S / tensor)


class ActivationSharding:
    """Controls how the activations between the tensor-parallel blocks of a model are sharded.

    If the layout shards the sequence, the activations are sharded before the first layer and gathered after the last.
    Each rank has consecutive positions. Their number differs by at most one between the ranks.

    Args:
        axis: the tensor axis of the blocks.
        overlap: run the communication of the blocks in ring steps that overlap with the adjacent matmuls.
        has_random_ops: whether the model draws random numbers in training.
    """

    length_name = "full"
    """Attribute with the number that differs between inputs."""

    def __init__(
        self, layout: ActivationLayout, axis: Axis, *, overlap: bool = False, has_random_ops: bool = False
    ) -> None:
        self.layout, self.axis, self.overlap = layout, axis, overlap
        shard = layout.get_stack_shard(axis.name) if axis.size > 1 else None
        if shard is not None and (shard.dim not in REGIONS_BY_DIM or shard.order is not IndexOrder.CONTIGUOUS):
            dims = ", ".join(d for d in REGIONS_BY_DIM if d)
            raise ConfigError(
                f"Activations between layers can only be sharded in contiguous slices along {dims}, but got {shard}.",
                remedy="Shard the dimension at the inputs of the model instead.",
            )
        self._dim: Dim | None = None if shard is None else shard.dim
        self.samples, self.full = 0, 0  # batch size and sequence length of the last input
        self._is_open = False
        self.is_restored = False  # whether the length is known in the forward pass of a layer, which then is not traced
        self._lengths: set[int] = set()
        self._is_length_ambiguous = False
        self._random, self._is_random = (
            LocalRNGState(axis.rank, enabled=has_random_ops and self._dim is not None),
            False,
        )

    @property
    def is_sharded(self) -> bool:
        """Whether the activations are sharded in the current forward pass."""
        return self._dim is not None and self._is_open

    @property
    def sequence_shard_axis(self) -> Axis | None:
        """Mesh axis over which the sequence is sharded, or None if it is not sharded."""
        return self.axis if self._dim is not None else None

    def select_tp_region(self, hidden_states: Tensor) -> TpRegion:
        """Select the collectives at the input and output of a block that receives ``hidden_states``."""
        if self._dim is None:
            return ReplicatedInputRegion(self.axis)
        if hidden_states.dim() != 2:  # an MLP with input (B*s, H) runs after the attention of its layer
            self.restore_input_size_in_recompute(hidden_states)
        if not self._is_open:
            return ReplicatedInputRegion(self.axis)
        return SequenceShardedRegion(self.axis, self.full, self.overlap)

    # --- entry and exit of the stack

    def shard_stack_input(self, hidden_states: Tensor, training: bool) -> Tensor:
        """Shard the input of the first layer: (B, S, H) -> (B, s, H). Backward: one all-gather of B*S*H.

        If x is the deferred sum of a vocabulary-parallel embedding: forward one reduce-scatter of B*S*H.
        """
        self.samples, self.full = hidden_states.shape[0], hidden_states.shape[SEQUENCE]
        # A decoding step without gradients may be shorter than the axis. A checkpointed forward, which is recomputed,
        # has no gradients either, but runs in training mode.
        self._is_open = training or torch.is_grad_enabled() or self.full >= self.axis.size
        if not self._is_open:
            return hidden_states
        if self.full not in self._lengths:
            near = [n for n in self._lengths if abs(n - self.full) < self.axis.size]
            self._lengths.add(self.full)
            # on some rank, two sequences whose lengths differ this little have the same local length
            self._is_length_ambiguous = self._is_length_ambiguous or bool(near)
        self._is_random = training
        self._random.enter_local_rng_state(hidden_states, training)
        if isinstance(hidden_states, DeferredTensor) and hidden_states.is_pending:
            region = hidden_states.region
            if region is None and hidden_states.cached_full_tensor is None:
                return reduce_scatter_to_sp_region(hidden_states.local, self.axis, SEQUENCE)
            if (
                isinstance(region, SequenceShardedRegion)
                and region.axis is self.axis
                and region.sequence_length == self.full
            ):
                return hidden_states.local  # the output of the previous layer
        return scatter_to_parallel_region(hidden_states, self.axis, SEQUENCE, self._make_sequence_split())

    def gather_stack_output(self, local_hidden_states: Tensor) -> Tensor:
        """Wrap the output of the last layer in a full tensor that is all-gathered when it is first used.

        Forward one all-gather of B*S*H on first use. Backward nothing, or one reduce-scatter of B*S*H if a
        column-parallel head reads the output.
        """
        if not self.is_sharded:
            return local_hidden_states
        if self._is_random:
            self._random.exit_local_rng_state()
        axis, full, split = self.axis, self.full, self._make_sequence_split()
        shape = (*local_hidden_states.shape[:SEQUENCE], full, *local_hidden_states.shape[SEQUENCE + 1 :])
        gather = partial(all_gather, axis=axis, dim=SEQUENCE, full_length=full)
        to_local = partial(get_local_slices, axis=axis, dim=SEQUENCE, split=split)
        region = SequenceShardedRegion(axis, full, self.overlap)
        return DeferredTensor.from_local(local_hidden_states, shape, axis, region, gather, to_local)

    def _make_sequence_split(self) -> Split:
        return ActivationShard(Dim.SEQUENCE, self.axis.name).make_split(self.full, self.axis.size)

    def register_layer_stack_hooks(self, first_module: nn.Module, last_module: nn.Module) -> None:
        """Register hooks that shard the input of the first module and gather the output of the last module."""
        if self._dim is not None:
            register_forward_hooks(first_module, HookOrder.STACK, self._shard_input_pre_hook, with_kwargs=True)
            register_forward_hooks(last_module, HookOrder.STACK, forward_hook=self._gather_output_hook)

    def _shard_input_pre_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardArgs:
        return map_first_tensor_arg(args, kwargs, lambda x: self.shard_stack_input(x, module.training))

    def _gather_output_hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return map_first_output(output, self.gather_stack_output)

    def restore_input_size_pre_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook that restores the full input size when activation checkpointing recomputes a module."""
        self.restore_input_size_in_recompute(get_first_tensor_arg(args, kwargs))

    def shard_token_argument(self, tensor: Tensor) -> Tensor:
        """Select this rank's token positions in a layer argument: (B, S, ...) -> (B, s, ...). Backward: one all-gather.

        A tensor with the local number of positions, made by an earlier layer, is returned unchanged.
        """
        is_full = self.is_sharded and tensor.dim() > 1 and tensor.shape[SEQUENCE] == self.full
        return (
            scatter_to_parallel_region(tensor, self.axis, SEQUENCE, self._make_sequence_split()) if is_full else tensor
        )

    def gather_token_argument(self, tensor: Tensor) -> Tensor:
        """Gather all token positions of a module argument: (B, s, ...) -> (B, S, ...). Backward: the local slice."""
        is_local = (
            self.is_sharded
            and tensor.dim() > 1
            and tensor.shape[SEQUENCE] == get_even_shard_length(self.full, self.axis)
        )
        return (
            gather_from_parallel_region(tensor, self.axis, SEQUENCE, self._make_sequence_split())
            if is_local
            else tensor
        )

    def register_token_free_hooks(self, module: nn.Module, has_random_ops: bool) -> GatherActivationsHook | None:
        """Register hooks for a module that has no token dimension and that every rank computes in full."""
        return None if self._dim is None else TokenFreeModuleHook(self, module, has_random_ops)

    def register_full_sequence_hooks(self, module: nn.Module, has_random_ops: bool) -> GatherActivationsHook | None:
        """Register hooks that gather the full sequence for ``module`` and shard its output again.

        Forward one all-gather of B*S*H, backward the same. Every rank computes the operations of the module that are
        outside a block.
        """
        return None if self._dim is None else GatherSequenceHook(self, module, has_random_ops)

    def reset_after_error(self) -> None:
        """Restore the random state from before the first layer after an exception in the forward pass."""
        self._random.exit_local_rng_state()

    # --- lengths

    def restore_input_size_in_recompute(self, hidden_states: Tensor) -> None:
        """Restore the full sequence length when activation checkpointing recomputes a forward pass.

        All-reduces one integer if several sequence lengths have the same local length.
        """
        if self._dim is None or self.is_restored or current_graph_task_id() < 0:
            return
        self._is_open = True
        if self._is_length_ambiguous:
            length = torch.tensor(hidden_states.shape[SEQUENCE], device=hidden_states.device)
            self.full = int(start_all_reduce(length, self.axis, purpose="check").wait())
            return
        local = hidden_states.shape[SEQUENCE]
        self.full = next((n for n in self._lengths if get_even_shard_length(n, self.axis) == local), self.full)

    def check_local_sequence_length(self, local_hidden_states: Tensor) -> None:
        """Raise ConfigError if this rank's shard of the sequence has the wrong length, which can hang a collective."""
        length = get_even_shard_length(self.full, self.axis)
        if local_hidden_states.dim() < 3 or local_hidden_states.shape[SEQUENCE] != length:
            raise ConfigError(
                f"The hidden states must have shape (batch, {length}, hidden) on this rank for a sequence of "
                f"{self.full} tokens, but got {tuple(local_hidden_states.shape)}.",
                remedy="Disable sequence parallelism, or disable options that split the sequence, such as "
                "chunk_size_feed_forward.",
            )

    def view_as_local_tokens(self, tensor: Tensor) -> Tensor | None:
        """View ``tensor`` as (B, s, ...), or return None if it does not have one row for each token of this rank."""
        if not self.is_sharded:
            return None
        length = get_even_shard_length(self.full, self.axis)
        if tensor.dim() > 1 and tuple(tensor.shape[:2]) == (self.samples, length):
            return tensor
        rows = self.samples * length
        return (
            tensor.view(self.samples, length, *tensor.shape[1:]) if tensor.dim() and tensor.shape[0] == rows else None
        )

    def all_gather_tokens(self, local_tokens: Tensor) -> Tensor:
        """All-gather the tokens of a tensor: (B, s, ...) -> (B, S, ...). Backward: one reduce-scatter."""
        if local_tokens.is_floating_point():
            return gather_from_sp_region(local_tokens, self.axis, SEQUENCE, self.full)
        return all_gather(local_tokens, self.axis, SEQUENCE, self.full)

    def unflatten_tokens(self, hidden_states: Tensor) -> Tensor:
        """View a flattened MLP input (B*s, H) as (B, s, H), and return any other tensor unchanged."""
        length = get_even_shard_length(self.full, self.axis)
        samples = hidden_states.shape[0] // length if length else self.samples
        return (
            hidden_states.view(samples, length, hidden_states.shape[-1])
            if hidden_states.dim() == 2 and hidden_states.shape[0] == samples * length
            else hidden_states
        )


class GatherActivationsHook:
    """Base class of hooks for a module that needs more than this rank's shard of the activations."""

    _random: LocalRNGState

    def reset_after_error(self) -> None:
        """Restore the random state that was active before the forward pass, for example after an exception in it."""
        self._random.exit_local_rng_state()


class GatherSequenceHook(GatherActivationsHook):
    """Hooks that gather the full sequence before a module, and shard its output again."""

    def __init__(self, activation_sharding: ActivationSharding, module: nn.Module, has_random_ops: bool) -> None:
        self._stream = activation_sharding
        self._random = LocalRNGState(
            activation_sharding.axis.rank, partial(broadcast, axis=activation_sharding.axis), enabled=has_random_ops
        )
        register_forward_hooks(
            module, HookOrder.FULL_LENGTH, self._forward_pre_hook, self._forward_hook, with_kwargs=True
        )

    def _forward_pre_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardArgs | None:
        stream, x = self._stream, get_first_tensor_arg(args, kwargs)
        stream.restore_input_size_in_recompute(x)
        if not stream.is_sharded:
            return None
        stream.check_local_sequence_length(x)
        self._random.enter_local_rng_state(x, module.training)
        full = gather_from_parallel_region(x, stream.axis, SEQUENCE, stream._make_sequence_split())
        # the same tensor may be passed as queries, keys and values
        return tuple(full if a is x else a for a in args), {n: full if a is x else a for n, a in kwargs.items()}

    def _forward_hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._stream.is_sharded:
            return output
        self.reset_after_error()
        return map_first_output(output, self._select_local_positions)

    def _select_local_positions(self, tensor: Tensor) -> Tensor:
        """Select this rank's token positions from a tensor (B, S, ...) or from flattened tokens (B*S, H)."""
        stream = self._stream
        if tensor.dim() == 2 and tensor.shape[0] == stream.samples * stream.full:
            return self._select_local_positions(tensor.unflatten(0, (stream.samples, stream.full))).flatten(0, 1)
        return scatter_to_parallel_region(tensor, stream.axis, SEQUENCE, stream._make_sequence_split())


class TokenFreeModuleHook(GatherSequenceHook):
    """Hooks for a module whose inputs have no token dimension. They sum its output gradient over the ranks."""

    def _forward_pre_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._stream.is_sharded and self._random.is_enabled and module.training:
            self._random.enter_local_rng_state(get_first_tensor_arg(args, kwargs))

    def _forward_hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        def prepare_output(leaf: Any) -> Any:
            return (
                prepare_extra_block_input(leaf, self._stream.axis)
                if isinstance(leaf, Tensor) and leaf.requires_grad
                else leaf
            )

        if not self._stream.is_sharded:
            return output
        self.reset_after_error()
        return tree_map(prepare_output, output)


def map_first_tensor_arg(
    args: tuple[Any, ...], kwargs: dict[str, Any], fn: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply ``fn`` to the hidden states, which are the first tensor argument of a module."""
    if args and isinstance(args[0], Tensor):
        return (fn(args[0]), *args[1:]), kwargs
    name = _get_first_tensor_kwarg_name(kwargs)
    return args, {**kwargs, name: fn(kwargs[name])}


def get_first_tensor_arg(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the hidden states, which are the first tensor argument of a module."""
    first: Tensor = args[0] if args and isinstance(args[0], Tensor) else kwargs[_get_first_tensor_kwarg_name(kwargs)]
    return first


def _get_first_tensor_kwarg_name(kwargs: Mapping[str, Any]) -> str:
    tensors = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
    if not tensors:
        raise InputError(
            "A layer was called without hidden states: none of its arguments is a tensor.",
            remedy="Pass the hidden states as a tensor.",
        )
    return "hidden_states" if "hidden_states" in tensors else tensors[0]


def map_first_output(output: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``fn`` to the hidden states that a module returns, alone or as the first element of its output."""
    if isinstance(output, list):
        return [fn(output[0]), *output[1:]]
    return (fn(output[0]), *output[1:]) if isinstance(output, tuple) else fn(output)
