"""Values that the TensorBoard hook writes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from shardformer.errors import ConfigError
from shardformer.training.hooks.checkpoint import Checkpoint
from shardformer.training.hooks.experiment_trackers import TensorBoard
from shardformer.training.trainer import Trainer
from tests.trainer.hooks.runs import engine_of, pairs


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_each_value_is_written_with_its_step(tmp_path: Path) -> None:
    values = Trainer(engine_of(), [TensorBoard(tmp_path, every=2)]).fit(steps=6, validation=pairs(4))
    found = read(tmp_path)
    assert sorted(found) == ["learning_rate", "loss", "validation/loss"]
    assert [step for step, _ in found["loss"]] == [2, 4, 6]
    assert found["loss"][-1][1] == pytest.approx(values["loss"])
    assert [step for step, _ in found["validation/loss"]] == [3, 6]


def test_lost_steps_are_hidden(tmp_path: Path) -> None:
    def hooks() -> list[TensorBoard | Checkpoint]:
        return [TensorBoard(tmp_path / "log"), Checkpoint(tmp_path / "saved", every_steps=2, at_end=False)]

    Trainer(engine_of(), hooks()).fit(steps=5)
    Trainer(engine_of(), hooks()).fit(steps=7)
    assert [step for step, _ in read(tmp_path / "log")["loss"]] == [1, 2, 3, 4, 5, 6, 7]


def test_a_missing_tensorboard_raises_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(ConfigError, match=r"shardformer\[tensorboard\]"):
        TensorBoard(tmp_path)
