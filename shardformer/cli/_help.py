"""Print help screens that group the options under titles. The options that a new user needs come first."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

MAX_WIDTH, NAMES_WIDTH = 110, 30
"""Maximum width of a screen, and of its column of option names, in characters."""
OTHER = "Other options"
"""Title of the options that are in no group."""
Groups = Mapping[str, Sequence[str]]
Section = tuple[str, Sequence[tuple[str, str]]]
"""Title, and for each option or command its name and its description."""


def print_help(usage: str, description: str, sections: Sequence[Section], example: str = "") -> None:
    """Print a help screen.

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

    def show(text: str, style: str = "") -> None:
        console.print(Text(text, style), soft_wrap=True)

    show(f"Usage: {usage}", "bold")
    for paragraph in inspect.cleandoc(description).split("\n\n"):
        show("\n" + textwrap.fill(" ".join(paragraph.split()), width))
    names = [name for _, rows in sections for name, _ in rows]
    column = min(max(map(len, names), default=0) + 4, NAMES_WIDTH)
    for title, rows in sections:
        if rows:
            show(f"\n{title}:", "bold")
        for name, text in rows:
            lines = textwrap.wrap(text, max(width - column, 20), break_on_hyphens=False) or [""]
            head = Text(f"  {name}", "cyan")
            if len(head) > column - 2:
                console.print(head, soft_wrap=True)
                head = Text()
            head.append(" " * (column - len(head)) + lines[0], "none")
            console.print(head, soft_wrap=True)
            for line in lines[1:]:
                show(" " * column + line)
    if example:
        show("\nExample:", "bold")
        for line in example.strip().splitlines():
            show(f"  {line}")


def format_option_row(option: Any) -> tuple[str, str]:
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


def group_options(options: Sequence[Any], groups: Groups) -> list[Section]:
    """Sort options into the sections of a help screen. Options that are in no group form the last section."""
    by_name = {str(option.name): option for option in options if not getattr(option, "hidden", False)}
    found: list[Section] = [
        (title, [format_option_row(by_name.pop(name)) for name in names if name in by_name])
        for title, names in groups.items()
    ]
    return [*found, (OTHER if groups else "Options", [format_option_row(option) for option in by_name.values()])]
