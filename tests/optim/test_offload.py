"""Offload gives bitwise equal weights, and keeps master weights, states and gradients on the host."""

from __future__ import annotations

import copy
import errno
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError, InputError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.offload.host import OffloadConfig
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory, compute_model_loss
from shardformer.weights.state_dict import full_state_dict
from shardformer.zero.mixed_precision import MixedPrecision
from shardformer.zero.optimizers import HybridAdam
from shardformer.zero.shard_optimizer import shard_optimizer
from shardformer.zero.zero_optimizer import ZeroOptimizer

STEPS = 3
Weights = dict[str, Tensor]


def muon(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices, rest = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


class Counting(torch.optim.SGD):
    """Optimizer that counts steps per group, so that steps of single parameters would be wrong."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + group.setdefault("count", 0))
            group["count"] += 1
        return super().step(closure)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Muon": muon,
    "Counting": lambda params: Counting(params, lr=0.1, momentum=0.9),
}


def state_of(optimizer: ZeroOptimizer) -> list[Any]:
    """Return the master weights and states."""
    kept = optimizer.state_dict()
    states = [sorted(each["state"].items()) for each in kept["optimizers"]]
    leaves = torch.utils._pytree.tree_leaves([kept["masters"], states])
    return [x.clone() if isinstance(x, Tensor) else x for x in leaves]


def alike(first: list[Any], second: list[Any]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def trained(
    offload: Any, family: str = "llama", optimizer: str = "AdamW", data: int = 2, micro: int = 1, **how: Any
) -> list[tuple[Weights, list[tuple[Any, ...]], ZeroOptimizer]]:
    """Return for each rank the weights, and the norm and loss scale of each step."""
    torch.manual_seed(0)
    models = [SmallModelFactory(family)() for _ in range(data)]

    def train(context: ParallelContext) -> tuple[Weights, list[tuple[Any, ...]], ZeroOptimizer]:
        model = shard_model(models[context.rank], context=context)
        made = OPTIMIZERS[optimizer](list(model.parameters()))
        ours, seen = shard_optimizer(model, made, offload=offload, bucket_bytes=4096, **how), []
        for step in range(STEPS):
            for n in range(micro):
                batch = RandomBatchFactory(DEFAULT_HEAD[family], batch_size=2)(10 * step + n + 5 * context.rank)
                with ours.no_sync() if n + 1 < micro else nullcontext():
                    ours.backward(compute_model_loss(model, batch) / micro)
            ours.step()
            seen.append((ours.grad_norm, ours.skipped))
            ours.zero_grad()
        return full_state_dict(model), seen, ours

    return run_as_threads(train, data=data)


FP16 = "fp16"
REDUCED = MixedPrecision("bf16", gradients="fp32")


@pytest.mark.slow
@pytest.mark.reduced(at_most=5)
@pytest.mark.parametrize(
    ("optimizer", "how"),
    [
        ("AdamW", {"stage": 0}),
        ("AdamW", {"stage": 1, "micro": 3, "max_grad_norm": 0.5}),
        ("AdamW", {"stage": 2, "micro": 2, "precision": "bf16", "max_grad_norm": 0.5}),
        ("AdamW", {"stage": 2, "precision": REDUCED, "family": "bert", "overlap": False}),
        ("SGD", {"stage": 2, "precision": FP16, "micro": 2}),
        ("AdamW", {"stage": 3, "precision": "bf16", "max_grad_norm": 0.5}),
        ("SGD", {"stage": 3, "micro": 2, "family": "gpt2", "data": 3, "overlap": False}),
        ("Muon", {"stage": 2, "precision": "bf16"}),
        ("Muon", {"stage": 3}),
        ("Counting", {"stage": 1}),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(f"{k}={v}"[:24] for k, v in x.items()),
)
@pytest.mark.parametrize("on_device", [0.0, 0.4])
def test_offload_gives_bitwise_equal_weights(optimizer: str, how: dict[str, Any], on_device: float) -> None:
    want = trained(None, optimizer=optimizer, **how)
    ours = trained(OffloadConfig("cpu", on_device), optimizer=optimizer, **how)
    for (plain, seen, _), (weights, same, _) in zip(want, ours, strict=True):
        assert all(torch.equal(weights[name], value) for name, value in plain.items())
        assert seen == same


@pytest.mark.parametrize("decoupled", [True, False])
def test_hybrid_adam_equals_adam(decoupled: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(9, 8), nn.Linear(8, 7))
    ours = copy.deepcopy(plain)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = kind(plain.parameters(), lr=0.1, weight_decay=0.05, fused=True)
    made = HybridAdam(ours.parameters(), lr=0.1, weight_decay=0.05, decoupled_weight_decay=decoupled, on_device=0.6)
    optimizer = shard_optimizer(ours, made, offload="cpu", bucket_bytes=4)
    assert len({shard.host is None for shard in optimizer.shards}) == 2
    for step in range(3):
        x = torch.randn(4, 9, generator=torch.Generator().manual_seed(step))
        for model, stepping in ((plain, theirs), (ours, optimizer)):
            model(x).square().sum().backward()
            stepping.step()
            stepping.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))


def test_master_weights_states_and_gradients_are_on_the_host() -> None:
    for share in (0.0, 0.3, 1.0):
        *_, ours = trained(OffloadConfig("cpu", share), stage=2)[0]
        there = sum(shard.length for shard in ours.shards if shard.host is not None)
        part = there / sum(shard.length for shard in ours.shards)
        assert 1 - share <= part < 1 - share + 0.2
        for shard in (shard for shard in ours.shards if shard.host is not None):
            base, size = shard.host.values.data_ptr(), shard.host.values.nbytes
            assert all(base <= piece.value.data_ptr() < base + size for piece in shard.slices)


@pytest.mark.parametrize("overlap", [True, False])
def test_gradient_copies_overlap_with_the_backward_pass(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the backward pass most gradients were copied; without overlap none."""
    from shardformer.gradients.reducer import GradientReducer
    from shardformer.zero.flat_shards import FlatParamShard

    order: list[str] = []
    receive, end = FlatParamShard.accumulate_reduced_grads, GradientReducer._on_backward_end
    monkeypatch.setattr(
        FlatParamShard, "accumulate_reduced_grads", lambda self, *a: (order.append("down"), receive(self, *a))[1]
    )
    monkeypatch.setattr(GradientReducer, "_on_backward_end", lambda self: (order.append("end"), end(self))[1])
    *_, ours = trained("cpu", data=1, stage=2, overlap=overlap)[0]
    assert order.count("down") == STEPS * len(ours.shards)
    assert order.index("end") > 0.6 * len(ours.shards) if overlap else order[0] == "end"


def check_resumes(**how: Any) -> None:
    """A step after a load equals the step after the save."""
    torch.manual_seed(0)
    model = nn.Linear(7, 5)
    ours = shard_optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.1), **how)

    def step(value: float) -> None:
        model(torch.full((2, 7), value, dtype=torch.bfloat16)).float().square().sum().backward()
        ours.step()
        ours.zero_grad()

    step(1.0)
    kept = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, ours.state_dict())
    before = model.weight.clone()
    step(2.0)
    after = model.weight.clone()
    ours.load_state_dict(kept)
    assert torch.equal(model.weight, before)
    step(2.0)
    assert torch.equal(model.weight, after)


