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
    _get_tp_sizes_for_role,
    derive_policy,
    derive_policy_from_forward,
)
from shardformer.discovery.example_inputs import make_example_batches, make_forward_fn
from shardformer.discovery.reduced_model import ReferenceGradients
from shardformer.discovery.shrink_config import (
    EVEN as EVEN_SIZES,
)
from shardformer.discovery.shrink_config import (
    ODD,
    ReducedModelSizes,
    _choose_small_head_counts,
    shrink_config,
)
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
    cut = make_sharding_plan(model, described).get_sharded_param_names_by_id()
    for end in FOUND[family][1]:
        weights = [p for name, p in model.named_parameters() if name.removesuffix(".weight").endswith(end)]
        assert all(id(p) in cut for p in weights[1:]), end  # a first stage may have fewer heads than ranks
        assert len(weights) > 1


def test_interleaved_heads_are_also_validated_over_an_uneven_size() -> None:
    """Interleaved heads look like CodeGen's four partitions over 2 and 4 ranks, but not over 3."""
    split = {"qkv": "qkv", "out": "out"}
    assert [
        *_get_tp_sizes_for_role(Attention("attn", AttentionProjections(**split, interleaved=True)), VALIDATION_RANKS)
    ] == [
        *VALIDATION_RANKS,
        3,
    ]
    assert [
        *_get_tp_sizes_for_role(Attention("attn", AttentionProjections(**split, partitions=4)), VALIDATION_RANKS)
    ] == [*VALIDATION_RANKS]
    assert [*_get_tp_sizes_for_role(MLP("mlp", up="up", down="down"), VALIDATION_RANKS)] == [*VALIDATION_RANKS]


@pytest.mark.parametrize("sizes", [ODD, EVEN_SIZES], ids=["odd", "even"])
@pytest.mark.parametrize("counts", [{3, 4}, {2, 3, 5}, {3, 4, 8}, {8, 12, 32}], ids=str)
def test_head_counts_of_a_reduced_model_differ_and_divide_as_the_original_ones(
    counts: set[int], sizes: ReducedModelSizes
) -> None:
    small = _choose_small_head_counts(counts, sizes)
    assert len(set(small.values())) == len(counts)
    assert all(small[a] % small[b] == 0 for a in counts for b in counts if a % b == 0)


@pytest.mark.full
def test_decoder_heads_that_do_not_divide_the_encoder_heads_are_sharded() -> None:
    config = transformers.BartConfig(
        vocab_size=67, d_model=24, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=3, encoder_ffn_dim=40, decoder_ffn_dim=44, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).double().eval()
    policy = derive_policy(model)
    reference = ReferenceGradients.from_model(model, make_forward_fn(model, make_example_batches(model)[0]))
    for ranks in (2, 3):
        assert validate_policy(reference, type(policy), ranks) is None
    decoder = policy.stack[1]
    assert [block.num_heads for block in decoder.blocks if isinstance(block, Attention)] == [
        "decoder_attention_heads"
    ] * 2
