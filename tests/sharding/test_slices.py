"""Shards in a state dict are not saved as if they were full tensors."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as distributed_checkpoint
import transformers
from torch import Tensor, nn

import shardformer
from shardformer.errors import ConfigError
from shardformer.layout.shard_export_guard import ExportGuardedShard, guard_state_dict_shards
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.tensor_parallel.layers import Linear1D_Col


def plain(seed: int = 0) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=50
    )
    model, generator = transformers.LlamaForCausalLM(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def sharded(context: ParallelContext) -> Any:
    return shardformer.shard_model(plain(), context=context)


def numbers(state: dict[str, Tensor]) -> dict[str, Any]:
    return {name: value.numpy() for name, value in state.items()}


WRITES: dict[str, Callable[[Any, Path], object]] = {
    "save_model": lambda model, path: safetensors.torch.save_model(model, str(path)),
    "save_file": lambda model, path: safetensors.torch.save_file(model.state_dict(), path),
    "safetensors of copies": lambda model, path: safetensors.torch.save_file(
        {name: value.detach().clone().float().cpu() for name, value in model.state_dict().items()}, path
    ),
    "safetensors of bf16": lambda model, path: safetensors.torch.save(
        {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    ),
    "torch.save": lambda model, path: torch.save(model.state_dict(), path),
    "torch.save of copies": lambda model, path: torch.save(copy.deepcopy(model.state_dict()), path),
    "torch.save of transposed": lambda model, path: torch.save(
        {name: value.t().contiguous() for name, value in model.state_dict().items() if value.dim() == 2}, path
    ),
    "torch.save of half": lambda model, path: torch.save({k: v.half() for k, v in model.state_dict().items()}, path),
    "torch.save with keep_vars": lambda model, path: torch.save(model.state_dict(keep_vars=True), path),
    "torch.save of parameters": lambda model, path: torch.save(dict(model.named_parameters()), path),
    "torch.save of a part": lambda model, path: torch.save(model.model.layers.state_dict(), path),
    "torch.save of the model": lambda model, path: torch.save(model, path),
    "safetensors of a wrapper": lambda model, path: safetensors.torch.save_model(
        nn.ModuleDict({"a": model}), str(path)
    ),
    "pickle": lambda model, path: pickle.dumps(model.state_dict()),
    "numpy": lambda model, path: numpy.savez(path, **numbers(model.state_dict())),
    "asarray": lambda model, path: [numpy.asarray(value) for value in model.state_dict().values()],
    "a part of transformers": lambda model, path: model.model.save_pretrained(path),
    "transformers with the state": lambda model, path: model.save_pretrained(path, state_dict=model.state_dict()),
}


@pytest.mark.reduced(at_most=18)
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"pipe": 2}], ids=str)
@pytest.mark.parametrize("what", WRITES)
def test_shards_are_not_saved_as_full_tensors(what: str, sizes: dict[str, int], tmp_path: Path) -> None:
    def do(context: ParallelContext) -> str:
        model = sharded(context)
        with pytest.raises(BaseException, match=r"full_state_dict|save_pretrained") as error:
            WRITES[what](model, tmp_path / str(context.rank))
        return str(error.value)

    assert all("shard" in said or "full shape" in said for said in run_as_threads(do, **sizes))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch 2.14 closes its file twice
def test_torch_distributed_checkpoint_is_refused(tmp_path: Path) -> None:
    def do(context: ParallelContext) -> None:
        state = {"model": sharded(context).state_dict()}
        with pytest.raises(BaseException, match="full_state_dict"):
            distributed_checkpoint.save(state, checkpoint_id=tmp_path / str(context.rank), no_dist=True)

    run_as_threads(do, tensor=2)
    gc.collect()


def test_standalone_parallel_layer_is_not_saved() -> None:
    def do(context: ParallelContext) -> None:
        layer = Linear1D_Col.from_native_module(nn.Linear(4, 6), context.tensor)
        with pytest.raises(ConfigError, match=r"weight of shape \(3, 4\) is a shard and cannot be saved"):
            torch.save(nn.Sequential(layer).state_dict(), io.BytesIO())

    run_as_threads(do, tensor=2)


@pytest.mark.parametrize("sizes", [{"data": 2}, {"tensor": 1}], ids=str)
def test_replicated_tensors_are_saved(sizes: dict[str, int], tmp_path: Path) -> None:
    def do(context: ParallelContext) -> None:
        model = sharded(context)
        safetensors.torch.save_model(model, str(tmp_path / str(context.rank)))
        shardformer.shard_optimizer(model, torch.optim.AdamW(model.parameters()), stage=2)
        torch.save(model.state_dict(), io.BytesIO())
        torch.save(dict(model.named_parameters()), io.BytesIO())

    run_as_threads(do, **sizes)
    expected = plain().state_dict()
    found = safetensors.torch.load_file(tmp_path / "0")
    assert all(torch.equal(value, expected[name]) for name, value in found.items()) and found


def test_nothing_is_saved_under_zero_stage_3(tmp_path: Path) -> None:
    def do(context: ParallelContext) -> None:
        model = sharded(context)
        shardformer.shard_optimizer(model, torch.optim.AdamW(model.parameters()), stage=3)
        for write in ("save_model", "torch.save", "torch.save of parameters"):
            with pytest.raises(ConfigError):
                WRITES[write](model, tmp_path / str(context.rank))

    run_as_threads(do, data=2)


def test_shard_behaves_like_a_tensor_in_torch(tmp_path: Path) -> None:
    """A shard can be loaded, copied, compared, computed with and restored in the same layout."""

    def do(context: ParallelContext) -> None:
        model, batch = sharded(context), torch.randint(0, 50, (2, 5), generator=torch.Generator().manual_seed(3))
        best = copy.deepcopy(model.state_dict())
        before = model(input_ids=batch).logits.full_tensor() if context.tensor.size > 1 else None
        name = "model.layers.0.mlp.up_proj.weight"
        part = best[name]
        assert isinstance(part, ExportGuardedShard) and part.shape == (12, 16)
        assert not isinstance(best["model.norm.weight"], ExportGuardedShard)
        assert isinstance(part.double().cpu() * 0.5, ExportGuardedShard)
        assert type(part.sum()) is Tensor and type(part[:3]) is Tensor and float(part.abs().max()) > 0
        assert torch.equal(part, dict(model.named_parameters())[name])
        assert copy.copy(part).untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert float(part.abs().max()) > 0, "a deep copy does not share memory"
        model.load_state_dict(best)
        assert type(dict(model.named_parameters())[name]) is nn.Parameter
        assert torch.equal(model(input_ids=batch).logits.full_tensor(), before)
        torch.nn.utils.parameters_to_vector(best.values())
        kept = {key: value.as_subclass(Tensor) for key, value in best.items()}
        torch.save(kept, tmp_path / f"{context.rank}.pt")
        model.load_state_dict(torch.load(tmp_path / f"{context.rank}.pt"))
        assert torch.equal(model(input_ids=batch).logits.full_tensor(), before)
        copied = copy.deepcopy(model)
        assert isinstance(copied.state_dict()[name], ExportGuardedShard)
        with pytest.raises(ConfigError):
            torch.save(dict(copied.named_parameters()), io.BytesIO())
        plain().load_state_dict(shardformer.full_state_dict(model))

    run_as_threads(do, tensor=2)


def test_stage_buffers_are_marked_but_not_its_own_tensors() -> None:
    module = nn.BatchNorm1d(3)
    guard_state_dict_shards(module, None)
    state = nn.Sequential(module).state_dict()
    assert state.keys() == nn.Sequential(nn.BatchNorm1d(3)).state_dict().keys()
    assert all(isinstance(value, ExportGuardedShard) for value in state.values())
    own = module.state_dict(keep_vars=True)
    assert own["running_mean"] is module.running_mean and own["weight"] is module.weight


def test_shard_is_not_loaded_as_the_full_tensor() -> None:
    def do(context: ParallelContext) -> None:
        with pytest.raises(RuntimeError, match="size mismatch"):
            plain().load_state_dict(sharded(context).state_dict())

    run_as_threads(do, tensor=2)
