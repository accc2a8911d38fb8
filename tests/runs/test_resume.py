"""A resumed run keeps its schedule and optimizer, reports changes, and rejects changes without effect."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shardformer.checkpoint.file_format import CheckpointIndex
from shardformer.errors import ConfigError
from shardformer.train_command.config_schema import TrainConfig
from shardformer.train_command.run import run_training
from shardformer.training.metrics_log import read_metrics_records
from tests.runs.files import config, labelled, write_rows, write_text

LR = 1e-2


def run(tmp_path: Path, steps: int, **tables: Any) -> TrainConfig:
    hooks = {"throughput": False, "progress": False, "checkpoint": {"in_background": False}}
    data = {"train": write_text(tmp_path), **tables.pop("data", {})}
    return config(tmp_path, "gpt2", data, training={"steps": steps}, hooks=hooks, **tables)


def rates(made: TrainConfig) -> list[float]:
    return [round(record.values["learning_rate"] / LR, 6) for record in read_metrics_records(made.output_folder)]


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [3, 8])
def test_another_length_does_not_silently_change_the_schedule(name: str, steps: int, tmp_path: Path) -> None:
    cut = run(tmp_path, 6, schedule={"name": name})
    stop_behind(cut, 2)
    records = (cut.output_folder / "records.jsonl").read_bytes()
    with pytest.raises(
        ConfigError, match=rf"{steps} instead of 6 steps.*schedule.steps = 6 to keep.*schedule.steps = {steps}"
    ):
        run_training(run(tmp_path, steps, schedule={"name": name}))
    assert (cut.output_folder / "records.jsonl").read_bytes() == records
    assert tomllib.loads((cut.output_folder / "resolved_config.toml").read_text())["training"]["steps"] == 6


def stop_behind(made: TrainConfig, steps: int) -> None:
    """Train the first steps of a longer run."""
    from shardformer.mesh.parallel_context import ParallelContext
    from shardformer.train_command.run import build_trainer_and_data

    trainer, _ = build_trainer_and_data(made, made.layout, ParallelContext.from_sizes({}))
    trainer.fit(steps=steps)


def test_schedule_steps_keeps_or_changes_the_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop_behind(run(tmp_path, 6, schedule={"name": "linear"}), 3)
    kept = run(tmp_path, 7, schedule={"name": "linear", "steps": 6})
    stop_behind(kept, 4)
    output = capsys.readouterr().out
    assert re.search(r"^  training.steps  6 +7$", output, re.M)
    assert "Learning rate: unchanged." in output
    changed = run(tmp_path, 10, schedule={"name": "linear", "steps": 10})
    run_training(changed)
    assert "Learning rate: changes from step 5, which uses 0.006 (before: 0.00333)." in capsys.readouterr().out
    assert rates(changed) == [1.0, 0.833333, 0.666667, 0.5, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]


def test_a_schedule_with_equal_rates_resumes(tmp_path: Path) -> None:
    """A warm-up given as a fraction would be longer, but is already complete."""
    run_training(run(tmp_path, 4, schedule={"warmup": 0.25}))
    longer = run(tmp_path, 5, schedule={"warmup": 0.25})
    run_training(longer)
    assert rates(longer) == [1.0] * 5


def test_a_rate_that_a_hook_changes_applies_to_the_rest_of_a_constant_schedule(tmp_path: Path) -> None:
    (tmp_path / "rate.py").write_text(
        "import shardformer\n"
        "class Rate(shardformer.hooks.Hook):\n"
        "    def after_step(self, trainer):\n"
        "        if trainer.step == 3:\n"
        "            for group in trainer.engine.optimizers[0].param_groups: group['lr'] *= 0.5\n",
        encoding="utf-8",
    )
    made = run(tmp_path, 7, schedule={"warmup": 2})
    made = made.model_copy(update={"hooks": {**made.hooks, f"{tmp_path}/rate.py:Rate": True}})
    stop_behind(made, 5)
    run_training(made)
    assert rates(made) == [0.5, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    checkpoint = CheckpointIndex.read(made.output_folder / "checkpoints" / "step-00000007")
    assert [each["kind"] for each in checkpoint.values["scheduler"]] == ["LambdaLR"]  # as in earlier checkpoints


def test_more_epochs_are_another_length(tmp_path: Path) -> None:
    def of(epochs: int) -> TrainConfig:
        data = {"train": write_rows(tmp_path, labelled())}
        model = {"task": "classification"}
        training = {"epochs": epochs}
        return config(tmp_path, "bert", data, model=model, training=training, schedule={"name": "linear"})

    stop_behind(of(2), 2)
    with pytest.raises(ConfigError, match=r"9 instead of 6 steps"):
        run_training(of(3))


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"optimizer": {"lr": 0.5}}, r"optimizer.lr is 0.5, but was 0.01 when the run in .*Set optimizer.lr = 0.01"),
        ({"seed": 5}, r"seed is 5, but was 0 when the run in"),
        (
            {"optimizer": {"weight_decay": 0.3}},
            r"optimizer.weight_decay is 0.3, but was not set when the run in .*Remove optimizer.weight_decay",
        ),
        (
            {"model": {"config": {"n_embd": 16, "n_layer": 2, "n_head": 2, "attn_pdrop": 0.5}}},
            r"model.config.attn_pdrop",
        ),
    ],
    ids=str,
)
def test_changes_without_effect_raise(tables: dict[str, Any], words: str, tmp_path: Path) -> None:
    run_training(run(tmp_path, 2))
    with pytest.raises(ConfigError, match=words):
        run_training(run(tmp_path, 3, **tables))


def test_a_new_run_in_an_old_folder_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_training(run(tmp_path, 2))
    assert "New run:" not in capsys.readouterr().out
    shutil.rmtree(tmp_path / "run/checkpoints")
    run_training(run(tmp_path, 2))
    assert "New run:" in capsys.readouterr().out
    run_training(run(tmp_path, 2))
    assert "To continue after step 2, increase training.steps." in capsys.readouterr().out


def test_changed_settings_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_training(run(tmp_path, 2))
    run_training(run(tmp_path, 3))
    assert re.search(r"^  option +before +now\n  training.steps  2 +3$", capsys.readouterr().out, re.M)
    run_training(run(tmp_path, 3, data={"drop_last": True}))
    assert re.search(r"^  data.drop_last  false +true$", capsys.readouterr().out, re.M)
    assert tomllib.loads((tmp_path / "run" / "resolved_config.toml").read_text())["data"]["drop_last"] is True


def test_a_changed_data_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_training(run(tmp_path, 2))
    run_training(made := run(tmp_path, 3))
    assert "Changed since the checkpoint" not in capsys.readouterr().out
    text = Path(str(made.data.train))
    text.write_text(text.read_text().replace("fox", "cat", 1))
    run_training(config(tmp_path, "gpt2", {"train": str(text)}, training={"steps": 4}))
    assert f"Changed since the checkpoint: {text}. " in capsys.readouterr().out


def test_other_classes_in_the_data_raise(tmp_path: Path) -> None:
    def of(names: str, steps: int) -> TrainConfig:
        rows = [{**row, "label": names[row["label"] == "good"]} for row in labelled()]
        data = {"train": write_rows(tmp_path, rows)}
        return config(tmp_path, "bert", data, model={"task": "classification"}, training={"steps": steps})

    run_training(of("ab", 1))
    with pytest.raises(ConfigError, match=r"The run started with the classes a, b, but the data now has .* a, c"):
        run_training(of("ac", 2))
