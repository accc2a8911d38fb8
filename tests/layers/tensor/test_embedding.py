"""Embeddings sharded over the tensor axis equal the plain embedding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardformer.comm.collectives import gather_full_tensor
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.errors import ConfigError, InputError
from shardformer.layout.sharding_metadata import get_shard_specs
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.tensor_parallel.layers import Embedding1D, VocabParallelEmbedding1D
from tests.pools import WorkerPools

KINDS = {"vocabulary": VocabParallelEmbedding1D, "width": Embedding1D}
B, S, V, H = 2, 5, 127, 10
of_both_kinds = pytest.mark.parametrize("kind", list(KINDS))
over_one_two_and_four = pytest.mark.parametrize("ranks", [1, 2, 4])
IDS = torch.tensor([[0, 1, 31, 32, 63], [64, 95, 96, 126, 1]])  # both sides of every bound, and one twice


def compared(kind: str, padding_idx: int | None, options: dict[str, Any]) -> dict[str, Any]:
    axis = ParallelContext.from_default_process_group({}).tensor
    torch.manual_seed(3)
    plain = nn.Embedding(V, H, padding_idx).double()
    table = KINDS[kind].from_native_module(plain, axis, **options)
    w = torch.randn(B, S, H).double()
    want = plain(IDS)
    (want * w).sum().backward()
    with CollectiveRecorder(axis) as forward:
        found = table(IDS)
    if options.get("gather_output") is False:
        own = table.split.indices(axis.rank)
        want, w = want[..., own], w[..., own]
    with CollectiveRecorder(axis) as backward:
        (found * w).sum().backward()
    spec, grad = get_shard_specs(table)["weight"], table.weight.grad
    assert plain.weight.grad is not None and grad is not None
    whole = gather_full_tensor(grad, spec, lambda _: axis)
    return {
        "output": float((found - want).detach().abs().max()),
        "gradient": float((whole - plain.weight.grad).abs().max()),
        "padding's gradient": None if padding_idx is None else float(whole[padding_idx].abs().max()),
        "forward": [(call.op, call.payload_bytes) for call in forward.calls],
        "backward": [(call.op, call.payload_bytes) for call in backward.calls],
        "shape": tuple(table.weight.shape),
    }


@pytest.mark.reduced(at_most=15)
@over_one_two_and_four
@pytest.mark.parametrize("padding_idx", [None, 0, 64, 126, -1])
@of_both_kinds
def test_sharded_embedding_equals_the_plain_embedding(
    pools: WorkerPools, kind: str, padding_idx: int | None, ranks: int
) -> None:
    for found in pools(ranks).run(compared, kind, padding_idx, {}):
        assert found["output"] < 1e-12 and found["gradient"] < 1e-12
        assert found["padding's gradient"] in (None, 0.0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_communication_matches_the_docstring(pools: WorkerPools, ranks: int) -> None:
    whole = B * S * H * 8
    for found in pools(ranks).run(compared, "vocabulary", None, {}):
        assert (found["forward"], found["backward"]) == ([("all_reduce", whole)], [])
    for found in pools(ranks).run(compared, "width", None, {}):
        assert (found["forward"], found["backward"]) == ([("all_gather", whole)], [])
    for found in pools(ranks).run(compared, "width", None, {"gather_output": False}):
        assert (found["forward"], found["backward"]) == ([], [])
        assert found["output"] < 1e-12 and found["gradient"] < 1e-12


def test_rows_and_columns_are_split_evenly(pool4: WorkerPool) -> None:
    assert [found["shape"] for found in pool4.run(compared, "vocabulary", None, {})] == [(32, H)] * 3 + [(31, H)]
    assert [found["shape"] for found in pool4.run(compared, "width", None, {})] == [(V, 3), (V, 3), (V, 2), (V, 2)]


def constructed(kind: str) -> list[float]:
    axis = ParallelContext.from_default_process_group({}).tensor
    torch.manual_seed(11)
    plain = [nn.Embedding(V, H, padding_idx=3) for _ in range(2)]
    state = torch.get_rng_state()
    torch.manual_seed(11)
    ours = [KINDS[kind](V, H, 3, process_group=axis) for _ in range(2)]
    parts = [
        (b.shard_specs["weight"].slice_full_tensor(a.weight, b.coords), b.weight)
        for a, b in zip(plain, ours, strict=True)
    ]
    return [float((state - torch.get_rng_state()).abs().max()), *(float((a - b).abs().max()) for a, b in parts)]


@over_one_two_and_four
@of_both_kinds
def test_direct_construction_gives_the_slice_of_the_plain_layer(pools: WorkerPools, kind: str, ranks: int) -> None:
    for found in pools(ranks).run(constructed, kind):
        assert found == [0.0, 0.0, 0.0]


def looked_up(kind: str, token: int) -> None:
    KINDS[kind](V, H, process_group=ParallelContext.from_default_process_group({}).tensor)(torch.tensor([[5, token]]))


@pytest.mark.parametrize("token", [-1, 127, 1000])
def test_token_outside_the_vocabulary_raises_on_all_ranks(pool2: WorkerPool, token: int) -> None:
    pool2.run(torch.add, 1, 1)
    pids = pool2.pids
    with pytest.raises(InputError, match=f"contains the token id {token}, but the vocabulary has 127 tokens"):
        pool2.run(looked_up, "vocabulary", token)
    assert pool2.pids == pids, "no rank waited for another"


def of_nothing() -> tuple[int, ...]:
    table = VocabParallelEmbedding1D(V, H, process_group=ParallelContext.from_default_process_group({}).tensor)
    return tuple(table(torch.zeros(2, 0, dtype=torch.long)).shape)


def test_empty_batch(pool2: WorkerPool) -> None:
    assert pool2.run(of_nothing) == [(2, 0, H)] * 2


def of_a_broken_row() -> bool:
    """Return whether the output is finite if the first local row, to which other ranks' tokens are mapped, is NaN."""
    axis = ParallelContext.from_default_process_group({}).tensor
    table = VocabParallelEmbedding1D(V, H, process_group=axis)
    table.weight.data[0] = torch.nan
    return bool(torch.isfinite(table(torch.tensor([1, 70, 100]))).all())


