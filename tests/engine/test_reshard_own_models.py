"""``engine.reshard`` derives the policy of your own model on a copy with random weights, not with memory contents."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardformer
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.meta_init.lazy_init import LazyInit, copy_and_materialize, copy_to_meta, record_changes_if_lazy
from tests.policies.infer.test_zero_weights import VOCAB, Model


def next_token_loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["ids"].roll(-1, 1).flatten())


def train(context: ParallelContext | None, layouts: list[dict[str, Any]], model: nn.Module) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), []
    engine = shardformer.initialize(model, optimizer, next_token_loss, parallel=layouts[0], context=context)
    for step, layout in enumerate(layouts):
        if step and layout != layouts[step - 1]:
            engine.reshard(layout)
        ids = torch.randint(VOCAB, (4, 8), generator=torch.Generator().manual_seed(step))
        data = engine.context.data
        losses.append(float(engine.train_step({"ids": ids[data.rank :: data.size]})))
    return losses


PATHS = {
    "data to tensor": [{"data": 2}, {"tensor": 2}],
    "ZeRO-3 to tensor": [{"data": 2, "zero_stage": 3}, {"tensor": 2}],
    "tensor to pipe": [{"tensor": 2}, {"pipe": 2, "micro_batches": 2}],
}


@pytest.mark.slow
@pytest.mark.reduced(at_most=2)
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_losses_equal_those_of_one_process(path: list[dict[str, Any]]) -> None:
    layouts = [path[0], path[0], path[1], path[1]]
    axes = {name: path[0].get(name, 1) for name in ("data", "tensor")}
    expected = train(None, [{}] * 4, Model().double())
    models = [Model().double() for _ in range(2)]  # threads share the random generator
    found = run_as_threads(lambda c: train(c, layouts, models[c.rank]), **axes)
    assert found == [pytest.approx(expected, abs=1e-9)] * 2


@pytest.mark.slow
def test_a_layout_that_the_model_does_not_support_is_refused() -> None:
    models = [Model(shifts_tokens=True).double() for _ in range(2)]

    def reshard(context: ParallelContext) -> None:
        with pytest.raises(
            shardformer.ShardFormerError, match=r"the output differs|differs from that of the unsharded"
        ):
            train(context, [{"data": 2}, {"tensor": 2, "sequence_parallel": True}], models[context.rank])

    run_as_threads(reshard, data=2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.large, self.other = nn.BatchNorm1d(300), nn.Linear(300, 300), nn.Linear(300, 300)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_copy_without_values_gets_valid_random_values(is_lazy: bool) -> None:
    with LazyInit() if is_lazy else torch.device("cpu"):
        model = Net()
    meta = copy_to_meta(model)
    with record_changes_if_lazy(meta):
        again = copy.deepcopy(meta)
    first, second = copy_and_materialize(again), copy_and_materialize(again)
    values = dict(first.named_parameters())
    assert all(torch.equal(value, second.get_parameter(name)) for name, value in values.items()), "drawn with a seed"
    assert values["large.weight"].std().item() == pytest.approx(300**-0.5, rel=0.05)
    assert not torch.equal(values["large.weight"], values["other.weight"])
    assert all(v.min() >= 0.5 and v.max() <= 1.5 for v in values.values() if v.dim() == 1), "scales are positive"
    assert torch.equal(first.norm.running_var, torch.ones(300)) and first.mask.all()


def test_weights_that_were_initialized_in_part_get_values() -> None:
    with LazyInit():
        model = nn.Linear(4, 4, bias=False)
        model.weight = nn.Parameter(torch.empty(3000, 40))
        model.weight.detach()[0] = 2.0
    weight = copy_and_materialize(model).get_parameter("weight")
    assert (weight[0] == 2).all() and weight[1:].std().item() == pytest.approx(40**-0.5, rel=0.1)
