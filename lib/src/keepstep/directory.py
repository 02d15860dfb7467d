"""Directories of keepstep's own: what lies in them is reached by descriptor, never through a link.

Others may be able to write where keepstep keeps steps: another user of a scratch directory, whoever
packed an archive or a repository. A link, a pipe or a second name that they leave there must not
lead keepstep to any other file of its user. So a directory is opened once, without following a
link; everything in it is opened relative to that descriptor; only regular files with one name are
written to; new files are made exclusively, and replace others by a rename.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_ENTER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITES: Final = os.O_WRONLY | os.O_RDWR


class NotRegularFileError(OSError):
    """What lies there is a link, a pipe, a directory, or a file with other names, too."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            errno.EINVAL,
            "not a regular file with this name alone (a link, a pipe, a directory, or a file with"
            " other names): move it away",
            str(path),
        )


class OpenDirectory:
    """An open directory. `path` is for messages. Methods raise OSError, which names the path; they
    may be called from any thread. The descriptor `fd` is closed when nothing refers to the
    directory any more: a caller who uses it holds the directory, too."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd, self.path = fd, path

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close it before the last reference goes: the traceback of an error may hold one."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    @classmethod
    def open_path(cls, path: Path, *, make: bool = False) -> OpenDirectory:
        """Open `path`, which must not be a link; the directories above it may be. `make`: make it
        and these if they are missing."""
        if make:
            path.mkdir(parents=True, exist_ok=True)
        return cls(_entered(str(path), path, None), path)

    def open_subdirectory(self, *names: str) -> OpenDirectory:
        """The directory `names[0]` of this one, `names[1]` of that, and so on."""
        directory = self
        for name in names:
            path = directory.path / name
            directory = OpenDirectory(_entered(name, path, directory.fd), path)
        return directory

    def names(self) -> list[str]:
        """The names of what lies in it, sorted."""
        # opened for each call: a descriptor has one position for all threads, and on btrfs it shows
        # what lay there when it was opened
        fd = os.open(".", _ENTER, dir_fd=self.fd)
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)

    def lstat(self, name: str) -> os.stat_result | None:
        """What lies there, without following a link; None if nothing does."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def open_file(self, name: str, flags: int, mode: int = 0o640) -> int:
        """Open a regular file, and make it if the flags say so. A file that is written to must have
        this name alone. Returns a descriptor that the caller closes."""
        path, cut = self.path / name, bool(flags & os.O_TRUNC)
        flags = (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, mode, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise NotRegularFileError(path) from None
            raise OSError(error.errno, error.strerror, str(path)) from None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or (flags & _WRITES and found.st_nlink > 1):
                raise NotRegularFileError(path)
            if cut:
                os.ftruncate(fd, 0)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def make(self, name: str, mode: int = 0o777) -> bool:
        """Make a directory in it. False if something has that name already."""
        try:
            os.mkdir(name, mode, dir_fd=self.fd)
        except FileExistsError:
            return False
        return True

    def rename(self, name: str, new: str, into: OpenDirectory | None = None) -> None:
        """Give what lies there the name `new`, in the directory `into` if there is one."""
        os.rename(name, new, src_dir_fd=self.fd, dst_dir_fd=(into or self).fd)

    def unlink(self, name: str) -> None:
        """Remove a file, or a link itself."""
        os.unlink(name, dir_fd=self.fd)

    def rmdir(self, name: str) -> None:
        """Remove an empty directory."""
        os.rmdir(name, dir_fd=self.fd)

    def sync(self) -> None:
        """Return when the names in it are on the medium."""
        os.fsync(self.fd)

    def read(self, name: str, *, most_bytes: int) -> bytes:
        """The bytes of a file. Raises OSError with EFBIG if it has more than `most_bytes`."""
        fd = self.open_file(name, os.O_RDONLY)
        with open(fd, "rb") as file:
            data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise OSError(errno.EFBIG, f"more than {most_bytes} bytes", str(self.path / name))
        return data

    def write(self, name: str, data: bytes, mode: int = 0o640) -> None:
        """Replace or make a file of that name, at once and as a whole; for one writer at a time."""
        temporary = f".{name}.tmp"
        with contextlib.suppress(FileNotFoundError):  # of a writer that was killed
            self.unlink(temporary)
        fd = self.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with open(fd, "wb") as file:
                file.write(data)
            self.rename(temporary, name)
        except BaseException:
            self.unlink(temporary)
            raise

    def walk(self, *, levels: int) -> Iterator[tuple[Path, os.stat_result]]:
        """All that is at most `levels` names below it but directories: where, relative to it, and
        what it is. Links are not followed, and what is removed meanwhile is left out. One directory
        of each level is open at a time."""
        for name in self.names():
            found = self.lstat(name)
            if found is None:
                continue
            if not stat.S_ISDIR(found.st_mode):
                yield Path(name), found
            elif levels > 1:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    for path, info in self.open_subdirectory(name).walk(levels=levels - 1):
                        yield name / path, info

    def remove(self, name: str) -> int:
        """Remove a file, or a directory with all that is in it. Returns how many files that were, 0
        if there is nothing. Another file system that is mounted there is left alone: OSError."""
        found = self.lstat(name)
        if found is None:
            return 0
        if not stat.S_ISDIR(found.st_mode):
            self.unlink(name)
            return 1
        files = self._on_this_drive(name)._empty()
        self.rmdir(name)
        return files

    def _empty(self) -> int:
        """Remove what is in it. Directories further down are first moved up into it, so neither the
        stack nor the number of descriptors grows with the depth of the tree."""
        files, found = 0, self.names()
        names = set(found)
        while found:
            name = found.pop()
            if not self._is_directory(name):
                self.unlink(name)
                files += 1
                continue
            inner = self._on_this_drive(name)
            for child in inner.names():
                if inner._is_directory(child):
                    inner._on_this_drive(child)
                    free = next(new for n in itertools.count() if (new := str(n)) not in names)
                    inner.rename(child, free, self)
                    names.add(free)
                    found.append(free)
                else:
                    inner.unlink(child)
                    files += 1
            self.rmdir(name)
            names.discard(name)
        return files

    def _is_directory(self, name: str) -> bool:
        return stat.S_ISDIR(os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_mode)

    def _on_this_drive(self, name: str) -> OpenDirectory:
        inner = self.open_subdirectory(name)
        if os.fstat(inner.fd).st_dev != os.fstat(self.fd).st_dev:
            raise OSError(errno.EXDEV, "another file system is mounted there", str(inner.path))
        return inner


def open_user_named_file(path: Path) -> int:
    """Open the regular file at `path`, or where a link there leads, for reading: a path that a user
    names. Returns a descriptor that the caller closes. Raises OSError."""
    real = Path(os.path.realpath(path))
    return OpenDirectory.open_path(real.parent).open_file(real.name, os.O_RDONLY)


def _entered(name: str, path: Path, above: int | None) -> int:
    try:
        return os.open(name, _ENTER, dir_fd=above)
    except NotADirectoryError:
        raise NotADirectoryError(
            errno.ENOTDIR, "a link or a file, where a directory belongs: move it away", str(path)
        ) from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
