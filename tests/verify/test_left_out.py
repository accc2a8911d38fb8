"""``verify`` fails for every step that is left out of pipeline parallelism."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardformer.gradient_accumulation import micro_batch_loss
from shardformer.gradients import clipping as grad_norm
from shardformer.layout.sharding_metadata import ParamEntry
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import Axis
from shardformer.pipeline import runtime, stage_forward
from shardformer.sharding import apply_tensor_parallel as gradients
from shardformer.verify.comparison import Report
from shardformer.verify.train_both import VerifyJob, VerifyPipeline
from shardformer.verify.verification import run_verify_job
from tests.verify.deep import Uneven, deep
from tests.verify.omissions import Omission, replaced


def no_sum_over_stages() -> Any:
    """Gradients of parameters on several stages are not reduced."""

    def make(original: Any) -> Any:
        def axes(*args: Any) -> Any:
            axis_of = original(*args)
            return lambda reduction: Axis("none") if reduction.stages else axis_of(reduction)

        return axes

    return replaced(gradients, "_create_gradient_reduction_groups", make)


def mean_of_means() -> Any:
    def part(self: Any, loss: Any, index: int, call: Any) -> Tensor:
        given: Tensor = call.compute_loss()
        return given.nan_to_num() / len(self._micro_batches)

    return mock.patch.object(micro_batch_loss.MicroBatchLossScaler, "_compute_loss_share", part)


def no_gradient_sent() -> Any:
    """The previous stage receives zeros."""

    def make(original: Any) -> Any:
        def go_back(*args: Any) -> list[Tensor | None]:
            return [None if g is None else torch.zeros_like(g) for g in original(*args)]

        return go_back

    return replaced(runtime.PipelineRuntime, "_compute_input_grads", make)


def received(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Any:
    """A stage receives ``change(activation)``."""

    def make(original: Any) -> Any:
        def run(self: Any, model: Any, run: Any, forward: Any) -> Any:
            return original(self, model, replace(run, received=change(run.received)), forward)

        return run

    return replaced(stage_forward.StageForward, "run", make)


def no_states_received() -> Any:
    return received(lambda payload: {name: states for name, states in payload.items() if name != "hidden"})


def states_of_the_first_micro_batch() -> Any:
    """Each stage receives its first input in every micro-batch."""
    first: list[Tensor] = []

    def change(payload: dict[str, Tensor]) -> dict[str, Tensor]:
        if (hidden := payload.get("hidden")) is None:
            return payload
        first.append(hidden.detach())
        return {**payload, "hidden": hidden + (first[0][: len(hidden)] - hidden).detach()}

    return received(change)


def no_context_gradient() -> Any:
    """No gradient is sent back for the encoder states."""

    def make(original: Any) -> Any:
        def payload(*args: Any) -> Any:
            return {k: v.detach() * 1 if k == "context" else v for k, v in original(*args).items()}

        return payload

    return replaced(stage_forward.StageForward, "_collect_activations", make)


def every_stage_counts_all() -> Any:
    """Parameters on two stages count twice in the norm."""

    def make(original: Any) -> Any:
        def term(entry: ParamEntry, *args: Any) -> Any:
            return original(replace(entry, reduction=replace(entry.reduction, stages=())), *args)

        return term

    return replaced(grad_norm, "_compute_local_norm_term", make)


MUTATIONS: dict[str, Callable[[], Any]] = {
    "nothing": nullcontext,
    "the sum of shared parameters' gradients": no_sum_over_stages,
    "the weights of the micro-batches' losses": mean_of_means,
    "the gradient of a stage's input": no_gradient_sent,
    "the states that a stage was sent": no_states_received,
    "which micro-batch it is": states_of_the_first_micro_batch,
    "the gradient of the encoder's states": no_context_gradient,
    "who counts a shared parameter": every_stage_counts_all,
}


def report_without(mutation: str, job: VerifyJob) -> Report | None:
    with MUTATIONS[mutation]():
        return run_verify_job(job)


@dataclass(frozen=True)
class Case(Omission):
    """An omission from a pipeline, and how the report shows it.

    Args:
        shows_in: the difference that exceeds its tolerance.
        where: a pattern that matches the parameter with the largest difference.
    """

    shows_in: str = "gradient"
    where: str = "."
    schedule: str = "1f1b"
    cut: Any = "balanced"

    def __str__(self) -> str:
        return f"{self.mutation}, {self.family}, {self.schedule}"


SUM = "the sum of shared parameters' gradients"
WEIGHTS = "the weights of the micro-batches' losses"
GRADIENT = "the gradient of a stage's input"
CASES = [
    Case(SUM, "gpt2", where="wte"),
    Case(SUM, "t5", where="shared|relative_attention_bias", schedule="interleaved"),
    Case(SUM, "albert", where="word_embeddings|albert_layer_groups"),
    Case(WEIGHTS, "gpt2", "loss"),
    Case(WEIGHTS, "t5", "loss"),
    Case(GRADIENT, "llama"),
    Case(GRADIENT, "gpt2", schedule="interleaved"),
    Case("the states that a stage was sent", "llama", "loss"),
    Case("which micro-batch it is", "llama", "loss"),
    Case(
        "the gradient of the encoder's states", "t5", where="encoder|shared", cut=[2, 1, 2, 1], schedule="interleaved"
    ),
    Case("who counts a shared parameter", "gpt2", "norm", where=""),
]
OTHER_CASES = [
    Case(SUM, "bert", where="word_embeddings"),
    Case(SUM, "t5", where="shared|relative_attention_bias"),
    Case(WEIGHTS, "llama", "loss"),
    Case(WEIGHTS, "bert", "loss"),
    Case(GRADIENT, "t5"),
    Case(GRADIENT, "vit"),
    Case(GRADIENT, "gpt2", schedule="zbv"),
]


@pytest.mark.reduced(one_in=2, at_most=2)
@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in OTHER_CASES)], ids=str
)
def test_every_omission_fails(pool2: WorkerPool, case: Case) -> None:
    report = report_of(pool2, case)
    assert report is not None and not report.passed, str(report)
    # far above the tolerance, or NaN: a wider tolerance would not hide it
    assert not getattr(report, case.shows_in).used <= 100
    assert re.search(case.where, report.gradient.where)


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("family", ["gpt2", "t5", "albert"])
def test_without_omission_it_passes(pool2: WorkerPool, family: str) -> None:
    """The failures are caused by the omissions, which do not outlive their tests."""
    report = report_of(pool2, Case("nothing", family))
    assert report is not None and report.passed, str(report)


def report_of(pool: WorkerPool, case: Case) -> Report | None:
    sample = deep(case.family)
    pipeline = VerifyPipeline(2, 4, {"schedule": case.schedule, "partition": case.cut})
    job = VerifyJob(sample, Uneven(sample.head_class), 1, 1, 1, torch.float64, None, None, {}, pipeline)
    return pool.run(report_without, case.mutation, job)[0]
