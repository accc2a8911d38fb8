"""Pools of worker processes that run functions with torch.distributed, and a launcher for notebooks."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from multiprocessing import connection, forkserver, get_all_start_methods, get_context
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from tempfile import TemporaryDirectory
from typing import Any, ParamSpec, Self, TypeVar, cast

import torch
import torch.distributed as dist

from shardformer.errors import ConfigError, LaunchError, WorkerError, check_int, format_ranks
from shardformer.local_ranks import worker_process
from shardformer.local_ranks.worker_process import RemoteCall, RemoteFailure, WorkerReply, WorkerRequest

P = ParamSpec("P")
R = TypeVar("R")

START_S = 300.0  # time to start a process, import modules and join the group on a busy machine
CLOSE_S = 5.0  # time for idle workers to exit
DEATH_GRACE_S = 0.2  # processes that die within this time are reported together
MOST_PRELOADED = 8  # maximum number of transformers models that the fork server imports
STACK_S = 2.0  # time for a process to write its stack


class WorkerPool:
    """Pool of ``num_workers`` processes that run functions with ``torch.distributed`` over gloo.

    Each call has the environment of torchrun (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``,
    ``MASTER_PORT``), seeds of 0, dtype float32 and gradients enabled. Process groups that a function creates are
    destroyed before the next call. Modules stay imported.

    The workers are forked from a process that has imported torch and ``module_names``. They start at the first call.
    They are replaced after a call in which a worker died, timed out, or ended differently from the others. They exit
    with the parent.

    Functions are pickled by name: define them at the top level of a module or script. A script must make its calls
    under ``if __name__ == "__main__":``.

    Args:
        timeout_s: maximum duration of a call, after which the workers are killed.
        num_threads: number of torch threads in each process.
        module_names: modules that the workers import when they start.
        grace_s: time that the other ranks may continue after one has raised.

    >>> with WorkerPool(2) as pool:  # doctest: +SKIP
    ...     pool.run(torch.add, torch.ones(2), 1)
    [tensor([2., 2.]), tensor([2., 2.])]
    """

    def __init__(
        self,
        num_workers: int,
        *,
        timeout_s: float = 60.0,
        num_threads: int = 1,
        module_names: Sequence[str] = ("torch",),
        grace_s: float = 5.0,
    ) -> None:
        check_int("num_workers", num_workers)
        check_int("threads", num_threads)
        self.num_workers, self.timeout_s, self.grace_s = num_workers, timeout_s, grace_s
        self._threads, self._imports = num_threads, tuple(module_names)
        self._workers: list[WorkerHandle] = []
        self._group_address: ProcessGroupAddress | None = None
        self._closed = False

    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call ``fn(*args, **kwargs)`` in every worker, and return the results in rank order.

        Raises:
            ShardFormerError: raised by ``fn``, with the same class on all ranks.
            WorkerError: a worker died, exceeded ``timeout_s``, or raised any other error.
            ConfigError: ``fn`` or its arguments cannot be pickled.
        """
        return self._run_on_all_workers(fn, [RemoteCall.from_function(fn, args, kwargs)] * self.num_workers)

    @contextmanager
    def with_timeout(self, timeout_s: float) -> Iterator[Self]:
        """Change the timeout of the calls in a ``with`` block."""
        before, self.timeout_s = self.timeout_s, timeout_s
        try:
            yield self
        finally:
            self.timeout_s = before

    @property
    def pids(self) -> list[int]:
        """Process IDs of the workers in rank order, or an empty list if no worker is running."""
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        """Stop all worker processes. A closed pool cannot be used again."""
        self._closed = True
        for worker in self._workers:
            worker.calls.close()  # an idle worker exits when its pipe is closed
        deadline = time.monotonic() + CLOSE_S
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self._kill_workers()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_worker(self, rank: int) -> WorkerHandle:
        return WorkerHandle(rank, _get_fork_server_context(self._imports), self._threads)

    def _run_on_all_workers(self, fn: Callable[..., R], remote_calls: Sequence[RemoteCall | None]) -> list[R]:
        if self._closed:
            raise LaunchError("run() was called on a closed WorkerPool.", remedy="Create a new WorkerPool.")
        name = f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', fn)}"
        try:
            if not all(worker.is_idle() for worker in self._workers):
                self._kill_workers()
            if not self._workers:
                for rank in range(self.num_workers):
                    self._workers.append(self._start_worker(rank))
                self._create_process_group()
            replies = self._call_workers(name, remote_calls, self.timeout_s)
            if any(reply.needs_new_process_group for reply in replies):
                self._create_process_group()
        except BaseException:  # including Ctrl-C: the state of the workers is unknown
            self._kill_workers()
            raise
        _raise_if_all_ranks_failed(name, replies)
        return [pickle.loads(reply.result) for reply in replies]

    def _create_process_group(self) -> None:
        before, self._group_address = self._group_address, ProcessGroupAddress()
        name = "the start of the group"
        call = RemoteCall.from_function(
            worker_process.import_modules_and_join_process_group, (self._group_address.store, self._imports), {}
        )
        try:
            _raise_if_all_ranks_failed(name, self._call_workers(name, [call] * self.num_workers, START_S))
        finally:
            if before:
                before.close()

    def _call_workers(
        self, fn_name: str, remote_calls: Sequence[RemoteCall | None], timeout_s: float
    ) -> list[WorkerReply]:
        """Send a function call to each worker and return the replies. Raises WorkerError if a rank fails."""
        assert self._group_address is not None
        env = {
            "WORLD_SIZE": str(self.num_workers),
            "LOCAL_WORLD_SIZE": str(self.num_workers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._group_address.port),
        }
        for worker, call in zip(self._workers, remote_calls):
            own = {"RANK": str(worker.rank), "LOCAL_RANK": str(worker.rank)}
            worker.send_request(WorkerRequest(call, tuple(sys.path), {**env, **own}))
        replies, dead = self._receive_replies_and_find_dead_ranks(timeout_s)
        failures = {rank: reply.failure for rank, reply in replies.items() if reply.failure}
        kinds = {type(failure.error) for failure in failures.values()}
        is_same_error = len(failures) == self.num_workers and len(kinds) == 1 and kinds != {type(None)}
        if len(replies) == self.num_workers and (not failures or is_same_error):
            return [replies[rank] for rank in range(self.num_workers)]
        outcomes = [worker.make_exit_failure() for worker in self._workers if worker.rank in dead]
        outcomes += [_make_rank_failure(rank, failure) for rank, failure in failures.items()]
        what = "was still running or waiting, and was killed" if outcomes else f"had not answered after {timeout_s:g} s"
        silent = [worker for worker in self._workers if worker.rank not in replies and worker.rank not in dead]
        for worker in silent:
            os.kill(worker.pid, signal.SIGUSR1)
        outcomes += [
            _RankFailure(_FailureKind.SILENT, worker.rank, what, worker.read_stack_trace(STACK_S)) for worker in silent
        ]
        raise _make_worker_error(fn_name, outcomes)

    def _receive_replies_and_find_dead_ranks(self, timeout_s: float) -> tuple[dict[int, WorkerReply], set[int]]:
        replies: dict[int, WorkerReply] = {}
        dead: set[int] = set()
        deadline = time.monotonic() + timeout_s
        while waiting := [w for w in self._workers if w.rank not in replies and w.rank not in dead]:
            news = [w.calls for w in waiting] + [w.process.sentinel for w in waiting]
            ready = connection.wait(news, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for worker in waiting:
                if worker.calls in ready or worker.process.sentinel in ready:
                    reply = worker.receive_reply()
                    if reply is None:
                        dead.add(worker.rank)
                        deadline = min(deadline, time.monotonic() + DEATH_GRACE_S)
                        continue
                    replies[worker.rank] = reply
                    if reply.failure:
                        deadline = min(deadline, time.monotonic() + self.grace_s)
        return replies, dead

    def _kill_workers(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.join_and_close()
        if self._group_address:
            self._group_address.close()
        self._workers, self._group_address = [], None


class WorkerHandle:
    """Handle of a worker process in the parent, with pipes for function calls and stack traces.

    Args:
        mp_context: multiprocessing context that starts the process.
        inherited_fn: function that the process inherits, if the context forks this process.
    """

    def __init__(
        self, rank: int, mp_context: Any, num_threads: int, inherited_fn: Callable[[], Any] | None = None
    ) -> None:
        self.rank = rank
        self.calls, calls = mp_context.Pipe()
        self._stack, stack = mp_context.Pipe(duplex=False)
        args = (num_threads, dict(os.environ), calls, stack, inherited_fn)
        is_daemon = inherited_fn is None  # a daemon cannot start processes, such as those of a DataLoader
        self.process: BaseProcess = mp_context.Process(
            target=worker_process.serve_calls, args=args, name=f"worker-{rank}", daemon=is_daemon
        )
        self.process.start()
        calls.close()  # only the process keeps these ends, so the pipes end with it
        stack.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def is_idle(self) -> bool:
        """Return whether the worker process is alive and waits for a call.

        The pipe of a dead worker is readable before its exit code is known.
        """
        return self.process.is_alive() and not self.calls.poll()

    def send_request(self, request: WorkerRequest) -> None:
        try:
            self.calls.send_bytes(pickle.dumps(request))
        except OSError:
            pass  # the worker is dead, which waiting for its reply detects

    def receive_reply(self) -> WorkerReply | None:
        try:
            return cast(WorkerReply, pickle.loads(self.calls.recv_bytes()))
        except (EOFError, OSError):
            return None

    def read_stack_trace(self, timeout_s: float) -> str:
        """Read the stack trace of the worker's current call, innermost frame first, or "" if it sends none."""
        text = b""
        while connection.wait([self._stack], timeout_s) and (part := os.read(self._stack.fileno(), 1 << 16)):
            text, timeout_s = text + part, 0.1
        for thread in text.decode(errors="replace").split("\n\n"):
            frames = [line for line in thread.splitlines() if line.startswith("  File ")]
            ours = [i for i, frame in enumerate(frames) if f'"{worker_process.__file__}"' in frame]
            if ours and frames[ours[-1]].endswith(" in serve_calls"):
                return "".join(f"{frame}\n" for frame in frames[: ours[0]])
        return ""

    def make_exit_failure(self) -> _RankFailure:
        self.process.join(1.0)
        code = self.process.exitcode
        what = "closed its pipe" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            what = f"was killed by {signal.Signals(-code).name}"
        return _RankFailure(_FailureKind.DIED, self.rank, what, self.read_stack_trace(0.0))

    def join_and_close(self) -> None:
        self.process.join()
        self.process.close()
        self.calls.close()
        self._stack.close()


def _get_fork_server_context(modules_to_preload: Sequence[str]) -> BaseContext:
    """Return a multiprocessing context whose fork server has imported torch, so that workers start fast.

    The server also imports the transformers models that the parent has imported, if they are few.
    """
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    models = [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]
    context = get_context("forkserver")
    preloaded = models if len(models) <= MOST_PRELOADED else []
    context.set_forkserver_preload(["torch", worker_process.__name__, *modules_to_preload, *preloaded])
    return context


def start_fork_server(modules_to_preload: Sequence[str]) -> None:
    """Start the fork server in the background, before the first pool needs it."""
    if "forkserver" in get_all_start_methods():
        _get_fork_server_context(modules_to_preload)
        forkserver.ensure_running()


class ProcessGroupAddress:
    """File store and free port for the process groups of a pool's workers."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="shardformer-", ignore_cleanup_errors=True)  # a worker may still write
        self.store = os.path.join(self._folder.name, "store")
        self._socket = socket.socket()
        # Bound but not listening: reserves the port, on which rank 0 can still listen.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._folder.cleanup()
        self._socket.close()


class _FailureKind(IntEnum):
    """Reason why a call failed on one rank. If a worker dies, the calls of other ranks raise errors or hang."""

    DIED = 0
    RAISED = 1
    SILENT = 2


@dataclass(frozen=True)
class _RankFailure:
    """Failure of a call on one rank, with details such as the traceback."""

    kind: _FailureKind
    rank: int
    description: str
    details: str


def _raise_if_all_ranks_failed(fn_name: str, replies: Sequence[WorkerReply]) -> None:
    failures = [reply.failure for reply in replies if reply.failure]
    if failures and failures[0].error:
        raise failures[0].error from _make_worker_error(
            fn_name, [_make_rank_failure(*numbered) for numbered in enumerate(failures)]
        )


def _make_rank_failure(rank: int, failure: RemoteFailure) -> _RankFailure:
    return _RankFailure(_FailureKind.RAISED, rank, f"raised {failure.summary}", failure.traceback)


_RULES = {
    _FailureKind.DIED: (
        "",
        "Check whether the function crashes, exits or runs out of memory. In a script, create the pool under "
        "`if __name__ == '__main__':`.",
    ),
    _FailureKind.RAISED: (
        "All ranks must return, or raise the same class of ShardFormerError",
        "Fix the error below.",
    ),
    _FailureKind.SILENT: (
        "A call must end within timeout_s",
        "Check for a collective that not all ranks reach, or increase timeout_s.",
    ),
}


def _make_worker_error(fn_name: str, failures: Sequence[_RankFailure]) -> WorkerError:
    reports: dict[tuple[_FailureKind, str, str], list[int]] = {}
    headline: dict[str, list[int]] = {}
    first = min(outcome.kind for outcome in failures)
    for outcome in sorted(failures, key=lambda outcome: (outcome.kind, outcome.rank)):
        reports.setdefault((outcome.kind, outcome.description, outcome.details), []).append(outcome.rank)
        if outcome.kind == first:
            headline.setdefault(outcome.description, []).append(outcome.rank)
    what = "; ".join(f"{format_ranks(ranks)} {what}" for what, ranks in headline.items())
    rule, remedy = _RULES[first]
    for (_, outcome_text, details), ranks in reports.items():
        remedy += f"\n\n{format_ranks(ranks)} {outcome_text}" + (f":\n{details.rstrip()}" if details else "")
    return WorkerError(f"The call to {fn_name} failed: {what}.", rule=rule, remedy=f"{remedy}\n")


WEEK_S = 7 * 24 * 3600.0


def notebook_launcher(
    function: Callable[..., R], args: Sequence[Any] = (), num_processes: int = 2, *, timeout_s: float = WEEK_S
) -> list[R]:
    """Run ``function(*args)`` in several processes of this machine, one process per rank.

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
        return pool.call_inherited_function()


class _ForkedPool(WorkerPool):
    """Worker pool that forks this process and creates no process group."""

    def __init__(self, num_workers: int, fn: Callable[[], Any], timeout_s: float) -> None:
        super().__init__(num_workers, timeout_s=timeout_s)
        self._function = fn

    def call_inherited_function(self) -> list[Any]:
        return self._run_on_all_workers(self._function.func, [None] * self.num_workers)  # type: ignore[attr-defined]

    def _start_worker(self, rank: int) -> WorkerHandle:
        # libgomp hangs in a forked process that uses several threads, so the pool's number of threads stays 1
        return WorkerHandle(rank, get_context("fork"), self._threads, self._function)

    def _create_process_group(self) -> None:
        if self._group_address is None:  # only reserves a port: the function initializes the group itself
            self._group_address = ProcessGroupAddress()


def _check_can_fork() -> None:
    """Raise LaunchError if this process cannot be forked, for example because it has used CUDA."""
    if dist.is_initialized() or "RANK" in os.environ:
        raise LaunchError(
            "notebook_launcher was called in a process that is already a rank of a distributed run.",
            remedy="Call your function directly, or restart the notebook kernel.",
        )
    if torch.cuda.is_initialized():
        raise LaunchError(
            "notebook_launcher cannot fork this process, because it has already used CUDA.",
            remedy="Restart the notebook kernel, and use the GPU only inside the function that you launch.",
        )
    if "fork" not in get_all_start_methods():
        raise LaunchError(
            "notebook_launcher requires an operating system that can fork processes.",
            remedy="Write the function to a file, and start it with `shardformer run --nproc_per_node 2 train.py`.",
        )
