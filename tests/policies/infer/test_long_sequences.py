"""Layers that run other code for long sequences are validated with a longer sequence, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardformer
from shardformer.context_parallel.method import ContextParallelSizes
from shardformer.discovery.derive_policy import derive_policy
from shardformer.discovery.reduced_model import reduce_model
from shardformer.discovery.validation import validate_context_parallel
from shardformer.errors import PolicyError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from tests.policies.toy import Layer, ToyLM, ToyPolicy, toy_batch


class LongLayer(Layer):
    """Mixes the tokens of sequences that are longer than ``threshold``."""

    threshold = 16

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + x.cumsum(1) / x.shape[1] if x.shape[1] > self.threshold else x


class LimitedLM(ToyLM):
    """Accepts up to ``limit`` tokens."""

    limit = 1000

    def forward(self, ids: Tensor) -> Tensor:
        if ids.shape[1] > self.limit:
            raise ValueError(f"{ids.shape[1]} tokens")
        return super().forward(ids)


def make_model(threshold: int, limit: int = 1000) -> LimitedLM:
    torch.manual_seed(0)
    model = LimitedLM()
    model.layers = nn.ModuleList(LongLayer() for _ in range(2))
    model.limit = limit
    for layer in model.layers:
        layer.threshold = threshold
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("threshold", "limit"), [(16, 1000), (12, 20), (1000, 1000)])
def test_layers_that_mix_tokens_of_long_sequences_do_not_support_sharded_sequences(threshold: int, limit: int) -> None:
    model, batch = make_model(threshold, limit), {"ids": toy_batch(0)["ids"]}
    policy = derive_policy(model, batch)
    is_refused = threshold < 36
    found = validate_context_parallel(model, policy, ContextParallelSizes(2, 1, False))
    assert (policy.no_sequence_parallel is not None) == is_refused
    assert (found.failure is not None) == is_refused, found


def test_a_policy_for_layers_that_mix_tokens_of_long_sequences_is_refused_with_sequence_parallelism() -> None:
    def shard(context: ParallelContext) -> None:
        shardformer.shard_model(make_model(16), policy=ToyPolicy, context=context, enable_sequence_parallelism=True)

    with pytest.raises(PolicyError, match="does not support sequence parallelism"):
        run_as_threads(shard, tensor=2)


def test_a_model_with_a_limited_length_is_validated_with_as_many_tokens_as_it_accepts() -> None:
    for limit, expected in ((1000, [36]), (20, [18]), (10, [])):
        reduced = reduce_model(make_model(16, limit), {"ids": toy_batch(0)["ids"]})
        reference = reduced.add_long_batch(reduced.compute_reference_gradients())
        with torch.no_grad():
            assert [each.forward_fn(reduced.model).shape[1] for each in reference.long_batches] == expected
