"""The archive tier: a shared store, S3 or a directory, that outlives every node (docs/archive.md).

A plain directory of `.safetensors` for each step, readable without us.

    store         what a store can do: directory_store, object_store
    step_record   step.json, which makes a step archived
    index         what the archive holds, and of which run: pure
    backlog       which steps go there; upload   sends one; retention   which are deleted
    read          reads a shard, whole or in chunks; browse   for people, and `archive pull`
    fork          another run's archive, from which this one begins
    tier          all of it as one tier
"""

from keepstep_sidecar.config.archive import ArchiveConfig

__all__ = ["ArchiveConfig"]
