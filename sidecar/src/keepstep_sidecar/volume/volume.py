"""One local volume: makes staged images durable, finds them again, brings them back.

A shard is durable once `write` returns, and at rest in `pending/`. It moves by rename only, so
that it is in exactly one place at any time; see `paths` for the places. Each method ends with
the names it changed on the medium. Which steps are committed, and which may go, is not decided
here: callers say `publish` and `retire`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from keepstep.errors import (
    ImageError,
    KeepstepError,
    NoSpaceError,
    StorageError,
    UsageError,
    VersionError,
)
from keepstep.image import ControlPage, Layout
from keepstep.steps import StepId
from keepstep_sidecar.config.verify import Verify
from keepstep_sidecar.log import warn
from keepstep_sidecar.volume import run_record
from keepstep_sidecar.volume.direct_io import Engine, Pace, probe
from keepstep_sidecar.volume.directories import Directories
from keepstep_sidecar.volume.filesystem import Filesystem
from keepstep_sidecar.volume.paths import Tree
from keepstep_sidecar.volume.run_record import RunRecord
from keepstep_sidecar.volume.scan import Refused, Scan, opened, strangers, survey
from keepstep_sidecar.volume.shard_file import ShardFile, open_shard
from keepstep_sidecar.volume.writer import CUT_OFF, FULL, Writer, Written

__all__ = ["Unread", "Volume", "Written"]

_OURS = (errno.EFAULT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Error numbers of a process that lacks the memory, or descriptors, to read what is good."""


class Unread(StorageError):
    """This process could not read a shard that may be as good as ever."""


