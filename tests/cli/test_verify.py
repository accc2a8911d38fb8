"""``shardformer verify``: exit status, table and JSON for each form of MODEL."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardformer.cli import main
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.verify.small_models import HEAD_CLASSES, SmallModelFactory
from tests.pools import WorkerPools
from tests.scripts import SHARDFORMER

pytestmark = pytest.mark.slow

Run = Callable[..., tuple[int, str, str]]

FORGETFUL = """
from shardformer.mesh.parallel_context import Axis
from shardformer.tensor_parallel.layers import Linear1D_Row
from shardformer.policies.families import GPT2Policy
from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory

class Forgetful(GPT2Policy):
    def postprocess(self):
        rows = [module for module in self.model.modules() if isinstance(module, Linear1D_Row)]
        rows[-1].block, rows[-1].axis = None, Axis("tensor")  # it believes to be alone, and leaves its all-reduce out

def forgetful():
    batch_fn = RandomBatchFactory("GPT2LMHeadModel")
    return {"model_fn": SmallModelFactory("gpt2"), "batch_fn": batch_fn, "policy": Forgetful}

def nan_loss(model, batch):
    return model(**batch).loss * float("nan")

def not_a_number():
    batch_fn = RandomBatchFactory("GPT2LMHeadModel")
    return {"model_fn": SmallModelFactory("gpt2"), "batch_fn": batch_fn, "loss_fn": nan_loss}
"""


@pytest.fixture
def run(pools: WorkerPools, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process with the session's workers. Return status, standard output and standard error."""

    @contextmanager
    def share_from_first(num_workers: int, **_: object) -> Iterator[WorkerPool]:
        with pools(num_workers).with_timeout(240.0) as pool:
            yield pool

    monkeypatch.setattr("shardformer.local_ranks.worker_pool.WorkerPool", share_from_first)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return int(exit.value.code or 0), out, err

    return run


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    folder = tmp_path / "bert"
    SmallModelFactory("bert", "BertForTokenClassification")().save_pretrained(folder)
    return folder


@pytest.fixture
def user_module(tmp_path: Path) -> Path:
    path = tmp_path / "forgetful_models.py"
    path.write_text(FORGETFUL)
    return path


def test_standard_output_has_only_json() -> None:
    command = [*SHARDFORMER, "verify", "gpt2", "--steps", "2", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] is True and report["model"] == "GPT2LMHeadModel" and report["layout"] == "tensor=2"
    assert len(report["losses"]) == report["steps"] == 2
    assert report["collectives"]["all_reduce over tensor (block)"] == {"calls": 10, "wire_bytes": 399360}
    assert done.stderr == ""


def test_the_report_of_a_folder_fits_into_80_columns(run: Run, bert: Path) -> None:
    status, out, _ = run("verify", bert, "--dtype", "fp32", "--sequence-parallel", "--sequence-overlap")
    assert status == 0, out
    assert out.splitlines()[-1].startswith("PASS: Largest difference ")
    assert "sent by all members of rank 0's groups" in " ".join(out.split())
    assert "BertForTokenClassification" in out and "sequence_overlap" in out and "float32" in out
    for word in ("losses", "gradients", "gradient norms", "weights", "reduce-scatter over tensor", "1e-05"):
        assert word in out
    assert max(map(len, out.splitlines()[:-1])) <= 80 and "\x1b" not in out


def test_a_config_is_verified_with_another_head_and_options(run: Run, bert: Path) -> None:
    head = "BertForMultipleChoice"
    options = [
        "--head",
        head,
        "--fused-normalization",
        "--flash-attention",
        "--batch",
        "2",
        "--tokens",
        "8",
        "--steps",
        "1",
    ]
    status, out, _ = run("verify", bert / "config.json", *options, "--json")
    report = json.loads(out)
    assert (status, report["passed"], report["model"]) == (0, True, head)
    assert report["layout"] == "tensor=2, fused_normalization, flash_attention" and report["steps"] == 1


def test_all_heads_prints_a_line_per_head_and_one_verdict(run: Run) -> None:
    status, out, _ = run("verify", "llama", "--all-heads", "--steps", "1")
    lines = [line for line in out.splitlines() if line]
    assert status == 0, out
    assert [line.split()[0] for line in lines[:-1]] == list(HEAD_CLASSES["llama"])
    assert all(" ok " in line for line in lines[:-1]) and lines[-1].startswith("PASS: 5 heads")


def test_all_heads_can_be_printed_as_json(run: Run) -> None:
    status, out, _ = run("verify", "gpt2", "--all-heads", "--steps", "1", "--json")
    found = json.loads(out)
    assert status == 0 and found["passed"] is True
    assert [report["model"] for report in found["reports"]] == list(HEAD_CLASSES["gpt2"])


