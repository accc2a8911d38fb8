"""Checkpoints: the time of a save, the time for which a background save blocks, and the bytes that a load reads.

    python benchmarks/checkpoints.py                     # two tensor ranks, 540 MB each
    python benchmarks/checkpoints.py --zero 2            # two data ranks with ZeRO

A LLaMA with AdamW in fp32. Compared with torch.save of each rank's tensors (with and without syncing to disk, as
save_checkpoint does), torch.distributed.checkpoint, and a copy of the same bytes in memory. All variants alternate in
the same processes. Loaded tensors are compared bitwise.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import MB, Llama, Timing
from torch import Tensor, nn

import shardformer
from shardformer.checkpoint.save import AsyncSave
from shardformer.mesh.parallel_context import ParallelContext

TORCH, TORCH_DISK, DCP = "torch.save", "torch.save, and fsync", "torch.distributed.checkpoint"
OURS, STARTS, COPY = "save_checkpoint", "start_checkpoint, until it returns", "one copy in memory"
TORCH_LOAD, LOAD = "torch.load", "load_checkpoint"

Run = Callable[[int], Any]
"""Called with the index of the round."""


@dataclass(frozen=True)
class Setting:
    """The checkpoint, and its folder."""

    size: Llama
    zero: int | None
    folder: str
    repetitions: int
    seconds: float


@dataclass(frozen=True)
class Found:
    """Bytes that a rank stores, writes and reads, and the times."""

    holds: int
    writes: int
    reads: int
    timings: dict[str, Timing]
    is_same: bool


def trained(setting: Setting) -> tuple[nn.Module, Any]:
    """Return a model after one step."""
    sizes = {"tensor": 2} if setting.zero is None else {"data": 2}
    model = shardformer.shard_model(setting.size.build(), context=ParallelContext.from_default_process_group(sizes))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if setting.zero is not None:
        optimizer = shardformer.shard_optimizer(model, optimizer, stage=setting.zero)
    common.train_step(model, setting.size.batches(2), optimizer)(0)
    optimizer.zero_grad()
    return model, optimizer


def tensors_in(value: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, Tensor)]


def measure(setting: Setting) -> Found:
    """Measure in every process."""
    model, optimizer = trained(setting)
    rank, folder = dist.get_rank(), Path(setting.folder)
    part = {name: x.as_subclass(Tensor) for name, x in model.state_dict().items()}  # as regular tensors, to be pickled
    own = {"model": part, "optimizer": optimizer.state_dict()}
    values = tensors_in(own)
    memory = [x.clone() for x in values]

    def torch_save(number: int) -> None:
        torch.save(own, folder / f"{number}-{rank}.pt")

    def torch_save_to_disk(number: int) -> None:
        with (folder / f"{number}-{rank}-disk.pt").open("wb") as file:
            torch.save(own, file)
            file.flush()
            os.fsync(file.fileno())

    def copy(_: int) -> None:
        for target, source in zip(memory, values, strict=True):
            target.copy_(source)

    runs: dict[str, Run] = {
        TORCH: torch_save,
        TORCH_DISK: torch_save_to_disk,
        DCP: lambda n: dcp.save({f"{rank}": own}, checkpoint_id=folder / f"{n}-dcp"),
        OURS: lambda n: shardformer.save_checkpoint(model, folder / f"{n}-ours", optimizer),
        STARTS: lambda n: shardformer.checkpoint.async_save_checkpoint(model, folder / f"{n}-background", optimizer),
        COPY: copy,
        TORCH_LOAD: lambda n: torch.load(folder / f"last-{rank}.pt"),
        LOAD: lambda n: shardformer.load_checkpoint(model, folder / "last", optimizer),
    }
    ours = folder / "last"
    shardformer.save_checkpoint(model, ours, optimizer)
    torch.save(own, folder / f"last-{rank}.pt")
    timings = _timed(runs, setting)
    before = [x.clone() for x in tensors_in([model.state_dict(), optimizer.state_dict()])]
    loaded = shardformer.load_checkpoint(model, ours, optimizer)
    after = tensors_in([model.state_dict(), optimizer.state_dict()])
    is_same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    writes = next(ours.glob("step*/")) / f"rank-{rank:05d}.safetensors"
    return Found(sum(x.nbytes for x in values), writes.stat().st_size, loaded.num_bytes, timings, is_same)


def _timed(runs: dict[str, Run], setting: Setting) -> dict[str, Timing]:
    """Time each variant in turn, on an otherwise idle disk. The first round is not counted.

    Files are removed after each save, so that all variants write into memory that was used before. New memory is slow
    in a virtual machine. Each round starts with another variant.
    """
    names = list(runs)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for number in range((setting.repetitions or 8) + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            begin = time.perf_counter()
            begun = runs[name](number)
            taken[name].append(time.perf_counter() - begin)
            if isinstance(begun, AsyncSave):
                begun.wait()
            os.sync()
            dist.barrier()
            if dist.get_rank() == 0:
                for left in Path(setting.folder).glob("[0-9]*"):
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, taken)
    slowest = {n: [max(times) for times in zip(*(rank[n] for rank in everywhere), strict=True)] for n in runs}
    return {name: Timing(times[1:], []) for name, times in slowest.items()}


def report(found: Found) -> str:
    times, rows = found.timings, []
    against = {OURS: TORCH, TORCH_DISK: TORCH, DCP: TORCH, STARTS: COPY, LOAD: TORCH_LOAD}
    for name in times:
        other = against.get(name, name)
        rows.append([name, common.ms(times[name].ms), f"{times[name].ms / times[other].ms:.2f}", other])
    sizes = (
        f"A rank holds {found.holds / MB:.1f} MB, writes {found.writes / MB:.1f} MB and reads {found.reads / MB:.1f} MB"
    )
    return f"{common.table(['', 'ms', 'ratio', 'to'], rows)}\n\n{sizes}."


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    size = common.llama(args.hidden, args.sequence, args.layers, args.vocabulary)
    with TemporaryDirectory(dir=args.folder) as folder, common.two_processes(args.threads) as pool:
        setting = Setting(size, args.zero, folder, args.repetitions, args.seconds)
        found: Found = pool.run(measure, setting)[0]
    if args.json:
        results = {"holds": found.holds, "writes": found.writes, "reads": found.reads}
        print(common.as_json("checkpoints", vars(args), {**results, **common.timings_as_dict(found.timings)}))
    else:
        how = "tensor 2" if args.zero is None else f"data 2, ZeRO stage {args.zero}"
        print(f"\nLLaMA, {args.layers} layers, hidden {args.hidden}, {how}, AdamW, fp32\n\n{report(found)}")
    if not found.is_same:
        print("FAIL: loaded tensors differ from the saved ones", file=sys.stderr)
        return 1
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.arguments(__doc__, seconds=60.0, hidden=768, layers=10, sequence=32, vocabulary=12000, batch=1)
    parser.add_argument("--zero", type=int, default=None, help="two data ranks with this ZeRO stage")
    parser.add_argument("--folder", default=None, help="output folder (default: the temporary folder of the machine)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
