"""Distribution of attention heads and KV heads over tensor parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from torch import Tensor

from shardformer.errors import ConfigError, PolicyError
from shardformer.layout.shard_spec import Split, even_bounds
from shardformer.policies.roles import LocalAttr


@dataclass(frozen=True)
class HeadLayout:
    """Distribution of the heads of one attention over ``ranks`` tensor parallel ranks.

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
            raise ConfigError(
                f"num_heads={self.num_heads} cannot be divided evenly among num_kv_heads={self.num_kv_heads}"
                + self._in_partitions,
                remedy="Check the head counts in the model's config",
            )
        if (most := self.num_heads // self.partitions) < self.ranks:
            fits = ", ".join(str(n) for n in range(1, most + 1))
            raise ConfigError(
                f"A tensor size of {self.ranks} exceeds the {most} attention heads" + self._in_partitions,
                remedy=f"Use a tensor size of {fits}" if most > 1 else "Use tensor=1 for this model",
            )

    @property
    def _in_partitions(self) -> str:
        return f" in {self.partitions} partitions" if self.partitions > 1 else ""

    @cached_property
    def partition(self) -> HeadLayout:
        """The distribution of one partition."""
        return replace(
            self,
            num_heads=self.num_heads // self.partitions,
            num_kv_heads=self.num_kv_heads // self.partitions,
            partitions=1,
        )

    @cached_property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @cached_property
    def query_bounds(self) -> list[int]:
        """Boundaries of each rank's query heads, in every partition."""
        if (kv_heads := self.num_kv_heads // self.partitions) >= self.ranks:
            return [b * self.group for b in even_bounds(kv_heads, self.ranks)]
        return even_bounds(self.num_heads // self.partitions, self.ranks)

    def heads(self, rank: int) -> int:
        return self.partitions * len(self._own(rank))

    def _read(self, rank: int) -> list[int]:
        """Return the KV head that each local query head reads."""
        group = self.group
        return [h // group for h in self._own(rank)]

    def _own(self, rank: int) -> range:
        return range(self.query_bounds[rank], self.query_bounds[rank + 1])

    def kv_heads_of_rank(self, rank: int) -> list[int]:
        """Return the KV heads that this rank stores."""
        return sorted(set(self._read(rank)))

    def expand(self, rank: int) -> list[int] | None:
        """Return the index of the KV head for each local query head; None if the forward's even repetition is right."""
        read, held = self._read(rank), self.kv_heads_of_rank(rank)
        if all(read.count(h) == read.count(held[0]) for h in held):
            return None
        return [partition * len(held) + held.index(h) for partition in range(self.partitions) for h in read]

    def seen(self, rank: int) -> list[int]:
        """Return the KV heads that this rank's forward reads, in its order."""
        own = self.kv_heads_of_rank(rank) if self.expand(rank) is None else self._read(rank)
        each = self.num_kv_heads // self.partitions
        return [partition * each + h for partition in range(self.partitions) for h in own]

    def kv_heads(self, rank: int) -> int:
        """Return the number of KV heads that this rank's forward reads."""
        return self.heads(rank) if self.expand(rank) is not None else self.partitions * len(self.kv_heads_of_rank(rank))

    def query_split(self, unit: int | None = None) -> Split:
        """Return the split of features with ``unit`` per query head (default: the head dim)."""
        return self._split(pairwise(self.query_bounds), unit)

    def kv_split(self, unit: int | None = None) -> Split:
        """Return the split of features with ``unit`` per KV head (default: the head dim)."""
        held = [self.kv_heads_of_rank(r) for r in range(self.ranks)]
        return self._split([(h[0], h[-1] + 1) for h in held], unit)

    def _split(self, heads: Iterable[tuple[int, int]], unit: int | None) -> Split:
        """Return the split for the (first, end) heads of each rank, repeated for each partition."""
        d = unit or self.head_dim
        partition = Split(tuple(((a * d, b * d),) for a, b in heads))
        return Split.stack([partition] * self.partitions, [partition.full] * self.partitions)

    def grouped_split(self, queries: bool, width: int) -> Split:
        """Return the split of ``width`` features grouped by KV head: its query heads (if ``queries``), its k, its v."""
        per_group = width // self.num_kv_heads
        if not queries:
            return self.kv_split(per_group)
        d, parts = per_group // (self.group + 2), []
        for rank in range(self.ranks):
            own: list[tuple[int, int]] = []
            for h in self.kv_heads_of_rank(rank):
                start, first = h * per_group, h * self.group
                local = [i - first for i, read in zip(self._own(rank), self._read(rank), strict=True) if read == h]
                own += [(start + local[0] * d, start + (local[-1] + 1) * d)]
                own += [(start + self.group * d, start + per_group)]
            parts.append(tuple(own))
        return Split(tuple(parts))

    def parameter_split(self, path: str, full: Tensor, counted: LocalAttr) -> dict[int, Split]:
        """Return dim -> split of a parameter or buffer, for its entry in ``local_attrs``."""
        kind, dim = (counted, None) if isinstance(counted, str) else counted
        if kind == "inside":
            return {}
        split = {"heads": self.query_split(1), "kv_heads": self.kv_split(1), "width": self.query_split()}[kind]
        dims = [d for d, n in enumerate(full.shape) if n == split.full] if dim is None else [dim % max(full.dim(), 1)]
        if len(dims) != 1 or full.shape[dims[0]] != split.full:
            raise PolicyError(
                f"{path} has the shape {tuple(full.shape)}, but local_attrs={counted!r} must match exactly one dim "
                f"of size {split.full}",
                remedy=f"If several dims have that size, name the dim as ({kind!r}, dim). Otherwise correct {kind!r}",
            )
        return {dims[0]: split}

    def values(self, rank: int) -> dict[str, int]:
        """Return the values of attributes on this rank: heads, kv_heads, groups and width."""
        heads, kv_heads = self.heads(rank), self.kv_heads(rank)
        return {"heads": heads, "kv_heads": kv_heads, "groups": heads // kv_heads, "width": heads * self.head_dim}


def features_per_head(path: str, features: int, count: int, expected: int | None = None) -> int:
    """Return the features per head. Raises PolicyError if they do not divide evenly, or are not ``expected``."""
    if features % count or features != count * (expected or features // count):
        of = f" of {expected} features each" if expected and not features % count else ""
        raise PolicyError(
            f"{path} has {features} features, which do not match {count} heads{of}",
            remedy="Correct num_heads, num_kv_heads or the paths in the policy",
        )
    return features // count
