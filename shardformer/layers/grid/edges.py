"""What is communicated where a block on a tensor grid begins and ends.

              2D, 2.5D                                3D
    entry     all-gather of hidden over columns       all-gather of samples over columns
    weights   all-gather of hidden over rows          the same; partial products reduce-scattered over depth
    exit      reduce-scatter of hidden over columns   all-gather of samples over depth, reduce-scatter over columns

Backward, each all-gather is a reduce-scatter and the other way round, and what was gathered is gathered again: saved is
what this rank holds. Rectangles beside squares: every axis has a size of its own (Xu et al. 2021, "An efficient 2D
method for training super-large deep learning models"; Wang et al. 2021, "2.5-dimensional distributed model training";
Bian et al. 2021, "Maximizing parallelism in distributed training for huge neural networks").
"""

# B batch, b this rank's samples, S sequence, H hidden, h this rank's part of it

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardformer.comm.collectives import Pending, all_gather, local_chunk, reduce_scatter, start_all_gather
from shardformer.comm.collectives import start_reduce_scatter as start_scatter
from shardformer.layers.tensor.pending import PendingTensor
from shardformer.layout.split import even_bounds
from shardformer.mesh.tensor_grid import TensorGrid


@dataclass(frozen=True)
class GridEdges:
    """Both edges of a block between which each rank has some samples, and some heads or features.

    Args:
        full: the hidden features of all ranks.
        batch_dim: the dim of the stream that counts samples; of one whose tokens lie in one dim it is the first.
    """

    grid: TensorGrid
    full: int
    batch_dim: int = 0

    @property
    def is_cube(self) -> bool:
        return self.grid.mode == "3d"

    @property
    def contracted(self) -> int:
        """The hidden features that the ranks of one row have together: all of them, or in 3D this layer's."""
        return length_of(self.full, self.grid.contraction.size, self.grid.contraction.rank)

    def samples_inside(self, x: Tensor) -> int:
        """Of the ranks' samples x, how many a rank has in a block."""
        return x.shape[self._dim(x)] * self.grid.batch.size // self.grid.core.size

    def _dim(self, x: Tensor) -> int:
        return self.batch_dim if x.dim() > 2 else 0

    def leading(self, x: Tensor) -> tuple[int, ...]:
        """The dims before the last of the stream, of those of x in a block."""
        dim = self._dim(x)
        samples = x.shape[dim] * self.grid.core.size // self.grid.batch.size
        return (*x.shape[:dim], samples, *x.shape[dim + 1 : -1])

    def enter(self, x: Tensor) -> Tensor:
        """The block's input (b, S, H) of this rank's x, for a forward that reads more than its shape."""
        shape = (*x.shape[: self._dim(x)], self.samples_inside(x), *x.shape[self._dim(x) + 1 : -1], self.full)
        return PendingTensor.make(x, shape, self.grid.column, None, self._whole, self._part)

    def _whole(self, x: Tensor) -> Tensor:
        if not self.is_cube:
            return all_gather(x, self.grid.column, -1, self.full)
        whole = all_gather(all_gather(x, self.grid.column, self._dim(x)), self.grid.depth, -1, self.full)
        return local_chunk(whole, self.grid.depth, self._dim(whole))

    def _part(self, grad: Tensor) -> Tensor:
        """Of the gradient of what ``_whole`` gives: ranks of a row have summands of it."""
        if not self.is_cube:
            return reduce_scatter(grad, self.grid.column, -1)
        whole = all_gather(grad, self.grid.depth, self._dim(grad))
        return reduce_scatter(local_chunk(whole, self.grid.depth, whole.dim() - 1), self.grid.column, self._dim(whole))

    # --- what the products of the columns and of the row begin and end with

    def start_gather(self, x: Tensor) -> Pending:
        """What is multiplied, of the ranks' parts of the stream: (b, S, H), or in 3D (more samples, S, h)."""
        if self.is_cube:
            return start_all_gather(x, self.grid.column, self._dim(x))
        return start_all_gather(x, self.grid.column, -1, self.full)

    def start_scatter(self, x: Tensor) -> Pending:
        """This rank's part of the sum over the ranks of a row."""
        return start_scatter(x, self.grid.column, self._dim(x) if self.is_cube else -1)

    def start_weight(self, weight: Tensor, dim: int) -> Pending:
        """The weight that is multiplied with, of this rank's part of its hidden dim."""
        return start_all_gather(weight, self.grid.row, dim, self.contracted, purpose="weights")

    def start_weight_grad(self, grad: Tensor, dim: int) -> Pending:
        return start_scatter(grad, self.grid.row, dim, purpose="weights")

    def inside(self, x: Tensor) -> Tensor:
        """Of partial products the sum for this rank's samples in a block. Communicates in 3D alone."""
        return reduce_scatter(x, self.grid.contraction, self._dim(x))

    def across(self, x: Tensor) -> Tensor:
        """The other way round: what is multiplied with a weight whose contraction is cut."""
        return all_gather(x, self.grid.contraction, self._dim(x))


def length_of(full: int, ranks: int, rank: int) -> int:
    """How many of ``full`` a rank has, cut as even as can be."""
    bounds = even_bounds(full, ranks)
    return bounds[rank + 1] - bounds[rank]
