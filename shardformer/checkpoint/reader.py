"""Reads pieces of boxes out of the files of a checkpoint, into memory that is there."""

from __future__ import annotations

import json
import mmap
import os
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardformer.checkpoint.files import HEADER_BYTES, Box, damaged, file_name, header, key_of
from shardformer.checkpoint.held import Stretch

LONG = 2**16
"""Bytes in a row from which on they are read one row after the other; shorter ones are picked out of mapped memory."""


class BoxReader:
    """Reads from a folder. ``num_bytes`` counts what was read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, _File] = {}
        self.num_bytes = 0

    def read(self, name: str, box: Box, piece: Stretch, out: Tensor) -> None:
        """Fills ``out`` with a piece of the full tensor that lies in the box. Raises DamagedError."""
        path, key = self._folder / file_name(box.file), key_of(name, box.start)
        try:
            if box.file not in self._files:
                self._files[box.file] = _File(path)
            begin = self._files[box.file].place_of(key, out.dtype, box)
            self._files[box.file].fill(out, begin, tuple(a - o for a, o in zip(piece[0], box.start, strict=True)), box)
        except FileNotFoundError:
            raise damaged(f"{path} is missing") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise damaged(f"{key} cannot be read from {path}: {error}") from error
        self.num_bytes += out.nbytes

    def close(self) -> None:
        """No more is read."""
        for file in self._files.values():
            os.close(file.descriptor)
        self._files = {}


class _File:
    """One safetensors file."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(self.descriptor).st_size
            length = int.from_bytes(os.pread(self.descriptor, HEADER_BYTES, 0), "little")
            if HEADER_BYTES + length > size:
                raise ValueError("the file is cut short")
            self._header: dict[str, Any] = json.loads(os.pread(self.descriptor, length, HEADER_BYTES))
            self._header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in self._header.values()), default=0)
            if HEADER_BYTES + length + end > size:
                raise ValueError("the file is cut short")
        except BaseException:
            os.close(self.descriptor)
            raise
        self._begin = HEADER_BYTES + length
        self._mapped: Tensor | None = None

    def place_of(self, key: str, dtype: torch.dtype, box: Box) -> int:
        """Where a box begins in the file. Raises ValueError where it is not what the index says, KeyError for none."""
        entry = self._header[key]
        low, high = entry["data_offsets"]
        found = entry["dtype"], tuple(entry["shape"]), high - low
        expected = (*header(dtype, box.size), prod(box.size) * dtype.itemsize)
        if found != expected or low < 0:
            raise ValueError(f"there is {found}, not {expected}")
        return int(self._begin + low)

    def fill(self, out: Tensor, begin: int, start: tuple[int, ...], box: Box) -> None:
        """Reads what begins at ``start`` of a box that lies at ``begin``."""
        row = out.element_size()
        dim = out.dim() - 1
        while dim > 0 and out.shape[dim] == box.size[dim]:
            row *= box.size[dim]
            dim -= 1
        # from dim on, numbers lie behind each other: in the box, and in ``out`` where that is contiguous
        run = row * (out.shape[dim] if out.dim() else 1)
        if run < LONG and out.numel() * out.element_size() > run:
            out.copy_(self._picked(out, begin, start, box))
            return
        target = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
        numbers: Any = target.reshape(-1).view(torch.uint8).numpy()
        data = memoryview(numbers)
        strides = _strides(box.size, out.element_size())
        outer = torch.cartesian_prod(*(torch.arange(n) for n in out.shape[:dim])).view(-1, dim) if dim > 0 else [()]
        for number, at in enumerate(outer):
            place = [a + int(i) for a, i in zip(start, at, strict=False)] + list(start[max(dim, 0) :])
            offset = begin + sum(i * stride for i, stride in zip(place, strides, strict=True))
            self._read_into(data[number * run : (number + 1) * run], offset)
        if target is not out:
            out.copy_(target)

    def _read_into(self, data: Any, offset: int) -> None:
        while len(data):
            count = os.preadv(self.descriptor, [data], offset)
            if count == 0:
                raise ValueError("the file is cut short")
            data, offset = data[count:], offset + count

    def _picked(self, out: Tensor, begin: int, start: tuple[int, ...], box: Box) -> Tensor:
        """Many short rows, of which the pages are read that they lie in."""
        if self._mapped is None:
            memory = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_COPY)
            self._mapped = torch.frombuffer(memory, dtype=torch.uint8)
        size = out.element_size()
        rows = self._mapped[begin : begin + prod(box.size) * size].view(*box.size[:-1], box.size[-1] * size)
        inner = slice(start[-1] * size, (start[-1] + out.shape[-1]) * size)
        outer = tuple(slice(a, a + n) for a, n in zip(start[:-1], out.shape[:-1], strict=True))
        return rows[(*outer, inner)].clone(memory_format=torch.contiguous_format).view(out.dtype)


def _strides(shape: tuple[int, ...], size: int) -> list[int]:
    """In bytes."""
    return [size * prod(shape[dim + 1 :]) for dim in range(len(shape))]
