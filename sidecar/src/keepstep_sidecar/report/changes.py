"""Reduces a report to what changed since the one before it, if the operator knows that one.

Without this, a run that has archived hundreds of steps would list them all in every report. What
cannot be told as a change is told whole. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from keepstep.steps import IN_POD, Tier
from keepstep.wire.reports import Report, ReportedRank, ReportedTier


def changes(known: Report | None, now: Report) -> Report:
    """`now`, reduced to what changed since `known`, which the operator answered. It is whole if
    `known` is None, or if something that `known` named is no longer there."""
    if known is None or not _goes_on(known, now):
        return now
    before = {one.rank: one for one in known.ranks}
    return replace(
        now,
        since=known.sequence,
        epochs=now.epochs[len(known.epochs) :],
        restores=now.restores[len(known.restores) :],
        goodput=None if now.goodput == known.goodput else now.goodput,
        ranks=tuple(filter(None, (_changed(before.get(one.rank), one) for one in now.ranks))),
    )


def _goes_on(known: Report, now: Report) -> bool:
    """Whether all that `known` named is still named: each epoch, restore, rank and tier."""
    after = {one.rank: one.tiers.keys() for one in now.ranks}
    return (
        known.started_at == now.started_at
        and known.ready == now.ready
        and now.epochs[: len(known.epochs)] == known.epochs
        and now.restores[: len(known.restores)] == known.restores
        and all(one.rank in after and one.tiers.keys() <= after[one.rank] for one in known.ranks)
    )


def _changed(before: ReportedRank | None, now: ReportedRank) -> ReportedRank | None:
    """The rank with those of its tiers that changed; None if nothing did."""
    was = before.tiers if before is not None else {}
    moved = {tier: _moved(was.get(tier), told) for tier, told in now.tiers.items()}
    tiers = {tier: told for tier, told in moved.items() if told is not None}
    if (archived := tiers.get(Tier.ARCHIVE)) is not None and _lists_the_newest(now):
        oldest, replaced = (
            min(one.id for one in now.shards(Tier.ARCHIVE)),
            {one.id for one in archived.shards},
        )
        gone = tuple(id for id in archived.gone or () if id > oldest or id in replaced)
        tiers[Tier.ARCHIVE] = replace(archived, gone=gone)
    if before is not None and not tiers and replace(before, tiers={}) == replace(now, tiers={}):
        return None
    return replace(now, tiers=tiers)


def _lists_the_newest(now: ReportedRank) -> bool:
    """Whether this is a rank of another pod, of which only the newest archived steps are listed.
    Steps that are no longer named need not be gone then."""
    return bool(now.shards(Tier.ARCHIVE)) and not (now.alive or now.shards(*IN_POD))


def _moved(before: ReportedTier | None, now: ReportedTier) -> ReportedTier | None:
    """What came and what went; None if nothing did. If any image of a step changed, the step counts
    as gone and comes whole."""
    listed = before.shards if before is not None else ()
    was, is_now = ({(one, one.bytes) for one in each} for each in (listed, now.shards))
    touched = {one.id for one, _ in was ^ is_now}
    if before is not None and not touched and before.answer is now.answer:
        return None
    return replace(
        now,
        shards=tuple(one for one in now.shards if one.id in touched),
        gone=tuple(sorted({one.id for one in listed} & touched)),
    )
