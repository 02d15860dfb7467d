"""Several volumes used as one: ranks are spread over them, and a step lies on all of them.

Each volume's directory of a published step shows every shard of this machine: its own shards as
files, the others as links. So a stock reader can use any of these directories.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from keepstep.errors import ImageError, NoSpaceError, StorageError, UsageError, VersionError
from keepstep.image import ControlPage, Layout
from keepstep.steps import Epoch, StepId, merged
from keepstep_sidecar.log import warn
from keepstep_sidecar.volume.direct_io import RateLimit, ShardFile
from keepstep_sidecar.volume.paths import Tree, is_step
from keepstep_sidecar.volume.run_record import RunRecord
from keepstep_sidecar.volume.scan import Scan
from keepstep_sidecar.volume.volume import Unread, Volume, Written

_T = TypeVar("_T")


class VolumeSet:
    """The volumes of one run on this machine, at least one. Methods block, as those of `Volume`."""

    def __init__(self, volumes: Sequence[Volume], *, bytes_per_second: int | None = None) -> None:
        """`bytes_per_second`: the limit for all writes together."""
        if not volumes:
            raise UsageError("a run needs at least one volume")
        self.volumes: tuple[Volume, ...] = tuple(volumes)
        self._writable = [one for one in volumes if not one.read_only]
        self._homes: dict[int, int] = {}
        self._lock = threading.Lock()
        self.pace = RateLimit(bytes_per_second)

    @property
    def history(self) -> Path | None:
        """The path of the run's history, on the first writable volume; None without one."""
        return next((Tree(one.root).history for one in self._writable), None)

    def volume_for(self, rank: int) -> Volume:
        """The volume that `rank` writes to: its own, or a healthy one if its own has failed.

        If no volume is healthy, it is the rank's own: every step is a new file, and so a new try.
        """
        home = self.volumes[self.lane(rank)]
        healthy = [volume for volume in self.volumes if not volume.failed]
        if home in healthy or not healthy:
            return home
        return healthy[rank % len(healthy)]

    def lane(self, rank: int) -> int:
        """The number of the rank's own volume. Ranks are spread evenly, whatever their numbers."""
        with self._lock:
            if rank not in self._homes:
                taken = Counter(self._homes.values())
                turn = [(rank + n) % len(self.volumes) for n in range(len(self.volumes))]
                self._homes[rank] = min(turn, key=lambda number: taken[number])
            return self._homes[rank]

    def write(self, view: memoryview, layout: Layout, control: ControlPage) -> Written:
        """`Volume.write` on the volume of `control.rank`; if that is full, on one that is not.

        Raises the NoSpaceError of the rank's own volume when all are full.
        """
        home = self.volume_for(control.rank)
        try:
            return home.write(view, layout, control, pace=self.pace)
        except NoSpaceError as error:
            for other in self.volumes:
                if other is not home and not other.failed:
                    with contextlib.suppress(NoSpaceError):
                        written = other.write(view, layout, control, pace=self.pace)
                        warn("volume full", reason=str(error), instead=str(other.root))
                        return written
            raise

    @contextlib.contextmanager
    def opened(self, path: Path) -> Iterator[ShardFile]:
        """`Volume.opened` on the volume that holds `path`. If the shard or the drive fails, the
        step is hidden on all volumes; not after VersionError or Unread."""
        try:
            with self.holder(path).opened(path) as file:
                yield file
        except (VersionError, Unread):
            raise
        except (ImageError, StorageError):
            self._hide(path)
            raise

    def scan(self) -> Scan:
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
        return Scan(shards=tuple(shards), problems=problems, unread=unread)

    def _scan(self) -> tuple[list[Scan], dict[Path, str]]:
        told = {volume.root: _tried(Volume.scan, volume) for volume in self.volumes}
        return (
            [one for one in told.values() if not isinstance(one, StorageError)],
            {root: str(one) for root, one in told.items() if isinstance(one, StorageError)},
        )

    def is_removed(self) -> bool:
        """Whether somebody removed the run's directory on every volume. Raises StorageError."""
        return all(volume.is_removed() for volume in self.volumes)

    def mend(self) -> bool:
        """`Volume.mend` on each volume. True if any was mended. Raises StorageError when one failed
        and none was mended."""
        return bool(self._of_each(Volume.mend))

    def publish(self, id: StepId, *, made_of: Collection[Path] = ()) -> Path | None:
        """Make a committed step visible. Returns the directory that shows all its shards.

        `made_of`: the step's shards on this machine. A volume that cannot be listed is left out,
        unless one of `made_of` lies on it: a step is never shown in part.
        """
        parts = [(volume, self._part(volume, id, made_of)) for volume in self._writable]
        shown = [
            volume.publish(id, elsewhere=[path for _, paths in parts for path in paths])
            for volume, own in parts
            if own
        ]
        return shown[0] if shown else None

    def _part(self, volume: Volume, id: StepId, made_of: Collection[Path]) -> tuple[Path, ...]:
        try:
            return volume.shards(id)
        except StorageError:
            if any(path.is_relative_to(volume.root) for path in made_of):
                raise
            return ()

    def retire(self, id: StepId) -> int:
        """Delete a step, except on volumes that fail. Returns the bytes freed. Raises StorageError
        when a volume fails and nothing was freed on the others."""
        return self._of_each(lambda volume: volume.retire(id))

    def _of_each(self, work: Callable[[Volume], int]) -> int:
        """The sum of `work` over all volumes. A volume that fails does not stop the others. Raises
        its StorageError when the sum is 0."""
        told = [_tried(work, volume) for volume in self._writable]
        total = sum(one for one in told if not isinstance(one, StorageError))
        failure = next((one for one in told if isinstance(one, StorageError)), None)
        if failure is not None and not total:
            raise failure
        return total

    def free_bytes(self) -> int:
        """Free bytes of the working volume that has most; 0 if none can tell."""
        free = [0]
        for volume in self.volumes:
            if not volume.failed:
                with contextlib.suppress(StorageError):
                    free.append(volume.free_bytes())
        return max(free)

    def drive_bytes(self) -> int:
        """Total size in bytes of the file systems that are written to, each counted once; 0 if none
        can tell."""
        sizes: dict[int, int] = {}
        for volume in self._writable:
            with contextlib.suppress(StorageError):
                sizes.update([volume.drive()])
        return sum(sizes.values())

    def quarantine(self, path: Path, reason: str) -> Path:
        """Move one shard to quarantine and hide its step on every volume. Returns the new path."""
        moved_to = self.holder(path).quarantine(path, reason)
        self._hide(path)
        return moved_to

    def epochs(self) -> tuple[Epoch, ...]:
        """Every epoch that any volume knows of, oldest first."""
        return merged(epoch for volume in self.volumes for epoch in volume.record.epochs)

    def save_epochs(self, *epochs: Epoch) -> None:
        """Record epochs durably on every working volume. Raises StorageError when all fail."""
        self._save(lambda record: record.with_epochs(*epochs))

    def asked(self) -> StepId | None:
        """The step that the script itself asked for, by the volume that knows the newest epoch."""
        records = [volume.record for volume in self.volumes if volume.record.epochs]
        newest = max(records, key=lambda record: record.epochs[-1].id, default=None)
        return None if newest is None else newest.asked

    def save_asked(self, asked: StepId | None) -> None:
        """Record the step that the script itself asked for, as `save_epochs` does."""
        self._save(lambda record: replace(record, asked=asked))

    def last_commit(self) -> StepId | None:
        """The newest commit that any volume has on record; None if there is none."""
        noted = (volume.record.committed for volume in self.volumes)
        return max((id for id in noted if id is not None), default=None)

    def pinned(self) -> frozenset[StepId]:
        """Steps that any volume has on record as pinned."""
        return frozenset().union(*(volume.record.pinned for volume in self.volumes))

    def save_word(self, committed: StepId, pinned: frozenset[StepId]) -> None:
        """Record what the operator says is committed and pinned, as `save_epochs` does."""
        self._save(lambda record: replace(record, committed=committed, pinned=pinned))

    def failures(self) -> frozenset[StepId]:
        """Steps at which the script failed by itself, as recorded on any volume."""
        return frozenset().union(*(volume.record.failures for volume in self.volumes))

    def save_failures(self, failures: frozenset[StepId]) -> None:
        """Record exactly these failures, as `save_epochs` does."""
        self._save(lambda record: replace(record, failures=failures))

    def _save(self, change: Callable[[RunRecord], RunRecord]) -> None:
        """Change the record on all writable volumes. Without any, nothing durable will need it."""
        failures = [_save_record(volume, change) for volume in self._writable]
        if failures and (first := failures[0]) is not None and None not in failures:
            raise first

    def close(self) -> None:
        """Close all volumes."""
        for volume in self.volumes:
            volume.close()

    def holder(self, path: Path) -> Volume:
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


def _tried(work: Callable[[Volume], _T], volume: Volume) -> _T | StorageError:
    try:
        return work(volume)
    except StorageError as error:
        return error


def _save_record(volume: Volume, change: Callable[[RunRecord], RunRecord]) -> StorageError | None:
    try:
        volume.save_record(change(volume.record))
    except StorageError as error:
        return error
    return None
