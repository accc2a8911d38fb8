"""The table of a model that was not sharded, and is trained over data ranks alone."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from shardformer.comm.collectives import broadcast
from shardformer.errors import ConfigError
from shardformer.layout.reduction import reduction_of
from shardformer.layout.spec import ShardSpec
from shardformer.layout.state import ROOT, Entry, ShardedState, check_module
from shardformer.layout.stream import Place, StreamLayout
from shardformer.mesh.context import ParallelContext
from shardformer.optim.torch_clipping import lead_clipping_here
from shardformer.optim.torch_optimizers import lead_optimizers_here
from shardformer.reduce.bucket import Gradient
from shardformer.reduce.buckets import GradientReducer
from shardformer.reduce.wrappers import check_ddp, check_parameters, refuse_wrappers

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def table_of(model: nn.Module, context: ParallelContext | None) -> ShardedState:
    """The table of a model that was sharded; a new one of any other. Raises ConfigError for one that is wrapped."""
    check_module(model)
    wrapper = next((name for m in model.modules() for c in type(m).__mro__ if (name := c.__name__) in WRAPPERS), None)
    if wrapper is not None:
        raise ConfigError(
            f"The model is wrapped in {wrapper}",
            rule="zero agrees on the gradients itself",
            remedy="Give zero the model without the wrapper, and use that in the loop",
        )
    if isinstance(table := model.__dict__.get(ROOT), ShardedState):
        if context is not None and context is not table.context:
            raise ConfigError(
                "zero was given a context beside a model that was sharded over another",
                rule="A sharded model knows its grid",
                remedy="Leave context out",
            )
        return table
    return _new_table(model, context or _all_as_data())


def _all_as_data() -> ParallelContext:
    if dist.is_available() and dist.is_initialized():
        return ParallelContext.from_world({"data": dist.get_world_size()})
    return ParallelContext.of({})


def _new_table(model: nn.Module, context: ParallelContext) -> ShardedState:
    """All parameters whole on every rank, with the values of the first one."""
    if any(axis.size > 1 for name, axis in context.axes.items() if name != "data"):
        raise ConfigError(
            f"This {type(model).__name__} is not sharded, and the grid is {context}",
            rule="Without sharding there are data ranks alone",
            remedy="Call shardformer.shard_model(model, context=context) first",
        )
    lead_clipping_here()
    lead_optimizers_here()
    table, stream = ShardedState(context), StreamLayout()
    for name, param in model.named_parameters():
        spec = ShardSpec(param.shape)
        table.entries.append(Entry(name, param, spec, reduction_of(spec, stream, Place.OUTSIDE, context.sizes)))
    if context.data.size > 1:
        for tensor in [*model.parameters(), *model.buffers()]:
            broadcast(tensor.detach(), context.data)
        table.reducers = [GradientReducer([Gradient(e, context.data, table.coords) for e in table.entries])]
    table.attach(model)

    if context.data.size > 1:
        refuse_wrappers(model, context)

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        check_ddp(model, context)
        check_parameters(model, table)
        for reducer in table.reducers:
            reducer.refresh()

    model.register_forward_pre_hook(before)
    return table
