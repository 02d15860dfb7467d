"""What an image is, that it is complete, and that its bytes did not change.

The control page is the last 4096 bytes of an image. It is written last, and zeroed before any other
byte of the image changes. So a page with a valid seal means that every byte before it was in place.
In memory, the trainer writes it without digests. For the drive, the sidecar adds `root` and
`sections` and writes the page after the data was flushed.

Every byte of a sealed shard is covered: the seal covers the control page, the page's `root` covers
the digest table, and the table covers every chunk before it, including the header. So with a
`Manifest` (header, table and page, checked together) any chunk can be verified on its own, wherever
it comes from. An image that was only staged has a seal but no digests, because it stays in the
memory that it was written to.

No function here holds the GIL for long or allocates in proportion to the size of the image: chunks
are digested in place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keepstep.core.shard import Shard
from keepstep.errors import (
    DigestError,
    ForeignError,
    FormatError,
    ImageError,
    TornError,
    UsageError,
    few,
)
from keepstep.image import strictjson
from keepstep.image.layout import (
    CHUNK_BYTES,
    FORMAT_VERSION,
    PAGE_BYTES,
    Layout,
    blake2b_digest,
    check_version,
    read_length,
    reserved_names,
)
from keepstep.image.strictjson import error_text, quote_text
from keepstep.image.tensor_specs import TensorRole
from keepstep.image.xxh3 import DIGEST_BYTES, xxh3_128
from keepstep.steps import Epoch, EpochId, StepId

_SEAL_BEGIN = PAGE_BYTES - 32
"""Up to here, JSON padded with spaces; then the seal in hex. Both can be read with `tail -c`."""

_ZERO_PAGE = bytes(PAGE_BYTES)


def _seal_of(text: bytes) -> bytes:
    return blake2b_digest(text).hex().encode()


@dataclass(frozen=True, kw_only=True)
class BaseRef:
    """How the image of a step names the base that holds the rest of its rank's state.

    `step`: the first step that referred to it; the base's own control page says the same. `layout`:
    the id of the base's layout. `size_bytes`: of the base. `root`: its root; None in an image that
    was only staged.
    """

    step: StepId
    layout: str
    size_bytes: int
    root: str | None = None

    @classmethod
    def of(cls, control: ControlPage, layout: Layout) -> BaseRef:
        """How to name this base."""
        return cls(
            step=control.step_id, layout=layout.id, size_bytes=layout.size_bytes, root=control.root
        )

    def matches_control_page(self, control: ControlPage | None) -> bool:
        """Whether this is the control page of the base; its root is compared if both have one."""
        if control is None or (control.step_id, control.layout) != (self.step, self.layout):
            return False
        return None in (self.root, control.root) or self.root == control.root

    def to_tree(self) -> dict[str, Any]:
        """As in the control page of a step's image."""
        return {
            "step": str(self.step),
            "layout": self.layout,
            "bytes": self.size_bytes,
            "root": self.root,
        }

    @classmethod
    def from_tree(cls, value: object) -> BaseRef | None:
        """Inverse of `to_tree`; None is none. Raises FormatError, KeyError, ValueError."""
        if value is None:
            return None
        tree = strictjson.as_mapping(value, "base")
        return cls(
            step=StepId.parse(strictjson.as_text(tree["step"], "base")),
            layout=strictjson.as_digest(tree["layout"], "base"),
            size_bytes=_count(tree, "bytes"),
            root=None if tree["root"] is None else strictjson.as_digest(tree["root"], "base"),
        )


