"""Safetensors files as sources of values: what is in them is known at once, and read when it is needed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardformer.errors import ConfigError
from shardformer.lazy.recipe import Step, make_place, view_of

HEADER_BYTES = 8  # in front of the header stands its length


@dataclass(frozen=True)
class Source:
    """One tensor of a file. Called, it is mapped into memory, and of it is read from the disk what is then touched.

    Args:
        path: the file.
        key: the tensor's name in it.
        fingerprint: of the file's header and size, so that ranks can tell whether they read the same.
    """

    path: str
    key: str
    fingerprint: str

    is_borrowed = True  # what it gives is the file's memory

    def __call__(self) -> Tensor:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="pt") as file:
                value: Tensor = file.get_tensor(self.key)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{self.key!r} cannot be read any more from {self.path!r}: {error}",
                rule="The files stay as they are until the model has its values",
                remedy="Shard or materialize the model before they are moved or written anew",
            ) from error
        return value

    def __str__(self) -> str:
        return f"read {self.key} {self.fingerprint}"


def tensors_of(path: str) -> dict[str, Tensor]:
    """Every tensor of a safetensors file by its name, without values. Raises ConfigError for what is no such file."""
    from safetensors import SafetensorError, safe_open

    try:
        fingerprint = _fingerprint(Path(path))
        with safe_open(path, framework="pt") as file:
            names: list[str] = list(file.keys())
            return {name: _without_values(file.get_tensor(name), Source(path, name, fingerprint)) for name in names}
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path!r} cannot be read: {error}",
            rule="Weights are read from safetensors files, as save_pretrained writes them",
            remedy="Fetch or save the file anew: it is cut short, or is something else",
        ) from error


def _without_values(mapped: Tensor, source: Source) -> Tensor:
    tensor = torch.empty_strided(mapped.shape, mapped.stride(), dtype=mapped.dtype, device="meta")
    place = make_place(tensor)
    place.writer = Step(source, (), {}, (view_of(tensor),))
    return tensor


def _fingerprint(path: Path) -> str:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(HEADER_BYTES), "little")
        header = file.read(min(length, path.stat().st_size))
    return hashlib.sha256(header + str(path.stat().st_size).encode()).hexdigest()[:16]
