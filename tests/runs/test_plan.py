"""The dry run reports the memory of each rank without allocating weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardformer.errors import InputError
from shardformer.train_command.dry_run import DryRunReport, make_dry_run_report
from tests.runs.files import config, write_text


def plan(folder: Path, **parallel: Any) -> DryRunReport:
    made = config(folder, "gpt2", {"train": write_text(folder), "batch_size": 8}, parallel=parallel)
    found = make_dry_run_report(made)
    assert found.untraced_reason == ""
    assert not made.output_folder.exists()
    return found


def test_the_report_lists_the_ranks_of_every_stage(tmp_path: Path) -> None:
    alone, split = plan(tmp_path), plan(tmp_path, tensor=2, pipe=2)
    assert [rank.coords for rank in split.rank_estimates] == [{"pipe": p, "tensor": t} for p in (0, 1) for t in (0, 1)]
    (whole,) = alone.rank_estimates
    assert whole.persistent_bytes.parameters == 4 * alone.summary.num_parameters
    for rank in split.rank_estimates:
        assert rank.persistent_bytes.parameters < whole.persistent_bytes.parameters
        assert 0 < (rank.step_peak_bytes or 0) < (whole.step_peak_bytes or 0)


def test_a_16_bit_step_halves_the_memory(tmp_path: Path) -> None:
    wide, narrow = plan(tmp_path).rank_estimates[0], plan(tmp_path, precision="bf16").rank_estimates[0]
    assert narrow.persistent_bytes.parameters == wide.persistent_bytes.parameters / 2
    assert narrow.persistent_bytes.masters == wide.persistent_bytes.parameters
    assert 0.4 < (narrow.step_peak_bytes or 0) / (wide.step_peak_bytes or 1) < 0.8


def test_zero_shards_optimizer_states(tmp_path: Path) -> None:
    assert plan(tmp_path, data=4, zero_stage=1).rank_estimates[0].persistent_bytes.states == pytest.approx(
        plan(tmp_path).rank_estimates[0].persistent_bytes.states / 4, rel=0.05
    )


def test_the_dry_run_raises_the_errors_of_training(tmp_path: Path) -> None:
    made = config(tmp_path, "gpt2", {"train": write_text(tmp_path), "sequence_length": 1000})
    with pytest.raises(InputError, match=r"1260 tokens"):
        make_dry_run_report(made.model_copy(update={"data": made.data.model_copy(update={"sequence_length": 5000})}))
