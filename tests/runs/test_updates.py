"""Learning rates, number of steps, and weight decay of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from shardformer.errors import ConfigError
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.train_command.build import build_lr_scheduler_factory, build_optimizer_factory, count_training_steps
from shardformer.train_command.config_schema import OptimizerOptions, ScheduleOptions, TrainConfig
from shardformer.train_command.load_data import load_training_data
from tests.runs.files import SMALL, config, labelled, write_rows, write_text
from tests.runs.test_run import losses_of


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0]),
        ({"warmup": 2}, [0.5, 1.0, 1.0, 1.0]),
        ({"name": "linear"}, [1.0, 0.75, 0.5, 0.25]),
        ({"name": "linear", "warmup": 0.5, "min_lr_rate": 0.5}, [0.5, 1.0, 1.0, 0.75]),
        ({"name": "cosine", "warmup": 2, "min_lr_rate": 0.2}, [0.5, 1.0, 1.0, 0.6]),
        ({"name": "cosine_with_restarts", "cycles": 2}, [1.0, 0.5, 1.0, 0.5]),
        ({"name": "cosine_with_restarts", "cycles": 1}, [1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5]),
        ({"name": "warmup_stable_decay", "warmup": 1, "decay": 2}, [1.0, 1.0, 1.0, 0.5]),
        ({"name": "warmup_stable_decay", "decay": 0.75, "min_lr_rate": 0.1}, [1.0, 1.0, 0.7, 0.4]),
        ({"name": "inverse_sqrt", "warmup": 1}, [1.0, 1.0, 0.5**0.5, 3**-0.5]),
    ],
    ids=str,
)
def test_learning_rate_of_each_step(table: dict[str, Any], expected: list[float]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = build_lr_scheduler_factory(ScheduleOptions(**table), 4)(optimizer)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.1 * share for share in expected])


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 6), (True, 4)])
def test_the_number_of_steps_equals_the_number_of_batches(drop_last: bool, steps: int, tmp_path: Path) -> None:
    data = {"train": write_rows(tmp_path, labelled(12)), "batch_size": 5, "drop_last": drop_last}
    made = config(tmp_path, "bert", data, model={"task": "classification"}, training={"epochs": 2})
    assert count_training_steps(made, load_training_data(made)) == steps


def grouped(model: Any, **table: Any) -> dict[float, set[str]]:
    """Return the parameter names by weight decay."""
    names = {id(param): name for name, param in model.named_parameters()}
    optimizer = build_optimizer_factory(OptimizerOptions(**table))(model)(list(model.parameters()))
    return {group["weight_decay"]: {names[id(param)] for param in group["params"]} for group in optimizer.param_groups}


@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", "BertForMaskedLM", "LlamaForCausalLM", "T5ForConditionalGeneration", "ViTModel"]
)
def test_biases_and_norms_do_not_decay_as_in_transformers(name: str) -> None:
    kind = getattr(transformers, name)
    with torch.device("meta"):
        model = kind(kind.config_class())
    found = grouped(model, weight_decay=0.1)
    excluded = {name for name, _ in model.named_parameters()} - decayed_by_transformers(model)
    assert found == {0.1: decayed_by_transformers(model), 0.0: excluded}
    assert excluded


def decayed_by_transformers(model: nn.Module) -> set[str]:
    trainer: Any = transformers.Trainer
    here = {name for name, _ in model.named_parameters()}
    return here & set(trainer.get_decay_parameter_names(None, model))


def test_norms_with_other_names_and_classes_do_not_decay() -> None:
    class RmsNorm(nn.RMSNorm):
        pass

    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.GroupNorm(1, 2), RmsNorm(2))
    assert grouped(model, weight_decay=0.1)[0.1] == {"0.weight"}


def test_decay_biases_and_norms_decays_all_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    assert grouped(model, weight_decay=0.1, decay_biases_and_norms=True) == {0.1: set(dict(model.named_parameters()))}
    assert list(grouped(model, name="SGD")) == [0]
    with pytest.raises(
        ConfigError, match=r"decay_biases_and_norms = true has no effect, because SGD has no weight decay"
    ):
        build_optimizer_factory(OptimizerOptions(name="SGD", decay_biases_and_norms=True))


def rates_of(model: nn.Module, **table: Any) -> dict[str, float]:
    """Return the learning rate of each parameter as a factor of ``lr``."""
    names = {id(param): name for name, param in model.named_parameters()}
    optimizer = build_optimizer_factory(OptimizerOptions(lr=0.5, **table))(model)(list(model.parameters()))
    return {names[id(param)]: group["lr"] / 0.5 for group in optimizer.param_groups for param in group["params"]}


def small_llama(**changes: Any) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 16}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=3, **sizes, **changes))


def test_the_learning_rate_decreases_from_layer_to_layer() -> None:
    rates = rates_of(small_llama(), layer_decay=0.5)
    expected = {"model.embed_tokens.weight": 0.125, "model.norm.weight": 1.0, "lm_head.weight": 1.0}
    for layer, rate in enumerate((0.25, 0.5, 1.0)):
        expected |= {name: rate for name in rates if name.startswith(f"model.layers.{layer}.")}
    assert rates == pytest.approx(expected)


def test_experts_are_not_counted_as_layers() -> None:
    def layer() -> nn.Module:
        return nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))})

    rates = rates_of(nn.ModuleDict({"layers": nn.ModuleList(layer() for _ in range(2))}), layer_decay=0.5)
    assert {name: rate for name, rate in rates.items() if ".0.experts" in name} == {
        f"layers.0.experts.{expert}.weight": 0.5 for expert in range(4)
    }
    assert all(rate == 1.0 for name, rate in rates.items() if ".1.experts" in name)


def test_learning_rates_by_name_multiply_those_by_layer() -> None:
    factors = {"*.2.mlp.*": 3.0, "*.mlp.*": 10.0}
    rates = rates_of(small_llama(), layer_decay=0.5, lr_factors=factors)
    assert rates["model.layers.2.mlp.up_proj.weight"] == pytest.approx(3.0)
    assert rates["model.layers.1.mlp.up_proj.weight"] == pytest.approx(5.0)
    assert rates["model.layers.1.self_attn.q_proj.weight"] == pytest.approx(0.5)


def test_the_first_group_has_the_configured_rate() -> None:
    optimizer = build_optimizer_factory(OptimizerOptions(lr=0.5, lr_factors={"*": 7.0}))(model := small_llama())(
        list(model.parameters())
    )
    assert optimizer.param_groups[0]["lr"] == 0.5 and not optimizer.param_groups[0]["params"]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"lr_factors": {"lm_haed.*": 2.0}}, r"'lm_haed.*' in optimizer.lr_factors matches no parameter"),
        ({"layer_decay": 0.9}, r"layer_decay has no effect, because Linear has no ModuleList"),
    ],
)
def test_rates_without_effect_raise(table: dict[str, Any], words: str) -> None:
    model = nn.Linear(2, 2) if "layer_decay" in table else small_llama()
    with pytest.raises(ConfigError, match=words):
        build_optimizer_factory(OptimizerOptions(**table))(model)


@pytest.mark.reduced(one_in=3, first=1)
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"pipe": 2}, {"data": 2, "zero_stage": 3}], ids=str)
def test_rates_by_layer_are_equal_under_every_layout(
    parallel: dict[str, Any], pool2: WorkerPool, tmp_path: Path
) -> None:
    changes = {**SMALL["gpt2"], "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    optimizer = {"layer_decay": 0.25, "lr_factors": {"*.wpe.*": 4.0}}

    def made(name: str, **tables: Any) -> TrainConfig:
        return config(
            tmp_path, "gpt2", {"train": write_text(tmp_path)}, model={"config": changes}, optimizer=optimizer,
            folder=str(tmp_path / name), hooks={"progress": False, "throughput": False}, **tables,
        )  # fmt: skip

    alone = losses_of(made("alone"))
    for losses in pool2.run(losses_of, made("split", parallel=parallel)):
        assert losses == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("module", ["{folder}/own_optimizers.py", "own_optimizers", "torch.optim"])
def test_an_own_optimizer_has_the_groups_of_a_known_one(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_optimizers.py").write_text(
        "import torch\n"
        "class AdamW(torch.optim.AdamW):\n"
        "    def __init__(self, own_params, **options): super().__init__(own_params, **options)\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    name, options = f"{module.format(folder=tmp_path)}:AdamW", dict[str, Any](betas=[0.8, 0.9])
    own = build_optimizer_factory(OptimizerOptions(name=name, **options))(model)(list(model.parameters()))
    known = build_optimizer_factory(OptimizerOptions(**options))(model)(list(model.parameters()))
    assert isinstance(own, torch.optim.AdamW)
    assert [{**group, "params": list(map(id, group["params"]))} for group in own.param_groups] == [
        {**group, "params": list(map(id, group["params"]))} for group in known.param_groups
    ]
