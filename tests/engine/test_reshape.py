"""``engine.reshard`` changes the layout in memory with equal losses and minimal communication."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise, permutations
from typing import Any

import pytest
import torch
from torch import nn

from shardformer.checkpoint.reshard_in_memory import ReshardStats
from shardformer.errors import ConfigError, InputError
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.engine import Engine
from shardformer.training.initialize import initialize
from shardformer.verify.small_models import DEFAULT_HEAD, SmallModelFactory
from tests.checkpoint.runs import Lookahead, build
from tests.engine.test_engine import rows

Layout = dict[str, Any]
LAYOUTS: list[Layout] = [
    {"tensor": 2, "pipe": 2, "zero_stage": 1},
    {"data": 4, "zero_stage": 2},
    {"data": 2, "tensor": 2, "zero_stage": 3},
    {"tensor": 4, "sequence_parallel": True},
    {"data": 2, "pipe": 2, "zero_stage": 0, "offload": "cpu"},
    {"sequence": 2, "tensor": 2, "zero_stage": 1},
]


def made(family: str, layout: Layout, *, has_nested_optimizer: bool = False, **options: Any) -> Engine:
    torch.manual_seed(0)
    model = build(family).train()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if has_nested_optimizer:
        optimizer = Lookahead(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    data = [{**row, "labels": row["labels"].clamp(min=3)} for row in rows(24)]
    return initialize(model, optimizer, None, data, scheduler, layout, batch_size=4, **options)


def losses(engine: Engine, steps: int) -> list[float]:
    found = []
    for batch in engine.data:
        found.append(float(engine.train_step(batch)))
        if len(found) == steps:
            break
    return found


def next_loss(engine: Engine) -> float:
    """Train a step, and start the next epoch if the current one has ended."""
    return (losses(engine, 1) or losses(engine, 1))[0]


def pairs_in_a_row(count: int) -> list[int]:
    """Return a sequence of layouts that contains every ordered pair once."""
    left, way = set(permutations(range(count), 2)), [0]
    while left:
        choices = [then for now, then in left if now == way[-1]]
        way.append(max(choices, key=lambda then: (sum(now == then for now, _ in left), then)))
        left.remove((way[-2], way[-1]))
    return way


def _tour(
    family: str, layouts: list[Layout] | None = None, way: list[int] | None = None, **options: Any
) -> tuple[float, list[ReshardStats]]:
    if layouts is None:
        # every pair for one of them; a family that is found is found anew for each layout
        layouts = LAYOUTS if family == "llama" else LAYOUTS[:3] if family in DEFAULT_HEAD else LAYOUTS[:2]
    way = way or pairs_in_a_row(len(layouts))
    stays, engine = made(family, layouts[0], **options), made(family, layouts[0], **options)
    expected, found = [next_loss(stays) for _ in way], [next_loss(engine)]
    moves = []
    for then in way[1:]:
        moves.append(engine.reshard(layouts[then]))
        found.append(next_loss(engine))
    rates = [e.optimizers[0].param_groups[0]["lr"] for e in (stays, engine)]
    assert rates[0] == rates[1], rates
    return max(abs(a - b) for a, b in zip(found, expected, strict=True)), moves


def test_reshard_through_a_sequence_of_layouts(pool4: WorkerPool) -> None:
    ring = [*range(len(LAYOUTS)), 0]
    assert max(difference for difference, _ in pool4.run(_tour, "llama", LAYOUTS, ring)) < 1e-6


def _nested_tour() -> float:
    way = [0, 0, 0, 1, 1, 2, 2]  # the wrapper averages the weights in every second step
    return _tour("llama", [{"data": 2}, {"tensor": 2}, {"data": 2, "zero_stage": 3}], way, has_nested_optimizer=True)[0]


def test_reshard_moves_the_states_of_a_nested_optimizer(pool2: WorkerPool) -> None:
    assert max(pool2.run(_nested_tour)) < 1e-6


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "t5", "stablelm"])
def test_reshard_between_all_pairs_of_layouts(pool4: WorkerPool, family: str) -> None:
    with pool4.with_timeout(150):  # an engine is built for each of 31 layouts
        found = pool4.run(_tour, family)
    assert max(difference for difference, _ in found) < 1e-6
    for moves in zip(*(moves for _, moves in found), strict=True):
        assert sum(m.sent for m in moves) == sum(m.received for m in moves) > 0


GRIDS: list[Layout] = [
    {"data": 2, "tensor": 2, "zero_stage": 1},
    {"tensor": 4, "tensor_parallel_mode": "2d"},
    {"tensor": [2, 1], "tensor_parallel_mode": "2d", "pipe": 2, "zero_stage": 0},
]


@pytest.mark.parametrize("way", [[0, 1, 2, 0], pytest.param(None, marks=pytest.mark.full)])
def test_reshard_between_tensor_parallel_modes(pool4: WorkerPool, way: list[int] | None) -> None:
    assert max(difference for difference, _ in pool4.run(_tour, "llama", GRIDS, way)) < 1e-6


KEPT: list[Layout] = [
    {"data": 2, "tensor": 2, "zero_stage": 3, "sequence_parallel": True, "activation_offload": "host"},
    {"data": 2, "pipe": 2, "schedule": "gpipe", "zero_stage": 1, "recompute_layers": 1},
    {"sequence": 2, "tensor": 2, "zero_stage": 2},
    {"tensor": 4, "tensor_parallel_mode": "2d"},
]


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


def _kept(layouts: list[Layout]) -> list[tuple[Layout, int, bool]]:
    """Return how many tensors two steps leave in memory, and whether the grid outlives the engine.

    The last message of a step may be released later, so the smallest of three differences counts.
    """
    found = []
    for layout in layouts:
        engine = made("llama", layout)
        counts = []
        for _ in range(4):
            next_loss(engine), next_loss(engine)
            counts.append(tensors())
        grown, context = min(b - a for a, b in pairwise(counts)), weakref.ref(engine.context)
        del engine
        for _ in range(2):  # the first call does nothing while another thread collects
            gc.collect()
        found.append((layout, max(grown, 0), context() is not None))
    return found


def test_no_tensor_outlives_its_step_or_its_engine(pool4: WorkerPool) -> None:
    """The garbage collector cannot see cycles through hooks of autograd nodes."""
    for found in pool4.run(_kept, KEPT):
        assert found == [(layout, 0, False) for layout in KEPT]


def _stays() -> tuple[ReshardStats, ReshardStats]:
    engine = made("llama", {"tensor": 2})
    losses(engine, 1)
    same = engine.reshard({"tensor": 2})
    losses(engine, 1)
    return same, engine.reshard({"data": 2})


def test_values_that_a_rank_already_has_are_not_sent(pool2: WorkerPool) -> None:
    for same, other in pool2.run(_stays):
        assert (same.sent, same.received) == (0, 0)
        assert 0 < other.received < other.copied


def test_reshard_on_one_process() -> None:
    engine, stays = made("gpt2", {}), made("gpt2", {})
    found = losses(engine, 2)
    assert engine.reshard({"zero_stage": 1, "micro_batch_size": 2}).sent == 0
    assert found + losses(engine, 2) == pytest.approx(losses(stays, 4), abs=1e-6)


def _refused() -> tuple[str, list[float]]:
    engine = made("gpt2", {"data": 2})
    found = losses(engine, 1)
    message = ""
    for layout in ({"tensor": 3}, {"pipe": 2, "schedule": "no such"}):
        try:
            engine.reshard(layout)
        except ConfigError as error:
            message += str(error)
    return message, found + losses(engine, 2)


def test_an_invalid_layout_leaves_the_engine_unchanged(pool2: WorkerPool) -> None:
    for message, found in pool2.run(_refused):
        assert "tensor=3" in message
        assert "no such" in message
        assert found == pool2.run(_plain_losses)[0]


def _plain_losses() -> list[float]:
    return losses(made("gpt2", {"data": 2}), 3)


def test_reshard_raises_within_a_step_and_for_a_model_passed_sharded() -> None:
    from shardformer.shard_model_api import shard_model

    engine = made("gpt2", {})
    engine(next(iter(engine.data)))
    with pytest.raises(InputError, match=r"between engine.batch. and engine.step"):
        engine.reshard({})
    context = ParallelContext.from_sizes({})
    model: nn.Module = shard_model(SmallModelFactory("gpt2")(), context=context)
    with pytest.raises(ConfigError, match="already sharded"):
        initialize(model, context=context).reshard({})
