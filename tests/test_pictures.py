"""The pictures of the documentation are up to date, small, and explained where they are shown."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is an extra")


def test_every_picture_is_shown_with_a_description() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = [found for page in pages for found in re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", page.read_text("utf-8"))]
    assert {Path(path).name for _, path in shown} == {path.name for path in FOLDER.iterdir()}
    assert [path for alt, path in shown if len(alt) < 20] == []


@needs_matplotlib
def test_the_pictures_are_those_of_the_code(tmp_path: Path) -> None:
    from tests.pictures import draw, texts

    drawn = draw(tmp_path)
    assert {path.name for path in drawn} == {path.name for path in FOLDER.glob("*.svg")}
    for path in drawn:
        assert texts(path), path.name
        assert texts(FOLDER / path.name) == texts(path), f"{path.name}: run make pages"
        assert (FOLDER / path.name).stat().st_size < 60_000


@needs_matplotlib
def test_the_architecture_names_packages() -> None:
    from tests.pictures import texts

    named = re.findall(r"(\w+)/", " ".join(texts(FOLDER / "architecture.svg")))
    assert len(named) > 10
    assert [name for name in named if not (ROOT / "shardformer" / name / "__init__.py").is_file()] == []
