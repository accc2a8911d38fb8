"""bf16 without master weights: small updates take effect, and ranks round replicated parameters identically."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.offload.host import OffloadConfig
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory, compute_model_loss
from shardformer.weights.state_dict import full_state_dict
from shardformer.zero.mixed_precision import MixedPrecision, generate_random_bits, stochastic_round
from shardformer.zero.shard_optimizer import shard_optimizer
from tests.optim.test_offload import check_resumes


def test_stochastic_rounding_is_unbiased() -> None:
    value = 1 + 2**-7 * 0.3  # three tenths of the way to the next number
    wide = torch.full((20_000,), value)
    rounded = stochastic_round(wide, generate_random_bits(wide, 0, 1, 1)).float()
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    assert float((rounded > 1).float().mean()) == pytest.approx(0.3, abs=0.02)
    odd = torch.tensor([torch.inf, -torch.inf, 0.0, -1.5, 3e38])
    assert torch.equal(stochastic_round(odd, generate_random_bits(odd, 0, 1, 1))[:4].float(), odd[:4])
    assert bool(stochastic_round(torch.tensor([torch.nan]), torch.tensor([9], dtype=torch.int32)).isnan())


def test_random_bits_do_not_depend_on_the_layout() -> None:
    whole = generate_random_bits(torch.zeros(100), 0, 3, 7)
    assert torch.equal(whole[40:], generate_random_bits(torch.zeros(60), 40, 3, 7))
    for other in (generate_random_bits(torch.zeros(100), 0, 4, 7), generate_random_bits(torch.zeros(100), 0, 3, 8)):
        assert int((whole == other).sum()) < 3


def drift(masters: str, stage: int = 1) -> list[float]:
    """Return the change of a weight of 1.0 by 400 updates below the last bit. Without rounding it would be 0.1."""
    models = [nn.Linear(64, 8, bias=False) for _ in range(2)]

    def train(context: ParallelContext) -> float:
        model = models[context.rank]
        with torch.no_grad():
            model.weight.fill_(1.0)
        made = torch.optim.SGD(model.parameters(), lr=2.5e-4)
        ours = shard_optimizer(
            model, made, stage=stage, precision=MixedPrecision("bf16", master_weights=masters), context=context
        )
        for _ in range(400):
            model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
            ours.step()
            ours.zero_grad()
        weight = full_state_dict(model)["weight"] if stage == 3 else model.weight
        return 1 - float(weight.detach().float().mean())

    return run_as_threads(train, data=2)


@pytest.mark.reduced(at_most=1, keep=("kahan-0.002-3",))
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(("masters", "bound"), [("fp32", 2e-3), ("kahan", 2e-3), ("stochastic", 3e-3)])
def test_small_updates_are_not_lost(masters: str, bound: float, stage: int) -> None:
    assert drift(masters, stage) == pytest.approx([0.1, 0.1], abs=bound)


def test_round_to_nearest_loses_small_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardformer.zero.mixed_precision.stochastic_round", lambda wide, bits: wide.bfloat16())
    assert drift("stochastic") == [0.0, 0.0]


@pytest.mark.parametrize("masters", ["kahan", "stochastic"])
def test_tensor_ranks_round_replicated_parameters_identically(masters: str) -> None:
    """Shards of an odd vocabulary differ in length, so the norms have different positions in the buckets."""
    torch.manual_seed(0)
    models = [SmallModelFactory("llama")() for _ in range(2)]

    def train(context: ParallelContext) -> dict[str, Tensor]:
        model = shard_model(models[context.rank], context=context)
        how = MixedPrecision("bf16", master_weights=masters)
        ours = shard_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), precision=how)
        for step in range(3):
            ours.backward(compute_model_loss(model, RandomBatchFactory(DEFAULT_HEAD["llama"], batch_size=2)(step)))
            ours.step()
            ours.zero_grad()
        ends = [place.stop for shard in ours.shards for place in shard.places]
        return {"": torch.tensor(ends)} | {n: p.detach().clone() for n, p in model.named_parameters() if "norm" in n}

    first, second = run_as_threads(train, tensor=2)
    assert not torch.equal(first.pop(""), second.pop(""))
    assert first and all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("masters", ["kahan", "stochastic"])
def test_rounded_training_resumes_exactly(masters: str) -> None:
    check_resumes(precision=MixedPrecision("bf16", master_weights=masters))


@pytest.mark.parametrize(
    ("precision", "offload", "said"),
    [
        (lambda: MixedPrecision("bf16", master_weights="none"), None, "but got 'none'"),
        (
            lambda: MixedPrecision("fp16", master_weights="kahan"),
            None,
            "With fp16 weights, master_weights must be 'fp32', but got 'kahan'",
        ),
        (lambda: MixedPrecision("bf16", master_weights="kahan"), "cpu", "offload='cpu' requires fp32 master weights"),
    ],
)
def test_unsupported_master_weights_are_rejected(precision: Any, offload: OffloadConfig | None, said: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigError) as error:
        shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), precision=precision(), offload=offload)
    assert said in str(error.value)
