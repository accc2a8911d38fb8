"""A sequence-sharded tensor behaves like the full tensor: slices, gathers and the loss, with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardformer.context_parallel.sequence_layout import IndexShards, SequenceLayout
from shardformer.context_parallel.sequence_sharded_tensor import SequenceShardedTensor
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext

B, S, V, RANKS = 2, 13, 5, 3


def full() -> Tensor:
    return torch.randn(B, S, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def cut(x: Tensor, context: ParallelContext) -> tuple[Tensor, SequenceShardedTensor]:
    """Return the local rows, which require a gradient, and the sharded tensor of them."""
    rows = IndexShards.from_sequence_layout(SequenceLayout(S, RANKS), context.sequence)
    local = rows.slice_local(x, 1).requires_grad_()
    return local, SequenceShardedTensor(local, rows, 1)


@pytest.mark.parametrize(
    "taken", [slice(1, None), slice(None, -1), slice(3, 11, 2), slice(12, None), slice(5, 5)], ids=str
)
def test_slices_equal_those_of_the_full_tensor(taken: slice) -> None:
    def take(context: ParallelContext) -> Tensor:
        out: Any = cut(full(), context)[1][:, taken]
        assert isinstance(out, SequenceShardedTensor)
        assert torch.equal(out.local, out.rows.slice_local(full()[:, taken], 1)), "labels are taken by its rows"
        return out.full_tensor().detach()

    for found in run_as_threads(take, sequence=RANKS):
        assert torch.equal(found, full()[:, taken])


def test_gathered_rows_get_the_summed_gradients() -> None:
    """The gradients are averaged over the P ranks later, so each rank has the sum."""
    weights = [torch.randn(B, S, V, dtype=torch.float64) for _ in range(RANKS)]

    def gather(context: ParallelContext) -> tuple[Tensor | None, Tensor]:
        local, x = cut(full(), context)
        (x.full_tensor() * weights[context.sequence.rank]).sum().backward()
        return local.grad, x.rows.slice_local(torch.stack(weights).sum(0), 1)

    for found, expected in run_as_threads(gather, sequence=RANKS):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighs", [False, True])
def test_cross_entropy_equals_that_of_the_full_tensor(weighs: bool, reduction: str) -> None:
    weight = torch.linspace(0.5, 2.0, V, dtype=torch.float64) if weighs else None
    target = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(1))
    target[0, :4] = -100
    x = full().requires_grad_()
    expected = F.cross_entropy(x.transpose(1, 2), target, weight, reduction=reduction)
    expected.backward()
    assert x.grad is not None

    def compute(context: ParallelContext) -> tuple[Tensor, Tensor, Tensor]:
        local, whole = cut(full(), context)
        loss = F.cross_entropy(whole.view(-1, V), target.view(-1), weight, reduction=reduction)
        loss.backward()
        assert local.grad is not None
        return loss.detach(), local.grad / RANKS, whole.rows.slice_local(x.grad, 1)  # type: ignore[arg-type]  # it is there

    for loss, gradient, own in run_as_threads(compute, sequence=RANKS):
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient, own, rtol=0, atol=1e-12)


@pytest.mark.parametrize("trailing", [False, True])
def test_masked_write_equals_that_of_the_full_tensor(trailing: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(B, S, generator=generator) > 0.6
    added = torch.randn(int(mask.sum()), V, dtype=torch.float64, generator=generator)
    weights = torch.randn(B, S, V, dtype=torch.float64, generator=generator)
    key: Any = (mask, slice(None)) if trailing else mask

    def changed(x: Any, more: Tensor) -> Any:
        y = x.clone()
        y[key] = y[key] * 2 + more
        return y

    whole, more = full().requires_grad_(), added.clone().requires_grad_()
    expected = changed(whole, more)
    (expected * weights).sum().backward()

    def write(context: ParallelContext) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        local, x = cut(full(), context)
        own = added.clone().requires_grad_()
        y = changed(x, own)
        y[mask.logical_not()] *= 1  # a number
        (y.local * x.rows.slice_local(weights, 1)).sum().mul(RANKS).backward()  # each rank's gradient counts P times
        return y.full_tensor().detach(), local.grad, x.rows.slice_local(whole.grad, 1), own.grad

    found = run_as_threads(write, sequence=RANKS)
    for y, grad, expected_grad, _ in found:
        torch.testing.assert_close(y, expected.detach())
        torch.testing.assert_close(grad / RANKS, expected_grad)
    torch.testing.assert_close(torch.stack([own for *_, own in found]).mean(0), more.grad)
