"""timm in processes of their own, which never come near the other tests: transformers looks for torchvision too.

``make test`` puts timm and torchvision into ``.venv/timm``. Of torchvision the Python files are enough, with the
compiled operators that they look for at import declared; no model here calls one. A timm that stands in the environment
itself, as users have it, goes first.
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
"""Where timm is, when it is not in the environment."""
OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def is_there() -> bool:
    return find_spec("timm") is not None or FOLDER.is_dir()


@cache
def timm(module: str = "") -> ModuleType:
    """timm, or a module of it such as ``models.beit``, in a worker; it is not for the process of the tests."""
    if parent_process() is None:
        raise ImportError("timm is for the workers: pass a function that calls this one to a pool")
    if find_spec("timm") is None:
        sys.path.append(str(FOLDER))
        _declare_operators()
    return import_module(f"timm.{module}" if module else "timm")


@cache
def _declare_operators() -> torch.library.Library:
    """Kept by the cache: what a library declared goes with it."""
    library = torch.library.Library("torchvision", "DEF")
    for operator in OPERATORS:
        library.define(operator)
    return library
