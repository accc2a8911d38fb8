"""``Throughput``: tokens per second, operations per second, and memory."""

from __future__ import annotations

import resource
import time
from collections import deque
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from shardformer.comm.collectives import all_reduce
from shardformer.errors import check_int
from shardformer.torch_compat import TorchDispatchMode
from shardformer.training.hook import Hook, TrainerProtocol


class Throughput(Hook):
    """Measures how fast a run is, and what it holds.

    Puts into ``trainer.values``:

    - ``samples_per_s`` and ``tokens_per_s``: of the whole batch, padding too, over the last steps; the time that they
      wait for data counts, validation and saving do not.
    - ``flops_per_s``: floating-point operations of matrix products, convolutions and attention, of all ranks together.
      They are counted in the first step, forward and backward, with what is computed again for the backward; behind
      it they are taken to grow with the tokens.
    - ``memory_bytes``: the most that a rank has held so far: on a GPU what torch has allocated, else the whole process.

    Communicates two numbers in the first step, and one behind every ``window`` steps.

    Args:
        window: steps over which the mean is taken.
        flops: whether operations are counted.

    Raises ConfigError for a window that cannot be.
    """

    def __init__(self, window: int = 20, flops: bool = True) -> None:
        check_int("Throughput.window", window, unit="steps", example=20)
        self.window, self.flops = window, flops
        self._steps: deque[tuple[float, int, int]] = deque(maxlen=window)
        self._counter: _Counter | None = None
        self._flops_of_token: float | None = None
        self._since = self._away = self._left = 0.0
        self._seen = 0

    def before_train(self, trainer: TrainerProtocol) -> None:
        self._steps.clear()
        self._since, self._away, self._seen = time.perf_counter(), 0.0, 0

    def before_forward(self, trainer: TrainerProtocol) -> None:
        if self.flops and self._flops_of_token is None:
            self._counter = _Counter()
            self._counter.__enter__()

    def after_backward(self, trainer: TrainerProtocol) -> None:
        self._end_count()

    def after_step(self, trainer: TrainerProtocol) -> None:
        now = time.perf_counter()
        seconds, self._since, self._away = now - self._since - self._away, now, 0.0
        self._seen += 1
        if self._seen == 2:  # the first step is slower than any other
            self._steps.clear()
        self._steps.append((max(seconds, 1e-9), trainer.samples, trainer.tokens))
        if self._counter is not None:
            self._flops_of_token = _over_ranks(trainer, self._counter.flops, "sum") / max(trainer.tokens, 1)
            self._counter = None
        if self._seen == 1 or self._seen % self.window == 0:
            trainer.values["memory_bytes"] = _over_ranks(trainer, _held(trainer.engine.context.device), "max")
        total = sum(seconds for seconds, _, _ in self._steps)
        trainer.values["samples_per_s"] = sum(samples for _, samples, _ in self._steps) / total
        trainer.values["tokens_per_s"] = sum(tokens for _, _, tokens in self._steps) / total
        if self._flops_of_token is not None:
            trainer.values["flops_per_s"] = self._flops_of_token * trainer.values["tokens_per_s"]

    def before_validation(self, trainer: TrainerProtocol) -> None:
        self._left = time.perf_counter()

    def after_validation(self, trainer: TrainerProtocol) -> None:
        self._away += time.perf_counter() - self._left

    before_save, after_save = before_validation, after_validation

    def on_exception(self, trainer: TrainerProtocol) -> None:
        self._end_count()

    def _end_count(self) -> None:
        if self._counter is not None and self._counter.is_on:
            self._counter.__exit__(None, None, None)


class _Counter(TorchDispatchMode):
    """Counts the operations of what torch's own counter knows, without its hooks on modules."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops, self.is_on = 0, False

    def __enter__(self) -> Any:
        self.is_on = True
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self.is_on = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **(kwargs or {}), out_val=out))
        return out


def _held(device: torch.device) -> float:
    """The most bytes that were held so far."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _over_ranks(trainer: TrainerProtocol, value: float, op: str) -> float:
    trainer.agree()
    mine = torch.tensor(value, dtype=torch.float64, device=trainer.engine.context.device)
    return float(all_reduce(mine, trainer.engine.world, op=op, purpose="throughput"))
