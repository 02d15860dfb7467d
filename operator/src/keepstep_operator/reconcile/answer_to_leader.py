"""What the leader of a run is told: what only the operator knows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from keepstep.wire.run_reports import LeaderAnswer, MemberPod, RunPolicy
from keepstep_operator.api.cluster_objects import NodeRecord, PodRecord
from keepstep_operator.api.policy import OnLoss, Policy
from keepstep_operator.api.tiers import HOSTNAME
from keepstep_operator.reconcile.run_transitions import Run, parse_steps

MOST_MEMBERS = 4096


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    """What is known beside runs. `nodes`: by name; empty if they are not watched. `agents`: the
    address of the agent of each node, '' while it is not ready. `complete`: all pods were
    listed."""

    nodes: Mapping[str, NodeRecord] = field(default_factory=dict)
    agents: Mapping[str, str] = field(default_factory=dict)
    complete: bool = False

    def is_node_gone(self, node: str) -> bool:
        """Whether the node certainly exists no more."""
        return self.complete and bool(self.nodes) and node not in self.nodes

    def domain(self, node: str, topology_key: str) -> str:
        """The value of the node's label. A node that is unknown or lacks it is its own domain."""
        known = self.nodes.get(node)
        if topology_key == HOSTNAME or known is None:
            return node
        return known.labels.get(topology_key) or node


def leader_answer(
    run: Run, cluster: ClusterFacts, *, interval_s: float = 30.0, authorities: str = ""
) -> LeaderAnswer:
    """The answer to the newest report of the run's leader."""
    record, report, spec = run.record, run.report, run.object
    begins = report is not None and report.sequence <= 1
    nodes = [holder.node for holder in record.holders]
    members = tuple(islice(_members(run, cluster), MOST_MEMBERS + 1))
    return LeaderAnswer(
        interval_s=interval_s,
        members=members[:MOST_MEMBERS],
        complete=cluster.complete and len(members) <= MOST_MEMBERS,
        lost_nodes=tuple(node for node in nodes if cluster.is_node_gone(node)),
        policy=_policy(run, run.policy) if run.policy is not None else None,
        pins=tuple(parse_steps(spec.pins)) if spec is not None else (),
        restore_from=spec.restore_from if spec is not None else "",
        fresh_start=spec.fresh_start if spec is not None else "",
        paused=spec is not None and spec.paused,
        agents={node: cluster.agents[node] for node in nodes if node in cluster.agents},
        authorities=authorities,
        record=record if begins else None,
    )


def leader_pod(run: Run) -> PodRecord | None:
    """The pod that leads: of the members with node rank 0, one that stays before one that ends,
    then the oldest. So of two that stay, one alone leads."""
    pods = [pod for pod in run.job_pods if pod.node_rank == 0 and pod.injected and not pod.over]
    return min(pods, key=lambda pod: (not pod.is_active, pod.created_at, pod.uid), default=None)


def _members(run: Run, cluster: ClusterFacts) -> Iterator[MemberPod]:
    """By node rank. A pod without a node has nothing and is not named."""
    key = run.policy.peers.topology_key if run.policy and run.policy.peers else HOSTNAME
    pods = [pod for pod in run.job_pods if pod.injected and pod.node]
    for pod in sorted(pods, key=lambda pod: (pod.node_rank, pod.created_at)):
        yield MemberPod(
            node_rank=pod.node_rank,
            pod=pod.uid,
            name=pod.name,
            node=pod.node,
            address=pod.address,
            domain=cluster.domain(pod.node, key),
            leaving=pod.deleting,
            over=pod.over,
        )


def _policy(run: Run, policy: Policy) -> RunPolicy:
    return RunPolicy(
        keep=policy.keep,
        outlives_pod=run.volumes_outlive_pod,
        replicas=policy.peers.replicas if policy.peers is not None else 0,
        persist_every=policy.persist_every,
        archive_every=policy.archive.every if policy.archive is not None else None,
        restarts=policy.on_loss is OnLoss.RESTART,
    )
