"""The parallel layers, by name: ``from shardformer.layers import Linear1D_Col``."""

from importlib import import_module
from typing import Any

_WHERE = {
    "DistCrossEntropyLoss": "vocab.loss",
    "DropoutForParallelInput": "dropout",
    "DropoutForReplicatedInput": "dropout",
    "Embedding1D": "tensor.embedding",
    "FusedLayerNorm": "norm",
    "FusedLinear1D_Col": "tensor.linear",
    "FusedRMSNorm": "norm",
    "LayerNorm2D": "grid.norm",
    "Linear1D_Col": "tensor.linear",
    "Linear1D_Row": "tensor.linear",
    "Linear2D": "grid.summa",
    "Linear2p5D": "grid.summa",
    "Linear3D": "grid.summa",
    "ParallelModule": "tensor.parallel_module",
    "VocabParallelEmbedding1D": "tensor.embedding",
    "VocabParallelLMHead1D": "tensor.linear",
    "cross_entropy_1d": "vocab.loss",
    "vocab_parallel_cross_entropy": "vocab.loss",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'shardformer.layers' has no attribute {name!r}")
    return getattr(import_module(f"shardformer.layers.{_WHERE[name]}"), name)
