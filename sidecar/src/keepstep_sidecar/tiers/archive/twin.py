"""A rank's image as its difference from a twin's, so that what ranks have in common is stored once.

    <step>/rank-00001-of-00004.twin-of-00000     the rank's own pieces, in order

Each piece is 8 MiB of the image; digest table and control page are in the last ones. The rank's own
pieces are the first one (its header names the rank), all from the last chunk on, and those whose
digests differ in the tables of the two images. No list of them is stored, because it follows from
the two tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.image.manifest import Manifest
from keepstep.image.xxh3 import CHUNK_BYTES
from keepstep.steps import shard_name
from keepstep_sidecar.tiers.archive.store import Stored

_NAME = re.compile(r"rank-([0-9]{5,})-of-([0-9]{5,})\.twin-of-([0-9]{5,})")


def twin_name(rank: int, world: int, of: int) -> str:
    """The file name of such a difference in a step's directory."""
    return shard_name(rank, world).removesuffix("safetensors") + f"twin-of-{of:05d}"


def is_twin(name: str) -> bool:
    """Is this a name that `twin_name` makes?"""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True)
class Found:
    """A rank's file in a listing. `of`: the rank whose file has the rest; None if it is whole."""

    stored: Stored
    of: int | None = None


def found(files: Mapping[str, Stored], *, world: int) -> dict[int, Found]:
    """The file of each rank that has one; the whole file if there are both."""
    ranks = {
        rank: Found(stored=files[name])
        for rank in range(world)
        if (name := shard_name(rank, world)) in files
    }
    for name, stored in sorted(files.items()):
        if match := _NAME.fullmatch(name):
            rank, told, of = map(int, match.groups())
            if told == world and rank < world and of in ranks and ranks[of].of is None:
                ranks.setdefault(rank, Found(stored=stored, of=of))
    return ranks


def piece_count(image: Manifest) -> int:
    return -(-image.layout.size_bytes // CHUNK_BYTES)


def own_pieces(image: Manifest, base: Manifest) -> list[int]:
    """The pieces of an image that are not in its base's file, ascending. The two images may differ
    in size, because of the extras at their end."""
    pieces = range(piece_count(image))
    full = min(image.layout.chunk_count, base.layout.chunk_count) - 1
    common = {at for at in pieces[1:full] if image.digest(at) == base.digest(at)}
    return [at for at in pieces if at not in common]


def is_worth_it(image: Manifest, own: list[int]) -> bool:
    """Whether at most half of the image is its own, and its header can be read without its base."""
    return 2 * len(own) <= piece_count(image) and len(image.layout.header) <= CHUNK_BYTES
