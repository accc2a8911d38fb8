"""Main loop of the worker processes in a WorkerPool, and their messages to and from the parent.

All messages are pickled by value, so that no memory is shared.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import io
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import get_pg_count

from shardformer.errors import ConfigError, ShardFormerError
from shardformer.mesh.init_distributed import destroy_process_group
from shardformer.random_state import seed_all_generators


@dataclass(frozen=True)
class RemoteCall:
    """Pickled function call with the source files of the modules that it uses."""

    payload: bytes
    sources: Mapping[str, str]

    @staticmethod
    def from_function(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RemoteCall:
        """Pickle the function call ``fn(*args, **kwargs)``.

        Raises:
            ConfigError: the function or an argument cannot be pickled.
        """
        buffer = io.BytesIO()
        pickler = _SourceRecordingPickler(buffer)
        try:
            pickler.dump((fn, args, kwargs))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"Cannot pickle {fn!r} and its arguments for the worker processes: {error}.",
                remedy="Define functions and classes at the top level of a module, and pass plain data and tensors.",
            ) from error
        return RemoteCall(buffer.getvalue(), pickler.sources)


@dataclass(frozen=True)
class WorkerRequest:
    """Request to a worker: a function call, the import path, and the environment variables of the rank.

    ``call`` is None for the function that a forked worker inherited from its parent.
    """

    call: RemoteCall | None
    import_path: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class RemoteFailure:
    """Exception raised in a worker process, with its message and traceback as text."""

    summary: str
    traceback: str
    error: ShardFormerError | None


@dataclass(frozen=True)
class WorkerReply:
    """Reply of a worker: the pickled result of a function call, or its failure."""

    result: bytes
    failure: RemoteFailure | None
    needs_new_process_group: bool  # whether process groups must be recreated


class _SourceRecordingPickler(pickle.Pickler):
    """Pickler that records the source files of functions and classes, and clones tensors that are views."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.sources: dict[str, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        if callable(obj):
            name = getattr(obj, "__module__", None)
            if name == "__main__" and not hasattr(sys.modules[name], "__file__"):
                shown = getattr(obj, "__qualname__", obj)
                raise ConfigError(
                    f"{shown} is defined in a notebook or interactive session, so worker processes cannot import it.",
                    remedy="Move its definition to a file with %%writefile my_functions.py and import it, or use "
                    "shardformer.notebook_launcher.",
                )
            file = getattr(sys.modules.get(name), "__file__", None) if isinstance(name, str) else None
            if file and name != "__main__":
                self.sources[str(name)] = file
        if type(obj) is torch.Tensor and obj.layout is torch.strided:
            if obj.untyped_storage().nbytes() > obj.numel() * obj.element_size():
                return obj.detach().clone().requires_grad_(obj.requires_grad).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def serve_calls(
    num_threads: int,
    env: Mapping[str, str],
    call_pipe: connection.Connection,
    stack_trace_pipe: connection.Connection,
    inherited_fn: Callable[[], Any] | None = None,
) -> None:
    """Run function calls from the parent process until the parent closes the pipe.

    Args:
        env: environment of the parent.
        inherited_fn: function to call for a request without a call, if this process was forked from the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    faulthandler.enable(stack_trace_pipe.fileno())
    faulthandler.register(signal.SIGUSR1, stack_trace_pipe.fileno())
    threading.Thread(target=_exit_when_parent_exits, name="end-with-parent", daemon=True).start()
    os.environ.clear()
    os.environ.update(env)  # the fork server has the environment at its own start
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # works without name resolution and with a firewall
    home = dict(os.environ)
    while True:
        try:
            request: WorkerRequest = pickle.loads(call_pipe.recv_bytes())
        except EOFError:
            destroy_process_group()
            return
        _reset_process_state({**home, **request.env}, request.import_path, num_threads)
        reply = _execute_call(request.call, inherited_fn)
        if inherited_fn is not None:
            sys.stdout.flush()  # a notebook shows the output when it is flushed
        call_pipe.send_bytes(pickle.dumps(reply))
        del request


def import_modules_and_join_process_group(store_path: str, module_names: Sequence[str]) -> None:
    """Import modules, then create torch's default process group from a file store."""
    gc.collect()  # frees references to groups of the last call
    destroy_process_group()
    for name in module_names:
        importlib.import_module(name)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A TCPStore resolves the name of each peer, which takes seconds without a network.
    file_store = dist.FileStore(store_path, world_size)  # type: ignore[attr-defined]  # there, but not re-exported
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=world_size)
    gc.freeze()  # excludes imported modules from later garbage collections


def _exit_when_parent_exits() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _reset_process_state(env: Mapping[str, str], import_path: Sequence[str], num_threads: int) -> None:
    if dict(os.environ) != env:
        os.environ.clear()
        os.environ.update(env)
    sys.path[:] = import_path
    torch.set_num_threads(num_threads)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    seed_all_generators(0)


def _execute_call(remote_call: RemoteCall | None, inherited_fn: Callable[[], Any] | None) -> WorkerReply:
    world = dist.group.WORLD
    try:
        for name, file in remote_call.sources.items() if remote_call else ():
            if name not in sys.modules:
                _import_module(name, file)
        fn, args, kwargs = pickle.loads(remote_call.payload) if remote_call else (inherited_fn, (), {})
        result = fn(*args, **kwargs)
        buffer = io.BytesIO()
        _SourceRecordingPickler(buffer).dump(result)
        return WorkerReply(buffer.getvalue(), None, dist.group.WORLD is not world or get_pg_count() != 1)
    except BaseException as error:  # includes SystemExit and pytest's skip
        below = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, below))
        own = error if isinstance(error, ShardFormerError) and _is_picklable(error) else None
        message = str(error).strip().split("\n", 1)[0]
        return WorkerReply(
            b"",
            RemoteFailure(f"{type(error).__name__}: {message}" if message else type(error).__name__, text, own),
            True,
        )


def _import_module(module_name: str, source_file: str) -> None:
    """Import a module as the parent did, from ``source_file`` if this process finds another file.

    Importing from the file is needed for tests that pytest imports by path, and for a second module of the same name.
    """
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or os.path.realpath(spec.origin) != os.path.realpath(source_file):
        spec = importlib.util.spec_from_file_location(module_name, source_file)
        if spec is None or spec.loader is None:
            return  # not a Python file: unpickling raises an error
        _create_parent_packages(module_name, source_file)
        sys.modules[module_name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[module_name])
        except BaseException:
            del sys.modules[module_name]
            raise


def _create_parent_packages(module_name: str, source_file: str) -> None:
    """Create the parent packages of a module imported from a file, so that pickle can find the module."""
    packages = module_name.split(".")[:-1]
    folder = os.path.dirname(source_file)
    for depth in range(len(packages), 0, -1):
        package = ModuleType(".".join(packages[:depth]))
        package.__path__ = [folder]
        sys.modules.setdefault(package.__name__, package)
        folder = os.path.dirname(folder)


def _is_picklable(exception: ShardFormerError) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(exception))) is type(exception)
    except Exception:
        return False
