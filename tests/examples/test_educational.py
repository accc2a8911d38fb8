"""The educational examples reproduce published losses, in one process and sharded over two.

The losses are those of "Educational Implementation of Tensor Parallel (TP)", computed on GPUs. Memory and collectives
of each run are compared with the formulas of its layers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import PYTHON

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "educational"
IN_TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]

MLP_LOSSES = [0.969451904296875, -445.4638671875]
TEXT_LOSSES = [10.939807891845703, 3.437135934829712, 1.5810130834579468, 0.453738808631897, 0.1264963299036026]
RANDOM_LOSSES = [11.14531421661377, 7.8605475425720215, 6.055154800415039, 4.597280502319336, 3.266993761062622]

HIDDEN, VOCAB, BLOCK, LAYERS = 256, 50257, 1024, 2
TIED = VOCAB * HIDDEN
CUT = LAYERS * 12 * HIDDEN**2
WHOLE = BLOCK * HIDDEN + (2 * LAYERS + 1) * HIDDEN


def run(script: str, *options: str, python: str = PYTHON) -> str:
    """Return the output of an example. With --tensor-parallel it runs in two processes."""
    launcher = IN_TWO if "--tensor-parallel" in options else []
    done = subprocess.run(
        [python, *launcher, str(FOLDER / script), *options],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": python},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^iter \d+  loss (\S+)", output, re.MULTILINE)]


def weights_here(output: str) -> int:
    found = re.search(r"^on this rank +([\d,]+)", output, re.MULTILINE)
    assert found is not None, output
    return int(found[1].replace(",", ""))


def collectives(output: str) -> list[tuple[str, int, int, str]]:
    """Return (operation, calls per step, bytes per step, purpose) for each line of the table."""
    rows = re.findall(r"^(all-\w+) a step +(\S+), ([\d,]+) bytes \((\w+)\)", output, re.MULTILINE)
    return [(what, int(count), int(sent.replace(",", "")), purpose) for what, count, sent, purpose in rows]


@pytest.mark.full
def test_the_mlp_has_the_published_losses_and_half_the_memory_on_two_ranks(tmp_path: Path) -> None:
    for cut in (False, True):
        # memory is measured, and a forked process would include that of its fork server
        output = run("mlp.py", "--profile", "--out", str(tmp_path), *["--tensor-parallel"] * cut, python=sys.executable)
        assert losses(output) == [pytest.approx(MLP_LOSSES[0], rel=2e-5), pytest.approx(MLP_LOSSES[1], abs=1e-3)]
        assert "[[-0.7231, 0.7115, -0.2774, ..." in output
        assert "[[2.4085, 1.6419, 0.8216, ..." in output
        # forward: one all-reduce of the (8, 128) output, twice on the wire; no backward pass, because the input is data
        assert collectives(output) == [("all-reduces", 1, 2 * 8 * 128 * 4, "block")] * cut
        assert weights_here(output) == 2 * 128 * 128 // (1 + cut)
    assert "of 2 runs" in output
    assert (tmp_path / "mlp.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "mlp-rank-0-of-2.trace.json.gz").stat().st_size > 0
    one, two = (json.loads((tmp_path / f"mlp-{name}.json").read_text()) for name in ("one-process", "rank-0-of-2"))
    assert [name for name, _, _ in two["phases"]] == ["build", "step 1", "step 2"]
    # weights, gradients and two Adam states of 32,768 numbers, and some of Adam's temporaries
    assert max(one["memory_mb"]) > 4 * 32768 * 4 / 1e6
    # Half of it, and up to three buffers of 33 kB that gloo frees late. One unsharded layer would make it 0.75.
    assert max(two["memory_mb"]) < 0.66 * max(one["memory_mb"])


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("loss_parallel", [False, True], ids=["", "parallel-loss"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_the_transformer_has_the_published_losses(cut: bool, loss_parallel: bool) -> None:
    options = ["--tensor-parallel"] * cut + ["--loss-parallel"] * loss_parallel
    output = run("transformer.py", *options)
    assert losses(output) == pytest.approx(TEXT_LOSSES, rel=2e-5)
    cut_vocabulary = cut and loss_parallel
    here = (VOCAB + 1) // 2 * HIDDEN if cut_vocabulary else TIED
    assert weights_here(output) == here + CUT // (1 + cut) + WHOLE
    # per layer: g after attention and MLP, f before q, k, v and the MLP
    # vocabulary parallel: g after the embedding of 7 tokens, f before the head of 6 tokens
    num_sums = cut * LAYERS * 6
    sums_bytes = num_sums * 2 * 7 * HIDDEN * 4
    expected = [("all-reduces", num_sums + 2, sums_bytes + 2 * (7 + 6) * HIDDEN * 4, "block")]
    if not cut_vocabulary:
        expected = [("all-reduces", num_sums, sums_bytes, "block")] * cut
    assert [row for row in collectives(output) if row[3] == "block"] == expected
    # three numbers for each of the six predicted tokens, from both ranks to each other
    loss_rows = [("all-gathers", 1, 2 * 3 * 6 * 4, "loss")] * cut_vocabulary
    assert [row for row in collectives(output) if row[3] != "block"] == loss_rows


def test_random_tokens_with_padding_have_the_published_losses() -> None:
    output = run("transformer.py", "--batch-size", "2", "--seq-len", "64", "--tensor-parallel", "--loss-parallel")
    # the published runs differ by this much from each other
    assert losses(output) == pytest.approx(RANDOM_LOSSES, rel=1e-4)


def test_tensor_parallelism_with_one_process_raises() -> None:
    command = [PYTHON, str(FOLDER / "mlp.py"), "--tensor-parallel"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "ConfigError: --tensor-parallel is on" in done.stderr
