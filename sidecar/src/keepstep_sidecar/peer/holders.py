"""Who holds a shard, as `fetching` asks them: another pod, or the copies on this one's volumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from keepstep.errors import StorageError
from keepstep_sidecar.depots import Remote
from keepstep_sidecar.filesystem import PAGE_BYTES
from keepstep_sidecar.peer.link import Link
from keepstep_sidecar.peer.shards import Reading, Shards


class PeerHolder:
    """Another pod."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @property
    def name(self) -> str:
        return self._link.name

    def range(
        self, remote: Remote, begin: int, end: int
    ) -> AbstractContextManager[Callable[[memoryview], None]]:
        return self._link.range(remote, begin, end)

    def close(self) -> None:
        self._link.close()


class LocalHolder:
    """This pod's own drives."""

    name = "the copy on this pod"

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    @contextmanager
    def range(self, remote: Remote, begin: int, end: int) -> Iterator[Callable[[memoryview], None]]:
        try:
            with self._shards.open(remote.id, remote.rank, remote.world) as reading:
                at = begin

                def fill(into: memoryview) -> None:
                    nonlocal at
                    _read(reading, into, at)
                    at += len(into)

                yield fill
        except OSError as error:
            raise StorageError(f"{self.name}: {error}; use another one") from error

    def close(self) -> None:
        """Nothing is open between two ranges."""


def _read(reading: Reading, into: memoryview, begin: int) -> None:
    """Straight into whole pages where they are (a slot's chunk), else by way of some that are."""
    whole_pages = begin % PAGE_BYTES == 0 and len(into) % PAGE_BYTES == 0
    if whole_pages and not isinstance(into.obj, bytearray):
        reading.read(into, begin)
    else:
        into[:] = reading.small(begin, begin + len(into))
