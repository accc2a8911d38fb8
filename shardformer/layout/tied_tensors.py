"""Find tied tensors and views by their overlapping memory, and compare the values of tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn

from shardformer.torch_compat import get_storage_id, has_data, is_wrapper_tensor


@dataclass(frozen=True)
class MemoryRange:
    """Range of bytes that a tensor occupies in its storage, with its dtype, shape and strides."""

    storage: int
    begin: int
    end: int
    view: tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]

    @classmethod
    def from_tensor(cls, x: Tensor) -> MemoryRange:
        span = x.numel()
        if span and not x.is_contiguous():
            span = 1 + sum([(n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)])
        begin = int(x.storage_offset()) * x.element_size()
        view = (x.dtype, tuple(x.shape), tuple(x.stride()))
        address = x.untyped_storage().data_ptr() if has_data(x) and not is_wrapper_tensor(x) else 0
        return cls(address or get_storage_id(x), begin, begin + span * x.element_size(), view)


OverlapGroup = dict[str, MemoryRange]


def group_overlapping_tensors(named_tensors: Iterable[tuple[str, Tensor]]) -> list[OverlapGroup]:
    """Find the groups of tensors that share memory. Each group is a dict from names to memory ranges."""
    ranges = []
    for at, (name, x) in enumerate(named_tensors):
        memory = MemoryRange.from_tensor(x)
        if memory.begin < memory.end:
            ranges.append((memory.storage, memory.begin, at, name, memory))
    groups: list[OverlapGroup] = []
    storage, end = -1, 0
    for _, _, _, name, memory in sorted(ranges):
        if memory.storage != storage or memory.begin >= end:
            groups.append({})
            storage, end = memory.storage, memory.end
        groups[-1][name] = memory
        end = max(end, memory.end)
    return [group for group in groups if len(group) > 1]


def find_parameter_view(model: nn.Module, params: Collection[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """Find a buffer or attribute that shares memory with a parameter. Return both names, or None."""
    known = {id(x) for _, x in params}
    views = [(name, x) for name, x in _iter_buffers_and_attributes(model) if id(x) not in known]
    names = {name for name, _ in views}
    for group in group_overlapping_tensors([*params, *views]):
        view = next((name for name in group if name in names), None)
        param = next((name for name in group if name not in names), None)
        if view is not None and param is not None:
            return view, param
    return None


def _iter_buffers_and_attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        tensors = [*module._buffers.items(), *vars(module).items()]
        yield from (
            (f"{path}.{name}".lstrip("."), x)
            for name, x in tensors
            if type(x) is Tensor and x.layout == torch.strided and not x.is_meta
        )


def max_abs_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference between two tensors, or inf for NaN or different shapes."""
    if a.shape != b.shape:
        return inf
    largest = float((a - b).detach().abs().max()) if a.numel() else 0.0
    return largest if largest == largest else inf
