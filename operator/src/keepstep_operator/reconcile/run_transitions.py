"""A run at one moment, and what changes it: pure functions `(Run, what happened) -> Run`.

A run is what its pods, its CheckpointRun, its policy and the newest report of its leader say. What
a former process of the operator wrote into the status is taken over when the object is first
seen.
Times are unix seconds, passed in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Final

from keepstep.steps import StepId
from keepstep.wire.run_reports import (
    MOST_RECENT,
    LeaderRecord,
    RunEvent,
    RunReport,
    format_utc,
    parse_utc,
)
from keepstep_operator.api.cluster_objects import (
    Job,
    JobState,
    PodRecord,
    PolicyRecord,
    RunKey,
    RunObject,
    build_job,
)
from keepstep_operator.api.job_kinds import kind_of
from keepstep_operator.api.policy import Policy, VolumeKind
from keepstep_operator.api.run_status import CommittedStatus, RunStatus

FINISHED: Final = "Finished"
"""The phase, and also the type of the entry in `recent` that says since when."""
RESUME_S: Final = 45.0
UNKNOWN_JOB_S: Final = 30 * 24 * 3600.0
"""A run without pods counts as finished after this time if the state of its job is unknown."""
_DEFAULT_TTL_S: Final = 7 * 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """`pods`: by UID, of all that have the run's label. `rivals`: jobs whose pods are no members,
    because another job has the run. `job`: what people look at; `job_of_pods`: what made the pods;
    `owner_known`: whether it is known what made that. `status`: as it was last read or written.
    `policy`: what the run goes by; `policy_now`: the policy of that name now. `record`: what the
    leader asked to keep. `since`: when this process saw the run first. `idle_since`: since when no
    pod will go on. `earlier`: another run of a job of the same name, whose steps this one will not
    find. `volumes`, `labelled`: of the newest pod.
    """

    key: RunKey
    since: float
    pods: Mapping[str, PodRecord] = field(default_factory=dict)
    rivals: frozenset[Job] = frozenset()
    object: RunObject | None = None
    status: RunStatus = field(default_factory=RunStatus)
    policy: Policy | None = None
    policy_now: PolicyRecord | None = None
    job: Job | None = None
    job_of_pods: Job | None = None
    owner_known: bool = True
    volumes: tuple[VolumeKind, ...] = ()
    labelled: bool = False
    report: RunReport | None = None
    reported_at: float = 0.0
    record: LeaderRecord = field(default_factory=LeaderRecord)
    committed: CommittedStatus | None = None
    recent: tuple[RunEvent, ...] = ()
    idle_since: float | None = None
    finished_at: float | None = None
    earlier: str = ""

    @property
    def job_pods(self) -> Iterator[PodRecord]:
        """The pods of the job that has the run."""
        return (pod for pod in self.pods.values() if pod.job not in self.rivals)

    @property
    def has_no_objects(self) -> bool:
        """Whether neither the CheckpointRun nor any pod exists."""
        return self.object is None and not self.pods

    @property
    def volumes_outlive_pod(self) -> bool:
        """Whether all volumes of a pod outlive it. All must, since its ranks are spread over
        them."""
        return bool(self.volumes) and all(kind is VolumeKind.HOST_PATH for kind in self.volumes)

    @property
    def ttl_s(self) -> float:
        """How long the CheckpointRun stays after the end of its job."""
        return self.policy.run_ttl_s if self.policy else _DEFAULT_TTL_S

    def prefers_earlier_status(self, now: float) -> bool:
        """Whether the status of an earlier process is still better than what this one knows: the
        leader reports within half a minute."""
        if self.report is not None or self.finished_at is not None:
            return False
        return self.status.phase not in ("Waiting", FINISHED) and now - self.since < RESUME_S


# --- pods ----------------------------------------------------------------------------------------


def pod_seen(run: Run, pod: PodRecord, *, at: float) -> Run:
    """A pod exists or has changed."""
    if run.pods.get(pod.uid) == pod:
        return run
    pods = {**run.pods, pod.uid: pod}
    run = replace(run, pods=pods, rivals=run.rivals & {pod.job for pod in pods.values()})
    run = replace(run, rivals=_rivals(run, pod))
    if pod.injected and pod.job not in run.rivals:
        run = replace(run, volumes=pod.volumes, labelled=pod.labelled)
    if not pod.over:
        run = replace(run, finished_at=None)
    return _reviewed(_adopting(_belonging(run)), at)


def pod_gone(run: Run, uid: str, *, at: float) -> Run:
    """The pod's object was deleted."""
    pods = {key: pod for key, pod in run.pods.items() if key != uid}
    jobs = {pod.job for pod in pods.values()}
    return _reviewed(replace(run, pods=pods, rivals=run.rivals & jobs), at)


