"""What each rank of a tensor grid holds, and what it sends for a layer: plain data, for ``shardformer draw --grid``."""

from __future__ import annotations

from dataclasses import dataclass

from shardformer.mesh.context import ParallelContext
from shardformer.mesh.tensor_grid import NAMES, TensorGrid, sizes_of_mode


@dataclass(frozen=True)
class Holding:
    """The parts of one rank, each as "which of how many".

    Args:
        place: its row, column and, where there is one, its place on the third axis.
        between: samples and hidden features of what flows between the blocks.
        inside: samples, and heads or features, inside of a block.
        weights: width and hidden features of a block's weights.
    """

    rank: int
    place: str
    between: str
    inside: str
    weights: str


def holdings(mode: str, sizes: int | tuple[int, ...]) -> list[Holding]:
    """What each rank holds. Raises ConfigError where the sizes do not fit the mode."""
    row, column, depth = sizes_of_mode(mode, sizes)
    found = []
    for rank in range(row * column * depth):
        context = ParallelContext.of({"tensor": row * column * depth}, {"tensor": rank})
        grid = TensorGrid.of(context.view("tensor", **dict(zip(NAMES, (row, column, depth), strict=True))), mode)
        axes = [grid.row, grid.column, grid.depth][: 2 if mode == "2d" else 3]
        hidden = _part(grid.contraction.rank * grid.row.size + grid.row.rank, grid.contraction.size * grid.row.size)
        found.append(
            Holding(
                rank,
                ", ".join(str(axis.rank) for axis in axes),
                f"{_part(grid.batch.rank, grid.batch.size)}, {_part(grid.hidden.rank, grid.hidden.size)}",
                f"{_part(grid.core.rank, grid.core.size)}, {_part(grid.column.rank, grid.column.size)}",
                f"{_part(grid.column.rank, grid.column.size)}, {hidden}",
            )
        )
    return found


def formulas(mode: str, sizes: int | tuple[int, ...]) -> list[tuple[str, str]]:
    """(layout, numbers that a rank sends for a layer, forward and backward), of the grid and of one dimension.

    N tokens, H hidden features, W weights of the layer, V the widths inside of its blocks, of which E at their exits.
    """
    row, column, depth = sizes_of_mode(mode, sizes)
    ranks = row * column * depth
    copies, contraction = (1, depth) if mode == "3d" else (depth, 1)

    def share(n: int) -> float:
        return (n - 1) / n

    terms = [
        (10 * share(column) / (row * copies * contraction), "N H"),
        (share(contraction) / (row * column), "N (2 V + E)"),
        (3 * share(row) / (column * contraction), "W"),
        (2 * share(copies) / (row * column), "W (copies)"),
    ]
    said = " + ".join(f"{factor:.3g} {what}" for factor, what in terms if factor) or "nothing"
    return [(f"1D over {ranks}", f"{8 * share(ranks):.3g} N H"), (f"{mode} over this grid", said)]


def in_a_sentence(grid: TensorGrid) -> str:
    """What a rank of this grid has between the blocks, and what it sends for a layer."""
    sizes = (grid.row.size, grid.column.size, grid.depth.size)
    (_, line), (_, own) = formulas(grid.mode, sizes)
    widths = ", V the widths in its blocks and E at their exits" if "V" in own else ""
    return (
        f"Tensor parallelism on a grid: {grid}. Between the blocks a rank has 1/{grid.batch.size} of the samples and "
        f"1/{grid.hidden.size} of the hidden features, so 1/{grid.batch.size * grid.hidden.size} of the activations. "
        f"For a layer of W weights, forward and backward, it sends {own} numbers, of N tokens and H hidden "
        f"features{widths}; in one dimension {line}."
    )


def _part(index: int, count: int) -> str:
    return "all" if count == 1 else f"{index + 1}/{count}"
