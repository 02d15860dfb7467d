"""Ranks lend each other the images of a step, over torch.distributed.

A pod that is new has nothing, and without `peers` no sidecar serves another pod. But the ranks of
one job can already reach each other: their training does. So the ranks whose sidecars together have
the whole step (`core.vote`: the lenders) show its headers to all, and then send every chunk that a
rank without them wants. This needs no port, no certificate and no operator, and works on any
cluster (ADR 17).

Each chunk goes to all ranks in one broadcast, because the ranks of a pod that is new usually want
the same chunks. A lender sends only bytes that its sidecar has verified.
"""

from __future__ import annotations

import ctypes
import logging
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from keepstep.client.session import Session
from keepstep.errors import SidecarError
from keepstep.image import Layout
from keepstep.image.xxh3 import CHUNK_BYTES
from keepstep.restore.images import Images, W
from keepstep.steps import StepId
from keepstep.wire.trainer import Chunk, ChunkRun, Source, Sources

log = logging.getLogger("keepstep")


class Shown(NamedTuple):
    """What a lender shows of a step. `images`: for each image the source, the compressed header,
    and the bytes of everything that is not a tensor."""

    world: int = 0
    left_out: tuple[int, ...] = ()
    images: tuple[tuple[Source, bytes, bytes], ...] = ()


def show(images: Images) -> Shown:
    """What this rank lends."""
    found = images.sources
    return Shown(
        found.world,
        found.left_out,
        tuple(
            (source, images.header(source.rank), images.extras(source.rank))
            for source in found.sources
        ),
    )


class LentImages(Images):
    """The images that the lenders showed. `wanted`: the chunks that this rank's plan needs."""

    def __init__(self, link: Session, id: StepId, shown: Sequence[Shown | None]) -> None:
        """`shown`: by running rank. Of several lenders of an image, the first lends it."""
        self.wanted: tuple[ChunkRun, ...] = ()
        self._shown = {
            source.rank: (source, header, extras)
            for one in reversed([one for one in shown if one is not None])
            for source, header, extras in one.images
        }
        self._lent: Iterator[tuple[ChunkRun, Tensor]] = iter(())
        left_out = {rank for one in shown if one is not None for rank in one.left_out}
        sources = Sources(
            id=id,
            world=max(one.world for one in shown if one is not None),
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
    def nearness(self) -> list[int]:
        """All are equally far: none is mapped here."""
        return [1] * self.index.world

    def extras(self, rank: int) -> bytes:
        """The bytes of everything in a saved rank's image that is not a tensor."""
        return self._shown[rank][2]

    def announce(self, runs: tuple[ChunkRun, ...]) -> None:
        """Note what the plan needs; the lenders hear of it with all other ranks."""
        self.wanted = runs

    def retract(self) -> None:
        """Nothing to do: all ranks go through all chunks."""

    def comes(self, chunks: Iterator[tuple[ChunkRun, Tensor]]) -> None:
        """From now on, `stream` reads these chunks: all that any rank wants, in order."""
        self._lent = chunks

    def stream(self, wanted: Iterable[W]) -> Iterator[tuple[W, Tensor]]:
        """Each wanted chunk with its bytes. Raises SidecarError if the lender could not read it."""
        for one in wanted:
            at = (one.rank, one.chunk)
            frame = next((flat for run, flat in self._lent if (run.rank, run.first) == at), None)
            if frame is None:
                raise SidecarError(
                    f"step {self._id}: chunk {one.chunk} of rank {one.rank} was not lent",
                    code="not-verified",
                )
            yield one, frame


class Lending:
    """One rank's part in the exchange of chunks, which all ranks go through together."""

    def __init__(
        self,
        shown: Sequence[Shown | None],
        *,
        rank: int,
        own: Images | None,
    ) -> None:
        """`shown`: by running rank. `own`: the images that this rank lends, if it does."""
        self._lender = {
            source.rank: lender
            for lender, one in reversed(list(enumerate(shown)))
            if one is not None
            for source, _, _ in one.images
        }
        self._rank, self._own = rank, own

    def chunks(self, wanted: Iterable[ChunkRun]) -> Iterator[tuple[ChunkRun, Tensor]]:
        """Go through all chunks that any rank wants, in the same order on all ranks.

        Yields each with its bytes; the others only take part. Nothing here may raise before the
        end, because the other ranks would wait: a chunk that cannot be read is not yielded.
        """
        every = sorted({(one.rank, at) for one in wanted for at in range(one.first, one.end)})
        mine = self._read([one for one in every if self._lender.get(one[0]) == self._rank])
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
            log.warning("keepstep: rank %d cannot lend what it showed: %s", self._rank, error)
        for _ in range(left):
            yield b""


def _bytes_in(images: Images | None, chunks: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    if images is None:
        return
    for distant, those in groupby(chunks, key=lambda one: images.flat(one[0]) is None):
        if distant:
            asked = (Chunk(rank=rank, chunk=chunk, frame=0) for rank, chunk in those)
            for _, frame in images.stream(asked):
                yield _bytes_of(frame)
            continue
        for rank, chunk in those:
            flat = images.flat(rank)
            assert flat is not None, "it is mapped"
            yield _bytes_of(flat[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES])


def _bytes_of(flat: Tensor) -> bytes:
    return ctypes.string_at(flat.data_ptr(), flat.numel())
