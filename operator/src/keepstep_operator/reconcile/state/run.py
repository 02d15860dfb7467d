"""One run: its pods, its ledger and its history. Events in, actions out; time is passed in.

After a restart of the reconciler, everything but a few counters is rebuilt from pods and reports.
The counters (`restarts`, `lostSteps`, `goodput`, `recent`, the time of the last commit) are read
from the CheckpointRun's status.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from keepstep.core import ledger
from keepstep.core.ledger import AlarmKind, Outlook, Restart, is_among, outlook
from keepstep.core.retention import Retention
from keepstep.core.schedule import on_grid, stands_in
from keepstep.core.suspicion import Failure, newest
from keepstep.leader.node_rank import Sender
from keepstep.leader.orphaned_shards import OrphanedShard
from keepstep.leader.run_ledger import LARGEST_WORLD, MOST_RANKS, RunLedger
from keepstep.steps import EpochId, StepId, Tier
from keepstep.wire.reports import Report
from keepstep_operator import names
from keepstep_operator.api.job_kinds import kind_of
from keepstep_operator.api.model import (
    AgentRecord,
    Job,
    JobState,
    NodeRecord,
    PodRecord,
    PolicyRecord,
    RunKey,
    RunObject,
)
from keepstep_operator.api.policy import OnLoss, Policy, VolumeKind
from keepstep_operator.api.run import MOST_RECENT, RecentStatus, RunStatus, cut, utc
from keepstep_operator.reconcile.state import left_shards, messages
from keepstep_operator.reconcile.state.actions import (
    Action,
    AskJob,
    DeleteRun,
    EmitEvent,
    FindOwner,
    NameFreshStart,
    NoteCommit,
    WriteStatus,
)
from keepstep_operator.reconcile.state.drives import Drives, PlaceDrives
from keepstep_operator.reconcile.state.durability import volumes_outlive_pod
from keepstep_operator.reconcile.state.goodput import RunGoodput
from keepstep_operator.reconcile.state.health import LIBRARY_S, Health, look
from keepstep_operator.reconcile.state.peer_assignment import PeerAssignment
from keepstep_operator.reconcile.state.previous_status import (
    FINISHED,
    Commit,
    PreviousStatus,
    parse_epoch,
    parse_steps,
    read_previous,
)
from keepstep_operator.reconcile.state.reply import AdviceCache, Reply, may_be_old_s
from keepstep_operator.reconcile.state.restart_history import RestartHistory
from keepstep_operator.reconcile.state.restore_request import RestoreRequest

FRESH_START_S = 120.0
"""How long an acknowledgement of "newest" waits for the reports that show which epoch it means."""
ASK_JOB_S = 30.0
ASK_RIVALLED_JOB_S = 5.0
"""The same while pods of another job wait for the run."""
COMMITTED_EVENT_S = 300.0
NOTE_COMMIT_S = 60.0
ALARM_S = 3600.0
MOST_ALARMS = 64
"""An alarm is remembered for `ALARM_S`, and at most the newest `MOST_ALARMS` are: one report of a
pod can cause thousands."""
NOT_INJECTED_S = 1800.0
"""Time between two warnings about pods without a sidecar. They are repeated because an API server
keeps an Event for an hour only, while such a run may fail for days."""
RESUME_S = 45.0
UNKNOWN_JOB_S = 30 * 24 * 3600.0
"""A run without pods counts as finished after this time if the state of its job is unknown."""


class Run:
    """The state of one run. Methods that are named after events return what the shell has to do.

    `nodes`: the cluster's nodes by name; empty if nodes are not watched. `agents`: those of nodes,
    by the node's name.
    """

    def __init__(
        self,
        key: RunKey,
        *,
        nodes: Mapping[str, NodeRecord] = MappingProxyType({}),
        agents: Mapping[str, AgentRecord] = MappingProxyType({}),
    ) -> None:
        self.key = key
        self.nodes = nodes
        self.agents = agents
        self.ledger = RunLedger()
        self.drives = Drives()
        self._other_drives = ""
        """The drives that were last found to be other ones, until the run is back."""
        self.peer_assignment = PeerAssignment(self, nodes)
        self.restore_request = RestoreRequest()
        self._adviser = AdviceCache(self.ledger)
        self.pods: dict[str, PodRecord] = {}
        self.rivals: dict[str, PodRecord] = {}
        """Pods of another job with this run's label, by uid. They are no members while a job has
        the run: their steps would mix with its own, and stop its commits."""
        self.pods_moved = 0
        """Grows when the pods that stay, or their node ranks or nodes, may have changed."""
        self._leaving: set[str] = set()
        self.job: Job | None = None
        self._job_of_pods: Job | None = None
        self._ownerless: Job | None = None
        """The pods' job, while it is not known which job owns it."""
        self._owner_asked_at = 0.0
        self.policy: Policy | None = None
        self.policy_now: PolicyRecord | None = None
        self.object: RunObject | None = None
        self.restores = RestartHistory()
        self.goodput = RunGoodput()
        self.failures: tuple[Failure, ...] = ()
        """The script's own failures that pods reported since this process started."""
        self._stand_in: StepId | None = None
        """A commit to archive although it is not due; None again once it is archived."""
        self.recent: list[RecentStatus] = []
        self.commit: Commit | None = None
        self.commit_lost: StepId | None = None
        self.finished_at: float | None = None
        self.health = Health()
        self._looked_at = 0.0
        self.written = RunStatus()
        self.past: PreviousStatus | None = None
        self.earlier: RunKey | None = None
        """Another run of a job of the same name. It holds steps that this run will not find."""
        self.volumes: tuple[VolumeKind, ...] = ()
        self.labelled = False
        self._resumed_at: float | None = None
        self._past_step: int | None = None
        self._durable: tuple[StepId | None, StepId | None] = None, None
        self.alive_since: float | None = None
        self.training_since: dict[str, float] = {}
        self._alarms: dict[str, float] = {}
        self._asked_at = 0.0
        self._uninjected_told_at = 0.0
        self._noted_at = 0.0
        self._idle_since: float | None = None
        self._fresh_start_until: float | None = None
        self._begin_again_after: int | None = None
        """The newest epoch's number when a person asked to begin again; None: nobody did."""
        self._began_again: EpochId | None = None
        """The epoch that then began at step 0, as long as it has no step that all ranks hold."""

    # --- pods ----------------------------------------------------------------------------

    def pod_seen(self, pod: PodRecord, *, at: float) -> list[Action]:
        """A pod exists or has changed."""
        before = self.pods.get(pod.uid)
        if before == pod:
            return []
        if before is None and (rivalled := self._rivalled(pod)):
            if rivalled is pod:
                return self._keep_out(pod, at)
            return self._displace(rivalled, pod, at)
        self.pods[pod.uid] = pod
        self.pods_moved += _spot(before) != _spot(pod)
        if pod.deleting and not pod.over:
            self._leaving.add(pod.uid)
        looked_up = list(self._belongs(pod.job))
        if pod.injected:
            self.volumes, self.labelled = pod.volumes, pod.labelled
        self._adopt()
        if not pod.over:
            self.finished_at = None
        if not pod.training:
            self.training_since.pop(pod.uid, None)
        elif before is None or before.restarts != pod.restarts or not before.training:
            self.training_since[pod.uid] = at
        said = self._ended(pod, at) if pod.over else []
        soon = before is not None or bool(pod.trouble)  # not for all pods at each start
        told = (*said, *self._not_injected(pod), *self._ask_rivalled(at))
        return [WriteStatus(self.key, soon=soon), *looked_up, *told]

    def pod_gone(self, uid: str, *, at: float) -> list[Action]:
        """The pod's object was deleted."""
        if self.rivals.pop(uid, None) is not None:
            return [WriteStatus(self.key)]
        pod = self.pods.pop(uid, None)
        if pod is None:
            return []
        self.pods_moved += 1
        self.training_since.pop(uid, None)
        return [WriteStatus(self.key), *self._ended(pod, at), *self._ask_rivalled(at)]

    # --- two jobs with one label -----------------------------------------------------------

    def _rivalled(self, pod: PodRecord) -> PodRecord | None:
        """Of a new pod and a member of another job that has its place: the one that is no member.
        None if there is no such member.

        The job that is on record keeps the run, else the one with the older pod: a reconciler that
        starts sees them in any order.
        """
        if not pod.labelled or pod.job is None or pod.over or pod.deleting:
            return None
        if any(one.job == pod.job for one in self.rivals.values()):
            return pod
        place = pod.node_rank
        others = (one for one in self.pods.values() if one.stays and one.job != pod.job)
        member = next((one for one in others if one.node_rank == place), None)
        if member is None or member.job is None:
            return None
        on_record = self.past.job if self.past else None
        if on_record in (pod.job, member.job):
            return pod if on_record == member.job else member
        return member if (pod.created_at, pod.uid) < (member.created_at, member.uid) else pod

    def _set_apart(self, pods: Iterable[PodRecord]) -> list[Action]:
        """These pods, all of one job, are no members of this run."""
        said: list[Action] = [WriteStatus(self.key)]
        for pod in pods:
            if all(one.job != pod.job for one in self.rivals.values()):
                message = messages.rival(pod, self.job, self.key)
                event = self._event("RunTaken", message, warning=True, topic=str(pod.job))
                said.append(replace(event, about=pod.job))
            self.rivals[pod.uid] = pod
        return said

    def _keep_out(self, pod: PodRecord, at: float) -> list[Action]:
        """A new pod of a job that is none of this run: its other pods are no members, either."""
        moved = [one for one in self.pods.values() if one.job == pod.job]
        said = self._forget(moved, at)
        if moved:  # their job was taken for the run's
            said += self._belongs(next(one.job for one in self.pods.values() if one.stays))
        return [*said, *self._set_apart([*moved, pod])]

    def _displace(self, member: PodRecord, pod: PodRecord, at: float) -> list[Action]:
        """The pods of a job that came later were seen before this pod."""
        moved = [one for one in self.pods.values() if one.job == member.job]
        forgotten = self._forget(moved, at)
        return [*forgotten, *self.pod_seen(pod, at=at), *self._set_apart(moved)]

    def _forget(self, pods: Iterable[PodRecord], at: float) -> list[Action]:
        """Remove these members, with all that they reported."""
        said: list[Action] = []
        for pod in pods:
            said += self.pod_gone(pod.uid, at=at)
            said += self._alarmed(self.ledger.pod_gone(pod.uid, local_stays=False), at=at)
        return said

    def _ask_rivalled(self, at: float) -> Iterator[Action]:
        """While another job waits for the run, and no member stays: ask whether the run's job is
        still there. Its pods may only be made again."""
        due = at - self._asked_at >= ASK_RIVALLED_JOB_S
        if self.rivals and self.job is not None and due and not self._has_members:
            self._asked_at = at
            yield AskJob(self.key, self.job)

    @property
    def _has_members(self) -> bool:
        return any(pod.stays for pod in self.pods.values())

    def _let_in(self, at: float) -> list[Action]:
        """The run's job is over or gone, so the job that waited goes on with the run."""
        waiting, self.rivals = sorted(self.rivals.values(), key=lambda one: one.created_at), {}
        self.past = None if self.past is None else replace(self.past, job=None)
        return [action for pod in waiting for action in self.pod_seen(pod, at=at)]

    def refusal(self, uid: str) -> str:
        """Why this pod is no member of the run although it has its label; '' if it may be one."""
        pod = self.rivals.get(uid)
        return messages.rival(pod, self.job, self.key) if pod is not None else ""

    def _ended(self, pod: PodRecord, at: float) -> list[Action]:
        """The pod's containers will not run again: its memory is lost, and its volumes with it
        unless they outlive the pod."""
        known = self.outlook() if pod.uid in self._leaving else None
        before = known.step if known and known.restart is Restart.GOES_ON else None
        said = self.ledger.pod_gone(pod.uid, local_stays=volumes_outlive_pod(pod.volumes))
        self._know_alive(at)
        left = self._left(pod, before) if pod.uid in self._leaving else ()
        self._leaving.discard(pod.uid)
        return [*self._alarmed(said, at=at), *left]

    def _left(self, pod: PodRecord, before: StepId | None) -> Iterator[Action]:
        """A pod was deleted while other pods of the run stay. If a step was lost with it, report
        that now, and do not only count it when the run is back.

        `before`: the newest step that could be restored while the pod existed.
        """
        after = self.outlook()
        left = after.step if after.restart is Restart.GOES_ON else None
        gone = before is not None and (left is None or left < before)
        if before is not None and gone and any(one.stays for one in self.pods.values()):
            message = messages.last_step_lost(pod, before, after, self.key)
            yield self._event("LastStepLost", message, warning=True, topic=pod.uid)

    def _not_injected(self, pod: PodRecord) -> Iterator[Action]:
        if not pod.injected and not pod.over:
            yield self._event(
                "NotInjected",
                messages.not_injected(pod),
                warning=True,
                topic=pod.uid,
                period_s=NOT_INJECTED_S / 2,
            )

    def _still_not_injected(self, at: float) -> Iterator[Action]:
        if at - self._uninjected_told_at >= NOT_INJECTED_S:
            self._uninjected_told_at = at
            for pod in self.pods.values():
                yield from self._not_injected(pod)

    # --- objects -------------------------------------------------------------------------

    def policy_seen(self, policy: PolicyRecord | None) -> list[Action]:
        """The present state of the policy that the pods name; None: it does not exist (any
        more)."""
        self.policy_now = policy
        self._adopt()
        return [WriteStatus(self.key)]

    def _adopt(self) -> None:
        """A change of the policy holds for pods that are created after it. So the run goes by the
        policy that its newest pod was created with, even if that policy was deleted meanwhile."""
        now, held = self.policy_now.policy if self.policy_now else None, self.policy
        if now is None:
            return
        if held is None or held.name != now.name or self._made_with(now.name) >= now.generation:
            self.policy = now
            self._configure()

    def _made_with(self, policy: str) -> int:
        """The newest generation of this policy that a pod was created with; 0 if no pod names
        it."""
        pods = (pod for pod in self.pods.values() if pod.policy == policy)
        return max((pod.policy_generation for pod in pods), default=0)

    def _resume_policy(self, written: Policy | None) -> None:
        """Go on with the policy that an earlier reconciler wrote down, unless a pod was created
        with a newer one: pods that join get the newer one."""
        if written is not None and self._made_with(written.name) <= written.generation:
            self.policy = written
        self._adopt()

    def object_seen(self, object: RunObject, *, at: float) -> list[Action]:
        """The CheckpointRun exists or has changed. Its record of the past is taken over if nothing
        else is known of the run."""
        before, self.object = self.object, replace(object, status={}, policy=None)
        if before is None and not self.recent and not self.ledger.places:
            self._resume_policy(object.policy)
            self._resume(read_previous(object.status), at)
        self._request_restore()
        self._configure()
        if object.fresh_start and (before is None or before.fresh_start != object.fresh_start):
            self._fresh_start_until = at + FRESH_START_S
            self._begin_again_after = None
            if object.fresh_start == names.FRESH_START_ALLOW:
                current = self.ledger.core.lineage.current
                self._begin_again_after = current.number if current else 0
        changed = before is None or before.generation != object.generation
        write = [WriteStatus(self.key, soon=before is not None)] if changed else []
        return [*self._acknowledge(at=at), *write]

    def object_gone(self) -> list[Action]:
        """The CheckpointRun was deleted. It is created again as long as the run has pods."""
        self.object = None
        self.written = RunStatus()
        return [WriteStatus(self.key)] if self.pods else []

    def _resume(self, past: PreviousStatus, at: float) -> None:
        self.past, self.written = past, past.status
        self.restore_request.resume(past.status.restore_from)
        self._resumed_at = at if past.status.phase != "Waiting" else None
        self.restores.resume(restarts=past.restarts, lost_steps=past.lost_steps, counted=past.epoch)
        self.goodput.resume(past.status.goodput)
        self.recent = past.recent
        self._past_step = past.step
        self.commit = past.commit
        commit = past.commit.id if past.commit else None
        self.drives.resume(past.status.drives)
        self.ledger.orphans.resume(
            left_shards.written(past.status.holders, commit=commit, epoch=past.epoch)
        )
        self.job = self.job or past.job
        self.finished_at = past.finished_at if self.idle else None

    def _configure(self) -> None:
        keep = self.policy.keep if self.policy else Retention()
        beyond = self.policy.tiers if self.policy else ()
        self._adviser.forget()
        self.ledger.configure(keep=keep, pins=self.pins, beyond=beyond)

    @property
    def pins(self) -> tuple[StepId, ...]:
        """Steps that stay: the pinned ones, and the step that `spec.restoreFrom` asks for."""
        pinned = tuple(parse_steps(self.object.pins)) if self.object else ()
        wanted = self.restore_request.wanted
        return pinned if wanted is None or wanted in pinned else (*pinned, wanted)

    def _request_restore(self) -> list[Action]:
        """Pass on `spec.restoreFrom` of the object, and match it with the known steps and
        epochs."""
        asked, before = (
            self.object.restore_from if self.object else "",
            self.restore_request.status(),
        )
        self.restore_request.ask(asked, own=self.key.name, newest=self.ledger.core.lineage.current)
        done = self.restore_request.look(
            self.ledger.core.committed(Tier.LOCAL), self.ledger.core.epochs
        )
        if self.restore_request.status() == before:
            return []
        self._configure()
        said = (
            [self._event("RolledBack", messages.rolled_back(self.restore_request))] if done else []
        )
        return [WriteStatus(self.key), *said]

    @property
    def generation(self) -> int:
        return self.object.generation if self.object else 0

    # --- reports -------------------------------------------------------------------------

    def reported(self, pod: PodRecord, report: Report, *, at: float) -> list[Action]:
        """Take in a sidecar's report. A report that comes too late changes nothing."""
        before = self.ledger.progress.step if self.ledger.progress else self._past_step
        place, settled = self.ledger.places.get(pod.node_rank), self.ledger.settled
        left = set(self.ledger.orphans)
        sender = Sender(
            pod=pod.uid,
            node_rank=pod.node_rank,
            node=pod.node,
            created_at=pod.created_at,
            local_stays=volumes_outlive_pod(pod.volumes),
        )
        most_world = min(LARGEST_WORLD, MOST_RANKS * max(1, len(self.pods)))
        said = self.ledger.take(sender, report, at=at, most_world=most_world)
        if said is None:
            return []
        if place is None and self._resumed_at is not None:
            self._resumed_at = at  # in a large cluster the first reports arrive over minutes
        if self.ledger.settled and not settled:
            self._adviser.forget()  # this was the last missing pod
        if report.goodput is not None and pod.node_rank == 0:
            self.goodput.take(report.goodput, at=at)
        if report.failures:
            self.failures = newest((*self.failures, *report.failures))
        durable = _, archived = self.ledger.committed(), self.ledger.newest_archived()
        if archived is not None and self._stand_in is not None and archived >= self._stand_in:
            self._stand_in = None
        if durable != self._durable and any(self.ledger.orphans):
            self.ledger.orphans.superseded(self.ledger.unaided())  # walks all copies there are
        lacked, self._durable = [one is None for one in self._durable], durable
        now = self.ledger.places[pod.node_rank]
        troubled = place is None or place.sidecar.troubles != now.sidecar.troubles
        soon = troubled or lacked != [one is None for one in durable]
        self.restores.take(
            report,
            named={epoch.id for epoch in now.epochs},
            current=self.ledger.core.lineage.current,
            recorded={epoch.id: epoch for epoch in self.ledger.core.epochs},
            before=before,
            at=at,
        )
        self._know_alive(at)
        over = self._ended(pod, at) if pod.over else []
        return [
            WriteStatus(self.key, soon=soon),
            *over,
            *(self._request_restore() if self.restore_request.asked else ()),
            *self._committed(at),
            *self._alarmed(said, at=at),
            *self._warned(pod, report),
            *self._refused(pod, report),
            *self._compare_drives(pod, report),
            *self._newly_served(left),
            *self._acknowledge(at=at),
            *self._restarted(at),
            *(self._changed_outlook(self._look(at), at) if troubled and self._may_look(at) else ()),
        ]

    def _newly_served(self, before: Collection[OrphanedShard]) -> Iterator[Action]:
        """Report that agents serve shards of a pod that is on another node now."""
        if any(one not in before for one in self.ledger.orphans) and (
            message := left_shards.served(self)
        ):
            yield self._event("LeftShardsServed", message, topic=message)

    def _warned(self, pod: PodRecord, report: Report) -> Iterator[Action]:
        """Report each kind of warning once an hour. Warnings that differ only in numbers and step
        ids are of one kind."""
        for text in report.warnings:
            kind = re.sub(r"[0-9a-f.-]*\d[0-9a-f.-]*", "#", text)
            message = f"{pod.name}: {cut(text)}"
            yield self._event(
                "SidecarWarning", message, warning=True, topic=f"{pod.uid} {kind}", period_s=ALARM_S
            )

    def _refused(self, pod: PodRecord, report: Report) -> Iterator[Action]:
        """Report that the ranks' vote refused to go on."""
        if report.refusals:
            message = cut(messages.restore_refused(report.refusals, report.refused))
            yield self._event("RestoreRefused", message, warning=True)

    def _compare_drives(self, pod: PodRecord, report: Report) -> Iterator[Action]:
        """Note on which drives a pod's shards lie, and report drives that are other ones."""
        if VolumeKind.HOST_PATH not in pod.volumes or not report.ready:
            return
        self.drives.take(pod.node_rank, PlaceDrives.of(pod.node, report))
        if pod.node_rank in self.drives.changed and self.ledger.restorable() is not None:
            self.drives.hold(pod.node_rank)
        said = self.other_drives()
        if said and said != self._other_drives:
            self._other_drives = said
            message = messages.other_drive(said, self.key, waits=not self.gone_for_good)
            yield self._event("OtherDrive", cut(message), warning=True, topic=said)

    # --- what a restart does -------------------------------------------------------------

    @property
    def fleeting(self) -> bool:
        """Whether what a pod keeps goes with the pod, so that the run may begin again."""
        return (
            self.policy is not None
            and self.policy.begins_again
            and VolumeKind.HOST_PATH not in self.volumes
        )

    def other_drives(self) -> str:
        """Where other file systems lie than those of the run's shards, as text; '' unless what no
        pod can reach can have lain on these only."""
        found = self.drives.others()
        places = self.ledger.places
        if not found or any(self.ledger.orphans) or any(one.gone for one in places.values()):
            return ""
        pods = {one.node_rank: one.name for one in self.pods.values() if one.stays}
        return messages.other_drives(found, pods)

    @property
    def gone_for_good(self) -> bool:
        """Whether what no pod can reach cannot come back, so that the run may begin again."""
        restarts = self.policy is not None and self.policy.on_loss is OnLoss.RESTART
        return self.fleeting or (restarts and bool(self.other_drives()))

    def refusals(self) -> tuple[int, str]:
        """How often the ranks' vote refused since the last restore, and why, in its own words."""
        there = (one.sidecar for one in self.ledger.places.there())
        return max(((one.refusals, one.refused) for one in there), default=(0, ""))

    def outlook(self) -> Outlook:
        """What a restart would do now, as far as reports show."""
        world = self.ledger.world or 0
        found = outlook(self.ledger.core, world=world, fleeting=self.gone_for_good)
        if found.restart is not Restart.GOES_ON and (left := left_shards.restart_step(self)):
            return Outlook(Restart.GOES_ON, left)
        return found

    def begins_again(self) -> bool:
        """Whether a person asked to begin at step 0 if no step can be restored: until an epoch
        begins and, if it began at step 0, until that has a commit."""
        return self._begin_again_after is not None or self._began_again is not None

    def _know_alive(self, at: float) -> None:
        self.alive_since = (self.alive_since or at) if self.ledger.alive() else None

    def reply(self, pod: PodRecord, *, holds: str = "", least_gap_s: float, at: float) -> Reply:
        """What to tell the sidecar of this pod. `holds`: the version of the list of peers that it
        has. Without a known policy, no step is ever retired."""
        version, peers = self.peer_assignment.told(pod.node_rank, holds=holds, at=at)
        advice = self._adviser.advise(at=at)
        held = sorted(self.ledger.local(pod.node_rank))
        paused = self.object is not None and self.object.paused
        may_go = self.policy is not None and not paused
        return Reply(
            least_gap_s=least_gap_s,
            committed=advice.committed,
            commits=tuple(id for id in held if is_among(id, advice.commits)),
            plan=None if paused else self.restore_request.wanted or advice.plan,
            retire=tuple(id for id in held if may_go and is_among(id, advice.expendable)),
            pinned=self.pins,
            peers=peers,
            peers_version=version,
            agents=left_shards.agents(self, pod.node_rank),
            awaits=left_shards.awaits(self, pod.node_rank),
            all_peers=self.ledger.settled,
            leaving=bool(self._leaving),
            restore_from=self.restore_request.tell(pod.uid),
            changes_since=self.ledger.follows(pod.node_rank, pod.uid),
            archive=self._stand_in,
            failures=self.failures,
            begin_again=self.begins_again(),
            gone_for_good=self.gone_for_good,
        )

    def _committed(self, at: float) -> Iterator[Action]:
        id, known = self.ledger.committed(), self.commit
        if id is None:
            # lost with a pod, or only out of sight: a pod has not reported, or an agent serves it
            left = [one.step for one in left_shards.reachable(self)]
            if (
                known is not None
                and self.ledger.settled
                and not any(one >= known.id for one in left)
            ):
                self.commit, self.commit_lost = None, known.id
            return
        if known is not None and (id == known.id or not self._is_news(id, known)):
            return
        since = max(known.at, self.alive_since or known.at) if known is not None else None
        if known is not None and self._stands_in(id, known.id):
            self._stand_in = id
        self.commit_lost = None
        self.commit = Commit(id=id, at=at, interval_s=None if since is None else at - since)
        queued = any(pod.queued for pod in self.pods.values())
        if queued and self.object is not None and at - self._noted_at >= NOTE_COMMIT_S:
            self._noted_at = at
            yield NoteCommit(self.key, at)
        yield self._event(
            "Committed",
            f"step {id.step} is durable on all {self.ledger.world or 0} ranks",
            period_s=COMMITTED_EVENT_S,
        )

    def _stands_in(self, id: StepId, before: StepId) -> bool:
        """See `schedule.stands_in`. The grid is the one that the sidecars use
        (`ArchiveConfig.base`)."""
        policy = self.policy
        if policy is None or policy.archive is None or id.epoch != before.epoch:
            return False
        every = on_grid(policy.archive.every, policy.persist_every or policy.stage_every)
        commits = {one.step for one in self.ledger.commits() if one.epoch == id.epoch}
        return stands_in(id.step, before=before.step, commits=commits, every=every)

    def _is_news(self, id: StepId, known: Commit) -> bool:
        """Whether the watermark replaces the known commit. A lower one does only when all ranks
        have reported: otherwise a copy may just be out of sight."""
        return id > known.id or self.ledger.settled

    def _alarmed(self, said: Iterable[ledger.Action], *, at: float) -> Iterator[Action]:
        for one in said:
            if not isinstance(one, ledger.Alarm) or one.kind is AlarmKind.FRESH_START:
                continue  # a fresh start is reported as a restart, with its cost
            self._remember_alarm(cut(one.text), at)
            reason = "".join(word.capitalize() for word in str(one.kind).split("-"))
            yield self._event(reason, cut(one.text), warning=True, topic=one.text)

    def _remember_alarm(self, text: str, at: float) -> None:
        self._alarms.pop(text, None)  # to the end: the oldest is forgotten first
        self._alarms[text] = at
        while len(self._alarms) > MOST_ALARMS:
            del self._alarms[next(iter(self._alarms))]

    # --- restarts ------------------------------------------------------------------------

    def _restarted(self, at: float) -> Iterator[Action]:
        for restart in self.restores.due(world=self.ledger.world, at=at):
            reason = "Restored" if restart.parent else "FreshStart"
            reason = "Forked" if restart.origin else reason
            aside = self.ledger.core.lineage.fresh == restart.epoch
            again = aside and self.fleeting
            if again:  # what is left of older steps is of no use without what is gone
                yield from self._alarmed(self.ledger.acknowledge(restart.epoch), at=at)
            message = cut(
                messages.restarted(
                    restart,
                    self.key,
                    kept_aside=aside,
                    again=again,
                    other_drives=self._other_drives,
                )
            )
            self._other_drives = ""
            self._remember(
                RecentStatus(
                    time=utc(at),
                    type=reason,
                    step=restart.step,
                    tier=str(restart.tier or ""),
                    seconds=round(restart.seconds, 3),
                    lost_steps=restart.lost_steps,
                    message=message,
                )
            )
            yield WriteStatus(self.key)
            yield self._event(
                reason, message, warning=not restart.parent, topic=str(restart.epoch), period_s=0.0
            )

    def _remember(self, one: RecentStatus) -> None:
        self.recent = [one, *self.recent][:MOST_RECENT]

    def _acknowledge(self, *, at: float) -> Iterator[Action]:
        """Acknowledge the fresh start that the annotation names: an epoch, or "newest". For
        "newest", a fresh start is looked for only a while, so that it never acknowledges a later
        one."""
        if self._began_again is not None and self.ledger.restorable() is not None:
            self._began_again = None
        after = self._began_again.number if self._began_again else self._begin_again_after
        if after is not None:
            yield from self._began(after, at=at)
            return
        if self._fresh_start_until is None or self.object is None:
            return
        named = parse_epoch(self.object.fresh_start)
        epoch = named or self.ledger.core.lineage.fresh
        if epoch is not None:
            self._fresh_start_until = None
            yield from self._alarmed(self.ledger.acknowledge(epoch), at=at)
            yield WriteStatus(self.key)
            if named is None:
                yield NameFreshStart(self.key, epoch)
        elif at > self._fresh_start_until:
            self._fresh_start_until = None

    def _began(self, after: int, *, at: float) -> Iterator[Action]:
        """Note that an epoch began after a person asked to begin again: that was for one start."""
        current, fresh = self.ledger.core.lineage.current, self.ledger.core.lineage.fresh
        if current is None or current.number <= after:
            return
        self._begin_again_after = self._began_again = self._fresh_start_until = None
        if fresh is not None and fresh.number > after:
            self._began_again = fresh
            yield from self._alarmed(self.ledger.acknowledge(fresh), at=at)
        yield WriteStatus(self.key)
        yield NameFreshStart(self.key, current)

    # --- the job's end -------------------------------------------------------------------

    def _belongs(self, job: Job | None) -> Iterator[Action]:
        """Note the pods' job, and ask for its owner if jobs of its kind can have one: people look
        at the owner. Until the answer, a known job of the same name is kept."""
        if job is None or job == self._job_of_pods:
            return
        self._job_of_pods, self._ownerless = job, None
        kind = kind_of(job.api_version, job.kind)
        if kind is None or kind.owner is None:
            self.job = job
            return
        if self.job is None or self.job.name != job.name:
            self.job = job
        self._ownerless = job
        yield FindOwner(self.key, job)

    def _still_ownerless(self, at: float) -> Iterator[Action]:
        """Ask for the owner again, because the API server may not have answered."""
        if self._ownerless is not None and at - self._owner_asked_at >= ASK_JOB_S:
            if self._owner_asked_at:
                yield FindOwner(self.key, self._ownerless)
            self._owner_asked_at = at

    def owner_found(self, job: Job, owner: Job | None) -> list[Action]:
        """The owner of the pods' job; None: it has none."""
        if job == self._ownerless:
            self._ownerless = None
        if job != self._job_of_pods or self.job == (owner or job):
            return []
        self.job = owner or job
        return [WriteStatus(self.key)]

    def job_answered(self, state: JobState, *, at: float) -> list[Action]:
        """The state of the root job."""
        if self.rivals and state is not JobState.ACTIVE and not self._has_members:
            return self._let_in(at)
        if state is JobState.ACTIVE or self.finished_at is not None or not self.idle:
            return []
        if state is not JobState.UNKNOWN:
            return self._finish(at, str(state))
        if self._idle_since is None or at - self._idle_since < UNKNOWN_JOB_S:
            return []
        return self._finish(at, f"without pods for {UNKNOWN_JOB_S / 86400:.0f} days")

    @property
    def idle(self) -> bool:
        """Whether no pod of the run will go on."""
        return all(pod.over for pod in self.pods.values())

    def _finish(self, at: float, how: str) -> list[Action]:
        self.finished_at = at
        step = self.commit.id.step if self.commit else None
        kept = f"; step {step} is committed" if step is not None else ""
        message = f"the job is {how}{kept}"
        self._remember(RecentStatus(time=utc(at), type=FINISHED, step=step, message=message))
        return [WriteStatus(self.key)]

    def _look_after(self, at: float) -> Iterator[Action]:
        """Find out whether the job is over; delete the run once it has been so for `ttl_s`."""
        if not self.idle:
            self._idle_since = None
            return
        self._idle_since = at if self._idle_since is None else self._idle_since
        if self.finished_at is None:
            phases = [pod.phase for pod in self.pods.values()]
            if phases and all(phase == "Succeeded" for phase in phases):
                yield from self._finish(at, "finished")
            elif self.job is not None and at - self._asked_at >= ASK_JOB_S:
                self._asked_at = at
                yield AskJob(self.key, self.job)
        elif not self.pods and at - self.finished_at >= self.ttl_s:
            yield DeleteRun(self.key)

    @property
    def ttl_s(self) -> float:
        return self.policy.run_ttl_s if self.policy else 7 * 24 * 3600.0

    # --- time ----------------------------------------------------------------------------

    def tick(self, *, at: float) -> list[Action]:
        """Called every few seconds: what becomes true by waiting."""
        self.peer_assignment.look_again()
        actions: list[Action] = [*self._restarted(at), *self._acknowledge(at=at)]
        if self._resumed_at is not None and not self.resumes(at=at):
            self._resumed_at = None
            actions.append(WriteStatus(self.key))
        if self.goodput.show(at=at):
            actions.append(WriteStatus(self.key))
        before = self._look(at)
        if self.health != before:
            actions += [WriteStatus(self.key), *self._changed_outlook(before, at)]
        self._alarms = {text: said for text, said in self._alarms.items() if at - said < ALARM_S}
        later = (
            *self._still_not_injected(at),
            *self._still_ownerless(at),
            *self._ask_rivalled(at),
        )
        return [*actions, *later, *self._look_after(at)]

    def _look(self, at: float) -> Health:
        """Renew `health`. Returns the former one."""
        before, self.health, self._looked_at = self.health, look(self, at=at), at
        return before

    def _may_look(self, at: float) -> bool:
        """Whether to look now or leave it to the next tick: in a large run, not with each pod's
        first report."""
        return not 0 <= at - self._looked_at < may_be_old_s(self.ledger.world)

    def _changed_outlook(self, before: Health, at: float) -> Iterator[Action]:
        if self.health.stalled and not before.stalled:
            step = self.commit.id.step if self.commit else None
            message = self.health.stalled
            self._remember(
                RecentStatus(time=utc(at), type="CommitStalled", step=step, message=message)
            )
            yield self._event("CommitStalled", message, warning=True)
        for node in sorted(self.health.draining - before.draining):
            message = messages.draining(node, self.commit.id.step if self.commit else None)
            yield self._event("NodeDraining", message, warning=True, topic=node)
        for name in sorted(self.health.without_library - before.without_library):
            message = messages.without_library(name, after_s=LIBRARY_S)
            yield self._event("LibraryMissing", message, warning=True, topic=name)

    def note_status(self, status: RunStatus) -> None:
        """This status is now written. Its conditions keep the times of their last change."""
        self.written = status

    # --- asking --------------------------------------------------------------------------

    @property
    def step(self) -> int | None:
        """The newest step that is known to be staged by all ranks; None: unknown."""
        return self.ledger.progress.step if self.ledger.progress else self._past_step

    @property
    def behind(self) -> int | None:
        """How many steps the newest step staged by all ranks is ahead of the newest commit."""
        if self.step is None:
            return None
        return max(0, self.step - (self.commit.id.step if self.commit else 0))

    def resumes(self, *, at: float) -> bool:
        """Whether the status of an earlier reconciler is still better than what this one knows.
        Sidecars report within half a minute of each other; until then only our knowledge changes,
        not the run."""
        since = self._resumed_at
        return since is not None and at - since < RESUME_S and not self.ledger.settled

    @property
    def alarms(self) -> tuple[str, ...]:
        return tuple(self._alarms)

    @property
    def is_empty(self) -> bool:
        """Whether neither the CheckpointRun nor any pod exists."""
        return self.object is None and not self.pods and not self.rivals

    def _event(
        self,
        reason: str,
        message: str,
        *,
        warning: bool = False,
        topic: str = "",
        period_s: float = 600.0,
    ) -> EmitEvent:
        return EmitEvent(
            run=self.key,
            about=self.job,
            reason=reason,
            message=message,
            warning=warning,
            topic=topic,
            period_s=period_s,
        )


def _spot(pod: PodRecord | None) -> tuple[int, str] | None:
    return (pod.node_rank, pod.node) if pod is not None and pod.stays else None
