"""Errors of several calls on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import shardformer
from tests.integrations.trainer_cases import reset_accelerate


def errors_of(attempts: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """Return the text of the ConfigError that each call raises."""
    found = {}
    for name, attempt in attempts.items():
        reset_accelerate()
        try:
            attempt()
            found[name] = "no error"
        except shardformer.ConfigError as error:
            found[name] = str(error)
    return found
