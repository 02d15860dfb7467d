"""Which steps are suspect, and which are proven. This ends a crash loop.

A life of the run that goes on from a step and fails by itself within `WITHIN` steps casts doubt on
that step, and on the steps that earlier lives went on from within `WITHIN` steps of the failure,
because a crash loop may advance one step each time. After two such failures the step is *suspect*,
with every step that descends from it. A step is *proven* once a step at least `WITHIN` steps later
was kept, because no step is kept that is not healthy.

Pure. Only the failures are recorded: whether a step is proven follows from what lies on storage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from keepstep.steps import EpochId, StepId

WITHIN = 20
"""A failure within so many steps after a restore casts doubt on the restored step. A step is proven
by a kept step that lies so many steps later."""

KEPT = 32
"""How many failures are remembered. Older ones are forgiven, or are of lives that the run left
behind."""

_TWICE = 2


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The script failed by itself when it had reached step `at`.

    `after`: the steps on which this failure casts doubt, nearest first. That life and earlier ones
    went on from them.
    """

    at: StepId
    after: tuple[StepId, ...] = ()

    @classmethod
    def from_failed_step(
        cls,
        at: StepId,
        parent: Callable[[EpochId], StepId | None],
        alive: Callable[[StepId], bool],
    ) -> Failure:
        """`parent`: the step that an epoch went on from; None if there is none, or it is unknown.
        `alive`: whether the newest epoch descends from a step. Only these steps are named in
        `after`, because a step that was left behind is no longer in doubt."""
        found, epoch = list[StepId](), at.epoch
        while (step_id := parent(epoch)) is not None and step_id.epoch < epoch:
            if not 0 <= at.step - step_id.step <= WITHIN:
                break
            found.append(step_id)
            epoch = step_id.epoch
        return cls(at=at, after=tuple(filter(alive, found)))


def newest_failures(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Each failure once, oldest first, and at most the newest `KEPT`. Of several records of one
    failure, the one with the most steps in `after` is taken."""
    known = dict[StepId, Failure]()
    for failure in failures:
        if failure.at not in known or len(known[failure.at].after) < len(failure.after):
            known[failure.at] = failure
    return tuple(known[at] for at in sorted(known)[-KEPT:])


class SuspectSteps(NamedTuple):
    """Which steps are in doubt.

    `since`: this step and all later ones are suspect; None: no step is. `newest_failures`: the
    newest step that is kept. `trusted`: steps that a person has pinned; they count as proven and
    are never suspect.
    """

    since: StepId | None = None
    newest: StepId | None = None
    trusted: frozenset[StepId] = frozenset()

    @classmethod
    def from_failures(
        cls, failures: Iterable[Failure], kept: Collection[StepId], trusted: Iterable[StepId] = ()
    ) -> SuspectSteps:
        """`failures`: the records of all machines of the run, so one failure may be named twice.
        `kept`: steps that are held and not dead. A failure is forgiven once the newest of them lies
        `WITHIN` steps after it."""
        newest, trusted = max(kept, default=None), frozenset(trusted)
        held_against = dict[StepId, set[EpochId]]()
        for failure in failures:
            if newest is None or newest.step < failure.at.step + WITHIN:
                for step_id in failure.after:
                    held_against.setdefault(step_id, set()).add(failure.at.epoch)
        twice = {step_id for step_id, lives in held_against.items() if len(lives) >= _TWICE}
        return cls(min(twice - trusted, default=None), newest, trusted)

    def is_suspect(self, step_id: StepId) -> bool:
        return self.since is not None and step_id >= self.since and step_id not in self.trusted

    def is_proven(self, step_id: StepId) -> bool:
        """Whether this step is trusted, or lies at least `WITHIN` steps before the oldest suspect
        step; if none is suspect, before the newest kept step."""
        witness = self.newest if self.since is None else self.since
        survived = witness is not None and step_id.step + WITHIN <= witness.step
        return step_id in self.trusted or (survived and not self.is_suspect(step_id))

    def restorable(self, ids: Collection[StepId]) -> set[StepId]:
        """Those of `ids` to go on from.

        While none is suspect: all of them. Else the proven ones that are not suspect. If there are
        none: the oldest that is not suspect. This costs a run that is younger than `WITHIN` steps
        no more than those steps. If all are suspect: all of them, because there is no better choice
        and a run must be able to start.
        """
        sound = {step_id for step_id in ids if not self.is_suspect(step_id)}
        if not sound or len(sound) == len(ids):
            return set(ids)
        return {step_id for step_id in sound if self.is_proven(step_id)} or {min(sound)}
