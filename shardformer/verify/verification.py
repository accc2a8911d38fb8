"""Compares the loss, each gradient and each weight of a sharded model with those of the unsharded model."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from multiprocessing import process
from pathlib import Path
from tempfile import TemporaryDirectory
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.config import ShardConfig
from shardformer.errors import ConfigError, ShardFormerError, WorkerError, check_names_are_known, is_traceback_enabled
from shardformer.gradient_accumulation.micro_batches import get_special_token_ids
from shardformer.layout.sharding_metadata import max_abs_difference
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.local_ranks.worker_process import RemoteCall
from shardformer.mesh.parallel_context import ParallelContext, reshape_tensor_axis
from shardformer.mesh.rank_grid import count_ranks_on_axis
from shardformer.mesh.tensor_grid import GRID_MODES, reshape_tensor_axis_by_mode
from shardformer.pipeline.stage_manager import PipelineStageManager, partition_layers_into_stages
from shardformer.policies.policy import Policy
from shardformer.shard_model_api import resolve_policy_and_origin
from shardformer.sharding.checks import check_can_be_sharded, make_checked_sharding_plan
from shardformer.verify.comparison import LargestDifference, Report, Tolerances, get_tolerances
from shardformer.verify.train_both import (
    MAX_NORM,
    BatchFn,
    LossFn,
    ModelFn,
    TrainingTrace,
    VerifyJob,
    VerifyPipeline,
    check_batch_is_splittable,
    train_both_models,
)
from shardformer.verify.training_options import ADAPTIVE_BOUND, LEARNING_RATE, VerifyTraining


def check_policy_can_shard(
    model_fn: Callable[[], nn.Module],
    tensor: int | tuple[int, ...],
    policy: Policy | type[Policy] | None = None,
    shard_config_options: Mapping[str, Any] | None = None,
    stage_manager: PipelineStageManager | None = None,
    get_example_batch: Callable[[], Mapping[str, Any] | None] = lambda: None,
) -> Any:
    """Build the model in this process, and check that its policy can shard it over ``tensor`` ranks.

    Args:
        stage_manager: the pipeline stages into which the model is split.
        get_example_batch: returns a batch, from which a policy may be derived.

    Returns:
        The config of the model, or None if it has no config.

    Raises:
        ShardFormerError: the error that sharding would raise in every worker. Errors of ``model_fn`` are not raised
            here but in the workers, because the function may depend on them.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            model = model_fn()
        except ShardFormerError:
            raise
        except Exception:  # the workers report it, with the rank
            return None
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model_fn must return an nn.Module, but returned {type(model).__name__}.",
            remedy="Return the unsharded model from model_fn.",
        )
    check_can_be_sharded(model)
    ranks = count_ranks_on_axis(tensor, "tensor")
    if ranks == 1 and stage_manager is None and policy is None and not shard_config_options:
        return getattr(model, "config", None)  # no policy is needed, or a rank finds the error
    # copied, because the original is pickled for the workers and must not hold this model
    own = policy if isinstance(policy, type) else deepcopy(policy)
    chosen, _ = resolve_policy_and_origin(
        model, own, tp_size=ranks, allow_model_copy=stage_manager is not None, get_example_batch=get_example_batch
    )
    context, mode = (
        ParallelContext.from_sizes({"tensor": ranks}),
        (shard_config_options or {}).get("tensor_parallel_mode", "1d"),
    )
    context = reshape_tensor_axis(context, tensor)
    config = ShardConfig(
        context=reshape_tensor_axis_by_mode(context, mode) if mode in GRID_MODES else context,
        **(shard_config_options or {}),
    )
    plan = make_checked_sharding_plan(model, chosen, config)
    if stage_manager is not None:
        partition_layers_into_stages(plan.model, chosen, stage_manager)
    return getattr(model, "config", None)


NO_DIFFERENCE = LargestDifference(0.0, "", -1.0)
"""Initial value. Any compared tensor replaces it, even an identical one, so that ``where`` is set."""

NOISE_FACTOR = 4.0  # allowed multiple of the rounding noise, where the noise exceeds the tolerance


