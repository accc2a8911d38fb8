"""GradientReducer: ``.grad`` after a backward pass is reduced over all ranks, for any sequence of passes."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardformer.comm.collectives import all_gather
from shardformer.gradients.buckets import ALIGNMENT_ELEMENTS, GradientBucket, GradientSlot, ReduceScatterToShards
from shardformer.gradients.reducer import GradientReducer
from shardformer.layout.shard_spec import ShardSpec, Split
from shardformer.layout.sharding_metadata import GradientReduction, ParamEntry
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import Axis


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, use_b: bool = True, reentrant: bool | None = None) -> Tensor:
        h = self.a(x)
        if use_b:
            h = h + (self.b(h) if reentrant is None else checkpoint(self.b, h, use_reentrant=reentrant))
        return self.c(torch.tanh(h)).sum()


def _data(seed: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def _gradient(param: Tensor, axis: Axis, divisor: float, spec: ShardSpec | None = None) -> GradientSlot:
    entry = ParamEntry("", param, spec or ShardSpec(param.shape), GradientReduction((axis.name,), divisor))
    return GradientSlot(entry, axis, {axis.name: axis.rank})


def _reducer(model: nn.Module, axis: Axis, bucket_bytes: int = 64) -> GradientReducer:
    return GradientReducer([_gradient(p, axis, axis.size) for p in model.parameters()], bucket_bytes)


def _want(model: nn.Module, losses: list[Tensor]) -> dict[str, Tensor | None]:
    model.zero_grad()
    torch.stack(losses).sum().div(2).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def _worst(model: nn.Module, want: dict[str, Tensor | None]) -> float:
    worst = 0.0
    for name, p in model.named_parameters():
        theirs = want[name]
        if p.grad is None or theirs is None:
            worst = max(worst, 0.0 if p.grad is theirs else 9.0)
        else:
            worst = max(worst, float((p.grad - theirs).abs().max()))
    return worst


def _simple(case: str) -> float:
    axis, model = Axis.of(None), _Net()
    reducer = _reducer(model, axis)
    plain = _Net()
    mine, both = _data(axis.rank), [_data(0), _data(1)]
    if case == "one backward pass":
        model(mine).backward()
        return _worst(model, _want(plain, [plain(x) for x in both]))
    if case == "two backward passes":
        model(mine).backward()
        model(mine * 2).backward()
        return _worst(model, _want(plain, [plain(x) + plain(x * 2) for x in both]))
    if case == "first paused":
        with reducer.no_sync():
            model(mine).backward()
        model(mine * 2).backward()
        return _worst(model, _want(plain, [plain(x) + plain(x * 2) for x in both]))
    if case == "unused on one rank":
        model(mine, use_b=axis.rank == 0).backward()
        return _worst(model, _want(plain, [plain(both[0]), plain(both[1], use_b=False)]))
    if case == "unused on one rank later":
        model(mine).backward()
        model(mine * 2, use_b=axis.rank == 0).backward()
        losses = [plain(x) + plain(x * 2, use_b=i == 0) for i, x in enumerate(both)]
        return _worst(model, _want(plain, losses))
    if case == "first paused, unused on one rank later":
        with reducer.no_sync():
            model(mine, use_b=axis.rank == 1).backward()
        model(mine * 2, use_b=axis.rank == 0).backward()
        losses = [plain(x, use_b=i == 1) + plain(x * 2, use_b=i == 0) for i, x in enumerate(both)]
        return _worst(model, _want(plain, losses))
    if case == "paused, then thrown away":
        with reducer.no_sync():
            model(mine).backward()
        model.zero_grad()
        model(mine, use_b=False).backward()
        return _worst(model, _want(plain, [plain(x, use_b=False) for x in both]))
    if case == "unused on all ranks":
        model(mine, use_b=False).backward()
        return _worst(model, _want(plain, [plain(x, use_b=False) for x in both]))
    if case in ("reentrant", "not reentrant"):
        model(mine, reentrant=case == "reentrant").backward()
        return _worst(model, _want(plain, [plain(x) for x in both]))
    raise AssertionError(case)


CASES = [
    "one backward pass", "two backward passes", "first paused", "unused on one rank", "unused on one rank later",
    "first paused, unused on one rank later", "paused, then thrown away", "unused on all ranks", "reentrant",
    "not reentrant",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_gradient_is_the_mean_over_ranks(pool2: WorkerPool, case: str) -> None:
    assert max(pool2.run(_simple, case)) < 1e-6


def _unfrozen() -> tuple[float, float]:
    axis, model, plain = Axis.of(None), _Net(), _Net()
    for net in (model, plain):
        net.b.requires_grad_(False)
    reducer = _reducer(model, axis)
    both = [_data(0), _data(1)]
    model(both[axis.rank]).backward()
    frozen = _worst(model, _want(plain, [plain(x) for x in both]))
    for net in (model, plain):
        net.b.requires_grad_(True)
        net.zero_grad()
    reducer.prepare_for_backward()
    model(both[axis.rank]).backward()
    return frozen, _worst(model, _want(plain, [plain(x) for x in both]))


def _frozen_for_a_reference() -> float:
    """Freeze a module between a forward and its backward pass, for a pass without gradients of a reference model."""
    axis = Axis.of(None)
    model = _Net()
    plain, reducer = deepcopy(model), _reducer(model, axis)
    loss = model(_data(axis.rank))
    with torch.no_grad():
        model.b.requires_grad_(False)
        reducer.prepare_for_backward()
        model(_data(axis.rank), use_b=False)
        model.b.requires_grad_(True)
    loss.backward()
    return _worst(model, _want(plain, [plain(_data(0)), plain(_data(1))]))


def test_parameters_that_are_frozen_for_a_reference_are_reduced(pool2: WorkerPool) -> None:
    assert max(pool2.run(_frozen_for_a_reference)) < 1e-6


def test_frozen_and_unfrozen_parameters(pool2: WorkerPool) -> None:
    for frozen, unfrozen in pool2.run(_unfrozen):
        assert frozen < 1e-6 and unfrozen < 1e-6


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise RuntimeError("broken")


def _goes_on(bucket_bytes: int, copied: bool) -> float:
    axis, plain = Axis.of(None), _Net()
    holder = _Holder(axis, bucket_bytes)
    both = [_data(0), _data(1)]
    with pytest.raises(RuntimeError, match="broken"):
        holder.net.c(_Broken.apply(holder.net.a(both[axis.rank]))).sum().backward()
    if copied:
        holder = deepcopy(holder)
    holder.net.zero_grad()
    holder.reducer.prepare_for_backward()
    holder.net(both[axis.rank]).backward()
    return _worst(holder.net, _want(plain, [plain(x) for x in both]))


@pytest.mark.parametrize("copied", [False, True], ids=["the model", "a copy"])
@pytest.mark.parametrize("bucket_bytes", [20, 10**6], ids=["after a bucket left", "before"])
def test_training_continues_after_an_interrupted_backward_pass(
    pool2: WorkerPool, bucket_bytes: int, copied: bool
) -> None:
    assert max(pool2.run(_goes_on, bucket_bytes, copied)) < 1e-6


class _Holder(nn.Module):
    def __init__(self, axis: Axis, bucket_bytes: int = 64) -> None:
        super().__init__()
        self.net = _Net()
        self.reducer = _reducer(self.net, axis, bucket_bytes)


def _copied() -> float:
    axis, plain = Axis.of(None), _Net()
    holder = deepcopy(_Holder(axis))
    model = holder.net
    both = [_data(0), _data(1)]
    model(both[axis.rank]).backward()
    return _worst(model, _want(plain, [plain(x) for x in both]))


def test_copied_model_averages_its_own_gradients(pool2: WorkerPool) -> None:
    assert max(pool2.run(_copied)) < 1e-6


def _summands() -> tuple[Tensor | None, Tensor | None]:
    """A parameter with partial gradients, and one with rows 0-1 and 1-2 of three. Both ranks store row 1."""
    axis = Axis.of(None)
    whole, rows = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 2))
    spec = ShardSpec((3, 2), {0: Split((((0, 2),), ((1, 3),)))})
    reducer = GradientReducer([_gradient(whole, axis, 1), _gradient(rows, axis, 1, spec)])
    for _ in range(2):
        ((axis.rank + 1) * whole.sum() + 10 * (axis.rank + 1) * rows.sum()).backward()
    del reducer  # keep it alive until here, because hooks use weak references
    return whole.grad, rows.grad


def test_partial_and_shared_gradients_are_summed_under_accumulation(pool2: WorkerPool) -> None:
    (whole0, rows0), (whole1, rows1) = pool2.run(_summands)
    assert whole0 is not None and rows0 is not None and whole1 is not None and rows1 is not None
    assert whole0.tolist() == whole1.tolist() == [6.0, 6.0]  # (1 + 2), twice
    assert rows0[:, 0].tolist() == [20.0, 60.0]  # row 0: 10 twice; row 1: (10 + 20) twice
    assert rows1[:, 0].tolist() == [60.0, 40.0]


def _alone(divisor: float) -> list[float]:
    axis = Axis("tensor")
    param = nn.Parameter(torch.zeros(2))
    reducer = GradientReducer([_gradient(param, axis, divisor)])
    param.sum().backward()
    param.sum().backward()
    del reducer
    assert param.grad is not None
    return list(param.grad.tolist())


def test_axis_of_one_rank_scales_gradients() -> None:
    assert _alone(4.0) == [0.5, 0.5] and _alone(1.0) == [2.0, 2.0]


def _handed_over(bucket_bytes: int) -> tuple[float, bool]:
    """Return the largest difference of the shards from the mean, and whether ``.grad`` is None."""
    axis, model, plain = Axis.of(None), _Net(), _Net()
    got: list[tuple[list[Tensor], Tensor, Tensor]] = []

    def receive(bucket: GradientBucket, shard: Tensor, had: Tensor) -> None:
        got.append(([g.param for g in bucket.gradients], shard, had))

    gradients = [_gradient(p, axis, axis.size) for p in model.parameters()]
    reducer = GradientReducer(gradients, bucket_bytes, ReduceScatterToShards(receive))
    both = [_data(0), _data(1)]
    model(both[axis.rank], use_b=axis.rank == 0).backward()
    want = _want(plain, [plain(both[0]), plain(both[1], use_b=False)])
    names = {id(p): n for n, p in model.named_parameters()}
    worst = 0.0
    for params, shard, had in got:
        whole = all_gather(shard, axis, 0)
        at = 0
        for param, count in zip(params, had.tolist(), strict=True):
            name = names[id(param)]
            expected = want[name]
            assert expected is not None and count == (1 if name.startswith("b.") else 2)
            worst = max(worst, float((whole[at : at + param.numel()].view_as(param) - expected).abs().max()))
            whole[at : at + param.numel()] = 0
            at += -(-param.numel() // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
        assert not whole.any()  # gaps and padding are zero
    del reducer
    return worst, all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("bucket_bytes", [64, 10**6], ids=["several buckets", "one"])
def test_reduce_scatter_gives_each_rank_its_shard(pool2: WorkerPool, bucket_bytes: int) -> None:
    for worst, gone in pool2.run(_handed_over, bucket_bytes):
        assert worst < 1e-6 and gone
