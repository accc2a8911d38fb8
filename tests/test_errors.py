"""Suggestions of known names in errors."""

from __future__ import annotations

import pytest

from shardformer.errors import did_you_mean


@pytest.mark.parametrize(
    ("name", "known", "suggestion"),
    [
        ("randum", ["random", "name", "head"], "Did you mean 'random'?"),
        ("Modle", ["BertModel", "BertForMaskedLM"], "Did you mean 'BertModel'?"),
        ("TENSOR", ["tensor", "sensor"], "Did you mean 'tensor'?"),
        ("warmup", ["warmup_ratio", "warmup_steps"], "Did you mean 'warmup_steps' or 'warmup_ratio'?"),
        ("lora", ["folder", "random"], "Known names: 'folder', 'random'."),
        ("lora", [], "No names are known."),
    ],
)
def test_only_similar_names_are_suggested(name: str, known: list[str], suggestion: str) -> None:
    assert did_you_mean(name, known) == suggestion
