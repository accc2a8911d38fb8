"""Scalar, empty, complex and sparse parameters and gradients train as in one process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardformer
from shardformer.gradients.clipping import clip_grad_norm_
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.weights.state_dict import full_state_dict
from shardformer.zero.shard_optimizer import shard_optimizer

STEPS = 3


class Unusual(nn.Module):
    """Parameters of all kinds and of sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.extra = nn.Parameter(torch.empty(0, 5))
        self.table = nn.Embedding(7, 5, sparse=True)
        self.filter = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))
        self.layers = nn.ModuleList([nn.Linear(5, 5), Only(torch.empty(3, 0)), Only(torch.tensor(2.0))])

    def forward(self, ids: Tensor, uses: bool = True) -> Tensor:
        x = self.table(ids)
        if uses:
            x = torch.fft.irfft(torch.fft.rfft(x.float(), dim=1) * self.filter, n=4, dim=1)
        x = x.to(self.temperature.dtype)
        for layer in self.layers:
            x = layer(x)
        x = torch.cat([x.flatten(0, 1) * self.temperature.exp(), self.extra])
        loss: Tensor = x.square().mean()
        return loss


class Only(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.value.sum())


_DRAWING = threading.Lock()
"""Ranks that are threads share one random generator."""


def model_of() -> Unusual:
    with _DRAWING:
        torch.manual_seed(0)
        return Unusual()


def ids(step: int, rank: int) -> Tensor:
    return torch.randint(7, (2, 4), generator=torch.Generator().manual_seed(10 * step + rank))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Optimizer that accepts sparse gradients, which Adam does not."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model: nn.Module, optimizer: Any, ranks: list[int], first: int = 0, clips: Any = None) -> None:
    for step in range(first, first + STEPS):
        for rank in ranks:
            (model(ids(step, rank), step % 2 == 0 or rank == 0) / len(ranks)).backward()
        if clips is not None:
            clips(model)
        optimizer.step()
        optimizer.zero_grad()


def plainly(steps: int = 1, clips: float | None = None) -> dict[str, Tensor]:
    model = model_of()
    optimizer = sgd(model)

    def clip(model: nn.Module) -> None:
        grads = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([torch.linalg.vector_norm(g) for g in grads]).norm()
        assert norm > clips
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(clips / (norm + 1e-6))

    for number in range(steps):
        train(model, optimizer, [0, 1], number * STEPS, clip if clips is not None else None)
    return dict(model.state_dict())


def check(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6, msg=lambda said, name=name: f"{name}: {said}")


