"""Moves the bytes of a plan: from mapped images in one go, from all others chunk by chunk.

Every needed chunk is requested once, in the order of the files. Rows that are contiguous in both
tensors move at the speed of memory; columns go through torch's strided copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from keepstep.client import copying
from keepstep.image.xxh3 import CHUNK_BYTES
from keepstep.restore.images import Bytes
from keepstep.restore.plan import Block, Piece, Plan, blocks, byte_range
from keepstep.state import accelerator
from keepstep.wire.trainer import ChunkRun

_MOVES_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Load:
    """What is needed from one chunk: pairs of the number of a wanted tensor and a block."""

    rank: int
    chunk: int
    parts: list[tuple[int, Block]] = field(default_factory=list)


def run(
    plan: Plan,
    targets: Sequence[Tensor],
    images: Bytes,
    dtypes: Sequence[torch.dtype] | None = None,
) -> int:
    """Fill `targets` (one per want, with the shape of its box); returns the bytes copied.

    `dtypes`: the saved dtypes, if a target may have another one and gets the values converted.
    Raises SidecarError if a chunk cannot be had. Some tensors have changed by then, so the caller
    must restore another step, or stop.
    """
    dtypes = [one.dtype for one in targets] if dtypes is None else dtypes
    total = _wholes(plan, targets, images, dtypes) + _mapped(plan, targets, images, dtypes)
    distant = (one for one in plan.parts() if images.flat(one.rank) is None)
    for load, frame in images.stream(loads(distant, dtypes)):
        for want, block in load.parts:
            source = view_of(frame, dtypes[want], block, load.chunk * CHUNK_BYTES)
            total += put(_place(targets[want], block), source)
    cut = set(plan.columns[:, 2].tolist())
    _note_moves(targets[number] for number in cut if copying.is_plain(targets[number]))
    accelerator.here().synchronize()
    return total


def _note_moves(targets: Iterable[Tensor]) -> None:
    """Increment the version counters, because memmove is no torch operation and leaves them
    alone.
    """
    for target in targets:
        torch.autograd.graph.increment_version(target)


def loads(pieces: Iterable[Piece], dtypes: Sequence[torch.dtype]) -> Iterator[Load]:
    """The chunks that hold `pieces`, each once. `pieces` come in the order of the files."""
    current: Load | None = None
    for piece in pieces:
        size = dtypes[piece.want].itemsize
        begin, end = byte_range(piece, size)
        for chunk in range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            parts = list(blocks(piece, size, chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES))
            if not parts:
                continue
            if current is None or (current.rank, current.chunk) != (piece.rank, chunk):
                if current is not None:
                    yield current
                current = Load(piece.rank, chunk)
            current.parts.extend((piece.want, one) for one in parts)
    if current is not None:
        yield current


def chunk_runs(plan: Plan, targets: Sequence[Tensor], images: Bytes) -> tuple[ChunkRun, ...]:
    """The chunks that `run` may ask for, in its order: all of them, and hardly any other."""
    columns, dims = plan.columns, plan.dims
    if not len(columns):
        return ()
    element = torch.tensor([one.element_size() for one in targets], dtype=torch.int64)
    stride = element[columns[:, 2]]
    first, last = columns[:, 1].clone(), columns[:, 1] + stride - 1
    sizes, low, extent, _ = columns[:, 3:].view(len(columns), 4, dims).unbind(1)
    for dim in reversed(range(dims)):
        held = extent[:, dim] > 0  # 0 is padding
        first += torch.where(held, low[:, dim] * stride, 0)
        last += torch.where(held, (low[:, dim] + extent[:, dim] - 1) * stride, 0)
        stride = torch.where(held, stride * sizes[:, dim], stride)
    spans = torch.stack([columns[:, 0], first // CHUNK_BYTES, last // CHUNK_BYTES + 1], dim=1)
    runs: list[ChunkRun] = []
    for rank, begin, end in torch.unique(spans, dim=0).tolist():
        if images.flat(rank) is not None:
            continue
        if runs and runs[-1].rank == rank and begin <= runs[-1].end:
            begin, end = runs[-1].first, max(end, runs[-1].end)
            runs.pop()
        runs.append(ChunkRun(rank=rank, first=begin, end=end))
    return tuple(runs)


def put(target: Tensor, source: Tensor) -> int:
    """Copy one view into another; returns the bytes."""
    size = source.numel() * source.element_size()
    if _is_move(target, source):
        copying.move(target.data_ptr(), source.data_ptr(), size)
    else:
        with torch.no_grad():
            target.copy_(source)
    return size


def view_of(flat: Tensor, dtype: torch.dtype, block: Block, origin: int) -> Tensor:
    """The needed part of a block, as a view of bytes that begin at byte `origin` of the image."""
    begin = block.begin - origin
    size = math.prod(block.sizes) * dtype.itemsize
    whole = flat[begin : begin + size].view(dtype).view(block.sizes)
    return _narrow(whole, block.low, block.extent)


def _is_move(target: Tensor, source: Tensor) -> bool:
    same = target.dtype == source.dtype
    return same and copying.is_plain(target) and copying.is_plain(source)


def _place(target: Tensor, block: Block) -> Tensor:
    return _narrow(target, block.at, block.extent)


def _narrow(tensor: Tensor, at: Sequence[int], extent: Sequence[int]) -> Tensor:
    for dim, (first, size) in enumerate(zip(at, extent, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, first, size)
    return tensor


def _wholes(
    plan: Plan, targets: Sequence[Tensor], images: Bytes, dtypes: Sequence[torch.dtype]
) -> int:
    """Copy the wholes. Plain memory is copied by address, because making a view often costs more
    than the copy.
    """
    total, moves, copies, moved = 0, [], [], []
    flats = {rank: images.flat(rank) for rank in {one.rank for one in plan.wholes}}
    addresses = {rank: 0 if flat is None else flat.data_ptr() for rank, flat in flats.items()}
    for rank, begin, want in plan.wholes:
        target, dtype = targets[want], dtypes[want]
        size = target.numel() * dtype.itemsize
        total += size
        if target.dtype == dtype and copying.is_plain(target):
            moves.append(copying.Move(target.data_ptr(), addresses[rank] + begin, size))
            moved.append(target)
        else:
            flat, shape = flats[rank], tuple(target.shape)
            assert flat is not None, "wholes are in memory"
            copies.append(copying.Copy(target, flat[begin : begin + size].view(dtype).view(shape)))
    copying.run(copying.Transfers(moves, copies), threads=copying.default_threads())
    _note_moves(moved)
    return total


def _mapped(
    plan: Plan, targets: Sequence[Tensor], images: Bytes, dtypes: Sequence[torch.dtype]
) -> int:
    total, moves, copies = 0, [], []
    for piece in plan.parts():
        flat = images.flat(piece.rank)
        if flat is None:
            continue
        whole = Block(piece.begin, piece.sizes, piece.low, piece.extent, piece.at)
        target = _place(targets[piece.want], whole)
        source = view_of(flat, dtypes[piece.want], whole, 0)
        size = source.numel() * source.element_size()
        total += size
        if _is_move(target, source):
            moves.append(copying.Move(target.data_ptr(), source.data_ptr(), size))
        else:
            copies.append(copying.Copy(target, source))
        if len(moves) + len(copies) >= _MOVES_AT_ONCE:
            copying.run(copying.Transfers(moves, copies), threads=copying.default_threads())
            moves, copies = [], []
    copying.run(copying.Transfers(moves, copies), threads=copying.default_threads())
    return total
