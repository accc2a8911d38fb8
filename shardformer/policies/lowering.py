"""From a role to the description of modules that carries it out, for one layer of a model."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from torch import Tensor, nn

from shardformer.errors import ConfigError, PolicyError, nearest
from shardformer.layers.tensor.modes import MODES, ParallelLayers
from shardformer.layout.split import Split
from shardformer.mesh.axis import Axis
from shardformer.policies.describe import (
    BlockDescription,
    ModulePolicyDescription,
    SubModuleReplacementDescription,
    merged,
)
from shardformer.policies.paths import (
    existing,
    features_of,
    find,
    is_there,
    join,
    linear_at,
    matching,
    module_at,
    no_match,
    relative,
    several,
)
from shardformer.policies.roles import MLP, Experts, Role, Stack, exit_of

Replacement = SubModuleReplacementDescription
ALIGNED = 8
"""Each rank holds a multiple of so many features of an expert, where the whole expert does: torch's grouped matrix
products take rows of a multiple of 16 bytes, in 16 bits too."""
Columns = Mapping[str, dict[str, Any]]
"""Paths of linears, and the arguments of what takes their place."""


@dataclass
class LayerLowering:
    """Describes how the blocks of one layer are cut.

    Args:
        layer: the layer.
        path: path of the layers, for messages.
        axis: the tensor axis.
        is_stage: whether the layers are one stage of several, of which the first may have few heads.
        classes: the parallel layers of the mode.
    """

    layer: nn.Module
    path: str
    axis: Axis
    is_stage: bool = False
    classes: ParallelLayers = MODES["1d"]

    def has(self, role: Role) -> bool:
        """Whether the layer has what the role describes. Raises PolicyError where it has not and should.

        A layer that has the module, but not its exit, has another one in the place of an optional one
        (``check_exits`` sees to it that not all have).
        """
        names = [name for name, _ in self.layer.named_modules()]
        has = bool(matching(role.at, names)) if "*" in role.at else find(self.layer, role.at) is not None
        if has and role.optional and (out := exit_of(role)) is not None:
            has = find(self.layer, out) is not None
        if not has and not role.optional:
            raise no_match(self.path, role.at, self.layer)
        return has

    def mlps(self, mlp: MLP) -> ModulePolicyDescription:
        """One MLP, or each of those that a ``*`` stands for."""
        if "*" not in mlp.at:
            return self.mlp(mlp)
        found = matching(mlp.at, [name for name, _ in self.layer.named_modules()])
        return merged([self.mlp(replace(mlp, at=at)) for at in found])

    def mlp(self, mlp: MLP) -> ModulePolicyDescription:
        ups = existing(several(mlp.up), mlp.at, self.layer, self.path)
        down = relative(mlp.at, mlp.down)
        width = self.features(down, out=False)
        fused = mlp.fused or max(self.features(ups[0], out=True) // width, 1)
        for up in ups:
            features = self.features(up, out=True)
            if features != fused * width:
                raise PolicyError(
                    f"{self.path}.{up} has {features} output features, {self.path}.{down} has {width} input features",
                    rule="What the first linears of an MLP give, the last one takes",
                    remedy="Correct the paths, or give fused=2 where a gate and what it gates lie behind each other",
                )
        self._check_width(width, ups[0])
        split, row = Split.fused([width] * fused, self.axis.size), Split.even(width, self.axis.size)
        description, block = self.block(mlp.at, {up: {"split": split} for up in ups}, down, row)
        norms = [] if mlp.norm is None else [relative(mlp.at, mlp.norm)]
        norms = [norm.rstrip("?") for norm in norms if is_there(self.layer, norm, self.path)]
        norms = [norm for norm in norms if not isinstance(find(self.layer, norm), nn.Identity)]
        subs = description.sub_module_replacement or []
        subs += [Replacement(norm, self.classes.norm, {"split": row}) for norm in norms]
        block.activated = fused == 1 and not norms
        block.exits_with = mlp.exits_with
        return description

    def experts(self, experts: Experts) -> ModulePolicyDescription:
        module = module_at(self.layer, experts.at)
        ups = several(experts.up)
        shapes = {name: tuple(self._stacked(module, experts, name).shape) for name in (*ups, experts.down)}
        dims = self._expert_dims(experts, shapes)
        width = shapes[experts.down][dims[experts.down]]
        self._check_width(width, f"{experts.at}.{ups[0]}")
        unit = math.gcd(width, ALIGNED)
        is_aligned = width // unit >= self.axis.size
        unit = unit if is_aligned else 1
        up_split = Split.fused([width] * experts.fused, self.axis.size, unit)
        if experts.interleaved:
            up_split = Split.even(experts.fused * width, self.axis.size, experts.fused * unit)
        splits = dict.fromkeys(ups, up_split) | {experts.down: Split.even(width, self.axis.size, unit)}
        parameters = {join(experts.at, name): {dims[name]: split} for name, split in splits.items()}
        block = BlockDescription(experts.at, [], experts.at, summands=experts.summands)
        attributes = {} if is_aligned else _computed_one_by_one(module, experts.at)
        return ModulePolicyDescription(attribute_replacement=attributes, blocks=[block], parameters=parameters)

    def _expert_dims(self, experts: Experts, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, int]:
        """Which dim of each parameter is cut. Raises PolicyError where none fits, or several do and none is said."""
        ways = [way for way in expert_dims(shapes, experts.down, experts.fused) if way.keys() == shapes.keys()]
        if experts.dims or experts.fused == 1:
            said = dict(experts.dims) or {experts.down: 2}
            ways = [way for way in ways if way | said == way]
        if len(ways) != 1:
            found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise PolicyError(
                f"{self.path}.{experts.at} has {found}: {'several dims' if ways else 'none'} could be cut",
                rule=f"For each expert the first holds H x {experts.fused} W numbers and the second W x H; where sizes "
                "are equal, they do not tell which dim is W",
                remedy=f"Say it: dims={ways[0]}, if the forward has it so"
                if ways
                else "Correct names, `fused`, `dims`",
            )
        return ways[0]

    def block(
        self, entry: str, entering: Columns, row: str, row_split: Split, others: Columns | None = None
    ) -> tuple[ModulePolicyDescription, BlockDescription]:
        """The replacements of a block's linears, and the block, which stands in the description too."""
        others = others or {}
        subs = [Replacement(name, self.classes.column, dict(kwargs)) for name, kwargs in {**entering, **others}.items()]
        subs.append(Replacement(row, self.classes.row, {"split": row_split}))
        block = BlockDescription(entry, list(entering), row, list(others))
        return ModulePolicyDescription(sub_module_replacement=subs, blocks=[block]), block

    def features(self, name: str, *, out: bool) -> int:
        return features_of(linear_at(self.layer, name, self.path), out=out)

    def _check_width(self, width: int, up: str) -> None:
        if width < self.axis.size:
            raise ConfigError(
                f"A tensor size of {self.axis.size} is more than the {width} features of {self.path}.{up}",
                rule="Every tensor rank computes at least one of them",
                remedy=f"Use a tensor size of {width} or less",
            )

    def _stacked(self, module: nn.Module, experts: Experts, name: str) -> Tensor:
        full = getattr(module, name, None)
        if not isinstance(full, nn.Parameter) or full.dim() not in (2, 3):
            raise PolicyError(
                f"{self.path}.{experts.at}.{name} is no parameter of stacked experts",
                rule="It has the dims experts, and then width and hidden in any order; a bias has experts and width",
                remedy="Name the parameters of the module; experts that are modules are an MLP with a * in its path",
            )
        return full


