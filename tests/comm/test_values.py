"""Operations on tensors without values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from shardformer.local_ranks.fake_rank import enable_fake_tensors
from shardformer.torch_compat import has_real_data, tolist_or_ones, without_fake_tensors


def test_fake_transport_gathers_constant_numbers() -> None:
    x = torch.tensor([[2.0, 3.0]])
    assert has_real_data(x) and tolist_or_ones(x) == [[2.0, 3.0]]
    assert not has_real_data(x.to("meta")) and tolist_or_ones(x.to("meta")) == [[1, 1]]
    with enable_fake_tensors() as copied:
        fake = copied(x)
    assert not has_real_data(fake) and tolist_or_ones(fake) == [[1, 1]] and tolist_or_ones(fake.sum()) == 1


def test_trial_step_has_values_during_trace() -> None:
    @without_fake_tensors()
    def tried() -> Tensor:
        return torch.ones(2)

    with enable_fake_tensors():
        assert tried().tolist() == [1, 1]
        assert isinstance(torch.ones(2), FakeTensor)