def compare_traces(
    job: VerifyJob, unsharded_trace: TrainingTrace, sharded_trace: TrainingTrace, model_name: str, layout: str
) -> Report:
    bounds = job.tolerances
    if job.training.has_adaptive_optimizer and job.training.dtype is None:
        bounds = replace(bounds, loss=ADAPTIVE_BOUND, gradient=ADAPTIVE_BOUND)
    loss = _find_worst_scalar_difference(unsharded_trace.losses, sharded_trace.losses, bounds.loss)
    norm = _find_worst_scalar_difference(unsharded_trace.grad_norms, sharded_trace.grad_norms, bounds.gradient)
    gradient, missing = _find_worst_and_missing_gradients(unsharded_trace, sharded_trace, bounds)
    weight, gone = _find_worst_weight_difference(job, unsharded_trace, sharded_trace, bounds)
    missing += [f"{name} (weight)" for name in gone]
    layout = ", ".join([layout, *(k.removeprefix("enable_") for k, v in job.config.items() if v is True)])
    dtype, losses = (
        str(job.compute_dtype).removeprefix("torch."),
        list(zip(unsharded_trace.losses, sharded_trace.losses, strict=True)),
    )
    return Report(
        model_name, layout, job.steps, dtype, bounds, loss, gradient, weight, norm, sharded_trace.collectives, losses,
        missing=missing,
    )  # fmt: skip


def _find_worst_scalar_difference(
    unsharded_values: list[float], sharded_values: list[float], tolerance: float
) -> LargestDifference:
    found = []
    for step, (a, b) in enumerate(zip(unsharded_values, sharded_values, strict=True)):
        relative = abs(a - b) / max(abs(a), 1e-30) if a == a and b == b else float("inf")
        found.append(LargestDifference(relative, f"step {step}", relative / tolerance))
    return max(found, key=lambda d: d.used)


def _find_worst_and_missing_gradients(
    unsharded_trace: TrainingTrace, sharded_trace: TrainingTrace, tolerances: Tolerances
) -> tuple[LargestDifference, list[str]]:
    worst, missing = NO_DIFFERENCE, []
    for step, (sharded_grads, plain_grads) in enumerate(zip(sharded_trace.grads, unsharded_trace.grads, strict=True)):
        largest = max((float(g.abs().max()) for g in plain_grads.values() if g is not None and g.numel()), default=0.0)
        for name in {**plain_grads, **sharded_grads}:
            a, b = plain_grads.get(name), sharded_grads.get(name)
            if a is None or b is None:
                if a is not b:
                    missing.append(f"{name} (step {step})")
                continue
            noise = NOISE_FACTOR * (unsharded_trace.gradient_noise.get(name, 0.0) + tolerances.eps * largest)
            worst = _update_worst_difference(worst, a, b, a, tolerances.gradient, noise, f"{name}, step {step}")
    return worst, missing


def _find_worst_weight_difference(
    job: VerifyJob, unsharded_trace: TrainingTrace, sharded_trace: TrainingTrace, tolerances: Tolerances
) -> tuple[LargestDifference, list[str]]:
    """Find the largest difference between the trained weights of both models, and missing weights."""
    worst = NO_DIFFERENCE
    gone = [
        name
        for name in {**unsharded_trace.final_weights, **sharded_trace.final_weights}
        if (name in unsharded_trace.final_weights) != (name in sharded_trace.final_weights)
    ]
    steps = len(unsharded_trace.losses)
    for name, after in unsharded_trace.final_weights.items():
        if name in gone or (job.training.has_adaptive_optimizer and _is_gradient_rounding_noise(unsharded_trace, name)):
            continue
        moved = after - unsharded_trace.initial_weights[name]
        rounding = tolerances.eps * float(after.abs().max()) if after.numel() else 0.0
        scale = LEARNING_RATE * steps * steps * min(1.0, MAX_NORM / max(min(unsharded_trace.grad_norms), 1e-30))
        noise = NOISE_FACTOR * (
            rounding + scale * unsharded_trace.gradient_noise.get(name, 0.0) + scale * tolerances.eps
        )
        worst = _update_worst_difference(
            worst, after, sharded_trace.final_weights[name], moved, tolerances.gradient, noise, name
        )
    return worst, gone