def test_rows_of_other_tokens_do_not_affect_the_output(pool2: WorkerPool) -> None:
    assert pool2.run(of_a_broken_row) == [True, True]


def kept(kind: str) -> tuple[bool, bool, str]:
    native = nn.Embedding(V, H, padding_idx=2).eval()
    native.weight.requires_grad_(False)
    table: Any = KINDS[kind].from_native_module(native, ParallelContext.from_default_process_group({}).tensor)
    return table.training, table.weight.requires_grad, repr(table)


def test_attributes_of_the_plain_embedding_are_kept(pool2: WorkerPool) -> None:
    text = "VocabParallelEmbedding1D(127, 10, local weight 64x10, tensor 0/2)"
    assert pool2.run(kept, "vocabulary")[0] == (False, False, text)
    assert pool2.run(kept, "width")[0] == (False, False, "Embedding1D(127, 10, local weight 127x5, tensor 0/2)")


class Scaled(nn.Embedding):
    """An embedding that scales its output, as in Gemma and BART."""

    scale = 7.5

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.scale


class Squared(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) ** 2


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_embedding_keeps_its_factor(kind: str) -> None:
    native = Scaled(V, H).double()
    ids = torch.arange(V)

    def look_up(context: ParallelContext) -> tuple[torch.Tensor, torch.Tensor]:
        table = KINDS[kind].from_native_module(native, context.tensor)
        out: torch.Tensor = table(ids)
        out.square().sum().backward()
        weight: Any = table.weight
        return out.detach(), gather_full_tensor(weight.grad, get_shard_specs(table)["weight"], context.axis)

    expected = native(ids)
    expected.square().sum().backward()
    for out, gradient in run_as_threads(look_up, tensor=2):
        assert torch.equal(out, expected)
        assert torch.allclose(gradient, native.weight.grad)


class ScaledInItsPrecision(Scaled):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.Embedding.forward(self, ids) * torch.tensor(self.scale).to(self.weight.dtype)


@pytest.mark.parametrize("kind", [Scaled, ScaledInItsPrecision])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_factor_reproduces_the_rounding_of_the_embedding(kind: type[Scaled], dtype: torch.dtype) -> None:
    native = kind(V, H).to(dtype)
    native.scale = 50.9
    table = VocabParallelEmbedding1D.from_native_module(native)
    assert torch.equal(table(torch.arange(V)), native(torch.arange(V)))


class OneToken(Scaled):
    """An embedding that changes the vector of one token."""

    scale = 1.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).masked_fill((ids == V - 1)[..., None], 0.5)


class AlmostScaled(Scaled):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * (1 + 1e-3 * (ids == 3)[..., None])


@pytest.mark.parametrize("kind", [Squared, OneToken, AlmostScaled])
def test_embedding_with_another_forward_raises(kind: type[nn.Embedding]) -> None:
    with pytest.raises(ConfigError, match="a custom `forward`"):
        VocabParallelEmbedding1D.from_native_module(kind(V, H))


def from_native(kind: str, module: nn.Module) -> None:
    KINDS[kind].from_native_module(module, ParallelContext.from_default_process_group({}).tensor)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Linear(4, 4), "can only replace an nn.Embedding, but got a Linear"),
        (nn.Embedding(8, 4, max_norm=1.0), r"max_norm=1\.0"),
        (nn.Embedding(8, 4, scale_grad_by_freq=True), "scale_grad_by_freq=True"),
        (nn.Embedding(8, 4, sparse=True), "sparse=True"),
    ],
)
@of_both_kinds
def test_unsupported_embedding_raises(pool2: WorkerPool, kind: str, module: nn.Module, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        pool2.run(from_native, kind, module)


def test_size_below_the_number_of_ranks_raises(pool4: WorkerPool) -> None:
    with pytest.raises(ConfigError, match="num_embeddings=3 cannot be sharded over 4 ranks"):
        pool4.run(from_native, "vocabulary", nn.Embedding(3, 8))
    with pytest.raises(ConfigError, match="embedding_dim=2 cannot be sharded over 4 ranks"):
        pool4.run(from_native, "width", nn.Embedding(8, 2))
