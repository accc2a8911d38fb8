"""Experts of transformers on ranks that do not divide their features."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from shardformer.layout.sharding_metadata import get_shard_specs
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import Experts, LayerStack
from shardformer.shard_model_api import shard_model
from shardformer.weights.state_dict import full_state_dict

HIDDEN, NUM = 72, 4
UP = ["gate_up_proj", "gate_up_proj_bias"]
KINDS: dict[str, tuple[Any, Any, Experts]] = {
    "mixtral": (MixtralExperts, transformers.MixtralConfig, Experts("experts", UP[0], "down_proj", fused=2)),
    "gpt_oss": (
        GptOssExperts,
        transformers.GptOssConfig,
        Experts("experts", UP, "down_proj", ["down_proj_bias"], fused=2, interleaved=True),
    ),
}
FACTOR = 2.0
"""Allowed error of the ranks' bf16 gradients, relative to the error of the plain model in bf16."""


class Layer(nn.Module):
    def __init__(self, kind: Any, config: Any) -> None:
        super().__init__()
        self.experts, self.router = kind(config), nn.Linear(HIDDEN, NUM)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(NUM)  # all experts, so that rounding cannot change the choice
        return x + torch.as_tensor(self.experts(x, index, weights))


class Model(nn.Module):
    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        cls, of_config, _ = KINDS[kind]
        config = of_config(hidden_size=HIDDEN, intermediate_size=width, num_local_experts=NUM, num_attention_heads=2)
        config._experts_implementation = "grouped_mm"
        self.layers = nn.ModuleList(Layer(cls, config) for _ in range(2))
        for p in self.parameters():
            nn.init.normal_(p, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class OfMixtral(RolePolicy):
    stack = LayerStack("layers", [KINDS["mixtral"][2]])
    keep_replicated = ("layers.*.router",)


class OfGptOss(RolePolicy):
    stack = LayerStack("layers", [KINDS["gpt_oss"][2]])
    keep_replicated = ("layers.*.router", "layers.*.experts.down_proj_bias")


POLICIES = {"mixtral": OfMixtral, "gpt_oss": OfGptOss}


def trained(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the gradients and the output."""
    out = model(x)
    out.square().mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None} | {"output": out.detach()}


@pytest.mark.reduced(cover="width")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("width", "ranks"), [(64, 3), (40, 2), (24, 3), (16, 3), (8, 3), (56, 5)])
def test_expert_shards_of_any_size_are_computed(kind: str, width: int, ranks: int, dtype: torch.dtype) -> None:
    """The ranks have 24, 24 and 16 of 64 features, and unaligned shards of 16 or 8 features."""
    torch.manual_seed(0)
    plain = Model(kind, width).to(dtype)
    whole, x = copy.deepcopy(plain.state_dict()), torch.randn(11, HIDDEN).to(dtype)
    models = [copy.deepcopy(plain) for _ in range(ranks)]
    exact = trained(copy.deepcopy(plain).float(), x.float())
    expected = trained(plain, x)
    bounds = {n: max(FACTOR * float((g - exact[n]).norm()), 1e-5 * float(exact[n].norm())) for n, g in expected.items()}

    def compute(context: ParallelContext) -> None:
        model = models[context.tensor.rank]
        shard_model(model, POLICIES[kind](), context=context)
        specs = get_shard_specs(model)
        for name, ours in trained(model, x).items():
            wide = (
                specs[name].slice_full_tensor(exact[name], {"tensor": context.tensor.rank})
                if name in specs
                else exact[name]
            )
            assert (ours - wide).norm() <= bounds[name], name
        saved = full_state_dict(model)
        assert all(torch.equal(saved[name], value) for name, value in whole.items())

    run_as_threads(compute, tensor=ranks)
