"""Command line interface of ShardFormer. Each module ``cli/<command>.py`` defines one command.

A command imports torch and other parts of the package inside its function, so that ``shardformer --help`` is fast. A
module may define ``CONTEXT_SETTINGS`` (to receive its arguments unparsed), ``RENAMED_OPTIONS``, and ``OPTION_GROUPS``,
the titles and options of its help screen. Modules with a leading underscore are not commands.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from shardformer.cli._options import ARGUMENTS, Groups, format_help_row, group_options_into_sections, print_help
from shardformer.errors import ConfigError, ShardFormerError, format_error_for_terminal, is_traceback_enabled

COMMAND_GROUPS = {
    "Train from a file": ("init", "train", "plot", "evaluate", "generate", "export"),
    "Train with a script": ("run",),
    "Inspect and check": ("check", "verify", "derive-policy", "draw"),
}
"""Title in ``shardformer --help`` -> commands, in the order in which you need them."""
WORKFLOW = """
shardformer init pretrain                      # writes pretrain.toml
shardformer train -c pretrain.toml --dry-run   # layout and memory per rank
shardformer train -c pretrain.toml             # run it again to resume
shardformer plot runs/pretrain                 # curves
shardformer generate runs/pretrain "Once upon a time"
"""
OLD_NAMES = {"infer": "derive_policy"}
"""Earlier name of a command -> its name. The earlier name still works, and is hidden from the help."""


def get_cli_command_names() -> list[str]:
    """Return the names of all commands in alphabetical order. Each module of this package is a command."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def build_app() -> typer.Typer:
    """Build the Typer application that contains all ``shardformer`` commands."""
    app = typer.Typer(
        name="shardformer",
        cls=CommandGroupWithHelpSections,
        help="Train an unmodified Hugging Face model across many devices.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_declare_global_options)
    for command in get_cli_command_names():
        module = import_module(f"{__name__}.{command}")
        settings = getattr(module, "CONTEXT_SETTINGS", {})
        # a command that receives its arguments unparsed prints its own help
        own_help = bool(settings.get("ignore_unknown_options"))
        app.command(
            name=command.replace("_", "-"),
            cls=_make_command_class(getattr(module, "RENAMED_OPTIONS", {}), getattr(module, "OPTION_GROUPS", {})),
            context_settings=settings,
            add_help_option=not own_help,
        )(getattr(module, command))
    for old, command in OLD_NAMES.items():
        app.command(name=old, hidden=True, cls=_make_command_class({}, {}))(
            getattr(import_module(f"{__name__}.{command}"), command)
        )
    return app


class CommandGroupWithHelpSections(TyperGroup):
    """Top-level ``shardformer`` command, with a help screen that groups the subcommands by purpose."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        about = {
            name: " ".join((command.help or "").split("\n\n")[0].split())
            for name, command in self.commands.items()
            if not command.hidden
        }
        grouped = {name for names in COMMAND_GROUPS.values() for name in names}
        groups = {**COMMAND_GROUPS, "Other commands": [name for name in about if name not in grouped]}
        sections = [
            (title, [(name, about[name]) for name in names if name in about]) for title, names in groups.items()
        ]
        options = [format_help_row(option) for option in self.get_params(ctx)]
        print_help("shardformer COMMAND [OPTIONS]", self.help or "", [*sections, ("Options", options)], WORKFLOW)


def _make_command_class(renamed_options: Mapping[str, str], option_groups: Groups) -> type[TyperCommand]:
    """Create a Typer command class that shows options in groups, and that raises ConfigError for renamed options."""

    class Command(TyperCommand):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            options = self.get_params(ctx)
            arguments = [format_help_row(each) for each in options if each.param_type_name == "argument"]
            required = [
                format_help_row(each)[0] for each in options if each.param_type_name == "option" and each.required
            ]
            words = [name for name, _ in arguments] + [name.split(", ")[-1] for name in required]
            usage = " ".join([ctx.command_path, *words, "[OPTIONS]"])
            others = [each for each in options if each.param_type_name != "argument"]
            print_help(
                usage, self.help or "", [("Arguments", arguments), *group_options_into_sections(others, option_groups)]
            )

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            ctx.meta[ARGUMENTS] = list(args)
            for word in args:
                old = word.partition("=")[0]
                if (new := renamed_options.get(old)) is not None:
                    raise ConfigError(f"The option {old} has been renamed to {new}.", remedy=f"Use {new} instead.")
            return super().parse_args(ctx, args)

    return Command


def _declare_global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=lambda on: _print_version_if_requested(on)
        ),
    ] = False,
) -> None:
    """Declare options of ``shardformer`` without a subcommand, such as ``--version``."""


def _print_version_if_requested(is_requested: bool) -> None:
    if is_requested:
        print(f"shardformer {version('shardformer')}")
        raise typer.Exit()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the ``shardformer`` command. A ``ShardFormerError`` is printed without traceback; the exit status is 2."""
    try:
        build_app()(None if argv is None else list(argv), prog_name="shardformer")
    except ShardFormerError as error:
        if is_traceback_enabled() or "TORCHELASTIC_RUN_ID" in os.environ:  # the launcher prints the errors of its ranks
            raise
        sys.stdout.flush()
        print(format_error_for_terminal(error), file=sys.stderr)
        sys.exit(2)
