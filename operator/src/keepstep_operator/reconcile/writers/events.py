"""Kubernetes Events on the root job and on the run, written seldom and without repetition.

`kubectl describe` of either shows them. An Event that is repeated word for word becomes a series.
An Event that cannot be written in three tries is dropped, because the run's status says the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from keepstep_operator import names
from keepstep_operator.api.model import RunKey
from keepstep_operator.api.run import cut
from keepstep_operator.bodies import Body
from keepstep_operator.journal import crash, say, warn
from keepstep_operator.kube import EVENTS, Client, Denied, KubeError, NotFound, Rejected
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.ratelimit import Throttle
from keepstep_operator.reconcile.state.actions import EmitEvent

CONTROLLER: Final = "keepstep.dev/reconcile"
_ACTION: Final = "Reconcile"
_LONGEST_MESSAGE: Final = 1000
_LONGEST_NAME: Final = 200
_WAITING: Final = 1000
_REMEMBERED: Final = 10_000
_SERIES_S: Final = 3000.0
"""How long a series is continued. The API server keeps an Event for an hour after its last
change."""
_TRIES: Final = 3
_PAUSE_S: Final = 2.0


@dataclass(frozen=True)
class _Said:
    """An Event that was written: its name, when it was last written, and how often."""

    name: str
    at: float
    count: int = 1


class EventWriter:
    """Writes the events given to `tell`, in a task, `run`. `uid_of`: the uid of a run's object; ''
    if there is none."""

    def __init__(
        self,
        client: Client,
        *,
        uid_of: Callable[[RunKey], str],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._uid_of = uid_of
        self._metrics = metrics
        self._clock = clock
        self._throttle = Throttle()
        self._waiting: asyncio.Queue[EmitEvent] = asyncio.Queue(_WAITING)
        self._said: dict[tuple[str, str, str], _Said] = {}

    def tell(self, event: EmitEvent) -> None:
        """Write the event, unless the same one was written lately, or too many were."""
        now, thing = self._clock(), (event.reason, event.topic)
        if not self._throttle.allows(event.run, thing, period_s=event.period_s, at=now):
            return
        say("event", run=str(event.run), reason=event.reason, message=event.message)
        try:
            self._waiting.put_nowait(event)
        except asyncio.QueueFull:
            warn("event dropped", run=str(event.run), reason=event.reason)

    async def run(self) -> None:
        """Write what is told, for ever."""
        while True:
            await self._take(await self._waiting.get())

    async def _take(self, event: EmitEvent) -> None:
        at = self._clock()
        try:
            for body in event_bodies(event, run_uid=self._uid_of(event.run), at=at):
                await self._write(event, body)
        except Exception:  # one odd run must not end the process
            crash("event not written", run=str(event.run))
            self._metrics.left_out("events")

    async def _write(self, event: EmitEvent, body: Body) -> None:
        for attempt in range(1, _TRIES + 1):
            if await self._try(event, body):
                return
            await asyncio.sleep(_PAUSE_S * attempt)
        warn("event dropped", run=str(event.run), reason=event.reason)

    async def _try(self, event: EmitEvent, body: Body) -> bool:
        """Returns whether it is settled: the event is written, or will never be accepted."""
        try:
            await self._send(event.run.namespace, body)
        except KubeError as error:
            warn("event not written", run=str(event.run), reason=str(error))
            self._metrics.wrote("event", failed=True)
            return isinstance(error, NotFound | Denied | Rejected)
        self._metrics.wrote("event")
        return True

    async def _send(self, namespace: str, body: Body) -> None:
        """Write a new Event, or count one more of a series. Raises KubeError."""
        key = body["regarding"]["uid"], body["reason"], body["note"]
        now, said = self._clock(), self._said.pop(key, None)
        if said is not None and now - said.at < _SERIES_S:
            series = {"count": said.count + 1, "lastObservedTime": body["eventTime"]}
            with contextlib.suppress(NotFound):
                patch = {"series": series}
                await self._client.patch(EVENTS, said.name, patch, namespace=namespace)
                self._remember(key, _Said(said.name, now, said.count + 1))
                return
        await self._client.create(EVENTS, body, namespace=namespace)
        self._remember(key, _Said(body["metadata"]["name"], now))

    def _remember(self, key: tuple[str, str, str], said: _Said) -> None:
        self._said[key] = said
        while len(self._said) > _REMEMBERED:
            del self._said[next(iter(self._said))]


def event_bodies(event: EmitEvent, *, run_uid: str, at: float) -> Iterator[Body]:
    """The Event on the job (or what else it is about) and the one on the run. Each names the other
    object. `run_uid` '': the run has no object (yet)."""
    run: Body = {
        "apiVersion": names.API_VERSION,
        "kind": "CheckpointRun",
        "name": event.run.name,
        "namespace": event.run.namespace,
        "uid": run_uid,
    }
    if event.about is None:
        yield _body(event, run, None, at=at)
        return
    about: Body = {
        "apiVersion": event.about.api_version,
        "kind": event.about.kind,
        "name": event.about.name,
        "namespace": event.run.namespace,
        "uid": event.about.uid,
    }
    yield _body(event, about, run if run_uid else None, at=at)
    if run_uid:
        yield _body(event, run, about, at=at)


def _body(event: EmitEvent, regarding: Body, related: Body | None, *, at: float) -> Body:
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {
            "name": f"{regarding['name'][:_LONGEST_NAME]}.{secrets.token_hex(8)}",
            "namespace": event.run.namespace,
        },
        "regarding": regarding,
        **({"related": related} if related else {}),
        "eventTime": datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "type": "Warning" if event.warning else "Normal",
        "reason": event.reason,
        "action": _ACTION,
        "note": cut(event.message, longest=_LONGEST_MESSAGE),
        "reportingController": CONTROLLER,
        "reportingInstance": socket.gethostname()[:128],
    }
