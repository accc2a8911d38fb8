"""A norm over sharded features equals the plain norm, even if ranks share heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardformer.kernels.fused_ops import make_fused_norm
from shardformer.layout.shard_spec import AttentionHeadLayout
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.tensor_parallel.layers import ShardedNorm

B, S, HEAD_DIM = 2, 3, 4
LAYOUTS = {
    "two ranks": AttentionHeadLayout(4, 4, HEAD_DIM, 2),
    "uneven": AttentionHeadLayout(5, 5, HEAD_DIM, 3),
    "one head of four ranks": AttentionHeadLayout(4, 1, HEAD_DIM, 4),
    "two heads of two or three ranks": AttentionHeadLayout(6, 2, HEAD_DIM, 4),
    "heads that come in repeated": AttentionHeadLayout(8, 2, HEAD_DIM, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_norm_over_kv_heads_equals_the_plain_norm(kind: Any, layout: AttentionHeadLayout) -> None:
    torch.manual_seed(0)
    width, ranks = layout.num_kv_heads * HEAD_DIM, range(layout.num_ranks)
    plain: nn.Module = kind(width).double()
    for p in plain.parameters():
        nn.init.normal_(p)
    x = torch.randn(B, S, width, dtype=torch.float64, requires_grad=True)
    indices = [_indices(layout, rank) for rank in ranks]
    grads = [torch.randn(B, S, len(at), dtype=torch.float64) for at in indices]
    out = plain(x)
    sum((out[..., at] * grad).sum() for at, grad in zip(indices, grads, strict=True)).backward()

    def normalise(context: ParallelContext) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        rank = context.tensor.rank
        expand = layout.get_local_kv_head_per_query(rank)
        norm = ShardedNorm(
            make_fused_norm(plain),
            layout.get_kv_split(),
            None if expand is None else (HEAD_DIM, expand),
            context.tensor,
        )
        mine = x.detach()[..., indices[rank]].requires_grad_()
        found = norm(mine)
        found.backward(grads[rank])
        assert mine.grad is not None
        return found.detach(), mine.grad, {name: p.grad for name, p in norm.named_parameters() if p.grad is not None}

    found = run_as_threads(normalise, tensor=layout.num_ranks)
    for (values, _, _), at in zip(found, indices, strict=True):
        torch.testing.assert_close(values, out.detach()[..., at], rtol=0, atol=1e-12)
    of_input = torch.zeros_like(x)
    for (_, grad, _), at in zip(found, indices, strict=True):
        of_input.index_add_(-1, at, grad)
    torch.testing.assert_close(of_input, x.grad, rtol=0, atol=1e-12)
    for name, p in plain.named_parameters():
        of_param = torch.zeros_like(p)
        for rank, (_, _, of_params) in enumerate(found):
            of_param.index_add_(0, layout.get_kv_split().indices(rank), of_params[name])
        torch.testing.assert_close(of_param, p.grad, rtol=0, atol=1e-12)


def _indices(layout: AttentionHeadLayout, rank: int) -> Tensor:
    """Return the input features of a rank: its own, or one KV head for each query head."""
    held, expand = layout.get_kv_split().indices(rank), layout.get_local_kv_head_per_query(rank)
    return held if expand is None else held.view(-1, HEAD_DIM)[expand].flatten()
