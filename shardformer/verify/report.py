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
    """What ``verify`` found. ``print`` it, or read ``passed`` and the worst differences."""

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

    def to_json(self) -> str:
        return json.dumps({"passed": self.passed, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        rows = [("", "worst difference", "bound", "used", "where")]
        kinds = (
            ("loss", self.loss),
            ("gradients", self.gradient),
            ("gradient norm", self.norm),
            ("weights", self.weight),
        )
        for name, d in kinds:
            bound = self.bounds.loss if name == "loss" else self.bounds.gradient
            rows.append((name, f"{d.relative:.1e}", f"{bound:.0e}", f"{d.used:.0%}", d.where))
        widths = [max(len(r[i]) for r in rows) for i in range(5)]
        table = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
        calls = [
            f"  {name}: {count}, {sent / 1e6:.3f} MB on the wire" for name, (count, sent) in self.collectives.items()
        ]
        verdict = "Nobody can tell." if self.passed else "SOMEBODY CAN TELL."
        gone = [f"Only one of the two has: {', '.join(self.missing)}"] if self.missing else []
        return "\n".join(
            [
                f"{self.model} over {self.layout}, {self.steps} steps in {self.dtype}, {self.seconds:.1f} s",
                f"Bounds: {self.bounds.why}. Dropout is off in both.",
                *table,
                *gone,
                "Collectives of one step on rank 0:",
                *(calls or ["  none"]),
                verdict,
            ]
        )


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
