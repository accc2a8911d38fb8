"""Shared parts of the benchmarks: LLaMAs of a given size, processes in which variants alternate, medians, tables."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.pipeline.pipeline import Pipeline

MB = 1e6
NUM_BATCHES = 4
TIMEOUT_S = 3600.0

Step = Callable[[int], float]
"""One training step: index of the step -> its loss."""


@dataclass(frozen=True)
class Llama:
    """The size of a LLaMA. ``config()`` returns transformers' config."""

    hidden: int
    intermediate: int
    heads: int
    sequence: int
    layers: int = 4
    vocabulary: int = 8000

    def config(self) -> Any:
        import transformers

        return transformers.LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            num_hidden_layers=self.layers,
            max_position_embeddings=self.sequence,
            num_labels=16,
            pad_token_id=0,
        )

    def build(self, head: str = "LlamaForCausalLM") -> nn.Module:
        """Build the model in fp32, with the same random weights in every process."""
        import transformers

        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, head)(self.config())
        return model

    def batches(self, batch: int, head: str = "LlamaForCausalLM") -> list[dict[str, Tensor]]:
        """Return random batches, the same in every process."""
        generator = torch.Generator().manual_seed(1)
        out = []
        for _ in range(NUM_BATCHES):
            ids = torch.randint(1, self.vocabulary, (batch, self.sequence), generator=generator)
            classes = torch.randint(16, (batch,), generator=generator)
            out.append({"input_ids": ids, "labels": classes if head.endswith("ForSequenceClassification") else ids})
        return out


@dataclass(frozen=True)
class Setting:
    """A model and its batch, and how often or for how many seconds a step is measured."""

    model: Llama
    batch: int
    repetitions: int
    seconds: float


@dataclass(frozen=True)
class Timing:
    """The times of one variant's steps, each on the slowest rank, and its losses."""

    seconds: list[float]
    losses: list[float]

    @property
    def ms(self) -> float:
        return median(self.seconds) * 1e3


def train_step(
    model: nn.Module,
    batches: Sequence[Mapping[str, Tensor]],
    optimizer: torch.optim.Optimizer | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Step:
    """Run a forward pass, a backward pass and an optimizer step (if there is an optimizer) within ``around()``."""

    def step(index: int) -> float:
        model.zero_grad()
        with around():
            loss = model(**batches[index % len(batches)]).loss
            loss.backward()
        if optimizer is not None:
            optimizer.step()
        return float(loss.detach())

    return step


def pipeline_step(model: nn.Module, pipeline: Pipeline, batches: Sequence[Mapping[str, Tensor]]) -> Step:
    """Run a forward and a backward pass over the pipeline stages."""

    def step(index: int) -> float:
        model.zero_grad()
        return float(pipeline.step(batches[index % len(batches)]))

    return step


def llama(hidden: int, sequence: int, layers: int, vocabulary: int) -> Llama:
    """Return a LLaMA with an MLP of 8/3 of the hidden size, rounded to 16, and heads of 64 (32 below hidden 512)."""
    heads = max(2, hidden // (64 if hidden >= 512 else 32))
    return Llama(hidden, (hidden * 8 // 3 + 15) // 16 * 16, heads, sequence, layers, vocabulary)


def head_like_a_layer(hidden: int) -> int:
    """Return the vocabulary size for which the head has as many weights as a layer."""
    return 4 * hidden + 3 * ((hidden * 8 // 3 + 15) // 16 * 16)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's fused AdamW. Regular tensors and DTensors form two groups, because it cannot mix them."""
    kinds: dict[type, list[nn.Parameter]] = {}
    for param in model.parameters():
        kinds.setdefault(type(param.data), []).append(param)
    return torch.optim.AdamW([{"params": params} for params in kinds.values()], lr=1e-4, fused=True)


def take_turns(
    steps: Mapping[str, Step | None], repetitions: int, seconds: float, *, at_least: int = 5, warm_up: int = 2
) -> dict[str, Timing]:
    """Time the variants alternately, one step each, on all ranks. A rank whose variant is None sleeps.

    Called by all ranks. After ``warm_up`` uncounted rounds, ``repetitions`` rounds follow, or with 0 as many as fit
    into ``seconds``, but at least ``at_least``. Every round starts with another variant, so that none always follows
    the same one.
    """
    names = list(steps)
    taken: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    index, rounds, lasted = 0, warm_up + 1, 0.0
    while index < rounds:
        begin = time.perf_counter()
        first = index % len(names)
        for name in names[first:] + names[:first]:
            step = steps[name]
            dist.barrier()
            start = time.perf_counter()
            loss = step(index) if step is not None else float("nan")
            taken[name].append(time.perf_counter() - start)
            losses[name].append(loss)
        lasted = time.perf_counter() - begin
        index += 1
        if index == warm_up + 1:  # the first round after warm-up determines how many more fit into the time
            more = repetitions or max(int(seconds / lasted), at_least)
            rounds = warm_up + agree(more)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, taken)
    return {
        name: Timing([max(times) for times in zip(*(rank[name] for rank in everywhere))][warm_up:], losses[name])
        for name in names
    }


def agree(value: int) -> int:
    """Return rank 0's value on all ranks."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def processes(num: int, threads: int = 1) -> WorkerPool:
    """Start a pool of processes that communicate over gloo."""
    return WorkerPool(num, timeout_s=TIMEOUT_S, num_threads=threads, module_names=("torch", "transformers"))


def two_processes(threads: int = 1) -> WorkerPool:
    return processes(2, threads)


def arguments(description: str | None, seconds: float, **sizes: int) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks, and with those in ``sizes``: name -> default."""
    parser = argparse.ArgumentParser(
        description=(description or "").split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--repetitions", type=int, default=0, help="steps per variant (0: as many as fit into --seconds)"
    )
    parser.add_argument("--seconds", type=float, default=seconds, help="time per setting, for at least a few steps")
    parser.add_argument("--threads", type=int, default=1, help="torch threads per process")
    parser.add_argument("--json", action="store_true", help="print all measurements as JSON instead of tables")
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


def progress(text: str) -> None:
    """Print a progress line to standard error."""
    print(text, file=sys.stderr, flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with left-aligned first and right-aligned other columns."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *[cell.rjust(w) for cell, w in zip(line[1:], widths[1:])]]).rstrip()
        for line in lines
    )


def ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def largest_difference(timings: Mapping[str, Timing], reference: str) -> tuple[str, float]:
    """Return the variant whose losses differ most from the reference's, and the relative difference."""
    expected = timings[reference].losses
    differences = {
        name: max(abs(a - b) / abs(b) for a, b in zip(timing.losses, expected)) for name, timing in timings.items()
    }
    worst = max(differences, key=lambda name: differences[name])
    return worst, differences[worst]


def as_json(benchmark: str, settings: Mapping[str, Any], results: Any) -> str:
    """Format all measurements, with a description of the machine."""
    machine = {"cores": os.cpu_count(), "torch": torch.__version__, "load": os.getloadavg()}
    return json.dumps({"benchmark": benchmark, "machine": machine, "settings": settings, "results": results}, indent=1)


def timings_as_dict(timings: Mapping[str, Timing]) -> dict[str, Any]:
    return {name: {"ms": timing.ms, **asdict(timing)} for name, timing in timings.items()}
