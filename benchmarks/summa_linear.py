"""A linear layer on a 2D grid that multiplies in steps (SUMMA), to compare with ShardFormer's 2D layers.

It computes Y = X W^T with W of shape (out, in). Samples of X and Y are sharded over rows, and their features over
columns. W is sharded by output features over columns and by input features over rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from shardformer.comm.collectives import (
    PendingCollective,
    copy_to_tp_region,
    gather_from_sp_region,
    once_differentiable,
)
from shardformer.comm.recorder import get_num_bytes, record_collective_start
from shardformer.errors import ConfigError
from shardformer.layout.shard_spec import AnySplit, ShardSpec, Split, get_even_split_bounds
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.tensor_grid import TensorGrid
from shardformer.tensor_parallel.grid_layers import GridParallelModule, get_hidden_dim_splits
from shardformer.tensor_parallel.parallel_module import check_behaves_like_plain_module

# b samples of this rank, S sequence; h, f: this rank's shard of the in and out features


class Linear2D(GridParallelModule):
    """Linear on rows and columns: (b, S, h) -> (b, S, f).

    On a square grid it multiplies by SUMMA (van de Geijn and Watts 1997; Xu et al. 2021, section 3.1): in step t the
    ranks of a row receive the t-th block of X, and those of a column the t-th block of W, and add their product. The
    next blocks are sent during the computation, which needs memory for one more block. On a rectangle, and with
    ``summa=False``, X is gathered over columns and W over rows.

    Communicates, forward and backward, with N tokens and (q-1)/q = f_q: 3 (N/q) in f_q + 3 (in out / q) f_q numbers per
    rank. The gradients of its parameters are those of the full model.

    Args:
        grid: the grid, of mode "2d".
        summa: whether to multiply in steps on a square grid.

    Raises ConfigError for a grid of another mode.
    """

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
        if grid.mode != "2d":
            raise ConfigError(
                f"Linear2D needs a grid of mode '2d', not {grid.mode!r}.",
                rule="SUMMA multiplies on rows and columns.",
                remedy="Create the grid with mode='2d'.",
            )
        self.__dict__["grid"] = grid
        self.in_features, self.out_features = in_features, out_features
        self.summa = summa and grid.row.size == grid.column.size
        # initialize the full layer first: this rank keeps its shard of those random numbers
        native = native if native is not None else nn.Linear(in_features, out_features, bias)
        out = Split.even(out_features, grid.column.size, axes=(grid.column.name,))
        splits: dict[int, AnySplit | Sequence[AnySplit]] = {0: out, 1: get_hidden_dim_splits(in_features, grid)}
        self.register_shard("weight", native.weight, ShardSpec(native.weight.shape, splits))
        self.register_shard("bias", native.bias, ShardSpec((out_features,), {0: out}))
        self.train(native.training)

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> nn.Module:
        """Shard an nn.Linear with the full weight over a ``TensorGrid``. Raises ConfigError for another module."""
        if not isinstance(module, nn.Linear):
            raise ConfigError(
                f"{cls.__name__} stands for an nn.Linear, not a {type(module).__name__}.",
                remedy="Pass the path of the nn.Linear.",
            )
        check_behaves_like_plain_module(module, nn.Linear)
        return cls(module.in_features, module.out_features, grid=process_group, native=module, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        weight = copy_to_tp_region(self.weight, self.grid.depth)  # replicas have other samples
        y = self._product(x, weight)
        return y if self.bias is None else y + copy_to_tp_region(self.bias, self.grid.batch)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        grid = self.grid
        if self.summa:
            out: Tensor = _Summa.apply(x, weight, grid, self.in_features)
            return out
        whole = gather_from_sp_region(x, grid.column, x.dim() - 1, self.in_features)
        return F.linear(whole, gather_from_sp_region(weight, grid.row, 1, self.in_features))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.grid}"


class _Summa(Function):
    """The product on a square grid, in as many steps as it has rows."""

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
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grid, (x, weight) = ctx.grid, ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        of_x: list[PendingCollective] = []
        of_weight: list[PendingCollective] = []
        for step, (x_block, w_block) in enumerate(_steps(x, weight, grid, ctx.full)):
            of_x.append(start_reduce(grad @ w_block.wait(), grid.column, step, purpose="block"))
            block = x_block.wait()
            of_weight.append(
                start_reduce(flat.t() @ block.reshape(-1, block.shape[-1]), grid.row, step, purpose="weights")
            )
        x_grads, weight_grads = [p.wait() for p in of_x], [p.wait() for p in of_weight]
        return x_grads[grid.column.rank], weight_grads[grid.row.rank], None, None


def _steps(
    x: Tensor, weight: Tensor, grid: TensorGrid, full: int
) -> Iterator[tuple[PendingCollective, PendingCollective]]:
    """Yield the blocks of X and of W for each step. The next blocks are sent before a step is computed."""
    lengths = [b - a for a, b in pairwise(get_even_split_bounds(full, grid.column.size))]

    def start(step: int) -> tuple[PendingCollective, PendingCollective]:
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


def start_broadcast(x: Tensor, axis: Axis, source: int, *, purpose: str) -> PendingCollective:
    """Start a broadcast of rank ``source``'s contiguous x to the other ranks."""
    if axis.size == 1:
        return PendingCollective((), lambda: x)
    noted = record_collective_start("broadcast", axis, get_num_bytes(x), purpose)
    others = [r for r in range(axis.size) if r != source]
    is_source = axis.rank == source
    works = axis.transport.exchange(dict.fromkeys(others, x) if is_source else {}, {} if is_source else {source: x})
    return PendingCollective(works, lambda: x, noted)


def start_reduce(x: Tensor, axis: Axis, target: int, *, purpose: str) -> PendingCollective:
    """Start a reduce of the ranks' x to rank ``target``. Other ranks keep their own x."""
    if axis.size == 1:
        return PendingCollective((), lambda: x)
    noted = record_collective_start("reduce", axis, get_num_bytes(x), purpose)
    mine = x.contiguous()
    if axis.rank != target:
        return PendingCollective(axis.transport.exchange({target: mine}, {}), lambda: mine, noted)
    arriving = {r: torch.empty_like(mine) for r in range(axis.size) if r != target}
    works = axis.transport.exchange({}, arriving)
    return PendingCollective(works, lambda: reduce(torch.add, [arriving.get(r, mine) for r in range(axis.size)]), noted)
