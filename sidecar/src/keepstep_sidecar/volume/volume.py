"""One local volume: makes staged images durable, finds shards again, and opens them for reading.

A shard goes through the states of `SHARD`; its places are those of `run_tree`. An event with a dot
is the fault point before the call that it names, because the process may die at any call.

- `absent`: no file. `hidden`: a temporary one without a seal, in any part written.
- `flushed`: data and digests are on the medium. `sealed`: the control page is written. `whole`:
  that page is on the medium, too.
- `named`: it lies in `pending/`. `durable`: that name is on the medium, too.
- `shown`: readers see its step's directory. `published`: durably so.
- `retired`: it is being deleted, or kept to be written over. `quarantined`: it failed.

`ImageFileWriter` moves a shard to `durable`, in the thread of whoever called. The volume does not
decide which steps are committed or may be deleted: callers use `publish_step` and `delete_step`.

What may never happen, and the test that would fail:

- A torn shard has a seal, readers see part of a step, or a durable shard is lost:
  `test_no_power_cut_breaks_a_guarantee`.
- A sync could be left out: `test_omitting_any_sync_breaks_a_guarantee`.
- A file that failed is written again: `test_an_io_error_quarantines_the_file_and_is_not_retried`.
- A full drive keeps half a shard: `test_a_full_disk_leaves_nothing_behind`.
- Two processes write to one directory:
  `test_a_second_owner_of_a_volume_is_refused_with_the_pid_of_the_first`.
- Another function moves it: `test_every_function_in_the_shard_state_table_causes_its_transition`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from keepstep.directory import OpenDirectory
from keepstep.errors import (
    ImageError,
    KeepstepError,
    NoSpaceError,
    StorageError,
    UsageError,
    VersionError,
)
from keepstep.image import BaseRef, ControlPage, Layout, check_control
from keepstep.image.control_page import Manifest
from keepstep.steps import StepId, make_base_file_name, parse_transition_table, shard_name
from keepstep_sidecar.config.sidecar import IO_THREADS
from keepstep_sidecar.log import warn
from keepstep_sidecar.volume import run_record
from keepstep_sidecar.volume.files import (
    FULL,
    DurableFile,
    Filesystem,
    IoMode,
    RateLimit,
    ShardFile,
    drive_id,
    fault_point,
    open_shard,
    probe_engine,
)
from keepstep_sidecar.volume.run_record import RunRecord
from keepstep_sidecar.volume.run_tree import (
    LocalShard,
    RefusedFile,
    RunDirectories,
    RunTree,
    SpareFiles,
    VolumeScan,
    base_control,
    check_base_beside_shard,
    find_foreign_safetensors,
    is_step,
    open_shard_file,
    read_manifest,
    scan_shards,
    temporary_name,
)

__all__ = ["UnreadShard", "Volume", "WrittenShard"]

SHARD = parse_transition_table("""
absent             | write.create         | hidden    | DurableFile.__init__
hidden             | spare.unseal         | hidden    | SpareFiles._unsealed
hidden             | spare.sync           | hidden    | SpareFiles._unsealed
hidden             | write.allocate       | hidden    | DurableFile.allocate
hidden             | write.data           | hidden    | DurableFile.write
hidden             | write.table          | hidden    | DurableFile.write_seal
hidden             | write.data-sync      | flushed   | DurableFile.flush
flushed            | write.control        | sealed    | DurableFile.write_seal
sealed             | write.control-sync   | whole     | DurableFile.write_seal
whole              | write.rename         | named     | DurableFile.give_name
named              | write.directory-sync | durable   | DurableFile.give_name
durable            | write.done           | durable   | ImageFileWriter.write
durable            | publish.rename       | shown     | RunDirectories._move
shown              | publish.sync         | published | RunDirectories._move
published          | unpublish.rename     | named     | RunDirectories._move
named              | unpublish.sync       | durable   | RunDirectories._move
durable, published | retire.rename        | retired   | RunDirectories._move
retired            | retire.sync          | retired   | RunDirectories._move
retired            | retire.unlink        | absent    | RunDirectories.delete_retired_directory
absent             | retire.done          | absent    | RunDirectories.delete_retired_directory
durable            | quarantine.rename    | quarantined | RunDirectories.quarantine_file
hidden, flushed, sealed, whole, named | the drive fails | quarantined | ImageFileWriter._give_up
hidden, flushed, sealed, whole, named | no room              | absent    | ImageFileWriter._give_up
hidden, flushed, sealed, whole | this process is killed | absent | RunDirectories.remove_leftovers
""")

T = TypeVar("T")

_OURS = (errno.EFAULT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of a process that lacks the memory or descriptors to read a file that may be good."""


CUT_OFF = "the slot was truncated by another process; check who may write to shared memory"


