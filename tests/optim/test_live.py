"""Gradients, states and groups of a ZeRO optimizer are live, also after a step, a load or a resharding."""

from __future__ import annotations

import contextlib
import copy
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import lr_scheduler

import shardformer
from shardformer.errors import ConfigError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.weights.state_dict import full_state_dict
from shardformer.zero.shard_optimizer import shard_optimizer
from tests.policies.toy import ToyLM, ToyPolicy, toy_batch, toy_loss

RANKS, STEPS = 2, 4
Change = Callable[[nn.Module, Any], object]


_DRAWING = threading.Lock()
"""Ranks that are threads share one random generator."""


def net() -> nn.Sequential:
    with _DRAWING:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank)).double()


def train(model: nn.Module, optimizer: Any, ranks: list[int], change: Change, every: int, behind: Change) -> None:
    for step in range(STEPS):
        for rank in ranks:
            (model(inputs(step, rank)).square().mean() * len(ranks) ** -1).backward()
        change(model, optimizer)
        optimizer.step()
        behind(model, optimizer)
        if step % every == every - 1:
            optimizer.zero_grad()


def nothing(model: nn.Module, optimizer: Any) -> None:
    """Change nothing."""


def check_same(
    change: Change = nothing,
    *,
    every: int = 1,
    behind: Change = nothing,
    stage: int = 1,
    ranks: int = RANKS,
    **how: Any,
) -> None:
    """Compare the weights with one process in which a script makes the same changes."""
    plain = net()
    train(plain, adam(plain), list(range(ranks)), change, every, behind)
    models = [net() for _ in range(ranks)]

    def over(context: ParallelContext) -> dict[str, Tensor]:
        model = models[context.rank]
        optimizer = shard_optimizer(model, adam(model), context=context, stage=stage, **how)
        train(model, optimizer, [context.rank], change, every, behind)
        return full_state_dict(model)

    untouched = net()
    train(untouched, adam(untouched), list(range(ranks)), nothing, 1, nothing)
    for found in run_as_threads(over, data=ranks):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-11)
    differs = any(not torch.equal(value, untouched.state_dict()[name]) for name, value in plain.state_dict().items())
    assert differs or (change, every, behind) == (nothing, 1, nothing)


# ------------------------------------------------------------------------------------------------------------ gradients


def each_grad(function: Callable[[Tensor], object]) -> Change:
    """Apply a function in place to each gradient."""

    def change(model: nn.Module, optimizer: Any) -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert len(grads) == 6
        for grad in grads:
            function(grad)

    return change


def halve(grad: Tensor) -> None:
    grad.mul_(torch.linspace(0, 1, grad.shape[-1], dtype=grad.dtype))


def noise(grad: Tensor) -> None:
    """Add noise. Ranks are threads here, which share one generator."""
    generator = torch.Generator().manual_seed(grad.numel())
    grad.add_(torch.randn(grad.shape, generator=generator, dtype=grad.dtype), alpha=0.1)


def put_back(model: nn.Module, optimizer: Any) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad = (p.grad * 3).clamp(-0.1, 0.2)


