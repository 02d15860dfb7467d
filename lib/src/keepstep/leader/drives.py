"""The file systems on which a run's shards lie on its nodes, and those that lie there now. Pure.

A hostPath outlives its pod. A drive that was replaced or formatted is empty, so only a memory
outside of it can tell that it is another one: this one, and after a restart of the leader
`keepstep.wire.run_reports.LeaderRecord`. What counts as another drive, and what may as well be a
drive that is only away, is in docs/adr/0017-ranks-lend-each-other-a-step.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from keepstep.wire.member_reports import Report
from keepstep.wire.run_reports import ReportedDrive


@dataclass(frozen=True, kw_only=True)
class NodeRankDrives:
    """Where the volumes of one place lie: its node and, by the volume's name, the file system
    (`ReportedVolume.drive_id`); '' if that is not known."""

    node: str
    volumes: Mapping[str, str]

    @classmethod
    def from_report(cls, node: str, report: Report) -> NodeRankDrives:
        return cls(node=node, volumes={volume.name: volume.drive_id for volume in report.volumes})

    @property
    def has_all_drive_ids(self) -> bool:
        return bool(self.volumes) and all(self.volumes.values())


@dataclass(frozen=True, kw_only=True)
class ReplacedDrive:
    """A volume of a place where another file system lies now. `was`, `now`: their UUIDs."""

    node_rank: int
    volume: str
    was: str
    now: str


class ReplacedDriveDetector:
    """The drives of all places of one run, by node rank.

    `changed`: the places whose drives are other ones than those on record, or are not on record.
    """

    def __init__(self) -> None:
        self.changed: set[int] = set()
        self._unknown: set[int] = set()
        self._held: dict[int, NodeRankDrives] = {}
        self._now: dict[int, NodeRankDrives] = {}

    def take(self, node_rank: int, now: NodeRankDrives) -> None:
        """A sidecar has scanned its volumes and reports them."""
        self._now[node_rank] = now
        _keep(self.changed, node_rank, now != self._held.get(node_rank))
        _keep(self._unknown, node_rank, not now.has_all_drive_ids)

    def accept_current_drive(self, node_rank: int) -> None:
        """All ranks can restore a step from what is there, so nothing that a restart needs lies on
        other drives than this place has now."""
        self._held[node_rank] = self._now[node_rank]
        self.changed.discard(node_rank)

    def replaced_drives(self) -> tuple[ReplacedDrive, ...]:
        """The drives that are other ones than those of the shards.

        None are named unless each drive of each place is either the one of the shards or another
        one: what is missing could lie on one that is only away.
        """
        if not self.changed or self._unknown or self._held.keys() != self._now.keys():
            return ()
        found: list[ReplacedDrive] = []
        for node_rank in sorted(self.changed):
            others = self._of_place(node_rank)
            if others is None:
                return ()
            found += others
        return tuple(found)

    def _of_place(self, node_rank: int) -> list[ReplacedDrive] | None:
        held, now = self._held[node_rank], self._now[node_rank]
        if held.node != now.node or held.volumes.keys() != now.volumes.keys():
            return None
        found = []
        for volume, drive in now.volumes.items():
            was, where = _parts(held.volumes[volume])
            uuid, position = _parts(drive)
            if where != position:
                return None  # as that of a drive that is not mounted
            if uuid != was:
                found.append(ReplacedDrive(node_rank=node_rank, volume=volume, was=was, now=uuid))
        return found

    def list_drive_records(self) -> list[ReportedDrive]:
        """What to write down, so that a later leader can go on."""
        return [
            ReportedDrive(node_rank=node_rank, node=listing.node, volume=volume, id=drive_id)
            for node_rank, listing in sorted(self._held.items())
            for volume, drive_id in sorted(listing.volumes.items())
        ]

    def resume(self, rows: Iterable[ReportedDrive]) -> None:
        """Take over what an earlier leader wrote down."""
        places: dict[tuple[int, str], dict[str, str]] = {}
        for row in rows:
            places.setdefault((row.node_rank, row.node), {})[row.volume] = row.id
        for (node_rank, node), volumes in places.items():
            self._held[node_rank] = NodeRankDrives(node=node, volumes=volumes)


def _keep(of: set[int], node_rank: int, is_in: bool) -> None:
    of.add(node_rank) if is_in else of.discard(node_rank)


def _parts(drive: str) -> tuple[str, str]:
    """The file system's UUID, and the position in it."""
    uuid, _, position = drive.partition("@")
    return uuid, position
