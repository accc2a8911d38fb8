"""What to write where no policy was found: the way out that fits the reason."""

from __future__ import annotations

from textwrap import indent

from torch import nn

from shardformer.errors import PolicyError, nearest
from shardformer.policies.infer.infer import NothingCutError, infer_stacks
from shardformer.policies.registry import FAMILIES, family_of
from shardformer.testing.zoo.inputs import UnknownInputsError, needed_by

EXAMPLE = """
    import shardformer
    from shardformer import MLP, Attention, Projections, RolePolicy, Stack

    class MyPolicy(RolePolicy):
        stack = Stack("layers", [                # the ModuleList of layers; what follows stands in each of them
            Attention("attn", Projections(q="q", k="k", v="v", out="o"), counts={"num_heads": "heads"}),
            MLP("mlp", up="fc1", down="fc2"),
        ])
        embeddings = "embed"                     # over the vocabulary
        num_heads = 4                            # or the name of the config's field that says it

    model = shardformer.shard_model(model, policy=MyPolicy)
"""

IN_ITS_FORWARD = (
    "Where its attention takes heads apart, let the number of heads, and the width of all, be -1 or an attribute that "
    "counts= names: a rank has a part of them. Then the nearest policy does"
)


def no_policy(model: nn.Module, error: PolicyError, tensor: int | None) -> PolicyError:
    """The error for a model that no policy was given for, none is registered for, and none could be inferred for.

    Args:
        error: that of the inference.
        tensor: over how many ranks matrices were to be cut, where that is known.
    """
    family, name = family_of(model), type(model).__name__
    not_inferred = error.what.partition(" could be inferred: ")[2] or error.what
    if isinstance(error, UnknownInputsError) and family is None:
        return _fed(model, not_inferred)
    if isinstance(error, NothingCutError):
        return _uncut(model, not_inferred, tensor, error.nearest)
    tried = f"it is of the model type {family!r}" if family else "it has no config with a model type"
    return PolicyError(
        f"No policy for {name}: {tried}, no policy was given, and none was found by inference: {not_inferred}",
        rule=f"The registered families are {', '.join(FAMILIES)}",
        remedy=(f"{nearest(family, FAMILIES)} " if family else "")
        + f"Say what the model is made of (docs/policies.md):\n{EXAMPLE}",
    )


def _fed(model: nn.Module, problem: str) -> PolicyError:
    batch = ", ".join(f'"{name}": ...' for name in needed_by(model))
    why = problem[:1].lower() + problem[1:]
    return PolicyError(
        f"No policy for {type(model).__name__}: it is found in one forward, and {why}",
        rule="Tokens, images and sound are made up by the names of the forward's arguments; what others take, nobody "
        "can know",
        remedy="Give one small batch, on all ranks alike:\n\n"
        f"    policy = shardformer.infer(model, batch={{{batch}}})\n"
        "    model = shardformer.shard_model(model, policy=policy)\n\n"
        "or say what the model is made of (docs/policies.md)",
    )


def _uncut(model: nn.Module, reasons: str, tensor: int | None, nearest_table: str) -> PolicyError:
    name = type(model).__name__
    asked = f"tensor={tensor} for {name}" if tensor else name
    stacks = infer_stacks(model)
    if not stacks.stack:
        pipe = f"A pipeline has no stack of layers to cut in {name}"
    elif stacks.against_pipeline:
        pipe = f"A pipeline does not serve {name} ({stacks.against_pipeline})"
    else:
        pipe = "Or stages: launch_from_torch(pipe=2)"
    table = f"{IN_ITS_FORWARD}:\n{indent(nearest_table, '    ')}\nOr leave" if nearest_table else "Leave"
    return PolicyError(
        f"{asked}: nothing of its layers can be cut by tensor parallelism ({reasons})",
        rule="Cut is a block of linears of which one gives what the other takes: an attention by its heads, an MLP by "
        "its features. What mixes features in between, as a scan or a convolution does, needs all of them",
        remedy=f"{table} the tensor axis out. Share the batch out with launch_from_torch(data=2), and the memory with "
        f"shardformer.zero(optimizer, model, stage=3). {pipe}. Where a part of it can be cut after all, "
        "write that down (docs/policies.md)",
    )
