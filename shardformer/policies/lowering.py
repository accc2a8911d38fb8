"""Lowers a role (attention, MLP, experts) to descriptions of modules, for one layer of a model."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from torch import Tensor, nn

from shardformer.errors import ConfigError, PolicyError, did_you_mean
from shardformer.layout.shard_spec import Split
from shardformer.mesh.parallel_context import Axis
from shardformer.module_paths import (
    as_path_list,
    existing_paths,
    find_module,
    get_at,
    get_linear,
    get_module,
    join_path,
    match_paths,
    module_exists,
    no_match_error,
    num_features,
    resolve_path,
)
from shardformer.policies.attention_heads import HeadLayout, features_per_head
from shardformer.policies.module_descriptions import (
    BlockArguments,
    BlockDescription,
    ModulePolicyDescription,
    SubModuleReplacementDescription,
    merge_descriptions,
)
from shardformer.policies.roles import MLP, Attention, AttentionProjections, Experts, LayerStack, Role, exit_path
from shardformer.tensor_parallel.grid.layers import LAYERS_BY_MODE, ModeLayers

LayerReplacement = SubModuleReplacementDescription
ALIGNED = 8
"""Each rank holds a multiple of so many features of an expert, where the whole expert does: torch's grouped matrix
products take rows of a multiple of 16 bytes, in 16 bits too."""
ColumnPaths = Mapping[str, dict[str, Any]]
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
    classes: ModeLayers = LAYERS_BY_MODE["1d"]

    def exists(self, role: Role) -> bool:
        """Whether the layer has what the role describes. Raises PolicyError where it has not and should.

        A layer that has the module, but not its exit, has another one in the place of an optional one
        (``check_exits`` sees to it that not all have).
        """
        names = [name for name, _ in self.layer.named_modules()]
        has = bool(match_paths(role.at, names)) if "*" in role.at else find_module(self.layer, role.at) is not None
        if has and role.optional and (out := exit_path(role)) is not None:
            has = find_module(self.layer, out) is not None
        if not has and not role.optional:
            raise no_match_error(self.path, role.at, self.layer)
        return has

    def mlps(self, mlp: MLP) -> ModulePolicyDescription:
        """One MLP, or each of those that a ``*`` stands for."""
        if "*" not in mlp.at:
            return self.mlp(mlp)
        found = match_paths(mlp.at, [name for name, _ in self.layer.named_modules()])
        return merge_descriptions([self.mlp(replace(mlp, at=at)) for at in found])

    def mlp(self, mlp: MLP) -> ModulePolicyDescription:
        ups = existing_paths(as_path_list(mlp.up), mlp.at, self.layer, self.path)
        down = resolve_path(mlp.at, mlp.down)
        width = self.features(down, out=False)
        fused = mlp.fused or max(self.features(ups[0], out=True) // width, 1)
        for up in ups:
            features = self.features(up, out=True)
            if features != fused * width:
                raise PolicyError(
                    f"{self.path}.{up} has {features} output features, {self.path}.{down} has {width} input features",
                    remedy="Correct the paths, or give fused=2 where a gate and what it gates lie behind each other",
                )
        self._check_width(width, ups[0])
        split, row = Split.fused([width] * fused, self.axis.size), Split.even(width, self.axis.size)
        description, block = self.block(mlp.at, {up: {"split": split} for up in ups}, down, row)
        norms = [] if mlp.norm is None else [resolve_path(mlp.at, mlp.norm)]
        norms = [norm.rstrip("?") for norm in norms if module_exists(self.layer, norm, self.path)]
        norms = [norm for norm in norms if not isinstance(find_module(self.layer, norm), nn.Identity)]
        subs = description.sub_module_replacement or []
        subs += [LayerReplacement(norm, self.classes.norm, {"split": row}) for norm in norms]
        block.fuse_activation = fused == 1 and not norms
        block.shared_exit = mlp.shared_exit
        return description

    def experts(self, experts: Experts) -> ModulePolicyDescription:
        module = get_module(self.layer, experts.at)
        ups = as_path_list(experts.up)
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
        parameters = {join_path(experts.at, name): {dims[name]: split} for name, split in splits.items()}
        block = BlockDescription(experts.at, [], experts.at, replicated_terms=experts.replicated_terms)
        attributes = {} if is_aligned else _computed_one_by_one(module, experts.at)
        return ModulePolicyDescription(attribute_replacement=attributes, blocks=[block], parameters=parameters)

    def _expert_dims(self, experts: Experts, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, int]:
        """Which dim of each parameter is cut. Raises PolicyError where none fits, or several do and none is said."""
        ways = [way for way in find_expert_dims(shapes, experts.down, experts.fused) if way.keys() == shapes.keys()]
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
        self, entry: str, entering: ColumnPaths, row: str, row_split: Split, others: ColumnPaths | None = None
    ) -> tuple[ModulePolicyDescription, BlockDescription]:
        """The replacements of a block's linears, and the block, which stands in the description too."""
        others = others or {}
        subs = [
            LayerReplacement(name, self.classes.column, dict(kwargs)) for name, kwargs in {**entering, **others}.items()
        ]
        subs.append(LayerReplacement(row, self.classes.row, {"split": row_split}))
        block = BlockDescription(entry, list(entering), row, list(others))
        return ModulePolicyDescription(sub_module_replacement=subs, blocks=[block]), block

    def features(self, name: str, *, out: bool) -> int:
        return num_features(get_linear(self.layer, name, self.path), out=out)

    def _check_width(self, width: int, up: str) -> None:
        if width < self.axis.size:
            raise ConfigError(
                f"A tensor size of {self.axis.size} is more than the {width} features of {self.path}.{up}",
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
    return {join_path(at, "config"): config}


def check_exits(stack: LayerStack, path: str, layers: Sequence[nn.Module]) -> None:
    """Refuses an optional role whose module is there and whose exit no layer has: it would never be carried out."""
    for role in stack.blocks:
        out = exit_path(role) if role.optional else None
        there = [layer for layer in layers if find_module(layer, role.at) is not None]
        if out is not None and there and all(find_module(layer, out) is None for layer in there):
            raise PolicyError(
                f"{len(there)} layers have {join_path(path, '*', role.at)!r}, "
                f"and none has {join_path(path, '*', out)!r}",
                rule="An optional role is passed over where another module stands in its place, but not in every layer",
                remedy=did_you_mean(out, [name for name, _ in there[0].named_modules() if name])
                + " Correct the path, or leave the role out",
            )


def find_expert_dims(shapes: Mapping[str, Sequence[int]], down: str, fused: int) -> list[dict[str, int]]:
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


@dataclass(frozen=True)
class AttentionLowering:
    """Describes how an attention of a layer is cut.

    Args:
        role: the attention.
        layer: the layer that has it.
        config: the model's, in which numbers of heads are looked up.
        num_heads, num_kv_heads: these numbers, or where they are looked up: the role's, or else the policy's.
    """

    role: Attention
    layer: LayerLowering
    config: Any
    num_heads: int | str | None
    num_kv_heads: int | str | None

    @cached_property
    def layout(self) -> HeadLayout:
        num_heads = self._count(self.num_heads)
        if num_heads is None:
            raise self._no_count()
        num_kv_heads = self._count(self.num_kv_heads) or num_heads
        out = self._path(self.role.projections.out)
        unit = features_per_head(f"{self.layer.path}.{out}", self.layer.features(out, out=False), num_heads)
        return HeadLayout(num_heads, num_kv_heads, unit, self.layer.axis.size, self.role.projections.partitions)

    @property
    def uneven_heads(self) -> int | None:
        """How many heads there are, in the first of several stages, where these are fewer than ranks."""
        heads = self._count(self.num_heads)
        return heads if heads is not None and heads < self.layer.axis.size and self.layer.is_stage else None

    def _count(self, said: int | str | None) -> int | None:
        count = get_at(self._owner(said), said.removeprefix(".")) if isinstance(said, str) else said
        return count if isinstance(count, int) and count > 0 else None

    def _owner(self, said: str) -> Any:
        """What has the field that a number of heads is read from."""
        return get_module(self.layer.layer, self.role.at) if said.startswith(".") else self.config

    def _no_count(self) -> PolicyError:
        said = self.num_heads
        owner = self._owner(str(said))
        where = f"the {type(owner).__name__}" if isinstance(owner, nn.Module) else "the config"
        return PolicyError(
            f"num_heads is {said!r}, and "
            + (f"{where} has no such field" if owner is not None else "the model has no config"),
            rule="Attention is cut by whole heads, so a policy says how many there are",
            remedy="Set it to the number, such as num_heads = 12, to the name of the config's field, or to that of the "
            "attention module's own attribute behind a dot. "
            + (did_you_mean(str(said), [n for n in vars(owner) if "head" in n]) if owner is not None else ""),
        )

    def description(self) -> ModulePolicyDescription:
        at, inputs, rank = self.role.at, self.role.inputs, self.layer.axis.rank
        linears = _existing_projections(self.role.projections, at, self.layer.layer)
        columns = self._columns(linears)
        from_context = inputs.cross_attention or inputs.arguments
        others = {*inputs.inner_inputs, *((linears.k, linears.v, linears.kv) if from_context else ())}
        description, block = self.layer.block(
            at if inputs.entry is None else self._path(inputs.entry),
            {self._path(name): kwargs for name, kwargs in columns.items() if name not in others},
            self._path(linears.out),
            self.layout.query_split(),
            {self._path(name): kwargs for name, kwargs in columns.items() if name in others},
        )
        by_head = self._add_counted(description, columns.get(linears.k or linears.v or "", {}))
        first, end = self.layout.query_bounds[rank : rank + 2]
        bounds = (self.layout.partition.num_heads, first, end)
        width = self.layout.values(rank)["width"] if inputs.reads_width else None
        kv_heads = (self.layout.num_kv_heads, tuple(self.layout.seen(rank)))
        block.arguments = BlockArguments(at, list(inputs.arguments), by_head, bounds, width, kv_heads)
        block.gather_module = at if inputs.full_sequence else None
        return description

    def _path(self, name: str) -> str:
        """Relative to the layer."""
        return resolve_path(self.role.at, name)

    def _add_counted(self, description: ModulePolicyDescription, of_k: Mapping[str, Any]) -> dict[str, int]:
        """Adds what the role's ``local_attrs`` name to the description. Returns the arguments that count heads.

        Args:
            of_k: how the projection of k, or v, is cut, which a norm of k is cut as.
        """
        attributes: dict[str, Any] = {}
        parameters: dict[str, dict[int, Split]] = {}
        arguments: dict[str, int] = {}
        subs, classes, queries = description.sub_module_replacement or [], self.layer.classes, self.layout.query_split()
        for name, said in self.role.local_attrs.items():
            path = self._path(name.rstrip("?"))
            thing = get_at(self.layer.layer, path)
            if isinstance(thing, Tensor):
                self.role.local_attr_kind(name, "parameter")
                parameters[path] = self.layout.parameter_split(path, thing, said)
            elif isinstance(thing, nn.Embedding):
                self.role.local_attr_kind(name, "embedding")
                split = self.layout.query_split(1)
                subs.append(LayerReplacement(path, classes.bias_table, {"split": split, "gather_output": False}))
            elif isinstance(thing, nn.Module):
                of_q = self.role.local_attr_kind(name, "norm") == "heads" or not of_k
                if not isinstance(thing, nn.Identity):  # in the place of a norm that this model does not have
                    subs.append(LayerReplacement(path, classes.norm, {"split": queries} if of_q else dict(of_k)))
            elif not isinstance(said, str) and not name.endswith("?"):
                self.role.local_attr_kind(name, "argument")
                arguments[name] = said[1]
            elif thing is not None:
                attributes[path] = self.layout.values(self.layer.axis.rank)[
                    self.role.local_attr_kind(name, "attribute")
                ]
            elif not name.endswith("?"):
                raise self._nothing(name)
        description.attribute_replacement, description.parameters = attributes, parameters
        return arguments

    def _nothing(self, name: str) -> PolicyError:
        module = get_module(self.layer.layer, self.role.at)
        owner = find_module(module, name.rpartition(".")[0]) or module
        known = [n for n in dir(owner) if n[:1] != "_"]
        return PolicyError(
            f"There is nothing at '{self.layer.path}.{self._path(name)}', and local_attrs={{{name!r}: ...}}",
            rule="What an attention's counts name is an attribute, parameter, norm or embedding, or with a dim an "
            "argument of its forward",
            remedy=did_you_mean(name.rpartition(".")[2], known) + " Where some models lack it, end its name with a ?",
        )

    def _columns(self, linears: AttentionProjections) -> dict[str, dict[str, Any]]:
        """How each of the projections but the one at the end is cut."""
        layout, q_unit = self.layout, None
        expand = layout.expand(self.layer.axis.rank)
        columns: dict[str, dict[str, Any]] = {}
        if linears.q:
            q_unit = self._unit(linears.q, layout.num_heads, None if self.role.inputs.inner_inputs else layout.head_dim)
            columns[linears.q] = {"split": layout.query_split(q_unit)}
        for gate in linears.gates:
            columns[gate] = {"split": layout.query_split(self._unit(gate, layout.num_heads))}
        for name, expected in ((linears.k, q_unit), (linears.v, layout.head_dim)):
            if name:
                width = self._unit(name, layout.num_kv_heads, expected)
                columns[name] = {"split": layout.kv_split(width)} | ({"expand": (width, expand)} if expand else {})
        for fused in filter(None, (linears.qkv, linears.kv)):
            columns[fused] = {"split": self._fused(linears, fused)}
        return columns

    def _unit(self, name: str, count: int, expected: int | None = None) -> int:
        """The features of each of ``count`` heads."""
        return features_per_head(f"{self.layer.path}.{self._path(name)}", self._features(name), count, expected)

    def _features(self, name: str) -> int:
        return self.layer.features(self._path(name), out=True)

    def _fused(self, linears: AttentionProjections, name: str) -> Split:
        layout, features, has_q = self.layout, self._features(name), name == linears.qkv
        heads, kv_heads, d = layout.num_heads, layout.num_kv_heads, layout.head_dim
        sizes = [heads * d] * has_q + [kv_heads * d] * 2
        if features != sum(sizes) and not (linears.interleaved and name in self.role.inputs.inner_inputs):
            raise PolicyError(
                f"{self.layer.path}.{self._path(name)} has {features} features, which are not "
                f"{' + '.join(map(str, sizes))}",
                rule=f"A fused projection of {heads} heads on {kv_heads} KV heads, each of {d} features, has these",
                remedy="Correct num_heads, num_kv_heads or the paths in the policy",
            )
        if any(layout.expand(r) for r in range(layout.ranks)):
            at = f"{self.layer.path}.{self.role.at}"
            raise ConfigError(
                f"A tensor size of {layout.ranks} cuts the {kv_heads} KV heads of {at} unevenly",
                remedy=f"Use a tensor size that divides {kv_heads} or {heads}",
            )
        if linears.interleaved:
            self._unit(name, kv_heads)
            return layout.grouped_split(has_q, features)
        part = layout.partition
        splits = [part.query_split(), part.kv_split(), part.kv_split()][-len(sizes) :] * layout.partitions
        return Split.stack(splits, [size // layout.partitions for size in sizes] * layout.partitions)


def _existing_projections(said: AttentionProjections, at: str, layer: nn.Module) -> AttentionProjections:
    """The projections that this layer's module ``at`` has: what ends in ``?`` and is not there is left out."""

    def there(name: str | None) -> str | None:
        if name is None or not name.endswith("?"):
            return name
        return name[:-1] if find_module(layer, resolve_path(at, name[:-1])) is not None else None

    if not any([name.endswith("?") for name in (said.q, said.k, said.v, said.qkv, said.kv) if name]):
        return said
    return replace(said, q=there(said.q), k=there(said.k), v=there(said.v), qkv=there(said.qkv), kv=there(said.kv))
