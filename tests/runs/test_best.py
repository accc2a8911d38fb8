"""The checkpoint with the best validation metric is kept, and loaded and exported at the end of the run."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shardformer.checkpoint.retention import CheckpointRetention
from shardformer.errors import ConfigError
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.train_command.config_schema import TrainConfig
from shardformer.train_command.run import build_trainer_and_data, run_training
from shardformer.train_command.trained_model import find_saved_model
from shardformer.training.hook import Hook, TrainerProtocol
from shardformer.training.hooks.checkpoint import Checkpoint
from shardformer.training.metrics_log import read_metrics_records
from shardformer.training.trainer import Trainer
from tests.runs.files import SMALL, config, write_text
from tests.trainer.hooks.runs import engine_of, pairs, weights_of

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
STEPS, EVERY = 14, 2


def overfitted(where: Path, steps: int = STEPS, **tables: Any) -> TrainConfig:
    """A run whose validation loss gets worse before its end."""
    data = {"train": write_text(where, times=6), "validation": str(where / "validation.txt"), "batch_size": 8}
    (where / "validation.txt").write_text("a lazy dog jumps and sleeps over the fox. then it runs. " * 3)
    best = tables.pop("best", {"best": "load", "retention": 1})
    hooks = {"progress": False, "throughput": False, "checkpoint": best}
    training = {"steps": steps, "validate_every": EVERY, "export": True}
    model = {"config": SMALL["gpt2"] | NO_DROPOUT}
    tables = {"training": training, "optimizer": {"lr": 3e-2}, "model": model, "hooks": hooks, **tables}
    return config(where, "gpt2", data, **tables)


def best_step(made: TrainConfig) -> int:
    losses = {
        r.step: r.values["validation/loss"]
        for r in read_metrics_records(made.output_folder)
        if "validation/loss" in r.values
    }
    step = min(losses, key=lambda step: losses[step])
    assert len(losses) == STEPS // EVERY and EVERY <= step < STEPS, losses
    return step


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return dict(transformers.AutoModelForCausalLM.from_pretrained(folder / "model").state_dict())


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


@pytest.mark.reduced(one_in=2, first=0, at_most=1)
@pytest.mark.parametrize(
    "parallel", [{"data": 2, "zero_stage": 1}, {"tensor": 2}, {"pipe": 2}, {"data": 2, "zero_stage": 3}], ids=str
)
def test_the_weights_of_the_best_step_are_exported(parallel: dict[str, Any], pool2: WorkerPool, tmp_path: Path) -> None:
    made = overfitted(tmp_path, parallel=parallel)
    pool2.run(run_training, made)
    step = best_step(made)
    assert steps_in(made.output_folder / "checkpoints") == [f"step-{step:08}", f"step-{STEPS:08}"]
    only = overfitted(tmp_path, step, parallel=parallel, folder=str(tmp_path / "only"))
    pool2.run(run_training, only)
    torch.testing.assert_close(exported(made.output_folder), exported(only.output_folder), rtol=0, atol=0)
    found = find_saved_model(str(made.output_folder))
    assert found.checkpoint == made.output_folder / "checkpoints" / f"step-{step:08}"


def stop_after(made: TrainConfig, steps: int) -> None:
    """Train the first steps of a longer run."""
    trainer, data = build_trainer_and_data(made, made.layout, ParallelContext.from_sizes({}))
    trainer.fit(steps=steps, validation=data.validation_dataset, validate_every=EVERY)
    del trainer
    gc.collect()  # releases the lock of the folder


def test_a_resumed_run_keeps_the_best_checkpoint_under_another_layout(
    pool2: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = overfitted(tmp_path, folder=str(tmp_path / "whole"))
    run_training(whole)
    output, step = capsys.readouterr().out, best_step(whole)
    assert f"Trained up to step {STEPS} in" in output
    assert f"/step-{step:08}, validation/loss " in output and "whole/model, of the best checkpoint" in output
    cut = overfitted(tmp_path)
    stop_after(cut, step + 1)
    assert steps_in(cut.output_folder / "checkpoints") == [f"step-{step:08}", f"step-{step + 1:08}"]
    other = overfitted(tmp_path, parallel={"tensor": 2})
    pool2.run(run_training, other)
    assert steps_in(other.output_folder / "checkpoints") == [f"step-{step:08}", f"step-{STEPS:08}"]
    torch.testing.assert_close(exported(cut.output_folder), exported(whole.output_folder), rtol=0, atol=0)
    pool2.run(run_training, other)  # the run is complete: the export is the same
    torch.testing.assert_close(exported(cut.output_folder), exported(whole.output_folder), rtol=0, atol=0)


def test_a_best_checkpoint_that_is_only_kept_is_not_exported(tmp_path: Path) -> None:
    kept, plain = overfitted(tmp_path, best={"best": "keep", "retention": 1}), overfitted(tmp_path, best={})
    run_training(kept)
    step = best_step(kept)
    assert steps_in(kept.output_folder / "checkpoints") == [f"step-{step:08}", f"step-{STEPS:08}"]
    last = overfitted(tmp_path, best=plain.hooks["checkpoint"], folder=str(tmp_path / "last"))
    run_training(last)
    torch.testing.assert_close(exported(kept.output_folder), exported(last.output_folder), rtol=0, atol=0)
    assert steps_in(last.output_folder / "checkpoints") == [f"step-{STEPS:08}"]


class Values(Hook):
    """Hook that replaces a validation metric by a sequence of values."""

    def __init__(self, values: list[float], name: str = "validation/loss") -> None:
        self.values, self.name = list(values), name
        self.weights: dict[int, Any] = {}

    def after_validation(self, trainer: TrainerProtocol) -> None:
        trainer.values[self.name] = self.values.pop(0)
        self.weights[trainer.step] = weights_of(trainer.engine)


def trained(folder: Path, values: list[float], metric: str = "validation/loss", **options: Any) -> Any:
    """Return the checkpoint hook, the engine, and the weights after each step, with a validation after each step."""
    engine, hook = engine_of(), Checkpoint(folder, best="load", metric=metric, **options)
    said = Values(values, metric)
    Trainer(engine, [said, hook]).fit(steps=engine.steps + len(values), validation=pairs(3), validate_every=1)
    return hook, engine, said.weights


@pytest.mark.parametrize(
    ("values", "options", "step"),
    [
        ([3, 1, 2, 1], {}, 2),
        ([3, math.nan, 2, 4], {}, 3),
        ([math.nan, 5, math.inf], {}, 2),
        ([1, 2, 3], {}, 1),
        ([0.1, 0.7, 0.7, 0.2], {"metric": "validation/f1", "mode": "max"}, 2),
        ([0.3, 0.2], {"metric": "validation/perplexity"}, 2),
    ],
    ids=str,
)
def test_the_engine_has_the_best_weights_after_fit(
    values: list[float], options: dict[str, Any], step: int, tmp_path: Path
) -> None:
    hook, engine, weights = trained(tmp_path, values, retention=1, **options)
    assert (hook.best_step, hook.best_value, hook.trained_steps, engine.steps) == (
        step,
        values[step - 1],
        len(values),
        step,
    )
    torch.testing.assert_close(weights_of(engine), weights[step], rtol=0, atol=0)
    kept = {f"step-{step:08}", f"step-{len(values):08}"}
    assert {*steps_in(tmp_path)} == kept


def test_a_checkpoint_of_another_metric_is_not_compared(tmp_path: Path) -> None:
    trained(tmp_path, [1, 2])
    hook = Checkpoint(tmp_path, best="keep", metric="validation/f1", mode="max")
    said = Values([0.5], "validation/f1")
    Trainer(engine_of(), [said, hook]).fit(steps=3, validation=pairs(3), validate_every=1)
    assert (hook.best_value, hook.best_step) == (0.5, 3)


def test_an_evaluation_outside_fit_changes_nothing(tmp_path: Path) -> None:
    hook, engine, _ = trained(tmp_path, [2, 1, 3])
    Trainer(engine, [Values([0.1]), hook]).evaluate(pairs(3))
    assert (hook.best_value, hook.best_step) == (1, 2)


def test_a_missing_best_checkpoint_is_reported(tmp_path: Path) -> None:
    import shutil

    trained(tmp_path, [1, 2])
    shutil.rmtree(tmp_path / "step-00000001")
    hook = Checkpoint(tmp_path, best="load")
    with pytest.warns(UserWarning, match=r"step-00000001 no longer exists"):
        Trainer(engine_of(), [Values([5]), hook]).fit(steps=3, validation=pairs(3), validate_every=1)
    assert (hook.best_value, hook.best_step) == (5, 3)


def test_a_metric_that_is_never_a_number_is_reported(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="No best checkpoint was loaded"):
        trained(tmp_path, [math.nan])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metric": "validation/f1"}, "also requires best='keep'"),
        ({"mode": "max"}, "also requires best='keep'"),
        ({"metric": "validation/f1", "best": "keep"}, "requires mode='min' or mode='max'"),
        ({"mode": "more", "best": "load"}, "mode"),
        ({"best": True}, "Checkpoint.best"),
    ],
    ids=str,
)
def test_invalid_arguments_raise(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        Checkpoint(tmp_path, **options)


def test_a_run_without_validation_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Checkpoint requires validation data"):
        Trainer(engine_of(), [Checkpoint(tmp_path, best="load")]).fit(steps=1)


def test_retention_may_name_steps(tmp_path: Path) -> None:
    keep = CheckpointRetention(last=1, steps=(2,))
    Trainer(engine_of(), [Checkpoint(tmp_path, every_steps=1, retention=keep)]).fit(steps=5)
    assert steps_in(tmp_path) == ["step-00000002", "step-00000005"]
