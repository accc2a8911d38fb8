"""Suggestions of known names in errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardformer.errors import ConfigError, check_choice, check_int, suggest_similar_names


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
    assert suggest_similar_names(name, known) == suggestion


@pytest.mark.parametrize(
    ("value", "choices", "remedy"),
    [
        (4, [None, 0, 1, 2, 3], "Set zero_stage=3"),
        ("2", [None, 0, 1, 2, 3], "Set zero_stage=2"),
        ("x", [None, 0, 1], "Set zero_stage=0"),
        ("gpip", ["gpipe", "1f1b"], "Did you mean 'gpipe'?"),
    ],
)
def test_the_remedy_names_the_choice_that_was_probably_meant(value: object, choices: list[object], remedy: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_choice("zero_stage", value, choices)
    assert raised.value.remedy == remedy
    with pytest.raises(ConfigError, match="Set tensor=2"):
        check_int("tensor", "2")


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ([], "the page 'add-a-model' of the documentation"),
        (["Source, https://x.org/s", "Documentation, https://x.org/d/"], "https://x.org/d/add-a-model/"),
    ],
)
def test_a_wheel_names_pages_that_its_user_can_find(
    urls: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remedy = "Write a policy (docs/add-a-model.md)"
    assert ConfigError("It failed.", remedy=remedy).remedy == remedy, "in a checkout"
    monkeypatch.setattr("shardformer.errors.DOCUMENTATION", tmp_path / "policies.md")
    monkeypatch.setattr("shardformer.errors._get_project_urls", lambda: urls)
    assert str(ConfigError("It failed.", remedy=remedy)) == f"It failed. Write a policy ({expected})."
