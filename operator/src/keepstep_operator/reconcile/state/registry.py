"""All runs. Passes what the shell sees to the runs that it concerns.

Pure like `run`: events in, actions out, time passed in. No index here grows with steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from keepstep.wire.reports import Report
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
from keepstep_operator.reconcile.state.actions import Action
from keepstep_operator.reconcile.state.reply import Reply
from keepstep_operator.reconcile.state.run import Run

REPORT_S = 0.0015
"""CPU seconds for one report with its connection, independent of the number of pods of its run
(measured by bench/scale.py)."""
BUDGET = 0.3
"""The part of a core that reports may use. Each run gets an equal share of it, which limits how
often its pods report."""
LONGEST_GAP_S = 30.0


class Registry:
    """The state of all runs."""

    def __init__(self) -> None:
        self.agents: dict[str, AgentRecord] = {}
        """The agents by node."""
        self.runs: dict[RunKey, Run] = {}
        self._runs_of: dict[str, dict[RunKey, Run]] = {}
        """The same by namespace, so that an event in one namespace needs no walk over all runs."""
        self._living: set[RunKey] = set()
        """Runs with a pod that may report. Only they share the CPU time for reports, because pods
        of queued jobs may wait for a node for days."""
        self._run_of_pod: dict[str, RunKey] = {}
        self._policies: dict[tuple[str, str], PolicyRecord] = {}
        self._nodes: dict[str, NodeRecord] = {}

    # --- pods ----------------------------------------------------------------------------

    def pod(self, uid: str) -> PodRecord | None:
        """The pod with this uid, if it asked for keepstep and still exists."""
        key = self._run_of_pod.get(uid)
        if key not in self.runs:
            return None
        return self.runs[key].pods.get(uid) or self.runs[key].rivals.get(uid)

    def refusal(self, uid: str) -> str:
        """Why this pod is no member of the run of its label; '' if it may be one."""
        run = self.runs.get(self._run_of_pod.get(uid) or RunKey("", ""))
        return run.refusal(uid) if run is not None else ""

    def uid_of(self, key: RunKey) -> str:
        """The uid of the run's CheckpointRun; '' if there is none."""
        run = self.runs.get(key)
        return run.object.uid if run is not None and run.object is not None else ""

    def pod_seen(self, pod: PodRecord, *, at: float) -> list[Action]:
        """A pod exists or has changed."""
        actions: list[Action] = []
        if self._run_of_pod.get(pod.uid, pod.run) != pod.run:
            actions += self.pod_gone(pod.uid, at=at)
        self._run_of_pod[pod.uid] = pod.run
        run = self._run(pod.run)
        actions += run.pod_seen(pod, at=at)
        self._note_life(run)
        if pod.uid in run.rivals:
            return actions
        run.earlier = run.earlier or self._earlier(run)
        policy = self._policies.get((pod.namespace, pod.policy))
        if policy is not None and run.policy_now != policy:
            actions += run.policy_seen(policy)
        return actions

    def _earlier(self, run: Run) -> RunKey | None:
        """Of the runs of other jobs with the same kind and name, the one with the newest commit;
        None if there is none, or if the run's name comes from a label."""
        found = [
            other
            for other in self._runs_of[run.key.namespace].values()
            if other is not run
            and other.commit is not None
            and run.job is not None
            and other.job is not None
            and (other.job.kind, other.job.name) == (run.job.kind, run.job.name)
            and not run.labelled
        ]
        newest = max(found, key=lambda other: other.commit.at if other.commit else 0, default=None)
        return newest.key if newest is not None else None

    def pod_gone(self, uid: str, *, at: float) -> list[Action]:
        """The pod's object was deleted."""
        key = self._run_of_pod.pop(uid, None)
        if key not in self.runs:
            return []
        actions = self.runs[key].pod_gone(uid, at=at)
        self._note_life(self.runs[key])
        return actions

    def _note_life(self, run: Run) -> None:
        lives = any(pod.injected and pod.node and not pod.over for pod in run.pods.values())
        self._living.add(run.key) if lives else self._living.discard(run.key)

    # --- agents of nodes -----------------------------------------------------------------

    def agent(self, uid: str) -> AgentRecord | None:
        """The agent whose pod has this uid."""
        return next((one for one in self.agents.values() if one.uid == uid), None)

    def agent_seen(self, agent: AgentRecord) -> None:
        """The agent of a node exists or has changed. Runs learn of it with their next replies."""
        if agent.node:
            self.agents[agent.node] = agent

    def agent_gone(self, uid: str) -> None:
        """The agent's pod was deleted."""
        if (agent := self.agent(uid)) is not None:
            del self.agents[agent.node]

    # --- objects -------------------------------------------------------------------------

    def policy_seen(self, policy: PolicyRecord) -> list[Action]:
        """A CheckpointPolicy exists or has changed."""
        self._policies[policy.namespace, policy.name] = policy
        return self._tell_of_policy(policy.namespace, policy.name, policy)

    def policy_gone(self, namespace: str, name: str) -> list[Action]:
        """A CheckpointPolicy was deleted. The runs that go by it keep doing so."""
        self._policies.pop((namespace, name), None)
        return self._tell_of_policy(namespace, name, None)

    def _tell_of_policy(
        self, namespace: str, name: str, policy: PolicyRecord | None
    ) -> list[Action]:
        actions: list[Action] = []
        for run in self._runs_of.get(namespace, {}).values():
            if name in _policies_of(run):
                actions += run.policy_seen(policy)
        return actions

    def object_seen(self, object: RunObject, *, at: float) -> list[Action]:
        """A CheckpointRun exists or has changed."""
        run = self._run(object.key)
        actions = run.object_seen(object, at=at)
        if run.policy is not None and run.policy_now is None:
            now = self._policies.get((object.key.namespace, run.policy.name))
            actions += run.policy_seen(now) if now is not None else []
        return actions

    def object_gone(self, key: RunKey) -> list[Action]:
        """A CheckpointRun was deleted."""
        actions = self.runs[key].object_gone() if key in self.runs else []
        self._drop_if_empty(key)
        return actions

    # --- nodes ---------------------------------------------------------------------------

    def node_seen(self, node: NodeRecord) -> None:
        """A node exists or has changed. The runs that this concerns look at it with the next
        tick."""
        self._nodes[node.name] = node

    @property
    def nodes(self) -> Mapping[str, NodeRecord]:
        """The nodes by name; empty if nodes are not watched."""
        return self._nodes

    def node_gone(self, name: str) -> None:
        """A node's object was deleted."""
        self._nodes.pop(name, None)

    # --- reports -------------------------------------------------------------------------

    def reported(self, uid: str, report: Report, *, at: float) -> list[Action]:
        """Take in the report of this pod's sidecar. Raises KeyError for an unknown pod."""
        run = self.runs[self._run_of_pod[uid]]
        return run.reported(run.pods[uid], report, at=at)

    def reply(self, uid: str, *, holds: str = "", at: float) -> Reply:
        """What to tell the sidecar of this pod. `holds`: the version of the list of peers that it
        has. Raises KeyError for an unknown pod."""
        run = self.runs[self._run_of_pod[uid]]
        gap_s = self.least_gap_s(run)
        return run.reply(run.pods[uid], holds=holds, least_gap_s=gap_s, at=at)

    def least_gap_of(self, uid: str) -> float:
        """`least_gap_s` for the run of this pod; 1 s for an unknown pod."""
        run = self.runs.get(self._run_of_pod.get(uid) or RunKey("", ""))
        return self.least_gap_s(run) if run is not None else 1.0

    def least_gap_s(self, run: Run) -> float:
        """The shortest time between two reports of one pod with which all reports can be taken
        in."""
        all_pods_s = len(run.pods) * REPORT_S
        return min(LONGEST_GAP_S, max(1.0, all_pods_s * len(self._living) / BUDGET))

    # --- time ----------------------------------------------------------------------------

    def job_answered(self, key: RunKey, state: JobState, *, at: float) -> list[Action]:
        """The state of a run's root job."""
        return self.runs[key].job_answered(state, at=at) if key in self.runs else []

    def owner_found(self, key: RunKey, job: Job, owner: Job | None) -> list[Action]:
        """The owner of the job of a run's pods; None: it has none."""
        return self.runs[key].owner_found(job, owner) if key in self.runs else []

    def tick(self, *, at: float) -> Iterator[Action]:
        """Called every few seconds: what becomes true by waiting."""
        for key in list(self.runs):
            yield from self.tick_run(key, at=at)

    def tick_run(self, key: RunKey, *, at: float) -> list[Action]:
        """The same for one run."""
        actions = self.runs[key].tick(at=at) if key in self.runs else []
        self._drop_if_empty(key)
        return actions

    def waits(self, key: RunKey, *, at: float) -> bool:
        """Whether the status that an earlier reconciler wrote should stand a little longer."""
        return key in self.runs and self.runs[key].resumes(at=at)

    def _run(self, key: RunKey) -> Run:
        if key not in self.runs:
            self.runs[key] = run = Run(key, nodes=self._nodes, agents=self.agents)
            self._runs_of.setdefault(key.namespace, {})[key] = run
        return self.runs[key]

    def _drop_if_empty(self, key: RunKey) -> None:
        if key in self.runs and self.runs[key].is_empty:
            del self.runs[key]
            self._living.discard(key)
            del self._runs_of[key.namespace][key]
            if not self._runs_of[key.namespace]:
                del self._runs_of[key.namespace]


def _policies_of(run: Run) -> set[str]:
    names = {pod.policy for pod in run.pods.values()}
    return names | ({run.policy.name} if run.policy is not None else set())
