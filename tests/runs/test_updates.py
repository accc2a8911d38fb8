"""Learning rates, number of steps, and weight decay of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from shardformer.errors import ConfigError
from shardformer.train_command.build import build_optimizer, build_scheduler, count_steps
from shardformer.train_command.config_schema import OptimizerTable, ScheduleTable
from shardformer.train_command.datasets import load_data
from tests.runs.files import config, labelled, write_rows


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0]),
        ({"warmup": 2}, [0.5, 1.0, 1.0, 1.0]),
        ({"name": "linear"}, [1.0, 0.75, 0.5, 0.25]),
        ({"name": "linear", "warmup": 0.5, "min_lr_rate": 0.5}, [0.5, 1.0, 1.0, 0.75]),
        ({"name": "cosine", "warmup": 2, "min_lr_rate": 0.2}, [0.5, 1.0, 1.0, 0.6]),
    ],
    ids=str,
)
def test_learning_rate_of_each_step(table: dict[str, Any], expected: list[float]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = build_scheduler(ScheduleTable(**table), 4)(optimizer)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.1 * share for share in expected])


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 6), (True, 4)])
def test_the_number_of_steps_equals_the_number_of_batches(drop_last: bool, steps: int, tmp_path: Path) -> None:
    data = {"train": write_rows(tmp_path, labelled(12)), "batch_size": 5, "drop_last": drop_last}
    made = config(tmp_path, "bert", data, model={"task": "classification"}, training={"epochs": 2})
    assert count_steps(made, load_data(made)) == steps


def grouped(model: Any, **table: Any) -> dict[float, set[str]]:
    """Return the parameter names by weight decay."""
    names = {id(param): name for name, param in model.named_parameters()}
    optimizer = build_optimizer(OptimizerTable(**table))(model)(list(model.parameters()))
    return {group["weight_decay"]: {names[id(param)] for param in group["params"]} for group in optimizer.param_groups}


@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", "BertForMaskedLM", "LlamaForCausalLM", "T5ForConditionalGeneration", "ViTModel"]
)
def test_biases_and_norms_do_not_decay_as_in_transformers(name: str) -> None:
    kind = getattr(transformers, name)
    with torch.device("meta"):
        model = kind(kind.config_class())
    found = grouped(model, weight_decay=0.1)
    excluded = {name for name, _ in model.named_parameters()} - decayed_by_transformers(model)
    assert found == {0.1: decayed_by_transformers(model), 0.0: excluded}
    assert excluded


def decayed_by_transformers(model: nn.Module) -> set[str]:
    trainer: Any = transformers.Trainer
    here = {name for name, _ in model.named_parameters()}
    return here & set(trainer.get_decay_parameter_names(None, model))


def test_norms_with_other_names_and_classes_do_not_decay() -> None:
    class RmsNorm(nn.RMSNorm):
        pass

    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.GroupNorm(1, 2), RmsNorm(2))
    assert grouped(model, weight_decay=0.1)[0.1] == {"0.weight"}


def test_decay_biases_and_norms_decays_all_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    assert grouped(model, weight_decay=0.1, decay_biases_and_norms=True) == {0.1: set(dict(model.named_parameters()))}
    assert list(grouped(model, name="SGD")) == [0]
    with pytest.raises(
        ConfigError, match=r"decay_biases_and_norms = true has no effect, because SGD has no weight_decay"
    ):
        build_optimizer(OptimizerTable(name="SGD", decay_biases_and_norms=True))
