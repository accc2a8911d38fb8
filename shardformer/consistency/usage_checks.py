"""Checks that reject DDP and FSDP wrappers of a sharded model, and gradients that differ between ranks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from shardformer.comm.collective_call import wait_for_all_ranks
from shardformer.comm.collectives import all_gather_objects, checksum
from shardformer.consistency.rank_divergence import models_trained_by
from shardformer.errors import ConfigError
from shardformer.gradients.buckets import GradientSlot
from shardformer.gradients.reducer import GradientReducer
from shardformer.layout.sharding_metadata import METADATA_ATTRIBUTE, ShardingMetadata
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.torch_compat import COMPOSABLE_REGISTRY, active_ddp_module, current_graph_task_id, has_data
from shardformer.torch_patches import Patch, install, replace_attribute


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
    if (library := sys.modules.get("accelerate")) is not None:  # transformers' Trainer uses it, too
        kind, name = library.Accelerator, "prepare_model"
        install(ACCELERATE_PATCH, lambda: replace_attribute(kind, name, _check_accelerator(getattr(kind, name))))


ACCELERATE_PATCH = Patch(
    "accelerate.Accelerator.prepare_model",
    "shardformer.consistency.usage_checks",
    "raises for a sharded model, because accelerate gives every process other batches",
)
SHARDS_MODELS = "shards_models"
"""Attribute of subclasses of accelerate's Accelerator that support sharded models."""


def _check_accelerator(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def prepare_model(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tables = (module.__dict__.get(METADATA_ATTRIBUTE) for module in model.modules())
        table = next((table for table in tables if table is not None), None)
        if table is not None and not hasattr(self, SHARDS_MODELS) and math.prod(table.context.sizes.values()) > 1:
            raise ConfigError(
                f"accelerate's {type(self).__name__} received a model that is sharded over {table.context}",
                rule="It gives every process other batches, but ranks with shards of one model need the same batch",
                remedy="Use shardformer.integrations.accelerate.Accelerator, or with transformers' Trainer "
                "shardformer.integrations.transformers.Trainer, which take parallel=ParallelConfig(...)",
            )
        return original(self, model, *args, **kwargs)

    return prepare_model


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


PASSES = "_shardformer_passes"  # attribute of an optimizer with the number of gradient reductions at its last step


def check_gradients_before_step(optimizer: Optimizer) -> None:
    """Reduce gradients that ``no_sync`` has delayed, and raise ConfigError on all ranks if gradients differ.

    Communicates the gradients of backwards in ``no_sync``. If no gradients were reduced since the last step, it gathers
    their checksums.
    """
    found = [(state, _gradient_reducers(state)) for state in models_trained_by(optimizer)]
    found = [(state, reducers) for state, reducers in found if reducers]
    if not found:
        return
    if current_graph_task_id() >= 0:
        raise ConfigError(
            f"{type(optimizer).__name__}.step was called during a backward, for example by a parameter hook",
            rule="Gradients are reduced when the backward ends, so a hook sees the local gradient",
            remedy="Step after loss.backward(). To store fewer gradients, use shard_optimizer(..., stage=2)",
        )
    for reducer in (each for _, reducers in found for each in reducers if each.was_paused and not each.is_paused):
        reducer.start()
        reducer.finish()
    passes = [sum(each.passes for each in reducers) for _, reducers in found]
    if passes == optimizer.__dict__.get(PASSES, [0] * len(passes)):
        for _, reducers in found:
            _check_gradients_agree(optimizer, reducers)
    optimizer.__dict__[PASSES] = passes


def _gradient_reducers(state: ShardingMetadata) -> list[GradientReducer]:
    return [each for each in state.reducers if isinstance(each, GradientReducer) and each.sums]


def _check_gradients_agree(optimizer: Optimizer, reducers: Sequence[GradientReducer]) -> None:
    """Raise ConfigError on all ranks if their gradients of a replicated parameter differ. All ranks must call this."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    over: dict[tuple[int, ...], list[GradientSlot]] = {}
    for reducer in (each for each in reducers if not each.is_paused):
        for gradient in reducer.gradients:
            if id(gradient.param) in own and gradient.axis.size > 1 and not gradient.is_shared:
                over.setdefault(gradient.axis.ranks, []).append(gradient)
    for gradients in over.values():
        sums = [_gradient_checksum(gradient.param.grad) for gradient in gradients]
        wait_for_all_ranks(
            f"{type(optimizer).__name__}.step, without a backward since its last step", gradients[0].axis
        )
        every = all_gather_objects(sums, gradients[0].axis)
        for gradient, *values in zip(gradients, *every, strict=True):
            if len(set(values)) > 1:
                what = "only some ranks have a gradient" if None in values else "ranks have different gradients"
                raise ConfigError(
                    f"{type(optimizer).__name__}.step cannot update {gradient.entry.name}: {what}",
                    rule="loss.backward() reduces gradients. torch.autograd.grad, and assigning p.grad, do not",
                    remedy="Call loss.backward(), or set the same p.grad on all ranks",
                )


def _gradient_checksum(grad: Tensor | None) -> Any:
    if grad is None or not has_data(grad):
        return None
    return checksum(grad.detach().to_dense() if grad.is_sparse else grad.detach())
