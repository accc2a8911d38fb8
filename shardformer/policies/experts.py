"""Shard mixture-of-experts modules that stack the weights of all experts in one parameter.

Every expert is sharded over its features. The slice of each rank is a multiple of 8 features if the width allows it.
Otherwise the experts are computed one by one, with slices of any size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from torch import Tensor, nn

from shardformer import module_paths as paths
from shardformer.errors import PolicyError
from shardformer.layout.shard_spec import Split
from shardformer.mesh.parallel_context import Axis
from shardformer.policies.convert_roles import check_enough_features_to_shard
from shardformer.policies.module_descriptions import (
    BlockDescription,
    ModulePolicyDescription,
)
from shardformer.policies.roles import (
    Experts,
)

ALIGNED = 8
"""Preferred multiple of features per rank and expert. torch's grouped matmuls need rows of a multiple of 16 bytes."""


def describe_expert_sharding(
    experts: Experts, layer: nn.Module, layer_path: str, axis: Axis
) -> ModulePolicyDescription:
    """Describe how to shard the stacked weights of a mixture of experts.

    Args:
        layer: the layer that contains the experts.
        layer_path: path of the layers, for error messages.
    """
    module = paths.get_submodule_or_raise(layer, experts.at)
    at, ups = f"{layer_path}.{experts.at}", paths.as_path_list(experts.up)
    shapes = {name: tuple(_get_stacked_expert_param(module, at, name).shape) for name in (*ups, experts.down)}
    dims = _choose_expert_shard_dims(experts, shapes, at)
    width = shapes[experts.down][dims[experts.down]]
    check_enough_features_to_shard(width, axis, f"{at}.{ups[0]}")
    unit = math.gcd(width, ALIGNED)
    is_aligned = width // unit >= axis.size
    unit = unit if is_aligned else 1
    up_split = Split.fused([width] * experts.fused, axis.size, unit)
    if experts.interleaved:
        up_split = Split.even(experts.fused * width, axis.size, experts.fused * unit)
    splits = dict.fromkeys(ups, up_split) | {experts.down: Split.even(width, axis.size, unit)}
    parameters = {paths.join_path(experts.at, name): {dims[name]: split} for name, split in splits.items()}
    block = BlockDescription(experts.at, [], experts.at, replicated_terms=experts.replicated_terms)
    attributes = {} if is_aligned else _get_eager_experts_config(module, experts.at)
    return ModulePolicyDescription(attribute_replacement=attributes, blocks=[block], parameters=parameters)


def _get_stacked_expert_param(module: nn.Module, module_path: str, param_name: str) -> Tensor:
    full = getattr(module, param_name, None)
    if not isinstance(full, nn.Parameter) or full.dim() not in (2, 3):
        raise PolicyError(
            f"{module_path}.{param_name} is not a parameter that stacks the weights (3 dimensions) or biases "
            "(2 dimensions) of all experts.",
            remedy="Correct the parameter name. If the experts are separate modules, describe them as an MLP with * in "
            "its path.",
        )
    return full


def _choose_expert_shard_dims(
    experts: Experts, param_shapes: Mapping[str, tuple[int, ...]], module_path: str
) -> Mapping[str, int]:
    """Choose the dimension along which each expert parameter is sharded.

    Raises PolicyError if no dim or several dims are possible.
    """
    ways = [
        way
        for way in list_expert_shard_dim_choices(param_shapes, experts.down, experts.fused)
        if way.keys() == param_shapes.keys()
    ]
    if experts.dims or experts.fused == 1:
        required = dict(experts.dims) or {experts.down: 2}
        ways = [way for way in ways if way | required == way]
    if len(ways) != 1:
        found = ", ".join(f"{name} {shape}" for name, shape in param_shapes.items())
        if ways:
            raise PolicyError(
                f"The dimensions to shard in the expert weights of {module_path} are ambiguous, because several "
                f"dimensions have the same size: {found}.",
                remedy=f"Set dims in the Experts of the policy, for example dims={ways[0]}.",
            )
        raise PolicyError(
            f"The parameters of {module_path} do not have the shapes of expert weights with fused={experts.fused}: "
            f"{found}.",
            remedy="Correct the parameter names, `fused` or `dims` in the policy.",
        )
    return ways[0]


def list_expert_shard_dim_choices(
    param_shapes: Mapping[str, Sequence[int]], down_param_name: str, num_fused: int
) -> list[dict[str, int]]:
    """List the dimensions along which each expert parameter may be sharded, as one dict per combination.

    ``down_param_name`` has the features once, the other parameters ``num_fused`` times. Biases without these features
    are omitted. There are several choices if the number of features equals the hidden size.
    """
    ways = []
    for at in (2, 1):
        width, hidden = param_shapes[down_param_name][at], param_shapes[down_param_name][3 - at]
        of = {
            name: [d for d in range(1, len(s)) if s[d] == num_fused * width and (len(s) == 2 or s[3 - d] == hidden)]
            for name, s in param_shapes.items()
        } | {down_param_name: [at]}
        of = {name: dims for name, dims in of.items() if dims or len(param_shapes[name]) == 3}
        ways += [dict(zip(of, dims, strict=True)) for dims in product(*of.values())]
    return ways


def _get_eager_experts_config(module: nn.Module, module_path: str) -> dict[str, Any]:
    """Return a config that selects transformers' eager experts, which support shards of any size."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "_experts_implementation"):
        return {}
    config = copy.deepcopy(config)
    config._experts_implementation = "eager"
    return {paths.join_path(module_path, "config"): config}
