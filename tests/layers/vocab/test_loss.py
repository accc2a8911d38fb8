"""The vocabulary-parallel loss equals the cross entropy of the full logits, and its communication the docstring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardformer.comm.recorder import CollectiveRecorder
from shardformer.errors import ConfigError, InputError
from shardformer.layout.shard_spec import get_even_split_bounds
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import Axis
from shardformer.tensor_parallel import vocab_parallel_loss
from shardformer.tensor_parallel.vocab_parallel_loss import (
    DistCrossEntropyLoss,
    cross_entropy_1d,
    vocab_parallel_cross_entropy,
)
from tests.pools import WorkerPools

NUM_TOKENS, VOCAB = 23, 127
Loss = tuple[Tensor, Tensor]

# ---------------------------------------------------------------------------------------------- functions that are sent


def sharded_loss(
    logits_TV: Tensor, targets_T: Tensor, *, bounds: list[int] | None = None, chunk_bytes: int = 2**20, **options: Any
) -> Loss:
    """Return the loss and the local slice of the gradient."""
    axis = Axis.of(None)
    bounds = bounds or get_even_split_bounds(logits_TV.shape[1], axis.size)
    local_Tv = logits_TV[:, bounds[axis.rank] : bounds[axis.rank + 1]].clone().requires_grad_()
    with mock.patch.dict(vocab_parallel_loss.CHUNK_BYTES, cpu=chunk_bytes):
        loss = vocab_parallel_cross_entropy(local_Tv, targets_T, axis, bounds, **options)
        (loss * weights(loss)).sum().backward()
    assert local_Tv.grad is not None
    return loss.detach(), local_Tv.grad


def recorded_traffic(logits_TV: Tensor, targets_T: Tensor, **options: Any) -> list[tuple[str, str, int]]:
    """Return (kind, purpose, bytes) of each collective in the forward and the backward pass."""
    axis = Axis.of(None)
    bounds = get_even_split_bounds(logits_TV.shape[1], axis.size)
    local_Tv = logits_TV[:, bounds[axis.rank] : bounds[axis.rank + 1]].clone().requires_grad_()
    with CollectiveRecorder(axis) as recorder:
        vocab_parallel_cross_entropy(local_Tv, targets_T, axis, bounds, **options).sum().backward()
    return [(call.op, call.purpose, call.payload_bytes) for call in recorder.calls]


def refused_before_anything_is_sent(logits_TV: Tensor, targets_T: Tensor) -> str:
    axis = Axis.of(None)
    bounds = get_even_split_bounds(logits_TV.shape[1], axis.size)
    local_Tv = logits_TV[:, bounds[axis.rank] : bounds[axis.rank + 1]]
    recorder = CollectiveRecorder(axis)
    try:
        with recorder:
            vocab_parallel_cross_entropy(local_Tv, targets_T, axis, bounds)
    except InputError as error:
        assert recorder.calls == []
        return str(error)
    raise AssertionError("a label out of the vocabulary was taken")


def by_process_group(logits_TV: Tensor, targets_T: Tensor, vocab_size: int | None) -> Loss:
    axis = Axis.of(None)
    bounds = get_even_split_bounds(logits_TV.shape[-1], axis.size)
    local = logits_TV[..., bounds[axis.rank] : bounds[axis.rank + 1]]
    module = DistCrossEntropyLoss(ignore_index=5, process_group=axis.group, vocab_size=vocab_size)
    return cross_entropy_1d(local, targets_T, 5, torch.distributed.group.WORLD, vocab_size), module(local, targets_T)


# -------------------------------------------------------------------------------------------------------------- helpers


def weights(loss: Tensor) -> Tensor:
    """Return a different gradient for each token, so that a swap of tokens is visible."""
    return torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).reshape(loss.shape)


def batch(dtype: torch.dtype = torch.float64, ignored: int = -100, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits_TV = scale * torch.randn(NUM_TOKENS, VOCAB, generator=generator, dtype=torch.float64)
    targets_T = torch.randint(VOCAB, (NUM_TOKENS,), generator=generator)
    # The first and the last column of every rank are labels.
    targets_T[:8] = torch.tensor([0, 31, 32, 63, 64, 95, 96, 126])
    targets_T[9:12] = ignored
    return logits_TV.to(dtype), targets_T


def full_loss(logits_TV: Tensor, targets_T: Tensor, **options: Any) -> Loss:
    logits_TV = logits_TV.clone().requires_grad_()
    loss = F.cross_entropy(logits_TV, targets_T, **options)
    (loss * weights(loss)).sum().backward()
    assert logits_TV.grad is not None
    return loss.detach(), logits_TV.grad


def joined(results: list[Loss]) -> Loss:
    """Return the loss, which is bitwise equal on all ranks, and the gradient of the full logits."""
    for loss, _ in results:
        assert torch.equal(loss.nan_to_num(-1), results[0][0].nan_to_num(-1))
    return results[0][0], torch.cat([grad for _, grad in results], 1)


class Allocations(TorchDispatchMode):
    """Records the largest allocation of an operation, in bytes, and the number of those of at least ``size``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.largest, self.count = size, 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {x.untyped_storage()._cdata for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage()._cdata not in inputs:
            num_bytes = result.untyped_storage().nbytes()
            self.largest = max(self.largest, num_bytes)
            self.count += num_bytes >= self.size
        return result


# ---------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignore_index", [-100, 63])
def test_loss_equals_cross_entropy_of_the_full_logits(
    pools: WorkerPools, num_ranks: int, reduction: str, label_smoothing: float, ignore_index: int
) -> None:
    options = {"reduction": reduction, "label_smoothing": label_smoothing, "ignore_index": ignore_index}
    logits_TV, targets_T = batch(ignored=ignore_index)
    # 5 rows fit a chunk, and 23 rows are not a multiple of them.
    results = pools(num_ranks).run(sharded_loss, logits_TV, targets_T, chunk_bytes=5 * 8 * 64, **options)
    loss, grad = joined(results)
    expected_loss, expected_grad = full_loss(logits_TV, targets_T, **options)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("bounds", [[0, 1, 127], [0, 120, 127], [0, 127, 127]], ids=str)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_with_uneven_vocabulary_bounds(pool2: WorkerPool, bounds: list[int], label_smoothing: float) -> None:
    logits_TV, targets_T = batch()
    loss, grad = joined(pool2.run(sharded_loss, logits_TV, targets_T, bounds=bounds, label_smoothing=label_smoothing))
    expected_loss, expected_grad = full_loss(logits_TV, targets_T, label_smoothing=label_smoothing)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_error_is_at_most_that_of_torch_in_fp32(pool2: WorkerPool, dtype: torch.dtype, label_smoothing: float) -> None:
    logits_TV, targets_T = batch(dtype)
    options = {"label_smoothing": label_smoothing, "reduction": "none"}
    loss, grad = joined(pool2.run(sharded_loss, logits_TV, targets_T, upcast=True, **options))
    true_loss, true_grad = full_loss(logits_TV.double(), targets_T, **options)
    torch_loss, torch_grad = full_loss(logits_TV.float(), targets_T, **options)
    assert loss.dtype == torch.float32 and grad.dtype == dtype

    def error(value: Tensor, truth: Tensor) -> float:
        return (value.double() - truth).abs().max().item()

    # Sums are taken in another order, so a last bit may be another.
    last_bit = 2**-23 * true_loss.abs().max().item()
    assert error(loss, true_loss) <= error(torch_loss, true_loss) + last_bit
    # The gradient of 16-bit logits is rounded to 16 bits once, as after torch's .float().
    assert error(grad, true_grad) <= 1.01 * error(torch_grad.to(dtype), true_grad) + 2**-23


def test_loss_without_upcast_is_rounded_once_to_the_dtype_of_the_logits(pool2: WorkerPool) -> None:
    logits_TV, targets_T = batch(torch.bfloat16)
    loss, _ = joined(pool2.run(sharded_loss, logits_TV, targets_T))
    assert loss.dtype == torch.bfloat16
    assert torch.equal(loss, full_loss(logits_TV.double(), targets_T)[0].to(torch.bfloat16))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_batch_of_ignored_labels_equals_torch(pool2: WorkerPool, reduction: str, label_smoothing: float) -> None:
    logits_TV, targets_T = batch()
    targets_T[:] = -100
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    loss, grad = joined(pool2.run(sharded_loss, logits_TV, targets_T, **options))
    expected_loss, _ = full_loss(logits_TV, targets_T, **options)
    torch.testing.assert_close(loss, expected_loss, equal_nan=True)
    assert bool(loss.isnan().all()) == (reduction == "mean")
    assert not grad.any()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_large_logits_neither_overflow_nor_lose_precision(pool2: WorkerPool, label_smoothing: float) -> None:
    logits_TV, targets_T = batch(torch.float32)
    logits_TV[:6] += 1e4
    logits_TV[6:12] -= 1e4
    logits_TV[12:18, 100] = 1e4
    logits_TV[18:, 3] = -1e4
    options = {"label_smoothing": label_smoothing, "reduction": "none"}
    loss, grad = joined(pool2.run(sharded_loss, logits_TV, targets_T, **options))
    expected_loss, expected_grad = full_loss(logits_TV.double(), targets_T, **options)
    # One fp32 number for log S + M would be off by 5e-4 in the loss of a token.
    torch.testing.assert_close(loss.double(), expected_loss, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-5, atol=1e-7)


def test_rank_with_masked_columns_adds_nothing(pool4: WorkerPool) -> None:
    logits_TV, targets_T = batch()
    targets_T[8:] = 64
    logits_TV[:, 32:64] = -torch.inf  # all that rank 1 holds; the labels 32 and 63 have no probability
    options = {"reduction": "none"}
    loss, grad = joined(pool4.run(sharded_loss, logits_TV, targets_T, **options))
    expected_loss, expected_grad = full_loss(logits_TV, targets_T, **options)
    assert loss[2].isinf() and loss[3].isinf()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("label", "worst"), [(127, 127), (4000, 4000), (-1, -1)])
