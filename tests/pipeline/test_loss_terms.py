"""Loss terms other than means over tokens are never counted once per micro-batch: they are weighted or raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import shardformer
from shardformer.errors import ConfigError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext

Loss = Callable[[Tensor, Tensor], Tensor]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)).double()


def batch(size: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, size, 4, generator=generator, dtype=torch.float64).unbind()
    return x, y


def in_place(change: Callable[[Tensor, Tensor], object]) -> Loss:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        found = F.mse_loss(output, target)
        change(found, output)
        return found

    return loss


ADDED = in_place(lambda loss, output: loss.add_(0.01 * output.square().mean()))
REFUSED: dict[str, Loss] = {
    "added": ADDED,
    "added out of place": lambda output, target: F.mse_loss(output, target) + 0.01 * output.square().mean(),
    "constant": in_place(lambda loss, output: loss.add_(0.5)),
    "sum": in_place(lambda loss, output: loss.sub_(output.abs().sum())),
    "squared": in_place(lambda loss, output: loss.pow_(2)),
    "exponential": in_place(lambda loss, output: loss.exp_()),
    "root": in_place(lambda loss, output: loss.sqrt_()),
    "copied": in_place(lambda loss, output: loss.copy_(output.square().mean())),
    "data": in_place(lambda loss, output: loss.data.add_(1.0)),
    "other than the mean beside it": lambda output, target: (F.mse_loss(output, target), output.abs().mean())[1],
    "over pairs": lambda output, target: F.mse_loss(output, target) + 0.1 * (output @ output.T).exp().mean(),
}
EXACT: dict[str, Loss] = {
    "scaled": in_place(lambda loss, output: loss.mul_(3.0)),
    "divided": in_place(lambda loss, output: loss.div_(2.0)),
    "two means": lambda output, target: F.mse_loss(output, target).mul_(2.0).add_(F.l1_loss(output, target)),
}


def trained(loss_fn: Loss, context: ParallelContext | None = None, **options: Any) -> tuple[float, Tensor]:
    """Return (loss, weights after one step)."""
    made, (x, y) = model(), batch()
    if context is not None:
        x, y = (t.chunk(context.data.size)[context.data.rank] for t in (x, y))
    weight = options.pop("loss_weight", None)
    engine = shardformer.initialize(
        made, torch.optim.SGD(made.parameters(), lr=0.1), loss_fn,
        parallel=options, context=context, loss_weight=weight,
    )  # fmt: skip
    loss = engine.train_step((x, y)).item()
    return loss, nn.utils.parameters_to_vector(engine.model.parameters()).detach()


def alone(loss_fn: Loss) -> tuple[float, Tensor]:
    made, (x, y) = model(), batch()
    loss = loss_fn(made(x), y)
    loss.backward()
    torch.optim.SGD(made.parameters(), lr=0.1).step()
    return loss.item(), nn.utils.parameters_to_vector(made.parameters()).detach()


def assert_same(one: tuple[float, Tensor], other: tuple[float, Tensor]) -> None:
    assert one[0] == pytest.approx(other[0], abs=1e-12)
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [*REFUSED, *EXACT])
def test_one_micro_batch_equals_full_batch(name: str) -> None:
    loss_fn = {**REFUSED, **EXACT}[name]
    if name != "data":  # torch computes its gradient from the value of the loss
        assert_same(trained(loss_fn), alone(loss_fn))


@pytest.mark.parametrize("name", REFUSED)
def test_other_terms_in_loss_raise(name: str) -> None:
    with pytest.raises(ConfigError, match=r"its mean losses (sum to|by) .*loss_weight"):
        trained(REFUSED[name], micro_batches=2)


@pytest.mark.parametrize("name", REFUSED)
def test_other_terms_raise_in_evaluation(name: str) -> None:
    engine = shardformer.initialize(model(), None, REFUSED[name], parallel={"micro_batches": 2})
    with pytest.raises(ConfigError, match=r"its mean losses (sum to|by) "):
        engine.evaluate(batch())


@pytest.mark.parametrize("name", EXACT)
def test_sum_of_means_modified_in_place_is_exact(name: str) -> None:
    expected = alone(EXACT[name])
    assert_same(trained(EXACT[name], micro_batches=3), expected)
    engine = shardformer.initialize(model(), None, EXACT[name], parallel={"micro_batch_size": 4})
    assert float(engine.evaluate(batch())) == pytest.approx(expected[0], abs=1e-12)


def test_other_terms_raise_on_all_data_ranks_and_sum_of_means_is_exact() -> None:
    def refused(context: ParallelContext) -> None:
        with pytest.raises(ConfigError, match="average_loss_over='ranks'"):
            trained(ADDED, context)

    run_as_threads(refused, data=2, one_at_a_time=True)
    expected = alone(EXACT["two means"])
    for found in run_as_threads(lambda context: trained(EXACT["two means"], context), data=2, one_at_a_time=True):
        assert_same(found, expected)


def test_ranks_average_keeps_loss_of_each_data_rank() -> None:
    (x, y), made = batch(), model()
    losses = [ADDED(made(x[rows]), y[rows]) for rows in (slice(3), slice(3, 6))]
    (sum(losses, torch.zeros(())) / 2).backward()
    torch.optim.SGD(made.parameters(), lr=0.1).step()
    expected = sum(loss.item() for loss in losses) / 2, nn.utils.parameters_to_vector(made.parameters()).detach()
    for found in run_as_threads(
        lambda context: trained(ADDED, context, average_loss_over="ranks"), data=2, one_at_a_time=True
    ):
        assert_same(found, expected)


def test_loss_weight_scales_all_terms() -> None:
    expected = alone(ADDED)
    assert_same(trained(ADDED, micro_batch_size=4, loss_weight=lambda part: len(part["input"])), expected)

    def do(context: ParallelContext) -> tuple[float, Tensor]:
        return trained(ADDED, context, micro_batch_size=2, loss_weight=lambda part: len(part["input"]))

    for found in run_as_threads(do, data=2, one_at_a_time=True):
        assert_same(found, expected)


def factor_of_batch(output: Tensor, target: Tensor) -> Tensor:
    """One mean, with a different factor on each rank."""
    return F.mse_loss(output, target) * (1 + output.detach().abs().max())


def larger(output: Tensor, target: Tensor) -> Tensor:
    """The mean that enters the loss depends on the rank."""
    means = F.mse_loss(output, target), F.mse_loss(output.roll(1, 0), target)
    return means[int(target[0, 0] > 0)] * 1.0


@pytest.mark.parametrize("loss_fn", [factor_of_batch, larger])
def test_different_factors_between_data_ranks_raise_on_all(loss_fn: Loss) -> None:
    signs = {int(batch()[1][row, 0] > 0) for row in (0, 3)}
    assert loss_fn is factor_of_batch or len(signs) == 2, "another mean on each of the two ranks"

    def do(context: ParallelContext) -> None:
        with pytest.raises(ConfigError, match="differs between data-parallel ranks"):
            trained(loss_fn, context)

    run_as_threads(do, data=2, one_at_a_time=True)


def mixtral() -> Any:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    routers = dict(num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.5)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, **routers, num_key_value_heads=2)
    ).train()


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (4, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.slow
def test_router_loss_raises_or_is_averaged_by_loss_weight() -> None:
    def train(**options: Any) -> float:
        made = mixtral()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        weight = options.pop("loss_weight", None)
        engine = shardformer.initialize(made, optimizer, parallel=options, loss_weight=weight)
        return float(engine.train_step(tokens()))

    made = mixtral()
    assert train() == pytest.approx(made(**tokens()).loss.item(), abs=1e-5)
    with pytest.raises(ConfigError, match="router's balancing loss"):
        train(micro_batches=2)
    parts = [{name: x[rows] for name, x in tokens().items()} for rows in (slice(2), slice(2, 4))]
    expected = sum(made(**part).loss.item() for part in parts) / 2
    assert train(micro_batches=2, loss_weight=lambda part: part["labels"].numel()) == pytest.approx(expected, abs=1e-5)
