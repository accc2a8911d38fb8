"""Micro-batches contain every sample once, and their merged outputs equal the output of the batch."""

from __future__ import annotations

import doctest
import re
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardformer.errors import ConfigError
from shardformer.gradient_accumulation import micro_batches as microbatches
from shardformer.gradient_accumulation.micro_batches import (
    compute_micro_batch_sizes,
    get_batch_size,
    merge_micro_batch_outputs,
    split_batch,
)


def test_micro_batch_doctests() -> None:
    assert doctest.testmod(microbatches).failed == 0


@given(st.integers(1, 50), st.integers(1, 50))
def test_sizes_cover_every_sample_once(batch_size: int, count: int) -> None:
    count = min(count, batch_size)
    sizes = compute_micro_batch_sizes(batch_size, count, None)
    assert len(sizes) == count and sum(sizes) == batch_size and max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    sizes = compute_micro_batch_sizes(batch_size, None, count)
    assert sum(sizes) == batch_size and set(sizes[:-1]) <= {count} and 0 < sizes[-1] <= count


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ((9, None), "micro_batches=9 is larger than the batch size 8"),
        ((None, None), "micro_batches=None and micro_batch_size=None"),
        ((2, 4), "micro_batches=2 and micro_batch_size=4"),
        ((0, None), "micro_batches=0"),
        ((None, -1), "micro_batch_size=-1"),
        ((2.0, None), "micro_batches=2.0"),
        ((True, None), "micro_batches=True"),
        ((None, "2"), "micro_batch_size='2'"),
    ],
)
def test_invalid_sizes_raise(asked: tuple[Any, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)):
        compute_micro_batch_sizes(8, *asked)


def test_size_above_batch_size_gives_one_micro_batch() -> None:
    assert compute_micro_batch_sizes(3, None, 8) == [3]


def test_batch_size_comes_from_main_input_or_first_tensor() -> None:
    batch = {"names": ["a"], "scale": torch.tensor(2.0), "mask": torch.zeros(5, 2), "input_ids": torch.zeros(4, 2)}
    assert get_batch_size(batch, "input_ids") == 4
    assert get_batch_size(batch) == get_batch_size(batch, "pixel_values") == get_batch_size(batch, "names") == 5
    assert get_batch_size({"nested": [{"x": torch.zeros(3)}]}) == 3
    assert get_batch_size(UserDict(batch), "input_ids") == 4


@pytest.mark.parametrize("batch", [{}, {"a": 1, "loss": torch.tensor(1.0)}])
def test_batch_without_tensors_raises(batch: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"\(a, loss\) contains no tensor" if batch else r"\(empty\) contains no tensor"
    ):
        get_batch_size(batch)


class Pair(NamedTuple):
    a: Any
    b: Any


def test_only_tensors_with_row_per_sample_are_split() -> None:
    ids, table, words = torch.arange(10).view(5, 2), torch.zeros(1, 2), ["a", "b", "c", "d", "e"]
    batch = {"input_ids": ids, "table": table, "words": words, "flag": True, "scale": torch.tensor(1.0), "none": None,
             "size": (5,) * 5,
             "deep": {"list": [ids, 1], "pair": Pair(ids, table), "tuple": (ids,)}}  # fmt: skip
    first, second = split_batch(batch, [3, 2], "input_ids")
    assert torch.equal(first["input_ids"], ids[:3]) and torch.equal(second["input_ids"], ids[3:])
    for part in (first, second):
        assert part["table"] is table and part["flag"] is True and part["none"] is None
        assert part["size"] == (5,) * 5 and part["scale"] is batch["scale"] and isinstance(part["deep"]["pair"], Pair)
        assert part["deep"]["pair"].b is table and part["deep"]["list"][1] == 1
    assert first["words"] == words[:3] and second["words"] == words[3:]
    assert torch.equal(second["deep"]["list"][0], ids[3:]) and torch.equal(second["deep"]["tuple"][0], ids[3:])
    assert torch.equal(second["deep"]["pair"].a, ids[3:])