@pytest.mark.parametrize("files", [False, True])
def test_offloaded_optimizer_resumes_from_its_state_dict(files: bool, tmp_path: Path) -> None:
    check_resumes(offload=f"nvme:{tmp_path}" if files else "cpu", precision="bf16")


@pytest.mark.parametrize("files", [False, True])
def test_writes_between_steps_reach_offloaded_master_weights(files: bool, tmp_path: Path) -> None:
    offload = f"nvme:{tmp_path}" if files else "cpu"
    model = nn.Linear(3, 2)
    ours = shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), offload=offload)
    with torch.no_grad():
        model.weight.fill_(4.0)
    model(torch.ones(1, 3)).sum().backward()
    ours.step()
    ours.zero_grad()
    assert torch.allclose(model.weight, torch.full((2, 3), 3.9))


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.mark.reduced(at_most=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "how"),
    [
        ("AdamW", {"stage": 1, "micro": 2, "max_grad_norm": 0.5}),
        ("AdamW", {"stage": 2, "precision": "bf16"}),
        ("SGD", {"stage": 3, "precision": "bf16", "data": 3}),
        ("SGD", {"stage": 0, "family": "bert"}),
        ("Muon", {"stage": 2, "precision": "bf16"}),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(f"{k}={v}"[:24] for k, v in x.items()),
)
@pytest.mark.parametrize("buffers", [2, 4])
def test_offload_to_files_gives_bitwise_equal_weights_and_states(
    optimizer: str, how: dict[str, Any], buffers: int, tmp_path: Path
) -> None:
    want = trained(None, optimizer=optimizer, **how)
    share = 0.3 if buffers == 4 else 0.0
    ours = trained(OffloadConfig(f"nvme:{tmp_path}", share, buffers=buffers), optimizer=optimizer, **how)
    for (plain, seen, theirs), (weights, same, files) in zip(want, ours, strict=True):
        assert all(torch.equal(weights[name], value) for name, value in plain.items())
        assert seen == same
        assert alike(state_of(theirs), state_of(files))


