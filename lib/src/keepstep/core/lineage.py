"""Which steps are alive: the chain of epochs behind the newest one.

An epoch names its parent: the step it went on from. Walking the parents from the newest epoch
gives segments: (epoch, its last step that counts). Steps on the walk are *live*. Steps of an older
epoch that are not on the walk are *dead*: a later life of the run went on from before them, or from
another branch.

The walk ends at an epoch without a parent. If older steps exist, the run began at step 0 beside
them, perhaps because a volume was not mounted. Until a person acknowledges this, the newest chain
of the older epochs is set *aside*: its steps are restored if the newer chain has nothing, and are
never retired.

The walk may also end at an epoch of which no record exists. Steps of older epochs are then *lost*:
they may be dead or live, so they are neither planned nor retired.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from keepstep.steps import Epoch, EpochId, StepId, StrEnum


class Standing(StrEnum):
    """`LIVE` and `ASIDE` may be restored; `LIVE` and `DEAD` may be retired."""

    LIVE = "live"
    ASIDE = "aside"
    LOST = "lost"
    DEAD = "dead"


class Segment(NamedTuple):
    """The steps of `epoch` up to and including `last` (None: all of them)."""

    epoch: EpochId
    last: int | None
    standing: Standing


@dataclass(frozen=True)
class Lineage:
    """The chain of epochs behind the newest one.

    `segments`: newest first. `lost_before`: steps of epochs older than this cannot be judged.
    `fresh`: the newest epoch that began at step 0 beside older ones and was not acknowledged; None
    if there is none.
    """

    segments: tuple[Segment, ...] = ()
    lost_before: EpochId | None = None
    fresh: EpochId | None = None

    @property
    def current(self) -> EpochId | None:
        return self.segments[0].epoch if self.segments else None

    def standing(self, id: StepId) -> Standing:
        segment = self._of_epoch.get(id.epoch)
        if segment is not None:
            within = segment.last is None or id.step <= segment.last
            return segment.standing if within else Standing.DEAD
        if self.lost_before is not None and id.epoch < self.lost_before:
            return Standing.LOST
        beyond = self.current is None or id.epoch > self.current
        return Standing.LIVE if beyond else Standing.DEAD

    @cached_property
    def _of_epoch(self) -> Mapping[EpochId, Segment]:
        return {segment.epoch: segment for segment in self.segments}

    def restorable(self, id: StepId) -> bool:
        return self.standing(id) in (Standing.LIVE, Standing.ASIDE)


def trace(
    recorded: Mapping[EpochId, Epoch],
    *,
    seen: Iterable[EpochId] = (),
    acknowledged: Collection[EpochId] = (),
) -> Lineage:
    """Walk back from the newest epoch. `seen`: the epochs of all images, recorded or not."""
    seen = set(seen)
    known = {*recorded, *seen}
    if not known:
        return Lineage()
    oldest_seen, ordered = min(seen, default=None), list[EpochId]()
    segments: list[Segment] = []
    at, last = max(known), None
    standing, fresh = Standing.LIVE, None
    while True:
        segments.append(Segment(at, last, standing))
        if at not in recorded:
            return Lineage(tuple(segments), at, fresh)
        parent = recorded[at].parent
        if parent is not None and parent.epoch < at:
            at, last = parent.epoch, parent.step
        elif at in acknowledged or oldest_seen is None or oldest_seen >= at:
            return Lineage(tuple(segments), None, fresh)
        else:
            standing, fresh = Standing.ASIDE, fresh or at
            ordered = ordered or sorted(known)
            at, last = ordered[bisect_left(ordered, at) - 1], None
