"""A PEFT model trains on every layout as in one process, and its files are the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.integrations import peft_runs as runs
from tests.integrations.peft_models import LAYOUTS, METHODS, MODELS, model_of
from tests.integrations.process import IntegrationProcess
from tests.integrations.refusals import check_refusals
from tests.integrations.rows import Row, record

BOUND = 5e-6
"""The models are in fp64, but transformers computes norms, softmax and the loss in fp32."""
PIPELINE = ("pipeline", "sequence parallel and pipeline")
REFUSED = {
    (feature, layout) for feature in ("AdaLoRA", "prompt tuning", "p-tuning", "prefix tuning") for layout in PIPELINE
} | {("LoHa", "compiled"), ("LoKr", "compiled")}  # which branch on values of tensors
UNEQUAL_DROPOUT = {"data", "ZeRO 1", "ZeRO 2", "ZeRO 3", "ZeRO 3, frozen base gathered", "tensor and ZeRO 2", *PIPELINE}
"""Layouts in which each data rank or micro-batch draws its own dropout, as for dropout of the model."""
MATRIX = [
    (feature, layout)
    for feature in METHODS
    for layout in LAYOUTS
    if not ("dropout" in feature and layout in UNEQUAL_DROPOUT)
    if (feature, layout) != ("prefix tuning", "checkpointing")  # PEFT does not support it
]
SAMPLE = [
    ("LoRA, dropout", "checkpointing", "llama", "before"),
    ("LoRA", "tensor and ZeRO 2", "llama", "before"),
    ("LoRA", "ZeRO 3", "gpt2", "after"),
    ("DoRA, dropout", "sequence parallel", "llama", "after"),
    ("modules_to_save", "sequence parallel and pipeline", "llama", "before"),
    ("IA3", "tensor", "llama", "after"),
    ("LoRA", "sequence parallel", "gptj", "before"),
]
LATE_PIPELINE = ("pipeline", "after")
"""The comparison fills adapters after sharding, which a pipeline stage cannot do."""
FEATURES_WITH_FILES = [name for name in METHODS if "tuning" not in name]
OTHER_MODELS = [name for name in MODELS if name != "llama"]


def check(
    process: IntegrationProcess, cases: Sequence[tuple[str, str, str, str]], steps: int = runs.STEPS
) -> list[runs.Difference | str]:
    found: list[runs.Difference | str] = process(1).run(runs.compare_all, list(cases), steps)[0]
    for (feature, layout, model, order), result in zip(cases, found, strict=True):
        name = f"{feature}, {model}, {layout}, {order}"
        if (feature, layout) in REFUSED:
            assert isinstance(result, str), f"{name} is not refused"
            continue
        assert not isinstance(result, str), f"{name}: {result}"
        assert result.worst < BOUND, f"{name}: {result}"
    return found


@pytest.mark.above_budget("covers the methods and layouts in seven runs")
def test_training_equals_one_process(integrations: IntegrationProcess) -> None:
    check(integrations, SAMPLE, steps=2)


@pytest.mark.full
@pytest.mark.parametrize(("feature", "layout"), MATRIX)
def test_every_method_trains_on_every_layout(integrations: IntegrationProcess, feature: str, layout: str) -> None:
    (result,) = check(integrations, [(feature, layout, model_of(feature), "before")])
    release = integrations(1).run(runs.release)[0]
    if isinstance(result, str):
        record(Row("peft", release, feature, layout, note=result.partition(". ")[0]))
    else:
        record(Row("peft", release, feature, layout, result.loss, result.gradients or result.weights))


@pytest.mark.full
@pytest.mark.parametrize("model", OTHER_MODELS)
@pytest.mark.parametrize("order", ["before", "after"])
def test_lora_trains_on_other_models(integrations: IntegrationProcess, model: str, order: str) -> None:
    layouts = [name for name in ("tensor", "sequence parallel", "pipeline", "ZeRO 3") if (name, order) != LATE_PIPELINE]
    if model == "convnext":  # its convolutions need the whole image
        layouts.remove("sequence parallel")
    check(integrations, [("LoRA", layout, model, order) for layout in layouts])


@pytest.mark.full
@pytest.mark.parametrize("feature", METHODS)
def test_adapters_can_be_added_after_sharding(integrations: IntegrationProcess, feature: str) -> None:
    check(integrations, [(feature, layout, model_of(feature), "after") for layout in ("tensor", "sequence parallel")])


def test_files_are_those_of_one_process(integrations: IntegrationProcess) -> None:
    cases = [
        ("DoRA", "tensor", "llama"),
        ("LoRA", "sequence parallel and pipeline", "llama"),
        ("modules_to_save", "tensor", "gemma"),
    ]
    for feature, layout, model in cases:
        found = integrations(1).run(runs.files_named, feature, layout, model)[0]
        assert max(found.values()) < BOUND, (feature, layout, found)
        assert found["adapter file"] == found["config"] == found["loaded in one process"] == 0.0


@pytest.mark.full
def test_adapters_of_a_model_without_token_embeddings_are_saved(integrations: IntegrationProcess) -> None:
    found = integrations(1).run(runs.files_named, "LoRA", "tensor", "convnext")[0]
    assert max(found.values()) < BOUND, found


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tensor", "sequence parallel", "data"])
@pytest.mark.parametrize("feature", FEATURES_WITH_FILES)
def test_files_of_every_method(integrations: IntegrationProcess, feature: str, layout: str) -> None:
    found = integrations(1).run(runs.files_named, feature, layout, model_of(feature))[0]
    assert max(found.values()) < BOUND, found
    assert found["adapter file"] == found["config"] == found["loaded in one process"] == 0.0
    release = integrations(1).run(runs.release)[0]
    record(Row("peft", release, feature, layout, files=max(found.values())))


def test_adapters_are_added_switched_merged_and_deleted(integrations: IntegrationProcess) -> None:
    plain = integrations(1).run(runs.switch_adapters, None)[0]
    sharded = integrations(1).run(runs.switch_adapters, LAYOUTS["sequence parallel"])[0]
    assert max(abs(a - b) for a, b in zip(plain, sharded, strict=True)) < BOUND


def test_an_adapter_with_the_name_of_a_module_can_be_deleted(integrations: IntegrationProcess) -> None:
    before, after = integrations(1).run(runs.names_after_deletion)[0]
    assert before == after


def test_trained_tokens_equal_one_process_under_zero_3(integrations: IntegrationProcess) -> None:
    found = integrations(1).run(runs.compare_trained_tokens)[0]
    assert found.worst < BOUND, found


def test_norms_of_a_sharded_model_are_copied_without_the_model(integrations: IntegrationProcess) -> None:
    found = integrations(1).run(runs.compare_saved_norms)[
        0
    ]  # takes minutes if the copies follow the hooks of the norms
    assert found.worst < BOUND, found


def test_a_hook_of_the_user_on_a_copied_module_runs_once(integrations: IntegrationProcess) -> None:
    plain, before, after = (integrations(1).run(runs.loss_with_hook, order)[0] for order in (None, "before", "after"))
    assert before == pytest.approx(plain, rel=1e-6) and after == pytest.approx(plain, rel=1e-6)


def test_adapters_that_differ_between_ranks_raise(integrations: IntegrationProcess) -> None:
    shape, scale = integrations(1).run(runs.errors_of_different_adapters)[0]
    assert "q_proj lora_A.default" in shape and "out_features=3" in shape
    assert "q_proj scaling={'default': 2.0}" in scale and "rank 1" in scale


def test_adapters_add_no_collective_to_a_block(integrations: IntegrationProcess) -> None:
    for layout, kinds in (("tensor", ["all_reduce"]), ("sequence parallel", ["all_gather", "reduce_scatter"])):
        full, adapted = integrations(1).run(runs.block_collectives, "LoRA, dropout", layout)[0]
        for kind in kinds:  # one less: the input of the first layer needs no gradient
            assert adapted.pop(f"{kind} block") == full.pop(f"{kind} block") - 1
        assert adapted.pop("all_reduce gradients") == 1
        full.pop("all_reduce gradients", None)
        assert adapted == full


def test_dora_adds_one_small_collective_per_row_parallel_linear(integrations: IntegrationProcess) -> None:
    _, adapted = integrations(1).run(runs.block_collectives, "DoRA", "tensor")[0]
    assert adapted["all_reduce adapter"] == 4  # o_proj and down_proj of two layers


def test_an_engine_trains_and_resumes_adapters(integrations: IntegrationProcess, tmp_path: object) -> None:
    cases: list[tuple[int | None, dict[str, int]]] = [(2, {"tensor": 2, "data": 2})]
    for number, (zero, sizes) in enumerate(cases):
        found = integrations(1).run(runs.train_engine, zero, f"{tmp_path}/{number}", sizes)[0]
        assert max(found.values()) < BOUND, (zero, sizes, found)


@pytest.mark.full
@pytest.mark.parametrize(
    ("zero", "sizes"), [(None, {"pipe": 2}), (1, {"pipe": 2, "data": 2}), (3, {"data": 2}), (None, {"sequence": 2})]
)
def test_an_engine_trains_and_resumes_on_every_layout(
    integrations: IntegrationProcess, tmp_path: object, zero: int | None, sizes: dict[str, int]
) -> None:
    found = integrations(1).run(runs.train_engine, zero, str(tmp_path), sizes)[0]
    assert max(found.values()) < BOUND, found


def test_ranks_drop_the_same_elements(integrations: IntegrationProcess) -> None:
    first, second = integrations(1).run(runs.dropout_masks)[0]
    assert first == second and 0 < sum(first) < len(first)


@pytest.mark.full
def test_pissa_and_bf16_train_as_in_one_process(integrations: IntegrationProcess) -> None:
    found = integrations(1).run(runs.precision_differences)[0]
    assert found["PiSSA before"].worst < BOUND and found["PiSSA after"].worst < BOUND, found
    assert found["bf16"].loss < 2e-3 and found["bf16"].weights < 0.05, found["bf16"]  # rounding to 8 bits


@pytest.mark.full
def test_an_engine_with_adapters_changes_its_layout(integrations: IntegrationProcess) -> None:
    assert max(integrations(1).run(runs.reshard_engine)[0]) < BOUND


@pytest.mark.full
def test_an_adapted_model_can_be_built_lazily(integrations: IntegrationProcess) -> None:
    assert integrations(1).run(runs.lazy_difference)[0] == 0.0


@pytest.mark.full
@pytest.mark.parametrize("order", ["before", "after"])
def test_adapters_without_the_wrapper_of_peft_train_as_in_one_process(
    integrations: IntegrationProcess, order: str
) -> None:
    plain = integrations(1).run(runs.injected_adapters, None)[0]
    sharded = integrations(1).run(runs.injected_adapters, {"tensor": 2}, order)[0]
    assert max(abs(a - b) for a, b in zip(plain, sharded, strict=True)) < BOUND


def test_what_cannot_work_is_refused_before_training(integrations: IntegrationProcess) -> None:
    check_refusals("peft", integrations(1).run(runs.refusals)[0])
