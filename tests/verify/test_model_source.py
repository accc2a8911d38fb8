"""Each form of MODEL on the command line finds a model, or raises an error."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardformer.errors import ConfigError
from shardformer.verify import model_source
from shardformer.verify import model_source as hub
from shardformer.verify.model_source import ModelSource, PretrainedModelFactory, find_model_source
from shardformer.verify.small_models import DEFAULT_HEAD, HEAD_CLASSES, RandomBatchFactory, SmallModelFactory

USER_MODULE = """
from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory
def model(): return SmallModelFactory("llama")()
def model_of_size(size): return SmallModelFactory("llama")()
def pair(): return SmallModelFactory("llama"), RandomBatchFactory("LlamaForCausalLM")
def table(): return {"model_fn": SmallModelFactory("llama"), "loss_fn": max, "policy": str}
def number(): return 3
def misspelt(): return {"model_fn": SmallModelFactory("llama"), "bach_fn": RandomBatchFactory("LlamaForCausalLM")}
size = 3
"""


@pytest.fixture
def user_module(tmp_path: Path) -> Path:
    path = tmp_path / "models_of_a_user.py"
    path.write_text(USER_MODULE)
    return path


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """Create a folder with ``save_pretrained``."""
    folder = tmp_path / "bert"
    sample = SmallModelFactory("bert", "BertForSequenceClassification", {"hidden_dropout_prob": 0.1})
    sample().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", HEAD_CLASSES)
def test_a_family_name_gives_its_small_model(family: str) -> None:
    source = find_model_source(family)
    assert source.head_classes == HEAD_CLASSES[family] and source.head == DEFAULT_HEAD[family]
    batch = source.make_batch_fn(batch_size=2, sequence_length=9)(0)
    assert {len(value) for value in batch.values()} == {2}
    assert source.loss_fn is not None and torch.isfinite(source.loss_fn(source.model_fn(), batch))


@pytest.mark.parametrize(
    ("family", "changes", "shapes"),
    [
        ("bert", {"vocab_size": 300}, {"input_ids": (2, 9)}),
        ("vit", {"image_size": 12, "num_channels": 1}, {"pixel_values": (2, 1, 12, 12)}),
        ("whisper", {"max_source_positions": 11}, {"input_features": (2, 8, 22), "labels": (2, 9)}),
        ("blip-2", {"num_query_tokens": 3}, {"pixel_values": (2, 3, 20, 20), "input_ids": (2, 12)}),
    ],
)
def test_batches_follow_the_config(
    tmp_path: Path, family: str, changes: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    config = SmallModelFactory(family, changes=changes).get_config()
    config.architectures = [DEFAULT_HEAD[family]]
    config.save_pretrained(tmp_path)
    source = find_model_source(str(tmp_path / "config.json"))
    batch = source.make_batch_fn(batch_size=2, sequence_length=9)(0)
    assert {name: tuple(batch[name].shape) for name in shapes} == shapes
    assert source.loss_fn is not None and torch.isfinite(source.loss_fn(source.model_fn(), batch))


def test_a_folder_gives_its_weights_and_class(bert: Path) -> None:
    source = find_model_source(str(bert))
    assert source.head == "BertForSequenceClassification" and source.config.vocab_size == 127
    ours, theirs = pickle.loads(pickle.dumps(source.model_fn))(), source.model_fn()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_config_gives_random_weights(bert: Path) -> None:
    source = find_model_source(str(bert / "config.json"))
    first, second = source.model_fn().state_dict(), source.model_fn().state_dict()
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert first[name].shape == second[name].shape and not torch.equal(first[name], second[name])


def test_another_head_uses_the_same_weights(bert: Path) -> None:
    source = find_model_source(str(bert)).with_head_class("BertForQuestionAnswering")
    model, whole = source.model_fn(), find_model_source(str(bert)).model_fn()
    assert type(model).__name__ == "BertForQuestionAnswering" and model.qa_outputs.out_features == 2
    name = "bert.encoder.layer.1.output.dense.weight"
    assert torch.equal(model.state_dict()[name], whole.state_dict()[name])
    assert "start_positions" in source.make_batch_fn()(0)


def test_dropout_can_be_disabled(bert: Path) -> None:
    dropped = {m.p for m in find_model_source(str(bert)).model_fn().modules() if isinstance(m, nn.Dropout)}
    silent = {
        m.p for m in find_model_source(str(bert), use_dropout=False).model_fn().modules() if isinstance(m, nn.Dropout)
    }
    assert 0.1 in dropped and silent == {0.0}


def test_a_folder_without_weights_suggests_random_ones(bert: Path) -> None:
    (bert / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"weights of BertForSeq.*pass the path of its config\.json to use random weights"
    ):
        find_model_source(str(bert)).model_fn()


def test_an_unknown_config_raises(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_layers": 3}')
    for path in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(ConfigError, match=r"transformers cannot read the config.*model_type"):
            find_model_source(str(path))


def test_a_function_may_return_a_model(user_module: Path) -> None:
    source = find_model_source(f"{user_module}:model")
    assert source.head == "LlamaForCausalLM" and source.loss_fn is not None
    assert source.make_batch_fn(sequence_length=8)(0)["labels"].shape == (4, 8)


def test_a_function_may_return_a_tuple_or_a_dict(user_module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = find_model_source(f"{user_module}:pair")
    assert isinstance(pair.make_batch_fn(), RandomBatchFactory) and pair.loss_fn is None
    monkeypatch.syspath_prepend(user_module.parent)
    table = find_model_source("models_of_a_user:table")
    assert table.user_overrides == {"loss_fn": max, "policy": str} and table.loss_fn is max
    assert table.make_batch_fn()(0)["input_ids"].shape == (4, 13)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", r"has no function 'nothing'.*at the top level of the module"),
        ("modle", r"Did you mean 'model'"),
        ("size", r"has no function 'size'"),
        ("model_of_size", r"has the parameters \(size\).*default value"),
        ("number", r"returned a int.*\(model_fn, batch_fn\)"),
        ("misspelt", r"returned a dict of model_fn, bach_fn.*model_fn and optionally batch_fn, loss_fn, policy"),
    ],
)
def test_a_function_that_returns_no_model_raises(user_module: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_model_source(f"{user_module}:{name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:model", r"The module 'no_such_module' was not found"),
        ("./no_such_file.py:model", r"There is no Python file '(./)?no_such_file.py'"),
        ("./no-such-folder", r"There is no file or folder './no-such-folder' \(current directory: '/"),
        ("a/b/c", r"There is no file or folder 'a/b/c'"),
        (
            "berd",
            r"Hugging Face model named 'berd'.*cannot be reached.*Did you mean 'bert'.*hf download berd",
        ),
    ],
)
def test_an_unknown_name_reports_the_attempts(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_model_source(name)


def test_the_hub_is_not_contacted_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(hub, "urlopen", refuse)
    assert not model_source.is_hub_reachable()  # the tests run with HF_HUB_OFFLINE=1


def test_a_model_with_unknown_inputs_raises() -> None:
    vision = ModelSource("my ViT", nn.Identity, "ViTForImageClassification", config=object())
    with pytest.raises(ConfigError, match=r"no config with a vocab_size.*\(model_fn, batch_fn\)"):
        vision.make_batch_fn()
    with pytest.raises(ConfigError, match=r"max_position_embeddings=64, but each sample has 65 tokens"):
        find_model_source("gpt2").make_batch_fn(sequence_length=65)


def test_a_head_of_another_family_raises() -> None:
    with pytest.raises(ConfigError, match=r"bert has no head class 'GPT2Model'.*BertModel.*Did you mean 'BertModel'"):
        find_model_source("bert").with_head_class("GPT2Model")
    with pytest.raises(ConfigError, match="add the head in your function"):
        ModelSource("mine", nn.Identity, "").with_head_class("BertModel")
    with pytest.raises(ConfigError, match="cannot be listed"):
        _ = ModelSource("mine", nn.Identity, "").head_classes


def test_a_pretrained_source_can_be_pickled_and_compared() -> None:
    assert PretrainedModelFactory("here", "BertModel") == pickle.loads(
        pickle.dumps(PretrainedModelFactory("here", "BertModel"))
    )


def test_any_model_type_of_transformers_has_a_small_model() -> None:
    source = find_model_source("stablelm")
    assert source.model_type == "stablelm" and source.head == "StableLmForCausalLM"
    model, batch = pickle.loads(pickle.dumps(source.model_fn))(), source.make_batch_fn()(0)
    assert model(**batch).loss.isfinite() and source.loss_fn is None
    assert not batch["input_ids"].equal(source.make_batch_fn()(1)["input_ids"])


def test_a_folder_takes_precedence_over_a_model_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    SmallModelFactory("llama").get_config().save_pretrained("mamba")
    assert find_model_source("mamba").model_type == "llama"
