"""Models of known families that the user changed, and models with repeated layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardformer
from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError, PolicyError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext, reshape_sequence_axis, reshape_tensor_axis
from shardformer.mesh.rank_grid import count_ranks_on_axis
from shardformer.pipeline.pipeline import Pipeline
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory
from shardformer.weights.state_dict import full_state_dict
from shardformer.zero.shard_optimizer import shard_optimizer

pytestmark = pytest.mark.slow

BATCH = RandomBatchFactory(DEFAULT_HEAD["llama"])(0)
Layout = Mapping[str, Any]
TENSOR: list[Layout] = [
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": True},
    {"tensor": (2, 1), "tensor_parallel_mode": "2d"},
]
UNCUT: list[Layout] = [{"pipe": 2}, {"sequence": 2}, {"pipe": 2, "data": 2}]


def llama() -> Any:
    torch.manual_seed(0)
    model: Any = SmallModelFactory("llama")().double().train()
    model.config.use_cache = False
    return model


class Adapted(nn.Module):
    """A linear layer with a hand-written low-rank adapter."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, 2, bias=False, dtype=linear.weight.dtype)
        self.up = nn.Linear(2, linear.out_features, bias=False, dtype=linear.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + self.up(self.down(x))
        return out


def adapted() -> Any:
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    return model


def normed() -> Any:
    model = llama()
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    return model


def third_tie() -> Any:
    model = llama()
    model.extra = nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)
    model.extra.weight = model.lm_head.weight
    return model


def own_head() -> Any:
    model = llama()
    words, hidden = model.lm_head.weight.shape
    model.lm_head = nn.Sequential(nn.Linear(hidden, 12), nn.GELU(), nn.Linear(12, words)).double()
    return model


def again(model: Any) -> Any:
    """Use the first layer as the last one, too."""
    layers = list(model.model.layers)
    model.model.layers = nn.ModuleList([*layers, layers[0]])
    model.config.num_hidden_layers += 1
    return model


def check(plain: Any, layout: Layout) -> None:
    """Compare the weights after one step with those of the plain model."""
    parallel = ParallelConfig(**layout)
    axes = {name: size for name, size in parallel.sizes.items() if size is not None}
    axes["sequence"] = count_ranks_on_axis(parallel.sequence)
    expected = copy.deepcopy(plain)
    optimizer = torch.optim.SGD([p for p in expected.parameters() if p.requires_grad], lr=0.5)
    expected(**BATCH).loss.backward()
    optimizer.step()

    def train(context: ParallelContext) -> dict[str, Tensor]:
        context = reshape_tensor_axis(reshape_sequence_axis(context, parallel.sequence), parallel.tensor)
        model: Any = shard_model(copy.deepcopy(plain), config=parallel.make_shard_config(context))
        own = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        data = context.data
        part = {name: x.chunk(data.size)[data.rank] for name, x in BATCH.items()}
        if context.pipe.size > 1:
            Pipeline(model, 2, average_loss_over="tokens").step(part)
        else:
            model(**part).loss.backward()
        own.step()
        return full_state_dict(model)

    found = run_as_threads(train, **axes, one_at_a_time=True)[0]
    weights = expected.state_dict()
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.reduced(one_in=5)
@pytest.mark.parametrize("layout", UNCUT, ids=str)
@pytest.mark.parametrize("make", [adapted, normed, third_tie, own_head], ids=lambda make: make.__name__)
def test_layers_may_contain_anything_without_tensor_parallelism(make: Callable[[], Any], layout: Layout) -> None:
    check(make(), layout)


@pytest.mark.full
@pytest.mark.parametrize("make", [adapted, normed, third_tie], ids=lambda make: make.__name__)
def test_unknown_weights_are_refused_under_tensor_parallelism(make: Callable[[], Any]) -> None:
    plain = make()

    def refused(context: ParallelContext) -> None:
        with pytest.raises((ConfigError, PolicyError)):
            shard_model(copy.deepcopy(plain), context=context)

    run_as_threads(refused, tensor=2)


@pytest.mark.reduced(one_in=3, first=1)
@pytest.mark.parametrize("layout", TENSOR, ids=str)
def test_custom_head_stays_replicated(layout: Layout) -> None:
    plain = own_head()
    check(plain, layout)


def test_replicated_head_is_noted() -> None:
    plain = own_head()
    pages = run_as_threads(
        lambda c: str(shardformer.describe_sharding(shard_model(copy.deepcopy(plain), context=c))), tensor=2
    )
    assert "lm_head is replicated, because it is not a linear layer." in pages[0]


@pytest.mark.reduced(one_in=3, first=1)
@pytest.mark.parametrize("layout", [*TENSOR, *UNCUT, {"tensor": 2, "pipe": 2, "sequence_parallel": True}], ids=str)
def test_repeated_layer_trains_correctly(layout: Layout) -> None:
    check(again(llama()), layout)


class Viewing(nn.Module):
    """Has a buffer or attribute that is a view of a weight."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if how == "buffer":
            self.register_buffer("view", self.linear.weight.data)
        else:
            self.view = self.linear.weight.detach()[1:]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x).sum() + self.view.sum()
        return out


@pytest.mark.parametrize("how", ["buffer", "attribute"])
def test_view_of_a_weight_is_refused_if_the_weight_moves(how: str) -> None:
    """With data parallelism only, it follows the weight as in the plain model."""

    def run(context: ParallelContext) -> None:
        model: Any = shard_model(Viewing(how), context=context)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).backward()
        optimizer.step()
        assert torch.equal(model.view, model.linear.weight.detach()[4 - len(model.view) :])
        model = Viewing(how)
        with pytest.raises(ConfigError, match=r"view is a view of linear\.weight"):
            shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1, context=context)

    run_as_threads(run, data=2, one_at_a_time=True)


def test_view_of_a_sharded_weight_is_refused() -> None:
    def refused(context: ParallelContext) -> None:
        model = llama()
        before = model.lm_head.weight.shape
        model.register_buffer("table", model.lm_head.weight.data[:3], persistent=False)
        with pytest.raises(ConfigError, match=r"table of LlamaForCausalLM is a view of the parameter"):
            shard_model(model, context=context)
        assert model.lm_head.weight.shape == before

    run_as_threads(refused, tensor=2, one_at_a_time=True)


def test_adjacent_parameters_in_one_storage_are_not_views() -> None:
    """nn.LSTM allocates its parameters this way on a GPU."""
    flat = torch.arange(8.0)

    def train(context: ParallelContext) -> list[Tensor]:
        model = nn.Module()
        model.a, model.b = nn.Parameter(flat[:4].clone()), nn.Parameter(flat[4:].clone())
        whole = flat.clone()
        model.a.data, model.b.data = whole[:4], whole[4:]
        optimizer = shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0), stage=2, context=context)
        (model.a.sum() + 2 * model.b.sum()).backward()
        optimizer.step()
        return [model.a.detach(), model.b.detach()]

    for a, b in run_as_threads(train, data=2, one_at_a_time=True):
        assert torch.equal(a, flat[:4] - 1) and torch.equal(b, flat[4:] - 2)


class Around(nn.Module):
    """A user-defined wrapper that shares the config of its submodel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()
        self.config = self.inner.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


@pytest.mark.reduced(one_in=3, first=1)
@pytest.mark.parametrize("layout", [TENSOR[0], *UNCUT[:2]], ids=str)
def test_wrapper_with_the_config_of_its_submodel_trains(layout: Layout) -> None:
    check(Around(), layout)
