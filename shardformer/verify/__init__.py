"""Compares a sharded model with the plain one: loss, every gradient, and weights after some steps."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_WHERE = {
    "Bounds": "report",
    "Pipelined": "train_both",
    "Report": "report",
    "Training": "training_options",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'shardformer.verify' has no attribute {name!r}")
    return getattr(import_module(f"shardformer.verify.{_WHERE[name]}"), name)
