"""Lock files that give one process at a time write access to a folder.

The owner refreshes its lock file every few seconds. Another process takes over a lock if the owner has ended on the
same machine, or no longer refreshes the lock on another machine.
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
"""Refresh interval, and the time without a refresh after which a process on another machine takes over a lock."""
_UNFINISHED_S = 2.0  # age after which an empty lock file belongs to an owner that was killed before writing it
_RULE = "Only one job at a time may write to a folder"


@dataclass(eq=False)
class _Lock:
    """A lock that this process owns. It is released when all of its holders have been garbage collected."""

    path: Path
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    holders: set[int] = field(default_factory=set)


class _ProcessLocks:
    """The locks of this process, by the real path of the folder. A forked child has none."""

    def __init__(self) -> None:
        self.forget()
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        self.locks: dict[str, _Lock] = {}
        self.is_refreshing = False
        self.acquiring = threading.Lock()
        self.changing = threading.RLock()  # reentrant, because finalizers may run during any allocation


_LOCKS = _ProcessLocks()


def hold(folder: Path, holder: Any) -> bool:
    """Lock a folder for this process until no ``holder`` is alive. Creates the folder if it does not exist.

    Several objects of a process may hold the same folder. Only the first rank of a job calls this, so nothing is
    communicated. Waits up to ``STALE_S`` if a process on another machine had the lock.

    Returns:
        Whether ``holder`` did not hold the folder before.

    Raises:
        ConfigError: another process has locked the folder.
        OSError: the lock file cannot be written.
    """
    make_folder(folder)
    key = os.path.realpath(folder)
    with _LOCKS.acquiring:
        lock = _LOCKS.locks.get(key)
        if lock is None or not _is_own(lock):
            new = _Lock(Path(key, LOCK), holders=lock.holders if lock is not None else set())
            _acquire(new, folder)
            lock = new
        with _LOCKS.changing:
            _LOCKS.locks[key] = lock
            if not _LOCKS.is_refreshing:
                _LOCKS.is_refreshing = True
                threading.Thread(target=_refresh, name="shardformer-lock", daemon=True).start()
            if id(holder) in lock.holders:
                return False
            lock.holders.add(id(holder))
    weakref.finalize(holder, _release, key, id(holder), os.getpid())
    return True


def release(folder: Path, holder: Any) -> None:
    """Release a folder that ``holder`` holds."""
    _release(os.path.realpath(folder), id(holder), os.getpid())


def check_held(folder: Path) -> None:
    """Raise InputError if another process has taken over a folder that this process had locked."""
    lock = _LOCKS.locks.get(os.path.realpath(folder))
    if lock is None or _is_own(lock):
        return
    with suppress(FileExistsError):  # the lock file was removed, so lock the folder again
        _create(lock)
        return
    raise InputError(
        f"{folder} was taken over by {_describe_owner(_read(lock.path) or {})} while this process did not respond",
        rule=_RULE,
        remedy="End one of the two jobs, and resume the other from the newest checkpoint",
    )


def _release(key: str, holder: int, pid: int) -> None:
    if pid != os.getpid():  # a forked child does not own its parent's locks
        return
    with _LOCKS.changing:
        lock = _LOCKS.locks.get(key)
        if lock is None:
            return
        lock.holders.discard(holder)
        if not lock.holders:
            del _LOCKS.locks[key]
            with suppress(OSError):
                if _is_own(lock):
                    lock.path.unlink()


def _acquire(lock: _Lock, folder: Path) -> None:
    """Create the lock file, or replace it if its owner has ended. Raises ConfigError or OSError."""
    while True:
        with suppress(FileExistsError):
            _create(lock)
            return
        found = _read(lock.path)
        if found is None:
            continue
        owner = Process(str(found.get("machine")), int(found.get("process", 0)), int(found.get("started", 0)))
        is_own = owner == Process.this()  # for example after a failed release
        if not (is_own or owner.is_dead or (not owner.is_here and _is_stale(lock.path))):
            if not os.path.lexists(lock.path):
                continue  # the lock has just been released
            raise ConfigError(
                f"{folder} is in use by {_describe_owner(found)}",
                rule=_RULE,
                remedy=f"Use a different folder for each job, or end that process first. If it cannot be running, "
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
    """Read a lock file. Returns None if it does not exist. Raises ConfigError if it is not a lock file."""
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
            raise _not_a_lock_file(path) from error
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if isinstance(found, dict):
            return found
        if data or not is_file:
            raise _not_a_lock_file(path)
        if time.monotonic() > end:
            return {"machine": Process.this().machine}  # the owner was killed
        time.sleep(0.05)


def _not_a_lock_file(path: Path) -> ConfigError:
    return ConfigError(f"{path} is not a lock file of ShardFormer", remedy="Remove it, or use another folder")


def _is_own(lock: _Lock) -> bool:
    with suppress(ConfigError):
        return (_read(lock.path) or {}).get("token") == lock.token
    return False


def _is_stale(path: Path) -> bool:
    """Watch a lock file for ``STALE_S``, and return whether it was not refreshed."""
    before, end = _refresh_stamp(path), time.monotonic() + STALE_S
    while time.monotonic() < end:
        time.sleep(min(REFRESH_S / 10, 0.5))
        if _refresh_stamp(path) != before:
            return False
    return True


def _refresh_stamp(path: Path) -> tuple[int, ...]:
    """Return inode and modification time of a lock file. Opening it makes a network file system update them."""
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
    """Remove a lock whose owner has ended, unless another process has just taken it over.

    Processes of one machine are serialized. Otherwise one process could remove the new lock of another.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # some network file systems have no flock. ``check_held`` then detects a lost lock
            fcntl.flock(folder, fcntl.LOCK_EX)
        if _read(path) == stale:
            with suppress(FileNotFoundError):
                path.unlink()
    finally:
        os.close(folder)


def _describe_owner(found: dict[str, Any]) -> str:
    words = [f"process {found.get('process')} of {found.get('user')} on {found.get('host')}"]
    return ", since ".join([*words, str(found["since"])] if "since" in found else words)


def _refresh() -> None:
    """Refresh the locks of this process as long as it has any."""
    while True:
        time.sleep(REFRESH_S)
        with _LOCKS.changing:
            for lock in [*_LOCKS.locks.values()]:
                with suppress(OSError):
                    if _is_own(lock):
                        os.utime(lock.path, follow_symlinks=False)
            if not _LOCKS.locks:
                _LOCKS.is_refreshing = False
                return
