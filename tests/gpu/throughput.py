"""Tokens per second of a GPT of about 100 million parameters in bf16, for plain PyTorch and the engine, alternating."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

import shardformer
from shardformer.mesh.parallel_context import ParallelContext

STEPS_A_TURN = 5


def measure(device: str, seconds: float, batch: int = 8, sequence: int = 1024, **size: int) -> dict[str, float]:
    """Train both for about ``seconds`` in total, alternating every few steps.

    Both have bf16 weights and fused AdamW; the engine's masters are in fp32, which the plain one's are not.

    Returns tokens per second of both (the median turn), their ratio, and the number of parameters.
    """
    where = torch.device(device)
    plain, parameters = _plain(where, size)
    ids = torch.randint(5, size.get("vocab_size", 50257), (batch, sequence), device=where)
    data = {"input_ids": ids, "labels": ids}
    turns: dict[str, Callable[[dict[str, Tensor]], Any]] = {"plain": plain, "engine": _engine(where, size)}
    for step in turns.values():  # compiles and tunes kernels
        for _ in range(3):
            step(data)
    found: dict[str, list[float]] = {name: [] for name in turns}
    end = time.monotonic() + seconds
    while time.monotonic() < end or not found["engine"]:
        for name, step in turns.items():
            _wait(where)
            start = time.perf_counter()
            for _ in range(STEPS_A_TURN):
                step(data)
            _wait(where)
            found[name].append(STEPS_A_TURN * ids.numel() / (time.perf_counter() - start))
    speeds = {name: median(speeds) for name, speeds in found.items()}
    return {**speeds, "ratio": speeds["engine"] / speeds["plain"], "parameters": parameters}


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def _model(where: torch.device, size: dict[str, int]) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **off, **tokens, **size)).to(where).train()


def _plain(where: torch.device, size: dict[str, int]) -> tuple[Callable[[dict[str, Tensor]], Any], int]:
    model = _model(where, size).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(data: dict[str, Tensor]) -> None:
        model(**data).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, sum(p.numel() for p in model.parameters())


def _engine(where: torch.device, size: dict[str, int]) -> Callable[[dict[str, Tensor]], Any]:
    model = _model(where, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    parallel = shardformer.ParallelConfig(precision="bf16")
    context = ParallelContext.from_default_process_group({}, where)
    return shardformer.initialize(model, optimizer, parallel=parallel, context=context).train_step
