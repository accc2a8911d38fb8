"""Random numbers that a model draws outside its blocks are the same in the sharded and the plain model."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.verify.small_models import LANGUAGE_MODEL, RandomBatchFactory, SmallModelFactory
from shardformer.verify.train_both import VerifyPipeline
from shardformer.verify.verification import verify
from tests.pools import WorkerPools

LLAMA_BATCHES = RandomBatchFactory(LANGUAGE_MODEL["llama"])
SEQUENCE = {"enable_sequence_parallelism": True}
CONVOLUTIONS = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 3)}
SMALL = {
    **CONVOLUTIONS, "vocab_size": 32, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
    "intermediate_size": 70, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Listener:
    """A small random audio model that masks inputs in training, as its default config specifies."""

    kind: str

    def __call__(self) -> nn.Module:
        config = getattr(transformers, f"{self.kind}Config")(**SMALL, mask_time_length=3, mask_time_min_masks=2)
        model: nn.Module = getattr(transformers, f"{self.kind}ForCTC")(config)
        return model


def sounds(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    values = torch.randn(4, 1200, generator=generator)
    return {"input_values": values, "labels": torch.randint(1, 32, (4, 5), generator=generator)}


@pytest.mark.full
@pytest.mark.reduced(one_in=6)
@pytest.mark.parametrize("kind", ["Wav2Vec2", "Hubert", "WavLM", "SEW", "UniSpeech", "Data2VecAudio"])
def test_masks_of_sounds_are_identical(pool2: WorkerPool, kind: str) -> None:
    """NumPy draws a mask per sample (SpecAugment)."""
    report = verify(Listener(kind), sounds, tensor=2, steps=2, pool=pool2)
    assert report.passed, str(report)


@pytest.mark.full
@pytest.mark.reduced(one_in=2, first=1)
@pytest.mark.parametrize("config", [{}, SEQUENCE])
def test_each_data_rank_draws_the_plain_models_numbers_for_its_shard(
    pools: WorkerPools, config: dict[str, Any]
) -> None:
    report = verify(Listener("Wav2Vec2"), sounds, tensor=2, data=2, steps=2, config=config, pool=pools(4))
    assert report.passed, str(report)


def drawn(draw: str, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Draws a number that matters after the first step, like a router with two equally good experts (PhiMoE)."""
    number = {"torch": lambda: torch.rand(()), "python": random.random}[draw]()
    loss: Tensor = model(**batch).loss
    is_first = batch["input_ids"].sum() == LLAMA_BATCHES(0)["input_ids"].sum()
    return torch.where(is_first, loss, loss * number)


@pytest.mark.parametrize("draw", ["torch", "python"])
def test_random_numbers_between_blocks_are_identical(pool2: WorkerPool, draw: str) -> None:
    report = verify(SmallModelFactory("llama"), LLAMA_BATCHES, tensor=2, loss_fn=partial(drawn, draw), pool=pool2)
    assert report.passed, str(report)


def by_chance(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss * os.urandom(1)[0]
    return loss


def test_a_model_with_unseeded_randomness_raises(pool2: WorkerPool) -> None:
    with pytest.raises(ConfigError, match=r"a second forward pass with the same random seed"):
        verify(SmallModelFactory("gpt2"), RandomBatchFactory("GPT2LMHeadModel"), loss_fn=by_chance, pool=pool2)


def test_randomness_over_the_full_batch_raises_if_it_is_split(pool2: WorkerPool) -> None:
    with pytest.raises(ConfigError, match=r"a second forward pass with another random seed"):
        verify(Listener("Wav2Vec2"), sounds, tensor=1, pipeline=VerifyPipeline(2), pool=pool2)
