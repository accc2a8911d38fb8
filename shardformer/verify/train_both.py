"""Trains the unsharded model on one worker and the sharded model on all workers, for ``verify``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from shardformer.comm.collective_call import run_on_all_ranks
from shardformer.comm.collectives import all_gather_objects, all_reduce, gather_full_tensors
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.config import STAGE_FIELDS, ShardConfig
from shardformer.discovery.reduced_model import disable_dropout
from shardformer.errors import (
    ConfigError,
    InputError,
    ShardFormerError,
    check_int,
    check_names_are_known,
    get_first_message_line,
)
from shardformer.gradient_accumulation.micro_batch_loss import LossWeight
from shardformer.gradient_accumulation.micro_batches import (
    compute_micro_batch_sizes,
    get_batch_size,
    iter_named_tensors,
    split_batch,
)
from shardformer.gradients.clipping import clip_grad_norm_
from shardformer.gradients.reducer import no_sync
from shardformer.layout.sharding_metadata import get_shard_specs, get_sharding_metadata
from shardformer.mesh.parallel_context import ParallelContext, reshape_sequence_axis, reshape_tensor_axis
from shardformer.mesh.rank_grid import AXES, count_ranks_on_axis
from shardformer.mesh.tensor_grid import TensorGrid, reshape_tensor_axis_by_mode
from shardformer.pipeline.pipeline import Pipeline, ensure_training_mode
from shardformer.pipeline.runtime import find_loss_in_output
from shardformer.pipeline.schedules import make_schedule
from shardformer.pipeline.stage_manager import PipelineStageManager
from shardformer.policies.policy import Policy
from shardformer.random_state import seed_all_generators
from shardformer.shard_model_api import shard_model_in_place
from shardformer.torch_compat import TorchDispatchMode, schema_of
from shardformer.torch_patches import LibraryPatch, Undo, replace_attribute, temporary_patch
from shardformer.training.data_loader import move_to_device
from shardformer.transformers_compat import filter_forward_kwargs
from shardformer.verify.comparison import Tolerances, get_half_precision_tolerances, get_tolerances
from shardformer.verify.training_options import UnshardedModelOptimizers, VerifyTraining, make_verify_optimizers
from shardformer.weights.state_dict import full_state_dict
from shardformer.zero.shard_optimizer import shard_optimizer
from shardformer.zero.zero_optimizer import ZeroOptimizer

WIDE: dict[Any, Any] = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
    **dict.fromkeys((Tensor.float, Tensor.half, Tensor.bfloat16), Tensor.double),
}
"""Maps dtypes, and the methods that cast to them, to their fp64 counterparts."""

LIKE_FUNCTIONS = (Tensor.to, Tensor.type, Tensor.type_as)
"""Casts that may take their dtype from another tensor, or by name."""
BACKWARD_FUNCTIONS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)

UNITS = 4  # maximum random error of an operation, in units in the last place


class ForceFp64Mode(TorchFunctionMode):
    """Torch function mode that replaces casts to a lower precision by casts to fp64."""

    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in BACKWARD_FUNCTIONS:
            return self._run_backward_with_fp64_recompute(func, args, kwargs)
        wide_args = [WIDE.get(a, a) if isinstance(a, torch.dtype) else a for a in args]
        wide_kwargs = {k: WIDE.get(v, v) if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}
        out = WIDE.get(func, func)(*wide_args, **wide_kwargs)
        if func in LIKE_FUNCTIONS and out.dtype in WIDE and args[0].dtype == torch.float64:
            return args[0].to(out.device)
        return out

    def _run_backward_with_fp64_recompute(
        self, backward_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a backward pass in which activation checkpointing recomputes the forward pass in fp64."""
        before, _CURRENT.mode = _CURRENT.mode, self
        try:
            with temporary_patch(BACKWARD_PATCH, _patch_backward_for_fp64):
                return backward_fn(*args, **kwargs)
        finally:
            _CURRENT.mode = before


class _ThreadLocalFp64Mode(threading.local):
    mode: ForceFp64Mode | None = None  # of the backward pass that this thread runs


