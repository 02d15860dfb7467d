"""`step.json`: what makes the shards in a step's directory an archived step.

It is written last, once, and sealed. It says what the shards together cannot say: that there are no
more of them, and the epochs of the run, so that no lineage is lost with a volume.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from keepstep.core.shard import MOST_RANKS, Shard
from keepstep.errors import FormatError, ImageError, TornError
from keepstep.image import strictjson
from keepstep.image.control_page import Manifest
from keepstep.image.layout import CHUNK_BYTES
from keepstep.image.xxh3 import xxh3_128
from keepstep.steps import Epoch, StepId, make_base_file_name, shard_name
from keepstep_sidecar import __version__
from keepstep_sidecar.tiers.archive.store import StoredObject
from keepstep_sidecar.volume.run_record import epoch_json, parse_epoch, read_step

FORMAT_VERSION = 1
NAME = "step.json"
LIMIT_BYTES = 16 << 20

_MAX_WORLD = MOST_RANKS
_MOST_EPOCHS = 1 << 16
_SINGLE = frozenset(("format_version", "keepstep", "run", "step", "world", "written_at", "seal"))


@dataclass(frozen=True, kw_only=True)
class TwinDelta:
    """`rank`: the rank whose file has the rest."""

    rank: int
    stored_bytes: int

    @property
    def fields(self) -> dict[str, int]:
        return {"twin_of": self.rank, "stored_bytes": self.stored_bytes}


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """`shards`: in the order of ranks, one for each rank of `world`, with root, `params_digest` and
    `base`. `twins`: ranks of which only a difference is stored; from which rank's file, and its
    size in bytes. `base_twins`: the same of their bases. `written_at`: Unix seconds."""

    run: str
    id: StepId
    world: int
    epochs: tuple[Epoch, ...]
    shards: tuple[Shard, ...]
    written_at: float
    twins: Mapping[int, TwinDelta] = field(default_factory=dict)
    base_twins: Mapping[int, TwinDelta] = field(default_factory=dict)
    keepstep: str = __version__

    def find_shard_file(self, shard: Shard, *, is_base: bool = False) -> tuple[str, int]:
        """Name and size in bytes of the file that holds the shard. `is_base`: it is the base of a
        shard."""
        rank, world = shard.rank, shard.world
        if (twin := (self.base_twins if is_base else self.twins).get(rank)) is None:
            return (make_base_file_name if is_base else shard_name)(rank, world), shard.size_bytes
        return twin_delta_name(rank, world, twin.rank, is_base=is_base), twin.stored_bytes

    @property
    def files(self) -> dict[str, int]:
        """Size in bytes by name."""
        bases = (shard.base for shard in self.shards if shard.base is not None)
        return dict(
            [
                *map(self.find_shard_file, self.shards),
                *(self.find_shard_file(b, is_base=True) for b in bases),
            ]
        )

    def has_same_content(self, other: StepRecord) -> bool:
        """Whether both stand for the very same bytes."""
        return (self.run, self.id, self.world, self.shards) == (
            other.run,
            other.id,
            other.world,
            other.shards,
        )

    def to_json(self) -> bytes:
        body = {
            "format_version": FORMAT_VERSION,
            "keepstep": self.keepstep,
            "run": self.run,
            "step": str(self.id),
            "world": self.world,
            "written_at": self.written_at,
            "epochs": [epoch_json(epoch) for epoch in self.epochs],
            "shards": [
                {
                    "rank": shard.rank,
                    "name": self.find_shard_file(shard)[0],
                    "bytes": shard.size_bytes,
                    "root": shard.root,
                    "params": shard.params_digest,
                    **({} if shard.rank not in self.twins else self.twins[shard.rank].fields),
                    **({} if shard.base is None else {"base": self._base_json(shard.base)}),
                }
                for shard in self.shards
            ],
        }
        return json.dumps({**body, "seal": _seal(body)}, indent=1).encode() + b"\n"

    def _base_json(self, base: Shard) -> dict[str, Any]:
        twin = self.base_twins.get(base.rank)
        return {
            "step": str(base.step_id),
            "name": self.find_shard_file(base, is_base=True)[0],
            "bytes": base.size_bytes,
            "root": base.root,
            **({} if twin is None else twin.fields),
        }

    @classmethod
    def from_json(cls, data: bytes | bytearray, *, path: str) -> StepRecord:
        """Inverse of `to_json`. Raises TornError, FormatError, VersionError naming `path`."""
        try:
            _check_seal(strictjson.Reader(data, what=NAME))
            return _read(strictjson.Reader(data, what=NAME))
        except FormatError as error:
            raise FormatError(f"not the record of a step ({error.reason})", path=path) from None
        except ImageError as error:
            raise type(error)(error.reason, path=path) from None


def _check_seal(reader: strictjson.Reader) -> None:
    seal, sealed = None, dict[str, bytes | bytearray]()
    for key in reader.iterate_keys():
        if reader.comes("["):
            sealed[key] = array = bytearray(b"[")
            for (
                number
            ) in reader.iter_item_indices():  # not as a list: each item would take twice its bytes
                array += b"," * (number > 0) + _canonical(reader.value())
            array += b"]"
            continue
        value = reader.value()
        if key == "format_version":
            strictjson.check_newest_version(value, FORMAT_VERSION)
        if key == "seal":
            seal = value
        else:
            sealed[key] = _canonical(value)
    reader.end()
    if seal is None or "format_version" not in sealed:
        raise FormatError("without a seal, or without a version")
    pieces = [
        piece for key in sorted(sealed) for piece in (b",", _canonical(key), b":", sealed[key])
    ]
    if seal != xxh3_128(b"".join([b"{", *pieces[1:], b"}"])).hex():
        raise TornError("its seal does not fit: it was changed or cut off")


def _read(reader: strictjson.Reader) -> StepRecord:
    fields: dict[str, Any] = {}
    for key in reader.iterate_keys():
        if key == "epochs":
            fields[key] = tuple(
                [_epoch(number, reader.value()) for number in reader.iter_item_indices()]
            )
        elif key == "shards":
            fields[key] = [_row(reader.value()) for _ in reader.iter_item_indices()]
        elif key in _SINGLE:
            fields[key] = reader.value()
        else:
            reader.value()
    if missing := {*_SINGLE, "epochs", "shards"} - fields.keys():
        raise FormatError(f"without {' and '.join(sorted(missing))}")
    step_id, world = (
        read_step(fields["step"]),
        strictjson.as_integer(fields["world"], "world", 1, _MAX_WORLD),
    )
    rows: list[_Row] = fields["shards"]
    shards = tuple(row.shard(step_id, world) for row in rows)
    record = StepRecord(
        run=strictjson.as_text(fields["run"], "run"),
        id=step_id,
        world=world,
        epochs=fields["epochs"],
        shards=shards,
        written_at=strictjson.as_time(fields["written_at"], "written_at"),
        twins={row.rank: row.twin for row in rows if row.twin},
        base_twins={row.rank: row.base.twin for row in rows if row.base and row.base.twin},
        keepstep=strictjson.as_text(fields["keepstep"], "keepstep"),
    )
    _check_names(record, rows)
    return record


def _epoch(number: int, value: object) -> Epoch:
    if number >= _MOST_EPOCHS:
        raise FormatError(f"more than {_MOST_EPOCHS} epochs")
    return parse_epoch(value)


def _check_names(record: StepRecord, rows: list[_Row]) -> None:
    world, bases = record.world, {shard.rank: shard.base for shard in record.shards if shard.base}
    names = [(shard.rank, record.find_shard_file(shard)[0]) for shard in record.shards]
    ranks = [row.rank for row in rows]
    if [(row.rank, row.name) for row in rows] != names or ranks != list(range(world)):
        raise FormatError(f"its shards are not those of {world} ranks")
    base_names = {row.rank: row.base.name for row in rows if row.base}
    if base_names != {
        rank: record.find_shard_file(base, is_base=True)[0] for rank, base in bases.items()
    }:
        raise FormatError("its bases are not those of its shards")
    whole = bases.keys() - record.base_twins.keys()
    for twins, others in ((record.twins, range(world)), (record.base_twins, whole)):
        for rank, twin in twins.items():
            if twin.rank not in others or twin.rank == rank or twin.rank in twins:
                raise FormatError(
                    f"rank {rank} is a twin of rank {twin.rank}, which has no whole file"
                )


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A shard as a record tells it, or its base."""

    rank: int
    name: str
    size_bytes: int
    root: str
    params: str | None
    twin: TwinDelta | None
    step: StepId | None = None
    base: _Row | None = None

    def shard(self, step_id: StepId, world: int) -> Shard:
        return Shard(
            step_id=self.step or step_id,
            rank=self.rank,
            world=world,
            size_bytes=self.size_bytes,
            root=self.root,
            params_digest=self.params,
            base=None if self.base is None else self.base.shard(step_id, world),
        )


