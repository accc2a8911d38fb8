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
    gather_from_region,
    gather_from_sp_region,
    get_local_slices,
    reduce_scatter_to_sp_region,
    scatter_to_region,
    start_all_reduce,
)
from shardformer.comm.deferred_tensor import DeferredTensor
from shardformer.errors import ConfigError, InputError
from shardformer.forward_hooks import HookOrder, register_forward_hooks
from shardformer.layout.activation_layout import ActivationLayout, ActivationShard, Dim, IndexOrder
from shardformer.mesh.parallel_context import Axis
from shardformer.random_state import LocalRandomState
from shardformer.tensor_parallel.linear_communication import (
    REGIONS_BY_DIM,
    SEQUENCE,
    ReplicatedRegion,
    SequenceShardedRegion,
    TpRegion,
    get_even_split_length,
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
        random: whether the model draws random numbers in training.
    """

    length_name = "full"
    """Attribute with the number that differs between inputs."""

    def __init__(self, layout: ActivationLayout, axis: Axis, *, overlap: bool = False, random: bool = False) -> None:
        self.layout, self.axis, self.overlap = layout, axis, overlap
        shard = layout.get_stack_shard(axis.name) if axis.size > 1 else None
        if shard is not None and (shard.dim not in REGIONS_BY_DIM or shard.order is not IndexOrder.CONTIGUOUS):
            dims = ", ".join(d for d in REGIONS_BY_DIM if d)
            raise ConfigError(
                f"Activations between layers must be contiguous slices of the {dims} dim, but got {shard}.",
                remedy="Shard this dim at the inputs of the model, or add it to REGIONS_BY_DIM.",
            )
        self._dim: Dim | None = None if shard is None else shard.dim
        self.samples, self.full = 0, 0  # batch size and sequence length of the last input
        self._is_open = False
        self.is_restored = False  # whether the length is known in the forward pass of a layer, which then is not traced
        self._lengths: set[int] = set()
        self._is_length_ambiguous = False
        self._random, self._is_random = LocalRandomState(axis.rank, enabled=random and self._dim is not None), False

    @property
    def is_sharded(self) -> bool:
        """Whether the activations are sharded in the current forward pass."""
        return self._dim is not None and self._is_open

    @property
    def sequence_shard_axis(self) -> Axis | None:
        """Mesh axis over which the sequence is sharded, or None if it is not sharded."""
        return self.axis if self._dim is not None else None

    def select_tp_region(self, x: Tensor) -> TpRegion:
        """Return the collectives that a block with the input x needs at its input and output."""
        if self._dim is None:
            return ReplicatedRegion(self.axis)
        if x.dim() != 2:  # an MLP with input (B*s, H) runs after the attention of its layer
            self.restore_input_size_in_recompute(x)
        if not self._is_open:
            return ReplicatedRegion(self.axis)
        return SequenceShardedRegion(self.axis, self.full, self.overlap)

    # --- entry and exit of the stack

    def shard_stack_input(self, x_BSH: Tensor, training: bool) -> Tensor:
        """Shard the input of the first layer: (B, S, H) -> (B, s, H). Backward: one all-gather of B*S*H.

        If x is the deferred sum of a vocabulary-parallel embedding: forward one reduce-scatter of B*S*H.
        """
        self.samples, self.full = x_BSH.shape[0], x_BSH.shape[SEQUENCE]
        # A decoding step without gradients may be shorter than the axis. A checkpointed forward, which is recomputed,
        # has no gradients either, but runs in training mode.
        self._is_open = training or torch.is_grad_enabled() or self.full >= self.axis.size
        if not self._is_open:
            return x_BSH
        if self.full not in self._lengths:
            near = [n for n in self._lengths if abs(n - self.full) < self.axis.size]
            self._lengths.add(self.full)
            # on some rank, two sequences whose lengths differ this little have the same local length
            self._is_length_ambiguous = self._is_length_ambiguous or bool(near)
        self._is_random = training
        self._random.enter_local_state(x_BSH, training)
        if isinstance(x_BSH, DeferredTensor) and x_BSH.is_pending:
            region = x_BSH.region
            if region is None and x_BSH.computed_value is None:
                return reduce_scatter_to_sp_region(x_BSH.local, self.axis, SEQUENCE)
            if isinstance(region, SequenceShardedRegion) and region.axis is self.axis and region.full == self.full:
                return x_BSH.local  # the output of the previous layer
        return scatter_to_region(x_BSH, self.axis, SEQUENCE, self._make_sequence_split())

    def gather_stack_output(self, x_BsH: Tensor) -> Tensor:
        """Return the full output of the last layer as a tensor that is gathered when it is first used.

        Forward one all-gather of B*S*H on first use. Backward nothing, or one reduce-scatter of B*S*H if a
        column-parallel head reads the output.
        """
        if not self.is_sharded:
            return x_BsH
        if self._is_random:
            self._random.leave_local_state()
        axis, full, split = self.axis, self.full, self._make_sequence_split()
        shape = (*x_BsH.shape[:SEQUENCE], full, *x_BsH.shape[SEQUENCE + 1 :])
        gather = partial(all_gather, axis=axis, dim=SEQUENCE, full=full)
        to_local = partial(get_local_slices, axis=axis, dim=SEQUENCE, split=split)
        region = SequenceShardedRegion(axis, full, self.overlap)
        return DeferredTensor.from_local(x_BsH, shape, axis, region, gather, to_local)

    def _make_sequence_split(self) -> Any:
        return ActivationShard(Dim.SEQUENCE, self.axis.name).make_split(self.full, self.axis.size)

    def register_hooks(self, first: nn.Module, last: nn.Module) -> None:
        """Register hooks that shard the input of the first module and gather the output of the last module."""
        if self._dim is not None:
            register_forward_hooks(first, HookOrder.STACK, self._shard_input_hook, with_kwargs=True)
            register_forward_hooks(last, HookOrder.STACK, after=self._gather_output_hook)

    def _shard_input_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return map_first_tensor(args, kwargs, lambda x: self.shard_stack_input(x, module.training))

    def _gather_output_hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return map_first_output(output, self.gather_stack_output)

    def restore_input_size_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook that restores the full input size when activation checkpointing recomputes a module."""
        self.restore_input_size_in_recompute(get_first_tensor(args, kwargs))

    def shard_token_argument(self, x_BS: Tensor) -> Tensor:
        """Select this rank's token positions in a layer argument: (B, S, ...) -> (B, s, ...). Backward: one all-gather.

        A tensor with the local number of positions, made by an earlier layer, is returned unchanged.
        """
        is_full = self.is_sharded and x_BS.dim() > 1 and x_BS.shape[SEQUENCE] == self.full
        return scatter_to_region(x_BS, self.axis, SEQUENCE, self._make_sequence_split()) if is_full else x_BS

    def gather_token_argument(self, x_Bs: Tensor) -> Tensor:
        """Gather all token positions of a module argument: (B, s, ...) -> (B, S, ...). Backward: the local slice."""
        is_local = (
            self.is_sharded and x_Bs.dim() > 1 and x_Bs.shape[SEQUENCE] == get_even_split_length(self.full, self.axis)
        )
        return gather_from_region(x_Bs, self.axis, SEQUENCE, self._make_sequence_split()) if is_local else x_Bs

    def register_token_free_module_hooks(self, module: nn.Module, random: bool) -> GatherHook | None:
        """Register hooks for a module whose inputs have no token dimension. Every rank computes it in full."""
        return None if self._dim is None else TokenFreeModuleHook(self, module, random)

    def register_full_sequence_hooks(self, module: nn.Module, random: bool) -> GatherHook | None:
        """Register hooks that gather the full sequence for ``module`` and shard its output again.

        Forward one all-gather of B*S*H, backward the same. Every rank computes the operations of the module that are
        outside a block.
        """
        return None if self._dim is None else GatherSequenceHook(self, module, random)

    def reset_after_error(self) -> None:
        """Restore the random state from before the first layer after an exception in the forward pass."""
        self._random.leave_local_state()

    # --- lengths

    def restore_input_size_in_recompute(self, x_BsH: Tensor) -> None:
        """Restore the full sequence length when activation checkpointing recomputes a forward pass.

        All-reduces one integer if several sequence lengths have the same local length.
        """
        if self._dim is None or self.is_restored or current_graph_task_id() < 0:
            return
        self._is_open = True
        if self._is_length_ambiguous:
            length = torch.tensor(x_BsH.shape[SEQUENCE], device=x_BsH.device)
            self.full = int(start_all_reduce(length, self.axis, purpose="check").wait())
            return
        local = x_BsH.shape[SEQUENCE]
        self.full = next((n for n in self._lengths if get_even_split_length(n, self.axis) == local), self.full)

    def check_local_sequence_length(self, x_BsH: Tensor) -> None:
        """Raise ConfigError if this rank's shard of the sequence has the wrong length, which can hang a collective."""
        length = get_even_split_length(self.full, self.axis)
        if x_BsH.dim() < 3 or x_BsH.shape[SEQUENCE] != length:
            raise ConfigError(
                f"The hidden states must have shape (batch, {length}, hidden), this rank's shard of a sequence of "
                f"{self.full} tokens, but got {tuple(x_BsH.shape)}.",
                remedy="Disable sequence parallelism, or options that split it, such as chunk_size_feed_forward.",
            )

    def view_as_local_tokens(self, x: Tensor) -> Tensor | None:
        """View x as (B, s, ...), or return None if x does not have one row for each token of this rank."""
        if not self.is_sharded:
            return None
        length = get_even_split_length(self.full, self.axis)
        if x.dim() > 1 and tuple(x.shape[:2]) == (self.samples, length):
            return x
        rows = self.samples * length
        return x.view(self.samples, length, *x.shape[1:]) if x.dim() and x.shape[0] == rows else None

    def gather_tokens(self, x_Bs: Tensor) -> Tensor:
        """All-gather the tokens of a tensor: (B, s, ...) -> (B, S, ...). Backward: one reduce-scatter."""
        if x_Bs.is_floating_point():
            return gather_from_sp_region(x_Bs, self.axis, SEQUENCE, self.full)
        return all_gather(x_Bs, self.axis, SEQUENCE, self.full)

    def unflatten_tokens(self, x: Tensor) -> Tensor:
        """View a flattened MLP input (B*s, H) as (B, s, H), and return any other tensor unchanged."""
        length = get_even_split_length(self.full, self.axis)
        samples = x.shape[0] // length if length else self.samples
        return x.view(samples, length, x.shape[-1]) if x.dim() == 2 and x.shape[0] == samples * length else x


class GatherHook:
    """Base class of hooks for a module that needs more than this rank's shard of the activations."""

    _random: LocalRandomState

    def reset_after_error(self) -> None:
        """Restore the random state from before the module, for example after an exception in the forward pass."""
        self._random.leave_local_state()


class GatherSequenceHook(GatherHook):
    """Hooks that gather the full sequence before a module, and shard its output again."""

    def __init__(self, stream: ActivationSharding, module: nn.Module, random: bool) -> None:
        self._stream = stream
        self._random = LocalRandomState(stream.axis.rank, partial(broadcast, axis=stream.axis), enabled=random)
        register_forward_hooks(
            module, HookOrder.FULL_LENGTH, self._before_forward, self._after_forward, with_kwargs=True
        )

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stream, x = self._stream, get_first_tensor(args, kwargs)
        stream.restore_input_size_in_recompute(x)
        if not stream.is_sharded:
            return None
        stream.check_local_sequence_length(x)
        self._random.enter_local_state(x, module.training)
        full = gather_from_region(x, stream.axis, SEQUENCE, stream._make_sequence_split())
        # the same tensor may be passed as queries, keys and values
        return tuple(full if a is x else a for a in args), {n: full if a is x else a for n, a in kwargs.items()}

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._stream.is_sharded:
            return output
        self.reset_after_error()
        return map_first_output(output, self._select_local_positions)

    def _select_local_positions(self, x: Tensor) -> Tensor:
        """Return this rank's token positions of a tensor (B, S, ...) or of flattened tokens (B*S, H)."""
        stream = self._stream
        if x.dim() == 2 and x.shape[0] == stream.samples * stream.full:
            return self._select_local_positions(x.unflatten(0, (stream.samples, stream.full))).flatten(0, 1)
        return scatter_to_region(x, stream.axis, SEQUENCE, stream._make_sequence_split())


class TokenFreeModuleHook(GatherSequenceHook):
    """Hooks for a module whose inputs have no token dimension. They sum its output gradient over the ranks."""

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._stream.is_sharded and self._random.is_enabled and module.training:
            self._random.enter_local_state(get_first_tensor(args, kwargs))

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        def enter(x: Any) -> Any:
            return prepare_extra_block_input(x, self._stream.axis) if isinstance(x, Tensor) and x.requires_grad else x

        if not self._stream.is_sharded:
            return output
        self.reset_after_error()
        return tree_map(enter, output)


def map_first_tensor(
    args: tuple[Any, ...], kwargs: dict[str, Any], fn: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply ``fn`` to the first tensor argument of a module, the hidden states."""
    if args and isinstance(args[0], Tensor):
        return (fn(args[0]), *args[1:]), kwargs
    name = _get_first_tensor_name(kwargs)
    return args, {**kwargs, name: fn(kwargs[name])}


def get_first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the first tensor argument of a module, the hidden states."""
    first: Tensor = args[0] if args and isinstance(args[0], Tensor) else kwargs[_get_first_tensor_name(kwargs)]
    return first


def _get_first_tensor_name(kwargs: Mapping[str, Any]) -> str:
    tensors = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
    if not tensors:
        raise InputError("A layer was called without a tensor.", remedy="Pass the hidden states to the layer.")
    return "hidden_states" if "hidden_states" in tensors else tensors[0]


def map_first_output(output: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``fn`` to the hidden states that a module returns, alone or as the first element of its output."""
    if isinstance(output, list):
        return [fn(output[0]), *output[1:]]
    return (fn(output[0]), *output[1:]) if isinstance(output, tuple) else fn(output)
