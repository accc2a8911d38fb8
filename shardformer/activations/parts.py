"""A tensor that all ranks of an axis hold alike, of which each keeps a part until the backward reads it.

    bytes       0 ........ m ........ 2m ....... 3m ... size        T = 4 ranks, m = ceil(size / T)
    rank        |    0     |    1     |    2     |  3 + padding

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 6.1:
partitioned activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardformer.comm.collectives import digest, start_all_gather_into
from shardformer.comm.values import numbers_in
from shardformer.errors import InputError
from shardformer.mesh.axis import Axis

PURPOSE = "activations"


def part_size(size: int, axis: Axis) -> int:
    """The bytes that each rank keeps of ``size``."""
    return -(-size // axis.size)


def own_part(whole: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """This rank's part of some bytes, in memory of its own, and a number of all of them. Communicates nothing."""
    each = part_size(len(whole), axis)
    piece = whole[axis.rank * each : (axis.rank + 1) * each]
    part = piece.clone() if len(piece) == each else torch.cat([piece, whole.new_zeros(each - len(piece))])
    return part, digest(whole)


def joined(part: Tensor, number: Tensor, axis: Axis, what: str) -> Tensor:
    """All bytes, with the padding of the last rank behind them.

    Communicates one all-gather of T * ceil(size / T) bytes and, at the same time, one of 8 T: the number that each rank
    computed of all bytes when it kept its part. Raises InputError on every rank where these differ.
    """
    whole, numbers = part.new_empty(axis.size * len(part)), number.new_empty(axis.size)
    pending = start_all_gather_into(numbers, number.view(1), axis, PURPOSE)
    start_all_gather_into(whole, part, axis, PURPOSE).wait()
    check_alike(numbers_in(pending.wait()), axis, what)
    return whole


def check_alike(numbers: Sequence[int], axis: Axis, what: str) -> None:
    if len(set(numbers)) > 1:
        usual = max(set(numbers), key=lambda number: (list(numbers).count(number), number == numbers[0]))
        others = [rank for rank, number in enumerate(numbers) if number != usual]
        raise InputError(
            f"{what} was not the same on all ranks of {axis.name}: rank {', '.join(map(str, others))} of {axis.size} "
            "held other numbers in the forward",
            rule="Of what enters a layer each tensor rank keeps a part, so that all of them must hold the same",
            remedy='Give all tensor ranks the same batch and random numbers; else store with on="host"',
        )
