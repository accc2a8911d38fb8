"""Derived policies match the registered ones, are correct where they shard, and replicate other modules."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import shardformer
from shardformer.config import ShardConfig
from shardformer.discovery.derive_policy import (
    DerivedPolicy,
    derive_policy,
    derive_policy_from_forward,
    format_policy_class_source,
)
from shardformer.discovery.example_inputs import make_example_batches, make_forward_fn
from shardformer.discovery.reduced_model import ReferenceGradients, reduce_model
from shardformer.discovery.shrink_config import build_meta_model, find_layer_kinds, shrink_config
from shardformer.discovery.validation import validate_policy
from shardformer.errors import ConfigError, PolicyError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.policies.families import GPT2Policy
from shardformer.policies.policy import FAMILIES, Policy
from shardformer.policies.roles import MLP, Attention, AttentionProjections, LayerStack
from shardformer.shard_model_api import shard_model
from shardformer.sharding.plan import make_sharding_plan
from shardformer.verify.small_models import SMALL_CONFIGS, SmallModelFactory
from tests.policies.toy import ScaledToyLM, ToyLM

# family -> its class, and what share of the linear weights of its layers the policy cuts
BY_HAND = {"albert", "beit", "blip-2", "chatglm", "falcon", "gptj", "sam", "swin", "swinv2"}
FOUND = {family for family in FAMILIES if family in SMALL_CONFIGS} - BY_HAND
"""Registered families whose policy can be derived."""
UNDESCRIBED = {
    "opt": ("OPTForCausalLM", 1.0),
    "gptj": ("GPTJForCausalLM", 1.0),
    "gpt_neo": ("GPTNeoForCausalLM", 1.0),
    "gpt_neox": ("GPTNeoXForCausalLM", 1.0),
    "falcon": ("FalconForCausalLM", 1.0),
    "mistral": ("MistralForCausalLM", 1.0),
    "qwen2": ("Qwen2ForCausalLM", 1.0),
    "qwen3": ("Qwen3ForCausalLM", 1.0),
    "phi3": ("Phi3ForCausalLM", 1.0),
    "roberta": ("RobertaForMaskedLM", 1.0),
    "ernie": ("ErnieForMaskedLM", 1.0),
    "vit": ("ViTForImageClassification", 1.0),
    "beit": ("BeitForImageClassification", 1.0),
    "bart": ("BartForConditionalGeneration", 1.0),
    "albert": ("AlbertForMaskedLM", 1.0),
    "bloom": ("BloomForCausalLM", 1.0),
    "convbert": ("ConvBertForMaskedLM", 0.47),  # its attention is half convolution
    "deepseek_v3": ("DeepseekV3ForCausalLM", 0.88),  # low-rank projections are replicated
    "afmoe": ("AfmoeForCausalLM", 0.98),  # some layers have experts, the others an MLP at the same place
    "gemma3_text": ("Gemma3ForCausalLM", 1.0),
}


def small(family: str) -> nn.Module:
    config = shrink_config(transformers.AutoConfig.for_model(family, architectures=[UNDESCRIBED[family][0]]))
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, UNDESCRIBED[family][0])(config)
    return model


def describe_policy(model: nn.Module, policy: Policy) -> list[str]:
    """Return the module replacements, blocks and stacks of a policy as text."""
    policy.set_model(model)
    policy.set_shard_config(ShardConfig(context=ParallelContext.from_sizes({"tensor": 2}, {"tensor": 1})))
    plan = make_sharding_plan(model, policy)
    replaced = [line for line in plan.get_lines_to_compare_across_ranks() if " -> " in line]
    blocks = sorted(str(block) for _, block in plan.blocks)
    return [*sorted(replaced), *blocks, *map(str, plan.stacks)]


@pytest.mark.slow
@pytest.mark.reduced(one_in=7, at_most=1)
@pytest.mark.parametrize("family", sorted(FOUND))
def test_derived_policies_match_registered_policies(family: str) -> None:
    model = SmallModelFactory(family)()
    assert _without_hints(describe_policy(model, derive_policy(model))) == _without_hints(
        describe_policy(model, FAMILIES[family].import_policy_class()())
    )


def _without_hints(lines: list[str]) -> list[str]:
    """Remove options for fused bias activation and for cross-attention."""
    return [line.replace("activated=True", "activated=False").split(", context=")[0] for line in lines]


@pytest.mark.slow
@pytest.mark.reduced(one_in=10, first=6, at_most=1)
@pytest.mark.parametrize("family", sorted(UNDESCRIBED))
def test_unregistered_families_are_sharded(family: str) -> None:
    model = small(family)
    policy = derive_policy(model)
    reference = ReferenceGradients.from_model(
        model.double().eval(), make_forward_fn(model, make_example_batches(model)[0])
    )
    for ranks in (2, 3):
        assert validate_policy(reference, type(policy), ranks) is None
    sequence = validate_policy(
        reference, type(policy), 2, enable_sequence_parallelism=True, enable_sequence_overlap=True
    )
    assert sequence is None and policy.no_sequence_parallel is None
    policy.set_model(model)
    replaced = {id(model.get_submodule(path)) for path in make_sharding_plan(model, policy).replacements}
    layers = tuple(stack.layers for stack in policy.stacks())
    linears = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith(layers)]
    share = sum(m.weight.numel() for m in linears if id(m) in replaced) / sum(m.weight.numel() for m in linears)
    assert share == pytest.approx(UNDESCRIBED[family][1], abs=0.02)


@pytest.mark.slow
@pytest.mark.reduced(cover="need", at_most=1)
@pytest.mark.parametrize(
    ("family", "head", "need", "name"),
    [
        ("deepseek_v32", "DeepseekV32ForCausalLM", "gather_modules", "self_attn"),  # an attention that is replicated
        ("qwen3_next", "Qwen3NextForCausalLM", "gather_modules", "linear_attn"),
        ("wav2vec2-bert", "Wav2Vec2BertForSequenceClassification", "gather_modules", "conv_module"),
        ("llama4_text", "Llama4ForCausalLM", "gather_with_blocks", "feed_forward"),  # each expert is given all tokens
        (
            "deepseek_v4",
            "DeepseekV4ForCausalLM",
            "gather_with_blocks",
            "mlp",
        ),  # each token has several states, (B, S, 4, H)
        ("switch_transformers", "SwitchTransformersForConditionalGeneration", "gather_with_blocks", "layer.1.mlp"),
        ("mobilebert", "MobileBertForMaskedLM", "gather_with_blocks", "attention"),  # values have a source of their own
        ("gemma4_text", "Gemma4ForCausalLM", "per_token_args", "per_layer_input"),
        ("zamba", "ZambaForCausalLM", "per_token_args", "mamba_decoder.transformer_hidden_states"),
        ("voxtral_realtime", "VoxtralRealtimeForConditionalGeneration", "token_free_modules", "ada_rms_norm"),
    ],
)
def test_sequence_parallel_hints_are_inferred(
    family: str, head: str, need: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced = reduce_model(build_meta_model(transformers.AutoConfig.for_model(family, architectures=[head])))
    policy = derive_policy_from_forward(reduced.model, reduced.forward_fn)()
    stacks = [policy.stack] if isinstance(policy.stack, LayerStack) else policy.stack
    assert any(name in getattr(stack.sequence, need) for stack in stacks) and policy.no_sequence_parallel is None
    assert f'"{name}"' in format_policy_class_source(policy), "it is written down too"
    reference = ReferenceGradients.from_model(reduced.model, reduced.forward_fn)
    assert validate_policy(reference, type(policy), 3, enable_sequence_parallelism=True) is None
    without = [replace(s, sequence=replace(s.sequence, **{need: ()})) for s in stacks]
    monkeypatch.setattr(type(policy), "stack", without)
    assert validate_policy(reference, type(policy), 2, enable_sequence_parallelism=True) is not None


@pytest.mark.slow
def test_describe_sharding_reports_a_derived_policy() -> None:
    def shard(context: ParallelContext) -> str:
        return str(shardformer.describe_sharding(shard_model(small("convbert"), context=context)))

    report = run_as_threads(shard, tensor=2)[0]
    assert "by a derived and validated policy" in report
    assert "validated on a reduced model over 2 and 4 tensor ranks" in report
    assert "Replicated, because" in report and "encoder.layer.*.attention.self.query" in report


@pytest.mark.slow
@pytest.mark.reduced(one_in=3)
@pytest.mark.parametrize("family", ["opt", "phi3", "bart"])
def test_printed_source_defines_the_same_policy(family: str) -> None:
    model = small(family)
    policy = derive_policy(model)
    names: dict[str, Any] = {}
    exec(format_policy_class_source(policy, "Written"), names)
    assert describe_policy(model, names["Written"]()) == describe_policy(model, policy)


@pytest.mark.reduced(at_most=1)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["albert", "convbert"])
def test_printed_source_contains_sequence_hints(family: str) -> None:
    model = small(family).double().eval()
    names: dict[str, Any] = {}
    exec(format_policy_class_source(derive_policy(model), "Written"), names)
    reference = ReferenceGradients.from_model(model, make_forward_fn(model, make_example_batches(model)[0]))
    assert validate_policy(reference, names["Written"], 2, enable_sequence_parallelism=True) is None


@pytest.mark.slow
def test_a_policy_is_derived_from_a_config() -> None:
    config = transformers.AutoConfig.for_model("opt", architectures=["OPTForCausalLM"])
    assert "decoder.layers" in str(derive_policy(config).stack)


class WholeMLP(GPT2Policy):
    stack = LayerStack(
        "h", [Attention("attn", AttentionProjections(qkv="c_attn", out="c_proj"), local_attrs={"split_size": "width"})]
    )
    keep_replicated = ("h.*.mlp",)


class Interleaved(WholeMLP):
    stack = LayerStack(
        "h",
        [
            Attention(
                "attn",
                AttentionProjections(qkv="c_attn", out="c_proj", interleaved=True),
                local_attrs={"split_size": "width"},
            )
        ],
    )


class RowTwice(WholeMLP):
    stack = LayerStack("h", [MLP("attn", up="c_attn", down="c_proj", fused=3)])


class NoAttribute(WholeMLP):
    stack = LayerStack("h", [Attention("attn", AttentionProjections(qkv="c_attn", out="c_proj"))])


@pytest.mark.parametrize("policy", [Interleaved, RowTwice, NoAttribute])
def test_a_wrong_policy_fails_validation(policy: type[GPT2Policy]) -> None:
    model = SmallModelFactory("gpt2")().double().eval()
    reference = ReferenceGradients.from_model(model, make_forward_fn(model, make_example_batches(model)[0]))
    assert validate_policy(reference, WholeMLP, 2) is None
    assert "does not run" in (problem := str(validate_policy(reference, policy, 2))) or "differs" in problem


def test_a_failure_describes_the_problem_before_the_raw_error() -> None:
    model = SmallModelFactory("gpt2")().double().eval()
    problem = validate_policy(
        ReferenceGradients.from_model(model, make_forward_fn(model, make_example_batches(model)[0])), NoAttribute, 2
    )
    assert problem is not None and re.fullmatch(r"the sharded model does not run \(ValueError: .{,100}\)", problem)


def test_blocks_that_fail_over_four_ranks_are_replicated() -> None:
    config = shrink_config(transformers.OPTConfig())
    config.num_attention_heads = 3
    model = transformers.OPTForCausalLM(config).double().eval()
    policy: Any = derive_policy_from_forward(model, make_forward_fn(model, make_example_batches(model)[0]))
    assert [type(block) for block in policy.stack.blocks] == [MLP]
    assert "no candidate for sharding it passed validation: A tensor size of 4 exceeds the 3" in policy.notes[1]


def test_validation_keeps_weights_and_leaves_no_gradients() -> None:
    model = SmallModelFactory("gpt2")().double().eval()
    reference = ReferenceGradients.from_model(model, make_forward_fn(model, make_example_batches(model)[0]))
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert validate_policy(reference, GPT2Policy, 2) is None
    assert all(p.grad is None and p.equal(before[name]) for name, p in model.named_parameters())


@pytest.mark.slow
def test_a_failed_derivation_reports_the_reason() -> None:
    with pytest.raises(PolicyError, match=r"ShardFormer cannot generate example inputs for ScaledToyLM.*batch="):
        derive_policy(ScaledToyLM())
    with pytest.raises(PolicyError, match="a transformers config"):
        derive_policy("opt")
    with pytest.raises(PolicyError, match="could be derived: 0: it is outside the layers"):
        derive_policy(nn.Sequential(nn.Linear(3, 4)), batch={"input": torch.ones(2, 3, dtype=torch.float64)})


def odd_one(num_layers: int) -> Any:
    """A model whose last layer contains different modules."""
    config = shrink_config(transformers.Olmo2Config())
    config.num_hidden_layers = num_layers
    model: Any = transformers.Olmo2ForCausalLM(config)
    model.model.layers[-1].mlp.gate_proj = nn.Sequential(nn.Linear(48, 70))
    return model


def test_a_sharded_model_is_refused_on_all_ranks() -> None:
    def refused(context: ParallelContext) -> None:
        model = shard_model(SmallModelFactory("gpt2")(), context=context)
        with pytest.raises(ConfigError, match="is already sharded"):
            derive_policy(model)

    run_as_threads(refused, one_at_a_time=True, tensor=2)


@pytest.mark.slow
def test_a_layer_missing_in_the_reduced_model_is_refused() -> None:
    policy = derive_policy(transformers.Olmo2ForCausalLM(shrink_config(transformers.Olmo2Config())))
    policy.set_model(odd_one(3))
    with pytest.raises(PolicyError, match=r"does not cover the layer model.layers.2, because its modules differ"):
        policy.set_shard_config(ShardConfig(context=ParallelContext.from_sizes({"tensor": 2})))


@pytest.mark.slow
def test_a_small_model_is_copied_if_the_reduced_model_lacks_a_layer() -> None:
    stack = derive_policy(odd_one(3)).stack
    assert isinstance(stack, LayerStack)
    assert "mlp" not in [block.at for block in stack.blocks]


def test_a_reduced_model_has_a_layer_of_each_kind() -> None:
    config = transformers.MllamaTextConfig(cross_attention_layers=[3], num_hidden_layers=8)
    with torch.device("meta"):
        model = transformers.MllamaForCausalLM(config)
    assert find_layer_kinds(reduce_model(model).model) == find_layer_kinds(model)


@pytest.mark.full
@pytest.mark.slow
def test_a_model_with_infinite_gradients_in_fp64_is_validated_in_fp32() -> None:
    """The mask is the lowest fp64 value, for which softmax in fp32 is not finite, and the inputs are (S, B, H)."""
    model = transformers.LongformerForMaskedLM(shrink_config(transformers.LongformerConfig()))
    assert next(reduce_model(model).model.parameters()).dtype == torch.float32
    policy: Any = derive_policy(model)
    assert [block.at for block in policy.stack.blocks] == ["attention.self", "intermediate"]


@pytest.mark.slow
def test_a_reduced_model_without_finite_outputs_is_refused() -> None:
    class NoNumber(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).square().neg().log() * 0

    with pytest.raises(PolicyError, match=r"The output of NoNumber is NaN or infinite in torch.float32"):
        derive_policy(NoNumber(3, 4), batch={"input": -torch.ones(2, 3)})


OTHER_STATES = {
    "FSMTForConditionalGeneration": ["key"],  # turned around before the layers, so no argument around them
    "T5Gemma2ForConditionalGeneration": ["encoder_hidden_states"],  # k and v read its own states too
    "MobileBertForMaskedLM": ["key_tensor", "value_tensor"],  # the first is another name for what the query reads
    "FunnelForMaskedLM": ["key", "value"],  # where a block pools the query, and only there
}


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", OTHER_STATES)
def test_attention_modules_with_several_input_arguments_are_sharded(name: str) -> None:
    native: Any = getattr(transformers, name)
    policy: Any = derive_policy(native.config_class(architectures=[name]))
    stacks = [policy.stack] if isinstance(policy.stack, LayerStack) else policy.stack
    attentions = [block for stack in stacks for block in stack.blocks if isinstance(block, Attention)]
    arguments = [list(block.inputs.arguments) for block in attentions if block.inputs.arguments]
    assert arguments == [OTHER_STATES[name]]
    assert all(any(isinstance(block, MLP) for block in stack.blocks) for stack in stacks)  # Funnel's adds its residual


def test_lists_per_layer_are_shortened_and_lists_per_stage_are_not() -> None:
    assert shrink_config(transformers.LEDConfig(attention_window=[512] * 12)).attention_window == [8, 8]
    assert list(shrink_config(transformers.PvtConfig()).num_attention_heads) == [1, 2, 5, 8]


def test_a_reduced_bigbird_uses_block_sparse_attention() -> None:
    """BigBird replaces the attention class for short batches."""
    reduced = reduce_model(transformers.BigBirdForMaskedLM(shrink_config(transformers.BigBirdConfig()))).model
    assert "BigBirdBlockSparseAttention" in {type(module).__name__ for module in reduced.modules()}


def test_sequence_parallelism_that_failed_validation_is_refused() -> None:
    policy = DerivedPolicy()
    policy.set_model(ToyLM())
    policy.no_sequence_parallel = "the output differs"
    with pytest.raises(
        ConfigError, match="ToyLM does not support enable_sequence_parallelism=True: the output differs"
    ):
        policy.set_shard_config(
            ShardConfig(enable_sequence_parallelism=True, context=ParallelContext.from_sizes({"tensor": 2}))
        )


class MatrixLM(nn.Module):
    """A language model whose weights are not in linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(32, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, idx: Tensor) -> Tensor:
        x: Tensor = self.embed(idx)
        return (x + x @ self.mix) @ self.embed.weight.T


@pytest.mark.slow
def test_a_model_without_shardable_layers_is_not_reported_as_having_unknown_inputs() -> None:
    def run(context: ParallelContext) -> None:
        shardformer.shard_model(MatrixLM(), context=context)

    with pytest.raises(PolicyError, match="No layer of MatrixLM can be sharded over tensor=2") as caught:
        run_as_threads(run, tensor=2)
    assert "example inputs" not in str(caught.value)
