"""What is done when the cluster changes, and how the core's actions are carried out.

The feeds put objects into the book; `Errands.obey` takes the actions that come back to whoever does
them. Nothing waits inside a feed: what needs the API server is a task of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

from keepstep_operator import names
from keepstep_operator.bodies import Body
from keepstep_operator.journal import crash, say, warn
from keepstep_operator.kube import (
    NODES,
    PODS,
    POLICIES,
    RUNS,
    Client,
    Denied,
    KubeError,
    NotFound,
    Resource,
)
from keepstep_operator.reconcile.actions import (
    Action,
    AskJob,
    DeleteRun,
    EmitEvent,
    NameFreshStart,
    WriteStatus,
)
from keepstep_operator.reconcile.book import Book
from keepstep_operator.reconcile.events import Teller
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.parsing import (
    job_state,
    parse_node,
    parse_pod_record,
    parse_policy_record,
    parse_run_object,
)
from keepstep_operator.reconcile.policies import policy_status, problem_event
from keepstep_operator.reconcile.records import JobState, PolicyRecord, RunKey
from keepstep_operator.reconcile.shelf import Shelf
from keepstep_operator.reconcile.watching import Feed
from keepstep_operator.reconcile.writer import Writer

INJECTED: Final = names.INJECTED_LABEL
UNINJECTED: Final = (
    f"!{names.INJECTED_LABEL},training.kubeflow.org/job-name",
    f"!{names.INJECTED_LABEL},batch.kubernetes.io/job-name",
)
"""Pods of the known kinds of job (a JobSet's and a TrainJob's are a Job's): a label selector cannot
look at the annotation, so these are looked through."""

_TRIES: Final = 5
_PAUSE_S: Final = 2.0
_JOBS_AT_ONCE: Final = 4
_PLURALS: Final = {
    "Job": "jobs",
    "JobSet": "jobsets",
    "PyTorchJob": "pytorchjobs",
    "TrainJob": "trainjobs",
    "Pod": "pods",
}


class Errands:
    """Carries out actions. `group`: owns the tasks."""

    def __init__(
        self,
        book: Book,
        client: Client,
        *,
        writer: Writer,
        shelf: Shelf,
        teller: Teller,
        metrics: Metrics,
        group: asyncio.TaskGroup,
        clock: Callable[[], float],
    ) -> None:
        self._book = book
        self._client = client
        self._writer = writer
        self._shelf = shelf
        self._teller = teller
        self._metrics = metrics
        self._group = group
        self._clock = clock
        self._asking = asyncio.Semaphore(_JOBS_AT_ONCE)
        self._running: set[asyncio.Task[None]] = set()

    def obey(self, actions: Iterable[Action]) -> None:
        """Take each action to whoever does it; returns at once."""
        for action in actions:
            if isinstance(action, WriteStatus):
                self._writer.mark(action.run)
                self._shelf.mark(action.run)
            elif isinstance(action, EmitEvent):
                self._teller.tell(action)
            elif isinstance(action, AskJob):
                self._spawn(self._ask_job(action), f"look at the job of {action.run}")
            elif isinstance(action, DeleteRun):
                self._spawn(self._delete_run(action.run), f"delete {action.run}")
            else:
                self._spawn(self._name_fresh_start(action), f"annotate {action.run}")

    def write_policy_status(self, policy: PolicyRecord, status: Body) -> None:
        """Say whether a policy is accepted."""
        work = self._write_policy_status(policy, status)
        self._spawn(work, f"status of policy {policy.namespace}/{policy.name}")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._group.create_task(_guarded(work, name), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def stop(self) -> None:
        """Leave off what is under way."""
        for task in self._running:
            task.cancel()

    async def _ask_job(self, action: AskJob) -> None:
        async with self._asking:
            state = await asked(self._client, action)
        self.obey(self._book.job_answered(action.run, state, at=self._clock()))

    async def _delete_run(self, run: RunKey) -> None:
        try:
            await self._client.delete(RUNS, run.name, namespace=run.namespace)
            self._metrics.wrote("run")
            say("run deleted", run=str(run), reason="finished for its policy's runTTL")
        except NotFound:
            return

    async def _name_fresh_start(self, action: NameFreshStart) -> None:
        patch = {"metadata": {"annotations": {names.FRESH_START_ANNOTATION: str(action.epoch)}}}
        await self._patiently(
            lambda: self._client.patch(
                RUNS, action.run.name, patch, namespace=action.run.namespace
            ),
            "other",
        )
        say("fresh start acknowledged", run=str(action.run), epoch=str(action.epoch))

    async def _write_policy_status(self, policy: PolicyRecord, status: Body) -> None:
        await self._patiently(
            lambda: self._client.patch(
                POLICIES,
                policy.name,
                {"status": status},
                namespace=policy.namespace,
                subresource="status",
            ),
            "policy",
        )

    async def _patiently(self, write: Callable[[], Coroutine[Any, Any, object]], what: str) -> None:
        """Try again a few times while the API server does not answer."""
        for attempt in range(1, _TRIES):
            if await self._try(write, what):
                return
            await asyncio.sleep(_PAUSE_S * attempt)
        await self._try(write, what)

    async def _try(self, write: Callable[[], Coroutine[Any, Any, object]], what: str) -> bool:
        """Whether it is settled: written, or the object is gone."""
        try:
            await write()
        except NotFound:
            return True
        except KubeError as error:
            warn("not written", what=what, reason=str(error))
            self._metrics.wrote(what, failed=True)
            return False
        self._metrics.wrote(what)
        return True


async def _guarded(work: Coroutine[Any, Any, None], name: str) -> None:
    """A failure is logged; what it left undone is asked for again by a later event."""
    try:
        await work
    except KubeError as error:
        warn("errand failed", errand=name, reason=str(error))
    except Exception:
        crash("errand failed", errand=name)


class Handlers:
    """The feeds, and what each of them does to the book."""

    def __init__(
        self,
        book: Book,
        errands: Errands,
        *,
        writer: Writer,
        metrics: Metrics,
        host_paths: tuple[str, ...],
        clock: Callable[[], float],
    ) -> None:
        self._book = book
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
            seen=lambda body: self._book.node_seen(parse_node(body)),
            gone=self._book.node_gone,
            told=self._metrics.following,
        )

    def _pod_seen(self, body: Body) -> None:
        pod = parse_pod_record(body)
        if pod is not None:
            self._errands.obey(self._book.pod_seen(pod, at=self._clock()))

    def _pod_gone(self, uid: str) -> None:
        self._errands.obey(self._book.pod_gone(uid, at=self._clock()))

    def _policy_seen(self, body: Body) -> None:
        policy = parse_policy_record(body, allowed_paths=self._host_paths)
        self._errands.obey(self._book.policy_seen(policy))
        status = policy_status(policy, body.get("status") or {}, at=self._clock())
        if status is not None:
            self._errands.write_policy_status(policy, status)
            event = problem_event(policy)
            self._errands.obey([event] if event is not None else [])

    def _policy_gone(self, key: RunKey) -> None:
        self._errands.obey(self._book.policy_gone(key.namespace, key.name))

    def _run_seen(self, body: Body) -> None:
        self._errands.obey(self._book.object_seen(parse_run_object(body), at=self._clock()))

    def _run_gone(self, key: RunKey) -> None:
        self._writer.forget(key)
        self._errands.obey(self._book.object_gone(key))


def _named(body: Body) -> RunKey:
    metadata = body.get("metadata") or {}
    return RunKey(str(metadata.get("namespace") or ""), str(metadata.get("name") or ""))


def _uid_if_ours(body: Body) -> str | None:
    """Only pods that ask for keepstep; the others are not even remembered."""
    metadata = body.get("metadata") or {}
    asks = names.POLICY_ANNOTATION in (metadata.get("annotations") or {})
    injected = names.INJECTED_LABEL in (metadata.get("labels") or {})
    return str(metadata["uid"]) if asks or injected else None


async def asked(client: Client, action: AskJob) -> JobState:
    """What has become of the job. Raises KubeError."""
    job = action.job
    group, _, version = job.api_version.rpartition("/")
    plural = _PLURALS.get(job.kind, f"{job.kind.lower()}s")
    resource = Resource(group=group, version=version, plural=plural)
    try:
        body = await client.get(resource, job.name, namespace=action.run.namespace)
    except NotFound:
        return JobState.GONE
    except Denied:
        # of a kind that we may not read. It may be suspended or scaled to nothing: what it left
        # must outlast that. A run whose pods all succeeded is finished without asking
        return JobState.ACTIVE
    if job.uid and (body.get("metadata") or {}).get("uid") != job.uid:
        return JobState.GONE
    return job_state(body)
