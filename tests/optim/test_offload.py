"""Offload: the weights are to the bit those without it, and masters, states and gradients are on the host."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.mesh.context import ParallelContext
from shardformer.optim.optimizer import ZeroOptimizer
from shardformer.optim.settings import Offload, Precision
from shardformer.optim.zero import zero
from shardformer.sharder import shard_model
from shardformer.sharding.save import full_state_dict
from shardformer.testing.threads import run_as_threads
from shardformer.testing.zoo import MAIN, Batches, Sample, sample_loss

STEPS = 3
Weights = dict[str, Tensor]


def muon(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices, rest = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, so that the steps of a part of the parameters would be wrong."""

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


def trained(
    offload: Any, family: str = "llama", optimizer: str = "AdamW", data: int = 2, micro: int = 1, **how: Any
) -> list[tuple[Weights, list[tuple[Any, ...]], ZeroOptimizer]]:
    """For each rank the weights, and of each step the norm and the scale of the loss."""
    torch.manual_seed(0)
    models = [Sample(family)() for _ in range(data)]

    def train(context: ParallelContext) -> tuple[Weights, list[tuple[Any, ...]], ZeroOptimizer]:
        model = shard_model(models[context.rank], context=context)
        made = OPTIMIZERS[optimizer](list(model.parameters()))
        ours, seen = zero(made, model, offload=offload, bucket_bytes=4096, **how), []
        for step in range(STEPS):
            for n in range(micro):
                batch = Batches(MAIN[family], batch=2)(10 * step + n + 5 * context.rank)
                with ours.no_sync() if n + 1 < micro else nullcontext():
                    ours.backward(sample_loss(model, batch) / micro)
            ours.step()
            seen.append((ours.grad_norm, ours.skipped))
            ours.zero_grad()
        return full_state_dict(model), seen, ours

    return run_as_threads(train, data=data)


FP16 = "fp16"
REDUCED = Precision("bf16", gradients="fp32")


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
def test_the_weights_are_to_the_bit_those_without(optimizer: str, how: dict[str, Any], on_device: float) -> None:
    want = trained(None, optimizer=optimizer, **how)
    ours = trained(Offload("cpu", on_device), optimizer=optimizer, **how)
    for (plain, seen, _), (weights, same, _) in zip(want, ours, strict=True):
        assert all(torch.equal(weights[name], value) for name, value in plain.items())
        assert seen == same


def test_masters_states_and_gradients_are_on_the_host_but_for_the_share() -> None:
    for share in (0.0, 0.3, 1.0):
        *_, ours = trained(Offload("cpu", share), stage=2)[0]
        there = sum(shard.length for shard in ours._shards if shard.host is not None)
        part = there / sum(shard.length for shard in ours._shards)
        assert 1 - share <= part < 1 - share + 0.2
        for shard in (shard for shard in ours._shards if shard.host is not None):
            base, size = shard.host.values.data_ptr(), shard.host.values.nbytes
            assert all(base <= piece.value.data_ptr() < base + size for piece in shard.pieces)


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_come_down_while_the_backward_runs(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the backward ends, most were sent down; without overlap none."""
    from shardformer.optim.shards import Shard
    from shardformer.reduce.buckets import GradientReducer

    order: list[str] = []
    receive, end = Shard.receive, GradientReducer._end_backward
    monkeypatch.setattr(Shard, "receive", lambda self, *a: (order.append("down"), receive(self, *a))[1])
    monkeypatch.setattr(GradientReducer, "_end_backward", lambda self: (order.append("end"), end(self))[1])
    *_, ours = trained("cpu", data=1, stage=2, overlap=overlap)[0]
    assert order.count("down") == STEPS * len(ours._shards)
    assert order.index("end") > 0.6 * len(ours._shards) if overlap else order[0] == "end"


def test_an_optimizer_of_the_host_is_saved_and_taken_up_again() -> None:
    torch.manual_seed(0)
    model = nn.Linear(7, 5)
    ours = zero(torch.optim.AdamW(model.parameters(), lr=0.1), model, offload="cpu", precision="bf16")

    def step(value: float) -> None:
        model(torch.full((2, 7), value, dtype=torch.bfloat16)).float().square().sum().backward()
        ours.step()
        ours.zero_grad()

    step(1.0)
    kept = ours.state_dict()
    kept = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, kept)
    before = model.weight.clone()
    step(2.0)
    after = model.weight.clone()
    ours.load_state_dict(kept)
    assert torch.equal(model.weight, before)
    step(2.0)
    assert torch.equal(model.weight, after)


def test_values_written_between_steps_reach_the_masters_of_the_host() -> None:
    model = nn.Linear(3, 2)
    ours = zero(torch.optim.SGD(model.parameters(), lr=0.1), model, offload="cpu")
    with torch.no_grad():
        model.weight.fill_(4.0)
    model(torch.ones(1, 3)).sum().backward()
    ours.step()
    assert torch.allclose(model.weight, torch.full((2, 3), 3.9))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"offload": "gpu"}, "offload='gpu'"),
        ({"offload": "nvme:"}, "offload='nvme:'"),
        ({"offload": 1}, "offload=1"),
        ({"offload": lambda: Offload("cpu", on_device=1.5)}, "on_device=1.5"),
        ({"offload": lambda: Offload("cpu", on_device="free")}, "on_device='free' on cpu"),
        ({"bucket_bytes": 0}, "bucket_bytes=0"),
    ],
)
def test_what_does_not_fit_is_refused(asked: dict[str, Any], said: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigError) as error:
        zero(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            **{name: value() if callable(value) else value for name, value in asked.items()},
        )
    assert said in str(error.value)
