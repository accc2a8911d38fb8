"""Linears of which each rank of a tensor grid has a rectangle: heads or features over columns, hidden over rows.

They stand in the blocks of a model. ``shardformer.layers.grid.summa`` has linears that stand alone.
"""

# b samples of this rank, S sequence, H hidden, F features; lower case: this rank's part

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.conjugates import gather_input, join_dim, leave_block
from shardformer.errors import ConfigError
from shardformer.layers.grid.edges import GridEdges, length_of
from shardformer.layers.grid.projection import GridRowExit, hidden_dim
from shardformer.layers.tensor.edges import Edges
from shardformer.layers.tensor.linear import Linear1D_Col, Linear1D_Row
from shardformer.layers.tensor.parallel_module import ParallelModule
from shardformer.layers.tensor.projection import matmul_in
from shardformer.layout.spec import ShardSpec
from shardformer.layout.split import AnySplit, Coords, EvenSplit, Split
from shardformer.mesh.tensor_grid import TensorGrid


class OnGrid(ParallelModule):
    """A layer that is given the tensor grid in the place of one axis."""

    takes_grid = True
    grid: TensorGrid

    @property
    def coords(self) -> Coords:
        return self.grid.coords


def hidden_splits(full: int, grid: TensorGrid) -> list[AnySplit]:
    """How the hidden dim of a weight is cut: over the contraction, and what that leaves over rows."""
    size = grid.contraction.size * grid.row.size
    if full < size:
        raise ConfigError(
            f"{full} hidden features over {size} ranks of the tensor grid {grid}",
            rule="Each rank has at least one of them",
            remedy="Use fewer rows",
        )
    contraction = grid.contraction
    of_contraction = [Split.even(full, contraction.size, axes=(contraction.name,))] if grid.mode == "3d" else []
    return [*of_contraction, EvenSplit(grid.row.name, grid.row.size)]


class GridLinear_Col(Linear1D_Col, OnGrid):
    """A linear that reads what enters a block: (b, S, H) -> (b, S, f).

    Its weight is cut along F over columns, as the role says, and along H over rows (in 3D over depth first). In a block
    the block's entry communicates. Called with anything else it gathers its weight (backward: a reduce-scatter).
    """

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> nn.Module:
        """Cuts an nn.Linear or a transformers Conv1D that holds the full weight over a ``TensorGrid``."""
        return super().from_native_module(module, process_group.column, grid=process_group, **kwargs)

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, grid: TensorGrid, **kw: Any) -> None:
        self.__dict__["grid"] = grid
        super().__init__(in_features, out_features, bias, **kw)

    def _specs(self, shape: Sequence[int]) -> tuple[ShardSpec, ShardSpec]:
        dim = hidden_dim(self.transposed)
        splits: dict[int, AnySplit | list[AnySplit]] = {1 - dim: self.split}
        splits[dim] = hidden_splits(self.in_features, self.grid)
        return ShardSpec(shape, splits), ShardSpec((self.out_features,), {0: self.split})

    def multiply(self, x: Tensor) -> Tensor:
        weight = whole_weight(self.weight, self.grid, hidden_dim(self.transposed), self.in_features)
        return matmul_in(x, weight, self.fused_bias, self.transposed)


class GridLinear_Row(Linear1D_Row, OnGrid):
    """The linear at a block's exit: (b, S, f) -> this rank's part (b, S, h) of the stream.

    Its weight is cut as that of a ``GridLinear_Col``; its bias along H as the stream is.
    """

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> nn.Module:
        """Cuts an nn.Linear or a transformers Conv1D that holds the full weight over a ``TensorGrid``."""
        return super().from_native_module(module, process_group.column, grid=process_group, **kwargs)

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, grid: TensorGrid, **kw: Any) -> None:
        self.__dict__["grid"] = grid
        super().__init__(in_features, out_features, bias, **kw)

    def _specs(self, shape: Sequence[int]) -> tuple[ShardSpec, ShardSpec]:
        dim, grid = 1 - hidden_dim(self.transposed), self.grid
        splits: dict[int, AnySplit | list[AnySplit]] = {1 - dim: self.split}
        splits[dim] = hidden_splits(self.out_features, grid)
        of_bias = Split.even(self.out_features, grid.hidden.size, axes=(grid.hidden.name,))
        return ShardSpec(shape, splits), ShardSpec((self.out_features,), {0: of_bias})

    def _leave(self, x: Tensor, weight: Tensor, edges: Edges) -> Tensor:
        if self.exits_with:
            self.exits_with[0].product_of_other = x, weight
            width = length_of(self.out_features, self.grid.hidden.size, self.grid.hidden.rank)
            if not isinstance(edges, GridEdges):
                return x.new_zeros((*x.shape[:-1], self.out_features))
            return x.new_zeros((*edges.leading(x), width))
        if self.product_of_other is not None:
            (other, its_weight), self.product_of_other = self.product_of_other, None
            x, weight = torch.cat((x, other), -1), torch.cat((weight, its_weight), 0 if self.transposed else 1)
        if isinstance(edges, GridEdges):
            y: Tensor = GridRowExit.apply(x, weight, self.transposed, edges)
            return y
        weight = whole_weight(weight, self.grid, 1 - hidden_dim(self.transposed), self.out_features)
        return leave_block(matmul_in(x, weight, None, self.transposed), self.grid.column)

    def _bias_for(self, y: Tensor) -> Tensor | None:
        if self.bias is None or y.shape[-1] != self.out_features:
            return self.bias
        split = Split.even(self.out_features, self.grid.hidden.size, axes=(self.grid.hidden.name,))
        return join_dim(self.bias, self.grid.hidden, 0, split)


def whole_weight(weight: Tensor, grid: TensorGrid, dim: int, full: int) -> Tensor:
    """The weight with its hidden dim whole. Backward: each rank brings its samples' gradient of all of it."""
    contracted = length_of(full, grid.contraction.size, grid.contraction.rank)
    return gather_input(gather_input(weight, grid.row, dim, contracted), grid.contraction, dim, full)
