"""The learning rate of each step of a run, and how many steps there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardformer.runs.config import ScheduleTable
from shardformer.runs.data import data_of
from shardformer.runs.run import num_steps_of
from shardformer.runs.updates import scheduler_of
from tests.runs.files import config, labelled, write_rows


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0]),
        ({"warmup": 2}, [0.5, 1.0, 1.0, 1.0]),
        ({"name": "linear"}, [1.0, 0.75, 0.5, 0.25]),
        ({"name": "linear", "warmup": 0.5, "final": 0.5}, [0.5, 1.0, 1.0, 0.75]),
        ({"name": "cosine", "warmup": 2, "final": 0.2}, [0.5, 1.0, 1.0, 0.6]),
    ],
    ids=str,
)
def test_the_learning_rate_of_each_step_is_the_share_of_its_schedule(
    table: dict[str, Any], expected: list[float]
) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = scheduler_of(ScheduleTable(**table), 4)(optimizer)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.1 * share for share in expected])


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 6), (True, 4)])
def test_the_steps_of_a_run_are_those_of_the_batches_that_it_trains_on(
    drop_last: bool, steps: int, tmp_path: Path
) -> None:
    data = {"train": write_rows(tmp_path, labelled(12)), "batch_size": 5, "drop_last": drop_last}
    made = config(tmp_path, "bert", data, model={"task": "classification"}, training={"epochs": 2})
    assert num_steps_of(made, data_of(made)) == steps
