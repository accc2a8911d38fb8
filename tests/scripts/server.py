"""The process that has done the imports, and forks a process for the script of each client.

    python -m tests.scripts.server SOCKET

It ends when SOCKET is deleted. A script is killed when its client ends first.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing.process
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

LOOK_S = 1.0
IMPORTS = (
    "torch.distributed.run",
    "torch._dynamo",
    "tests.preload",
    "transformers.models.auto.modeling_auto",
    "torch.utils.data.distributed",
    "torch.utils.tensorboard",
    "matplotlib.pyplot",
    "typer",
    "pydantic",
    "rich.console",
    "rich.table",
    "shardformer.cli.train",
    "shardformer.cli.run",
)
Request = Mapping[str, Any]


class Server:
    """Accepts requests of clients, forks, and returns the exit codes of the forked processes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.clients: dict[int, socket.socket] = {}  # PID of a script -> its client
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"{path}.new")
        self.listener.listen(64)
        os.rename(f"{path}.new", path)

    def serve(self) -> Request | None:
        """Serve clients. Returns the request in a forked process, and None when the server ends."""
        wakeup, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wakeup, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(wake)
        with selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            selector.register(wakeup, selectors.EVENT_READ)
            while os.path.exists(self.path):
                for key, _ in selector.select(LOOK_S):
                    if key.fileobj is self.listener:
                        request = self._fork(selector)
                        if request is not None:
                            signal.set_wakeup_fd(-1)
                            os.close(wakeup)
                            os.close(wake)
                            return request
                    elif key.fileobj == wakeup:
                        os.read(wakeup, 1 << 16)
                    else:
                        self._lost(selector, key.data)
                self._reap(selector)
        for pid in self.clients:
            os.kill(pid, signal.SIGKILL)
        return None

    def _fork(self, selector: selectors.BaseSelector) -> Request | None:
        client, _ = self.listener.accept()
        size, fds, _, _ = socket.recv_fds(client, 8, 3)
        if len(size) < 8:
            client.close()
            return None
        with client.makefile("rb") as file:
            request: Request = json.loads(file.read(int.from_bytes(size, "big")))
        pid = os.fork()
        if pid == 0:
            selector.close()
            self.listener.close()
            client.close()
            for other in self.clients.values():
                other.close()
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
                os.close(fd)
            return request
        for fd in fds:
            os.close(fd)
        self.clients[pid] = client
        selector.register(client, selectors.EVENT_READ, pid)
        client.sendall(f"{pid}\n".encode())
        return None

    def _lost(self, selector: selectors.BaseSelector, pid: int) -> None:
        """Kill the script of a client that has ended."""
        selector.unregister(self.clients[pid])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _reap(self, selector: selectors.BaseSelector) -> None:
        while self.clients:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            client = self.clients.pop(pid)
            with contextlib.suppress(KeyError):
                selector.unregister(client)
            with contextlib.suppress(OSError):
                client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            client.close()


def run(request: Request) -> NoReturn:
    """Run a script or module in this process, like ``python script`` or ``python -m module``."""
    import numpy

    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(OSError):
        os.setsid()
    numpy.random.seed()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    multiprocessing.process.ORIGINAL_DIR = request["cwd"]  # type: ignore[attr-defined]  # where its children find scripts
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr, write_through=request["unbuffered"])  # type: ignore[union-attr]
    kind, name, arguments = request["call"]
    path = [p for p in request["env"].get("PYTHONPATH", "").split(os.pathsep) if p]
    first = {"module": request["cwd"], "code": "", "script": str(Path(name).resolve().parent)}[kind]
    sys.path[:] = [first, *path, *BASE_PATH]
    sys.argv[:] = ["-c" if kind == "code" else name, *arguments]
    status = 0
    try:
        if kind == "module":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        elif kind == "code":
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(name, "<string>", "exec"), main.__dict__)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as ended:
        status = _status(ended.code)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        status = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at its end
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)  # freeing all modules would take longer than many scripts


def _status(code: object) -> int:
    if isinstance(code, int | None):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


BASE_PATH: list[str] = []


def _name_of_caller(depth: int = 2) -> str:
    return sys._getframe(depth).f_code.co_name


def main() -> None:
    root = str(Path(__file__).resolve().parents[2])
    BASE_PATH[:] = [p for p in sys.path[1:] if p not in (root, os.getcwd(), "")]
    for name in IMPORTS:
        importlib.import_module(name)
    # torch's launcher looks up the file of every module for each event, which takes a second here
    dynamic_rendezvous.get_method_name = _name_of_caller
    gc.collect()
    gc.freeze()
    request = Server(sys.argv[1]).serve()
    if request is not None:
        run(request)


if __name__ == "__main__":
    main()
