"""Describes a training run and estimates its memory per rank, for ``shardformer train --dry-run``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardformer.config import ParallelConfig
from shardformer.errors import ShardFormerError
from shardformer.local_ranks.fake_rank import MemoryTracker, enable_fake_tensors, make_fake_context
from shardformer.mesh.parallel_context import get_local_device, reshape_tensor_axis
from shardformer.shard_model_api import shard_model
from shardformer.sharding.describe import describe_sharding
from shardformer.train_command.build import build_hooks, build_model, build_optimizer_factory, freeze_and_add_lora
from shardformer.train_command.config_schema import TrainConfig
from shardformer.train_command.load_data import TrainingData
from shardformer.train_command.model_config import load_model_config
from shardformer.train_command.run import RunSummary, load_data_and_model
from shardformer.training.data_loader import collate_samples
from shardformer.training.initialize import make_pipeline
from shardformer.zero.memory_estimate import MemoryEstimate, estimate_memory
from shardformer.zero.mixed_precision import MixedPrecision


@dataclass(frozen=True)
class RankMemoryEstimate:
    """Estimated memory of one rank, in bytes.

    Args:
        coords: Coordinates of the rank on the mesh axes.
        persistent_bytes: Memory that is used during the whole run, such as parameters and optimizer states.
        step_peak_bytes: Peak memory of a step without parameters: activations, gradients and workspace. None if tracing
            failed.
    """

    coords: dict[str, int]
    persistent_bytes: MemoryEstimate
    step_peak_bytes: int | None

    @property
    def peak_bytes(self) -> float | None:
        """Peak memory on the device in bytes, or None if tracing failed. The peak of a step includes gradients."""
        kept = self.persistent_bytes
        return None if self.step_peak_bytes is None else kept.total + max(self.step_peak_bytes - kept.gradients, 0)


@dataclass(frozen=True)
class DryRunReport:
    """Report of ``shardformer train --dry-run`` on the model, data, parallel layout and memory of a run.

    Args:
        axis_sizes: Size of each mesh axis.
        rank_estimates: Memory of the ranks of one data-parallel replica.
        single_process_estimate: Memory of the same run in a single process, or None if the run has only one process.
        device: Name of the device of this machine.
        free_bytes: Free memory of the device in bytes, or None if it is unknown.
        untraced_reason: Reason why the memory of a step is unknown, or "".
    """

    summary: RunSummary
    layout: ParallelConfig
    axis_sizes: dict[str, int]
    description: str
    rank_estimates: list[RankMemoryEstimate]
    single_process_estimate: RankMemoryEstimate | None
    device: str
    free_bytes: int | None
    untraced_reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dict that can be written as JSON."""

        def rank_estimate_to_dict(estimate: RankMemoryEstimate) -> dict[str, Any]:
            return {
                **estimate.coords,
                **asdict(estimate.persistent_bytes),
                "step": estimate.step_peak_bytes,
                "peak": estimate.peak_bytes,
            }

        return {
            **asdict(self.summary),
            "sizes": self.axis_sizes,
            "parallel": self.layout.to_dict(),
            "bytes_per_rank": [rank_estimate_to_dict(rank) for rank in self.rank_estimates],
            "bytes_in_one_process": None
            if self.single_process_estimate is None
            else rank_estimate_to_dict(self.single_process_estimate),
            "device": self.device,
            "free_bytes": self.free_bytes,
            "why_untraced": self.untraced_reason or None,
        }


def make_dry_run_report(config: TrainConfig) -> DryRunReport:
    """Describe a run and estimate its memory per rank, without training and without allocating the weights.

    Raises the errors that training would raise before its first step. Communicates nothing.
    """
    build_hooks(config)
    data, lazy_model = load_data_and_model(config)
    layout = config.layout
    sizes = {name: size or 1 for name, size in layout.sizes.items()}
    estimator = _MemoryEstimator(config, data)
    ranks = [
        estimator.estimate_rank_memory(layout, {"pipe": pipe, "tensor": tensor})
        for pipe, tensor in product(range(sizes["pipe"]), range(sizes["tensor"]))
    ]
    description, why_untraced = estimator.description, estimator.why_untraced
    alone = None
    if any(size > 1 for size in sizes.values()):
        plain = replace(layout.fit_to(1), zero_stage=None, keep_frozen=True, reshard_after_forward=None)
        alone = estimator.estimate_rank_memory(plain, {"pipe": 0, "tensor": 0})
    device, free_bytes = _get_device_name_and_free_memory()
    return DryRunReport(
        summary=RunSummary.from_config(config, data, lazy_model),
        layout=layout,
        axis_sizes=sizes,
        description=description,
        rank_estimates=ranks,
        single_process_estimate=alone,
        device=device,
        free_bytes=free_bytes,
        untraced_reason=why_untraced,
    )


