"""The directories of slots: for each rank one in shared memory and, if configured, one on huge
pages.

With pages of 2 MiB, the first touch of a slot costs an eighth, and direct I/O with it half the time
and a fifth of the CPU; and huge pages are never swapped. So a slot whose size is a multiple of huge
pages is made of them while enough are free, and otherwise of small pages. The control files, the
socket and the windows stay in the memory directory, because hugetlbfs does not support `write`.

A directory of huge pages that cannot be used costs only speed: this is logged, and slots are made
of small pages.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

from keepstep.errors import NoMemoryError, StorageError, UsageError
from keepstep.image import HUGE_PAGE_BYTES
from keepstep_sidecar.config.sidecar import Config
from keepstep_sidecar.log import warn
from keepstep_sidecar.volume.volume import FileLock

USUAL_MOUNT: Final = Path("/dev/hugepages")
"""Where systemd mounts hugetlbfs. `keepstep run` looks there."""

_POOL: Final = Path(f"/sys/kernel/mm/hugepages/hugepages-{HUGE_PAGE_BYTES >> 10}kB")
_RANK = re.compile(r"rank-(\d{5,8})", re.ASCII)
_DIRECTORY_MODE = 0o2770
"""Trainers of the same group, whatever their user, fill slots. Other users have no access."""

_ENTER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class SlotDirectories:
    """`small`: the memory directory. `huge`: this run's own directory on hugetlbfs; None when there
    is none or it cannot be used.

    `only_small`: existing slots on huge pages are found, but no new ones are made.
    """

    def __init__(
        self, memory_dir: Path, *, huge: Path | None = None, only_small: bool = False
    ) -> None:
        self.small = memory_dir
        self.huge = self._asked = huge
        self._only_small = only_small
        self._held = -1
        if huge is not None:
            try:
                self._held = _own(huge)
            except OSError as error:
                self.give_up_huge(str(error))

    # --- ranks ---------------------------------------------------------------------------

    @property
    def roots(self) -> tuple[Path, ...]:
        return (self.small,) if self.huge is None else (self.small, self.huge)

    def list_rank_directories(self, rank: int) -> tuple[Path, ...]:
        """The directories of a rank's slots."""
        return tuple(rank_directory(root, rank) for root in self.roots)

    def make(self, rank: int) -> None:
        """Make a rank's directories if they do not exist. Raises OSError when the one on small
        pages cannot be made. If the one on huge pages cannot be made, only small pages are used."""
        make_rank_directory(rank_directory(self.small, rank))
        if self.huge is not None:
            try:
                make_rank_directory(rank_directory(self.huge, rank))
            except OSError as error:
                self.give_up_huge(str(error))

    def give_up_huge(self, why: str) -> None:
        """From now on, neither make slots on huge pages nor look for any."""
        warn("memory.huge_pages_disabled", path=str(self.huge), reason=why)
        self.huge = None

    def found(self) -> Iterator[tuple[int, Path]]:
        """(rank, directory) of the directories that exist."""
        for root in self.roots:
            with contextlib.suppress(FileNotFoundError):
                yield from rank_directories(root).items()

    def is_directory_missing(self, rank: int) -> bool:
        """Whether a directory of this rank was removed."""
        return not all(
            os.path.isdir(path) and not os.path.islink(path)
            for path in self.list_rank_directories(rank)
        )

    def remove(self, rank: int) -> None:
        """Remove the directories of a rank that has no slots."""
        for root in filter(None, (self.small, self._asked)):
            with contextlib.suppress(OSError):
                rank_directory(root, rank).rmdir()

    def close(self) -> None:
        """Release the directory of huge pages, and remove it if it is empty. Idempotent."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1
        if self._asked is not None and not os.path.ismount(self._asked):
            with contextlib.suppress(OSError):  # slots are left for the next sidecar
                self._asked.rmdir()

    # --- memory --------------------------------------------------------------------------

    def directories_for_slot(self, rank: int, size_bytes: int) -> tuple[Path, Path | None]:
        """The directories for a slot of this size: on small pages, and on huge ones if enough are
        free."""
        huge = self.huge if self._huge_for(size_bytes) else None
        small = rank_directory(self.small, rank)
        return small, None if huge is None else rank_directory(huge, rank)

    def free_bytes(self, size_bytes: int) -> int:
        """Memory for more slots of this size, in bytes."""
        return self._small_bytes() + self._huge_for(size_bytes) * size_bytes

    def check_room_on_small_pages(self, size_bytes: int) -> None:
        """Raises NoMemoryError when a slot that was to get huge pages does not fit on small
        ones."""
        if (free := self._small_bytes()) < size_bytes:
            raise NoMemoryError(
                f"{size_bytes} bytes are needed in place of huge pages, {free} are free",
                code="no-memory",
            )

    def _small_bytes(self) -> int:
        status = os.statvfs(self.small)
        free = status.f_bavail * status.f_frsize
        # A tmpfs counts on memory that the pool of huge pages may have taken.
        return free if self._asked is None else min(free, _meminfo("MemAvailable") or sys.maxsize)

    def _huge_for(self, size_bytes: int) -> int:
        """How many slots of this size the free huge pages can hold."""
        if self.huge is None or self._only_small or size_bytes % HUGE_PAGE_BYTES:
            return 0
        return free_huge_bytes() // size_bytes


def _own(directory: Path) -> int:
    """Lock the directory against other sidecars; returns its descriptor. Raises OSError if it is
    not on a hugetlbfs of the right page size, or belongs to another user."""
    if not directory.exists() and page_bytes(directory.parent) == HUGE_PAGE_BYTES:
        directory.mkdir(mode=0o700)
    fd = os.open(directory, _ENTER)
    try:
        if os.fstatvfs(fd).f_bsize != HUGE_PAGE_BYTES:
            raise OSError(errno.EINVAL, f"no hugetlbfs of {HUGE_PAGE_BYTES >> 20} MiB pages")
        if os.fstat(fd).st_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, "it belongs to another user")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


# --- huge pages ------------------------------------------------------------------------------


def page_bytes(path: Path) -> int:
    """The page or block size of the file system at `path`. Raises OSError."""
    return os.statvfs(path).f_bsize


def hugetlbfs_mount() -> Path | None:
    """The mount of this machine's hugetlbfs; None unless it has pages and this user may write."""
    with contextlib.suppress(OSError):
        there = page_bytes(USUAL_MOUNT) == HUGE_PAGE_BYTES and os.access(USUAL_MOUNT, os.W_OK)
        return USUAL_MOUNT if there and _number_in("nr_hugepages") else None
    return None


