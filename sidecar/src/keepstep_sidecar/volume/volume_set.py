"""Several volumes as one: ranks are spread over them, a step is on all of them.

Each volume's directory of a published step shows every shard of this machine: its own as files,
the others' as links, so that a stock reader can be pointed at any of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from keepstep.errors import ImageError, NoSpaceError, StorageError, UsageError, VersionError
from keepstep.image import ControlPage, Layout
from keepstep.steps import Epoch, StepId, merged
from keepstep_sidecar.log import warn
from keepstep_sidecar.volume.direct_io import Pace
from keepstep_sidecar.volume.paths import Tree, is_step
from keepstep_sidecar.volume.run_record import RunRecord
from keepstep_sidecar.volume.scan import Scan
from keepstep_sidecar.volume.shard_file import ShardFile
from keepstep_sidecar.volume.volume import Unread, Volume, Written


class VolumeSet:
    """The volumes of one run on this machine, at least one. Blocking, as `Volume` is."""

    def __init__(self, volumes: Sequence[Volume], *, bytes_per_second: int | None = None) -> None:
        """`bytes_per_second`: the limit of all writes together."""
        if not volumes:
            raise UsageError("a run needs at least one volume")
        self.volumes: tuple[Volume, ...] = tuple(volumes)
        self._writable = [one for one in volumes if not one.read_only]
        self._homes: dict[int, int] = {}
        self._lock = threading.Lock()
        self.pace = Pace(bytes_per_second)

    @property
    def history(self) -> Path | None:
        """Where the run's history is kept: on the first volume that can be written."""
        return next((Tree(one.root).history for one in self._writable), None)

    def volume_for(self, rank: int) -> Volume:
        """Where `rank` writes: its own volume, or a healthy one once that has failed.

        With no healthy volume left it is its own again: every step is a new file, and a new try.
        """
        home = self.volumes[self.lane(rank)]
        healthy = [volume for volume in self.volumes if not volume.failed]
        if home in healthy or not healthy:
            return home
        return healthy[rank % len(healthy)]

    def lane(self, rank: int) -> int:
        """The number of the rank's own volume: ranks are spread evenly, whichever they are."""
        with self._lock:
            if rank not in self._homes:
                taken = Counter(self._homes.values())
                turn = [(rank + n) % len(self.volumes) for n in range(len(self.volumes))]
                self._homes[rank] = min(turn, key=lambda number: taken[number])
            return self._homes[rank]

    def write(self, view: memoryview, layout: Layout, control: ControlPage) -> Written:
        """`Volume.write` on the volume of `control.rank`; when that is full, on one that is not.

        Raises NoSpaceError when all are full; that of its own volume.
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
        """`Volume.opened` on the volume that holds `path`; on failure the step is hidden."""
        try:
            with self.holder(path).opened(path) as file:
                yield file
        except (VersionError, Unread):
            raise
        except (ImageError, StorageError):
            self._hide(path)
            raise

    def scan(self) -> Scan:
        """All volumes' scans as one. Raises StorageError when one of them cannot be read."""
        scans = [volume.scan() for volume in self.volumes]
        problems = tuple(problem for scan in scans for problem in scan.problems)
        lost = [problem.path for problem in problems if problem.moved_to is not None]
        if lost and len(self.volumes) > 1:
            for path in lost:
                self._hide(path)
            scans = [volume.scan() for volume in self.volumes]
        shards = sorted(
            (shard for scan in scans for shard in scan.shards),
            key=lambda shard: (shard.step_id, shard.rank),
        )
        return Scan(shards=tuple(shards), problems=problems)

    def mend(self) -> bool:
        """`Volume.mend` of each. Raises StorageError when one cannot be, and none was mended."""
        return bool(self._of_each(Volume.mend))

    def publish(self, id: StepId, *, made_of: Collection[Path] = ()) -> Path | None:
        """Make a committed step visible; returns the directory that shows all its shards.

        A volume that fails is left out, unless one of `made_of`, the step's shards here, lies on
        it: never is a part of a step shown.
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
        """Delete a step, but for what lies on a volume that fails. Returns the bytes freed. Raises
        StorageError when one fails, and there was nothing on the others."""
        return self._of_each(lambda volume: volume.retire(id))

    def _of_each(self, work: Callable[[Volume], int]) -> int:
        """The sum over all volumes; one that fails holds up none of the others. Raises its
        StorageError when there is nothing else to tell."""
        told = [_tried(work, volume) for volume in self._writable]
        total = sum(one for one in told if not isinstance(one, StorageError))
        failure = next((one for one in told if isinstance(one, StorageError)), None)
        if failure is not None and not total:
            raise failure
        return total

    def free_bytes(self) -> int:
        """What the roomiest volume that works has left; 0 where none can tell."""
        free = [0]
        for volume in self.volumes:
            if not volume.failed:
                with contextlib.suppress(StorageError):
                    free.append(volume.free_bytes())
        return max(free)

    def drive_bytes(self) -> int:
        """What the file systems hold that are written to, each once; 0 where none can tell."""
        sizes: dict[int, int] = {}
        for volume in self._writable:
            with contextlib.suppress(StorageError):
                sizes.update([volume.drive()])
        return sum(sizes.values())

    def quarantine(self, path: Path, reason: str) -> Path:
        """Move one shard aside and hide its step on every volume."""
        moved_to = self.holder(path).quarantine(path, reason)
        self._hide(path)
        return moved_to

    def epochs(self) -> tuple[Epoch, ...]:
        """Every epoch that any volume knows of, oldest first."""
        return merged(epoch for volume in self.volumes for epoch in volume.record.epochs)

    def save_epochs(self, *epochs: Epoch) -> None:
        """Record epochs, durably on every volume that works; StorageError when on none."""
        self._save(lambda record: record.with_epochs(*epochs))

    def last_commit(self) -> StepId | None:
        """The newest commit that any volume has on record."""
        noted = (volume.record.committed for volume in self.volumes)
        return max((id for id in noted if id is not None), default=None)

    def pinned(self) -> frozenset[StepId]:
        """Steps that any volume has on record as pinned."""
        return frozenset().union(*(volume.record.pinned for volume in self.volumes))

    def save_word(self, committed: StepId, pinned: frozenset[StepId]) -> None:
        """Record what somebody else knows to be committed and pinned, as `save_epochs` does."""
        self._save(lambda record: replace(record, committed=committed, pinned=pinned))

    def failures(self) -> frozenset[StepId]:
        """Steps at which the script failed by itself, as any volume has on record."""
        return frozenset().union(*(volume.record.failures for volume in self.volumes))

    def save_failures(self, failures: frozenset[StepId]) -> None:
        """Record these and no others, as `save_epochs` does."""
        self._save(lambda record: replace(record, failures=failures))

    def _save(self, change: Callable[[RunRecord], RunRecord]) -> None:
        """Where nothing can be written at all, nothing durable will ever need the record."""
        failures = [_save_record(volume, change) for volume in self._writable]
        if failures and (first := failures[0]) is not None and None not in failures:
            raise first

    def close(self) -> None:
        """Close all volumes."""
        for volume in self.volumes:
            volume.close()

    def holder(self, path: Path) -> Volume:
        """The volume that `path` lies on."""
        for volume in self.volumes:
            if path.is_relative_to(volume.root):
                return volume
        raise UsageError(f"{path}: on none of the volumes of this run")

    def _hide(self, path: Path) -> None:
        """Hide the step of `path` on every volume; a failed volume keeps what it shows."""
        if not is_step(path.parent.name):
            return
        for volume in self._writable:
            with contextlib.suppress(StorageError):
                volume.unpublish(StepId.parse(path.parent.name))


def _tried(work: Callable[[Volume], int], volume: Volume) -> int | StorageError:
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
