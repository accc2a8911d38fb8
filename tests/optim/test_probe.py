"""Optimizers are probed on the CPU, on every device of their parameters."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardformer.errors import ConfigError
from shardformer.local_ranks.fake_rank import enable_fake_tensors
from shardformer.zero import elementwise_trial
from shardformer.zero.elementwise_trial import (
    can_step_params_separately,
    estimate_optimizer_state_bytes,
    requires_full_matrices,
)

KINDS: dict[str, dict[str, Any]] = {
    "capturable": {"capturable": True},
    "fused": {"fused": True},
    "a rate that is a tensor": {"lr": torch.tensor(1e-3), "capturable": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_gpu_optimizer_is_probed_on_the_cpu(kind: str) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(4, 4))], **KINDS[kind])
    assert not requires_full_matrices(optimizer)
    assert can_step_params_separately(optimizer)
    assert optimizer.param_groups[0]["capturable"] == KINDS[kind].get("capturable", False)


def test_probe_uses_real_tensors_under_fake_tensors() -> None:
    with enable_fake_tensors():
        param = nn.Parameter(torch.ones(40, 40))
        optimizer = torch.optim.AdamW([param])
        assert not requires_full_matrices(optimizer)
        assert can_step_params_separately(optimizer)
        assert estimate_optimizer_state_bytes(optimizer, optimizer.param_groups[0], param) == 2 * 4 * 1600


def make_params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(3))]


class Rule(Optimizer):
    """SGD that first edits the gradient with a rule, a function of the gradient and the state."""

    def __init__(self, rule: Callable[[Tensor, dict[str, Any]], Tensor], lr: float = 0.1) -> None:
        super().__init__(make_params(), {"lr": lr})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["step"] = self.state[p].get("step", 0) + 1
                    p.sub_(group["lr"] * self.rule(p.grad, self.state[p]))


def stable_adamw(grad: Tensor, state: dict[str, Any]) -> Tensor:
    square = state.setdefault("square", torch.ones_like(grad))
    square.mul_(0.99).addcmul_(grad, grad, value=0.01)
    return grad / square.sqrt() / (grad**2 / square).mean().sqrt().clamp(min=1)


NEEDS_MATRICES: dict[str, Callable[[Tensor, dict[str, Any]], Tensor]] = {
    "StableAdamW": stable_adamw,
    "clips large gradients": lambda g, _: g * (10 / g.norm().clamp(min=10)),
    "drops small elements": lambda g, _: g * (g.abs() > 1e-5 * g.abs().max()),
    "adds 1 if all elements are zero": lambda g, _: g + (not g.any()) * (g.numel() > 10),
    "scales tiny gradients up": lambda g, _: g / g.norm() if 0 < g.norm() < 1e-3 else g,
    "normalizes from step 8": lambda g, s: g / g.norm() if s["step"] >= 8 else g,
    "normalizes large matrices": lambda g, _: g / g.norm() if g.dim() == 2 and min(g.shape) >= 128 else g,
    "normalizes many elements": lambda g, _: g / g.norm() if g.numel() > 4096 else g,
}


@pytest.mark.parametrize("name", NEEDS_MATRICES)
def test_rules_for_unusual_gradients_and_sizes_are_detected(name: str) -> None:
    assert requires_full_matrices(Rule(NEEDS_MATRICES[name]))


@pytest.mark.parametrize("lr", [0.0, 1e-8])
def test_small_learning_rate_does_not_hide_a_rule(lr: float) -> None:
    assert requires_full_matrices(Rule(lambda g, _: g / g.norm(), lr))
    assert not requires_full_matrices(Rule(lambda g, _: g.sign(), lr))


def overflow(grad: Tensor, state: dict[str, Any]) -> Tensor:
    return grad if grad.abs().max() < 100 else grad / 0


def fail(grad: Tensor, state: dict[str, Any]) -> Tensor:
    if grad.abs().max() > 100 or grad.numel() > 1000:
        raise ValueError("too large")
    return grad


@pytest.mark.parametrize("rule", [overflow, fail])
def test_failures_for_unusual_gradients_do_not_decide(rule: Any) -> None:
    assert not requires_full_matrices(Rule(rule))


class ClipsAll(Rule):
    """Clips the norm of all gradients to 10."""

    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 10.0)
        super().step()


def test_clipping_of_large_gradients_by_their_global_norm_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"depends on other parameters") as caught:
        requires_full_matrices(ClipsAll(lambda g, _: g))
    assert "use only data parallelism without ZeRO. To clip gradients by their global norm, pass max_grad_norm" in str(
        caught.value
    )


class Counts(Rule):
    """An optimizer whose attributes change in each step."""

    def __init__(self) -> None:
        super().__init__(lambda g, _: g)
        self.counts: dict[str, int] = {"steps": 0}
        self.history: list[list[int]] = [[]]
        self.total = torch.zeros(())
        self.per_param: Any = defaultdict(lambda: torch.zeros(()))

    def step(self, closure: Any = None) -> None:
        self.counts["steps"] += 1
        self.history[0].append(self.counts["steps"])
        self.total += 1
        for p in self.param_groups[0]["params"]:
            self.per_param[p] = self.per_param[p] + 1
        self.param_groups[0]["lr"] = 0.1 / self.counts["steps"] / float(self.total)
        super().step()


def test_attributes_are_copied() -> None:
    optimizer = Counts()
    assert not requires_full_matrices(optimizer)
    assert not can_step_params_separately(optimizer)
    assert (optimizer.counts, optimizer.history, float(optimizer.total)) == ({"steps": 0}, [[]], 0)
    assert not optimizer.per_param and optimizer.param_groups[0]["lr"] == 0.1


class Wrapper(Optimizer):
    """Steps another optimizer, as in Lookahead."""

    def __init__(self, optimizer: Optimizer, *, own_groups: bool = False) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer
        if not own_groups:
            self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()


def test_inner_optimizer_is_copied() -> None:
    for make, needed in ((torch.optim.AdamW, False), (torch.optim.Adafactor, True)):
        params = make_params()
        for p in params:
            p.grad = torch.ones_like(p)
        inner: Any = make(params, lr=0.1)
        before = copy.deepcopy(params)
        assert requires_full_matrices(Wrapper(inner)) == needed
        assert not inner.state and all(map(torch.equal, params, before))


class KeepsList(Rule):
    """Updates a list of its own instead of its parameter groups."""

    def __init__(self) -> None:
        super().__init__(lambda g, _: g)
        self.params = list(self.param_groups[0]["params"])
        for p in self.params:
            p.grad = torch.ones_like(p)

    def step(self, closure: Any = None) -> None:
        for p in self.params:
            if p.grad is not None:
                p.data.sub_(p.grad)


def test_updates_of_parameters_outside_the_groups_are_rejected() -> None:
    optimizer = KeepsList()
    with pytest.raises(ConfigError, match="does not update the parameters in its param_groups"):
        requires_full_matrices(optimizer)
    assert all(bool((p == 1).all()) for p in optimizer.params)


@pytest.mark.parametrize("needed", [True, False])
def test_attribute_decides_without_a_trial(needed: bool) -> None:
    def rule(grad: Tensor, state: dict[str, Any]) -> Tensor:
        raise ValueError("not on the CPU")

    optimizer = Rule(rule)
    with pytest.raises(ConfigError, match=r"set Rule.needs_full_matrices = True"):
        requires_full_matrices(optimizer)
    optimizer.needs_full_matrices = needed  # type: ignore[attr-defined]
    assert requires_full_matrices(optimizer) == needed
    assert not can_step_params_separately(optimizer)


def test_result_of_an_equal_optimizer_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizers = [torch.optim.NAdam(make_params(), momentum_decay=0.125) for _ in range(4)]
    assert not requires_full_matrices(optimizers[0])
    optimizers[2].param_groups[0]["momentum_decay"] = 0.25
    optimizers[3].clip_at = 10.0  # type: ignore[attr-defined]  # another attribute may determine the updates
    monkeypatch.setattr(elementwise_trial, "_group_requires_full_matrices", lambda *_: True)
    assert [requires_full_matrices(optimizer) for optimizer in optimizers] == [False, False, True, True]


def test_equal_groups_share_one_trial() -> None:
    calls: list[int] = []
    one = Rule(lambda g, _: (calls.append(0), g)[1])
    requires_full_matrices(one)
    once = len(calls)
    for lr in (0.2, 0.3):
        one.add_param_group({"params": make_params(), "lr": lr})
    calls.clear()
    requires_full_matrices(one)
    assert len(calls) == once
    one.add_param_group({"params": make_params(), "weight_decay": 0.1})
    calls.clear()
    requires_full_matrices(one)
    assert len(calls) == 2 * once


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam"])
def test_settings_of_torch_optimizers_stay_element_wise(name: str) -> None:
    settings: dict[str, Any] = {"SGD": {"momentum": 0.9, "nesterov": True}, "Adam": {"amsgrad": True}}.get(name, {})
    make: Any = getattr(torch.optim, name)
    assert not requires_full_matrices(make(make_params(), lr=1e-5, **settings))
