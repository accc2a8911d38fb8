"""Safetensors files as sources of values: the contents are known at once, and read when they are needed.

Files of at most a mebibyte are looked at whole. Of larger ones the checksums are of the header and of sampled bytes: 16
stretches of 64 KiB that lie evenly over the file, and a page out of the middle of every tensor; of all bytes where that
is asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError, first_line
from shardformer.meta_init.init_recipe import InitStep, defer_storage, deferred_storage_of, recipe_of, view_of

LENGTH_BYTES = 8
"""In front of the header stands its length."""
MAX_HEADER_BYTES = 100_000_000
"""A longer header is none: safetensors reads no more either."""
STRETCHES, STRETCH_BYTES = 16, 1 << 16
TENSOR_BYTES = 1 << 12


@dataclass(frozen=True)
class FileFingerprint:
    """What a file holds: equal for files with the same bytes, wherever they lie.

    Args:
        size: in bytes.
        header, sampled: checksums.
        whole: checksum of all bytes; empty where it was not asked for.
    """

    size: int
    header: str
    sampled: str
    whole: str = ""

    def __str__(self) -> str:
        return f"{self.size} {self.header} {self.sampled} {self.whole}"

    def difference(self, other: FileFingerprint) -> str:
        """In what this differs from another one that is not equal, in words."""
        name = next(f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name))
        sizes = f"size ({self.size} and {other.size} bytes)"
        return {"size": sizes, "header": "header", "sampled": "sampled bytes", "whole": "bytes"}[name]


class WeightsFile:
    """A safetensors file, as it was when it was first looked at.

    Raises OSError where it cannot be read, ValueError where it cannot be a safetensors file.
    """

    def __init__(self, path: str, *, all_bytes: bool = False) -> None:
        self.path, self.all_bytes = path, all_bytes
        self.contents, self._stamp = _look(path, all_bytes=all_bytes)

    def check(self, *, reads: bool = False) -> None:
        """Raises ConfigError where the file is not what it was: its size, its time, and where it ``reads`` its bytes.

        A file that was written anew with the same bytes is the same where all of them are compared.
        """
        try:
            found = os.stat(self.path)
            is_untouched = _stamp_of(found) == self._stamp
            if is_untouched and not reads:
                return
            # what nobody wrote to is not read whole a second time
            contents, stamp = _look(self.path, all_bytes=self.all_bytes and not is_untouched)
        except OSError as error:
            raise self._changed(f"cannot be read any more: {error}") from error
        except ValueError as error:
            raise self._changed(f"changed since it was loaded: {error}") from error
        before = self.contents if contents.whole else replace(self.contents, whole="")
        if contents != before:
            raise self._changed(f"changed since it was loaded, in its {before.difference(contents)}")
        if stamp != self._stamp and not contents.whole:
            raise self._changed("was written to since it was loaded")
        self._stamp = stamp

    def _changed(self, how: str) -> ConfigError:
        return ConfigError(
            f"{self.path!r} {how}",
            rule="The files stay as they are until the model has its values",
            remedy="Load the model anew, and shard or materialize it before they are moved or written; files that are "
            "written anew with the same bytes are told with from_pretrained(..., all_bytes=True)",
        )


def _look(path: str, *, all_bytes: bool) -> tuple[FileFingerprint, tuple[int, int]]:
    with open(path, "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        header = _header(file, found.st_size)
        sampled = hashlib.sha256()
        for start, length in _samples(header, found.st_size):
            file.seek(start)
            sampled.update(file.read(length))
        whole = ""
        if all_bytes:
            file.seek(0)
            whole = hashlib.file_digest(file, "sha256").hexdigest()
    contents = FileFingerprint(found.st_size, hashlib.sha256(header).hexdigest(), sampled.hexdigest(), whole)
    return contents, _stamp_of(found)


def _stamp_of(found: os.stat_result) -> tuple[int, int]:
    """What changes, as a rule, where a file is written to."""
    return found.st_size, found.st_mtime_ns


def _header(file: BinaryIO | Any, size: int) -> bytes:
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    most = min(size - LENGTH_BYTES, MAX_HEADER_BYTES)
    if not 0 < length <= most:
        raise ValueError(f"its header has {length} bytes, and may have {max(most, 0)} in a file of {size}")
    header: bytes = file.read(length)
    return header


def _samples(header: bytes, size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of what is looked at, in a file of this header and size."""
    if size <= STRETCHES * STRETCH_BYTES:
        yield 0, size
        return
    for number in range(STRETCHES):
        yield (size - STRETCH_BYTES) * number // (STRETCHES - 1), STRETCH_BYTES
    start = LENGTH_BYTES + len(header)
    for first, end in sorted(_offsets(header)):
        if 0 <= first <= end <= size - start:
            length = min(end - first, TENSOR_BYTES)
            yield start + (first + end - length) // 2, length


