"""Overhead of transformers' Trainer with ShardFormer, compared with a loop over the same sharded model.

The loop reads a data loader, calls the model, clips, steps the optimizer and the scheduler, and clears the gradients.
The ratio of the CPU times of the first process depends less on other processes of the machine. Each variant is built
twice, first and last, because the memory that a model gets changes the step time by some percent. Needs accelerate:
``pip install 'shardformer[accelerate]'``.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from statistics import median
from typing import Any

import common
import torch
from common import Llama, Step
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

import shardformer
from shardformer.mesh.parallel_context import ParallelContext

LAYOUTS: dict[str, dict[str, int]] = {
    "data 2": {"data": 2},
    "tensor 2": {"tensor": 2},
    "data 2, ZeRO 2": {"data": 2, "zero_stage": 2},
}
NUM_STEPS = 1_000_000
"""Length of the data and of the schedule, longer than any measurement."""


class Rows(Dataset[dict[str, Tensor]]):
    """Endless data: the batches of the benchmark one after the other."""

    def __init__(self, size: Llama, batch: int) -> None:
        batches = size.batches(batch)
        self._rows = [{name: x[row] for name, x in each.items()} for each in batches for row in range(batch)]

    def __len__(self) -> int:
        return NUM_STEPS * len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._rows[index % len(self._rows)]


class OwnBatches(Sampler[list[int]]):
    """The batches of one data rank, as accelerate distributes them."""

    def __init__(self, batch: int, rank: int, num_ranks: int) -> None:
        self._batch, self._rank, self._num_ranks = batch, rank, num_ranks

    def __iter__(self) -> Iterator[list[int]]:
        for number in count(self._rank, self._num_ranks):
            yield list(range(number * self._batch, (number + 1) * self._batch))


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def loop(size: Llama, batch: int, layout: dict[str, int]) -> Step:
    """Return the step of a training loop that calls the model itself."""
    model: Any = size.build().train()
    sizes = {name: n for name, n in layout.items() if name != "zero_stage"}
    context = ParallelContext.from_default_process_group(sizes)
    model = shardformer.shard_model(model, context=context)
    own = OwnBatches(batch, context.data.rank, context.data.size)
    optimizer: Any = common.adamw(model)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0  # the default of TrainingArguments
    if stage := layout.get("zero_stage"):
        optimizer = shardformer.shard_optimizer(model, optimizer, stage=stage)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / NUM_STEPS)
    batches: Iterator[dict[str, Tensor]] = iter(DataLoader(Rows(size, batch), batch_sampler=own, collate_fn=collate))

    def step(index: int) -> float:
        loss = model(**next(batches), use_cache=False).loss
        loss.backward()
        shardformer.clip_grad_norm_(model, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


class Turns:
    """Lets another thread run one step at a time.

    Args:
        run: trains in that thread. It calls ``wait`` before each step.
    """

    def __init__(self, run: Callable[[Turns], object]) -> None:
        self._mine, self._other = threading.Semaphore(0), threading.Semaphore(0)
        self.loss, self.error = 0.0, None
        self.is_over = False
        threading.Thread(target=self._run, args=(run,), daemon=True).start()
        self._other.acquire()  # until the first step can start

    def _run(self, run: Callable[[Turns], object]) -> None:
        try:
            run(self)
        except BaseException as error:
            self.error = error
        self.is_over = True
        self._other.release()

    def wait(self) -> None:
        """End a step of the other thread, and wait for the next."""
        self._other.release()
        self._mine.acquire()

    def step(self, index: int) -> float:
        self._mine.release()
        self._other.acquire()
        if self.is_over:
            raise RuntimeError("the training ended") from self.error
        return self.loss


def trainer(size: Llama, batch: int, layout: dict[str, int]) -> Step:
    """Return the step of a Trainer, which runs in its own thread."""
    import transformers

    from shardformer.integrations.transformers import Trainer

    class InTurns(transformers.TrainerCallback):
        def __init__(self, turns: Turns) -> None:
            self.turns = turns

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.turns.wait()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.turns.loss = float(self.turns.last)
            self.turns.wait()

    def run(turns: Any) -> None:
        class Watched(Trainer):
            def training_step(self, *args: Any, **kwargs: Any) -> Any:
                turns.last = super().training_step(*args, **kwargs)
                return turns.last

        options: dict[str, Any] = {"per_device_train_batch_size": batch, "max_steps": NUM_STEPS, "learning_rate": 1e-4}
        quiet: dict[str, Any] = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
        options["train_sampling_strategy"] = "sequential"
        folder = tempfile.mkdtemp()
        args = transformers.TrainingArguments(folder, use_cpu=True, optim="adamw_torch_fused", **options, **quiet)
        data: dict[str, Any] = {"train_dataset": Rows(size, batch), "data_collator": collate}
        made = Watched(size.build(), args, **data, parallel=layout, callbacks=[InTurns(turns)])
        made.remove_callback(transformers.PrinterCallback)
        made.train()

    return Turns(run).step


VARIANTS: dict[str, Callable[..., Step]] = {
    "loop": loop,
    "Trainer": trainer,
    "Trainer again": trainer,
    "loop again": loop,
}


def measure(size: Llama, batch: int, layout: dict[str, int], repetitions: int, seconds: float) -> Any:
    """Measure in every process. Returns the timings, and the CPU time of each variant in ms per step."""
    used: dict[str, list[float]] = {name: [] for name in VARIANTS}

    def counting(name: str, step: Step) -> Step:
        def counted(index: int) -> float:
            start = time.process_time()
            loss = step(index)
            used[name].append(time.process_time() - start)
            return loss

        return counted

    steps = {name: counting(name, make(size, batch, layout)) for name, make in VARIANTS.items()}
    timings = common.take_turns(steps, repetitions, seconds, at_least=9)
    counted = len(timings["loop"].seconds)  # without the warm-up
    return timings, {name: median(times[-counted:]) * 1e3 for name, times in used.items()}


def joined(times: Mapping[str, float]) -> dict[str, float]:
    """Return kind -> time per step, the mean of its two variants."""
    own = {kind: [ms for name, ms in times.items() if name.removesuffix(" again") == kind] for kind in times}
    return {kind: sum(ms) / len(ms) for kind, ms in own.items() if ms}


def main(argv: list[str] | None = None) -> int:
    parser = common.arguments(__doc__, seconds=30.0, sequence=128, layers=4, vocabulary=8000, batch=8)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    args = parser.parse_args(argv)
    results: dict[str, Any] = {}
    rows = []
    for hidden in args.hidden:
        size = common.llama(hidden, args.sequence, args.layers, args.vocabulary)
        for name in args.layouts:
            common.progress(f"measuring hidden {hidden}, {name}")
            with common.two_processes(args.threads) as pool:
                timings, cpu = pool.run(measure, size, args.batch, LAYOUTS[name], args.repetitions, args.seconds)[0]
            results[f"{hidden}, {name}"] = {"cpu_ms": cpu, **common.timings_as_dict(timings)}
            means, cpu_means = joined({kind: t.ms for kind, t in timings.items()}), joined(cpu)
            _, difference = common.largest_difference(timings, "loop")
            spread = max(timings[f"{kind} again"].ms / timings[kind].ms for kind in means)
            cells = [common.ms(means["loop"]), common.ms(means["Trainer"]), f"{means['Trainer'] / means['loop']:.3f}"]
            cells += [f"{cpu_means['Trainer'] / cpu_means['loop']:.3f}", f"{spread:.3f}", f"{difference:.0e}"]
            rows.append([f"{hidden}, {name}", *cells])
    if args.json:
        print(common.as_json("trainer", vars(args), results))
    else:
        print(f"\nA step of a LLaMA: batch {args.batch} x {args.sequence} per data rank, AdamW, clipped\n")
        head = ["hidden, layout", "loop, ms", "Trainer, ms", "ratio", "CPU time", "again", "losses differ"]
        print(common.table(head, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
