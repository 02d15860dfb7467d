"""What one report may make its receiver remember, compute and write. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from keepstep.core.shard import Shard
from keepstep.core.suspicion import KEPT
from keepstep.errors import UsageError
from keepstep.leader.node_rank import NEWEST_EPOCHS, epochs_needed, kept
from keepstep.leader.run_ledger import LARGEST_WORLD, MOST_RANKS
from keepstep.steps import StepId, Tier
from keepstep.wire.reports import Report, ReportedRank

MOST_OTHERS: Final = 8192
"""The most ranks of other pods of which one report has only archived images. A sidecar reports at
most this many copies of other pods' ranks."""
MOST_IMAGES: Final = 4096
"""The most images of one rank."""
MOST_STEPS: Final = 1024
"""The most steps of one rank on one tier. If there are more, the newest count, and the older ones
are left alone."""
_MOST_BITS: Final = 1 << 23
"""A step takes a bit for each rank up to its highest, so fewer steps count for ranks beyond
8,192."""
_FEW: Final = _MOST_BITS // LARGEST_WORLD
"""So many steps always count."""
MOST_EPOCHS: Final = 1024
"""The most epochs that a step, a restore or another epoch's parent names. Further ones are dropped
and not refused, since a run may have begun any number of times."""
MOST_WARNINGS: Final = 32
MOST_RESTORES: Final = 16 * MOST_RANKS
MOST_DOUBTED: Final = KEPT * KEPT
"""The most steps that the reported failures of the script name."""
MOST_VOLUMES: Final = 64
LONGEST_ADDRESS: Final = 280
LONGEST_NAME: Final = 256
LARGEST_STEP: Final = 10**15


def checked(report: Report) -> Report:
    """The report, without what is left alone. Raises UsageError for one that cannot be."""
    if len(report.ranks) > MOST_RANKS:
        foreign = sum(not one.shards(Tier.PEER) and kept(one) for one in report.ranks)
        if len(report.ranks) - foreign > MOST_RANKS or foreign > MOST_OTHERS:
            raise UsageError("more ranks than one machine can have")
    if len(report.restores) > MOST_RESTORES or len(report.volumes) > MOST_VOLUMES:
        raise UsageError("more restores or volumes than one machine can have")
    if len(report.peer_address) > LONGEST_ADDRESS:
        raise UsageError("a longer address than one machine can have")
    doubted = [id for one in report.failures for id in (one.at, *one.after)]
    if len(doubted) > MOST_DOUBTED or not all(map(is_step, doubted)):
        raise UsageError("failures that cannot be")
    check_epochs(report)
    for one in report.ranks:
        check_rank(one)
    if any(len(told.shards) > _FEW for one in report.ranks for told in one.tiers.values()):
        report = replace(report, ranks=tuple(map(newest, report.ranks)))
    if len(report.epochs) > NEWEST_EPOCHS:
        report = replace(report, epochs=epochs_needed(report, most=MOST_EPOCHS))
    return report


def check_epochs(report: Report) -> None:
    epochs = [*report.epochs, *(one.epoch for one in report.restores)]
    parents = [one.parent for one in epochs if one.parent is not None]
    if any(len(one.origin) > LONGEST_NAME for one in epochs) or not all(map(is_step, parents)):
        raise UsageError("an epoch that cannot be")


def newest(one: ReportedRank) -> ReportedRank:
    """The rank with its newest steps only, if it tells of more than count."""
    most = min(MOST_STEPS, _MOST_BITS // (one.rank + 1))
    if all(len(told.shards) <= most for told in one.tiers.values()):
        return one
    tiers = {
        tier: replace(
            told, shards=tuple(sorted(told.shards, key=lambda shard: shard.step_id)[-most:])
        )
        for tier, told in one.tiers.items()
    }
    return replace(one, tiers=tiers)


def check_rank(one: ReportedRank) -> None:
    """Raises UsageError for what cannot be."""
    if not 0 <= one.rank < one.world <= LARGEST_WORLD:
        raise UsageError(f"rank {one.rank} of {one.world} cannot be")
    images, steps = 0, [] if one.staged is None else [one.staged]
    for told in one.tiers.values():
        gone = told.gone or ()
        images += len(told.shards) + len(gone)
        steps += gone
        for image in told.shards:
            check_image(one.rank, image)
            steps.append(image.step_id)
    if images > MOST_IMAGES:
        raise UsageError(f"rank {one.rank} tells of too many images")
    if not all(map(is_step, steps)):
        raise UsageError(f"rank {one.rank} tells of a step that cannot be")


def check_image(rank: int, image: Shard) -> None:
    """Raises UsageError for what cannot be."""
    if image.rank != rank or not image.is_possible:
        raise UsageError(f"rank {rank} tells of another one or of twins")
    if not 0 <= image.size_bytes < 1 << 62:
        raise UsageError(f"rank {rank} tells of a size that cannot be")


def is_step(id: StepId) -> bool:
    """Whether `StepId.parse` can read it back from a status or a directory's name. An epoch can be
    read back if it is one."""
    return id.step < LARGEST_STEP
