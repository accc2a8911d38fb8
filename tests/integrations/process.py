"""Worker processes in which PEFT, accelerate, TRL, Lightning and Ray can be imported.

``make test`` puts these libraries into ``.venv/integrations``, because transformers changes its behavior when
accelerate is importable. No other test sees them. A child process with that folder on its path holds the worker pools.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Self

from tests.pools import WorkerPools

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("INTEGRATIONS_FOLDER", Path(sys.prefix) / "integrations"))
"""Folder with the libraries."""
PRELOADED = ("torch", "tests.integrations.preload")
TIMEOUT_S = 300.0


def environment() -> dict[str, str]:
    """Return the environment of a process that can import the libraries."""
    path = [str(FOLDER), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


class IntegrationProcess:
    """A child process that can import the libraries. It starts at the first call.

    >>> with IntegrationProcess() as process:  # doctest: +SKIP
    ...     process(2).run(function, 1)  # calls function(1) on two ranks
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def __call__(self, num_workers: int) -> Workers:
        return Workers(self, num_workers)

    def run(self, num_workers: int, fn: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
        if self._child is None:
            command = [sys.executable, "-m", "tests.integrations.process"]
            pipe = subprocess.PIPE
            self._child = subprocess.Popen(command, cwd=ROOT, env=environment(), stdin=pipe, stdout=pipe)
        calls, replies = self._child.stdin, self._child.stdout
        assert calls is not None and replies is not None
        pickle.dump((num_workers, fn, tuple(args)), calls)
        calls.flush()
        result, failure = pickle.load(replies)
        if failure is not None:
            raise AssertionError(failure)
        return list(result)

    def close(self) -> None:
        if self._child is not None:
            self._child.communicate(timeout=30)  # closes the pipes, which ends the child
            self._child = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Workers:
    """``num_workers`` ranks of an :class:`IntegrationProcess`."""

    def __init__(self, process: IntegrationProcess, num_workers: int) -> None:
        self._process, self._num_workers = process, num_workers

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn(*args)`` on every rank, and return the results in rank order."""
        return self._process.run(self._num_workers, fn, args)


def serve(calls: IO[bytes], replies: IO[bytes]) -> None:
    """Answer calls until ``calls`` is closed."""
    with WorkerPools(timeout_s=TIMEOUT_S, imports=PRELOADED) as pools:
        while True:
            try:
                num_workers, fn, args = pickle.load(calls)
            except EOFError:
                return
            try:
                reply = (pools(num_workers).run(fn, *args), None)
            except Exception:
                reply = (None, traceback.format_exc())
            pickle.dump(reply, replies)
            replies.flush()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # printed text must not mix with the replies
    serve(sys.stdin.buffer, answers)
