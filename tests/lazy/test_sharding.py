"""A lazily built and sharded model equals an eagerly built and sharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from shardformer.config import ShardConfig
from shardformer.discovery.shrink_config import shrink_config
from shardformer.errors import ConfigError, PolicyError
from shardformer.layout.sharding_metadata import get_shard_specs
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.init_distributed import launch_from_torch
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.meta_init import init_recipe
from shardformer.meta_init import init_recipe as recipe
from shardformer.meta_init.lazy_init import LazyInit
from shardformer.policies.module_descriptions import ModulePolicyDescription, SubModuleReplacementDescription
from shardformer.policies.policy import Policy
from shardformer.shard_model_api import ShardFormer, shard_model
from shardformer.sharding.describe import describe_sharding
from shardformer.tensor_parallel.layers import Linear1D_Col, Linear1D_Row
from shardformer.verify.small_models import SMALL_CONFIGS, RandomBatchFactory, SmallModelFactory, compute_model_loss
from shardformer.weights.state_dict import full_state_dict
from tests.lazy.living import Living
from tests.pairwise import in_turn
from tests.policies.toy import ScaledToyLM, ToyLM, ToyPolicy

OPTIONS = {"enable_sequence_parallelism": True, "enable_fused_normalization": True}


def built(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def built_lazily(make: Callable[[], nn.Module], ranks: int, seeds: list[int] | None = None) -> list[nn.Module]:
    """Build one model per rank."""
    models = []
    for rank in range(ranks):
        with LazyInit():
            models.append(built(make, seeds[rank] if seeds else 0))
    return models


def assert_parts_of(model: nn.Module, plain: nn.Module, rank: int) -> None:
    specs = get_shard_specs(model)
    for name, param in model.named_parameters():
        assert torch.equal(param, specs[name].slice_full_tensor(plain.get_parameter(name), {"tensor": rank})), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name)), name
    assert any(spec.is_sharded for spec in specs.values())


WAYS = ((2, {}), (2, OPTIONS), (4, OPTIONS), (2, {}), (2, OPTIONS), (4, {}))
PAIRS = [  # each family once, over 2 or over 4 ranks, plainly or with all options
    pytest.param(family, size, options, id=f"{family}-{size}-{'options' if options else 'plain'}")
    for family, size, options in in_turn(sorted(SMALL_CONFIGS), *WAYS)
]


@pytest.mark.slow
@pytest.mark.reduced(one_in=4, first=1)
@pytest.mark.feature("lazy initialization")
@pytest.mark.parametrize(("family", "size", "options"), PAIRS)  # 127 tokens, 6 heads and 2 KV heads divide by few
def test_parts_and_a_training_step_are_those_of_the_eager_model(
    family: str, size: int, options: dict[str, bool]
) -> None:
    if family in ("swin", "swinv2", "sam"):  # which refuse it
        options = {name: on for name, on in options.items() if "sequence" not in name}
    sample = SmallModelFactory(family)
    batch, plain, lazy = RandomBatchFactory(sample.head_class)(0), built(sample), built_lazily(sample, size)
    whole = plain.state_dict()
    eager = [copy.deepcopy(plain) for _ in range(size)]

    def train(context: ParallelContext) -> None:
        rank = context.tensor.rank
        ours = shard_model(lazy[rank], context=context, **options)
        assert_parts_of(ours, plain, rank)
        theirs = shard_model(eager[rank], context=context, **options)
        for model in (ours, theirs):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            compute_model_loss(model, batch).backward()
            optimizer.step()
        ours_after, theirs_after = full_state_dict(ours), full_state_dict(theirs)
        assert ours_after.keys() == theirs_after.keys() == whole.keys()
        assert all(torch.equal(ours_after[name], value) for name, value in theirs_after.items())
        assert any(not torch.equal(ours_after[name], value) for name, value in whole.items())
        assert "Built with LazyInit" in str(describe_sharding(ours))

    run_as_threads(train, tensor=size)


@pytest.mark.parametrize("head", ["T5EncoderModel", "T5ForSequenceClassification"])
def test_lazy_and_eager_models_with_other_heads_match(head: str) -> None:
    sample = SmallModelFactory("t5", head)
    plain, lazy = built(sample), built_lazily(sample, 2)
    run_as_threads(
        lambda c: assert_parts_of(shard_model(lazy[c.tensor.rank], context=c), plain, c.tensor.rank), tensor=2
    )


def test_a_single_rank_gets_full_tensors() -> None:
    sample = SmallModelFactory("gpt2")
    plain, (lazy,) = built(sample), built_lazily(sample, 1)
    context = ParallelContext.from_sizes({"tensor": 1})
    model, _ = ShardFormer(ShardConfig(context=context)).optimize(lazy)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_user_model_with_a_user_policy_can_be_lazy() -> None:
    plain, lazy = built(ToyLM), built_lazily(ToyLM, 2)

    def shard(context: ParallelContext) -> None:
        assert_parts_of(
            shard_model(lazy[context.tensor.rank], ToyPolicy(), context=context), plain, context.tensor.rank
        )

    run_as_threads(shard, tensor=2)


@pytest.mark.slow
def test_a_derived_policy_fits_a_lazy_model() -> None:
    plain, lazy = stable_lm(), []
    for _ in range(2):
        with LazyInit():
            lazy.append(stable_lm())

    def shard(context: ParallelContext) -> None:
        model = shard_model(lazy[context.tensor.rank], context=context)
        assert "derived and validated policy" in str(describe_sharding(model))
        assert_parts_of(model, plain, context.tensor.rank)

    run_as_threads(shard, tensor=2)


def stable_lm() -> nn.Module:
    """A small model of a family that is not registered."""
    torch.manual_seed(0)
    model: nn.Module = transformers.StableLmForCausalLM(stable_config())
    return model


@cache
def stable_config() -> Any:
    """Derive the policy once, from separate models and outside LazyInit."""
    return shrink_config(transformers.StableLmConfig(architectures=["StableLmForCausalLM"]))


def test_a_lazy_model_without_a_policy_raises_like_an_eager_model() -> None:
    lazy, said = built_lazily(ScaledToyLM, 2), []
    for models in (lazy, [built(ScaledToyLM), built(ScaledToyLM)]):
        with pytest.raises(PolicyError, match="No policy for ScaledToyLM") as caught:
            run_as_threads(
                lambda context, models=models: shard_model(models[context.tensor.rank], context=context), tensor=2
            )
        said.append(str(caught.value))
    assert said[0] == said[1] and "ScaledToyLM.forward(ids, scale)" in said[0]
    assert all(p.is_meta for p in lazy[0].parameters())


class Speaking(ToyLM):
    """A user model with token inputs and no config."""

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)


@pytest.mark.slow
def test_a_policy_for_a_lazy_user_model_is_derived_on_a_materialized_copy() -> None:
    plain, lazy = built(Speaking), built_lazily(Speaking, 2)

    def shard(context: ParallelContext) -> None:
        model = shard_model(lazy[context.tensor.rank], context=context)
        assert "a derived and validated policy" in str(describe_sharding(model))
        assert_parts_of(model, plain, context.tensor.rank)

    run_as_threads(shard, tensor=2)


def train_on_processes(data: int) -> tuple[float, float]:
    context = launch_from_torch(data=data)
    sample = SmallModelFactory("llama")
    batch = RandomBatchFactory(sample.head_class)(0)
    part = {k: v[context.data.rank * 4 // data : (context.data.rank + 1) * 4 // data] for k, v in batch.items()}
    plain = built(sample)
    with LazyInit():
        lazy = built(sample)
    model = shard_model(lazy, context=context)
    assert_parts_of(model, plain, context.tensor.rank)
    loss = compute_model_loss(model, part)
    loss.backward()
    return float(loss.detach()), float(compute_model_loss(plain, part).detach())


@pytest.mark.parametrize("data", [1, 2])
def test_lazy_models_shard_over_processes(pool4: WorkerPool, data: int) -> None:
    for loss, expected in pool4.run(train_on_processes, data):
        assert abs(loss - expected) < 1e-5


# --------------------------------------------------------------------------------------------------------------- memory


def test_at_most_one_full_tensor_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak memory of temporary storages is the size of the largest full tensor."""
    sample = SmallModelFactory("gpt2", changes={"n_layer": 4})
    lazy = built_lazily(sample, 2)[0]
    living = Living()
    monkeypatch.setattr(recipe, "_allocate_storage", living)
    largest = max(p.nbytes for p in lazy.parameters())
    whole = sum(p.nbytes for p in lazy.parameters())
    for place in {init_recipe.get_deferred_storage(p) for p in lazy.parameters()}:
        assert place is not None
        init_recipe.materialize_deferred_storage(place)
    assert living.peak == largest < whole / 4


