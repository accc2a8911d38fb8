"""A notebook that trains with ``accelerate.notebook_launcher``: ``python -m tests.integrations.notebook FILE PORT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import notebook_launcher
from torch.utils.data import DataLoader

from shardformer.integrations.accelerate import Accelerator
from tests.integrations.small_models import llama, token_rows


def train(file: str, layout: dict[str, Any]) -> None:
    """Train a model in one cell of a notebook, and write the losses."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, parallel=layout)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(token_rows(), batch_size=8, collate_fn=transformers.default_data_collator)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if accelerator.is_main_process:
        Path(file).write_text(json.dumps({"losses": losses, "world_size": torch.distributed.get_world_size()}))


if __name__ == "__main__":
    notebook_launcher(train, (sys.argv[1], {"tensor": 2}), num_processes=2, use_port=sys.argv[2])
