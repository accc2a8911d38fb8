"""A Python interpreter for tests of scripts that starts in milliseconds, with torch and transformers already imported.

``PYTHON`` replaces ``sys.executable`` in a command. It runs a script, ``-m module`` or ``-c code`` in a process forked
from a server that has done the imports. Torch's launcher starts its ranks with it as well. Input, output, environment,
working directory, signals and exit code are those of a separate process. ``make test`` uses it, except in tests that
name ``sys.executable``. Without ``--tier test``, ``PYTHON`` is ``sys.executable``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.scripts.client import SOCKET

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("PYTHON_EXEC", sys.executable)
SHARDFORMER = [PYTHON, "-m", "shardformer"]
"""The ``shardformer`` command."""
FOLDER = Path(PYTHON).parent
"""Folder with ``python`` and ``shardformer``, for the PATH of a shell."""


def run_line(line: str, folder: Path, **environment: str) -> str:
    """Run a shell command in a folder, and return its output. Fails if the exit code is not 0."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCHELASTIC"))}
    env |= {"PATH": f"{FOLDER}{os.pathsep}{env['PATH']}", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(line, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def importable_files(folder: Path, files: Mapping[str, str]) -> Iterator[Path]:
    """Write modules to a folder from which they can be imported until the generator ends."""
    for name, text in files.items():
        (folder / name).write_text(text)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in files:
        sys.modules.pop(name.removesuffix(".py"), None)


def set_up() -> None:
    """Start the server in the background before tests are collected, so that all processes use the same server."""
    folder = Path(tempfile.mkdtemp(prefix="python-"))
    client, command = folder / "python", folder / "shardformer"
    client.write_text(f"#!{sys.executable} -IS\n{Path(__file__).with_name('client.py').read_text(encoding='utf-8')}")
    command.write_text(f'#!/bin/sh\nexec {client} -m shardformer "$@"\n')
    client.chmod(0o755)
    command.chmod(0o755)
    os.environ |= {SOCKET: f"{folder}/socket", f"{SOCKET}_ROOT": str(ROOT), "PYTHON_EXEC": str(client)}
    subprocess.Popen([client, "-c", ""], stdin=subprocess.DEVNULL, start_new_session=True)


def tear_down() -> None:
    """Remove the socket, which ends the server."""
    socket = os.environ.pop(SOCKET, None)
    if socket is not None:
        del os.environ["PYTHON_EXEC"], os.environ[f"{SOCKET}_ROOT"]
        shutil.rmtree(Path(socket).parent)