class Volume:
    """A directory `root` (`<dir>/<run>`) that this process alone writes to.

    All methods block, may be called from any thread, and raise StorageError (NoSpaceError when
    the volume is full). `failed` is the text of the last I/O error, "" when there was none.

    `read_only`: why nothing can be written (mounted so, or another user's), "" when it can. In a
    pod that is no reason to keep the training waiting: steps are staged in memory, what the volume
    holds already can be restored, and everybody is told why nothing new becomes durable. What
    would change it raises StorageError with that reason.
    """

    def __init__(
        self,
        root: Path,
        *,
        run: str,
        io_threads: int = 4,
        capacity_bytes: int | None = None,
        filesystem: Filesystem | None = None,
        engine: Engine | None = None,
        verify: Verify = Verify.FULL,
        read_only: str = "",
    ) -> None:
        """Make and lock the directory, find out the engine (`engine` forces one).

        `verify`: what `load` checks. `read_only`: see the class; then nothing is made or locked.
        Raises StorageError when another process owns it (the message names its pid) or when it
        cannot be written, ForeignError when it belongs to another run.
        """
        self.root = root.absolute()
        self.run = run
        self.capacity_bytes = capacity_bytes
        self.failed = self.read_only = read_only
        self._unscanned = ""
        """`failed` of the last scan, while it is nothing worse."""
        self.io_threads = io_threads
        self.verify = verify
        self._filesystem = filesystem or Filesystem()
        self._tree = Tree(self.root)
        self._shelves = Directories(self._tree, self._filesystem)
        self._lock = threading.RLock()
        self._ownership: Ownership | None = None
        if read_only:
            self.engine, self.engine_reason = Engine.BUFFERED, "read only"
            self.record = RunRecord(run=run)
            with contextlib.suppress(OSError, ImageError):
                self.record = run_record.load(self._tree.record, run=run)
        else:
            self._take(engine)
        self._writer = Writer(
            tree=self._tree,
            shelves=self._shelves,
            filesystem=self._filesystem,
            lock=self._lock,
            run=run,
            engine=self.engine,
            threads=io_threads,
            capacity_bytes=capacity_bytes,
        )

    def _take(self, engine: Engine | None) -> None:
        with self._translated(f"cannot use the volume {self.root}"):
            self.root.mkdir(parents=True, exist_ok=True)
            self._ownership = Ownership(self._tree.lock)
            self._device = self.root.stat().st_dev
            try:
                self.record = run_record.load(self._tree.record, run=self.run)
                self.engine, self.engine_reason = (
                    (engine, "as configured") if engine else probe(self._filesystem, self.root)
                )
            except BaseException:
                self._ownership.release()
                raise

    def _require_writable(self) -> Ownership:
        if self._ownership is None:
            raise StorageError(self.read_only)
        return self._ownership

    # --- writing -----------------------------------------------------------------------------

    def write(
        self,
        view: memoryview,
        layout: Layout,
        control: ControlPage,
        *,
        pace: Pace | None = None,
    ) -> Written:
        """Make the sealed image in the slot `view` durable as `pending/<step>/<shard>`.

        `view` is page aligned and stays unchanged meanwhile (the slot is pinned). `pace` bounds
        the speed of all writes that share it. Digests are computed on the way and go into the file
        only. A shard that is durable already is left as it is. Raises UsageError when `view`,
        `layout` and `control` do not belong together, NoSpaceError (the file is removed) or
        StorageError (the file is quarantined); neither is ever retried here.
        """
        self._require_writable()
        try:
            written = self._writer.write(view, layout, control, pace or Pace(None))
        except NoSpaceError:
            raise
        except StorageError as error:
            self.failed = str(error.__cause__ or error)
            raise
        self.failed = ""
        return written

    # --- reading -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(self, path: Path) -> Iterator[ShardFile]:
        """A shard for reading; `path` as a scan found it. Whatever fails inside condemns the file:
        an ImageError puts it into quarantine (but a VersionError, which a newer keepstep reads), so
        does an OSError, which becomes a StorageError; but what this process is short of condemns no
        file: Unread."""
        try:
            path = self._shelves.locate(path)  # within: a dead drive does not tell even that
            with opened(path):  # never by a link, and no pipe
                pass
            with open_shard(
                path,
                os.O_RDONLY,
                filesystem=self._filesystem,
                engine=self.engine,
                threads=self.io_threads,
            ) as file:
                yield file
        except VersionError:
            raise
        except ImageError as error:
            self.quarantine(path, _reason(error))
            raise
        except FileNotFoundError as error:
            raise StorageError(f"{path}: it is gone; scan again") from error
        except OSError as error:
            if error.errno in _OURS:
                why = CUT_OFF if error.errno == errno.EFAULT else error.strerror
                raise Unread(f"{path}: cannot read it: {why}") from error
            self._fail(error)
            with contextlib.suppress(KeepstepError):
                self.quarantine(path, _reason(error))
            raise StorageError(f"{path}: cannot read: {error}; use another copy") from error

    def scan(self) -> Scan:
        """Find every shard; quarantine what is torn, foreign or malformed; sweep leftovers.

        A step of which a shard had to be moved is hidden from readers (`published` is False).
        Where nothing can be written nothing is moved either.
        """
        try:
            found = self._scan()
        except StorageError:
            self._unscanned = self.failed
            raise
        if self.failed == self._unscanned:  # what stood in the way of a scan only is gone
            self.failed = ""
        return found

    def _scan(self) -> Scan:
        with self._lock, self._translated(f"cannot scan {self.root}"):
            if self.read_only:
                return survey(self.root, run=self.run)
            self._shelves.sweep(keep=self._writer.in_progress)
            seen = survey(self.root, run=self.run)
            for path in strangers(Tree(self.root)):
                warn("foreign file in a step's directory: take it out", path=str(path))
            moved = [self._settle(problem) for problem in seen.problems]
            if all(problem.moved_to is None for problem in moved):
                return replace(seen, problems=tuple(moved))
            return replace(survey(self.root, run=self.run), problems=tuple(moved))

    def _settle(self, problem: Refused) -> Refused:
        if isinstance(problem.error, VersionError):
            return problem
        return replace(problem, moved_to=self.quarantine(problem.path, _reason(problem.error)))

    # --- steps -------------------------------------------------------------------------------

    def publish(self, id: StepId, *, elsewhere: Sequence[Path] = ()) -> Path | None:
        """Make a committed step visible to readers; returns its directory. Idempotent.

        None when this volume holds nothing of the step. `elsewhere`: shards on other volumes,
        which the directory then shows as links. Call it only when the step is committed. Raises
        UsageError while a shard of the step is being written.
        """
        self._require_writable()
        with self._lock, self._translated(f"cannot publish step {id} below {self.root}"):
            self._refuse_while_writing(id)
            return self._shelves.publish(id, elsewhere)

    def unpublish(self, id: StepId) -> None:
        """Hide a step again, because one of its shards is lost. Idempotent."""
        self._require_writable()
        with self._lock, self._translated(f"cannot hide step {id} below {self.root}"):
            self._shelves.unpublish(id)

    def retire(self, id: StepId) -> int:
        """Delete a step, durably invisible first. Returns the bytes freed, 0 when absent.

        Raises UsageError while a shard of the step is being written.
        """
        self._require_writable()
        with self._lock, self._translated(f"cannot retire step {id} below {self.root}"):
            self._refuse_while_writing(id)
            doomed = self._shelves.retire(id)
        with self._translated(f"cannot delete step {id} below {self.root}"):
            return sum(map(self._shelves.delete, doomed))

    def _refuse_while_writing(self, id: StepId) -> None:
        if any(temporary.parent.name == str(id) for temporary in self._writer.in_progress):
            raise UsageError(f"step {id} is being written; wait for that")

    def quarantine(self, path: Path, reason: str) -> Path:
        """Move a file aside; it is kept and never read again. Returns where it is now.

        A published step that loses a shard is hidden first. `path` may be from before the step was
        published or hidden. Where nothing can be written it stays where it is.
        """
        if self.read_only:
            return path
        with self._lock, self._translated(f"cannot quarantine {path}"):
            return self._shelves.quarantine(self._shelves.locate(path), reason)

    def shards(self, id: StepId) -> tuple[Path, ...]:
        """Where the shards of a step will be once it is published."""
        with self._translated(f"cannot list {self.root}"):
            return self._shelves.published_paths(id)

    def save_record(self, record: RunRecord) -> None:
        """Replace `run.json`, durably; `record` is the new `self.record`."""
        self._require_writable()
        with self._lock, self._translated(f"cannot write {self._tree.record}"):
            run_record.save(self._tree.record, record, filesystem=self._filesystem)
            self.record = record

    def mend(self) -> bool:
        """Make the run's directory again when somebody removed it. True when that was so: then
        nothing is known of the shards any more, and `scan` has to look."""
        with self._lock, self._translated(f"cannot make {self.root} again"):
            if (ownership := self._require_writable()).held:
                return False
            above = (self.root, *self.root.parents)
            device = next(path.stat().st_dev for path in above if path.exists())
            if device != self._device:  # a drive that was unmounted: what lies below is not meant
                raise OSError(errno.ENODEV, "its file system is not mounted any more")
            self.root.mkdir(parents=True, exist_ok=True)
            self._ownership = Ownership(self._tree.lock)
            ownership.release()
            run_record.save(self._tree.record, self.record, filesystem=self._filesystem)
            self.failed = ""
            return True

    # --- space -------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Space that this volume's files take, quarantine and writes in progress included."""
        if self.read_only:
            return 0
        with self._translated(f"cannot measure {self.root}"):
            return self._writer.used_bytes()

    def free_bytes(self) -> int:
        """Space that is left: of the file system, or below the capacity limit if less."""
        if self.read_only:
            return 0
        with self._translated(f"cannot measure {self.root}"):
            free = self._filesystem.free_bytes(self.root)
            if self.capacity_bytes is None:
                return free
            return max(0, min(free, self.capacity_bytes - self.used_bytes()))

    def drive(self) -> tuple[int, int]:
        """The number of its file system, and what that holds in bytes."""
        with self._translated(f"cannot measure {self.root}"):
            return self._device, self._filesystem.size_bytes(self.root)

    def quarantined(self) -> int:
        """Number of files in quarantine, that this process could have put there."""
        if self.read_only:
            return 0
        with self._translated(f"cannot list {self._tree.quarantine}"):
            return self._shelves.quarantined()

    def close(self) -> None:
        """Give the directory up. Call it when no other method is running. Idempotent."""
        if self._ownership is not None:
            self._ownership.release()

    # --- errors ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """Turn an OSError into the StorageError that says what could not be done."""
        try:
            yield
        except OSError as error:
            if error.errno in FULL:
                raise NoSpaceError(f"{what}: {error.strerror}; free space") from error
            self._fail(error)
            raise StorageError(f"{what}: {error}") from error

    def _fail(self, error: OSError) -> None:
        self.failed = self.read_only or str(error)


def _reason(error: Exception) -> str:
    """The word in a quarantined file's name."""
    if isinstance(error, OSError):
        return errno.errorcode.get(error.errno or 0, "io")
    return type(error).__name__.removesuffix("Error")


# --- one writer ------------------------------------------------------------------------------
#
# Only one process writes to a directory: an advisory lock that the kernel drops at its death.


_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Ownership:
    """Holds `path` locked from construction to `release`.

    `path` is a file of its own: a link, or one with other names, is never written to. Raises
    StorageError naming the owner's pid when somebody else holds it, OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, _FLAGS, 0o640)
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                raise OSError(errno.EINVAL, "not a file of its own: remove it", str(path))
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
        with contextlib.suppress(OSError):  # a full disk is no reason: the pid is for people
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    @property
    def held(self) -> bool:
        """Whether the file is still there: without it another process could come. Raises OSError
        when that cannot be told."""
        try:
            found = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return self._fd >= 0 and os.path.samestat(os.fstat(self._fd), found)

    def release(self) -> None:
        """Let others have it. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
