"""Fused norms and activations: unknown modules are reported, or refused if nothing can be fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardformer
from shardformer.comm.collectives import gather_full_tensor
from shardformer.errors import ConfigError
from shardformer.layout.sharding_metadata import get_shard_specs
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.policies.policy import Policy
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, AttentionProjections, LayerStack
from shardformer.sharding.checks import WRITTEN_OUT, check_can_fuse_activations, check_can_fuse_norms
from tests.policies.toy import HIDDEN, FeedForward, SelfAttention, ToyLM, ToyPolicy, toy_batch, toy_loss


class DoubledNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class NormedAttention(SelfAttention):
    """Attention with a norm over all heads of q."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.q = nn.Sequential(self.q, self.q_norm)


class Activated(FeedForward):
    def __init__(self, *activations: nn.Module) -> None:
        super().__init__()
        self.acts = nn.ModuleList(activations)

    def act(self, x: Tensor) -> Tensor:
        for activation in self.acts:
            x = activation(x)
        return x


class NormedPolicy(RolePolicy):
    stack = LayerStack(
        "layers",
        [
            Attention(
                "attn",
                AttentionProjections(q="q.0", k="k", v="v", out="o"),
                local_attrs={"q.1": "heads", "num_heads": "heads"},
            ),
            MLP("mlp", up="fc1", down="fc2"),
        ],
        final_norm="norm",
    )
    embeddings, head, num_heads = "embed", "head", ToyPolicy.num_heads


def toy(change: Callable[[Any], None]) -> ToyLM:
    torch.manual_seed(0)
    model = ToyLM()
    for layer in model.layers:
        change(layer)
    return model.double()


def check(change: Callable[[Any], None], policy: type[Policy] = ToyPolicy, **options: bool) -> str:
    """Check that the toy model with ``options`` on two ranks trains like the plain one. Returns its description."""
    plain, models = toy(change), [toy(change) for _ in range(2)]
    expected = toy_loss(plain, toy_batch(0))
    expected.backward()

    def train(context: ParallelContext) -> str:
        arguments: dict[str, Any] = options
        model = shardformer.shard_model(models[context.tensor.rank], policy, context=context, **arguments)
        loss, specs = toy_loss(model, toy_batch(0)), get_shard_specs(model)
        loss.backward()
        torch.testing.assert_close(loss, expected)
        for (name, param), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert param.grad is not None
            torch.testing.assert_close(gather_full_tensor(param.grad, specs[name], context.axis), theirs.grad, msg=name)
        return str(shardformer.describe_sharding(model))

    return run_as_threads(train, tensor=2)[0]


def with_norm_over_heads(layer: Any) -> None:
    layer.attn = NormedAttention()
    del layer.attn.q_norm


def with_doubled_norm(layer: Any) -> None:
    layer.norm1 = DoubledNorm(HIDDEN)


def test_sharded_norm_is_not_fused_and_reported() -> None:
    said = check(with_norm_over_heads, NormedPolicy, enable_fused_normalization=True)
    assert "Norms that are not fused: 2 ShardedNorm (its statistics are summed over ranks)." in said
    assert "FusedLayerNorm" in said


def test_unknown_norm_is_not_fused_and_reported() -> None:
    said = check(with_doubled_norm, enable_fused_normalization=True)
    assert "2 DoubledNorm (not a layer norm or RMS norm over the last dim)." in said


def test_model_without_a_supported_norm_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), DoubledNorm(4))
    with pytest.raises(ConfigError, match="cannot replace a DoubledNorm"):
        check_can_fuse_norms(model)


def test_fused_activations_are_reported() -> None:
    def change(layer: Any) -> None:
        layer.mlp = Activated(nn.GELU(), nn.Mish())

    assert "Fused into one kernel: 2 bias and GELU." in check(change, enable_jit_fused=True)


def test_model_without_a_known_activation_is_refused() -> None:
    def change(layer: Any) -> None:
        layer.mlp = Activated(nn.Mish())

    for layers in (change, lambda layer: None):
        with pytest.raises(ConfigError, match="ToyLM has no GELU, SiLU or ReLU module"):
            check(layers, enable_jit_fused=True)


def test_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    with pytest.raises(ConfigError, match="triton"):
        check_can_fuse_activations(model, torch.device("cuda"))
    check_can_fuse_activations(model, torch.device("cpu"))


WRITTEN = {
    **dict.fromkeys(("NewGELUActivation", "AccurateGELUActivation", "FastGELUActivation"), "transformers.activations"),
    "BloomGelu": "transformers.models.bloom.modeling_bloom",
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_torch_kernel_equals_the_explicit_activation(name: str) -> None:
    """BLOOM and fast GELU round sqrt(2 / pi) to 8 and 10 digits, below the precision of fp32."""
    native = getattr(pytest.importorskip(WRITTEN[name]), name)()
    grid = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    ours, theirs = (grid.clone().requires_grad_() for _ in range(2))
    nn.GELU("tanh")(ours).sum().backward()
    native(theirs).sum().backward()
    bound = 1e-12 if name in ("NewGELUActivation", "AccurateGELUActivation") else 5e-9
    torch.testing.assert_close(nn.GELU("tanh")(grid), native(grid), rtol=0, atol=bound)
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=bound)
