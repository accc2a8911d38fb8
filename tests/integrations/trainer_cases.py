"""Runs of transformers' Trainer, plain or sharded, which the tests compare. The functions run on the workers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from shardformer.config import ParallelConfig
from tests.integrations.small_models import (
    MODELS,
    class_rows,
    full_weights,
    largest_difference,
    pad_rows,
    token_rows,
    weight_difference,
)
from tests.integrations.training_cases import TrainingCase, resume_twice, train_in_new_folder, training_settings

EVALUATED = 11
"""Number of evaluated samples: two data ranks have 3 and none of the last batch."""
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_sum", "eval_labels", "total_flos")


@dataclass(frozen=True)
class Case(TrainingCase):
    """One training configuration under one layout.

    Args:
        resumes: whether the run is also resumed from its own checkpoint, from that of the plain Trainer, and by it.
    """

    model: str = "llama"
    options: dict[str, Any] = field(default_factory=dict)
    adapter: str = ""
    resumes: bool = True

    @property
    def name(self) -> str:
        parts = [self.model, *filter(None, [self.adapter]), *(f"{key}-{value}" for key, value in self.options.items())]
        return "_".join(parts)


def metrics_of(prediction: Any) -> dict[str, Any]:
    """Compute numbers that depend on every prediction and on the order of the samples, but not on padding."""
    outputs = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    labels, sizes = np.asarray(prediction.label_ids), np.abs(np.asarray(outputs).astype("float64"))
    if sizes.ndim == 3:
        sizes = sizes[:, -labels.shape[1] :].mean(-1) * (labels != -100)  # without the logits of a prompt
    weights = np.arange(1, len(sizes) + 1)
    return {"sum": float((sizes.sum(-1) * weights).sum()), "labels": int(labels[labels != -100].sum())}


def reset_accelerate() -> None:
    """Clear the process-wide state of accelerate, because a worker runs many cases."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def arguments(folder: str, case: Case) -> Any:
    own = {"learning_rate": 1e-2, "save_strategy": "steps", "weight_decay": 0.1}
    settings = training_settings(case.layout.get("data", 1), case.options, **own)
    settings.pop("rows", None)
    kind = transformers.Seq2SeqTrainingArguments if case.model == "t5" else transformers.TrainingArguments
    return kind(folder, **settings)


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"target_modules": "all-linear", "r": 3}),
    "DoRA": ("LoraConfig", {"target_modules": "all-linear", "r": 3, "use_dora": True}),
    "modules_to_save": ("LoraConfig", {"target_modules": ["q_proj", "o_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
}
"""Name -> PEFT's configuration class and its arguments."""


def add_adapter(model: Any, adapter: str, seed: int) -> Any:
    """Add an adapter of PEFT whose values are not zero."""
    import peft

    kind, settings = ADAPTERS[adapter]
    more = {} if "Prompt" in kind else {"init_lora_weights": False}
    torch.manual_seed(seed + 5)
    return peft.get_peft_model(model, getattr(peft, kind)(**settings, **more, task_type="CAUSAL_LM"))


def check_adapter_files(ours: str, plain: str) -> None:
    """Check that a checkpoint has the files, tensors and settings that the plain Trainer writes for adapters."""
    from safetensors.torch import load_file

    assert [f for f in sorted(os.listdir(plain)) if not f.startswith("rng_state")] == [
        f for f in sorted(os.listdir(ours)) if not f.startswith("rng_state")
    ]
    tensors, reference = (load_file(os.path.join(folder, "adapter_model.safetensors")) for folder in (ours, plain))
    assert weight_difference(tensors, reference) < 1e-5
    settings, expected = (
        json.loads(Path(folder, "adapter_config.json").read_text(encoding="utf-8")) for folder in (ours, plain)
    )
    assert {**settings, "target_modules": None} == {**expected, "target_modules": None}


def make_trainer(folder: str, case: Case, seed: int = 0) -> Any:
    """Create a plain Trainer if the case has no layout, and a sharded one otherwise."""
    import shardformer.integrations.transformers as integration

    reset_accelerate()
    library: Any = integration if case.layout else transformers
    kind = library.Seq2SeqTrainer if case.model == "t5" else library.Trainer
    data: dict[str, Any] = {"compute_metrics": metrics_of}
    if case.options.get("rows") == "ragged":
        data |= {"train_dataset": token_rows(ragged=True), "eval_dataset": token_rows(EVALUATED, seed=3, ragged=True)}
        data |= {"data_collator": pad_rows}
    else:
        rows = class_rows if case.model == "bert" else token_rows
        data |= {
            "train_dataset": rows(),
            "eval_dataset": rows(EVALUATED, seed=3),
        }
    if case.model == "t5":  # label smoothing computes the loss without passing labels
        for row in (row for rows_of in (data["train_dataset"], data["eval_dataset"]) for row in rows_of):
            row["decoder_input_ids"] = [0, *(max(label, 0) for label in row["labels"][:-1])]
    if case.layout:
        data |= {"parallel": ParallelConfig(**case.layout)}
    model = MODELS[case.model](0 if case.adapter else seed)
    if case.adapter:
        model = add_adapter(model.double(), case.adapter, seed)
    trainer = kind(model, arguments(folder, case), **data)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def logged(trainer: Any) -> dict[str, list[float]]:
    history = trainer.state.log_history
    return {name: [float(entry[name]) for entry in history if name in entry] for name in LOGGED}


def train(case: Case, root: str) -> dict[str, Any]:
    """Train 4 steps. Save the weights and logs in one process; otherwise compare with them, and resume twice.

    Resumes in the middle of the epoch: from the own checkpoint, and from that of the plain Trainer.
    """
    (weights, logs), reference = train_in_new_folder(case, root, make_trainer, logged)
    if reference is None:
        return logs
    weights_1, logs_1 = reference
    found: dict[str, Any] = {name: largest_difference(logs[name], logs_1[name]) for name in LOGGED}
    found["weights"] = weight_difference(weights, weights_1)
    if case.resumes:
        found |= resume_twice(case, root, partial(make_trainer, case=case, seed=9), weights_1)
    return found


def resume_plain(case: Case, root: str) -> float:
    """Resume the plain Trainer from a checkpoint of the sharded one, and return the difference of the weights.

    First loads the last checkpoint with ``from_pretrained``, which must not miss a weight.
    """
    place = os.path.join(root, case.folder)
    last = os.path.join(place, "checkpoint-4")
    if case.adapter:
        check_adapter_files(last, os.path.join(root, case.name, "checkpoint-4"))
    else:
        _, info = type(MODELS[case.model]()).from_pretrained(last, output_loading_info=True)
        assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    if not case.resumes:
        return 0.0
    trainer = make_trainer(f"{place}_plain", case.plain, seed=9)
    trainer.train(resume_from_checkpoint=os.path.join(place, "checkpoint-2"))
    weights_1, _ = torch.load(os.path.join(root, f"{case.name}.pt"))
    return weight_difference(full_weights(trainer.model), weights_1)


def train_all(cases: Sequence[Case], root: str) -> list[dict[str, Any]]:
    return [train(case, root) for case in cases]


def resume_all(cases: Sequence[Case], root: str) -> list[float]:
    return [resume_plain(case, root) for case in cases]