def _row(value: object) -> _Row:
    shard = strictjson.as_mapping(value, "shard")
    rank = strictjson.as_integer(shard.get("rank"), "rank", 0, _MAX_WORLD)
    base = _file_of(strictjson.as_mapping(shard["base"], "base"), rank) if "base" in shard else None
    if base is not None and base.step is None:
        raise FormatError("a base of no step")
    return replace(_file_of(shard, rank), step=None, base=base)


def _file_of(fields: Mapping[str, object], rank: int) -> _Row:
    params, step = fields.get("params"), fields.get("step")
    return _Row(
        rank=rank,
        name=strictjson.as_text(fields.get("name"), "name"),
        size_bytes=strictjson.as_integer(fields.get("bytes"), "bytes", 0, strictjson.MAX_BYTES),
        root=strictjson.as_text(fields.get("root"), "root"),
        params=None if params is None else strictjson.as_text(params, "params"),
        twin=_twin(fields) if "twin_of" in fields else None,
        step=None if step is None else read_step(step),
    )


def _twin(shard: Mapping[str, object]) -> TwinDelta:
    return TwinDelta(
        rank=strictjson.as_integer(shard["twin_of"], "twin_of", 0, _MAX_WORLD),
        stored_bytes=strictjson.as_integer(
            shard.get("stored_bytes"), "stored_bytes", 0, strictjson.MAX_BYTES
        ),
    )


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def _seal(body: Mapping[str, Any]) -> str:
    return xxh3_128(_canonical(body)).hex()


