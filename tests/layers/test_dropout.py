"""Random numbers differ between tensor ranks in a block, are equal outside, and repeat in a recomputation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardformer.consistency.initial_weights import broadcast_random_state
from shardformer.errors import ConfigError
from shardformer.layout.activation_layout import ActivationLayout
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.random_state import LocalRNGState
from shardformer.tensor_parallel.block import TensorParallelBlock
from shardformer.tensor_parallel.layers import (
    DropoutForParallelInput,
    DropoutForReplicatedInput,
    Linear1D_Col,
    Linear1D_Row,
)
from shardformer.tensor_parallel.sequence_parallel import ActivationSharding
from tests.pools import WorkerPools

SIZE = 1000
ways_to_recompute = pytest.mark.parametrize("use_reentrant", [False, True], ids=["checkpoint", "reentrant"])


def axis_here() -> Axis:
    return ParallelContext.from_default_process_group({}).tensor


# ----------------------------------------------------------------------------------------------------------- the layers


def masks(p: float, train: bool = True) -> dict[str, Tensor]:
    """Two successive masks of each layer, and the next number of the outer random state."""
    parallel = DropoutForParallelInput(p, process_group=axis_here()).train(train)
    replicated = DropoutForReplicatedInput(p).train(train)
    torch.manual_seed(0)
    x = torch.ones(SIZE)
    return {
        "own": parallel(x),
        "own again": parallel(x),
        "same": replicated(x),
        "same again": replicated(x),
        "outside": torch.rand(8),
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_masks_differ_by_rank_for_parallel_inputs_only(pools: WorkerPools, ranks: int) -> None:
    found = pools(ranks).run(masks, 0.3)
    for name in ("same", "same again", "outside"):
        assert all(torch.equal(found[0][name], other[name]) for other in found[1:]), name
    drawn = [mine[name] for mine in found for name in ("own", "own again")]
    for i, mask in enumerate(drawn):
        assert set(mask.tolist()) == {0.0, float(torch.tensor(1 / 0.7))}
        assert 0.6 < float((mask > 0).float().mean()) < 0.8
        for other in drawn[:i]:
            agreement = float(((mask > 0) == (other > 0)).float().mean())
            assert 0.5 < agreement < 0.66, "independent masks agree in 0.7 * 0.7 + 0.3 * 0.3 = 0.58 of the places"


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.5, False)])
def test_no_random_numbers_are_drawn_without_dropout(pool2: WorkerPool, p: float, train: bool) -> None:
    torch.manual_seed(0)
    first = torch.rand(8)
    for found in pool2.run(masks, p, train):
        assert all(torch.equal(found[name], torch.ones(SIZE)) for name in ("own", "own again", "same", "same again"))
        assert torch.equal(found["outside"], first)


def from_native() -> list[tuple[float, bool, bool]]:
    native = nn.Dropout(0.25, inplace=True).eval()
    made: list[Any] = [
        DropoutForParallelInput.from_native_module(native, axis_here()),
        DropoutForReplicatedInput.from_native_module(native, axis_here()),
    ]
    return [(m.p, m.inplace, m.training) for m in made]


def test_from_native_module_copies_rate_inplace_and_mode(pool2: WorkerPool) -> None:
    assert pool2.run(from_native)[0] == [(0.25, True, False)] * 2


@pytest.mark.parametrize("kind", [DropoutForParallelInput, DropoutForReplicatedInput])
def test_from_native_module_rejects_other_modules(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"can only replace an nn.Dropout without kwargs, but got Dropout1d"):
        kind.from_native_module(nn.Dropout1d(0.1), Axis("tensor"))
    with pytest.raises(ConfigError, match=r"but got Dropout with p=0\.5"):
        kind.from_native_module(nn.Dropout(0.1), Axis("tensor"), p=0.5)


def recomputed(use_reentrant: bool) -> list[bool]:
    layer = DropoutForParallelInput(0.5, process_group=axis_here())
    x = torch.ones(SIZE, requires_grad=True)
    torch.manual_seed(0)
    y = checkpoint(lambda x: layer(x).square(), x, use_reentrant=use_reentrant)
    after = torch.rand(4)
    y.sum().backward()
    assert x.grad is not None
    torch.manual_seed(0)
    mask = layer(torch.ones(SIZE))
    # d/dx (m x)^2 = 2 m^2 x
    return [torch.equal(x.grad, 2 * mask.square()), torch.equal(after, torch.rand(4))]


@ways_to_recompute
def test_recomputation_draws_the_same_mask(pool2: WorkerPool, use_reentrant: bool) -> None:
    assert pool2.run(recomputed, use_reentrant) == [[True, True]] * 2


# ---------------------------------------------------------------------------------------------------- inside a block


class Mlp(nn.Module):
    """Dropout before the row-parallel linear layer, as a module and as a function, and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 40), nn.Linear(40, 6)
        self.drop = nn.Dropout(0.3)
        self.seen: list[Tensor] = []

    def forward(self, hidden_states: Tensor) -> Tensor:
        h = self.up(hidden_states)
        self.seen.append((self.drop(torch.ones_like(h)) > 0).detach())
        h = F.dropout(self.drop(h), 0.2, self.training)
        y = self.down(h)
        self.seen.append((self.drop(torch.ones_like(y)) > 0).detach())
        out: Tensor = self.drop(y)
        return out


