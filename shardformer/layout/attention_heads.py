"""Distribute attention heads over ranks, also if there are fewer KV heads than ranks, which then share a head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from torch import Tensor

from shardformer.errors import ConfigError, PolicyError
from shardformer.layout.shard_spec import Split, get_even_bounds


@dataclass(frozen=True)
class HeadLayout:
    """Assignment of an attention module's query heads and KV heads to the tensor-parallel ranks.

    Splits query heads as evenly as possible, in full groups if there are enough KV heads. With fewer KV heads than
    ranks, each KV head is replicated on all ranks whose query heads read it. Six query heads on two KV heads over four
    ranks:

        rank      0      1      2   3
        query    0 1    2 3     4   5
        KV       0      0 1     1   1

    If the heads are stored in several consecutive ``partitions``, each partition is split this way.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    ranks: int
    partitions: int = 1

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads or self.num_kv_heads % self.partitions:
            counts = range(self.partitions, self.num_heads + 1, self.partitions)
            fits = ", ".join(str(n) for n in counts if self.num_heads % n == 0) or f"a multiple of {self.partitions}"
            raise ConfigError(
                f"num_heads={self.num_heads} cannot be divided evenly among num_kv_heads={self.num_kv_heads}"
                + self._partitions_suffix,
                rule="If a config sets only one of the two numbers, the other one is the default of the model type.",
                remedy=f"Set the number of key-value heads in the model's config, num_key_value_heads, to {fits}.",
            )
        if (most := self.num_heads // self.partitions) < self.ranks:
            fits = ", ".join(str(n) for n in range(1, most + 1))
            raise ConfigError(
                f"A tensor size of {self.ranks} exceeds the {most} attention heads" + self._partitions_suffix,
                remedy=f"Use a tensor size of {fits}" if most > 1 else "Use tensor=1 for this model",
            )

    @property
    def _partitions_suffix(self) -> str:
        return f" in {self.partitions} partitions" if self.partitions > 1 else ""

    @cached_property
    def partition(self) -> HeadLayout:
        """The layout of the heads within one of the partitions, each of which has equally many heads."""
        n = self.partitions
        return replace(self, num_heads=self.num_heads // n, num_kv_heads=self.num_kv_heads // n, partitions=1)

    @cached_property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @cached_property
    def query_head_bounds(self) -> list[int]:
        """Head indices at which the query heads of each rank begin and end in one partition: ranks + 1 boundaries."""
        if (kv_heads := self.num_kv_heads // self.partitions) >= self.ranks:
            return [b * self.group for b in get_even_bounds(kv_heads, self.ranks)]
        return get_even_bounds(self.num_heads // self.partitions, self.ranks)

    def count_query_heads(self, rank: int) -> int:
        return self.partitions * len(self._get_query_head_range(rank))

    def _get_kv_head_per_query(self, rank: int) -> list[int]:
        """Return, for each query head of a rank, the index of the KV head that it uses."""
        return [head // self.group for head in self._get_query_head_range(rank)]

    def _get_query_head_range(self, rank: int) -> range:
        return range(self.query_head_bounds[rank], self.query_head_bounds[rank + 1])

    def get_stored_kv_heads(self, rank: int) -> list[int]:
        """Return the indices of the KV heads that a rank stores in one partition."""
        return sorted(set(self._get_kv_head_per_query(rank)))

    def map_local_kv_heads(self, rank: int) -> list[int] | None:
        """Return the local KV head for each query head of a rank, or None if the model can derive it.

        None means that the same number of query heads reads each KV head, so that repeating each KV head is correct.
        """
        read, stored = self._get_kv_head_per_query(rank), self.get_stored_kv_heads(rank)
        if all(read.count(h) == read.count(stored[0]) for h in stored):
            return None
        return [partition * len(stored) + stored.index(h) for partition in range(self.partitions) for h in read]

    def get_used_kv_heads(self, rank: int) -> list[int]:
        """Return the indices of the KV heads that a rank's forward pass reads, in the order in which it reads them."""
        own = (
            self.get_stored_kv_heads(rank)
            if self.map_local_kv_heads(rank) is None
            else self._get_kv_head_per_query(rank)
        )
        each = self.num_kv_heads // self.partitions
        return [partition * each + h for partition in range(self.partitions) for h in own]

    def count_kv_heads(self, rank: int) -> int:
        """Return the number of KV heads that the forward pass of a rank reads."""
        return len(self.get_used_kv_heads(rank))

    def get_query_split(self, unit: int | None = None) -> Split:
        """Return the split of a dimension that has ``unit`` features (default: the head dim) per query head."""
        return self._make_split(pairwise(self.query_head_bounds), unit)

    def get_kv_split(self, unit: int | None = None) -> Split:
        """Return the split of a dimension that has ``unit`` features (default: the head dim) per KV head."""
        stored = [self.get_stored_kv_heads(r) for r in range(self.ranks)]
        return self._make_split([(h[0], h[-1] + 1) for h in stored], unit)

    def _make_split(self, heads: Iterable[tuple[int, int]], unit: int | None) -> Split:
        d = unit or self.head_dim
        partition = Split(tuple(((a * d, b * d),) for a, b in heads))
        return Split.stack([partition] * self.partitions, [partition.full] * self.partitions)

    def get_grouped_split(self, queries: bool, width: int) -> Split:
        """Return the split of a fused qkv or kv projection whose features are grouped by KV head.

        Args:
            queries: whether each group contains the query heads of the KV head, before its k and v.
            width: number of features.
        """
        per_group = width // self.num_kv_heads
        if not queries:
            return self.get_kv_split(per_group)
        d, parts = per_group // (self.group + 2), []
        for rank in range(self.ranks):
            own: list[tuple[int, int]] = []
            for h in self.get_stored_kv_heads(rank):
                start, first = h * per_group, h * self.group
                local = [
                    i - first
                    for i, read in zip(self._get_query_head_range(rank), self._get_kv_head_per_query(rank), strict=True)
                    if read == h
                ]
                own += [(start + local[0] * d, start + (local[-1] + 1) * d)]
                own += [(start + self.group * d, start + per_group)]
            parts.append(tuple(own))
        return Split(tuple(parts))

    def get_parameter_split(self, path: str, full: Tensor, counted: str | tuple[str, int]) -> dict[int, Split]:
        """Return the split of a parameter or buffer that ``local_attrs`` lists, as a dict from dims to splits."""
        kind, dim = (counted, None) if isinstance(counted, str) else counted
        if kind == "inside":
            return {}
        split = {"heads": self.get_query_split(1), "kv_heads": self.get_kv_split(1), "width": self.get_query_split()}[
            kind
        ]
        dims = [d for d, n in enumerate(full.shape) if n == split.full] if dim is None else [dim % max(full.dim(), 1)]
        if len(dims) != 1 or full.shape[dims[0]] != split.full:
            raise PolicyError(
                f"{path} has the shape {tuple(full.shape)}, but local_attrs={counted!r} must match exactly one dim "
                f"of size {split.full}.",
                remedy=f"If several dims have that size, pass ({kind!r}, dim). Otherwise replace {kind!r}.",
            )
        return {dims[0]: split}

    def get_local_attr_values(self, rank: int) -> dict[str, int]:
        """Return the values that ``local_attrs`` can assign on a rank, by name: heads, kv_heads, groups and width."""
        heads, kv_heads = self.count_query_heads(rank), self.count_kv_heads(rank)
        return {"heads": heads, "kv_heads": kv_heads, "groups": heads // kv_heads, "width": heads * self.head_dim}


def get_features_per_head(path: str, features: int, num_heads: int, expected: int | None = None) -> int:
    """Return the number of features of each head in a projection.

    Raises PolicyError if the heads do not divide the features, or the number is not ``expected``.
    """
    if features % num_heads or features != num_heads * (expected or features // num_heads):
        of = f" of {expected} features each" if expected and not features % num_heads else ""
        raise PolicyError(
            f"{path} has {features} features, which do not match {num_heads} heads{of}.",
            remedy="Correct num_heads, num_kv_heads or the paths in the policy.",
        )
    return features // num_heads
