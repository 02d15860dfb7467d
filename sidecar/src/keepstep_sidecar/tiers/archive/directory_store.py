"""An archive in a directory: a shared file system, a PVC, another drive.

An object is a `DurableFile`, so readers see only whole ones, even after a power cut. No link is
followed below the root, and only regular files are objects. The root must exist: a missing root is
most likely not mounted, which is not the same as an empty archive.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from keepstep.directory import NotRegularFileError, OpenDirectory
from keepstep.errors import FormatError, NoSpaceError, StorageError
from keepstep_sidecar.concurrency import run_blocking, run_on_detached_thread
from keepstep_sidecar.tiers.archive.store import StoredObject
from keepstep_sidecar.volume.files import FULL, DurableFile, Filesystem, forget_cache

T = TypeVar("T")

_THREADS = 4
_LEVELS = 3
"""<run>/<step>/<file>: what lies deeper is nobody's object, and may be deep without end."""
_LEFTOVER_S = 86400.0
"""After a day, no writer is still writing such a file."""


class DirectoryStore:
    """Implements `Store`. Blocking calls run on its own threads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._filesystem = Filesystem()
        self._swept = False
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="keepstep-archive")

    @property
    def where(self) -> str:
        return str(self.root)

    async def list_below(self, prefix: str) -> list[StoredObject]:
        def work() -> list[StoredObject]:
            try:
                below = self._opened().open_subdirectory(*Path(prefix).parts)
            except FileNotFoundError:
                return []
            found = below.walk(levels=_LEVELS - len(Path(prefix).parts))
            files = [file for file in found if not file[0].name.startswith(".")]
            return sorted(
                (_stored(Path(prefix) / path, found) for path, found in files),
                key=lambda entry: entry.name,
            )

        return await self._attempt(work)

    async def directories(self, prefix: str) -> list[str]:
        def work() -> list[str]:
            try:
                above = self._opened().open_subdirectory(*Path(prefix).parts)
            except FileNotFoundError:
                return []
            found = {name: above.lstat(name) for name in above.names() if name[0] != "."}
            named = [name for name, value in found.items() if value and stat.S_ISDIR(value.st_mode)]
            return sorted(map(_text, named))

        return await self._attempt(work)

    async def find_object(self, name: str) -> StoredObject | None:
        def work() -> StoredObject | None:
            try:
                found = self._above(name).lstat(Path(name).name)
            except FileNotFoundError:
                return None
            return None if found is None else _stored(Path(name), found)

        return await self._attempt(work)

    async def read_range(self, name: str, begin: int, view: memoryview) -> None:
        def work() -> None:
            try:
                fd = self._above(name).open_file(Path(name).name, os.O_RDONLY)
            except NotRegularFileError:
                raise FormatError("not a regular file", path=self.root / name) from None
            try:
                got = self._filesystem.read_into(fd, view, begin)
                # Gigabytes that will not be read again would push the training's data out of
                # memory.
                os.posix_fadvise(fd, begin, len(view), os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
            if got < len(view):
                raise StorageError(f"{self.root / name} ends before byte {begin + len(view)}")

        await self._do(work)

    async def create_if_absent(self, name: str, data: bytes) -> bool:
        def work() -> bool:
            new = self._begin(name)
            try:
                new.write(memoryview(data), 0)
                new.flush()
                new.give_new_name()
            except FileExistsError:
                return False
            finally:
                _drop(new)
            return True

        return await self._do(work)

    async def replace(self, name: str, data: bytes) -> None:
        def work() -> None:
            new = self._begin(name)
            try:
                new.write(memoryview(data), 0)
                self._finish(new)
            finally:
                _drop(new)

        await self._do(work)

    async def upload(
        self, name: str, pieces: AsyncIterator[memoryview], *, part_bytes: int, parts: int
    ) -> None:
        new = await self._do(lambda: self._begin(name))
        try:
            at = 0
            async for piece in pieces:
                await self._do(lambda data=piece, begin=at: self._put(new, data, begin))  # type: ignore[misc]
                at += len(piece)
                del piece
            await self._do(lambda: self._finish(new))
        finally:
            # On a thread: with an unreachable server, it may wait for minutes.
            await self._do(lambda: _drop(new))

    def _put(self, new: DurableFile, data: memoryview, begin: int) -> None:
        new.write(data, begin)
        # Drop clean pages from the page cache, which the training needs.
        forget_cache(new.fd)

    def _finish(self, new: DurableFile) -> None:
        new.flush()
        new.give_name()

    async def copy(self, name: str, to: str) -> bool:
        """A hard link: an object never changes."""
        last, new = Path(name).name, Path(to).name

        def work() -> bool:
            try:
                place, directory = self._above(name), self._made(to)
                os.utime(last, dir_fd=place.fd, follow_symlinks=False)  # as of a file that is sent
                with contextlib.suppress(FileNotFoundError):
                    directory.unlink(new)
                link = functools.partial(os.link, last, new, follow_symlinks=False)
                link(src_dir_fd=place.fd, dst_dir_fd=directory.fd)
            except OSError:  # another owner's, or a file system without links
                return False
            directory.sync()
            return True

        return await self._do(work)

    async def delete(self, names: Iterable[str]) -> None:
        def work() -> None:
            root = self._opened()
            for name in names:
                *above, directory, last = Path(name).parts
                with contextlib.suppress(FileNotFoundError):
                    place = root.open_subdirectory(*above)
                    with contextlib.suppress(FileNotFoundError):
                        place.open_subdirectory(directory).unlink(last)
                    with contextlib.suppress(OSError):  # not empty yet
                        place.rmdir(directory)

        await self._do(work)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, name: str) -> DurableFile:
        """A new, empty file, hidden until it gets its `name`."""
        directory = self._made(name)
        filesystem, path = Filesystem(), directory.path / Path(name).name
        filesystem.open_root(directory)
        hidden = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
        return DurableFile(path, filesystem=filesystem, temporary=hidden)

    def _made(self, name: str) -> OpenDirectory:
        """The directory of an object, which is made if it is not there."""
        directory = self._opened()
        if not self._swept:
            self._swept = True
            _sweep(directory, Path(name).parts[0])
        for part in Path(name).parts[:-1]:
            if directory.make(part):
                directory.sync()
            directory = directory.open_subdirectory(part)
        return directory

    def _above(self, name: str) -> OpenDirectory:
        """The directory of an object. Raises FileNotFoundError."""
        return self._opened().open_subdirectory(*Path(name).parts[:-1])

    def _opened(self) -> OpenDirectory:
        try:
            return OpenDirectory.open_path(self.root.resolve())
        except (FileNotFoundError, NotADirectoryError):
            raise StorageError(
                f"the archive {self.root} is not there; mount it, or make it if it is new"
            ) from None

    async def _do(self, work: Callable[[], T]) -> T:
        """Run `work` on a thread."""
        return await self._named(run_blocking(self._threads, work))

    async def _attempt(self, work: Callable[[], T]) -> T:
        """Run `work`, which changes nothing, on a thread. A sidecar that ends does not wait for it:
        a server that is away, or a directory without end, may take for ever."""
        return await self._named(run_on_detached_thread(work, "keepstep-archive-look"))

    async def _named(self, work: Awaitable[T]) -> T:
        """An OSError becomes a StorageError that names the archive."""
        try:
            return await work
        except OSError as error:
            kind = NoSpaceError if error.errno in FULL else StorageError
            raise kind(f"the archive {self.root}: {error}") from error


def _drop(new: DurableFile) -> None:
    """Also let its directory go: the traceback of an error may hold the file."""
    new.discard_unfinished()
    new.filesystem.release_root(new.path.parent)


def _sweep(root: OpenDirectory, run: str) -> None:
    """Remove files of the run that dead writers left. Other machines may still write younger
    ones."""
    with contextlib.suppress(OSError):
        below = root.open_subdirectory(run)
        for path, found in below.walk(levels=_LEVELS - 1):
            hidden = path.name.startswith(".") and ".tmp-" in path.name
            if hidden and time.time() - found.st_mtime > _LEFTOVER_S:
                below.open_subdirectory(*path.parts[:-1]).unlink(path.name)


def _stored(path: Path, found: os.stat_result) -> StoredObject:
    return StoredObject(
        name=_text(path.as_posix()),
        bytes=found.st_size,
        modified_at=found.st_mtime,
        etag=f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}",
    )


def _text(name: str) -> str:
    """The name itself if it is UTF-8. A name that is not UTF-8 is not keepstep's and is only
    reported, in an escaped form: no message, status or report could contain it otherwise."""
    return os.fsencode(name).decode(errors="backslashreplace")