@dataclass(frozen=True, kw_only=True)
class WrittenShard:
    """A durable shard. `seconds`: wall clock of the write, 0 when it was already durable. `bytes`:
    of the shard, and of its base if that was written."""

    shard: LocalShard
    bytes: int
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SealedMemoryImage:
    """A sealed image in memory. `view`: page aligned; it must not change while it is written."""

    view: memoryview
    layout: Layout
    control: ControlPage


class UnreadShard(StorageError):
    """This process could not read a shard, but the shard may be intact."""


class Volume:
    """A directory `root` (`<dir>/<run>`) to which only this process writes.

    All methods block, may be called from any thread, and raise StorageError (NoSpaceError when the
    volume is full). `failed` is the text of the last I/O error, "" when there was none.

    `read_only`: why nothing can be written (mounted read-only, or another user's), "" when it can.
    In a pod this does not stop the training: steps are staged in memory, and what the volume
    already holds can be restored. People are told why nothing new becomes durable. Methods that
    would change the volume raise StorageError with that reason.
    """

    def __init__(
        self,
        root: Path | OpenDirectory,
        *,
        run: str,
        io_threads: int = IO_THREADS,
        capacity_bytes: int | None = None,
        filesystem: Filesystem | None = None,
        engine: IoMode | None = None,
        read_only: str = "",
    ) -> None:
        """Make and lock the directory, and find out which engine works (`engine` forces one). An
        open directory is only read, wherever its path leads now.

        `read_only`: see the class; nothing is then made or locked. Raises StorageError when another
        process owns the directory (the message names its pid) or when it cannot be written,
        ForeignError when it belongs to another run.
        """
        self.root = root.path if isinstance(root, OpenDirectory) else root.absolute()
        self.failed = self.read_only = read_only
        self._unscanned = ""
        """`failed` as the last scan set it, while there is no worse error."""
        self.filesystem = filesystem or Filesystem()
        self._directories = RunDirectories(RunTree(self.root), self.filesystem)
        self._ownership: FileLock | None = None
        self.drive_id = ""
        """As `drive_id` names it."""
        if read_only:
            self.engine, self.engine_reason = IoMode.BUFFERED, "read only"
            self.record = RunRecord(run=run)
            with contextlib.suppress(OSError, ImageError):
                self.filesystem.open_root(root)
                self.drive_id = drive_id(self.filesystem.open_directory(self.root).fd)
                self.record = run_record.load_run_record(RunTree(self.root).record, run=run)
        else:
            self._take(run, engine)
        self.io_threads = self.engine.limit_threads(io_threads)
        self._writer = ImageFileWriter(
            directories=self._directories,
            spares=SpareFiles(self._directories),
            run=run,
            engine=self.engine,
            threads=self.io_threads,
            capacity_bytes=capacity_bytes,
        )

    def _take(self, run: str, engine: IoMode | None) -> None:
        with self._translated(f"cannot use the volume {self.root}"):
            self.filesystem.open_root(self.root, make=True)
            self._ownership = FileLock(RunTree(self.root).lock)
            self._device = self.root.stat().st_dev
            self.drive_id = drive_id(self.filesystem.open_directory(self.root).fd)
            try:
                self.record = run_record.load_run_record(RunTree(self.root).record, run=run)
                self.engine, self.engine_reason = (
                    (engine, "as configured")
                    if engine
                    else probe_engine(self.filesystem, self.root)
                )
            except BaseException:
                self._ownership.release()
                raise

    # --- writing -----------------------------------------------------------------------------

    def write(
        self,
        view: memoryview,
        layout: Layout,
        control: ControlPage,
        *,
        base: SealedMemoryImage | None = None,
        pace: RateLimit | None = None,
    ) -> WrittenShard:
        """Make the sealed image in the slot `view` durable as `pending/<step>/<shard>`, with the
        `base` that it refers to beside it: as a hard link if another step here has it.

        `view` is page aligned and must not change meanwhile (the slot is pinned). `pace` limits the
        rate of all writes that share it. Digests are computed during the write and are stored in
        the file only. A shard that is already durable is left as it is. Raises UsageError when
        `view`, `layout` and `control` do not belong together, NoSpaceError (the file is removed) or
        StorageError (the file is quarantined). Failed writes are never retried here.
        """
        if self._ownership is None:
            raise StorageError(self.read_only)
        try:
            image = SealedMemoryImage(view=view, layout=layout, control=control)
            written = self._writer.write(image, base, pace or RateLimit(None))
        except NoSpaceError:
            raise
        except StorageError as error:
            self.failed = str(error.__cause__ or error)
            raise
        self.failed = ""
        return written

    # --- reading -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def open_or_quarantine(self, path: Path) -> Iterator[ShardFile]:
        """Open a shard for reading; `path` as a scan found it. An ImageError inside the context
        puts the file into quarantine, except a VersionError, because a newer keepstep can read the
        file. An OSError also puts it into quarantine and becomes a StorageError. If this process
        lacks memory or descriptors, the file stays, and UnreadShard is raised."""
        try:
            # inside the try: a dead drive fails here already
            path = self._directories.find_current_path(path)
            with open_shard_file(path, self.filesystem):  # never a link or a pipe
                pass
            with open_shard(path, filesystem=self.filesystem, engine=self.engine) as file:
                yield file
        except VersionError:
            raise
        except ImageError as error:
            self.quarantine_file(path, _reason(error))
            raise
        except FileNotFoundError as error:
            raise StorageError(f"{path}: it is gone; scan again") from error
        except OSError as error:
            if error.errno in _OURS:
                why = CUT_OFF if error.errno == errno.EFAULT else error.strerror
                raise UnreadShard(f"{path}: cannot read it: {why}") from error
            self.failed = self.read_only or str(error)
            with contextlib.suppress(KeepstepError):
                self.quarantine_file(path, _reason(error))
            raise StorageError(f"{path}: cannot read: {error}; use another copy") from error

    def scan(self) -> VolumeScan:
        """Find every shard, quarantine torn, foreign and malformed files, and remove leftovers.

        If a shard of a step had to be moved, the step is hidden from readers (`published` is
        False). On a read-only volume nothing is moved.
        """
        try:
            found = self._scan()
        except StorageError:
            self._unscanned = self.failed
            raise
        if self.failed == self._unscanned:  # the error that only stood in the way of a scan is gone
            self.failed = ""
        return found

    def _scan(self) -> VolumeScan:
        with self._directories.lock, self._translated(f"cannot scan {self.root}"):
            if self.read_only:
                return scan_shards(self.root, run=self.record.run, filesystem=self.filesystem)
            self._writer.spares.delete_all()
            self._directories.remove_leftovers(keep=self._writer.unfinished_files)
            seen = scan_shards(self.root, run=self.record.run, filesystem=self.filesystem)
            for path in find_foreign_safetensors(RunTree(self.root), self.filesystem):
                warn("volume.foreign_file_found", path=str(path))
            moved = [self.quarantine_refused_file(problem) for problem in seen.problems]
            if all(problem.moved_to is None for problem in moved):
                return replace(seen, problems=tuple(moved))
            return replace(
                scan_shards(self.root, run=self.record.run, filesystem=self.filesystem),
                problems=tuple(moved),
            )

    def quarantine_refused_file(self, problem: RefusedFile) -> RefusedFile:
        """Move the file to quarantine, unless a newer keepstep can read it. Raises StorageError."""
        if isinstance(problem.error, VersionError):
            return problem
        return replace(problem, moved_to=self.quarantine_file(problem.path, _reason(problem.error)))

    # --- steps -------------------------------------------------------------------------------

    def publish_step(self, step_id: StepId, *, elsewhere: Sequence[Path] = ()) -> Path | None:
        """Make a committed step visible to readers; returns its directory. Idempotent.

        Returns None when this volume holds nothing of the step. `elsewhere`: shards on other
        volumes, which the directory then shows as links. Call it only when the step is committed.
        Raises UsageError while a shard of the step is being written.
        """
        with self._changing(f"cannot publish step {step_id} below {self.root}"):
            self._refuse_while_writing(step_id)
            return self._directories.publish_step(step_id, elsewhere)

    def unpublish(self, step_id: StepId) -> None:
        """Hide a step again because one of its shards is lost. Idempotent."""
        with self._changing(f"cannot hide step {step_id} below {self.root}"):
            self._directories.unpublish(step_id)

    def delete_step(self, step_id: StepId, *, reuse: bool = True) -> int:
        """Delete a step, after durably hiding it. Returns the bytes freed, 0 when absent.

        `reuse`: its shards may stay until the next images are written over them; they count as
        free. Raises UsageError while a shard of the step is being written.
        """
        with self._changing(f"cannot retire step {step_id} below {self.root}"):
            self._refuse_while_writing(step_id)
            doomed = self._directories.delete_step(step_id)
        with self._translated(f"cannot delete step {step_id} below {self.root}"):
            spared = self._writer.spares.keep(doomed) if reuse else 0
            return spared + sum(map(self._directories.delete_retired_directory, doomed))

    def with_room(self, make: Callable[[], T]) -> T:
        """Call `make`, which makes a file of its own below the root; if the volume is full, once
        more without what only counts as free. Raises as `make`."""
        made = self._writer.with_room(make)
        self._writer.keep_to_capacity()
        return made

    def _refuse_while_writing(self, step_id: StepId) -> None:
        if any(
            temporary.parent.name == str(step_id) for temporary in self._writer.unfinished_files
        ):
            raise UsageError(f"step {step_id} is being written; wait for that")

    def quarantine_file(self, path: Path, reason: str) -> Path:
        """Move a file to quarantine, where it is kept and never read again. Returns its new path.

        A published step that loses a shard is hidden first. `path` may be from before the step was
        published or hidden. On a read-only volume the file stays where it is.
        """
        if self.read_only:
            return path
        with self._changing(f"cannot quarantine {path}"):
            return self._directories.quarantine_file(
                self._directories.find_current_path(path), reason
            )

    def compute_published_paths(self, step_id: StepId) -> tuple[Path, ...]:
        """The paths that this volume's shards of a step have once it is published."""
        with self._translated(f"cannot list {self.root}"):
            return self._directories.published_paths_of_step(step_id)

    def save_record(self, record: RunRecord) -> None:
        """Durably replace `run.json` by `record`, which becomes `self.record`."""
        path = RunTree(self.root).record
        with self._changing(f"cannot write {path}"):
            self._writer.with_room(
                lambda: run_record.save_run_record(path, record, filesystem=self.filesystem)
            )
            self.record = record

    def is_run_directory_removed(self) -> bool:
        """Whether somebody removed the run's directory. False if its file system is away, and for a
        volume that is read-only."""
        with self._translated(f"cannot look for {self.root}"):
            if self._ownership is None or self._ownership.is_file_in_place:
                return False
            nearest = self._nearest()
            return nearest.is_dir() and nearest.stat().st_dev == self._device

    def recreate_run_directory(self) -> bool:
        """Make the run's directory again if somebody removed it. Returns True in that case: the
        known shards are then out of date, and `scan` must look again."""
        with self._changing(f"cannot make {self.root} again"):
            former = self._ownership
            if former is None or former.is_file_in_place:
                return False
            if self._nearest().stat().st_dev != self._device:  # do not use what lies below a mount
                raise OSError(errno.ENODEV, "its file system is not mounted any more")
            self.filesystem.open_root(self.root, make=True)
            self._ownership = FileLock(RunTree(self.root).lock)
            former.release()
            run_record.save_run_record(
                RunTree(self.root).record, self.record, filesystem=self.filesystem
            )
            self.failed = ""
            return True

    def _nearest(self) -> Path:
        """The root, or the directory above it that is there."""
        return next(path for path in (self.root, *self.root.parents) if path.exists())

    # --- space -------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Bytes that this volume's files take, with writes in progress, without what counts as
        free."""
        if self.read_only:
            return 0
        with self._translated(f"cannot measure {self.root}"):
            return self._writer.sum_bytes_of_volume_files()

    def free_bytes(self) -> int:
        """Bytes free on the file system, or below the capacity limit if that is less."""
        if self.read_only:
            return 0
        with self._translated(f"cannot measure {self.root}"):
            return self._writer.free_bytes()

    def read_drive_identity(self) -> tuple[int, int]:
        """The device number of its file system, and the size of that in bytes."""
        with self._translated(f"cannot measure {self.root}"):
            return self._device, self.filesystem.size_bytes(self.root)

    def count_quarantined_files(self) -> int:
        """Number of files in quarantine; 0 if read-only: this process has then put none there."""
        if self.read_only:
            return 0
        with self._translated(f"cannot list {RunTree(self.root).quarantine}"):
            return self._directories.count_quarantined_files()

    def close(self) -> None:
        """Delete what is only kept to be written over, and release the directory. Call it when no
        other method is running. Idempotent."""
        if self._ownership is not None:
            with contextlib.suppress(OSError):
                if self._ownership.is_file_in_place:
                    self._writer.spares.delete_all()
            self._ownership.release()
        self.filesystem.release_root(self.root)

    # --- errors ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """The right to change names here. Raises StorageError if the volume is read-only."""
        if self._ownership is None:
            raise StorageError(self.read_only)
        with self._directories.lock, self._translated(what):
            yield

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """Turn an OSError into a StorageError that says what could not be done."""
        try:
            yield
        except OSError as error:
            if error.errno in FULL:
                raise NoSpaceError(f"{what}: {error.strerror}; free space") from error
            self.failed = self.read_only or str(error)
            raise StorageError(f"{what}: {error}") from error


def _reason(error: Exception) -> str:
    """The reason to be put into a quarantined file's name."""
    if isinstance(error, OSError):
        return errno.errorcode.get(error.errno or 0, "io")
    return type(error).__name__.removesuffix("Error")


