"""Lock files, which ensure that only one process at a time writes to a folder.

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
from shardformer.filesystem.atomic_write import ProcessIdentity, make_folder, write_new_file

LOCK = ".shardformer.lock"
REFRESH_S, STALE_S = 5.0, 30.0
"""Refresh interval, and the time without a refresh after which a process on another machine takes over a lock."""
_UNFINISHED_S = 2.0  # age after which an empty lock file belongs to an owner that was killed before writing it


@dataclass(eq=False)
class _FolderLock:
    """Lock on a folder that this process holds until all objects that use the lock are garbage collected."""

    path: Path
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    holders: set[int] = field(default_factory=set)


class _ProcessLocks:
    """All folder locks of this process, by the real path of the folder. A forked child process has no locks."""

    def __init__(self) -> None:
        self.reset_locks()
        os.register_at_fork(after_in_child=self.reset_locks)

    def reset_locks(self) -> None:
        self.locks: dict[str, _FolderLock] = {}
        self.is_refreshing = False
        self.acquiring = threading.Lock()
        self.changing = threading.RLock()  # reentrant, because finalizers may run during any allocation


_LOCKS = _ProcessLocks()


def acquire_folder_lock(folder: Path, holder: Any) -> bool:
    """Lock a folder against other processes until ``holder`` is garbage collected. Create the folder if needed.

    Several objects of a process may hold the same folder. Only the first rank of a job calls this, so nothing is
    communicated. Waits up to ``STALE_S`` seconds if a process on another machine had the lock.

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
        if lock is None or not _owns_lock_file(lock):
            new = _FolderLock(Path(key, LOCK), holders=lock.holders if lock is not None else set())
            _acquire_lock_file(new, folder)
            lock = new
        with _LOCKS.changing:
            _LOCKS.locks[key] = lock
            if not _LOCKS.is_refreshing:
                _LOCKS.is_refreshing = True
                threading.Thread(target=_refresh_locks, name="shardformer-lock", daemon=True).start()
            if id(holder) in lock.holders:
                return False
            lock.holders.add(id(holder))
    weakref.finalize(holder, _release_lock_of_holder, key, id(holder), os.getpid())
    return True


def release_folder_lock(folder: Path, holder: Any) -> None:
    """Release the lock that ``holder`` has on a folder. Without another holder, the folder is unlocked."""
    _release_lock_of_holder(os.path.realpath(folder), id(holder), os.getpid())


def check_folder_lock_is_held(folder: Path) -> None:
    """Raise InputError if another process has taken over the lock that this process had on a folder."""
    lock = _LOCKS.locks.get(os.path.realpath(folder))
    if lock is None or _owns_lock_file(lock):
        return
    with suppress(FileExistsError):  # the lock file was removed, so lock the folder again
        _create_lock_file(lock)
        return
    owner = _describe_lock_owner(_read_lock_file(lock.path) or {})
    raise InputError(
        f"The folder {folder} was taken over by {owner} while this process did not respond.",
        remedy="End one of the two jobs, and resume the other from the newest checkpoint.",
    )


def _release_lock_of_holder(key: str, holder_id: int, pid: int) -> None:
    if pid != os.getpid():  # a forked child does not own its parent's locks
        return
    with _LOCKS.changing:
        lock = _LOCKS.locks.get(key)
        if lock is None:
            return
        lock.holders.discard(holder_id)
        if not lock.holders:
            del _LOCKS.locks[key]
            with suppress(OSError):
                if _owns_lock_file(lock):
                    lock.path.unlink()


