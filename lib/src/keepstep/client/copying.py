"""Copies live tensors into a slot, and back.

On a CPU the copy is `memmove` without the GIL, as fast as a bare memcpy. Several threads share it
when the training thread waits for it. What goes to a device goes through small pinned buffers
(`_bring`). Tensors that are not plain contiguous memory are copied with `Tensor.copy_`. A tensor
without memory of its own is an error here, because reading it would end the process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from keepstep import processes
from keepstep.errors import KeepstepError
from keepstep.state import accelerator
from keepstep.state.accelerator import owns_full_storage

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


class MemoryMove(NamedTuple):
    """A copy of `bytes` bytes of plain memory from address `source` to address `target`."""

    target: int
    source: int
    bytes: int


class TensorCopy(NamedTuple):
    """A copy of one tensor into another of the same shape and dtype (strided, or on another
    device)."""

    target: Tensor
    source: Tensor


class Transfers(NamedTuple):
    """What to copy: plain moves, and copies that need torch. `holds`: what owns the memory from
    which the moves read."""

    moves: Sequence[MemoryMove] = ()
    copies: Sequence[TensorCopy] = ()
    holds: object = None


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's bytes in memory are its value in row-major order."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and owns_full_storage(tensor)
    )


def copy_bytes(target: int, source: int, size_bytes: int) -> None:
    """Do one plain move on this thread."""
    _memmove(target, source, size_bytes)


def run_transfers(transfers: Transfers, *, threads: int = 1) -> None:
    """Do all transfers, the plain moves on up to `threads` threads. Returns when all are done.

    Raises KeepstepError, before anything is copied, if a tensor has lost its memory.
    """
    moves, copies = transfers.moves, transfers.copies
    with processes.no_fork():
        _check(moves, copies)
    total = sum(move.bytes for move in moves)
    threads = min(threads, max(1, total // _PARALLEL_BYTES))
    if threads == 1:
        for move in moves:
            _memmove(move.target, move.source, move.bytes)
    else:
        _run_parallel(moves, threads)
    for copy in _bring(copies):
        with processes.no_fork(), torch.no_grad():
            copy.target.copy_(copy.source)


def _check(moves: Sequence[MemoryMove], copies: Sequence[TensorCopy]) -> None:
    lost = any(move.bytes and not (move.target and move.source) for move in moves)
    if lost or not all(_can_copy(side) for copy in copies for side in (copy.target, copy.source)):
        raise KeepstepError("a tensor lost its memory before it was copied (its storage was freed)")


def _can_copy(tensor: Tensor) -> bool:
    # A subclass copies in its own way. A zero tensor has no memory, which torch handles itself.
    plain = type(tensor) is Tensor or type(tensor) is torch.nn.Parameter
    return not plain or tensor._is_zerotensor() or owns_full_storage(tensor)


def default_threads() -> int:
    """How many threads copy: at most 4. Two nearly fill the memory bus of most machines, and
    many threads would only disturb other processes."""
    return min(4, len(os.sched_getaffinity(0)))


def _run_parallel(moves: Sequence[MemoryMove], threads: int) -> None:
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


def _pieces(moves: Sequence[MemoryMove]) -> Iterable[MemoryMove]:
    for move in moves:
        for begin in range(0, move.bytes, PIECE_BYTES):
            size = min(PIECE_BYTES, move.bytes - begin)
            yield MemoryMove(move.target + begin, move.source + begin, size)


# --- to a device ---------------------------------------------------------------------------------
#
# A copy from memory that is not pinned runs at a tenth of the bus's speed, and to pin the memory
# takes longer than the copy. So threads move it into a few pinned buffers, from which the device
# copies meanwhile.


_BUFFER_BYTES = 8 << 20
_BUFFERS = 2
_MOST_BRINGERS = 12
_WORTH_BYTES = 32 << 20
_ALIGNED_BYTES = 64
_MOST_PARTS = 512

_Part = tuple[Tensor, int]
"""Bytes on a device, and the address from which they come."""


def _bring(copies: Sequence[TensorCopy]) -> Sequence[TensorCopy]:
    """Make the copies of plain memory of the host into plain tensors of devices. Returns the copies
    that are left: the others, or all of them if they are few bytes or nothing can be pinned."""
    here, plain = accelerator.current_accelerator(), dict[torch.device, list[TensorCopy]]()
    for copy in copies:
        place = here.device_of(copy.target)
        if place is not None and _is_bytewise(copy):
            plain.setdefault(place, []).append(copy)
    brought = {id(copy) for some in plain.values() for copy in some}
    total = sum(copy.source.nbytes for some in plain.values() for copy in some)
    threads = min(_MOST_BRINGERS, len(os.sched_getaffinity(0)), total // _WORTH_BYTES)
    if not threads:
        return copies
    memory = torch.frombuffer(mmap.mmap(-1, threads * _BUFFERS * _BUFFER_BYTES), dtype=torch.uint8)
    if not here.pin(memory.data_ptr(), memory.nbytes, here.current_device()):
        return copies
    try:
        for place, some in plain.items():
            _carry(some, place, memory.chunk(threads))
    finally:
        here.unpin(memory.data_ptr())
    return [copy for copy in copies if id(copy) not in brought]


def _is_bytewise(copy: TensorCopy) -> bool:
    target = copy.target
    same = target.dtype == copy.source.dtype and target.is_contiguous()
    return same and not target.is_conj() and not target.is_neg() and is_plain(copy.source)


def _carry(
    copies: Sequence[TensorCopy], place: torch.device, parts_of_memory: Sequence[Tensor]
) -> None:
    """Make these copies with one thread for each part of pinned memory."""
    here, lock, failures = (
        accelerator.current_accelerator(),
        threading.Lock(),
        list[BaseException](),
    )
    loads = _loads(copies)

    def next_load() -> list[_Part] | None:
        with lock:
            return None if failures else next(loads, None)

    def work(memory: Tensor, stream: torch.Stream) -> None:
        try:
            with torch.no_grad(), here.use_stream(stream):
                _carry_alone(iter(next_load, None), memory, stream)
        except BaseException as error:
            failures.append(error)

    helpers = []
    for memory in parts_of_memory:
        stream = here.create_stream(place)
        stream.wait_stream(here.get_compute_stream(place))  # what made the tensors comes before
        helpers.append(threading.Thread(target=work, args=(memory, stream), name="keepstep-copy"))
    for helper in helpers:
        helper.start()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]


def _carry_alone(loads: Iterable[list[_Part]], memory: Tensor, stream: torch.Stream) -> None:
    buffers: deque[tuple[Tensor, torch.Event | None]] = deque(
        (buffer, None) for buffer in memory.chunk(_BUFFERS)
    )
    try:
        for load in loads:
            buffer, done = buffers.popleft()
            if done is not None:
                done.synchronize()
            at, sources = 0, []
            for target, source in load:
                sources.append(buffer[at : at + target.numel()])
                copy_bytes(sources[-1].data_ptr(), source, target.numel())
                at += _aligned(target.numel())
            accelerator.current_accelerator().copy([target for target, _ in load], sources)
            buffers.append((buffer, stream.record_event()))
    finally:  # the buffers are not pinned much longer
        stream.synchronize()


def _loads(copies: Sequence[TensorCopy]) -> Iterator[list[_Part]]:
    """The copies in parts, of which as many as go through a buffer at once."""
    load: list[_Part] = []
    size = 0
    for part in _parts(copies):
        more = _aligned(part[0].numel())
        if load and (size + more > _BUFFER_BYTES or len(load) == _MOST_PARTS):
            yield load
            load, size = [], 0
        load.append(part)
        size += more
    if load:
        yield load


def _parts(copies: Sequence[TensorCopy]) -> Iterator[_Part]:
    for target, source in copies:
        flat, address = target.detach().reshape(-1).view(torch.uint8), source.data_ptr()
        for begin in range(0, flat.numel(), _BUFFER_BYTES):
            yield flat[begin : begin + _BUFFER_BYTES], address + begin


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES


# --- page tables: filled in one call instead of fault by fault ---------------------------------


def populate_pages(address: int, size_bytes: int) -> None:
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
