"""A hook that measures tokens per second, FLOP/s and memory."""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch.utils.flop_counter import flop_registry

from shardformer.comm.collectives import all_reduce
from shardformer.errors import check_int
from shardformer.torch_compat import TorchDispatchMode
from shardformer.training.hook import Hook, TrainerProtocol


class Throughput(Hook):
    """Measures the training speed and the peak memory of a run.

    The hook adds these metrics to ``trainer.values``:

    - ``samples_per_s`` and ``tokens_per_s``: samples and tokens in the global batch per second, averaged over the last
      steps. This includes padding tokens and the time to load data, but not validation and saving.
    - ``flops_per_s``: floating-point operations per second in matrix products, convolutions and attention on all ranks.
      The hook counts the operations in the first step, including recomputation. For later steps, it assumes the same
      number per token.
    - ``memory_bytes``: the highest peak memory of any rank so far. On a GPU, this is the memory that torch allocated.
      On a CPU, it is the memory of the process.

    The ranks exchange two numbers in the first step, and one number every ``window`` steps.
    """

    def __init__(
        self,
        window: Annotated[int, "Number of steps to average over."] = 20,
        flops: Annotated[bool, "Count floating-point operations."] = True,
    ) -> None:
        check_int("Throughput.window", window, unit="steps", example=20)
        self.window, self.flops = window, flops
        self._recent_steps: deque[tuple[float, int, int]] = deque(maxlen=window)
        self._counter: _FlopCounter | None = None
        self._flops_per_token: float | None = None
        self._step_start = self._excluded = self._excluded_start = 0.0
        self._num_steps = 0

    def before_train(self, trainer: TrainerProtocol) -> None:
        self._recent_steps.clear()
        self._step_start, self._excluded, self._num_steps = time.perf_counter(), 0.0, 0

    def before_forward(self, trainer: TrainerProtocol) -> None:
        if self.flops and self._flops_per_token is None:
            self._counter = _FlopCounter()
            self._counter.__enter__()

    def after_backward(self, trainer: TrainerProtocol) -> None:
        if self._counter is not None and self._counter.is_on:
            self._counter.__exit__(None, None, None)

    on_exception = after_backward

    def after_step(self, trainer: TrainerProtocol) -> None:
        now = time.perf_counter()
        seconds, self._step_start, self._excluded = now - self._step_start - self._excluded, now, 0.0
        self._num_steps += 1
        if self._num_steps == 2:  # the first step is slower than all others
            self._recent_steps.clear()
        self._recent_steps.append((max(seconds, 1e-9), trainer.samples, trainer.tokens))
        if self._counter is not None:
            self._flops_per_token = _all_reduce_scalar(trainer, self._counter.flops, "sum") / max(trainer.tokens, 1)
            self._counter = None
        if self._num_steps == 1 or self._num_steps % self.window == 0:
            peak = _get_peak_memory_bytes(trainer.engine.context.device)
            trainer.values["memory_bytes"] = _all_reduce_scalar(trainer, peak, "max")
        total = sum(seconds for seconds, _, _ in self._recent_steps)
        trainer.values["samples_per_s"] = sum(samples for _, samples, _ in self._recent_steps) / total
        trainer.values["tokens_per_s"] = sum(tokens for _, _, tokens in self._recent_steps) / total
        if self._flops_per_token is not None:
            trainer.values["flops_per_s"] = self._flops_per_token * trainer.values["tokens_per_s"]

    def before_validation(self, trainer: TrainerProtocol) -> None:
        self._excluded_start = time.perf_counter()

    def after_validation(self, trainer: TrainerProtocol) -> None:
        self._excluded += time.perf_counter() - self._excluded_start

    before_save, after_save = before_validation, after_validation


class _FlopCounter(TorchDispatchMode):
    """Counts floating-point operations like ``torch.utils.flop_counter``, but without module hooks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops, self.is_on = 0, False

    def __enter__(self) -> Any:
        self.is_on = True
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self.is_on = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **(kwargs or {}), out_val=out))
        return out


def _get_peak_memory_bytes(device: torch.device) -> float:
    """Return the peak memory of this process on ``device`` in bytes."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _all_reduce_scalar(trainer: TrainerProtocol, scalar: float, op: str) -> float:
    trainer.synchronize_ranks()
    local_value = torch.tensor(scalar, dtype=torch.float64, device=trainer.engine.context.device)
    return float(all_reduce(local_value, trainer.engine.world, op=op, purpose="throughput"))
