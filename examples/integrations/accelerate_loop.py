"""Train a causal language model with an accelerate loop.

    shardformer run --nproc_per_node 2 examples/integrations/accelerate_loop.py --model MODEL --text T.txt --output out

Two lines differ from a script for one device: the import of Accelerator, and the argument ``parallel``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup

from shardformer.integrations.accelerate import Accelerator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or name of the model and its tokenizer")
    parser.add_argument("--text", required=True, help="text file for training")
    parser.add_argument("--output", required=True, help="folder for the model")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--block_size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, parallel={"tensor": 2})
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    tokens = torch.tensor(tokenizer(Path(args.text).read_text())["input_ids"])
    blocks = tokens[: len(tokens) // args.block_size * args.block_size].view(-1, args.block_size)
    loader = DataLoader(blocks, batch_size=args.batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, len(loader) * args.epochs)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    losses = []
    for _ in range(args.epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
        accelerator.print(f"loss {sum(losses) / len(losses):.4f}")

    accelerator.unwrap_model(model).save_pretrained(
        args.output,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    if accelerator.is_main_process:
        Path(args.output, "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
