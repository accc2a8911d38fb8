"""Parameters that share memory without being one, as ``nn.Parameter(other.data)`` makes them: parts share it too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardformer.comm.values import has_values
from shardformer.errors import ConfigError
from shardformer.layout.spec import ShardSpec


@dataclass(frozen=True)
class _Memory:
    """Where a tensor's numbers lie: storage, first byte, the byte behind the last, and how it steps through them."""

    storage: int
    begin: int
    end: int
    view: tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]

    @classmethod
    def of(cls, x: Tensor) -> _Memory:
        storage = x.untyped_storage()
        span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        begin = int(x.storage_offset()) * x.element_size()
        view = (x.dtype, tuple(x.shape), tuple(x.stride()))
        address = storage.data_ptr() if has_values(x) else 0
        return cls(address or storage._cdata, begin, begin + span * x.element_size(), view)


Ties = list[dict[str, _Memory]]


def ties_in(model: nn.Module) -> Ties:
    """Groups of parameters, each by its first name, whose memory overlaps."""
    found = sorted(
        ((m, name) for name, p in model.named_parameters() if (m := _Memory.of(p)).begin < m.end),
        key=lambda at: (at[0].storage, at[0].begin),
    )
    groups: Ties = []
    storage, end = -1, 0
    for memory, name in found:
        if memory.storage != storage or memory.begin >= end:
            groups.append({})
            storage, end = memory.storage, memory.end
        groups[-1][name] = memory
        end = max(end, memory.end)
    return [group for group in groups if len(group) > 1]


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


def _torn(group: Mapping[str, _Memory], why: str) -> ConfigError:
    first, second, *_ = group
    return ConfigError(
        f"{first} and {second} share their memory, and {why}",
        rule="Parameters that share memory are one, which ranks hold alike: a step of one would not reach the other",
        remedy=f"Make them one parameter (module.weight = other.weight, in place of .data), or copy {second}'s values",
    )
