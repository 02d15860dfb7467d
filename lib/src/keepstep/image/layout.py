"""Where every byte of an image is. A layout is its header: everything else is derived from it.

The header holds no step and no digest, so it stays the same as long as the tensors do. Its digest
is the layout's id. `Layout.build` renders a header and then parses it like one from any file, so
every header that can be written can be read. `Layout.parse` trusts nothing: the tensors must tile
the data exactly, every start must suit its dtype, and the reserved regions must be in their places.
It allocates in proportion to the header's bytes, never to a number found in them.

Stock safetensors allows only strings in `__metadata__`, so keepstep's metadata is JSON in a string
there. Entries are in the order of their bytes. docs/format.md specifies the format.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

from keepstep.core.shard import NO_RANKS, Ranks
from keepstep.errors import FormatError, TornError
from keepstep.image import strictjson
from keepstep.image.strictjson import MAX_BYTES, Reader, has_no_surrogates, quote_text
from keepstep.image.tensor_specs import (
    NATIVE_BYTES,
    OPAQUE_BYTES,
    FlatBox,
    Parameters,
    TensorRole,
    TensorSpec,
    strides_with_gaps,
)
from keepstep.image.xxh3 import DIGEST_BYTES

FORMAT_VERSION = 1

PAGE_BYTES = 4096
"""Header, digest table and control page fill whole pages, because O_DIRECT moves whole pages
only."""

CHUNK_BYTES = 8 << 20
"""Bytes that one entry of an image's digest table covers, and that one write moves."""

HUGE_PAGE_BYTES = 2 << 20
"""Large images fill whole huge pages, so that the memory of a slot may consist of huge pages."""

LEAST_ON_HUGE_PAGES_BYTES = 64 << 20
"""An image of at least this size is padded to whole huge pages. That adds at most 3 %."""

MAX_HEADER_BYTES = 100_000_000
"""Stock safetensors refuses longer headers."""

_MAX_WORLD = 1 << 31
_RESERVED_PREFIX = "keepstep."
_DEVICE = re.compile(r"[a-z]{1,16}(:[0-9]{1,4})?")


class Entry(NamedTuple):
    """A tensor and its bytes `[begin, end)` in the image."""

    spec: TensorSpec
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Header:
    """The content of a header.

    `aliases`: other names of tied tensors, each with the name that is stored. `skeleton`: the
    state's tree, opaque here. `specs`: the tensors in the order of their bytes, without the
    reserved regions. `extras_capacity_bytes`, `digests_bytes`: sizes of the regions after the
    tensors. `twins`: ranks of the same world whose images have the very same boxes (the same part
    of a replica on another node), ascending, so that any of them can stand for this one.
    `parameters`: the parameters of each optimizer, by the name of its component; empty if the image
    does not name them. `is_base`: the image is a base, to which the images of steps refer.
    """

    rank: int
    world: int
    aliases: Mapping[str, str] = field(repr=False)
    skeleton: str = field(repr=False)
    specs: Sequence[TensorSpec] = field(repr=False)
    extras_capacity_bytes: int
    digests_bytes: int
    twins: tuple[int, ...] = ()
    parameters: Mapping[str, Parameters] = field(default_factory=dict, repr=False)
    is_base: bool = False

    @property
    def image_index(self) -> int:
        """The number of this image among all images of a step: the rank; for a base, the rank
        beyond the world."""
        return self.rank + self.world if self.is_base else self.rank

    def render(self) -> bytes:
        """The header's bytes: length, JSON, and spaces up to a whole number of pages."""
        tree: dict[str, Any] = {"__metadata__": self._metadata()}
        at = 0
        for spec in (*self.specs, *self._reserved()):
            tree[spec.name] = {
                "dtype": spec.stored_dtype,
                "shape": spec.stored_shape,
                "data_offsets": (at, at + spec.size_bytes),
            }
            at += spec.size_bytes
        text = _dumps(tree).encode()
        padded = round_up_to_pages(8 + len(text)) - 8
        return padded.to_bytes(8, "little") + text.ljust(padded)

    def _reserved(self) -> Iterator[TensorSpec]:
        sizes = (self.extras_capacity_bytes, self.digests_bytes, PAGE_BYTES)
        names = reserved_names(self.rank, is_base=self.is_base)
        for name, size in zip(names, sizes, strict=True):
            yield TensorSpec(name, "U8", (size,), TensorRole.REST)

    def _metadata(self) -> dict[str, str]:
        rows = {spec.name: _row(spec) for spec in (*self.specs, *self._reserved())}
        ours: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "rank": self.rank,
            "world": self.world,
            "aliases": dict(self.aliases),
            "skeleton": self.skeleton,
        }
        if self.twins:
            ours["twins"] = self.twins
        if self.parameters:
            ours["parameters"] = dict(self.parameters)
        if self.is_base:
            ours["base"] = True
        return {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": _dumps(rows),
            # ASCII, because Python strings may hold lone surrogates, which stock readers refuse.
            "keepstep": json.dumps(ours, separators=(",", ":")),
        }


