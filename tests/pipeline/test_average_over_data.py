"""By default, the batches of all data ranks form one batch: ``average_loss_over="tokens"``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardformer
from shardformer.errors import ConfigError, ShardFormerError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.verify.small_models import SmallModelFactory
from tests.policies.toy import VOCAB, ToyLM, ToyPolicy

Batch = dict[str, Tensor]


def batch_of(samples: int, ignored: int, seed: int) -> Batch:
    """Tokens with labels. The first labels of each sample are ignored."""
    ids = torch.randint(VOCAB, (samples, 9), generator=torch.Generator().manual_seed(seed))
    labels = ids.roll(-1, 1)
    labels[:, :ignored] = -100
    return {"ids": ids, "labels": labels}


BATCHES = [batch_of(4, 0, 0), batch_of(3, 7, 1)]
NONE_COUNT = [batch_of(4, 2, 0), batch_of(4, 9, 1)]


def mean_loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def sum_loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def own_mean(output: Tensor, batch: Any) -> Tensor:
    return sum_loss(output, batch) / (batch["labels"] != -100).sum()


def num_counted(batch: Any) -> float:
    return float((batch["labels"] != -100).sum())


def run(batches: list[Batch], loss_fn: Any, **options: Any) -> tuple[float, float, float]:
    """Return the single-device loss on all samples, and the largest differences of the loss and of a gradient."""
    torch.manual_seed(0)
    plain = ToyLM().double()
    models = [copy.deepcopy(plain) for _ in batches]
    whole = {name: torch.cat([b[name] for b in batches]) for name in batches[0]}
    want = loss_fn(plain(whole["ids"]), whole)
    want.backward()

    def step(context: ParallelContext) -> tuple[float, dict[str, Tensor]]:
        model = shardformer.shard_model(models[context.data.rank], ToyPolicy(), context=context)
        pipeline = shardformer.Pipeline(model, loss_fn=loss_fn, **options)
        loss = float(pipeline.step(batches[context.data.rank]))
        return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    found = run_as_threads(step, data=len(batches))
    gradient = max(float((grads[name] - expected[name]).abs().max()) for _, grads in found for name in expected)
    return float(want.detach()), max(abs(loss - float(want.detach())) for loss, _ in found), gradient


@pytest.mark.parametrize("batches", [BATCHES, NONE_COUNT])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("how", ["mean", "sum", "loss_weight"])
def test_loss_equals_loss_of_all_samples_on_one_device(batches: list[Batch], micro_batches: int, how: str) -> None:
    weight = {"loss_weight": num_counted} if how == "loss_weight" else {}
    whole, loss, gradient = run(batches, sum_loss if how == "sum" else mean_loss, micro_batches=micro_batches, **weight)
    assert loss < 1e-12 * whole and gradient < 1e-12 * whole


def test_ranks_average_is_the_mean_of_data_rank_losses() -> None:
    _, loss, gradient = run(BATCHES, mean_loss, micro_batches=2, average_loss_over="ranks")
    assert loss > 1e-3 and gradient > 1e-3


def test_manual_mean_in_model_raises() -> None:
    with pytest.raises(ConfigError, match="The model divides the summed cross_entropy by"):
        run(BATCHES, own_mean, micro_batches=1)


def test_rank_without_label_count_does_not_block_other_ranks() -> None:
    def loss(output: Tensor, batch: Any) -> Tensor:
        labels = batch["labels"].flatten()
        if (labels != -100).sum() > 10:  # on the first rank alone
            labels = torch.tensor([-100 if i % 5 == 0 else n * 7 % VOCAB for i, n in enumerate(labels.tolist())])
        return F.cross_entropy(output.flatten(0, 1), labels)

    with pytest.raises(
        ShardFormerError,
        match=r"contains no tensor of shape .* with these labels|Another data-parallel rank failed to count",
    ):
        run(BATCHES, loss, micro_batches=2)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_ranks_that_call_different_losses_raise(micro_batches: int) -> None:
    def loss(output: Tensor, batch: Any) -> Tensor:
        second = F.mse_loss(output[..., 0], batch["labels"].double()) if (batch["labels"] != -100).all() else 0.0
        return mean_loss(output, batch) + second

    with pytest.raises(ConfigError, match="The data-parallel ranks computed different numbers of mean losses"):
        run(BATCHES, loss, micro_batches=micro_batches)


def test_all_ranks_raise_if_one_loss_is_no_sum_of_means() -> None:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return mean_loss(output, batch) + (0.5 if (batch["labels"] != -100).all() else 0.0)

    def step(context: ParallelContext) -> str:
        pipeline = shardformer.Pipeline(shardformer.shard_model(ToyLM(), ToyPolicy(), context=context), loss_fn=loss)
        with pytest.raises(ShardFormerError) as error:
            pipeline.step(BATCHES[context.data.rank])
        return str(error.value)

    first, other = run_as_threads(step, data=2)
    assert "The loss of micro-batch 0 is" in first and "Another data-parallel rank failed" in other


def _over_a_grid() -> tuple[float, float]:
    torch.manual_seed(0)
    plain: nn.Module = SmallModelFactory("gpt2", changes={"n_layer": 4})().double()
    context = ParallelContext.from_default_process_group({"pipe": 2, "data": 2})
    model = shardformer.shard_model(copy.deepcopy(plain), context=context)
    batches = [{"input_ids": b["ids"], "labels": b["labels"]} for b in BATCHES]
    want = plain(**{name: torch.cat([b[name] for b in batches]) for name in batches[0]}).loss
    want.backward()
    pipeline = shardformer.Pipeline(model, micro_batches=2)
    loss = abs(float(pipeline.step(batches[context.data.rank])) - float(want.detach()))
    loss = max(loss, abs(float(pipeline.evaluate(batches[context.data.rank])) - float(want.detach())))
    expected = dict(plain.named_parameters(remove_duplicate=False))
    differences = [(p.grad - expected[n].grad).abs().max() for n, p in model.named_parameters() if p.grad is not None]
    return loss, float(max(differences))


def test_loss_over_stages_and_data_ranks_equals_single_device(pool4: WorkerPool) -> None:
    for loss, gradient in pool4.run(_over_a_grid):
        assert loss < 1e-6 and gradient < 1e-6  # GPT-2 computes its loss in fp32
