"""The random numbers of a tensor rank: its own inside of a block, the same as all ranks' outside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collectives import broadcast, broadcast_object
from shardformer.mesh.axis import Axis


class RandomStream:
    """Random numbers that differ by tensor rank from ``enter`` to ``leave``, and are the same on all ranks outside.

    With ``aligned`` the other way round: the same on all ranks between, where each has its own outside. Communicates
    one number then.

    The stream inside starts from a number drawn from the stream outside, so whoever restores the outer state, such as
    activation checkpointing, gets the same numbers inside again.
    """

    def __init__(self, axis: Axis, *, aligned: bool = False) -> None:
        self._axis, self._aligned = axis, aligned
        self._outer: list[tuple[torch.Generator, Tensor]] = []

    def enter(self, x: Tensor) -> None:
        seed = int(torch.randint(2**62, (), device="cpu"))
        own = 0 if self._aligned else 0x9E3779B97F4A7C15 * (self._axis.rank + 1)
        if self._aligned:
            seed = broadcast_object(seed, self._axis)
        self._outer = [(g, g.get_state()) for g in _generators(x.device)]
        for g, _ in self._outer:
            g.manual_seed((seed + own) % 2**63)

    def leave(self) -> None:
        for generator, state in self._outer:
            generator.set_state(state)
        self._outer = []


class AgreedDraw:
    """A module's draws are the same on all ranks, though the stream around it is each rank's own.

    Stochastic depth between blocks drops whole samples, of which with sequence parallelism each rank has a stretch.
    The first rank's next number seeds what the module draws, in a recomputation under checkpointing again.

    Communicates: in training one broadcast of one number a call.
    """

    def __init__(self, axis: Axis, module: nn.Module) -> None:
        self._axis = axis
        self._before: list[tuple[torch.Generator, Tensor]] = []
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not module.training:
            return
        seed = broadcast(torch.randint(2**62, (1,), device="cpu").to(args[0].device), self._axis)
        self._before = [(g, g.get_state()) for g in _generators(args[0].device)]
        for generator, _ in self._before:
            generator.manual_seed(int(seed))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for generator, state in self._before:
            generator.set_state(state)
        self._before = []


def align_random(axis: Axis, device: torch.device) -> None:
    """Gives all tensor ranks the random state of the first, which outside of blocks must be one."""
    if axis.size > 1:
        states = broadcast_object([generator.get_state() for generator in _generators(device)], axis)
        for generator, state in zip(_generators(device), states, strict=True):
            generator.set_state(state)


def _generators(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    return generators