def _computed_one_by_one(module: nn.Module, at: str) -> dict[str, Any]:
    """What makes transformers compute each expert by a product of its own, which takes parts of any size."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "_experts_implementation"):
        return {}
    config = copy.deepcopy(config)
    config._experts_implementation = "eager"
    return {join(at, "config"): config}


def check_exits(stack: Stack, path: str, layers: Sequence[nn.Module]) -> None:
    """Refuses an optional role whose module is there and whose exit no layer has: it would never be carried out."""
    for role in stack.blocks:
        out = exit_of(role) if role.optional else None
        there = [layer for layer in layers if find(layer, role.at) is not None]
        if out is not None and there and all(find(layer, out) is None for layer in there):
            raise PolicyError(
                f"{len(there)} layers have {join(path, '*', role.at)!r}, and none has {join(path, '*', out)!r}",
                rule="An optional role is passed over where another module stands in its place, but not in every layer",
                remedy=nearest(out, [name for name, _ in there[0].named_modules() if name])
                + " Correct the path, or leave the role out",
            )


def expert_dims(shapes: Mapping[str, Sequence[int]], down: str, fused: int) -> list[dict[str, int]]:
    """Each way in which the parameters of stacked experts fit together: which dim holds an expert's features.

    Of these ``down`` has one set, and the others ``fused`` times as many; biases without them are left out. Where they
    are as many as the hidden features, several ways fit.
    """
    ways = []
    for at in (2, 1):
        width, hidden = shapes[down][at], shapes[down][3 - at]
        of = {
            name: [d for d in range(1, len(s)) if s[d] == fused * width and (len(s) == 2 or s[3 - d] == hidden)]
            for name, s in shapes.items()
        } | {down: [at]}
        of = {name: dims for name, dims in of.items() if dims or len(shapes[name]) == 3}
        ways += [dict(zip(of, dims, strict=True)) for dims in product(*of.values())]
    return ways
