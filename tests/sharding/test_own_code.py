"""User code in library models: refused if it reads tokens of other ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import pytest
from torch import Tensor, nn

from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError, PolicyError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext, reshape_sequence_axis, reshape_tensor_axis
from shardformer.mesh.rank_grid import count_ranks_on_axis
from shardformer.shard_model_api import shard_model
from tests.sharding.test_changed_models import check, llama

pytestmark = pytest.mark.slow

Layout = Mapping[str, Any]
CUT: list[Layout] = [{"sequence": 2}, {"tensor": 2, "sequence_parallel": True}]
WHOLE: list[Layout] = [{"tensor": 2}, {"pipe": 2}]


def less_mean(x: Tensor) -> Tensor:
    """Subtract the mean over all tokens."""
    return x - x.mean(1, keepdim=True)


def halved(x: Tensor) -> Tensor:
    return x * 0.5


class Around(nn.Module):
    """Replaces an MLP."""

    def __init__(self, mlp: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mlp, self.change = mlp, change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.mlp(x))


def with_method(change: Callable[[Tensor], Tensor]) -> Any:
    """Replace the `forward` of each MLP by a method."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return change(type(self).forward(self, x))

    model = llama()
    for layer in model.model.layers:
        layer.mlp.forward = MethodType(forward, layer.mlp)
    return model


def with_function(change: Callable[[Tensor], Tensor]) -> Any:
    """Wrap the `forward` of each MLP in a function."""
    model = llama()
    for layer in model.model.layers:
        layer.mlp.forward = partial(_changed, layer.mlp.forward, change)
    return model


def _changed(forward: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return change(forward(x))


def with_module(change: Callable[[Tensor], Tensor]) -> Any:
    model = llama()
    for layer in model.model.layers:
        layer.mlp = Around(layer.mlp, change)
    return model


def is_right_or_refused(plain: Any, layout: Layout) -> None:
    """Check the layout. Under context parallelism a module that mixes tokens may receive all of them."""
    try:
        check(plain, layout)
    except (ConfigError, PolicyError):
        is_refused(plain, layout)


def is_refused(plain: Any, layout: Layout) -> None:
    parallel = ParallelConfig(**layout)
    axes = {name: size for name, size in parallel.sizes.items() if size is not None}

    def refused(context: ParallelContext) -> None:
        context = reshape_tensor_axis(reshape_sequence_axis(context, parallel.sequence), parallel.tensor)
        with pytest.raises((ConfigError, PolicyError)):
            shard_model(copy.deepcopy(plain), config=parallel.make_shard_config(context))

    run_as_threads(refused, **{**axes, "sequence": count_ranks_on_axis(parallel.sequence)}, one_at_a_time=True)


@pytest.mark.reduced(one_in=6, first=1)
@pytest.mark.parametrize("layout", CUT, ids=str)
@pytest.mark.parametrize("make", [with_method, with_function, with_module], ids=lambda make: make.__name__)
def test_code_that_reads_other_tokens_is_correct_or_refused(make: Callable[..., Any], layout: Layout) -> None:
    """Runs after a valid model of the same class and config, and before another one."""
    check(llama(), layout)
    is_right_or_refused(make(less_mean), layout)
    check(llama(), layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", WHOLE, ids=str)
def test_code_that_reads_other_tokens_trains_with_full_sequences(layout: Layout) -> None:
    check(with_method(less_mean), layout)


@pytest.mark.reduced(one_in=6)
@pytest.mark.parametrize("layout", [*CUT, {"tensor": (2, 1), "tensor_parallel_mode": "2d"}], ids=str)
@pytest.mark.parametrize("make", [with_method, with_function], ids=lambda make: make.__name__)
def test_code_that_reads_single_tokens_trains(make: Callable[..., Any], layout: Layout) -> None:
    check(make(halved), layout)


class RunningSum(nn.Module):
    """Replaces a final norm and reads all tokens before each token."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x.cumsum(1) / 8)
        return found


CUT_ANYHOW: list[Layout] = [*CUT, {"tensor": (2, 2), "tensor_parallel_mode": "2d"}, {"tensor": 2, "sequence": 2}]


@pytest.mark.reduced(one_in=4)
@pytest.mark.parametrize("layout", [*CUT_ANYHOW, {"pipe": 2}], ids=str)
def test_replacement_of_the_final_norm_receives_all_tokens(layout: Layout) -> None:
    model = llama()
    model.model.norm = RunningSum(model.model.norm)
    check(model, layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", CUT_ANYHOW, ids=str)
def test_another_final_norm_trains(layout: Layout) -> None:
    model = llama()
    model.model.norm = nn.LayerNorm(model.config.hidden_size).double()
    check(model, layout)


@pytest.mark.reduced(one_in=2, at_most=1)
@pytest.mark.parametrize("layout", CUT_ANYHOW, ids=str)
def test_forward_hook_on_the_final_norm_receives_all_tokens(layout: Layout) -> None:
    model = llama()
    model.model.norm.register_forward_hook(lambda module, args, out: less_mean(out))
    check(model, layout)


@pytest.mark.reduced(one_in=2, first=1)
@pytest.mark.parametrize("layout", CUT_ANYHOW, ids=str)
def test_pre_hook_on_the_final_norm_is_refused(layout: Layout) -> None:
    model = llama()
    model.model.norm.register_forward_pre_hook(lambda module, args: (less_mean(args[0]),))
    is_refused(model, layout)


@pytest.mark.reduced(one_in=2)
@pytest.mark.parametrize("where", ["norm", "layers.0.input_layernorm", "embed_tokens"])
def test_hooks_survive_the_replacement_of_their_module(where: str) -> None:
    """The replacement is a fused norm or a sharded embedding. Their handles still remove the hooks."""
    model = llama()
    handle = model.model.get_submodule(where).register_forward_hook(lambda module, args, out: less_mean(out))
    check(model, {"tensor": 2, "fused_normalization": True})

    def removed(context: ParallelContext) -> int:
        own = llama()
        handle = own.model.get_submodule(where).register_forward_hook(lambda module, args, out: less_mean(out))
        shard_model(own, context=context, enable_fused_normalization=True)
        module = own.model.get_submodule(where)
        before = len(module._forward_hooks)
        handle.remove()
        return before - len(module._forward_hooks)

    assert run_as_threads(removed, tensor=2, one_at_a_time=True) == [1, 1]
    handle.remove()
