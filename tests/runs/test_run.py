"""A run trains its configuration, resumes, and exports a model for transformers."""

from __future__ import annotations

import math
import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shardformer.checkpoint.retention import CheckpointRetention
from shardformer.errors import ConfigError, ShardFormerError
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.train_command.build import build_hooks
from shardformer.train_command.config_schema import TrainConfig
from shardformer.train_command.run import build_trainer_and_data, run_training
from shardformer.training.hooks.checkpoint import Checkpoint
from shardformer.training.metrics_log import read_metrics_records
from tests.runs.files import SMALL, config, labelled, write_images, write_rows, write_text

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def data_for(task: str, folder: Path) -> dict[str, Any]:
    if task == "image_classification":
        return {"train": write_images(folder), "batch_size": 3}
    if task == "classification":
        return {"train": write_rows(folder, labelled())}
    return {"train": write_text(folder)}


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("gpt2", "causal"),
        ("bert", "masked"),
        ("bert", "classification"),
        ("t5", "sequence_to_sequence"),
        ("vit", "image_classification"),
    ],
)
def test_each_task_is_learned_and_exported(kind: str, task: str, tmp_path: Path) -> None:
    training = {"steps": 12, "export": True}
    made = config(tmp_path, kind, data_for(task, tmp_path), model={"task": task}, training=training)
    values = run_training(made)
    losses = [record.values["loss"] for record in read_metrics_records(made.output_folder)]
    assert len(losses) == 12
    assert losses[-1] == values["loss"]
    assert sum(losses[-3:]) < sum(losses[:3])
    head = next(
        line for line in (made.output_folder / "model" / "config.json").read_text().splitlines() if kind in line.lower()
    )
    assert head
    again = transformers.AutoModel.from_pretrained(made.output_folder / "model")
    assert again.config.model_type == kind


def test_an_exported_model_can_be_trained_further(tmp_path: Path) -> None:
    data = {"train": write_text(tmp_path)}
    first = config(tmp_path, "gpt2", data, training={"steps": 3, "export": True})
    run_training(first)
    saved = transformers.AutoModelForCausalLM.from_pretrained(first.output_folder / "model")
    model = {"name": str(first.output_folder / "model"), "random": False, "config": {}}
    second = config(tmp_path, "gpt2", {**data, "tokenizer": "bytes"}, folder=str(tmp_path / "second"), model=model)
    trainer, _ = build_trainer_and_data(second, second.layout, ParallelContext.from_sizes({}))
    torch.testing.assert_close(
        dict(trainer.engine.model.named_parameters())["transformer.h.0.attn.c_attn.weight"],
        saved.transformer.h[0].attn.c_attn.weight,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.mark.parametrize("name", ["run/model", "run/../run/model", "link", "run/model/config.json", "copy"])
def test_a_run_does_not_overwrite_its_initial_model(name: str, tmp_path: Path) -> None:
    data = {"train": write_text(tmp_path)}
    run_training(config(tmp_path, "gpt2", data, training={"steps": 1, "export": True}))
    base = tmp_path / "run" / "model"
    if name == "copy":  # which transformers wrote: it is in the place of the export
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        shutil.rmtree(base)
        model.save_pretrained(base)
    (base / "NOTES.md").write_text("my notes")
    (tmp_path / "link").symlink_to(base)
    before = contents(base)
    random = name == "copy" or name.endswith(".json")
    model_table = {"name": "gpt2" if name == "copy" else str(tmp_path / name), "random": random}
    tables = {
        "training": {"steps": 3, "export": True},
        "model": model_table if random else {**model_table, "config": {}},
    }
    message = "not an export of ShardFormer" if name == "copy" else "would overwrite the base model"
    with pytest.raises(ConfigError, match=message):
        run_training(config(tmp_path, "gpt2", {**data, "tokenizer": "bytes"}, **tables))
    assert contents(base) == before
    assert [record.step for record in read_metrics_records(tmp_path / "run")] == [1], "it was refused before it trained"


def test_an_extended_run_replaces_its_export(tmp_path: Path) -> None:
    data = {"train": write_text(tmp_path)}
    run_training(config(tmp_path, "gpt2", data, training={"steps": 1, "export": True}))
    base = tmp_path / "run" / "model"
    (base / "NOTES.md").write_text("my notes")
    before = contents(base)
    run_training(config(tmp_path, "gpt2", data, training={"steps": 2, "export": True}))
    after = contents(base)
    assert after.keys() == before.keys() and after["NOTES.md"] == b"my notes"
    assert after["model.safetensors"] != before["model.safetensors"]


def losses_of(made: TrainConfig) -> list[float]:
    run_training(made)
    return [record.values["loss"] for record in read_metrics_records(made.output_folder)]


@pytest.mark.reduced(at_most=2)
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"pipe": 2}, {"data": 2, "zero_stage": 1}], ids=str)
def test_the_layout_does_not_change_the_result(parallel: dict[str, Any], pool2: WorkerPool, tmp_path: Path) -> None:
    data = {"train": write_text(tmp_path), "batch_size": 6}
    model = {"config": {**SMALL["gpt2"], **NO_DROPOUT}}

    def made(name: str, **tables: Any) -> TrainConfig:
        hooks = {"progress": False, "throughput": False}
        return config(tmp_path, "gpt2", data, model=model, folder=str(tmp_path / name), hooks=hooks, **tables)

    alone = losses_of(made("alone"))
    for losses in pool2.run(losses_of, made("split", parallel=parallel)):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_a_resumed_run_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    def made(name: str, steps: int) -> TrainConfig:
        data = {"train": write_text(tmp_path), "validation": write_text(tmp_path, "other.txt")}
        schedule = {"name": "constant", "warmup": 2}
        training = {"steps": steps, "validate_every": 4}
        return config(tmp_path, "gpt2", data, folder=str(tmp_path / name), training=training, schedule=schedule)

    whole = run_training(made("whole", 9))
    run_training(made("cut", 5))
    cut = run_training(made("cut", 9))
    for name in ("loss", "validation/loss", "learning_rate"):
        assert cut[name] == whole[name]
    steps = [record.step for record in read_metrics_records(tmp_path / "cut") if "loss" in record.values]
    assert steps == list(range(1, 10))


