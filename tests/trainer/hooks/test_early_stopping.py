"""A run ends on all ranks when its validation metric stops improving, also after resuming."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shardformer.errors import ConfigError, InputError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.hook import Hook, TrainerProtocol
from shardformer.training.hooks.early_stopping import EarlyStopping
from shardformer.training.initialize import initialize
from shardformer.training.trainer import Trainer

PAIRS = [(torch.full((2,), float(i)), torch.ones(1)) for i in range(4)]


class Says(Hook):
    """Hook that replaces the validation loss by a sequence of values."""

    def __init__(self, values: Sequence[float], name: str = "validation/loss") -> None:
        self.values, self.name = list(values), name

    def after_validation(self, trainer: TrainerProtocol) -> None:
        trainer.values[self.name] = self.values.pop(0)


def steps_of(values: Sequence[float], hook: EarlyStopping, context: ParallelContext | None = None) -> tuple[int, Any]:
    """Return the number of steps with a validation after each, and the reason of the stop."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = initialize(model, optimizer, nn.MSELoss(), PAIRS, context=context, batch_size=2)
    trainer = Trainer(engine, [Says(values, hook.metric), hook])
    trainer.fit(steps=len(values), validation=PAIRS, validate_every=1)
    return trainer.step, trainer.stopped_by


@pytest.mark.parametrize(
    ("options", "values", "steps"),
    [
        ({"patience": 2}, [3, 2, 2, 2, 1, 1], 4),
        ({"patience": 2}, [3, 2, 2.5, 1, 2, 1, 1], 6),
        ({"patience": 1, "mode": "max"}, [1, 2, 1, 3], 3),
        ({"patience": 1, "min_delta": 0.5}, [3, 2, 1.6, 1], 3),
        ({"patience": 2}, [math.nan, math.nan, 1], 2),
        ({"patience": 1, "metric": "validation/accuracy", "mode": "max"}, [0.5, 0.4, 0.9], 2),
    ],
    ids=str,
)
def test_the_run_ends_after_patience_validations(options: dict[str, Any], values: list[float], steps: int) -> None:
    made, why = steps_of(values, EarlyStopping(**options))
    assert made == steps
    assert "did not improve" in why


def test_an_improving_run_continues() -> None:
    assert steps_of([5, 4, 3, 2], EarlyStopping(patience=1)) == (4, None)


def test_all_ranks_stop_together() -> None:
    found = run_as_threads(lambda c: steps_of([1, 1, 1, 1], EarlyStopping(patience=2), c), data=2)
    assert [steps for steps, _ in found] == [3, 3]


def test_a_checkpoint_keeps_the_count() -> None:
    first, second = EarlyStopping(patience=2), EarlyStopping(patience=2)
    steps_of([1, 2], first)
    second.load_state(first.state())
    assert (second.best, second.without_progress) == (1, 1)
    assert steps_of([2, 0], second)[0] == 1


def test_an_unknown_metric_raises() -> None:
    with pytest.raises(InputError, match=r"'validation/los'.*Did you mean 'validation/loss'"):
        hook = EarlyStopping("validation/los")
        Trainer(_engine(), [hook]).fit(steps=1, validation=PAIRS, validate_every=1)


def test_a_run_without_validation_data_raises() -> None:
    engine = _engine()
    with pytest.raises(ConfigError, match="EarlyStopping requires validation data"):
        Trainer(engine, [EarlyStopping()]).fit(steps=1)
    assert engine.steps == 0


def _engine() -> Any:
    model = nn.Linear(2, 1)
    return initialize(model, torch.optim.SGD(model.parameters(), lr=0.01), nn.MSELoss(), PAIRS, batch_size=2)


@pytest.mark.parametrize("options", [{"mode": "less"}, {"patience": 0}, {"patience": True}, {"min_delta": -1.0}])
def test_invalid_arguments_raise(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        EarlyStopping(**options)
