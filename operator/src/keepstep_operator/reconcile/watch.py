"""What is done when the cluster changes: the feeds put objects into the registry. Nothing waits
inside a feed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from keepstep_operator import names
from keepstep_operator.api.model import RunKey
from keepstep_operator.bodies import Body
from keepstep_operator.kube import (
    NODES,
    PODS,
    POLICIES,
    RUNS,
)
from keepstep_operator.reconcile.errands import Errands
from keepstep_operator.reconcile.feed import Feed
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.parsing import (
    asks,
    parse_node,
    parse_pod_record,
    parse_policy_record,
    parse_run_object,
)
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.reconcile.status.policy_status import policy_status, problem_event
from keepstep_operator.reconcile.writers.status_writer import StatusWriter

INJECTED: Final = names.INJECTED_LABEL
UNINJECTED: Final = (
    f"!{names.INJECTED_LABEL},training.kubeflow.org/job-name",
    f"!{names.INJECTED_LABEL},batch.kubernetes.io/job-name",
)
"""Pods of the known kinds of job (a JobSet's and a TrainJob's are a Job's): a label selector cannot
look at the annotation, so these are looked through."""


class Handlers:
    """The feeds, and what each of them does to the registry."""

    def __init__(
        self,
        registry: Registry,
        errands: Errands,
        *,
        writer: StatusWriter,
        metrics: Metrics,
        host_paths: tuple[str, ...],
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._errands = errands
        self._writer = writer
        self._metrics = metrics
        self._host_paths = host_paths
        self._clock = clock

    def objects(self) -> list[Feed[Any]]:
        """Policies and runs: must be loaded before a report is taken in, or a restart that was
        counted would be counted again."""
        told = self._metrics.following
        return [
            Feed[RunKey](
                name="policies",
                resource=POLICIES,
                key_of=_named,
                seen=self._policy_seen,
                gone=self._policy_gone,
                told=told,
            ),
            Feed[RunKey](
                name="runs",
                resource=RUNS,
                key_of=_named,
                seen=self._run_seen,
                gone=self._run_gone,
                told=told,
            ),
        ]

    def pods(self) -> list[Feed[str]]:
        """Pods with a sidecar, and pods of jobs that should have one."""
        return [
            Feed[str](
                name=name,
                resource=PODS,
                labels=labels,
                key_of=_uid_if_ours,
                seen=self._pod_seen,
                gone=self._pod_gone,
                told=self._metrics.following,
            )
            for name, labels in (
                ("pods", INJECTED),
                ("pods of PyTorchJobs", UNINJECTED[0]),
                ("pods of Jobs", UNINJECTED[1]),
            )
        ]

    def nodes(self) -> Feed[str]:
        """Which zone a node is in, and whether it is about to go."""
        return Feed[str](
            name="nodes",
            resource=NODES,
            key_of=lambda body: str((body.get("metadata") or {}).get("name") or "") or None,
            seen=lambda body: self._registry.node_seen(parse_node(body)),
            gone=self._registry.node_gone,
            told=self._metrics.following,
        )

    def _pod_seen(self, body: Body) -> None:
        pod = parse_pod_record(body)
        if pod is not None:
            self._errands.carry_out(self._registry.pod_seen(pod, at=self._clock()))

    def _pod_gone(self, uid: str) -> None:
        self._errands.carry_out(self._registry.pod_gone(uid, at=self._clock()))

    def _policy_seen(self, body: Body) -> None:
        policy = parse_policy_record(body, allowed_paths=self._host_paths)
        self._errands.carry_out(self._registry.policy_seen(policy))
        status = policy_status(policy, body.get("status") or {}, at=self._clock())
        if status is not None:
            self._errands.write_policy_status(policy, status)
            event = problem_event(policy)
            self._errands.carry_out([event] if event is not None else [])

    def _policy_gone(self, key: RunKey) -> None:
        self._errands.carry_out(self._registry.policy_gone(key.namespace, key.name))

    def _run_seen(self, body: Body) -> None:
        self._errands.carry_out(
            self._registry.object_seen(parse_run_object(body), at=self._clock())
        )

    def _run_gone(self, key: RunKey) -> None:
        self._writer.forget(key)
        self._errands.carry_out(self._registry.object_gone(key))


def _named(body: Body) -> RunKey:
    metadata = body.get("metadata") or {}
    return RunKey(str(metadata.get("namespace") or ""), str(metadata.get("name") or ""))


def _uid_if_ours(body: Body) -> str | None:
    """Only pods that ask for keepstep; the others are not even remembered."""
    return str(body["metadata"]["uid"]) if asks(body) else None
