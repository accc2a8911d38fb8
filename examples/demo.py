"""Train a small GPT-2 in one process and sharded over several, and compare gradients, weights and losses.

    python examples/demo.py                       # tensor parallel: each layer is sharded over two processes
    python examples/demo.py --pipe 2              # two pipeline stages
    python examples/demo.py --data 2 --zero-stage 2   # data parallel with ZeRO stage 2

The training text is the documentation that ships with Python. A run takes about a minute on two idle cores, and longer
if other processes use them. The exit status is 1 if a difference is larger than rounding errors.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import shardformer
from shardformer.verify import VerifyPipeline, VerifyTraining, verify

transformers.logging.set_verbosity_error()  # otherwise every process prints the same warnings

BATCH_SIZE, SEQUENCE = 8, 128
LARGEST_DIFFERENCE = 1e-4
"""Maximum relative difference of a loss. In 120 steps fp32 rounding causes 1e-5, a missing all-reduce 1e-2."""


def build_model(layers: int, hidden: int) -> transformers.GPT2LMHeadModel:
    """Build an unmodified model of transformers that reads bytes. Dropout is off, so that runs can be compared."""
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=SEQUENCE, n_embd=hidden, n_layer=layers, n_head=8,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def samples() -> list[dict[str, torch.Tensor]]:
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    return [{"input_ids": ids, "labels": ids} for ids in torch.tensor(list(text)).split(SEQUENCE)[:-1]]


def batch_at(step: int) -> dict[str, torch.Tensor]:
    chosen = samples()[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]
    return {name: torch.stack([sample[name] for sample in chosen]) for name in chosen[0]}


def model_and_optimizer(args: argparse.Namespace) -> tuple[transformers.GPT2LMHeadModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = build_model(args.layers, args.hidden).train()
    return model, torch.optim.AdamW(model.parameters(), lr=5e-4)


def train_in_one_process(args: argparse.Namespace) -> Iterator[float]:
    """Train with an ordinary PyTorch loop."""
    model, optimizer = model_and_optimizer(args)
    for batch in itertools.islice(torch.utils.data.DataLoader(samples(), BATCH_SIZE), args.steps):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def train_in_parallel(args: argparse.Namespace, parallel: shardformer.ParallelConfig) -> Iterator[float]:
    """Train with an engine. Runs in every process."""
    model, optimizer = model_and_optimizer(args)
    engine = shardformer.initialize(
        model, optimizer, train_data=samples(), batch_size=BATCH_SIZE, parallel=parallel,
        data_options={"shuffle": False},
    )  # fmt: skip
    for batch in itertools.islice(engine.data, args.steps):
        yield engine.train_step(batch).item()


def timed(losses: Iterable[float], name: str = "") -> dict[str, Any]:
    """Return the losses of a run and its tokens per second, measured without the first step."""
    found, times = list[float](), [time.perf_counter()]
    for loss in losses:
        found.append(loss)
        times.append(time.perf_counter())
        if name and len(found) % 10 == 0:
            print(f"{name}: step {len(found)}, loss {loss:.4f}", flush=True)
    first = min(1, len(found) - 1)
    seconds = (times[-1] - times[first]) / (len(found) - first)
    return {"losses": found, "tokens_per_second": BATCH_SIZE * SEQUENCE / seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, help="tensor parallel size (default: 2 if no other size is set)")
    parser.add_argument("--pipe", type=int, default=1, help="pipeline stages")
    parser.add_argument("--data", type=int, default=1, help="data parallel size")
    parser.add_argument("--zero-stage", type=int, choices=(1, 2, 3), help="ZeRO stage")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256, help="hidden size, a multiple of 8")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # set for the processes that this one starts
    args = parser.parse_args()
    tensor = args.tensor or (2 if args.pipe == args.data == 1 else 1)
    num_processes = tensor * args.pipe * args.data
    torch.set_num_threads(1)  # the same number as in each process of the parallel run

    if args.result is not None:
        parallel = shardformer.ParallelConfig(
            tensor=tensor, pipe=args.pipe, data=args.data, zero_stage=args.zero_stage, max_grad_norm=1.0
        )
        name = f"{num_processes} processes" if os.environ["RANK"] == "0" else ""
        result = timed(train_in_parallel(args, parallel), name)
        if name:
            args.result.write_text(json.dumps(result), encoding="utf-8")
        return 0

    console = Console()
    console.rule("Gradients and weights, in double precision")
    model_fn = functools.partial(build_model, args.layers, args.hidden)
    pipeline = VerifyPipeline(pipe=args.pipe) if args.pipe > 1 else None
    training = VerifyTraining(zero_stage=args.zero_stage)
    report = verify(model_fn, batch_at, tensor, args.data, pipeline=pipeline, training=training)
    print(report)

    console.rule(f"A run of {args.steps} steps, in single precision")
    plain = timed(train_in_one_process(args), "1 process")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        command = [sys.executable, "-m", "shardformer", "run", "--nproc_per_node", str(num_processes), __file__]
        subprocess.run([*command, *sys.argv[1:], "--result", str(file)], check=True)
        parallel_run = json.loads(file.read_text(encoding="utf-8"))
    pairs = list(zip(plain["losses"], parallel_run["losses"], strict=True))
    differences = [abs(ours - theirs) / theirs for theirs, ours in pairs]

    table = Table("", "1 process", f"{num_processes} processes", "difference")
    for step in sorted({1, *range(10, args.steps, 10), args.steps}):
        table.add_row(
            f"loss, step {step}", *(f"{loss:.6f}" for loss in pairs[step - 1]), f"{differences[step - 1]:.1e}"
        )
    rates = [run["tokens_per_second"] for run in (plain, parallel_run)]
    table.add_row("tokens per second", *(f"{rate:,.0f}" for rate in rates), f"x {rates[1] / rates[0]:.2f}")
    console.print(table)
    if rates[1] < rates[0]:
        console.print(
            "The processes share the cores of this machine, and this small model computes little between two "
            "communications. Compare the losses, not the speed."
        )
    is_equal = report.passed and max(differences) <= LARGEST_DIFFERENCE
    console.print(
        f"{'PASS' if is_equal else 'FAIL'}: the largest relative difference of a loss is {max(differences):.1e} "
        f"(tolerance {LARGEST_DIFFERENCE:.0e})."
    )
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
