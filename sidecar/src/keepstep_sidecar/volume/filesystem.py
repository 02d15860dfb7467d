"""The system calls that a volume makes, behind one thin seam.

A volume touches its disk only through `Filesystem`. So a test can record the order of writes and
replay every state that a power cut may leave (tests/volume/powercut.py). There is no policy here:
no retries except for short transfers and signals, no translation of OSError.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import struct
from pathlib import Path

PAGE_BYTES = 4096
_FICLONERANGE = 0x4020940D
"""ioctl_ficlonerange(2); `fcntl` names it from Python 3.12 on."""


def _attributes(fd: int) -> dict[str, bytes]:
    try:
        return {name: os.getxattr(fd, name) for name in os.listxattr(fd)}
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return {}


class Filesystem:
    """POSIX calls of the standard library. Every method may raise OSError."""

    def open(self, path: Path, flags: int) -> int:
        """Open a file close-on-exec, never through a link. Owner and group may read a new file."""
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)

    def close(self, fd: int) -> None:
        os.close(fd)

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Reserve blocks and set the size. If blocks cannot be reserved, set the size only."""
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF):
                raise
            os.ftruncate(fd, size_bytes)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """Write all of `data` at `offset` (bytes)."""
        while data:
            count = os.pwritev(fd, [data], offset)
            data, offset = data[count:], offset + count

    def clone(self, source: int, fd: int, offset: int, size_bytes: int) -> None:
        """Let `fd` share the blocks of another open file at the same offset, until one of the two
        is written there. Like a write, this is on the medium after `sync_data`. If sharing is not
        possible (another file system, or one that shares no blocks), nothing changes."""
        fcntl.ioctl(fd, _FICLONERANGE, struct.pack("qQQQ", source, offset, size_bytes, offset))

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Fill `into` from `offset`. Returns the bytes read: fewer only at the end of the file."""
        done = 0
        while done < len(into):
            count = os.preadv(fd, [into[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def sync_data(self, fd: int) -> None:
        """Return when everything written to `fd` is on the medium. After a failure the file counts
        as failed for good."""
        os.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        """Return when the names in `path` are on the medium."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def is_alike(self, fd: int, other: int) -> bool:
        """Whether two open files are of the same kind, owner, permissions and extended attributes
        (access lists are some of these)."""
        found, wanted = os.fstat(fd), os.fstat(other)
        if (found.st_mode, found.st_uid) != (wanted.st_mode, wanted.st_uid):
            return False
        return found.st_gid == wanted.st_gid and _attributes(fd) == _attributes(other)

    def is_open_only_as(self, fd: int) -> bool:
        """Whether nobody has this file open or mapped but by `fd`. False if the kernel cannot
        tell."""
        try:  # it grants this lease only while there is no other descriptor (fcntl(2), F_SETLEASE)
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # for one who opens it now; else SIGIO
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True

    def forget_cache(self, fd: int) -> None:
        """Drop the file's clean pages from the page cache: they only displace useful ones."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def make_directory(self, path: Path) -> bool:
        """Make a directory below an existing one. False if it already existed."""
        try:
            os.mkdir(path, 0o750)
        except FileExistsError:
            return False
        return True

    def remove_directory(self, path: Path) -> None:
        os.rmdir(path)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def symlink(self, target: Path, path: Path) -> None:
        os.symlink(target, path)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def size_bytes(self, path: Path) -> int:
        """Size of the whole file system of `path`."""
        status = os.statvfs(path)
        return status.f_blocks * status.f_frsize

    def free_bytes(self, path: Path) -> int:
        """Space that this process may still use on the file system of `path`."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize
