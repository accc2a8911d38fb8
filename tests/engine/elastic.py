"""Training run whose processes are killed, and that resumes from its last checkpoint.

    shardformer run --nproc_per_node 4 --max-restarts 10 tests/engine/elastic.py FOLDER --kills 10

After each launch one process kills itself at a random step, up to the given number of kills. The first process prints
a checksum of the final weights.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import time

import torch
from torch import nn

import shardformer


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--zero", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    args = parser.parse_args()
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    dice = random.Random(restart)
    victim, fatal = dice.randrange(int(os.environ.get("WORLD_SIZE", 1))), dice.randrange(1, 4)
    torch.manual_seed(0)
    model = Net(args.dropout)
    inputs = torch.rand(40, 6, generator=torch.Generator().manual_seed(1))
    data = [(x, torch.tensor(i % 3)) for i, x in enumerate(inputs)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    asked = shardformer.ParallelConfig(zero_stage=args.zero).fit_to
    engine = shardformer.initialize(model, optimizer, nn.CrossEntropyLoss(), data, parallel=asked, batch_size=8)
    engine.resume(args.folder)
    begun = engine.steps
    while engine.steps < args.steps:
        for batch in engine.data:
            if restart < args.kills and engine.steps == begun + fatal and engine.world.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            engine.train_step(batch)
            engine.save(args.folder, retention=2, in_background=engine.steps % 2 == 0)
            time.sleep(args.pause)
            if engine.steps == args.steps:
                break
    engine.wait()
    weights = shardformer.full_state_dict(engine.model)
    digest = hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights.values())).hexdigest()
    if engine.is_first:
        torch.save(weights, os.path.join(args.folder, "weights.pt"))
        print(f"restarts {restart} processes {engine.world.size} weights {digest}", flush=True)


main()
