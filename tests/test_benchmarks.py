"""Every benchmark runs in its smallest setting and prints its results."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardformer.discovery.derive_policy import PolicyDerivationError
from shardformer.local_ranks.worker_pool import WorkerPool
from tests.pools import WorkerPools

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
TINY = ["--repetitions", "1", "--layers", "1", "--vocabulary", "64", "--batch", "1"]

Run = Callable[..., str]


@pytest.fixture
def run(pool2: WorkerPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """``run(script, *options)`` returns the output of a benchmark, which uses the session's workers."""
    monkeypatch.syspath_prepend(str(FOLDER))
    common = importlib.import_module("common")
    monkeypatch.setattr(common, "two_processes", lambda threads: nullcontext(pool2))

    def run(script: str, *options: str) -> str:
        assert importlib.import_module(script).main([*options]) == 0
        return capsys.readouterr().out

    yield run


def rows(printed: str) -> dict[str, list[str]]:
    """Return the lines of a printed table by their first column, which ends with two spaces."""
    cells = [line.split("  ") for line in printed.splitlines() if "  " in line]
    return {first: [c.strip() for c in rest if c.strip()] for first, *rest in cells}


@pytest.mark.full
def test_tensor_parallel_compares_all_variants_and_counts_what_they_communicate(run: Run) -> None:
    table = rows(run("tensor_parallel", *TINY, "--hidden", "32", "--sequence", "8"))
    variants = importlib.import_module("tensor_parallel").VARIANTS
    assert set(variants) <= set(table)
    assert table["one process"][1:] == ["1.00", table["one process"][2], "-", "-"]
    # the embedding, two exits, two entries, the entry of the head, and the loss
    assert table["ShardFormer"][3] == "7 (1 the loss's)"
    count = {name: int(table[name][3].split()[0]) for name in variants if name != "one process"}
    assert count["ShardFormer"] == min(count.values())
    assert count["torch parallelize_module"] == count["transformers' plan"] > count["torch, best plan"]
    megabytes = {name: float(table[name][4]) for name in count}
    assert megabytes["ShardFormer"] == min(megabytes.values())


def test_context_length_prints_and_plots_a_row_per_length(run: Run, tmp_path: Path) -> None:
    options = [*TINY, "--heads", "2", "--intermediate", "16", "--n-ctx", "8", "16", "--png", str(tmp_path / "c.png")]
    table = rows(run("context_length", *options))
    assert {"8", "16"} <= set(table)
    assert float(table["16"][2]) > 0
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_overlap_compares_each_way_with_and_without(run: Run) -> None:
    size = ["--hidden", "32", "--intermediate", "16", "--heads", "2"]
    table = rows(run("overlap", *TINY[:-2], *size, "--shapes", "1x8"))
    options = importlib.import_module("overlap").OPTIONS
    assert set(options) <= set(table)
    assert table["blocks, waiting"][1] == "-" != table["blocks"][1]


@pytest.mark.full
@pytest.mark.above_budget("both processes trace a layer")
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*should not be instantiated")
def test_compile_has_a_row_for_each_variant_and_reports_the_graphs(run: Run) -> None:
    size = ["--hidden", "32", "--sequence", "8", "--layouts", "tensor", "--backend", "aot_eager"]
    printed = run("compile", *TINY, *size)
    assert {"eager", "compile=True"} <= set(rows(printed))
    assert "Compiled with aot_eager: 1 layer of model.layers, 1 graph, no graph break." in printed


def test_fused_has_a_row_for_each_option_and_the_same_losses(run: Run) -> None:
    table = rows(run("fused", *TINY, "--families", "llama", "--hidden", "32", "--heads", "2", "--sequence", "8"))
    assert set(importlib.import_module("fused").OPTIONS) <= set(table)
    assert float(table["all three"][2]) < 1e-4


@pytest.mark.full
def test_wire_bytes_counts_what_the_recorder_and_the_kernel_see() -> None:
    size = ["--hidden", "32", "--intermediate", "16", "--heads", "2", "--layers", "1", "--vocabulary", "64"]
    command = [sys.executable, str(FOLDER / "wire_bytes.py"), *size, "--batch", "2", "--sequence", "16", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)["results"]
    assert results["recorded"]["all_reduce tensor block"] == [6, 6 * 2 * (2 * 16 * 32) * 4]
    if results["loopback"] is not None:
        recorded = sum(wire_bytes for _, wire_bytes in results["recorded"].values())
        assert results["loopback"][0] > recorded


