"""What ``zero`` refuses of the optimizers and the model that it is given."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from shardformer.errors import ConfigError
from shardformer.layout.state import ShardedState


def check_optimizers(optimizers: Sequence[Optimizer], table: ShardedState) -> None:
    """Raises ConfigError for optimizers that hold anything but the parameters of this model, each once."""
    if table.gradients is not None:
        raise ConfigError(
            "zero was called twice on this model",
            rule="One optimizer holds the pieces of a model's parameters",
            remedy="Give both optimizers at once: zero([first, second], model)",
        )
    names = {id(entry.param): entry.name for entry in table.entries}
    seen: set[int] = set()
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        given = [p for group in optimizer.param_groups for p in group["params"]]
        strange = next((p for p in given if id(p) not in names), None)
        if strange is not None:
            raise ConfigError(
                f"This {kind} holds a parameter of shape {tuple(strange.shape)} that is none of the model's",
                rule="zero takes an optimizer of the parameters that the model has now",
                remedy="Make it after shard_model, of model.parameters()",
            )
        if twice := next((names[id(p)] for p in given if id(p) in seen), None):
            raise ConfigError(
                f"Two optimizers hold {twice}",
                rule="A parameter is changed by one optimizer",
                remedy="Take it out of one of them",
            )
        seen |= {id(p) for p in given}


def check_memory(table: ShardedState) -> None:
    """Raises ConfigError where two parameters share memory without being one: here each gets its own."""
    owners: dict[int, str] = {}
    for entry in table.entries:
        if not entry.param.numel() or entry.param.is_meta:
            continue
        other = owners.setdefault(entry.param.untyped_storage().data_ptr(), entry.name)
        if other != entry.name:
            raise ConfigError(
                f"{entry.name} and {other} lie in the same memory, and are two parameters",
                rule="zero moves the values of each parameter to where the ranks' parts lie behind each other",
                remedy="Tie them as one parameter (a.weight = b.weight), or give each memory of its own (.clone())",
            )
