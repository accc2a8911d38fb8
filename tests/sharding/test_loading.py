"""State dicts of the plain model, of a rank and of other models in ``load_state_dict``, and saving."""

from __future__ import annotations

import copy
import io
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import shardformer
from shardformer.errors import ConfigError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory
from tests.scripts import PYTHON

FAMILIES = ("llama", "gpt2", "t5", "bert")


def plain(family: str = "llama", seed: int = 0) -> Any:
    model = SmallModelFactory(family)().train()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.05 * torch.randn(p.shape, generator=generator))
    return model


def batch(family: str = "llama") -> dict[str, Any]:
    return RandomBatchFactory(DEFAULT_HEAD[family])(0)


@pytest.mark.reduced(at_most=6)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [{"tensor": 3}, {"data": 2}, {"pipe": 2, "tensor": 2}], ids=str)
def test_state_dict_of_the_plain_model_is_sharded_on_load(family: str, sizes: dict[str, int]) -> None:
    first, other = plain(family), plain(family, 1)
    full = other.state_dict()
    expected = float(copy.deepcopy(other)(**batch(family)).loss.detach())

    def do(context: ParallelContext) -> None:
        model = shardformer.shard_model(copy.deepcopy(first), context=context)
        found = model.load_state_dict(full)
        assert found.missing_keys == [] and found.unexpected_keys == []
        if context.pipe.size > 1:
            loss = float(shardformer.Pipeline(model, micro_batches=1).step(batch(family)))
        else:
            loss = float(model(**batch(family)).loss.detach())
        assert loss == pytest.approx(expected, rel=1e-5)
        gathered = shardformer.full_state_dict(model)
        assert all(torch.equal(gathered[name], value) for name, value in full.items() if name in gathered)

    run_as_threads(do, **sizes)


def test_full_state_dict_keeps_its_values_during_training() -> None:
    def do(context: ParallelContext) -> None:
        model = shardformer.shard_model(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), context=context)
        saved = shardformer.full_state_dict(model)
        copied = copy.deepcopy(saved)
        model(torch.randn(4, 3)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert all(torch.equal(saved[name], value) for name, value in copied.items())

    run_as_threads(do, data=2)


def test_state_dict_of_a_rank_is_loaded_unchanged() -> None:
    def do(context: ParallelContext) -> None:
        model: Any = shardformer.shard_model(plain(), context=context)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        model.load_state_dict(kept)
        assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())

    run_as_threads(do, tensor=2)


def error_of(context: ParallelContext, make: Any, **how: Any) -> str:
    """Return the error message after checking that the model is unchanged."""
    model: Any = shardformer.shard_model(plain(), context=context)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError) as error:
        model.load_state_dict(make(model), **how)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return str(error.value)


def ones() -> dict[str, Any]:
    return {name: torch.ones_like(value) for name, value in plain().state_dict().items()}


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (lambda m: plain("gpt2").state_dict(), {}, "the key model.embed_tokens.weight is missing"),
    (lambda m: {**plain().state_dict(), "more": torch.ones(1)}, {}, "the key more is unexpected"),
    (
        lambda m: {**plain().state_dict(), "model.norm.weight": torch.ones(5)},
        {},
        "model.norm.weight with shape (5,)",
    ),
    (lambda m: {**plain().state_dict(), "lm_head.weight": m.lm_head.weight}, {}, "but only a shard of lm_head.weight"),
    (lambda m: plain().state_dict(), {"assign": True}, "assign=True"),
    (lambda m: {"model.norm.weight": torch.ones(5)}, {"strict": False}, "model.norm.weight with shape (5,)"),
    (
        lambda m: {**ones(), "lm_head.weight": None},
        {},
        "lm_head.weight in the state dict must be a dense tensor, but got a NoneType",
    ),
    (
        lambda m: {**ones(), "lm_head.weight": ones()["lm_head.weight"].numpy()},
        {},
        "got a ndarray",
    ),
    (lambda m: {**ones(), "lm_head.weight": ones()["lm_head.weight"].to("meta")}, {}, "got a meta tensor"),
    (lambda m: {**ones(), "lm_head.weight": ones()["lm_head.weight"].to_sparse()}, {}, "got a sparse tensor"),
]


