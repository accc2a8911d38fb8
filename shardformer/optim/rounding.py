"""Parameters in bf16 without masters: in a step each shard is widened, updated in fp32, and rounded again.

"kahan"       what rounding took away is kept, in 16 bits, and added before the next update: 16 of a master's 24 bits of
              precision, in half of its memory.
"stochastic"  up or down by chance, so that updates that are smaller than the last bit count on average.

Zamirai et al., "Revisiting BFloat16 Training" (2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

KAHAN, STOCHASTIC = "kahan", "stochastic"
_MIX = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""Of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014)."""


@dataclass(frozen=True, eq=False)
class Held:
    """An optimizer's parameter, where its numbers lie in the shard, and which ones of which parameter they are."""

    value: nn.Parameter
    at: slice
    first: int
    key: int


class Rounded:
    """The masters of one shard, which are there in a step alone.

    Args:
        own: this rank's part in 16 bits.
        rests: whether what rounding takes away is kept.
    """

    def __init__(self, own: Tensor, *, rests: bool) -> None:
        self._own, self._pieces = own, list[Held]()
        self.rest = torch.zeros_like(own) if rests else None
        self._values: Tensor | None = None
        self.step = 0  # rounds by chance that were made

    def hold(self, pieces: Sequence[Held]) -> None:
        """Their values are wide; from now on they are rounded."""
        self._pieces = list(pieces)
        self._values = torch.zeros_like(self._own, dtype=torch.float32)
        for piece in pieces:
            self._values[piece.at] = piece.value.detach().reshape(-1)
        self._own.copy_(self._values)
        self._keep_rest()
        self.put_away()

    def fetch(self) -> None:
        """There is nothing to wait for."""

    def settle(self) -> None:
        """There is nothing under way."""

    def take(self) -> bool:
        """Widens."""
        if self._values is None:
            self._values = self._own.float()
            if self.rest is not None:
                self._values += self.rest
            for piece in self._pieces:
                piece.value.data = self._values[piece.at].view(piece.value.shape)
        return True

    def store(self) -> None:
        """Rounds what is here."""
        assert self._values is not None
        if self.rest is not None:
            new = self._values.to(self._own.dtype)
            stays = (self._values - self._own).abs() <= (self._values - new).abs()  # halfway between two: as it was
            self._own.copy_(torch.where(stays, self._own, new))
            self._keep_rest()
            return
        self.step += 1
        for piece in self._pieces:
            wide = self._values[piece.at]
            self._own[piece.at] = round_by_chance(wide, noise(wide, piece.first, piece.key, self.step))

    def _keep_rest(self) -> None:
        if self.rest is not None and self._values is not None:
            self.rest.copy_(self._values - self._own)

    def put_away(self) -> None:
        """Drops what is wide."""
        self._values = None
        for piece in self._pieces:
            value = torch.full((), torch.nan, dtype=torch.float32, device=self._own.device)
            piece.value.data = value.expand(piece.value.shape)

    def drop(self, *, keeps_memory: bool = False) -> None:
        self.put_away()

    def save(self) -> None:
        self.store()
        self.put_away()


def noise(like: Tensor, first: int, key: int, step: int) -> Tensor:
    """16 random bits for each number, which are the same wherever this number of this parameter is kept.

    Args:
        first: which number of the parameter the first one is.
        key: of the parameter.
    """
    seed = _mixed(torch.tensor((key << 32) + step) * _MIX[0])
    x = torch.arange(first, first + like.numel(), dtype=torch.int64, device=like.device) * _MIX[0]
    return ((_mixed(x + int(seed)) >> 40) & 0xFFFF).to(torch.int32)


def _mixed(x: Tensor) -> Tensor:
    for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x


def round_by_chance(wide: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bf16: up as often as the rest that is left out is large. What is not finite stays as it is."""
    rounded = ((wide.view(torch.int32) + bits) & -0x10000).view(torch.float32)
    return torch.where(torch.isfinite(wide), rounded, wide).to(torch.bfloat16)
