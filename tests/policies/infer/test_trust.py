"""A registered policy is used for library code; user code in layers is validated or refused."""

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
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory


class OverFeatures(LlamaMLP):
    """An MLP whose output depends on all features, so that it cannot be sharded."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).softmax(-1))
        return output


class OtherOrder(LlamaMLP):
    """An MLP with the same computation as the original, written differently."""

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        output: Tensor = self.down_proj(up * self.act_fn(self.gate_proj(x)))
        return output


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu().square()


class OwnLlama(transformers.LlamaForCausalLM):
    """A user class that builds its own MLPs."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = OverFeatures(config)


@cache
def first() -> Any:
    return SmallModelFactory("llama")().train()


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


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("make", [of_class(OtherOrder), patched(OtherOrder.forward), with_activation], ids=range(3))
def test_validated_user_code_is_sharded(make: Callable[[], Any]) -> None:
    batch = RandomBatchFactory(DEFAULT_HEAD["llama"])(0)
    expected = float(make()(**batch).loss.detach())

    def do(context: ParallelContext) -> None:
        model = shardformer.shard_model(make(), context=context)
        assert float(model(**batch).loss.detach()) == pytest.approx(expected, rel=1e-5)

    run_as_threads(do, tensor=2)


@pytest.mark.reduced(one_in=2, at_most=1)
@pytest.mark.parametrize(
    "make",
    [of_class(OverFeatures), patched(OverFeatures.forward), closed_over, lambda: OwnLlama(plain().config)],
    ids=range(4),
)
def test_code_that_the_policy_does_not_know_is_refused(make: Callable[[], Any]) -> None:
    def do(context: ParallelContext) -> str:
        torch.manual_seed(0)
        with pytest.raises(PolicyError) as error:
            shardformer.shard_model(make(), context=context)
        return str(error.value)

    for message in run_as_threads(do, tensor=2):
        assert "LlamaPolicy does not match your code in" in message
        assert "shardformer.derive_policy(model)" in message


def test_user_code_is_not_validated_without_tensor_parallelism() -> None:
    def do(context: ParallelContext) -> None:
        shardformer.shard_model(of_class(OverFeatures)(), context=context)(
            **RandomBatchFactory(DEFAULT_HEAD["llama"])(0)
        ).loss.backward()

    run_as_threads(do, data=2)


def test_a_passed_policy_is_validated_on_user_code() -> None:
    from shardformer.policies.families import LlamaPolicy

    def do(context: ParallelContext) -> str:
        with pytest.raises(PolicyError) as error:
            shardformer.shard_model(of_class(OverFeatures)(), LlamaPolicy, context=context)
        return str(error.value)

    for message in run_as_threads(do, tensor=2):
        assert "the MLP 'mlp' of LlamaPolicy alone, LlamaForCausalLM " in message


def wrap(module: nn.Module) -> None:
    """Wrap a `forward` as accelerate does: copies of the module share the wrapper and the original module."""
    forward = module.forward

    @wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    module.forward = wrapped  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["model.layers.1", "model.layers.0.input_layernorm"])
def test_a_wrapped_forward_shared_by_copies_is_refused(path: str) -> None:
    models = [plain() for _ in range(2)]

    def shard(context: ParallelContext) -> None:
        model = models[context.rank]
        wrap(model.get_submodule(path))
        with pytest.raises(PolicyError):
            shardformer.shard_model(model, context=context)
        assert all(parameter.grad is None for parameter in model.parameters())

    run_as_threads(shard, tensor=2)
