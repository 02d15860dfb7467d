"""Files on a local drive: system calls, how bytes move between a slot and a file, and how a file is
written that must outlive a power cut.

A volume touches its disk only through `Filesystem`, and every file that must last is a
`DurableFile`. So a test can record the order of writes and replay every state that a power cut may
leave (tests/volume/powercut.py), and fault points (`fault_point`) kill the process between any two.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import re
import signal
import stat
import struct
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from keepstep.directory import OpenDirectory
from keepstep.image import ControlPage, Layout, chunk_bounds, seal_for_disk
from keepstep.image.control_page import Manifest
from keepstep.image.xxh3 import xxh3_128
from keepstep.steps import StrEnum
from keepstep_sidecar.concurrency import for_each_chunk

# --- fault points ----------------------------------------------------------------------------
#
# Named places where a test can kill this process or make a system call fail.
#
# `KEEPSTEP_FAULTS="write.data:kill@3,write.control:eio"` kills the process (SIGKILL, so nothing is
# cleaned up) before it writes the third chunk, and fails the first write of a control page with
# EIO; `hang`: the call never returns, as on a network volume that cannot be reached. A point stands
# *before* the call that it names.


FAULTS_ENV = "KEEPSTEP_FAULTS"

_FAULT = re.compile(r"([a-z]+\.[a-z-]+):(kill|eio|enospc|hang)(?:@([0-9]+))?")
_armed: dict[tuple[str, int], str] = {}
_passed: Counter[str] = Counter()
_counting = threading.Lock()


def arm_faults(text: str) -> None:
    """Trigger these faults from now on; '' for none. Raises ValueError if they cannot be read."""
    _armed.clear()
    _passed.clear()
    for part in filter(None, text.split(",")):
        if not (match := _FAULT.fullmatch(part.strip())):
            raise ValueError(
                f"{FAULTS_ENV}: not a fault: {part!r} (point:kill|eio|enospc|hang[@n])"
            )
        _armed[match[1], int(match[3] or 1)] = match[2]


def arm_from_environment() -> None:
    """Arm the faults of `KEEPSTEP_FAULTS`. Raises ValueError when they cannot be read."""
    arm_faults(os.environ.get(FAULTS_ENV, ""))


def fault_point(name: str) -> None:
    """Trigger the fault that is armed here, if any."""
    if not _armed:
        return
    with _counting:
        _passed[name] += 1
        kind = _armed.get((name, _passed[name]))
        if kind == "kill":  # under the lock: meanwhile no other thread gets any further
            os.kill(os.getpid(), signal.SIGKILL)
    if kind is None:
        return
    os.write(2, f"{name}: {kind} (injected)\n".encode())
    if kind == "hang":
        threading.Event().wait()
    code = {"eio": errno.EIO, "enospc": errno.ENOSPC}[kind]
    raise OSError(code, f"{os.strerror(code)} (injected at {name})")


arm_from_environment()


# --- system calls ----------------------------------------------------------------------------
#
# There is no policy here: no retries except for short transfers and signals, no translation of
# OSError. No link is followed below a directory that is held (`keepstep.directory`); of other
# paths, the last two names are none.


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

    _held: Mapping[Path, OpenDirectory] = {}

    def open_root(self, root: Path | OpenDirectory, *, make: bool = False) -> None:
        """Open the directory `root`, which must be no link. From now on every path below it is
        reached from there, whatever `root` names meanwhile. `make`: make it if it is missing."""
        if isinstance(root, Path):
            root = OpenDirectory.open_path(root, make=make)
        self._held = {**self._held, root.path: root}

    def release_root(self, root: Path) -> None:
        """Hold the directory no longer, so that its drive can be unmounted."""
        self._held = {path: directory for path, directory in self._held.items() if path != root}

    def _at(self, path: Path) -> tuple[OpenDirectory, str]:
        """The directory that holds `path`, and its name there."""
        for root in path.parents:
            if root in self._held:
                return self._held[root].open_subdirectory(
                    *path.relative_to(root).parts[:-1]
                ), path.name
        return OpenDirectory.open_path(path.parent), path.name

    def open_directory(self, path: Path) -> OpenDirectory:
        """The directory `path`, open. Raises OSError for a link or a file."""
        if path in self._held:
            return self._held[path]
        above, name = self._at(path)
        return above.open_subdirectory(name)

    def names(self, path: Path) -> list[str]:
        """What the directory `path` holds, sorted; nothing if it is missing, a link or a file."""
        try:
            return self.open_directory(path).names()
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
        """All files below the directory `path`, at most eight levels deep (keepstep's own are
        three), and what they are; links are files."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for place, found in self.open_directory(path).walk(levels=8):
                yield path / place, found

    def open(self, path: Path, flags: int) -> int:
        """Open a regular file close-on-exec. One that is written to has this name alone. Owner and
        group may read a new file."""
        directory, name = self._at(path)
        return directory.open_file(name, flags)

    def close_file(self, fd: int) -> None:
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

    def clone_range(self, source: int, fd: int, offset: int, size_bytes: int) -> None:
        """Let `fd` share the blocks of another open file at the same offset, until one of the two
        is written there. Like a write, this is on the medium after `sync_data`. If sharing is not
        possible (another file system, or one that shares no blocks), nothing changes."""
        fcntl.ioctl(fd, _FICLONERANGE, struct.pack("qQQQ", source, offset, size_bytes, offset))

    def read_into(self, fd: int, into: memoryview, offset: int) -> int:
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
        self.open_directory(path).sync()

    def make_directory(self, path: Path) -> bool:
        """Make a directory below an existing one. False if it already existed."""
        directory, name = self._at(path)
        return directory.make(name, 0o750)

    def remove_directory(self, path: Path) -> None:
        directory, name = self._at(path)
        directory.rmdir(name)

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


