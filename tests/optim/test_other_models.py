"""Clipping, loss scalers and optimizer steps read only the gradients of their own parameters.

Ranks may be threads. If one rank reads a gradient of another rank that resets it, the memory may be freed.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import shardformer
from shardformer.comm.collectives import broadcast_object
from shardformer.consistency.rank_divergence import get_metadata_of_trained_models
from shardformer.layout.sharding_metadata import (
    ShardingMetadata,
    get_local_metadata,
    get_sharding_metadata,
    group_params_by_metadata,
)
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from tests.policies.toy import ToyLM, ToyPolicy, toy_batch, toy_loss

GRAD: Any = torch.Tensor.grad


class Watched(nn.Parameter):
    """Parameter that records the reads of its ``.grad`` for which ``is_foreign`` returns True."""

    foreign: list[str]
    is_foreign: Callable[[], bool]

    @property  # type: ignore[override]
    def grad(self) -> Tensor | None:
        if self.is_foreign():
            self.foreign.append(f"{tuple(self.shape)}")
        found: Tensor | None = GRAD.__get__(self)
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        GRAD.__set__(self, value)


def watch(model: nn.Module, foreign: list[str], is_foreign: Callable[[], bool]) -> None:
    for p in model.parameters():
        p.__class__ = Watched
        p.foreign, p.is_foreign = foreign, is_foreign  # type: ignore[attr-defined]


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return ToyLM().double()


def backward(model: nn.Module, scale: float = 1.0) -> nn.Module:
    loss: Any = toy_loss(model, toy_batch(0))
    (scale * loss).backward()
    return model


def clips(model: nn.Module) -> float:
    return float(clip_grad_norm_(model.parameters(), 1e9))


def measures(model: nn.Module) -> float:
    return float(get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def unscales(model: nn.Module) -> float:
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return clips(model)


@pytest.mark.parametrize("use", [clips, measures, unscales])
def test_rank_reads_no_gradient_of_another_rank(use: Callable[[nn.Module], float]) -> None:
    plain, foreign = plain_model(), list[str]()
    models, want = [copy.deepcopy(plain) for _ in range(2)], use(backward(copy.deepcopy(plain)))

    def train(context: ParallelContext) -> list[float]:
        model = shardformer.shard_model(models[context.tensor.rank], ToyPolicy(), context=context)
        me, norms = threading.get_ident(), []
        watch(model, foreign, lambda: threading.get_ident() != me)
        for _ in range(3):
            norms.append(use(backward(model)))
            model.zero_grad(set_to_none=True)
        return norms

    assert run_as_threads(train, tensor=2) == [pytest.approx([want] * 3, rel=1e-9)] * 2
    assert foreign == []


@contextmanager
def resetting(foreign: list[str]) -> Iterator[None]:
    """Train another model on two ranks in other threads, and reset its gradients, while the body runs."""
    models, is_over, is_running = [plain_model() for _ in range(2)], threading.Event(), threading.Event()

    def train(context: ParallelContext) -> None:
        model = shardformer.shard_model(models[context.tensor.rank], ToyPolicy(), context=context)
        me = threading.get_ident()
        watch(model, foreign, lambda: threading.get_ident() != me)
        while not broadcast_object(is_over.is_set(), context.tensor, 0):
            backward(model).zero_grad(set_to_none=True)
            is_running.set()

    other = threading.Thread(target=run_as_threads, args=(train,), kwargs={"tensor": 2})
    other.start()
    try:
        assert is_running.wait(60)
        yield
    finally:
        is_over.set()
        other.join()


def test_model_clips_while_another_model_resets_its_gradients() -> None:
    plain, foreign = plain_model(), list[str]()
    models, want = [copy.deepcopy(plain) for _ in range(2)], clips(backward(plain))

    def clip(context: ParallelContext) -> list[float]:
        model = shardformer.shard_model(models[context.tensor.rank], ToyPolicy(), context=context)
        norms = []
        for _ in range(10):
            norms.append(clips(backward(model)))
            model.zero_grad(set_to_none=True)
        return norms

    with resetting(foreign):
        for norms in run_as_threads(clip, tensor=2):
            assert norms == pytest.approx([want] * 10, rel=1e-12)
    assert foreign == []


@pytest.mark.parametrize("use", [clips, measures, unscales])
def test_two_models_in_one_thread_are_independent(use: Callable[[nn.Module], float]) -> None:
    """The first model has the smaller number, so that a search over all models would find it first."""
    plain = plain_model()
    models = [[copy.deepcopy(plain) for _ in range(2)] for _ in range(2)]
    want = use(backward(plain))

    def train(context: ParallelContext) -> tuple[list[float], list[str]]:
        one, other = (shardformer.shard_model(m, ToyPolicy(), context=context) for m in models[context.tensor.rank])
        foreign: list[str] = []
        is_resetting = False
        backward(one), backward(other, scale=2.0)
        if use is not measures:  # it receives gradients only, and has to find their models
            watch(one, foreign, lambda: not is_resetting)
        norms = [use(other)]
        is_resetting = True
        one.zero_grad(set_to_none=True)
        is_resetting = False
        norms.append(use(other))
        return norms, foreign

    for norms, foreign in run_as_threads(train, tensor=2):
        assert norms == pytest.approx([2 * want] * 2, rel=1e-9)
        assert foreign == []


def test_search_for_gradients_stops_when_all_are_found() -> None:
    def measure(context: ParallelContext) -> list[str]:
        one, other = (shardformer.shard_model(plain_model(), ToyPolicy(), context=context) for _ in range(2))
        foreign: list[str] = []
        watch(other, foreign, lambda: True)
        measures(backward(one))
        return foreign

    assert run_as_threads(measure, tensor=2) == [[], []]


class Untouchable(list[Any]):
    """Entries of a model that must not be read."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("the table of another model is read")


