"""What runs in the workers: the plain model on the first, the sharded one on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collectives import all_reduce, broadcast_object, gather_objects
from shardformer.comm.gather import gather_all
from shardformer.comm.recorder import Recorder
from shardformer.config import ShardConfig
from shardformer.engine.batch import on_device
from shardformer.engine.modes import start_training
from shardformer.engine.pipeline import Pipeline
from shardformer.errors import ConfigError, ShardFormerError
from shardformer.layers.dropout import silence_dropout
from shardformer.layers.random_stream import seed_random
from shardformer.layout.state import specs_of, state_of
from shardformer.mesh.context import ParallelContext, with_sequence, with_tensor
from shardformer.mesh.sizes import total_of
from shardformer.mesh.tensor_grid import TensorGrid, with_grid
from shardformer.optim.grad_norm import clip_grad_norm_
from shardformer.optim.optimizer import ZeroOptimizer
from shardformer.optim.zero import zero
from shardformer.pipeline.head import loss_in
from shardformer.pipeline.loss import LossWeight
from shardformer.pipeline.stage_manager import PipelineStageManager
from shardformer.policies.policy import Policy
from shardformer.reduce.pause import no_sync
from shardformer.sharder import shard_model
from shardformer.sharding.save import full_state_dict
from shardformer.verify.arithmetic import RandomRounding, WithoutCasts
from shardformer.verify.parts import check_apart, part_of
from shardformer.verify.replay import Replay
from shardformer.verify.report import Bounds, bounds_for, bounds_of_16_bits
from shardformer.verify.training import Plain, Training, optimizers_of

ModelFn = Callable[[], nn.Module]
BatchFn = Callable[[int], Mapping[str, Any]]
LossFn = Callable[[nn.Module, Mapping[str, Any]], Tensor]

MAX_NORM = 1.0
DRAWS = 3
"""Backwards with random rounding, over all steps or more: one alone may find a sum that is off by nothing."""


@dataclass(frozen=True)
class Pipelined:
    """A pipeline to compare with the plain model.

    Args:
        pipe: stages.
        micro_batches: into how many parts a batch is cut, by default as many as there are stages.
        stages: what else ``PipelineStageManager`` takes, such as ``{"schedule": "gpipe"}``.
        loss_weight: micro-batch -> how much counts in it, as ``Pipeline`` takes it.
    """

    pipe: int = 2
    micro_batches: int | None = None
    stages: Mapping[str, Any] = field(default_factory=dict)
    loss_weight: LossWeight | None = None

    @property
    def num_parts(self) -> int:
        """Into how many micro-batches a batch is cut."""
        return self.pipe if self.micro_batches is None else self.micro_batches

    def __str__(self) -> str:
        said = {"schedule": "{}", "num_model_chunks": "{} chunks"}
        options = [said.get(name, f"{name}={{}}").format(value) for name, value in self.stages.items()]
        parts = "1 micro-batch" if self.num_parts == 1 else f"{self.num_parts} micro-batches"
        return ", ".join([*options, parts])


StepOf = Callable[[Mapping[str, Any], int, int], Tensor]
"""(a rank's part of a batch, the number of the backward, the data rank) -> the loss, behind its backward."""


@dataclass(frozen=True)
class Job:
    model_fn: ModelFn
    batch_fn: BatchFn
    tensor: int
    data: int
    steps: int
    dtype: torch.dtype
    loss_fn: LossFn | None
    policy: Policy | type[Policy] | None
    config: Mapping[str, Any]
    pipeline: Pipelined | None = None
    training: Training = field(default_factory=Training)
    sequence: int | tuple[int, int] = 1
    grid: int | tuple[int, ...] = 1
    ids: Mapping[str, int] = field(default_factory=dict)  # field of the config -> a token that stands for images
    device: str = "cpu"  # of both models

    def __post_init__(self) -> None:
        self.training.check_pipeline(self.pipe)
        for name in ("tensor", "pipe", "data", "steps"):
            if (count := getattr(self, name)) < 1:
                rule = "Each axis has one rank or more, and a comparison one step or more"
                raise ConfigError(f"{name}={count}", rule=rule, remedy=f"Use {name}=1 or more")

    @property
    def computes_in(self) -> torch.dtype:
        """Of the parameters of both models, and of what flows through them."""
        return self.training.dtype or self.dtype

    @property
    def bounds(self) -> Bounds:
        return bounds_for(self.dtype) if self.training.dtype is None else bounds_of_16_bits(self.training.dtype)

    @property
    def pipe(self) -> int:
        return 1 if self.pipeline is None else self.pipeline.pipe

    @property
    def num_parts(self) -> int:
        """Into how many parts the plain model is given a batch."""
        return 1 if self.training.reference == "whole" else self.data


@dataclass
class Trajectory:
    """What one run leaves: per step the loss, the gradients and their norm; the weights before and after."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    collectives: dict[str, tuple[int, int]] = field(default_factory=dict)


def run_job(job: Job) -> tuple[Trajectory | None, Trajectory, str, str]:
    """Called on every worker: the plain trace (on the first only), the sharded one, the model's name, the layout."""
    sizes = {"tensor": job.tensor, "pipe": job.pipe, "data": job.data, "sequence": total_of(job.sequence)}
    context = ParallelContext.from_world(sizes, torch.device(job.device))
    context = with_tensor(with_sequence(context, job.sequence), job.grid)
    plain = problem = None
    try:
        plain = _run_plain(job) if context.rank == 0 else None
    except ShardFormerError as error:
        problem = error
    # what is wrong with the job is raised alike on all ranks
    for axis in (context.data, context.pipe, context.sequence, context.tensor):
        problem = broadcast_object(problem, axis)
    if problem is not None:
        raise problem
    sharded, name = _run_sharded(job, context)
    layout = [str(context), *([str(job.pipeline)] if job.pipeline is not None else [])]
    mode = job.config.get("tensor_parallel_mode", "1d")
    layout += [str(TensorGrid.of(with_grid(context, mode), mode))] if mode != "1d" else []
    layout += ["each batch plain in one"] if job.num_parts < job.data else []
    layout += [str(job.training)] if job.training.zero is not None else []
    return plain, sharded, name, ", ".join(layout)


def build(job: Job) -> nn.Module:
    torch.manual_seed(0)
    dtype = torch.float32 if job.training.dtype is not None else job.dtype
    model = start_training(job.model_fn().to(torch.device(job.device), dtype))
    silence_dropout(model)
    job.training.freeze(model)
    config: Any = getattr(model, "config", None)
    if job.computes_in == torch.float64 and getattr(config, "_experts_implementation", None):
        config._experts_implementation = "eager"  # transformers' others do not compute in fp64
    return model


def _loss(job: Job, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    if job.loss_fn is not None:
        return job.loss_fn(model, batch)
    output = model(**batch)
    loss = loss_in(output)
    if loss is None:
        raise _no_loss(model, output)
    return loss


def _loss_of_step(job: Job, model: nn.Module, part: Mapping[str, Any], step: int, rank: int, seed: int = 0) -> Tensor:
    """The loss with random numbers of this step and part: what is drawn between blocks is the same in both layouts."""
    seed_random(1 + step * job.data + rank + seed * 2**31)
    return _loss(job, model, part)


def _arithmetic(job: Job) -> AbstractContextManager[Any]:
    return WithoutCasts() if job.computes_in == torch.float64 else nullcontext()


def _no_loss(model: nn.Module, output: Any) -> ConfigError:
    labels = hasattr(output, "loss")  # such an output has a loss where the batch has labels
    return ConfigError(
        f"{type(model).__name__} gave no loss"
        + ("" if labels else f": its output, a {type(output).__name__}, has none"),
        rule="verify trains, by default on model(**batch).loss",
        remedy="Add labels to the batch, or give loss_fn="
        if labels
        else "Give loss_fn=, a function (model, batch) -> loss",
    )


def _run_plain(job: Job) -> Trajectory:
    model, trace = build(job), Trajectory()
    optimizer = Plain(model, job.training)
    _check_repeats(job, model)
    check_apart(job, model)
    trace.before = {n: p.detach().clone().cpu() for n, p in model.named_parameters()}
    for step in range(job.steps):
        _backward(job, model, step, trace)
        trace.norms.append(optimizer.step(MAX_NORM))
        model.zero_grad()
    trace.after = {n: p.detach().clone().cpu() for n, p in model.named_parameters()}
    return trace


def _backward(job: Job, model: nn.Module, step: int, trace: Trajectory) -> None:
    """Notes a step's loss and gradients, which stay in ``.grad``, and how far rounding moves each gradient."""

    def gradients(rounding: AbstractContextManager[Any]) -> dict[str, Tensor | None]:
        model.zero_grad()
        with rounding:
            (loss * job.training.scale).backward(retain_graph=True)
        grads = {n: p.grad for n, p in model.named_parameters()}
        return {n: None if grad is None else grad.clone() / job.training.scale for n, grad in grads.items()}

    with _arithmetic(job):
        loss = _plain_loss(job, model, step)
        rounded = [gradients(RandomRounding(seed)) for seed in range(step, step + DRAWS, job.steps)]
        grads = gradients(nullcontext())
    for name, grad in grads.items():
        for other in (r[name] for r in rounded):
            if grad is not None and other is not None and grad.numel():
                trace.noise[name] = max(trace.noise.get(name, 0.0), float((other - grad).abs().max()))
    trace.losses.append(float(loss.detach()))
    trace.grads.append({name: None if grad is None else grad.cpu() for name, grad in grads.items()})


def _part_of(job: Job, batch: Mapping[str, Any], rank: int, parts: int) -> Mapping[str, Any]:
    """On the device of the models."""
    part: Mapping[str, Any] = on_device(part_of(job, batch, rank, parts), torch.device(job.device))
    return part


def _plain_loss(job: Job, model: nn.Module, step: int, seed: int = 0) -> Tensor:
    losses = []
    for backward in job.training.backwards(step):
        batch = job.batch_fn(backward)
        for rank in range(job.num_parts):
            part = _part_of(job, batch, rank, job.num_parts)
            losses.append(_loss_of_step(job, model, part, backward, rank, seed).double())
    return torch.stack(losses).mean()


def _check_repeats(job: Job, model: nn.Module) -> None:
    """Raises ConfigError for a model that draws what the sharded one cannot draw alike."""
    draws_anew = job.pipeline is not None or job.num_parts < job.data
    with torch.no_grad(), _arithmetic(job):
        first, second = (float(_plain_loss(job, model, 0, seed)) for seed in (0, int(draws_anew)))
    if abs(first - second) > job.bounds.loss * abs(first):
        raise ConfigError(
            f"The loss of the first batch is {first:.6g}, and {second:.6g} when it is computed again",
            rule="Each micro-batch of a pipeline, and each data rank's part of a whole batch, draws its own numbers"
            if draws_anew
            else "The same random numbers of torch, numpy and Python give the same loss",
            remedy="Switch off what is random in the model",
        )


def _run_sharded(job: Job, context: ParallelContext) -> tuple[Trajectory, str]:
    model, trace, options = build(job), Trajectory(), {"watch": False, **job.config}  # what differs is told below
    name = type(model).__name__
    if job.pipeline is not None:
        options["pipeline_stage_manager"] = PipelineStageManager(context, **job.pipeline.stages)
    model = shard_model(model, job.policy, config=ShardConfig(context=context, **options))
    job.training.checkpoint(model)
    optimizer: Any = optimizers_of(model.parameters(), job.training)
    optimizer = optimizer[0] if job.training.zero is None else zero(optimizer, model, **job.training.of_zero())
    asked = job.pipeline
    step_of = _pipelined_step(job, model, asked) if asked is not None else partial(_plain_step, job, model, optimizer)
    for step in range(job.steps):
        with Recorder(context) as recorder, _arithmetic(job):
            loss = _backwards(job, model, optimizer, step_of, step)
        mean = all_reduce(loss.detach().clone(), context.data, purpose="check") / context.data.size
        trace.losses.append(float(mean))
        trace.grads.append(
            _gathered(model, context, {n: _gradient(optimizer, n, p) for n, p in model.named_parameters()})
        )
        trace.norms.append(float(clip_grad_norm_(model, MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    if job.training.zero == 3:
        whole = full_state_dict(model)
        trace.after = {n: whole[n] for n in trace.grads[-1]}
    else:
        after = _gathered(model, context, {n: p.detach() for n, p in model.named_parameters()})
        trace.after = {n: p for n, p in after.items() if p is not None}
    trace.collectives = {f"{op} over {axis} ({why})": v for (op, axis, why), v in recorder.table().items()}
    return trace, name


def _backwards(job: Job, model: nn.Module, optimizer: Any, step_of: StepOf, step: int) -> Tensor:
    """All of one step. Returns the mean of their losses."""
    own = optimizer if isinstance(optimizer, ZeroOptimizer) else None
    rank, last = state_of(model).context.data.rank, job.training.backwards(step)[-1]
    losses = []
    for backward in job.training.backwards(step):
        part = _part_of(job, job.batch_fn(backward), rank, job.data)
        waits = nullcontext() if backward == last else own.no_sync() if own is not None else no_sync(model)
        with waits:
            losses.append(step_of(part, backward, rank).detach())
    return torch.stack(losses).mean()


def _gradient(optimizer: Any, name: str, param: Tensor) -> Tensor | None:
    """As the next step will use it, in the shape of the parameter."""
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer.full_gradient(name) if param.requires_grad else None
    return param.grad


def _plain_step(
    job: Job, model: nn.Module, optimizer: Any, part: Mapping[str, Any], step: int, data_rank: int
) -> Tensor:
    loss = _loss_of_step(job, model, part, step, data_rank).double()
    share = loss / job.training.micro_steps
    optimizer.backward(share) if isinstance(optimizer, ZeroOptimizer) else share.backward()
    return loss


def _pipelined_step(job: Job, model: nn.Module, asked: Pipelined) -> StepOf:
    loss_fn = job.loss_fn
    given = None if loss_fn is None else lambda output, part: loss_fn(Replay(model, output, part), part)
    pipeline = Pipeline(model, asked.micro_batches, loss_fn=given, loss_weight=asked.loss_weight)

    def step_of(part: Mapping[str, Any], step: int, data_rank: int) -> Tensor:
        seed_random(1 + step * job.data + data_rank)
        return pipeline.step(part)

    return step_of


def _gathered(model: nn.Module, context: ParallelContext, own: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The full tensors of all stages by the plain model's names. A tensor that stages do not hold alike is NaN."""
    specs, state = specs_of(model), state_of(model)
    known = [(name, t) for name, t in own.items() if t is not None]
    whole = gather_all([t for _, t in known], [specs[name] for name, _ in known], state.axis)
    full = {**own, **{name: x.cpu() for (name, _), x in zip(known, whole, strict=True)}}
    stages = state.stages
    if stages is None or context.pipe.size == 1:
        return full
    out: dict[str, Tensor | None] = {}
    for theirs in gather_objects(full, context.pipe):
        for name, t in theirs.items():
            first = stages.state[name][0]
            before = out.setdefault(first, t)
            if before is not t and (before is None or t is None or not torch.equal(before, t)):
                out[first] = None if t is None else torch.full_like(t, float("nan"))
    return {name: out[name] for name in stages.state if name in out}
