"""Arrange tensor parallel ranks in rows, columns and depth for 2D, 2.5D and 3D tensor parallelism.

Axes that shard each dimension:

    mode   batch between blocks   hidden between blocks   batch in a block   heads, width   weights
    2d     row                    column                  row                column         row, column
    2.5d   row, depth             column                  row, depth         column         row, column
    3d     row, column            depth                   row, depth         column         row, column, depth

In 2.5D the weights are replicated over the depth axis, in 3D it shards the contraction dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, lcm
from typing import Any

from shardformer.errors import ConfigError, check_choice
from shardformer.mesh.parallel_context import Axis, ParallelContext

GRID_AXIS_NAMES = ("row", "column", "depth")
GRID_MODES = ("2d", "2.5d", "3d")


@dataclass(frozen=True, eq=False)
class TensorGrid:
    """Row, column and depth axes for 2D, 2.5D and 3D tensor parallelism.

    Args:
        whole: all ranks of the grid.
        hidden: shards the hidden dimension of activations between blocks.
        contraction: shards the hidden dimension in a block: the depth axis in 3D, otherwise an axis of size 1.
        batch: shards the batch between blocks.
        core: shards the batch in a block.
    """

    mode: str
    whole: Axis
    row: Axis
    column: Axis
    depth: Axis
    hidden: Axis
    contraction: Axis
    batch: Axis
    core: Axis

    @classmethod
    def from_context(cls, context: ParallelContext, mode: str) -> TensorGrid:
        """Build the grid from a context with row, column and depth axes. All processes must call this together."""
        row, column, depth = (context.axis(name) for name in GRID_AXIS_NAMES)
        batch = context.flatten("row", "column" if mode == "3d" else "depth")
        core = context.flatten("row", "depth")
        hidden, contraction = (depth, depth) if mode == "3d" else (column, Axis("contraction"))
        return cls(mode, context.tensor, row, column, depth, hidden, contraction, batch, core)

    @property
    def coords(self) -> dict[str, int]:
        return {axis.name: axis.rank for axis in (self.row, self.column, self.depth)}

    @property
    def batch_size_divisor(self) -> int:
        """Number by which the padded batch size must be divisible."""
        return lcm(self.batch.size, self.core.size)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorGrid:
        return self

    def __str__(self) -> str:
        sizes = [self.row.size, self.column.size] + [self.depth.size] * (self.depth.size > 1 or self.mode != "2d")
        return f"{self.mode} {'x'.join(map(str, sizes))}"


def compute_grid_shape(mode: str, grid_size: int | Sequence[int], depth: int | None = None) -> tuple[int, int, int]:
    """Compute the rows, columns and depth of a tensor parallel grid.

    A single number becomes a square (2D), a stack of squares (2.5D) or a cube (3D). Raises ConfigError if the size does
    not fit the mode.

    >>> compute_grid_shape("2.5d", 8)
    (2, 2, 2)

    Args:
        depth: number of squares in 2.5D.
    """
    check_choice("tensor parallel mode", mode, GRID_MODES, f"The modes are 1d, {', '.join(GRID_MODES)}")
    if isinstance(grid_size, tuple | list):
        row, column, third = (*grid_size, 1)[:3]
        if mode == "2d" and third > 1:
            raise ConfigError(
                f"tensor=({row}, {column}, {third}) has three sizes, but tensor_parallel_mode='2d' requires two.",
                remedy=f"Use tensor=({row}, {column * third}).",
            )
        if mode != "2d" and third == 1 < row * column:
            raise ConfigError(
                f"tensor=({row}, {column}) has two sizes, but tensor_parallel_mode={mode!r} requires three.",
                remedy=f"Pass three sizes, such as tensor=({row}, {column}, 2).",
            )
        return row, column, third
    assert isinstance(grid_size, int), grid_size
    if mode == "2.5d" and depth is not None:
        side = isqrt(grid_size // depth) if depth else 0
        if side * side * depth != grid_size:
            raise ConfigError(
                f"tensor_parallel_mode='2.5d' cannot arrange tensor={grid_size} ranks in depth={depth} equal squares.",
                remedy=f"Use a tensor size that is {depth} times a square number, such as {4 * depth}.",
            )
        return side, side, depth
    if mode == "2d":
        side = isqrt(grid_size)
        if side * side != grid_size:
            shape = _factor_into_near_square(grid_size)
            raise ConfigError(
                f"tensor_parallel_mode='2d' requires a perfect square as the tensor size, but got tensor={grid_size}.",
                remedy=f"Pass the numbers of rows and columns, such as tensor={shape}.",
            )
        return side, side, 1
    if mode == "3d":
        side = round(grid_size ** (1 / 3))
        if side**3 != grid_size:
            raise ConfigError(
                f"tensor_parallel_mode='3d' requires a perfect cube as the tensor size, but got tensor={grid_size}.",
                remedy="Pass three sizes, such as tensor=(2, 2, 2) or tensor=(4, 2, 2).",
            )
        return side, side, side
    sides = [n for n in range(isqrt(grid_size), 1, -1) if grid_size % (n * n) == 0 and grid_size > n * n]
    if not sides:
        raise ConfigError(
            f"tensor_parallel_mode='2.5d' cannot arrange tensor={grid_size} ranks in equal squares.",
            remedy="Pass the numbers of rows, columns and squares, such as tensor=(2, 2, 2).",
        )
    return sides[0], sides[0], grid_size // sides[0] ** 2


def reshape_tensor_axis_by_mode(context: ParallelContext, mode: str) -> ParallelContext:
    """Split the tensor axis into row, column and depth axes. All processes must call this function.

    Raises ConfigError if the size of the tensor axis does not fit the mode.
    """
    if "row" in context.sizes:
        compute_grid_shape(mode, [context.sizes[name] for name in GRID_AXIS_NAMES])
        return context
    sizes = compute_grid_shape(mode, context.tensor.size)
    return context.reshape_axis("tensor", **dict(zip(GRID_AXIS_NAMES, sizes, strict=True)))


def _factor_into_near_square(size: int) -> tuple[int, int]:
    small = next(n for n in range(isqrt(size), 0, -1) if size % n == 0)
    return size // small, small


@dataclass(frozen=True)
class GridShards:
    """Shards of activations and weights on one rank of a tensor parallel grid.

    A shard is written as "number/count", counted from 1, or as "all".

    Args:
        place: row, column and, except in 2D, depth of the rank.
        between: shards of samples and hidden features between blocks.
        inside: shards of samples, and of heads or features, inside a block.
        weights: shards of the width and the hidden features of a block's weights.
    """

    rank: int
    place: str
    between: str
    inside: str
    weights: str


def describe_grid_shards(mode: str, grid_size: int | tuple[int, ...]) -> list[GridShards]:
    """Describe the shards of each rank of a tensor parallel grid. Raises ConfigError for sizes that do not fit."""
    row, column, depth = compute_grid_shape(mode, grid_size)
    shards = []
    for rank in range(row * column * depth):
        context = ParallelContext.from_sizes({"tensor": row * column * depth}, {"tensor": rank})
        grid = TensorGrid.from_context(context.reshape_axis("tensor", row=row, column=column, depth=depth), mode)
        axes = [grid.row, grid.column, grid.depth][: 2 if mode == "2d" else 3]
        batch, hidden, core, width = (
            _format_shard_position(axis.rank, axis.size) for axis in (grid.batch, grid.hidden, grid.core, grid.column)
        )
        contracted = _format_shard_position(grid.contraction.rank * row + grid.row.rank, grid.contraction.size * row)
        place = ", ".join(str(axis.rank) for axis in axes)
        shards.append(GridShards(rank, place, f"{batch}, {hidden}", f"{core}, {width}", f"{width}, {contracted}"))
    return shards


def compare_comm_volume_with_1d(mode: str, grid_size: int | tuple[int, ...]) -> list[tuple[str, str]]:
    """Compare the communication volume per layer of a tensor parallel grid and of 1D tensor parallelism.

    Counts the forward and backward pass of a layer with N tokens, H hidden features, W weights, V features inside its
    blocks, and E features at the end of its blocks.
    """
    row, column, depth = compute_grid_shape(mode, grid_size)
    ranks = row * column * depth
    copies, contraction = (1, depth) if mode == "3d" else (depth, 1)

    def fraction_sent(num_ranks: int) -> float:
        return (num_ranks - 1) / num_ranks

    terms = [
        (10 * fraction_sent(column) / (row * copies * contraction), "N H"),
        (fraction_sent(contraction) / (row * column), "N (2 V + E)"),
        (3 * fraction_sent(row) / (column * contraction), "W"),
        (2 * fraction_sent(copies) / (row * column), "W (copies)"),
    ]
    total = " + ".join(f"{factor:.3g} {what}" for factor, what in terms if factor) or "nothing"
    return [(f"1D over {ranks}", f"{8 * fraction_sent(ranks):.3g} N H"), (f"{mode} over this grid", total)]


def summarize_grid(grid: TensorGrid) -> str:
    """Summarize the shards and the communication volume of a tensor parallel grid in words."""
    sizes = (grid.row.size, grid.column.size, grid.depth.size)
    (_, line), (_, own) = compare_comm_volume_with_1d(grid.mode, sizes)
    widths = ", V features inside its blocks and E features at their ends" if "V" in own else ""
    return (
        f"Tensor parallelism on a grid: {grid}. Between blocks, a rank has 1/{grid.batch.size} of the samples and "
        f"1/{grid.hidden.size} of the hidden features: 1/{grid.batch.size * grid.hidden.size} of the activations. "
        f"For a layer with W weights, forward and backward, it sends {own} elements, with N tokens and H hidden "
        f"features{widths}. One-dimensional tensor parallelism sends {line}."
    )


def _format_shard_position(index: int, num_shards: int) -> str:
    return "all" if num_shards == 1 else f"{index + 1}/{num_shards}"