def _offsets(header: bytes) -> list[tuple[int, int]]:
    """Of each tensor; none where the header is no such thing, which safetensors says better."""
    try:
        tensors = {name: said for name, said in json.loads(header).items() if name != "__metadata__"}
        return [(int(said["data_offsets"][0]), int(said["data_offsets"][1])) for said in tensors.values()]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError):
        return []


@dataclass(frozen=True)
class SafetensorsSource:
    """One tensor of a file. Called, it is mapped into memory, and of it is read from the disk what is then touched.

    Args:
        file: where it stands.
        key: the tensor's name in it.
    """

    file: WeightsFile
    key: str

    is_borrowed = True  # what it gives is the file's memory

    def __call__(self) -> Tensor:
        from safetensors import SafetensorError, safe_open

        self.file.check()
        try:
            with safe_open(self.file.path, framework="pt") as file:
                value: Tensor = file.get_tensor(self.key)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{self.key!r} cannot be read any more from {self.file.path!r}: {error}",
                rule="The files stay as they are until the model has its values",
                remedy="Shard or materialize the model before they are moved or written anew",
            ) from error
        return value

    def __str__(self) -> str:
        """Equal on ranks that read the same."""
        return f"read {self.key} {hashlib.sha256(str(self.file.contents).encode()).hexdigest()[:16]}"


def lazy_tensors(path: str, *, all_bytes: bool = False) -> dict[str, Tensor]:
    """Every tensor of a safetensors file by its name, without values. Raises ConfigError for what is no such file.

    ``all_bytes`` of the file are compared over ranks, not sampled ones alone.
    """
    from safetensors import SafetensorError, safe_open

    try:
        looked_at = WeightsFile(path, all_bytes=all_bytes)
        with safe_open(path, framework="pt") as file:
            names: list[str] = list(file.keys())
            return {name: _without_values(file.get_tensor(name), SafetensorsSource(looked_at, name)) for name in names}
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:  # shapes that torch does not take
        raise ConfigError(
            f"{path!r} cannot be read: {first_line(error)}",
            rule="Weights are read from safetensors files, as save_pretrained writes them",
            remedy="Fetch or save the file anew: it is cut short, or is something else",
        ) from error


def weight_files(model: nn.Module) -> list[WeightsFile]:
    """The files that a model without values reads, each once, in the order in which its tensors need them."""
    found: dict[int, WeightsFile] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        place = deferred_storage_of(tensor)
        for step in recipe_of(place) if place is not None else ():
            if isinstance(step.func, SafetensorsSource):
                found[id(step.func.file)] = step.func.file
    return list(found.values())


def _without_values(mapped: Tensor, source: SafetensorsSource) -> Tensor:
    tensor = torch.empty_strided(mapped.shape, mapped.stride(), dtype=mapped.dtype, device="meta")
    place = defer_storage(tensor)
    place.writer = InitStep(source, (), {}, (view_of(tensor),))
    return tensor
