"""The archive tier: a shared store, S3 or a directory, that outlives every node (docs/archive.md).

Each step is a plain directory of `.safetensors` files, readable without keepstep.

    store           what a store can do: directory_store, object_store
    step_record     step.json, which makes a step archived; twins, which are stored as a difference
    index           what the archive holds, of which run, and what may be deleted
    heartbeats      which lives of the run train now
    upload          sends one step
    archive_source  reads a shard, whole or in chunks; browse   for people, and `archive pull`
    tier            all of it as one tier; another run's archive, from which this run begins
"""
