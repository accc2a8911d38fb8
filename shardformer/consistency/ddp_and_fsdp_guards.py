"""Checks that reject wrapping a sharded model in DDP, DataParallel or FSDP, and adding parameters to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import nn

from shardformer.errors import ConfigError
from shardformer.layout.sharding_metadata import ShardingMetadata
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.torch_compat import COMPOSABLE_REGISTRY, active_ddp_module


@dataclass(frozen=True)
class DDPGuard:
    """Module attribute that raises ConfigError when DistributedDataParallel wraps a sharded model.

    DDP reads this attribute for the names of parameters to ignore, before it broadcasts rank 0's parameters.
    """

    context: ParallelContext

    def __iter__(self) -> Iterator[str]:
        raise _wrapper_error("DistributedDataParallel", self.context)


class FSDPGuard(dict[str, Any]):
    """Module attribute that raises ConfigError when FSDP, ``fully_shard`` or ``replicate`` wraps a sharded model."""

    def __init__(self, context: ParallelContext) -> None:
        super().__init__()
        self.context = context

    def __contains__(self, name: object) -> bool:
        if name in ("fully_shard", "replicate"):
            raise _wrapper_error("FullyShardedDataParallel, fully_shard or replicate", self.context)
        return super().__contains__(name)


def install_wrapper_guards(model: nn.Module, context: ParallelContext) -> None:
    """Make DDP, DataParallel and FSDP raise ConfigError when they wrap a sharded model."""
    model.__dict__["_ddp_params_and_buffers_to_ignore"] = DDPGuard(context)
    model.__dict__["_replicate_for_data_parallel"] = partial(_raise_replicated, context)
    for module in model.modules():
        module.__dict__[COMPOSABLE_REGISTRY] = FSDPGuard(context)


def _raise_replicated(context: ParallelContext) -> NoReturn:
    raise _wrapper_error("DataParallel", context)


def check_ddp(model: nn.Module, context: ParallelContext) -> None:
    """Raise ConfigError if the running forward is that of a DistributedDataParallel around the sharded model."""
    outer = active_ddp_module()
    if outer is None or all(axis.size == 1 for axis in context.axes.values()):
        return
    if any(module is model for module in outer.modules()):
        raise _wrapper_error("DistributedDataParallel", context)


def check_no_new_parameters(model: nn.Module, state: ShardingMetadata) -> None:
    """Raise ConfigError if parameters were added to the model after it was sharded."""
    known = state.by_param()
    new = [name for name, p in model.named_parameters() if id(p) not in known]
    if new:
        raise ConfigError(
            f"{len(new)} parameters were added to {type(model).__name__} after it was sharded, such as {new[0]}",
            remedy="Add heads and adapters first, then shard the model",
        )


def _wrapper_error(wrapper: str, context: ParallelContext) -> ConfigError:
    return ConfigError(
        f"{wrapper} does not work with a model that is sharded over {context}",
        rule="It assumes that all processes have the same parameters, and each process has a different shard",
        remedy="Remove the wrapper: shard_model(model, data=...) averages gradients between data ranks",
    )