def _rivals(run: Run, pod: PodRecord) -> frozenset[Job]:
    """The rivals when this pod is there. If a member of another job has the pod's place, the job
    that is on record keeps the run, else the one with the older pod: a process that starts sees
    them in any order."""
    if not pod.labelled or not pod.is_active or pod.job is None or pod.job in run.rivals:
        return run.rivals
    others = (
        member for member in run.job_pods if member.is_active and member.job not in (pod.job, None)
    )
    member = next((record for record in others if record.node_rank == pod.node_rank), None)
    if member is None or member.job is None:
        return run.rivals
    on_record = _job_of(run.status)
    if on_record in (pod.job, member.job):
        loses = pod.job if on_record == member.job else member.job
    else:
        first = (member.created_at, member.uid) < (pod.created_at, pod.uid)
        loses = pod.job if first else member.job
    return run.rivals | {loses}


def _belonging(run: Run) -> Run:
    """The pods' job, as long as a member of it stays; else that of the oldest member. What made it
    is to be looked up where jobs of its kind can have an owner; until then, a known job of the same
    name is kept."""
    members = [pod for pod in run.job_pods if pod.job is not None]
    if not members or run.job_of_pods in {pod.job for pod in members if pod.is_active}:
        return run
    job = min(members, key=lambda pod: (not pod.is_active, pod.created_at, pod.uid)).job
    if job is None or job == run.job_of_pods:
        return run
    kind = kind_of(job.api_version, job.kind)
    owned = kind is not None and kind.owner is not None
    kept = run.job if owned and run.job is not None and run.job.name == job.name else job
    return replace(run, job_of_pods=job, owner_known=not owned, job=kept)


def owner_found(run: Run, job: Job, owner: Job | None) -> Run:
    """The owner of the pods' job; None: it has none."""
    if job != run.job_of_pods:
        return run
    return replace(run, job=owner or job, owner_known=True)


# --- the end of the job --------------------------------------------------------------------------


def _reviewed(run: Run, at: float) -> Run:
    """Note whether any pod will go on, and whether all have succeeded."""
    pods = list(run.pods.values())
    if not all(pod.over for pod in pods):
        return replace(run, idle_since=None)
    run = replace(run, idle_since=at if run.idle_since is None else run.idle_since)
    if pods and all(pod.phase == "Succeeded" for pod in pods):
        return _finished(run, "finished", at)
    return run


def job_answered(run: Run, state: JobState, *, at: float) -> Run:
    """The state of the root job. If it has ended without a pod that stays, a job that waited for
    the run goes on with it."""
    if state is JobState.ACTIVE:
        return run
    if run.rivals and not any(pod.is_active for pod in run.job_pods):
        return _reviewed(_adopting(_belonging(replace(run, rivals=frozenset()))), at)
    if run.idle_since is None:
        return run
    if state is not JobState.UNKNOWN:
        return _finished(run, str(state), at)
    if at - run.idle_since >= UNKNOWN_JOB_S:
        return _finished(run, f"without pods for {UNKNOWN_JOB_S / 86400:.0f} days", at)
    return run


def needs_job_check(run: Run) -> bool:
    """Whether it is to be found out if the job is over."""
    waits = run.rivals and not any(pod.is_active for pod in run.job_pods)
    idle = run.idle_since is not None and run.finished_at is None
    return run.job is not None and bool(idle or waits)


def is_expired(run: Run, now: float) -> bool:
    """Whether the CheckpointRun is to be deleted: its job has been over for the policy's runTTL."""
    return run.finished_at is not None and not run.pods and now - run.finished_at >= run.ttl_s


def _finished(run: Run, how: str, at: float) -> Run:
    if run.finished_at is not None:
        return run
    step = run.committed.step if run.committed else None
    kept = f"; step {step} is committed" if step is not None else ""
    end = RunEvent(time=format_utc(at), type=FINISHED, step=step, message=f"the job is {how}{kept}")
    return replace(run, finished_at=at, recent=merge_events(run.recent, (end,)))


