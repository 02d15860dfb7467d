"""One copy of a shard, wherever it lies: on a drive, at another pod, in an archive.

A source only fetches bytes. `verified_chunks` knows which bytes they must be and in which order;
this is the same for all sources.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.core.shard import Shard
from keepstep.errors import StorageError, TornError
from keepstep.steps import Tier
from keepstep_sidecar.volume.files import Filesystem, IoMode, ShardFile, open_shard
from keepstep_sidecar.volume.run_tree import BAD_BLOCKS, LocalShard
from keepstep_sidecar.volume.volume import VolumeSet

Read = Callable[[int, Sequence[memoryview]], Iterator[memoryview]]
"""Reads from byte `begin` on: fills page-aligned buffers in order, and yields each once full."""


class ShardGone(StorageError):
    """The shard was retired meanwhile. There is nothing to read or to send, and this is no
    error."""


class ShardUnreadable(StorageError):
    """The drive here cannot read the shard's bytes, and will not be able to next time."""


class ReadCancellation:
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
    consecutive chunks one read asks for. `beside`: the base to which the shard refers, at the same
    place; None if the shard is whole, or is a base.
    """

    shard: Shard
    tier: Tier
    where: str
    run: str
    adopted_by: str = ""
    streams: int = 4
    chunks_per_read: int = 1
    beside: ShardSource | None = field(default=None, compare=False, repr=False)

    def opened(self, cancel: ReadCancellation) -> AbstractContextManager[Read]:
        """Open the source for reads from any number of threads. An error inside is this copy's
        fault: it becomes a StorageError or ImageError, and a file of this machine goes into
        quarantine."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class FileSource(ShardSource):
    """A file of this machine. `open` finds it even if it was moved."""

    open: Callable[[], AbstractContextManager[ShardFile]] = field(compare=False, repr=False)

    @contextmanager
    def opened(self, cancel: ReadCancellation) -> Iterator[Read]:
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
    volume, base = volumes.volume_of(shard.path), shard.base_shard
    return FileSource(
        shard=shard,
        tier=Tier.LOCAL,
        where=str(shard.path),
        run=volume.record.run,
        open=lambda: volumes.open_shard_file(shard.path),
        streams=volume.io_threads,
        beside=None if base is None else local_source(volumes, base),
    )


def file_source(shard: LocalShard, *, run: str, engine: IoMode = IoMode.BUFFERED) -> FileSource:
    """A source for a shard on a drive of this machine, for those who do not own the volume, or
    change nothing there. It is found where it lies when it is opened: its step may have been
    published or hidden since. Raises ShardGone, ShardUnreadable, StorageError."""
    base = shard.base_shard
    return FileSource(
        shard=shard,
        tier=Tier.LOCAL,
        where=str(shard.path),
        run=run,
        open=lambda: _opened(shard.path, engine),
        beside=None if base is None else file_source(base, run=run, engine=engine),
    )


@contextmanager
def _opened(path: Path, engine: IoMode) -> Iterator[ShardFile]:
    step, above = path.parent, path.parent.parent
    root = above.parent if above.name == "pending" else above
    with ExitStack() as stack:
        try:
            for place in (step, root / step.name, root / "pending" / step.name):
                with suppress(FileNotFoundError):
                    file = stack.enter_context(_file(place / path.name, engine))
                    break
            else:
                raise ShardGone(f"{path} was retired meanwhile")
            yield file
        except OSError as error:
            kind = ShardUnreadable if error.errno in BAD_BLOCKS else StorageError
            raise kind(f"{path}: cannot read: {error}; use another copy") from error


@contextmanager
def _file(path: Path, engine: IoMode) -> Iterator[ShardFile]:
    with ExitStack() as stack:

        def enter(engine: IoMode) -> ShardFile:
            opened = open_shard(path, filesystem=Filesystem(), engine=engine)
            return stack.enter_context(opened)

        try:
            file = enter(engine)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            file = enter(IoMode.BUFFERED)  # a file system without O_DIRECT
        yield file
