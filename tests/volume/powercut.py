"""What may be on a medium after the power fails: every state that fsync's promises leave open.

`Recorder` is a file system that does its work and keeps a log of it. `crashes` takes such a log
and, for each moment of it, makes the states in which a power cut may leave the medium:

  - Bytes of a file are certain once an fdatasync of it has returned. Until then each page of each
    write, and each change of its size, is there or not, in any combination; a page may be torn.
  - A name is certain once its directory was synced, a rename once both directories were. Until
    then each change of names is there or not, in any combination, whatever the order it was made
    in. One rename is never half done.

That is what POSIX promises, and less than any file system in use delivers. All combinations of
names are made; of pages: none, all, each one missing, each one alone, each one torn, and some by
chance (seeded). Files and directories are numbered nodes, as inodes are, so that a file whose name
was lost is lost, and one that was renamed keeps its bytes.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path

from keepstep_sidecar.volume.files import Filesystem

PAGE = 4096
SECTOR = 512


# --- the log -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """A new name in `directory`, for `node`; `text` is where a symbolic link points to."""

    directory: int
    name: str
    node: int
    is_directory: bool = False
    text: str = ""


@dataclass(frozen=True)
class Unlink:
    directory: int
    name: str


@dataclass(frozen=True)
class Rename:
    source: tuple[int, str]
    target: tuple[int, str]
    node: int


@dataclass(frozen=True)
class Resize:
    node: int
    size_bytes: int


@dataclass(frozen=True)
class Write:
    node: int
    offset: int
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class Sync:
    """An fdatasync of a file, or an fsync of a directory, has returned."""

    node: int


@dataclass(frozen=True)
class Note:
    """Not an operation: what whoever made the log knew at this moment."""

    text: str


Entry = Link | Unlink | Rename | Resize | Write | Sync | Note
NameChange = Link | Unlink | Rename
ROOT = 0


class Recorder(Filesystem):
    """A real file system below `root` that logs what changes."""

    def __init__(self, root: Path) -> None:
        self.log: list[Entry] = []
        self._nodes: dict[Path, int] = {root: ROOT}
        self._open: dict[int, int] = {}
        self._made = ROOT
        self._lock = threading.RLock()

    def note(self, text: str) -> None:
        with self._lock:
            self.log.append(Note(text))

    def open(self, path: Path, flags: int) -> int:
        with self._lock:
            if flags & os.O_CREAT and not path.exists():
                self._link(path)
            elif flags & os.O_TRUNC:
                self.log.append(Resize(self._nodes[path], 0))
            fd = super().open(path, flags)
            self._open[fd] = self._nodes.get(path, -1)
            return fd

    def _link(self, path: Path, *, is_directory: bool = False, text: str = "") -> None:
        self._made += 1
        self._nodes[path] = self._made
        directory = self._nodes[path.parent]
        self.log.append(Link(directory, path.name, self._made, is_directory, text))

    def close_file(self, fd: int) -> None:
        with self._lock:
            del self._open[fd]
            super().close_file(fd)

    def allocate(self, fd: int, size_bytes: int) -> None:
        with self._lock:
            self.log.append(Resize(self._open[fd], size_bytes))
        super().allocate(fd, size_bytes)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        with self._lock:
            self.log.append(Write(self._open[fd], offset, bytes(data)))
        super().write(fd, data, offset)

    def sync_data(self, fd: int) -> None:
        super().sync_data(fd)
        with self._lock:
            self.log.append(Sync(self._open[fd]))

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        with self._lock:
            self.log.append(Sync(self._nodes[path]))

    def make_directory(self, path: Path) -> bool:
        with self._lock:
            if not path.exists():
                self._link(path, is_directory=True)
            return super().make_directory(path)

    def remove_directory(self, path: Path) -> None:
        with self._lock:
            super().remove_directory(path)
            self.log.append(Unlink(self._nodes[path.parent], path.name))

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            super().rename(source, target)
            ends = [(self._nodes[path.parent], path.name) for path in (source, target)]
            self.log.append(Rename(ends[0], ends[1], self._nodes[source]))
            self._nodes.pop(target, None)
            self._nodes = {_moved(path, source, target): n for path, n in self._nodes.items()}

    def symlink(self, target: Path, path: Path) -> None:
        with self._lock:
            self._link(path, text=str(target))
            super().symlink(target, path)

    def unlink(self, path: Path) -> None:
        with self._lock:
            super().unlink(path)
            self.log.append(Unlink(self._nodes[path.parent], path.name))


def _moved(path: Path, source: Path, target: Path) -> Path:
    return target / path.relative_to(source) if path.is_relative_to(source) else path


# --- the states --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Page:
    """One page of one write (`data`, shorter when torn), or a change of size (`size_bytes`)."""

    entry: int
    offset: int = 0
    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Crash:
    """A state of the medium after a power cut. `files`: None for a directory, by path."""

    files: dict[str, bytes | None] = field(repr=False)
    links: dict[str, str] = field(repr=False)
    notes: tuple[str, ...]
    moment: int

    def make(self, root: Path) -> None:
        """Lay the state out below `root`, which does not exist yet."""
        root.mkdir(parents=True)
        for name, data in self.files.items():
            if data is None:
                (root / name).mkdir()
            else:
                (root / name).write_bytes(data)
        for name, text in self.links.items():
            (root / name).symlink_to(text)


def crashes(log: list[Entry], *, seed: int) -> Iterator[Crash]:
    """Every distinct state, moment by moment. `moment`: entries of the log that had begun."""
    seen: set[int] = set()
    for moment in range(len(log) + 1):
        past = log[:moment]
        notes = tuple(entry.text for entry in past if isinstance(entry, Note))
        for names in _subsets(_uncertain_names(past)):
            for pages in _choices(_uncertain_pages(past), random.Random(seed + moment)):
                files, links = _medium(past, set(names), pages)
                key = hash((notes, tuple(files.items()), tuple(links.items())))
                if key not in seen:
                    seen.add(key)
                    yield Crash(files, links, notes, moment)


def _subsets(items: list[int]) -> Iterable[tuple[int, ...]]:
    return chain.from_iterable(combinations(items, count) for count in range(len(items) + 1))


def _uncertain_names(past: list[Entry]) -> list[int]:
    """Changes of names (indices into the log) that may not have reached the medium."""
    synced: set[int] = set()
    uncertain = []
    for index in reversed(range(len(past))):
        entry = past[index]
        if isinstance(entry, Sync):
            synced.add(entry.node)
        elif isinstance(entry, NameChange) and not _directories(entry) <= synced:
            uncertain.append(index)
    return uncertain[::-1]


def _directories(entry: NameChange) -> set[int]:
    if isinstance(entry, Rename):
        return {entry.source[0], entry.target[0]}
    return {entry.directory}


def _uncertain_pages(past: list[Entry]) -> list[Page]:
    """Pages and changes of size that no later sync of their file covers."""
    synced: set[int] = set()
    uncertain: list[Page] = []
    for index in reversed(range(len(past))):
        entry = past[index]
        if isinstance(entry, Sync):
            synced.add(entry.node)
        elif isinstance(entry, Resize) and entry.node not in synced:
            uncertain.append(Page(index))
        elif isinstance(entry, Write) and entry.node not in synced:
            uncertain += _pages(index, entry)
    return uncertain[::-1]


def _pages(index: int, write: Write) -> list[Page]:
    starts = range(0, len(write.data), PAGE)
    return [Page(index, write.offset + at, write.data[at : at + PAGE]) for at in starts]


def _choices(pages: list[Page], chance: random.Random) -> Iterator[list[Page]]:
    """Combinations of uncertain pages that reached the medium."""
    yield []
    yield pages
    for index, page in enumerate(pages):
        others = pages[:index] + pages[index + 1 :]
        yield [page]
        yield others
        if page.data:
            cut = SECTOR * chance.randrange(1, PAGE // SECTOR)
            yield [*others, Page(page.entry, page.offset, page.data[:cut])]
    for _ in range(40 if len(pages) > 2 else 0):
        yield [page for page in pages if chance.random() < 0.5]


def _medium(
    past: list[Entry], names: set[int], pages: list[Page]
) -> tuple[dict[str, bytes | None], dict[str, str]]:
    """What the medium holds: all that is certain, with `names` and `pages` of what is not."""
    uncertain_names = set(_uncertain_names(past))
    uncertain_data = {page.entry for page in _uncertain_pages(past)}
    arrived: dict[int, list[Page]] = {}
    for page in pages:
        arrived.setdefault(page.entry, []).append(page)
    tree = _Tree()
    for index, entry in enumerate(past):
        if isinstance(entry, NameChange):
            if index not in uncertain_names or index in names:
                tree.change(entry)
        elif isinstance(entry, Resize):
            if index not in uncertain_data or index in arrived:
                tree.resize(entry)
        elif isinstance(entry, Write):
            whole = [Page(index, entry.offset, entry.data)]
            for page in arrived.get(index, []) if index in uncertain_data else whole:
                tree.write(entry.node, page)
    return tree.files(), tree.links()


class _Tree:
    """Directories and files by number; only what hangs on the root can be seen."""

    def __init__(self) -> None:
        self._directories: dict[int, dict[str, int]] = {ROOT: {}}
        self._bytes: dict[int, bytearray] = {}
        self._texts: dict[int, str] = {}

    def change(self, entry: NameChange) -> None:
        if isinstance(entry, Link):
            self._directories.setdefault(entry.directory, {})[entry.name] = entry.node
            if entry.is_directory:
                self._directories.setdefault(entry.node, {})
            elif entry.text:
                self._texts[entry.node] = entry.text
        elif isinstance(entry, Unlink):
            self._directories.setdefault(entry.directory, {}).pop(entry.name, None)
        else:
            self._directories.setdefault(entry.source[0], {}).pop(entry.source[1], None)
            self._directories.setdefault(entry.target[0], {})[entry.target[1]] = entry.node

    def resize(self, entry: Resize) -> None:
        data = self._bytes.setdefault(entry.node, bytearray())
        del data[entry.size_bytes :]
        data.extend(bytes(entry.size_bytes - len(data)))

    def write(self, node: int, page: Page) -> None:
        """Bytes beyond a size that did not reach the medium cannot be seen, nor do they hurt."""
        data = self._bytes.setdefault(node, bytearray())
        end = page.offset + len(page.data)
        if end > len(data) and page.offset > len(data):
            return
        data[page.offset : end] = page.data

    def files(self) -> dict[str, bytes | None]:
        return {
            path: None if node in self._directories else bytes(self._bytes.get(node, b""))
            for path, node in self._walk("", ROOT)
            if node not in self._texts
        }

    def links(self) -> dict[str, str]:
        return {
            path: self._texts[node] for path, node in self._walk("", ROOT) if node in self._texts
        }

    def _walk(self, prefix: str, node: int) -> Iterator[tuple[str, int]]:
        for name, child in sorted(self._directories[node].items()):
            yield prefix + name, child
            if child in self._directories:
                yield from self._walk(f"{prefix}{name}/", child)


def without_syncs_after(log: list[Entry], point: Callable[[str], bool]) -> list[Entry]:
    """The log of a program that has left out each first sync after a note that `point` likes."""
    kept: list[Entry] = []
    forget = False
    for entry in log:
        if isinstance(entry, Note):
            forget = point(entry.text)
        if isinstance(entry, Sync) and forget:
            continue
        kept.append(entry)
    return kept
