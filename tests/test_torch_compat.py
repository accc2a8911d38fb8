"""Differences between versions of torch, tested for each version independent of the installed one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adagrad

from shardformer.torch_compat import get_initial_optimizer_state, view_as_bytes
from shardformer.zero.elementwise_trial import (
    compute_state_after_one_step,
    estimate_optimizer_state_bytes,
    requires_full_matrices,
)

own_init_group: Any = Adagrad._init_group


def _only_with_state(self: Adagrad, group: dict[str, Any], *lists: list[Any]) -> Any:
    """An Adagrad as in torch 2.11, whose step needs the state from the constructor."""
    for param in group["params"]:
        self.state[param]["sum"]
    return own_init_group(self, group, *lists)


@pytest.fixture(params=["made by the constructor", "made by the step"])
def adagrad(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Adagrad:
    if request.param == "made by the constructor":
        monkeypatch.setattr(Adagrad, "_init_group", _only_with_state)
    return Adagrad(nn.Linear(2, 2).parameters(), lr=0.1, initial_accumulator_value=0.5)


def test_adagrad_gets_state_for_parameters_added_later(adagrad: Adagrad) -> None:
    group, param = adagrad.param_groups[0], torch.zeros(3)
    assert not requires_full_matrices(adagrad)
    assert compute_state_after_one_step(adagrad, group, param)["sum"].tolist() == [1.5, 1.5, 1.5]
    assert estimate_optimizer_state_bytes(adagrad, group, torch.zeros(8, 8)) == 64 * 4


def test_only_adagrad_has_state_before_its_first_step() -> None:
    param = nn.Parameter(torch.zeros(3))
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Rprop):
        optimizer: torch.optim.Optimizer = kind([param])
        assert get_initial_optimizer_state(optimizer, optimizer.param_groups[0], param) == {} == dict(optimizer.state)


def test_the_bytes_of_an_expanded_element_can_be_read() -> None:
    """Such a tensor is contiguous with stride 0, so that ``contiguous`` does not copy the element."""
    element = torch.tensor(2.0)
    assert view_as_bytes(element.expand(1)).numpy().tobytes() == element.numpy().tobytes()
    assert view_as_bytes(element.expand(3)).numpy().tobytes() == 3 * element.numpy().tobytes()
    values = torch.arange(4.0)
    assert view_as_bytes(values).data_ptr() == values.data_ptr()
