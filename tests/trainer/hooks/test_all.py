"""No built-in hook changes the training result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardformer.train_command.build import get_hook_arguments
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


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_is_described_by_its_annotation(name: str) -> None:
    arguments = get_hook_arguments(getattr(hooks, name))
    assert arguments
    assert [n for n, argument in arguments.items() if not argument.description or argument.annotation is Any] == []


@pytest.mark.parametrize("name", NAMES)
def test_each_hook_is_in_the_expected_file(name: str) -> None:
    written = "".join(f"_{c.lower()}" if c.isupper() else c for c in name).removeprefix("_")
    written = "experiment_trackers" if name in (*TRACKERS, "JsonLines", "TensorBoard") else written
    folder = Path(hooks.__file__).parent
    assert (folder / f"{written}.py").is_file()
