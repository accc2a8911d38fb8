"""A failed operation leaves the model, the optimizer, the data and the random state unchanged."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import shardformer
from shardformer.errors import ConfigError, InputError, ShardFormerError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.engine import Engine
from shardformer.training.hooks.checkpoint import Checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:The batch is split")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()


def vectors(count: int = 6) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def batch() -> tuple[Tensor, Tensor]:
    return vectors(), vectors().flip(0)


def engine_of(
    samples: int = 24,
    context: ParallelContext | None = None,
    made: nn.Module | None = None,
    scheduler: Callable[[Any], Any] | None = None,
    **parallel: Any,
) -> Engine:
    made = model() if made is None else made
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
    scheduler = scheduler or (lambda own: torch.optim.lr_scheduler.StepLR(own, 1, 0.5))
    data = [(row, row) for row in vectors(samples)]
    return shardformer.initialize(
        made, optimizer, nn.MSELoss(), data, scheduler(optimizer), parallel, batch_size=6, context=context
    )


def state(engine: Engine) -> Any:
    """Return everything that a failed call must not change."""
    optimizers = [own for each in engine.optimizers for own in getattr(each, "inner", [each])]
    return copy.deepcopy(
        {
            "weights": dict(engine.model.state_dict()),
            "optimizers": [each.state_dict() for each in optimizers],
            "groups": [[id(p) for group in each.param_groups for p in group["params"]] for each in optimizers],
            "schedulers": [each.state_dict() for each in engine.schedulers],
            "random": (torch.get_rng_state(), numpy.random.get_state()[1], random.getstate()),
            "steps": (engine.steps, engine.skipped, engine.data.state() if engine.has_data else None),
            "modes": [m.training for m in engine.model.modules()],
        }
    )


def assert_same(now: Any, before: Any) -> None:
    torch.testing.assert_close(
        [x for x in torch.utils._pytree.tree_leaves(now) if not isinstance(x, str)],
        [x for x in torch.utils._pytree.tree_leaves(before) if not isinstance(x, str)],
        rtol=0, atol=0, equal_nan=True,
    )  # fmt: skip


def saved(folder: Any, samples: int = 24, **options: Any) -> None:
    engine = engine_of(samples, **options)
    for rows in engine.data or ():
        engine.train_step(rows)
    engine.save(folder)


class Unloadable(torch.optim.lr_scheduler.StepLR):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        raise RuntimeError("this scheduler takes no state")


class Extra(nn.Linear):
    """Module with an extra state that rejects some value."""

    value = 1

    def get_extra_state(self) -> Any:
        return {"value": self.value}

    def set_extra_state(self, state: Any) -> None:
        self.value = state["value"]
        if state["value"] == 2:
            raise RuntimeError("this module takes no 2")


def other_length(folder: Any) -> Engine:
    saved(folder)
    return engine_of(30)


def bad_scheduler(folder: Any) -> Engine:
    saved(folder, scheduler=lambda own: Unloadable(own, 1, 0.5))
    return engine_of(scheduler=lambda own: Unloadable(own, 1, 0.5))


def bad_extra_state(folder: Any) -> Engine:
    def made(value: int) -> nn.Module:
        found = nn.Sequential(model(), Extra(4, 4).double())
        found[1].value = value  # type: ignore[assignment]
        return found

    saved(folder, made=made(2))
    return engine_of(made=made(1))


def other_model(folder: Any) -> Engine:
    saved(folder, made=nn.Sequential(nn.Linear(4, 4).double()))
    return engine_of()


LOADS = {f.__name__: f for f in (other_length, bad_scheduler, bad_extra_state, other_model)}


@pytest.mark.parametrize("case", LOADS)
def test_a_failed_load_changes_nothing(case: str, tmp_path: Any) -> None:
    engine = LOADS[case](tmp_path / "checkpoints")
    engine.train_step(batch())
    before, optimizer_state = state(engine), dict(engine.optimizer.state)
    with pytest.raises((ShardFormerError, RuntimeError)):
        engine.load(tmp_path / "checkpoints")
    assert_same(state(engine), before)
    assert all(engine.optimizer.state[p] is own for p, own in optimizer_state.items()), "the same objects"
    engine.train_step(batch())


@pytest.mark.parametrize("zero", [None, 1, 3])
def test_a_load_that_fails_on_one_rank_changes_nothing_on_any_rank(zero: int | None, tmp_path: Any) -> None:
    def do(context: ParallelContext) -> None:
        engine = engine_of(context=context, zero_stage=zero)
        engine.train_step(batch())
        engine.save(tmp_path / "checkpoints")
        engine.train_step(batch())
        scheduler = engine.scheduler
        if context.data.rank == 1:
            scheduler.load_state_dict = lambda state: 1 / 0
        before = {name: x.clone() for name, x in shardformer.full_state_dict(engine.model).items()}
        with pytest.raises((InputError, ZeroDivisionError)):
            engine.load(tmp_path / "checkpoints")
        now = shardformer.full_state_dict(engine.model)
        assert all(now[name].equal(x) for name, x in before.items())
        assert engine.steps == 2 and scheduler.last_epoch == 2

    run_as_threads(do, data=2)


class Refuses(shardformer.hooks.Hook):
    def __init__(self) -> None:
        self.value = 1

    def state(self) -> Any:
        return {"value": self.value}

    def load_state(self, state: Any) -> None:
        self.value = 0
        raise RuntimeError("this hook takes no state")


def test_a_hook_that_rejects_its_state_leaves_the_trainer_unchanged(tmp_path: Any) -> None:
    engine = engine_of()
    checkpoints = Checkpoint(tmp_path / "checkpoints", every_steps=2)
    shardformer.Trainer(engine, hooks=[Refuses(), checkpoints]).fit(steps=2)
    other, hook = engine_of(), Refuses()
    before = state(other)
    with pytest.raises(RuntimeError, match="takes no state"):
        shardformer.Trainer(other, hooks=[hook]).load(tmp_path / "checkpoints")
    assert_same(state(other), before)
    assert hook.value == 1


# ----------------------------------------------------------------------------------------------------------- a step


def test_a_batch_that_fails_in_its_second_micro_batch_leaves_no_gradients() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if target.isnan().any():
            raise ValueError("the second half")
        return nn.functional.mse_loss(output, target)

    def run(fails: bool) -> Tensor:
        made = model().eval()
        made[0].train()  # the BatchNorm keeps its averages
        engine = shardformer.initialize(
            made, torch.optim.SGD(made.parameters(), lr=0.1), loss, parallel={"micro_batches": 2}
        )
        if fails:
            x, y = batch()
            y[4] = torch.nan
            with pytest.raises(ValueError, match="the second half"):
                engine.train_step((x, y))
        engine.train_step(batch())
        return nn.utils.parameters_to_vector(engine.model.parameters())

    assert run(fails=True).equal(run(fails=False))


@pytest.mark.parametrize("zero", [None, 1])
def test_a_failed_step_can_be_skipped(zero: int | None) -> None:
    engine = engine_of(zero_stage=zero, max_grad_norm=1.0)
    x, y = batch()
    before = {name: value.clone() for name, value in engine.model.named_parameters()}
    engine.backward(engine((x, torch.full_like(y, torch.inf))))
    with pytest.raises(InputError):
        engine.step()
    assert engine.steps == 0 and all(value.equal(before[name]) for name, value in engine.model.named_parameters())
    with pytest.raises(InputError, match=r"before engine.step was called"):
        engine((x, y))
    engine.zero_grad()
    assert float(engine.train_step((x, y))) > 0 and engine.steps == 1


# ------------------------------------------------------------------------------------------------------- initialize


class NoScheduler:
    def __init__(self, *_: Any) -> None:
        raise RuntimeError("no such scheduler")


BAD: dict[str, dict[str, Any]] = {
    "scheduler": {"scheduler": "cosine"},
    "scheduler that fails": {"scheduler": NoScheduler},
    "offload": {"parallel": {"offload": "nvme:/proc/no/such/folder"}},
    "activations": {"parallel": {"activation_offload": "tensor"}},
}


@pytest.mark.reduced
@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("sizes", [{"data": 2}, {"tensor": 2}], ids=str)
def test_initialize_can_be_called_again_after_an_error(case: str, sizes: dict[str, int]) -> None:
    from shardformer.verify.small_models import SmallModelFactory

    def do(context: ParallelContext) -> tuple[float, float]:
        def plain() -> Any:
            torch.manual_seed(0)
            return SmallModelFactory("llama")().double().train()

        ids = torch.randint(3, 60, (4, 8), generator=torch.Generator().manual_seed(0))
        given = {"input_ids": ids, "labels": ids}
        given = {name: x.chunk(context.data.size)[context.data.rank] for name, x in given.items()}
        engine = shardformer.initialize(
            expected := plain(), torch.optim.SGD(expected.parameters(), lr=0.1), context=context
        )
        losses = [float(engine.train_step(given)) for _ in range(2)]
        made = plain()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        params, modules = list(made.parameters()), [type(m) for m in made.modules()]
        try:
            shardformer.initialize(made, optimizer, context=context, **BAD[case])
            return 0.0, 0.0  # supported here
        except (ShardFormerError, RuntimeError, OSError):
            pass
        assert (
            [id(p) for p in made.parameters()]
            == [id(p) for p in params]
            == list(map(id, optimizer.param_groups[0]["params"]))
        )
        assert [type(m) for m in made.modules()] == modules
        engine = shardformer.initialize(made, optimizer, context=context)
        again = [float(engine.train_step(given)) for _ in range(2)]
        return max(abs(a - b) for a, b in zip(losses, again, strict=True)), 0.0

    assert all(difference < 1e-9 for difference, _ in run_as_threads(do, **sizes, one_at_a_time=True))


def test_a_scheduler_that_fails_on_one_rank_raises_on_all_ranks() -> None:
    def do(context: ParallelContext) -> None:
        made = model()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)

        def scheduler(own: Any) -> Any:
            if context.data.rank == 1:
                raise RuntimeError("no such scheduler")
            return torch.optim.lr_scheduler.StepLR(own, 1)

        with pytest.raises((ConfigError, RuntimeError), match="no such scheduler"):
            shardformer.initialize(made, optimizer, nn.MSELoss(), scheduler=scheduler, context=context)
        shardformer.initialize(made, optimizer, nn.MSELoss(), context=context)

    run_as_threads(do, data=2, one_at_a_time=True)
