"""Compiled layers draw the dropout masks of eager layers, also where the random state differs between ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardformer
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.random_state import LocalRNGState
from shardformer.sharding.compiled_layers import get_layer_stack_compilers
from shardformer.sharding.graph_random_state import compile_with_rng_state
from shardformer.torch_compat import resolve_compile_backend
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory
from tests.compile.test_layers import BACKEND, BOUND, SEQUENCE, worst_difference

pytestmark = [
    pytest.mark.slow,  # compiles
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),
]

DROPOUT = {
    "gpt2": {"n_layer": 2, "resid_pdrop": 0.1, "attn_pdrop": 0.2, "embd_pdrop": 0.1},
    "bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2},
    "vit": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2},
    "t5": {"dropout_rate": 0.1},
}


@pytest.fixture(autouse=True)
def _forget_graphs() -> None:
    torch.compiler.reset()


def gradients_of(family: str, context: ParallelContext, *, checkpointing: bool, **options: Any) -> dict[str, Tensor]:
    """Return the losses of two steps and the gradients of their sum, and a number that is drawn after them."""
    torch.manual_seed(0)
    plain = SmallModelFactory(family, changes=DROPOUT[family])().double().train()
    model = shardformer.shard_model(plain, context=context, **options)
    if checkpointing:
        model.gradient_checkpointing_enable()
    torch.manual_seed(3)
    found = {}
    for step in range(2):
        batch = RandomBatchFactory(DEFAULT_HEAD[family])(step)
        batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        found[f"loss {step}"] = loss.detach()
    if options.get("compile"):
        assert all(stack.graphs for stack in get_layer_stack_compilers(model))
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**found, "next number": torch.rand((), dtype=torch.float64)}


def compare(
    context: ParallelContext, family: str, backend: str = BACKEND, checkpointing: bool = False, **o: Any
) -> float:
    return worst_difference(
        gradients_of(family, context, checkpointing=checkpointing, compile=backend, **o),
        gradients_of(family, context, checkpointing=checkpointing, **o),
    )


@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("gpt2", {"tensor": 2}, {}),
        pytest.param("bert", {"tensor": 2}, SEQUENCE, marks=pytest.mark.full),
        pytest.param("vit", {"tensor": 2}, {}, marks=pytest.mark.full),
        pytest.param("t5", {"tensor": 2}, {}, marks=pytest.mark.full),
        pytest.param("gpt2", {"tensor": 3}, {"checkpointing": True}, marks=pytest.mark.full),
        pytest.param("gpt2", {"sequence": 2}, {}, marks=pytest.mark.full),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_masks_are_those_of_eager_layers(family: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    found = run_as_threads(lambda context: compare(context, family, **options), one_at_a_time=True, **sizes)
    assert max(found) < BOUND


@pytest.mark.full
@pytest.mark.above_budget("inductor compiles C++ code")
def test_masks_of_inductor_are_those_of_eager_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    found = run_as_threads(lambda context: compare(context, "gpt2", "inductor"), one_at_a_time=True, tensor=2)
    assert max(found) < BOUND


def _draw_in_every_way(x: Tensor, state: LocalRNGState) -> tuple[Tensor, ...]:
    outer = F.dropout(x, 0.3)
    state.enter_local_rng_state(x)
    inner = F.dropout(x, 0.3) + torch.empty_like(x).bernoulli_(0.4) + torch.rand(3, 5)
    with state.use_outer_rng_state():
        shared = torch.randn_like(x) + torch.randint(9, (3, 5))
    again = F.alpha_dropout(x, 0.2)
    state.exit_local_rng_state()
    attention = F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)
    transposed = F.dropout(x.t(), 0.4) @ torch.ones(3, 2, dtype=x.dtype)
    return outer, inner, shared, again, attention, F.dropout1d(x, 0.5), F.dropout(x.t().sin(), 0.4).clone(), transposed


def test_every_random_operator_draws_what_it_draws_in_eager_code() -> None:
    state = LocalRNGState(1)
    state.is_in_graph = True

    def results(function: Any) -> list[Tensor]:
        torch.manual_seed(5)
        x = torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5).requires_grad_()
        out = function(x, state)
        sum((y * torch.linspace(0, 1, y.numel()).view(y.shape)).sum() for y in out).backward()
        return [*out, x.grad, torch.rand(3)]

    def backend(graph: Any, inputs: Any) -> Any:
        compiler = resolve_compile_backend(BACKEND, None, None, None)
        return compile_with_rng_state(graph, inputs, compiler, torch.device("cpu"))

    expected = results(_draw_in_every_way)
    found = results(torch.compile(_draw_in_every_way, backend=backend, fullgraph=True))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
