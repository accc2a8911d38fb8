"""Read and write the files of a checkpoint: one safetensors file per rank, and a JSON index with checksums.

Python values (optimizer settings, scheduler states, the user's ``extra``) are stored as JSON and restored exactly.

Each rank can compute its share of a tensor's checksum from the chunks it reads. The checksum is the sum over all
elements, modulo 2^64, of

    (the element's bits as an integer) * (an odd 64-bit factor determined by its index in the full tensor)

so any partition of the tensor into chunks gives the same sum. A load verifies every saved element although each rank
reads only its own chunks. A change of a single element always changes the sum, because its factor is odd.
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

from shardformer.checkpoint.chunks import ChunkBounds, intersect_chunks
from shardformer.errors import ConfigError, InputError
from shardformer.filesystem import create_new_file, write_all_bytes, write_new_file
from shardformer.layout.shard_spec import Offsets
from shardformer.random_state import SPLITMIX64
from shardformer.torch_compat import view_as_bytes

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compute_chunk_checksum(chunk_values: Tensor, start: Offsets) -> int:
    """Compute a 64-bit checksum of a chunk. The checksums of a tensor's chunks add up to that of the tensor."""
    if chunk_values.numel() == 0:
        return 0
    numbers: Any = chunk_values.detach().cpu().contiguous()
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers)
        start = (*start, 0)
    numbers = numbers.view(_INTEGERS[numbers.element_size()]).numpy()
    factors = [
        _compute_checksum_weights(dim, first, n)
        for dim, (first, n) in enumerate(zip(start, numbers.shape, strict=True))
    ]
    with numpy.errstate(over="ignore"):
        return int(_compute_weighted_sum(numbers, factors)) % 2**64


def _compute_weighted_sum(integers: numpy.ndarray[Any, Any], weights: Sequence[Any]) -> Any:
    if not weights:
        return integers.astype(numpy.int64)
    *outer, last = weights
    sums = numpy.einsum("ij,j->i", integers.reshape(-1, len(last)), last)  # converts to int64 in cache-sized blocks
    for factor in reversed(outer):
        sums = sums.reshape(-1, len(factor)) @ factor
    return sums.reshape(())


def _compute_checksum_weights(dim: int, start_index: int, num_indices: int) -> numpy.ndarray[Any, Any]:
    """Compute an odd weight for each index along ``dim``, so that the checksum depends on element positions."""
    x = numpy.arange(start_index + 1, start_index + num_indices + 1, dtype=numpy.uint64) * numpy.uint64(SPLITMIX64[0])
    x += numpy.uint64(_get_checksum_seed(dim))
    for shift, factor in ((30, SPLITMIX64[1]), (27, SPLITMIX64[2])):
        x = (x ^ (x >> numpy.uint64(shift))) * numpy.uint64(factor)
    return (x | numpy.uint64(1)).view(numpy.int64)


def _get_checksum_seed(dim: int) -> int:
    return (dim + 1) * SPLITMIX64[1] % 2**64


INDEX_FILE = "checkpoint.json"
FORMAT = 1
HEADER_BYTES = 8
"""Size of the length field of a safetensors header, and the alignment of the data after the header."""
DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.complex128: "F64",
}  # fmt: skip
"""Names of dtypes in safetensors. complex128 has none and is stored as F64 with a last dimension of 2."""


class CorruptCheckpointError(InputError):
    """Raised if a checkpoint file is missing, or if its contents have changed since it was saved."""


def make_corruption_error(message: str) -> CorruptCheckpointError:
    """Create an error that reports a damaged checkpoint and recommends loading an older one."""
    return CorruptCheckpointError(
        message,
        remedy="Load an older checkpoint from the same directory, and check the disk.",
    )


class SavedChunk(NamedTuple):
    """Position, checksum and file number of a tensor chunk in a checkpoint."""

    start: Offsets
    size: Offsets
    file_index: int
    checksum: int


