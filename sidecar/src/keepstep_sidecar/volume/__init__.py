"""Local drives.

    volume, volume_set   a directory that holds runs; all such directories of a run
    paths, directories   where a shard is: pending, published, retired, in quarantine
    durable_file         writes a shard, or another file, so that it is whole or not there
    direct_io            O_DIRECT by threads, within a rate; filesystem   system calls
    scan, run_record     what lies on a volume at the start; the run's epochs
    prepare              makes a directory that a sidecar can use; faults   fault points for tests

The picture: docs/architecture.md.
"""
