"""The prose of the project is plain English: no private vocabulary, short sentences, errors with the value passed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.language import ROOT, check, project_files

GENERATED = {"coverage.md", "features.md"}
"""Pages whose text comes from results of other programs; the texts of these programs are checked."""


@pytest.mark.parametrize("folder", ["shardformer", "tests", "benchmarks", "examples", "docs", "."])
def test_the_prose_is_plain(folder: str) -> None:
    files = [path for path in project_files() if path.name not in GENERATED]
    parents = {path: path.relative_to(ROOT).parts[:-1] for path in files}
    chosen = [path for path in files if (parents[path][0] if parents[path] else ".") == folder]
    assert chosen
    findings = [str(finding) for path in chosen for finding in check(path)]
    assert findings == [], f"{len(findings)} texts to rewrite:\n" + "\n".join(findings[:40])


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ('"""A tensor that stands before another one."""', "private word"),
        ("x = 1  # the rank is told its place", "private word"),
        ("def test_nobody_can_tell() -> None: ...", "private word"),
        ('raise ConfigError("The ranks have come apart")', "private word"),
        ('Option(help="Ends when somebody could tell the two apart.")', "private word"),
        ('"""What a rank stores."""', "summary line"),
        ("x = 1  # outside of the block", "private word"),
        ("x = 1  # the lock is kept, also if the save fails", "private word"),
        ('raise ConfigError("Use for example two ranks")', "private word"),
        ('raise ConfigError("Supported are a list and a dict")', "private word"),
        ('"""It returns the shard."""', "summary line"),
        ('def check() -> bool:\n    """Whether the model is sharded."""', "summary line"),
        ("x = 1  # freed after the backward.", "private word"),
        ('"""Return the inputs of a forward of the model."""', "private word"),
        ('"""Shard the linears of a layer."""', "private word"),
        ('"""Return the attentions of a layer."""', "private word"),
        ("x = 1  # the model is in train mode", "private word"),
        ('"""Gather the weights. All ranks call it."""', "private word"),
        ('"""Return the norm; None if there is no gradient."""', "private word"),
        (f'"""The tensor is {"very " * 30}long."""', "long sentence"),
        ('raise ConfigError("tensor= must be an int.", remedy="Pass a number.")', "error without the value"),
        ('raise ConfigError("It has 3 layers.", remedy="Pass a number")', "error without a full stop"),
    ],
)
def test_each_kind_of_text_is_found(source: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "sample.py").write_text(source)
    assert [finding.kind for finding in check(tmp_path / "sample.py")] == [kind]


@pytest.mark.parametrize(
    "source",
    [
        '"""Return the local shard of a tensor."""',
        'raise ConfigError(f"tensor={size} does not divide num_heads={heads}")',
        'said = {"told": "stands"}  # `behind` is a name here',
        '"""Run the forward pass and the backward pass of a step."""',
        'class Layer:\n    @property\n    def is_sharded(self) -> bool:\n        """Whether the layer is sharded."""',
    ],
)
def test_plain_text_and_code_are_not_reported(source: str, tmp_path: Path) -> None:
    (tmp_path / "sample.py").write_text(source)
    assert list(check(tmp_path / "sample.py")) == []


def test_pages_are_checked_without_their_code(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# Title\n\n```python\nprint('nobody')\n```\n\nThe rank is told.\n")
    (finding,) = check(tmp_path / "page.md")
    assert (finding.kind, finding.line) == ("private word", 7)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("It runs on two ranks.", "unclear start"),
        ("**Both** options change the weights.", "unclear start"),
        ("These are medians of five runs.", "unclear start"),
        ("The following raise an error:", "unclear start"),
        ("```sh\nmake test\n```\n\nprints the result.", "continued sentence"),
        ("`python benchmarks/zero.py`: a LLaMA on two ranks.", "continued sentence"),
        ("A short sentence. " * 900, "long page"),
    ],
)
def test_each_kind_of_paragraph_is_found(text: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"# Title\n\n{text}\n")
    assert [finding.kind for finding in check(tmp_path / "page.md")] == [kind]


def test_paragraphs_with_a_subject_are_not_reported(tmp_path: Path) -> None:
    paragraphs = ["This page shows a run.", "torch raises no error.", "    make test", "| it | is a table |", "- one"]
    (tmp_path / "page.md").write_text("\n\n".join(paragraphs))
    assert list(check(tmp_path / "page.md")) == []


def unknown_arguments(tree: ast.AST) -> Iterator[str]:
    """Yield the names in ``Args`` sections that are no argument of the function or class."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        section = re.search(r"^Args:\n((?:    .*\n|\n)+)", f"{ast.get_docstring(node) or ''}\n", re.MULTILINE)
        lines = re.findall(r"^    ([\w*]+(?:, [\w*]+)*):", section[1], re.MULTILINE) if section else []
        documented = {name.strip("* ") for line in lines for name in line.split(",")}
        functions = [node] if isinstance(node, ast.FunctionDef) else [x for x in node.body if is_constructor(x)]
        known = {x.target.id for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)}
        known |= {x.arg for function in functions for x in ast.walk(function.args) if isinstance(x, ast.arg)}
        if not (isinstance(node, ast.ClassDef) and ("kwargs" in known or not known)):
            yield from (f"{node.name}: {name}" for name in sorted(documented - known))


def is_constructor(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name in ("__init__", "__new__", "forward")


def test_documented_arguments_exist() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "shardformer").rglob("*.py")}
    found = {str(path.relative_to(ROOT)): [*unknown_arguments(tree)] for path, tree in trees.items()}
    assert {file: arguments for file, arguments in found.items() if arguments} == {}


def test_an_unknown_argument_is_detected() -> None:
    docstring = "Add.\n\n    Args:\n        a, b: x.\n        options: y.\n    "
    source = f'def f(a: int, **options: int) -> None:\n    """{docstring}"""'
    assert [*unknown_arguments(ast.parse(source))] == ["f: b"]
