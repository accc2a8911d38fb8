"""Whole parameters for optimizers that look at whole matrices: one rank gets all of a gradient, and of a parameter.

Of a parameter that is cut over tensor ranks the slices are brought together for it, over data x tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardformer.comm.collectives import gather_objects
from shardformer.errors import ConfigError
from shardformer.mesh.context import ParallelContext
from shardformer.reduce.bucket import Gradient


def give_to_owners(gradients: Sequence[Gradient], params: Collection[int], context: ParallelContext) -> None:
    """Lets one rank have all of each of these parameters, by identity. All processes call it, in one order.

    Communicates the names of the axes, where an optimizer of any rank asks for it, and the ranks' coordinates, and
    makes groups. Raises ConfigError for a cut parameter that several stages hold.
    """
    chosen = [gradient for gradient in gradients if id(gradient.param) in params]
    cut = {id(g): _axes_of(g, context) for g in chosen if g.entry.spec.is_sharded}
    wanted = set(cut.values())
    for axis in context.own_axes:
        wanted = {names for theirs in gather_objects(wanted, axis) for names in theirs}
    axes = {names: context.merged(*names) for names in sorted(wanted)}
    holders = {names: gather_objects(dict(context.coords), axis) for names, axis in axes.items()}
    for gradient in chosen:
        if gradient.entry.reduction.stages and id(gradient) in cut:
            raise ConfigError(
                f"{gradient.entry.name} is cut over tensor ranks and held by several stages",
                rule="An optimizer that looks at whole matrices gets a cut one from the ranks of one stage",
                remedy="Give it to an optimizer that changes each number by itself: AdamW for tables and heads",
            )
        names = cut.get(id(gradient))
        if names is None:
            gradient.bring_together(None)
        else:
            gradient.bring_together(axes[names], holders[names])


def _axes_of(gradient: Gradient, context: ParallelContext) -> tuple[str, ...]:
    names = {*gradient.entry.reduction.sum_over, *gradient.entry.spec.axes}
    return tuple(n for n, size in context.grid.sizes.items() if size > 1 and ({n} | context.finest([n])) & names)