@dataclass
class TensorIndexEntry:
    """Entry of a tensor in the checkpoint index: its dtype, its full shape and its saved chunks."""

    dtype: str
    shape: Offsets
    chunks: list[SavedChunk] = field(default_factory=list)


@dataclass
class CheckpointIndex:
    """The index of a checkpoint, which lists its training step, mesh sizes, tensors and Python values.

    Args:
        step: number of training steps that were completed.
        saved_at: time of the save, in seconds since 1970 by the clock of the host.
        sizes: sizes of the mesh axes in the run that saved the checkpoint.
        tensors: one entry for each tensor, by name.
        values: everything except tensors, encoded as JSON.
        number: position in the order of saves into the directory; 0 if an older version of ShardFormer saved it.
    """

    step: int
    saved_at: float
    sizes: dict[str, int]
    tensors: dict[str, TensorIndexEntry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    number: int = 0

    def write(self, folder: Path, *, sync_to_disk: bool = True) -> None:
        """Write the index to a JSON file in ``folder``, and sync the file to the disk if ``sync_to_disk`` is True."""
        tensors = {name: (entry.dtype, entry.shape, entry.chunks) for name, entry in self.tensors.items()}
        content = json.dumps({"format": FORMAT, **vars(self), "tensors": tensors})
        head = {"sha256": _compute_sha256(content), "saved_at": self.saved_at, "number": self.number}
        text = f'{json.dumps(head)[:-1]}, "content":\n{content}\n}}\n'
        write_new_file(folder / INDEX_FILE, text.encode(), sync_to_disk=sync_to_disk)
        if sync_to_disk:
            fsync_path(folder)

    @classmethod
    def read(cls, folder: Path) -> CheckpointIndex:
        """Read the index of the checkpoint in ``folder``. Raises CorruptCheckpointError if it is missing or damaged."""
        path = folder / INDEX_FILE
        try:
            head, content, _ = path.read_bytes().split(b"\n", 2)
            text = content.decode()
            head_values = json.loads(head + b"0}")
            found = json.loads(text) if _compute_sha256(text) == head_values["sha256"] else {}
            number = found.get("number", 0)
            if not found or found["saved_at"] != head_values["saved_at"] or head_values.get("number", number) != number:
                raise make_corruption_error(f"The checkpoint index {path} is damaged: its checksum does not match.")
        except FileNotFoundError:
            raise make_corruption_error(
                f"The folder {folder} is not a checkpoint, because it does not contain {INDEX_FILE}."
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise make_corruption_error(f"Cannot read the checkpoint index {path}: {error}.") from error
        try:
            return cls._from_json_dict(found, folder)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise make_corruption_error(
                f"The file {path} is not a valid checkpoint index: {type(error).__name__}: {error}."
            ) from error

    @classmethod
    def _from_json_dict(cls, json_values: dict[str, Any], folder: Path) -> CheckpointIndex:
        if (version := json_values.pop("format")) != FORMAT:
            raise InputError(
                f"The checkpoint {folder} has format {version}, but this version of shardformer reads only format "
                f"{FORMAT}.",
                remedy="Load the checkpoint with the version of shardformer that saved it.",
            )
        tensors = {
            name: TensorIndexEntry(dtype, tuple(shape), [decode_saved_chunk(box) for box in boxes])
            for name, (dtype, shape, boxes) in json_values.pop("tensors").items()
        }
        for name, entry in tensors.items():
            _check_index_entry(name, entry)
        return cls(tensors=tensors, **json_values)


def _check_index_entry(tensor_name: str, index_entry: TensorIndexEntry) -> None:
    """Raise ValueError if an index entry has an unknown dtype or an invalid chunk.

    Entries refer to files by number, so that a damaged index cannot refer to files outside the checkpoint.
    """
    if index_entry.dtype not in map(get_dtype_name, DTYPE_NAMES):
        raise ValueError(
            f"The checkpoint index lists the tensor {tensor_name} with the unknown dtype {index_entry.dtype!r:.80}."
        )
    for box in index_entry.chunks:
        numbers = (*index_entry.shape, *box.start, *box.size, box.file_index)
        inside = all(a + n <= size for a, n, size in zip(box.start, box.size, index_entry.shape, strict=True))
        if not all(type(n) is int and n >= 0 for n in numbers) or not inside:
            raise ValueError(
                f"The checkpoint index lists an invalid chunk of the tensor {tensor_name}: {tuple(box)!r:.200}."
            )


def read_save_number_and_time(checkpoint_folder: Path) -> tuple[int, float]:
    """Return the save number and the save time of a checkpoint, or zeros if its index is unreadable."""
    try:
        with (checkpoint_folder / INDEX_FILE).open("rb") as file:
            head = json.loads(file.readline() + b"0}")
        return int(head.get("number", 0)), float(head["saved_at"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return 0, 0.0


def decode_saved_chunk(json_values: Sequence[Any]) -> SavedChunk:
    start, size, file, total = json_values
    return SavedChunk(tuple(start), tuple(size), file, total)


def _compute_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def fsync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def get_rank_file_name(rank: int) -> str:
    """Return the name of the checkpoint file that a rank writes, such as ``rank-00003.safetensors``."""
    return f"rank-{rank:05d}.safetensors"


def get_dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the prefix ``torch.``, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def get_safetensors_chunk_key(tensor_name: str, chunk_start: Offsets) -> str:
    """Return the key under which a safetensors file stores a chunk of a tensor, such as ``weight@0,128``."""
    return f"{tensor_name}@{','.join(map(str, chunk_start))}"


class TensorToWrite(NamedTuple):
    """A tensor to write to a safetensors file, with a function that loads its values when they are needed."""

    key: str
    dtype: torch.dtype
    shape: Offsets
    load: Callable[[], Tensor]


def get_safetensors_dtype_and_shape(dtype: torch.dtype, shape: Offsets) -> tuple[str, Offsets]:
    """Return the dtype name and the shape of a tensor in the format of a safetensors header."""
    return DTYPE_NAMES[dtype], (*shape, 2) if dtype == torch.complex128 else tuple(shape)


def write_safetensors_file(
    path: Path,
    tensors: Sequence[TensorToWrite],
    metadata: Mapping[str, str] | None = None,
    *,
    sync_to_disk: bool = True,
) -> None:
    """Write tensors to a new safetensors file, loading one tensor at a time.

    Syncs the file to the disk if ``sync_to_disk`` is True. Raises OSError, for example if the file exists.
    """
    found: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    at = 0
    for key, dtype, shape, _ in tensors:
        end = at + prod(shape) * dtype.itemsize
        kind, size = get_safetensors_dtype_and_shape(dtype, shape)
        found[key] = {"dtype": kind, "shape": list(size), "data_offsets": [at, end]}
        at = end
    text = json.dumps(found).encode()
    text += b" " * (-len(text) % HEADER_BYTES)
    with create_new_file(path) as file:
        write_all_bytes(file, len(text).to_bytes(HEADER_BYTES, "little") + text)
        for written in tensors:
            values = written.load()
            if values.numel():
                data: Any = view_as_bytes(values).numpy()
                write_all_bytes(file, data)
        if sync_to_disk:
            os.fsync(file.fileno())


def write_chunks(path: Path, chunks: Sequence[tuple[str, Offsets, Tensor]], *, sync_to_disk: bool) -> list[int]:
    """Write tensor chunks to a safetensors file, and return their checksums.

    ``chunks`` contains the (name, start, values) of each chunk. Copies one chunk at a time to the host.
    """
    sums: list[int] = []

    def copy_to_host(values: Tensor, start: Offsets) -> Tensor:
        here = values.detach().cpu().contiguous()
        sums.append(compute_chunk_checksum(here, start))
        return here

    write_safetensors_file(
        path,
        [
            TensorToWrite(get_safetensors_chunk_key(n, start), x.dtype, tuple(x.shape), partial(copy_to_host, x, start))
            for n, start, x in chunks
        ],
        sync_to_disk=sync_to_disk,
    )
    return sums


def check_dtype_can_be_saved(tensor_name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPE_NAMES:
        supported_dtypes = ", ".join(str(d).removeprefix("torch.") for d in DTYPE_NAMES)
        raise ConfigError(
            f"The tensor {tensor_name} has dtype {dtype}, which checkpoints do not support.",
            remedy=f"Before you save, convert the tensor to one of these dtypes: {supported_dtypes}.",
        )


def find_overlapping_chunks(index_entry: TensorIndexEntry, chunk: ChunkBounds) -> Iterator[tuple[int, ChunkBounds]]:
    """Yield the number and the overlap of each saved chunk that overlaps ``chunk``."""
    for number, box in enumerate(index_entry.chunks):
        if (common := intersect_chunks((box.start, box.size), chunk)) is not None:
            yield number, common


KIND, MOST = "$", 2**12
"""The key with the type of an encoded object, and the maximum number of elements of a tensor stored as JSON."""
_SEQUENCES = {"tuple": tuple, "set": set, "deque": deque, "list": list}


def encode_json_value(value: Any, name_in_error: str) -> Any:
    """Convert a Python value to JSON, and raise InputError if its type is not supported.

    ``name_in_error`` is the name of the value in the error message.
    """
    if value is None or (isinstance(value, (bool, int, float, str)) and type(value).__module__ == "builtins"):
        return value
    if type(value) is list:
        return [encode_json_value(each, f"{name_in_error}[{i}]") for i, each in enumerate(value)]
    for kind, of in _SEQUENCES.items():
        if type(value) is of or (kind == "tuple" and isinstance(value, (tuple, torch.Size))):
            entries = [encode_json_value(each, f"{name_in_error}[{i}]") for i, each in enumerate(value)]
            return {KIND: kind, "of": sorted(entries, key=repr) if kind == "set" else entries}
    if type(value) in (dict, Counter, OrderedDict, defaultdict):
        pairs = [
            (encode_json_value(k, f"a key of {name_in_error}"), encode_json_value(v, f"{name_in_error}[{k!r}]"))
            for k, v in value.items()
        ]
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
    type_name = f"{type(value).__module__}.{type(value).__qualname__}"
    raise InputError(
        f"{name_in_error} is a {type_name}, which cannot be saved in a checkpoint.",
        remedy="Save its state_dict() instead, or convert the value to numbers, strings, tensors of at most "
        f"{MOST} elements, or containers of these.",
    )


def find_json_differences(first_value: Any, second_value: Any, json_path: str) -> list[str]:
    """Compare two JSON values, and return the paths at which they differ."""
    if (
        isinstance(first_value, dict)
        and isinstance(second_value, dict)
        and first_value.keys() == second_value.keys()
        and KIND not in first_value
    ):
        return [
            name
            for key in first_value
            for name in find_json_differences(first_value[key], second_value[key], f"{json_path}[{key!r}]")
        ]
    return [json_path] if repr(first_value) != repr(second_value) else []


def decode_json_value(value: Any) -> Any:
    """Convert the output of ``encode_json_value`` back to a Python value."""
    if isinstance(value, list):
        return [decode_json_value(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    kind = value.get(KIND)
    if kind is None:
        return {key: decode_json_value(each) for key, each in value.items()}
    of = value["of"]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode_json_value(each) for each in of)
    if kind == "tensor":
        return torch.tensor(of, dtype=getattr(torch, value["dtype"]))
    if kind == "numpy":
        return numpy.array(of, dtype=value["dtype"])[()]
    if kind == "dtype":
        return getattr(torch, of)
    pairs = {_to_hashable_key(decode_json_value(k)): decode_json_value(v) for k, v in of}
    return Counter(pairs) if kind == "Counter" else pairs


def _to_hashable_key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
