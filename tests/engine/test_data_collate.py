"""``collate_samples`` converts mappings to the batch that a model takes."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from shardformer.errors import InputError
from shardformer.training.data_loader import collate_samples


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2], torch.tensor([1, 2])),
        ([0.5, 1], torch.tensor([0.5, 1.0])),
        ([True, False], torch.tensor([True, False])),
        ([[1, 2], [3, 4]], torch.tensor([[1, 2], [3, 4]])),
        ([[0.5], [1.0]], torch.tensor([[0.5], [1.0]])),
        ([[[1], [2]], [[3], [4]]], torch.tensor([[[1], [2]], [[3], [4]]])),
        ([numpy.ones(2, numpy.float16)] * 2, torch.ones(2, 2, dtype=torch.float16)),
        ([[numpy.ones(2), numpy.ones(2)]] * 2, torch.ones(2, 2, 2, dtype=torch.float64)),
        ([numpy.array(3), numpy.array(4)], torch.tensor([3, 4])),
        ([torch.ones(2), torch.zeros(2)], torch.tensor([[1.0, 1.0], [0.0, 0.0]])),
        ([[], []], torch.zeros(2, 0)),
    ],
)
def test_numbers_become_a_tensor(values: list[Any], expected: Tensor) -> None:
    found = collate_samples([{"x": value} for value in values])["x"]
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_strings_stay_a_list() -> None:
    assert collate_samples([{"text": "a"}, {"text": "bc"}]) == {"text": ["a", "bc"]}


def test_other_samples_are_collated_by_default_collate() -> None:
    inputs, targets = collate_samples([(torch.ones(2), 1), (torch.ones(2), 0)])
    assert inputs.shape == (2, 2)
    assert targets.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"ids": [1]}, {"ids": [1, 2]}], r"'ids' .* same shape, but got \(1,\) and \(2,\).*DataCollatorWithPadding"),
        ([{"ids": torch.ones(3)}, {"ids": torch.ones(2)}], r"'ids' .* same shape, but got \(2,\) and \(3,\)"),
        ([{"ids": []}, {"ids": [1]}], r"'ids' .* same shape, but got \(0,\) and \(1,\)"),
        ([{"ids": [[1], [1, 2]]}], "'ids' .* cannot be converted to a tensor"),
        ([{"words": ["a"]}, {"words": ["a", "b"]}], r"'words' .* same shape, but got \(1,\) and \(2,\)"),
        ([{"a": 1}, {"a": 1, "b": 1}], r"the same keys, but got \['a'\] and \['a', 'b'\]"),
        ([{"a": 1, "b": 1}, {"a": 1}], r"the same keys, but got \['a', 'b'\] and \['a'\]"),
    ],
)
def test_inconsistent_samples_raise(samples: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        collate_samples(samples)
