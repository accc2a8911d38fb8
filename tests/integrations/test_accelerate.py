"""An accelerate loop over a sharded model learns the same as with accelerate's own Accelerator in one process."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import accelerate_cases as cases
from tests.integrations.accelerate_cases import compiled_loop, helpers, losses_of_notebook, refusals, train_loops
from tests.integrations.comparisons import LAYOUTS, find_values_above, for_each_feature
from tests.integrations.process import ROOT, IntegrationProcess, environment
from tests.integrations.refusals import check_messages, check_refusals
from tests.integrations.rows import record_difference

pytestmark = pytest.mark.slow

BOUND = 1e-5
"""Largest relative difference of losses, norms and weights in fp32."""
BOUND_BF16 = 1e-2
FEATURES: dict[str, dict[str, Any]] = {
    "loop": {},
    "accumulate": {"accumulation": 2},
    "shuffled data": {"shuffle": True},
    "bf16": {"mixed_precision": "bf16"},
    "PEFT LoRA": {"adapter": "LoRA"},
    "PEFT prompt tuning": {"adapter": "prompt tuning"},
}
SAMPLE = [
    ("accumulate", {"tensor": 2}),
    ("shuffled data", {"data": 2, "zero_stage": 1}),
    ("PEFT LoRA", {"tensor": 2}),
    ("PEFT prompt tuning", {"data": 2, "zero_stage": 3}),
]


def check(integrations: IntegrationProcess, root: Path, chosen: list[tuple[str, dict[str, Any]]]) -> None:
    cases = [{"layout": layout, "folder": str(root), **FEATURES[feature]} for feature, layout in chosen]
    used = dict.fromkeys(feature for feature, _ in chosen)
    plain = [{"layout": {}, "folder": str(root), **FEATURES[feature]} for feature in used]
    integrations(1).run(train_loops, plain)
    problems: list[str] = []
    for (feature, layout), found in zip(chosen, integrations(2).run(train_loops, cases)[0], strict=True):
        record_difference("accelerate", feature, layout, found["loss"], found["grad_norm"], "resumed")
        rounds = feature == "bf16"
        compared = {"loss", "grad_norm", "rates", "resumed"} if rounds else set(found)
        problems += find_values_above(BOUND_BF16 if rounds else BOUND, found, compared, feature, layout)
    assert not problems


@pytest.mark.above_budget("trains models with two ranks and in one process, and resumes each twice")
def test_losses_norms_predictions_and_resumed_loops_equal_one_process(
    integrations: IntegrationProcess, tmp_path: Path
) -> None:
    check(integrations, tmp_path, SAMPLE)


@pytest.mark.above_budget("may start the workers")
def test_misuse_is_reported_on_both_ranks(integrations: IntegrationProcess, tmp_path: Path) -> None:
    first, second = integrations(2).run(cases.misuses, str(tmp_path))
    assert first == second
    expected = {
        "two optimizers": ("zero_stage=1", "one optimizer per model", "but got 2"),
        "joint optimizer": ("zero_stage=1", "SGD optimizer has parameters of several models", "for each model"),
        "reduction": ("reduction='min'", "mean"),
        "load before prepare": ("contains 1 models, but prepare received 0", "the same models to prepare"),
    }
    check_messages(first, expected)


@pytest.mark.above_budget("may start the workers")
def test_zero_also_shards_an_optimizer_that_is_prepared_after_its_model(integrations: IntegrationProcess) -> None:
    assert integrations(2).run(cases.optimizer_prepared_after_model) == ["ZeroOptimizer"] * 2


@pytest.mark.above_budget("trains two models in one process and with two ranks")
def test_one_optimizer_trains_two_models(integrations: IntegrationProcess, tmp_path: Path) -> None:
    (plain,) = integrations(1).run(cases.train_with_joint_optimizer, {}, str(tmp_path / "plain"))
    for number, layout in enumerate(({"tensor": 2}, {"data": 2})):
        for found in integrations(2).run(cases.train_with_joint_optimizer, layout, str(tmp_path / str(number))):
            assert found == pytest.approx(plain, rel=BOUND)


@for_each_feature(FEATURES, "trains under all layouts")
def test_every_feature_equals_one_process_under_every_layout(
    feature: str, integrations: IntegrationProcess, tmp_path: Path
) -> None:
    check(integrations, tmp_path, [(feature, layout) for layout in LAYOUTS])


@pytest.mark.above_budget("may start the workers")
@pytest.mark.parametrize("layout", [{"tensor": 2}, pytest.param({"data": 2, "zero_stage": 3}, marks=pytest.mark.full)])
def test_a_dynamo_backend_compiles_the_layers(integrations: IntegrationProcess, layout: dict[str, Any]) -> None:
    for difference, kind, graphs in integrations(2).run(compiled_loop, layout):
        assert difference < BOUND
        assert kind == "LlamaForCausalLM"  # without a wrapper
        assert graphs == [1]


@pytest.mark.above_budget("may start the workers")
def test_other_backends_and_plain_accelerators_are_refused(integrations: IntegrationProcess) -> None:
    first, second = integrations(2).run(refusals)
    assert first == second
    check_refusals("accelerate", first)


@pytest.mark.full
@pytest.mark.above_budget("starts a notebook and two processes")
def test_notebook_launcher_starts_the_ranks(integrations: IntegrationProcess, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = tmp_path / "losses.json"
    command = [sys.executable, "-m", "tests.integrations.notebook", str(file), str(port)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=300)
    found = json.loads(file.read_text())
    assert found["world_size"] == 2
    (expected,) = integrations(1).run(losses_of_notebook)
    assert found["losses"] == pytest.approx(expected, rel=BOUND)


@pytest.mark.above_budget("may start the workers")
def test_processes_are_counted_as_data_ranks(integrations: IntegrationProcess) -> None:
    tensor = integrations(2).run(helpers, {"tensor": 2})
    data = integrations(2).run(helpers, {"data": 2})
    assert [rank["num_processes"] for rank in tensor] == [1, 1] and [rank["num_processes"] for rank in data] == [2, 2]
    assert [rank["is_main"] for rank in tensor] == [rank["is_main"] for rank in data] == [True, False]
    assert [rank["is_last"] for rank in tensor] == [rank["is_last"] for rank in data] == [False, True]
    assert [rank["split"] for rank in tensor] == [["a", "b", "c"]] * 2
    assert [rank["split"] for rank in data] == [["a", "b"], ["c"]]
    for order in ("order", "weighted"):
        assert tensor[0][order] == tensor[1][order]  # although the ranks have different random states
        assert not set(data[0][order]) & set(data[1][order])
    assert [rank["steps"] for rank in tensor] == [1, 1] and [rank["steps"] for rank in data] == [2, 2]
    assert tensor[0]["reduced"] == [3.0, 3.0, 3.0] and data[0]["reduced"] == [4.0, 2.0, 3.0]
    assert [rank["triggered"] for rank in tensor + data] == [[True, False]] * 4  # by the first of all processes
