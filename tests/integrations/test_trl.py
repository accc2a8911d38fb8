"""TRL's trainers of sharded models log and learn the same as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations import trl_uses as uses
from tests.integrations.comparisons import COMBINED, LAYOUTS, find_values_above, for_each_feature
from tests.integrations.process import IntegrationProcess
from tests.integrations.refusals import check_messages
from tests.integrations.rows import record_difference
from tests.integrations.trl_cases import Case, train_all

pytestmark = pytest.mark.slow

BOUND = 1e-5
"""Largest relative difference of logs and weights in fp32."""
BOUND_BF16 = 3e-2

COMPLETION: dict[str, Any] = {"rows": "completion"}
PACKED: dict[str, Any] = {"options": {"packing": True, "max_length": 16, "eval_packing": False}}
PAIRS: dict[str, Any] = {"kind": "dpo", "rows": "pairs"}
PROMPTS: dict[str, Any] = {"kind": "grpo", "rows": "prompts"}
FEATURES: dict[str, dict[str, Any]] = {
    "SFT": {},
    "SFT, completions": COMPLETION,
    "SFT, assistant_only_loss": {"rows": "chat", "options": {"assistant_only_loss": True}},
    "SFT, packing": PACKED,
    "SFT, padding_free": {"options": {"padding_free": True, "max_length": None}},
    "SFT, tied weights": {**COMPLETION, "model": "gpt2"},
    "SFT, gradient accumulation": {**COMPLETION, "options": {"gradient_accumulation_steps": 2}},
    "SFT, DFT loss": {**COMPLETION, "options": {"loss_type": "dft"}},
    "SFT, label smoothing": {**COMPLETION, "options": {"label_smoothing_factor": 0.1}},
    "SFT, bf16": {**COMPLETION, "options": {"bf16": True}},
    "SFT, LoRA": {**COMPLETION, "peft": True},
    "DPO": PAIRS,
    "DPO, gradient accumulation": {**PAIRS, "options": {"gradient_accumulation_steps": 2}},
    "DPO, LoRA": {**PAIRS, "peft": True},
    "DPO, precomputed": {**PAIRS, "options": {"precompute_ref_log_probs": True}},
    "DPO, synchronized": {**PAIRS, "options": {"sync_ref_model": True, "ref_model_sync_steps": 2}},
    "reward": {"kind": "reward", "model": "reward", "rows": "ranked"},
    "KTO": {"kind": "kto", "rows": "judged"},
    "GRPO": PROMPTS,
    "GRPO, reference": {**PROMPTS, "options": {"beta": 0.1}},
    "RLOO": {**PROMPTS, "kind": "rloo", "options": {"beta": 0.0}},
}
"""Feature -> arguments of the case."""
SAMPLE = [
    ("SFT, completions", {"tensor": 2}),
    ("SFT, packing", {"data": 2, "zero_stage": 1}),
    ("DPO", {"tensor": 2}),
    ("GRPO", {"tensor": 2}),
]
REFUSED = [("DPO, synchronized", 3)]
"""(feature, ZeRO stage) that raise an error."""
FEATURES_COMBINED = ("SFT, completions", "DPO")
NOT_RESUMED = ("SFT, bf16", "DPO, synchronized")
"""Rounding decides the signs of steps, or TRL does not save the reference, so its own resumed runs differ as well."""
PER_RANK = ("GRPO", "RLOO", "KTO")
"""TRL draws the completions of each process separately, and pairs texts within its batch."""


def case_of(feature: str, layout: dict[str, Any]) -> Case:
    """Return a case, whose plain run has several processes if the results of TRL depend on their number."""
    plain_ranks = layout.get("data", 1) if feature.startswith(PER_RANK) else 1
    return Case(layout, **FEATURES[feature], plain_ranks=plain_ranks)


def check(integrations: IntegrationProcess, root: Path, chosen: list[tuple[str, dict[str, Any]]], ranks: int) -> None:
    cases = [case_of(feature, layout) for feature, layout in chosen]
    for number in sorted({case.plain_ranks for case in cases}):
        plain = {case.name: case.plain for case in cases if case.plain_ranks == number}
        integrations(number).run(train_all, list(plain.values()), str(root))
    problems: list[str] = []
    for (feature, layout), measured in zip(
        chosen, integrations(ranks).run(train_all, cases, str(root))[0], strict=True
    ):
        files = "" if feature in NOT_RESUMED else "resumed"
        record_difference("trl", feature, layout, measured["loss"], measured["grad_norm"], files)
        bound = BOUND_BF16 if "bf16" in feature else BOUND
        compared = set(measured)
        if feature in NOT_RESUMED:
            compared -= {"resumed", "crossed"}
        if feature == "SFT, bf16":
            compared.remove("weights")
        if feature == "DPO, precomputed":  # rewards start at 0, so rounding decides their signs
            compared.remove("rewards/accuracies")
        problems += find_values_above(bound, measured, compared, feature, layout)
    assert not problems


@pytest.mark.above_budget("trains models with two ranks and in one process, and resumes each")
def test_losses_metrics_evaluation_and_resumed_runs_equal_one_process(
    integrations: IntegrationProcess, tmp_path: Path
) -> None:
    check(integrations, tmp_path, SAMPLE, 2)


@for_each_feature(FEATURES, "trains under all layouts")
def test_every_feature_equals_one_process_under_every_layout(
    feature: str, integrations: IntegrationProcess, tmp_path: Path
) -> None:
    layouts = [layout for layout in LAYOUTS if (feature, layout.get("zero_stage")) not in REFUSED]
    check(integrations, tmp_path, [(feature, layout) for layout in layouts], 2)


@for_each_feature(FEATURES_COMBINED, "trains with four ranks")
def test_combinations_of_axes_equal_one_process(feature: str, integrations: IntegrationProcess, tmp_path: Path) -> None:
    check(integrations, tmp_path, [(feature, layout) for layout in COMBINED], 4)


@pytest.mark.above_budget("may start the workers")
def test_what_cannot_be_exact_is_refused(integrations: IntegrationProcess, tmp_path: Path) -> None:
    first, second = integrations(2).run(uses.refusals, str(tmp_path))
    assert first == second
    expected = {
        "pipe": ("SFTTrainer.compute_loss with pipe=2", "set pipe=1"),
        "synchronized reference": ("DPOConfig(sync_ref_model=True)", "zero_stage=3", "Use zero_stage=2"),
        "vllm": ("GRPOConfig(use_vllm=True)", "full weights"),
        "generations": ("4 completions", "not divisible by 8 generations", "per_device_train_batch_size=4"),
        "packing": ("padding_free=True", "BloomForCausalLM", "packing=False"),
        "packing a sharded model": ("padding_free=True", "Pass the unsharded model"),
        "mixin of Trainer": ("ShardedTRLTrainer",),
        "head": ("trl_uses.compute_loss reads the weight of the LM head", "only a slice of it"),
        "distillation": ("trl.trainer.distillation_trainer", "reads the weight of the LM head"),
        "plain": ("sharded over", "shardformer.integrations.transformers.Trainer"),
        "plain evaluates": ("sharded over", "shardformer.integrations.transformers.Trainer"),
    }
    check_messages(first, expected)


@pytest.mark.above_budget("trains with two ranks and in one process")
def test_a_mean_over_the_tokens_of_the_batch_equals_one_process(
    integrations: IntegrationProcess, tmp_path: Path
) -> None:
    options = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}
    case = Case({"data": 2}, kind="dpo", rows="pairs", options=options)
    integrations(1).run(train_all, [case.plain], str(tmp_path))
    (measured,) = integrations(2).run(train_all, [case], str(tmp_path))[0]
    assert not find_values_above(BOUND, measured, set(measured), "DPO, tokens", case.layout)


@pytest.mark.above_budget("may start the workers")
def test_a_loss_that_compares_samples_is_reported_on_both_ranks(
    integrations: IntegrationProcess, tmp_path: Path
) -> None:
    first, second = integrations(2).run(uses.warnings_of_losses, str(tmp_path))
    assert first == second
    assert {name for name, texts in first.items() if texts} == {"aot", "aot_unpaired", "adapter"}
    assert all("not the mean of the losses of the 2 data-parallel ranks" in text for text in first["aot"])


@pytest.mark.full
@pytest.mark.above_budget("generates with four ranks")
def test_ranks_that_share_a_model_generate_the_same_completions(
    integrations: IntegrationProcess, tmp_path: Path
) -> None:
    layout = {"tensor": 2, "data": 2}
    completions = integrations(4).run(uses.completions_of_ranks, layout, str(tmp_path))
    by_data = [completions[:2], completions[2:]]
    assert all(first == second for first, second in by_data)
    assert by_data[0][0] != by_data[1][0]
