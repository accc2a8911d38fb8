"""Errors of several calls on one rank, and their comparison with the expected texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def assert_refused(ranks: Sequence[dict[str, str]], expected: Mapping[str, tuple[str, ...]]) -> None:
    """Assert that all ranks raise the same errors, which contain the expected parts."""
    assert all(found == ranks[0] for found in ranks)
    assert ranks[0].keys() == expected.keys()
    for name, parts in expected.items():
        assert all(part in ranks[0][name] for part in parts), (name, ranks[0][name])
