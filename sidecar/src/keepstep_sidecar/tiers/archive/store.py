"""What an archive's store must be able to do, whether it is a bucket or a directory.

A name is a path below the archive's root, with slashes. An object appears whole or not at all, and
never changes afterwards. A store knows nothing of runs, steps or shards.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Protocol

from keepstep_sidecar.config.sidecar import ArchiveConfig


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """An object. `modified_at`: Unix seconds on the store's clock. `etag` changes with it."""

    name: str
    bytes: int
    modified_at: float
    etag: str


class Store(Protocol):
    """All methods raise StorageError with the store's own words and what to do."""

    @property
    def where(self) -> str:
        """A name for people, like `s3://ckpt/gpt`. It never contains a credential."""

    async def list_below(self, prefix: str) -> list[StoredObject]:
        """Every object whose name begins with the directory `prefix`, in the order of names;
        perhaps without those whose names have more than three parts.

        An empty list means that the store was asked and has none. A missing bucket or directory is
        a StorageError.
        """

    async def directories(self, prefix: str) -> list[str]:
        """Names of the directories directly below `prefix` ('' for the root), without it."""

    async def find_object(self, name: str) -> StoredObject | None:
        """The object, or None when there is none."""

    async def read_range(self, name: str, begin: int, view: memoryview) -> None:
        """Fill `view` with the bytes from `begin` on. Raises FormatError, too, where no object but
        something foreign has that name."""

    async def create_if_absent(self, name: str, data: bytes) -> bool:
        """Make a small object. Returns False, and changes nothing, when the name is taken."""

    async def replace(self, name: str, data: bytes) -> None:
        """Make or replace a small object."""

    async def upload(
        self, name: str, pieces: AsyncIterator[memoryview], *, part_bytes: int, parts: int
    ) -> None:
        """Make or replace an object from `pieces` in order. At most `parts` parts are in flight.

        No reference to a piece is kept after it was sent.
        """

    async def copy(self, name: str, to: str) -> bool:
        """Make or replace the object `to`, with the content of another one, without sending its
        bytes. Returns False where the store cannot do that, or has no such object."""

    async def delete(self, names: Iterable[str]) -> None:
        """Remove objects in this order. Missing objects are no error."""

    async def close(self) -> None:
        """Close sockets and end threads."""


def open_store(config: ArchiveConfig) -> Store:
    """The store that `config` names. Nothing is asked yet. Raises StorageError, UsageError."""
    if config.scheme == "file":
        from keepstep_sidecar.tiers.archive.directory_store import DirectoryStore

        return DirectoryStore(config.directory)
    # 15 MB: imported only where it is used
    from keepstep_sidecar.tiers.archive.object_store import open_objects

    return open_objects(config)
