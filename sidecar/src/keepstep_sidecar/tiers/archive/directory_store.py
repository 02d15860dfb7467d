"""An archive in a directory: a shared file system, a PVC, another drive.

An object is written under a hidden name, flushed, and then renamed or linked to its own name. So
readers see only whole objects, even after a power cut. The root must exist: a missing root is most
likely not mounted, which is not the same as an empty archive.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from keepstep.errors import NoSpaceError, StorageError
from keepstep_sidecar.concurrency import blocking
from keepstep_sidecar.tiers.archive.store import Stored
from keepstep_sidecar.volume.filesystem import Filesystem
from keepstep_sidecar.volume.writer import FULL

T = TypeVar("T")

_THREADS = 4
_LEFTOVER_S = 86400.0
"""After a day, no writer is still writing such a file."""


class DirectoryStore:
    """Implements `Store`. Blocking calls run on its own threads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._filesystem = Filesystem()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="keepstep-archive")

    @property
    def where(self) -> str:
        return str(self.root)

    async def list_below(self, prefix: str) -> list[Stored]:
        return await self._do(lambda: self._list(prefix))

    def _list(self, prefix: str) -> list[Stored]:
        self._check_root()
        return sorted(self._walk(self.root / prefix), key=lambda one: one.name)

    def _walk(self, directory: Path) -> Iterator[Stored]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(directory):
                if entry.is_dir(follow_symlinks=False):
                    yield from self._walk(Path(entry.path))
                elif entry.name.startswith("."):
                    self._sweep(entry)
                elif (stored := self._stored(Path(entry.path))) is not None:
                    yield stored

    def _stored(self, path: Path) -> Stored | None:
        try:
            found = path.stat()
        except FileNotFoundError:  # removed by another sidecar
            return None
        return Stored(
            name=_text(path.relative_to(self.root).as_posix()),
            bytes=found.st_size,
            modified_at=found.st_mtime,
            etag=f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}",
        )

    def _sweep(self, entry: os.DirEntry[str]) -> None:
        """Remove a file that a dead writer left. Another machine may still write a younger one."""
        with contextlib.suppress(OSError):
            if ".tmp-" in entry.name and time.time() - entry.stat().st_mtime > _LEFTOVER_S:
                os.unlink(entry.path)

    async def directories(self, prefix: str) -> list[str]:
        def work() -> list[str]:
            self._check_root()
            with contextlib.suppress(FileNotFoundError):
                entries = os.scandir(self.root / prefix)
                named = (one.name for one in entries if one.is_dir() and one.name[0] != ".")
                return sorted(map(_text, named))
            return []

        return await self._do(work)

    async def find(self, name: str) -> Stored | None:
        def work() -> Stored | None:
            self._check_root()
            return self._stored(self.root / name)

        return await self._do(work)

    async def read(self, name: str, begin: int, view: memoryview) -> None:
        def work() -> None:
            fd = self._filesystem.open(self.root / name, os.O_RDONLY)
            try:
                got = self._filesystem.read(fd, view, begin)
                # Gigabytes that will not be read again would push the training's data out of
                # memory.
                os.posix_fadvise(fd, begin, len(view), os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
            if got < len(view):
                raise StorageError(f"{self.root / name} ends before byte {begin + len(view)}")

        await self._do(work)

    async def write(self, name: str, data: bytes) -> bool:
        def work() -> bool:
            path, temporary = self._places(name)
            fd = self._create(temporary)
            try:
                self._filesystem.write(fd, memoryview(data), 0)
                self._filesystem.sync_data(fd)
                os.link(temporary, path)  # unlike rename, it does not replace
            except FileExistsError:
                return False
            finally:
                os.close(fd)
                temporary.unlink(missing_ok=True)
            self._filesystem.sync_directory(path.parent)
            return True

        return await self._do(work)

    async def upload(
        self, name: str, pieces: AsyncIterator[memoryview], *, part_bytes: int, parts: int
    ) -> None:
        path, temporary = self._places(name)
        fd = await self._do(lambda: self._create(temporary))
        try:
            at = 0
            async for piece in pieces:
                await self._do(lambda data=piece, begin=at: self._put(fd, data, begin))  # type: ignore[misc]
                at += len(piece)
                del piece
            await self._do(lambda: self._finish(fd, temporary, path))
        finally:
            # On a thread: with an unreachable server, both calls may wait for minutes.
            await self._do(lambda: self._let_go(fd, temporary))

    def _let_go(self, fd: int, temporary: Path) -> None:
        """Close and remove the temporary file, also after an error. That error is the one to
        report, so errors here are ignored."""
        with contextlib.suppress(OSError):
            os.close(fd)
        with contextlib.suppress(OSError):  # after a rename there is none
            temporary.unlink()

    def _put(self, fd: int, data: memoryview, begin: int) -> None:
        self._filesystem.write(fd, data, begin)
        # Drop clean pages from the page cache, which the training needs.
        self._filesystem.forget_cache(fd)

    def _finish(self, fd: int, temporary: Path, path: Path) -> None:
        self._filesystem.sync_data(fd)
        self._filesystem.forget_cache(fd)
        os.rename(temporary, path)
        self._filesystem.sync_directory(path.parent)

    async def delete(self, names: Iterable[str]) -> None:
        def work() -> None:
            self._check_root()
            for name in names:
                path = self.root / name
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # not empty yet, or gone
                    path.parent.rmdir()

        await self._do(work)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _places(self, name: str) -> tuple[Path, Path]:
        path = self.root / name
        return path, path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")

    def _create(self, path: Path) -> int:
        self._check_root()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._filesystem.sync_directory(path.parent.parent)
        return self._filesystem.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def _check_root(self) -> None:
        if not self.root.is_dir():
            raise StorageError(
                f"the archive {self.root} is not there; mount it, or make it if it is new"
            )

    async def _do(self, work: Callable[[], T]) -> T:
        """Run `work` on a thread. An OSError becomes a StorageError that names the archive."""
        try:
            return await blocking(self._threads, work)
        except OSError as error:
            kind = NoSpaceError if error.errno in FULL else StorageError
            raise kind(f"the archive {self.root}: {error}") from error


def _text(name: str) -> str:
    """The name itself if it is UTF-8. A name that is not UTF-8 is not keepstep's and is only
    reported, in an escaped form: no message, status or report could contain it otherwise."""
    return os.fsencode(name).decode(errors="backslashreplace")
