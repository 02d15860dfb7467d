"""Writes what runs show: statuses, Checkpoint objects, Services and Events.

A run that is marked is rendered, and written if that differs from what was written. A change that a
person waits for is written at once, numbers alone each `RunRegistry.report_interval_s`. One write
replaces the whole status (a JSON patch), so a lost write is made good by the next. What fails is
tried again with the next report, or round.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from cachetools import TTLCache

from keepstep.wire.run_reports import KeptStep
from keepstep_operator import names
from keepstep_operator.api.cluster_objects import RunKey
from keepstep_operator.api.leader_service import service_body
from keepstep_operator.api.run_status import RunStatus, status_json
from keepstep_operator.kube.client import KubeClient
from keepstep_operator.kube.errors import Conflict, KubeError, NotFound
from keepstep_operator.kube.resources import (
    CHECKPOINTS,
    EVENTS,
    RUNS,
    SERVICES,
    PatchType,
    Resource,
)
from keepstep_operator.log import crash, info, warn
from keepstep_operator.object_body import Body
from keepstep_operator.reconcile import checkpoints
from keepstep_operator.reconcile.events import KubernetesEvent, event_bodies
from keepstep_operator.reconcile.metrics import ReconcileMetrics
from keepstep_operator.reconcile.render import render_status
from keepstep_operator.reconcile.run_registry import RunRegistry
from keepstep_operator.reconcile.run_transitions import Run

LIST_S: Final = 600.0
"""How often a run's Checkpoint objects are listed at least. Deleted ones are then made again."""
_REPAIR_S: Final = 10.0
"""A status that others wrote is written again after this time: two writers that disagree must not
make a loop, and a watch that is late is no reason to write."""
_AT_ONCE: Final = 8
_PAUSE_S: Final = 0.25
_MOST_EVENTS: Final = 1000
_MOST_EMITTED: Final = 20_000


@dataclass
class _Written:
    """What is known of the objects of one run. `stored`, `shown`: digests of the status as the API
    server stored it, and as the watch showed it last. `service`: the UID of the CheckpointRun that
    owns the run's Service. `kept`: a digest of the steps for which there are Checkpoint objects, as
    of `listed_at`."""

    at: float = 0.0
    stored: bytes = b""
    shown: bytes = b""
    service: str = ""
    listed_at: float = 0.0
    kept: int = 0


