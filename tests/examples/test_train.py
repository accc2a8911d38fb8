"""examples/train.py trains over two processes as in one, and saves a regular checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.slow
def test_two_processes_train_and_save_the_same_model_as_one(train_in_two_and_one: Callable[..., list[float]]) -> None:
    losses = train_in_two_and_one("train", shard_model=lambda model, context: model)
    assert losses[-1] < 0.5 * losses[0]
