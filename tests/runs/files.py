"""Small files and configurations for the tests of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy

from shardformer.train_command.config_schema import TrainConfig, parse_train_config

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "bert": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    "t5": {"d_model": 16, "d_kv": 8, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2, "d_ff": 32},
    "vit": {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
        "image_size": 32, "patch_size": 16,
    },
}  # fmt: skip
WORDS = "the quick brown fox jumps over the lazy dog and then it sleeps "


def write_text(folder: Path, name: str = "text.txt", times: int = 20) -> str:
    file = folder / name
    file.write_text(WORDS * times, encoding="utf-8")
    return str(file)


def write_rows(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def labelled(count: int = 12) -> list[dict[str, Any]]:
    return [
        {"text": f"sentence {i} {'x' * i}", "other": f"reply {i}", "label": ("bad", "good")[i % 2]}
        for i in range(count)
    ]


def write_images(folder: Path, count: int = 6) -> str:
    from PIL import Image

    numbers = numpy.random.default_rng(0)
    for i in range(count):
        place = folder / "images" / ("cat", "dog")[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(numbers.integers(0, 255, (40, 30, 3), dtype=numpy.uint8)).save(place / f"{i}.png")
    return str(folder / "images")


def save_word_tokenizer(folder: Path) -> Any:
    """Save a tokenizer of ten words with a chat template, and return it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "[u]", "[a]", "hello", "there", "you", "too", "again", "?"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    found = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="?",
        additional_special_tokens=["[u]", "[a]"],
    )  # fmt: skip
    found.chat_template = (
        "<s>{% for m in messages %}{{ '[u] ' if m.role == 'user' else '[a] ' }}{{ m.content }} "
        "{% if m.role == 'assistant' %}</s> {% endif %}{% endfor %}{% if add_generation_prompt %}[a] {% endif %}"
    )
    found.save_pretrained(folder)
    return found


def config(where: Path, kind: str, data: dict[str, Any], **tables: Any) -> TrainConfig:
    """Configuration of a run with a small random model."""
    model = {"name": kind, "random": True, "config": SMALL[kind], **tables.pop("model", {})}
    values: dict[str, Any] = {
        "folder": str(where / "run"),
        "model": model,
        "data": {"sequence_length": 16, "batch_size": 4, **data},
        "optimizer": {"lr": 1e-2},
        "training": {"steps": 4},
        **tables,
    }
    if "optimizer" in tables:
        values["optimizer"] = {"lr": 1e-2, **tables["optimizer"]}
    return parse_train_config(values, "run.toml")
