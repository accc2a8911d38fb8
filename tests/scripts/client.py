"""Runs a script in a process that the server forks, like ``python``. See tests/scripts/__init__.py.

The file is copied after a ``#!`` line and started without site-packages. The first client starts the server. If the
server does not support the command (other options of Python than -u, -c and -m), the client executes the real Python.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time

START_S = 120.0
SOCKET = "SHARDFORMER_TEST_PYTHON"
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGCONT", "SIGTSTP")


def parsed(arguments):
    """Return ("module", "code" or "script", its name or text, its arguments), or None with other options."""
    rest = list(arguments)
    while rest and rest[0] == "-u":
        rest.pop(0)
    if len(rest) > 1 and rest[0] == "-m":
        return "module", rest[1], rest[2:]
    if len(rest) > 1 and rest[0] == "-c":
        return "code", rest[1], rest[2:]
    if rest and not rest[0].startswith("-"):
        return "script", rest[0], rest[1:]
    return None


def main():
    call, path = parsed(sys.argv[1:]), os.environ.get(SOCKET)
    if call is None or not path:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    if not os.path.exists(path):
        start(path)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.connect(path)
    request = {"call": call, "cwd": os.getcwd(), "env": dict(os.environ), "unbuffered": "-u" in sys.argv[1:3]}
    data = json.dumps(request).encode()
    waiting = []
    for name in FORWARDED:
        signal.signal(getattr(signal, name), lambda number, _: waiting.append(number))
    signal.set_wakeup_fd(-1)
    socket.send_fds(server, [len(data).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(data)
    answers = server.makefile("r")
    pid = int(answers.readline())
    for name in FORWARDED:
        signal.signal(getattr(signal, name), lambda number, _: forward(pid, number))
    for number in waiting:
        forward(pid, number)
    status = answers.readline()
    if not status:
        os._exit(70)  # the server is gone
    if int(status) < 0:
        signal.signal(-int(status), signal.SIG_DFL) if -int(status) not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -int(status))
    os._exit(int(status))


def start(path):
    """Start the server, unless another client is starting it."""
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(path):
            return
        root, null = os.environ[f"{SOCKET}_ROOT"], subprocess.DEVNULL
        command = [sys.executable, "-m", "tests.scripts.server", path]
        environment = {**os.environ, "PYTHONPATH": root}
        with open(f"{path}.log", "w") as log:
            server = subprocess.Popen(
                command, cwd=root, env=environment, stdin=null, stdout=null, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_S
        while not os.path.exists(path):
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the server of scripts did not start, see {path}.log")
            time.sleep(0.02)


def forward(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    main()
