"""Layouts and features whose training is compared with one process, and the values that differ too much."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

LAYOUTS: list[dict[str, Any]] = [
    {"tensor": 2},
    {"data": 2},
    {"sequence": 2},
    {"tensor": 2, "sequence_parallel": True},
    {"data": 2, "zero_stage": 1},
    {"data": 2, "zero_stage": 2},
    {"data": 2, "zero_stage": 3},
]
"""Layouts of two ranks that accelerate, Trainer and TRL support."""
COMBINED: list[dict[str, Any]] = [
    {"tensor": 2, "data": 2},
    {"tensor": 2, "sequence": 2},
    {"tensor": 2, "data": 2, "zero_stage": 3},
]
"""Layouts of four ranks that Trainer and TRL support."""


def for_each_feature(features: Iterable[str], reason: str) -> Callable[[Callable[..., None]], Any]:
    """Run a test with each feature, only in ``make test-all`` and without a time limit.

    Args:
        reason: why the test takes long.
    """

    def mark(test: Callable[..., None]) -> Any:
        each = pytest.mark.parametrize("feature", list(features))(test)
        return pytest.mark.full(pytest.mark.above_budget(reason)(each))

    return mark


def find_values_above(
    bound: float, measured: Mapping[str, float], compared: Iterable[str], feature: str, layout: Mapping[str, Any]
) -> list[str]:
    """Describe the compared values that are NaN or not below the bound."""
    return [f"{feature}, {layout}: {name} {measured[name]}" for name in compared if not measured[name] < bound]
