"""ParallelModule: a module some of whose parameters are this rank's part of a full one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardformer.context import Axis
from shardformer.errors import ConfigError
from shardformer.layout import ShardSpec

GroupLike = Axis | dist.ProcessGroup | None


class ParallelModule(nn.Module, ABC):
    """Base of the layers that replace a module by its part on this rank.

    Beside each sharded parameter stands its layout, in ``shard_specs`` under the parameter's local name. Parameters
    keep their names, so a sharded model's state dict has the keys of the plain one.
    """

    def __init__(self, axis: Axis | None = None) -> None:
        super().__init__()
        self.axis = axis or Axis("tensor")
        self.shard_specs: dict[str, ShardSpec] = {}

    @classmethod
    @abstractmethod
    def from_native_module(cls, module: nn.Module, process_group: GroupLike = None, **kwargs: Any) -> nn.Module:
        """The parallel module that stands for ``module``, whose parameters hold the full values."""

    def hold(
        self, name: str, full: Tensor | None, spec: ShardSpec, shared: dict[int, nn.Parameter] | None = None
    ) -> None:
        """Registers this rank's part of ``full`` as parameter ``name`` with its layout.

        ``shared`` remembers parts already cut, by the identity of the full parameter, so tied weights stay tied.
        """
        if full is None:
            self.register_parameter(name, None)
            return
        part = None if shared is None else shared.get(id(full))
        if part is None:
            part = nn.Parameter(spec.slice(full, self.axis.rank), requires_grad=full.requires_grad)
            if shared is not None:
                shared[id(full)] = part
        self.register_parameter(name, part)
        self.shard_specs[name] = spec


def check_divides(what: str, size: int, axis: Axis) -> None:
    """Refuses a cut that leaves a rank with nothing."""
    if size < axis.size:
        raise ConfigError(
            f"{what}={size} cannot be cut into {axis.size} parts",
            rule="Every tensor rank holds at least one of them",
            remedy=f"Use a tensor size of {size} or less" if size > 1 else "Leave this layer whole",
        )
