"""timm in separate worker processes, because an imported torchvision also changes transformers.

``make test`` puts timm and torchvision into ``.venv/timm``. The Python files of torchvision are enough, with the
compiled operators declared that they need at import. No model here calls them. A timm in the environment has
precedence.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import parent_process
from pathlib import Path
from types import ModuleType

import torch

FOLDER = Path(os.environ.get("TIMM_FOLDER", Path(sys.prefix) / "timm"))
"""Folder with timm, if the environment does not have it."""
OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def is_there() -> bool:
    return find_spec("timm") is not None or FOLDER.is_dir()


@cache
def timm(module: str = "") -> ModuleType:
    """Import timm, or a module of it such as ``models.beit``. Call this only in a worker process."""
    if parent_process() is None:
        raise ImportError("timm is for the workers: pass a function that calls this one to a pool")
    if find_spec("timm") is None:
        sys.path.append(str(FOLDER))
        _declare_operators()
    return import_module(f"timm.{module}" if module else "timm")


@cache
def _declare_operators() -> torch.library.Library:
    """Declare compiled operators once; the cache keeps the library object alive."""
    library = torch.library.Library("torchvision", "DEF")
    for operator in OPERATORS:
        library.define(operator)
    return library
