"""Refuses uses of a sharded model that train it wrongly: DDP and FSDP wrappers, gradients that differ between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from shardformer.comm.collective_call import come
from shardformer.comm.collectives import all_gather_objects, checksum
from shardformer.consistency.rank_divergence import models_trained_by
from shardformer.errors import ConfigError
from shardformer.gradients.buckets import GradientSlot
from shardformer.gradients.reducer import GradientReducer
from shardformer.layout.sharding_metadata import ShardingMetadata
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.torch_compat import COMPOSABLE_REGISTRY, active_ddp_module, current_graph_task_id, has_data


@dataclass(frozen=True)
class DDPGuard:
    """What DistributedDataParallel reads of a module before it broadcasts rank 0's parameters over the others' parts.

    It asks for the names of parameters to leave alone; asking raises ConfigError.
    """

    context: ParallelContext

    def __iter__(self) -> Iterator[str]:
        raise _wrapped("DistributedDataParallel", self.context)


class FSDPGuard(dict[str, Any]):
    """Where FullyShardedDataParallel, ``fully_shard`` and ``replicate`` look whether a module is taken already."""

    def __init__(self, context: ParallelContext) -> None:
        super().__init__()
        self.context = context

    def __contains__(self, name: object) -> bool:
        if name in ("fully_shard", "replicate"):
            raise _wrapped("FullyShardedDataParallel, fully_shard or replicate", self.context)
        return super().__contains__(name)


def install_wrapper_guards(model: nn.Module, context: ParallelContext) -> None:
    """Torch's data parallel wrappers raise ConfigError from now on, before they change anything."""
    model.__dict__["_ddp_params_and_buffers_to_ignore"] = DDPGuard(context)
    model.__dict__["_replicate_for_data_parallel"] = partial(_refuse_replicas, context)
    for module in model.modules():
        module.__dict__[COMPOSABLE_REGISTRY] = FSDPGuard(context)


def _refuse_replicas(context: ParallelContext) -> NoReturn:
    raise _wrapped("DataParallel", context)


def check_ddp(model: nn.Module, context: ParallelContext) -> None:
    """In a forward: raises ConfigError when DistributedDataParallel stands around a module that holds the model."""
    outer = active_ddp_module()
    if outer is None or all(axis.size == 1 for axis in context.axes.values()):
        return
    if any(module is model for module in outer.modules()):
        raise _wrapped("DistributedDataParallel", context)


def check_parameters(model: nn.Module, state: ShardingMetadata) -> None:
    """Raises ConfigError when the model has parameters that were not there when it was sharded."""
    known = state.by_param()
    new = [name for name, p in model.named_parameters() if id(p) not in known]
    if new:
        raise ConfigError(
            f"{len(new)} parameters of this {type(model).__name__} came after it was sharded, such as {new[0]}",
            remedy="Build the whole model first, with its new head or its adapters, and shard it then",
        )


def _wrapped(wrapper: str, context: ParallelContext) -> ConfigError:
    return ConfigError(
        f"{wrapper} around a model that is sharded over {context}",
        rule="It takes the parameters of all processes for the same ones; here each process has its own part of them",
        remedy="Leave it out: shard_model(model, data=...) agrees on gradients between data ranks during backward",
    )


PASSES = "_shardformer_passes"
"""The attribute of an optimizer with how often gradients had been summed when it last stepped."""


def agree_before_step(optimizer: Optimizer) -> None:
    """Sums gradients of backwards in ``no_sync``. Raises ConfigError, on all ranks, if gradients differ between ranks.

    Communicates the gradients of such backwards; checksums of gradients if none were summed since the last step.
    """
    found = [(state, _reducers(state)) for state in models_trained_by(optimizer)]
    found = [(state, reducers) for state, reducers in found if reducers]
    if not found:
        return
    if current_graph_task_id() >= 0:
        raise _in_backward(optimizer)
    for reducer in (each for _, reducers in found for each in reducers if each.was_paused and not each.is_paused):
        reducer.start()
        reducer.finish()
    passes = [sum(each.passes for each in reducers) for _, reducers in found]
    if passes == optimizer.__dict__.get(PASSES, [0] * len(passes)):
        for _, reducers in found:
            _compare(optimizer, reducers)
    optimizer.__dict__[PASSES] = passes


def _reducers(state: ShardingMetadata) -> list[GradientReducer]:
    return [each for each in state.reducers if isinstance(each, GradientReducer) and each.sums]


def _compare(optimizer: Optimizer, reducers: Sequence[GradientReducer]) -> None:
    """The gradients that ranks should have in common. All ranks call it."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    over: dict[tuple[int, ...], list[GradientSlot]] = {}
    for reducer in (each for each in reducers if not each.is_paused):
        for gradient in reducer.gradients:
            if id(gradient.param) in held and gradient.axis.size > 1 and not gradient.is_shared:
                over.setdefault(gradient.axis.ranks, []).append(gradient)
    for gradients in over.values():
        sums = [_sum_of(gradient.param.grad) for gradient in gradients]
        come(f"{type(optimizer).__name__}.step, without a backward since its last step", gradients[0].axis)
        every = all_gather_objects(sums, gradients[0].axis)
        for gradient, *theirs in zip(gradients, *every, strict=True):
            if len(set(theirs)) > 1:
                raise _own(optimizer, gradient.entry.name, theirs)


def _sum_of(grad: Tensor | None) -> Any:
    if grad is None or not has_data(grad):
        return None
    return checksum(grad.detach().to_dense() if grad.is_sparse else grad.detach())


def _own(optimizer: Optimizer, name: str, sums: Sequence[Any]) -> ConfigError:
    what = "that only some ranks have" if None in sums else "of which each rank has its own"
    return ConfigError(
        f"{type(optimizer).__name__}.step was called with a gradient of {name} {what}",
        rule="Ranks sum gradients in loss.backward(), not in torch.autograd.grad, nor those that a script sets",
        remedy="Call loss.backward() and use p.grad instead of torch.autograd.grad; set p.grad to the same numbers on "
        "all ranks",
    )


def _in_backward(optimizer: Optimizer) -> ConfigError:
    return ConfigError(
        f"{type(optimizer).__name__}.step was called during a backward, as by a hook of a parameter",
        rule="Ranks sum gradients until the backward ends: what a hook sees is this rank's own",
        remedy="Step after loss.backward(). To keep fewer gradients, use shard_optimizer(model, optimizer, stage=2)",
    )