_CURRENT = _ThreadLocalFp64Mode()
ENGINE = "_engine_run_backward"
BACKWARD_PATCH = LibraryPatch(
    f"torch.autograd.{ENGINE}",
    "shardformer.verify.train_both",
    "makes activation checkpointing recompute in fp64, while `verify` runs a backward pass in fp64",
)


def _patch_backward_for_fp64() -> Undo:
    """Make each backward pass use the ``ForceFp64Mode`` mode of the thread that started the pass."""
    original = getattr(torch.autograd, ENGINE)

    @wraps(original)
    def run_backward_in_fp64_mode(*tensors: Any, **kwargs: Any) -> Any:
        with nullcontext() if _CURRENT.mode is None else _CURRENT.mode:
            return original(*tensors, **kwargs)

    return replace_attribute(torch.autograd, ENGINE, run_backward_in_fp64_mode)


class RandomRoundingMode(TorchDispatchMode):
    """Torch dispatch mode that adds random rounding errors to each operation's result, to estimate rounding noise.

    A sum whose terms cancel then varies by the rounding of its terms (Monte Carlo arithmetic, Parker 1997).
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives its base no types
        self._seed, self._generators = seed, dict[torch.device, torch.Generator]()

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = out if isinstance(out, tuple | list) else (out,)
        for returned, t in zip(schema_of(func).returns, outputs, strict=False):
            if returned.alias_info is None and isinstance(t, Tensor) and t.is_floating_point():
                self._add_rounding_error(t)
        return out

    def _add_rounding_error(self, tensor: Tensor) -> None:
        if tensor.layout == torch.strided:
            if tensor.device not in self._generators:
                self._generators[tensor.device] = torch.Generator(tensor.device).manual_seed(self._seed)
            error = torch.empty_like(tensor).uniform_(-1, 1, generator=self._generators[tensor.device])
            tensor.addcmul_(tensor, error, value=UNITS * torch.finfo(tensor.dtype).eps)


def check_batch_is_splittable(job: VerifyJob) -> None:
    """Raise ConfigError if the first batch cannot be split over data-parallel ranks and micro-batches.

    Errors of ``batch_fn`` are not raised here but in the workers.
    """
    try:
        batch = job.batch_fn(0)
    except Exception:
        return
    _split_into_micro_batches(job, get_rank_batch(job, batch, 0, job.data))


def get_rank_batch(job: VerifyJob, batch: Mapping[str, Any], data_rank: int, num_shards: int) -> dict[str, Any]:
    """Return the shard of a global batch for one data-parallel rank, in the dtype of the models."""
    if not any(x.dim() for _, x in iter_named_tensors(batch)):
        keys = ", ".join(batch) or "none"
        raise ConfigError(
            f"The batch from batch_fn has no tensor with a batch dimension (keys: {keys}).",
            remedy="Return a dict with the arguments of the model's forward method.",
        )
    size = get_batch_size(batch)
    if size % num_shards:
        raise ConfigError(
            f"The batch size {size} is not divisible by the number of data-parallel ranks ({num_shards}).",
            remedy=f"Return batches with a multiple of {num_shards} samples from batch_fn.",
        )
    part = split_batch(batch, [size // num_shards] * num_shards, media_token_ids=job.ids)[data_rank]
    floats = {name: x for name, x in part.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return {**part, **{name: x.to(job.compute_dtype) for name, x in floats.items()}}


def check_samples_are_independent(job: VerifyJob, model: nn.Module) -> None:
    """Raise ConfigError if the batch of a model with a contrastive loss is split, which changes the loss."""
    reference = get_rank_batch(job, job.batch_fn(0), 0, job.num_reference_shards)
    part = get_rank_batch(job, job.batch_fn(0), 0, job.data)
    micro_batch = _split_into_micro_batches(job, part)[0]
    for larger, smaller, option, alternative in (
        (reference, part, "average_loss_over='ranks' (--average-loss-over ranks)", "one data rank"),
        (part, micro_batch, "one micro-batch (--micro-batches 1)", "data ranks (--data 2)"),
    ):
        if get_batch_size(smaller) < get_batch_size(larger):
            for name in _find_pairwise_outputs(model, larger, smaller):
                raise ConfigError(
                    f"The batch cannot be split, because the output {name} of {type(model).__name__} compares all "
                    "samples of a batch with each other, as in a contrastive loss.",
                    remedy=f"To compare the same samples in both models, use {option} or {alternative}.",
                )


def _find_pairwise_outputs(
    model: nn.Module, larger_batch: Mapping[str, Any], smaller_batch: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the names of outputs with a value for each pair of samples, as in contrastive models."""
    try:
        with torch.no_grad():
            both = [model(**filter_forward_kwargs(batch, model)) for batch in (larger_batch, smaller_batch)]
    except Exception:  # a loss_fn calls the model in another way
        return
    if all(isinstance(output, Mapping) for output in both):
        for name in both[0].keys() & both[1].keys():
            shapes = [tuple(x.shape) if isinstance(x := output[name], Tensor) else () for output in both]
            if shapes == [(get_batch_size(batch),) * 2 for batch in (larger_batch, smaller_batch)]:
                yield name


