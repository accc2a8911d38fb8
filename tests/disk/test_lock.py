"""A directory belongs to one process at a time, and never to an exited process."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from pathlib import Path

import pytest

from shardformer import filesystem
from shardformer.errors import ConfigError, InputError
from shardformer.filesystem import (
    LOCK,
    acquire_folder_lock,
    check_folder_lock_is_held,
    release_folder_lock,
)
from tests.disk.locks import elsewhere, killed, lock_of, parent

FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # the children end at once


class Holder:
    """An owner of a lock."""


@pytest.fixture(autouse=True)
def not_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "STALE_S", 0.3)
    monkeypatch.setattr(filesystem, "REFRESH_S", 0.05)
    monkeypatch.setattr(filesystem, "_UNFINISHED_S", 0.1)


def owner(folder: Path) -> int:
    return int(json.loads((folder / LOCK).read_text())["process"])


def test_lock_is_held_while_an_owner_is_alive(tmp_path: Path) -> None:
    first, second = Holder(), Holder()
    assert acquire_folder_lock(tmp_path / "new", first)
    assert acquire_folder_lock(tmp_path / "new", second)
    assert not acquire_folder_lock(tmp_path / "new", first)
    assert owner(tmp_path / "new") == os.getpid()
    del first
    gc.collect()
    assert (tmp_path / "new" / LOCK).exists()
    release_folder_lock(tmp_path / "new", second)
    assert list((tmp_path / "new").iterdir()) == []


def test_lock_of_running_process_is_respected(tmp_path: Path) -> None:
    path = lock_of(parent(), tmp_path)
    before = path.read_text()
    with pytest.raises(ConfigError, match=rf"in use by process {os.getppid()} of someone on a-host"):
        acquire_folder_lock(tmp_path, Holder())
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("what", ["killed", "empty", "own"])
def test_lock_of_dead_process_is_taken_over(what: str, tmp_path: Path) -> None:
    path = lock_of(killed(), tmp_path)
    if what == "empty":  # killed between the two
        path.write_text("")
    elif what == "own":  # this process was not able to remove it
        lock_of(filesystem.ProcessIdentity.current(), tmp_path)
    began, holder = time.monotonic(), Holder()
    acquire_folder_lock(tmp_path, holder)
    assert time.monotonic() - began < 1
    assert owner(tmp_path) == os.getpid()
    assert list(tmp_path.iterdir()) == [path]


@FORKS
def test_zombie_process_counts_as_dead(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    time.sleep(0.05)
    try:
        assert filesystem.ProcessIdentity(filesystem.ProcessIdentity.current().machine, child, 0).is_dead
    finally:
        os.waitpid(child, 0)


def test_lock_of_other_machine_expires_without_refresh(tmp_path: Path) -> None:
    path, holder, stop = lock_of(elsewhere(), tmp_path), Holder(), threading.Event()

    def refresh() -> None:
        while not stop.wait(0.02):
            os.utime(path)

    thread = threading.Thread(target=refresh)
    thread.start()
    with pytest.raises(ConfigError, match="is in use by process 17"):
        acquire_folder_lock(tmp_path, holder)
    stop.set()
    thread.join()
    began = time.monotonic()
    acquire_folder_lock(tmp_path, holder)
    assert time.monotonic() - began >= 0.3
    assert owner(tmp_path) == os.getpid()


def test_only_own_lock_is_refreshed(tmp_path: Path) -> None:
    holder = Holder()
    acquire_folder_lock(tmp_path, holder)
    path = tmp_path / LOCK
    os.utime(path, (1, 1))
    end = time.monotonic() + 20
    while path.stat().st_mtime < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert path.stat().st_mtime > 2
    check_folder_lock_is_held(tmp_path)
    lock_of(elsewhere(), tmp_path)
    os.utime(path, (1, 1))
    time.sleep(0.2)
    assert path.stat().st_mtime < 2
    with pytest.raises(InputError, match="is now locked by process 17 of someone on a-host"):
        check_folder_lock_is_held(tmp_path)
    release_folder_lock(tmp_path, holder)
    assert path.exists(), "it is not this process's lock"


def test_removed_lock_is_recreated(tmp_path: Path) -> None:
    holder = Holder()
    acquire_folder_lock(tmp_path, holder)
    (tmp_path / LOCK).unlink()
    check_folder_lock_is_held(tmp_path)
    assert owner(tmp_path) == os.getpid()


@pytest.mark.parametrize("what", ["link", "dangling", "folder", "text", "list"])
def test_other_files_are_not_treated_as_locks(what: str, tmp_path: Path) -> None:
    precious, path = tmp_path / "precious", tmp_path / "run" / LOCK
    path.parent.mkdir()
    if what in ("link", "dangling"):
        path.symlink_to(precious)
    elif what == "folder":
        path.mkdir()
    else:
        path.write_text("my notes" if what == "text" else "[1]")
    if what == "link":
        precious.write_text("precious")
    with pytest.raises(ConfigError, match="is not a lock file of ShardFormer"):
        acquire_folder_lock(path.parent, Holder())
    assert precious.exists() == (what == "link") and (what != "link" or precious.read_text() == "precious")
    assert os.path.lexists(path)


@FORKS
def test_child_process_does_not_release_lock_of_parent(tmp_path: Path) -> None:
    holder = Holder()
    acquire_folder_lock(tmp_path, holder)
    child = os.fork()
    if child == 0:
        del holder
        gc.collect()
        refused = False
        try:
            acquire_folder_lock(tmp_path, Holder())
        except ConfigError:
            refused = True
        os._exit(0 if refused else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert owner(tmp_path) == os.getpid()


@FORKS
def test_one_of_several_processes_takes_over_a_lock(tmp_path: Path) -> None:
    lock_of(killed(), tmp_path)
    start = tmp_path.parent / f"{tmp_path.name}-start"
    children = []
    for _ in range(6):
        if (child := os.fork()) == 0:
            holder, status = Holder(), 1
            while not start.exists():
                time.sleep(0.001)
            try:
                acquire_folder_lock(tmp_path, holder)
                status = 0
                time.sleep(0.5)
            except ConfigError:
                status = 2
            finally:
                os._exit(status)
        children.append(child)
    start.touch()
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ends.count(0) == 1 and ends.count(2) == 5
