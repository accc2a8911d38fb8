"""Where an error came from: the line of somebody's own code, and the module in whose forward it was raised."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterator
from traceback import walk_tb
from types import FrameType
from typing import Any

from torch import nn

from shardformer.errors import first_line

LIBRARIES = ("torch", "transformers", "timm", "shardformer")
MOST = 160
"""Characters of what somebody else's code says."""


def said_by(error: BaseException) -> str:
    """The error in the middle of a sentence, with the line of the model's own code that raised it, where that is known.

    Of a library's code nothing is told: its user cannot change it.
    """
    said = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].rstrip(": ")[:MOST]
    return f"{said}{line_of(error)}"


def line_of(error: BaseException) -> str:
    """``, in mine.py, line 14: `return x.view(b, s, 4, 8)` ``: the innermost line that is no library's."""
    own = [(frame, line) for frame, line in _frames(error) if not _is_library(frame)]
    if not own:
        return ""
    frame, number = own[-1]
    code = linecache.getline(frame.f_code.co_filename, number, frame.f_globals).strip()[:MOST]
    return f", in {_shown(frame.f_code.co_filename)}, line {number}" + (f": `{code}`" if code else "")


def module_in(error: BaseException, model: nn.Module) -> str | None:
    """The path of the innermost module in whose forward an error was raised."""
    paths = {id(module): path for path, module in model.named_modules()}
    seen: list[Any] = [frame.f_locals.get("self") for frame, _ in _frames(error)]
    return next((paths[id(module)] for module in reversed(seen) if paths.get(id(module))), None)


def message_of(error: BaseException) -> str:
    """Its kind and its first line."""
    return f"{type(error).__name__}: {first_line(error)[:MOST]}"


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """From the outermost to that which raised it."""
    yield from walk_tb(error.__traceback__)


def _is_library(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in LIBRARIES or frame.f_code.co_filename.startswith("<")


def _shown(path: str) -> str:
    """As it is read from the folder in which the program runs, where it is inside of that."""
    inside = os.path.relpath(path) if os.path.isabs(path) else path
    return path if inside.startswith(os.pardir) else inside