def test_master_weights_and_states_are_in_files_between_steps(tmp_path: Path) -> None:
    *_, ours = trained(OffloadConfig(f"nvme:{tmp_path}", buffers=3), stage=2, precision="bf16", data=1)[0]
    for piece in (piece for shard in ours.shards for piece in shard.slices):
        assert piece.value.untyped_storage().nbytes() == 4
        assert all(x.numel() < 2 for state in ours.inner[0].state.values() for x in state.values())
    host: Any = ours._host
    assert host.disk._num_made <= 3
    assert host.disk.get_measured_bandwidth("read") > 0 and host.disk.get_measured_bandwidth("written") > 0


class Full:
    """System call that fails from a given call on, as on a full disk."""

    def __init__(self, call: Any, after: int) -> None:
        self.call, self.left = call, after

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.call(*args)


@pytest.mark.reduced(at_most=4)
@pytest.mark.parametrize("after", [0, 1, 7, 12])
@pytest.mark.parametrize("at_step", [0, 2])
def test_full_disk_restores_the_previous_step(
    after: int, at_step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of rank 1 is full. Both ranks restore the previous weights and states, and training continues."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(7, 3)) for _ in range(2)]

    def train(context: ParallelContext) -> None:
        model = models[context.rank]
        made = torch.optim.AdamW(model.parameters(), lr=0.1)
        ours = shard_optimizer(
            model, made, offload=f"nvme:{tmp_path}", bucket_bytes=64, precision="bf16", context=context
        )

        def step(number: int) -> None:
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(2 * number + context.rank))
            model(x.bfloat16()).float().square().sum().backward()
            ours.step()
            ours.zero_grad()

        for number in range(at_step):
            step(number)
        weights, states = [p.detach().clone() for p in model.parameters()], state_of(ours)
        disk: Any = ours._host
        disk = disk.disk
        if context.rank == 1:
            disk.write_call = Full(disk.write_call, after)
        with pytest.raises(InputError, match=r"No space left on device \(rank 1\)"):
            step(7)
        assert alike(weights, list(model.parameters())) and alike(states, state_of(ours))
        if context.rank == 1:
            disk.write_call = disk.write_call.call
        step(7)
        assert not alike(weights, list(model.parameters()))

    run_as_threads(train, data=2)


@pytest.mark.parametrize("folder", ["missing", "a file", "no room"])
def test_unusable_directory_raises_on_all_ranks(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "there"
    if folder == "a file":
        path.write_text("")
    elif folder == "no room":
        path.mkdir()
        monkeypatch.setattr(os, "posix_fallocate", Full(os.posix_fallocate, 1))
    models = [nn.Linear(5, 3) for _ in range(2)]

    def refused(context: ParallelContext) -> str:
        model = models[context.rank]
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        with pytest.raises(ConfigError) as error:
            shard_optimizer(model, optimizer, offload=f"nvme:{path}", context=context)
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()  # the optimizer is unchanged
        return str(error.value)

    for said in run_as_threads(refused, data=2):
        assert "cannot be offloaded to files in" in said and "Use an existing directory" in said


def test_optimizer_with_a_global_step_count_cannot_use_files(tmp_path: Path) -> None:
    model = nn.Linear(5, 3)
    with pytest.raises(ConfigError, match="Counting"):
        shard_optimizer(model, Counting(model.parameters(), lr=0.1), offload=f"nvme:{tmp_path}")


def test_invalid_option_on_one_rank_raises_on_all_ranks() -> None:
    models = [nn.Linear(3, 2) for _ in range(2)]

    def refused(context: ParallelContext) -> None:
        model = models[context.rank]
        with pytest.raises(ConfigError, match="stage=9"):
            shard_optimizer(
                model, torch.optim.SGD(model.parameters()), stage=9 if context.rank == 1 else 1, context=context
            )

    run_as_threads(refused, data=2)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"offload": "gpu"}, "offload='gpu'"),
        ({"offload": "nvme:"}, "offload='nvme:'"),
        ({"offload": 1}, "offload=1"),
        ({"offload": lambda: OffloadConfig("cpu", on_device=1.5)}, "on_device=1.5"),
        (
            {"offload": lambda: OffloadConfig("cpu", on_device="free")},
            "on_device='free' requires a CUDA device",
        ),
        ({"bucket_bytes": 0}, "bucket_bytes=0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm=nan"),
    ],
)
def test_invalid_option_raises_and_leaves_the_optimizer_unchanged(asked: dict[str, Any], said: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError) as error:
        shard_optimizer(
            model, optimizer, **{name: value() if callable(value) else value for name, value in asked.items()}
        )
    assert said in str(error.value)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
