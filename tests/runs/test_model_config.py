"""``[model] config`` builds the same config as transformers, and configs that cannot be exported raise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from shardformer.errors import ConfigError
from shardformer.train_command.config_schema import parse_train_config
from shardformer.train_command.dry_run import make_dry_run_report
from shardformer.train_command.load_data import TrainingData, load_training_data
from shardformer.train_command.model_config import derive_config_fields_from_data, get_class_names, load_model_config
from shardformer.train_command.run import load_data_and_model
from tests.runs.files import SMALL, config, labelled, write_rows, write_text

FEW = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
QWEN = {**FEW, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}


def run_of(name: str, fields: dict[str, Any], *, random: bool = True, task: str = "causal") -> Any:
    model = {"name": name, "random": random, "config": fields, "task": task}
    return parse_train_config({"model": model, "data": {"train": "text.txt"}}, "run.toml")


def plain(found: Any) -> dict[str, Any]:
    fields: dict[str, Any] = found.to_dict()
    return {name: value for name, value in fields.items() if name not in ("_name_or_path", "architectures")}


FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("falcon", FEW),
    ("llama", FEW),
    ("llama", {"num_attention_heads": 2}),
    ("opt", FEW),
    ("qwen3", QWEN),
    ("modernbert", FEW),
    ("gemma2", FEW),
    ("gpt2", FEW),  # other names for its fields
    ("t5", {"num_hidden_layers": 2}),  # from which it derives less than from num_layers
    ("embedding_gemma2_text", {"num_key_value_heads": 2}),  # has others in some layers
    ("bert", {"attn_implementation": "eager"}),
    ("bert", {"id2label": {"0": "no", "1": "yes", "2": "perhaps"}}),
    ("clip", {"text_config": {"hidden_size": 64}}),
]
KNOWN = [row for row in FIELDS if row[0] in transformers.CONFIG_MAPPING]
"""Those of this version of transformers."""


@pytest.mark.parametrize(("name", "fields"), KNOWN, ids=str)
def test_fields_of_a_model_type_build_the_config_of_transformers(name: str, fields: dict[str, Any]) -> None:
    found = load_model_config(run_of(name, fields))
    assert plain(found) == plain(transformers.AutoConfig.for_model(name, **fields))


@pytest.mark.parametrize("form", ["folder", "file"])
def test_fields_of_a_file_are_kept_unless_the_class_rejects_them(form: str, tmp_path: Path) -> None:
    transformers.AutoConfig.for_model("qwen3", **{**QWEN, "num_hidden_layers": 4}).save_pretrained(tmp_path)
    where = str(tmp_path if form == "folder" else tmp_path / "config.json")
    found = load_model_config(run_of(where, {"num_hidden_layers": 2, "hidden_size": 32}))
    assert found.layer_types == ["full_attention"] * 2  # derived, and refused with four
    assert (found.hidden_size, found.head_dim, found.num_key_value_heads) == (32, 16, 2)


def test_a_list_that_is_not_derived_is_kept(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    fields = {**QWEN, "num_hidden_layers": 3, "layer_types": kinds, "use_sliding_window": True, "sliding_window": 8}
    transformers.AutoConfig.for_model("qwen3", **fields).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"num_hidden_layers = 2.*`num_hidden_layers` \(2\) must be equal"):
        load_model_config(run_of(str(tmp_path), {"num_hidden_layers": 2}))
    assert load_model_config(run_of(str(tmp_path), {"hidden_size": 32})).layer_types == kinds


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": "wide"}, r"hidden_size = 'wide'.*expected int"),
        ({"num_hidden_layer": 2}, r"model.config sets 'num_hidden_layer'.*Did you mean 'num_hidden_layers'"),
        ({"layer_types": ["full_attention"]}, r"layer_types"),
    ],
    ids=str,
)
def test_inconsistent_values_raise(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_model_config(run_of("qwen3", fields))


def test_fields_of_a_nested_config_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"model.config.text_config sets 'hiden_size'.*Did you mean 'hidden_size'"):
        load_model_config(run_of("clip", {"text_config": {"hiden_size": 64}}))


def test_vocab_size_of_a_multimodal_model_is_set_in_its_text_config(tmp_path: Path) -> None:
    made = config(tmp_path, "gpt2", {"train": write_text(tmp_path)}, model={"name": "llava", "config": {}})
    data = load_training_data(made)
    found = load_model_config(made, derive_config_fields_from_data(made, data, load_model_config(made)))
    assert found.text_config.vocab_size == 258
    assert plain(found.vision_config) == plain(transformers.AutoConfig.for_model("llava").vision_config)


# ------------------------------------------------------------------------------------------------------------- classes


def classified(tmp_path: Path, names: list[Any], model: dict[str, Any]) -> tuple[TrainingData, Any]:
    """Return the data and the config of a run with these labels."""
    rows = [{"text": f"row {i}", "label": names[i % len(names)]} for i in range(12)]
    made = config(
        tmp_path,
        "bert",
        {"train": write_rows(tmp_path, rows), "tokenizer": "bytes"},
        model={"task": "classification", **model},
    )
    saved = load_model_config(made)
    data = load_training_data(made, model_class_names=get_class_names(saved))
    return data, load_model_config(made, derive_config_fields_from_data(made, data, saved))


def saved_with(tmp_path: Path, names: list[str]) -> dict[str, Any]:
    fields = {**SMALL["bert"], "id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}
    transformers.AutoConfig.for_model("bert", **fields).save_pretrained(tmp_path / "saved")
    return {"name": str(tmp_path / "saved"), "config": {}}


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["sad", "glad", "mad"], ["glad", "mad", "sad"]),
        ([0, 1, 2], ["LABEL_0", "LABEL_1", "LABEL_2"]),
        ([3, 7], ["3", "7"]),
        ([True, False], ["False", "True"]),
    ],
    ids=str,
)
def test_the_config_has_the_class_names(labels: list[Any], names: list[str], tmp_path: Path) -> None:
    data, found = classified(tmp_path, labels, {})
    assert found.id2label == dict(enumerate(names))
    assert found.label2id == {name: number for number, name in enumerate(names)}
    assert [data.train_dataset[i]["labels"] for i in range(2)] == [sorted(labels).index(label) for label in labels[:2]]


def test_classes_of_the_model_keep_its_indices(tmp_path: Path) -> None:
    """A trained head has an output for each of its classes."""
    model = saved_with(tmp_path, ["positive", "neutral", "negative"])
    data, found = classified(tmp_path, ["negative", "positive"], model)
    assert found.id2label == {0: "positive", 1: "neutral", 2: "negative"}
    assert [data.train_dataset[i]["labels"] for i in range(2)] == [2, 0]
    data, found = classified(tmp_path, [0, 2], model)
    assert found.id2label[2] == "negative"
    assert [data.train_dataset[i]["labels"] for i in range(2)] == [0, 2]


def test_new_classes_replace_those_of_the_model(tmp_path: Path) -> None:
    _, found = classified(tmp_path, ["cat", "dog"], saved_with(tmp_path, ["positive", "neutral", "negative"]))
    assert found.id2label == {0: "cat", 1: "dog"}


def test_id2label_and_num_labels_of_the_run_are_kept(tmp_path: Path) -> None:
    overrides = {"config": {**SMALL["bert"], "id2label": {"0": "good", "1": "bad"}}}
    data, found = classified(tmp_path, ["bad", "good"], overrides)
    assert [data.train_dataset[i]["labels"] for i in range(2)] == [1, 0]
    assert found.label2id == {"good": 0, "bad": 1}
    _, found = classified(tmp_path, ["bad", "good"], {"config": {**SMALL["bert"], "num_labels": 3}})
    assert found.id2label == {0: "bad", 1: "good", 2: "LABEL_2"}
    with pytest.raises(ConfigError, match=r"2 classes, but the data has 3"):
        classified(tmp_path, ["a", "b", "c"], {"config": {**SMALL["bert"], "num_labels": 2}})


def test_class_names_of_a_data_set_are_used(tmp_path: Path) -> None:
    import datasets

    names = ["zebra", "ant", "bee"]
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    rows = [{"text": "a", "label": i % 2} for i in range(6)]
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows, features=features)}).save_to_disk(
        str(tmp_path / "d")
    )
    data = {"train": str(tmp_path / "d"), "format": "datasets"}
    made = config(tmp_path, "bert", data, model={"task": "classification"})
    found = load_training_data(made, model_class_names=["LABEL_0", "LABEL_1"])
    assert found.classes == names
    assert [found.train_dataset[i]["labels"] for i in range(2)] == [0, 1]
    assert load_model_config(
        made, derive_config_fields_from_data(made, found, load_model_config(made))
    ).id2label == dict(enumerate(names))


# -------------------------------------------------------------------------------------------------------------- export


def test_an_export_that_would_fail_raises_before_the_first_step(tmp_path: Path) -> None:
    small = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL["gpt2"], vocab_size=258))
    small.save_pretrained(tmp_path / "saved")
    generation = tmp_path / "saved" / "generation_config.json"
    wrong = {**json.loads(generation.read_text()), "do_sample": False, "temperature": 0.5}
    generation.write_text(json.dumps(wrong))
    model = {"name": str(tmp_path / "saved"), "random": False, "config": {}}
    data = {"train": write_text(tmp_path), "tokenizer": "bytes"}
    for export in (True, False):
        made = config(tmp_path, "gpt2", data, model=model, training={"steps": 1, "export": export})
        if not export:
            load_data_and_model(made)
            continue
        with pytest.raises(ConfigError, match=r"cannot be exported.*temperature"):
            load_data_and_model(made)
        with pytest.raises(ConfigError, match=r"cannot be exported"):
            make_dry_run_report(made)


def test_the_exported_config_has_the_class_names(tmp_path: Path) -> None:
    from shardformer.train_command.run import run_training

    data = {"train": write_rows(tmp_path, labelled())}
    training = {"steps": 1, "export": True}
    run_training(config(tmp_path, "bert", data, model={"task": "classification"}, training=training))
    assert transformers.AutoConfig.from_pretrained(tmp_path / "run" / "model").id2label == {0: "bad", 1: "good"}
