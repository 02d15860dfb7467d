"""What this pod serves: its own shards, wherever they lie now, and the copies that it keeps.

Files are looked up anew each time. A step is published, hidden and retired by renames, and an open
file outlives these.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from keepstep.core.shard import Shard
from keepstep.errors import ImageError, StorageError, TornError
from keepstep.steps import Tier
from keepstep_sidecar.tiers.peer.kept_copies import KeptCopies
from keepstep_sidecar.tiers.peer.protocol import ListedShard, PodShardListing
from keepstep_sidecar.tiers.source import FileSource
from keepstep_sidecar.volume.files import ShardFile, open_shard
from keepstep_sidecar.volume.run_tree import (
    RunDirectories,
    RunTree,
    ShardName,
    is_shard,
    open_shard_file,
    read_manifest,
    scan_shards,
)
from keepstep_sidecar.volume.volume import Volume, VolumeSet


@dataclass(frozen=True)
class OpenShard:
    """An open shard. `read` fills a page-aligned buffer of whole pages."""

    file: ShardFile
    path: Path
    size_bytes: int

    def read(self, into: memoryview, begin: int) -> None:
        """Fill `into` from `begin`; both whole pages. Raises TornError, StorageError."""
        try:
            count = self.file.filesystem.read_into(self.file.fd, into, begin)
        except OSError as error:
            raise StorageError(f"{self.path}: not readable: {error}") from error
        if count < len(into):
            raise TornError(f"it ends before byte {begin + len(into)}", path=self.path)


class ServedShards:
    """The shards on the volumes of one run. Methods block and may be called from any thread."""

    def __init__(self, volumes: VolumeSet, copies: KeptCopies, *, run: str) -> None:
        self._volumes = volumes
        self._copies = copies
        self._run = run

    def listing(self) -> PodShardListing:
        """All sealed shards here; `reason` says what could not be read."""
        own, reason = self._own()
        reason = reason or self._copies.unreadable
        copies = [ListedShard.from_shard(shard, copy=True) for shard in self._copies.all()]
        return PodShardListing(
            run=self._run,
            epochs=self._volumes.record.epochs,
            shards=(*own, *copies),
            ready=not reason,
            reason=reason,
        )

    def _own(self) -> tuple[list[ListedShard], str]:
        """The own shards that can be read, and why others cannot."""
        listings = [self._list(volume) for volume in self._volumes.volumes]
        found = [shard for shards, _ in listings for shard in shards]
        reason = "; ".join(why for _, why in listings if why)
        return [ListedShard.from_shard(shard, copy=False) for shard in found], reason

    def _list(self, volume: Volume) -> tuple[Sequence[Shard], str]:
        try:
            return scan_shards(volume.root, run=self._run, filesystem=volume.filesystem).shards, ""
        except OSError as error:
            return (), str(error)

    def source(self, shard: Shard, *, where: str) -> FileSource:
        """A source for a shard of this pod, wherever the shard lies when it is opened."""
        name = ShardName.of(shard)
        at = self._source(shard, name, where=where)
        if shard.base is None:
            return at
        base = self._source(shard.base, name.base_shard_name, where=f"the base of {where}")
        return replace(at, beside=base)

    def _source(self, shard: Shard, name: ShardName, *, where: str) -> FileSource:
        return FileSource(
            shard=shard,
            tier=Tier.PEER,
            where=where,
            run=self._run,
            open=lambda: self._opened(*self._find(name)),
        )

    def find_similar_shards(self, name: ShardName) -> Iterator[FileSource]:
        """Shards of the same step and of other ranks of this pod, or their bases: replicas of a
        model are alike."""
        for volume in self._volumes.volumes:
            with contextlib.suppress(OSError):  # dead: what lies on the others is as good
                yield from self._others_on(volume, name)

    def _others_on(self, volume: Volume, name: ShardName) -> Iterator[FileSource]:
        tree = RunTree(volume.root)
        for place in (tree.published_step(name.id), tree.pending_step(name.id)):
            for path in (place / name for name in volume.filesystem.names(place) if is_shard(name)):
                shard = self._shard(path, volume)
                if shard is None or (shard.world, shard.rank) == (name.world, name.rank):
                    continue
                source = self.source(shard, where=str(path))
                if not name.is_base:
                    yield source
                elif isinstance(source.beside, FileSource):
                    yield source.beside

    def _shard(self, path: Path, volume: Volume) -> Shard | None:
        try:
            with open_shard_file(path, volume.filesystem) as fd:
                return read_manifest(fd, path, run=self._run).shard
        except (ImageError, OSError):
            return None

    @contextmanager
    def open(self, name: ShardName) -> Iterator[OpenShard]:
        """Open a shard, or the base beside one. Raises StorageError when it is not here (any
        more)."""
        path, volume = self._find(name)
        with self._opened(path, volume) as file:
            yield OpenShard(file, path, os.fstat(file.fd).st_size)

    @contextmanager
    def _opened(self, path: Path, volume: Volume) -> Iterator[ShardFile]:
        try:
            with open_shard(path, filesystem=volume.filesystem, engine=volume.engine) as file:
                yield file
        except OSError as error:  # also when a rename moved it after we looked
            raise StorageError(f"{path}: not readable (any more): {error}") from error

    def _find(self, name: ShardName) -> tuple[Path, Volume]:
        for volume in self._volumes.volumes:
            directories = RunDirectories(RunTree(volume.root), volume.filesystem)
            with contextlib.suppress(OSError):  # dead: it may lie on another one
                if (path := directories.find_shard_path(name.id, name.file)) is not None:
                    return path, volume
        copy = self._copies.find(name.id, name.rank)
        if copy is None or copy.world != name.world:
            raise StorageError(
                f"step {name.id}, rank {name.rank} of {name.world}: not here (any more)"
            )
        return copy.path.with_name(name.file), self._copies.volume_of(copy.path)
