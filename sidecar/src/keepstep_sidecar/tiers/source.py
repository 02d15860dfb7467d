"""One copy of a shard, wherever it lies: on a drive, at another pod, in an archive.

A source only fetches bytes. `transfer` knows which bytes they must be and in which order; this is
the same for all sources.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from keepstep.core.shard import Shard
from keepstep.errors import TornError
from keepstep.steps import Tier
from keepstep_sidecar.config.sidecar import Verify
from keepstep_sidecar.volume.directories import LocalShard
from keepstep_sidecar.volume.files import ShardFile
from keepstep_sidecar.volume.volume import VolumeSet

Read = Callable[[int, Sequence[memoryview]], Iterator[memoryview]]
"""Reads from byte `begin` on: fills page-aligned buffers in order, and yields each once full."""


class Cancel:
    """Lets another thread end blocking reads. Each source adds the calls that do so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self.done = False

    def add(self, call: Callable[[], None]) -> None:
        """Register `call` for cancellation. It is called at once if that has already happened."""
        with self._lock:
            self._calls.append(call)
            if not self.done:
                return
        call()

    def cancel(self) -> None:
        with self._lock:
            self.done, calls = True, list(self._calls)
        for call in calls:
            call()


@dataclass(frozen=True, kw_only=True)
class ShardSource:
    """See the module. A source is a value: it costs nothing until it is `opened`.

    `where`: the place, as a text for people. `run`: the run to which the image must belong.
    `adopted_by`: the run to which it belongs in memory, if that is another one; else ''. `streams`:
    how many parallel reads keep the connection or drive busy. `chunks_per_read`: how many
    consecutive chunks one read asks for. `verified_loads`: whether the chunks of a whole image are
    verified by digest. Single chunks always are.
    """

    shard: Shard
    tier: Tier
    where: str
    run: str
    adopted_by: str = ""
    streams: int = 4
    chunks_per_read: int = 1
    verified_loads: bool = True

    def opened(self, cancel: Cancel) -> AbstractContextManager[Read]:
        """Open the source for reads from any number of threads. An error inside is this copy's
        fault: it becomes a StorageError or ImageError, and a file of this machine goes into
        quarantine."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class FileSource(ShardSource):
    """A file of this machine. `open` finds it even if it was moved."""

    open: Callable[[], AbstractContextManager[ShardFile]] = field(compare=False, repr=False)

    @contextmanager
    def opened(self, cancel: Cancel) -> Iterator[Read]:
        with self.open() as file:

            def read(begin: int, into: Sequence[memoryview]) -> Iterator[memoryview]:
                for view in into:
                    if file.read(view, begin) < len(view):
                        end = begin + len(view)
                        raise TornError(f"truncated: it ends before byte {end}", path=self.where)
                    yield view
                    begin += len(view)

            yield read


def local_source(volumes: VolumeSet, shard: LocalShard) -> FileSource:
    """A source for a shard on a volume of this machine. A shard that fails goes into quarantine."""
    volume = volumes.holder(shard.path)
    return FileSource(
        shard=shard,
        tier=Tier.LOCAL,
        where=str(shard.path),
        run=volume.record.run,
        open=lambda: volumes.opened(shard.path),
        streams=volume.io_threads,
        verified_loads=volume.verify is Verify.FULL,
    )
