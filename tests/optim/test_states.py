"""``state_dict`` of an optimizer contains this rank's shard, and records which rank that is."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler, swa_utils

import shardformer
from shardformer.comm.collectives import all_gather_objects
from shardformer.errors import ConfigError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from tests.policies.toy import ToyLM, ToyPolicy, toy_batch, toy_loss


def a_step(model: Any, optimizer: Any) -> None:
    toy_loss(model, toy_batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()


def models_of(ranks: int) -> list[Any]:
    torch.manual_seed(0)
    return [copy.deepcopy(plain) for plain in [ToyLM().double()] for _ in range(ranks)]


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def stepped(model: Any) -> torch.optim.Optimizer:
    """Perform a step without a forward pass, which a single stage cannot run."""
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def test_replicated_state_is_saved_and_can_be_loaded_by_another_rank() -> None:
    """With data parallelism only, plain or under stage 0."""
    files: dict[str, bytes] = {}
    models = models_of(4)

    def do(context: ParallelContext) -> None:
        for name, stage in (("plain", None), ("stage 0", 0)):
            model = shardformer.shard_model(models.pop(), ToyPolicy(), context=context)
            optimizer: Any = adam(model)
            if stage is not None:
                optimizer = shardformer.shard_optimizer(model, optimizer, stage=stage)
            a_step(model, optimizer)
            if context.rank == 0:
                torch.save(optimizer.state_dict(), file := io.BytesIO())
                files[name] = file.getvalue()
            all_gather_objects(None, context.data)  # wait until the file exists
            optimizer.load_state_dict(torch.load(io.BytesIO(files[name])))

    run_as_threads(do, data=2)


@pytest.mark.parametrize("stage", [None, 1])
def test_torch_functions_load_copy_and_restore_states(stage: int | None, tmp_path: Any) -> None:
    """Later steps equal a run without it, and the optimizer has plain tensors."""
    models = models_of(6)

    def do(context: ParallelContext) -> None:
        def made() -> tuple[Any, Any, Any]:
            model = shardformer.shard_model(models.pop(), ToyPolicy(), context=context)
            optimizer: Any = (
                adam(model) if stage is None else shardformer.shard_optimizer(model, adam(model), stage=stage)
            )
            return model, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.9)

        model, optimizer, schedule = made()
        a_step(model, optimizer)
        schedule.step()
        torch.save(schedule.state_dict(), io.BytesIO())  # plain numbers
        ends = []
        for number in range(2):
            other, ours, its_schedule = made()
            other.load_state_dict(copy.deepcopy(model.state_dict()))
            state = optimizer.state_dict()
            ours.load_state_dict(copy.deepcopy(state))  # otherwise both optimizers share tensors
            its_schedule.load_state_dict(schedule.state_dict())
            if number and stage is None:  # scripts copy states by hand
                for p, kept in zip(other.parameters(), state["state"].values(), strict=True):
                    ours.state[p] = {key: value.clone() for key, value in kept.items()}
                shardformer.save_checkpoint(other, tmp_path / "by hand", ours, step=1)
            a_step(other, ours)
            ends.append(shardformer.full_state_dict(other))
        a_step(model, optimizer)
        for end in ends:
            torch.testing.assert_close(end, shardformer.full_state_dict(model), rtol=0, atol=1e-12)

    run_as_threads(do, tensor=2)


def test_averaged_model_equals_one_process_and_is_not_saved() -> None:
    def train(model: Any) -> Any:
        optimizer, average = adam(model), swa_utils.AveragedModel(model, use_buffers=True)
        for _ in range(3):
            a_step(model, optimizer)
            average.update_parameters(model)
        return average

    models = models_of(3)
    want = train(models.pop()).module.state_dict()

    def do(context: ParallelContext) -> dict[str, Tensor]:
        average = train(shardformer.shard_model(models.pop(), ToyPolicy(), context=context))
        with pytest.raises(ConfigError, match="full_state_dict"):
            torch.save(average.state_dict(), io.BytesIO())
        return shardformer.full_state_dict(average.module)

    for found in run_as_threads(do, tensor=2):
        torch.testing.assert_close(found, dict(want), rtol=0, atol=1e-10)


def test_state_of_a_plain_run_is_sharded_on_load() -> None:
    """Also with momentum of some parameters only, and before ``shard_optimizer`` adopts the state."""

    def trained(model: Any, optimizer: Any) -> dict[str, Tensor]:
        for step in range(2):
            toy_loss(model, toy_batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return shardformer.full_state_dict(model) if hasattr(model, "_shardformer") else dict(model.state_dict())

    def sgd(model: Any) -> torch.optim.Optimizer:
        head, rest = list(model.head.parameters()), [p for n, p in model.named_parameters() if not n.startswith("head")]
        return torch.optim.SGD([{"params": rest, "momentum": 0.9}, {"params": head}], lr=0.1)

    before, want, *models = models_of(6)
    kept = sgd(before)
    a_step(before, kept)
    state = copy.deepcopy(kept.state_dict())
    own = sgd(want)
    own.load_state_dict(copy.deepcopy(state))
    expected = trained(want, own)

    def do(context: ParallelContext) -> list[dict[str, Tensor]]:
        found = []
        for stage in (None, 1):
            model = shardformer.shard_model(models.pop(), ToyPolicy(), context=context)
            optimizer: Any = sgd(model)
            optimizer.load_state_dict(copy.deepcopy(state))
            if stage is not None:
                optimizer = shardformer.shard_optimizer(model, optimizer, stage=stage)
            found.append(trained(model, optimizer))
        return found

    for found in run_as_threads(do, tensor=2):
        for each in found:
            torch.testing.assert_close(each, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stage", [None, 1])
def test_state_dict_hooks_are_called(stage: int | None) -> None:
    model, called = ToyLM().double(), list[str]()
    optimizer: Any = adam(model) if stage is None else shardformer.shard_optimizer(model, adam(model), stage=stage)
    optimizer.register_state_dict_pre_hook(lambda _: called.append("before"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "epoch": 3})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: called.append(f"epoch {state['epoch']}"))
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("loaded"))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert called == ["before", "epoch 3", "loaded"]


@pytest.mark.parametrize("copies", [copy.deepcopy, copy.copy, pickle.dumps], ids=["deepcopy", "copy", "pickle"])
def test_zero_optimizer_cannot_be_copied(copies: Any) -> None:
    model = ToyLM()
    optimizer = shardformer.shard_optimizer(model, adam(model))
    with pytest.raises(ConfigError, match=r"Save optimizer\.state_dict"):
        copies(optimizer)
    a_step(model, optimizer)


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda state: state.pop(name)


BROKEN: dict[str, tuple[int | None, Callable[[dict[str, Any]], object]]] = {
    "no groups": (None, without("param_groups")),
    "no state": (None, without("state")),
    "groups are none": (None, lambda state: state.update(param_groups=None)),
    "scheduler": (None, lambda state: (state.clear(), state.update(last_epoch=3))),
    "no states": (1, lambda state: state["optimizers"][0].pop("state")),
    "no optimizer": (1, lambda state: state.update(optimizers=[])),
    "a master is none": (1, lambda state: state["masters"].__setitem__(-1, None)),
    "rounds": (1, lambda state: state.update(rounds=[1, 2])),
    "loss scale": (1, lambda state: state.update(loss_scale={"scale": 2.0})),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_state_on_one_rank_raises_on_all_ranks_and_changes_nothing(name: str) -> None:
    stage, breaks = BROKEN[name]
    models = models_of(2)

    def do(context: ParallelContext) -> None:
        model = shardformer.shard_model(models[context.rank], ToyPolicy(), context=context)
        optimizer: Any = adam(model) if stage is None else shardformer.shard_optimizer(model, adam(model), stage=stage)
        a_step(model, optimizer)
        before = copy.deepcopy(optimizer.state_dict())
        state = copy.deepcopy(before)
        for group in state.get("param_groups", []):
            group["lr"] = 0.5
        if stage is not None:
            state["loss_scale"]["value"] = 3.0
            state["masters"] = [2 * x for x in state["masters"]]
        if context.rank == 1:
            breaks(state)
        with pytest.raises((ConfigError, KeyError)):
            optimizer.load_state_dict(state)
        after = optimizer.state_dict()
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        a_step(model, optimizer)

    run_as_threads(do, **({"tensor": 2} if stage is None else {"data": 2}))