def test_a_missing_collective_fails(run: Run, user_module: Path) -> None:
    status, out, _ = run("verify", f"{user_module}:forgetful", "--steps", "2")
    assert status == 1, out
    assert "too large" in out
    assert "FAIL: losses, gradients, gradient norms, weights differ. Largest difference " in out.splitlines()[-1]


def test_the_full_batch_can_be_the_reference(run: Run) -> None:
    options = ["--tensor", "1", "--data", "2", "--steps", "1", "--average-loss-over", "tokens"]
    status, out, _ = run("verify", "gpt2", *options)
    assert status == 0 and "over data=2, reference loss over the full batch." in " ".join(out.split()), out


def test_nan_is_null_in_json(run: Run, user_module: Path) -> None:
    status, out, _ = run("verify", f"{user_module}:not_a_number", "--steps", "1", "--json")
    report = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert status == 1 and report["passed"] is False and report["loss"]["relative"] is None


def test_a_pipeline_without_other_axes_is_verified(run: Run) -> None:
    options = [
        "--pipe",
        "2",
        "--schedule",
        "interleaved",
        "--num-model-chunks",
        "2",
        "--micro-batches",
        "4",
        "--steps",
        "1",
    ]
    status, out, _ = run("verify", "gpt2", *options)
    words = " ".join(out.split())
    assert status == 0, out
    assert (
        "(the small random gpt2, 4 layers): unsharded, and sharded over pipe=2, interleaved, 2 chunks, 4 micro-batches."
        in words
    )
    assert re.search(r"send over pipe \(activation\) +8 ", out) and "Sends: only those of rank 0" in words
    assert max(map(len, out.splitlines()[:-1])) <= 80


def test_a_pipeline_composes_with_other_axes_and_enlarges_the_batch(run: Run) -> None:
    options = ["--pipe", "2", "--tensor", "2", "--partition", "1,2", "--micro-batches", "5", "--steps", "1"]
    status, out, err = run("verify", "gpt2", *options, "--json")
    report = json.loads(out)
    assert (status, report["passed"], err) == (0, True, "")
    assert report["layout"] == "pipe=2, tensor=2, partition=[1, 2], 5 micro-batches"


def test_heads_without_a_loss_are_verified_over_stages(run: Run) -> None:
    status, out, _ = run("verify", "swin", "--pipe", "2", "--head", "SwinForMaskedImageModeling", "--steps", "1")
    assert status == 0, out


