"""Roles: what a model is made of, as a table. ``RolePolicy`` turns it into descriptions of modules.

Paths in a table are relative: a stack's to the base model (so one table serves every head class), an attention's or an
MLP's to one layer, and what it holds to that module; a leading dot makes such a path relative to the layer again
(BERT keeps the output projection beside the attention). A trailing ``?`` marks what some of the models lack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from torch import nn

from shardformer.errors import ConfigError, PolicyError, nearest
from shardformer.layers.embedding import Embedding1D, VocabParallelEmbedding1D
from shardformer.layers.linear import Linear1D_Col, Linear1D_Row, VocabParallelLMHead1D
from shardformer.layout import Split
from shardformer.policies.heads import HeadLayout
from shardformer.policies.paths import existing, features_of, find, join, linear_at, module_at, no_match, relative
from shardformer.policies.policy import (
    BlockDescription,
    ModuleKey,
    ModulePolicyDescription,
    Policy,
    StackDescription,
    SubModuleReplacementDescription,
)

COUNTED = ("heads", "kv_heads", "groups", "width")


@dataclass(frozen=True)
class Attention:
    """An attention of a layer. Name the projections it has: q, k and v, or a fused qkv, or q and a fused kv.

    Args:
        at: path of the module; its first tensor argument is what enters.
        out: the output projection.
        q, k, v, qkv, kv: the projections; fused ones lie behind each other (q, then k, then v).
        interleaved: the fused ones lie head by head instead: q, k, v of head 0, then of head 1, ...
        reads_context: k and v read another stack's states (cross-attention).
        attributes: attribute of the module -> what it counts: "heads", "kv_heads", "groups" (query heads a KV head)
            or "width" (heads times head dim). Only those that the forward reads.
        tables: embeddings with one column a head (relative position bias).
        entry: the module whose first tensor argument enters, where that is not the one at ``at``: the first of the
            projections, for an attention that adds its residual itself.
        num_heads, num_kv_heads: these numbers, or the config's fields that hold them, where not the policy's.
        optional: whether some models lack this attention.
    """

    at: str
    out: str
    q: str | None = None
    k: str | None = None
    v: str | None = None
    qkv: str | None = None
    kv: str | None = None
    interleaved: bool = False
    reads_context: bool = False
    attributes: Mapping[str, str] = field(default_factory=dict)
    tables: Sequence[str] = ()
    entry: str | None = None
    num_heads: int | str | None = None
    num_kv_heads: int | str | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        for attribute, kind in self.attributes.items():
            if kind not in COUNTED:
                raise PolicyError(
                    f"attributes={{{attribute!r}: {kind!r}}} of the attention {self.at!r}",
                    rule=f"An attribute counts {', '.join(COUNTED)}",
                    remedy=nearest(str(kind), COUNTED),
                )


@dataclass(frozen=True)
class MLP:
    """An MLP of a layer.

    Args:
        at: path of the module; its first tensor argument is what enters.
        up: the linears that read the input (gate and up), of which those with a ``?`` may be lacking.
        down: the linear at the exit.
        fused: how many blocks lie behind each other in each of ``up`` (2 for a fused gate and up).
        optional: whether some models lack it.
    """

    at: str
    up: str | Sequence[str]
    down: str
    fused: int = 1
    optional: bool = False


@dataclass(frozen=True)
class Stack:
    """A stack of equal layers.

    Args:
        layers: path of the ModuleList.
        blocks: the attentions and MLPs of one layer.
        final_norm: the norm behind the last layer.
        context: (path of a module, name of its argument): the states that ``reads_context`` attentions read.
        optional: whether some models lack it.
    """

    layers: str
    blocks: Sequence[Attention | MLP]
    final_norm: str | None = None
    context: tuple[str, str] | None = None
    optional: bool = False


class RolePolicy(Policy):
    """A policy that is a table of roles. See ``shardformer/policies/models`` for tables.

    Class attributes:
        stack: the model's stack or stacks.
        embeddings: embeddings over the vocabulary, relative to the base model.
        head: the language model's head, relative to the whole model; head classes without one need no word.
        whole: what stays whole on purpose although it is large or inside a layer, relative to the base model.
        num_heads, num_kv_heads: these numbers, or the names of the config's fields that hold them.
    """

    stack: Stack | Sequence[Stack] = ()
    embeddings: str | Sequence[str] = ()
    head: str | Sequence[str] = ()
    whole: Sequence[str] = ()
    num_heads: int | str = "num_attention_heads"
    num_kv_heads: int | str = "num_key_value_heads"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = dir(RolePolicy)
        for name in vars(cls):
            close = get_close_matches(name, [n for n in known if n[:1] != "_"], cutoff=0.8)
            if name not in known and close:
                raise PolicyError(
                    f"{cls.__name__} says {name!r}",
                    rule="A table has stack, embeddings, head, whole, num_heads and num_kv_heads",
                    remedy=f"Did you mean {close[0]!r}? A name that is less like it is left alone",
                )

    @property
    def base(self) -> str:
        """Path of the base model inside the model that was given; empty when it is the base model itself."""
        prefix = getattr(self.model, "base_model_prefix", "")
        return prefix if prefix and isinstance(getattr(self.model, prefix, None), nn.Module) else ""

    def module_policy(self) -> Mapping[ModuleKey, ModulePolicyDescription]:
        out: dict[ModuleKey, ModulePolicyDescription] = {"": self._outside()}
        for stack in self._present_stacks():
            path = join(self.base, stack.layers)
            layer = module_at(self.model, f"{path}.0")
            found = [self._block(block, layer, path) for block in stack.blocks]
            present = [description for description in found if description is not None]
            out[f"{path}.*"] = _merged(present)
        return out

    def stacks(self) -> list[StackDescription]:
        return [
            StackDescription(
                join(self.base, s.layers),
                join(self.base, s.final_norm) if s.final_norm else None,
                (join(self.base, s.context[0]), s.context[1]) if s.context else None,
            )
            for s in self._present_stacks()
        ]

    def replicated(self) -> list[str] | None:
        base = module_at(self.model, self.base)
        known = {name for name, _ in [*base.named_modules(), *base.named_parameters()]}
        for path in self.whole:
            if not path.endswith("?") and path not in known:
                raise no_match(self.base, path, base)
        return [join(self.base, path.rstrip("?")) for path in self.whole]

    def _present_stacks(self) -> list[Stack]:
        stacks = [self.stack] if isinstance(self.stack, Stack) else list(self.stack)
        return [s for s in stacks if not s.optional or find(self.model, join(self.base, s.layers)) is not None]

    def _outside(self) -> ModulePolicyDescription:
        embeddings = [self.embeddings] if isinstance(self.embeddings, str) else self.embeddings
        heads = [self.head] if isinstance(self.head, str) else self.head
        for path in embeddings:
            if not path.endswith("?") and find(self.model, join(self.base, path)) is None:
                raise no_match(self.base, path, module_at(self.model, self.base))
        subs = [
            SubModuleReplacementDescription(
                join(self.base, path.rstrip("?")), VocabParallelEmbedding1D, ignore_if_not_exist=path.endswith("?")
            )
            for path in embeddings
        ]
        subs += [SubModuleReplacementDescription(p, VocabParallelLMHead1D, ignore_if_not_exist=True) for p in heads]
        return ModulePolicyDescription(sub_module_replacement=subs)

    def _block(self, block: Attention | MLP, layer: nn.Module, path: str) -> ModulePolicyDescription | None:
        at = find(layer, block.at)
        if at is None:
            if block.optional:
                return None
            raise no_match(f"{path}.*", block.at, layer)
        if isinstance(block, MLP):
            return self._mlp(block, layer, path)
        return self._attention(block, layer, path)

    def _mlp(self, mlp: MLP, layer: nn.Module, path: str) -> ModulePolicyDescription:
        ups = existing([mlp.up] if isinstance(mlp.up, str) else mlp.up, mlp.at, layer, path)
        down = relative(mlp.at, mlp.down)
        width = features_of(linear_at(layer, down, path), out=False)
        for up in ups:
            features = features_of(linear_at(layer, up, path), out=True)
            if features != mlp.fused * width:
                raise PolicyError(
                    f"{path}.*.{up} has {features} output features, {path}.*.{down} has {width} input features",
                    rule="What the first linears of an MLP give, the last one takes",
                    remedy="Correct the paths, or give fused=2 where a gate and what it gates lie behind each other",
                )
        if width < self.axis.size:
            raise ConfigError(
                f"A tensor size of {self.axis.size} is more than the {width} features of {path}.*.{ups[0]}",
                rule="Every tensor rank computes at least one of them",
                remedy=f"Use a tensor size of {width} or less",
            )
        split = Split.fused([width] * mlp.fused, self.axis.size)
        row = Split.even(width, self.axis.size)
        description = _block_description(mlp.at, {up: {"split": split} for up in ups}, {}, down, row)
        for block in description.blocks or []:
            block.activated = mlp.fused == 1
        return description

    def _attention(self, attention: Attention, layer: nn.Module, path: str) -> ModulePolicyDescription:
        def full(name: str | None) -> str | None:
            return None if name is None else relative(attention.at, name)

        layout = self._head_layout(attention, layer, path)
        rank = self.axis.rank
        fused_sizes = [layout.num_heads * layout.head_dim] + [layout.num_kv_heads * layout.head_dim] * 2
        splits = [layout.query_split, layout.kv_split, layout.kv_split]
        expand = layout.expand(rank)
        kv: dict[str, Any] = {"split": layout.kv_split}
        if expand is not None:
            kv["expand"] = (layout.head_dim, expand)
        columns: dict[str, dict[str, Any]] = {}
        if attention.q:
            columns[full(attention.q) or ""] = {"split": layout.query_split}
        if attention.k and attention.v:
            columns[full(attention.k) or ""] = columns[full(attention.v) or ""] = kv
        for name, first in ((attention.qkv, 0), (attention.kv, 1)):
            if name is not None:
                columns[full(name) or ""] = {
                    "split": self._fused_split(attention, layout, splits[first:], fused_sizes[first:], path)
                }
        context = {full(n) or "" for n in (attention.k, attention.v, attention.kv) if n and attention.reads_context}
        entering = {name: kwargs for name, kwargs in columns.items() if name not in context}
        others = {name: kwargs for name, kwargs in columns.items() if name in context}
        entry = full(attention.entry) or attention.at
        description = _block_description(entry, entering, others, full(attention.out) or "", layout.query_split)
        values = layout.values(rank)
        description.attribute_replacement = {
            f"{attention.at}.{name}": values[kind] for name, kind in attention.attributes.items()
        }
        description.sub_module_replacement = [
            *(description.sub_module_replacement or []),
            *(
                SubModuleReplacementDescription(
                    relative(attention.at, table.rstrip("?")),
                    Embedding1D,
                    {"split": layout.table_split, "gather_output": False},
                    ignore_if_not_exist=table.endswith("?"),
                )
                for table in attention.tables
            ),
        ]
        return description

    def _fused_split(
        self, attention: Attention, layout: HeadLayout, splits: list[Split], sizes: list[int], path: str
    ) -> Split:
        if layout.num_kv_heads != layout.num_heads and any(layout.expand(r) for r in range(layout.ranks)):
            raise ConfigError(
                f"A tensor size of {layout.ranks} cuts the {layout.num_kv_heads} KV heads of {path}.*.{attention.at} "
                "unevenly",
                rule="In a fused projection every rank's query heads read a whole number of KV heads each",
                remedy=f"Use a tensor size that divides {layout.num_kv_heads} or {layout.num_heads}",
            )
        if attention.interleaved:
            per_head = len(splits) * layout.head_dim
            return Split.even(layout.num_heads * per_head, layout.ranks, unit=per_head)
        return Split.stack(splits, sizes)

    def _head_layout(self, attention: Attention, layer: nn.Module, path: str) -> HeadLayout:
        num_heads = self._count(said := attention.num_heads or self.num_heads)
        if num_heads is None:
            config = getattr(self.model, "config", None)
            name = f"{type(self).__name__}.num_heads"
            raise PolicyError(
                f"{name} is {said!r}, and "
                + ("the config has no such field" if config is not None else "the model has no config"),
                rule="Attention is cut by whole heads, so a policy says how many there are",
                remedy="Set it to the number, such as num_heads = 12, or to the name of the config's field. "
                + (nearest(str(said), [n for n in vars(config) if "head" in n]) if config else ""),
            )
        num_kv_heads = self._count(attention.num_kv_heads or self.num_kv_heads) or num_heads
        where, at = f"{path}.*.{attention.at}", attention.at
        width = features_of(linear_at(layer, relative(at, attention.out), path), out=False)
        _check_heads(where, attention.out, width, num_heads, 1)
        head_dim = width // num_heads
        if not attention.interleaved:
            kv = num_kv_heads
            counts = {attention.q: num_heads, attention.k: kv, attention.v: kv, attention.kv: 2 * kv}
            for given, count in {**counts, attention.qkv: num_heads + 2 * kv}.items():
                if given is not None:
                    features = features_of(linear_at(layer, relative(at, given), path), out=True)
                    _check_heads(where, given, features, count, head_dim)
        return HeadLayout(num_heads, num_kv_heads, head_dim, self.axis.size)

    def _count(self, said: int | str) -> int | None:
        count = getattr(getattr(self.model, "config", None), said, None) if isinstance(said, str) else said
        return count if isinstance(count, int) and count > 0 else None


def _check_heads(where: str, name: str, features: int, num_heads: int, head_dim: int) -> None:
    if features % num_heads or (head_dim > 1 and features != num_heads * head_dim):
        each = f" of {head_dim} features" if head_dim > 1 else ""
        raise PolicyError(
            f"{where}.{name.lstrip('.')} has {features} features, which are not {num_heads} heads{each}",
            rule="All heads of an attention are of one size, in q, k, v and the output projection",
            remedy="Correct num_heads, num_kv_heads or the paths in the policy",
        )


def _block_description(
    at: str, entering: Mapping[str, dict[str, Any]], others: Mapping[str, dict[str, Any]], row: str, row_split: Split
) -> ModulePolicyDescription:
    subs = [
        SubModuleReplacementDescription(name, Linear1D_Col, dict(kwargs))
        for name, kwargs in {**entering, **others}.items()
    ]
    subs.append(SubModuleReplacementDescription(row, Linear1D_Row, {"split": row_split}))
    block = BlockDescription(at, list(entering), row, list(others))
    return ModulePolicyDescription(sub_module_replacement=subs, blocks=[block])


def _merged(descriptions: Sequence[ModulePolicyDescription]) -> ModulePolicyDescription:
    out = ModulePolicyDescription({}, [], [], {}, [])
    for d in descriptions:
        assert out.attribute_replacement is not None and out.sub_module_replacement is not None
        assert out.blocks is not None
        out.attribute_replacement.update(d.attribute_replacement or {})
        out.sub_module_replacement += d.sub_module_replacement or []
        out.blocks += d.blocks or []
    return out
