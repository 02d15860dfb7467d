"""`keepstep.directory`: nothing is reached through a link, and nothing of others is written to."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from keepstep.directory import NotRegularFileError, OpenDirectory


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("theirs")
    return tmp_path / "ours"


def test_a_symbolic_link_is_not_opened_as_a_directory_and_the_error_names_it(place: Path) -> None:
    (place / "link").symlink_to("../theirs")
    for enter in (
        lambda: OpenDirectory.open_path(place / "link"),
        lambda: OpenDirectory.open_path(place).open_subdirectory("link"),
    ):
        with pytest.raises(NotADirectoryError, match=f"{place}/link"):
            enter()


def test_parent_directories_may_be_symbolic_links(place: Path) -> None:
    (place.parent / "link").symlink_to(place.parent)
    made = OpenDirectory.open_path(place.parent / "link" / "ours" / "new", make=True)
    assert (place / "new").is_dir()
    assert made.names() == []


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR | os.O_CREAT | os.O_TRUNC])
def test_only_regular_files_are_opened_and_a_pipe_does_not_block(place: Path, flags: int) -> None:
    (place / "link").symlink_to("../theirs/file")
    (place / "dangling").symlink_to("../theirs/new")
    os.mkfifo(place / "pipe")
    (place / "directory").mkdir()
    for name in ("link", "dangling", "pipe", "directory"):
        with pytest.raises(NotRegularFileError, match=f"{place}/{name}"):
            OpenDirectory.open_path(place).open_file(name, flags)
    assert sorted(os.listdir(place.parent / "theirs")) == ["file"]


def test_a_file_with_a_second_hard_link_is_read_but_never_written(place: Path) -> None:
    theirs = place.parent / "theirs" / "file"
    os.link(theirs, place / "twin")
    ours = OpenDirectory.open_path(place)
    assert ours.read("twin", most_bytes=100) == b"theirs"
    with pytest.raises(NotRegularFileError):
        ours.open_file("twin", os.O_WRONLY | os.O_TRUNC)
    ours.write("twin", b"ours")
    assert (theirs.read_text(), (place / "twin").read_text()) == ("theirs", "ours")


@pytest.mark.parametrize("left", ["file", "link", "directory"])
def test_a_file_is_replaced_despite_leftovers_of_a_killed_writer(place: Path, left: str) -> None:
    temporary, theirs = place / ".a.tmp", place.parent / "theirs" / "file"
    if left == "file":
        temporary.write_text("half")
    elif left == "link":
        temporary.symlink_to(theirs)
    else:
        temporary.mkdir()
        with pytest.raises(OSError, match="directory"):
            OpenDirectory.open_path(place).write("a", b"new")
        return
    OpenDirectory.open_path(place).write("a", b"new")
    assert (place / "a").read_bytes() == b"new"
    assert os.listdir(place) == ["a"]
    assert theirs.read_text() == "theirs"


def test_reading_a_file_larger_than_the_limit_is_an_error(place: Path) -> None:
    (place / "a").write_bytes(b"12345")
    assert OpenDirectory.open_path(place).read("a", most_bytes=5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        OpenDirectory.open_path(place).read("a", most_bytes=4)


def test_removing_a_tree_removes_symbolic_links_but_not_their_targets(place: Path) -> None:
    deep = place / "tree"
    for number in range(60):
        deep = deep / f"{number % 3}"
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    (deep / "link").symlink_to(place.parent / "theirs")
    (place / "tree" / "link").symlink_to(place.parent / "theirs")
    assert OpenDirectory.open_path(place).remove("tree") == 3
    assert os.listdir(place) == []
    assert (place.parent / "theirs" / "file").read_text() == "theirs"
    assert OpenDirectory.open_path(place).remove("tree") == 0


def test_a_directory_walk_is_limited_in_depth_and_follows_no_link(place: Path) -> None:
    top = OpenDirectory.open_path(place)
    directory = top
    for _ in range(1100):
        os.close(directory.open_file("file", os.O_WRONLY | os.O_CREAT))
        directory.make("d")
        directory = directory.open_subdirectory("d")
    (place / "link").symlink_to(place.parent / "theirs")
    found = [str(path) for path, _ in top.walk(levels=3)]
    assert found == ["d/d/file", "d/file", "file", "link"]
    assert top.remove("d") == 1099


def test_an_open_directory_stays_the_same_when_its_path_is_replaced(place: Path) -> None:
    ours = OpenDirectory.open_path(place)
    place.rename(place.parent / "moved")
    (place.parent / "ours").symlink_to(place.parent / "theirs")
    ours.write("file", b"ours")
    assert (place.parent / "moved" / "file").read_bytes() == b"ours"
    assert (place.parent / "theirs" / "file").read_text() == "theirs"


def test_concurrent_listings_of_one_directory_are_all_complete(place: Path) -> None:
    names = [f"{number:04}" for number in range(500)]
    for name in names:
        (place / name).touch()
    ours, found = OpenDirectory.open_path(place), list[bool]()

    def list_all() -> None:
        found.extend(ours.names() == names for _ in range(20))

    threads = [threading.Thread(target=list_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80


def test_directory_objects_leak_no_file_descriptors(place: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    (place / "a" / "b").mkdir(parents=True)
    for _ in range(50):
        OpenDirectory.open_path(place).open_subdirectory("a", "b").names()
        with pytest.raises(NotRegularFileError):
            OpenDirectory.open_path(place).open_file("a", os.O_WRONLY)
    assert len(os.listdir("/proc/self/fd")) == before
