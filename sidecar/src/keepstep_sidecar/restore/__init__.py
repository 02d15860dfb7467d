"""What the sidecar does for a restore.

    restorer        which steps can be restored; brings one into a slot
    fetcher         the nearest copy that verifies; the same before a trainer asks
    sources         where all images of a step are
    chunk_buffers   verified chunks of them; shared_reads: each once for all ranks of this machine

The picture: docs/architecture.md.
"""
