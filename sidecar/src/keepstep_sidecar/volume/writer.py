"""Makes one staged image durable: a file is written, sealed and named, or no file is left.

A file that failed once is never written to again: after a failed fdatasync, the kernel may mark as
clean what never reached the medium. Such a file goes to quarantine, where it also keeps its bad
blocks from being used again. A full volume does not count as such a failure: the file is removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from keepstep.errors import (
    ImageError,
    KeepstepError,
    NoSpaceError,
    StorageError,
    UsageError,
    VersionError,
)
from keepstep.image import ControlPage, Layout, check_control
from keepstep.steps import shard_name
from keepstep_sidecar.volume import faults
from keepstep_sidecar.volume.direct_io import Engine, RateLimit
from keepstep_sidecar.volume.directories import Directories, SpareFiles
from keepstep_sidecar.volume.durable_file import DurableFile
from keepstep_sidecar.volume.filesystem import Filesystem
from keepstep_sidecar.volume.paths import Tree, temporary_name
from keepstep_sidecar.volume.scan import LocalShard, opened, read_manifest

T = TypeVar("T")

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full volume."""

CUT_OFF = "the slot was truncated; whoever may write to shared memory has done it"


@dataclass(frozen=True, kw_only=True)
class Written:
    """A durable shard. `seconds`: wall clock of the write, 0 when it was already durable."""

    shard: LocalShard
    seconds: float = 0.0