def test_optimizer_finds_only_the_models_of_its_parameters() -> None:
    """Both ranks find them in the same order, whatever the order of the parameters."""

    def find(context: ParallelContext) -> None:
        one, two, other = (shardformer.shard_model(plain_model(), ToyPolicy(), context=context) for _ in range(3))
        get_sharding_metadata(other).entries = Untouchable()
        params = [*two.parameters(), *one.parameters()]
        optimizer = torch.optim.SGD(params, lr=0.1)
        for _ in range(2):  # the second search uses the cache
            assert list(get_metadata_of_trained_models(optimizer)) == [
                get_sharding_metadata(one),
                get_sharding_metadata(two),
            ]
        assert list(get_metadata_of_trained_models(torch.optim.SGD(one.parameters(), lr=0.1))) == [
            get_sharding_metadata(one)
        ]
        backward(one)
        optimizer.step()
        optimizer.zero_grad()
        assert [
            state.monitor.steps
            for state in (get_sharding_metadata(one), get_sharding_metadata(two), get_sharding_metadata(other))
            if state.monitor
        ] == [
            1,
            1,
            0,
        ]

    run_as_threads(find, tensor=2)


def test_zero_optimizer_belongs_to_its_model() -> None:
    def find(context: ParallelContext) -> None:
        models = [shardformer.shard_model(plain_model(), ToyPolicy(), context=context) for _ in range(2)]
        for model in models:
            optimizer = shardformer.shard_optimizer(model, torch.optim.AdamW(model.parameters()))
            assert list(get_metadata_of_trained_models(optimizer)) == [get_sharding_metadata(model)]

    run_as_threads(find, data=2)


def test_optimizer_is_checked_once_and_released_with_its_models() -> None:
    """The optimizer is the only owner of its record. A copy is another optimizer."""

    def step(context: ParallelContext) -> None:
        model = shardformer.shard_model(plain_model(), ToyPolicy(), context=context)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        own = {name for name in vars(optimizer) if name.startswith("_shardformer")}
        assert len(own) == 3
        assert not own & vars(copy.deepcopy(optimizer)).keys()
        assert not own & optimizer.__getstate__().keys()
        optimizer.param_groups[0]["params"].clear()
        assert list(get_metadata_of_trained_models(optimizer)) == []

    run_as_threads(step, tensor=2)


# ------------------------------------------------------------------------------------------- who has which parameter


def table(model: nn.Module) -> ShardingMetadata:
    """Return the metadata of a model with one process."""
    return get_sharding_metadata(shardformer.shard_model(model, ToyPolicy(), context=ParallelContext.from_sizes({})))


def test_parameter_has_the_metadata_of_all_its_models() -> None:
    one, other = plain_model(), plain_model()
    first, second = table(one), table(other)
    params = [*other.parameters(), *one.parameters(), nn.Parameter(torch.ones(1))]
    assert list(group_params_by_metadata(params)) == [first, second]
    assert group_params_by_metadata(params)[first] == first.entries
    some = list(other.parameters())[:2]
    assert [e.param for e in group_params_by_metadata(some)[second]] == some
    reference = copy.deepcopy(one)
    assert list(group_params_by_metadata(reference.parameters())) == [get_sharding_metadata(reference)]


def test_metadata_is_released_with_its_model() -> None:
    model = plain_model()
    params = list(model.parameters())
    table(model)
    assert len(group_params_by_metadata(params)) == 1
    torch.utils.swap_tensors(params[0], nn.Parameter(torch.zeros(1)))  # raises if there are weak references
    for module in model.modules():
        for name in [name for name in vars(module) if name.startswith("_shardformer")]:
            del vars(module)[name]
    model.__dict__.clear()
    gc.collect()
    assert group_params_by_metadata(params) == {}


def test_thread_ranks_have_their_own_models() -> None:
    def count(context: ParallelContext) -> tuple[int, list[bool]]:
        model = shardformer.shard_model(plain_model(), ToyPolicy(), context=context)
        broadcast_object(None, context.tensor, 0)
        mine = [state for state in get_local_metadata() if state.context.world is context.world]
        return len(get_local_metadata()) - len(mine), [state is get_sharding_metadata(model) for state in mine]

    before = len(get_local_metadata())
    assert run_as_threads(count, tensor=2) == [(before, [True])] * 2
    assert len(get_local_metadata()) == before
