"""Reduced models: ratios in the config, generated inputs and derived policies."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from shardformer.config import ShardConfig
from shardformer.discovery.derive_policy import derive_policy
from shardformer.discovery.reduced_model import reduce_model
from shardformer.discovery.shrink_config import ODD, build_meta_model, find_layer_kinds, shrink_config
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, LayerStack
from shardformer.sharding.plan import make_sharding_plan

pytestmark = pytest.mark.slow


def native(model_type: str, name: str, **settings: object) -> nn.Module:
    return build_meta_model(transformers.AutoConfig.for_model(model_type, architectures=[name], **settings))


def list_sharded_linears(model: nn.Module, policy: RolePolicy) -> set[str]:
    """Return the last two path components of each linear layer that the policy shards in all layers."""
    policy.set_model(model)
    policy.set_shard_config(ShardConfig(context=ParallelContext.from_sizes({"tensor": 2})))
    sharded = make_sharding_plan(model, policy).get_sharded_param_names_by_id()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in n}
    replicated = {".".join(n.split(".")[-2:]) for n, m in linears.items() if id(m.weight) not in sharded}
    return {".".join(n.split(".")[-2:]) for n in linears} - replicated


@pytest.mark.reduced(one_in=8)
@pytest.mark.parametrize(
    ("model_type", "name", "shapes"),
    [
        ("musicgen_decoder", "MusicgenForCausalLM", {"input_ids": (8, 9)}),  # a row for each of four codes
        ("siglip2", "Siglip2ForImageClassification", {"pixel_values": (2, 9, 768), "spatial_shapes": (2, 2)}),
        ("voxtral_realtime", "VoxtralRealtimeForConditionalGeneration", {"input_features": (2, 8, 72)}),
        (
            "perceiver",
            "PerceiverForMaskedLM",
            {"input_ids": (2, 9)},
        ),  # its layers are self-attention modules of a block
        ("vibevoice_asr", "VibeVoiceAsrForConditionalGeneration", {"input_ids": (2, 9)}),
        ("neomme", "NeoMMEForMaskedLM", {"input_ids": (2, 9)}),  # a quarter of its heads is turned, by fours
        ("levit", "LevitForImageClassification", {"pixel_values": (2, 3, 64, 64)}),
    ],
)
@pytest.mark.filterwarnings("ignore:`acoustic_tokenizer_chunk_size` is deprecated")  # transformers 5.17 of its own call
def test_reduced_models_with_special_sizes_or_inputs_run(
    model_type: str, name: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    batch = reduce_model(native(model_type, name)).batch
    assert {name: tuple(batch[name].shape) for name in shapes} == shapes


def test_a_config_class_recomputes_derived_sizes() -> None:
    small = shrink_config(transformers.ZambaConfig(), recompute_derived=True)
    assert small.attention_hidden_size == 2 * ODD.num_heads * ODD.head_dim
    assert small.attention_head_dim == 2 * ODD.head_dim


@pytest.mark.full
@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("zamba", "ZambaForCausalLM"),  # layers that share weights: two of each kind
        ("xlstm", "xLSTMForCausalLM"),  # two names of one size
        ("blt", "BltForCausalLM"),  # a size that only the config around its parts knows
    ],
)
def test_a_config_is_rebuilt_if_its_reduced_fields_are_inconsistent(model_type: str, name: str) -> None:
    model = native(model_type, name)
    assert find_layer_kinds(reduce_model(model).model) == find_layer_kinds(model)


@pytest.mark.full
def test_a_tied_head_of_a_nested_model_is_sharded_with_its_embedding() -> None:
    model = native("shieldgemma2", "ShieldGemma2ForImageClassification")
    assert derive_policy(model).head == ("model.lm_head",)


def test_layers_that_share_keys_and_values_are_sharded() -> None:
    layer_types = ["sliding_attention", "full_attention"] * 4
    model = native(
        "gemma4_text", "Gemma4ForCausalLM", num_hidden_layers=8, layer_types=layer_types, num_kv_shared_layers=4
    )
    reduced = reduce_model(model).model
    assert find_layer_kinds(reduced) == find_layer_kinds(model)
    policy = derive_policy(model)
    sharded = list_sharded_linears(model, policy)
    assert {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"} <= sharded


@pytest.mark.full
def test_the_image_size_of_a_staged_model_is_reduced() -> None:
    mobilevit = reduce_model(native("mobilevit", "MobileViTForImageClassification"))
    assert mobilevit.batch["pixel_values"].shape == torch.Size([2, 3, 64, 64])
    assert max(shrink_config(transformers.CvtConfig()).depth) == 3


@pytest.mark.full
def test_layers_in_a_sequential_and_convolved_projections_are_sharded() -> None:
    sizes = {"embed_dim": (12, 24, 48), "num_heads": (1, 2, 4), "depth": (1, 2, 3)}
    policy = derive_policy(native("cvt", "CvtForImageClassification", **sizes))
    assert isinstance(policy.stack, LayerStack)
    assert policy.stack.layers == "encoder.stages.*.layers"
    assert [type(role) for role in policy.stack.blocks] == [Attention, MLP]
