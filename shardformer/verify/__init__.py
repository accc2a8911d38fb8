"""Can anybody tell? The sharded model against the plain one: loss, every gradient, and every weight after some steps.

Worker processes build the model from one seed. The first runs it plain; then all run it sharded, on different parts of
each batch where there is a data axis. Gradients and weights are gathered through their layouts and compared one by one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from shardformer.config import ShardConfig
from shardformer.errors import ConfigError, ShardFormerError, WorkerError, nearest, wants_traceback
from shardformer.mesh.sizes import total_of
from shardformer.pipeline.flat import ids_of
from shardformer.policies.policy import Policy
from shardformer.testing.pool import WorkerPool
from shardformer.testing.pool_worker import RemoteCall
from shardformer.verify.ahead import AskedStages, check_split
from shardformer.verify.compare import compare
from shardformer.verify.guard import refuse_import, watch_workers
from shardformer.verify.parts import check_batch
from shardformer.verify.report import Bounds, Difference, Report, bounds_for
from shardformer.verify.run import BatchFn, Job, LossFn, ModelFn, Pipelined, run_job
from shardformer.verify.training import Training

__all__ = ["Bounds", "Difference", "Pipelined", "Report", "Training", "verify"]


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
    pipeline: Pipelined | None = None,
    training: Training | None = None,
    pool: WorkerPool | None = None,
) -> Report:
    """Trains the plain and the sharded model side by side and compares everything.

    Args:
        model_fn: builds the plain model; called under one seed in every process. Picklable.
        batch_fn: step -> the global batch of that step. Tensors whose first dim is the batch are cut along the data
            axis, whose size divides it. Picklable.
        tensor, data: sizes of axes; as many processes as all axes multiply to are started. In the place of the first a
            dict of sizes: ``{"tensor": 2, "sequence": 4}``, ``{"sequence": (2, 2)}`` for a ring of groups, or
            ``{"tensor": (2, 2)}`` for rows and columns with ``config={"tensor_parallel_mode": "2d"}``.
        steps: optimizer steps (SGD with momentum on gradients clipped to norm 1).
        dtype: of the model and of what floats in the batch.
        loss_fn: (model, batch) -> loss; by default ``model(**batch).loss``.
        policy: the user's own policy.
        config: options of ``ShardConfig``, as one or as a dict.
        pipeline: runs batches as micro-batches, over the stages that it says: ``Pipelined(pipe=2, micro_batches=4)``.
        training: with which optimizer and stage of ZeRO, and beside which plain loss: ``Training(zero=3)``.
        pool: workers to run in, as many as needed; by default started and ended here.

    Returns the report. Raises ShardFormerError when the model cannot be sharded, or compared, as asked; where the plan
    or the first batch shows it, before any process starts, from a model that is built here once for that.
    """
    refuse_import()
    bounds_for(dtype)
    options = _options_of(config)
    how = training or Training()
    grid, sequence = _sizes_of(tensor)
    tensor = total_of(grid, "tensor")
    job = Job(model_fn, batch_fn, tensor, data, steps, dtype, loss_fn, policy, options, pipeline, how, sequence, grid)
    stages = None if pipeline is None else _stages_of(pipeline)
    start = time.perf_counter()
    RemoteCall.of(report_here, (job,), {})  # refuses what cannot be sent
    job = replace(job, ids=ids_of(check_split(model_fn, grid, policy, job.config, stages)))
    check_batch(job)
    if pool is not None:
        report = _run_in(pool, job)
    else:
        with WorkerPool(tensor * job.pipe * data * total_of(sequence), timeout_s=3600.0) as own:
            report = _run_in(own, job)
    report.seconds = time.perf_counter() - start
    return report


def _run_in(pool: WorkerPool, job: Job) -> Report:
    try:
        with watch_workers():
            report = pool.run(report_here, job)[0]
    except WorkerError:
        raise
    except ShardFormerError as error:
        if wants_traceback():  # as on the command line
            raise
        raise error.with_traceback(None) from None  # what all ranks raised alike, without each rank's own words
    assert report is not None
    return report


def _sizes_of(tensor: int | Mapping[str, Any]) -> tuple[int | tuple[int, ...], int | tuple[int, int]]:
    """Of the tensor axis and of the sequence axis."""
    if not isinstance(tensor, Mapping):
        return tensor, 1
    for name in tensor:
        if name not in ("tensor", "sequence"):
            rule = "The dict in the place of tensor= has the sizes of tensor and of sequence"
            raise ConfigError(
                f"There is no axis {name!r} in it", rule=rule, remedy=nearest(name, ("tensor", "sequence"))
            )
    return tensor.get("tensor", 1), tensor.get("sequence", 1)


def _stages_of(pipeline: Pipelined) -> AskedStages:
    known = [name for name in AskedStages.__dataclass_fields__ if name not in ("num_stages", "micro_batches")]
    for name in pipeline.stages:
        if name not in known:
            rule = "Pipelined(stages=) is what PipelineStageManager takes beside the grid"
            raise ConfigError(f"There is no option {name!r}", rule=rule, remedy=nearest(name, known))
    return AskedStages(pipeline.pipe, pipeline.micro_batches, **pipeline.stages)


def _options_of(config: Mapping[str, Any] | ShardConfig | None) -> dict[str, Any]:
    """The options that were given, checked."""
    fields = ShardConfig.__dataclass_fields__
    if not isinstance(config, ShardConfig):
        for name in config or {}:
            if name not in fields:
                rule = "Options are the fields of ShardConfig"
                raise ConfigError(f"There is no option {name!r}", rule=rule, remedy=nearest(name, fields))
        config = ShardConfig(**(config or {}))
    if config.context is not None or config.tensor_parallel_process_group is not None:
        raise ConfigError(
            "verify was given a config with a process group",
            rule="verify starts its own processes and lays its own grid",
            remedy="Leave context and tensor_parallel_process_group out, and use tensor= and data=",
        )
    usual = vars(ShardConfig())
    return {name: value for name, value in vars(config).items() if value != usual[name]}


def report_here(job: Job) -> Report | None:
    """Called on every worker: the report on the first, None on the others."""
    plain, sharded, name, layout = run_job(job)
    return compare(job, plain, sharded, name, layout) if plain is not None else None
