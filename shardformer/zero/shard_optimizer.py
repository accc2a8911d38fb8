"""``shard_optimizer`` (ZeRO): shards optimizer state, master weights, gradients and parameters over data ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardformer.comm.collective_call import collective_call
from shardformer.comm.collectives import broadcast
from shardformer.consistency.usage_checks import check_ddp, check_parameters, install_wrapper_guards
from shardformer.errors import ConfigError
from shardformer.gradients.buckets import GradientSlot
from shardformer.gradients.clipping import patch_clip_grad_norm
from shardformer.gradients.reducer import GradientReducer
from shardformer.layout.activation_layout import ActivationLayout, ModelRegion
from shardformer.layout.shard_spec import ShardSpec
from shardformer.layout.sharding_metadata import (
    METADATA_ATTRIBUTE,
    ParamEntry,
    ShardingMetadata,
    check_module,
    reduction_of,
)
from shardformer.layout.tensor_relations import overlapping, view_of
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.offload.disk import check_room
from shardformer.offload.host import OffloadConfig
from shardformer.public_names import renamed_parameters
from shardformer.torch_compat import has_data
from shardformer.zero.config import BucketOptions, Stage3Options, StepOptions, ZeroOptions, as_optimizer_list, no_files
from shardformer.zero.device_placement import check_free
from shardformer.zero.matrix_optimizers import can_step_separately, state_bytes
from shardformer.zero.mixed_precision import MixedPrecision
from shardformer.zero.torch_optimizers import patch_optimizers_and_scaler
from shardformer.zero.zero_optimizer import ZeroOptimizer

Given = tuple[list[Optimizer], ZeroOptions]


def checked(given: Callable[[], Given], model: nn.Module, table: ShardingMetadata) -> Given:
    """The optimizers and settings that ``shard_optimizer`` was given.

    Raises ConfigError, on every rank, where one cannot do what it was asked for, or was asked for something else.
    Communicates as ``collective_call``.
    """

    def check() -> Given:
        optimizers, settings = given()
        check_optimizers(optimizers, table)
        check_memory(model, table)
        check_free(settings, table.context.device)
        check_files(settings, optimizers, table)
        return optimizers, settings

    def lines_of(made: Given) -> list[str]:
        optimizers, settings = made
        lines = [f"{name}={value!r}" for name, value in vars(settings).items()]
        return lines + [type(optimizer).__name__ for optimizer in optimizers]

    return collective_call(table.context, check, lines_of, action="train with these optimizers")


def check_optimizers(optimizers: Sequence[Optimizer], table: ShardingMetadata) -> None:
    """Raises ConfigError for optimizers that hold anything but the parameters of this model, each once."""
    if table.gradient_owner is not None:
        raise ConfigError(
            "zero was called twice on this model",
            remedy="Give both optimizers at once: shard_optimizer([first, second], model)",
        )
    names = {id(entry.param): entry.name for entry in table.entries}
    seen: set[int] = set()
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        given = [p for group in optimizer.param_groups for p in group["params"]]
        strange = next((p for p in given if id(p) not in names), None)
        if strange is not None:
            raise ConfigError(
                f"This {kind} holds a parameter of shape {tuple(strange.shape)} that is none of the model's",
                remedy="Make it after shard_model, of model.parameters()",
            )
        if twice := next((names[id(p)] for p in given if id(p) in seen), None):
            raise ConfigError(f"Two optimizers hold {twice}", remedy="Take it out of one of them")
        seen |= {id(p) for p in given}


def check_memory(model: nn.Module, table: ShardingMetadata) -> None:
    """Raises ConfigError where something shares memory with a parameter without being it: here each gets its own."""
    params = [(entry.name, entry.param) for entry in table.entries if has_data(entry.param)]
    rule = "zero moves the values of each parameter to where the ranks' parts lie behind each other"
    if group := next(iter(overlapping(params)), None):
        first, second, *_ = (name for name, _ in params if name in group)
        raise ConfigError(
            f"{second} and {first} lie in the same memory, and are two parameters",
            rule=rule,
            remedy="Tie them as one parameter (a.weight = b.weight), or give each memory of its own (.clone())",
        )
    if found := view_of(model, params):
        view, name = found
        raise ConfigError(
            f"{view} is a view of the parameter {name}: it lies in its memory",
            rule=f"{rule}, so that {view} would no longer follow it",
            remedy=f"Read {name} itself where {view} is read, or give {view} memory of its own (.clone())",
        )


def check_files(settings: ZeroOptions, optimizers: Sequence[Optimizer], table: ShardingMetadata) -> None:
    """Raises ConfigError where masters and states cannot be in files, or there is no room for them."""
    if (folder := settings.offload.folder) is None:
        return
    if not all(map(can_step_separately, optimizers)):
        raise ConfigError(
            f"offload='nvme:{folder}' of {', '.join(type(o).__name__ for o in optimizers)}",
            rule="From files, a bucket is updated after the other; this optimizer gives other numbers then",
            remedy="Write offload='cpu', or take one that counts its steps for each parameter (torch.optim.AdamW)",
        )
    reducers = [reducer for reducer in table.reducers if isinstance(reducer, GradientReducer)]
    ranks = {id(g.param): g.axis.size for reducer in reducers for g in reducer.gradients if settings.stage > 0}
    size = 0.0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                wide = torch.promote_types(p.dtype, torch.float32).itemsize
                size += (p.numel() * wide + state_bytes(optimizer, group, p, wide)) / ranks.get(id(p), 1)
    try:
        check_room(folder, 2 * round(size))
    except OSError as error:
        raise no_files(folder, f"{error} (rank {table.context.rank})") from error


WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def metadata_for_training(model: nn.Module, context: ParallelContext | None) -> ShardingMetadata:
    """The table of a model that was sharded; a new one of any other. Raises ConfigError for one that is wrapped."""
    check_module(model)
    wrapper = next((name for m in model.modules() for c in type(m).__mro__ if (name := c.__name__) in WRAPPERS), None)
    if wrapper is not None:
        raise ConfigError(
            f"The model is wrapped in {wrapper}",
            remedy="Give zero the model without the wrapper, and use that in the loop",
        )
    if isinstance(table := model.__dict__.get(METADATA_ATTRIBUTE), ShardingMetadata):
        if context is not None and context is not table.context:
            raise ConfigError(
                "zero was given a context beside a model that was sharded over another", remedy="Leave context out"
            )
        return table
    return _unsharded_metadata(model, context or _data_parallel_context())


def _data_parallel_context() -> ParallelContext:
    if dist.is_available() and dist.is_initialized():
        return ParallelContext.from_world({"data": dist.get_world_size()})
    return ParallelContext.of({})


def _unsharded_metadata(model: nn.Module, context: ParallelContext) -> ShardingMetadata:
    """All parameters whole on every rank, with the values of the first one."""
    if any(axis.size > 1 for name, axis in context.axes.items() if name != "data"):
        raise ConfigError(
            f"This {type(model).__name__} is not sharded, and the grid is {context}",
            remedy="Call shardformer.shard_model(model, context=context) first",
        )
    patch_clip_grad_norm()
    patch_optimizers_and_scaler()
    table, stream = ShardingMetadata(context), ActivationLayout()
    for name, param in model.named_parameters():
        spec = ShardSpec(param.shape)
        table.entries.append(
            ParamEntry(name, param, spec, reduction_of(spec, stream, ModelRegion.OUTSIDE, context.sizes))
        )
    if context.data.size > 1:
        for tensor in [*model.parameters(), *model.buffers()]:
            broadcast(tensor.detach(), context.data)
        table.reducers = [GradientReducer([GradientSlot(e, context.data, table.coords) for e in table.entries])]
    table.attach(model)

    if context.data.size > 1:
        install_wrapper_guards(model, context)

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        check_ddp(model, context)
        check_parameters(model, table)
        for reducer in table.reducers:
            reducer.refresh()

    model.register_forward_pre_hook(before)
    return table


@renamed_parameters({}, ("optimizer", "model"))
def shard_optimizer(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    stage: int = 1,
    precision: str | MixedPrecision = "fp32",
    offload: str | OffloadConfig | None = None,
    max_grad_norm: float | None = None,
    on_nonfinite: str = "raise",
    keep_frozen: bool = True,
    reshard_after_forward: bool | int | str | None = None,
    bucket_bytes: int | None = None,
    overlap: bool = True,
    context: ParallelContext | None = None,
) -> ZeroOptimizer:
    """Cuts what optimizers keep over the ranks that agree on the gradients, mostly those of the data axis.

    >>> model = shardformer.shard_model(model, context=context)                                   # doctest: +SKIP
    >>> optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()), model, stage=2)       # doctest: +SKIP

    Args:
        optimizer: one of torch's or any other, or several, made of the parameters of ``model``. One that changes each
            number by itself gets parts of parameters; one that looks at whole matrices (Muon, Adafactor) gets whole
            ones, each on one rank. Which it is, is tried.
        model: what ``shard_model`` returned, or any other module, which then is trained over the data axis alone.
        stage: 0 cuts nothing: every rank keeps all. 1 cuts the optimizer's state; 2 the gradients too, which then are
            agreed on in every backward; 3 the parameters too, which are gathered layer by layer when they are used.
        precision: "fp32" leaves the parameters as they are; "bf16" and "fp16" keep them in 16 bits, and a master of
            each rank's pieces in fp32; a ``MixedPrecision`` says more. In fp16 call ``optimizer.backward(loss)``, which
            scales the loss.
        offload: "cpu" keeps masters, the optimizer's state and gradients on the host, and updates there; gradients come
            down under the backward. "nvme:DIR" keeps masters and state in files. An ``OffloadConfig`` says more.
        max_grad_norm: to which ``step`` clips the norm of all gradients; None leaves them as they are.
        on_nonfinite: what ``step`` does when a gradient is NaN or infinite: "raise" InputError on all ranks, before
            anything is changed; "skip" the step; "ignore". In fp16 the step is skipped and the scale made smaller.
        keep_frozen: whether stage 3 leaves parameters whole that do not train.
        reshard_after_forward: whether stage 3 drops a layer behind its use and gathers it again for the backward; False
            gathers once a step. None: True, but not in a pipeline, of which each micro-batch would gather. A number of
            bytes: that much of the last layers stays for the backward; "free": what the first step left free of a GPU.
        bucket_bytes: of gradients that are sent together; None: 25 MB, or what the sharded model was told.
        overlap: whether gradients, and the layers of stage 3, travel while others are computed.
        context: the grid of a model that was not sharded; None: all processes are data ranks.

    Returns an optimizer to be used in the place of those given. Raises ConfigError for what does not fit. Communicates
    the weights of the first data rank to the others, where the model was not sharded.
    """
    table = metadata_for_training(model, context)

    def given() -> tuple[list[Optimizer], ZeroOptions]:
        optimizers = as_optimizer_list(optimizer)
        rules, sending = StepOptions(max_grad_norm, on_nonfinite), BucketOptions(bucket_bytes, overlap)
        layout = Stage3Options(keep_frozen, reshard_after_forward)
        places = OffloadConfig.of(offload, optimizers)
        return optimizers, ZeroOptions(stage, MixedPrecision.of(precision), rules, sending, layout, places)

    return ZeroOptimizer(model, table, *checked(given, model, table))
