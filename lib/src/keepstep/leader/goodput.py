"""Goodput of a run: one sum over what the sidecars of its first pod counted, one after the other.

All ranks of the job step together, so one pod's tally is the run's (docs/goodput.md). A tally goes
on when a trainer or sidecar is replaced, and when a pod comes back to the volume that holds it. On
another volume the next pod begins a new tally.

The sum grows by what a tally has gained since it was last reported. Every second from the run's
first to its newest is in exactly one bucket. If two tallies count the same time, the later one's
buckets are taken. If none counts it, it is the time between two pods. All times are whole seconds,
so that a sum that is read back from a record goes on exactly. Pure; time is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import floor
from typing import Final

from keepstep.core.history import Goodput
from keepstep.wire import run_reports as wire
from keepstep.wire.member_reports import ReportedGoodput
from keepstep.wire.run_reports import MOST_TALLIES, format_utc, parse_utc

SHOWN_S: Final = 60.0
"""The shown figure changes at most this often, although each report changes the sum."""

_MOST: Final = 10**15

BUCKETS: Final = tuple(Goodput(since=0.0).seconds)
_PRODUCTIVE, _WASTED, _AWAY = map(
    BUCKETS.index, ("productive", "wasted_progress", "infrastructure_recovery")
)
_NONE: Final = (0,) * len(BUCKETS)


@dataclass(frozen=True, kw_only=True)
class GoodputSpan:
    """The time from `since` until `until`, in unix seconds, and how it was spent.

    `seconds`: by `BUCKETS`; they add up to that time. `step`: the newest step. `steps`: the steps
    that no restore went back over. `epoch`: the newest epoch. `id` and `epoch` are '' for the sum
    of a run.
    """

    id: str = ""
    epoch: str = ""
    since: int
    until: int
    step: int
    steps: int = 0
    seconds: tuple[int, ...] = _NONE

    @property
    def ratio(self) -> float:
        """The productive part of the time, 0 to 1."""
        return self.seconds[_PRODUCTIVE] / max(1, sum(self.seconds))

    @property
    def is_sane(self) -> bool:
        """Whether this can be the result of a count. It may come from a record, which people can
        edit."""
        return (
            all(0 <= value < _MOST for value in (self.since, self.steps, *self.seconds))
            and -1 <= self.step < _MOST
            and self.steps <= self.step + 1
            and sum(self.seconds) == self.until - self.since
        )


@dataclass(frozen=True, kw_only=True)
class GoodputTotal:
    """The sum of a run. `known`: each tally as it was last reported, the newest last."""

    total: GoodputSpan
    known: tuple[GoodputSpan, ...]


def in_whole_seconds(goodput: ReportedGoodput) -> GoodputSpan:
    """The reported tally in whole seconds, which add up to its whole time. Time that the sidecar
    put into no bucket was before it knew of a restore, so it counts as infrastructure recovery."""
    seconds = list(_seconds(goodput))
    seconds[_AWAY] += max(0.0, goodput.until - goodput.since - sum(seconds))
    edges = [0, *map(round, accumulate(seconds))]
    since = floor(goodput.since)
    return GoodputSpan(
        id=goodput.id,
        epoch=str(goodput.epoch),
        since=since,
        until=since + edges[-1],
        step=goodput.step,
        steps=goodput.steps,
        seconds=tuple(end - begin for begin, end in pairwise(edges)),
    )


def add_tally(counted: GoodputTotal | None, tally: GoodputSpan) -> GoodputTotal:
    """The sum with the present state of this tally. A tally that another one has followed counts
    again only after a trainer has restored there."""
    if counted is None:
        begun = GoodputSpan(since=tally.since, until=tally.since, step=tally.step - tally.steps)
        counted = GoodputTotal(total=begun, known=())
    before = next((known for known in counted.known if known.id == tally.id), None)
    before = before or _before(counted, tally)
    if before.epoch == tally.epoch and before is not counted.known[-1]:
        return counted
    others = (known for known in counted.known if known.id != tally.id)
    return GoodputTotal(
        total=_grown(counted.total, before, tally), known=(*others, tally)[-MOST_TALLIES:]
    )


def _before(counted: GoodputTotal, tally: GoodputSpan) -> GoodputSpan:
    """The former state of a tally that is reported for the first time: empty. If it is older than
    another tally, it was reported before and then forgotten, so its steps are in the sum
    already."""
    nothing = GoodputSpan(since=tally.since, until=tally.since, step=-1)
    if tally.since > max((known.since for known in counted.known), default=-1):
        return nothing
    return replace(nothing, steps=tally.steps - tally.step + counted.total.step)


def _grown(total: GoodputSpan, before: GoodputSpan, tally: GoodputSpan) -> GoodputSpan:
    """The total, plus what the tally gained since `before`."""
    more = [now - then for now, then in zip(tally.seconds, before.seconds, strict=True)]
    until = max(total.until, tally.until)
    untold_s = until - total.until - sum(more)
    usual_s = total.seconds[_PRODUCTIVE] / total.steps if total.steps else 0.0
    # By how many steps the run advanced beyond the growth of this tally. Positive: an earlier pod
    # made these steps and died before it reported them, or this tally, which had paused, now gives
    # up steps that the run gave up when another pod went back over them. Negative: this tally goes
    # back over steps that another tally counts.
    unreported = (tally.step - total.step) - (tally.steps - before.steps)
    if untold_s < 0:
        again_s = max(0, min(more[_WASTED], round(unreported * usual_s)))
        more[_PRODUCTIVE] += again_s
        more[_WASTED] -= again_s
        _take(more, -untold_s, first=reversed(range(len(BUCKETS))))
    else:
        stepped_s = min(untold_s, round(max(0, unreported) * usual_s))
        more[_PRODUCTIVE] += stepped_s
        more[_AWAY] += untold_s - stepped_s
    redone_s = round(min(max(0, -unreported), total.steps) * usual_s)
    more[_PRODUCTIVE] -= redone_s
    more[_WASTED] += redone_s
    seconds = [have + gained for have, gained in zip(total.seconds, more, strict=True)]
    below = sum(-min(0, second) for second in seconds)
    seconds = [max(0, second) for second in seconds]
    _take(seconds, below, first=(_WASTED, *range(len(BUCKETS))))
    return replace(
        total,
        until=until,
        step=tally.step,
        steps=max(0, total.steps + tally.step - total.step),
        seconds=tuple(seconds),
    )


def _take(seconds: list[int], amount: int, *, first: Iterable[int]) -> None:
    """Take `amount` seconds away from the buckets in this order. No bucket goes below 0."""
    for bucket in first:
        taken = min(amount, max(0, seconds[bucket]))
        seconds[bucket] -= taken
        amount -= taken


def _seconds(goodput: ReportedGoodput) -> tuple[float, ...]:
    return (goodput.productive_s, *(seconds for _, seconds in goodput.badput.items()))


# --- as a part of a run --------------------------------------------------------------------------


class GoodputSum:
    """The sum of one run, and the state of it that is shown. Before `resume`, the newest tally only
    waits: an earlier leader may have counted a part of it."""

    def __init__(self) -> None:
        self._sum: GoodputTotal | None = None
        self._shown: GoodputTotal | None = None
        self._shown_at = 0.0
        self._waits: GoodputSpan | None = None
        self._resumed = False

    def resume(self, record: wire.RunGoodput | None) -> None:
        """Go on from what an earlier leader counted."""
        self._sum = self._shown = _read(record) if record is not None else None
        self._resumed = True
        if self._waits is not None:
            self._sum = add_tally(self._sum, self._waits)

    def set_local_tally(self, goodput: ReportedGoodput) -> None:
        """Take in the tally of this machine, which is the run's first."""
        self._waits = in_whole_seconds(goodput)
        if self._resumed:
            self._sum = add_tally(self._sum, self._waits)

    def get_throttled_total(self, *, at: float) -> wire.RunGoodput | None:
        """The sum as it was within the last `SHOWN_S`; None: there is none."""
        if abs(at - self._shown_at) >= SHOWN_S:
            self._shown, self._shown_at = self._sum, at
        return _written(self._shown) if self._shown is not None else None