def _is_gradient_rounding_noise(unsharded_trace: TrainingTrace, param_name: str) -> bool:
    """Return whether a gradient consists only of rounding errors, like that of the key bias in attention."""
    grads = [grad for step in unsharded_trace.grads if (grad := step.get(param_name)) is not None and grad.numel()]
    return unsharded_trace.gradient_noise.get(param_name, 0.0) > 1e-3 * max(
        (float(grad.abs().max()) for grad in grads), default=0.0
    )


def _update_worst_difference(
    worst_so_far: LargestDifference,
    expected: Tensor,
    actual: Tensor,
    reference_for_scale: Tensor,
    tolerance: float,
    rounding_noise: float,
    location: str,
) -> LargestDifference:
    if expected.shape != actual.shape:
        return LargestDifference(
            float("inf"), f"{location}: {tuple(actual.shape)} instead of {tuple(expected.shape)}", float("inf")
        )
    if not expected.numel():
        return worst_so_far
    difference, magnitude = max_abs_difference(expected, actual), float(reference_for_scale.abs().max())
    allowed = tolerance * magnitude + rounding_noise
    used = difference / allowed if allowed > 0 else (0.0 if difference == 0 else float("inf"))
    if used <= worst_so_far.used:
        return worst_so_far
    return LargestDifference(difference / max(magnitude, rounding_noise / tolerance, 1e-300), location, used)


NOTE_VARIABLE = "SHARDFORMER_UNGUARDED"


def check_main_guard() -> None:
    """Exit a worker process whose script calls ``verify`` outside ``if __name__ == "__main__"``."""
    if not getattr(process.current_process(), "_inheriting", False):
        return
    place = _find_main_module_location()
    note = Path(os.environ.get(NOTE_VARIABLE, ""))
    if NOTE_VARIABLE in os.environ and note.parent.is_dir():
        note.write_text(place, encoding="utf-8")
        sys.exit(1)
    raise _make_main_guard_error(place)


@contextmanager
def explain_missing_main_guard() -> Iterator[None]:
    """Raise ConfigError instead of WorkerError if the user's script lacks ``if __name__ == "__main__"``."""
    before = os.environ.get(NOTE_VARIABLE)
    with TemporaryDirectory(prefix="shardformer-") as folder:
        note = Path(folder, "unguarded")
        os.environ[NOTE_VARIABLE] = str(note)
        try:
            yield
        except WorkerError:
            if note.exists():
                raise _make_main_guard_error(note.read_text(encoding="utf-8")) from None
            raise
        finally:
            os.environ.pop(NOTE_VARIABLE)
            if before is not None:
                os.environ[NOTE_VARIABLE] = before


def _find_main_module_location() -> str:
    for frame, line in walk_stack(sys._getframe()):
        if frame.f_globals.get("__name__") == "__mp_main__" and frame.f_code.co_name == "<module>":
            return f"line {line} of {frame.f_code.co_filename}"
    return "the script"


def _make_main_guard_error(location: str) -> ConfigError:
    return ConfigError(
        f'verify() was called outside `if __name__ == "__main__":`, at {location}.',
        rule="verify starts processes that import the script, which would call verify again.",
        remedy='Move the call and the other top-level code of the script under if __name__ == "__main__":\n',
    )


