"""Which step a restart here goes on from, beside what the ledger plans and the operator says.

A person names the step that the next epoch goes on from (`Rollback`): later steps are then dead. Or
the script names it (`restore(step=...)`), each time that it is started. So that step is kept as
long as scripts ask for it: until an epoch begins for which none was asked, or another one. The wish
covers one restart: it is fulfilled once an epoch has begun from that step. The operator notices
this itself, but hears of the new epoch a moment later. For `--restore-from`, the epochs recorded
since the wish decide.

Or the newest steps are suspect, because the script failed by itself after it went on from them. The
failures are recorded on the volumes because shards do not tell them: the life that looks for a way
out of a crash loop may have another sidecar than the lives that failed. If it also has other
volumes, the operator remembers the failures that were reported to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from keepstep.core.commit_rule import Standing
from keepstep.core.ledger import RestorePlan
from keepstep.core.node import Node
from keepstep.core.suspicion import KEPT, WITHIN, Doubt, Failure, newest
from keepstep.errors import StorageError
from keepstep.steps import Epoch, StepId, Tier
from keepstep.wire.reports import ReportReply
from keepstep_sidecar.commit.inventory import Copies
from keepstep_sidecar.concurrency import OnThread
from keepstep_sidecar.config.restore_from import Wish
from keepstep_sidecar.log import warn
from keepstep_sidecar.volume.volume_set import VolumeSet


class Rollback:
    """The step to go back to, if one was named at the sidecar's start or by the operator.

    `begin_again`: a person asked, through the operator, to begin at step 0 if no step can be
    restored. `gone_for_good`: the operator knows that what no pod can reach cannot come back.
    """

    def __init__(
        self,
        wish: Wish | None,
        recorded: Callable[[], Iterable[Epoch]],
        *,
        asked: StepId | None = None,
    ) -> None:
        """`recorded`: returns the epochs on this machine's record. `asked`: the step that the
        script asked for in the newest of them."""
        self.begin_again = self.gone_for_good = False
        self.asked = asked
        self._wish = wish
        self._recorded = recorded
        self._told: StepId | None = None
        self._began: StepId | None = None

    def hear(self, reply: ReportReply) -> None:
        """Take in the operator's reply, which holds until the next one."""
        self._told = reply.restore_from
        self.begin_again = reply.begin_again
        self.gone_for_good = reply.gone_for_good
        if self._told != self._began:
            self._began = None

    def began(self, epoch: Epoch) -> None:
        """This epoch begins now. The operator will hear of it later."""
        if epoch.parent is not None and epoch.parent == self._told:
            self._began = epoch.parent

    @property
    def wish(self) -> Wish | None:
        """The wish that is not yet fulfilled. None: restore the newest step."""
        if self._told is not None:
            return Wish(id=self._told) if self._told != self._began else None
        return self._wish if self._wish is not None and not self._is_done(self._wish) else None

    def _is_done(self, wish: Wish) -> bool:
        return any(
            one.id.number > wish.since and one.parent is not None and wish.names(one.parent)
            for one in self._recorded()
        )

    def asked_for(self, parent: StepId | None, asked: int | None) -> StepId | None:
        """The step to keep once an epoch goes on from `parent`, where the script asked for the step
        of number `asked`. A person may have named another one: then the script's is kept, too."""
        if asked is None:
            return None
        known = (id for id in (parent, self.asked) if id is not None and id.step == asked)
        return next(known, None)

    def names(self, id: StepId) -> bool:
        """Whether this may be the wanted step, which must not be deleted."""
        if id == self.asked:
            return True
        return (wish := self.wish) is not None and wish.names(id)

    def resolve(self, whole: Iterable[StepId], held: Collection[StepId]) -> StepId | None:
        """The wanted step; of several with its number, the newest. Prefers steps in `whole`."""
        if (wish := self.wish) is None:
            return None
        if wish.id is not None:
            return wish.id
        found = [id for id in whole if wish.names(id)] or [id for id in held if wish.names(id)]
        return max(found, default=None)


