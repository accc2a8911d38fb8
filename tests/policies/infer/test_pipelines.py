"""Unregistered models over a pipeline are correct or refused with an error, never wrong or NaN."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from shardformer.discovery.derive_policy import (
    derive_pipeline_only_policy,
    derive_policy,
    format_policy_class_source,
)
from shardformer.discovery.shrink_config import shrink_config
from shardformer.discovery.validation import get_layer_stacks
from shardformer.errors import PolicyError, ShardFormerError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.layer_sequence import PipelineHints
from shardformer.pipeline.pipeline import Pipeline
from shardformer.policies.families import GPTJPolicy, LlamaPolicy
from shardformer.policies.policy import FAMILIES
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import LayerStack
from shardformer.shard_model_api import shard_model
from shardformer.verify.comparison import Report
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory
from shardformer.verify.train_both import VerifyPipeline
from shardformer.verify.verification import verify
from shardformer.weights.state_dict import full_state_dict

CLASSES = {
    "olmo2": "Olmo2ForCausalLM",
    "phi": "PhiForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "mpt": "MptForCausalLM",  # its layers return two things
    "distilbert": "DistilBertForMaskedLM",
    "electra": "ElectraForMaskedLM",
    "deberta-v2": "DebertaV2ForMaskedLM",  # its layers return two things
    "convbert": "ConvBertForMaskedLM",
    "xlm-roberta": "XLMRobertaForMaskedLM",  # its head is registered before its layers
    "bart": "BartForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",  # the first layer of each stack has a table that the others read
}
# the oldest transformers compiles a part of DeBERTa when that is imported
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]
XLM = "XLMWithLMHeadModel"  # its attention modules and MLPs are in two lists


@dataclass(frozen=True)
class Small:
    """Build a small model with four layers, or two layers in each of two stacks."""

    family: str
    name: str

    def __call__(self) -> nn.Module:
        config: Any = shrink_config(
            transformers.AutoConfig.for_model(self.family, architectures=[self.name]), even=self.family == "mpt"
        )
        for field in ("num_hidden_layers", "n_layer", "n_layers"):
            if isinstance(getattr(config, field, None), int) and getattr(config, field) < 4 and self.family != "bart":
                setattr(config, field, 4)
        if getattr(config, "layer_types", None):
            config.layer_types = (config.layer_types * 4)[:4]
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0
        model: nn.Module = getattr(transformers, self.name)(config)
        return model


def tokens(step: int) -> Mapping[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(5, 100, (5, 9), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    for row in range(5):
        labels[row, : 1 + row] = -100
        mask[row, 9 - row % 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def report_of(pool: WorkerPool, family: str, name: str) -> Report:
    with pool.with_timeout(300) as patient:
        return verify(Small(family, name), tokens, tensor=1, steps=2, pipeline=VerifyPipeline(2, 3), pool=patient)


@pytest.mark.reduced(one_in=14)
@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_unregistered_models_match_one_device_over_a_pipeline(pool2: WorkerPool, family: str) -> None:
    assert family not in FAMILIES
    report = report_of(pool2, family, CLASSES[family])
    assert report.passed, str(report)
    assert any("over pipe (activation)" in name for name in report.collectives)


def test_a_module_that_reads_parameters_of_another_stage_is_named(pool2: WorkerPool) -> None:
    with pytest.raises(ShardFormerError, match=r"ffns.*only on another pipeline stage"):
        report_of(pool2, "xlm", XLM)


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("name", ["Bart", "Mvp"])
def test_layers_of_both_the_encoder_and_the_decoder_are_split(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(
        vocab_size=100, d_model=24, encoder_layers=3, decoder_layers=5, encoder_attention_heads=4, encoder_ffn_dim=40,
        decoder_attention_heads=4, decoder_ffn_dim=44, max_position_embeddings=64, dropout=0.0, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).double()
    policy = type(derive_pipeline_only_policy(model))
    assert [stack.layers for stack in get_layer_stacks(policy)] == ["model.encoder.layers", "model.decoder.layers"]
    check_training(model, policy, pipe_sizes=(2, 4))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_encoder_and_a_decoder_of_different_hidden_sizes_are_split() -> None:
    """The small version must also have the projection between them."""
    sizes = {"vocab_size": 100, "num_hidden_layers": 2, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0}
    sizes["attention_probs_dropout_prob"] = 0.0
    encoder = transformers.BertConfig(hidden_size=24, num_attention_heads=4, intermediate_size=40, **sizes)
    decoder = transformers.BertConfig(hidden_size=30, num_attention_heads=5, intermediate_size=44, **sizes)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = transformers.EncoderDecoderModel(config=config).double()
    policy = type(derive_pipeline_only_policy(model))
    assert policy.no_pipeline is None
    assert "enc_to_dec_proj" in get_layer_stacks(policy)[0].stages.with_last_layer
    check_training(model, policy, pipe_sizes=(2,))


def check_training(model: nn.Module, policy: type[RolePolicy], pipe_sizes: Sequence[int]) -> None:
    """Train a step with each number of stages, and compare the loss and the weights with one process."""
    batch, unsharded = tokens(0), copy.deepcopy(model)

    def train(context: ParallelContext) -> tuple[float, Mapping[str, Tensor]]:
        sharded = shard_model(copy.deepcopy(model), policy, context=context)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        loss = Pipeline(sharded, micro_batches=2).step(batch)
        optimizer.step()
        return float(loss), full_state_dict(sharded)

    expected = unsharded(**batch).loss
    expected.backward()
    torch.optim.SGD(unsharded.parameters(), lr=0.1).step()
    for pipe in pipe_sizes:
        for loss, found in run_as_threads(train, pipe=pipe):
            assert loss == pytest.approx(expected.item(), rel=1e-12)
            torch.testing.assert_close(dict(found), dict(unsharded.state_dict()), rtol=1e-9, atol=1e-12)


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize(("family", "returns"), [("mpt", 2), ("deberta-v2", 2), ("olmo2", 0)])
def test_the_number_of_layer_outputs_is_inferred_and_printed(family: str, returns: int) -> None:
    policy = derive_policy(Small(family, CLASSES[family])())
    assert isinstance(policy.stack, LayerStack) and policy.stack.stages.num_outputs == returns
    assert (f"num_outputs={returns}" in format_policy_class_source(policy)) == (returns > 0)


@pytest.mark.parametrize("number", [0, 2])
def test_a_wrong_number_of_layer_outputs_is_named(number: int) -> None:
    family, returned = ("gptj", "tuple") if number == 0 else ("llama", "Tensor")
    policy: type[RolePolicy] = GPTJPolicy if number == 0 else LlamaPolicy
    assert isinstance(policy.stack, LayerStack)
    stack = replace(policy.stack, stages=PipelineHints(num_outputs=number))
    wrong, models = type("Wrong", (policy,), {"stack": stack}), [SmallModelFactory(family)() for _ in range(2)]

    def step(context: ParallelContext) -> None:
        Pipeline(shard_model(models[context.rank], wrong, context=context), micro_batches=2).step(
            RandomBatchFactory(DEFAULT_HEAD[family])(0)
        )

    with pytest.raises(PolicyError, match=rf"\.0 returned a {returned}, which does not match num_outputs={number}"):
        run_as_threads(step, pipe=2)
