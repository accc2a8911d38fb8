"""The table lora of a run trains adapters, equal under every layout, and exports them for PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardformer.errors import ConfigError
from shardformer.train_command.dry_run import make_dry_run_report
from shardformer.train_command.run import run_training
from shardformer.train_command.trained_model import find_saved_model
from shardformer.training.metrics_log import read_metrics_records
from tests.integrations.process import IntegrationProcess
from tests.runs.files import config, write_rows
from tests.runs.test_conversations import LLAMA, conversations

QUIET = {"progress": False, "throughput": False}


def made(where: Path, name: str, steps: int = 2, **tables: Any) -> Any:
    data = {"train": write_rows(where, conversations()), "sequence_length": 96, "batch_size": 4, "packing": True}
    lora = {"rank": 4, "use_dora": True, "modules_to_save": ["lm_head"], **tables.pop("lora", {})}
    return config(
        where, "gpt2", data, model={"name": "llama", "config": LLAMA}, hooks=QUIET, lora=lora,
        training={"steps": steps, "export": True}, folder=str(where / name), **tables,
    )  # fmt: skip


def train(where: Path, name: str, parallel: dict[str, Any], lora: dict[str, Any], steps: int = 2) -> list[float]:
    run = made(where, name, steps, parallel=parallel, lora=lora)
    run_training(run)
    return [record.values["loss"] for record in read_metrics_records(run.output_folder)]


def compare_exports(where: Path) -> tuple[float, float, int]:
    """Difference of the adapters of two runs, of the loss of a reloaded model, and the samples of a dry run."""
    import peft
    import transformers

    from shardformer.train_command.load_data import load_training_data

    run = made(where, "alone")
    files = [peft.utils.load_peft_weights(str(where / name / "model")) for name in ("alone", "split")]
    assert files[0].keys() == files[1].keys() and files[0]
    difference = max(float((files[0][name] - files[1][name]).abs().max()) for name in files[0])
    torch.manual_seed(run.seed)
    merged = transformers.AutoModelForCausalLM.from_pretrained(where / "merged" / "model")
    data = load_training_data(run)
    assert data.collate_fn is not None
    batch = data.collate_fn([data.train_dataset[0]])
    engine = find_saved_model(str(where / "alone")).load_engine(run.layout)
    expected = float(engine.model(**batch).loss)
    return (
        difference,
        abs(float(merged.eval()(**batch).loss) - expected),
        make_dry_run_report(run).summary.num_samples or 0,
    )


@pytest.mark.above_budget("trains four runs, two of them on two processes")
def test_adapters_are_trained_equally_and_exported(integrations: IntegrationProcess, tmp_path: Path) -> None:
    (alone,) = integrations(1).run(train, tmp_path, "alone", {}, {})
    assert alone[-1] < alone[0]
    for losses in integrations(2).run(train, tmp_path, "split", {"tensor": 2}, {}):
        assert losses == pytest.approx(alone, rel=1e-5)
    (merged,) = integrations(1).run(train, tmp_path, "merged", {}, {"merge": True})
    assert merged == alone
    ((difference, loss, samples),) = integrations(1).run(compare_exports, tmp_path)
    assert difference < 1e-5 and loss < 1e-5 and samples > 1


@pytest.mark.full
@pytest.mark.parametrize("parallel", [{"pipe": 2}, {"data": 2, "zero_stage": 2}, {"sequence": 2}], ids=str)
def test_every_layout_trains_adapters_equally(
    parallel: dict[str, Any], integrations: IntegrationProcess, tmp_path: Path
) -> None:
    (alone,) = integrations(1).run(train, tmp_path, "alone", {}, {})
    for losses in integrations(2).run(train, tmp_path, "split", parallel, {}):
        assert losses == pytest.approx(alone, rel=1e-5)


@pytest.mark.full
def test_a_resumed_run_continues_its_adapters(integrations: IntegrationProcess, tmp_path: Path) -> None:
    (whole,) = integrations(1).run(train, tmp_path, "whole", {}, {}, 4)
    integrations(1).run(train, tmp_path, "cut", {}, {}, 2)
    (cut,) = integrations(1).run(train, tmp_path, "cut", {}, {}, 4)
    assert cut == whole


def test_lora_without_peft_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"requires peft.*shardformer\[peft\]"):
        make_dry_run_report(made(tmp_path, "run"))
