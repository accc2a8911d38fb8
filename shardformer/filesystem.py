"""Write files and folders atomically, and lock folders against other processes.

A temporary name is used once, by one process. It contains the identity of that process, so that the remains of a killed
process can be removed. It ends in random digits, so that no other user can create a link of that name in advance.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import getpass
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from shardformer.errors import ConfigError, InputError

SAVING, REPLACED, DROPPED = "saving", "replaced", "dropped"
"""Purposes of a temporary name: a file being written, the replaced file, and a file being deleted."""
_TEMPORARY_NAME = re.compile(
    r"\.(?P<kind>\w+)-(?P<name>.+)-(?P<machine>[0-9a-f]{12})-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{16}(\.\w+)?"
)
_MAX_NAME_LENGTH = 120
"""Maximum number of characters of the target name in a temporary name. File systems allow 255 in total."""


class ProcessIdentity(NamedTuple):
    """Machine, PID and start time of a process, which together identify it."""

    machine: str
    pid: int
    start: int

    @classmethod
    def current(cls) -> ProcessIdentity:
        return cls(_get_machine_id(), os.getpid(), _get_process_start_time(os.getpid()) or 0)

    @property
    def is_on_this_machine(self) -> bool:
        """Whether the process runs on this machine, in the same PID namespace."""
        return self.machine == _get_machine_id()

    @property
    def is_dead(self) -> bool:
        """Whether the process is known to have ended. Always False for a process on another machine."""
        if not self.is_on_this_machine:
            return False
        if Path("/proc/self/stat").exists():
            return _get_process_start_time(self.pid) != self.start
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return False


class TemporaryFileName(NamedTuple):
    """Parsed name of a temporary file, with its purpose, target name and owner process."""

    purpose: str
    target_name: str
    owner: ProcessIdentity


@functools.cache
def _get_machine_id() -> str:
    """Return an ID of this machine and PID namespace. Containers may share a host name, so it is not used."""
    try:
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        parts = [platform.node()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _get_process_start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks, or None if it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def to_absolute_path(path: str | os.PathLike[str]) -> Path:
    """Make a folder path absolute, and expand ``~`` to the home directory.

    A program may change its working directory while a background thread writes, so the path must be absolute. Symbolic
    links and ".." are not resolved. Raises ConfigError for an invalid path.
    """
    text = path if isinstance(path, (str, os.PathLike)) else None
    if text is None or not isinstance(text := os.fspath(text), str) or not text or "\0" in text:
        raise ConfigError(f"{path!r:.80} is not a valid folder path.", remedy="Pass a path such as 'run/checkpoints'.")
    return Path(os.path.expanduser(text)).absolute()


def create_folder(folder: Path) -> None:
    """Create a folder and its parents, unless they exist.

    Raises:
        ConfigError: a file or a broken link has the name of the folder or of a parent.
        OSError: the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        other = next((p for p in (folder, *folder.parents) if os.path.lexists(p) and not p.is_dir()), None)
        if other is None:
            raise
        kind = "a broken link" if other.is_symlink() else "a file"
        raise ConfigError(
            f"The folder {folder} cannot be created, because {other} is {kind}.",
            remedy=f"Pass the path of another folder, or move {other} away.",
        ) from error


def make_temporary_path(target_path: Path, purpose: str = SAVING) -> Path:
    """Return a unique temporary path next to ``target_path``, to be renamed to ``target_path`` later."""
    machine, pid, start = ProcessIdentity.current()
    return target_path.with_name(
        f".{purpose}-{target_path.name[:_MAX_NAME_LENGTH]}-{machine}-{pid}-{start}-{secrets.token_hex(8)}"
    )


def parse_temporary_name(path: Path) -> TemporaryFileName | None:
    """Parse the name of a temporary file, or return None for other files and symbolic links."""
    found = _TEMPORARY_NAME.fullmatch(path.name)
    if found is None or path.is_symlink():
        return None
    return TemporaryFileName(
        found["kind"], found["name"], ProcessIdentity(found["machine"], int(found["pid"]), int(found["start"]))
    )


def find_temporary_paths(folder: Path, target_name: str) -> list[tuple[Path, TemporaryFileName]]:
    """Find the temporary files in a folder whose target is ``target_name``."""
    every = [(path, parse_temporary_name(path)) for path in folder.glob(".*")]
    return [
        (path, found)
        for path, found in every
        if found is not None and found.target_name == target_name[:_MAX_NAME_LENGTH]
    ]


