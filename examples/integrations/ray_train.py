"""Train a small model with Ray Train, on two workers that shard it, or in this process.

    python examples/integrations/ray_train.py --folder runs            # two workers, tensor parallelism
    python examples/integrations/ray_train.py --folder runs --plain    # one process

Both print the same losses. A second run continues after the last checkpoint of the folder, in any layout.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers

import shardformer


def make_model() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=101, **sizes))


def make_data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": x, "labels": x} for x in torch.randint(0, 101, (32, 16), generator=generator)]


def train(settings: dict[str, Any]) -> None:
    """Train on one worker. Ray has initialized torch.distributed, which ``initialize`` then uses."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options: dict[str, Any] = {"batch_size": 8, "parallel": settings["parallel"], "data_options": {"seed": 0}}
    engine = shardformer.initialize(model, optimizer, train_data=make_data(), **options)
    checkpoints = Path(settings["folder"]) / "checkpoints"
    engine.resume(checkpoints)
    losses = []
    while engine.steps < settings["steps"]:
        for batch in engine.data:
            losses.append(float(engine.train_step(batch)))
            if engine.steps == settings["steps"]:
                break
    engine.save(checkpoints)  # on all workers, into a folder that all of them see
    if engine.context.rank == 0:
        (Path(settings["folder"]) / "losses.json").write_text(json.dumps(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--plain", action="store_true", help="train in this process, without Ray")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    settings = {"folder": str(arguments.folder.resolve()), "steps": arguments.steps, "parallel": {}}
    if arguments.plain:
        train(settings)
    else:
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        TorchTrainer(
            train,
            train_loop_config={**settings, "parallel": {"tensor": 2}},
            scaling_config=ScalingConfig(num_workers=2),  # on GPUs also use_gpu=True
            run_config=RunConfig(storage_path=str(arguments.folder.resolve())),
        ).fit()
    print(f"Losses: {(arguments.folder / 'losses.json').read_text()}")


if __name__ == "__main__":
    main()
