"""The parallel layers, by name: ``from shardformer.layers import Linear1D_Col``."""

from importlib import import_module
from typing import Any

_WHERE = {
    "DistCrossEntropyLoss": "loss",
    "DropoutForParallelInput": "dropout",
    "DropoutForReplicatedInput": "dropout",
    "Embedding1D": "embedding",
    "FusedLayerNorm": "norm",
    "FusedLinear1D_Col": "linear",
    "FusedRMSNorm": "norm",
    "Linear1D_Col": "linear",
    "Linear1D_Row": "linear",
    "ParallelModule": "parallel_module",
    "VocabParallelEmbedding1D": "embedding",
    "VocabParallelLMHead1D": "linear",
    "cross_entropy_1d": "loss",
    "vocab_parallel_cross_entropy": "loss",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'shardformer.layers' has no attribute {name!r}")
    return getattr(import_module(f"shardformer.layers.{_WHERE[name]}"), name)
