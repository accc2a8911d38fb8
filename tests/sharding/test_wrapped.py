"""Wrappers of torch around modules of the model, applied before or after sharding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    checkpoint_wrapper,
    offload_wrapper,
)

import shardformer
from shardformer.errors import ConfigError
from shardformer.layout.sharding_metadata import get_shard_specs, get_sharding_metadata
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.torch_compat import get_wrapped_module_attr_name
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory

BATCH = RandomBatchFactory(DEFAULT_HEAD["llama"])(0)
LAYOUTS = [{"data": 2}, {"tensor": 2}, {"sequence": 2}, {"pipe": 2}, {"tensor": 2, "sequence": 2}]


def plain() -> Any:
    """Return the plain model without a cache, to which recomputation would append twice."""
    torch.manual_seed(0)
    model: Any = SmallModelFactory("llama")().double().train()
    model.config.use_cache = False
    return model


def wrap(model: Any, how: Any = checkpoint_wrapper) -> None:
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = how(layer)


def norm_of(model: Any) -> Tensor:
    """Return the gradient of a norm in the first layer."""
    layer = model.model.layers[0]
    return layer.input_layernorm.weight.grad


def gradient(model: Any) -> Tensor | None:
    if get_sharding_metadata(model).context.pipe.size > 1:
        shardformer.Pipeline(model, micro_batches=2).step(BATCH)
    else:
        model(**BATCH).loss.backward()
    return norm_of(model)


def plain_gradient(model: Any, batch: dict[str, Tensor]) -> Tensor | None:
    model(**batch).loss.backward()
    expected = norm_of(model)
    model.zero_grad()
    return expected


@pytest.mark.reduced(at_most=4)
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_torch_checkpoint_wrapper_gives_the_same_gradients(layout: dict[str, int], order: str) -> None:
    model = plain()
    expected = plain_gradient(model, BATCH)

    def check(context: ParallelContext) -> None:
        own = copy.deepcopy(model)
        if order == "before":
            wrap(own)
            wrappers = list(own.model.layers)
        shardformer.shard_model(own, context=context)
        if order == "after":
            wrap(own)
        else:
            assert list(own.model.layers) == wrappers  # the same objects
        assert all(isinstance(layer, CheckpointWrapper) for layer in own.model.layers)
        found = gradient(own)
        if context.pipe.rank == 0:
            torch.testing.assert_close(found, expected)

    run_as_threads(check, **layout)


def test_checkpoint_wrapper_works_with_context_parallelism_and_cache() -> None:
    model = plain()
    model.config.use_cache = True
    batch = {name: x for name, x in BATCH.items() if name != "attention_mask"}
    expected = plain_gradient(model, batch)

    def check(context: ParallelContext) -> None:
        own = copy.deepcopy(model)
        wrap(own)
        shardformer.shard_model(own, context=context)
        own(**batch).loss.backward()
        torch.testing.assert_close(norm_of(own), expected)

    run_as_threads(check, sequence=2)


@pytest.mark.parametrize("how", ["offload", "twice", "reentrant", "attention"])
def test_other_wrappers_give_the_same_gradients(how: str) -> None:
    model = plain()
    expected = plain_gradient(model, BATCH)

    def check(context: ParallelContext) -> None:
        own = copy.deepcopy(model)
        if how == "offload":
            wrap(own, offload_wrapper)
        elif how == "twice":
            wrap(own)
            wrap(own, offload_wrapper)
        elif how == "reentrant":
            wrap(own, lambda layer: checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.REENTRANT))
        else:
            for layer in own.model.layers:
                layer.self_attn = checkpoint_wrapper(layer.self_attn)
                layer.mlp.down_proj = checkpoint_wrapper(layer.mlp.down_proj)  # a module that is replaced
        shardformer.shard_model(own, context=context)
        torch.testing.assert_close(gradient(own), expected)

    run_as_threads(check, tensor=2)


def test_wrapped_model_keeps_names_weights_and_steps() -> None:
    model = plain()
    names = list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model)
    model(**BATCH).loss.backward()
    optimizer.step()

    def check(context: ParallelContext) -> None:
        own = copy.deepcopy(before)
        wrap(own)
        shardformer.shard_model(own, context=context)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        gradient(own)
        optimizer.step()
        full = shardformer.full_state_dict(own)
        assert list(full) == names
        for name, value in model.state_dict().items():
            torch.testing.assert_close(full[name], value)
        own.load_state_dict(before.state_dict())

    run_as_threads(check, tensor=2)


def test_refused_model_keeps_its_wrappers() -> None:
    def check(context: ParallelContext) -> None:
        model = plain()
        wrap(model)
        layers = list(model.model.layers)
        with pytest.raises(ConfigError):
            shardformer.shard_model(model, context=context, tensor_parallel_mode="3d")
        assert list(model.model.layers) == layers
        assert all(
            get_wrapped_module_attr_name(layer) and isinstance(layer._checkpoint_wrapped_module, nn.Module)
            for layer in layers
        )
        model(**BATCH).loss.backward()

    run_as_threads(check, tensor=2)


def test_compiled_layers_are_kept_or_refused() -> None:
    def check(context: ParallelContext) -> None:
        model = plain()
        wrap(model, lambda layer: torch.compile(layer, backend="eager"))
        if context.pipe.size > 1:
            with pytest.raises(ConfigError, match=r"model\.layers\.0 was compiled with torch\.compile before sharding"):
                shardformer.shard_model(model, context=context)
            return
        outer = list(model.model.layers)
        shardformer.shard_model(model, context=context)
        assert list(model.model.layers) == outer
        other = plain()
        other.model.layers[0].mlp.down_proj = torch.compile(other.model.layers[0].mlp.down_proj, backend="eager")
        with pytest.raises(ConfigError, match=r"down_proj was compiled with torch\.compile before sharding"):
            shardformer.shard_model(other, context=context)
        assert get_shard_specs(plain())

    run_as_threads(check, tensor=2)
    run_as_threads(check, pipe=2)
