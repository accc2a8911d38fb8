"""The ``shardformer derive-policy`` command, which derives a sharding policy for a model as Python code."""

from __future__ import annotations

import json
from keyword import iskeyword
from typing import Annotated

import typer

from shardformer.cli._options import check_model_directory_has_config
from shardformer.errors import ConfigError


def derive_policy(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model family such as gpt2, a folder written by save_pretrained, a config.json, or a name on the "
            "Hugging Face Hub. For your own model, module:function, where the function returns a model, "
            "(model_fn, batch_fn) or a dict of both.",
        ),
    ],
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the generated policy class.")] = "MyPolicy",
    as_json: Annotated[bool, typer.Option("--json", help="Print the class name and the code as JSON.")] = False,
) -> None:
    """Derive a sharding policy for MODEL, validate it on a small copy of the model, and print it as Python code."""
    from shardformer.discovery.derive_policy import derive_policy as infer_policy
    from shardformer.discovery.derive_policy import format_policy_source_with_notes
    from shardformer.verify.model_source import call_user_fn_and_convert_errors, find_model_source

    if not name.isidentifier() or iskeyword(name):
        raise ConfigError(
            f"--name {name!r} is not a valid Python class name.", remedy="Pass a class name, such as MyPolicy."
        )
    check_model_directory_has_config(model)
    source = find_model_source(model, use_dropout=False)
    if source.config is None:
        batch_fn = source.user_overrides.get("batch_fn")
        batch = (
            call_user_fn_and_convert_errors(lambda: batch_fn(0), f"batch_fn of {model}")
            if batch_fn is not None
            else None
        )
        policy = infer_policy(call_user_fn_and_convert_errors(source.model_fn, f"model_fn of {model}"), batch)
    else:  # the weights are not needed
        source.config.architectures = [source.head]
        policy = infer_policy(source.config)
    code = format_policy_source_with_notes(policy, name)
    print(json.dumps({"model": model, "name": name, "code": code}) if as_json else code.rstrip("\n"))
