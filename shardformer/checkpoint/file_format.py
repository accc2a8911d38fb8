"""The files of a checkpoint: one safetensors file per rank, and a JSON index with checksums.

Python values (optimizer settings, scheduler states, what a user adds) are written as JSON and read back exactly.

The checksum of a tensor is one that ranks can compute in parts:

Each number, as an integer, is multiplied by an odd 64-bit number that belongs to its place in the full tensor; the sum
of all, modulo 2^64, is the checksum. Pieces of any shape, read by different ranks, give parts of it, so that a load
checks all that was saved while each rank reads only what it will hold. A number that differs always changes the sum.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from shardformer.checkpoint.chunks import ChunkBounds, overlap
from shardformer.errors import ConfigError, InputError
from shardformer.filesystem.atomic_write import new_file, write_all, write_new
from shardformer.layout.shard_spec import Offsets

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014)."""


def weighted_sum(values: Tensor, start: Offsets) -> int:
    """The part of a tensor's checksum that these values give, which begin at ``start`` in it. From 0 to 2^64 - 1."""
    if values.numel() == 0:
        return 0
    numbers: Any = values.detach().cpu().contiguous()
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers)
        start = (*start, 0)
    numbers = numbers.view(_INTEGERS[numbers.element_size()]).numpy()
    factors = [_factors(dim, first, n) for dim, (first, n) in enumerate(zip(start, numbers.shape, strict=True))]
    with numpy.errstate(over="ignore"):
        return int(_contracted(numbers, factors)) % 2**64


def _contracted(numbers: Any, factors: Sequence[Any]) -> Any:
    """The sum of all numbers, each times the factors of its indices."""
    if not factors:
        return numbers.astype(numpy.int64)
    *outer, last = factors
    sums = numpy.einsum("ij,j->i", numbers.reshape(-1, len(last)), last)  # which widens a cache's worth at a time
    for factor in reversed(outer):
        sums = sums.reshape(-1, len(factor)) @ factor
    return sums.reshape(())


def _factors(dim: int, first: int, count: int) -> Any:
    """An odd number for each of ``count`` indices of a dim."""
    x = numpy.arange(first + 1, first + count + 1, dtype=numpy.uint64) * numpy.uint64(_MIX[0])
    x += numpy.uint64(_mixed(dim))
    for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
        x = (x ^ (x >> numpy.uint64(shift))) * numpy.uint64(factor)
    return (x | numpy.uint64(1)).view(numpy.int64)


def _mixed(dim: int) -> int:
    return (dim + 1) * _MIX[1] % 2**64


INDEX_FILE = "checkpoint.json"
FORMAT = 1
HEADER_BYTES = 8
"""In front of the header stands its length; what follows begins at a multiple of as many."""
DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.complex128: "F64",
}  # fmt: skip
"""How safetensors calls them. It does not have complex128, whose two parts are in a last dim: see ``header``."""


class CorruptCheckpointError(InputError):
    """What was saved is not there any more, or is not what it was."""


def corrupt_checkpoint_error(what: str) -> CorruptCheckpointError:
    """The error for a checkpoint that must not be loaded."""
    return CorruptCheckpointError(
        what,
        rule="Only what was saved is loaded: every file is there, and every number is what it was",
        remedy="Load an older checkpoint of the folder, and look after the disk",
    )


class SavedChunk(NamedTuple):
    """A piece of a tensor in a file: where it begins in the full tensor, its size, and its part of the checksum."""

    start: Offsets
    size: Offsets
    file: int
    sum: int


@dataclass
class IndexEntry:
    """One tensor of a checkpoint."""

    dtype: str
    shape: Offsets
    boxes: list[SavedChunk] = field(default_factory=list)