def remove_stale_temporary_files(folder: Path, target_name: str) -> None:
    """Remove the temporary files of killed processes, except backups of replaced versions."""
    for path, found in find_temporary_paths(folder, target_name):
        if found.owner.is_dead and found.purpose != REPLACED:
            remove_file_or_folder(path)


def move_into_place_and_keep_backup(new_folder: Path, target_folder: Path) -> Path:
    """Rename a folder to ``target_folder``, and return the path of the backup of an existing target.

    Raises OSError if a folder cannot be renamed. The previous target is then restored.
    """
    replaced, is_there = make_temporary_path(target_folder, REPLACED), os.path.lexists(target_folder)
    if is_there:
        target_folder.rename(replaced)
    try:
        new_folder.rename(target_folder)
    except BaseException:
        if is_there:
            replaced.rename(target_folder)
        raise
    return replaced


def remove_file_or_folder(path: Path) -> None:
    """Remove a file or folder without following symbolic links, and ignore errors."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def create_new_file(path: Path) -> BinaryIO:
    """Create a file and open it for writing. Raises OSError if a file or symbolic link exists there."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    return os.fdopen(descriptor, "wb", buffering=0)


def write_all_bytes(file: BinaryIO, buffer: bytes | bytearray | memoryview) -> None:
    """Write a whole buffer to an unbuffered file, with several ``write`` calls if needed."""
    rest = memoryview(buffer)
    while rest:
        rest = rest[file.write(rest) :]


def write_new_file(path: Path, content: bytes, *, sync_to_disk: bool = False) -> None:
    """Create a file with this content, and optionally sync it to disk. Raises OSError if the file exists."""
    with create_new_file(path) as file:
        write_all_bytes(file, content)
        if sync_to_disk:
            os.fsync(file.fileno())


