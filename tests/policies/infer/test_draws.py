"""Models that draw random numbers in their forward pass are validated with identical draws."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import shardformer
from shardformer.comm.collectives import all_reduce
from shardformer.context_parallel.method import ContextParallelSizes
from shardformer.discovery.derive_policy import derive_policy
from shardformer.discovery.reduced_model import reduce_model
from shardformer.discovery.validation import validate_context_parallel
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.random_state import fork_rng_with_seed, get_rng_states
from tests.policies.toy import HIDDEN, Layer, ToyLM, toy_batch


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


OWN = torch.Generator()
DROPS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "rand": lambda x, p: x * (torch.rand(len(x), 1, 1) >= p) / (1 - p),
    "bernoulli_": lambda x, p: x * x.new_empty(len(x), 1, 1).bernoulli_(1 - p),
    "bernoulli": lambda x, p: x * torch.bernoulli(torch.full((len(x), 1, 1), 1 - p)),
    "dropout": lambda x, p: F.dropout(x, p),
    "noise": lambda x, p: x + p * torch.randn_like(x),
    "python": lambda x, p: x if random.random() >= p else x * 0,
    "numpy": lambda x, p: x if numpy.random.rand() >= p else x * 0,
    "own generator": lambda x, p: x * torch.randint(1, 99, (), generator=OWN),
}
REPRODUCIBLE = [name for name in DROPS if name != "own generator"]


class DropLayer(Layer):
    """Drops branches at random in training mode, optionally with a BatchNorm over all tokens."""

    rate = 0.3
    drop = "rand"

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        if batch_norm:
            self.norm2 = nn.BatchNorm1d(HIDDEN)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._maybe_drop(self.attn(self.norm1(x)))
        has_batch_norm = isinstance(self.norm2, nn.BatchNorm1d)
        y = self.norm2(x.transpose(1, 2)).transpose(1, 2) if has_batch_norm else self.norm2(x)
        return x + self._maybe_drop(self.mlp(y))

    def _maybe_drop(self, x: Tensor) -> Tensor:
        return DROPS[self.drop](x, self.rate) if self.training else x


def make_dropping_model(drop: str, rate: float, batch_norm: bool) -> ToyLM:
    torch.manual_seed(0)
    model = ToyLM()
    model.layers = nn.ModuleList(DropLayer(batch_norm) for _ in range(2))
    for layer in model.layers:
        layer.drop, layer.rate = drop, rate
    return model


@pytest.mark.slow
@pytest.mark.reduced(at_most=4)
@pytest.mark.parametrize(
    ("drop", "rate"), [*product(REPRODUCIBLE, [0.3]), ("rand", 0.8), ("numpy", 0.8), ("python", 0.8)]
)
def test_sequence_parallelism_is_refused_if_only_random_training_mixes_tokens(drop: str, rate: float) -> None:
    model = make_dropping_model(drop, rate, batch_norm=True)
    batch = {"ids": toy_batch(0)["ids"]}
    assert reduce_model(model, batch).model.training
    policy = derive_policy(model, batch=batch)
    assert policy.no_sequence_parallel is not None and policy.no_pipeline is None and policy.stack.blocks


@pytest.mark.slow
@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("drop", ["noise", "dropout", "python"])
def test_random_training_without_token_mixing_supports_all_layouts(drop: str) -> None:
    policy = derive_policy(make_dropping_model(drop, 0.3, batch_norm=False), batch={"ids": toy_batch(0)["ids"]})
    assert policy.no_sequence_parallel is None and policy.no_pipeline is None and "MLP" in str(policy)


@pytest.mark.slow
@pytest.mark.reduced(batch_norm=(True,))
@pytest.mark.parametrize("batch_norm", [False, True])
def test_context_parallelism_is_validated_in_random_training(batch_norm: bool) -> None:
    model = make_dropping_model("noise", 0.3, batch_norm)
    policy = derive_policy(model, batch={"ids": toy_batch(0)["ids"]})
    found = validate_context_parallel(model, policy, ContextParallelSizes(2, 1, False))
    assert (found.failure is not None) == batch_norm, found


@pytest.mark.slow
def test_a_policy_that_was_validated_in_eval_mode_only_has_a_note() -> None:
    model = make_dropping_model("rand", 0.3, batch_norm=False)
    batch = {"ids": toy_batch(0)["ids"]}
    assert "eval mode only" not in str(derive_policy(model, batch=batch).notes)
    for layer in model.layers:
        layer.drop = "own generator"
    assert "eval mode only" in str(derive_policy(model, batch=batch).notes)
