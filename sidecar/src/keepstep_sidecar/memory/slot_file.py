"""Slot files: shared memory for one image each. They are made, populated, locked and adopted here.

A slot is a file in a tmpfs, or of huge pages in a hugetlbfs. The sidecar allocates and touches its
pages. So the trainer neither pays for first touch (2.5 s/GiB on a small machine) nor gets SIGBUS
when memory is short, and the pages are charged to the sidecar. A slot gets its final name only when
all this is done. A file with another name after a crash is garbage. All functions block; none makes
decisions.

Training processes can write in these directories, so any name may be a link to a file that only the
sidecar can reach, such as a shard on a volume. Therefore names are used only relative to a
descriptor of their directory, and no link is followed. A file counts as a slot only if it is a
regular file of this file system and of our own user, and has no other name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import re
import threading
from collections.abc import Collection
from pathlib import Path

from keepstep.errors import FormatError, ImageError, NoMemoryError
from keepstep.image import HUGE_PAGE_BYTES, PAGE_BYTES, ControlPage, Layout, read_layout
from keepstep.steps import StepId
from keepstep_sidecar.concurrency import for_each_chunk, raise_niceness
from keepstep_sidecar.log import warn
from keepstep_sidecar.memory.slot_directories import foreign_reason, open_rank_directory

_MADV_POPULATE_WRITE = 23
_PIECE_BYTES = 8 << 20
"""How much is populated at a time. A page fault of the training elsewhere never waits longer."""

_NAME = re.compile(r"[0-9a-f]{12}\.(\d{1,9})\.slot", re.ASCII)
_UNFINISHED = ".new"
NOT_YET = "not yet"

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOW_PRIORITY = 10
_MOST_THREADS = 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memmove.restype = ctypes.c_void_p


class SlotFile:
    """One slot: its file, mapped. `locked`: "" when its pages cannot be swapped out, else why not.
    `huge`: its pages are huge pages, which are never swapped out.

    The control page is read and written by system calls. A trainer may truncate the file at any
    moment, and touching a mapping beyond the file's end would kill the process (SIGBUS).
    """

    def __init__(self, path: Path, layout: Layout, fd: int) -> None:
        """Takes ownership of `fd`. Raises OSError when the file cannot be mapped."""
        self.path = path
        self.layout = layout
        self.huge = os.fstatvfs(fd).f_bsize == HUGE_PAGE_BYTES
        self.locked = "" if self.huge else NOT_YET
        self._fd = fd
        self._mapping = mmap.mmap(fd, layout.size_bytes)
        self.view = memoryview(self._mapping)

    @classmethod
    def create(cls, path: Path, layout: Layout, *, stop: threading.Event) -> SlotFile:
        """Make an empty slot of this layout: sized, populated, with its header, locked.

        Takes seconds per GiB. Raises NoMemoryError when memory is short or `stop` is set, OSError
        when the directory is gone.
        """
        unfinished = path.name + _UNFINISHED
        with open_rank_directory(path.parent) as directory:
            fd = os.open(unfinished, _CREATE, 0o660, dir_fd=directory)
            slot = None
            try:
                os.ftruncate(fd, layout.size_bytes)
                slot = cls(path, layout, fd)
                _allocate(fd, slot, stop)
                slot._write(layout.header, 0)
                os.rename(unfinished, path.name, src_dir_fd=directory, dst_dir_fd=directory)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(unfinished, dir_fd=directory)
                if slot is None:
                    os.close(fd)
                else:
                    slot.close()
                raise
        slot.lock_pages_in_memory()
        return slot

    @classmethod
    def adopt(cls, path: Path) -> SlotFile:
        """Map a slot that an earlier sidecar made. Raises OSError, ImageError if it is not a
        slot."""
        with open_rank_directory(path.parent) as directory:
            _check_slot(os.stat(path.name, dir_fd=directory, follow_symlinks=False), directory)
            fd = os.open(path.name, _OPEN, dir_fd=directory)
            try:
                found = os.fstat(fd)
                _check_slot(found, directory)
                if found.st_size < 2 * PAGE_BYTES or found.st_size % PAGE_BYTES:
                    raise FormatError(f"{found.st_size} bytes are no slot")
                return cls(path, read_layout(fd), fd)
            except BaseException:
                os.close(fd)
                raise

    @property
    def name(self) -> str:
        """The slot's name in the protocol, unique within its rank."""
        return self.path.name

    def control(self) -> ControlPage | None:
        """The seal of this slot's image; None if the slot is empty, torn, truncated or foreign."""
        try:
            page = os.pread(self._fd, PAGE_BYTES, self.layout.control_begin)
            return ControlPage.from_bytes(page)
        except (ImageError, OSError):
            return None
        except Exception as error:  # any error of the parser means that there is no seal
            warn("slot.seal_invalid", path=str(self.path), error=repr(error))
            return None

    def invalidate_image(self) -> None:
        """Zero the control page, so that this slot holds no image."""
        with contextlib.suppress(OSError):  # the slot was given up meanwhile
            self._write(bytes(PAGE_BYTES), self.layout.control_begin)

    def _write(self, data: bytes, offset: int) -> None:
        """Copy bytes into the mapping by a system call that reads them from a memfd. If a part of
        the slot file is gone, the call fails with EFAULT. Hugetlbfs does not support `write`."""
        if self._fd < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        source = os.memfd_create("keepstep", os.MFD_CLOEXEC)
        try:
            os.write(source, data)
            with self.view[offset : offset + len(data)] as target:
                if os.preadv(source, [target], 0) != len(data):
                    raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        finally:
            os.close(source)

    def describe_damage(self) -> str:
        """What others took from this file: "its name" or "a part of its bytes"; '' when it is
        whole.

        Without its name the file can still be read here, but no other process can open it.
        """
        if self.is_cut_off:
            return "a part of its bytes"
        try:
            return "" if os.fstat(self._fd).st_nlink else "its name"
        except OSError:
            return "its name"

    @property
    def is_cut_off(self) -> bool:
        """Whether the file was truncated, or pages were taken out of it. Touching the mapping may
        then kill the process."""
        try:
            found = os.fstat(self._fd)
        except OSError:
            return False
        # A hole in a tmpfs is filled again. A huge page that was given back may belong to another
        # process by now.
        hole = self.huge and found.st_blocks * 512 < self.layout.size_bytes
        return hole or found.st_size != self.layout.size_bytes

    def damage_text(self, step_id: StepId, *, run: str) -> str:
        """Why a trainer cannot restore from the image `step_id` in this slot; '' when it can."""
        if lacks := self.describe_damage():
            return f"the slot has lost {lacks}"
        control = self.control()
        if control is None:
            return "it has no valid seal any more"
        if (control.step_id, control.run, control.layout) != (step_id, run, self.layout.id):
            return f"its seal is that of step {control.step_id}"
        header = self.layout.header
        with contextlib.suppress(OSError):
            if os.pread(self._fd, len(header), 0) == header:
                return ""
        return "its header is damaged"

    def map_and_lock_pages(self) -> None:
        """Map and lock an adopted slot's pages, so that restore and persist cause no page
        faults."""
        try:
            # A separate view keeps the mapping while this thread works on it.
            with self.view[:] as view:
                populate_pages(view, threading.Event())
                self.lock_pages_in_memory()
        except (ValueError, OSError):
            return  # unlinked meanwhile, and its view released; or truncated

    def lock_pages_in_memory(self) -> None:
        """Keep the pages out of swap if RLIMIT_MEMLOCK allows it. Sets `locked`."""
        if self.huge:
            return
        if _libc.mlock(_address(self.view), len(self.view)) == 0:
            self.locked = ""
        else:
            self.locked = os.strerror(ctypes.get_errno())

    def unlink(self) -> None:
        """Remove the file. Its memory is free once no process maps it any more."""
        with contextlib.suppress(OSError), open_rank_directory(self.path.parent) as directory:
            # the name may have been given to another file
            found = os.stat(self.path.name, dir_fd=directory, follow_symlinks=False)
            if os.path.samestat(os.fstat(self._fd), found):
                os.unlink(self.path.name, dir_fd=directory)
        self.close()

    def close(self) -> None:
        """Close the file without removing it. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(BufferError):  # a reader's view keeps the mapping until it ends
            self.view.release()
            self._mapping.close()


def populate_pages(view: memoryview, stop: threading.Event) -> None:
    """Touch every page of `view`, without the GIL. Raises NoMemoryError when `stop` is set."""
    address = _address(view)
    for begin in range(0, len(view), _PIECE_BYTES):
        if stop.is_set():
            raise NoMemoryError("the sidecar is stopping", code="stopping")
        size = min(_PIECE_BYTES, len(view) - begin)
        if _libc.madvise(address + begin, size, _MADV_POPULATE_WRITE) != 0:
            _populate_failed(ctypes.get_errno(), view[begin : begin + size])


def lower_priority() -> None:
    """Give this thread a lower priority than the training."""
    raise_niceness(_LOW_PRIORITY)


def slot_name(layout: Layout, number: int) -> str:
    """The file name of a layout's slot."""
    return f"{layout.id[:12]}.{number}.slot"


