"""The average of the weights equals that of a plain loop under every layout, also after resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError, InputError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.hook import Hook, TrainerProtocol
from shardformer.training.hooks.checkpoint import Checkpoint
from shardformer.training.hooks.moving_average import MovingAverage
from shardformer.training.initialize import initialize
from shardformer.training.trainer import Trainer
from shardformer.weights.state_dict import full_state_dict
from tests.trainer.hooks.runs import Net, pairs


def engine_of(context: ParallelContext | None = None, kind: Any = torch.optim.AdamW, **parallel: Any) -> Any:
    model = Net(dropout=0.0)
    optimizer = kind(model.parameters(), lr=0.05)
    return initialize(
        model, optimizer, nn.MSELoss(), pairs(), context=context, parallel=ParallelConfig(**parallel), batch_size=4
    )


def averaged(engine: Any, average: MovingAverage) -> dict[str, Tensor]:
    with average.applied(engine):
        return {name: value.clone() for name, value in full_state_dict(engine.model).items()}


def expected(steps: int, kind: Any = torch.optim.AdamW, *, warmup: bool = True) -> dict[str, Tensor]:
    """Return the average of a plain loop with a decay of 0.9."""
    decay = 0.9
    engine = engine_of(kind=kind)
    average = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    for number in range(steps):
        if number % 3 == 0:
            batches = iter(engine.data)
        engine.train_step(next(batches))
        if number % 3 == 2:
            next(batches, None)
        kept = min(decay, (1 + number) / (10 + number)) if warmup else decay
        for name, p in engine.model.named_parameters():
            average[name] = kept * average[name] + (1 - kept) * p.detach()
    return average


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("warmup", [True, False])
def test_the_average_equals_that_of_a_plain_loop(kind: Any, warmup: bool) -> None:
    engine, average = engine_of(kind=kind), MovingAverage(0.9, warmup=warmup)
    Trainer(engine, [average]).fit(steps=7)
    own = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    torch.testing.assert_close(averaged(engine, average), expected(7, kind, warmup=warmup), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dict(engine.model.named_parameters()), own, rtol=0, atol=0)


@pytest.mark.parametrize("zero", [None, 1])
def test_a_skipped_step_does_not_update_the_average(zero: int | None) -> None:
    def run(steps: int) -> dict[str, Tensor]:
        model, (good, bad) = Net(dropout=0.0), pairs(2)
        engine = initialize(
            model, torch.optim.SGD(model.parameters(), lr=0.05), nn.MSELoss(), [good, (bad[0] * torch.inf, bad[1])],
            parallel=ParallelConfig(zero_stage=zero, max_grad_norm=1.0, on_nonfinite="skip"), batch_size=1,
            data_options={"shuffle": False},
        )  # fmt: skip
        average = MovingAverage(0.9, warmup=False)
        Trainer(engine, [average]).fit(steps=steps)
        assert engine.skipped == steps - 1
        return averaged(engine, average)

    torch.testing.assert_close(run(2), run(1), rtol=0, atol=0)


@pytest.mark.reduced(at_most=3)
@pytest.mark.parametrize(
    "how", [{}, {"zero_stage": 0}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}], ids=str
)
def test_every_layout_has_the_same_average(how: dict[str, Any]) -> None:
    def run(context: ParallelContext) -> dict[str, Tensor]:
        engine, average = engine_of(context, **how), MovingAverage(0.9)
        Trainer(engine, [average]).fit(steps=7, validation=pairs(4), validate_every=2)
        return averaged(engine, average)

    for found in run_as_threads(run, data=2):
        torch.testing.assert_close(found, expected(7), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_checkpoint_keeps_the_average_under_another_layout(kind: Any, tmp_path: Path) -> None:
    Trainer(engine_of(kind=kind), [MovingAverage(0.9), Checkpoint(tmp_path)]).fit(steps=4)

    def run(context: ParallelContext | None) -> dict[str, Tensor]:
        how = {} if context is None else {"zero_stage": 1}
        engine, average = engine_of(context, kind, **how), MovingAverage(0.9)
        Trainer(engine, [Checkpoint(tmp_path, at_end=False), average]).fit(steps=7)
        return averaged(engine, average)

    for found in (run(None), *run_as_threads(run, data=2)):
        torch.testing.assert_close(found, expected(7, kind), rtol=1e-5, atol=1e-6)


class Sees(Hook):
    """Hook that records the weights during and after a validation."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_validation_batch(self, trainer: TrainerProtocol, batch: Any) -> None:
        self.seen.append(next(trainer.engine.model.parameters()).detach().clone())

    def after_step(self, trainer: TrainerProtocol) -> None:
        self.seen.append(next(trainer.engine.model.parameters()).detach().clone())


def test_validation_uses_the_average() -> None:
    sees, engine, average = Sees(), engine_of(), MovingAverage(0.9)
    Trainer(engine, [sees, average]).fit(steps=2, validation=pairs(4))
    *_, trained, tried = sees.seen
    assert not torch.equal(trained, tried)
    assert torch.equal(trained, next(engine.model.parameters()))
    assert torch.equal(tried, averaged(engine, average)["layers.0.weight"])


def test_parameters_without_an_average_raise() -> None:
    engine, average = engine_of(), MovingAverage(0.9)
    Trainer(engine, [average]).fit(steps=1)
    engine.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(InputError, match=r"shape \(3,\)"), average.applied(engine):
        pass


@pytest.mark.parametrize("options", [{"decay": 1.0}, {"decay": True}, {"every": 0}])
def test_invalid_arguments_raise(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        MovingAverage(**options)
