"""Models with nested stacks of layers, whose head counts are read from the attention module."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.discovery.reduced_model import ReferenceGradients
from shardformer.discovery.validation import validate_policy
from shardformer.errors import ConfigError, PolicyError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.module_paths import match_paths
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, AttentionProjections, LayerStack
from shardformer.shard_model_api import shard_model
from shardformer.sharding.describe import describe_sharding


class Heads(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.attn, self.mlp = Heads(dim, num_heads), nn.Sequential(nn.Linear(dim, 9), nn.GELU(), nn.Linear(9, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        out: Tensor = x + self.mlp(x)
        return out


class Stage(nn.Module):
    def __init__(self, dim: int, num_heads: int, depth: int) -> None:
        super().__init__()
        self.merge = nn.Linear(dim // 2, dim)
        self.blocks = nn.ModuleList(Layer(dim, num_heads) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.merge(x)
        for block in self.blocks:
            x = block(x)
        return x


class Staged(nn.Module):
    """(B, S, 6) -> (B, S, 24): three heads of 4, then eight of 3."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Stage(12, 3, 1), Stage(24, 8, 2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class StagedPolicy(RolePolicy):
    stack = LayerStack(
        "layers.*.blocks",
        [
            Attention("attn", AttentionProjections(qkv="qkv", out="out"), local_attrs={"num_heads": "heads"}),
            MLP("mlp", up="0", down="2"),
        ],
    )
    keep_replicated = ("layers.*.merge",)
    no_sequence_parallel = "windows make other sequences of it"
    num_heads = ".num_heads"


class Misnamed(StagedPolicy):
    num_heads = ".num_head"


def reference() -> ReferenceGradients:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    return ReferenceGradients.from_model(Staged().double(), lambda model: model(x))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_stage_is_sharded_by_its_own_heads(ranks: int) -> None:
    assert validate_policy(reference(), StagedPolicy, ranks) is None


def test_stage_with_too_few_heads_keeps_attention_replicated() -> None:
    report = run_as_threads(
        lambda context: str(describe_sharding(shard_model(Staged(), StagedPolicy, context=context))), tensor=4
    )[0]
    note = "layers.0.blocks.*.attn is replicated, because it has 3 heads for 4 tensor ranks."
    assert note in report
    assert "layers.1.blocks" not in report.partition(note)[2]


def test_wildcard_matches_every_stage() -> None:
    names = ["layers", "layers.0", "layers.0.blocks", "layers.1.blocks", "layers.x.blocks", "layers.0.blocks.1"]
    assert match_paths("layers.*.blocks", names) == ["layers.0.blocks", "layers.1.blocks"]
    policy = StagedPolicy()
    policy.set_model(Staged())
    assert [stack.layers for stack in policy.stacks()] == ["layers.0.blocks", "layers.1.blocks"]
    assert policy.replicated_paths() == ["layers.0.merge", "layers.1.merge"]


def test_sequence_parallelism_is_refused() -> None:
    with pytest.raises(ConfigError, match="Staged does not support enable_sequence_parallelism=True: windows"):
        run_as_threads(
            lambda context: shard_model(Staged(), StagedPolicy, context=context, enable_sequence_parallelism=True),
            tensor=2,
        )


def test_missing_attribute_is_named_in_the_error() -> None:
    with pytest.raises(PolicyError, match=r"num_heads='\.num_head', but the Heads has no such field.*'num_heads'"):
        run_as_threads(lambda context: shard_model(Staged(), Misnamed, context=context), tensor=2)


def test_stack_without_a_match_is_refused() -> None:
    class Elsewhere(StagedPolicy):
        stack = LayerStack("stages.*.blocks", StagedPolicy.stack.blocks)

    with pytest.raises(PolicyError, match=r"The model has no module 'stages\.\*\.blocks'.*'layers"):
        run_as_threads(lambda context: shard_model(Staged(), Elsewhere, context=context), tensor=2)
