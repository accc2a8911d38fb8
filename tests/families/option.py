"""A family's small model with an option on, over two ranks as threads, against the plain model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import shardformer
from shardformer.comm.collectives import gather_full_tensor
from shardformer.layout.sharding_metadata import get_shard_specs
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.sharding.describe import ShardingDescription
from shardformer.verify.small_models import SMALL_CONFIGS, RandomBatchFactory, SmallModelFactory, compute_model_loss

FAMILIES = tuple(SMALL_CONFIGS)
# Tolerance for fp64. Modules that always compute in fp32 (softmax, RMS norms) add rounding noise.
EXACT, CASTS = 1e-10, 1e-5
SIZE = {"batch_size": 3, "sequence_length": 9}


@dataclass(frozen=True)
class Outcome:
    """Outputs of a model, and its description on the first rank."""

    loss: float
    gradients: dict[str, Tensor]
    said: ShardingDescription | None = None

    @property
    def notes(self) -> str:
        assert self.said is not None
        return "\n".join(self.said.notes)

    def replaced(self) -> dict[str, int]:
        """Return the replaced, unsharded modules with their counts."""
        assert self.said is not None
        counts: dict[str, int] = {}
        for *_, now, count in self.said.changes:
            counts[now] = counts.get(now, 0) + count
        return counts


def build(family: str, changes: Mapping[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return SmallModelFactory(family, changes=changes)().double().train()


def batch_of(family: str, **size: int) -> dict[str, Tensor]:
    batch = RandomBatchFactory(SmallModelFactory(family).head_class, **(size or SIZE))(0)
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


def plain(family: str, **changes: Any) -> Outcome:
    return _trained(build(family, changes), batch_of(family))


def sharded(family: str, option: str, ranks: int = 2, **changes: Any) -> Outcome:
    """Return loss and full gradients of a sharded model with ``option`` enabled."""
    models, batch = [build(family, changes) for _ in range(ranks)], batch_of(family)

    def train(context: ParallelContext) -> Outcome:
        options: dict[str, Any] = {option: True}
        model = shardformer.shard_model(models[context.tensor.rank], context=context, **options)
        outcome, specs = _trained(model, batch), get_shard_specs(model)
        full = {name: gather_full_tensor(g, specs[name], context.axis) for name, g in outcome.gradients.items()}
        return Outcome(outcome.loss, full, shardformer.describe_sharding(model))

    return run_as_threads(train, tensor=ranks)[0]


def _trained(model: nn.Module, batch: dict[str, Tensor]) -> Outcome:
    loss = compute_model_loss(model, batch)
    loss.backward()
    return Outcome(loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def assert_same(ours: Outcome, theirs: Outcome, bound: float) -> None:
    """Compare the loss and every gradient, relative to its largest element; for noise relative to all gradients."""
    assert abs(ours.loss - theirs.loss) <= bound * abs(theirs.loss), (ours.loss, theirs.loss)
    assert theirs.gradients and ours.gradients.keys() == theirs.gradients.keys()
    largest = max(float(g.abs().max()) for g in theirs.gradients.values())
    for name, gradient in theirs.gradients.items():
        difference = float((ours.gradients[name] - gradient).abs().max())
        assert difference <= bound * (float(gradient.abs().max()) + 1e-2 * largest), (name, difference)
