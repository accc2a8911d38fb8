"""``verify`` fails for every step that is left out of sharding, and reports where."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardformer.comm import collectives
from shardformer.comm import collectives as conjugates
from shardformer.comm.collectives import PendingCollective
from shardformer.config import ShardConfig
from shardformer.gradients import clipping as grad_norm
from shardformer.layout.activation_layout import ModelRegion
from shardformer.layout.shard_spec import ShardSpec, Split, get_even_split_bounds
from shardformer.layout.sharding_metadata import ShardingMetadata
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import Axis
from shardformer.sharding import apply as sharder
from shardformer.sharding import apply_tensor_parallel
from shardformer.sharding import apply_tensor_parallel as gradients
from shardformer.sharding import apply_tensor_parallel as regions
from shardformer.sharding.apply import Sharder
from shardformer.tensor_parallel import layers as embedding
from shardformer.tensor_parallel import layers as linear
from shardformer.tensor_parallel import linear_communication as edges
from shardformer.tensor_parallel import linear_communication as projection
from shardformer.tensor_parallel import sequence_parallel as stream
from shardformer.tensor_parallel import vocab_parallel_loss as loss
from shardformer.tensor_parallel.layers import Linear1D_Col, Linear1D_Row
from shardformer.verify.comparison import Report, Tolerances
from shardformer.verify.small_models import LANGUAGE_MODEL, RandomBatchFactory, SmallModelFactory, compute_model_loss
from shardformer.verify.train_both import VerifyJob
from shardformer.verify.verification import run_verify_job, verify
from tests.pools import WorkerPools
from tests.verify.omissions import Omission, replaced
from tests.verify.tower import ForgetfulPolicy, Tower, TowerPolicy, distance, numbers

pytestmark = pytest.mark.slow

LLAMA_BATCHES = RandomBatchFactory(LANGUAGE_MODEL["llama"])
SEQUENCE = {"enable_sequence_parallelism": True}
OVERLAP = {**SEQUENCE, "enable_sequence_overlap": True}


def in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0


def left_out(owner: Any, name: str, alone: Callable[..., Tensor], *, backward: bool) -> Any:
    """Skip a collective of ``owner`` in the forward or the backward pass. ``alone`` computes the local result."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def maybe(*args: Any, **kwargs: Any) -> Any:
            if in_backward() != backward:
                return original(*args, **kwargs)
            mine = alone(*args, **kwargs)
            return PendingCollective((), lambda: mine) if name.startswith("start_") else mine

        return maybe

    return replaced(owner, name, make)


