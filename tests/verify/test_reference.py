"""``average_loss_over`` selects the reference loss with data ranks: mean over shards, or over the full batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.verify.comparison import Report
from shardformer.verify.small_models import SmallModelFactory
from shardformer.verify.train_both import VerifyPipeline
from shardformer.verify.training_options import VerifyTraining
from shardformer.verify.verification import verify
from tests.pools import WorkerPools
from tests.verify.test_drawn import Listener, sounds


def experts() -> nn.Module:
    """The router's loss is a product of two means over its tokens."""
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=127,
            hidden_size=48,
            intermediate_size=70,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            num_local_experts=4,
            output_router_logits=True,
            router_aux_loss_coef=0.1,
        )
    )


def tokens(step: int) -> dict[str, Tensor]:
    """Every sample has the same number of labels."""
    ids = torch.randint(5, 127, (4, 9), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


def found(pools: WorkerPools, model_fn: Any, reference: str, tensor: int = 1, **options: Any) -> Report:
    pool = pools(2 * tensor)
    return verify(
        model_fn, tokens, tensor, 2, 2, training=VerifyTraining(average_loss_over=reference), pool=pool, **options
    )


@pytest.mark.reduced(tensor=(1,))
@pytest.mark.parametrize("tensor", [1, 2])
def test_an_expert_balancing_loss_differs_between_shards_and_full_batch(pools: WorkerPools, tensor: int) -> None:
    parts = found(pools, experts, "ranks", tensor)
    assert parts.passed, str(parts)
    whole = found(pools, experts, "tokens", tensor)
    assert not whole.passed
    assert whole.loss.used > 1000 and whole.gradient.used > 1000, "far out of bounds"


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("reference", ["ranks", "tokens"])
def test_with_equal_label_counts_the_means_are_equal(pools: WorkerPools, reference: str) -> None:
    report = found(pools, SmallModelFactory("gpt2"), reference, tensor=2)
    assert report.passed, str(report)
    assert ("reference loss over the full batch" in str(report)) == (reference == "tokens")


def test_micro_batches_are_compared_with_the_full_batch(pools: WorkerPools) -> None:
    report = verify(
        SmallModelFactory("gpt2").with_min_layers(4),
        tokens,
        1,
        2,
        2,
        pipeline=VerifyPipeline(2),
        training=VerifyTraining(average_loss_over="tokens"),
        pool=pools(4),
    )
    assert report.passed, str(report)


def unlike(step: int) -> dict[str, Tensor]:
    batch = tokens(step)
    batch["labels"][0, 3:] = -100
    return batch


def test_different_label_counts_differ_from_the_full_batch(pool2: WorkerPool) -> None:
    assert verify(SmallModelFactory("gpt2"), unlike, 1, 2, 1, pool=pool2).passed
    assert not verify(
        SmallModelFactory("gpt2"), unlike, 1, 2, 1, training=VerifyTraining(average_loss_over="tokens"), pool=pool2
    ).passed


def test_a_pipeline_averages_over_the_tokens_of_all_data_ranks(pool4: WorkerPool) -> None:
    training = VerifyTraining(average_loss_over="tokens")
    model_fn, pipeline = SmallModelFactory("gpt2").with_min_layers(4), VerifyPipeline(2)
    assert verify(model_fn, unlike, 1, 2, 1, pipeline=pipeline, training=training, pool=pool4).passed


def test_an_unknown_reference_raises() -> None:
    with pytest.raises(ConfigError, match=r"average_loss_over='token'.*Did you mean 'tokens'"):
        VerifyTraining(average_loss_over="token")


def test_randomness_over_the_full_batch_raises(pool2: WorkerPool) -> None:
    with pytest.raises(ConfigError, match="a second forward pass with another random seed"):
        verify(Listener("Wav2Vec2"), sounds, 1, 2, training=VerifyTraining(average_loss_over="tokens"), pool=pool2)
