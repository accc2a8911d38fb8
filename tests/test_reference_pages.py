"""Generated pages of the documentation match the code."""

from __future__ import annotations

import re
import tomllib

import pytest

from shardformer.train_command.build import KNOWN_HOOKS
from shardformer.train_command.config_schema import TrainConfig, parse_train_config
from tests.reference_pages import DOCS, PAGES


@pytest.mark.parametrize("page", PAGES)
def test_the_page_matches_the_code(page: str) -> None:
    assert (DOCS / page).read_text(encoding="utf-8") == PAGES[page](), "run: make pages"


def test_every_key_and_hook_is_documented() -> None:
    said = PAGES["configuration.md"]()
    assert [
        name for name in TrainConfig.model_fields if f"## [{name}]" not in said and f"| `{name}` |" not in said
    ] == []
    assert [name for name in KNOWN_HOOKS if f"### {name}" not in said] == []
    assert re.search(r"\|  \|\n", said) is None  # every option has a description


def test_the_example_is_a_valid_config() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", (DOCS / "configuration.md").read_text(encoding="utf-8"), re.DOTALL)
    assert parse_train_config(tomllib.loads(example), "example").layout.tensor == 2
