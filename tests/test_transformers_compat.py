"""Differences between versions of transformers, tested for each name independent of the installed version."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import ConvNextConfig, ConvNextModel, DynamicCache, GPT2Config, GPT2LMHeadModel

from shardformer.transformers_compat import (
    find_embeddings,
    find_kv_caches,
    get_forward_arg_names,
    has_cached_tokens,
    is_kv_cache,
    remove_kv_caches,
    synchronize_generation,
)

X = torch.ones(1, 1, 2, 2)


class Output(dict[str, Any]):
    """A model output of transformers."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(fields)


class Model(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, mems: Any = None, state: Any = None) -> None: ...


def filled() -> DynamicCache:
    cache = DynamicCache()
    cache.update(X, X, 0)
    return cache


@pytest.mark.parametrize("value", [DynamicCache(), filled(), ((X, X), (X, X)), [(X, X, None)]])
def test_caches_are_recognized_by_type(value: Any) -> None:
    assert is_kv_cache(value)
    assert find_kv_caches([X, None, value, "eager", 3]) == [value]


@pytest.mark.parametrize("value", [None, X, (X, X), [X], (), ((),), {"a": X}, "cache", (("a", "b"),), (X, (X, X))])
def test_tensors_and_tuples_of_tensors_are_not_caches(value: Any) -> None:
    assert not is_kv_cache(value)


def test_a_model_without_embeddings_has_none() -> None:
    """transformers raises an error instead, and other modules do not have the method."""
    images = ConvNextModel(ConvNextConfig(hidden_sizes=[4, 4, 4, 4], depths=[1, 1, 1, 1]))
    text = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=11))
    for kind, expected in (("input", text.transformer.wte), ("output", text.lm_head)):
        assert find_embeddings(images, kind) is None and find_embeddings(nn.Linear(2, 2), kind) is None
        assert find_embeddings(text, kind) is expected


def test_a_new_cache_is_empty() -> None:
    assert not has_cached_tokens(DynamicCache())
    assert has_cached_tokens(filled())
    assert has_cached_tokens(((X, X),))


@pytest.mark.parametrize("name", ["past_key_values", "cache_params", "cache", "a name that is yet to come"])
def test_caches_are_removed_from_outputs_under_any_name(name: str) -> None:
    found = remove_kv_caches(Output(logits=X, **{name: filled()}), get_forward_arg_names(Model()))
    assert type(found) is Output
    assert list(found) == ["logits"]


@pytest.mark.parametrize("name", ["mems", "state"])
def test_state_for_a_later_forward_is_removed(name: str) -> None:
    assert list(remove_kv_caches(Output(logits=X, **{name: [X, X]}), get_forward_arg_names(Model()))) == ["logits"]


def test_an_output_without_a_cache_is_unchanged() -> None:
    for output in (Output(logits=X, attention_mask=X, hidden_states=(X, X)), X, (X, filled()), None):
        assert remove_kv_caches(output, get_forward_arg_names(Model())) is None


@pytest.mark.full
@pytest.mark.above_budget("under -OO, Python compiles transformers anew")
@pytest.mark.slow
def test_models_are_built_without_docstrings() -> None:
    code = "from shardformer.transformers_compat import load_transformers as load; t = load(); "
    code += "print(t.GPT2LMHeadModel(t.GPT2Config(n_embd=4, n_layer=1, n_head=1)).config.n_embd, t.GPT2Model.__doc__)"
    env = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
    said = subprocess.run([sys.executable, "-OO", "-c", code], env=env, capture_output=True, text=True, timeout=240)
    assert said.stdout.split() == ["4", "None"], said.stderr


@pytest.mark.slow
def test_run_configurations_are_read_without_docstrings() -> None:
    code = (
        "from shardformer.train_command.config_schema import ParallelTable as T; "
        "print(T.model_fields['pipe'].description.split()[0])"
    )
    said = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, timeout=240)
    assert said.stdout.split() == ["Pipeline"], said.stderr


class Forwarding(nn.Module):
    """A wrapper that has the attributes of its model, as a tuner of PEFT."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "model" else getattr(self.__dict__["_modules"]["model"], name)


def test_generation_is_synchronized_inside_wrappers() -> None:
    config = GPT2Config(vocab_size=11, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    wrapper, begun = Forwarding(GPT2LMHeadModel(config)), []
    synchronize_generation(wrapper, lambda: begun.append(True), lambda unfinished: unfinished)
    found = wrapper.generate(torch.tensor([[3, 4]]), max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert found.shape[0] == 1 and begun == [True]
