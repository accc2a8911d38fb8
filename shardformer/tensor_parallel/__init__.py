"""Tensor-parallel layers and blocks, sequence parallelism, and vocabulary-parallel logits and losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardformer.public_names import make_lazy_getattr_and_all

if TYPE_CHECKING:
    from shardformer.kernels.fused_ops import FusedLayerNorm as FusedLayerNorm
    from shardformer.kernels.fused_ops import FusedRMSNorm as FusedRMSNorm
    from shardformer.tensor_parallel.layers import DropoutForParallelInput as DropoutForParallelInput
    from shardformer.tensor_parallel.layers import DropoutForReplicatedInput as DropoutForReplicatedInput
    from shardformer.tensor_parallel.layers import Embedding1D as Embedding1D
    from shardformer.tensor_parallel.layers import FusedLinear1D_Col as FusedLinear1D_Col
    from shardformer.tensor_parallel.layers import Linear1D_Col as Linear1D_Col
    from shardformer.tensor_parallel.layers import Linear1D_Row as Linear1D_Row
    from shardformer.tensor_parallel.layers import VocabParallelEmbedding1D as VocabParallelEmbedding1D
    from shardformer.tensor_parallel.layers import VocabParallelLMHead1D as VocabParallelLMHead1D
    from shardformer.tensor_parallel.parallel_module import ParallelModule as ParallelModule
    from shardformer.tensor_parallel.vocab_parallel_loss import DistCrossEntropyLoss as DistCrossEntropyLoss
    from shardformer.tensor_parallel.vocab_parallel_loss import cross_entropy_1d as cross_entropy_1d
    from shardformer.tensor_parallel.vocab_parallel_loss import (
        vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
    )

__getattr__, __all__ = make_lazy_getattr_and_all(__name__)
