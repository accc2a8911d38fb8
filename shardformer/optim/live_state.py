"""``optimizer.state`` under ZeRO: the states that the optimizers use, which scripts read, edit and clear."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardformer.optim.shards import Piece, Shard
from shardformer.optim.torch_states import checked

State = dict[str, Any]


class LiveState(MutableMapping[Tensor, State]):
    """The states of several optimizers by their parameters, which are pieces of those of the model.

    A parameter of the model is taken for this rank's piece of it. Where this rank has none, its state is empty: what is
    read of it is a tensor without numbers, so that a script edits the states of all parameters on all ranks.
    """

    def __init__(self, optimizers: Sequence[Optimizer], shards: Sequence[Shard]) -> None:
        self._optimizers = optimizers
        self._pieces: dict[int, Piece | None] = {id(g.param): None for shard in shards for g in shard.gradients}
        held = ((id(p), o) for o in optimizers for group in o.param_groups for p in group["params"])
        self._owners: dict[int, Optimizer] = dict(held)
        self._pieces |= {id(piece.gradient.param): piece for shard in shards for piece in shard.pieces}

    def _found(self, key: Tensor) -> tuple[Any, Tensor] | None:
        """(the state of the optimizer that has a parameter, the parameter as it has it); None for no rank's piece."""
        if id(key) in self._pieces:
            if (piece := self._pieces[id(key)]) is None:
                return None
            key = piece.value
        if id(key) not in self._owners:
            raise KeyError(key)
        return self._owners[id(key)].state, key

    def __getitem__(self, key: Tensor) -> State:
        found = self._found(key)
        return Elsewhere(key) if found is None else found[0][found[1]]

    def __setitem__(self, key: Tensor, value: State) -> None:
        if (found := self._found(key)) is not None:
            found[0][found[1]] = value

    def __delitem__(self, key: Tensor) -> None:
        if (found := self._found(key)) is not None:
            del found[0][found[1]]

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, Tensor):
            return False
        try:
            found = self._found(key)
        except KeyError:
            return False
        return found is not None and found[1] in found[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (key for optimizer in self._optimizers for key in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def clear(self) -> None:
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def __repr__(self) -> str:
        return f"LiveState({dict(self)})"


class Elsewhere(dict[str, Any]):
    """The state of a parameter of which other ranks have all numbers."""

    def __init__(self, like: Tensor) -> None:
        self._like = like

    def __missing__(self, key: str) -> Tensor:
        return torch.empty(0, dtype=self._like.dtype, device=self._like.device)


def load_in_place(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """``optimizer.load_state_dict`` of this rank's state, after which its groups are the dictionaries that they were.

    torch puts new ones in their place, and schedulers or scripts that hold the old ones would set options that no step
    reads.
    """
    groups: list[dict[str, Any]] = optimizer.param_groups
    before = list(groups)
    with checked():
        optimizer.load_state_dict(state_dict)
    for old, new in zip(before, list(optimizer.param_groups), strict=True):
        if old is not new:
            old.clear()
            old.update(new)
    groups[:] = before
    optimizer.param_groups = groups
