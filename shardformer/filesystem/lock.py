"""A folder that one process at a time writes into: a file in it names the process that has it.

The process refreshes the file every few seconds. Another one that wants the folder takes it over if the process is of
the same machine and has ended, or is of another machine and does not refresh the file any more.
"""

from __future__ import annotations

import errno
import fcntl
import getpass
import json
import os
import platform
import secrets
import stat
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardformer.errors import ConfigError, InputError
from shardformer.filesystem.atomic_write import Process, make_folder, write_new

LOCK = ".shardformer.lock"
REFRESH_S, STALE_S = 5.0, 30.0
"""How often the owner refreshes a lock, and after how long without that a process of another machine takes it over."""
_UNFINISHED_S = 2.0
"""A lock without content is one that its owner is about to write, or was killed before it had."""
_RULE = "One job at a time writes into a folder"


@dataclass(eq=False)
class _Lock:
    """A lock that this process has. It is released when none of its holders is alive."""

    path: Path
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    holders: set[int] = field(default_factory=set)


class _Own:
    """The locks of this process, by the real path of the folder. A child that it forks has none."""

    def __init__(self) -> None:
        self.forget()
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        self.locks: dict[str, _Lock] = {}
        self.is_refreshing = False
        self.acquiring = threading.Lock()
        self.changing = threading.RLock()  # a finalizer may run wherever this process makes garbage


_OWN = _Own()


def hold(folder: Path, holder: Any) -> bool:
    """Takes the folder for this process, until no ``holder`` of it is alive. Makes the folder where there is none.

    Objects of one process hold a folder together. Communicates nothing: the first rank of a job calls it. Waits, for at
    most ``STALE_S``, where a process of another machine had the folder last.

    Returns whether ``holder`` did not hold it before. Raises ConfigError where another process has the folder, OSError.
    """
    make_folder(folder)
    key = os.path.realpath(folder)
    with _OWN.acquiring:
        lock = _OWN.locks.get(key)
        if lock is None or not _is_own(lock):
            new = _Lock(Path(key, LOCK), holders=lock.holders if lock is not None else set())
            _acquire(new, folder)
            lock = new
        with _OWN.changing:
            _OWN.locks[key] = lock
            if not _OWN.is_refreshing:
                _OWN.is_refreshing = True
                threading.Thread(target=_refresh, name="shardformer-lock", daemon=True).start()
            if id(holder) in lock.holders:
                return False
            lock.holders.add(id(holder))
    weakref.finalize(holder, _release, key, id(holder), os.getpid())
    return True


def release(folder: Path, holder: Any) -> None:
    """The holder does not write into the folder any more."""
    _release(os.path.realpath(folder), id(holder), os.getpid())


def check_held(folder: Path) -> None:
    """Raises InputError where another process has taken a folder that this one held."""
    lock = _OWN.locks.get(os.path.realpath(folder))
    if lock is None or _is_own(lock):
        return
    with suppress(FileExistsError):  # the file was removed: the folder is free
        _create(lock)
        return
    raise InputError(
        f"{folder} was taken over by {_described(_read(lock.path) or {})} while this process did not answer",
        rule=_RULE,
        remedy="End one of the two jobs, and let the other one go on from the newest checkpoint",
    )


def _release(key: str, holder: int, pid: int) -> None:
    if pid != os.getpid():  # in a child, the folder is its parent's
        return
    with _OWN.changing:
        lock = _OWN.locks.get(key)
        if lock is None:
            return
        lock.holders.discard(holder)
        if not lock.holders:
            del _OWN.locks[key]
            with suppress(OSError):
                if _is_own(lock):
                    lock.path.unlink()


def _acquire(lock: _Lock, folder: Path) -> None:
    """Creates the lock file, in the place of one whose owner is gone. Raises ConfigError, OSError."""
    while True:
        with suppress(FileExistsError):
            _create(lock)
            return
        found = _read(lock.path)
        if found is None:
            continue
        owner = Process(str(found.get("machine")), int(found.get("process", 0)), int(found.get("started", 0)))
        is_own = owner == Process.this()  # what this process lost track of, such as a lock of a failed release
        if not (is_own or owner.is_dead or (not owner.is_here and _is_stale(lock.path))):
            if not os.path.lexists(lock.path):
                continue  # it was released while this process looked
            raise ConfigError(
                f"{folder} is in use by {_described(found)}",
                rule=_RULE,
                remedy=f"Give each job a folder of its own, or end that process first. If it cannot be running, "
                f"remove {lock.path}",
            )
        _remove_stale(lock.path, found)


def _create(lock: _Lock) -> None:
    process = Process.this()
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    content = {
        "token": lock.token, "user": user, "host": platform.node(), "process": process.pid, "started": process.start,
        "machine": process.machine, "since": time.strftime("%Y-%m-%d %H:%M:%S%z"),
    }  # fmt: skip
    try:
        write_new(lock.path, f"{json.dumps(content)}\n".encode())
    except FileExistsError:
        raise
    except OSError:
        with suppress(OSError):
            lock.path.unlink()
        raise


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a lock file; None where there is none. Raises ConfigError for what is no lock file."""
    end = time.monotonic() + _UNFINISHED_S
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                is_file, data = stat.S_ISREG(os.fstat(file.fileno()).st_mode), file.read(1 << 16)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR):
                raise
            raise _no_lock(path) from error
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if isinstance(found, dict):
            return found
        if data or not is_file:
            raise _no_lock(path)
        if time.monotonic() > end:
            return {"machine": Process.this().machine}  # of a process that is dead
        time.sleep(0.05)


def _no_lock(path: Path) -> ConfigError:
    return ConfigError(f"{path} is not a lock file that ShardFormer wrote", remedy="Remove it, or give another folder")


def _is_own(lock: _Lock) -> bool:
    with suppress(ConfigError):
        return (_read(lock.path) or {}).get("token") == lock.token
    return False


def _is_stale(path: Path) -> bool:
    """Whether a lock is not refreshed while this process looks."""
    before, end = _sign(path), time.monotonic() + STALE_S
    while time.monotonic() < end:
        time.sleep(min(REFRESH_S / 10, 0.5))
        if _sign(path) != before:
            return False
    return True


def _sign(path: Path) -> tuple[int, ...]:
    """What changes when a lock is refreshed. The file is opened, which lets a network file system look again."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        found = os.fstat(descriptor)
        return found.st_ino, found.st_mtime_ns
    finally:
        os.close(descriptor)


def _remove_stale(path: Path, stale: dict[str, Any]) -> None:
    """Removes a lock whose owner is gone, unless another process has taken it over a moment ago.

    Processes of one machine do this one after the other: else one could remove the lock that another has just made.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # not every network file system has such locks; ``check_held`` finds what is lost then
            fcntl.flock(folder, fcntl.LOCK_EX)
        if _read(path) == stale:
            with suppress(FileNotFoundError):
                path.unlink()
    finally:
        os.close(folder)


def _described(found: dict[str, Any]) -> str:
    words = [f"process {found.get('process')} of {found.get('user')} on {found.get('host')}"]
    return ", since ".join([*words, str(found["since"])] if "since" in found else words)


# --------------------------------------------------------------------------------------------------------- refreshing


def _refresh() -> None:
    """Refreshes the locks of this process for as long as it has any."""
    while True:
        time.sleep(REFRESH_S)
        with _OWN.changing:
            for lock in [*_OWN.locks.values()]:
                with suppress(OSError):
                    if _is_own(lock):
                        os.utime(lock.path, follow_symlinks=False)
            if not _OWN.locks:
                _OWN.is_refreshing = False
                return
