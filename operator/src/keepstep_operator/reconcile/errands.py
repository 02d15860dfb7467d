"""Passes the core's actions to the parts that carry them out, without waiting for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

from keepstep_operator import names
from keepstep_operator.api.job_kinds import kind_of
from keepstep_operator.api.model import Job, JobState, PolicyRecord, RunKey
from keepstep_operator.api.pod import controller_of
from keepstep_operator.api.run import utc
from keepstep_operator.bodies import Body
from keepstep_operator.journal import crash, say, warn
from keepstep_operator.kube import (
    POLICIES,
    RUNS,
    Client,
    Conflict,
    Denied,
    KubeError,
    NotFound,
    PatchType,
    resource_of,
)
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.parsing import (
    job_state,
)
from keepstep_operator.reconcile.state.actions import (
    Action,
    AskJob,
    DeleteRun,
    EmitEvent,
    FindOwner,
    NameFreshStart,
    WriteStatus,
)
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.reconcile.writers.checkpoint_writer import CheckpointWriter
from keepstep_operator.reconcile.writers.events import EventWriter
from keepstep_operator.reconcile.writers.status_writer import StatusWriter

_TRIES: Final = 5
_PAUSE_S: Final = 2.0
_AT_ONCE: Final = 4
"""How many requests about jobs, and deletions of runs, may be under way at a time."""


class Errands:
    """Carries out actions. `group`: owns the tasks for that."""

    def __init__(
        self,
        registry: Registry,
        client: Client,
        *,
        writer: StatusWriter,
        checkpoint_writer: CheckpointWriter,
        event_writer: EventWriter,
        metrics: Metrics,
        group: asyncio.TaskGroup,
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._client = client
        self._writer = writer
        self._checkpoint_writer = checkpoint_writer
        self._event_writer = event_writer
        self._metrics = metrics
        self._group = group
        self._clock = clock
        self._asking = asyncio.Semaphore(_AT_ONCE)
        self._under_way: set[tuple[type[Action], RunKey]] = set()
        self._running: set[asyncio.Task[None]] = set()

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Pass each action to the part that carries it out. Returns at once."""
        for action in actions:
            if isinstance(action, WriteStatus):
                self._writer.mark(action.run, soon=action.soon)
                self._checkpoint_writer.mark(action.run)
            elif isinstance(action, EmitEvent):
                self._event_writer.tell(action)
            elif isinstance(action, AskJob):
                self._spawn(self._ask_job(action), f"look at the job of {action.run}")
            elif isinstance(action, FindOwner):
                self._spawn(self._find_owner(action), f"look for what made {action.job.name}")
            elif isinstance(action, DeleteRun):
                self._spawn(self._delete_run(action), f"delete {action.run}")
            elif isinstance(action, NameFreshStart):
                said = {names.FRESH_START_ANNOTATION: str(action.epoch)}
                self._spawn(self._annotate(action.run, said), f"annotate {action.run}")
            else:
                said = {names.LAST_CHECKPOINT_ANNOTATION: utc(action.at)}
                self._spawn(self._annotate(action.run, said), f"annotate {action.run}")

    def write_policy_status(self, policy: PolicyRecord, status: Body) -> None:
        """Write a policy's status, which says whether it is accepted."""
        work = self._write_policy_status(policy, status)
        self._spawn(work, f"status of policy {policy.namespace}/{policy.name}")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._group.create_task(_guarded(work, name), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def stop(self) -> None:
        """Cancel all errands under way."""
        for task in self._running:
            task.cancel()

    @asynccontextmanager
    async def _one_of_few(self, action: AskJob | FindOwner | DeleteRun) -> AsyncIterator[bool]:
        """Yields whether to do this errand. It is skipped while the same one is under way: each
        tick asks for it again, even while a slow API server holds up an earlier request."""
        key = type(action), action.run
        if key in self._under_way:
            yield False
            return
        self._under_way.add(key)
        try:
            async with self._asking:
                yield True
        finally:
            self._under_way.discard(key)

    async def _ask_job(self, action: AskJob) -> None:
        async with self._one_of_few(action) as is_due:
            if not is_due:
                return
            state = await asked(self._client, action)
        self.carry_out(self._registry.job_answered(action.run, state, at=self._clock()))

    async def _find_owner(self, action: FindOwner) -> None:
        async with self._one_of_few(action) as is_due:
            if not is_due:
                return
            owner = await owner_of(self._client, action)
        self.carry_out(self._registry.owner_found(action.run, action.job, owner))

    async def _delete_run(self, action: DeleteRun) -> None:
        run = action.run
        async with self._one_of_few(action) as is_due:
            known = self._registry.runs.get(run)
            if not is_due or known is None or known.object is None:
                return
            try:
                await self._client.delete(
                    RUNS,
                    run.name,
                    namespace=run.namespace,
                    uid=known.object.uid,
                    version=known.object.version,
                )
            except (NotFound, Conflict):  # also if it was written since, or is another one
                return
        self._metrics.wrote("run")
        say("run deleted", run=str(run), reason="finished for its policy's runTTL")

    async def _annotate(self, run: RunKey, said: dict[str, str]) -> None:
        patch = {"metadata": {"annotations": said}}
        await self._patiently(
            lambda: self._client.patch(RUNS, run.name, patch, namespace=run.namespace), "other"
        )
        if names.FRESH_START_ANNOTATION in said:
            say("fresh start acknowledged", run=str(run), epoch=said[names.FRESH_START_ANNOTATION])

    async def _write_policy_status(self, policy: PolicyRecord, status: Body) -> None:
        await self._patiently(
            lambda: self._client.patch(
                POLICIES,
                policy.name,
                [{"op": "add", "path": "/status", "value": status}],
                namespace=policy.namespace,
                kind=PatchType.JSON,
                subresource="status",
            ),
            "policy",
        )

    async def _patiently(self, write: Callable[[], Coroutine[Any, Any, object]], what: str) -> None:
        """Write, and retry a few times while the API server does not answer."""
        for attempt in range(1, _TRIES):
            if await self._try(write, what):
                return
            await asyncio.sleep(_PAUSE_S * attempt)
        await self._try(write, what)

    async def _try(self, write: Callable[[], Coroutine[Any, Any, object]], what: str) -> bool:
        """Returns whether it is settled: it is written, or the object is gone."""
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
    """Log failures. What was left undone is asked for again after a later event."""
    try:
        await work
    except KubeError as error:
        warn("errand failed", errand=name, reason=str(error))
    except Exception:
        crash("errand failed", errand=name)


async def asked(client: Client, action: AskJob) -> JobState:
    """The state of the job. Raises KubeError."""
    job, resource = action.job, resource_of(action.job)
    if resource is None:
        return JobState.UNKNOWN
    try:
        body = await client.get(resource, job.name, namespace=action.run.namespace)
    except NotFound as error:
        # a 404 without a reason: the version is not served, which says nothing of the job
        return JobState.GONE if error.reason else JobState.UNKNOWN
    except Denied:
        # We may not read this kind. The job may be suspended or scaled to zero, and its steps must
        # outlast that. A run whose pods all succeeded is finished without asking.
        return JobState.UNKNOWN
    if job.uid and (body.get("metadata") or {}).get("uid") != job.uid:
        return JobState.GONE
    return job_state(body)


async def owner_of(client: Client, action: FindOwner) -> Job | None:
    """The owner of this job, if it is of the kind that may own it. Raises KubeError."""
    job, resource = action.job, resource_of(action.job)
    kind = kind_of(job.api_version, job.kind)
    if resource is None or kind is None:
        return None
    try:
        body = await client.get(resource, job.name, namespace=action.run.namespace)
    except (NotFound, Denied):
        return None
    metadata = body.get("metadata") or {}
    if metadata.get("uid") != job.uid:
        return None
    owner = controller_of(metadata.get("ownerReferences") or [])
    above = kind_of(owner.api_version, owner.kind) if owner is not None else None
    if owner is None or above is None or (above.group, above.kind) != kind.owner:
        return None
    return owner
