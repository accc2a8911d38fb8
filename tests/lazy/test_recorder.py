"""A lazily built model gets values that are bitwise identical to those of an eager build."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.modules.module import register_module_parameter_registration_hook

from shardformer.errors import ConfigError
from shardformer.meta_init.init_recipe import (
    get_deferred_storage,
    get_recorded_init_steps,
    materialize_deferred_storage,
)
from shardformer.meta_init.lazy_init import InitRecorderMode, LazyInit, materialize
from shardformer.verify.small_models import SmallModelFactory
from tests.lazy.families import FAMILIES, assert_same, build


def with_values(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Build a model eagerly and lazily with materialization, and compare the random states."""
    torch.manual_seed(7)
    plain = make()
    state = torch.get_rng_state()
    torch.manual_seed(7)
    with LazyInit():
        lazy = make()
    assert torch.equal(torch.get_rng_state(), state)
    materialize(lazy)
    assert torch.equal(torch.get_rng_state(), state)
    return lazy, plain


@pytest.mark.reduced(at_most=12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gets_the_weights_buffers_and_ties_of_an_eager_build(family: str, dtype: torch.dtype) -> None:
    plain = build(family, dtype)
    state = torch.get_rng_state()
    with LazyInit():
        lazy = build(family, dtype)
    assert torch.equal(torch.get_rng_state(), state)  # so that what is drawn next is the same too
    assert all(p.is_meta for p in lazy.parameters())
    assert_same(materialize(lazy), plain)


class Initialised(nn.Module):
    """Weights initialized with every init function of torch and with other common operations."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("uniform_", "normal_", "ones_", "zeros_", "xavier_uniform_", "xavier_normal_", "trunc_normal_",
                     "kaiming_uniform_", "kaiming_normal_", "orthogonal_", "eye_"):  # fmt: skip
            weight = nn.Parameter(torch.empty(9, 7))
            getattr(init, name)(weight)
            self.register_parameter(name, weight)
        self.wide = nn.Parameter(init.trunc_normal_(torch.empty(9, 7), std=5.0, a=-1.0, b=1.0))
        self.sparse = nn.Parameter(init.sparse_(torch.empty(9, 7), sparsity=0.5))
        self.dirac = nn.Parameter(init.dirac_(torch.empty(4, 4, 3)))
        self.drawn = nn.Parameter(torch.randn(5, 3) * 0.5 + torch.rand(3))
        self.normal = nn.Parameter(torch.normal(1.0, 2.0, size=(4, 4)))
        self.own = nn.Parameter(torch.empty(33).normal_(generator=torch.Generator().manual_seed(5)))
        self.scaled = nn.Parameter(torch.empty(6, 6).exponential_())
        with torch.no_grad():
            self.scaled[0] = 2.0
            self.scaled[:, 1] = torch.ones(6)
            self.scaled[torch.tensor([3, 5])] = torch.randn(2, 6)
            self.scaled[2].fill_(3.0)
            self.scaled[:, ::2].mul_(2.0)
            self.scaled[self.scaled > 1.0] = 1.0
            self.drawn /= self.drawn.norm()
        self.copied = nn.Parameter(self.scaled.detach().t().clone())
        self.register_buffer("steps", torch.zeros(4) + torch.arange(4))
        self.register_buffer("mean", self.drawn.detach().mean())
        self.plain_attribute = torch.ones(3) * math.pi
        self.listed = [torch.full((2,), 1.5), "a"]
        self.norm = nn.BatchNorm1d(5)
        self.weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))


def test_all_init_functions_are_recorded() -> None:
    lazy, plain = with_values(Initialised)
    assert_same(lazy, plain)
    assert isinstance(lazy, Initialised) and isinstance(plain, Initialised)
    assert torch.equal(lazy.plain_attribute, plain.plain_attribute)
    assert isinstance(lazy.listed[0], Tensor) and torch.equal(lazy.listed[0], torch.full((2,), 1.5))


def test_conversions_of_the_model_are_recorded() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4)).to("cpu")
        model.apply(lambda m: init.normal_(m.weight) if isinstance(m, nn.Linear) else None)
        model[1].weight.requires_grad_(False)
        return model.to(torch.bfloat16).double()

    assert_same(*with_values(make))


def test_reading_a_value_computes_it() -> None:
    torch.manual_seed(0)
    expected = torch.randn(3, 3)
    torch.manual_seed(0)
    with LazyInit():
        weight = torch.randn(3, 3)
        assert weight.device.type == "cpu" and not weight.is_meta  # as init functions want to know
        assert weight.sum().item() == expected.sum().item()
        assert torch.equal(weight, expected)
        assert bool((weight > 0).any()) == bool((expected > 0).any())
    assert weight.is_meta


def test_overwritten_random_numbers_are_not_in_the_recipe() -> None:
    """transformers overwrites the values of nn.Embedding, so the first draw is not in the recipe."""
    with LazyInit():
        model = SmallModelFactory("bert")()
    place = get_deferred_storage(model.get_parameter("bert.embeddings.word_embeddings.weight"))
    assert place is not None
    steps = [str(step.func).removeprefix("aten.").partition(".")[0] for step in get_recorded_init_steps(place)]
    assert steps == ["normal_", "zero_"]


def test_parameters_keep_sharing_memory() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight.data = model[0].weight.data
        return model

    lazy, plain = with_values(make)
    assert_same(lazy, plain)
    first, second = lazy.get_parameter("0.weight"), lazy.get_parameter("1.weight")
    assert first is not second and first.data_ptr() == second.data_ptr()


def test_an_eager_model_is_unchanged() -> None:
    model = nn.Linear(2, 2)
    before = model.weight
    assert materialize(model).weight is before


def test_materialize_uses_the_requested_device() -> None:
    with LazyInit():
        model = nn.Linear(2, 2)
    assert materialize(model, torch.device("cpu")).weight.device.type == "cpu"


# ------------------------------------------------------------------------------------------------------------ bad input


def test_the_meta_device_inside_lazy_init_is_refused() -> None:
    said = r"meta device inside LazyInit.*shardformer.from_pretrained"
    with pytest.raises(ConfigError, match=said), LazyInit(), torch.device("meta"):
        nn.Linear(2, 2)


def test_from_pretrained_of_transformers_inside_lazy_init_is_refused(tmp_path: Path) -> None:
    model: Any = SmallModelFactory("bert")()
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"shardformer.from_pretrained"), LazyInit():
        type(model).from_pretrained(tmp_path)


def test_meta_tensors_without_recipes_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"without values on the meta device, such as '.*weight'.*LazyInit"):
        materialize(model)


def test_a_conversion_after_lazy_init_is_refused() -> None:
    with LazyInit():
        model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"'weight'.*inside `with LazyInit\(\):`, where you must also call .to\(\)"):
        materialize(model.half())


def test_a_copy_after_lazy_init_is_refused() -> None:
    with LazyInit():
        model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="'weight'"):
        materialize(copy.deepcopy(model))


def test_a_copy_from_a_meta_tensor_is_refused() -> None:
    nowhere = torch.empty(2, 2, device="meta")
    with LazyInit():
        model = nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.copy_(nowhere)
    with pytest.raises(ConfigError, match=r"without values on the meta device, such as '.*weight'"):
        materialize(model)


def test_a_weight_modified_after_lazy_init_is_refused() -> None:
    with LazyInit():
        model = nn.Linear(2, 2)
    init.zeros_(model.bias)
    with pytest.raises(ConfigError, match=r"'bias'.*after the LazyInit block ended"):
        materialize(model)


def test_an_invalid_operation_raises_where_it_is_called() -> None:
    with pytest.raises(RuntimeError, match=r"expand|size"), LazyInit():
        torch.zeros(3, 3).copy_(torch.zeros(2, 2))


def test_threads_draw_the_same_random_numbers() -> None:
    """``randn_like`` takes no generator and draws from the generator that all threads share."""
    weight = torch.empty(1000, 100)
    torch.manual_seed(7)
    plain = [torch.randn_like(weight) for _ in range(4)]
    with LazyInit():
        weight = torch.empty(1000, 100)
        torch.manual_seed(7)
        lazy = [torch.randn_like(weight) for _ in range(4)]
    before = torch.get_rng_state()

    def values(tensor: Tensor) -> Tensor:
        place = get_deferred_storage(tensor)
        assert place is not None
        return torch.empty(0).set_(materialize_deferred_storage(place), 0, (1000, 100))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(values, lazy * 8))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, plain * 8))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_error_inside_ends_the_recording() -> None:
    with pytest.raises(ZeroDivisionError), LazyInit():
        raise ZeroDivisionError
    assert not nn.Linear(2, 2).weight.is_meta


def test_init_recorder_creates_eager_tensors() -> None:
    with InitRecorderMode():
        assert not nn.Linear(2, 2).weight.is_meta


def test_threads_may_build_models_while_others_enter_and_leave_lazy_init() -> None:
    """torch iterates over its registration hooks for each parameter; the set must not change during the iteration."""
    with LazyInit():
        pass
    inside, go_on = threading.Event(), threading.Event()

    def wait(module: nn.Module, name: str, param: Any) -> None:
        inside.set()
        assert go_on.wait(60)

    def build() -> nn.Module:
        return nn.Linear(2, 2)

    hooks = [register_module_parameter_registration_hook(each) for each in (wait, lambda *_: None)]
    try:
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(build)
            assert inside.wait(60)
            lazy = LazyInit()
            lazy.__enter__()
            go_on.set()
            assert made.result(60).weight.device.type == "cpu"
            lazy.__exit__(None, None, None)
    finally:
        for hook in hooks:
            hook.remove()