@pytest.mark.parametrize(("make", "how", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_state_dict_of_another_model_is_refused(make: Any, how: dict[str, Any], said: str) -> None:
    assert all(said in text for text in run_as_threads(lambda c: error_of(c, make, **how), tensor=2))


def test_non_strict_load_takes_the_common_keys() -> None:
    def do(context: ParallelContext) -> None:
        model: Any = shardformer.shard_model(plain(), context=context)
        other = plain(seed=1).state_dict()
        found = model.load_state_dict({"lm_head.weight": other["lm_head.weight"], "epoch": 3}, strict=False)
        assert found.unexpected_keys == ["epoch"]
        assert torch.equal(shardformer.full_state_dict(model)["lm_head.weight"], other["lm_head.weight"])

    run_as_threads(do, tensor=2)


def test_full_tensors_load_under_zero_stage_3() -> None:
    def do(context: ParallelContext) -> None:
        model: Any = shardformer.shard_model(plain(), context=context)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = shardformer.shard_optimizer(model, optimizer, stage=3)
        other = plain(seed=1).state_dict()
        found = model.load_state_dict({**other, "epoch": 3}, strict=False)
        assert found.missing_keys == [] and found.unexpected_keys == ["epoch"]
        expected = float(plain(seed=1)(**batch()).loss.detach())
        loss = model(**batch()).loss
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
        loss.backward()
        optimizer.step()  # from the loaded values
        assert float(model(**batch()).loss.detach()) < expected
        with pytest.raises(ConfigError, match=r"requires full tensors .*has shape \(3,\)"):
            model.load_state_dict({**other, "lm_head.weight": torch.zeros(3)})

    run_as_threads(do, data=2)


def test_a_tied_weight_of_another_stage_loads_from_its_other_name() -> None:
    other = plain("gpt2", seed=1)
    expected = float(other(**batch("gpt2")).loss.detach())
    saved = {name: value for name, value in other.state_dict().items() if name != "lm_head.weight"}  # as saved in files

    def do(context: ParallelContext) -> None:
        model = shardformer.shard_model(plain("gpt2"), context=context)
        assert model.load_state_dict(saved, strict=False).missing_keys == []
        loss = float(shardformer.Pipeline(model, micro_batches=1).step(batch("gpt2")))
        assert loss == pytest.approx(expected, rel=1e-5)

    run_as_threads(do, pipe=2)


# --- saving and copying


@pytest.mark.slow
def test_sharded_model_can_be_copied_but_not_pickled() -> None:
    def do(context: ParallelContext) -> None:
        model = shardformer.shard_model(plain(), context=context)
        with pytest.raises(ConfigError, match=r"A sharded model cannot be pickled.*save_pretrained"):
            torch.save(model, io.BytesIO())
        with pytest.raises(ConfigError, match="cannot be saved"):
            torch.save(model.state_dict(), io.BytesIO())
        copy.deepcopy(model)(**batch()).loss.backward()

    run_as_threads(do, tensor=2)


@pytest.mark.parametrize("sizes", [{"tensor": 3}, {"data": 2}, {"pipe": 2}], ids=str)
def test_num_parameters_counts_those_of_the_plain_model(sizes: dict[str, int]) -> None:
    expected = plain().num_parameters()

    def do(context: ParallelContext) -> None:
        model: Any = shardformer.shard_model(plain(), context=context)
        assert model.num_parameters() == expected
        if context.pipe.size > 1:
            with pytest.raises(ConfigError, match="on a pipeline stage"):
                model.num_parameters(only_trainable=True)
            return
        model.lm_head.weight.requires_grad_(False)
        alone = plain()
        alone.lm_head.weight.requires_grad_(False)
        for how in ({"only_trainable": True}, {"exclude_embeddings": True}):
            assert model.num_parameters(**how) == alone.num_parameters(**how)

    run_as_threads(do, **sizes)


def test_arguments_of_save_pretrained_are_checked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def do(context: ParallelContext) -> None:
        model: Any = shardformer.shard_model(plain(), context=context)
        for args, how, said in (
            (tmp_path / "file", {}, "is a file. Pass the path of a directory"),
            (tmp_path / "part", {"state_dict": model.state_dict()}, "must contain full tensors"),
            (tmp_path / "no_rank", {"is_main_process": False}, "is_main_process=False"),
        ):
            with pytest.raises(ConfigError) as error:
                model.save_pretrained(args, **how)
            assert said in str(error.value)
        model.save_pretrained(tmp_path / "main", is_main_process=context.rank == 0)
        model.save_pretrained(tmp_path / "given", state_dict=shardformer.full_state_dict(model))

    run_as_threads(do, tensor=2)
    expected = plain()(**batch()).loss
    for name in ("main", "given"):
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / name)
        assert torch.equal(loaded.train()(**batch()).loss, expected)
    assert not (tmp_path / "part").exists() and not (tmp_path / "no_rank").exists()


@pytest.mark.slow
@pytest.mark.parametrize("every", ["54", pytest.param("9", marks=pytest.mark.full)])
def test_interrupted_save_leaves_no_mixed_directory(tmp_path: Path, every: str) -> None:
    script = Path(__file__).with_name("saves.py")
    command = [PYTHON, script, tmp_path, "--every", every]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "0 mixtures" in done.stdout
