"""`keepstep.directory`: nothing is reached through a link, and nothing of others is written to."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from keepstep.directory import NoFileError, OpenDirectory


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("theirs")
    return tmp_path / "ours"


def test_a_link_is_no_directory_and_the_error_names_it(place: Path) -> None:
    (place / "link").symlink_to("../theirs")
    for enter in (
        lambda: OpenDirectory.opened(place / "link"),
        lambda: OpenDirectory.opened(place).inside("link"),
    ):
        with pytest.raises(NotADirectoryError, match=f"{place}/link"):
            enter()


def test_the_directories_above_may_be_links(place: Path) -> None:
    (place.parent / "link").symlink_to(place.parent)
    made = OpenDirectory.opened(place.parent / "link" / "ours" / "new", make=True)
    assert (place / "new").is_dir()
    assert made.names() == []


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR | os.O_CREAT | os.O_TRUNC])
def test_only_a_regular_file_is_opened_and_a_pipe_holds_up_nobody(place: Path, flags: int) -> None:
    (place / "link").symlink_to("../theirs/file")
    (place / "dangling").symlink_to("../theirs/new")
    os.mkfifo(place / "pipe")
    (place / "directory").mkdir()
    for name in ("link", "dangling", "pipe", "directory"):
        with pytest.raises(NoFileError, match=f"{place}/{name}"):
            OpenDirectory.opened(place).open(name, flags)
    assert sorted(os.listdir(place.parent / "theirs")) == ["file"]


def test_a_file_with_a_second_name_is_read_and_never_written_to(place: Path) -> None:
    theirs = place.parent / "theirs" / "file"
    os.link(theirs, place / "twin")
    ours = OpenDirectory.opened(place)
    assert ours.read("twin", most_bytes=100) == b"theirs"
    with pytest.raises(NoFileError):
        ours.open("twin", os.O_WRONLY | os.O_TRUNC)
    ours.write("twin", b"ours")
    assert (theirs.read_text(), (place / "twin").read_text()) == ("theirs", "ours")


@pytest.mark.parametrize("left", ["file", "link", "directory"])
def test_a_file_is_replaced_whatever_a_killed_writer_has_left(place: Path, left: str) -> None:
    temporary, theirs = place / ".a.tmp", place.parent / "theirs" / "file"
    if left == "file":
        temporary.write_text("half")
    elif left == "link":
        temporary.symlink_to(theirs)
    else:
        temporary.mkdir()
        with pytest.raises(OSError, match="directory"):
            OpenDirectory.opened(place).write("a", b"new")
        return
    OpenDirectory.opened(place).write("a", b"new")
    assert (place / "a").read_bytes() == b"new"
    assert os.listdir(place) == ["a"]
    assert theirs.read_text() == "theirs"


def test_more_bytes_than_are_wanted_are_an_error(place: Path) -> None:
    (place / "a").write_bytes(b"12345")
    assert OpenDirectory.opened(place).read("a", most_bytes=5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        OpenDirectory.opened(place).read("a", most_bytes=4)


def test_a_tree_is_removed_with_its_links_and_not_through_them(place: Path) -> None:
    deep = place / "tree"
    for number in range(60):
        deep = deep / f"{number % 3}"
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    (deep / "link").symlink_to(place.parent / "theirs")
    (place / "tree" / "link").symlink_to(place.parent / "theirs")
    assert OpenDirectory.opened(place).remove("tree") == 3
    assert os.listdir(place) == []
    assert (place.parent / "theirs" / "file").read_text() == "theirs"
    assert OpenDirectory.opened(place).remove("tree") == 0


def test_a_walk_shows_the_files_of_some_levels_and_follows_no_link(place: Path) -> None:
    top = OpenDirectory.opened(place)
    directory = top
    for _ in range(1100):
        os.close(directory.open("file", os.O_WRONLY | os.O_CREAT))
        directory.make("d")
        directory = directory.inside("d")
    (place / "link").symlink_to(place.parent / "theirs")
    found = [str(path) for path, _ in top.walk(levels=3)]
    assert found == ["d/d/file", "d/file", "file", "link"]
    assert top.remove("d") == 1099


def test_what_is_open_stays_what_it_was_when_its_name_is_another_directory(place: Path) -> None:
    ours = OpenDirectory.opened(place)
    place.rename(place.parent / "moved")
    (place.parent / "ours").symlink_to(place.parent / "theirs")
    ours.write("file", b"ours")
    assert (place.parent / "moved" / "file").read_bytes() == b"ours"
    assert (place.parent / "theirs" / "file").read_text() == "theirs"


def test_threads_that_list_one_directory_all_see_all_of_it(place: Path) -> None:
    names = [f"{number:04}" for number in range(500)]
    for name in names:
        (place / name).touch()
    ours, found = OpenDirectory.opened(place), list[bool]()

    def list_all() -> None:
        found.extend(ours.names() == names for _ in range(20))

    threads = [threading.Thread(target=list_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80


def test_no_descriptor_outlives_its_directory(place: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    (place / "a" / "b").mkdir(parents=True)
    for _ in range(50):
        OpenDirectory.opened(place).inside("a", "b").names()
        with pytest.raises(NoFileError):
            OpenDirectory.opened(place).open("a", os.O_WRONLY)
    assert len(os.listdir("/proc/self/fd")) == before
