"""timm's models under LazyInit: the values of an eager build, and each rank creates only its shards."""

from __future__ import annotations

import copy
from unittest.mock import patch

import pytest
import torch
from torch import nn

import shardformer
from shardformer.layout.sharding_metadata import get_shard_specs
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.meta_init import init_recipe as recipe
from tests.lazy.families import assert_same
from tests.lazy.living import Living
from tests.pairwise import in_turn
from tests.pools import WorkerPools
from tests.timm.models import MODELS, STAGED, Small, images, loss
from tests.timm.process import timm
from tests.timm.test_timm import NORMS, SEQUENCE, in_worker, of


def built(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return Small(name)().to(dtype)


def built_lazily(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    with shardformer.meta_init.LazyInit():
        model = built(name, dtype)
    assert all(p.is_meta for p in model.parameters()), name
    return model


def filled(name: str, dtype: torch.dtype) -> None:
    plain = built(name, dtype)
    state = torch.get_rng_state()
    lazy = built_lazily(name, dtype)
    assert torch.equal(torch.get_rng_state(), state), "what is drawn next is the same too"
    assert_same(shardformer.meta_init.materialize(lazy), plain)


@pytest.mark.reduced(one_in=5)
@pytest.mark.parametrize(("name", "dtype"), in_turn(MODELS, (torch.float32,), (torch.bfloat16,)))
def test_weights_and_buffers_are_those_of_an_eager_build(
    timm_worker: WorkerPool, name: str, dtype: torch.dtype
) -> None:
    in_worker(timm_worker, filled, name, dtype)


def created() -> None:
    """Build a model by its name."""
    arguments = {"num_classes": 10, "img_size": 64, "depth": 2}
    torch.manual_seed(3)
    plain = timm().create_model("vit_tiny_patch16_224", **arguments)
    torch.manual_seed(3)
    with shardformer.meta_init.LazyInit():
        lazy = timm().create_model("vit_tiny_patch16_224", **arguments)
    assert all(p.is_meta for p in lazy.parameters())
    assert_same(shardformer.meta_init.materialize(lazy), plain)


def test_a_model_that_timm_creates_by_its_name(timm_worker: WorkerPool) -> None:
    in_worker(timm_worker, created)


def sharded_both_ways(name: str, ranks: int, options: dict[str, bool]) -> list[int]:
    """Shard and train an eager and a lazy model for one step. Return the number of sharded parameters."""
    plain = built(name)
    eager, lazy = [copy.deepcopy(plain) for _ in range(ranks)], [built_lazily(name) for _ in range(ranks)]
    whole, batch = plain.state_dict(), images(0)

    def train(context: ParallelContext) -> int:
        rank = context.tensor.rank
        ours = shardformer.shard_model(lazy[rank], context=context, **options)
        theirs = shardformer.shard_model(eager[rank], context=context, **options)
        assert_same(ours, theirs)
        specs = get_shard_specs(ours)
        for parameter_name, parameter in ours.named_parameters():
            part = specs[parameter_name].slice_full_tensor(plain.get_parameter(parameter_name), {"tensor": rank})
            assert torch.equal(parameter, part), parameter_name
            assert parameter.untyped_storage().nbytes() == part.nbytes, parameter_name
        for model in (ours, theirs):
            loss(model, batch).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        after, expected = shardformer.full_state_dict(ours), shardformer.full_state_dict(theirs)
        assert after.keys() == expected.keys() == whole.keys()
        assert all(torch.equal(after[key], value) for key, value in expected.items())
        assert any(not torch.equal(after[key], value) for key, value in whole.items())
        assert "Built with LazyInit" in str(shardformer.describe_sharding(ours))
        return sum(spec.is_sharded for spec in specs.values())

    return run_as_threads(train, tensor=ranks)


@pytest.mark.reduced(one_in=5)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [of(name, "lazy initialization", beside=way) for name, *way in in_turn(MODELS, (2,), (4,))],
)
def test_shards_and_a_step_equal_the_eager_model(timm_worker: WorkerPool, name: str, ranks: int) -> None:
    options = NORMS if ranks == 4 or name in STAGED else {**NORMS, **SEQUENCE}
    assert all(in_worker(timm_worker, sharded_both_ways, name, ranks, options))


def held_while_sharding(name: str) -> tuple[int, int, int, int]:
    """Return bytes: peak of full tensors on a rank, largest tensor, replicated tensors, all tensors."""
    context = ParallelContext.from_default_process_group({"tensor": 2, "data": 1})
    module, cls, arguments = MODELS[name]
    with shardformer.meta_init.LazyInit():
        model = getattr(timm(f"models.{module}"), cls)(**{**arguments, "depth": 6})
    sizes = [p.nbytes for p in model.parameters()]
    living = Living()
    with patch.object(recipe, "_allocate_storage", living):
        model = shardformer.shard_model(model, context=context)
    specs = get_shard_specs(model)
    whole = [p.nbytes for key, p in model.named_parameters() if not specs[key].is_sharded]
    return living.peak, max(sizes), sum([*whole, *(b.nbytes for b in model.buffers())]), sum(sizes)


@pytest.mark.reduced(one_in=3)
@pytest.mark.parametrize("name", ["vit", "beit", "eva02"])
def test_a_rank_stores_its_shards_and_one_full_tensor(timm_pools: WorkerPools, name: str) -> None:
    for peak, largest, not_cut, everything in timm_pools(2).run(held_while_sharding, name):
        assert largest <= peak <= largest + not_cut < everything / 5
