"""Training steps of one rank on the fake accelerator. Run them only in a worker process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import shardformer
from shardformer.local_ranks.fake_rank import make_fake_context
from shardformer.pipeline.pipeline import Pipeline
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory
from shardformer.zero.zero_optimizer import ZeroOptimizer
from tests.gpu.fake_device import fake_device, misplaced, on_fake_device


@dataclass(frozen=True)
class Layout:
    """How one rank of a grid trains.

    Args:
        sizes: of the axes.
        options: of ``shard_model``.
        zero: of ``zero``; None: without.
        adam: of ``torch.optim.AdamW``.
        activations: where they are kept.
    """

    sizes: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] | None = None
    adam: dict[str, Any] = field(default_factory=dict)
    activations: str = "device"


def misplaced_in_training(family: str, layout: Layout) -> list[str]:
    """Trains for two steps on the fake device, where operators on tensors of several devices raise.

    Returns the names of tensors that ended up elsewhere: the parameters, buffers and gradients, the loss, and the
    optimizer's parameters and state, which are on the host under offload.
    """
    device = fake_device()
    sample = SmallModelFactory(family)
    real = sample()  # some families read values during construction
    batch = RandomBatchFactory(sample.head_class)(0)
    with on_fake_device(device) as to_device:
        context = make_fake_context(device=device, backend="nccl", **layout.sizes)
        model = shard_model(to_device(real).train(), context=context, **layout.options)
        if layout.activations != "device":
            shardformer.offload.activations.offload_activations(model, layout.activations, min_bytes=0)
        optimizer: Any = torch.optim.AdamW(model.parameters(), **layout.adam)
        if layout.zero is not None:
            optimizer = shardformer.shard_optimizer(model, optimizer, max_grad_norm=1.0, **layout.zero)
        pipeline = Pipeline(model, micro_batches=2) if layout.sizes.get("pipe", 1) > 1 else None
        for _ in range(2):
            loss = _backward(model, to_device(batch), optimizer, pipeline)
            found = misplaced(model, device, extra={"loss": loss})
            if layout.zero is None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            on_host = layout.zero is not None and layout.zero.get("offload") is not None
            place = torch.device("cpu") if on_host else device
            inner = optimizer.inner if isinstance(optimizer, ZeroOptimizer) else [optimizer]
            found += misplaced(nn.Module(), place, optimizers={f"{type(o).__name__}": o for o in inner})
            optimizer.zero_grad()
        return found + misplaced(model, device)


def _backward(model: nn.Module, batch: dict[str, Tensor], optimizer: Any, pipeline: Pipeline | None) -> Tensor:
    if pipeline is not None:
        return pipeline.step(batch)
    loss: Tensor = model(**batch).loss
    if isinstance(optimizer, ZeroOptimizer):
        optimizer.backward(loss)
    else:
        loss.backward()
    return loss


class Forgetful(nn.Module):
    """Module that adds a tensor on the CPU to its input, a device placement error."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + torch.ones(4)
        return out


def run_forgetful() -> str:
    """Return the error that the fake device raises for it."""
    device = fake_device()
    with on_fake_device(device) as to_device:
        model = to_device(Forgetful())
        try:
            model(torch.zeros(2, 4, device=device))
        except RuntimeError as error:
            return str(error)
    return ""


def misplaced_by_hand() -> list[str]:
    """Return the names of misplaced tensors of a model with a buffer and optimizer state on the CPU."""
    device = fake_device()
    with on_fake_device(device) as to_device:
        model = to_device(nn.Linear(4, 4))
        model.register_buffer("mask", torch.ones(4))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.zeros(2, 4, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.state[model.weight]["exp_avg"] = torch.zeros(4, 4)
        return misplaced(model, device, optimizers={"AdamW": optimizer})
