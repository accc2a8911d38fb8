"""Weights & Biases and MLflow receive the metrics and the configuration, and a resumed run continues its record."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from shardformer.errors import ConfigError
from shardformer.training.hook import TrainerProtocol
from shardformer.training.hooks import Checkpoint, Mlflow, Wandb
from shardformer.training.trainer import Trainer
from tests.integrations.process import IntegrationProcess
from tests.trainer.hooks.runs import engine_of, pairs

CONFIG = {"model": {"name": "small", "config": {"layers": 2}}, "seed": 3}


class Recorded(Wandb):
    """Keeps what the library recorded until the run ended."""

    summary: dict[str, Any]
    recorded: dict[str, Any]

    def after_train(self, trainer: TrainerProtocol) -> None:
        self._writer.run.log(
            {}, commit=True
        )  # the values of the last step, which otherwise wait for the end of the run
        self.summary, self.recorded = dict(self._writer.run.summary), dict(self._writer.run.config)
        super().after_train(trainer)


def train_with_wandb(folder: Path) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    import wandb

    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    hooks = [Recorded(folder, "tests", "first", CONFIG) for _ in range(2)]
    for hook, steps in zip(hooks, (2, 4), strict=True):
        Trainer(engine_of(), [hook, Checkpoint(folder / "saved")]).fit(steps=steps, validation=pairs(4))
    assert wandb.run is None
    assert len([*folder.glob("wandb/offline-run-*/*.wandb")]) == 2
    return [hook.state()["run_id"] for hook in hooks], hooks[1].summary, hooks[1].recorded


def train_with_mlflow(folder: Path) -> tuple[str, str, dict[str, Any], list[tuple[int, float]]]:
    import mlflow

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    mlflow.set_tracking_uri(f"file://{folder}/mlruns")
    ids = []
    expected = Trainer(engine_of(), []).fit(steps=4, validation=pairs(4))
    for steps in (2, 4):
        hook = Mlflow("tests", "first", CONFIG | {"hooks": {}})
        found = Trainer(engine_of(), [hook, Checkpoint(folder / "saved")]).fit(steps=steps, validation=pairs(4))
        ids.append(str(hook.state()["run_id"]))
    assert found["loss"] == expected["loss"] and found["validation/loss"] == expected["validation/loss"]
    client = mlflow.MlflowClient()
    losses = client.get_metric_history(ids[0], "loss")
    return ids[0], ids[1], dict(client.get_run(ids[0]).data.params), [(each.step, each.value) for each in losses]


@pytest.mark.full
def test_wandb_continues_the_record_of_a_resumed_run(integrations: IntegrationProcess, tmp_path: Path) -> None:
    (((first, second), summary, config),) = integrations(1).run(train_with_wandb, tmp_path)
    assert first == second
    assert {"loss", "validation/loss"} <= summary.keys() and summary["_step"] == 4
    assert config == CONFIG


@pytest.mark.full
def test_mlflow_continues_the_record_of_a_resumed_run(integrations: IntegrationProcess, tmp_path: Path) -> None:
    ((first, second, params, losses),) = integrations(1).run(train_with_mlflow, tmp_path)
    assert first == second
    assert params == {"model.name": "small", "model.config.layers": "2", "seed": "3", "hooks": "{}"}
    assert [step for step, _ in losses] == [1, 2, 3, 4]


@pytest.mark.parametrize("hook", [Wandb, Mlflow])
def test_a_missing_tracker_raises_with_the_extra(hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = hook.__name__.lower()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"shardformer\[{name}\]"):
        hook(tmp_path) if hook is Wandb else hook()
