"""Tables in csv, tsv and parquet, the tokenizer files of OpenAI, fractions of epochs, and keys of other tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardformer.errors import ConfigError, InputError
from shardformer.train_command.build import (
    KNOWN_HOOKS,
    build_hooks,
    build_optimizer_factory,
    count_training_steps,
    get_hook_constructor_arguments,
)
from shardformer.train_command.config_schema import RENAMED_KEYS, TRAINER_KEYS, TrainConfig, parse_train_config
from shardformer.train_command.load_data import load_training_data
from shardformer.train_command.run import run_training
from shardformer.train_command.tokenizer import load_tokenizer
from shardformer.training.metrics_log import read_metrics_records
from tests.runs.files import config, labelled, write_rows, write_text


def dataset(folder: Path, name: str, text: str, **data: Any) -> Any:
    (folder / name).write_text(text, encoding="utf-8-sig")
    data = {"train": str(folder / name), "label": "quality", **data}
    return load_training_data(config(folder, "bert", data, model={"task": "classification"}))


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("a.csv", 'quality,text\n1,"one, ""two"""\n0,three\n', {}),
        ("a.tsv", 'quality\ttext\n1\tone, "two"\n0\tthree\n', {}),
        ("a.txt", 'quality;text\n1;one, "two"\n0;three\n', {"format": "csv", "delimiter": ";"}),
    ],
)
def test_the_rows_of_a_table(name: str, text: str, options: dict[str, Any], tmp_path: Path) -> None:
    data = dataset(tmp_path, name, text, **options)
    assert list(data.train_dataset.texts) == ['one, "two"', "three"]
    assert data.classes == [0, 1] and list(data.train_dataset.labels) == [1, 0]


def test_names_of_classes_stay_strings(tmp_path: Path) -> None:
    data = dataset(tmp_path, "a.csv", "quality,text\ngood,a\n1,b\n")
    assert data.classes == ["1", "good"]


def test_quotes_in_tsv_are_part_of_the_text(tmp_path: Path) -> None:
    data = dataset(tmp_path, "a.tsv", 'quality\ttext\n1\t"one\n0\ttwo"\n')
    assert list(data.train_dataset.texts) == ['"one', 'two"']


@pytest.mark.parametrize(
    ("name", "text", "options", "words"),
    [
        ("a.csv", "quality,text\n1\n", {}, r"Row 1 of .* has 1 fields, but the first line has 2.*data.delimiter"),
        ("a.csv", "quality,text\n", {}, "contains no rows"),
        ("a.csv", "quality,text,text\n1,a,b\n", {}, "contains the field name 'text' more than once"),
        ("a.csv", "quality,text\n1,a\n,b\n0,c\n", {}, "Row 2 of the data has an empty label in the field 'quality'"),
        ("a.csv", "", {}, "contains no rows"),
        ("a.csv", "label,text\n1,a\n0,b\n", {}, "no field 'quality'"),
        ("a.jsonl", '{"text": "a", "quality": 1}', {"delimiter": ";"}, "the data has the format jsonl"),
        ("a.xlsx", "x", {}, "pandas.read_excel"),
    ],
)
def test_an_invalid_table_raises(name: str, text: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, InputError), match=words):
        dataset(tmp_path, name, text, **options)


def test_a_parquet_file_equals_json_lines(tmp_path: Path) -> None:
    import datasets

    rows = labelled()
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    model = {"task": "classification"}
    expected = load_training_data(config(tmp_path, "bert", {"train": write_rows(tmp_path, rows)}, model=model))
    found = load_training_data(config(tmp_path, "bert", {"train": str(tmp_path / "rows.parquet")}, model=model))
    assert list(found.train_dataset.texts) == list(expected.train_dataset.texts)
    assert found.classes == expected.classes and found.train_dataset.labels == expected.train_dataset.labels


def test_the_tokenizer_files_of_openai_are_read(tmp_path: Path) -> None:
    vocabulary = {letter: number for number, letter in enumerate(["<|endoftext|>", "a", "b", "c", "ab"])}
    (tmp_path / "encoder.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\na b\n", encoding="utf-8")
    found = load_tokenizer(str(tmp_path), "none", has_random_weights=True)
    assert found.encode("abcab") == [4, 3, 4] and (found.vocab_size, found.eos_token_id) == (5, 0)


@pytest.mark.parametrize(("epochs", "steps"), [(0.5, 3), (1.25, 7), (2, 10), (2.0, 10)])
def test_epochs_may_be_a_fraction(epochs: float, steps: int, tmp_path: Path) -> None:
    data = {"train": write_text(tmp_path, times=5), "batch_size": 4}
    hooks = {"progress": False, "throughput": False, "checkpoint": False}
    made = config(tmp_path, "gpt2", data, training={"epochs": epochs}, hooks=hooks)
    assert count_training_steps(made, load_training_data(made)) == steps
    run_training(made)
    assert [record.step for record in read_metrics_records(made.output_folder)] == list(range(1, steps + 1))


@pytest.mark.parametrize(
    ("tables", "remedy"),
    [
        ({"training": {"max_grad_norm": 1}}, "Write it as parallel.max_grad_norm"),
        ({"training": {"bf16": True}}, "Write it as parallel.precision = 'bf16'"),
        ({"learning_rate": 1}, "Write it as optimizer.lr"),
        ({"optimizer": {"learning_rate": 1}}, "Write it as optimizer.lr"),
        ({"optimizer": {"max_grad_norm": 1}}, "Write it as parallel.max_grad_norm"),
        ({"optimizer": {"betaz": 1}}, "Did you mean 'betas'"),
        ({"hooks": {"save_steps": True}}, "Write it as hooks.checkpoint.every_steps"),
        ({"early_stopping": {"patience": 2}}, "Write it as hooks.early_stopping"),
        ({"hooks": {"checkpoint": {"save_steps": 1}}}, "Write it as hooks.checkpoint.every_steps"),
        ({"hooks": {"checkpoint": {"batch_size": 1}}}, "Write it as data.batch_size"),
        ({"parallel": {"folder": "x"}}, "Write it as folder, above all tables"),
        ({"schedule": {"num_train_epochs": 3}}, "Write it as training.epochs"),
    ],
)
def test_a_key_of_another_table_or_library_is_answered_with_ours(tables: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made = parse_train_config({"model": {"name": "gpt2"}, "data": {"train": "a.txt"}} | tables, "run.toml")
        build_optimizer_factory(made.optimizer), build_hooks(made)
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("key", sorted({*TRAINER_KEYS.values(), *RENAMED_KEYS.values()}))
def test_keys_of_remedies_exist(key: str) -> None:
    table, *names = re.split(r"[^\w.]", key)[0].rstrip(".").split(".")
    known: Any = {name: field.annotation for name, field in TrainConfig.model_fields.items()}
    assert table in known
    if table == "hooks":
        hook, *arguments = names
        assert {*arguments} <= {*get_hook_constructor_arguments(KNOWN_HOOKS[hook])}
    elif names:
        fields = {*known[table].model_fields, *({"betas", "eps"} if table == "optimizer" else ())}
        assert names[0] in fields
