"""A slot as the trainer sees it: the shared memory that *is* an image.

The sidecar makes the file, allocates its pages and writes the image's header. The trainer maps the
file and writes tensors, extras and, last, the control page. For an accelerator, the mapping is
pinned once (`keepstep.state.accelerator`), so that copies into it run asynchronously at the bus's
full speed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from keepstep.client import copying
from keepstep.errors import FormatError
from keepstep.image import PAGE_BYTES, ControlPage, Entry, Layout
from keepstep.state import accelerator
from keepstep.state.taken_state import DTYPE_OF
from keepstep.wire.trainer import SlotGranted

_ZERO_PAGE = bytes(PAGE_BYTES)


class SlotMapping:
    """The mapped shared memory of one slot. Views into it keep the mapping alive."""

    def __init__(self, path: str, layout: Layout | None = None) -> None:
        """Map `path`. Without `layout`, the layout is read from the image.

        Raises OSError if the file is gone, FormatError if it is not an image of that layout.
        """
        self.path = path
        fd = os.open(path, os.O_RDWR)
        try:
            status = os.fstat(fd)
            size, self._file = status.st_size, (status.st_dev, status.st_ino)
            self._mmap = mmap.mmap(fd, size) if size else None
        finally:
            os.close(fd)
        if self._mmap is None:
            raise FormatError("an empty file is no slot", path=path)
        # A forked child is not a trainer: it must neither write here nor keep the memory.
        self._mmap.madvise(mmap.MADV_DONTFORK)
        _MAPPED.add(self)
        self.memory = memoryview(self._mmap)
        if layout is None:
            layout = Layout.parse(self.memory, size_bytes=size)
        elif size != layout.size_bytes or self.memory[: len(layout.header)] != layout.header:
            raise FormatError("the slot does not have this rank's layout", path=path)
        self.layout = layout
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mmap))
        self.pinned = False
        self._views: dict[str, Tensor] = {}

    def is_replaced(self) -> bool:
        """Whether another file now has the slot's path, for instance after the sidecar lost its
        memory."""
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) != self._file

    def populate_pages(self) -> None:
        """Map all pages for writing. A slot that is only read does not need this: the kernel maps
        sixteen pages at a read fault, but only one at a write fault."""
        copying.populate_pages(self.address, self.layout.size_bytes)

    def pin(self, device: int | None = None) -> None:
        """Pin the memory as long as it is mapped; see `Accelerator.pin`."""
        here, size_bytes = accelerator.current_accelerator(), self.layout.size_bytes
        if not self.pinned and here.pin(self.address, size_bytes, device):
            self.pinned = True
            weakref.finalize(self, here.unpin, self.address)

    def view_tensor(self, entry: Entry) -> Tensor:
        """A CPU tensor of the entry's dtype and shape over the slot's own bytes."""
        name = entry.spec.name
        if name not in self._views:
            dtype = DTYPE_OF[entry.spec.dtype]
            if entry.begin == entry.end:
                flat = torch.empty(0, dtype=dtype)
            else:
                count = entry.end - entry.begin
                assert self._mmap is not None
                flat = torch.frombuffer(
                    self._mmap, dtype=torch.uint8, count=count, offset=entry.begin
                ).view(dtype)
            self._views[name] = flat.view(entry.spec.shape)
        return self._views[name]

    def erase(self) -> None:
        """Zero the control page. From then on, the slot holds no image."""
        self.memory[self.layout.control_begin :] = _ZERO_PAGE

    def write_extras(self, extras: bytes) -> None:
        """Write the extras, and zeros up to their capacity. Raises ValueError if they are larger
        than that, before anything is written."""
        begin = self.layout.extras_begin
        left = self.layout.extras_capacity_bytes - len(extras)
        if left < 0:
            raise ValueError(f"the extras are {-left} bytes larger than this layout has room for")
        self.memory[begin : begin + len(extras)] = extras
        ctypes.memset(self.address + begin + len(extras), 0, left)

    def seal(self, control: ControlPage) -> None:
        """Write the control page. From then on, the image is complete."""
        self.memory[self.layout.control_begin :] = control.to_bytes()

    def control(self) -> ControlPage:
        """The control page, after a check of its seal. Raises TornError, VersionError or
        FormatError."""
        return ControlPage.from_bytes(self.memory[self.layout.control_begin :])


class GrantedSlot(NamedTuple):
    """A slot that the sidecar granted for filling, and its mapped memory. `base`: the memory of the
    base to which its image refers; None if it is whole."""

    grant: SlotGranted
    mapping: SlotMapping
    base: SlotMapping | None = None


def unmap_in_background(held: list[object]) -> None:
    """Drop the last references to mappings in a thread of its own: to unmap and to unpin takes the
    kernel and the driver about a tenth of the time of the copy. The interpreter's end waits for it,
    as torch aborts a process that ends within; so nothing that runs after that wait may call this.
    """
    # said, because a thread of a daemon would be a daemon, too
    threading.Thread(target=held.clear, name="keepstep-unmap", daemon=False).start()


_MAPPED: weakref.WeakSet[SlotMapping] = weakref.WeakSet()


def _keep_addresses_in_child() -> None:
    """The mappings were not forked, so the child must not unmap their addresses: something else may
    be there by now."""
    for mapping in list(_MAPPED):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping._mmap))
    _MAPPED.clear()


os.register_at_fork(after_in_child=_keep_addresses_in_child)
