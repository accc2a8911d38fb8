"""Pages of the documentation that are generated from the code. Write them with ``python -m tests.reference_pages``.

docs/configuration.md has the keys of a run configuration and its hooks, docs/commands.md the options of each command.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from shardformer.checkpoint.retention import CheckpointRetention
from shardformer.cli import build_app
from shardformer.train_command.build import DEFAULTS, FOLDERS, KNOWN_HOOKS, get_hook_constructor_arguments
from shardformer.train_command.config_schema import TrainConfig

DOCS = Path(__file__).resolve().parents[1] / "docs"
WRITTEN = "This page is generated from the code by `make pages`.\n"
EXAMPLE = """```toml
folder = "runs/shakespeare"

[model]
name = "gpt2"                 # a model type of transformers, with random weights
random = true
config = { n_embd = 64, n_layer = 2, n_head = 4 }

[data]
train = "shakespeare.txt"
batch_size = 8
sequence_length = 64

[parallel]
tensor = 2

[optimizer]
lr = 1e-3
weight_decay = 0.1

[schedule]
name = "cosine"
warmup = 0.1

[training]
steps = 100

[hooks]
throughput = { window = 50 }
tensor_board = true
gradient_monitor = { factor = 5.0 }
```
"""


def configuration_page() -> str:
    parts = [
        "# Run configuration\n",
        WRITTEN,
        "To train from a TOML file, run `shardformer train --config run.toml`. You can override every key on the "
        "command line, for example with `--set parallel.tensor=2`. Unknown keys, values of the wrong type and "
        "conflicting keys raise an error before the model or the data is loaded.\n",
        EXAMPLE,
    ]
    plain = {name: field for name, field in TrainConfig.model_fields.items() if _table(field.annotation) is None}
    parts += ["## Keys outside tables\n", _rows({n: f for n, f in plain.items() if n != "hooks"})]
    for name, field in TrainConfig.model_fields.items():
        table = _table(field.annotation)
        if table is not None:
            parts += [f"## [{name}]\n", f"{inspect.cleandoc(table.__doc__ or '')}\n", _rows(table.model_fields)]
    parts += ["## [hooks]\n", f"{TrainConfig.model_fields['hooks'].description}\n", *map(_hook, KNOWN_HOOKS)]
    return "\n".join(parts)


def _table(kind: Any) -> type[BaseModel] | None:
    kind = next((part for part in get_args(kind) if part is not type(None)), kind)  # an optional table
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _rows(fields: dict[str, Any]) -> str:
    lines = ["| key | type | by default | |", "|---|---|---|---|"]
    for name, field in fields.items():
        default = "required" if field.default is PydanticUndefined else _value(field.default)
        said = (field.description or "").replace("|", "\\|").replace("None: ", "By default ")
        said = said[:1].upper() + said[1:]
        lines.append(f"| `{name}` | {_kind(field.annotation)} | {default} | {said} |")
    return "\n".join(lines) + "\n"


def _kind(kind: Any) -> str:
    names = {
        str: "text",
        int: "integer",
        float: "number",
        bool: "true or false",
        dict: "table",
        Path: "text",
        CheckpointRetention: "table",
    }
    if kind in names:
        return names[kind]
    parts = [part for part in get_args(kind) if part is not type(None)]
    origin = getattr(kind, "__origin__", None)
    if str(kind).startswith("typing.Literal"):
        return "one of " + ", ".join(f"`{part}`" for part in parts)
    if origin is dict or "Mapping" in str(origin):
        return "table"
    if origin is list or "Sequence" in str(origin):
        return f"list of {_kind(parts[0])}"
    return " or ".join(dict.fromkeys(_kind(part) for part in parts))


def _value(value: Any) -> str:
    if value is None:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else repr(value)}`".replace("'", '"')


def _hook(key: str) -> str:
    kind = KNOWN_HOOKS[key]
    about = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[0].replace("``", "`")
    about = re.sub(r"^(>>>|\.\.\.) .*\n?", "", about, flags=re.MULTILINE)
    arguments: dict[str, Any] = dict(get_hook_constructor_arguments(kind))
    if "directory" in arguments:
        default = f"folder/{FOLDERS.get(key, key)}".removesuffix("/.")
        arguments["directory"] = replace(arguments["directory"], default=default)
    lines = [f"### {key}\n", *(["Enabled by default.\n"] if key in DEFAULTS else [])]
    return "\n".join([*lines, re.sub(r"\n{3,}", "\n\n", about).strip() + "\n", _rows(arguments)])


def commands_page() -> str:
    parts = ["# Commands\n", WRITTEN]
    group: Any = typer.main.get_command(build_app())
    for name, command in sorted(group.commands.items()):
        if command.hidden:
            continue
        parts += [f"## shardformer {name}\n", f"{inspect.cleandoc(command.help or '')}\n"]
        rows = [_option(parameter) for parameter in command.params if parameter.name != "help"]
        if rows:
            parts += ["| | by default | |", "|---|---|---|", *rows, ""]
        if name == "run":
            parts += ["You can pass all torchrun options, and `--hostfile` and `--host`. To list them, pass `-h`.\n"]
    return "\n".join(parts)


def _option(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in parameter.opts) if parameter.param_type_name == "option" else ""
    names = names or f"`{parameter.metavar or parameter.name.upper()}`"
    default = parameter.default
    shown = "" if default in (None, False, "", []) or callable(default) else f"`{getattr(default, 'value', default)}`"
    if isinstance(field_default := getattr(parameter, "show_default", None), str):
        shown = f"`{field_default}`"
    return f"| {names} | {shown} | {(getattr(parameter, 'help', '') or '').replace('|', chr(92) + '|')} |"


PAGES = {"configuration.md": configuration_page, "commands.md": commands_page}

if __name__ == "__main__":
    for file, page in PAGES.items():
        (DOCS / file).write_text(page(), encoding="utf-8")
