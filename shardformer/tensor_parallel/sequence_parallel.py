"""The stream of one stack of layers at run time: what its first layer is given, what its blocks ask, what leaves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardformer.comm.autograd_collectives import (
    gather_from_region,
    gather_from_sp_region,
    local_slices,
    reduce_scatter_to_sp_region,
    scatter_to_region,
)
from shardformer.comm.collectives import all_gather, start_all_reduce
from shardformer.comm.deferred_tensor import DeferredTensor
from shardformer.errors import ConfigError, InputError
from shardformer.layout.activation_layout import ActivationLayout, ActivationShard, Dim, IndexOrder
from shardformer.mesh.parallel_context import Axis
from shardformer.tensor_parallel.region import (
    REGIONS_BY_DIM,
    SEQUENCE,
    LocalRandomState,
    ReplicatedRegion,
    SequenceShardedRegion,
    TpRegion,
    enter_region,
    local_length,
)
from shardformer.torch_compat import current_graph_task_id, tree_map

# B batch, S sequence, H hidden; s: this rank's slice of the sequence (S / tensor)


class StackActivations:
    """The activations between the blocks of one stack.

    Args:
        layout: how they lie.
        axis: the axis over which the blocks are cut.
        overlap: whether the communication at the edges runs in steps under the matmuls beside it.
        random: whether the model draws random numbers when it trains.

    Where the stack cuts the sequence, it cuts it before the first layer and joins it behind the last; ``full`` is the
    length of the sequence that went in last, and each rank holds consecutive positions, as many as others or one more.
    """

    def __init__(self, layout: ActivationLayout, axis: Axis, *, overlap: bool = False, random: bool = False) -> None:
        self.layout, self.axis, self.overlap = layout, axis, overlap
        cut = layout.shard_at_stack(axis.name) if axis.size > 1 else None
        if cut is not None and (cut.dim not in REGIONS_BY_DIM or cut.order is not IndexOrder.CONTIGUOUS):
            raise ConfigError(
                f"A stack that cuts {cut}",
                rule=f"Only {', '.join(d for d in REGIONS_BY_DIM if d)} can be cut at a stack, and in order",
                remedy="Let the cut begin at the model's inputs, or write its edges (tensor_parallel/region.py)",
            )
        self._dim: Dim | None = None if cut is None else cut.dim
        self.samples, self.full = 0, 0
        self._is_open = False
        self._lengths: set[int] = set()
        self._are_alike = False
        self._random = LocalRandomState(axis) if random and self._dim is not None else None
        self._is_random = False

    @property
    def is_cut(self) -> bool:
        """Whether each rank holds a part of the stream just now."""
        return self._dim is not None and self._is_open

    @property
    def shares_samples(self) -> Axis | None:
        """The ranks that have parts of the same samples; None where nothing is cut."""
        return self.axis if self._dim is not None else None

    def edges(self, x: Tensor) -> TpRegion:
        """The edges of a block that is given x."""
        if self._dim is None:
            return ReplicatedRegion(self.axis)
        if x.dim() != 2:  # a layer's MLP that is given (B*s, H) follows its attention
            self.restore_length(x)
        return (
            SequenceShardedRegion(self.axis, self.full, self.overlap) if self._is_open else ReplicatedRegion(self.axis)
        )

    # --- where the stack begins and ends

    def enter_stack(self, x_BSH: Tensor, training: bool) -> Tensor:
        """The stack's input (B, S, H) becomes this rank's (B, s, H). Backward: one all-gather of B*S*H.

        Where x is the embedding's sum, that is not made: forward one reduce-scatter of B*S*H.
        """
        self.samples, self.full = x_BSH.shape[0], x_BSH.shape[SEQUENCE]
        # A decoding step is shorter than the axis and has no gradient: there is nothing to split. A checkpoint that
        # will be recomputed has none either, but is in training.
        self._is_open = training or torch.is_grad_enabled() or self.full >= self.axis.size
        if not self._is_open:
            return x_BSH
        if self.full not in self._lengths:
            near = [n for n in self._lengths if abs(n - self.full) < self.axis.size]
            self._lengths.add(self.full)
            self._are_alike = self._are_alike or bool(near)  # of two that near, some rank holds as many of both
        self._is_random = training
        if self._random is not None and training:
            self._random.enter(x_BSH)
        if (
            isinstance(x_BSH, DeferredTensor)
            and x_BSH.is_pending
            and x_BSH.computed_value is None
            and x_BSH.region is None
        ):
            return reduce_scatter_to_sp_region(x_BSH.local, self.axis, SEQUENCE)
        if isinstance(x_BSH, DeferredTensor) and x_BSH.is_pending and self._is_own(x_BSH.region):
            return x_BSH.local  # as the layer before left it
        return scatter_to_region(x_BSH, self.axis, SEQUENCE, self._split())

    def _is_own(self, edges: Any) -> bool:
        return isinstance(edges, SequenceShardedRegion) and edges.axis is self.axis and edges.full == self.full

    def leave_stack(self, x_BsH: Tensor) -> Tensor:
        """The stack's output is whole again, for whoever reads it.

        Forward one all-gather of B*S*H, when it is read; backward nothing, or one reduce-scatter of B*S*H where a
        column-parallel head reads it.
        """
        if not self.is_cut:
            return x_BsH
        if self._random is not None and self._is_random:
            self._random.leave()
        axis, full, split = self.axis, self.full, self._split()
        shape = (*x_BsH.shape[:SEQUENCE], full, *x_BsH.shape[SEQUENCE + 1 :])
        return DeferredTensor.make(
            x_BsH,
            shape,
            axis,
            SequenceShardedRegion(axis, full, self.overlap),
            lambda x: all_gather(x, axis, SEQUENCE, full),
            lambda grad: local_slices(grad, axis, SEQUENCE, split),
        )

    def _split(self) -> Any:
        return ActivationShard(Dim.SEQUENCE, self.axis.name).split(self.full, self.axis.size)

    def register(self, first: nn.Module, last: nn.Module) -> None:
        """Cuts before the forward of the stack's first module, and joins behind that of the last."""
        if self._dim is not None:
            first.register_forward_pre_hook(self._enter_module, with_kwargs=True)
            last.register_forward_hook(self._leave_module)

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_first_tensor(args, kwargs, lambda x: self.enter_stack(x, module.training))

    def _leave_module(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return with_first_output(output, self.leave_stack)

    def recall_before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a module whose other arguments are cut or joined: see ``recall``."""
        self.restore_length(first_tensor(args, kwargs))

    def shard_argument(self, x_BS: Tensor) -> Tensor:
        """This rank's positions of what a layer is given for each token, (B, S, ...). Backward: one all-gather of it.

        What an earlier layer made of its own positions is left as it is.
        """
        whole = self.is_cut and x_BS.dim() > 1 and x_BS.shape[SEQUENCE] == self.full
        return scatter_to_region(x_BS, self.axis, SEQUENCE, self._split()) if whole else x_BS

    def gather_argument(self, x_Bs: Tensor) -> Tensor:
        """All positions of what a module that is given them all takes for each token. Backward: this rank's slices."""
        own = self.is_cut and x_Bs.dim() > 1 and x_Bs.shape[SEQUENCE] == local_length(self.full, self.axis)
        return gather_from_region(x_Bs, self.axis, SEQUENCE, self._split()) if own else x_Bs

    def register_token_free(self, module: nn.Module, random: bool) -> GatherHook | None:
        """Lets a module that is given no tokens be the same on all ranks. Backward: one all-reduce of what it gives."""
        return None if self._dim is None else TokenFreeModule(self, module, random)

    def register_full_sequence(self, module: nn.Module, random: bool) -> GatherHook | None:
        """Gives ``module`` the whole sequence, which its forward needs outside of its block too: it adds its residual.

        Forward: one all-gather of B*S*H; backward the same. What is inside of the module and outside of a block is
        computed by every rank.
        """
        return None if self._dim is None else FullSequenceModule(self, module, random)

    def reset_after_error(self) -> None:
        """After a forward that an error broke off: back to the random numbers outside."""
        if self._random is not None:
            self._random.leave()

    # --- lengths

    def restore_length(self, x_BsH: Tensor) -> None:
        """In a recomputation under checkpointing: ``full`` becomes the length in the forward that is repeated.

        Communicates one number, where that forward cannot be told by this rank's length alone.
        """
        if current_graph_task_id() < 0 or self._dim is None:
            return
        self._is_open = True
        if self._are_alike:
            length = torch.tensor(x_BsH.shape[SEQUENCE], device=x_BsH.device)
            self.full = int(start_all_reduce(length, self.axis, purpose="check").wait())
            return
        own = x_BsH.shape[SEQUENCE]
        self.full = next((n for n in self._lengths if local_length(n, self.axis) == own), self.full)

    def check(self, x_BsH: Tensor) -> None:
        """Raises ConfigError when x is not this rank's part: gathering it would wait for bytes that never come."""
        length = local_length(self.full, self.axis)
        if x_BsH.dim() < 3 or x_BsH.shape[SEQUENCE] != length:
            raise ConfigError(
                f"A block with sequence parallelism was given a tensor of shape {tuple(x_BsH.shape)}",
                rule=f"Its input is (batch, {length}, hidden): this rank's part of {self.full} positions",
                remedy="Switch off what cuts the sequence itself (chunk_size_feed_forward), or sequence parallelism",
            )

    def per_token(self, x: Tensor) -> Tensor | None:
        """What is given for each token of this rank's part as (B, s, ...); None for anything else.

        Tokens may be flattened, (B*s, ...).
        """
        if not self.is_cut:
            return None
        length = local_length(self.full, self.axis)
        if x.dim() > 1 and tuple(x.shape[:2]) == (self.samples, length):
            return x
        rows = self.samples * length
        return x.view(self.samples, length, *x.shape[1:]) if x.dim() and x.shape[0] == rows else None

    def gathered(self, x_Bs: Tensor) -> Tensor:
        """(B, s, ...) of all ranks as (B, S, ...). One all-gather, and in the backward one reduce-scatter."""
        if x_Bs.is_floating_point():
            return gather_from_sp_region(x_Bs, self.axis, SEQUENCE, self.full)
        return all_gather(x_Bs, self.axis, SEQUENCE, self.full)

    def unflatten(self, x: Tensor) -> Tensor:
        """(B*s, H), as some layers hand it to their MLP, as (B, s, H)."""
        length = local_length(self.full, self.axis)
        samples = x.shape[0] // length if length else self.samples
        return x.view(samples, length, x.shape[-1]) if x.dim() == 2 and x.shape[0] == samples * length else x


class GatherHook(Protocol):
    """What stands around a module that is given more than this rank's part of the stream."""

    def reset_after_error(self) -> None: ...


class FullSequenceModule:
    """Around a module that needs the whole sequence: see ``StackActivations.register_full_sequence``."""

    def __init__(self, stream: StackActivations, module: nn.Module, random: bool) -> None:
        self._stream = stream
        self._random = LocalRandomState(stream.axis, aligned=True) if random else None
        # before what gathers over other axes, which leaves first
        module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        module.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stream, x = self._stream, first_tensor(args, kwargs)
        stream.restore_length(x)
        if not stream.is_cut:
            return None
        stream.check(x)
        if self._random is not None and module.training:
            self._random.enter(x)
        whole = gather_from_region(x, stream.axis, SEQUENCE, stream._split())
        # some give their states as queries, keys and values
        own, named = [whole if a is x else a for a in args], {n: whole if a is x else a for n, a in kwargs.items()}
        return tuple(own), named

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._stream.is_cut:
            return output
        self.reset_after_error()
        return with_first_output(output, self._own_positions)

    def _own_positions(self, x: Tensor) -> Tensor:
        """Of (B, S, ...), or of tokens that the module has flattened, (B*S, H)."""
        stream = self._stream
        if x.dim() == 2 and x.shape[0] == stream.samples * stream.full:
            return self._own_positions(x.unflatten(0, (stream.samples, stream.full))).flatten(0, 1)
        return scatter_to_region(x, stream.axis, SEQUENCE, stream._split())

    def reset_after_error(self) -> None:
        """Behind the module, or after a forward that an error broke off: back to the random numbers outside."""
        if self._random is not None:
            self._random.leave()


class TokenFreeModule(FullSequenceModule):
    """Around a module that is given no tokens: see ``StackActivations.register_token_free``."""

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._stream.is_cut and self._random is not None and module.training:
            self._random.enter(first_tensor(args, kwargs))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        def left(x: Any) -> Any:
            return enter_region(x, self._stream.axis) if isinstance(x, Tensor) and x.requires_grad else x

        if not self._stream.is_cut:
            return output
        self.reset_after_error()
        return tree_map(left, output)


def with_first_tensor(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a module with its hidden states changed: the first tensor that it is given."""
    if args and isinstance(args[0], Tensor):
        return (change(args[0]), *args[1:]), kwargs
    name = _name_of_first_tensor(kwargs)
    return args, {**kwargs, name: change(kwargs[name])}


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden states among the arguments of a module."""
    first: Tensor = args[0] if args and isinstance(args[0], Tensor) else kwargs[_name_of_first_tensor(kwargs)]
    return first


def _name_of_first_tensor(kwargs: Mapping[str, Any]) -> str:
    tensors = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
    if not tensors:
        raise InputError("A layer was called without a tensor", remedy="Call it with them, as the model itself does")
    return "hidden_states" if "hidden_states" in tensors else tensors[0]


def with_first_output(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a module gave with its hidden states changed: all of it, or the first of several."""
    if isinstance(output, list):
        return [change(output[0]), *output[1:]]
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)
