"""Weights that are all equal, such as zeros of an output layer, do not hide errors from the validation of policies."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardformer
from shardformer.discovery.derive_policy import derive_policy
from shardformer.discovery.reduced_model import PERTURBATION, ReferenceGradients, copy_as_reduced_model
from shardformer.errors import ConfigError, PolicyError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.policies.roles import MLP
from shardformer.verify.verification import _run_job_in_pool
from tests.policies.infer.test_given import ATTENTION, FEED_FORWARD, WRONG, refusals, sharded, table
from tests.policies.toy import ToyLM
from tests.test_bad_input import refused

D, HEADS, VOCAB = 24, 4, 53
IDS = {"ids": torch.arange(12).view(2, 6)}


class InterleavedAttention(nn.Module):
    """The rows of ``qkv`` are interleaved by head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (h.transpose(1, 2) for h in self.qkv(x).unflatten(-1, (-1, 3, D // HEADS)).unbind(3))
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, shifts_tokens: bool) -> None:
        super().__init__()
        self.norm, self.attn, self.shifts_tokens = nn.LayerNorm(D), InterleavedAttention(), shifts_tokens
        self.up, self.down, self.gate = nn.Linear(D, 4 * D), nn.Linear(4 * D, D), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gate * self.attn(self.norm(x))
        y = (x + x.roll(1, 1)) / 2 if self.shifts_tokens else x
        return x + self.down(F.gelu(self.up(y)))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, *zeros: str, shifts_tokens: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB, bias=False)
        self.layers = nn.ModuleList(Block(shifts_tokens) for _ in range(2))
        for name, param in self.named_parameters():
            if name.endswith(zeros):
                nn.init.zeros_(param)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


ZEROS = {"output layer": ("head.weight",), "gates": ("gate", "out.weight")}


@pytest.mark.slow
@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("zeros", ZEROS.values(), ids=ZEROS)
def test_zeros_do_not_change_the_derived_policy(zeros: tuple[str, ...]) -> None:
    model = Model(*zeros)
    before = copy.deepcopy(model.state_dict())
    assert str(derive_policy(model, IDS)) == str(derive_policy(Model(), IDS))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items()), "the model is unchanged"


def train(model: nn.Module) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1.0), []
    for step in range(3):
        ids = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_a_model_with_a_zero_output_layer_trains_as_on_one_process() -> None:
    models = [Model("head.weight").double() for _ in range(3)]
    found = run_as_threads(lambda c: train(shardformer.shard_model(models[c.tensor.rank], context=c)), tensor=2)
    assert found == [pytest.approx(train(models[2]), abs=1e-12)] * 2


@pytest.mark.slow
def test_zeros_do_not_hide_modules_that_mix_tokens() -> None:
    def shard(context: ParallelContext) -> None:
        model = Model("head.weight", shifts_tokens=True)
        with pytest.raises(ConfigError, match="does not support enable_sequence_parallelism=True"):
            shardformer.shard_model(model, context=context, enable_sequence_parallelism=True)

    run_as_threads(shard, tensor=2)


@pytest.mark.parametrize("paths", [["head"], ["layers.0.mlp.fc2", "layers.1.mlp.fc2", "head"]])
def test_zeros_do_not_hide_errors_of_a_policy_of_the_user(paths: list[str]) -> None:
    make, policy, _ = WRONG["features that are mixed"]

    def make_with_zeros() -> nn.Module:
        model = make()
        for path in paths:
            nn.init.zeros_(model.get_parameter(f"{path}.weight")).requires_grad_(False)
        return model

    refused(refusals(make_with_zeros, policy), PolicyError, "The policy does not match the model", "the MLP 'mlp'")


class GatedToyLM(ToyLM):
    """A buffer of zeros hides the attention modules."""

    def __init__(self, hides_all: bool = False) -> None:
        super().__init__()
        self.register_buffer("gate", torch.zeros(()))
        self.hides_all = hides_all

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + self.gate * layer.attn(layer.norm1(x))
            x = x + layer.mlp(layer.norm2(x))
        logits: Tensor = self.head(self.norm(x))
        return logits * self.gate if self.hides_all else logits


@pytest.mark.slow
def test_zero_gradients_are_reported_as_not_validated() -> None:
    for report in sharded(GatedToyLM, table(ATTENTION, FEED_FORWARD)):
        assert "was not validated on a copy of the model: the gradient of layers.0.attn.k.bias is exactly 0" in (
            " ".join(report.split())
        )
    policy = derive_policy(GatedToyLM(), IDS)
    assert [type(block) for block in policy.stack.blocks] == [MLP]  # type: ignore[union-attr]
    assert "the gradient of layers.0.attn." in str(policy.notes)  # type: ignore[attr-defined]


def test_outputs_of_zeros_cannot_be_validated() -> None:
    with pytest.raises(PolicyError, match="All outputs of GatedToyLM are exactly 0"):
        copy_as_reduced_model(GatedToyLM(hides_all=True))
    for report in sharded(lambda: GatedToyLM(hides_all=True), table(ATTENTION, FEED_FORWARD)):
        assert "All outputs of GatedToyLM are exactly 0, so a comparison would not find errors" in (
            " ".join(report.split())
        )


def test_verify_refuses_losses_of_zero() -> None:
    report = SimpleNamespace(losses=[(0.0, 0.0)], model="ToyLM", steps=1)
    pool: Any = SimpleNamespace(run=lambda *_: [report])
    with pytest.raises(ConfigError, match="The loss of ToyLM is exactly 0 in all 1 steps"):
        _run_job_in_pool(pool, None)  # type: ignore[arg-type]  # not used by this pool


def test_noise_keeps_other_values_and_the_sign_of_scales() -> None:
    model = ToyLM()
    nn.init.constant_(model.norm.weight, -1e-6)
    copied = copy_as_reduced_model(model).model
    assert torch.equal(copied.get_parameter("embed.weight"), model.embed.weight.double())
    assert (copied.get_parameter("norm.weight") < 0).all()
    assert (copied.get_parameter("layers.0.norm1.weight") > 1).all()
    assert 0 < copied.get_parameter("norm.bias").abs().max() < 5 * PERTURBATION
    assert not ReferenceGradients.from_model(copied, lambda m: m(torch.arange(6)[None])).zero_gradient_patterns
