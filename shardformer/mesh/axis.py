"""One direction of the grid of processes, as this process sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from shardformer.errors import ConfigError, LaunchError
from shardformer.mesh.processes import ProcessGroupTransport
from shardformer.mesh.traffic import Traffic
from shardformer.mesh.transport import NOBODY, Transport


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis of the grid as this process sees it: its size, this process's rank on it, and what carries along it.

    Args:
        ranks: global ranks along it.
        crosses_hosts: whether they sit on more than one host; None where that is not known.
    """

    name: str
    size: int = 1
    rank: int = 0
    transport: Transport = NOBODY
    ranks: tuple[int, ...] = (0,)
    traffic: Traffic = field(default_factory=Traffic)
    crosses_hosts: bool | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """torch's process group; None where the axis has size 1, or its ranks are threads."""
        return self.transport.group

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
        assert isinstance(group, dist.ProcessGroup)
        ranks = tuple(dist.get_process_group_ranks(group))
        transport = ProcessGroupTransport(group) if len(ranks) > 1 else NOBODY
        return cls(name, len(ranks), dist.get_rank(group), transport, ranks)

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        return self  # a process group cannot be copied, and a copied model still lives in the same group

    def __str__(self) -> str:
        return f"{self.name} {self.rank}/{self.size}"
