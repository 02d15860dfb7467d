"""What a report tells when the operator knows the one before it: only what is not the same.

A run that has archived hundreds of steps would else list them all with every report. Whatever
cannot be told as a change is told whole. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from keepstep.steps import Answer, StepId, Tier
from keepstep.wire.reports import Report, ReportedRank, ReportedShard

Listed = tuple[tuple[ReportedShard, ...], Answer | None]


def changes(known: Report | None, now: Report) -> Report:
    """`now`, as what changed since `known`, which was answered; whole where there is none, or where
    something that it named is not there any more."""
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


def with_lists(report: Report) -> Report:
    """The same, for an operator that reads no runs of twins."""
    return replace(report, ranks=tuple(one.with_lists() for one in report.ranks))


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
    """Its rank is named, and no tier of it has fallen silent."""
    if after is None:
        return False
    told = one.by_tier().items()
    return all(answer is None or after[tier][1] is not None for tier, (_, answer) in told)


def _same(before: ReportedRank | None, now: ReportedRank) -> bool:
    return before == now and before is not None and _sizes(before) == _sizes(now)


def _changed(before: ReportedRank | None, now: ReportedRank) -> ReportedRank:
    """Its counters, and of its tiers those that changed."""
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
    """A rank of another pod, of which only the newest archived steps are told: those that are not
    named any more need not be gone."""
    return bool(now.archive) and not (now.alive or now.memory or now.local)


def _moved(
    before: tuple[ReportedShard, ...], now: tuple[ReportedShard, ...]
) -> tuple[tuple[ReportedShard, ...], tuple[StepId, ...]]:
    """What came, and what went: a step of which any image is another one goes, and comes whole."""
    was, is_now = {(one, one.bytes) for one in before}, {(one, one.bytes) for one in now}
    touched = {one.id for one, _ in was ^ is_now}
    went = sorted({one.id for one in before} & touched)
    return tuple(one for one in now if one.id in touched), tuple(went)


def _sizes(one: ReportedRank) -> list[int]:
    """Of all its images: no part of what makes two of them the same."""
    return [image.bytes for held, _ in one.by_tier().values() for image in held]
