"""A file or folder has either its old or its new content, and links are never followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardformer.errors import ConfigError
from shardformer.filesystem import (
    SAVING,
    ProcessIdentity,
    create_new_file,
    make_folder,
    make_temporary_path,
    parse_temporary_name,
    remove_file_or_folder,
    remove_stale_temporary_files,
    replace_file_atomically,
    replace_text_atomically,
    to_absolute_path,
    write_new_file,
)


def test_private_name_is_unique_and_contains_its_owner(tmp_path: Path) -> None:
    one, two = make_temporary_path(tmp_path / "step-00000005"), make_temporary_path(tmp_path / "step-00000005")
    assert one != two and one.parent == tmp_path
    found = parse_temporary_name(one)
    assert found is not None
    assert (found.kind, found.name, found.owner) == (SAVING, "step-00000005", ProcessIdentity.current())
    assert parse_temporary_name(tmp_path / ".saving-step-00000005") is None
    assert len(make_temporary_path(tmp_path / ("x" * 250)).name) < 255


def test_user_path_is_expanded_and_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    assert to_absolute_path("~/a") == Path("/home/me/a")
    assert to_absolute_path("link/../a") == tmp_path / "link/../a", "a link may lead elsewhere"
    for wrong in ("", "a\0b", None, 3, b"a"):
        with pytest.raises(ConfigError, match="is not a valid folder path"):
            to_absolute_path(wrong)  # type: ignore[arg-type]


def test_file_in_place_of_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    make_folder(tmp_path / "a/b")
    make_folder(tmp_path / "a/b")
    for other, kind in (("file", "a file"), ("link", "a broken link"), ("loop", "a broken link")):
        for folder in (tmp_path / other, tmp_path / other / "x/y"):
            with pytest.raises(ConfigError, match=f"{tmp_path / other} is {kind}"):
                make_folder(folder)
    with pytest.raises(OSError, match="too long"):
        make_folder(tmp_path / ("x" * 300))
    remove_file_or_folder(tmp_path / ("x" * 300))


def test_only_leftovers_of_killed_local_processes_are_removed(tmp_path: Path) -> None:
    here = ProcessIdentity.current()
    own = make_temporary_path(tmp_path / "model")
    dead = tmp_path / own.name.replace(f"-{here.start}-", f"-{here.start - 1}-")
    other = tmp_path / dead.name.replace(here.machine, "0" * 12)
    another = tmp_path / dead.name.replace("-model-", "-other-")
    kept = [own, other, another, tmp_path / ".saving-model"]
    for path in (*kept, dead):
        path.mkdir()
    link = dead.with_name(dead.name[:-1] + ("0" if dead.name[-1] != "0" else "1"))
    link.symlink_to(tmp_path / "elsewhere")
    remove_stale_temporary_files(tmp_path, "model")
    assert not dead.exists()
    assert all(path.exists() for path in kept) and link.is_symlink()


def test_new_file_does_not_follow_link(tmp_path: Path) -> None:
    for target in ("precious", "not there"):
        link = tmp_path / f"link to {target}"
        link.symlink_to(tmp_path / target)
        with pytest.raises(FileExistsError):
            create_new_file(link)
    assert not (tmp_path / "not there").exists()


def test_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    precious, path = tmp_path / "precious", tmp_path / "text.txt"
    precious.write_text("precious")
    path.symlink_to(precious)
    replace_text_atomically(path, "new")
    assert (precious.read_text(), path.read_text(), path.is_symlink()) == ("precious", "new", False)


def test_failed_replacement_keeps_file(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_text("old")
    with pytest.raises(OSError, match="full"), replace_file_atomically(path) as hidden:
        assert hidden.suffix == ".png"
        write_new_file(hidden, b"half")
        raise OSError("full")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["picture.png"]
