"""Errors for models without a policy state the reason, and their suggestions work."""

from __future__ import annotations

import copy
import re
import textwrap
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import shardformer
from shardformer.discovery.derive_policy import PolicyDerivationError
from shardformer.errors import PolicyError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.tensor_parallel.layers import Linear1D_Col

pytestmark = pytest.mark.slow


class Fed(nn.Module):
    """An MLP between an embedding and a head, with unknown input names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 12)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 24), nn.GELU(approximate="tanh"), nn.Linear(24, 12)) for _ in range(2)
        )
        self.head = nn.Linear(12, 32)

    def forward(self, words_of_text: Tensor, scale: Tensor) -> Tensor:
        x = self.embed(words_of_text)
        for layer in self.layers:
            x = x + scale[:, None, None] * layer(x)
        out: Tensor = self.head(x)
        return out


class Convolved(nn.Module):
    """A model without linear layers that feed each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = pixel_values
        for layer in self.layers:
            x = x + layer(x)
        return x


class Attending(nn.Module):
    """A layer that is an attention module with its residual, optionally followed by an MLP.

    Args:
        heads: shape of the heads for unflatten.
    """

    def __init__(self, heads: tuple[int, int], up: int) -> None:
        super().__init__()
        self.sizes = heads
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(24, up), nn.ReLU(), nn.Linear(up, 24)) if up else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, self.sizes).transpose(1, 2) for part in (self.q(x), self.k(x), self.v(x)))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x if self.mlp is None else x + self.mlp(x)


class AttentionModel(nn.Module):
    def __init__(self, heads: tuple[int, int], up: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 24)
        self.layers = nn.ModuleList(Attending(heads, up) for _ in range(2))

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


def shard(model: nn.Module) -> Any:
    return run_as_threads(lambda context: shardformer.shard_model(model, context=context), tensor=2)


def test_the_error_for_unknown_inputs_shows_a_working_call() -> None:
    torch.manual_seed(0)
    model = Fed()
    with pytest.raises(PolicyError) as error:
        shard(model)
    line = re.search(r"policy = (.*)", str(error.value))
    assert (
        line is not None and line[1] == 'shardformer.derive_policy(model, batch={"words_of_text": ..., "scale": ...})'
    )
    batch = {"words_of_text": torch.randint(0, 32, (2, 5)), "scale": torch.rand(2)}
    policy = shardformer.derive_policy(model, batch=batch)
    expected = model(**batch)

    def train(context: ParallelContext) -> Tensor:
        output: Tensor = shardformer.shard_model(fed_like(model), type(policy), context=context)(**batch)
        return output.detach()

    for output in run_as_threads(train, tensor=2, one_at_a_time=True):
        assert torch.allclose(torch.as_tensor(output), expected, atol=1e-6)


class ByOneInput(nn.Module):
    """A sequence of layers as a model whose argument has an unknown name."""

    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 24), nn.GELU(approximate="tanh"), nn.Linear(24, 12)) for _ in range(2)
        )

    def forward(self, readings: Tensor) -> Tensor:
        x = self.first(readings)
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.last(x)
        return out


@pytest.mark.parametrize(
    ("first", "batch"),
    [
        (nn.Embedding(32, 12), torch.randint(0, 32, (2, 5))),
        (nn.Linear(7, 12), torch.randn(3, 7)),
        (nn.Sequential(nn.Conv2d(3, 12, 4), nn.Flatten(2), nn.AdaptiveAvgPool1d(12)), torch.randn(2, 3, 9, 9)),
    ],
    ids=["tokens", "features", "images"],
)
def test_the_only_argument_of_a_model_needs_no_known_name(first: nn.Module, batch: Tensor) -> None:
    torch.manual_seed(0)
    model = ByOneInput(first, nn.Linear(12, 5))
    expected = model(batch)

    def compute(context: ParallelContext) -> tuple[Tensor, type]:
        sharded: Any = shardformer.shard_model(copy.deepcopy(model), context=context)
        return sharded(batch).detach(), type(sharded.layers[0][0])

    for output, layer_class in run_as_threads(compute, tensor=2, one_at_a_time=True):
        assert torch.allclose(output, expected, atol=1e-6)
        assert layer_class is Linear1D_Col


