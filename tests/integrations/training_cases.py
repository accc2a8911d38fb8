"""Runs of the trainers of transformers and TRL: their settings, training in a new folder, and from a checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from tests.integrations.small_models import full_weights, weight_difference

GLOBAL_BATCH = 8
WeightsAndLogs = tuple[dict[str, Tensor], dict[str, list[float]]]


@dataclass(frozen=True)
class TrainingCase:
    """A training configuration under one layout, which is empty for the plain trainer."""

    layout: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the training configuration, which the run in one process has, too."""
        raise NotImplementedError

    @property
    def folder(self) -> str:
        return "_".join([self.name, *(f"{key}-{value}" for key, value in self.layout.items())])

    @property
    def plain(self) -> Self:
        """The same training in one process."""
        return replace(self, layout={})


def training_settings(data: int, options: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """Return arguments of four steps that log each step, and save and evaluate every second step.

    Args:
        data: number of data-parallel ranks.
        options: arguments that replace others.
        own: arguments of one trainer.
    """
    return {
        "per_device_train_batch_size": GLOBAL_BATCH // data // options.get("gradient_accumulation_steps", 1),
        "per_device_eval_batch_size": GLOBAL_BATCH // data,
        "max_steps": 4,
        "adam_epsilon": 1e-3,  # otherwise rounding errors decide the sign of steps whose gradient is almost 0
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "save_steps": 2,
        "disable_tqdm": True,
        "seed": 0,
        "max_grad_norm": 0.5,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "log_level": "error",
        **own,
        **options,
    }


def train_in_new_folder(
    case: TrainingCase, root: str, make_trainer: Callable[[str, Any], Any], logged: Callable[[Any], Any]
) -> tuple[WeightsAndLogs, WeightsAndLogs | None]:
    """Train, and return the weights and logs, and those of the plain trainer.

    The plain trainer saves its weights and logs, and the second result is None.
    """
    place = os.path.join(root, case.folder)
    if int(os.environ["RANK"]) == 0:
        shutil.rmtree(place, ignore_errors=True)
    torch.distributed.barrier()
    trainer = make_trainer(place, case)
    trainer.train()
    trained = full_weights(trainer.model), logged(trainer)
    reference = os.path.join(root, f"{case.name}.pt")
    if case.layout:
        return trained, torch.load(reference)
    torch.save(trained, reference)
    return trained, None


def resume_twice(
    case: TrainingCase, root: str, make_trainer: Callable[[str], Any], reference: dict[str, Tensor]
) -> dict[str, float]:
    """Resume from the own checkpoint and from that of the plain trainer, and compare the weights with the reference."""
    found = {}
    for name, checkpoint in (("resumed", case.folder), ("crossed", case.name)):
        place = os.path.join(root, f"{case.folder}_{name}")
        trainer = make_trainer(place)
        trainer.train(resume_from_checkpoint=os.path.join(root, checkpoint, "checkpoint-2"))
        found[name] = weight_difference(full_weights(trainer.model), reference)
        shutil.rmtree(place, ignore_errors=True)
    return found
