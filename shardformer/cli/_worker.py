"""What ``shardformer run`` starts in each process: the user's script, as ``python script.py`` would run it.

It adds one thing: an exception that ends the script is also written to the error file of torch's launcher, with its
time to the microsecond, so that the launcher can say which rank failed first and why. Started by its path.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import traceback
import types


def record_failure(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """``sys.excepthook``: print the traceback without the frames of this file, then leave a note to the launcher."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not issubclass(kind, KeyboardInterrupt):
        now = time.time()
        text = "".join(traceback.format_exception(kind, error, trace))
        # The form that torch's ProcessFailure reads; `time_s` is ours.
        extra = {"py_callstack": text, "timestamp": str(int(now)), "time_s": now}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": f"{kind.__name__}: {error}", "extraInfo": extra}}, file)


def run_script(path: str) -> None:
    """Execute a file in a fresh ``__main__``, which then is what pickle and multiprocessing find under that name."""
    if os.path.isdir(path) or not path.endswith((".py", ".pyw")):
        sys.path.insert(0, path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path)))
        runpy.run_path(path, run_name="__main__")
        return
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def run_module(name: str) -> None:
    """Execute a module as ``python -m name`` does."""
    sys.path.insert(0, os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    this_module = sys.modules["__main__"]  # Kept alive: `run_script` takes its name away.
    sys.excepthook = record_failure
    as_module = sys.argv[1] == "-m"
    sys.argv = sys.argv[2:] if as_module else sys.argv[1:]
    del sys.path[0]  # The folder of this file; a verb there must not hide a package of the same name.
    (run_module if as_module else run_script)(sys.argv[0])
