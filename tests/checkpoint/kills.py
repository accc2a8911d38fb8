"""Kill processes at random times during saves, and check the remaining checkpoints.

    python tests/checkpoint/kills.py FOLDER --rounds 100

Four processes repeatedly save a small model whose elements all equal the step. After each kill, the newest complete
checkpoint must load, contain a single step, and be at least as new as the last completed save.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardformer.checkpoint.load import load_checkpoint
from shardformer.checkpoint.save import async_save_checkpoint, save_checkpoint
from shardformer.errors import ConfigError
from shardformer.filesystem import parse_temporary_name
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.zero.shard_optimizer import shard_optimizer

RANKS = 4


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 401), nn.BatchNorm1d(401), nn.Linear(401, 7))


def save_for_ever(rank: int, folder: Path, store: Path, step: int, in_background: bool) -> None:
    timeout = timedelta(seconds=30)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), RANKS), rank=rank, world_size=RANKS, timeout=timeout
    )
    model = net()
    context = ParallelContext.from_default_process_group({"data": RANKS})
    optimizer = shard_optimizer(model, torch.optim.AdamW(model.parameters()), stage=2, context=context)
    while True:
        step += 1
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.fill_(step)
        extra = {"step": step}
        if in_background:
            async_save_checkpoint(model, folder, optimizer, step=step, extra=extra, retention=2).wait()
        else:
            save_checkpoint(model, folder, optimizer, step=step, extra=extra, retention=2)
        if rank == 0:
            store.with_suffix(".said").write_text(str(step))


def newest(folder: Path) -> int:
    """Return the step of the newest checkpoint after checking all its elements, or 0."""
    model = net()
    try:
        loaded = load_checkpoint(model, folder)
    except ConfigError:
        return 0
    found = {float(x) for tensor in model.state_dict().values() for x in tensor.flatten()[::7]}
    assert found == {float(loaded.step)}, f"a mixture: {found}"
    assert loaded.extra == {"step": loaded.step}
    assert loaded.skipped == (), loaded.skipped
    return loaded.step


def one_round(number: int, folder: Path, step: int, wait_s: float) -> tuple[int, int]:
    """Return (step of the last completed save, step of the newest checkpoint) after a kill."""
    store = folder.parent / f"store-{number}"
    children = []
    for rank in range(RANKS):
        if (pid := os.fork()) == 0:
            try:
                save_for_ever(rank, folder, store, step, number % 2 == 1)
            finally:
                os._exit(1)
        children.append(pid)
    said = store.with_suffix(".said")
    while not said.exists():
        time.sleep(0.002)
        assert os.waitpid(-1, os.WNOHANG) == (0, 0), "a process ended before it had saved"
    time.sleep(wait_s)
    random.shuffle(children)
    for pid in children if number % 3 else children[:1]:  # all at once, or one, whose peers then fail
        os.kill(pid, signal.SIGKILL)
    if number % 3 == 0:
        time.sleep(0.05)
        for pid in children[1:]:
            os.kill(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)
    returned = int(said.read_text() or 0)
    return returned, newest(folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    random.seed(asked.seed)
    torch.set_num_threads(1)
    folder = asked.folder / "checkpoints"
    asked.folder.mkdir(parents=True, exist_ok=True)
    step, left = 0, 0
    for number in range(asked.rounds):
        returned, found = one_round(number, folder, step, random.uniform(0, 0.25))
        assert found >= returned, f"step {returned} was saved, and {found} is the newest"
        left += any(parse_temporary_name(path) is not None for path in folder.iterdir())
        step = found
    print(
        f"{asked.rounds} kills, {step} saves, {left} left something unfinished: each time the newest whole one loaded"
    )


if __name__ == "__main__":
    main()
