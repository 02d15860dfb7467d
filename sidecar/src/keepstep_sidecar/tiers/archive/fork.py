"""Another run's part of the archive as a `RemoteTier`, for a run that begins from a step there.

It only reads: it writes and deletes nothing below the other run's directory, and does not show that
it reads. So the other run may expire the step at any time. This run then does not begin from
another step instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from keepstep.core.commit_rule import Standing, trace
from keepstep.errors import KeepstepError
from keepstep.steps import Answer, Epoch, StepId, Tier
from keepstep_sidecar.config.sidecar import Fork
from keepstep_sidecar.tiers.archive.index import (
    ArchivedStep,
    Survey,
    Surveyor,
    inventory,
    source,
)
from keepstep_sidecar.tiers.archive.store import Store
from keepstep_sidecar.tiers.source import ShardSource
from keepstep_sidecar.tiers.tier import Inventory, RemoteShard, RemoteTier, TierStatus

_STEPS_NAMED = 5


class AncestorTier(RemoteTier):
    """`run`: the name of this run. `epochs`: returns its own epochs.

    `ancestor`: the other run. A run that has nothing of its own begins from one of its steps
    instead of at step 0, so only where step 0 would be allowed. `ids`: all steps of the other run
    that were ever offered.
    """

    tier = Tier.ARCHIVE

    def __init__(
        self,
        store: Store,
        fork: Fork,
        *,
        run: str,
        epochs: Callable[[], Iterable[Epoch]] = tuple,
    ) -> None:
        super().__init__()
        self.ancestor, self.where = fork.run, f"{store.where}/{fork.run}"
        self._store, self._fork, self._own, self._epochs = store, fork, run, epochs
        self.ids: frozenset[StepId] = frozenset()
        self._trouble = ""
        self._surveyor = Surveyor(store, fork.run)

    async def look(self) -> Inventory:
        """See `RemoteTier.look`. A missing step makes the answer UNKNOWN: no reason for step 0."""
        if self.facts.outgrown():
            return Inventory(answer=Answer.NONE)
        try:
            survey = await self._surveyor.survey()
            found = [] if survey.conflict else self._chosen(survey)
            why = "" if found else survey.conflict or self._why_not(survey)
        except KeepstepError as error:
            found, why = [], str(error)
        self._trouble = why and f"this run shall begin from {self._fork}, but {why}"
        self.ids |= {one.id for one in found}
        return inventory(found, run=self.ancestor, where=self.where, reason=self._trouble)

    def _chosen(self, survey: Survey) -> list[ArchivedStep]:
        """The chosen step, of those that no later life of the other run left behind."""
        whole = {one.id: one for one in survey.complete}
        lineage = trace({one.id: one for one in survey.epochs}, seen={id.epoch for id in whole})
        alive = {id for id in whole if lineage.standing(id) is Standing.LIVE}
        return [whole[id] for id in self._fork.chosen(whole, alive, self._epochs())]

    def _why_not(self, survey: Survey) -> str:
        if not survey.steps:
            return f"{self._store.where} holds no run {self.ancestor!r}"
        for one in survey.steps:
            if one.fault and self._fork.chosen([one.id], [one.id], ()):
                return one.fault
        there = sorted((one.id for one in survey.complete), reverse=True)[:_STEPS_NAMED]
        named = ", ".join(map(str, there)) or "none that is whole"
        return f"{self.where} does not hold that step whole; there is {named}"

    def sources(self, shard: RemoteShard) -> Sequence[ShardSource]:
        """In memory the image is this run's: a restarted sidecar would erase another run's
        image."""
        return [source(self._store, shard, run=self.ancestor, adopted_by=self._own)]

    def status(self) -> TierStatus:
        trouble = "" if self.facts.outgrown() else self._trouble
        return replace(super().status(), trouble=trouble)

    async def close(self) -> None:
        await self._store.close()
