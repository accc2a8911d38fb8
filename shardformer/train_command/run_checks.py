"""Checks of a run: changes since the run that it resumes, and whether the model learns the task."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from shardformer.discovery.reduced_model import reduce_model
from shardformer.discovery.shrink_config import SMALL_NUMEL
from shardformer.errors import ConfigError
from shardformer.filesystem.atomic_write import make_folder, remove_left, replace_text
from shardformer.meta_init.lazy_init import LazyInit
from shardformer.meta_init.materialization import is_lazy, materialized_copy
from shardformer.train_command.build import shares_of
from shardformer.train_command.config_schema import ScheduleTable, TrainConfig
from shardformer.train_command.datasets import IGNORED
from shardformer.training.hook import Hook, TrainerProtocol

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

    def __init__(self, config: TrainConfig, num_steps: int) -> None:
        self._config, self._num_steps = config, num_steps
        self._own: dict[str, Any] = json.loads(json.dumps(config.model_dump(), default=str))
        self._before: dict[str, Any] | None = None

    def state(self) -> Any:
        return {"config": json.dumps(self._own), "num_steps": self._num_steps}

    def load_state(self, state: Any) -> None:
        self._before = {"config": json.loads(state["config"]), "num_steps": state["num_steps"]}

    def setup(self, trainer: TrainerProtocol) -> None:
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

    def before_train(self, trainer: TrainerProtocol) -> None:
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


def _other_length(config: TrainConfig, before: int, now: int, old: float, new: float, step: int) -> ConfigError:
    lr = config.optimizer.lr
    return ConfigError(
        f"The run has {now} steps, and had {before}: with its schedule, {config.schedule.name!r}, the learning rate of "
        f"step {step + 1} would be {lr * new:.3g} in place of {lr * old:.3g}",
        rule="A run that is resumed keeps its schedule, unless schedule.steps says otherwise",
        remedy=f"Write schedule.steps = {before} to keep it (after these steps the rate stays), or schedule.steps = "
        f"{now} to change it",
    )


def _set_rates(trainer: TrainerProtocol, share: Callable[[int], float]) -> None:
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


# B batch, S sequence, V vocabulary

LENGTH = 8
DECODER = "is_decoder"
"""The field with which an encoder of transformers becomes a decoder."""
NOISE = 1e-5
"""By how much outputs differ that do not depend on what was changed, of their size: experts get other rows."""
MOVED = 0.05
"""How far parameters are moved: those that a class begins with at 0 hide what depends on what."""


def check_task(config: TrainConfig, model: Any) -> None:
    """Raises ConfigError for a model that sees the token that it is to predict, or not what it needs for it.

    What cannot be run by itself, with tokens alone, is not checked. Communicates nothing; the random state is kept.
    """
    task = config.model.task
    if task not in ("causal", "masked"):
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sees = seen_by_loss(model)
        if sees is None:
            return
        name = type(model).__name__
        if task == "causal" and sees.itself:
            raise ConfigError(
                f"model.task = 'causal', and {name} reads the token that it is to predict",
                rule="The next token is predicted from those before it: the output at a position does not depend on "
                "later tokens",
                remedy=_remedy(model),
            )
        if task == "masked" and not (sees.later and sees.in_place):
            what = "reads no later tokens" if not sees.later else "compares a label with the output before it"
            raise ConfigError(
                f"model.task = 'masked', and {name} {what}",
                rule="A masked token is predicted in its place, from the tokens on both sides of it",
                remedy="Write model.task = 'causal', or give a masked language model",
            )


@dataclass(frozen=True)
class Seen:
    """What the output that the loss compares with a label depends on.

    Args:
        itself: whether on the token that is the label, or on later ones.
        later: whether on later ones.
        in_place: whether it is the output at the label's own position.
    """

    itself: bool
    later: bool
    in_place: bool


def seen_by_loss(model: Any) -> Seen | None:
    """By trying it on a copy, or on a small model of the same class; None where that cannot be told."""
    for dtype in (torch.float64, torch.float32):
        try:
            small, ids_BS = _small(model)
            return _seen(small.to(dtype), ids_BS)
        except Exception:  # it takes more than tokens and labels, gives something else, or computes in fp32 alone
            continue
    return None


def _small(model: Any) -> tuple[nn.Module, Tensor]:
    """A model that runs on the CPU at once, and tokens for it."""
    if sum(p.numel() for p in model.parameters()) > SMALL_NUMEL:
        twin = reduce_model(model)
        small, ids_BS = twin.model, twin.batch["input_ids"][:1]
    else:
        small = (materialized_copy if is_lazy(model) else copy.deepcopy)(model)
        special = {value for name, value in model.config.to_dict().items() if name.endswith("_token_id")}
        plain = [token for token in range(model.get_input_embeddings().num_embeddings) if token not in special]
        ids_BS = torch.tensor(plain)[torch.randperm(len(plain))[None, :LENGTH]]
    with torch.no_grad():
        for param in small.parameters():
            param.add_(MOVED * torch.randn_like(param))
    return small.cpu().eval(), ids_BS


def _remedy(model: Any) -> str:
    """The other task; and ``is_decoder``, where that makes the attention of this class causal."""
    masked = "Write model.task = 'masked'"
    if getattr(model.config, DECODER, True):
        return f"{masked}, or give a model that predicts the next token"
    config = copy.deepcopy(model.config)
    setattr(config, DECODER, True)
    with LazyInit():
        decoder = type(model)(config)
    sees = seen_by_loss(decoder)
    if sees is None or sees.itself:
        return f"{masked}, or give a model that predicts the next token"
    return f"{masked}; or model.config.{DECODER} = true, with which its attention is causal"


def _seen(model: nn.Module, ids_BS: Tensor) -> Seen:
    place = ids_BS.shape[1] // 2
    labels_BS = torch.full_like(ids_BS, IGNORED)
    labels_BS[:, place] = ids_BS[:, place]
    output: Mapping[str, Tensor] = model(input_ids=ids_BS, labels=labels_BS)
    logits_BSV = output["logits"]
    (gradient_BSV,) = torch.autograd.grad(output["loss"], [logits_BSV])
    compared = gradient_BSV.abs().sum((0, 2)).nonzero().flatten().tolist()
    in_place = compared == [place]

    def depends_from(first: int) -> bool:
        other_BS = ids_BS.clone()
        other_BS[:, first:] = ids_BS.roll(1, 1)[:, first:]
        with torch.no_grad():
            other_BSV = model(input_ids=other_BS)["logits"]
        if not torch.isfinite(other_BSV).all():
            raise ValueError("its output is not finite")
        difference = (other_BSV - logits_BSV)[:, compared].abs().max()
        return bool(difference > NOISE * logits_BSV.abs().max())

    return Seen(depends_from(place), depends_from(place + 1), in_place)
