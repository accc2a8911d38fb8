"""Training data of a run from every file format, and errors for invalid data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from shardformer.errors import ConfigError, InputError, ShardFormerError
from shardformer.train_command.conversations import IGNORED
from shardformer.train_command.datasets import PaddingCollator
from shardformer.train_command.load_data import load_training_data
from shardformer.train_command.read_rows import infer_data_format
from shardformer.train_command.tokenizer import MASK, PAD_TOKEN
from tests.runs.files import WORDS, config, labelled, write_images, write_rows, write_text


def test_text_is_split_into_blocks_of_bytes(tmp_path: Path) -> None:
    found = load_training_data(config(tmp_path, "gpt2", {"train": write_text(tmp_path)}))
    assert len(found.train_dataset) == len(WORDS) * 20 // 16
    assert bytes(found.train_dataset[1]["input_ids"].tolist()).decode() == (WORDS * 2)[16:32]
    assert torch.equal(found.train_dataset[1]["labels"], found.train_dataset[1]["input_ids"])


def test_texts_of_several_files_are_separated_by_an_end_token(tmp_path: Path) -> None:
    names = [write_text(tmp_path, name, times=1) for name in ("a.txt", "b.txt")]
    found = load_training_data(config(tmp_path, "gpt2", {"train": names, "sequence_length": len(WORDS) + 1}))
    assert found.train_dataset[0]["input_ids"][-1] == PAD_TOKEN


def test_json_rows_may_contain_texts(tmp_path: Path) -> None:
    rows = [{"words": "abc"}, {"words": "defg"}]
    found = load_training_data(
        config(tmp_path, "gpt2", {"train": write_rows(tmp_path, rows), "text": "words", "sequence_length": 8})
    )
    assert found.train_dataset[0]["input_ids"].tolist() == [*b"abc", PAD_TOKEN, *b"defg"]


def test_tokens_are_masked_anew_each_time(tmp_path: Path) -> None:
    made = config(tmp_path, "bert", {"train": write_text(tmp_path), "sequence_length": 200}, model={"task": "masked"})
    found = load_training_data(made).train_dataset
    torch.manual_seed(0)
    first, again = found[0], found[0]
    chosen = first["labels"] != IGNORED
    assert 10 < chosen.sum() < 55
    assert (first["input_ids"] == MASK).sum() > 0.5 * chosen.sum()
    assert torch.equal(first["input_ids"][~chosen], again["input_ids"][~chosen]) or not torch.equal(
        chosen, again["labels"] != IGNORED
    )
    torch.manual_seed(0)
    assert torch.equal(found[0]["labels"], first["labels"])


def test_the_second_half_of_a_block_is_the_target(tmp_path: Path) -> None:
    data = {"train": write_text(tmp_path)}
    found = load_training_data(config(tmp_path, "t5", data, model={"task": "sequence_to_sequence"})).train_dataset[0]
    assert bytes(found["input_ids"].tolist()) == WORDS[:8].encode()
    assert bytes(found["labels"].tolist()) == WORDS[8:16].encode()


def test_rows_may_contain_a_source_and_a_target(tmp_path: Path) -> None:
    data = {"train": write_rows(tmp_path, labelled()), "target": "other"}
    found = load_training_data(config(tmp_path, "t5", data, model={"task": "sequence_to_sequence"}))
    batch = found.collate_fn([found.train_dataset[0], found.train_dataset[11]])  # type: ignore[misc]
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (2, 16), "labels": (2, 9), "attention_mask": (2, 16),
    }  # fmt: skip
    assert batch["labels"][0, -1] == IGNORED


def test_texts_have_classes(tmp_path: Path) -> None:
    data = {"train": write_rows(tmp_path, labelled()), "pair": "other"}
    found = load_training_data(config(tmp_path, "bert", data, model={"task": "classification"}))
    assert found.classes == ["bad", "good"]
    assert [found.train_dataset[i]["labels"] for i in range(3)] == [0, 1, 0]
    assert bytes(found.train_dataset[0]["input_ids"][:-1]) == b"sentence 0 \0rep"
    assert isinstance(found.collate_fn, PaddingCollator)


def test_validation_data_without_some_class_uses_the_training_indices(tmp_path: Path) -> None:
    good = [row for row in labelled() if row["label"] == "good"]
    data = {"train": write_rows(tmp_path, labelled()), "validation": write_rows(tmp_path, good, "good.jsonl")}
    found = load_training_data(config(tmp_path, "bert", data, model={"task": "classification"}))
    assert {found.validation_dataset[i]["labels"] for i in range(len(good))} == {1}


def test_images_have_the_class_of_their_folder(tmp_path: Path) -> None:
    made = config(tmp_path, "vit", {"train": write_images(tmp_path)}, model={"task": "image_classification"})
    found = load_training_data(made, 32)
    assert found.classes == ["cat", "dog"]
    assert found.train_dataset[0]["pixel_values"].shape == (3, 32, 32)
    assert -1 <= found.train_dataset[0]["pixel_values"].min() < found.train_dataset[0]["pixel_values"].max() <= 1
    assert [found.train_dataset[i]["labels"] for i in range(6)] == [0, 0, 0, 1, 1, 1]


def test_data_sets_of_the_datasets_library(tmp_path: Path) -> None:
    import datasets

    whole = datasets.Dataset.from_list(labelled())
    datasets.DatasetDict({"train": whole, "test": whole.select(range(4))}).save_to_disk(str(tmp_path / "saved"))
    data = {"train": str(tmp_path / "saved"), "format": "datasets", "validation_split": "test"}
    found = load_training_data(config(tmp_path, "bert", data, model={"task": "classification"}))
    assert (len(found.train_dataset), len(found.validation_dataset)) == (12, 4)
    with pytest.raises(ConfigError, match=r"cannot be loaded"):
        load_training_data(config(tmp_path, "bert", {**data, "split": "trian"}, model={"task": "classification"}))


@pytest.mark.parametrize(
    ("changes", "task", "words"),
    [
        ({"train": "nothing.txt"}, "causal", r"'nothing.txt' cannot be read: No such file"),
        ({"train": "text.txt", "sequence_length": 5000}, "causal", r"1260 tokens.*5000"),
        ({"train": "empty.txt"}, "causal", r"'empty.txt' is empty"),
        ({"train": "text.bin"}, "causal", r"Cannot infer the data format of 'text.bin.*data.format"),
        ({"train": "bad.jsonl"}, "causal", r"Line 2 of .*bad.jsonl"),
        ({"train": "rows.jsonl", "text": "txt"}, "causal", r"no field 'txt'.*Did you mean 'text'"),
        (
            {"train": "text.txt"},
            "classification",
            r"'classification' does not support the data 'text.txt', which has the format text",
        ),
        ({"train": "."}, "causal", r"read as images.*data.format = 'datasets'"),
        ({"train": "rows.xlsx"}, "classification", r"Cannot infer the data format.*pandas.read_excel"),
        ({"train": "missing.csv"}, "classification", r"'missing.csv' cannot be read: No such file"),
        ({"train": "bad.csv"}, "classification", r"Row 1 of 'bad.csv' has 4 fields.*data.delimiter"),
        ({"train": "latin.txt"}, "causal", r"'latin.txt' is not valid UTF-8: .* at byte 1.*Convert the file"),
        (
            {"train": "rows.jsonl", "text": "score"},
            "causal",
            r"'score' must be a string, but row 1 of the data has 0.5",
        ),
        ({"train": "rows.jsonl", "pair": "score"}, "classification", r"'score' must be .* has 0.5.*data.pair"),
        (
            {"train": "rows.jsonl", "target": "score"},
            "sequence_to_sequence",
            r"'score' must be .* has 0.5.*data.target",
        ),
        (
            {"train": "rows.jsonl", "text": "none"},
            "causal",
            r"The field 'none' is null in row 1 of the data",
        ),
        ({"train": "others.jsonl"}, "classification", r"two classes, but the training data has only \['ugly'\]"),
        ({"train": "rows.jsonl", "label": "score"}, "classification", r"but got the types float.*'regression'"),
        (
            {"train": "rows.jsonl", "validation": "others.jsonl"},
            "classification",
            r"validation data has the label .*, which is not one of",
        ),
        ({"train": "text.txt", "tokenizer": "no/folder"}, "causal", r"tokenizer 'no/folder' cannot be loaded"),
        ({"train": ".", "format": "images"}, "image_classification", r"No images were found"),
    ],
    ids=str,
)
def test_invalid_data_raises(
    changes: dict[str, Any], task: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    (tmp_path / "empty.txt").write_text("\n", encoding="utf-8")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n', encoding="utf-8")
    write_rows(tmp_path, [{**row, "score": 0.5, "none": None} for row in labelled()])
    (tmp_path / "bad.csv").write_text("text,label\na,b,c,d\na,b,c,d,e\n", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes("dé ".encode("latin-1") * 20)
    write_rows(tmp_path, [{"text": "a", "label": "ugly"}], "others.jsonl")
    with pytest.raises(ShardFormerError, match=words):
        load_training_data(config(tmp_path, "gpt2", changes, model={"task": task}))


@pytest.mark.parametrize("form", ["lines", "list", "crlf", "mark"])
def test_texts_may_contain_any_json_character(form: str, tmp_path: Path) -> None:
    words = ["one\u2028two", "three\x85four\x0bfive", "six\u2029"]
    rows = [json.dumps({"text": word}, ensure_ascii=False) for word in words]
    whole = {"list": f" [{', '.join(rows)}]", "crlf": "\r\n".join(rows)}.get(form, "\n".join(rows))
    (tmp_path / "rows.jsonl").write_bytes(whole.encode("utf-8-sig" if form == "mark" else "utf-8"))
    found = load_training_data(config(tmp_path, "gpt2", {"train": str(tmp_path / "rows.jsonl"), "sequence_length": 2}))
    expected = [*"\0".join(words).encode()]
    tokens = [int(token) for i in range(len(found.train_dataset)) for token in found.train_dataset[i]["input_ids"]]
    assert tokens == [PAD_TOKEN if byte == 0 else byte for byte in expected][: len(tokens)]
    assert len(tokens) >= len(expected) - 1


def test_an_exported_image_processor_equals_the_training_transform(tmp_path: Path) -> None:
    made = config(tmp_path, "vit", {"train": write_images(tmp_path)}, model={"task": "image_classification"})
    found = load_training_data(made, 32)
    found.processor.save_pretrained(tmp_path)
    kind = json.loads((tmp_path / "preprocessor_config.json").read_text(encoding="utf-8"))["image_processor_type"]
    processor = getattr(transformers, kind).from_pretrained(tmp_path)  # AutoImageProcessor may need torchvision
    with Image.open(tmp_path / "images/cat/0.png") as image:
        pixels = processor(image, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(pixels, found.train_dataset[0]["pixel_values"], atol=0.02, rtol=0)


def test_rows_may_contain_image_paths(tmp_path: Path) -> None:
    files = sorted(Path(write_images(tmp_path)).glob("*/*"))
    rows = write_rows(tmp_path, [{"image": str(file), "label": file.parent.name} for file in files])
    found = load_training_data(config(tmp_path, "vit", {"train": rows}, model={"task": "image_classification"}), 32)
    assert found.classes == ["cat", "dog"]
    assert found.train_dataset[0]["pixel_values"].shape == (3, 32, 32)
    wrong = write_rows(tmp_path, [{"image": 3, "label": kind} for kind in ("cat", "dog")], "wrong.jsonl")
    with pytest.raises(InputError, match=r"Each image must be .*, but got 3"):
        load_training_data(config(tmp_path, "vit", {"train": wrong}, model={"task": "image_classification"}), 32)


def test_the_format_of_mixed_names_cannot_be_inferred(tmp_path: Path) -> None:
    data = config(tmp_path, "gpt2", {"train": ["a.txt", "b.jsonl"]}).data
    with pytest.raises(ConfigError, match=r"data.format"):
        infer_data_format(data, ["a.txt", "b.jsonl"])


def test_labels_of_mixed_types_raise(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": 1}, {"text": "b", "label": "one"}]
    with pytest.raises(InputError, match=r"int, str"):
        load_training_data(
            config(tmp_path, "bert", {"train": write_rows(tmp_path, rows)}, model={"task": "classification"})
        )
