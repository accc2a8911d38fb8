"""From a role to the description of modules that carries it out, for one layer of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from shardformer.errors import ConfigError, PolicyError, nearest
from shardformer.layers.tensor.modes import MODES, ParallelLayers
from shardformer.layout.split import Split
from shardformer.mesh.axis import Axis
from shardformer.policies.describe import BlockDescription, ModulePolicyDescription, SubModuleReplacementDescription
from shardformer.policies.heads import HeadLayout, unit_of
from shardformer.policies.parts import expert_dims, merged, parameter_splits, without_lacking
from shardformer.policies.paths import (
    existing,
    features_of,
    find,
    join,
    linear_at,
    matching,
    module_at,
    no_match,
    relative,
)
from shardformer.policies.roles import MLP, Attention, Experts, Role, Stack, exit_of

Replacement = SubModuleReplacementDescription


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
        ups = existing([mlp.up] if isinstance(mlp.up, str) else mlp.up, mlp.at, self.layer, self.path)
        down = relative(mlp.at, mlp.down)
        width = self._features(down, out=False)
        fused = mlp.fused or max(self._features(ups[0], out=True) // width, 1)
        for up in ups:
            features = self._features(up, out=True)
            if features != fused * width:
                raise PolicyError(
                    f"{self.path}.{up} has {features} output features, {self.path}.{down} has {width} input features",
                    rule="What the first linears of an MLP give, the last one takes",
                    remedy="Correct the paths, or give fused=2 where a gate and what it gates lie behind each other",
                )
        self._check_width(width, ups[0])
        split, row = Split.fused([width] * fused, self.axis.size), Split.even(width, self.axis.size)
        description = self._block(mlp.at, {up: {"split": split} for up in ups}, {}, down, row)
        norms = {mlp.norm: {"split": row}} if mlp.norm is not None else {}
        description = self._with_norms(description, mlp.at, norms)
        has_norm = any(sub.target_module is self.classes.norm for sub in description.sub_module_replacement or [])
        for block in description.blocks or []:
            block.activated = fused == 1 and not has_norm
            block.exits_with = mlp.exits_with
        return description

    def experts(self, experts: Experts) -> ModulePolicyDescription:
        module = module_at(self.layer, experts.at)
        ups = [experts.up] if isinstance(experts.up, str) else list(experts.up)
        shapes = {name: tuple(self._stacked(module, experts, name).shape) for name in (*ups, experts.down)}
        dims = self._expert_dims(experts, shapes)
        width = shapes[experts.down][dims[experts.down]]
        self._check_width(width, f"{experts.at}.{ups[0]}")
        up_split = Split.fused([width] * experts.fused, self.axis.size)
        if experts.interleaved:
            up_split = Split.even(experts.fused * width, self.axis.size, experts.fused)
        splits = dict.fromkeys(ups, up_split) | {experts.down: Split.even(width, self.axis.size)}
        parameters = {join(experts.at, name): {dims[name]: split} for name, split in splits.items()}
        block = BlockDescription(experts.at, [], experts.at, is_whole_module=True, summands=experts.summands)
        return ModulePolicyDescription(blocks=[block], parameters=parameters)

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

    def attention(self, attention: Attention, layout: HeadLayout) -> ModulePolicyDescription:
        attention = without_lacking(attention, self.layer)
        columns = self._projections(attention, layout)
        context = {relative(attention.at, n) for n in (attention.k, attention.v, attention.kv) if n}
        is_apart = attention.reads_context or attention.inputs
        apart = {relative(attention.at, n) for n in attention.reads_inner} | (context if is_apart else set())
        entering = {name: kwargs for name, kwargs in columns.items() if name not in apart}
        others = {name: kwargs for name, kwargs in columns.items() if name in apart}
        entry = attention.at if attention.entry is None else relative(attention.at, attention.entry)
        out = relative(attention.at, attention.out)
        description = self._block(entry, entering, others, out, layout.query_split())
        description.parameters = parameter_splits(attention, self.layer, layout)
        rank = self.axis.rank
        values = layout.values(rank)
        for block in description.blocks or []:
            block.width = values["width"] if attention.width_of_input else None
            bounds = (layout.partition.num_heads, layout.query_bounds[rank], layout.query_bounds[rank + 1])
            block.gathers_around = attention.at if attention.whole_sequence else None
            block.inputs = [(attention.at, name) for name in attention.inputs]
            block.arguments = {name: (attention.at, dim, bounds) for name, dim in attention.arguments.items()}
        description.attribute_replacement = {
            relative(attention.at, name): values[kind] for name, kind in attention.attributes.items()
        }
        description.sub_module_replacement = [
            *(description.sub_module_replacement or []),
            *(
                Replacement(
                    relative(attention.at, table.rstrip("?")),
                    self.classes.table,
                    {"split": layout.query_split(1), "gather_output": False},
                    ignore_if_not_exist=table.endswith("?"),
                )
                for table in attention.tables
            ),
        ]
        return self._with_norms(description, attention.at, self._attention_norms(attention, layout, columns))

    def _projections(self, attention: Attention, layout: HeadLayout) -> dict[str, dict[str, Any]]:
        def unit(name: str, count: int) -> int:
            return unit_of(self.path, name, self._features(relative(attention.at, name), out=True), count)

        heads, kv_heads, expand = layout.num_heads, layout.num_kv_heads, layout.expand(self.axis.rank)
        columns: dict[str, dict[str, Any]] = {}
        for name in (attention.q, *attention.gates):
            if name:
                columns[relative(attention.at, name)] = {"split": layout.query_split(unit(name, heads))}
        for name in (attention.k, attention.v):
            if name:
                width = unit(name, kv_heads)
                column = columns[relative(attention.at, name)] = {"split": layout.kv_split(width)}
                if expand is not None:
                    column["expand"] = (width, expand)
        for name in (attention.qkv, attention.kv):
            if name:
                columns[relative(attention.at, name)] = {"split": self._fused(attention, layout, name)}
        self._check_units(attention, layout, unit)
        return columns

    def _check_units(self, attention: Attention, layout: HeadLayout, unit: Any) -> None:
        q, k, v = attention.q, attention.k, attention.v
        pairs: list[tuple[str | None, int, int]] = []
        if q and not attention.reads_inner:
            pairs.append((q, layout.num_heads, layout.head_dim))
        if q and k:
            pairs.append((k, layout.num_kv_heads, unit(q, layout.num_heads)))
        pairs.append((v, layout.num_kv_heads, layout.head_dim))
        for name, count, expected in pairs:
            if name and unit(name, count) != expected:
                features = count * unit(name, count)
                raise PolicyError(
                    f"{self.path}.{relative(attention.at, name)} has {features} features, which are not {count} heads "
                    f"of {expected} features",
                    rule="All heads of an attention are of one size, in q, k, v and the output projection",
                    remedy="Correct num_heads, num_kv_heads or the paths in the policy",
                )

    def _fused(self, attention: Attention, layout: HeadLayout, name: str) -> Split:
        heads, kv_heads, d = layout.num_heads, layout.num_kv_heads, layout.head_dim
        features = self._features(relative(attention.at, name), out=True)
        sizes = [heads * d] * (name == attention.qkv) + [kv_heads * d] * 2
        if features != sum(sizes) and not (attention.interleaved and name in attention.reads_inner):
            raise PolicyError(
                f"{self.path}.{relative(attention.at, name)} has {features} features, which are not "
                f"{' + '.join(map(str, sizes))}",
                rule=f"A fused projection of {heads} heads on {kv_heads} KV heads, each of {d} features, has these",
                remedy="Correct num_heads, num_kv_heads or the paths in the policy",
            )
        if any(layout.expand(r) for r in range(layout.ranks)):
            raise ConfigError(
                f"A tensor size of {layout.ranks} cuts the {kv_heads} KV heads of {self.path}.{attention.at} unevenly",
                rule="In a fused projection every rank's query heads read a whole number of KV heads each",
                remedy=f"Use a tensor size that divides {kv_heads} or {heads}",
            )
        if attention.interleaved:
            unit_of(self.path, name, features, kv_heads)
            return layout.grouped_split(name == attention.qkv, features)
        part = layout.partition
        splits = [part.query_split(), part.kv_split(), part.kv_split()][-len(sizes) :] * layout.partitions
        return Split.stack(splits, [size // layout.partitions for size in sizes] * layout.partitions)

    def _attention_norms(
        self, attention: Attention, layout: HeadLayout, columns: Mapping[str, dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        kv = next((columns[relative(attention.at, n)] for n in (attention.k, attention.v) if n), None)
        q = {"split": layout.query_split()}
        return {name: q if kind == "heads" else (kv or q) for name, kind in attention.norms.items()}

    def _with_norms(
        self, description: ModulePolicyDescription, at: str, norms: Mapping[str, dict[str, Any]]
    ) -> ModulePolicyDescription:
        """With the norms that the block has among those that its role names."""
        for name, kwargs in norms.items():
            path = relative(at, name.rstrip("?"))
            module = find(self.layer, path)
            if module is None and not name.endswith("?"):
                raise no_match(self.path, path, self.layer)
            if module is not None and not isinstance(module, nn.Identity):
                description.sub_module_replacement = [
                    *(description.sub_module_replacement or []), Replacement(path, self.classes.norm, dict(kwargs))
                ]  # fmt: skip
        return description

    def _block(
        self,
        at: str,
        entering: Mapping[str, dict[str, Any]],
        others: Mapping[str, dict[str, Any]],
        row: str,
        row_split: Split,
    ) -> ModulePolicyDescription:
        columns = {**entering, **others}
        subs = [Replacement(name, self.classes.column, dict(kwargs)) for name, kwargs in columns.items()]
        subs.append(Replacement(row, self.classes.row, {"split": row_split}))
        block = BlockDescription(at, list(entering), row, list(others))
        return ModulePolicyDescription(sub_module_replacement=subs, blocks=[block])

    def _features(self, name: str, *, out: bool) -> int:
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
