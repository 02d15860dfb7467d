"""The archive tier: a shared store, S3 or a directory, that outlives every node (docs/archive.md).

A plain directory of `.safetensors` for each step, readable without us. What decides is pure
(`backlog`, `expiry`, `kinship`, `survey`'s judgement), what talks to a network is a `Store`.
"""

from keepstep_sidecar.archive.settings import ArchiveConfig

__all__ = ["ArchiveConfig"]