def sharded_mlp(axis: Axis, random: bool = True) -> Any:
    torch.manual_seed(0)
    mlp: Any = Mlp().double()
    block = TensorParallelBlock(ActivationSharding(ActivationLayout(), axis), random)
    mlp.up = Linear1D_Col.from_native_module(mlp.up, axis)
    mlp.down = Linear1D_Row.from_native_module(mlp.down, axis)
    mlp.up.block = mlp.down.block = block
    block.columns.append(mlp.up)
    block.register_entry_hooks(mlp)
    return mlp


def masks_of_a_block(train: bool, random: bool) -> tuple[list[Tensor], Tensor]:
    mlp = sharded_mlp(axis_here(), random).train(train)
    torch.manual_seed(1)
    for _ in range(2):
        mlp(torch.ones(4, 9, 6).double())
    return mlp.seen, torch.rand(8)


def test_masks_in_a_block_differ_by_rank(pool2: WorkerPool) -> None:
    (ours, after), (theirs, theirs_after) = pool2.run(masks_of_a_block, True, True)
    assert not torch.equal(ours[0], theirs[0]) and not torch.equal(ours[2], theirs[2]), "inside"
    assert not torch.equal(ours[0], ours[2]), "the next forward pass draws other numbers"
    assert torch.equal(ours[1], theirs[1]) and torch.equal(ours[3], theirs[3]), "after the exit"
    assert torch.equal(after, theirs_after), "outside"


def test_a_block_without_dropout_draws_no_random_numbers(pool2: WorkerPool) -> None:
    torch.manual_seed(1)
    first = torch.rand(8)
    for _, after in pool2.run(masks_of_a_block, False, True):
        assert torch.equal(after, first)
    (ours, _), (theirs, _) = pool2.run(masks_of_a_block, True, False)
    assert torch.equal(ours[0], theirs[0]), "a block without random operations keeps the random state"


def block_recomputed(use_reentrant: bool | None, copied: bool) -> tuple[dict[str, Tensor], Tensor]:
    mlp = sharded_mlp(axis_here())
    x = torch.linspace(-1, 1, 4 * 9 * 6).double().view(4, 9, 6).requires_grad_()
    if copied:  # after a forward and a backward pass of the original
        checkpoint(mlp, x, use_reentrant=False).sum().backward()
        x.grad = None
        mlp = copy.deepcopy(mlp)
        mlp.zero_grad()
    torch.manual_seed(2)
    y = mlp(x) if use_reentrant is None else checkpoint(mlp, x, use_reentrant=use_reentrant)
    y.square().sum().backward()
    grads = {name: p.grad for name, p in mlp.named_parameters()}
    return {"x": x.grad, "y": y.detach(), **grads}, torch.rand(8)


@pytest.mark.parametrize("copied", [False, True], ids=["original", "copy"])
@ways_to_recompute
def test_a_checkpointed_block_has_the_same_gradients(pool2: WorkerPool, use_reentrant: bool, copied: bool) -> None:
    kept, found = pool2.run(block_recomputed, None, False), pool2.run(block_recomputed, use_reentrant, copied)
    for (want, want_after), (ours, after) in zip(kept, found, strict=True):
        assert all(torch.equal(want[name], ours[name]) for name in want)
        assert torch.equal(want_after, after)
    assert torch.equal(found[0][1], found[1][1]), "the outer random state is equal on all ranks"


# ----------------------------------------------------------------------------------------------------------- the stream


def streams(seed: int) -> list[Tensor]:
    stream, x = LocalRNGState(axis_here().rank), torch.ones(1)
    torch.manual_seed(seed)
    out = []
    for _ in range(2):
        stream.enter_local_rng_state(x)
        out.append(torch.rand(SIZE))
        stream.exit_local_rng_state()
        out.append(torch.rand(SIZE))
    stream.exit_local_rng_state()  # outside already: nothing happens
    return [*out, torch.rand(SIZE)]


def test_local_random_state_depends_on_rank_seed_and_time(pool2: WorkerPool) -> None:
    found = pool2.run(streams, 0) + pool2.run(streams, 1) + pool2.run(streams, 0)
    assert all(torch.equal(a, b) for i in (0, 1) for a, b in zip(found[i], found[i + 4], strict=True)), "repeatable"
    for i in (1, 3, 4):
        assert torch.equal(found[0][i], found[1][i]), "outside"
    inside = [mine[i] for mine in found[:4] for i in (0, 2)]
    outside = [mine[i] for mine in (found[0], found[2]) for i in (1, 3, 4)]
    every = torch.stack(inside + outside)
    correlations = torch.corrcoef(every) - torch.eye(len(every))
    assert float(correlations.abs().max()) < 0.15


def aligned() -> Tensor:
    axis = axis_here()
    torch.manual_seed(axis.rank)
    broadcast_random_state(axis, torch.device("cpu"))
    return torch.rand(8)


def test_aligned_random_state_is_that_of_rank_0(pool4: WorkerPool) -> None:
    torch.manual_seed(0)
    want = torch.rand(8)
    assert all(torch.equal(found, want) for found in pool4.run(aligned))
