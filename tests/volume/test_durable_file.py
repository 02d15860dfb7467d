"""A file is hidden until it is whole and on the medium. Where that is unknown, it stays hidden."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep_sidecar.volume.files import DurableFile, Filesystem, replace_file


def whole(path: Path, *, phase: str) -> DurableFile:
    file = DurableFile(path, filesystem=Filesystem(), phase=phase)
    file.write(memoryview(b"new"), 0)
    file.flush()
    return file


def replace(path: Path, *, phase: str) -> None:
    with replace_file(path, filesystem=Filesystem(), phase=phase) as file:
        file.write(memoryview(b"new"), 0)
        file.flush()
        file.give_name()


@pytest.mark.parametrize("phase", ["write", "peer", "record"])
def test_a_new_file_name_is_removed_again_if_its_directory_sync_fails(
    tmp_path: Path, armed: Callable[[str], None], phase: str
) -> None:
    file = whole(tmp_path / "file", phase=phase)
    armed(f"{phase}.directory-sync:eio")
    with pytest.raises(OSError, match="injected"):
        file.give_name()
    assert [path.name for path in tmp_path.iterdir()] == [file.temporary.name]
    file.discard_unfinished()
    assert list(tmp_path.iterdir()) == []


def test_the_name_of_a_replaced_file_is_kept_if_its_directory_sync_fails(
    tmp_path: Path, armed: Callable[[str], None]
) -> None:
    (tmp_path / "file").write_text("old")
    file = whole(tmp_path / "file", phase="record")
    armed("record.directory-sync:eio")
    with pytest.raises(OSError, match="injected"):
        file.give_name()
    file.discard_unfinished()
    assert (tmp_path / "file").read_text() == "new", "old or new, and never none"


@pytest.mark.parametrize("point", ["data", "data-sync", "rename"])
def test_a_failed_replacement_keeps_the_existing_file(
    tmp_path: Path, armed: Callable[[str], None], point: str
) -> None:
    (tmp_path / "file").write_text("old")
    armed(f"record.{point}:eio")
    with pytest.raises(OSError, match="injected"):
        replace(tmp_path / "file", phase="record")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_the_temporary_file_of_a_killed_process_does_not_prevent_a_write(tmp_path: Path) -> None:
    (tmp_path / ".file.tmp").write_text("half, and longer than what comes")
    replace(tmp_path / "file", phase="")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["new"]


def test_creating_a_new_name_never_replaces_an_existing_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    file = whole(tmp_path / "file", phase="")
    with pytest.raises(FileExistsError):
        file.give_new_name()
    file.discard_unfinished()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_an_existing_name_counts_as_created_only_after_its_directory_was_synced(
    tmp_path: Path, armed: Callable[[str], None]
) -> None:
    for _ in range(2):  # the one who made it failed, and so does the next
        file = whole(tmp_path / "file", phase="record")
        armed("record.directory-sync:eio")
        with pytest.raises(OSError, match="injected"):
            file.give_new_name()
        file.discard_unfinished()
    file = whole(tmp_path / "file", phase="")
    with pytest.raises(FileExistsError):
        file.give_new_name()
    file.discard_unfinished()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
