"""``ParallelConfig``: every field survives JSON, has a description, and answers to its earlier name."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from shardformer.config import RENAMED_FIELDS, ParallelConfig, ShardConfig
from shardformer.errors import ConfigError
from shardformer.offload.host import OffloadConfig
from shardformer.zero.mixed_precision import LossScale, MixedPrecision

EVERY_FIELD: dict[str, Any] = {
    "data": 2, "pipe": 2, "sequence": (2, 2), "tensor": (2, 2), "tensor_parallel_mode": "2d", "sequence_parallel": True,
    "sequence_overlap": True, "context_parallel": "ring", "flash_attention": True, "fused_normalization": True,
    "fused_activation": True, "schedule": "interleaved", "num_model_chunks": 3, "partition": [1, 2, 1, 2, 1, 2],
    "layer_costs": [1.0, 2.5], "recompute_layers": [1, 0, 0, 1, 0, 0], "activation_offload": "host", "micro_batches": 4,
    "micro_batch_size": 2, "zero_stage": 3, "precision": MixedPrecision("fp16", loss_scale=LossScale(8.0)),
    "offload": OffloadConfig("cpu", parameters=True), "keep_frozen": False, "reshard_after_forward": False,
    "bucket_bytes": 1000, "max_grad_norm": 1.0, "on_nonfinite": "skip", "check_inputs": False,
    "check_consistency": False, "average_loss_over": "ranks",
}  # fmt: skip
OF_STAGES = ("num_model_chunks", "partition", "layer_costs", "recompute_layers")
NEEDS: dict[str, dict[str, Any]] = {
    **{name: {"pipe": 2} for name in OF_STAGES},
    **{name: {"zero_stage": 3} for name in ("keep_frozen", "reshard_after_forward")},
}


def test_the_table_has_every_field() -> None:
    assert list(EVERY_FIELD) == [field.name for field in fields(ParallelConfig)]
    assert all(EVERY_FIELD[field.name] != field.default for field in fields(ParallelConfig))


@pytest.mark.parametrize("name", EVERY_FIELD)
def test_a_field_survives_json(name: str) -> None:
    config = ParallelConfig(**{**NEEDS.get(name, {}), name: EVERY_FIELD[name]})
    values = json.loads(json.dumps(config.to_dict()))
    assert ParallelConfig.from_dict(values) == config != ParallelConfig(**NEEDS.get(name, {}))
    assert ParallelConfig.from_dict(config.to_dict()).to_dict() == values


def test_every_field_is_described() -> None:
    assert [name for name, (_, text) in ParallelConfig.described_fields().items() if not text.endswith(".")] == []


def test_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'tensor'"):
        ParallelConfig.from_dict({"tensr": 2})


@pytest.mark.parametrize("old", RENAMED_FIELDS)
def test_an_earlier_name_works_with_a_warning(old: str) -> None:
    new, value = RENAMED_FIELDS[old], EVERY_FIELD[RENAMED_FIELDS[old]]
    with pytest.warns(DeprecationWarning, match=rf"ParallelConfig\({old}=\) is now {new}="):
        found = ParallelConfig(**NEEDS.get(new, {}), **{old: value})
    assert found == ParallelConfig(**NEEDS.get(new, {}), **{new: value})
    with pytest.raises(ConfigError, match=f"both {old}= and {new}="):
        ParallelConfig(**{old: value, new: value})


def test_earlier_values_work_under_the_earlier_name() -> None:
    with pytest.warns(DeprecationWarning):
        assert ParallelConfig(pipe=2, cut="even").partition == "uniform"  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning):
        assert not ShardConfig(watch=False).check_consistency  # type: ignore[call-arg]


@pytest.mark.parametrize("name", NEEDS)
def test_a_field_without_effect_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.* without "):
        ParallelConfig(**{name: EVERY_FIELD[name]})
