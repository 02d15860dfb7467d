"""The manifest of a shard: header, digest table and control page, checked together.

The seal vouches for the control page, the page for the table, and the table for every chunk. So
with a `Manifest` any chunk can be verified on its own, wherever it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from keepstep.core.shard import Shard
from keepstep.errors import DigestError, ForeignError, FormatError, ImageError, TornError
from keepstep.image.control import ControlPage
from keepstep.image.headers import PAGE_BYTES
from keepstep.image.layout import Layout
from keepstep.image.tensors import Section
from keepstep.image.verify import (
    Read,
    check_chunk,
    check_control,
    check_table,
    chunk_bounds,
    layout_from,
)
from keepstep.image.xxh3 import DIGEST_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The manifest of one sealed shard. `closing`: digest table and control page, as the shard's
    bytes."""

    layout: Layout
    control: ControlPage
    closing: bytes

    @classmethod
    def read(
        cls,
        read: Read,
        size_bytes: int,
        *,
        run: str | None = None,
        shard: Shard | None = None,
        path: Path | str,
    ) -> Manifest:
        """The manifest of a shard of `size_bytes`, in two or three reads.

        `run`, `shard`: the shard that it must be, if known. Raises ImageError and its subclasses,
        naming `path`, and whatever `read` raises.
        """
        try:
            layout = layout_from(read, size_bytes)
            closing = read(layout.digests_begin, layout.size_bytes)
            return cls._checked(layout, closing, run=run, shard=shard)
        except ImageError as error:
            raise type(error)(error.reason, path=error.path or path) from None

    @classmethod
    def parse(
        cls, data: bytes | memoryview, *, run: str, shard: Shard, path: Path | str
    ) -> Manifest:
        """Inverse of `to_bytes`. Raises ImageError and its subclasses, naming `path`."""
        try:
            layout = Layout.parse(data)
            closing = bytes(data[len(layout.header) :])
            if len(closing) != layout.size_bytes - layout.digests_begin:
                raise FormatError(f"{len(data)} bytes are not header, table and control page")
            return cls._checked(layout, closing, run=run, shard=shard)
        except ImageError as error:
            raise type(error)(error.reason, path=error.path or path) from None

    @classmethod
    def _checked(
        cls, layout: Layout, closing: bytes, *, run: str | None, shard: Shard | None
    ) -> Manifest:
        control = ControlPage.from_bytes(closing[-PAGE_BYTES:])
        check_control(control, layout, run=run, id=shard.step_id if shard else None)
        if shard is not None and (control.rank, control.world) != (shard.rank, shard.world):
            raise ForeignError(
                f"holds rank {control.rank} of {control.world}, not rank {shard.rank} of"
                f" {shard.world}"
            )
        if control.root is None or control.sections is None:
            raise TornError("sealed in memory only: it has no digests")
        if shard is not None and shard.root not in (None, control.root):
            raise DigestError(f"its root is {control.root}, but {shard.root} was promised")
        manifest = cls(layout=layout, control=control, closing=closing)
        check_table(control, layout, manifest.table)
        return manifest

    @property
    def table(self) -> memoryview:
        return memoryview(self.closing)[:-PAGE_BYTES]

    @property
    def page(self) -> memoryview:
        return memoryview(self.closing)[-PAGE_BYTES:]

    @property
    def shard(self) -> Shard:
        return Shard(
            step_id=self.control.id,
            rank=self.control.rank,
            world=self.control.world,
            size_bytes=self.layout.size_bytes,
            root=self.control.root,
            params_digest=(self.control.sections or {}).get(Section.PARAMS.value),
            alike=self.layout.alike,
            written_at=self.control.written_at,
        )

    @property
    def chunks(self) -> range:
        return range(self.layout.chunk_count)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """`[begin, end)` of a chunk."""
        return chunk_bounds(self.layout, chunk)

    def digest(self, chunk: int) -> bytes:
        """The digest of a chunk, from the table."""
        return bytes(self.table[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES])

    def check(self, chunk: int, data: memoryview, *, path: Path | str | None = None) -> None:
        """Check that `data` is this chunk. Raises DigestError, naming `path`."""
        check_chunk(self.layout, chunk, data, self.table, path=path)

    def to_bytes(self) -> bytes:
        """Header, digest table and control page, concatenated."""
        return self.layout.header + self.closing
