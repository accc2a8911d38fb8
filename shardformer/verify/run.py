"""What runs in the workers: the plain model on the first, the sharded one on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardformer.comm.collectives import all_reduce, broadcast_object, gather_objects
from shardformer.comm.params import gather_param, param_specs
from shardformer.comm.recorder import Recorder
from shardformer.config import ShardConfig
from shardformer.engine import Pipeline
from shardformer.errors import ConfigError, ShardFormerError
from shardformer.mesh.context import ParallelContext
from shardformer.optim.grad_norm import clip_grad_norm_
from shardformer.pipeline.loss import LossWeight
from shardformer.pipeline.microbatches import sizes_of
from shardformer.pipeline.stage_manager import PipelineStageManager
from shardformer.policies.policy import Policy
from shardformer.sharder import shard_model
from shardformer.sharding.describe import record_of

ModelFn = Callable[[], nn.Module]
BatchFn = Callable[[int], Mapping[str, Any]]
LossFn = Callable[[nn.Module, Mapping[str, Any]], Tensor]

MAX_NORM = 1.0
LEARNING_RATE = 0.05
MAX_NOISE = 1e-3
"""Of the largest gradient: a model that moves more than that under another order of samples is not comparable."""


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

    @property
    def pipe(self) -> int:
        return 1 if self.pipeline is None else self.pipeline.pipe


@dataclass
class Trajectory:
    """What one run leaves: per step the loss, the gradients and their norm; the weights before and after."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    casts: str = ""
    collectives: dict[str, tuple[int, int]] = field(default_factory=dict)


def run_job(job: Job) -> tuple[Trajectory | None, Trajectory, str, str]:
    """Called on every worker: the plain trace (on the first only), the sharded one, the model's name, the layout."""
    context = ParallelContext.from_world({"tensor": job.tensor, "pipe": job.pipe, "data": job.data})
    plain, problem = None, None
    if context.tensor.rank == 0 and context.pipe.rank == 0 and context.data.rank == 0:
        try:
            plain = _run_plain(job)
        except ShardFormerError as error:
            problem = error
    for axis in (context.data, context.pipe, context.tensor):  # what is wrong with the job is raised alike on all ranks
        problem = broadcast_object(problem, axis)
    if problem is not None:
        raise problem
    sharded, name = _run_sharded(job, context)
    return plain, sharded, name, f"{context}, {job.pipeline}" if job.pipeline is not None else str(context)


def build(job: Job) -> nn.Module:
    torch.manual_seed(0)
    model = job.model_fn().to(job.dtype).train()
    silence_dropout(model)
    config: Any = getattr(model, "config", None)
    if job.dtype == torch.float64 and getattr(config, "_experts_implementation", None):
        config._experts_implementation = "eager"  # transformers' others do not compute in fp64
    return model


