"""User policies are validated on a copy of the model before sharding; errors name the wrong role."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

import shardformer
from shardformer.discovery import reduced_model, user_policy_validation, validation
from shardformer.discovery import user_policy_validation as given
from shardformer.errors import PolicyError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.policies.families import LlamaPolicy
from shardformer.policies.legacy import Col_Layer
from shardformer.policies.module_descriptions import ModulePolicyDescription, SubModuleReplacementDescription
from shardformer.policies.policy import Policy
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, AttentionProjections, LayerStack
from shardformer.shard_model_api import shard_model
from shardformer.tensor_parallel.layers import Linear1D_Col, Linear1D_Row
from shardformer.verify.small_models import SmallModelFactory
from tests.policies.toy import HIDDEN, WIDTH, FeedForward, SelfAttention, ToyLM, ToyPolicy
from tests.test_bad_input import OnlyMLP, Refusal, Written, refusal_of, refused
from tests.verify.tower import Tower, TowerPolicy

COUNTS = {"num_heads": "heads"}
ATTENTION = Attention("attn", AttentionProjections(q="q", k="k", v="v", out="o"), local_attrs=COUNTS)
FEED_FORWARD = MLP("mlp", up="fc1", down="fc2")


def table(*blocks: Any, **fields: Any) -> type[RolePolicy]:
    return type("MyPolicy", (ToyPolicy,), {"stack": LayerStack("layers", blocks, final_norm="norm"), **fields})


def sharded(make: Callable[[], nn.Module], policy: Any, ranks: int = 2) -> list[str]:
    models = [make() for _ in range(ranks)]

    def shard(context: ParallelContext) -> str:
        return str(shardformer.describe_sharding(shard_model(models[context.tensor.rank], policy, context=context)))

    return run_as_threads(shard, tensor=ranks)


def refusals(make: Callable[[], nn.Module], policy: Any, ranks: int = 2) -> list[Refusal]:
    models = [make() for _ in range(ranks)]

    def refuse(context: ParallelContext) -> Refusal:
        model = models[context.tensor.rank]
        return refusal_of(lambda: shard_model(model, policy, context=context), model)

    return run_as_threads(refuse, tensor=ranks)


# ----------------------------------------------------------------------------------------------------------- wrong ones


class OtherMLP(FeedForward):
    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.between(self.fc1(x)))
        return out


class TornHeads(SelfAttention):
    """Attention with a literal head count and an inferred head size, which runs with any number of features."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (3, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        out: Tensor = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


