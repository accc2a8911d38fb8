"""Converts the attention modules and MLPs in a policy to descriptions of how each layer is sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from shardformer import module_paths as paths
from shardformer.errors import ConfigError, PolicyError, suggest_similar_names
from shardformer.layout.shard_spec import AttentionHeadLayout, Split, get_features_per_head
from shardformer.mesh.parallel_context import Axis
from shardformer.policies.module_descriptions import (
    BlockArguments,
    BlockDescription,
    ModulePolicyDescription,
    SubModuleReplacementDescription,
    merge_descriptions,
)
from shardformer.policies.roles import (
    LOCAL_ATTR_KINDS,
    MLP,
    Attention,
    AttentionProjections,
    LayerStack,
    Role,
    get_output_layer_path,
    make_unknown_attr_kind_error,
)
from shardformer.tensor_parallel.grid_layers import LAYERS_BY_MODE, ParallelLayerClasses

LayerReplacement = SubModuleReplacementDescription
ColumnPaths = Mapping[str, dict[str, Any]]
"""Path of a linear layer -> arguments of its parallel replacement."""


@dataclass
class LayerRoleConverter:
    """Describes how to shard the attention modules and MLPs of one layer, according to its policy.

    Args:
        layer_path: path of the layers, for errors.
        is_stage: whether the layers are one stage of several (as in Swin), in which early stages may have few heads.
        parallel_classes: the parallel layers of the tensor parallel mode.
    """

    layer: nn.Module
    layer_path: str
    axis: Axis
    is_stage: bool = False
    parallel_classes: ParallelLayerClasses = LAYERS_BY_MODE["1d"]

    def has_role(self, role: Role) -> bool:
        """Return whether the layer contains the attention module, MLP or experts that ``role`` describes.

        An optional role does not exist if the layer has its module but not its output layer.
        ``check_output_layers_exist`` ensures that at least one layer has the output layer. Raises PolicyError if a
        required module is missing.
        """
        has = paths.get_submodule_or_none(self.layer, role.at) is not None
        if "*" in role.at:
            has = bool(paths.match_paths(role.at, [name for name, _ in self.layer.named_modules()]))
        if has and role.optional and (out := get_output_layer_path(role)) is not None:
            has = paths.get_submodule_or_none(self.layer, out) is not None
        if not has and not role.optional:
            raise paths.make_module_not_found_error(self.layer_path, role.at, self.layer)
        return has

    def describe_mlp_sharding(self, mlp: MLP) -> ModulePolicyDescription:
        """Describe how to shard one MLP, or several if its path contains ``*``."""
        if "*" not in mlp.at:
            return self._describe_mlp(mlp)
        found = paths.match_paths(mlp.at, [name for name, _ in self.layer.named_modules()])
        return merge_descriptions([self._describe_mlp(replace(mlp, at=at)) for at in found])

    def _describe_mlp(self, mlp: MLP) -> ModulePolicyDescription:
        ups = paths.get_existing_submodule_paths(paths.as_path_list(mlp.up), mlp.at, self.layer, self.layer_path)
        down = paths.resolve_relative_path(mlp.at, mlp.down)
        width = self.get_num_linear_features(down, return_out_features=False)
        fused = mlp.fused or max(self.get_num_linear_features(ups[0], return_out_features=True) // width, 1)
        for up in ups:
            features = self.get_num_linear_features(up, return_out_features=True)
            if features != fused * width:
                raise PolicyError(
                    f"The policy describes an MLP in which {self.layer_path}.{up} has {features} output features, but "
                    f"the next linear layer {self.layer_path}.{down} has {width} input features.",
                    remedy="Correct the paths, or pass fused=2 if the gate and up projections are one linear layer.",
                )
        check_enough_features_to_shard(width, self.axis, f"{self.layer_path}.{ups[0]}")
        split, row = Split.fused([width] * fused, self.axis.size), Split.even(width, self.axis.size)
        description, block = self.describe_block(mlp.at, {up: {"split": split} for up in ups}, down, row)
        norms = [] if mlp.norm is None else [paths.resolve_relative_path(mlp.at, mlp.norm)]
        norms = [norm.rstrip("?") for norm in norms if paths.has_submodule(self.layer, norm, self.layer_path)]
        norms = [norm for norm in norms if not isinstance(paths.get_submodule_or_none(self.layer, norm), nn.Identity)]
        subs = description.sub_module_replacement or []
        subs += [LayerReplacement(norm, self.parallel_classes.norm, {"split": row}) for norm in norms]
        block.fuse_activation = fused == 1 and not norms
        if mlp.shared_exit is not None:
            paths.get_linear_submodule(self.layer, mlp.shared_exit, self.layer_path)
        block.shared_exit = mlp.shared_exit
        return description

    def describe_block(
        self,
        entry_path: str,
        entry_columns: ColumnPaths,
        row_path: str,
        row_split: Split,
        cross_columns: ColumnPaths | None = None,
    ) -> tuple[ModulePolicyDescription, BlockDescription]:
        """Describe how to shard an attention module or MLP and its linear layers.

        Returns (module description, block).
        """
        cross_columns = cross_columns or {}
        columns = {**entry_columns, **cross_columns}
        subs = [LayerReplacement(name, self.parallel_classes.column, dict(kwargs)) for name, kwargs in columns.items()]
        subs.append(LayerReplacement(row_path, self.parallel_classes.row, {"split": row_split}))
        block = BlockDescription(entry_path, list(entry_columns), row_path, list(cross_columns))
        return ModulePolicyDescription(sub_module_replacement=subs, blocks=[block]), block

    def get_num_linear_features(self, linear_path: str, *, return_out_features: bool) -> int:
        return paths.get_num_linear_features(
            paths.get_linear_submodule(self.layer, linear_path, self.layer_path),
            return_out_features=return_out_features,
        )


def check_enough_features_to_shard(num_features: int, axis: Axis, linear_path: str) -> None:
    """Raise ConfigError if an MLP or expert has too few features for the tensor parallel size."""
    if num_features < axis.size:
        raise ConfigError(
            f"A tensor parallel size of {axis.size} exceeds the {num_features} features of {linear_path}.",
            remedy=f"Use a tensor parallel size of at most {num_features}.",
        )


def check_output_layers_exist(stack: LayerStack, layer_list_path: str, layers: Sequence[nn.Module]) -> None:
    """Raise PolicyError if all layers lack the output layer of an optional attention module or MLP."""
    for role in stack.blocks:
        out = get_output_layer_path(role) if role.optional else None
        there = [layer for layer in layers if paths.get_submodule_or_none(layer, role.at) is not None]
        if out is not None and there and all(paths.get_submodule_or_none(layer, out) is None for layer in there):
            at, output = (paths.join_path(layer_list_path, "*", name) for name in (role.at, out))
            raise PolicyError(
                f"The policy specifies {output!r} as the output layer of {at!r}, but the model has no such module.",
                remedy=suggest_similar_names(out, [name for name, _ in there[0].named_modules() if name])
                + f" Correct the path, or remove {role.at!r} from the policy.",
            )


@dataclass(frozen=True)
class AttentionRoleConverter:
    """Describes how to shard one attention module of a layer, according to its policy.

    Args:
        layer: the layer that contains the attention module.
        config: the model's config, in which head counts are looked up.
        num_heads, num_kv_heads: head counts, or the config fields with them, from the role or the policy.
    """

    role: Attention
    layer: LayerRoleConverter
    config: Any
    num_heads: int | str | None
    num_kv_heads: int | str | None

    @cached_property
    def head_layout(self) -> AttentionHeadLayout:
        num_heads = self._get_head_count(self.num_heads)
        if num_heads is None:
            raise self._make_missing_head_count_error()
        num_kv_heads = self._get_head_count(self.num_kv_heads) or num_heads
        out = self._resolve_projection_path(self.role.projections.out)
        unit = get_features_per_head(
            f"{self.layer.layer_path}.{out}",
            self.layer.get_num_linear_features(out, return_out_features=False),
            num_heads,
        )
        return AttentionHeadLayout(
            num_heads, num_kv_heads, unit, self.layer.axis.size, self.role.projections.partitions
        )

    @property
    def num_unshardable_heads(self) -> int | None:
        """Head count of a stage, such as one in Swin, that has fewer heads than ranks, otherwise None."""
        heads = self._get_head_count(self.num_heads)
        return heads if heads is not None and heads < self.layer.axis.size and self.layer.is_stage else None

    def _get_head_count(self, count_or_attr_path: int | str | None) -> int | None:
        count = (
            paths.get_attribute_by_path_or_none(
                self._get_attr_owner(count_or_attr_path), count_or_attr_path.removeprefix(".")
            )
            if isinstance(count_or_attr_path, str)
            else count_or_attr_path
        )
        return count if isinstance(count, int) and count > 0 else None

    def _get_attr_owner(self, attr_path: str) -> Any:
        return (
            paths.get_submodule_or_raise(self.layer.layer, self.role.at) if attr_path.startswith(".") else self.config
        )

    def _make_missing_head_count_error(self) -> PolicyError:
        source = self.num_heads
        owner = self._get_attr_owner(str(source))
        where = f"the {type(owner).__name__}" if isinstance(owner, nn.Module) else "the config"
        known = [] if owner is None else [name for name in vars(owner) if "head" in name]
        reason = "the model has no config" if owner is None else f"{where} has no such field"
        return PolicyError(
            f"The policy has num_heads={source!r}, but {reason}.",
            remedy="Set num_heads to a number, a config field such as 'num_attention_heads', or an attribute of the "
            "attention module such as '.num_heads'. "
            + (suggest_similar_names(str(source), known) if owner is not None else ""),
        )

    def describe_attention_sharding(self) -> ModulePolicyDescription:
        at, inputs, rank = self.role.at, self.role.inputs, self.layer.axis.rank
        linears = _remove_missing_projections(self.role.projections, at, self.layer.layer)
        columns = self._make_projection_kwargs(linears)
        from_context = inputs.cross_attention or inputs.arguments
        others = {*inputs.inner_inputs, *((linears.k, linears.v, linears.kv) if from_context else ())}
        description, block = self.layer.describe_block(
            at if inputs.entry is None else self._resolve_projection_path(inputs.entry),
            {self._resolve_projection_path(name): kwargs for name, kwargs in columns.items() if name not in others},
            self._resolve_projection_path(linears.out),
            self.head_layout.get_query_split(),
            {self._resolve_projection_path(name): kwargs for name, kwargs in columns.items() if name in others},
        )
        by_head = self._add_attr_changes_and_get_head_dims(description, columns.get(linears.k or linears.v or "", {}))
        first, end = self.head_layout.query_head_bounds[rank : rank + 2]
        bounds = (self.head_layout.partition.num_heads, first, end)
        width = self.head_layout.get_local_head_and_feature_counts(rank)["width"] if inputs.reads_width else None
        kv_heads = (self.head_layout.num_kv_heads, tuple(self.head_layout.get_used_kv_heads(rank)))
        block.arguments = BlockArguments(at, list(inputs.arguments), by_head, bounds, width, kv_heads)
        block.gather_module = at if inputs.full_sequence else None
        return description

    def _resolve_projection_path(self, relative_path: str) -> str:
        return paths.resolve_relative_path(self.role.at, relative_path)

    def _get_quantity_counted_by_attr(self, attr_name: str, attr_category: str) -> str:
        """Return the kind of number in an entry of ``local_attrs``, such as "heads".

        Raises PolicyError if a module or tensor of the kind ``attr_category`` cannot count that.
        """
        entry = self.role.local_attrs[attr_name]
        kind = entry if isinstance(entry, str) else entry[0]
        if kind not in LOCAL_ATTR_KINDS[attr_category]:
            raise make_unknown_attr_kind_error(self.role, attr_name, LOCAL_ATTR_KINDS[attr_category], attr_category)
        return kind

    def _add_attr_changes_and_get_head_dims(
        self, description: ModulePolicyDescription, kv_projection_kwargs: Mapping[str, Any]
    ) -> dict[str, int]:
        """Add the local head counts and other ``local_attrs`` to an attention module's description.

        Returns argument of `forward` -> its dim that counts heads.

        Args:
            kv_projection_kwargs: arguments for the replacement of the projection of k or v, which also fit a norm of k.
        """
        attributes: dict[str, Any] = {}
        parameters: dict[str, dict[int, Split]] = {}
        arguments: dict[str, int] = {}
        subs, classes, queries = (
            description.sub_module_replacement or [],
            self.layer.parallel_classes,
            self.head_layout.get_query_split(),
        )
        for name, counted in self.role.local_attrs.items():
            path = self._resolve_projection_path(name.rstrip("?"))
            thing = paths.get_attribute_by_path_or_none(self.layer.layer, path)
            if isinstance(thing, Tensor):
                self._get_quantity_counted_by_attr(name, "parameter")
                parameters[path] = self.head_layout.get_param_splits(path, thing, counted)
            elif isinstance(thing, nn.Embedding):
                self._get_quantity_counted_by_attr(name, "embedding")
                split = self.head_layout.get_query_split(1)
                subs.append(LayerReplacement(path, classes.bias_table, {"split": split, "gather_output": False}))
            elif isinstance(thing, nn.Module):
                of_q = self._get_quantity_counted_by_attr(name, "norm") == "heads" or not kv_projection_kwargs
                if not isinstance(thing, nn.Identity):  # used when the model has no such norm
                    subs.append(
                        LayerReplacement(path, classes.norm, {"split": queries} if of_q else dict(kv_projection_kwargs))
                    )
            elif not isinstance(counted, str) and not name.endswith("?"):
                self._get_quantity_counted_by_attr(name, "argument")
                arguments[name] = counted[1]
            elif thing is not None:
                kind = self._get_quantity_counted_by_attr(name, "attribute")
                attributes[path] = self.head_layout.get_local_head_and_feature_counts(self.layer.axis.rank)[kind]
            elif not name.endswith("?"):
                raise self._make_missing_attr_error(name)
        description.attribute_replacement, description.parameters = attributes, parameters
        return arguments

    def _make_missing_attr_error(self, attr_name: str) -> PolicyError:
        module = paths.get_submodule_or_raise(self.layer.layer, self.role.at)
        owner = paths.get_submodule_or_none(module, attr_name.rpartition(".")[0]) or module
        known = [n for n in dir(owner) if n[:1] != "_"]
        return PolicyError(
            f"The local_attrs of the policy contain {attr_name!r}, but the model has no attribute "
            f"{self.layer.layer_path}.{self._resolve_projection_path(attr_name)}.",
            remedy=suggest_similar_names(attr_name.rpartition(".")[2], known)
            + " If only some models have this attribute, append '?' to its name.",
        )

    def _make_projection_kwargs(self, projections: AttentionProjections) -> dict[str, dict[str, Any]]:
        """Return keyword arguments for the parallel layers that replace the q, k and v projections."""
        layout, q_unit = self.head_layout, None
        expand = layout.get_local_kv_head_per_query(self.layer.axis.rank)
        columns: dict[str, dict[str, Any]] = {}
        if projections.q:
            q_unit = self._get_linear_head_dim(
                projections.q, layout.num_heads, None if self.role.inputs.inner_inputs else layout.head_dim
            )
            columns[projections.q] = {"split": layout.get_query_split(q_unit)}
        for gate in projections.gates:
            columns[gate] = {"split": layout.get_query_split(self._get_linear_head_dim(gate, layout.num_heads))}
        for name, expected in ((projections.k, q_unit), (projections.v, layout.head_dim)):
            if name:
                width = self._get_linear_head_dim(name, layout.num_kv_heads, expected)
                columns[name] = {"split": layout.get_kv_split(width)} | ({"expand": (width, expand)} if expand else {})
        for fused in filter(None, (projections.qkv, projections.kv)):
            columns[fused] = {"split": self._make_fused_projection_split(projections, fused)}
        return columns

    def _get_linear_head_dim(self, linear_path: str, num_heads: int, expected_head_dim: int | None = None) -> int:
        return get_features_per_head(
            f"{self.layer.layer_path}.{self._resolve_projection_path(linear_path)}",
            self._get_out_features(linear_path),
            num_heads,
            expected_head_dim,
        )

    def _get_out_features(self, linear_path: str) -> int:
        return self.layer.get_num_linear_features(self._resolve_projection_path(linear_path), return_out_features=True)

    def _make_fused_projection_split(self, projections: AttentionProjections, fused_projection_path: str) -> Split:
        layout, features, has_q = (
            self.head_layout,
            self._get_out_features(fused_projection_path),
            fused_projection_path == projections.qkv,
        )
        heads, kv_heads, d = layout.num_heads, layout.num_kv_heads, layout.head_dim
        sizes = [heads * d] * has_q + [kv_heads * d] * 2
        if features != sum(sizes) and not (
            projections.interleaved and fused_projection_path in self.role.inputs.inner_inputs
        ):
            name, required = self._resolve_projection_path(fused_projection_path), " + ".join(map(str, sizes))
            raise PolicyError(
                f"The fused projection {self.layer.layer_path}.{name} must have {required} features for {heads} heads, "
                f"{kv_heads} KV heads and head dim {d}, but has {features}.",
                remedy="Correct num_heads, num_kv_heads or the path of the projection in the policy.",
            )
        if any(layout.get_local_kv_head_per_query(r) for r in range(layout.num_ranks)):
            at = f"{self.layer.layer_path}.{self.role.at}"
            raise ConfigError(
                f"A tensor parallel size of {layout.num_ranks} splits the {kv_heads} KV heads of {at} unevenly.",
                remedy=f"Use a tensor parallel size that divides {kv_heads} or {heads}.",
            )
        if projections.interleaved:
            self._get_linear_head_dim(fused_projection_path, kv_heads)
            return layout.get_kv_grouped_projection_split(has_q, features)
        part = layout.partition
        splits = [part.get_query_split(), part.get_kv_split(), part.get_kv_split()][-len(sizes) :] * layout.partitions
        return Split.concat(splits, [size // layout.partitions for size in sizes] * layout.partitions)


def _remove_missing_projections(
    projections: AttentionProjections, attention_path: str, layer: nn.Module
) -> AttentionProjections:
    """Remove optional projections (paths that end in ``?``) that the attention module does not have."""
    names = {field: getattr(projections, field) for field in ("q", "k", "v", "qkv", "kv")}
    optional = {field: name[:-1] for field, name in names.items() if name and name.endswith("?")}
    found: dict[str, Any] = {
        field: name
        if paths.get_submodule_or_none(layer, paths.resolve_relative_path(attention_path, name)) is not None
        else None
        for field, name in optional.items()
    }
    return replace(projections, **found) if found else projections
