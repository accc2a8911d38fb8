"""The example files of docs/lazy-init.md run and print the output on the page."""

from __future__ import annotations

import io
import os
import re
import runpy
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path

import pytest

from shardformer.local_ranks.worker_pool import WorkerPool

PAGE = (Path(__file__).parents[2] / "docs" / "lazy-init.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(python|text)\n(.*?)```", PAGE, flags=re.DOTALL)
FILES = {text.split("\n", 1)[0].removeprefix("# "): text for kind, text in BLOCKS if kind == "python"}
PRINTED = {
    source.split("\n", 1)[0].removeprefix("# "): out for (_, source), (kind, out) in pairwise(BLOCKS) if kind == "text"
}


def run_file(path: str) -> str:
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    before, out = os.getcwd(), io.StringIO()
    os.chdir(Path(path).parent)
    try:
        with redirect_stdout(out):
            runpy.run_path(path)
    finally:
        os.chdir(before)
    return out.getvalue()


def test_the_page_contains_these_files() -> None:
    assert list(FILES) == ["random_weights.py", "save.py", "saved_weights.py", "whole.py"]


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("name", PRINTED)
def test_a_file_prints_the_output_on_the_page(pool2: WorkerPool, tmp_path: Path, name: str) -> None:
    for file in ("save.py", name):
        (tmp_path / file).write_text(FILES[file])
    if name == "saved_weights.py":
        run_file(str(tmp_path / "save.py"))
    assert pool2.run(run_file, str(tmp_path / name)) == [PRINTED[name]] * 2
