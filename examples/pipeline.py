"""Train a small GPT-2 in two pipeline stages.

    shardformer run --nproc_per_node 2 examples/pipeline.py

Each process has half of the layers. The model learns to predict the next byte of English text.
"""

from pydoc_data.topics import topics

import torch
import transformers

import shardformer

context = shardformer.launch_from_torch(pipe=2, seed=0)  # two stages. Four processes would form two pipelines
text = torch.tensor(list("\n".join(topics.values()).encode()))
config = transformers.GPT2Config(
    vocab_size=256, n_positions=64, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
)
starts = torch.Generator().manual_seed(context.data.rank)  # the same batch on all stages

model = transformers.GPT2LMHeadModel(config).to(context.device).train()
model = shardformer.shard_model(model, context=context)  # keeps only the layers of this stage
pipeline = shardformer.Pipeline(model, micro_batches=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # the parameters of this stage

for step in range(1, 11):
    rows = torch.randint(len(text) - 64, (16, 1), generator=starts) + torch.arange(64)
    ids = text[rows].to(context.device)
    loss = pipeline.step({"input_ids": ids, "labels": ids})  # forward and backward of all micro-batches
    shardformer.clip_grad_norm_(model, 1.0)  # by the norm over all stages
    optimizer.step()
    optimizer.zero_grad()
    if context.pipe.rank == context.data.rank == 0:
        print(f"step {step:2}  loss {loss.item():.4f}", flush=True)

model.save_pretrained("runs/pipeline")  # call on all ranks. Writes a regular checkpoint with all layers
