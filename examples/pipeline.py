"""Trains a small GPT-2 of transformers as a pipeline: shardformer run --nproc_per_node 2 examples/pipeline.py

Each process holds some of its layers. It reads English text byte by byte, and learns to guess the next one.
"""

from pydoc_data.topics import topics

import torch
import transformers

import shardformer

context = shardformer.launch_from_torch(pipe=2, seed=0)  # two stages; four processes would be two such pipelines
text = torch.tensor(list("\n".join(topics.values()).encode()))
config = transformers.GPT2Config(
    vocab_size=256, n_positions=64, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
)
starts = torch.Generator().manual_seed(context.data.rank)  # all stages draw the same batch, data ranks each their own

model = transformers.GPT2LMHeadModel(config).to(context.device).train()  # with its dropout
model = shardformer.shard_model(model, context=context)  # this process keeps the layers of its stage
pipeline = shardformer.Pipeline(model, micro_batches=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # of this stage's parameters

for step in range(1, 11):
    rows = torch.randint(len(text) - 64, (16, 1), generator=starts) + torch.arange(64)
    ids = text[rows].to(context.device)
    loss = pipeline.step({"input_ids": ids, "labels": ids})  # forward and backward, of all micro-batches
    shardformer.clip_grad_norm_(model, 1.0)  # the norm of the whole model's gradient
    optimizer.step()
    optimizer.zero_grad()
    if context.pipe.rank == context.data.rank == 0:
        print(f"step {step:2}  loss {loss.item():.4f}", flush=True)

model.save_pretrained("runs/pipeline")  # on all ranks: a plain checkpoint of all layers