def silence_dropout(model: nn.Module) -> None:
    """Sets every dropout to zero: two layouts draw different random numbers, of the same kind."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        config = getattr(module, "config", None)
        for name, value in list(vars(config).items()) if config is not None else []:
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # a stage may have nothing that trains, and an optimizer wants something
    trainable = [p for p in model.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(()))]
    return torch.optim.SGD(trainable, lr=LEARNING_RATE, momentum=0.9)


def _loss(job: Job, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    if job.loss_fn is not None:
        return job.loss_fn(model, batch)
    output = model(**batch)
    loss: Tensor | None = getattr(output, "loss", None)
    if loss is None:
        raise _no_loss(model, output)
    return loss


def _loss_of_step(job: Job, model: nn.Module, part: Mapping[str, Any], step: int, data_rank: int) -> Tensor:
    """The loss with random numbers of this step and part: an expert that is drawn is the same one in both layouts."""
    torch.manual_seed(1 + step * job.data + data_rank)
    return _loss(job, model, part)


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
    trace.noise = _noise(job, model)
    optimizer = _optimizer(model)
    trace.before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for step in range(job.steps):
        parts = [_part(job, job.batch_fn(step), d) for d in range(job.data)]
        with _watch_casts(trace, model) if step == 0 else nullcontext():
            losses = [_loss_of_step(job, model, part, step, d).double() for d, part in enumerate(parts)]
        loss = torch.stack(losses).mean()
        loss.backward()
        trace.losses.append(float(loss.detach()))
        trace.grads.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        trace.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    trace.after = {n: p.detach().clone() for n, p in model.named_parameters()}
    return trace


def _noise(job: Job, model: nn.Module) -> dict[str, float]:
    """How much each gradient moves when the samples of the first batch are only put in another order."""
    found: list[dict[str, Tensor]] = []
    for flip in (False, True):
        parts = [_part(job, job.batch_fn(0), d) for d in range(job.data)]
        if flip:
            size = _batch_size(parts[0])
            parts = [{k: v.flip(0) if _is_batched(v, size) else v for k, v in p.items()} for p in parts]
        torch.stack([_loss(job, model, part).double() for part in parts]).mean().backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    noise = {n: float((g - found[1][n]).abs().max()) for n, g in found[0].items() if n in found[1] and g.numel()}
    largest = max((float(g.abs().max()) for g in found[0].values() if g.numel()), default=0.0)
    if max(noise.values(), default=0.0) > MAX_NOISE * largest:
        worst = max(noise, key=lambda n: noise[n])
        raise ConfigError(
            f"The gradient of {worst} moves by {noise[worst]:.1e} when the samples of a batch change places",
            rule="The plain model gives one result for one batch, whatever the order of its samples",
            remedy="Switch off what is random in it, or what depends on the order of the samples",
        )
    return noise


def _run_sharded(job: Job, context: ParallelContext) -> tuple[Trajectory, str]:
    model, trace = build(job), Trajectory()
    name = type(model).__name__
    options = dict(job.config)
    if job.pipeline is not None:
        options["pipeline_stage_manager"] = PipelineStageManager(context, **job.pipeline.stages)
    model = shard_model(model, job.policy, config=ShardConfig(context=context, **options))
    step_of = partial(_plain_step, job, model) if job.pipeline is None else _pipelined_step(job, model, job.pipeline)
    optimizer = _optimizer(model)
    for step in range(job.steps):
        part = _part(job, job.batch_fn(step), context.data.rank)
        with Recorder(context) as recorder:
            loss = step_of(part, step, context.data.rank)
        mean = all_reduce(loss.detach().clone(), context.data, purpose="check") / context.data.size
        trace.losses.append(float(mean))
        trace.grads.append(_gathered(model, context, {n: p.grad for n, p in model.named_parameters()}))
        trace.norms.append(float(clip_grad_norm_(model, MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    after = _gathered(model, context, {n: p.detach() for n, p in model.named_parameters()})
    trace.after = {n: p for n, p in after.items() if p is not None}
    trace.collectives = {f"{op} over {axis} ({why})": v for (op, axis, why), v in recorder.table().items()}
    return trace, name


def _plain_step(job: Job, model: nn.Module, part: Mapping[str, Any], step: int, data_rank: int) -> Tensor:
    loss = _loss_of_step(job, model, part, step, data_rank).double()
    loss.backward()
    return loss


def _pipelined_step(job: Job, model: nn.Module, asked: Pipelined) -> Callable[[Mapping[str, Any], int, int], Tensor]:
    loss_fn = job.loss_fn
    given = None if loss_fn is None else lambda output, part: loss_fn(Replay(model, output, part), part)
    pipeline = Pipeline(model, asked.micro_batches, loss_fn=given, loss_weight=asked.loss_weight)

    def step_of(part: Mapping[str, Any], step: int, data_rank: int) -> Tensor:
        torch.manual_seed(1 + step * job.data + data_rank)
        return pipeline.step(part)

    return step_of


class Replay(nn.Module):
    """The model for a loss function that calls it, when it has been called already: gives what it gave."""

    def __init__(self, model: nn.Module, output: Any, part: Mapping[str, Any]) -> None:
        super().__init__()
        self.__dict__["replayed"] = (model, output)
        self.__dict__["given"] = {id(value) for value in part.values()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for name, value in [*((f"argument {i}", value) for i, value in enumerate(args)), *kwargs.items()]:
            if isinstance(value, Tensor) and id(value) not in self.__dict__["given"]:
                raise ConfigError(
                    f"loss_fn calls the model with {name}, a tensor that is not in the batch",
                    rule="A pipeline has run the model on the batch already when the loss is computed",
                    remedy="Let batch_fn give what the model is called with, and loss_fn call model(**batch)",
                )
        return self.__dict__["replayed"][1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["replayed"][0], name)


def _gathered(model: nn.Module, context: ParallelContext, own: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The full tensors of all stages by the plain model's names. A tensor that stages do not hold alike is NaN."""
    specs = param_specs(model)
    full = {n: None if t is None else gather_param(t, specs[n], context.tensor) for n, t in own.items()}
    stages = record_of(model).stages
    if stages is None or context.pipe.size == 1:
        return full
    out: dict[str, Tensor | None] = {}
    for theirs in gather_objects(full, context.pipe):
        for name, t in theirs.items():
            first = stages.state[name][0]
            known = out.setdefault(first, t)
            if known is not t and (known is None or t is None or not torch.equal(known, t)):
                out[first] = None if t is None else torch.full_like(t, float("nan"))
    return {name: out[name] for name in stages.state if name in out}