def free_huge_bytes() -> int:
    """Bytes of huge pages that are neither used nor reserved; 0 when the kernel does not tell."""
    free = max(0, _number_in("free_hugepages") - _number_in("resv_hugepages"))
    return free * HUGE_PAGE_BYTES


def _meminfo(name: str) -> int:
    """A value of /proc/meminfo in bytes; 0 when the kernel does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return 0


def huge_pages_advice(lacking_bytes: int) -> str:
    """The commands with which a person makes this much more memory available as huge pages; '' if
    none are needed or the default size is another one."""
    if _meminfo("Hugepagesize") != HUGE_PAGE_BYTES:
        # vm.nr_hugepages counts pages of the default size
        return ""
    lacking = -(-max(0, lacking_bytes - free_huge_bytes()) // HUGE_PAGE_BYTES)
    commands = (
        [f"sysctl -w vm.nr_hugepages={_number_in('nr_hugepages') + lacking}"] if lacking else []
    )
    with contextlib.suppress(OSError):
        if not USUAL_MOUNT.exists() or page_bytes(USUAL_MOUNT) != HUGE_PAGE_BYTES:
            commands.append(f"mount --mkdir -t hugetlbfs none {USUAL_MOUNT}")
    return " && ".join(commands)


def _number_in(name: str) -> int:
    """A number that the kernel reports about its pool of huge pages; 0 if it has no pool."""
    try:
        return int((_POOL / name).read_text())
    except (OSError, ValueError):
        return 0


# --- directories of ranks --------------------------------------------------------------------


def rank_directory(memory_dir: Path, rank: int) -> Path:
    """The directory of a rank's slots."""
    return memory_dir / f"rank-{rank:05d}"


def rank_directories(memory_dir: Path) -> dict[int, Path]:
    """The ranks that have a directory here. Files and links with such a name do not count."""
    found = {}
    for entry in os.scandir(memory_dir):
        match = _RANK.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False):
            found[int(match[1])] = memory_dir / entry.name
    return {
        rank: path
        for rank, path in sorted(found.items())
        if rank_directory(memory_dir, rank) == path
    }


@contextlib.contextmanager
def open_rank_directory(directory: Path) -> Iterator[int]:
    """Open a rank's directory; yields its descriptor. Never a link or on another file system.

    The directory above it is the sidecar's own, so no other user can change its name. Raises
    OSError.
    """
    parent = os.open(directory.parent, _ENTER & ~os.O_NOFOLLOW)
    try:
        fd = os.open(directory.name, _ENTER, dir_fd=parent)
        try:
            if os.fstat(fd).st_dev != os.fstat(parent).st_dev:
                raise OSError(errno.EXDEV, "another file system", str(directory))
            yield fd
        finally:
            os.close(fd)
    finally:
        os.close(parent)


