"""Further properties of MovingAverage: validation, checkpoints and layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError, ShardFormerError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.engine import Engine
from shardformer.training.hook import Hook, TrainerProtocol
from shardformer.training.hooks.checkpoint import Checkpoint
from shardformer.training.hooks.moving_average import MovingAverage
from shardformer.training.initialize import initialize
from shardformer.training.trainer import Trainer
from shardformer.weights.state_dict import full_state_dict
from tests.trainer.hooks.runs import Net, engine_of, pairs, weights_of

DECAY = 0.9


def averaged(engine: Engine, hook: MovingAverage) -> dict[str, Tensor]:
    with hook.applied(engine):
        return {name: value.clone() for name, value in full_state_dict(engine.model).items()}


def plain_loop(steps: int, decay: float, every: int = 1, warmup: bool = False, **options: Any) -> dict[str, Tensor]:
    engine = engine_of(**options)
    average, updates = weights_of(engine), 0
    torch.manual_seed(3)
    while engine.steps < steps:
        for batch in engine.data:
            engine.train_step(batch)
            if engine.steps % every == 0:
                now = min(decay, (1 + updates) / (10 + updates)) if warmup else decay
                updates += 1
                for name, p in engine.model.named_parameters():
                    average[name] = now * average[name] + (1 - now) * p.detach()
            if engine.steps == steps:
                break
    return average


@pytest.mark.parametrize("options", [{}, {"every": 2}, {"warmup": True}], ids=str)
def test_the_average_equals_that_of_a_plain_loop(options: dict[str, Any]) -> None:
    hook, engine = MovingAverage(DECAY, **{"warmup": False, **options}), engine_of()
    torch.manual_seed(3)
    Trainer(engine, [hook]).fit(steps=5)
    torch.testing.assert_close(averaged(engine, hook), plain_loop(5, DECAY, **options), rtol=1e-6, atol=1e-7)


def language_model(
    context: ParallelContext | None, make: Any, **parallel: Any
) -> tuple[dict[str, Tensor], float, bool]:
    """Return the averaged weights, the validation loss, and whether the weights were restored."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=23, n_positions=9, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(number)) * 0.3)
    ids = torch.randint(23, (8, 9), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in ids]
    engine = initialize(
        model, make(model.parameters()), None, data, context=context, parallel=ParallelConfig(**parallel), batch_size=4,
        data_options={"shuffle": False},
    )  # fmt: skip
    hook = MovingAverage(DECAY, warmup=False)
    values = Trainer(engine, [hook]).fit(steps=4, validation=data)
    before = {n: x.clone() for n, x in full_state_dict(engine.model).items()}
    found = averaged(engine, hook)
    after = full_state_dict(engine.model)
    return found, values["validation/loss"], all(torch.equal(x, after[n]) for n, x in before.items())


def sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.1)


def adamw(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=0.01, eps=1e-3, foreach=False)  # where a gradient is rounding alone: no step


LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"data": 2}, {}),
    ({"tensor": 2}, {}),
    ({"pipe": 2}, {}),
    ({"data": 2}, {"zero_stage": 1}),
    ({"data": 2}, {"zero_stage": 3}),
    ({"data": 2}, {"zero_stage": 2, "offload": "cpu"}),
]


@pytest.mark.reduced(at_most=1)
@pytest.mark.slow
@pytest.mark.parametrize("make", [sgd, adamw])
def test_every_layout_has_the_average_of_one_process(make: Any) -> None:
    alone, loss, _ = language_model(None, make)
    for sizes, options in LAYOUTS:
        ranks = run_as_threads(lambda c, o=options, s=sizes: language_model(c, make, **s, **o), **sizes)
        for found, theirs, is_back in ranks:
            torch.testing.assert_close(
                found, alone, rtol=1e-4, atol=1e-5, msg=lambda m, o=(sizes, options): f"{o}: {m}"
            )
            assert theirs == pytest.approx(loss, rel=1e-5)
            assert is_back


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_master_weights_are_averaged_and_restored_exactly(precision: str) -> None:
    alone, loss, is_back = language_model(None, adamw, zero_stage=1, precision=precision)
    assert is_back
    exact, exact_loss, _ = language_model(None, adamw)
    assert loss == pytest.approx(exact_loss, rel=0.05)
    for name, value in exact.items():
        torch.testing.assert_close(alone[name].float(), value, rtol=0.05, atol=0.05)


class Fails(Hook):
    def __init__(self, moment: str) -> None:
        self.moment = moment

    def on_validation_batch(self, trainer: TrainerProtocol, batch: Any) -> None:
        if self.moment == "batch":
            raise ValueError("an error in between")

    def after_validation(self, trainer: TrainerProtocol) -> None:
        if self.moment == "after":
            raise ValueError("an error in between")


@pytest.mark.parametrize("moment", ["batch", "after"])
@pytest.mark.parametrize("zero", [None, 1, 3])
def test_an_error_restores_the_weights(moment: str, zero: int | None) -> None:
    def run(context: ParallelContext) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        options: dict[str, Any] = {"parallel": ParallelConfig(zero_stage=zero)}
        engine, plainly = engine_of(context, **options), engine_of(context, **options)
        with pytest.raises(ShardFormerError, match="an error in between"):
            Trainer(engine, [Fails(moment), MovingAverage(DECAY)]).fit(steps=2, validation=pairs(4))
        Trainer(plainly, []).fit(steps=2)
        return full_state_dict(engine.model), full_state_dict(plainly.model)

    for found, expected in run_as_threads(run, data=2):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("zero", [None, 1, 3])