def test_a_cast_before_sharding_stores_no_full_tensor_of_the_new_dtype() -> None:
    with LazyInit():
        model = nn.Linear(64, 64).to(torch.bfloat16)
        part = model.weight.detach().narrow(0, 0, 8).clone()
        joined = torch.cat([model.weight.detach()[:2], model.weight.detach()[5:7]])
    for taken in (part, joined):
        place = init_recipe.get_deferred_storage(taken)
        assert place is not None
        sizes = [
            (v.dtype, v.deferred.num_bytes)
            for s in init_recipe.get_recorded_init_steps(place)
            for v in s.output_views
            if v is not None
        ]
        assert (torch.bfloat16, 64 * 64 * 2) not in sizes
    assert torch.equal(_values(part), _values(model.weight)[:8])
    assert torch.equal(_values(joined), _values(model.weight)[[0, 1, 5, 6]])


def _values(tensor: Tensor) -> Tensor:
    place = init_recipe.get_deferred_storage(tensor)
    assert place is not None
    return init_recipe.get_deferred_view(tensor).to_tensor(init_recipe.materialize_deferred_storage(place)).clone()


# ---------------------------------------------------------------------------------------- what a policy does to weights


class Halved(nn.Module):
    """A column-parallel layer of the user that shards with torch functions only."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    @classmethod
    def from_native_module(cls, module: Any, process_group: Any = None, **kwargs: Any) -> nn.Module:
        rows = len(module.weight) // 2
        weight = torch.empty(rows, module.in_features, device=module.weight.device)
        with torch.no_grad():
            weight.copy_(module.weight[rows:])
        return cls(weight, module.bias.detach().chunk(2)[1].clone())


def scale(module: nn.Module) -> None:
    with torch.no_grad():
        module.get_parameter("second.weight").mul_(2.0)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)


class PairPolicy(Policy):
    def preprocess(self) -> nn.Module:
        self.model.first.weight.data.add_(1.0)
        model: nn.Module = self.model
        return model

    def module_policy(self) -> Any:
        return {
            Pair: ModulePolicyDescription(
                sub_module_replacement=[SubModuleReplacementDescription("first", Halved)], param_replacement=[scale]
            )
        }


def test_changes_of_weights_by_a_policy_are_recorded() -> None:
    plain, lazy = built(Pair), built_lazily(Pair, 2)

    def shard(context: ParallelContext) -> nn.Module:
        return shard_model(lazy[context.tensor.rank], PairPolicy(), context=context)

    for model in run_as_threads(shard, tensor=2):
        assert torch.equal(model.get_parameter("first.weight"), plain.get_parameter("first.weight")[4:] + 1.0)
        assert torch.equal(model.get_parameter("first.bias"), plain.get_parameter("first.bias")[4:])
        assert torch.equal(model.get_parameter("second.weight"), plain.get_parameter("second.weight") * 2.0)


def test_a_linear_subclass_with_another_computation_is_refused() -> None:
    class Same(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input @ self.weight.t() + self.bias

    class Turned(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input @ self.weight + self.bias

    with LazyInit():
        same, turned = Same(8, 8), Turned(8, 8)
    Linear1D_Col.from_native_module(same)
    for kind in (Linear1D_Col, Linear1D_Row):
        with pytest.raises(ConfigError, match="custom `forward`"):
            kind.from_native_module(turned)


# ---------------------------------------------------------------------------------------------------- ranks that differ


def test_ranks_with_different_seeds_use_the_numbers_of_rank_0() -> None:
    sample = SmallModelFactory("bert")
    plain, lazy = built(sample, 5), built_lazily(sample, 2, seeds=[5, 6])

    def shard(context: ParallelContext) -> str:
        model = shard_model(lazy[context.tensor.rank], context=context)
        assert_parts_of(model, plain, context.tensor.rank)
        return str(describe_sharding(model))

    assert all("those of rank 0" in said for said in run_as_threads(shard, tensor=2))


def test_ranks_with_different_init_functions_are_refused() -> None:
    sample = SmallModelFactory("bert")
    wider = SmallModelFactory("bert", changes={"initializer_range": 0.5})
    lazy = [built_lazily(sample, 1)[0], built_lazily(wider, 1)[0]]
    lazy[1].config.initializer_range = lazy[0].config.initializer_range
    with pytest.raises(ConfigError, match=r"differs between ranks.*normal_"):
        run_as_threads(lambda context: shard_model(lazy[context.tensor.rank], context=context), tensor=2)


def test_mixing_lazy_and_eager_ranks_is_refused() -> None:
    sample = SmallModelFactory("bert")
    models = [built(sample), *built_lazily(sample, 1)]
    with pytest.raises(ConfigError, match="differs between ranks"):
        run_as_threads(lambda context: shard_model(models[context.tensor.rank], context=context), tensor=2)


def test_failed_sharding_leaves_the_model_unchanged() -> None:
    (lazy,) = built_lazily(SmallModelFactory("llama"), 1)
    before = {name: id(p) for name, p in lazy.named_parameters()}
    with pytest.raises(ConfigError):
        run_as_threads(lambda context: shard_model(lazy, Failing(), context=context), tensor=2)
    assert {name: id(p) for name, p in lazy.named_parameters()} == before
    assert all(p.is_meta for p in lazy.parameters())


class Failing(Policy):
    def module_policy(self) -> Any:
        return {"model": ModulePolicyDescription(param_replacement=[_fail])}


def _fail(module: nn.Module) -> None:
    raise ConfigError("It fails.", rule="None.", remedy="None.")
