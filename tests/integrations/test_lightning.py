"""Lightning's Trainer trains a sharded model as one process trains the plain one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.process import IntegrationProcess
from tests.integrations.refusals import check_refusals
from tests.integrations.rows import record_difference

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "sequence parallel": {"tensor": 2, "sequence_parallel": True},
    "sequence": {"sequence": 2},
    "data": {"data": 2},
    "zero 1": {"data": 2, "zero_stage": 1},
    "zero 2": {"data": 2, "zero_stage": 2},
    "zero 3": {"data": 2, "zero_stage": 3},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate and clip": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "clip values": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}
COMBINED: list[dict[str, Any]] = [{"tensor": 2, "data": 2}, {"tensor": 2, "data": 2, "zero_stage": 3}]
COMBINED_OPTIONS = "accumulate and clip"


def call(name: str, *args: Any) -> Any:
    """Call a function of ``lightning_runs``, which only the workers can import."""
    return getattr(importlib.import_module("tests.integrations.lightning_runs"), name)(*args)


def assert_equal_runs(found: dict[str, Any], expected: dict[str, Any], bound: float = 2e-5) -> None:
    assert found["losses"] and found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, x in expected["weights"].items():
        assert float((found["weights"][name] - x).abs().max()) < bound, name


def record_run(feature: str, layout: dict[str, Any], found: dict[str, Any], expected: dict[str, Any]) -> None:
    losses = zip(found["losses"], expected["losses"], strict=True)
    loss = max(abs(a - b) / abs(b) for a, b in losses)
    weights = (
        float((found["weights"][name] - x).abs().max() / x.abs().max()) for name, x in expected["weights"].items()
    )
    record_difference("lightning", feature, layout, loss, max(weights))


@pytest.mark.reduced(layout=("tensor", "zero 2"), options=("accumulate and clip",))
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_one_process(integrations: IntegrationProcess, layout: str, options: str) -> None:
    for expected, found in integrations(2).run(call, "compare_with_one_process", LAYOUTS[layout], OPTIONS[options]):
        assert_equal_runs(found, expected)
        assert found["metrics"]["rows"] == expected["metrics"]["rows"] == 8.0
    record_run(options, LAYOUTS[layout], found, expected)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("layout", ["tensor", "zero 1"])
def test_precision_equals_one_process(integrations: IntegrationProcess, layout: str, precision: str) -> None:
    options = {"precision": precision, "gradient_clip_val": 0.1}
    for expected, found in integrations(2).run(call, "compare_with_one_process", LAYOUTS[layout], options):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6 if precision == "64-true" else 5e-3)
        assert {x.dtype for x in found["weights"].values()} == {x.dtype for x in expected["weights"].values()}


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_master_weights_learn_as_one_process(integrations: IntegrationProcess, precision: str) -> None:
    parallel = {"data": 2, "zero_stage": 1, "precision": precision}
    for expected, found in integrations(2).run(call, "compare_with_one_process", parallel, {"gradient_clip_val": 0.1}):
        assert found["losses"] == pytest.approx(expected["losses"], rel=5e-3)


@pytest.mark.full
@pytest.mark.parametrize("parallel", COMBINED)
def test_combined_layouts_equal_one_process(integrations: IntegrationProcess, parallel: dict[str, Any]) -> None:
    options = OPTIONS[COMBINED_OPTIONS]
    for expected, found in integrations(4).run(call, "compare_with_one_process", parallel, options):
        assert_equal_runs(found, expected)
    record_run(COMBINED_OPTIONS, parallel, found, expected)


@pytest.mark.full
@pytest.mark.parametrize("parallel", [{"tensor": 2, "data": 2}, {"tensor": 2}, {"data": 2, "zero_stage": 1}])
def test_metrics_count_data_parallel_ranks(integrations: IntegrationProcess, parallel: dict[str, Any]) -> None:
    ((expected, _, _),) = integrations(1).run(call, "fit_metrics", None)
    data = parallel.get("data", 1)
    ranks = data * parallel.get("tensor", 1)
    for found, gathered, decisions in integrations(ranks).run(call, "fit_metrics", parallel):
        assert_equal_runs(found, expected)
        assert found["metrics"]["large"] == expected["metrics"]["large"] > 0
        assert gathered == [data, 8 // data, 9]
        assert decisions == [False, True]


def test_a_skipped_batch_raises_on_data_ranks(integrations: IntegrationProcess) -> None:
    errors = integrations(2).run(call, "skip_batches")
    assert all(f"training_step returned None on data-parallel rank {rank}" in text for rank, text in enumerate(errors))


def test_a_checkpoint_resumes_under_another_layout(integrations: IntegrationProcess, tmp_path: Path) -> None:
    saved, folder = {"tensor": 2}, tmp_path / "last.ckpt"
    integrations(2).run(call, "save", folder, saved)
    resumed, *_ = integrations(2).run(call, "resume", folder, {"data": 2, "zero_stage": 1})
    (expected,) = integrations(1).run(call, "fit_two_epochs")
    resumed["losses"] = expected["losses"][:-4] + resumed["losses"]
    assert_equal_runs(resumed, expected)


@pytest.mark.full
@pytest.mark.parametrize("saved", [{"tensor": 2}, {"data": 2, "zero_stage": 2}])
def test_a_checkpoint_resumes_on_one_process(
    integrations: IntegrationProcess, tmp_path: Path, saved: dict[str, Any]
) -> None:
    folder = tmp_path / "last.ckpt"
    before, _ = integrations(2).run(call, "save", folder, saved)
    (expected,) = integrations(1).run(call, "fit_two_epochs")
    (resumed,) = integrations(1).run(call, "resume", folder, {})
    resumed["losses"] = expected["losses"][:-4] + resumed["losses"]
    assert_equal_runs(resumed, expected)
    (plain,) = integrations(1).run(call, "read_plain", folder)
    assert all(torch.equal(x, before["weights"][name]) for name, x in plain.items())


@pytest.mark.full
def test_a_checkpoint_of_the_plain_trainer_resumes(integrations: IntegrationProcess, tmp_path: Path) -> None:
    integrations(1).run(call, "save", tmp_path / "plain.ckpt", None)
    (expected,) = integrations(1).run(call, "fit_two_epochs")
    for parallel in ({"tensor": 2}, {"data": 2, "zero_stage": 1}):
        resumed, _ = integrations(2).run(call, "resume", tmp_path / "plain.ckpt", parallel)
        resumed["losses"] = expected["losses"][:-4] + resumed["losses"]
        assert_equal_runs(resumed, expected)


@pytest.mark.full
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"data": 2, "zero_stage": 2}])
def test_callbacks_keep_the_best_checkpoints(
    integrations: IntegrationProcess, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    names, _ = integrations(2).run(call, "saved_by_callback", tmp_path, parallel)
    assert names == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]


def test_unsupported_options_are_refused_before_training(integrations: IntegrationProcess) -> None:
    first, second = integrations(2).run(call, "refusals")
    assert first == second
    check_refusals("lightning", first)


@pytest.mark.full
@pytest.mark.parametrize(("parallel", "ranks"), [({"tensor": 2}, [0, 0]), ({"data": 2}, [0, 1])])
def test_workers_of_ranks_with_one_batch_have_one_seed(
    integrations: IntegrationProcess, parallel: dict[str, Any], ranks: list[int]
) -> None:
    assert integrations(2).run(call, "seed_of_workers", parallel) == ranks


@pytest.mark.full
def test_a_second_fit_continues_or_is_refused(integrations: IntegrationProcess) -> None:
    tensor, data, zero = {"tensor": 2}, {"data": 2}, {"data": 2, "zero_stage": 1}
    (expected,) = integrations(1).run(call, "fit_twice", None, None)
    for parallel in (tensor, data):
        for found in integrations(2).run(call, "fit_twice", parallel, parallel):
            assert found == pytest.approx(expected, rel=1e-6)
    for error in integrations(2).run(call, "fit_twice", tensor, data):
        assert "is sharded over" in error
    for error in integrations(2).run(call, "fit_twice", zero, zero):
        assert "This model was trained with ZeRO in an earlier call to fit" in error
