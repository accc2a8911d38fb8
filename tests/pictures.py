"""Draws the pictures of the documentation into docs/pictures/: ``make pages`` or ``python -m tests.pictures``.

Figures and shapes come from the package and from docs/performance.md and its subpages where they exist there. The
pictures have a white background, so that they are readable on dark pages, and colors that color-blind readers can
distinguish.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from shardformer.mesh.tensor_grid import describe_grid_shards
from shardformer.pipeline.schedule_chart import save_schedule_chart
from shardformer.pipeline.schedules import make_schedule, simulate_schedule

DOCS = Path(__file__).resolve().parents[1] / "docs"
FOLDER = DOCS / "pictures"
STYLE = {"svg.hashsalt": "shardformer", "svg.fonttype": "none", "font.size": 10, "text.parse_math": False}
RANKS = ("#56B4E9", "#E69F00", "#2FB68A", "#CC79A7")
"""Color of each rank, light enough for black text: blue, orange, green and pink of Okabe and Ito."""
PLAIN, INK, LINE = "#E6E6E6", "#222222", "#555555"


def new_axes(width: float, height: float, title: str = "", figure: Any = None) -> Axes:
    """Return axes of a new figure in units of inches, with y growing downwards."""
    figure = Figure(figsize=(width, height))
    FigureCanvasSVG(figure)
    axes: Axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    if title:
        axes.text(0.15, 0.25, title, fontsize=11, fontweight="bold", color=INK, va="center")
    return axes


def box(axes: Axes, x: float, y: float, w: float, h: float, text: str = "", color: str = PLAIN, **style: Any) -> None:
    """Draw a rectangle with centered text."""
    axes.add_patch(Rectangle((x, y), w, h, facecolor=color, edgecolor="white", linewidth=1.2, zorder=2))
    axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", color=INK, zorder=3, **{"fontsize": 10, **style})


def rounded(axes: Axes, x: float, y: float, w: float, h: float, text: str, color: str = PLAIN, **style: Any) -> None:
    patch = FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0,rounding_size=0.08", facecolor=color, edgecolor=LINE)
    patch.set(linewidth=0.8, zorder=2)
    axes.add_patch(patch)
    axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", color=INK, zorder=3, **{"fontsize": 9.5, **style})


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], both: bool = False, curve: float = 0
) -> None:
    patch = FancyArrowPatch(
        start, end, arrowstyle="<|-|>" if both else "-|>", mutation_scale=11, color=LINE, shrinkA=0, shrinkB=0
    )
    patch.set(linewidth=1.2, zorder=4)
    if curve:
        patch.set_connectionstyle("arc3", rad=curve)
    axes.add_patch(patch)


def label(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    axes.text(x, y, text, color=INK, **{"fontsize": 9.5, "ha": "center", "va": "center", **style})


# ------------------------------------------------------------------------------------------------------- parallelisms


def mesh() -> Figure:
    axes = new_axes(7.2, 2.85, "A mesh of 8 ranks: data=2, pipe=2, tensor=2")
    for data in range(2):
        left = 1.1 + 3.15 * data
        label(axes, left + 1.3, 0.62, f"data {data}")
        for pipe in range(2):
            top = 0.85 + 0.85 * pipe
            if data == 0:
                label(axes, 0.55, top + 0.3, f"pipe {pipe}")
            for tensor in range(2):
                rank = 4 * data + 2 * pipe + tensor
                box(axes, left + 1.35 * tensor, top, 1.25, 0.6, f"rank {rank}", RANKS[2 * pipe + tensor])
        arrow(axes, (left + 0.62, 1.45), (left + 0.62, 1.7))
        arrow(axes, (left + 1.97, 1.45), (left + 1.97, 1.7))
    label(
        axes, 0.15, 2.6, "Ranks of one color store the same weights and average their gradients over data.", ha="left"
    )
    return axes.figure


def data_parallel() -> Figure:
    axes = new_axes(7.2, 2.5, "Data parallelism: same weights, different samples")
    for rank in range(2):
        y = 0.6 + 0.9 * rank
        box(axes, 0.2, y, 1.5, 0.6, f"samples of rank {rank}", RANKS[rank], fontsize=9)
        arrow(axes, (1.75, y + 0.3), (2.1, y + 0.3))
        box(axes, 2.15, y, 1.6, 0.6, "full model", PLAIN)
        arrow(axes, (3.8, y + 0.3), (4.15, y + 0.3))
        box(axes, 4.2, y, 1.2, 0.6, "gradients", RANKS[rank])
        box(axes, 5.85, y, 1.2, 0.6, "mean gradient", PLAIN, fontsize=9)
        arrow(axes, (5.45, y + 0.3), (5.8, y + 0.3))
    arrow(axes, (4.8, 1.23), (4.8, 1.47), both=True)
    label(axes, 4.9, 1.35, "all-reduce", ha="left", fontsize=9)
    label(axes, 0.2, 2.3, "The all-reduce of a bucket of gradients overlaps with the backward pass.", ha="left")
    return axes.figure


def tensor_parallel() -> Figure:
    axes = new_axes(7.6, 3.2, "Tensor parallelism: an MLP on two ranks")
    heads = ((0.65, "input"), (1.87, "columns of A"), (3.05, "hidden"), (4.37, "rows of B"), (5.55, "partial sum"))
    for x, text in (*heads, (7.0, "output")):
        label(axes, x, 0.62, text, fontsize=9)
    for rank in range(2):
        y, color = 0.85 + 1.1 * rank, RANKS[rank]
        label(axes, 0.17, y + 0.4, f"rank {rank}", fontsize=9, rotation=90)
        box(axes, 0.3, y, 0.7, 0.8, "X")
        label(axes, 1.2, y + 0.4, "×")
        for part in range(2):
            mine = part == rank
            box(axes, 1.4 + 0.47 * part, y, 0.47, 0.8, f"A{part}" if mine else "", color if mine else "#F5F5F5")
        label(axes, 2.55, y + 0.4, "=")
        box(axes, 2.8, y, 0.5, 0.8, f"Y{rank}", color)
        label(axes, 3.55, y + 0.4, "×")
        for part in range(2):
            mine = part == rank
            box(axes, 3.9, y + 0.4 * part, 0.94, 0.4, f"B{part}" if mine else "", color if mine else "#F5F5F5")
        label(axes, 5.0, y + 0.4, "=")
        box(axes, 5.2, y, 0.7, 0.8, f"Z{rank}", color)
        arrow(axes, (5.95, y + 0.4), (6.6, y + 0.4))
        box(axes, 6.65, y, 0.7, 0.8, "Z")
    arrow(axes, (5.55, 1.68), (5.55, 1.92), both=True)
    label(axes, 5.65, 1.8, "all-reduce: Z = Z0 + Z1", ha="left", fontsize=9)
    text = "A is column-parallel, B is row-parallel. The backward pass all-reduces the gradient of X in the same way."
    label(axes, 0.15, 2.98, text, ha="left", fontsize=9)
    return axes.figure


def sequence_parallel() -> Figure:
    axes = new_axes(7.6, 2.75, "Sequence parallelism: slices of the sequence between blocks")
    for x, text in ((0.8, "norm, residual"), (3.35, "attention or MLP"), (6.4, "dropout, residual")):
        label(axes, x, 0.62, text, fontsize=9)
    for rank in range(2):
        y, color = 0.85 + 0.75 * rank, RANKS[rank]
        box(axes, 0.2, y, 1.25, 0.6, f"positions of rank {rank}", color, fontsize=8)
        arrow(axes, (1.5, y + 0.3), (2.45, y + 0.3))
        box(axes, 2.5, y, 1.75, 0.6, f"all positions,\nheads of rank {rank}", color, fontsize=9)
        arrow(axes, (4.3, y + 0.3), (5.65, y + 0.3))
        box(axes, 5.7, y, 1.4, 0.6, f"positions of rank {rank}", color, fontsize=8)
    for x, text in ((1.97, "all-gather"), (4.97, "reduce-scatter")):
        label(axes, x, 1.53, text, fontsize=9)
    text = "Together they send as much as one all-reduce. Activations between blocks need half the memory."
    label(axes, 0.15, 2.5, text, ha="left", fontsize=8.8)
    return axes.figure


def tensor_grid() -> Figure:
    axes = new_axes(7.6, 4.1, "Tensor grids: the ranks that store each part")
    modes: list[tuple[str, tuple[int, ...]]] = [("2d", (2, 2)), ("2.5d", (2, 2, 2)), ("3d", (2, 2, 2))]
    for number, (mode, sizes) in enumerate(modes):
        left = 0.2 + 2.5 * number
        label(axes, left + 1.0, 0.65, f"{mode}: {' x '.join(map(str, sizes))}", fontweight="bold")
        shards = describe_grid_shards(mode, sizes)
        for top, height, names, title, sides in (
            (1.15, 1.15, [each.between for each in shards], "activations between blocks", ("samples", "hidden")),
            (2.8, 0.8, [each.weights for each in shards], "weights", ("heads", "hidden")),
        ):
            label(axes, left + 1.0, top - 0.17, title, fontsize=8.5)
            label(axes, left - 0.02, top + height / 2, sides[0], fontsize=8, rotation=90)
            label(axes, left + 1.0, top + height + 0.13, sides[1], fontsize=8)
            draw_tiles(axes, left + 0.1, top, 1.85, height, names)
    return axes.figure


def lighter(color: str) -> str:
    """Mix a color with white in equal parts."""
    return "#" + "".join(f"{(int(color[i : i + 2], 16) + 255) // 2:02X}" for i in (1, 3, 5))


def draw_tiles(axes: Axes, x: float, y: float, w: float, h: float, shards: Sequence[str]) -> None:
    """Draw a tensor of two dimensions as tiles with the ranks that store each. A shard is written as ``1/2, 2/4``."""
    places = [[tuple(map(int, part.split("/"))) for part in shard.split(", ")] for shard in shards]
    (_, rows), (_, columns) = places[0]
    for row in range(rows):
        for column in range(columns):
            here = [r for r, ((i, _), (j, _)) in enumerate(places) if (i, j) == (row + 1, column + 1)]
            color = RANKS[here[0]] if here[0] < 4 else lighter(RANKS[here[0] - 4])
            tile = x + w / columns * column, y + h / rows * row, w / columns, h / rows
            box(axes, *tile, ", ".join(map(str, here)), color, fontsize=9)


def context_parallel() -> Figure:
    axes = new_axes(7.6, 3.95, "Context parallelism: ring attention and Ulysses")
    label(axes, 0.2, 0.62, "Ring: chunks of the sequence on 4 ranks, so that causal attention is balanced", ha="left")
    owners = [min(chunk, 7 - chunk) for chunk in range(8)]
    for chunk, owner in enumerate(owners):
        box(axes, 0.2 + 0.9 * chunk, 0.8, 0.9, 0.4, f"rank {owner}", RANKS[owner], fontsize=9)
    for rank in range(4):
        x = 0.5 + 1.75 * rank
        rounded(axes, x, 1.5, 1.1, 0.42, f"rank {rank}", RANKS[rank])
        if rank < 3:
            arrow(axes, (x + 1.13, 1.71), (x + 1.72, 1.71))
            label(axes, x + 1.43, 1.58, "K, V", fontsize=8)
    arrow(axes, (6.3, 1.95), (1.05, 1.95), curve=-0.07)
    label(
        axes, 0.2, 2.55, "Ulysses: an all-to-all exchanges positions for heads, before and after attention", ha="left"
    )
    for rank in range(4):
        y = 2.75 + 0.25 * rank
        box(axes, 0.9, y, 2.0, 0.25, f"rank {rank}", RANKS[rank], fontsize=8.5)
        box(axes, 4.7 + 0.5 * rank, 2.75, 0.5, 1.0, f"{rank}", RANKS[rank], fontsize=8.5)
    for x in (0.75, 4.55):
        label(axes, x, 3.25, "positions", fontsize=8, rotation=90)
    label(axes, 1.9, 3.85, "heads", fontsize=8)
    label(axes, 5.7, 3.85, "heads", fontsize=8)
    arrow(axes, (3.05, 3.25), (4.35, 3.25), both=True)
    label(axes, 3.7, 3.1, "all-to-all", fontsize=9)
    return axes.figure


def zero() -> Figure:
    axes = new_axes(7.6, 3.1, "ZeRO: what each of four data-parallel ranks stores (fp32 and Adam)")
    kinds = (("parameters", 4), ("gradients", 4), ("optimizer state", 8))
    for stage in range(4):
        left = 1.15 + 1.63 * stage
        sharded = [number < stage for number in (2, 1, 0)]  # stage 1: the state; 2: also gradients; 3: also parameters
        total = sum(size / (4 if is_sharded else 1) for (_, size), is_sharded in zip(kinds, sharded))
        label(axes, left + 0.68, 0.65, f"stage {stage}" if stage else "no ZeRO", fontweight="bold")
        for number, ((kind, _), is_sharded) in enumerate(zip(kinds, sharded)):
            y = 0.85 + 0.52 * number
            if stage == 0:
                label(axes, 1.05, y + 0.21, kind, ha="right", fontsize=8.5)
            for rank in range(4):
                x = left + 0.35 * rank
                axes.add_patch(Rectangle((x, y), 0.31, 0.42, facecolor="#F2F2F2", zorder=1))
                part = 0.25 if is_sharded else 1.0
                offset = 0.42 * 0.25 * rank if is_sharded else 0.0
                box(axes, x, y + offset, 0.31, 0.42 * part, "", RANKS[rank] if is_sharded else "#9A9A9A")
        label(axes, left + 0.68, 2.55, f"{total:g} bytes", fontsize=9.5)
    label(axes, 1.05, 2.55, "per parameter", ha="right", fontsize=8.5)
    label(
        axes, 1.2, 2.9, "Stage 3 also gathers the parameters of the current and the next layer.", ha="left", fontsize=9
    )
    return axes.figure


def pipeline(path: Path) -> None:
    schedule = make_schedule("1f1b", 4, 8)
    save_schedule_chart(schedule, simulate_schedule(schedule), path)


# ------------------------------------------------------------------------------------------- architecture, performance


def architecture() -> Figure:
    axes = new_axes(7.6, 4.5, "From a model to a sharded training step")
    blue, orange, green = "#CFE8F7", "#FBE3B5", "#CBEBDD"
    rounded(axes, 0.2, 0.6, 1.5, 0.62, "your model\n(unmodified)")
    rounded(axes, 0.2, 1.62, 1.5, 0.62, "ParallelConfig\nmesh/")
    rounded(axes, 2.2, 0.6, 1.75, 0.62, "policy: roles\npolicies/, discovery/", blue)
    rounded(axes, 4.45, 0.6, 1.35, 0.62, "plan\nsharding/", blue)
    rounded(axes, 6.15, 0.6, 1.3, 0.62, "checks on\nall ranks", blue)
    rounded(axes, 4.45, 1.62, 3.0, 0.62, "apply: modules, shards, hooks\nsharding/, weights/, meta_init/", blue)
    arrow(axes, (1.75, 0.91), (2.15, 0.91))
    arrow(axes, (4.0, 0.91), (4.4, 0.91))
    arrow(axes, (5.85, 0.91), (6.1, 0.91))
    arrow(axes, (6.8, 1.26), (6.8, 1.58))
    arrow(axes, (1.75, 1.93), (4.4, 1.93))
    label(axes, 3.07, 1.8, "sizes of the axes", fontsize=8.5)
    arrow(axes, (5.95, 2.28), (5.95, 2.58))
    names = ("tensor_parallel/", "context_parallel/", "pipeline/", "kernels/", "offload/")
    box(axes, 0.2, 2.62, 7.25, 0.75, "", orange)
    label(axes, 0.35, 2.78, "forward and backward of the sharded model", ha="left", fontsize=9)
    for number, name in enumerate(names):
        rounded(axes, 0.32 + 1.42 * number, 2.95, 1.34, 0.33, name, "white", fontsize=9)
    box(axes, 0.2, 3.45, 7.25, 0.4, "", green)
    for x, text in (
        (1.4, "gradients/: reduce, clip"),
        (3.85, "zero/: optimizer step"),
        (6.2, "checkpoint/: save, load"),
    ):
        label(axes, x, 3.65, text, fontsize=9)
    box(axes, 0.2, 3.93, 7.25, 0.4, "comm/, layout/: collectives, and ShardSpec of every parameter", PLAIN, fontsize=9)
    return axes.figure


def read_table(heading: str) -> dict[str, list[str]]:
    """Return the rows of the first table of a section of the performance pages: first cell -> other cells."""
    pages = [path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("performance*.md"))]
    section = "".join(pages).split(f"\n## {heading}\n")[1]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table is not None
    rows = [[cell.strip(" *`") for cell in line.strip("|\n").split("|")] for line in table[0].splitlines()]
    return {first.replace("**", ""): rest for first, *rest in rows if set(first) - set("-")}


def first_number(cell: str) -> float:
    return float(re.sub(r"[,*]", "", cell).split()[0])


def performance() -> Figure:
    tables = (
        ("Tensor parallelism over 2 ranks", "Against torch, transformers and one process", 3, (
            ("one process", "one process"),
            ("ShardFormer", "ShardFormer"),
            ("torch's best plan", "torch, best plan (`PrepareModuleInput` at the blocks, `loss_parallel`)"),
            ("transformers' plan", "transformers' own plan"),
        )),
        ("ZeRO over 2 ranks", "ZeRO", 0, (
            ("DDP + ZeRO 1 (torch)", "DDP + `ZeroRedundancyOptimizer"),
            ("ShardFormer, stage 1", "ShardFormer, stage 1"),
            ("fully_shard (torch)", "fully_shard"),
            ("ShardFormer, stage 3", "ShardFormer, stage 3"),
        )),
    )  # fmt: skip
    figure = Figure(figsize=(7.6, 2.3))
    FigureCanvasSVG(figure)
    for number, (title, heading, column, rows) in enumerate(tables):
        table = read_table(heading)
        axes = figure.add_axes((0.18 + 0.51 * number, 0.2, 0.27, 0.62))
        times = [first_number(table[name][column]) for _, name in rows]
        colors = [RANKS[0] if shown.startswith("ShardFormer") else "#C9C9C9" for shown, _ in rows]
        axes.barh(range(len(rows)), times, color=colors, height=0.7)
        axes.set_yticks(range(len(rows)), [shown for shown, _ in rows], fontsize=8.5)
        axes.invert_yaxis()
        for place, value in enumerate(times):
            axes.text(value + 0.03 * max(times), place, f"{value:,.0f} ms", va="center", fontsize=8.5, color=INK)
        axes.set(xlim=(0, 1.4 * max(times)), xticks=[])
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.set_title(title, fontsize=10, loc="left", fontweight="bold", color=INK)
    figure.text(0.01, 0.05, "Time of a training step of a LLaMA on two CPU cores, gloo. Less is better.", fontsize=8.5)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "architecture": architecture,
    "mesh": mesh,
    "data-parallel": data_parallel,
    "tensor-parallel": tensor_parallel,
    "sequence-parallel": sequence_parallel,
    "tensor-grid": tensor_grid,
    "context-parallel": context_parallel,
    "zero": zero,
    "performance": performance,
}
SCHEDULE = "pipeline"


def draw(folder: Path) -> list[Path]:
    """Draw all pictures as SVG files into a folder, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, function in PICTURES.items():
        paths.append(folder / f"{name}.svg")
        with matplotlib.rc_context(STYLE):
            function().savefig(paths[-1], facecolor="white", metadata={"Date": None})
    paths.append(folder / f"{SCHEDULE}.svg")
    pipeline(paths[-1])
    return paths


def texts(path: Path) -> list[str]:
    """Return the texts of an SVG picture, which do not depend on the version of matplotlib."""
    found = re.findall(r"<(?:text|tspan)[^>]*>([^<]*)<", path.read_text(encoding="utf-8"))
    return [text.strip() for text in found if text.strip()]


if __name__ == "__main__":
    for path in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER):
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} KB")
