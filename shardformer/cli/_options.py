"""Options that several commands share, and their checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from shardformer.errors import ConfigError, LaunchError, did_you_mean
from shardformer.pipeline.partition import PARTITION_METHODS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from _typeshed import DataclassInstance

    from shardformer.verify.train_both import VerifyPipeline

T = TypeVar("T", bound="DataclassInstance")


def options_from_dataclass(kind: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Makes a verb of a function that takes one ``kind``, a dataclass.

    A field is ``Annotated`` with what its help says, or with a ``typer.Option`` or ``typer.Argument`` of its own. One
    that is true or false is a switch, ``--its-name``, without a ``--no-its-name``.
    """

    def decorate(verb: Callable[[T], None]) -> Callable[..., None]:
        def called(**given: Any) -> None:
            verb(kind(**given))

        hints = get_type_hints(kind, include_extras=True)
        parameters = [_parameter(field, hints[field.name]) for field in fields(kind)]
        called.__name__, called.__qualname__, called.__module__ = verb.__name__, verb.__qualname__, verb.__module__
        called.__doc__ = verb.__doc__
        vars(called)["__signature__"] = Signature(parameters)
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate


def _parameter(field: Field[Any], hint: Any) -> Parameter:
    plain, said = get_args(hint)
    names = [f"--{field.name.replace('_', '-')}"] if plain is bool else []
    option = typer.Option(*names, help=said) if isinstance(said, str) else said
    default = Parameter.empty if field.default is MISSING else field.default
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[plain, option])


def check_model_directory(model: str) -> None:
    """Raises ConfigError for a folder without a config.json; anything else that MODEL may be is left to others."""
    from shardformer.verify.small_models import SMALL_CONFIGS

    folder = Path(model).expanduser()
    if model in SMALL_CONFIGS or not folder.is_dir() or (folder / "config.json").is_file():
        return
    inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
    raise ConfigError(
        f"There is no config.json in the folder {model!r}",
        rule="A model's folder is one that save_pretrained wrote: it holds a config.json",
        remedy=f"Give {str(Path(model, inside[0]))!r}" if inside else "Correct the path, or save the model there",
    )


EACH = 128
"""A core: far more than train well, and no machine is brought to its knees by a digit too many."""


def check_num_processes(asked: str, count: int) -> None:
    """Raises LaunchError for more processes than a machine of this size can start."""
    cores = os.cpu_count() or 1
    if count > EACH * cores:
        raise LaunchError(
            f"{asked} gives {count} processes" if len(str(count)) < 20 else f"{asked:.60} gives too many processes",
            rule=f"A machine starts {EACH} processes a core at the most, and this one has {cores}",
            remedy=f"Use {EACH * cores} or fewer, best no more than it has devices or cores",
        )


def pipeline_options(
    pipe: int | None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    cut: str | None = None,
    loss_weight: Callable[[Mapping[str, Any]], float] | None = None,
) -> VerifyPipeline | None:
    """What the options say, None where they ask for no pipeline.

    Raises ConfigError for what no schedule can do, before anything is loaded.
    """
    others = {"micro-batches": micro_batches, "schedule": schedule, "chunks": chunks, "cut": cut}
    if pipe is None:
        given = [f"--{name} {value}" for name, value in others.items() if value is not None]
        if given:
            raise ConfigError(
                f"{' '.join(given)} without --pipe",
                rule="These options say how a pipeline runs, and --pipe over how many stages",
                remedy="Add --pipe 2, or leave them out",
            )
        return None
    from shardformer.verify.train_both import VerifyPipeline
    from shardformer.verify.verification import StageOptions

    asked = {"schedule": schedule, "num_model_chunks": chunks, "cut": None if cut is None else parse_partition(cut)}
    found = VerifyPipeline(pipe, micro_batches, {n: v for n, v in asked.items() if v is not None}, loss_weight)
    StageOptions(pipe, micro_batches, **found.stages)
    return found


def parse_partition(given: str) -> str | Sequence[int]:
    """``cost``, ``even``, or ``3,5``: how many layers each virtual stage has."""
    if given in PARTITION_METHODS:
        return given
    counts = [part.strip() for part in given.split(",")]
    if all(count.isdecimal() and len(count) < 5 for count in counts):
        return [int(count) for count in counts]
    hint = did_you_mean(given, PARTITION_METHODS) if given.isalpha() else ""
    raise ConfigError(
        f"--cut {given}",
        rule="Layers are cut into stages by cost, evenly, or by a list of how many each virtual stage has",
        remedy=f"{hint} Write --cut cost, --cut even, or as --cut 3,5".strip(),
    )