@dataclass(frozen=True, kw_only=True)
class ControlPage:
    """What an image is. Times in unix seconds; digests in hex.

    `layout`: the layout's id. `root`: the digest of the digest table. `sections`: a digest for each
    section, see `keepstep.image.control_page.section_digests`. Both are None in an image that was
    only staged. `base`: the base of this image; None if the image is whole, or is a base itself.
    """

    run: str
    layout: str
    epoch: Epoch
    rank: int
    world: int
    step: int
    extras_bytes: int
    staged_at: float
    format_version: int = FORMAT_VERSION
    written_at: float | None = None
    root: str | None = None
    sections: Mapping[str, str] | None = None
    base: BaseRef | None = None

    @classmethod
    def staged(
        cls,
        layout: Layout,
        *,
        run: str,
        epoch: Epoch,
        step: int,
        extras_bytes: int,
        staged_at: float,
        base: BaseRef | None = None,
    ) -> ControlPage:
        """The control page of a staged image of this layout, without digests."""
        return cls(
            run=run,
            layout=layout.id,
            epoch=epoch,
            rank=layout.rank,
            world=layout.world,
            step=step,
            extras_bytes=extras_bytes,
            staged_at=staged_at,
            base=base,
        )

    @property
    def step_id(self) -> StepId:
        """The step, with its epoch."""
        return StepId(self.epoch.id, self.step)

    @property
    def base_shard(self) -> Shard | None:
        """The base to which this image refers, as a shard; None without one."""
        if (ref := self.base) is None:
            return None
        return Shard(
            step_id=ref.step,
            rank=self.rank,
            world=self.world,
            size_bytes=ref.size_bytes,
            root=ref.root,
        )

    def to_bytes(self) -> bytes:
        """The whole page. Raises FormatError if the content does not fit (a run's name of
        kilobytes)."""
        parent = self.epoch.parent
        text = json.dumps(
            {
                "format_version": self.format_version,
                "run": self.run,
                "epoch": str(self.epoch.id),
                "parent": None if parent is None else str(parent),
                "step": self.step,
                "rank": self.rank,
                "world": self.world,
                "layout": self.layout,
                "extras_bytes": self.extras_bytes,
                "staged_at": self.staged_at,
                "written_at": self.written_at,
                "root": self.root,
                "sections": None if self.sections is None else dict(self.sections),
                **({} if self.base is None else {"base": self.base.to_tree()}),
            },
            separators=(",", ":"),
            allow_nan=False,
        ).encode()
        if len(text) > _SEAL_BEGIN:
            raise FormatError(f"a control page of {len(text)} bytes: the run's name is too long")
        text = text.ljust(_SEAL_BEGIN)
        return text + _seal_of(text)

    @classmethod
    def from_bytes(cls, buffer: bytes | memoryview) -> ControlPage:
        """Inverse of `to_bytes`.

        Raises TornError without a valid seal; VersionError for a newer format; FormatError for a
        page with a valid seal whose content is not of this format.
        """
        page = bytes(buffer[:PAGE_BYTES])
        if page == _ZERO_PAGE:
            raise TornError("no image: the control page is zeroed")
        if page[_SEAL_BEGIN:] != _seal_of(page[:_SEAL_BEGIN]):
            raise TornError("no valid seal: the image was never completed")
        tree = strictjson.loads(page[:_SEAL_BEGIN], what="control page")
        if not isinstance(tree, dict):
            raise FormatError("control page: not a JSON object")
        check_version(tree.get("format_version"))
        try:
            return _from_tree(tree)
        except FormatError as error:
            raise FormatError(f"control page: {error.reason}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"control page: {error_text(error)}") from None


def _from_tree(tree: dict[str, Any]) -> ControlPage:
    parent, sections, written_at = tree["parent"], tree["sections"], tree["written_at"]
    world = _count(tree, "world")
    rank = _count(tree, "rank")
    if rank >= world:
        raise ValueError(f"rank {rank} of {world}")
    epoch = EpochId.parse(strictjson.as_text(tree["epoch"], "epoch"))
    return ControlPage(
        run=_run(tree["run"]),
        layout=strictjson.as_digest(tree["layout"], "layout"),
        epoch=Epoch(
            epoch,
            None if parent is None else StepId.parse(strictjson.as_text(parent, "parent")),
        ),
        rank=rank,
        world=world,
        step=StepId(epoch, _count(tree, "step")).step,
        extras_bytes=_count(tree, "extras_bytes"),
        staged_at=strictjson.as_time(tree["staged_at"], "staged_at"),
        format_version=_count(tree, "format_version"),
        written_at=None if written_at is None else strictjson.as_time(written_at, "written_at"),
        root=None if tree["root"] is None else strictjson.as_digest(tree["root"], "root"),
        sections=None
        if sections is None
        else {name: strictjson.as_digest(value, name) for name, value in dict.items(sections)},
        base=BaseRef.from_tree(tree.get("base")),
    )


def _run(value: object) -> str:
    """The run's name, checked because it becomes the name of a directory and is printed."""
    text = strictjson.as_text(value, "run")
    if text in ("", ".", "..") or "/" in text or not text.isprintable():
        raise ValueError(f"{quote_text(value)} is not the name of a run")
    return text


def _count(tree: dict[str, Any], key: str) -> int:
    return strictjson.as_integer(tree[key], key, 0, strictjson.MAX_BYTES)


_FIRST_BYTES = 64 << 10
"""Bytes of the first read. Most headers are shorter; longer ones need a second read."""

Read = Callable[[int, int], bytes]
"""Returns all bytes `[begin, end)` of a shard."""


# --- reading -----------------------------------------------------------------------------------


def read_layout_with(read: Read, size_bytes: int) -> Layout:
    """The layout of a shard of `size_bytes`, in one read or two.

    Raises TornError for a truncated shard, FormatError, VersionError, and whatever `read` raises.
    """
    first = read(0, min(_FIRST_BYTES, size_bytes))
    if len(first) < 8:
        raise TornError(f"truncated: {len(first)} bytes cannot hold an image")
    length = read_length(first)
    if length > size_bytes:  # a hostile length must not allocate more than the file's size
        raise TornError(f"truncated: {size_bytes} bytes of a header of {length}")
    if length > len(first):
        first += read(len(first), length)
    return Layout.parse(first[:length], size_bytes=size_bytes)


def read_layout(fd: int) -> Layout:
    """The layout of an open shard. Raises as `read_layout_with` does, and OSError."""
    return read_layout_with(lambda at, end: os.pread(fd, end - at, at), os.fstat(fd).st_size)


def read_control(fd: int, layout: Layout) -> ControlPage:
    """The control page of an open shard with this layout, after a check of its seal and that it
    belongs to this layout. Raises TornError, FormatError, ForeignError, VersionError, OSError."""
    control = ControlPage.from_bytes(os.pread(fd, PAGE_BYTES, layout.control_begin))
    check_control(control, layout)
    return control


# --- digests -----------------------------------------------------------------------------------


def chunk_bounds(layout: Layout, chunk: int) -> tuple[int, int]:
    """`[begin, end)` of a chunk; the last one ends where the digest table begins."""
    begin = chunk * CHUNK_BYTES
    return begin, min(begin + CHUNK_BYTES, layout.digests_begin)


def digest_table(layout: Layout, digests: Sequence[bytes]) -> bytes:
    """The digest table: one digest for each chunk, then zeros up to whole pages. Raises UsageError
    unless there is exactly one digest for each chunk, because such an image would be sealed but
    could never be verified."""
    if [len(digest) for digest in digests] != [DIGEST_BYTES] * layout.chunk_count:
        raise UsageError(f"{len(digests)} digests, not one for each of {layout.chunk_count} chunks")
    return b"".join(digests).ljust(layout.control_begin - layout.digests_begin, b"\0")


def section_digests(layout: Layout, view: memoryview, table: bytes) -> dict[str, str]:
    """A digest (hex) for each section that has bytes. With a known table it costs almost nothing.

    It is the xxh3_128 of a row of 16-byte pieces, one for each chunk that each extent of the
    section touches: the table's digest if the whole chunk lies in the extent, else the digest of
    the fragment.
    """
    return {
        section.value: xxh3_128(b"".join(_pieces(layout, view, table, extents))).hex()
        for section, extents in layout.section_extents.items()
    }


def _pieces(
    layout: Layout, view: memoryview, table: bytes, extents: tuple[tuple[int, int], ...]
) -> Iterator[bytes]:
    for begin, end in extents:
        for chunk in range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            first, last = chunk_bounds(layout, chunk)
            if begin <= first and last <= end:
                yield table[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]
            else:
                yield xxh3_128(view[max(begin, first) : min(end, last)])


def seal_for_disk(
    layout: Layout,
    view: memoryview,
    control: ControlPage,
    *,
    digests: Sequence[bytes],
) -> tuple[bytes, bytes]:
    """(digest table, control page) for the shard of a staged image, as bytes.

    `digests`: of all chunks, in order. The control page MUST be written after everything else was
    flushed. The caller must set `control.written_at`.
    """
    table = digest_table(layout, digests)
    sealed = replace(
        control, root=xxh3_128(table).hex(), sections=section_digests(layout, view, table)
    )
    return table, sealed.to_bytes()


# --- verifying ---------------------------------------------------------------------------------


def check_control(
    control: ControlPage,
    layout: Layout,
    *,
    run: str | None = None,
    step_id: StepId | None = None,
    path: Path | str | None = None,
) -> None:
    """Check that a control page belongs to this layout, and to `run` and `step_id` if they are
    given.

    Raises ForeignError if not, and FormatError for extras longer than their region.
    """
    expected = [
        ("layout", control.layout, layout.id),
        ("rank", control.rank, layout.rank),
        ("world", control.world, layout.world),
        ("run", control.run, control.run if run is None else run),
        ("step", control.step_id, control.step_id if step_id is None else step_id),
    ]
    for what, found, expected_value in expected:
        if found != expected_value:
            raise ForeignError(f"the image of {what} {found}, not of {expected_value}", path=path)
    if control.extras_bytes > layout.extras_capacity_bytes:
        raise FormatError(
            f"{control.extras_bytes} bytes of extras in {layout.extras_capacity_bytes}", path=path
        )


def tensors_in_chunk(layout: Layout, chunk: int) -> tuple[str, ...]:
    """Names of the tensors (and of the extras) that have bytes in a chunk, in the order of the
    bytes."""
    first, last = chunk_bounds(layout, chunk)
    reserved = reserved_names(layout.rank, is_base=layout.is_base)
    extras = (reserved[0], layout.extras_begin, layout.digests_begin)
    places = [(name, entry.begin, entry.end) for name, entry in layout.entries.items()]
    return tuple(
        name for name, begin, end in [*places, extras] if max(begin, first) < min(end, last)
    )


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
            layout = read_layout_with(read, size_bytes)
            closing = read(layout.digests_begin, layout.size_bytes)
            return cls.from_layout(layout, closing, run=run, shard=shard)
        except ImageError as error:
            raise type(error)(error.reason, path=error.path or path) from None

    @classmethod
    def parse(
        cls, data: bytes | memoryview, *, run: str, shard: Shard | None = None, path: Path | str
    ) -> Manifest:
        """Inverse of `to_bytes`. Raises ImageError and its subclasses, naming `path`."""
        try:
            layout = Layout.parse(data)
            closing = bytes(data[len(layout.header) :])
            if len(closing) != layout.size_bytes - layout.digests_begin:
                raise FormatError(f"{len(data)} bytes are not header, table and control page")
            return cls.from_layout(layout, closing, run=run, shard=shard)
        except ImageError as error:
            raise type(error)(error.reason, path=error.path or path) from None

    @classmethod
    def from_layout(
        cls,
        layout: Layout,
        closing: bytes,
        *,
        run: str | None = None,
        shard: Shard | None = None,
    ) -> Manifest:
        """The same of a known layout. Raises as `read`, but names no path."""
        control = ControlPage.from_bytes(closing[-PAGE_BYTES:])
        check_control(control, layout, run=run, step_id=shard.step_id if shard else None)
        if shard is not None and (control.rank, control.world) != (shard.rank, shard.world):
            raise ForeignError(
                f"holds rank {control.rank} of {control.world}, not rank {shard.rank} of"
                f" {shard.world}"
            )
        unnamed = control.base is not None and control.base.root is None
        if control.root is None or control.sections is None or unnamed:
            raise TornError("sealed in memory only: it has no digests")
        if shard is not None and shard.root not in (None, control.root):
            raise DigestError(f"its root is {control.root}, but {shard.root} was promised")
        manifest = cls(layout=layout, control=control, closing=closing)
        if xxh3_128(manifest.table) != bytes.fromhex(control.root):
            raise DigestError(
                f"step {control.step_id}, rank {layout.rank}: the digest table is damaged,"
                " nothing can be verified; use another copy"
            )
        if bytes(manifest.table[layout.chunk_count * DIGEST_BYTES :]).strip(b"\0"):
            raise FormatError("there are bytes behind the last digest")
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
            step_id=self.control.step_id,
            rank=self.control.rank,
            world=self.control.world,
            size_bytes=self.layout.size_bytes,
            root=self.control.root,
            params_digest=(self.control.sections or {}).get(TensorRole.PARAMS.value),
            alike=self.layout.identical_ranks,
            written_at=self.control.written_at,
            base=self.control.base_shard,
        )

    @property
    def chunk_indices(self) -> range:
        return range(self.layout.chunk_count)

    def bounds_of_chunk(self, chunk: int) -> tuple[int, int]:
        """`[begin, end)` of a chunk."""
        return chunk_bounds(self.layout, chunk)

    def get_chunk_digest(self, chunk: int) -> bytes:
        """The digest of a chunk, from the table."""
        return bytes(self.table[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES])

    def verify_chunk(self, chunk: int, data: memoryview, *, path: Path | str | None = None) -> None:
        """Check that `data` is this chunk. Raises DigestError, naming `path`."""
        if xxh3_128(data) == self.get_chunk_digest(chunk):
            return
        begin, end = self.bounds_of_chunk(chunk)
        tensors = tensors_in_chunk(self.layout, chunk)
        raise DigestError(
            f"rank {self.layout.rank}: chunk {chunk} (bytes {begin} to {end}) is damaged; it holds"
            f" {few(tensors, 4) or 'the header'}; use another copy",
            chunk=chunk,
            tensors=tensors,
            path=path,
        )

    def to_bytes(self) -> bytes:
        """Header, digest table and control page, concatenated."""
        return self.layout.header + self.closing
