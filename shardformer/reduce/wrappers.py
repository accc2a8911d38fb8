"""Torch's own wrappers around a sharded model, which would take its parts for whole parameters: they are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.nn.parallel import DistributedDataParallel

from shardformer.errors import ConfigError
from shardformer.layout.state import ShardedState
from shardformer.mesh.context import ParallelContext


@dataclass(frozen=True)
class RefusedByDDP:
    """What DistributedDataParallel reads of a module before it broadcasts rank 0's parameters over the others' parts.

    It asks for the names of parameters to leave alone; asking raises ConfigError.
    """

    context: ParallelContext

    def __iter__(self) -> Iterator[str]:
        raise _wrapped("DistributedDataParallel", self.context)


class RefusedByFSDP(dict[str, Any]):
    """Where FullyShardedDataParallel, ``fully_shard`` and ``replicate`` look whether a module is taken already."""

    def __init__(self, context: ParallelContext) -> None:
        super().__init__()
        self.context = context

    def __contains__(self, name: object) -> bool:
        if name in ("fully_shard", "replicate"):
            raise _wrapped("FullyShardedDataParallel, fully_shard or replicate", self.context)
        return super().__contains__(name)


def refuse_wrappers(model: nn.Module, context: ParallelContext) -> None:
    """Torch's data parallel wrappers raise ConfigError from now on, before they change anything."""
    model.__dict__["_ddp_params_and_buffers_to_ignore"] = RefusedByDDP(context)
    model.__dict__["_replicate_for_data_parallel"] = partial(_refuse_replicas, context)
    for module in model.modules():
        module.__dict__[REGISTRY_KEY] = RefusedByFSDP(context)


def _refuse_replicas(context: ParallelContext) -> NoReturn:
    raise _wrapped("DataParallel", context)


def check_ddp(model: nn.Module, context: ParallelContext) -> None:
    """In a forward: raises ConfigError when DistributedDataParallel stands around a module that holds the model."""
    outer = DistributedDataParallel._active_ddp_module
    if outer is None or all(axis.size == 1 for axis in context.axes.values()):
        return
    if any(module is model for module in outer.modules()):
        raise _wrapped("DistributedDataParallel", context)


def check_parameters(model: nn.Module, state: ShardedState) -> None:
    """Raises ConfigError when the model has parameters that were not there when it was sharded."""
    known = state.by_param()
    new = [name for name, p in model.named_parameters() if id(p) not in known]
    if new:
        raise ConfigError(
            f"{len(new)} parameters of this {type(model).__name__} came after it was sharded, such as {new[0]}",
            rule="Weights are compared, cut and their gradients agreed on between ranks when a model is sharded",
            remedy="Build the whole model first, with its new head or its adapters, and shard it then",
        )


def _wrapped(wrapper: str, context: ParallelContext) -> ConfigError:
    return ConfigError(
        f"{wrapper} around a model that is sharded over {context}",
        rule="It takes the parameters of all processes for the same ones; here each process has its own part of them",
        remedy="Leave it out: shard_model(model, data=...) agrees on gradients between data ranks during backward",
    )
