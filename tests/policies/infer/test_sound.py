"""A derived policy is the one that was validated, with a call of the model as in training."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from shardformer.discovery.derive_policy import derive_policy, derive_policy_from_forward
from shardformer.discovery.example_inputs import make_example_batches, make_forward_fn
from shardformer.discovery.reduced_model import ReferenceGradients, compute_loss_from_all_outputs, reduce_model
from shardformer.discovery.shrink_config import build_meta_model
from shardformer.discovery.validation import validate_policy
from shardformer.errors import PolicyError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.policies.experts import describe_expert_sharding
from shardformer.policies.roles import MLP, Attention, AttentionInputs, AttentionProjections, Experts, LayerStack
from shardformer.shard_model_api import shard_model
from shardformer.tensor_parallel.linear_communication import prepare_extra_block_input


def test_outputs_that_are_exchanged_have_another_loss() -> None:
    output = {"logits": torch.arange(12.0, dtype=torch.float64).view(3, 4)}
    assert compute_loss_from_all_outputs({"logits": output["logits"].flip(-1)}) != compute_loss_from_all_outputs(output)
    assert compute_loss_from_all_outputs({"logits": output["logits"].flip(0)}) != compute_loss_from_all_outputs(output)
    of_other_samples = compute_loss_from_all_outputs({"logits": output["logits"].flip(0)}, equal_sample_weights=True)
    torch.testing.assert_close(
        of_other_samples, compute_loss_from_all_outputs(output, equal_sample_weights=True), rtol=1e-12, atol=0
    )


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", ["T5Gemma2ForConditionalGeneration", "FSMTForConditionalGeneration"])
def test_encoder_states_enter_a_block_once_with_cross_states(name: str) -> None:
    native: Any = getattr(transformers, name)
    reduced = reduce_model(build_meta_model(native.config_class(architectures=[name])))
    policy: Any = derive_policy_from_forward(reduced.model, reduced.forward_fn)
    assert policy.no_pipeline is None and policy.stack[1].cross_states == ("decoder", "encoder_hidden_states")
    assert any(block.inputs.arguments for block in policy.stack[1].blocks if isinstance(block, Attention))
    assert validate_policy(ReferenceGradients.from_model(reduced.model, reduced.forward_fn), policy, 2) is None


def test_a_policy_with_states_that_enter_twice_is_refused() -> None:
    linears = AttentionProjections(q="q", k="k", v="v", out="o")
    cross = Attention("cross", linears, inputs=AttentionInputs(cross_attention=True))
    other = Attention("attn", linears, inputs=AttentionInputs(arguments=["states"]))
    with pytest.raises(
        PolicyError, match=r"arguments=\['states'\]\) repeats cross_states of the LayerStack 'layers'.*'attn'"
    ):
        LayerStack("layers", [cross, other], cross_states=("decoder", "states"))
    LayerStack("layers", [cross, other], cross_states=("decoder", "other_states"))


def test_a_view_of_a_block_input_does_not_enter_again() -> None:
    def twice(context: ParallelContext) -> None:
        x = torch.ones(2, 3, 4, requires_grad=True)
        prepare_extra_block_input(prepare_extra_block_input(x, context.tensor).transpose(0, 1), context.tensor)

    with pytest.raises(PolicyError, match=r"tensor of shape \(3, 2, 4\) twice"):
        run_as_threads(twice, tensor=2)


def test_validation_uses_a_training_call() -> None:
    reduced = reduce_model(transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=60, num_hidden_layers=2)))
    assert reduced.model.training and "labels" in reduced.batch
    output = reduced.forward_fn(reduced.model)
    assert output.loss.requires_grad and torch.equal(output.loss, reduced.forward_fn(reduced.model).loss)


def test_a_reduced_model_whose_training_cannot_be_repeated_is_validated_in_eval_mode() -> None:
    generator = torch.Generator()

    class Noisy(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input + torch.randint(99, (), generator=generator) * self.training)

    batch = {"input": torch.ones(2, 3)}
    assert not reduce_model(Noisy(3, 4), batch).model.training
    assert reduce_model(nn.Linear(3, 4), batch).model.training


@pytest.fixture(scope="module")
def bird() -> tuple[nn.Module, Any]:
    """BigBird and its derived policy. In training, each head attends to random blocks."""
    model = build_meta_model(transformers.BigBirdConfig(architectures=["BigBirdForMaskedLM"]))
    return reduce_model(model).model, derive_policy(model)


def test_heads_that_depend_on_their_index_are_replicated(bird: tuple[nn.Module, Any]) -> None:
    assert [type(block) for block in bird[1].stack.blocks] == [MLP]


BIRD = Attention(
    "attention.self",
    AttentionProjections(q="query", k="key", v="value", out=".attention.output.dense"),
    local_attrs={"num_attention_heads": "heads", "all_head_size": "width"},
)


@pytest.mark.parametrize("cuts_attention", [False, True])
def test_a_module_class_that_changes_in_forward_is_refused_if_sharded(
    bird: tuple[nn.Module, Any], cuts_attention: bool
) -> None:
    """BigBird replaces the attention class for short batches."""
    native, policy = bird
    policy_class: Any = type(policy)
    fields = {"stack": LayerStack(policy_class.stack.layers, [BIRD, *policy_class.stack.blocks])}
    chosen = type("Cut", (policy_class,), fields) if cuts_attention else policy_class
    ids = torch.randint(5, 60, (2, 4))
    expected = copy.deepcopy(native).eval()(input_ids=ids).logits

    def short(context: ParallelContext) -> torch.Tensor:
        model = shard_model(copy.deepcopy(native), chosen, context=context).eval()
        logits: torch.Tensor = model(input_ids=ids).logits.full_tensor()
        return logits

    if not cuts_attention:
        assert torch.allclose(run_as_threads(short, tensor=2)[0], expected)
        return
    with pytest.raises(PolicyError, match=r"BigBirdBlockSparseAttention.*was replaced.*before you shard the model"):
        run_as_threads(short, tensor=2)


@pytest.mark.slow
@pytest.mark.reduced(one_in=2)
@pytest.mark.parametrize(("hidden", "width"), [(32, 16), (16, 16)])
def test_experts_as_wide_as_the_hidden_states_use_the_validated_dim(hidden: int, width: int) -> None:
    """The hidden size is once or twice (as in OLMoE) the features of an expert."""
    sizes = {"hidden_size": hidden, "intermediate_size": width, "vocab_size": 60, "num_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "num_experts_per_tok": 2}
    model = transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**sizes, **heads)).double()
    model.config._experts_implementation = "eager"
    policy: Any = derive_policy(model)
    assert policy.stack.blocks[1].dims == {"gate_up_proj": 1, "down_proj": 2}
    assert (
        validate_policy(
            ReferenceGradients.from_model(model, make_forward_fn(model, make_example_batches(model)[0])),
            type(policy),
            2,
        )
        is None
    )


def test_ambiguous_expert_dims_must_be_specified() -> None:
    layer = nn.ModuleDict({"experts": nn.Module()})
    for name in ("up", "down"):
        layer["experts"].register_parameter(name, nn.Parameter(torch.zeros(3, 4, 4 if name == "down" else 8)))
    describe = partial(
        describe_expert_sharding,
        layer=layer,
        layer_path="layers.*",
        axis=ParallelContext.from_sizes({"tensor": 2}).tensor,
    )
    with pytest.raises(
        PolicyError, match=r"because several dimensions have the same size.*dims=\{'up': 2, 'down': 2\}"
    ):
        describe(Experts("experts", "up", "down", fused=2))
    parameters = describe(Experts("experts", "up", "down", fused=2, dims={"up": 2, "down": 1})).parameters
    assert parameters is not None and {name: list(dims) for name, dims in parameters.items()} == {
        "experts.up": [2],
        "experts.down": [1],
    }


def test_pipeline_hints_that_break_tensor_parallelism_are_omitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reduced = reduce_model(transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=60, num_hidden_layers=2)))
    native: Any = derive_policy_from_forward(reduced.model, reduced.forward_fn)
    attention, *others = native.stack.blocks
    torn = [replace(native.stack, blocks=[replace(attention, local_attrs={}), *others])]
    monkeypatch.setattr(
        "shardformer.discovery.derive_policy.find_pipeline_hints", lambda reference, policy: (torn, None)
    )
    policy: Any = derive_policy_from_forward(reduced.model, reduced.forward_fn)
    assert policy.stack.blocks == native.stack.blocks
    assert "the sharded model does not run" in policy.no_pipeline


@pytest.mark.slow
@torch.no_grad()
def test_a_policy_is_derived_under_no_grad() -> None:
    model = transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=60, num_hidden_layers=2))
    assert derive_policy(model).no_pipeline is None


def test_fp32_cancellation_is_tolerated_and_missing_terms_are_not() -> None:
    class Inside(nn.Module):
        """A scale whose gradient is a sum of much larger terms in fp32."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
            self.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight).float().mul(self.scale.float()).sin().sum(1)

    torch.manual_seed(0)
    x = torch.randn(32, 64, dtype=torch.float64)
    reference = ReferenceGradients.from_model(Inside(), lambda model: model(x))
    largest = max(float(g.abs().max()) for g in reference.gradients.values() if g is not None)
    assert 0 < reference.fp32_tolerances["scale"] < 1e-5 * largest
    assert reference.is_within_tolerance(
        "scale", reference.fp32_tolerances["scale"]
    ) and not reference.is_within_tolerance("scale", 1e-3 * largest)
