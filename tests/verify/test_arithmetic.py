"""``ForceFp64Mode`` replaces casts, and ``RandomRoundingMode`` measures the noise of sums whose terms cancel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.verify.train_both import ForceFp64Mode, RandomRoundingMode, TrainingTrace, VerifyJob, train_both_models
from tests.pools import WorkerPools

X = torch.linspace(0.1, 0.9, 6, dtype=torch.float64).view(2, 3)
CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda x: x.float(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "to": lambda x: x.to(torch.float32),
    "to with keyword": lambda x: x.to(dtype=torch.bfloat16),
    "to device and dtype": lambda x: x.to("cpu", torch.float16),
    "to like another": lambda x: x.to(torch.zeros(1)),
    "type": lambda x: x.type(torch.float32),
    "type by name": lambda x: x.type("torch.FloatTensor"),
    "type as": lambda x: x.type_as(torch.zeros(1)),
    "softmax": lambda x: F.softmax(x, -1, dtype=torch.float32).log(),
    "softmax method": lambda x: x.softmax(-1, dtype=torch.float32).log(),
    "sum": lambda x: x.sum(-1, dtype=torch.float32),
    "complex": lambda x: torch.polar(x, x.float()).to(torch.complex64).real,
    "into one of fp32": lambda x: torch.zeros(2, 3, dtype=torch.float32).index_add(0, torch.arange(2), x.float()),
}


@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_to_lower_precision_gives_fp64(cast: str) -> None:
    with ForceFp64Mode():
        out = CASTS[cast](X)
    assert out.dtype == torch.float64
    rounded = CASTS[cast](X.float()).double()
    assert not torch.equal(out, rounded), "no bit was lost on the way"
    torch.testing.assert_close(out, rounded, atol=1e-2, rtol=1e-2)


def test_other_casts_are_unchanged() -> None:
    with ForceFp64Mode():
        assert X.to(torch.int64).dtype == X.long().dtype == torch.int64
        assert (X > 0.5).to(torch.bool).dtype == torch.bool
        assert X.to("cpu") is X and X.double() is X
        assert torch.arange(3, dtype=torch.int32).dtype == torch.int32


def test_the_noise_of_a_cancelling_sum_is_the_rounding_of_its_terms() -> None:
    terms = torch.tensor([1e3, 7.0, -1e3, -7.0], dtype=torch.float64)
    with RandomRoundingMode(0):
        whole, cancelled = (terms * 3).abs().sum(), (terms * 3).sum()
    assert 1e-17 < abs(float(whole) / 6042 - 1) < 3e-15
    assert 1e-14 < abs(float(cancelled)) < 6e-12
    with RandomRoundingMode(0):
        again = (terms * 3).abs().sum()
    assert torch.equal(whole, again), "one seed, one rounding"


class Chooser(nn.Module):
    """Scores choices with a common bias, which the softmax cancels."""

    def __init__(self) -> None:
        super().__init__()
        self.scorer = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scorer(x).squeeze(-1)
        return scores


def choices(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(4, 3, 6, generator=generator), "labels": torch.tensor([0, 2, 1, 1])}


def choice(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def test_the_noise_of_a_zero_gradient_is_the_rounding_of_its_summands(pools: WorkerPools) -> None:
    """The summands have the magnitude of a score's gradient, 0.1, not that of the largest gradient."""
    job = VerifyJob(Chooser, choices, 1, 1, 2, torch.float64, choice, None, {})
    plain: TrainingTrace = pools(1).run(plain_of, job)[0]
    for grads in plain.grads:
        bias, weight = grads["scorer.bias"], grads["scorer.weight"]
        assert bias is not None and weight is not None
        assert abs(float(bias)) < 1e-16 < 1e-2 < float(weight.abs().max())
    assert 2e-17 < plain.gradient_noise["scorer.bias"] < 1e-15
    assert plain.gradient_noise["scorer.weight"] < 1e-14, "far below the bound of what is real, 1e-10 of it"


def plain_of(job: VerifyJob) -> TrainingTrace | None:
    return train_both_models(job)[0]


class Casts(torch.autograd.Function):
    """Function whose backward pass casts its input, and waits for an event."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[torch.dtype], wait: Callable[[], Any]) -> Tensor:
        ctx.seen, ctx.wait = seen, wait
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.wait()
        ctx.seen.append(grad.float().dtype)
        return grad, None, None


def test_a_backward_in_another_thread_keeps_its_casts() -> None:
    """Two comparisons and a plain backward pass overlap in time, and end one after the other."""
    meeting, ends = threading.Barrier(3), [threading.Event() for _ in range(3)]
    before = torch.autograd.backward

    def run(number: int, *, is_wide: bool) -> torch.dtype:
        seen: list[torch.dtype] = []

        def wait() -> None:
            meeting.wait(20)
            assert number == 0 or ends[number - 1].wait(20)

        x = torch.ones(2, dtype=torch.float64, requires_grad=True)
        with ForceFp64Mode() if is_wide else nullcontext():
            Casts.apply(x, seen, wait).sum().backward()
        ends[number].set()
        return seen[0]

    with ThreadPoolExecutor(3) as threads:
        wide = [threads.submit(run, number, is_wide=number != 1) for number in range(3)]
        assert [each.result() for each in wide] == [torch.float64, torch.float32, torch.float64]
    seen: list[torch.dtype] = []
    Casts.apply(torch.ones(2, dtype=torch.float64, requires_grad=True), seen, lambda: None).sum().backward()
    assert seen == [torch.float32] and torch.autograd.backward is before
