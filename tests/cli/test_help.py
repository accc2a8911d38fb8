"""Help screens: groups of options, and commands that exist."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest
import typer

from shardformer.cli import COMMAND_GROUPS, build_app, get_cli_command_names, main

GROUP: Any = typer.main.get_command(build_app())
SCREENS = ["", *(name for name, command in GROUP.commands.items() if not command.hidden)]


def screen(command: str, capsys: pytest.CaptureFixture[str], width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", SCREENS)
def test_a_help_screen_fits_and_has_no_types_of_switches(
    command: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = screen(command, capsys, width, monkeypatch)
    assert max(map(len, shown.splitlines())) <= width
    assert not re.search(r"<(bool|str|int|float|Path)|\x1b|\.\.\.\w|[╭│]", shown)
    if command and command != "run":  # run shows the options of its own parser
        options = [each for each in GROUP.commands[command].params if each.param_type_name == "option"]
        for option in options:
            (long,) = (name for name in option.opts if name.startswith("--"))
            row = re.search(rf"^  (?:-\w, )?{long}(?=\s)(?: (\S+))?", shown, re.MULTILINE)
            assert row is not None, option.opts
            assert option.is_flag or re.search(r"[A-Z]|\|", row[1]), row[0]


@pytest.mark.parametrize("command", get_cli_command_names())
def test_the_groups_name_every_option_once(command: str) -> None:
    module = import_module(f"shardformer.cli.{command}")
    groups = getattr(module, "OPTION_GROUPS", {})
    names = [name for group in groups.values() for name in group]
    options = {
        each.name for each in GROUP.commands[command.replace("_", "-")].params if each.param_type_name == "option"
    }
    assert len(names) == len(set(names))
    assert not groups or set(names) == options - {"help"}


def test_the_first_screen_has_every_command_and_a_session_of_commands_that_exist(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = screen("", capsys, 80, monkeypatch)
    listed = [name for names in COMMAND_GROUPS.values() for name in names]
    assert sorted(listed) == sorted(SCREENS[1:])
    for line in re.findall(r"^  shardformer (.*?)(?: +#.*)?$", shown, re.MULTILINE):
        command, *words = line.split()
        known = {name for option in GROUP.commands[command].params for name in option.opts}
        assert {word for word in words if word.startswith("-")} <= known
    assert "--install-completion" in shown
