"""Reduces a report to what changed since the one before it, if the operator knows that one.

Without this, a run that has archived hundreds of steps would list them all in every report. What
cannot be told as a change is told whole. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from keepstep.steps import Answer, StepId, Tier
from keepstep.wire.reports import Report, ReportedRank, ReportedShard

Listed = tuple[tuple[ReportedShard, ...], Answer | None]


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
        ranks=tuple(
            _changed(before.get(one.rank), one)
            for one in now.ranks
            if not _same(before.get(one.rank), one)
        ),
    )


def _goes_on(known: Report, now: Report) -> bool:
    after = {one.rank: one.by_tier() for one in now.ranks}
    return (
        known.started_at == now.started_at
        and known.ready == now.ready
        and now.epochs[: len(known.epochs)] == known.epochs
        and now.restores[: len(known.restores)] == known.restores
        and all(_still_told(one, after.get(one.rank)) for one in known.ranks)
    )


def _still_told(one: ReportedRank, after: dict[Tier, Listed] | None) -> bool:
    """Whether the rank is still named, and all of its tiers still give an answer."""
    if after is None:
        return False
    told = one.by_tier().items()
    return all(answer is None or after[tier][1] is not None for tier, (_, answer) in told)


def _same(before: ReportedRank | None, now: ReportedRank) -> bool:
    return before == now and before is not None and _sizes(before) == _sizes(now)


def _changed(before: ReportedRank | None, now: ReportedRank) -> ReportedRank:
    """The rank's counters, and those of its tiers that changed."""
    was = before.by_tier() if before is not None else {}
    told: dict[str, object] = {}
    gone: dict[Tier, tuple[StepId, ...]] = {}
    for tier, listed in now.by_tier().items():
        known, known_answer = was.get(tier, ((), None))
        came, went = _moved(known, listed[0])
        if tier is Tier.ARCHIVE and _tells_the_newest(now):
            oldest = min(one.id for one in now.archive)
            replaced = {one.id for one in came}
            went = tuple(id for id in went if id > oldest or id in replaced)
        same = not came and not went and listed[1] is known_answer
        told |= {str(tier): came, f"{tier}_answer": None if same else listed[1]}
        gone |= {} if same else {tier: went}
    return replace(now, gone=gone, **told)  # type: ignore[arg-type]


def _tells_the_newest(now: ReportedRank) -> bool:
    """Whether this is a rank of another pod, of which only the newest archived steps are told.
    Steps that are no longer named need not be gone then."""
    return bool(now.archive) and not (now.alive or now.memory or now.local)


def _moved(
    before: tuple[ReportedShard, ...], now: tuple[ReportedShard, ...]
) -> tuple[tuple[ReportedShard, ...], tuple[StepId, ...]]:
    """(what came, what went). If any image of a step changed, the step counts as gone and comes
    whole."""
    was, is_now = {(one, one.bytes) for one in before}, {(one, one.bytes) for one in now}
    touched = {one.id for one, _ in was ^ is_now}
    went = sorted({one.id for one in before} & touched)
    return tuple(one for one in now if one.id in touched), tuple(went)


def _sizes(one: ReportedRank) -> list[int]:
    """The sizes of all its images, which the comparison of images leaves out."""
    return [image.bytes for held, _ in one.by_tier().values() for image in held]