# --- objects -------------------------------------------------------------------------------------


def run_object_seen(run: Run, body: RunObject) -> Run:
    """The CheckpointRun exists or has changed. What an earlier process wrote there is taken over
    once."""
    shown = replace(body, status=RunStatus(), policy=None)
    if run.object == shown:
        return run
    if run.object is not None or run.report is not None:
        return replace(run, object=shown)
    status, written = body.status, body.policy
    if written is not None and _made_with(run, written.name) <= written.generation:
        run = replace(run, policy=written)
    run = replace(
        run,
        object=shown,
        status=status,
        record=status.record,
        committed=status.committed,
        recent=status.recent,
        job=run.job or _job_of(status),
        finished_at=_finished_at(status) if all(pod.over for pod in run.pods.values()) else None,
    )
    return _adopting(run)


def run_object_gone(run: Run) -> Run:
    """The CheckpointRun was deleted. It is created again as long as the run has pods."""
    return replace(run, object=None, status=RunStatus())


def policy_seen(run: Run, policy: PolicyRecord | None) -> Run:
    """The present state of the policy that the pods name; None: it does not exist (any more)."""
    return _adopting(replace(run, policy_now=policy))


def _adopting(run: Run) -> Run:
    """A change of the policy holds for pods that are created after it. So the run goes by the
    policy that its newest pod was created with, even if that was deleted meanwhile."""
    now, held = run.policy_now.policy if run.policy_now else None, run.policy
    if now is None:
        return run
    if held is None or held.name != now.name or _made_with(run, now.name) >= now.generation:
        return replace(run, policy=now)
    return run


def _made_with(run: Run, policy: str) -> int:
    """The newest generation of this policy that a member was created with; 0: none names it."""
    pods = (pod for pod in run.job_pods if pod.policy == policy)
    return max((pod.policy_generation for pod in pods), default=0)


def policy_name(run: Run) -> str:
    """The policy that the newest member names, else the one that the run goes by."""
    named = [pod for pod in run.job_pods if pod.policy]
    if named:
        return max(named, key=lambda pod: (pod.created_at, pod.uid)).policy
    return run.policy.name if run.policy is not None else ""


def _job_of(status: RunStatus) -> Job | None:
    return build_job(**asdict(status.job)) if status.job is not None else None


def _finished_at(status: RunStatus) -> float | None:
    if status.phase != FINISHED:
        return None
    return next((parse_utc(event.time) for event in status.recent if event.type == FINISHED), None)


# --- reports -------------------------------------------------------------------------------------


def apply_report(run: Run, report: RunReport, *, at: float) -> Run:
    """The leader reports. A report that was overtaken changes nothing. The first report of a leader
    has no record: its answer gives it the one that is kept."""
    known = run.report
    if known is not None and known.leader == report.leader and known.sequence >= report.sequence:
        return run
    return replace(
        run,
        report=report,
        reported_at=at,
        record=report.record if report.sequence > 1 else run.record,
        committed=_committed(run, report, at),
        recent=merge_events(run.recent, report.recent),
    )


def _committed(run: Run, report: RunReport, at: float) -> CommittedStatus | None:
    """The newest commit. One that the leader does not name may only be out of its sight, until all
    members have reported to it."""
    step, known = report.committed, run.committed
    if step is None:
        return None if report.settled else known
    if known is not None and known.id == str(step):
        return known
    return CommittedStatus(step=step.step, id=str(step), time=format_utc(at))


def merge_events(known: Iterable[RunEvent], more: Iterable[RunEvent]) -> tuple[RunEvent, ...]:
    """What happened, each once, the newest first, and no more than are kept."""
    found = {(event.time, event.type, event.step): event for event in (*known, *more)}
    return tuple(found[key] for key in sorted(found, key=_order, reverse=True)[:MOST_RECENT])


def _order(key: tuple[str, str, int | None]) -> tuple[str, str, int]:
    return key[0], key[1], -1 if key[2] is None else key[2]


def parse_steps(texts: Iterable[str]) -> Iterator[StepId]:
    """The step ids among the texts. The schema refuses other texts, but the object may be older
    than the schema."""
    for text in texts:
        with contextlib.suppress(ValueError):
            yield StepId.parse(text)