def has_same_attributes(fd: int, other: int) -> bool:
    """Whether two open files are of the same kind, owner, permissions and extended attributes
    (access lists are some of these)."""
    found, expected = os.fstat(fd), os.fstat(other)
    if (found.st_mode, found.st_uid) != (expected.st_mode, expected.st_uid):
        return False
    return found.st_gid == expected.st_gid and _attributes(fd) == _attributes(other)


def is_open_only_as(fd: int) -> bool:
    """Whether nobody has this file open or mapped but by `fd`. False if the kernel cannot
    tell."""
    try:  # it grants this lease only while there is no other descriptor (fcntl(2), F_SETLEASE)
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # for one who opens it now; else SIGIO
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True


def forget_cache(fd: int) -> None:
    """Drop the file's clean pages from the page cache: they only displace useful ones."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


# --- the name of a drive ---------------------------------------------------------------------


_UUID_BYTES: Final = 16

_QUERIES: Final = {
    # EXT4_IOC_GETFSUUID, from Linux 6.0 on: struct fsuuid, which says how long the UUID may be
    "ext4": (0x8008662C, struct.pack("II", _UUID_BYTES, 0), 8),
    # XFS_IOC_FSGEOMETRY_V1: struct xfs_fsop_geom_v1
    "xfs": (0x80705864, bytes(64), 64),
}
"""By type of the file system: the request, what the argument begins with, and where in it the
answer has the UUID."""
_ANSWER_BYTES: Final = 112
"""The longest answer."""


def drive_id(fd: int) -> str:
    """`UUID@position` of the open directory `fd`; "" if the UUID is not known.

    The UUID was made with the file system and lies in it. `position` is a digest of the path within
    the file system of what is mounted. A drive that is *not mounted* has its directory on another
    file system, too, but at another position: /mnt/nvme/keepstep instead of /keepstep.
    """
    try:
        kind, root = _mounted(_mount_id(fd))
        request, head, at = _QUERIES[kind]
        answer = bytearray(head.ljust(_ANSWER_BYTES, b"\0"))
        fcntl.ioctl(fd, request, answer)
    except (OSError, LookupError, ValueError):
        return ""
    found = uuid.UUID(bytes=bytes(answer[at : at + _UUID_BYTES]))
    position = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    return f"{found}@{position}" if found.int else ""


def _mount_id(fd: int) -> str:
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines)["mnt_id"].strip()


def _mounted(mount_id: str) -> tuple[str, str]:
    """The type of a mounted file system, and which directory of it is mounted."""
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        fields = line.split(" ")
        if fields[0] == mount_id:
            return fields[fields.index("-") + 1], fields[3]
    raise LookupError(mount_id)


# --- direct I/O ------------------------------------------------------------------------------


WRITER_NICENESS = 5
"""Training comes first, so writers give way. A restore does not give way, because ranks wait for
it. Beside busy cores, a niceness of 10 doubled the time to durable, and 19 made it ten times as
long, for the same CPU seconds."""

_COPYING_THREADS = 4
"""As many at most where the kernel copies to or from the page cache: this is work, no waiting."""

_CORES_PER_HASH = 4


class IoMode(StrEnum):
    """How a volume reads and writes its files."""

    DIRECT = "direct"
    BUFFERED = "buffered"

    @property
    def open_flags(self) -> int:
        """The flags to add to those of `open`."""
        return os.O_DIRECT if self is IoMode.DIRECT else 0

    def limit_threads(self, threads: int) -> int:
        """How many of `threads` are worth having."""
        return threads if self is IoMode.DIRECT else min(threads, _COPYING_THREADS)


def probe_engine(filesystem: Filesystem, directory: Path) -> tuple[IoMode, str]:
    """Write one page with O_DIRECT below `directory`. Returns the engine that works, and why.

    Raises OSError when nothing can be written there at all. A full disk is no error: what it holds
    can still be restored.
    """
    path = directory / f".probe-{os.getpid()}"
    try:
        _write_page(filesystem, path, IoMode.DIRECT)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return IoMode.DIRECT, "O_DIRECT, not tried: the file system is full"
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        _write_page(filesystem, path, IoMode.BUFFERED)
        return IoMode.BUFFERED, f"O_DIRECT refused: {error.strerror}"
    return IoMode.DIRECT, "O_DIRECT works"


def _write_page(filesystem: Filesystem, path: Path, engine: IoMode) -> None:
    fd = filesystem.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | engine.open_flags)
    try:
        with aligned_buffer(PAGE_BYTES) as buffer, memoryview(buffer) as page:
            filesystem.write(fd, page, 0)
    finally:
        filesystem.close_file(fd)
        filesystem.unlink(path)


def aligned_buffer(size_bytes: int) -> mmap.mmap:
    """Zeroed memory that O_DIRECT accepts: page aligned, a multiple of the page size."""
    return mmap.mmap(-1, size_bytes)


def make_hashing_semaphore() -> threading.Semaphore:
    """To be held while a chunk is hashed; one for all threads of an image. Lets one of them hash at
    a time, or one for four cores."""
    return threading.Semaphore(max(1, (os.cpu_count() or 1) // _CORES_PER_HASH))


class RateLimit:
    """Limits the rate of all its users together to `bytes_per_second`."""

    def __init__(self, bytes_per_second: int | None) -> None:
        self._bytes_per_second = bytes_per_second
        self._next_at = time.monotonic()
        self._lifted = 0
        self._lock = threading.Lock()

    def wait(self, size_bytes: int) -> None:
        """Return once `size_bytes` may pass."""
        if (limit := self._bytes_per_second) is None or self._lifted:
            return
        with self._lock:
            at = max(self._next_at, time.monotonic())
            self._next_at = at + size_bytes / limit
        time.sleep(max(0.0, at - time.monotonic()))

    def wait_with_lowest_priority(self, size_bytes: int, *, until: float) -> bool:
        """Like `wait`, but behind all other users: nothing passes here while they use the whole
        rate. Returns False if the bytes may not pass by `until` (monotonic clock)."""
        while (limit := self._bytes_per_second) is not None and not self._lifted:
            with self._lock:
                now = time.monotonic()
                if (free_in_s := self._next_at - now) <= 0:
                    self._next_at = now + size_bytes / limit
                    break
            if now + free_in_s > until:
                return False
            time.sleep(free_in_s)
        return True

    @contextmanager
    def lift_limit(self) -> Iterator[None]:
        """Lift the limit in this context: a deadline is near. Only for one thread at a time."""
        self._lifted += 1
        try:
            yield
        finally:
            self._lifted -= 1


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """An open shard, to be read. The code that opened `fd` closes it."""

    filesystem: Filesystem
    fd: int

    def read(self, into: memoryview, offset: int) -> int:
        """Fill the page-aligned `into`. Returns the bytes read: fewer only at the file's end."""
        fault_point("load.read")
        return self.filesystem.read_into(self.fd, into, offset)


