"""The commands of pages and examples, run in this process and in the workers of the session.

A process of its own costs five seconds of CPU for its imports, a command with a launcher three times as much. What is
left out is the launcher and the start of an interpreter, which tests/cli/test_run.py is about.
"""

from __future__ import annotations

import runpy
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from shardformer.cli import main
from shardformer.policies.registry import _REGISTERED
from shardformer.testing.pool import Pools, WorkerPool

TIMEOUT_S = 300.0


@contextmanager
def fresh(folder: Path, first: Path, arguments: Sequence[str]) -> Iterator[StringIO]:
    """What a program finds and leaves: the folder, its arguments, where it imports from; and what it prints."""
    modules, path, argv, registered, printed = (
        dict(sys.modules),
        list(sys.path),
        sys.argv,
        dict(_REGISTERED),
        StringIO(),
    )
    sys.argv, sys.path[:] = list(arguments), [str(first), *path]
    try:
        with chdir(folder), redirect_stdout(printed):
            yield printed
    finally:
        sys.argv, sys.path[:] = argv, path
        _REGISTERED.clear()
        _REGISTERED.update(registered)
        for name in sys.modules.keys() - modules.keys():
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).resolve().is_relative_to(first.resolve()):  # another program's may have its name
                del sys.modules[name]


def run_script(folder: Path, script: str, *arguments: str) -> str:
    """What a script prints, run as the interpreter would from a folder."""
    file = (folder / script).resolve()
    with fresh(folder, file.parent, [script, *arguments]) as printed:
        _until_exit(lambda: runpy.run_path(str(file), run_name="__main__"))
    return printed.getvalue()


def run_module(folder: Path, module: str, *arguments: str) -> str:
    """The same of ``python -m module``."""
    with fresh(folder, folder, [module, *arguments]) as printed:
        _until_exit(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))
    return printed.getvalue()


def _until_exit(run: Callable[[], Any]) -> None:
    try:
        run()
    except SystemExit as end:
        assert not end.code, f"it ended with status {end.code}"


@dataclass
class Commands:
    """Runs command lines of ``python`` and ``shardformer`` in a folder.

    Args:
        folder: where they run.
        pools: the workers that take the place of the processes that a launcher starts.
    """

    folder: Path
    pools: Pools

    def __call__(self, line: str) -> str:
        """What a command prints; a file behind ``>`` is written. Fails where its status is not 0."""
        command, _, to = line.partition(" > ")
        program, *arguments = shlex.split(command)
        printed = self._python(arguments) if program == "python" else self.shardformer(arguments)
        if to:
            (self.folder / to).write_text(printed)
        return printed

    def shardformer(self, arguments: Sequence[str]) -> str:
        if arguments[0] == "run":
            return self.launched(arguments[1:])
        said: list[str] = []
        with pytest.MonkeyPatch.context() as patch, fresh(self.folder, self.folder, sys.argv) as printed:
            patch.setenv("TRANSFORMERS_VERBOSITY", "error")
            patch.setattr("shardformer.testing.pool.WorkerPool", self._pool)
            patch.setattr("shardformer.cli.run.run", lambda given: said.append(self.launched(given)))
            _until_exit(lambda: main(list(arguments)))
        return printed.getvalue() + "".join(said)

    def launched(self, arguments: Sequence[str]) -> str:
        """What all ranks print, one rank after the other: ``--nproc_per_node N [-m] program arguments``."""
        rest, options = list(arguments), dict[str, str]()
        while rest[0].startswith("--"):
            name, value, *rest = rest
            options[name] = value
        start = run_script
        if rest[0] == "-m":
            rest.pop(0)
            start = run_module
        assert options.keys() <= {"--nproc_per_node", "--max-restarts"}, options
        count = int(options["--nproc_per_node"])
        if count == 1:
            return start(self.folder, *rest)
        with self._pool(count) as pool:
            return "".join(pool.run(start, self.folder, *rest))

    @contextmanager
    def _pool(self, num_workers: int, **_: Any) -> Iterator[WorkerPool]:
        with self.pools(num_workers).with_timeout(TIMEOUT_S) as pool:
            yield pool

    def _python(self, arguments: Sequence[str]) -> str:
        if arguments[0] == "-c":
            with fresh(self.folder, self.folder, ["-c", *arguments[2:]]) as printed, warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)  # as the interpreter does
                exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
            return printed.getvalue()
        return run_script(self.folder, *arguments)
