"""The options of a command as a dataclass, and flags that are generated from the fields of ``ParallelConfig``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError, LaunchError, did_you_mean
from shardformer.pipeline.partition import PARTITION_METHODS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from shardformer.verify.train_both import VerifyPipeline

T = TypeVar("T", bound="DataclassInstance")


@dataclass(frozen=True)
class ParallelFlags:
    """A flag for each of these fields of ``ParallelConfig``.

    Args:
        help: field -> its help; None: the description of the field.
    """

    help: Mapping[str, str | None]

    def parameters(self) -> list[Parameter]:
        described = ParallelConfig.described_fields()
        return [
            parallel_parameter(name, *described[name], default=None, help=text, shows_default=text is None)
            for name, text in self.help.items()
        ]

    def parse(self, given: dict[str, Any]) -> dict[str, Any]:
        """Takes the flags out of the arguments of a command: field -> value, of those that were passed."""
        found = {name: given.pop(name) for name in self.help}
        return {name: _parse(name, value) for name, value in found.items() if value is not None and value is not False}


def parallel_parameter(
    name: str, kind: Any, description: str, *, default: Any, help: str | None = None, shows_default: bool = True
) -> Parameter:
    """The flag of a field: its name with dashes, and its help."""
    kinds = [each for each in get_args(kind) or (kind,) if each is not type(None)]
    is_text = any(each not in (int, float, bool, str) for each in kinds) or str in kinds
    plain: Any = bool if kind is bool else str if is_text else kinds[0]
    flag = f"--{name.replace('_', '-')}"
    shown = ParallelConfig.__dataclass_fields__[name].default if shows_default else None
    option = typer.Option(
        *([flag] if plain is bool else []),
        metavar=None if plain is bool else name.rpartition("_")[2].upper(),
        help=help or description.replace("`", ""),
        show_default=str(shown) if isinstance(shown, str | int) and not isinstance(shown, bool) else False,
    )
    if plain is bool:
        return Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option])
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[plain | None, option])


def parallel_option(name: str) -> Any:
    """The ``typer.Option`` of a field of ``ParallelConfig``."""
    description = ParallelConfig.described_fields()[name][1]
    return typer.Option(metavar=name.rpartition("_")[2].upper(), help=description.replace("`", ""))


def _parse(name: str, value: Any) -> Any:
    if name in ("tensor", "sequence"):
        from shardformer.mesh.rank_grid import parse_axis_size

        return parse_axis_size(value, name)
    if name == "partition":
        return parse_partition(value)
    if name == "recompute_layers":
        counts = [part.strip() for part in value.split(",")]
        if not all(count.isdecimal() and len(count) < 5 for count in counts):
            raise ConfigError(
                f"--recompute-layers {value}",
                rule="It is a number of layers, or one for each virtual stage",
                remedy="Write --recompute-layers 2, or as --recompute-layers 2,0",
            )
        return int(counts[0]) if len(counts) == 1 else [int(count) for count in counts]
    return value


def options_from_dataclass(kind: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Makes a command of a function that takes one ``kind``, a dataclass.

    A field is ``Annotated`` with its help, with a ``typer.Option`` or ``typer.Argument``, or with ``ParallelFlags``,
    and then holds the values of these flags. A boolean field is a switch, ``--its-name``, without a ``--no-its-name``.
    """

    def decorate(verb: Callable[[T], None]) -> Callable[..., None]:
        hints = get_type_hints(kind, include_extras=True)
        flags = {n: f for n, hint in hints.items() for f in get_args(hint)[1:] if isinstance(f, ParallelFlags)}

        def called(**given: Any) -> None:
            verb(kind(**{name: each.parse(given) for name, each in flags.items()}, **given))

        parameters = [
            parameter
            for field in fields(kind)
            for parameter in (
                flags[field.name].parameters() if field.name in flags else [_parameter(field, hints[field.name])]
            )
        ]
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
    parallel: Mapping[str, Any], loss_weight: Callable[[Mapping[str, Any]], float] | None = None
) -> VerifyPipeline | None:
    """The pipeline of these fields of ``ParallelConfig``; None without ``pipe``.

    Raises ConfigError for numbers that the schedule does not support, before anything is loaded.
    """
    names = ("micro_batches", "schedule", "num_model_chunks", "partition", "recompute_layers")
    others = {name: parallel[name] for name in names if name in parallel}
    if "pipe" not in parallel:
        if others:
            given = [f"--{name.replace('_', '-')} {value}" for name, value in others.items()]
            raise ConfigError(
                f"{' '.join(given)} without --pipe",
                rule="These options configure a pipeline, and --pipe sets the number of its stages",
                remedy="Add --pipe 2, or leave them out",
            )
        return None
    from shardformer.verify.train_both import VerifyPipeline
    from shardformer.verify.verification import StageOptions

    micro_batches = others.pop("micro_batches", None)
    StageOptions(parallel["pipe"], micro_batches, **others)
    return VerifyPipeline(parallel["pipe"], micro_batches, others, loss_weight)


def parse_partition(given: str) -> str | Sequence[int]:
    """``balanced``, ``uniform``, or ``3,5``: the number of layers of each virtual stage."""
    if given in PARTITION_METHODS:
        return given
    counts = [part.strip() for part in given.split(",")]
    if all(count.isdecimal() and len(count) < 5 for count in counts):
        return [int(count) for count in counts]
    hint = did_you_mean(given, PARTITION_METHODS) if given.isalpha() else ""
    raise ConfigError(
        f"--partition {given}",
        rule="It is balanced, uniform, or the number of layers of each virtual stage",
        remedy=f"{hint} Write --partition balanced, --partition uniform, or as --partition 3,5".strip(),
    )
