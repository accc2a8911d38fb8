"""Generate command-line options from dataclass fields, and check arguments of commands."""

from __future__ import annotations

import inspect
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError, LaunchError, suggest_similar_names
from shardformer.pipeline.partition import PARTITION_METHODS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


T = TypeVar("T", bound="DataclassInstance")


def options_from_dataclass(
    options_class: type[T], flags_by_field: Mapping[str, str] | None = None
) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Return a decorator that builds a Typer command with one option per field of a dataclass.

    The fields of ``options_class`` are ``Annotated`` with their help, a ``typer.Option`` or a ``typer.Argument``. A
    boolean field becomes a switch ``--name`` without ``--no-name``.

    Args:
        flags_by_field: field of ``ParallelConfig`` -> the help of its flag, or empty for the description of the field.
            Values that were passed are stored in ``options_class.parallel``.
    """
    flags_by_field = flags_by_field or {}

    def decorate(command: Callable[[T], None]) -> Callable[..., None]:
        def run_command(**field_values: Any) -> None:
            found = {name: field_values.pop(name) for name in flags_by_field}
            parallel = {
                n: _parse_parallel_config_value(n, v) for n, v in found.items() if v is not None and v is not False
            }
            command(options_class(**field_values, **({"parallel": parallel} if flags_by_field else {})))

        hints = get_type_hints(options_class, include_extras=True)
        of_kind = [
            _make_option_from_field(each, hints[each.name]) for each in fields(options_class) if each.name != "parallel"
        ]
        parameters = [
            *of_kind[:1],
            *(_make_parallel_config_option(name, text) for name, text in flags_by_field.items()),
            *of_kind[1:],
        ]
        run_command.__name__, run_command.__qualname__, run_command.__module__ = (
            command.__name__,
            command.__qualname__,
            command.__module__,
        )
        run_command.__doc__ = command.__doc__
        vars(run_command)["__signature__"] = Signature(parameters)
        run_command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run_command

    return decorate


def _make_option_from_field(field: Field[Any], type_hint: Any) -> Parameter:
    plain, help_or_option = get_args(type_hint)
    names = [f"--{field.name.replace('_', '-')}"] if plain is bool else []
    option = typer.Option(*names, help=help_or_option) if isinstance(help_or_option, str) else help_or_option
    default = Parameter.empty if field.default is MISSING else field.default
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[plain, option])


def _make_parallel_config_option(field_name: str, help_text: str) -> Parameter:
    """Create a command-line option that sets a field of ``ParallelConfig``. By default, the field is not set."""
    kind, _ = ParallelConfig.get_field_descriptions()[field_name]
    plain = next((each for each in (bool, int) if kind in (each, each | None)), str)
    option = parallel_config_option(
        field_name, help_text, *([f"--{field_name.replace('_', '-')}"] if plain is bool else [])
    )
    annotation = Annotated[bool, option] if plain is bool else Annotated[plain | None, option]
    return Parameter(
        field_name, Parameter.KEYWORD_ONLY, default=False if plain is bool else None, annotation=annotation
    )


METAVARS = {
    "tensor": "N", "sequence": "N", "context_parallel": "METHOD", "partition": "METHOD", "precision": "DTYPE",
    "average_loss_over": "ranks|tokens", "offload": "DEVICE",
}  # fmt: skip
"""Field of ``ParallelConfig`` -> metavar of its flag. By default N for a number, or the last word of the name."""


def parallel_config_option(field_name: str, help_text: str = "", *flag_names: str) -> Any:
    """Create a ``typer.Option`` that sets a ``ParallelConfig`` field. By default, its help describes the field."""
    default = getattr(ParallelConfig, field_name, None)
    is_number = ParallelConfig.get_field_descriptions()[field_name][0] in (int, int | None)
    return typer.Option(
        *flag_names,
        metavar=None
        if flag_names
        else METAVARS.get(field_name, "N" if is_number else field_name.rpartition("_")[2].upper()),
        help=help_text
        or ParallelConfig.get_field_descriptions()[field_name][1].replace("`", "").replace("None: ", "Default: "),
        show_default=str(default) if not help_text and default not in (None, False) else False,
    )


def _parse_parallel_config_value(field_name: str, value: Any) -> Any:
    if field_name in ("tensor", "sequence"):
        from shardformer.mesh.rank_grid import parse_axis_size

        return parse_axis_size(value, field_name)
    if field_name not in ("partition", "recompute_layers") or value in PARTITION_METHODS:
        return value
    counts = [part.strip() for part in value.split(",")]
    if all(count.isdecimal() and len(count) < 5 for count in counts):
        numbers = [int(count) for count in counts]
        return numbers[0] if len(numbers) == 1 and field_name == "recompute_layers" else numbers
    flag = f"--{field_name.replace('_', '-')}"
    alternatives = f", {flag} balanced or {flag} uniform" if field_name == "partition" else ""
    hint = f" {suggest_similar_names(value, PARTITION_METHODS)}" if alternatives and value.isalpha() else ""
    raise ConfigError(
        f"{flag} must list the number of layers of each stage, but got {value}.",
        remedy=f"Use {flag} 3,5{alternatives}.{hint}",
    )


def check_model_directory_has_config(model_path: str) -> None:
    """Raise ConfigError if ``model_path`` is a folder that does not contain a config.json."""
    from shardformer.verify.small_models import SMALL_CONFIGS

    folder = Path(model_path).expanduser()
    if model_path in SMALL_CONFIGS or not folder.is_dir() or (folder / "config.json").is_file():
        return
    inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
    example = f", such as {str(Path(model_path, inside[0]))!r}" if inside else ""
    raise ConfigError(
        f"The model folder {model_path!r} does not contain a config.json.",
        remedy=f"Pass a folder that save_pretrained created{example}.",
    )


ARGUMENTS = "shardformer.arguments"
"""Key of a typer context's ``meta`` for the words of the command line after the command."""


