"""One local volume: makes staged images durable, finds them again, brings them back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keepstep.image import ControlPage, Layout
from keepstep.steps import StepId
from keepstep_sidecar.engine import Engine
from keepstep_sidecar.filesystem import Filesystem
from keepstep_sidecar.runrecord import RunRecord
from keepstep_sidecar.scan import Scan


@dataclass(frozen=True, kw_only=True)
class Written:
    """A durable shard. `seconds` of wall clock, `cpu_s` of all threads; digests in hex."""

    path: Path
    id: StepId
    rank: int
    bytes: int
    seconds: float
    cpu_s: float
    root: str
    sections: Mapping[str, str]


class Volume:
    """A directory `root` (`<dir>/<run>`) that this process alone writes to.

    All methods block, may be called from any thread, and raise StorageError (NoSpaceError when
    the volume is full). `failed` is the text of the last I/O error, "" when there was none.
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
    ) -> None:
        """Make and lock the directory, find out the engine (`engine` forces one).

        Raises StorageError when another process owns it (the message names its pid) or when it
        cannot be written, ForeignError when it belongs to another run.
        """
        self.root: Path = root
        self.run: str = run
        self.engine: Engine = Engine.DIRECT
        self.engine_reason: str = ""
        self.failed: str = ""
        self.record: RunRecord = RunRecord(run=run)

    def write(
        self,
        view: memoryview,
        layout: Layout,
        control: ControlPage,
        *,
        bytes_per_second: int | None = None,
    ) -> Written:
        """Make the sealed image in the slot `view` durable as `pending/<step>/<shard>`.

        `view` is page aligned and stays unchanged meanwhile (the slot is pinned). Digests are
        computed on the way and go into the file only. Raises NoSpaceError (the file is removed)
        or StorageError (the file is quarantined); neither is ever retried here.
        """
        raise NotImplementedError

    def load(self, path: Path, view: memoryview) -> ControlPage:
        """Read a shard into the slot `view` and verify every byte; the seal comes last.

        `path` as in `Found`, `view` page aligned and of exactly the shard's size. Raises
        DigestError, TornError, FormatError, ForeignError (the file is quarantined),
        VersionError (left alone), StorageError. After an error the slot holds no seal.
        """
        raise NotImplementedError

    def scan(self) -> Scan:
        """Find every shard; quarantine what is torn, foreign or malformed; sweep leftovers."""
        raise NotImplementedError

    def publish(self, id: StepId) -> Path | None:
        """Make a committed step visible to readers; returns its directory. Idempotent.

        None when this volume holds nothing of the step. Call it only when the step is committed.
        """
        raise NotImplementedError

    def unpublish(self, id: StepId) -> None:
        """Hide a step again, because one of its shards is lost. Idempotent."""
        raise NotImplementedError

    def retire(self, id: StepId) -> int:
        """Delete a step, durably invisible first. Returns the bytes freed, 0 when absent."""
        raise NotImplementedError

    def quarantine(self, path: Path, reason: str) -> Path:
        """Move a file aside; it is kept and never read again. Returns where it is now."""
        raise NotImplementedError

    def save_record(self, record: RunRecord) -> None:
        """Replace `run.json`, durably; `record` is the new `self.record`."""
        raise NotImplementedError

    def used_bytes(self) -> int:
        """Space that this volume's files take, quarantine included."""
        raise NotImplementedError

    def free_bytes(self) -> int:
        """Space that is left: of the file system, or below the capacity limit if less."""
        raise NotImplementedError

    def quarantined(self) -> int:
        """Number of files in quarantine."""
        raise NotImplementedError

    def close(self) -> None:
        """Give the directory up. Call it when no other method is running."""
        raise NotImplementedError