def check_batch(job: Job) -> None:
    """Raises ConfigError for a first batch that data ranks and micro-batches cannot share.

    One that fails is left to the workers.
    """
    try:
        batch = job.batch_fn(0)
    except Exception:
        return
    part = _part(job, batch, 0)
    if job.pipeline is not None:
        sizes_of(_batch_size(part), job.pipeline.num_parts, None)


def _part(job: Job, batch: Mapping[str, Any], rank: int) -> dict[str, Any]:
    size = _batch_size(batch)
    if size % job.data:
        raise ConfigError(
            f"A batch of {size} samples over data={job.data}",
            rule="Every data rank gets the same number of samples",
            remedy=f"Let batch_fn give a multiple of {job.data}",
        )
    each = size // job.data
    out = {}
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.to(job.dtype)
        out[name] = value[rank * each : (rank + 1) * each] if _is_batched(value, size) else value
    return out


def _batch_size(batch: Mapping[str, Any]) -> int:
    sizes = [v.shape[0] for v in batch.values() if isinstance(v, Tensor) and v.dim() > 0]
    if not sizes:
        raise ConfigError(
            f"The batch holds {', '.join(batch) or 'nothing'} and no tensor",
            rule="A batch is a dict of tensors whose first dim is the batch",
            remedy="Let batch_fn return what the model's forward takes",
        )
    return int(sizes[0])


def _is_batched(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == size


class _CastWatch(TorchDispatchMode):
    """Says when an operation makes fp32 of fp64."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives its base no types
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        source = args[0] if args else None
        if isinstance(out, Tensor) and out.dtype == torch.float32 and isinstance(source, Tensor):
            if source.dtype == torch.float64 and source.numel() > 1:
                self._tell()
        return out


@contextmanager
def _watch_casts(trace: Trajectory, model: nn.Module) -> Iterator[None]:
    """Finds the classes of modules that cast fp64 to fp32 by themselves."""
    stack, found = [type(model).__name__], dict[str, None]()
    watch = _CastWatch(lambda: found.update({stack[-1]: None}))

    def entered(module: nn.Module, _: Any) -> None:
        stack.append(type(module).__name__)

    def left(module: nn.Module, _: Any, __: Any) -> None:
        stack.pop()

    handles = [m.register_forward_pre_hook(entered) for m in model.modules() if m is not model]
    handles += [m.register_forward_hook(left) for m in model.modules() if m is not model]
    with watch:
        yield
    for handle in handles:
        handle.remove()
    trace.casts = ", ".join(found)
