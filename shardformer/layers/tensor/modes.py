"""Which layer takes the place of which plain module, by ``tensor_parallel_mode``: the one place that says so."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardformer.layers.grid.linear import GridLinear_Col, GridLinear_Row
from shardformer.layers.tensor.embedding import Embedding1D, VocabParallelEmbedding1D
from shardformer.layers.tensor.linear import Linear1D_Col, Linear1D_Row, VocabParallelLMHead1D
from shardformer.layers.tensor.parallel_module import ParallelModule
from shardformer.layers.tensor.split_norm import SplitNorm
from shardformer.mesh.tensor_grid import GRID_MODES


@dataclass(frozen=True)
class ParallelLayers:
    """The layers of one mode.

    Args:
        column: for the linears that read what enters a block.
        row: for the linear at its exit.
        norm: for a norm between them, over features that ranks have parts of.
        table: for an embedding inside of a block, with columns for heads.
        embedding: for the embedding of the vocabulary.
        head: for the linear that gives its logits.
    """

    column: type[ParallelModule]
    row: type[ParallelModule]
    norm: type[ParallelModule]
    table: type[ParallelModule]
    embedding: type[ParallelModule]
    head: type[ParallelModule]


_1D = ParallelLayers(
    column=Linear1D_Col,
    row=Linear1D_Row,
    norm=SplitNorm,
    table=Embedding1D,
    embedding=VocabParallelEmbedding1D,
    head=VocabParallelLMHead1D,
)
MODES = {"1d": _1D} | dict.fromkeys(GRID_MODES, replace(_1D, column=GridLinear_Col, row=GridLinear_Row))
"""``tensor_parallel_mode`` -> its layers."""
