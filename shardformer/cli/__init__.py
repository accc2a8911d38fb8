"""The command line: one file a verb. ``cli/<verb>.py`` defines ``def <verb>(...)`` and is found by itself.

A verb's module imports torch and the rest of the package inside its function, so that ``shardformer --help`` is fast.
It may say ``CONTEXT_SETTINGS = {...}`` to take its arguments unparsed. A name with a leading underscore is no verb.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Annotated

import typer

from shardformer.errors import ShardFormerError, format_exception, wants_traceback

OLD_NAMES = {"infer": "derive_policy"}
"""Earlier name of a command -> the command. It still runs, and is not listed."""


def verbs() -> list[str]:
    """The commands, in alphabetical order: the modules of this package that have no leading underscore."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def build_app() -> typer.Typer:
    """The typer application with every verb in it."""
    app = typer.Typer(
        name="shardformer",
        help="Train an unmodified HuggingFace model split over many processes.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    for verb in verbs():
        module = import_module(f"{__name__}.{verb}")
        settings = getattr(module, "CONTEXT_SETTINGS", {})
        # A verb that takes its arguments unparsed prints its own help.
        own_help = bool(settings.get("ignore_unknown_options"))
        app.command(name=verb.replace("_", "-"), context_settings=settings, add_help_option=not own_help)(
            getattr(module, verb)
        )
    for old, verb in OLD_NAMES.items():
        app.command(name=old, hidden=True)(getattr(import_module(f"{__name__}.{verb}"), verb))
    return app


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=lambda on: _print_version(on))
    ] = False,
) -> None:
    """Options that come before the verb."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"shardformer {version('shardformer')}")
        raise typer.Exit()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. An error of ours becomes its message and exit status 2; anything else keeps its traceback."""
    try:
        build_app()(None if arguments is None else list(arguments), prog_name="shardformer")
    except ShardFormerError as error:
        if wants_traceback():
            raise
        sys.stdout.flush()
        print(format_exception(error), file=sys.stderr)
        sys.exit(2)
