"""A traced rank has the collectives and the memory of a rank in a real step."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers import masking_utils

from shardformer.comm.collectives import all_gather, all_gather_objects
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.errors import ConfigError
from shardformer.local_ranks.fake_rank import MemoryTracker, enable_fake_tensors, make_fake_context
from shardformer.local_ranks.threads import ThreadTransport, run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.mesh.transport import CollectiveEvent, CollectiveRecord
from shardformer.pipeline.pipeline import Pipeline
from shardformer.shard_model_api import shard_model
from shardformer.tensor_parallel.parallel_module import measure_embedding_scale
from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory

SEQUENCE = {"enable_sequence_parallelism": True}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, bool]]] = {
    "tensor": ({"tensor": 2}, {}),
    "sequence-parallel": ({"tensor": 2}, SEQUENCE),
    "pipe-tensor": ({"pipe": 2, "tensor": 2}, {}),
    "data": ({"data": 2}, {}),
    "averaged": ({"data": 2}, {"average_loss_over": "tokens"}),
}


@dataclass
class Step:
    """Collectives and memory of a rank in a step."""

    calls: list[CollectiveRecord]
    events: list[CollectiveEvent]
    peaks: tuple[int, int]
    shapes: Mapping[Any, Any]


class Unwatched:
    """A transport or world of threads whose copies do not count as memory."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                result = value(*args, **kwargs)
            if name == "exchange":
                return [Unwatched(work) for work in result]
            return Unwatched(result) if hasattr(result, "wait") or name == "create_transport" else result

        return call


def batch_of(sample: SmallModelFactory, *, masked: bool) -> dict[str, torch.Tensor]:
    batch = RandomBatchFactory(sample.head_class)(0)
    mask = batch.pop("attention_mask")
    return {**batch, "attention_mask": torch.ones_like(mask)} if masked else batch


def step(
    context: ParallelContext,
    sample: SmallModelFactory,
    batch: dict[str, torch.Tensor],
    options: Mapping[str, bool],
    given: Mapping[Any, Any],
) -> Step:
    averages = options.get("average_loss_over", "ranks")
    rest = {name: value for name, value in options.items() if name != "average_loss_over"}
    model = shard_model(sample(), context=context, **rest)
    optimizer = torch.optim.AdamW(model.parameters())
    setattr(optimizer, "needs_full_matrices", False)  # noqa: B010  # without a trial, whose memory would count
    with (
        CollectiveRecorder(context, model) as recorder,
        MemoryTracker([*model.parameters(), *batch.values()]) as memory,
    ):
        pipeline = Pipeline(model, micro_batches=2, average_loss_over=averages)
        pipeline.exchange.given = given
        pipeline.step(batch)
        peak = memory.peak  # which a small model's optimizer surpasses
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return Step(recorder.calls, recorder.events, (peak, memory.peak), pipeline.exchange.known)


def traced(
    sizes: Mapping[str, int],
    sample: SmallModelFactory,
    batch: dict[str, torch.Tensor],
    options: Mapping[str, bool],
    **fake: Any,
) -> list[Step]:
    """Trace every rank's step alone, the first stage before the others."""
    steps: list[Step] = []
    for rank in range(len(ParallelContext.from_sizes(sizes).grid.ranks)):
        coords = {
            name: at for name, at in ParallelContext.from_sizes(sizes).grid.get_coords(rank).items() if name in sizes
        }
        with enable_fake_tensors() as copied:
            fakes = copied(batch)
            given = steps[0].shapes if steps else {}
            steps.append(step(make_fake_context(coords, **sizes, **fake), sample, fakes, options, given))
    return steps


def computed(
    sizes: Mapping[str, int], sample: SmallModelFactory, batch: dict[str, torch.Tensor], options: Mapping[str, bool]
) -> list[Step]:
    """Run every rank's step, with threads as ranks."""
    sample()  # transformers is imported here, which two threads at a time cannot

    def run(context: ParallelContext) -> Step:
        unwatched: Any = Unwatched(context.world)
        return step(ParallelContext.from_sizes(sizes, at(context), world=unwatched), sample, batch, options, {})

    def at(context: ParallelContext) -> dict[str, int]:
        return {name: rank for name, rank in context.coords.items() if name in sizes}

    return run_as_threads(run, **sizes)