def _split_into_micro_batches(job: VerifyJob, rank_batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    if job.pipeline is None:
        return [dict(rank_batch)]
    return split_batch(
        rank_batch,
        compute_micro_batch_sizes(get_batch_size(rank_batch), job.pipeline.num_micro_batches, None),
        media_token_ids=job.ids,
    )


class PrecomputedOutputModule(nn.Module):
    """Replaces the model in the user's ``loss_fn``, and returns the output that a pipeline has computed."""

    def __init__(self, model: nn.Module, output: Any, micro_batch: Mapping[str, Any]) -> None:
        super().__init__()
        self.__dict__["replayed"] = (model, output)
        self.__dict__["given"] = {id(value) for value in micro_batch.values()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for name, value in [*((f"argument {i}", value) for i, value in enumerate(args)), *kwargs.items()]:
            if isinstance(value, Tensor) and id(value) not in self.__dict__["given"]:
                raise ConfigError(
                    f"loss_fn passes {name} to the model, but this tensor is not in the batch.",
                    remedy="Return all inputs of the model from batch_fn, and call model(**batch) in loss_fn.",
                )
        return self.__dict__["replayed"][1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["replayed"][0], name)


ModelFn = Callable[[], nn.Module]
BatchFn = Callable[[int], Mapping[str, Any]]
LossFn = Callable[[Any, Mapping[str, Any]], Tensor]


@dataclass
class UserLossFunction:
    """Calls a user's ``loss_fn`` with the arguments that it accepts, (output, batch) or (model, batch).

    The first call tries both, and one of them raises an error. Errors of this package are not caught.
    """

    loss_fn: LossFn
    is_called_with_model: bool | None = None

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        if self.is_called_with_model is not None:
            return self._call_loss_fn(
                model if self.is_called_with_model else model(**filter_forward_kwargs(batch, model)), batch
            )
        try:
            loss, self.is_called_with_model = self._call_loss_fn(model, batch), True
        except ShardFormerError:
            raise
        except Exception as error:
            try:
                loss, self.is_called_with_model = (
                    self._call_loss_fn(model(**filter_forward_kwargs(batch, model)), batch),
                    False,
                )
            except ShardFormerError:
                raise
            except Exception as other:
                output_error, model_error = _describe_error(other), _describe_error(error)
                raise InputError(
                    f"loss_fn(output, batch) raised {output_error}, and loss_fn(model, batch) raised {model_error}.",
                    remedy="Fix loss_fn so that one of these calls returns the loss.",
                ) from other
        return loss

    def _call_loss_fn(self, model_or_output: Any, batch: Mapping[str, Any]) -> Tensor:
        loss = self.loss_fn(model_or_output, batch)
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss_fn must return a tensor, but returned {type(loss).__name__}.")
        return loss


def _describe_error(exception: Exception) -> str:
    return f"{type(exception).__name__}: {get_first_message_line(exception)}"


MAX_NORM = 1.0
DRAWS = 3  # Minimum number of backward passes with random rounding. A single one may miss the noise of a sum


@dataclass(frozen=True)
class VerifyPipeline:
    """Pipeline options of ``verify``: stages, micro-batches and schedule.

    Args:
        pipe: the number of stages.
        micro_batches: the number of micro-batches per batch. None: the number of stages.
        stages: other options of ``PipelineStageManager``, such as ``{"schedule": "gpipe"}``.
        loss_weight: returns the weight of a micro-batch in the loss, as for ``Pipeline``.
    """

    pipe: int = 2
    micro_batches: int | None = None
    stages: Mapping[str, Any] = field(default_factory=dict)
    loss_weight: LossWeight | None = None

    @property
    def num_micro_batches(self) -> int:
        return self.pipe if self.micro_batches is None else self.micro_batches

    def create_stage_manager(self, context: ParallelContext | None = None) -> PipelineStageManager:
        """Create the pipeline stage manager. If ``context`` is None, no process groups are created."""
        rule = "VerifyPipeline(stages=) takes the options of PipelineStageManager"
        check_names_are_known(self.stages, ("schedule", *STAGE_FIELDS), "There is no option", rule)
        make_schedule(
            self.stages.get("schedule", "1f1b"), self.pipe, self.num_micro_batches, self.stages.get("num_model_chunks")
        )
        return PipelineStageManager(context or ParallelContext.from_sizes({"pipe": self.pipe}), **self.stages)

    def __str__(self) -> str:
        formats = {"schedule": "{}", "num_model_chunks": "{} chunks"}
        options = [formats.get(name, f"{name}={{}}").format(value) for name, value in self.stages.items()]
        parts = "1 micro-batch" if self.num_micro_batches == 1 else f"{self.num_micro_batches} micro-batches"
        return ", ".join([*options, parts])


StepFn = Callable[[Mapping[str, Any], int, int], Tensor]
"""Function that runs a backward pass for a shard of a batch, its index and a data rank, and returns the loss."""


@dataclass(frozen=True)
class VerifyJob:
    model_fn: ModelFn
    batch_fn: BatchFn
    tensor: int
    data: int
    steps: int
    dtype: torch.dtype
    loss_fn: LossFn | None
    policy: Policy | type[Policy] | None
    config: Mapping[str, Any]
    pipeline: VerifyPipeline | None = None
    training: VerifyTraining = field(default_factory=VerifyTraining)
    sequence: int | tuple[int, int] = 1
    grid: int | tuple[int, ...] = 1
    ids: Mapping[str, int] = field(default_factory=dict)  # config field -> token id of an image or sound placeholder
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.loss_fn is not None and not isinstance(self.loss_fn, UserLossFunction):
            object.__setattr__(self, "loss_fn", UserLossFunction(self.loss_fn))
        if self.pipe > 1 and (count := self.training.gradient_accumulation_steps) > 1:
            raise ConfigError(
                f"A pipeline with pipe={self.pipe} does not support gradient_accumulation_steps={count}.",
                remedy="Set micro_batches (--micro-batches) instead.",
            )
        for name in ("tensor", "pipe", "data", "steps"):
            check_int(name, getattr(self, name))

    def get_first_batch(self) -> Mapping[str, Any]:
        """Return the first batch, from which a policy can be derived if no example inputs can be generated."""
        return self.batch_fn(0)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the parameters and activations of both models."""
        return self.training.dtype or self.dtype

    @property
    def tolerances(self) -> Tolerances:
        return (
            get_tolerances(self.dtype)
            if self.training.dtype is None
            else get_half_precision_tolerances(self.training.dtype)
        )

    @property
    def pipe(self) -> int:
        return 1 if self.pipeline is None else self.pipeline.pipe

    @property
    def num_reference_shards(self) -> int:
        """Number of shards into which a batch is split to compute the loss of the unsharded model."""
        return 1 if self.average_loss_over == "tokens" else self.data

    @property
    def average_loss_over(self) -> str:
        """Configured loss average. By default, it is "tokens" with a pipeline and "ranks" without one."""
        return self.training.average_loss_over or ("ranks" if self.pipeline is None else "tokens")


@dataclass
class TrainingTrace:
    """Losses, gradients and gradient norms of each training step, and the weights before and after training."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    initial_weights: dict[str, Tensor] = field(default_factory=dict)
    final_weights: dict[str, Tensor] = field(default_factory=dict)
    gradient_noise: dict[str, float] = field(default_factory=dict)
    collectives: dict[str, tuple[int, int]] = field(default_factory=dict)


def train_both_models(job: VerifyJob) -> tuple[TrainingTrace | None, TrainingTrace, str, str]:
    """Train the unsharded model on rank 0 and the sharded model on all ranks.

    Returns the traces of both models, the name of the model, and a description of the layout.
    """
    sizes = {"tensor": job.tensor, "pipe": job.pipe, "data": job.data, "sequence": count_ranks_on_axis(job.sequence)}
    context = ParallelContext.from_default_process_group(sizes, torch.device(job.device))
    context = reshape_tensor_axis(reshape_sequence_axis(context, job.sequence), job.grid)
    world = context.flatten(*AXES)
    plain = run_on_all_ranks(
        lambda: _train_unsharded(job) if world.rank == 0 else None, world, "Training in one process"
    )
    sharded, name = _train_sharded(job, context)
    layout = [str(context), *([str(job.pipeline)] if job.pipeline is not None else [])]
    mode = job.config.get("tensor_parallel_mode", "1d")
    layout += [str(TensorGrid.from_context(reshape_tensor_axis_by_mode(context, mode), mode))] if mode != "1d" else []
    layout += ["reference loss over the full batch"] if job.num_reference_shards < job.data else []
    layout += [str(job.training)] if job.training.zero_stage is not None else []
    return plain, sharded, name, ", ".join(layout)


def build_model_under_test(job: VerifyJob) -> nn.Module:
    torch.manual_seed(0)
    dtype = torch.float32 if job.training.dtype is not None else job.dtype
    model = ensure_training_mode(job.model_fn().to(torch.device(job.device), dtype))
    disable_dropout(model)
    job.training.freeze_matching_params(model)
    config: Any = getattr(model, "config", None)
    if job.compute_dtype == torch.float64 and getattr(config, "_experts_implementation", None):
        config._experts_implementation = "eager"  # the other implementations do not compute in fp64
    return model


def _compute_loss(job: VerifyJob, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    if job.loss_fn is not None:
        return job.loss_fn(model, batch)
    output = model(**batch)
    loss = find_loss_in_output(output)
    if loss is None and hasattr(output, "loss"):  # outputs with this field have a loss if the batch has labels
        raise ConfigError(
            f"{type(model).__name__} returned no loss.", remedy="Add labels to the batch, or pass a loss_fn."
        )
    if loss is None:
        raise ConfigError(
            f"{type(model).__name__} returned no loss: its output of type {type(output).__name__} has no field 'loss'.",
            remedy="Pass a function loss_fn(output, batch) that computes the loss.",
        )
    return loss


def _compute_seeded_loss(
    job: VerifyJob, model: nn.Module, rank_batch: Mapping[str, Any], step: int, data_rank: int, seed: int = 0
) -> Tensor:
    """Compute the loss after setting a random seed, so that both models use the same random numbers."""
    seed_all_generators(1 + step * job.data + data_rank + seed * 2**31)
    return _compute_loss(job, model, rank_batch)


def _get_precision_context(job: VerifyJob) -> AbstractContextManager[Any]:
    return ForceFp64Mode() if job.compute_dtype == torch.float64 else nullcontext()


def _train_unsharded(job: VerifyJob) -> TrainingTrace:
    model, trace = build_model_under_test(job), TrainingTrace()
    optimizer = UnshardedModelOptimizers(model, job.training)
    _check_loss_is_reproducible(job, model)
    check_samples_are_independent(job, model)
    trace.initial_weights = {n: p.detach().clone().cpu() for n, p in model.named_parameters()}
    for step in range(job.steps):
        _record_loss_and_gradients(job, model, step, trace)
        trace.grad_norms.append(optimizer.step(MAX_NORM))
        model.zero_grad()
    trace.final_weights = {n: p.detach().clone().cpu() for n, p in model.named_parameters()}
    return trace


def _record_loss_and_gradients(job: VerifyJob, model: nn.Module, step: int, trace: TrainingTrace) -> None:
    """Record the loss and gradients of the unsharded model, and the rounding noise of each gradient."""

    def compute_gradients(rounding_mode: AbstractContextManager[Any]) -> dict[str, Tensor | None]:
        model.zero_grad()
        with rounding_mode:
            (loss * job.training.loss_scale).backward(retain_graph=True)
        grads = {n: p.grad for n, p in model.named_parameters()}
        return {n: None if grad is None else grad.clone() / job.training.loss_scale for n, grad in grads.items()}

    with _get_precision_context(job):
        loss = _compute_unsharded_loss(job, model, step)
        rounded = [compute_gradients(RandomRoundingMode(seed)) for seed in range(step, step + DRAWS, job.steps)]
        grads = compute_gradients(nullcontext())
    for name, grad in grads.items():
        for other in (r[name] for r in rounded):
            if grad is not None and other is not None and grad.numel():
                trace.gradient_noise[name] = max(trace.gradient_noise.get(name, 0.0), float((other - grad).abs().max()))
    trace.losses.append(float(loss.detach()))
    trace.grads.append({name: None if grad is None else grad.cpu() for name, grad in grads.items()})


def _compute_unsharded_loss(job: VerifyJob, model: nn.Module, step: int, seed: int = 0) -> Tensor:
    losses = []
    for backward in job.training.get_accumulation_indices(step):
        batch = job.batch_fn(backward)
        for rank in range(job.num_reference_shards):
            part = move_to_device(get_rank_batch(job, batch, rank, job.num_reference_shards), torch.device(job.device))
            losses.append(_compute_seeded_loss(job, model, part, backward, rank, seed).double())
    return torch.stack(losses).mean()


def _check_loss_is_reproducible(job: VerifyJob, model: nn.Module) -> None:
    """Raise ConfigError if the loss changes when it is computed again, because the model uses random numbers."""
    draws_anew = job.pipeline is not None or job.num_reference_shards < job.data
    with torch.no_grad(), _get_precision_context(job):
        first, second = (float(_compute_unsharded_loss(job, model, 0, seed)) for seed in (0, int(draws_anew)))
    if abs(first - second) > job.tolerances.loss * abs(first):
        seed = "another random seed" if draws_anew else "the same random seed"
        raise ConfigError(
            f"The loss of a batch is not reproducible: it was {first:.6g}, and {second:.6g} in a second forward pass "
            f"with {seed}.",
            remedy="Disable random operations in the model.",
        )


def _train_sharded(job: VerifyJob, context: ParallelContext) -> tuple[TrainingTrace, str]:
    model, trace = build_model_under_test(job), TrainingTrace()
    options = {"check_consistency": False, **job.config}  # the comparison itself reports divergence
    name = type(model).__name__
    if job.pipeline is not None:
        options["pipeline_stage_manager"] = job.pipeline.create_stage_manager(context)
    model, _ = shard_model_in_place(
        model, ShardConfig(context=context, **options), job.policy, get_example_batch=job.get_first_batch
    )
    job.training.enable_activation_checkpointing(model)
    optimizer: Any = make_verify_optimizers(model.parameters(), job.training)
    optimizer = (
        optimizer[0]
        if job.training.zero_stage is None
        else shard_optimizer(model, optimizer, **job.training.get_shard_optimizer_kwargs())
    )
    run_step: StepFn = partial(_run_forward_backward, job, model, optimizer)
    if job.pipeline is not None:
        run_step = _make_pipeline_step(job, model, job.pipeline)
    for step in range(job.steps):
        with CollectiveRecorder(context) as recorder, _get_precision_context(job):
            loss = _run_forward_and_backward(job, model, optimizer, run_step, step)
        mean = all_reduce(loss.detach().clone(), context.data, purpose="check") / context.data.size
        trace.losses.append(float(mean))
        trace.grads.append(
            _gather_full_tensors_from_all_stages(
                model, context, {n: _get_full_gradient(optimizer, n, p) for n, p in model.named_parameters()}
            )
        )
        trace.grad_norms.append(float(clip_grad_norm_(model, MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    if job.training.zero_stage == 3:
        state = full_state_dict(model)
        trace.final_weights = {n: state[n] for n in trace.grads[-1]}
    else:
        after = _gather_full_tensors_from_all_stages(
            model, context, {n: p.detach() for n, p in model.named_parameters()}
        )
        trace.final_weights = {n: p for n, p in after.items() if p is not None}
    trace.collectives = {f"{op} over {axis} ({why})": v for (op, axis, why), v in recorder.summarize_calls().items()}
    return trace, name


def _run_forward_and_backward(
    job: VerifyJob, model: nn.Module, optimizer: Optimizer, run_step: StepFn, step: int
) -> Tensor:
    """Run all forward and backward passes of the sharded model in one step, and return the mean loss."""
    own = optimizer if isinstance(optimizer, ZeroOptimizer) else None
    rank, last = get_sharding_metadata(model).context.data.rank, job.training.get_accumulation_indices(step)[-1]
    losses = []
    for backward in job.training.get_accumulation_indices(step):
        part = move_to_device(get_rank_batch(job, job.batch_fn(backward), rank, job.data), torch.device(job.device))
        waits = nullcontext() if backward == last else own.no_sync() if own is not None else no_sync(model)
        with waits:
            losses.append(run_step(part, backward, rank).detach())
    return torch.stack(losses).mean()


def _get_full_gradient(optimizer: Optimizer, param_name: str, param: Tensor) -> Tensor | None:
    """Return the full gradient of a parameter, even if ZeRO shards the gradient."""
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer.full_gradient(param_name) if param.requires_grad else None
    return param.grad


def _run_forward_backward(
    job: VerifyJob, model: nn.Module, optimizer: Optimizer, rank_batch: Mapping[str, Any], step: int, data_rank: int
) -> Tensor:
    loss = _compute_seeded_loss(job, model, rank_batch, step, data_rank).double()
    share = loss / job.training.gradient_accumulation_steps
    optimizer.backward(share) if isinstance(optimizer, ZeroOptimizer) else share.backward()
    return loss


def _make_pipeline_step(job: VerifyJob, model: nn.Module, verify_pipeline: VerifyPipeline) -> StepFn:
    def compute_loss_from_output(output: Any, micro_batch: Mapping[str, Any]) -> Tensor:
        assert job.loss_fn is not None
        return job.loss_fn(PrecomputedOutputModule(model, output, micro_batch), micro_batch)

    pipeline = Pipeline(
        model,
        verify_pipeline.micro_batches,
        loss_fn=None if job.loss_fn is None else compute_loss_from_output,
        loss_weight=verify_pipeline.loss_weight,
        average_loss_over=job.average_loss_over,
    )

    def run_step(rank_batch: Mapping[str, Any], step: int, data_rank: int) -> Tensor:
        seed_all_generators(1 + step * job.data + data_rank)
        return pipeline.step(rank_batch)

    return run_step


def _gather_full_tensors_from_all_stages(
    model: nn.Module, context: ParallelContext, local_tensors: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """Gather full tensors from all ranks and pipeline stages by name. Tied tensors that differ become NaN."""
    specs, state = get_shard_specs(model), get_sharding_metadata(model)
    present = [(name, t) for name, t in local_tensors.items() if t is not None]
    gathered = gather_full_tensors([t for _, t in present], [specs[name] for name, _ in present], state.get_axis)
    full = {**local_tensors, **{name: x.cpu() for (name, _), x in zip(present, gathered, strict=True)}}
    stages = state.stages
    if stages is None or context.pipe.size == 1:
        return full
    out: dict[str, Tensor | None] = {}
    for stage in all_gather_objects(full, context.pipe):
        for name, t in stage.items():
            first = stages.state[name][0]
            before = out.setdefault(first, t)
            if before is not t and (before is None or t is None or not torch.equal(before, t)):
                out[first] = None if t is None else torch.full_like(t, float("nan"))
    return {name: out[name] for name in stages.state if name in out}