class RestartStep:
    """Says which step this machine expects. The trainers' own vote decides."""

    def __init__(
        self,
        node: Node,
        copies: Copies,
        rollback: Rollback,
        volumes: VolumeSet,
        blocking: OnThread,
    ) -> None:
        self._node = node
        self._copies = copies
        self._rollback = rollback
        self._volumes = volumes
        self._blocking = blocking
        self._noted = frozenset(sorted(volumes.failures())[-KEPT:])
        self._reported: tuple[Failure, ...] = ()

    # --- failures ----------------------------------------------------------------------------

    async def note_failure(self, at: StepId) -> None:
        """Record that the script failed at this step. On return the record is durable, if any
        volume can be written."""
        if at in self._noted:
            return
        self._noted = noted = frozenset(sorted({*self._noted, at})[-KEPT:])
        try:
            await self._blocking(lambda: self._volumes.save_failures(noted))
        except StorageError as error:
            warn("failure of the script not noted", step=str(at), reason=str(error))

    def learn(self, reported: Iterable[Failure]) -> None:
        """Add the failures that the operator knows from all pods. They stay known here even if the
        operator forgets them."""
        self._reported = newest((*self._reported, *reported))

    def failures(self) -> tuple[Failure, ...]:
        """All known failures, each with the steps that it casts doubt on."""
        ledger = self._node.ledger

        def alive(id: StepId) -> bool:
            return ledger.lineage.standing(id) is Standing.LIVE

        reported = (
            Failure(at=one.at, after=tuple(filter(alive, one.after))) for one in self._reported
        )
        noted = (Failure.of(at, ledger.parent, alive) for at in self._noted)
        return tuple(one for one in newest((*reported, *noted)) if one.after)

    @property
    def trusted(self) -> frozenset[StepId]:
        """Steps that a person has pinned, as far as this machine was told."""
        return self._node.heard.pinned

    def doubt(self) -> Doubt:
        """Which steps are suspect and which are proven, as far as this machine knows."""
        kept = {id for id in self._copies.ids() if not self._node.is_dead(id)}
        return Doubt.of(self.failures(), kept, self.trusted)

    def suspicion(self) -> str:
        """A message: which steps a restore passes over, and why; '' when none is suspect."""
        if not (self._noted or self._reported) or (since := self.doubt().since) is None:
            return ""
        back = self._instead()
        return (
            f"step {since} and later ones are suspect: the script failed twice within {WITHIN}"
            " steps after it was restored; the next restore goes on from "
            + (f"step {back}" if back is not None else "the newest nonetheless, as none is older")
            + ", unless a person names another one (--restore-from, spec.restoreFrom) or pins it"
        )

    def _instead(self) -> StepId | None:
        """The step to go back to instead, if the newest whole step is suspect; else None."""
        if not (self._noted or self._reported):
            return None
        whole = self._node.ledger.whole()
        left = self.doubt().left(whole)
        return max(left) if len(left) < len(whole) else None

    # --- the step ----------------------------------------------------------------------------

    def pinned(self) -> frozenset[StepId] | None:
        """Steps that no tier may delete; None until the operator has named them."""
        if not self._node.operator_view.pins_known:
            return None
        return self.trusted.union(filter(self._rollback.names, self._copies.ids()))

    def wanted(self) -> StepId | None:
        """The step that a person wants to go back to, if this machine knows it."""
        ledger = self._node.ledger
        held = [id for id in self._copies.ids() if ledger.lineage.restorable(id)]
        return self._rollback.resolve(ledger.whole(), held)

    def plan(self) -> RestorePlan | None:
        """The step that would be restored now and its tiers; None if that is unknown."""
        ledger = self._node.ledger
        if (chosen := self.wanted() or self._instead()) is not None:
            return self._plan_of(chosen)
        beyond, complete = self._plan_beyond(), ledger.watermark(Tier.MEMORY)
        # A step that is whole only by twins does not tell what ranks elsewhere could restore.
        if beyond is not None and (complete is None or complete < beyond.id):
            return beyond
        if not ledger.whole():
            return None
        # This machine can never tell what a rank holds that has nothing here.
        found = ledger.plan(self._copies.ranks())
        return found if isinstance(found, RestorePlan) else None

    def _plan_beyond(self) -> RestorePlan | None:
        """The plan when other ranks are on other machines: the operator's plan, for those ranks
        here that hold its step.

        Else the last commit, for those ranks that have nothing newer in memory. If a rank has
        something newer and there is no operator, only the vote can tell whether the other ranks
        have it too.
        """
        told = self._node.heard.plan
        restorable = told is not None and self._node.ledger.lineage.restorable(told)
        if told is not None and restorable and (found := self._plan_of(told)) is not None:
            return found
        if (id := self._node.last_commit()) is None:
            return None
        newest_in_memory = self._copies.newest_in_memory
        ranks = [rank for rank in self._copies.ranks() if id >= newest_in_memory(rank, id)]
        return self._plan_of(id, ranks)

    def _plan_of(self, id: StepId, ranks: Iterable[int] | None = None) -> RestorePlan | None:
        """A plan of this step for those of `ranks` (None: all here) that hold it; None if none
        do."""
        asked = self._copies.ranks() if ranks is None else ranks
        tiers = {rank: tier for rank in asked if (tier := self._copies.nearest(id, rank))}
        return RestorePlan(id, tiers) if tiers else None
