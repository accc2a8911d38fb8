"""A registered policy is used for the code that it was written for; what else runs in layers is proven, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, wraps
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

import shardformer
from shardformer.errors import PolicyError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatches, SmallModel


class OverFeatures(LlamaMLP):
    """What it gives depends on all features at once."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).softmax(-1))
        return found


class OtherOrder(LlamaMLP):
    """The same, written otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        found: Tensor = self.down_proj(up * self.act_fn(self.gate_proj(x)))
        return found


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu().square()


class OwnLlama(transformers.LlamaForCausalLM):
    """A user's class that builds its own MLPs."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = OverFeatures(config)


@cache
def first() -> Any:
    return SmallModel("llama")().train()


def plain() -> Any:
    return copy.deepcopy(first())


def of_class(kind: type[nn.Module]) -> Callable[[], Any]:
    def make() -> Any:
        model = plain()
        for layer in model.model.layers:
            layer.mlp.__class__ = kind
        return model

    return make


def patched(function: Callable[..., Tensor]) -> Callable[[], Any]:
    def make() -> Any:
        model = plain()
        for layer in model.model.layers:
            layer.mlp.forward = MethodType(function, layer.mlp)
        return model

    return make


def closed_over() -> Any:
    model = plain()
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: OverFeatures.forward(mlp, x)
    return model


def with_activation() -> Any:
    model = plain()
    for layer in model.model.layers:
        layer.mlp.act_fn = Squared()
    return model


@pytest.mark.parametrize("make", [of_class(OtherOrder), patched(OtherOrder.forward), with_activation], ids=range(3))
def test_what_a_proof_covers_is_cut(make: Callable[[], Any]) -> None:
    batch = RandomBatches(DEFAULT_HEAD["llama"])(0)
    expected = float(make()(**batch).loss.detach())

    def do(context: ParallelContext) -> None:
        model = shardformer.shard_model(make(), context=context)
        assert float(model(**batch).loss.detach()) == pytest.approx(expected, rel=1e-5)

    run_as_threads(do, tensor=2)


@pytest.mark.parametrize(
    "make",
    [of_class(OverFeatures), patched(OverFeatures.forward), closed_over, lambda: OwnLlama(plain().config)],
    ids=range(4),
)
def test_what_the_policy_does_not_know_is_refused(make: Callable[[], Any]) -> None:
    def do(context: ParallelContext) -> str:
        torch.manual_seed(0)
        with pytest.raises(PolicyError) as error:
            shardformer.shard_model(make(), context=context)
        return str(error.value)

    for said in run_as_threads(do, tensor=2):
        assert "runs code that LlamaPolicy was not written for" in said
        assert "shardformer.derive_policy(model)" in said


def test_where_nothing_is_cut_by_tensor_anything_goes() -> None:
    def do(context: ParallelContext) -> None:
        shardformer.shard_model(of_class(OverFeatures)(), context=context)(
            **RandomBatches(DEFAULT_HEAD["llama"])(0)
        ).loss.backward()

    run_as_threads(do, data=2)


def test_a_policy_that_a_user_gives_is_tried_on_such_code_too() -> None:
    from shardformer.policies.models.llama import LlamaPolicy

    def do(context: ParallelContext) -> str:
        with pytest.raises(PolicyError) as error:
            shardformer.shard_model(of_class(OverFeatures)(), LlamaPolicy, context=context)
        return str(error.value)

    for said in run_as_threads(do, tensor=2):
        assert "the MLP 'mlp' of LlamaPolicy alone, LlamaForCausalLM " in said


def wrap(module: nn.Module) -> None:
    """As accelerate wraps a forward: copies of the module share the wrapper, and with it the module."""
    forward = module.forward

    @wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    module.forward = wrapped  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["model.layers.1", "model.layers.0.input_layernorm"])
def test_a_wrapped_forward_that_copies_of_the_model_share_is_refused(path: str) -> None:
    models = [plain() for _ in range(2)]

    def shard(context: ParallelContext) -> None:
        model = models[context.rank]
        wrap(model.get_submodule(path))
        with pytest.raises(PolicyError):
            shardformer.shard_model(model, context=context)
        assert all(parameter.grad is None for parameter in model.parameters())

    run_as_threads(shard, tensor=2)
