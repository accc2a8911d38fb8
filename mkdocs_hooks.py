"""Hook of mkdocs: the home page is the README, and links show titles of pages instead of names of files.

Links to files outside of the documentation become plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parent / "README.md"


def _titles(nav: list[Any]) -> Iterator[tuple[str, str]]:
    """Yield the file and the title of each page in the navigation."""
    for title, value in (pair for entry in nav for pair in entry.items()):
        yield from _titles(value) if isinstance(value, list) else [(value, title)]


def on_page_markdown(markdown: str, page: Any, config: Any, **kwargs: Any) -> str:
    if page.file.src_path == "index.md":
        markdown = README.read_text(encoding="utf-8")
        markdown = re.sub(r"\[([^\]]+)\]\((?!docs/|https?:|#)[^)]*\)", r"`\1`", markdown).replace("](docs/", "](")
    titles = dict(_titles(config.nav))
    named = r"\[(?:docs/)?([\w-]+\.md)\](?=\(\1)"  # a link whose text is the name of its file
    markdown = re.sub(named, lambda m: f"[{titles.get(m[1], m[1])}]", markdown)
    outside = set(re.findall(r"^\[([^\]^]+)\]: \.\./", markdown, re.MULTILINE))
    markdown = re.sub(r"^\[[^\]^]+\]: \.\./.*\n?", "", markdown, flags=re.MULTILINE)
    markdown = re.sub(r"\[([^\]^]+)\]\[([^\]^]+)\]", lambda m: m[1] if m[2] in outside else m[0], markdown)
    markdown = re.sub(r"\[(test_[\w.]+)\](?![(\[:])", r"`\1`", markdown)
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)