def test_label_outside_the_vocabulary_raises_on_all_ranks(pool4: WorkerPool, label: int, worst: int) -> None:
    logits_TV, targets_T = batch()
    targets_T[4] = label
    for message in pool4.run(refused_before_anything_is_sent, logits_TV, targets_T):
        assert f"The label {worst} is outside the vocabulary (0 to 126) and is not ignore_index=-100" in message
        assert "resize_token_embeddings" in message


@pytest.mark.parametrize(("num_ranks", "label_smoothing", "dtype"), [
    (2, 0.0, torch.float32), (4, 0.0, torch.float64), (4, 0.1, torch.bfloat16),
])  # fmt: skip
def test_one_collective_sends_three_numbers_per_token(
    pools: WorkerPools, num_ranks: int, label_smoothing: float, dtype: torch.dtype
) -> None:
    logits_TV, targets_T = batch(dtype)
    traffic = pools(num_ranks).run(recorded_traffic, logits_TV, targets_T, label_smoothing=label_smoothing)
    num_bytes = (4 if label_smoothing else 3) * num_ranks * NUM_TOKENS * max(dtype.itemsize, 4)
    assert traffic == [[("all_gather", "loss", num_bytes)]] * num_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_not_copied_and_only_their_gradient_is_allocated(dtype: torch.dtype) -> None:
    logits_TV = torch.randn(512, 1000).to(dtype).requires_grad_()
    targets_T = torch.randint(1000, (512,))
    chunk_bytes, own_bytes = 64 * 1024, logits_TV.numel() * logits_TV.element_size()
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with mock.patch.dict(vocab_parallel_loss.CHUNK_BYTES, cpu=chunk_bytes):
        with Allocations(own_bytes) as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = vocab_parallel_cross_entropy(logits_TV, targets_T, Axis("tensor"), [0, 1000], upcast=True)
        with Allocations(own_bytes) as backward:
            loss.backward()
    assert forward.largest <= chunk_bytes and forward.count == 0
    assert backward.largest == own_bytes and backward.count == 1
    large = [x for x in kept if x.numel() >= logits_TV.numel()]
    assert [x.data_ptr() for x in large] == [logits_TV.data_ptr()]
    assert sum(x.numel() * x.element_size() for x in kept) - own_bytes < 32 * 512
    torch.testing.assert_close(loss, F.cross_entropy(logits_TV.float(), targets_T))


