"""A deferred tensor behaves like the full tensor under all operations, with its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardformer.comm.deferred_tensor import DeferredTensor


def doubled(x: Tensor, calls: list[int] | None = None) -> DeferredTensor:
    """Return a deferred 2 * x, and append to ``calls`` each time it is computed."""

    def resolve(local: Tensor) -> Tensor:
        if calls is not None:
            calls.append(1)
        return local * 2

    return DeferredTensor.from_local(x, tuple(x.shape), None, None, resolve, lambda grad: grad * 2)


def add_in_place(x: Tensor, y: Tensor) -> Tensor:
    x += y
    return x


def add_by_method(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    return x


def divide_in_place(x: Tensor, y: Tensor) -> Tensor:
    same = x
    x /= y
    return same


def set_a_part(x: Tensor, y: Tensor) -> Tensor:
    x[:, 1] = y[:, 0]
    return x


def relu_in_place(x: Tensor, y: Tensor) -> Tensor:
    return F.relu(x, inplace=True) + y * x


def twice(x: Tensor, y: Tensor) -> Tensor:
    first = x + y
    x += y
    return first + x + x.view(-1, 3).flatten()[:12].view(4, 3)


USES: list[Callable[[Tensor, Tensor], Tensor]] = [
    add_in_place, add_by_method, divide_in_place, set_a_part, relu_in_place, twice,
]  # fmt: skip


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("trains", [True, False])
def test_in_place_writes_are_visible(use: Callable[[Tensor, Tensor], Tensor], trains: bool) -> None:
    found: list[list[Any]] = []
    for make in (lambda x: x * 2, doubled):
        torch.manual_seed(0)
        x, y = (torch.randn(4, 3, dtype=torch.float64, requires_grad=trains) for _ in range(2))
        out = use(make(x), y)
        out = out.full_tensor() if isinstance(out, DeferredTensor) else out
        if trains:
            (out**2).sum().backward()
        found.append([out.detach(), x.grad, y.grad])
    for ours, want in zip(*found[::-1], strict=True):
        assert ours is want is None or torch.equal(ours, want)


def same_slices(x: Tensor) -> Tensor:
    return x[:, 0:, :]


def same_view(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[1], x.shape[2])


def same_reshape(x: Tensor) -> Tensor:
    return x.reshape((2, 5, 3))


@pytest.mark.parametrize("use", [same_slices, same_view, same_reshape])
def test_full_views_stay_deferred(use: Callable[[Tensor], Tensor]) -> None:
    calls: list[int] = []
    x = doubled(torch.randn(2, 5, 3, requires_grad=True), calls)
    assert use(x) is x and not calls and x.is_pending


def test_other_views_compute_the_values_once() -> None:
    calls: list[int] = []
    plain = torch.randn(2, 5, 3)
    x = doubled(plain, calls)
    assert torch.equal(x[:, 1:], plain[:, 1:] * 2) and torch.equal(x.view(10, 3), plain.view(10, 3) * 2)
    assert torch.equal(x.view(torch.int32), (plain * 2).view(torch.int32)) and calls == [1]


def multiply_in_place(x: Tensor) -> None:
    x.mul_(3)


def write_into_a_view(x: Tensor) -> None:
    x.view(-1)[0] = 7.0


def write_into_the_values(x: Tensor) -> None:
    assert isinstance(x, DeferredTensor)
    x.full_tensor().zero_()


@pytest.mark.parametrize("write", [multiply_in_place, write_into_a_view, write_into_the_values])
def test_a_written_tensor_is_not_pending(write: Callable[[Tensor], None]) -> None:
    """The first layer would otherwise read ``local``, which lacks the write."""
    x = doubled(torch.ones(2, 3))
    x.full_tensor()
    assert x.is_pending
    write(x)
    assert not x.is_pending
