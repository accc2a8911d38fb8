"""What a run wrote down while it trained: a folder with a file ``records.jsonl``, one JSON object a line.

    {"step": 10, "epoch": 0, "seconds": 4.2, "values": {"loss": 3.25, "tokens_per_s": 51200.0, "grad_norm": "nan"}}

JSON has no NaN and no infinity: they are written as "nan", "inf" and "-inf".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shardformer.errors import ConfigError, InputError, did_you_mean
from shardformer.filesystem.atomic_write import new_file, path_of, remove_left, replace_text, write_all
from shardformer.filesystem.lock import hold, release

FILE = "records.jsonl"
_KEYS = ("step", "epoch", "seconds", "values")
_EXAMPLE = '{"step": 10, "epoch": 0, "seconds": 4.2, "values": {"loss": 3.25}}'


@dataclass(frozen=True)
class MetricsRecord:
    """What was measured behind one step.

    Args:
        step: optimizer steps done so far.
        epoch: the pass over the data that the step belongs to.
        seconds: since the run began.
        values: by any name. Those that a picture knows by name: loss, learning_rate, tokens_per_s, flops_per_s,
            memory_bytes, grad_norm; a name behind "validation/", as in validation/loss, is of the validation data.
    """

    step: int
    epoch: int
    seconds: float
    values: dict[str, float]


class MetricsWriter:
    """Writes records into ``folder/records.jsonl``, each at once, so that a killed run keeps all but the last.

    One process of a run writes, and has the folder while it does.

    Args:
        folder: of the run; it is made where there is none.
        resume_at: the step from which a run goes on. Records of later steps are dropped, so that the file is the one
            of a run that was never interrupted. None: a new run; the file of an earlier one is kept in the folder, as
            ``records.1.jsonl``, or the next free number.

    Raises:
        ConfigError: ``folder`` is a file, another process writes into it, or what goes on is no file.
        InputError: the file of the run that goes on is damaged.
        OSError: the folder cannot be made or written into.
    """

    def __init__(self, folder: str | Path, resume_at: int | None = None) -> None:
        self._folder = folder = path_of(folder)
        if folder.is_file():
            raise ConfigError(f"{str(folder)!r} is a file", remedy="Give the path of a folder")
        hold(folder, self)
        try:
            self._file = self._open(folder / FILE, resume_at)
        except BaseException:
            release(folder, self)
            raise

    def _open(self, path: Path, resume_at: int | None) -> BinaryIO:
        remove_left(path.parent, path.name)
        if resume_at is not None and os.path.lexists(path):
            if path.is_symlink() or not path.is_file():
                raise ConfigError(
                    f"{str(path)!r} is a {'symbolic link' if path.is_symlink() else 'folder'}",
                    remedy="Move it away, or give another folder",
                )
            _keep_up_to(path, resume_at)
            return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC), "ab", buffering=0)
        if path.is_file() and not path.is_symlink() and path.stat().st_size == 0:
            path.unlink()
        elif os.path.lexists(path):
            path.rename(_free_name(path))
        return new_file(path)

    def write(self, record: MetricsRecord) -> None:
        """Appends a line."""
        write_all(self._file, _line(record).encode())

    def close(self) -> None:
        self._file.close()
        release(self._folder, self)


def read_records(path: str | Path) -> list[MetricsRecord]:
    """The records of a run, in the order in which they were written.

    Args:
        path: the folder of a run, one above it that has no other run, or a file of records. The last line is left out
            where it is half-written, as that of a run is that was killed, or that goes on.

    Raises:
        ConfigError: there is no such file, or there are several.
        InputError: any other line is no record.
    """
    file = file_of(path)
    lines = file.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(_parse(line))
        except (ValueError, OverflowError) as error:  # what is no UTF-8 and what is no JSON are ValueErrors, too
            if number == len(lines):  # no line break follows
                break
            raise InputError(
                f"{file}, line {number}: {_shortened(line)} is no record: {error}",
                rule=f"A line is a JSON object such as {_EXAMPLE}",
                remedy="Mend the line, or take it out of the file",
            ) from error
    return records


def _line(record: MetricsRecord) -> str:
    values = {name: _to_json(value) for name, value in record.values.items()}
    line = {"step": record.step, "epoch": record.epoch, "seconds": _to_json(record.seconds), "values": values}
    return json.dumps(line, allow_nan=False) + "\n"


def _to_json(value: float) -> float | str:
    number = float(value)  # also of a number of numpy or a tensor with one element
    return number if math.isfinite(number) else str(number)


def _parse(line: bytes) -> MetricsRecord:
    """Raises ValueError with what is wrong, OverflowError for a number that is no float."""
    try:
        found = json.loads(line.decode("utf-8"))
    except RecursionError:
        raise ValueError("it has lists in lists in lists") from None
    if not isinstance(found, dict) or sorted(found) != sorted(_KEYS):
        raise ValueError(f"its keys are not {', '.join(_KEYS)}")
    for name in ("step", "epoch"):
        if type(found[name]) is not int:
            raise ValueError(f"{name} is not a whole number")
    if not isinstance(found["values"], dict):
        raise ValueError("values is not an object")
    values = {name: _to_float(name, value) for name, value in found["values"].items()}
    return MetricsRecord(found["step"], found["epoch"], _to_float("seconds", found["seconds"]), values)


def _to_float(name: str, value: Any) -> float:
    if type(value) in (int, float) or value in ("nan", "inf", "-inf"):
        return float(value)
    raise ValueError(f"{name} is not a number")


def _shortened(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace")
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _keep_up_to(path: Path, step: int) -> None:
    """Drops the records of later steps. The file is at any time the old one or the new one."""
    kept = [record for record in read_records(path) if record.step <= step]
    replace_text(path, "".join(map(_line, kept)))


def _free_name(path: Path) -> Path:
    number = 1
    while os.path.lexists(free := path.with_name(f"{path.stem}.{number}{path.suffix}")):
        number += 1
    return free


# ---------------------------------------------------------------------------------------------------- finding the file


def file_of(path: str | Path) -> Path:
    """The file of records that ``path`` means: itself, the one in it, or the only one in the folders below.

    Raises:
        ConfigError: there is none, or there are several.
    """
    path = Path(path)
    if path.is_file():
        return path
    if (path / FILE).is_file():
        return path / FILE
    inside = _files_below(path)
    if len(inside) == 1:
        return inside[0]
    what = "does not exist" if not path.is_dir() else f"holds {len(inside)} runs" if inside else f"has no {FILE}"
    raise ConfigError(
        f"{str(path)!r} {what}",
        rule=f"A run is a folder with a {FILE}, which training writes, the folder above it, or such a file itself",
        remedy=f"Give {_listed([str(file.parent) for file in inside])}" if inside else _remedy(path),
    )


def _remedy(path: Path) -> str:
    above = next(folder for folder in path.resolve().parents if folder.is_dir())
    names = [str(file.parent.relative_to(above)) for file in _files_below(above) if file.parent.name != path.name]
    if not names:
        return f"There is no run in {above} either. Give the folder that training was told to write into"
    return f"{did_you_mean(path.name, names)} Give one of the runs in {above}"


def _files_below(folder: Path) -> list[Path]:
    """Of the folders in ``folder``, and of those in them."""
    return sorted([*folder.glob(f"*/{FILE}"), *folder.glob(f"*/*/{FILE}")])


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return f"one of {shown}, ..." if len(names) > 3 else " or ".join(map(repr, names))