# --- one image -------------------------------------------------------------------------------


@dataclass(kw_only=True)
class ImageFileWriter:
    """Makes one staged image durable: a file is written, sealed and named, or no file is left.

    A file that failed once is never written to again: after a failed fdatasync, the kernel may mark
    as clean what never reached the medium. Such a file goes to quarantine, where it also keeps its
    bad blocks from being used again. A full volume does not count as such a failure: the file is
    removed. The directories' lock guards names; data is written without it.
    """

    directories: RunDirectories
    spares: SpareFiles
    run: str
    engine: IoMode
    threads: int
    capacity_bytes: int | None

    def __post_init__(self) -> None:
        self._tree, self._lock = self.directories.tree, self.directories.lock
        self._filesystem = self.directories.filesystem
        self._in_progress: dict[Path, int] = {}
        self._files_made = 0

    @property
    def unfinished_files(self) -> Collection[Path]:
        """Temporary files that are being written. Hold `lock` while using it."""
        return self._in_progress.keys()

    def sum_bytes_of_volume_files(self) -> int:
        """Bytes that all files take but for what counts as free."""
        with self._lock:
            return self._all_bytes() - self.dispensable_bytes()

    def _all_bytes(self) -> int:
        """Bytes that all files take; files in progress count with their final size."""
        at_rest = self.directories.used_bytes(besides=self._in_progress)
        return at_rest + sum(self._in_progress.values())

    def dispensable_bytes(self) -> int:
        """Space that counts as free: spare files, and files in quarantine."""
        return self.spares.disk_bytes() + self.directories.count_allocated_bytes(
            self._tree.quarantine
        )

    def free_bytes(self) -> int:
        """Bytes free on the file system, or below the capacity limit if that is less."""
        root = self._tree.root
        free = self._filesystem.free_bytes(root) + self.dispensable_bytes()
        if self.capacity_bytes is None:
            return free
        return max(0, min(free, self.capacity_bytes - self.sum_bytes_of_volume_files()))

    def keep_to_capacity(self) -> None:
        """Delete what counts as free if with it all files take more than they may. Raises
        OSError."""
        if self.capacity_bytes is not None:
            with self._lock:
                for drop in (self.spares.delete_all, self.directories.drop_quarantine):
                    if self._all_bytes() > self.capacity_bytes:
                        drop()

    def with_room(self, make: Callable[[], T]) -> T:
        """Call `make`; while the volume is full, once more without spare files, and once more
        without the files in quarantine. Raises as `make`."""
        drops = iter((self.spares.delete_all, self.directories.drop_quarantine))

        def made() -> T:
            try:
                return make()
            except OSError as error:
                if error.errno in FULL and any(drop() for drop in drops):
                    return made()
                raise

        return made()

    def write(
        self, image: SealedMemoryImage, base: SealedMemoryImage | None, pace: RateLimit
    ) -> WrittenShard:
        """See `Volume.write`."""
        control = image.control
        _check_arguments(image, base, run=self.run)
        try:
            if (durable := self._durable(control)) is not None:
                return durable
        except OSError as error:
            raise StorageError(f"step {control.step_id}, rank {control.rank}: {error}") from error
        started, size_bytes = time.perf_counter(), image.layout.size_bytes
        if base is not None:
            ref, written_bytes = self._beside(control, base, pace)
            control, size_bytes = replace(control, base=ref), size_bytes + written_bytes
        path = self._tree.pending_step(control.step_id) / shard_name(control.rank, control.world)
        manifest = self._write(path, replace(image, control=control), control.step_id, pace)
        fault_point("write.done")
        seconds = time.perf_counter() - started
        return WrittenShard(
            shard=LocalShard.from_manifest(path, manifest), seconds=seconds, bytes=size_bytes
        )

    def _beside(
        self, control: ControlPage, base: SealedMemoryImage, pace: RateLimit
    ) -> tuple[BaseRef, int]:
        """Put the base beside the shard that is about to be written, durably once that has its
        name. Returns how to name it, and the bytes that were written."""
        ref, name = (
            BaseRef.of(base.control, base.layout),
            make_base_file_name(control.rank, control.world),
        )
        path = self._tree.pending_step(control.step_id) / name
        with self._lock:
            self.directories.make_pending(control.step_id)
            for known in self.directories.find_base_files(name):
                with contextlib.suppress(OSError, ImageError):
                    found = base_control(known, self._filesystem, size_bytes=ref.size_bytes)
                    if ref.matches_control_page(found) and found.run == self.run:
                        fault_point("base.link")
                        self._link(known, path)
                        return replace(ref, root=found.root), 0
        manifest = self._write(path, base, control.step_id, pace)
        return replace(ref, root=manifest.control.root), base.layout.size_bytes

    def _link(self, known: Path, path: Path) -> None:
        if known != path:
            with contextlib.suppress(FileNotFoundError):  # of a shard that was never finished
                self._filesystem.unlink(path)
            self._filesystem.link(known, path)

    def _write(
        self, path: Path, image: SealedMemoryImage, step_id: StepId, pace: RateLimit
    ) -> Manifest:
        """Write one file of step `step_id`, durable on return. Raises KeepstepError."""
        view, layout, control = image.view, image.layout, image.control
        with self._reserved(path, control, layout.size_bytes) as temporary:
            try:
                with contextlib.closing(self._create(temporary, path, step_id, layout)) as file:
                    self.with_room(lambda: file.allocate(layout.size_bytes))
                    manifest = file.write_image(
                        view, layout, control, pace=pace, threads=self.threads
                    )
                    with self._lock:
                        file.give_name()
            except OSError as error:
                raise self._give_up(temporary, control, error) from error
            except BaseException:
                with contextlib.suppress(OSError):
                    self._filesystem.unlink(temporary)
                raise
        return manifest

    def _durable(self, control: ControlPage) -> WrittenShard | None:
        """The shard that an earlier write of the same step and rank left, if any.

        A broken one is moved to quarantine, to make room for a new one.
        """
        path = self.directories.find_shard_path(
            control.step_id, shard_name(control.rank, control.world)
        )
        if path is None:
            return None
        try:
            with open_shard_file(path, self._filesystem) as fd:
                manifest = read_manifest(fd, path, run=self.run)
            check_base_beside_shard(path, manifest.control, self._filesystem)
        except VersionError as error:
            raise StorageError(f"a newer keepstep has written this step: {error}") from error
        except ImageError:
            with self._lock:
                self.directories.quarantine_file(path, "rewritten")
            return None
        shard = LocalShard.from_manifest(path, manifest)
        return WrittenShard(shard=shard, bytes=shard.size_bytes)

    @contextlib.contextmanager
    def _reserved(self, path: Path, control: ControlPage, size_bytes: int) -> Iterator[Path]:
        """The name of a new temporary file for `path`; its space is reserved while it is
        written."""
        with self._lock:
            if self.capacity_bytes is not None:
                free = self.capacity_bytes - self.sum_bytes_of_volume_files()
                if size_bytes > free:
                    raise self._no_space(control, f"{size_bytes} bytes needed, {free} free")
            temporary = self._new_name(path)
            self._in_progress[temporary] = size_bytes
        try:
            yield temporary
        finally:
            with self._lock:
                del self._in_progress[temporary]

    def _new_name(self, path: Path) -> Path:
        with self._lock:
            self._files_made += 1
            name = temporary_name(path.name, pid=os.getpid(), number=self._files_made)
            return path.with_name(name)

    def _create(self, temporary: Path, path: Path, step_id: StepId, layout: Layout) -> DurableFile:
        """The file to write: a new one, or a spare file of this size."""
        with self._lock:
            self.directories.make_pending(step_id)
        file = DurableFile(
            path,
            temporary=temporary,
            filesystem=self._filesystem,
            engine=self.engine,
            phase="write",
        )
        try:
            claimed = self._new_name(path)
            if self.spares.reuse_spare_file(file, size_bytes=layout.size_bytes, claimed=claimed):
                file.switch_to_replaced_file()
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
                self._filesystem.unlink(temporary)
            if error.errno == errno.EFAULT:  # the memory failed, not the drive
                return UsageError(f"step {control.step_id}, rank {control.rank}: {CUT_OFF}")
            return self._no_space(control, error.strerror or str(error))
        kept = ""
        with contextlib.suppress(OSError), self._lock:
            kept = (
                f"; what was written is kept as {self.directories.quarantine_file(temporary, 'io')}"
            )
            self._filesystem.remove_directory(temporary.parent)  # fails if other ranks' lie there
        return StorageError(
            f"step {control.step_id}, rank {control.rank}: cannot write below {self._tree.root}:"
            f" {error}{kept}. Check the drive (dmesg); later steps go to another volume if there"
            " is one"
        )

    def _no_space(self, control: ControlPage, why: str) -> NoSpaceError:
        limit = "" if self.capacity_bytes is None else f" (limit {self.capacity_bytes} bytes)"
        return NoSpaceError(
            f"step {control.step_id}, rank {control.rank}: no space on {self._tree.root}{limit}:"
            f" {why}. Free space, raise the capacity, or keep fewer steps"
        )