def of_groups(model: nn.Module, optimizer: Any) -> None:
    """Edit gradients through the optimizer's parameters. Some parameters are on one rank only."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = p.grad.sign()


def no_norms(model: nn.Module, optimizer: Any) -> None:
    for p in model[1].parameters():  # type: ignore[index, union-attr]  # a Sequential
        p.grad = None


def no_gradient_of_a_group(model: nn.Module, optimizer: Any) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad = None


CHANGES: dict[str, Change] = {
    "mul": each_grad(halve),
    "clamp": each_grad(lambda grad: grad.clamp_(-1e-2, 1e-2)),
    "noise": each_grad(noise),
    "zero": each_grad(lambda grad: grad.data.zero_()),
    "foreach": lambda model, _: torch._foreach_mul_([p.grad for p in model.parameters()], 0.1),  # type: ignore[arg-type]
    "put back": put_back,
    "groups": of_groups,
    "none": no_norms,
    "clip value": lambda model, _: clip_grad_value_(model.parameters(), 1e-2),
    "clip norm": lambda model, _: clip_grad_norm_(model.parameters(), 1e-2),
    "clip norm of some": lambda model, _: clip_grad_norm_(model[0].parameters(), 1e-2),  # type: ignore[index, union-attr]
}


@pytest.mark.reduced(at_most=22)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", CHANGES)
def test_edits_of_gradients_take_effect(name: str, stage: int) -> None:
    check_same(CHANGES[name], stage=stage)


@pytest.mark.parametrize("how", [{"ranks": 1}, {"offload": "cpu"}, {"stage": 2, "every": 2}])
@pytest.mark.parametrize("name", ["mul", "put back", "groups", "none"])
def test_edits_of_gradients_take_effect_in_one_process_and_on_the_host(name: str, how: dict[str, Any]) -> None:
    check_same(CHANGES[name], **how)


@pytest.mark.parametrize("how", [{"stage": 0}, {"stage": 1, "offload": "cpu"}, {"stage": 3}], ids=str)
@pytest.mark.parametrize("norm_type", ["inf", 1, 3.0])
def test_clipping_by_other_norms_equals_one_process(norm_type: Any, how: dict[str, Any]) -> None:
    check_same(lambda model, _: clip_grad_norm_(model.parameters(), 1e-2, norm_type), **how)
    check_same(lambda model, _: clip_grad_norm_(model[0].parameters(), 1e-3, norm_type), **how)  # type: ignore[index, union-attr]


def test_norm_types_of_both_functions() -> None:
    def norms(context: ParallelContext) -> None:
        model = net()
        optimizer = shard_optimizer(model, adam(model), context=context)
        model(inputs(0, context.rank)).square().mean().backward()
        largest = max(float(optimizer.full_gradient(name).abs().max()) for name, _ in model.named_parameters())  # type: ignore[union-attr]
        for norm_type in ("inf", float("inf")):
            assert float(clip_grad_norm_(model.parameters(), 1e9, norm_type)) == largest  # type: ignore[arg-type]
            assert float(shardformer.clip_grad_norm_(model, 1e9, norm_type)) == largest  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="norm_type=0"):
            shardformer.clip_grad_norm_(model, 1.0, 0)
        (model(inputs(0, 0)).square().mean() * (float("nan") if context.rank else 1)).backward()
        assert shardformer.clip_grad_norm_(model, 1.0, float("inf")).isnan()

    run_as_threads(norms, data=2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_step_keeps_gradients(stage: int, offload: str | None) -> None:
    check_same(every=2, stage=stage, offload=offload)


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add_": lambda param, grad: param.add_(grad.sign(), alpha=0.05),
    "_foreach_add_": lambda param, grad: torch._foreach_add_([param], [grad], alpha=0.05),  # type: ignore[call-overload]
    "add": lambda param, grad: torch.add(param, grad, out=param),
    "copy_": lambda param, grad: torch.zeros_like(param).copy_(grad),
}


@pytest.mark.parametrize("name", WRITES)
def test_values_of_a_sharded_gradient_cannot_be_written_to_another_tensor(name: str) -> None:
    def write(context: ParallelContext) -> None:
        model = net()
        shard_optimizer(model, adam(model), context=context)
        model(inputs(0, context.rank)).square().mean().backward()
        for param_name, param in model.named_parameters():
            before, grad = param.detach().clone(), param.grad
            assert grad is not None
            message = f"{name} cannot write values .*full_gradient('{param_name}')"
            with pytest.raises(ConfigError, match=re.escape(message).replace(re.escape(".*"), ".*")):
                WRITES[name](param.data, grad)
            assert torch.equal(param, before)

    run_as_threads(write, data=2)


def test_perturbing_parameters_by_full_gradients_equals_one_process() -> None:
    def perturbed(model: nn.Module, optimizer: Any, ranks: list[int]) -> dict[str, Tensor]:
        for step in range(3):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            for is_perturbed in (False, True):
                for name, p in model.named_parameters() if is_perturbed else ():
                    grad = optimizer.full_gradient(name) if hasattr(optimizer, "full_gradient") else p.grad
                    p.data.add_(0.05 * grad.sign())
                for rank in ranks:
                    (model(inputs(step, rank)).square().mean() / len(ranks)).backward()
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(before[name])
            optimizer.step()
            optimizer.zero_grad()
        return full_state_dict(model) if hasattr(optimizer, "full_gradient") else model.state_dict()

    alone = net()
    expected = perturbed(alone, adam(alone), [0, 1])

    def do(context: ParallelContext) -> dict[str, Tensor]:
        model = net()
        return perturbed(model, shard_optimizer(model, adam(model), stage=2, context=context), [context.rank])

    for found in run_as_threads(do, data=2):
        assert all(torch.allclose(found[name], value, atol=1e-12) for name, value in expected.items())


def test_randn_like_a_gradient_equals_one_process() -> None:
    model = net()
    shard_optimizer(model, adam(model))
    model(inputs(0, 0)).square().mean().backward()
    for p in model.parameters():
        drawn = []
        for like in (p.grad, p.detach()):
            torch.manual_seed(0)
            drawn.append(torch.randn_like(like))  # type: ignore[arg-type]  # it has a gradient
        assert torch.equal(*drawn) and type(drawn[0]) is Tensor


def test_zero_gradients_are_used_and_none_gradients_are_not() -> None:
    """With momentum, a step with zero gradients changes weights, and a step without gradients does not."""

    def again(set_to_none: bool) -> Change:
        def behind(model: nn.Module, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none)
            optimizer.step()

        return behind

    check_same(behind=again(False))
    plain, other = net(), net()
    train(plain, adam(plain), [0], nothing, 1, again(True))
    train(other, adam(other), [0], nothing, 1, nothing)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in plain.state_dict().items())
    model = net()
    train(model, shard_optimizer(model, adam(model)), [0], nothing, 1, again(True))
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=1e-11)


def test_edit_of_gradients_in_no_sync_takes_effect() -> None:
    def loop(model: nn.Module, optimizer: Any, ranks: list[int], pause: Callable[[], Any]) -> None:
        for step in range(STEPS):
            with pause():
                for rank in ranks:
                    (model(inputs(step, rank)).square().mean() / len(ranks)).backward()
                each_grad(lambda grad: grad.mul_(0.1))(model, optimizer)
            for rank in ranks:
                (model(inputs(step + 7, rank)).square().mean() / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()

    plain, models = net(), [net(), net()]
    loop(plain, adam(plain), [0, 1], contextlib.nullcontext)

    def over(context: ParallelContext) -> dict[str, Tensor]:
        model = models[context.rank]
        optimizer = shard_optimizer(model, adam(model), context=context)
        loop(model, optimizer, [context.rank], optimizer.no_sync)
        return full_state_dict(model)

    for found in run_as_threads(over, data=2):
        torch.testing.assert_close(found, dict(plain.state_dict()), rtol=0, atol=1e-11)


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("stage", [None, 1, 3])
def test_post_accumulate_hook_takes_effect(stage: int | None, is_first: bool) -> None:
    """The hook may be registered after the hooks of the reducer, on the last parameter of a bucket."""

    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    def halved(model: nn.Module) -> nn.Module:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(halve)
        return model

    plain, models = net(), [net(), net()]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rank in range(2):
        (plain(inputs(0, rank)).square().mean() / 4).backward()
    optimizer.step()

    def over(context: ParallelContext) -> dict[str, Tensor]:
        model: nn.Module = halved(models[context.rank]) if is_first else models[context.rank]
        ours: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if stage is None:
            model = shardformer.shard_model(model, context=context)
        else:
            ours = shard_optimizer(model, ours, stage=stage, context=context)
        if not is_first:
            halved(model)
        model(inputs(0, context.rank)).square().mean().backward()
        ours.step()
        return full_state_dict(model)

    for found in run_as_threads(over, data=2):
        torch.testing.assert_close(found, dict(plain.state_dict()), rtol=0, atol=1e-12)


def test_discarded_gradient_cannot_be_used() -> None:
    model = net()
    optimizer = shard_optimizer(model, adam(model))
    model(inputs(0, 0)).square().mean().backward()
    grad: Any = next(model.parameters()).grad
    optimizer.zero_grad()
    uses: list[Any] = [grad.detach, grad.clone, grad.norm]
    for use in uses:
        with pytest.raises(ConfigError, match=r"The gradient of 0.weight was accessed after zero_grad"):
            use()


@pytest.mark.parametrize("on_nonfinite", ["raise", "ignore"])
def test_unsupported_gradient_edits_raise_on_all_ranks(on_nonfinite: str) -> None:
    def over(context: ParallelContext) -> list[str]:
        model = net()
        optimizer = shard_optimizer(model, adam(model), context=context, stage=2, on_nonfinite=on_nonfinite)
        model(inputs(0, context.rank)).square().mean().backward()
        weight: Any = model[0].weight
        said = []
        for read in (lambda: weight.grad.norm(), lambda: weight.grad[0], lambda: weight.grad + torch.ones(2, 1, 1)):
            with pytest.raises(ConfigError) as caught:
                read()
            said.append(str(caught.value))
        if context.rank == 1:
            weight.grad = torch.zeros_like(weight)
        with pytest.raises(ConfigError) as caught:
            optimizer.full_gradient("0.weight")
        with pytest.raises(ConfigError, match=re.escape(str(caught.value))):
            optimizer.step()
        before, after = net().state_dict(), full_state_dict(model)
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        return [*said, str(caught.value)]

    first, second = run_as_threads(over, data=2)
    assert all(re.search("the gradient's shape|ZeRO shards the gradient", said) for said in first[:3])
    assert all("'0.weight'" in said for said in first[:3])
    assert "another rank raised an error" in first[3] and ".grad of 0.weight" in second[3]


@pytest.mark.parametrize("layout", [{"data": 2}, {"data": 2, "tensor": 2}])
@pytest.mark.parametrize(
    ("change", "on_nonfinite"),
    [(lambda p: p.grad.mul_(2), "raise"), (lambda p: setattr(p, "grad", None), "ignore")],
    ids=["mul", "none"],
)
def test_gradient_edit_on_one_rank_raises_on_all_ranks(change: Any, on_nonfinite: str, layout: dict[str, int]) -> None:
    torch.manual_seed(0)
    plain = ToyLM().double()
    models = [copy.deepcopy(plain) for _ in range(4)]

    def over(context: ParallelContext) -> None:
        model = shardformer.shard_model(models[context.rank], ToyPolicy(), context=context)
        optimizer = shard_optimizer(model, adam(model), on_nonfinite=on_nonfinite)
        toy_loss(model, toy_batch(0)).backward()
        if context.rank == 0:
            change(next(model.parameters()))
        with pytest.raises(ConfigError, match=r"p\.grad was modified differently"):
            optimizer.step()

    run_as_threads(over, **layout)


# --------------------------------------------------------------------------------------------------------------- states


def reset(model: nn.Module, optimizer: Any) -> None:
    for p in model.parameters():
        optimizer.state[p]["exp_avg"].mul_(0.5)


def forget_some(model: nn.Module, optimizer: Any) -> None:
    for p in model[0].parameters():  # type: ignore[index, union-attr]
        optimizer.state.pop(p, None)


def edit_values(model: nn.Module, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"] * 2


STATES: dict[str, Change] = {
    "clear": lambda _, optimizer: optimizer.state.clear(),
    "values": edit_values,
    "by parameter": reset,
    "pop": forget_some,
}


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", STATES)
def test_edits_of_optimizer_states_take_effect(name: str, stage: int) -> None:
    check_same(behind=STATES[name], stage=stage)


def test_offloaded_states_can_be_edited(tmp_path: Path) -> None:
    check_same(behind=STATES["by parameter"], stage=2, offload="cpu")

    def cleared(model: nn.Module, optimizer: Any) -> None:
        if not hasattr(optimizer, "writable_state"):
            optimizer.state.clear()
            return
        with pytest.raises(ConfigError, match=r"optimizer.state cannot be accessed directly with offload='nvme:"):
            optimizer.state.clear()
        with optimizer.writable_state():
            optimizer.state.clear()

    check_same(behind=cleared, ranks=1, offload=f"nvme:{tmp_path}")


def test_state_of_another_rank_raises_on_all_ranks() -> None:
    states: list[Any] = [None, None]
    torch.manual_seed(0)
    plain = ToyLM().double()
    models = [copy.deepcopy(plain) for _ in range(2)]

    def over(context: ParallelContext) -> str:
        model = shardformer.shard_model(models[context.rank], ToyPolicy(), context=context)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        toy_loss(model, toy_batch(0)).backward()
        optimizer.step()
        states[context.rank] = copy.deepcopy(optimizer.state_dict())
        before = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # saved by this rank
        shardformer.gradients.grad_norm(model)  # synchronizes the ranks
        said = []
        bare = {name: states[0][name] for name in ("state", "param_groups")}
        for wrong in (states[0], bare, states[1 - context.rank]):
            with pytest.raises(ConfigError) as caught:
                optimizer.load_state_dict(wrong)
            said.append(str(caught.value))
        optimizer.load_state_dict({name: states[context.rank][name] for name in ("state", "param_groups")})
        after = optimizer.state_dict()
        for number, state in before["state"].items():
            assert all(torch.equal(value, after["state"][number][name]) for name, value in state.items())
        return " ".join(said)

    coordinates = "the rank with mesh coordinates tensor 0 of 2, but this rank has tensor 1 of 2"
    assert all(coordinates in said for said in run_as_threads(over, tensor=2))


def test_zero_state_of_another_rank_raises_on_all_ranks_and_changes_nothing() -> None:
    states: list[Any] = [None, None]
    models = [net(), net()]

    def over(context: ParallelContext) -> None:
        model = models[context.rank]
        own = adam(model)
        optimizer = shard_optimizer(model, own, context=context)
        model(inputs(0, context.rank)).square().mean().backward()
        optimizer.step()
        states[context.rank] = optimizer.state_dict()
        group = optimizer.param_groups[0]
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.param_groups[0] is group is own.param_groups[0]
        with pytest.raises(ConfigError, match=r"does not match this rank|Rank 1 cannot load"):
            optimizer.load_state_dict(states[0])
        with pytest.raises(ConfigError, match="has no 'place'"):
            optimizer.load_state_dict({"state": {}, "param_groups": []})

    run_as_threads(over, data=2)


# --------------------------------------------------------------------------------------------------- groups, schedulers

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: (10 - n) / 10),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "a LambdaLR of the optimizer that zero was given": lambda o: lr_scheduler.LambdaLR(
        o.inner[0] if hasattr(o, "inner") else o, lambda n: (10 - n) / 10
    ),
}


def scheduled(kind: str, is_sharded: bool, folder: Path | None) -> list[float]:
    """Return the step lengths of SGD with gradients of 1. The fourth step follows a load."""

    def make() -> tuple[nn.Linear, Any, Any]:
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1e-9)
        if is_sharded:
            optimizer = shard_optimizer(model, optimizer)
        return model, optimizer, SCHEDULERS[kind](optimizer)

    model, optimizer, schedule = make()
    taken = []
    for step in range(8):
        if step == 3 and folder is not None:
            shardformer.save_checkpoint(model, folder, optimizer, step=3, scheduler=schedule)
            model, optimizer, schedule = make()
            groups = list(optimizer.param_groups)
            shardformer.load_checkpoint(model, folder, optimizer, scheduler=schedule)
            assert all(a is b for a, b in zip(groups, optimizer.param_groups, strict=True))
        elif step == 3:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        before = model.weight.item()
        model(torch.ones(2, 1, dtype=torch.float64)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
        taken.append(round(before - model.weight.item(), 6))
    return taken


@pytest.mark.reduced(at_most=8)
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_continue_after_a_load(kind: str, tmp_path: Path) -> None:
    want = scheduled(kind, False, None)
    assert len(set(want)) > 1
    assert scheduled(kind, True, None) == want
    if kind != "CyclicLR":  # whose state has a function
        assert scheduled(kind, True, tmp_path / "zero") == scheduled(kind, False, tmp_path / "plain") == want


def test_step_of_the_inner_optimizer_raises_and_zero_grad_clears_all_gradients() -> None:
    model = net()
    own = adam(model)
    optimizer = shard_optimizer(model, own)
    model(inputs(0, 0)).square().mean().backward()
    with pytest.raises(ConfigError, match=r"step\(\) was called on the original AdamW that was passed"):
        own.step()
    own.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_references_to_groups_and_states_remain_valid_after_resharding() -> None:
    model = net()
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = [(torch.ones(5).double(), 0.0)] * 8
    engine = shardformer.initialize(model, own, lambda out, _: out.square().mean(), train_data=data, batch_size=4)
    group, batch = own.param_groups[0], next(iter(engine.data))  # type: ignore[arg-type]  # it was given data
    engine.train_step(batch)
    for stage in (1, None, 3):
        engine.reshard(shardformer.ParallelConfig(zero_stage=stage))
        assert engine.optimizer.param_groups[0] is group
        before = shardformer.full_state_dict(engine.model)
        group["lr"] = 0.0
        engine.train_step(batch)
        after = shardformer.full_state_dict(engine.model)
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        group["lr"] = 0.1
        engine.train_step(batch)
        assert not torch.equal(shardformer.full_state_dict(engine.model)["0.weight"], before["0.weight"])
