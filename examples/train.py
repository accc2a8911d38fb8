"""Train a small LLaMA with tensor parallelism.

    shardformer run --nproc_per_node 2 examples/train.py

The model learns to count: each token is the previous one plus one.
"""

import torch
import transformers

import shardformer

context = shardformer.launch_from_torch(seed=0)  # all processes form the tensor axis
config = transformers.LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
)
numbers = torch.Generator().manual_seed(0)  # the same seed, so that every rank draws the same batch

model = transformers.LlamaForCausalLM(config).to(context.device)
model = shardformer.shard_model(model, context=context)  # <- the added line
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # the parameters of the sharded model

for step in range(1, 11):
    ids = (torch.randint(128, (16, 1), generator=numbers) + torch.arange(32)) % 128
    loss = model(input_ids=ids.to(context.device), labels=ids.to(context.device)).loss
    loss.backward()
    shardformer.clip_grad_norm_(model, 1.0)  # by the norm over all shards
    optimizer.step()
    optimizer.zero_grad()
    if context.tensor.rank == 0:
        print(f"step {step:2}  loss {loss.item():.4f}", flush=True)

model.save_pretrained("runs/train")  # call on all ranks. Rank 0 writes the gathered weights
