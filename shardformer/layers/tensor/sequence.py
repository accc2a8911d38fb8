"""Sequence parallelism: a stack of layers between whose blocks each tensor rank holds a stretch of the sequence."""

# B batch, S sequence, H hidden; s: this rank's stretch (S / tensor)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collectives import start_all_reduce
from shardformer.comm.conjugates import join_sequence, split_sequence
from shardformer.errors import ConfigError, InputError
from shardformer.layers.random_stream import RandomStream
from shardformer.layout.spec import even_bounds
from shardformer.mesh.axis import Axis

SEQUENCE_DIM = 1
"""Every family of transformers has (batch, sequence, hidden)."""


class SequenceRegion:
    """A stack of layers between whose blocks each tensor rank holds a stretch of the sequence.

    ``full`` is the length of the sequence that went in last; stretches are as even as can be.
    """

    def __init__(self, axis: Axis, *, overlap: bool = False, random: bool = False) -> None:
        self.axis, self.overlap = axis, overlap
        self.samples, self.full = 0, 0
        self.active = False
        self._lengths: set[int] = set()
        self._are_alike = False
        self._stream = RandomStream(axis) if random else None
        self._is_random = False

    def split(self, x_BSH: Tensor, training: bool) -> Tensor:
        """The stack's input (B, S, H) becomes this rank's stretch (B, s, H). Backward: one all-gather of B*S*H."""
        self.samples, self.full = x_BSH.shape[0], x_BSH.shape[SEQUENCE_DIM]
        # A decoding step is shorter than the axis and has no gradient: there is nothing to split. A checkpoint that
        # will be recomputed has none either, but is in training.
        self.active = training or torch.is_grad_enabled() or self.full >= self.axis.size
        if not self.active:
            return x_BSH
        if self.full not in self._lengths:
            near = [n for n in self._lengths if abs(n - self.full) < self.axis.size]
            self._lengths.add(self.full)
            self._are_alike = self._are_alike or bool(near)  # of two that near, some rank holds equal stretches
        self._is_random = training
        if self._stream is not None and training:
            self._stream.enter(x_BSH)
        return split_sequence(x_BSH, self.axis, SEQUENCE_DIM)

    def enter_module(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before the first layer's forward: its first tensor argument is split."""
        return with_first_tensor(args, kwargs, lambda x: self.split(x, module.training))

    def leave_module(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """After the forward of the last layer, or of the norm behind it: its (first) output is joined."""
        if isinstance(output, tuple):
            return (self.join(output[0]), *output[1:])
        return self.join(output)

    def abandon(self) -> None:
        """After a forward that an error broke off: back to the random numbers outside."""
        if self._stream is not None:
            self._stream.leave()

    def recall(self, x_BsH: Tensor) -> None:
        """In a recomputation under checkpointing: ``full`` becomes the length in the forward that is repeated.

        Communicates one number, where that forward cannot be told by this rank's stretch alone.
        """
        if torch._C._current_graph_task_id() < 0:
            return
        self.active = True
        if self._are_alike:
            length = torch.tensor(x_BsH.shape[SEQUENCE_DIM], device=x_BsH.device)
            self.full = int(start_all_reduce(length, self.axis, purpose="check").wait())
            return
        self.full = next((n for n in self._lengths if self._stretch(n) == x_BsH.shape[SEQUENCE_DIM]), self.full)

    def _stretch(self, full: int) -> int:
        bounds = even_bounds(full, self.axis.size)
        return bounds[self.axis.rank + 1] - bounds[self.axis.rank]

    def check(self, x_BsH: Tensor) -> None:
        """Raises ConfigError when x is not this rank's stretch: gathering it would wait for bytes that never come."""
        length = self._stretch(self.full)
        if x_BsH.dim() != 3 or x_BsH.shape[SEQUENCE_DIM] != length:
            raise ConfigError(
                f"A block with sequence parallelism was given a tensor of shape {tuple(x_BsH.shape)}",
                rule=f"Its input is (batch, {length}, hidden): this rank's stretch of {self.full} positions",
                remedy="Switch off what cuts the sequence itself (chunk_size_feed_forward), or sequence parallelism",
            )

    def stretch_of(self, x: Tensor) -> tuple[int, ...]:
        """The leading dims of this rank's stretch of x (B, S, h)."""
        return (x.shape[0], self._stretch(self.full))

    def unflatten(self, x: Tensor) -> Tensor:
        """(B*s, H), as some layers hand it to their MLP, as (B, s, H)."""
        length = self._stretch(self.full)
        samples = x.shape[0] // length if length else self.samples
        return x.view(samples, length, x.shape[-1]) if x.dim() == 2 and x.shape[0] == samples * length else x

    def join(self, x_BsH: Tensor) -> Tensor:
        """The stack's output becomes whole again. Forward: one all-gather of B*S*H."""
        if not self.active:
            return x_BsH
        if self._stream is not None and self._is_random:
            self._stream.leave()
        return join_sequence(x_BsH, self.axis, SEQUENCE_DIM, self.full)


class WholeSequence:
    """Around a module of a region whose forward needs the whole sequence, since it adds its residual itself.

    Forward: one all-gather of B*S*H; backward the same. What is inside of the module and outside of a block is computed
    by every rank.
    """

    def __init__(self, region: SequenceRegion, *, random: bool) -> None:
        self._region = region
        self._stream = RandomStream(region.axis, aligned=True) if random else None

    def register(self, module: nn.Module) -> None:
        """Gathers before the module's forward, and cuts behind it."""
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave)

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def join(x: Tensor) -> Tensor:
            region = self._region
            region.recall(x)
            if not region.active:
                return x
            region.check(x)
            if self._stream is not None and module.training:
                self._stream.enter(x)
            return join_sequence(x, region.axis, SEQUENCE_DIM, region.full)

        return with_first_tensor(args, kwargs, join)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._region.active:
            return output
        if self._stream is not None:
            self._stream.leave()
        first = output[0] if isinstance(output, tuple) else output
        cut = split_sequence(first, self._region.axis, SEQUENCE_DIM)
        return (cut, *output[1:]) if isinstance(output, tuple) else cut

    def abandon(self) -> None:
        """After a forward that an error broke off: back to the random numbers outside."""
        if self._stream is not None:
            self._stream.leave()


def with_first_tensor(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args and isinstance(args[0], Tensor):
        return (change(args[0]), *args[1:]), kwargs
    tensors = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
    if not tensors:
        raise InputError(
            "A layer was called without a tensor",
            rule="The first tensor that a layer of a sharded model is given are its hidden states",
            remedy="Call it with them, as the model itself does",
        )
    name = "hidden_states" if "hidden_states" in tensors else tensors[0]
    return args, {**kwargs, name: change(kwargs[name])}
