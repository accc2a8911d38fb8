"""Files and folders are written under a private name and then put in place at once.

A private name belongs to one process and is used once. It names that process, so that what a killed one left can be
removed, and ends in random digits, so that no other user can put a link there beforehand.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from shardformer.errors import ConfigError

SAVING, REPLACED, DROPPED = "saving", "replaced", "dropped"
"""What a private name is for: what is being written, what was there before, and what is being deleted."""
_PRIVATE = re.compile(
    r"\.(?P<kind>\w+)-(?P<name>.+)-(?P<machine>[0-9a-f]{12})-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{16}(\.\w+)?"
)
_MOST = 120
"""Characters of the name in a private name, which together fit into the 255 of a file system."""


class Process(NamedTuple):
    """A process: a digest of the machine, its number there, and when it started, in ticks since the machine did."""

    machine: str
    pid: int
    start: int

    @classmethod
    def this(cls) -> Process:
        return cls(_machine(), os.getpid(), _started(os.getpid()) or 0)

    @property
    def is_here(self) -> bool:
        """Whether it runs, or ran, where this process sees its number."""
        return self.machine == _machine()

    @property
    def is_dead(self) -> bool:
        """Whether it is known to have ended; False for a process of another machine, of which nothing is known."""
        if not self.is_here:
            return False
        if Path("/proc/self/stat").exists():
            return _started(self.pid) != self.start
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return False


class Private(NamedTuple):
    """The parts of a private name."""

    kind: str
    name: str
    owner: Process


@functools.cache
def _machine() -> str:
    """Digest of the boot and the process namespace: containers may share a host, and its name, but not its numbers."""
    try:
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        parts = [platform.node()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _started(pid: int) -> int | None:
    """When a process started; None for one that is not there, or that has ended and was not waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def path_of(folder: str | os.PathLike[str]) -> Path:
    """The absolute path of what a user names, with ~ for the home folder, as a shell has it.

    A program may change its folder while a thread of it writes. Links and .. are left as they are.

    Raises ConfigError for what is no path.
    """
    text = folder if isinstance(folder, (str, os.PathLike)) else None
    if text is None or not isinstance(text := os.fspath(text), str) or not text or "\0" in text:
        raise ConfigError(
            f"{folder!r:.80} is not the path of a folder",
            rule="A folder is named by a text that is not empty, or a pathlib.Path",
            remedy="Pass a path such as 'run/checkpoints'",
        )
    return Path(os.path.expanduser(text)).absolute()


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it, where there is none.

    Raises ConfigError where a file, or a link that leads nowhere, is in the way, OSError where it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        other = next((p for p in (folder, *folder.parents) if os.path.lexists(p) and not p.is_dir()), None)
        if other is None:
            raise
        raise ConfigError(
            f"{folder} cannot be made: {other} is {'a link to no folder' if other.is_symlink() else 'a file'}",
            rule="Files are written into a folder, which is made where there is none",
            remedy="Give the path of another folder, or move that one away",
        ) from error


def private_path(path: Path, kind: str = SAVING) -> Path:
    """A name next to ``path`` that nothing has and that no other process will use."""
    machine, pid, start = Process.this()
    return path.with_name(f".{kind}-{path.name[:_MOST]}-{machine}-{pid}-{start}-{secrets.token_hex(8)}")


def private(path: Path) -> Private | None:
    """The parts of a private name; None for any other name, and for a symbolic link."""
    found = _PRIVATE.fullmatch(path.name)
    if found is None or path.is_symlink():
        return None
    return Private(found["kind"], found["name"], Process(found["machine"], int(found["pid"]), int(found["start"])))


def private_in(folder: Path, name: str) -> list[tuple[Path, Private]]:
    """What lies in a folder under private names that were made for ``name``."""
    every = [(path, private(path)) for path in folder.glob(".*")]
    return [(path, found) for path, found in every if found is not None and found.name == name[:_MOST]]


def remove_left(folder: Path, name: str) -> None:
    """Removes what killed processes of this machine left while they wrote ``name``."""
    for path, found in private_in(folder, name):
        if found.owner.is_dead and found.kind != REPLACED:
            remove(path)


def exchange(new: Path, target: Path) -> Path:
    """Gives a complete folder the name ``target``. Returns the private name of what had it before, if anything did.

    Raises OSError; then ``target`` is as it was.
    """
    replaced, is_there = private_path(target, REPLACED), os.path.lexists(target)
    if is_there:
        target.rename(replaced)
    try:
        new.rename(target)
    except BaseException:
        if is_there:
            replaced.rename(target)
        raise
    return replaced


def remove(path: Path) -> None:
    """Removes what this package wrote under a private name; what cannot be removed stays. Follows no links."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def new_file(path: Path) -> BinaryIO:
    """Opens a file for writing that is not there yet. Follows no link. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    return os.fdopen(descriptor, "wb", buffering=0)