def _row(spec: TensorSpec) -> dict[str, Any]:
    """What the header says of a tensor beside its entry; see `_spec`."""
    row = {
        "saved_offsets": spec.stored_offsets,
        "section": None if spec.section is TensorRole.REST else spec.section.value,
        "dtype": spec.dtype if spec.dtype in OPAQUE_BYTES else None,
        "global_shape": None if spec.global_shape == spec.shape else spec.global_shape,
        "tensor": spec.tensor,
        "flat_box": spec.flat,
        "dim_order": spec.dim_order,
        "strides": spec.strides,
        "unflattened_shape": spec.unflattened,
        "device": spec.device,
    }
    return {key: value for key, value in row.items() if value is not None}


def blake2b_digest(text: bytes) -> bytes:
    """BLAKE2b of 16 bytes: of headers (layout ids), of control pages (seals), of claims."""
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()


def reserved_names(rank: int, *, is_base: bool = False) -> tuple[str, str, str]:
    """Names of the three regions at the end of an image. They contain the rank, so that the names
    in two files of a step differ."""
    kind = "base." if is_base else ""
    extras, digests, control = (
        f"keepstep.{kind}{region}.{rank}" for region in ("extras", "digests", "control")
    )
    return extras, digests, control


def round_up_to_pages(size: int) -> int:
    """`size` rounded up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def read_length(buffer: bytes | memoryview) -> int:
    """Bytes of the whole header, read from its first eight bytes. Raises FormatError for a length
    that is too large or not a whole number of pages."""
    if len(buffer) < 8:
        raise FormatError(f"{len(buffer)} bytes cannot hold a header")
    length = 8 + int.from_bytes(buffer[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise FormatError(f"a header of {length} bytes; at most {MAX_HEADER_BYTES} are allowed")
    if length % PAGE_BYTES or length == 0:
        raise FormatError(f"a header of {length} bytes is not a whole number of pages")
    return length


def parse_header(header: bytes) -> Header:
    """Inverse of `render`. Raises FormatError, and VersionError for a newer format.

    It takes at most eight times the header's size in memory: each entry is checked when it is read,
    and kept as a few small objects.
    """
    if header[8:9] != b"{":
        raise FormatError("the header is not a JSON object")
    tree, texts = _entries(header)
    ours = _ours(texts.pop("keepstep"))
    check_version(ours.get("format_version"))
    world = strictjson.as_integer(ours.get("world"), "world", 1, _MAX_WORLD)
    rank = strictjson.as_integer(ours.get("rank"), "rank", 0, world - 1)
    if not isinstance(is_base := ours.get("base", False), bool):
        raise FormatError(f"base: {quote_text(is_base)} is neither true nor false")
    names = list(tree)
    if tuple(names[-3:]) != reserved_names(rank, is_base=is_base):
        raise FormatError(f"the header does not end with the reserved entries of rank {rank}")
    check_names(names[:-3])
    *specs, extras, digests, _ = _specs(tree, texts.pop("DCP_SHARDING_INFO"))
    return Header(
        rank=rank,
        world=world,
        aliases=MappingProxyType(_aliases(ours.get("aliases"), {spec.name for spec in specs})),
        skeleton=strictjson.as_text(ours.get("skeleton"), "skeleton"),
        specs=tuple(specs),
        extras_capacity_bytes=extras.size_bytes,
        digests_bytes=digests.size_bytes,
        twins=_twins(ours.get("twins", []), rank=rank, world=world),
        parameters=MappingProxyType(ours.get("parameters", {})),
        is_base=is_base,
    )


# --- JSON, read piece by piece -------------------------------------------------------------------

_Sizes = tuple[int, ...]
_Raw = tuple[str, _Sizes, _Sizes]
"""An entry as stock readers see it: dtype, shape, `data_offsets`."""

_DTYPES = {name: name for name in NATIVE_BYTES}
_INNER = ("keepstep", "DCP_SHARDING_INFO")


def _entries(header: bytes) -> tuple[dict[str, _Raw], dict[str, str]]:
    """All entries in the order of their bytes, and those texts of `__metadata__` that are JSON."""
    tree: dict[str, _Raw] = {}
    texts: dict[str, str] = {}
    reader = Reader(memoryview(header)[8:], what="header")
    for name in reader.iterate_keys(known=tree):
        if name != "__metadata__":
            tree[name] = _raw(name, reader.value())
        elif texts:
            raise FormatError("header: the key '__metadata__' comes twice")
        else:
            texts = _texts(reader)
    reader.end()
    if not texts:
        raise FormatError("no __metadata__: this file was not written by keepstep")
    return tree, texts


def _texts(reader: Reader) -> dict[str, str]:
    texts: dict[str, str] = {}
    for key in reader.iterate_keys():
        text = reader.string()
        if not (has_no_surrogates(key) and has_no_surrogates(text)):
            raise FormatError("header: __metadata__ must be valid Unicode, as stock readers ask")
        if key in _INNER:
            texts[key] = text
    if missing := [key for key in _INNER if key not in texts]:
        raise FormatError(f"no {missing[0]} in __metadata__: this file was not written by keepstep")
    ours = Reader(texts["keepstep"], what="keepstep")
    if next(ours.iterate_keys(), None) == "format_version":  # check it before anything else
        check_version(ours.value())
    return texts


def _raw(name: str, value: object) -> _Raw:
    try:
        entry = strictjson.as_mapping(value, name)
        dtype, shape, place = entry["dtype"], entry["shape"], entry["data_offsets"]
    except KeyError:
        raise FormatError(f"{quote_text(name)}: not an entry of safetensors") from None
    if len(entry) != 3:
        raise FormatError(f"{quote_text(name)}: not an entry of safetensors")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise FormatError(f"{quote_text(name)}: unknown dtype {quote_text(dtype)}")
    return _DTYPES[dtype], strictjson.as_sizes(shape, name), strictjson.as_sizes(place, name)


def _ours(text: str) -> dict[str, Any]:
    """The known keys of the object `keepstep`. All values are small, except for those that name
    tensors of the image."""
    ours: dict[str, Any] = {}
    reader = Reader(text, what="keepstep")
    for key in reader.iterate_keys():
        if key == "skeleton":
            ours[key] = reader.string()
        elif key == "aliases":
            ours[key] = {}
            for name in reader.iterate_keys(known=ours[key]):
                ours[key][name] = strictjson.as_text(reader.value(), name)
        elif key == "parameters":
            ours[key] = {name: _parameters(reader) for name in reader.iterate_keys()}
        elif key in _SINGLE:
            ours[key] = reader.value()
        else:
            reader.skip()
    reader.end()
    return ours


def _parameters(reader: Reader) -> Parameters:
    rows = []
    for _ in reader.iter_item_indices():
        row = strictjson.as_array(reader.value(), "parameters")
        if len(row) != 2:
            raise FormatError(f"parameters: {quote_text(row)} is not a name and a shape")
        rows.append(
            (strictjson.as_text(row[0], "parameters"), strictjson.as_sizes(row[1], "parameters"))
        )
    return tuple(rows)


_SINGLE = ("format_version", "rank", "world", "twins", "base")


# --- what it means -------------------------------------------------------------------------------


def _twins(value: object, *, rank: int, world: int) -> tuple[int, ...]:
    twins = tuple(
        strictjson.as_integer(twin, "twins", 0, world - 1)
        for twin in strictjson.as_array(value, "twins")
    )
    if list(twins) != sorted(set(twins) - {rank}):
        raise FormatError(f"twins: {quote_text(value)} are not other ranks in ascending order")
    return twins


def check_version(version: object) -> None:
    """Raises VersionError if a newer keepstep wrote this, FormatError if `version` is not a
    possible version."""
    strictjson.check_newest_version(version, FORMAT_VERSION)


def check_names(names: Iterable[str]) -> None:
    """Raises FormatError for tensor names that keepstep reserves or stock readers refuse."""
    for name in names:
        if name == "__metadata__" or name.startswith(_RESERVED_PREFIX):
            raise FormatError(f"{quote_text(name)}: this name is reserved")
        if not has_no_surrogates(name):
            raise FormatError(f"{quote_text(name)}: names must be valid Unicode")


def _specs(tree: dict[str, _Raw], text: str) -> list[TensorSpec]:
    """All entries in the order of their bytes, the three reserved ones last."""
    at, specs = 0, []
    left = iter(tree.items())
    reader = Reader(text, what="DCP_SHARDING_INFO")
    for name in reader.iterate_keys(known={}):  # a name that comes twice is out of order
        here, raw = next(left, (None, None))
        if raw is None or name != here:
            raise FormatError(_NOT_THE_TENSORS)
        spec = _spec(here, raw, strictjson.as_mapping(reader.value(), name))
        at = _check_place(spec, raw[2], at)
        specs.append(spec)
    reader.end()
    if next(left, None) is not None:
        raise FormatError(_NOT_THE_TENSORS)
    if any(spec.stored_dtype != "U8" or len(spec.shape) != 1 for spec in specs[-3:]):
        raise FormatError("the reserved entries are not flat bytes")
    if specs[-1].size_bytes != PAGE_BYTES:
        raise FormatError(f"the control page does not have {PAGE_BYTES} bytes")
    return specs


_NOT_THE_TENSORS = "DCP_SHARDING_INFO does not list exactly the tensors of the header, in order"


def _spec(name: str, raw: _Raw, row: dict[str, Any]) -> TensorSpec:
    stored, shape, _ = raw
    offsets = strictjson.as_sizes(row.get("saved_offsets"), name)
    if len(offsets) != len(shape):
        raise FormatError(f"{quote_text(name)}: its offsets do not suit its shape")
    dtype = strictjson.as_text(row.get("dtype", stored), name)
    if dtype != stored:
        shape, offsets = _opaque(name, dtype, stored, shape, offsets)
    order, strides = _sizes_in(row, "dim_order", name), _sizes_in(row, "strides", name)
    if order is not None and sorted(order) != list(range(len(shape))):
        raise FormatError(f"{quote_text(name)}: {quote_text(order)} is no order of its dimensions")
    if strides is not None and (
        len(strides) != len(shape) or strides_with_gaps(shape, strides) is None
    ):
        raise FormatError(
            f"{quote_text(name)}: {quote_text(strides)} are no strides of its dimensions"
        )
    whole = _sizes_in(row, "global_shape", name)
    box = _box(name, shape, offsets, shape if whole is None else whole)
    unflattened = _sizes_in(row, "unflattened_shape", name)
    flat = _flat_box(name, row["flat_box"], shape, box[1]) if "flat_box" in row else None
    if flat is not None and (order is not None or strides is not None):
        raise FormatError(f"{quote_text(name)}: a range of elements has no order of dimensions")
    elements = math.prod(box[1] or shape if flat is None else flat.shape)
    if unflattened is not None and math.prod(unflattened) != elements:
        raise FormatError(f"{quote_text(name)}: {quote_text(unflattened)} cannot be made of it")
    tensor = row.get("tensor")
    return TensorSpec(
        name,
        sys.intern(dtype),
        shape,
        _section(name, row),
        *box,
        order,
        _device(name, row),
        unflattened,
        strides,
        None if tensor is None else strictjson.as_text(tensor, name),
        flat,
    )


def _sizes_in(row: dict[str, Any], key: str, name: str) -> _Sizes | None:
    return strictjson.as_sizes(row[key], name) if key in row else None


def _section(name: str, row: dict[str, Any]) -> TensorRole:
    try:
        return TensorRole(row.get("section", TensorRole.REST.value))
    except ValueError:
        raise FormatError(
            f"{quote_text(name)}: {quote_text(row['section'])} is not a section"
        ) from None


def _device(name: str, row: dict[str, Any]) -> str | None:
    if "device" not in row:
        return None
    device = strictjson.as_text(row["device"], name)
    if not _DEVICE.fullmatch(device):
        raise FormatError(f"{quote_text(name)}: {quote_text(device)} is not a device")
    return sys.intern(device)


def _opaque(
    name: str, dtype: str, stored: str, shape: _Sizes, offsets: _Sizes
) -> tuple[_Sizes, _Sizes]:
    """The true shape and offsets of a tensor that is stored as bytes."""
    if dtype not in OPAQUE_BYTES:
        raise FormatError(f"{quote_text(name)}: unknown dtype {quote_text(dtype)}")
    if stored != "U8" or shape[-1:] != (OPAQUE_BYTES[dtype],) or offsets[-1] != 0:
        raise FormatError(f"{quote_text(name)}: {dtype} is not stored as bytes")
    return shape[:-1], offsets[:-1]


def _box(name: str, shape: _Sizes, offsets: _Sizes, whole: _Sizes) -> tuple[_Sizes, _Sizes | None]:
    """Offsets and global shape as in `TensorSpec`: `(), None` if the box is the whole tensor."""
    if whole == shape and not any(offsets):
        return (), None
    if len(whole) != len(shape) or any(
        at + size > limit for at, size, limit in zip(offsets, shape, whole, strict=True)
    ):
        raise FormatError(f"{quote_text(name)}: its box lies outside of its global shape")
    return offsets, whole


_MAX_FLAT_DIMS = 5


def _flat_box(name: str, value: object, shape: _Sizes, whole: _Sizes | None) -> FlatBox:
    """`shape`, `whole`: of the entry, which is a part of a row of `whole`."""
    rows = [strictjson.as_sizes(sizes, name) for sizes in strictjson.as_array(value, name)]
    if len(rows) != 3 or len({*map(len, rows)}) != 1 or len(rows[0]) > _MAX_FLAT_DIMS:
        raise FormatError(f"{quote_text(name)}: {quote_text(value)} is no box of a tensor")
    flat = FlatBox(*rows)
    _box(name, flat.sizes, flat.offsets, flat.shape)
    if (whole or shape)[-1:] != (math.prod(flat.sizes),) or math.prod(shape) != shape[-1]:
        raise FormatError(f"{quote_text(name)}: it is no range of the elements of its box")
    return flat


def _check_place(spec: TensorSpec, offsets: _Sizes, at: int) -> int:
    """Check that the tensor's bytes begin at `at` and have its size. Returns where they end."""
    if at % spec.element_bytes:
        raise FormatError(f"{quote_text(spec.name)}: its start does not suit {spec.dtype}")
    end = at + spec.size_bytes
    if offsets != (at, end) or end > MAX_BYTES:
        raise FormatError(
            f"{quote_text(spec.name)}: has the bytes {quote_text(list(offsets))},"
            f" must have [{at}, {end}]"
        )
    return end


