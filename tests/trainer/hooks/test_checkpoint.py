"""A run that is saved, stopped and restarted equals an uninterrupted run."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardformer.checkpoint.retention import CheckpointRetention, list_checkpoints_with_save_times
from shardformer.errors import ConfigError, ShardFormerError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.hook import Hook, TrainerProtocol
from shardformer.training.hooks.checkpoint import Checkpoint
from shardformer.training.hooks.early_stopping import EarlyStopping
from shardformer.training.trainer import Trainer
from tests.disk.locks import killed, lock_of, parent
from tests.trainer.hooks.runs import engine_of, pairs, weights_of


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step-"))


def trained(folder: Path, steps: int, context: ParallelContext | None = None, **options: Any) -> Any:
    """Return the final weights, the last loss, and the step at which the run started."""
    engine = engine_of(context)
    torch.manual_seed(7)
    began: list[int] = []

    class Notes(Hook):
        def before_train(self, trainer: TrainerProtocol) -> None:
            began.append(trainer.step)

    values = Trainer(engine, [Checkpoint(folder, **options), Notes()]).fit(steps=steps)
    return weights_of(engine), values["loss"], began[0]


@pytest.mark.parametrize("in_background", [True, False])
def test_resuming_within_an_epoch_is_bitwise_exact(tmp_path: Path, in_background: bool) -> None:
    expected, loss, _ = trained(tmp_path / "whole", 8)
    trained(tmp_path / "cut", 5, in_background=in_background)
    found, found_loss, began = trained(tmp_path / "cut", 8, in_background=in_background)
    assert began == 5
    assert found_loss == loss
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_data_ranks_resume_at_the_same_step(tmp_path: Path) -> None:
    expected = run_as_threads(lambda c: trained(tmp_path / "whole", 8, c), data=2)
    run_as_threads(lambda c: trained(tmp_path / "cut", 4, c), data=2)
    found = run_as_threads(lambda c: trained(tmp_path / "cut", 8, c), data=2)
    assert [began for *_, began in found] == [4, 4]
    torch.testing.assert_close([f[:2] for f in found], [e[:2] for e in expected], rtol=0, atol=0)


def test_checkpoints_are_saved_by_steps_and_old_ones_removed(tmp_path: Path) -> None:
    trained(tmp_path, 7, every_steps=2, retention=2, at_end=False)
    assert steps_in(tmp_path) == ["step-00000004", "step-00000006"]


def test_earlier_argument_names_work_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(
        DeprecationWarning, match=r"Checkpoint\((folder|keep)=\) is deprecated. Use (directory|retention)="
    ):
        hook = Checkpoint(folder=tmp_path, keep=2)  # type: ignore[call-arg]
    assert (hook.directory, hook.retention) == (tmp_path, CheckpointRetention(2))
    with pytest.warns(DeprecationWarning, match=r"Checkpoint\.folder is deprecated. Use directory"):
        assert hook.folder == tmp_path  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"the three newest checkpoints, pass retention=3"):
        Checkpoint(tmp_path, retention=0)


def test_checkpoints_are_saved_by_time(tmp_path: Path) -> None:
    trained(tmp_path, 3, every_minutes=1e-9, retention=None, at_end=False)
    assert len(steps_in(tmp_path)) == 3
    trained(tmp_path / "long", 3, every_minutes=10)
    assert steps_in(tmp_path / "long") == ["step-00000003"]


def test_checkpoints_are_saved_after_epochs(tmp_path: Path) -> None:
    trained(tmp_path, 7, every_epoch=True, at_end=False)
    assert steps_in(tmp_path) == ["step-00000003", "step-00000006"]


class Kills(Hook):
    """Hook that sends SIGTERM to its own process in the second step."""

    def after_step(self, trainer: TrainerProtocol) -> None:
        if trainer.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)


def test_a_signal_saves_a_checkpoint_and_ends_the_run(tmp_path: Path) -> None:
    expected, *_ = trained(tmp_path / "whole", 6)
    engine = engine_of()
    torch.manual_seed(7)
    trainer = Trainer(engine, [Kills(), Checkpoint(tmp_path / "cut")])
    trainer.fit(steps=6)
    assert trainer.stopped_by == "a signal"
    assert trainer.step == 2
    assert steps_in(tmp_path / "cut") == ["step-00000002"]
    found, *_ = trained(tmp_path / "cut", 6)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_on_signal_false_saves_no_checkpoint(tmp_path: Path) -> None:
    trainer = Trainer(engine_of(), [Kills(), Checkpoint(tmp_path, on_signal=False)])
    trainer.fit(steps=6)
    assert (trainer.step, steps_in(tmp_path)) == (2, [])


def test_the_default_saves_every_ten_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 10_000, 400))
    monkeypatch.setattr("shardformer.training.hooks.checkpoint.time.monotonic", lambda: next(now))
    hook = Checkpoint(tmp_path)
    saved: list[int] = []
    trainer = Trainer(engine_of(), [])
    monkeypatch.setattr(trainer, "save", lambda: saved.append(1))
    hook.before_train(trainer)
    hook.after_step(trainer)
    assert saved == []
    hook.after_step(trainer)
    assert saved == [1]
    Checkpoint(tmp_path, every_minutes=math.inf).after_step(trainer)
    assert saved == [1]
    monkeypatch.setattr(Trainer, "is_first", False)
    hook.after_step(trainer)
    assert saved == [1], "the clock of the first rank decides"


def test_hook_states_are_restored_by_name(tmp_path: Path) -> None:
    def run(steps: int, hooks: list[Hook]) -> None:
        Trainer(engine_of(), hooks).fit(steps=steps, validation=pairs(4), validate_every=1)

    stopping, again = EarlyStopping(patience=9), EarlyStopping(patience=9)
    run(3, [stopping, Checkpoint(tmp_path)])
    best = stopping.best
    run(4, [Hook(), Checkpoint(tmp_path), again])
    assert best is not None
    assert again.best is not None and again.best <= best
    assert again.without_progress + stopping.without_progress <= 3
    with pytest.warns(UserWarning, match="states of hooks that Trainer lacks: EarlyStopping"):
        run(4, [Checkpoint(tmp_path)])


def test_a_new_run_raises_if_the_folder_has_checkpoints(tmp_path: Path) -> None:
    trained(tmp_path, 2)
    with pytest.raises(ConfigError, match="resume=False"):
        trained(tmp_path, 2, resume=False)
    assert list_checkpoints_with_save_times(tmp_path)


@pytest.mark.parametrize("options", [{"every_steps": 0}, {"every_minutes": 0}, {"every_minutes": True}])
def test_invalid_arguments_raise(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"every"):
        Checkpoint(tmp_path, **options)


def test_a_second_job_raises_on_all_ranks_before_training(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    lock_of(parent(), tmp_path)
    before = sorted(tmp_path.rglob("*"))

    def do(context: ParallelContext) -> str:
        engine = engine_of(context)
        with pytest.raises(ConfigError) as error:
            Trainer(engine, [Checkpoint(tmp_path)]).fit(steps=3)
        assert engine.steps == 0
        return str(error.value)

    for message in run_as_threads(do, data=2):
        assert f"is in use by process {os.getppid()} of someone on a-host" in message
    assert sorted(tmp_path.rglob("*")) == before
    lock_of(killed(), tmp_path)
    assert trained(tmp_path, 2)[2] == 1


@pytest.mark.parametrize("what", ["hook", "extra", "scheduler"])
def test_values_that_cannot_be_saved_raise_on_all_ranks_before_training(what: str, tmp_path: Path) -> None:
    class Remembers(Hook):
        def state(self) -> Any:
            return {"when": Path("a")} if what == "hook" else None

    def do(context: ParallelContext) -> tuple[str, int]:
        engine = engine_of(context)
        trainer = Trainer(engine, [Checkpoint(tmp_path), Remembers()])
        if what == "scheduler":
            engine.scheduler = SimpleNamespace(state_dict=lambda: {"at": Path("a")}, step=lambda: None)
        elif what == "extra":
            trainer.extra = {"at": Path("a")}
        with pytest.raises(ShardFormerError) as caught:
            trainer.fit(steps=2)
        return str(caught.value), engine.steps

    for message, steps in run_as_threads(do, data=2):
        assert "which cannot be saved in a checkpoint" in message
        assert steps == 0
    assert steps_in(tmp_path) == []
