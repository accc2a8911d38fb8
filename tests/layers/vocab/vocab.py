"""Full and sharded logits for tests, and their comparison."""

from __future__ import annotations

import torch
from torch import Tensor

from shardformer.comm.recorder import CollectiveRecorder
from shardformer.layout.shard_spec import get_even_split_bounds
from shardformer.mesh.parallel_context import Axis
from shardformer.tensor_parallel.vocab_parallel_logits import VocabParallelLogits, wrap_local_logits_as_full_logits

B, S, V = 2, 3, 127
SHAPE = (B, S, V)


def make(
    dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = SHAPE
) -> tuple[Tensor, Tensor, Tensor, CollectiveRecorder]:
    """Full logits, their local shard, the sharded logits, and a recorder of collectives."""
    axis = Axis.of(None)
    bounds = get_even_split_bounds(shape[-1], axis.size)
    plain = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    local = plain[..., bounds[axis.rank] : bounds[axis.rank + 1]].clone().requires_grad_()
    # A head's output is not a leaf.
    return (
        plain.requires_grad_(),
        local,
        wrap_local_logits_as_full_logits(local * 1, axis, bounds),
        CollectiveRecorder(axis),
    )


def own(full: Tensor, axis_dim: int = -1) -> Tensor:
    axis = Axis.of(None)
    bounds = get_even_split_bounds(full.shape[axis_dim], axis.size)
    return full.narrow(axis_dim, bounds[axis.rank], bounds[axis.rank + 1] - bounds[axis.rank])


def plain_of(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, VocabParallelLogits) else x


def same(ours: Tensor, theirs: Tensor) -> None:
    """16-bit numbers may differ by one unit in the last place, because gradients are summed in another order."""
    last_bit = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-6}.get(theirs.dtype, 1e-12)
    torch.testing.assert_close(plain_of(ours), theirs, rtol=last_bit, atol=last_bit)
