"""JsonLines writes the metrics of a run, also of a resumed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardformer.errors import ConfigError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.hook import Hook
from shardformer.training.hooks.checkpoint import Checkpoint
from shardformer.training.hooks.experiment_trackers import JsonLines
from shardformer.training.metrics_log import read_records
from shardformer.training.trainer import Trainer
from tests.trainer.hooks.runs import engine_of, pairs


def test_each_step_and_each_validation_has_a_line(tmp_path: Path) -> None:
    values = Trainer(engine_of(), [JsonLines(tmp_path)]).fit(epochs=2, validation=pairs(4))
    records = read_records(tmp_path)
    assert [(r.step, sorted(r.values)) for r in records[2:5]] == [
        (3, ["learning_rate", "loss"]),
        (3, ["validation/loss"]),
        (4, ["learning_rate", "loss"]),
    ]
    assert records[-2].values["loss"] == values["loss"]
    assert [r.epoch for r in records] == [0, 0, 0, 1, 1, 1, 1, 2]


def test_every_sets_the_steps_between_lines(tmp_path: Path) -> None:
    Trainer(engine_of(), [JsonLines(tmp_path, every=4)]).fit(steps=9)
    assert [r.step for r in read_records(tmp_path)] == [4, 8]


def test_a_resumed_run_removes_lines_of_lost_steps(tmp_path: Path) -> None:
    def hooks() -> list[JsonLines | Checkpoint]:
        return [JsonLines(tmp_path / "log"), Checkpoint(tmp_path / "saved", every_steps=2, at_end=False)]

    Trainer(engine_of(), hooks()).fit(steps=5)
    before = read_records(tmp_path / "log")
    Trainer(engine_of(), hooks()).fit(steps=7)
    records = read_records(tmp_path / "log")
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6, 7]
    assert records[:4] == before[:4]
    seconds = [r.seconds for r in records]
    assert seconds == sorted(seconds)


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    def run(context: ParallelContext) -> None:
        Trainer(engine_of(context), [JsonLines(tmp_path)]).fit(steps=2)

    run_as_threads(run, data=2)
    assert [r.step for r in read_records(tmp_path)] == [1, 2]


def test_the_layout_is_written_after_each_start_and_each_change(tmp_path: Path) -> None:
    class Reshards(Hook):
        def before_step(self, trainer: Trainer) -> None:
            if trainer.step == 4:
                trainer.engine.reshard({"data": 2, "zero_stage": 1})

    def run(context: ParallelContext) -> None:
        trainer = Trainer(engine_of(context), [Reshards(), JsonLines(tmp_path)])
        for steps in (2, 6):
            trainer.fit(steps=steps)

    run_as_threads(run, data=2)
    layouts = {r.step: r.layout for r in read_records(tmp_path)}
    assert layouts == {1: "data=2", 2: "", 3: "data=2", 4: "", 5: "data=2, zero_stage=1", 6: ""}


def test_an_invalid_number_of_steps_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="every=0"):
        JsonLines(tmp_path, every=0)
