"""Changes to a loaded model before sharding are recorded, so that each rank applies them to its shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import shardformer
from shardformer.errors import ConfigError
from shardformer.layout.sharding_metadata import get_shard_specs, get_sharding_metadata
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.meta_init.lazy_init import RecordingMethodWrapper, materialize
from shardformer.weights.from_pretrained import from_pretrained

SMALL = dict(vocab_size=96, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=request.param)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def resized(model: Any) -> None:
    model.resize_token_embeddings(101)


def resized_plainly(model: Any) -> None:
    model.resize_token_embeddings(101, mean_resizing=False)


def smaller(model: Any) -> None:
    model.resize_token_embeddings(90)


def resized_twice(model: Any) -> None:
    resized(model)
    model.resize_token_embeddings(110, pad_to_multiple_of=8)


def cast(model: Any) -> None:
    resized(model.double())


def initialized(model: Any) -> None:
    def zero(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)

    model.apply(zero)


CHANGES = [resized, resized_plainly, smaller, resized_twice, cast, initialized]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_to_a_loaded_model_match_transformers(change: Callable[[Any], None], folder: Path) -> None:
    plain: Any = transformers.LlamaForCausalLM.from_pretrained(folder)
    torch.manual_seed(3)
    change(plain)
    state = torch.get_rng_state()
    model: Any = from_pretrained(transformers.LlamaForCausalLM, folder)
    torch.manual_seed(3)
    change(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.vocab_size == plain.config.vocab_size

    whole = materialize(model)
    assert not any(isinstance(value, RecordingMethodWrapper) for value in vars(whole).values())
    for name, p in plain.named_parameters(remove_duplicate=False):
        found = whole.get_parameter(name)
        assert found.dtype == p.dtype
        torch.testing.assert_close(found, p, msg=name)


def test_resized_embeddings_are_sharded(folder: Path) -> None:
    plain: Any = transformers.LlamaForCausalLM.from_pretrained(folder)
    torch.manual_seed(3)
    resized(plain)

    def check(context: ParallelContext) -> None:
        model: Any = from_pretrained(transformers.LlamaForCausalLM, folder)
        torch.manual_seed(3 + context.rank)
        model.resize_token_embeddings(101)
        shardformer.shard_model(model, context=context)
        specs, coords = get_shard_specs(model), get_sharding_metadata(model).coords
        assert specs["model.embed_tokens.weight"].shape == (101, SMALL["hidden_size"])
        for name, p in model.named_parameters():
            torch.testing.assert_close(p, specs[name].slice_full_tensor(plain.get_parameter(name), coords), msg=name)

    run_as_threads(check, tensor=2, one_at_a_time=True)


def test_unrecorded_changes_are_refused(folder: Path) -> None:
    model: Any = from_pretrained(transformers.LlamaForCausalLM, folder)
    with torch.no_grad():
        model.model.norm.weight.fill_(2.0)
    resized(model)
    with pytest.raises(ConfigError, match="modified after the LazyInit block ended"):
        materialize(model)
