"""The images of a step, on any tier, and how their bytes come into the tensors of a plan.

A mapped image is a slot in this machine's shared memory, which the sidecar keeps in place: its
bytes are copied in one go. All other images arrive as verified chunks in the frames of one window:
one thread requests chunks for one half of the frames while the caller copies from the other half.
So a rank needs only the memory of one window, however large the images are. Every needed chunk is
requested once, in the order of the files. Rows that are contiguous in both tensors move at the
speed of memory; columns go through torch's strided copy.

Ranks also lend each other images, over torch.distributed. A pod that is new has nothing, and
without `peers` no sidecar serves another pod. But the ranks of one job can already reach each
other: their training does. So the ranks whose sidecars together have the whole step
(`core.restore_vote`: the lenders) show its headers to all, and then send every chunk that a rank
without them wants. This needs no port, no certificate and no operator, and works on any cluster
(ADR 17). Each chunk goes to all ranks in one broadcast, because the ranks of a pod that is new
usually want the same chunks. A lender sends only bytes that its sidecar has verified.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import logging
import math
import mmap
import os
import warnings
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from keepstep.client import copying
from keepstep.client.session import SidecarSession
from keepstep.client.slot import SlotMapping
from keepstep.errors import (
    CoverageError,
    FormatError,
    ImageError,
    KeepstepError,
    SidecarError,
)
from keepstep.image import ControlPage, Layout, Parameters, check_control
from keepstep.image.layout import CHUNK_BYTES
from keepstep.restore.fill_plan import (
    FillPlan,
    ImageIndex,
    IndexBuilder,
    NeededSubBox,
    Piece,
    blocks_in_range,
    byte_range,
)
from keepstep.state import accelerator
from keepstep.steps import NEAREST_FIRST, StepId, Tier
from keepstep.wire.trainer import (
    ChunkBufferRequest,
    ChunkReadRequest,
    ChunkRun,
    ChunksReady,
    ChunksRequest,
    Headers,
    HeadersRequest,
    ImageSource,
    SharedChunkBuffer,
    Sources,
    SourcesRequest,
)

log = logging.getLogger("keepstep")

FRAMES = 6
"""48 MiB: the only buffer of a restore into another layout."""

_HEADERS_AT_ONCE = 64
_CALL_S = 60.0
CHUNKS_S = 600.0
_MAPPED = 0
_NEARNESS = {tier: number for number, tier in enumerate(NEAREST_FIRST, start=1)}


class ChunkRequest(Protocol):
    """A chunk of the image of a saved rank."""

    @property
    def rank(self) -> int: ...
    @property
    def chunk(self) -> int: ...


W = TypeVar("W", bound=ChunkRequest)


class ImageBytes(Protocol):
    """The bytes of the images of one step, on any tier."""

    def mapped_bytes(self, rank: int) -> Tensor | None:
        """The bytes of a mapped image; None for an image that is read in chunks."""

    def iter_chunks(self, requests: Iterable[W]) -> Iterator[tuple[W, Tensor]]:
        """Each wanted chunk with its verified bytes, which stay valid until the next chunk is
        requested."""


class _UnusableError(KeepstepError):
    """A file that the sidecar named is not the expected image."""

    def __init__(self, path: str, why: Exception) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path


class StepImages:
    """The images of one step that were found. `index`: what they hold, one box per row.
    `requested`: the chunks that other ranks are to send."""

    requested: tuple[ChunkRun, ...] = ()

    def __init__(
        self,
        link: SidecarSession,
        found: Sources,
        timeout_s: float = CHUNKS_S,
        own: Sequence[SlotMapping] = (),
    ) -> None:
        """Map what can be mapped, and read all headers.

        `timeout_s`: for one half of the window. `own`: see `has_only_own_image`, mapped already.
        Raises CoverageError if there is no image at all, SidecarError, and KeepstepError for a
        mapped file that is not the expected image (`locate_step` then asks for another copy).
        """
        if not found.sources:
            raise CoverageError(f"step {found.id}: no image of it was found by this rank's sidecar")
        self.sources = found
        self.found = {source.rank: source for source in found.sources}
        self._id = found.id
        self._link = link
        self._own = {mapping.layout.image_index: mapping for mapping in own}
        self._timeout_s = timeout_s
        self._mapped: dict[int, Tensor] = {}
        self._seals: dict[int, tuple[Tensor, bytes]] = {}
        self._skeletons: dict[int, str] = {}
        self._extras_begin: dict[int, int] = {}
        self._parameters: dict[int, Mapping[str, Parameters]] = {}
        last: Mapping[str, Parameters] = {}
        self._window: WindowReader | None = None
        builder = IndexBuilder(found.world)
        for layout in self._layouts():
            builder.add_image(layout)
            self._extras_begin[layout.image_index] = layout.extras_begin
            if layout.is_base:
                continue
            self._skeletons[layout.rank] = layout.skeleton
            # most ranks have equal parameters, so one object serves all of them
            last = last if last == layout.parameters else layout.parameters
            self._parameters[layout.rank] = last
        self.index: ImageIndex = builder.build(found.left_out)

    @classmethod
    def of_slot(
        cls,
        link: SidecarSession,
        slot: SlotMapping,
        control: ControlPage,
        base: SlotMapping | None = None,
    ) -> StepImages:
        """Only this rank's own image, in a slot that was already checked, and the base to which it
        refers."""
        own = (slot,) if base is None else (slot, base)
        sources = tuple(
            ImageSource(
                rank=mapping.layout.image_index,
                tier=Tier.MEMORY,
                bytes=mapping.layout.size_bytes,
                extras_bytes=control.extras_bytes if mapping is slot else 0,
                path=mapping.path,
            )
            for mapping in own
        )
        return cls(
            link, Sources(id=control.step_id, world=slot.layout.world, sources=sources), own=own
        )

    @property
    def has_only_own_image(self) -> bool:
        """Whether there is only this rank's own image, because it has everything that is needed."""
        return bool(self._own)

    @classmethod
    def locate_step(
        cls,
        link: SidecarSession,
        step_id: StepId,
        timeout_s: float = CHUNKS_S,
        *,
        every: bool = False,
    ) -> StepImages:
        """Ask the sidecar where the images are; for thousands of ranks, the answer takes minutes.

        If an image in memory does not verify, its next copy is used instead. `timeout_s`: for this
        answer, and for one half of the window. `every`: include all twins. Raises CoverageError,
        SidecarError.
        """
        bad: tuple[str, ...] = ()
        while True:
            request = SourcesRequest(lease=link.lease_token, id=step_id, bad=bad, every=every)
            found = link.call_apart("/v1/sources", request, Sources, timeout_s=timeout_s)
            try:
                return cls(link, found, timeout_s)
            except _UnusableError as error:
                if error.path in bad:
                    raise SidecarError(f"step {step_id}: {error}", code="not-verified") from error
                log.warning(
                    "keepstep: rank %d: an image of step %s does not verify (%s): another copy is"
                    " asked for [restore.copy_refused]",
                    *(link.rank, step_id, error),
                )
                bad = (*bad, error.path)

    @property
    def nearness_by_rank(self) -> list[int]:
        """Per saved rank, for the planner: a mapped image is nearest."""
        near = [0] * (2 * self.index.world)  # images, then their bases
        for rank, source in self.found.items():
            near[rank] = _MAPPED if source.path else _NEARNESS[source.tier]
        return near

    def mapped_bytes(self, rank: int) -> Tensor | None:
        """The bytes of a mapped image; None for an image that is read in chunks."""
        return self._mapped.get(rank)

    def check_unchanged(self) -> None:
        """Raise SidecarError if a mapped image was overwritten since it was mapped: a sidecar that
        was started again does not know who reads it. Whoever fills a slot takes its seal away
        first."""
        for rank, (page, seal) in self._seals.items():
            if bytes(page.numpy()) != seal:
                text = (
                    f"step {self._id}: the image of rank {rank} was overwritten while it was read"
                )
                raise SidecarError(text, code="not-verified")

    def choose_source_rank(self, rank: int) -> int:
        """The saved rank whose values a running rank takes: its own number (modulo the saved world)
        if that image was found, else a twin's, else the lowest rank that was found."""
        rank %= self.index.world
        if rank in self.found:
            return rank
        twins = (source.rank for source in self.found.values() if rank in source.twins)
        return next(twins, min(self.found))  # never a base: the ranks come first

    def skeleton(self, rank: int) -> str:
        """The tree of a saved rank's state."""
        return self._skeletons[rank]

    def header(self, rank: int) -> bytes:
        """The header of a saved rank's image, compressed."""
        flat = self.mapped_bytes(rank)
        if flat is None:
            request = HeadersRequest(lease=self._link.lease_token, id=self._id, ranks=(rank,))
            answer = self._link.call_apart("/v1/headers", request, Headers, timeout_s=_CALL_S)
            return base64.b64decode(answer.headers[0])
        view = memoryview((ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr()))
        return zlib.compress(Layout.parse(view, size_bytes=len(view)).header, 1)

    def read_optimizer_parameters(self, rank: int, optimizer: str) -> Parameters:
        """The parameters of an optimizer, from a saved rank's image; none if the component was no
        optimizer there."""
        return self._parameters[rank].get(optimizer, ())

    def list_optimizer_parameters(self, optimizer: str) -> Parameters:
        """The parameters of an optimizer in all images; each distinct list appears once."""
        rows = {id(parameter): parameter for parameter in self._parameters.values()}
        return tuple(
            row for by_optimizer in rows.values() for row in by_optimizer.get(optimizer, ())
        )

    def extras(self, rank: int) -> bytes:
        """The bytes of everything in a saved rank's image that is not a tensor."""
        begin, size = self._extras_begin[rank], self.found[rank].extras_bytes
        mapped = self.mapped_bytes(rank)
        if mapped is not None:
            return _bytes_of(mapped[begin : begin + size])
        chunks = range(begin // CHUNK_BYTES, -(-(begin + size) // CHUNK_BYTES))
        parts = []
        for chunk, frame in self.iter_chunks(
            ChunkReadRequest(rank=rank, chunk=chunk, frame=0) for chunk in chunks
        ):
            first = max(begin - chunk.chunk * CHUNK_BYTES, 0)
            last = min(begin + size - chunk.chunk * CHUNK_BYTES, CHUNK_BYTES)
            parts.append(_bytes_of(frame[first:last]))
        return b"".join(parts)

    def iter_chunks(self, requests: Iterable[W]) -> Iterator[tuple[W, Tensor]]:
        """Each wanted chunk with its verified bytes, which stay valid until the next chunk is
        requested.

        Raises SidecarError, with the code `not-verified` for a chunk of which every copy is
        damaged.
        """
        chunks = iter(requests)
        for first in chunks:
            yield from self._reader().iter_chunks(chain((first,), chunks))

    def set_chunk_stream(self, chunks: Iterator[tuple[ChunkRun, Tensor]]) -> None:
        """What was `requested` comes from these chunks."""

    def announce_needed_chunks(self, runs: tuple[ChunkRun, ...]) -> None:
        """Announce the chunks that will be requested, in this order.

        The sidecar then reads a chunk only once, even if several ranks of the node want it. Raises
        SidecarError.
        """
        if runs:
            self._reader().announce(runs)

    def announce_no_more_chunks(self) -> None:
        """Say that no more chunks will be requested, so that no other rank waits for this one."""
        if self._window is not None:
            with contextlib.suppress(KeepstepError):
                self._window.announce(())

    def _reader(self) -> WindowReader:
        if self._window is None:
            self._window = WindowReader(self._link, self._id, timeout_s=self._timeout_s)
        return self._window

    def close(self) -> None:
        """Release the window and the mapped images. Nothing can be read afterwards."""
        self._mapped.clear()
        self._seals.clear()
        self._window, self._own = None, {}

    def _layouts(self) -> Iterator[Layout]:
        distant = [source.rank for source in self.found.values() if not source.path]
        for source in self.found.values():
            if source.path:
                yield self._map(source)
        for at in range(0, len(distant), _HEADERS_AT_ONCE):
            yield from self._headers(distant[at : at + _HEADERS_AT_ONCE])

    def _map(self, source: ImageSource) -> Layout:
        if (own := self._own.get(source.rank)) is not None:
            self._note_mapped(own.layout, torch.frombuffer(own.memory, dtype=torch.uint8))
            return own.layout
        try:
            flat, view = map_image(source.path)
            layout = Layout.parse(view, size_bytes=len(view))
            control = ControlPage.from_bytes(view[layout.control_begin :])
            # a base is of the step that first referred to it
            step_id = None if layout.is_base else self._id
            check_control(control, layout, step_id=step_id, path=source.path)
            self._check_rank(layout, source.rank)
        except (ImageError, OSError) as error:
            raise _UnusableError(source.path, error) from error
        self._note_mapped(layout, flat)
        return layout

    def _note_mapped(self, layout: Layout, flat: Tensor) -> None:
        page = flat[layout.control_begin : layout.size_bytes]
        self._mapped[layout.image_index] = flat
        self._seals[layout.image_index] = page, bytes(page.numpy())

    def _headers(self, ranks: Sequence[int]) -> Iterator[Layout]:
        request = HeadersRequest(lease=self._link.lease_token, id=self._id, ranks=tuple(ranks))
        answer = self._link.call_apart("/v1/headers", request, Headers, timeout_s=_CALL_S)
        for rank, text in zip(ranks, answer.headers, strict=True):
            layout = Layout.parse(zlib.decompress(base64.b64decode(text)))
            self._check_rank(layout, rank)
            yield layout

    def _check_rank(self, layout: Layout, rank: int) -> None:
        if layout.image_index != rank:
            raise FormatError(
                f"step {self._id}: the image of rank {layout.image_index} was given as that of"
                f" {rank}"
            )


class WindowReader:
    """Reads verified chunks through shared memory; half of the frames are filled ahead of the
    reader."""

    def __init__(
        self, link: SidecarSession, step_id: StepId, *, timeout_s: float = CHUNKS_S
    ) -> None:
        request = ChunkBufferRequest(lease=link.lease_token, frames=FRAMES)
        window = link.call_apart("/v1/window", request, SharedChunkBuffer, timeout_s=_CALL_S)
        self._link, self._id, self._timeout_s = link, step_id, timeout_s
        self._half = max(1, window.frames // 2)
        self._frame_bytes = window.frame_bytes
        self._flat, _ = map_image(window.path)

    def announce(self, runs: tuple[ChunkRun, ...]) -> None:
        """See `StepImages.announce_needed_chunks`."""
        request = ChunksRequest(
            lease=self._link.lease_token, id=self._id, chunks=(), announced=runs
        )
        self._link.call_apart("/v1/chunks", request, ChunksReady, timeout_s=_CALL_S)

    def iter_chunks(self, requests: Iterable[W]) -> Iterator[tuple[W, Tensor]]:
        """See `StepImages.iter_chunks`. Leaves no request behind, even if the caller stops
        early."""
        chunks = iter(requests)
        flying: deque[tuple[list[W], int, Future[None]]] = deque()
        with ThreadPoolExecutor(1, thread_name_prefix="keepstep-fetch") as pool:
            side = 0
            while batch := list(islice(chunks, self._half)):
                first = side * self._half
                flying.append((batch, first, pool.submit(self._fetch, batch, first)))
                side = 1 - side
                # the other half is free only once everything in it has been read
                if len(flying) == 2:
                    yield from self._arrived(*flying.popleft())
            while flying:
                yield from self._arrived(*flying.popleft())

    def _arrived(
        self, batch: list[W], first: int, done: Future[None]
    ) -> Iterator[tuple[W, Tensor]]:
        done.result()
        for frame, chunk in enumerate(batch, first):
            begin = frame * self._frame_bytes
            yield chunk, self._flat[begin : begin + CHUNK_BYTES]

    def _fetch(self, batch: list[W], first: int) -> None:
        chunks = tuple(
            ChunkReadRequest(rank=chunk.rank, chunk=chunk.chunk, frame=frame)
            for frame, chunk in enumerate(batch, first)
        )
        request = ChunksRequest(
            lease=self._link.lease_token, id=self._id, chunks=chunks, timeout_s=self._timeout_s
        )
        self._link.call_apart("/v1/chunks", request, ChunksReady, timeout_s=self._timeout_s + 10)


def map_image(path: str) -> tuple[Tensor, memoryview]:
    """The bytes of a file, read-only, as a tensor and a view. Both keep the mapping alive.

    Raises OSError, and FormatError for an empty file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if not size:
            raise FormatError("an empty file is no image", path=path)
        mapped = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
    with warnings.catch_warnings():
        # torch cannot mark a tensor read-only; nothing here writes to it
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8), memoryview(mapped)


_MOVES_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class NeededChunkBlocks:
    """What is needed from one chunk: pairs of the number of a wanted tensor and a block."""

    rank: int
    chunk: int
    parts: list[tuple[int, NeededSubBox]] = field(default_factory=list)


def fill_targets(
    plan: FillPlan,
    targets: Sequence[Tensor],
    images: ImageBytes,
    dtypes: Sequence[torch.dtype] | None = None,
) -> int:
    """Fill `targets` (one per want, with the shape of its box); returns the bytes copied.

    `dtypes`: the saved dtypes, if a target may have another one and gets the values converted.
    Raises SidecarError if a chunk cannot be had. Some tensors have changed by then, so the caller
    must restore another step, or stop.
    """
    dtypes = [target.dtype for target in targets] if dtypes is None else dtypes
    plain = [copying.is_plain(target) for target in targets]
    total = _mapped(plan, targets, images, dtypes, plain)
    for load, frame in images.iter_chunks(_distant(plan, dtypes, images)):
        for number, block in load.parts:
            source = block_view(frame, dtypes[number], block, load.chunk * CHUNK_BYTES)
            total += copy_view(_place(targets[number], block), source)
    for target, is_plain in zip(targets, plain, strict=True):
        if is_plain and target.numel():  # memmove is no operation of torch
            torch.autograd.graph.increment_version(target)
    accelerator.current_accelerator().synchronize()
    return total


def chunk_loads(
    pieces: Iterable[Piece], dtypes: Sequence[torch.dtype]
) -> Iterator[NeededChunkBlocks]:
    """The chunks that hold `pieces`, each once. `pieces` come in the order of the files."""
    current: NeededChunkBlocks | None = None
    for piece in pieces:
        size = dtypes[piece.request].itemsize
        begin, end = byte_range(piece, size)
        for chunk in range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            parts = list(
                blocks_in_range(piece, size, chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES)
            )
            if not parts:
                continue
            if current is None or (current.rank, current.chunk) != (piece.rank, chunk):
                if current is not None:
                    yield current
                current = NeededChunkBlocks(piece.rank, chunk)
            current.parts.extend((piece.request, part) for part in parts)
    if current is not None:
        yield current


def list_chunks_in_plan_order(
    plan: FillPlan, dtypes: Sequence[torch.dtype], images: ImageBytes
) -> tuple[ChunkRun, ...]:
    """The chunks that `fill_targets` will ask for, in its order."""
    runs: list[ChunkRun] = []
    for load in _distant(plan, dtypes, images):
        first, end = load.chunk, load.chunk + 1
        if runs and (runs[-1].rank, runs[-1].end) == (load.rank, load.chunk):
            first = runs.pop().first
        runs.append(ChunkRun(rank=load.rank, first=first, end=end))
    return tuple(runs)


def _distant(
    plan: FillPlan, dtypes: Sequence[torch.dtype], images: ImageBytes
) -> Iterator[NeededChunkBlocks]:
    """What is needed of images that are not mapped."""
    return chunk_loads(
        (part for part in plan.iterate_partial_pieces() if images.mapped_bytes(part.rank) is None),
        dtypes,
    )


def copy_view(target: Tensor, source: Tensor) -> int:
    """Copy one view into another; returns the bytes."""
    size = source.numel() * source.element_size()
    if _is_move(target, source):
        copying.copy_bytes(target.data_ptr(), source.data_ptr(), size)
    else:
        with torch.no_grad():
            target.copy_(source)
    return size


def block_view(flat: Tensor, dtype: torch.dtype, block: NeededSubBox, origin: int) -> Tensor:
    """The needed part of a block, as a view of bytes that begin at byte `origin` of the image."""
    begin = block.begin - origin
    size = math.prod(block.sizes) * dtype.itemsize
    whole = flat[begin : begin + size].view(dtype).view(block.sizes)
    return _narrow(whole, block.low, block.extent)


def _is_move(target: Tensor, source: Tensor) -> bool:
    same = target.dtype == source.dtype
    return same and copying.is_plain(target) and copying.is_plain(source)


def _place(target: Tensor, block: NeededSubBox) -> Tensor:
    return _narrow(target, block.at, block.extent)


def _narrow(tensor: Tensor, at: Sequence[int], extent: Sequence[int]) -> Tensor:
    for dim, (first, size) in enumerate(zip(at, extent, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, first, size)
    return tensor


def _mapped(
    plan: FillPlan,
    targets: Sequence[Tensor],
    images: ImageBytes,
    dtypes: Sequence[torch.dtype],
    plain: Sequence[bool],
) -> int:
    """Copy what lies in mapped images. A whole tensor of plain memory is copied by address, because
    making a view often costs more than the copy."""
    total = 0
    moves: list[copying.MemoryMove] = []
    copies: list[copying.TensorCopy] = []
    for piece in plan.pieces():
        flat = images.mapped_bytes(piece.rank)
        if flat is None:
            continue
        target, dtype = targets[piece.request], dtypes[piece.request]
        size = math.prod(piece.extent) * dtype.itemsize
        total += size
        is_whole = piece.extent == piece.sizes == target.shape
        if is_whole and plain[piece.request] and target.dtype == dtype:
            moves.append(copying.MemoryMove(target.data_ptr(), flat.data_ptr() + piece.begin, size))
        else:
            whole = NeededSubBox(piece.begin, piece.sizes, piece.low, piece.extent, piece.at)
            part, source = _place(target, whole), block_view(flat, dtype, whole, 0)
            if _is_move(part, source):
                moves.append(copying.MemoryMove(part.data_ptr(), source.data_ptr(), size))
            else:
                copies.append(copying.TensorCopy(part, source))
        if len(moves) + len(copies) >= _MOVES_AT_ONCE:
            copying.run_transfers(
                copying.Transfers(moves, copies), threads=copying.default_threads()
            )
            moves, copies = [], []
    copying.run_transfers(copying.Transfers(moves, copies), threads=copying.default_threads())
    return total


class LentStepMetadata(NamedTuple):
    """What a lender shows of a step. `images`: for each image the source, the compressed header,
    and the bytes of everything that is not a tensor."""

    world: int = 0
    left_out: tuple[int, ...] = ()
    images: tuple[tuple[ImageSource, bytes, bytes], ...] = ()


def lend_images(images: StepImages) -> LentStepMetadata:
    """What this rank lends."""
    found = images.sources
    return LentStepMetadata(
        found.world,
        found.left_out,
        tuple(
            (source, images.header(source.rank), images.extras(source.rank))
            for source in found.sources
        ),
    )


class ImagesLentByRanks(StepImages):
    """The images that the lenders showed. `requested`: the chunks that this rank's plan needs."""

    def __init__(
        self, link: SidecarSession, step_id: StepId, shown: Sequence[LentStepMetadata | None]
    ) -> None:
        """`shown`: by running rank. Of several lenders of an image, the first lends it."""
        self._shown = {
            source.rank: (source, header, extras)
            for answer in reversed([reply for reply in shown if reply is not None])
            for source, header, extras in answer.images
        }
        self._lent: Iterator[tuple[ChunkRun, Tensor]] = iter(())
        left_out = {rank for reply in shown if reply is not None for rank in reply.left_out}
        sources = Sources(
            id=step_id,
            world=max(reply.world for reply in shown if reply is not None),
            sources=tuple(self._shown[rank][0] for rank in sorted(self._shown)),
            left_out=tuple(sorted(left_out - self._shown.keys())),
        )
        super().__init__(link, sources)

    def _layouts(self) -> Iterator[Layout]:
        for rank in sorted(self._shown):
            layout = Layout.parse(zlib.decompress(self._shown[rank][1]))
            self._check_rank(layout, rank)
            yield layout

    @property
    def nearness_by_rank(self) -> list[int]:
        """All are equally far: none is mapped here."""
        return [1] * (2 * self.index.world)

    def extras(self, rank: int) -> bytes:
        """The bytes of everything in a saved rank's image that is not a tensor."""
        return self._shown[rank][2]

    def announce_needed_chunks(self, runs: tuple[ChunkRun, ...]) -> None:
        """Note what the plan needs; the lenders hear of it with all other ranks."""
        self.requested = runs

    def set_chunk_stream(self, chunks: Iterator[tuple[ChunkRun, Tensor]]) -> None:
        """From now on, `stream` reads these chunks: all that any rank wants, in order."""
        self._lent = chunks

    def iter_chunks(self, requests: Iterable[W]) -> Iterator[tuple[W, Tensor]]:
        """Each wanted chunk with its bytes. Raises SidecarError if the lender could not read it."""
        for chunk in requests:
            at = (chunk.rank, chunk.chunk)
            frame = next((flat for run, flat in self._lent if (run.rank, run.first) == at), None)
            if frame is None:
                raise SidecarError(
                    f"step {self._id}: chunk {chunk.chunk} of rank {chunk.rank} was not lent",
                    code="not-verified",
                )
            yield chunk, frame


class ChunkExchange:
    """One rank's part in the exchange of chunks, which all ranks go through together."""

    def __init__(
        self,
        shown: Sequence[LentStepMetadata | None],
        *,
        rank: int,
        own: StepImages | None,
    ) -> None:
        """`shown`: by running rank. `own`: the images that this rank lends, if it does."""
        self._lender = {
            source.rank: lender
            for lender, reply in reversed(list(enumerate(shown)))
            if reply is not None
            for source, _, _ in reply.images
        }
        self._rank, self._own = rank, own

    def iter_needed_chunks(self, runs: Iterable[ChunkRun]) -> Iterator[tuple[ChunkRun, Tensor]]:
        """Go through all chunks that any rank wants, in the same order on all ranks.

        Yields each with its bytes; the others only take part. Nothing here may raise before the
        end, because the other ranks would wait: a chunk that cannot be read is not yielded.
        """
        every = sorted({(run.rank, at) for run in runs for at in range(run.first, run.end)})
        mine = self._read([pair for pair in every if self._lender.get(pair[0]) == self._rank])
        for rank, chunk in every:
            lender = self._lender.get(rank)
            if lender is None:
                continue
            sent = [next(mine) if lender == self._rank else b""]
            torch.distributed.broadcast_object_list(sent, src=lender)
            if sent[0]:
                run = ChunkRun(rank=rank, first=chunk, end=chunk + 1)
                yield run, torch.frombuffer(bytearray(sent[0]), dtype=torch.uint8)

    def _read(self, chunks: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """The bytes of these chunks; b"" for each that cannot be read."""
        left = len(chunks)
        try:
            for sent in _bytes_in(self._own, chunks):
                left -= 1
                yield sent
        except Exception as error:  # of any kind: the other ranks are waiting
            log.warning(
                "keepstep: rank %d cannot send its shard to the other ranks: %s"
                " [restore.shard_send_failed]",
                *(self._rank, error),
            )
        for _ in range(left):
            yield b""


def _bytes_in(images: StepImages | None, chunks: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    if images is None:
        return
    for distant, those in groupby(chunks, key=lambda chunk: images.mapped_bytes(chunk[0]) is None):
        if distant:
            asked = (ChunkReadRequest(rank=rank, chunk=chunk, frame=0) for rank, chunk in those)
            for _, frame in images.iter_chunks(asked):
                yield _bytes_of(frame)
            continue
        for rank, chunk in those:
            flat = images.mapped_bytes(rank)
            assert flat is not None, "it is mapped"
            yield _bytes_of(flat[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES])


def _bytes_of(flat: Tensor) -> bytes:
    return ctypes.string_at(flat.data_ptr(), flat.numel())
