"""The random numbers of a tensor rank: its own inside of a block, the same as all ranks' outside."""

from __future__ import annotations

import torch
from torch import Tensor

from shardformer.comm.collectives import broadcast_object
from shardformer.context import Axis


class RandomStream:
    """Random numbers that differ by tensor rank from ``enter`` to ``leave``, and are the same on all ranks outside.

    The stream inside starts from a number drawn from the stream outside, so whoever restores the outer state, such as
    activation checkpointing, gets the same numbers inside again.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._outer: list[tuple[torch.Generator, Tensor]] = []

    def enter(self, x: Tensor) -> None:
        seed = int(torch.randint(2**62, (), device="cpu"))
        self._outer = [(g, g.get_state()) for g in _generators(x.device)]
        for g, _ in self._outer:
            g.manual_seed((seed + 0x9E3779B97F4A7C15 * (self._axis.rank + 1)) % 2**63)

    def leave(self) -> None:
        for generator, state in self._outer:
            generator.set_state(state)
        self._outer = []


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
