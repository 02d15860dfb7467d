"""Where every byte of an image is. A layout is its header: everything else is derived from it.

The header holds no step and no digest, so it stays the same as long as the tensors do. Its digest
is the layout's id. `Layout.build` renders a header and then parses it like one from any file, so
every header that can be written can be read. `Layout.parse` trusts nothing: the tensors must tile
the data exactly, every start must suit its dtype, and the reserved regions must be in their places.
It allocates in proportion to the header's bytes, never to a number found in them.

docs/format.md specifies the format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from keepstep.core.ranks import NOBODY, Ranks
from keepstep.errors import FormatError, TornError
from keepstep.image import headers
from keepstep.image.headers import HUGE_PAGE_BYTES, MAX_HEADER_BYTES, PAGE_BYTES, Entry, Header
from keepstep.image.tensors import Parameters, Section, TensorSpec
from keepstep.image.xxh3 import CHUNK_BYTES, DIGEST_BYTES, xxh3_128

LEAST_ON_HUGE_PAGES_BYTES = 64 << 20
"""An image of at least this size is padded to whole huge pages. That adds at most 3 %."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A rank's image, byte by byte. All offsets count from the beginning of the image.

    `aliases`: other names of tied tensors, each with the name that is stored. `skeleton`: the
    state's tree, opaque here. `entries`: the tensors in the order of their bytes, without the
    reserved regions. `twins`: ranks whose images have the very same boxes (the same part of a
    replica on another node), so that any of them can stand for this one. `parameters`: the
    parameters of each optimizer, by its component's name; empty if the image does not name them.
    """

    header: bytes = field(repr=False)
    id: str = field(compare=False)
    rank: int = field(compare=False)
    world: int = field(compare=False)
    aliases: Mapping[str, str] = field(compare=False, repr=False)
    skeleton: str = field(compare=False, repr=False)
    entries: Mapping[str, Entry] = field(compare=False, repr=False)
    extras_begin: int = field(compare=False)
    extras_capacity_bytes: int = field(compare=False)
    twins: tuple[int, ...] = field(compare=False, default=())
    parameters: Mapping[str, Parameters] = field(compare=False, repr=False, default_factory=dict)

    @cached_property
    def alike(self) -> Ranks:
        """The rank and its twins; no ranks if it has no twins."""
        return Ranks.of((self.rank, *self.twins)) if self.twins else NOBODY

    @property
    def digests_begin(self) -> int:
        """Where the digest table begins. The bytes that it covers end here."""
        return self.extras_begin + self.extras_capacity_bytes

    @property
    def control_begin(self) -> int:
        """Where the control page, the last page, begins."""
        return self.digests_begin + _table_bytes(self.digests_begin)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole image, a multiple of `PAGE_BYTES`."""
        return self.control_begin + PAGE_BYTES

    @property
    def chunk_count(self) -> int:
        """Chunks of `CHUNK_BYTES` (the last may be shorter) that cover `[0, digests_begin)`."""
        return _chunk_count(self.digests_begin)

    @cached_property
    def section_extents(self) -> Mapping[Section, tuple[tuple[int, int], ...]]:
        """For each section that has bytes: the longest contiguous runs `[begin, end)` of its
        tensors, ascending."""
        extents: dict[Section, list[tuple[int, int]]] = {}
        for entry in self.entries.values():
            runs = extents.setdefault(entry.spec.section, [])
            if runs and runs[-1][1] == entry.begin:
                runs[-1] = (runs[-1][0], entry.end)
            else:
                runs.append((entry.begin, entry.end))
        held = {one: tuple(run for run in runs if run[0] < run[1]) for one, runs in extents.items()}
        return MappingProxyType({one: runs for one, runs in held.items() if runs})

    @classmethod
    def build(
        cls, tensors: Iterable[TensorSpec], *, before: Layout | None = None, **rest: Any
    ) -> Layout:
        """Place `tensors`; `rest`: see `header_of`. `before`: a layout that is returned itself if
        it serves, as in the next life of a run; to compare takes a fraction of the time.

        Raises FormatError as `header_of` does, and for boxes outside their tensor, aliases of
        unknown tensors, and more than a header can hold."""
        header = header_of(tensors, **rest)
        if before is not None and before._serves(header):
            return before
        return cls.parse(memoryview(_render(header)))

    def _serves(self, header: Header) -> bool:
        """Whether this layout holds just what `header` says, but for some room for extras."""
        room = self.extras_capacity_bytes - header.extras_bytes
        return (
            0 <= room < HUGE_PAGE_BYTES
            and (self.rank, self.world, self.skeleton)
            == (header.rank, header.world, header.skeleton)
            and (self.aliases, self.twins) == (header.aliases, header.twins)
            and self.parameters == header.parameters
            and [one.spec for one in self.entries.values()] == header.specs
        )

    @classmethod
    def check(cls, tensors: Iterable[TensorSpec], **rest: Any) -> None:
        """Raises FormatError where `build` would, for tensors taken from a live state. It is faster
        than `build`: it renders and parses a header only if that may be too long or is not
        ASCII."""
        header = header_of(tensors, **rest)
        if header.most_bytes > MAX_HEADER_BYTES or not header.is_ascii:
            cls.parse(memoryview(_render(header)))

    @classmethod
    def parse(cls, buffer: bytes | memoryview, *, size_bytes: int | None = None) -> Layout:
        """Read and check the header at the beginning of `buffer`.

        `size_bytes`: the size of the file that it comes from, if known. Raises FormatError;
        TornError if the buffer or the file is too short; VersionError for a newer format.
        """
        length = headers.read_length(buffer)
        if length > len(buffer):
            raise TornError(f"truncated: {len(buffer)} bytes of a header of {length}")
        text = bytes(buffer[:length])
        layout = cls._from(headers.parse(text), text)
        if size_bytes is not None and size_bytes < layout.size_bytes:
            raise TornError(f"truncated: {size_bytes} bytes of an image of {layout.size_bytes}")
        if size_bytes is not None and size_bytes > layout.size_bytes:
            raise FormatError(f"{size_bytes} bytes, but the image has {layout.size_bytes}")
        return layout

    @classmethod
    def _from(cls, header: Header, text: bytes) -> Layout:
        begins = list(accumulate((one.size_bytes for one in header.specs), initial=len(text)))
        places = zip(header.specs, begins, begins[1:], strict=False)
        layout = cls(
            header=text,
            id=xxh3_128(text).hex(),
            rank=header.rank,
            world=header.world,
            aliases=MappingProxyType(dict(header.aliases)),
            skeleton=header.skeleton,
            entries=MappingProxyType({one.name: Entry(one, a, b) for one, a, b in places}),
            extras_begin=begins[-1],
            extras_capacity_bytes=header.extras_bytes,
            twins=header.twins,
            parameters=MappingProxyType(dict(header.parameters)),
        )
        if layout.digests_begin % PAGE_BYTES:
            raise FormatError("the digest table does not begin on a page")
        if header.digests_bytes != _table_bytes(layout.digests_begin):
            raise FormatError("the digest table does not have the size that its chunks need")
        return layout


