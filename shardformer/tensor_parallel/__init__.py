"""The parallel layers, by name: ``from shardformer.tensor_parallel import Linear1D_Col``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_WHERE = {
    "DistCrossEntropyLoss": "tensor_parallel.vocab_parallel_loss",
    "DropoutForParallelInput": "tensor_parallel.layers",
    "DropoutForReplicatedInput": "tensor_parallel.layers",
    "Embedding1D": "tensor_parallel.layers",
    "FusedLayerNorm": "kernels.fused_ops",
    "FusedLinear1D_Col": "tensor_parallel.layers",
    "FusedRMSNorm": "kernels.fused_ops",
    "Linear1D_Col": "tensor_parallel.layers",
    "Linear1D_Row": "tensor_parallel.layers",
    "ParallelModule": "tensor_parallel.parallel_module",
    "VocabParallelEmbedding1D": "tensor_parallel.layers",
    "VocabParallelLMHead1D": "tensor_parallel.layers",
    "cross_entropy_1d": "tensor_parallel.vocab_parallel_loss",
    "vocab_parallel_cross_entropy": "tensor_parallel.vocab_parallel_loss",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'shardformer.tensor_parallel' has no attribute {name!r}")
    return getattr(import_module(f"shardformer.{_WHERE[name]}"), name)
