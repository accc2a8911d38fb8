"""Optimizers that need full matrices: each parameter is on one rank, and weights equal one process."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer

from shardformer.comm.recorder import CollectiveRecorder
from shardformer.errors import ConfigError
from shardformer.gradients.buckets import GradientSlot
from shardformer.layout.sharding_metadata import get_sharding_metadata
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.shard_model_api import shard_model
from shardformer.weights.state_dict import full_state_dict
from shardformer.zero.elementwise_trial import requires_full_matrices
from shardformer.zero.optimizers import LAMB, LARS
from shardformer.zero.shard_optimizer import shard_optimizer
from shardformer.zero.zero_optimizer import ZeroOptimizer
from tests.optim.test_zero import CLIP, SEQUENCE, Job, Weights

Make = Callable[[nn.Module], list[Optimizer]]


def muon(model: nn.Module) -> list[Optimizer]:
    """Muon for the matrices of the layers, and AdamW for other parameters."""
    names = dict(model.named_parameters())
    tables = ("embed", "head", "wte", "wpe", "shared")
    matrices = [p for name, p in names.items() if p.dim() == 2 and not any(word in name for word in tables)]
    chosen = {id(p) for p in matrices}
    rest = [p for p in names.values() if id(p) not in chosen]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]


class Orthogonal(Optimizer):
    """An optimizer similar to Muon, in the precision of the model, that ZeRO does not know by name."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            left, size, right = torch.linalg.svd(p.grad if p.dim() == 2 else p.grad[None], full_matrices=False)
            p.sub_(0.01 * (left * (size > 1e-6 * size[0]) @ right).view_as(p))


MAKERS: dict[str, Make] = {
    "orthogonal": lambda model: [Orthogonal(model.parameters())],
    "Muon": muon,
    "Adafactor": lambda model: [torch.optim.Adafactor(model.parameters(), lr=0.02)],
    "transformers' Adafactor": lambda model: [
        transformers.Adafactor(model.parameters(), lr=0.02, scale_parameter=True, relative_step=False)
    ],
    "LAMB": lambda model: [LAMB(model.parameters(), lr=0.02)],
    "LARS": lambda model: [LARS(model.parameters(), lr=2.0, weight_decay=0.01)],
}


def plainly(job: Job, make: Make, clips: bool = True) -> Weights:
    model = job.build()
    optimizers = make(model)
    for step in range(4):
        for rank in range(job.data):
            (job.loss(model, step, 0, rank) / job.data).backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return model.state_dict()


def with_zero(job: Job, make: Make, clips: bool = True) -> list[Weights]:
    models = [job.build() for _ in range(job.data * job.tensor)]

    def train(context: ParallelContext) -> Weights:
        model = shard_model(models[context.rank], context=context, **job.options)
        optimizer = shard_optimizer(model, make(model), stage=job.stage, max_grad_norm=CLIP if clips else None)
        for step in range(4):
            job.loss(model, step, 0, context.data.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_state_dict(model)

    return run_as_threads(train, data=job.data, tensor=job.tensor)


@pytest.mark.reduced(at_most=3)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_matrix_optimizers_over_data_ranks_equal_one_process_bitwise(name: str, stage: int) -> None:
    job = Job(stage=stage)
    want = plainly(job, MAKERS[name], clips=False)
    for weights in with_zero(job, MAKERS[name], clips=False):
        assert all(torch.equal(weights[key], value) for key, value in want.items())


@pytest.mark.reduced(one_in=2, at_most=2, keep=("LARS-job1-1e-09",))
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "job", "bound"),
    [
        ("LAMB", Job(tensor=2, stage=1), 1e-5),
        ("LARS", Job("t5", data=1, tensor=4, stage=0), 1e-9),
        ("Adafactor", Job("gpt2", tensor=2, stage=2, options=SEQUENCE), 1e-5),
        ("transformers' Adafactor", Job(tensor=4, stage=1, options=SEQUENCE), 1e-5),  # ranks share KV heads
        ("Muon", Job(tensor=2, stage=2), 5e-2),  # which computes in bf16: another last bit is seen
        ("orthogonal", Job(tensor=2, stage=2), 1e-6),
        ("LAMB", Job("bert", tensor=2, stage=3), 1e-5),
        ("LARS", Job("llama", tensor=2, stage=3), 1e-8),
    ],
)
def test_sharded_matrices_are_gathered(name: str, job: Job, bound: float) -> None:
    want = plainly(job, MAKERS[name])
    for weights in with_zero(job, MAKERS[name]):
        for key, value in want.items():
            if value.is_floating_point():
                scale = value.abs().max().clamp(min=1e-2)
                assert float((weights[key].double() - value).abs().max() / scale) < bound, key


def test_wrapped_step_does_not_hide_the_kind_of_optimizer() -> None:
    """A scheduler may have wrapped ``step`` before, and the probe must not run hooks."""
    linear = nn.Linear(4, 4)
    optimizer = torch.optim.Adafactor(linear.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    ran: list[int] = []
    optimizer.register_step_post_hook(lambda *_: ran.append(1))
    assert requires_full_matrices(optimizer)
    assert ran == []


def test_stepping_slices_of_a_matrix_would_be_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradientSlot, "assign_to_owner_rank", lambda self, axis, holders=(): None)
    job = Job(tensor=2, stage=1)
    want = plainly(job, MAKERS["LAMB"])
    weights = with_zero(job, MAKERS["LAMB"])[0]
    key = "model.layers.0.mlp.up_proj.weight"
    assert float((weights[key] - want[key]).abs().max()) > 1e-5


