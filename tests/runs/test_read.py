"""Errors of a configuration file contain the key, and similar names or another remedy."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError
from shardformer.offload.host import OffloadConfig
from shardformer.train_command.config_schema import (
    ParallelTable,
    TrainConfig,
    format_toml,
    load_train_config,
    parse_train_config,
)

LEAST: dict[str, Any] = {"model": {"name": "gpt2"}, "data": {"train": "a.txt"}}


def config_with(**changes: Any) -> TrainConfig:
    """Return the configuration with changed keys ``table__key=value``."""
    tables: dict[str, Any] = {name: dict(table) for name, table in LEAST.items()}
    for name, value in changes.items():
        table, _, key = name.partition("__")
        if key:
            tables.setdefault(table, {})[key] = value
        else:
            tables[table] = value
    return parse_train_config(tables, "run.toml")


def test_a_minimal_configuration() -> None:
    found = config_with()
    assert found.layout == ParallelConfig()
    assert (found.folder, found.seed, found.optimizer.name) == ("run", 0, "AdamW")


def test_layout_has_the_fields_of_the_parallel_table() -> None:
    assert list(ParallelTable.model_fields) == [field.name for field in fields(ParallelConfig)]
    assert all(field.description for field in ParallelTable.model_fields.values())
    found = config_with(parallel__tensor=2, parallel__partition=[1, 3], parallel__pipe=2, parallel__precision="bf16")
    assert found.layout == ParallelConfig(tensor=2, pipe=2, partition=[1, 3], precision="bf16")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel__tensr": 2}, r"parallel\.tensr = 2.*Did you mean 'tensor'"),
        ({"parallel__tensor": "2"}, r"parallel\.tensor = '2'.*valid integer"),
        ({"parallel__tensor": 0}, r"tensor=0"),
        ({"parallel__precision": "bf17"}, r"bf17"),
        ({"parallel__num_model_chunks": 2}, r"num_model_chunks=2 has no effect without pipe=2"),
        ({"data__workers": 2, "data__num_workers": 2}, r"data\.workers = 2.*Use its new name data\.num_workers"),
        ({"training__steps": 1.5}, r"training\.steps = 1\.5.*Write an integer"),
        ({"optimizer__lr": "5e-5"}, r"optimizer\.lr = '5e-5'.*Write a number, without quotes"),
        ({"training__export": "yes"}, r"training\.export = 'yes'.*Write true or false"),
        ({"training__steps": 0}, r"training\.steps = 0.*Write a number of at least 1"),
        ({"training__max_grad_norm": 1.0}, r"contains the unknown key training.*Write it as parallel\.max_grad_norm"),
        ({"batch_size": 2}, r"Write it as data\.batch_size"),
        ({"training__gradient_accumulation_steps": 2}, r"parallel\.micro_batches or parallel\.micro_batch_size"),
        ({"data__max_length": 2}, r"Write it as data\.sequence"),
        ({"batch_sise": 2}, r"Did you mean 'data\.batch_size'.*under its table"),
        ({"optimizer__lr": float("inf")}, r"optimizer\.lr = inf"),
        ({"parallel__max_grad_norm": float("nan")}, r"max_grad_norm = nan"),
        ({"seed": 2**64}, r"seed = 18446744073709551616"),
        ({"folder": ""}, r"folder = ''.*folder must not be empty"),
        ({"data__train": []}, r"data\.train = \[\].*train must not be empty"),
        ({"data__validation": ["a.txt", ""]}, r"data\.validation = \['a.txt', ''\].*validation must not be empty"),
        ({"schedule__steps": 5}, r"schedule\.steps = 5 has no effect without a warm-up"),
        ({"modle": 3}, r"modle = 3.*Did you mean 'model'"),
        ({"model__task": "casual"}, r"model\.task = 'casual'.*Did you mean 'causal'"),
        ({"data__batch_size": 0}, r"data\.batch_size = 0.*greater than or equal to 1"),
        ({"data__train": 3}, r"data\.train = 3.*string; or .*list"),
        ({"data__sequence_length": True}, r"data\.sequence_length = True"),
        ({"optimizer__lr": -1.0}, r"optimizer\.lr = -1\.0"),
        ({"schedule__name": "lineer"}, r"schedule\.name = 'lineer'.*Did you mean 'linear'"),
        ({"training__steps": 3, "training__epochs": 2}, r"steps = 3 and training\.epochs = 2 cannot both be set"),
        ({"training__validate_every": 3}, r"validate_every = 3 requires validation data"),
        ({"hooks__progress": 3}, r"hooks\.progress = 3"),
        ({"data__pair": "other"}, r"data\.pair = 'other' has no effect without a classification of texts"),
        ({"data__target": "other"}, r"data\.target = 'other' has no effect"),
        ({"data__label": "other"}, r"data\.label = 'other' has no effect"),
        ({"data__split": "test"}, r"data\.split = 'test' has no effect without data\.format = 'datasets'"),
        (
            {"model__task": "image_classification", "data__tokenizer": "bytes"},
            r"data\.tokenizer = 'bytes' has no effect",
        ),
        ({"schedule__min_lr_rate": 0.1}, r"schedule\.min_lr_rate = 0\.1 has no effect"),
        ({"parallel__sequence_parallel": True}, r"sequence_parallel = True has no effect without parallel\.tensor"),
        ({"parallel__context_parallel": "ring"}, r"context_parallel = 'ring' has no effect without parallel\.sequence"),
        ({"parallel__schedule": "gpipe"}, r"schedule = 'gpipe' has no effect without parallel\.pipe"),
        ({"model": {}}, r"key model\.name is missing"),
        ({"model": 3}, r"model = 3"),
    ],
    ids=str,
)
def test_an_invalid_key_or_value_raises_with_the_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        config_with(**changes)
    assert all((caught.value.what, caught.value.remedy))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"parallel__pipe": 2, "parallel__cut": "even"}, {"parallel__pipe": 2, "parallel__partition": "uniform"}),
        ({"parallel__zero": 2}, {"parallel__zero_stage": 2}),
        ({"data__sequence": 16}, {"data__sequence_length": 16}),
        ({"data__workers": 2}, {"data__num_workers": 2}),
        (
            {"schedule__name": "cosine", "schedule__final": 0.1},
            {"schedule__name": "cosine", "schedule__min_lr_rate": 0.1},
        ),
        ({"hooks__gradient_watch": True}, {"hooks__gradient_monitor": True}),
        ({"hooks__checkpoint": {"keep": 2}}, {"hooks__checkpoint": {"retention": 2}}),
        ({"hooks__profiler": {"folder": "a"}}, {"hooks__profiler": {"directory": "a"}}),
    ],
    ids=str,
)
def test_an_earlier_key_works_with_a_warning(old: dict[str, Any], new: dict[str, Any]) -> None:
    with pytest.warns(FutureWarning, match=r"is deprecated"):
        found = config_with(**old)
    assert found == config_with(**new)


def test_a_file_is_read_and_keys_are_changed(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('folder = "a"\n[model]\nname = "a"\n[data]\ntrain = "t.txt"\n', encoding="utf-8-sig")
    changes = [
        "model.name=gpt2",
        "parallel.tensor=2",
        'data.train=["a.txt", "b.txt"]',
        "hooks.progress=false",
        "seed=3",
        "folder=",
        "training.epochs=",
        'hooks."my.hooks.py:Mine".most=3',
    ]
    found = load_train_config(file, changes)
    assert (found.model.name, found.layout.tensor, found.data.train) == ("gpt2", 2, ["a.txt", "b.txt"])
    assert found.hooks == {"progress": False, "my.hooks.py:Mine": {"most": 3}}
    assert found.folder == "run", "its default"


def test_a_path_may_start_with_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    found = config_with(folder="~/run", model__name="~/base", data__train=["~/a.txt", "b~.txt"], data__tokenizer="~/t")
    assert found.output_folder == Path("/home/me/run")
    assert (found.model.name, found.data.tokenizer) == ("/home/me/base", "/home/me/t")
    assert found.data.train == ["/home/me/a.txt", "b~.txt"]
    assert OffloadConfig("nvme:~/states").folder == "/home/me/states"


@pytest.mark.parametrize("change", ["parallel.tensor", "=3", "parallel.=2", ".x=2", 'hooks."x=2'])
def test_a_change_is_a_key_and_a_value(change: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--set"):
        load_train_config(tmp_path / "run.toml", [change])


def test_a_change_below_a_value_raises(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("folder = 'a'\n[hooks]\nprogress = true\n", encoding="utf-8")
    for change in ("hooks.progress.every_s=2", "folder.x=2"):
        with pytest.raises(ConfigError, match=r"cannot be applied"):
            load_train_config(tmp_path / "run.toml", [change])


def test_a_missing_or_invalid_file_raises(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("model = \n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"Did you mean 'run.toml'"):
        load_train_config(tmp_path / "rum.toml")
    with pytest.raises(ConfigError, match=r"is not valid TOML.*line 1"):
        load_train_config(tmp_path / "run.toml")


def test_a_configuration_written_as_toml_is_the_same(tmp_path: Path) -> None:
    model = {
        "name": "gpt2",
        "config": {"a b": [1, {"x": -0.5, "y": None}], "text": 'a "quoted" \\ é 😀 \x7f\n', "on": True},
    }
    hooks: dict[str, Any] = {
        "my hooks.py:Mine": {"at": [1e-7, 3], "until": math.inf},
        "progress": False,
        "json_lines": True,
    }
    values: dict[str, Any] = {
        "folder": str(tmp_path),
        "model": {**model, "random": True},
        "data": {"train": ["a.txt", "b.txt"]},
        "parallel": {"tensor": [2, 2], "tensor_parallel_mode": "2d", "max_grad_norm": 1.0},
        "optimizer": {"lr": 1e-5, "betas": [0.9, 0.95]},
        "hooks": hooks,
    }
    made = parse_train_config(values, "run.toml")
    (tmp_path / "resolved.toml").write_text(format_toml(made.model_dump()), encoding="utf-8")
    again = load_train_config(tmp_path / "resolved.toml")
    del made.model.config["a b"][1]["y"]
    assert again == made
