"""Another run's part of the archive as a `RemoteTier`, for a run that begins from a step there.

Only ever reads: nothing is written below the other run's directory, nothing is deleted there, and
nothing says that somebody reads. So the other run may expire the step at any time; then nothing is
begun in its stead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from keepstep.core.ledger.lineage import Standing, trace
from keepstep.errors import KeepstepError
from keepstep.steps import Answer, Epoch, StepId, Tier
from keepstep_sidecar.config.restore_from import Fork
from keepstep_sidecar.tiers.archive.index import ArchivedStep, Survey, Surveyor, remotes, source
from keepstep_sidecar.tiers.archive.store import Store
from keepstep_sidecar.tiers.source import ShardSource
from keepstep_sidecar.tiers.tier import Inventory, RemoteShard, RemoteTier, TierStatus

_STEPS_NAMED = 5


class AncestorTier(RemoteTier):
    """`run`: this run's name; `epochs`: its own lives."""

    tier = Tier.ARCHIVE

    def __init__(
        self,
        store: Store,
        fork: Fork,
        *,
        run: str,
        epochs: Callable[[], Iterable[Epoch]] = tuple,
    ) -> None:
        self.ancestor = fork.run
        self._store, self._fork, self._own = store, fork, run
        self._epochs = epochs
        self._ids: frozenset[StepId] = frozenset()
        self._trouble = ""
        self._surveyor = Surveyor(store, fork.run)

    @property
    def where(self) -> str:
        """For people."""
        return f"{self._store.where}/{self._fork.run}"

    @property
    def ids(self) -> frozenset[StepId]:
        return self._ids

    # --- looking -----------------------------------------------------------------------------

    async def look(self) -> Inventory:
        """See `RemoteTier.look`. A step that is not there is UNKNOWN: never a reason for step 0."""
        if self.facts.outgrown():
            return Inventory(answer=Answer.NONE)
        try:
            survey = await self._surveyor.survey()
        except KeepstepError as error:
            return self._cannot(str(error))
        if survey.conflict:
            return self._cannot(survey.conflict)
        found = self._chosen(survey)
        if not found:
            return self._cannot(self._why_not(survey))
        self._trouble = ""
        self._ids |= {one.id for one in found}
        return Inventory(
            answer=Answer.STEPS,
            shards=tuple(
                shard
                for one in found
                for shard in remotes(one, run=self._fork.run, where=self.where)
            ),
            complete=frozenset(one.id for one in found),
        )

    def _cannot(self, why: str) -> Inventory:
        self._trouble = f"this run shall begin from {self._fork}, but {why}"
        return Inventory(answer=Answer.UNKNOWN, reason=self._trouble)

    def _chosen(self, survey: Survey) -> list[ArchivedStep]:
        whole = {one.id: one for one in survey.complete}
        meant = self._fork.chosen(whole, _alive(survey), self._epochs())
        return [whole[id] for id in meant]

    def _why_not(self, survey: Survey) -> str:
        if not survey.steps:
            return f"{self._store.where} holds no run {self._fork.run!r}"
        faults = [one.fault for one in survey.steps if one.fault and self._names(one.id)]
        if faults:
            return faults[0]
        there = sorted((one.id for one in survey.complete), reverse=True)[:_STEPS_NAMED]
        named = ", ".join(map(str, there)) or "none that is whole"
        return f"{self.where} does not hold that step whole; there is {named}"

    def _names(self, id: StepId) -> bool:
        return bool(self._fork.chosen([id], [id], ()))

    # --- reading -----------------------------------------------------------------------------

    def sources(self, shard: RemoteShard) -> Sequence[ShardSource]:
        """In memory the image is this run's: a sidecar that is started again would erase another
        one's."""
        return [source(self._store, shard, run=self._fork.run, adopted_by=self._own)]

    def status(self) -> TierStatus:
        trouble = "" if self.facts.outgrown() else self._trouble
        return TierStatus(tier=Tier.ARCHIVE, where=self.where, trouble=trouble)

    async def close(self) -> None:
        await self._store.close()


def _alive(survey: Survey) -> set[StepId]:
    """Whole steps that no later life of the other run left behind."""
    ids = [one.id for one in survey.complete]
    recorded = {one.id: one for one in survey.epochs}
    lineage = trace(recorded, seen={id.epoch for id in ids})
    return {id for id in ids if lineage.standing(id) is Standing.LIVE}