def test_list_with_entry_per_sample_is_split() -> None:
    ids = torch.arange(6).view(3, 2)
    boxes = [{"boxes": torch.zeros(count, 4), "name": "x"} for count in (3, 1, 2)]
    batch = {"ids": ids, "words": ("a", "b", "c"), "boxes": boxes, "images": [torch.zeros(1, n) for n in (1, 2, 3)],
             "numbers": [7, 8, 9], "array": numpy.arange(3), "inputs": [ids, ids, ids], "pair": ["a", "b"]}  # fmt: skip
    first, second = split_batch(batch, [1, 2], "ids")
    assert (first["words"], second["words"]) == (("a",), ("b", "c"))
    assert [len(each["boxes"]) for each in second["boxes"]] == [1, 2] and len(first["boxes"]) == 1
    assert [x.shape[1] for x in second["images"]] == [2, 3]
    assert second["numbers"] == [8, 9] and second["array"].tolist() == [1, 2]
    assert [x.tolist() for x in first["inputs"]] == [[[0, 1]]] * 3 and second["pair"] == ["a", "b"]


def test_tokenizer_batch_is_split() -> None:
    from transformers import BatchEncoding

    batch = BatchEncoding({"input_ids": torch.arange(4), "attention_mask": torch.ones(4)})
    parts = split_batch(batch, [1, 3], "input_ids")
    assert [part["input_ids"].tolist() for part in parts] == [[0], [1, 2, 3]]
    assert all(type(part) is dict and len(part["attention_mask"]) == len(part["input_ids"]) for part in parts)


def test_sizes_of_another_batch_raise() -> None:
    with pytest.raises(ConfigError, match=re.escape("[2, 2] must sum to the batch size 5, but sum to 4")):
        split_batch({"x": torch.zeros(5)}, [2, 2], None)


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor
    more: tuple[Any, ...] | None = None


def test_merged_outputs_equal_outputs_of_batch() -> None:
    x = torch.arange(10).view(5, 2)
    parts = [Output(torch.tensor(1.0), x[:3], (x[:3], None, [7])), Output(torch.tensor(2.0), x[3:], (x[3:], None, [7]))]
    whole = merge_micro_batch_outputs(parts, [3, 2])
    assert isinstance(whole, Output) and whole.loss is None and torch.equal(whole.logits, x)
    assert whole.more is not None and torch.equal(whole.more[0], x) and whole.more[1:] == (None, [7])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.sampled_from([dict, OrderedDict, UserDict]))
def test_merge_inverts_split(sizes: list[int], kind: Any) -> None:
    total = sum(sizes)
    x = torch.arange(2 * total).view(total, 2)
    batch = {"x": x, "deep": kind(y=[x, Pair(x, 3)], z="same"), "n": 4, "none": None}
    whole = merge_micro_batch_outputs(split_batch(batch, sizes, "x"), sizes)
    assert torch.equal(whole["x"], x) and whole["n"] == 4 and whole["none"] is None
    assert type(whole["deep"]) is kind and whole["deep"]["z"] == "same" and torch.equal(whole["deep"]["y"][0], x)
    assert isinstance(whole["deep"]["y"][1], Pair) and torch.equal(whole["deep"]["y"][1].a, x)


def test_model_output_type_is_kept() -> None:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    x = torch.randn(3, 2)
    parts = [
        CausalLMOutputWithPast(loss=torch.tensor(1.0), logits=x[a:b], hidden_states=(x[a:b], x[a:b] * 2))
        for a, b in ((0, 2), (2, 3))
    ]
    whole = merge_micro_batch_outputs(parts, [2, 1])
    assert isinstance(whole, CausalLMOutputWithPast) and list(whole.keys()) == ["logits", "hidden_states"]
    assert torch.equal(whole.logits, x) and whole.loss is None and torch.equal(whole.hidden_states[1], x * 2)


def test_different_values_without_rows_become_none() -> None:
    table = torch.ones(7)
    one = {"a": 1, "same": table, "other": table, "list": [1], "array": table.numpy()}
    two = {"a": 2, "same": table, "other": table * 2, "list": [1, 2], "array": table.numpy() * 2}
    whole = merge_micro_batch_outputs([one, two], [2, 3])
    assert torch.equal(whole.pop("same"), table)
    assert whole == {"a": None, "other": None, "list": None, "array": None}


def test_gradients_flow_through_merge() -> None:
    parts = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    merge_micro_batch_outputs(parts, [2, 1]).sum().backward()
    assert all(part.grad is not None for part in parts)
