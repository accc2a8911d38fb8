"""``shardformer derive-policy``: prints the policy that is derived for a model, as Python to save and edit."""

from __future__ import annotations

from keyword import iskeyword
from typing import Annotated

import typer

from shardformer.cli._options import check_model_directory
from shardformer.errors import ConfigError


def derive_policy(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder that save_pretrained wrote, a config.json, a name on the Hugging Face hub, a family (bert, "
            "gpt2, vit, ...), or module:function, whose function gives a model.",
        ),
    ],
    name: Annotated[str, typer.Option(help="What to call the policy.")] = "MyPolicy",
) -> None:
    """Find a policy for MODEL, prove it on a small twin, and print it as a table of roles."""
    from shardformer.discovery.derive_policy import derive_policy as infer_policy
    from shardformer.discovery.derive_policy import policy_as_python
    from shardformer.verify.model_source import call_user_function, find_model

    if not name.isidentifier() or iskeyword(name):
        raise ConfigError(
            f"--name {name!r}", rule="It is the name of a class of Python", remedy="Write it as --name MyPolicy"
        )
    check_model_directory(model)
    source = find_model(model, dropout=False)
    if source.config is None:
        policy = infer_policy(call_user_function(source.model_fn, f"model_fn of {model}"))
    else:  # the weights are of no account
        source.config.architectures = [source.head]
        policy = infer_policy(source.config)
    print(policy_as_python(policy, name), end="")
