"""Untrusted model folders: remote code, names and file contents are loaded correctly or refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import shardformer
from shardformer.discovery.shrink_config import find_transformers_model_class
from shardformer.errors import ConfigError, ShardFormerError
from shardformer.meta_init.lazy_init import materialize
from shardformer.train_command.build import build_model
from shardformer.train_command.config_schema import TrainConfig, parse_train_config
from shardformer.train_command.load_data import TrainingData
from shardformer.train_command.model_config import load_model_config
from shardformer.train_command.tokenizer import load_tokenizer
from shardformer.verify.model_source import find_model_source

CONFIG_CODE = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own"
"""
CODE = """
from transformers import LlamaForCausalLM

from .own_config import OwnConfig

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="8KB")
    return tmp_path / "model"


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


TOKENIZER = """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


class Asked:
    """A standard input that must not be read."""

    def readline(self, *args: Any) -> str:
        raise AssertionError("a question was asked on the standard input")

    read = fileno = readline


def copy_code_into(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the folder to which transformers copies remote code, separately for each test."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.endswith("modules")])
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)


def with_code(folder: Path) -> Path:
    (folder / "own_config.py").write_text(CONFIG_CODE)
    (folder / "own.py").write_text(CODE)
    auto_map = {"AutoConfig": "own_config.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    change(folder, model_type="own", auto_map=auto_map)
    return folder


def test_remote_code_is_not_run_without_consent_and_without_a_prompt(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Asked())
    monkeypatch.setattr("builtins.input", Asked().readline)
    with_code(folder)
    with pytest.raises(ConfigError, match="trust_remote_code=True"):
        shardformer.from_pretrained(transformers.AutoModelForCausalLM, folder)
    with pytest.raises(ConfigError, match="custom code"):
        find_model_source(str(folder), use_dropout=False)
    with pytest.raises(ConfigError, match="is not True or False"):
        shardformer.from_pretrained(transformers.AutoModelForCausalLM, folder, trust_remote_code="yes")


def test_remote_code_is_run_with_consent(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_code_into(tmp_path / "modules", monkeypatch)
    plain = transformers.LlamaForCausalLM.from_pretrained(folder)
    model = shardformer.from_pretrained(transformers.AutoModelForCausalLM, with_code(folder), trust_remote_code=True)
    assert type(model).__name__ == "OwnModel"
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()


def test_an_export_contains_the_code_of_its_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_code_into(tmp_path / "modules", monkeypatch)
    kind = transformers.AutoModelForCausalLM
    model = shardformer.from_pretrained(kind, with_code(folder), trust_remote_code=True)
    materialize(model)
    shardformer.export_pretrained(model, tmp_path / "export")
    again = kind.from_pretrained(tmp_path / "export", trust_remote_code=True)
    assert type(again).__name__ == "OwnModel"
    assert [n for n, x in again.state_dict().items() if not torch.equal(x, model.state_dict()[n])] == []


def with_tokenizer(folder: Path) -> Path:
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    (folder / "own_words.py").write_text(TOKENIZER)
    path = folder / "tokenizer_config.json"
    said = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own_words.OwnTokenizer"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    return folder


def run_of(folder: Path, **model: Any) -> TrainConfig:
    return parse_train_config({"model": {"name": str(folder), **model}, "data": {"train": "a.txt"}}, "run.toml")


@pytest.mark.parametrize("random", [False, True])
def test_a_run_needs_consent_for_remote_code(
    folder: Path, tmp_path: Path, random: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_code_into(tmp_path / "modules", monkeypatch)
    monkeypatch.setattr(sys, "stdin", Asked())
    monkeypatch.setattr("builtins.input", Asked().readline)
    with_tokenizer(with_code(folder))
    data = TrainingData("", None)
    for without in ({}, {"trust_remote_code": False}):
        with pytest.raises(ConfigError, match=r"set model\.trust_remote_code = true"):
            load_model_config(run_of(folder, random=random, **without))
    config = run_of(folder, random=random, trust_remote_code=True)
    for lazy in (True, False):
        assert type(build_model(config, data, load_model_config(config), lazy_init=lazy)).__name__ == "OwnModel"
    assert (
        type(load_tokenizer(None, str(folder), has_random_weights=False, trust_remote_code=True).hf_tokenizer).__name__
        == "OwnTokenizer"
    )
    with pytest.raises(ConfigError, match=r"model\.trust_remote_code"):
        load_tokenizer(None, str(folder), has_random_weights=False)
    with pytest.raises(
        ConfigError, match=r"custom code.*Set data\.tokenizer"
    ):  # consent is for the model, not for another folder
        load_tokenizer(str(folder), "another", has_random_weights=False, trust_remote_code=True)


def test_a_head_defined_only_in_remote_code_does_not_prompt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []  # transformers makes an error of its own of one that is raised here
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "n")
    (folder / "own.py").write_text(CODE)
    change(folder, auto_map={"AutoModelForMaskedLM": "own.OwnModel"})
    config = run_of(folder, random=True, task="masked")
    with pytest.raises(ConfigError, match="trust_remote_code"):
        build_model(config, TrainingData("", None), load_model_config(config))
    assert asked == []


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/other.safetensors", "a/../../b.safetensors", 3, None, "pytorch_model.bin"]
)
def test_an_index_may_only_name_files_in_its_folder(folder: Path, name: Any) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = name
    path.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="is not a safetensors file in this folder"):
        shardformer.from_pretrained(transformers.LlamaForCausalLM, folder)


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"weight_map": []}', "{", ""])
def test_an_invalid_index_is_refused(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"is not valid: "):
        shardformer.from_pretrained(transformers.LlamaForCausalLM, folder)


