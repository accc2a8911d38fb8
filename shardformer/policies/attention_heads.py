"""Which attention heads each tensor rank computes, and which KV heads it needs for them."""

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
    """The heads of one attention over ``ranks`` tensor ranks.

    Query heads are cut as evenly as can be, in whole groups where there are KV heads enough. With fewer KV heads than
    ranks, a KV head is held by every rank whose query heads read it. Six query heads on two KV heads over four ranks:

        rank      0      1      2   3
        query    0 1    2 3     4   5
        KV       0      0 1     1   1

    Where the heads lie in several ``partitions``, one behind the other, each of them is cut so.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    ranks: int
    partitions: int = 1

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads or self.num_kv_heads % self.partitions:
            raise ConfigError(
                f"{self.num_heads} query heads on {self.num_kv_heads} KV heads" + self._in_partitions,
                rule="Every KV head serves as many query heads as another, and every partition has as many heads",
                remedy="Check the head counts in the model's config",
            )
        if (most := self.num_heads // self.partitions) < self.ranks:
            fits = ", ".join(str(n) for n in range(1, most + 1))
            raise ConfigError(
                f"A tensor size of {self.ranks} is more than the {most} attention heads" + self._in_partitions,
                remedy=f"Use a tensor size of {fits}" if most > 1 else "Leave this model whole: tensor=1",
            )

    @property
    def _in_partitions(self) -> str:
        return f" in {self.partitions} partitions" if self.partitions > 1 else ""

    @cached_property
    def partition(self) -> HeadLayout:
        """The layout of one partition."""
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
        """Where the query heads of each rank begin and end, in every partition."""
        if (kv_heads := self.num_kv_heads // self.partitions) >= self.ranks:
            return [b * self.group for b in even_bounds(kv_heads, self.ranks)]
        return even_bounds(self.num_heads // self.partitions, self.ranks)

    def heads(self, rank: int) -> int:
        return self.partitions * len(self._own(rank))

    def _read(self, rank: int) -> list[int]:
        """For each local query head, the KV head that it reads."""
        group = self.group
        return [h // group for h in self._own(rank)]

    def _own(self, rank: int) -> range:
        return range(self.query_bounds[rank], self.query_bounds[rank + 1])

    def kv_heads_of_rank(self, rank: int) -> list[int]:
        """The KV heads that this rank holds."""
        return sorted(set(self._read(rank)))

    def expand(self, rank: int) -> list[int] | None:
        """Which held KV head each local query head reads, where the forward's even repetition would go wrong."""
        read, held = self._read(rank), self.kv_heads_of_rank(rank)
        if all(read.count(h) == read.count(held[0]) for h in held):
            return None
        return [partition * len(held) + held.index(h) for partition in range(self.partitions) for h in read]

    def seen(self, rank: int) -> list[int]:
        """The KV heads that the forward of this rank sees, in its order."""
        own = self.kv_heads_of_rank(rank) if self.expand(rank) is None else self._read(rank)
        each = self.num_kv_heads // self.partitions
        return [partition * each + h for partition in range(self.partitions) for h in own]

    def kv_heads(self, rank: int) -> int:
        """How many KV heads the forward sees."""
        return self.heads(rank) if self.expand(rank) is not None else self.partitions * len(self.kv_heads_of_rank(rank))

    def query_split(self, unit: int | None = None) -> Split:
        """Features of which each query head has ``unit``, by default the head dim."""
        return self._split(pairwise(self.query_bounds), unit)

    def kv_split(self, unit: int | None = None) -> Split:
        """Features of which each KV head has ``unit``."""
        held = [self.kv_heads_of_rank(r) for r in range(self.ranks)]
        return self._split([(h[0], h[-1] + 1) for h in held], unit)

    def _split(self, heads: Iterable[tuple[int, int]], unit: int | None) -> Split:
        """Every rank's heads, from one to before another, of each partition."""
        d = unit or self.head_dim
        partition = Split(tuple(((a * d, b * d),) for a, b in heads))
        return Split.stack([partition] * self.partitions, [partition.full] * self.partitions)

    def grouped_split(self, queries: bool, width: int) -> Split:
        """Features that lie by KV head: its query heads' (where ``queries``), its k, its v; ``width`` in all."""
        per_group = width // self.num_kv_heads
        if not queries:
            return self.kv_split(per_group)
        d, parts = per_group // (self.group + 2), []
        for rank in range(self.ranks):
            own: list[tuple[int, int]] = []
            for h in self.kv_heads_of_rank(rank):
                start, first = h * per_group, h * self.group
                mine = [i - first for i, read in zip(self._own(rank), self._read(rank), strict=True) if read == h]
                own += [(start + mine[0] * d, start + (mine[-1] + 1) * d)]
                own += [(start + self.group * d, start + per_group)]
            parts.append(tuple(own))
        return Split(tuple(parts))

    def parameter_split(self, path: str, full: Tensor, said: LocalAttr) -> dict[int, Split]:
        """How the dims of a parameter, or of a buffer, are cut of which one counts what is ``said``."""
        kind, dim = (said, None) if isinstance(said, str) else said
        if kind == "inside":
            return {}
        split = {"heads": self.query_split(1), "kv_heads": self.kv_split(1), "width": self.query_split()}[kind]
        dims = [d for d, n in enumerate(full.shape) if n == split.full] if dim is None else [dim % max(full.dim(), 1)]
        if len(dims) != 1 or full.shape[dims[0]] != split.full:
            raise PolicyError(
                f"{path} has the shape {tuple(full.shape)}, and local_attrs={said!r}",
                rule=f"One of its dims has the size of what it counts, here {split.full}",
                remedy=f"Name the dim too, ({kind!r}, dim), where several have that size, or correct what it counts",
            )
        return {dims[0]: split}

    def values(self, rank: int) -> dict[str, int]:
        """What an attribute of the attention module becomes, by what it counts."""
        heads, kv_heads = self.heads(rank), self.kv_heads(rank)
        return {"heads": heads, "kv_heads": kv_heads, "groups": heads // kv_heads, "width": heads * self.head_dim}


def features_per_head(path: str, features: int, count: int, expected: int | None = None) -> int:
    """How many of the features each of ``count`` heads has. Raises PolicyError where that is not ``expected``."""
    if features % count or features != count * (expected or features // count):
        of = f" of {expected} features" if expected and not features % count else ""
        raise PolicyError(
            f"{path} has {features} features, which are not {count} heads{of}",
            remedy="Correct num_heads, num_kv_heads or the paths in the policy",
        )
    return features // count
