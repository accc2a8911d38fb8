"""A model that sees the token to predict raises, independently of its class name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shardformer.errors import ConfigError
from shardformer.meta_init.lazy_init import LazyInit
from shardformer.train_command.dry_run import make_dry_run_report
from shardformer.train_command.run import check_attention_fits_task, load_data_and_model, measure_label_dependence
from tests.runs.files import SMALL, config, write_text

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
XLNET = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}


def model_of(kind: str, fields: dict[str, Any], head: str = "AutoModelForCausalLM") -> Any:
    made = transformers.AutoConfig.for_model(kind, vocab_size=64, pad_token_id=0, **fields)
    with LazyInit():
        return getattr(transformers, head).from_config(made)


@pytest.mark.parametrize(
    ("kind", "fields", "sees"),
    [
        ("gpt2", SMALL["gpt2"], False),
        ("llama", TINY, False),
        ("mixtral", {**TINY, "num_key_value_heads": 2, "num_local_experts": 2, "output_router_logits": True}, False),
        ("mamba", {"hidden_size": 16, "num_hidden_layers": 2}, False),
        ("bert", SMALL["bert"], True),
        ("bert", {**SMALL["bert"], "is_decoder": True}, False),
        ("roberta", {**TINY, "is_decoder": False}, True),
        ("electra", TINY, True),
        ("xlnet", XLNET, True),
    ],
    ids=str,
)
def test_whether_a_model_sees_the_token_to_predict(kind: str, fields: dict[str, Any], sees: bool) -> None:
    found = measure_label_dependence(model_of(kind, fields))
    assert found is not None and found.depends_on_label is sees


def test_causal_training_of_an_encoder_raises(tmp_path: Path) -> None:
    made = config(tmp_path, "bert", {"train": write_text(tmp_path)})
    for call in (load_data_and_model, make_dry_run_report):
        with pytest.raises(
            ConfigError, match=r"does not support BertLMHeadModel.*task = 'masked', or .*is_decoder = true"
        ):
            call(made)
    fixed = config(
        tmp_path, "bert", {"train": write_text(tmp_path)}, model={"config": {**SMALL["bert"], "is_decoder": True}}
    )
    load_data_and_model(fixed)


@pytest.mark.parametrize(
    ("kind", "head", "words"),
    [
        ("gpt2", "GPT2LMHeadModel", r"GPT2LMHeadModel, because the model ignores later tokens"),
        ("bert", "BertLMHeadModel", r"BertLMHeadModel, because the model predicts the next token"),
    ],
)
def test_masked_training_of_a_decoder_raises(kind: str, head: str, words: str, tmp_path: Path) -> None:
    model = {"task": "masked", "head": head}
    with pytest.raises(ConfigError, match=words):
        load_data_and_model(config(tmp_path, kind, {"train": write_text(tmp_path)}, model=model))


def test_a_large_model_is_checked_with_a_reduced_model(tmp_path: Path) -> None:
    fields = {"hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12, "intermediate_size": 3072}
    made = config(tmp_path, "bert", {"train": write_text(tmp_path)}, model={"config": fields})
    with pytest.raises(ConfigError, match=r"does not support BertLMHeadModel, because the model sees the tokens"):
        check_attention_fits_task(made, model_of("bert", fields))


def test_the_random_state_is_kept(tmp_path: Path) -> None:
    made = config(tmp_path, "gpt2", {"train": write_text(tmp_path)})
    model = model_of("gpt2", SMALL["gpt2"])
    before = torch.get_rng_state()
    check_attention_fits_task(made, model)
    assert torch.equal(torch.get_rng_state(), before)
