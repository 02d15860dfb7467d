"""What happens when the cluster changes: the feeds put objects into the registry. Nothing waits
inside a feed.

Pods are selected by the label that admission sets on all pods that it was asked about: "true" if it
gave them a sidecar, "refused" if it did not. Pods that admission never saw have no label.
`Uninjected` looks for them now and then, instead of watching the pods of all jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from keepstep_operator import names
from keepstep_operator.api.model import PolicyRecord, RunKey
from keepstep_operator.bodies import Body
from keepstep_operator.journal import crash, warn
from keepstep_operator.kube import (
    NODES,
    PODS,
    POLICIES,
    RUNS,
    Client,
    Feed,
    KubeError,
    NotFound,
)
from keepstep_operator.reconcile.errands import Errands
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.parsing import (
    asks,
    parse_agent,
    parse_node,
    parse_pod_record,
    parse_policy_record,
    parse_run_object,
)
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.reconcile.status.policy_status import policy_status, problem_event
from keepstep_operator.reconcile.writers.mends import Mends
from keepstep_operator.reconcile.writers.status_writer import StatusWriter

_UNINJECTED: Final = (
    f"!{names.INJECTED_LABEL},training.kubeflow.org/job-name",
    f"!{names.INJECTED_LABEL},batch.kubernetes.io/job-name",
)
"""Selects pods that admission did not see: pods of PyTorchJobs, and of Jobs (a JobSet and a
TrainJob consist of Jobs). Pods of other kinds of jobs have no label by which the server could
select them."""
_LIVING: Final = "status.phase!=Succeeded,status.phase!=Failed"
UNINJECTED_S: Final = 20.0
_AGAIN_S: Final = 3.0


class Handlers:
    """The feeds, and what each does to the registry."""

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
        self._policies: dict[RunKey, tuple[PolicyRecord, Body]] = {}
        """Each policy with the status that was written last."""
        self._mends = Mends[RunKey](self._mend_policy)

    def objects(self) -> list[Feed[Any]]:
        """The feeds of policies and runs. They must be loaded before a report is taken in:
        otherwise a restart that was counted already would be counted again."""
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

    def pods(self) -> Feed[str]:
        """The feed of the pods that admission was asked about."""
        return Feed[str](
            name="pods",
            resource=PODS,
            labels=names.INJECTED_LABEL,
            key_of=_uid_if_ours,
            seen=self.pod_seen,
            gone=self.pod_gone,
            told=self._metrics.following,
        )

    def agents(self, namespace: str) -> Feed[str]:
        """The feed of the agents of nodes, in the namespace of this process: nobody else may make
        pods there."""
        return Feed[str](
            name="agents",
            resource=PODS,
            labels=names.AGENT_LABEL,
            namespace=namespace,
            key_of=lambda body: str((body.get("metadata") or {}).get("uid") or "") or None,
            seen=lambda body: self._registry.agent_seen(parse_agent(body)),
            gone=self._registry.agent_gone,
            told=self._metrics.following,
        )

    def nodes(self) -> Feed[str]:
        """The feed of nodes: their zones, and whether they are being drained."""
        return Feed[str](
            name="nodes",
            resource=NODES,
            key_of=lambda body: str((body.get("metadata") or {}).get("name") or "") or None,
            seen=lambda body: self._registry.node_seen(parse_node(body)),
            gone=self._registry.node_gone,
            told=self._metrics.following,
        )

    def pod_seen(self, body: Body) -> None:
        """A pod exists or has changed."""
        pod = parse_pod_record(body)
        if pod is not None:
            self._errands.carry_out(self._registry.pod_seen(pod, at=self._clock()))

    def pod_gone(self, uid: str) -> None:
        """The pod no longer exists."""
        self._errands.carry_out(self._registry.pod_gone(uid, at=self._clock()))

    def _policy_seen(self, body: Body) -> None:
        policy = parse_policy_record(body, allowed_paths=self._host_paths)
        self._errands.carry_out(self._registry.policy_seen(policy))
        key, shown = RunKey(policy.namespace, policy.name), body.get("status") or {}
        _, told = self._policies.get(key, (policy, shown))
        status = policy_status(policy, told, at=self._clock())
        self._policies[key] = policy, told if status is None else status
        if status is not None:
            self._errands.write_policy_status(policy, status)
            event = problem_event(policy)
            self._errands.carry_out([event] if event is not None else [])
        self._mends.compared(key, same=shown == (status or told))

    def _mend_policy(self, key: RunKey) -> None:
        self._errands.write_policy_status(*self._policies[key])

    def _policy_gone(self, key: RunKey) -> None:
        self._policies.pop(key, None)
        self._mends.forget(key)
        self._errands.carry_out(self._registry.policy_gone(key.namespace, key.name))

    def _run_seen(self, body: Body) -> None:
        run = parse_run_object(body)
        self._writer.shown(run.key, run.status)
        self._errands.carry_out(self._registry.object_seen(run, at=self._clock()))

    def _run_gone(self, key: RunKey) -> None:
        self._writer.forget(key)
        self._errands.carry_out(self._registry.object_gone(key))


class Uninjected:
    """Looks for pods that ask for keepstep, have not ended, and were created while admission did
    not answer. Only metadata is listed, so that the pods of others take no memory."""

    def __init__(self, handlers: Handlers, client: Client) -> None:
        self._handlers = handlers
        self._client = client
        self._known: set[str] = set()

    async def run(self) -> None:
        """Look every `UNINJECTED_S`, for ever."""
        while True:
            wait_s = UNINJECTED_S
            try:
                await self._look()
            except KubeError as error:
                warn("pods without a sidecar not looked for", reason=str(error))
                wait_s = max(_AGAIN_S, error.retry_after_s)
            except Exception:  # one odd pod must not end the process
                crash("pods without a sidecar not looked for")
            await asyncio.sleep(wait_s)

    async def _look(self) -> None:
        found: dict[str, Body] = {}
        for labels in _UNINJECTED:
            async for one in self._client.names(PODS, labels=labels, fields=_LIVING):
                if (uid := _uid_if_ours(one)) is not None:
                    found[uid] = one["metadata"]
        for uid in self._known - set(found):
            self._handlers.pod_gone(uid)
        self._known &= set(found)
        for uid in set(found) - self._known:
            await self._show(found[uid])
            self._known.add(uid)

    async def _show(self, metadata: Body) -> None:
        name, namespace = str(metadata["name"]), str(metadata["namespace"])
        try:
            self._handlers.pod_seen(await self._client.get(PODS, name, namespace=namespace))
        except NotFound:
            return  # deleted since: the next look handles it


def _named(body: Body) -> RunKey:
    metadata = body.get("metadata") or {}
    return RunKey(str(metadata.get("namespace") or ""), str(metadata.get("name") or ""))


def _uid_if_ours(body: Body) -> str | None:
    """The uid of a pod that asks for keepstep; None for others, which are not even remembered."""
    return str(body["metadata"]["uid"]) if asks(body) else None
