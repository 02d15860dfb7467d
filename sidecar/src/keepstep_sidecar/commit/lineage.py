"""Which epochs belong to this run, and from which step the next one goes on.

A fork's step of the other run takes the place of step 0 and is held to the same rule: it is a
candidate only when every tier has answered that this run has no commit of its own. The run's own
steps are always newer. So once this run has a commit, the other run's steps are no longer asked
for, offered or reported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from keepstep.core.commit_rule import StepLiveness
from keepstep.core.ledger import RestorePlan
from keepstep.core.node import Node
from keepstep.core.shard import Shard, ShardsOfStep
from keepstep.core.suspicion import KEPT, WITHIN, Failure, SuspectSteps, newest_failures
from keepstep.errors import StorageError
from keepstep.steps import Epoch, EpochId, StepId, Tier
from keepstep.wire.member_reports import ReportReply
from keepstep_sidecar.commit.reachable_copies import LocalShards, ReachableCopies, RemoteInventory
from keepstep_sidecar.config.sidecar import RollbackRequest
from keepstep_sidecar.log import warn

Row = TypeVar("Row", Shard, ShardsOfStep)


@dataclass(eq=False)
class RunLineage:
    """The epochs of one run. `current`: the one in which a live trainer works, None while unknown.
    What concerns another run does nothing when the run is not a fork. `training`: the ranks whose
    trainers live here and have restored."""

    node: Node
    remotes: RemoteInventory
    local: LocalShards
    current: Epoch | None = None
    training: Callable[[], Collection[int]] = tuple

    def __post_init__(self) -> None:
        self._ancestor = self.remotes.ancestor

    def collect_own_epochs(self, *begun: Epoch) -> tuple[Epoch, ...]:
        """All epochs that are certainly this run's own: those recorded here, told by the run's
        other pods, or in `begun`. Includes their ancestors, whichever source knows them."""
        own = (*self.remotes.list_epochs_on_tier(Tier.PEER), *self.local.run_record.epochs, *begun)
        return collect_epoch_ancestors(own, self.node.ledger.epochs)

    def unrecorded_epochs(self, epoch: Epoch) -> tuple[Epoch, ...]:
        """All epochs to be recorded before this one begins; none if the volumes have them.

        What the ledger knows does not count: other pods told of epochs that lie only in memory.
        """
        own = self.collect_own_epochs(epoch)
        return () if set(own) <= set(self.local.run_record.epochs) else own

    def note_living_epoch(self, epoch: Epoch) -> None:
        """A live trainer works in this epoch (it restored before this sidecar started)."""
        if self.current is None or self.current.id < epoch.id:
            self.current = epoch

    # --- another run of this name ------------------------------------------------------------

    def find_training_epoch(self) -> Epoch | None:
        """The epoch in which a trainer of this machine trains now."""
        return self.current if self.training() else None

    def find_foreign_epochs(self, epochs: Iterable[Epoch]) -> frozenset[EpochId]:
        """The epochs that another run of this name began: those on record, and of `epochs` those
        that are newer than the one in which a trainer lives here, and that no part of this run
        knows; with all that go on from them."""
        life, epochs = self.find_training_epoch(), tuple(epochs)
        view, known = self.node.leader_view, set[EpochId]()
        if not view.alone:  # else the leader only says what was seen here
            steps = (view.commit, view.last_reply.plan, *view.last_reply.commits)
            known = {step_id.epoch for step_id in steps if step_id is not None}
        known |= {
            epoch.id
            for epoch in (
                self.collect_own_epochs() if life is None else self.collect_own_epochs(life)
            )
        }
        found = set(self.local.run_record.strangers - known)
        if life is not None:
            found |= {epoch.id for epoch in epochs if epoch.id.number >= life.id.number} - known
        for epoch in sorted(epochs, key=lambda epoch: epoch.id):
            if epoch.parent is not None and epoch.parent.epoch in found and epoch.id not in known:
                found.add(epoch.id)
        return frozenset(found)

    async def record_foreign_epochs(self, strangers: frozenset[EpochId]) -> None:
        """Record these, so that no later life of this run goes on from a step of theirs."""
        if strangers <= self.local.run_record.strangers:
            return
        try:
            await self.local.update_run_record(
                lambda record: replace(record, strangers=record.strangers | strangers)
            )
        except StorageError as error:
            warn("record.epochs_not_written", error=str(error))

    def has_own_commit(self) -> bool:
        """Whether the run has a commit of its own."""
        return self._newest() is not None

    def _newest(self) -> StepId | None:
        return max(
            (step_id for step_id in self.node.commits() if not self.is_foreign(step_id)),
            default=None,
        )

    def is_foreign(self, step_id: StepId) -> bool:
        """Whether this step belongs to the other run."""
        if self._ancestor is None:
            return False
        return step_id in self._ancestor.ids or any(
            epoch.parent == step_id for epoch in self.collect_own_epochs() if epoch.origin
        )

    def may_persist_step(self, step_id: StepId) -> bool:
        """Whether an image in memory may be written to the drives. It must certainly belong to this
        run: a new sidecar may find the other run's step in a slot before it knows whose it is."""
        if self._ancestor is None:
            return True
        return not self.is_foreign(step_id) and any(
            epoch.id == step_id.epoch for epoch in self.collect_own_epochs()
        )

    def without_foreign(self, held: Iterable[Row]) -> tuple[Row, ...]:
        """`held` without the other run's steps: what may be reported as this run's own."""
        return tuple(group for group in held if not self.is_foreign(group.step_id))

    def must_hide(self, step_id: StepId, *, in_doubt: bool) -> bool:
        """Whether this step must not be offered. `in_doubt`: what this run has is not certain."""
        return self.is_foreign(step_id) and (in_doubt or self.has_own_commit())

    def explain_fork_refusal(self) -> str:
        """Why the run cannot begin although no step was found; '' when the run is not a fork."""
        if self._ancestor is None:
            return ""
        name = self._ancestor.ancestor
        if (newest := self._newest()) is None:
            named = ", ".join(map(str, sorted(self._ancestor.ids))) or "a step"
            return f"cannot begin from {named} of run {name}: no valid copy can be reached"
        return (
            f"step {newest} of this run was committed, so it does not begin from run {name} again;"
            " but nothing of it is within reach. Bring its storage back, or give the run another"
            " name to fork again"
        )

    def add_fork_origin(self, epoch: Epoch) -> Epoch:
        """`epoch`, with the other run as its origin if its parent belongs to that run."""
        if self._ancestor is None or epoch.parent is None or not self.is_foreign(epoch.parent):
            return epoch
        return replace(epoch, origin=self._ancestor.ancestor)


