"""GradientMonitor records the gradient norm, warns of spikes, and ends diverged runs on all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError, InputError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.hooks.gradient_monitor import GradientMonitor
from shardformer.training.initialize import initialize
from shardformer.training.trainer import Trainer
from tests.trainer.hooks.runs import Net, engine_of, pairs


def test_the_gradient_norm_equals_that_of_the_unsharded_model() -> None:
    torch.manual_seed(0)
    model = Net(dropout=0.0)
    engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), nn.MSELoss(), pairs(), batch_size=10)
    found = Trainer(engine, [GradientMonitor()]).fit(steps=1)
    plain = Net(dropout=0.0)
    inputs, targets = (torch.stack(each) for each in zip(*pairs()))
    nn.MSELoss()(plain(inputs), targets).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), math.inf)
    assert found["grad_norm"] == pytest.approx(float(norm))
    assert not engine.takes_grad_norm


@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(), ParallelConfig(zero_stage=1), ParallelConfig(zero_stage=2, on_nonfinite="ignore")],
    ids=str,
)
def test_data_ranks_have_the_same_norm(parallel: ParallelConfig) -> None:
    def run(context: ParallelContext | None) -> dict[str, float]:
        model = Net(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = initialize(
            model,
            optimizer,
            nn.MSELoss(),
            pairs(),
            context=context,
            batch_size=4,
            parallel=parallel if context else None,
        )
        return Trainer(engine, [GradientMonitor()]).fit(steps=3)

    alone = run(None)
    for found in run_as_threads(run, data=2):
        assert found["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-5)


def test_a_spike_warns() -> None:
    data = [*pairs(20), (torch.full((4,), 1e4), torch.zeros(1))]
    with pytest.warns(UserWarning, match=r"gradient norm .* of step 21 is .* times the median"):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        options = {"shuffle": False}
        engine = initialize(model, optimizer, nn.MSELoss(), data, batch_size=1, data_options=options)
        Trainer(engine, [GradientMonitor()]).fit(epochs=1)


def broken(context: ParallelContext | None = None, **how: Any) -> Trainer:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(torch.full((4,), math.nan), torch.zeros(1))] * 8
    engine = initialize(
        model, optimizer, nn.MSELoss(), data, context=context, batch_size=4, parallel=ParallelConfig(**how)
    )
    return Trainer(engine, [GradientMonitor(patience=3)])


def test_a_nonfinite_step_raises_with_the_parameter_names() -> None:
    with pytest.raises(InputError, match=r"step 1 is nan, with non-finite gradients in weight, bias"):
        broken().fit(steps=5)


def test_repeated_nonfinite_steps_end_the_run_on_all_ranks() -> None:
    def run(context: ParallelContext | None) -> int:
        trainer = broken(context, on_nonfinite="skip")
        with pytest.raises(InputError, match=r"at step 3, .* NaN or infinite for 3 steps in a row"):
            trainer.fit(steps=9)
        assert trainer.values["skipped_steps"] == 3
        return trainer.step

    assert run(None) == 3
    assert run_as_threads(run, data=2) == [3, 3]


@pytest.mark.parametrize("options", [{"factor": 1}, {"factor": True}, {"patience": 0}])
def test_invalid_arguments_raise(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        GradientMonitor(**options)


def test_a_checkpoint_keeps_the_median() -> None:
    first, second = GradientMonitor(), GradientMonitor()
    Trainer(engine_of(), [first]).fit(steps=4)
    second.load_state(first.state())
    assert second.state() == first.state()
    assert len(first.state()["norms"]) == 4
