"""Checkpoints of real processes: random states, DistributedDataParallel, and compiled models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardformer.checkpoint.load import load_checkpoint
from shardformer.checkpoint.save import async_save_checkpoint, save_checkpoint
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.random_state import seed_all_generators
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory, compute_model_loss
from shardformer.weights.state_dict import full_state_dict
from shardformer.zero.shard_optimizer import shard_optimizer

DROPS = {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.1}


def trained(
    sizes: dict[str, int], folder: Path, resume: bool, stage: int | None
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and weights of a run with dropout that saves halfway or resumes from there."""
    context = ParallelContext.from_default_process_group(sizes)
    seed_all_generators(1 if resume else 0)
    model = shard_model(SmallModelFactory("gpt2", changes=DROPS)(), context=context).train()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if stage is not None:
        optimizer = shard_optimizer(model, optimizer, stage=stage)
    torch.manual_seed(100 + context.data.rank + 10 * resume)
    losses = []
    if resume:
        assert load_checkpoint(model, folder, optimizer).has_random
    saving = None
    for step in range(2 if resume else 0, 4):
        loss = compute_model_loss(
            model, RandomBatchFactory(DEFAULT_HEAD["gpt2"], batch_size=2)(10 * step + context.data.rank)
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        if step == 1 and not resume:
            saving = async_save_checkpoint(model, folder, optimizer, step=2)
    if saving is not None:
        saving.wait()
    return losses, full_state_dict(model)


def check_goes_on(pool: WorkerPool, folder: Path, sizes: dict[str, int], stage: int | None) -> None:
    straight = pool.run(trained, sizes, folder, False, stage)
    resumed = pool.run(trained, sizes, folder, True, stage)
    for (losses, weights), (all_losses, expected) in zip(resumed, straight, strict=True):
        assert losses == all_losses[2:]
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_dropout_resumes_on_tensor_ranks(pool2: WorkerPool, tmp_path: Path) -> None:
    check_goes_on(pool2, tmp_path, {"tensor": 2}, None)


def test_dropout_resumes_on_data_ranks(pool2: WorkerPool, tmp_path: Path) -> None:
    check_goes_on(pool2, tmp_path, {"data": 2}, 3)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def data_parallel(folder: Path) -> dict[str, Tensor]:
    model = net()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    stepped(wrapped, optimizer, range(2))
    save_checkpoint(wrapped, folder, optimizer, step=2)
    stepped(wrapped, optimizer, range(2, 4))
    dist.barrier()
    return model.state_dict()


def test_ddp_checkpoint_resumes_in_one_process(pool2: WorkerPool, tmp_path: Path) -> None:
    expected = pool2.run(data_parallel, tmp_path)[0]
    goes_on(tmp_path, expected, lambda model: model)


def test_compiled_model_is_unwrapped(pool2: WorkerPool, tmp_path: Path) -> None:
    expected = pool2.run(data_parallel, tmp_path)[0]
    goes_on(tmp_path, expected, lambda model: torch.compile(model, backend="eager"))


def goes_on(folder: Path, expected: dict[str, Tensor], wrap: Callable[[nn.Module], Any]) -> None:
    model = net()
    nn.init.zeros_(model[0].weight)  # type: ignore[index,arg-type]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    assert load_checkpoint(wrap(model), folder, optimizer).step == 2
    stepped(model, optimizer, range(2, 4))
    assert all(torch.allclose(x, expected[name], rtol=0, atol=1e-6) for name, x in model.state_dict().items())