@contextmanager
def replace_file_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path, and rename its file to ``path`` if the ``with`` block succeeds.

    The temporary path has the same suffix. Readers see either the old or the new file. If the block raises, ``path`` is
    unchanged. A symbolic link is replaced, not followed.
    """
    hidden = make_temporary_path(path)
    hidden = hidden.with_name(hidden.name + path.suffix)
    try:
        yield hidden
        os.replace(hidden, path)
    finally:
        remove_file_or_folder(hidden)


def replace_text_atomically(path: Path, text: str, *, sync_to_disk: bool = True) -> None:
    """Replace the content of a text file atomically, by default after syncing the new content to disk."""
    with replace_file_atomically(path) as hidden:
        write_new_file(hidden, text.encode(), sync_to_disk=sync_to_disk)


@dataclass(frozen=True)
class AtomicDirectoryWriter:
    """Writer that replaces a directory atomically by a new version and keeps unrelated files.

    Args:
        own_file_pattern: pattern of the names of files that belong to such a directory, including earlier versions of
            it.
        key_file: name of a file that readers need. They ignore a directory that does not contain it.
    """

    own_file_pattern: re.Pattern[str]
    key_file: str

    def replace_directory(self, folder: str | os.PathLike[str], write_fn: Callable[[Path], object]) -> None:
        """Write a temporary directory with ``write_fn``, and replace ``folder`` by it.

        If ``write_fn`` raises, or an OSError occurs, the folder is unchanged. If the process dies, the folder is
        unchanged, or complete and new, or missing, or without its key file. In the last two cases, readers ignore it.
        """
        target = Path(os.path.realpath(folder))
        hidden = self.create_temporary_directory(target, target if _can_be_renamed(target) else target / target.name)
        try:
            write_fn(hidden)
            self.replace_target_directory(hidden, target)
        finally:
            remove_file_or_folder(hidden)

    def create_temporary_directory(self, target_directory: Path, sibling_path: Path) -> Path:
        """Create a temporary directory next to ``sibling_path``, and remove those of killed processes."""
        create_folder(sibling_path.parent)
        remove_stale_temporary_files(sibling_path.parent, target_directory.name)
        for path, found in find_temporary_paths(sibling_path.parent, target_directory.name):
            if found.purpose == REPLACED and found.owner.is_dead:
                self._remove_replaced_directory(path, target_directory) if target_directory.exists() else path.rename(
                    target_directory
                )
        hidden = make_temporary_path(sibling_path)
        hidden.mkdir()
        return hidden

    def replace_target_directory(self, new_directory: Path, target_directory: Path) -> None:
        """Replace ``target_directory`` by the complete directory ``new_directory``.

        The directories are exchanged, unless ``target_directory`` has subfolders (other processes may write into them),
        is the working directory, or cannot be renamed. In these cases its files are replaced one by one. Raises
        OSError.
        """
        kept = self._find_unrelated_files(target_directory, new_directory)
        is_current = target_directory.exists() and os.path.samefile(target_directory, os.curdir)
        if (
            is_current
            or new_directory.parent != target_directory.parent
            or any(path.is_dir() and not path.is_symlink() for path in kept)
        ):
            self._replace_files_one_by_one(new_directory, target_directory)
            return
        _link_files(kept, new_directory)
        self._remove_replaced_directory(
            move_into_place_and_keep_backup(new_directory, target_directory), target_directory
        )

    def _remove_replaced_directory(self, replaced_directory: Path, target_directory: Path) -> None:
        """Remove a replaced directory, after moving its unrelated files to ``target_directory``."""
        for path in self._find_unrelated_files(replaced_directory, target_directory):
            path.rename(target_directory / path.name)
        remove_file_or_folder(replaced_directory)

    def _find_unrelated_files(self, target_directory: Path, new_directory: Path) -> list[Path]:
        """Find files, such as a log, that belong to neither the old nor the new version of the directory."""
        there = sorted(target_directory.iterdir()) if target_directory.is_dir() else []
        written = {path.name for path in new_directory.iterdir()}
        return [path for path in there if path.name not in written and not self.own_file_pattern.fullmatch(path.name)]

    def _replace_files_one_by_one(self, temporary_directory: Path, target_directory: Path) -> None:
        """Move the files to ``target_directory``. The key file is removed first and moved last."""
        new = {path.name for path in temporary_directory.iterdir()}
        (target_directory / self.key_file).unlink(missing_ok=True)
        for path in sorted(target_directory.iterdir()):
            if path.is_file() and self.own_file_pattern.fullmatch(path.name) and path.name not in new:
                path.unlink()
        for name in sorted(new, key=lambda name: name == self.key_file):
            (temporary_directory / name).replace(target_directory / name)
        temporary_directory.rmdir()


def _can_be_renamed(target: Path) -> bool:
    """Return whether a folder can be renamed, unlike mount points and folders in a read-only parent."""
    return os.access(target.parent, os.W_OK) and not os.path.ismount(target)


def _link_files(paths: Iterable[Path], folder: Path) -> None:
    for path in paths:
        if path.is_symlink():
            (folder / path.name).symlink_to(os.readlink(path))
        elif path.is_file():
            _link_or_copy(str(path), str(folder / path.name))


def _link_or_copy(source_path: str, target_path: str) -> None:
    try:
        os.link(source_path, target_path)
    except OSError:  # a file system without hard links
        shutil.copy2(source_path, target_path)


LOCK = ".shardformer.lock"
REFRESH_S, STALE_S = 5.0, 30.0
"""Refresh interval, and the time without a refresh after which a process on another machine takes over a lock."""
_UNFINISHED_S = 2.0  # age after which an empty lock file belongs to an owner that was killed before writing it


@dataclass(eq=False)
class _FolderLock:
    """Folder lock of this process, which is released when all its holders are garbage collected."""

    path: Path
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    holders: set[int] = field(default_factory=set)


class _ProcessFolderLocks:
    """Folder locks of this process, by real path. A forked child starts without locks."""

    def __init__(self) -> None:
        self.reset_locks()
        os.register_at_fork(after_in_child=self.reset_locks)

    def reset_locks(self) -> None:
        self.locks: dict[str, _FolderLock] = {}
        self.is_refreshing = False
        self.acquiring = threading.Lock()
        self.changing = threading.RLock()  # reentrant, because finalizers may run during any allocation


_LOCKS = _ProcessFolderLocks()


def acquire_folder_lock(folder: Path, holder: Any) -> bool:
    """Lock a folder against other processes until ``holder`` is garbage collected.

    The folder is created if needed.

    Several objects of a process may hold the same folder. Only the first rank of a job calls this, so nothing is
    communicated. Waits up to ``STALE_S`` seconds if a process on another machine had the lock.

    Returns:
        Whether ``holder`` did not hold the folder before.

    Raises:
        ConfigError: another process has locked the folder.
        OSError: the lock file cannot be written.
    """
    create_folder(folder)
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
                threading.Thread(target=_refresh_lock_files_periodically, name="shardformer-lock", daemon=True).start()
            if id(holder) in lock.holders:
                return False
            lock.holders.add(id(holder))
    weakref.finalize(holder, _release_lock_of_holder, key, id(holder), os.getpid())
    return True


def release_folder_lock(folder: Path, holder: Any) -> None:
    """Release a holder's lock on a folder. The folder is unlocked if there is no other holder."""
    _release_lock_of_holder(os.path.realpath(folder), id(holder), os.getpid())


