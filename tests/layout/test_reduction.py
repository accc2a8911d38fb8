"""Axes over which a gradient is summed, by parameter layout and model region."""

from __future__ import annotations

import pytest

from shardformer.layout.activation_layout import ActivationLayout, ActivationShard, Dim, ModelRegion, ShardedFrom
from shardformer.layout.shard_spec import ShardSpec, Split
from shardformer.layout.sharding_metadata import get_gradient_reduction

SIZES = {"data": 2, "sequence": 2, "tensor": 2, "pipe": 1}
CONTEXT = ActivationShard(Dim.SEQUENCE, "sequence", begin=ShardedFrom.INPUTS)
SEQUENCE = ActivationShard(Dim.SEQUENCE, "tensor")
FULL = ShardSpec((4,))


def over(axis: str) -> ShardSpec:
    return ShardSpec((4,), {0: Split.even(4, 2).with_axis(axis)})


@pytest.mark.parametrize(
    ("spec", "cuts", "region", "axes", "divisor"),
    [
        (FULL, (), ModelRegion.OUTSIDE, ("data",), 2),
        (FULL, (), ModelRegion.BLOCK, ("data", "tensor"), 2),
        (over("tensor"), (), ModelRegion.BLOCK, ("data",), 2),
        (over("data"), (), ModelRegion.OUTSIDE, ("data",), 2),
        (over("data"), (), ModelRegion.BLOCK, ("data", "tensor"), 2),
        (FULL, (SEQUENCE,), ModelRegion.STACK, ("data", "tensor"), 2),
        (over("tensor"), (SEQUENCE,), ModelRegion.STACK, ("data",), 2),
        (FULL, (SEQUENCE,), ModelRegion.OUTSIDE, ("data",), 2),
        (FULL, (CONTEXT,), ModelRegion.OUTSIDE, ("data", "sequence"), 4),
        (over("tensor"), (CONTEXT,), ModelRegion.BLOCK, ("data", "sequence"), 4),
        (over("sequence"), (CONTEXT,), ModelRegion.OUTSIDE, ("data", "sequence"), 4),
        (ShardSpec((4,), {0: Split((((0, 3),), ((1, 4),)))}), (), ModelRegion.BLOCK, ("data", "tensor"), 2),
    ],
)
def test_a_gradient_is_summed_over_ranks_with_partial_gradients(
    spec: ShardSpec, cuts: tuple[ActivationShard, ...], region: ModelRegion, axes: tuple[str, ...], divisor: float
) -> None:
    """This includes an axis that shards the parameter if each of its ranks has different samples."""
    found = get_gradient_reduction(spec, ActivationLayout(cuts), region, SIZES)
    assert (found.sum_over, found.divisor) == (axes, divisor)
