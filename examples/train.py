"""Trains a small LLaMA of transformers over all processes: shardformer run --nproc_per_node 2 examples/train.py

Its weights are random, and it learns to count: each token is the one before plus one.
"""

import torch
import transformers

import shardformer

context = shardformer.launch_from_torch(seed=0)  # all processes form the tensor axis
config = transformers.LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
)
numbers = torch.Generator().manual_seed(0)  # seeded alike, so every rank draws the same batch

model = transformers.LlamaForCausalLM(config).to(context.device)
model = shardformer.shard_model(model, context=context)  # <- the line
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # of the sharded model's parameters

for step in range(1, 11):
    ids = (torch.randint(128, (16, 1), generator=numbers) + torch.arange(32)) % 128
    loss = model(input_ids=ids.to(context.device), labels=ids.to(context.device)).loss
    loss.backward()
    shardformer.clip_grad_norm_(model, 1.0)  # the true norm, over all parts
    optimizer.step()
    optimizer.zero_grad()
    if context.tensor.rank == 0:
        print(f"step {step:2}  loss {loss.item():.4f}", flush=True)

model.save_pretrained("runs/train")  # on all ranks: they gather the full weights, the first one writes
