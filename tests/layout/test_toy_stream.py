"""A custom activation layout: the sequence in any order over an axis, sharded from the inputs on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shardformer.comm.collectives import gather_full_tensor
from shardformer.layout.activation_layout import ActivationLayout, ActivationShard, Dim, IndexOrder, ShardedFrom
from shardformer.layout.sharding_metadata import get_shard_specs
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, LayerStack
from shardformer.shard_model_api import shard_model
from tests.policies.toy import HIDDEN, VOCAB, FeedForward, toy_batch


class TokenWise(nn.Module):
    """Embedding, MLPs, norm and head. Tokens are independent, so a rank needs only its own positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": FeedForward(norm=True)}) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer.get_submodule("mlp")(x)
        return torch.as_tensor(self.head(x))


class TokenWisePolicy(RolePolicy):
    stack, embeddings, head = LayerStack("layers", [MLP("mlp", up="fc1", down="fc2")]), "embed", "head"


@pytest.mark.parametrize("order", IndexOrder)
def test_gradients_are_those_of_the_whole_sequence(order: IndexOrder) -> None:
    plain, batch = TokenWise().double(), {name: x[:, :8] for name, x in toy_batch(0).items()}
    models = [copy.deepcopy(plain) for _ in range(4)]
    cross_entropy(plain(batch["ids"]).flatten(0, 1), batch["labels"].flatten()).backward()
    cut = ActivationShard(Dim.SEQUENCE, "sequence", order, ShardedFrom.INPUTS)

    def difference(context: ParallelContext) -> float:
        model = shard_model(
            models[context.rank], TokenWisePolicy, context=context, activation_layout=ActivationLayout((cut,))
        )
        own = [i for a, b in cut.make_split(8, 2).parts[context.sequence.rank] for i in range(a, b)]
        cross_entropy(model(batch["ids"][:, own]).flatten(0, 1), batch["labels"][:, own].flatten()).backward()
        specs, want = get_shard_specs(model), {name: p.grad for name, p in plain.named_parameters()}
        grads = {name: gather_full_tensor(p.grad, specs[name], context.axis) for name, p in model.named_parameters()}
        return max(float((grads[name] - want[name]).abs().max()) for name in want)

    assert max(run_as_threads(difference, sequence=2, tensor=2)) < 1e-14