def write_all(file: BinaryIO, data: Any) -> None:
    """Writes all of it: one call may write less."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def write_new(path: Path, data: bytes, *, to_disk: bool = False) -> None:
    """Writes a file that is not there yet, and waits until the disk has it, or not. Raises OSError."""
    with new_file(path) as file:
        write_all(file, data)
        if to_disk:
            os.fsync(file.fileno())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A private path with the same suffix; what is written there takes the place of ``path`` when the block ends.

    A reader sees the old file or the new one. A link is replaced, not followed. Where the block raises, ``path`` is as
    it was.
    """
    hidden = private_path(path)
    hidden = hidden.with_name(hidden.name + path.suffix)
    try:
        yield hidden
        os.replace(hidden, path)
    finally:
        remove(hidden)


def replace_text(path: Path, text: str, *, to_disk: bool = True) -> None:
    """Writes a file that takes the place of ``path`` at once, when the disk has it, or before."""
    with replacing(path) as hidden:
        write_new(hidden, text.encode(), to_disk=to_disk)


@dataclass(frozen=True)
class DirectoryWriter:
    """Writes a directory that takes the place of an older one at once; what else was in that one is kept.

    Args:
        own: names of the files that such a directory consists of, the older one too.
        key: a file without which nothing reads the directory.
    """

    own: re.Pattern[str]
    key: str

    def replace(self, folder: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
        """Lets ``write`` fill a directory that then takes the place of ``folder``.

        Raises what ``write`` raises, and OSError; then the folder is as it was. Where a process dies in between, it is
        as it was, or whole and new, or it is not there, or has no ``key``: then nothing of it loads.
        """
        target = Path(os.path.realpath(folder))
        hidden = self.begin(target, target if _can_be_renamed(target) else target / target.name)
        try:
            write(hidden)
            self.put_in_place(hidden, target)
        finally:
            remove(hidden)

    def begin(self, target: Path, near: Path) -> Path:
        """A new private directory next to ``near``. Undoes, or ends, what killed processes did to ``target``."""
        make_folder(near.parent)
        remove_left(near.parent, target.name)
        for path, found in private_in(near.parent, target.name):
            if found.kind == REPLACED and found.owner.is_dead:
                self._remove_replaced(path, target) if target.exists() else path.rename(target)
        hidden = private_path(near)
        hidden.mkdir()
        return hidden

    def put_in_place(self, new: Path, target: Path) -> None:
        """Lets a directory that is complete take the place of ``target``.

        They are exchanged, unless other folders are in ``target``, which other processes may write into, or this
        process works in it, or it cannot be renamed: then its files are replaced one after the other. Raises OSError.
        """
        kept = self._to_keep(target, new)
        is_current = target.exists() and os.path.samefile(target, os.curdir)
        if is_current or new.parent != target.parent or any(path.is_dir() and not path.is_symlink() for path in kept):
            self._move_into(new, target)
            return
        _link(kept, new)
        self._remove_replaced(exchange(new, target), target)

    def _remove_replaced(self, replaced: Path, target: Path) -> None:
        """Removes what ``target`` was before, after what came into it while it was exchanged is in its place."""
        for path in self._to_keep(replaced, target):
            path.rename(target / path.name)
        remove(replaced)

    def _to_keep(self, target: Path, new: Path) -> list[Path]:
        """What a directory has in addition to its own files, such as a tokenizer or a log."""
        there = sorted(target.iterdir()) if target.is_dir() else []
        written = {path.name for path in new.iterdir()}
        return [path for path in there if path.name not in written and not self.own.fullmatch(path.name)]

    def _move_into(self, hidden: Path, target: Path) -> None:
        """One file after the other, while there is no key: it goes first, and comes last."""
        new = {path.name for path in hidden.iterdir()}
        (target / self.key).unlink(missing_ok=True)
        for path in sorted(target.iterdir()):
            if path.is_file() and self.own.fullmatch(path.name) and path.name not in new:
                path.unlink()
        for name in sorted(new, key=lambda name: name == self.key):
            (hidden / name).replace(target / name)
        hidden.rmdir()


def _can_be_renamed(target: Path) -> bool:
    """Not a disk of its own, nor in a folder that this process may not write to."""
    return os.access(target.parent, os.W_OK) and not os.path.ismount(target)


def _link(paths: Iterable[Path], folder: Path) -> None:
    for path in paths:
        if path.is_symlink():
            (folder / path.name).symlink_to(os.readlink(path))
        elif path.is_file():
            _link_or_copy(str(path), str(folder / path.name))


def _link_or_copy(source: str, to: str) -> None:
    try:
        os.link(source, to)
    except OSError:  # a file system without links
        shutil.copy2(source, to)
