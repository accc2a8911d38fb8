"""Events of a training run, requests of hooks, and the end of a run on all ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError, InputError
from shardformer.launcher.shutdown import FOLDER, is_graceful_shutdown_registered
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.engine import Engine
from shardformer.training.hook import HOOK_METHODS, Hook, TrainerProtocol
from shardformer.training.initialize import initialize
from shardformer.training.trainer import Trainer

Pair = tuple[Tensor, Tensor]


def pairs(count: int = 10, seed: int = 1) -> list[Pair]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.rand(4, generator=generator), torch.rand(1, generator=generator)) for _ in range(count)]


def made(context: ParallelContext | None = None, data: Any = None, batch_size: int = 4) -> Engine:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(4, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.rand(p.shape, generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = pairs() if data is None else data
    return initialize(model, optimizer, nn.MSELoss(), data, context=context, batch_size=batch_size)


class Diary(Hook):
    """Hook that records all events."""

    def __init__(self) -> None:
        self.moments: list[str] = []


def _note(moment: str) -> Any:
    def note(self: Diary, trainer: Trainer, *args: Any) -> None:
        self.moments.append(moment)

    return note


for _moment in (*HOOK_METHODS, "on_validation_batch"):
    setattr(Diary, _moment, _note(_moment))

STEP = [
    "before_step", "before_forward", "after_backward", "before_optimizer_step", "after_optimizer_step", "after_step",
]  # fmt: skip
VALIDATION = ["before_validation", "on_validation_batch", "after_validation"]


def test_events_occur_in_order() -> None:
    diary = Diary()
    Trainer(made(), [diary]).fit(epochs=2, validation=pairs(3))
    epoch = ["before_epoch", *STEP * 3, "after_epoch", *VALIDATION]
    assert diary.moments == ["setup", "before_train", *epoch * 2, "after_train", "after_fit"]


def test_every_event_is_a_method_of_hook() -> None:
    assert all(callable(getattr(Hook, moment)) for moment in HOOK_METHODS)


def test_fit_equals_a_loop_over_engine_steps() -> None:
    engine, plainly = made(), made()
    Trainer(engine, [Diary()]).fit(epochs=2, validation=pairs(3))
    for _ in range(2):
        assert plainly.data is not None
        for batch in plainly.data:
            plainly.train_step(batch)
    for a, b in zip(engine.model.parameters(), plainly.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_fit_can_stop_and_continue_within_an_epoch() -> None:
    engine = made()
    trainer = Trainer(engine)
    trainer.fit(steps=4)
    assert (engine.steps, trainer.epoch) == (4, 1)
    trainer.fit(epochs=2)
    assert (engine.steps, trainer.epoch) == (6, 2)
    trainer.fit(epochs=2)
    assert engine.steps == 6


class Asks(Hook):
    """Hook that makes a request after a step."""

    def __init__(self, what: str, at: int) -> None:
        self.what, self.at = what, at

    def after_step(self, trainer: Trainer) -> None:
        if trainer.step == self.at:
            getattr(trainer, self.what)()


def test_a_hook_may_request_a_stop_and_a_validation() -> None:
    diary = Diary()
    trainer = Trainer(made(), [Asks("validate", 1), Asks("stop", 2), diary])
    trainer.fit(steps=9, validation=pairs(3))
    assert trainer.step == 2
    assert trainer.stopped_by == "a hook requested it"
    assert diary.moments.count("before_validation") == 1


def test_the_validation_loss_is_the_mean_over_all_counted_labels() -> None:
    engine, held_out = made(), pairs(7, seed=2)
    values = Trainer(engine).fit(steps=3, validation=held_out, validate_every=3)
    x, y = (torch.stack(each) for each in zip(*held_out, strict=True))
    with torch.no_grad():
        expected = float(nn.functional.mse_loss(engine.model(x), y))
    assert values["validation/loss"] == pytest.approx(expected, abs=1e-7)


class Forks(Hook):
    """Hook that forks a process in a step, and ends it with a signal."""

    def __init__(self, number: int) -> None:
        self.number, self.status = number, -1

    def after_step(self, trainer: Trainer) -> None:
        if (child := os.fork()) == 0:
            signal.pause()
            os._exit(0)
        os.kill(child, self.number)
        self.status = os.waitpid(child, 0)[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_forked_by_a_hook_ends_on_a_signal(number: signal.Signals) -> None:
    forks = Forks(number)
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        trainer = Trainer(made(), [forks])
        trainer.fit(steps=1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert os.WTERMSIG(forks.status) == number
    assert trainer.stopped_by is None, "the signal was the child's"


class Signals(Hook):
    def after_step(self, trainer: Trainer) -> None:
        if trainer.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_ends_the_run_after_the_current_step() -> None:
    diary, before = Diary(), signal.getsignal(signal.SIGTERM)
    trainer = Trainer(made(), [Signals(), diary])
    trainer.fit(steps=9)
    assert trainer.step == 2
    assert trainer.stopped_by == "a signal"
    assert "on_signal" in diary.moments
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    "moment", ["before_validation", "on_validation_batch", "after_validation", "before_save", "after_save"]
)
def test_a_signal_outside_a_step_saves_and_ends_the_run(moment: str) -> None:
    saved: list[int] = []

    class Asks(Hook):
        def setup(self, trainer: Trainer) -> None:
            trainer.on_save(lambda **_: saved.append(trainer.step))

        def after_step(self, trainer: Trainer) -> None:
            if trainer.step == 2:
                trainer.save()

        def on_signal(self, trainer: Trainer) -> None:
            trainer.save()

    def come(trainer: Trainer, *args: Any) -> None:
        if trainer.step == 2:
            signal.raise_signal(signal.SIGTERM)

    hook = Asks()
    setattr(hook, moment, come)
    trainer = Trainer(made(), [hook])
    trainer.fit(steps=9, validation=pairs(3), validate_every=2)
    assert trainer.was_interrupted
    assert trainer.step == saved[-1] <= 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_reported_immediately(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    class Asks(Hook):
        def before_forward(self, trainer: Trainer) -> None:
            if trainer.step == 1:
                signal.raise_signal(number)

    trainer = Trainer(made(), [Asks()])
    trainer.fit(steps=9)
    expected = {
        signal.SIGTERM: "Received SIGTERM: finishing step 2.",
        signal.SIGINT: "Finishing step 2. Press Ctrl-C again to stop at once.",
    }
    assert capfd.readouterr().err.strip() == expected[number]
    assert trainer.signal is number


def test_a_signal_that_ends_the_data_loading_processes_still_saves() -> None:
    """A scheduler may signal all processes of a job."""
    saved: list[int] = []

    class Data(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if trainer.step == 2:
                signal.raise_signal(signal.SIGTERM)
                handlers.append(signal.getsignal(signal.SIGCHLD))
                raise RuntimeError("DataLoader worker (pid 7) exited unexpectedly")
            return super().__getitem__(index)

    class Asks(Hook):
        def setup(self, trainer: Trainer) -> None:
            trainer.on_save(lambda **_: saved.append(trainer.step))

        def on_signal(self, trainer: Trainer) -> None:
            trainer.save()

    handlers: list[Any] = []
    before = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    try:
        trainer = Trainer(made(), [Asks()])
        trainer.fit(Data(pairs(12)), steps=9, batch_size=4)
        assert (trainer.step, saved, trainer.was_interrupted) == (2, [2], True)
        assert handlers[0] is signal.SIG_DFL, "torch's handler would raise an error in the main thread"
        assert signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("moment", ["after_train", "after_save"])
def test_a_signal_after_the_last_step_interrupts_the_run(moment: str) -> None:
    class Asks(Hook):
        def setup(self, trainer: Trainer) -> None:
            trainer.on_save(lambda **_: None)

        def after_train(self, trainer: Trainer) -> None:
            trainer.save()

    hook = Asks()
    plain = getattr(hook, moment)
    setattr(hook, moment, lambda trainer: (plain(trainer), signal.raise_signal(signal.SIGTERM)))
    trainer = Trainer(made(), [hook])
    trainer.fit(steps=3)
    assert (trainer.step, trainer.was_interrupted) == (3, True)


def test_a_second_signal_calls_the_previous_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)

    class Asks(Hook):
        def before_forward(self, trainer: Trainer) -> None:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    trainer = Trainer(made(), [Asks()])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets jobs in the background ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(steps=9)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_launcher_may_deliver_a_signal_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler sends the signal to each process, and the launcher forwards it."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    noted = []

    class Asks(Hook):
        def before_forward(self, trainer: Trainer) -> None:
            noted.append(is_graceful_shutdown_registered(os.getpid()))
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    trainer = Trainer(made(), [Asks()])
    trainer.fit(steps=9)
    assert (trainer.step, noted, list(tmp_path.iterdir())) == (1, [True], [])


# -------------------------------------------------------------------------------------------------------- several ranks


class Breaks(Hook):
    def __init__(self, moment: str, rank: int) -> None:
        def fail(trainer: Trainer, *args: Any) -> None:
            if trainer.engine.world.rank == rank:
                raise ValueError("no room")

        setattr(self, moment, fail)


def _ends(context: ParallelContext, engine: Engine, hook: Hook | None) -> tuple[str, int]:
    trainer = Trainer(engine, [hook] if hook is not None else [])
    try:
        trainer.fit(epochs=2, validation=pairs(3))
    except InputError as error:
        return str(error), engine.steps
    return "", engine.steps


MOMENTS_THAT_COME = [m for m in HOOK_METHODS if m not in ("on_signal", "on_exception", "before_save", "after_save")]


@pytest.mark.parametrize("moment", [*MOMENTS_THAT_COME, "on_validation_batch"])
def test_a_hook_that_fails_on_one_rank_ends_the_run_on_all_ranks(moment: str) -> None:
    def run(context: ParallelContext) -> tuple[str, int]:
        return _ends(context, made(context), Breaks(moment, 1))

    (message, steps), (other, other_steps) = run_as_threads(run, data=2)
    assert message == other
    assert steps == other_steps
    assert f"The hook Breaks ({moment}) failed on rank 1: ValueError: no room" in message


class Faulty(list[Pair]):
    """Data set whose seventh sample cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        if index == 7:
            raise OSError("disk is gone")
        return super().__getitem__(index)


