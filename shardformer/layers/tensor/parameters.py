"""Parameters and buffers that a module holds itself, cut where they stand: the module stays what it is.

A bias of q alone, a table with one column a head, a scale a head: what the module's own forward reads by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from shardformer.layout.spec import ShardSpec
from shardformer.layout.split import Split
from shardformer.mesh.axis import Axis


def shard_parameter(
    module: nn.Module,
    name: str,
    splits: Mapping[int, Split],
    axis: Axis,
    shared: dict[int, nn.Parameter] | None = None,
) -> Tensor:
    """Puts this rank's part in the place of the parameter or buffer ``name``. Returns the full one.

    The layout of a parameter stands beside it, as in a ``ParallelModule``, in ``module.shard_specs``, and the axis in
    ``module.shard_axis``. Communicates nothing; a parameter that is cut has this rank's part of the gradient.

    Args:
        splits: dim -> how it is cut.
        shared: parts already cut, by the identity of the full parameter, so tied ones stay tied.

    Raises ConfigError when a split is not of its dim's length.
    """
    full: Tensor = getattr(module, name)
    spec = ShardSpec(full.shape, {dim: split.over(axis.name) for dim, split in splits.items()})
    coords = {axis.name: axis.rank}
    if name in module._buffers:
        module._buffers[name] = spec.slice(full, coords)
        return full
    shared = {} if shared is None else shared
    if id(full) not in shared:
        shared[id(full)] = nn.Parameter(spec.slice(full, coords), requires_grad=full.requires_grad)
    module.register_parameter(name, shared[id(full)])
    module.__dict__.setdefault("shard_specs", {})[name] = spec
    module.__dict__["shard_axis"] = axis
    return full
