"""Engine calls keep the training modes that the user has set on submodules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardformer
from shardformer.errors import InputError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.pipeline import eval_mode, get_training_modes, set_training_modes
from shardformer.training.engine import Engine
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory


class Classifier(nn.Module):
    """Frozen backbone with a BatchNorm, and a head with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.drop, self.head = nn.Dropout(0.0), nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return {"loss": F.cross_entropy(self.head(self.drop(self.body(x))), labels)}


def model() -> Classifier:
    torch.manual_seed(0)
    made = Classifier().double()
    made.body.requires_grad_(False)
    made.body.eval()
    return made


def batch(step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(3, (6,), generator=generator)}


SAMPLES = [{name: values[i] for name, values in batch().items()} for i in range(6)]


def engine_of(made: nn.Module, context: ParallelContext | None = None, **parallel: Any) -> Engine:
    optimizer = torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=0.1)
    data = {"train_data": SAMPLES, "batch_size": 6}
    return shardformer.initialize(made, optimizer, parallel=parallel, context=context, **data)


def fitted(engine: Engine) -> None:
    shardformer.Trainer(engine, hooks=[]).fit(steps=1, validation=SAMPLES, validate_every=1)


def saved_and_loaded(engine: Engine, folder: Any) -> None:
    engine.save(folder)
    engine.load(folder)


ACTIONS: dict[str, Callable[[Engine, Any], Any]] = {
    "initialize": lambda engine, folder: None,
    "train_step": lambda engine, folder: engine.train_step(batch()),
    "evaluate": lambda engine, folder: engine.evaluate([batch(), batch(1)]),
    "predict": lambda engine, folder: engine.predict(batch()),
    "fit": lambda engine, folder: fitted(engine),
    "load": saved_and_loaded,
    "export": lambda engine, folder: engine.export(folder / "exported"),
    "reshape": lambda engine, folder: engine.reshard({"zero_stage": 1}),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_evaluation_keeps_training_modes_and_running_statistics(action: str, tmp_path: Any) -> None:
    engine = engine_of(model())
    before, averages = get_training_modes(engine.model), engine.model.body[1].running_mean.clone()
    ACTIONS[action](engine, tmp_path)
    assert get_training_modes(engine.model) == before
    assert not before["body.1"] and before["head"] and before[""]
    engine.train_step(batch())
    assert engine.model.body[1].running_mean.equal(averages)
    assert [name for name, p in engine.model.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]


@pytest.mark.parametrize("zero", [None, 3])
def test_evaluation_over_data_ranks_keeps_training_modes(zero: int | None) -> None:
    def do(context: ParallelContext) -> dict[str, bool]:
        engine = engine_of(model(), context, zero_stage=zero)
        engine.evaluate(batch(context.data.rank))
        fitted(engine)
        return get_training_modes(engine.model)

    assert run_as_threads(do, data=2, one_at_a_time=True) == [get_training_modes(model())] * 2


def test_a_submodule_in_training_mode_returns_to_it_after_evaluation() -> None:
    """A dropout in training mode stays active in ``evaluate`` of a model in eval mode."""
    engine = engine_of(model())
    engine.eval()
    engine.model.drop.train()
    engine.predict(batch())
    assert engine.model.drop.training and not engine.model.training


def test_a_failed_evaluation_keeps_training_modes() -> None:
    engine = engine_of(model())
    before = get_training_modes(engine.model)
    for call in (engine.evaluate, engine.predict):
        with pytest.raises(Exception, match="mat1 and mat2"):
            call({"x": torch.zeros(2, 5, dtype=torch.float64), "labels": torch.zeros(2, dtype=torch.long)})
        assert get_training_modes(engine.model) == before


def test_initialize_sets_a_model_in_eval_mode_to_training_mode() -> None:
    assert all(get_training_modes(engine_of(Classifier().double().eval()).model).values())


def test_initialize_keeps_a_partial_training_mode() -> None:
    made = Classifier().double().eval()
    made.head.train()
    engine = engine_of(made)
    assert {path for path, mode in get_training_modes(engine.model).items() if mode} == {"", "head"}
    engine.train_step(batch())


@pytest.mark.reduced(one_in=3, first=1)
@pytest.mark.parametrize("axes", [{"data": 2}, {"pipe": 2}, {"tensor": 2}], ids=str)
def test_train_step_trains_a_model_in_eval_mode(axes: dict[str, int]) -> None:
    """Such a model trains without dropout."""
    torch.manual_seed(0)
    plain: Any = SmallModelFactory("gpt2", changes={"resid_pdrop": 0.5})().double().eval()
    data = RandomBatchFactory(DEFAULT_HEAD["gpt2"])(0)
    expected = float(plain(**data).loss.detach())

    def run(context: ParallelContext) -> list[float]:
        own = copy.deepcopy(plain)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        engine = shardformer.initialize(own, optimizer, parallel=axes, context=context)
        engine.model.eval()
        own_part = {name: x.chunk(context.data.size)[context.data.rank] for name, x in data.items()}
        losses = [float(engine.train_step(own_part)) for _ in range(2)]
        assert not any(get_training_modes(engine.model).values())
        with torch.no_grad(), pytest.raises(InputError, match="train_step cannot train under"):
            engine.train_step(own_part)
        return losses

    for losses in run_as_threads(run, **axes, one_at_a_time=True):
        assert losses[0] == pytest.approx(expected, rel=1e-5) and losses[1] < losses[0]


class Evaluates(shardformer.hooks.Hook):
    """Hook that leaves the model in eval mode."""

    def after_step(self, trainer: Any) -> None:
        trainer.engine.eval()


def test_a_hook_that_leaves_the_model_in_eval_mode_does_not_change_training() -> None:
    engine = engine_of(model())
    averages = engine.model.body[1].running_mean.clone()
    shardformer.Trainer(engine, hooks=[Evaluates()]).fit(steps=3)
    assert engine.model.body[1].running_mean.equal(averages)


class KeepsBody(nn.Module):
    """Model that overrides ``train`` and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.calls = nn.BatchNorm1d(2), nn.Linear(2, 2), 0

    def train(self, mode: bool = True) -> KeepsBody:
        super().train(mode)
        self.body.train(False)
        self.calls += 1
        return self


def test_an_overridden_train_method_is_called() -> None:
    made = KeepsBody().train()
    with eval_mode(made):
        assert (made.training, made.calls) == (False, 2)
    assert (made.training, made.head.training, made.body.training, made.calls) == (True, True, False, 3)


def test_set_modes_restores_modes_by_path() -> None:
    one, other = model(), Classifier()
    set_training_modes(other, get_training_modes(one))
    assert get_training_modes(other) == get_training_modes(one)
    set_training_modes(other, {"head": False, "elsewhere": True})
    assert not other.head.training and other.training
