"""Statistics of vocabulary-parallel logits equal those of the full logits, and their communication the docstring."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardformer.comm.recorder import CollectiveRecorder
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.tensor_parallel.vocab_parallel_loss import (
    NUMBERS,
    TokenStatistics,
    vocab_parallel_token_statistics,
)

NUM_TOKENS, VOCAB = 23, 127
BOUNDS = [0, 60, 60, 127]
"""Columns of three ranks. One rank has none."""


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits_TV = 3 * torch.randn(NUM_TOKENS, VOCAB, generator=generator, dtype=torch.float64)
    labels_T = torch.randint(VOCAB, (NUM_TOKENS,), generator=generator)
    labels_T[:8] = logits_TV[:8].argmax(-1)
    logits_TV[0, [3, 100]] = logits_TV[0].max() + 1  # two equal maxima: the first is the most likely token
    labels_T[0], labels_T[1] = 100, 5
    logits_TV[1, :60] = logits_TV[1, 5] = -1000.0
    logits_TV[2, :60] = -torch.inf
    labels_T[2] = 100
    return logits_TV.to(dtype), labels_T


def expected(logits_TV: Tensor, labels_T: Tensor) -> TokenStatistics:
    x_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    log_p_TV = x_TV.log_softmax(-1)
    p_TV = log_p_TV.exp()
    return TokenStatistics(
        log_p_TV.gather(1, labels_T[:, None])[:, 0],
        -(p_TV * log_p_TV.masked_fill(log_p_TV.isinf(), 0.0)).sum(-1),
        p_TV.square().sum(-1).log(),
        x_TV.mean(-1),
        x_TV.argmax(-1) == labels_T,
    )


def gradient(found: TokenStatistics, logits: Tensor) -> Tensor:
    assert found.entropy is not None
    weights_T = torch.linspace(0.5, 2.0, NUM_TOKENS, dtype=found.log_probs.dtype)
    (grad,) = torch.autograd.grad((weights_T * found.log_probs + weights_T.flip(0) * found.entropy).sum(), [logits])
    return grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_statistics_and_gradients_equal_those_of_the_full_logits(dtype: torch.dtype) -> None:
    logits_TV, labels_T = batch(dtype)
    if dtype == torch.bfloat16:
        logits_TV[2] = 0.0

    def run(context: ParallelContext) -> tuple[TokenStatistics, Tensor]:
        axis = context.tensor
        local_Tv = logits_TV[:, BOUNDS[axis.rank] : BOUNDS[axis.rank + 1]].clone().requires_grad_()
        found = vocab_parallel_token_statistics(local_Tv, labels_T, axis, BOUNDS, tuple(NUMBERS))
        return found, gradient(found, local_Tv)

    full_TV = logits_TV.clone().requires_grad_()
    wanted = expected(full_TV, labels_T)
    results = run_as_threads(run, tensor=3)
    bound = {"atol": 1e-12, "rtol": 1e-12} if dtype == torch.float64 else {"atol": 1e-5, "rtol": 1e-5}
    for found, _ in results:
        for name, value, reference in zip(TokenStatistics._fields, found, wanted, strict=True):
            assert value is not None and reference is not None
            torch.testing.assert_close(value, reference, **bound, msg=lambda text, name=name: f"{name}: {text}")
    joined = torch.cat([grad for _, grad in results], dim=1)
    torch.testing.assert_close(joined, gradient(wanted, full_TV), **bound)


def test_only_requested_statistics_are_sent_in_one_collective() -> None:
    logits_TV, labels_T = batch(torch.float32)

    def traffic(context: ParallelContext) -> list[tuple[str, int]]:
        axis = context.tensor
        local_Tv = logits_TV.chunk(2, 1)[axis.rank].clone().requires_grad_()
        with CollectiveRecorder(axis) as recorder:
            for requested in ((), ("entropy", "is_top1")):
                found = vocab_parallel_token_statistics(local_Tv, labels_T, axis, (0, 64, VOCAB), requested)
                assert (found.entropy is None, found.mean_logits) == (not requested, None)
                found.log_probs.sum().backward()
        return [(call.op, call.payload_bytes) for call in recorder.calls]

    assert run_as_threads(traffic, tensor=2)[0] == [("all_gather", 4 * k * 2 * NUM_TOKENS) for k in (3, 5)]