class ObjectWriter:
    """Writes the runs that are `mark_run_changed`ed, and the events that are given to `emit`."""

    def __init__(
        self, registry: RunRegistry, client: KubeClient, *, metrics: ReconcileMetrics
    ) -> None:
        self._registry = registry
        self._client = client
        self._metrics = metrics
        self._written: dict[RunKey, _Written] = {}
        self._due: set[RunKey] = set()
        self._bell = asyncio.Event()
        self._steps: dict[RunKey, None] = {}
        """Runs whose Checkpoint objects are to be compared, in order."""
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._events: asyncio.Queue[tuple[Run, KubernetesEvent]] = asyncio.Queue(_MOST_EVENTS)
        self._emitted: TTLCache[tuple[object, ...], float] = TTLCache(_MOST_EMITTED, 3600.0)

    def mark_run_changed(self, key: RunKey) -> None:
        """The run may have changed."""
        self._due.add(key)
        self._bell.set()

    def record_observed_status(self, key: RunKey, status: Mapping[str, Any]) -> None:
        """The status that the object has, as a watch shows it."""
        if (written := self._written.get(key)) is not None:
            written.shown = _digest(status)

    async def run(self) -> None:
        """Write what is due, for ever."""
        while True:
            await self._bell.wait()
            self._bell.clear()
            due, self._due = self._due, set()
            async with asyncio.TaskGroup() as group:
                for key in due:
                    group.create_task(self._maintain(key), name=f"write {key}")
            await asyncio.sleep(_PAUSE_S)

    async def _maintain(self, key: RunKey) -> None:
        """Write one run. An error is logged, and ends nothing else."""
        async with self._turns:
            run = self._registry.runs.get(key)
            if run is None:
                self._written.pop(key, None)
                return
            try:
                await self._write(run, self._written.setdefault(key, _Written()))
            except KubeError as error:
                warn("run.status_write_failed", run=str(key), error=str(error))
                self._metrics.wrote("run", failed=True)
            except Exception:
                crash("run.status_write_crashed", run=str(key))

    async def _write(self, run: Run, written: _Written) -> None:
        now = self._registry.clock()
        if run.prefers_earlier_status(now):
            return
        status = render_status(run, self._registry.cluster, now=now)
        overwritten = written.shown != written.stored and now - written.at >= _REPAIR_S
        changed = status != run.status or run.object is None or overwritten
        quiet = not overwritten and run.object is not None and _same(status, run.status)
        if changed and not (quiet and now - written.at < self._registry.report_interval_s):
            stored = await self._write_status(run, status_json(status))
            written.stored = written.shown = _digest(stored)
            written.at = now
            self._registry.status_written(run.key, status)
        if run.object is not None:
            await self._write_service(run, written)
            await self._write_acknowledged(run)
            self._steps.setdefault(run.key)

    # --- the run's object --------------------------------------------------------------------

    async def _write_status(self, run: Run, status: Body) -> Mapping[str, Any]:
        """Write the status; the object is created if there is none. Returns it as it is stored."""
        name, namespace = run.key.name, run.key.namespace
        try:
            stored = await self._patch_status(RUNS, name, status, namespace=namespace)
        except NotFound:
            body = {
                "apiVersion": names.API_VERSION,
                "kind": "CheckpointRun",
                "metadata": {"name": name, "namespace": namespace},
                "spec": {},
            }
            await self._create("run", self._client.create(RUNS, body, namespace=namespace))
            stored = await self._patch_status(RUNS, name, status, namespace=namespace)
        self._metrics.wrote("status")
        return stored.get("status") or {}

    async def _patch_status(self, of: Resource, name: str, status: Body, *, namespace: str) -> Body:
        """Replace the whole status of an object. Returns the object as it is stored."""
        patch = [{"op": "add", "path": "/status", "value": status}]
        return await self._client.patch(
            of, name, patch, namespace=namespace, kind=PatchType.JSON, subresource="status"
        )

    async def _write_service(self, run: Run, written: _Written) -> None:
        """The run's headless Service, once for each CheckpointRun."""
        owner = checkpoints.owner_of(run)
        if run.policy is None or written.service == owner["uid"]:
            return
        port = run.policy.peer_port
        body = service_body(run.key.namespace, run.key.name, port=port, owner=owner)
        namespace = run.key.namespace
        await self._create("service", self._client.create(SERVICES, body, namespace=namespace))
        written.service = owner["uid"]

    async def _write_acknowledged(self, run: Run) -> None:
        """Name the epoch that an acknowledgement means, so that it never means a later one."""
        body, report = run.object, run.report
        if body is None or report is None or not report.acknowledged:
            return
        if body.fresh_start in ("newest", names.FRESH_START_ALLOW):
            acknowledged = {names.FRESH_START_ANNOTATION: report.acknowledged}
            patch = {"metadata": {"annotations": acknowledged}}
            await self._client.patch(RUNS, run.key.name, patch, namespace=run.key.namespace)
            self._metrics.wrote("run")

    async def _create(self, what: str, creation: Coroutine[Any, Any, Body]) -> Body | None:
        """Create an object. None: there is one of its name."""
        try:
            made = await creation
        except Conflict:
            return None
        self._metrics.wrote(what)
        return made

    # --- Checkpoint objects ------------------------------------------------------------------

    async def write_checkpoints(self) -> None:
        """Write Checkpoint objects, one run after the other, for ever: a run may have a hundred,
        and no status is to wait for them."""
        while True:
            await asyncio.sleep(_PAUSE_S if not self._steps else 0.0)
            if not self._steps:
                continue
            key = next(iter(self._steps))
            del self._steps[key]
            run, written = self._registry.runs.get(key), self._written.get(key)
            if run is None or written is None or run.report is None:
                continue
            try:
                await self._write_checkpoints(run, written, self._registry.clock())
            except KubeError as error:
                warn("checkpoint.write_failed", run=str(key), error=str(error))
                self._metrics.wrote("checkpoint", failed=True)
            except Exception:
                crash("checkpoint.write_crashed", run=str(key))

    async def _write_checkpoints(self, run: Run, written: _Written, now: float) -> None:
        """Compare the objects with the report, if it names other steps than when they were compared
        last, or that was long ago: people may have deleted some."""
        report = run.report
        kept = hash((report.kept, report.certain)) if report is not None else 0
        if kept == written.kept and now - written.listed_at < LIST_S:
            return
        known, namespace = await self._listed(run.key), run.key.namespace
        due = checkpoints.due_changes(run, known)
        for checkpoint in due.made:
            body = checkpoints.body_of(run, checkpoint)
            creation = self._client.create(CHECKPOINTS, body, namespace=namespace)
            if await self._create("checkpoint", creation) is None:
                name = checkpoints.checkpoint_name(run, checkpoint)
                warn("checkpoint.name_conflict", run=str(run.key), checkpoint=name)
            else:
                await self._show_tiers(run, checkpoint, now)
        for checkpoint in due.moved:
            await self._show_tiers(run, checkpoint, now)
        for name in due.gone:
            with contextlib.suppress(NotFound):
                await self._client.delete(CHECKPOINTS, name, namespace=namespace)
                info("checkpoint.deleted", run=str(run.key), checkpoint=name)
        written.kept, written.listed_at = kept, now

    async def _listed(self, key: RunKey) -> dict[str, checkpoints.Tiers]:
        labels = f"{names.RUN_KEY_LABEL}={key.name},{checkpoints.MANAGED_BY}={checkpoints.MANAGER}"
        listed = self._client.list(CHECKPOINTS, namespace=key.namespace, labels=labels)
        return {
            str(body["metadata"]["name"]): checkpoints.parse_tiers(body) async for body in listed
        }

    async def _show_tiers(self, run: Run, checkpoint: KeptStep, now: float) -> None:
        """Write the object's status. One that is deleted meanwhile is made again later."""
        name = checkpoints.checkpoint_name(run, checkpoint)
        status = checkpoints.status_of(checkpoint, now=now)
        with contextlib.suppress(NotFound):
            await self._patch_status(CHECKPOINTS, name, status, namespace=run.key.namespace)
            self._metrics.wrote("checkpoint")

    # --- Events ------------------------------------------------------------------------------

    def emit(self, run: Run, event: KubernetesEvent) -> None:
        """Write the event, unless the same one was written within its period."""
        key, now = (run.key, event.reason, event.topic, event.about), self._registry.clock()
        if now - self._emitted.get(key, -event.period_s) < event.period_s:
            return
        self._emitted[key] = now
        info("run.event_recorded", run=str(run.key), reason=event.reason, message=event.message)
        try:
            self._events.put_nowait((run, event))
        except asyncio.QueueFull:
            warn("run.event_dropped", run=str(run.key), reason=event.reason)

    async def write_events(self) -> None:
        """Write what is told, for ever. An event that cannot be written is dropped: the status says
        the same."""
        while True:
            run, event = await self._events.get()
            uid = run.object.uid if run.object is not None else ""
            name, now = secrets.token_hex(8), self._registry.clock()
            for body in event_bodies(event, run.key, job=run.job, run_uid=uid, name=name, now=now):
                await self._write_event(body, run.key)

    async def _write_event(self, body: Body, key: RunKey) -> None:
        try:
            await self._client.create(EVENTS, body, namespace=key.namespace)
            self._metrics.wrote("event")
        except KubeError as error:
            warn("run.event_write_failed", run=str(key), error=str(error))
            self._metrics.wrote("event", failed=True)


def _same(now: RunStatus, before: RunStatus) -> bool:
    """Whether nothing but numbers differs."""
    return all(
        getattr(now, name) == getattr(before, name)
        for name in ("phase", "start", "job", "policy", "protected", "warnings", "restarts")
    ) and [
        (condition.type, condition.status, condition.reason) for condition in now.conditions
    ] == [(condition.type, condition.status, condition.reason) for condition in before.conditions]


def _digest(status: object) -> bytes:
    """A digest that does not depend on the order of fields, which the server may change."""
    encoded = msgspec.json.encode(status, order="deterministic")
    return hashlib.blake2b(encoded, digest_size=16).digest()