def check_folder_lock_is_held(folder: Path) -> None:
    """Raise InputError if another process has taken over the folder lock of this process."""
    lock = _LOCKS.locks.get(os.path.realpath(folder))
    if lock is None or _owns_lock_file(lock):
        return
    with suppress(FileExistsError):  # the lock file was removed, so lock the folder again
        _create_lock_file(lock)
        return
    owner = _describe_lock_owner(_read_lock_file(lock.path) or {})
    raise InputError(
        f"The folder {folder} is now locked by {owner}, because this process did not respond for too long.",
        remedy="End one of the two jobs, and resume the other from the newest checkpoint.",
    )


def _release_lock_of_holder(real_folder_path: str, holder_id: int, pid: int) -> None:
    if pid != os.getpid():  # a forked child does not own its parent's locks
        return
    with _LOCKS.changing:
        lock = _LOCKS.locks.get(real_folder_path)
        if lock is None:
            return
        lock.holders.discard(holder_id)
        if not lock.holders:
            del _LOCKS.locks[real_folder_path]
            with suppress(OSError):
                if _owns_lock_file(lock):
                    lock.path.unlink()


def _acquire_lock_file(lock: _FolderLock, folder: Path) -> None:
    """Create a folder's lock file, or take it over if its owner has ended. Raises ConfigError if it is in use."""
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
                f"The folder {folder} is in use by {owner_name}.",
                remedy="Use a different folder, or end that process. If the process is no longer running, remove "
                f"{lock.path}.",
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


def _read_lock_file(lock_path: Path) -> dict[str, Any] | None:
    """Read the JSON content of a lock file, or return None if the file is missing."""
    end = time.monotonic() + _UNFINISHED_S
    while True:
        try:
            descriptor = os.open(lock_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                is_file, data = stat.S_ISREG(os.fstat(file.fileno()).st_mode), file.read(1 << 16)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR):
                raise
            raise _make_invalid_lock_file_error(lock_path) from error
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if isinstance(found, dict):
            return found
        if data or not is_file:
            raise _make_invalid_lock_file_error(lock_path)
        if time.monotonic() > end:
            return {"machine": ProcessIdentity.current().machine}  # the owner was killed
        time.sleep(0.05)


def _make_invalid_lock_file_error(lock_path: Path) -> ConfigError:
    return ConfigError(
        f"The folder cannot be locked, because {lock_path} is not a lock file of ShardFormer.",
        remedy="Remove the file, or use another folder.",
    )


def _owns_lock_file(lock: _FolderLock) -> bool:
    with suppress(ConfigError):
        return (_read_lock_file(lock.path) or {}).get("token") == lock.token
    return False


def _is_lock_file_stale(lock_path: Path) -> bool:
    """Wait up to 30 s for the owner of a lock file to refresh it, and return True if this does not happen."""
    before, end = _get_lock_file_inode_and_mtime(lock_path), time.monotonic() + STALE_S
    while time.monotonic() < end:
        time.sleep(min(REFRESH_S / 10, 0.5))
        if _get_lock_file_inode_and_mtime(lock_path) != before:
            return False
    return True


def _get_lock_file_inode_and_mtime(lock_path: Path) -> tuple[int, ...]:
    """Open a lock file to get its inode and modification time, which are then current on network storage."""
    try:
        descriptor = os.open(lock_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        found = os.fstat(descriptor)
        return found.st_ino, found.st_mtime_ns
    finally:
        os.close(descriptor)


def _remove_stale_lock(lock_path: Path, stale_content: dict[str, Any]) -> None:
    """Remove the lock file of an ended process, unless another process has just taken it over.

    Processes of one machine are serialized. Otherwise one process could remove the new lock of another.
    """
    folder = os.open(lock_path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(
            OSError
        ):  # without flock (network file systems), ``check_folder_lock_is_held`` detects a lost lock
            fcntl.flock(folder, fcntl.LOCK_EX)
        if _read_lock_file(lock_path) == stale_content:
            with suppress(FileNotFoundError):
                lock_path.unlink()
    finally:
        os.close(folder)


def _describe_lock_owner(lock_content: dict[str, Any]) -> str:
    words = [f"process {lock_content.get('process')} of {lock_content.get('user')} on {lock_content.get('host')}"]
    return ", since ".join([*words, str(lock_content["since"])] if "since" in lock_content else words)


def _refresh_lock_files_periodically() -> None:
    """Refresh the lock files of this process every few seconds, until it has none."""
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
