"""Writes CheckpointRun.status: its newest state, when it is time, and only if it has changed.

One write replaces the whole status (a JSON patch). So it does not depend on the former status, and
a lost write is made good by the next. A run without an object gets one. What others write into the
status is overwritten (`mends`).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from keepstep_operator import names
from keepstep_operator.api.model import RunKey
from keepstep_operator.api.run import RunStatus, as_json
from keepstep_operator.bodies import Body
from keepstep_operator.journal import crash, warn
from keepstep_operator.kube import RUNS, Client, Conflict, KubeError, NotFound, PatchType
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.ratelimit import Pacer
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.reconcile.state.run_view import view_of
from keepstep_operator.reconcile.status.render import render
from keepstep_operator.reconcile.writers.mends import Mends

_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class _Written:
    """Digests of a status: as it was sent, and as the API server then stored it."""

    sent: bytes
    stored: bytes


class StatusWriter:
    """Writes the statuses of runs that are `mark`ed, in a task, `run`."""

    def __init__(
        self,
        registry: Registry,
        client: Client,
        *,
        metrics: Metrics,
        clock: Callable[[], float],
        pacer: Pacer[RunKey] | None = None,
    ) -> None:
        self._registry = registry
        self._client = client
        self._metrics = metrics
        self._clock = clock
        self._pacer = pacer or Pacer()
        self._written: dict[RunKey, _Written] = {}
        self._shown: dict[RunKey, bytes] = {}
        self._mends = Mends[RunKey](self._mend)
        self._bell = asyncio.Event()
        self._sleeps_until = math.inf

    def mark(self, run: RunKey, *, soon: bool = False) -> None:
        """The status of this run may have changed. `soon`: see `Pacer.mark`."""
        if self._pacer.mark(run, at=self._clock(), soon=soon) < self._sleeps_until:
            self._bell.set()

    def shown(self, run: RunKey, status: Mapping[str, Any]) -> None:
        """The status that the object has, as a watch shows it."""
        self._shown[run] = _digest(status)
        self._compare(run)

    def forget(self, run: RunKey) -> None:
        """The run's object is gone, and with it what was written there. A run that stays is marked
        again; one that does not must not take part of the writes for ever."""
        self._pacer.forget(run)
        self._written.pop(run, None)
        self._shown.pop(run, None)
        self._mends.forget(run)

    def _compare(self, run: RunKey) -> None:
        written, shown = self._written.get(run), self._shown.get(run)
        if written is not None and shown is not None:
            self._mends.compared(run, same=shown == written.stored)

    def _mend(self, run: RunKey) -> None:
        self.forget(run)
        self.mark(run)

    async def run(self) -> None:
        """Write what is due, for ever."""
        while True:
            await self._wait()
            async with asyncio.TaskGroup() as group:
                for key in self._pacer.take(at=self._clock(), most=_AT_ONCE):
                    group.create_task(self._write(key), name=f"status of {key}")

    async def _wait(self) -> None:
        """Wait until a write is due."""
        self._bell.clear()
        due = self._pacer.next_at()
        self._sleeps_until = math.inf if due is None else due
        timeout_s = None if due is None else max(0.0, due - self._clock())
        try:
            async with asyncio.timeout(timeout_s):
                await self._bell.wait()
        except TimeoutError:
            return

    async def _write(self, run: RunKey) -> None:
        """Write one run's status. After any error it is tried again later."""
        try:
            await self._write_if_changed(run)
            known = self._registry.runs.get(run)
            if known is None:
                self.forget(run)  # also if it ended during the write
            else:
                self._pacer.done(run, rests=known.finished_at is not None)
        except KubeError as error:
            warn("status not written", run=str(run), reason=str(error))
            self._metrics.wrote("status", failed=True)
            self._pacer.failed(run, at=self._clock())
        except Exception:
            crash("status not written", run=str(run))
            self._metrics.left_out("status")
            self._pacer.failed(run, at=self._clock())

    async def _write_if_changed(self, run: RunKey) -> None:
        if self._registry.waits(run, at=self._clock()):
            return
        status = status_of(self._registry, run, at=self._clock())
        if status is None:
            self.forget(run)
            return
        body = as_json(status)
        sent, written = _digest(body), self._written.get(run)
        if written is not None and written.sent == sent:
            return
        stored = await self._patch_or_create(run, body)
        self._written[run] = _Written(sent, _digest(stored.get("status")))
        self._compare(run)  # the watch may have been faster than the answer

    async def _patch_or_create(self, run: RunKey, body: Body) -> Body:
        try:
            return await self._patch(run, body)
        except NotFound:
            await self._create(run)
            return await self._patch(run, body)

    async def _patch(self, run: RunKey, body: Body) -> Body:
        stored = await self._client.patch(
            RUNS,
            run.name,
            [{"op": "add", "path": "/status", "value": body}],
            namespace=run.namespace,
            kind=PatchType.JSON,
            subresource="status",
        )
        self._metrics.wrote("status")
        return stored

    async def _create(self, run: RunKey) -> None:
        body = {
            "apiVersion": names.API_VERSION,
            "kind": "CheckpointRun",
            "metadata": {"name": run.name, "namespace": run.namespace},
            "spec": {},
        }
        try:
            await self._client.create(RUNS, body, namespace=run.namespace)
            self._metrics.wrote("run")
        except Conflict:
            return  # another client was faster


def _digest(status: object) -> bytes:
    """A digest that does not depend on the order of fields, which the server may change."""
    encoded = msgspec.json.encode(status, order="deterministic")
    return hashlib.blake2b(encoded, digest_size=16).digest()


def status_of(registry: Registry, key: RunKey, *, at: float) -> RunStatus | None:
    """The status to write now; None if nothing is left of the run."""
    run = registry.runs.get(key)
    if run is None or run.is_empty:
        return None
    status = render(view_of(run), at=at)
    run.note_status(status)
    return status
