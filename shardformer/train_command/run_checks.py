"""Checks that a resumed run has compatible settings, and that the model can learn its task."""

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
from shardformer.errors import ConfigError, first_line
from shardformer.filesystem.atomic_write import make_folder, remove_leftovers, replace_text
from shardformer.meta_init.lazy_init import LazyInit
from shardformer.meta_init.materialization import copy_materialized, is_lazy
from shardformer.train_command.build import lr_schedule
from shardformer.train_command.config_schema import ScheduleTable, TrainConfig, format_toml
from shardformer.train_command.conversations import IGNORED
from shardformer.training.hook import Hook, TrainerProtocol

CONFIG_FILE = "resolved_config.toml"
MODEL_KEY = "model_config"
"""Key of the config of the model in the state of ``Resume``, from which a checkpoint can be loaded without the run."""
FIXED = ("model", "optimizer", "seed")
"""Keys and tables that must not change on resume: the checkpoint determines weights, optimizer and data order."""
MAX_COMPARED_STEPS = 10_000
"""Maximum number of steps whose learning rates are compared."""


class Resume(Hook):
    """Hook that stores the run configuration in checkpoints, and compares it with them when a run resumes.

    The configuration with all defaults is also written to ``folder/resolved_config.toml``. This hook must come after
    the hook that loads the checkpoint. Communicates nothing.

    Raises:
        ConfigError: The resumed run has another model or optimizer, or its new length would change learning rates.
    """

    def __init__(self, config: TrainConfig, num_steps: int) -> None:
        self._config, self._num_steps = config, num_steps
        self._values: dict[str, Any] = json.loads(json.dumps(config.model_dump(), default=str))
        self._before: dict[str, Any] | None = None
        self._model_config = ""

    def state(self) -> Any:
        return {
            "config": json.dumps(self._values), "num_steps": self._num_steps, MODEL_KEY: self._model_config,
        }  # fmt: skip

    def load_state(self, state: Any) -> None:
        self._before = {"config": json.loads(state["config"]), "num_steps": state["num_steps"]}

    def setup(self, trainer: TrainerProtocol) -> None:
        model_config: Any = trainer.engine.model.config
        self._model_config = model_config.to_json_string()
        if self._before is None:
            if trainer.is_first and trainer.step == 0 and (self._config.path / CONFIG_FILE).exists():
                print(f"New run: {self._config.path} has files of an earlier run, but no checkpoint.", flush=True)
            return
        before, old_steps = self._before["config"], self._before["num_steps"]
        changes = dict(_changed_keys(before, self._values))
        for key, (was, now) in changes.items():
            if key.partition(".")[0] in FIXED:
                keep = f"Remove {key}" if was is None else f"Set {key} = {_format_value(was)}"
                raise ConfigError(
                    f"{key} is {_format_value(now)}, but was {_format_value(was)} when the run in "
                    f"{self._config.folder!r} started",
                    remedy=f"{keep} to resume the run, or set another folder to start a new run",
                )
        old, new = _lr_schedule(before["schedule"], old_steps), _lr_schedule(self._values["schedule"], self._num_steps)
        last = max(self._num_steps, old_steps)
        steps = range(trainer.step, last + 1, max((last - trainer.step) // MAX_COMPARED_STEPS, 1))
        step = next((step for step in steps if abs(old(step) - new(step)) > 1e-9), None)
        rates = "unchanged"
        if step is not None:
            lr = self._config.optimizer.lr
            old_rate, new_rate = f"{lr * old(step):.3g}", f"{lr * new(step):.3g}"
            rates = f"changes from step {step + 1}, which uses {new_rate} (before: {old_rate})"
            if before["schedule"] == self._values["schedule"]:
                raise ConfigError(
                    f"Resuming with {self._num_steps} instead of {old_steps} steps would change the "
                    f"learning rate of step {step + 1} from {old_rate} to {new_rate}, because schedule.name "
                    f"= {self._config.schedule.name!r} depends on the number of steps",
                    remedy=f"Set schedule.steps = {old_steps} to keep the schedule, with a constant rate after these "
                    f"steps, or schedule.steps = {self._num_steps} to change it",
                )
            _set_learning_rates(trainer, new)
        if trainer.is_first and changes:
            print("Resumed with changed settings:", *format_changes(changes), sep="\n", flush=True)
            if any(key.startswith(("schedule.", "training.steps", "training.epochs", "data.")) for key in changes):
                print(f"Learning rate: {rates}.", flush=True)

    def before_train(self, trainer: TrainerProtocol) -> None:
        if trainer.is_first:
            folder = self._config.path
            make_folder(folder)
            remove_leftovers(folder, CONFIG_FILE)
            replace_text(folder / CONFIG_FILE, format_toml(self._config.model_dump()))


def format_changes(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Format changed settings as a table with the option, its value before, and its value now."""
    rows = [("option", "before", "now")]
    rows += [(key, _format_value(before), _format_value(now)) for key, (before, now) in changes.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [f"  {key:<{widths[0]}}  {before:<{widths[1]}}  {now}" for key, before, now in rows]


def _changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each configuration key that differs between two runs, with its old and new value."""
    for name in dict.fromkeys((*old, *new)):
        before, now, key = old.get(name), new.get(name), f"{prefix}{name}"
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from _changed_keys(before, now, f"{key}.")
        elif before != now:
            yield key, (before, now)


def _lr_schedule(table: Mapping[str, Any], num_steps: int) -> Callable[[int], float]:
    return lr_schedule(ScheduleTable.model_validate({n: v for n, v in table.items() if v is not None}), num_steps)


def _set_learning_rates(trainer: TrainerProtocol, lr_factor: Callable[[int], float]) -> None:
    """Set the learning rates of the next step, replacing the rates that a checkpoint restored from an old schedule."""
    for scheduler in trainer.engine.schedulers:
        assert isinstance(scheduler, LambdaLR)
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
            group["lr"] = rate * lr_factor(scheduler.last_epoch)


def _format_value(value: Any) -> str:
    return "not set" if value is None else f"{json.dumps(value):.60}"


# B batch, S sequence, V vocabulary

LENGTH = 8
DECODER = "is_decoder"
"""Config field that turns an encoder of transformers into a decoder."""
NOISE = 1e-5
"""Relative tolerance for equal outputs, which differ slightly because experts receive different tokens."""
PERTURBATION = 0.05
"""Scale of the noise added to parameters, because parameters initialized to 0 would hide dependences."""


def check_task(config: TrainConfig, model: Any) -> None:
    """Raise ConfigError if a language model cannot learn its task, because it reads the wrong tokens.

    A causal model must not read the token that it predicts, and a masked model must read later tokens. Models that do
    not run with tokens alone are not checked. Communicates nothing, and keeps the random state.
    """
    task = config.model.task
    if task not in ("causal", "masked"):
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dependence = label_dependence(model)
        if dependence is None:
            return
        name = type(model).__name__
        if task == "causal" and dependence.on_label:
            raise ConfigError(
                f"model.task = 'causal' does not support {name}, whose output at a position depends on the "
                "token to predict",
                rule="A causal model predicts a token from earlier tokens only",
                remedy=_suggest_task(model),
            )
        if task == "masked" and not (dependence.on_later and dependence.in_place):
            what = "ignores later tokens" if not dependence.on_later else "compares a label with the previous output"
            raise ConfigError(
                f"model.task = 'masked' does not support {name}, which {what}",
                rule="A masked language model predicts a token at its position, from the tokens on both sides",
                remedy="Set model.task = 'causal', or use a masked language model",
            )


@dataclass(frozen=True)
class LabelDependence:
    """Which tokens affect the output at a position, and whether the loss compares this output with the token there.

    Args:
        on_label: Whether the label token or later tokens change the output.
        on_later: Whether later tokens change the output.
        in_place: Whether the output has the position of the label.
    """

    on_label: bool
    on_later: bool
    in_place: bool


def label_dependence(model: Any) -> LabelDependence | None:
    """Measure which tokens affect the output that is compared with a label, or return None if this is impossible.

    The measurement uses a copy of the model, or a reduced model if the model is large.
    """
    for dtype in (torch.float64, torch.float32):
        try:
            small, ids_BS = _make_small_model(model)
            return _measure_dependence(small.to(dtype), ids_BS)
        except Exception:  # the model requires other inputs or fp32, or returns other outputs
            continue
    return None


def check_packing(model: Any, option: str = "data.packing = true") -> None:
    """Raise ConfigError if a model mixes the documents of a row whose ``position_ids`` restart.

    The output of a document in a packed row is compared with that of the document alone, on a copy of the model or a
    reduced model. Communicates nothing, and keeps the random state. ``option`` is the setting to name in the error.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            small, ids_BS = _make_small_model(model)
            is_separated = _separates_documents(small.to(torch.float64), ids_BS)
            reason = "lets tokens attend to other documents of their row"
        except Exception as error:  # the model takes no position_ids
            is_separated, reason = False, f"does not accept rows of several documents: {first_line(error)}"
    if not is_separated:
        raise ConfigError(
            f"{option} does not support {type(model).__name__}, which {reason}",
            rule="Several texts in a row are separated by their position_ids",
            remedy="Use another model" if option.startswith("model") else "Remove data.packing",
        )


def _separates_documents(model: nn.Module, ids_BS: Tensor) -> bool:
    ids_BS, start = ids_BS[:, :LENGTH], LENGTH // 2
    positions_BS = torch.arange(start).repeat(2).expand_as(ids_BS)
    with torch.no_grad():
        packed_BSV = model(input_ids=ids_BS, position_ids=positions_BS, use_cache=False)["logits"]
        alone_BSV = model(input_ids=ids_BS[:, start:], position_ids=positions_BS[:, start:], use_cache=False)["logits"]
    difference = (packed_BSV[:, start:] - alone_BSV).abs().max()
    return bool(difference <= NOISE * alone_BSV.abs().max())


def _make_small_model(model: Any) -> tuple[nn.Module, Tensor]:
    """Return a copy of the model, or a reduced model if it is large, on the CPU with a sequence of input tokens."""
    if sum(p.numel() for p in model.parameters()) > SMALL_NUMEL:
        reduced = reduce_model(model)
        small, ids_BS = reduced.model, reduced.batch["input_ids"][:1]
    else:
        small = (copy_materialized if is_lazy(model) else copy.deepcopy)(model)
        special = {value for name, value in model.config.to_dict().items() if name.endswith("_token_id")}
        plain = [token for token in range(model.get_input_embeddings().num_embeddings) if token not in special]
        ids_BS = torch.tensor(plain)[torch.randperm(len(plain))[None, :LENGTH]]
    with torch.no_grad():
        for param in small.parameters():
            param.add_(PERTURBATION * torch.randn_like(param))
    return small.cpu().eval(), ids_BS


def _suggest_task(model: Any) -> str:
    """Suggest the masked task as a remedy, and ``is_decoder`` if this field makes the attention of the model causal."""
    masked = "Set model.task = 'masked'"
    if getattr(model.config, DECODER, True):
        return f"{masked}, or use a model that predicts the next token"
    config = copy.deepcopy(model.config)
    setattr(config, DECODER, True)
    with LazyInit():
        decoder = type(model)(config)
    dependence = label_dependence(decoder)
    if dependence is None or dependence.on_label:
        return f"{masked}, or use a model that predicts the next token"
    return f"{masked}, or model.config.{DECODER} = true for causal attention"


def _measure_dependence(model: nn.Module, ids_BS: Tensor) -> LabelDependence:
    position = ids_BS.shape[1] // 2
    labels_BS = torch.full_like(ids_BS, IGNORED)
    labels_BS[:, position] = ids_BS[:, position]
    output: Mapping[str, Tensor] = model(input_ids=ids_BS, labels=labels_BS)
    logits_BSV = output["logits"]
    (gradient_BSV,) = torch.autograd.grad(output["loss"], [logits_BSV])
    compared = gradient_BSV.abs().sum((0, 2)).nonzero().flatten().tolist()

    def depends_from(first: int) -> bool:
        other_BS = ids_BS.clone()
        other_BS[:, first:] = ids_BS.roll(1, 1)[:, first:]
        with torch.no_grad():
            other_BSV = model(input_ids=other_BS)["logits"]
        if not torch.isfinite(other_BSV).all():
            raise ValueError("the output is not finite")
        difference = (other_BSV - logits_BSV)[:, compared].abs().max()
        return bool(difference > NOISE * logits_BSV.abs().max())

    return LabelDependence(depends_from(position), depends_from(position + 1), in_place=compared == [position])