@contextmanager
def open_shard(path: Path, *, filesystem: Filesystem, engine: IoMode) -> Iterator[ShardFile]:
    """Open a shard for reading, with the flags that `engine` needs. Raises OSError."""
    fd = filesystem.open(path, os.O_RDONLY | engine.open_flags)
    try:
        yield ShardFile(filesystem=filesystem, fd=fd)
        if engine is IoMode.BUFFERED:
            forget_cache(fd)
    finally:
        filesystem.close_file(fd)


# --- durable files ---------------------------------------------------------------------------


_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class DurableFile:
    """A file that is hidden as `temporary` until it gets its `path`. Methods raise OSError.

    `fd`: its descriptor, -1 once it is closed.
    """

    def __init__(
        self,
        path: Path,
        *,
        filesystem: Filesystem,
        temporary: Path | None = None,
        engine: IoMode = IoMode.BUFFERED,
        flags: int = _CREATE,
        phase: str = "",
    ) -> None:
        """Make it, or open one that is there if `flags` say so. `phase`: prefix of its fault
        points; without one it has none."""
        self.path = path
        self.temporary = temporary or path.with_name(f".{path.name}.tmp")
        self.filesystem = filesystem
        self._engine = engine
        self._phase = phase
        self._point("create")
        self.fd = filesystem.open(self.temporary, flags | engine.open_flags)

    def _point(self, name: str) -> None:
        if self._phase:
            fault_point(f"{self._phase}.{name}")

    def switch_to_replaced_file(self) -> None:
        """Another file has got its hidden name: go on with that one."""
        self.close()
        self.fd = self.filesystem.open(self.temporary, os.O_WRONLY | self._engine.open_flags)

    def allocate(self, size_bytes: int) -> None:
        """Make room for so many bytes."""
        self._point("allocate")
        self.filesystem.allocate(self.fd, size_bytes)

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at `offset`, in any order and from any thread."""
        self._point("data")
        self.filesystem.write(self.fd, data, offset)

    def write_image(
        self,
        view: memoryview,
        layout: Layout,
        control: ControlPage,
        *,
        pace: RateLimit,
        threads: int,
    ) -> Manifest:
        """Write the image in the slot `view` with its digests, and seal it."""
        digests, turn = [b""] * layout.chunk_count, make_hashing_semaphore()

        def write_chunk(index: int) -> None:
            begin, end = chunk_bounds(layout, index)
            pace.wait(end - begin)
            with view[begin:end] as chunk:
                with turn:
                    digests[index] = xxh3_128(chunk)  # first: a later change of it will be noticed
                self.write(chunk, begin)

        for_each_chunk(write_chunk, layout.chunk_count, threads=threads, niceness=WRITER_NICENESS)
        written = replace(control, written_at=time.time())
        table, page = seal_for_disk(layout, view, written, digests=digests)
        manifest = Manifest(
            layout=layout, control=ControlPage.from_bytes(page), closing=table + page
        )
        self.write_seal(manifest)
        return manifest

    def write_seal(self, manifest: Manifest) -> None:
        """All chunks are written: write the digest table, and, once these are on the medium, the
        control page."""
        self._point("table")
        self._write_pages(manifest.table, manifest.layout.digests_begin)
        self.flush()
        self._point("control")
        self._write_pages(manifest.page, manifest.layout.control_begin)
        self._point("control-sync")
        self.filesystem.sync_data(self.fd)

    def _write_pages(self, data: memoryview, offset: int) -> None:
        """Write whole pages that do not lie in a slot, from memory that O_DIRECT accepts."""
        with aligned_buffer(len(data)) as buffer:
            buffer[:] = data
            with memoryview(buffer) as pages:
                self.filesystem.write(self.fd, pages, offset)

    def flush(self) -> None:
        """Return when everything written is on the medium."""
        self._point("data-sync")
        self.filesystem.sync_data(self.fd)
        if self._engine is IoMode.BUFFERED:
            forget_cache(self.fd)

    def give_name(self) -> None:
        """Give it its path, durably, in place of what was there. Call it after `write_seal` or
        `flush`.

        Where nothing was there, a name of which it is unknown whether it would survive a power cut
        is taken back: the caller will not count this file, so a scan must not either.
        """
        replaces = self.filesystem.lstat(self.path) is not None
        self._point("rename")
        self.filesystem.rename(self.temporary, self.path)
        try:
            self._point("directory-sync")
            self.filesystem.sync_directory(self.path.parent)
        except OSError:
            if not replaces:
                self.filesystem.rename(self.path, self.temporary)
            raise

    def give_new_name(self) -> None:
        """Give it its path, durably. Raises FileExistsError if something is there, which then has
        its name durably, too: the caller may count on it, although who made it was killed or failed
        before the directory was on the medium."""
        try:
            self.filesystem.link(self.temporary, self.path)
        finally:
            self._point("directory-sync")
            self.filesystem.sync_directory(self.path.parent)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self.filesystem.close_file(fd)

    def discard_unfinished(self) -> None:
        """Close it, and remove its hidden name if it still has that. Raises nothing: an error
        before is the one to report."""
        with contextlib.suppress(OSError):
            self.close()
        with contextlib.suppress(OSError):
            self.filesystem.unlink(self.temporary)


@contextlib.contextmanager
def replace_file(path: Path, *, filesystem: Filesystem, phase: str = "") -> Iterator[DurableFile]:
    """A new file for one writer at a time, which leaves nothing if it gets no name. Raises
    OSError."""
    with contextlib.suppress(FileNotFoundError):  # of a process that was killed
        filesystem.unlink(path.with_name(f".{path.name}.tmp"))
    file = DurableFile(path, filesystem=filesystem, phase=phase)
    try:
        yield file
    finally:
        file.discard_unfinished()