def _acquire_lock_file(lock: _FolderLock, folder: Path) -> None:
    """Create the lock file of a folder, or take it over if its owner has ended. Raises ConfigError if it is in use."""
    while True:
        with suppress(FileExistsError):
            _create_lock_file(lock)
            return
        found = _read_lock_file(lock.path)
        if found is None:
            continue
        owner = ProcessIdentity(str(found.get("machine")), int(found.get("process", 0)), int(found.get("started", 0)))
        is_own = owner == ProcessIdentity.current()  # for example after a failed release
        if not (is_own or owner.is_dead or (not owner.is_on_this_machine and _is_lock_file_stale(lock.path))):
            if not os.path.lexists(lock.path):
                continue  # the lock has just been released
            owner_name = _describe_lock_owner(found)
            raise ConfigError(
                f"{folder} is in use by {owner_name}.",
                remedy=f"Use a different folder, or end that process. If it is no longer running, remove {lock.path}.",
            )
        _remove_stale_lock(lock.path, found)


def _create_lock_file(lock: _FolderLock) -> None:
    process = ProcessIdentity.current()
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    content = {
        "token": lock.token, "user": user, "host": platform.node(), "process": process.pid, "started": process.start,
        "machine": process.machine, "since": time.strftime("%Y-%m-%d %H:%M:%S%z"),
    }  # fmt: skip
    try:
        write_new_file(lock.path, f"{json.dumps(content)}\n".encode())
    except FileExistsError:
        raise
    except OSError:
        with suppress(OSError):
            lock.path.unlink()
        raise


def _read_lock_file(path: Path) -> dict[str, Any] | None:
    """Read the JSON content of a lock file, or return None if the file does not exist."""
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
            raise _make_invalid_lock_file_error(path) from error
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if isinstance(found, dict):
            return found
        if data or not is_file:
            raise _make_invalid_lock_file_error(path)
        if time.monotonic() > end:
            return {"machine": ProcessIdentity.current().machine}  # the owner was killed
        time.sleep(0.05)


def _make_invalid_lock_file_error(path: Path) -> ConfigError:
    return ConfigError(f"{path} is not a lock file of ShardFormer.", remedy="Remove it, or use another folder.")


def _owns_lock_file(lock: _FolderLock) -> bool:
    with suppress(ConfigError):
        return (_read_lock_file(lock.path) or {}).get("token") == lock.token
    return False


def _is_lock_file_stale(path: Path) -> bool:
    """Wait for the owner of a lock file to refresh it, and return True if this does not happen within 30 s."""
    before, end = _get_lock_file_stamp(path), time.monotonic() + STALE_S
    while time.monotonic() < end:
        time.sleep(min(REFRESH_S / 10, 0.5))
        if _get_lock_file_stamp(path) != before:
            return False
    return True


def _get_lock_file_stamp(path: Path) -> tuple[int, ...]:
    """Open a lock file, and return its inode and modification time, which are then current on network storage."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        found = os.fstat(descriptor)
        return found.st_ino, found.st_mtime_ns
    finally:
        os.close(descriptor)


def _remove_stale_lock(path: Path, stale_content: dict[str, Any]) -> None:
    """Remove the lock file of a process that has ended, unless another process has just taken it over.

    Processes of one machine are serialized. Otherwise one process could remove the new lock of another.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(
            OSError
        ):  # without flock (network file systems), ``check_folder_lock_is_held`` detects a lost lock
            fcntl.flock(folder, fcntl.LOCK_EX)
        if _read_lock_file(path) == stale_content:
            with suppress(FileNotFoundError):
                path.unlink()
    finally:
        os.close(folder)


def _describe_lock_owner(content: dict[str, Any]) -> str:
    words = [f"process {content.get('process')} of {content.get('user')} on {content.get('host')}"]
    return ", since ".join([*words, str(content["since"])] if "since" in content else words)


def _refresh_locks() -> None:
    """Refresh the lock files of this process every few seconds, for as long as it owns any."""
    while True:
        time.sleep(REFRESH_S)
        with _LOCKS.changing:
            for lock in [*_LOCKS.locks.values()]:
                with suppress(OSError):
                    if _owns_lock_file(lock):
                        os.utime(lock.path, follow_symlinks=False)
            if not _LOCKS.locks:
                _LOCKS.is_refreshing = False
                return
