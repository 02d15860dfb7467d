"""What has happened to a run: its commits, restarts, goodput, drives and alarms. Pure.

Nothing here decides what may be deleted. What no shard tells of is in `record`, which the operator
keeps for the next leader. Times are unix seconds, passed in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from keepstep.core.ledger import Action, Alarm, AlarmKind
from keepstep.core.schedule import is_stand_in, round_up_to_grid
from keepstep.leader.drives import NodeRankDrives, ReplacedDrive, ReplacedDriveDetector
from keepstep.leader.goodput import GoodputSum
from keepstep.leader.left_shards import LeftShards
from keepstep.leader.node_rank_states import ReportingPod
from keepstep.leader.restart_history import RestartHistory, RunRestart
from keepstep.leader.run_ledger import RunLedger
from keepstep.spans import parse_number_set
from keepstep.steps import EpochId, StepId
from keepstep.wire import run_reports as wire
from keepstep.wire.member_reports import Report
from keepstep.wire.run_reports import LeaderRecord, RunEvent, RunPolicy, format_utc

ALARM_S: Final = 3600.0


@dataclass(frozen=True, kw_only=True)
class NewestCommit:
    """The newest commit. `interval_s`: the time since the commit before, without the time in which
    no trainer was there; None if there was none."""

    id: StepId
    at: float
    interval_s: float | None = None


class RunHistory:
    """The history of one run. `commit_lost`: the last commit, if a part of it is gone. `stand_in`:
    a commit to archive although it is not due. `alive_since`: since when there are trainers.
    `resumed`: what an earlier leader counted is known; before, restarts are not counted."""

    def __init__(self, ledger: RunLedger) -> None:
        self.restarts = RestartHistory()
        self.goodput = GoodputSum()
        self.drives = ReplacedDriveDetector()
        self.recent: tuple[RunEvent, ...] = ()
        self.commit: NewestCommit | None = None
        self.commit_lost: StepId | None = None
        self.stand_in: StepId | None = None
        self.alive_since: float | None = None
        self.resumed = False
        self.reported_drives = ""
        self._alarms: dict[str, tuple[float, str]] = {}
        self._durable: tuple[StepId | None, StepId | None] = None, None
        self._ledger = ledger

    def resume(self, record: LeaderRecord) -> None:
        """Go on from what an earlier leader knew, once."""
        if self.resumed:
            return
        self.resumed = True
        counted: EpochId | None = None
        with contextlib.suppress(ValueError):
            counted = EpochId.parse(record.counted)
        self.restarts.resume(
            restarts=record.restarts, lost_steps=record.lost_steps, counted=counted
        )
        self.goodput.resume(record.goodput)
        self.drives.resume(record.drives)
        places = self._ledger.places
        left = (
            (holder.node, node_rank, StepId(counted, holder.step))
            for holder in record.holders
            if counted is not None and holder.step is not None
            for node_rank in parse_number_set(holder.node_ranks)
            if (place := places.get(node_rank)) is None or place.node != holder.node
        )
        self._ledger.orphans.resume(left)

    # --- reports -------------------------------------------------------------------------

    def take_report(
        self,
        sender: ReportingPod,
        report: Report,
        *,
        policy: RunPolicy,
        before: int | None,
        at: float,
    ) -> None:
        """The ledger has taken in this report. `before`: the newest step that all ranks had staged
        then."""
        ledger = self._ledger
        if report.goodput is not None and sender.node_rank == 0:
            self.goodput.set_local_tally(report.goodput)
        self.restarts.take(
            report,
            named={epoch.id for epoch in ledger.places[sender.node_rank].epochs},
            current=ledger.core.lineage.current_epoch,
            recorded={epoch.id: epoch for epoch in ledger.core.epochs},
            before=before,
            at=at,
        )
        self.alive_since = (self.alive_since or at) if ledger.count_live_ranks() else None
        if policy.outlives_pod and report.ready:
            self._compare_drives(sender, report)

    def update_commit_and_alarms(
        self, actions: Iterable[Action], *, policy: RunPolicy, grid: int, at: float
    ) -> None:
        """Note what follows from all that was reported. `grid`: a step is durable at multiples of
        it."""
        ledger = self._ledger
        durable = committed, archived = ledger.find_newest_committed(), ledger.newest_archived()
        if archived is not None and self.stand_in is not None and archived >= self.stand_in:
            self.stand_in = None
        if durable != self._durable and any(ledger.orphans):
            # walks all copies there are
            by = ledger.newest_without_agents(twins=bool(policy.replicas))
            ledger.orphans.forget_older(by)
        self._durable = durable
        self._committed(committed, policy, grid, at)
        self._alarmed(actions, at=at)

    def _committed(self, step_id: StepId | None, policy: RunPolicy, grid: int, at: float) -> None:
        """A lower watermark replaces a commit only when all ranks have reported: otherwise a copy
        may just be out of sight."""
        known = self.commit
        if step_id is None or (
            known is not None and (step_id == known.id or not self._is_news(step_id, known))
        ):
            return
        since = max(known.at, self.alive_since or known.at) if known is not None else None
        if known is not None and self._stands_in(step_id, known.id, policy, grid):
            self.stand_in = step_id
        self.commit_lost = None
        self.commit = NewestCommit(
            id=step_id, at=at, interval_s=None if since is None else at - since
        )

    def _is_news(self, step_id: StepId, known: NewestCommit) -> bool:
        return step_id > known.id or self._ledger.settled

    def _stands_in(self, step_id: StepId, before: StepId, policy: RunPolicy, grid: int) -> bool:
        """See `schedule.is_stand_in`. The grid is the one that the sidecars use."""
        if policy.archive_every is None or step_id.epoch != before.epoch:
            return False
        commits = {
            commit.step for commit in self._ledger.commits() if commit.epoch == step_id.epoch
        }
        every = round_up_to_grid(policy.archive_every, grid)
        return is_stand_in(step_id.step, before=before.step, commits=commits, every=every)

    def record_lost_commit(self, left: LeftShards) -> None:
        """Note that the newest commit is lost: with a pod, and not only out of sight, because a
        member has not reported or an agent serves it."""
        known, ledger = self.commit, self._ledger
        if known is None or ledger.find_newest_committed() is not None or not ledger.settled:
            return
        if not any(shard.step >= known.id for shard in left.reachable_shards):
            self.commit, self.commit_lost = None, known.id

    def _alarmed(self, actions: Iterable[Action], *, at: float) -> None:
        """A fresh start is told as a restart, with its cost."""
        for action in actions:
            if isinstance(action, Alarm) and action.kind is not AlarmKind.FRESH_START:
                reason = "".join(word.capitalize() for word in str(action.kind).split("-"))
                self._alarms.pop(action.text, None)  # to the end: the oldest is forgotten first
                self._alarms[action.text] = at, reason
        while len(self._alarms) > wire.MOST_MESSAGES:
            del self._alarms[next(iter(self._alarms))]

    def list_recent_alarms(self, *, at: float) -> tuple[wire.ReportedAlarm, ...]:
        """Those of the last hour."""
        return tuple(
            wire.ReportedAlarm(kind=kind, text=text)
            for text, (since, kind) in self._alarms.items()
            if at - since < ALARM_S
        )

    # --- drives --------------------------------------------------------------------------

    def _compare_drives(self, sender: ReportingPod, report: Report) -> None:
        """Note on which drives a place's shards lie. Once all ranks can restore a step, nothing
        that a restart needs lies on others."""
        self.drives.take(sender.node_rank, NodeRankDrives.from_report(sender.node, report))
        if (
            sender.node_rank in self.drives.changed
            and self._ledger.find_newest_restorable_step() is not None
        ):
            self.drives.accept_current_drive(sender.node_rank)

    def list_replaced_drives(self) -> list[ReplacedDrive]:
        """Where other file systems lie than those of the run's shards; empty unless what is out of
        reach can have lain on these only."""
        places = self._ledger.places.values()
        if any(self._ledger.orphans) or any(place.gone for place in places):
            return []
        return list(self.drives.replaced_drives())

    # --- what people are told ------------------------------------------------------------

    def remember(self, event: RunEvent) -> None:
        self.recent = (event, *self.recent)[: wire.MOST_RECENT]

    def count_restarts(self, *, fleeting: bool, at: float) -> None:
        """Account for the restarts that all ranks have reported."""
        ledger = self._ledger
        for restart in (
            self.restarts.take_countable_restarts(world=ledger.world, at=at) if self.resumed else ()
        ):
            aside = ledger.core.lineage.fresh == restart.epoch
            if again := aside and fleeting:  # older steps are of no use without what is gone
                ledger.acknowledge_fresh_start(restart.epoch)
            drives, self.reported_drives = self.reported_drives, ""
            self.remember(
                RunEvent(
                    time=format_utc(at),
                    type=_kind(restart),
                    message=_restarted(restart, aside=aside, again=again, drives=drives),
                    step=restart.step,
                    tier=str(restart.tier or ""),
                    seconds=round(restart.seconds, 3),
                    lost_steps=restart.lost_steps,
                )
            )

    def make_leader_record(
        self, holders: tuple[wire.NodeHoldings, ...], *, at: float
    ) -> LeaderRecord:
        """What the next leader is to go on from, without `restore_from`."""
        return LeaderRecord(
            restarts=self.restarts.restarts,
            lost_steps=self.restarts.lost_steps,
            counted=str(self.restarts.counted or ""),
            goodput=self.goodput.get_throttled_total(at=at),
            holders=holders,
            drives=tuple(self.drives.list_drive_records()),
        )


def _kind(restart: RunRestart) -> str:
    if restart.origin:
        return "Forked"
    return "Restored" if restart.parent else "FreshStart"


def _restarted(restart: RunRestart, *, aside: bool, again: bool, drives: str) -> str:
    """Where an epoch of the run began, and what the restart cost. `aside`: older steps still exist.
    `again`: of these, a part is gone for good."""
    count = restart.lost_steps
    lost = f"{count or 'no'} step{'s' if count > 1 else ''} lost"
    if restart.parent:
        where = f" from {restart.tier}" if restart.tier else ""
        seconds = f"{restart.seconds:.1f}" if restart.seconds >= 1 else f"{restart.seconds:.2f}"
        if restart.origin:
            return f"began from step {restart.step} of run {restart.origin}{where} in {seconds} s"
        return f"restored step {restart.step}{where} in {seconds} s; {lost}"
    if again:
        return (
            f"began again at step 0 ({lost}): a part of every step went with the pod that held it."
            " With peers or an archive in the policy, or hostPath volumes, it would not; with"
            " onLoss: Wait, the run would wait for a person"
        )
    if aside:
        why = f": {drives}" if drives else ""
        return f"began at step 0 although older steps exist ({lost}){why}"
    return (
        f"began at step 0: nothing older was left to restore ({lost}); volumes of kind emptyDir"
        " and ephemeral go with their pod, a hostPath stays on its node"
    )
