"""What the operator asks of a run, and how far that is. Pure.

Without an operator, or before it has answered, the run goes by its own settings, and no pod is
taken for gone. So an operator that is away changes nothing of what is committed or kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Final

from keepstep.core.ledger import RestartAction, RestartOutlook, restart_outlook
from keepstep.errors import few
from keepstep.leader.fresh_start_approval import FreshStartApproval
from keepstep.leader.left_shards import SERVED, LeftShards, describe_left_shards
from keepstep.leader.node_rank_states import NodeRankState
from keepstep.leader.orphaned_shards import NodeOrphanedShards
from keepstep.leader.restore_request import (
    parse_restore_request,
    resolve_restore_request,
    restore_target,
)
from keepstep.leader.run_history import RunHistory
from keepstep.leader.run_ledger import RunLedger
from keepstep.steps import StepId, Tier
from keepstep.wire.run_reports import (
    LeaderAnswer,
    MemberPod,
    RestoreFromState,
    RunEvent,
    RunPolicy,
    format_utc,
)

_DRIVES_NAMED: Final = 3
_LOST: Final = {
    RestartAction.GOES_ON: "a restart goes on from step {}",
    RestartAction.BEGINS: "nothing is left, so a restart begins at step 0",
    RestartAction.BEGINS_AGAIN: (
        "the other pods do not have all of any step, so the run begins again at step 0"
    ),
    RestartAction.WAITS: (
        "the other pods do not have all of any step, so restarts wait for what is missing. To begin"
        " again at step 0: {}"
    ),
}


class LatestOperatorAnswer:
    """The newest answer of the operator. `policy`: what the run goes by. `pods`: the members by
    UID. `restore_from`: see `keepstep.wire.run_reports.RestoreFromState`. `way_out`: the command by
    which a person has the run begin again. `alone`: there is no operator."""

    def __init__(
        self,
        ledger: RunLedger,
        history: RunHistory,
        policy: RunPolicy,
        *,
        run: str,
        way_out: str,
        alone: bool,
    ) -> None:
        self.policy, self.way_out, self.alone = policy, way_out, alone
        self.answer = LeaderAnswer()
        self.pods: dict[str, MemberPod] = {}
        self.fresh = FreshStartApproval()
        self.restore_from: RestoreFromState | None = None
        self._ledger, self._history, self._run = ledger, history, run
        self._named: tuple[NodeOrphanedShards, ...] = ()
        self._asked: tuple[NodeOrphanedShards, ...] = ()
        self._served = ""
        if alone:
            history.resumed = True

    def apply_operator_answer(
        self, answer: LeaderAnswer, *, connected: Collection[int], at: float
    ) -> None:
        """The operator has answered. `connected`: node ranks that are there, whatever it says."""
        self.answer, self._asked = answer, self._named
        self.policy = answer.policy or self.policy
        self.pods = {member.pod: member for member in answer.members}
        if answer.record is not None and not self._history.resumed:
            self._history.resume(answer.record)
            self.restore_from = self.restore_from or answer.record.restore_from
        current = self._ledger.core.lineage.current_epoch
        self.restore_from = parse_restore_request(
            self.restore_from, answer.restore_from, own=self._run, newest=current
        )
        self.fresh.apply_request(answer.fresh_start, self._ledger, at=at)
        for node_rank, place in list(self._ledger.places.items()):
            if place.stays != self.policy.outlives_pod and not place.gone:
                self._ledger.places[node_rank] = replace(place, stays=self.policy.outlives_pod)
            if node_rank not in connected:
                self._check_place(node_rank, place, at=at)

    def _check_place(self, node_rank: int, place: NodeRankState, *, at: float) -> None:
        """Note that the pod of this place is gone, or the node on which its volumes outlived it."""
        pod = self.pods.get(place.pod)
        if place.gone:
            if not place.dropped and place.node in self.answer.lost_nodes:
                self._ledger.pod_gone(place.pod, local_stays=False)
        elif (pod is None and self.answer.complete) or (pod is not None and pod.over):
            before, stays = self.restart_outlook(), self.policy.outlives_pod
            self._ledger.pod_gone(place.pod, local_stays=stays)
            if pod is None or pod.leaving:
                self.on_pod_deleted(node_rank, before, at=at)

    def on_pod_deleted(self, node_rank: int, before: RestartOutlook, *, at: float) -> None:
        """A pod was deleted while others stay: say so if a step was lost with it. `before`: the
        outlook while it was there."""
        after = self.restart_outlook()
        left = after.step if after.restart is RestartAction.GOES_ON else None
        lost = before.step if before.restart is RestartAction.GOES_ON else None
        if lost is None or (left is not None and left >= lost):
            return
        if any(not pod.over for pod in self.pods.values()):
            onward = _LOST[after.restart].format(
                self.way_out if after.restart is RestartAction.WAITS else left and left.step
            )
            message = (
                f"the pod of node rank {node_rank} was deleted before step {lost.step}"
                f" was kept where it outlives the pod; {onward}. Give the policy peers or an"
                " archive, and a flushTimeout that holds what a pod writes and sends"
            )
            self._happened("LastStepLost", message, lost, at=at)

    # --- time ----------------------------------------------------------------------------

    def update_requests(self, *, at: float) -> None:
        """Update the state of each request, and of what a deadline has decided."""
        ledger, history = self._ledger, self._history
        if self.restore_from is not None:
            before = self.restore_from
            held = ledger.core.committed(Tier.LOCAL)
            self.restore_from = resolve_restore_request(before, held, ledger.core.epochs)
            if self.restore_from.epoch != before.epoch:
                epoch, step = self.restore_from.epoch, StepId.parse(self.restore_from.step)
                text = f"epoch {epoch} went on from step {step.step}, as spec.restoreFrom asked"
                self._happened("RolledBack", text, step, at=at)
        self.fresh.acknowledge_fresh_start(ledger, at=at)
        left = self.left_shards
        served = describe_left_shards(left.served_shards, SERVED)
        if served and served != self._served:
            self._happened("LeftShardsServed", served, None, at=at)
        self._served = served
        history.record_lost_commit(left)
        if (drives := self.replaced_drives_text) and drives != history.reported_drives:
            history.reported_drives = drives
            onward = (
                "the next start begins again at step 0; what is left of older steps is kept"
                if self.is_missing_data_lost
                else f"starts wait (onLoss: Wait). To begin again at step 0: {self.way_out}"
            )
            text = f"{drives}: what it held does not come back, and {onward}"
            self._happened("OtherDrive", text, None, at=at)
        history.count_restarts(fleeting=self.is_storage_ephemeral, at=at)

    def note_orphans_for_operator(self) -> None:
        """The operator is to learn of the shards that were left: see `LeftShards.asked`."""
        self._named = tuple(self._ledger.orphans)

    def _happened(self, kind: str, message: str, step_id: StepId | None, *, at: float) -> None:
        step = step_id.step if step_id is not None else None
        self._history.remember(RunEvent(time=format_utc(at), type=kind, message=message, step=step))

    # --- asking --------------------------------------------------------------------------

    @property
    def restore_target(self) -> StepId | None:
        """The step that the next restart must begin from; None: the newest."""
        return restore_target(self.restore_from)

    @property
    def has_terminating_pod(self) -> bool:
        """Whether a pod is being deleted."""
        return any(member.leaving and not member.over for member in self.answer.members)

    @property
    def is_storage_ephemeral(self) -> bool:
        """Whether what a pod keeps goes with the pod, so that the run may begin again."""
        return self.policy.restarts and not self.policy.outlives_pod

    @property
    def is_missing_data_lost(self) -> bool:
        """Whether what no pod can reach cannot come back, so that the run may begin again."""
        return self.policy.restarts and (
            self.is_storage_ephemeral or bool(self._history.list_replaced_drives())
        )

    @property
    def left_shards(self) -> LeftShards:
        answer = self.answer
        return LeftShards(
            left=tuple(self._ledger.orphans),
            agents=answer.agents,
            lost=answer.lost_nodes,
            asked=self._asked,
        )

    def restart_outlook(self) -> RestartOutlook:
        """What a restart would do now, as far as reports show."""
        world = self._ledger.world or 0
        found = restart_outlook(self._ledger.core, world=world, fleeting=self.is_missing_data_lost)
        if found.restart is not RestartAction.GOES_ON and (
            left := self.left_shards.newest_fully_served_step
        ):
            return RestartOutlook(RestartAction.GOES_ON, left)
        return found

    def domains(self) -> dict[int, str]:
        """The domain of each node rank, where the operator says it."""
        return {member.node_rank: member.domain for member in self._staying() if member.domain}

    def list_expected_node_ranks(self) -> set[int]:
        """The node ranks of the pods that are there."""
        return {member.node_rank for member in self._staying()}

    @property
    def replaced_drives_text(self) -> str:
        """See `RunHistory.list_replaced_drives`; as text, '' for none."""
        return few(
            [
                f"volume {drive.volume} of {self.pod_name_of(drive.node_rank)} lies on another file"
                f" system than its steps did ({drive.now}, formerly {drive.was})"
                for drive in self._history.list_replaced_drives()
            ],
            _DRIVES_NAMED,
        )

    def pod_name_of(self, node_rank: int) -> str:
        """The pod of this node rank, for people."""
        place = self._ledger.places.get(node_rank)
        pod = self.pods.get(place.pod) if place is not None else None
        return f"pod {pod.name}" if pod is not None else f"node rank {node_rank}"

    def _staying(self) -> Iterator[MemberPod]:
        return (member for member in self.answer.members if not member.over)
