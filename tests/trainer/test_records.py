"""A run's records: whole after any kill, told where a line is damaged, and found by their folder."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from shardformer.errors import ConfigError, InputError
from shardformer.trainer.records import FILE, Record, RecordWriter, read_records


def record(step: int, **values: float) -> Record:
    return Record(step, step // 3, step / 2, {"loss": 1.0 / step, **values})


def write(folder: Path, steps: range, resume_at: int | None = None) -> None:
    writer = RecordWriter(folder, resume_at)
    for step in steps:
        writer.write(record(step))
    writer.close()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    strange = record(1, nan=math.nan, inf=math.inf, minus=-math.inf)
    writer = RecordWriter(tmp_path)
    writer.write(strange)
    found = read_records(tmp_path)[0]  # though the run goes on
    writer.close()
    assert (found.step, found.values["inf"], found.values["minus"]) == (1, math.inf, -math.inf)
    assert math.isnan(found.values["nan"])


def test_a_run_that_goes_on_drops_what_came_behind_its_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    write(tmp_path, range(4, 8), resume_at=3)
    assert read_records(tmp_path) == [record(step) for step in range(1, 8)]


def test_a_new_run_keeps_the_records_of_the_old_one(tmp_path: Path) -> None:
    for steps in (range(1, 3), range(1, 4), range(1, 5)):
        write(tmp_path, steps)
    assert [len(read_records(tmp_path / name)) for name in (FILE, "records.1.jsonl", "records.2.jsonl")] == [4, 2, 3]


def test_half_a_line_at_the_end_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    whole = (tmp_path / FILE).read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(last, len(whole) - 1, 7):
        (tmp_path / FILE).write_bytes(whole[:end])
        assert len(read_records(tmp_path)) in (2, 3)


OF_HALF_STEPS = '{"step": 1.5, "epoch": 0, "seconds": 0, "values": {}}'


@pytest.mark.parametrize("line", ["{", "[]", '{"step": 1}', OF_HALF_STEPS, "\xff"])
def test_a_damaged_line_is_told_with_its_number(line: str, tmp_path: Path) -> None:
    write(tmp_path, range(1, 2))
    with (tmp_path / FILE).open("a", encoding="latin-1") as file:
        file.write(line + "\n")
    with pytest.raises(InputError, match=r"line 2"):
        read_records(tmp_path)


def test_a_folder_without_records_is_told_with_those_that_have_some(tmp_path: Path) -> None:
    write(tmp_path / "first", range(1, 2))
    with pytest.raises(ConfigError, match=r"holds runs.*first"):
        read_records(tmp_path)
    with pytest.raises(ConfigError, match=r"Did you mean 'first'"):
        read_records(tmp_path / "frist")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"is a file"):
        RecordWriter(tmp_path / "file")
