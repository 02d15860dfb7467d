"""What this pod serves: its own shards, wherever they lie now, and the copies that it keeps.

Files are looked up anew each time. A step is published, hidden and retired by renames, and an open
file outlives these.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.shard import Shard
from keepstep.errors import ImageError, StorageError, TornError
from keepstep.steps import StepId, Tier, shard_name
from keepstep_sidecar.tiers.peer.copies import Copies
from keepstep_sidecar.tiers.peer.protocol import Listed, Listing
from keepstep_sidecar.tiers.source import FileSource
from keepstep_sidecar.volume.directories import (
    Directories,
    ShardName,
    Tree,
    is_shard,
    opened,
    read_manifest,
    survey,
)
from keepstep_sidecar.volume.files import ShardFile, open_shard
from keepstep_sidecar.volume.volume import Volume, VolumeSet


@dataclass(frozen=True)
class Reading:
    """An open shard. `read` fills a page-aligned buffer of whole pages."""

    file: ShardFile
    path: Path
    size_bytes: int

    def read(self, into: memoryview, begin: int) -> None:
        """Fill `into` from `begin`; both whole pages. Raises TornError, StorageError."""
        try:
            count = self.file.filesystem.read(self.file.fd, into, begin)
        except OSError as error:
            raise StorageError(f"{self.path}: not readable: {error}") from error
        if count < len(into):
            raise TornError(f"it ends before byte {begin + len(into)}", path=self.path)


class Shards:
    """The shards on the volumes of one run. Methods block and may be called from any thread."""

    def __init__(self, volumes: VolumeSet, copies: Copies, *, run: str) -> None:
        self._volumes = volumes
        self._copies = copies
        self._run = run

    def listing(self) -> Listing:
        """All sealed shards here; `reason` says what could not be read."""
        own, reason = self._own()
        reason = reason or self._copies.unreadable
        copies = [Listed.listed(one, copy=True) for one in self._copies.all()]
        return Listing(
            run=self._run,
            epochs=self._volumes.record.epochs,
            shards=(*own, *copies),
            ready=not reason,
            reason=reason,
        )

    def _own(self) -> tuple[list[Listed], str]:
        """The own shards that can be read, and why others cannot."""
        looks = [self._look(volume) for volume in self._volumes.volumes]
        found = [one for shards, _ in looks for one in shards]
        reason = "; ".join(why for _, why in looks if why)
        return [Listed.listed(one, copy=False) for one in found], reason

    def _look(self, volume: Volume) -> tuple[Sequence[Shard], str]:
        try:
            found = survey(volume.root, run=self._run, filesystem=volume.filesystem).shards
            # one that refers to a base would arrive without it
            return [one for one in found if one.base_ref is None], ""
        except OSError as error:
            return (), str(error)

    def source(self, shard: Shard, *, where: str) -> FileSource:
        """A source for a shard of this pod, wherever the shard lies when it is opened."""
        return FileSource(
            shard=shard,
            tier=Tier.PEER,
            where=where,
            run=self._run,
            open=lambda: self._opened(*self._find(shard.step_id, shard.rank, shard.world)),
        )

    def others(self, name: ShardName) -> Iterator[FileSource]:
        """Shards of the same step and of other ranks of this pod: replicas of a model are alike."""
        for volume in self._volumes.volumes:
            with contextlib.suppress(OSError):  # dead: what lies on the others is as good
                yield from self._others_on(volume, name)

    def _others_on(self, volume: Volume, name: ShardName) -> Iterator[FileSource]:
        tree = Tree(volume.root)
        for place in (tree.published_step(name.id), tree.pending_step(name.id)):
            for path in (place / one for one in volume.filesystem.names(place) if is_shard(one)):
                shard = self._shard(path, volume)
                if shard is not None and (shard.world, shard.rank) != (name.world, name.rank):
                    yield self.source(shard, where=str(path))

    def _shard(self, path: Path, volume: Volume) -> Shard | None:
        try:
            with opened(path, volume.filesystem) as fd:
                return read_manifest(fd, path, run=self._run).shard
        except (ImageError, OSError):
            return None

    @contextmanager
    def open(self, id: StepId, rank: int, world: int) -> Iterator[Reading]:
        """Open a shard by its name. Raises StorageError when it is not here (any more)."""
        path, volume = self._find(id, rank, world)
        with self._opened(path, volume) as file:
            yield Reading(file, path, os.fstat(file.fd).st_size)

    @contextmanager
    def _opened(self, path: Path, volume: Volume) -> Iterator[ShardFile]:
        try:
            with open_shard(path, filesystem=volume.filesystem, engine=volume.engine) as file:
                yield file
        except OSError as error:  # also when a rename moved it after we looked
            raise StorageError(f"{path}: not readable (any more): {error}") from error

    def _find(self, id: StepId, rank: int, world: int) -> tuple[Path, Volume]:
        for volume in self._volumes.volumes:
            directories = Directories(Tree(volume.root), volume.filesystem)
            with contextlib.suppress(OSError):  # dead: it may lie on another one
                if (path := directories.find(id, shard_name(rank, world))) is not None:
                    return path, volume
        copy = self._copies.find(id, rank)
        if copy is None or copy.world != world:
            raise StorageError(f"step {id}, rank {rank} of {world}: not here (any more)")
        return copy.path, self._copies.holder(copy.path)
