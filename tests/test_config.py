"""``ParallelConfig``: every field round-trips through JSON, has a description, and accepts its earlier name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from inspect import Parameter, isfunction, signature
from typing import Any

import pytest
import typer
from torch import nn

import shardformer
from shardformer.cli import build_app
from shardformer.config import RENAMED_FIELDS, ParallelConfig, ShardConfig
from shardformer.errors import ConfigError
from shardformer.offload.host import OffloadConfig
from shardformer.verify.training_options import VerifyTraining
from shardformer.zero.mixed_precision import LossScale, MixedPrecision

EVERY_FIELD: dict[str, Any] = {
    "data": 2, "pipe": 2, "sequence": (2, 2), "tensor": (2, 2), "tensor_parallel_mode": "2d", "sequence_parallel": True,
    "sequence_overlap": True, "context_parallel": "ring", "flash_attention": True, "fused_normalization": True,
    "fused_activation": True, "compile": "aot_eager", "schedule": "interleaved", "num_model_chunks": 3,
    "partition": [1, 2, 1, 2, 1, 2],
    "layer_costs": [1.0, 2.5], "recompute_layers": [1, 0, 0, 1, 0, 0], "activation_offload": "host", "micro_batches": 4,
    "micro_batch_size": 2, "zero_stage": 3, "precision": MixedPrecision("fp16", loss_scale=LossScale(8.0)),
    "offload": OffloadConfig("cpu", parameters=True), "keep_frozen": False, "reshard_after_forward": False,
    "bucket_bytes": 1000, "max_grad_norm": 1.0, "on_nonfinite": "skip", "check_inputs": False,
    "check_consistency": False, "average_loss_over": "ranks",
}  # fmt: skip
OF_STAGES = ("num_model_chunks", "partition", "layer_costs", "recompute_layers")
OTHER_DEFAULTS = {
    "shardformer.Pipeline.average_loss_over": "tokens needs two more all-reduces in a step",
    "shardformer.launch_from_torch.pipe": "None: the size in its config file, or 1",
    "shardformer.launch_from_torch.sequence": "None: the size in its config file, or 1",
    "shardformer.launch_from_torch.tensor": "None: the size in its config file, or the remaining processes",
    "shardformer.verify.VerifyPipeline.pipe": "a pipeline has two stages at least",
    "shardformer.verify.VerifyTraining.average_loss_over": "the loss that shard_model trains, as DDP does",
    "shardformer.verify.verify.data": "verify starts processes: it has no others to divide",
    "shardformer.verify.verify.tensor": "verify compares a model that is sharded",
}
"""Parameters with the name of a field and another default, with the reason."""
OWN_DEFAULTS = {"tensor", "data", "average_loss_over", "micro_batches"}
"""Flags of ``shardformer verify`` and ``draw`` whose help has their default."""
NEEDS: dict[str, dict[str, Any]] = {
    **{name: {"pipe": 2} for name in OF_STAGES},
    **{name: {"zero_stage": 3} for name in ("keep_frozen", "reshard_after_forward")},
    "sequence_overlap": {"sequence_parallel": True},
}


def test_the_table_has_every_field() -> None:
    assert list(EVERY_FIELD) == [field.name for field in fields(ParallelConfig)]
    assert all(EVERY_FIELD[field.name] != field.default for field in fields(ParallelConfig))


@pytest.mark.parametrize("name", EVERY_FIELD)
def test_a_field_round_trips_through_json(name: str) -> None:
    config = ParallelConfig(**{**NEEDS.get(name, {}), name: EVERY_FIELD[name]})
    values = json.loads(json.dumps(config.to_dict()))
    assert ParallelConfig.from_dict(values) == config != ParallelConfig(**NEEDS.get(name, {}))
    assert ParallelConfig.from_dict(config.to_dict()).to_dict() == values


def test_every_field_is_described() -> None:
    assert [name for name, (_, text) in ParallelConfig.described_fields().items() if not text.endswith(".")] == []


def test_an_unknown_field_suggests_the_nearest() -> None:
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


def test_other_classes_accept_earlier_names() -> None:
    with pytest.warns(DeprecationWarning):
        training = VerifyTraining(zero=1, reference="whole")  # type: ignore[call-arg]
    assert training == VerifyTraining(zero_stage=1, average_loss_over="tokens")
    model = shardformer.shard_model(nn.Linear(2, 2), context=shardformer.ParallelContext.of({}))
    with pytest.warns(DeprecationWarning, match="average_over_data"):
        assert shardformer.Pipeline(model, average_over_data=True)._averages_tokens  # type: ignore[call-arg]


@pytest.mark.parametrize("name", NEEDS)
def test_a_field_without_effect_raises(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.* without "):
        ParallelConfig(**{name: EVERY_FIELD[name]})


def entry_points() -> Iterator[tuple[str, Any]]:
    for name in ("", ".compat", ".offload", ".pipeline", ".training", ".verify", ".zero"):
        module = import_module(f"shardformer{name}")
        for public in module.__all__:
            if isfunction(found := getattr(module, public)) or (
                isinstance(found, type) and found is not ParallelConfig
            ):
                yield f"shardformer{name}.{public}", found


def test_a_parameter_with_the_name_of_a_field_has_its_default() -> None:
    default = {field.name: field.default for field in fields(ParallelConfig)}
    differ = {
        f"{name}.{parameter.name}"
        for name, found in entry_points()
        for parameter in signature(found).parameters.values()
        if parameter.default not in (Parameter.empty, default.get(parameter.name, parameter.default))
        or parameter.name in RENAMED_FIELDS
    }
    assert differ == set(OTHER_DEFAULTS)


def test_a_flag_with_the_name_of_a_field_has_its_default() -> None:
    group: Any = typer.main.get_command(build_app())
    fields_by_name, seen = ParallelConfig.__dataclass_fields__, set()
    for command in group.commands.values():
        for option in command.params:
            assert option.name not in RENAMED_FIELDS
            if option.name in fields_by_name and option.name not in OWN_DEFAULTS:
                seen.add(option.name)
                assert option.default in (None, False, fields_by_name[option.name].default), (command.name, option.name)
                if isinstance(option.show_default, str):
                    assert option.show_default == fields_by_name[option.name].default
    assert {"pipe", "schedule", "num_model_chunks", "zero_stage", "recompute_layers"} <= seen


def test_the_zero_stage_has_one_default() -> None:
    functions = (shardformer.shard_optimizer, shardformer.estimate_memory)
    stages = {signature(function).parameters["stage"].default for function in functions}
    assert stages == {1}


def test_earlier_attributes_work_with_a_warning() -> None:
    config = ParallelConfig(tensor=2, zero_stage=2)
    with pytest.warns(DeprecationWarning, match=r"ParallelConfig\.zero is now zero_stage"):
        assert config.zero == 2  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match=r"ParallelConfig\.fit is now fit_to"):
        assert config.fit(8) == config.fit_to(8)  # type: ignore[attr-defined]
    shard = ShardConfig()
    with pytest.warns(DeprecationWarning):
        shard.watch = False  # type: ignore[attr-defined]
    assert not shard.check_consistency
