"""A block on a tensor grid: its columns are computed together, its heads or features lie over the columns."""

from __future__ import annotations

from torch import Tensor

from shardformer.layers.grid.edges import GridEdges
from shardformer.layers.grid.projection import project_on_grid
from shardformer.layers.tensor.block import Block


class GridBlock(Block):
    """The edges of one block. Where what enters is whole, as in a module that is given it so, weights are gathered."""

    def _project_all(self, known: Tensor | None) -> tuple[Tensor | None, list[Tensor]]:
        edges, source = self.edges, self._source
        assert source is not None
        if isinstance(edges, GridEdges):
            return project_on_grid(source, edges, self.columns, known)
        entered = self._entered
        assert entered is not None
        return None, [column.multiply(entered) for column in self.columns]
