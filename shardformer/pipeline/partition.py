"""Cuts a chain of layers into stages: contiguous, at least one layer each, and the slowest as fast as can be.

A cut of ``n`` layers into ``p`` stages is the list of its ``p + 1`` bounds: stage ``i`` holds the layers from
``bounds[i]`` up to ``bounds[i + 1]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from shardformer.errors import ConfigError, check_argument, check_choice

PARTITION_METHODS = ("balanced", "uniform")
"""Besides these, a partition is the number of layers of each virtual stage."""
RENAMED_METHODS = {"cost": "balanced", "even": "uniform"}


def check_partition(partition: Any, layer_costs: Any = None, recompute_layers: Any = None) -> None:
    """Raises ConfigError for values that are not of the types that ``PipelineStageManager`` takes."""
    rule = "It is 'balanced', 'uniform' or the number of layers of each virtual stage"
    if isinstance(partition, str):
        check_choice("partition", partition, PARTITION_METHODS, rule)
    check_argument("partition", partition, isinstance(partition, Sequence), rule, "Write partition='uniform'")
    are_costs = isinstance(layer_costs, Sequence) and all(
        isinstance(cost, int | float) and 0 <= cost < math.inf for cost in layer_costs
    )
    rule, remedy = "It has a number for each layer", "Leave layer_costs out to have them estimated"
    check_argument("layer_costs", layer_costs, layer_costs is None or are_costs, rule, remedy)
    if layer_costs is not None and partition != "balanced":
        raise ConfigError(
            f"layer_costs with partition={partition!r}",
            rule="Costs are used by partition='balanced' alone",
            remedy="Leave one of the two out",
        )
    are_counts = isinstance(recompute_layers, Sequence) and not isinstance(recompute_layers, str)
    is_right = recompute_layers is None or are_counts or type(recompute_layers) is int
    rule, remedy = "It is a number of layers, or one for each virtual stage", "Write recompute_layers=4"
    check_argument("recompute_layers", recompute_layers, is_right, rule, remedy)


def partition_balanced(costs: Sequence[float], parts: int, before: Sequence[float] | float = 0) -> list[int]:
    """The bounds for which the largest cost of a stage is the smallest possible.

    Of the cuts that reach it, the one whose counts of layers are the most even (the sum of their squares is the
    smallest), then the one whose earlier stages have fewer layers, since they hold more micro-batches at a time.

    >>> partition_balanced([1, 1, 1, 1, 4], 2)
    [0, 4, 5]
    >>> partition_balanced([1, 1, 1, 1, 1], 2)
    [0, 2, 5]
    >>> partition_balanced([1, 1, 1, 1], 2, before=[2, 0])     # the first stage does something else as well
    [0, 1, 4]

    Args:
        costs: one a layer, with all that goes with it: the embedding with the first, the head with the last.
        before: what a stage costs before its first layer; one number for all stages, or one a stage.

    Raises ConfigError for more parts than layers, and for a cost that is negative or no number.
    """
    _check_counts(len(costs), parts)
    own = [before] * parts if isinstance(before, int | float) else list(before)
    if len(own) != parts:
        raise ConfigError(
            f"before has {len(own)} numbers for {parts} stages", remedy=f"Give {parts} numbers, or one for all stages"
        )
    _check_costs("costs", costs)
    _check_costs("before", own)
    # exact sums: rounding must not decide which of two cuts is the better one
    units, own_units = _as_integers(costs, own)
    sums = [0, *accumulate(units)]
    peak = _best(sums, own_units, math.inf, 0, lambda cost, count, after: max(cost, after))
    _, counts = _best(sums, own_units, peak, (0, ()), lambda _, count, after: (after[0] + count**2, (count, *after[1])))
    return [0, *accumulate(counts)]


def partition_uniform(layers: int, parts: int) -> list[int]:
    """The bounds for layers of one cost; where they do not divide, stages in the middle hold one more.

    The first stage holds the embedding as well and the last the head, so these two come last in getting one more, and
    the last, which computes the loss, after the first. Among the others the later ones come first: earlier stages hold
    more micro-batches at a time.

    >>> partition_uniform(12, 4)
    [0, 3, 6, 9, 12]
    >>> partition_uniform(14, 4)
    [0, 3, 7, 11, 14]

    Raises ConfigError for more parts than layers.
    """
    _check_counts(layers, parts)
    each, extra = divmod(layers, parts)
    order = [*range(parts - 2, 0, -1), 0, parts - 1]
    counts = [each] * parts
    for stage in order[:extra]:
        counts[stage] += 1
    return [0, *accumulate(counts)]


def partition_explicit(asked: Sequence[int], layers: int, parts: int) -> list[int]:
    """The bounds for counts of layers that the user gives, one a stage.

    >>> partition_explicit([3, 4, 4, 1], 12, 4)
    [0, 3, 7, 11, 12]

    Raises ConfigError when they are not one count a stage, of at least one layer, that sum to all layers.
    """
    shown = f"layers per stage {list(asked)}"
    _check_counts(layers, parts)
    example = [b - a for a, b in zip(partition_uniform(layers, parts), partition_uniform(layers, parts)[1:])]
    remedy = f"Give {parts} counts that sum to {layers}, as {example}"
    if len(asked) != parts:
        names = "names 1 stage" if len(asked) == 1 else f"names {len(asked)} stages"
        raise ConfigError(f"{shown} {names} of {parts}", rule="There is one count a stage", remedy=remedy)
    for stage, count in enumerate(asked):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(
                f"{shown} gives stage {stage} {count!r} layers",
                rule="A stage holds a whole number of layers, at least one",
                remedy=remedy,
            )
    total = sum(asked)
    if total != layers:
        wrong = f"skips {_range_of(total, layers)}" if total < layers else f"names {total} of {layers} layers"
        raise ConfigError(f"{shown} {wrong}", rule="Every layer is in exactly one stage", remedy=remedy)
    return [0, *accumulate(asked)]


def _range_of(start: int, end: int) -> str:
    """``layer 11``, ``layers 10 and 11`` or ``layers 9 to 11``, of the layers from ``start`` up to ``end``."""
    if end - start == 1:
        return f"layer {start}"
    return f"layers {start} {'and' if end - start == 2 else 'to'} {end - 1}"


def _check_counts(layers: int, parts: int) -> None:
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise ConfigError(
            f"{parts!r} pipeline stages",
            rule="Layers are cut into a whole number of stages, at least one",
            remedy=f"Use 1 to {layers} stages" if layers > 1 else "Use 1 stage",
        )
    if parts > layers:
        which = f"1 to {layers} stages" if layers > 1 else "1 stage"
        raise ConfigError(
            f"{parts} pipeline stages for {layers} layer{'s' if layers != 1 else ''}",
            remedy=f"Use {which}, or a model of {parts} layers or more" if layers else "Use a model that has layers",
        )


def _check_costs(name: str, costs: Sequence[float]) -> None:
    for i, cost in enumerate(costs):
        if not math.isfinite(cost) or cost < 0:
            raise ConfigError(
                f"{name}[{i}]={cost}",
                rule="A cost is a finite number that is not negative",
                remedy="Give a time, a number of operations or of parameters, or equal costs where none is known",
            )


def _as_integers(*groups: Sequence[float]) -> list[list[int]]:
    """All numbers in units of one size in which each of them is whole: a float is a whole number over a power of 2."""
    ratios = [[float(x).as_integer_ratio() for x in group] for group in groups]
    unit = max((d for group in ratios for _, d in group), default=1)
    return [[n * (unit // d) for n, d in group] for group in ratios]


def _best(
    sums: Sequence[int], own: Sequence[int], limit: float, end: Any, value: Callable[[int, int, Any], Any]
) -> Any:
    """The least value of a cut none of whose stages costs more than ``limit``.

    Args:
        end: the value of a cut of nothing.
        value: (cost of a stage, its layers, the value of the cut of the layers behind it) -> that with the stage.
    """
    layers = len(sums) - 1
    # rest[i]: of the best cut of the layers from i on into the stages from here on
    rest: list[Any] = [None] * layers + [end]
    for own_cost in reversed(own):
        rest = [
            min(
                (
                    value(cost, j - i, rest[j])
                    for j in range(i + 1, layers + 1)
                    if rest[j] is not None and (cost := own_cost + sums[j] - sums[i]) <= limit
                ),
                default=None,
            )
            for i in range(layers + 1)
        ]
    assert rest[0] is not None  # there are as many layers as stages, and the limit is that of a cut
    return rest[0]
