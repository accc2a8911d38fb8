"""The ``shardformer export`` command, which converts a checkpoint to a model folder for ``from_pretrained``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardformer.cli._options import silence_transformers
from shardformer.cli.run import relaunch_command_in_processes
from shardformer.errors import ConfigError

OPTION_GROUPS = {"Layout": ("tensor", "pipe"), "Output": ("as_json",)}


def export(
    context: typer.Context,
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="Folder of a training run, of its checkpoints, or of one checkpoint."
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Folder to which the model is written.")],
    tensor: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Tensor parallel size: the number of shards of every layer."),
    ] = 1,
    pipe: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Pipeline parallel size: the number of stages."),
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Convert a checkpoint to a model folder that from_pretrained can load, including the tokenizer.

    You can export a checkpoint from any layout. For a training run, the newest checkpoint is exported. If the full
    model does not fit into the memory of one process, pass --tensor or --pipe.
    """
    silence_transformers()
    from shardformer.config import ParallelConfig
    from shardformer.train_command.trained_model import find_saved_model
    from shardformer.weights.save_pretrained import check_export_directory, check_model_is_exportable

    found = find_saved_model(checkpoint)
    if found.checkpoint is None:
        raise ConfigError(
            f"Cannot export {checkpoint!r}, because it is already a model folder that from_pretrained can load.",
            remedy="Pass the folder of a training run or of a checkpoint.",
        )
    check_export_directory(output)
    processor = found.load_processor()
    check_model_is_exportable(found.build_lazy_model(), processor)
    relaunch_command_in_processes(context, tensor * pipe)
    engine = found.load_engine(ParallelConfig(tensor=tensor, pipe=pipe))
    engine.export(output, processor)
    if engine.is_first:
        result = {"checkpoint": str(found.checkpoint), "model": type(engine.model).__name__, "output": str(output)}
        line = f"Wrote the {result['model']} of {result['checkpoint']} to {output}"
        print(json.dumps(result, indent=2) if as_json else line, flush=True)
