"""A Python for tests that run scripts: it starts in milliseconds, as torch and transformers are imported already.

``PYTHON`` takes the place of ``sys.executable`` in a command: it runs a script, ``-m module`` or ``-c code`` in a
process that is forked from a server that has made the imports. Torch's launcher starts its ranks with it, too. Input
and output, the environment, the folder, signals and the exit status are those of a process of its own. ``make test``
uses it, except in tests that name ``sys.executable``; without ``--tier test`` it is ``sys.executable``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.scripts.client import SOCKET

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("PYTHON_EXEC", sys.executable)
SHARDFORMER = [PYTHON, "-m", "shardformer"]
"""The command line, as ``shardformer`` starts it."""
FOLDER = Path(PYTHON).parent
"""Where ``python`` and ``shardformer`` are, for the PATH of a shell."""


def run_line(line: str, folder: Path, **environment: str) -> str:
    """What a line of a shell prints, run in a folder. Fails if its status is not 0."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCHELASTIC"))}
    env |= {"PATH": f"{FOLDER}{os.pathsep}{env['PATH']}", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(line, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def set_up() -> None:
    """Called in the process that starts the others, before a test is collected: all of them find one server.

    It starts in the background, in time for the first script.
    """
    folder = Path(tempfile.mkdtemp(prefix="python-"))
    client, command = folder / "python", folder / "shardformer"
    client.write_text(f"#!{sys.executable} -IS\n{Path(__file__).with_name('client.py').read_text(encoding='utf-8')}")
    command.write_text(f'#!/bin/sh\nexec {client} -m shardformer "$@"\n')
    client.chmod(0o755)
    command.chmod(0o755)
    os.environ |= {SOCKET: f"{folder}/socket", f"{SOCKET}_ROOT": str(ROOT), "PYTHON_EXEC": str(client)}
    subprocess.Popen([client, "-c", ""], stdin=subprocess.DEVNULL, start_new_session=True)


def tear_down() -> None:
    """Ends the server, which looks whether its socket still has a name."""
    socket = os.environ.pop(SOCKET, None)
    if socket is not None:
        del os.environ["PYTHON_EXEC"], os.environ[f"{SOCKET}_ROOT"]
        shutil.rmtree(Path(socket).parent)