@dataclass
class CheckpointIndex:
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
    tensors: dict[str, IndexEntry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    number: int = 0

    def write(self, folder: Path, *, to_disk: bool = True) -> None:
        """Writes it, and waits until it is on the disk, or not."""
        tensors = {name: (entry.dtype, entry.shape, entry.boxes) for name, entry in self.tensors.items()}
        content = json.dumps({"format": FORMAT, **vars(self), "tensors": tensors})
        head = {"sha256": _digest(content), "saved_at": self.saved_at, "number": self.number}
        text = f'{json.dumps(head)[:-1]}, "content":\n{content}\n}}\n'
        write_new(folder / INDEX_FILE, text.encode(), to_disk=to_disk)
        if to_disk:
            sync(folder)

    @classmethod
    def read(cls, folder: Path) -> CheckpointIndex:
        """Reads the index of a checkpoint. Raises CorruptCheckpointError for what is none, or not what was written."""
        try:
            head, content, _ = (folder / INDEX_FILE).read_bytes().split(b"\n", 2)
            text = content.decode()
            said = json.loads(head + b"0}")
            found = json.loads(text) if _digest(text) == said["sha256"] else {}
            number = found.get("number", 0)
            if not found or found["saved_at"] != said["saved_at"] or said.get("number", number) != number:
                raise corrupt_checkpoint_error(f"{folder / INDEX_FILE} is not what was written: its checksum differs")
        except FileNotFoundError:
            raise corrupt_checkpoint_error(f"{folder} is no checkpoint: it has no {INDEX_FILE}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise corrupt_checkpoint_error(f"{folder / INDEX_FILE} cannot be read: {error}") from error
        try:
            return cls._of(found, folder)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise corrupt_checkpoint_error(
                f"{folder / INDEX_FILE} is no index of a checkpoint: {type(error).__name__}: {error}"
            ) from error

    @classmethod
    def _of(cls, found: dict[str, Any], folder: Path) -> CheckpointIndex:
        if (version := found.pop("format")) != FORMAT:
            raise InputError(
                f"{folder} has the format {version}",
                rule=f"This version reads checkpoints of the format {FORMAT}",
                remedy="Use the version of shardformer that saved it",
            )
        tensors = {
            name: IndexEntry(dtype, tuple(shape), [chunk_from_json(box) for box in boxes])
            for name, (dtype, shape, boxes) in found.pop("tensors").items()
        }
        for name, entry in tensors.items():
            _check_entry(name, entry)
        return cls(tensors=tensors, **found)


def _check_entry(name: str, entry: IndexEntry) -> None:
    """Raises ValueError where what an index says of a tensor cannot be: it names files by numbers, and nothing else."""
    if entry.dtype not in map(dtype_name, DTYPE_NAMES):
        raise ValueError(f"{name} is of {entry.dtype!r:.80}")
    for box in entry.boxes:
        numbers = (*entry.shape, *box.start, *box.size, box.file)
        inside = all(a + n <= size for a, n, size in zip(box.start, box.size, entry.shape, strict=True))
        if not all(type(n) is int and n >= 0 for n in numbers) or not inside:
            raise ValueError(f"{name} has the part {tuple(box)!r:.200}")


def order_of(folder: Path) -> tuple[int, float]:
    """(number, when it was saved) of a checkpoint, as the first line of its index says; 0 where it cannot be read."""
    try:
        with (folder / INDEX_FILE).open("rb") as file:
            head = json.loads(file.readline() + b"0}")
        return int(head.get("number", 0)), float(head["saved_at"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return 0, 0.0


def chunk_from_json(found: Sequence[Any]) -> SavedChunk:
    """What JSON made of a box."""
    start, size, file, total = found
    return SavedChunk(tuple(start), tuple(size), file, total)


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


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


def chunk_key(name: str, start: Offsets) -> str:
    """Of a box in its file."""
    return f"{name}@{','.join(map(str, start))}"


class TensorToWrite(NamedTuple):
    """A tensor that is about to be written: its name in the file, and what gives its values when its turn comes."""

    key: str
    dtype: torch.dtype
    shape: Offsets
    give: Callable[[], Tensor]


def header(dtype: torch.dtype, shape: Offsets) -> tuple[str, Offsets]:
    """What the header of a file says of a tensor: its kind and its shape."""
    return DTYPE_NAMES[dtype], (*shape, 2) if dtype == torch.complex128 else tuple(shape)


def write_file(
    path: Path, tensors: Sequence[TensorToWrite], metadata: Mapping[str, str] | None = None, *, to_disk: bool = True
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


def write_boxes(path: Path, boxes: Sequence[tuple[str, Offsets, Tensor]], *, to_disk: bool) -> list[int]:
    """Writes (name, start, values) of boxes as ``write_file`` does. Returns the checksum of each.

    The values stream from where they are: no second copy of all is made.
    """
    sums: list[int] = []

    def give(values: Tensor, start: Offsets) -> Tensor:
        here = values.detach().cpu().contiguous()
        sums.append(weighted_sum(here, start))
        return here

    write_file(
        path,
        [TensorToWrite(chunk_key(n, start), x.dtype, tuple(x.shape), partial(give, x, start)) for n, start, x in boxes],
        to_disk=to_disk,
    )
    return sums


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raises ConfigError for numbers of a kind that the files do not have."""
    if dtype not in DTYPE_NAMES:
        raise ConfigError(
            f"{name} holds numbers of the kind {dtype}",
            rule=f"The files of a checkpoint hold {', '.join(str(d).removeprefix('torch.') for d in DTYPE_NAMES)}",
            remedy="Convert it to one of these before it is saved",
        )


def overlapping_chunks(entry: IndexEntry, piece: ChunkBounds) -> Iterator[tuple[int, ChunkBounds]]:
    """(number of a saved box, what it has of the piece) of each that has some."""
    for number, box in enumerate(entry.boxes):
        if (common := overlap((box.start, box.size), piece)) is not None:
            yield number, common


KIND, MOST = "$", 2**12
"""The key that tells what a dictionary stands for; numbers that a tensor among the settings may have."""
_SEQUENCES = {"tuple": tuple, "set": set, "deque": deque, "list": list}


def to_json(value: Any, where: str) -> Any:
    """What JSON can hold of a value. Raises InputError, which names ``where`` it stands, for one that it cannot."""
    if value is None or (isinstance(value, (bool, int, float, str)) and type(value).__module__ == "builtins"):
        return value
    if type(value) is list:
        return [to_json(each, f"{where}[{i}]") for i, each in enumerate(value)]
    for kind, of in _SEQUENCES.items():
        if type(value) is of or (kind == "tuple" and isinstance(value, (tuple, torch.Size))):
            return {KIND: kind, "of": [to_json(each, f"{where}[{i}]") for i, each in enumerate(value)]}
    if type(value) in (dict, Counter, OrderedDict, defaultdict):
        pairs = [(to_json(k, f"a key of {where}"), to_json(v, f"{where}[{k!r}]")) for k, v in value.items()]
        if type(value) is Counter or KIND in value or not all(type(k) is str for k in value):
            return {KIND: "Counter" if type(value) is Counter else "dict", "of": [list(pair) for pair in pairs]}
        return dict(pairs)
    if isinstance(value, Tensor) and value.numel() <= MOST and not value.is_complex():
        dtype = str(value.dtype).removeprefix("torch.")
        return {KIND: "tensor", "dtype": dtype, "of": value.detach().cpu().tolist()}
    if isinstance(value, (numpy.generic, numpy.ndarray)) and value.size <= MOST and value.dtype.kind in "biuf":
        return {KIND: "numpy", "dtype": value.dtype.name, "of": value.tolist()}
    if isinstance(value, torch.dtype):
        return {KIND: "dtype", "of": str(value).removeprefix("torch.")}
    raise InputError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, and cannot be saved",
        rule="Beside weights and states a checkpoint holds numbers, words, and lists, tuples, dictionaries and small "
        f"tensors (up to {MOST} numbers) of them: nothing in it is code",
        remedy="Give what it is made of, as its state_dict() does",
    )


def from_json(value: Any) -> Any:
    """What ``to_json`` was given."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    kind = value.get(KIND)
    if kind is None:
        return {key: from_json(each) for key, each in value.items()}
    of = value["of"]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](from_json(each) for each in of)
    if kind == "tensor":
        return torch.tensor(of, dtype=getattr(torch, value["dtype"]))
    if kind == "numpy":
        return numpy.array(of, dtype=value["dtype"])[()]
    if kind == "dtype":
        return getattr(torch, of)
    pairs = {_hashable(from_json(k)): from_json(v) for k, v in of}
    return Counter(pairs) if kind == "Counter" else pairs


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
