"""Linear layers sharded over the tensor axis equal the plain one: values, gradients, initialization, communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from shardformer.comm.collectives import gather_full_tensor
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.errors import ConfigError
from shardformer.layout.shard_spec import Split
from shardformer.layout.sharding_metadata import get_shard_specs
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.tensor_parallel.layers import FusedLinear1D_Col, Linear1D_Col, Linear1D_Row, VocabParallelLMHead1D
from shardformer.tensor_parallel.vocab_parallel_logits import VocabParallelLogits
from tests.pools import WorkerPools

B, S = 2, 3
over_two_and_four = pytest.mark.parametrize("ranks", [1, 2, 4])
KINDS = {
    "col": Linear1D_Col,
    "fused": FusedLinear1D_Col,
    "row": Linear1D_Row,
    "head": VocabParallelLMHead1D,
}


@dataclass(frozen=True)
class Case:
    """One layer: its kind, sizes and options.

    Args:
        native: "linear", "conv1d", or "" to construct the parallel layer directly.
    """

    kind: str
    in_features: int
    out_features: int
    bias: bool = True
    native: str = "linear"
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64

    def plain(self) -> nn.Module:
        """Return the plain layer, with the same seed as a direct construction."""
        torch.manual_seed(3)
        if self.native != "conv1d":
            return nn.Linear(self.in_features, self.out_features, self.bias, dtype=self.dtype)
        conv = transformers.pytorch_utils.Conv1D(self.out_features, self.in_features).to(self.dtype)
        nn.init.normal_(conv.bias)
        return conv

    def parallel(self, axis: Axis) -> Any:
        if self.native:
            return KINDS[self.kind].from_native_module(self.plain(), axis, **self.options)
        torch.manual_seed(3)
        options = {"dtype": self.dtype, "process_group": axis, **self.options}
        return KINDS[self.kind](self.in_features, self.out_features, self.bias, **options)


@dataclass
class Found:
    """The largest differences by name on one rank, and (kind, purpose, bytes) of its collectives."""

    differences: dict[str, float]
    forward: list[tuple[str, int]]
    backward: list[tuple[str, int]]


def compared(case: Case) -> Found:
    axis = ParallelContext.from_default_process_group({}).tensor
    plain, layer = case.plain(), case.parallel(axis)
    torch.manual_seed(5)
    x, w = torch.randn(B, S, case.in_features), torch.randn(B, S, case.out_features)
    x, w = x.to(case.dtype), w.to(case.dtype)
    want_x = x.clone().requires_grad_()
    want = plain(want_x)
    (want * w).sum().backward()
    own = layer.split.indices(axis.rank)  # of the input of a row, of the output of a column
    takes_part = case.kind == "row" and layer.parallel_input
    x = (x[..., own] if takes_part else x).clone().requires_grad_()
    with CollectiveRecorder(axis) as forward:
        y = layer(x)
    if layer.skip_bias_add:
        y, bias = y
        y = y if bias is None else y + bias
    if isinstance(y, VocabParallelLogits):
        y = y.to_local()
    gives_part = case.kind != "row" and not layer.gather_output
    loss = (y * (w[..., own] if gives_part else w)).sum()
    with CollectiveRecorder(axis) as backward:
        loss.backward()
    specs = get_shard_specs(layer)
    wants = {
        "output": (y, want[..., own] if gives_part else want),
        "input's gradient": (x.grad, want_x.grad[..., own] if takes_part else want_x.grad),
    }
    for name, p in layer.named_parameters():
        wants[name] = (gather_full_tensor(p, specs[name], lambda _: axis), plain.get_parameter(name))
        wants[f"{name}'s gradient"] = (
            gather_full_tensor(p.grad, specs[name], lambda _: axis),
            plain.get_parameter(name).grad,
        )
    assert [n for n, _ in layer.named_parameters()] == [n for n, _ in plain.named_parameters()]
    return Found(
        {name: float((a - b).detach().abs().max()) for name, (a, b) in wants.items()},
        [(call.op, call.payload_bytes) for call in forward.calls],
        [(call.op, call.payload_bytes) for call in backward.calls],
    )


GATHER = {"gather_output": True}
CASES = [
    *(
        Case(kind, 6, 7, bias, native, options)
        for kind in ("col", "row")
        for bias in (True, False)
        for native in ("linear", "conv1d", "")
        for options in ({}, {"skip_bias_add": True})
        if bias or native != "conv1d"
    ),
    *(Case("col", 6, 7, True, native, GATHER) for native in ("linear", "conv1d", "")),
    Case("col", 6, 7, True, "linear", {**GATHER, "skip_bias_add": True}),
    Case("col", 6, 8, False, "linear", GATHER),
    *(Case("row", 7, 6, bias, "linear", {"parallel_input": False}) for bias in (True, False)),
    Case("row", 8, 6, True, "conv1d", {"parallel_input": False, "skip_bias_add": True}),
    *(Case("fused", 6, 21, True, native, {"n_fused": 3}) for native in ("linear", "conv1d", "")),
    *(Case("fused", 6, 14, True, native, {**GATHER, "n_fused": 2}) for native in ("linear", "conv1d", "")),
    Case("fused", 6, 12, True, "linear", {**GATHER, "n_fused": 3, "skip_bias_add": True}),
    *(Case("head", 6, 127, bias, native) for bias in (True, False) for native in ("linear", "")),
    Case("col", 6, 7, dtype=torch.float32),
]


def name_of(case: Case) -> str:
    options = "+".join(name if value is True else f"{name}={value}" for name, value in case.options.items())
    parts = [case.kind, f"{case.in_features}x{case.out_features}", case.native or "direct", options]
    return " ".join([*filter(None, parts), "" if case.bias else "no bias"]).strip()


@pytest.mark.reduced(at_most=20)
@over_two_and_four
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_sharded_linear_equals_the_plain_linear(pools: WorkerPools, case: Case, ranks: int) -> None:
    bound = 1e-12 if case.dtype == torch.float64 else 1e-5
    for found in pools(ranks).run(compared, case):
        assert max(found.differences.values()) < bound, found.differences


SIZE = 8  # bytes of a number in fp64
INPUT, OUTPUT = B * S * 8 * SIZE, B * S * 12 * SIZE


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("case", "forward", "backward"),
    [
        (Case("col", 8, 12), [], [("all_reduce", INPUT)]),
        (Case("col", 8, 12, options=GATHER), [("all_gather", OUTPUT)], [("all_reduce", INPUT)]),
        (Case("fused", 8, 12), [], [("all_reduce", INPUT)]),
        (Case("head", 8, 12), [], [("all_reduce", INPUT)]),
        (Case("row", 8, 12), [("all_reduce", OUTPUT)], []),
        (Case("row", 8, 12, options={"parallel_input": False}), [("all_reduce", OUTPUT)], [("all_gather", INPUT)]),
    ],
    ids=lambda value: name_of(value) if isinstance(value, Case) else "",
)
def test_communication_matches_the_docstring(
    pools: WorkerPools, case: Case, forward: list[Any], backward: list[Any], ranks: int
) -> None:
    for found in pools(ranks).run(compared, case):
        assert (found.forward, found.backward) == (forward, backward)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_one_rank_does_not_communicate(pools: WorkerPools, case: Case) -> None:
    found = pools(1).run(compared, case)[0]
    assert (found.forward, found.backward) == ([], [])


# ------------------------------------------------------------------------------------------------------- initialisation


def constructed(kind: str) -> list[float]:
    """Build two layers, and return the differences of their weights and of the random state after them."""
    axis = ParallelContext.from_default_process_group({}).tensor
    torch.manual_seed(11)
    plain = [nn.Linear(12, 24) for _ in range(2)]
    state = torch.get_rng_state()
    torch.manual_seed(11)
    ours = [KINDS[kind](12, 24, process_group=axis) for _ in range(2)]
    out = [float((state - torch.get_rng_state()).abs().max())]
    for a, b in zip(plain, ours, strict=True):
        for name, spec in b.shard_specs.items():
            local = spec.slice_full_tensor(a.get_parameter(name).detach(), {axis.name: axis.rank})
            out.append(float((local - b.get_parameter(name)).abs().max()))
    return out


@over_two_and_four
@pytest.mark.parametrize("kind", list(KINDS))
def test_direct_construction_gives_the_slice_of_the_plain_layer(pools: WorkerPools, kind: str, ranks: int) -> None:
    for found in pools(ranks).run(constructed, kind):
        assert found == [0.0] * 5


def parts_kept() -> dict[str, Any]:
    """Return the attributes of a layer except its values."""
    axis = ParallelContext.from_default_process_group({}).tensor
    native = nn.Linear(12, 24).eval()
    native.weight.requires_grad_(False)
    layer: Any = Linear1D_Col.from_native_module(native, axis)
    before = layer.weight.clone()
    native.weight.data.zero_()
    owner = layer.weight.untyped_storage().nbytes()
    return {
        "training": layer.training,
        "trainable": (layer.weight.requires_grad, layer.bias.requires_grad),
        "shape": tuple(layer.weight.shape),
        "bytes": owner,
        "own memory": torch.equal(before, layer.weight),
        "text": repr(layer),
        "keys": list(layer.state_dict()),
        "full": tuple(layer.shard_specs["weight"].shape),
    }


def test_each_rank_stores_only_its_shard(pool2: WorkerPool) -> None:
    found = pool2.run(parts_kept)[1]
    assert found.pop("text") == (
        "Linear1D_Col(in_features=12, out_features=24, bias=True, local weight 12x12 (out x in), tensor 1/2)"
    )
    assert found == {
        "training": False,
        "trainable": (False, True),
        "shape": (12, 12),
        "bytes": 12 * 12 * 4,
        "own memory": True,
        "keys": ["weight", "bias"],
        "full": (24, 12),
    }


def with_given_split(gather_output: bool) -> float:
    """Compare a layer whose split has both ends on rank 0 and the middle on rank 1 with the plain layer."""
    axis = ParallelContext.from_default_process_group({}).tensor
    split = Split((((0, 2), (6, 7)), ((2, 6),)))
    torch.manual_seed(0)
    plain = nn.Linear(5, 7).double()
    layer = Linear1D_Col.from_native_module(plain, axis, split=split, gather_output=gather_output)
    x = torch.randn(4, 5).double()
    want = plain(x)
    return float((layer(x) - (want if gather_output else want[:, split.indices(axis.rank)])).abs().max())


@pytest.mark.parametrize("gather_output", [False, True])
def test_custom_split_equals_the_plain_linear(pool2: WorkerPool, gather_output: bool) -> None:
    assert max(pool2.run(with_given_split, gather_output)) < 1e-12


def row_with_given_split() -> float:
    axis = ParallelContext.from_default_process_group({}).tensor
    split = Split((((0, 2), (6, 7)), ((2, 6),)))
    torch.manual_seed(0)
    plain = nn.Linear(7, 5).double()
    layer = Linear1D_Row.from_native_module(plain, axis, split=split, parallel_input=False)
    x = torch.randn(4, 7).double()
    want_x, our_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    want, ours = plain(want_x), layer(our_x)
    want.square().sum().backward()
    ours.square().sum().backward()
    assert want_x.grad is not None and our_x.grad is not None
    return max(float((want - ours).detach().abs().max()), float((want_x.grad - our_x.grad).abs().max()))


def test_row_parallel_input_follows_a_custom_split(pool2: WorkerPool) -> None:
    assert max(pool2.run(row_with_given_split)) < 1e-12


# ------------------------------------------------------------------------------------------------------ errors


def make(kind: str, *args: Any, **kwargs: Any) -> None:
    KINDS[kind](*args, process_group=ParallelContext.from_default_process_group({}).tensor, **kwargs)


def from_native(kind: str, module: nn.Module) -> None:
    KINDS[kind].from_native_module(module, ParallelContext.from_default_process_group({}).tensor)


@pytest.mark.parametrize("kind", list(KINDS))
def test_other_modules_raise(pool2: WorkerPool, kind: str) -> None:
    with pytest.raises(ConfigError, match="can only replace a linear layer, but got a LayerNorm"):
        pool2.run(from_native, kind, nn.LayerNorm(4))


def test_size_below_the_number_of_ranks_raises(pool4: WorkerPool) -> None:
    with pytest.raises(ConfigError, match=r"out_features=3 cannot be sharded over 4 ranks.*at most 3"):
        pool4.run(make, "col", 8, 3)
    with pytest.raises(ConfigError, match="in_features=3 cannot be sharded over 4 ranks"):
        pool4.run(make, "row", 3, 8)
    with pytest.raises(ConfigError, match=r"out_features=1 cannot be sharded.*do not shard the layer"):
        pool4.run(make, "head", 8, 1)


def test_uneven_fused_projections_raise(pool2: WorkerPool) -> None:
    with pytest.raises(ConfigError, match="the number of fused projections, n_fused=3"):
        pool2.run(make, "fused", 4, 10)


# ------------------------------------------------------------------------------------------------------------ the head


def head_losses() -> dict[str, float]:
    axis = ParallelContext.from_default_process_group({}).tensor
    torch.manual_seed(0)
    plain = nn.Linear(6, 127).double()
    head = VocabParallelLMHead1D.from_native_module(plain, axis)
    x, labels = torch.randn(B, S, 6).double(), torch.randint(0, 127, (B * S,))
    want = nn.functional.cross_entropy(plain(x).view(-1, 127), labels)
    want.backward()
    logits = head(x)
    with CollectiveRecorder(axis) as recorder:
        loss = nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels)
    loss.backward()
    spec = get_shard_specs(head)["weight"]
    assert plain.weight.grad is not None
    return {
        "loss": float((loss - want).detach().abs()),
        "gradient": float((gather_full_tensor(head.weight.grad, spec, lambda _: axis) - plain.weight.grad).abs().max()),
        "logits": float((logits.full_tensor() - plain(x)).detach().abs().max()),
        "choice": float((logits.argmax(-1) != plain(x).argmax(-1)).sum()),
        "collectives other than that of the loss": recorder.count() - 1,
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_head_returns_logits_that_behave_like_full_logits(pools: WorkerPools, ranks: int) -> None:
    for found in pools(ranks).run(head_losses):
        assert max(found.values()) < 1e-12, found


def expanded() -> list[int]:
    """Return three output groups of two local groups."""
    layer = Linear1D_Col(1, 4, bias=False, process_group=Axis("tensor"), expand=(2, [0, 0, 1]))
    layer.weight.data.copy_(torch.arange(4.0)[:, None])
    out: list[int] = layer(torch.ones(1, 1, 1)).flatten().int().tolist()
    return out


def test_expand_repeats_local_groups() -> None:
    assert expanded() == [0, 1, 0, 1, 2, 3]


def in_autocast(kind: str) -> tuple[str, str, list[int]]:
    axis = ParallelContext.from_default_process_group({}).tensor
    layer = KINDS[kind](8, 12, process_group=axis)
    x = torch.randn(B, S, layer.weight.shape[1], requires_grad=True)
    with CollectiveRecorder(axis) as recorder, torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    with recorder:
        y.float().sum().backward()
    assert x.grad is not None and layer.weight.grad is not None
    return str(y.dtype), str(layer.weight.grad.dtype), [call.payload_bytes for call in recorder.calls]


@pytest.mark.parametrize(("kind", "size"), [("col", []), ("row", [])])
def test_autocast_computes_and_communicates_in_16_bits(pool2: WorkerPool, kind: str, size: list[int]) -> None:
    y, grad, sent = pool2.run(in_autocast, kind)[0]
    assert (y, grad) == ("torch.bfloat16", "torch.float32")
    assert all(n in (B * S * 8 * 2, B * S * 12 * 2) for n in sent)


@pytest.mark.parametrize("shape", [(5, 6), (6,), (2, 2, 2, 6)])
def test_inputs_may_have_any_number_of_dims(pool2: WorkerPool, shape: tuple[int, ...]) -> None:
    assert max(pool2.run(on_shape, shape)) < 1e-12


def on_shape(shape: tuple[int, ...]) -> float:
    axis = ParallelContext.from_default_process_group({}).tensor
    torch.manual_seed(0)
    up, down, x = nn.Linear(6, 7).double(), nn.Linear(7, 6).double(), torch.randn(*shape).double()
    want_x, our_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    want = down(torch.tanh(up(want_x)))
    col, row = Linear1D_Col.from_native_module(up, axis), Linear1D_Row.from_native_module(down, axis)
    ours: Tensor = row(torch.tanh(col(our_x)))
    want.square().sum().backward()
    ours.square().sum().backward()
    assert want_x.grad is not None and our_x.grad is not None
    return max(float((ours - want).detach().abs().max()), float((our_x.grad - want_x.grad).abs().max()))


@pytest.mark.parametrize("option", ["gather_output", "skip_bias_add"])
def test_a_vocabulary_parallel_head_refuses_other_kinds_of_output(option: str) -> None:
    with pytest.raises(ConfigError, match=f"does not support {option}=True"):
        VocabParallelLMHead1D.from_native_module(nn.Linear(6, 8), **{option: True})