def _get_device_name_and_free_memory() -> tuple[str, int | None]:
    """Return the name of the device and its free memory in bytes, or None if the free memory is unknown."""
    device = get_local_device()
    if device.type == "cuda":
        return torch.cuda.get_device_name(device), int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not on Linux
        return "cpu", None
    return "cpu", next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


# B batch, S sequence


class _MemoryEstimator:
    """Estimates the memory use of individual ranks with fake tensors, which do not allocate memory.

    Attributes:
        description: Describes how the first estimated rank shards the model.
        why_untraced: Reason why a step could not be traced, or "".
    """

    def __init__(self, config: TrainConfig, training_data: TrainingData) -> None:
        self._config, self._data, self._saved = config, training_data, load_model_config(config)
        self._make_optimizer: Callable[..., Any] = build_optimizer_factory(config.optimizer)
        self._shapes: dict[tuple[int, int], dict[Any, Any]] = {}  # shapes that stages send, by layout and tensor rank
        self.description = self.why_untraced = ""

    def estimate_rank_memory(self, layout: ParallelConfig, mesh_coords: dict[str, int]) -> RankMemoryEstimate:
        """Estimate the memory of the rank at ``mesh_coords`` in the mesh. Estimate earlier stages first."""
        sizes = {name: size or 1 for name, size in layout.sizes.items()}
        context = reshape_tensor_axis(make_fake_context(mesh_coords, **sizes), layout.tensor)  # type: ignore[arg-type]
        with torch.random.fork_rng(devices=[]), enable_fake_tensors():
            unsharded = build_model(self._config, self._data, self._saved, lazy_init=False)
            unsharded = freeze_and_add_lora(self._config, unsharded)
            of_params = self._make_optimizer(unsharded)
            model = shard_model(unsharded, config=layout.make_shard_config(context)).train()
            self.description = self.description or str(describe_sharding(model))
            persistent = estimate_memory(
                model,
                of_params([p for p in model.parameters() if p.requires_grad]),
                stage=layout.effective_zero_stage or 0,
                precision=layout.precision,
                offload=layout.offload,
                data=sizes["data"],
            )
        batch_size = self._config.data.batch_size
        batch_size = min(batch_size, self._data.num_samples or batch_size)
        samples = self._data.get_first_samples(max(-(-batch_size // sizes["data"]), 1))
        step_dtype = MixedPrecision.from_value(layout.precision).param_dtype or torch.float32
        with torch.random.fork_rng(devices=[]), enable_fake_tensors() as fake:  # in the dtype of a step
            unsharded = build_model(self._config, self._data, self._saved, lazy_init=False, dtype=step_dtype)
            unsharded = freeze_and_add_lora(self._config, unsharded)
            model = shard_model(unsharded, config=layout.make_shard_config(context)).train()
            batch = fake((self._data.collate_fn or collate_samples)(samples))
            shapes = self._shapes.setdefault((layout.pipe, mesh_coords["tensor"]), {})
            step, why_untraced = _trace_peak_memory(model, layout, self._data, batch, shapes)
        self.why_untraced = self.why_untraced or why_untraced
        return RankMemoryEstimate(mesh_coords, persistent, step)


def _trace_peak_memory(
    model: nn.Module, layout: ParallelConfig, training_data: TrainingData, batch: Any, sent_shapes: dict[Any, Any]
) -> tuple[int | None, str]:
    """Trace a training step, and return its peak memory in bytes, excluding the parameters.

    If tracing fails, return None and the reason. ``sent_shapes`` collects the shapes that each stage sends to the next
    one.
    """
    parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    try:
        with MemoryTracker([*model.parameters()]) as tracker:
            pipeline = make_pipeline(model, layout, training_data.loss_fn, training_data.loss_weight)
            if layout.pipe > 1:
                pipeline.exchange.given = dict(sent_shapes)
            pipeline.step(batch)
    except (ShardFormerError, RuntimeError, TypeError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"
    if layout.pipe > 1:
        sent_shapes |= pipeline.exchange.known
    return tracker.peak - parameter_bytes, ""
