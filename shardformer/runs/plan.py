"""What a run would do, without doing it: how the model is cut, and what each rank holds."""

# B batch, S sequence

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from shardformer.engine.data_collate import collated
from shardformer.engine.parallel import Parallel
from shardformer.engine.parts import pipeline_of
from shardformer.errors import ShardFormerError
from shardformer.mesh.context import with_tensor
from shardformer.optim.memory import Memory, memory
from shardformer.optim.settings import Precision
from shardformer.runs.config import RunConfig
from shardformer.runs.data import RunData
from shardformer.runs.hooks import hooks_of
from shardformer.runs.model_config import own_config
from shardformer.runs.models import head_of, model_of
from shardformer.runs.run import data_and_model_of, num_steps_of
from shardformer.runs.updates import optimizer_of
from shardformer.sharder import shard_model
from shardformer.sharding.describe import describe
from shardformer.testing.fake import LiveBytes, fake_context, fake_tensors


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank, and where it stands.

    Args:
        coords: its place on the axes.
        kept: by kind, through the whole run.
        step: the most that a step holds beside parameters: activations, gradients, scratch. None where it could not
            be traced.
    """

    coords: dict[str, int]
    kept: Memory
    step: int | None


@dataclass(frozen=True)
class RunPlan:
    """What ``--dry-run`` prints."""

    model: str
    num_parameters: int
    data: str
    num_samples: int
    num_steps: int
    layout: dict[str, int]
    description: str
    ranks: list[RankMemory]
    why_untraced: str = ""


def plan_of(config: RunConfig) -> RunPlan:
    """Reads config and data, and shards the model for each rank without its values.

    Raises what training would raise before its first step. Communicates nothing, and allocates no weights.
    """
    hooks_of(config)
    make_optimizer = optimizer_of(config.optimizer)
    data, _ = data_and_model_of(config)
    saved = own_config(config)
    layout = config.layout
    sizes = {name: size or 1 for name, size in layout.sizes.items()}
    narrow = Precision.of(layout.precision).dtype
    ranks: list[RankMemory] = []
    said = why = ""
    num_parameters = 0
    known: dict[int, dict[Any, Any]] = {}  # what stages hand on, by tensor rank
    for pipe, tensor in product(range(sizes["pipe"]), range(sizes["tensor"])):
        coords = {"pipe": pipe, "tensor": tensor}
        context = fake_context(
            coords, tensor=sizes["tensor"], data=sizes["data"], pipe=sizes["pipe"], sequence=sizes["sequence"]
        )
        context = with_tensor(context, layout.tensor)
        with _without_values():
            plain = model_of(config, data, saved, lazy=False)
            num_parameters = num_parameters or sum(p.numel() for p in plain.parameters())
            of_params = make_optimizer(plain)
            model = shard_model(plain, config=layout.shard_config(context)).train()
            said = said or str(describe(model))
            kept = _kept(model, of_params, layout, sizes["data"])
        with _without_values() as copied:  # in the dtype in which a step computes
            plain = model_of(config, data, saved, lazy=False, dtype=narrow or torch.float32)
            model = shard_model(plain, config=layout.shard_config(context)).train()
            batch = copied(_batch(config, data, sizes["data"]))
            step, reason = _traced(model, layout, batch, known.setdefault(tensor, {}))
        why = why or reason
        ranks.append(RankMemory(coords, kept, step))
    title = f"{head_of(config).__name__} of {config.model.name}"
    return RunPlan(
        title, num_parameters, data.title, len(data.train), num_steps_of(config, data), sizes, said, ranks, why
    )


@contextmanager
def _without_values() -> Iterator[Any]:
    with torch.random.fork_rng(devices=[]), fake_tensors() as copied:
        yield copied


def _kept(model: Any, make_optimizer: Any, layout: Parallel, data: int) -> Memory:
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    stage = layout.zero_stage
    return memory(model, optimizer, stage=stage or 0, precision=layout.precision, offload=layout.offload, data=data)


def _batch(config: RunConfig, data: RunData, ranks: int) -> Any:
    """A data rank's part of the first batch."""
    count = max(-(-min(config.data.batch_size, len(data.train)) // ranks), 1)
    samples = [data.train[i % len(data.train)] for i in range(count)]
    return (data.collate or collated)(samples)


def _traced(model: Any, layout: Parallel, batch: Any, known: dict[Any, Any]) -> tuple[int | None, str]:
    """(the most bytes that a step holds beside the parameters, why that is not known).

    ``known`` are the shapes that earlier stages hand on, to which those of this one are added.
    """
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    try:
        with LiveBytes([*model.parameters()]) as live:
            pipeline = pipeline_of(model, layout, None, None)
            if layout.pipe > 1:
                pipeline.exchange.given = dict(known)
            pipeline.step(batch)
    except (ShardFormerError, RuntimeError, TypeError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"
    if layout.pipe > 1:
        known |= pipeline.exchange.known
    return live.peak - held, ""
