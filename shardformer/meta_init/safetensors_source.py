"""Read tensors from safetensors files on demand, and detect files that changed after they were opened.

Files of at most 1 MiB are hashed completely. For larger files the hashes cover the header and samples: 16 evenly spaced
chunks of 64 KiB, and a page from the middle of every tensor. With ``all_bytes`` they cover the complete file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from io import FileIO

import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError, get_first_message_line
from shardformer.meta_init.init_recipe import (
    RecordedInitStep,
    attach_deferred_storage,
    get_deferred_storage,
    get_deferred_view,
    get_recorded_init_steps,
)

LENGTH_BYTES = 8  # Size of the header length, which precedes the header
MAX_HEADER_BYTES = 100_000_000  # Longest header that safetensors accepts
NUM_CHUNKS, CHUNK_BYTES = 16, 1 << 16
TENSOR_BYTES = 1 << 12


@dataclass(frozen=True)
class FileFingerprint:
    """The size and hashes of a file, to compare its contents with other files."""

    size: int  # in bytes
    header: str  # SHA-256
    sampled: str  # SHA-256 of the sampled bytes
    full_hash: str = ""  # SHA-256 of all bytes, if computed

    def __str__(self) -> str:
        return f"{self.size} {self.header} {self.sampled} {self.full_hash}"

    def describe_difference(self, other_fingerprint: FileFingerprint) -> str:
        """Describe the first difference between this fingerprint and another one."""
        name = next(f.name for f in fields(self) if getattr(self, f.name) != getattr(other_fingerprint, f.name))
        sizes = f"size ({self.size} and {other_fingerprint.size} bytes)"
        return {"size": sizes, "header": "header", "sampled": "sampled bytes", "full_hash": "bytes"}[name]


class SafetensorsFile:
    """A safetensors file with a fingerprint of its contents from the time when it was opened.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file has no valid safetensors header.
    """

    def __init__(self, path: str, *, all_bytes: bool = False) -> None:
        self.path, self.all_bytes = path, all_bytes
        self.contents, self._stamp = _compute_file_fingerprint(path, all_bytes=all_bytes)

    def check_unchanged(self, *, compare_contents: bool = False) -> None:
        """Raise ConfigError if the file has changed since it was opened.

        Compares the size and the modification time. With ``compare_contents``, or if these differ, it also compares the
        fingerprint. With ``all_bytes``, a file that was rewritten with the same bytes counts as unchanged.
        """
        cause: Exception | None = None
        try:
            stat = os.stat(self.path)
            is_untouched = _get_size_and_mtime(stat) == self._stamp
            if is_untouched and not compare_contents:
                return
            # an untouched file is not read completely a second time
            contents, stamp = _compute_file_fingerprint(self.path, all_bytes=self.all_bytes and not is_untouched)
            before = self.contents if contents.full_hash else replace(self.contents, full_hash="")
            if contents != before:
                problem = f"different {before.describe_difference(contents)}"
            elif stamp != self._stamp and not contents.full_hash:
                problem = "the file was rewritten"
            else:
                self._stamp = stamp
                return
        except (OSError, ValueError) as error:
            problem, cause = str(error), error
        raise ConfigError(
            f"The weight file {self.path!r} changed or became unreadable since it was loaded: {problem}.",
            remedy="Load the model again, and do not change the file before you shard or materialize the model. If "
            "the file is only rewritten with the same bytes, use from_pretrained(..., all_bytes=True).",
        ) from cause


def _compute_file_fingerprint(path: str, *, all_bytes: bool) -> tuple[FileFingerprint, tuple[int, int]]:
    with open(path, "rb", buffering=0) as file:
        stat = os.fstat(file.fileno())
        header = _read_safetensors_header(file, stat.st_size)
        sampled = hashlib.sha256()
        for start, length in _iter_sampled_byte_ranges(header, stat.st_size):
            file.seek(start)
            sampled.update(file.read(length))
        full_hash = ""
        if all_bytes:
            file.seek(0)
            full_hash = hashlib.file_digest(file, "sha256").hexdigest()
    contents = FileFingerprint(stat.st_size, hashlib.sha256(header).hexdigest(), sampled.hexdigest(), full_hash)
    return contents, _get_size_and_mtime(stat)


def _get_size_and_mtime(stat_result: os.stat_result) -> tuple[int, int]:
    return stat_result.st_size, stat_result.st_mtime_ns


def _read_safetensors_header(file: FileIO, file_size: int) -> bytes:
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    limit = max(min(file_size - LENGTH_BYTES, MAX_HEADER_BYTES), 0)
    if not 0 < length <= limit:
        raise ValueError(f"The header of the file must have 1 to {limit} bytes, but has {length}.")
    header: bytes = file.read(length)
    return header


def _iter_sampled_byte_ranges(header: bytes, file_size: int) -> Iterator[tuple[int, int]]:
    if file_size <= NUM_CHUNKS * CHUNK_BYTES:
        yield 0, file_size
        return
    for number in range(NUM_CHUNKS):
        yield (file_size - CHUNK_BYTES) * number // (NUM_CHUNKS - 1), CHUNK_BYTES
    start = LENGTH_BYTES + len(header)
    for first, end in sorted(_parse_tensor_offsets(header)):
        if 0 <= first <= end <= file_size - start:
            length = min(end - first, TENSOR_BYTES)
            yield start + (first + end - length) // 2, length


def _parse_tensor_offsets(header: bytes) -> list[tuple[int, int]]:
    """Return the (start, end) offsets of all tensors, or an empty list if the header is invalid."""
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        return [(int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for entry in tensors.values()]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError):
        return []


@dataclass(frozen=True)
class SafetensorsTensorReader:
    """A callable that memory-maps one tensor of a safetensors file. Only accessed pages are read from disk."""

    file: SafetensorsFile
    key: str  # name of the tensor in the file

    is_borrowed = True  # the result shares memory with the file

    def __call__(self) -> Tensor:
        from safetensors import SafetensorError, safe_open

        self.file.check_unchanged()
        try:
            with safe_open(self.file.path, framework="pt") as file:
                value: Tensor = file.get_tensor(self.key)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"The tensor {self.key!r} can no longer be read from {self.file.path!r}: {error}.",
                remedy="Shard or materialize the model before you move or rewrite its weight files.",
            ) from error
        return value

    def __str__(self) -> str:
        """Return a description that is identical on ranks that read the same tensor from identical files."""
        return f"read {self.key} {hashlib.sha256(str(self.file.contents).encode()).hexdigest()[:16]}"


def load_safetensors_lazily(path: str, *, all_bytes: bool = False) -> dict[str, Tensor]:
    """Load the tensors of a safetensors file as meta tensors, whose values are read on demand.

    Args:
        all_bytes: whether to compare all bytes of the file between ranks instead of samples.

    Raises:
        ConfigError: if the file cannot be read as safetensors.
    """
    from safetensors import SafetensorError, safe_open

    try:
        weights_file = SafetensorsFile(path, all_bytes=all_bytes)
        with safe_open(path, framework="pt") as file:
            names: list[str] = list(file.keys())
            return {
                name: _make_lazy_tensor(file.get_tensor(name), SafetensorsTensorReader(weights_file, name))
                for name in names
            }
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:  # or a shape is invalid in torch
        reason = get_first_message_line(error)
        raise ConfigError(
            f"The weight file {path!r} cannot be read: {reason}.",
            remedy="Check that the file is a complete safetensors file, or download it again.",
        ) from error


def find_weight_files(model: nn.Module) -> list[SafetensorsFile]:
    """Return the safetensors files from which the weights of a lazily built model will be read."""
    files: dict[int, SafetensorsFile] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        deferred = get_deferred_storage(tensor)
        for step in get_recorded_init_steps(deferred) if deferred is not None else ():
            if isinstance(step.func, SafetensorsTensorReader):
                files[id(step.func.file)] = step.func.file
    return list(files.values())


def _make_lazy_tensor(mapped_tensor: Tensor, reader: SafetensorsTensorReader) -> Tensor:
    tensor = torch.empty_strided(mapped_tensor.shape, mapped_tensor.stride(), dtype=mapped_tensor.dtype, device="meta")
    deferred = attach_deferred_storage(tensor)
    deferred.writer_step = RecordedInitStep(reader, (), {}, (get_deferred_view(tensor),))
    return tensor
