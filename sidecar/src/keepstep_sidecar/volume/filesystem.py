"""The system calls that a volume makes, behind one thin seam.

A volume touches its disk only through `Filesystem`. So a test can record the order of writes and
replay every state that a power cut may leave (tests/volume/powercut.py). There is no policy here:
no retries except for short transfers and signals, no translation of OSError. No link is followed
below a directory that is held (`keepstep.directory`); of other paths, the last two names are none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from keepstep.directory import Directory

PAGE_BYTES = 4096
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full volume."""

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

    _held: Mapping[Path, Directory] = {}

    def hold(self, root: Path | Directory, *, make: bool = False) -> None:
        """Open the directory `root`, which must be no link. From now on every path below it is
        reached from there, whatever `root` names meanwhile. `make`: make it if it is missing."""
        if isinstance(root, Path):
            root = Directory.opened(root, make=make)
        self._held = {**self._held, root.path: root}

    def release(self, root: Path) -> None:
        """Hold the directory no longer, so that its drive can be unmounted."""
        self._held = {path: one for path, one in self._held.items() if path != root}

    def _at(self, path: Path) -> tuple[Directory, str]:
        """The directory that holds `path`, and its name there."""
        for root in path.parents:
            if root in self._held:
                return self._held[root].inside(*path.relative_to(root).parts[:-1]), path.name
        return Directory.opened(path.parent), path.name

    def directory(self, path: Path) -> Directory:
        """The directory `path`, open. Raises OSError for a link or a file."""
        if path in self._held:
            return self._held[path]
        above, name = self._at(path)
        return above.inside(name)

    def names(self, path: Path) -> list[str]:
        """What the directory `path` holds, sorted; nothing if it is missing, a link or a file."""
        try:
            return self.directory(path).names()
        except (FileNotFoundError, NotADirectoryError):
            return []

    def lstat(self, path: Path) -> os.stat_result | None:
        """What lies at `path`, which may be a link; None if nothing does."""
        try:
            if path in self._held:
                return os.fstat(self._held[path].fd)
            directory, name = self._at(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return directory.lstat(name)

    def is_directory(self, path: Path) -> bool:
        """Whether a directory lies there, not a link to one."""
        found = self.lstat(path)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def is_file(self, path: Path) -> bool:
        """Whether a regular file lies there, not a link to one."""
        found = self.lstat(path)
        return found is not None and stat.S_ISREG(found.st_mode)

    def walk(self, path: Path) -> Iterator[tuple[Path, os.stat_result]]:
        """All files below the directory `path`, and what they are; links are files."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for place, found in self.directory(path).walk():
                yield path / place, found

    def open(self, path: Path, flags: int) -> int:
        """Open a regular file close-on-exec. One that is written to has this name alone. Owner and
        group may read a new file."""
        directory, name = self._at(path)
        return directory.open(name, flags)

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
        self.directory(path).sync()

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
        directory, name = self._at(path)
        return directory.make(name, 0o750)

    def remove_directory(self, path: Path) -> None:
        directory, name = self._at(path)
        directory.rmdir(name)

    def remove_tree(self, path: Path) -> None:
        """Remove a directory with all that is in it."""
        directory, name = self._at(path)
        directory.remove(name)

    def rename(self, source: Path, target: Path) -> None:
        (old, name), (new, called) = self._at(source), self._at(target)
        old.rename(name, called, new)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name. Raises FileExistsError."""
        (old, name), (new, called) = self._at(source), self._at(target)
        os.link(name, called, src_dir_fd=old.fd, dst_dir_fd=new.fd, follow_symlinks=False)

    def symlink(self, target: Path, path: Path) -> None:
        directory, name = self._at(path)
        os.symlink(target, name, dir_fd=directory.fd)

    def unlink(self, path: Path) -> None:
        directory, name = self._at(path)
        directory.unlink(name)

    def size_bytes(self, path: Path) -> int:
        """Size of the whole file system of `path`."""
        status = os.statvfs(path)
        return status.f_blocks * status.f_frsize

    def free_bytes(self, path: Path) -> int:
        """Space that this process may still use on the file system of `path`."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize
