"""Tensor ranks draw the same random numbers outside blocks, whatever the script seeds."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

import shardformer
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, LayerStack
from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory


def seed_by_rank(rank: int) -> None:
    torch.manual_seed(rank)
    numpy.random.seed(rank)
    random.seed(rank)


def speech(pipe: int) -> list[float]:
    """Return the encoder inputs of two steps of a speech model, which masks frames with NumPy's random state."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    context = ParallelContext.from_default_process_group({"pipe": pipe, "tensor": 2})
    torch.manual_seed(0)
    nothing = dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0)
    config = Wav2Vec2Config(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        conv_dim=(16, 16),
        conv_kernel=(4, 3),
        conv_stride=(4, 2),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.3,
        mask_time_length=2,
        layerdrop=0.0,
        final_dropout=0.0,
        **nothing,
    )
    model = shardformer.shard_model(Wav2Vec2ForCTC(config).train(), context=context)
    batch = {"input_values": torch.randn(2, 400), "labels": torch.randint(1, 32, (2, 6))}
    seed_by_rank(torch.distributed.get_rank())
    sums: list[float] = []
    model.wav2vec2.encoder.register_forward_pre_hook(lambda module, args: sums.append(float(args[0].square().sum())))
    step = shardformer.Pipeline(model, micro_batches=1, loss_weight=lambda part: 1.0).step if pipe > 1 else None
    for _ in range(2):
        step(batch) if step is not None else model(**batch)
    return sums


def test_numpy_masks_are_identical_on_tensor_ranks(pool2: WorkerPool) -> None:
    first, second = pool2.run(speech, 1)
    assert first == pytest.approx(second, rel=1e-6)
    assert abs(first[0] - first[1]) > 1e-3, "the two steps draw other numbers"


@pytest.mark.full
def test_numpy_masks_are_identical_on_pipeline_stages(pool4: WorkerPool) -> None:
    first, second, *_ = pool4.run(speech, 2)
    assert first == pytest.approx(second, rel=1e-6)
    assert abs(first[0] - first[1]) > 1e-3


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())  # type: ignore[no-any-return]


class Noisy(nn.Module):
    """Adds noise between its layers with functional calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": TwoLinears()}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x * random.random() + float(numpy.random.rand()) + torch.rand(())
            x = x + layer.get_submodule("mlp")(x)
        return x


class NoisyPolicy(RolePolicy):
    stack = LayerStack("layers", [MLP("mlp", "up", "down")])


def noise() -> list[list[float]]:
    context = ParallelContext.from_default_process_group({"tensor": 2})
    torch.manual_seed(0)
    model = shardformer.shard_model(Noisy().train(), NoisyPolicy(), context=context)
    x, found = torch.randn(2, 3, 8), []
    for step in range(3):
        seed_by_rank(10 * step + context.tensor.rank)
        found.append(model(x).flatten().tolist())
    return found


def test_seeding_ranks_differently_changes_nothing(pool2: WorkerPool) -> None:
    first, second = pool2.run(noise)
    for a, b in zip(first, second, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    assert first[0] != first[1]


def drawn_beside(pipe: int) -> list[float]:
    """Return the losses of a model without randomness while other code on the last rank draws random numbers."""
    context = ParallelContext.from_default_process_group({"pipe": pipe, "tensor": 2})
    torch.manual_seed(0)
    model = shardformer.shard_model(SmallModelFactory("llama")().train(), context=context)
    if context.rank == torch.distributed.get_world_size() - 1:
        layers = [m for m in model.modules() if isinstance(m, LlamaMLP) and next(m.parameters(), None) is not None]
        layers[-1].register_forward_hook(lambda *_: random.random() and None)
    step = shardformer.Pipeline(model, micro_batches=2).step if pipe > 1 else lambda batch: model(**batch).loss
    return [float(step(RandomBatchFactory("LlamaForCausalLM", batch_size=4)(0))) for _ in range(3)]


@pytest.mark.parametrize("pipe", [1, 2])
def test_drawing_outside_the_model_does_not_block_other_ranks(pool4: WorkerPool, pipe: int) -> None:
    losses = pool4.run(drawn_beside, pipe)
    for theirs in losses:
        assert theirs == pytest.approx(losses[0], rel=1e-6)
