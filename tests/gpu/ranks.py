"""Two ranks on one GPU over gloo, compared with the plain model on the GPU as ``shardformer verify`` compares."""

from __future__ import annotations

from typing import Any

import torch

from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory
from shardformer.verify.train_both import VerifyJob, VerifyPipeline
from shardformer.verify.training_options import VerifyTraining

SEQUENCE = {"enable_sequence_parallelism": True}


def job(family: str, device: str, dtype: torch.dtype = torch.float64, **asked: Any) -> VerifyJob:
    """A comparison of three steps, by default in fp64."""
    sample = SmallModelFactory(family).with_min_layers(2) if "pipeline" in asked else SmallModelFactory(family)
    given: dict[str, Any] = {"tensor": 1, "data": 1, "config": {}, **asked}
    return VerifyJob(
        sample,
        RandomBatchFactory(sample.head_class),
        steps=3,
        dtype=dtype,
        loss_fn=None,
        policy=None,
        device=device,
        **given,
    )


def two_ranks(device: str) -> dict[str, VerifyJob]:
    """Name of a check -> the layout that two ranks train."""
    return {
        "tensor 2": job("llama", device, tensor=2),
        "tensor 2, sequence parallel": job("gpt2", device, tensor=2, config=SEQUENCE),
        "tensor 2, overlap": job("llama", device, tensor=2, config={**SEQUENCE, "enable_sequence_overlap": True}),
        "tensor 2, flash attention": job(
            "llama", device, torch.float32, tensor=2, config={"enable_flash_attention": True}
        ),
        "data 2": job("bert", device, data=2),
        "data 2, ZeRO 1": job("llama", device, data=2, training=VerifyTraining(zero_stage=1)),
        "data 2, ZeRO 2": job("gpt2", device, data=2, training=VerifyTraining(zero_stage=2, optimizer="AdamW")),
        "data 2, ZeRO 3": job("llama", device, data=2, training=VerifyTraining(zero_stage=3)),
        "data 2, ZeRO 2 in bf16": job("llama", device, data=2, training=VerifyTraining(zero_stage=2, precision="bf16")),
        "data 2, ZeRO 3 in fp16": job("llama", device, data=2, training=VerifyTraining(zero_stage=3, precision="fp16")),
        "data 2, ZeRO 2 offloaded": job("llama", device, data=2, training=VerifyTraining(zero_stage=2, offload="cpu")),
        "pipeline 2": job("llama", device, pipeline=VerifyPipeline(2, 2)),
        "sequence 2": job("llama", device, sequence=2),
    }