def header_of(
    tensors: Iterable[TensorSpec],
    *,
    rank: int,
    world: int,
    aliases: Mapping[str, str] = MappingProxyType({}),
    skeleton: str = "",
    extras_capacity_bytes: int = PAGE_BYTES,
    twins: Iterable[int] = (),
    parameters: Mapping[str, Parameters] = MappingProxyType({}),
) -> Header:
    """The header of an image that holds `tensors`.

    The extras get at least the capacity asked for, rounded up so that tensors and extras together
    fill whole pages. Raises FormatError for reserved names, for names that come twice, and for
    unknown dtypes.
    """
    specs = sorted(tensors, key=lambda one: (-one.element_bytes, one.section.value, one.name))
    _check_names(specs)
    tensor_bytes = sum(spec.size_bytes for spec in specs)
    return Header(
        rank=rank,
        world=world,
        aliases=aliases,
        skeleton=skeleton,
        specs=specs,
        extras_bytes=headers.round_up(tensor_bytes + extras_capacity_bytes) - tensor_bytes,
        digests_bytes=PAGE_BYTES,
        twins=tuple(sorted(twins)),
        parameters=parameters,
    )


def _render(header: Header) -> bytes:
    """Render the header. The digest table covers the header, which states the table's size, so the
    table grows until both agree. The extras grow until a large image fills its last huge page."""
    tensor_bytes = sum(spec.size_bytes for spec in header.specs)
    while True:
        text = header.render()
        covered = len(text) + tensor_bytes + header.extras_bytes
        needed = max(_table_bytes(covered), header.digests_bytes)
        over = (covered + needed + PAGE_BYTES) % HUGE_PAGE_BYTES
        left = HUGE_PAGE_BYTES - over if over and covered >= LEAST_ON_HUGE_PAGES_BYTES else 0
        if needed == header.digests_bytes and not left:
            headers.read_length(text)
            return text
        extras_bytes = header.extras_bytes + left
        header = replace(header, digests_bytes=needed, extras_bytes=extras_bytes)


def _check_names(specs: Sequence[TensorSpec]) -> None:
    if len(set(names := [spec.name for spec in specs])) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FormatError(f"two tensors are named {twice!r}")
    headers.check_names(names)


def _chunk_count(size: int) -> int:
    return -(-size // CHUNK_BYTES)


def _table_bytes(size: int) -> int:
    return headers.round_up(_chunk_count(size) * DIGEST_BYTES)
