"""All runs of the cluster: takes in what happens, and has written what it changes.

Each event becomes a transition of one run (`run`). The run before and after is compared: what is to
be told becomes Events, and a run that changed is marked for `writers`. No task waits in here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from keepstep.wire.run_reports import LeaderAnswer, RunReport
from keepstep_operator.api.cluster_objects import (
    NodeRecord,
    PodRecord,
    PolicyRecord,
    RunKey,
    RunObject,
)
from keepstep_operator.api.run_status import RunStatus
from keepstep_operator.reconcile import run_transitions as transitions
from keepstep_operator.reconcile.answer_to_leader import ClusterFacts, leader_answer, leader_pod
from keepstep_operator.reconcile.events import KubernetesEvent, change_events, policy_rejected_event
from keepstep_operator.reconcile.run_transitions import Run

LEAST_S: Final = 5.0
LONGEST_S: Final = 30.0
_EACH_S: Final = 0.03


class RunRegistry:
    """The runs, and what is known beside them. `mark`: this run may have to be written. `emit`:
    emit this Event. `clock`: unix seconds."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self.runs: dict[RunKey, Run] = {}
        self.cluster = ClusterFacts()
        self.clock = clock
        self.mark: Callable[[RunKey], None] = lambda key: None
        self.emit: Callable[[Run, KubernetesEvent], None] = lambda run, event: None
        self._run_of_pod: dict[str, RunKey] = {}
        self._policies: dict[tuple[str, str], PolicyRecord] = {}

    @property
    def report_interval_s(self) -> float:
        """How often each run reports, and is written when only its numbers changed: more seldom,
        the more runs there are."""
        return min(LONGEST_S, max(LEAST_S, len(self.runs) * _EACH_S))

    def change(self, key: RunKey, step: Callable[[Run], Run]) -> None:
        """Take a run one step on."""
        now = self.clock()
        before = self.runs.get(key) or Run(key=key, since=now, idle_since=now)
        after = step(before)
        if after is before:
            return
        if after.has_no_objects:
            self.runs.pop(key, None)
            self.mark(key)
            return
        self.runs[key] = after
        for event in change_events(before, after):
            self.emit(after, event)
        self.mark(key)

    # --- pods --------------------------------------------------------------------------------

    @property
    def pod_uids(self) -> Iterable[str]:
        """The UIDs of all pods that are known."""
        return self._run_of_pod.keys()

    def find_pod_by_uid(self, uid: str) -> PodRecord | None:
        """The pod with this UID, if it asked for keepstep and still exists."""
        run = self.runs.get(self._run_of_pod.get(uid) or RunKey("", ""))
        return run.pods.get(uid) if run is not None else None

    def pod_seen(self, pod: PodRecord) -> None:
        """A pod exists or has changed."""
        if self._run_of_pod.get(pod.uid, pod.run) != pod.run:
            self.pod_gone(pod.uid)
        self._run_of_pod[pod.uid] = pod.run
        self.change(pod.run, lambda run: transitions.pod_seen(run, pod, at=self.clock()))
        self.change(pod.run, self._with_policy)
        if len(self.runs[pod.run].pods) == 1:
            self.change(pod.run, self._with_earlier)

    def pod_gone(self, uid: str) -> None:
        """The pod's object was deleted."""
        key = self._run_of_pod.pop(uid, None)
        if key in self.runs:
            self.change(key, lambda run: transitions.pod_gone(run, uid, at=self.clock()))

    def _with_policy(self, run: Run) -> Run:
        policy = self._policies.get((run.key.namespace, transitions.policy_name(run)))
        return run if run.policy_now == policy else transitions.policy_seen(run, policy)

    def _with_earlier(self, run: Run) -> Run:
        """Of the runs of other jobs with the same kind and name, the one with the newest commit,
        unless the run's name comes from a label."""
        job = run.job
        if run.earlier or run.labelled or job is None:
            return run
        found = [
            (other.committed.time, other.key.name)
            for other in self.runs.values()
            if other.key.namespace == run.key.namespace
            and other.key != run.key
            and other.committed is not None
            and other.job is not None
            and (other.job.kind, other.job.name) == (job.kind, job.name)
        ]
        return replace(run, earlier=max(found)[1]) if found else run

    # --- objects -----------------------------------------------------------------------------

    def policy_seen(self, policy: PolicyRecord) -> KubernetesEvent | None:
        """A CheckpointPolicy exists or has changed. Returns the event on it, if it is not
        accepted."""
        self._policies[policy.namespace, policy.name] = policy
        self._policy_changed(policy.namespace)
        return policy_rejected_event(policy)

    def policy_gone(self, namespace: str, name: str) -> None:
        """A CheckpointPolicy was deleted. The runs that go by it keep doing so."""
        self._policies.pop((namespace, name), None)
        self._policy_changed(namespace)

    def _policy_changed(self, namespace: str) -> None:
        for key in [key for key in self.runs if key.namespace == namespace]:
            self.change(key, self._with_policy)

    def status_written(self, key: RunKey, status: RunStatus) -> None:
        """This status is in the run's object now, which is nothing to write."""
        if key in self.runs:
            self.runs[key] = replace(self.runs[key], status=status)

    def run_object_seen(self, body: RunObject) -> None:
        """A CheckpointRun exists or has changed."""
        self.change(body.key, lambda run: transitions.run_object_seen(run, body))
        self.change(body.key, self._with_policy)

    def run_object_gone(self, key: RunKey) -> None:
        """A CheckpointRun was deleted."""
        if key in self.runs:
            self.change(key, transitions.run_object_gone)

    def node_seen(self, node: NodeRecord) -> None:
        """A node exists or has changed. The runs that this concerns are looked at with the next
        round."""
        self.cluster = replace(self.cluster, nodes={**self.cluster.nodes, node.name: node})

    def node_gone(self, name: str) -> None:
        """A node's object was deleted."""
        nodes = {key: node for key, node in self.cluster.nodes.items() if key != name}
        self.cluster = replace(self.cluster, nodes=nodes)

    # --- reports -----------------------------------------------------------------------------

    def handle_report(
        self, pod: PodRecord, report: RunReport, *, authorities: str
    ) -> LeaderAnswer | None:
        """Take in the report of the leader of this pod's run; returns the answer. None: this pod
        does not lead."""
        run = self.runs.get(pod.run)
        leads = leader_pod(run) if run is not None else None
        if leads is None or leads.uid != pod.uid:
            return None
        self.change(pod.run, lambda run: transitions.apply_report(run, report, at=self.clock()))
        return leader_answer(
            self.runs[pod.run],
            self.cluster,
            interval_s=self.report_interval_s,
            authorities=authorities,
        )
