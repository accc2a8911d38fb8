"""``engine.reshard`` carries over changes since ``initialize``, or raises before anything is changed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import shardformer
from shardformer.errors import ConfigError, ShardFormerError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.pipeline import get_training_modes
from shardformer.training.engine import Engine
from shardformer.verify.small_models import SmallModelFactory


class Settings:
    def __init__(self) -> None:
        self.scale, self.inner = 1.0, {"power": 1}


class Model(nn.Module):
    """Model whose forward pass reads many kinds of attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.act = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU()
        self.last, self.settings, self._shift, self.activation = nn.Linear(8, 4), Settings(), 0.0, torch.tanh
        self.register_buffer("mask", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.act(self.drop(self.norm(self.first(x)))) * self.mask + self._shift)
        return self.last(x) * self.settings.scale ** self.settings.inner["power"]


def engine_of(context: ParallelContext | None = None, **parallel: Any) -> Engine:
    torch.manual_seed(0)
    made = Model().double()
    made.drop.p = 0.0
    optimizer = torch.optim.SGD([{"params": made.first.parameters()}, {"params": made.last.parameters()}], lr=0.1)
    return shardformer.initialize(made, optimizer, nn.MSELoss(), parallel=parallel, context=context)


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, x.flip(0)


def set_(path: str, value: Any) -> Callable[[Engine], None]:
    def change(engine: Engine) -> None:
        *inner, last = path.split(".")
        setattr(functools.reduce(getattr, inner, engine.model), last, value)

    return change


def frozen(engine: Engine) -> None:
    engine.model.first.requires_grad_(False)


def frozen_norm(engine: Engine) -> None:
    engine.model.norm.eval()


def buffer_in_place(engine: Engine) -> None:
    engine.model.mask[:4] = 0.0


def inner_setting(engine: Engine) -> None:
    engine.model.settings.scale = 2.0
    engine.model.settings.inner["power"] = 3


def rate(engine: Engine) -> None:
    engine.optimizer.param_groups[1]["lr"] = 0.01


def group(engine: Engine) -> None:
    engine.optimizer.add_param_group({"params": list(engine.model.norm.parameters()), "lr": 0.5})


def everything(engine: Engine) -> None:
    for change in (frozen, frozen_norm, buffer_in_place, inner_setting, rate, CARRIED["eps"], CARRIED["activation"]):
        change(engine)


CARRIED: dict[str, Callable[[Engine], None]] = {
    "frozen": frozen,
    "mode": frozen_norm,
    "eps": set_("norm.eps", 0.5),
    "momentum": set_("norm.momentum", 0.9),
    "private": set_("_shift", 0.3),
    "function": set_("activation", torch.sin),
    "activation": set_("act", nn.GELU()),
    "other kind": set_("drop", nn.Hardtanh(-0.5, 0.5)),
    "buffer": set_("mask", torch.linspace(0, 1, 8)),
    "buffer in place": buffer_in_place,
    "settings": inner_setting,
    "rate": rate,
    "group": group,
    "everything": everything,
}


def losses(change: Callable[[Engine], None], layouts: list[dict[str, Any] | None]) -> list[float]:
    engine, found = engine_of(), []
    change(engine)
    for step, layout in enumerate(layouts):
        if layout is not None:
            engine.reshard(layout)
        found.append(float(engine.train_step(batch(step))))
    found.append(float(engine.evaluate(batch(9))))
    return found


@pytest.mark.reduced(at_most=6)
@pytest.mark.parametrize("name", CARRIED)
def test_losses_equal_those_of_a_run_without_reshard(name: str) -> None:
    expected = losses(CARRIED[name], [None] * 4)
    assert losses(CARRIED[name], [None, {"zero_stage": 1}, None, {"micro_batches": 1}]) == pytest.approx(
        expected, abs=1e-12
    )
    assert losses(lambda engine: None, [None] * 4) != pytest.approx(expected, abs=1e-6), "it changes the losses"


def hook(engine: Engine) -> None:
    engine.model.first.register_forward_hook(lambda module, args, output: output * 2)


def backward_hook(engine: Engine) -> None:
    engine.model.last.register_full_backward_hook(lambda module, into, out: None)


def parameter_hook(engine: Engine) -> None:
    engine.model.first.weight.register_hook(lambda gradient: gradient * 2)


def bound_forward(engine: Engine) -> None:
    engine.model.act.forward = (lambda self, x: x).__get__(engine.model.act)


def function_of_the_model(engine: Engine) -> None:
    model = engine.model
    model.activation = lambda x: x * model.norm.eps


REFUSED = {f.__name__: f for f in (hook, backward_hook, parameter_hook, bound_forward, function_of_the_model)}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_change_raises_and_the_engine_still_works(name: str) -> None:
    engine = engine_of()
    REFUSED[name](engine)
    before, optimizer = engine.model, engine.optimizer
    params = [id(p) for each in optimizer.param_groups for p in each["params"]]
    with pytest.raises(ConfigError, match="was modified after initialize"):
        engine.reshard({"zero_stage": 1})
    assert engine.model is before and engine.optimizer is optimizer
    assert [id(p) for each in optimizer.param_groups for p in each["params"]] == params
    engine.train_step(batch(0))


