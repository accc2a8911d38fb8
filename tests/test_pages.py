"""The Python blocks and commands of the training pages run unchanged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import shardformer
from tests.scripts import run_line

DOCS = Path(__file__).resolve().parents[1] / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def small() -> dict[str, Any]:
    """Return a small model that computes a loss, an optimizer, a scheduler and data."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.randint(32, (16, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row[0] % 2} for row in rows]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    found = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data, "held_out": data[:6]}
    return {**found, "torch": torch, "shardformer": shardformer}


@pytest.mark.parametrize(
    "number", [i for i, block in enumerate(blocks("moving.md", "python")) if "compat." not in block]
)  # test_docs runs the block of the first API
def test_a_migrated_script_trains(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = small()
    exec(compile(blocks("moving.md", "python")[number], "moving.md", "exec"), names)
    assert names["engine"].steps == 2
    assert bool(torch.isfinite(names["loss"]))


def test_the_trainer_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = small()
    names["engine"] = shardformer.initialize(names["model"], names["optimizer"], train_data=names["data"], batch_size=8)
    page = blocks("training.md", "python")
    for block in (block for block in page if "notebook_launcher" not in block):  # run by test_notebook
        exec(compile(block, "training.md", "exec"), names)
    assert re.search(r"^step 6: 0\.\d{3}$", capsys.readouterr().out, re.MULTILINE)
    assert (tmp_path / "run" / "records.jsonl").is_file()


def test_the_learning_rate_hook_of_the_trainer_page_applies_to_the_rest_of_a_run() -> None:
    class Record(shardformer.hooks.Hook):
        def before_step(self, trainer: Any) -> None:
            rates.append(trainer.engine.optimizer.param_groups[0]["lr"])

    names, rates = small(), list[float]()
    parts = {"train_data": names["data"], "batch_size": 8, "scheduler": names["scheduler"]}
    engine = shardformer.initialize(names["model"], names["optimizer"], **parts)
    (block,) = (block for block in blocks("training.md", "python") if "HalveLearningRate" in block)
    exec(compile(block, "training.md", "exec"), names)
    shardformer.Trainer(engine, [names["HalveLearningRate"](2), Record()]).fit(steps=5)
    assert rates == [1e-3, 1e-3, 5e-4, 5e-4, 5e-4]


def test_the_trainer_page_lists_every_event() -> None:
    from shardformer.training.hook import HOOK_METHODS

    said = (DOCS / "training.md").read_text(encoding="utf-8")
    table = said[said.index("| method | called |") : said.index("## When something fails")]
    assert re.findall(r"`(\w+)(?:\([^)]*\))?`[,| ]", re.sub(r"\| [^|`]*\|\n", "|\n", table)) is not None
    places = [table.find(f"`{moment}`") for moment in HOOK_METHODS]
    assert -1 not in places
    assert places == sorted(places)


def test_the_engine_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block = blocks("engine.md", "python")[-1]
    names = small()
    exec(compile(block, "engine.md", "exec"), names)
    assert names["engine"].steps == 0


STEPS = {60: 6, 90: 9, 20: 2}
"""A tenth of the page's steps. Checkpoints and resuming do not depend on their number."""


def fewer_steps(text: str) -> str:
    """Divide the numbers of steps in a page's runs by ten. Each number must occur on the page."""
    number = r"\b((?:steps|training\.steps|every_steps) ?= ?)(\d+)"
    return re.sub(number, lambda found: f"{found[1]}{STEPS[int(found[2])]}", text)


@pytest.mark.slow
def test_the_first_run_page_runs(tmp_path: Path) -> None:
    (config,) = blocks("first-run.md", "toml")
    (tmp_path / "run.toml").write_text(fewer_steps(config), encoding="utf-8")
    code = blocks("first-run.md", "python")
    (tmp_path / "first.py").write_text(fewer_steps(code[1]), encoding="utf-8")
    commands = [fewer_steps(block.strip()) for block in blocks("first-run.md", "sh")]
    assert "pip install" in commands[0]
    commands[0] = commands[0].splitlines()[1]
    assert config.count("steps = 60") == code[1].count("steps=60") == 1 == commands[3].count("training.steps=9 ")
    said = "".join(run_line(command, tmp_path) for command in [*commands[:-1], f"python -c '{code[0]}'", commands[-1]])
    assert "Resuming from step 6." in said
    assert "step 9/9" in said
    for file in ("first/curves.png", "first/model/model.safetensors", "scripted/model/model.safetensors"):
        assert (tmp_path / file).is_file()
