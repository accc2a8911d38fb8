"""Entry point of the processes that ``shardformer run`` starts: runs the user's script and records its errors.

An exception that ends the script is also written to the error file of torch's launcher, with a timestamp in
microseconds, so that the launcher can report which rank failed first and why. SIGTERM, which the launcher sends when a
rank has died, ends the script after a short delay. In this time, ranks that wait for the dead rank can raise their own
error, and other ranks record the line that they are executing.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import sys
import sysconfig
import threading
import time
import traceback
import types

GRACE_S = 2.0
TRACEBACK_VARIABLE = "SHARDFORMER_TRACEBACK"
"""Copied from ``shardformer.errors``, which this module does not import unless the script does."""


def record_uncaught_exception(
    exc_type: type[BaseException], exc_value: BaseException, exc_traceback: types.TracebackType | None
) -> None:
    """Print an uncaught exception and write it to the launcher's error file.

    This is the ``sys.excepthook`` of a worker. The traceback omits the frames of this file. A ``ShardFormerError`` is
    not printed, because the launcher prints it once for all ranks. Ctrl-C, which every rank receives, is not printed
    either. SHARDFORMER_TRACEBACK=1 prints both.
    """
    now = time.time()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    while exc_traceback is not None and exc_traceback.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        exc_traceback = exc_traceback.tb_next
    if path and issubclass(exc_type, KeyboardInterrupt) and os.environ.get(TRACEBACK_VARIABLE, "0") in ("", "0"):
        _write_stack_location(path, exc_type.__name__, traceback.extract_tb(exc_traceback))
        return
    ours = _get_shardformer_error_parts(exc_value)
    if not ours or not path or sys.modules["shardformer.errors"].is_traceback_enabled():
        sys.__excepthook__(exc_type, exc_value.with_traceback(exc_traceback), exc_traceback)
    if path and not issubclass(exc_type, KeyboardInterrupt):
        text = "".join(traceback.format_exception(exc_type, exc_value, exc_traceback))
        # torch's own fields are py_callstack and timestamp
        extra = {"py_callstack": text, "timestamp": str(int(now)), "time_s": now}
        if ours:
            extra |= {
                "parts": ours,
                "frame": _format_innermost_user_frame(traceback.extract_tb(exc_traceback)),
                "world_size": int(os.environ.get("WORLD_SIZE", "0")),
            }
        _write_error_file(path, f"{exc_type.__name__}: {exc_value}", extra)


def record_stack_location() -> None:
    """Write the line that the main thread is executing to the launcher's error file, unless that file exists."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if path and frame and not os.path.exists(path):
        _write_stack_location(path, "", traceback.extract_stack(frame))


def _write_stack_location(path: str, message: str, stack: traceback.StackSummary) -> None:
    now = time.time()
    at = {"at": _format_innermost_user_frame(stack), "rank": int(os.environ.get("RANK", "0"))}
    _write_error_file(path, message, {"py_callstack": "", "timestamp": str(int(now)), "time_s": now} | at)


def _write_error_file(path: str, message: str, extra_info: dict[str, object]) -> None:
    """Write an error file in the JSON format that torch's ProcessFailure reads."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": message, "extraInfo": extra_info}}, file)


def _get_shardformer_error_parts(exception: BaseException) -> list[str] | None:
    """Return the class name and message parts of a ``ShardFormerError``, or None for other exceptions."""
    errors = sys.modules.get("shardformer.errors")
    if errors is None or not isinstance(exception, errors.ShardFormerError):
        return None
    return [type(exception).__name__, exception.what, exception.rule, exception.remedy]


def _format_innermost_user_frame(stack: traceback.StackSummary) -> str:
    """Format the innermost stack frame of user code as a traceback entry, or return "" if there is none."""
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    others = tuple(f"{folder}{os.sep}" for folder in (*libraries, package))
    frames = [frame for frame in stack if not frame.filename.startswith((*others, "<"))]
    return "".join(traceback.format_list(frames[-1:])).rstrip()


def install_sigterm_handler() -> None:
    """Make the process exit 2 seconds after SIGTERM, unless the script installs its own signal handler.

    A rank that waits for another rank is inside a call of torch, where Python runs no signal handlers. Therefore a
    thread waits for the signal.
    """
    process, (reader, writer) = os.getpid(), os.pipe()
    os.set_blocking(writer, False)

    def handle_sigterm(signum: int, frame: types.FrameType | None) -> None:
        if os.getpid() != process:  # a forked child inherited this handler
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        os.write(writer, bytes([signum]))  # also done by the interpreter, unless the script set its own wakeup fd

    def wait_for_sigterm() -> None:
        while os.read(reader, 1)[0] != signal.SIGTERM or signal.getsignal(signal.SIGTERM) is not handle_sigterm:
            pass
        time.sleep(GRACE_S)
        with contextlib.suppress(Exception):  # the process ends in any case
            record_stack_location()
        os._exit(128 + signal.SIGTERM)

    def block_sigterm() -> None:
        saved.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def unblock_sigterm() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, saved.mask)

    def restore_in_child() -> None:
        if signal.getsignal(signal.SIGTERM) is handle_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if (descriptor := signal.set_wakeup_fd(-1)) != writer:
            signal.set_wakeup_fd(descriptor)
        unblock_sigterm()

    saved = threading.local()
    signal.signal(signal.SIGTERM, handle_sigterm)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # a forked child has no such thread, so SIGTERM is blocked until the child has restored the default handler
    os.register_at_fork(before=block_sigterm, after_in_parent=unblock_sigterm, after_in_child=restore_in_child)
    threading.Thread(target=wait_for_sigterm, daemon=True).start()


def run_script_as_main(script_path: str) -> None:
    """Execute a script as the ``__main__`` module, as ``python script.py`` does."""
    if os.path.isdir(script_path) or not script_path.endswith((".py", ".pyw")):
        sys.path.insert(0, script_path if os.path.isdir(script_path) else os.path.dirname(os.path.abspath(script_path)))
        runpy.run_path(script_path, run_name="__main__")
        return
    sys.path.insert(0, os.path.dirname(os.path.abspath(script_path)))
    with open(script_path, "rb") as file:
        code = compile(file.read(), script_path, "exec")
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script_path, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def run_module_as_main(module_name: str) -> None:
    """Execute a module as the ``__main__`` module, as ``python -m name`` does."""
    sys.path.insert(0, os.getcwd())
    runpy.run_module(module_name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    this_module = sys.modules["__main__"]  # keeps the module alive after `run_script` has replaced it
    sys.excepthook = record_uncaught_exception
    install_sigterm_handler()
    as_module = sys.argv[1] == "-m"
    sys.argv = sys.argv[2:] if as_module else sys.argv[1:]
    del sys.path[0]  # the folder of this file, whose modules could hide packages of the same name
    (run_module_as_main if as_module else run_script_as_main)(sys.argv[0])
