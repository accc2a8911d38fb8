"""Damaged checkpoints are never loaded, and failed saves keep earlier checkpoints."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardformer import filesystem
from shardformer.checkpoint import directory, file_format
from shardformer.checkpoint import directory as folder
from shardformer.checkpoint import file_format as files
from shardformer.checkpoint import save as snapshot
from shardformer.checkpoint.directory import LATEST
from shardformer.checkpoint.file_format import INDEX_FILE, CorruptCheckpointError
from shardformer.checkpoint.load import LoadedCheckpoint, load_checkpoint
from shardformer.checkpoint.retention import CheckpointRetention
from shardformer.checkpoint.save import async_save_checkpoint, save_checkpoint
from shardformer.errors import ConfigError, InputError
from shardformer.filesystem import LOCK, SAVING, ProcessIdentity, make_temporary_path
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.zero.shard_optimizer import shard_optimizer
from tests.scripts import PYTHON

RANKS = 2


def net(value: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 14), nn.BatchNorm1d(14), nn.Linear(14, 3))
    if value:
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.fill_(value)
    return model


def saved(root: Path, step: int, keep: Any = None, save: Callable[..., Any] = save_checkpoint) -> list[Any]:
    """Save a model whose elements all equal ``step`` on two ranks."""

    def do(context: ParallelContext) -> Any:
        model = net(step)
        optimizer = shard_optimizer(model, torch.optim.AdamW(model.parameters()), stage=1, context=context)
        (sum(p.sum() for p in model.parameters()) * 0).backward()
        optimizer.step()
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.fill_(step)
        return save(model, root, optimizer, step=step, retention=keep)

    found = run_as_threads(do, data=RANKS)
    settle()
    return found


def settle() -> None:
    """Wait until the saved data is synced to the disk."""
    for thread in threading.enumerate():
        if thread.name == "shardformer-save":
            thread.join()


def in_background(*args: Any, **kwargs: Any) -> Path:
    return async_save_checkpoint(*args, **kwargs).wait()


def loaded(path: Path) -> tuple[LoadedCheckpoint, dict[str, Tensor]]:
    model = net()
    return load_checkpoint(model, path, torch.optim.AdamW(model.parameters())), model.state_dict()


def check(path: Path, step: int) -> LoadedCheckpoint:
    """Load a checkpoint and check that all elements belong to ``step``."""
    found, state = loaded(path)
    assert found.step == step
    assert all(bool((tensor == step).all()) for tensor in state.values())
    return found


def names(path: Path) -> list[str]:
    """List a folder without the lock of this process, which lives as long as a model of the test."""
    return sorted(p.name for p in path.iterdir() if p.name != LOCK)


def left_by_a_killed_process(path: Path, kind: str = SAVING) -> Path:
    """Return a private name for ``path`` of a process that no longer runs."""
    here = ProcessIdentity.current()
    name = make_temporary_path(path, kind).name
    return path.with_name(name.replace(f"-{here.pid}-{here.start}-", f"-{here.pid}-{here.start - 1}-"))


@pytest.fixture(autouse=True)
def not_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the wait for the first rank's folder, which ranks of one host see at once."""
    monkeypatch.setattr(folder, "SEEN_WITHIN_S", 0.5)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two") / "checkpoints"
    for step in (1, 2):
        saved(root, step)
    return root


@pytest.fixture
def copy(two: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two, tmp_path / "checkpoints"))


@pytest.mark.reduced(at_most=40)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_flipped_bit_is_detected_or_harmless(seed: int, copy: Path) -> None:
    """A directory falls back to the older checkpoint. Bits that are not read, such as padding, do not matter."""
    draws = random.Random(seed)
    newest = copy / "step-00000002"
    path = draws.choice(sorted(newest.iterdir()))
    data = bytearray(path.read_bytes())
    data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
    path.write_bytes(bytes(data))
    try:
        alone, state = loaded(newest)
    except CorruptCheckpointError as error:
        assert str(newest) in str(error)
        assert check(copy, 1).skipped
        return
    assert alone.step == 2
    assert all(bool((tensor == 2).all()) for tensor in state.values())


def flip(path: Path, name: str, at: int = 0) -> int:
    """Flip a bit of byte ``at`` of the first tensor with this prefix, and return the size of the tensor in bytes."""
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    low, high = next(entry["data_offsets"] for key, entry in header.items() if key.startswith(name))
    data[begin + low + at] ^= 16
    path.write_bytes(bytes(data))
    return int(high - low)