def slot_number(name: str) -> int | None:
    """The number in a slot's name; None for other files."""
    return int(match[1]) if (match := _NAME.fullmatch(name)) else None


def is_unfinished_slot_name(name: str) -> bool:
    """Whether this is the name of a slot that is being made."""
    return name.endswith(_UNFINISHED) and slot_number(name.removesuffix(_UNFINISHED)) is not None


def _check_slot(found: os.stat_result, directory: int) -> None:
    """Raises FormatError for a file that a sidecar has not made."""
    if found.st_dev != os.fstat(directory).st_dev:
        raise FormatError("on another file system")
    if why := foreign_reason(found):
        raise FormatError(why)


def may_swap() -> bool:
    """Whether this process's memory may be swapped out on this machine; True when unknown."""
    with contextlib.suppress(OSError):
        if len(Path("/proc/swaps").read_text().splitlines()) < 2:  # its first line is a heading
            return False
    with contextlib.suppress(OSError):
        return Path("/sys/fs/cgroup/memory.swap.max").read_text().strip() != "0"
    return True


def pinning_text(slots: Collection[tuple[bool, str]], *, swap: bool, limit_bytes: int) -> str:
    """A text for people: what keeps slots out of swap, or why nothing does. `slots`: for each slot,
    whether it has huge pages, and why it is not locked. Pure."""
    reasons = {why for _, why in slots if why}
    if not reasons:
        return " and ".join(sorted({"hugepages" if huge else "mlock" for huge, _ in slots}))
    if not swap:
        return "no, and need not be: there is no swap here"
    if reasons == {NOT_YET}:
        return "not yet"
    return (
        f"no: slots may be swapped out, as RLIMIT_MEMLOCK is {limit_bytes >> 10} KiB;"
        " raise it (ulimit -l), use huge pages, or turn swap off"
    )


