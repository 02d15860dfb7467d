"""The archive tier: a shared store, S3 or a directory, that outlives every node (docs/archive.md).

Each step is a plain directory of `.safetensors` files, readable without keepstep.

    store         what a store can do: directory_store, object_store
    step_record   step.json, which makes a step archived
    index         what the archive holds, and of which run: pure
    backlog       which steps are sent; upload   sends one; retention   which are deleted
    read          reads a shard, whole or in chunks; browse   for people, and `archive pull`
    twin          an image as its difference from a twin's
    fork          another run's archive, from which this run begins
    tier          all of it as one tier
"""

from keepstep_sidecar.config.sidecar import ArchiveConfig

__all__ = ["ArchiveConfig"]
