"""SUMMA, the 2D linear of the benchmark, and the layer norm on a tensor grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.summa_linear import Linear2D
from shardformer.comm.collectives import all_gather, get_local_chunk
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.errors import ConfigError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import Axis, ParallelContext, reshape_tensor_axis
from shardformer.mesh.tensor_grid import TensorGrid
from shardformer.tensor_parallel.grid_layers import sharded_layer_norm

SAMPLES, LENGTH, IN, OUT = 8, 3, 10, 14
CASES: list[tuple[tuple[int, ...], bool]] = [
    ((2, 2), True),
    ((2, 2), False),
    ((3, 3), True),
    ((2, 1), True),
    ((1, 4), True),
]


def own(x: Tensor, samples: Axis, features: Axis) -> Tensor:
    """Return the local shard of (B, S, features)."""
    return get_local_chunk(get_local_chunk(x, samples, 0), features, 2).detach().clone()


def whole(x: Tensor, samples: Axis, features: Axis, full: int) -> Tensor:
    return all_gather(all_gather(x, features, -1, full), samples, 0)


def plain() -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    linear = nn.Linear(IN, OUT).double()
    samples = SAMPLES if SAMPLES % 3 == 0 else 3 * SAMPLES
    x, grad = (torch.randn(samples, LENGTH, n, dtype=torch.float64) for n in (IN, OUT))
    x.requires_grad_()
    linear(x).backward(grad)
    return linear, x, grad


def grid_of(context: ParallelContext, mode: str, sizes: tuple[int, ...]) -> TensorGrid:
    return TensorGrid.from_context(reshape_tensor_axis(context, sizes), mode)


def ranks_of(sizes: tuple[int, ...]) -> int:
    return int(torch.tensor(sizes).prod())


@pytest.mark.parametrize(("sizes", "summa"), CASES, ids=str)
def test_grid_linear_equals_the_plain_linear(sizes: tuple[int, ...], summa: bool) -> None:
    linear, x, grad = plain()

    def multiply(context: ParallelContext) -> None:
        grid = grid_of(context, "2d", sizes)
        layer: Any = Linear2D.from_native_module(linear, grid, summa=summa)
        part = own(x, grid.batch, grid.hidden).requires_grad_()
        out = layer(part)
        assert torch.allclose(out, own(linear(x), grid.core, grid.column), atol=1e-12)
        out.backward(own(grad, grid.core, grid.column))
        assert x.grad is not None and part.grad is not None
        assert torch.allclose(part.grad, own(x.grad, grid.batch, grid.hidden), atol=1e-12)
        for name in ("weight", "bias"):
            expected = layer.shard_specs[name].slice_full_tensor(getattr(linear, name).grad, grid.coords)
            assert torch.allclose(getattr(layer, name).grad, expected, atol=1e-12)

    run_as_threads(multiply, tensor=ranks_of(sizes))


@pytest.mark.parametrize(("mode", "sizes"), [("2d", (2, 2)), ("2.5d", (1, 2, 2)), ("3d", (2, 1, 2))], ids=str)
def test_grid_layer_norm_equals_the_plain_layer_norm(mode: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm = nn.LayerNorm(IN).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x, grad = (torch.randn(SAMPLES, LENGTH, IN, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    norm(x).backward(grad)

    def normalise(context: ParallelContext) -> int:
        grid = grid_of(context, mode, sizes)
        part = own(x, grid.batch, grid.hidden).requires_grad_()
        weight, bias = (get_local_chunk(p, grid.hidden, 0).detach() for p in (norm.weight, norm.bias))
        with CollectiveRecorder(grid.hidden) as recorder:
            out = sharded_layer_norm(part, weight, bias, grid.hidden, IN, norm.eps)
        assert torch.allclose(out, own(norm(x), grid.batch, grid.hidden), atol=1e-12)
        out.backward(own(grad, grid.batch, grid.hidden))
        assert x.grad is not None and part.grad is not None
        assert torch.allclose(part.grad, own(x.grad, grid.batch, grid.hidden), atol=1e-12)
        return recorder.count()

    assert run_as_threads(normalise, tensor=ranks_of(sizes)) == [1] * ranks_of(sizes)


def test_communication_of_a_summa_product() -> None:
    linear, x, grad = plain()
    side, tokens = 2, x.shape[0] * LENGTH

    def sent(context: ParallelContext) -> int:
        grid = grid_of(context, "2d", (side, side))
        layer = Linear2D.from_native_module(linear, grid)
        part = own(x, grid.batch, grid.hidden).requires_grad_()
        with CollectiveRecorder(grid.whole) as recorder:
            layer(part).backward(own(grad, grid.core, grid.column))
        ops = ("broadcast", "reduce")
        return sum(recorder.wire_bytes(op) for op in ops) // side // 8  # of one rank, in numbers of fp64

    share = (side - 1) / side
    expected = 3 * (tokens / side) * IN * share + 3 * (IN * OUT / side) * share
    assert run_as_threads(sent, tensor=side**2) == pytest.approx([expected] * side**2)


def test_unsupported_sizes_raise() -> None:
    def wrong(context: ParallelContext) -> None:
        grid = grid_of(context, "2d", (2, 1))
        with pytest.raises(ConfigError, match=r"Linear2D stands for an nn\.Linear, not a"):
            Linear2D.from_native_module(nn.LayerNorm(IN), grid)
        with pytest.raises(ConfigError, match="The hidden size 1 is too small to shard over 2 ranks"):
            Linear2D(1, OUT, grid=grid)

    run_as_threads(wrong, tensor=2)
