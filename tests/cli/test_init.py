"""``shardformer init``: templates that are complete run configurations, with every key explained where it is used."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from shardformer.cli import main
from shardformer.cli.init import load_run_config_templates
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.train_command.config_schema import TrainConfig, load_train_config
from shardformer.train_command.dry_run import make_dry_run_report
from shardformer.train_command.run import run_training
from shardformer.training.metrics_log import read_metrics_records
from tests.runs.files import SMALL, labelled, write_images, write_rows, write_text

LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEMPLATES = load_run_config_templates()
ON_TWO_RANKS = [name for name in TEMPLATES if name != "pipeline-tensor"]


def tiny(name: str, folder: Path) -> TrainConfig:
    """A template as it is, with a small random model and small data."""
    kind = {"classify": "bert", "vision": "vit"}.get(name, "llama")
    fields = SMALL.get(kind, LLAMA)
    if kind == "vit":
        data = validation = write_images(folder)
    elif kind == "bert":
        data = validation = write_rows(folder, labelled())
    else:
        rows = [{"text": "the quick brown fox"}] * 32
        data = write_rows(folder, rows) if name == "instruct" else write_text(folder)
        validation = data
    config = ", ".join(f"{key} = {value}" for key, value in fields.items())
    changes = {
        "folder": folder / "run",
        "model.name": kind, "model.random": "true", "model.config": f"{{ {config} }}",
        "data.train": data, "data.batch_size": 4, "data.num_workers": "",
        "data.sequence_length": "" if kind == "vit" else 16,
        "training.steps": 2, "training.epochs": "", "parallel.micro_batches": "",
    }  # fmt: skip
    file = folder / f"{name}.toml"
    file.write_text(TEMPLATES[name], encoding="utf-8")
    if "validation" in tomllib.loads(TEMPLATES[name])["data"]:
        changes["data.validation"] = validation
    return load_train_config(file, [f"{key}={value}" for key, value in changes.items()])


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_dry_run_of_a_template_works(name: str, tmp_path: Path) -> None:
    made = tiny(name, tmp_path)
    report = make_dry_run_report(made)
    assert report.summary.num_steps == 2 and report.untraced_reason == ""
    assert max(report.axis_sizes.values()) == 2  # each template shows a layout of several processes
    text = TEMPLATES[name]
    assert f"-c {name}.toml" in text and f'folder = "runs/{name}"' in text
    assert max(map(len, text.splitlines())) <= 170


@pytest.mark.reduced(at_most=2)
@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_a_template_trains(name: str, pool2: WorkerPool, tmp_path: Path) -> None:
    made = tiny(name, tmp_path)
    pool2.run(run_training, made)
    losses = [record.values["loss"] for record in read_metrics_records(made.output_folder) if "loss" in record.values]
    assert len(losses) == 2
    assert (made.output_folder / "model/config.json").is_file()


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["init", *words])
    return int(ended.value.code or 0)


def test_init_writes_a_template_and_never_overwrites_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("pretrain") == 0
    assert Path("pretrain.toml").read_text(encoding="utf-8") == TEMPLATES["pretrain"]
    assert "shardformer train -c pretrain.toml --dry-run" in capsys.readouterr().out
    Path("pretrain.toml").write_text("mine", encoding="utf-8")
    assert run("pretrain") == 2
    assert "already exists" in capsys.readouterr().err
    assert Path("pretrain.toml").read_text(encoding="utf-8") == "mine"
    assert run("pretrain", "--force") == 0
    assert Path("pretrain.toml").read_text(encoding="utf-8") == TEMPLATES["pretrain"]
    assert run("vision", "--out", "other.toml") == 0
    assert Path("other.toml").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pretrian"], "Did you mean 'pretrain'?"),
        (["pretrain", "--out", "."], "is a folder"),
        (["pretrain", "--out", "none/x.toml"], "cannot be written"),
        (["pretrain", "--json"], "--json has no effect with a template"),
        (["--force"], "--force has no effect without a template"),
    ],
)
def test_invalid_options_raise(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*words) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_templates_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in TEMPLATES)
    assert run("--json") == 0
    assert list(json.loads(capsys.readouterr().out)) == list(TEMPLATES)
    assert len(TEMPLATES) == 7
