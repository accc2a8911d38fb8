"""Writes and reads the metrics log of a run, ``folder/records.jsonl``, with one JSON object per line.

    {"step": 10, "epoch": 0, "seconds": 4.2, "values": {"loss": 3.25, "tokens_per_s": 51200.0, "grad_norm": "nan"}}

The first record after a start, a resume or a change of the layout also has the key "layout", as in "tensor=2, data=2".
JSON has no NaN and infinity, so they are written as "nan", "inf" and "-inf".
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shardformer.errors import ConfigError, InputError, suggest_similar_names
from shardformer.filesystem import (
    acquire_folder_lock,
    create_new_file,
    release_folder_lock,
    remove_stale_temporary_files,
    replace_text_atomically,
    to_absolute_path,
    write_all_bytes,
)

FILE = "records.jsonl"
_KEYS = ("step", "epoch", "seconds", "values")
_EXAMPLE = '{"step": 10, "epoch": 0, "seconds": 4.2, "values": {"loss": 3.25}}'


@dataclass(frozen=True)
class MetricsRecord:
    """Metrics that a run recorded after one optimizer step.

    Args:
        step: Number of optimizer steps so far.
        epoch: Epoch of the step.
        seconds: Seconds since the run started.
        values: Metrics by name. Plots have titles for loss, learning_rate, tokens_per_s, flops_per_s, memory_bytes and
            grad_norm. The prefix "validation/", as in validation/loss, marks metrics of the validation data.
        layout: Parallel layout, as in "tensor=2, data=2", if this is the first record after a start, a resume or a
            change of the layout. Otherwise empty.
    """

    step: int
    epoch: int
    seconds: float
    values: dict[str, float]
    layout: str = ""


class MetricsWriter:
    """Appends metrics to ``folder/records.jsonl`` without buffering, so that a killed run loses at most one record.

    One process of a run writes. It locks the folder while it writes.

    Args:
        directory: Folder of the run, created if missing.
        resume_step: Step at which a run resumes. Records of later steps are removed. None starts a new file, and
            renames the file of an earlier run to ``records.1.jsonl`` or the next free number.

    Raises:
        ConfigError: ``directory`` is a file, another process writes to it, or the file to resume is not a regular file.
        InputError: The file to resume is damaged.
        OSError: The folder cannot be created or written.
    """

    def __init__(self, directory: str | Path, resume_step: int | None = None) -> None:
        self._folder = directory = to_absolute_path(directory)
        if directory.is_file():
            raise ConfigError(f"The metrics folder '{directory}' is a file.", remedy="Pass the path of a folder.")
        acquire_folder_lock(directory, self)
        try:
            self._file = self._open_log_file(directory / FILE, resume_step)
        except BaseException:
            release_folder_lock(directory, self)
            raise

    def _open_log_file(self, path: Path, resume_step: int | None) -> BinaryIO:
        remove_stale_temporary_files(path.parent, path.name)
        if resume_step is not None and os.path.lexists(path):
            if path.is_symlink() or not path.is_file():
                kind = "symbolic link" if path.is_symlink() else "folder"
                raise ConfigError(
                    f"The metrics file '{path}' is a {kind}.",
                    remedy=f"Move or delete the {kind}, or pass another metrics folder.",
                )
            kept = [record for record in read_metrics_records(path) if record.step <= resume_step]
            replace_text_atomically(path, "".join(map(_format_json_line, kept)))  # atomically
            return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC), "ab", buffering=0)
        if path.is_file() and not path.is_symlink() and path.stat().st_size == 0:
            path.unlink()
        elif os.path.lexists(path):
            names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
            path.rename(next(name for name in names if not os.path.lexists(name)))
        return create_new_file(path)

    def write(self, record: MetricsRecord) -> None:
        write_all_bytes(self._file, _format_json_line(record).encode())

    def close(self) -> None:
        self._file.close()
        release_folder_lock(self._folder, self)


def read_metrics_records(path: str | Path) -> list[MetricsRecord]:
    """Read the logged metrics of a run in the order in which they were written.

    Args:
        path: Folder of a run, a parent folder with a single run, or a file of records. An incomplete last line is
            ignored, because the run may have been killed or may still be writing.
    """
    file = find_metrics_file(path)
    lines = file.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(_parse_metrics_record(line))
        except (ValueError, OverflowError) as error:  # includes invalid UTF-8 and invalid JSON
            if number == len(lines):  # no newline follows
                break
            text = line.decode(errors="replace")
            raise InputError(
                f"Line {number} of {file} is not a valid metrics record ({error}): {text!r:.60}.",
                remedy=f"Remove the line, or write a record such as {_EXAMPLE}.",
            ) from error
    return records


def _format_json_line(record: MetricsRecord) -> str:
    values = {name: encode_float_for_json(value) for name, value in record.values.items()}
    line = {
        "step": record.step,
        "epoch": record.epoch,
        "seconds": encode_float_for_json(record.seconds),
        "values": values,
    }
    line |= {"layout": record.layout} if record.layout else {}
    return json.dumps(line, allow_nan=False) + "\n"


def encode_float_for_json(float_value: float) -> float | str:
    """Convert a number to a JSON value, which is a string for NaN and infinity, as JSON does not support them."""
    number = float(float_value)  # converts NumPy numbers and tensors with one element
    return number if math.isfinite(number) else str(number)


def _parse_metrics_record(line: bytes) -> MetricsRecord:
    """Parse one line of the metrics log. Raises ValueError or OverflowError if the line is invalid."""
    try:
        found = json.loads(line.decode("utf-8"))
    except RecursionError:
        raise ValueError("the JSON value is nested too deeply") from None
    layout = found.pop("layout", "") if isinstance(found, dict) else ""
    if not isinstance(found, dict) or sorted(found) != sorted(_KEYS):
        raise ValueError(f"the keys must be {', '.join(_KEYS)}")
    for name in ("step", "epoch"):
        if type(found[name]) is not int:
            raise ValueError(f"{name} must be an integer")
    if not isinstance(found["values"], dict):
        raise ValueError("the key values does not contain a JSON object")
    if not isinstance(layout, str):
        raise ValueError("the key layout does not contain a string")
    values = {name: _parse_float(name, value) for name, value in found["values"].items()}
    return MetricsRecord(found["step"], found["epoch"], _parse_float("seconds", found["seconds"]), values, layout)


def _parse_float(field_name: str, raw_value: Any) -> float:
    if type(raw_value) in (int, float) or raw_value in ("nan", "inf", "-inf"):
        return float(raw_value)
    raise ValueError(f"{field_name} must be a number")


def find_metrics_file(run_path: str | Path) -> Path:
    """Return the metrics file of a run. ``run_path`` is the file, its folder, or a folder with a single run."""
    run_path = Path(run_path)
    if run_path.is_file():
        return run_path
    if (run_path / FILE).is_file():
        return run_path / FILE
    inside = _find_metrics_files(run_path)
    if len(inside) == 1:
        return inside[0]
    what = "does not exist" if not run_path.is_dir() else f"contains {len(inside)} runs" if inside else f"has no {FILE}"
    raise ConfigError(
        f"Cannot read the metrics of a run from '{run_path}', because this path {what}.",
        rule=f"Pass the output folder of a training run, which contains the file {FILE}.",
        remedy=_suggest_run_directories(run_path, [repr(str(file.parent)) for file in inside]),
    )


def _suggest_run_directories(run_path: Path, run_folders: Sequence[str]) -> str:
    if run_folders:
        return (
            f"Pass one of {', '.join(run_folders[:3])}, ..."
            if len(run_folders) > 3
            else f"Pass {' or '.join(run_folders)}"
        )
    above = next(folder for folder in run_path.resolve().parents if folder.is_dir())
    names = [
        str(file.parent.relative_to(above)) for file in _find_metrics_files(above) if file.parent.name != run_path.name
    ]
    if not names:
        return f"The folder {above} contains no run"
    return f"{suggest_similar_names(run_path.name, names)} Pass one of the runs in {above}"


def _find_metrics_files(directory: Path) -> list[Path]:
    return sorted([*directory.glob(f"*/{FILE}"), *directory.glob(f"*/*/{FILE}")])
