"""``ParallelConfig``: every field round-trips through JSON, has a description, and accepts its earlier name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from inspect import Parameter, isfunction, signature
from operator import attrgetter
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
import typer
from torch import nn

import shardformer
from shardformer.cli import build_app
from shardformer.compat import ShardFormer
from shardformer.config import RENAMED_FIELDS, ParallelConfig, ShardConfig, ShardOptions
from shardformer.errors import ConfigError
from shardformer.layout.sharding_metadata import get_sharding_metadata
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.offload.host import OffloadConfig
from shardformer.verify.small_models import SmallModelFactory
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
    "shardformer.launch_from_torch.pipe": "None: the size in its config file, or 1",
    "shardformer.launch_from_torch.sequence": "None: the size in its config file, or 1",
    "shardformer.launch_from_torch.tensor": "None: the size in its config file, or the remaining processes",
    "shardformer.policies.LayerStack.sequence": "hints for sequence parallelism, not a number of ranks",
    "shardformer.policies.LayerStackDescription.sequence": "hints for sequence parallelism, not a number of ranks",
    "shardformer.verify.VerifyPipeline.pipe": "a pipeline has two stages at least",
    "shardformer.verify.VerifyTraining.average_loss_over": "None: that of Pipeline.step or of loss.backward()",
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
    assert [name for name, (_, text) in ParallelConfig.get_field_descriptions().items() if not text.endswith(".")] == []


def test_an_unknown_field_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'tensor'"):
        ParallelConfig.from_dict({"tensr": 2})


@pytest.mark.parametrize("old", RENAMED_FIELDS)
def test_an_earlier_name_works_with_a_warning(old: str) -> None:
    new, value = RENAMED_FIELDS[old], EVERY_FIELD[RENAMED_FIELDS[old]]
    with pytest.warns(DeprecationWarning, match=rf"ParallelConfig\({old}=\) is deprecated. Use {new}= instead"):
        found = ParallelConfig(**NEEDS.get(new, {}), **{old: value})
    assert found == ParallelConfig(**NEEDS.get(new, {}), **{new: value})
    with pytest.raises(ConfigError, match=f"both {old} and its new name {new}"):
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
    model = shardformer.shard_model(nn.Linear(2, 2), context=shardformer.ParallelContext.from_sizes({}))
    with pytest.warns(DeprecationWarning, match="average_over_data"):
        assert shardformer.Pipeline(model, average_over_data=True)._averages_tokens  # type: ignore[call-arg]


@pytest.mark.parametrize("name", NEEDS)
def test_a_field_without_effect_raises(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.* without "):
        ParallelConfig(**{name: EVERY_FIELD[name]})


def entry_points() -> Iterator[tuple[str, Any]]:
    """Yield the functions and classes that the package and its modules list in ``__all__``."""
    names = [f"shardformer.{each.name}" for each in iter_modules(shardformer.__path__) if each.name != "__main__"]
    for module in map(import_module, ["shardformer", *names]):
        for public in getattr(module, "__all__", ()):
            if isfunction(found := getattr(module, public)) or (
                isinstance(found, type) and found is not ParallelConfig
            ):
                yield f"{module.__name__}.{public}", found


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


def default_layouts() -> dict[str, dict[str, int]]:
    """Return the sizes of the axes above 1 for each entry point that creates a mesh."""

    def model() -> nn.Module:
        return SmallModelFactory("gpt2")()

    def sizes(sharded: Any) -> dict[str, int]:
        return {name: n for name, n in get_sharding_metadata(sharded).context.sizes.items() if n > 1}

    plain = model()
    shardformer.shard_optimizer(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    return {
        "initialize": sizes(shardformer.initialize(model(), None).model),
        "shard_optimizer": sizes(plain),
        "launch_from_torch": {name: n for name, n in shardformer.launch_from_torch().sizes.items() if n > 1},
        "shard_model": sizes(shardformer.shard_model(model())),
        "compat.ShardFormer": sizes(ShardFormer().optimize(model())[0]),
    }


def test_the_default_layout_is_data_parallel_or_in_the_first_line_of_the_docstring(pool2: WorkerPool) -> None:
    found, *others = pool2.run(default_layouts)
    assert others == [found]
    data = {name for name, sizes in found.items() if sizes == {"data": 2}}
    assert data == {"initialize", "shard_optimizer"}
    for name in found.keys() - data:
        assert found[name] == {"tensor": 2}
        assert "tensor" in (attrgetter(name)(shardformer).__doc__ or "").partition("\n")[0], name


def test_the_zero_stage_has_one_default() -> None:
    functions = (shardformer.shard_optimizer, shardformer.estimate_memory)
    stages = {signature(function).parameters["stage"].default for function in functions}
    assert stages == {1}


def test_earlier_attributes_work_with_a_warning() -> None:
    config = ParallelConfig(tensor=2, zero_stage=2)
    with pytest.warns(DeprecationWarning, match=r"ParallelConfig\.zero is deprecated. Use zero_stage instead"):
        assert config.zero == 2  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match=r"ParallelConfig\.fit is deprecated. Use fit_to instead"):
        assert config.fit(8) == config.fit_to(8)  # type: ignore[attr-defined]
    shard = ShardConfig()
    with pytest.warns(DeprecationWarning):
        shard.watch = False  # type: ignore[attr-defined]
    assert not shard.check_consistency


def test_the_typed_options_of_shard_model_are_the_fields_of_the_config() -> None:
    expected = {field.name: field.type for field in fields(ShardConfig) if field.name != "context"}
    typed = {name: hint.__forward_arg__ for name, hint in ShardOptions.__annotations__.items()}
    assert typed == expected
