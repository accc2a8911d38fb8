"""Parameters that share memory without being one, as ``nn.Parameter(other.data)`` makes them: parts share it too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from shardformer.comm.shared_memory import Group, Memory, overlapping
from shardformer.errors import ConfigError
from shardformer.layout.spec import ShardSpec

Ties = list[Group]


def ties_in(model: nn.Module) -> Ties:
    """Groups of parameters, each by its first name, whose memory overlaps."""
    return overlapping(model.named_parameters())


def check_stages(ties: Ties, stages_of: Callable[[str], Sequence[int]]) -> None:
    """Raises ConfigError where parameters that share memory are held by different stages of a pipeline."""
    for group in ties:
        if len({tuple(stages_of(name)) for name in group}) > 1:
            raise _torn(group, "are held by different stages of the pipeline")


def keep_ties(model: nn.Module, ties: Ties, specs: Mapping[int, ShardSpec]) -> None:
    """Lets parts share their memory where the parameters did that they are parts of.

    Args:
        model: sharded.
        ties: as they were before.
        specs: the layouts of the parts, by their identity.

    Raises ConfigError where they were cut in different ways.
    """
    present = dict(model.named_parameters(remove_duplicate=False))
    for group in ties:
        parts = {name: present[name] for name in group if name in present}
        if not any(id(part) in specs for part in parts.values()):
            continue  # they are whole, or elsewhere
        if len({(str(specs.get(id(part))), group[name]) for name, part in parts.items()}) > 1:
            raise _torn(group, "are cut in different ways")
        first, *others = parts.values()
        for other in others:
            other.data = first.data


def _torn(group: Mapping[str, Memory], why: str) -> ConfigError:
    first, second, *_ = group
    return ConfigError(
        f"{first} and {second} share their memory, and {why}",
        rule="Parameters that share memory are one, which ranks hold alike: a step of one would not reach the other",
        remedy=f"Make them one parameter (module.weight = other.weight, in place of .data), or copy {second}'s values",
    )
