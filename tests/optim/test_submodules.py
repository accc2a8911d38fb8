"""Only a submodule is sharded: the script reduces the other gradients, or an error is raised on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardformer
from shardformer.comm.collectives import all_reduce
from shardformer.errors import ConfigError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from tests.optim.test_live import _DRAWING, inputs, net
from tests.policies.toy import VOCAB, ToyLM, ToyPolicy, toy_batch

Optimizers = Callable[["Classifier"], list[torch.optim.Optimizer]]


class Classifier(nn.Module):
    """A backbone, which is sharded, and a head of the user, which is not."""

    def __init__(self, context: ParallelContext | None = None, **options: Any) -> None:
        super().__init__()
        self.backbone: nn.Module = net()
        self.head = nn.Linear(3, 2).double()
        with torch.no_grad():
            for p in self.head.parameters():
                p.fill_(0.5)
        if context is not None:
            self.backbone = shardformer.shard_model(self.backbone, context=context, **options)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.backbone(x))
        return out


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def one(model: Classifier) -> list[torch.optim.Optimizer]:
    return [sgd(model.parameters())]


def two(model: Classifier) -> list[torch.optim.Optimizer]:
    return [sgd(model.backbone.parameters()), sgd(model.head.parameters())]


def head_only(model: Classifier) -> list[torch.optim.Optimizer]:
    model.backbone.requires_grad_(False)
    return [sgd(model.head.parameters())]


def head_with_zero(model: Classifier) -> list[torch.optim.Optimizer]:
    zero = shardformer.shard_optimizer(model.backbone, sgd(model.backbone.parameters()), stage=2)
    return [zero, sgd(model.head.parameters())]


def average(model: Classifier, context: ParallelContext) -> None:
    for p in model.head.parameters():
        assert p.grad is not None
        p.grad = all_reduce(p.grad, context.data) / context.data.size


def train(
    model: Classifier,
    optimizers: list[Any],
    ranks: list[int],
    change: Callable[[], object] = lambda: None,
    begin: int = 0,
) -> dict[str, Tensor]:
    for step in range(3):
        for rank in ranks:
            loss = model(inputs(step, rank)).square().mean() / len(ranks)
            (loss if step >= begin else 0 * loss).backward()
        change()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


OPTIMIZERS: list[Optimizers] = [one, two, head_only, head_with_zero]


@pytest.mark.parametrize(("make", "begin"), [*((make, 0) for make in OPTIMIZERS), (one, 1)])
def test_gradients_that_no_one_reduces_raise_on_all_ranks_and_change_no_weight(make: Optimizers, begin: int) -> None:
    def over(context: ParallelContext) -> None:
        model = Classifier(context)
        before = model.head.weight.detach().clone()
        with pytest.raises(
            ConfigError, match=r"parameter of shape \(2, 3\), because ranks have different.*whole_model"
        ):
            train(model, make(model), [context.rank], begin=begin)
        assert torch.equal(model.head.weight, before)

    run_as_threads(over, data=2)


@pytest.mark.reduced
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_gradients_that_the_script_averages_give_the_result_of_one_process(make: Optimizers) -> None:
    plain = Classifier()
    want = train(plain, head_only(plain) if make is head_only else one(plain), [0, 1])

    def over(context: ParallelContext) -> dict[str, Tensor]:
        model = Classifier(context)
        return train(model, make(model), [context.rank], lambda: average(model, context))

    for found in run_as_threads(over, data=2):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


def test_comparison_can_be_disabled_and_skips_modules_without_a_sharded_submodule() -> None:
    def over(context: ParallelContext) -> None:
        model = Classifier(context, check_consistency=False)
        train(model, one(model), [context.rank])
        shardformer.shard_model(net(), context=context)
        other = Classifier()
        train(other, one(other), [context.rank])

    run_as_threads(over, data=2)


class WithValueHead(nn.Module):
    """A language model, which is sharded, and a head on its logits, which is not."""

    def __init__(self, context: ParallelContext | None = None) -> None:
        super().__init__()
        self.lm: nn.Module = toy()
        self.head = nn.Linear(VOCAB, 2)
        nn.init.constant_(self.head.weight, 0.1)
        nn.init.zeros_(self.head.bias)
        if context is not None:
            self.lm = shardformer.shard_model(self.lm, ToyPolicy, context=context)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.lm(ids))
        return out


def toy() -> ToyLM:
    with _DRAWING:
        torch.manual_seed(0)
        return ToyLM()


def test_tensor_ranks_may_train_a_head_outside_the_sharded_submodule() -> None:
    def over(context: ParallelContext | None) -> Tensor:
        model = WithValueHead(context)
        optimizer = sgd(model.parameters())
        for step in range(2):
            model(toy_batch(step)["ids"]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.head.weight.detach()

    want = over(None)
    for found in run_as_threads(over, tensor=2, one_at_a_time=True):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_refuses_a_model_of_which_only_a_submodule_is_sharded(stage: int) -> None:
    def over(context: ParallelContext) -> None:
        model = Classifier(context)
        said = f"this Classifier with stage={stage}, because only its submodule backbone is sharded, over .*whole model"
        with pytest.raises(ConfigError, match=said):
            shardformer.shard_optimizer(model, sgd(model.parameters()), stage=stage, context=context)
        wrapper = nn.Sequential(model.backbone)
        with pytest.raises(ConfigError, match="Pass the submodule 0 to shard_optimizer"):
            shardformer.shard_optimizer(wrapper, sgd(wrapper.parameters()), stage=stage, context=context)
        with pytest.raises(ConfigError, match="only a submodule is sharded, shard the whole model"):
            shardformer.shard_optimizer(model.backbone, sgd(model.parameters()), stage=stage)

    run_as_threads(over, data=2)


def test_stage_0_trains_such_a_model_over_the_same_data_ranks() -> None:
    plain = Classifier()
    want = train(plain, one(plain), [0, 1])

    def over(context: ParallelContext) -> dict[str, Tensor]:
        model = Classifier(context)
        zero = shardformer.shard_optimizer(model, sgd(model.parameters()), stage=0, context=context)
        return train(model, [zero], [context.rank])

    for found in run_as_threads(over, data=2):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


def test_stage_0_refuses_such_a_model_over_tensor_ranks() -> None:
    def over(context: ParallelContext) -> None:
        model = WithValueHead(context)
        with pytest.raises(ConfigError, match="stage=0, because only its submodule lm is sharded, over tensor=2"):
            shardformer.shard_optimizer(model, sgd(model.parameters()), stage=0)

    run_as_threads(over, tensor=2, one_at_a_time=True)


def test_sharding_the_whole_model_afterwards_names_the_submodule() -> None:
    def over(context: ParallelContext) -> None:
        model = Classifier(context)
        for shard in (shardformer.shard_model, shardformer.initialize):
            with pytest.raises(ConfigError, match="The submodule backbone of Classifier is already sharded"):
                shard(model, context=context)

    run_as_threads(over, data=2)
