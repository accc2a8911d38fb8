"""Which attention heads each tensor rank computes, and which KV heads it needs for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardformer.errors import ConfigError
from shardformer.layout import Split, even_bounds


@dataclass(frozen=True)
class HeadLayout:
    """The heads of one attention over ``ranks`` tensor ranks.

    Query heads are cut as evenly as can be, in whole groups where there are KV heads enough. With fewer KV heads than
    ranks, a KV head is held by every rank whose query heads read it. Six query heads on two KV heads over four ranks:

        rank      0      1      2   3
        query    0 1    2 3     4   5
        KV       0      0 1     1   1
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    ranks: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads on {self.num_kv_heads} KV heads",
                rule="Every KV head serves the same number of query heads",
                remedy="Check the head counts in the model's config",
            )
        if self.num_heads < self.ranks:
            fits = ", ".join(str(n) for n in range(1, self.num_heads + 1))
            raise ConfigError(
                f"A tensor size of {self.ranks} is more than the {self.num_heads} attention heads",
                rule="Every tensor rank computes at least one whole head",
                remedy=f"Use a tensor size of {fits}" if self.num_heads > 1 else "Leave this model whole: tensor=1",
            )

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @cached_property
    def query_bounds(self) -> list[int]:
        if self.num_kv_heads >= self.ranks:
            return [b * self.group for b in even_bounds(self.num_kv_heads, self.ranks)]
        return even_bounds(self.num_heads, self.ranks)

    def heads(self, rank: int) -> int:
        return self.query_bounds[rank + 1] - self.query_bounds[rank]

    def _read(self, rank: int) -> list[int]:
        """For each local query head, the KV head that it reads."""
        return [h // self.group for h in range(self.query_bounds[rank], self.query_bounds[rank + 1])]

    def held(self, rank: int) -> list[int]:
        """The KV heads that this rank holds."""
        return sorted(set(self._read(rank)))

    def expand(self, rank: int) -> list[int] | None:
        """Which held KV head each local query head reads, where the forward's even repetition would go wrong."""
        read, held = self._read(rank), self.held(rank)
        if all(read.count(h) == read.count(held[0]) for h in held):
            return None
        return [held.index(h) for h in read]

    def kv_heads(self, rank: int) -> int:
        """How many KV heads the forward sees."""
        return self.heads(rank) if self.expand(rank) is not None else len(self.held(rank))

    @property
    def query_split(self) -> Split:
        d = self.head_dim
        return Split(tuple(((a * d, b * d),) for a, b in zip(self.query_bounds, self.query_bounds[1:], strict=False)))

    @property
    def kv_split(self) -> Split:
        d = self.head_dim
        held = [self.held(r) for r in range(self.ranks)]
        return Split(tuple(((h[0] * d, (h[-1] + 1) * d),) for h in held))

    @property
    def table_split(self) -> Split:
        """A table with one column a query head."""
        return Split(tuple(((a, b),) for a, b in zip(self.query_bounds, self.query_bounds[1:], strict=False)))

    def values(self, rank: int) -> dict[str, int]:
        """What an attribute of the attention module becomes, by what it counts."""
        heads, kv_heads = self.heads(rank), self.kv_heads(rank)
        return {"heads": heads, "kv_heads": kv_heads, "groups": heads // kv_heads, "width": heads * self.head_dim}
