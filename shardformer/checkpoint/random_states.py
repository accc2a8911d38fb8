"""The random streams of a rank as tensors and plain numbers."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor

from shardformer.layers.random_stream import random_states, set_random_states


def random_name(rank: int, name: str) -> str:
    """In a checkpoint, of one of the tensors of a rank."""
    return f"random.{rank}/{name}"


def random_tensors(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This rank's: (tensors by name, numbers)."""
    of_torch, of_numpy, of_python = random_states(device)
    name, keys, *rest = of_numpy
    version, words, gauss = of_python
    tensors = {f"torch.{i}": state for i, state in enumerate(of_torch)}
    tensors["numpy"] = torch.from_numpy(numpy.asarray(keys, numpy.int64))
    tensors["python"] = torch.tensor(words, dtype=torch.int64)
    return tensors, {"numpy": [name, *rest], "python": [version, gauss]}


def set_random_tensors(tensors: dict[str, Tensor], numbers: dict[str, Any], device: torch.device) -> None:
    """What ``random_tensors`` gave, of generators that this device has."""
    own, _ = random_tensors(device)
    of_torch = [tensors.get(name, own[name]) for name in own if name.startswith("torch.")]
    name, *rest = numbers["numpy"]
    of_numpy = (name, tensors["numpy"].numpy().astype(numpy.uint32), *rest)
    version, gauss = numbers["python"]
    set_random_states((of_torch, of_numpy, (version, tuple(tensors["python"].tolist()), gauss)), device)
