"""Derived policies shard the expected attention modules and experts of reduced models with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from shardformer.config import ShardConfig
from shardformer.discovery.derive_policy import (
    VALIDATION_RANKS,
    _choose_rank_counts_for_role,
    derive_policy_from_forward,
)
from shardformer.discovery.example_inputs import make_example_batches, make_forward_fn
from shardformer.discovery.reduced_model import ReferenceGradients
from shardformer.discovery.shrink_config import shrink_config
from shardformer.discovery.validation import validate_policy
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.policies.policy import FAMILIES
from shardformer.policies.roles import MLP, Attention, AttentionProjections
from shardformer.sharding.plan import make_sharding_plan

FOUND = {
    "codegen": ("CodeGenForCausalLM", ["attn.qkv_proj", "attn.out_proj", "mlp.fc_in"]),
    "funnel": ("FunnelForMaskedLM", ["attention.q_head", "attention.r_kernel", "post_proj", "ffn.linear_1"]),
    "hiera": ("HieraForImageClassification", ["attn.qkv", "attn.proj", "mlp.fc1"]),
    "gpt_oss": ("GptOssForCausalLM", ["experts.gate_up_proj", "experts.down_proj"]),
    "longcat_flash": ("LongcatFlashForCausalLM", ["experts.gate_up_proj", "self_attn.1.q_b_proj", "mlps.1.up_proj"]),
}
"""Model type -> class, and suffixes of the weights that are sharded."""
SMALLER: dict[str, dict[str, Any]] = {
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1},
    "hiera": {"depths": [1, 1], "num_heads": [1, 8], "masked_unit_attention": [True, False], "num_query_pool": 1},
}
EVEN = ("codegen",)
"""Models that require powers of two as sizes."""


def drawn(family: str) -> nn.Module:
    """Build a reduced model without zero parameters, so that a bias that is added twice is detected."""
    name = FOUND[family][0]
    given = transformers.AutoConfig.for_model(family, architectures=[name], **SMALLER.get(family, {}))
    model: nn.Module = getattr(transformers, name)(shrink_config(given, even=family in EVEN)).double().eval()
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.data += 0.1 * torch.randn(param.shape, generator=generator, dtype=param.dtype)
    return model


@pytest.mark.slow
@pytest.mark.reduced(one_in=6)
@pytest.mark.parametrize("family", sorted(FOUND))
def test_these_weights_are_sharded_by_a_derived_policy(family: str) -> None:
    assert family not in FAMILIES
    model = drawn(family)
    run = make_forward_fn(model, make_example_batches(model)[0])
    policy = derive_policy_from_forward(model, run)
    assert validate_policy(ReferenceGradients.from_model(model, run), policy, 3) is None
    described = policy()
    described.set_model(model)
    described.set_shard_config(ShardConfig(context=ParallelContext.from_sizes({"tensor": 2})))
    cut = make_sharding_plan(model, described).get_sharded_parameter_ids()
    for end in FOUND[family][1]:
        weights = [p for name, p in model.named_parameters() if name.removesuffix(".weight").endswith(end)]
        assert all(id(p) in cut for p in weights[1:]), end  # a first stage may have fewer heads than ranks
        assert len(weights) > 1


def test_interleaved_heads_are_also_validated_over_an_uneven_size() -> None:
    """Interleaved heads look like CodeGen's four partitions over 2 and 4 ranks, but not over 3."""
    split = {"qkv": "qkv", "out": "out"}
    assert [
        *_choose_rank_counts_for_role(
            Attention("attn", AttentionProjections(**split, interleaved=True)), VALIDATION_RANKS
        )
    ] == [
        *VALIDATION_RANKS,
        3,
    ]
    assert [
        *_choose_rank_counts_for_role(Attention("attn", AttentionProjections(**split, partitions=4)), VALIDATION_RANKS)
    ] == [*VALIDATION_RANKS]
    assert [*_choose_rank_counts_for_role(MLP("mlp", up="up", down="down"), VALIDATION_RANKS)] == [*VALIDATION_RANKS]