def test_data_that_fails_on_one_rank_ends_the_run_on_all_ranks() -> None:
    def run(context: ParallelContext) -> tuple[str, int]:
        return _ends(context, made(context, Faulty(pairs())), None)

    (message, steps), (other, other_steps) = run_as_threads(run, data=2)
    assert message == other
    assert steps == other_steps
    assert "disk is gone" in message


def test_a_request_of_one_rank_is_executed_on_all_ranks() -> None:
    def run(context: ParallelContext) -> tuple[int, int, str | None]:
        engine, diary = made(context), Diary()
        hooks: list[Hook] = [diary]
        if context.data.rank == 1:
            hooks += [Asks("validate", 1), Asks("stop", 2)]
        trainer = Trainer(engine, hooks)
        trainer.fit(steps=9, validation=pairs(3))
        return trainer.step, diary.moments.count("after_validation"), trainer.stopped_by

    found = run_as_threads(run, data=2)
    assert [each[:2] for each in found] == [(2, 1), (2, 1)]
    assert "another rank" in str(found[0][2])


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "steps=None and epochs=None"),
        ({"steps": 1, "epochs": 1}, "steps=1 and epochs=1"),
        ({"steps": -1}, "steps=-1"),
        ({"steps": True}, "steps=True"),
        ({"steps": 1, "validate_every": 1}, "requires validation data"),
        ({"steps": 1, "validate_every": 0, "validation": pairs()}, "validate_every must be a positive number"),
    ],
    ids=str,
)
def test_invalid_arguments_of_fit_raise(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(made()).fit(**given)


def test_invalid_hooks_and_engines_without_data_raise() -> None:
    engine = made()
    with pytest.raises(ConfigError, match=r"must contain instances of shardformer\.hooks\.Hook"):
        Trainer(engine, [print])  # type: ignore[list-item]
    engine._data = None
    with pytest.raises(ConfigError, match="no training data"):
        Trainer(engine).fit(steps=1)


class StopsAt(Hook):
    def __init__(self, step: int) -> None:
        self.at = step

    def after_step(self, trainer: TrainerProtocol) -> None:
        if trainer.step == self.at:
            trainer.stop()


def test_a_stopped_run_resumes_with_the_next_batch() -> None:
    whole, stopped = made(), made()
    Trainer(whole, []).fit(steps=5)
    Trainer(stopped, [StopsAt(2)]).fit(steps=5)
    assert stopped.steps == 2
    Trainer(stopped, []).fit(steps=5)
    for found, expected in zip(stopped.model.parameters(), whole.model.parameters()):
        assert torch.equal(found, expected)


class AgreesBeforeAStep(Hook):
    def before_step(self, trainer: TrainerProtocol) -> None:
        trainer.synchronize_ranks()


class FailsOnOne(Hook):
    def after_step(self, trainer: TrainerProtocol) -> None:
        if trainer.engine.world.rank == 1:
            raise ValueError("broken on purpose")


def test_agree_raises_the_failure_of_another_hook() -> None:
    def run(context: ParallelContext) -> str:
        with pytest.raises(InputError) as caught:
            Trainer(made(context), [FailsOnOne(), AgreesBeforeAStep()]).fit(steps=3)
        return str(caught.value)

    assert all("FailsOnOne (after_step) failed on rank 1" in message for message in run_as_threads(run, data=2))
