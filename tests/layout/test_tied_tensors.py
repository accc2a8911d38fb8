"""The largest difference of two tensors."""

from __future__ import annotations

import math

import pytest
import torch

from shardformer.layout.sharding_metadata import max_abs_difference


@pytest.mark.parametrize(
    ("a", "b", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([1.0, math.nan], [1.0, 2.0], math.inf),
        ([1.0], [1.0, 1.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_the_largest_difference_of_tensors(a: list[float], b: list[float], difference: float) -> None:
    assert max_abs_difference(torch.tensor(a), torch.tensor(b)) == difference


def test_parameters_are_compared_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Converting a tensor that requires a gradient to a number warns, once per process."""
    converted: list[bool] = []
    original = torch.Tensor.__float__

    def convert(x: torch.Tensor) -> float:
        converted.append(x.requires_grad)
        return original(x)

    monkeypatch.setattr(torch.Tensor, "__float__", convert)
    assert max_abs_difference(torch.nn.Parameter(torch.ones(2)), torch.zeros(2)) == 1.0
    assert converted == [False]
