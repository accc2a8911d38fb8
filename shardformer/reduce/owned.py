"""Cut parameters that one rank has whole: each rank sends an owner its own slices alone, and gets these back.

tensor=2, data=2, one matrix of N numbers that rank 3 owns: three ranks send it N/2 each, and it sends them N/2 each;
as a reduce-scatter and an all-gather of the full matrix these would be N each.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from shardformer.comm.collectives import Pending, start_all_to_all
from shardformer.layout.split import Coords
from shardformer.layout.state import Entry
from shardformer.mesh.axis import Axis


class Cut(Protocol):
    """The gradient of a cut parameter, all of which one rank of ``axis`` gets."""

    entry: Entry
    axis: Axis
    divisor: float

    @property
    def param(self) -> Tensor: ...

    @property
    def numel(self) -> int: ...


class OwnSlices:
    """The slices of some gradients that each rank of their axis holds.

    Args:
        holders: the coordinates of each rank of the axis.
    """

    def __init__(self, gradients: Sequence[Cut], holders: Sequence[Coords]) -> None:
        self._gradients, self._holders = gradients, holders
        self._axis = gradients[0].axis

    def start_sum(self, each: int, places: Sequence[slice], had: Tensor) -> Pending:
        """Starts to sum the gradients for their owners.

        Args:
            each: numbers that a rank owns.
            places: where each gradient lies among those of all ranks.
            had: a number for each gradient, whose sums every owner gets behind its part.

        Communicates each slice once, to the owner of its parameter, and ``had`` to all ranks.
        """
        packed = [self._packed(gradient, had) for gradient in self._gradients]
        outgoing = [torch.cat([*(packed[n] for n in self._of(r, each, places)), had]) for r in self._ranks]
        mine = self._of(self._axis.rank, each, places)
        arriving = [sum(self._sizes(n, mine)) + len(had) for n in self._ranks]

        def added(received: Tensor) -> Tensor:
            shard = had.new_zeros(each + len(had))
            for rank, part in enumerate(received.split(arriving)):
                for n, local in zip(mine, part[: -len(had)].split(self._sizes(rank, mine)), strict=True):
                    begin = places[n].start - self._axis.rank * each
                    spec = self._gradients[n].entry.spec
                    full = shard[begin : begin + self._gradients[n].numel].view(spec.shape)
                    local = local.view(spec.local_shape(self._holders[rank]))
                    for box in spec.boxes(self._holders[rank]):
                        box.of_full(full).add_(box.of_local(local))
                shard[each:] += part[-len(had) :]
            return shard

        return start_all_to_all(outgoing, arriving, self._axis, "gradients").then(added)

    def start_share(self, own: Tensor, whole: Tensor, places: Sequence[slice]) -> Pending:
        """Starts to give each rank its slices of what this one owns.

        Of ``whole`` only the numbers that this rank holds are written. Communicates each slice once, to each holder.
        """
        each = len(own)
        mine = self._of(self._axis.rank, each, places)
        outgoing = [torch.cat([own[:0], *(self._slice(own, n, r, each, places) for n in mine)]) for r in self._ranks]
        theirs = [self._of(r, each, places) for r in self._ranks]
        arriving = [sum(self._sizes(self._axis.rank, numbers)) for numbers in theirs]

        def placed(received: Tensor) -> Tensor:
            coords = self._holders[self._axis.rank]
            for numbers, part in zip(theirs, received.split(arriving), strict=True):
                for n, local in zip(numbers, part.split(self._sizes(self._axis.rank, numbers)), strict=True):
                    spec = self._gradients[n].entry.spec
                    spec.place(local.view(spec.local_shape(coords)), whole[places[n]].view(spec.shape), coords)
            return whole

        return start_all_to_all(outgoing, arriving, self._axis, "parameters").then(placed)

    @property
    def _ranks(self) -> range:
        return range(self._axis.size)

    def _of(self, rank: int, each: int, places: Sequence[slice]) -> list[int]:
        """The numbers of the gradients that a rank owns."""
        return [n for n, place in enumerate(places) if each and place.start // each == rank]

    def _sizes(self, rank: int, numbers: Sequence[int]) -> list[int]:
        """Numbers that a rank holds of each."""
        return [prod(self._gradients[n].entry.spec.local_shape(self._holders[rank])) for n in numbers]

    def _packed(self, gradient: Cut, like: Tensor) -> Tensor:
        grad = gradient.param.grad
        if grad is None:
            return like.new_zeros(gradient.param.numel())
        return torch.div(grad.reshape(-1), gradient.divisor).to(like.dtype)

    def _slice(self, own: Tensor, n: int, rank: int, each: int, places: Sequence[slice]) -> Tensor:
        begin, gradient = places[n].start - self._axis.rank * each, self._gradients[n]
        full = own[begin : begin + gradient.numel].view(gradient.entry.spec.shape)
        return gradient.entry.spec.slice(full, self._holders[rank]).reshape(-1)
