"""Linears that stand alone on a tensor grid: 2D (SUMMA), 2.5D and 3D tensor parallelism, in a model written with them.

What a rank holds of a product Y = X W^T with W of (out, in):

              X                              W                              Y
    2D        samples: row, in: column       out: column, in: row           samples: row, out: column
    2.5D      samples: row, depth            the same, a copy a depth       samples: row, depth
    3D        samples: row, column           out: column, in: depth, row    samples: row, depth
              in: depth                                                     out: column

In the blocks of a model that was not written so, ``shardformer.layers.grid.linear`` communicates less.
"""

# b samples of this rank, S sequence; h, f: this rank's part of the in and out features

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from shardformer.comm.collectives import Pending, start_broadcast, start_reduce
from shardformer.comm.conjugates import enter_block, first_order_only, gather_input, scatter_output
from shardformer.errors import ConfigError
from shardformer.layers.grid.linear import OnGrid, hidden_splits
from shardformer.layers.tensor.parallel_module import check_native
from shardformer.layout.spec import ShardSpec
from shardformer.layout.split import AnySplit, Split, even_bounds
from shardformer.mesh.tensor_grid import TensorGrid


class Linear2D(OnGrid):
    """A linear on rows and columns: (b, S, h) -> (b, S, f).

    On a square it multiplies by SUMMA (van de Geijn and Watts 1997; Xu et al. 2021, section 3.1): in step t the ranks
    of a row get the t-th block of X and those of a column the t-th block of W, and add their product; the next blocks
    are on their way meanwhile. Memory is that of one block more. On a rectangle, and with ``summa=False``, X is
    gathered over columns and W over rows.

    Communicates, forward and backward, with N tokens and (q-1)/q = f_q: 3 (N/q) in f_q + 3 (in out / q) f_q numbers a
    rank; the gradients of its parameters are the whole model's.

    Args:
        grid: the grid, of mode "2d".
        summa: whether to multiply in steps where the grid is a square.

    Raises ConfigError for a grid of another mode.
    """

    mode = "2d"
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        grid: TensorGrid,
        summa: bool = True,
        native: nn.Linear | None = None,
    ) -> None:
        super().__init__(grid.column)
        if grid.mode != self.mode:
            raise ConfigError(
                f"{type(self).__name__} on a grid of mode {grid.mode!r}",
                rule=f"It multiplies on one of mode {self.mode!r}",
                remedy="Take Linear2D, Linear2p5D or Linear3D as the mode says",
            )
        self.__dict__["grid"] = grid
        self.in_features, self.out_features = in_features, out_features
        self.summa = summa and grid.row.size == grid.column.size
        # the plain layer first: this rank keeps its part of the numbers that the random state gives that one
        native = native if native is not None else nn.Linear(in_features, out_features, bias)
        out = Split.even(out_features, grid.column.size, axes=(grid.column.name,))
        splits: dict[int, AnySplit | Sequence[AnySplit]] = {0: out, 1: hidden_splits(in_features, grid)}
        self.register_shard("weight", native.weight, ShardSpec(native.weight.shape, splits))
        self.register_shard("bias", native.bias, ShardSpec((out_features,), {0: out}))
        self.train(native.training)

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> nn.Module:
        """Cuts an nn.Linear that holds the full weight over a ``TensorGrid``. Raises ConfigError for another module."""
        if not isinstance(module, nn.Linear):
            raise ConfigError(
                f"{cls.__name__} was given a {type(module).__name__}",
                rule="It stands for an nn.Linear",
                remedy="Name the linear itself",
            )
        check_native(module, nn.Linear)
        return cls(module.in_features, module.out_features, grid=process_group, native=module, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        weight = enter_block(self.weight, self.grid.depth)  # copies have other samples
        y = self._product(x, weight)
        return y if self.bias is None else y + enter_block(self.bias, self.grid.batch)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        grid = self.grid
        if self.summa:
            out: Tensor = _Summa.apply(x, weight, grid, self.in_features)
            return out
        whole = gather_input(x, grid.column, x.dim() - 1, self.in_features)
        return F.linear(whole, gather_input(weight, grid.row, 1, self.in_features))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.grid}"


class Linear2p5D(Linear2D):
    """The same for each of several squares with copies of the weights (Wang et al. 2021).

    Beside what Linear2D communicates one all-reduce over depth of the gradient of this rank's weight.
    """

    mode = "2.5d"


class Linear3D(Linear2D):
    """A linear on a cube (Bian et al. 2021, section 3.2): (b, S, h) -> (b, S, f), other samples and features.

    What comes out has its samples over rows and depth and its features over columns: the linear that follows it stands
    on ``grid.turned``, where columns and depth have changed places, and gives what the first was given.

    Communicates, forward and backward, each twice or once more: an all-gather of X over columns along samples, one of
    W over rows, a reduce-scatter of Y over depth along samples.
    """

    mode = "3d"

    def forward(self, x: Tensor) -> Tensor:
        grid = self.grid
        whole = gather_input(x, grid.column, 0, x.shape[0] * grid.column.size)
        bounds = even_bounds(self.in_features, grid.depth.size)
        part = bounds[grid.depth.rank + 1] - bounds[grid.depth.rank]
        y = scatter_output(F.linear(whole, gather_input(self.weight, grid.row, 1, part)), grid.depth, 0)
        return y if self.bias is None else y + enter_block(self.bias, grid.core)


class _Summa(Function):
    """The product on a square, in as many steps as it has rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grid: TensorGrid, full: int) -> Tensor:
        ctx.grid, ctx.full = grid, full
        ctx.save_for_backward(x, weight)
        y: Tensor | None = None
        for x_block, w_block in _steps(x, weight, grid, full):
            part = F.linear(x_block.wait(), w_block.wait())
            y = part if y is None else y.add_(part)
        assert y is not None
        return y

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grid, (x, weight) = ctx.grid, ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        of_x: list[Pending] = []
        of_weight: list[Pending] = []
        for step, (x_block, w_block) in enumerate(_steps(x, weight, grid, ctx.full)):
            of_x.append(start_reduce(grad @ w_block.wait(), grid.column, step, purpose="block"))
            block = x_block.wait()
            of_weight.append(
                start_reduce(flat.t() @ block.reshape(-1, block.shape[-1]), grid.row, step, purpose="weights")
            )
        x_grads, weight_grads = [p.wait() for p in of_x], [p.wait() for p in of_weight]
        return x_grads[grid.column.rank], weight_grads[grid.row.rank], None, None


def _steps(x: Tensor, weight: Tensor, grid: TensorGrid, full: int) -> Iterator[tuple[Pending, Pending]]:
    """The blocks of X and of W of each step; those of the next are on their way before a step is computed."""
    lengths = [b - a for a, b in pairwise(even_bounds(full, grid.column.size))]

    def start(step: int) -> tuple[Pending, Pending]:
        x_block = x.contiguous() if grid.column.rank == step else x.new_empty((*x.shape[:-1], lengths[step]))
        w_block = weight.contiguous() if grid.row.rank == step else weight.new_empty((weight.shape[0], lengths[step]))
        return (
            start_broadcast(x_block, grid.column, step, purpose="block"),
            start_broadcast(w_block, grid.row, step, purpose="weights"),
        )

    now = start(0)
    for step in range(len(lengths)):
        following = start(step + 1) if step + 1 < len(lengths) else now
        yield now
        now = following