def verify(
    model_fn: ModelFn,
    batch_fn: BatchFn,
    tensor: int | Mapping[str, Any] = 2,
    data: int = 1,
    steps: int = 3,
    dtype: torch.dtype = torch.float64,
    loss_fn: LossFn | None = None,
    policy: Policy | type[Policy] | None = None,
    config: Mapping[str, Any] | ShardConfig | None = None,
    *,
    pipeline: VerifyPipeline | None = None,
    training: VerifyTraining | None = None,
    pool: WorkerPool | None = None,
) -> Report:
    """Train a model unsharded and sharded, and compare all losses, gradients and weights.

    Args:
        model_fn: builds the unsharded model. Every process calls it with the same seed. Picklable.
        batch_fn: returns the global batch of a step. Tensors whose first dimension is the batch are sharded along the
            data axis, whose size must divide the batch. Picklable.
        tensor: the size of the tensor axis, or sizes: ``{"tensor": 2, "sequence": 4}``, ``{"sequence": (2, 2)}`` for a
            ring of groups, or ``{"tensor": (2, 2)}`` for a grid with ``config={"tensor_parallel_mode": "2d"}``.
        data: the size of the data axis. The number of processes is the product of all axis sizes.
        steps: the number of optimizer steps (SGD with momentum, gradients clipped to norm 1).
        dtype: the dtype of the model and of floating-point tensors in the batch.
        loss_fn: ``loss_fn(output, batch)``, as in ``initialize``, or ``loss_fn(model, batch)`` if it calls the model in
            another way. None: ``model(**batch).loss``.
        policy: your own policy. None: the policy of the model's family, or a policy that is derived from the model.
        config: options of ``ShardConfig``.
        pipeline: the pipeline stages and micro-batches: ``VerifyPipeline(pipe=2, micro_batches=4)``.
        training: the optimizer, the ZeRO stage and the reference loss: ``VerifyTraining(zero_stage=3)``.
        pool: the worker pool to run in. None: start a new pool, and stop it at the end.

    Raises:
        ShardFormerError: the model cannot be sharded or compared in this layout. Errors in the plan or in the first
            batch are raised before any process starts.
    """
    check_main_guard()
    get_tolerances(dtype)
    options, how = _get_non_default_options(config), training or VerifyTraining()
    grid, sequence = _parse_tensor_and_sequence_sizes(tensor)
    tensor = count_ranks_on_axis(grid, "tensor")
    job = VerifyJob(
        model_fn, batch_fn, tensor, data, steps, dtype, loss_fn, policy, options, pipeline, how, sequence, grid
    )
    stages = None if pipeline is None else pipeline.create_stage_manager()
    start = time.perf_counter()
    RemoteCall.from_function(run_verify_job, (job,), {})  # raises if an argument cannot be pickled
    built = check_policy_can_shard(model_fn, grid, policy, job.config, stages, job.get_first_batch)
    job = replace(job, ids=get_special_token_ids(built))
    check_batch_is_splittable(job)
    if pool is not None:
        report = _run_job_in_pool(pool, job)
    else:
        with WorkerPool(tensor * job.pipe * data * count_ranks_on_axis(sequence), timeout_s=3600.0) as own:
            report = _run_job_in_pool(own, job)
    report.seconds = time.perf_counter() - start
    return report


def _run_job_in_pool(pool: WorkerPool, job: VerifyJob) -> Report:
    try:
        with explain_missing_main_guard():
            report = pool.run(run_verify_job, job)[0]
    except WorkerError:
        raise
    except ShardFormerError as error:
        if is_traceback_enabled():
            raise
        raise error.with_traceback(None) from None  # all ranks raised the same error
    assert report is not None
    if not any(loss for loss, _ in report.losses):
        raise ConfigError(
            f"The loss of {report.model} is exactly 0 in all {report.steps} steps, so the comparison would not find "
            "errors.",
            remedy="Initialize a layer whose weights are all 0, such as the output layer, with other values in "
            "model_fn, or pass another loss_fn.",
        )
    return report


def _parse_tensor_and_sequence_sizes(
    size_or_sizes_by_axis: int | Mapping[str, Any],
) -> tuple[int | tuple[int, ...], int | tuple[int, int]]:
    if not isinstance(size_or_sizes_by_axis, Mapping):
        return size_or_sizes_by_axis, 1
    check_names_are_known(
        size_or_sizes_by_axis, ("tensor", "sequence"), "tensor= has no axis", "It takes a size, or a dict of these axes"
    )
    return size_or_sizes_by_axis.get("tensor", 1), size_or_sizes_by_axis.get("sequence", 1)


def _get_non_default_options(config: Mapping[str, Any] | ShardConfig | None) -> dict[str, Any]:
    if not isinstance(config, ShardConfig):
        config = ShardConfig.from_options(config or {})
    if config.context is not None or config.tensor_parallel_process_group is not None:
        raise ConfigError(
            "verify does not support context or tensor_parallel_process_group in config, because it creates its own "
            "process groups.",
            remedy="Remove both fields, and set the layout with the arguments tensor and data of verify.",
        )
    usual = vars(ShardConfig())
    return {name: value for name, value in vars(config).items() if value != usual[name]}


def run_verify_job(job: VerifyJob) -> Report | None:
    """Train both models on this worker, and return the report on the first worker, or None on other workers."""
    plain, sharded, name, layout = train_both_models(job)
    return compare_traces(job, plain, sharded, name, layout) if plain is not None else None
