"""Makes one staged image durable: a new file, filled, sealed, named; or no file at all.

A file that failed once is never written to again: after an fdatasync has failed, the kernel may
call clean what never reached the medium. Such a file goes to quarantine, where it also keeps the
bad blocks from being used again. A full volume is no failure: the file is removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from keepstep.errors import (
    ImageError,
    KeepstepError,
    NoSpaceError,
    StorageError,
    UsageError,
    VersionError,
)
from keepstep.image import ControlPage, Layout, check_control
from keepstep.image.xxh3 import CHUNK_BYTES
from keepstep.steps import shard_name
from keepstep_sidecar.volume import faults
from keepstep_sidecar.volume.direct_io import Engine, Pace
from keepstep_sidecar.volume.directories import Directories
from keepstep_sidecar.volume.filesystem import Filesystem
from keepstep_sidecar.volume.paths import Tree, temporary_name
from keepstep_sidecar.volume.scan import LocalShard, opened, read_manifest
from keepstep_sidecar.volume.shard_file import ShardFile, open_shard

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full volume."""

CUT_OFF = "the slot was truncated; whoever may write to shared memory has done it"


@dataclass(frozen=True, kw_only=True)
class Written:
    """A durable shard. `seconds` of wall clock, 0 when it was durable already."""

    shard: LocalShard
    seconds: float = 0.0


@dataclass(kw_only=True)
class Writer:
    """Writes shards of `run` below `tree`. `lock` guards names; no file is written under it.

    `tell`: hears why a write failed, "" after one that went well.
    """

    tree: Tree
    shelves: Directories
    filesystem: Filesystem
    lock: threading.RLock
    run: str
    engine: Engine
    threads: int
    capacity_bytes: int | None
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        self._in_progress: dict[Path, int] = {}
        self._files_made = 0

    @property
    def in_progress(self) -> Collection[Path]:
        """Temporary files that are being written; hold `lock`."""
        return self._in_progress.keys()

    def used_bytes(self) -> int:
        """Space of all files, those in progress with the size that they will have."""
        with self.lock:
            at_rest = self.shelves.used_bytes(besides=self._in_progress)
            return at_rest + sum(self._in_progress.values())

    def write(self, view: memoryview, layout: Layout, control: ControlPage, pace: Pace) -> Written:
        """See `Volume.write`. Raises UsageError, NoSpaceError, StorageError."""
        _check_arguments(view, layout, control, run=self.run)
        if (durable := self.durable(control)) is not None:
            self.tell("")
            return durable
        return Unfinished(self, view, layout, control).finish(pace)

    def begin(self, view: memoryview, layout: Layout, control: ControlPage) -> Unfinished | None:
        """See `Volume.begin`. Raises UsageError, NoSpaceError, StorageError."""
        _check_arguments(view, layout, control, run=self.run)
        return None if self.durable(control) else Unfinished(self, view, layout, control)

    def durable(self, control: ControlPage) -> Written | None:
        """The shard that an earlier write of the same step and rank has left, if any. Raises
        StorageError."""
        try:
            return self._find(control)
        except OSError as error:
            self.tell(str(error))
            raise StorageError(f"step {control.id}, rank {control.rank}: {error}") from error
        except StorageError as error:
            self.tell(str(error.__cause__ or error))
            raise

    def _find(self, control: ControlPage) -> Written | None:
        """One that is broken makes room for a new one."""
        path = self.shelves.find(control.id, shard_name(control.rank, control.world))
        if path is None:
            return None
        try:
            with opened(path) as fd:
                manifest = read_manifest(fd, path, run=self.run)
        except VersionError as error:
            raise StorageError(f"a newer keepstep has written this step: {error}") from error
        except ImageError:
            with self.lock:
                self.shelves.quarantine(path, "rewritten")
            return None
        return Written(shard=LocalShard.of(path, manifest))

    @contextlib.contextmanager
    def _reserved(self, control: ControlPage, size_bytes: int) -> Iterator[Path]:
        """The name of a new temporary file, its space accounted for while it is written."""
        with self.lock:
            if self.capacity_bytes is not None:
                free = self.capacity_bytes - self.used_bytes()
                if size_bytes > free:
                    raise self._no_space(control, f"{size_bytes} bytes needed, {free} free")
            self._files_made += 1
            shard = shard_name(control.rank, control.world)
            name = temporary_name(shard, pid=os.getpid(), number=self._files_made)
            temporary = self.tree.pending_step(control.id) / name
            self._in_progress[temporary] = size_bytes
        try:
            yield temporary
        finally:
            with self.lock:
                del self._in_progress[temporary]

    @contextlib.contextmanager
    def _created(
        self, temporary: Path, layout: Layout, control: ControlPage
    ) -> Iterator[ShardFile]:
        with self.lock:
            self.shelves.make_pending(control.id)
        faults.point("write.create")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        with open_shard(
            temporary, flags, filesystem=self.filesystem, engine=self.engine, threads=self.threads
        ) as file:
            file.allocate(layout)
            yield file

    def _give_name(self, temporary: Path, control: ControlPage) -> Path:
        path = self.tree.pending_shard(control.id, control.rank, control.world)
        with self.lock:
            faults.point("write.rename")
            self.filesystem.rename(temporary, path)
        try:
            faults.point("write.directory-sync")
            self.filesystem.sync_directory(path.parent)
        except OSError:
            # Nobody can tell whether the name would survive. As the caller will not count this
            # shard, nor may a scan.
            self.filesystem.rename(path, temporary)
            raise
        return path

    def _give_up(self, temporary: Path, control: ControlPage, error: OSError) -> KeepstepError:
        """Leave no half-written shard behind. Returns what to raise."""
        if error.errno in (*FULL, errno.EFAULT):
            with contextlib.suppress(OSError):
                self.filesystem.unlink(temporary)
            if error.errno == errno.EFAULT:  # the memory's fault, not the drive's
                return UsageError(f"step {control.id}, rank {control.rank}: {CUT_OFF}")
            return self._no_space(control, error.strerror or str(error))
        kept = ""
        with contextlib.suppress(OSError), self.lock:
            kept = f"; what was written is kept as {self.shelves.quarantine(temporary, 'io')}"
        self.tell(str(error))
        return StorageError(
            f"step {control.id}, rank {control.rank}: cannot write below {self.tree.root}: {error}"
            f"{kept}. Check the drive (dmesg); later steps go to another volume if there is one"
        )

    def _no_space(self, control: ControlPage, why: str) -> NoSpaceError:
        limit = "" if self.capacity_bytes is None else f" (limit {self.capacity_bytes} bytes)"
        return NoSpaceError(
            f"step {control.id}, rank {control.rank}: no space on {self.tree.root}{limit}: {why}. "
            "Free space, raise the capacity, or keep fewer steps"
        )


