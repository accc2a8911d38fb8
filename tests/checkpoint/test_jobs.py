"""A checkpoint directory belongs to one job, the newest checkpoint was saved last, and only saved files are deleted."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardformer import filesystem
from shardformer.checkpoint import file_format
from shardformer.checkpoint import save as snapshot
from shardformer.checkpoint.directory import LATEST
from shardformer.checkpoint.file_format import read_save_number_and_time
from shardformer.checkpoint.load import load_checkpoint
from shardformer.checkpoint.retention import CheckpointRetention
from shardformer.checkpoint.save import async_save_checkpoint, save_checkpoint
from shardformer.errors import ConfigError, InputError
from shardformer.filesystem import DROPPED, LOCK, parse_temporary_name
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.zero.shard_optimizer import shard_optimizer
from tests.disk.locks import elsewhere, killed, lock_of, parent


def net(value: float = 1.0) -> nn.Module:
    model = nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def save(root: Path, step: int, value: float = 1.0, **options: Any) -> Path:
    return async_save_checkpoint(net(value), root, step=step, **options).wait()


def newest(root: Path) -> int:
    return load_checkpoint(net(), root).step


def steps(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("step-*"))


# ---------------------------------------------------------------------------------------------------------- two jobs


def on_two_ranks(root: Path, step: int = 5) -> list[str]:
    """Save on two ranks and return their errors, or ""."""

    def do(context: ParallelContext) -> str:
        model = net()
        optimizer = shard_optimizer(model, torch.optim.AdamW(model.parameters()), stage=1, context=context)
        try:
            save_checkpoint(model, root, optimizer, step=step)
        except (ConfigError, InputError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return run_as_threads(do, data=2)


def test_directory_of_running_job_is_refused_on_all_ranks(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / LOCK).unlink(missing_ok=True)
    lock_of(parent(), tmp_path)
    before = sorted(tmp_path.rglob("*"))
    said = on_two_ranks(tmp_path)
    assert said[0] == said[1] and f"is in use by process {os.getppid()}" in said[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_lock_of_killed_job_is_released(tmp_path: Path) -> None:
    lock_of(killed(), tmp_path)
    began = time.monotonic()
    assert on_two_ranks(tmp_path) == ["", ""]
    assert newest(tmp_path) == 5
    assert time.monotonic() - began < 5


def test_job_that_lost_its_lock_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 3)
    real = file_format.write_chunks

    def slow(*args: Any, **kwargs: Any) -> Any:
        lock_of(elsewhere(), tmp_path)
        return real(*args, **kwargs)

    monkeypatch.setattr(snapshot, "write_chunks", slow)
    with pytest.raises(InputError, match="is now locked by process 17 of someone on a-host"):
        save(tmp_path, 5)
    assert steps(tmp_path) == [3]
    assert not [path for path in tmp_path.iterdir() if parse_temporary_name(path)]


def test_async_save_writes_to_original_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    goes_on, write = threading.Event(), file_format.write_chunks

    def waiting(*arguments: Any, **options: Any) -> Any:
        assert goes_on.wait(10)
        return write(*arguments, **options)

    monkeypatch.setattr(snapshot, "write_chunks", waiting)
    saving = async_save_checkpoint(net(), "checkpoints", step=1)
    monkeypatch.chdir(tmp_path / "other")
    goes_on.set()
    assert saving.wait() == tmp_path / "checkpoints/step-00000001"
    assert steps(tmp_path / "checkpoints") == [1]
    assert not [*(tmp_path / "other").iterdir()]


def test_rank_whose_files_were_removed_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = file_format.write_chunks

    def gone(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "rank-00001.safetensors":
            shutil.rmtree(path.parent)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(snapshot, "write_chunks", gone)
    began = time.monotonic()
    said = on_two_ranks(tmp_path)
    assert said[0] == said[1] and said[0].startswith("InputError")
    assert time.monotonic() - began < 5


def test_two_models_can_save_different_steps_concurrently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, real = threading.Barrier(2), file_format.write_chunks

    def together(*args: Any, **kwargs: Any) -> Any:
        both.wait(20)
        return real(*args, **kwargs)

    monkeypatch.setattr(snapshot, "write_chunks", together)
    models = [net(1.0), net(2.0)]
    savings = [async_save_checkpoint(model, tmp_path, step=step) for step, model in enumerate(models, 1)]
    for number, path in enumerate([saving.wait() for saving in savings], 1):
        again = net(0.0)
        assert load_checkpoint(again, path).step == number
        assert all(bool((p == number).all()) for p in again.parameters())


def test_two_models_cannot_save_the_same_step(tmp_path: Path) -> None:
    first, second = net(1.0), net(2.0)
    save_checkpoint(first, tmp_path, step=5)
    with pytest.raises(ConfigError, match="another model in this process"):
        save_checkpoint(second, tmp_path, step=5)
    load_checkpoint(second, tmp_path)
    save_checkpoint(second, tmp_path, step=5)  # it goes on with the run
    save_checkpoint(first, tmp_path, step=6)
    del first, second
    save(tmp_path, 5, 3.0)


def test_step_in_async_save_of_another_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, begun = file_format.write_chunks, threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        time.sleep(0.3)
        return real(*args, **kwargs)

    monkeypatch.setattr(snapshot, "write_chunks", slow)
    first, second = net(1.0), net(2.0)
    saving = async_save_checkpoint(first, tmp_path, step=5)
    begun.wait(20)
    with pytest.raises(ConfigError, match="another model in this process"):
        save_checkpoint(second, tmp_path, step=5)
    load_checkpoint(second, saving.wait())
    assert all(bool((p == 1).all()) for p in second.parameters())


# ------------------------------------------------------------------------------------------------- which is the newest


@pytest.mark.parametrize("shift_s", [-3600.0, 3600.0])
def test_newest_checkpoint_is_independent_of_clocks(
    shift_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.time
    for step in (100, 200):
        save(tmp_path, step, retention=2)
    monkeypatch.setattr(time, "time", lambda: clock() + shift_s)
    for step in (300, 150):  # a run that goes on from step 100
        save(tmp_path, step, retention=2)
        assert newest(tmp_path) == step
        assert (tmp_path / LATEST).read_text() == f"step-{step:08d}\n"
    assert steps(tmp_path) == [150, 300]


def test_newest_checkpoint_is_independent_of_file_times(tmp_path: Path) -> None:
    for step in (1, 3, 2):
        save(tmp_path / "one", step)
    shutil.copytree(tmp_path / "one", tmp_path / "two", ignore=shutil.ignore_patterns(LOCK))
    for path in (tmp_path / "two").rglob("*"):
        os.utime(path, (5, 5))
    assert newest(tmp_path / "two") == 2


def test_unnumbered_checkpoints_are_older(tmp_path: Path) -> None:
    """Earlier versions wrote no numbers; their checkpoints are ordered by time."""
    for step in (7, 9):
        path = save(tmp_path, step)
        index = path / "checkpoint.json"
        index.write_text(index.read_text().replace(f', "number": {read_save_number_and_time(path)[0]}', "", 1))
    assert newest(tmp_path) == 9
    save(tmp_path, 8)
    assert newest(tmp_path) == 8


# --------------------------------------------------------------------------------------------------- what is deleted


@pytest.mark.parametrize("how", ["dropped", "replaced"])
def test_user_files_next_to_checkpoint_are_kept(how: str, tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "NOTES.md").write_text("my notes")
    (path / "plots").mkdir()
    (path / "plots" / "rank-00000.safetensors").write_text("not a checkpoint's")
    save(tmp_path, 2 if how == "dropped" else 1, retention=1)
    assert (path / "NOTES.md").read_text() == "my notes"
    assert (path / "plots" / "rank-00000.safetensors").exists()
    assert (path / "checkpoint.json").exists() == (how == "replaced")
    assert newest(tmp_path) == (2 if how == "dropped" else 1)
    save(tmp_path, 1, retention=1)
    assert (path / "NOTES.md").exists() and newest(tmp_path) == 1


def test_killed_deletion_loses_no_user_file(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "NOTES.md").write_text("my notes")
    name = filesystem.make_temporary_path(path, DROPPED).name
    here = filesystem.parse_temporary_name(tmp_path / name)
    assert here is not None
    path.rename(tmp_path / name.replace(f"-{here.owner.start}-", f"-{here.owner.start - 1}-"))
    save(tmp_path, 2)
    assert [p.name for p in path.iterdir()] == ["NOTES.md"]
    assert not [p for p in tmp_path.iterdir() if parse_temporary_name(p)]


def test_linked_checkpoint_is_loaded_and_not_deleted(tmp_path: Path) -> None:
    save(tmp_path / "big disk", 1)
    root = tmp_path / "checkpoints"
    root.mkdir()
    (root / "step-00000001").symlink_to(tmp_path / "big disk" / "step-00000001")
    assert newest(root) == 1
    save(root, 2, retention=1)
    assert (root / "step-00000001").is_symlink() and newest(tmp_path / "big disk") == 1


def test_only_saved_files_are_deleted(tmp_path: Path) -> None:
    mine = [".saving-mine", ".saving-step-7", ".dropped-step-00000001", "step-12", ".replaced-notes"]
    for name in mine:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine")
    for step in (1, 2, 3):
        save(tmp_path, step, retention=CheckpointRetention(last=1))
    assert all((tmp_path / name / "file").read_text() == "mine" for name in mine)


# -------------------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("name", [LATEST, "step-00000007", LOCK, ".saving-latest", ".replaced-step-00000007"])
@pytest.mark.parametrize("to", ["file", "folder", "nothing"])
def test_planted_link_is_not_followed(name: str, to: str, tmp_path: Path) -> None:
    precious, root = tmp_path / "precious", tmp_path / "root"
    if to == "file":
        precious.write_text("precious")
    elif to == "folder":
        precious.mkdir()
        (precious / "checkpoint.json").write_text("precious")
    root.mkdir()
    (root / name).symlink_to(precious)
    try:
        save(root, 7)
        save(root, 7, retention=1)
        assert newest(root) == 7
    except ConfigError:
        assert name in (LOCK, "step-00000007")
    assert precious.exists() == (to != "nothing")
    if to != "nothing":
        assert (precious if to == "file" else precious / "checkpoint.json").read_text() == "precious"
        assert to == "file" or [path.name for path in precious.iterdir()] == ["checkpoint.json"]


def test_link_in_hidden_folder_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users may be able to write into the hidden folder."""
    (tmp_path / "precious").write_text("precious")
    real = Path.mkdir

    def planted(self: Path, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        if parse_temporary_name(self):
            (self / "rank-00000.safetensors").symlink_to(tmp_path / "precious")

    monkeypatch.setattr(Path, "mkdir", planted)
    with pytest.raises(InputError, match="exists"):
        save(tmp_path / "root", 7)
    assert (tmp_path / "precious").read_text() == "precious"


def test_file_with_name_of_step_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step-00000005").write_text("mine")
    said = on_two_ranks(tmp_path)
    assert said[0] == said[1] and "step-00000005, because a file with this name exists" in said[0]
    assert os.listdir(tmp_path) == ["step-00000005"]
