"""mypy accepts a typical script of a user, and finds its mistakes."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import torch
import transformers

import shardformer
from shardformer.hooks import Hook


class Print(Hook):
    def after_step(self, trainer: shardformer.Trainer) -> None:
        print(trainer.step, trainer.values["loss"])


def main(model: transformers.LlamaForCausalLM, data: list[dict[str, torch.Tensor]]) -> None:
    reveal_type(shardformer.shard_model(model, enable_sequence_parallelism=True))  # LlamaForCausalLM
    parallel = shardformer.ParallelConfig(tensor=2)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = shardformer.initialize(model, optimizer, train_data=data, batch_size=4, parallel=parallel)
    for batch in engine.data:
        print(engine.train_step(batch).item())
    shardformer.Trainer(engine, [Print()]).fit(epochs=1)
    shardformer.shard_model(model, contxt=None)  # did you mean "context"?
    shardformer.ParallelConfig(tensr=2)  # did you mean "tensor"?
    shardformer.Trainer(engine).fit(epoch=1)  # did you mean "epochs"?
"""


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is one of the test tools")
def test_mypy_checks_the_script_of_a_user(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(SCRIPT, encoding="utf-8")
    options = ["--strict", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"), "--no-error-summary"]
    command = [sys.executable, "-m", "mypy", "--config-file", "", *options, str(file)]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found = {int(number) for number in re.findall(r"user\.py:(\d+): (?:error|note: Rev)", out)}
    marked = {i: line.split("  # ")[1] for i, line in enumerate(SCRIPT.splitlines(), 1) if "  # " in line}
    assert found == marked.keys(), out
    assert [text for text in marked.values() if text not in out] == [], out