def _check_arguments(image: SealedMemoryImage, base: SealedMemoryImage | None, *, run: str) -> None:
    control = image.control
    _check_image(image, control, run=run)
    if base is not None:
        _check_image(base, control, run=run)
    found = None if base is None else base.control
    if not (found is None if control.base is None else control.base.matches_control_page(found)):
        raise UsageError(
            f"step {control.step_id}, rank {control.rank}: not with the base that it names"
        )


def _check_image(image: SealedMemoryImage, step: ControlPage, *, run: str) -> None:
    """`step`: of the image of the step, which is named."""
    view, layout = image.view, image.layout
    if len(view) != layout.size_bytes:
        raise UsageError(f"step {step.step_id}: {len(view)} bytes, not {layout.size_bytes}")
    try:
        check_control(image.control, layout, run=run)
    except ImageError as error:
        raise UsageError(f"step {step.step_id}, rank {step.rank}: {error.reason}") from error
    if view[: len(layout.header)] != layout.header:
        raise UsageError(f"step {step.step_id}, rank {step.rank}: the slot has another header")


# --- one writer ------------------------------------------------------------------------------
#
# Only one process writes to a directory: it holds an advisory lock, which the kernel releases when
# the process dies.


class FileLock:
    """Holds `path` locked from construction to `release`.

    Raises StorageError when another process holds the lock (the message names its pid), OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = OpenDirectory.open_path(path.parent).open_file(path.name, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            self.release()
            raise StorageError(
                f"{path.parent}: in use by a sidecar that is running (pid {owner}); stop it"
                " (keepstep stop), or use another directory or run name"
            ) from error
        except BaseException:
            self.release()
            raise
        with contextlib.suppress(OSError):  # a full disk is no error: the pid is only for people
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    @property
    def is_file_in_place(self) -> bool:
        """Whether the locked file is still at its path. If not, another process could lock a new
        one. Raises OSError when this cannot be determined."""
        try:
            found = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return self._fd >= 0 and os.path.samestat(os.fstat(self._fd), found)

    def release(self) -> None:
        """Let other processes have the lock. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# --- all volumes of a run --------------------------------------------------------------------


