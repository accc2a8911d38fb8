"""Safetensors files as sources of values: what is in them is known at once, and read when it is needed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError, first_line
from shardformer.lazy.files import WeightsFile
from shardformer.lazy.recipe import Step, make_place, place_of, recipe, view_of


@dataclass(frozen=True)
class Source:
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


def tensors_of(path: str, *, all_bytes: bool = False) -> dict[str, Tensor]:
    """Every tensor of a safetensors file by its name, without values. Raises ConfigError for what is no such file.

    ``all_bytes`` of the file are compared over ranks, not sampled ones alone.
    """
    from safetensors import SafetensorError, safe_open

    try:
        looked_at = WeightsFile(path, all_bytes=all_bytes)
        with safe_open(path, framework="pt") as file:
            names: list[str] = list(file.keys())
            return {name: _without_values(file.get_tensor(name), Source(looked_at, name)) for name in names}
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:  # shapes that torch does not take
        raise ConfigError(
            f"{path!r} cannot be read: {first_line(error)}",
            rule="Weights are read from safetensors files, as save_pretrained writes them",
            remedy="Fetch or save the file anew: it is cut short, or is something else",
        ) from error


def files_of(model: nn.Module) -> list[WeightsFile]:
    """The files that a model without values reads, each once, in the order in which its tensors need them."""
    found: dict[int, WeightsFile] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        place = place_of(tensor)
        for step in recipe(place) if place is not None else ():
            if isinstance(step.func, Source):
                found[id(step.func.file)] = step.func.file
    return list(found.values())


def _without_values(mapped: Tensor, source: Source) -> Tensor:
    tensor = torch.empty_strided(mapped.shape, mapped.stride(), dtype=mapped.dtype, device="meta")
    place = make_place(tensor)
    place.writer = Step(source, (), {}, (view_of(tensor),))
    return tensor
