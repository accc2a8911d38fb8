"""``shardformer demo``: whole in one process and split over two, as a user sees it without a terminal."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardformer.cli import demo as cli_demo
from shardformer.cli import main
from shardformer.demo.comparison import Outcome
from shardformer.testing.pool import Pools, WorkerPool
from shardformer.testing.zoo import Sample
from tests.scripts import SHARDFORMER

pytestmark = pytest.mark.slow

SMALL = ["--layers", "1", "--hidden", "64", "--batch", "2", "--sequence", "32", "--steps", "4"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(pools: Pools, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the demo in this process, in the workers of the session: status, standard output and standard error."""

    @contextmanager
    def share_from_first(num_workers: int, **_: object) -> Iterator[WorkerPool]:
        with pools(num_workers).with_timeout(240.0) as pool:
            yield pool

    monkeypatch.setattr("shardformer.demo.comparison.WorkerPool", share_from_first)
    monkeypatch.setenv("COLUMNS", "80")
    for name, level in cli_demo.QUIET.items():
        monkeypatch.setenv(name, level)

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit:
            main(["demo", *map(str, arguments)])
        out, err = capsys.readouterr()
        return int(exit.value.code or 0), out, err

    return run


def test_a_stranger_sees_plain_lines_a_table_and_the_verdict() -> None:
    environment = {**os.environ, "COLUMNS": "80"}
    command = [*SHARDFORMER, "demo", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    out = done.stdout
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and "\x1b" not in out and "\r" not in out
    assert max(map(len, out.splitlines())) <= 80
    for line in ("one process: step 4/4  loss ", "split over 2: step 4/4  loss ", "loss, step 1 ", "tokens per second"):
        assert line in out
    assert out.rstrip().splitlines()[-1].startswith("Nobody can tell: losses differ by ")


def test_t5_splits_the_sequence_too_and_reads_a_file(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 10)
    status, out, err = run("--family", "t5", "--data", text, "--sequence-parallel", *SMALL)
    assert status == 0, err
    assert "T5ForConditionalGeneration" in out and "450 bytes" in out and "Nobody can tell" in out


def test_a_pipeline_is_compared_with_one_process(run: Run) -> None:
    sizes = ["--layers", "2", *SMALL[2:]]
    status, out, err = run("--pipe", "2", *sizes)
    words = " ".join(out.split())
    assert status == 0, err
    assert "2 that hold some of the layers each: each batch passes them in 2 micro-batches" in words
    assert "split over 2: step 4/4" in out and "shardformer.Pipeline(" in words and "Nobody can tell" in out
    found = re.search(r"sent per step +│ +nothing │ +(\S+) MB", out)
    assert found is not None and float(found[1]) > 0


def test_a_folder_is_trained_with_its_own_weights(run: Run, tmp_path: Path) -> None:
    Sample("bert", "BertForMaskedLM", {"vocab_size": 300})().save_pretrained(tmp_path)
    status, out, err = run("--model", tmp_path, "--batch", "2", "--sequence", "32", "--steps", "3", "--tensor", "2")
    assert status == 0, err
    words = " ".join(out.split())
    assert "its own weights" in words and "guess the 15 % of the tokens that are masked" in words
    assert "Nobody can tell" in words


def test_somebody_who_can_tell_is_status_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outcome, "allowed", -1.0)
    status, out, _ = run(*SMALL[:-1], "2")
    assert status == 1 and "one, reordered: step 2/2" in out
    assert "SOMEBODY CAN TELL" in out and "differs from itself" in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory.\n  --data names a text file."),
        ("", "The text has 0 tokens"),
        ("too short", "The text has 9 tokens"),
    ],
)
def test_a_text_that_cannot_be_trained_on_is_an_error(
    run: Run, tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_text(content)
    status, out, err = run("--data", path)
    assert status == 2 and out == "" and err.startswith("InputError: ") and message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tensor", "99"], "A tensor size of 99 is more than the 8 attention heads"),
        (["--pipe", "5"], "5 pipeline stages for 4 layers"),
        (["--model", os.path.dirname(__file__)], "There is no config.json in the folder"),
        (["--layers", "100000000"], "layers up to 256"),
        (["--family", "t5", "--model", "x"], "Keep --model x alone to train that model, or --family t5 alone"),
    ],
)
def test_what_cannot_be_is_an_error_before_any_process_starts(
    monkeypatch: pytest.MonkeyPatch, run: Run, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("shardformer.demo.comparison.WorkerPool", lambda *_, **__: pytest.fail("a process was started"))
    status, out, err = run(*arguments)
    assert status == 2 and out == "" and err.startswith("ConfigError: ") and message in err


def test_one_is_not_counted_in_the_plural(run: Run) -> None:
    status, out, _ = run(*SMALL[:-1], "1")
    assert status == 0
    words = " ".join(out.split())
    assert "1 layer, hidden" in words and "token: 1 step of 2 x 32 tokens" in words and "at most in 1 step (" in words
