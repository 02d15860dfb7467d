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
def test_a_name_that_a_power_cut_may_take_is_taken_back(
    tmp_path: Path, armed: Callable[[str], None], phase: str
) -> None:
    file = whole(tmp_path / "file", phase=phase)
    armed(f"{phase}.directory-sync:eio")
    with pytest.raises(OSError, match="injected"):
        file.give_name()
    assert [path.name for path in tmp_path.iterdir()] == [file.temporary.name]
    file.drop()
    assert list(tmp_path.iterdir()) == []


def test_the_name_of_a_file_that_replaced_another_stays(
    tmp_path: Path, armed: Callable[[str], None]
) -> None:
    (tmp_path / "file").write_text("old")
    file = whole(tmp_path / "file", phase="record")
    armed("record.directory-sync:eio")
    with pytest.raises(OSError, match="injected"):
        file.give_name()
    file.drop()
    assert (tmp_path / "file").read_text() == "new", "old or new, and never none"


@pytest.mark.parametrize("point", ["data", "data-sync", "rename"])
def test_a_file_that_fails_leaves_the_one_that_was_there(
    tmp_path: Path, armed: Callable[[str], None], point: str
) -> None:
    (tmp_path / "file").write_text("old")
    armed(f"record.{point}:eio")
    with pytest.raises(OSError, match="injected"):
        replace(tmp_path / "file", phase="record")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_what_a_killed_process_left_is_in_no_way(tmp_path: Path) -> None:
    (tmp_path / ".file.tmp").write_text("half, and longer than what comes")
    replace(tmp_path / "file", phase="")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["new"]


def test_a_new_name_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    file = whole(tmp_path / "file", phase="")
    with pytest.raises(FileExistsError):
        file.give_new_name()
    file.drop()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_name_that_another_made_counts_only_once_it_is_durable(
    tmp_path: Path, armed: Callable[[str], None]
) -> None:
    for _ in range(2):  # the one who made it failed, and so does the next
        file = whole(tmp_path / "file", phase="record")
        armed("record.directory-sync:eio")
        with pytest.raises(OSError, match="injected"):
            file.give_new_name()
        file.drop()
    file = whole(tmp_path / "file", phase="")
    with pytest.raises(FileExistsError):
        file.give_new_name()
    file.drop()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