def _aliases(value: object, names: set[str]) -> dict[str, str]:
    aliases = strictjson.as_mapping(value, "aliases")
    for alias, name in aliases.items():
        if not isinstance(name, str) or name not in names:
            raise FormatError(f"the alias {quote_text(alias)} means no tensor of this image")
        if alias in names:
            raise FormatError(f"{quote_text(alias)} is an alias and a tensor")
    return aliases


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout(Header):
    """A rank's image, byte by byte. All offsets count from the beginning of the image.

    `header`: its bytes. `entries`: the tensors in the order of their bytes, without the reserved
    regions.
    """

    header: bytes = field(repr=False)
    id: str
    entries: Mapping[str, Entry] = field(repr=False)
    extras_begin: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.header == other.header

    def __hash__(self) -> int:
        return hash(self.header)

    @cached_property
    def identical_ranks(self) -> Ranks:
        """The rank and its twins; no ranks if it has no twins."""
        return Ranks.of((self.rank, *self.twins)) if self.twins else NO_RANKS

    def merge_with_base(self, base: Layout | None) -> Layout:
        """What this image and its base hold together, to be asked for names and boxes; the places
        are those in either file."""
        if base is None:
            return self
        return replace(
            self,
            entries=MappingProxyType({**self.entries, **base.entries}),
            aliases=MappingProxyType({**self.aliases, **base.aliases}),
        )

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
    def section_extents(self) -> Mapping[TensorRole, tuple[tuple[int, int], ...]]:
        """For each section that has bytes: the longest contiguous runs `[begin, end)` of its
        tensors, ascending."""
        extents: dict[TensorRole, list[tuple[int, int]]] = {}
        for entry in self.entries.values():
            runs = extents.setdefault(entry.spec.section, [])
            if runs and runs[-1][1] == entry.begin:
                runs[-1] = (runs[-1][0], entry.end)
            else:
                runs.append((entry.begin, entry.end))
        held = {
            section: tuple(run for run in runs if run[0] < run[1])
            for section, runs in extents.items()
        }
        return MappingProxyType({section: runs for section, runs in held.items() if runs})

    @classmethod
    def build(
        cls, tensors: Iterable[TensorSpec], *, before: Layout | None = None, **rest: Any
    ) -> Layout:
        """Place `tensors`; `rest`: see `build_header`. `before`: a layout that is returned itself
        if it serves, as in the next life of a run; to compare takes a fraction of the time.

        Raises FormatError as `build_header` does, and for boxes outside their tensor, aliases of
        unknown tensors, and more than a header can hold."""
        header = build_header(tensors, **rest)
        if before is not None and before._serves(header):
            return before
        return cls.parse(memoryview(_render(header)))

    def _serves(self, header: Header) -> bool:
        """Whether this layout holds just what `header` says, but for some room for extras."""
        room = self.extras_capacity_bytes - header.extras_capacity_bytes
        return 0 <= room < HUGE_PAGE_BYTES and all(
            getattr(self, name) == getattr(header, name)
            for name in (
                *("rank", "world", "skeleton", "aliases", "twins", "parameters", "specs"),
                "is_base",
            )
        )

    @classmethod
    def parse(cls, buffer: bytes | memoryview, *, size_bytes: int | None = None) -> Layout:
        """Read and check the header at the beginning of `buffer`.

        `size_bytes`: the size of the file that it comes from, if known. Raises FormatError;
        TornError if the buffer or the file is too short; VersionError for a newer format.
        """
        length = read_length(buffer)
        if length > len(buffer):
            raise TornError(f"truncated: {len(buffer)} bytes of a header of {length}")
        text = bytes(buffer[:length])
        layout = cls._from(parse_header(text), text)
        if size_bytes is not None and size_bytes < layout.size_bytes:
            raise TornError(f"truncated: {size_bytes} bytes of an image of {layout.size_bytes}")
        if size_bytes is not None and size_bytes > layout.size_bytes:
            raise FormatError(f"{size_bytes} bytes, but the image has {layout.size_bytes}")
        return layout

    @classmethod
    def _from(cls, header: Header, text: bytes) -> Layout:
        begins = list(accumulate((spec.size_bytes for spec in header.specs), initial=len(text)))
        places = zip(header.specs, begins, begins[1:], strict=False)
        layout = cls(
            **vars(header),
            header=text,
            id=blake2b_digest(text).hex(),
            entries=MappingProxyType({spec.name: Entry(spec, a, b) for spec, a, b in places}),
            extras_begin=begins[-1],
        )
        if layout.digests_begin % PAGE_BYTES:
            raise FormatError("the digest table does not begin on a page")
        if header.digests_bytes != _table_bytes(layout.digests_begin):
            raise FormatError("the digest table does not have the size that its chunks need")
        return layout