@dataclass(kw_only=True)
class Writer:
    """Writes shards of `run` below `tree`. `lock` guards names; data is written without it."""

    tree: Tree
    directories: Directories
    spares: SpareFiles
    filesystem: Filesystem
    lock: threading.RLock
    run: str
    engine: Engine
    threads: int
    capacity_bytes: int | None

    def __post_init__(self) -> None:
        self._in_progress: dict[Path, int] = {}
        self._files_made = 0

    @property
    def in_progress(self) -> Collection[Path]:
        """Temporary files that are being written. Hold `lock` while using it."""
        return self._in_progress.keys()

    def used_bytes(self) -> int:
        """Bytes that all files take but for what counts as free."""
        with self.lock:
            return self._all_bytes() - self.dispensable_bytes()

    def _all_bytes(self) -> int:
        """Bytes that all files take; files in progress count with their final size."""
        at_rest = self.directories.used_bytes(besides=self._in_progress)
        return at_rest + sum(self._in_progress.values())

    def dispensable_bytes(self) -> int:
        """Space that counts as free: spare files, and files in quarantine."""
        return self.spares.disk_bytes() + self.directories.quarantine_bytes()

    def keep_to_capacity(self) -> None:
        """Delete what counts as free if with it all files take more than they may. Raises
        OSError."""
        if self.capacity_bytes is not None:
            with self.lock:
                for drop in (self.spares.drop, self.directories.drop_quarantine):
                    if self._all_bytes() > self.capacity_bytes:
                        drop()

    def with_room(self, make: Callable[[], T]) -> T:
        """Call `make`; while the volume is full, once more without spare files, and once more
        without the files in quarantine. Raises as `make`."""
        return _with_room(make, (self.spares.drop, self.directories.drop_quarantine))

    def write(
        self, view: memoryview, layout: Layout, control: ControlPage, pace: RateLimit
    ) -> Written:
        """See `Volume.write`."""
        _check_arguments(view, layout, control, run=self.run)
        try:
            if (durable := self._durable(control)) is not None:
                return durable
        except OSError as error:
            raise StorageError(f"step {control.id}, rank {control.rank}: {error}") from error
        started = time.perf_counter()
        with self._reserved(control, layout.size_bytes) as temporary:
            try:
                with contextlib.closing(self._create(temporary, control, layout)) as file:
                    self.with_room(lambda: file.allocate(layout.size_bytes))
                    manifest = file.write_image(
                        view, layout, control, pace=pace, threads=self.threads
                    )
                    with self.lock:
                        file.give_name()
            except OSError as error:
                raise self._give_up(temporary, control, error) from error
            except BaseException:
                with contextlib.suppress(OSError):
                    self.filesystem.unlink(temporary)
                raise
        faults.point("write.done")
        seconds = time.perf_counter() - started
        return Written(shard=LocalShard.of(file.path, manifest), seconds=seconds)

    def _durable(self, control: ControlPage) -> Written | None:
        """The shard that an earlier write of the same step and rank left, if any.

        A broken one is moved to quarantine, to make room for a new one.
        """
        path = self.directories.find(control.id, shard_name(control.rank, control.world))
        if path is None:
            return None
        try:
            with opened(path, self.filesystem) as fd:
                manifest = read_manifest(fd, path, run=self.run)
        except VersionError as error:
            raise StorageError(f"a newer keepstep has written this step: {error}") from error
        except ImageError:
            with self.lock:
                self.directories.quarantine(path, "rewritten")
            return None
        return Written(shard=LocalShard.of(path, manifest))

    @contextlib.contextmanager
    def _reserved(self, control: ControlPage, size_bytes: int) -> Iterator[Path]:
        """The name of a new temporary file, whose space is reserved while it is written."""
        with self.lock:
            if self.capacity_bytes is not None:
                free = self.capacity_bytes - self.used_bytes()
                if size_bytes > free:
                    raise self._no_space(control, f"{size_bytes} bytes needed, {free} free")
            temporary = self._new_name(control)
            self._in_progress[temporary] = size_bytes
        try:
            yield temporary
        finally:
            with self.lock:
                del self._in_progress[temporary]

    def _new_name(self, control: ControlPage) -> Path:
        with self.lock:
            self._files_made += 1
            shard = shard_name(control.rank, control.world)
            name = temporary_name(shard, pid=os.getpid(), number=self._files_made)
            return self.tree.pending_step(control.id) / name

    def _create(self, temporary: Path, control: ControlPage, layout: Layout) -> DurableFile:
        """The file to write: a new one, or a spare file of this size."""
        with self.lock:
            self.directories.make_pending(control.id)
        path = self.tree.pending_shard(control.id, control.rank, control.world)
        file = DurableFile(
            path,
            temporary=temporary,
            filesystem=self.filesystem,
            engine=self.engine,
            phase="write",
        )
        try:
            claimed = self._new_name(control)
            if self.spares.replace(file, size_bytes=layout.size_bytes, claimed=claimed):
                file.reopen()
            else:
                self.keep_to_capacity()
        except BaseException:
            file.close()
            raise
        return file

    def _give_up(self, temporary: Path, control: ControlPage, error: OSError) -> KeepstepError:
        """Leave no half-written shard behind. Returns the error to raise."""
        if error.errno in (*FULL, errno.EFAULT):
            with contextlib.suppress(OSError):
                self.filesystem.unlink(temporary)
            if error.errno == errno.EFAULT:  # the memory failed, not the drive
                return UsageError(f"step {control.id}, rank {control.rank}: {CUT_OFF}")
            return self._no_space(control, error.strerror or str(error))
        kept = ""
        with contextlib.suppress(OSError), self.lock:
            kept = f"; what was written is kept as {self.directories.quarantine(temporary, 'io')}"
            self.filesystem.remove_directory(temporary.parent)  # fails if other ranks' lie there
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


def _with_room(make: Callable[[], T], drops: Sequence[Callable[[], bool]]) -> T:
    try:
        return make()
    except OSError as error:
        if error.errno not in FULL:
            raise
        for number, drop in enumerate(drops, start=1):
            if drop():
                return _with_room(make, drops[number:])
        raise


def _check_arguments(view: memoryview, layout: Layout, control: ControlPage, *, run: str) -> None:
    if len(view) != layout.size_bytes:
        raise UsageError(f"step {control.id}: {len(view)} bytes, not {layout.size_bytes}")
    try:
        check_control(control, layout, run=run)
    except ImageError as error:
        raise UsageError(f"step {control.id}, rank {control.rank}: {error.reason}") from error
    if view[: len(layout.header)] != layout.header:
        raise UsageError(f"step {control.id}, rank {control.rank}: the slot has another header")
