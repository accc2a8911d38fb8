"""The ``shardformer init`` command, which creates a commented run configuration from a template."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from shardformer.errors import ConfigError, suggest_similar_names


def load_run_config_templates() -> dict[str, str]:
    """Return all templates of run configurations as a dict from name to TOML text, in alphabetical order."""
    folder = files("shardformer") / "run_templates"
    found = [file for file in folder.iterdir() if file.name.endswith(".toml")]
    return {
        file.name.removesuffix(".toml"): file.read_text(encoding="utf-8")
        for file in sorted(found, key=lambda file: file.name)
    }


def get_template_description(template_text: str) -> str:
    """Return the description of a template, which is the comment in its first line."""
    return template_text.partition("\n")[0].lstrip("# ")


def _complete_template_name(incomplete: str) -> list[tuple[str, str]]:
    return [
        (name, get_template_description(text))
        for name, text in load_run_config_templates().items()
        if name.startswith(incomplete)
    ]


def init(
    template: Annotated[
        str | None,
        typer.Argument(
            metavar="[TEMPLATE]",
            help="Name of a template. If it is omitted, all templates are listed.",
            autocompletion=_complete_template_name,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write. Default: TEMPLATE.toml in the current folder.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="List the templates as JSON. Only without TEMPLATE.")] = False,
) -> None:
    """Create a commented run configuration from a template, or list the templates."""
    templates = load_run_config_templates()
    if template is None:
        _check_options_not_passed({"--out": out is not None, "--force": force}, "without a template")
        _print_templates(templates, as_json)
        return
    _check_options_not_passed({"--json": as_json}, "with a template")
    if template not in templates:
        raise ConfigError(f"There is no template {template!r}.", remedy=suggest_similar_names(template, templates))
    file = out if out is not None else Path(f"{template}.toml")
    if file.is_dir():
        path = file / f"{template}.toml"
        raise ConfigError(f"--out {file} is a folder.", remedy=f"Pass the path of a file, such as --out {path}.")
    if file.exists() and not force:
        raise ConfigError(
            f"The file {file} already exists.", remedy="Pass another file with --out, or --force to overwrite it."
        )
    try:
        file.write_text(templates[template], encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"The file {file} cannot be written: {error.strerror}.", remedy="Pass another file with --out."
        ) from error
    print(f"Wrote {file}. Edit [model] and [data], then run:\n  shardformer train -c {file} --dry-run")


def _check_options_not_passed(is_passed_by_option: dict[str, bool], condition_text: str) -> None:
    for name, is_passed in is_passed_by_option.items():
        if is_passed:
            raise ConfigError(f"{name} has no effect {condition_text}.", remedy=f"Remove {name}.")


def _print_templates(templates: dict[str, str], as_json: bool) -> None:
    about = {name: get_template_description(text) for name, text in templates.items()}
    if as_json:
        print(json.dumps(about, indent=2))
        return
    from shardformer.cli._options import print_help

    text = "Templates for run configurations. The command writes TEMPLATE.toml into the current folder."
    print_help("shardformer init TEMPLATE", text, [("Templates", list(about.items()))])
