"""The ``shardformer evaluate`` command, which computes the loss and metrics of a model on validation data."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardformer.cli._options import silence_transformers
from shardformer.cli.run import relaunch_command_in_processes
from shardformer.errors import ConfigError

if TYPE_CHECKING:
    from shardformer.train_command.trained_model import SavedModel

OPTION_GROUPS = {"Run": ("config", "changes"), "Output": ("as_json",)}


def evaluate(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder of a training run or of a checkpoint. With --config, also a folder written by "
            "save_pretrained, or a name on the Hugging Face Hub.",
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="Run configuration that specifies the data and the task."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a configuration key, such as data.validation=test.jsonl. Can be repeated.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
) -> None:
    """Compute the loss and metrics of a trained model on its validation data.

    The model is sharded as in training, but without ZeRO, because there is no optimizer. To change the layout, use
    --set, for example --set parallel.tensor=2. You get the same results under every layout.
    """
    silence_transformers()
    from shardformer.train_command.trained_model import evaluate_model

    found = _load_saved_model(model, config, list(changes or []))
    assert found.run is not None
    if not found.run.data.has_validation_data:
        raise ConfigError(
            f"The run configuration of {model!r} has no validation data.",
            remedy="Specify the validation data, for example with --set data.validation=test.jsonl.",
        )
    relaunch_command_in_processes(context, prod(size or 1 for size in found.run.layout.sizes.values()))
    values = evaluate_model(found)
    if values is not None:
        print(json.dumps(values, indent=2) if as_json else _format_metrics(values), flush=True)


def _load_saved_model(model_path: str, config: Path | None, config_overrides: list[str]) -> SavedModel:
    from dataclasses import replace

    from shardformer.train_command.config_schema import load_train_config
    from shardformer.train_command.trained_model import find_saved_model

    found = find_saved_model(model_path)
    if found.run is not None and config is not None:
        raise ConfigError(
            f"--config {config} has no effect, because {model_path!r} has its own run configuration.",
            remedy="Remove --config, or use --set to change keys of the run configuration.",
        )
    if found.run is not None:
        return found.with_config_overrides(config_overrides)
    if config is None:
        raise ConfigError(
            f"The validation data of {model_path!r} is unknown, because it has no run configuration.",
            remedy="Pass a run configuration with --config FILE, or pass the folder of a training run as MODEL.",
        )
    model_keys = [f"model.name={json.dumps(found.name)}", "model.random=", "model.config="]
    return replace(found, run=load_train_config(config, [*config_overrides, *model_keys]))


def _format_metrics(metrics: dict[str, float]) -> str:
    width = max(map(len, metrics))
    return "\n".join(f"{name:{width}}  {value:,.10g}" for name, value in metrics.items())