def test_hooks_are_created_with_their_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import shardformer\n"
        "class Stops(shardformer.hooks.Hook):\n"
        "    def __init__(self, at): self.at = at\n"
        "    def after_step(self, trainer):\n"
        "        if trainer.step == self.at: trainer.stop()\n",
        encoding="utf-8",
    )
    hooks: dict[str, Any] = {"metrics": {"names": ["perplexity"]}}
    hooks |= {
        f"{tmp_path}/mine.py:Stops": {"at": 2},
        "shardformer.hooks:GradientMonitor": {"patience": 5},
        "checkpoint": {"every_steps": 1, "retention": None},
        "progress": False,
    }
    data = {"train": write_text(tmp_path), "validation": write_text(tmp_path, "other.txt", 2)}
    made = config(tmp_path, "gpt2", data, hooks=hooks)
    run_training(made)
    assert sorted(path.name for path in (made.output_folder / "checkpoints").glob("step-*")) == [
        "step-00000001",
        "step-00000002",
    ]


def test_the_directory_of_an_own_hook_is_in_the_folder_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import shardformer\n"
        "class Writes(shardformer.hooks.Hook):\n"
        "    def __init__(self, directory: str) -> None: self.directory = directory\n",
        encoding="utf-8",
    )
    made = config(tmp_path, "gpt2", {"train": write_text(tmp_path)}, hooks={f"{tmp_path}/mine.py:Writes": True})
    found: Any = next(hook for hook in build_hooks(made) if type(hook).__name__ == "Writes")
    assert Path(found.directory) == made.output_folder / "Writes"


def test_a_table_is_converted_to_the_type_of_the_argument(tmp_path: Path) -> None:
    hooks = {"checkpoint": {"retention": {"last": 2, "every": 10}, "every_minutes": math.inf}}
    hook = build_hooks(config(tmp_path, "gpt2", {"train": write_text(tmp_path)}, hooks=hooks))[-1]
    assert isinstance(hook, Checkpoint)
    assert (hook.retention, hook.every_minutes) == (CheckpointRetention(last=2, every=10), math.inf)


