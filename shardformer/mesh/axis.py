"""One direction of the grid of processes, as this process sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from shardformer.errors import ConfigError, LaunchError


@dataclass(frozen=True, eq=False)
class Traffic:
    """What this process handed to collectives; ``shardformer.comm.recorder`` fills and reads it."""

    calls: list[Any] = field(default_factory=list)
    enabled: list[bool] = field(default_factory=lambda: [False])


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis of the grid as this process sees it: its size, this process's rank on it, and the group along it.

    ``group`` is a process group (or a ``ThreadGroup``, which plays one), or None when the axis has size 1; collectives
    over such an axis do nothing.
    """

    name: str
    size: int = 1
    rank: int = 0
    group: Any = None
    ranks: tuple[int, ...] = (0,)
    traffic: Traffic = field(default_factory=Traffic)

    @classmethod
    def of(cls, group: Axis | dist.ProcessGroup | None, name: str = "tensor") -> Axis:
        """An axis from a process group; None means all processes, or a single one when none were launched.

        Raises LaunchError when this process is not in the group, ConfigError for what is not a group.
        """
        if isinstance(group, Axis):
            return group
        if group is None:
            if not dist.is_available() or not dist.is_initialized():
                return cls(name)
            group = dist.group.WORLD
        non_member: Any = dist.GroupMember.NON_GROUP_MEMBER
        lacks = group is non_member
        if not lacks and not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"The group of the {name} axis is {group!r:.80}",
                rule="It is a process group of torch.distributed, or None for all processes",
                remedy="Make it with torch.distributed.new_group(ranks), on all processes, or leave it out",
            )
        if lacks or dist.get_rank(group) < 0:
            raise LaunchError(
                f"The process group given for the {name} axis lacks this process (global rank {dist.get_rank()})",
                rule=f"Every process that shards a model is a member of its own {name} group",
                remedy="Give each process the group that it belongs to, or let launch_from_torch(tensor=...) build it",
            )
        ranks = tuple(dist.get_process_group_ranks(group))
        size = len(ranks)
        return cls(name, size, dist.get_rank(group), group if size > 1 else None, ranks)

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        return self  # a process group cannot be copied, and a copied model still lives in the same group

    def __str__(self) -> str:
        return f"{self.name} {self.rank}/{self.size}"