def own(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def own_part(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return collectives.get_local_slices(x, axis, dim, Split.even(x.shape[dim], axis.size))


def own_part_in_zeros(
    x: Tensor, axis: Axis, dim: int, full: int | None = None, *, lengths: Sequence[int] = (), **_: Any
) -> Tensor:
    full = sum(lengths) if full is None else full
    bounds = get_even_split_bounds(full, axis.size)
    joined = x.new_zeros([full if d == dim else n for d, n in enumerate(x.shape)])
    joined.narrow(dim, bounds[axis.rank], x.shape[dim]).copy_(x)
    return joined


def own_ring(make: Callable[[int, int], Tensor], axis: Axis, full: int) -> Tensor:
    bounds = get_even_split_bounds(full, axis.size)
    return make(bounds[axis.rank], bounds[axis.rank + 1])


def ring_of_one(x: Tensor, axis: Axis, full: int, use: Callable[[Tensor, int, int], None]) -> Tensor:
    """The shards of other ranks are zero."""
    bounds = get_even_split_bounds(full, axis.size)
    joined = own_part_in_zeros(x, axis, 1, full)
    for start, end in pairwise(bounds):
        use(joined[:, start:end], start, end)
    return joined


def with_bias(times: Callable[[Axis], int]) -> Any:
    """Add the bias of a row-parallel layer ``times`` times. Adding it before the all-reduce adds it once per rank."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: Linear1D_Row, x: Tensor) -> Tensor:
            y: Tensor = original(self, x)
            return y if self.bias is None else y + (times(self.axis) - 1) * self.bias

        return forward

    return replaced(Linear1D_Row, "forward", make)


def not_partial(chosen: str) -> Any:
    """Parameters with matching names are treated as if their gradients were not partial."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def of(self: Any, name: str) -> Any:
            layout, place = original(self, name)
            return layout, ModelRegion.OUTSIDE if re.search(chosen, name) else place

        return of

    return replaced(apply_tensor_parallel.ParameterRegionFinder, "find_region", make)


def shared_heads_alone() -> Any:
    """Parameter slices that several ranks hold are treated as if only this rank held them."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_reduction(spec: ShardSpec, *args: Any) -> Any:
            reduction = original(spec, *args)
            return reduction if spec.stores_each_element_once else replace(reduction, sum_over=())

        return get_reduction

    return replaced(gradients, "get_reduction", make)


def unfused() -> Any:
    """Shard a fused q, k, v as a single matrix."""
    whole = classmethod(lambda cls, splits, sizes: cls.even(sum(sizes), len(splits[0].parts)))
    return mock.patch.object(Split, "stack", whole)


def expanded_wrongly() -> Any:
    """Each query head reads the first KV head of this rank."""

    def make(original: Any) -> Any:
        def forward(self: Linear1D_Col, x: Tensor) -> Any:
            if self.expand is None:
                return original(self, x)
            before, self.expand = self.expand, (self.expand[0], [0] * len(self.expand[1]))
            try:
                return original(self, x)
            finally:
                self.expand = before

        return forward

    return replaced(Linear1D_Col, "forward", make)


def labels_of_this_rank() -> Any:
    """The loss uses only this rank's shard of the vocabulary."""
    return mock.patch.object(loss, "all_gather", lambda x, axis, dim, **_: torch.cat([x] * axis.size, dim))


def no_weight_gradient() -> Any:
    return mock.patch.object(projection, "compute_weight_grad", lambda *_: None)


def without_reducers(model: nn.Module, plan: Any, blocks: Any, state: ShardingMetadata) -> None:
    apply_tensor_parallel.install_gradient_reduction(model, plan, blocks, state)
    state.reducers = []


def nothing_replaced_elsewhere() -> Any:
    """Modules that only share a sharded parameter keep the full one."""

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def replace_modules(self: Sharder, plan: Any) -> None:
            before = [(module, {**module._parameters}) for module in self.model.modules()]
            original(self, plan)
            for module, params in before:
                module._parameters.update(params)

        return replace_modules

    return replaced(Sharder, "_replace_modules", make)


MUTATIONS: dict[str, Callable[[], Any]] = {
    "nothing": nullcontext,
    "the sum at a block's exit": lambda: left_out(edges, "start_all_reduce", own, backward=False),
    "the sum of a block's input gradient": lambda: left_out(edges, "start_all_reduce", own, backward=True),
    "the sum of the head's input gradient": lambda: replaced(
        linear, "compute_single_column_linear", lambda _: lambda column, x: column.multiply(x)
    ),
    "the sum of the embedding": lambda: replaced(embedding, "reduce_from_tp_region", lambda _: own),
    "the sum of an embedding that a layer follows": lambda: replaced(edges, "all_reduce", lambda _: own),
    "the sum of the gradient of another stack's states": lambda: replaced(
        regions, "prepare_extra_block_input", lambda _: own
    ),
    "a row's bias": lambda: with_bias(lambda axis: 0),
    "a row's bias after the sum": lambda: with_bias(lambda axis: axis.size),
    "the other ranks' part of the loss": labels_of_this_rank,
    "the sum at a block's exit to parts": lambda: left_out(edges, "start_reduce_scatter", own_part, backward=False),
    "the sum of a part's gradient": lambda: left_out(edges, "start_reduce_scatter", own_part, backward=True),
    "the gather of a block's input": lambda: left_out(edges, "all_gather", own_part_in_zeros, backward=False),
    "the gather of an exit's gradient": lambda: left_out(edges, "all_gather", own_part_in_zeros, backward=True),
    "the gather of the stack's input gradient": lambda: left_out(
        conjugates, "all_gather", own_part_in_zeros, backward=True
    ),
    "the gather of the stack's output": lambda: left_out(stream, "all_gather", own_part_in_zeros, backward=False),
    "the ring's gather": lambda: replaced(edges, "all_gather_matmul", lambda _: ring_of_one),
    "the ring's sum": lambda: replaced(edges, "matmul_reduce_scatter", lambda _: own_ring),
    "the sum of a norm's gradient": lambda: not_partial("ln|layernorm|LayerNorm|layer_norm|norm"),
    "the sum of a late bias's gradient": lambda: not_partial("bias$"),
    "the sum of a shared KV head's gradient": shared_heads_alone,
    "which KV head a query head reads": expanded_wrongly,
    "the blocks of a fused projection": unfused,
    "the mean over data": lambda: mock.patch.object(sharder, "install_gradient_reduction", without_reducers),
    "the other ranks' part of the norm": lambda: replaced(grad_norm, "all_reduce", lambda _: lambda x, axis, **_: x),
    "the gradient of a block's weights": no_weight_gradient,
    "other owners of a parameter": nothing_replaced_elsewhere,
}


def report_without(mutation: str, job: VerifyJob) -> Report | None:
    with MUTATIONS[mutation]():
        return run_verify_job(job)


@dataclass(frozen=True)
class Case(Omission):
    """An omission from a layout, and how the report shows it.

    Args:
        where: a pattern that matches the parameter with the largest difference.
        shows_in: the difference that exceeds its tolerance: loss, gradient or norm, or "missing".
    """

    where: str = "."
    shows_in: str = "gradient"
    config: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    tensor: int = 2
    data: int = 1

    def __str__(self) -> str:
        mode = "overlap" if self.config == OVERLAP else "sequence" if self.config == SEQUENCE else "plain"
        return f"{self.mutation}, {self.family}, {mode}, {self.tensor}x{self.data}"


NORMS = r"ln_[12f]|LayerNorm|layer_?norm|norm\.weight"
SMALL_GROUPS = {"num_attention_heads": 12, "num_key_value_heads": 3}
CASES = [
    *(Case("the sum at a block's exit", family, shows_in="loss") for family in LANGUAGE_MODEL),
    Case("the sum at a block's exit", "gpt2", shows_in="loss", tensor=4),
    *(Case("the sum of a block's input gradient", family) for family in LANGUAGE_MODEL),
    Case("the sum of a block's input gradient", "llama", tensor=4),
    Case("the sum of the head's input gradient", "gpt2"),
    Case("the sum of the embedding", "gpt2", shows_in="loss"),
    Case("the sum of an embedding that a layer follows", "bert", where="word_embeddings", config=OVERLAP),
    Case("the sum of the gradient of another stack's states", "t5", where=r"^(encoder|shared)\."),
    Case("the sum of the gradient of another stack's states", "t5", where=r"^(encoder|shared)\.", config=OVERLAP),
    *(Case("a row's bias", family, where="dense.bias|c_proj.bias") for family in ("bert", "gpt2")),
    Case("a row's bias", "llama", where="proj.bias", changes={"attention_bias": True, "mlp_bias": True}),
    *(
        Case("a row's bias after the sum", family, where="dense.bias|c_proj.bias", tensor=4)
        for family in ("bert", "gpt2")
    ),
    Case("the other ranks' part of the loss", "gpt2", shows_in="loss"),
    Case("the other ranks' part of the loss", "t5", shows_in="loss", tensor=4),
    *(Case("the sum at a block's exit to parts", family, "", "loss", SEQUENCE) for family in LANGUAGE_MODEL),
    *(Case("the sum of a part's gradient", family, config=SEQUENCE) for family in LANGUAGE_MODEL),
    Case("the sum of a part's gradient", "llama", config=OVERLAP),
    Case("the gather of a block's input", "gpt2", shows_in="loss", config=SEQUENCE),
    Case("the gather of an exit's gradient", "gpt2", "c_proj|ln_2", config=SEQUENCE),
    Case("the gather of the stack's input gradient", "gpt2", "wpe|wte", config=SEQUENCE),
    Case("the gather of the stack's output", "bert", shows_in="loss", config=SEQUENCE),
    Case("the ring's sum", "gpt2", shows_in="loss", config=OVERLAP),
    Case("the ring's gather", "gpt2", shows_in="loss", config=OVERLAP),
    *(Case("the sum of a norm's gradient", family, NORMS, config=SEQUENCE) for family in LANGUAGE_MODEL),
    Case("the sum of a norm's gradient", "llama", "norm.weight", config=OVERLAP, tensor=4),
    *(Case("the sum of a late bias's gradient", family, "bias", config=SEQUENCE) for family in ("bert", "gpt2")),
    Case("the sum of a shared KV head's gradient", "llama", "[kv]_proj", tensor=4),
    Case("which KV head a query head reads", "llama", shows_in="loss", changes=SMALL_GROUPS, tensor=4),
    Case("the blocks of a fused projection", "gpt2", "attn"),
    Case("the mean over data", "gpt2", tensor=1, data=2),
    *(Case("the mean over data", family, tensor=2, data=2) for family in LANGUAGE_MODEL),
    Case("the mean over data", "gpt2", tensor=2, data=2, config=SEQUENCE),
    Case("the other ranks' part of the norm", "gpt2", shows_in="norm"),
    Case("the gradient of a block's weights", "gpt2", r"(c_attn|c_fc|c_proj)\.weight", shows_in="missing"),
    Case("other owners of a parameter", "bert", "predictions", shows_in="missing"),
]


@pytest.mark.reduced(one_in=4, at_most=5)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_omission_fails(pools: WorkerPools, case: Case) -> None:
    sample = SmallModelFactory(case.family, changes=case.changes)
    batches = RandomBatchFactory(sample.head_class)
    job = VerifyJob(sample, batches, case.tensor, case.data, 1, torch.float64, None, None, case.config)
    report = pools(case.tensor * case.data).run(report_without, case.mutation, job)[0]
    assert report is not None and not report.passed
    assert "\nFAIL: " in str(report)
    if case.shows_in == "missing":
        assert report.missing and all(re.search(case.where, name) for name in report.missing)
        assert report.missing[0] in str(report)
        return
    # far above the tolerance: a wider tolerance would not hide it
    assert getattr(report, case.shows_in).used > 100
    assert re.search(case.where, report.gradient.where)
    assert report.weight.used > 100


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize(("tensor", "data", "config"), [(2, 1, {}), (2, 1, OVERLAP), (2, 2, SEQUENCE)])
def test_without_omission_it_passes(pools: WorkerPools, tensor: int, data: int, config: dict[str, Any]) -> None:
    """The failures are caused by the omissions, not by patching, and do not outlive their tests."""
    job = VerifyJob(
        SmallModelFactory("gpt2"),
        RandomBatchFactory("GPT2LMHeadModel"),
        tensor,
        data,
        2,
        torch.float64,
        None,
        None,
        config,
    )
    report = pools(tensor * data).run(report_without, "nothing", job)[0]
    assert report is not None and report.passed, str(report)


def test_a_report_prints_as_table_and_json(pool2: WorkerPool) -> None:
    batches = RandomBatchFactory("GPT2LMHeadModel")
    report = verify(
        SmallModelFactory("gpt2"), batches, tensor=2, steps=2, config=SEQUENCE, dtype=torch.float32, pool=pool2
    )
    assert report.passed
    assert (report.model, report.layout) == ("GPT2LMHeadModel", "tensor=2, sequence_parallelism")
    assert (report.steps, report.dtype, report.missing) == (2, "float32", [])
    assert len(report.losses) == 2 and report.losses[0][0] != report.losses[1][0], "it trained"
    assert all(abs(plain - sharded) < 1e-4 for plain, sharded in report.losses)
    assert report.loss.where in ("step 0", "step 1") and report.norm.where in ("step 0", "step 1")
    assert re.fullmatch(r"transformer\..*(weight|bias), step [01]", report.gradient.where)
    assert re.fullmatch(r"transformer\..*(weight|bias)", report.weight.where)
    assert 0 < report.seconds < 60
    # q, k, v and the MLP of two layers, gathered at the input and scattered at the output, and both ends of the stack
    assert {name: count for name, (count, _) in report.collectives.items()} == {
        "all_gather over tensor (block)": 4 + 4 + 2,
        "all_gather over tensor (loss)": 1,
        "all_reduce over tensor (block)": 1,
        "all_reduce over tensor (gradients)": 1,
        "reduce_scatter over tensor (block)": 4 + 4 + 1,
    }
    lines = str(report).splitlines()
    assert lines[0] == "GPT2LMHeadModel: unsharded, and sharded over tensor=2, sequence_parallelism."
    assert re.fullmatch(r"2 steps in float32 \(\d+\.\d s\), with dropout disabled\.", lines[1])
    assert lines[-1].startswith("PASS: Largest difference ")
    assert lines[3].split() == ["largest", "difference", "relative", "bound", "where"]
    assert [line[:16].strip() for line in lines[4:8]] == ["losses", "gradients", "gradient norms", "weights"]
    assert max(map(len, lines)) <= 120 and "\x1b" not in str(report)
    data = json.loads(report.to_json())
    assert data["passed"] is True
    assert data["gradient"] == {k: getattr(report.gradient, k) for k in ("relative", "where", "used")}
    assert data["collectives"]["all_gather over tensor (loss)"].keys() == {"calls", "wire_bytes"}
    assert data["bounds"] == {"loss": 1e-5, "gradient": 1e-4, "eps": 1.2e-7}


@pytest.mark.reduced(one_in=3, at_most=1)
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "vit", "swin", "bloom"])
def test_a_model_with_casts_meets_the_fp64_tolerances(pool2: WorkerPool, family: str) -> None:
    """Norms, logits and scores that a model computes in fp32 are computed in fp64 in both models."""
    sample = SmallModelFactory(family)
    report = verify(sample, RandomBatchFactory(sample.head_class), tensor=2, loss_fn=compute_model_loss, pool=pool2)
    assert report.passed, str(report)
    assert report.bounds == Tolerances(1e-10, 1e-10, 2.2e-16)
    assert report.loss.relative < 1e-12 and report.gradient.used < 0.1
    assert "with dropout and lower-precision casts disabled" in str(report)


@pytest.mark.reduced(at_most=2)
@pytest.mark.parametrize("config", [{}, SEQUENCE, OVERLAP, ShardConfig(enable_sequence_parallelism=True)])
def test_a_custom_model_with_policy_and_loss_passes(pool2: WorkerPool, config: Any) -> None:
    report = verify(Tower, numbers, tensor=2, loss_fn=distance, policy=TowerPolicy, config=config, pool=pool2)
    assert report.passed, str(report)
    assert report.model == "Tower"
    assert report.bounds.gradient == 1e-10


def test_a_wrong_custom_policy_fails(pool2: WorkerPool) -> None:
    report = verify(Tower, numbers, tensor=2, loss_fn=distance, policy=ForgetfulPolicy(), pool=pool2)
    assert not report.passed
    assert "layers.0.mlp.up.bias (weight)" in report.missing


def test_without_a_pool_workers_are_started_and_ended() -> None:
    report = verify(Tower, numbers, tensor=1, data=1, loss_fn=distance, policy=TowerPolicy, steps=1)
    assert report.passed, str(report)
