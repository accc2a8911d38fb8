"""Direct parameters of attention modules, heads whose width is read from the input, and replicated parameters."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardformer
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.discovery.reduced_model import ReferenceGradients
from shardformer.discovery.validation import validate_policy
from shardformer.errors import PolicyError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, AttentionInputs, AttentionProjections, LayerStack
from shardformer.shard_model_api import shard_model
from shardformer.tensor_parallel.layers import ShardedNorm

B, S, HIDDEN, HEADS = 2, 7, 30, 5


class Biased(nn.Module):
    """Has biases of q and v for a fused weight, a bias and a scale per head, and a table for all heads."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(HIDDEN)), nn.Parameter(torch.randn(HIDDEN))
        self.register_buffer("k_bias", torch.zeros(HIDDEN), persistent=False)
        self.table = nn.Parameter(torch.randn(2 * S - 1, HEADS))
        self.scale = nn.Parameter(torch.rand(HEADS, 1, 1))
        self.shift = nn.Parameter(torch.randn(HIDDEN // HEADS))
        self.norm = nn.LayerNorm(HIDDEN) if norm else nn.Identity()
        positions = torch.arange(S)
        self.register_buffer("index", positions[:, None] - positions[None, :] + S - 1, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        y = F.linear(x, self.qkv.weight, torch.cat((self.q_bias, self.k_bias, self.v_bias)))
        q, k, v = y.reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q + self.shift) @ k.transpose(-2, -1) * self.scale + self.table[self.index].permute(2, 0, 1)
        out: Tensor = self.out(self.norm((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c)))
        return out


class Layer(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.attn = Biased(norm)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 41), nn.GELU(), nn.Linear(41, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        out: Tensor = x + self.mlp(x)
        return out


class Model(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(norm) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


ATTENTION = Attention(
    "attn",
    AttentionProjections(qkv="qkv", q="q?", out="out"),
    local_attrs={
        "num_heads": "heads",
        "head_count?": "heads",
        "q_bias": "width",
        "k_bias": "width",
        "v_bias": "width",
        "table": ("heads", -1),
        "scale": "heads",
        "shift": "inside",
        "absent?": "heads",
        "norm": "heads",
    },
    inputs=AttentionInputs(reads_width=True),
)


class PartsPolicy(RolePolicy):
    stack = LayerStack("layers", [ATTENTION, MLP("mlp", up="0", down="2")])
    num_heads = ".num_heads"


def changed(**changes: Any) -> type[RolePolicy]:
    """Return the policy with other ``local_attrs``."""
    stack = LayerStack("layers", [replace(ATTENTION, **changes), PartsPolicy.stack.blocks[1]])
    return type("Changed", (PartsPolicy,), {"stack": stack})


def reference(norm: bool = False) -> ReferenceGradients:
    x = torch.randn(B, S, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return ReferenceGradients.from_model(Model(norm).double(), lambda model: model(x))


MODES: dict[str, dict[str, bool]] = {
    "plain": {},
    "sequence": {"enable_sequence_parallelism": True},
    "overlap": {"enable_sequence_parallelism": True, "enable_sequence_overlap": True},
}


@pytest.mark.reduced(at_most=3)
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("ranks", [2, 4])
def test_direct_parameters_train_as_in_one_process(ranks: int, mode: str) -> None:
    assert validate_policy(reference(), PartsPolicy, ranks, **MODES[mode]) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": AttentionInputs()}, "shape '[2, 7, 30]' is invalid"),
        ({"local_attrs": {**ATTENTION.local_attrs, "scale": "inside"}}, "must match the size of tensor"),
        (
            {"local_attrs": {n: k for n, k in ATTENTION.local_attrs.items() if n != "shift"}},
            "attn.shift, a parameter of an attention module or MLP",
        ),
    ],
)
def test_each_local_attr_is_required(changes: dict[str, Any], message: str) -> None:
    assert message in (validate_policy(reference(), changed(**changes), 2) or "")


@pytest.mark.parametrize("mode", list(MODES))
def test_block_enters_the_region_once(mode: str) -> None:
    """Each of four blocks has one collective at its entry and exit per direction; the first entry needs no gradient."""

    def train(context: ParallelContext) -> dict[str, int]:
        model = shard_model(Model(), PartsPolicy, context=context, **MODES[mode])
        with CollectiveRecorder(context) as recorder:
            model(torch.randn(B, S, HIDDEN, generator=torch.Generator().manual_seed(1))).square().mean().backward()
        counts: dict[str, int] = {}
        for (op, _, why), (count, _) in recorder.summarize_calls().items():
            if why == "block":
                counts[op] = counts.get(op, 0) + count
        return counts

    cut = {"all_gather": 4 + 4 + 1, "reduce_scatter": 4 + 3}
    assert run_as_threads(train, tensor=2)[0] == ({"all_reduce": 4 + 3} if mode == "plain" else cut)


def test_layouts_are_described_and_full_weights_gathered() -> None:
    models = [Model(), Model()]
    plain = copy.deepcopy(models[0].state_dict())

    def shard(context: ParallelContext) -> tuple[str, dict[str, Tensor]]:
        model = shard_model(models[context.tensor.rank], PartsPolicy, context=context)
        return str(shardformer.describe_sharding(model)), shardformer.full_state_dict(model)

    for description, state in run_as_threads(shard, tensor=2):
        assert re.search(r"attn\.scale +parameter +a part +5 x 1 x 1 +[32] x 1 x 1", description), description
        assert all(torch.equal(state[name], plain[name]) for name in plain) and state.keys() == plain.keys()


@pytest.mark.parametrize("ranks", [2, 4])
def test_norm_over_all_heads_sums_its_statistics(ranks: int) -> None:
    assert validate_policy(reference(norm=True), PartsPolicy, ranks) is None
    with mock.patch.object(ShardedNorm, "_compute_mean_over_ranks", lambda self, x: x.mean(-1, keepdim=True)):
        assert validate_policy(reference(norm=True), PartsPolicy, ranks) is not None


def square() -> nn.Module:
    model: Any = Model()
    model.layers[0].attn.scale = nn.Parameter(torch.rand(HEADS, HEADS, 1))
    return model


def saved() -> nn.Module:
    model: Any = Model()
    model.layers[1].attn.register_buffer("k_bias", torch.zeros(HIDDEN))
    return model


@pytest.mark.parametrize(
    ("make", "counts", "message"),
    [
        (Model, {"q_bia": "width"}, r"no attribute layers\.\*\.attn\.q_bia\. .*'q_bias'"),
        (Model, {"q_bia": ("width", 0)}, r"unknown kind 'width' for an argument. Use 'heads'"),
        (Model, {"q_bia": ("heads", 0)}, r"attn\.q_bias, a parameter of an attention module"),
        (
            Model,
            {"num_heads": "inside"},
            r"unknown kind 'inside' for an attribute. Use 'heads' or 'kv_heads' or 'groups' or 'width'",
        ),
        (Model, {"qkv": "heads"}, r"one replaces 'layers\.0\.attn\.qkv'"),
        (Model, {"q_bias": "heads"}, r"attn\.q_bias .*exactly one dimension of size 5, but .*has the shape \(30,\)"),
        (Model, {"table": ("heads", 0)}, r"attn\.table .*has the shape \(13, 5\).*pass \('heads', dim\)"),
        (square, {"scale": "heads"}, r"attn\.scale .*has the shape \(5, 5, 1\).*\('heads', dim\)"),
        (saved, ATTENTION.local_attrs, r"layers\.1\.attn\.k_bias, but ShardFormer cannot shard a buffer"),
        (
            Model,
            {**ATTENTION.local_attrs, "qkv.weight": "inside"},
            r"shards the parameter .*qkv\.weight, but also replaces its module",
        ),
    ],
)
def test_invalid_local_attrs_are_refused(make: Callable[[], nn.Module], counts: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        run_as_threads(lambda context: shard_model(make(), changed(local_attrs=counts), context=context), tensor=2)


def test_unknown_count_is_refused_at_creation() -> None:
    with pytest.raises(PolicyError, match=r"local_attrs=\{'scale': 'head'\}.*'heads'"):
        Attention("attn", AttentionProjections(out="o"), {"scale": "head"})