def with_mlp(between: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = ToyLM()
        for layer in model.layers:
            layer.mlp = OtherMLP(between())
        return model

    return make


def with_attention(kind: type[SelfAttention]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = ToyLM()
        for layer in model.layers:
            layer.attn.__class__ = kind
        return model

    return make


class ColumnAlone(Policy):
    @staticmethod
    def argument_policy(model_config: Any, shard_config: int) -> dict[Any, Any]:
        return {FeedForward: shardformer.compat.Argument(param_funcs=[ColumnAlone.mlp_in])}

    @staticmethod
    def mlp_in() -> list[Any]:
        return [Col_Layer("fc1.weight", "fc1.bias")]


WRONG: dict[str, tuple[Callable[[], nn.Module], Any, Sequence[str]]] = {
    "q and o swapped": (
        ToyLM,
        table(Attention("attn", AttentionProjections(q="o", k="k", v="v", out="q"), local_attrs=COUNTS), FEED_FORWARD),
        ("the Attention 'attn' of MyPolicy alone, ToyLM does not run", "'layers.0.attn.q'", "last one as out"),
    ),
    "up and down swapped": (
        ToyLM,
        table(ATTENTION, MLP("mlp", up="fc2", down="fc1")),
        ("the MLP 'mlp' of MyPolicy alone, ToyLM does not run", "'layers.0.mlp.fc1'", "`up`"),
    ),
    "another number of heads": (
        ToyLM,
        table(ATTENTION, FEED_FORWARD, num_heads=10),
        ("the Attention 'attn'", "num_heads=10", "toy.py, line ", "self.num_heads, HEAD_DIM"),
    ),
    "no counts": (
        ToyLM,
        table(Attention("attn", AttentionProjections(q="q", k="k", v="v", out="o")), FEED_FORWARD),
        ("the Attention 'attn'", "The forward pass reads num_heads=5, which local_attrs does not list"),
    ),
    "heads that tear": (
        with_attention(TornHeads),
        table(Attention("attn", AttentionProjections(q="q", k="k", v="v", out="o")), FEED_FORWARD),
        ("the Attention 'attn' of MyPolicy alone, ToyLM ", "'layers.0.attn.o'"),
    ),
    "a norm in between": (
        with_mlp(lambda: nn.LayerNorm(WIDTH)),
        table(ATTENTION, FEED_FORWARD),
        ("the MLP 'mlp'", "'layers.0.mlp.between'", "a norm between them in `norm`"),
    ),
    "features that are mixed": (
        with_mlp(lambda: nn.Softmax(-1)),
        table(ATTENTION, FEED_FORWARD),
        ("the MLP 'mlp' of MyPolicy alone, ToyLM ", "'layers.0.mlp.fc2'"),
    ),
    "a column without a row": (
        ToyLM,
        Written("Layer", ("mlp.fc1", Linear1D_Col)),
        ("by Written over 2 ranks, ToyLM does not run", "Check layers.0.mlp.fc2", "shard both or neither"),
    ),
    "a row without a column": (
        ToyLM,
        Written("Layer", ("mlp.fc2", Linear1D_Row)),
        ("by Written over 2 ranks, ToyLM does not run", "Check layers.0.mlp.fc2", "shard both or neither"),
    ),
    "the first form": (ToyLM, ColumnAlone, ("by ColumnAlone over 2 ranks, ToyLM does not run", "'layers.0.mlp.fc2'")),
    "a model that takes numbers": (
        Tower,
        Written("Layer", ("mlp.up", Linear1D_Col)),
        ("by Written over 2 ranks, Tower does not run", "Check layers.0.mlp.down"),
    ),
}


@pytest.mark.reduced(at_most=5)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_policy_raises_before_sharding_and_names_the_role(name: str) -> None:
    make, policy, words = WRONG[name]
    refused(
        refusals(make, policy),
        PolicyError,
        "With a correct policy, a sharded copy of the model computes the same",
        *words,
    )


def test_a_wrong_gradient_of_an_output_layer_is_not_a_wrong_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*_: Any) -> None:
        raise validation.TrainingMismatchError("The gradient of layers.0.output.weight differs.")

    monkeypatch.setattr(validation, "compare_training", compare)
    words = "ToyLM trains differently: the gradient of layers.0.output.weight differs"
    refused(refusals(ToyLM, table(ATTENTION, FEED_FORWARD)), PolicyError, words)


def test_a_weight_that_gets_no_gradient_is_a_difference() -> None:
    torch.manual_seed(0)
    ids = torch.arange(12).view(2, 6)

    def shard(model: nn.Module, context: ParallelContext) -> None:
        shard_model(model, ToyPolicy, context=context).get_parameter("norm.weight").requires_grad_(False)

    reference = reduced_model.ReferenceGradients.from_model(ToyLM().double(), lambda model: model(ids))
    assert validation.validate_sharding(reference, shard, tensor=2) == (
        "the parameter norm.weight has a gradient in the unsharded model, but not in the sharded model"
    )


class TwoHeads(SelfAttention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HIDDEN // 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        out: Tensor = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


def test_a_policy_is_validated_over_the_actual_number_of_ranks() -> None:
    """num_heads=10 for a model with two heads happens to be correct over two ranks."""
    policy = table(Attention("attn", AttentionProjections(q="q", k="k", v="v", out="o")), FEED_FORWARD, num_heads=10)
    sharded(with_attention(TwoHeads), policy)
    refused(refusals(with_attention(TwoHeads), policy, ranks=3), PolicyError, "the Attention 'attn'", "num_heads=10")


# ----------------------------------------------------------------------------------------------------------- right ones


@pytest.mark.reduced(at_most=3)
@pytest.mark.parametrize(
    ("make", "policy"),
    [
        (ToyLM, ToyPolicy),
        (ToyLM, OnlyMLP),
        (ToyLM, Written("Layer", ("mlp.fc1", Linear1D_Col), kwargs={"gather_output": True})),
        (Tower, TowerPolicy),
        (lambda: ToyLM(tied=True), ToyPolicy),
        (with_mlp(lambda: nn.Softmax(-1)), table(ATTENTION, keep_replicated=("layers.*.mlp",))),
    ],
    ids=["all", "the MLP alone", "gathered", "numbers", "tied", "mixed and whole"],
)
def test_a_correct_policy_is_used_even_if_partial(make: Callable[[], nn.Module], policy: Any) -> None:
    for report in sharded(make, policy, ranks=3):
        assert "was not validated" not in report and "Linear1D_Col" in report


class Counting(ToyLM):
    """A layer whose output depends on the number of previous calls."""

    calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(ids) * self.calls


class Seeding(ToyLM):
    """A layer that seeds the random generator, which all threads share, in its forward pass."""

    def forward(self, ids: Tensor) -> Tensor:
        torch.manual_seed(0)
        return super().forward(ids) * torch.rand(1)


class Casting(ToyLM):
    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(ids)


class TwoTensors(ToyLM):
    """A model whose inputs cannot be guessed."""

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        return super().forward(ids) * weights[0, 0, 0]


class Replacing(Policy):
    """A policy that changes the model intentionally."""

    def module_policy(self) -> Mapping[Any, ModulePolicyDescription]:
        half = [SubModuleReplacementDescription("fc1", Linear1D_Col, {"gather_output": True})]
        return {
            "FeedForward": ModulePolicyDescription(method_replacement={"act": squared}, sub_module_replacement=half)
        }


def squared(self: nn.Module, x: Tensor) -> Tensor:
    return x.square()


@pytest.mark.parametrize(
    ("make", "policy", "why"),
    [
        (Counting, ToyPolicy, "The model is not deterministic: two forward passes with the same batch differ"),
        (Seeding, ToyPolicy, "The model draws random numbers"),
        (Casting, ToyPolicy, "The model computes in torch.bfloat16 internally"),
        (TwoTensors, ToyPolicy, "Cannot run a copy of TwoTensors"),
        (ToyLM, Replacing, "The policy contains user code, which may change the results: the method 'layers.0."),
    ],
)
def test_a_policy_that_cannot_be_validated_is_used_with_a_note(
    make: Callable[[], nn.Module], policy: type[Policy], why: str
) -> None:
    for report in sharded(make, policy):
        assert f"{policy.__name__} was not validated on a copy of the model: {why}" in " ".join(report.split())


def test_validation_can_be_disabled() -> None:
    make, policy, _ = WRONG["features that are mixed"]
    assert len(sharded(make, type("Meant", (policy,), {"validate": False}))) == 2


def test_a_policy_is_validated_once_for_identical_models(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    validate = user_policy_validation._validate_on_model_copy
    monkeypatch.setattr(given, "_validate_on_model_copy", lambda *args: (tried.append("once"), validate(*args))[1])
    policy = table(ATTENTION, FEED_FORWARD)
    sharded(ToyLM, policy)
    sharded(ToyLM, policy)
    assert tried == ["once"]
    sharded(lambda: ToyLM(num_layers=1), policy)
    assert tried == ["once"] * 2


def test_validation_keeps_hooks_and_random_states() -> None:
    seen: list[int] = []

    def make() -> nn.Module:
        model = ToyLM()
        model.norm.register_forward_hook(lambda *_: seen.append(1))
        return model

    models = [make(), make()]
    before = torch.get_rng_state()
    policy = table(ATTENTION, FEED_FORWARD)
    run_as_threads(lambda c: shard_model(models[c.tensor.rank], policy, context=c) and None, tensor=2)
    assert seen == [] and torch.equal(before, torch.get_rng_state())
    assert models[0].norm._forward_hooks


class Renamed(LlamaPolicy):
    """A user policy with the roles of the registered policy."""


class Softened(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).softmax(-1))
        return out


class SoftLlama(transformers.LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Softened(config)


def test_a_large_model_is_validated_on_a_reduced_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given, "SMALL_NUMEL", 0)
    config = SmallModelFactory("llama")().config
    for report in sharded(lambda: transformers.LlamaForCausalLM(config), Renamed):
        assert "was not validated" not in report
    words = ("the MLP 'mlp' of Renamed alone, SoftLlama ", "model.layers.0.mlp.down_proj")
    refused(refusals(lambda: SoftLlama(config), Renamed), PolicyError, *words)
    literal = type("Literal", (Renamed,), {"num_heads": config.num_attention_heads})
    for report in sharded(lambda: SoftLlama(config), literal):
        assert "Literal was not validated" in report and "more than 0 parameters" in report