def build_header(
    tensors: Iterable[TensorSpec],
    *,
    rank: int,
    world: int,
    aliases: Mapping[str, str] = MappingProxyType({}),
    skeleton: str = "",
    extras_capacity_bytes: int = PAGE_BYTES,
    twins: Iterable[int] = (),
    parameters: Mapping[str, Parameters] = MappingProxyType({}),
    is_base: bool = False,
) -> Header:
    """The header of an image that holds `tensors`.

    The extras get at least the capacity asked for, rounded up so that tensors and extras together
    fill whole pages. Raises FormatError for reserved names, for names that come twice, and for
    unknown dtypes.
    """
    specs = sorted(
        tensors, key=lambda tensor: (-tensor.element_bytes, tensor.section.value, tensor.name)
    )
    if len(set(names := [spec.name for spec in specs])) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FormatError(f"two tensors are named {twice!r}")
    check_names(names)
    tensor_bytes = sum(spec.size_bytes for spec in specs)
    return Header(
        rank=rank,
        world=world,
        aliases=aliases,
        skeleton=skeleton,
        specs=tuple(specs),
        extras_capacity_bytes=round_up_to_pages(tensor_bytes + extras_capacity_bytes)
        - tensor_bytes,
        digests_bytes=PAGE_BYTES,
        twins=tuple(sorted(twins)),
        parameters=parameters,
        is_base=is_base,
    )


def _render(header: Header) -> bytes:
    """Render the header. The digest table covers the header, which states the table's size, so the
    table grows until both agree. The extras grow until a large image fills its last huge page."""
    tensor_bytes = sum(spec.size_bytes for spec in header.specs)
    while True:
        text = header.render()
        covered = len(text) + tensor_bytes + header.extras_capacity_bytes
        needed = max(_table_bytes(covered), header.digests_bytes)
        over = (covered + needed + PAGE_BYTES) % HUGE_PAGE_BYTES
        left = HUGE_PAGE_BYTES - over if over and covered >= LEAST_ON_HUGE_PAGES_BYTES else 0
        if needed == header.digests_bytes and not left:
            read_length(text)
            return text
        room = header.extras_capacity_bytes + left
        header = replace(header, digests_bytes=needed, extras_capacity_bytes=room)


def _chunk_count(size: int) -> int:
    return -(-size // CHUNK_BYTES)


def _table_bytes(size: int) -> int:
    return round_up_to_pages(_chunk_count(size) * DIGEST_BYTES)