def test_resharding_a_compiled_model_warns() -> None:
    engine = engine_of()
    engine.model.last.compile(backend="eager")
    with pytest.warns(UserWarning, match=r"Call engine.model.last.compile\(\) again") as caught:
        engine.reshard({"zero_stage": 1})
    assert caught[0].filename == __file__
    engine.train_step(batch(0))


def test_only_an_engine_of_one_process_can_be_copied() -> None:
    engine = engine_of()
    engine.train_step(batch(0))
    copied = copy.deepcopy(engine)
    found = [float(each.train_step(batch(step))) for step in (1, 2) for each in (engine, copied)]
    assert found[0] == found[1] != found[2] == found[3]

    def refused(context: ParallelContext) -> None:
        with pytest.raises(ConfigError, match=r"Copy only the model with copy\.deepcopy"):
            copy.deepcopy(engine_of(context, data=2))

    run_as_threads(refused, data=2, one_at_a_time=True)


@pytest.mark.parametrize("how", [torch.nn.utils.weight_norm, functools.partial(prune.l1_unstructured, amount=0.5)])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_weight_norm_and_pruning_continue_after_reshard(how: Any) -> None:
    """A hook computes the weight of these modules, so that ``copy.deepcopy`` fails."""

    def trained(layouts: list[dict[str, Any] | None]) -> list[float]:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        how(made[0], name="weight")
        engine, found = shardformer.initialize(made, torch.optim.SGD(made.parameters(), lr=0.1), nn.MSELoss()), []
        for step, layout in enumerate(layouts):
            if layout is not None:
                engine.reshard(layout)
            found.append(float(engine.train_step(batch(step))))
        return found

    assert trained([None, {"zero_stage": 3}, {"zero_stage": 1}]) == pytest.approx(trained([None] * 3), abs=1e-12)


def test_modifications_before_initialize_are_not_changes() -> None:
    made = Model().double()
    made.first.register_forward_hook(lambda module, args, output: output * 2)
    engine = shardformer.initialize(made, torch.optim.SGD(made.parameters(), lr=0.1), nn.MSELoss())
    plain = float(engine.evaluate(batch(0)))
    engine.reshard({"zero_stage": 1})
    assert float(engine.evaluate(batch(0))) == pytest.approx(plain, abs=1e-12)


@pytest.mark.parametrize("problem", ["zero", "micro_batches"])
def test_a_failed_reshard_leaves_the_engine_unchanged(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardformer.training import initialize as reshape

    engine, other = engine_of(), engine_of()
    for each in (engine, other):
        each.train_step(batch(0))

    def fails(*_: Any, **__: Any) -> Any:
        torch.rand(3)
        raise RuntimeError("no memory")

    monkeypatch.setattr(reshape, {"zero": "shard_optimizer", "micro_batches": "make_pipeline"}[problem], fails)
    groups, seed = engine.optimizer.param_groups, torch.get_rng_state()
    with pytest.raises(RuntimeError, match="no memory"):
        engine.reshard({"zero_stage": 1})
    assert engine.optimizer.param_groups is groups and torch.get_rng_state().equal(seed)
    assert float(engine.train_step(batch(1))) == float(other.train_step(batch(1)))
    assert float(engine.train_step(batch(2))) == float(other.train_step(batch(2)))


def llama_losses(context: ParallelContext | None, layouts: list[dict[str, Any] | None]) -> list[float]:
    torch.manual_seed(0)
    made = SmallModelFactory("llama")().double().train()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    sizes = {"tensor": 2} if context is not None else {}
    engine = shardformer.initialize(made, optimizer, parallel=sizes, context=context)
    engine.model.model.embed_tokens.requires_grad_(False)
    engine.model.model.layers[0].self_attn.q_proj.requires_grad_(False)
    engine.model.model.layers[1].input_layernorm.variance_epsilon = 0.5
    engine.model.model.norm.variance_epsilon = 0.1
    engine.model.config.use_cache = False
    engine.model.model.layers[0].eval()
    recomputes = getattr(engine.model, "activation_checkpointing_enable", engine.model.gradient_checkpointing_enable)
    recomputes({"use_reentrant": False})
    modes, found = get_training_modes(engine.model), []
    for step, layout in enumerate(layouts):
        if layout is not None and context is not None:
            engine.reshard(layout)
            assert not engine.model.config.use_cache and get_training_modes(engine.model) == modes
        ids = torch.randint(3, 60, (4, 8), generator=torch.Generator().manual_seed(step))
        part = ids.chunk(engine.context.data.size)[engine.context.data.rank]
        found.append(float(engine.train_step({"input_ids": part, "labels": part})))
        assert engine.pipeline.checkpointed, "activations are computed again"
    return found


def test_changes_are_carried_over_between_tensor_pipeline_and_data_parallel_layouts() -> None:
    layouts = [None, {"pipe": 2}, {"data": 2, "zero_stage": 1}, {"tensor": 2}]
    expected = llama_losses(None, layouts)
    for found in run_as_threads(lambda context: llama_losses(context, layouts), tensor=2, one_at_a_time=True):
        assert found == pytest.approx(expected, abs=1e-6)


def test_a_change_that_differs_between_ranks_raises_on_all_ranks() -> None:
    def do(context: ParallelContext) -> None:
        engine = engine_of(context)
        engine.model._shift = float(1 + context.data.rank)
        with pytest.raises(ShardFormerError, match="was modified differently on different ranks"):
            engine.reshard({"data": 2, "zero_stage": 1})

    run_as_threads(do, data=2, one_at_a_time=True)
