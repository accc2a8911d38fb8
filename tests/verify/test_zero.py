"""``verify`` with ZeRO stages and optimizers, and with batches of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardformer.errors import ConfigError
from shardformer.gradients.buckets import ReduceScatterToShards
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.verify.model_source import ExampleBatchFactory, ReducedModelFactory, find_model_source
from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory
from shardformer.verify.train_both import VerifyPipeline
from shardformer.verify.training_options import VerifyTraining, make_verify_optimizers
from shardformer.verify.verification import verify


@pytest.mark.reduced(one_in=2, at_most=1)
@pytest.mark.parametrize(
    ("family", "head", "training"),
    [
        ("gpt2", "GPT2LMHeadModel", VerifyTraining(3)),
        ("bert", "BertForMaskedLM", VerifyTraining(2, "AdamW")),
        ("llama", "LlamaForCausalLM", VerifyTraining(0, "LAMB")),
        ("llama", "LlamaForCausalLM", VerifyTraining(2, "AdamW", precision="bf16", offload="cpu")),
        ("bert", "BertForMaskedLM", VerifyTraining(3, precision="fp16")),
    ],
)
def test_over_data_and_tensor_ranks(family: str, head: str, training: VerifyTraining, pool4: WorkerPool) -> None:
    report = verify(SmallModelFactory(family), RandomBatchFactory(head), 2, 2, pool=pool4, training=training)
    assert report.passed, report
    assert f"ZeRO stage {training.zero_stage}, {training.optimizer}" in str(report)


@pytest.mark.reduced(one_in=3, at_most=1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_training_over_data_ranks_equals_one_process(stage: int, precision: str, pool2: WorkerPool) -> None:
    how = VerifyTraining(stage, precision=precision, offload="cpu" if stage == 2 else None)
    report = verify(
        SmallModelFactory("gpt2"), RandomBatchFactory("GPT2LMHeadModel"), 1, 2, steps=3, training=how, pool=pool2
    )
    # the norm for clipping is summed in another order, so that the last bit may differ
    assert report.passed and max(report.gradient.relative, report.weight.relative) < 2**-8, report


FROZEN = r"transformer\.wte\.weight|.*mlp\.c_fc\.weight"


@pytest.mark.reduced(stage=(None, 3), at_most=1)
@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_several_backwards_with_checkpoints_and_frozen_weights(stage: int | None, pool4: WorkerPool) -> None:
    how = VerifyTraining(
        stage,
        gradient_accumulation_steps=3,
        activation_checkpointing=True,
        frozen_pattern=FROZEN,
        offload="cpu" if stage == 2 else None,
    )
    report = verify(
        SmallModelFactory("gpt2"), RandomBatchFactory("GPT2LMHeadModel"), 2, 2, steps=2, training=how, pool=pool4
    )
    assert report.passed, report


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_pipeline_stage_may_have_no_trainable_parameters(stage: int, pool4: WorkerPool) -> None:
    how = VerifyTraining(stage, frozen_pattern=r"transformer\.(wte|wpe|h\.0)\..*")
    report = verify(
        SmallModelFactory("gpt2"),
        RandomBatchFactory("GPT2LMHeadModel"),
        1,
        2,
        training=how,
        pipeline=VerifyPipeline(2),
        pool=pool4,
    )
    assert report.passed, report


@pytest.mark.full
def test_over_stages_and_data_ranks(pool4: WorkerPool) -> None:
    model = find_model_source("stablelm").with_min_layers(2)
    batches = model.make_batch_fn(4)
    report = verify(model.model_fn, batches, 1, 2, training=VerifyTraining(2), pipeline=VerifyPipeline(2), pool=pool4)
    assert report.passed, report


def wrong() -> None:
    """A rank takes half of the reduced gradient."""
    start = ReduceScatterToShards.start_reduction

    def halved(self: ReduceScatterToShards, bucket: object) -> None:
        start(self, bucket)  # type: ignore[arg-type]
        bucket.flat.mul_(0.5)  # type: ignore[attr-defined]

    ReduceScatterToShards.start_reduction = halved  # type: ignore[method-assign,assignment]


def right(start: object = ReduceScatterToShards.start_reduction) -> None:
    ReduceScatterToShards.start_reduction = start  # type: ignore[method-assign,assignment]


def test_a_wrong_reduction_fails(pool2: WorkerPool) -> None:
    pool2.run(wrong)
    try:
        report = verify(
            SmallModelFactory("gpt2"),
            RandomBatchFactory("GPT2LMHeadModel"),
            1,
            2,
            steps=1,
            training=VerifyTraining(1),
            pool=pool2,
        )
    finally:
        pool2.run(right)
    assert not report.passed


def test_batches_of_a_small_model_have_the_requested_size() -> None:
    batches = ExampleBatchFactory(ReducedModelFactory("stablelm"))
    assert batches(0)["input_ids"].shape[0] == 2
    five = batches.with_samples(5)(1)
    assert {x.shape[0] for x in five.values()} == {5}
    assert not torch.equal(five["input_ids"][0], five["input_ids"][2])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"zero_stage": 4}, "zero_stage=4"),
        ({"zero_stage": 1, "optimizer": "AdamWW"}, "optimizer='AdamWW'.* Did you mean 'AdamW'"),
        ({"zero_stage": 1, "optimizer": lambda params: None}, "optimizer=<function .* cannot be pickled.*top level"),
        ({"optimizer": torch.optim.AdamW}, "AdamW.* requires ZeRO"),
        ({"zero_stage": 1, "precision": "fp8"}, "precision='fp8'"),
        ({"zero_stage": 1, "offload": "disk"}, "offload='disk'"),
        ({"precision": "bf16"}, "precision='bf16' requires ZeRO"),
        ({"offload": "cpu"}, "offload='cpu' requires ZeRO"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
    ],
)
def test_invalid_options_raise(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        VerifyTraining(**asked)


def make_own_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=1e-3)


@pytest.mark.parametrize("own", [make_own_optimizer, torch.optim.RMSprop])
def test_an_own_optimizer_is_created_by_its_class_or_function(own: Any) -> None:
    training, params = VerifyTraining(1, own), list(nn.Linear(2, 2).parameters())
    (optimizer,) = make_verify_optimizers(params, training)
    assert isinstance(optimizer, torch.optim.RMSprop) and optimizer.param_groups[0]["params"] == params
    assert str(training) == f"ZeRO stage 1, {own.__name__}" and training.has_adaptive_optimizer


def test_a_function_that_returns_no_optimizer_raises() -> None:
    returns_list: Any = list
    with pytest.raises(ConfigError, match="returned a list instead of an optimizer"):
        make_verify_optimizers(nn.Linear(2, 2).parameters(), VerifyTraining(1, returns_list))


@pytest.mark.full
def test_an_own_optimizer_with_zero_equals_one_process(pool2: WorkerPool) -> None:
    report = verify(
        SmallModelFactory("gpt2"), RandomBatchFactory("GPT2LMHeadModel"), 2, 1, pool=pool2,
        training=VerifyTraining(1, make_own_optimizer),
    )  # fmt: skip
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "pipeline", "said"),
    [
        (
            VerifyTraining(1, gradient_accumulation_steps=2),
            VerifyPipeline(2),
            "pipe=2 does not support gradient_accumulation_steps=2",
        ),
        (VerifyTraining(1, frozen_pattern="h.0.attn"), None, "The pattern 'h.0.attn' in frozen"),
    ],
)
def test_options_that_the_model_does_not_support_raise(
    training: VerifyTraining, pipeline: VerifyPipeline | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said), WorkerPool(2) as pool:
        verify(
            SmallModelFactory("gpt2"),
            RandomBatchFactory("GPT2LMHeadModel"),
            1,
            2,
            training=training,
            pipeline=pipeline,
            pool=pool,
        )