@pytest.mark.parametrize("name", ["weights/0.weight", "weights/1.num_batches_tracked", "optimizer.0/exp_avg/"])
def test_every_tensor_byte_is_checksummed(name: str, copy: Path) -> None:
    newest = copy / "step-00000002"
    for path in sorted(newest.glob("rank*")):
        try:
            size = flip(path, name)
        except StopIteration:
            continue
        flip(path, name)
        for at in range(0, size, max(size // 40, 1)):
            flip(path, name, at)
            with pytest.raises(CorruptCheckpointError, match="checksum"):
                loaded(newest)
            flip(path, name, at)
    check(copy, 2)


@pytest.mark.parametrize("what", ["missing", "short", "empty", "pickle", "swapped", "index", "no index"])
def test_damaged_file_is_detected(what: str, copy: Path) -> None:
    newest, ran = copy / "step-00000002", copy / "ran"
    path = newest / (INDEX_FILE if "index" in what else "rank-00001.safetensors")
    if what in ("missing", "no index"):
        path.unlink()
    elif what == "short":
        path.write_bytes(path.read_bytes()[:-40])
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "pickle":
        path.write_bytes(pickle.dumps(_Runs(str(ran))))
    elif what == "swapped":
        shutil.copy(copy / "step-00000001" / path.name, path)
    else:
        path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    with pytest.raises(CorruptCheckpointError):
        loaded(newest)
    assert bool(check(copy, 1).skipped) == (what != "no index")
    assert not ran.exists()


def _forge(found: dict[str, Any], what: str) -> None:
    name, (dtype, shape, boxes) = next(iter(found["tensors"].items()))
    start, size, _, total = boxes[0]
    if what == "dtype":
        found["tensors"][name] = ["load", shape, boxes]
    elif what == "outside":
        found["tensors"][name] = [dtype, shape, [[[9**9 for _ in start], size, 0, total]]]
    elif what in found:
        del found[what]
    else:
        found["tensors"][name] = [dtype, shape, [[start, size, json.loads(what), total]]]


@pytest.mark.parametrize(
    "what", ['"../x"', '"/x"', "-1", "0.5", "null", "[0]", "true", "dtype", "outside", "format", "tensors", "step"]
)
def test_index_cannot_name_other_files(what: str, copy: Path) -> None:
    path = copy / "step-00000002" / INDEX_FILE
    content = path.read_bytes().split(b"\n", 2)[1]
    found = json.loads(content)
    _forge(found, what)
    text = json.dumps(found)
    head = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "saved_at": found["saved_at"]}
    path.write_text(f'{json.dumps(head)[:-1]}, "content":\n{text}\n}}\n')
    with pytest.raises(CorruptCheckpointError, match="is not a valid checkpoint index"):
        loaded(path.parent)
    check(copy, 1)


class _Runs:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_failed_load_changes_nothing(copy: Path) -> None:
    newest = copy / "step-00000002"
    flip(newest / "rank-00001.safetensors", "weights")
    model = net(7)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(CorruptCheckpointError):
        load_checkpoint(model, newest, optimizer)
    assert all(bool((tensor == 7).all()) for tensor in model.state_dict().values())
    assert optimizer.state == {}


def test_replaced_checkpoint_loads_after_kill_between_renames(copy: Path) -> None:
    (copy / "step-00000002").rename(copy / ".replaced-step-00000002")
    check(copy, 2)


@pytest.mark.parametrize("of_step", [3, 4])
def test_step_can_be_saved_after_killed_save(of_step: int, copy: Path) -> None:
    left = left_by_a_killed_process(directory.get_checkpoint_folder(copy, of_step))
    left.mkdir()
    (left / "part").write_text("some bytes")
    saved(copy, 3)
    check(copy, 3)
    assert not left.exists() and not (copy / "step-00000003" / "part").exists()


# ------------------------------------------------------------------------------------------------- saves that fail


def _failing(monkeypatch: pytest.MonkeyPatch, at: int) -> list[int]:
    """Make the disk operation number ``at`` fail, and return the list of operations."""
    made: list[int] = []
    places: list[tuple[Any, str]] = [
        (files, "write_all_bytes"),
        (filesystem, "write_all_bytes"),
        (files, "fsync_path"),
        (snapshot, "fsync_path"),
    ]
    places += [(os, "fsync"), (Path, "rename"), (os, "replace"), (Path, "mkdir")]

    def wrapped(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(1)
            if len(made) == at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        return call

    for where, name in places:
        monkeypatch.setattr(where, name, wrapped(getattr(where, name)))
    return made


@pytest.mark.slow
@pytest.mark.reduced(at_most=15)
@pytest.mark.parametrize("save", [save_checkpoint, in_background])
@pytest.mark.parametrize("at", range(1, 31))
def test_failed_save_keeps_earlier_checkpoints(
    at: int, save: Callable[..., Any], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        made = _failing(patch, at)
        try:
            saved(copy, 3, keep=1, save=save)
            failed = False
        except InputError as error:
            failed = True
            assert "No space left" in str(error) or "failed to write its shards" in str(error)
        is_settling = save is save_checkpoint and (copy / "step-00000003").exists()
        assert len(made) < at or failed or is_settling
        if is_settling and len(made) >= at:
            assert (copy / "step-00000002").exists(), "the older one stays"
    found, state = loaded(copy)
    assert found.step in ((2, 3) if failed else (3,))
    assert all(bool((tensor == found.step).all()) for tensor in state.values())
    assert not found.skipped
    saved(copy, 4)
    check(copy, 4)
    assert not list(copy.glob(".saving*"))


def test_failure_injection_covers_all_disk_operations(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        made = _failing(patch, -1)
        saved(copy, 3)
    assert 15 < len(made) <= 80


def test_unwritable_directory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        saved(file, 1)
    with pytest.raises(InputError, match="failed on rank 0"):
        saved(Path("/proc/nowhere"), 1)


def test_retention_keeps_the_specified_checkpoints(tmp_path: Path) -> None:
    for step in range(1, 7):
        saved(tmp_path, step, CheckpointRetention(last=2, every=3))
    assert names(tmp_path) == [LATEST, *(f"step-0000000{n}" for n in (3, 5, 6))]
    assert (tmp_path / LATEST).read_text() == "step-00000006\n"
    saved(tmp_path, 6, 1)  # again
    assert names(tmp_path) == [LATEST, "step-00000006"]
    saved(tmp_path, 7, CheckpointRetention(last=1, younger_than=3600))
    check(tmp_path, 7)
    check(tmp_path / "step-00000006", 6)


# ----------------------------------------------------------------------------------------------- in the background


def test_async_save_stores_values_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    real = file_format.write_chunks

    def slow(*args: Any, **kwargs: Any) -> Any:
        goes_on.wait(20)
        return real(*args, **kwargs)

    monkeypatch.setattr(snapshot, "write_chunks", slow)

    def do(context: ParallelContext) -> tuple[Path, str]:
        model = net(3)
        optimizer = shard_optimizer(model, torch.optim.AdamW(model.parameters()), stage=1, context=context)
        saving = async_save_checkpoint(model, tmp_path, optimizer, step=3)
        assert not saving.is_done
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.fill_(4)
        with pytest.raises(InputError) as second:
            save_checkpoint(model, tmp_path, optimizer, step=4)
        goes_on.set()
        path = saving.wait()
        saving = async_save_checkpoint(model, tmp_path, optimizer, step=4)
        saving.wait()
        return path, str(second.value)

    for path, said in run_as_threads(do, data=RANKS):
        assert path == tmp_path / "step-00000003"
        assert "still in progress" in said
        check(path, 3)
    check(tmp_path, 4)


def test_failed_async_save_raises_in_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(snapshot, "write_chunks", full)
    with pytest.raises(InputError, match="No space left"):
        saved(tmp_path, 1, save=in_background)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------ what a save leaves to a thread


def saving_run(context: ParallelContext) -> dict[str, Any]:
    model = net(3)
    optimizer = shard_optimizer(model, torch.optim.AdamW(model.parameters()), stage=1, context=context)
    return {"model": model, "optimizer": optimizer}


def test_older_checkpoints_are_deleted_after_sync(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, real = threading.Event(), file_format.fsync_path

    def slow(path: Path) -> None:
        if path.name == "rank-00001.safetensors":
            goes_on.wait(20)
        real(path)

    monkeypatch.setattr(snapshot, "fsync_path", slow)
    assert run_as_threads(lambda c: save_checkpoint(**saving_run(c), directory=copy, step=3, retention=1), data=RANKS)
    check(copy, 3)
    assert {p.name for p in copy.glob("step*")} == {f"step-0000000{n}" for n in (1, 2, 3)}
    goes_on.set()
    settle()
    assert names(copy) == [LATEST, "step-00000003"]
    assert sorted(p.name for p in (copy / "step-00000003").iterdir()) == [
        INDEX_FILE,
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]


def test_failed_sync_keeps_older_checkpoints_and_raises_in_next_save(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_broken, real = threading.Event(), file_format.fsync_path

    def may_fail(path: Path) -> None:
        if is_broken.is_set():
            raise OSError(errno.EIO, "Input/output error")
        real(path)

    monkeypatch.setattr(snapshot, "fsync_path", may_fail)

    def do(context: ParallelContext) -> list[str]:
        run, meet = saving_run(context), context.data.transport.all_gather_objects
        is_broken.set()
        save_checkpoint(**run, directory=copy, step=3, retention=1)
        meet(None)
        settle()
        meet(None)
        is_broken.clear()
        with pytest.raises(InputError, match="could not be synced to the disk") as error:
            save_checkpoint(**run, directory=copy, step=4, retention=1)
        kept = sorted(p.name for p in copy.glob("step*"))
        meet(None)
        save_checkpoint(**run, directory=copy, step=5, retention=1)
        return [str(error.value), *kept]

    first, other = run_as_threads(do, data=RANKS)
    assert first == other
    assert first[1:] == [f"step-0000000{n}" for n in (1, 2, 3)]
    settle()
    assert names(copy) == [LATEST, "step-00000005"]


def test_replaced_checkpoint_is_kept_until_sync(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shardformer.checkpoint.save.flush_checkpoint_to_disk", lambda *_: None)
        saved(copy, 2)
    (copy / "step-00000002" / "rank-00000.safetensors").write_bytes(b"")
    assert check(copy, 2).skipped


@pytest.mark.slow
def test_killed_processes_leave_complete_checkpoints(tmp_path: Path) -> None:
    script = Path(__file__).with_name("kills.py")
    done = subprocess.run(
        [PYTHON, str(script), str(tmp_path), "--rounds", "2"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "2 kills" in done.stdout
