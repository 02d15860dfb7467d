"""A volume on which nothing can be written: mounted read-only, or another user's.

In a pod that is no reason to keep the training waiting: steps are staged in memory, what the volume
holds already can be restored, and everybody is told why nothing new becomes durable. On one
machine, where somebody sits before the command line, it is an error instead.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path

from keepstep.errors import ImageError, StorageError
from keepstep.image import ControlPage, Layout
from keepstep.steps import StepId
from keepstep_sidecar import runrecord
from keepstep_sidecar.engine import Engine, Pace
from keepstep_sidecar.filesystem import Filesystem
from keepstep_sidecar.runrecord import RunRecord
from keepstep_sidecar.scan import Scan, survey
from keepstep_sidecar.shardfile import Verify
from keepstep_sidecar.shelves import Shelves
from keepstep_sidecar.tree import Tree
from keepstep_sidecar.volume import Volume, Written


class UnwritableVolume(Volume):
    """Reads what is there; every write raises StorageError with `reason`."""

    def __init__(self, root: Path, *, run: str, reason: str, verify: Verify) -> None:
        self.root = root.absolute()
        self.run = run
        self.capacity_bytes = None
        self.failed = self._why = reason
        self.engine, self.engine_reason = Engine.BUFFERED, "read only"
        self.record = RunRecord(run=run)
        self._threads = 1
        self._verify = verify
        self._filesystem = Filesystem()
        self._tree = Tree(self.root)
        self._shelves = Shelves(self._tree, self._filesystem)
        self._lock = threading.RLock()
        with contextlib.suppress(OSError, ImageError):
            self.record = runrecord.load(self._tree.record, run=run)

    def write(
        self, view: memoryview, layout: Layout, control: ControlPage, *, pace: Pace | None = None
    ) -> Written:
        raise StorageError(self._why)

    def save_record(self, record: RunRecord) -> None:
        raise StorageError(self._why)

    def scan(self) -> Scan:
        """What can be read; nothing is moved. Raises StorageError when that cannot be told."""
        try:
            return survey(self.root, run=self.run)
        except OSError as error:
            raise StorageError(f"cannot scan {self.root}: {error}") from error

    def quarantine(self, path: Path, reason: str) -> Path:
        return path

    def publish(self, id: StepId, *, elsewhere: Sequence[Path] = ()) -> Path | None:
        return None

    def unpublish(self, id: StepId) -> None:
        pass

    def retire(self, id: StepId) -> int:
        return 0

    def shards(self, id: StepId) -> tuple[Path, ...]:
        return ()

    def mend(self) -> bool:
        return False

    def used_bytes(self) -> int:
        return 0

    def free_bytes(self) -> int:
        return 0

    def quarantined(self) -> int:
        return 0

    def close(self) -> None:
        pass
