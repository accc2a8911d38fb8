"""The tests of integrations run in processes of their own."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version

import pytest
import torch
from torch import distributed

from tests.integrations.process import IntegrationProcess


def sum_of_ranks(offset: int) -> tuple[float, str]:
    total = torch.tensor(float(distributed.get_rank() + offset))
    distributed.all_reduce(total)
    return float(total), version("accelerate")


def fail() -> None:
    raise ValueError("this rank failed")


@pytest.mark.above_budget("starts the process that later tests of this folder use")
def test_workers_import_the_libraries_and_other_tests_do_not(integrations: IntegrationProcess) -> None:
    (first, release), (second, _) = integrations(2).run(sum_of_ranks, 1)
    assert first == second == 3.0 and release
    assert importlib.util.find_spec("peft") is None


def test_a_failed_call_raises_and_the_next_one_works(integrations: IntegrationProcess) -> None:
    with pytest.raises(AssertionError, match="this rank failed"):
        integrations(2).run(fail)
    assert integrations(1).run(sum_of_ranks, 0)[0][0] == 0.0
