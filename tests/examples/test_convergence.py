"""examples/convergence.py fine-tunes a BERT with the same losses under every layout. Tests two layouts."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.scripts import run_line

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "convergence.py"
WORDS = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]",
    "he", "she", "they", "said", "did", "nothing", "much", "again", "today",
]  # fmt: skip


def save_model(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertModel(config).save_pretrained(folder)


def write_pairs(folder: Path) -> None:
    folder.mkdir()
    lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
    for i in range(20):
        first = " ".join(WORDS[5 + (i * j) % 9] for j in range(1, 6))
        lines.append(f"{i % 2}\t{i}\t{i}\t{first}\t{first[::-1] if i % 3 else first}")
    for part in ("train", "test"):
        (folder / f"msr_paraphrase_{part}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8-sig")


@pytest.mark.full
@pytest.mark.parametrize(
    "layouts",
    [{"sequence 2": "2"}, pytest.param({"sequence 2": "2", "pipe 2, data 2, ZeRO 1": "4"}, marks=pytest.mark.full)],
)
def test_all_layouts_have_the_same_losses(tmp_path: Path, layouts: dict[str, str]) -> None:
    save_model(tmp_path / "bert")
    write_pairs(tmp_path / "mrpc")
    options = f"--epochs 1 --out out --layouts {shlex.join(layouts)}"
    printed = run_line(f"python {SCRIPT} --data mrpc --model bert --all {options}", tmp_path)
    rows = re.findall(r"^\| (.*?) \| (\d) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", printed, re.MULTILINE)
    assert [(name, processes) for name, processes, *_ in rows] == [("one process", "1"), *layouts.items()]
    assert all(float(apart) < 1e-4 for *_, apart in rows)
    assert len({tuple(values[:3]) for _, _, *values in rows}) == 1
    assert (tmp_path / "out" / "convergence.png").stat().st_size > 10_000
    result = json.loads((tmp_path / "out" / "sequence-2" / "result.json").read_text())
    assert 0 <= result["validation/accuracy"] <= 1
