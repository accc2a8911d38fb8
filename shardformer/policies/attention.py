"""From an attention's role to the description that carries it out, for one layer of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from shardformer.errors import ConfigError, PolicyError, nearest
from shardformer.layout.split import Split
from shardformer.policies.describe import BlockArguments, ModulePolicyDescription
from shardformer.policies.heads import HeadLayout, unit_of
from shardformer.policies.lowering import LayerLowering, Replacement
from shardformer.policies.paths import find, module_at, relative, value_at
from shardformer.policies.roles import Attention, Projections


@dataclass(frozen=True)
class AttentionLowering:
    """Describes how an attention of a layer is cut.

    Args:
        role: the attention.
        layer: the layer that has it.
        config: the model's, in which numbers of heads are looked up.
    """

    role: Attention
    layer: LayerLowering
    config: Any

    @cached_property
    def layout(self) -> HeadLayout:
        num_heads = self._count(self.role.num_heads)
        if num_heads is None:
            raise self._no_count()
        num_kv_heads = self._count(self.role.num_kv_heads) or num_heads
        out = self._path(self.role.projections.out)
        unit = unit_of(f"{self.layer.path}.{out}", self.layer.features(out, out=False), num_heads)
        return HeadLayout(num_heads, num_kv_heads, unit, self.layer.axis.size, self.role.projections.partitions)

    @property
    def few_heads(self) -> int | None:
        """How many heads there are, in the first of several stages, where these are fewer than ranks."""
        heads = self._count(self.role.num_heads)
        return heads if heads is not None and heads < self.layer.axis.size and self.layer.is_stage else None

    def _count(self, said: int | str | None) -> int | None:
        count = value_at(self._owner(said), said.removeprefix(".")) if isinstance(said, str) else said
        return count if isinstance(count, int) and count > 0 else None

    def _owner(self, said: str) -> Any:
        """What has the field that a number of heads is read from."""
        return module_at(self.layer.layer, self.role.at) if said.startswith(".") else self.config

    def _no_count(self) -> PolicyError:
        said = self.role.num_heads
        owner = self._owner(str(said))
        where = f"the {type(owner).__name__}" if isinstance(owner, nn.Module) else "the config"
        return PolicyError(
            f"num_heads is {said!r}, and "
            + (f"{where} has no such field" if owner is not None else "the model has no config"),
            rule="Attention is cut by whole heads, so a policy says how many there are",
            remedy="Set it to the number, such as num_heads = 12, to the name of the config's field, or to that of the "
            "attention module's own attribute behind a dot. "
            + (nearest(str(said), [n for n in vars(owner) if "head" in n]) if owner is not None else ""),
        )

    def description(self) -> ModulePolicyDescription:
        at, inputs, rank = self.role.at, self.role.inputs, self.layer.axis.rank
        linears = _present(self.role.projections, at, self.layer.layer)
        columns = self._columns(linears)
        from_context = inputs.from_context or inputs.arguments
        others = {*inputs.from_inside, *((linears.k, linears.v, linears.kv) if from_context else ())}
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
        width = self.layout.values(rank)["width"] if inputs.give_width else None
        kv_heads = (self.layout.num_kv_heads, tuple(self.layout.seen(rank)))
        block.arguments = BlockArguments(at, list(inputs.arguments), by_head, bounds, width, kv_heads)
        block.gathers_around = at if inputs.whole_sequence else None
        return description

    def _path(self, name: str) -> str:
        """Relative to the layer."""
        return relative(self.role.at, name)

    def _add_counted(self, description: ModulePolicyDescription, of_k: Mapping[str, Any]) -> dict[str, int]:
        """Adds what the role's ``counts`` name to the description. Returns the arguments that count heads.

        Args:
            of_k: how the projection of k, or v, is cut, which a norm of k is cut as.
        """
        attributes: dict[str, Any] = {}
        parameters: dict[str, dict[int, Split]] = {}
        arguments: dict[str, int] = {}
        subs, classes, queries = description.sub_module_replacement or [], self.layer.classes, self.layout.query_split()
        for name, said in self.role.counts.items():
            path = self._path(name.rstrip("?"))
            thing = value_at(self.layer.layer, path)
            if isinstance(thing, Tensor):
                self.role.counted(name, "parameter")
                parameters[path] = self.layout.parameter_split(path, thing, said)
            elif isinstance(thing, nn.Embedding):
                self.role.counted(name, "embedding")
                split = self.layout.query_split(1)
                subs.append(Replacement(path, classes.table, {"split": split, "gather_output": False}))
            elif isinstance(thing, nn.Module):
                of_q = self.role.counted(name, "norm") == "heads" or not of_k
                if not isinstance(thing, nn.Identity):  # in the place of a norm that this model does not have
                    subs.append(Replacement(path, classes.norm, {"split": queries} if of_q else dict(of_k)))
            elif not isinstance(said, str) and not name.endswith("?"):
                self.role.counted(name, "argument")
                arguments[name] = said[1]
            elif thing is not None:
                attributes[path] = self.layout.values(self.layer.axis.rank)[self.role.counted(name, "attribute")]
            elif not name.endswith("?"):
                raise self._nothing(name)
        description.attribute_replacement, description.parameters = attributes, parameters
        return arguments

    def _nothing(self, name: str) -> PolicyError:
        module = module_at(self.layer.layer, self.role.at)
        owner = find(module, name.rpartition(".")[0]) or module
        known = [n for n in dir(owner) if n[:1] != "_"]
        return PolicyError(
            f"There is nothing at '{self.layer.path}.{self._path(name)}', and counts={{{name!r}: ...}}",
            rule="What an attention's counts name is an attribute, parameter, norm or embedding, or with a dim an "
            "argument of its forward",
            remedy=nearest(name.rpartition(".")[2], known) + " Where some models lack it, end its name with a ?",
        )

    def _columns(self, linears: Projections) -> dict[str, dict[str, Any]]:
        """How each of the projections but the one at the end is cut."""
        layout, q_unit = self.layout, None
        expand = layout.expand(self.layer.axis.rank)
        columns: dict[str, dict[str, Any]] = {}
        if linears.q:
            q_unit = self._unit(linears.q, layout.num_heads, None if self.role.inputs.from_inside else layout.head_dim)
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
        return unit_of(f"{self.layer.path}.{self._path(name)}", self._features(name), count, expected)

    def _features(self, name: str) -> int:
        return self.layer.features(self._path(name), out=True)

    def _fused(self, linears: Projections, name: str) -> Split:
        layout, features, has_q = self.layout, self._features(name), name == linears.qkv
        heads, kv_heads, d = layout.num_heads, layout.num_kv_heads, layout.head_dim
        sizes = [heads * d] * has_q + [kv_heads * d] * 2
        if features != sum(sizes) and not (linears.interleaved and name in self.role.inputs.from_inside):
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
                rule="In a fused projection every rank's query heads read a whole number of KV heads each",
                remedy=f"Use a tensor size that divides {kv_heads} or {heads}",
            )
        if linears.interleaved:
            self._unit(name, kv_heads)
            return layout.grouped_split(has_q, features)
        part = layout.partition
        splits = [part.query_split(), part.kv_split(), part.kv_split()][-len(sizes) :] * layout.partitions
        return Split.stack(splits, [size // layout.partitions for size in sizes] * layout.partitions)


def _present(said: Projections, at: str, layer: nn.Module) -> Projections:
    """The projections that this layer's module ``at`` has: what ends in ``?`` and is not there is left out."""

    def there(name: str | None) -> str | None:
        if name is None or not name.endswith("?"):
            return name
        return name[:-1] if find(layer, relative(at, name[:-1])) is not None else None

    return replace(said, q=there(said.q), k=there(said.k), v=there(said.v), qkv=there(said.qkv), kv=there(said.kv))
