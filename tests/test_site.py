"""The documentation site has every page once, and its home page is the README."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]


def pages_in(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages_in(part)]


def test_the_navigation_contains_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(pages_in(nav)) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def render(name: str) -> str:
    spec = importlib.util.spec_from_file_location("mkdocs_hooks", ROOT / "mkdocs_hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    config = SimpleNamespace(nav=yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    page = SimpleNamespace(file=SimpleNamespace(src_path=name))
    return str(module.on_page_markdown(text, page=page, config=config))


def test_the_home_page_is_the_readme_with_links_inside_the_site() -> None:
    page = render("index.md")
    assert "# ShardFormer" in page and "](engine.md)" in page
    assert "](docs/" not in page and "](examples/" not in page
    assert "[Pipeline parallelism](pipeline.md)" in page and "[docs/" not in page


def test_no_page_links_to_a_file_outside_the_site() -> None:
    for path in (ROOT / "docs").glob("*.md"):
        text = re.sub(r"```.*?```", "", render(path.name), flags=re.DOTALL)
        assert "](../" not in text and "]: ../" not in text, path.name
    assert "[yes][" not in render("features.md")


def test_the_reference_names_public_objects() -> None:
    import shardformer

    names = re.findall(r"^::: shardformer\.([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert len(names) > 15
    for name in names:
        value: Any = shardformer
        for part in name.split("."):
            value = getattr(value, part)
        assert value.__doc__, name