# --- epochs of one run -----------------------------------------------------------------------
#
# The record of a pod begins with the epoch in which the pod was new. A pod that meets steps of
# older epochs must still recognize them as steps of the same run. So whatever is known of the
# line goes on record.


def collect_epoch_ancestors(own: Iterable[Epoch], known: Iterable[Epoch]) -> tuple[Epoch, ...]:
    """The epochs `own` and their ancestors, as far as `known` contains them; oldest first. The line
    of a fork ends where it left the other run."""
    by_id = {epoch.id: epoch for epoch in known}
    found = {epoch.id: epoch for epoch in own}
    waiting = list(found.values())
    while waiting:
        epoch = waiting.pop()
        if epoch.parent is None or epoch.origin or epoch.parent.epoch in found:
            continue
        if (parent := by_id.get(epoch.parent.epoch)) is not None:
            found[parent.id] = parent
            waiting.append(parent)
    return tuple(found[epoch_id] for epoch_id in sorted(found))


# --- the step of a restart -------------------------------------------------------------------


@dataclass(eq=False)
class Rollback:
    """The step to go back to, if one was named at the sidecar's `start` or by the leader.

    `recorded`: returns the epochs on this machine's record. `asked`: the step that the script asked
    for in the newest of them. `begin_again`: a person asked, through the operator, to begin at step
    0 if no step can be restored. `gone_for_good`: the operator knows that what no pod can reach
    cannot come back.
    """

    start: RollbackRequest | None
    recorded: Callable[[], Iterable[Epoch]]
    asked: StepId | None = None
    begin_again: bool = False
    gone_for_good: bool = False
    _reported: StepId | None = None
    _began: StepId | None = None

    def apply_reply(self, reply: ReportReply) -> None:
        """Take in the leader's reply, which holds until the next one."""
        self._reported = reply.restore_from
        self.begin_again = reply.begin_again
        self.gone_for_good = reply.gone_for_good
        if self._reported != self._began:
            self._began = None

    def epoch_began(self, epoch: Epoch) -> None:
        """This epoch begins now. The leader will hear of it later."""
        if epoch.parent is not None and epoch.parent == self._reported:
            self._began = epoch.parent

    @property
    def request(self) -> RollbackRequest | None:
        """The wish that is not yet fulfilled. None: restore the newest step."""
        if self._reported is not None:
            return RollbackRequest(id=self._reported) if self._reported != self._began else None
        if (request := self.start) is None:
            return None
        done = any(
            epoch.id.number > request.since
            and epoch.parent is not None
            and request.names(epoch.parent)
            for epoch in self.recorded()
        )
        return None if done else request

    def find_script_requested_step(self, parent: StepId | None, asked: int | None) -> StepId | None:
        """The step to keep once an epoch goes on from `parent`, where the script asked for the step
        of number `asked`. A person may have named another one: then the script's is kept, too."""
        if asked is None:
            return None
        known = (
            step_id
            for step_id in (parent, self.asked)
            if step_id is not None and step_id.step == asked
        )
        return next(known, None)

    def names(self, step_id: StepId) -> bool:
        """Whether this may be the wanted step, which must not be deleted."""
        if step_id == self.asked:
            return True
        return (request := self.request) is not None and request.names(step_id)

    def resolve(self, whole: Iterable[StepId], held: Collection[StepId]) -> StepId | None:
        """The wanted step; of several with its number, the newest. Prefers steps in `whole`."""
        if (request := self.request) is None:
            return None
        if request.id is not None:
            return request.id
        found = [step_id for step_id in whole if request.names(step_id)] or [
            step_id for step_id in held if request.names(step_id)
        ]
        return max(found, default=None)