def test_no_file_is_unpickled(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"contains neither model\.safetensors nor"):
        shardformer.from_pretrained(transformers.LlamaForCausalLM, folder)


def test_only_model_classes_named_by_files_are_used() -> None:
    assert find_transformers_model_class("LlamaForCausalLM") is transformers.LlamaForCausalLM
    others = ["AutoModel", "PreTrainedModel", "pipeline", "torch", "Trainer", "LlamaConfig", "os.path", "", "__class__"]
    assert [name for name in others if find_transformers_model_class(name) is not None] == []


@pytest.mark.parametrize("named", [["pipeline"], ["AutoModel"], [3], "LlamaForCausalLM", [], None, ["NoSuchModel"]])
def test_invalid_architectures_are_ignored_or_refused(folder: Path, named: Any) -> None:
    change(folder, architectures=named)
    try:
        source = find_model_source(str(folder), use_dropout=False)
    except ShardFormerError as error:
        assert named not in ([], None) and error.remedy  # a string, in the oldest transformers
    else:
        assert source.head == "LlamaForCausalLM"


@pytest.mark.reduced(at_most=12)
@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": "48"},
        {"hidden_size": -16},
        {"hidden_size": 0},
        {"hidden_size": None},
        {"hidden_size": [16]},
        {"num_attention_heads": 5, "head_dim": None},
        {"num_attention_heads": 0, "head_dim": None},
        {"num_hidden_layers": "two"},
        {"vocab_size": 1.5},
        {"rope_parameters": 3},
        {"model_type": "no_such_type"},
        {"model_type": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["AutoModelForCausalLM", "LlamaForCausalLM"])
def test_config_fields_of_wrong_types_raise_or_work(folder: Path, fields: dict[str, Any], kind: str) -> None:
    change(folder, **fields)
    for use in (
        lambda: shardformer.from_pretrained(getattr(transformers, kind), folder),
        lambda: find_model_source(str(folder), use_dropout=False).model_fn(),
    ):
        try:
            assert isinstance(use(), torch.nn.Module)
        except ShardFormerError as error:
            assert error.what and error.remedy


@pytest.mark.parametrize("text", ["[]", "3", "{", "null", '"a"'])
def test_a_config_that_is_not_an_object_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ShardFormerError):
        shardformer.from_pretrained(transformers.AutoModelForCausalLM, folder)
    with pytest.raises(ShardFormerError):
        find_model_source(str(folder), use_dropout=False)
