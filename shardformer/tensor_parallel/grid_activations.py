"""Shards activations over a tensor grid, and pads batches that do not divide evenly."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collectives import (
    all_gather,
    broadcast,
    gather_from_parallel_region,
    get_local_chunk,
    scatter_to_parallel_region,
)
from shardformer.comm.deferred_tensor import resolve_deferred_tensors
from shardformer.errors import InputError
from shardformer.forward_hooks import ForwardArgs, HookOrder, register_forward_hooks
from shardformer.layout.activation_layout import ActivationLayout
from shardformer.layout.shard_spec import Split
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.tensor_grid import TensorGrid
from shardformer.random_state import LocalRNGState
from shardformer.tensor_parallel.grid_layers import GridTensorParallelRegion
from shardformer.tensor_parallel.linear_communication import ReplicatedInputRegion, TpRegion, apply_with_custom_backward
from shardformer.tensor_parallel.sequence_parallel import (
    ActivationSharding,
    GatherActivationsHook,
    map_first_output,
    map_first_tensor_arg,
)
from shardformer.torch_compat import current_graph_task_id
from shardformer.transformers_compat import find_kv_caches, has_cached_tokens

# B batch, b local samples, S sequence, H hidden, h local hidden features


class GridActivationSharding(ActivationSharding):
    """Shards the activations between blocks over a 2D, 2.5D or 3D grid of ranks, by samples and hidden features.

    A batch that does not divide evenly is padded with copies of its last sample, whose outputs are dropped. Outside
    training, a forward pass that reads or returns cached keys and values is replicated over the ranks.
    """

    length_name = "samples"

    def __init__(self, layout: ActivationLayout, grid: TensorGrid, *, has_random_ops: bool = False) -> None:
        super().__init__(ActivationLayout(), grid.column)
        self.layout, self.grid, self.width = layout, grid, 0
        self.batch_dim = 0
        self._batch_sizes: set[int] = set()
        self._random = LocalRNGState(grid.whole.rank, enabled=has_random_ops)

    @property
    def is_sharded(self) -> bool:
        return self._is_open

    @property
    def sequence_shard_axis(self) -> Axis | None:
        return self.grid.hidden

    def select_tp_region(self, hidden_states: Tensor) -> TpRegion | GridTensorParallelRegion:  # type: ignore[override]  # a block uses only common methods
        self.restore_input_size_in_recompute(hidden_states)
        return (
            GridTensorParallelRegion(self.grid, self.width, self.batch_dim)
            if self._is_open
            else ReplicatedInputRegion(self.axis)
        )

    def restore_input_size_in_recompute(self, hidden_states: Tensor) -> None:
        """Restore the batch size when activation checkpointing recomputes a forward pass."""
        if self.is_restored or current_graph_task_id() < 0:
            return
        self._is_open = True  # only forward passes in training are recomputed
        if hidden_states.dim() > 2:
            self.samples = self.find_full_batch_size(hidden_states.shape[self.batch_dim]) or self.samples

    def register_layer_stack_hooks(self, first_module: nn.Module, last_module: nn.Module) -> None:
        register_forward_hooks(first_module, HookOrder.STACK, self._shard_input_pre_hook, with_kwargs=True)
        register_forward_hooks(last_module, HookOrder.STACK, forward_hook=self._gather_output_hook)

    def _shard_input_pre_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_training = module.training or torch.is_grad_enabled()
        caches = find_kv_caches((*args, *kwargs.values()))
        self._is_open = is_training or not (caches or kwargs.get("use_cache"))
        if is_training and any(map(has_cached_tokens, caches)) and current_graph_task_id() < 0:
            raise InputError(
                "2D, 2.5D and 3D tensor parallelism do not support a KV cache in training.",
                remedy="Train without a KV cache. For prefix tuning, use tensor_parallel_mode='1d'.",
            )
        return map_first_tensor_arg(
            args, kwargs, lambda x: self.shard_stack_input(resolve_deferred_tensors(x), module.training)
        )

    def shard_stack_input(self, hidden_states: Tensor, training: bool) -> Tensor:
        """Shard the input of the first layer: (B, S, H) -> (b, S, h). Backward: one all-gather over all ranks."""
        if not self._is_open:
            return hidden_states
        self.samples, self.width = hidden_states.shape[self.batch_dim], hidden_states.shape[-1]
        self._batch_sizes.add(self.samples)
        self._is_random = training
        self._random.enter_local_rng_state(hidden_states, training)
        grid, dim, samples, width = self.grid, self.batch_dim, self.samples, self.width

        def pad_and_shard(tensor: Tensor) -> Tensor:
            return _shard_samples_and_features(
                pad_with_last_slice(tensor, -samples % grid.batch_size_divisor, dim), grid, dim
            )

        return apply_with_custom_backward(
            hidden_states, pad_and_shard, lambda grad: _gather_samples_and_features(grad, grid, dim, samples, width)
        )

    def gather_stack_output(self, local_hidden_states: Tensor) -> Tensor:
        """All-gather the full output of the last layer. Forward: one all-gather over all ranks; backward: nothing.

        A recomputation gathers too, because a checkpoint may contain a module after the stack (patch merging in Swin).
        """
        if not self._is_open:
            return local_hidden_states
        if self._is_random:
            self._random.exit_local_rng_state()
        samples = self.find_full_batch_size(local_hidden_states.shape[self.batch_dim])
        assert samples is not None  # the input of this forward pass was recorded
        grid, dim, width = self.grid, self.batch_dim, self.width

        def pad_and_shard(grad: Tensor) -> Tensor:
            if padding := -samples % grid.batch_size_divisor:
                shape = [padding if d == dim else n for d, n in enumerate(grad.shape)]
                grad = torch.cat((grad, grad.new_zeros(shape)), dim)
            return _shard_samples_and_features(grad, grid, dim)

        return apply_with_custom_backward(
            local_hidden_states, lambda x: _gather_samples_and_features(x, grid, dim, samples, width), pad_and_shard
        )

    def register_full_sequence_hooks(self, module: nn.Module, has_random_ops: bool) -> GatherHiddenFeaturesHook:
        """Register hooks that gather the full hidden dim for ``module``. Forward and backward: one all-gather each."""
        return GatherHiddenFeaturesHook(self, module, has_random_ops)

    def select_local_samples(self, tensor: Tensor, dim: int, num_local_samples: int) -> Tensor:
        """Select this rank's samples from a tensor that has one or more entries per sample along ``dim``."""
        batch = self.find_full_batch_size(num_local_samples)
        if batch is None or tensor.shape[dim] % batch:
            return tensor
        by_sample = tensor.unflatten(dim, (batch, -1))
        core = self.grid.core
        local: Tensor = pad_with_last_slice(by_sample, -batch % self.grid.batch_size_divisor, dim).chunk(
            core.size, dim
        )[core.rank]
        return local.flatten(dim, dim + 1)

    def find_full_batch_size(self, num_local_samples: int) -> int | None:
        """Find the full batch size of a forward pass from the number of samples on this rank."""
        if (
            self.is_restored
            or current_graph_task_id() < 0
            or self.get_num_local_samples(self.samples) == num_local_samples
        ):
            return self.samples
        return next((n for n in self._batch_sizes if self.get_num_local_samples(n) == num_local_samples), None)

    def get_num_local_samples(self, batch_size: int) -> int:
        """Compute how many samples of a batch each rank stores between blocks, including padding."""
        return -(-batch_size // self.grid.batch_size_divisor) * self.grid.batch_size_divisor // self.grid.batch.size

    def __deepcopy__(self, memo: dict[int, Any]) -> GridActivationSharding:
        memo[id(self)] = copy = GridActivationSharding(self.layout, self.grid, has_random_ops=self._random.is_enabled)
        copy.width, copy.samples, copy.batch_dim = self.width, self.samples, self.batch_dim
        return copy


class GatherHiddenFeaturesHook(GatherActivationsHook):
    """Hooks that gather all hidden features before a module, such as a router, and shard its output again."""

    def __init__(self, activation_sharding: GridActivationSharding, module: nn.Module, has_random_ops: bool) -> None:
        self._stream, self._axis = activation_sharding, activation_sharding.grid.hidden
        self._random = LocalRNGState(self._axis.rank, partial(broadcast, axis=self._axis), enabled=has_random_ops)
        register_forward_hooks(
            module, HookOrder.FULL_FEATURES, self._forward_pre_hook, self._forward_hook, with_kwargs=True
        )

    def _make_hidden_dim_split(self) -> Split:
        return Split.even(self._stream.width, self._axis.size)

    def _forward_pre_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardArgs | None:
        def gather_features(hidden_states: Tensor) -> Tensor:
            self._stream.select_tp_region(hidden_states)
            if not self._stream.is_sharded:
                return hidden_states
            self._random.enter_local_rng_state(hidden_states, module.training)
            return gather_from_parallel_region(hidden_states, self._axis, -1, self._make_hidden_dim_split())

        return map_first_tensor_arg(args, kwargs, gather_features)

    def _forward_hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._stream.is_sharded:
            return output
        self.reset_after_error()
        return map_first_output(
            output, lambda x: scatter_to_parallel_region(x, self._axis, -1, self._make_hidden_dim_split())
        )


def pad_with_last_slice(tensor: Tensor, num_copies: int, dim: int = 0) -> Tensor:
    """Pad ``tensor`` along ``dim`` with ``num_copies`` copies of its last slice."""
    if not num_copies:
        return tensor
    last = tensor.narrow(dim, tensor.shape[dim] - 1, 1)
    return torch.cat((tensor, last.expand([num_copies if d == dim else n for d, n in enumerate(tensor.shape)])), dim)


def _shard_samples_and_features(tensor: Tensor, grid: TensorGrid, batch_dim: int) -> Tensor:
    local = get_local_chunk(get_local_chunk(tensor, grid.batch, batch_dim), grid.hidden, tensor.dim() - 1)
    return local.clone(memory_format=torch.contiguous_format)  # a view would keep all of x alive


def _gather_samples_and_features(
    tensor: Tensor, grid: TensorGrid, batch_dim: int, num_samples: int, hidden_size: int
) -> Tensor:
    return all_gather(all_gather(tensor, grid.hidden, -1, hidden_size), grid.batch, batch_dim).narrow(
        batch_dim, 0, num_samples
    )
