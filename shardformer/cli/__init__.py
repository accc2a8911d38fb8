"""Command line interface, in which each module ``cli/<command>.py`` defines the command of that name.

A command imports torch and other parts of the package inside its function, so that ``shardformer --help`` is fast. A
module may define ``CONTEXT_SETTINGS`` (to receive its arguments unparsed) and ``RENAMED_OPTIONS``. Modules with a
leading underscore are not commands.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from shardformer.errors import ConfigError, ShardFormerError, format_exception, wants_traceback

OLD_NAMES = {"infer": "derive_policy"}
"""Earlier name of a command -> its name. The earlier name still works, and is hidden from the help."""


def command_names() -> list[str]:
    """Return the names of the commands in alphabetical order, from the modules of this package."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def build_app() -> typer.Typer:
    """Build the typer application with all commands."""
    app = typer.Typer(
        name="shardformer",
        help="Train an unmodified Hugging Face model across many devices.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    for command in command_names():
        module = import_module(f"{__name__}.{command}")
        settings = getattr(module, "CONTEXT_SETTINGS", {})
        # a command that receives its arguments unparsed prints its own help
        own_help = bool(settings.get("ignore_unknown_options"))
        app.command(
            name=command.replace("_", "-"),
            cls=_make_command_class(getattr(module, "RENAMED_OPTIONS", {})),
            context_settings=settings,
            add_help_option=not own_help,
        )(getattr(module, command))
    for old, command in OLD_NAMES.items():
        app.command(name=old, hidden=True)(getattr(import_module(f"{__name__}.{command}"), command))
    return app


def _make_command_class(renamed: Mapping[str, str]) -> type[TyperCommand]:
    """Return a typer command class that raises ConfigError with the new name for a renamed option."""

    class Command(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            for word in args:
                old = word.partition("=")[0]
                if old in renamed:
                    raise ConfigError(f"{old} has been renamed to {renamed[old]}", remedy=f"Use {renamed[old]}")
            return super().parse_args(ctx, args)

    return Command


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=lambda on: _print_version(on))
    ] = False,
) -> None:
    """Receive the options that precede the command, such as ``--version``."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"shardformer {version('shardformer')}")
        raise typer.Exit()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. A ``ShardFormerError`` is printed without traceback, with exit status 2."""
    try:
        build_app()(None if arguments is None else list(arguments), prog_name="shardformer")
    except ShardFormerError as error:
        if wants_traceback():
            raise
        sys.stdout.flush()
        print(format_exception(error), file=sys.stderr)
        sys.exit(2)
