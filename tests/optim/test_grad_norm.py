"""The gradient norm and the clipped gradients of a sharded model equal those of the plain model."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from shardformer.comm.collectives import gather_full_tensor
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.gradients.clipping import clip_grad_norm_, grad_norm
from shardformer.layout.sharding_metadata import get_shard_specs
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import Experts, LayerStack
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory
from tests.pools import WorkerPools


def _clip(family: str, norm_type: float, max_norm: float) -> tuple[float, float, float, int]:
    context = ParallelContext.from_default_process_group({})
    plain = SmallModelFactory(family)().double().train()
    model = shard_model(deepcopy(plain), context=context)
    batch = RandomBatchFactory(SmallModelFactory(family).head_class)(0)
    for m in (plain, model):
        m(**batch).loss.backward()
    want = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type))
    with CollectiveRecorder(context) as recorder:
        got = float(clip_grad_norm_(model, max_norm, norm_type))
    specs, grads = get_shard_specs(model), {n: p.grad for n, p in plain.named_parameters()}
    worst = 0.0
    for name, p in model.named_parameters():
        assert p.grad is not None and grads[name] is not None
        worst = max(worst, float((gather_full_tensor(p.grad, specs[name], context.axis) - grads[name]).abs().max()))
    return got, want, worst, len(recorder.calls)


@pytest.mark.reduced(at_most=4)
@pytest.mark.parametrize("family", ["gpt2", "llama"])  # tied weights; KV heads that ranks share
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
def test_clipping_equals_torch_on_the_plain_model(pools: WorkerPools, family: str, norm_type: float) -> None:
    for got, want, worst, calls in pools(4).run(_clip, family, norm_type, 0.01):
        assert got == pytest.approx(want, rel=2e-6) and want > 0.01
        assert worst < 1e-6 * want
        assert calls == 1


class Bank(nn.Module):
    """Experts with stacked weights. Each expert processes every token."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 10, 8)), nn.Parameter(torch.randn(3, 8, 10))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("besw,ehw->bsh", torch.einsum("bsh,ewh->besw", x, self.up).relu(), self.down)


class _OfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"experts": Bank()}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer.get_submodule("experts")(x)
        return x


class _ExpertsPolicy(RolePolicy):
    stack = LayerStack("layers", [Experts("experts", "up", "down")])


def test_norm_of_a_model_without_parallel_layers() -> None:
    plain, x = _OfExperts(), torch.randn(2, 5, 8)
    models = [deepcopy(plain), deepcopy(plain)]
    plain(x).square().mean().backward()

    def clip(context: ParallelContext) -> float:
        model = shard_model(models[context.tensor.rank], _ExpertsPolicy, context=context)
        model(x).square().mean().backward()
        return float(clip_grad_norm_(model, 0.01))

    want = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01))
    assert run_as_threads(clip, tensor=2) == pytest.approx([want, want], rel=1e-6)


def _nonfinite() -> str:
    model = torch.nn.Linear(2, 2)
    model(torch.full((1, 2), math.nan)).sum().backward()
    try:
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        return str(error)
    return ""


def test_error_if_nonfinite_raises() -> None:
    assert "nan" in _nonfinite()


def test_norm_without_gradients_is_zero() -> None:
    assert float(grad_norm(torch.nn.Linear(2, 2))) == 0.0
