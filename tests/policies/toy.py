"""A small language model without transformers and config, and functions that compare it with its sharded copy.

Its sizes are odd, so that no dim is sharded evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.policies.policy import Policy
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, AttentionProjections, LayerStack
from shardformer.verify.comparison import Report
from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory
from shardformer.verify.verification import verify

B, S, HIDDEN, HEADS, WIDTH, VOCAB = 4, 9, 30, 5, 41, 101
HEAD_DIM = HIDDEN // HEADS


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.o = nn.Linear(HIDDEN, HIDDEN)
        self.num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, HEAD_DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
        out: Tensor = self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.fc2(self.act(self.fc1(x))))
        return out

    def act(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class Layer(nn.Module):
    def __init__(self, norm_in_mlp: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attn, self.mlp = SelfAttention(), FeedForward(norm_in_mlp)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class ToyLM(nn.Module):
    """(B, S) -> logits (B, S, V)."""

    def __init__(self, num_layers: int = 2, tied: bool = False, norm_in_mlp: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(norm_in_mlp) for _ in range(num_layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class ScaledToyLM(ToyLM):
    """(B, S), (B,) -> logits (B, S, V). No example inputs can be generated for it, because no argument is known."""

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids) * scale[:, None, None]


class ToyPolicy(RolePolicy):
    stack = LayerStack(
        "layers",
        [
            Attention("attn", AttentionProjections(q="q", k="k", v="v", out="o"), local_attrs={"num_heads": "heads"}),
            MLP("mlp", up="fc1", down="fc2"),
        ],
        final_norm="norm",
    )
    embeddings = "embed"
    head = "head"
    num_heads = HEADS


def toy_batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (B, S + 1), generator=generator)
    return {"ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()}


def toy_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def check_toy(
    policy: type[Policy],
    pool: WorkerPool,
    model_fn: Callable[[], nn.Module] = ToyLM,
    config: Mapping[str, Any] | None = None,
    data: int = 1,
) -> Report:
    tensor = pool.num_workers // data
    report = verify(model_fn, toy_batch, tensor, data, loss_fn=toy_loss, policy=policy, config=config, pool=pool)
    assert report.passed, report
    return report


def check_sample(sample: SmallModelFactory, policy: type[Policy], pool: WorkerPool, config: Any = None) -> Report:
    report = verify(
        sample,
        RandomBatchFactory(sample.head_class),
        pool.num_workers,
        policy=policy,
        config=config,
        pool=pool,
        steps=2,
    )
    assert report.passed, report
    assert "all_reduce" in " ".join(report.collectives)  # the model was sharded
    return report
