"""Diverging ranks are detected at the same or the next step, and the error names the difference."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardformer
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.consistency import rank_divergence as watches
from shardformer.consistency.rank_divergence import BITS, RankConsistencyMonitor
from shardformer.errors import InputError
from shardformer.layout.sharding_metadata import get_sharding_metadata
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory

STEPS, AT = 4, 2
Change = Callable[["Run"], None]


class Run:
    """A model in training on one rank. A test changes it before a step."""

    def __init__(self, context: ParallelContext, *, zero_stage: int | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.context = context
        self.model: Any = shardformer.shard_model(SmallModelFactory("llama")().train(), context=context, **options)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        if zero_stage is not None:
            self.optimizer = shardformer.shard_optimizer(self.model, self.optimizer, stage=zero_stage)
        self.pipeline = shardformer.Pipeline(self.model, micro_batches=2) if context.pipe.size > 1 else None
        self.skips = False

    def batch(self, step: int) -> dict[str, Tensor]:
        return RandomBatchFactory(DEFAULT_HEAD["llama"])(10 * step + self.context.data.rank)

    def step(self, batch: dict[str, Tensor]) -> None:
        if self.pipeline is not None:
            self.pipeline.step(batch)
        else:
            self.model(**batch).loss.backward()
        if not self.skips:
            self.optimizer.step()
        self.optimizer.zero_grad()


def other_batch(run: Run) -> None:
    run.batch = lambda step: RandomBatchFactory(DEFAULT_HEAD["llama"])(999)  # type: ignore[method-assign]


def eval_mode(run: Run) -> None:
    run.model.eval()


def other_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 2


def skipped(run: Run) -> None:
    run.skips = True


@torch.no_grad()
def other_weight(run: Run) -> None:
    parameters = dict(run.model.named_parameters())
    parameters["model.norm.weight"][3] += 1e-2


CHANGES: dict[str, tuple[Change, str]] = {
    "batch": (other_batch, "different batches"),
    "mode": (eval_mode, "different modes"),
    "rate": (other_rate, "different learning rates"),
    "skipped": (skipped, "numbers of optimizer steps"),
    "weight": (other_weight, "different replicated weights"),
}


def came_apart(change: Change | None, odd: int, sizes: dict[str, int], at: int = AT, **options: Any) -> list[str]:
    """Return the error of each rank of a run in which one rank is changed at a step."""

    def do(context: ParallelContext) -> str:
        run = Run(context, **options)
        for step in range(STEPS + AT):
            if change is not None and context.rank == odd and step == at:
                change(run)
            try:
                run.step(run.batch(step))
            except InputError as error:
                assert step in (at, at + 1), "no later than with the next message"
                return str(error)
        return ""

    return run_as_threads(do, **sizes, one_at_a_time=True)


@pytest.mark.reduced(at_most=2)
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"tensor": 3}, {"sequence": 2}], ids=str)
@pytest.mark.parametrize("name", CHANGES)
def test_tensor_ranks_detect_divergence(name: str, sizes: dict[str, int]) -> None:
    change, said = CHANGES[name]
    found = came_apart(change, 1, sizes)
    assert all(said in text for text in found), found
    assert len(set(found)) == 1, "all say the same"
    if 3 in sizes.values():
        assert "rank 1: " in found[0], "the one that differs is named"


# A ZeRO step is collective, and each weight is updated on one rank. Under stage 3, a rank in another mode would read
# other weights, for which the other ranks would wait.
OF_DATA = [
    ("mode", {}),
    ("rate", {}),
    ("skipped", {}),
    ("weight", {}),
    ("mode", {"zero_stage": 1}),
    ("rate", {"zero_stage": 1}),
]
OF_DATA += [("mode", {"zero_stage": 2}), ("rate", {"zero_stage": 2}), ("rate", {"zero_stage": 3})]


@pytest.mark.reduced(at_most=3)
@pytest.mark.parametrize(("name", "how"), OF_DATA, ids=str)
def test_data_ranks_detect_divergence(name: str, how: dict[str, Any]) -> None:
    change, said = CHANGES[name]
    found = came_apart(change, 1, {"data": 3}, **how)
    assert all(said in text for text in found), found
    assert all("rank 1: " in text for text in found)


@pytest.mark.parametrize("name", ["batch", "mode", "skipped", "rate"])
def test_stages_detect_divergence(name: str) -> None:
    change, said = CHANGES[name]
    found = came_apart(change, 1, {"pipe": 2})
    words = {"batch": "different batches", "mode": "different training modes"}
    assert all(words.get(name, said) in text for text in found), found
    if name == "skipped":
        assert all(re.search(r"Ranks 0 and 1 \(stages 0 and 1 of 2\) .* \(\d and \d\)", text) for text in found)


@pytest.mark.parametrize("name", ["weight_decay", "rate"])
def test_stages_detect_different_options_from_the_first_step(name: str) -> None:
    option = {"weight_decay": "weight_decay", "rate": "lr"}[name]
    found = came_apart(lambda run: run.optimizer.param_groups[0].update({option: 0.5}), 1, {"pipe": 2}, at=0)
    assert all("learning rates or other optimizer options" in text for text in found), found


def test_stages_may_use_different_optimizer_classes() -> None:
    def other_class(run: Run) -> None:
        run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)

    assert set(came_apart(other_class, 1, {"pipe": 2}, at=0)) == {""}


def test_engine_may_use_optimizers_with_different_options_per_stage() -> None:
    def do(context: ParallelContext) -> int:
        torch.manual_seed(0)
        model = SmallModelFactory("llama")().train()
        parts: tuple[list[Any], list[Any]] = ([], [])
        for name, param in model.named_parameters():
            parts[any(part in name for part in ("layers.1.", "model.norm", "lm_head"))].append(param)
        optimizers = [torch.optim.AdamW(part, lr=rate) for part, rate in zip(parts, (0.01, 0.1), strict=True)]
        engine = shardformer.initialize(
            model, optimizers, parallel=shardformer.ParallelConfig(pipe=2, micro_batches=2), context=context
        )
        for step in range(3):
            engine.backward(engine(RandomBatchFactory(DEFAULT_HEAD["llama"])(step)))
            engine.step()
        return engine.steps

    assert run_as_threads(do, pipe=2, one_at_a_time=True) == [3, 3]


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize(
    "sizes", [{"tensor": 2, "data": 2}, {"pipe": 2, "data": 2}, {"sequence": 2, "data": 2}], ids=str
)
def test_consistent_ranks_raise_nothing(sizes: dict[str, int]) -> None:
    assert set(came_apart(None, 0, sizes)) == {""}


@torch.no_grad()
def rounded(run: Run) -> None:
    for entry in get_sharding_metadata(run.model).entries:
        if not entry.spec.axes:
            entry.param.mul_(1 + 2e-7)


def test_rounding_errors_are_no_divergence() -> None:
    """Each rank computes its gradients itself, with kernels that may use another order of summation."""
    assert came_apart(rounded, 1, {"tensor": 2}) == ["", ""]
    assert all("different replicated weights" in said for said in came_apart(rounded, 1, {"data": 2}))


def test_evaluation_on_all_ranks_is_no_divergence() -> None:
    def do(context: ParallelContext) -> None:
        run = Run(context)
        for step in range(6):
            run.model.train(step % 3 != 1)
            if run.model.training:
                run.step(run.batch(step))
            else:
                with torch.no_grad():
                    run.model(**run.batch(step))
                    run.model(input_ids=run.batch(step)["input_ids"])

    run_as_threads(do, tensor=2, data=2)


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"sequence": 2}, {"tensor": 2, "pipe": 2}], ids=str)
def test_different_batches_in_evaluation_are_detected(sizes: dict[str, int]) -> None:
    def do(context: ParallelContext) -> None:
        run = Run(context)
        run.model.eval()
        evaluate = run.pipeline.evaluate if run.pipeline is not None else lambda batch: run.model(**batch)
        with torch.no_grad():
            evaluate(run.batch(0))
            evaluate(run.batch(1))
            with pytest.raises(InputError, match="different batches"):
                evaluate(run.batch(2 + (context.tensor.rank or context.sequence.rank)))

    run_as_threads(do, **sizes)


def sampled() -> list[int]:
    """Generate a text on each rank with its own random seed."""
    context = ParallelContext.from_default_process_group({"tensor": 2})
    torch.manual_seed(0)
    model: Any = shardformer.shard_model(SmallModelFactory("llama")(), context=context).eval()
    torch.manual_seed(context.rank)
    text: list[int] = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=True)[0].tolist()
    return text


def test_ranks_sample_the_same_text_with_different_seeds(pool2: WorkerPool) -> None:
    first, second = pool2.run(sampled)
    assert first == second


def test_consistency_check_can_be_disabled() -> None:
    assert set(came_apart(other_rate, 1, {"tensor": 2}, check_consistency=False)) == {""}
    assert set(came_apart(other_rate, 1, {"data": 2}, check_consistency=False)) == {""}
    with pytest.raises(shardformer.ShardFormerError, match="check_consistency='no'"):
        shardformer.compat.ShardConfig(check_consistency="no")  # type: ignore[arg-type]


def test_different_options_on_ranks_raise() -> None:
    def do(context: ParallelContext) -> None:
        with pytest.raises(shardformer.ShardFormerError, match="check_consistency="):
            shardformer.shard_model(SmallModelFactory("llama")(), context=context, check_consistency=context.rank == 0)

    run_as_threads(do, tensor=2)


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"data": 2}, {"pipe": 2}], ids=str)
def test_consistency_check_needs_no_extra_communication(sizes: dict[str, int]) -> None:
    """The number of collectives does not change. The last bucket grows by a few bytes."""
    bits = 2 * BITS * 4 if "data" in sizes else 0

    def do(context: ParallelContext) -> dict[bool, tuple[int, int]]:
        found = {}
        for on in (True, False):
            run = Run(context, check_consistency=on)
            run.step(run.batch(0))
            with CollectiveRecorder(context) as recorder:
                run.step(run.batch(1))
            found[on] = len(recorder.events), recorder.wire_bytes()
        return found

    for found in run_as_threads(do, **sizes):
        assert found[True][0] == found[False][0]
        assert found[True][1] - found[False][1] == bits


# --- what each message is about


def toy(context: ParallelContext) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 7))
    return shardformer.shard_model(model, context=context), context


@contextmanager
def small_parts(monkeypatch: pytest.MonkeyPatch, parts: int, part_bytes: int) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(watches, "PARTS", parts)
        patch.setattr(watches, "PART_BYTES", part_bytes)
        yield


@pytest.mark.parametrize("at", [0, 5000, 11_999, 12_100, 14_399, 14_406])
def test_all_weights_are_compared_within_a_number_of_steps(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def do(context: ParallelContext) -> int:
        model, _ = toy(context)
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        assert at < len(flat)
        if context.data.rank == 1:
            begin = 0
            for p in model.parameters():
                if begin <= at < begin + p.numel():
                    p.data.view(-1)[at - begin] += 1e-6
                begin += p.numel()
        for step in range(12):
            try:
                model(torch.ones(2, 40)).sum().backward()
            except InputError as error:
                assert "different replicated weights" in str(error)
                return step
        return -1

    with small_parts(monkeypatch, 10, 1000):
        found = run_as_threads(do, data=2)
    assert found[0] == found[1] != -1


def test_copied_model_has_its_own_monitor() -> None:
    def do(context: ParallelContext) -> None:
        run = Run(context)
        run.step(run.batch(0))
        duplicate = copy.deepcopy(run.model)
        state = duplicate.__dict__["_shardformer"]
        assert isinstance(state.monitor, RankConsistencyMonitor)
        assert state.monitor.state is state
        assert state.monitor.steps == 0
        for step in range(2):
            run.step(run.batch(step))
            duplicate(**run.batch(step)).loss.backward()

    run_as_threads(do, data=2)


def test_two_models_have_separate_step_counts() -> None:
    def do(context: ParallelContext) -> tuple[int, int]:
        one, other = Run(context), Run(context)
        one.step(one.batch(0))
        one.step(one.batch(1))
        other.step(other.batch(0))
        return tuple(run.model.__dict__["_shardformer"].monitor.steps for run in (one, other))  # type: ignore[return-value]

    assert run_as_threads(do, tensor=2) == [(2, 1), (2, 1)]