def assert_alike(found: list[Step], expected: list[Step]) -> None:
    for rank, (trace, real) in enumerate(zip(found, expected, strict=True)):
        assert trace.calls == real.calls, f"rank {rank}"
        assert trace.events == real.events, f"rank {rank}"
        assert trace.peaks == real.peaks, f"rank {rank}"
        assert real.calls and all(real.peaks)


@pytest.mark.slow
@pytest.mark.reduced(one_in=6, at_most=1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_trace_matches_collectives_and_peak_memory_of_real_step(family: str, layout: str) -> None:
    sizes, options = LAYOUTS[layout]
    sample = SmallModelFactory(family)
    batch = batch_of(sample, masked=False)
    assert_alike(traced(sizes, sample, batch, options), computed(sizes, sample, batch, options))


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_trace_without_padding_uses_no_mask(family: str) -> None:
    sample = SmallModelFactory(family)
    batch = batch_of(sample, masked=True)
    expected = computed({"tensor": 2}, sample, batch, {})
    assert_alike(traced({"tensor": 2}, sample, batch, {}), expected)


def test_trace_can_assume_padding() -> None:
    sample = SmallModelFactory("llama")
    batch = batch_of(sample, masked=True)
    batch["attention_mask"][:, -3:] = 0
    expected = computed({"tensor": 2}, sample, batch, {})
    with enable_fake_tensors(padded=True) as copied:
        fakes = copied(batch)
        trace = step(make_fake_context(tensor=2), sample, fakes, {}, {})
    assert_alike([trace], expected[:1])


def test_trace_can_use_nccl_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    sample, sizes = SmallModelFactory("llama"), {"tensor": 2}
    batch = batch_of(sample, masked=False)
    over_gloo = traced(sizes, sample, batch, SEQUENCE)
    monkeypatch.setattr(ThreadTransport, "is_direct_exchange_faster", lambda self, x: False)
    found = traced(sizes, sample, batch, SEQUENCE, backend="nccl")
    assert_alike(found, computed(sizes, sample, batch, SEQUENCE))
    assert found[0].peaks != over_gloo[0].peaks


def test_model_with_dropout_is_traced() -> None:
    sample = SmallModelFactory("gpt2", changes={"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1})
    batch = batch_of(sample, masked=False)
    sizes = {"pipe": 2, "tensor": 2}
    for trace, real in zip(traced(sizes, sample, batch, {}), computed(sizes, sample, batch, {}), strict=True):
        assert trace.events == real.events


def test_stage_is_traced_with_shapes_of_previous_stage() -> None:
    sample = SmallModelFactory("llama")
    with enable_fake_tensors() as copied:
        fakes = copied(batch_of(sample, masked=False))
        with pytest.raises(ConfigError, match="Virtual stage 1 cannot be traced, because"):
            step(make_fake_context({"pipe": 1}, pipe=2), sample, fakes, {}, {})


def test_block_that_reads_head_width_is_refused() -> None:
    """The input of BLIP-2's vision model is a tensor subclass, which a fake tensor cannot represent."""
    sample = SmallModelFactory("blip-2")
    real, batch = sample(), RandomBatchFactory(sample.head_class)(0)
    with enable_fake_tensors() as copied:
        model = shard_model(copied(real), context=make_fake_context(tensor=2))
        with pytest.raises(ConfigError, match="its attention reads the head size from an input"):
            model(**copied(batch))


def test_fake_collectives_return_own_objects() -> None:
    context = make_fake_context({"data": 2, "tensor": 1}, tensor=4, data=8)
    assert (context.rank, context.coords["data"]) == (9, 2)
    assert context.flatten("data", "tensor").size == 32
    assert all_gather_objects("here", context.tensor) == ["here"] * 4
    with enable_fake_tensors():
        whole = all_gather(torch.zeros(3, 2), context.tensor, 1, full_length=7)
    assert isinstance(whole, FakeTensor) and whole.shape == (3, 7)


def test_trace_does_not_change_masks_of_other_threads() -> None:
    """A batch with two texts per row, while another thread traces. Of two traces, the first to begin ends first."""
    model = SmallModelFactory("llama", changes={"attn_implementation": "sdpa"})().eval()
    ids = torch.arange(5, 15).view(1, 10)
    rows = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]])}
    with torch.no_grad():
        expected = model(**rows).logits
        assert not torch.equal(expected, model(input_ids=ids).logits)
    made = masking_utils.sdpa_mask, masking_utils.find_packed_sequence_indices
    begun, ends = [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)]

    def trace(number: int) -> None:
        with enable_fake_tensors():
            begun[number].set()
            assert ends[number].wait(20)

    def logits() -> Tensor:
        with torch.no_grad():
            found: Tensor = model(**rows).logits
            return found

    traces: list[Future[None]] = []
    with ThreadPoolExecutor(2) as threads:
        for number in (0, 1):
            traces.append(threads.submit(trace, number))
            assert begun[number].wait(20)
        assert torch.equal(logits(), expected)
        ends[0].set()
        traces[0].result()
        assert torch.equal(logits(), expected)
        ends[1].set()
        traces[1].result()
    assert made == (masking_utils.sdpa_mask, masking_utils.find_packed_sequence_indices)


