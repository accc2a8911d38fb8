"""The sharded Trainer logs and learns the same as the plain Trainer in one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import comparisons
from tests.integrations import trainer_uses as uses
from tests.integrations.comparisons import find_values_above, for_each_feature
from tests.integrations.process import IntegrationProcess
from tests.integrations.refusals import check_refusals
from tests.integrations.rows import record_difference
from tests.integrations.trainer_cases import LOGGED, Case, resume_all, train_all

pytestmark = pytest.mark.slow

BOUND = 1e-5
"""Largest relative difference of logs and weights in fp32."""
BOUND_BF16 = 2e-2

GROUPED = {"train_sampling_strategy": "group_by_length", "rows": "ragged"}
REBALANCED = {"train_sampling_strategy": "batch_rebalance", "rows": "ragged"}
GENERATING = {"predict_with_generate": True, "generation_max_length": 6}
LAYOUTS: list[dict[str, Any]] = [
    *comparisons.LAYOUTS,
    {"tensor": 2, "zero_stage": 1},
    {"pipe": 2, "micro_batches": 2},
    {"pipe": 2, "zero_stage": 1},
]
COMBINED: list[dict[str, Any]] = [
    *comparisons.COMBINED,
    {"data": 2, "sequence": 2},
    {"data": 2, "sequence": 2, "zero_stage": 1},
    {"pipe": 2, "tensor": 2},
    {"pipe": 2, "data": 2, "zero_stage": 1},
]
FEATURES: dict[str, tuple[Any, ...]] = {
    "causal language model": ("llama", {}),
    "tied weights": ("gpt2", {}),
    "sequence classification": ("bert", {}),
    "sequence to sequence": ("t5", {}),
    "gradient accumulation": ("llama", {"gradient_accumulation_steps": 2}),
    "label smoothing": ("llama", {"label_smoothing_factor": 0.1}),
    "label smoothing, seq2seq": ("t5", {"label_smoothing_factor": 0.1}),
    "predict_with_generate": ("t5", GENERATING),
    "load_best_model_at_end": ("llama", {"load_best_model_at_end": True}),
    "NEFTune": ("llama", {"neftune_noise_alpha": 5.0}),
    "Adafactor": ("llama", {"optim": "adafactor"}),
    "group_by_length": ("llama", GROUPED),
    "batch_rebalance": ("llama", REBALANCED),
    "activation checkpointing": ("llama", {"activation_checkpointing": True}),
    "bf16": ("llama", {"bf16": True}),
    "torch_compile": ("llama", {"torch_compile": True, "torch_compile_backend": "aot_eager"}),
    "PEFT LoRA": ("llama", {"load_best_model_at_end": True}, "LoRA"),
    "PEFT DoRA": ("llama", {"load_best_model_at_end": True}, "DoRA"),
    "PEFT modules_to_save": ("llama", {"load_best_model_at_end": True}, "modules_to_save"),
    "PEFT prompt tuning": ("llama", {"load_best_model_at_end": True}, "prompt tuning"),
}
FEATURES_COMBINED = ("gradient accumulation", "PEFT LoRA")
SAMPLE = [
    ("gradient accumulation", {"tensor": 2}),
    ("gradient accumulation", {"data": 2, "zero_stage": 1}),
    ("sequence to sequence", {"data": 2}),
    ("tied weights", {"pipe": 2, "micro_batches": 2}),
    ("sequence classification", {"data": 2, "zero_stage": 3}),
    ("PEFT LoRA", {"data": 2, "zero_stage": 3}),
]
RESUMED = ("gradient accumulation", "tied weights", "PEFT LoRA")
"""Features of the sample whose runs are resumed, too."""
EXCLUDED = {
    ("NEFTune", "data"): "every data rank draws the noise of its own samples",
    ("NEFTune", "sequence"): "every sequence rank draws the noise of its own positions",
    ("batch_rebalance", "data"): "Trainer forms the batches of each rank from the lengths",
    ("label smoothing", "pipe"): "refused",
    ("label smoothing, seq2seq", "pipe"): "refused",
    ("predict_with_generate", "pipe"): "refused",
    ("predict_with_generate", "sequence"): "refused",
    ("NEFTune", "pipe"): "refused",
    ("torch_compile", "pipe"): "refused",
    ("PEFT prompt tuning", "pipe"): "refused",
}
"""(feature, axis) -> why the run is not compared with one process."""


def check(
    integrations: IntegrationProcess,
    root: Path,
    chosen: list[tuple[str, dict[str, Any]]],
    ranks: int,
    resumed: Collection[str] = FEATURES,
) -> None:
    cases = [replace(Case(layout, *FEATURES[feature]), resumes=feature in resumed) for feature, layout in chosen]
    plain = {case.name: case.plain for case in cases}
    integrations(1).run(train_all, list(plain.values()), str(root))
    found = integrations(ranks).run(train_all, cases, str(root))[0]
    returned = integrations(1).run(resume_all, cases, str(root))[0]
    problems: list[str] = []
    for (feature, layout), measured, back in zip(chosen, found, returned, strict=True):
        measured["resumed in one process"] = back
        record_difference("transformers", feature, layout, measured["loss"], measured["grad_norm"], "read by both")
        bound = BOUND_BF16 if feature == "bf16" else BOUND
        compared = set(measured) - {"total_flos"} if "ragged" in str(FEATURES[feature]) else set(measured)
        if feature == "bf16":  # rounding decides the sign of steps
            compared &= set(LOGGED)
        problems += find_values_above(bound, measured, compared, feature, layout)
    assert not problems


def check_losses(integrations: IntegrationProcess, root: Path, train: Callable[[str], dict[str, Any]]) -> None:
    """Check that two ranks have the losses of one process, by the name of the training."""
    results = integrations(2).run(train, str(root))
    alone = integrations(1).run(train, str(root / "one"))[0]
    for name, losses in alone.items():
        assert results[0][name] == pytest.approx(losses, rel=1e-5), name


@pytest.mark.above_budget("trains models with two ranks and in one process, and resumes each in both")
def test_losses_norms_evaluation_and_resumed_runs_equal_one_process(
    integrations: IntegrationProcess, tmp_path: Path
) -> None:
    check(integrations, tmp_path, SAMPLE, 2, RESUMED)


@for_each_feature(FEATURES, "trains under all layouts")
def test_every_feature_equals_one_process_under_every_layout(
    feature: str, integrations: IntegrationProcess, tmp_path: Path
) -> None:
    exact = [layout for layout in LAYOUTS if not any((feature, axis) in EXCLUDED for axis in layout)]
    check(integrations, tmp_path, [(feature, layout) for layout in exact], 2)


@for_each_feature(FEATURES_COMBINED, "trains with four ranks")
def test_combinations_of_axes_equal_one_process(feature: str, integrations: IntegrationProcess, tmp_path: Path) -> None:
    check(integrations, tmp_path, [(feature, layout) for layout in COMBINED], 4)


@pytest.mark.above_budget("may start the workers")
def test_arguments_that_cannot_work_are_refused_before_training(
    integrations: IntegrationProcess, tmp_path: Path
) -> None:
    first, second = integrations(2).run(uses.refusals, str(tmp_path))
    assert first == second
    check_refusals("transformers", first)


@pytest.mark.above_budget("may start the workers")
def test_callbacks_run_and_one_rank_reports(integrations: IntegrationProcess, tmp_path: Path) -> None:
    first, second = integrations(2).run(uses.train_with_callbacks, str(tmp_path))
    assert first["steps"] == second["steps"] == 3  # the callback stops the training
    assert first["tokens"] == second["tokens"] == 3 * 8 * 11
    assert len(list((tmp_path / "logs").rglob("events.*"))) == 1
    assert first["missing_keys"] == 0  # GPT-2's head is saved under the name of its embedding
    assert json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["global_step"] == 2


@pytest.mark.above_budget("may start the workers")
def test_model_init_own_optimizer_and_plain_modules_train(integrations: IntegrationProcess, tmp_path: Path) -> None:
    check_losses(integrations, tmp_path, uses.other_ways_to_start)


@pytest.mark.above_budget("may start the workers")
def test_a_loss_without_weights_warns_of_different_numbers_of_labels(
    integrations: IntegrationProcess, tmp_path: Path
) -> None:
    for found in integrations(2).run(uses.warnings_of_own_losses, str(tmp_path)):
        assert len(found["Masked"]) == 1 and "num_items_in_batch" in found["Masked"][0]
        assert found["Mean"] == found["Items"] == []


@pytest.mark.full
@pytest.mark.above_budget("derives two policies")
def test_models_that_only_run_with_the_data_are_sharded(integrations: IntegrationProcess, tmp_path: Path) -> None:
    check_losses(integrations, tmp_path, uses.own_models)


@pytest.mark.full
@pytest.mark.above_budget("may start the workers")
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"data": 2}])
def test_losses_that_count_targets_equal_one_process(
    layout: dict[str, Any], integrations: IntegrationProcess, tmp_path: Path
) -> None:
    alone = integrations(1).run(uses.detection, str(tmp_path / "one"), {})[0]
    for found in integrations(2).run(uses.detection, str(tmp_path), layout):
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert found["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)


@pytest.mark.above_budget("may start the workers")
def test_batch_norm_warns_of_data_ranks(integrations: IntegrationProcess, tmp_path: Path) -> None:
    for found in integrations(2).run(uses.warnings_of_batch_norm, str(tmp_path)):
        assert len(found) == 1 and "over 2 data-parallel ranks" in found[0]


@pytest.mark.full
@pytest.mark.above_budget("may start the workers")
def test_in_batch_negatives_warn_unless_gathered(integrations: IntegrationProcess, tmp_path: Path) -> None:
    alone = integrations(1).run(uses.contrastive, str(tmp_path / "one"), {})[0]
    assert alone["Negatives"][1] == []
    for found in integrations(2).run(uses.contrastive, str(tmp_path), {"data": 2}):
        losses, messages = found["Negatives"]
        assert losses != pytest.approx(alone["Negatives"][0], rel=1e-3)
        assert len(messages) == 1 and "compares the 4 samples of each data-parallel rank" in messages[0]
        losses, messages = found["Gathered"]
        assert losses == pytest.approx(alone["Gathered"][0], rel=1e-5) and messages == []