def test_one_stage_accumulates_micro_batches(run: Run) -> None:
    status, out, _ = run("verify", "bert", "--pipe", "1", "--tensor", "2", "--micro-batches", "2", "--steps", "1")
    assert status == 0 and "over tensor=2, 2 micro-batches." in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bert", "--sequence-overlap"], "sequence_overlap=True has no effect without sequence_parallel=True"),
        (["bert", "--head", "BertForNothing"], "bert has no head class 'BertForNothing'"),
        (["bert", "--head", "BertModel", "--all-heads"], "Remove one of the two"),
        (["bert", "--tensor", "0"], "--tensor 0 is not a positive number.\n  Use --tensor 1 or more.\n"),
        (["llama", "--tensor", "7"], "exceeds the 6 attention heads"),
        (["llama", "--tensor", "64", "--head", "LlamaModel"], "exceeds the 6 attention heads"),
        (["gpt2", "--batch", "4", "--data", "3"], "not divisible by the number of data-parallel ranks (3)"),
        (
            ["gpt2", "--schedule", "gpipe", "--micro-batches", "4"],
            "--micro-batches 4 --schedule gpipe has no effect without --pipe",
        ),
        (["gpt2", "--partition", "uniform"], "Add --pipe 2, or remove --partition uniform"),
        (["gpt2", "--pipe", "0"], "--pipe must be at least 1, but got 0.\n  Use --pipe 1 or more.\n"),
        (["gpt2", "--pipe", "2", "--schedule", "gpip"], "Did you mean 'gpipe'?"),
        (
            ["gpt2", "--pipe", "2", "--schedule", "gpipe", "--num-model-chunks", "2"],
            "Use num_model_chunks=1, or schedule='interleaved'",
        ),
        (
            ["gpt2", "--pipe", "2", "--schedule", "interleaved", "--micro-batches", "3"],
            "Use 2 or 4 micro-batches, or schedule=",
        ),
        (["gpt2", "--pipe", "2", "--micro-batches", "0"], "micro_batches=0 is not a positive number.\n  Use 1 or more"),
        (
            ["gpt2", "--pipe", "2", "--micro-batches", "8", "--batch", "4"],
            "Use at most 4 micro-batches, or a batch of at least 8",
        ),
        (["gpt2", "--pipe", "2", "--partition", "unifrom"], "Did you mean 'uniform'?"),
        (
            ["gpt2", "--pipe", "2", "--partition", "3;5"],
            "Use --partition 3,5, --partition balanced or --partition uniform",
        ),
        (["gpt2", "--pipe", "2", "--partition", "1,2,3"], "Pass 2 layer counts that sum to 6, such as [3, 3]"),
        (["gpt_neo", "--pipe", "2", "--partition", "2,3"], "assigns 5 layers, but the model has 6"),
        ([os.path.dirname(__file__)], "does not contain a config.json"),
        (["bert", "--tokens", "99"], "max_position_embeddings=64"),
        (["vit", "--tokens", "20"], "--tokens 20"),
        (
            ["bert", "--tensor", "1", "--data", "2", "--tensor-parallel-mode", "2d"],
            "--tensor-parallel-mode 2d has no effect without",
        ),
        (["bert", "--tensor", "1", "--data", "2", "--sequence-parallel"], "--sequence-parallel has no effect without"),
        (["bert", "--context-parallel", "ring"], "--context-parallel ring has no effect without --sequence"),
        (["bert", "--average-loss-over", "tokens"], "--average-loss-over tokens has no effect without --data"),
        (["bert", "--pipe", "2", "--micro-batches", "1000000"], "exceeds the maximum of 1,048,576"),
        (
            ["bert", "--pipe", "2", "--schedule", "interleaved", "--num-model-chunks", "10000"],
            "to 256 layers",
        ),
        (["bert", "--pipe", "2", "--partition", "1,99999999999"], "--partition 3,5"),
        (["bert", "--frozen", "("], "regular expression"),
        (["gpt2", "--pipe", "2", "--chunks", "2"], "--chunks has been renamed to --num-model-chunks"),
        (["gpt2", "--zero=1"], "--zero has been renamed to --zero-stage"),
        (["gpt2", "--reference", "whole"], "--reference has been renamed to --average-loss-over"),
        (["bert", "--zero-stage", "1", "--optimizer", "LBFGS"], "takes no closure"),
        (["bert", "--tensor", "99999999999999999999"], "ranks per axis"),
        (["nowhere:model"], "The module 'nowhere' was not found"),
        ([":model"], "The module '' was not found"),
        (["bret"], "Hugging Face model named 'bret'"),
        (["bret"], ".\n  Did you mean 'bert' or 'beit'?"),
    ],
)
def test_invalid_options_raise_before_processes_start(
    monkeypatch: pytest.MonkeyPatch, run: Run, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(WorkerPool, "run", lambda *_, **__: pytest.fail("a process was started"))
    status, out, err = run("verify", *arguments)
    assert status == 2 and out == "" and err.startswith("ConfigError: ") and message in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_library\n", "No module named 'no_such_library'"),
        ("def (:\n", "SyntaxError"),
        ("1 / 0\n", "line 1"),
        ("import sys; sys.exit(3)\n", "the code exits the process: SystemExit: 3"),
        ("input()\n", "EOFError"),
    ],
)
def test_a_failed_import_reports_the_file(run: Run, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    status, _, err = run("verify", f"{tmp_path / 'broken.py'}:model")
    assert status == 2 and "broken.py' cannot be imported" in err and said in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("sys.exit(4)", "SystemExit: 4"),
        ("input()", "EOFError"),
        ("{'model_fn': lambda: 1 / 0}", "model_fn of"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "infer"])
def test_a_function_that_returns_none_is_reported(run: Run, tmp_path: Path, command: str, body: str, said: str) -> None:
    (tmp_path / "given.py").write_text(f"import sys\ndef model(): return {body}\n")
    status, _, err = run(command, f"{tmp_path / 'given.py'}:model")
    assert status == 2 and said in err and " failed: " in err and "Traceback" not in err


def test_the_depth_of_a_saved_model_is_not_changed(monkeypatch: pytest.MonkeyPatch, run: Run, bert: Path) -> None:
    monkeypatch.setattr(WorkerPool, "run", lambda *_, **__: pytest.fail("a process was started"))
    assert (
        "4 pipeline stages need at least one layer each, but the number of layers is 2"
        in run("verify", bert, "--pipe", "4")[2]
    )
    assert (
        "has 2 layers, but 2 pipeline stages of 2 chunks each need at least 4"
        in run("verify", bert, "--pipe", "2", "--schedule", "zbv")[2]
    )


def test_batch_sizes_raise_for_a_function_with_its_own_batches(run: Run, user_module: Path) -> None:
    status, _, err = run("verify", f"{user_module}:forgetful", "--batch", "8")
    assert status == 2 and "which has its own batch_fn" in err
