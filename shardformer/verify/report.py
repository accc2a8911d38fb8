"""What verify found, and the bounds it was held to."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

import torch

from shardformer.errors import ConfigError


@dataclass(frozen=True)
class Bounds:
    """The largest relative differences allowed, and why these."""

    loss: float
    gradient: float
    eps: float
    why: str


@dataclass(frozen=True)
class Difference:
    """The worst difference of one kind: relative, where it is, and by how much it uses up what is allowed.

    ``used`` is the difference over what is allowed (the bound, or the reference's own noise where that is wider);
    above 1, somebody could tell.
    """

    relative: float
    where: str
    used: float


@dataclass
class Report:
    """What ``verify`` found. ``print`` it, or read ``passed`` and the worst differences.

    ``collectives`` of one step: name -> (calls of rank 0, bytes that all members of its groups send together).
    """

    model: str
    layout: str
    steps: int
    dtype: str
    bounds: Bounds
    loss: Difference
    gradient: Difference
    weight: Difference
    norm: Difference
    collectives: dict[str, tuple[int, int]]
    losses: list[tuple[float, float]]
    seconds: float = 0.0
    missing: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.missing and all(d.used <= 1 for d in (self.loss, self.gradient, self.weight, self.norm))

    @property
    def kinds(self) -> list[tuple[str, Difference, float]]:
        """What is compared: its name, the worst difference and the bound."""
        return [
            ("losses", self.loss, self.bounds.loss),
            ("gradients", self.gradient, self.bounds.gradient),
            ("gradient norms", self.norm, self.bounds.gradient),
            ("weights", self.weight, self.bounds.gradient),
        ]

    def to_json(self) -> str:
        calls = {name: {"calls": n, "wire_bytes": sent} for name, (n, sent) in self.collectives.items()}
        return json.dumps({"passed": self.passed, **asdict(self), "collectives": calls}, indent=2)

    def __str__(self) -> str:
        from shardformer.verify.table import as_text

        return as_text(self)


def bounds_for(dtype: torch.dtype, casts: str = "") -> Bounds:
    """The bounds for a dtype; ``casts`` names the classes of modules in which an fp64 model computes in fp32."""
    if dtype == torch.float64 and not casts:
        return Bounds(1e-10, 1e-10, 2.2e-16, "fp64, in which the model stays")
    if dtype == torch.float64:
        return Bounds(1e-6, 1e-6, 1.2e-7, f"fp64, cast to fp32 by the model itself in {casts}")
    if dtype == torch.float32:
        return Bounds(1e-5, 1e-4, 1.2e-7, "fp32")
    raise ConfigError(
        f"dtype={dtype}",
        rule="verify compares in fp64 or fp32: in 16 bits the noise is as wide as most mistakes",
        remedy="Use dtype=torch.float64",
    )
