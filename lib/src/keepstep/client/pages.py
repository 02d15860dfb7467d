"""Page tables: paid for in one call, beside the training thread, instead of fault by fault."""

from __future__ import annotations

import ctypes

from torch import Tensor

_PAGE_BYTES = 4096
_HUGEPAGE = 14
_POPULATE_WRITE = 23
_LARGE_BYTES = 4 << 20

# a function of CDLL releases the GIL; mmap.madvise does not
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def populate(address: int, size_bytes: int) -> None:
    """Map pages that exist already: 524,288 faults of a 2 GiB slot cost a copy 0.7 s.

    Kernels before 5.14 refuse, which costs only time.
    """
    _madvise(address, size_bytes, _POPULATE_WRITE)


def prefer_huge_pages(tensor: Tensor) -> None:
    """Ask for huge pages under new CPU memory: first touch is several times cheaper with them."""
    storage = tensor.untyped_storage()
    if tensor.device.type != "cpu" or storage.nbytes() < _LARGE_BYTES:
        return
    begin = -(-storage.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
    _madvise(begin, (storage.nbytes() - _PAGE_BYTES) // _PAGE_BYTES * _PAGE_BYTES, _HUGEPAGE)