def test_ranks_send_only_their_slices_of_a_sharded_matrix() -> None:
    """With N elements over data 2 x tensor 2, three ranks send N/2 each to the owner and receive N/2 each."""
    job = Job(tensor=2, stage=2)
    models = [job.build() for _ in range(4)]

    def sent(context: ParallelContext) -> tuple[dict[str, int], int]:
        model = shard_model(models[context.rank], context=context)
        optimizer = shard_optimizer(model, LAMB(model.parameters()), stage=2)
        with CollectiveRecorder(context) as recorder:
            job.loss(model, 0, 0, context.data.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        cut = [prod(e.spec.shape) for e in get_sharding_metadata(model).entries if e.spec.is_sharded]
        counted = {p: recorder.wire_bytes("all_to_all", purpose=p) for p in ("gradients", "parameters")}
        return counted, 8 * sum(cut)

    found = run_as_threads(sent, data=2, tensor=2)
    for purpose in ("gradients", "parameters"):
        # each rank records four times what it sent, so the mean is the total; counts are sent in addition
        total, cut = sum(counted[purpose] for counted, _ in found) / 4, found[0][1]
        assert 1.49 * cut < total < 1.6 * cut, purpose


def test_optimizer_state_is_balanced_over_ranks() -> None:
    job = Job(stage=1)
    models = [job.build() for _ in range(2)]

    def kept(context: ParallelContext) -> int:
        model = shard_model(models[context.rank], context=context)
        own = LAMB(model.parameters())
        shard_optimizer(model, own, stage=1)
        return sum(p.numel() for group in own.param_groups for p in group["params"])

    first, second = run_as_threads(kept, data=2)
    total = sum(p.numel() for p in models[0].parameters())
    assert first + second == total and max(first, second) < 0.6 * total


class Coupled(Optimizer):
    """Optimizer that divides by the norm of all gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in params]).norm()  # type: ignore[union-attr]
        for p in params:
            p.sub_(p.grad / total)  # type: ignore[operator]


def test_optimizer_with_coupled_parameters_is_rejected() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(
        ConfigError,
        match=r"Coupled cannot be sharded, because its update of one parameter depends on other parameters",
    ):
        shard_optimizer(model, Coupled(model.parameters()))


class Noisy(Optimizer):
    """SGD with noise, as in Langevin dynamics."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad + torch.randn_like(p))


def test_optimizer_with_random_updates_is_rejected() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(
        ConfigError, match=r"Noisy cannot be sharded, because its updates are random: two identical runs differ by"
    ):
        shard_optimizer(model, Noisy(model.parameters()))


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop", "NAdam", "RAdam", "Adamax", "Adagrad", "Rprop"])
def test_elementwise_optimizers_get_slices(kind: str) -> None:
    made: Optimizer = getattr(torch.optim, kind)(nn.Linear(2, 2).parameters(), lr=0.1)
    assert not requires_full_matrices(made)


def test_invalid_lr_of_lamb_and_lars_is_rejected() -> None:
    with pytest.raises(ConfigError, match="lr must be greater than 0, but got 0"):
        LAMB([torch.zeros(2)], lr=0)


def test_lamb_and_lars_follow_their_papers() -> None:
    """Compare with one step computed by hand."""
    start, grad = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.6, -0.8]])

    def stepped(kind: Any, **how: Any) -> Tensor:
        p = nn.Parameter(start.clone())
        p.grad = grad.clone()
        kind([p], **how).step()
        return p.detach()

    direction = torch.tensor([[1.0, -1.0]])  # Adam's first step
    want = start - 0.1 * 5 / 2**0.5 * direction
    assert torch.allclose(stepped(LAMB, lr=0.1, weight_decay=0.0), want, atol=1e-5)
    assert torch.allclose(stepped(LARS, lr=1.0, trust=0.1), start - 0.1 * 5 * grad, atol=1e-6)


def test_existing_state_of_a_full_matrix_moves_to_its_owner() -> None:
    model = nn.Linear(4, 4).double()
    own = torch.optim.Adafactor(model.parameters(), lr=0.01)
    model(torch.ones(2, 4).double()).sum().backward()
    own.step()
    reference = nn.Linear(4, 4).double()
    reference.load_state_dict(model.state_dict())
    ours: ZeroOptimizer = shard_optimizer(model, own)
    other = torch.optim.Adafactor(reference.parameters(), lr=0.01)
    reference(torch.ones(2, 4).double()).sum().backward()
    other.step()
    reference.load_state_dict(model.state_dict())
    for net_, optimizer in ((model, ours), (reference, other)):
        optimizer.zero_grad()
        net_(torch.ones(2, 4).double()).square().sum().backward()
        optimizer.step()
    assert torch.equal(model.weight, reference.weight)
