"""The training runs of each row, one per entry point: ``python -m tests.versions.program engine DIR``.

Each one trains a small GPT-2 for a few steps, and fails if the loss does not decrease.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import shardformer

BOUND = 1e-4
"""Tolerance for a difference of fp32 losses. Kernels of different versions round differently."""


def model() -> Any:
    """Build a GPT-2 without dropout."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def ids(count: int = 16) -> torch.Tensor:
    return (torch.arange(count)[:, None] + torch.arange(12)) % 64


def engine() -> Any:
    plain = model()
    data = [{"input_ids": row, "labels": row} for row in ids()]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    layout = shardformer.ParallelConfig(tensor=2, zero_stage=1)
    return shardformer.initialize(plain, optimizer, train_data=data, batch_size=8, parallel=layout)


def check_falls(losses: Sequence[float]) -> None:
    if not losses[-1] < losses[0]:
        raise ArithmeticError(f"the loss does not fall: {losses}")


def own_loop(folder: Path) -> None:
    context = shardformer.launch_from_torch(seed=0)
    sharded = shardformer.shard_model(model(), context=context)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = sharded(input_ids=ids(), labels=ids()).loss
        loss.backward()
        shardformer.clip_grad_norm_(sharded, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    check_falls(losses)


def engine_steps(folder: Path) -> None:
    """Save after 2 steps, and write the loss of the third step next to the checkpoint."""
    made = engine()
    batch = {"input_ids": ids(8), "labels": ids(8)}
    losses = [made.train_step(batch).item() for _ in range(2)]
    made.save(folder)
    losses.append(made.train_step(batch).item())
    if made.is_first:
        (folder / "next.json").write_text(json.dumps(losses[-1]), encoding="utf-8")
    check_falls(losses)


def checkpoint(folder: Path) -> None:
    """Load the checkpoint of another row, and run the next step."""
    made = engine()
    made.load(folder)
    batch = {"input_ids": ids(8), "labels": ids(8)}
    loss = made.train_step(batch).item()
    expected = json.loads((folder / "next.json").read_text(encoding="utf-8"))
    if abs(loss - expected) > BOUND:
        raise ArithmeticError(f"the loss after the checkpoint is {loss:.6f}, and was {expected:.6f} where it was saved")


def trainer(folder: Path) -> None:
    losses = []

    class Note(shardformer.hooks.Hook):
        def after_step(self, trainer: Any) -> None:
            losses.append(float(trainer.values["loss"]))

    shardformer.Trainer(engine(), hooks=[Note()]).fit(epochs=2)
    check_falls(losses)


PROGRAMS: dict[str, Callable[[Path], None]] = {
    "own_loop": own_loop,
    "engine": engine_steps,
    "trainer": trainer,
    "checkpoint": checkpoint,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](Path(sys.argv[2]))