def make_rank_directory(directory: Path) -> None:
    """Make a rank's directory if it does not exist. Anything else with its name is removed; of a
    link only the name, not its target. Raises OSError."""
    parent = os.open(directory.parent, _ENTER & ~os.O_NOFOLLOW)
    try:
        try:
            os.mkdir(directory.name, 0o770, dir_fd=parent)
        except FileExistsError:
            found = os.stat(directory.name, dir_fd=parent, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):
                warn("memory.path_removed", path=str(directory), reason="it is no directory")
                os.unlink(directory.name, dir_fd=parent)
                os.mkdir(directory.name, 0o770, dir_fd=parent)
    finally:
        os.close(parent)
    with open_rank_directory(directory) as fd, contextlib.suppress(PermissionError):
        os.fchmod(fd, _DIRECTORY_MODE)  # refused if another user's sidecar made it


def clear_path(path: Path, *, keep_own: bool = False) -> None:
    """Free a name in the memory directory. `keep_own`: leave a file that we made ourselves.

    Of a link, only the name is removed. A directory is renamed. Raises OSError.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISDIR(found.st_mode):
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        warn("memory.directory_moved_aside", path=str(path), moved_to=str(aside))
        path.rename(aside)
    elif not keep_own or foreign_reason(found):
        path.unlink()


def foreign_reason(found: os.stat_result) -> str:
    """Why this cannot be a file that a sidecar of this user made; '' when it can."""
    if not stat.S_ISREG(found.st_mode):
        return "not a regular file"
    if found.st_nlink != 1:
        return f"it has {found.st_nlink} names"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}"
    return ""


# --- the right to a memory directory ---------------------------------------------------------


_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class DirectoryLock:
    """This process's right to the memory directory: one sidecar at a time.

    Trainers can write there too, so a name may be a link to one of the sidecar's files. Therefore
    no link is followed, and files are replaced, never rewritten.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._directory = config.memory_dir
        self._lock: FileLock | None = None
        self._above: int | None = None

    def take(self) -> None:
        """Own the directory, which is made if need be, and the name of the socket. Raises
        UsageError if another sidecar owns the directory (the message names it), or if this user
        cannot use it."""
        try:
            self._directory.mkdir(mode=0o770, parents=True, exist_ok=True)
            self._check_owner()
            self._own(self._directory / "sidecar.pid")
            self._describe(self._directory / "sidecar.json")
            clear_path(self._config.socket)
        except OSError as error:
            text = f"cannot use the memory directory {self._directory}: {error}"
            raise UsageError(text) from error

    def _check_owner(self) -> None:
        """Raises PermissionError if the parent directory has become another user's: that user could
        have made the directory anew after it was removed."""
        above = self._directory.parent.stat().st_uid
        if self._above not in (None, above) and above != os.geteuid():
            raise PermissionError(errno.EPERM, f"{self._directory.parent} is another user's now")
        self._above = above

    @property
    def held(self) -> bool:
        """Whether this process holds the lock, so that no other sidecar can take it."""
        return self._lock is not None and self._lock.is_file_in_place

    def _own(self, path: Path) -> None:
        if self.held:
            return
        clear_path(path, keep_own=True)
        try:
            taken = FileLock(path)
        except StorageError as error:
            raise UsageError(f"the memory directory {error}") from error
        if self._lock is not None:
            self._lock.release()
        self._lock = taken

    def _describe(self, path: Path) -> None:
        about = {"config": asdict(self._config), "pid": os.getpid(), "started_at": time.time()}
        unfinished = path.with_name(f".{path.name}.new")
        clear_path(unfinished)
        with os.fdopen(os.open(unfinished, _CREATE, 0o660), "w") as file:
            json.dump(about, file, default=str, indent=1)
        clear_path(path, keep_own=True)
        unfinished.replace(path)

    def release_and_clean_up(self) -> None:
        """Remove our files; also the directory, when no slots are left in it."""
        left = any(self._directory.glob("rank-*"))
        for name in ("sidecar.sock", "sidecar.pid", *(() if left else ("sidecar.json",))):
            with contextlib.suppress(OSError):
                (self._directory / name).unlink()
        if self._lock is not None:
            self._lock.release()
        if not left and not os.path.ismount(self._directory):
            with contextlib.suppress(OSError):  # it holds other files
                self._directory.rmdir()
