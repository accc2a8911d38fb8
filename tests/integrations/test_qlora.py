"""Adapters train on quantized weights of bitsandbytes (QLoRA) in every layout as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations import qlora_runs as runs
from tests.integrations.peft_models import LAYOUTS
from tests.integrations.process import IntegrationProcess
from tests.integrations.refusals import check_refusals
from tests.integrations.rows import Row, record

BOUND = 1e-5
"""Largest relative difference in fp32."""
FEATURES = {
    "LoRA, nf4": ("nf4", "LoRA"),
    "LoRA, nf4, double quantization": ("nf4, double quantization", "LoRA"),
    "LoRA on attention, nf4 stored in bf16": ("nf4 in bf16", "LoRA on attention"),
    "LoRA, fp4": ("fp4", "LoRA"),
    "DoRA, nf4": ("nf4", "DoRA"),
    "LoRA, int8": ("int8", "LoRA"),
}
MATRIX = [
    (feature, layout) for feature in FEATURES for layout in LAYOUTS if layout not in ("tensor, 4 ranks", "compiled")
]
REFUSED = {
    (feature, layout)
    for feature, layout in MATRIX
    if FEATURES[feature][0] == "int8" and {"tensor", "sequence"} & LAYOUTS[layout].sizes.keys()
}
SAMPLE: list[tuple[str, ...]] = [
    ("nf4, double quantization", "LoRA", "sequence parallel", "before"),
    ("nf4 in bf16", "LoRA on attention", "ZeRO 3", "before"),
]
AFTER = ["tensor", "sequence parallel", "ZeRO 3", "context"]
"""Layouts in which adapters are added to a sharded model."""


def check(process: IntegrationProcess, cases: list[tuple[str, ...]]) -> list[runs.Difference]:
    found = process(1).run(runs.compare_all, cases)[0]
    for case, result in zip(cases, found, strict=True):
        assert not isinstance(result, str), f"{case}: {result}"
        assert result.worst < BOUND, f"{case}: {result}"
    return list(found)


@pytest.mark.above_budget("loads quantized models in one process and on two layouts")
def test_training_equals_one_process(integrations: IntegrationProcess) -> None:
    check(integrations, SAMPLE)


def test_a_slice_has_the_values_of_the_full_weight(integrations: IntegrationProcess) -> None:
    found = integrations(1).run(runs.slices_of_a_weight)[0]
    assert found and all(found.values()), found


@pytest.mark.full
@pytest.mark.parametrize(("feature", "layout"), MATRIX)
def test_every_quantizer_trains_on_every_layout(integrations: IntegrationProcess, feature: str, layout: str) -> None:
    case = (*FEATURES[feature], layout, "before")
    release = integrations(1).run(runs.release)[0]
    if (feature, layout) in REFUSED:
        (error,) = integrations(1).run(runs.compare_all, [case])[0]
        assert "is a quantized Linear8bitLt" in error
        record(Row("bitsandbytes", release, feature, layout, note=error.partition(". ")[0]))
        return
    (result,) = check(integrations, [case])
    record(Row("bitsandbytes", release, feature, layout, result.loss, result.gradients or result.weights))


@pytest.mark.full
@pytest.mark.parametrize("layout", AFTER)
def test_adapters_can_be_added_after_sharding(integrations: IntegrationProcess, layout: str) -> None:
    check(integrations, [("nf4, double quantization", "LoRA", layout, "after")])


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tensor", "sequence parallel", "pipeline"])
def test_layers_with_biases_and_fused_projections(integrations: IntegrationProcess, layout: str) -> None:
    check(integrations, [("nf4, double quantization", "LoRA", layout, "before", "gpt2")])


@pytest.mark.full
def test_compiled_layers_multiply_quantized_weights(integrations: IntegrationProcess) -> None:
    check(integrations, [("nf4", "LoRA", "compiled", "before")])


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tensor", "sequence parallel", "data", "ZeRO 2"])
def test_files_are_those_of_one_process(integrations: IntegrationProcess, layout: str, tmp_path: Path) -> None:
    found = integrations(1).run(runs.file_differences, layout, str(tmp_path))[0]
    assert found["adapter file"] == found["config"] == found["trainable"] == found["parameters"] == 0.0, found
    assert max(found.values()) < BOUND, found
    assert ("merged" in found) == ("tensor" not in LAYOUTS[layout].sizes)


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"data": 2, "zero_stage": 3}, {"tensor": 2}),
        ({"tensor": 2, "data": 2, "zero_stage": 1}, {"pipe": 2}),
        ({"pipe": 2}, {"data": 2, "zero_stage": 2}),
    ],
)
def test_a_checkpoint_resumes_under_another_layout(
    integrations: IntegrationProcess, tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    found = integrations(1).run(runs.train_engine, first, second, str(tmp_path / "checkpoint"))[0]
    assert max(found.values()) < BOUND, found


@pytest.mark.full
@pytest.mark.parametrize("layout", ["data", "ZeRO 2", "ZeRO 3", "pipeline"])
@pytest.mark.parametrize("kind", ["subclass", "buffers"])
def test_another_quantizer_is_replicated(integrations: IntegrationProcess, kind: str, layout: str) -> None:
    assert integrations(1).run(runs.other_quantizer, kind, layout)[0].worst < BOUND


@pytest.mark.full
def test_what_cannot_work_is_refused_before_training(integrations: IntegrationProcess) -> None:
    check_refusals("bitsandbytes", integrations(1).run(runs.refusals)[0])
