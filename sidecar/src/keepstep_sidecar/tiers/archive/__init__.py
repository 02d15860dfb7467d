"""The archive tier: a shared store, S3 or a directory, that outlives every node (docs/archive.md).

Each step is a plain directory of `.safetensors` files, readable without keepstep.

    store         what a store can do: directory_store, object_store
    step_record   step.json, which makes a step archived; twins, which are stored as a difference
    index         what the archive holds, of which run, and what may be deleted
    upload        sends one step
    read          reads a shard, whole or in chunks; browse   for people, and `archive pull`
    tier          all of it as one tier; another run's archive, from which this run begins
"""

from __future__ import annotations

from keepstep_sidecar.config.sidecar import ArchiveConfig
from keepstep_sidecar.tiers.archive.store import Store

__all__ = ["ArchiveConfig", "open_store"]


def open_store(config: ArchiveConfig) -> Store:
    """The store that `config` names. Nothing is asked yet. Raises StorageError, UsageError."""
    if config.scheme == "file":
        from keepstep_sidecar.tiers.archive.directory_store import DirectoryStore

        return DirectoryStore(config.directory)
    # 15 MB: imported only where it is used
    from keepstep_sidecar.tiers.archive.object_store import open_objects

    return open_objects(config)
