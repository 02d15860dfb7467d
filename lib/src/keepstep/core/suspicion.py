"""Which steps are suspect, and which proven: what ends a crash loop.

A life of the run that goes on from a step and fails by itself within `WITHIN` steps casts doubt on
that step, and on the ones that lives before it went on from, as far as they are within `WITHIN`
steps of the failure, too: a loop that creeps a step further each time is one. Two such failures,
and the step is *suspect*, and with it all that descends from it. A step is *proven* once a later
one was kept, `WITHIN` steps further on: nothing is kept of a step that is not healthy.

Pure, and nothing here is on record but the failures: what is proven is a property of storage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from keepstep.steps import EpochId, StepId

WITHIN = 20
"""Steps after a restore in which a failure is held against it, and after which a step is proven."""

KEPT = 32
"""Failures that are remembered. What is older is forgiven, or of lives that were left behind."""

_TWICE = 2


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The script failed by itself when it had come to step `at`. `after`: the steps which that life
    and those before it went on from, nearest first, as far as they are in doubt for it."""

    at: StepId
    after: tuple[StepId, ...] = ()

    @classmethod
    def of(
        cls,
        at: StepId,
        parent: Callable[[EpochId], StepId | None],
        alive: Callable[[StepId], bool],
    ) -> Failure:
        """`parent`: the step that an epoch went on from, as far as that is known. `alive`: whether
        the newest epoch descends from a step; one that was left behind is in no doubt any more."""
        found, epoch = list[StepId](), at.epoch
        while (one := parent(epoch)) is not None and one.epoch < epoch:
            if not 0 <= at.step - one.step <= WITHIN:
                break
            found.append(one)
            epoch = one.epoch
        return cls(at=at, after=tuple(filter(alive, found)))


def newest(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Each once, as whoever knows the most of the lives before it tells it; of more than `KEPT` the
    newest. Oldest first."""
    known = dict[StepId, Failure]()
    for one in failures:
        if one.at not in known or len(known[one.at].after) < len(one.after):
            known[one.at] = one
    return tuple(known[at] for at in sorted(known)[-KEPT:])


@dataclass(frozen=True)
class Doubt:
    """What is held against steps. `since`: it and all later ones are suspect; `newest`: the newest
    step that is kept. `trusted`: steps that a person has pinned are proven, and never suspect."""

    since: StepId | None = None
    newest: StepId | None = None
    trusted: frozenset[StepId] = frozenset()

    @classmethod
    def of(
        cls, failures: Iterable[Failure], kept: Collection[StepId], trusted: Iterable[StepId] = ()
    ) -> Doubt:
        """`failures`: as any machine of the run has them on record, which may be twice the same
        one. `kept`: steps that are held and not dead; a failure that the run has left `WITHIN`
        steps behind is forgiven."""
        newest, trusted = max(kept, default=None), frozenset(trusted)
        held_against = dict[StepId, set[EpochId]]()
        for one in failures:
            if newest is None or newest.step < one.at.step + WITHIN:
                for id in one.after:
                    held_against.setdefault(id, set()).add(one.at.epoch)
        twice = {id for id, lives in held_against.items() if len(lives) >= _TWICE}
        return cls(min(twice - trusted, default=None), newest, trusted)

    def is_suspect(self, id: StepId) -> bool:
        return self.since is not None and id >= self.since and id not in self.trusted

    def is_proven(self, id: StepId) -> bool:
        """By a later step that is not in doubt itself."""
        witness = self.newest if self.since is None else self.since
        survived = witness is not None and id.step + WITHIN <= witness.step
        return id in self.trusted or (survived and not self.is_suspect(id))

    def left(self, ids: Collection[StepId]) -> set[StepId]:
        """Those of `ids` to go on from: all, while none is suspect. Else the proven ones, else the
        oldest; a run that is younger than `WITHIN` steps loses no more by that. All, where every
        one is suspect: there is nothing better, and a run is not kept from its start."""
        sound = {id for id in ids if not self.is_suspect(id)}
        if not sound or len(sound) == len(ids):
            return set(ids)
        return {id for id in sound if self.is_proven(id)} or {min(sound)}