def silence_transformers() -> None:
    """Turn off the warnings and progress bars of transformers. Call this function before you import transformers.

    Environment variables of the user have precedence.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")


MAX_PROCESSES_PER_CORE = 128


def check_num_processes_within_limit(option_name: str, num_processes: int) -> None:
    """Raise LaunchError if ``num_processes`` exceeds the limit of 128 processes per CPU core of this machine."""
    cores = os.cpu_count() or 1
    limit = MAX_PROCESSES_PER_CORE * cores
    if num_processes > limit:
        number = num_processes if len(str(num_processes)) < 20 else "too many"
        raise LaunchError(
            f"{option_name:.60} would start {number} processes, but the limit on this machine is {limit}.",
            remedy="Start one process per device or per CPU core.",
        )


MAX_WIDTH, NAMES_WIDTH = 110, 30
"""Maximum width of a screen, and of its column of option names, in characters."""
OTHER = "Other options"
"""Title of the options that are in no group."""
Groups = Mapping[str, Sequence[str]]
Section = tuple[str, Sequence[tuple[str, str]]]
"""Title, and for each option or command its name and its description."""


def print_help(usage: str, description: str, sections: Sequence[Section], example: str = "") -> None:
    """Print the help screen of a command with its usage, description and options.

    Args:
        usage: the command with its arguments.
        description: paragraphs.
        sections: options or commands by group. An empty group is omitted.
        example: lines of a shell session, which are printed unchanged.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    width = min(console.width, MAX_WIDTH)

    def print_text(text: str, style: str = "") -> None:
        console.print(Text(text, style), soft_wrap=True)

    print_text(f"Usage: {usage}", "bold")
    for paragraph in inspect.cleandoc(description).split("\n\n"):
        print_text("\n" + textwrap.fill(" ".join(paragraph.split()), width))
    names = [name for _, rows in sections for name, _ in rows]
    column = min(max(map(len, names), default=0) + 4, NAMES_WIDTH)
    for title, rows in sections:
        if rows:
            print_text(f"\n{title}:", "bold")
        for name, text in rows:
            lines = textwrap.wrap(text, max(width - column, 20), break_on_hyphens=False) or [""]
            head = Text(f"  {name}", "cyan")
            if len(head) > column - 2:
                console.print(head, soft_wrap=True)
                head = Text()
            head.append(" " * (column - len(head)) + lines[0], "none")
            console.print(head, soft_wrap=True)
            for line in lines[1:]:
                print_text(" " * column + line)
    if example:
        print_text("\nExample:", "bold")
        for line in example.strip().splitlines():
            print_text(f"  {line}")


def format_help_row(option: Any) -> tuple[str, str]:
    """Format an option or argument of a Typer command, with its default value, as a row of the help screen."""
    if option.param_type_name == "argument":
        return str(option.metavar or option.name.upper()), str(option.help or "")
    value = "" if option.is_flag else f" {option.metavar or str(option.name).rpartition('_')[2].upper()}"
    names = sorted(option.opts, key=lambda name: name.startswith("--"))
    text, default = str(option.help or ""), option.default
    if isinstance(option.show_default, str):
        default = option.show_default
    default = getattr(default, "value", default)
    shown = (
        not option.is_flag and isinstance(default, (str, int, float)) and default != "" and bool(option.show_default)
    )
    if shown and not re.search(r"by default|\(default\)", text, re.IGNORECASE):
        text = f"{text} Default: {default}."
    return f"{', '.join(names)}{value}", text


def group_options_into_sections(options: Sequence[Any], option_names_by_group: Groups) -> list[Section]:
    """Sort options into the sections of a help screen. Options that are in no group form the last section."""
    by_name = {str(option.name): option for option in options if not getattr(option, "hidden", False)}
    found: list[Section] = [
        (title, [format_help_row(by_name.pop(name)) for name in names if name in by_name])
        for title, names in option_names_by_group.items()
    ]
    return [
        *found,
        (OTHER if option_names_by_group else "Options", [format_help_row(option) for option in by_name.values()]),
    ]
