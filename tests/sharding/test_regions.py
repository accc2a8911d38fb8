"""Where the stream cannot be cut from a stack's first layer to its last, sequence parallelism is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.mesh.context import ParallelContext
from shardformer.policies.policy import Policy
from shardformer.policies.role_policy import Experts, RolePolicy, Stack
from shardformer.sharder import shard_model
from shardformer.testing.threads import run_as_threads
from tests.optim.test_grad_norm import Bank
from tests.sharding.test_shared import AttentionsOnly, AttentionsOnlyPolicy


class ExpertsLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Bank()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.as_tensor(self.experts(x))


class OfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ExpertsLayer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ExpertsPolicy(RolePolicy):
    stack = Stack("layers", [Experts("experts", "up", "down")])


@pytest.mark.parametrize(
    ("model", "policy", "said"),
    [
        (OfExperts, ExpertsPolicy, r"around the stacked experts layers\.0\.experts"),
        (AttentionsOnly, AttentionsOnlyPolicy, "whose layers are blocks themselves"),
    ],
)
def test_a_layer_that_needs_more_than_its_part_is_refused(
    model: type[nn.Module], policy: type[Policy], said: str
) -> None:
    models = [model() for _ in range(2)]

    def shard(context: ParallelContext) -> None:
        shard_model(models[context.tensor.rank], policy(), context=context, enable_sequence_parallelism=True)

    with pytest.raises(ConfigError, match=f"Sequence parallelism.*{said}"):
        run_as_threads(shard, tensor=2)
