"""Metrics logs survive kills, report damaged lines, and are found by their folder."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from shardformer.errors import ConfigError, InputError
from shardformer.training.metrics_log import FILE, MetricsRecord, MetricsWriter, find_metrics_file, read_metrics_records
from tests.disk.locks import killed, lock_of, parent


def record(step: int, **values: float) -> MetricsRecord:
    return MetricsRecord(step, step // 3, step / 2, {"loss": 1.0 / step, **values})


def write(folder: Path, steps: range, resume_at: int | None = None) -> None:
    writer = MetricsWriter(folder, resume_at)
    for step in steps:
        writer.write(record(step))
    writer.close()


def test_written_records_are_read_back(tmp_path: Path) -> None:
    nonfinite = record(1, nan=math.nan, inf=math.inf, minus=-math.inf)
    writer = MetricsWriter(tmp_path)
    writer.write(nonfinite)
    found = read_metrics_records(tmp_path)[0]  # though the run goes on
    writer.close()
    assert (found.step, found.values["inf"], found.values["minus"]) == (1, math.inf, -math.inf)
    assert math.isnan(found.values["nan"])


def test_a_resumed_run_drops_records_after_its_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    write(tmp_path, range(4, 8), resume_at=3)
    assert read_metrics_records(tmp_path) == [record(step) for step in range(1, 8)]


def test_a_new_run_keeps_the_records_of_an_earlier_run(tmp_path: Path) -> None:
    for steps in (range(1, 3), range(1, 4), range(1, 5)):
        write(tmp_path, steps)
    assert [len(read_metrics_records(tmp_path / name)) for name in (FILE, "records.1.jsonl", "records.2.jsonl")] == [
        4,
        2,
        3,
    ]


def test_a_second_job_cannot_write_to_the_folder_of_a_running_job(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    lock_of(parent(), tmp_path)
    before = (tmp_path / FILE).read_bytes()
    for resume_at in (None, 2):
        with pytest.raises(ConfigError, match="is in use by process"):
            MetricsWriter(tmp_path, resume_at)
    assert (tmp_path / FILE).read_bytes() == before
    lock_of(killed(), tmp_path)
    write(tmp_path, range(3, 5), resume_at=2)
    assert read_metrics_records(tmp_path) == [record(step) for step in range(1, 5)]
    assert [path.name for path in tmp_path.iterdir()] == [FILE], "the folder is free again"


@pytest.mark.parametrize("resume_at", [None, 2])
@pytest.mark.parametrize("content", ["precious", "", None])
def test_a_symbolic_link_is_not_written_through(resume_at: int | None, content: str | None, tmp_path: Path) -> None:
    precious, run = tmp_path / "precious", tmp_path / "run"
    if content is not None:
        precious.write_text(content)
    run.mkdir()
    (run / FILE).symlink_to(precious)
    if resume_at is None:
        write(run, range(1, 3))
        assert len(read_metrics_records(run)) == 2
        assert (run / "records.1.jsonl").is_symlink()
    else:
        with pytest.raises(ConfigError, match="is a symbolic link"):
            write(run, range(1, 3), resume_at)
    assert precious.exists() == (content is not None)
    assert content is None or precious.read_text() == content


def test_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    whole = (tmp_path / FILE).read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(last, len(whole) - 1):
        (tmp_path / FILE).write_bytes(whole[:end])
        assert read_metrics_records(tmp_path) == [record(1), record(2)]
    (tmp_path / FILE).write_bytes(whole[:-1])  # a complete record without its newline
    assert read_metrics_records(tmp_path) == [record(1), record(2), record(3)]


def test_a_run_resumes_after_an_incomplete_line(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-9])
    write(tmp_path, range(3, 5), resume_at=2)
    assert read_metrics_records(tmp_path) == [record(step) for step in range(1, 5)]


def test_each_record_is_written_immediately(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in range(1, 4):
        writer.write(record(step))
        assert len(read_metrics_records(tmp_path)) == step
    writer.close()


def test_numpy_and_torch_numbers_are_written(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(MetricsRecord(1, 0, 0.5, {"a": np.float32(0.5), "b": torch.tensor(0.25), "c": 2}))
    writer.close()
    assert read_metrics_records(tmp_path)[0].values == {"a": 0.5, "b": 0.25, "c": 2.0}


OF_HALF_STEPS = '{"step": 1.5, "epoch": 0, "seconds": 0, "values": {}}'


OF_A_WORD = '{"step": 1, "epoch": 0, "seconds": 0, "values": {"loss": "low"}}'


@pytest.mark.parametrize("line", ["{", "[]", '{"step": 1}', OF_HALF_STEPS, OF_A_WORD, "\xff"])
def test_a_damaged_line_raises_with_its_number(line: str, tmp_path: Path) -> None:
    write(tmp_path, range(1, 2))
    with (tmp_path / FILE).open("a", encoding="latin-1") as file:
        file.write(line + "\n")
    with pytest.raises(InputError, match=r"Line 2 of"):
        read_metrics_records(tmp_path)


def test_the_parent_folder_of_a_single_run_refers_to_that_run(tmp_path: Path) -> None:
    write(tmp_path / "first" / "log", range(1, 3))
    for path in (tmp_path, tmp_path / "first", tmp_path / "first" / "log", tmp_path / "first" / "log" / FILE):
        assert read_metrics_records(path) == [record(1), record(2)]
    assert find_metrics_file(tmp_path) == tmp_path / "first" / "log" / FILE


def test_the_parent_folder_of_several_runs_raises_with_their_names(tmp_path: Path) -> None:
    write(tmp_path / "first", range(1, 2))
    write(tmp_path / "second" / "log", range(1, 2))
    with pytest.raises(ConfigError, match=r"contains 2 runs.*Pass '.*first' or '.*second/log'"):
        read_metrics_records(tmp_path)
    write(tmp_path, range(1, 4))  # its own come first
    assert len(read_metrics_records(tmp_path)) == 3


def test_a_folder_without_a_run_raises_with_runs_next_to_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"contains no run"):
        read_metrics_records(tmp_path / "frist")
    write(tmp_path / "first", range(1, 2))
    with pytest.raises(ConfigError, match=r"does not exist.*Did you mean 'first'"):
        read_metrics_records(tmp_path / "frist")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=rf"has no {FILE}.*'first'"):
        read_metrics_records(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"is a file"):
        MetricsWriter(tmp_path / "file")
