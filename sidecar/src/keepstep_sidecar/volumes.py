"""Several volumes as one: ranks are spread over them, a step is on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from keepstep.image import ControlPage, Layout
from keepstep.steps import Epoch, StepId
from keepstep_sidecar.scan import Scan
from keepstep_sidecar.volume import Volume, Written


class VolumeSet:
    """The volumes of one run on this machine, at least one. Blocking, as `Volume` is."""

    def __init__(self, volumes: Sequence[Volume]) -> None:
        self.volumes: tuple[Volume, ...] = tuple(volumes)

    def volume_for(self, rank: int) -> Volume:
        """Where `rank` writes: its own volume, or another one once that has failed."""
        raise NotImplementedError

    def write(
        self,
        view: memoryview,
        layout: Layout,
        control: ControlPage,
        *,
        bytes_per_second: int | None = None,
    ) -> Written:
        """`Volume.write` on the volume of `control.rank`."""
        raise NotImplementedError

    def load(self, path: Path, view: memoryview) -> ControlPage:
        """`Volume.load` from the volume that holds `path`; on failure the step is hidden."""
        raise NotImplementedError

    def scan(self) -> Scan:
        """All volumes' scans as one."""
        raise NotImplementedError

    def publish(self, id: StepId) -> Path | None:
        """Make a committed step visible; returns the directory that shows all its shards."""
        raise NotImplementedError

    def retire(self, id: StepId) -> int:
        """Delete a step everywhere. Returns the bytes freed."""
        raise NotImplementedError

    def quarantine(self, path: Path, reason: str) -> Path:
        """Move one shard aside and hide its step on every volume."""
        raise NotImplementedError

    def epochs(self) -> tuple[Epoch, ...]:
        """Every epoch that any volume knows of, oldest first."""
        raise NotImplementedError

    def save_epoch(self, epoch: Epoch) -> None:
        """Record an epoch, durably on every healthy volume; StorageError when on none."""
        raise NotImplementedError

    def close(self) -> None:
        """Close all volumes."""
        raise NotImplementedError
