"""What is asked of tensors without values, and what is answered."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from shardformer.local_ranks.fake_rank import fake_tensors
from shardformer.torch_compat import has_values, numbers_in, with_values


def test_numbers_are_ones_where_there_are_none() -> None:
    x = torch.tensor([[2.0, 3.0]])
    assert has_values(x) and numbers_in(x) == [[2.0, 3.0]]
    assert not has_values(x.to("meta")) and numbers_in(x.to("meta")) == [[1, 1]]
    with fake_tensors() as copied:
        fake = copied(x)
    assert not has_values(fake) and numbers_in(fake) == [[1, 1]] and numbers_in(fake.sum()) == 1


def test_what_is_tried_out_has_values_while_a_step_is_traced() -> None:
    @with_values()
    def tried() -> Tensor:
        return torch.ones(2)

    with fake_tensors():
        assert tried().tolist() == [1, 1]
        assert isinstance(torch.ones(2), FakeTensor)
