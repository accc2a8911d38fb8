"""Layer costs for pipeline partitions, estimated or measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardformer.config import ShardConfig
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.layer_sequence import estimate_layer_costs, map_tensors_to_layers
from shardformer.pipeline.partition import partition_balanced
from shardformer.shard_model_api import measure_pipeline_costs, resolve_policy_and_origin
from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory


def estimated(model: nn.Module) -> list[float]:
    policy, _ = resolve_policy_and_origin(model, None)
    policy.set_model(model)
    policy.set_shard_config(ShardConfig(context=ParallelContext.from_sizes({"tensor": 1})))
    chain = policy.layer_sequence()
    return estimate_layer_costs(model, chain, map_tensors_to_layers(model, chain))


def test_head_adds_to_the_last_layer_and_embeddings_cost_nothing() -> None:
    model = SmallModelFactory("llama", changes={"num_hidden_layers": 4, "vocab_size": 1270})()
    first, *middle, last = estimated(model)
    layer = sum(p.numel() for p in model.get_submodule("model.layers.1").parameters() if p.dim() == 2)
    assert first == middle[0] == pytest.approx(layer)
    assert last == pytest.approx(layer + 48 * 1270)
    assert partition_balanced([first, *middle, last], 2) == [0, 3, 4], "the head weighs more than three layers"


def test_repeated_layer_costs_every_call() -> None:
    costs = estimated(SmallModelFactory("albert", changes={"num_hidden_layers": 4})())
    assert costs[1] == costs[2] > 1000


@pytest.mark.slow
def test_only_active_experts_are_counted() -> None:
    import transformers

    settings: dict[str, Any] = dict(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, num_experts_per_tok=2,
    )  # fmt: skip
    few, many = (
        estimated(transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=n, **settings)))
        for n in (4, 8)
    )
    assert many[0] == pytest.approx(few[0] + 4 * 32, rel=0.01), "the router alone grows"


class Slow(nn.Module):
    """Runs the wrapped layer several times."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for _ in range(60):
            self.layer(*args, **kwargs)
        return self.layer(*args, **kwargs)


def test_measured_costs_reflect_computation() -> None:
    model = SmallModelFactory("llama", changes={"num_hidden_layers": 4, "use_cache": False})().eval()
    layers: Any = model.get_submodule("model.layers")
    policy, _ = resolve_policy_and_origin(model, None)
    layers[1] = Slow(layers[1])
    costs = measure_pipeline_costs(model, RandomBatchFactory("LlamaForCausalLM")(0), type(policy), repeats=2)
    assert len(costs) == 4
    assert costs[1] > 5 * max(costs[2], costs[3])
    assert all(cost > 0 for cost in costs)


def test_measuring_restores_buffers_and_random_states() -> None:
    model: Any = SmallModelFactory("llama", changes={"use_cache": False})().train()
    policy, _ = resolve_policy_and_origin(model, None)
    model.register_buffer("calls", torch.zeros(()))

    def writes(*_: Any) -> None:
        model.calls += torch.rand(())

    model.model.layers[0].register_forward_hook(writes)
    seed = torch.get_rng_state()
    measure_pipeline_costs(model, RandomBatchFactory("LlamaForCausalLM")(0), type(policy), repeats=1)
    assert model.calls == 0 and torch.get_rng_state().equal(seed)
