"""No built-in hook changes the training result."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from shardformer.checkpoint.file_format import CheckpointIndex, decode_json_value
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.train_command.build import get_hook_constructor_arguments
from shardformer.training import hooks
from shardformer.training.hook import Hook
from shardformer.training.trainer import Trainer
from tests.trainer.hooks.runs import engine_of, pairs, weights_of

NAMES = [name for name, kind in vars(hooks).items() if isinstance(kind, type)]
TRACKERS = ("Mlflow", "Wandb")
"""Hooks that need other libraries and share a file. tests/integrations trains with them."""
OF_A_FOLDER: dict[str, Callable[[str], Hook]] = {
    "Checkpoint": lambda folder: hooks.Checkpoint(folder, every_steps=2),
    "JsonLines": lambda folder: hooks.JsonLines(folder),
    "TensorBoard": lambda folder: hooks.TensorBoard(folder),
    "Profiler": lambda folder: hooks.Profiler(folder),
}
"""Hooks that write files. All others are created without arguments."""
OF_ARGUMENTS: dict[str, Callable[[], Hook]] = {
    "Metrics": lambda: hooks.Metrics("perplexity"),
    "MovingAverage": lambda: hooks.MovingAverage(validate=False),
}
"""Hooks whose defaults require classes, or change the validation loss."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in TRACKERS])
def test_a_hook_does_not_change_training(name: str, tmp_path: Path) -> None:
    hook = OF_A_FOLDER[name](str(tmp_path)) if name in OF_A_FOLDER else OF_ARGUMENTS.get(name, getattr(hooks, name))()
    engine, plainly = engine_of(), engine_of()
    torch.manual_seed(3)
    found = Trainer(engine, [hook]).fit(steps=5, validation=pairs(4))
    torch.manual_seed(3)
    expected = Trainer(plainly, []).fit(steps=5, validation=pairs(4))
    assert {n: found[n] for n in ("loss", "validation/loss")} == {n: expected[n] for n in ("loss", "validation/loss")}
    torch.testing.assert_close(weights_of(engine), weights_of(plainly), rtol=0, atol=0)


class _Tracker(ModuleType):
    """Module in place of wandb or mlflow, whose runs have an id."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.run_name: str | None = None
        self.set_experiment = self.log_params = self.log_metrics = self.end_run = lambda *args, **kwargs: None

    def init(self, name: str | None = None, run_name: str | None = None, **options: Any) -> Any:
        self.run_name = name or run_name
        return SimpleNamespace(
            id="a1", info=SimpleNamespace(run_id="a1"), log=lambda *args, **kwargs: None, finish=lambda: None
        )

    start_run = init


def _make_hook(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Hook:
    if name in TRACKERS:
        monkeypatch.setitem(sys.modules, name.lower(), _Tracker(name.lower()))
    if name in ("Wandb", *OF_A_FOLDER):
        hook: Hook = OF_A_FOLDER.get(name, getattr(hooks, name))(str(folder / name))
        return hook
    return OF_ARGUMENTS.get(name, getattr(hooks, name))()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "name", [name for name in NAMES if getattr(hooks, name).state is not Hook.state and name != "Checkpoint"]
)
def test_the_state_of_a_hook_is_the_same_on_all_ranks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving a state that differs between ranks would warn, and a warning is an error here."""

    def run(context: ParallelContext) -> Any:
        engine = engine_of(context)
        hook = made[engine.world.rank]
        Trainer(engine, [hook, hooks.Checkpoint(tmp_path / "c")]).fit(steps=3, validation=pairs(4))
        return hook.state()

    made = [_make_hook(name, tmp_path, monkeypatch) for _ in range(2)]
    first, _ = run_as_threads(run, data=2)
    saved = max((tmp_path / "c").glob("step-*"))
    assert first == decode_json_value(CheckpointIndex.read(saved).values["extra"])["user"]["hooks"][name]


def test_a_state_of_an_own_hook_that_differs_between_ranks_warns(tmp_path: Path) -> None:
    class Own(Hook):
        def setup(self, trainer: Trainer) -> None:
            self.rank = trainer.engine.world.rank

        def state(self) -> Any:
            return {"rank": self.rank}

    def run(context: ParallelContext) -> None:
        Trainer(engine_of(context), [Own(), hooks.JsonLines(tmp_path), hooks.Checkpoint(tmp_path / "c")]).fit(steps=1)

    with pytest.warns(UserWarning, match=r"\['Own'\]\['rank'\] differs between ranks"):
        run_as_threads(run, data=2)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_receives_the_name_of_the_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name.lower(), tracker := _Tracker(name.lower()))
    options = {"directory": tmp_path} if name == "Wandb" else {}
    Trainer(engine_of(), [getattr(hooks, name)(name="mine", **options)]).fit(steps=1)
    assert tracker.run_name == "mine"


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_is_described_by_its_annotation(name: str) -> None:
    arguments = get_hook_constructor_arguments(getattr(hooks, name))
    assert arguments
    assert [n for n, argument in arguments.items() if not argument.description or argument.annotation is Any] == []


@pytest.mark.parametrize("name", NAMES)
def test_each_hook_is_in_the_expected_file(name: str) -> None:
    written = "".join(f"_{c.lower()}" if c.isupper() else c for c in name).removeprefix("_")
    written = "experiment_trackers" if name in (*TRACKERS, "JsonLines", "TensorBoard") else written
    folder = Path(hooks.__file__).parent
    assert (folder / f"{written}.py").is_file()
