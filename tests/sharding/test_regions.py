"""Sequence parallelism around experts, and stacks that do not support it."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardformer.comm.recorder import CollectiveRecorder
from shardformer.discovery.derive_policy import derive_policy
from shardformer.errors import ConfigError
from shardformer.layout.sharding_metadata import get_shard_specs
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.layer_sequence import SequenceParallelHints
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Experts, LayerStack
from shardformer.shard_model_api import shard_model
from tests.optim.test_grad_norm import Bank
from tests.sharding.test_shared import AttentionsOnly, AttentionsOnlyPolicy


class ExpertsLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Bank()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.as_tensor(self.experts(x))


class OfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ExpertsLayer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ExpertsPolicy(RolePolicy):
    stack = LayerStack("layers", [Experts("experts", "up", "down")])


def test_layer_that_is_itself_a_block_is_refused() -> None:
    models = [AttentionsOnly() for _ in range(2)]

    def shard(context: ParallelContext) -> None:
        shard_model(
            models[context.tensor.rank], AttentionsOnlyPolicy(), context=context, enable_sequence_parallelism=True
        )

    with pytest.raises(ConfigError, match=r"is itself an attention module or MLP"):
        run_as_threads(shard, tensor=2)


@pytest.mark.parametrize("length", [8, 9, 11])
@pytest.mark.parametrize("ranks", [2, 3])
def test_experts_receive_the_tokens_of_all_ranks(length: int, ranks: int) -> None:
    torch.manual_seed(0)
    plain = OfExperts().double()
    x = torch.randn(2, length, 8, dtype=torch.float64)
    expected = plain(x)
    expected.square().sum().backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    models = [copy.deepcopy(plain) for _ in range(ranks)]

    def compute(context: ParallelContext) -> None:
        model = models[context.tensor.rank]
        shard_model(model, ExpertsPolicy(), context=context, enable_sequence_parallelism=True).zero_grad()
        with CollectiveRecorder(context) as recorder:
            out = model(x)
            out.square().sum().backward()
        torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-8)
        specs = get_shard_specs(model)
        for name, param in model.named_parameters():
            own = specs[name].slice_full_tensor(gradients[name], {"tensor": context.tensor.rank})
            torch.testing.assert_close(param.grad, own, rtol=1e-11, atol=1e-8)
        assert recorder.count("all_reduce", purpose="block") == 0, "gathers and scatters alone"

    run_as_threads(compute, tensor=ranks)


class BiasedBank(Bank):
    """Experts with a bias of ``down``, as in gpt-oss."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias.sum(0)


class BiasedExpertsPolicy(RolePolicy):
    stack = LayerStack("layers", [Experts("experts", "up", "down", replicated_terms=["bias"])])
    keep_replicated = ("layers.*.experts.bias",)


@pytest.mark.parametrize("cuts", [False, True])
def test_expert_bias_is_added_once(cuts: bool) -> None:
    torch.manual_seed(0)
    plain = OfExperts()
    for layer in plain.layers:
        layer.experts = BiasedBank()
    plain.double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    expected = plain(x)
    expected.square().sum().backward()
    gradients = {name: p.grad for name, p in plain.named_parameters() if name.endswith("bias")}
    models = [copy.deepcopy(plain) for _ in range(2)]

    def compute(context: ParallelContext) -> None:
        model = models[context.tensor.rank]
        shard_model(model, BiasedExpertsPolicy(), context=context, enable_sequence_parallelism=cuts).zero_grad()
        out = model(x)
        out.square().sum().backward()
        torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-8)
        for name, expected_gradient in gradients.items():
            torch.testing.assert_close(model.get_parameter(name).grad, expected_gradient, rtol=1e-11, atol=1e-8)

    run_as_threads(compute, tensor=2)


@pytest.mark.slow
@pytest.mark.reduced(one_in=4, at_most=1)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe", "deepseek_v3"])
def test_experts_work_with_sequence_parallelism(family: str) -> None:
    config = transformers.AutoConfig.for_model(family)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    policy = derive_policy(model)
    assert policy.no_sequence_parallel is None


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.down(self.up(x).relu()))


class Conditioned(nn.Module):
    """A layer with one argument per token and one for all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.time, self.gate = Feed(), Feed(), nn.Linear(6, 6)

    def forward(self, x: Tensor, of_tokens: Tensor, of_all: Tensor) -> Tensor:
        return x + torch.as_tensor(self.mlp(x)) * self.gate(of_tokens) * (1 + self.time(of_all))


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Conditioned() for _ in range(3))

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        of_tokens = self.given(x)
        for layer in self.layers:
            x = checkpoint(layer, x, of_tokens, step, use_reentrant=False)
        return x


class DiffusionPolicy(RolePolicy):
    stack = LayerStack(
        "layers",
        [MLP("mlp", "up", "down"), MLP("time", "up", "down")],
        sequence=SequenceParallelHints(per_token_args=["of_tokens"], token_free_modules=["time"]),
    )
    keep_replicated = ("layers.*.gate",)


@pytest.mark.parametrize("lengths", [(9, 14), (8, 9)])
def test_additional_arguments_are_sharded_with_checkpointing_too(
    lengths: tuple[int, int],
) -> None:
    torch.manual_seed(0)
    plain = Diffusion().double()
    batches = [(torch.randn(2, n, 6).double(), torch.randn(1, 6).double()) for n in lengths]

    def train(model: nn.Module) -> None:
        """Run both forward passes before the backward pass, which recomputes the layers."""
        torch.stack([model(*batch).square().mean() for batch in batches]).sum().backward()

    alone = copy.deepcopy(plain)
    train(alone)
    expected = {name: p.grad for name, p in alone.named_parameters()}

    def compute(context: ParallelContext) -> None:
        model = copy.deepcopy(plain)
        shard_model(model, DiffusionPolicy(), context=context, enable_sequence_parallelism=True)
        train(model)
        specs = get_shard_specs(model)
        for name, param in model.named_parameters():
            whole = expected[name]
            assert whole is not None and param.grad is not None
            own = specs[name].slice_full_tensor(whole, {"tensor": context.tensor.rank})
            torch.testing.assert_close(param.grad, own, rtol=0, atol=1e-12)

    run_as_threads(compute, tensor=2)
