"""Reduction: how the ranks agree on the gradient of one parameter.

Three things that do not depend on each other: over which axes ranks hold summands of the gradient, what the sum is
divided by, and over which axes the squares of what ranks hold add up to the squared norm. Weights by tokens belong on
the loss, before backward: a gradient that mixes several ranks' tokens can no longer be weighted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardformer.layout.spec import ShardSpec
from shardformer.layout.stream import Place, StreamLayout


@dataclass(frozen=True)
class Reduction:
    """How the gradient of a parameter is agreed on.

    Args:
        sum_over: axes over whose ranks the gradients are summed.
        divisor: what the sum is divided by. A number, not the size of a group: one of size 1 may scale.
        norm_over: axes whose ranks hold different parts of the gradient, or of which one alone holds it.
        stages: the ranks of ``pipe`` that hold the parameter together, where there are several.
    """

    sum_over: tuple[str, ...] = ()
    divisor: float = 1.0
    norm_over: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()


def reduction_of(
    spec: ShardSpec,
    stream: StreamLayout,
    place: Place,
    sizes: Mapping[str, int],
    stages: tuple[int, ...] = (),
) -> Reduction:
    """The reduction of a parameter with this layout at this place of a model on a grid of these sizes.

    Over ``data``, and over what the model's inputs are cut over, each rank has the mean of its own samples: the sum is
    divided by their number. A parameter that sees a part of the heads, of the samples or of the sequence has a summand
    on each rank of an axis over which it is not cut itself, and so have the slices of a cut parameter that several
    ranks hold, and what several stages hold.
    """
    partial = tuple(axis for axis in stream.partial_over(place) if axis not in spec.axes)
    inputs = tuple(cut.axis for cut in stream.in_force(Place.OUTSIDE))
    over = [axis for axis in sizes if axis in {"data", *partial, *inputs, *spec.shared_axes} and sizes[axis] > 1]
    divisor = float(sizes.get("data", 1) * stream.num_parts(sizes))
    pipe = ("pipe",) if sizes.get("pipe", 1) > 1 else ()
    # on a grid the tensor axis is counted along its rows and columns, so that no rank is counted twice
    norm_over = [a for axis in spec.axes for a in (stream.block if axis == "tensor" else (axis,))]
    return Reduction(tuple(over), divisor, tuple(norm_over) + pipe, stages)