class Unfinished:
    """A shard on its way: a hidden file that takes the chunks of the image in `view`, in order and
    as they come, and its name at the end. Whatever fails ends it, and leaves no shard.

    Blocking; for one thread at a time. `control`: what the image's seal is, or will be. `ended`:
    it has its name, or nothing is left of it.
    """

    def __init__(
        self, writer: Writer, view: memoryview, layout: Layout, control: ControlPage
    ) -> None:
        """Make the file, of its whole size. Raises NoSpaceError, StorageError."""
        self.control = control
        self.ended = False
        self._writer, self._view, self._layout = writer, view, layout
        self._digests: list[bytes] = []
        self._seconds = 0.0
        self._room, self._open = contextlib.ExitStack(), contextlib.ExitStack()
        self._temporary = self._room.enter_context(writer._reserved(control, layout.size_bytes))
        with self._guarded():
            file = writer._created(self._temporary, layout, control)
            self._file = self._open.enter_context(file)

    def ready(self, copied_bytes: int) -> int:
        """How many chunks could be written, now that so many bytes are in their place."""
        whole = copied_bytes // CHUNK_BYTES
        count = self._layout.chunk_count
        return (count if copied_bytes >= self._layout.digests_begin else whole) - len(self._digests)

    def write(self, chunks: int, pace: Pace) -> None:
        """Write so many chunks more. Raises NoSpaceError, StorageError, UsageError."""
        with self._guarded():
            begin = len(self._digests)
            each = range(begin, begin + chunks)
            self._digests += self._file.write(self._view, self._layout, each, pace)

    def finish(self, pace: Pace) -> Written:
        """Write what is left of the image, which is complete by now, seal and name it. Raises
        NoSpaceError, StorageError, UsageError."""
        self.write(self.ready(self._layout.digests_begin), pace)
        with self._guarded():
            manifest = self._file.seal(self._view, self._layout, self.control, self._digests)
            self._open.close()
            path = self._writer._give_name(self._temporary, self.control)
        self._end()
        faults.point("write.done")
        self._writer.tell("")
        return Written(shard=LocalShard.of(path, manifest), seconds=self._seconds)

    def drop(self) -> None:
        """Leave nothing of it. Not after it has ended."""
        self._open.close()
        with contextlib.suppress(OSError):
            self._writer.filesystem.unlink(self._temporary)
        self._end()

    def _end(self) -> None:
        self._room.close()
        self.ended = True

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except OSError as error:
            self._open.close()
            try:
                raise self._writer._give_up(self._temporary, self.control, error) from error
            finally:
                self._end()
        except BaseException:
            self.drop()
            raise
        self._seconds += time.perf_counter() - started


def _check_arguments(view: memoryview, layout: Layout, control: ControlPage, *, run: str) -> None:
    if len(view) != layout.size_bytes:
        raise UsageError(f"step {control.id}: {len(view)} bytes, not {layout.size_bytes}")
    try:
        check_control(control, layout, run=run)
    except ImageError as error:
        raise UsageError(f"step {control.id}, rank {control.rank}: {error.reason}") from error
    if view[: len(layout.header)] != layout.header:
        raise UsageError(f"step {control.id}, rank {control.rank}: the slot has another header")
