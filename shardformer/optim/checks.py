"""What ``zero`` refuses of the optimizers and the model that it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardformer.comm.agree import agree
from shardformer.comm.shared_memory import overlapping, view_of
from shardformer.comm.values import has_values
from shardformer.errors import ConfigError, expect
from shardformer.layout.state import ShardedState
from shardformer.optim.offload.disk import check_room
from shardformer.optim.probe import can_step_apart, state_bytes
from shardformer.optim.room import check_free
from shardformer.optim.settings import Settings
from shardformer.optim.shards import Shard, set_by_hand
from shardformer.reduce.buckets import GradientReducer


def as_list(optimizer: Any) -> list[Optimizer]:
    """One optimizer, or several. Raises ConfigError for what is none."""
    several = isinstance(optimizer, list | tuple) and bool(optimizer)
    found = list(optimizer) if several else [optimizer]
    are_right = all(isinstance(getattr(each, "param_groups", None), list) for each in found)
    rule = "It is an optimizer of the model's parameters, or a list of some"
    expect("optimizer", optimizer, are_right, rule, "Write torch.optim.AdamW(model.parameters(), lr=1e-4)")
    return found


Given = tuple[list[Optimizer], Settings]


def checked(given: Callable[[], Given], model: nn.Module, table: ShardedState) -> Given:
    """The optimizers and settings that ``zero`` was given.

    Raises ConfigError, on every rank, where one cannot do what it was asked for, or was asked for something else.
    Communicates as ``agree``.
    """

    def check() -> Given:
        optimizers, settings = given()
        check_optimizers(optimizers, table)
        check_memory(model, table)
        check_free(settings, table.context.device)
        check_files(settings, optimizers, table)
        return optimizers, settings

    def lines_of(made: Given) -> list[str]:
        optimizers, settings = made
        lines = [f"{name}={value!r}" for name, value in vars(settings).items()]
        return lines + [type(optimizer).__name__ for optimizer in optimizers]

    return agree(table.context, check, lines_of, doing="train with these optimizers")


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


def check_memory(model: nn.Module, table: ShardedState) -> None:
    """Raises ConfigError where something shares memory with a parameter without being it: here each gets its own."""
    params = [(entry.name, entry.param) for entry in table.entries if has_values(entry.param)]
    rule = "zero moves the values of each parameter to where the ranks' parts lie behind each other"
    if group := next(iter(overlapping(params)), None):
        first, second, *_ = (name for name, _ in params if name in group)
        raise ConfigError(
            f"{second} and {first} lie in the same memory, and are two parameters",
            rule=rule,
            remedy="Tie them as one parameter (a.weight = b.weight), or give each memory of its own (.clone())",
        )
    if found := view_of(model, params):
        view, name = found
        raise ConfigError(
            f"{view} is a view of the parameter {name}: it lies in its memory",
            rule=f"{rule}, so that {view} would no longer follow it",
            remedy=f"Read {name} itself where {view} is read, or give {view} memory of its own (.clone())",
        )


def check_files(settings: Settings, optimizers: Sequence[Optimizer], table: ShardedState) -> None:
    """Raises ConfigError where masters and states cannot be in files, or there is no room for them."""
    if (folder := settings.offload.folder) is None:
        return
    if not all(map(can_step_apart, optimizers)):
        raise ConfigError(
            f"offload='nvme:{folder}' of {', '.join(type(o).__name__ for o in optimizers)}",
            rule="From files, a bucket is updated after the other; this optimizer gives other numbers then",
            remedy="Write offload='cpu', or take one that counts its steps for each parameter (torch.optim.AdamW)",
        )
    reducers = [reducer for reducer in table.reducers if isinstance(reducer, GradientReducer)]
    ranks = {id(g.param): g.axis.size for reducer in reducers for g in reducer.gradients if settings.stage > 0}
    size = 0.0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                wide = torch.promote_types(p.dtype, torch.float32).itemsize
                size += (p.numel() * wide + state_bytes(optimizer, group, p, wide)) / ranks.get(id(p), 1)
    try:
        check_room(folder, 2 * round(size))
    except OSError as error:
        raise no_files(folder, f"{error} (rank {table.context.rank})") from error


def no_files(folder: str, said: str) -> ConfigError:
    return ConfigError(
        f"offload='nvme:{folder}' cannot be used: {said}",
        rule="Masters and states are written to a file there, twice, so that a step that fails leaves one",
        remedy="Name a folder that is there, on a disk with room; shardformer.memory says how much it takes",
    )


def check_untouched(model: nn.Module, table: ShardedState, shards: Sequence[Shard]) -> None:
    """Before a step. Raises ConfigError for parameters that were replaced, and for gradients that were set by hand."""
    here = {id(p) for p in model.parameters()}
    rule = "zero moved the parameters to where the ranks' parts lie behind each other, and keeps the gradients itself"
    for entry in table.entries:
        if id(entry.param) not in here:
            said = f"{entry.name} was replaced by another parameter after zero was called"
            raise ConfigError(said, rule=rule, remedy="Call zero after it")
        if entry.param.grad is not None:
            raise set_by_hand(entry.name)
    for shard in shards:
        if moved := shard.moved():
            raise ConfigError(
                f"{moved} got other memory after zero was called (p.data = ..., model.to(...))",
                rule=rule,
                remedy="Write into it (p.copy_(values), under torch.no_grad()), or move the model before zero",
            )