def test_memory_tracker_follows_allocations_and_frees() -> None:
    held = torch.zeros(100)
    with MemoryTracker([held]) as memory:
        assert memory.live == 400
        x = held + 1
        view = x[:10]
        assert (memory.live, memory.peak) == (800, 800)
        del x
        assert memory.live == 800  # the view holds it
        del view
        y = held[:50] * 2
        assert (memory.live, memory.peak) == (600, 800)
        del held
        assert memory.live == 200 and len(y) == 50


LLAMA_7B = """
import re, time
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.pipeline.pipeline import Pipeline
from shardformer.shard_model_api import shard_model
from shardformer.local_ranks.fake_rank import MemoryTracker, make_fake_context, enable_fake_tensors

config = LlamaConfig(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
                     num_attention_heads=32, use_cache=False)
start = time.process_time()
with enable_fake_tensors():
    context = make_fake_context({"data": 17, "tensor": 5}, tensor=8, pipe=4, data=32)
    model = shard_model(LlamaForCausalLM._from_config(config, dtype=torch.bfloat16), context=context)
    ids = torch.zeros(4, 2048, dtype=torch.long)
    with CollectiveRecorder(context, model) as recorder, MemoryTracker(model.parameters()) as memory:
        Pipeline(model, micro_batches=4).step({"input_ids": ids, "labels": ids})
weights = sum(p.numel() * p.element_size() for p in model.parameters())
print(context.rank, recorder.count("all_reduce", axis="tensor"), recorder.count("send", purpose="activation"),
      recorder.payload_bytes("all_reduce", axis="data") // weights, memory.peak > 2 * weights)
# of this program: getrusage gives what its parent held, too
peak = re.search(r"VmHWM: +(.+) kB", Path("/proc/self/status").read_text().replace("\\t", " "))[1]
print(time.process_time() - start, int(peak) / 2**20)
"""


@pytest.mark.full
@pytest.mark.slow
def test_trace_of_one_of_1024_llama_7b_ranks_takes_seconds() -> None:
    """The first of 4 stages has 8 of 32 layers, with 2 all-reduces forward and 2 backward for each of 4 micro-batches.

    The embedding adds one all-reduce.
    """
    said = subprocess.run([sys.executable, "-c", LLAMA_7B], capture_output=True, text=True, check=True).stdout
    counts, costs = said.splitlines()[-2:]
    assert counts.split() == [str(17 * 32 + 5), str(4 * (8 * 4 + 1)), "4", "1", "True"]
    seconds, gib = map(float, costs.split())
    assert seconds < 15 and gib < 1


class ScaledEmbedding(torch.nn.Embedding):
    """An embedding that keeps its factor in a buffer, as that of Gemma 3."""

    def __init__(self) -> None:
        super().__init__(5, 4)
        self.register_buffer("factor", torch.tensor(8.0), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.factor.to(self.weight.dtype)


def test_the_factor_of_an_embedding_is_known_without_values() -> None:
    with enable_fake_tensors():
        assert measure_embedding_scale(ScaledEmbedding()) == 8.0