class VolumeSet:
    """The volumes of one run on this machine, at least one. Methods block, as those of `Volume`."""

    def __init__(self, volumes: Sequence[Volume], *, bytes_per_second: int | None = None) -> None:
        """`bytes_per_second`: the limit for all writes together."""
        if not volumes:
            raise UsageError("a run needs at least one volume")
        self.volumes: tuple[Volume, ...] = tuple(volumes)
        self._writable = [volume for volume in volumes if not volume.read_only]
        self._homes: dict[int, int] = {}
        self._lock = threading.Lock()
        self.pace = RateLimit(bytes_per_second)
        self.record = RunRecord.union([volume.record for volume in volumes])
        """What the volumes have on record, taken together."""

    @property
    def history_path(self) -> Path | None:
        """The path of the run's history, on the first writable volume; None without one."""
        return next((RunTree(volume.root).history for volume in self._writable), None)

    def volume_for(self, rank: int) -> Volume:
        """The volume that `rank` writes to: its own, or a healthy one if its own has failed.

        If no volume is healthy, it is the rank's own: every step is a new file, and so a new try.
        """
        home = self.volumes[self.home_volume(rank)]
        healthy = [volume for volume in self.volumes if not volume.failed]
        if home in healthy or not healthy:
            return home
        return healthy[rank % len(healthy)]

    def home_volume(self, rank: int) -> int:
        """The number of the rank's own volume. Ranks are spread evenly, whatever their numbers."""
        with self._lock:
            if rank not in self._homes:
                taken = Counter(self._homes.values())
                turn = [(rank + n) % len(self.volumes) for n in range(len(self.volumes))]
                self._homes[rank] = min(turn, key=lambda number: taken[number])
            return self._homes[rank]

    def write(
        self,
        view: memoryview,
        layout: Layout,
        control: ControlPage,
        *,
        base: SealedMemoryImage | None = None,
    ) -> WrittenShard:
        """`Volume.write` on the volume of `control.rank`; if that is full, on one that is not.

        Raises the NoSpaceError of the rank's own volume when all are full.
        """
        home = self.volume_for(control.rank)
        try:
            return home.write(view, layout, control, base=base, pace=self.pace)
        except NoSpaceError as error:
            for other in self.volumes:
                if other is not home and not other.failed:
                    with contextlib.suppress(NoSpaceError):
                        written = other.write(view, layout, control, base=base, pace=self.pace)
                        warn("volume.full", error=str(error), written_to=str(other.root))
                        return written
            raise

    @contextlib.contextmanager
    def open_shard_file(self, path: Path) -> Iterator[ShardFile]:
        """`Volume.open_or_quarantine` on the volume that holds `path`. If the shard or the drive
        fails, the step is hidden on all volumes; not after VersionError or UnreadShard."""
        try:
            with self.volume_of(path).open_or_quarantine(path) as file:
                yield file
        except (VersionError, UnreadShard):
            raise
        except (ImageError, StorageError):
            self._hide(path)
            raise

    def scan(self) -> VolumeScan:
        """The scans of all volumes as one. A volume that cannot be read hides no other one:
        `unread` names it."""
        scans, unread = self._scan()
        problems = tuple(problem for scan in scans for problem in scan.problems)
        lost = [problem.path for problem in problems if problem.moved_to is not None]
        if lost and len(self.volumes) > 1:
            for path in lost:
                self._hide(path)
            scans, unread = self._scan()
        shards = sorted(
            (shard for scan in scans for shard in scan.shards),
            key=lambda shard: (shard.step_id, shard.rank),
        )
        return VolumeScan(shards=tuple(shards), problems=problems, unread=unread)

    def _scan(self) -> tuple[list[VolumeScan], dict[Path, str]]:
        scans = {volume.root: _tried(Volume.scan, volume) for volume in self.volumes}
        return (
            [scan for scan in scans.values() if not isinstance(scan, StorageError)],
            {root: str(scan) for root, scan in scans.items() if isinstance(scan, StorageError)},
        )

    def is_run_directory_removed(self) -> bool:
        """Whether somebody removed the run's directory on every volume. Raises StorageError."""
        return all(volume.is_run_directory_removed() for volume in self.volumes)

    def repair_directories(self) -> bool:
        """`Volume.recreate_run_directory` on each volume. True if any was mended. Raises
        StorageError when one failed and none was mended."""
        return bool(self._of_each(Volume.recreate_run_directory))

    def publish_step(self, step_id: StepId, *, made_of: Collection[Path] = ()) -> Path | None:
        """Make a committed step visible. Returns the directory that shows all its shards.

        `made_of`: the step's shards on this machine. A volume that cannot be listed is left out,
        unless one of `made_of` lies on it: a step is never shown in part.
        """
        parts = [(volume, self._part(volume, step_id, made_of)) for volume in self._writable]
        shown = [
            volume.publish_step(step_id, elsewhere=[path for _, paths in parts for path in paths])
            for volume, own in parts
            if own
        ]
        return shown[0] if shown else None

    def _part(self, volume: Volume, step_id: StepId, made_of: Collection[Path]) -> tuple[Path, ...]:
        try:
            return volume.compute_published_paths(step_id)
        except StorageError:
            if any(path.is_relative_to(volume.root) for path in made_of):
                raise
            return ()

    def delete_step(self, step_id: StepId) -> int:
        """Delete a step, except on volumes that fail. Returns the bytes freed. Raises StorageError
        when a volume fails and nothing was freed on the others."""
        return self._of_each(lambda volume: volume.delete_step(step_id))

    def _of_each(self, work: Callable[[Volume], int]) -> int:
        """The sum of `work` over all volumes. A volume that fails does not stop the others. Raises
        its StorageError when the sum is 0."""
        results = [_tried(work, volume) for volume in self._writable]
        total = sum(size for size in results if not isinstance(size, StorageError))
        failure = next((result for result in results if isinstance(result, StorageError)), None)
        if failure is not None and not total:
            raise failure
        return total

    def find_max_free_bytes(self) -> int:
        """Free bytes of the working volume that has most; 0 if none can tell."""
        free = [0]
        for volume in self.volumes:
            if not volume.failed:
                with contextlib.suppress(StorageError):
                    free.append(volume.free_bytes())
        return max(free)

    def measure_total_bytes(self) -> int:
        """Total size in bytes of the file systems that are written to, each counted once; 0 if none
        can tell."""
        sizes: dict[int, int] = {}
        for volume in self._writable:
            with contextlib.suppress(StorageError):
                sizes.update([volume.read_drive_identity()])
        return sum(sizes.values())

    def quarantine(self, path: Path, reason: str) -> Path:
        """Move one shard to quarantine and hide its step on every volume. Returns the new path."""
        moved_to = self.volume_of(path).quarantine_file(path, reason)
        self._hide(path)
        return moved_to

    def change_record(self, change: Callable[[RunRecord], RunRecord]) -> None:
        """Change the record durably on every writable volume. Without any, nothing durable will
        need it. Raises StorageError when all fail."""
        results = [
            _tried(lambda volume: volume.save_record(change(volume.record)), volume)
            for volume in self._writable
        ]
        self.record = RunRecord.union([volume.record for volume in self.volumes])
        failures = [result for result in results if result is not None]
        if failures and len(failures) == len(results):
            raise failures[0]

    def close(self) -> None:
        """Close all volumes."""
        for volume in self.volumes:
            volume.close()

    def volume_of(self, path: Path) -> Volume:
        """The volume on which `path` lies."""
        for volume in self.volumes:
            if path.is_relative_to(volume.root):
                return volume
        raise UsageError(f"{path}: on none of the volumes of this run")

    def _hide(self, path: Path) -> None:
        """Hide the step of `path` on every volume. A volume that fails keeps showing it."""
        if not is_step(path.parent.name):
            return
        for volume in self._writable:
            with contextlib.suppress(StorageError):
                volume.unpublish(StepId.parse(path.parent.name))


def _tried(work: Callable[[Volume], T], volume: Volume) -> T | StorageError:
    try:
        return work(volume)
    except StorageError as error:
        return error