def test_an_interrupted_run_saves_a_checkpoint_and_reports_it(tmp_path: Path) -> None:
    (tmp_path / "kills.py").write_text(
        "import os, signal, shardformer\n"
        "class Kills(shardformer.hooks.Hook):\n"
        "    def after_step(self, trainer):\n"
        "        if trainer.step == 2: os.kill(os.getpid(), signal.SIGTERM)\n",
        encoding="utf-8",
    )
    made = config(tmp_path, "gpt2", {"train": write_text(tmp_path)}, hooks={f"{tmp_path}/kills.py:Kills": True})
    with pytest.raises(SystemExit) as ended:
        run_training(made)
    assert ended.value.code == 143
    assert [path.name for path in (made.output_folder / "checkpoints").glob("step-*")] == ["step-00000002"]


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"hooks": {"progres": True}}, r"no hook called 'progres'.*Did you mean 'progress'"),
        ({"hooks": {"checkpoint": {"every": 3}}}, r"hooks.checkpoint.every = 3.*Did you mean"),
        ({"hooks": {"nothing.py:Hook": True}}, r"no Python file 'nothing.py'"),
        ({"optimizer": {"name": "Adamw"}}, r"optimizer.name must be .* 'Adamw'.*Did you mean 'AdamW'"),
        ({"optimizer": {"name": "Muon"}}, r"Muon does not accept all parameters of the model.*2D.*docs/memory.md"),
        (
            {"optimizer": {"name": "Muon", "weight_decay": -1}},
            r"Muon does not accept the arguments lr = 0.01, weight_decay = -1",
        ),
        ({"optimizer": {"name": "nothing.py:Lion"}}, r"no Python file 'nothing.py'"),
        ({"optimizer": {"name": "no_package.optim:Lion"}}, r"The module 'no_package.optim' was not found"),
        ({"optimizer": {"name": "torch.nn:Linear"}}, r"torch.nn contains no subclass of Optimizer called 'Linear'"),
        ({"optimizer": {"weight_decy": 0.1}}, r"optimizer.weight_decy = 0.1.*Did you mean 'weight_decay'"),
        ({"optimizer": {"betas": 3}}, r"AdamW does not accept"),
        ({"optimizer": {"betas": [0.9]}}, r"AdamW does not accept the arguments lr = 0.01, betas = \(0.9,\)"),
        ({"model": {"config": {"n_head": 0}}}, r"cannot build .*ZeroDivisionError"),
        (
            {"model": {"config": {"activation_function": "foo"}}},
            r"cannot build .*KeyError: 'foo'",
        ),
        ({"model": {"config": {"dtype": "bfloat16"}}}, r"must not set dtype = 'bfloat16'.*parallel.precision"),
        ({"model": {"config": {"model_type": "bert"}}}, r"model_type = 'bert'.*model.name"),
        (
            {"model": {"task": "masked"}},
            r"the type 'gpt2', which does not support model.task = 'masked'.*model.task = 'causal' or 'classification'",
        ),
        ({"model": {"head": "AutoModel"}}, r"GPT2Model in model.head accepts no labels"),
        ({"model": {"head": "AutoConfig"}}, r"model.head must be a transformers model class, but got 'AutoConfig'"),
        ({"model": {"random": False, "config": {}}}, r"the model 'gpt2'.*model.random = true"),
        (
            {"hooks": {"checkpoint": {"at_end": "no"}}},
            r"hooks.checkpoint.at_end = 'no'.*valid boolean.*Save after the last step",
        ),
        ({"hooks": {"metrics": {"names": "f1"}}}, r"hooks.metrics.names = 'f1'.*valid array"),
        ({"hooks": {"checkpoint": {"every_steps": 0}}}, r"Checkpoint\(every_steps=0\).*every_steps=10"),
        ({"hooks": {"metrics": {"names": ["perplexity"]}}}, r"Metrics requires validation data"),
        ({"model": {"name": "gpt3"}}, r"the model 'gpt3'.*Did you mean .*gpt"),
        ({"model": {"config": {"n_embed": 3}}}, r"model.config sets 'n_embed'.*Did you mean 'n_embd'"),
        ({"model": {"config": {"n_embd": 15, "n_head": 2}}}, r"cannot build|divisible"),
        ({"model": {"config": {"vocab_size": 100}}}, r"bytes.*258 tokens.*vocab_size=100"),
        ({"model": {"config": {"n_positions": 8}}}, r"data.sequence_length = 16.*8 positions"),
        ({"model": {"head": "GPT2LMHead"}}, r"model.head must be .* 'GPT2LMHead'.*Did you mean"),
        ({"parallel": {"tensor": 2}}, r"tensor=2"),
    ],
    ids=str,
)
def test_an_invalid_configuration_raises(tables: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ShardFormerError, match=words):
        run_training(config(tmp_path, "gpt2", {"train": write_text(tmp_path)}, **tables))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_hook_file_that_fails_raises_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import shardformer\nimport nothing_of_that_name\n", encoding="utf-8")
    hooks = {f"{tmp_path}/mine.py:Mine": True}
    with pytest.raises(
        ConfigError,
        match=r"mine.py' cannot be imported: ModuleNotFoundError: No module named 'nothing_of_that_name' \(line 2\)",
    ):
        run_training(config(tmp_path, "gpt2", {"train": write_text(tmp_path)}, hooks=hooks))


def test_a_run_starts_despite_a_temporary_file_of_a_killed_run(tmp_path: Path) -> None:
    made = config(tmp_path, "gpt2", {"train": write_text(tmp_path)}, training={"steps": 1})
    made.output_folder.mkdir()
    (
        made.output_folder / f".resolved_config.toml-{os.getpid()}"
    ).touch()  # in a container all runs have the same number
    run_training(made)
    assert tomllib.loads((made.output_folder / "resolved_config.toml").read_text())["training"]["steps"] == 1


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"optimizer": {"name": "LBFGS"}}, r"The first training step with .*LBFGS.step.*closure"),
        (
            {"model": {"config": {**SMALL["gpt2"], "n_head": -1}}},
            r"The first training step with .*n_head.* raised RuntimeError",
        ),
    ],
    ids=["optimizer", "model"],
)
def test_a_failed_first_step_raises_and_saves_nothing(tables: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        run_training(config(tmp_path, "gpt2", {"train": write_text(tmp_path)}, **tables))
    assert not [*(tmp_path / "run").rglob("step-*")]
    run_training(config(tmp_path, "gpt2", {"train": write_text(tmp_path)}))


def test_fewer_samples_than_a_batch_with_drop_last_raises(tmp_path: Path) -> None:
    data = {"train": write_text(tmp_path, times=1), "batch_size": 100, "drop_last": True}
    with pytest.raises(ConfigError, match=r"drops all .* samples, because .* batch_size=100"):
        run_training(config(tmp_path, "gpt2", data))