def _canonical(value: object) -> bytes:
    return _ENCODER.encode(value).encode()


# --- twins ----------------------------------------------------------------------------------------
#
# A rank's image may be stored as its difference from a twin's, so that what ranks have in common is
# stored once.
#
#     <step>/rank-00001-of-00004.twin-of-00000     the rank's own pieces, in order
#
# Each piece is 8 MiB of the image; digest table and control page are in the last ones. The rank's
# own pieces are the first one (its header names the rank), all from the last chunk on, and those
# whose digests differ in the tables of the two images. No list of them is stored, because it
# follows from the two tables.


_NAME = re.compile(r"(rank|base)-([0-9]{5,})-of-([0-9]{5,})\.twin-of-([0-9]{5,})")


def twin_delta_name(rank: int, world: int, of: int, *, is_base: bool = False) -> str:
    """The file name of such a difference, of a shard or of a base, in a step's directory."""
    name = (make_base_file_name if is_base else shard_name)(rank, world)
    return name.removesuffix("safetensors") + f"twin-of-{of:05d}"


def is_twin_name(name: str) -> bool:
    """Is this a name that `twin_delta_name` makes?"""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True)
class ListedRankFile:
    """A rank's file in a listing. `of`: the rank whose file has the rest; None if it is whole."""

    stored: StoredObject
    of: int | None = None


def choose_file_per_rank(
    files: Mapping[str, StoredObject], *, world: int, is_base: bool = False
) -> dict[int, ListedRankFile]:
    """The file of each rank that has one, or of its base; the whole file if there are both."""
    name_of, kind = (make_base_file_name, "base") if is_base else (shard_name, "rank")
    ranks = {
        rank: ListedRankFile(stored=files[name])
        for rank in range(world)
        if (name := name_of(rank, world)) in files
    }
    for name, stored in sorted(files.items()):
        if (match := _NAME.fullmatch(name)) and match[1] == kind:
            rank, named_world, of = map(int, match.groups()[1:])
            if named_world == world and rank < world and of in ranks and ranks[of].of is None:
                ranks.setdefault(rank, ListedRankFile(stored=stored, of=of))
    return ranks


def piece_count(image: Manifest) -> int:
    return -(-image.layout.size_bytes // CHUNK_BYTES)


def find_pieces_not_in_base(image: Manifest, base: Manifest) -> list[int]:
    """The pieces of an image that are not in its base's file, ascending. The two images may differ
    in size, because of the extras at their end."""
    pieces = range(piece_count(image))
    full = min(image.layout.chunk_count, base.layout.chunk_count) - 1
    common = {
        at for at in pieces[1:full] if image.get_chunk_digest(at) == base.get_chunk_digest(at)
    }
    return [at for at in pieces if at not in common]


def is_worth_a_delta(image: Manifest, own: list[int]) -> bool:
    """Whether at most half of the image is its own, and its header can be read without its base."""
    return 2 * len(own) <= piece_count(image) and len(image.layout.header) <= CHUNK_BYTES
