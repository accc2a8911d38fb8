"""The files of a checkpoint: one safetensors file a rank, and one index of all, which is JSON with a checksum.

Nothing in a checkpoint is code, and nothing of it is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardformer.checkpoint.checksum import weighted_sum
from shardformer.checkpoint.held import Stretch, overlap
from shardformer.disk.writing import new_file, write_all, write_new
from shardformer.errors import ConfigError, InputError
from shardformer.layout.spec import Place

INDEX = "checkpoint.json"
FORMAT = 1
HEADER_BYTES = 8
"""In front of the header stands its length; what follows begins at a multiple of as many."""
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.complex128: "F64",
}  # fmt: skip
"""How safetensors calls them. It does not have complex128, whose two parts are in a last dim: see ``header``."""


class DamagedError(InputError):
    """What was saved is not there any more, or is not what it was."""


def damaged(what: str) -> DamagedError:
    """The error for a checkpoint that must not be loaded."""
    return DamagedError(
        what,
        rule="Only what was saved is loaded: every file is there, and every number is what it was",
        remedy="Load an older checkpoint of the folder, and look after the disk",
    )


class Box(NamedTuple):
    """A piece of a tensor in a file: where it begins in the full tensor, its size, and its part of the checksum."""

    start: Place
    size: Place
    file: int
    sum: int


@dataclass
class Entry:
    """One tensor of a checkpoint."""

    dtype: str
    shape: Place
    boxes: list[Box] = field(default_factory=list)


@dataclass
class Index:
    """All that is in a checkpoint.

    Args:
        step: training steps that were made.
        saved_at: seconds since 1970, by the clock of the host that saved it.
        sizes: of the axes of the grid that saved it.
        tensors: by name.
        values: what else was saved, as JSON has it, by kind.
        number: counts the checkpoints of a folder in the order in which they were saved; 0 in those of older versions.
    """

    step: int
    saved_at: float
    sizes: dict[str, int]
    tensors: dict[str, Entry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    number: int = 0

    def write(self, folder: Path, *, to_disk: bool = True) -> None:
        """Writes it, and waits until it is on the disk, or not."""
        tensors = {name: (entry.dtype, entry.shape, entry.boxes) for name, entry in self.tensors.items()}
        content = json.dumps({"format": FORMAT, **vars(self), "tensors": tensors})
        head = {"sha256": _digest(content), "saved_at": self.saved_at, "number": self.number}
        text = f'{json.dumps(head)[:-1]}, "content":\n{content}\n}}\n'
        write_new(folder / INDEX, text.encode(), to_disk=to_disk)
        if to_disk:
            sync(folder)

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Reads the index of a checkpoint. Raises DamagedError for what is none, or not what was written."""
        try:
            head, content, _ = (folder / INDEX).read_bytes().split(b"\n", 2)
            text = content.decode()
            said = json.loads(head + b"0}")
            found = json.loads(text) if _digest(text) == said["sha256"] else {}
            number = found.get("number", 0)
            if not found or found["saved_at"] != said["saved_at"] or said.get("number", number) != number:
                raise damaged(f"{folder / INDEX} is not what was written: its checksum differs")
        except FileNotFoundError:
            raise damaged(f"{folder} is no checkpoint: it has no {INDEX}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(f"{folder / INDEX} cannot be read: {error}") from error
        try:
            return cls._of(found, folder)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(f"{folder / INDEX} is no index of a checkpoint: {type(error).__name__}: {error}") from error

    @classmethod
    def _of(cls, found: dict[str, Any], folder: Path) -> Index:
        if (version := found.pop("format")) != FORMAT:
            raise InputError(
                f"{folder} has the format {version}",
                rule=f"This version reads checkpoints of the format {FORMAT}",
                remedy="Use the version of shardformer that saved it",
            )
        tensors = {
            name: Entry(dtype, tuple(shape), [box_of(box) for box in boxes])
            for name, (dtype, shape, boxes) in found.pop("tensors").items()
        }
        for name, entry in tensors.items():
            _check_entry(name, entry)
        return cls(tensors=tensors, **found)


def _check_entry(name: str, entry: Entry) -> None:
    """Raises ValueError where what an index says of a tensor cannot be: it names files by numbers, and nothing else."""
    if entry.dtype not in map(name_of, DTYPES):
        raise ValueError(f"{name} is of {entry.dtype!r:.80}")
    for box in entry.boxes:
        numbers = (*entry.shape, *box.start, *box.size, box.file)
        inside = all(a + n <= size for a, n, size in zip(box.start, box.size, entry.shape, strict=True))
        if not all(type(n) is int and n >= 0 for n in numbers) or not inside:
            raise ValueError(f"{name} has the part {tuple(box)!r:.200}")


def order_of(folder: Path) -> tuple[int, float]:
    """(number, when it was saved) of a checkpoint, as the first line of its index says; 0 where it cannot be read."""
    try:
        with (folder / INDEX).open("rb") as file:
            head = json.loads(file.readline() + b"0}")
        return int(head.get("number", 0)), float(head["saved_at"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return 0, 0.0


def box_of(found: Sequence[Any]) -> Box:
    """What JSON made of a box."""
    start, size, file, total = found
    return Box(tuple(start), tuple(size), file, total)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_name(rank: int) -> str:
    """Of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def name_of(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


def key_of(name: str, start: Place) -> str:
    """Of a box in its file."""
    return f"{name}@{','.join(map(str, start))}"


class Written(NamedTuple):
    """A tensor that is about to be written: its name in the file, and what gives its values when its turn comes."""

    key: str
    dtype: torch.dtype
    shape: Place
    give: Callable[[], Tensor]


def header(dtype: torch.dtype, shape: Place) -> tuple[str, Place]:
    """What the header of a file says of a tensor: its kind and its shape."""
    return DTYPES[dtype], (*shape, 2) if dtype == torch.complex128 else tuple(shape)


def write_file(
    path: Path, tensors: Sequence[Written], metadata: Mapping[str, str] | None = None, *, to_disk: bool = True
) -> None:
    """Writes a safetensors file, one tensor after the other, and waits for the disk, or not.

    Raises OSError, also where there is a file of that name.
    """
    found: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    at = 0
    for key, dtype, shape, _ in tensors:
        end = at + prod(shape) * dtype.itemsize
        kind, size = header(dtype, shape)
        found[key] = {"dtype": kind, "shape": list(size), "data_offsets": [at, end]}
        at = end
    text = json.dumps(found).encode()
    text += b" " * (-len(text) % HEADER_BYTES)
    with new_file(path) as file:
        write_all(file, len(text).to_bytes(HEADER_BYTES, "little") + text)
        for written in tensors:
            values = written.give()
            if values.numel():
                data: Any = values.reshape(-1).view(torch.uint8).numpy()
                write_all(file, data)
        if to_disk:
            os.fsync(file.fileno())


def write_boxes(path: Path, boxes: Sequence[tuple[str, Place, Tensor]], *, to_disk: bool) -> list[int]:
    """Writes (name, start, values) of boxes as ``write_file`` does. Returns the checksum of each.

    The values stream from where they are: no second copy of all is made.
    """
    sums: list[int] = []

    def give(values: Tensor, start: Place) -> Tensor:
        here = values.detach().cpu().contiguous()
        sums.append(weighted_sum(here, start))
        return here

    write_file(
        path,
        [Written(key_of(n, start), x.dtype, tuple(x.shape), partial(give, x, start)) for n, start, x in boxes],
        to_disk=to_disk,
    )
    return sums


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raises ConfigError for numbers of a kind that the files do not have."""
    if dtype not in DTYPES:
        raise ConfigError(
            f"{name} holds numbers of the kind {dtype}",
            rule=f"The files of a checkpoint hold {', '.join(str(each).removeprefix('torch.') for each in DTYPES)}",
            remedy="Convert it to one of these before it is saved",
        )


def boxes_in(entry: Entry, piece: Stretch) -> Iterator[tuple[int, Stretch]]:
    """(number of a saved box, what it has of the piece) of each that has some."""
    for number, box in enumerate(entry.boxes):
        if (common := overlap((box.start, box.size), piece)) is not None:
            yield number, common
