"""Copies live tensors into a slot, and back.

On a CPU the copy is `memmove` without the GIL, as fast as a bare memcpy. Several threads share it
when the training thread waits for it. Tensors that are not plain contiguous CPU memory are copied
with `Tensor.copy_`. A tensor without memory of its own is an error here, because reading it would
end the process.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from keepstep.errors import KeepstepError
from keepstep.state.accelerator import has_memory

# CDLL functions release the GIL; ctypes.memmove and mmap.madvise do not.
_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = ctypes.c_void_p
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_PAGE_BYTES = 4096
_HUGEPAGE = 14
_POPULATE_WRITE = 23
_LARGE_BYTES = 4 << 20

PIECE_BYTES = 16 << 20
"""A thread copies this many bytes at a time: enough to amortise Python, and few enough to balance
the threads."""

_PARALLEL_BYTES = 32 << 20


class Move(NamedTuple):
    """A copy of `bytes` bytes of plain memory from address `source` to address `target`."""

    target: int
    source: int
    bytes: int


class Copy(NamedTuple):
    """A copy of one tensor into another of the same shape and dtype (strided, or on another
    device)."""

    target: Tensor
    source: Tensor


class Transfers(NamedTuple):
    """What to copy: plain moves, and copies that need torch. `holds`: what owns the memory from
    which the moves read."""

    moves: Sequence[Move] = ()
    copies: Sequence[Copy] = ()
    holds: object = None


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's bytes in memory are its value in row-major order."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and has_memory(tensor)
    )


def move(target: int, source: int, size_bytes: int) -> None:
    """Do one plain move on this thread."""
    _memmove(target, source, size_bytes)


def run(transfers: Transfers, *, threads: int = 1) -> None:
    """Do all transfers, the plain moves on up to `threads` threads. Returns when all are done.

    Raises KeepstepError, before anything is copied, if a tensor has lost its memory.
    """
    moves, copies = transfers.moves, transfers.copies
    _check(moves, copies)
    total = sum(move.bytes for move in moves)
    threads = min(threads, max(1, total // _PARALLEL_BYTES))
    if threads == 1:
        for move in moves:
            _memmove(move.target, move.source, move.bytes)
    else:
        _run_parallel(moves, threads)
    with torch.no_grad():
        for copy in copies:
            copy.target.copy_(copy.source)


def _check(moves: Sequence[Move], copies: Sequence[Copy]) -> None:
    lost = any(one.bytes and not (one.target and one.source) for one in moves)
    if lost or not all(_can_copy(side) for one in copies for side in (one.target, one.source)):
        raise KeepstepError("a tensor lost its memory before it was copied (its storage was freed)")


def _can_copy(tensor: Tensor) -> bool:
    # A subclass copies in its own way. A zero tensor has no memory, which torch handles itself.
    plain = type(tensor) is Tensor or type(tensor) is torch.nn.Parameter
    return not plain or tensor._is_zerotensor() or has_memory(tensor)


def default_threads() -> int:
    """How many threads copy: at most 4. Two nearly fill the memory bus of most machines, and
    many threads would only disturb other processes."""
    return min(4, len(os.sched_getaffinity(0)))


def _run_parallel(moves: Sequence[Move], threads: int) -> None:
    pieces = iter(list(_pieces(moves)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            _memmove(piece.target, piece.source, piece.bytes)

    helpers = [threading.Thread(target=work, name="keepstep-copy") for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()


def _pieces(moves: Sequence[Move]) -> Iterable[Move]:
    for move in moves:
        for begin in range(0, move.bytes, PIECE_BYTES):
            size = min(PIECE_BYTES, move.bytes - begin)
            yield Move(move.target + begin, move.source + begin, size)


# --- page tables: filled in one call instead of fault by fault ---------------------------------


def populate(address: int, size_bytes: int) -> None:
    """Map pages that already exist. Without it, the 524,288 page faults of a 2 GiB slot cost a copy
    0.7 s.

    Kernels before 5.14 refuse the call, which costs only time.
    """
    _madvise(address, size_bytes, _POPULATE_WRITE)


def prefer_huge_pages(tensor: Tensor) -> None:
    """Ask for huge pages under new CPU memory. They make the first touch several times cheaper."""
    storage = tensor.untyped_storage()
    if tensor.device.type != "cpu" or storage.nbytes() < _LARGE_BYTES:
        return
    begin = -(-storage.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
    _madvise(begin, (storage.nbytes() - _PAGE_BYTES) // _PAGE_BYTES * _PAGE_BYTES, _HUGEPAGE)
