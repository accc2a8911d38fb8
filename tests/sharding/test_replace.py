"""Saving over an older model replaces its files and no others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shardformer import filesystem
from shardformer.filesystem import REPLACED, ProcessIdentity, make_temporary_path, parse_temporary_name
from shardformer.weights.save_pretrained import MODEL_DIRECTORY

OLD = (
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
)
MINE = ("tokenizer.json", "model-backup.safetensors", "model.fp16.safetensors", "modeling_mine.bin", "notes.md")


def write(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("new")


def fill(folder: Path) -> None:
    folder.mkdir()
    for name in (*OLD, *MINE):
        (folder / name).write_text("old")


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir()) if path.is_file()}


NEW = {"config.json": "new", "model.safetensors": "new", **dict.fromkeys(MINE, "old")}


@pytest.mark.parametrize("how", ["exchanged", "in place", "with a folder in it"])
def test_model_files_are_replaced_and_other_files_kept(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    fill(target)
    if how == "in place":
        monkeypatch.setattr(filesystem, "_can_be_renamed", lambda _: False)
    inner = target / "checkpoints"
    if how == "with a folder in it":
        inner.mkdir()
        number = inner.stat().st_ino, target.stat().st_ino
    MODEL_DIRECTORY.replace_directory(target, write)
    assert contents(target) == NEW
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    if how == "with a folder in it":
        assert (inner.stat().st_ino, target.stat().st_ino) == number, "another process may write into it"


def test_file_created_during_the_exchange_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, real = tmp_path / "model", filesystem._link_files
    fill(target)

    def late(*args: Any) -> None:
        real(*args)
        (target / "late.txt").write_text("late")

    monkeypatch.setattr(filesystem, "_link_files", late)
    MODEL_DIRECTORY.replace_directory(target, write)
    assert contents(target) == {**NEW, "late.txt": "late"}


def test_adjacent_directories_are_unchanged(tmp_path: Path) -> None:
    others = [".saving-model", ".replaced-model", make_temporary_path(tmp_path / "model").name]
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine")
    fill(tmp_path / "model")
    MODEL_DIRECTORY.replace_directory(tmp_path / "model", write)
    assert all((tmp_path / name / "file").read_text() == "mine" for name in others)


@pytest.mark.parametrize("is_there", [False, True])
def test_leftovers_of_a_killed_process_are_restored_or_removed(is_there: bool, tmp_path: Path) -> None:
    target, here = tmp_path / "model", ProcessIdentity.current()
    left = make_temporary_path(target, REPLACED)
    left = left.with_name(left.name.replace(f"-{here.start}-", f"-{here.start - 1}-"))
    fill(left)
    (left / "late.txt").write_text("late")
    if is_there:
        fill(target)

    def fails(_: Path) -> None:
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        MODEL_DIRECTORY.replace_directory(target, fails)
    assert contents(target) == {**dict.fromkeys((*OLD, *MINE), "old"), "late.txt": "late"}
    assert not [path for path in tmp_path.iterdir() if parse_temporary_name(path)]


def test_failed_save_leaves_the_directory_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, real = tmp_path / "model", os.rename
    fill(target)
    before = contents(target)

    def fails(source: Any, to: Any) -> None:
        name = parse_temporary_name(Path(source))
        if Path(to) == target and name is not None and name.kind == "saving":
            raise OSError("Input/output error")
        real(source, to)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match="Input/output"):
        MODEL_DIRECTORY.replace_directory(target, write)
    assert contents(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