def test_a_resumed_run_has_the_average_of_an_uninterrupted_run(tmp_path: Path, zero: int | None) -> None:
    def run(context: ParallelContext, folder: Path, *ends: int) -> dict[str, Tensor]:
        for end in ends:
            engine, hook = engine_of(context, parallel=ParallelConfig(zero_stage=zero)), MovingAverage(DECAY)
            Trainer(engine, [hook, Checkpoint(folder)]).fit(steps=end)
        return averaged(engine, hook)

    whole = run_as_threads(lambda c: run(c, tmp_path / "whole", 5), data=2)
    parts = run_as_threads(lambda c: run(c, tmp_path / "parts", 2, 5), data=2)
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)


def test_a_run_may_resume_under_another_layout(tmp_path: Path) -> None:
    def run(context: ParallelContext | None, end: int, folder: Path, **parallel: Any) -> dict[str, Tensor]:
        engine, hook = engine_of(context, parallel=ParallelConfig(**parallel)), MovingAverage(DECAY)
        Trainer(engine, [hook, Checkpoint(folder)]).fit(steps=end)
        return averaged(engine, hook)

    run_as_threads(lambda c: run(c, 2, tmp_path / "a", zero_stage=1), data=2)
    whole = run_as_threads(lambda c: run(c, 5, tmp_path / "b", zero_stage=1), data=2)[0]
    (found,) = run_as_threads(lambda c: run(c, 5, tmp_path / "a"))
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)


class Lazy(nn.Module):
    """Model whose second layer is first used in the fourth step."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.late = Net(0.0), nn.Linear(1, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += self.training
        found = self.net(x)
        return self.late(found) if self.calls > 3 else found


def lazy_engine() -> Engine:
    torch.manual_seed(0)
    model = Lazy()
    return initialize(model, torch.optim.AdamW(model.parameters()), nn.MSELoss(), pairs(), batch_size=4)


def test_a_parameter_without_a_gradient_is_saved_and_restored(tmp_path: Path) -> None:
    Trainer(lazy_engine(), [MovingAverage(DECAY), Checkpoint(tmp_path)]).fit(steps=2)
    engine, hook = lazy_engine(), MovingAverage(DECAY)
    engine.model.calls = 2
    Trainer(engine, [hook, Checkpoint(tmp_path)]).fit(steps=6)
    assert hook.updates == 6


def test_a_checkpoint_with_an_average_loads_without_the_hook(tmp_path: Path) -> None:
    Trainer(lazy_engine(), [MovingAverage(DECAY), Checkpoint(tmp_path)]).fit(steps=2)
    engine = lazy_engine()
    engine.model.calls = 2
    with pytest.warns(UserWarning, match="MovingAverage"):
        Trainer(engine, [Checkpoint(tmp_path)]).fit(steps=6)


def test_an_outdated_average_is_not_continued(tmp_path: Path) -> None:
    Trainer(engine_of(), [MovingAverage(DECAY), Checkpoint(tmp_path)]).fit(steps=2)
    with pytest.warns(UserWarning, match="MovingAverage"):
        Trainer(engine_of(), [Checkpoint(tmp_path)]).fit(steps=4)
    engine, hook = engine_of(), MovingAverage(DECAY)
    with pytest.warns(UserWarning, match="MovingAverage starts a new average"):
        Trainer(engine, [hook, Checkpoint(tmp_path)]).fit(steps=4)
    torch.testing.assert_close(averaged(engine, hook), full_state_dict(engine.model), rtol=0, atol=0)


def test_master_weights_in_files_raise(tmp_path: Path) -> None:
    parallel = ParallelConfig(zero_stage=1, offload=f"nvme:{tmp_path / 'files'}")
    (tmp_path / "files").mkdir()
    engine, hook = engine_of(parallel=parallel), MovingAverage(DECAY, warmup=False)
    try:
        torch.manual_seed(3)
        Trainer(engine, [hook]).fit(steps=5)
    except ConfigError as error:
        assert "nvme" in str(error)
    else:
        torch.testing.assert_close(averaged(engine, hook), plain_loop(5, DECAY), rtol=1e-6, atol=1e-7)


def test_the_engine_may_be_resharded_between_two_fits() -> None:
    def run(context: ParallelContext) -> dict[str, Tensor]:
        engine, hook = engine_of(context, parallel=ParallelConfig(zero_stage=1)), MovingAverage(DECAY)
        trainer = Trainer(engine, [hook])
        trainer.fit(steps=3)
        engine.reshard(ParallelConfig(zero_stage=3))
        trainer.fit(steps=5)
        return averaged(engine, hook)

    def straight(context: ParallelContext) -> dict[str, Tensor]:
        engine, hook = engine_of(context, parallel=ParallelConfig(zero_stage=1)), MovingAverage(DECAY)
        Trainer(engine, [hook]).fit(steps=5)
        return averaged(engine, hook)

    torch.testing.assert_close(run_as_threads(run, data=2), run_as_threads(straight, data=2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"decay": 1.0}, {"decay": -0.1}, {"decay": True}, {"decay": "0.9"}, {"every": 0}, {"every": True}]
)
def test_invalid_arguments_raise(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        MovingAverage(**options)
