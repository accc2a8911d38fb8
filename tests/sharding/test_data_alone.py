"""Data parallelism alone supports models of any structure."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import shardformer
from shardformer.errors import PolicyError
from shardformer.layout.sharding_metadata import get_sharding_metadata
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.verify.small_models import SmallModelFactory

IDS = torch.randint(3, 60, (4, 8), generator=torch.Generator().manual_seed(0))


class OwnLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Classifier(nn.Module):
    """Shares the config of its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = SmallModelFactory("bert", "BertModel")()
        self.config = self.encoder.config
        self.head = nn.Linear(self.config.hidden_size, 3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.encoder(input_ids).pooler_output)
        return {"loss": F.cross_entropy(logits, labels[:, 0] % 3)}


class WithoutLayers(nn.Module):
    """Has an empty list of layers, an unknown stack, and two kinds of tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(64, 8), nn.ModuleList()
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return {"loss": F.cross_entropy(self.head(self.embedding(input_ids)).flatten(0, 1), labels.flatten())}


def llama() -> Any:
    return SmallModelFactory("llama")()


def other_layer(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.o_proj = OwnLinear(layer.self_attn.o_proj)


def other_name(model: Any) -> None:
    for layer in model.model.layers:
        layer.attention = layer.self_attn
        layer.add_module("unused", nn.Linear(2, 2))


def fewer(model: Any) -> None:
    del model.model.layers[1:]


def identity(model: Any) -> None:
    model.model.norm = nn.Identity()


def hooked(model: Any) -> None:
    model.get_input_embeddings().weight.register_hook(lambda gradient: gradient * 0.5)


def nothing(model: Any) -> None:
    pass


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "other layer": (llama, other_layer),
    "other name": (llama, other_name),
    "fewer layers": (llama, fewer),
    "identity": (llama, identity),
    "hook": (llama, hooked),
    "config of the encoder": (Classifier, nothing),
    "without layers": (WithoutLayers, nothing),
}


def loss_of(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids)["loss"]
    return loss


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_those_of_one_process(case: str) -> None:
    make, change = CASES[case]
    torch.manual_seed(0)
    model = make().double().train()
    change(model)
    plain = copy.deepcopy(model)
    loss_of(plain, IDS).backward()

    def do(context: ParallelContext) -> float:
        own = copy.deepcopy(model)
        if case == "hook":  # a copy has the parameter, not its hook
            change(own)
        own = shardformer.shard_model(own, context=context)
        loss_of(own, IDS.chunk(2)[context.data.rank]).backward()
        pairs = [(p.grad, q.grad) for p, q in zip(own.parameters(), plain.parameters(), strict=True)]
        return max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None)

    if case == "hook":
        plain.zero_grad()
        change(plain)
        loss_of(plain, IDS).backward()
    assert max(run_as_threads(do, data=2, one_at_a_time=True)) < 1e-6


def test_engine_accepts_an_optimizer_created_before() -> None:
    def do(context: ParallelContext | None) -> list[float]:
        torch.manual_seed(0)
        model = llama().double().train()
        other_layer(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = shardformer.initialize(model, optimizer, context=context, parallel={"micro_batches": 2})
        part = IDS if context is None else IDS.chunk(2)[context.data.rank]
        return [float(engine.train_step({"input_ids": part, "labels": part})) for _ in range(2)]

    expected = do(None)
    for found in run_as_threads(do, data=2, one_at_a_time=True):
        assert found == pytest.approx(expected, abs=1e-6)


def test_optimizer_created_before_shard_model_keeps_working() -> None:
    def do(context: ParallelContext) -> None:
        model = llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert shardformer.shard_model(model, context=context).lm_head.weight is optimizer.param_groups[0]["params"][-1]

    run_as_threads(do, data=2, one_at_a_time=True)


def test_description_reports_a_missing_policy() -> None:
    def do(context: ParallelContext) -> str:
        return str(shardformer.describe_sharding(shardformer.shard_model(Classifier(), context=context)))

    assert "Cannot build and run a small version of Classifier" in run_as_threads(do, data=2, one_at_a_time=True)[0]


class Wrong(shardformer.policies.RolePolicy):
    stack = shardformer.policies.LayerStack("model.blocks", [])


def test_passed_policy_must_match_the_model() -> None:
    def do(context: ParallelContext) -> None:
        with pytest.raises(PolicyError, match=r"model\.blocks"):
            shardformer.shard_model(llama(), Wrong, context=context)

    run_as_threads(do, data=2, one_at_a_time=True)


def test_tensor_axis_requires_a_policy() -> None:
    def do(context: ParallelContext) -> None:
        model = llama()
        other_layer(model)
        with pytest.raises(PolicyError):
            shardformer.shard_model(model, context=context)
        assert not hasattr(model, "_shardformer")

    run_as_threads(do, tensor=2, one_at_a_time=True)


def test_matching_family_policy_is_used() -> None:
    def do(context: ParallelContext) -> str:
        return get_sharding_metadata(shardformer.shard_model(llama(), context=context)).request.source

    assert "llama" in run_as_threads(do, data=2, one_at_a_time=True)[0]
    assert transformers.__version__  # the family is one of transformers
