"""Ranks that are threads share the derived policy of a model without a family."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from shardformer import shard_model_api as sharder
from shardformer.discovery import derive_policy
from shardformer.policies.role_policy import RolePolicy


@pytest.fixture
def found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache derived policies by class and config within a test that does not change its models."""
    lock, found = threading.Lock(), dict[Any, type[RolePolicy]]()
    find: Callable[[Any], RolePolicy] = derive_policy.derive_policy

    def once(model: Any) -> RolePolicy:
        with lock:
            key = (type(model), str(model.config))
            if key not in found:
                found[key] = type(find(model))
            return found[key]()

    monkeypatch.setattr(sharder, "derive_policy", once)