def _allocate(fd: int, slot: SlotFile, stop: threading.Event) -> None:
    """Reserve and touch all pages, on several threads: a restore may wait for them.

    Huge pages are reserved since the file was mapped. To allocate them as well would zero them one
    after the other, whatever the number of threads.
    """
    allocated = slot.huge and _knows_populate()

    def fill(index: int) -> None:
        begin = index * _PIECE_BYTES
        with slot.view[begin : begin + _PIECE_BYTES] as piece:
            if not allocated:
                os.posix_fallocate(fd, begin, len(piece))
            populate_pages(piece, stop)

    pieces = -(-slot.layout.size_bytes // _PIECE_BYTES)
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    try:
        for_each_chunk(fill, pieces, threads=threads, niceness=_LOW_PRIORITY)
    except OSError as error:
        raise NoMemoryError(
            f"{slot.path.parent}: no room for a slot of {slot.layout.size_bytes} bytes"
            f" ({error.strerror}); give the tmpfs more memory or pass fewer --slots",
            code="no-memory",
        ) from error


@functools.cache
def _knows_populate() -> bool:
    """Whether this kernel (5.14 or later) populates pages on request, with an error if it cannot.
    Otherwise a page that cannot be had kills who touches it."""
    with mmap.mmap(-1, PAGE_BYTES) as page, memoryview(page) as view:
        return bool(_libc.madvise(_address(view), PAGE_BYTES, _MADV_POPULATE_WRITE) == 0)


def _populate_failed(number: int, view: memoryview) -> None:
    if number != errno.EINVAL:
        raise OSError(number, os.strerror(number))
    for offset in range(0, len(view), PAGE_BYTES):  # a kernel before 5.14 does not know the advice
        view[offset] = view[offset]


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy bytes between two mappings of the same length, without the GIL."""
    assert len(source) == len(target), "the same chunk of the same image"
    _libc.memmove(_address(target), _address(source), len(target))


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
