"""What a run holds, from its live sidecar or, without one, from its volumes alone.

A commit is a property of storage, so both ways give the same answer for what is on the volumes;
only a sidecar knows what is in memory. Nothing is locked, moved or repaired here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.errors import KeepstepError, StorageError, UsageError
from keepstep.steps import Epoch, StepId, Tier
from keepstep.wire.status import Status, StepStatus
from keepstep_sidecar.cli import calls
from keepstep_sidecar.cli.run_dir import Places
from keepstep_sidecar.volume.paths import Tree

if TYPE_CHECKING:
    from keepstep_sidecar.volume.scan import LocalShard, Refused, Scan


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step that is held somewhere. `ranks`: those that a tier holds; `path` None in memory.

    `peer_ranks`, `archive_ranks`: of `ranks`, those that lie there; only a sidecar knows.
    """

    id: StepId
    world: int
    ranks: tuple[int, ...]
    bytes: int
    tiers: tuple[Tier, ...]
    committed: bool
    dead: bool
    path: Path | None
    peer_ranks: tuple[int, ...] = ()
    archive_ranks: tuple[int, ...] = ()

    @property
    def complete(self) -> bool:
        """Every rank is held on some tier, so the step can be restored."""
        return self.ranks == tuple(range(self.world))


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """`live`: what the sidecar says, None without one. Steps in ascending order."""

    live: Status | None
    steps: tuple[Step, ...]
    problems: tuple[str, ...] = ()

    @property
    def committed(self) -> Step | None:
        """The newest committed step that is not dead."""
        return max(
            (one for one in self.steps if one.committed and not one.dead),
            key=lambda one: one.id,
            default=None,
        )

    @property
    def newest(self) -> Step | None:
        """The newest step that every rank could restore."""
        return max(
            (one for one in self.steps if one.complete and not one.dead),
            key=lambda one: one.id,
            default=None,
        )


def read(places: Places) -> Holdings:
    """Ask the sidecar, else look at the volumes. Raises SidecarError, StorageError."""
    live = calls.status(places.socket)
    if live is not None:
        steps = sorted(map(_of_status, live.steps), key=lambda one: one.id)
        return Holdings(live=live, steps=tuple(steps), problems=live.warnings)
    shards, problems = survey(places)
    return Holdings(
        live=None,
        steps=of_shards(shards, _epochs(places)),
        problems=tuple(str(one.error) for one in problems),
    )


def survey(places: Places) -> tuple[tuple[LocalShard, ...], tuple[Refused, ...]]:
    """Every shard, and every file that is none, on all volumes. Raises StorageError."""
    scans = [_scan(root, places.run) for root in places.roots]
    shards = tuple(shard for one in scans for shard in one.shards)
    return shards, tuple(problem for one in scans for problem in one.problems)


def _scan(root: Path, run: str) -> Scan:
    from keepstep_sidecar.volume import scan

    try:
        return scan.survey(root, run=run)
    except OSError as error:
        raise StorageError(f"cannot read {root}: {error}") from error


def of_shards(shards: Iterable[LocalShard], epochs: Sequence[Epoch]) -> tuple[Step, ...]:
    """Steps as their shards on the volumes show them, ascending."""
    from keepstep.core.ledger.lineage import Standing, trace

    by_step: defaultdict[StepId, list[LocalShard]] = defaultdict(list)
    for shard in shards:
        by_step[shard.step_id].append(shard)
    lineage = trace({one.id: one for one in epochs}, seen={id.epoch for id in by_step})
    return tuple(
        _of_found(id, found, dead=lineage.standing(id) is Standing.DEAD)
        for id, found in sorted(by_step.items())
    )


def _of_found(id: StepId, found: Sequence[LocalShard], *, dead: bool) -> Step:
    worlds = {shard.world for shard in found}
    ranks = tuple(sorted({shard.rank for shard in found}))
    world = max(worlds)
    # the commit rule: sealed shards cover the whole world
    committed = len(worlds) == 1 and ranks == tuple(range(world))
    shown = min(found, key=lambda shard: (not shard.published, shard.rank))
    return Step(
        id=id,
        world=world,
        ranks=ranks,
        bytes=sum(shard.size_bytes for shard in found),
        tiers=(Tier.LOCAL,),
        committed=committed,
        dead=dead,
        path=shown.path.parent,
    )


def _of_status(status: StepStatus) -> Step:
    held = {
        Tier.MEMORY: status.memory_ranks,
        Tier.LOCAL: status.local_ranks,
        Tier.PEER: status.peer_ranks,
        Tier.ARCHIVE: status.archive_ranks,
    }
    return Step(
        id=status.id,
        world=status.world,
        ranks=tuple(sorted({rank for ranks in held.values() for rank in ranks})),
        bytes=status.bytes,
        tiers=tuple(tier for tier, ranks in held.items() if ranks),
        committed=status.committed,
        dead=status.dead,
        path=Path(status.path) if status.path else None,
        peer_ranks=status.peer_ranks,
        archive_ranks=status.archive_ranks,
    )


def _epochs(places: Places) -> tuple[Epoch, ...]:
    """What the volumes' records know; an unreadable one leaves more steps alive, never fewer."""
    from keepstep_sidecar.volume import run_record

    epochs: dict[object, Epoch] = {}
    for root in places.roots:
        try:
            record = run_record.load(Tree(root).record, run=places.run)
        except (KeepstepError, OSError):
            continue
        epochs.update({epoch.id: epoch for epoch in record.epochs})
    return tuple(epochs.values())


def chosen(steps: Sequence[Step], words: Iterable[str]) -> tuple[Step, ...]:
    """The steps that `words` name: `0003.1f9c2d7a-000001200`, or `1200` where only one epoch has
    it. Raises UsageError naming the choices."""
    return tuple(_choose(steps, word) for word in dict.fromkeys(words))


def _choose(steps: Sequence[Step], word: str) -> Step:
    found = [one for one in steps if str(one.id) == word]
    if not found and word.isdecimal():
        found = [one for one in steps if one.id.step == int(word)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(str(one.id) for one in found)
        raise UsageError(f"several epochs have a step {word}; name one of: {names}")
    there = ", ".join(str(one.id) for one in steps[-5:]) or "none"
    raise UsageError(f"no step {word} on the volumes; the newest there: {there}")
