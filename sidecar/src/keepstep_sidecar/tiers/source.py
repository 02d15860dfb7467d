"""One copy of a shard, wherever it lies: a drive, another pod, an archive.

A source only fetches bytes. What they must be, and in which order, is `transfer`'s business: it is
the same for all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from keepstep.core.shard import Shard
from keepstep.errors import TornError
from keepstep.steps import Tier
from keepstep_sidecar.config.verify import Verify
from keepstep_sidecar.volume.scan import LocalShard
from keepstep_sidecar.volume.shard_file import ShardFile
from keepstep_sidecar.volume.volume_set import VolumeSet

Read = Callable[[int, Sequence[memoryview]], Iterator[memoryview]]
"""From byte `begin` on: fills page-aligned buffers in a row, and gives each as it is full."""


class Cancel:
    """How to end blocking reads from another thread; each source says what that takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self.done = False

    def add(self, call: Callable[[], None]) -> None:
        """`call` when it is cancelled; at once when it was."""
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


class ShardSource(Protocol):
    """See the module. A value: asking costs nothing until it is `opened`."""

    @property
    def shard(self) -> Shard:
        """What should be there."""

    @property
    def tier(self) -> Tier: ...

    @property
    def where(self) -> str:
        """For people."""

    @property
    def run(self) -> str:
        """Whose image it must be."""

    @property
    def adopted_by(self) -> str:
        """The run whose image it becomes in memory, where that is another one; else ''."""

    @property
    def streams(self) -> int:
        """Reads at once that keep the way there busy."""

    @property
    def run_chunks(self) -> int:
        """Chunks in a row that one read asks for."""

    @property
    def verified_loads(self) -> bool:
        """Whether each chunk of a whole image is digested; single chunks always are."""

    def opened(self, cancel: Cancel) -> AbstractContextManager[Read]:
        """Reads for any number of threads. What fails inside is this copy's fault: it is left as a
        StorageError or ImageError, and a file of this machine in quarantine."""


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """A file of this machine; `open` finds it, wherever it was moved to."""

    shard: Shard
    tier: Tier
    where: str
    run: str
    open: Callable[[], AbstractContextManager[ShardFile]] = field(compare=False, repr=False)
    streams: int = 4
    verified_loads: bool = True
    run_chunks: int = 1
    adopted_by: str = ""

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
    """On a volume of this machine. One that fails goes into quarantine."""
    volume = volumes.holder(shard.path)
    return FileSource(
        shard=shard,
        tier=Tier.LOCAL,
        where=str(shard.path),
        run=volume.run,
        open=lambda: volumes.opened(shard.path),
        streams=volume.io_threads,
        verified_loads=volume.verify is Verify.FULL,
    )
