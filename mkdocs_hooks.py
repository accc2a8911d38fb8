"""Hook of mkdocs: the home page is the README, and links to files outside of the documentation become plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parent / "README.md"


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    if page.file.src_path == "index.md":
        markdown = README.read_text(encoding="utf-8")
        markdown = re.sub(r"\[([^\]]+)\]\((?!docs/|https?:|#)[^)]*\)", r"`\1`", markdown).replace("](docs/", "](")
    outside = set(re.findall(r"^\[([^\]^]+)\]: \.\./", markdown, re.MULTILINE))
    markdown = re.sub(r"^\[[^\]^]+\]: \.\./.*\n?", "", markdown, flags=re.MULTILINE)
    markdown = re.sub(r"\[([^\]^]+)\]\[([^\]^]+)\]", lambda m: m[1] if m[2] in outside else m[0], markdown)
    markdown = re.sub(r"\[(test_[\w.]+)\](?![(\[:])", r"`\1`", markdown)
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)
