"""Reads the pieces that a rank will hold, and checks, together with the other ranks, all that was saved of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from shardformer.checkpoint.checksum import weighted_sum
from shardformer.checkpoint.files import Entry, Index, boxes_in, damaged, file_name
from shardformer.checkpoint.held import Item, Stretch
from shardformer.checkpoint.plan import Cell, share_out
from shardformer.checkpoint.reader import BoxReader
from shardformer.checkpoint.together import all_do
from shardformer.comm.collectives import all_reduce
from shardformer.mesh.axis import Axis

BITS = 2**64


def read_items(folder: Path, index: Index, items: Sequence[Item], world: Axis) -> int:
    """Fills the items from a checkpoint. Returns how many bytes this rank read.

    Each rank reads what it will hold, and no more. Of each number one rank adds its share to the checksum of the box
    that it was saved in. Communicates the names and sizes of what is read, and two numbers for each saved box.

    Raises DamagedError, on all ranks, where a file is missing or a box is not what was saved.
    """
    numbers = _numbered(index, items, world)
    mine = share_out([item for item in items if item.is_checked], world)
    sums = torch.zeros(len(numbers), 2, dtype=torch.int64)
    reader = BoxReader(folder)

    def read() -> None:
        for item in items:
            _read_item(reader, item, index.tensors[item.name])
            if item.is_checked:
                _add_sums(item, index.tensors[item.name], mine, numbers, sums)

    try:
        all_do(read, world, f"Reading {folder}")
    finally:
        reader.close()
    _compare(all_reduce(sums, world, purpose="setup"), numbers, index, folder)
    return reader.num_bytes


def _numbered(index: Index, items: Sequence[Item], world: Axis) -> dict[tuple[str, int], int]:
    """A number for each saved box of all tensors that any rank reads, alike on all ranks."""
    names = list(index.tensors)
    wanted = torch.zeros(len(names), dtype=torch.int64)
    own = {item.name for item in items}
    wanted[[i for i, name in enumerate(names) if name in own]] = 1
    wanted = all_reduce(wanted, world, op="max", purpose="setup")
    chosen = [name for name, is_wanted in zip(names, wanted.tolist(), strict=True) if is_wanted]
    keys = [(name, number) for name in chosen for number in range(len(index.tensors[name].boxes))]
    return {key: i for i, key in enumerate(keys)}


def _read_item(reader: BoxReader, item: Item, entry: Entry) -> None:
    for held in item.held:
        count = 0
        for number, (start, size) in boxes_in(entry, (held.start, tuple(held.values.shape))):
            reader.read(item.name, entry.boxes[number], (start, size), held.part(start, size))
            count += prod(size)
        if count != held.values.numel():
            raise damaged(f"Of {item.name} at {list(held.start)} {count} of {held.values.numel()} numbers were saved")


def _add_sums(
    item: Item, entry: Entry, mine: dict[Cell, list[Stretch]], numbers: dict[tuple[str, int], int], sums: Tensor
) -> None:
    """Adds to the checksums of saved boxes what of an item falls to this rank."""
    for held in item.held:
        for piece in mine.get((item.name, held.start, tuple(held.values.shape)), ()):
            for number, (start, size) in boxes_in(entry, piece):
                row = numbers[item.name, number]
                total = (int(sums[row, 0]) + weighted_sum(held.part(start, size), start)) % BITS
                sums[row, 0] = total - BITS if total >= BITS // 2 else total
                sums[row, 1] += prod(size)


def _compare(sums: Tensor, numbers: dict[tuple[str, int], int], index: Index, folder: Path) -> None:
    """Raises DamagedError where what was read is not what was saved."""
    for (name, number), (total, count) in zip(numbers, sums.tolist(), strict=True):
        box = index.tensors[name].boxes[number]
        where = f"{name} at {list(box.start)} in {folder / file_name(box.file)}"
        if count != prod(box.size):
            raise damaged(f"Of {where} {count} of {prod(box.size)} numbers were read")
        if total % BITS != box.sum:
            raise damaged(f"{where} is not what was saved: its checksum differs")
