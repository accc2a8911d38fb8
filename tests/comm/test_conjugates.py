"""Each collective's backward is the transpose of its forward pass: <f(x), y> = <x, f'(y)>, summed over the ranks.

The inner product of a replicated side is counted once, because the ranks hold one tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardformer.comm import collectives
from shardformer.comm.collectives import all_reduce
from shardformer.layout.activation_layout import ActivationShard, Dim, IndexOrder
from shardformer.layout.shard_spec import Split
from shardformer.mesh.parallel_context import Axis
from tests.pools import WorkerPools

B, S, H = 2, 7, 3


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _even(ranks: int) -> Split:
    return Split.even(S, ranks)


def _striped(ranks: int) -> Split:
    return ActivationShard(Dim.SEQUENCE, "tensor", IndexOrder.STRIPED).make_split(S, ranks)


def _part(x: Tensor, axis: Axis, split: Split) -> Tensor:
    return collectives.get_local_slices(x, axis, 1, split)


# name -> (function of x, how the input and the output are cut, is the input / the output replicated)
Cuts = Callable[[int], Split] | None
Case = tuple[Callable[[Tensor, Axis], Tensor], Cuts, Cuts, bool, bool]
CASES: dict[str, Case] = {
    "enter_block": (collectives.copy_to_tp_region, None, None, True, False),
    "leave_block": (collectives.reduce_from_tp_region, None, None, False, True),
    "gather_column_input": (lambda x, a: collectives.gather_from_sp_region(x, a, 1, S), _even, None, False, False),
    "scatter_output": (
        lambda x, a: collectives.reduce_scatter_to_sp_region(x, a, 1),
        None,
        _even,
        False,
        False,
    ),
    "split_dim": (
        lambda x, a: collectives.scatter_to_parallel_region(x, a, 1, _even(a.size)),
        None,
        _even,
        True,
        False,
    ),
    "join_dim": (
        lambda x, a: collectives.gather_from_parallel_region(x, a, 1, _even(a.size)),
        _even,
        None,
        False,
        True,
    ),
    "split_dim striped": (
        lambda x, a: collectives.scatter_to_parallel_region(x, a, 1, _striped(a.size)),
        None,
        _striped,
        True,
        False,
    ),
    "join_dim striped": (
        lambda x, a: collectives.gather_from_parallel_region(x, a, 1, _striped(a.size)),
        _striped,
        None,
        False,
        True,
    ),
}


def _inner_products(name: str) -> tuple[float, float]:
    function, x_cut, y_cut, x_same, y_same = CASES[name]
    axis = Axis.of(None)
    x = _random(1 if x_cut or x_same else 10 + axis.rank, B, S, H)
    x = (_part(x, axis, x_cut(axis.size)) if x_cut else x).requires_grad_()
    out = function(x, axis)
    y = _random(2 if y_cut or y_same else 20 + axis.rank, B, S, H)
    y = _part(y, axis, y_cut(axis.size)) if y_cut else y
    out.backward(y)
    assert x.grad is not None
    left = (out.detach() * y).sum() / (axis.size if y_same else 1)
    right = (x.detach() * x.grad).sum() / (axis.size if x_same else 1)
    return float(all_reduce(left, axis)), float(all_reduce(right, axis))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", list(CASES))
def test_backward_is_the_transpose_of_forward(pools: WorkerPools, ranks: int, name: str) -> None:
    for left, right in pools(ranks).run(_inner_products, name):
        assert left == pytest.approx(right, rel=1e-12)
        assert abs(left) > 1e-3


def _uneven() -> tuple[Tensor, Tensor]:
    axis = Axis.of(None)
    split = Split((((0, 1),), ((1, 3),), ((3, 6),), ((6, 10),)))
    x = torch.full((2, split.get_local_length(axis.rank)), float(axis.rank), requires_grad=True)
    whole = collectives.gather_from_parallel_region(x, axis, -1, split)
    (whole * torch.arange(whole.shape[-1])).sum().backward()
    assert x.grad is not None
    return whole.detach(), x.grad


def test_slices_of_any_length_are_gathered(pools: WorkerPools) -> None:
    results = pools(4).run(_uneven)
    for whole, _ in results:
        assert whole[0].tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert [grad[0].tolist() for _, grad in results] == [[0], [1, 2], [3, 4, 5], [6, 7, 8, 9]]


def _untouched() -> tuple[bool, bool]:
    axis = Axis.of(None)
    x = torch.ones(3, requires_grad=True)
    y = collectives.reduce_from_tp_region(x, axis)
    grad = torch.full((3,), 5.0)
    z = collectives.copy_to_tp_region(y, axis)
    z.backward(grad)
    return torch.equal(x.detach(), torch.ones(3)), torch.equal(grad, torch.full((3,), 5.0))


def test_inputs_and_gradients_are_not_modified(pools: WorkerPools) -> None:
    assert pools(2).run(_untouched) == [(True, True)] * 2