@dataclass(eq=False)
class RestartStepPredictor:
    """Says which step this machine expects. The trainers' own vote decides."""

    node: Node
    copies: ReachableCopies
    rollback: Rollback
    local: LocalShards
    _reported: tuple[Failure, ...] = ()

    def __post_init__(self) -> None:
        self._noted = frozenset(sorted(self.local.run_record.failures)[-KEPT:])

    # --- failures ----------------------------------------------------------------------------

    async def note_failure(self, at: StepId) -> None:
        """Record that the script failed at this step. On return the record is durable, if any
        volume can be written."""
        if at in self._noted:
            return
        self._noted = noted = frozenset(sorted({*self._noted, at})[-KEPT:])
        try:
            await self.local.update_run_record(lambda record: replace(record, failures=noted))
        except StorageError as error:
            warn("record.failure_not_written", step=str(at), error=str(error))

    def add_failures(self, reported: Iterable[Failure]) -> None:
        """Add the failures that the leader knows from all machines. They stay known here even if
        the leader forgets them."""
        self._reported = newest_failures((*self._reported, *reported))

    def list_all_known_failures(self) -> tuple[Failure, ...]:
        """All known failures, each with the steps that it casts doubt on."""
        ledger = self.node.ledger

        def alive(step_id: StepId) -> bool:
            return ledger.lineage.step_liveness(step_id) is StepLiveness.LIVE

        reported = (
            Failure(at=failure.at, after=tuple(filter(alive, failure.after)))
            for failure in self._reported
        )
        noted = (Failure.from_failed_step(at, ledger.find_parent_step, alive) for at in self._noted)
        return tuple(failure for failure in newest_failures((*reported, *noted)) if failure.after)

    @property
    def pinned_steps(self) -> frozenset[StepId]:
        """Steps that a person has pinned, as far as this machine was told."""
        return self.node.last_reply.pinned

    def get_suspect_steps(self) -> SuspectSteps:
        """Which steps are suspect and which are proven, as far as this machine knows."""
        kept = {step_id for step_id in self.copies.ids() if not self.node.is_dead(step_id)}
        return SuspectSteps.from_failures(self.list_all_known_failures(), kept, self.pinned_steps)

    def suspicion_text(self) -> str:
        """A message: which steps a restore passes over, and why; '' when none is suspect."""
        if not (self._noted or self._reported) or (since := self.get_suspect_steps().since) is None:
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
        whole = self.node.ledger.list_reachable_steps()
        left = self.get_suspect_steps().restorable(whole)
        return max(left) if len(left) < len(whole) else None

    # --- the step ----------------------------------------------------------------------------

    def get_pinned_steps(self) -> frozenset[StepId] | None:
        """Steps that no tier may delete; None until the leader has named them."""
        if not self.node.leader_view.pins_known:
            return None
        return self.pinned_steps.union(filter(self.rollback.names, self.copies.ids()))

    def rollback_target(self) -> StepId | None:
        """The step that a person wants to go back to, if this machine knows it."""
        ledger = self.node.ledger
        held = [step_id for step_id in self.copies.ids() if ledger.lineage.is_restorable(step_id)]
        return self.rollback.resolve(ledger.list_reachable_steps(), held)

    def plan(self) -> RestorePlan | None:
        """The step that would be restored now and its tiers; None if that is unknown."""
        ledger = self.node.ledger
        if (chosen := self.rollback_target() or self._instead()) is not None:
            return self._plan_of(chosen)
        beyond, complete = self._plan_beyond(), ledger.watermark(Tier.MEMORY)
        # A step that is whole only by twins does not tell what ranks elsewhere could restore.
        if beyond is not None and (complete is None or complete < beyond.id):
            return beyond
        if not ledger.list_reachable_steps():
            return None
        # This machine can never tell what a rank holds that has nothing here.
        found = ledger.plan(self.copies.list_ranks_ever_held())
        return found if isinstance(found, RestorePlan) else None

    def _plan_beyond(self) -> RestorePlan | None:
        """The plan when other ranks are on other machines: the leader's plan, for those ranks
        here that hold its step.

        Else the last commit, for those ranks that have nothing newer in memory. If a rank has
        something newer and the leader is away, only the vote can tell whether the other ranks
        have it too.
        """
        plan = self.node.last_reply.plan
        restorable = plan is not None and self.node.ledger.lineage.is_restorable(plan)
        if plan is not None and restorable and (found := self._plan_of(plan)) is not None:
            return found
        if (step_id := self.node.last_commit()) is None:
            return None
        newest_in_memory = self.copies.newest_in_memory
        ranks = [
            rank
            for rank in self.copies.list_ranks_ever_held()
            if step_id >= newest_in_memory(rank, step_id)
        ]
        return self._plan_of(step_id, ranks)

    def _plan_of(self, step_id: StepId, ranks: Iterable[int] | None = None) -> RestorePlan | None:
        """A plan of this step for those of `ranks` (None: all here) that hold it; None if none
        do."""
        asked = self.copies.list_ranks_ever_held() if ranks is None else ranks
        tiers = {rank: tier for rank in asked if (tier := self.copies.nearest_tier(step_id, rank))}
        return RestorePlan(step_id, tiers) if tiers else None
