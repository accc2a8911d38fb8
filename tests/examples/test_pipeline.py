"""examples/pipeline.py trains over two stages as over one, with dropout, and saves the full model."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.slow
def test_two_stages_train_and_save_the_same_model_as_one(train_in_two_and_one: Callable[..., list[float]]) -> None:
    losses = train_in_two_and_one("pipeline")
    assert losses[-1] < 0.75 * losses[0]
