"""One run: its pods, its ledger, what happened to it. Events in, actions out; time is passed in.

Everything but a few counters comes again from pods and reports after the reconciler restarts; the
counters (`restarts`, `lostSteps`, `goodput`, `recent`, the time of the last commit) are taken over
from the CheckpointRun's status.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from keepstep.core import ledger
from keepstep.core.ledger import AlarmKind, is_among
from keepstep.core.retention import Retention
from keepstep.core.schedule import on_grid, stands_in
from keepstep.core.suspicion import Failure, newest
from keepstep.steps import StepId, Tier
from keepstep.wire.reports import Report
from keepstep_operator.api.job_kinds import kind_of
from keepstep_operator.api.model import (
    Job,
    JobState,
    NodeRecord,
    PodRecord,
    PolicyRecord,
    RunKey,
    RunObject,
)
from keepstep_operator.api.policy import Policy, VolumeKind
from keepstep_operator.api.run import MOST_RECENT, RecentStatus, RunStatus, cut, utc
from keepstep_operator.reconcile.state import helper_plan, messages
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
from keepstep_operator.reconcile.state.durability import volumes_outlive_pod
from keepstep_operator.reconcile.state.goodput import RunGoodput
from keepstep_operator.reconcile.state.health import LIBRARY_S, Health, look
from keepstep_operator.reconcile.state.node_rank import Sender
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
from keepstep_operator.reconcile.state.run_ledger import LARGEST_WORLD, MOST_RANKS, RunLedger

FRESH_START_S = 120.0
"""How long an acknowledgement of "newest" waits for reports that show what it is about."""
ASK_JOB_S = 30.0
COMMITTED_EVENT_S = 300.0
NOTE_COMMIT_S = 60.0
ALARM_S = 3600.0
MOST_ALARMS = 64
"""Remembered for so long, the newest: a pod can cause thousands with each report."""
NOT_INJECTED_S = 1800.0
"""An API server keeps an Event for an hour, and a run without a sidecar may fail for days."""
RESUME_S = 45.0
UNKNOWN_JOB_S = 30 * 24 * 3600.0
"""A run without pods is over after so long when nobody can say what became of its job."""


class Run:
    """The state of one run. Methods named after events return what the shell has to do.

    `nodes`: the cluster's, by name; empty where they are not watched.
    """

    def __init__(
        self,
        key: RunKey,
        *,
        nodes: Mapping[str, NodeRecord] = MappingProxyType({}),
    ) -> None:
        self.key = key
        self.nodes = nodes
        self.host_paths: tuple[str, ...] = ()
        """Prefixes of node directories below which helper pods may be started."""
        self.ledger = RunLedger()
        self.peer_assignment = PeerAssignment(self, nodes)
        self.restore_request = RestoreRequest()
        self._adviser = AdviceCache(self.ledger)
        self.pods: dict[str, PodRecord] = {}
        self.pods_moved = 0
        """Grows when pods that stay, or their nodes, are others."""
        self._leaving: set[str] = set()
        self.job: Job | None = None
        self._job_of_pods: Job | None = None
        self._ownerless: Job | None = None
        """The same while nobody has said what made it."""
        self._owner_asked_at = 0.0
        self.policy: Policy | None = None
        self.policy_now: PolicyRecord | None = None
        self.object: RunObject | None = None
        self.restores = RestartHistory()
        self.goodput = RunGoodput()
        self.failures: tuple[Failure, ...] = ()
        self._stand_in: StepId | None = None
        """A commit that is to be archived though it is not due, until it is."""
        """How the script failed by itself, as long as this process remembers what pods told."""
        self.recent: list[RecentStatus] = []
        self.commit: Commit | None = None
        self.finished_at: float | None = None
        self.health = Health()
        self._looked_at = 0.0
        self.written = RunStatus()
        self.past: PreviousStatus | None = None
        self.earlier: RunKey | None = None
        """Another run of a job of the same name, which holds steps that this one will not find."""
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

    # --- pods ----------------------------------------------------------------------------

    def pod_seen(self, pod: PodRecord, *, at: float) -> list[Action]:
        """A pod is there, or has changed."""
        before = self.pods.get(pod.uid)
        if before == pod:
            return []
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
        soon = before is not None or bool(pod.trouble)  # else all pods of a cluster at each start
        return [WriteStatus(self.key, soon=soon), *looked_up, *said, *self._not_injected(pod)]

    def pod_gone(self, uid: str, *, at: float) -> list[Action]:
        """The pod's object is deleted."""
        pod = self.pods.pop(uid, None)
        if pod is None:
            return []
        self.pods_moved += 1
        self.training_since.pop(uid, None)
        return [WriteStatus(self.key), *self._ended(pod, at)]

    def _ended(self, pod: PodRecord, at: float) -> list[Action]:
        """Its containers will not run again: memory is gone, and what goes with a pod."""
        before = self.ledger.restorable() if pod.uid in self._leaving else None
        said = self.ledger.pod_gone(pod.uid, local_stays=volumes_outlive_pod(pod.volumes))
        self._know_alive(at)
        left = self._left(pod, before) if pod.uid in self._leaving else ()
        self._leaving.discard(pod.uid)
        return [*self._alarmed(said, at=at), *left]

    def _left(self, pod: PodRecord, before: StepId | None) -> Iterator[Action]:
        """A pod was made to leave a run that stays: what went with it is said, not only counted
        when the run is back. `before`: what could be restored while it was there."""
        after = self.ledger.restorable()
        gone = before is not None and (after is None or after < before)
        if gone and any(one.stays for one in self.pods.values()):
            yield self._event(
                "LastStepLost", messages.last_step_lost(pod, before, after), warning=True,
                topic=pod.uid,
            )  # fmt: skip

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
        """The policy that the pods name, as it is now; None: there is none (any more)."""
        self.policy_now = policy
        self._adopt()
        return [WriteStatus(self.key)]

    def _adopt(self) -> None:
        """A change holds for pods that are made after it, so the run goes by the policy that its
        newest pod was made with, even when that was deleted meanwhile."""
        now, held = self.policy_now.policy if self.policy_now else None, self.policy
        if now is None:
            return
        if held is None or held.name != now.name or self._made_with(now.name) >= now.generation:
            self.policy = now
            self._configure()

    def _made_with(self, policy: str) -> int:
        """The newest generation of this policy that a pod was made with."""
        pods = (pod for pod in self.pods.values() if pod.policy == policy)
        return max((pod.policy_generation for pod in pods), default=0)

    def _resume_policy(self, written: Policy | None) -> None:
        """What the run went by before this process holds, unless a pod was made with a newer one:
        pods that join get it."""
        if written is not None and self._made_with(written.name) <= written.generation:
            self.policy = written
        self._adopt()

    def object_seen(self, object: RunObject, *, at: float) -> list[Action]:
        """The CheckpointRun. What it says of the past is taken over when nothing else is known."""
        before, self.object = self.object, replace(object, status={}, policy=None)
        if before is None and not self.recent and not self.ledger.places:
            self._resume_policy(object.policy)
            self._resume(read_previous(object.status), at)
        self._request_restore()
        self._configure()
        if object.fresh_start and (before is None or before.fresh_start != object.fresh_start):
            self._fresh_start_until = at + FRESH_START_S
        changed = before is None or before.generation != object.generation
        write = [WriteStatus(self.key, soon=before is not None)] if changed else []
        return [*self._acknowledge(at=at), *write]

    def object_gone(self) -> list[Action]:
        """Somebody deleted it; as long as the run has pods it is made again."""
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
        self.ledger.orphans.resume(past.status.holders, commit=commit, epoch=past.epoch)
        self.job = self.job or past.job
        self.finished_at = past.finished_at if self.idle else None

    def _configure(self) -> None:
        keep = self.policy.keep if self.policy else Retention()
        archived = self.policy is not None and self.policy.archive is not None
        self._adviser.forget()
        self.ledger.configure(keep=keep, pins=self.pins, archived=archived)

    @property
    def pins(self) -> tuple[StepId, ...]:
        """Steps that stay: what people pinned, and what they want to go back to."""
        pinned = tuple(parse_steps(self.object.pins)) if self.object else ()
        wanted = self.restore_request.wanted
        return pinned if wanted is None or wanted in pinned else (*pinned, wanted)

    def _request_restore(self) -> list[Action]:
        """What the object asks for, with what is known of steps and epochs."""
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
        """What a sidecar said. One that comes too late changes nothing."""
        before = self.ledger.progress.step if self.ledger.progress else self._past_step
        place, settled = self.ledger.places.get(pod.node_rank), self.ledger.settled
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
            self._resumed_at = at  # of a large cluster they come over minutes, one after the other
        if self.ledger.settled and not settled:
            self._adviser.forget()  # the last pod was waited for
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
            *self._acknowledge(at=at),
            *self._restarted(at),
            *(self._changed_outlook(self._look(at), at) if troubled and self._may_look(at) else ()),
        ]

    def helped(self, helper: PodRecord, report: Report, *, at: float) -> list[Action]:
        """What a helper pod said that serves shards which were left on its node."""
        new = helper.node_rank not in self.ledger.helpers
        sender = Sender(
            pod=helper.uid,
            node_rank=helper.node_rank,
            node=helper.node,
            created_at=helper.created_at,
            local_stays=True,
        )
        said = [*self._alarmed(self.ledger.helped(sender, report, at=at), at=at)]
        self._adviser.forget()
        if new:
            served = helper_plan.served(helper_plan.wanted(self), self.ledger.helpers)
            message = served or f"pod {helper.name} serves what was left"
            said.append(self._event("LeftShardsServed", message, topic=helper.node))
        return [WriteStatus(self.key), *said]

    def helper_gone(self, helper: PodRecord, *, at: float) -> list[Action]:
        """A helper pod was deleted, or has ended."""
        known = self.ledger.helpers.get(helper.node_rank)
        if known is None or known.pod != helper.uid:
            return []
        said = self.ledger.helper_gone(helper.node_rank)
        return [WriteStatus(self.key), *self._alarmed(said, at=at)]

    @property
    def helper_paths(self) -> tuple[str, ...]:
        """hostPaths of the newest pod that the administrator (still) allows."""
        newest = max(
            (pod for pod in self.pods.values() if pod.host_paths),
            key=lambda pod: pod.created_at,
            default=None,
        )
        return helper_plan.allowed(newest.host_paths, self.host_paths) if newest else ()

    def _warned(self, pod: PodRecord, report: Report) -> Iterator[Action]:
        """Each kind of warning once an hour, whatever step and number it names."""
        for text in report.warnings:
            kind = re.sub(r"[0-9a-f.-]*\d[0-9a-f.-]*", "#", text)
            message = f"{pod.name}: {cut(text)}"
            yield self._event(
                "SidecarWarning", message, warning=True, topic=f"{pod.uid} {kind}", period_s=ALARM_S
            )

    def _know_alive(self, at: float) -> None:
        self.alive_since = (self.alive_since or at) if self.ledger.alive() else None

    def reply(
        self, pod: PodRecord, *, holds: str | None = None, least_gap_s: float, at: float
    ) -> Reply:
        """What this pod's sidecar should know, which `holds` that version of the list of peers.
        Without a known policy nothing is ever retired."""
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
            awaits=helper_plan.awaits(self, pod.node_rank),
            all_peers=self.ledger.settled,
            leaving=bool(self._leaving),
            restore_from=self.restore_request.tell(pod.uid),
            changes_since=self.ledger.follows(pod.node_rank, pod.uid),
            archive=self._stand_in,
            failures=self.failures,
            reads_runs=True,
        )

    def _committed(self, at: float) -> Iterator[Action]:
        id, known = self.ledger.committed(), self.commit
        if id is None:
            # it went with a pod, or is just out of sight while somebody is missing
            self.commit = None if self.ledger.settled else known
            return
        if known is not None and (id == known.id or not self._is_news(id, known)):
            return
        since = max(known.at, self.alive_since or known.at) if known is not None else None
        if known is not None and self._stands_in(id, known.id):
            self._stand_in = id
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
        """See `schedule.stands_in`: the grid is that of the sidecars (`ArchiveConfig.base`)."""
        policy = self.policy
        if policy is None or policy.archive is None or id.epoch != before.epoch:
            return False
        every = on_grid(policy.archive.every, policy.persist_every or policy.stage_every)
        commits = {one.step for one in self.ledger.commits() if one.epoch == id.epoch}
        return stands_in(id.step, before=before.step, commits=commits, every=every)

    def _is_news(self, id: StepId, known: Commit) -> bool:
        """A lower watermark is believed only when everybody is there: else somebody's copy may
        just be out of sight."""
        return id > known.id or self.ledger.settled

    def _alarmed(self, said: Iterable[ledger.Action], *, at: float) -> Iterator[Action]:
        for one in said:
            if not isinstance(one, ledger.Alarm) or one.kind is AlarmKind.FRESH_START:
                continue  # a fresh start is told as a restart, with what it cost
            self._remember_alarm(cut(one.text), at)
            reason = "".join(word.capitalize() for word in str(one.kind).split("-"))
            yield self._event(reason, cut(one.text), warning=True, topic=one.text)

    def _remember_alarm(self, text: str, at: float) -> None:
        self._alarms.pop(text, None)  # the newest last, so that the oldest is forgotten first
        self._alarms[text] = at
        while len(self._alarms) > MOST_ALARMS:
            del self._alarms[next(iter(self._alarms))]

    # --- restarts ------------------------------------------------------------------------

    def _restarted(self, at: float) -> Iterator[Action]:
        for restart in self.restores.due(world=self.ledger.world, at=at):
            reason = "Restored" if restart.parent else "FreshStart"
            reason = "Forked" if restart.origin else reason
            message = messages.restarted(
                restart,
                self.key,
                kept_aside=self.ledger.core.lineage.fresh == restart.epoch,
            )
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
        """The annotation names an epoch, or the newest one that began anew; that one is looked for
        a while only, so that a later one is never acknowledged by it."""
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

    # --- the job's end -------------------------------------------------------------------

    def _belongs(self, job: Job | None) -> Iterator[Action]:
        """Pods name the job that made them; another one may have made that, which people look at.
        Until it is known anew, what was known of one of this name stands."""
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
        """The API server may not have answered."""
        if self._ownerless is not None and at - self._owner_asked_at >= ASK_JOB_S:
            if self._owner_asked_at:
                yield FindOwner(self.key, self._ownerless)
            self._owner_asked_at = at

    def owner_found(self, job: Job, owner: Job | None) -> list[Action]:
        """What a look at the pods' job said."""
        if job == self._ownerless:
            self._ownerless = None
        if job != self._job_of_pods or self.job == (owner or job):
            return []
        self.job = owner or job
        return [WriteStatus(self.key)]

    def job_answered(self, state: JobState, *, at: float) -> list[Action]:
        """What a look at the root job said."""
        if state is JobState.ACTIVE or self.finished_at is not None or not self.idle:
            return []
        if state is not JobState.UNKNOWN:
            return self._finish(at, str(state))
        if self._idle_since is None or at - self._idle_since < UNKNOWN_JOB_S:
            return []
        return self._finish(at, f"without pods for {UNKNOWN_JOB_S / 86400:.0f} days")

    @property
    def idle(self) -> bool:
        """No pod of it will go on."""
        return all(pod.over for pod in self.pods.values())

    def _finish(self, at: float, how: str) -> list[Action]:
        self.finished_at = at
        step = self.commit.id.step if self.commit else None
        kept = f"; step {step} is committed" if step is not None else ""
        message = f"the job is {how}{kept}"
        self._remember(RecentStatus(time=utc(at), type=FINISHED, step=step, message=message))
        return [WriteStatus(self.key)]

    def _look_after(self, at: float) -> Iterator[Action]:
        """Is the job over, and was it so for long enough?"""
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
        """Every few seconds: what becomes true by waiting."""
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
        later = (*self._still_not_injected(at), *self._still_ownerless(at))
        return [*actions, *later, *self._look_after(at)]

    def _look(self, at: float) -> Health:
        """How it stood before."""
        before, self.health, self._looked_at = self.health, look(self, at=at), at
        return before

    def _may_look(self, at: float) -> bool:
        """Not with the first report of each of thousands of pods: the next tick looks."""
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
        """This is written now: its conditions keep the times of their last change."""
        self.written = status

    # --- asking --------------------------------------------------------------------------

    @property
    def step(self) -> int | None:
        """The newest step that all ranks staged, as far as anybody knows."""
        return self.ledger.progress.step if self.ledger.progress else self._past_step

    @property
    def behind(self) -> int | None:
        """Steps staged by all and not committed."""
        if self.step is None:
            return None
        return max(0, self.step - (self.commit.id.step if self.commit else 0))

    def resumes(self, *, at: float) -> bool:
        """What an earlier reconciler wrote is better than what is known yet: sidecars report
        within half a minute of each other, and until then nothing has changed but our knowledge."""
        since = self._resumed_at
        return since is not None and at - since < RESUME_S and not self.ledger.settled

    @property
    def alarms(self) -> tuple[str, ...]:
        return tuple(self._alarms)

    @property
    def is_empty(self) -> bool:
        """Nothing is left to tell about."""
        return self.object is None and not self.pods

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
