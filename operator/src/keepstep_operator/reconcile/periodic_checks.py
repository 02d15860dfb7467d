"""What no watch tells, looked at now and then: pods that admission never saw, agents of nodes, what
vanished while a watch was interrupted, jobs that may be over, and what becomes true by waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Final

from keepstep_operator import names
from keepstep_operator.api.cluster_objects import RunKey
from keepstep_operator.kube.client import KubeClient
from keepstep_operator.kube.errors import KubeError, NotFound
from keepstep_operator.kube.resources import PODS, RUNS
from keepstep_operator.log import crash, warn
from keepstep_operator.object_body import Body
from keepstep_operator.reconcile.events import recurring_events
from keepstep_operator.reconcile.job_state import read_job_state, read_parent_of_job
from keepstep_operator.reconcile.parsing import (
    asks_for_keepstep,
    parse_agent_pod,
    parse_pod_record,
    parse_run_object,
)
from keepstep_operator.reconcile.run_registry import RunRegistry
from keepstep_operator.reconcile.run_transitions import (
    Run,
    is_expired,
    job_answered,
    needs_job_check,
    owner_found,
)

_UNINJECTED: Final = (
    f"!{names.INJECTED_LABEL},training.kubeflow.org/job-name",
    f"!{names.INJECTED_LABEL},batch.kubernetes.io/job-name",
)
"""Selects pods that admission did not see: pods of PyTorchJobs, and of Jobs (a JobSet and a
TrainJob consist of Jobs). Pods of other kinds of jobs have no label by which the server could
select them."""
_LIVING: Final = "status.phase!=Succeeded,status.phase!=Failed"
CHECK_S: Final = 20.0
SWEEP_S: Final = 600.0
TICK_S: Final = 15.0
LATE_S: Final = 45.0
"""From a leader's last report on, its run is looked at although nothing happens."""
_AGAIN_S: Final = 2.0
JOB_S: Final = 30.0


class PeriodicChecks:
    """The rounds of one operator. `namespace`: of this process, where agents are. `agents`: whether
    the chart installs them."""

    def __init__(
        self, registry: RunRegistry, client: KubeClient, *, namespace: str, agents: bool
    ) -> None:
        self._registry = registry
        self._client = client
        self._namespace = namespace
        self._agents = agents
        self._uninjected: set[str] = set()
        self._asked: dict[RunKey, float] = {}

    async def load_runs_and_pods(self) -> None:
        """Take in all runs and pods that exist, however long the API server is away: then nothing
        is taken for gone that kopf has not shown yet."""
        while not self._registry.cluster.complete:
            await self._tried(self._list, "what exists")
            await asyncio.sleep(_AGAIN_S if not self._registry.cluster.complete else 0.0)

    async def _list(self) -> None:
        async for body in self._client.list(RUNS):
            self._registry.run_object_seen(parse_run_object(body))
        async for body in self._client.list(PODS, labels=names.INJECTED_LABEL):
            if (pod := parse_pod_record(body)) is not None:
                self._registry.pod_seen(pod)
        self._registry.cluster = replace(self._registry.cluster, complete=True)

    async def run_check_loop(self) -> None:
        """Look at what has no watch each `CHECK_S`, and at all names each `SWEEP_S`; for ever."""
        swept = self._registry.clock()
        while True:
            await self._tried(self._find_uninjected, "pods without a sidecar")
            if self._agents:
                await self._tried(self._find_agents, "agents of nodes")
            if self._registry.clock() - swept >= SWEEP_S:
                swept = self._registry.clock()
                await self._tried(self._sweep, "what vanished")
            await asyncio.sleep(CHECK_S)

    async def run_lateness_loop(self) -> None:
        """Mark the runs whose leader is late each `TICK_S`, and ask about jobs; for ever."""
        registry = self._registry
        while True:
            await asyncio.sleep(TICK_S)
            for run in [*registry.runs.values()]:
                for event in recurring_events(run, registry.cluster, now=registry.clock()):
                    registry.emit(run, event)
                late = registry.clock() - run.reported_at > LATE_S
                if late and run.finished_at is None:
                    registry.mark(run.key)
                await self._tried(partial(self._ask_about, run), "jobs")

    async def _tried(self, work: Callable[[], Awaitable[None]], what: str) -> None:
        try:
            await work()
        except KubeError as error:
            warn("kubernetes.check_failed", resource=what, error=str(error))
        except Exception:  # one odd object must not end the process
            crash("kubernetes.check_crashed", resource=what)

    # --- pods and runs -----------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Forget what vanished while kopf listed anew, as that gives no event."""
        registry = self._registry
        pods_before = {*registry.pod_uids}
        runs_before = {key for key, run in registry.runs.items() if run.object is not None}
        listed = self._client.list_metadata(PODS, labels=names.INJECTED_LABEL)
        pods = {pod["metadata"]["uid"] async for pod in listed}
        found = [run["metadata"] async for run in self._client.list_metadata(RUNS)]
        runs = {RunKey(run["namespace"], run["name"]) for run in found}
        for uid in pods_before - pods - self._uninjected:
            registry.pod_gone(uid)
        for key in runs_before - runs:
            registry.run_object_gone(key)

    async def _find_uninjected(self) -> None:
        """Pods that ask for keepstep, have not ended, and were created while admission did not
        answer. Only metadata is listed, so that the pods of others take no memory."""
        found: dict[str, Body] = {}
        for labels in _UNINJECTED:
            async for name in self._client.list_metadata(PODS, labels=labels, fields=_LIVING):
                if asks_for_keepstep(name):
                    found[name["metadata"]["uid"]] = name["metadata"]
        for uid in self._uninjected - set(found):
            self._registry.pod_gone(uid)
        self._uninjected &= set(found)
        for uid in set(found) - self._uninjected:
            self._uninjected.add(uid)
            await self._show(found[uid])

    async def _show(self, metadata: Body) -> None:
        name, namespace = str(metadata["name"]), str(metadata["namespace"])
        try:
            body = await self._client.get(PODS, name, namespace=namespace)
        except NotFound:
            return  # deleted since: the next look handles it
        if (pod := parse_pod_record(body)) is not None:
            self._registry.pod_seen(pod)

    async def _find_agents(self) -> None:
        """The agents of nodes. Only the chart makes pods in their namespace."""
        labels = names.AGENT_LABEL
        listed = self._client.list(PODS, namespace=self._namespace, labels=labels)
        records = [parse_agent_pod(body) async for body in listed]
        agents = {record.node: record.address for record in records if record.node}
        self._registry.cluster = replace(self._registry.cluster, agents=agents)

    # --- jobs --------------------------------------------------------------------------------

    async def _ask_about(self, run: Run) -> None:
        """Find out what made the pods' job, whether the job is over, and whether the run's object
        has been there for long enough."""
        registry, now = self._registry, self._registry.clock()
        if run.has_no_objects or now - self._asked.get(run.key, 0.0) < JOB_S:
            return
        if not run.owner_known and (job := run.job_of_pods) is not None:
            owner = await read_parent_of_job(self._client, job, run.key.namespace)
            registry.change(run.key, partial(owner_found, job=job, owner=owner))
        elif needs_job_check(run) and (job := run.job) is not None:
            self._asked[run.key] = now
            state = await read_job_state(self._client, job, run.key.namespace)
            registry.change(run.key, lambda run: job_answered(run, state, at=registry.clock()))
        elif is_expired(run, now) and run.object is not None:
            uid, namespace = run.object.uid, run.key.namespace
            await self._client.delete(RUNS, run.key.name, namespace=namespace, uid=uid)
            self._asked.pop(run.key, None)