def _written(counted: GoodputTotal) -> wire.RunGoodput:
    total = counted.total
    return wire.RunGoodput(
        since=format_utc(total.since),
        until=format_utc(total.until),
        ratio=f"{total.ratio:.3f}",
        wall_seconds=sum(total.seconds),
        productive_seconds=total.seconds[_PRODUCTIVE],
        badput_seconds=_badput(total),
        step=total.step,
        steps=total.steps,
        tallies=tuple(
            wire.GoodputTally(
                id=tally.id,
                epoch=tally.epoch,
                since=format_utc(tally.since),
                until=format_utc(tally.until),
                productive_seconds=tally.seconds[_PRODUCTIVE],
                badput_seconds=_badput(tally),
                step=tally.step,
                steps=tally.steps,
            )
            for tally in counted.known
        ),
    )


def _badput(tally: GoodputSpan) -> wire.BadputSeconds:
    return wire.BadputSeconds(**dict(zip(BUCKETS[1:], tally.seconds[1:], strict=True)))


def _read(record: wire.RunGoodput) -> GoodputTotal | None:
    """The sum in a record; None if it cannot be the result of a count."""
    tallies = [
        _tally(tally, id=tally.id, epoch=tally.epoch) for tally in record.tallies[-MOST_TALLIES:]
    ]
    total = _tally(record)
    known = [tally for tally in tallies if tally is not None and tally.is_sane and tally.id]
    if total is None or not total.is_sane or len(known) != len(tallies):
        return None
    return GoodputTotal(total=total, known=tuple(known))


def _tally(status: wire.RunGoodput | wire.GoodputTally, **of: str) -> GoodputSpan | None:
    since, until = parse_utc(status.since), parse_utc(status.until)
    if since is None or until is None:
        return None
    badput = (getattr(status.badput_seconds, bucket) for bucket in BUCKETS[1:])
    return GoodputSpan(
        **of,
        since=int(since),
        until=int(until),
        step=status.step,
        steps=status.steps,
        seconds=(status.productive_seconds, *badput),
    )
