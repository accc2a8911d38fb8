"""Partitions a sequence of layers into contiguous pipeline stages, each with at least one layer.

A partition of ``n`` layers into ``p`` stages is a list of ``p + 1`` bounds: stage ``i`` runs layers ``bounds[i]`` to
``bounds[i + 1] - 1``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from shardformer.errors import ConfigError, check_argument, check_choice

PARTITION_METHODS = ("balanced", "uniform")
"""Names of the partition methods. A partition is one of these, or a list with a number of layers per virtual stage."""
RENAMED_METHODS = {"cost": "balanced", "even": "uniform"}


def check_partition(partition: Any, layer_costs: Any = None, recompute_layers: Any = None) -> None:
    """Raise ConfigError if ``partition``, ``layer_costs`` or ``recompute_layers`` is invalid."""
    rule = "partition must be 'balanced', 'uniform' or a sequence of layer counts, one per virtual stage"
    if isinstance(partition, str):
        check_choice("partition", partition, PARTITION_METHODS, rule)
    check_argument("partition", partition, isinstance(partition, Sequence), rule, "Set partition='uniform'")
    are_costs = isinstance(layer_costs, Sequence) and all(
        isinstance(cost, int | float) and 0 <= cost < math.inf for cost in layer_costs
    )
    rule, remedy = "layer_costs must contain one number per layer", "Omit layer_costs to estimate the costs"
    check_argument("layer_costs", layer_costs, layer_costs is None or are_costs, rule, remedy)
    if layer_costs is not None and partition != "balanced":
        raise ConfigError(
            f"layer_costs has no effect with partition={partition!r}.",
            remedy="Omit layer_costs, or use partition='balanced'.",
        )
    are_counts = isinstance(recompute_layers, Sequence) and not isinstance(recompute_layers, str)
    is_right = recompute_layers is None or are_counts or type(recompute_layers) is int
    rule, remedy = "recompute_layers must be an int or one int per virtual stage", "Set recompute_layers=4"
    check_argument("recompute_layers", recompute_layers, is_right, rule, remedy)


def partition_balanced(layer_costs: Sequence[float], num_stages: int) -> list[int]:
    """Partition layers into pipeline stages so that the most expensive stage is as cheap as possible.

    Among equal partitions, this prefers even layer counts (the smallest sum of squares), then fewer layers in earlier
    stages, which keep more micro-batches in flight.

    >>> partition_balanced([1, 1, 1, 1, 4], 2)
    [0, 4, 5]
    >>> partition_balanced([1, 1, 1, 1, 1], 2)
    [0, 2, 5]

    Args:
        layer_costs: cost of each layer. The first includes the embedding, and the last the head.

    Raises ConfigError if there are more stages than layers, or a cost is invalid.
    """
    _check_num_stages(len(layer_costs), num_stages)
    _check_layer_costs(layer_costs)
    sums = [0, *accumulate(_scale_to_integers(layer_costs))]  # rounding must not decide between two partitions
    peak = _find_best_partition_value(sums, num_stages, math.inf, 0, lambda cost, count, after: max(cost, after))
    _, counts = _find_best_partition_value(
        sums, num_stages, peak, (0, ()), lambda _, count, after: (after[0] + count**2, (count, *after[1]))
    )
    return [0, *accumulate(counts)]


def partition_uniform(num_layers: int, num_stages: int) -> list[int]:
    """Partition layers into pipeline stages whose layer counts are as equal as possible.

    Extra layers, if the number is not divisible, go to the middle stages: to later ones first, because earlier stages
    keep more micro-batches in flight. The next ones go to the first stage, which also computes the embedding, and then
    to the last, which also computes the head and the loss.

    >>> partition_uniform(12, 4)
    [0, 3, 6, 9, 12]
    >>> partition_uniform(14, 4)
    [0, 3, 7, 11, 14]

    Raises ConfigError if there are more stages than layers.
    """
    _check_num_stages(num_layers, num_stages)
    each, extra = divmod(num_layers, num_stages)
    order = [*range(num_stages - 2, 0, -1), 0, num_stages - 1]
    counts = [each] * num_stages
    for stage in order[:extra]:
        counts[stage] += 1
    return [0, *accumulate(counts)]


def partition_explicit(layer_counts: Sequence[int], num_layers: int, num_stages: int) -> list[int]:
    """Convert user-specified layer counts per pipeline stage to stage boundaries.

    >>> partition_explicit([3, 4, 4, 1], 12, 4)
    [0, 3, 7, 11, 12]

    Raises ConfigError unless there is one positive count per stage and the counts sum to the number of layers.
    """
    layer_counts = list(layer_counts)
    _check_num_stages(num_layers, num_stages)
    example = [
        b - a for a, b in zip(partition_uniform(num_layers, num_stages), partition_uniform(num_layers, num_stages)[1:])
    ]
    if len(layer_counts) != num_stages:
        raise ConfigError(
            f"partition={layer_counts} must have one layer count for each of the {num_stages} virtual pipeline stages, "
            f"but has {len(layer_counts)}.",
            remedy=f"Pass {num_stages} layer counts that sum to {num_layers}, such as {example}.",
        )
    for stage, count in enumerate(layer_counts):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(
                f"partition={layer_counts} assigns {count!r} layers to stage {stage}, but each stage must have at "
                "least one layer.",
                remedy=f"Pass {num_stages} layer counts that sum to {num_layers}, such as {example}.",
            )
    total = sum(layer_counts)
    if total != num_layers:
        raise ConfigError(
            f"partition={layer_counts} assigns {total} layers, but the model has {num_layers}.",
            remedy=f"Pass {num_stages} layer counts that sum to {num_layers}, such as {example}.",
        )
    return [0, *accumulate(layer_counts)]


def _check_num_stages(num_layers: int, num_stages: int) -> None:
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
        raise ConfigError(
            f"The number of pipeline stages must be a positive integer, but got {num_stages!r}.",
            remedy="Use at least one stage, and at most one for each layer.",
        )
    if num_stages > num_layers:
        raise ConfigError(
            f"{num_stages} pipeline stages need at least one layer each, but the number of layers is {num_layers}.",
            remedy=f"Use fewer stages, or a model with at least {num_stages} layers.",
        )


def _check_layer_costs(layer_costs: Sequence[float]) -> None:
    for i, cost in enumerate(layer_costs):
        if not math.isfinite(cost) or cost < 0:
            raise ConfigError(
                f"layer_costs[{i}] must be finite and not negative, but got {cost}.",
                remedy="Pass the time, FLOPs or parameter count of each layer, or the same cost for all layers.",
            )


def _scale_to_integers(costs: Sequence[float]) -> list[int]:
    """Multiply all numbers by the same power of two to convert them to ints without rounding."""
    ratios = [float(x).as_integer_ratio() for x in costs]
    unit = max((d for _, d in ratios), default=1)
    return [n * (unit // d) for n, d in ratios]


def _find_best_partition_value(
    cost_prefix_sums: Sequence[int],
    num_stages: int,
    max_stage_cost: float,
    empty_partition_value: Any,
    add_stage_fn: Callable[[int, int, Any], Any],
) -> Any:
    """Find the minimum value over all partitions in which every stage costs at most ``max_stage_cost``.

    Args:
        empty_partition_value: value of the empty partition.
        add_stage_fn: computes the value of a partition from (cost of a stage, its layer count, value of the later
            stages).
    """
    layers = len(cost_prefix_sums) - 1
    # best_from[i]: value of the best partition of layers i and later into this stage and later ones
    best_from: list[Any] = [None] * layers + [empty_partition_value]
    for _ in range(num_stages):
        best_from = [
            min(
                (
                    add_stage_fn(cost, j - i, best_from[j])
                    for j in range(i + 1, layers + 1)
                    if best_from[j] is not None
                    and (cost := cost_prefix_sums[j] - cost_prefix_sums[i]) <= max_stage_cost
                ),
                default=None,
            )
            for i in range(layers + 1)
        ]
    assert best_from[0] is not None  # there are enough layers, and ``max_stage_cost`` is reachable
    return best_from[0]