def test_one_process_needs_no_process_group() -> None:
    logits_TV, targets_T = batch()
    loss, grad = sharded_loss(logits_TV, targets_T)
    expected_loss, expected_grad = full_loss(logits_TV, targets_T)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-14)


def test_empty_batch_equals_torch() -> None:
    nothing = torch.empty(0, VOCAB, dtype=torch.float64), torch.empty(0, dtype=torch.long)
    loss, grad = sharded_loss(*nothing)
    assert loss.isnan() and grad.shape == (0, VOCAB)


@pytest.mark.parametrize("vocab_size", [None, 127])
def test_loss_over_a_process_group(pool2: WorkerPool, vocab_size: int | None) -> None:
    logits_TV, targets_T = batch(ignored=5)
    if vocab_size is None:
        logits_TV, targets_T = logits_TV[:, :126], targets_T.clamp(max=125)
    logits_BSV, targets_BS = logits_TV[:22].view(2, 11, -1), targets_T[:22].view(2, 11)
    expected = F.cross_entropy(logits_TV[:22], targets_T[:22], ignore_index=5)
    for by_function, by_module in pool2.run(by_process_group, logits_BSV, targets_BS, vocab_size):
        torch.testing.assert_close(by_function, expected, rtol=1e-12, atol=0)
        assert torch.equal(by_function, by_module)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (
            lambda x, y, a: vocab_parallel_cross_entropy(x, y, a, [0, 9], reduction="avg"),
            ConfigError,
            "'avg'.*'mean', 'sum'",
        ),
        (
            lambda x, y, a: vocab_parallel_cross_entropy(x, y, a, [0, 9], label_smoothing=2.0),
            ConfigError,
            "between 0.0",
        ),
        (lambda x, y, a: vocab_parallel_cross_entropy(x, y[:2], a, [0, 9]), InputError, r"\(4, 9\).*\(2,\).*Flatten"),
        (
            lambda x, y, a: cross_entropy_1d(x, y, process_group=a, vocab_size=8),
            InputError,
            "must have 8 columns for vocab_size=8, but got 9",
        ),
    ],
    ids=["reduction", "label_smoothing", "shapes", "vocab_size"],
)
def test_invalid_arguments_raise(call: Callable[..., Tensor], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call(torch.randn(4, 9), torch.zeros(4, dtype=torch.long), Axis("tensor"))