@pytest.mark.full
def test_lazy_init_compares_the_peaks_of_the_same_weights(
    run: Run, pools: WorkerPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = importlib.import_module("lazy_init")
    monkeypatch.setattr(script, "run_apart", lambda num, threads, fn, *args: pools(num).run(fn, *args))
    size = [
        "--hidden",
        "64",
        "--intermediate",
        "128",
        "--heads",
        "8",
        *TINY[2:6],
        "--tensor",
        "1",
        "2",
        "--allow",
        "1e9",
    ]
    printed = run("lazy_init", *size)
    assert "same weights in all variants: yes" in printed
    assert all(f"{tensor}  {variant}" in printed for tensor in (1, 2) for variant in script.VARIANTS)


@pytest.mark.full
def test_pipeline_compares_with_torch_and_measures_bubble_memory_and_bytes(
    run: Run, pools: WorkerPools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.import_module("common"), "processes", lambda num, threads: nullcontext(pools(num)))
    size = ["--hidden", "32", "--sequence", "8", "--layers", "4", "--vocabulary", "64", "--repetitions", "1"]
    few = [*size, "--batch", "4", "--micro-batches", "2", "--schedules", "1f1b", "zbv", "--stages", "1", "2"]
    printed = run("pipeline", *few, "--png", str(tmp_path / "t.png"))
    table = rows(printed)
    assert {"1f1b (2, 2)", "zbv (1, 1, 1, 1)"} <= {name.strip() for name in table}
    assert "stored micro-batches equal to the schedule: yes" in printed
    assert "equal to the formula: yes" in printed
    assert {"1: 0", "2: 0", "2: 1"} <= {name.strip() for name in table}
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_different_losses_are_detected(run: Run) -> None:
    common = importlib.import_module("common")
    timings = {
        "reference": common.Timing([1.0], [2.0, 4.0]),
        "same": common.Timing([1.0], [2.0, 4.0]),
        "other": common.Timing([1.0], [2.0, 4.1]),
    }
    name, difference = common.largest_difference(timings, "reference")
    assert (name, round(difference, 6)) == ("other", 0.025)


@pytest.mark.full
def test_coverage_reports_the_sharded_fraction_and_kind_of_an_architecture(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "coverage.jsonl"
    run("coverage", "--out", str(out), "--only", "olmo2|fnet|mpnet")
    found = {line["type"]: line for line in map(json.loads, out.read_text(encoding="utf-8").splitlines())}
    assert found["olmo2"]["share"] == 1 and found["olmo2"]["proven"] and found["olmo2"]["kind"] == "attention and MLP"
    assert found["fnet"]["kind"] == "no softmax attention"
    coverage_page = importlib.import_module("coverage_page")
    stages = {
        "olmo2": {"type": "olmo2", "passed": True, "said": "PASS: Largest difference 1e-15"},
        "mpnet": {
            "type": "mpnet",
            "passed": False,
            "said": "M does not support pipeline parallelism (pipe=2): it differs",
        },
    }
    page = coverage_page.page([coverage_page.Record(**line) for line in found.values()], [], stages)
    assert "| attention and MLP | 2 | 2 | 2 (100%) |" in page
    assert "| attention and MLP | 2 | 1 (50%) |" in page
    assert "| mpnet | it differs |" in page
    error = PolicyDerivationError("No policy could be derived: no layers.", remedy="Write a policy.")
    error.reason = "no layers"
    assert importlib.import_module("coverage").short(error) == "no layers"


@pytest.mark.parametrize(
    ("text", "passed", "line"),
    [
        ("\nFAIL: losses differ. Largest difference 2.0e-03 in losses, at step 2.", False, "FAIL: losses differ."),
        ("\nPASS: Largest difference 1.0e-16 in losses.", True, "PASS: Largest difference 1.0e-16 in losses."),
    ],
)
def test_coverage_records_verdicts_without_numbers_that_change(
    text: str, passed: bool, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))

    class Result:
        def __init__(self) -> None:
            self.passed = passed

        def __str__(self) -> str:
            return text

    assert importlib.import_module("coverage").verdict_of(Result()) == line


@pytest.mark.full
def test_coverage_compares_an_architecture_over_stages(
    run: Run, pool2: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = importlib.import_module("coverage_stages")
    monkeypatch.setattr(stages, "WorkerPool", lambda *_, **__: nullcontext(pool2))
    monkeypatch.setattr(stages, "verify", partial(stages.verify, steps=1))
    out = tmp_path / "stages.jsonl"
    run("coverage_stages", "--out", str(out), "--only", "olmo2|xlm")
    found = {line["type"]: line for line in map(json.loads, out.read_text(encoding="utf-8").splitlines())}
    assert found["olmo2"]["passed"]
    assert not found["xlm"]["passed"] and "only on another pipeline stage" in found["xlm"]["said"]


@pytest.mark.full
def test_coverage_compares_an_architecture_over_other_layouts(
    run: Run, pool2: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts, coverage_page = (importlib.import_module(name) for name in ("coverage_layouts", "coverage_page"))
    monkeypatch.setattr(layouts, "WorkerPool", lambda *_, **__: nullcontext(pool2))
    monkeypatch.setattr(layouts, "verify", partial(layouts.verify, steps=1))
    out = tmp_path / "layouts.jsonl"
    run("coverage_layouts", "--out", str(out), "--only", "olmo2|xlm", "--layout", "context")
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [line["passed"] for line in found] == [True, None] and "its own attention" in found[1]["said"]
    records = [coverage_page.Record(name, name, "sharded", share=1.0, proven=True) for name in ("olmo2", "xlm")]
    page = coverage_page.page(records, [], {}, found)
    assert "| sequence 2 (context parallel) | 1 of 2 (50%), 1, 0 |" in page


def is_ever_below(bound: float, measure: Callable[[], float]) -> bool:
    """Return whether one of five measurements is below a limit. The loopback device counts other traffic, too."""
    return any(measure() < bound for _ in range(5))


def test_context_parallel_is_compared_with_torchs_ring(
    run: Run, pool2: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("common"), "processes", lambda *_: nullcontext(pool2))
    small = ["--lengths", "64", "--ranks", "1", "2", "--repetitions", "1"]

    def share_of_torchs_bytes() -> float:
        table = rows(run("context_parallel", "--attention", *small))
        assert {"ring", "ulysses", "gather", "torch all-gather", "torch all-to-all"} <= set(table)
        return float(table["ring"][3])

    assert is_ever_below(0.6, share_of_torchs_bytes)


def test_tensor_grids_print_the_traffic_by_formula(run: Run) -> None:
    table = rows(run("tensor_grids", "--formula", "8"))
    assert float(table["8 ranks, 65536 tokens"][-1]) < 0.3 and float(table["8 ranks, 4096 tokens"][-1]) > 1


@pytest.mark.full
def test_zero_compares_the_traffic_of_each_stage_with_torch(run: Run) -> None:
    options = ["--layers", "2", "--hidden", "64", "--sequence", "8", "--vocabulary", "512", "--batch", "1"]

    def share_of_torchs_bytes() -> float:
        table = rows(run("zero", *options, "--repetitions", "1", "--variants", "DDP", "ShardFormer"))
        assert len([name for name in table if name.startswith("ShardFormer")]) == 5
        is_number = {name: bool(cells) and cells[-1].replace(".", "").isdigit() for name, cells in table.items()}
        sent = {name: float(table[name][-1]) for name, known in is_number.items() if known}
        if not sent:  # the system does not count the bytes on its loopback device
            return 0.0
        return sent["ShardFormer stage 2"] / sent["DDP + ZeroRedundancyOptimizer"]

    assert is_ever_below(0.9, share_of_torchs_bytes)


@pytest.mark.full
def test_offload_is_timed_and_plotted(run: Run, tmp_path: Path) -> None:
    small = ["--layers", "2", "--hidden", "64", "--sequence", "8", "--vocabulary", "512", "--batch", "1"]
    table = rows(run("offload", *small, "--repetitions", "1", "--folder", str(tmp_path)))
    assert {"on the device", "on the host", "in files"} <= set(table)
    run("offload", *small, "--timeline", str(tmp_path / "timeline.png"))
    run("offload", "--memory", str(tmp_path / "memory.png"))
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("timeline.png", "memory.png"))
    assert rows(run("offload", "--largest", "80"))["stage 0"][0] == "5.0"


def test_offloaded_activations_use_less_device_memory_with_the_same_losses(run: Run) -> None:
    options = ["--repetitions", "1", "--layers", "2", "--vocabulary", "64", "--batch", "8"]
    table = rows(run("activations", *options, "--hidden", "64", "--sequence", "64"))
    on_device = {name: float(table[name][0]) for name in importlib.import_module("activations").VARIANTS}
    assert on_device["all, on the host"] < 0.5 * on_device["all kept"]
    assert on_device["checkpoints, in parts"] < on_device["checkpoints"] < on_device["all kept"]


@pytest.mark.full
def test_checkpoints_are_compared_with_torch_save(run: Run) -> None:
    small = ["--layers", "1", "--hidden", "64", "--vocabulary", "64", "--repetitions", "1"]
    for how in ([], ["--zero", "2"]):
        table = rows(run("checkpoints", *small, *how))
        assert {"torch.save", "save_checkpoint", "load_checkpoint"} <= set(table)


def test_engine_is_compared_with_a_plain_loop_in_every_layout(run: Run) -> None:
    table = rows(run("engine", *TINY, "--layers", "2", "--batch", "2", "--hidden", "32", "--sequence", "8"))
    layouts = importlib.import_module("engine").LAYOUTS
    assert {f"{name}, {kind}" for name in layouts for kind in ("bare loop", "engine")} < set(table)
    assert "one process, plain PyTorch" in table
    assert all(float(table[f"{name}, bare loop"][1]) == 1 for name in layouts)
