"""Optimizers are probed on the CPU, on every device of their parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardformer.local_ranks.fake_rank import enable_fake_tensors
from shardformer.zero.optimizers import can_step_params_separately, estimate_state_bytes, needs_full_matrices

KINDS: dict[str, dict[str, Any]] = {
    "capturable": {"capturable": True},
    "fused": {"fused": True},
    "a rate that is a tensor": {"lr": torch.tensor(1e-3), "capturable": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_gpu_optimizer_is_probed_on_the_cpu(kind: str) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(4, 4))], **KINDS[kind])
    assert not needs_full_matrices(optimizer)
    assert can_step_params_separately(optimizer)
    assert optimizer.param_groups[0]["capturable"] == KINDS[kind].get("capturable", False)


def test_probe_uses_real_tensors_under_fake_tensors() -> None:
    with enable_fake_tensors():
        param = nn.Parameter(torch.ones(40, 40))
        optimizer = torch.optim.AdamW([param])
        assert not needs_full_matrices(optimizer)
        assert can_step_params_separately(optimizer)
        assert estimate_state_bytes(optimizer, optimizer.param_groups[0], param) == 2 * 4 * 1600
