"""What a rank keeps of one bucket under ZeRO: a stretch of the sum of the gradients, and the numbers that it changes.

The numbers of a bucket lie behind each other and are cut into as many equal parts as ranks sum it. A parameter may lie
in one part or in several: what an optimizer is given of it is a piece, a tensor with one dim.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), sections 5.1 and 5.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardformer.comm.collectives import Pending, all_reduce, start_all_gather, start_all_gather_into
from shardformer.comm.values import numbers_in
from shardformer.layout.state import Entry
from shardformer.reduce.buckets import Bucket, Gradient


@dataclass(eq=False)
class Piece:
    """Numbers in a row of one parameter, which this rank's optimizer changes.

    Args:
        number: the place of the parameter in its bucket.
        stretch: the numbers of the flat parameter; of the full one where ranks share slices of it.
        at: where they lie in this rank's part of the bucket.
        value: the optimizer's parameter: a view of the model's where its memory and precision allow, else a master.
    """

    gradient: Gradient
    number: int
    stretch: slice
    at: slice
    value: nn.Parameter

    @property
    def entry(self) -> Entry:
        return self.gradient.entry


class Shard:
    """This rank's part of a bucket. Communicates one all-gather of the parameters for each ``start_gather``.

    Args:
        dtype: the one that the parameters are about to get; None: they keep theirs.
        keeps: whether the values of this rank's part are kept here, since the model's parameters do not last (stage 3).
    """

    def __init__(self, bucket: Bucket, dtype: torch.dtype | None = None, *, keeps: bool = False) -> None:
        self.gradients, self.axis = bucket.gradients, bucket.axis
        first = self.gradients[0].param
        self.dtype, self.device = dtype or first.dtype, first.device
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.places = [place for _, place in bucket.places()]
        self.length = -(-self.places[-1].stop // self.axis.size)
        self.own = torch.zeros(self.length, dtype=self.dtype, device=self.device) if keeps else None
        self.pieces = [piece for n, g in enumerate(self.gradients) if (piece := self._piece(n, g)) is not None]
        self.sum: Tensor | None = None
        self.had = [False] * len(self.gradients)

    def _piece(self, number: int, gradient: Gradient) -> Piece | None:
        """This rank's piece of a parameter. Communicates one all-reduce where several ranks hold slices of it."""
        flat = _flat(gradient)
        place, begin = self.places[number], self.axis.rank * self.length
        low, high = max(place.start, begin), min(place.stop, begin + self.length)
        if low >= high:
            return None
        stretch = slice(low - place.start, high - place.start)
        part, at = flat[stretch], slice(low - begin, high - begin)
        if self.own is not None:
            self.own[at] = part
        if self.own is not None and self.wide == self.dtype:
            value = self.own[at]
        elif self.wide == self.dtype and part.untyped_storage().data_ptr() == _storage(gradient.param):
            value = part
        else:
            value = part.to(self.wide, copy=True)
        return Piece(gradient, number, stretch, at, nn.Parameter(value, gradient.param.requires_grad))

    def receive(self, part: Tensor, had: Tensor) -> None:
        """Adds this rank's part of a sum of gradients; ``had`` says for each parameter how many ranks had one."""
        self.had = [before or count > 0 for before, count in zip(self.had, numbers_in(had), strict=True)]
        part = part.to(self.wide)
        self.sum = part if self.sum is None else self.sum.add_(part)

    def give_gradients(self) -> None:
        """The optimizer's parameters get their gradients; those whose parameter had none on any rank get none."""
        for piece in self.pieces:
            is_new = self.sum is not None and self.had[piece.number]
            piece.value.grad = self.sum[piece.at] if is_new and self.sum is not None else None

    def forget(self) -> None:
        """The gradients are used, or thrown away."""
        self.sum, self.had = None, [False] * len(self.gradients)
        for piece in self.pieces:
            piece.value.grad = None

    def start_gather(self) -> Pending:
        """Starts bringing together what the optimizers of all ranks made of the bucket, in the model's precision."""
        mine = self.own
        if mine is None:
            mine = torch.zeros(self.length, dtype=self.dtype, device=self.device)
            self._round_into(mine)
        return start_all_gather_into(mine.new_empty(self.length * self.axis.size), mine, self.axis, "parameters")

    def store(self) -> None:
        """Keeps what the optimizer made of its pieces, where these are wider than what is kept."""
        if self.own is not None and self.wide != self.dtype:
            self._round_into(self.own)

    def _round_into(self, mine: Tensor) -> None:
        for piece in self.pieces:
            mine[piece.at] = piece.value.detach()

    def gather_gradient(self, number: int) -> Tensor | None:
        """The gradient of a parameter, from all ranks. Communicates one all-gather of the bucket."""
        mine = self.sum if self.sum is not None else torch.zeros(self.length, dtype=self.wide, device=self.device)
        whole = start_all_gather(mine, self.axis, 0, purpose="gradients").wait()
        return self.gradients[number].unpack(whole[self.places[number]]) if self.had[number] else None

    def write(self, values: Tensor) -> None:
        """Puts the values of all ranks into the model's parameters."""
        for gradient, place in zip(self.gradients, self.places, strict=True):
            gradient.param.detach().copy_(gradient.unpack(values[place]))


def _storage(param: Tensor) -> int:
    return param.untyped_storage().data_ptr()


def _flat(gradient: Gradient) -> Tensor:
    """The numbers of a parameter as a bucket has them; a view of it where it is one that a rank holds alone."""
    param = gradient.param.detach()
    if not gradient.is_shared:
        return param.reshape(-1)
    spec = gradient.entry.spec
    full = torch.zeros(spec.shape, dtype=torch.promote_types(param.dtype, torch.float32), device=param.device)
    spec.place(param.to(full.dtype), full, gradient.coords)
    copies = gradient.copies
    full = full / (copies.to(full) if isinstance(copies, Tensor) else copies)
    return all_reduce(full, gradient.axis, purpose="setup").reshape(-1)