def test_a_model_that_accepts_no_generated_input_asks_for_a_batch() -> None:
    model = ByOneInput(nn.Bilinear(3, 3, 12), nn.Linear(12, 5))
    with pytest.raises(
        PolicyError, match=r"(?s)ShardFormer cannot generate example inputs .*forward\(readings\).*batch="
    ):
        shard(model)


def fed_like(model: nn.Module) -> nn.Module:
    copied = Fed()
    copied.load_state_dict(model.state_dict())
    return copied


def test_printed_source_with_notes_is_valid_python() -> None:
    source = str(
        shardformer.derive_policy(Fed(), batch={"words_of_text": torch.randint(0, 32, (2, 5)), "scale": torch.rand(2)})
    )
    names: dict[str, Any] = {}
    exec(source, names)
    assert source.startswith("# The policy was derived") and issubclass(
        names["MyPolicy"], shardformer.policies.RolePolicy
    )


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("kind", ["mamba", "convolutions"])
def test_the_error_without_shardable_layers_lists_alternatives(kind: str) -> None:
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=32, state_size=4)
    with pytest.raises(PolicyError) as error:
        shard(transformers.MambaForCausalLM(config) if kind == "mamba" else Convolved())
    message = str(error.value)
    assert "can be sharded over tensor=2 by tensor parallelism" in message and "No layer of" in message
    assert "launch_from_torch(data=2)" in message and "stage=3" in message and "pipe" in message.lower()
    assert "Attention(" not in message


def test_other_errors_show_an_example_policy() -> None:
    class Odd(nn.Module):
        def forward(self, pixel_values: Tensor) -> Tensor:
            return pixel_values.missing  # type: ignore[attr-defined, no-any-return]

    with pytest.raises(
        PolicyDerivationError, match=r"(?s)none could be derived.*class MyPolicy\(RolePolicy\)"
    ) as error:
        shard(Odd())
    assert error.value.reason and f"none could be derived: {error.value.reason}" in error.value.what


def test_the_error_quotes_the_failing_line_and_the_closest_policy() -> None:
    with pytest.raises(PolicyError) as error:
        shard(AttentionModel((3, 8)))
    message = str(error.value)
    assert re.search(
        r"Provided sizes \[3, 8\] .*, in \S*test_suggestions.py, line \d+: `q, k, v = .*self.sizes", message
    )
    names: dict[str, Any] = {}
    exec(
        textwrap.dedent(
            message[message.index("    from shardformer.policies import") : message.index("To save memory")]
        ),
        names,
    )
    # as the note suggests: -1 for the number of heads
    assert_equals_one_process(AttentionModel((-1, 8)), names["MyPolicy"])


def test_notes_quote_the_failing_line_and_the_closest_role() -> None:
    notes = " ".join(shardformer.derive_policy(AttentionModel((3, 8), up=40)).notes)
    assert re.search(
        r"Replicated, because .*test_suggestions.py, line \d+: .*self.sizes.*: layers.\*.q, layers.\*.k", notes
    )
    assert 'The closest role for layers: Attention("", AttentionProjections(out="o", q="q", k="k", v="v")' in notes


def test_uncounted_heads_are_derived_from_their_features() -> None:
    policy = shardformer.derive_policy(AttentionModel((-1, 4)))
    assert "num_heads=6" in str(policy)
    assert_equals_one_process(AttentionModel((-1, 4)), type(policy), ranks=3)
    named = AttentionModel((-1, 4))
    for layer in named.layers:
        layer.head_dim = 4
    assert "num_heads=6" in str(shardformer.derive_policy(named))  # instead of 4, the value of head_dim


def assert_equals_one_process(model: AttentionModel, policy: type[shardformer.policies.Policy], ranks: int = 2) -> None:
    ids = torch.randint(0, 32, (2, 5))
    expected, models = model(ids), [copy.deepcopy(model) for _ in range(ranks)]

    def train(context: ParallelContext) -> Tensor:
        sharded = shardformer.shard_model(models[context.tensor.rank], policy, context=context)
        assert "Linear1D_Col" in str(shardformer.describe_sharding(sharded))
        output: Tensor = sharded(ids)
        return output.detach()

    for output in run_as_threads(train, tensor=ranks):
        assert torch.allclose(torch.as_tensor(output), expected, atol=1e-5)
