"""A tier to try with what a new tier costs: one directory that all pods of a run see. It has each
committed step that is still on a drive here, and keeps what it has."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from keepstep.image.control_page import Manifest
from keepstep.steps import StepId, Tier, TierAnswer, shard_name
from keepstep_sidecar.tiers.remote_tier import Inventory, RemoteShard, RemoteTier
from keepstep_sidecar.tiers.replicator import SCAN_AGAIN_S, DueShards, Key
from keepstep_sidecar.tiers.source import FileSource, ShardSource
from keepstep_sidecar.volume.files import Filesystem, IoMode, ShardFile, open_shard
from keepstep_sidecar.volume.run_tree import LocalShard, read_manifest


class VaultTier(RemoteTier):
    """The tier, and its only place."""

    tier = Tier.VAULT
    fresh_s = SCAN_AGAIN_S

    def __init__(self, directory: Path, *, run: str) -> None:
        super().__init__(due=self._due, places=lambda: {self.where: self})
        self.where, self._run, self._root = str(directory), run, directory / run

    # --- list, open --------------------------------------------------------------------------

    async def scan(self) -> Inventory:
        found = await asyncio.to_thread(self._found)
        return Inventory(
            answer=TierAnswer.STEPS if found else TierAnswer.NONE,
            shards=tuple(
                RemoteShard.from_shard(manifest.shard, tier=self.tier) for manifest in found
            ),
            epochs=tuple(manifest.control.epoch for manifest in found),
        )

    def _found(self) -> list[Manifest]:
        found = []
        for path in sorted(self._root.glob("*/rank-*.safetensors")):
            with path.open("rb") as file:
                found.append(read_manifest(file.fileno(), path, run=self._run))
        return found

    def sources(self, shard: RemoteShard) -> Sequence[ShardSource]:
        path = self._path(shard.step_id, shard.rank, shard.world)

        @contextmanager
        def opened() -> Iterator[ShardFile]:
            filesystem, engine = Filesystem(), IoMode.BUFFERED
            with open_shard(path, filesystem=filesystem, engine=engine) as file:
                yield file

        where = str(path)
        return [FileSource(shard=shard, tier=self.tier, where=where, run=self._run, open=opened)]

    def _path(self, step_id: StepId, rank: int, world: int) -> Path:
        return self._root / str(step_id) / shard_name(rank, world)

    # --- write -------------------------------------------------------------------------------

    def _due(self) -> DueShards:
        local = self.facts.local()
        return DueShards(shards=local.shards, owed=local.commits, settled=local.commits)

    async def list_held_shards(self, sent: Collection[Key]) -> set[Key]:
        found = await asyncio.to_thread(self._found)
        return {(manifest.shard.step_id, manifest.shard.rank) for manifest in found}

    async def write_shard(self, shard: LocalShard) -> int | None:
        path = self._path(shard.step_id, shard.rank, shard.world)
        path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(shutil.copyfile, shard.path, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        return shard.size_bytes

    async def complete_and_prune_copies(self, sent: Collection[LocalShard]) -> bool:
        self.facts.changed()
        return True

    def has_copied_all(self, *, whole: bool) -> bool:
        return True
