"""Slot files: shared memory that holds one image each, made, filled with pages, locked, adopted.

A slot is a file in a tmpfs. Its pages are allocated and touched here, so that the trainer neither
pays for first touch (2.5 s/GiB on a small machine) nor meets SIGBUS when the tmpfs is full, and so
that they are charged to the sidecar. It appears under its final name only when all that is done:
whatever has another name after a crash is rubbish. Everything blocks; nothing here decides.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import threading
from pathlib import Path

from keepstep.errors import FormatError, ImageError, NoMemoryError
from keepstep.image import PAGE_BYTES, ControlPage, Layout
from keepstep_sidecar.niceness import yield_to_others

_MADV_POPULATE_WRITE = 23
_PIECE_BYTES = 8 << 20
"""Populated at a time: a page fault of the training elsewhere never waits longer than that."""

_NAME = re.compile(r"^(?P<layout>[0-9a-f]{12})\.(?P<number>\d+)\.slot$")
_UNFINISHED = ".new"
_LOW_PRIORITY = 10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memmove.restype = ctypes.c_void_p


class SlotFile:
    """One slot: its file, mapped. `locked`: "" when its pages cannot be swapped out, else why."""

    def __init__(self, path: Path, layout: Layout, mapping: mmap.mmap) -> None:
        self.path = path
        self.layout = layout
        self.locked = "not yet"
        self._mapping = mapping
        self.view = memoryview(mapping)

    @classmethod
    def create(cls, path: Path, layout: Layout, *, stop: threading.Event) -> SlotFile:
        """Make an empty slot of this layout: sized, populated, with its header, locked.

        Takes seconds per GiB. Raises NoMemoryError when the tmpfs is full or `stop` is set.
        """
        unfinished = path.with_name(path.name + _UNFINISHED)
        fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o660)
        try:
            os.ftruncate(fd, layout.size_bytes)
            slot = cls(path, layout, mmap.mmap(fd, layout.size_bytes))
            _allocate(fd, slot, stop)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        slot.view[: len(layout.header)] = layout.header
        os.rename(unfinished, path)
        slot.lock()
        return slot

    @classmethod
    def adopt(cls, path: Path) -> SlotFile:
        """Map a slot that an earlier sidecar made. Raises ImageError when it is none."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size_bytes = os.fstat(fd).st_size
            if size_bytes < 2 * PAGE_BYTES or size_bytes % PAGE_BYTES:
                raise FormatError(f"{size_bytes} bytes are no slot", path=path)
            mapping = mmap.mmap(fd, size_bytes)
        finally:
            os.close(fd)
        layout = Layout.parse(memoryview(mapping), size_bytes=size_bytes)
        return cls(path, layout, mapping)

    @property
    def name(self) -> str:
        """What the protocol calls this slot; unique within its rank."""
        return self.path.name

    def control_bytes(self) -> memoryview:
        return self.view[self.layout.control_begin :]

    def control(self) -> ControlPage | None:
        """The seal of the image in this slot, or None: empty, torn, or not one of ours."""
        try:
            return ControlPage.from_bytes(self.control_bytes())
        except ImageError:
            return None

    def erase(self) -> None:
        """Zero the control page: there is no image in this slot."""
        self.control_bytes()[:] = bytes(PAGE_BYTES)

    def settle(self) -> None:
        """Map an adopted slot's pages and lock them, so that restore and persist fault nothing."""
        try:
            # a view of its own keeps the mapping while this thread works on it
            with self.view[:] as view:
                populate(view, threading.Event())
                self.lock()
        except ValueError:
            return  # unlinked in the meantime, and its view released

    def lock(self) -> None:
        """Keep the pages out of swap where RLIMIT_MEMLOCK allows it; `locked` says how it went."""
        if _libc.mlock(_address(self.view), len(self.view)) == 0:
            self.locked = ""
        else:
            self.locked = os.strerror(ctypes.get_errno())

    def unlink(self) -> None:
        """Remove the file; memory is free once nobody maps it any more."""
        self.path.unlink(missing_ok=True)
        self.view.release()
        try:
            self._mapping.close()
        except BufferError:
            # a reader still holds a view: the mapping goes when it lets go
            return


def populate(view: memoryview, stop: threading.Event) -> None:
    """Touch every page of `view`, without the GIL. Raises NoMemoryError when `stop` is set."""
    address = _address(view)
    for begin in range(0, len(view), _PIECE_BYTES):
        if stop.is_set():
            raise NoMemoryError("the sidecar is stopping", code="stopping")
        size = min(_PIECE_BYTES, len(view) - begin)
        if _libc.madvise(address + begin, size, _MADV_POPULATE_WRITE) != 0:
            _populate_failed(ctypes.get_errno(), view[begin : begin + size])


def lower_priority() -> None:
    """Run this thread behind the training's."""
    yield_to_others(_LOW_PRIORITY)


def slot_name(layout: Layout, number: int) -> str:
    """File name of a layout's slot."""
    return f"{layout.id[:12]}.{number}.slot"


def slot_number(name: str) -> int | None:
    """Inverse of `slot_name`, without the layout; None for other files."""
    return int(match["number"]) if (match := _NAME.match(name)) else None


def rank_directory(memory_dir: Path, rank: int) -> Path:
    """Where a rank's slots are."""
    return memory_dir / f"rank-{rank:05d}"


def free_bytes(directory: Path) -> int:
    """Memory that the tmpfs of `directory` can still give."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _allocate(fd: int, slot: SlotFile, stop: threading.Event) -> None:
    try:
        for begin in range(0, slot.layout.size_bytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, slot.layout.size_bytes - begin)
            os.posix_fallocate(fd, begin, size)
            populate(slot.view[begin : begin + size], stop)
    except OSError as error:
        raise NoMemoryError(
            f"{slot.path.parent}: no room for a slot of {slot.layout.size_bytes} bytes"
            f" ({error.strerror}); give the tmpfs more memory or pass fewer --slots",
            code="no-memory",
        ) from error


def _populate_failed(number: int, view: memoryview) -> None:
    if number != errno.EINVAL:
        raise OSError(number, os.strerror(number))
    for offset in range(0, len(view), PAGE_BYTES):  # a kernel before 5.14 does not know the advice
        view[offset] = view[offset]


def copy(source: memoryview, target: memoryview) -> None:
    """Bytes from one mapping to another of the same length, without the GIL."""
    assert len(source) == len(target), "the same chunk of the same image"
    _libc.memmove(_address(target), _address(source), len(target))


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
