"""Steps that tests leave out, to check that ``verify`` fails without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
    """Replace ``owner.name`` by ``make(original)``."""
    return mock.patch.object(owner, name, make(getattr(owner, name)))


@dataclass(frozen=True)
class Omission:
    """A step that is left out, and the family of models it is applied to.

    Args:
        mutation: a key of the ``MUTATIONS`` of the test.
    """

    mutation: str
    family: str
