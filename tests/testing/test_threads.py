"""Ranks as threads train like processes, and never wait forever."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import numpy
import pytest
import torch

from shardformer.comm.collectives import all_gather_objects, all_reduce
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.errors import ConfigError, LaunchError, WorkerError
from shardformer.layout.sharding_metadata import get_shard_specs
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.pipeline import Pipeline
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory, compute_model_loss

OVERLAP = {"enable_sequence_parallelism": True, "enable_sequence_overlap": True}


@pytest.mark.reduced(at_most=4)
@pytest.mark.parametrize("options", [{}, OVERLAP], ids=["plain", "overlap"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5"])
def test_sharded_model_has_unsharded_gradients(family: str, options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    sample = SmallModelFactory(family)
    plain, batch = sample().double(), RandomBatchFactory(sample.head_class)(0)
    compute_model_loss(plain, batch).backward()

    def train(context: ParallelContext) -> None:
        model = copy.deepcopy(plain)
        model.zero_grad()
        shard_model(model, context=context, **options)
        compute_model_loss(model, batch).backward()
        specs = get_shard_specs(model)
        for name, param in model.named_parameters():
            expected = plain.get_parameter(name).grad
            assert (param.grad is None) == (expected is None)
            if expected is not None:
                own = specs[name].slice_full_tensor(expected, context.coords)
                torch.testing.assert_close(param.grad, own, rtol=1e-5, atol=1e-6)

    run_as_threads(train, tensor=4)


@pytest.mark.parametrize("options", [{}, OVERLAP], ids=["plain", "overlap"])
def test_data_pipeline_tensor_step_has_unsharded_gradients(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    sample = SmallModelFactory("gpt2")  # its table is tied to the head, on two stages
    plain = sample().double().eval()
    batches = [RandomBatchFactory(sample.head_class)(i) for i in range(2)]
    batches[1]["labels"][:, :5] = -100  # the ranks have different numbers of labels
    loss_of_all = compute_model_loss(
        plain, {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    )
    loss_of_all.backward()

    def train(context: ParallelContext) -> tuple[set[str], list[str], float]:
        model = copy.deepcopy(plain)
        model.zero_grad()
        shard_model(model, context=context, **options)
        with CollectiveRecorder(context) as recorder:
            loss = Pipeline(model, micro_batches=2).step(batches[context.data.rank])
        for name, param in model.named_parameters():
            if param.grad is not None:
                expected = get_shard_specs(model)[name].slice_full_tensor(
                    plain.get_parameter(name).grad, context.coords
                )
                torch.testing.assert_close(param.grad, expected, rtol=1e-5, atol=1e-7)
        return {call.axis for call in recorder.calls}, [n for n, _ in model.named_parameters()], float(loss)

    found = run_as_threads(train, data=2, pipe=2, tensor=2)
    names = {name for _, held, _ in found for name in held}
    assert names == {name for name, _ in plain.named_parameters(remove_duplicate=False)}
    assert {"data", "pipe", "tensor"} <= set.union(*(axes for axes, _, _ in found))
    assert [loss for *_, loss in found] == pytest.approx([loss_of_all.item()] * 8, rel=1e-6)


def test_threads_have_the_coordinates_of_processes() -> None:
    found = run_as_threads(lambda c: (c.rank, c.coords, str(c)), data=2, tensor=2)
    assert found[2] == (2, {"data": 1, "pipe": 0, "sequence": 0, "tensor": 0}, "data=2, tensor=2")
    assert [rank for rank, *_ in found] == [0, 1, 2, 3]


def raise_on_one(context: ParallelContext) -> None:
    if context.rank == 1:
        raise ConfigError("only here.", rule="None.", remedy="None.")
    try:
        all_reduce(torch.ones(1), context.data if context.rank else context.tensor)
    except Exception as error:
        raise LaunchError("another is gone.", rule="None.", remedy="None.") from error


def test_error_on_one_rank_ends_all_ranks() -> None:
    with pytest.raises(ConfigError, match="only here"):
        run_as_threads(raise_on_one, data=2, tensor=2)


def end_early(context: ParallelContext) -> None:
    if context.rank != 1:
        all_reduce(torch.ones(1), context.tensor)


def call_others(context: ParallelContext) -> None:
    if context.rank == 1:
        all_gather_objects(1, context.tensor)
    all_reduce(torch.ones(3), context.tensor, op="max")


def compute_long(context: ParallelContext) -> None:
    if context.rank == 1:
        time.sleep(1.0)
    all_reduce(torch.ones(3), context.tensor, op="max")


@pytest.mark.parametrize(
    ("fn", "timeout_s", "said"),
    [
        (end_early, 60.0, "rank 0 waits for rank 1 in an exchange; rank 1 has ended"),
        (call_others, 60.0, "rank 0 waits for rank 1 in all_reduce; rank 1 waits for rank 0 in all_gather_objects"),
        (compute_long, 0.1, "rank 0 waits for rank 1 in all_reduce; rank 1 still computes after 0.1 s"),
    ],
    ids=["end_early", "call_others", "compute_long"],
)
def test_hopeless_wait_raises_with_state_of_each_rank(
    fn: Callable[[ParallelContext], None], timeout_s: float, said: str
) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        run_as_threads(fn, tensor=2, timeout_s=timeout_s)
    assert time.monotonic() - started < 20
    summary, _, states = caught.value.what.partition(": ")
    assert summary == "The ranks cannot complete a collective"
    assert "; ".join(sorted(states.split("; "))) == said


def test_in_turn_ranks_have_their_own_random_states() -> None:
    def draw(context: ParallelContext) -> float:
        numpy.random.seed(0)
        time.sleep(0.05)
        drawn = numpy.random.rand()
        all_reduce(torch.ones(1), context.tensor)
        return drawn

    assert len(set(run_as_threads(draw, tensor=4, one_at_a_time=True))) == 1
