"""Schedulers whose `step` takes an epoch or a metric are called as in a hand-written loop, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardformer
from shardformer.errors import ConfigError
from shardformer.training.trainer import Trainer

DATA = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), i % 2) for i in range(16)]


class EpochScheduler:
    """Has the methods of timm's schedulers, and sets the rate from the numbers of epochs and updates."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.calls = optimizer, list[tuple[str, int]]()

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.calls.append(("epoch", epoch))

    def step_update(self, num_updates: int) -> None:
        self.calls.append(("update", num_updates))

    def state_dict(self) -> dict[str, Any]:
        return {}


class WithoutUpdates(EpochScheduler):
    step_update: Any = property()  # no attribute of this name


class StepNumberScheduler(EpochScheduler):
    def step(self, number: int) -> None:  # type: ignore[override]
        raise AssertionError


def make(scheduler: Any, **options: Any) -> Any:
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return shardformer.initialize(
        model, optimizer, nn.CrossEntropyLoss(), train_data=DATA, batch_size=8, scheduler=scheduler, **options
    )


@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize("kind", [EpochScheduler, WithoutUpdates])
def test_schedulers_that_take_an_epoch_get_the_number_of_finished_epochs(kind: Any, every: str) -> None:
    engine = make(kind, scheduler_every=every)
    for _ in range(2):
        for batch in engine.data:
            engine.train_step(batch)
    expected = [("update", 1), ("update", 2), ("epoch", 1), ("update", 3), ("update", 4), ("epoch", 2)]
    assert engine.scheduler.calls == [call for call in expected if kind is EpochScheduler or call[0] == "epoch"]


@pytest.mark.parametrize("is_function", [False, True])
def test_a_scheduler_with_another_required_argument_is_refused(is_function: bool) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ConfigError, match=r"StepNumberScheduler.step requires number, but the engine can only pass"):
        make(StepNumberScheduler if is_function else StepNumberScheduler(optimizer))


def plateau(**options: Any) -> Any:
    return lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **options)


def test_plateau_follows_the_validation_loss_of_fit_but_not_of_evaluate() -> None:
    engine = make(plateau(patience=0, threshold=1e9, threshold_mode="abs"))
    trainer = Trainer(engine, hooks=[])
    for _ in range(3):
        trainer.evaluate(DATA)
    assert engine.scheduler.last_epoch == 0 and engine.optimizers[0].param_groups[0]["lr"] == 0.1
    losses: list[Tensor] = []
    original = engine.scheduler.step
    engine.scheduler.step = lambda metrics: (losses.append(metrics), original(metrics))
    trainer.fit(epochs=2, validation=DATA)
    assert losses[-1] == trainer.values["validation/loss"] and len(losses) == 2
    assert engine.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)


def test_plateau_without_validation_or_with_mode_max_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau changes the learning rate after a validation, but fit"):
        Trainer(make(plateau()), hooks=[]).fit(epochs=1)
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau has mode='max', but the trainer passes it the valid"):
        Trainer(make(plateau(mode="max")), hooks=[]).fit(epochs=1, validation=DATA)
