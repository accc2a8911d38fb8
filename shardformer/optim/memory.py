"""What one rank keeps in training, in bytes, by kind: counted from shapes, before anything is allocated.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 3.1 and
figure 1. The activations are not in it: they depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from torch import nn
from torch.optim import Optimizer

from shardformer.errors import expect
from shardformer.layout.state import ROOT, ShardedState, check_module
from shardformer.optim.checks import as_list
from shardformer.optim.probe import state_bytes
from shardformer.optim.settings import Layout, Offload, Precision, Rules, Sending, Settings
from shardformer.optim.stage3.units import group_params

GB = 1e9


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, by kind. Print it.

    Args:
        gathered: under stage 3, of the two units that are whole at a time, where they are largest.
        gradients: whole under stages 0 and 1, which keep those of all backwards of a step (``no_sync``); else the sum
            of this rank's part, in fp32 at the least.
        masters: of parameters in 16 bits.
        states: what the optimizer keeps.
        host: masters, states, gradients and buffers in the memory of the host; the parameters, if they rest there.
        disk: masters and states in files, twice.
    """

    parameters: float
    gathered: float
    gradients: float
    masters: float
    states: float
    host: float = 0
    disk: float = 0

    @property
    def total(self) -> float:
        """On the device."""
        return self.parameters + self.gathered + self.gradients + self.masters + self.states

    def __str__(self) -> str:
        rows = {**self.__dict__, "host": 0, "disk": 0, "total": self.total, "on the host": self.host}
        rows["in files"] = self.disk
        return "\n".join(f"{kind:12}{said_bytes(value):>12}" for kind, value in rows.items() if value)


def memory(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    stage: int = 0,
    precision: str | Precision = "fp32",
    offload: str | Offload | None = None,
    data: int | None = None,
) -> Memory:
    """What ``zero`` with the same arguments makes each rank keep. Allocates nothing.

    >>> model = nn.Linear(1000, 1000, bias=False, device="meta")
    >>> print(memory(model, torch.optim.AdamW(model.parameters()), stage=2, precision="bf16", data=4))
    parameters        2.0 MB
    gradients         1.0 MB
    masters           1.0 MB
    states            2.0 MB
    total             6.0 MB

    Args:
        model: sharded or plain; it may be on the meta device, or wait for its weights.
        data: data ranks; by default those of the grid of a sharded model, else one.

    Raises ConfigError for a stage that there is not. Communicates nothing.
    """
    asked = Settings(stage, Precision.of(precision), Rules(), Sending(), Layout(), Offload.of(offload))
    check_module(model)
    optimizers = as_list(optimizer)
    rule = "It is a number of data ranks, one or more"
    expect("data", data, data is None or (type(data) is int and data > 0), rule, "Write data=4, or leave it out")
    parts = _parts(model, data)
    narrow = asked.precision.dtype
    size = {id(p): (narrow or p.dtype).itemsize for p in model.parameters() if p.is_floating_point()}
    cut = {key: n if stage > 0 else 1 for key, n in parts.items()}
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = sum(p.numel() * size.get(id(p), p.element_size()) for p in model.parameters() if not p.requires_grad)
    wide = {id(p): max(size[id(p)], 4) for p in trained}

    def total(bytes_of: dict[int, int], over: dict[int, int] | None) -> float:
        return sum(p.numel() * bytes_of[id(p)] / (over[id(p)] if over else 1) for p in trained)

    units = [sum(p.numel() * size[id(p)] for p in ps if p.requires_grad) for _, ps in group_params(model)]
    found = Memory(
        total(size, cut if stage == 3 else None),
        max((a + b for a, b in pairwise([*units, 0])), default=0) if stage == 3 else 0,
        total(size, None) if stage < 2 else total(wide, cut),
        total(wide, cut) * _MASTERS[asked.precision.masters] if narrow is not None else 0,
        sum(
            state_bytes(each, group, p, wide[id(p)]) / cut[id(p)]
            for each in optimizers
            for group in each.param_groups
            for p in group["params"]
            if p.requires_grad
        ),
    )
    if asked.offload.to is not None:
        found = _elsewhere(found, asked, total(wide, cut), total(size, cut))
    return replace(found, parameters=found.parameters + frozen)


_MASTERS = {"fp32": 1.0, "kahan": 0.5, "stochastic": 0.0}
"""Of the memory of masters in fp32."""


def _elsewhere(here: Memory, asked: Settings, masters: float, gradients: float) -> Memory:
    """What goes to the host, or into files.

    Args:
        masters: bytes of all, which offload has in any precision; a sum of the gradients takes as much.
        gradients: bytes of this rank's part as it comes down.
    """
    share = asked.offload.on_device
    stays = share if isinstance(share, (int, float)) else 0.0
    rests = here.parameters if asked.offload.parameters else 0.0
    gone = masters + here.states
    return Memory(
        here.parameters - rests,
        here.gathered,
        here.gradients * stays if asked.stage >= 2 else here.gradients,
        here.masters * stays,
        here.states * stays,
        host=rests + (masters + gradients + (0 if asked.offload.folder else gone)) * (1 - stays),
        disk=2 * gone * (1 - stays) if asked.offload.folder else 0,
    )


def _parts(model: nn.Module, data: int | None) -> dict[int, int]:
    """By the identity of a parameter, over how many ranks ZeRO cuts it."""
    state = model.__dict__.get(ROOT)
    if not isinstance(state, ShardedState):
        return {id(p): data or 1 for p in model.parameters()}
    sizes = {**state.context.sizes, **({"data": data} if data else {})}
    return {
        id(e.param): prod(sizes[name] for name in {*e.reduction.sum_over, *(["data"] if data else [])})
        * max(len(e.reduction.stages), 1)
        for e in state.entries
    }


def said_bytes(value: float) -> str:
    for unit, scale in (("GB", GB), ("MB", 1e6), ("KB", 1e3)):
        if value >= scale:
            return f"{value / scale:,.1f} {unit}"
    return f"{value:,.0f} B"
