"""docs/add-a-model.md: its files and commands run in order, in an empty folder."""

from __future__ import annotations

import re
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from shardformer.pipeline.layer_sequence import PipelineHints, SequenceParallelHints
from shardformer.policies.roles import MLP, Attention, AttentionInputs, AttentionProjections, Experts, LayerStack
from tests.scripts import run_line

pytestmark = pytest.mark.slow

ROLES = (
    Attention,
    AttentionProjections,
    AttentionInputs,
    MLP,
    Experts,
    LayerStack,
    PipelineHints,
    SequenceParallelHints,
)
ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "add-a-model.md").read_text(encoding="utf-8")
FILES = {
    text.split("\n", 1)[0].removeprefix("# "): text
    for text in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
}
COMMANDS = [
    line for text in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL) for line in text.splitlines() if line
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with the page's files, the model saved by its first file, and the policy derived from it."""
    folder = tmp_path_factory.mktemp("page")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    run_line("python save.py", folder)
    for line in COMMANDS:
        if "derive-policy" in line:
            run_line(line, folder)
    return folder


def test_the_page_has_the_tested_files_and_commands() -> None:
    assert list(FILES) == ["save.py", "phi.py", "nystromformer.py", "train.py", "net.py"]
    assert [line.split()[1] for line in COMMANDS] == [
        "derive-policy",
        "derive-policy",
        "verify",
        "verify",
        "verify",
        "run",
        "derive-policy",
        "verify",
    ]


def test_the_output_equals_the_page(folder: Path) -> None:
    printed = runpy.run_path(str(folder / "phi.py"))["PhiPolicy"]
    names: dict[str, Any] = {}
    exec(FILES["phi.py"], names)
    for name in ("stack", "embeddings", "head", "keep_replicated"):
        assert getattr(printed, name) == getattr(names["PhiPolicy"], name)
    assert "Replicated, because" not in (folder / "phi.py").read_text()


def test_comments_list_the_modules_that_were_not_understood(folder: Path) -> None:
    text = (folder / "found.py").read_text().replace("\n#   ", " ")  # long comments are wrapped
    (why,) = [line for line in text.splitlines() if line.startswith("#") and "layer.*.attention.self.query" in line]
    assert "groups=6, weight of size [6, 1, 65, 1]" in why and "to have 6 channels, but got 3" in why


def test_the_policy_of_a_plain_module_is_derived(folder: Path) -> None:
    policy = runpy.run_path(str(folder / "net_policy.py"))["NetPolicy"]
    attention, mlp = policy.stack.blocks
    assert (attention.projections.q, attention.num_heads, mlp.at) == ("query", 6, "up")


@pytest.mark.full
@pytest.mark.parametrize("line", [line for line in COMMANDS if "verify" in line])
def test_the_finished_policy_passes_verify(folder: Path, line: str) -> None:
    assert "PASS: " in run_line(line, folder)


def test_a_registered_policy_is_used(folder: Path) -> None:
    (line,) = [line for line in COMMANDS if " run " in line]
    said = run_line(line, folder)
    assert "by the policy registered by the user for 'nystromformer'" in said
    assert re.search(r"attention\.self\.query, key, value +Linear +Linear1D_Col", said)


def test_every_documented_forward_role_exists() -> None:
    words = re.findall(r"(\w+)=", PAGE[PAGE.index("| property of the forward pass |") : PAGE.index("[roles]")])
    assert set(words) <= {field.name for kind in ROLES for field in fields(kind)}


def test_the_edited_lines_exist_in_the_template() -> None:
    for name, words in re.findall(r"^\| `(\w+/\w+\.py)` \| (.*) \|$", PAGE, re.MULTILINE):
        text = (ROOT / "shardformer" / name).read_text(encoding="utf-8")
        assert all(re.search(rf"^{word}\b", text, re.MULTILINE) for word in re.findall(r"`([A-Z_]+)`", words))
    assert 'PolicyLocation("' in (ROOT / "shardformer" / "policies" / "policy.py").read_text(encoding="utf-8")
