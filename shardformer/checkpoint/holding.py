"""What the ranks hold of a training run: what a checkpoint is written of, and what moves into another layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from shardformer.checkpoint.files import check_dtype
from shardformer.checkpoint.held import Item, Region
from shardformer.checkpoint.model import ModelTensors, not_its_own
from shardformer.checkpoint.optimizers import OptimizerStates, merged, optimizers_of
from shardformer.checkpoint.plain import to_json
from shardformer.checkpoint.plan import Holdings, held_by, left
from shardformer.checkpoint.random_states import random_name, random_tensors
from shardformer.checkpoint.together import all_tell

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Holding:
    """A training run between two steps.

    Args:
        items: the tensors that this rank has, or has a part of.
        values: what else is to be known, of all ranks.
        cells: which pieces all ranks have.
    """

    items: list[Item]
    values: dict[str, Any]
    cells: tuple[Holdings, ...]


def hold(
    tensors: ModelTensors, check: Callable[[], T], optimizer: Any, scheduler: Any, extra: Any
) -> tuple[list[T], Holding]:
    """(what ``check`` gives on each rank, what this rank holds). The values of items are where training has them.

    Communicates, at once, names and sizes of what all have, a checksum of each buffer, and plain values.
    """
    world, items = tensors.world, list[Item]()

    def collect() -> tuple[T, dict[str, Any], Holdings, dict[str, int]]:
        checked, optimizers = check(), optimizers_of(optimizer, tensors)
        own, numbers = random_tensors(tensors.device)
        items.extend(tensors.items())
        items.extend(item for each in optimizers for item in each.items())
        items.extend(Region(tuple(x.shape), None, {}).item(random_name(world.rank, n), x) for n, x in own.items())
        for item in items:
            check_dtype(item.name, item.dtype)
        values = _values(tensors, optimizers, scheduler, extra) | {"random": numbers}
        return checked, values, held_by(items), tensors.buffer_sums()

    checked, said, cells, sums = zip(*all_tell(collect, world, "Saving a checkpoint"), strict=True)
    alike = not_its_own([(one["coords"].get("data", 0), theirs) for one, theirs in zip(said, sums, strict=True)])
    values = said[0] | {
        "optimizers": [merged(each) for each in zip(*(one["optimizers"] for one in said), strict=True)],
        "random": [one["random"] for one in said],
        "coords": [one["coords"] for one in said],
        "extra_states": {name: value for one in said for name, value in one["extra_states"].items()},
    }
    kept = [item for item in items if item.name not in alike[world.rank]]
    return list(checked), Holding(kept, values, tuple(map(left, cells, alike)))


def _values(tensors: ModelTensors, optimizers: Iterable[OptimizerStates], scheduler: Any, extra: Any) -> dict[str, Any]:
    """What this rank has to say beside tensors."""
    values: dict[str, Any] = {
        "model": type(tensors.model).__name__,
        "optimizers": [each.values() for each in optimizers],
        "scheduler": [
            {"kind": type(s).__name__, "state": to_json(s.state_dict(), f"the state of {type(s).__name__}")}
            for s in as_list(scheduler)
        ],
        "extra": to_json(extra, "extra"),
        "coords": tensors.coords,
        "extra_states": {name: to_json(x, f"the state {name}") for name, x in tensors.extra_states.items()},
    }
    if tensors.zero is not None:
        values["loss_scale"] = asdict(tensors.zero.loss_scale)
        values["rounds"] = max(tensors.zero.rounds, default=0)
    return values


def as_list(given: Any) -> list[Any]:
    """None, one or several."""
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