CASES: list[dict[str, Any]] = [
    {"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "keep_frozen": False},
    {"stage": 2, "offload": "cpu"}, {"stage": 3, "offload": shardformer.OffloadConfig("cpu", parameters=True)},
    {"stage": 1, "offload": "nvme"}, {"stage": 3, "offload": "nvme"}, {"stage": 3, "bucket_bytes": 20},
]  # fmt: skip


@pytest.mark.reduced(at_most=4)
@pytest.mark.parametrize("how", CASES, ids=lambda how: "-".join(str(x)[:5] for x in how.values()))
def test_each_stage_trains_clips_and_resumes(how: dict[str, Any], tmp_path: Path) -> None:
    """Resume from the same layout, from another stage, and in one process without ZeRO."""
    if how.get("offload") == "nvme":
        how = {**how, "offload": f"nvme:{tmp_path}"}
    want, further = plainly(clips=0.01), plainly(2)
    models = [[model_of() for _ in range(4)] for _ in range(2)]

    def over(context: ParallelContext) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        def made(number: int, **how: Any) -> tuple[nn.Module, Any]:
            model = models[context.rank][number]
            return model, shard_optimizer(model, sgd(model), context=context, **how)

        clipped, optimizer = made(0, **how)
        train(clipped, optimizer, [context.rank], clips=lambda model: clip_grad_norm_(model, 0.01))
        model, optimizer = made(1, **how)
        train(model, optimizer, [context.rank])
        shardformer.save_checkpoint(model, tmp_path / "saved", optimizer, step=STEPS)
        ends = []
        for each, ours in ((model, optimizer), made(2, **how), made(3, stage=1)):
            if each is not model:
                shardformer.load_checkpoint(each, tmp_path / "saved", ours)
            train(each, ours, [context.rank], STEPS)
            ends.append(full_state_dict(each))
        return full_state_dict(clipped), ends

    for clipped, ends in run_as_threads(over, data=2):
        check(clipped, want)
        for end in ends:
            check(end, further)
    model = model_of()
    optimizer = sgd(model)
    shardformer.load_checkpoint(model, tmp_path / "saved", optimizer)
    train(model, optimizer, [0, 1], STEPS)
    check(dict(model.state_dict()), further)


def test_stage_3_resumes_from_a_checkpoint_of_one_process(tmp_path: Path) -> None:
    model, models, further = model_of(), [model_of() for _ in range(2)], plainly(2)
    optimizer = sgd(model)
    train(model, optimizer, [0, 1])
    shardformer.save_checkpoint(model, tmp_path, optimizer, step=STEPS)

    def over(context: ParallelContext) -> dict[str, Tensor]:
        model = models[context.rank]
        ours = shard_optimizer(model, sgd(model), stage=3, context=context)
        shardformer.load_checkpoint(model, tmp_path, ours)
        train(model, ours, [context.rank], STEPS)
        return full_state_dict(model)

    for found in run_as_threads(over, data=2):
        check(found, further)


def test_zero_adopts_the_state_of_an_optimizer() -> None:
    model = model_of()
    optimizer = sgd(model)
    train(model, optimizer, [0, 1])
    ours = shard_optimizer(model, optimizer, stage=3)
    train(model, ours, [0, 1], STEPS)
    check(full_state_dict(model), plainly(2))


@pytest.mark.parametrize("precision", ["bf16", "kahan"])
def test_complex_parameters_keep_their_precision(precision: str) -> None:
    how = shardformer.MixedPrecision("bf16", master_weights="kahan") if precision == "kahan" else precision
    model = model_of()
    train(model, shard_optimizer(model, sgd(model), precision=how), [0, 1])  # type: ignore[arg-type]  # a word, or more
    assert model.filter.dtype == torch.complex64 and model.temperature.dtype == torch.bfloat16
    want = plainly()
    assert (model.filter - want["filter"]).abs().max() < 2e-2
    assert not torch.equal(model.filter.imag, model_of().filter.imag)


# ----------------------------------------------------------------------------------------------------- sparse gradients


class Rows(nn.Module):
    """An embedding with rows without a gradient, with a zero gradient, and with other gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 4, sparse=True).double()
        self.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, step: int, rank: int) -> Tensor:
        if step == 1 and rank == 1:  # on one rank alone
            return self.bias.sum()
        loss: Tensor = (self.table(ids(step, rank)) + self.bias).square().sum()
        return loss + (self.table(torch.tensor([7 + rank])) * 0).sum()


def steps_on(model: Rows, kind: Any, ranks: list[int]) -> list[Tensor]:
    """Run two backward passes per step and return the embedding. The loss of each data rank counts half."""
    table, rest = kind([model.table.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)
    for step in range(4):
        for micro in range(2):
            for rank in ranks:
                (model(step + 10 * micro, rank) / len(ranks)).backward()
        for optimizer in (table, rest):
            optimizer.step()
            optimizer.zero_grad()
    return [model.table.weight.detach().clone(), model.bias.detach().clone()]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients_over_data_ranks_equal_one_process(kind: Any) -> None:
    """Each rank's gradient is sparse, with the rows of all ranks. SparseAdam changes only these rows."""
    want, models = steps_on(Rows(), kind, [0, 1]), [Rows() for _ in range(2)]

    def over(context: ParallelContext) -> list[Tensor]:
        model: Any = shardformer.shard_model(models[context.rank], context=context)
        model(0, context.rank).backward()
        assert model.table.weight.grad.is_sparse
        assert set(model.table.weight.grad.coalesce().indices()[0].tolist()) >= {7, 8}
        total = float(shardformer.clip_grad_norm_(model, 0.1))
        assert total > 1 and float(shardformer.gradients.grad_norm(model)) == pytest.approx(0.1, abs=1e-6)
        model.zero_grad()
        return steps_on(model, kind, [context.rank])

    for found in run_as_threads(over, data=2):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


class SparseOrDense(nn.Module):
    """An embedding whose gradient is sparse, dense or missing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.bias = nn.Embedding(9, 4, sparse=True).double(), nn.Parameter(torch.zeros(4).double())

    def forward(self, kind: str, row: int) -> Tensor:
        rows = self.table(torch.tensor([row])) if kind == "sparse" else self.table.weight[row]
        return ((rows if kind != "none" else 1) * (self.bias + 1)).square().sum()


@pytest.mark.parametrize("kinds", ["dense dense sparse", "sparse sparse dense", "none sparse dense", "none dense none"])
def test_gradients_that_are_sparse_on_some_ranks_become_dense(kinds: str) -> None:
    plain, models = SparseOrDense(), [SparseOrDense() for _ in range(3)]
    for row, kind in enumerate(kinds.split()):
        (plain(kind, row) / 3).backward()

    def over(context: ParallelContext) -> list[Any]:
        model: Any = shardformer.shard_model(models[context.rank], context=context)
        model(kinds.split()[context.rank], context.rank).backward()
        return [param.grad for param in model.parameters()]

    for found in run_as_threads(over, data=3):
        torch.testing.assert_close(found, [param.grad for param in plain.parameters()], rtol=0, atol=1e-12)


def test_zero_rejects_an_optimizer_for_sparse_gradients() -> None:
    model = nn.Embedding(9, 4, sparse=True)
    with pytest.raises(shardformer.ShardFormerError, match="SparseAdam cannot be sharded"):
        shard_optimizer(model, torch.optim.SparseAdam(model.parameters()))
