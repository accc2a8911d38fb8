"""Shared modules, parameters that share memory, and blocks that are their own entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardformer
from shardformer.comm.collectives import gather_full_tensor
from shardformer.errors import ConfigError
from shardformer.layout.sharding_metadata import get_shard_specs
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.policies.policy import Policy
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import Attention, AttentionProjections, LayerStack
from tests.policies.toy import HEADS, HIDDEN, VOCAB, FeedForward, SelfAttention, ToyLM, ToyPolicy, toy_batch, toy_loss


def difference(make: Callable[[], nn.Module], policy: type[Policy], **options: Any) -> float:
    """Return the largest difference of gradients and updated weights between the plain and the sharded model."""
    plain, *models = (made(make) for _ in range(3))  # a copy, or another dtype, would not share memory
    want = trained(plain)

    def run(context: ParallelContext) -> float:
        model = shardformer.shard_model(models[context.tensor.rank], policy(), context=context, **options)
        specs, got = get_shard_specs(model), trained(model)
        full = {
            name: gather_full_tensor(x, specs[name.removeprefix("gradient of ")], context.axis)
            for name, x in got.items()
        }
        return max(float((full[name] - want[name]).abs().max()) for name in want)

    return max(run_as_threads(run, tensor=2))


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a function that creates the same model in fp64."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        return make()
    finally:
        torch.set_default_dtype(torch.float32)


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Return gradients of one step and updated weights of a model with shared memory."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    toy_loss(model, toy_batch(0)).backward()  # type: ignore[no-untyped-call]
    gradients = {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return {**gradients, **{name: p.detach() for name, p in model.named_parameters()}}


# ------------------------------------------------------------------------------------------- a module in several layers


def one_mlp_for_all() -> nn.Module:
    model = ToyLM(num_layers=3)
    for layer in list(model.layers)[1:]:
        layer.mlp = model.layers[0].mlp  # type: ignore[union-attr]
    return model


def one_attention_for_all() -> nn.Module:
    model = ToyLM(num_layers=2)
    model.layers[1].attn = model.layers[0].attn  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize("make", [one_mlp_for_all, one_attention_for_all])
@pytest.mark.parametrize("sequence", [False, True])
def test_shared_module_accumulates_gradients_of_all_layers(make: Callable[[], nn.Module], sequence: bool) -> None:
    assert difference(make, ToyPolicy, enable_sequence_parallelism=sequence) < 1e-13


# ---------------------------------------------------------------------------------------- a block that is its own entry


class NormedAttention(SelfAttention):
    """Norms of q and k over each head: replicated parameters that see only local heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(HIDDEN // HEADS), nn.LayerNorm(HIDDEN // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (self.num_heads, HIDDEN // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        out = nn.functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class AttentionsOnly(nn.Module):
    """A model whose layers are attention modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(NormedAttention() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class AttentionsOnlyPolicy(RolePolicy):
    stack = LayerStack(
        "layers",
        [Attention("", AttentionProjections(q="q", k="k", v="v", out="o"), local_attrs={"num_heads": "heads"})],
    )
    embeddings = "embed"
    head = "head"
    num_heads = HEADS


def test_norms_in_a_layer_that_is_an_attention_train_correctly() -> None:
    assert difference(AttentionsOnly, AttentionsOnlyPolicy) < 1e-13


# ------------------------------------------------------------------------------------------------------- shared memory


def tied_by_memory() -> nn.Module:
    model = ToyLM()
    model.head.weight = nn.Parameter(model.embed.weight.data)
    return model


def linears_tied_by_memory() -> nn.Module:
    model = ToyLM()
    first, second = (layer.mlp for layer in model.layers)
    assert isinstance(first, FeedForward) and isinstance(second, FeedForward)
    second.fc1.weight = nn.Parameter(first.fc1.weight.data)
    return model


@pytest.mark.parametrize("make", [tied_by_memory, linears_tied_by_memory])
def test_shards_share_memory_if_their_parameters_did(make: Callable[[], nn.Module]) -> None:
    assert difference(make, ToyPolicy) < 1e-13


def test_materialized_shards_share_memory() -> None:
    with shardformer.meta_init.LazyInit():
        torch.manual_seed(0)
        models = [tied_by_memory() for _ in range(2)]

    def shares(context: ParallelContext) -> bool:
        model: Any = shardformer.shard_model(models[context.tensor.rank], ToyPolicy(), context=context)
        return bool(model.head.weight.data_ptr() == model.embed.weight.data_ptr())

    assert run_as_threads(shares, tensor=2) == [True, True]


def part_of_another() -> nn.Module:
    model = ToyLM()
    bias: Any = model.layers[0].mlp.fc1.bias  # type: ignore[union-attr]
    model.norm.bias = nn.Parameter(bias.data[:HIDDEN])
    return model


def cut_in_two_ways() -> nn.Module:
    model = ToyLM()
    attention: Any = model.layers[0].attn
    attention.o.weight = nn.Parameter(attention.q.weight.data)
    return model


@pytest.mark.parametrize("make", [part_of_another, cut_in_two_ways])
def test_shared_memory_split_in_two_ways_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ConfigError, match="share memory, but are sharded in different ways") as error:
        difference(make, ToyPolicy)
    assert "Tie the weights with" in str(error.value)


def test_shared_memory_across_stages_is_refused() -> None:
    models = [made(tied_by_memory) for _ in range(2)]

    def shard(context: ParallelContext) -> None:
        shardformer.shard_model(models[context.pipe.rank], ToyPolicy(), context=context)

    with pytest.raises(ConfigError, match=r"embed\.weight and head\.weight share memory, but are on different"):
        run_as_threads(shard, pipe=2)
