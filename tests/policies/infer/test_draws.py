"""Models that draw random numbers in their forward pass are validated with identical draws."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import pytest
import torch
import transformers
from torch import Tensor

import shardformer
from shardformer.comm.collectives import all_reduce
from shardformer.discovery.derive_policy import derive_policy
from shardformer.discovery.reduced_model import reduce_model
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.random_state import fork_rng_with_seed, get_rng_states
from tests.policies.toy import ToyLM, toy_batch


class Masked(ToyLM):
    """Masks random positions in each forward pass, also in eval mode."""

    how = "torch"

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.how == "torch":
            kept = torch.rand(ids.shape) > 0.5
        elif self.how == "numpy":
            kept = torch.from_numpy(numpy.random.rand(*ids.shape)) > 0.5
        else:
            kept = torch.tensor([random.random() > 0.5 for _ in range(ids.numel())]).view(ids.shape)
        x = x * kept[..., None]
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@pytest.mark.reduced(at_most=1)
@pytest.mark.slow
@pytest.mark.parametrize("how", ["torch", "numpy", "python"])
def test_a_policy_is_derived_for_a_model_with_random_masks(how: str) -> None:
    torch.manual_seed(0)
    plain = Masked().double()
    plain.how = how
    ids = toy_batch(0)["ids"]
    policy = derive_policy(plain, batch={"ids": ids})
    assert "Attention" in str(policy) and "MLP" in str(policy)
    with fork_rng_with_seed(5):
        expected = plain(ids).detach()

    def check(context: ParallelContext) -> None:
        model = shardformer.shard_model(copy.deepcopy(plain), copy.deepcopy(policy), context=context).eval()
        with fork_rng_with_seed(5):
            torch.testing.assert_close(model(ids).detach(), expected)

    run_as_threads(check, tensor=2, one_at_a_time=True)


@pytest.mark.slow
def test_a_masked_autoencoder_is_sharded_with_and_without_noise_in_the_batch() -> None:
    sizes = dict(image_size=16, patch_size=8, hidden_size=24, intermediate_size=96, num_hidden_layers=1)
    sizes |= dict(num_attention_heads=4, decoder_hidden_size=24, decoder_intermediate_size=96)
    sizes |= dict(decoder_num_hidden_layers=1, decoder_num_attention_heads=4)
    torch.manual_seed(0)
    plain: Any = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**sizes)).double().train()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    batches = {"drawn": {"pixel_values": images}, "given": {"pixel_values": images, "noise": torch.rand(2, 4)}}
    expected = {}
    for name, batch in batches.items():
        with fork_rng_with_seed(3):
            expected[name] = plain(**batch).loss.item()

    def check(context: ParallelContext) -> None:
        model: Any = shardformer.shard_model(copy.deepcopy(plain), context=context)
        assert sum(p.numel() for p in model.parameters()) < 0.75 * plain.num_parameters()
        for name, batch in batches.items():
            with fork_rng_with_seed(3):
                assert model(**batch).loss.item() == pytest.approx(expected[name], rel=1e-9)

    run_as_threads(check, tensor=2, one_at_a_time=True)


def test_threads_in_turn_have_separate_random_states() -> None:
    def draw(context: ParallelContext) -> list[float]:
        numbers = []
        for _ in range(3):
            numbers += [torch.rand(()).item(), float(numpy.random.rand()), random.random()]
            all_reduce(torch.ones(1), context.tensor)
        return numbers

    with fork_rng_with_seed(1):
        expected = [f() for _ in range(3) for f in (lambda: torch.rand(()).item(), numpy.random.rand, random.random)]
    with fork_rng_with_seed(1):
        first, second = run_as_threads(draw, tensor=2, one_at_a_time=True)
    assert first == second == pytest.approx(expected)


def test_deriving_a_policy_keeps_the_random_states() -> None:
    model = Masked()
    before = get_rng_states()
    reduced = reduce_model(model, {"ids": toy_batch(0)["ids"]})
    reduced.forward_fn(reduced.model)
    after = get_rng_states()
    assert torch.equal(before[0][0], after[0][0]) and before[2] == after[2]
    assert all(numpy.array_equal(a, b) for a, b in zip(before[1], after[1], strict=True))
