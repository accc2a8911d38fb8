"""Launch distributed training from a notebook, in processes that are forked from its kernel."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import get_all_start_methods, get_context
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardformer.errors import ConfigError, LaunchError, check_int
from shardformer.local_ranks.worker_pool import ProcessGroupAddress, Worker, WorkerPool

R = TypeVar("R")

WEEK_S = 7 * 24 * 3600.0


def notebook_launcher(
    function: Callable[..., R], args: Sequence[Any] = (), num_processes: int = 2, *, timeout_s: float = WEEK_S
) -> list[R]:
    """Run ``function(*args)`` in several processes of this machine, with one process per rank.

    Use it in a notebook or an interactive session in place of ``shardformer run``. The processes are forked, so that
    they have the functions and variables of the notebook. What they change is lost, except for the result of the
    function. Each process has the environment variables of torchrun, a seed of 0 and one CPU thread.

    >>> def train(lr):                                                                            # doctest: +SKIP
    ...     engine = shardformer.initialize(make_model(), make_optimizer(lr), train_data=data, batch_size=32,
    ...                                     parallel=shardformer.ParallelConfig(tensor=2))
    ...     return shardformer.Trainer(engine).fit(epochs=1)
    >>> values = shardformer.notebook_launcher(train, (1e-3,), num_processes=2)                   # doctest: +SKIP

    Args:
        function: Function that builds the model and trains it. It may be defined in a cell.
        args: Its arguments, as a tuple.
        num_processes: Number of processes. With GPUs, each process uses one.
        timeout_s: Maximum duration of the call, after which the processes are killed. The default is a week.

    Returns:
        The results of the function in rank order. They must be plain data or CPU tensors.

    Raises:
        ConfigError: An argument is invalid.
        LaunchError: This process uses CUDA or is already one of several ranks, or the platform cannot fork.
        WorkerError: The function failed on some ranks. A ``ShardFormerError`` of all ranks is raised as it is.
    """
    check_int("num_processes", num_processes)
    if not callable(function) or isinstance(args, str) or not isinstance(args, Sequence):
        raise ConfigError(
            "notebook_launcher requires a function and a tuple of its arguments, but got "
            f"function={function!r:.80} and args={args!r:.80}.",
            remedy="For example, call notebook_launcher(train, (1e-3,), num_processes=2).",
        )
    _check_can_fork()
    with warnings.catch_warnings(), _ForkedPool(num_processes, partial(function, *args), timeout_s) as pool:
        # notebook kernels have threads that the forked process does not use
        warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
        return pool.call_function()


class _ForkedPool(WorkerPool):
    """Worker pool whose processes are forked from this process. It does not create a process group."""

    def __init__(self, num_workers: int, function: Callable[[], Any], timeout_s: float) -> None:
        super().__init__(num_workers, timeout_s=timeout_s)
        self._function = function

    def call_function(self) -> list[Any]:
        return self._run_calls(self._function.func, [None] * self.num_workers)  # type: ignore[attr-defined]

    def _start_worker(self, rank: int) -> Worker:
        # libgomp hangs in a forked process that uses several threads, so the pool's number of threads stays 1
        return Worker(rank, get_context("fork"), self._threads, self._function)

    def _create_process_group(self) -> None:
        if self._group_address is None:  # only reserves a port: the function initializes the group itself
            self._group_address = ProcessGroupAddress()


def _check_can_fork() -> None:
    """Raise LaunchError if this process cannot be forked, for example because it has used CUDA."""
    if dist.is_initialized() or "RANK" in os.environ:
        raise LaunchError(
            "notebook_launcher was called in a process that is already a rank of a distributed run.",
            remedy="Call the function directly, or restart the kernel of the notebook.",
        )
    if torch.cuda.is_initialized():
        raise LaunchError(
            "notebook_launcher cannot fork this process, because it has already used CUDA.",
            remedy="Restart the kernel, and use the GPU only inside the function.",
        )
    if "fork" not in get_all_start_methods():
        raise LaunchError(
            "notebook_launcher requires an operating system that can fork processes.",
            remedy="Write the function to a file, and start it with `shardformer run --nproc_per_node 2 train.py`.",
        )
