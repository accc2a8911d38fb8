"""The state of an optimizer of torch, whose parameters are this rank's parts, is loaded by the same rank alone.

Scripts for one process save ``optimizer.state_dict()`` on the first rank, and load the file on all. Where a model is
cut, ranks have other moments of the same shapes. So ``state_dict`` notes the place of the rank, and ``load_state_dict``
raises on all ranks if any of them was given the state of another place. From the state of a plain model's optimizer
each rank takes its part, as ``load_state_dict`` of the model does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardformer.comm.agree import agree, gather_all
from shardformer.errors import ConfigError
from shardformer.layout.spec import ShardSpec
from shardformer.layout.state import ShardedState, tables_here, tables_of
from shardformer.optim.undo import unchanged_on_error
from shardformer.optim.zero_grad import holder_of

PLACE = "shardformer_place"
"""What ``state_dict`` has more: of each axis along which ranks have other parts, its size and this rank's place."""
Place = dict[str, tuple[int, int]]


class _Loading(threading.local):
    is_checked = False


_LOADING = _Loading()


@contextmanager
def checked() -> Iterator[None]:
    """What is loaded in here is known to be this rank's."""
    before, _LOADING.is_checked = _LOADING.is_checked, True
    try:
        yield
    finally:
        _LOADING.is_checked = before


def lead_states_here() -> None:
    """From now on optimizers of torch note and check the place of their rank. The caller holds a lock."""
    kind: Any = Optimizer
    if not hasattr(kind.state_dict, "of_torch"):
        kind.state_dict, kind.load_state_dict = _noting(kind.state_dict), _checking(kind.load_state_dict)


def _noting(original: Any) -> Any:
    @wraps(original)
    def state_dict(self: Any) -> dict[str, Any]:
        found: dict[str, Any] = original(self)
        if place := place_of(self):
            found[PLACE] = place
        return found

    marked: Any = state_dict
    marked.of_torch = original
    return marked


def _checking(original: Any) -> Any:
    @wraps(original)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        if _LOADING.is_checked or (table := _table_of(self)) is None:
            original(self, state_dict)
            return
        state_dict = _checked(self, state_dict, table)
        with unchanged_on_error([self]):
            agree(table.context, lambda: original(self, state_dict), doing=f"load this {type(self).__name__}'s state")

    marked: Any = load_state_dict
    marked.of_torch = original
    return marked


def _table_of(optimizer: Any) -> ShardedState | None:
    """Of the model that an optimizer steps, if its ranks have other parameters than each other."""
    if (holder := holder_of(optimizer)) is not None:
        return holder.table  # type: ignore[no-any-return]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    tables = list(tables_of(params))
    if not params:  # of a stage on which it trains nothing
        tables = [table for table in tables_here() if table.context.pipe.size > 1]
    sizes = tables[0].context.sizes if len(tables) == 1 else {}
    return tables[0] if any(size > 1 for name, size in sizes.items() if name != "data") else None


def place_of(optimizer: Any) -> Place:
    """Of each axis along which ranks have other parts of the state, its size and this rank's place; of none alone."""
    table, holder = _table_of(optimizer), holder_of(optimizer)
    if table is None:
        return {}
    if holder is not None and holder.cuts_states:
        names = set(table.context.sizes)
    else:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        entries = table.entries if holder is not None else tables_of(params).get(table, ())
        names = {name for entry in entries for name in entry.spec.axes} | {"pipe"}
    return {name: (axis.size, axis.rank) for name, axis in table.axes.items() if name in names and axis.size > 1}


def _checked(optimizer: Any, state_dict: dict[str, Any], table: ShardedState) -> dict[str, Any]:
    """This rank's part of the state. Raises ConfigError, on all ranks, for what is not.

    Communicates one line, and a sum for each tensor of a state without a place.
    """
    own, sums, problem, kind = place_of(optimizer), list[float](), None, type(optimizer).__name__
    counts = [len(group["params"]) for group in optimizer.param_groups]
    try:
        state_dict = _cut(optimizer, state_dict, table)
        saved = state_dict.get(PLACE)
        if saved is not None and saved != own:
            problem = f"The state of this {kind} was saved by another rank, {_said(saved)}, and this is {_said(own)}"
        elif [len(group["params"]) for group in state_dict["param_groups"]] != counts:
            problem = f"The state that was to be loaded into this {kind} has other groups of parameters"
        elif saved is None and own:
            sums = _sums(optimizer, state_dict, table)
    except (AttributeError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        problem = f"What was to be loaded into this {kind} is not a state that an optimizer gave ({what})"
    found = gather_all((problem, own, sums), table.context)
    if problem is None:
        problem = next((f"Rank {rank}: {theirs}" for rank, (theirs, *_) in found if theirs is not None), None)
    if problem is None and any(
        any(a) and a == b and one != other for n, (_, (_, one, a)) in enumerate(found) for _, (_, other, b) in found[:n]
    ):
        problem = f"Ranks that have other parts of the parameters were to load one state into {kind}"
    if problem is not None:
        raise ConfigError(
            problem,
            rule="Ranks have parts of the parameters, and each loads the state that it has saved itself",
            remedy="Load on each rank what its own state_dict() gave; or use shardformer.save_checkpoint, whose "
            "checkpoints fit any layout",
        )
    return state_dict


def _cut(optimizer: Any, state_dict: dict[str, Any], table: ShardedState) -> dict[str, Any]:
    """Of the state of a plain model's optimizer this rank's part; what is this rank's already, as it is."""
    pairs = _pairs(optimizer, state_dict)
    specs = {id(entry.param): entry.spec for entry in table.entries if entry.spec.is_sharded}
    states = {number: (state_dict["state"].get(number), specs.get(id(p)), p) for number, p in pairs}
    whole = {
        number: {
            key: spec.slice(x, table.coords) if isinstance(x, Tensor) and tuple(x.shape) == spec.shape else x
            for key, x in state.items()
        }
        for number, (state, spec, p) in states.items()
        if isinstance(state, dict) and spec is not None and _is_whole(state, spec, p)
    }
    if not whole or PLACE in state_dict:
        return state_dict
    return {**state_dict, "state": {**state_dict["state"], **whole}, PLACE: place_of(optimizer)}


def _is_whole(state: Mapping[str, Any], spec: ShardSpec, param: Tensor) -> bool:
    shapes = {tuple(x.shape) for x in state.values() if isinstance(x, Tensor)}
    return spec.shape in shapes and tuple(param.shape) not in shapes


def _pairs(optimizer: Any, state_dict: Mapping[str, Any]) -> list[tuple[Any, Tensor]]:
    """(number in the state, parameter) of each; of other groups as many as both have."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    return list(zip(numbers, params, strict=False))


def _said(place: Any) -> str:
    if not isinstance(place, dict):
        return repr(place)[:80]
    return ", ".join(f"{name} {rank} of {size}" for name, (size, rank) in place.items()) or "of a model that is not cut"


def _sums(optimizer: Any, state_dict: Mapping[str, Any], table: ShardedState) -> list[float]:
    """A sum of each tensor of the state of parameters of which ranks have other parts."""
    cut = {id(entry.param) for entry in table.entries if entry.spec.is_sharded}
    states = [
        state_dict["state"].get(number, {})
        for number, p in _pairs(optimizer, state_dict)
        if id(p) in cut or holder_of(optimizer) is not None
    ]
    tensors = [x for state in states for x in state.values() if isinstance(x, Tensor) and x.dim()]
    return [float(torch.abs(x).double().sum()) for x in tensors]
