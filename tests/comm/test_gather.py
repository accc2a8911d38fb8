"""Full tensors are gathered from shards, with one message for all tensors of one layout."""

from __future__ import annotations

import torch
from torch import Tensor

from shardformer.comm.collectives import gather_full_tensor, gather_full_tensors
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.layout.shard_spec import ShardSpec, Split
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext


def over(length: int, *axes: str) -> Split:
    return Split.even(length, 2 ** len(axes), axes=axes)


SPECS = [
    ShardSpec((7, 3), {0: over(7, "tensor")}),
    ShardSpec((4, 5), {0: over(4, "tensor"), 1: over(5, "data")}),
    ShardSpec((3,)),
    ShardSpec((2, 9), {1: over(9, "tensor")}),
    ShardSpec((5,), {0: over(5, "tensor")}),
    ShardSpec((6, 3), {0: over(6, "tensor"), 1: over(3, "data")}),
]
DTYPES = [torch.float32] * 4 + [torch.float64, torch.float32]


def test_gathering_several_tensors_equals_gathering_each() -> None:
    full = [torch.randn(spec.shape, dtype=dtype) for spec, dtype in zip(SPECS, DTYPES, strict=True)]

    def gather(context: ParallelContext) -> tuple[list[Tensor], dict[str, int]]:
        here = {"tensor": context.tensor.rank, "data": context.data.rank}
        local = [spec.slice_full_tensor(x, here).clone() for spec, x in zip(SPECS, full, strict=True)]
        alone = [gather_full_tensor(x, spec, context.axis) for x, spec in zip(local, SPECS, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(alone, full, strict=True))
        with CollectiveRecorder(context) as recorder:
            found = gather_full_tensors(local, SPECS, context.axis)
        return found, {axis: count for (_, axis, _), (count, _) in recorder.summarize_calls().items()}

    for found, calls in run_as_threads(gather, data=2, tensor=2):
        assert all(torch.equal(a, b) for a, b in zip(found, full, strict=True))
        assert calls == {"tensor": 3, "data": 1}, "fp32 over tensor, fp64 over tensor, fp32 over both"
