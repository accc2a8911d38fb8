"""A run that is resumed is compared with what it was: what would silently change, or have no effect, is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from shardformer.disk.writing import make_folder, remove_left, replace_text
from shardformer.errors import ConfigError
from shardformer.runs.config import RunConfig, ScheduleTable
from shardformer.runs.updates import shares_of
from shardformer.trainer.hook import Hook, Run

FILE = "run.json"
FIXED = ("model", "optimizer", "seed")
"""Keys, and tables of keys, without effect on a run that is resumed: weights, optimizer and order of the data are those
that it saved."""
CHECKED_STEPS = 10_000
"""For how many steps, at most, rates are compared."""
SHOWN = 6


class Resume(Hook):
    """Keeps the config of a run in its checkpoints and in ``folder/run.json``, and compares it when the run is resumed.

    It comes after the hook that loads. Communicates nothing.

    Args:
        num_steps: of the whole run, as its config and its data have it.

    Raises ConfigError where the run goes on with another model or optimizer, or where the learning rates of the steps
    that are left would change with the length of the run.
    """

    def __init__(self, config: RunConfig, num_steps: int) -> None:
        self._config, self._num_steps = config, num_steps
        self._own: dict[str, Any] = json.loads(json.dumps(config.model_dump(), default=str))
        self._before: dict[str, Any] | None = None

    def state(self) -> Any:
        return {"config": json.dumps(self._own), "num_steps": self._num_steps}

    def load_state(self, state: Any) -> None:
        self._before = {"config": json.loads(state["config"]), "num_steps": state["num_steps"]}

    def setup(self, trainer: Run) -> None:
        if self._before is None:
            if trainer.is_first and trainer.step == 0 and (self._config.path / FILE).exists():
                print(f"begins anew: {self._config.path} has files of an earlier run, and no checkpoint", flush=True)
            return
        before = self._before["config"]
        changes = {key: values for key, values in _differences(before, self._own)}
        _check_fixed(changes, self._config.folder)
        old = _shares(before["schedule"], self._before["num_steps"])
        new = _shares(self._own["schedule"], self._num_steps)
        step = _first_change(old, new, trainer.step, max(self._num_steps, self._before["num_steps"]))
        if step is not None:
            if before["schedule"] == self._own["schedule"]:
                raise _other_length(
                    self._config, self._before["num_steps"], self._num_steps, old(step), new(step), step
                )
            _set_rates(trainer, new)
        if trainer.is_first and changes:
            _tell(changes, step, old, new, self._config.optimizer.lr)

    def before_train(self, trainer: Run) -> None:
        if trainer.is_first:
            folder = self._config.path
            make_folder(folder)
            remove_left(folder, FILE)
            replace_text(folder / FILE, json.dumps(self._own, indent=2))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """(key, (before, now)) of what differs."""
    for name in dict.fromkeys((*old, *new)):
        before, now, key = old.get(name), new.get(name), f"{where}{name}"
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from _differences(before, now, f"{key}.")
        elif before != now:
            yield key, (before, now)


def _check_fixed(changes: Mapping[str, Any], folder: str) -> None:
    for key, (before, now) in changes.items():
        if key.partition(".")[0] in FIXED:
            raise ConfigError(
                f"{key} = {_shown(now)}, and the run in {folder!r} has {_shown(before)}",
                rule="A run that is resumed goes on with the weights, optimizer and order of the data that it saved",
                remedy=f"Write {key} = {_shown(before)} to resume it, or another folder to begin a new run",
            )


def _shares(table: Mapping[str, Any], num_steps: int) -> Callable[[int], float]:
    return shares_of(ScheduleTable.model_validate({n: v for n, v in table.items() if v is not None}), num_steps)


def _first_change(old: Callable[[int], float], new: Callable[[int], float], first: int, last: int) -> int | None:
    """The first step, from 0 on, whose rate differs; None where none does."""
    stride = max((last - first) // CHECKED_STEPS, 1)
    return next((step for step in range(first, last + 1, stride) if abs(old(step) - new(step)) > 1e-9), None)


def _other_length(config: RunConfig, before: int, now: int, old: float, new: float, step: int) -> ConfigError:
    lr = config.optimizer.lr
    return ConfigError(
        f"The run has {now} steps, and had {before}: with its schedule, {config.schedule.name!r}, the learning rate of "
        f"step {step + 1} would be {lr * new:.3g} in place of {lr * old:.3g}",
        rule="A run that is resumed keeps its schedule, unless schedule.steps says otherwise",
        remedy=f"Write schedule.steps = {before} to keep it (after these steps the rate stays), or schedule.steps = "
        f"{now} to change it",
    )


def _set_rates(trainer: Run, share: Callable[[int], float]) -> None:
    """The rates of the next step, which a checkpoint has of the schedule that there was."""
    for scheduler in trainer.engine.schedulers:
        assert isinstance(scheduler, LambdaLR)
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
            group["lr"] = rate * share(scheduler.last_epoch)


def _tell(
    changes: Mapping[str, Any], step: int | None, old: Callable[[int], float], new: Callable[[int], float], lr: float
) -> None:
    shown = [f"{key} = {_shown(now)} (was {_shown(before)})" for key, (before, now) in changes.items()]
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    print(f"resumed with other settings: {', '.join(shown[:SHOWN])}{more}", flush=True)
    if step is not None:
        print(
            f"the learning rate changes: {lr * new(step):.3g} in step {step + 1} (was {lr * old(step):.3g})", flush=True
        )


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{json.dumps(value):.60}"
