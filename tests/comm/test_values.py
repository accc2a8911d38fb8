"""What is asked of tensors without values, and what is answered."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from shardformer.local_ranks.fake_rank import fake_tensors
from shardformer.torch_compat import has_data, to_list, without_fake_tensors


def test_numbers_are_ones_where_there_are_none() -> None:
    x = torch.tensor([[2.0, 3.0]])
    assert has_data(x) and to_list(x) == [[2.0, 3.0]]
    assert not has_data(x.to("meta")) and to_list(x.to("meta")) == [[1, 1]]
    with fake_tensors() as copied:
        fake = copied(x)
    assert not has_data(fake) and to_list(fake) == [[1, 1]] and to_list(fake.sum()) == 1


def test_what_is_tried_out_has_values_while_a_step_is_traced() -> None:
    @without_fake_tensors()
    def tried() -> Tensor:
        return torch.ones(2)

    with fake_tensors():
        assert tried().tolist() == [1, 1]
        assert isinstance(torch.ones(2), FakeTensor)
